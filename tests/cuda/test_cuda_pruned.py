"""Where clusters begin on a CUDA device, run on the CPU, against the definition and loops.

Inside: the kernel is compared with its definition, at the limits of its memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from emulator import in_orders
from levattn._kernels import kernels_for
from levattn._kernels.pruned import cuda as pruned_cuda
from levattn._kernels.pruned import definition

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


def test_no_matrix() -> None:
    assert pruned_cuda.far_rows(np.zeros((0, 9, 3)), np.zeros((0, 9)), 4).shape == (0, 4)


def test_arrays_of_the_device_have_these_kernels(cupy: Any) -> None:
    X, weight = drawn(2, 40, 3, "float64")
    kernels = kernels_for("pruned", cupy.asarray(X))
    assert kernels.cluster is pruned_cuda.cluster
    found = kernels.cluster(cupy.asarray(X), cupy.asarray(weight), 6, 1)
    for one, two in zip(found, definition.cluster(X, weight, 6, 1), strict=True):
        np.testing.assert_array_equal(one.get(), two)
