"""Two passes over keys in chunks: the sets of the keys in memory, whatever the chunks, and checkpoints on the way.

Inside: chunks are made small, and failures are planted within a pass.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import levattn
import strategies
from levattn.exceptions import KeyFileError, NonFiniteError
from levattn.linalg.factor import Factor
from levattn.linalg.reading import RowDigest
from levattn.sensitivity import two_pass
from levattn.states import Moments
from strategies import STORAGE, as_bool, as_float64, examples, stores

pytestmark = pytest.mark.filterwarnings("ignore::levattn.RankWarning")  # some keys here have such ranks

N = 6500  # three blocks of 2048 rows, and a part of one
EPSILON = 0.01
SMALLEST = 2.0**-126  # scores of float32 below this lose digits
HALF = ("float64", "float32", "float16", "bfloat16")

Keys = Callable[[np.random.Generator], strategies.Float]

# Kinds of N keys. Of the first the moments are the same numbers in chunks and in memory, and so are the scores.
TAME: dict[str, Keys] = {
    "gaussian": lambda rng: rng.standard_normal((N, 8)),
    "heavy-tailed": lambda rng: strategies.coherent(rng, N, 8),
    "graded": lambda rng: strategies.graded(rng, N, 8, 1e-4),
    "conditioned-1e2": lambda rng: strategies.conditioned(rng, N, 8, 1e2),
}
HARD: dict[str, Keys] = {
    "conditioned-1e4": lambda rng: strategies.conditioned(rng, N, 8, 1e4),
    "conditioned-1e8": lambda rng: strategies.conditioned(rng, N, 8, 1e8),
    "conditioned-1e12": lambda rng: strategies.conditioned(rng, N, 8, 1e12),
    "deficient": lambda rng: strategies.integer_deficient(rng, N, 8, 5),
    "near-deficient": lambda rng: strategies.near_deficient(rng, N, 8, 1e-10),
    "tiny-direction": lambda rng: strategies.tiny_direction(rng, N, 8, 1e-9),
    "late-direction": lambda rng: (
        np.where(np.arange(N)[:, None] < 5000, [1.0, 1, 0, 0], 1.0) * strategies.coherent(rng, N, 4)
    ),
    "growing": lambda rng: rng.standard_normal((N, 4)) * np.exp(np.arange(N) / 20)[:, None],
    "large-mean": lambda rng: rng.standard_normal((N, 8)) + 1e4,
    "all-zero": lambda _: np.zeros((N, 3)),
}
KINDS = TAME | HARD


def keys_of(kind: str, storage: str = "float64") -> Any:
    """Keys of a kind, in a storage type; scaled into its range where they are not."""
    values = KINDS[kind](np.random.default_rng(sum(map(ord, kind))))
    largest = np.abs(values).max()
    limit = {"float16": 6e4, "bfloat16": 3e38, "float32": 3e38}.get(storage.removeprefix("torch-"), 1e300)
    return STORAGE[storage](values if largest < limit else values * (limit / largest))


@pytest.fixture(autouse=True, scope="module")
def _few_together() -> Iterator[None]:
    """Chunks of some hundred rows are worked on together, and no others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_pass, "_TOGETHER", 20_000)
        yield


class Chunks:
    """Keys that can be read again and again, in chunks of these sizes in turn; the last goes on to the end."""

    def __init__(self, K: Any, sizes: Sequence[int] = (700,)) -> None:
        self.K, self.sizes = K, sizes

    def __iter__(self) -> Iterator[Any]:
        at, n = 0, self.K.shape[-2]
        sizes = itertools.cycle(self.sizes) if any(self.sizes) else iter((*self.sizes, n))
        while at < n or not at:
            stop = min(at + next(sizes), n)
            yield self.K[..., at:stop, :]
            at = stop
            if not n:
                return


class KilledError(Exception):
    """Stands for what ends a process."""


def after(rows: float) -> Callable[[int, int | None], None]:
    """A progress callback that ends the work once it has done so many rows."""
    first: list[int] = []

    def call(done: int, total: int | None) -> None:
        first.append(done)
        if done - first[0] >= rows:
            raise KilledError

    return call


def find(K: Any, asked: float, **options: Any) -> levattn.UniversalSet:
    """The set of a threshold, or of a size where that is a whole number."""
    epsilon, size = (None, asked) if isinstance(asked, int) else (asked, None)
    call = levattn.scan_set if set(options) & {"progress", "checkpoint", "checkpoint_rows"} else levattn.universal_set
    return call(K, epsilon, size=size, **options)


