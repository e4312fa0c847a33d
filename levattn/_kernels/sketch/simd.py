"""Vector code of sketches: rows added with signs, and Hadamard transforms of a few rows. Steps are in bytes."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from levattn._kernels.llvm import (
    Builder,
    Value,
    fma,
    integer,
    load,
    pointer,
    prefetch,
    primitive,
    splat,
    store,
    vector_type,
)


@intrinsic
def add_signed(typing, like, total, source, target, sign, vectors, ahead, next_target):
    """Add vectors of numbers like `like` at `source`, times `sign`, to numbers like `total` at `target`.

    Meanwhile as many numbers `ahead` bytes after the source, and at `next_target`, are fetched into the cache.
    """
    size, scalar, vector = vector_type(like)
    wider, sums, _ = vector_type(total)
    signature = types.void(like, total, types.int64, types.int64, total.dtype, types.int64, types.int64, types.int64)
    doubles = ir.VectorType(sums, vector.count)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        source, target, sign, vectors, ahead, next_target = arguments[2:]
        factor = splat(b, sign, vector.count)
        with cgutils.for_range(b, vectors) as loop:
            at = b.mul(loop.index, integer(vector.count))
            from_ = b.add(source, b.mul(at, integer(size)))
            value = load(b, pointer(b, from_, scalar), vector, size)
            place = b.gep(pointer(b, target, sums), [at])
            prefetch(b, b.add(from_, ahead))
            for line in range(0, wider * vector.count, 64):
                prefetch(b, b.add(next_target, b.add(b.mul(at, integer(wider)), integer(line))))
            value = b.fpext(value, doubles) if wider > size else value
            store(b, fma(b, factor, value, load(b, place, doubles, wider)), place, wider)
        return context.get_dummy_value()

    return signature, codegen


@primitive
def hadamard_tile(typing, like, total, rows, signed, source, step, signs, target, target_step, vectors):
    """Write the Hadamard transform of `rows` rows at `source` to rows at `target`, which may be the same.

    Rows are `step` and `target_step` bytes apart. Numbers like `like` become numbers like `total`; if `signed`,
    they are first multiplied by the numbers at `signs`.
    """
    signature = types.void(like, total, rows, signed, *([types.int64] * 6))
    count, with_signs = int(rows.literal_value), int(signed.literal_value)
    size, scalar, _ = vector_type(like)
    wider, sums, vector = vector_type(total)
    loaded = ir.VectorType(scalar, vector.count)

    def codegen(context: Any, b: Builder, _signature: Any, arguments: Any) -> Value:
        source, step, signs, target, target_step, vectors = arguments[4:]
        with cgutils.for_range(b, vectors) as loop:
            at = b.mul(loop.index, integer(vector.count))
            from_, to = b.add(source, b.mul(at, integer(size))), b.add(target, b.mul(at, integer(wider)))
            values = []
            for i in range(count):
                place = b.add(from_, b.mul(step, integer(i)))
                value = load(b, pointer(b, place, scalar), loaded, size)
                value = b.fpext(value, vector) if wider > size else value
                if with_signs:
                    at_sign = pointer(b, b.add(signs, integer(i * wider)), sums)
                    value = b.fmul(value, splat(b, load(b, at_sign, sums, wider), vector.count))
                values.append(value)
            half = 1
            while half < count:
                values = [
                    b.fsub(values[i - half], values[i]) if i & half else b.fadd(values[i], values[i + half])
                    for i in range(count)
                ]
                half *= 2
            for i, value in enumerate(values):
                place = b.add(to, b.mul(target_step, integer(i)))
                store(b, value, pointer(b, place, sums), wider)
        return context.get_dummy_value()

    return signature, codegen
