"""States as bytes: they go on exactly as the original, and damaged ones are refused, whatever the damage.

Damage that leaves the checksum wrong must be refused. Damage under a checksum that was made anew, as only an author
can make it, must be refused or give a state that works: never a crash, a hang, or memory that the data do not back.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import levattn
import strategies
from damage import NUMBERS, mutated
from levattn import StreamingRowSample, StreamingUniversalSet
from levattn.sketch import OSNAP, SRHT, CountSketch, Sketch, SketchedRows
from levattn.states import Moments, SoftmaxState, TokenState
from strategies import STORAGE, Cauchy, Float, examples, stores
from streams import BLOCK

State = StreamingUniversalSet | StreamingRowSample | Moments | SketchedRows | SoftmaxState | TokenState

MUTATIONS = 100_000  # that break the checksum
SEALED = strategies.trials(30_000)  # under a checksum made anew
WORDS = ["null", "true", "[]", "{}", '""', '"x"', "NaN", "-Infinity", "[[[[", "[1,2,3]"]


def gaussian(n: int, d: int = 2, seed: int = 0) -> Float:
    return np.random.default_rng([seed, n]).standard_normal((n, d))


def ill_conditioned(n: int, seed: int = 0) -> Float:
    return gaussian(n, 2, seed) @ np.array([[1, 1], [0, 1e-9]])


def one(K: Any, epsilon: float = 0.5, **options: Any) -> StreamingUniversalSet:
    payload = options.pop("payload", None)
    return StreamingUniversalSet(epsilon, **options).update(K, payload=payload)


STATES: dict[str, Callable[[], State]] = {
    "empty": lambda: StreamingUniversalSet(0.5),
    "no-rows": lambda: one(gaussian(0)),
    "few-rows": lambda: one(gaussian(3)),
    "batch-payload": lambda: one(gaussian(6).reshape(2, 3, 2), row_start=5, payload=np.ones((2, 3), np.float32)),
    "no-matrices": lambda: one(np.ones((0, 3, 2))),
    "blocks": lambda: one(gaussian(2 * BLOCK + 3)),
    "limits": lambda: one(gaussian(BLOCK + 1), 1e-30),
    "wide": lambda: one(ill_conditioned(BLOCK + 2)),
    "merged": lambda: one(gaussian(3)).merge(one(gaussian(2))),
    "float32": lambda: one(gaussian(BLOCK + 2).astype(np.float32)),
    "float16": lambda: one(gaussian(5).astype(np.float16)),
    "scaled": lambda: one(gaussian(BLOCK + 2) * [1, 1e-200]),
    "lift": lambda: one(gaussian(BLOCK + 3), f=4),
    "block": lambda: one(gaussian(BLOCK + 2), 1.0, f=levattn.Huber(2.0)),
    "moments": lambda: Moments(2).update(gaussian(3)),
    "moments-empty": lambda: Moments(2),
    "moments-batch": lambda: Moments(2, (2,)).update(gaussian(2 * BLOCK + 2).reshape(2, -1, 2)),
    "moments-wide": lambda: Moments(2).update(ill_conditioned(BLOCK + 2)),
    "moments-weighted": lambda: Moments(2).update(gaussian(3), weights=[0.5, 2.0, 0.0]),
    "moments-diagonal": lambda: Moments(2, diagonal=True).update(gaussian(3), weights=[0.5, 2.0, 0.0]),
    "moments-decayed": lambda: Moments(2, (2,), decay=[0.5, 0.9]).update(gaussian(6).reshape(2, 3, 2)),
    "tokens": lambda: TokenState(
        *(Moments(2, (3,), diagonal=True).update(gaussian(6).reshape(3, 2, 2)) for _ in "An")
    ),
    "tokens-one": lambda: TokenState(None, Moments(2, diagonal=True, decay=0.5)),
    "moments-merged": lambda: Moments(2).update(gaussian(3)).merge(Moments(2).update(gaussian(5))),
    "softmax": lambda: SoftmaxState(2, 3).update(gaussian(5), gaussian(5, 3)),
    "softmax-empty": lambda: SoftmaxState(2, 3),
    "softmax-batch": lambda: SoftmaxState(2, 2, (3,)).update(
        gaussian(6).reshape(3, 2, 2), gaussian(6).reshape(3, 2, 2)
    ),
    "sample": lambda: StreamingRowSample(5, rng=2**60).update(gaussian(2 * BLOCK + 3)),
    "sample-empty": lambda: StreamingRowSample(distortion=0.5, row_start=7),
    "sample-merged": lambda: (
        StreamingRowSample(distortion=0.9, ridge=2.0)
        .update(gaussian(3).astype(np.float16), weights=[0.5, 2.0, 0.0])
        .merge(StreamingRowSample(distortion=0.9, ridge=2.0, row_start=9).update(gaussian(4).astype(np.float16)))
    ),
    "sketch": lambda: SketchedRows(Sketch(CountSketch(4), 7), 2).update(gaussian(5)),
    "sketch-osnap": lambda: SketchedRows(Sketch(OSNAP(6, 2)), 2, (2,)).update(gaussian(6).reshape(2, 3, 2), 2**40),
    "sketch-srht": lambda: SketchedRows(Sketch(SRHT(4, 8), 2**60), 2).update(gaussian(9)),
}
KINDS: dict[str, type[State]] = {
    "moments": Moments,
    "sample": StreamingRowSample,
    "sketch": SketchedRows,
    "softmax": SoftmaxState,
    "tokens": TokenState,
}
MOST_ROWS = 2**53  # of a state: sums of many such numbers fit in 64 bits


@cache
def saved(name: str) -> bytes:
    return STATES[name]().to_bytes()


def kind_of(name: str) -> type[State]:
    return KINDS.get(name.partition("-")[0], StreamingUniversalSet)


# -- a state that was saved goes on -----------------------------------------------------------------


@pytest.mark.parametrize("name", STATES)
def test_the_bytes_hold_the_state(name: str) -> None:
    again = kind_of(name).from_bytes(saved(name))
    assert again.to_bytes() == saved(name)
    assert STATES[name]().to_bytes() == saved(name)  # nothing of them depends on time or place
    assert kind_of(name).from_bytes(memoryview(saved(name))).to_bytes() == saved(name)
    data = bytearray(saved(name))
    again = kind_of(name).from_bytes(data)
    data[:] = bytes(len(data))  # it shares nothing with them
    assert again.to_bytes() == saved(name)


@pytest.mark.parametrize("name", STATES)
def test_loaded_and_copied_states_go_on_and_share_nothing(name: str) -> None:
    state = STATES[name]()
    loaded, copied = kind_of(name).from_bytes(saved(name)), state.copy()
    for other in (loaded, copied):
        use(other)
        assert state.to_bytes() == saved(name)
    use(state)
    assert loaded.to_bytes() == copied.to_bytes() == state.to_bytes()


def awkward(n: int) -> Float:
    """Keys whose condition number and rank change on the way."""
    K = gaussian(n, 3) * np.clip(np.abs(np.random.default_rng(1).standard_cauchy((n, 1))), 0.01, 1e3)
    K[: BLOCK + 100, 2] = 0
    K[3000] *= 1e8
    return K


FUNCTIONS = (2, 4, levattn.Huber(0.5), levattn.Tukey(), levattn.L1L2(), levattn.Fair(2.0), levattn.Power(0.5), 1)


@pytest.mark.parametrize("f", FUNCTIONS, ids=str)
@given(ends=st.lists(st.integers(0, 5000), min_size=1, max_size=4), with_payload=st.booleans())
@examples(4)
def test_a_set_goes_on_with_the_same_bits(f: Any, ends: list[int], with_payload: bool) -> None:
    K = awkward(5000)
    payload = np.arange(5000) if with_payload else None
    straight, resumed = (StreamingUniversalSet(0.2, f=f, row_start=7) for _ in range(2))
    for low, high in pairwise([0, *sorted(ends), 5000]):
        beside = None if payload is None else payload[low:high]
        straight.update(K[low:high], payload=beside)
        resumed = StreamingUniversalSet.from_bytes(resumed.to_bytes()).update(K[low:high], payload=beside)
        assert resumed.to_bytes() == straight.to_bytes()
    resumed = StreamingUniversalSet.from_bytes(resumed.to_bytes())
    mine, theirs = resumed.result(), straight.result()
    assert (resumed.n, resumed.held, mine.f, mine.rank) == (straight.n, straight.held, theirs.f, theirs.rank)
    for a, b in ((mine.indices, theirs.indices), (mine.member_scores, theirs.member_scores), (mine.keys, theirs.keys)):
        assert a.tobytes() == b.tobytes()
    other = StreamingUniversalSet(0.2, f=f, row_start=10_000).update(
        K[:50], payload=None if payload is None else payload[:50]
    )
    assert resumed.merge(other).to_bytes() == straight.merge(other).to_bytes()


@stores()
def test_every_storage_type_goes_on(storage: str) -> None:
    stored = STORAGE[storage](awkward(5000).clip(-1e4, 1e4))
    straight = one(stored, 0.1)
    resumed = StreamingUniversalSet.from_bytes(one(stored[:3001, :], 0.1).to_bytes()).update(stored[3001:, :])
    assert resumed.to_bytes() == straight.to_bytes()
    assert resumed.result().keys.dtype == straight.result().keys.dtype


def test_the_size_is_that_of_the_arrays() -> None:
    # d = 64, ε = 0.05: sums of 64² numbers for each level, at most 2d/ε keys, and less than a block that waits
    K = np.random.default_rng(0).standard_normal((100_000, 64)).astype(np.float32)
    K[::50] *= 100
    state = one(K, 0.05)
    data = state.to_bytes()
    header = header_of(state)
    payload = sum(np.dtype(dtype).itemsize * int(np.prod(shape)) for _, dtype, shape in header["arrays"])
    assert len(data) <= 1.1 * payload
    keys = (2 * 64 / 0.05 + BLOCK) * (64 * 4 + 8)
    levels = np.log2(len(K) / BLOCK) + 3
    assert payload <= keys + levels * 64 * 64 * 8 * 1.1


def test_own_functions_cannot_be_saved() -> None:
    class Mine(levattn.Huber):
        """One of the library's names, but not its function."""

    Mine.__name__ = "Huber"
    for f in (Cauchy(), Mine()):
        state = StreamingUniversalSet(0.5, f=f).update(gaussian(5))
        with pytest.raises(TypeError, match=r"\bf\b") as caught:
            state.to_bytes()
        assert "functions of levattn" in str(caught.value)
        assert state.update(gaussian(5)).n == 10


