"""Second moments that are diagonal, weighted, or decay: one state for all of them."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies
from levattn import NonFiniteError
from levattn.states import Moments
from strategies import STORAGE, Float, as_float64

SETTINGS = strategies.examples(25)
FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "diagonal": {"diagonal": True},
    "decayed": {"decay": 0.8},
    "diagonal-decayed": {"diagonal": True, "decay": 0.8},
}


def definition(
    K: Float, weights: Any = None, mask: Any = None, *, diagonal: bool = False, decay: float = 1.0
) -> tuple[Float, float]:
    """The moment and the sum of weights, row by row."""
    d = K.shape[1]
    G, total = np.zeros((d, d)), 0.0
    for t, k in enumerate(K):
        if mask is None or mask[t]:
            w = 1.0 if weights is None else weights[t]
            G = decay * G + w * np.outer(k, k)
            total = decay * total + w
    return (np.diagonal(G).copy() if diagonal else G), total


def rows(seed: int, n: int = 50, d: int = 3, batch: Any = ()) -> Float:
    return np.random.default_rng(seed).standard_normal((*batch, n, d))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_moments_and_weights_are_their_definitions(form: str, weighted: bool, masked: bool) -> None:
    K, rng = rows(0, 3000, batch=(2,)), np.random.default_rng(1)
    weights = rng.random((2, 3000)) if weighted else None
    mask = rng.random((2, 3000)) > 0.3 if masked else None
    state = Moments(3, (2,), **FORMS[form]).update(K, mask, weights)
    for i in range(2):
        own = tuple(None if x is None else x[i] for x in (weights, mask))
        G, total = definition(K[i], *own, **FORMS[form])
        np.testing.assert_allclose(state.read()[i], G, rtol=1e-12, atol=1e-12 * np.abs(G).max())
        np.testing.assert_allclose(state.weight[i], total, rtol=1e-12)
        assert state.count[i] == (3000 if mask is None else mask[i].sum())


@pytest.mark.parametrize("form", FORMS)
@SETTINGS
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(0, 2500), max_size=5), weighted=st.booleans())
def test_chunks_change_no_bit(form: str, seed: int, cuts: list[int], weighted: bool) -> None:
    K = rows(seed, 2500)
    weights = np.random.default_rng(seed).random(2500) if weighted else np.ones(2500)
    whole = Moments(3, **FORMS[form]).update(K, weights=weights)
    state = Moments(3, **FORMS[form])
    for low, high in pairwise([0, *sorted(cuts), 2500]):
        state.update(K[low:high], weights=weights[low:high])
    assert state.read().tobytes() == whole.read().tobytes()
    np.testing.assert_allclose(state.weight, whole.weight, rtol=1e-13)


@pytest.mark.parametrize("form", FORMS)
@SETTINGS
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_merging_is_one_state(form: str, seed: int, cuts: list[int]) -> None:
    K, weights = rows(seed, 60), np.random.default_rng(seed).random(60)
    whole = Moments(3, **FORMS[form]).update(K, weights=weights)
    merged = Moments(3, **FORMS[form])
    for low, high in pairwise([0, *sorted(cuts), 60]):
        part = Moments(3, **FORMS[form]).update(K[low:high], weights=weights[low:high])
        before = part.to_bytes()
        merged.merge(part)
        assert part.to_bytes() == before
    np.testing.assert_allclose(merged.read(), whole.read(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(merged.weight, whole.weight, rtol=1e-12)
    assert merged.count == whole.count
    # identity, on both sides
    for pair in ((Moments(3, **FORMS[form]), copy.copy(whole)), (copy.copy(whole), Moments(3, **FORMS[form]))):
        assert np.array_equal(pair[0].merge(pair[1]).read(), whole.read())


@pytest.mark.parametrize("form", ["full", "diagonal"])
def test_merging_is_commutative_and_associative_without_decay(form: str) -> None:
    parts = [Moments(3, **FORMS[form]).update(rows(i, 20 + i)) for i in range(3)]
    a = copy.copy(parts[0]).merge(parts[1]).merge(parts[2])
    b = copy.copy(parts[2]).merge(copy.copy(parts[1]).merge(parts[0]))
    np.testing.assert_allclose(a.read(), b.read(), rtol=1e-13, atol=1e-13)


def test_each_matrix_has_a_decay_of_its_own() -> None:
    K = rows(3, 40, batch=(2, 3))
    decay = np.array([0.5, 0.9, 1.0])
    for diagonal in (True, False):
        state = Moments(3, (2, 3), diagonal=diagonal, decay=decay).update(K[..., :15, :]).update(K[..., 15:, :])
        for i in range(2):
            for j in range(3):
                expected = definition(K[i, j], diagonal=diagonal, decay=decay[j])[0]
                np.testing.assert_allclose(state.read()[i, j], expected, rtol=1e-12, atol=1e-13)


def test_weights_of_zero_and_one_are_those_of_a_mask() -> None:
    K, mask = rows(4, 5000), np.random.default_rng(5).random(5000) > 0.5
    for form in ("full", "diagonal"):
        by_mask = Moments(3, **FORMS[form]).update(K, mask)
        by_weight = Moments(3, **FORMS[form]).update(K, weights=mask.astype(float))
        np.testing.assert_allclose(by_weight.read(), by_mask.read(), rtol=1e-13, atol=1e-13)


def test_masked_rows_and_their_weights_are_not_used() -> None:
    K, mask = rows(6, 30), np.random.default_rng(7).random(30) > 0.5
    dirty, weights = np.where(mask[:, None], K, np.nan), np.where(mask, 2.0, -np.inf)
    for form in FORMS.values():
        state = Moments(3, **form).update(dirty, mask, weights)
        np.testing.assert_allclose(state.read(), 2 * Moments(3, **form).update(K, mask).read(), rtol=1e-13, atol=1e-13)


def test_the_factor_of_a_diagonal_gives_diagonal_scores_and_of_weights_weighted_ones() -> None:
    from levattn.states.block_buffer import readable

    K = rows(8, 40)
    _, read = readable(K)
    scores = Moments(3, diagonal=True).update(K).factor().on(read).scores(member=False)[0][0]
    np.testing.assert_allclose(scores, (K**2 / (K**2).sum(axis=0)).sum(axis=1), rtol=1e-12)
    assert abs(scores.sum() - 3) < 1e-12
    weights = np.random.default_rng(9).random(40)
    G = (K.T * weights) @ K
    scores = Moments(3).update(K, weights=weights).factor().on(read).scores(member=False)[0][0]
    np.testing.assert_allclose(scores, np.einsum("ij,jk,ik->i", K, np.linalg.inv(G), K), rtol=1e-11)
    decayed = Moments(3, decay=0.9).update(K)
    scores = decayed.factor().on(read).scores(member=False)[0][0]
    np.testing.assert_allclose(scores, np.einsum("ij,jk,ik->i", K, np.linalg.inv(decayed.read()), K), rtol=1e-11)


@strategies.stores(*strategies.ALL_STORAGE)
@pytest.mark.parametrize("form", ["full", "diagonal", "decayed"])
def test_all_libraries_and_dtypes(storage: str, form: str) -> None:
    K = STORAGE[storage](rows(10, 40, batch=(2,)))
    weights = np.random.default_rng(11).random((2, 40))
    state = Moments(3, (2,), **FORMS[form]).update(K[:, :25, :], weights=weights[:, :25])
    state.update(K[:, 25:, :], weights=weights[:, 25:])
    again = Moments.from_bytes(state.to_bytes())
    for i in range(2):
        expected = definition(as_float64(K)[i], weights[i], **FORMS[form])[0]
        np.testing.assert_allclose(as_float64(state.read())[i], expected, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(again.read()[i], expected, rtol=1e-12, atol=1e-13)


def test_sums_keep_their_digits_over_many_rows() -> None:
    state = Moments(1, diagonal=True).update(np.full((300_000, 1), 0.7))
    assert abs(float(state.read()[0]) / (300_000 * 0.7**2) - 1) < 1e-10


def test_a_state_is_made_of_arrays_and_goes_on() -> None:
    K = rows(12, 30, batch=(2,))
    straight = Moments(3, (2,), diagonal=True, decay=0.9).update(K)
    head = Moments(3, (2,), diagonal=True, decay=0.9).update(K[:, :20])
    state = Moments.from_arrays(head.read(), head.weight, head.count, decay=0.9)
    assert state.update(K[:, 20:]).to_bytes() == straight.to_bytes()


def test_what_is_read_is_not_what_is_held() -> None:
    for form in FORMS.values():
        state = Moments(3, **form).update(rows(16, 10))
        expected = state.to_bytes()
        for array in (state.read(), state.weight):
            array[...] = 7
        assert state.to_bytes() == expected


def test_decays_are_compared_for_each_matrix_of_the_batch() -> None:
    one = Moments(3, (2,), diagonal=True, decay=0.9).update(rows(17, 5, batch=(2,)))
    each = Moments(3, (2,), diagonal=True, decay=[0.9, 0.9]).update(rows(18, 5, batch=(2,)))
    whole = Moments(3, (2,), diagonal=True, decay=0.9)
    for seed in (17, 18):
        whole.update(rows(seed, 5, batch=(2,)))
    np.testing.assert_allclose(one.merge(each).read(), whole.read(), rtol=1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_a_merge_that_is_refused_changes_nothing(form: str) -> None:
    state = Moments(3, **FORMS[form]).update(rows(19, 5))
    before = state.to_bytes()
    with pytest.raises(ValueError, match="expected"):
        state.merge(Moments(4, **FORMS[form]))
    assert state.to_bytes() == before


def test_nonfinite_rows_are_named_and_leave_the_state_as_it_was() -> None:
    for form in FORMS.values():
        state = Moments(3, **form).update(rows(13, 10))
        before = state.to_bytes()
        bad = rows(14, 5)
        bad[3, 1] = np.inf
        with pytest.raises(NonFiniteError, match="row 13"):
            state.update(bad)
        assert state.to_bytes() == before


def test_bad_arguments_are_named() -> None:
    K = rows(15, 5)
    for bad, error, message in (
        ({"decay": 0.0}, ValueError, "decay is 0.0; expected numbers in"),
        ({"decay": [0.5, 0.5]}, ValueError, "broadcast to"),
        ({"decay": "slow"}, TypeError, "decay is 'slow'"),
        ({"d": 0}, ValueError, "d is 0; expected at least 1"),
    ):
        with pytest.raises(error, match=message):
            Moments(**{"d": 3, **bad})
    with pytest.raises(ValueError, match="weights hold a number below 0"):
        Moments(3).update(K, weights=[1, 1, 1, 1, -1.0])
    with pytest.raises(ValueError, match=r"weights has shape \(4,\); expected one that broadcasts to \(5,\)"):
        Moments(3).update(K, weights=np.ones(4))
    with pytest.raises(TypeError, match="weights is of dtype bool"):
        Moments(3).update(K, weights=np.ones(5, bool))
    with pytest.raises(ValueError, match="other has diagonal=True and decay=None; expected False"):
        Moments(3).merge(Moments(3, diagonal=True))
    with pytest.raises(ValueError, match=r"other has diagonal=False and decay=0.5"):
        Moments(3).merge(Moments(3, decay=0.5))
    with pytest.raises(ValueError, match=r"expected \(..., d\), \(...,\) and \(...,\)"):
        Moments.from_arrays(np.ones(3), np.ones(2), np.ones((), np.int64))
    with pytest.raises(TypeError, match="dtype float32; the chunks before had float64"):
        Moments(3).update(K, weights=np.ones(5)).update(K.astype(np.float32))
