"""Attention operators, one table of them times their properties: states, sequences, masks, layouts, precision.

What an operator computes is compared with its definition in the tests of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from operator_table import LATTE, MEMORIES, MIXTURES, PRUNED_FORMS, WINDOWS, Operator, T, of_forms

import levattn
from levattn.attention import MacchiatoState, PrunedState
from levattn.states import SoftmaxState, TokenState
from libraries import needs_torch
from strategies import LAYOUTS, STORAGE, as_float64

pytestmark = pytest.mark.usefixtures("one_thread")

FORMS, FORMS_EVERYWHERE = of_forms(causal=True), of_forms(causal=False)
STREAMED: dict[str, Operator] = {"latte": LATTE["latte"], **MIXTURES, **MEMORIES, **FORMS}
ALL: dict[str, Operator] = {**LATTE, **WINDOWS, **MIXTURES, **MEMORIES, **FORMS, **FORMS_EVERYWHERE}
TOLERANCE = {
    "latte": 1e-12,
    "window": 1e-13,
    "macchiato": 1e-13,
    "rg_lru": 1e-13,
    "causal_conv": 1e-13,
    "tssa": 1e-12,
    "pruned": 1e-10,
}
SINGLE = {"latte": 32 * 2.0**-23, "tssa": 1e-6}
# One of each family is tried in other libraries: those with entries in SINGLE in all of them, others in the first two
FIRST = ("latte", "macchiato", "rg_lru", "causal_conv", "tssa, released", "pruned, default")
LIBRARIES = ("strict-float64", "torch-float64", "cupy-float64", "cupy-float32", "float32", "torch-float32")


LENGTH = 64  # after which all forms of causal pruned attention have selected, also without masked positions


def family(name: str) -> str:
    return name.partition(",")[0].partition(" ")[0]


def over(names: Any) -> pytest.MarkDecorator:
    """Each operator on arrays of numpy, and the first of each family on the others that it takes."""
    items = [(name, "float64") for name in names]
    for name in FIRST:
        libraries = LIBRARIES if family(name) in SINGLE else LIBRARIES[:2]
        items += [(name, storage) for storage in libraries if name in names]
    return pytest.mark.parametrize(
        ("name", "storage"),
        [
            pytest.param(name, storage, marks=pytest.mark.skipif(storage not in STORAGE, reason="no such package"))
            for name, storage in items
        ],
    )


def tolerance(name: str, storage: str) -> float:
    return TOLERANCE[family(name)] if storage.endswith("64") else SINGLE[family(name)]


def stored(storage: str, arrays: Iterable[Any]) -> list[Any]:
    """Arrays in a library and a format."""
    return [STORAGE[storage](x) for x in arrays]


def figures(state: Any) -> list[Any]:
    """The numbers that a state holds."""
    if isinstance(state, SoftmaxState):
        return [as_float64(state.result())]
    if isinstance(state, TokenState):
        sums = [part for part in (state.norms, state.tokens) if part is not None]
        return [as_float64(x) for part in sums for x in (part.result(), part.count)]
    if isinstance(state, MacchiatoState):
        ring = [x for x in (state.k, state.V, state.logits) if x is not None]
        return [*map(as_float64, (state.latents.result(), *ring)), np.asarray(state.positions)]
    if isinstance(state, PrunedState):
        return []  # what it holds depends on how much of it is not yet merged
    return [as_float64(state)]


def flags(length: int, seed: int = 1) -> Any:
    """Masks of two items: one padded in front, one behind, with gaps."""
    mask = np.random.default_rng(seed).random((2, length)) > 0.3
    mask[0, :9], mask[1, length - 6 :] = False, False
    return mask


# -- states --------------------------------------------------------------------------------


@over(STREAMED)
def test_steps_chunks_and_everything_at_once_agree(name: str, storage: str) -> None:
    operator, room = STREAMED[name], tolerance(name, storage)
    length = 210 if name.startswith("tssa") and not storage.startswith("cupy") else LENGTH
    arrays = stored(storage, operator.arrays(length, scale=3.0 if name == "latte" else 1.0))
    for mask in (None, flags(length)) if storage == "float64" else (flags(length),):
        Y, whole = operator.run(*arrays, mask=operator.mask(mask), return_state=True)
        for sizes in ([1] * length, [10, 1, 0, 13, length - 24], [length - 1, 1], [0, 7, 7, length - 14]):
            parts, state = [], None
            for low, high in pairwise(np.cumsum([0, *sizes]).tolist()):
                here = None if mask is None else mask[:, low:high]
                options = {"state": state, "mask": operator.mask(here), "return_state": True}
                y, state = operator.run(*operator.cut(arrays, low, high), **options)
                parts.append(as_float64(y))
            np.testing.assert_allclose(np.concatenate(parts, axis=-2), as_float64(Y), rtol=0, atol=room)
            assert type(state) is type(whole)
            for found, expected in zip(figures(state), figures(whole), strict=True):
                np.testing.assert_allclose(found, expected, rtol=10 * room, atol=room)
            if isinstance(state, PrunedState):
                assert state.positions == (length if mask is None else mask.sum(axis=1).max())
                assert state.nbytes == whole.nbytes or mask is not None
                assert state.slots == whole.slots or "threshold" in name


@pytest.mark.parametrize("name", STREAMED)
def test_a_given_state_is_not_changed_by_its_use(name: str) -> None:
    operator = STREAMED[name]
    arrays = operator.arrays(45)
    Y = operator.run(*arrays)
    _, state = operator.run(*operator.cut(arrays, 0, 33), return_state=True)
    held, tail = figures(state), operator.cut(arrays, 33, 45)
    copied = type(state).from_bytes(state.to_bytes()) if isinstance(state, SoftmaxState | TokenState) else state
    first, again = (operator.run(*tail, state=each) for each in (state, copied))
    np.testing.assert_array_equal(operator.run(*tail, state=state), first)
    np.testing.assert_array_equal(again, first)
    np.testing.assert_allclose(first, Y[..., 33:, :], atol=TOLERANCE[family(name)])
    for part, before in zip(figures(state), held, strict=True):
        np.testing.assert_array_equal(part, before)


SEPARATE = [*LATTE, *(name for name in (*FORMS, *FORMS_EVERYWHERE) if name.startswith("tssa"))]


@over(SEPARATE)
def test_packed_sequences_are_separate_ones(name: str, storage: str) -> None:
    operator, offsets = ALL[name], np.cumsum([0, 0, 5, 1, 0, 20, 11, 0])
    arrays, mask = stored(storage, operator.arrays(37)), flags(37)
    before = operator.run(*arrays, offsets=offsets, return_state=True)[1]
    Y, after = operator.run(*arrays, mask=mask, offsets=offsets, state=before, return_state=True)
    Y, room = as_float64(Y), tolerance(name, storage)
    same = operator.run(*arrays, mask=mask, offsets=offsets.tolist(), state=before)
    np.testing.assert_array_equal(as_float64(same), Y)
    for i, (low, high) in enumerate(pairwise(offsets.tolist())):
        part = operator.cut(arrays, low, high)
        state = operator.run(*part, return_state=True)[1]
        expected, own = operator.run(*part, mask=mask[:, low:high], state=state, return_state=True)
        np.testing.assert_allclose(Y[..., low:high, :], as_float64(expected), atol=room)
        for together, alone in zip(figures(after), figures(own), strict=True):
            of_sequence = np.take(together, i, axis=1 if isinstance(after, SoftmaxState) else 2)
            np.testing.assert_allclose(of_sequence, alone, rtol=room, atol=room)


# -- masks, axes and layouts ---------------------------------------------------------------


@pytest.mark.parametrize("name", [*SEPARATE, *MEMORIES])
def test_masked_positions_are_as_if_they_were_not_there(name: str) -> None:
    operator, mask = ALL[name], flags(50)
    arrays = operator.arrays(50)
    dirty = [x.copy() for x in arrays]
    for place in operator.unread:
        np.moveaxis(dirty[place], operator.shapes[place].index(T) + 1, 1)[~mask] = np.nan
    Y, state = operator.run(*dirty, mask=mask, return_state=True)
    for i in range(2):
        there = np.flatnonzero(mask[i])
        alone = [
            np.take(x[i], there, axis=shape.index(T)) if T in shape else x
            for x, shape in zip(arrays, operator.shapes, strict=True)
        ]
        expected, own = operator.run(*alone, return_state=True)
        np.testing.assert_allclose(Y[i][..., there, :], expected, atol=1e-13)
        for together, part in zip(figures(state), figures(own), strict=True):
            np.testing.assert_allclose(together[i], part, rtol=1e-12, atol=1e-13)
        if name.startswith("tssa"):
            assert not Y[i][..., ~mask[i], :].any()
    if name.startswith(("tssa", "latte")):
        nothing = operator.run(*dirty, mask=np.zeros((2, 50), bool))
        np.testing.assert_array_equal(nothing, 0)


@over([name for name in ALL if name not in MEMORIES and not name.startswith("pruned, own")])
def test_leading_axes_broadcast(name: str, storage: str) -> None:
    operator, batches = ALL[name], [(2, 3), (3,), (2, 1)]
    numbers = [operator.arrays(9, batches[place % 3])[place] for place in range(len(operator.shapes))]
    mask = np.random.default_rng(21).random((2, 1, 9)) > 0.2
    arrays = stored(storage, numbers)
    Y = as_float64(operator.run(*arrays, mask=operator.mask(mask)))
    assert Y.shape[:2] == (2, 3)
    for b, h in np.ndindex(2, 3):
        one = [
            np.broadcast_to(x, (2, 3, *x.shape[x.ndim - len(shape) :]))[b, h].copy() if T in shape else x
            for x, shape in zip(numbers, operator.shapes, strict=True)
        ]
        expected = operator.run(*stored(storage, one), mask=operator.mask(mask[b, 0]))
        np.testing.assert_allclose(Y[b, h], as_float64(expected), atol=max(tolerance(name, storage), 1e-13))


@pytest.mark.parametrize("name", [*WINDOWS, *MIXTURES, "pruned, no-window", "pruned, no-window everywhere"])
def test_one_head_needs_no_axis(name: str) -> None:
    arrays = ALL[name].arrays(40, ())
    alone = ALL[name].run(*(x[0] for x in arrays))
    np.testing.assert_allclose(alone, ALL[name].run(*(x[:1] for x in arrays))[0], atol=1e-15)


def heads_last(x: Any) -> Any:
    """An array in which the items of a position, or its heads, lie beside one another."""
    return np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3)


BITWISE = [*LATTE, *MEMORIES, "tssa, released", "tssa, released-bidirectional"]
BITWISE += [f"pruned, {form}{end}" for form in ("default", "threshold", "squares") for end in ("", " everywhere")]


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("name", BITWISE)
def test_layouts_batch_mates_and_threads_change_no_bit(name: str, dtype: str) -> None:
    operator = ALL[name]
    arrays = stored(dtype, operator.arrays(70, (3,)))
    Y = operator.run(*arrays)
    for layout in (*LAYOUTS.values(), heads_last):
        np.testing.assert_array_equal(operator.run(*operator.each(layout, arrays)), Y)
    np.testing.assert_array_equal(operator.run(*operator.each(lambda x: x[1], arrays)), Y[1])
    with levattn.thread_limit(1):
        np.testing.assert_array_equal(operator.run(*arrays), Y)


@pytest.mark.crossed
@pytest.mark.parametrize("storage", ["float16", pytest.param("torch-bfloat16", marks=needs_torch)])
@pytest.mark.parametrize("name", [name for name in ALL if name not in MEMORIES])
def test_halves_are_computed_in_single_precision(name: str, storage: str) -> None:
    arrays = stored(storage, ALL[name].arrays(40))
    Y = ALL[name].run(*arrays)
    assert Y.dtype == arrays[0].dtype
    single = stored(storage.replace("bfloat16", "float32").replace("float16", "float32"), map(as_float64, arrays))
    rounded = as_float64(STORAGE[storage](as_float64(ALL[name].run(*single))))
    np.testing.assert_array_equal(as_float64(Y), rounded)


@pytest.mark.parametrize("name", [f"pruned, {form}{end}" for form in PRUNED_FORMS for end in ("", " everywhere")])
def test_single_precision_follows_double(name: str) -> None:
    arrays = stored("float32", ALL[name].arrays(40))
    Y = ALL[name].run(*arrays)
    assert Y.dtype == np.float32
    np.testing.assert_allclose(Y, ALL[name].run(*(x.astype(np.float64) for x in arrays)), atol=2e-5)


# -- nothing to do ---------------------------------------------------------------------------


@over([name for name in ALL if not name.startswith(("pruned", "macchiato", "window"))])
def test_no_positions_and_no_items(name: str, storage: str) -> None:
    operator = ALL[name]
    for batch, length in (((), 0), ((2,), 0), ((0,), 4), ((3, 0), 4)):
        arrays = stored(storage, operator.arrays(length, batch))
        Y, state = operator.run(*arrays, return_state=True)
        assert tuple(Y.shape) == tuple(arrays[0].shape[:-1]) + tuple(Y.shape[-1:])
        assert not any(np.isfinite(x).any() and np.nan_to_num(x, neginf=0).any() for x in figures(state))
        if not batch:
            for options in ({"offsets": [0]}, {"offsets": [0, 0, 0]}):
                assert operator.run(*arrays, **options).shape == Y.shape


# -- arguments -------------------------------------------------------------------------------

WRONG_MASKS: list[tuple[Any, type[Exception], str]] = [
    (np.ones(5, bool), ValueError, r"mask has shape \(5,\); expected \(..., 6\)"),
    (np.ones(6), TypeError, "mask has dtype float64; expected bool"),
]
WRONG_SEQUENCES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"offsets": [0, 5]}, ValueError, "offsets is .*ascend from 0 to T = 6"),
    ({"offsets": [0, 4, 3, 6]}, ValueError, "ascend from 0 to T = 6"),
    ({"offsets": []}, ValueError, "ascend from 0 to T = 6"),
    ({"offsets": [0.0, 6.0]}, TypeError, "offsets is .* whole numbers"),
    ({"offsets": [0, 7, 6]}, ValueError, "ascend from 0 to T = 6"),
    ({"offsets": np.array([0, 2**63, 6], np.uint64)}, ValueError, "offsets is .* below 2"),
    ({"offsets": 6}, TypeError, "offsets is 6; expected one axis of whole numbers"),
    ({"lengths": [6]}, TypeError, "unexpected keyword argument 'lengths'"),
]


@pytest.mark.parametrize("name", [*LATTE, *WINDOWS, *MIXTURES, *MEMORIES])
def test_arrays_that_are_missing_are_named(name: str) -> None:
    arrays = ALL[name].arrays(6)
    for place in range(len(arrays) - (name == "causal_conv")):  # whose bias may be missing
        with pytest.raises(TypeError, match="is of type NoneType; expected a dense array"):
            ALL[name].run(*(None if i == place else x for i, x in enumerate(arrays)))


@pytest.mark.parametrize("name", [*LATTE, *WINDOWS, *MIXTURES, *MEMORIES, *FIRST[4:]])
def test_wrong_masks_and_sequences_are_named(name: str) -> None:
    arrays = ALL[name].arrays(6)
    for mask, error, message in WRONG_MASKS:
        with pytest.raises(error, match=message):
            ALL[name].run(*arrays, mask=mask)
    for options, error, message in WRONG_SEQUENCES if not name.startswith("pruned") else ():
        with pytest.raises(error, match=message):
            ALL[name].run(*arrays, **options)
