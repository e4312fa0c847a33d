"""Centered keys score what exact arithmetic gives, whatever their mean, rank, format, library and method.

Inside: parts of a mean are judged beyond float64.
"""

from __future__ import annotations

import zlib
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import levattn
import naive
from levattn._core.arrays import as_matrices
from levattn._kernels import Rows
from levattn.linalg.centered import means
from strategies import STORAGE, Float, as_float64, stores

METHODS = ("auto", "gram", "qr", "svd")
OFFSETS = (0.0, 255.0, 1e4, 1e6, 1.7e15, -1e9)


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def _composition(n: int, parts: int) -> Float:
    """Rows of nonnegative numbers that sum to exactly 1."""
    counts = _rng(f"composition {n} {parts}").multinomial(2**10, np.full(parts, 1 / parts), n)
    return np.asarray(counts / 2.0**10)


def _steps(n: int, d: int) -> Float:
    return _rng(f"steps {n} {d}").integers(-4, 5, (n, d)).astype(np.float64)


KEYS: dict[str, Float] = {
    # name: keys whose entries, and those moved by an offset, are held exactly by float64
    "two columns of three rows": np.array([[0.0, 0], [1, 1], [3, 3]]),
    "plane": np.array([[0.0, 0], [1, 1], [3, 2], [7, 1]]),
    "composition": _composition(40, 5),
    "few compositions": _composition(4, 5),
    "collinear": _steps(30, 1) * [1.0, -2, 4],
    "dependent": _steps(50, 3) @ _steps(3, 6),
    "repeated": _steps(3, 4)[np.arange(40) % 3],
    "one row": _steps(1, 3),
    "copies": np.tile(_steps(1, 4), (33, 1)),
    "ones": np.eye(7),
    "wide": _steps(10, 64),
    "as many": _steps(12, 12),
    "one more": _steps(13, 12),
    "wide and dependent": np.hstack([_steps(9, 2) @ _steps(2, 20), np.ones((9, 3))]),
    "tall": _steps(5000, 6),
}