def assert_same(found: levattn.UniversalSet, expected: levattn.UniversalSet) -> None:
    """The same set, to the last bit."""
    assert np.array_equal(as_bool(found.mask), as_bool(expected.mask))
    assert np.array_equal(as_float64(found.scores), as_float64(expected.scores))
    assert str(found.scores.dtype) == str(expected.scores.dtype)
    assert np.array_equal(found.epsilon, expected.epsilon)
    assert np.array_equal(found.rank, expected.rank)
    assert found.guarantee == expected.guarantee
    assert np.array_equal(found.factor.normalizer, expected.factor.normalizer)


def assert_agrees(found: levattn.UniversalSet, expected: levattn.UniversalSet) -> None:
    """The same set, with scores that differ by as much as their errors were estimated."""
    assert np.array_equal(as_bool(found.mask), as_bool(expected.mask))
    assert np.array_equal(found.rank, expected.rank)
    assert found.guarantee == expected.guarantee
    ours, theirs = as_float64(found.scores), as_float64(expected.scores)
    error = 4 * (found.factor.score_error + expected.factor.score_error).reshape(*found.batch, 1)
    assert np.all(np.abs(ours - theirs) <= error * theirs + SMALLEST)
    moved = 2 * error[..., 0]  # scores left out differ by their errors, and for a given size are raised by them
    assert np.all(np.abs(np.asarray(found.epsilon) - expected.epsilon) <= moved * expected.epsilon)


# -- the same set as of keys in memory ---------------------------------------------------


@stores(*HALF)
@pytest.mark.parametrize("kind", KINDS)
def test_long_keys(kind: str, storage: str) -> None:
    K = keys_of(kind, storage)
    for asked in (EPSILON, 50):
        found, expected = find(Chunks(K), asked), find(K, asked)
        assert_agrees(found, expected)
        if kind in TAME:
            assert np.array_equal(found.scores, expected.scores)


@examples(40)
@given(st.lists(st.integers(0, 3000), max_size=6), st.sampled_from([*KINDS]), st.sampled_from(["float64", "float32"]))
def test_any_chunks_give_the_same_bits(sizes: list[int], kind: str, storage: str) -> None:
    K = keys_of(kind, storage)
    for asked in (EPSILON, 20):
        assert_same(find(Chunks(K, sizes), asked), find(Chunks(K, [N]), asked))


@pytest.mark.parametrize("storage", HALF)
@pytest.mark.parametrize("size", [0, 1, 699, 700, 701, 3000, 5600])
def test_ties_are_cut_by_row_number(size: int, storage: str) -> None:
    K = STORAGE[storage](strategies.identity_blocks(8, 700)[np.random.default_rng(0).permutation(5600)])
    found = levattn.universal_set(Chunks(K, (1000,)), size=size)
    assert np.array_equal(found.indices, np.arange(size))
    assert_same(found, levattn.universal_set(K, size=size))
    assert len(levattn.universal_set(Chunks(K), 1 / 700)) == 5600  # a score of ε is in


def test_near_ties_are_told_apart_in_float64() -> None:
    rng = np.random.default_rng(1)
    K = np.repeat(rng.standard_normal((65, 4)), 100, axis=0).astype(np.float32)
    K[:, 0] *= 1 + 1e-7 * rng.integers(0, 3, 6500)
    for size in (1, 150, 2000):
        assert_same(find(Chunks(K), size), find(K, size))


@stores("float32", "bfloat16", "torch-float64", "torch-bfloat16", "strict-float32", "strict-float64")
def test_batches(storage: str) -> None:
    rng = np.random.default_rng(2)
    K = rng.standard_normal((2, 3, 5000, 4))
    K[0, 1] *= np.geomspace(1, 1e-4, 4)
    K[1, 2] = strategies.integer_deficient(rng, 5000, 4, 2)
    K = STORAGE[storage](K)
    for asked in (EPSILON, 7):
        found = find(Chunks(K, (300, 2500)), asked)
        assert_agrees(found, find(K, asked))
        assert found.batch == (2, 3)
        assert np.array_equal(found.sizes, as_bool(found.mask).sum(axis=-1))
        if storage.startswith("torch"):
            assert type(found.mask) is type(found.scores) is type(K)
        assert_same(found, find(Chunks(K, (5000,)), asked))


@pytest.mark.parametrize("kind", ["heavy-tailed", "conditioned-1e8"])
def test_any_number_of_threads_gives_the_same_bits(kind: str) -> None:
    values = KINDS[kind](np.random.default_rng(3))
    K = np.concatenate([values * scale for scale in np.linspace(1, 2, 20)]).astype(np.float32)
    found = []
    for threads in (1, 2, 3):
        with levattn.thread_limit(threads):
            found.append(levattn.universal_set(Chunks(K, (10_000, 25_000)), 1e-3))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_the_method_gram() -> None:
    K = keys_of("heavy-tailed", "float32")
    assert_same(find(Chunks(K), EPSILON, method="gram"), find(K, EPSILON, method="gram"))


