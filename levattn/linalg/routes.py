"""How keys are factored: moments summed once, in another basis where that would not do, QR and SVD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_device, to_numpy
from levattn._core.sparse import Csr
from levattn._kernels import Arithmetic, Float64, Rows, kernels_for
from levattn.exceptions import NonFiniteError
from levattn.linalg.factor import SINGLE_REACH, Factor, column_norms, float64_rows, upper_form
from levattn.linalg.gram import PLAIN_ERROR, PLAIN_NOISE, UNIT, DoubleDouble, second_moments, spectral_norm
from levattn.linalg.span import Span

__all__ = ["centered", "factor_moments", "factor_qr", "factor_sum", "rank_tolerance", "require_finite"]

# Largest relative error of a score at which a route is taken, as keys without copies have it; tuned by
# examples/benchmarks/accuracy.py. What is claimed is `PLAIN_NOISE`, for copies.
_ROUNDING = 2 * UNIT  # of moments summed in float64
_DOUBLE_ERROR = {"float64": 2e-12, "float32": 2e-8, "float16": 2e-8, "bfloat16": 2e-8}
_BASIS_CONDITION = {"float64": 3e6, "float32": 1e10, "float16": 1e10, "bfloat16": 1e10}  # up to which W is one matrix
_SURE_CONDITION = 2e5  # the same for float64 where it costs little, and for the factors of LAPACK
_SURE_COLUMNS = 48
_FEW_ROWS = 2  # rows a column up to which an ill-conditioned matrix is decomposed as a whole
_SINGLE_FROM = 2048  # rows from which the rounding of float32 sums averages out
_SMALL = 128  # columns up to which products of small matrices do without BLAS
_NOISE = 2.0**-40  # singular values below this, of unit columns, may be the rounding of many equal rows
_ROUNDS = 40  # three are enough for any condition number up to the cut, and for each scale of lost directions
_SPLIT_ERROR = 2.0**-74  # relative error of the products of a basis of condition 1, as they are split into bits
_TWOFOLD_ERROR = 2.0**-96  # the same in twofold arithmetic
_SINGLE_NOISE = 2e-9  # relative error of a second moment summed in float32 blocks, once n is large
_FINE_CUT = 2.0**-64  # as `rank_tolerance` where products are compensated from the beginning
_FINE_ERROR = 2.0**-7  # estimated relative error of scores up to which such a factor is taken
_Turn = Callable[[Float64, Arithmetic], Float64]  # gives the moments of the keys of one matrix in another basis


def _limit(format: str, d: int) -> float:
    """Return the condition number from which on products with W are formed in more than float64."""
    return _SURE_CONDITION if format == "float64" and d <= _SURE_COLUMNS else _BASIS_CONDITION[format]


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


def require_finite(rows: Rows, per_item: Float64) -> list[int]:
    """Raise if a matrix whose figures are not finite holds NaN or infinity; return those that merely overflowed."""
    bad = [int(i) for i in np.flatnonzero(~np.isfinite(per_item.reshape(len(per_item), -1)).all(axis=1))]
    for item in bad:
        found = rows.nonfinite_rows(item, 5)
        if found:
            where = f" of matrix {item} (leading axes flattened)" if rows.shape[0] > 1 else ""
            more = "first such rows" if len(found) > 1 else "row"
            raise NonFiniteError(
                f"K holds NaN or infinity: {more} {', '.join(map(str, found))}{where}; expected finite numbers. "
                "Remove them, or leave padded rows out with mask="
            )
    return bad


def _moments(
    rows: Rows, items: Sequence[int], *, basis: Float64 | None = None, arithmetic: Arithmetic = "double"
) -> Any:
    """Return what `second_moments` does; the threads share sparse keys by columns, so their rows stay in one piece."""
    if isinstance(rows.keys, Csr):
        whole = np.array([[0, 0, 0, rows.shape[1]]])
        return np.asarray(kernels_for("gram", rows.keys).moments(rows, whole, basis=basis, arithmetic=arithmetic))
    return second_moments(rows, items, basis=basis, arithmetic=arithmetic)


def _in_range(rows: Rows, G: Any, arithmetic: Arithmetic, narrow: bool) -> tuple[Rows, Any]:
    """Return the rows with the scale that keeps squares in range, and their moments, recomputed where needed.

    The scale is a power of two for each column, so that it changes no rounding; it is 1 for ordinary keys. The range
    is that of float32 if anything is to be multiplied in it (`narrow`).
    """
    n = rows.shape[1]
    diagonal = to_numpy(G.diagonal(axis1=1, axis2=2))  # finite only if the keys are
    low, high = (2.0**-80, 2.0**110) if narrow else (2.0**-900, 2.0**1000)
    odd = ~np.all((diagonal >= low * max(n, 1)) & (diagonal <= high), axis=1)
    if not odd.any():
        return rows, G
    require_finite(rows, diagonal)
    largest = np.where(odd[:, None], rows.column_maxima(), 1.0)
    rows = _scaled(rows, largest, 30 if narrow else 400)
    if rows.scale is None:
        return rows, G
    items = np.flatnonzero(np.any(rows.scale != 1, axis=1))
    G = G.copy()
    G[to_device(items, G)] = _moments(rows, items.tolist(), arithmetic=arithmetic)
    return rows, G


def _scaled(rows: Rows, largest: Float64, limit: int) -> Rows:
    """Return the rows with columns divided by powers of two, of matrices with columns beyond 2^±limit."""
    exponent = np.where(largest > 0, np.frexp(np.where(largest > 0, largest, 1.0))[1], 0)
    odd = np.asarray(np.any(np.abs(exponent) > limit, axis=1))
    if not odd.any():
        return rows
    return replace(rows, scale=np.where(odd[:, None], np.ldexp(1.0, -np.clip(exponent, -1020, 1020)), 1.0))


@dataclass(frozen=True)
class _Found:
    """The factor of one matrix: its fields are those of `Factor`, with `outside` and `columns` for the pair there."""

    whitening: Float64
    basis: Float64
    core: Float64 | None
    rank: int
    error: float
    outside: Float64
    columns: Float64

    def embedded(self, live: npt.NDArray[np.bool_]) -> _Found:
        """Return what was found of some columns for all of them; the others are zero."""

        def square(A: Float64) -> Float64:
            out = np.zeros((len(live), len(live)))
            out[np.ix_(live, live)] = A
            return out

        outside, columns = np.zeros((len(live), self.outside.shape[1])), np.full(len(live), np.inf)
        outside[live], columns[live] = self.outside, self.columns
        core = None if self.core is None else square(self.core)
        whitening, basis = square(self.whitening), square(self.basis)
        return replace(self, whitening=whitening, basis=basis, core=core, outside=outside, columns=columns)

    def factor(self, rows: Rows) -> Factor:
        """Return the factor of one matrix, a batch of one, without its keys."""
        compensated = self.core is not None
        return Factor(
            rows,
            self.whitening[None],
            np.array([self.rank]),
            np.array([self.error]),
            ("compensated" if compensated else "double",),
            self.basis[None] if compensated else None,
            None if self.core is None else self.core[None],
        ).forget_keys()


@dataclass
class _Batch:
    """The fields of a `Factor` while its matrices are factored one by one."""

    rows: Rows
    W: Any
    rank: npt.NDArray[np.int64]
    error: Float64
    arithmetic: list[Arithmetic] = field(default_factory=list)
    counts_outside: bool = True  # whether rows that reach into directions left out count
    found: dict[int, _Found] = field(default_factory=dict)
    spans: dict[int, Span] = field(default_factory=dict)
    hidden: dict[int, _Found | None] = field(default_factory=dict)

    def put(self, item: int, found: _Found) -> None:
        """Set what was found for one matrix."""
        self.W[item] = to_device(found.whitening, self.W)
        self.rank[item], self.error[item] = found.rank, found.error
        if found.core is not None:
            self.arithmetic[item] = "compensated"
        self.found[item] = found

    def factor(self) -> Factor:
        """Return the factor of the batch."""
        basis = core = None
        outside = {}
        for item, found in self.found.items():
            if found.core is not None:
                if basis is None or core is None:
                    basis, core = np.zeros(self.W.shape), np.zeros(self.W.shape)
                basis[item], core[item] = found.basis, found.core
            if self.counts_outside and found.outside.shape[1]:
                outside[item] = (found.outside, found.columns)
        hidden = {item: None if one is None else one.factor(self.rows.item(item)) for item, one in self.hidden.items()}
        arithmetic = tuple(self.arithmetic)
        return Factor(self.rows, self.W, self.rank, self.error, arithmetic, basis, core, outside, self.spans, hidden)

    def look_below(self, item: int, finer: Callable[[], _Found] | None, span: Span | None = None) -> None:
        """Compare the exact rank of a matrix with the one that was found; take a finer factor where it is higher."""
        found = self.found[item]
        if not self.counts_outside or not found.outside.shape[1] or self.rows.shift is not None:
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
    sparse = isinstance(rows.keys, Csr)  # sums of entries cost the same in float64
    quick = single == "yes" and short and n >= _SINGLE_FROM and not sparse
    arithmetic: Arithmetic = "single" if quick else "double"
    G = _moments(rows, range(b), arithmetic=arithmetic)
    rows, G = _in_range(rows, G, arithmetic, short and single != "no")
    penalty = np.zeros((b, d))
    if ridge:
        scale = np.ones((b, d)) if rows.scale is None else rows.scale
        penalty = _penalty(ridge, np.sqrt(to_numpy(G.diagonal(axis1=1, axis2=2))), scale)

    W, pivot, reach = kernels_for("factor", G).inverse_cholesky(_penalized(G, penalty) if ridge else G)
    whole = (pivot > 0) & (reach * (d * cut * cut) < 1)  # no singular value can be below the cut
    mild = whole & (reach <= SINGLE_REACH)
    if arithmetic == "single":
        noise, done = np.full(b, PLAIN_NOISE / UNIT * 2.0**-24), mild  # sums rounded, or cut off by tensor cores
    else:
        noise, done = np.full(b, PLAIN_NOISE), whole & (_ROUNDING * reach <= target)
    if arithmetic == "single" and not mild.all():
        again = np.flatnonzero(whole & ~mild & (_ROUNDING * reach <= target))
        if len(again):
            here = to_device(again, G)
            G[here] = _moments(rows, again.tolist())
            penalized = _penalized(G[here], penalty[again])
            W[here], pivot[again], reach[again] = kernels_for("factor", G).inverse_cholesky(penalized)
            noise[again] = PLAIN_NOISE
            done = mild.copy()
            done[again] = (pivot[again] > 0) & (_ROUNDING * reach[again] <= target)
    batch = _Batch(rows, W, _rank(W), noise * reach)
    batch.arithmetic = ["single" if short and single != "no" and ok else "double" for ok in (mild & done).tolist()]
    batch.counts_outside = rtol is None and ridge == 0
    for item in np.flatnonzero(~done).tolist():
        turn, moments = _turn_rows(rows, item), to_numpy(G[item])
        start = _SINGLE_NOISE if noise[item] > 1e-12 else UNIT
        if n <= _FEW_ROWS * d:
            found = _orthogonal(turn, float64_rows(rows.item(item), 0, n), penalty[item], cut)
        else:
            found = _precondition(turn, moments, penalty[item], start, target, cut, limit)
        batch.put(item, found)
        batch.look_below(item, partial(_resolve, turn, moments, start, target, limit))
    return batch.factor()


def factor_sum(moments: DoubleDouble, like: Rows) -> Factor:
    """Factor keys of which only the sum of their second moments is left.

    `like` tells how keys are read: their format, and the scale under which the moments were summed. Where these are
    sums of float64 they hold the digits; where they do not, the moments are twofold, and their factor is found as by
    `factor_moments`, with turned moments in place of the moments of turned keys.
    """
    d = moments.high.shape[2]
    cut, target, limit = rank_tolerance(d), _DOUBLE_ERROR["float64"], _limit(like.format, d)
    W, pivot, reach = kernels_for("factor", moments.high).inverse_cholesky(moments.high)
    whole = (pivot > 0) & (reach * (d * cut * cut) < 1)
    done = whole & ((_ROUNDING * reach <= target) | ~moments.wide)
    error = np.minimum(PLAIN_NOISE * reach, PLAIN_ERROR)
    batch = _Batch(like, W, _rank(W), error)
    diagonal = np.diagonal(moments.high, axis1=1, axis2=2)
    narrow = ((diagonal == 0) | ((diagonal > 2.0**-200) & (diagonal < 2.0**200))).all(axis=1)
    mild = done & (reach <= SINGLE_REACH) & narrow & (like.format != "float64")
    batch.arithmetic = ["single" if ok else "double" for ok in mild.tolist()]
    for item in np.flatnonzero(~done).tolist():

        def turn(basis: Float64, _: Arithmetic, item: int = item) -> Float64:
            return _semidefinite(moments.turned(item, basis))

        found = _precondition(turn, moments.high[item], np.zeros(d), UNIT, target, cut, limit)
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
    by the moments of K W, and a row space that is not the whole is found anew by `_precondition`.
    """
    if method == "svd" and isinstance(rows.keys, Csr):
        raise ValueError(
            "method is 'svd', which writes out all zeros of sparse K; expected 'auto', 'gram' or 'qr', which do not"
        )
    b, n, d = rows.shape
    cut = rank_tolerance(d) if rtol is None else rtol
    batch = _Batch(rows, np.zeros((b, d, d)), np.zeros(b, np.int64), np.zeros(b))
    batch.arithmetic = ["double"] * b
    batch.counts_outside = rtol is None and ridge == 0
    largest = rows.column_maxima()
    require_finite(rows, largest)
    batch.rows = rows = _scaled(rows, largest, 400)
    scale = np.ones((b, d)) if rows.scale is None else rows.scale
    target, limit = _DOUBLE_ERROR[rows.format], _limit(rows.format, d)
    for item in range(b):
        one = rows.item(item)
        R = _triangle(one) if method == "qr" else float64_rows(one, 0, n)
        penalty = _penalty(ridge, column_norms(R)[None], scale[item : item + 1])[0] if ridge else np.zeros(d)
        turn = _turn_rows(rows, item)
        exact = batch.counts_outside and rows.shift is None
        found = _orthogonal(turn, R, penalty, cut, partial(_exact_rank, one) if exact else None)
        if not found.outside.shape[1]:
            batch.put(item, found)
            continue
        moments = R.T @ R  # R turns the row space by its rounding, which no moments of K W show
        batch.put(item, _precondition(turn, moments, penalty, _SINGLE_NOISE, target, cut, limit))
        batch.look_below(item, partial(_resolve, turn, moments, UNIT, target, limit))
    return batch.factor()


