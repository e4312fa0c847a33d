"""Rows less their mean, which is held in as many parts as it needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_float64, to_numpy
from levattn._core.types import Float64
from levattn._kernels import Rows
from levattn._kernels.rows.definition import exact_sum
from levattn.linalg.reading import require_finite
from levattn.linalg.sums import scaled_columns

__all__ = ["centered"]

_RANGE = 2.0**-900, 2.0**900  # of means whose parts, and their products, neither underflow nor overflow


def centered(rows: Rows) -> Rows:
    """Return the rows, which have no shift yet, less the mean of those that take part.

    A row that takes part is the origin of the sums, so the mean is no farther from it than the largest difference of
    two keys. So the error of the mean is below n 2⁻¹⁰⁵ times the norm of the centered column, however large the mean.
    """
    shift, in_range = _parts(rows)
    if not in_range:
        largest = rows.column_maxima()
        require_finite(rows, largest)
        rows = scaled_columns(rows, largest, 400)
        shift, _ = _parts(rows)
    return replace(rows, shift=shift)


def _parts(rows: Rows) -> tuple[Float64, bool]:
    """Return the three parts of the mean, (b, 3, d), and whether all numbers are in range."""
    b, n, _ = rows.shape
    counts, first = np.full(b, n), np.zeros(b, np.int64)
    if rows.mask is not None:
        mask = to_numpy(rows.mask)
        counts = mask.sum(axis=1)
        first = np.argmax(mask, axis=1) if n else first
    divisor = np.maximum(counts, 1)[:, None].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        origin = np.where(counts[:, None] > 0, _rows_at(rows, first), 0.0) if n else np.zeros((b, rows.shape[2]))
        high, low = rows.sums_apart(origin)
        sizes = np.abs(np.stack([origin, high]))
        quotient = high / divisor
        product, lost = _exact_product(quotient, divisor)
        rest = ((high - product) - lost + low) / divisor
        mean, second = exact_sum(origin, quotient)
        second, third = exact_sum(second, rest)
        mean, second = exact_sum(mean, second)
        second, third = exact_sum(second, third)
        least, most = _RANGE
        in_range = bool(np.all((sizes == 0) | ((sizes >= least) & (sizes <= most))))
    return np.stack([mean, second, third], axis=1), in_range


def _rows_at(rows: Rows, places: npt.NDArray[np.int64]) -> Float64:
    """Return one row of each matrix, with its scale, (b, d)."""
    start = int(places[0]) if len(places) else 0
    if (places == start).all():
        found = to_float64(rows.between(start, start + 1).keys, rows.format)[:, 0]
    else:
        each = [(rows.item(i).between(at, at + 1)) for i, at in enumerate(places.tolist())]
        found = np.concatenate([to_float64(one.keys, rows.format)[:, 0] for one in each])
    return found if rows.scale is None else found * rows.scale


def _exact_product(a: Float64, b: Float64) -> tuple[Float64, Float64]:
    """Return a b, and its rounding error (Dekker 1971)."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _halves(x: Float64) -> tuple[Float64, Float64]:
    """Split numbers into halves whose products are exact (Veltkamp)."""
    c = x * 134217729.0  # 2**27 + 1
    high = c - (c - x)
    return high, x - high
