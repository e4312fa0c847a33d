"""Functions that emit LLVM instructions: vector loops that Numba does not vectorize, and primitives of all kernels.

Addresses are integers, in bytes. ``like`` is any array (or pointer) of the dtype to compute in, float32 or float64.
Sizes such as the rows of a tile are known at compile time, so that a tile is straight-line code.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from levattn._kernels.jit import VECTOR_BYTES

Builder = Any
Value = Any

I64 = ir.IntType(64)
_I32 = ir.IntType(32)
# The instruction that lets another thread of the core run meanwhile; processors without one spin
_PAUSE = {"x86_64": "llvm.x86.sse2.pause", "amd64": "llvm.x86.sse2.pause"}.get(platform.machine().lower())


def integer(value: int) -> Value:
    """Return an int64."""
    return ir.Constant(I64, value)


def vector_type(like: Any) -> tuple[int, Value, Value]:
    """Return the bytes of an element of `like`, its type, and the type of one vector of them."""
    size = like.dtype.bitwidth // 8
    scalar = ir.FloatType() if size == 4 else ir.DoubleType()
    return size, scalar, ir.VectorType(scalar, VECTOR_BYTES // size)


def pointer(b: Builder, address: Value, kind: Value) -> Value:
    """Return an address as a pointer."""
    return b.inttoptr(address, kind.as_pointer())


def load(b: Builder, pointer: Value, kind: Value, align: int) -> Value:
    """Read a value of a kind."""
    value = b.load(b.bitcast(pointer, kind.as_pointer()))
    value.align = align
    return value


def store(b: Builder, value: Value, pointer: Value, align: int) -> None:
    """Write a value of any kind."""
    b.store(value, b.bitcast(pointer, value.type.as_pointer())).align = align


def splat(b: Builder, scalar: Value, lanes: int) -> Value:
    """Return a vector with a number in all lanes."""
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """Return ``x y + z``, rounded once, for numbers or vectors."""
    kind = x.type
    lanes = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
    element = kind.element if lanes else kind
    name = f"llvm.fma.{lanes}{'f32' if isinstance(element, ir.FloatType) else 'f64'}"
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), name)
    return b.call(function, [x, y, z])


def prefetch(b: Builder, address: Value) -> None:
    """Ask for a cache line."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    read, keep, data = (ir.Constant(_I32, flag) for flag in (0, 2, 1))
    b.call(function, [b.inttoptr(address, byte), read, keep, data])


def halves(b: Builder, value: Value) -> tuple[Value, Value]:
    """Return the first and the last lanes of a vector."""
    half = value.type.count // 2
    undefined = ir.Constant(value.type, ir.Undefined)
    kind = ir.VectorType(_I32, half)
    low, high = (
        b.shuffle_vector(value, undefined, ir.Constant(kind, list(range(start, start + half)))) for start in (0, half)
    )
    return low, high


def across(b: Builder, value: Value, name: str) -> Value:
    """Return the "maximum" or the "sum" of the lanes, halved again and again."""
    while value.type.count > 1:
        low, high = halves(b, value)
        value = b.fadd(low, high) if name == "sum" else b.select(b.fcmp_ordered(">", low, high), low, high)
    return b.extract_element(value, ir.Constant(_I32, 0))


