"""How keys are factored: moments summed once, in another basis where that would not do, QR and SVD."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_device, to_numpy
from levattn._core.sparse import Csr
from levattn._core.types import Float64
from levattn._kernels import BLOCK, Arithmetic, Rows, kernels_for
from levattn._kernels.factor.contract import Inverses
from levattn._kernels.factor.norms import spectral_norm
from levattn.linalg.factor import Factor, column_norms, float64_rows
from levattn.linalg.gram import PLAIN_ERROR, PLAIN_NOISE, UNIT, DoubleDouble, second_moments
from levattn.linalg.preconditioned import (
    ROUNDING,
    SURE_CONDITION,
    MatrixFactor,
    MomentsInBasis,
    decompose,
    precondition,
    resolve,
)
from levattn.linalg.reading import require_finite
from levattn.linalg.span import Span

__all__ = ["centered", "factor_moments", "factor_qr", "factor_sum", "rank_tolerance"]

# Largest relative error of a score at which a route is taken, as keys without copies have it; tuned by
# examples/benchmarks/accuracy.py. What is claimed is `PLAIN_NOISE`, for copies.
_DOUBLE_ERROR = {"float64": 2e-12, "float32": 2e-8, "float16": 2e-8, "bfloat16": 2e-8}
_BASIS_CONDITION = {"float64": 3e6, "float32": 1e10, "float16": 1e10, "bfloat16": 1e10}  # up to which W is one matrix
_SURE_COLUMNS = 48
_FEW_ROWS = 2  # rows a column up to which an ill-conditioned matrix is decomposed as a whole
_SAMPLED_FROM = 4 * BLOCK  # rows from which some tell whether sums in float32 would do
_SAMPLE, _ISOTROPIC = BLOCK // 8, 1.3  # how many, and the figure up to which they say so
_SINGLE_SUMS = 4.0  # squared norm of the inverse up to which they do
_PIECE_FROM = 16 * BLOCK  # rows from which a block tells what is ill-conditioned,
_HARD = 4.0  # by so many times the limit, up to a squared norm of the inverse that rounding cannot have made:
_RESOLVED = 2.0**46  # a block that lacks a direction of the keys says nothing of it
_RANGE = 2.0**-80, 2.0**110  # of squares in float32, for each row
_SINGLE_PRODUCTS = 2.0**-17  # estimated relative error of scores up to which products are in float32
_TWOFOLD_ERROR = 2.0**-96  # the same in twofold arithmetic
_TRIANGLE_NOISE = 2e-9  # relative error of a second moment of the triangle of many rows
_FINE_ERROR = 2.0**-7  # estimated relative error of scores up to which such a factor is taken


def _limit(format: str, d: int) -> float:
    """Return the condition number from which on products with W are formed in more than float64."""
    return SURE_CONDITION if format == "float64" and d <= _SURE_COLUMNS else _BASIS_CONDITION[format]


def rank_tolerance(d: int) -> float:
    """Return the relative size below which a singular value of equilibrated keys is rounding noise in float64.

    It does not grow with n: rounding errors of single rows, like the rows themselves, add up as √n.
    """
    return 16 * float(np.sqrt(d)) * 2 * UNIT


def centered(rows: Rows, *, center: bool) -> Rows:
    """Return the rows with what must be known before their moments are summed: the mean, if asked for."""
    if not center:
        return rows
    b, n, _ = rows.shape
    counts = np.full(b, n) if rows.mask is None else to_numpy(rows.mask).sum(axis=1)
    divisor = np.maximum(counts, 1)[:, None]
    sums = rows.column_sums()
    if require_finite(rows, sums):
        raise ValueError("the column sums of K overflow float64, so K cannot be centered; scale K down first")
    centered = replace(rows, shift=sums / divisor)
    # once more, so that the rounding of the first mean does not leave a direction of its own
    rest = centered.column_sums() / divisor
    return replace(rows, shift=sums / divisor + rest)


def _moments(
    rows: Rows, items: Sequence[int], *, basis: Float64 | None = None, arithmetic: Arithmetic = "double"
) -> Any:
    """Return what `second_moments` does; the threads share sparse keys by columns, so their rows stay in one piece."""
    if isinstance(rows.keys, Csr):
        whole = np.array([[0, 0, 0, rows.shape[1]]])
        return np.asarray(kernels_for("gram", rows.keys).moments(rows, whole, basis=basis, arithmetic=arithmetic))
    return second_moments(rows, items, basis=basis, arithmetic=arithmetic)


def _plain_moments(rows: Rows, items: list[int], quick: npt.NDArray[np.bool_]) -> Any:
    """Return the moments of some matrices, in float32 blocks of those that `quick`, a flag for each matrix, names."""
    places = np.flatnonzero(quick[items])
    if len(places) == len(items) > 0:
        return _moments(rows, items, arithmetic="single")
    G = _moments(rows, items)
    if len(places):
        G[to_device(places, G)] = _moments(rows, [items[place] for place in places], arithmetic="single")
    return G


def _isotropic(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return which matrices have rows in the middle that are about as long in every direction, (b,).

    With columns scaled to unit norm and moment C of m rows, ‖C‖²/d − d/m is about 1 for them; keys of real heads,
    which have a mean and directions that they prefer, were at 1.5 to 9.
    """
    _, n, d = rows.shape
    start = n // 2 // BLOCK * BLOCK
    G = to_numpy(_moments(rows.between(start, start + _SAMPLE), range(rows.shape[0]), arithmetic="single"))
    with np.errstate(all="ignore"):  # what is not finite is not isotropic
        diagonal = np.diagonal(G, axis1=1, axis2=2)
        inverse = np.where(diagonal == 0, 0.0, 1 / diagonal)  # a column of zeros here says nothing
        # threads of BLAS would go on spinning beside the pass of moments
        squares = (inverse * np.einsum("bij,bj->bi", np.square(G), inverse)).sum(axis=1)
    return np.asarray(squares / d - d / _SAMPLE <= _ISOTROPIC)