def _turn_rows(rows: Rows, item: int) -> _Turn:
    """Return what gives the moments of the rows of one item in another basis."""
    return lambda basis, arithmetic: to_numpy(_moments(rows, [item], basis=basis[None], arithmetic=arithmetic)[0])


def _exact_rank(rows: Rows) -> int:
    return Span.of(rows).rank


def _orthogonal(
    turn: _Turn, R: Float64, penalty: Float64, cut: float, exact_rank: Callable[[], int] | None = None
) -> _Found:
    """Factor one matrix by the singular value decomposition of R, which is the matrix itself or its triangle.

    Equal rows are rounded alike, so that noise grows with their number. Singular values next to the cut are told from
    it by the exact rank, where that is known.
    """
    if penalty.any():
        R = np.vstack([R, np.diag(np.sqrt(penalty))])
    c = column_norms(R)
    some = np.asarray(c > 0)
    if not some.all():
        penalty = np.zeros(np.count_nonzero(some))
        return _orthogonal(_turn_some(turn, some), R[:, some], penalty, cut, exact_rank).embedded(some)
    _, s, Vt = np.linalg.svd(R / c, full_matrices=False)
    live = s > cut * s.max(initial=0.0)
    if exact_rank is not None and live.any() and s[live].min() < _NOISE * s.max():
        live &= np.arange(len(s)) < exact_rank()
    W = upper_form(Vt[live].T / s[live]) / c[:, None]
    condition = float(s[live].max() / s[live].min()) if live.any() else 1.0
    return _finish(turn, W, c, _complement(Vt[live]), penalty, condition, _SURE_CONDITION)


