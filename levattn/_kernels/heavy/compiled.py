"""Squared attention of queries: their normalizers, and heavy entries in two passes (count, then write)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from levattn._kernels.jit import VECTOR_BYTES, jit
from levattn._kernels.llvm import load, rolled, splat, store
from levattn._kernels.scratch import empty

_I64 = ir.IntType(64)


@intrinsic
def _products(typing, Q, i, columns, z):
    """Write ⟨q, k⟩ of row `i` of Q and every selected key to z; `columns` (d, u) holds one key a column.

    All are C arrays of float64. Products are added up four by four.
    """
    if any(kind.layout != "C" for kind in (Q, columns, z)):
        raise TypingError(f"queries and keys are {Q} and {columns}, not C arrays")
    double, lanes = ir.DoubleType(), VECTOR_BYTES // 8

    def codegen(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        Q, columns, z = (context.make_array(signature.args[k])(context, b, arguments[k]) for k in (0, 2, 3))
        d, u = cgutils.unpack_tuple(b, columns.shape)
        zero, four = ir.Constant(_I64, 0), ir.Constant(_I64, 4)
        query = b.gep(Q.data, [b.mul(arguments[1], d)])
        cgutils.memset(b, z.data, b.mul(u, ir.Constant(_I64, 8)), 0)
        fours, vectors = b.sdiv(d, four), b.mul(b.sdiv(u, ir.Constant(_I64, lanes)), ir.Constant(_I64, lanes))

        def add(first: Any, count: int) -> None:
            """Add the products of so many numbers of the query to z."""
            rows = [b.add(first, ir.Constant(_I64, k)) for k in range(count)]
            factors = [b.load(b.gep(query, [r])) for r in rows]
            starts = [b.gep(columns.data, [b.mul(r, u)]) for r in rows]
            for width, start, stop in ((lanes, zero, vectors), (1, vectors, u)):
                kind = ir.VectorType(double, width) if width > 1 else double
                scales = [splat(b, f, width) if width > 1 else f for f in factors]
                with rolled(b, start, stop, width) as j:
                    terms = [
                        b.fmul(f, load(b, b.gep(row, [j]), kind, 8)) for f, row in zip(scales, starts, strict=True)
                    ]
                    while len(terms) > 1:
                        terms = [b.fadd(*terms[k : k + 2]) for k in range(0, len(terms), 2)]
                    place = b.gep(z.data, [j])
                    store(b, b.fadd(load(b, place, kind, 8), terms[0]), place, 8)

        with rolled(b, zero, fours) as i:
            add(b.mul(i, four), 4)
        with rolled(b, b.mul(fours, four), d) as i:
            add(i, 1)
        return context.get_dummy_value()

    return types.void(Q, types.int64, columns, z), codegen


@jit
def norm_tasks(Q, columns, first, last, squares):
    """Write ``‖N q‖²`` of queries ``first:last``, with ``columns = Nᵀ``."""
    z = empty(0.0, (columns.shape[1],))
    for i in range(first, last):
        _products(Q, i, columns, z)
        total = 0.0
        for j in range(len(z)):
            total += z[j] * z[j]
        squares[i] = total


@jit
def heavy_tasks(Q, columns, indices, normalizers, epsilon, first, last, starts, captured, keys, values):
    """Find the entries ``⟨q, k⟩² ≥ ε D`` of queries ``first:last``; `columns` (d, u) holds a selected key a column.

    If `keys` is empty, write their number to ``starts[i + 1]``, and the mass on all selected keys to `captured`.
    Otherwise write the entries to the places from ``starts[i]`` on.
    """
    u = columns.shape[1]
    z = empty(0.0, (u,))
    counting = len(keys) == 0
    for i in range(first, last):
        D = normalizers[i]
        count, at, mass = 0, starts[i], 0.0
        if D > 0 and (counting or starts[i + 1] > at):
            _products(Q, i, columns, z)
            for j in range(u):
                score = z[j] * z[j] / D
                mass += score
                if score >= epsilon:
                    if not counting:
                        keys[at + count], values[at + count] = indices[j], score
                    count += 1
        if counting:
            starts[i + 1], captured[i] = count, mass