def _begun(rows: Rows, target: float, quick: npt.NDArray[np.bool_]) -> dict[int, tuple[Float64, Float64, Float64]]:
    """Return a basis B and the moments H of K B, of matrices too ill-conditioned for plain ones, and those of K.

    A block in the middle tells. B whitens that block, and so about all rows where they are alike, which saves the pass
    of plain moments. Matrices that are `quick`, whose block lacks directions, or whose squares leave the range of
    `_in_range`, are not among them.
    """
    from scipy.linalg.lapack import dtrtri

    b, n, _ = rows.shape
    start, least = n // 2 // BLOCK * BLOCK, _HARD * target / ROUNDING
    low, high = n * _RANGE[0], _RANGE[1]
    found = {}
    with np.errstate(over="ignore", invalid="ignore"):
        G = _moments(rows.between(start, start + BLOCK), range(b))
        made = kernels_for("factor", G).inverse_cholesky(G, limit=least)
        bound = made.bound
        for item in np.flatnonzero((bound > least) & (bound < _RESOLVED) & ~quick).tolist():
            B = made.W[item]
            if not (B.diagonal() > 0).all():
                continue
            H, R = _moments_of(rows, item)(B, "double"), dtrtri(B)[0]
            moments = R.T @ H @ R
            if moments.diagonal().min() >= low and moments.diagonal().max() <= high:
                found[item] = B, H, moments
    return found


def _first_sums(
    rows: Rows, target: float, single: str, *, plain: bool
) -> tuple[Any, npt.NDArray[np.bool_], dict[int, tuple[Float64, Float64, Float64]]]:
    """Return the moments, which of them are of float32 sums, and what `_begun` found of others.

    plain: whether nothing is added to the moments and their rank is decided in the usual way.
    """
    b, n, d = rows.shape
    short = rows.format != "float64"
    # some rows tell whether sums in float32 would do; those of sparse keys cost the same in float64
    may_be_quick = single == "yes" and short and n >= _SAMPLED_FROM and not isinstance(rows.keys, Csr)
    quick = _isotropic(rows) if may_be_quick else np.zeros(b, np.bool_)
    may_begin = plain and n >= _PIECE_FROM and isinstance(rows.keys, np.ndarray) and not quick.all()
    begun = _begun(rows, target, quick) if may_begin else {}
    rest = [item for item in range(b) if item not in begun]
    G = _plain_moments(rows, rest, quick)
    if begun:
        parts, G = G, np.empty((b, d, d))
        G[rest] = parts
        for item, (_, _, moments) in begun.items():
            G[item] = moments
    return G, quick, begun