def _held(keys: Float, storage: str) -> bool:
    """Tell whether the storage type holds keys exactly."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(as_float64(STORAGE[storage](keys)), keys))


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", KEYS)
def test_an_offset_changes_nothing(name: str, offset: float) -> None:
    keys = KEYS[name] + offset
    exact = naive.leverage_exact(keys, center=True)
    assert exact.sum() == pytest.approx(round(exact.sum()), abs=1e-9)
    for method in METHODS:
        scores = levattn.leverage_scores(keys, center=True, method=method)
        np.testing.assert_allclose(scores, exact, rtol=1e-10, atol=1e-25, err_msg=method)
        found = levattn.universal_set(keys, 0.5, center=True, method=method)
        assert found.rank == round(exact.sum()), method
        np.testing.assert_array_equal(found.indices, np.flatnonzero(exact >= 0.5 * (1 - 1e-9)), err_msg=method)


@stores()
@pytest.mark.parametrize("name", ["two columns of three rows", "plane", "dependent", "repeated", "wide", "one more"])
def test_every_storage_type(name: str, storage: str) -> None:
    offset = 0 if storage.endswith("bfloat16") else 64 if storage.endswith("float16") else 1024
    keys = KEYS[name] + offset
    assert _held(keys, storage) or "bfloat16" in storage
    exact = naive.leverage_exact(as_float64(STORAGE[storage](keys)), center=True)
    scores = as_float64(levattn.leverage_scores(STORAGE[storage](keys), center=True))
    np.testing.assert_allclose(scores, exact, rtol=1e-10 if "64" in storage else 1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([[1000, 0], [1001, 1], [1003, 3]], [0.38095238095238093, 0.023809523809523808, 0.5952380952380952]),
        ([[1.7e15], [1.7e15 + 1], [1.7e15 + 1]], [2 / 3, 1 / 6, 1 / 6]),
        ([[1.7e12 + x] for x in (0, 1, 7)], naive.leverage_exact([[0], [1], [7]], center=True)),
        ([[0.1], [0.2], [0.3]], naive.leverage_exact([[0.1], [0.2], [0.3]], center=True)),
        ([[1e308], [-1e308], [1.7e308]], naive.leverage_exact([[1.0], [-1.0], [1.7]], center=True)),
        ([[5e-324], [1e-323], [0.0]], [0, 0.5, 0.5]),
        ([[1e-300, 1e300], [2e-300, 1e300], [1e-300, 3e300]], [2 / 3, 2 / 3, 2 / 3]),
    ],
    ids=str,
)
def test_known_scores(keys: Any, expected: Any) -> None:
    for method in METHODS:
        np.testing.assert_allclose(
            levattn.leverage_scores(np.array(keys, np.float64), center=True, method=method), expected, rtol=1e-10
        )


def test_independent_rows_miss_one_by_their_share() -> None:
    """Up to d + 1 keys whose differences are independent: every score is 1 - 1/n, which no threshold above lets in."""
    keys = _rng("independent").standard_normal((10, 64)) + 1e4
    np.testing.assert_array_equal(levattn.leverage_scores(keys, center=True), 0.9)
    assert len(levattn.universal_set(keys, 0.95, center=True).indices) == 0
    assert len(levattn.universal_set(keys, 0.9, center=True).indices) == 10
    assert levattn.universal_set(keys, size=4, center=True).epsilon == pytest.approx(0.9)
    mask = np.arange(10) != 3
    np.testing.assert_array_equal(levattn.leverage_scores(keys, center=True, mask=mask), np.where(mask, 1 - 1 / 9, 0))


def _ill_conditioned(condition: float, offset: float) -> Float:
    rng = _rng(f"{condition} {offset}")
    U = np.linalg.qr(rng.standard_normal((300, 8)))[0]
    V = np.linalg.qr(rng.standard_normal((8, 8)))[0]
    keys = (U * np.logspace(0, -np.log10(condition), 8)) @ V.T + offset * rng.standard_normal(8)
    return np.asarray(keys)


@stores("float64", "strict-float64", "cupy-float64")
def test_small_directions_have_their_digits_in_every_library(storage: str) -> None:
    """What rounding takes from a key less its mean is added in the products that keep all digits."""
    keys = _ill_conditioned(1e12, 1.0)
    exact = naive.leverage_exact(keys, center=True)
    scores = as_float64(levattn.leverage_scores(STORAGE[storage](keys), center=True))
    np.testing.assert_allclose(scores, exact, rtol=1e-9)


@pytest.mark.parametrize("condition", [1e3, 1e6, 1e9, 1e12])
@pytest.mark.parametrize("offset", [1.0, 1e5])
def test_ill_conditioned_keys_beside_their_mean(condition: float, offset: float) -> None:
    keys = _ill_conditioned(condition, offset)
    exact = naive.leverage_exact(keys, center=True)
    for method in METHODS:
        scores = levattn.leverage_scores(keys, center=True, method=method)
        low = np.min(scores / exact)
        assert low > 1 - 1e-9, method
        if offset * 2.0**-52 * 1e3 < 1 / condition:  # the rounding of the keys leaves the condition as it was
            np.testing.assert_allclose(scores, exact, rtol=1e-9, err_msg=method)


@pytest.mark.parametrize("spread", [0.1, 0.05, 0.03, 0.02, 0.017, 0.014, 0.012, 0.01, 0.008])
def test_many_keys_in_float32_are_within_their_error_up_to_the_condition_of_float32_products(spread: float) -> None:
    rng = _rng("nearly collinear")
    K = (rng.standard_normal((4096, 1)) * [1.0, 1] + spread * rng.standard_normal((4096, 2))).astype(np.float32)
    exact = levattn.leverage_scores(K.astype(np.float64), center=True, method="qr")
    np.testing.assert_allclose(levattn.leverage_scores(K, center=True), exact, rtol=1e-5)


def test_a_small_direction_of_one_key_is_kept() -> None:
    """A key alone in a direction scores 1 - 1/n, however far below the rank tolerance it leaves the others."""
    for size in (1e-9, 1e-15, 2.0**-60, 1e-200):
        steps = _steps(20, 2)
        keys = np.column_stack([steps[:, 0] + 1e6, steps[:, 1] - 1e6, size * steps[:, 0]])
        keys[7, 2] += size * 2.0**-50 * 8
        exact = naive.leverage_exact(keys, center=True)
        assert exact.sum() == pytest.approx(3)
        found = levattn.universal_set(keys, 0.5, center=True)
        assert set(np.flatnonzero(exact >= 0.5)) <= set(found.indices.tolist())


def test_masks_batches_and_sparse_keys() -> None:
    from scipy.sparse import csr_array

    rng = _rng("batches")
    keys = np.stack([KEYS["dependent"] + 1e6, np.roll(KEYS["dependent"], 3, axis=0) - 1e9])
    mask = rng.random((2, 50)) < 0.7
    mask[:, 0] = [False, True]
    keys[0, ~mask[0]] = np.nan
    scores = levattn.leverage_scores(keys, center=True, mask=mask)
    for item in range(2):
        exact = naive.leverage_exact(keys[item], center=True, mask=mask[item])
        np.testing.assert_allclose(scores[item], exact, rtol=1e-10, atol=1e-25)
        alone = levattn.leverage_scores(keys[item], center=True, mask=mask[item])
        np.testing.assert_array_equal(alone, scores[item])
        sparse = csr_array(np.where(mask[item][:, None], keys[item], 0.0))
        np.testing.assert_allclose(
            levattn.leverage_scores(sparse, center=True, mask=mask[item]), exact, rtol=1e-10, atol=1e-25
        )
    assert not levattn.leverage_scores(keys, center=True, mask=np.zeros((2, 50), bool)).any()


@pytest.mark.parametrize("method", ["countsketch", "osnap", "srht", "jl"])
def test_sketches_of_centered_keys_see_no_offset(method: str) -> None:
    keys = _steps(3000, 4)
    options: dict[str, Any] = {"center": True, "method": method}
    moved = levattn.leverage_scores(keys + 2.0**50, **options)
    np.testing.assert_allclose(moved, levattn.leverage_scores(keys, **options), rtol=1e-9)
    exact = naive.leverage_exact(keys, center=True)
    found = levattn.universal_set(keys + 2.0**50, 0.002, **options)
    assert set(np.flatnonzero(exact >= 0.002)) <= set(found.indices.tolist())


@stores("float64", "float16", "bfloat16", "torch-float32", "strict-float32", "cupy-float16")
def test_masks_that_begin_anywhere(storage: str) -> None:
    """The first row that takes part is another one in each matrix; what is left out may be anything."""
    rng = _rng("begin")
    keys = np.stack([_steps(30, 3) + 64, _steps(30, 3) - 32, _steps(30, 3), _steps(30, 3)])
    mask = rng.random((4, 30)) < 0.7
    mask[np.arange(4), :4] = np.triu(np.ones((4, 4), bool))
    mask[3] = False
    exact = np.stack([naive.leverage_exact(one, center=True, mask=keep) for one, keep in zip(keys, mask, strict=True)])
    keys[~mask] = np.inf
    flags = STORAGE[storage](mask.astype(np.float64)) > 0
    scores = as_float64(levattn.leverage_scores(STORAGE[storage](keys), center=True, mask=flags))
    np.testing.assert_allclose(scores, exact, rtol=1e-10 if "64" in storage else 1e-6, atol=1e-25)


@stores("float64", "float32", "strict-float64", "cupy-float64", "torch-bfloat16")
def test_parts_of_the_mean_are_nearest_to_what_is_left(storage: str) -> None:
    """Blocks of rows, some of them incomplete, with a mean that no float holds."""
    keys = _rng("parts").standard_normal((5000, 3)) * [1.0, 1e-3, 1e5] + [0.0, 1e9, 3.0]
    matrices = as_matrices(STORAGE[storage](keys), "K")
    parts, in_range = means(Rows(matrices.data, matrices.format))
    assert in_range
    for c, column in enumerate(as_float64(STORAGE[storage](keys)).T):
        left = sum(map(Fraction, column), Fraction(0)) / len(column)
        norm = max(abs(Fraction(x) - left) for x in column)
        for part in parts[0, :, c]:
            assert abs(left - Fraction(part)) <= Fraction(np.spacing(abs(part))) / 2 + norm / 2**90
            left -= Fraction(part)
        assert abs(left) <= norm / 2**90


def test_bounds_of_softmax_and_of_outputs_do_not_grow_with_an_offset() -> None:
    rng = _rng("bounds")
    keys, values = np.rint(8 * rng.standard_normal((300, 4))) / 8, np.rint(8 * rng.standard_normal((300, 2)))
    shapes = (None, np.diag([1.0, 2, 1, 0.5]), np.eye(4) + 0.5 * np.eye(4)[::-1])
    for f in (levattn.Softmax(1.0, shape) for shape in shapes):
        plain, moved = (levattn.sensitivities(keys + offset, f).upper for offset in (0.0, 1e12))
        np.testing.assert_allclose(moved, plain, rtol=1e-6)
    found = levattn.heavy_attention(rng.standard_normal((5, 4)), keys, 0.2)
    plain, moved = (found.apply(values + offset, compensate="mean") for offset in (0.0, 2.0**20))
    np.testing.assert_allclose(moved[0], plain[0] + 2.0**20, rtol=1e-12)
    assert np.all(moved[1] <= plain[1] * 1.01 + 1e-5)
