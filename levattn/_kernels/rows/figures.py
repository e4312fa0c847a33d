"""Figures of the columns of keys, and their rows that are not finite, on the device of the keys."""

from __future__ import annotations

from levattn._core.types import Float64
from levattn._kernels.dispatch import kernels_for
from levattn._kernels.rows import Rows


def column_sums(rows: Rows) -> Float64:
    """Return the sums of the columns, (b, d)."""
    return kernels_for("rows", rows.keys).column_figures(rows, largest=False)


def column_maxima(rows: Rows) -> Float64:
    """Return the largest magnitude in each column, (b, d)."""
    return kernels_for("rows", rows.keys).column_figures(rows, largest=True)


def nonfinite_rows(rows: Rows, item: int, limit: int) -> list[int]:
    """Return the first rows of one matrix (at most `limit`) that hold NaN or infinity and are not masked."""
    return kernels_for("rows", rows.keys).nonfinite_rows(rows, item, limit)