def _in_range(
    rows: Rows, G: Any, extremes: tuple[Float64, Float64], quick: npt.NDArray[np.bool_], narrow: bool
) -> tuple[Rows, Any]:
    """Return the rows with the scale that keeps squares in range, and their moments, recomputed where needed.

    The scale is a power of two for each column, so that it changes no rounding; it is 1 for ordinary keys. The range
    is that of float32 if anything is to be multiplied in it (`narrow`). `extremes` are of the diagonals.
    """
    low, high = _RANGE if narrow else (2.0**-900, 2.0**1000)
    low *= max(rows.shape[1], 1)
    if extremes[0].min(initial=high) >= low and extremes[1].max(initial=low) <= high:
        return rows, G
    diagonal = to_numpy(G.diagonal(axis1=1, axis2=2))  # finite only if the keys are
    odd = ~np.all((diagonal >= low) & (diagonal <= high), axis=1)
    require_finite(rows, diagonal)
    largest = np.where(odd[:, None], rows.column_maxima(), 1.0)
    rows = _scaled(rows, largest, 30 if narrow else 400)
    if rows.scale is None:
        return rows, G
    items = np.flatnonzero(np.any(rows.scale != 1, axis=1))
    G = G.copy()
    G[to_device(items, G)] = _plain_moments(rows, items.tolist(), quick)
    return rows, G


def _factored(
    rows: Rows, G: Any, quick: npt.NDArray[np.bool_], target: float, ridge: float, narrow: bool
) -> tuple[Rows, Any, npt.NDArray[np.bool_], Float64 | None, Inverses]:
    """Return the rows in range, their moments, which are still `quick`, the penalty of a ridge, and inverse factors.

    The factor is made before the range of its moments is looked at, as what is known of both then comes at once.
    """
    b, _, d = rows.shape
    kernels, limits = kernels_for("factor", G), np.where(quick, _SINGLE_SUMS, target / ROUNDING)
    made = penalty = None
    if ridge:
        diagonal = to_numpy(G.diagonal(axis1=1, axis2=2))
        extremes = diagonal.min(axis=1, initial=np.inf), diagonal.max(axis=1, initial=-np.inf)
    else:
        made = kernels.inverse_cholesky(G, limit=limits)
        extremes = made.extremes()
    rows, sums = _in_range(rows, G, extremes, quick, narrow)
    if ridge:
        scale = np.ones((b, d)) if rows.scale is None else rows.scale
        penalty = _penalty(ridge, np.sqrt(to_numpy(sums.diagonal(axis1=1, axis2=2))), scale)
    if made is None or sums is not G:
        made = kernels.inverse_cholesky(_penalized(sums, penalty), limit=limits)
    again = np.flatnonzero(quick & ~(made.bound <= _SINGLE_SUMS))
    if len(again):  # some rows had told otherwise
        quick = quick & (made.bound <= _SINGLE_SUMS)
        sums = sums.copy()
        sums[to_device(again, sums)] = _moments(rows, again.tolist())
        limits = np.where(quick, _SINGLE_SUMS, target / ROUNDING)
        made = kernels.inverse_cholesky(_penalized(sums, penalty), limit=limits)
    return rows, sums, quick, penalty, made


def _scaled(rows: Rows, largest: Float64, limit: int) -> Rows:
    """Return the rows with columns divided by powers of two, of matrices with columns beyond 2^±limit."""
    exponent = np.where(largest > 0, np.frexp(np.where(largest > 0, largest, 1.0))[1], 0)
    odd = np.asarray(np.any(np.abs(exponent) > limit, axis=1))
    if not odd.any():
        return rows
    return replace(rows, scale=np.where(odd[:, None], np.ldexp(1.0, -np.clip(exponent, -1020, 1020)), 1.0))