def _turn_some(turn: _Turn, some: npt.NDArray[np.bool_]) -> _Turn:
    """Return what gives the moments of some columns of the keys in another basis."""
    places = np.ix_(some, some)

    def turned(basis: Float64, arithmetic: Arithmetic) -> Float64:
        whole = np.zeros((len(some), len(some)))
        whole[places] = basis
        return turn(whole, arithmetic)[places]

    return turned


def _complement(V: Float64) -> Float64:
    """Return an orthonormal basis (d, k) of what is orthogonal to the orthonormal rows V."""
    r, d = V.shape
    return np.asarray(np.linalg.svd(V)[2][r:].T if r else np.eye(d))


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


def _rank(W: Any) -> npt.NDArray[np.int64]:
    """Return the number of columns that are not left out, (b,)."""
    return np.asarray(np.count_nonzero(to_numpy(W.diagonal(axis1=1, axis2=2)), axis=1))


def _penalized(G: Any, penalty: Float64) -> Any:
    if not penalty.any():
        return G
    out = G.copy()
    b, d, _ = out.shape
    out.reshape(b, d * d)[:, :: d + 1] += to_device(penalty, out)
    return out


def _precondition(
    turn: _Turn, G: Float64, penalty: Float64, noise: float, target: float, cut: float, limit: float
) -> _Found:
    """Factor one ill-conditioned or rank-deficient matrix, whose moments G are known up to `noise`.

    Each round multiplies the keys by the inverse of a (shifted) Cholesky factor, which divides their condition
    number by up to 1/√(d · noise), until it is so small that the moments determine the rest. Directions whose
    singular value turns out to be below the cut are taken out.
    """
    d = G.shape[0]
    H = G + np.diag(penalty)
    c = np.sqrt(np.diag(H))
    some: npt.NDArray[np.bool_] = c > 0
    if not some.all():
        part = G[np.ix_(some, some)], penalty[some]
        return _precondition(_turn_some(turn, some), *part, noise, target, cut, limit).embedded(some)
    largest = np.sqrt(spectral_norm(H / c[:, None] / c))  # singular value of the equilibrated keys
    out = np.zeros((d, 0))
    basis: Float64 | None = None

    for _ in range(_ROUNDS):
        C, pivot, reach = kernels_for("factor", H).inverse_cholesky(H[None])
        good = bool(pivot[0] > 0) and noise <= UNIT and _ROUNDING * float(reach[0]) <= target
        shift = 16 * d * noise
        while not good:
            C, pivot, _reach = kernels_for("factor", H).inverse_cholesky(H[None], shift)
            if pivot[0] > 0:
                break
            shift *= 100
        turned = C[0] if basis is None else _multiply(basis, C[0])
        lost = _lost_directions(c[:, None] * turned, cut * largest)
        if basis is not None:  # columns on which the keys vanish although the basis does not
            vanished = ~np.any(C[0] != 0, axis=0) & np.any(basis != 0, axis=0)
            lost = np.hstack([lost, c[:, None] * basis[:, vanished]])
        if lost.shape[1]:
            out = _orthonormal(np.hstack([out, lost]))
        if not turned.any() or out.shape[1] == d:  # of keys with columns that are not zero, and so of no rank 0
            return _Found(np.zeros((d, d)), np.zeros((d, d)), None, 0, np.inf if d else 0.0, out, c)
        if lost.shape[1]:
            basis = upper_form(_complement(out.T)) / c[:, None]
        elif good:
            break
        else:
            basis = turned
        H = turn(basis, "double") + _turned_penalty(basis, penalty)
        noise = UNIT
    condition = float(largest * spectral_norm(c[:, None] * turned))
    return _finish(turn, turned, c, out, penalty, condition, limit, float(reach[0]))


