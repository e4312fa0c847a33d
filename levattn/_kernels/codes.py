"""Rows of few bits as numbers: each entry from its code, and the scales of its block and column."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._kernels.jit import jit


@jit
def open_rows(codes: Any, lows: Any, steps: Any, divisors: Any, means: Any, bits: int, out: Any) -> None:
    """Write rows (s, d) that have codes (s, w) of 8 bits, or two of 4 bits in a byte: the first w, then the others.

    `lows`, `steps`: (s, blocks) of equally many entries. `divisors`, `means`: (d,). All but the codes in float32.
    """
    d, w, blocks = np.uintp(out.shape[1]), np.uintp(codes.shape[1]), np.uintp(lows.shape[1])
    entries = (w if bits == 8 else np.uintp(2) * w) // blocks
    for block in range(blocks):  # unsigned numbers, so that no index may count from the end: then loops are vectors
        first, last = block * entries, (block + np.uintp(1)) * entries
        last = last if last < d else d
        middle = first if first > w else w
        middle = middle if middle < last and bits == 4 else last
        for i in range(np.uintp(out.shape[0])):
            low, step = lows[i, block], steps[i, block]
            if bits == 8:
                for c in range(first, last):
                    out[i, c] = means[c] + divisors[c] * (low + step * np.float32(codes[i, c]))
            else:
                for c in range(first, middle):
                    out[i, c] = means[c] + divisors[c] * (low + step * np.float32(codes[i, c] & np.uint8(15)))
                for c in range(middle, last):
                    out[i, c] = means[c] + divisors[c] * (low + step * np.float32(codes[i, c - w] >> np.uint8(4)))
