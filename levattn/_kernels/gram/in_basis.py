"""Second moments of keys in another basis, K B, and norms of K B C, for upper-triangular B and C."""

from __future__ import annotations

import math

from levattn._kernels.gram.moments import add_rows, carry, fold, moment_panels
from levattn._kernels.gram.simd import product_tile
from levattn._kernels.gram.squares import SCRATCH_ROWS, SLAB, pack_panels, row_squares, write_sums
from levattn._kernels.jit import SCORE_ROWS, SCORE_VECTORS, VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import address, larger, smaller
from levattn._kernels.rows.compiled import COLUMNS, SHIFT, load_rests, load_rows
from levattn._kernels.scratch import empty, filled, zeros


@helper
def _multiply_rows(rows, n, panels, in_basis):
    """Write the first `n` rows, rounded up to whole groups, times the panels to `in_basis`."""
    size = rows.itemsize
    lanes = VECTOR_BYTES // size
    count, d, width = panels.shape
    groups = (n + SCORE_ROWS - 1) // SCORE_ROWS * SCORE_ROWS
    for t in range(count):
        w = address(panels[t])
        whole = t * width + lanes
        rest = smaller(lanes, d - whole)
        for r in range(0, groups, SCORE_ROWS):
            at = address(rows) + r * d * size
            to = address(in_basis) + (r * in_basis.shape[1] + t * width) * size
            product_tile(
                rows, SCORE_ROWS, SCORE_VECTORS, at, d, w, width, whole, rest, to, in_basis.shape[1], 0, at, 0
            )


@helper
def _largest(values):
    """Return the largest magnitude."""
    largest = 0.0
    for i in range(len(values)):
        largest = larger(largest, abs(values[i]))
    return largest


@helper
def _high_bits(values, high, bits):
    """Write float64 numbers, rounded to the `bits` leading bits of the largest one, to `high`."""
    largest = _largest(values)
    magic = 0.0
    if largest > 0:
        magic = math.ldexp(1.5, math.frexp(largest)[1] + 53 - bits)  # adding it rounds at a fixed place
    for i in range(len(values)):
        high[i] = (values[i] + magic) - magic


@helper
def _split_basis(B, X):
    """Split a basis for `_multiply_split`: powers of two for rows, and panels of B, of its high bits, and of the rest.

    Powers of two scale the rows of B to similar size and the keys' columns inversely, so nothing is rounded.
    """
    d = B.shape[0]
    scale = filled(0.0, X.shape[1], 1.0)
    even, high = zeros(0.0, (d, d)), zeros(0.0, (d, d))
    for i in range(d):
        exponent = math.frexp(_largest(B[i]))[1]
        scale[i] = math.ldexp(1.0, exponent)
        for j in range(i, d):
            even[i, j] = math.ldexp(B[i, j], -exponent)
    bits = _split_bits(d)
    for j in range(d):
        _high_bits(even[:, j], high[:, j], bits)
    whole, highs = pack_panels(even, X), pack_panels(high, X)
    for i in range(d):
        for j in range(d):
            even[i, j] -= high[i, j]
    return scale, whole, highs, pack_panels(even, X)


@helper
def _split_bits(d):
    """Return the bits that each factor may have so that float64 holds a sum of `d` products without rounding."""
    bits = 53
    while d > 0:
        d //= 2
        bits -= 1
    return bits // 2


@helper
def _multiply_split(view, item, start, rows, n, scale, panels, highs, lows, high, product, in_basis):
    """Write the first `n` rows (which change) times a basis split by `_split_basis` to `in_basis`.

    They are rows from `start` on of a matrix. The rounding errors of a shift are added.

    Products of the leading bits of keys and basis, and their sums, have no rounding (Ozaki, Ogita, Oishi and Rump
    2012). The rest is smaller by the number of these bits, so each entry is rounded about once, whatever cancels.
    """
    d = rows.shape[1]
    bits = _split_bits(d)
    for r in range(n):
        for c in range(d):
            rows[r, c] *= scale[c]
        _high_bits(rows[r], high[r], bits)
        for c in range(d):
            rows[r, c] -= high[r, c]
    if view[SHIFT]:
        load_rests(view, item, start, start + n, product)
        for r in range(n):
            for c in range(view[COLUMNS]):
                rows[r, c] += product[r, c] * scale[c]
    _multiply_rows(rows, n, panels, in_basis)
    _multiply_rows(high, n, lows, product)
    for r in range(n):
        for c in range(in_basis.shape[1]):
            in_basis[r, c] += product[r, c]
    _multiply_rows(high, n, highs, product)
    for r in range(n):
        for c in range(in_basis.shape[1]):
            in_basis[r, c] += product[r, c]