def _resolve(turn: _Turn, G: Float64, noise: float, target: float, limit: float) -> _Found:
    """Factor a matrix again with compensated products from the beginning, which resolve smaller directions."""
    return _precondition(lambda B, _: turn(B, "compensated"), G, np.zeros(len(G)), noise, target, _FINE_CUT, limit)


def _lost_directions(W: Float64, cut: float) -> Float64:
    """Return the left singular vectors of W whose singular value is at least 1/cut (of like size to the largest).

    Where W whitens the equilibrated keys these are the directions in which the keys have next to nothing.
    """
    with np.errstate(over="ignore"):
        if np.sqrt(np.sum(W * W)) * cut < 1:
            return np.zeros((len(W), 0))
    U, s, _ = np.linalg.svd(W)
    return np.asarray(U[:, (s * cut >= 1) & (s >= 1e-3 * s.max())])  # smaller ones are not resolved beside larger


def _multiply(A: Float64, B: Float64) -> Float64:
    """Return A B; without BLAS where it is small, as the threads of BLAS would go on spinning beside a kernel."""
    return np.asarray(np.einsum("ij,jk->ik", A, B) if len(A) <= _SMALL else A @ B)


def _turned_penalty(basis: Float64, penalty: Float64) -> Float64 | float:
    """Return what the ridge adds to the moments of the keys in another basis."""
    return _multiply(basis.T, penalty[:, None] * basis) if penalty.any() else 0.0


