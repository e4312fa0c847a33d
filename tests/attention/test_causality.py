"""Causality to the bit: row i of a causal operator depends on the positions up to i alone, whatever comes after.

Inside: runs of positions are made short, since the emulated device takes its time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from operator_table import LATTE, MEMORIES, MIXTURES, WINDOWS, Operator, T, of_forms

from emulator import device
from levattn import CausalUniversalSet, HeavyKeys, causal_heavy_attention, online_leverage_scores
from levattn._core import arrays
from levattn.attention import memberships
from libraries import needs_torch, stored

WHOLE, PAST = 260, (64, 203)
SHORT, SHORT_PAST = 100, (40, 69)  # on the emulated device, where sequences are cut into runs of 16 and 32 positions
LONG, LONG_PAST = 600, (64, 300, 513)  # heavy attention takes 256 rows at a time


def heavy(Q: Any, K: Any, V: Any) -> Any:
    """Entries, normalizers, masses and outputs of each position, side by side."""
    found = [causal_heavy_attention(q, k, 0.02) for q, k in zip(Q, K, strict=True)]
    parts = []
    for one, v in zip(found, V, strict=True):
        entries = np.pad(one.entries.toarray(), ((0, 0), (0, LONG - len(v))))
        output, bound = (np.asarray(bare(part)) for part in one.apply(v))
        figures = (one.normalizers, one.captured_mass, one.residual_mass, bound)
        parts.append(np.column_stack([entries, *(np.asarray(bare(part)) for part in figures), output]))
    return np.stack(parts)


STEPS = (0, 1, 2, 40, *range(64, 70), 203, 260, 300, 512, 513, LONG)  # where the chunks of a causal set begin and end


def causal_set(Q: Any, K: Any) -> Any:
    """Entries, normalizers, masses and errors of each query over the keys up to the end of its chunk."""
    states, parts = [CausalUniversalSet(0.02) for _ in K], []
    for start, stop in pairwise(sorted({min(step, K.shape[1]) for step in STEPS})):
        chunk = [state.update(k[start:stop]).heavy(q[start:stop]) for state, q, k in zip(states, Q, K, strict=True)]
        parts.append(np.stack([figures_of(found) for found in chunk]))
    return np.concatenate(parts, axis=1)


def figures_of(found: HeavyKeys) -> Any:
    """What is known of each query, side by side."""
    entries = np.zeros((len(found.normalizers), LONG))
    entries[np.repeat(np.arange(len(entries)), np.diff(found.starts)), found.indices] = found.scores
    return np.column_stack([entries, found.normalizers, found.captured_mass, found.error])


def bare(x: Any) -> Any:
    """An array, read back if it lies on the device."""
    return x.get() if arrays.on_cuda(x) else x


def of(operator: Operator, **options: Any) -> Operator:
    """An operator of the table with options of its own."""
    return replace(operator, run=partial(operator.run, **options))


FORMS = {**of_forms(causal=True), **LATTE, **MEMORIES}
OPERATORS: dict[str, Operator] = {
    **{
        f"pruned, {form}": of(FORMS[f"pruned, {form}"], renew_every=16)
        for form in ("default", "dropped", "leverage", "threshold", "squares")
    },
    "heavy": Operator(heavy, ((T, 4),) * 3),
    "causal set": Operator(causal_set, ((T, 4),) * 2),
    "online leverage": Operator(online_leverage_scores, ((T, 4),)),
    "online leverage, ridge": Operator(partial(online_leverage_scores, ridge=0.5), ((T, 4),)),
    **{name: of(operator, window=40) for name, operator in WINDOWS.items()},
    **{name: of(operator, window=40, softcap=None) for name, operator in MIXTURES.items()},
    **{name: FORMS[name] for name in (*MEMORIES, "latte", "tssa, released", "tssa, decayed", "tssa, paper")},
    "memberships": Operator(memberships, ((3, T, 4), (3,))),
}
# Products of matrices of numpy and torch, and its exponentials, round by shapes and places in an array, which other
# lengths move: rows are the same to rounding there, as the docstrings say.
TO_ROUNDING = {"numpy": {*WINDOWS, *MIXTURES}}
TO_ROUNDING["torch"] = TO_ROUNDING["numpy"] | {"rg_lru"}
TO_ROUNDING["device"] = TO_ROUNDING["numpy"]
FUTURES: dict[str, Callable[[Any, Any], Any]] = {
    "zeros": lambda _, X: 0 * X,
    "tiny": lambda _, X: 1e-30 * X,
    "noise": lambda rng, X: rng.standard_normal(X.shape),
    "constant": lambda _, X: np.full_like(X, -3.0),
    "huge": lambda _, X: 1e8 * X,
    "steep": lambda rng, X: X * 10.0 ** rng.uniform(-8, 8, X.shape),
}
STRONGEST = ("huge", "steep")

MARKS: dict[str, Any] = {
    "numpy": (),
    "torch": needs_torch,
    "device": pytest.mark.skipif(not device.AVAILABLE, reason="there is neither a CUDA device nor g++ to emulate one"),
}
WHERE = [
    pytest.param(
        name, place, dtype, marks=(mark, pytest.mark.thorough) if (place, dtype) == ("torch", "float32") else mark
    )
    for name in OPERATORS
    for place, mark in MARKS.items()
    if not (place == "device" and name.startswith("pruned"))  # which takes no arrays of CuPy
    for dtype in ("float64", "float32")
    if not (place == "device" and dtype == "float32")  # emulated, which takes its time
]


@pytest.fixture(autouse=True)
def runs_on_the_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate a device where there is to be one, with sequences in runs of few positions."""
    if request.getfixturevalue("storage") == "device":
        device.library_on_device(monkeypatch)
        device.short_runs(monkeypatch)


