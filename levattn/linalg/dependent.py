"""Rank-deficient sparse keys, such as designs with several full sets of dummies, by their plain moments alone.

A basis of the row space is dense, and so are keys in it. Instead, independent columns represent all columns, and their
inverse Cholesky factor gives the scores. Exact linear relations prove that the other columns add no direction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from levattn._core.blas import lapack
from levattn._core.types import Flags, Float64, Int64
from levattn._kernels import FACTOR, KEYS, Rows
from levattn.linalg.accumulator import PLAIN_NOISE, UNIT
from levattn.linalg.factor import upper_form
from levattn.linalg.preconditioned import ROUNDING, MatrixFactor
from levattn.linalg.span import Relations, Span

_LARGEST_DENOMINATOR = 12  # of the numbers that relations are guessed to consist of
_MANY = 32  # columns for each relation up to which LAPACK projects faster than rotations do
_NEAR = 2.0**-20  # by which such numbers are missed at most, times the denominator


@dataclass(frozen=True)
class Dependent:
    """The exact row space of keys, and their factor; None if their plain moments do not give one of that rank.

    spread: the sum of the squares of W, for columns of unit norm.
    """

    space: Relations | Span | None
    found: MatrixFactor | None = None
    spread: float = 0.0


def factor_dependent(rows: Rows, G: Float64, target: float) -> Dependent:
    """Factor rank-deficient sparse keys, a batch of one, whose plain moments are G, (d, d).

    The error of a score, of rounded moments, is at most `target`, as for independent columns. The rank is exact. The
    bound of the inverse shows that the chosen columns are independent. Relations, or else the exact row space, show
    that the other columns depend on them.
    """
    c = np.sqrt(np.diag(G))
    live = c > 0
    c = c[live]
    H = G[np.ix_(live, live)] / c[:, None] / c
    chosen = _independent(H, _entries(rows)[live], ROUNDING / target)
    if chosen.all() or not chosen.any():
        return Dependent(None)
    kept, others = np.flatnonzero(chosen), np.flatnonzero(~chosen)
    made = FACTOR.inverse_cholesky(H[np.ix_(kept, kept)][None], limit=target / ROUNDING)
    if not (made.pivot[0] > 0 and ROUNDING * made.bound[0] <= target):
        return Dependent(None)
    W, Z = made.W[0], np.zeros((len(c), len(others)))
    Z[kept], Z[others] = -(W @ (W.T @ H[np.ix_(kept, others)])), np.eye(len(others))
    space: Relations | Span | None = _relations(rows, live, Z, c, others)
    if space is None:
        space = Span.of(rows)
        if space.rank != len(kept):
            return Dependent(space)
    Q = lapack(np.linalg.qr, Z)[0]
    whitening, bound = _projected(W, kept, Q), float(made.bound[0])
    error = PLAIN_NOISE * bound + 8 * UNIT * float(np.sqrt(len(c) * bound))
    spread = float(np.sum(whitening * whitening))
    whitening /= c[:, None]
    found = MatrixFactor(whitening, whitening, None, len(kept), error, Q, c).embedded(live)
    return Dependent(space, found, spread)


def _entries(rows: Rows) -> Int64:
    """Return the number of entries of each column."""
    return np.bincount(rows.keys.entries()[0], minlength=rows.shape[2])


def _independent(H: Float64, entries: Int64, tolerance: float) -> Flags:
    """Choose independent columns of keys with moments H, of unit diagonal: pivots above the tolerance.

    Columns of few entries come first: of a full set of dummies, the level with the most keys is left out.
    """
    from levattn._kernels.factor.dependent import mark_independent  # here, because it loads Numba
    from levattn._kernels.gram.cpu import LAPACK_COLUMNS

    out = np.zeros(len(H), np.bool_)
    order = np.argsort(entries, kind="stable")
    if len(H) < LAPACK_COLUMNS:
        mark = np.empty(len(H), np.bool_)
        mark_independent(H[np.ix_(order, order)], tolerance, mark)
        out[order] = mark
    else:
        from scipy.linalg.lapack import dpstrf

        # BLAS pays for its threads, and LAPACK chooses columns by their pivots
        _, pivots, rank, _ = lapack(dpstrf, H, tol=tolerance)
        out[pivots[:rank] - 1] = True
    return out


def _projected(W: Float64, kept: Int64, Q: Float64) -> Float64:
    """Return an upper triangle (d, d) with the scores of W, (r, r), for the kept columns, and columns orthogonal to Q.

    Its columns then span the row space.
    """
    from levattn._kernels.factor.dependent import project_triangle

    d, r = len(Q), len(W)
    columns = np.zeros((r, d))
    columns[:, kept] = W.T
    if d - r > d // _MANY:
        return upper_form(columns.T - Q @ (Q.T @ columns.T))
    project_triangle(columns, Q)
    out = np.zeros((d, d))
    out[:, d - r :] = columns.T
    return out


def _relations(rows: Rows, live: Flags, Z: Float64, c: Float64, others: Int64) -> Relations | None:
    """Return exact relations near Z, which is for equilibrated columns; None where no guess holds for all keys.

    A guess has small denominators, for columns as they are stored or for columns divided by their largest entry.
    """
    places = np.flatnonzero(live)
    stored = replace(rows, scale=None, weights=None)
    with np.errstate(all="ignore"):
        factors = (np.ones(len(c)) if rows.scale is None else rows.scale[0, places]) / c
        plain = Z * (factors[:, None] / factors[others])
        top, bottom = _ratios(plain)
        unit, odd = np.ones(Z.shape), ~(bottom > 0).all(axis=0)
        if odd.any():
            largest = KEYS.column_figures(stored, largest=True)[0, places]
            top[:, odd], bottom[:, odd] = _ratios((plain * (largest[:, None] / largest[others]))[:, odd])
            unit[:, odd] = largest[:, None]
    if not (bottom > 0).all():
        return None
    d, dead = len(live), np.flatnonzero(~live)
    parts = np.zeros((d, len(others) + len(dead))), *(np.ones((d, len(others) + len(dead))) for _ in range(2))
    for whole, part in zip(parts, (top, bottom, unit), strict=True):
        whole[places, : len(others)] = part
    parts[0][dead, len(others) + np.arange(len(dead))] = 1
    found = Relations(*parts)
    return None if found.outside(rows).any() else found


def _ratios(Z: Float64) -> tuple[Float64, Float64]:
    """Return the integers ``a / b`` that numbers are near to, for the smallest b; b is 0 where there is none."""
    top, bottom = np.zeros(Z.shape), np.zeros(Z.shape)
    for b in range(1, _LARGEST_DENOMINATOR + 1):
        left = bottom == 0
        if not left.any():
            break
        near = np.rint(Z * b)
        hit = left & (np.abs(Z * b - near) <= _NEAR)
        top[hit], bottom[hit] = near[hit], b
    return top, bottom