def _finish(
    turn: _Turn,
    W: Float64,
    c: Float64,
    out: Float64,
    penalty: Float64,
    condition: float,
    limit: float,
    reach: float | None = None,
) -> _Found:
    """Accept W where its reach is known, or correct it through moments of the turned keys.

    These are formed with compensated products where the condition is above the limit.
    """
    kept = np.any(W != 0, axis=0)
    rank, fine = int(np.count_nonzero(kept)), condition > limit
    rounding = (_SPLIT_ERROR if fine else 2 * UNIT) * condition  # of the turned keys, beside that of their sums
    if reach is not None and not fine:
        return _Found(W, W, None, rank, PLAIN_NOISE * reach + rounding, out, c)
    G = turn(W, "compensated" if fine else "double")
    C, pivot, again = kernels_for("factor", G).inverse_cholesky((G + _turned_penalty(W, penalty))[None])
    if not (pivot[0] > 0 and np.array_equal(np.any(C[0] != 0, axis=0), kept)):  # W is no whitening at all
        return _Found(W, W, None, rank, np.inf, out, c)
    whitening, error = _multiply(W, C[0]), PLAIN_NOISE * float(again[0]) + rounding
    return _Found(whitening, W if fine else whitening, C[0] if fine else None, rank, error, out, c)


def _orthonormal(A: Float64) -> Float64:
    """Return an orthonormal basis of the columns of A, whose sizes carry no meaning."""
    A = A / np.linalg.norm(A, axis=0)
    U, s, _ = np.linalg.svd(A, full_matrices=False)
    return np.asarray(U[:, s > 1e-8 * s.max(initial=1e-300)])
