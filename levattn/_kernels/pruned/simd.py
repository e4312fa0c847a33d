"""Vector code of pruned attention: a tile of products, and what is done to a row of logits or distances.

Steps are in bytes; rows have so many `vectors`.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba.core import cgutils

from levattn._kernels.llvm import I64, Value, across, exponential, fma, integer, load, repeated, store, vector_code

__all__ = ["apart", "exponentials", "matrix_tile", "nearest", "raised"]


@vector_code(literals="rows vectors adds")
def matrix_tile(v, like, rows, vectors, adds, x, x_step, panel, n, to, to_step):
    """Write ``Σ_k x[i, k] * panel[k]`` to ``to[i]`` for so many `rows`, or if `adds` add it to what is there.

    The n rows of a panel are so many `vectors` long and lie one behind the other.
    """
    b = v.b
    targets = [place for i in range(rows) for place in v.row(b.add(to, b.mul(to_step, integer(i))), vectors)]
    first = [load(b, place, v.kind, v.size) if adds else v.constant(0.0) for place in targets]
    # rows are reached as base + {0, 1, 2, 3} * step, which the address modes hold without a register each
    offsets = [None, x_step, b.mul(x_step, integer(2)), b.mul(x_step, integer(3))]
    x_step4 = b.mul(x_step, integer(4))

    def add(x: Value, panel: Value, *held: Value) -> list[Value]:
        values, sums, base = v.loaded(panel, vectors), [], x
        for i in range(rows):
            if i and i % 4 == 0:
                base = b.add(base, x_step4)
            offset = offsets[i % 4]
            factor = v.number(base if offset is None else b.add(base, offset))
            sums += [fma(b, factor, values[j], held[i * vectors + j]) for j in range(vectors)]
        return [b.add(x, integer(v.size)), b.add(panel, integer(v.size * v.count * vectors)), *sums]

    _, _, *results = repeated(b, n, (x, panel, *first), add)
    for place, result in zip(targets, results, strict=True):
        store(b, result, place, v.size)


@vector_code(returns="number")
def raised(v, like, x, bias, vectors):
    """Add a row to another, x, and return the largest number of that."""
    b, top = v.b, cgutils.alloca_once_value(v.b, v.constant(-math.inf))
    with v.each(vectors) as at:
        value, held = b.fadd(v.load(x, at), v.load(bias, at)), b.load(top)
        v.store(value, x, at)
        b.store(b.select(b.fcmp_unordered(">", value, held), value, held), top)
    return across(b, b.load(top), "maximum")


@vector_code(returns="number", numbers="top")
def exponentials(v, like, x, top, vectors):
    """Replace the numbers x of a row by ``e^{x − top}`` and return their sum."""
    b, total = v.b, cgutils.alloca_once_value(v.b, v.constant(0.0))
    less = v.splat(top)
    with v.each(vectors) as at:
        value = exponential(b, b.fsub(v.load(x, at), less))
        v.store(value, x, at)
        b.store(b.fadd(b.load(total), value), total)
    return across(b, b.load(total), "sum")


@vector_code(returns="integer")
def nearest(v, like, x, bias, vectors, least):
    """Return the place of the smallest number of ``x + bias``, of equal ones the first, and write the number."""
    b, index = v.b, ir.IntType(8 * v.size)
    indices = ir.VectorType(index, v.count)
    first = ir.Constant(indices, list(range(v.count)))
    low = cgutils.alloca_once_value(b, v.constant(math.inf))
    where, here = cgutils.alloca_once_value(b, first), cgutils.alloca_once_value(b, first)
    with v.each(vectors) as at:
        value, held, places = b.fadd(v.load(x, at), v.load(bias, at)), b.load(low), b.load(here)
        less = b.fcmp_ordered("<", value, held)
        b.store(b.select(less, value, held), low)
        b.store(b.select(less, places, b.load(where)), where)
        b.store(b.add(places, ir.Constant(indices, [v.count] * v.count)), here)
    lanes = [ir.Constant(ir.IntType(32), lane) for lane in range(v.count)]
    values, places = b.load(low), b.load(where)
    best, place = b.extract_element(values, lanes[0]), b.extract_element(places, lanes[0])
    for lane in lanes[1:]:
        value, other = b.extract_element(values, lane), b.extract_element(places, lane)
        tie = b.and_(b.fcmp_ordered("==", value, best), b.icmp_signed("<", other, place))
        better = b.or_(b.fcmp_ordered("<", value, best), tie)
        best, place = b.select(better, value, best), b.select(better, other, place)
    store(b, best, v.pointer(least), v.size)
    return place if v.size == 8 else b.sext(place, I64)


@vector_code(returns="number")
def apart(v, like, x, y, vectors):
    """Return the squared distance of two padded rows."""
    b, total = v.b, cgutils.alloca_once_value(v.b, v.constant(0.0))
    with v.each(vectors) as at:
        gap = b.fsub(v.load(x, at), v.load(y, at))
        b.store(fma(b, gap, gap, b.load(total)), total)
    return across(b, b.load(total), "sum")
