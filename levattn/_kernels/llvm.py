"""LLVM vector code: register tiles, which the compiler does not find by itself from small loops, and changes of rows.

Addresses and strides are integers: addresses in bytes, strides in elements. ``like`` is any array of the dtype
to compute in (float32 or float64). The shape of a tile is known when it is compiled, so that it is one piece of
straight-line code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from levattn._kernels.jit import VECTOR_BYTES

__all__ = [
    "add_signed",
    "add_upper",
    "address",
    "as_pointer",
    "combine",
    "entry_tile",
    "fused_multiply_add",
    "hadamard_tile",
    "lane_sum",
    "larger",
    "moment_tiles",
    "primitive",
    "product_high",
    "product_tile",
    "rolled",
    "smaller",
    "subtract_rows",
    "twofold_tile",
]

Builder = Any
Value = Any

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)


def _literals(*arguments: Any) -> list[int]:
    return [int(a.literal_value) for a in arguments]


def _int(value: int) -> Value:
    return ir.Constant(_I64, value)


def _vector_type(like: Any) -> tuple[int, Value, Value]:
    """Return the bytes of an element of `like`, its type, and the type of one vector of them."""
    size = like.dtype.bitwidth // 8
    scalar = ir.FloatType() if size == 4 else ir.DoubleType()
    return size, scalar, ir.VectorType(scalar, VECTOR_BYTES // size)


def _pointer(b: Builder, address: Value, kind: Value) -> Value:
    return b.inttoptr(address, kind.as_pointer())


def _load(b: Builder, pointer: Value, kind: Value, align: int) -> Value:
    value = b.load(b.bitcast(pointer, kind.as_pointer()))
    value.align = align
    return value


def _store(b: Builder, value: Value, pointer: Value, align: int) -> None:
    b.store(value, b.bitcast(pointer, value.type.as_pointer())).align = align


def _splat(b: Builder, scalar: Value, lanes: int) -> Value:
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


@contextmanager
def rolled(b: Builder, first: Value, last: Value, step: int = 1) -> Iterator[Value]:
    """Go through ``first:last:step`` in a loop that LLVM takes as it is: unrolled, it would compile for longer.

    LLVM cannot count the rounds of a loop whose step it does not know.
    """
    unknown = b.asm(ir.FunctionType(_I64, [_I64]), "", "=r,0", [_int(step)], side_effect=False)
    with cgutils.for_range_slice(b, first, last, unknown, _I64) as (index, _):
        yield index


def _fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    kind = x.type
    lanes = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
    element = kind.element if lanes else kind
    name = f"llvm.fma.{lanes}{'f32' if isinstance(element, ir.FloatType) else 'f64'}"
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), name)
    return b.call(function, [x, y, z])


def _prefetch(b: Builder, address: Value) -> None:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    read, keep, data = (ir.Constant(_I32, flag) for flag in (0, 2, 1))
    b.call(function, [b.inttoptr(address, byte), read, keep, data])


@intrinsic
def address(typing, array):
    """Return where the first number of an array lies, as an int64: NumPy's is unsigned, and may become a float."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        held = context.make_array(signature.args[0])(context, b, arguments[0])
        return b.ptrtoint(held.data, _I64)

    return types.int64(array), codegen


def primitive(define: Callable[..., Any]) -> Callable[..., Any]:
    """Make an intrinsic of what defines one; where it takes an int64 it takes no float, which Numba would convert."""

    @wraps(define)
    def checked(typing: Any, *given: Any) -> Any:
        signature, codegen = define(typing, *given)
        for place, (kind, expected) in enumerate(zip(given, signature.args, strict=True)):
            if expected == types.int64 and not isinstance(kind, types.Integer):
                raise TypingError(f"argument {place} of {define.__name__} is {kind}, not a whole number")
        return signature, codegen

    made: Callable[..., Any] = intrinsic(prefer_literal=True)(checked)
    return made