@jit
def moment_in_basis_tasks(view, basis, exact, X, block, levels, tasks, first, last, out):
    """Do `moment_tasks` after multiplying each row by its slot's basis (split into bits if `exact`)."""
    d = X.shape[1]
    width = SCORE_VECTORS * (VECTOR_BYTES // X.itemsize)
    rows = zeros(X, (SCRATCH_ROWS, d))
    in_basis = zeros(X, (SCRATCH_ROWS, (d + width - 1) // width * width))
    high, product = zeros(rows, rows.shape), zeros(in_basis, in_basis.shape)
    even = filled(0.0, d, 1.0)
    panels = highs = lows = zeros(X, (1, 1, 1))
    packed = moment_panels(X)
    partial = empty(X, (d, d))
    stack = empty(0.0, (levels, d, d))
    slot = -1
    for t in range(first, last):
        item, start, stop = tasks[t, 1], tasks[t, 2], tasks[t, 3]
        if tasks[t, 0] != slot:
            slot = tasks[t, 0]
            if exact:
                even, panels, highs, lows = _split_basis(basis[slot], X)
            else:
                panels = pack_panels(basis[slot], X)
        count = 0
        for at in range(start, stop, block):
            partial[:] = 0
            for r in range(at, smaller(at + block, stop), SLAB):
                n = smaller(SLAB, smaller(at + block, stop) - r)
                load_rows(view, item, r, r + n, rows)
                if exact:
                    _multiply_split(view, item, r, rows, n, even, panels, highs, lows, high, product, in_basis)
                else:
                    _multiply_rows(rows, n, panels, in_basis)
                x = address(in_basis)
                add_rows(X, x, in_basis.shape[1], n, packed, partial, x, x)
            carry(stack, count, partial)
            count += 1
        fold(stack, count, out, t)


@jit
def sqnorm_in_basis_tasks(view, basis, W, X, tasks, first, last, ceiling, out):
    """Do `sqnorm_tasks` after multiplying each row by its slot's basis (split into bits)."""
    lanes = VECTOR_BYTES // X.itemsize
    d = X.shape[1]
    width = SCORE_VECTORS * lanes
    rows = zeros(X, (SCRATCH_ROWS, d))
    in_basis = zeros(X, (SCRATCH_ROWS, (d + width - 1) // width * width))
    high, product = zeros(rows, rows.shape), zeros(in_basis, in_basis.shape)
    squares = empty(X, (SCRATCH_ROWS, lanes))
    even = filled(0.0, d, 1.0)
    panels = highs = lows = whitening = zeros(X, (1, 1, 1))
    slot = -1
    for t in range(first, last):
        item, start, stop = tasks[t, 1], tasks[t, 2], tasks[t, 3]
        if tasks[t, 0] != slot:
            slot = tasks[t, 0]
            even, panels, highs, lows = _split_basis(basis[slot], X)
            whitening = pack_panels(W[slot], X)
        for r in range(start, stop, SLAB):
            n = smaller(SLAB, stop - r)
            load_rows(view, item, r, r + n, rows)
            _multiply_split(view, item, r, rows, n, even, panels, highs, lows, high, product, in_basis)
            x = address(in_basis)
            row_squares(X, x, in_basis.shape[1], SCRATCH_ROWS, whitening, squares, x, x)
            write_sums(X, squares, n, ceiling, out, item, r)