# -- files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one", *KINDS])
def test_every_state_is_saved_and_loaded(tmp_path: Path, name: str) -> None:
    made = {"one": lambda: one(gaussian(9)), "tokens": STATES["tokens-one"]}.get(name, STATES.get(name))
    state, path = made(), tmp_path / "a.state"
    state.save(path)
    again = type(state).load(path)
    assert type(again) is type(state)
    assert again.to_bytes() == path.read_bytes() == state.to_bytes()
    np.save(tmp_path / "keys.npy", gaussian(9))
    text = re.escape(
        f"{tmp_path / 'keys.npy'} does not begin as a state of levattn does; expected a file that save wrote"
    )
    with pytest.raises(ValueError, match=text):
        type(state).load(str(tmp_path / "keys.npy"))
    with pytest.raises(ValueError, match=r"^data does not begin .* expected the bytes that to_bytes returned"):
        type(state).from_bytes((tmp_path / "keys.npy").read_bytes())


def test_a_file_holds_the_bytes(tmp_path: Path) -> None:
    state = one(gaussian(5000))
    for path in (tmp_path / "state.levattn", str(tmp_path / "again")):
        state.save(path)
        assert Path(path).read_bytes() == state.to_bytes()
        assert StreamingUniversalSet.load(path).to_bytes() == state.to_bytes()
    state.update(gaussian(7)).save(tmp_path / "again")  # writes over the other
    assert StreamingUniversalSet.load(tmp_path / "again").n == 5007
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "state.levattn"]


