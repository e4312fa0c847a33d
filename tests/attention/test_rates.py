"""Coding rates: against eigenvalues, the variational bound, descent, streams, invariances, sizes and gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import levattn
from differences import assert_gradients
from levattn.attention import rates
from levattn.states import Moments
from libraries import needs_torch, over_storages, stored
from strategies import as_float64

pytestmark = pytest.mark.usefixtures("one_thread")


# -- definitions -----------------------------------------------------------------------


def logdet(Z: Any, c: float) -> float:
    """log det(I + c ZᵀZ), singular value by singular value."""
    return sum(math.log1p(c * float(s) ** 2) for s in np.linalg.svd(Z, compute_uv=False))


def coding_rate(Z: Any, eps: float) -> float:
    n, d = Z.shape
    return logdet(Z, d / (n * eps**2)) / 2 if n else 0.0


def compression_rate(Z: Any, Pi: Any, eps: float) -> float:
    n, d = Z.shape
    total = 0.0
    for k in range(Pi.shape[1]):
        size = float(Pi[:, k].sum())
        rows = np.array([math.sqrt(Pi[t, k]) * Z[t] for t in range(n)])
        total += size / n * logdet(rows, d / (size * eps**2)) if size else 0.0
    return total / 2


def moments(Z: Any, Pi: Any, U: Any) -> Any:
    """Weighted means of squares of projected tokens, (K, p)."""
    out = np.zeros((U.shape[0], U.shape[2]))
    for k in range(U.shape[0]):
        for i in range(U.shape[2]):
            terms = [Pi[t, k] * float(U[k, :, i] @ Z[t]) ** 2 for t in range(len(Z))]
            out[k, i] = sum(terms) / float(Pi[:, k].sum()) if Pi[:, k].any() else 0.0
    return out


def variational_rate(Z: Any, Pi: Any, U: Any, eps: float) -> float:
    n, d = Z.shape
    m = moments(Z, Pi, U)
    return (
        sum(
            float(Pi[:, k].sum()) / n * math.log1p(d / eps**2 * m[k, i])
            for k in range(U.shape[0])
            for i in range(U.shape[2])
        )
        / 2
    )


def tied_step(Z: Any, Pi: Any, U: Any, eps: float, step: float) -> Any:
    """Z + TSSA(Z), token by token, with outputs of all heads added up."""
    c = Z.shape[1] / eps**2
    m = moments(Z, Pi, U)
    out = Z.copy()
    for t in range(len(Z)):
        for k in range(U.shape[0]):
            out[t] -= step * Pi[t, k] * U[k] @ (c / (1 + c * m[k]) * (U[k].T @ Z[t]))
    return out


def problem(seed: int, n: int = 12, d: int = 5, K: int = 3, p: int = 2) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)), rng.dirichlet(np.ones(K), n), rng.standard_normal((K, d, p))


over_shapes = pytest.mark.parametrize(
    ("n", "d", "K", "p"), [(12, 5, 3, 2), (4, 9, 2, 9), (1, 1, 1, 1), (1, 6, 2, 3), (30, 3, 5, 1), (7, 7, 4, 7)]
)

# name -> what is computed of tokens, memberships and bases, and its definition
TABLE: dict[str, tuple[Any, Any]] = {
    "R": (lambda Z, _, __, eps, **mask: rates.coding_rate(Z, eps, **mask), lambda Z, _, __, eps: coding_rate(Z, eps)),
    "R_c": (
        lambda Z, Pi, _, eps, **mask: rates.compression_rate(Z, Pi, eps, **mask),
        lambda Z, Pi, _, eps: compression_rate(Z, Pi, eps),
    ),
    "R − R_c": (
        lambda Z, Pi, _, eps, **mask: rates.rate_reduction(Z, Pi, eps, **mask),
        lambda Z, Pi, _, eps: coding_rate(Z, eps) - compression_rate(Z, Pi, eps),
    ),
    "R_var": (rates.variational_rate, variational_rate),
}


# -- values ----------------------------------------------------------------------------


@over_storages
@over_shapes
@pytest.mark.parametrize("eps", [0.01, 0.5, 3.0])
def test_rates_are_those_of_the_definitions(storage: str, n: int, d: int, K: int, p: int, eps: float) -> None:
    arrays = problem(n + d, n, d, K, p)
    given = [stored(array, storage) for array in arrays]
    for name, (function, definition) in TABLE.items():
        assert float(function(*given, eps)) == pytest.approx(definition(*arrays, eps), rel=1e-10, abs=1e-12), name
    step = 0.7 * float(rates.largest_step(given[2], eps))
    new = as_float64(rates.descent_step(*given, eps, step=step))
    np.testing.assert_allclose(new, tied_step(*arrays, eps, step), rtol=1e-10, atol=1e-12)


@over_storages
def test_leading_axes_are_batches_and_broadcast(storage: str) -> None:
    rng = np.random.default_rng(0)
    Z, Pi, U = rng.standard_normal((2, 3, 10, 4)), rng.dirichlet(np.ones(2), (3, 10)), rng.standard_normal((2, 4, 3))
    given = [stored(array, storage) for array in (Z, Pi, U)]
    for name, (function, definition) in TABLE.items():
        found = function(*given, 0.5)
        assert "float64" in str(found.dtype)
        expected = [[definition(Z[i, j], Pi[j], U, 0.5) for j in range(3)] for i in range(2)]
        np.testing.assert_allclose(as_float64(found), expected, rtol=1e-12, err_msg=name)
    new = as_float64(rates.descent_step(*given, 0.5, step=0.01))
    expected = [[tied_step(Z[i, j], Pi[j], U, 0.5, 0.01) for j in range(3)] for i in range(2)]
    np.testing.assert_allclose(new, expected, rtol=1e-11)


def test_rates_of_narrow_arrays_are_in_float64_and_steps_in_their_dtype() -> None:
    Z, Pi, U = problem(1)
    Pi = np.floor(64 * Pi) / 64
    Pi[:, -1] += 1 - Pi.sum(axis=1)  # in 16 bits they sum to 1 as well, or the wide ones would be refused
    Z, Pi, U = (array.astype(np.float16) for array in (Z, Pi, U))
    wide = [array.astype(np.float64) for array in (Z, Pi, U)]
    assert rates.coding_rate(Z, 0.5) == rates.coding_rate(wide[0], 0.5)
    assert rates.variational_rate(Z, Pi, U, 0.5) == rates.variational_rate(*wide, 0.5)
    assert isinstance(rates.coding_rate(Z, 0.5), np.float64)
    new = rates.descent_step(Z, Pi, U, 0.5, step=0.01)
    assert new.dtype == np.float16
    assert (new == rates.descent_step(*wide, 0.5, step=0.01).astype(np.float16)).all()


@over_storages
def test_masked_tokens_are_as_if_they_were_not_there(storage: str) -> None:
    Z, Pi, U = problem(2, n=20)
    mask = np.random.default_rng(3).random(20) < 0.6
    bad_Z, bad_Pi = Z.copy(), Pi.copy()
    bad_Z[~mask], bad_Pi[~mask] = np.nan, -7
    *given, flags = (stored(array, storage) for array in (bad_Z, bad_Pi, U, mask))
    kept, nobody = (Z[mask], Pi[mask], U), stored(np.zeros(20, bool), storage)
    for name, (function, definition) in TABLE.items():
        close = pytest.approx(definition(*kept, 0.5), rel=1e-11 if "−" in name else 1e-12)  # of a difference
        assert float(function(*given, 0.5, mask=flags)) == close, name
        assert float(function(*given, 0.5, mask=nobody)) == 0
    new = as_float64(rates.descent_step(*given, 0.5, step=0.01, mask=flags))
    np.testing.assert_allclose(new[mask], tied_step(*kept, 0.5, 0.01), rtol=1e-11)
    assert np.isnan(new[~mask]).all()


def test_no_tokens_no_groups_in_use_and_no_batches() -> None:
    assert rates.coding_rate(np.ones((0, 3)), 1.0) == 0
    assert rates.coding_rate(np.ones((0, 4, 3)), 1.0).shape == (0,)
    assert rates.compression_rate(np.ones((0, 3)), np.ones((0, 2)), 1.0) == 0
    Z, Pi, U = problem(4)
    empty = np.concatenate([Pi, np.zeros((12, 1))], axis=1)
    wider = np.concatenate([U, np.ones((1, 5, 2))])
    assert rates.compression_rate(Z, empty, 0.5) == rates.compression_rate(Z, Pi, 0.5)
    assert rates.variational_rate(Z, empty, wider, 0.5) == rates.variational_rate(Z, Pi, U, 0.5)
    assert rates.compression_rate(Z, np.ones((12, 1)), 0.5) == pytest.approx(rates.coding_rate(Z, 0.5), rel=1e-13)
    assert rates.head_rate(np.ones((2, 0, 3))) == 0


def test_head_rate_is_that_of_tokens_of_unit_norm() -> None:
    rng = np.random.default_rng(5)
    W = rng.standard_normal((2, 3, 10, 4))
    W[0, 1, 3] = 0
    mask = rng.random((2, 10)) < 0.7
    norms = np.linalg.norm(W, axis=-1, keepdims=True)
    unit = W / np.where(norms > 0, norms, 1)
    plain, masked = rates.head_rate(W), rates.head_rate(W, 0.3, mask=mask)
    for i in range(2):
        assert plain[i] == pytest.approx(sum(coding_rate(unit[i, h], 0.1) for h in range(3)), rel=1e-12)
        assert masked[i] == pytest.approx(sum(coding_rate(unit[i, h, mask[i]], 0.3) for h in range(3)), rel=1e-12)
    sizes = np.exp(rng.uniform(-300, 300, (2, 3, 10, 1)))
    np.testing.assert_allclose(rates.head_rate(W * sizes), plain, rtol=1e-12)
    assert rates.head_rate(W[0] * 1e300).shape == ()


# -- properties ------------------------------------------------------------------------


def orthonormal(rng: Any, *shape: int) -> Any:
    return np.linalg.qr(rng.standard_normal(shape))[0]


def test_the_compression_rate_is_at_most_the_variational_rate_and_equal_at_eigenvectors() -> None:
    rng = np.random.default_rng(6)
    for case in range(200):
        n, d, K = rng.integers(1, 20), rng.integers(1, 7), rng.integers(1, 4)
        Z, eps = rng.standard_normal((n, d)) * np.exp(rng.standard_normal(d)), float(np.exp(rng.uniform(-3, 3)))
        Pi = rng.dirichlet(np.ones(K) * (0.1 if case % 2 else 3), n)
        Rc = float(rates.compression_rate(Z, Pi, eps))
        assert Rc <= float(rates.variational_rate(Z, Pi, orthonormal(rng, K, d, d), eps)) + 1e-12
        V = np.linalg.eigh(np.einsum("tk,ti,tj->kij", Pi, Z, Z))[1]
        assert Rc == pytest.approx(float(rates.variational_rate(Z, Pi, V, eps)), rel=1e-11, abs=1e-12)


def test_narrow_bases_bound_the_compression_rate_where_they_span_their_groups() -> None:
    rng = np.random.default_rng(7)
    U = orthonormal(rng, 6, 6).reshape(6, 2, 3).transpose(1, 0, 2)
    Pi = np.repeat(np.eye(2), 10, axis=0)
    Z = np.concatenate([rng.standard_normal((10, 3)) @ U[0].T, rng.standard_normal((10, 3)) @ U[1].T])
    assert rates.compression_rate(Z, Pi, 0.5) < rates.variational_rate(Z, Pi, U, 0.5)
    outside = Z + 0.5 * rng.standard_normal((20, 6))
    assert rates.compression_rate(outside, Pi, 0.5) > rates.variational_rate(outside, Pi, U, 0.5)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 6), st.floats(0.01, 10))
def test_rate_reduction_is_at_least_zero_and_rates_are_invariant(seed: int, n: int, d: int, eps: float) -> None:
    rng = np.random.default_rng(seed)
    Z, Pi = rng.integers(-3, 4, (n, d)) * 1.0, rng.dirichlet(np.ones(2), n)
    R, Rc = float(rates.coding_rate(Z, eps)), float(rates.compression_rate(Z, Pi, eps))
    close = {"rel": 1e-9, "abs": 1e-11}
    assert R - Rc >= -1e-11
    Q, order = orthonormal(rng, d, d), rng.permutation(n)
    assert float(rates.coding_rate(Z @ Q, eps)) == pytest.approx(R, **close)
    assert float(rates.coding_rate(-Z[order], eps)) == pytest.approx(R, **close)
    assert float(rates.coding_rate(Z * 2**40, eps * 2**40)) == pytest.approx(R, **close)
    assert float(rates.coding_rate(np.concatenate([Z, Z]), eps)) == pytest.approx(R, **close)
    assert float(rates.compression_rate(Z @ Q, Pi, eps)) == pytest.approx(Rc, **close)
    assert float(rates.compression_rate(Z[order], Pi[order][:, ::-1], eps)) == pytest.approx(Rc, **close)
    halves = np.concatenate([Pi / 2, Pi / 2], axis=1)
    assert float(rates.compression_rate(Z, halves, eps)) == pytest.approx(Rc, **close)


# -- sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e5, 1e8, 1e12, 1e30, 1e100])
@pytest.mark.parametrize("n", [3, 40])
def test_large_tokens_lose_no_small_direction(n: int, spread: float) -> None:
    sigma = spread ** np.array([1.0, 0.5, 0.1, -0.2, -1.0])
    rng = np.random.default_rng(8)
    V, rank = orthonormal(rng, 5, 5), min(n, 5)
    left = orthonormal(rng, n, rank)
    Z = left * sigma[:rank] @ V[:rank]
    for scale, eps in ((1.0, 1.0), (1e120 / spread, 1e120 / spread), (1e-100, 1e-100)):
        expected = 0.5 * np.log1p(5 / n * sigma[:rank] ** 2).sum()
        tolerance = 1e-10 + 1e-15 * spread * (spread > 1)  # singular values are known to 2⁻⁵³ of the largest
        found = rates.coding_rate(Z * scale, eps)
        if spread <= 1e8:
            assert found == pytest.approx(expected, rel=1e-12, abs=tolerance)
        assert found >= np.log(spread) * (1 - 1e-9)  # that of the largest, about
        one = np.ones((n, 1))
        assert rates.compression_rate(Z * scale, one, eps) == pytest.approx(found, rel=1e-9, abs=tolerance)


def test_zero_duplicated_and_deficient_tokens() -> None:
    rng = np.random.default_rng(9)
    one = rng.standard_normal(6)
    assert rates.coding_rate(np.zeros((5, 6)), 0.1) == 0
    Z = np.tile(one, (50, 1))
    expected = 0.5 * math.log1p(6 / 0.01 * float(one @ one))
    assert rates.coding_rate(Z, 0.1) == pytest.approx(expected, rel=1e-12)
    assert rates.rate_reduction(Z, rng.dirichlet(np.ones(3), 50), 0.1) == pytest.approx(0, abs=1e-12)
    assert rates.coding_rate(Z * 1e9, 0.1) == pytest.approx(0.5 * math.log1p(600 * float(one @ one) * 1e18), rel=1e-10)


def test_tokens_beyond_the_range_of_squares_are_refused() -> None:
    Z, Pi, U = problem(10)
    with pytest.raises(ValueError, match="Z over eps leaves the range"):
        rates.coding_rate(Z * 1e200, 1.0)
    with pytest.raises(ValueError, match="Z over eps leaves the range"):
        rates.coding_rate(Moments(5).update(Z * 1e140), 1e-20)
    assert rates.coding_rate(Z * 1e130, 1e130) == pytest.approx(rates.coding_rate(Z, 1.0), rel=1e-12)
    assert rates.variational_rate(Z * 1e130, Pi, U, 1e130) == pytest.approx(
        rates.variational_rate(Z, Pi, U, 1.0), rel=1e-12
    )


# -- streams ---------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[], [1], [7, 7, 19], list(range(1, 30))])
def test_moments_in_any_split_and_merged_give_the_rates_at_once(cuts: list[int]) -> None:
    Z, Pi, _ = problem(11, n=30, d=6)
    whole, groups, merged = Moments(6), Moments(6, (3,)), Moments(6, (3,))
    for z, pi in zip(np.split(Z, cuts), np.split(Pi, cuts), strict=True):
        whole.update(z)
        groups.update(np.broadcast_to(z, (3, *z.shape)), weights=pi.T)
        merged.merge(Moments(6, (3,)).update(np.broadcast_to(z, (3, *z.shape)), weights=pi.T))
    assert rates.coding_rate(whole, 0.3) == pytest.approx(rates.coding_rate(Z, 0.3), rel=1e-12)
    for state in (groups, merged, Moments.from_bytes(groups.to_bytes())):
        assert rates.compression_rate(state, None, 0.3) == pytest.approx(rates.compression_rate(Z, Pi, 0.3), rel=1e-12)
        assert rates.rate_reduction(state, None, 0.3) == pytest.approx(rates.rate_reduction(Z, Pi, 0.3), rel=1e-11)


def test_moments_of_batches_masked_ill_conditioned_and_of_nothing() -> None:
    rng = np.random.default_rng(12)
    Z, Pi = rng.standard_normal((2, 20, 4)), rng.dirichlet(np.ones(3), (2, 20))
    mask = rng.random((2, 20)) < 0.7
    state = Moments(4, (2, 3))
    state.update(
        np.broadcast_to(Z[:, None], (2, 3, 20, 4)),
        mask=np.broadcast_to(mask[:, None], (2, 3, 20)),
        weights=Pi.transpose(0, 2, 1),
    )
    np.testing.assert_allclose(
        rates.rate_reduction(state, None, 0.5), rates.rate_reduction(Z, Pi, 0.5, mask=mask), rtol=1e-11
    )
    assert rates.coding_rate(Moments(3), 0.5) == 0
    assert (rates.compression_rate(Moments(3, (5, 2)), None, 0.5) == np.zeros(5)).all()
    steep = rng.standard_normal((50, 4)) * [1e8, 1, 1e-4, 1] @ orthonormal(rng, 4, 4)
    assert rates.coding_rate(Moments(4).update(steep), 1e-3) == pytest.approx(rates.coding_rate(steep, 1e-3), rel=1e-7)


# -- descent ---------------------------------------------------------------------------


def random_cases(rng: Any, count: int, n: int, d: int, K: int, p: int) -> tuple[Any, Any, Any]:
    """Tokens of many sizes, sharp and soft memberships, any U."""
    Z = rng.standard_normal((count, n, d)) * np.exp(rng.uniform(-8, 4, (count, 1, 1)))
    Z = Z * np.exp(rng.uniform(-2, 2, (count, n, 1)))
    concentration = np.exp(rng.uniform(-3, 3, (count, 1, 1)))
    Pi = rng.standard_gamma(np.broadcast_to(concentration, (count, n, K))) + 1e-30
    return Z, Pi / Pi.sum(axis=2, keepdims=True), rng.standard_normal((count, K, d, p))


@pytest.mark.parametrize("share", [1.999 / 2, 1.0, None])
def test_no_step_within_the_bound_raises_the_variational_rate(share: float | None) -> None:
    rng = np.random.default_rng(14)
    cases = 0
    for n, d, K, p in ((8, 4, 3, 2), (3, 5, 2, 5), (1, 3, 1, 3), (20, 2, 4, 1)):
        Z, Pi, U = random_cases(rng, 2500, n, d, K, p)
        U = U / np.linalg.norm(U, ord=2, axis=(2, 3), keepdims=True).max(axis=1, keepdims=True)
        factor = share if share is not None else rng.uniform(0, 1)
        new = rates.descent_step(Z, Pi, U, 0.7, step=factor * 2 * 0.7**2 / d)
        before, after = (rates.variational_rate(X, Pi, U, 0.7) for X in (Z, new))
        assert (after <= before * (1 + 1e-13)).all()
        np.testing.assert_allclose(rates.largest_step(U, 0.7), 2 * 0.7**2 / d, rtol=1e-12)
        cases += len(Z)
    assert cases == 10_000


def test_at_twice_the_bound_the_variational_rate_can_rise() -> None:
    rng = np.random.default_rng(15)
    Z, Pi, U = 1e-3 * rng.standard_normal((300, 6, 4)), np.ones((300, 6, 1)), np.tile(np.eye(4), (300, 1, 1, 1))
    new = rates.descent_step(Z, Pi, U, 1.0, step=2.0 * float(rates.largest_step(np.eye(4)[None], 1.0)))
    assert (rates.variational_rate(new, Pi, U, 1.0) > rates.variational_rate(Z, Pi, U, 1.0)).all()


@over_storages
@pytest.mark.parametrize(("dtype", "off"), [("float64", 1e-9), ("float32", 1e-4), ("float64", 0.005)])
def test_memberships_whose_sums_rounding_does_not_explain_are_refused(dtype: str, off: float, storage: str) -> None:
    Z, Pi, U = (array.astype(dtype) for array in problem(18))
    step = float(rates.largest_step(U, 1.0))
    before, after = (
        float(rates.variational_rate(X, Pi, U, 1.0)) for X in (Z, rates.descent_step(Z, Pi, U, 1.0, step=step))
    )
    assert after <= before * (1 + 1e-5)
    Pi = stored(Pi * np.asarray(1 + off, dtype), storage)
    with pytest.raises(ValueError, match="rounding does not explain; expected memberships of sum 1"):
        rates.descent_step(stored(Z, storage), Pi, stored(U, storage), 1.0, step=step)


@pytest.mark.parametrize("K", [1, 5, 300])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_memberships_of_a_softmax_are_accepted_in_every_precision(dtype: str, K: int) -> None:
    rng = np.random.default_rng(19)
    logits = (8 * rng.standard_normal((2000, K))).astype(dtype)
    E = np.exp(logits - logits.max(axis=1, keepdims=True))
    Pi = E / E.sum(axis=1, keepdims=True, dtype=np.float32 if dtype == "float16" else dtype).astype(dtype)
    assert rates.compression_rate(rng.standard_normal((2000, 3)), Pi, 1.0) > 0


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8, 1e100])
def test_a_rate_reduction_is_not_negative(size: float) -> None:
    rng = np.random.default_rng(20)
    for _ in range(50):
        Z = size * rng.standard_normal((30, 4)) * 10.0 ** rng.uniform(-9, 0, 4)
        Pi = np.full((30, 3), 1 / 3)  # every group is as all: nothing is saved
        assert 0 <= rates.rate_reduction(Z, Pi, 0.5) <= 1e-5


def test_the_largest_step_of_no_basis_is_infinite() -> None:
    steps = rates.largest_step(np.stack([np.zeros((2, 3, 1)), np.ones((2, 3, 1))]), 1.0)
    assert steps[0] == math.inf
    assert steps[1] == pytest.approx(2 / 9)
    Z, Pi, _ = problem(17, K=2, d=3)
    assert (rates.descent_step(Z, Pi, np.zeros((2, 3, 1)), 1.0, step=1e9) == Z).all()


# -- gradients -------------------------------------------------------------------------


@needs_torch
@pytest.mark.parametrize(("n", "d"), [(7, 3), (3, 6), (4, 4)])
@pytest.mark.parametrize("size", [1.0, 1e7])
def test_gradients_in_torch_are_those_of_finite_differences(n: int, d: int, size: float) -> None:
    import torch

    Z, Pi, U = problem(18, n, d, 2, 3)
    logits = torch.log(torch.from_numpy(Pi)).requires_grad_()
    z, u = (torch.from_numpy(array).requires_grad_() for array in (Z, U))
    eps = 0.5 / size

    for function, _ in TABLE.values():
        assert_gradients(lambda z, a, u, f=function: f(z, a.softmax(-1), u, eps), (z, logits, u))
    if size == 1:
        assert_gradients(lambda z, a, u: rates.descent_step(z, a.softmax(-1), u, eps, step=0.05), (z, logits, u))
        assert_gradients(lambda z: rates.head_rate(z[None]), (z,))


@needs_torch
@pytest.mark.parametrize("name", TABLE)
def test_a_mask_of_numpy_may_be_refilled_before_backward(name: str) -> None:
    import torch

    Z, Pi, U = (torch.from_numpy(array) for array in problem(21, 7, 3))
    z, found = Z.requires_grad_(), []
    for refill in (False, True):
        mask = np.arange(7) != 2
        rate = TABLE[name][0](z, Pi, U, 0.5, mask=mask)
        if refill:
            mask[...] = ~mask
        found.append(torch.autograd.grad(rate, z)[0])
    assert torch.equal(*found)


@needs_torch
def test_gradients_at_memberships_of_zero_and_masked_tokens_are_finite() -> None:
    import torch

    Z, Pi, U = (torch.from_numpy(array) for array in problem(20, n=4, d=6))
    Pi[:2] = torch.eye(3, dtype=torch.float64)[:2]
    mask = torch.tensor([True, True, True, False])
    Z[3] = math.nan
    for size in (1.0, 1e9):
        z, pi = Z.clone().requires_grad_(), Pi.clone().requires_grad_()
        total = rates.rate_reduction(z, pi, 0.5 / size, mask=mask) + rates.variational_rate(z, pi, U, 0.5, mask=mask)
        total.backward()
        assert torch.isfinite(z.grad).all()
        assert torch.isfinite(pi.grad).all()
        assert (z.grad[3] == 0).all()
        assert (pi.grad[3] == 0).all()


@needs_torch
def test_the_slope_in_a_membership_of_zero_is_right() -> None:
    import torch

    for n, d in ((4, 6), (9, 3)):
        Z, Pi, _ = (torch.from_numpy(array) for array in problem(21, n, d, K=2))
        Pi[0] = torch.tensor([0.0, 1.0])
        Pi.requires_grad_()
        (gradient,) = torch.autograd.grad(rates.compression_rate(Z, Pi, 0.5), Pi)
        move = torch.zeros_like(Pi)
        move[0] = torch.tensor([1e-6, -1e-6])
        change = rates.compression_rate(Z, Pi + move, 0.5) - rates.compression_rate(Z, Pi, 0.5)
        assert float(change.detach()) / 1e-6 == pytest.approx(
            float((gradient[0] * torch.tensor([1.0, -1.0])).sum()), rel=1e-4
        )


# -- errors ----------------------------------------------------------------------------

Z0, PI0, U0 = problem(22)
STATE = Moments(5).update(Z0)


@pytest.mark.parametrize(
    ("call", "error", "part"),
    [
        (lambda: rates.coding_rate(Z0, 0.0), ValueError, "eps is 0.0"),
        (lambda: rates.coding_rate(Z0, math.inf), ValueError, "eps is inf"),
        (lambda: rates.coding_rate(Z0, math.nan), ValueError, "eps is nan"),
        (lambda: rates.coding_rate(Z0, "1"), TypeError, "eps is '1'"),
        (lambda: rates.coding_rate(Z0[0], 1.0), ValueError, "Z has shape"),
        (lambda: rates.coding_rate(np.ones((3, 2), int), 1.0), TypeError, "Z has dtype int64"),
        (lambda: rates.coding_rate(np.full((3, 2), np.nan), 1.0), levattn.NonFiniteError, "Z holds NaN"),
        (lambda: rates.coding_rate(STATE, 1.0, mask=np.ones(12, bool)), ValueError, "mask is given beside Moments"),
        (lambda: rates.coding_rate(Moments(3, diagonal=True), 1.0), ValueError, "diagonal Moments"),
        (lambda: rates.compression_rate(Z0, None, 1.0), TypeError, "Pi is of type NoneType"),
        (lambda: rates.compression_rate(STATE, PI0, 1.0), ValueError, "Pi is given beside Moments"),
        (lambda: rates.compression_rate(STATE, None, 1.0), ValueError, "expected one of each group"),
        (lambda: rates.compression_rate(Z0, PI0[:3], 1.0), ValueError, "expected n = 12"),
        (lambda: rates.compression_rate(Z0, -PI0, 1.0), ValueError, "Pi holds a number below 0"),
        (lambda: rates.compression_rate(Z0, 2 * PI0, 1.0), ValueError, "sum is off 1 by more"),
        (lambda: rates.variational_rate(Z0, PI0, U0[:2], 1.0), ValueError, "U has shape"),
        (lambda: rates.variational_rate(Z0, PI0, U0[:, :4], 1.0), ValueError, "U has shape"),
        (lambda: rates.variational_rate(Z0, PI0, U0 * np.inf, 1.0), levattn.NonFiniteError, "U holds NaN"),
        (lambda: rates.descent_step(Z0, PI0, U0, 1.0, step=0), ValueError, "step is 0"),
        (lambda: rates.descent_step(Z0, PI0, U0, 1.0, step="1"), TypeError, "step is '1'"),
        (lambda: rates.largest_step(U0[:0], 1.0), ValueError, "at least one group"),
        (lambda: rates.largest_step(U0[0], 1.0), ValueError, "U has shape"),
        (lambda: rates.head_rate(Z0), ValueError, "W has shape"),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        call()
