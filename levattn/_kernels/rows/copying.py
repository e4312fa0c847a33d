"""Copies of rows that tell in the same pass whether all numbers are finite."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from levattn._kernels.jit import jit
from levattn._kernels.llvm import across, fma, integer, load, prefetch, repeated, store, vector_code

_VECTORS = 4  # that are copied at a time
_AHEAD = 2048  # bytes from which lines are asked for before they are copied
_LIKE = {np.dtype(kind): np.zeros(1, kind) for kind in (np.float32, np.float64)}


@vector_code(returns="flag")
def _copied(v, like, source, target, n):  # noqa: ARG001 (the interface of vector code)
    """Copy `n` numbers from one address to another, and tell whether all are finite."""
    b, zero = v.b, v.constant(0.0)
    run, size = _VECTORS * v.count, integer(v.size)

    def copy(source: Any, target: Any, *totals: Any) -> list[Any]:
        for j in range(_VECTORS):
            prefetch(b, b.add(source, integer(_AHEAD + j * v.count * v.size)))
        found = v.loaded(source, _VECTORS)
        for place, value in zip(v.row(target, _VECTORS), found, strict=True):
            store(b, value, place, v.size)
        step = integer(run * v.size)
        totals = tuple(fma(b, x, zero, total) for x, total in zip(found, totals, strict=True))
        return [b.add(source, step), b.add(target, step), *totals]

    def copy_one(source: Any, target: Any, total: Any) -> list[Any]:
        value = load(b, v.pointer(source), v.scalar, v.size)
        store(b, value, v.pointer(target), v.size)
        return [b.add(source, size), b.add(target, size), fma(b, value, ir.Constant(v.scalar, 0.0), total)]

    source, target, *sums = repeated(b, b.sdiv(n, integer(run)), [source, target, *[zero] * _VECTORS], copy)
    while len(sums) > 1:
        sums = [b.fadd(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
    total = across(b, sums[0], "sum")  # NaN after any number that is not finite
    total = repeated(b, b.srem(n, integer(run)), [source, target, total], copy_one)[2]
    return b.fcmp_ordered("==", total, ir.Constant(v.scalar, 0.0))


@jit
def copy_items(like, source, source_step, target, target_step, items, n):
    """Copy `n` numbers for each of the items, which are so many bytes apart, and tell whether all are finite."""
    finite = True
    for _ in range(items):
        finite &= _copied(like, source, target, n)
        source, target = source + source_step, target + target_step
    return finite


def copied_finite(source: Any, target: Any) -> bool:
    """Copy rows (b, m, d), of the same float32 or float64 and without gaps in a matrix.

    Return True if all numbers are finite; after False some may be, or nothing was copied.
    """
    like = _LIKE.get(target.dtype)
    (step, row, column), (target_step, target_row, target_column) = source.strides, target.strides
    b, m, d = target.shape
    size = target.itemsize
    if like is None or source.dtype != target.dtype or not source.flags.aligned:
        return False
    if not (row == target_row == d * size and column == target_column == size):
        return False
    return bool(copy_items(like, source.ctypes.data, step, target.ctypes.data, target_step, b, m * d))