def test_files_that_hold_no_state_are_named(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("short", saved("blocks")[:-1]), ("other", saved("moments"))):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            StreamingUniversalSet.load(path)
    with pytest.raises(FileNotFoundError):
        StreamingUniversalSet.load(tmp_path / "none")


NO_PATHS = ((None, TypeError, "NoneType"), (b"keys", TypeError, "bytes"), (3, TypeError, "int"), ("", ValueError, ""))


@pytest.mark.parametrize(("path", "error", "kind"), NO_PATHS)
def test_what_is_no_path_is_named_by_all_that_read_and_write_states(path: Any, error: Any, kind: str) -> None:
    state = StreamingUniversalSet(0.2).update(gaussian(7))
    for call in (
        state.save,
        StreamingUniversalSet.load,
        state.result().save,
        levattn.universal_set(np.eye(3), 0.5).save,
    ):
        with pytest.raises(error, match=f"path is .*{kind}.*; expected the path of a file"):
            call(path)


# -- damage -------------------------------------------------------------------------------------------


def refused(kind: type[State], data: Any, *words: str) -> None:
    """It is refused by an error that says so, without a warning."""
    with pytest.raises((ValueError, TypeError)) as caught:
        kind.from_bytes(data)
    assert "data" in str(caught.value)
    for word in words:
        assert re.search(word, str(caught.value)), f"{word!r} is not in: {caught.value}"


@pytest.mark.parametrize("data", [None, "LEVATTN", 5, [76], np.zeros(3)], ids=repr)
def test_what_is_no_bytes(data: Any) -> None:
    for kind in (StreamingUniversalSet, Moments):
        with pytest.raises(TypeError, match=r"\bdata\b.*expected bytes"):
            kind.from_bytes(data)


@pytest.mark.parametrize("name", ["few-rows", "moments"])
def test_every_truncation_and_every_bit(name: str) -> None:
    data = saved(name)
    for size in range(len(data)):
        refused(kind_of(name), data[:size])
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        refused(kind_of(name), flipped)
    refused(kind_of(name), data + b"\0")
    refused(kind_of(name), data + data)