def exponential(b: Builder, x: Value) -> Value:
    """Return e^x of every lane, to about one unit in the last place, for x that do not overflow; 0 for tiny results.

    x = n log 2 + r with |r| at most half of log 2. A series gives e^r, and the last bits of a large number put n into
    the exponent. NaN stays NaN.
    """
    vector = x.type
    single = isinstance(vector.element, ir.FloatType)

    def constant(value: float) -> Value:
        return ir.Constant(vector, [value] * vector.count)

    bits, bias, terms, least = (23, 127, 7, -87.0) if single else (52, 1023, 13, -708.0)
    # log 2 in two parts; the first has few bits, so that its product with n is exact
    high, low = (0.693359375, -2.121944400546905828e-4) if single else (0.6931471803691238, 1.908214929270587816e-10)
    magic = 1.5 * 2.0**bits
    shifted = fma(b, x, constant(1 / math.log(2)), constant(magic + bias))
    n = b.fsub(shifted, constant(magic + bias))
    r = fma(b, n, constant(-low), fma(b, n, constant(-high), x))
    series = constant(1 / math.factorial(terms))
    for k in range(terms - 1, -1, -1):
        series = fma(b, series, r, constant(1 / math.factorial(k)))
    whole = ir.VectorType(ir.IntType(32 if single else 64), vector.count)
    power = b.shl(b.bitcast(shifted, whole), ir.Constant(whole, [bits] * vector.count))
    value = b.fmul(series, b.bitcast(power, vector))
    return b.select(b.fcmp_ordered("<", x, constant(least)), constant(0.0), value)


@contextmanager
def rolled(b: Builder, first: Value, last: Value, step: int = 1) -> Iterator[Value]:
    """Loop over ``first:last:step`` without letting LLVM unroll the loop, which would take longer to compile.

    LLVM cannot count the rounds of a loop whose step it does not know.
    """
    unknown = b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [integer(step)], side_effect=False)
    with cgutils.for_range_slice(b, first, last, unknown, I64) as (index, _):
        yield index


def repeated(b: Builder, n: Value, begin: Iterable[Value], step: Callable[..., Iterable[Value]]) -> list[Value]:
    """Return the values after n steps from `begin`, held in registers meanwhile; `begin` if n is not positive."""
    before, begin = b.block, [n, *begin]
    loop, after = b.append_basic_block("steps"), b.append_basic_block("after")
    b.cbranch(b.icmp_signed(">", n, integer(0)), loop, after)
    b.position_at_end(loop)
    left, *held = (b.phi(value.type) for value in begin)
    moved = list(step(*held))
    following = [b.sub(left, integer(1)), *moved]  # counted last, else LLVM spills vectors of some tiles
    b.cbranch(b.icmp_signed(">", following[0], integer(0)), loop, after)
    b.position_at_end(after)
    results = []
    for phi, first, value in zip((left, *held), begin, following, strict=True):
        result = b.phi(phi.type)
        for joined in (phi, result):
            joined.add_incoming(first, before)
            joined.add_incoming(value, loop)
        results.append(result)
    return results[1:]


class Vectors:
    """Code for vectors of numbers like `like`: whole vectors, or vectors of `count` numbers."""

    def __init__(self, b: Builder, like: Any, count: int | None = None) -> None:
        self.b = b
        self.size, self.scalar, whole = vector_type(like)
        self.count = whole.count if count is None else count
        self.kind = ir.VectorType(self.scalar, self.count)

    def pointer(self, base: Value, offset: Value | None = None) -> Value:
        """Return a pointer to the number `offset` bytes after an address."""
        return pointer(self.b, base if offset is None else self.b.add(base, offset), self.scalar)

    def load(self, base: Value, offset: Value | None = None) -> Value:
        """Return the vector at an address, `offset` bytes further if given."""
        return load(self.b, self.pointer(base, offset), self.kind, self.size)

    def store(self, value: Value, base: Value, offset: Value | None = None) -> None:
        """Write a vector to an address, `offset` bytes further if given."""
        store(self.b, value, self.pointer(base, offset), self.size)

    def row(self, base: Value, vectors: int) -> list[Value]:
        """Return pointers to so many vectors, one after the other."""
        start = self.pointer(base)
        return [self.b.gep(start, [integer(self.count * j)]) for j in range(vectors)]

    def loaded(self, base: Value, vectors: int) -> list[Value]:
        """Return so many vectors that lie one after the other."""
        return [load(self.b, place, self.kind, self.size) for place in self.row(base, vectors)]

    def number(self, base: Value, place: int = 0) -> Value:
        """Return the number at a place after an address, in all lanes."""
        at = self.b.gep(self.pointer(base), [integer(place)])
        return self.splat(load(self.b, at, self.scalar, self.size))

    def splat(self, number: Value) -> Value:
        """Return a number in all lanes."""
        return splat(self.b, number, self.count)

    def constant(self, value: float) -> Value:
        """Return a constant in all lanes."""
        return ir.Constant(self.kind, [value] * self.count)

    @contextmanager
    def each(self, vectors: Value) -> Iterator[Value]:
        """Go through the vectors of a row, by their offsets in bytes."""
        step = integer(self.size * self.count)
        with cgutils.for_range_slice(self.b, integer(0), self.b.mul(vectors, step), step) as (offset, _):
            yield offset