def moment_tiles(shapes: Callable[[int], Sequence[tuple[int, int]]]) -> Callable[..., Any]:
    """Return a tile for sums of outer products, whose shape is chosen as it runs.

    `shapes` are those that there are, as rows and vectors, if a vector has so many numbers. The tile is told which,
    and returns its rows. It adds ``sum_r a[r, i] * x[r, :]`` for ``i < rows`` and its vectors of x to `out`; each row
    also asks for the cache line at `ahead`, which moves on by `ahead_step` bytes.
    """

    def moment_tile(typing, like, shape, a, a_stride, x, x_stride, n, out, out_stride, ahead, ahead_step):
        signature = types.int64(like, *([types.int64] * 10))
        sizes = shapes(_vector_type(like)[2].count)

        def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
            before, added = b.block, b.append_basic_block("added")
            choice = b.switch(arguments[1], added)
            begun = {}
            for shape, (tall, wide) in enumerate(sizes):
                if (tall, wide) not in begun:
                    b.position_at_end(begin := b.append_basic_block("tile"))
                    _moment_tile(b, like, tall, wide, arguments[2:])
                    b.branch(added)
                    begun[tall, wide] = begin, b.block
                choice.add_case(_int(shape), begun[tall, wide][0])
            b.position_at_end(added)
            rows = b.phi(_I64)
            rows.add_incoming(_int(0), before)
            for (tall, _), (_, end) in begun.items():
                rows.add_incoming(_int(tall), end)
            return rows

        return signature, codegen

    return primitive(moment_tile)


