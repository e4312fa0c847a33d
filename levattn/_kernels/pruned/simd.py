"""Vector code of pruned attention: a tile of products, and what is done to a row of logits or distances.

Addresses and steps are in bytes. ``like`` is any array of the dtype to compute in.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from levattn._kernels.latent.simd import _across, _constant, _each, _exp, _factors
from levattn._kernels.llvm import (
    _I64,
    _fma,
    _int,
    _literals,
    _load,
    _pointer,
    _splat,
    _store,
    _vector_type,
    primitive,
)

__all__ = ["apart", "exponentials", "matrix_tile", "nearest", "raised"]

Builder = Any
Value = Any


@primitive
def matrix_tile(typing, like, rows, vectors, adds, x, x_step, panel, n, to, to_step):
    """Write ``Σ_k x[i, k] * panel[k]`` to ``to[i]`` for so many `rows`, or if `adds` add it to what is there.

    The n rows of a panel are so many `vectors` long and lie one behind the other.
    """
    signature = types.void(like, rows, vectors, adds, *([types.int64] * 6))
    tall, wide, add = _literals(rows, vectors, adds)
    size, scalar, vector = _vector_type(like)
    count = vector.count
    cells = [(i, j) for i in range(tall) for j in range(wide)]

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        x, x_step, panel, n, to, to_step = arguments[4:]
        targets = [
            _pointer(b, b.add(to, b.add(b.mul(to_step, _int(i)), _int(size * count * j))), scalar) for i, j in cells
        ]
        first = [_load(b, place, vector, size) if add else _constant(vector, 0.0) for place in targets]
        # rows are reached as base + {0, 1, 2, 3} * step, which the address modes hold without a register each
        offsets = [None, x_step, b.mul(x_step, _int(2)), b.mul(x_step, _int(3))]
        x_step4 = b.mul(x_step, _int(4))
        before = b.block
        loop, after = b.append_basic_block("terms"), b.append_basic_block("store")
        b.cbranch(b.icmp_signed(">", n, _int(0)), loop, after)
        b.position_at_end(loop)
        left, at_x, at_panel = (b.phi(_I64) for _ in range(3))
        held = [b.phi(vector) for _ in cells]
        row = _pointer(b, at_panel, scalar)
        values = [_load(b, b.gep(row, [_int(count * j)]), vector, size) for j in range(wide)]
        sums, base = [], at_x
        for i in range(tall):
            if i and i % 4 == 0:
                base = b.add(base, x_step4)
            offset = offsets[i % 4]
            (factor,) = _factors(b, base if offset is None else b.add(base, offset), 1, scalar, size, count)
            sums += [_fma(b, factor, values[j], held[i * wide + j]) for j in range(wide)]
        following = [b.sub(left, _int(1)), b.add(at_x, _int(size)), b.add(at_panel, _int(size * count * wide))]
        for phi, start, moved in zip(
            (left, at_x, at_panel, *held), (n, x, panel, *first), (*following, *sums), strict=True
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(moved, loop)
        b.cbranch(b.icmp_signed(">", following[0], _int(0)), loop, after)
        b.position_at_end(after)
        results = [b.phi(vector) for _ in cells]
        for result, start, moved in zip(results, first, sums, strict=True):
            result.add_incoming(start, before)
            result.add_incoming(moved, loop)
        for place, result in zip(targets, results, strict=True):
            _store(b, result, place, size)
        return context.get_dummy_value()

    return signature, codegen


@primitive
def raised(typing, like, x, bias, vectors):
    """Add a row to another, x, and return the largest number of that."""
    size, scalar, vector = _vector_type(like)
    signature = like.dtype(like, *([types.int64] * 3))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        x, bias, vectors = arguments[1:]
        top = cgutils.alloca_once_value(b, _constant(vector, -math.inf))
        with _each(b, vectors, size, vector) as (at, _):
            place, more = (_pointer(b, b.add(start, at), scalar) for start in (x, bias))
            value, held = b.fadd(_load(b, place, vector, size), _load(b, more, vector, size)), b.load(top)
            _store(b, value, place, size)
            b.store(b.select(b.fcmp_unordered(">", value, held), value, held), top)
        return _across(b, b.load(top), "maximum")

    return signature, codegen


@primitive
def exponentials(typing, like, x, top, vectors):
    """Replace the numbers x of a row by ``e^{x − top}`` and return their sum."""
    size, scalar, vector = _vector_type(like)
    signature = like.dtype(like, types.int64, like.dtype, types.int64)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        x, top, vectors = arguments[1:]
        less, total = _splat(b, top, vector.count), cgutils.alloca_once_value(b, _constant(vector, 0.0))
        with _each(b, vectors, size, vector) as (at, _):
            place = _pointer(b, b.add(x, at), scalar)
            value = _exp(b, b.fsub(_load(b, place, vector, size), less))
            _store(b, value, place, size)
            b.store(b.fadd(b.load(total), value), total)
        return _across(b, b.load(total), "sum")

    return signature, codegen


@primitive
def nearest(typing, like, x, bias, vectors, least):
    """Return the place of the smallest number of ``x + bias``, of equal ones the first, and write the number."""
    size, scalar, vector = _vector_type(like)
    signature = types.int64(like, *([types.int64] * 4))
    count = vector.count
    index = ir.IntType(8 * size)
    indices = ir.VectorType(index, count)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        x, bias, vectors, least = arguments[1:]
        low = cgutils.alloca_once_value(b, _constant(vector, math.inf))
        where = cgutils.alloca_once_value(b, ir.Constant(indices, list(range(count))))
        here = cgutils.alloca_once_value(b, ir.Constant(indices, list(range(count))))
        with _each(b, vectors, size, vector) as (at, _):
            values = [_load(b, _pointer(b, b.add(start, at), scalar), vector, size) for start in (x, bias)]
            value, held, places = b.fadd(*values), b.load(low), b.load(here)
            less = b.fcmp_ordered("<", value, held)
            b.store(b.select(less, value, held), low)
            b.store(b.select(less, places, b.load(where)), where)
            b.store(b.add(places, ir.Constant(indices, [count] * count)), here)
        lanes = [ir.Constant(ir.IntType(32), lane) for lane in range(count)]
        values, places = b.load(low), b.load(where)
        best, place = b.extract_element(values, lanes[0]), b.extract_element(places, lanes[0])
        for lane in lanes[1:]:
            value, other = b.extract_element(values, lane), b.extract_element(places, lane)
            tie = b.and_(b.fcmp_ordered("==", value, best), b.icmp_signed("<", other, place))
            better = b.or_(b.fcmp_ordered("<", value, best), tie)
            best, place = b.select(better, value, best), b.select(better, other, place)
        _store(b, best, _pointer(b, least, scalar), size)
        return place if size == 8 else b.sext(place, _I64)

    return signature, codegen


@primitive
def apart(typing, like, x, y, vectors):
    """Return the squared distance of two padded rows."""
    size, scalar, vector = _vector_type(like)
    signature = like.dtype(like, *([types.int64] * 3))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        x, y, vectors = arguments[1:]
        total = cgutils.alloca_once_value(b, _constant(vector, 0.0))
        with _each(b, vectors, size, vector) as (at, _):
            left, right = (_load(b, _pointer(b, b.add(base, at), scalar), vector, size) for base in (x, y))
            gap = b.fsub(left, right)
            b.store(_fma(b, gap, gap, b.load(total)), total)
        return _across(b, b.load(total), "sum")

    return signature, codegen