@dataclass
class _Batch:
    """The fields of a `Factor` while its matrices are factored one by one."""

    rows: Rows
    W: Any
    rank: npt.NDArray[np.int64]
    error: Float64
    product_error: Float64
    arithmetic: list[Arithmetic] = field(default_factory=list)
    counts_null_directions: bool = True  # whether rows with a part in the directions left out count
    found: dict[int, MatrixFactor] = field(default_factory=dict)
    spans: dict[int, Span] = field(default_factory=dict)
    hidden: dict[int, MatrixFactor | None] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Rows, *, counts_null_directions: bool) -> _Batch:
        """Return a batch of which nothing is found yet."""
        b, _, d = rows.shape
        figures = np.zeros((b, d, d)), np.zeros(b, np.int64), np.zeros(b), np.zeros(b)
        return cls(rows, *figures, ["double"] * b, counts_null_directions)

    def put(self, item: int, found: MatrixFactor) -> None:
        """Set what was found for one matrix."""
        self.W[item] = to_device(found.whitening, self.W)
        self.rank[item], self.error[item] = found.rank, found.error
        if found.correction is not None:
            self.arithmetic[item] = "compensated"
        self.found[item] = found

    def multiply_in_single(self, made: Inverses, allowed: list[bool]) -> None:
        """Let scores come from products in float32 where that is allowed and precise enough.

        With equilibrated columns and their moment H, products k W that are rounded like a random walk change a score
        by about u √tr H⁻¹ at most: the largest ratio of Σ k_i² ‖W_i‖² to ‖k W‖² is at most Σ ‖W_i‖² for H_ii = 1.
        """
        if not any(allowed):
            return
        error = kernels_for("gram", self.rows.keys).SINGLE_UNIT * np.sqrt(made.spreads())
        chosen = np.array(allowed) & (error <= _SINGLE_PRODUCTS)
        self.product_error = np.where(chosen, error, 0.0)
        self.arithmetic = ["single" if ok else "double" for ok in chosen.tolist()]

    def factor(self) -> Factor:
        """Return the factor of the batch."""
        basis = correction = None
        null_directions = {}
        for item, found in self.found.items():
            if found.correction is not None:
                if basis is None or correction is None:
                    basis, correction = np.zeros(self.W.shape), np.zeros(self.W.shape)
                basis[item], correction[item] = found.basis, found.correction
            if self.counts_null_directions and found.null_directions.shape[1]:
                null_directions[item] = (found.null_directions, found.columns)
        hidden = {item: None if one is None else self._alone(item, one) for item, one in self.hidden.items()}
        figures = self.W, self.rank, self.error, tuple(self.arithmetic), self.product_error
        return Factor(self.rows, *figures, basis, correction, null_directions, self.spans, hidden)

    def _alone(self, item: int, found: MatrixFactor) -> Factor:
        """Return what was found for one matrix as a factor by itself, without its keys and null directions."""
        batch = _Batch.of(self.rows.item(item), counts_null_directions=False)
        batch.put(0, found)
        return batch.factor().forget_keys()

    def look_below(self, item: int, finer: Callable[[], MatrixFactor] | None, span: Span | None = None) -> None:
        """Compare the exact rank of a matrix with the one that was found; take a finer factor where it is higher."""
        found = self.found[item]
        if not self.counts_null_directions or not found.null_directions.shape[1] or self.rows.shift is not None:
            return
        span = self.spans[item] = Span.of(self.rows.item(item)) if span is None else span
        if span.rank > found.rank:
            fine = None if finer is None else finer()
            sound = fine is not None and fine.rank == span.rank and fine.error <= _FINE_ERROR
            self.hidden[item] = fine if sound else None