# -- sources -----------------------------------------------------------------------------


def saved(folder: Path, K: Any, name: str = "keys.npy") -> Path:
    path = folder / name
    if path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file({"K": K}, path)
    else:
        np.save(path, K)
    return path


@stores(*HALF)
@pytest.mark.parametrize("name", ["keys.npy", "keys.safetensors"])
def test_files(tmp_path: Path, name: str, storage: str) -> None:
    if storage == "bfloat16" and name.endswith(".npy"):
        pytest.skip("no .npy file says that its numbers are bfloat16")
    one = keys_of("heavy-tailed", storage)
    for K, rows in ((one, 1000), (one[:6000].reshape(3, 2000, 8), 777)):
        source = levattn.open_keys(saved(tmp_path, K, name), chunk_rows=rows)
        for asked in (EPSILON, 9):
            assert_agrees(find(source, asked), find(K, asked))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", ["float64", "float32", "float16"])
@pytest.mark.parametrize("method", ["auto", "gram"])
def test_scores_of_files_are_those_of_arrays(tmp_path: Path, kind: str, storage: str, method: str) -> None:
    K = keys_of(kind, storage)
    found = levattn.leverage_scores(levattn.open_keys(saved(tmp_path, K), chunk_rows=900), method=method)
    expected = levattn.leverage_scores(K, method=method)
    assert found.dtype == expected.dtype
    # twice the documented error of a score: of float64 keys 1e-9, in files also 2⁻⁹⁶ κ², of others 1e-5
    error = 2e-9 if storage == "float64" else 2e-5
    if kind == "conditioned-1e12" and storage == "float64":
        error = 2 * 2.0**-96 * 1e24
    np.testing.assert_allclose(found, expected, rtol=error, atol=1e-30)


@pytest.mark.parametrize("shape", [(5, 8), (8, 8), (2, 3, 5, 8), (3, 2000, 4), (0, 4), (2, 0, 4), (1, 1)])
def test_scores_of_chunks_of_any_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    K = np.random.default_rng(3).standard_normal(shape)
    expected = levattn.leverage_scores(K)
    source = levattn.open_keys(saved(tmp_path, K), chunk_rows=700)
    parts = [K[..., :3, :], K[..., 3:, :]]
    for keys in (source, source.between(0, source.n), lambda: iter(parts), Chunks(K, (2, 0, 5))):
        np.testing.assert_allclose(levattn.leverage_scores(keys), expected, rtol=2e-9)


def test_scores_with_options_that_need_all_keys_load_files_and_refuse_chunks(tmp_path: Path) -> None:
    K = keys_of("heavy-tailed")
    source = levattn.open_keys(saved(tmp_path, K))
    options: list[dict[str, Any]] = [
        {"center": True},
        {"ridge": 0.1},
        {"rtol": 1e-3},
        {"mask": np.arange(N) % 3 > 0},
        *({"method": method} for method in ("qr", "svd", "countsketch")),
    ]
    for option in options:
        expected = levattn.leverage_scores(K, **option)
        np.testing.assert_array_equal(levattn.leverage_scores(source, **option), expected)
        with pytest.raises(
            ValueError, match="K gives chunks; expected method 'auto' or 'gram', and no rank, ridge, center"
        ):
            levattn.leverage_scores(Chunks(K), **option)
    with pytest.raises(TypeError, match="gives its chunks only once"):
        levattn.leverage_scores(iter([K]))
    for wrong in ({"method": "x"}, {"ridge": -1}, {"rtol": 2}, {"mask": np.ones(3, np.bool_)}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} (is|has)"):
            levattn.leverage_scores(source, **wrong)  # type: ignore[arg-type]


def test_scores_of_files_that_change_are_refused(tmp_path: Path) -> None:
    K = keys_of("gaussian")
    passes = iter([[K[:4000], K[4000:]], [K[:4000], K[4000:] + 1]])
    with pytest.raises(ValueError, match="gave other keys, or in another order, in the second pass"):
        levattn.leverage_scores(lambda: iter(next(passes)))
    K[5000, 2] = np.nan
    with pytest.raises(NonFiniteError, match="row 5000"):
        levattn.leverage_scores(levattn.open_keys(saved(tmp_path, K)))


