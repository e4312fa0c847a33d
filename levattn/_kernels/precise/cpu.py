"""Products and solutions in more bits than float64 has, and exact row spaces, on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.threads import parallel_for
from levattn._core.types import Float64
from levattn._kernels.precise.double_double import (
    TALL,
    WIDTH,
    product_rows,
    product_tasks,
    solve_tasks,
    split_means,
)
from levattn._kernels.precise.span import (
    entry_product_tasks,
    field,
    insert_entries,
    insert_rows,
    mark_products,
    mark_zeros,
    orthogonal_vector,
    relation_vector,
)
from levattn._kernels.tasks import share, threads_for

__all__ = [
    "expanded_product",
    "field",
    "insert_entries",
    "insert_rows",
    "mark_entry_products",
    "mark_products",
    "mark_zeros",
    "mean_parts",
    "orthogonal_vector",
    "precise_products",
    "precise_solutions",
    "relation_vector",
]


_PART_COST = 10.0  # cost of each part but the first, relative to a multiply-add
_RESIDUE_COST = 20.0  # cost of a product modulo a prime, relative to a multiply-add
_RANGE = 2.0**-900, 2.0**900  # of means whose parts neither underflow nor overflow, nor do products of keys


def precise_products(Q: Float64, keys: Float64) -> Float64:
    """Multiply queries by keys."""
    columns = np.ascontiguousarray(keys.T)
    Z = np.empty((len(Q), len(keys)))
    share(lambda first, last: product_tasks(Q, columns, first, last, Z), len(Q), 10.0 * len(Q) * keys.size)
    return Z


def precise_solutions(B: Float64, Q: Float64) -> Float64:
    """Solve triangular systems."""
    columns = np.ascontiguousarray(B.T)
    X = np.empty_like(Q)
    share(lambda first, last: solve_tasks(columns, Q, first, last, X), len(Q), 5.0 * len(Q) * B.size)
    return X


def mark_entry_products(
    field: Any, indptr: Any, indices: Any, values: Any, mask: Any, v: Any, out: npt.NDArray[np.bool_]
) -> None:
    """Mark sparse rows that are not orthogonal to v."""
    held = field, indptr, indices, values, mask, v
    work = _RESIDUE_COST * float(indptr[-1] - indptr[0])
    share(lambda first, last: entry_product_tasks(*held, first, last, out), len(out), work)


def mean_parts(origin: Float64, sums: tuple[Float64, Float64], counts: Float64) -> tuple[Float64, bool]:
    """Divide twofold sums by counts, and add an origin."""
    parts = np.empty((len(origin), 3, origin.shape[1]))
    found = split_means(*map(np.ascontiguousarray, (origin, *sums, counts)), *_RANGE, parts)
    return parts, bool(found)


def expanded_product(pairs: Iterable[tuple[Float64, Float64]], d: int, *, symmetric: bool, folds: int = 2) -> Float64:
    """Sum up products in numbers of several parts."""
    width = -(-d // WIDTH) * WIDTH
    out = np.zeros((folds, width, width))
    for A, X in pairs:
        right = _padded(X, width)
        left = right if A is X else _padded(A, width)
        work = _PART_COST * (folds - 1) * len(X) * width * width / (2 if symmetric else 1)
        threads = threads_for(work)
        parts = 4 * threads if symmetric and threads > 1 else threads  # the first rows of a triangle are longer
        edges = np.linspace(0, width // TALL, parts + 1).astype(int) * TALL

        def body(part: int, left: Float64 = left, right: Float64 = right, edges: Any = edges) -> None:
            product_rows(left, right, edges[part], edges[part + 1], symmetric, out)

        if len(X):
            parallel_for(body, parts, threads=threads)
    out = out[:, :d, :d]
    return np.ascontiguousarray(np.triu(out) + np.triu(out, 1).swapaxes(1, 2) if symmetric else out)


def _padded(X: Float64, width: int) -> Float64:
    """Return X as a C array with columns of zeros on the right, or X itself if it is one already."""
    if X.shape[1] == width and X.flags.c_contiguous:
        return X
    out = np.zeros((len(X), width))
    out[:, : X.shape[1]] = X
    return out
