"""Rows of few bits as numbers: each entry from its code, and the scales of its block and column."""

from __future__ import annotations

from typing import Any

from levattn._kernels.jit import helper, jit
from levattn._kernels.llvm import address, smaller
from levattn._kernels.pruned.simd import bfloat16_at, open_span


@helper
def open_row(like, bits, codes, width, lows, steps, blocks, d, divisors, means, to):
    """Write d numbers of codes of 8 bits, or two of 4 bits in a byte, where the first `width` have the low halves.

    `lows`, `steps`: of `blocks` equally long blocks, bfloat16. `divisors`, `means`: of columns, or 0. All but bits,
    width, blocks and d are addresses.
    """
    entries = width * (8 // bits) // blocks
    for block in range(blocks):
        first, last = block * entries, smaller(block * entries + entries, d)
        low, step = bfloat16_at(like, lows + 2 * block), bfloat16_at(like, steps + 2 * block)
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
                    open_span(like, 0, 0, base, n, low, step, 0, 0, to + size)
                elif half == 1:
                    open_span(like, 1, 0, base, n, low, step, 0, 0, to + size)
                else:
                    open_span(like, 2, 0, base, n, low, step, 0, 0, to + size)
            elif half == 0:
                open_span(like, 0, 1, base, n, low, step, divisors + size, means + size, to + size)
            elif half == 1:
                open_span(like, 1, 1, base, n, low, step, divisors + size, means + size, to + size)
            else:
                open_span(like, 2, 1, base, n, low, step, divisors + size, means + size, to + size)
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