def _moment_tile(b: Builder, like: Any, tall: int, wide: int, arguments: Any) -> None:
    a, a_stride, x, x_stride, n, out, out_stride, ahead, ahead_step = arguments
    size, scalar, vector = _vector_type(like)
    count = vector.count
    zero = ir.Constant(vector, [0.0] * count)
    a_step, x_step = b.mul(a_stride, _int(size)), b.mul(x_stride, _int(size))

    for i in range(tall):  # the tile's own lines, which are not needed before the rows are summed
        at_out = b.add(out, b.mul(out_stride, _int(size * i)))
        for byte in range(0, size * count * wide, 64):
            _prefetch(b, b.add(at_out, _int(byte)))
    before = b.block
    loop, after = b.append_basic_block("rows"), b.append_basic_block("flush")
    b.cbranch(b.icmp_signed(">", n, _int(0)), loop, after)
    b.position_at_end(loop)
    left, at_a, at_x, at_line = (b.phi(_I64) for _ in range(4))
    sums = [[b.phi(vector) for _ in range(wide)] for _ in range(tall)]
    row = _pointer(b, at_x, scalar)
    xs = [_load(b, b.gep(row, [_int(count * j)]), vector, size) for j in range(wide)]
    head = _pointer(b, at_a, scalar)
    new = []
    for i in range(tall):
        value = _splat(b, _load(b, b.gep(head, [_int(i)]), scalar, size), count)
        new.append([_fma(b, value, xs[j], sums[i][j]) for j in range(wide)])
    _prefetch(b, at_line)
    moved = (b.sub(left, _int(1)), b.add(at_a, a_step), b.add(at_x, x_step), b.add(at_line, ahead_step))
    for phi, start, following in zip((left, at_a, at_x, at_line), (n, a, x, ahead), moved, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(following, loop)
    for i in range(tall):
        for j in range(wide):
            sums[i][j].add_incoming(zero, before)
            sums[i][j].add_incoming(new[i][j], loop)
    b.cbranch(b.icmp_signed(">", moved[0], _int(0)), loop, after)

    b.position_at_end(after)
    results = [[b.phi(vector) for _ in range(wide)] for _ in range(tall)]
    target = _pointer(b, out, scalar)
    for i in range(tall):
        line = b.gep(target, [b.mul(out_stride, _int(i))])
        for j in range(wide):
            results[i][j].add_incoming(zero, before)
            results[i][j].add_incoming(new[i][j], loop)
            place = b.gep(line, [_int(count * j)])
            _store(b, b.fadd(_load(b, place, vector, size), results[i][j]), place, size)


@primitive
def twofold_tile(typing, like, rows, vectors, a, x, stride, n, high, low, out_stride):
    """Add ``sum_r a[r, i] * x[r, :]`` for ``i < rows`` to the tile of twofold numbers ``high + low``.

    Products and sums keep their rounding errors, which are added up in `low`; in the end what of them the sum can hold
    goes there. Rows of a and x are `stride` elements apart.
    """
    signature = types.void(like, rows, vectors, *([types.int64] * 7))
    tall, wide = _literals(rows, vectors)
    size, scalar, vector = _vector_type(like)
    count = vector.count
    cells = [(i, j) for i in range(tall) for j in range(wide)]

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        a, x, stride, n, high, low, out_stride = arguments[3:]
        step = b.mul(stride, _int(size))
        targets = [
            [b.gep(_pointer(b, out, scalar), [b.add(b.mul(out_stride, _int(i)), _int(count * j))]) for i, j in cells]
            for out in (high, low)
        ]
        held = [[_load(b, place, vector, size) for place in places] for places in targets]
        before = b.block
        loop, after = b.append_basic_block("rows"), b.append_basic_block("store")
        b.branch(loop)
        b.position_at_end(loop)
        left, at_a, at_x = (b.phi(_I64) for _ in range(3))
        sums, errors = ([b.phi(vector) for _ in cells] for _ in range(2))
        row, head = _pointer(b, at_x, scalar), _pointer(b, at_a, scalar)
        xs = [_load(b, b.gep(row, [_int(count * j)]), vector, size) for j in range(wide)]
        factors = [_splat(b, _load(b, b.gep(head, [_int(i)]), scalar, size), count) for i in range(tall)]
        new_sums, new_errors = [], []
        for cell, (i, j) in enumerate(cells):
            product = b.fmul(factors[i], xs[j])
            lost = _fma(b, factors[i], xs[j], b.fneg(product))
            total = b.fadd(sums[cell], product)
            part = b.fsub(total, sums[cell])
            rounding = b.fadd(b.fsub(sums[cell], b.fsub(total, part)), b.fsub(product, part))
            new_sums.append(total)
            new_errors.append(b.fadd(errors[cell], b.fadd(rounding, lost)))
        moved = (b.sub(left, _int(1)), b.add(at_a, step), b.add(at_x, step))
        for phi, start, following in zip((left, at_a, at_x), (n, a, x), moved, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(following, loop)
        for phis, starts, followings in zip((sums, errors), held, (new_sums, new_errors), strict=True):
            for phi, start, following in zip(phis, starts, followings, strict=True):
                phi.add_incoming(start, before)
                phi.add_incoming(following, loop)
        b.cbranch(b.icmp_signed(">", moved[0], _int(0)), loop, after)
        b.position_at_end(after)
        for cell in range(len(cells)):
            whole = b.fadd(new_sums[cell], new_errors[cell])
            _store(b, whole, targets[0][cell], size)
            _store(b, b.fsub(new_errors[cell], b.fsub(whole, new_sums[cell])), targets[1][cell], size)
        return context.get_dummy_value()

    return signature, codegen


@primitive
def product_tile(
    typing, like, rows, vectors, x, x_stride, w, w_stride, start, rest, out, out_stride, squared, ahead, ahead_step
):
    """Multiply `rows` rows of x by a tile of columns of an upper-triangular W.

    All of the tile's vectors use the rows of W below `start`, and from there each further `rest` rows leave out one
    more vector on the left. The products are stored in `out`, or if `squared` their squares are added to one vector
    a row. Each step also asks for the cache line at `ahead`, which moves on by `ahead_step` bytes.
    """
    signature = types.void(like, rows, vectors, *([types.int64] * 8), squared, types.int64, types.int64)
    tall, wide, square = _literals(rows, vectors, squared)
    size, scalar, vector = _vector_type(like)
    count = vector.count

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        x, x_stride, w, w_stride, start, rest, out, out_stride = arguments[3:11]
        line, line_step = arguments[12:14]
        zero = ir.Constant(vector, [0.0] * count)
        x_step, w_step = b.mul(x_stride, _int(size)), b.mul(w_stride, _int(size))
        # rows are reached as base + {0, 1, 2, 3} * stride, which the address modes hold without a register each
        offsets = [None, x_step, b.mul(x_step, _int(2)), b.mul(x_step, _int(3))]
        x_step4 = b.mul(x_step, _int(4))
        sums = [[zero] * wide for _ in range(tall)]
        cursors = (x, w, line)
        for phase in range(wide):
            live = range(phase, wide)
            length = start if phase == 0 else rest
            before = b.block
            loop, after = b.append_basic_block("columns"), b.append_basic_block("next")
            b.cbranch(b.icmp_signed(">", length, _int(0)), loop, after)

            b.position_at_end(loop)
            left = b.phi(_I64)
            at = [b.phi(_I64) for _ in cursors]
            current = [[b.phi(vector) for _ in live] for _ in range(tall)]
            row = _pointer(b, at[1], scalar)
            ws = [_load(b, b.gep(row, [_int(count * j)]), vector, size) for j in live]
            new = []
            base = at[0]
            for i in range(tall):
                if i and i % 4 == 0:
                    base = b.add(base, x_step4)
                offset = offsets[i % 4]
                address = base if offset is None else b.add(base, offset)
                value = _splat(b, _load(b, _pointer(b, address, scalar), scalar, size), count)
                new.append([_fma(b, value, ws[t], current[i][t]) for t in range(len(live))])
            _prefetch(b, at[2])
            fewer = b.sub(left, _int(1))
            moved = [b.add(at[0], _int(size)), b.add(at[1], w_step), b.add(at[2], line_step)]
            b.cbranch(b.icmp_signed(">", fewer, _int(0)), loop, after)

            b.position_at_end(after)

            def joined(kind: Value, skipped: Value, looped: Value, origins: Any = (before, loop)) -> Value:
                phi = b.phi(kind)
                phi.add_incoming(skipped, origins[0])
                phi.add_incoming(looped, origins[1])
                return phi

            for phi, first, following in zip((left, *at), (length, *cursors), (fewer, *moved), strict=True):
                phi.add_incoming(first, before)
                phi.add_incoming(following, loop)
            for i in range(tall):
                for t, j in enumerate(live):
                    current[i][t].add_incoming(sums[i][j], before)
                    current[i][t].add_incoming(new[i][t], loop)
                    sums[i][j] = joined(vector, sums[i][j], new[i][t])
            cursors = tuple(joined(_I64, old, new_) for old, new_ in zip(cursors, moved, strict=True))

        target = _pointer(b, out, scalar)
        for i in range(tall):
            place = b.gep(target, [b.mul(out_stride, _int(i))])
            if square:
                total = _load(b, place, vector, size)
                for j in range(wide):
                    total = _fma(b, sums[i][j], sums[i][j], total)
                _store(b, total, place, size)
            else:
                for j in range(wide):
                    _store(b, sums[i][j], b.gep(place, [_int(count * j)]), size)
        return context.get_dummy_value()

    return signature, codegen


@primitive
def lane_sum(typing, like, address):
    """Return the sum of the vector at `address`, halved again and again."""
    size, scalar, vector = _vector_type(like)
    signature = like.dtype(like, types.int64)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        value = _load(b, _pointer(b, arguments[1], scalar), vector, size)
        half = vector.count
        while half > 1:
            half //= 2
            undefined = ir.Constant(value.type, ir.Undefined)
            kind = ir.VectorType(_I32, half)
            low = b.shuffle_vector(value, undefined, ir.Constant(kind, list(range(half))))
            high = b.shuffle_vector(value, undefined, ir.Constant(kind, list(range(half, 2 * half))))
            value = b.fadd(low, high)
        return b.extract_element(value, ir.Constant(_I32, 0))

    return signature, codegen


@primitive
def add_upper(typing, like, d, source, target):
    """Add the upper triangle of a matrix at `source`, of numbers like `like`, to that of one at `target`, of float64.

    They have `d` columns, whole vectors, and are added from the vector of the diagonal on.
    """
    size, scalar, vector = _vector_type(like)
    signature = types.void(like, *([types.int64] * 3))
    double = ir.DoubleType()
    doubles = ir.VectorType(double, vector.count)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        d, source, target = arguments[1:]
        from_, to = _pointer(b, source, scalar), _pointer(b, target, double)
        with rolled(b, _int(0), d) as row:
            start = b.mul(row, d)
            first = b.add(start, b.and_(row, _int(-vector.count)))
            with rolled(b, first, b.add(start, d), vector.count) as at:
                value = _load(b, b.gep(from_, [at]), vector, size)
                value = value if size == 8 else b.fpext(value, doubles)
                place = b.gep(to, [at])
                _store(b, b.fadd(_load(b, place, doubles, 8), value), place, 8)
        return context.get_dummy_value()

    return signature, codegen


@primitive
def combine(typing, like, source, others, n, target, how):
    """Write `n` numbers like `like` at `source`, changed by the float64 numbers at `others`, to `target`.

    These are subtracted (how: 0) or multiplied (1), or all numbers are multiplied by the first of them (2), and the
    product may be subtracted from what is there (3). Each result is rounded to the precision of `like`.
    """
    signature = types.void(like, *([types.int64] * 4), how)
    (how,) = _literals(how)
    size, scalar, vector = _vector_type(like)
    double = ir.DoubleType()

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        source, others, n, target = arguments[1:5]
        from_, to, given = (
            _pointer(b, at, kind) for at, kind in ((source, scalar), (target, scalar), (others, double))
        )
        whole = b.and_(n, _int(-vector.count))
        for lanes, first, last in ((vector.count, _int(0), whole), (1, whole, n)):
            kind, wide = (ir.VectorType(x, lanes) if lanes > 1 else x for x in (scalar, double))

            def read(pointer: Value, kind: Value = kind, wide: Value = wide) -> Value:
                value = _load(b, pointer, kind, size)
                return value if kind == wide else b.fpext(value, wide)

            with rolled(b, first, last, lanes) as i:
                value, place = read(b.gep(from_, [i])), b.gep(to, [i])
                if how < 2:
                    other = _load(b, b.gep(given, [i]), wide, 8)
                else:
                    other = _load(b, given, double, 8)
                    other = _splat(b, other, lanes) if lanes > 1 else other
                value = b.fmul(value, other) if how else b.fsub(value, other)
                value = b.fsub(read(place), value) if how == 3 else value
                _store(b, value if kind == wide else b.fptrunc(value, kind), place, size)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_signed(typing, like, total, source, target, sign, vectors, ahead, next_target):
    """Add vectors of numbers like `like` at `source`, times `sign`, to numbers like `total` at `target`.

    Meanwhile as many numbers `ahead` bytes after the source, and at `next_target`, are fetched into the cache.
    """
    size, scalar, vector = _vector_type(like)
    wider, sums, _ = _vector_type(total)
    signature = types.void(like, total, types.int64, types.int64, total.dtype, types.int64, types.int64, types.int64)
    wide = ir.VectorType(sums, vector.count)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        source, target, sign, vectors, ahead, next_target = arguments[2:]
        factor = _splat(b, sign, vector.count)
        with cgutils.for_range(b, vectors) as loop:
            at = b.mul(loop.index, _int(vector.count))
            from_ = b.add(source, b.mul(at, _int(size)))
            value = _load(b, _pointer(b, from_, scalar), vector, size)
            place = b.gep(_pointer(b, target, sums), [at])
            _prefetch(b, b.add(from_, ahead))
            for line in range(0, wider * vector.count, 64):
                _prefetch(b, b.add(next_target, b.add(b.mul(at, _int(wider)), _int(line))))
            value = b.fpext(value, wide) if wider > size else value
            _store(b, _fma(b, factor, value, _load(b, place, wide, wider)), place, wider)
        return context.get_dummy_value()

    return signature, codegen


@primitive
def hadamard_tile(typing, like, total, rows, signed, source, step, signs, target, target_step, vectors):
    """Write the Hadamard transform of `rows` rows at `source` to rows at `target`, which may be the same.

    Rows are `step` and `target_step` bytes apart. Numbers like `like` become numbers like `total`, and if `signed`
    are first multiplied by those at `signs`.
    """
    signature = types.void(like, total, rows, signed, *([types.int64] * 6))
    count, with_signs = _literals(rows, signed)
    size, scalar, _ = _vector_type(like)
    wider, sums, vector = _vector_type(total)
    loaded = ir.VectorType(scalar, vector.count)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        source, step, signs, target, target_step, vectors = arguments[4:]
        with cgutils.for_range(b, vectors) as loop:
            at = b.mul(loop.index, _int(vector.count))
            from_, to = b.add(source, b.mul(at, _int(size))), b.add(target, b.mul(at, _int(wider)))
            values = []
            for i in range(count):
                place = b.add(from_, b.mul(step, _int(i)))
                value = _load(b, _pointer(b, place, scalar), loaded, size)
                value = b.fpext(value, vector) if wider > size else value
                if with_signs:
                    at_sign = _pointer(b, b.add(signs, _int(i * wider)), sums)
                    value = b.fmul(value, _splat(b, _load(b, at_sign, sums, wider), vector.count))
                values.append(value)
            half = 1
            while half < count:
                values = [
                    b.fsub(values[i - half], values[i]) if i & half else b.fadd(values[i], values[i + half])
                    for i in range(count)
                ]
                half *= 2
            for i, value in enumerate(values):
                place = b.add(to, b.mul(target_step, _int(i)))
                _store(b, value, _pointer(b, place, sums), wider)
        return context.get_dummy_value()

    return signature, codegen


@primitive
def entry_tile(typing, like, vectors, values, offsets, n, panel, to):
    """Add the squares of ``sum_e values[e] * panel[offsets[e]:]``, over so many vectors, to the vector at `to`.

    Addresses are in bytes and offsets int64 numbers of elements; values and panel are like `like`.
    """
    signature = types.void(like, vectors, *([types.int64] * 5))
    (wide,) = _literals(vectors)
    size, scalar, vector = _vector_type(like)
    count = vector.count

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        values, offsets, n, panel, to = arguments[2:]
        zero = ir.Constant(vector, [0.0] * count)
        value_at, offset_at = _pointer(b, values, scalar), _pointer(b, offsets, _I64)
        base = _pointer(b, panel, scalar)
        before = b.block
        loop, after = b.append_basic_block("entries"), b.append_basic_block("square")
        b.cbranch(b.icmp_signed(">", n, _int(0)), loop, after)
        b.position_at_end(loop)
        e = b.phi(_I64)
        sums = [b.phi(vector) for _ in range(wide)]
        value = _splat(b, _load(b, b.gep(value_at, [e]), scalar, size), count)
        row = b.gep(base, [b.load(b.gep(offset_at, [e]))])
        new = [_fma(b, value, _load(b, b.gep(row, [_int(count * j)]), vector, size), sums[j]) for j in range(wide)]
        following = b.add(e, _int(1))
        e.add_incoming(_int(0), before)
        e.add_incoming(following, loop)
        for j in range(wide):
            sums[j].add_incoming(zero, before)
            sums[j].add_incoming(new[j], loop)
        b.cbranch(b.icmp_signed("<", following, n), loop, after)

        b.position_at_end(after)
        results = [b.phi(vector) for _ in range(wide)]
        for j in range(wide):
            results[j].add_incoming(zero, before)
            results[j].add_incoming(new[j], loop)
        place = _pointer(b, to, scalar)
        total = _load(b, place, vector, size)
        for j in range(wide):
            total = _fma(b, results[j], results[j], total)
        _store(b, total, place, size)
        return context.get_dummy_value()

    return signature, codegen


@primitive
def subtract_rows(typing, target, source, stride, a, b, c, e, vectors):
    """Subtract the rows at `source`, times a, b, c and e, from that at `target`, as so many whole vectors.

    Numbers are float64, and rows are `stride` of them apart.
    """
    scalar, vector = ir.DoubleType(), ir.VectorType(ir.DoubleType(), VECTOR_BYTES // 8)
    signature = types.void(*([types.int64] * 3), *([types.float64] * 4), types.int64)

    def codegen(context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        target, source, stride, *factors, vectors = arguments
        minus = [_splat(builder, builder.fneg(factor), vector.count) for factor in factors]
        to, rows = _pointer(builder, target, scalar), _pointer(builder, source, scalar)
        with rolled(builder, _int(0), builder.mul(vectors, _int(vector.count)), vector.count) as at:
            place = builder.gep(to, [at])
            total = _load(builder, place, vector, 8)
            for i, factor in enumerate(minus):
                row = builder.gep(rows, [builder.add(at, builder.mul(stride, _int(i)))])
                total = _fma(builder, factor, _load(builder, row, vector, 8), total)
            _store(builder, total, place, 8)
        return context.get_dummy_value()

    return signature, codegen


def _chosen(order: str) -> Callable[..., Any]:
    def smaller_or_larger(typing, a, b):
        whole = isinstance(a, types.Integer) and isinstance(b, types.Integer)
        kind = types.int64 if whole else a if a == b == types.float32 else types.float64

        def codegen(context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
            a, b = arguments
            compare = builder.icmp_signed if whole else builder.fcmp_ordered
            return builder.select(compare(order, b, a), b, a)

        return kind(kind, kind), codegen

    return primitive(smaller_or_larger)


# Of two numbers, the first where none is smaller (larger). Those of Python are functions that are compiled alone.
smaller, larger = _chosen("<"), _chosen(">")


@intrinsic
def fused_multiply_add(typing, x, y, z):
    """Return ``x * y + z`` rounded once."""

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        return _fma(b, *arguments)

    return types.float64(types.float64, types.float64, types.float64), codegen


@primitive
def as_pointer(typing, address, array):
    """Return `address` as a pointer to numbers like those of an array, or like a number."""
    kind = types.CPointer(getattr(array, "dtype", types.unliteral(array)))

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        return b.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64, array), codegen


@intrinsic
def product_high(typing, a, b):
    """Return the upper 64 bits of the product of two numbers of 64 bits."""

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        wide = ir.IntType(128)
        product = b.mul(*(b.zext(x, wide) for x in arguments))
        return b.trunc(b.lshr(product, ir.Constant(wide, 64)), _I64)

    return types.uint64(types.uint64, types.uint64), codegen
