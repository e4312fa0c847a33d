"""Reading a block of keys into the precision of the sums: half formats, strides, mask, shift and scale."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from levattn._kernels._cpu_jit import helper
from levattn._kernels._cpu_simd import address, as_pointer, bits_to_float

__all__ = ["copy_numbers", "is_direct", "load_rows", "row_address"]

# A matrix batch is passed as integers, so that one compiled kernel serves every layout:
ADDRESS, ITEM_STEP, ROW_STEP, COLUMN_STEP, COLUMNS = range(5)  # steps in bytes


@helper
def _from_float16(bits):
    magnitude = np.uint32(bits & np.uint32(0x7FFF)) << np.uint32(13)
    value = bits_to_float(np.uint32(magnitude)) * np.float32(2.0**112)  # moves the exponent's bias, subnormals too
    if (bits & np.uint32(0x7C00)) == np.uint32(0x7C00):
        value = bits_to_float(np.uint32(magnitude | np.uint32(0x7F800000)))
    return -value if bits & np.uint32(0x8000) else value


def _value(x, brain):
    """Return a stored number as a float: 16-bit words are float16, or bfloat16 where `brain`."""
    raise NotImplementedError("compiled code only")


@overload(_value)
def _overload_value(x, brain):
    if isinstance(x, types.Integer):

        def read(x, brain):
            word = np.uint32(x)
            return bits_to_float(np.uint32(word << np.uint32(16))) if brain else _from_float16(word)

    else:

        def read(x, brain):
            return x

    return read


@helper
def copy_numbers(source, target):
    """Write all numbers of one array to another, both without gaps; ``target[:] = source`` compiles for longer."""
    read, write = as_pointer(address(source), source), as_pointer(address(target), target)
    for i in range(target.size):
        write[i] = read[i]


@helper
def is_direct(view, like, mask, shift, scale, weights, X, lanes):
    """Tell whether the tiles can read the keys where they lie, instead of from a scratch like X."""
    return (
        like.itemsize == X.itemsize
        and view[COLUMN_STEP] == X.itemsize
        and view[ROW_STEP] % X.itemsize == 0
        and view[COLUMNS] % lanes == 0
        and mask.size == 0
        and shift.size == 0
        and scale.size == 0
        and weights.size == 0
    )


@helper
def row_address(view, item, r):
    """Return the address of row `r` of one matrix."""
    return view[ADDRESS] + item * view[ITEM_STEP] + r * view[ROW_STEP]


@helper
def load_rows(view, like, brain, item, start, stop, mask, shift, scale, weights, X):
    """Write rows ``start:stop`` of one matrix to the top of X: ``(k - shift) * scale * weight``, 0 where masked.

    The columns of X past the keys' own are left as they are (zero).
    """
    d = view[COLUMNS]
    step = view[COLUMN_STEP]
    for r in range(start, stop):
        to = X[r - start]
        if mask.size and not mask[item, r]:
            for c in range(d):
                to[c] = 0
            continue
        address = row_address(view, item, r)
        if step == like.itemsize:
            row = as_pointer(address, like)
            for c in range(d):
                to[c] = _value(row[c], brain)
        else:
            for c in range(d):
                to[c] = _value(as_pointer(address + c * step, like)[0], brain)
        if shift.size:
            for c in range(d):
                to[c] -= shift[item, c]
        if scale.size:
            for c in range(d):
                to[c] *= scale[item, c]
        if weights.size:
            for c in range(d):
                to[c] *= weights[item, r]