def results(name: str, arrays: Any, storage: str) -> Any:
    with np.errstate(all="ignore"):
        if storage == "device":
            import cupy  # the emulator's, where there is no card

            return np.asarray(bare(OPERATORS[name].run(*map(cupy.asarray, arrays))))
        return np.asarray(OPERATORS[name].run(*(stored(X, storage) for X in arrays)))


def rows(Y: Any, n: int, length: int) -> Any:
    """The first n of the rows: scores have them last, memberships and others before the last axis."""
    return Y[..., :n] if Y.ndim == 2 or Y.shape[-1] == length else Y[..., :n, :]


@pytest.mark.parametrize(("name", "storage", "dtype"), WHERE)
def test_no_future_changes_a_bit_of_the_past(name: str, storage: str, dtype: str) -> None:
    if storage == "device":
        length, cuts = (WHOLE, PAST) if name == "heavy" else (SHORT, SHORT_PAST)
        past_stands(name, storage, dtype, length, cuts, STRONGEST)
    else:
        past_stands(name, storage, dtype, WHOLE, PAST, tuple(FUTURES))


@pytest.mark.parametrize("storage", ["numpy"])
@pytest.mark.parametrize("name", ["heavy", "causal set"])
def test_no_future_changes_a_bit_beyond_the_first_chunk(name: str, storage: str) -> None:
    past_stands(name, storage, "float64", LONG, LONG_PAST, ("zeros", "huge", "steep"))


def past_stands(
    name: str, storage: str, dtype: str, length: int, cuts: tuple[int, ...], futures: tuple[str, ...]
) -> None:
    """Rows before a cut have the same bits whatever comes after, and if nothing does.

    Where all futures are asked for, they follow the first cut, and the strongest the others.
    """
    operator, rng = OPERATORS[name], np.random.default_rng(0)
    arrays = [x.astype(dtype) for x in operator.arrays(length)]
    whole = results(name, arrays, storage)
    for n in cuts:
        past = rows(whole, n, length)
        assert np.isfinite(past).all()
        for future in STRONGEST if n != cuts[0] and len(futures) == len(FUTURES) else futures:
            other = [x.copy() for x in arrays]
            tails = operator.cut(other, n, length), operator.cut(arrays, n, length)
            for shape, new, tail in zip(operator.shapes, *tails, strict=True):
                if T in shape:
                    new[...] = FUTURES[future](rng, tail)
            found = rows(results(name, other, storage), n, length)
            np.testing.assert_array_equal(found, past, err_msg=f"{future} from {n}")
        shorter = results(name, operator.cut(arrays, 0, n), storage)
        if name in TO_ROUNDING[storage]:
            np.testing.assert_allclose(shorter, past, rtol=0, atol=64 * np.finfo(dtype).eps * abs(past).max())
        else:
            np.testing.assert_array_equal(shorter, past, err_msg=f"length {n}")


@pytest.mark.parametrize(("name", "storage", "dtype"), WHERE)
def test_no_batch_mate_changes_a_bit(name: str, storage: str, dtype: str) -> None:
    operator = OPERATORS[name]
    arrays = [x.astype(dtype) for x in operator.arrays(WHOLE, (5,), seed=1)]
    whole = results(name, arrays, storage)
    for some in (slice(0, 1), slice(2, 4)):
        found = results(name, operator.each(lambda x, some=some: x[some], arrays), storage)
        # torch's products of several matrices round by their number, and its exponentials by places in an array
        if storage == "torch" and name in ("window, capped", "rg_lru"):
            np.testing.assert_allclose(found, whole[some], rtol=0, atol=64 * np.finfo(dtype).eps * abs(whole).max())
        else:
            np.testing.assert_array_equal(found, whole[some])
