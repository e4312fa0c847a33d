"""Leverage scores of the rows of key matrices."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, array_namespace, as_matrices, to_device, to_numpy
from levattn._core.checks import check_bool, real_number, whole_number
from levattn._core.device import where_arrays_are
from levattn._core.sparse import Csr
from levattn._core.types import Flags, Float64
from levattn._kernels import KEYS, Rows
from levattn.exceptions import RankWarning
from levattn.io import KeySource
from levattn.io.source import whole_keys
from levattn.linalg.centered import centered
from levattn.linalg.factor import Factor, float64_rows
from levattn.linalg.reading import require_finite
from levattn.linalg.routes import factor_moments, factor_qr, rank_tolerance
from levattn.linalg.sums import NO_RIDGE, Ridge
from levattn.linalg.weighted import weighted
from levattn.linalg.wide import Wide, folded
from levattn.sensitivity.approximate import SCORE_SKETCHES, check_sketches, projected, sketched_factor, sketches_of
from levattn.sensitivity.truncated import scores_of_rank
from levattn.sensitivity.two_pass import Checkpoint, Source, as_source, two_passes
from levattn.sketch import Distribution, GaussianJL, Sketch
from levattn.states.blocks import in_main_memory

_Pair = tuple[Distribution, GaussianJL]
ScoreMethod = Literal["auto", "gram", "qr", "svd", "countsketch", "osnap", "srht", "jl"] | Distribution | _Pair

_EXACT = ("auto", "gram", "qr", "svd")
SCANNED = ("auto", "gram")  # methods that read chunks


def factorize(
    matrices: Matrices,
    *,
    method: str,
    ridge: Ridge = NO_RIDGE,
    weights: Float64 | None = None,
    center: bool = False,
    rtol: float | None = None,
    single: Literal["no", "scores", "yes"] = "yes",
    scores_only: bool = False,
) -> Factor:
    """Factor keys by a method that was checked; `single` limits the use of float32 by "auto".

    Each row is read times its number of `weights` (b, n), which are above 0. Only scores come of them.

    With `scores_only`, the factor of sparse rows that are proven to be independent has nothing but their scores.
    """
    sparse = isinstance(matrices.data, Csr)
    if sparse and method == "svd":
        raise ValueError(
            "method is 'svd', which writes out all zeros of sparse K; expected 'auto', 'gram' or 'qr', which do not"
        )
    if sparse and matrices.n < 2 * matrices.d:
        least = matrices.n + 1 if matrices.n < matrices.d else 1  # wide keys stay wide
        keys, places = matrices.data.without_zero_columns(matrices.mask, least)
        if len(places) < matrices.d and (least > 1 or 2 * len(places) <= matrices.d):
            made = replace(matrices, data=keys)
            options: dict[str, Any] = {"method": method, "center": center, "rtol": rtol, "single": single}
            options |= {"weights": weights}
            factor = factorize(made, ridge=ridge.among(made.d / matrices.d), scores_only=scores_only, **options)
            return factor if ridge or scores_only else _among(factor, matrices, places)
    rows, wide = rows_of(matrices, center), None
    b, n, d = rows.shape
    # a ridge and a tolerance of singular values depend on more than the column space
    if b and n < d and rtol is None and (not ridge or (sparse and n)):
        rows, wide, ridge = _narrowed(rows, ridge.among(n / d), scores_only=scores_only)
    rows = replace(rows, weights=weights)
    if method in ("qr", "svd"):
        factor = factor_qr(rows, method=method, ridge=ridge, rtol=rtol)
    else:
        single = single if method == "auto" else "no"
        factor = factor_moments(rows, ridge=ridge, rtol=rtol, single=single, score=scores_only)
    if wide is None:
        return factor
    return replace(factor, wide=wide, rank=np.where(wide.independent, np.sum(wide.columns >= 0, axis=1), factor.rank))


def _narrowed(rows: Rows, ridge: Ridge, *, scores_only: bool) -> tuple[Rows, Wide | None, Ridge]:
    """Return keys with no more columns than rows that have the scores of wide keys, how they were chosen, and λ."""
    sparse = isinstance(rows.keys, Csr)
    largest = KEYS.column_figures(rows, largest=True)
    require_finite(rows, largest)
    if ridge:
        rows, power = folded(rows, largest)
        return rows, None, ridge.below(power)
    wide = Wide.of(rows, largest)
    if scores_only and sparse and rows.shift is None and wide.clear.all():
        return replace(rows, keys=rows.keys.nonzero_rows()[None, :, None].astype(rows.keys.values.dtype)), wide, ridge
    return wide.picked(rows), wide, ridge


def _among(factor: Factor, matrices: Matrices, places: npt.NDArray[np.int64]) -> Factor:
    """Return the factor of sparse keys from the factor of their columns that are not zero."""
    found, shift, scale = factor.all_columns, None, None
    if found.shift is not None:
        shift = np.zeros((*found.shift.shape[:2], matrices.d))
        shift[:, :, places] = found.shift
    if found.scale is not None:
        scale = np.ones((len(found.scale), matrices.d))
        scale[:, places] = found.scale
    rows = replace(Rows.of(matrices), shift=shift, scale=scale)
    no = np.zeros(1, np.bool_)
    wide = Wide(rows, np.arange(len(places))[None], no, no) if factor.wide is None else factor.wide
    return replace(factor, wide=wide.among(rows, places))


def rows_of(matrices: Matrices, center: Any) -> Rows:
    """Return the keys that take part, minus their mean if `center`."""
    rows = Rows.of(matrices)
    return centered(rows) if center else rows


def check_method(method: Any) -> bool:
    """Raise for an unknown method of leverage scores; return whether the method is approximate."""
    if check_sketches(method):
        return True
    if not isinstance(method, str) or method not in (*_EXACT, *SCORE_SKETCHES):
        names = ", ".join(map(repr, (*_EXACT, *SCORE_SKETCHES)))
        raise ValueError(f"method is {method!r}; expected one of {names}, or a sketch such as OSNAP(4096, seed=0)")
    return method in SCORE_SKETCHES


def ridge_of(ridge: Any, relative_ridge: Any) -> Ridge:
    """Return the λ that two arguments give, of which one at most is not zero, or raise."""
    number, relative = real_number("ridge", ridge), real_number("relative_ridge", relative_ridge)
    if not 0 <= number < math.inf:
        raise ValueError(f"ridge is {ridge!r}; expected a finite number of at least 0, λ itself, in the units of KᵀK")
    if not 0 <= relative < math.inf:
        raise ValueError(
            f"relative_ridge is {relative_ridge!r}; expected a finite number of at least 0, λ over ‖K‖²/d"
        )
    if number and relative:
        raise ValueError(
            f"ridge and relative_ridge are {ridge!r} and {relative_ridge!r}; expected one of them: "
            "λ itself, or λ over ‖K‖²/d"
        )
    return Ridge(math.sqrt(number), relative)


@where_arrays_are
def leverage_scores(
    K: Any,
    /,
    *,
    method: ScoreMethod = "auto",
    rank: int | None = None,
    ridge: float = 0.0,
    relative_ridge: float = 0.0,
    center: bool = False,
    mask: Any = None,
    weights: Any = None,
    rtol: float | None = None,
) -> Any:
    r"""Leverage scores of keys: the largest attention that any query can give each of them.

    The score of key :math:`k_j` is

    .. math:: \tau_j = k_j^T (K^T K)^+ k_j = \max_q \langle q, k_j\rangle^2 / \sum_l \langle q, k_l\rangle^2,

    so that no attention score with f(x) = x² ever exceeds it. Scores lie in [0, 1] and sum to the rank of K, except
    for rows at the edge of the rank, which count as 1.

    The estimated relative error of an exact score is below 1e-6 for float32 and narrower keys. By "auto" it is below
    1e-5 from 2048 such keys on. Their products are in float32 where this bound holds: up to a condition number of
    about 100. (It is a few 1e-7 for keys of real heads. The worst case are well-conditioned keys of which thousands
    are equal, and so round alike.) For float64 keys the error is below 1e-10 up to the condition number 10⁶ and below
    1e-9 beyond, as long as the rank is clear.

    Stored keys count as exact data: the rank is decided in float64 whatever the dtype. A row that reaches outside the
    numerical row space by more than rounding (about :math:`64 d \, 2^{-53}` of its size) has the score 1. So a rank
    decision may over-estimate a score. It under-estimates a score only if everything that sets the key apart is
    smaller than that rounding. (`universal_set` uses the exact rank and loses no such key.)

    Parameters
    ----------
    K : array of shape (..., n, d), or chunks of one
        Keys, one per row; leading axes are batches (heads). The dtype is float64, float32, float16 or bfloat16. K may
        be a numpy array, a torch tensor, an array of JAX, or an array of another namespace of the array-API standard.
        Or it may be one sparse matrix (n, d) in scipy's CSR format, float64 or float32, which is never converted to a
        dense array.
        Method "svd" refuses it, and "srht" takes as long as for dense keys. Chunks come as in `universal_set`, for
        example from files opened with `open_keys`. The methods "auto" and "gram" alone read them twice and never hold
        them together. With other options files are loaded, and other chunks refused.
    method : {"auto", "gram", "qr", "svd"}, or a sketch or its name
        Four methods are exact. "gram": moments in float64, formed again in a well-conditioned basis where one pass
        loses the precision. "auto": as "gram", with products in float32 where the error above allows it. "qr":
        Householder QR of row blocks. "svd": singular value decomposition, with a float64 copy of one matrix in memory.
        The moments of the whitened keys correct "qr" and "svd" once. The other methods are approximate (see Notes):
        a sketch of the rows, `CountSketch`, `OSNAP` or `SRHT` of `levattn.sketch`, such as ``OSNAP(4096, seed=0)``. Or
        a `GaussianJL`, a projection of the columns. Or a pair of both. The names "countsketch", "osnap", "srht" and
        "jl" stand for default sizes and the seed 0. "osnap" and "srht" have 8 d rows, and "jl" has 8 ln n columns.
        "countsketch" has 4 d² rows, but no more than the larger of n/8 and 16 d. "auto" uses no sketch.
    rank : int, optional
        Takes the k = `rank` largest singular values of K alone. Scores are then the squared norms of the rows of the
        first k left singular vectors, and sum to k. They measure influence on the best approximation of rank k, and
        depend on the units of the columns. Rounding errs by about ``2⁻⁵³ d σ₁²/(σ_k (σ_k − σ_k₊₁))``, both ways.
        A rank of at least the rank of K changes nothing. It goes with the exact methods, all of which give the same.
    ridge : float, default 0
        The number λ itself: scores are :math:`k_j^T (K^T K + \lambda I)^+ k_j`, as of ridge regression with a penalty
        of :math:`\lambda \|\beta\|^2` beside the sum of squares. It has the units of KᵀK. It *under-estimates* every
        leverage score, so a threshold on ridge scores may miss keys. The sum of the scores is `effective_dimension`.
    relative_ridge : float, default 0
        The same for λ = ``relative_ridge * ‖K‖_F² / d``, which has no units: multiples of the keys keep their scores.
        The norm is taken after mask, weights and center. One of both arguments may be given. Below about 10⁻²⁸
        rounding hides it from keys that are 10¹⁴ times as short as others.
    center : bool, default False
        Subtracts the mean of the keys first, which suits softmax: a common shift does not change it. The result is the
        exact scores of the centered keys, and with 1/n added an *over-estimate* of the scores of K. The mean is held
        in three parts, so scores are the same however far the keys lie from zero. They sum to the rank of the
        centered keys, at most n - 1.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part. The others are removed: their score is 0 and their values are not read.
        Leading axes of size 1 are repeated.
    weights : array of float, broadcast to (..., n), optional
        The weight w of each key, finite and of at least 0, as in weighted least squares. The keys √w k have the
        scores :math:`w_j k_j^T (K^T W K)^+ k_j`. A key of weight 0 is removed, as by a mask. A common
        factor of the weights changes no score without `ridge`. Products √w k are rounded, which adds about 2⁻⁵² times
        the condition number to the relative error of a score. Chunks with weights have scores of float64. Weights and
        `center` do not go together: for a weighted mean append a column of ones to K.
    rtol : float below 1, optional
        Singular values of K, with columns scaled to unit norm, count as zero at or below ``rtol`` times the largest.
        This *under-estimates* the scores of rows that reach into the directions left out. The default,
        :math:`16 \sqrt{d} \, 2^{-52}`, is the smallest value allowed; with it such rows have the score 1 instead.

    Returns
    -------
    array of shape (..., n)
        Scores in the caller's kind of array, on its device: float64 for float64 keys, else float32.

    Raises
    ------
    TypeError
        If K is not an array of real floating dtype, or the mask is not boolean.
    ValueError
        If a shape, a range or an option is wrong.
    NonFiniteError
        If the keys hold NaN or infinity outside the mask; the first such rows are named.
    KeyFileError
        A ValueError: if files change while they are read. Other chunks that are not the same each time raise a
        ValueError.

    Warns
    -----
    RankWarning
        If more keys count as 1 than K has columns, although scores add up to the rank at most.

    See Also
    --------
    universal_set : The keys whose score is at least ε.
    levattn.definitions.leverage_scores : The definition, in NumPy.

    Notes
    -----
    Time O(n d²): two passes over K up to a condition number of some 10⁴ (float64 keys: 100), about five beyond.
    Deciding the rank takes a few more. Memory beyond K and the scores: O(d² log n) for each thread; method="svd" needs
    O(n d). With n < d time O(n² d) and memory O(n d), as the rank's number of columns is enough (not with `ridge` or
    `rtol`). Independent rows then have the score 1, exactly. The results are the same, to the bit, for
    every number of threads, memory layout and batch. *Sparse keys*: time O(Σ nnz² of a row + nnz d + d³), memory
    O(d² + n) and some row blocks beyond K. Columns that depend exactly on others, as in full sets of dummies, cost no
    more. Centered, ill-conditioned or hardly sparse keys cost O(n d²). With n < d
    the time is O(nnz + n³) where most columns have few entries, and never above O(n² d). Columns of zeros do not
    count in d. The memory is O(nnz + n²), and O(n d) with `center`.

    *Approximate methods* may err both ways; `universal_set` turns their scores into upper bounds. A sketch of the rows
    S factors SK in the place of K. If S changes squared norms of the column space by a factor within 1 ± η, scores lie
    within τ/(1 + η) and τ/(1 − η). `levattn.sketch` has the sizes with a proof of this, far above the defaults. With
    the defaults η is about 0.5 for keys without coherent rows. (CountSketch takes about d² rows where keys are
    coherent; with fewer it fails there.) The sketches take one pass less over K than the exact methods and save
    nothing up to d of about 256. A ``GaussianJL(k)`` projects the whitened keys to k columns, and sketched keys
    in a pair. This multiplies each score by χ²_k/k, of standard deviation √(2/k), and the pass of the scores costs
    n d k. With k ≥ d/4, and so for d ≤ 256, this does not help.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), section 3 for f(x) = x².

    Examples
    --------
    Two keys in directions of their own, and two that share one:

    >>> import numpy as np, levattn
    >>> K = np.array([[1.0, 0, 0], [0, 2, 0], [0, 0, 3], [0, 0, 3]])
    >>> levattn.leverage_scores(K).round(6)
    array([1. , 1. , 0.5, 0.5])
    """
    approximate = check_method(method)
    source = as_source(K)
    if source is not None:
        plain = not np.any(center) and all(option is None for option in (rank, mask, rtol))
        if method in SCANNED and plain and not source.sparse and not ridge_of(ridge, relative_ridge):
            return scores_of_chunks(source.times_roots(weights), str(method))
        if not isinstance(K, KeySource):
            raise ValueError(
                "K gives chunks; expected method 'auto' or 'gram', and no rank, ridge, center, mask or rtol. "
                "For other options give keys in an array or a file"
            )
        given: dict[str, Any] = {"method": method, "ridge": ridge, "relative_ridge": relative_ridge}
        given |= {"rank": rank, "center": center, "mask": mask, "weights": weights, "rtol": rtol}
        with whole_keys(K, sparse=True) as keys:
            return leverage_scores(keys, **given)
    matrices, roots, power = read_keys(K, mask, weights, center)
    if approximate:
        if rank is not None:
            raise ValueError(f"rank is {rank!r}; expected None for method={method!r}, which has no singular vectors")
        if ridge or relative_ridge or rtol is not None:
            raise ValueError(
                f"ridge, relative_ridge and rtol are {ridge!r}, {relative_ridge!r} and {rtol!r}; expected 0, 0 and "
                f"None for method={method!r}"
            )
        return matrices.wrap(_approximated(matrices, method, center, roots))
    added = ridge_of(ridge, relative_ridge)
    if rank is not None:
        count = whole_number("rank", rank, what="a whole number of singular values")
        if added or rtol is not None:
            raise ValueError("rank is given with a ridge or rtol; expected one of them, as each changes the scores")
        rows = replace(rows_of(matrices, center), weights=roots)
        full = factorize(matrices, method="gram", center=center, weights=roots)
        return matrices.wrap(to_device(scores_of_rank(rows, full, count), matrices.data))
    if rtol is not None:
        rtol, least = real_number("rtol", rtol), rank_tolerance(matrices.d)
        if not least <= rtol < 1:
            raise ValueError(
                f"rtol is {rtol!r}; expected a number from {least:.2g} (the rounding of float64, the default) "
                "to 1, relative to the largest singular value"
            )
    options: dict[str, Any] = {"ridge": added.below(power), "center": center, "rtol": rtol, "weights": roots}
    factor = factorize(matrices, method=str(method), scores_only=True, **options)
    scores, counted = factor.scores(numerical=True)
    _warn_of_ones(scores, counted, matrices, factor.rank)
    if isinstance(matrices.data, Csr):  # a ridge may take them to other keys, of float64
        scores = scores.astype(np.float64 if matrices.format == "float64" else np.float32, copy=False)
    return matrices.wrap(scores)


def scores_of_chunks(source: Source, method: str, progress: Any = None, path: Any = None) -> Any:
    """Return the scores of keys in chunks, in two passes; `path` is of a checkpoint."""
    checkpoint = Checkpoint.checked(path, None, {"scores": method, **source.job})
    found = two_passes(source, None, progress, checkpoint, single=method == "auto", numerical=True)
    checkpoint.remove()
    _warn_of_ones(found.scores, found.counted, found.example, found.factor.rank, chunks=True)
    return found.example.wrap(found.scores)


def _warn_of_ones(scores: Any, counted: Flags, matrices: Matrices, rank: Any, *, chunks: bool = False) -> None:
    """Warn of matrices of which more keys count as 1 than they have columns: scores add up to the rank at most."""
    if not counted.any():
        return
    ones, batch, columns = to_numpy(scores == 1).sum(axis=1), matrices.batch, matrices.d
    many = np.flatnonzero(counted & (ones > columns))
    if len(many):
        first = int(many[0])
        place = f" at {tuple(map(int, np.unravel_index(first, batch)))} of the batch" if batch else ""
        warnings.warn(
            f"K{place} is rank-deficient up to rounding (numerical rank {rank[first]} of {columns} columns), so that "
            f"{ones[first]} keys count as 1. {'Give the keys in memory, or leave' if chunks else 'Leave'} keys out "
            "that are many times as long as the others, or multiply K by an orthonormal basis of its row space",
            RankWarning,
            stacklevel=4 + chunks,
        )


def read_keys(K: Any, mask: Any, weights: Any, center: Any) -> tuple[Matrices, Float64 | None, int]:
    """Return the keys that take part, the roots of their weights over a power of two, and that power."""
    check_bool(center=center)
    if weights is not None and center:
        raise ValueError(
            "weights are given and center is True; expected one of both. For scores of keys less their weighted mean "
            "append a column of ones to K, and subtract w / sum(w) from its scores"
        )
    return weighted(as_matrices(K, "K", sparse=True).masked(mask), weights)


def _approximated(matrices: Matrices, method: Any, center: Any, weights: Float64 | None) -> Any:
    """Return approximate scores, (b, n)."""
    left, right = sketches_of(method, matrices.n, matrices.d)
    rows = replace(rows_of(matrices, center), weights=weights)
    factor = factor_moments(rows) if left is None else sketched_factor(rows, Sketch(left))
    factor = factor if right is None else projected(factor, right)
    if left is None:
        return factor.scores()[0]
    found = factor.scores(member=False)[0]  # rows with a part in columns that a sketch cancels count as 1
    xp = array_namespace(found)
    return xp.minimum(found, xp.ones_like(found))


_TAME = 300  # largest power of two of entries that are read unscaled
_FAR = 400  # powers of two by which an entry may exceed its unit
_NONE = -(1 << 20)  # stands for the exponent of zero
_ROWS = 4096  # in a block


@where_arrays_are
def online_leverage_scores(K: Any, /, *, ridge: float = 0.0, mask: Any = None) -> Any:
    r"""Online leverage scores of keys: the largest attention that any query can give each key when it comes.

    The score of key :math:`k_t` is its leverage score among the keys up to and including it,

    .. math:: \tau_t = k_t^T \Bigl(\lambda I + \sum_{s \le t} k_s k_s^T\Bigr)^+ k_t .

    It is the largest attention that a key can ever get under a causal mask, because a leverage score only falls as
    keys are added. So, up to rounding,

    - no online score is below the leverage score of the key among all keys (with the same λ);
    - for λ > 0 scores are below 1, and :math:`\sum_t -\log(1 - \tau_t) = \log\det(I + K^T K / \lambda)`. Hence
      :math:`\sum_t \tau_t \le d \log(1 + \|K\|_F^2 / (d \lambda))`;
    - for λ = 0 a key that opens a new direction scores 1. There are r = rank such keys, at distances :math:`\delta_i`
      from the span of the keys before. The other scores sum to at most
      :math:`\log \prod_i \sigma_i^2 / \delta_i^2`, with σ the singular values of K that are not 0.

    All computation is in float64, whatever the dtype of the keys. The relative error of a score is about 2⁻⁵³ times
    the condition number of the keys so far, whatever their number. (√λ counts as a further singular value; for λ = 0
    the columns are scaled to unit norm.) The rank is decided key by key, and errs upward. A key scores 1 if it reaches
    outside the span of the keys before by more than rounding. (That is about :math:`64 d \, 2^{-53}` of its size, and
    of the terms that cancel.) For ill-conditioned, rank-deficient keys that may be one key too many, and later scores
    are then *over*-estimates. Scores *under*-estimate only parts that are smaller than rounding.

    Parameters
    ----------
    K : array of shape (..., n, d)
        Keys in the order in which they come, as in `leverage_scores`, but not sparse.
    ridge : float, default 0
        The number λ, at least 0, as in `leverage_scores`. It lowers every score.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part. The others score 0, later scores ignore them, and their values are not read.

    Returns
    -------
    array of shape (..., n)
        Scores in the caller's kind of array, on its device: float64 for float64 keys, else float32. Later keys do not
        change the scores of earlier keys, to the last bit.

    Raises
    ------
    TypeError
        If K is not an array of real floating dtype, the ridge is no number, or the mask is not boolean.
    ValueError
        If a shape or the ridge is out of range.
    NonFiniteError
        If the keys hold NaN or infinity outside the mask; the first such rows are named.

    See Also
    --------
    leverage_scores : The scores among all keys.
    CausalUniversalSet : The keys of a growing prefix that can still receive an attention score of at least ε.
    levattn.definitions.online_leverage_scores : The definition, in NumPy.

    Notes
    -----
    Time O(n d r) for rank r, on one thread for each matrix: 10 to 30 times the time of `leverage_scores`. Memory O(d²)
    beyond K and the scores. Keys on another device are moved to main memory, and the scores back. Plane rotations, one
    per direction, rotate a key into the triangular factor of the keys before it, which is stored with its rounding
    errors. The score of the key is the sum of squares that these rotations take from it.

    References
    ----------
    Cohen, Musco and Pachocki, "Online Row Sampling", arXiv:1604.05448, for the notion and a bound of this kind.
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), name these scores as the way
    to causal attention.

    Examples
    --------
    A repeated direction counts for less each time:

    >>> import numpy as np, levattn
    >>> K = np.array([[1.0, 0], [1, 0], [0, 3], [2, 0]])
    >>> levattn.online_leverage_scores(K).round(6)
    array([1.      , 0.5     , 1.      , 0.666667])
    >>> scores = levattn.online_leverage_scores(K, ridge=0.5)
    >>> np.allclose(-np.log1p(-scores).sum(), np.linalg.slogdet(np.eye(2) + K.T @ K / 0.5)[1])
    True
    """
    matrices = as_matrices(K, "K")
    if not 0 <= real_number("ridge", ridge) < math.inf:
        raise ValueError(f"ridge is {ridge!r}; expected a finite number of at least 0, λ itself")
    _, rows = in_main_memory(K, mask)
    largest = KEYS.column_figures(rows, largest=True)
    if not np.isfinite(largest).all():
        require_finite(rows, largest)
    root = math.sqrt(ridge)
    from levattn._kernels.online import online_scores  # here, because it loads Numba

    scores = np.zeros(rows.shape[:2])
    for start, scale in _units(rows, largest, root):
        scores[:, start:] = online_scores(replace(rows, scale=scale), root * scale)[:, start:]
    return matrices.wrap(scores.astype(np.float64 if rows.format == "float64" else np.float32))


def _units(rows: Rows, largest: Float64, root: float) -> Iterator[tuple[int, Float64]]:
    """Yield powers of two (b, d) that keep squares in range, and the row from which on each applies.

    The powers of a row depend on the rows up to it alone. They come from the first entry of each column, and from
    entries that are much larger than the entries before.
    """
    d, base = rows.shape[2], math.frexp(root)[1] if root else _NONE
    units = np.full(largest.shape, base)
    there = [_first_entries(rows.item(item)) for item in range(len(units))]
    units = np.maximum(units, np.array(there, np.int64).reshape(-1, d))
    start: int | None = 0
    while start is not None:
        units = np.where(np.abs(units) > _TAME, np.clip(units, -1000, 1000), 0)
        yield start, np.ldexp(1.0, -units)
        start = None
        for item in np.flatnonzero((_exponents(largest) > units + _FAR).any(axis=1)).tolist():
            for low in range(0, rows.shape[1], _ROWS):
                found = _exponents(float64_rows(rows.item(item), low, min(low + _ROWS, rows.shape[1])))
                far = np.flatnonzero((found > units[item] + _FAR).any(axis=1))
                if len(far):
                    if start is None or low + far[0] < start:
                        start, change = low + int(far[0]), (item, found[far[0]])
                    break
        if start is not None:
            item, found = change
            units[item] = np.where(found > units[item] + _FAR, found, units[item])


def _exponents(X: Float64) -> npt.NDArray[np.int64]:
    """Return the exponents of numbers, `_NONE` for 0."""
    return np.where(X != 0, np.frexp(X)[1], _NONE)


def _first_entries(rows: Rows) -> npt.NDArray[np.int64]:
    """Return the exponent of the first nonzero entry of each column, for a batch of one."""
    out = np.full(rows.shape[2], _NONE)
    low, step = 0, 16  # mostly the first row has an entry in each column
    while low < rows.shape[1] and (out == _NONE).any():
        X = float64_rows(rows, low, min(low + step, rows.shape[1]))
        low, step = low + step, min(4 * step, _ROWS)
        first = X[np.argmax(X != 0, axis=0), np.arange(len(out))]
        out = np.where(out == _NONE, _exponents(first), out)
    return out
