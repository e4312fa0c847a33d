"""Summaries of causal pruned attention that are renewed again and again: they stay finite, and bounds stay true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import naive_attention
from levattn.attention import PrunedState, Selection, causal_pruned_attention, pruned_attention
from pruned_calls import attend

T = 240
SCALES = np.asarray([1e-30, 1e-15, 1.0, 1e15, 1e30])[:, None, None]  # of keys; queries have the inverse
VALUES = SCALES[[4, 0, 2, 0, 4]]

# name -> keys that go somewhere
KEYS = {
    "drift": lambda t, noise: -0.5 * t + noise,
    "rise": lambda t, noise: 0.5 * t + noise,
    "growth": lambda t, noise: 1.03**t * noise,
    "wide": lambda _, noise: 30 * noise,
    "return": lambda t, noise: -abs(t - T / 2) + noise,
}


def sequences(name: str, dtype: str) -> tuple[Any, Any, Any]:
    """Queries, keys and values (5, T, 2 or 3) at five scales."""
    rng = np.random.default_rng(0)
    K = KEYS[name](np.arange(T)[:, None], rng.standard_normal((T, 2)))
    Q = 1 + 0.1 * rng.standard_normal((T, 2))
    V = 5 + rng.standard_normal((T, 3))
    return (Q / SCALES).astype(dtype), (K * SCALES).astype(dtype), (V * VALUES).astype(dtype)


def summaries_of(state: PrunedState) -> Any:
    held = state.parts[0].summaries
    assert held is not None
    return held


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in KEYS),
        ("drift", "float64"),
        *(pytest.param(name, "float64", marks=pytest.mark.thorough) for name in KEYS if name != "drift"),
    ],
)
def test_a_renewal_at_every_position_keeps_results_finite_and_bounds_true(name: str, dtype: str) -> None:
    Q, K, V = sequences(name, dtype)
    selection = Selection(size=1, summaries=2, renew_every=1)
    Y, state, certificate = causal_pruned_attention(Q, K, V, selection, return_certificate=True, return_state=True)
    assert np.isfinite(Y).all()
    off = np.linalg.norm(
        ((Y - naive_attention.dense(Q, K, V, causal=True, kind=np.longdouble)[0]) / VALUES).astype(float), axis=-1
    )
    logits = np.abs(np.einsum("btd,bsd->bts", *(X.astype(np.float64) for X in (Q, K)))).max()
    room = 64 * np.finfo(dtype).eps * (1 + logits) * np.linalg.norm(V / VALUES, axis=-1).max()  # rounding of exponents
    assert np.all(off <= certificate.error_bound / VALUES[..., 0] + room)
    assert np.all(certificate.captured_lower <= certificate.captured_upper)
    assert np.all(certificate.error_bound[:, 8:] > 0)  # from there on something is in the summaries
    held = summaries_of(state)
    assert {array.dtype for array in vars(held).values()} == {np.dtype(np.float64)}
    np.testing.assert_allclose(held.weight, held.count, rtol=1e-14)
    assert np.all(held.offset >= -1e-12 * held.count)  # 0 ≤ Σ w log w ≤ W log W where weights have the mean 1
    assert np.all(held.offset <= held.weight * np.log(np.maximum(held.count, 1)) + 1e-12 * held.count)


def test_summaries_of_many_positions_go_on_without_losing_any() -> None:
    """A state whose summaries have 2³⁰ times as many members stands for one after that many positions."""
    Q, K, V = (X[2:3] for X in sequences("drift", "float32"))
    _, state = causal_pruned_attention(
        Q[:, :40], K[:, :40], V[:, :40], Selection(size=1, summaries=2, renew_every=1), return_state=True
    )
    part, held = state.parts[0], summaries_of(state)
    held = type(held)(**{name: 2.0**30 * array for name, array in vars(held).items()})
    state = replace(state, parts=(replace(part, summaries=held),))
    count = held.count.sum()
    for low in range(40, T, 20):
        cut = slice(low, low + 20)
        Y, state = causal_pruned_attention(Q[:, cut], K[:, cut], V[:, cut], state, return_state=True)
        assert np.isfinite(Y).all()
    after = summaries_of(state)
    assert after.count.sum() == count + T - 40  # float32 would stay at 2³⁰
    np.testing.assert_allclose(after.weight, after.count, rtol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "scale"), [("float32", 1e-30), ("float32", 1e-38), ("float64", 1e-170), ("float64", 1e-300)]
)
def test_a_bound_of_tiny_values_is_not_zero(dtype: str, scale: float, causal: bool) -> None:
    rng = np.random.default_rng(1)
    Q, K, V = rng.standard_normal((3, 40, 2)).astype(dtype)
    V = (scale * V).astype(dtype)
    options = {"size": 2, "summaries": 1} | ({"causal": True, "renew_every": 2} if causal else {})
    Y, certificate = attend(Q, K, V, return_certificate=True, **options)
    one = Q[None], K[None], V[None] / np.longdouble(scale)
    off = Y / np.longdouble(scale) - naive_attention.dense(*one, causal=causal, kind=np.longdouble)[0][0]
    room = 1e-12 if scale == 1e-170 else 1e-5  # values near the least normal number have few digits
    assert np.all(np.linalg.norm(off.astype(float), axis=1) <= certificate.error_bound / scale + room)
    assert np.all(certificate.error_bound[10:] > 0)


def test_a_bound_that_cannot_be_given_is_infinite() -> None:
    rng = np.random.default_rng(2)
    Q, K, V = rng.standard_normal((3, 40, 2)).astype(np.float32)
    V[:] = 3e38 * np.sign(V)
    with np.errstate(over="ignore"):
        _, certificate = pruned_attention(Q, K, V, Selection(size=2, summaries=1), return_certificate=True)
    assert np.all(np.isinf(certificate.error_bound))
