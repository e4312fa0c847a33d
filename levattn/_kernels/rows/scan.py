"""One pass over all entries: sums and maxima of columns, rows that are not finite, the rows themselves, and copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._kernels.jit import VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import (
    Vectors,
    across,
    address,
    as_pointer,
    fma,
    integer,
    prefetch,
    repeated,
    smaller,
    store,
    vector_code,
)
from levattn._kernels.rows.compiled import COLUMNS, MASK, copy_numbers, entry_address, load_rows
from levattn._kernels.scratch import empty, zeros

_SLAB = 128
_VECTORS = 2  # of columns whose sums are in registers
_COPIED = 4  # vectors that are copied at a time
_AHEAD = 2048  # bytes from which lines are asked for before they are copied
APART_WIDTH = _VECTORS * (VECTOR_BYTES // 8)


@helper
def _larger(a, b):
    """Return the larger number, or NaN if either is NaN (the built-in maximum may lose it)."""
    return b if b > a or np.isnan(b) else a


@helper
def _add(total, term):
    for c in range(total.shape[0]):  # `total += term` compiles for longer
        total[c] += term[c]


@jit
def column_tasks(view, n, block, largest, first, last, out):
    """Write the column sums (or largest magnitudes) of the matrices ``first:last`` to `out`.

    Sums are formed block by block, and combined like the bits of a binary counter.
    """
    d = out.shape[1]
    rows = zeros(0.0, (_SLAB, d))
    part = empty(0.0, (d,))
    stack = zeros(0.0, (64, d))
    for item in range(first, last):
        total = out[item]
        count = 0
        for low in range(0, n, block):
            part[:] = 0
            for start in range(low, smaller(low + block, n), _SLAB):
                stop = smaller(start + _SLAB, smaller(low + block, n))
                load_rows(view, item, start, stop, rows)
                for r in range(stop - start):
                    for c in range(d):
                        if largest:
                            part[c] = _larger(part[c], abs(rows[r, c]))
                        else:
                            part[c] += rows[r, c]
            if largest:
                for c in range(d):
                    total[c] = _larger(total[c], part[c])
                continue
            level = 0
            while count >> level & 1:
                _add(part, stack[level])
                level += 1
            copy_numbers(part, stack[level])
            count += 1
        for level in range(64):
            if count >> level & 1:
                _add(total, stack[level])


@vector_code()
def _add_apart(v, like, places, step, n):  # noqa: ARG001 (the interface of vector code)
    """Add `n` rows, `step` bytes apart, less an origin to twofold sums: `APART_WIDTH` columns of each.

    places: the addresses of the first row, the origin, the sums and their errors.
    """
    b, (first, origin, high, low) = v.b, places

    def exact(x: Any, y: Any) -> tuple[Any, Any]:
        total = b.fadd(x, y)
        part = b.fsub(total, x)
        return total, b.fadd(b.fsub(x, b.fsub(total, part)), b.fsub(y, part))

    apart = [b.fneg(x) for x in v.loaded(origin, _VECTORS)]

    def add(row: Any, *twofold: Any) -> list[Any]:
        totals, lost = [], []
        for k, less, total, rest in zip(
            v.loaded(row, _VECTORS), apart, twofold[:_VECTORS], twofold[_VECTORS:], strict=True
        ):
            x, difference_lost = exact(k, less)
            total, sum_lost = exact(total, x)
            totals.append(total)
            lost.append(b.fadd(rest, b.fadd(sum_lost, difference_lost)))
        return [b.add(row, step), *totals, *lost]

    targets = [*v.row(high, _VECTORS), *v.row(low, _VECTORS)]
    held = [*v.loaded(high, _VECTORS), *v.loaded(low, _VECTORS)]
    for place, value in zip(targets, repeated(b, n, (first, *held), add)[1:], strict=True):
        store(b, value, place, v.size)


@jit
def apart_tasks(view, origin, n, block, first, last, high, low):
    """Write sums of columns less an origin, (b, d), as pairs of numbers, for some blocks of rows, (b, blocks, d).

    The number of columns is rounded up to a multiple of `APART_WIDTH`.
    """
    d, blocks = origin.shape[1], high.shape[1]
    rows = zeros(0.0, (_SLAB, d))
    for t in range(first, last):
        item, at = t // blocks, t % blocks * block
        apart, total, rest = origin[item], high[item, t % blocks], low[item, t % blocks]
        for start in range(at, smaller(at + block, n), _SLAB):
            stop = smaller(start + _SLAB, smaller(at + block, n))
            load_rows(view, item, start, stop, rows)
            if view[MASK]:
                for r in range(stop - start):
                    if not as_pointer(entry_address(view, MASK, item, start + r), np.uint8(0))[0]:
                        copy_numbers(apart, rows[r])
            for c in range(0, d, APART_WIDTH):
                places = address(rows) + 8 * c, address(apart) + 8 * c, address(total) + 8 * c, address(rest) + 8 * c
                _add_apart(rows, places, 8 * d, stop - start)


@jit
def read_rows(view, item, n, out):
    """Write the rows of one matrix to `out`, with the changes on reading."""
    load_rows(view, item, 0, n, out)


@jit
def nonfinite_scan(view, n, item, found):
    """Write the first rows that hold NaN or infinity to `found` and return how many were found."""
    d = view[COLUMNS]
    row = zeros(0.0, (1, d))
    count = 0
    for r in range(n):
        load_rows(view, item, r, r + 1, row)
        for c in range(d):
            if not np.isfinite(row[0, c]):
                found[count] = r
                count += 1
                break
        if count == found.size:
            break
    return count


@vector_code(returns="flag")
def _copied(v, like, source, target, n):
    """Copy `n` numbers from one address to another, and tell whether all are finite."""
    b, one = v.b, Vectors(v.b, like, 1)
    run, size = _COPIED * v.count, integer(v.size)

    def copy(source: Any, target: Any, *totals: Any) -> list[Any]:
        for j in range(_COPIED):
            prefetch(b, b.add(source, integer(_AHEAD + j * v.count * v.size)))
        found = v.loaded(source, _COPIED)
        for place, value in zip(v.row(target, _COPIED), found, strict=True):
            store(b, value, place, v.size)
        totals = tuple(fma(b, x, v.constant(0.0), total) for x, total in zip(found, totals, strict=True))
        return [b.add(source, integer(run * v.size)), b.add(target, integer(run * v.size)), *totals]

    def copy_one(source: Any, target: Any, total: Any) -> list[Any]:
        value = one.load(source)
        one.store(value, target)
        return [b.add(source, size), b.add(target, size), b.fadd(total, b.fmul(value, one.constant(0.0)))]

    source, target, *totals = repeated(
        b, b.sdiv(n, integer(run)), [source, target, *[v.constant(0.0)] * _COPIED], copy
    )
    while len(totals) > 1:
        totals = [b.fadd(*pair) for pair in zip(totals[::2], totals[1::2], strict=True)]
    rest = repeated(b, b.srem(n, integer(run)), [source, target, one.constant(0.0)], copy_one)[2]
    total = b.fadd(across(b, totals[0], "sum"), across(b, rest, "sum"))  # NaN after any number that is not finite
    return b.fcmp_ordered("==", total, total)


@jit
def copy_items(like, source, source_step, target, target_step, items, n, numbers, first):
    """Copy `n` numbers for each of the items, which are so many bytes apart, and tell whether all are finite.

    `numbers` become ``first, first + 1, ...``.
    """
    finite = True
    for i in range(numbers.size):
        numbers[i] = first + i
    for _ in range(items):
        finite &= _copied(like, source, target, n)
        source, target = source + source_step, target + target_step
    return finite
