"""Second moments of keys to be factored, in float32 where a sample of rows shows that this is accurate enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import on_cuda, to_device, to_numpy
from levattn._core.blas import lapack
from levattn._core.sparse import Csr
from levattn._core.types import Float64
from levattn._kernels import BLOCK, FACTOR, GRAM, KEYS, Arithmetic, Rows
from levattn._kernels.factor import Inverses
from levattn.linalg.accumulator import second_moments
from levattn.linalg.preconditioned import ROUNDING, MomentsInBasis
from levattn.linalg.reading import require_finite

_SAMPLED_FROM = 2 * BLOCK  # rows from which a sample decides whether sums may be float32
_SAMPLE, ISOTROPIC = BLOCK // 8, 1.3  # rows of the sample, and the largest figure of `_isotropic` for float32
SINGLE_SUMS = 4.0  # squared norm of the inverse up to which sums may be float32
LONG = 16 * BLOCK  # rows from which one block decides which matrices are ill-conditioned: those whose
_HARD = 4.0  # squared norm of the inverse is so many times the limit or more, but less than
_RESOLVED = 2.0**46  # this bound, above which the block may lack a direction of the keys
_RANGE = 2.0**-80, 2.0**110  # of squares in float32, for each row


@dataclass(frozen=True)
class Ridge:
    """A number λ that is added to the diagonal of moments: ``root² + relative ‖K‖²/d``, at most one of them not zero.

    The root of λ has the range of the columns, which λ may exceed.
    """

    root: float = 0.0
    relative: float = 0.0

    def __bool__(self) -> bool:
        return self.root > 0 or self.relative > 0

    def among(self, share: float) -> Ridge:
        """Return the same λ for keys of which `share` times as many columns have the same ‖K‖²."""
        return replace(self, relative=self.relative * share)

    def below(self, power: int) -> Ridge:
        """Return the ridge for the same keys divided by a power of two."""
        with np.errstate(over="ignore"):
            return replace(self, root=float(np.ldexp(self.root, -power)))

    def penalty(self, norms: Float64, scale: Float64) -> Float64:
        """Return λ in the coordinates of the scaled columns, which have these norms, (b, d)."""
        true = norms / scale
        largest = np.max(true, axis=1, keepdims=True, initial=0.0)
        relative = true / np.where(largest > 0, largest, 1.0)  # so that no square overflows
        factor = self.relative * np.mean(relative**2, axis=1, keepdims=True) if self.relative else 1.0
        # beside a column that is smaller than all others by as much as this, or zero, no larger one changes a score
        with np.errstate(over="ignore"):
            sizes = np.minimum((largest if self.relative else self.root) * scale, 2.0**500)
        return np.asarray(factor * sizes**2)


NO_RIDGE = Ridge()


def moments_of_items(
    rows: Rows, items: Sequence[int], *, basis: Float64 | None = None, arithmetic: Arithmetic = "double"
) -> Any:
    """Return `second_moments`, with sparse rows in one piece: threads share sparse keys by columns."""
    if isinstance(rows.keys, Csr):
        whole = np.array([[0, 0, 0, rows.shape[1]]])
        return np.asarray(GRAM.moments(rows, whole, basis=basis, arithmetic=arithmetic))
    return second_moments(rows, items, basis=basis, arithmetic=arithmetic)


def _plain_moments(rows: Rows, items: list[int], quick: npt.NDArray[np.bool_]) -> Any:
    """Return the moments of some matrices, in float32 blocks for matrices with a flag in `quick`."""
    places = np.flatnonzero(quick[items])
    if len(places) == len(items) > 0:
        return moments_of_items(rows, items, arithmetic="single")
    G = moments_of_items(rows, items)
    if len(places):
        G[to_device(places, G)] = moments_of_items(rows, [items[place] for place in places], arithmetic="single")
    return G


def _isotropic(sample: Rows) -> npt.NDArray[np.bool_]:
    """Return which matrices have a sample of rows that are about as long in every direction, (b,).

    With columns scaled to unit norm and the moment C of m rows, ‖C‖²/d − d/m is about 1 for such rows. Keys of real
    heads have a mean and preferred directions, and were at 1.5 to 9.
    """
    d = sample.shape[2]
    if isinstance(sample.keys, np.ndarray):
        from levattn._kernels.gram.cpu import unevenness  # keys are in main memory

        return np.asarray(unevenness(sample) <= ISOTROPIC)
    if on_cuda(sample.keys):
        from levattn._kernels.gram.cuda import measured_unevenness  # b figures come from a device, not b moments

        return np.asarray(measured_unevenness(sample) <= ISOTROPIC)
    G = moments_of_items(sample, range(sample.shape[0]), arithmetic="single")
    with np.errstate(all="ignore"):  # matrices that are not finite are not isotropic
        diagonal = np.diagonal(G, axis1=1, axis2=2)
        inverse = np.where(diagonal == 0, 0.0, 1 / diagonal)  # a column that is zero in the sample has no weight
        # threads of BLAS would go on spinning beside the pass of moments
        squares = (inverse * np.einsum("bij,bj->bi", np.square(G), inverse)).sum(axis=1)
    return np.asarray(squares / d - d / _SAMPLE <= ISOTROPIC)


def _begun(rows: Rows, target: float, quick: npt.NDArray[np.bool_]) -> dict[int, tuple[Float64, Float64, Float64]]:
    """Return a basis B, the moments of K B and the moments of K, for matrices too ill-conditioned for plain moments.

    A block in the middle finds these matrices. B whitens that block, and so about all rows if they are alike, which
    saves the pass of plain moments. Left out are matrices that are `quick`, whose block lacks directions, or whose
    squares leave the range of `_in_range`.
    """
    from scipy.linalg.lapack import dtrtri

    b, n, _ = rows.shape
    start, least = n // 2 // BLOCK * BLOCK, _HARD * target / ROUNDING
    low, high = n * _RANGE[0], _RANGE[1]
    found = {}
    with np.errstate(over="ignore", invalid="ignore"):
        G = moments_of_items(rows.between(start, start + BLOCK), range(b))
        made = FACTOR.inverse_cholesky(G, limit=least)
        bound = made.bound
        for item in np.flatnonzero((bound > least) & (bound < _RESOLVED) & ~quick).tolist():
            B = made.W[item]
            if not (B.diagonal() > 0).all():
                continue
            H, R = moments_in_bases(rows, [item])([0], B[None], "double")[0], lapack(dtrtri, B)[0]
            moments = lapack(np.matmul, lapack(np.matmul, R.T, H), R)
            if moments.diagonal().min() >= low and moments.diagonal().max() <= high:
                found[item] = B, H, moments
    return found


def sampled_rows(rows: Rows, single: str) -> tuple[int, int]:
    """Return the rows, from and to, that decide whether sums may be float32; none where they may not."""
    n = rows.shape[1]
    # sums of sparse keys cost the same in float64
    if single != "yes" or rows.format == "float64" or n < _SAMPLED_FROM or isinstance(rows.keys, Csr):
        return 0, 0
    start = n // 2 // BLOCK * BLOCK
    return start, start + _SAMPLE


def first_sums(
    rows: Rows, target: float, single: str, *, plain: bool
) -> tuple[Any, npt.NDArray[np.bool_], dict[int, tuple[Float64, Float64, Float64]]]:
    """Return the moments, which of them are sums in float32, and the results of `_begun` for others.

    plain: whether there is no ridge and the rank tolerance is the usual one.
    """
    b, n, d = rows.shape
    sample = sampled_rows(rows, single)
    quick = _isotropic(rows.between(*sample)) if sample[1] else np.zeros(b, np.bool_)
    may_begin = plain and n >= LONG and isinstance(rows.keys, np.ndarray) and not quick.all()
    begun = _begun(rows, target, quick) if may_begin else {}
    rest = [item for item in range(b) if item not in begun]
    G = _plain_moments(rows, rest, quick)
    if begun:
        parts, G = G, np.empty((b, d, d))
        G[rest] = parts
        for item, (_, _, moments) in begun.items():
            G[item] = moments
    return G, quick, begun


def range_of_squares(rows: Rows, narrow: bool) -> tuple[float, float]:
    """Return the least and the largest diagonal entry of moments that need no scale, in float32 if `narrow`."""
    low, high = _RANGE if narrow else (2.0**-900, 2.0**1000)
    return low * max(rows.shape[1], 1), high


def _in_range(
    rows: Rows, G: Any, extremes: tuple[Float64, Float64], quick: npt.NDArray[np.bool_], narrow: bool
) -> tuple[Rows, Any]:
    """Return the rows with the scale that keeps squares in range, and their moments, recomputed where needed.

    The scale is a power of two for each column, so it changes no rounding; it is 1 for ordinary keys. `narrow` selects
    the range of float32, for products in float32. `extremes` are the extremes of the diagonals of G.
    """
    low, high = range_of_squares(rows, narrow)
    if extremes[0].min(initial=high) >= low and extremes[1].max(initial=low) <= high:
        return rows, G
    diagonal = to_numpy(G.diagonal(axis1=1, axis2=2))  # finite only if the keys are
    odd = ~np.all((diagonal >= low) & (diagonal <= high), axis=1)
    require_finite(rows, diagonal)
    largest = np.where(odd[:, None], column_sizes(rows), 1.0)
    rows = scaled_columns(rows, largest, 30 if narrow else 400)
    if rows.scale is None:
        return rows, G
    items = np.flatnonzero(np.any(rows.scale != 1, axis=1))
    G = G.copy()
    G[to_device(items, G)] = _plain_moments(rows, items.tolist(), quick)
    return rows, G


def factored_in_range(
    rows: Rows,
    G: Any,
    quick: npt.NDArray[np.bool_],
    target: float,
    ridge: Ridge,
    narrow: bool,
    made: Inverses | None = None,
) -> tuple[Rows, Any, npt.NDArray[np.bool_], Float64 | None, Inverses]:
    """Return the rows in range, their moments, which of them are still `quick`, the ridge penalty, and the factors.

    `made` are the factors of G with the limits of these sums, where they are there already.
    """
    b, _, d = rows.shape
    limits, penalty = np.where(quick, SINGLE_SUMS, target / ROUNDING), None
    made = FACTOR.inverse_cholesky(G, limit=limits) if made is None else made
    rows, sums = _in_range(rows, G, made.extremes(), quick, narrow)
    if ridge:
        scale = np.ones((b, d)) if rows.scale is None else rows.scale
        penalty = ridge.penalty(np.sqrt(to_numpy(sums.diagonal(axis1=1, axis2=2))), scale)
    if ridge or sums is not G:
        made = FACTOR.inverse_cholesky(_penalized(sums, penalty), limit=limits)
    again = np.flatnonzero(quick & ~(made.bound <= SINGLE_SUMS))
    if len(again):  # the sample was misleading
        quick = quick & (made.bound <= SINGLE_SUMS)
        sums = sums.copy()
        sums[to_device(again, sums)] = moments_of_items(rows, again.tolist())
        limits = np.where(quick, SINGLE_SUMS, target / ROUNDING)
        made = FACTOR.inverse_cholesky(_penalized(sums, penalty), limit=limits)
    return rows, sums, quick, penalty, made


def column_sizes(rows: Rows) -> Float64:
    """Return the largest magnitude in each column, (b, d), without weights where products with these underflow."""
    largest = KEYS.column_figures(rows, largest=True)
    if rows.weights is None or not (largest < _LOST).any():
        return largest
    return np.where(largest < _LOST, KEYS.column_figures(replace(rows, weights=None), largest=True), largest)


_LOST = 2.0**-900  # smaller products may have lost digits


def scaled_columns(rows: Rows, largest: Float64, limit: int) -> Rows:
    """Return the rows, with columns divided by powers of two in matrices that have columns beyond 2^±limit."""
    exponent = np.where(largest > 0, np.frexp(np.where(largest > 0, largest, 1.0))[1], 0)
    odd = np.asarray(np.any(np.abs(exponent) > limit, axis=1))
    if not odd.any():
        return rows
    return rows.scaled(np.where(odd[:, None], np.ldexp(1.0, -np.clip(exponent, -1020, 1020)), 1.0))


def moments_there(rows: Rows, items: npt.NDArray[np.int64], which: Any, bases: Any, arithmetic: Arithmetic) -> Any:
    """Return the moments of some items, each in its own basis; bases and moments lie on the device of the rows."""
    return moments_of_items(rows, items[which].tolist(), basis=bases, arithmetic=arithmetic)


def moments_in_bases(rows: Rows, items: list[int]) -> MomentsInBasis:
    """Return a function that computes moments of the items in other bases; both lie in main memory."""

    def moments_in(which: list[int], basis: Float64, arithmetic: Arithmetic) -> Float64:
        there = to_device(basis, rows.keys) if on_cuda(rows.keys) else basis
        return to_numpy(moments_there(rows, np.array(items), which, there, arithmetic))

    return moments_in


def _penalized(G: Any, penalty: Float64 | None) -> Any:
    if penalty is None:
        return G
    out = G.copy()
    b, d, _ = out.shape
    out.reshape(b, d * d)[:, :: d + 1] += to_device(penalty, out)
    return out