def factor_moments(
    rows: Rows,
    *,
    ridge: float = 0.0,
    rtol: float | None = None,
    single: Literal["no", "scores", "yes"] = "yes",
) -> Factor:
    """Factor the keys through their second moments.

    Where the moments of the keys as they are cannot hold the precision, they are formed again in a basis in which
    the keys are well-conditioned (shifted Cholesky QR, Fukaya et al. 2020), at last with compensated products; so
    the keys may have any condition number up to the rank tolerance. `single` tells for what float32 products are
    allowed, where the estimated error stays near the rounding of float32 scores: for nothing, for the scores, or
    for the moments as well.
    """
    b, n, d = rows.shape
    precision = rows.format if single == "yes" else "float64"  # normalizers need more than scores
    target, limit = _DOUBLE_ERROR[precision], _limit(precision, d)
    cut = rank_tolerance(d) if rtol is None else rtol
    short = rows.format != "float64"
    G, quick, begun = _first_sums(rows, target, single, plain=not ridge and rtol is None)
    rows, G, quick, penalty, made = _factored(rows, G, quick, target, ridge, short and single != "no")
    bound = made.bound
    # whether no singular value can be below the cut, and moments are precise enough
    sound = [
        i not in begun and x * (d * cut * cut) < 1 and (q or ROUNDING * x <= target)
        for i, (x, q) in enumerate(zip(bound.tolist(), quick.tolist(), strict=True))
    ]
    # float32 sums are rounded, or cut off by tensor cores
    error = np.where(quick, PLAIN_NOISE / UNIT * 2.0**-24, PLAIN_NOISE) * bound
    batch = _Batch(rows, made.W, made.ranks(), error, np.zeros(b), ["double"] * b)
    if single != "no" and short:
        least = math.inf if n >= BLOCK else _SINGLE_SUMS
        batch.multiply_in_single(made, [ok and x <= least for x, ok in zip(bound.tolist(), sound, strict=True)])
    batch.counts_null_directions = rtol is None and ridge == 0
    for item in (i for i, ok in enumerate(sound) if not ok):
        moments_in, moments = _moments_of(rows, item), to_numpy(G[item])
        added = np.zeros(d) if penalty is None else penalty[item]
        if item in begun:
            found = precondition(moments_in, moments, added, UNIT, target, cut, limit, begun[item][:2])
            if found.null_directions.shape[1]:  # which are told by the moments of the keys themselves
                moments = _moments(rows, [item])[0]
                found = precondition(moments_in, moments, added, UNIT, target, cut, limit)
        elif n <= _FEW_ROWS * d:
            found = decompose(moments_in, float64_rows(rows.item(item), 0, n), added, cut)
        else:
            found = precondition(moments_in, moments, added, UNIT, target, cut, limit)
        batch.put(item, found)
        batch.look_below(item, partial(resolve, moments_in, moments, UNIT, target, limit))
    return batch.factor()


def factor_sum(moments: DoubleDouble, like: Rows) -> Factor:
    """Factor keys of which only the sum of their second moments is left.

    `like` tells how keys are read: their format, and the scale under which the moments were summed. Where these are
    sums of float64 they hold the digits; where they do not, the moments are twofold, and their factor is found as by
    `factor_moments`, with moments changed to another basis in place of those of the keys in it.
    """
    d = moments.high.shape[2]
    cut, target, limit = rank_tolerance(d), _DOUBLE_ERROR["float64"], _limit(like.format, d)
    made = kernels_for("factor", moments.high).inverse_cholesky(moments.high, limit=target / ROUNDING)
    b, bound = len(made.W), made.bound
    diagonal = np.diagonal(moments.high, axis1=1, axis2=2)
    whole = (made.pivot > 0) & (bound * (d * cut * cut) < 1)
    done = whole & ((ROUNDING * bound <= target) | ~moments.double_double)
    error = np.minimum(PLAIN_NOISE * bound, PLAIN_ERROR)
    batch = _Batch(like, made.W, made.ranks(), error, np.zeros(b), ["double"] * b)
    narrow = ((diagonal == 0) | ((diagonal > 2.0**-200) & (diagonal < 2.0**200))).all(axis=1)
    if like.format != "float64":
        batch.multiply_in_single(made, (done & narrow).tolist())
    for item in np.flatnonzero(~done).tolist():

        def moments_in(basis: Float64, _: Arithmetic, item: int = item) -> Float64:
            return _semidefinite(moments.in_basis(item, basis))

        found = precondition(moments_in, moments.high[item], np.zeros(d), UNIT, target, cut, limit)
        sizes = np.sqrt(np.diagonal(moments.high[item]))
        spread = spectral_norm(sizes[:, None] * found.whitening) ** 2
        batch.put(item, replace(found, error=found.error + _TWOFOLD_ERROR * spread + PLAIN_ERROR))
        if moments.spans:
            batch.look_below(item, None, moments.spans[item])
    return batch.factor()


