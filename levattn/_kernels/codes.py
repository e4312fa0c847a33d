"""Rows of few bits as numbers: each entry from its code, and the scales of its block and column."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from levattn._kernels.jit import helper, jit
from levattn._kernels.llvm import address, fma, integer, load, pointer, rolled, smaller, splat, store, vector_code

_BYTE, _LOW, _HIGH = range(3)  # where a code lies in its byte


@vector_code(numbers="low step", literals="half scaled")
def _open_span(v, like, half, scaled, source, n, low, step, divisors, means, to):
    """Write ``m + b (low + step z)`` for n codes z, each a byte or a `half` of it; without m and b if not `scaled`."""
    b, whole = v.b, v.b.and_(n, integer(-v.count))
    codes = pointer(b, source, ir.IntType(8))
    for lanes, first, last in ((v.count, integer(0), whole), (1, whole, n)):

        def alike(kind, lanes=lanes):
            return ir.VectorType(kind, lanes) if lanes > 1 else kind

        def constant(value, lanes=lanes):
            kind = ir.IntType(8)
            return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes) if lanes > 1 else ir.Constant(kind, value)

        with rolled(b, first, last, lanes) as i:

            def read(base, i=i, alike=alike):
                return load(b, b.gep(v.pointer(base), [i]), alike(v.scalar), v.size)

            code = load(b, b.gep(codes, [i]), alike(ir.IntType(8)), 1)
            if half == _LOW:
                code = b.and_(code, constant(15))
            elif half == _HIGH:
                code = b.lshr(code, constant(4))
            z = b.sitofp(b.zext(code, alike(ir.IntType(32))), alike(v.scalar))
            at, each = (splat(b, x, lanes) if lanes > 1 else x for x in (low, step))
            value = fma(b, each, z, at)
            if scaled:
                value = fma(b, read(divisors), value, read(means))
            store(b, value, b.gep(v.pointer(to), [i]), v.size)


@vector_code(returns="number")
def _word(v, like, at):
    """Return the bfloat16 number at an address."""
    b = v.b
    word = b.zext(load(b, pointer(b, at, ir.IntType(16)), ir.IntType(16), 2), ir.IntType(32))
    return b.bitcast(b.shl(word, ir.Constant(ir.IntType(32), 16)), ir.FloatType())


@helper
def open_row(like, bits, codes, width, lows, steps, blocks, d, divisors, means, to):
    """Write d numbers of codes of 8 bits, or two of 4 bits in a byte, where the first `width` have the low halves.

    `lows`, `steps`: of `blocks` equally long blocks, bfloat16. `divisors`, `means`: of columns, or 0. All but bits,
    width, blocks and d are addresses.
    """
    entries = width * (8 // bits) // blocks
    for block in range(blocks):
        first, last = block * entries, smaller(block * entries + entries, d)
        low, step = _word(like, lows + 2 * block), _word(like, steps + 2 * block)
        while first < last:
            end, base, size = last, codes + first, 4 * first
            if bits == 8:
                half = 0
            elif first < width:
                half, end = 1, smaller(width, last)
            else:
                half, base = 2, codes + first - width
            n = end - first
            if divisors == 0:
                if half == 0:
                    _open_span(like, 0, 0, base, n, low, step, 0, 0, to + size)
                elif half == 1:
                    _open_span(like, 1, 0, base, n, low, step, 0, 0, to + size)
                else:
                    _open_span(like, 2, 0, base, n, low, step, 0, 0, to + size)
            elif half == 0:
                _open_span(like, 0, 1, base, n, low, step, divisors + size, means + size, to + size)
            elif half == 1:
                _open_span(like, 1, 1, base, n, low, step, divisors + size, means + size, to + size)
            else:
                _open_span(like, 2, 1, base, n, low, step, divisors + size, means + size, to + size)
            first = end


@jit
def open_rows(codes: Any, lows: Any, steps: Any, divisors: Any, means: Any, bits: int, out: Any) -> None:
    """Write rows (b, s, d), in float32, of codes (b, s, w); see `open_row`. All are C arrays.

    `lows`, `steps`: (b, s, blocks), bfloat16 as words. `divisors`, `means`: (b, d) in float32, or without columns.
    """
    (items, s, d), w, blocks = out.shape, codes.shape[2], lows.shape[2]
    for item in range(items):
        columns = address(divisors) + item * 4 * d, address(means) + item * 4 * d
        if not divisors.shape[1]:
            columns = 0, 0
        for i in range(s):
            row = item * s + i
            scales = address(lows) + 2 * blocks * row, address(steps) + 2 * blocks * row
            place = address(codes) + w * row
            open_row(out, bits, place, w, *scales, blocks, d, *columns, address(out) + 4 * d * row)
