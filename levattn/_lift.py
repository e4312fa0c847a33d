"""The lift: products of m coordinates, in which ``⟨k, q⟩^(2m)`` is a square and so has leverage scores and moments."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import numpy.typing as npt

from levattn._array import to_numpy
from levattn._kernels import Float64, Rows, precise_products, query_norms
from levattn._threads import parallel_for
from levattn.linalg import UNIT, Factor, dense

__all__ = ["lift_columns", "lifted_keys", "lifted_rows", "lifted_sums"]

_MILD_CONDITION = 100.0  # up to which products with a whitening matrix keep their digits
_ROWS = 512  # that are lifted at a time
_ENTRIES = 1 << 22  # numbers in a block of lifted queries


def lift_columns(d: int, m: int) -> int:
    """Return the number of products of m of d coordinates."""
    return math.comb(d + m - 1, m)


def lifted_keys(factor: Factor, m: int) -> Rows:
    """Return products of m coordinates of the whitened keys, so weighted that ``⟨φ(k), φ(q)⟩ = ⟨k, q⟩^m``.

    The scores of a lift do not depend on the basis of the keys, but its condition number is the m-th power of theirs.
    """
    rows = factor.rows
    b, n, _ = rows.shape
    keys: Float64 = np.zeros((b, n, max(int(factor.rank.max(initial=1)), 1)))
    for item in range(b):
        W = factor.whitening[item]
        live = np.any(W != 0, axis=0)
        N, exponents = factor.even_normalizer(item)
        W = np.ldexp(W if rows.scale is None else W * rows.scale[item][:, None], exponents[:, None])[:, live]
        K = np.ldexp(dense(replace(rows.item(item), scale=None), 0, n), -exponents)
        s = np.linalg.svd(N, compute_uv=False)
        mild = live.any() and s[0] <= _MILD_CONDITION * s[int(live.sum()) - 1]
        keys[item, :, : W.shape[1]] = K @ W if mild else precise_products(K, np.ascontiguousarray(W.T))
    lifted: Float64 = np.empty((b, n, lift_columns(keys.shape[2], m)))
    for item in range(b):
        _lift(keys[item], m, lifted[item])
    return Rows(lifted, "float64", None if rows.mask is None else to_numpy(rows.mask))


def lifted_rows(rows: Rows, m: int) -> Rows:
    """Return products of m coordinates of the rows as they are, so weighted that ``⟨φ(k), φ(q)⟩ = ⟨k, q⟩^m``."""
    b, n, d = rows.shape
    lifted: Float64 = np.empty((b, n, lift_columns(d, m)))
    for item in range(b):
        _lift(dense(rows.item(item), 0, n), m, lifted[item])
    return Rows(lifted, "float64")


def lifted_sums(Q: Float64, factor: Factor, lift: Factor, m: int) -> tuple[Float64, Float64]:
    """Return ``Σ ⟨k, q⟩^(2m)`` over the keys for every query, and its estimated relative error.

    `factor` is that of the keys, one matrix of full rank, and `lift` that of `lifted_keys`. The queries are such that
    ``Σ ⟨k, q⟩²`` is about 1, or 0.
    """
    N, exponents = factor.even_normalizer(0)
    M, lifted_exponents = lift.even_normalizer(0)
    d = Q.shape[1]
    D, error = np.zeros(len(Q)), np.zeros(len(Q))
    step = max(16, _ENTRIES // len(M))
    for start in range(0, len(Q), step):
        part = slice(start, start + step)
        q = np.ldexp(Q[part], exponents)
        turned = q @ N.T  # ⟨k, q⟩ = ⟨kW, Nq⟩
        lifted = np.empty((len(q), lift_columns(d, m)))
        _lift(turned, m, lifted)
        D[part], size = query_norms(np.ldexp(lifted, lifted_exponents), M)
        # Rounding moves Nq by `moved`, and so the p-norm of its products with orthonormal columns by no more.
        moved = d * UNIT * np.linalg.norm(np.abs(q) @ np.abs(N).T, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            error[part] = 2 * m * moved / D[part] ** (0.5 / m) + 2 * UNIT * np.sqrt(len(M) * size / D[part])
    return D, error + float(lift.error[0]) + 4 * m * UNIT


def _lift(X: Float64, m: int, out: Float64) -> None:
    """Write the weighted products of m coordinates of each row of X."""
    indices = np.array(list(combinations_with_replacement(range(X.shape[1]), m)))
    orders = [math.prod(math.factorial(int(np.count_nonzero(index == i))) for i in set(index)) for index in indices]
    factors = np.sqrt(math.factorial(m) / np.array(orders, np.float64))
    columns: list[npt.NDArray[np.int64]] = list(indices.T)

    def body(part: slice) -> None:
        products = X[part][:, columns[0]] * factors
        for column in columns[1:]:
            products *= X[part][:, column]
        out[part] = products

    parallel_for(lambda i: body(slice(_ROWS * i, _ROWS * (i + 1))), -(-len(X) // _ROWS))