def _semidefinite(H: Float64) -> Float64:
    """Return moments in which rows and columns of no size, whose square is rounding noise, are zero."""
    live = np.diagonal(H) > 0
    return np.where(live[:, None] & live, H, 0.0)


def factor_qr(rows: Rows, *, method: str, ridge: float = 0.0, rtol: float | None = None) -> Factor:
    """Factor the keys by LAPACK's QR (of row blocks, one after the other) or by its SVD (of the whole).

    Equal rows are rounded alike, so that the error of either grows with the number of copies. So W is corrected once
    by the moments of K W, and a row space that is not the whole is found anew by `precondition`.
    """
    if method == "svd" and isinstance(rows.keys, Csr):
        raise ValueError(
            "method is 'svd', which writes out all zeros of sparse K; expected 'auto', 'gram' or 'qr', which do not"
        )
    b, n, d = rows.shape
    cut = rank_tolerance(d) if rtol is None else rtol
    largest = rows.column_maxima()
    require_finite(rows, largest)
    rows = _scaled(rows, largest, 400)
    batch = _Batch.of(rows, counts_null_directions=rtol is None and ridge == 0)
    scale = np.ones((b, d)) if rows.scale is None else rows.scale
    target, limit = _DOUBLE_ERROR[rows.format], _limit(rows.format, d)
    for item in range(b):
        one = rows.item(item)
        R = _triangle(one) if method == "qr" else float64_rows(one, 0, n)
        penalty = _penalty(ridge, column_norms(R)[None], scale[item : item + 1])[0] if ridge else np.zeros(d)
        moments_in = _moments_of(rows, item)
        exact = batch.counts_null_directions and rows.shift is None
        found = decompose(moments_in, R, penalty, cut, one if exact else None)
        if not found.null_directions.shape[1]:
            batch.put(item, found)
            continue
        moments = R.T @ R  # R turns the row space by its rounding, which no moments of K W show
        batch.put(item, precondition(moments_in, moments, penalty, _TRIANGLE_NOISE, target, cut, limit))
        batch.look_below(item, partial(resolve, moments_in, moments, UNIT, target, limit))
    return batch.factor()


def _moments_of(rows: Rows, item: int) -> MomentsInBasis:
    """Return what gives the moments of the rows of one item in another basis."""
    return lambda basis, arithmetic: to_numpy(_moments(rows, [item], basis=basis[None], arithmetic=arithmetic)[0])


def _triangle(rows: Rows) -> Float64:
    """Return R of the QR factorization of a batch of one, block after block."""
    n, d = rows.shape[1:]
    step = max(4096, 4 * d)
    R = np.zeros((0, d))
    for start in range(0, n, step):
        stacked = np.vstack([R, float64_rows(rows, start, min(start + step, n))])
        R = np.asarray(np.linalg.qr(stacked, mode="r"))
    return R


def _penalty(ridge: float, norms: Float64, scale: Float64) -> Float64:
    """Return the ridge λ = ridge ‖K‖²/d in the coordinates of the scaled columns, whose norms are given."""
    true = norms / scale
    largest = np.max(true, axis=1, keepdims=True, initial=0.0)
    relative = true / np.where(largest > 0, largest, 1.0)  # so that no square overflows
    return np.asarray(ridge * np.mean(relative**2, axis=1, keepdims=True) * (largest * scale) ** 2)


def _penalized(G: Any, penalty: Float64 | None) -> Any:
    if penalty is None:
        return G
    out = G.copy()
    b, d, _ = out.shape
    out.reshape(b, d * d)[:, :: d + 1] += to_device(penalty, out)
    return out