@intrinsic
def address(typing, array):
    """Return the address of an array as int64: NumPy's is unsigned, and Numba may convert it to a float."""

    def codegen(context: Any, b: Builder, signature: Any, arguments: Any) -> Value:
        held = context.make_array(signature.args[0])(context, b, arguments[0])
        return b.ptrtoint(held.data, I64)

    return types.int64(array), codegen


def primitive(define: Callable[..., Any]) -> Callable[..., Any]:
    """Make an intrinsic of its definition `define`; int64 arguments reject floats, which Numba would convert."""

    @wraps(define)
    def checked(typing: Any, *given: Any) -> Any:
        signature, codegen = define(typing, *given)
        for place, (kind, expected) in enumerate(zip(given, signature.args, strict=True)):
            parts = kind if isinstance(kind, types.BaseTuple) else [kind]
            whole = all(isinstance(part, types.Integer) for part in parts)
            if (expected == types.int64 or isinstance(expected, types.UniTuple)) and not whole:
                raise TypingError(f"argument {place} of {define.__name__} is {kind}, not a whole number")
        return signature, codegen

    made: Callable[..., Any] = intrinsic(prefer_literal=True)(checked)
    return made


def vector_code(*, returns: str = "nothing", numbers: str = "", literals: str = "") -> Callable[..., Any]:
    """Make an intrinsic ``(like, ...)`` of a function that writes its code, given `Vectors` in place of the builder.

    Arguments are int64 or tuples of int64, with two exceptions. The named `numbers` are like `like`, and the named
    `literals` are integers known at compile time. The intrinsic `returns` "nothing", a "number" like `like`, an
    "integer" or a "flag".
    """

    def made(emit: Callable[..., Any]) -> Callable[..., Any]:
        _, _, *names = signature(emit).parameters

        @wraps(emit)
        def define(typing: Any, like: Any, *given: Any) -> Any:
            kinds = []
            for name, kind in zip(names, given, strict=True):
                number, known = name in numbers.split(), name in literals.split()
                if known and not isinstance(kind, types.Literal):
                    raise TypingError(f"{name} of {emit.__name__} is {kind}; expected a number that is known here")
                tuples = types.UniTuple(types.int64, len(kind)) if isinstance(kind, types.BaseTuple) else types.int64
                kinds.append(like.dtype if number else kind if known else tuples)

            def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
                values = []
                for kind, value in zip(kinds, arguments[1:], strict=True):
                    known = isinstance(kind, types.Literal)
                    parts = cgutils.unpack_tuple(b, value) if isinstance(kind, types.UniTuple) else value
                    values.append(int(kind.literal_value) if known else parts)
                result = emit(Vectors(b, like), like, *values)
                return context.get_dummy_value() if result is None else result

            results = {"nothing": types.void, "number": like.dtype, "integer": types.int64, "flag": types.boolean}
            return results[returns](like, *kinds), codegen

        return primitive(define)

    return made