@pytest.mark.parametrize("name", STATES)
def test_mutations_are_refused(name: str) -> None:
    chance = random.Random(name)
    data, kind = saved(name), kind_of(name)
    outcomes: Counter[str] = Counter()
    for _ in range(MUTATIONS // len(STATES) + 1):
        changed = mutated(data, chance)
        try:
            state = kind.from_bytes(changed)
        except (ValueError, TypeError):
            outcomes["refused"] += 1
        else:
            assert changed == data or state.to_bytes() == data
            outcomes["the same"] += 1
    assert outcomes["refused"] > 0.98 * MUTATIONS / len(STATES)


def test_states_of_other_kinds() -> None:
    for name in STATES:
        other = StreamingUniversalSet if kind_of(name) is Moments else Moments
        refused(other, saved(name), kind_of(name).__name__, f"expected a {other.__name__}")


# -- damage under a checksum made anew ------------------------------------------------------------------


def opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and arrays of a state."""
    end = 16 + int.from_bytes(data[8:16], "little")
    return json.loads(data[16:end]), data[end:-32]


def sealed(header: Any, body: bytes, size: int | None = None) -> bytes:
    """A state of this header (JSON, or its bytes) and arrays, with the checksum that it should have."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    whole = b"LEVATTN\0" + (len(text) if size is None else size).to_bytes(8, "little") + text + body
    return whole + hashlib.blake2b(whole, digest_size=32).digest()


def arrays_of(name: str) -> dict[str, Any]:
    header, body = opened(saved(name))
    found, at = {}, 0
    for key, dtype, shape in header["arrays"]:
        found[key] = np.frombuffer(body, dtype, int(np.prod(shape)), at).reshape(shape).copy()
        at += found[key].nbytes
    return found


def crafted(name: str, arrays: dict[str, Any] | None = None, **fields: Any) -> bytes:
    """A state with other fields and arrays: new ones, others, or none where the value is None."""
    header, _ = opened(saved(name))
    held = {key: value for key, value in (arrays_of(name) | (arrays or {})).items() if value is not None}
    listed = [[key, value.dtype.str, list(value.shape)] for key, value in held.items()]
    header |= {"fields": header["fields"] | fields, "arrays": listed}
    return sealed(header, b"".join(value.tobytes() for value in held.values()))


def test_the_seal_of_these_tests_is_that_of_the_library() -> None:
    for name in STATES:
        assert sealed(*opened(saved(name))) == saved(name)
        assert kind_of(name).from_bytes(crafted(name)).to_bytes() == saved(name)


HUGE = 2**60


def rows_up_to(rows: int) -> dict[str, Any]:
    """The fields of a stream of so many rows and three."""
    return {"spans": [[0, rows + 3]], "next_row": rows + 3}


# state -> field -> what it cannot be
BAD_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "few-rows": {
        "epsilon": (0, 2, -1, None, "0.5", True, [0.5]),
        "f": (
            *(None, [], "Power", ["Power"], ["Cubic", {"p": 3}], ["Power", {}], ["Power", {"p": 3}], ["Power", 2]),
            *(["Power", {"p": None}], ["Power", {"q": 2}], ["Softmax", {"radius": 1}], [["Power"], {"p": 2}]),
            *(["Power", {"p": value}] for value in (4, 2000, 2e5, 1e300, float(HUGE))),
            ["Huber", {"delta": 1.0}],
        ),
        "d": (0, -1, 1, 3, 2.0, "2", None, 2**28, HUGE, 10**30),
        "batch": ([2], [0], [-1], [2**16], [HUGE], [HUGE, 0], [HUGE] * 20, [1.0], 2, None),
        "format": ("float32", "bfloat16", "object", None, 8, []),
        "beside": (1, -1, HUGE, None, 0.0),
        "spans": (
            *([[3, 0]], [[0, 0]], [[-3, 0]], [[0, 2], [1, 3]], [[0, 3, 4]], [[0.0, 3.0]], [0, 3], None, 3),
            *([[0, HUGE]], [[0, 10**30]], [[2, 3], [0, 1]]),
        ),
        "next_row": (-1, 0, 2, 10**30, 3.0, None),
    },
    "blocks": {
        "blocks": (0, 1, 3, -2, HUGE, 2.0, None),
        "terms": ([], ["0"], ["2"], ["1", "0"], ["merged"], ["x"], [1], None, HUGE),
    },
    "block": {
        "f": (["Power", {"p": 2}],),
        "epsilon": (0.5, 1e-3, 1e-5),
        "merged": (-1, BLOCK + 3, 2**53, HUGE, 1.0, None),
        "blocks": (2, 2**42, 2**52, 2**53, 2**63),
    },
    "empty": {"begun": (True,)},
    "sketch": {
        "d": (0, 3, 2**40, HUGE, 10**30, 2.0, None),
        "batch": ([2], [0], [2**40], [HUGE, HUGE], [-1], 1, None),
        "parameters": tuple({"size": value} for value in (0, 5, 2**31 - 1, HUGE, 10**30, None)),
        "next_row": (-1, 2**62 + 1, 10**30, 1.0, None),
        "count": (-1, 2**62 + 1, 10**30, None),
        "seed": (-1, 2**64, "1", 0.5),
    },
    "sample": {
        "options": (
            *(None, [], {}, {"size": 5, "distortion": 0.5, "failure": 0.01}, {"size": 0, "failure": 0.01}),
            {"size": 5, "distortion": None, "failure": 1.0},
        ),
        "root": (-1.0, None, "1", True),
        "seed": (-1, 2**64, 0.5, None),
        "d": (0, 3, 2**40, HUGE, None, 2.0),
        "format": ("float32", "x", None),
        "limit": (-1, 0.5, None),
        "most": (0.0, -1.0, None, "1"),
        "blocks": (1, 3, HUGE, None),
        "spans": ([[0, 3]], [[1, 0]], None),
        "next_row": (0, 2**62, None, 1.0),
    },
    "sample-empty": {"begun": (True,)},
    "moments": {
        "d": (3, HUGE, None, 0),
        "batch": ([2], [HUGE], [0]),
        "format": ("float32", "x"),
        "blocks": (1,),
        "terms": (["0"], 5),
    },
}
# and changes of several fields
BAD_TOGETHER: list[tuple[str, dict[str, Any]]] = [
    *(("block", {"blocks": rows // BLOCK} | rows_up_to(rows)) for rows in (2**54, 2**61)),
    *(("sketch", {"distribution": "SRHT", "parameters": {"size": 4, "block": 2**k}}) for k in (29, 31, 53, 62, 63)),
    ("few-rows", {"begun": True, "format": None}),
]


def test_states_of_very_many_rows_go_on() -> None:
    most = MOST_ROWS // 4
    counted = {"blocks": most // BLOCK, "merged": most} | rows_up_to(most)
    state = StreamingUniversalSet.from_bytes(crafted("block", **counted))
    use(state)
    assert state.n == most + 3 + BLOCK + 3
    for name in ("moments", "moments-diagonal"):
        moments = Moments.from_bytes(crafted(name, {"count": np.array(most)}))
        use(moments.merge(moments))
        assert moments.count == 2 * most + 3
    sketched = SketchedRows.from_bytes(crafted("sketch", next_row=2**62 - 1))
    use(sketched)
    assert sketched.next_row == 2**62


def test_rows_end_where_their_numbers_do() -> None:
    state = StreamingUniversalSet(0.5, row_start=2**62 - 4).update(gaussian(3))
    saved_before = state.to_bytes()
    assert StreamingUniversalSet.from_bytes(saved_before).to_bytes() == saved_before
    for call in (state.update, lambda K: state.merge(one(K, row_start=2**62 - 1))):
        with pytest.raises(ValueError, match=r"rows 4611686018427387903 to \d+ come; expected numbers below 2\*\*62"):
            call(gaussian(1))
        assert state.to_bytes() == saved_before


def refused_lean(kind: type[State], data: bytes) -> None:
    """It is refused, and no memory is taken that only the header speaks of."""
    tracemalloc.start()
    try:
        refused(kind, data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in BAD_FIELDS for field in BAD_FIELDS[name]])
def test_bad_fields_are_refused(name: str, field: str) -> None:
    for value in BAD_FIELDS[name][field]:
        refused_lean(kind_of(name), crafted(name, **{field: value}))


@pytest.mark.parametrize(("name", "change"), BAD_TOGETHER)
def test_fields_that_do_not_go_together_are_refused(name: str, change: dict[str, Any]) -> None:
    refused_lean(kind_of(name), crafted(name, **change))


def without_rows(d: int) -> dict[str, Any]:
    """Arrays of no bytes that agree with a header which claims many columns."""
    index = np.zeros((1, 0), np.int64)
    return {"tail.keys": np.zeros((1, 0, d)), "tail.beside0": index, "held.keys": np.zeros((0, d))}


@pytest.mark.parametrize("d", [2**24, 2**40, 2**50])
def test_columns_that_no_array_backs_are_refused(d: int) -> None:
    refused_lean(StreamingUniversalSet, crafted("no-rows", without_rows(d), d=d))
    refused_lean(Moments, crafted("moments-empty", d=d))
    refused_lean(Moments, crafted("moments-empty", {"tail": np.zeros((1, 0, d))}, d=d, format="float64"))
    for p in (4.0, 64.0):
        refused_lean(StreamingUniversalSet, crafted("no-rows", without_rows(d), d=d, f=["Power", {"p": p}]))


def test_products_and_groups_that_no_array_backs_are_refused() -> None:
    for d, p in ((3000, 4.0), (300, 6.0), (20, 64.0)):
        refused_lean(StreamingUniversalSet, crafted("no-rows", without_rows(d), d=d, f=["Power", {"p": p}]))
    for epsilon in (3e-5, 1e-4, 1e-3):
        refused_lean(StreamingUniversalSet, crafted("block", epsilon=epsilon))


@pytest.mark.parametrize("level", ["-1", "00", "01", "64", str(10**6), str(10**9), "1_0", " 1", "+1", "1.0", ""])
def test_levels_that_are_none_are_refused(level: str) -> None:
    held = arrays_of("blocks")
    moved = {key: None for key in held if key.startswith("1.")}
    moved |= {key.replace("1.", f"{level}.", 1): held[key] for key in held if key.startswith("1.")}
    refused_lean(StreamingUniversalSet, crafted("blocks", moved, terms=[level]))


BAD_ARRAYS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "none": [
        ("blocks", {key: None}) for key in ("exponents", "1.high", "present", "limits", "tail.keys", "held.keys")
    ],
    "shape": [
        ("blocks", {"exponents": np.zeros((2, 2), np.int32)}),
        ("blocks", {"1.high": np.zeros((1, 2, 3))}),
        ("blocks", {"settled": np.zeros(2)}),
        ("blocks", {"present": np.zeros((), np.int64)}),
        ("blocks", {"tail.keys": np.zeros((1, BLOCK, 2)), "tail.beside0": np.zeros((1, BLOCK), np.int64)}),
        ("blocks", {"tail.keys": np.zeros((1, 3, 3))}),
        ("blocks", {"tail.keys": np.zeros((3, 2))}),
        ("blocks", {"tail.beside0": np.zeros((1, 4), np.int64)}),
        ("blocks", {"frozen.high": np.zeros((1, 3, 3))}),
        ("blocks", {"held.indices": np.zeros(5, np.int64)}),
        ("batch-payload", {"tail.beside1": np.zeros((2, 2), np.float32)}),
        ("moments", {"count": np.zeros(1, np.int64)}),
        ("moments", {"tail": np.zeros((1, 3, 3))}),
        ("moments-diagonal", {"total": np.zeros((1, 3))}),
        ("moments-decayed", {"total": np.zeros((2, 2))}),
        ("tokens", {"norms.total": np.zeros((3, 3))}),
    ],
    "dtype": [
        ("blocks", {"exponents": np.zeros((1, 2))}),
        ("blocks", {"1.high": np.zeros((1, 2, 2), np.float32)}),
        ("blocks", {"1.folds": np.ones(1, np.int32)}),
        ("blocks", {"rounded": np.zeros((), np.int8)}),
        ("blocks", {"counts": np.zeros(1, np.uint64)}),
        ("blocks", {"tail.keys": np.zeros((1, 3, 2), np.float32)}),
        ("blocks", {"tail.keys": np.zeros((1, 3, 2), ">f8")}),
        ("float16", {"tail.keys": np.zeros((1, 5, 2), np.float16)}),
        ("moments", {"count": np.zeros((), np.float64)}),
    ],
    "counts": [
        ("blocks", {"counts": np.array([-1])}),
        ("blocks", {"counts": np.array([1])}),
        ("blocks", {"counts": np.array([HUGE])}),
        ("batch-payload", {"counts": np.array([1, -1])}),
        ("moments", {"count": np.array(-1)}),
        *(("moments", {"count": np.array(value)}) for value in (-(2**63), MOST_ROWS + 1, 2**62, 2**63 - 1)),
        ("moments-diagonal", {"count": np.array(2**63 - 1)}),
        ("tokens", {"tokens.count": np.array([1, 2**63 - 1, 2])}),
        ("blocks", {"limits": np.array([-1])}),
        ("blocks", {"present": np.array([2 * BLOCK + 4])}),
        *(("merged", {"held.indices": np.array([0, value])}) for value in (-1, 5, 2**62, 2**63 - 1)),
        *(("blocks", {"tail.beside0": np.array([[0, 1, value]])}) for value in (-1, 2 * BLOCK + 3, 2**63 - 1)),
        ("moments-diagonal", {"count": np.array(-1)}),
    ],
    "samples": [
        *(("sample", {f"{part}.numbers": np.full(3, -1)}) for part in ("held", "tail")),
        ("sample", {"tail.numbers": np.array([5, 4, 4])}),
        ("sample", {"tail.numbers": np.array([1, 2, 2 * BLOCK + 3])}),
        ("sample", {"tail.uniform": np.array([0.5, 0.5, 1.5])}),
        ("sample", {"tail.weights": np.array([0.5, 0.5, -1.0])}),
        ("sample", {"tail.scores": np.array([0.5, 0.5, np.nan])}),
        ("sample", {"tail.keys": np.full((3, 2), np.nan)}),
        ("sample", {"tail.keys": np.zeros((3, 3))}),
        ("sample", {"held.keys": None}),
        ("sample", {"frozen.exponents": np.array([[0, 1025]], np.int32)}),
    ],
    "numbers": [
        *(("blocks", {"1.high": np.full((1, 2, 2), value)}) for value in (np.nan, np.inf)),
        ("blocks", {"settled": np.full((1, 2), np.nan)}),
        ("blocks", {"tail.keys": np.full((1, 3, 2), -np.inf)}),
        ("float16", {"tail.keys": np.full((1, 5, 2), 0x7C00, np.uint16)}),
        *(
            (name, {array: np.array([[0, value]], np.int32)})
            for name, array in (
                ("blocks", "exponents"),
                ("blocks", "frozen.exponents"),
                ("block", "group1.exponents"),
                ("block", "frozen0.exponents"),
            )
            for value in (2**31 - 1, -(2**31), 1025, -1025)
        ),
        ("moments", {"tail": np.full((1, 3, 2), np.nan)}),
        ("moments", {"weight": np.full(1, -1.0)}),
        ("moments-diagonal", {"total": np.full((1, 2), -1.0)}),
        ("moments-diagonal", {"total": np.full((1, 2), np.nan)}),
        ("moments-diagonal", {"weight": np.full(1, np.nan)}),
        ("moments-decayed", {"total": -np.ones((2, 2, 2))}),
        ("moments-decayed", {"decay": np.ones(2)}),
        ("moments-decayed", {"decay": np.array([0.5, 1.5])}),
        ("tokens", {"tokens.total": np.full((3, 2), -1.0)}),
        ("wide", {"0.folds": np.array([4], np.int8)}),
        ("wide", {"0.rest": np.full((1, 1, 2, 2), np.nan)}),
    ],
    "groups": [
        ("block", {"tail.beside1": np.array([[0, 2]])}),
        ("block", {"tail.beside1": np.array([[-1, 0]])}),
        ("block", {"frozen1.high": None}),
        ("block", {"group1.exponents": None}),
    ],
}


@pytest.mark.parametrize("group", BAD_ARRAYS)
def test_bad_arrays_are_refused(group: str) -> None:
    for name, change in BAD_ARRAYS[group]:
        data = crafted(name, change)
        assert data != saved(name)
        refused_lean(kind_of(name), data)


def listing(change: Callable[[list[Any]], Any]) -> bytes:
    header, body = opened(saved("few-rows"))
    header["arrays"] = change(header["arrays"])
    return sealed(header, body)


LISTINGS: dict[str, Callable[[list[Any]], Any]] = {
    "null": lambda _: None,
    "number": lambda _: 7,
    "object": lambda _: {"exponents": 1},
    "flat": lambda listed: listed[0],
    "huge": lambda listed: [[listed[0][0], listed[0][1], [HUGE]], *listed[1:]],
    "huge-product": lambda listed: [[listed[0][0], listed[0][1], [2**40, 2**40, 2**40]], *listed[1:]],
    "huge-and-empty": lambda listed: [*listed, ["more", "<f8", [0, HUGE]]],
    "beyond-c": lambda listed: [*listed, ["more", "<f8", [2**70, 0]]],
    "negative": lambda listed: [*listed[:-1], [listed[-1][0], "<f8", [-1, 2]]],
    "two-negative": lambda listed: [["exponents", "<i4", [-1, -2]], *listed[1:]],
    "fraction": lambda listed: [["exponents", "<i4", [1.0, 2.0]], *listed[1:]],
    "boolean": lambda listed: [["exponents", "<i4", [True, 2]], *listed[1:]],
    "no-shape": lambda listed: [["exponents", "<i4"], *listed[1:]],
    "null-shape": lambda listed: [["exponents", "<i4", None], *listed[1:]],
    "null-name": lambda listed: [[None, "<i4", [1, 2]], *listed[1:]],
    "list-name": lambda listed: [[[], "<i4", [1, 2]], *listed[1:]],
    "number-name": lambda listed: [[7, "<i4", [0]], *listed],
    "twice": lambda listed: [*listed, ["exponents", "<i4", [0, 2]]],
    "objects": lambda listed: [["exponents", "|O", [1, 1]], *listed[1:]],
    "records": lambda listed: [["exponents", [["a", "<i4"]], [1, 2]], *listed[1:]],
    "words": lambda listed: [["exponents", "<U1", [1, 2]], *listed[1:]],
    "one-less": lambda listed: listed[:-1],
    "one-more": lambda listed: [*listed, ["more", "<f8", [1]]],
}


@pytest.mark.parametrize("name", LISTINGS)
def test_bad_listings_of_arrays_are_refused(name: str) -> None:
    refused_lean(StreamingUniversalSet, listing(LISTINGS[name]))


HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "number": b"1",
    "list": b"[]",
    "text": b'"kind"',
    "null": b"null",
    "no-fields": b"{}",
    "not-json": b"{kind: 1}",
    "not-utf8": b"\xff\xfe{}",
    "nested": b"[" * 100_000 + b"]" * 100_000,
    "nested-object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "long-number": b'{"kind": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_bad_headers_are_refused(name: str) -> None:
    for kind in (StreamingUniversalSet, Moments):
        refused_lean(kind, sealed(HEADERS[name], b""))


def test_headers_of_other_versions_and_sizes_are_refused() -> None:
    header, body = opened(saved("few-rows"))
    for version in (0, 2, None, "1", 10**30):
        refused(StreamingUniversalSet, sealed(header | {"version": version}, body), "version", "expected 1")
    for kind in ("Moments", "", None, []):
        refused(StreamingUniversalSet, sealed(header | {"kind": kind}, body), "expected a StreamingUniversalSet")
    for key in ("kind", "version", "fields", "arrays"):
        refused(StreamingUniversalSet, sealed({k: v for k, v in header.items() if k != key}, body))
    for key in header["fields"]:
        fewer = {k: v for k, v in header["fields"].items() if k != key}
        refused(StreamingUniversalSet, sealed(header | {"fields": fewer}, body))
    for fields in (None, [], 3, "x"):
        refused(StreamingUniversalSet, sealed(header | {"fields": fields}, body))
    text = json.dumps(header).encode()
    for size in (0, 1, len(text) - 1, len(text) + 1, 2**40, 2**64 - 1):
        refused(StreamingUniversalSet, sealed(text, body, size))


def test_many_spans_are_read() -> None:
    # of single rows, as many workers leave them
    spans = [[2 * row, 2 * row + 1] for row in range(10_000)]
    state = StreamingUniversalSet.from_bytes(crafted("few-rows", spans=spans, next_row=20_000))
    assert state.n == 10_000
    assert StreamingUniversalSet.from_bytes(state.to_bytes()).to_bytes() == state.to_bytes()
    refused(StreamingUniversalSet, crafted("few-rows", spans=[*spans, [7, 8]], next_row=20_000))


def resealed(data: bytes, chance: random.Random) -> bytes:
    """The data with a change of the header or of an array, under a checksum made anew."""
    end = 16 + int.from_bytes(data[8:16], "little")
    header, body = data[16:end], bytearray(data[end:-32])
    choice = chance.random()
    if choice < 0.5:
        runs = list(re.finditer(rb'-?[0-9.]+(?:e-?[0-9]+)?|true|false|null|"[^"]*"', header))
        run, other = chance.choice(runs), chance.choice(runs)
        value = chance.choice([*NUMBERS, *WORDS]).encode() if chance.random() < 0.7 else other.group()
        header = header[: run.start()] + value + header[run.end() :]
    elif choice < 0.9 and body:
        for _ in range(chance.choice((1, 1, 3))):
            at = chance.randrange(len(body))
            if chance.random() < 0.5:
                body[at] ^= 1 << chance.randrange(8)
            else:
                value = chance.choice((-1.0, 0.0, 1e300, 1e-300, np.nan, np.inf, -1, 7, 2**62))
                body[at // 8 * 8 : at // 8 * 8 + 8] = np.array(value).tobytes()[: len(body) - at // 8 * 8]
    else:
        header = mutated(header, chance)
    return sealed(bytes(header), bytes(body))


def header_of(state: State) -> Any:
    """The fields of a state, and the names, types and shapes of its arrays."""
    data = state.to_bytes()
    return json.loads(data[16 : 16 + int.from_bytes(data[8:16], "little")])


def by_blocks(header: Any) -> bool:
    """Whether the keys are divided into blocks at random, each with sums of its own."""
    return any(name.startswith("group") for name, *_ in header["arrays"])


def grow(state: StreamingUniversalSet, n: int) -> None:
    """Add rows like those that the state holds, and then those of another state."""
    header = header_of(state)
    fields = header["fields"]
    if fields["format"] == "bfloat16" or fields["next_row"] > 2**61:
        return
    K = np.ones((*fields["batch"], n, fields["d"]), fields["format"])
    last = f"tail.beside{2 if by_blocks(header) else 1}"  # before it, the numbers of rows, and of blocks
    payload = [(dtype, shape[2:]) for name, dtype, shape in header["arrays"] if name == last]
    beside = [np.zeros((*fields["batch"], n, *shape), dtype) for dtype, shape in payload]
    state.update(K, payload=beside[0] if beside else None)
    fields = header_of(state)["fields"]
    other = StreamingUniversalSet(state.epsilon, f=state.f, row_start=fields["next_row"] if fields["placed"] else None)
    state.merge(other.update(K[..., :3, :], payload=beside[0][..., :3] if beside and beside[0].ndim < 3 else None))


def use(state: State) -> None:
    """Read the state and add to it; its numbers may be nonsense, so what is read may be."""
    if isinstance(state, Moments):
        state.result()
        state.update(np.ones((*state.batch, 3, state.d), state.parts()[0].get("format") or "float64"))
    elif isinstance(state, StreamingRowSample):
        fields = header_of(state)["fields"]
        d, format = (fields["d"], fields["format"]) if fields["begun"] else (2, "float64")
        if format != "bfloat16" and fields["next_row"] < 2**61:
            state.update(np.ones((3, d), format)).result()
    elif isinstance(state, TokenState):
        for part in (state.norms, state.tokens):
            if part is not None:
                use(part)
    elif isinstance(state, SketchedRows):
        if state.next_row < 2**62:  # no further row has a number there
            state.update(np.ones((*state.batch, 1, state.d)))
        state.merge(SketchedRows.from_bytes(state.to_bytes())).result()
    elif isinstance(state, SoftmaxState):
        with np.errstate(all="ignore"):
            state.update(np.ones((*state.batch, 3, state.latents)), np.ones((*state.batch, 3, state.d))).result()
    else:
        header = header_of(state)
        if header["fields"]["begun"]:
            state.result()
            grow(state, BLOCK if by_blocks(header) else 3)
        else:
            state.update(gaussian(3))
        state.result()
    assert type(state).from_bytes(state.to_bytes()).to_bytes() == state.to_bytes()


@pytest.mark.filterwarnings("ignore::levattn.RankWarning")
@pytest.mark.parametrize("name", STATES)
def test_resealed_mutations_are_refused_or_work(name: str) -> None:
    chance = random.Random(name)
    kind = kind_of(name)
    outcomes: Counter[str] = Counter()
    for _ in range(SEALED // len(STATES) + 1):
        data = resealed(saved(name), chance)
        try:
            state = kind.from_bytes(data)  # a warning here is an error
        except (ValueError, TypeError):
            outcomes["refused"] += 1
            continue
        outcomes["accepted"] += 1
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                use(state)
            except ValueError:  # numbers that make no state, which show only in the sums
                outcomes["unreadable"] += 1
    assert outcomes["refused"] > 0.2 * outcomes.total()