def test_a_folder_and_a_part_of_it(tmp_path: Path) -> None:
    K = keys_of("heavy-tailed")
    for i, part in enumerate(np.split(K, [1000, 1001, 5000])):
        saved(tmp_path, part, f"keys-{i}.npy")
    source = levattn.open_keys(tmp_path, chunk_rows=900)
    assert_same(levattn.universal_set(source, EPSILON), levattn.universal_set(Chunks(K), EPSILON))
    part = levattn.universal_set(source.between(500, 6000), EPSILON)
    assert_same(part, levattn.universal_set(Chunks(K[500:6000]), EPSILON))


def test_objects_and_functions() -> None:
    K = keys_of("heavy-tailed")
    parts = {number: K[low:high] for number, (low, high) in enumerate(itertools.pairwise((0, 10, 3000, 3000, N)))}

    def overwritten() -> Iterator[Any]:
        """Chunks that hold other keys once the next one is asked for."""
        buffer = np.empty((500, 8))
        for low in range(0, N, 500):
            part = buffer[: min(500, N - low)]
            part[...] = K[low : low + 500]
            yield part

    sources: tuple[Any, ...] = (
        parts.values(),
        lambda: iter(Chunks(K)),
        lambda: list(parts.values()),
        lambda: (part.tolist() for part in parts.values() if len(part)),
        overwritten,
        lambda: Indexed([*parts.values()]),
        lambda: Shaped(parts.values()),
    )
    for asked in (EPSILON, 11):
        expected = find(Chunks(K), asked)
        for source in sources:
            assert_same(find(source, asked), expected)


@pytest.mark.parametrize(
    "once", [lambda K: iter([K]), lambda K: (part for part in [K]), lambda K: map(np.asarray, [K])]
)
def test_what_can_be_read_once_is_refused(once: Any) -> None:
    with pytest.raises(TypeError, match=r"only once.*use StreamingUniversalSet"):
        levattn.universal_set(once(np.eye(3)), 0.5)


K0: Any = keys_of("heavy-tailed")
SHUFFLED = K0[np.random.default_rng(4).permutation(N)]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([], "6500 rows in the first pass and 0 in the second"),
        ([K0[:6000]], "6500 rows in the first pass and 6000 in the second"),
        ([K0, K0[:1]], "6500 rows in the first pass and at least 6501 in the second"),
        ([SHUFFLED], "other keys, or in another order"),
        ([2 * K0], "other keys, or in another order"),
        ([K0[::-1]], "other keys, or in another order"),
        ([K0.astype(np.float32)], "float64 keys of batch .* in the first pass, and float32"),
        ([K0[:, :5]], "and d = 8 in the first pass, and float64 ones of batch .* and d = 5"),
        ([K0[:700], K0[None, 700:]], r"of batch \(\) and d = 8 in the first pass, and float64 ones of batch \(1,\)"),
    ],
)
def test_other_keys_the_second_time_are_refused(second: list[Any], message: str) -> None:
    readings = iter([[K0], second])
    with pytest.raises(ValueError, match=message):
        levattn.universal_set(lambda: next(readings), EPSILON)


