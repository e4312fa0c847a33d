"""Latte: its definition, its symmetries, its states, and what it does at the edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import naive
import strategies
from levattn import thread_limit
from levattn.attention import latte
from levattn.states import SoftmaxState
from strategies import STORAGE, Float, as_float64

SCALES = (1.0, 30.0, 300.0)
SETTINGS = strategies.examples(15)
# 32 roundings of values of about 1: differences of logits that leave a weight are small, whatever the logits. Halves
# are computed in float32 and rounded once.
TOLERANCE = {name: 32 * float(np.finfo(name).eps) for name in ("float64", "float32")}
TOLERANCE |= {"float16": 1e-3, "bfloat16": 8e-3}
STORAGES = strategies.ALL_STORAGE
WIDE = tuple(name for name in STORAGES if name.endswith(("64", "32")))


def logits_and_values(
    seed: int, T: int = 37, L: int = 5, D: int = 3, *, scale: float = 1.0, U: int | None = None, batch: Any = ()
) -> tuple[Float, Float, Float]:
    rng = np.random.default_rng(seed)
    U = T if U is None else U
    Q, K = (rng.standard_normal((*batch, rows, L)) * scale for rows in (T, U))
    return Q, K, rng.standard_normal((*batch, U, D))


def tolerance(storage: str) -> float:
    return TOLERANCE[storage.rpartition("-")[2]]


def weights(Q: Float, K: Float, **options: Any) -> Float:
    """The matrix that is applied to the values."""
    P = latte(Q, K, np.eye(K.shape[-2]), **options)
    assert isinstance(P, np.ndarray)
    return P


def stored(storage: str, *arrays: Float) -> tuple[list[Any], list[Float]]:
    """Arrays in a storage type, and the numbers that these hold."""
    held = [STORAGE[storage](array) for array in arrays]
    return held, [as_float64(array) for array in held]


def in_chunks(arrays: list[Float], size: int) -> Float:
    """Outputs with the state handed from chunk to chunk."""
    parts, state = [], None
    for low in range(0, len(arrays[0]), size):
        Y, state = latte(*(x[low : low + size] for x in arrays), state=state, return_state=True)
        parts.append(Y)
    return np.concatenate(parts)


# -- the definition --------------------------------------------------------------------

MASK = np.ones(37, dtype=bool)
MASK[:6] = MASK[20:25] = MASK[33:] = False


def cases(causal: bool) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """What is compared with the loops: a name, logits and values, options."""
    for scale in SCALES:
        Q, K, V = logits_and_values(0, scale=scale)
        yield f"times {scale}", [Q, K, V], {}
        yield f"far below, times {scale}", [Q, K - 200, V], {}
        yield f"packed, times {scale}", [Q, K, V], {"offsets": [0, 11, 11, 37]}
        yield f"masked, times {scale}", [Q, K, V], {"mask": np.random.default_rng(1).random(37) > 0.2}
        padded = [np.where(MASK[:, None], x, np.nan) for x in (K, V)]
        yield f"padding that is NaN, times {scale}", [Q, *padded], {"mask": MASK}
        yield f"no weight for padding, times {scale}", [Q, np.where(MASK[:, None], K, -np.inf), V], {}
    yield "nothing", [Q, K, V], {"mask": np.zeros(37, dtype=bool)}
    for jump in (100.0, 200.0, 1e4):  # earlier rows are left alone
        yield f"a jump by {jump}", [Q, np.where(np.arange(37)[:, None] < 20, 0.0, jump) + 0 * K, V], {}
    Q, K, V = logits_and_values(29)
    K[:10, 2] = K[:, 4] = -np.inf  # latents that have seen nothing take no part
    Q[5, :3] = -np.inf
    yield "unseen latents", [Q, K, V], {}
    for T, U in () if causal else ((4, 9), (9, 4), (1, 30), (5, 1)):
        yield f"{T} rows, {U} positions", [*logits_and_values(17, T, U=U)], {}


@strategies.stores(*STORAGES)
@pytest.mark.parametrize("causal", [True, False])
def test_equals_the_loop_over_rows_and_latents(storage: str, causal: bool) -> None:
    for name, numbers, options in cases(causal):
        arrays, held = stored(storage, *numbers)
        Y = latte(*arrays, causal=causal, **options)
        assert Y.dtype == arrays[2].dtype
        expected = naive.latte(*held, causal=causal, **options)
        np.testing.assert_allclose(as_float64(Y), expected, atol=3 * tolerance(storage), err_msg=name)
        if name == "nothing":
            assert not as_float64(Y).any()
            _, state = latte(*arrays, return_state=True, **options)
            Y, expected = latte(*arrays, causal=causal, state=state), naive.latte(*held, causal=causal)
            np.testing.assert_allclose(as_float64(Y), expected, atol=3 * tolerance(storage))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("T", "L", "D"), [(1, 1, 1), (16, 4, 2), (97, 7, 5), (130, 64, 64)])
def test_chunks_recurrences_and_the_explicit_matrix_agree(T: int, L: int, D: int, dtype: Any, scale: float) -> None:
    arrays = [x.astype(dtype) for x in logits_and_values(T, T, L, D, scale=scale)]
    expected = naive.latte_recurrence(*arrays)
    atol = tolerance(np.dtype(dtype).name)
    np.testing.assert_allclose(latte(*arrays), expected, atol=atol)
    np.testing.assert_allclose(weights(*arrays[:2]) @ arrays[2].astype(np.float64), expected, atol=atol)
    for size in (1, 5, 64):
        np.testing.assert_allclose(in_chunks(arrays, size), expected, atol=atol)
    if T < 100:
        np.testing.assert_allclose(naive.latte(*arrays), expected, atol=1e-11)


@SETTINGS
@given(
    seed=st.integers(0, 2**32),
    T=st.integers(1, 40),
    L=st.integers(1, 9),
    scale=st.sampled_from(SCALES),
    causal=st.booleans(),
    dtype=st.sampled_from([np.float64, np.float32]),
)
def test_weights_are_distributions_over_what_is_seen(
    seed: int, T: int, L: int, scale: float, causal: bool, dtype: Any
) -> None:
    Q, K, V = (x.astype(dtype) for x in logits_and_values(seed, T, L, 2, scale=scale))
    P = weights(Q, K, causal=causal)
    assert P.min() >= 0
    np.testing.assert_allclose(P.sum(axis=1), 1, rtol=tolerance(np.dtype(dtype).name))
    if causal:
        assert not np.triu(P, 1).any()
    Y = latte(Q, K, V, causal=causal)
    most, least = (f.accumulate(V, axis=0) if causal else f.reduce(V, axis=0) for f in (np.maximum, np.minimum))
    room = 4 * np.finfo(dtype).eps * np.abs(V).max()
    assert np.all((least - room <= Y) & (most + room >= Y))


# -- symmetries --------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", SCALES)
def test_order_and_offset_of_what_is_seen_at_once_do_not_matter(causal: bool, scale: float) -> None:
    Q, K, V = logits_and_values(3, scale=scale)
    rng = np.random.default_rng(4)
    order = rng.permutation(Q.shape[1])
    Y = latte(Q, K, V, causal=causal)
    np.testing.assert_allclose(latte(Q[:, order], K[:, order], V, causal=causal), Y, atol=1e-12)
    rows, columns = rng.standard_normal((len(Q), 1)) * 50, rng.standard_normal((1, K.shape[1])) * 50
    np.testing.assert_allclose(latte(Q + rows, K + columns, V, causal=causal), Y, atol=1e-11)
    if not causal:
        order = rng.permutation(len(Q))
        np.testing.assert_allclose(latte(Q[order], K[order], V[order], causal=False), Y[order], atol=1e-12)


# -- special cases that are other things -------------------------------------------------


def test_one_latent_gives_the_running_weighted_mean_whatever_the_rows_ask() -> None:
    Q, K, V = logits_and_values(8, L=1)
    E = np.exp(K)
    np.testing.assert_allclose(latte(Q, K, V), np.cumsum(E * V, axis=0) / np.cumsum(E, axis=0), atol=1e-14)
    mean = np.cumsum(V, axis=0) / np.arange(1, len(V) + 1)[:, None]
    np.testing.assert_allclose(latte(30 * Q, 0 * K, V), mean, atol=1e-14)


def test_a_latent_per_position_gives_any_stochastic_matrix() -> None:
    rng = np.random.default_rng(9)
    P = rng.dirichlet(np.ones(20), size=20)
    K = np.where(np.eye(20, dtype=bool), 0.0, -1e4)
    np.testing.assert_allclose(weights(np.log(P), K, causal=False), P, atol=1e-15)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [0.0, 3.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-11), (np.float32, 1e-5)])
def test_a_constant_value_comes_out_as_it_is(dtype: Any, tolerance: float, scale: float, causal: bool) -> None:
    """Also where logits are all the same, so that all additions are rounded in one direction."""
    Q, K, _ = (x.astype(dtype) for x in logits_and_values(10, 300_000, 2, 1, scale=scale))
    for value in (0.51, 0.7):
        Y = latte(Q, K, np.full((len(K), 1), value, dtype), causal=causal)
        np.testing.assert_allclose(Y, value, rtol=tolerance)


# -- states --------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_rows_see_the_state_and_an_empty_one_is_nothing(causal: bool) -> None:
    Q, K, V = logits_and_values(14, scale=30.0)
    _, state = latte(Q[:20], K[:20], V[:20], return_state=True)
    expected = latte(Q, K, V)[20:] if causal else latte(Q[20:], K, V, causal=False)
    np.testing.assert_allclose(latte(Q[20:], K[20:], V[20:], causal=causal, state=state), expected, atol=1e-13)
    empty = latte(Q, K, V, causal=causal, state=SoftmaxState(5, 3))
    np.testing.assert_array_equal(empty, latte(Q, K, V, causal=causal))


# What a position may hold: its logits, as a function of random ones, and whether a mask leaves it out
POSITIONS: dict[str, Callable[[Float], Float]] = {
    "larger": lambda k: k + 50,
    "unseen": lambda k: np.full_like(k, -np.inf),
    "unseen-by-one": lambda k: np.where(np.arange(k.shape[-1]) == 1, -np.inf, k),
    "nan": lambda k: np.where(np.arange(k.shape[-1]) == 2, np.nan, k),
    "infinite": lambda k: np.where(np.arange(k.shape[-1]) == 2, np.inf, k),
    "masked": lambda k: k,
}


@pytest.mark.parametrize("kind", ["float64", "float32"])
@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize(("L", "D"), [(5, 3), (16, 8), (33, 70)])
def test_a_step_is_the_first_row_of_a_longer_call(L: int, D: int, name: str, kind: str) -> None:
    Q, K, V = (x.astype(kind) for x in logits_and_values(16, T=30, L=L, D=D, batch=(3,)))
    K[:, 20] = POSITIONS[name](K[:, 20])
    V[:, 20, 0] = np.inf if name in ("unseen", "masked") else V[:, 20, 0]
    seen = np.arange(30) != 20 if name == "masked" else None
    before = K[:, :20].copy()
    before[1, :, 0] = -np.inf  # a latent that has seen nothing
    _, state = latte(Q[:, :20], before, V[:, :20], return_state=True)
    rest, step = ([x[:, part] for x in (Q, K, V)] for part in (slice(20, None), slice(20, 21)))
    mask = None if seen is None else seen[20:]
    Y, after = latte(*step, state=state, return_state=True, mask=None if seen is None else seen[20:21])
    np.testing.assert_array_equal(Y, latte(*rest, state=state, mask=mask)[:, :1])
    new = SoftmaxState(L, D, (3,)).update(step[1], step[2], None if seen is None else np.zeros((3, 1), bool))
    expected = state.copy().merge(new)
    np.testing.assert_array_equal(after.m, expected.m)
    for found, wanted in ((after.s, expected.s), (after.S, expected.S)):
        np.testing.assert_allclose(found, wanted, rtol=1e-14, atol=1e-14)


def test_a_step_from_references_that_float32_lacks() -> None:
    Q, K, V = logits_and_values(17)
    _, state = latte(Q[:20], K[:20], V[:20], return_state=True)
    arrays = [x[20:21].astype(np.float32) for x in (Q, K, V)]
    Y, after = latte(*arrays, state=state, return_state=True)
    np.testing.assert_array_equal(Y, latte(*arrays, state=state))
    np.testing.assert_allclose(after.result(), state.copy().merge(SoftmaxState(5, 3).update(*arrays[1:])).result())


@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_a_step_has_the_same_bits_however_arrays_and_state_lie_in_memory(kind: str) -> None:
    Q, K, V = (x.astype(kind) for x in logits_and_values(31, T=21, L=5, D=3, batch=(2, 3)))
    _, state = latte(*(x[..., :20, :] for x in (Q, K, V)), return_state=True)
    step = [x[..., 20:, :].copy() for x in (Q, K, V)]
    expected, after = latte(*step, state=state, return_state=True)
    for name, layout in strategies.LAYOUTS.items():
        held = SoftmaxState.from_arrays(*(layout(part) for part in (state.m, state.s, state.S)))
        for place in range(3):
            arrays = [layout(x) if i == place else x for i, x in enumerate(step)]
            for before in (state, held):
                Y, new = latte(*arrays, state=before, return_state=True)
                np.testing.assert_array_equal(Y, expected, name)
                for found, wanted in zip((new.m, new.s, new.S), (after.m, after.s, after.S), strict=True):
                    np.testing.assert_array_equal(found, wanted, name)
                    assert not any(np.may_share_memory(found, part) for part in (before.m, before.s, before.S))


# -- several sequences and heads -------------------------------------------------------------


@pytest.mark.parametrize("T", [4096, 5000])
def test_who_sums_positions_up_changes_no_bit(T: int) -> None:
    Q, K, V = (x.astype(np.float32) for x in logits_and_values(18, T=T, L=32, D=64))
    Y = latte(Q, K, V, causal=False)
    with thread_limit(1):
        np.testing.assert_array_equal(latte(Q, K, V, causal=False), Y)
    stack = [np.stack([x] * 4) for x in (Q, K, V)]
    np.testing.assert_array_equal(latte(*stack, causal=False)[3], Y)


def test_foreign_byte_order_and_lists_are_read() -> None:
    Q, K, V = logits_and_values(23)
    Y = latte(Q, K, V)
    np.testing.assert_array_equal(latte(Q.astype(">f8"), K, V), Y)
    np.testing.assert_array_equal(latte(Q.tolist(), K.tolist(), V.tolist()), Y)


def test_mixed_precisions_are_computed_in_the_widest_and_returned_as_values_are() -> None:
    Q, K, V = logits_and_values(24)
    q, half = Q.astype(np.float32), V.astype(np.float16)
    Y = latte(q, K, half)
    assert Y.dtype == np.float16
    np.testing.assert_array_equal(Y, latte(q.astype(np.float64), K, half.astype(np.float64)).astype(np.float16))


# -- edges ------------------------------------------------------------------------------------


@strategies.stores(*WIDE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spreads_to_later_rows_only(storage: str, bad: float) -> None:
    for place in range(3):
        if place < 2 and bad == -np.inf:  # no weight
            continue
        arrays = list(logits_and_values(30))
        whole = as_float64(latte(*stored(storage, *arrays)[0]))
        arrays[place][17, 1] = bad
        with np.errstate(invalid="ignore"):  # another library on top of numpy does not silence it
            Y = as_float64(latte(*stored(storage, *arrays)[0]))
        np.testing.assert_allclose(Y[:17], whole[:17], atol=tolerance(storage))
        assert not np.isfinite(Y[17]).all()
        assert np.isfinite(Y[18:]).all(-1).tolist() == [place == 0] * 19
        assert place < 2 or np.isfinite(Y[:, [0, 2]]).all()


# -- arguments ----------------------------------------------------------------------------------

Q, K, V = logits_and_values(32, 6, batch=(2,))
STATE = SoftmaxState(5, 3, (2,))
WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: latte(Q[0, 0], K, V), ValueError, r"q_logits has shape \(5,\); expected at least 2 axes"),
    (lambda: latte(Q, K[..., :4], V), ValueError, r"k_logits has shape \(2, 6, 4\); expected L = 5 along axis -1"),
    (lambda: latte(Q, K[:, :5], V[:, :5]), ValueError, r"k_logits has shape \(2, 5, 5\); expected T = 6"),
    (lambda: latte(Q, K, V[:, :5], causal=False), ValueError, r"V has shape \(2, 5, 3\); expected U = 6"),
    (lambda: latte(Q[:, :3], K, V, causal=False, offsets=[0, 3]), ValueError, "expected T = 3"),
    (lambda: latte(Q, K, V[..., :0]), ValueError, "V has shape .* expected at least one column"),
    (lambda: latte(Q[..., :0], K[..., :0], V), ValueError, "q_logits has shape .* at least one column"),
    (lambda: latte(np.stack([Q[0]] * 3), K, V), ValueError, r"leading axes \(3,\) of q_logits, \(2,\) of k_logits"),
    (lambda: latte(Q, K, V.astype(int)), TypeError, "V has dtype int64"),
    (lambda: latte(Q, K, V + 0j), TypeError, "V has dtype complex128"),
    (lambda: latte(Q, K, np.ma.asarray(V)), TypeError, "V is a masked array"),
    (lambda: latte(Q, K, "V"), TypeError, "V is of type str"),
    (lambda: latte(Q, K, [[1.0], [1.0, 2.0]]), ValueError, "V is a list that makes no array"),
    (lambda: latte(Q, K, V, state=(0, 0, 0)), TypeError, "state is of type tuple"),
    (lambda: latte(Q[0], K[0], V[0], state=STATE), ValueError, r"state has batch \(2,\)"),
    (lambda: latte(Q, K, V, offsets=[0, 6], state=STATE), ValueError, r"expected batch \(2, 1\)"),
    (lambda: latte(Q, K, V, state=SoftmaxState(4, 3, (2,))), ValueError, "4 latents"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments_are_named(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@strategies.stores("torch-float64", "strict-float64")
def test_arrays_of_two_libraries_are_refused(storage: str) -> None:
    convert = STORAGE[storage]
    with pytest.raises(TypeError, match=r"V is of \w+ on .*, and q_logits of numpy on cpu; expected one library"):
        latte(Q, K, convert(V))
    with pytest.raises(TypeError, match="k_logits is of numpy"):
        latte(convert(Q), K, convert(V))
