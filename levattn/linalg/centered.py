"""Rows less their mean, which is held in as many parts as it needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace, on_cuda, to_device, to_float64, to_numpy
from levattn._core.types import Float64
from levattn._kernels import KEYS, PRECISE, Rows
from levattn.linalg.reading import require_finite
from levattn.linalg.sums import scaled_columns


def centered(rows: Rows) -> Rows:
    """Return rows that have no shift yet, less the mean of all rows that take part.

    A row that takes part is the origin of the sums. It is no farther from the mean than the norm of the centered
    column. So the error of the mean is below n 2⁻¹⁰⁵ of that norm, however large the mean is.
    """
    shift, in_range = means(rows)
    if not in_range:
        largest = KEYS.column_figures(rows, largest=True)
        require_finite(rows, largest)
        rows = scaled_columns(rows, largest, 400)
        shift, _ = means(rows)
    return replace(rows, shift=shift)


def means(rows: Rows) -> tuple[Float64, bool]:
    """Return the parts of the means, (b, 3, d), and whether all numbers are in the range where they are exact."""
    b, n, d = rows.shape
    counts, first = np.full(b, max(n, 1)), np.zeros(b, np.int64)
    if rows.mask is not None and n:
        if on_cuda(rows.mask):  # numbers come to main memory, not the mask
            xp = array_namespace(rows.mask)
            flags = xp.astype(rows.mask, xp.uint8)
            counts, first = to_numpy(xp.sum(flags, axis=1, dtype=xp.int64)), to_numpy(xp.argmax(flags, axis=1))
        else:
            mask = to_numpy(rows.mask)
            counts, first = np.count_nonzero(mask, axis=1), np.argmax(mask, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        origin = np.where(counts[:, None] > 0, _rows_at(rows, first), 0.0) if n and b else np.zeros((b, d))
        divisors = np.maximum(counts, 1).astype(np.float64)
        sums = KEYS.sums_apart(rows, origin)
        return PRECISE.mean_parts(origin, sums, divisors)


def _rows_at(rows: Rows, places: npt.NDArray[np.int64]) -> Float64:
    """Return one row of each matrix, with its scale, (b, d)."""
    at = int(places[0])
    if np.all(places == at):
        found = to_float64(rows.keys[:, at : at + 1, :], rows.format)[:, 0]
    elif isinstance(rows.keys, np.ndarray) or on_cuda(rows.keys):
        which = (to_device(x, rows.keys) for x in (np.arange(len(places)), places))
        found = to_float64(rows.keys[tuple(which)], rows.format)
    else:  # the standard has no such index
        each = (rows.keys[i : i + 1, at : at + 1, :] for i, at in enumerate(places.tolist()))
        found = np.concatenate([to_float64(one, rows.format)[:, 0] for one in each])
    return found if rows.scale is None else found * rows.scale
