"""Scores of rows and the rows with the largest ones on a CUDA device, run on the CPU, against definitions.

Inside: kernels are called by their names, and compared with what arrays in main memory take.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulator import in_orders
from levattn._kernels.pruned import SAME
from levattn._kernels.pruned import cuda as pruned_cuda
from levattn.attention.pruned import choice
from levattn.attention.pruned.selection import Checks

pytestmark = pytest.mark.usefixtures("host")
DTYPES = ["float32", "float64"]


def chosen(scores: Any, first: Any, count: int) -> tuple[Any, Any]:
    """The rows by a stable sort, in their order, and their flags."""
    largest = np.finfo(scores.dtype).max
    order = np.argsort(-np.where(first, np.inf, np.minimum(scores, largest)), axis=1, kind="stable")[:, :count]
    flags = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(flags, order, values=True, axis=1)
    return np.sort(order, axis=1), flags


def check(scores: Any, first: Any, count: int) -> None:
    order, flags, sound = in_orders(pruned_cuda.choose_rows, scores, first, count)
    expected, expected_flags = chosen(scores, first, count)
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(flags, expected_flags)
    assert sound.all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("b", "n", "count"), [(1, 1, 1), (3, 40, 7), (2, 1025, 1024), (1, 2600, 600), (2, 9, 9)])
def test_rows_are_those_of_a_stable_sort(b: int, n: int, count: int, dtype: str) -> None:
    rng = np.random.default_rng(n)
    for scores in (
        rng.standard_normal((b, n)),
        rng.integers(-2, 3, (b, n)) * 1.0,  # ties
        np.exp(rng.uniform(-300, 300, (b, n))) * rng.choice([-1, 1], (b, n))
        if dtype == "float64"
        else -np.ones((b, n)),
    ):
        check(scores.astype(dtype), rng.random((b, n)) < 0.1, count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_scores_keep_their_order(dtype: str) -> None:
    """Infinity counts as the largest number, zeros of both signs as one, and subnormal numbers as themselves."""
    kind = np.finfo(dtype)
    extreme = [
        0.0,
        -0.0,
        np.inf,
        kind.max,
        -np.inf,
        kind.min,
        kind.smallest_subnormal,
        -kind.smallest_subnormal,
        1.0,
        -1.0,
    ]
    scores = np.array([extreme, extreme[::-1]], dtype)
    for count in range(len(extreme) + 1):
        check(scores, np.zeros(scores.shape, np.bool_), count)
        check(scores, np.broadcast_to(np.arange(len(extreme)) == 4, scores.shape), count)


def test_nothing_to_choose() -> None:
    for shape, count in (((0, 5), 2), ((2, 0), 0), ((2, 5), 0)):
        order, flags, _ = pruned_cuda.choose_rows(np.zeros(shape), np.zeros(shape, np.bool_), count)
        assert order.shape == (shape[0], count)
        assert not flags.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_is_told(dtype: str) -> None:
    scores = np.random.default_rng(0).standard_normal((3, 50)).astype(dtype)
    scores[1, 49] = np.nan
    order, flags, sound = pruned_cuda.choose_rows(scores, np.zeros(scores.shape, np.bool_), 20)
    assert sound.tolist() == [True, False, True]
    assert (flags.sum(1) == 20).all()
    assert (np.diff(order, axis=1) > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 24, 70])
@pytest.mark.parametrize("kind", ["expected", "residual", "residual without centers"])
def test_scores_are_their_definition(kind: str, d: int, dtype: str) -> None:
    rng = np.random.default_rng(d)
    X, along = rng.standard_normal((2, 90, d)).astype(dtype), rng.standard_normal((2, 90)).astype(dtype)
    X[0, 3] = 0
    distance = rng.uniform(0, 1, (2, 90)).astype(dtype) * (rng.random((2, 90)) < 0.5)
    distance = distance.astype(dtype) if kind == "residual" else None
    scores, finite = in_orders(pruned_cuda.score_rows, X, along, distance, kind != "expected")
    wide = X.astype(np.float64)
    squares = (wide * wide).sum(-1)
    expected = along.astype(np.float64) + squares / 2
    if kind != "expected":
        far = squares if distance is None else distance.astype(np.float64)
        expected += np.log(np.maximum(far, np.maximum(SAME * squares, 1e-30)))
    np.testing.assert_allclose(
        scores, expected, rtol=1e-5 if dtype == "float32" else 1e-13, atol=1e-5 * (dtype == "float32")
    )
    assert finite.all()
    assert len(finite) == 3
    X[1, 89, 0] = np.inf
    assert pruned_cuda.score_rows(X, along, distance, kind != "expected")[1].tolist() == [True, True, False]


def test_rows_are_chosen_in_main_memory_as_there() -> None:
    scores = np.random.default_rng(0).integers(-9, 9, (2, 200)).astype(np.float32)
    first = np.broadcast_to(np.arange(200) < 3, scores.shape)
    order, count, flags = choice.chosen(scores, 17, None, first, 3, Checks())
    assert count is None
    found = pruned_cuda.choose_rows(scores, first, 20)
    np.testing.assert_array_equal(found[0], order)
    np.testing.assert_array_equal(found[1], flags)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "d", "D", "R"), [(1, 1, 1, 1), (40, 3, 7, 5), (700, 130, 2, 3), (2100, 4, 140, 2), (90, 24, 24, 65)]
)
def test_summaries_are_those_of_steps(n: int, d: int, D: int, R: int, dtype: str) -> None:
    """Of views, with rows in no summary that hold NaN, and labels without rows."""
    rng = np.random.default_rng(n)
    K, V = (rng.standard_normal((2, n, width + 2)).astype(dtype)[..., 1:-1] for width in (d, D))
    weight = (rng.random((2, n)) < 0.8).astype(dtype)
    weight[:, 0] = 1
    along = (4 * rng.standard_normal((2, n))).astype(dtype)
    labels = rng.integers(0, max(1, R - 1), (2, n))
    K[weight == 0] = V[weight == 0] = along[weight == 0] = np.nan
    role, tilts, sums = in_orders(pruned_cuda.merge_rows, labels, along, weight, K, V, R)
    np.testing.assert_array_equal(role, np.where(weight > 0, labels, -2))
    still = [np.where(weight[..., None] > 0, X, 0) for X in (K, V)]
    items = choice.items_of(np.ones_like(weight), *still)
    given = np.zeros_like(still[0]), np.where(weight > 0, along, 0), items, weight, R, None, labels, 1
    _, log_weight, held = choice.grouped(*given)
    eps = 64 * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(tilts, log_weight, rtol=0, atol=eps)
    found = sums[..., :d], sums[..., d:-3], *(sums[..., k] for k in (-3, -2, -1))
    for one, other in zip(found, (held.keys, held.values, held.weight, held.offset, held.count), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=eps * (1 + np.abs(other).max() + n))
