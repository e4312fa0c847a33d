"""Scratch arrays of kernels, made in compiled code: Numba would first compile NumPy's functions, one by one."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from levattn._kernels.jit import helper
from levattn._kernels.llvm import as_pointer


def _define(like: Any, shape: Any, cleared: bool) -> Any:
    dtype = like.dtype if isinstance(like, types.Array) else types.unliteral(like)
    array = types.Array(dtype, len(shape), "C")

    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        lengths = cgutils.unpack_tuple(b, context.cast(b, arguments[1], shape, types.UniTuple(types.intp, len(shape))))
        kind = context.get_data_type(dtype)
        itemsize = ir.Constant(lengths[0].type, dtype.bitwidth // 8)
        strides = [itemsize]
        for length in reversed(lengths[1:]):
            strides.insert(0, b.mul(strides[0], length))
        size = b.mul(strides[0], lengths[0])
        align = ir.Constant(ir.IntType(32), context.get_preferred_array_alignment(dtype))
        held = context.nrt.meminfo_alloc_aligned(b, size, align)  # or raises MemoryError
        data = context.nrt.meminfo_data(b, held)
        if cleared:
            cgutils.memset(b, data, size, 0)
        made = context.make_array(array)(context, b)
        made.data = b.bitcast(data, kind.as_pointer())
        made.shape = cgutils.pack_array(b, lengths)
        made.strides = cgutils.pack_array(b, strides)
        made.itemsize = itemsize
        made.nitems = b.udiv(size, itemsize)
        made.meminfo = held
        made.parent = cgutils.get_null_value(made.parent.type)
        return made._getvalue()

    return array(like, shape), codegen


@intrinsic
def empty(typing, like, shape):
    """Return an array of `shape` (a tuple) whose numbers have the type of `like`, an array or a number.

    Lengths are not checked: none may be negative, and their product must not overflow.
    """
    return _define(like, shape, cleared=False)


@intrinsic
def zeros(typing, like, shape):
    """Return an array as `empty` does, filled with zeros."""
    return _define(like, shape, cleared=True)


@intrinsic
def clear(typing, array, first, count):
    """Write zeros to `count` numbers of a C array, from the number `first` on."""
    if array.layout != "C":
        raise TypingError(f"{array} is no C array")
    size = array.dtype.bitwidth // 8

    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        held = context.make_array(array)(context, b, arguments[0])
        first, count = arguments[1:]
        cgutils.memset(b, b.gep(held.data, [first]), b.mul(count, ir.Constant(count.type, size)), 0)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


@helper
def fill(like, at, n, value):
    """Write `n` equal numbers, of the type of the pointer `like`, to an address."""
    target = as_pointer(at, like)
    for j in range(n):
        target[j] = value


@helper
def filled(like, size, value):
    """Return an array of `size` equal numbers."""
    made = empty(like, (size,))
    for i in range(size):
        made[i] = value
    return made
