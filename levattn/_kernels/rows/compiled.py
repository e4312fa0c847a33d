"""Reading a block of keys into the precision of the sums: half formats, strides, mask, scale and shift.

One vector of integers describes the keys to compiled code, so that one kernel serves every format and layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils

from levattn._kernels.jit import VECTOR_BYTES, helper
from levattn._kernels.llvm import (
    I64,
    address,
    as_pointer,
    combine,
    halves,
    integer,
    load,
    pointer,
    primitive,
    repeated,
    rolled,
    store,
)
from levattn._kernels.records import address_of

if TYPE_CHECKING:
    from levattn._kernels.rows import Rows

# The places in the vector; steps are in bytes, and an address of 0 says that there is no such array
ADDRESS, _, ROW_STEP, COLUMN_STEP, COLUMNS, FORMAT = range(6)
IN_PLACE = 6  # whether the tiles can read the keys where they lie, instead of from a scratch
MASK, SHIFT, SCALE, WEIGHTS = range(7, 19, 3)  # the address of each, and the steps of its first two axes
DIGEST = 19  # the address of what to digest of the rows, see `digest`

TOGETHER = 4  # lines that are digested at a time, which share the loads of their keys

FORMATS = ("float64", "float32", "float16", "bfloat16")
_ZEROS = len(FORMATS)  # the format as which a masked row is read

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_APART = 4  # numbers that are read at a time where they are not contiguous
_STORED = (ir.DoubleType(), ir.FloatType(), _I16, _I16)


def view_of(rows: Rows, kind: npt.DTypeLike | None = None) -> Any:
    """Return the vector that describes keys to compiled code; their arrays must live as long as the vector.

    kind: the precision in which tiles read the keys, if there are tiles.
    """
    keys, format = rows.keys, rows.format
    stored = "uint16" if format.endswith("float16") else format
    operands = [x if x is not None and x.size else None for x in (rows.mask, rows.shift, rows.scale, rows.weights)]
    plain = all(x is None for x in operands)
    if not plain or (keys.dtype != stored and keys.size):
        _check_kinds(format, (keys, stored), *zip(operands, ("bool", *["float64"] * 3), strict=True))
    size, (item_step, row_step, column_step), d = keys.itemsize, keys.strides, keys.shape[2]
    direct = (
        plain
        and kind is not None
        and keys.dtype == kind
        and column_step == size
        and row_step % size == 0
        and d * size % VECTOR_BYTES == 0
    )
    view = [address_of(keys), item_step, row_step, column_step, d, FORMATS.index(format), direct]
    for array in operands:
        view += [0, 0, 0] if array is None else [address_of(array), *array.strides[:2]]
    return np.array([*view, 0], np.int64)


def _check_kinds(format: str, *arrays: tuple[Any, str]) -> None:
    """Raise for arrays that compiled code would misread, because it checks no types itself."""
    for x, expected in arrays:
        if x is not None and x.size and x.dtype != expected:
            raise TypeError(f"an array of {format} rows has dtype {x.dtype}; expected {expected}")
    for x, _ in arrays[2:4]:
        if x is not None and x.strides[-1] != x.itemsize and x.shape[-1] > 1:
            raise ValueError("shift or scale has gaps between its columns; expected C arrays")


def _widened(b: Any, stored: Any, format: int, kind: Any) -> Any:
    """Return a stored number as one of `kind`, float or double; or vectors of them."""

    def alike(scalar: Any) -> Any:
        return ir.VectorType(scalar, stored.type.count) if isinstance(stored.type, ir.VectorType) else scalar

    def number(value: float, scalar: Any = _I32) -> Any:
        kind = alike(scalar)
        return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)

    single = ir.FloatType()
    if FORMATS[format] == "bfloat16":
        stored = b.bitcast(b.shl(b.zext(stored, alike(_I32)), number(16)), alike(single))
    elif FORMATS[format] == "float16":
        word = b.zext(stored, alike(_I32))
        magnitude = b.shl(b.and_(word, number(0x7FFF)), number(13))
        # a product moves the bias of the exponent, of subnormal numbers too, but not of infinity and NaN
        product = b.fmul(b.bitcast(magnitude, alike(single)), number(2.0**112, single))
        special = b.icmp_unsigned(">=", magnitude, number(0x7C00 << 13))
        bits = b.select(special, b.or_(magnitude, number(0x7F800000)), b.bitcast(product, alike(_I32)))
        sign = b.shl(b.and_(word, number(0x8000)), number(16))
        stored = b.bitcast(b.or_(bits, sign), alike(single))
    if stored.type == alike(kind):
        return stored
    return b.fpext(stored, alike(kind)) if isinstance(kind, ir.DoubleType) else b.fptrunc(stored, alike(kind))


@primitive
def read_row(typing, like, format, source, step, n, target):
    """Write `n` stored numbers, the first at `source` and `step` bytes apart, to `target`, numbers like `like`."""
    signature = types.void(like, *([types.int64] * 5))

    def codegen(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        format, source, step, n, target = arguments[1:]
        kind, size_of = context.get_data_type(like.dtype), like.dtype.bitwidth // 8
        count = VECTOR_BYTES // size_of
        to = pointer(b, target, kind)
        whole = b.and_(n, integer(-count))
        after = b.append_basic_block("after")
        zeros = b.append_basic_block("zeros")
        choice = b.switch(format, zeros)
        b.position_at_end(zeros)
        cgutils.memset(b, to, b.mul(n, integer(size_of)), 0)
        b.branch(after)
        for number, stored in enumerate(_STORED):
            size = context.get_abi_sizeof(stored)

            def copy(i: Any, number: int = number, stored: Any = stored) -> None:
                value = b.load(pointer(b, b.add(source, b.mul(i, step)), stored))
                b.store(_widened(b, value, number, kind), b.gep(to, [i]))

            b.position_at_end(begin := b.append_basic_block(FORMATS[number]))
            choice.add_case(integer(number), begin)
            with b.if_else(b.icmp_signed("==", step, integer(size))) as (side_by_side, apart):
                with side_by_side, rolled(b, integer(0), whole, count) as i:
                    place = b.gep(pointer(b, source, stored), [i])
                    value = load(b, place, ir.VectorType(stored, count), size)
                    store(b, _widened(b, value, number, kind), b.gep(to, [i]), size_of)
                with apart, rolled(b, integer(0), whole, _APART) as i:
                    for k in range(_APART):
                        copy(b.add(i, integer(k)))
            with rolled(b, whole, n) as i:
                copy(i)
            b.branch(after)
        b.position_at_end(after)
        return context.get_dummy_value()

    return signature, codegen


@helper
def copy_numbers(source, target):
    """Write all numbers of one array to another, both without gaps; ``target[:] = source`` compiles for longer."""
    read, write = as_pointer(address(source), source), as_pointer(address(target), target)
    for i in range(target.size):
        write[i] = read[i]


@primitive
def entry_address(typing, view, array, item, i):
    """Return the address of a row of the keys, a part of a shift, or one number of the mask, scale or weights."""
    signature = types.int64(view, array, types.int64, types.int64)
    first = int(array.literal_value)

    def codegen(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        block = context.make_array(view)(context, b, arguments[0]).data
        start, *steps = (b.load(b.gep(block, [integer(first + k)])) for k in range(3))
        for step, index in zip(steps, arguments[2:], strict=True):
            start = b.add(start, b.mul(step, index))
        return start

    return signature, codegen


@helper
def load_rows(view, item, start, stop, X):
    """Write rows ``start:stop`` of one matrix to the top of X: ``(k * scale - shift) * weight``, 0 where masked.

    Columns of X past the keys' own stay as they are (zero).
    """
    d = view[COLUMNS]
    for r in range(start, stop):
        at = address(X) + (r - start) * X.strides[0]
        format = view[FORMAT]
        if view[MASK] and not as_pointer(entry_address(view, MASK, item, r), np.uint8(0))[0]:
            format = _ZEROS
        read_row(X, format, entry_address(view, ADDRESS, item, r), view[COLUMN_STEP], d, at)
        if format == _ZEROS:
            continue
        if view[SCALE]:
            combine(X, at, entry_address(view, SCALE, item, 0), d, at, 1)
        if view[SHIFT]:
            combine(X, at, entry_address(view, SHIFT, item, 0), d, at, 0)
        if view[WEIGHTS]:
            combine(X, at, entry_address(view, WEIGHTS, item, r), d, at, 2)


@helper
def load_rests(view, item, start, stop, X):
    """Write the rounding errors of `load_rows` for shifted rows in float64 to the top of X, 0 where masked."""
    d = view[COLUMNS]
    for r in range(start, stop):
        row = X[r - start]
        format = view[FORMAT]
        if view[MASK] and not as_pointer(entry_address(view, MASK, item, r), np.uint8(0))[0]:
            format = _ZEROS
        read_row(X, format, entry_address(view, ADDRESS, item, r), view[COLUMN_STEP], d, address(row))
        if format == _ZEROS:
            continue
        if view[SCALE]:
            combine(X, address(row), entry_address(view, SCALE, item, 0), d, address(row), 1)
        shift = as_pointer(entry_address(view, SHIFT, item, 0), 0.0)
        for c in range(d):
            k = row[c]
            x = k - shift[c]
            part = x - k
            lost = (k - (x - part)) - (shift[c] + part)
            y = x - shift[d + c]
            part = y - x
            row[c] = (lost + ((x - (y - part)) - (shift[d + c] + part))) - shift[2 * d + c]
        if view[WEIGHTS]:
            combine(X, address(row), entry_address(view, WEIGHTS, item, r), d, address(row), 2)


@primitive
def products_together(typing, at, apart, keys, vectors, to):
    """Write the sums of products of as many lines as go together, of so many whole vectors, `apart` bytes apart.

    A product is of the halves of a word, each half plus its key. Lines share the loads of keys.
    """
    words = VECTOR_BYTES // 8
    halved, whole = ir.VectorType(_I32, 2 * words), ir.VectorType(I64, words)

    def constant(word: int) -> Any:
        return ir.Constant(whole, [word] * words)

    def codegen(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        at, apart, keys, vectors, to = arguments
        offsets = [b.mul(apart, integer(i)) for i in range(TOGETHER)]

        def add(place: Any, key_at: Any, *sums: Any) -> list[Any]:
            key, new = load(b, pointer(b, key_at, I64), halved, 8), []
            for offset, total in zip(offsets, sums, strict=True):
                half = b.add(load(b, pointer(b, b.add(place, offset), I64), halved, 1), key)
                word = b.bitcast(half, whole)
                new.append(b.add(total, b.mul(b.and_(word, constant(0xFFFFFFFF)), b.lshr(word, constant(32)))))
            return [b.add(place, integer(VECTOR_BYTES)), b.add(key_at, integer(VECTOR_BYTES)), *new]

        _, _, *sums = repeated(b, vectors, (at, keys, *[constant(0)] * TOGETHER), add)
        target = pointer(b, to, I64)
        for i, total in enumerate(sums):
            while total.type.count > 1:
                total = b.add(*halves(b, total))
            b.store(b.extract_element(total, ir.Constant(_I32, 0)), b.gep(target, [integer(i)]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen
