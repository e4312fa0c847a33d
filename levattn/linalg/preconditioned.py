"""Ill-conditioned matrices: a basis in which the keys are well-conditioned, and the factor computed in it.

A factorization is a generator. It yields a basis and an arithmetic, and receives the moments of its keys in that
basis, summed in that arithmetic. So the factorizations of a batch run side by side, and one pass sums moments for all.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from levattn._core.blas import lapack
from levattn._core.types import Float64
from levattn._kernels import FACTOR, Arithmetic, Rows
from levattn._kernels.factor.norms import multiply, spectral_norm
from levattn.linalg.accumulator import PLAIN_NOISE, UNIT
from levattn.linalg.factor import column_norms, upper_form
from levattn.linalg.span import Span

ROUNDING = 2 * UNIT  # of moments summed in float64
SURE_CONDITION = 2e5  # condition above which products are compensated: float64 of few columns, factors of LAPACK
_NOISE = 2.0**-40  # singular values below this, of unit columns, may come from rounding of many equal rows
MOST_ROUNDS = 40  # three suffice for any condition number up to the cut, and for each scale of lost directions
SPLIT_ERROR = 2.0**-74  # relative error of products with a basis of condition 1 that is split into bits
_FINE_CUT = 2.0**-64  # the rank tolerance where products are compensated from the beginning

# returns the moments of the keys of the listed matrices, (k,), each in its own basis, (k, d, d)
MomentsInBasis = Callable[[list[int], Float64, Arithmetic], Float64]


@dataclass(frozen=True)
class MatrixFactor:
    """The factor of one matrix: the fields of `Factor`; `columns` are the column norms of the null directions."""

    whitening: Float64
    basis: Float64
    correction: Float64 | None
    rank: int
    error: float
    null_directions: Float64
    columns: Float64

    def embedded(self, live: npt.NDArray[np.bool_]) -> MatrixFactor:
        """Return the factor of all columns, when this one is of the live columns and the others are zero."""
        if live.all():
            return self

        def square(A: Float64) -> Float64:
            out = np.zeros((len(live), len(live)))
            out[np.ix_(live, live)] = A
            return out

        null_directions, columns = np.zeros((len(live), self.null_directions.shape[1])), np.full(len(live), np.inf)
        null_directions[live], columns[live] = self.null_directions, self.columns
        correction = None if self.correction is None else square(self.correction)
        return MatrixFactor(
            square(self.whitening), square(self.basis), correction, self.rank, self.error, null_directions, columns
        )


Steps = Generator[tuple[Float64, Arithmetic], Float64, MatrixFactor]


def answered(steps: Sequence[Steps], moments_in: MomentsInBasis) -> list[MatrixFactor]:
    """Run factorizations side by side, sum the moments of each round at once, and return the factors."""
    found: dict[int, MatrixFactor] = {}
    answers: dict[int, Float64] = {}
    left = list(range(len(steps)))
    while left:
        asked: dict[Arithmetic, dict[int, Float64]] = {}
        for i in left:
            try:
                basis, arithmetic = steps[i].send(answers[i]) if i in answers else next(steps[i])
            except StopIteration as done:
                found[i] = done.value
            else:
                asked.setdefault(arithmetic, {})[i] = basis
        for arithmetic, bases in asked.items():
            moments = moments_in(list(bases), np.stack(list(bases.values())), arithmetic)
            answers.update(zip(bases, moments, strict=True))
        left = [i for i in left if i not in found]
    return [found[i] for i in range(len(steps))]


def decompose(R: Float64, penalty: Float64, cut: float, keys: Rows | None = None) -> Steps:
    """Factor one matrix by the singular value decomposition of R, the matrix itself or its triangle from a QR.

    Equal rows are rounded alike, so noise grows with their number. Where `keys` are given, their exact rank tells
    small singular values from noise.
    """
    some = np.any(R != 0, axis=0) | (penalty > 0)
    if not some.all():
        return (yield from _of_columns(decompose(R[:, some], penalty[some], cut, keys), some))
    if penalty.any():
        R = np.vstack([R, np.diag(np.sqrt(penalty))])
    c = column_norms(R)
    _, s, Vt = lapack(np.linalg.svd, R / c, full_matrices=False)
    live = s > cut * s.max(initial=0.0)
    if keys is not None and live.any() and s[live].min() < _NOISE * s.max():
        live &= np.arange(len(s)) < Span.of(keys).rank
    W = upper_form(Vt[live].T / s[live]) / c[:, None]
    condition = float(s[live].max() / s[live].min()) if live.any() else 1.0
    return (yield from _finish(W, c, _complement(Vt[live]), penalty, condition, SURE_CONDITION))


def _of_columns(steps: Steps, some: npt.NDArray[np.bool_]) -> Steps:
    """Factor some columns of the keys; the others are zero."""
    places = np.ix_(some, some)
    try:
        basis, arithmetic = next(steps)
        while True:
            whole = np.zeros((len(some), len(some)))
            whole[places] = basis
            moments = yield whole, arithmetic
            basis, arithmetic = steps.send(moments[places])
    except StopIteration as done:
        found: MatrixFactor = done.value
        return found.embedded(some)


def _complement(V: Float64) -> Float64:
    """Return an orthonormal basis (d, k) of the orthogonal complement of the orthonormal rows V."""
    r, d = V.shape
    return np.asarray(lapack(np.linalg.svd, V)[2][r:].T if r else np.eye(d))


def precondition(
    G: Float64,
    penalty: Float64,
    noise: float,
    target: float,
    cut: float,
    limit: float,
    begun: tuple[Float64, Float64] | None = None,
) -> Steps:
    """Factor one ill-conditioned or rank-deficient matrix, whose moments G are known up to `noise`.

    `begun` may give a basis of all its columns to begin with, and the moments of its keys in it, known up to rounding.

    Each round multiplies the keys by the inverse of a (shifted) Cholesky factor, which divides their condition
    number by up to 1/√(d · noise). The rounds end when it is so small that the moments determine the rest. Directions
    with a singular value below the cut are left out.
    """
    d = G.shape[0]
    H = G + np.diag(penalty)
    c = np.sqrt(np.diag(H))
    some: npt.NDArray[np.bool_] = c > 0
    if not some.all():
        part = G[np.ix_(some, some)], penalty[some]
        return (yield from _of_columns(precondition(*part, noise, target, cut, limit), some))
    largest = np.sqrt(spectral_norm(H / c[:, None] / c))  # singular value of the equilibrated keys
    null_directions = np.zeros((d, 0))
    basis: Float64 | None = None
    if begun is not None:
        basis, H = begun

    for _ in range(MOST_ROUNDS):
        made = FACTOR.rebased(
            H[None],
            c[None],
            None if basis is None else basis[None],
            16 * d * noise,
            target / ROUNDING if noise <= UNIT else 0.0,
        )
        C, W = made.C[0], made.W[0]
        lost = np.zeros((d, 0))
        if not made.frobenius()[0] * (cut * largest) < 1:
            lost = _lost_directions(c[:, None] * W, cut * largest)
        if basis is not None:  # basis vectors that the keys map to zero
            vanished = ~np.any(C != 0, axis=0) & np.any(basis != 0, axis=0)
            lost = np.hstack([lost, c[:, None] * basis[:, vanished]])
        if lost.shape[1]:
            null_directions = _orthonormal(np.hstack([null_directions, lost]))
        if not W.any() or null_directions.shape[1] == d:  # failed: no column is zero, so the rank cannot be 0
            return MatrixFactor(np.zeros((d, d)), np.zeros((d, d)), None, 0, np.inf if d else 0.0, null_directions, c)
        if lost.shape[1]:
            basis = upper_form(_complement(null_directions.T)) / c[:, None]
        elif made.good[0]:
            break
        else:
            basis = W
        H = (yield basis, "double") + _penalty_in_basis(basis, penalty)
        noise = UNIT
    condition = float(largest * made.spectral()[0])
    return (yield from _finish(W, c, null_directions, penalty, condition, limit, float(made.bound[0])))


def resolve(moments_in: MomentsInBasis, G: Float64, noise: float, target: float, limit: float) -> MatrixFactor:
    """Factor a matrix again with compensated products from the beginning, to resolve smaller directions."""
    steps = precondition(G, np.zeros(len(G)), noise, target, _FINE_CUT, limit)
    return answered([steps], lambda which, B, _: moments_in(which, B, "compensated"))[0]


def _lost_directions(W: Float64, cut: float) -> Float64:
    """Return the left singular vectors of W with a singular value of at least 1/cut (and near the largest).

    Where W whitens the equilibrated keys, these are the directions in which the keys nearly vanish.
    """
    U, s, _ = lapack(np.linalg.svd, W)
    return np.asarray(U[:, (s * cut >= 1) & (s >= 1e-3 * s.max())])  # larger values hide smaller ones


def _penalty_in_basis(basis: Float64, penalty: Float64) -> Float64 | float:
    """Return the ridge term of the moments of the keys in another basis."""
    return multiply(basis.T, penalty[:, None] * basis) if penalty.any() else 0.0


def _finish(
    W: Float64,
    c: Float64,
    null_directions: Float64,
    penalty: Float64,
    condition: float,
    limit: float,
    inverse_norm_bound: float | None = None,
) -> Steps:
    """Accept W where the norm of its inverse is bounded, or correct it by moments of the keys in that basis.

    These moments have compensated products where the condition is above the limit.
    """
    kept = np.any(W != 0, axis=0)
    rank, fine = int(np.count_nonzero(kept)), condition > limit
    rounding = (SPLIT_ERROR if fine else 2 * UNIT) * condition  # of the keys in that basis, before they are summed
    if inverse_norm_bound is not None and not fine:
        return MatrixFactor(W, W, None, rank, PLAIN_NOISE * inverse_norm_bound + rounding, null_directions, c)
    G = yield W, "compensated" if fine else "double"
    again = FACTOR.inverse_cholesky((G + _penalty_in_basis(W, penalty))[None])
    C = again.W[0]
    if not (again.pivot[0] > 0 and np.array_equal(np.any(C != 0, axis=0), kept)):  # W does not whiten the keys
        return MatrixFactor(W, W, None, rank, np.inf, null_directions, c)
    whitening, error = multiply(W, C), PLAIN_NOISE * float(again.bound[0]) + rounding
    return MatrixFactor(whitening, W if fine else whitening, C if fine else None, rank, error, null_directions, c)


def _orthonormal(A: Float64) -> Float64:
    """Return an orthonormal basis of the columns of A, whatever their norms."""
    A = A / np.linalg.norm(A, axis=0)
    U, s, _ = lapack(np.linalg.svd, A, full_matrices=False)
    return np.asarray(U[:, s > 1e-8 * s.max(initial=1e-300)])
