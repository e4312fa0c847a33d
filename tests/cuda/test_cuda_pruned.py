"""Clusters on a CUDA device, run on the CPU: where they begin, which is nearest, and sums over them, against loops.

Inside: kernels are compared with their definitions, at the limits of their memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from emulator import in_orders
from levattn._kernels import kernels_for
from levattn._kernels.pruned import Summaries, definition, mapped
from levattn._kernels.pruned import cuda as pruned_cuda

pytestmark = pytest.mark.usefixtures("host")


def by_loops(X: NDArray[Any], weight: NDArray[Any], R: int) -> list[list[int]]:
    """The row farthest from the mean, then always that farthest from all so far; of equal ones the first."""
    found = []
    for rows, w in zip(X.astype(np.float64), weight, strict=True):
        step = definition.sample_step(len(rows), R)
        some = [i for i in range(0, len(rows), step) if w[i] > 0]
        mean = sum(w[i] * rows[i] for i in range(len(rows))) / (w.sum() or 1.0)
        far = {i: float(((rows[i] - mean) ** 2).sum()) for i in some}
        picks: list[int] = []
        for _ in range(R):
            picks.append(max(some, key=lambda i, far=far: (far[i], -i)) if some else 0)
            near = {i: float(((rows[i] - rows[picks[-1]]) ** 2).sum()) for i in some}
            far = {i: min(far[i], near[i]) if len(picks) > 1 else near[i] for i in some}
        found.append(picks)
    return found


def drawn(b: int, n: int, d: int, dtype: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows of small whole numbers, so that distances are exact and many are equal, and weights, some of them zero."""
    rng = np.random.default_rng(n + d)
    X = rng.integers(-4, 5, (b, n, d)).astype(dtype)
    weight = (rng.random((b, n)) < 0.8).astype(dtype)
    X[:, 0] -= 9  # so that rounding of the mean does not say which row is the first
    weight[:, 0] = 1
    return X, weight


SHAPES = (
    (1, 1, 1, 1),
    (2, 40, 3, 7),
    (3, 65, 9, 65),
    (2, 64, 16, 30),
    (1, 200, 64, 5),
    (2, 130, 17, 20),
    (1, 2100, 2, 4),
)