@pytest.mark.parametrize(
    ("others", "error", "message"),
    [
        (K0.astype(np.float32), TypeError, "float32; the chunks before had float64"),
        (K0[:, :5], ValueError, "d = 5; expected batch .* and d = 8"),
        (K0[None], ValueError, "batch .1,."),
        (K0[0], ValueError, r"shape \(8,\)"),
        (K0.astype(int), TypeError, "int64"),
        (7, TypeError, "type int"),
    ],
)
def test_other_chunks_are_refused(others: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        levattn.universal_set(lambda: [K0, others], EPSILON)


def test_few_rows_or_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chunk"):
        levattn.universal_set(lambda: iter([]), 0.1)
    for shape in ((0, 4), (1, 4), (3, 0, 4), (0, 5, 4), (0, 3000, 4)):
        K = np.ones(shape)
        for asked in (0.1, 0):
            source = levattn.open_keys(saved(tmp_path, K))
            for chunks in (lambda K=K: [K], lambda K=K: [K[..., :0, :], K, K[..., :0, :]], source):
                expected = find(K, asked)  # those of fewer rows than columns are factored by some of these
                (assert_same if expected.factor.wide is None else assert_agrees)(find(chunks, asked), expected)


def test_rows_that_are_not_finite_are_named_by_their_number(tmp_path: Path) -> None:
    K = K0.copy()
    K[[5000, 5001, 6499], 3] = np.nan, np.inf, -np.inf
    for sizes in ((700,), (1,), (N,), (4000, 900)):
        first = r"5000\b" if sizes[0] == 1 else "5000, 5001"
        with pytest.raises(NonFiniteError, match=first):
            levattn.universal_set(Chunks(K, sizes), EPSILON)
    path = tmp_path / "checkpoint"
    with pytest.raises(KilledError):
        levattn.scan_set(Chunks(K), EPSILON, checkpoint=path, checkpoint_rows=1, progress=after(4000))
    with pytest.raises(NonFiniteError, match=r"rows 5000, 5001.* of the keys; expected finite numbers\. Remove them$"):
        levattn.scan_set(Chunks(K), EPSILON, checkpoint=path)


UNSUPPORTED: list[dict[str, Any]] = [
    {"f": 4},
    {"f": levattn.Huber()},
    {"method": "qr"},
    {"method": "jl"},
    {"center": True},
    {"mask": np.ones(N, bool)},
]


@pytest.mark.parametrize("options", UNSUPPORTED, ids=lambda options: "-".join(options))
def test_options_that_two_passes_do_not_have(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected f = 2, method 'auto' or 'gram'"):
        levattn.universal_set(Chunks(K0), 0.1, **options)
    source = levattn.open_keys(saved(tmp_path, K0[:300]))
    cut = {name: value[:300] if name == "mask" else value for name, value in options.items()}
    expected = levattn.universal_set(K0[:300], 0.1, **cut)  # files are loaded for it
    assert np.array_equal(levattn.universal_set(source, 0.1, **cut).scores, expected.scores)


def test_files_are_loaded_for_groups_and_exact_scores(tmp_path: Path) -> None:
    source, labels = levattn.open_keys(saved(tmp_path, K0[:300])), np.arange(300) // 30
    found = levattn.universal_set(source, 0.1).with_groups(source, labels)
    expected = levattn.universal_set(K0[:300], 0.1).with_groups(K0[:300], labels)
    assert found.indices.tolist() == expected.indices.tolist()
    np.testing.assert_allclose(found.group_scores, expected.group_scores, rtol=1e-9)
    by_sketch = levattn.universal_set(source, 0.1, method="osnap").rechecked(source)
    assert by_sketch.indices.tolist() == levattn.universal_set(K0[:300], 0.1).indices.tolist()


@pytest.mark.parametrize("kind", [list, tuple])
def test_matrices_in_a_list_or_tuple_are_a_batch_and_no_chunks(kind: Any) -> None:
    halves = kind((K0[:100], K0[100:200]))
    assert levattn.universal_set(halves, 0.1).batch == levattn.leverage_scores(halves).shape[:1] == (2,)


WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (K0, {"progress": print}, ValueError, "source is of type ndarray; expected chunks"),
    (K0, {"checkpoint": "a"}, ValueError, "source is of type ndarray; expected chunks"),
    *(
        (kind((K0, K0)), {"progress": None}, ValueError, f"source is of type {kind.__name__}")
        for kind in (list, tuple)
    ),
    (
        "keys.npy",
        {"progress": None},
        ValueError,
        "source is of type str; expected chunks of keys: files opened with open_keys",
    ),
    (iter([K0]), {"progress": None}, TypeError, "source is of type list_iterator, which gives its chunks only once"),
    *(
        (
            lambda given=given: given,
            {"progress": None},
            TypeError,
            f"returned {type(given).__name__}; expected an iter",
        )
        for given in (K0, K0[:, 0], None, 3, {"a": K0}, "keys.npy")
    ),
    *(
        (
            lambda kind=kind: iter([kind([K0, K0])]),
            {"progress": None},
            TypeError,
            f"a {kind.__name__} of arrays; expected",
        )
        for kind in (list, tuple)
    ),
    (Chunks(K0), {"progress": "yes"}, TypeError, "progress is 'yes'; expected None, True"),
    (Chunks(K0), {"checkpoint_rows": 5}, ValueError, "checkpoint_rows is 5 without checkpoint"),
    *(
        (Chunks(K0), {"checkpoint": "a", "checkpoint_rows": rows}, error, message)
        for rows, error, message in (
            *((rows, ValueError, f"checkpoint_rows is {rows}; expected at least 1") for rows in (0, -1)),
            *((rows, TypeError, "expected a whole number of rows") for rows in (True, 1.5, "3")),
        )
    ),
    (Chunks(K0), {"checkpoint": 3}, TypeError, "checkpoint is of type int; expected the path"),
    *((Chunks(K0), {"asked": size}, ValueError, f"size is {size}; expected") for size in (-1, N + 1)),
    (Chunks(K0), {"asked": 2.0}, ValueError, "epsilon is 2"),
]


@pytest.mark.parametrize(("K", "options", "error", "message"), WRONG)
def test_wrong_arguments(K: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find(K, **({"asked": 0.1} | options))


# -- progress ----------------------------------------------------------------------------


def test_progress(tmp_path: Path) -> None:
    for source, total in (
        (Chunks(K0), None),
        (levattn.open_keys(saved(tmp_path, K0), chunk_rows=600), 2 * N),
        (lambda: [K0[:0], K0, K0[:0]], None),
    ):
        calls: list[tuple[int, int | None]] = []
        levattn.scan_set(source, 0.1, progress=lambda *call, calls=calls: calls.append(call))
        rows = [done for done, _ in calls]
        assert rows == sorted(rows)
        assert rows[-1] == 2 * N
        assert all(known == total for _, known in calls)
        assert len(calls) > 3


def test_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = levattn.universal_set(Chunks(K0), EPSILON)
    source = levattn.open_keys(saved(tmp_path, K0))
    for K in (Chunks(K0), source):
        assert_same(levattn.scan_set(K, EPSILON, progress=True), expected)
        assert_same(levattn.scan_set(K, EPSILON, progress=False), expected)
    assert_agrees(levattn.universal_set(K0, EPSILON), expected)
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match=r"rich.*levattn\[cli\]"):
        levattn.scan_set(Chunks(K0), EPSILON, progress=True)


# -- checkpoints -------------------------------------------------------------------------


BEGIN_ANEW = r"checkpoint.*Name another file, or remove it to begin anew"
in_each_pass = pytest.mark.parametrize("rows", [3000, 10_000])  # of the first and of the second pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def left_at(path: Path, K: Any, rows: int) -> bytes:
    """Leave the checkpoint of a run that was killed after so many rows."""
    with pytest.raises(KilledError):
        find(Chunks(K), EPSILON, checkpoint=path, checkpoint_rows=700, progress=after(rows))
    return path.read_bytes()


CHECKPOINTED = [
    *itertools.product(["heavy-tailed"], HALF, [EPSILON, 30]),
    *itertools.product(["conditioned-1e8", "deficient", "growing", "late-direction"], ["float64"], [EPSILON]),
]


@pytest.mark.parametrize(("kind", "storage", "asked"), CHECKPOINTED)
def test_a_run_that_is_killed_goes_on_to_the_same_result(path: Path, kind: str, storage: str, asked: float) -> None:
    rng = np.random.default_rng(5)
    K = keys_of(kind, storage)
    expected = find(Chunks(K), asked)
    for _ in range(3):
        kills, found = 0, None
        while found is None:
            chunks = Chunks(K, rng.integers(1, 2500, 5).tolist())
            progress = after(rng.uniform(500, 6000))
            try:
                found = find(chunks, asked, checkpoint=path, checkpoint_rows=1000, progress=progress)
            except KilledError:
                kills += 1
        assert_same(found, expected)
        assert kills >= 2
        assert [*path.parent.iterdir()] == []


@pytest.mark.parametrize("moment", [100, 700, 2100, 6499, 6500, 6501, 7000, 9000, 12_900, 13_000])
def test_rows_that_are_done_are_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    source = levattn.open_keys(saved(path.parent, K0), chunk_rows=100)
    expected = find(source, EPSILON)
    with pytest.raises(KilledError):
        find(source, EPSILON, checkpoint=path, checkpoint_rows=100, progress=after(moment))
    read, original = [], levattn.KeySource.__iter__

    def counting(self: levattn.KeySource) -> Iterator[Any]:
        for chunk in original(self):
            read.append(chunk.shape[-2])
            yield chunk

    monkeypatch.setattr(levattn.KeySource, "__iter__", counting)
    calls: list[tuple[int, int | None]] = []
    assert_same(find(source, EPSILON, checkpoint=path, progress=lambda *call: calls.append(call)), expected)
    assert calls[0] == (-(-moment // 100) * 100, 2 * N)
    assert calls[-1] == (2 * N, 2 * N)
    assert sum(read) <= 2 * N - moment // 100 * 100 + 300  # those left, and the first ones, to know the keys again


def test_checkpoints_are_written_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "check[point]*"
    half, others = tmp_path / ".check[point]*.0123456789ab.tmp", [".checkpa.0123456789ab.tmp", ".check[point]*.tmp"]
    for name in (half.name, *others):
        (tmp_path / name).touch()
    there: list[bool] = []
    options = {"checkpoint_rows": 2000, "progress": lambda *_: there.append(path.exists())}
    find(Chunks(K0), EPSILON, checkpoint=str(path), **options)
    assert there == [False] * 3 + [True] * (len(there) - 3)  # 2100 rows are three chunks; the first call says 0 rows
    find(Chunks(K0), EPSILON, checkpoint=path)  # too few rows for one
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(others)


def test_only_temporary_files_of_the_checkpoint_are_removed(tmp_path: Path) -> None:
    one, other = (tmp_path / ("x" * 240 + end) for end in "ab")  # too long to be a part of a longer name
    with levattn.io.replace_file(one) as stream:
        stream.write(b"one")
        find(Chunks(K0), EPSILON, checkpoint=other)
    assert one.read_bytes() == b"one"
    for name in ("a..tmp", "b[1]*"):
        half = tmp_path / f".{name}.0123456789ab.tmp"
        half.touch()
        find(Chunks(K0), EPSILON, checkpoint=tmp_path / name)
        assert not half.exists()


def test_a_checkpoint_behind_a_link_is_removed_and_the_link_stays(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target.name)
    there: list[bool] = []
    find(Chunks(K0), EPSILON, checkpoint=link, checkpoint_rows=2000, progress=lambda *_: there.append(target.exists()))
    assert there[-1]
    assert [*tmp_path.iterdir()] == [link]


def test_a_checkpoint_whose_folder_is_gone_costs_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")

    def keys() -> Iterator[Any]:
        yield K0[:3000]
        os.chdir(tmp_path)
        (tmp_path / "folder" / "keys.bin").unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (tmp_path / "folder").rmdir()
        yield K0[3000:]

    found = find(keys, EPSILON, checkpoint="keys.bin", checkpoint_rows=10**7)
    assert_same(found, find(Chunks(K0), EPSILON))
    assert not [*tmp_path.iterdir()]


@in_each_pass
def test_checkpoints_of_another_run_are_refused(path: Path, rows: int) -> None:
    before = left_at(path, K0, rows)
    changed = K0.copy()
    changed[5] *= 1.5
    other_keys = (changed, K0[1:], K0[:, :4], K0[None], K0.astype(np.float32), (K0 / 16).astype(np.float16))
    other_options: tuple[dict[str, Any], ...] = ({"asked": 0.02}, {"asked": 5}, {"method": "gram"})
    for K, options in (*((K, {}) for K in other_keys), *((K0, options) for options in other_options)):
        with pytest.raises(ValueError, match=BEGIN_ANEW):
            find(Chunks(K), checkpoint=path, **({"asked": EPSILON} | options))
        assert path.read_bytes() == before
    for K in (K0[:2000], np.concatenate([K0, K0])) if rows > N else (K0[:2000],):
        with pytest.raises(ValueError, match="of other keys than K, or K has changed"):
            find(levattn.open_keys(saved(path.parent, K)), EPSILON, checkpoint=path)
    assert_same(find(Chunks(K0, (50,)), EPSILON, checkpoint=path), find(Chunks(K0), EPSILON))


@pytest.mark.parametrize("rows", [10_000, 40_000])
def test_keys_that_change_between_the_runs_are_refused(path: Path, rows: int) -> None:
    changed = np.concatenate([K0] * 4)
    left_at(path, changed, rows)
    changed[300:] *= 2  # the first rows are as they were
    with pytest.raises(ValueError, match="other keys, or in another order"):
        find(Chunks(changed), EPSILON, checkpoint=path)


@pytest.mark.skipif("bfloat16" not in STORAGE, reason="no package for bfloat16")
@in_each_pass
def test_the_same_bytes_of_another_format_are_refused(path: Path, rows: int) -> None:
    import ml_dtypes

    K = STORAGE["float16"](np.random.default_rng(0).standard_normal((N, 8)))
    left_at(path, K, rows)
    with pytest.raises(ValueError, match=BEGIN_ANEW):
        find(Chunks(K.view(ml_dtypes.bfloat16)), EPSILON, checkpoint=path)


@in_each_pass
def test_damaged_checkpoints_are_refused(path: Path, rows: int) -> None:
    data = left_at(path, K0, rows)
    rng = np.random.default_rng(6)
    damaged = [b"", b"\0" * 100, data[:7], data[:100], data[:-1], data + b"\0", b"PK\x03\x04" + data]
    places = (*range(0, 64, 5), *rng.integers(0, len(data), 30).tolist())
    damaged += [data[:at] + bytes([data[at] ^ 1 << rng.integers(8)]) + data[at + 1 :] for at in places]
    damaged.append(levattn.StreamingUniversalSet(EPSILON).update(K0).to_bytes())
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=BEGIN_ANEW):
            find(Chunks(K0), EPSILON, checkpoint=path)
        assert path.read_bytes() == content
    path.write_bytes(data)
    assert_same(find(Chunks(K0), EPSILON, checkpoint=path), find(Chunks(K0), EPSILON))


def test_damaged_keys_are_not_blamed_on_the_checkpoint(path: Path) -> None:
    keys = saved(path.parent, K0)
    source = levattn.open_keys(keys)
    left_at(path, K0, 3000)
    keys.write_bytes(keys.read_bytes()[:-5])
    with pytest.raises(KeyFileError, match=r"keys\.npy"):
        find(source, EPSILON, checkpoint=path)


def test_a_checkpoint_that_cannot_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unread = Unread()
    for wrong, error in (("nowhere/a", FileNotFoundError), (".", IsADirectoryError)):
        with pytest.raises(error, match="checkpoint "):
            find(unread, EPSILON, checkpoint=path.parent / wrong)
    with pytest.raises(FileExistsError, match="checkpoint is a device"):
        find(unread, EPSILON, checkpoint=os.devnull)
    with pytest.raises(ValueError, match="checkpoint is empty"):
        find(unread, EPSILON, checkpoint="")
    before = left_at(path, K0, 3000)

    def full(_: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        find(Chunks(K0), EPSILON, checkpoint=path, checkpoint_rows=1)
    assert path.read_bytes() == before
    assert [*path.parent.iterdir()] == [path]


class Indexed:
    """Chunks by number, without `__iter__`."""

    def __init__(self, chunks: list[Any]) -> None:
        self._chunks = chunks

    def __getitem__(self, number: int) -> Any:
        return self._chunks[number]


class Shaped:
    """Chunks of an object that tells the shape of all of them."""

    shape = (N, 8)

    def __init__(self, chunks: Any) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[Any]:
        return iter(self._chunks)


class Unread:
    """Chunks that nobody may ask for."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the keys were read")


INTERRUPTED: dict[str, tuple[Any, str]] = {
    "digest": (RowDigest, "add"),
    "comparison of digests": (RowDigest, "difference"),
    "moments": (Moments, "add"),
    "scores": (Factor, "on"),
    "packing": (two_pass, "pack"),
    "writing": (two_pass, "replace_file"),
    "renaming": (os, "replace"),
}


@pytest.mark.parametrize("place", INTERRUPTED)
def test_ctrl_c_leaves_a_checkpoint_that_goes_on(path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes within each step, again and again: in a run, and in a run that resumes and reads rows again."""
    owner, name = INTERRUPTED[place]
    step, expected = getattr(owner, name), find(Chunks(K0), EPSILON)
    left, steps = [0], 2

    def interrupted(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return step(*arguments, **options)

    monkeypatch.setattr(owner, name, interrupted)
    for _ in range(40):
        left[0], steps = steps, steps + 1
        try:
            found = find(Chunks(K0), EPSILON, checkpoint=path, checkpoint_rows=1000)
        except KeyboardInterrupt:
            assert {*path.parent.iterdir()} <= {path}
        else:
            break
    assert steps > 4
    assert_same(found, expected)
    assert [*path.parent.iterdir()] == []


# -- kill -9 -----------------------------------------------------------------------------

CHILD = """
import sys, time, levattn

def slowly(done, total):
    print(done, flush=True)
    time.sleep(0.005)

source = levattn.open_keys(sys.argv[1], chunk_rows=100)
levattn.scan_set(source, 0.01, checkpoint=sys.argv[2], checkpoint_rows=100, progress=slowly)
"""


# of the first pass and of the second, and others elsewhere
@pytest.mark.parametrize("kill", [1, 3, *(pytest.param(kill, marks=pytest.mark.thorough) for kill in (0, 2, 4))])
def test_kill(tmp_path: Path, kill: int) -> None:
    """A process that is killed leaves a checkpoint that is whole, or none."""
    rng = np.random.default_rng(kill)
    keys, path = saved(tmp_path, K0.astype(np.float32)), tmp_path / "checkpoint"
    lines = int(rng.integers(1 + 25 * kill, 25 + 25 * kill))  # of 131
    command = [sys.executable, "-c", CHILD, str(keys), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(lines):
            assert child.stdout.readline()
        time.sleep(rng.uniform(0, 0.01))
        child.kill()
    assert child.returncode != 0  # it did not come to its end
    source = levattn.open_keys(keys)
    calls: list[int] = []
    found = levattn.scan_set(source, EPSILON, checkpoint=path, progress=lambda done, _: calls.append(done))
    assert_same(found, levattn.universal_set(source, EPSILON))
    assert calls[0] >= 100 * (lines - 2)  # what the process had done but for a chunk or two
    assert [*tmp_path.iterdir()] == [keys]
