"""Subnormal keys of float32 and bfloat16 are numbers like others: an arithmetic that takes them for zero misses keys.

Compilers of CUDA can be told to do so (``-ftz=true``), and some are without being asked; a CPU shows nothing of it.
Sums in float64 of these keys are normal, so that what is expected is what the keys give once they are scaled up.

Inside: each kernel gets numbers that reach it in no other way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_keys import read, stored

import levattn
from levattn._kernels import Rows
from levattn._kernels.gram import cuda as gram_cuda
from levattn._kernels.rows import cuda as rows_cuda
from levattn._kernels.select import cuda as select_cuda
from levattn._kernels.sketch import cuda as sketch_cuda
from strategies import as_bool, as_float64

UNIT = {"float32": 2.0**-149, "bfloat16": 2.0**-133}  # the least number
FORMATS = tuple(UNIT)


def rows_of(format: str, n: int = 90, d: int = 8) -> tuple[Rows, Any]:
    """Rows of subnormal numbers, and the whole numbers that they are multiples of the unit by."""
    whole = np.random.default_rng(0).integers(-60, 61, (1, n, d)).astype(np.float64)
    rows = Rows(stored(whole * UNIT[format], format), format)
    np.testing.assert_array_equal(read(rows), whole * UNIT[format])
    return rows, whole


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("format", FORMATS)
class TestKernels:
    def test_columns(self, format: str) -> None:
        rows, whole = rows_of(format)
        largest = rows_cuda.column_figures(rows, largest=True) / UNIT[format]
        sums = rows_cuda.column_figures(rows, largest=False) / UNIT[format]
        np.testing.assert_array_equal(largest, np.abs(whole).max(axis=1))
        np.testing.assert_array_equal(sums, whole.sum(axis=1))

    def test_moments_and_norms_in_float64(self, format: str) -> None:
        rows, whole = rows_of(format)
        pieces = np.array([[0, 0, 0, whole.shape[1]]])
        gram = gram_cuda.moments(rows, pieces) / UNIT[format] / UNIT[format]
        np.testing.assert_array_equal(gram, np.swapaxes(whole, 1, 2) @ whole)
        W = np.triu(np.ones((1, 8, 8)))
        out = rows.zeros(as_float64=True)
        gram_cuda.sqnorms(rows, np.zeros(1, np.int64), W / UNIT[format], out)
        np.testing.assert_array_equal(out, np.sum((whole @ W) ** 2, axis=2))

    def test_moments_in_single_precision_of_columns_that_are_scaled_up(self, format: str) -> None:
        rows, whole = rows_of(format)
        scaled = Rows(rows.keys, format, scale=np.full((1, 8), 1 / UNIT[format]))
        found = gram_cuda.moments(scaled, np.array([[0, 0, 0, whole.shape[1]]]), arithmetic="single")
        np.testing.assert_array_equal(found, np.swapaxes(whole, 1, 2) @ whole)  # fewer than 2^24

    def test_sketches(self, format: str) -> None:
        rows, whole = rows_of(format)
        for real, unit in (("float64", UNIT[format]), ("float32", UNIT[format])):
            found, expected = np.zeros((1, 7, 8), real), np.zeros((1, 7, 8))
            sketch_cuda.scatter(rows, 5, 1, 0, 1, 7, found)
            sketch_cuda.scatter(Rows(whole, "float64"), 5, 1, 0, 1, 7, expected)
            np.testing.assert_array_equal(found.astype(np.float64) / unit, expected)


@pytest.mark.usefixtures("host")
def test_thresholds_among_subnormal_scores() -> None:
    scores = (np.arange(50, dtype=np.float64) * UNIT["float32"]).astype(np.float32)[None]
    bound = np.array([20 * UNIT["float32"]])
    chosen, *_ = select_cuda.threshold(scores, None, bound, bound)
    np.testing.assert_array_equal(np.flatnonzero(chosen[0]), np.arange(20, 50))
    chosen, close, (starts, leaders) = select_cuda.largest_and_left(scores, None, 7, np.zeros(1))
    assert close is None
    np.testing.assert_array_equal(np.flatnonzero(chosen[0]), np.arange(43, 50))
    assert (starts.tolist(), leaders.tolist()) == ([0, 1], [42])


@pytest.mark.parametrize("columns", ["all", "one"])
def test_no_key_is_missed_where_columns_are_subnormal(columns: str, cupy: Any) -> None:
    """Scores do not depend on the size of columns, and one key alone has the last column."""
    rng = np.random.default_rng(1)
    K = rng.integers(-60, 61, (400, 6)).astype(np.float64)
    K[:, 5] = 0
    K[123, 5] = 1
    scale = np.where((np.arange(6) == 5) | (columns == "all"), UNIT["float32"], 1.0)
    keys = (K * scale).astype(np.float32)
    expected = levattn.leverage_scores(K)
    np.testing.assert_allclose(as_float64(levattn.leverage_scores(cupy.asarray(keys))), expected, rtol=1e-5)
    chosen = as_bool(levattn.universal_set(cupy.asarray(keys), 0.5).mask)
    assert expected[123] > 0.999
    np.testing.assert_array_equal(chosen, levattn.universal_set(K, 0.5).mask)
