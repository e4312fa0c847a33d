"""Vector code of second moments, whitened rows and sums of several parts: tiles with their sums in registers.

Strides are in elements; steps `ahead` are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from levattn._kernels.llvm import (
    I64,
    Builder,
    Value,
    Vectors,
    across,
    fma,
    integer,
    load,
    pointer,
    prefetch,
    primitive,
    repeated,
    rolled,
    store,
    vector_code,
    vector_type,
)


def moment_tiles(shapes: Callable[[int], Sequence[tuple[int, int]]]) -> Callable[..., Any]:
    """Return a tile for sums of outer products, whose shape is chosen at run time.

    `shapes` returns all shapes, as rows and vectors, given the count of numbers in a vector. The tile takes the index
    of a shape and returns its rows. It adds ``sum_r a[r, i] * x[r, :]`` for ``i < rows`` and its vectors of x to
    `out`. Each row also prefetches the cache line at `ahead`, which moves on by `ahead_step` bytes.
    """

    def moment_tile(typing, like, shape, a, a_stride, x, x_stride, n, out, out_stride, ahead, ahead_step):
        signature = types.int64(like, *([types.int64] * 10))
        sizes = shapes(vector_type(like)[2].count)

        def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
            before, added = b.block, b.append_basic_block("added")
            choice = b.switch(arguments[1], added)
            begun = {}
            for shape, (rows, vectors) in enumerate(sizes):
                if (rows, vectors) not in begun:
                    b.position_at_end(begin := b.append_basic_block("tile"))
                    _moment_tile(Vectors(b, like), rows, vectors, *arguments[2:])
                    b.branch(added)
                    begun[rows, vectors] = begin, b.block
                choice.add_case(integer(shape), begun[rows, vectors][0])
            b.position_at_end(added)
            height = b.phi(I64)
            height.add_incoming(integer(0), before)
            for (rows, _), (_, end) in begun.items():
                height.add_incoming(integer(rows), end)
            return height

        return signature, codegen

    return primitive(moment_tile)


def _moment_tile(
    v: Vectors,
    rows: int,
    vectors: int,
    a: Value,
    a_stride: Value,
    x: Value,
    x_stride: Value,
    n: Value,
    out: Value,
    out_stride: Value,
    ahead: Value,
    ahead_step: Value,
) -> None:
    b = v.b
    a_step, x_step = b.mul(a_stride, integer(v.size)), b.mul(x_stride, integer(v.size))
    targets = [b.add(out, b.mul(out_stride, integer(v.size * i))) for i in range(rows)]
    for target in targets:  # the tile's own lines, which are needed only after the rows are summed
        for byte in range(0, v.size * v.count * vectors, 64):
            prefetch(b, b.add(target, integer(byte)))

    def add(a: Value, x: Value, line: Value, *sums: Value) -> list[Value]:
        values, new = v.loaded(x, vectors), []
        for i in range(rows):
            factor = v.number(a, i)
            new += [fma(b, factor, values[j], sums[i * vectors + j]) for j in range(vectors)]
        prefetch(b, line)
        return [b.add(a, a_step), b.add(x, x_step), b.add(line, ahead_step), *new]

    zeros = [v.constant(0.0)] * (rows * vectors)
    _, _, _, *sums = repeated(b, n, (a, x, ahead, *zeros), add)
    places = [place for target in targets for place in v.row(target, vectors)]
    for place, value in zip(places, sums, strict=True):
        store(b, b.fadd(load(b, place, v.kind, v.size), value), place, v.size)


@vector_code(literals="folds rows vectors")
def expansion_tile(v, like, folds, rows, vectors, a, x, stride, n, out, out_stride, part_stride):
    """Add ``sum_r a[r, i] * x[r, :]`` for ``i < rows`` to a tile of numbers that are sums of so many `folds` floats.

    The rounding errors of products and sums go to the next part, and the last part adds them up. In the end each part
    takes up as much of the next as it can hold. Rows of a and x are `stride` elements apart, and parts of `out` are
    `part_stride` apart.
    """
    b, cells = v.b, rows * vectors
    step, out_step, part_step = (b.mul(by, integer(v.size)) for by in (stride, out_stride, part_stride))

    def places(out: Value) -> list[Value]:
        return [place for i in range(rows) for place in v.row(b.add(out, b.mul(out_step, integer(i))), vectors)]

    def exact_sum(one: Value, other: Value) -> tuple[Value, Value]:
        total = b.fadd(one, other)
        part = b.fsub(total, one)
        return total, b.fadd(b.fsub(one, b.fsub(total, part)), b.fsub(other, part))

    def add(a: Value, x: Value, *parts: Value) -> list[Value]:
        values, factors, new = v.loaded(x, vectors), [v.number(a, i) for i in range(rows)], list(parts)
        for cell in range(cells):
            factor, value = factors[cell // vectors], values[cell % vectors]
            product = b.fmul(factor, value)
            new[cell], rounding = exact_sum(new[cell], product)
            terms = [rounding, fma(b, factor, value, b.fneg(product))]
            for at in range(cells + cell, cells * (folds - 1), cells):
                for i, term in enumerate(terms):
                    new[at], terms[i] = exact_sum(new[at], term)
            last = cells * (folds - 1) + cell
            new[last] = b.fadd(new[last], b.fadd(*terms))
        return [b.add(a, step), b.add(x, step), *new]

    targets = [place for part in range(folds) for place in places(b.add(out, b.mul(part_step, integer(part))))]
    held = [load(b, place, v.kind, v.size) for place in targets]
    _, _, *parts = repeated(b, n, (a, x, *held), add)
    for cell in range(cells):
        mine = parts[cell::cells]
        for _ in range(folds - 1):
            for at in range(folds - 1, 0, -1):
                mine[at - 1], mine[at] = exact_sum(mine[at - 1], mine[at])
        for at in range(folds):
            store(b, mine[at], targets[at * cells + cell], v.size)


@vector_code(literals="rows vectors squared")
def product_tile(
    v, like, rows, vectors, x, x_stride, w, w_stride, start, rest, out, out_stride, squared, ahead, ahead_step
):
    """Multiply `rows` rows of x by a tile of columns of an upper-triangular W.

    All vectors of the tile use the rows of W before `start`. From there on, each further `rest` rows leave out one
    more vector on the left. The products are stored in `out`, or if `squared`, their squares are added to one vector a
    row. Each step also prefetches the cache line at `ahead`, which moves on by `ahead_step` bytes.
    """
    b = v.b
    x_step, w_step = b.mul(x_stride, integer(v.size)), b.mul(w_stride, integer(v.size))
    # rows are at base + {0, 1, 2, 3} * stride, which addressing modes reach without a register each
    offsets = [None, x_step, b.mul(x_step, integer(2)), b.mul(x_step, integer(3))]
    x_step4 = b.mul(x_step, integer(4))
    sums = [[v.constant(0.0)] * vectors for _ in range(rows)]
    for phase in range(vectors):
        live = range(phase, vectors)

        def add(x: Value, w: Value, line: Value, *held: Value, live: Sequence[int] = live) -> list[Value]:
            places = v.row(w, vectors)
            values = [load(b, places[j], v.kind, v.size) for j in live]
            new: list[Value] = []
            base = x
            for i in range(rows):
                if i and i % 4 == 0:
                    base = b.add(base, x_step4)
                offset = offsets[i % 4]
                factor = v.number(base if offset is None else b.add(base, offset))
                new += [fma(b, factor, value, held[len(new) + k]) for k, value in enumerate(values)]
            prefetch(b, line)
            return [b.add(x, integer(v.size)), b.add(w, w_step), b.add(line, ahead_step), *new]

        held = [sums[i][j] for i in range(rows) for j in live]
        x, w, ahead, *held = repeated(b, start if phase == 0 else rest, (x, w, ahead, *held), add)
        for i in range(rows):
            sums[i][phase:] = held[i * len(live) : (i + 1) * len(live)]

    target = v.pointer(out)
    for i in range(rows):
        place = b.gep(target, [b.mul(out_stride, integer(i))])
        if squared:
            total = load(b, place, v.kind, v.size)
            for product in sums[i]:
                total = fma(b, product, product, total)
            store(b, total, place, v.size)
        else:
            for j, product in enumerate(sums[i]):
                store(b, product, b.gep(place, [integer(v.count * j)]), v.size)


@vector_code(literals="vectors")
def entry_tile(v, like, vectors, values, offsets, n, panel, to):
    """Add the squares of ``sum_e values[e] * panel[offsets[e]:]``, over so many vectors, to the vector at `to`.

    Offsets are int64 numbers of elements; values and panel are like `like`.
    """
    b = v.b
    value_at, offset_at, base = v.pointer(values), pointer(b, offsets, I64), v.pointer(panel)

    def add(e: Value, *sums: Value) -> list[Value]:
        factor = v.splat(load(b, b.gep(value_at, [e]), v.scalar, v.size))
        row = b.gep(base, [b.load(b.gep(offset_at, [e]))])
        places = [b.gep(row, [integer(v.count * j)]) for j in range(vectors)]
        new = [fma(b, factor, load(b, place, v.kind, v.size), held) for place, held in zip(places, sums, strict=True)]
        return [b.add(e, integer(1)), *new]

    _, *sums = repeated(b, n, (integer(0), *[v.constant(0.0)] * vectors), add)
    total = v.load(to)
    for value in sums:
        total = fma(b, value, value, total)
    v.store(total, to)


@vector_code(returns="number")
def lane_sum(v, like, address):
    """Return the sum of the lanes of the vector at `address`, halved again and again."""
    return across(v.b, v.load(address), "sum")


@vector_code()
def add_upper(v, like, d, source, target):
    """Add the upper triangle of a matrix at `source`, of numbers like `like`, to a float64 matrix at `target`.

    Both have `d` columns, whole vectors. Each row is added from the vector that holds its diagonal on.
    """
    b, double = v.b, ir.DoubleType()
    doubles = ir.VectorType(double, v.count)
    from_, to = v.pointer(source), pointer(b, target, double)
    with rolled(b, integer(0), d) as row:
        start = b.mul(row, d)
        first = b.add(start, b.and_(row, integer(-v.count)))
        with rolled(b, first, b.add(start, d), v.count) as at:
            value = load(b, b.gep(from_, [at]), v.kind, v.size)
            value = value if v.size == 8 else b.fpext(value, doubles)
            place = b.gep(to, [at])
            store(b, b.fadd(load(b, place, doubles, 8), value), place, 8)
