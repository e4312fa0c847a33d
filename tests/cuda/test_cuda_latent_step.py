"""Steps of decoding by latent attention on a CUDA device, run on the CPU, against the loops over rows and latents.

Inside: the kernel of a step is compared with the one of many rows, at the limits of its memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from definitions import assert_same

import naive
from emulator import in_orders
from levattn._kernels.latent import LatentArguments, cuda
from levattn._kernels.latent.cuda import _ROWS, forward, step, summary

pytestmark = pytest.mark.usefixtures("host")

TOLERANCE = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-3}  # some roundings of the output, values of about 1
BEFORE = 9  # positions of the state, before those of the step


def positions(
    T: int, L: int, D: int, dtype: str = "float64", *, b: int = 2, scale: float = 1.0, seed: int = 0
) -> tuple[Any, ...]:
    """Q, K and V at random, logits as large as `scale`."""
    rng = np.random.default_rng(seed)
    Q, K = (scale * rng.standard_normal((b, BEFORE + T, L)) for _ in range(2))
    return Q.astype(dtype), K.astype(dtype), rng.standard_normal((b, BEFORE + T, D)).astype(dtype)


def state_of(K: Any, V: Any, mask: Any = None) -> tuple[Any, ...]:
    """The state of positions in float64, by its definition."""
    K, V = K.astype(np.float64), V.astype(np.float64)
    if mask is not None:
        K = np.where(mask[..., None], K, -np.inf)
    m = K.max(axis=1)
    E = np.exp(K - np.where(m == -np.inf, 0, m)[:, None])
    seen = ~np.isneginf(K).all(axis=2)[..., None]
    return m, E.sum(axis=1), np.swapaxes(E, 1, 2) @ np.where(seen, V, 0)


def after(T: int, *arrays: Any) -> list[Any]:
    """The last T positions of arrays (b, T, ...), or None for None."""
    return [None if array is None else array[:, array.shape[1] - T :] for array in arrays]


def check(T: int, Q: Any, K: Any, V: Any, mask: Any = None, *, run: Any = in_orders) -> None:
    """Compare the output of the last rows, and the state after them, with the definitions."""
    before = [None if array is None else array[:, : array.shape[1] - T] for array in (K, V, mask)]
    state = state_of(*before)

    def stepped() -> tuple[Any, ...]:
        Y, new = step(*after(T, Q, K, V, mask), state)
        return (Y, *new)

    Y, *new = run(stepped)
    assert Y.dtype == V.dtype
    size = max(1.0, float(np.abs(V).max()))  # as a float16, 1e-13 times it would be 0
    for i in range(len(Q)):
        expected = naive.latte(Q[i], K[i], V[i], mask=None if mask is None else mask[i])[-T:]
        np.testing.assert_allclose(Y[i], expected, rtol=0, atol=TOLERANCE[V.dtype.name] * size)
    for part, expected in zip(new, state_of(K, V, mask), strict=True):
        np.testing.assert_allclose(part, expected, rtol=1e-13, atol=1e-13 * size)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("T", [1, 2, 5, _ROWS])
@pytest.mark.parametrize(("L", "D"), [(1, 1), (5, 33), (33, 3), (70, 64)])
def test_rows_and_states_are_those_of_the_definition(L: int, D: int, T: int, dtype: str) -> None:
    check(T, *positions(T, L, D, dtype))


@pytest.mark.parametrize("scale", [30, 300, 1e4])
def test_logits_of_any_size(scale: float) -> None:
    check(4, *positions(4, 6, 5, scale=scale))
    Q, K, V = positions(4, 6, 5, "float32", scale=scale, seed=1)
    K[:, -2:] += 40 * scale  # beyond all before them
    check(4, Q, K, V)


def test_values_of_any_size() -> None:
    """They are summed up in double precision, where those of single precision have room."""
    Q, K, V = positions(3, 5, 4, "float32")
    for size in (1e34, 1e38, 1e-38):
        check(3, Q, K, (np.clip(V, -3, 3) * size).astype(np.float32))


def test_masked_and_unseen_positions_do_nothing() -> None:
    T = 4
    Q, K, V = positions(T, 6, 5, b=3)
    mask = np.random.default_rng(1).random(K.shape[:2]) < 0.5
    mask[0, -T:], mask[1] = [False, True, False, True], False
    K[2, :, 1] = -np.inf  # a latent that sees nothing
    K[2, -3] = -np.inf  # and a position that no latent sees
    check(T, Q, K, V, mask)
    expected = step(*after(T, Q, K, V, mask), None)
    unseen = ~mask | np.isneginf(K).all(axis=2)
    K[~mask], V[unseen] = np.nan, np.nan
    Y, state = step(*after(T, Q, K, V, mask), None)
    assert not Y[1].any()
    assert_same([Y, *state], [expected[0], *expected[1]])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_first_rows_begin_with_no_position(dtype: str) -> None:
    Q, K, V = (array[:, :3] for array in positions(3, 6, 40, dtype))
    empty = np.full((2, 6), -np.inf), np.zeros((2, 6)), np.zeros((2, 6, 40))
    Y, state = step(Q, K, V, None, None)
    for i in range(2):
        np.testing.assert_allclose(Y[i], naive.latte(Q[i], K[i], V[i]), rtol=0, atol=TOLERANCE[dtype])
    again, other = step(Q, K, V, None, empty)
    assert_same([again, *other], [Y, *state])


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite_reach_the_rows_that_see_them(number: float) -> None:
    T, (Q, K, V) = 4, positions(4, 3, 2, b=4)
    state = state_of(K[:, :-T], V[:, :-T])
    q, k, v = after(T, Q, K, V)
    expected, _ = step(q, k, v, None, state)
    q[0, 1, 1] = k[1, 2, 2] = number
    v[2, 3, 1] = np.nan
    expected[0, 1] = expected[1, 2:] = expected[2, 3, 1] = np.nan
    Y, new = step(q, k, v, None, state)
    np.testing.assert_array_equal(Y, expected)
    again, _ = step(q[1:2, :1], np.zeros_like(k[1:2, :1]), v[3:, :1], None, tuple(part[1:2] for part in new))
    assert np.isnan(again).all()  # what a state has met stays


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_no_bit_depends_on_the_batch_on_columns_or_on_how_many_rows_come(dtype: str) -> None:
    T, (Q, K, V) = 6, positions(6, 20, 40, dtype, b=3)
    state = state_of(K[:, :-T], V[:, :-T])
    rows = after(T, Q, K, V)
    Y, new = step(*rows, None, state)
    one, held = [], tuple(part[1:2] for part in state)
    for t in range(T):
        y, held = step(*(array[1:2, t : t + 1] for array in rows), None, held)
        one.append(y)
    assert_same([np.concatenate(one, 1), *held], [Y[1:2], *(part[1:2] for part in new)])
    m, s, S = state
    few, _ = step(*rows[:2], rows[2][..., 3:7], None, (m, s, S[..., 3:7]))
    np.testing.assert_array_equal(few, Y[..., 3:7])


def test_arrays_of_any_layout() -> None:
    T, (Q, K, V) = 3, positions(3, 4, 6, b=3)
    state, mask = state_of(K[:, :-T], V[:, :-T]), np.array([[True, False, True]] * 3)
    rows = [array.copy() for array in after(T, Q, K, V)]
    Y, new = step(*rows, mask, state)
    turned = [np.asfortranarray(part) for part in (*rows, *state)]
    found, other = step(*turned[:3], np.asfortranarray(mask), tuple(turned[3:]))
    assert_same([found, *other], [Y, *new])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize(("T", "room"), [(_ROWS + 1, True), (200, True), (1, False)])
def test_more_rows_or_latents_than_a_block_takes_go_by_runs(
    T: int, room: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the bits are those of the two calls that it stands for, and with a state before it is these two."""
    if not room:  # in shared memory
        monkeypatch.setattr(cuda, "shared_limit", lambda: 16 << 10)
    Q, K, V = after(T, *positions(T, 3, 2, dtype))
    mask, bounds = np.arange(2 * T).reshape(2, T) % 3 > 0, np.array([0, T])
    Y, state = step(Q, K, V, mask, None)
    assert Y.dtype == V.dtype
    np.testing.assert_array_equal(Y, forward(LatentArguments(Q, K, V, bounds, causal=True, mask=mask)))
    assert_same(state, [part[:, 0] for part in summary(K, V, mask, bounds)])
    assert step(Q, K, V, mask, state) is None
    assert step(*(array[:, :0] for array in (Q, K, V)), None, None) is None