@vector_code(literals="how")
def combine(v, like, source, others, n, target, how):
    """Write `n` numbers like `like` at `source`, changed by the float64 numbers at `others`, to `target`.

    If `how` is 0, subtract the first `n` of `others`, and then the next. If 1, multiply by them. If 2, multiply all
    numbers by the first of them. If 3, also subtract this last product from the numbers at `target`. Each result is
    rounded to the precision of `like`.
    """
    b, double = v.b, ir.DoubleType()
    from_, to, given = v.pointer(source), v.pointer(target), pointer(b, others, double)
    whole = b.and_(n, integer(-v.count))
    for lanes, first, last in ((v.count, integer(0), whole), (1, whole, n)):
        kind, float64 = (ir.VectorType(x, lanes) if lanes > 1 else x for x in (v.scalar, double))

        def read(place: Value, kind: Value = kind, float64: Value = float64) -> Value:
            value = load(b, place, kind, v.size)
            return value if kind == float64 else b.fpext(value, float64)

        with rolled(b, first, last, lanes) as i:
            value, place = read(b.gep(from_, [i])), b.gep(to, [i])
            if how < 2:
                other = load(b, b.gep(given, [i]), float64, 8)
            else:
                other = load(b, given, double, 8)
                other = splat(b, other, lanes) if lanes > 1 else other
            value = b.fmul(value, other) if how else b.fsub(value, other)
            if how == 0:
                value = b.fsub(value, load(b, b.gep(given, [b.add(n, i)]), float64, 8))
            value = b.fsub(read(place), value) if how == 3 else value
            store(b, value if kind == float64 else b.fptrunc(value, kind), place, v.size)


@primitive
def subtract_rows(typing, target, source, stride, a, b, c, e, vectors):
    """Subtract the four rows at `source`, times a, b, c and e, from the row at `target`, of so many whole vectors.

    Numbers are float64, and rows are `stride` numbers apart.
    """
    scalar, vector = ir.DoubleType(), ir.VectorType(ir.DoubleType(), VECTOR_BYTES // 8)

    def codegen(context: Any, builder: Builder, _signature: Any, arguments: Any) -> Value:
        target, source, stride, *factors, vectors = arguments
        minus = [splat(builder, builder.fneg(factor), vector.count) for factor in factors]
        to, rows = pointer(builder, target, scalar), pointer(builder, source, scalar)
        with rolled(builder, integer(0), builder.mul(vectors, integer(vector.count)), vector.count) as at:
            place = builder.gep(to, [at])
            total = load(builder, place, vector, 8)
            for i, factor in enumerate(minus):
                row = builder.gep(rows, [builder.add(at, builder.mul(stride, integer(i)))])
                total = fma(builder, factor, load(builder, row, vector, 8), total)
            store(builder, total, place, 8)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 3), *([types.float64] * 4), types.int64), codegen


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


# The second number if it is smaller (larger), else the first. Numba compiles Python's min and max separately.
smaller, larger = _chosen("<"), _chosen(">")


@intrinsic
def fused_multiply_add(typing, x, y, z):
    """Return ``x * y + z`` rounded once."""

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        return fma(b, *arguments)

    return types.float64(types.float64, types.float64, types.float64), codegen


@primitive
def as_pointer(typing, address, array):
    """Return `address` as a pointer to numbers of the type of `array`, an array or a number."""
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
        return b.trunc(b.lshr(product, ir.Constant(wide, 64)), I64)

    return types.uint64(types.uint64, types.uint64), codegen


@primitive
def word_now(typing, at):
    """Return the int64 at an address, read from memory anew."""

    def codegen(_context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        if _PAUSE is not None:
            b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), []), _PAUSE), [])
        return b.load_atomic(pointer(b, arguments[0], I64), "acquire", 8)

    return types.int64(types.int64), codegen


@primitive
def taken(typing, at):
    """Return the int64 at an address, and add one to it atomically: threads that share it get each number once."""

    def codegen(_context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        return b.atomic_rmw("add", pointer(b, arguments[0], I64), integer(1), "monotonic")

    return types.int64(types.int64), codegen


@primitive
def added_at(typing, at, number):
    """Add a number to the int64 at an address atomically, and return the int64 from before: threads may share it."""

    def codegen(_context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        return b.atomic_rmw("add", pointer(b, arguments[0], I64), arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), codegen
