"""Ways to factor keys: by their second moment, by the moment in another basis if ill-conditioned, by QR or SVD."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace, on_cuda, take_entries, to_device, to_numpy
from levattn._core.blas import lapack
from levattn._core.sparse import Csr
from levattn._core.types import Flags, Float64, Int64
from levattn._kernels import BLOCK, FACTOR, Arithmetic, Rows
from levattn._kernels.factor.norms import spectral_norm
from levattn.linalg.accumulator import PLAIN_ERROR, PLAIN_NOISE, UNIT, Expansion
from levattn.linalg.dependent import factor_dependent
from levattn.linalg.factor import Factor, Scored, column_norms, float64_rows
from levattn.linalg.heads import SINGLE_PRODUCTS, heads_if_many, single_bound, single_error
from levattn.linalg.preconditioned import (
    MOST_ROUNDS,
    ROUNDING,
    SPLIT_ERROR,
    SURE_CONDITION,
    MatrixFactor,
    answered,
    decompose,
    precondition,
    resolve,
)
from levattn.linalg.reading import require_finite
from levattn.linalg.span import Relations, Span
from levattn.linalg.sums import (
    NO_RIDGE,
    Ridge,
    column_sizes,
    factored_in_range,
    first_sums,
    moments_in_bases,
    moments_of_items,
    moments_there,
    scaled_columns,
)
from levattn.linalg.weighted import exact_products, shortened

if TYPE_CHECKING:
    from levattn._kernels.factor.heads import FactoredHeads

# returns the moments of the keys of the listed matrices, (k,), each in its own basis, (k, d, d), on the device
MomentsThere = Callable[[Int64, Any, Arithmetic], Any]


@dataclass
class Together:
    """The rounds of `precondition` for matrices of a batch, (k, d, d), on the device of their moments.

    A round takes a few launches and one copy of figures, however many matrices take part. A matrix that loses
    directions leaves the others, because lost directions need singular vectors. It goes on in main memory.

    moments_in: computes the moments of keys in bases.

    target, cut, limit: as in `precondition`.

    begun: for matrices that left after the first round, their bases, and the moments in these bases.
    """

    moments_in: MomentsThere
    target: float
    cut: float
    limit: float
    begun: dict[int, tuple[Float64, Float64]] = field(default_factory=dict)

    def factored(self, G: Any) -> Iterator[tuple[Int64, Any, list[MatrixFactor]]]:
        """Yield, after each round, the matrices that are done, their whitening matrices, and their factors.

        Parameters
        ----------
        G : array of the device, shape (k, d, d)
            Moments of keys that have no column of zeros.
        """
        d = G.shape[1]
        which, bases, H, largest = np.arange(len(G)), None, G, np.zeros(0)
        sizes = array_namespace(G).sqrt(G.diagonal(axis1=1, axis2=2))
        for turn in range(MOST_ROUNDS):
            made = FACTOR.rebased(H, sizes, bases, 16 * d * UNIT, self.target / ROUNDING)
            if bases is None:
                largest = np.sqrt(made.of_moments())
            lost = ~(made.frobenius() * (self.cut * largest) < 1) | ~made.whole()
            self._leave(which, bases, H, lost)
            done = ~lost & (made.good | (turn == MOST_ROUNDS - 1))
            if done.any():
                at = np.flatnonzero(done)
                condition, bound = (largest * made.spectral())[at], made.bound[at]
                yield which[at], *self._finished(which[at], _some(made.W, at), _some(sizes, at), condition, bound)
            left = np.flatnonzero(~lost & ~done)
            if not len(left):
                return
            which, largest, sizes, bases = which[left], largest[left], _some(sizes, left), _some(made.W, left)
            H = self.moments_in(which, bases, "double")

    def _leave(self, which: Int64, bases: Any, H: Any, lost: Flags) -> None:
        """Record the bases and moments of matrices that leave the others."""
        at = np.flatnonzero(lost)
        if bases is not None and len(at):
            begun = zip(to_numpy(_some(bases, at)), to_numpy(_some(H, at)), strict=True)
            self.begun.update(zip(which[at].tolist(), begun, strict=True))

    def _finished(
        self, which: Int64, W: Any, sizes: Any, condition: Float64, bound: Float64
    ) -> tuple[Any, list[MatrixFactor]]:
        """Accept W, or correct it by moments with compensated products, as `precondition` does."""
        fine = np.flatnonzero(condition > self.limit)
        error, none = PLAIN_NOISE * bound + 2 * UNIT * condition, np.zeros((W.shape[1], 0))
        whitening, parts = W, {}
        if len(fine):
            basis = _some(W, fine)
            H = self.moments_in(which[fine], basis, "compensated")
            again = FACTOR.rebased(H, _some(sizes, fine), basis, 16 * W.shape[1] * UNIT, np.inf)
            sound = again.good & again.whole()
            error[fine] = np.where(sound, PLAIN_NOISE * again.bound + SPLIT_ERROR * condition[fine], np.inf)
            xp = array_namespace(W)
            pairs = to_numpy(xp.stack([basis, again.C], axis=1))
            parts = dict(zip(fine[sound].tolist(), pairs[sound], strict=True))
            whitening = _replaced(W, fine[sound], _some(again.W, np.flatnonzero(sound)))
        factors = []
        for i, each in enumerate(error.tolist()):
            basis, correction = parts.get(i, (whitening[i], None))
            factors.append(MatrixFactor(whitening[i], basis, correction, W.shape[1], each, none, np.zeros(0)))
        return whitening, factors


def _some(array: Any, which: Int64) -> Any:
    """Return the listed entries along the first axis, in ascending order; the array itself if all are listed."""
    return array if len(which) == len(array) else take_entries(array, which)


def _replaced(array: Any, which: Int64, entries: Any) -> Any:
    """Return the array with some entries along the first axis replaced."""
    if len(which) == len(array):
        return entries
    out = array.copy()
    out[array_namespace(array).asarray(which)] = entries
    return out


# Largest relative error of a score, for keys without copies, at which a route is taken; tuned by
# examples/benchmarks/accuracy.py. The claimed error is `PLAIN_NOISE`, for copies.
_DOUBLE_ERROR = {"float64": 2e-12, "float32": 2e-8, "float16": 2e-8, "bfloat16": 2e-8}
_BASIS_CONDITION = {"float64": 3e6, "float32": 1e10, "float16": 1e10, "bfloat16": 1e10}  # up to which W is one matrix
_SURE_COLUMNS = 48
_TOGETHER, _ROOM = 64, 1 << 25  # matrices of a device side by side in main memory, and their entries anywhere at most
_FEW_ROWS = 2  # rows per column up to which an ill-conditioned matrix is decomposed as a whole
_EXPANSION_ERROR = {1: 2.0**-94, 2: 2.0**-94, 3: 2.0**-144}  # the same by the number of parts of a sum
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
    spans: dict[int, Span | Relations] = field(default_factory=dict)
    hidden: dict[int, Factor | None] = field(default_factory=dict)
    shortened: dict[int, Factor] = field(default_factory=dict)
    heads: FactoredHeads | None = None  # where W is that of these heads, but for matrices in `found`

    @classmethod
    def of(cls, rows: Rows, *, counts_null_directions: bool) -> _Batch:
        """Return a batch without results yet."""
        b, _, d = rows.shape
        figures = np.zeros((b, d, d)), np.zeros(b, np.int64), np.zeros(b), np.zeros(b)
        return cls(rows, *figures, ["double"] * b, counts_null_directions)

    def put(self, items: npt.NDArray[np.int64], found: list[MatrixFactor], W: Any | None = None) -> None:
        """Set the results for some matrices, in order; W may hold their whitenings side by side."""
        if W is None:
            W = to_device(np.stack([one.whitening for one in found]), self.W)
        if len(items) == len(self.W):
            self.W = W
        else:
            self.W[to_device(items, self.W)] = W
        for item, one in zip(items.tolist(), found, strict=True):
            self.rank[item], self.error[item] = one.rank, one.error
            if one.correction is not None:
                self.arithmetic[item] = "compensated"
            self.found[item] = one

    def multiply_in_single(self, spreads: Float64, allowed: Flags) -> None:
        """Let scores come from products in float32 where that is allowed and precise enough; see `single_error`."""
        if not allowed.any():
            return
        error = single_error(self.rows, spreads)
        chosen = allowed & (error <= SINGLE_PRODUCTS)
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
        figures = self.W, self.rank, self.error, tuple(self.arithmetic), self.product_error
        made = Factor(self.rows, *figures, basis, correction, null_directions, self.spans, self.hidden, self.shortened)
        return made if self.heads is None else replace(made, scored=self._scored(self.heads))

    def _scored(self, heads: FactoredHeads) -> Scored:
        """Return the scores that were computed beside the factors that are the last ones."""
        scored = heads.scored & np.array([one == heads.arithmetic for one in self.arithmetic])
        scored[list(self.found)] = False
        return Scored(heads.scores, scored)

    def _alone(self, item: int, found: MatrixFactor) -> Factor:
        """Return the result for one matrix as a factor by itself, without its keys and null directions."""
        batch = _Batch.of(self.rows.item(item), counts_null_directions=False)
        batch.put(np.array([0]), [found])
        return batch.factor().forget_keys()

    def factor_sparse(self, G: Float64, target: float, *, single: bool) -> bool:
        """Factor sparse keys that depend on fewer columns by their moments (1, d, d); return whether that is done.

        Where it is not, the exact row space may be known all the same.
        """
        if not isinstance(self.rows.keys, Csr) or self.rows.shift is not None or not self.counts_null_directions:
            return False
        made = factor_dependent(self.rows, G[0], target)
        if made.space is not None:
            self.spans[0] = made.space
        if made.found is None:
            return False
        self.put(np.array([0]), [made.found])
        if single:
            self.multiply_in_single(np.array([made.spread]), np.array([True]))
        return True

    def look_below(
        self, item: int, finer: Callable[[], MatrixFactor] | None, span: Span | Relations | None = None
    ) -> None:
        """Compare the exact rank of a matrix with the rank of its factor; take a finer factor where it is higher."""
        found = self.found[item]
        if not self.counts_null_directions or not found.null_directions.shape[1]:
            return
        span = self.spans.get(item) if span is None else span
        span = self.spans[item] = Span.of(self.rows.item(item)) if span is None else span
        if span.rank > found.rank:
            weights = self.rows.weights
            rounded = weights is not None and not exact_products(weights[item])
            fine = None if finer is None or rounded else finer()
            sound = fine is not None and fine.rank == span.rank and fine.error <= _FINE_ERROR
            self.hidden[item] = self._alone(item, fine) if fine is not None and sound else None
            if finer is not None:
                self._shorten(item, span.rank, rounded)

    def _shorten(self, item: int, rank: int, rounded: bool) -> None:
        """Factor a matrix with its far longest keys shortened, if there are any, and keep a factor of this rank.

        Products with weights that were `rounded` add to its error.
        """
        one = self.rows.item(item)
        less = shortened(one)
        if less is None:
            return
        found = factor_moments(less, single="no").forget_keys()
        found = _of_rounded(found) if rounded else found
        if one.scale is not None:  # as the keys are read
            with np.errstate(over="ignore", under="ignore"):
                found = replace(found, rows=found.rows.scaled(one.scale))
            if found.rows.scale is not None and not (np.isfinite(found.rows.scale) & (found.rows.scale > 0)).all():
                return
        if found.rank[0] == rank and found.error[0] <= _FINE_ERROR:
            self.shortened[item] = found


def factor_moments(
    rows: Rows,
    *,
    ridge: Ridge = NO_RIDGE,
    rtol: float | None = None,
    single: Literal["no", "scores", "yes"] = "yes",
    score: bool = False,
) -> Factor:
    """Factor the keys through their second moments.

    Where the moments of the keys cannot hold the precision, they are formed again in a basis in which the keys are
    well-conditioned. This is shifted Cholesky QR (Fukaya et al. 2020), at last with compensated products. So the keys
    may have any condition number up to the rank tolerance.

    `single` allows float32 products nowhere, in the scores, or in the moments as well. They are used where the
    estimated error stays near the rounding of float32 scores.

    `score` tells that the caller wants the scores of all keys, up to 1: they may be computed beside the factor.
    """
    b, n, d = rows.shape
    precision = rows.format if single == "yes" else "float64"  # normalizers need more than scores
    target, limit = _DOUBLE_ERROR[precision], _limit(precision, d)
    cut = rank_tolerance(d) if rtol is None else rtol
    short = rows.format != "float64"
    narrow, plain = short and single != "no", not ridge and rtol is None
    heads = heads_if_many(rows, target, cut, single) if score and plain else None
    if heads is None:
        G, quick, begun = first_sums(rows, target, single, plain=plain)
        ready = None
    else:
        G, quick, begun, ready = heads.moments, heads.quick, {}, heads.inverses
    rows, G, quick, penalty, made = factored_in_range(rows, G, quick, target, ridge, narrow, ready)
    bound = made.bound
    # whether no singular value can be below the cut, and moments are precise enough
    with np.errstate(over="ignore"):
        sound = (bound * (d * cut * cut) < 1) & (quick | (ROUNDING * bound <= target))
    sound[list(begun)] = False
    # float32 sums are rounded, or cut off by tensor cores
    error = np.where(quick, PLAIN_NOISE / UNIT * 2.0**-24, PLAIN_NOISE) * bound
    batch = _Batch(rows, made.W, made.ranks(), error, np.zeros(b), ["double"] * b)
    batch.heads = heads if made is ready else None
    if narrow:
        batch.multiply_in_single(made.spreads(), sound & (bound <= single_bound(n)))
    batch.counts_null_directions = plain
    added = np.zeros((b, d)) if penalty is None else penalty
    hard = np.flatnonzero(~sound)
    bases = {item: (basis, H) for item, (basis, H, _) in begun.items()}
    if not len(hard) or batch.factor_sparse(G, target, single=narrow and n >= BLOCK):
        return batch.factor()
    few = n <= _FEW_ROWS * d
    if on_cuda(G) and penalty is None and not few:
        bases |= _factor_together(batch, G, hard[made.ranks()[hard] == d], target, cut, limit)
        hard = np.array([item for item in hard.tolist() if item not in batch.found], np.int64)
    step = max(1, min(_TOGETHER, _ROOM // d**2)) if on_cuda(G) else 1
    for first in range(0, len(hard), step):
        items = hard[first : first + step]
        moments, moments_in = to_numpy(take_entries(G, items)), moments_in_bases(rows, items.tolist())
        given = zip(items.tolist(), moments, added[items], strict=True)
        if few and items[0] not in begun:
            steps = [decompose(float64_rows(rows.item(i), 0, n), penalty, cut) for i, _, penalty in given]
        else:
            steps = [precondition(H, penalty, UNIT, target, cut, limit, bases.get(i)) for i, H, penalty in given]
        found = answered(steps, moments_in)
        if items[0] in begun and found[0].null_directions.shape[1]:  # decide by the keys' own moments
            moments = moments_of_items(rows, items.tolist())
            found = answered([precondition(moments[0], added[items[0]], UNIT, target, cut, limit)], moments_in)
        batch.put(items, found)
        for item, H in zip(items.tolist(), moments, strict=True):
            finer = partial(resolve, moments_in_bases(rows, [item]), H, UNIT, target, limit)
            batch.look_below(item, finer)
    return batch.factor()


def _factor_together(
    batch: _Batch, G: Any, items: npt.NDArray[np.int64], target: float, cut: float, limit: float
) -> dict[int, tuple[Float64, Float64]]:
    """Factor matrices on their device as far as possible; return bases and moments to continue in main memory."""
    begun: dict[int, tuple[Float64, Float64]] = {}
    step = max(1, _ROOM // G.shape[1] ** 2)
    for first in range(0, len(items), step):
        some = items[first : first + step]
        together = Together(partial(moments_there, batch.rows, some), target, cut, limit)
        for which, W, found in together.factored(take_entries(G, some) if len(some) < len(G) else G):
            batch.put(some[which], found, W)
        begun |= {int(some[i]): start for i, start in together.begun.items()}
    return begun


def factor_sum(moments: Expansion, like: Rows) -> Factor:
    """Factor keys of which only the sum of their second moments is left.

    `like` tells how keys are read: their format, and the scale under which the moments were summed. Moments that are
    sums of float64 hold the digits. Other moments have several parts, and their factor is found as in
    `factor_moments`. The moments themselves are then changed to the other basis, instead of new moments of the keys
    in it. Sums of three parts also hold directions below the numerical rank. If rows were rounded, their last digits
    tell nothing of the keys. So keys that lack directions may have any, and the error is larger by 2uκ.
    """
    d = moments.high.shape[2]
    cut, target, limit = rank_tolerance(d), _DOUBLE_ERROR["float64"], _limit(like.format, d)
    made = FACTOR.inverse_cholesky(moments.high, limit=target / ROUNDING)
    b, bound = len(made.W), made.bound
    diagonal = moments.diagonal
    whole = (made.pivot > 0) & (bound * (d * cut * cut) < 1)
    done = whole & ((ROUNDING * bound <= target) | (moments.folds == 1))
    error = np.minimum(PLAIN_NOISE * bound, PLAIN_ERROR)
    batch = _Batch(like, made.W, made.ranks(), error, np.zeros(b), ["double"] * b)
    narrow = ((diagonal == 0) | ((diagonal > 2.0**-200) & (diagonal < 2.0**200))).all(axis=1)
    if like.format != "float64":
        batch.multiply_in_single(made.spreads(), done & narrow)
    hard = np.flatnonzero(~done)
    moments = moments.in_main_memory() if len(hard) else moments
    for item in hard.tolist():
        one = _Summed(moments, item, target, limit)
        batch.put(np.array([item]), [one.factor(cut)])
        if moments.rounded and batch.found[item].null_directions.shape[1]:
            batch.spans[item], batch.hidden[item] = Span.of_columns(diagonal[item] > 0), None
        elif moments.spans and not moments.rounded:
            batch.look_below(item, one.resolved if moments.folds[item] == 3 else None, moments.spans[item])
    found = batch.factor()
    return _of_rounded(found) if moments.rounded else found


def _of_rounded(found: Factor) -> Factor:
    """Return the factor with the error of scores that the rounding of rows before they came causes."""
    return replace(found, error=found.error + 2 * UNIT * found.condition)


@dataclass(frozen=True)
class _Summed:
    """The moment of one item of a sum, to be factored in other bases."""

    moments: Expansion
    item: int
    target: float
    limit: float

    def factor(self, cut: float) -> MatrixFactor:
        """Return the factor at the numerical rank."""
        G = self.moments.high[self.item]
        steps = precondition(G, np.zeros(len(G)), UNIT, self.target, cut, self.limit)
        return self._with_error(answered([steps], self._moments_in)[0])

    def resolved(self) -> MatrixFactor:
        """Return the factor with smaller directions resolved."""
        G = self.moments.high[self.item]
        return self._with_error(resolve(self._moments_in, G, UNIT, self.target, self.limit))

    def _moments_in(self, _: list[int], basis: Float64, __: Arithmetic) -> Float64:
        return _semidefinite(self.moments.in_basis(self.item, basis[0]))[None]

    def _with_error(self, found: MatrixFactor) -> MatrixFactor:
        """Return the factor with the error that the rounding of the sum causes."""
        sizes = np.sqrt(np.diagonal(self.moments.high[self.item]))
        spread = spectral_norm(sizes[:, None] * found.whitening) ** 2
        rounding = _EXPANSION_ERROR[int(self.moments.folds[self.item])] * spread
        return replace(found, error=found.error + rounding + PLAIN_ERROR)


def _semidefinite(H: Float64) -> Float64:
    """Return moments with zeros in rows and columns whose diagonal entry, rounding noise, is not positive."""
    live = np.diagonal(H) > 0
    return np.where(live[:, None] & live, H, 0.0)


def factor_qr(rows: Rows, *, method: str, ridge: Ridge = NO_RIDGE, rtol: float | None = None) -> Factor:
    """Factor the keys by LAPACK's QR (of row blocks, one after the other) or by its SVD (of the whole).

    Equal rows are rounded alike, so the error of either method grows with the number of copies. So the moments of K W
    correct W once, and `precondition` finds anew a row space that is not the whole.
    """
    b, n, d = rows.shape
    cut = rank_tolerance(d) if rtol is None else rtol
    largest = column_sizes(rows)
    require_finite(rows, largest)
    rows = scaled_columns(rows, largest, 400)
    batch = _Batch.of(rows, counts_null_directions=rtol is None and not ridge)
    scale = np.ones((b, d)) if rows.scale is None else rows.scale
    target, limit = _DOUBLE_ERROR[rows.format], _limit(rows.format, d)
    for item in range(b):
        one = rows.item(item)
        R = _triangle(one) if method == "qr" else float64_rows(one, 0, n)
        penalty = ridge.penalty(column_norms(R)[None], scale[item : item + 1])[0] if ridge else np.zeros(d)
        moments_in, at = moments_in_bases(rows, [item]), np.array([item])
        found = answered([decompose(R, penalty, cut, one if batch.counts_null_directions else None)], moments_in)
        if not found[0].null_directions.shape[1]:
            batch.put(at, found)
            continue
        moments = R.T @ R  # R turns the row space by its rounding, which no moments of K W show
        steps = precondition(moments, penalty, _TRIANGLE_NOISE, target, cut, limit)
        batch.put(at, answered([steps], moments_in))
        batch.look_below(item, partial(resolve, moments_in, moments, UNIT, target, limit))
    return batch.factor()


def _triangle(rows: Rows) -> Float64:
    """Return R of the QR factorization of a batch of one, block after block."""
    n, d = rows.shape[1:]
    step = max(4096, 4 * d)
    R = np.zeros((0, d))
    for start in range(0, n, step):
        stacked = np.vstack([R, float64_rows(rows, start, min(start + step, n))])
        R = np.asarray(lapack(np.linalg.qr, stacked, mode="r"))
    return R