@pytest.mark.parametrize("tables", [0, 1 << 31], ids=["without a table", "with a table"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_those_of_the_definition(
    shape: tuple[int, ...], dtype: str, tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruned_cuda, "_TABLES", tables)
    b, n, d, R = shape
    X, weight = drawn(b, n, d, dtype)
    found = in_orders(pruned_cuda.far_rows, X, weight, R)
    assert found.dtype == np.int64
    assert found.tolist() == by_loops(X, weight, R)
    np.testing.assert_array_equal(found, definition.far_rows(X, weight, R))
    for one, two in zip(pruned_cuda.cluster(X, weight, R, 1), definition.cluster(X, weight, R, 1), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("spare", [-8, 0, 8, 8 * 150, 8 * 150 + 8 * 13 * 9, 8 * 300])
def test_what_does_not_fit_into_shared_memory_is_read_again(spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 5 numbers of 8 bytes, 150 distances, and copies of rows, 13 numbers apart."""
    X, weight = drawn(2, 150, 5, "float64")
    expected = by_loops(X, weight, 12)
    monkeypatch.setattr(pruned_cuda, "_TABLES", 0)
    monkeypatch.setattr(pruned_cuda, "shared_limit", lambda: 1024 + 8 * 5 + spare)
    assert pruned_cuda.far_rows(X, weight, 12).tolist() == expected


@pytest.mark.parametrize("tables", [8 * 40 * 40 - 1, 8 * 40 * 40, 3 * 8 * 40 * 40], ids=str)
def test_tables_of_a_batch_take_turns(tables: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for no table, for one, and for three of the five."""
    X, weight = drawn(5, 40, 3, "float64")
    monkeypatch.setattr(pruned_cuda, "_TABLES", tables)
    assert pruned_cuda.far_rows(X, weight, 9).tolist() == by_loops(X, weight, 9)


@pytest.mark.parametrize("tables", [0, 1 << 31], ids=["without a table", "with a table"])
def test_copies_of_rows_far_from_zero_come_last(tables: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares and products of these rows are rounded by more than the distances of other rows."""
    monkeypatch.setattr(pruned_cuda, "_TABLES", tables)
    X = np.repeat(np.random.default_rng(0).standard_normal((2, 30, 7)), 4, axis=1)
    X = (2.0**12 + X).astype(np.float32)
    found = pruned_cuda.far_rows(X, np.ones(X.shape[:2], np.float32), 30)
    for picks in found:
        assert sorted(picks // 4) == list(range(30))
        assert not (picks % 4).any()


def test_rows_of_weight_zero_alone() -> None:
    X, weight = drawn(2, 40, 3, "float32")
    weight[1] = 0
    found = pruned_cuda.far_rows(X, weight, 5)
    assert found.tolist() == by_loops(X, weight, 5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1), (2, 40, 3, 7), (2, 128, 16, 128), (1, 130, 33, 129), (2, 300, 5, 270), (2, 9, 0, 3), (1, 0, 3, 2)],
    ids=str,
)
def test_the_nearest_center_is_that_of_loops(shape: tuple[int, ...], dtype: str) -> None:
    """Of small whole numbers, so that products are exact and many centers are as near."""
    b, n, d, R = shape
    rng = np.random.default_rng(n + d)
    X, centers = (rng.integers(-2, 3, (b, rows, d)).astype(dtype) for rows in (n, R))
    labels, distance = in_orders(pruned_cuda.assigned, X, (X**2).sum(-1), centers)
    assert (labels.dtype, distance.dtype) == (np.int64, dtype)
    apart = ((X[:, :, None] - centers[:, None]) ** 2).sum(-1)
    np.testing.assert_array_equal(labels, apart.argmin(-1))
    np.testing.assert_array_equal(distance, apart.min(-1))


def test_rounded_distances_to_centers_are_not_negative() -> None:
    X = np.random.default_rng(0).standard_normal((2, 50, 19)).astype(np.float32)
    labels, distance = pruned_cuda.assigned(X, (X**2).sum(-1), X)
    np.testing.assert_array_equal(labels, [range(50)] * 2)
    assert 0 <= distance.min() <= distance.max() <= 19 * 8 * 2.0**-24 * float((X**2).sum(-1).max())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1), (2, 40, 3, 7), (2, 2100, 5, 3), (1, 700, 300, 2), (1, 90, 256, 65), (2, 0, 3, 4), (2, 9, 3, 0)],
    ids=str,
)
def test_sums_by_label_are_those_of_loops(shape: tuple[int, ...], dtype: str) -> None:
    """Rows of weight 0, which hold NaN, and of label -1 are in no sum, and a view is not copied."""
    b, n, d, R = shape
    rng = np.random.default_rng(n + d)
    labels = rng.integers(-1, R, (b, n))
    weight = (rng.random((b, n)) * (rng.random((b, n)) < 0.9)).astype(dtype)
    X = rng.standard_normal((b, n, d + 2)).astype(dtype)[..., 1:-1]
    X[weight == 0] = np.nan
    sums, mass = in_orders(pruned_cuda.label_sums, labels, weight, X, R)
    assert sums.dtype == mass.dtype == dtype
    for item, c in np.ndindex(b, R):
        inside = (labels[item] == c) & (weight[item] > 0)
        w = weight[item, inside].astype(np.float64)
        rounding = 4 * np.finfo(dtype).eps
        np.testing.assert_allclose(mass[item, c], w.sum(), rtol=rounding)
        each = w[:, None] * X[item, inside].astype(np.float64)
        assert np.all(np.abs(sums[item, c] - each.sum(0)) <= rounding * np.abs(each).sum(0))


def test_one_label_may_have_all_rows() -> None:
    X = np.random.default_rng(0).integers(-9, 9, (2, 3000, 33)).astype(np.float32)
    ones = np.ones(X.shape[:2], np.float32)
    labels = np.full(ones.shape, 2)
    sums, mass = pruned_cuda.label_sums(labels, ones, X, 4)
    np.testing.assert_array_equal(sums[:, 2], X.sum(1))
    np.testing.assert_array_equal(mass, [[0, 0, 3000, 0]] * 2)
    assert not sums[:, [0, 1, 3]].any()


def test_no_matrix() -> None:
    assert pruned_cuda.far_rows(np.zeros((0, 9, 3)), np.zeros((0, 9)), 4).shape == (0, 4)


def test_arrays_of_the_device_have_these_kernels(cupy: Any) -> None:
    X, weight = drawn(2, 40, 3, "float64")
    kernels = kernels_for("pruned", cupy.asarray(X))
    assert kernels.cluster is pruned_cuda.cluster
    found = kernels.cluster(cupy.asarray(X), cupy.asarray(weight), 6, 1)
    for one, two in zip(found, definition.cluster(X, weight, 6, 1), strict=True):
        np.testing.assert_array_equal(one.get(), two)


def test_sums_of_arrays_of_the_device_are_those_of_the_definition(cupy: Any) -> None:
    X, weight = drawn(2, 40, 3, "float64")
    labels = np.random.default_rng(0).integers(-1, 6, (2, 40))
    items = Summaries(weight, X, X[..., ::-1].copy(), weight - 1, weight + 2)
    there = mapped(items, cupy.asarray)
    for name in ("levels", "merged"):
        given = (X[..., 0].copy(), weight) if name == "levels" else (np.log(weight + 1), items)
        moved = (cupy.asarray(given[0]), mapped(given[1], cupy.asarray))
        found = getattr(kernels_for("pruned", there.keys), name)(cupy.asarray(labels), *moved, 6)
        expected = getattr(definition, name)(labels, *given, 6)
        for part in vars(found) if name == "merged" else [None]:
            one, two = (found, expected) if part is None else (getattr(x, part) for x in (found, expected))
            np.testing.assert_allclose(one.get(), two, rtol=1e-13, atol=1e-13)
