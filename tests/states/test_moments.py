"""Second moments, full or diagonal, weighted or decaying: their bits do not depend on chunks, and they merge."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import levattn
import strategies
from levattn import NonFiniteError, leverage_scores
from levattn.states import Moments
from naive import leverage_exact, leverage_svd
from strategies import STORAGE, Float, as_float64

FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "diagonal": {"diagonal": True},
    "decayed": {"decay": 0.8},
    "diagonal-decayed": {"diagonal": True, "decay": 0.8},
}
of_all_forms = pytest.mark.parametrize("form", FORMS)


def definition(
    K: Float, weights: Any = None, mask: Any = None, *, diagonal: bool = False, decay: float = 1.0
) -> tuple[Float, float]:
    """The moment and the sum of weights, row by row."""
    d = K.shape[1]
    G, total = np.zeros((d, d), np.longdouble), 0.0
    for t, k in enumerate(K.astype(np.longdouble)):
        if mask is None or mask[t]:
            w = 1.0 if weights is None else weights[t]
            G = decay * G + w * np.outer(k, k)
            total = decay * total + w
    return np.asarray(np.diagonal(G) if diagonal else G, float), total


def rows(seed: int, n: int = 50, d: int = 3, batch: Any = ()) -> Float:
    return np.random.default_rng(seed).standard_normal((*batch, n, d))


def of(K: Any, form: str = "full", **given: Any) -> Moments:
    return Moments(K.shape[-1], K.shape[:-2], **FORMS[form]).update(K, **given)


def scores_of(state: Moments, K: Float) -> Float:
    """Scores of keys by the factor of a state."""
    factor = state.factor()
    scale = factor.rows.scale
    found: Float = (factor.whitened(K if scale is None else K * scale[0]) ** 2).sum(axis=-1)
    return found


# -- the definition ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 2047, 2048, 2049, 9000])
def test_reads_the_second_moment(n: int, dtype: str) -> None:
    K = rows(n, n, 5).astype(dtype)
    state = of(K)
    np.testing.assert_allclose(state.result(), definition(K)[0], rtol=1e-13, atol=1e-12)
    assert state.count == n


@of_all_forms
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_moments_and_weights_are_their_definitions(form: str, weighted: bool, masked: bool) -> None:
    """Masked rows, and their weights, are not looked at."""
    K, rng = rows(0, 3000, batch=(2,)), np.random.default_rng(1)
    weights = rng.random((2, 3000)) if weighted else None
    mask = rng.random((2, 3000)) > 0.3 if masked else None
    dirty = K if mask is None else np.where(mask[..., None], K, np.nan)
    given = weights if weights is None or mask is None else np.where(mask, weights, -np.inf)
    state = of(dirty, form, mask=mask, weights=given)
    for i in range(2):
        own = tuple(None if x is None else x[i] for x in (weights, mask))
        G, total = definition(K[i], *own, **FORMS[form])
        np.testing.assert_allclose(state.result()[i], G, rtol=1e-12, atol=1e-12 * np.abs(G).max())
        np.testing.assert_allclose(state.weight[i], total, rtol=1e-12)
        assert state.count[i] == (3000 if mask is None else mask[i].sum())


def test_each_matrix_has_a_decay_of_its_own() -> None:
    K = rows(3, 40, batch=(2, 3))
    decay = np.array([0.5, 0.9, 1.0])
    for diagonal in (True, False):
        state = Moments(3, (2, 3), diagonal=diagonal, decay=decay).update(K[..., :15, :]).update(K[..., 15:, :])
        for i, j in np.ndindex(2, 3):
            expected = definition(K[i, j], diagonal=diagonal, decay=decay[j])[0]
            np.testing.assert_allclose(state.result()[i, j], expected, rtol=1e-12, atol=1e-13)


def test_a_refilled_array_of_decays_changes_no_state() -> None:
    K, decay = rows(3, 40, batch=(2,)), np.array([0.5, 0.9])
    state = Moments(3, (2,), decay=decay).update(K)
    decay[:] = 0.1
    expected = Moments(3, (2,), decay=np.array([0.5, 0.9])).update(K).update(K)
    assert np.array_equal(state.update(K).result(), expected.result())
    assert np.array_equal(Moments.from_bytes(state.to_bytes()).result(), expected.result())
    assert np.array_equal(state.decay, [0.5, 0.9])


@strategies.stores(*strategies.ALL_STORAGE)
@pytest.mark.parametrize("form", ["full", "diagonal", "decayed"])
def test_all_libraries_and_dtypes(storage: str, form: str) -> None:
    K = STORAGE[storage](rows(10, 40, batch=(2,)))
    weights = np.random.default_rng(11).random((2, 40))
    state = of(K[:, :25, :], form, weights=weights[:, :25])
    state.update(K[:, 25:, :], weights=weights[:, 25:])
    again = Moments.from_bytes(state.to_bytes())
    for i in range(2):
        expected = definition(as_float64(K)[i], weights[i], **FORMS[form])[0]
        np.testing.assert_allclose(as_float64(state.result())[i], expected, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(again.result()[i], expected, rtol=1e-12, atol=1e-13)


def test_sums_keep_their_digits_over_many_rows() -> None:
    state = Moments(1, diagonal=True).update(np.full((300_000, 1), 0.7))
    assert abs(float(state.result()[0]) / (300_000 * 0.7**2) - 1) < 1e-10


def test_keys_of_the_documented_range() -> None:
    K = np.random.default_rng(10).uniform(-1e150, 1e150, (9000, 3))
    np.testing.assert_allclose(of(K).result() / 1e300, definition(K / 1e150)[0], rtol=1e-12)


# -- chunks and threads change no bit ----------------------------------------------------------------------


@of_all_forms
@strategies.examples(25)
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(0, 6500), max_size=8), weighted=st.booleans())
def test_chunks_change_no_bit(form: str, seed: int, cuts: list[int], weighted: bool) -> None:
    K, weights = rows(seed, 6500), np.random.default_rng(seed).random(6500)
    whole = of(K, form, weights=weights if weighted else None)
    state = Moments(3, **FORMS[form])
    for low, high in pairwise([0, *sorted(cuts), 6500]):
        state.update(K[low:high], weights=weights[low:high] if weighted else None)
    assert state.result().tobytes() == whole.result().tobytes()
    np.testing.assert_allclose(state.weight, whole.weight, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_any_number_of_threads_gives_the_same_bits(dtype: str) -> None:
    K = rows(1, 200_000, 20).astype(dtype)
    results = []
    for threads in (1, 2, 3):
        with levattn.thread_limit(threads):
            results.append((of(K).result(), leverage_scores(K)))
    for moment, scores in results[1:]:
        assert np.array_equal(moment, results[0][0])
        assert np.array_equal(scores, results[0][1])


def test_heads_are_summed_apart() -> None:
    K = rows(2, 2500, 4, (2, 3))
    moment = of(K[..., :1000, :]).update(K[..., 1000:1007, :]).update(K[..., 1007:, :]).result()
    assert moment.shape == (2, 3, 4, 4)
    for i, j in np.ndindex(2, 3):
        assert np.array_equal(moment[i, j], of(K[i, j]).result())


@of_all_forms
def test_an_empty_batch_takes_one_chunk_after_another(form: str) -> None:
    state = of(rows(2, 5, 4, (0, 3)), form).update(rows(3, 6, 4, (0, 3)))
    assert state.result().shape == ((0, 3, 4) if "diagonal" in form else (0, 3, 4, 4))


def test_a_chunk_may_be_overwritten_after_update() -> None:
    K = rows(5, 700, 4)
    state, chunk = Moments(4), np.empty((100, 4))
    for low in range(0, 700, 100):
        chunk[:] = K[low : low + 100]
        state.update(chunk)
    assert np.array_equal(state.result(), of(K).result())


@of_all_forms
def test_what_is_read_is_not_what_is_held(form: str) -> None:
    state = of(rows(16, 10), form)
    expected = state.to_bytes()
    for array in (state.result(), state.weight):
        array[...] = 7
    assert state.to_bytes() == expected


# -- merges ------------------------------------------------------------------------------------------------


@of_all_forms
@strategies.examples(25)
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(0, 4500), max_size=5))
def test_merging_is_one_state(form: str, seed: int, cuts: list[int]) -> None:
    K, weights = rows(seed, 4500), np.random.default_rng(seed).random(4500)
    whole = of(K, form, weights=weights)
    merged = Moments(3, **FORMS[form])
    for low, high in pairwise([0, *sorted(cuts), 4500]):
        part = of(K[low:high], form, weights=weights[low:high])
        before = part.to_bytes()
        merged.merge(part)
        assert part.to_bytes() == before
    np.testing.assert_allclose(merged.result(), whole.result(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(merged.weight, whole.weight, rtol=1e-12)
    assert merged.count == whole.count
    # identity, on both sides
    for pair in ((Moments(3, **FORMS[form]), whole.copy()), (whole.copy(), Moments(3, **FORMS[form]))):
        assert np.array_equal(pair[0].merge(pair[1]).result(), whole.result())


@pytest.mark.parametrize("form", ["full", "diagonal"])
@pytest.mark.parametrize("n", [20, 2500])
def test_merging_is_commutative_and_associative_without_decay(form: str, n: int) -> None:
    parts = [of(rows(i, n + i), form) for i in range(3)]
    a = parts[0].copy().merge(parts[1]).merge(parts[2])
    b = parts[2].copy().merge(parts[1].copy().merge(parts[0]))
    np.testing.assert_allclose(a.result(), b.result(), rtol=1e-12, atol=1e-12)


def test_a_merged_state_goes_on() -> None:
    K = rows(7, 4000)
    other = of(K[2500:3000])
    before = other.result()
    state = of(K[:2500]).merge(other).update(K[3000:])
    np.testing.assert_allclose(state.result(), definition(K)[0], rtol=1e-12)
    assert np.array_equal(other.result(), before)


def test_integer_values_make_every_order_equal() -> None:
    K = np.random.default_rng(8).integers(-9, 10, (5000, 6)).astype(float)
    assert np.array_equal(of(K[3000:]).merge(of(K[:3000])).result(), definition(K)[0])


def test_decays_are_compared_for_each_matrix_of_the_batch() -> None:
    first, second = rows(17, 5, batch=(2,)), rows(18, 5, batch=(2,))
    one = Moments(3, (2,), diagonal=True, decay=0.9).update(first)
    each = Moments(3, (2,), diagonal=True, decay=[0.9, 0.9]).update(second)
    whole = Moments(3, (2,), diagonal=True, decay=0.9).update(first).update(second)
    np.testing.assert_allclose(one.merge(each).result(), whole.result(), rtol=1e-13)


def test_a_state_is_made_of_arrays_and_goes_on() -> None:
    K = rows(12, 30, batch=(2,))
    straight = Moments(3, (2,), diagonal=True, decay=0.9).update(K)
    head = Moments(3, (2,), diagonal=True, decay=0.9).update(K[:, :20])
    state = Moments.from_arrays(head.result(), head.weight, head.count, decay=0.9)
    assert state.update(K[:, 20:]).to_bytes() == straight.to_bytes()


# -- factors -----------------------------------------------------------------------------------------------


def test_the_factor_of_a_diagonal_gives_diagonal_scores_and_of_weights_weighted_ones() -> None:
    K, weights = rows(8, 40), np.random.default_rng(9).random(40)
    scores = scores_of(of(K, "diagonal"), K)
    np.testing.assert_allclose(scores, (K**2 / (K**2).sum(axis=0)).sum(axis=1), rtol=1e-12)
    assert abs(scores.sum() - 3) < 1e-12
    decayed = of(K, "decayed")
    for state, G in ((of(K, weights=weights), (K.T * weights) @ K), (decayed, decayed.result())):
        expected = np.einsum("ij,jk,ik->i", K, np.linalg.inv(G), K)
        np.testing.assert_allclose(scores_of(state, K), expected, rtol=1e-11)


@pytest.mark.parametrize("m", [10, 100, 2048, 5000])
@pytest.mark.parametrize("sizes", [(1e200, 1e-200), (1e-300, 1.0), (1e-170, 1e160)])
def test_keys_whose_squares_leave_the_range_have_scores(m: int, sizes: tuple[float, float]) -> None:
    K = rows(m, 7 + m)
    K[:, 1] *= sizes[0]
    K[7:] *= sizes[1] if sizes[0] * sizes[1] < 1e300 else 1.0
    scores = scores_of(of(K[:7]).update(K[7:]), K)
    np.testing.assert_allclose(scores, leverage_svd(K / np.abs(K).max(axis=0)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("prefix", ["zeros", "one column", "well-conditioned", "small"])
@pytest.mark.parametrize("condition", [1e5, 1e9])
def test_keys_that_turn_ill_conditioned_have_scores(prefix: str, condition: float) -> None:
    rng = np.random.default_rng(11)
    K = rng.standard_normal((9000, 5)) @ np.linalg.qr(rng.standard_normal((5, 5)))[0]
    late = (K[4096:] * np.geomspace(1, 1 / condition, 5)) @ np.linalg.qr(rng.standard_normal((5, 5)))[0]
    if prefix == "zeros":
        K[:4096] = 0
    elif prefix == "one column":
        K[:4096, 1:] = 0
    elif prefix == "small":
        K[:4096] *= 1e-12
    K[4096:] = late
    if prefix == "well-conditioned":
        K[4096:] *= 1e6
    np.testing.assert_allclose(scores_of(of(K), K), leverage_scores(K, method="svd"), rtol=1e-7)
    few = K[:: len(K) // 40]
    shares = scores_of(of(np.repeat(few, 60, axis=0)), few)
    np.testing.assert_allclose(60 * shares, leverage_exact(few), rtol=1e-6)


# -- what is refused ---------------------------------------------------------------------------------------


@of_all_forms
@pytest.mark.parametrize("before", [0, 5, 2048, 5000])
@pytest.mark.parametrize("m", [3, 2048, 6000])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_chunks_that_are_not_finite_are_refused(form: str, before: int, m: int, value: float) -> None:
    K = rows(before, before + m)
    state = of(K[:before], form)
    seen = state.to_bytes()
    for bad in ([0], [m - 1], [1, m - 1]):
        chunk = K[before:].copy()
        chunk[bad, 1] = value
        with pytest.raises(NonFiniteError, match=r"\bK\b") as caught:
            state.update(chunk)
        named = ", ".join(str(before + row) for row in bad)
        assert f"row{'s' if len(bad) > 1 else ''} {named}, counted from" in str(caught.value)
        assert "mask=" in str(caught.value)
        assert state.to_bytes() == seen
    assert state.update(K[before:]).to_bytes() == of(K, form).to_bytes()


def test_rows_of_a_head_that_are_not_finite_are_named() -> None:
    K = np.ones((2, 3, 10, 4))
    state = of(K)
    K[1, 1, 7, 2] = np.nan
    with pytest.raises(NonFiniteError, match="row 17 of matrix 4 "):
        state.update(K)
    mask = np.ones((2, 3, 10), bool)
    mask[..., 7] = False
    assert np.all(np.isfinite(state.update(K, mask).result()))


def wrong() -> Iterator[Any]:
    """Name, act, error, and message."""
    K = rows(15, 5)
    yield "decay", lambda _: Moments(3, decay=0.0), ValueError, "decay is 0.0; expected numbers in"
    yield "decays", lambda _: Moments(3, decay=[0.5, 0.5]), ValueError, "broadcast to"
    yield "no decay", lambda _: Moments(3, decay="slow"), TypeError, "decay is 'slow'"
    yield "d", lambda _: Moments(0), ValueError, "d is 0; expected at least 1"
    yield "columns", lambda s: s.update(np.zeros((10, 4))), ValueError, r"\bK has batch"
    yield "batch", lambda s: s.update(np.zeros((2, 10, 3))), ValueError, r"\bK has batch"
    yield "other columns", lambda s: s.merge(Moments(4)), ValueError, r"\bother has batch .*expected"
    yield "other batch", lambda s: s.merge(Moments(3, (2,))), ValueError, r"\bother has batch .*expected"
    yield "no state", lambda s: s.merge(3), TypeError, "other is of type int; expected Moments"
    of_diagonal = "other has diagonal=True and decay=None; expected False"
    yield "diagonal", lambda s: s.merge(Moments(3, diagonal=True)), ValueError, of_diagonal
    of_decay = "other has diagonal=False and decay=0.5"
    yield "decaying", lambda s: s.merge(Moments(3, decay=0.5)), ValueError, of_decay
    yield (
        "negative",
        lambda s: s.update(K, weights=[1, 1, 1, 1, -1.0]),
        ValueError,
        r"weights\[4\] is -1; expected finite numbers of at least 0",
    )
    of_shape = r"weights has shape \(4,\); expected one that broadcasts to \(5,\)"
    yield "too few", lambda s: s.update(K, weights=np.ones(4)), ValueError, of_shape
    yield "flags", lambda s: s.update(K, weights=np.ones(5, bool)), TypeError, "weights is of dtype bool"
    of_dtype = "dtype float32; the chunks before had float64"
    yield "dtype", lambda s: s.update(K, weights=np.ones(5)).update(K.astype(np.float32)), TypeError, of_dtype
    arrays = np.ones(3), np.ones(2), np.ones((), np.int64)
    of_arrays = r"expected \(..., d\), \(...,\) and \(...,\)"
    yield "arrays", lambda _: Moments.from_arrays(*arrays), ValueError, of_arrays


@pytest.mark.parametrize(("act", "error", "message"), [pytest.param(*rest, id=name) for name, *rest in wrong()])
def test_bad_arguments_are_named(act: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act(Moments(3))


@of_all_forms
def test_a_merge_that_is_refused_changes_nothing(form: str) -> None:
    state = of(rows(19, 5), form)
    before = state.to_bytes()
    with pytest.raises(ValueError, match="expected"):
        state.merge(Moments(4, **FORMS[form]))
    assert state.to_bytes() == before
