"""Universal sets: the few keys that can ever receive a large attention score."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, array_namespace, as_matrices, to_device, to_float64, to_numpy
from levattn._core.checks import TIE, check_bool, check_epsilon, whole_number
from levattn._core.device import where_arrays_are
from levattn._core.types import Float64
from levattn._kernels import SELECT, Rows
from levattn.exceptions import AxesWarning, RankWarning
from levattn.functions import AttentionFunction, Power, Softmax, as_function, is_square
from levattn.io import KeySource
from levattn.io.source import whole_keys
from levattn.linalg.accumulator import UNIT
from levattn.linalg.factor import Factor
from levattn.linalg.weighted import weighted
from levattn.sensitivity.approximate import name_of, screen, sketches_of
from levattn.sensitivity.bounds import Bounds, CertificateMethod, certify
from levattn.sensitivity.leverage import SCANNED, ScoreMethod, check_method, factorize, rows_of
from levattn.sensitivity.two_pass import Checkpoint, Source, as_source, two_passes
from levattn.sets.result import Guarantee, UniversalSet, flag_counts, reaches, rescore_known, rescored, result_of

_Largest = Callable[[int], tuple[npt.NDArray[np.int64], Float64]]  # keys of a matrix, and the largest entry of each
_FAR_LONGER = 1e15  # times as long as most keys: beside longer ones rounding leaves no digit of a key
_SHOWN = 5  # keys in a warning
_NUMBERS = 1 << 20  # of keys that are read together for a warning
_Rescore = Callable[[npt.NDArray[np.int64], Any], Float64]  # float64 scores of the listed rows, one after the other
_SMALL_SCORE = 2.0**-100  # smaller float32 scores may have underflowed


def at_least(factor: Factor, scores: Any, present: Any, epsilon: float, rescore: _Rescore) -> tuple[Any, bool]:
    """Tell which scores are at least ε, and whether a doubtful score counted as such.

    Scores too close to ε for their precision are computed again in float64.
    """
    margin = _margin(factor)
    least = epsilon * (1 - margin) if epsilon > _SMALL_SCORE else np.zeros(len(margin))
    chosen, starts, near = SELECT.threshold(scores, present, least, epsilon * (1 + margin))
    doubt = False
    if len(near):
        slack, again = np.repeat(np.maximum(TIE, 4 * factor.error), np.diff(starts)), rescore(starts, near)
        taken = ~(again < epsilon * (1 - slack))
        SELECT.include(chosen, starts, near, taken)
        doubt = bool((taken & (slack > 2 * TIE) & ~(again >= epsilon * (1 + slack))).any())
    return chosen, doubt


def largest_scores(
    factor: Factor, scores: Any, present: Any, size: int, rescore: _Rescore
) -> tuple[Any, Float64, bool]:
    """Choose by score descending, then index ascending; return the largest score of each matrix left out, too.

    Scores too close to call are computed again in float64. An error that is not small raises the largest score left
    out, and the last result tells whether chosen scores may then lie below it.
    """
    margin = _margin(factor)
    chosen, close, leaders = SELECT.largest_and_left(scores, present, size, margin)
    if leaders is None:
        starts, rows = close
        taken, again = np.ones(len(rows), np.bool_), rescore(starts, rows)
        missing = np.maximum(size - flag_counts(chosen), 0)
        for item in np.flatnonzero(np.diff(starts) > 1).tolist():  # a single one is the last of its set
            start, stop = starts[item : item + 2].tolist()
            taken[start + np.argsort(-again[start:stop], kind="stable")[missing[item] :]] = False
        SELECT.include(chosen, starts, rows, taken)
        leaders = SELECT.leaders(scores, ~chosen if present is None else present & ~chosen, margin)
    starts, rows = leaders
    left, some = np.zeros(len(margin)), np.flatnonzero(starts[1:] - starts[:-1])
    if len(some):
        left[some] = np.maximum.reduceat(rescore(starts, rows), starts[some])
    slack = 4 * factor.error
    raised = (slack > TIE) & (left > 0)
    left[raised] = np.minimum(left[raised] * (1 + slack[raised]), 1.0)
    unsure = raised & (slack > 2 * TIE)
    if not unsure.any():
        return chosen, left, False
    with np.errstate(divide="ignore", over="ignore"):
        reciprocal = SELECT.maxima(1 / scores, chosen)  # of the smallest chosen score
    return chosen, left, bool((unsure & (reciprocal * left * (1 + margin) > 1)).any())


def rescored_all(
    factor: Factor,
    matrices: Matrices,
    starts: npt.NDArray[np.int64],
    rows: Any,
    weights: Float64 | None = None,
    above: dict[int, Float64] | None = None,
) -> Float64:
    """Return the scores of the listed keys of every matrix, computed in float64, one after the other.

    weights: (b, n) the roots of the weights of all keys. above: bounds of the scores of some matrices.
    """
    keys, there = SELECT.stacked(matrices.data, starts, rows)
    taken = None
    if weights is not None:
        taken, listed = np.ones(keys.shape[:2]), to_numpy(rows)
        for item, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
            taken[item, : stop - start] = weights[item, listed[start:stop]]
    found, _ = factor.exactly().on(Rows(keys, matrices.format, there, weights=taken)).scores(as_float64=True)
    scores = to_numpy(found)
    for item, bounds in (above or {}).items():
        start, stop = starts[item : item + 2].tolist()
        scores[item, : stop - start] = np.minimum(scores[item, : stop - start], bounds[to_numpy(rows)[start:stop]])
    return np.asarray(scores[np.arange(scores.shape[1]) < (starts[1:] - starts[:-1])[:, None]])


def _margin(factor: Factor) -> Float64:
    """Return the relative difference below which scores of each matrix are too close to call."""
    return np.maximum(4 * factor.score_error, TIE)


_MANY = 32  # matrices along an axis, from which it may be the axis of the keys
_MANY_OF_CHUNK = 256  # as many where a chunk is read, which may have few rows of many heads
_WIDTHS = 16  # divides the usual widths of heads, which are at most
_WIDEST = 256


def warn_of_axes(batch: tuple[int, ...], n: int, d: int, *, chunk: bool = False, stacklevel: int = 4) -> None:
    """Warn where the axes of keys (*batch, n, d) look exchanged; a first `chunk` of keys may be short."""
    if not batch or not n:
        return
    remedy = None
    if n <= d < batch[-1] and batch[-1] >= (_MANY_OF_CHUNK if chunk else _MANY) and not (chunk and n == 1):
        remedy = "(..., keys, heads, columns), give K.swapaxes(-3, -2)"
    elif not chunk and n % _WIDTHS == 0 and d > _WIDEST and 4 * n <= d:
        remedy = "(..., heads, columns, keys), give K.swapaxes(-2, -1)"
    if remedy is not None:
        warnings.warn(
            f"K has shape {(*batch, n, d)}: {n} keys of {d} columns in each of {math.prod(batch)} matrices, so that "
            f"each set may hold all its keys. Where the axes are {remedy}",
            AxesWarning,
            stacklevel=stacklevel,
        )


def warn_of_rank(
    ones: npt.NDArray[np.int64],
    factor: Factor,
    epsilon: float,
    *,
    chunks: bool,
    largest: _Largest | None,
    stacklevel: int = 4,
) -> None:
    """Warn where more keys of a set count as 1 than rank/ε allows: `ones` (...,) of them, from a superset for x².

    `chunks` tells whether the keys came in chunks, so that keys in memory may have a smaller set. `largest` gives the
    keys of a matrix, by its number, and the largest entry of each. It is None where keys cannot be read again.
    """
    ranks, columns = factor.rank.reshape(ones.shape), factor.columns
    large = (ones > factor.resolved_rank.reshape(ones.shape) / epsilon) & (ranks < columns)
    if not large.any():
        return
    place = tuple(int(i) for i in np.argwhere(large)[0])
    further = int(large.sum()) - 1
    of = f" at {place} of the batch" + (f" (and in {further} more matrices)" if further else "") if ones.ndim else ""
    found = None if largest is None else _far_longer(*largest(int(np.flatnonzero(large)[0])))
    if found is not None:
        remedy = (
            f"{found}, and rounding hides the others. For a smaller set leave such keys out, and add them to the set "
            "of the others: together these miss none. Or scale them down, if they are an accident"
        )
    else:
        remedy = (
            f"For a smaller set {'give the keys in memory to universal_set, or ' if chunks else ''}drop the columns "
            "that depend on others, or multiply K by an orthonormal basis of its row space"
        )
        if largest is None:
            remedy += (
                f". If a few keys are {_FAR_LONGER:.0e} times as long as most, leave these out and add them to the set"
            )
    warnings.warn(
        f"K{of} is rank-deficient up to rounding (numerical rank {ranks[place]} of {columns} columns), so that "
        f"{ones[place]} keys count as 1, more than rank/epsilon = {ranks[place] / epsilon:.6g}. {remedy}",
        RankWarning,
        stacklevel=stacklevel,
    )


def _far_longer(numbers: npt.NDArray[np.int64], largest: Float64) -> str | None:
    """Return a clause about keys so much longer than most that rounding hides the others; None without any."""
    usual = np.median(largest[largest > 0]) if largest.any() else 0.0
    far = np.flatnonzero(largest / _FAR_LONGER > usual) if usual else numbers[:0]
    if not far.size:
        return None
    shown, rest = ", ".join(map(str, numbers[far[:_SHOWN]].tolist())), len(far) - _SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    with np.errstate(over="ignore"):
        ratio = largest[far].min() / usual
    told = f"{ratio:.0e}" if np.isfinite(ratio) else "more than 1e+308"
    verb = "has entries" if len(far) == 1 else "have entries"
    return f"Key{'s' if len(far) > 1 else ''} {shown}{more} {verb} {told} times as large as most keys"


def largest_entries(matrices: Matrices, number: int) -> tuple[npt.NDArray[np.int64], Float64]:
    """Return the numbers of the keys of a matrix that take part, and the largest entry of each, in absolute value."""
    one = matrices.item(number)
    step, found = max(1, _NUMBERS // max(1, one.d)), np.zeros(one.n)
    for start in range(0, one.n, step):
        stop = min(start + step, one.n)
        part = to_float64(one.data[0:1, start:stop, :], one.format)[0]
        found[start:stop] = np.abs(part).max(axis=1, initial=0.0)
    present = np.flatnonzero(one.present[0])
    return present, found[present]


_BLOCK_EPSILON = 0.05  # ε of the bounds where a size is given


@where_arrays_are
def universal_set(
    K: Any,
    /,
    epsilon: float | None = None,
    *,
    size: int | None = None,
    f: Any = 2,
    method: ScoreMethod | CertificateMethod = "auto",
    center: bool = False,
    mask: Any = None,
    weights: Any = None,
) -> UniversalSet:
    r"""Find the keys that can receive an attention score of at least ε from some query.

    For f(x) = x² and :math:`A_{ij} = \langle q_i, k_j\rangle^2 / \sum_l \langle q_i, k_l\rangle^2` the set is

    .. math:: U_\varepsilon = \{j : \tau_j \ge \varepsilon\}, \qquad |U_\varepsilon| \le \mathrm{rank}(K)/\varepsilon

    with the leverage scores τ. For *every* query each key with :math:`A_{ij} \ge \varepsilon` lies in the set. Each
    key in the set has a query that gives it at least ε, so no smaller set would do. Where the bound is not below n,
    the theorem says nothing (`is_vacuous`). For other functions f the set leaves out a key if its sensitivity is
    certified to be below ε.

    Parameters
    ----------
    K : array of shape (..., n, d), or chunks of one
        Keys as in `leverage_scores` (sparse keys for x² only), or chunks (..., m, d) of keys, in order. Chunks come
        from files opened with `open_keys`, any other object that can be iterated again and again, or a function that
        returns an iterator. (A list or tuple is an array: matrices in it are a batch.) For x² the exact methods "auto"
        and "gram" read the chunks twice and never hold them together. In all other cases files are loaded, and other
        chunks refused. Use the keys that enter the attention: after rotary embedding, one set for each head.
    epsilon : float in (0, 1]
        Smallest attention score that counts as large. Scores within 1e-9 (relative) of ε count as at least ε. Where
        four times the estimated error of a score is more (condition numbers above about 10⁶), that margin applies.
    size : int in [0, n]
        Instead of `epsilon`: the number of keys to take, of the largest scores, and by index among equal scores.
        `epsilon` of the set is then the ε that it certifies.
    f : float, str, AttentionFunction or Softmax, default 2
        Attention function; a number p is abs(x)^p. For all but x² the set consists of the keys whose certified bound
        (`sensitivities`) is at least ε: a superset. For `Softmax` it holds for queries within its radius.
    method : str or sketch, default "auto"
        For x² a method of `leverage_scores`, else a certificate of `sensitivities`. The approximate methods, such as
        ``OSNAP(4096, seed=0)``, make a
        superset: their measured distortion raises the scores. So these bound the true scores from above, except with a
        probability of 1e-6. `UniversalSet.rechecked` makes it exact again.
    center : bool, default False
        Subtract the mean of the keys, which does not change softmax. The set is then exact for x² attention over the
        centered keys and guarantees nothing over K itself: ``guarantee`` is "none".
    mask : array of bool, shape (..., n), optional
        True for a key that takes part; the others are removed and never in the set.
    weights : array of float, broadcast to (..., n), optional
        The weight w of each key, as in `leverage_scores`. The set is the set of the keys √w k, whose attention is
        proportional to :math:`w_j \langle q_i, k_j\rangle^2`. Functions that take a set with its keys want the keys
        √w k, of float64. A key of weight 0 is never in the set. Weights need x² and an exact method.

    Returns
    -------
    UniversalSet
        The keys of the set, the scores of all keys, and the guarantee.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, or not exactly one of `epsilon` and `size` is given.
    NonFiniteError
        If the keys hold NaN or infinity outside the mask.
    KeyFileError
        A ValueError: if files change while they are read. Other chunks that are not the same each time raise a
        ValueError, which names their source and the first 2048 rows that differ.

    Warns
    -----
    AxesWarning
        If the axes of the keys look exchanged: n ≤ d, and more than d matrices (and at least 32) along the axis
        before. Also if a batch has d > 256, and n is at most d/4 and a multiple of 16, like the width of a head.
    RankWarning
        If keys are rank-deficient up to rounding, and count as 1 in a set for x² that is therefore larger than rank/ε.

    See Also
    --------
    scan_set : The same for chunks, with progress and checkpoints.
    covering_set : The keys for queries like given ones.
    heavy_attention : The large attention scores themselves.
    UniversalSet.with_groups : The set with groups of near-copies, in which attention may hide.
    levattn.definitions.universal_set : The definition, in NumPy.

    Notes
    -----
    Time O(n d²) and memory O(n + d² log n) beyond K, or beyond a chunk of it. With n < d an exact method takes O(n² d)
    and O(n d). Scores of float32 keys are computed in float32, and scores near ε again in float64. The distortion of
    the approximate methods is measured on the second moment: exactly up to d = 320, else by Lanczos' method. A
    generator, which gives its chunks once, is refused: `StreamingUniversalSet` takes it.

    *Chunks* must be the same keys each time they are read; `scan_set` says how this is checked.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), Theorem 1 (existence and
    size of the universal set).

    Examples
    --------
    A thousand keys, three of them in a direction of their own:

    >>> import numpy as np, levattn
    >>> K = np.random.default_rng(0).standard_normal((1000, 8))
    >>> K[:, 5:] = 0
    >>> K[[10, 20, 30]] = 3 * np.eye(8)[5:]
    >>> levattn.universal_set(K, 0.1).indices
    array([10, 20, 30])
    """
    check_bool(center=center)
    function = as_function(f)
    square = is_square(function)
    approximate = square and check_method(method)
    if center and not square:
        raise ValueError(
            "center is True; expected False for all functions but x² (the bound of softmax centers by itself)"
        )
    asked = _Asked(epsilon, size, method, center)
    source = as_source(K)
    if weights is not None and (approximate or not square or center):
        raise ValueError(
            "weights are given; expected f = 2, an exact method and no center. Otherwise give keys times the roots of "
            "their weights"
        )
    if source is not None:
        if square and method in SCANNED and not center and mask is None and not source.sparse:
            return _warned(_of_chunks(source.times_roots(weights), asked))
        if not isinstance(K, KeySource):
            raise ValueError(
                "K gives chunks; expected f = 2, method 'auto' or 'gram', and no center or mask. "
                "For other options give keys in an array or a file"
            )
    with whole_keys(K, sparse=square) as keys:
        matrices = as_matrices(keys, "K", sparse=square).masked(mask)
        warn_of_axes(matrices.batch, matrices.n, matrices.d)
        asked = asked.checked(matrices.n)
        if approximate:
            return _from_sketch(matrices, asked)
        if not square:
            return _bounded(matrices, function, asked)
        return _warned(_exact(matrices, asked, weights), partial(largest_entries, matrices))


@where_arrays_are
def scan_set(
    source: Any,
    /,
    epsilon: float | None = None,
    *,
    size: int | None = None,
    method: str = "auto",
    weights: Any = None,
    progress: bool | Callable[[int, int | None], Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_rows: int | None = None,
) -> UniversalSet:
    r"""Find the universal set for x² of keys in chunks, in two passes that report progress and can resume.

    `universal_set` of the same source returns the same result.

    Parameters
    ----------
    source : chunks of shape (..., m, d), or files
        Keys in order: files opened with `open_keys`, any other object that can be iterated again and again, or a
        function that returns an iterator. A list or tuple is an array, and refused.
    epsilon : float in (0, 1]
        The threshold, as in `universal_set`.
    size : int in [0, n]
        Instead of `epsilon`: the number of keys to take.
    method : {"auto", "gram"}
        As in `leverage_scores`.
    weights : array of float, broadcast to (..., n), optional
        The weight of each key, as in `universal_set`.
    progress : bool or function, optional
        True for a progress bar (of rich), or a function of the rows done and their total. The total is of both passes
        together, None where it is not known.
    checkpoint : path-like, optional
        A file that saves, now and then, the progress of the passes; it is removed in the end. The passes resume from
        an existing file, with the same result. They refuse a file of another run or of other keys, whichever rows
        changed. The same keys may lie in another file, or come in other chunks.
    checkpoint_rows : int, optional
        Rows from one checkpoint to the next, about; 2²² if left out.

    Returns
    -------
    UniversalSet
        The keys of the set, the scores of all keys, and the guarantee.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, the source is an array, or not exactly one of `epsilon` and `size` is given.
    NonFiniteError
        If the keys hold NaN or infinity.
    KeyFileError
        A ValueError: if files change while they are read. Other chunks that are not the same each time raise a
        ValueError, which names their source and the first 2048 rows that differ.
    ImportError
        If `progress` is True and rich is not installed.

    Warns
    -----
    AxesWarning
        If the axes of the keys look exchanged, as in `universal_set`.
    RankWarning
        As in `universal_set`.

    See Also
    --------
    universal_set : The same without progress and checkpoints.
    StreamingUniversalSet : In one pass.

    Notes
    -----
    Time O(n d²) and memory O(n + d² log n) beyond a chunk.

    *Chunks* must be the same keys each time they are read. For files the system tells: their size, times, inode and
    device are compared. A digest of all bytes tells for other chunks, for zarr stores, for files that are new, and
    with a checkpoint. It has 64 bits for each 2048 rows. A change made without regard to its fixed constants, of one
    bit or of all rows, goes unnoticed with a probability of about 2⁻³². The passes digest
    rows while these are in the cache. This takes about 4 % of their time for d = 64, half of that for d = 128, and a
    tenth for d = 16. Moreover, the scores must add up to the rank, within their errors.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), Theorem 1.

    Examples
    --------
    >>> import pathlib, tempfile, numpy as np, levattn
    >>> K = np.random.default_rng(0).standard_normal((1000, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(pathlib.Path(folder, "keys.npy"), K)
    ...     source = levattn.open_keys(pathlib.Path(folder, "keys.npy"))
    ...     found = levattn.scan_set(source, 0.02, checkpoint=pathlib.Path(folder, "keys.checkpoint"))
    >>> len(found) == len(levattn.universal_set(K, 0.02))
    True
    """
    chunks = as_source(source, "source")
    if chunks is None:
        raise ValueError(
            f"source is of type {type(source).__name__}; expected chunks of keys: files opened with open_keys, an "
            "object to iterate twice, or a function that returns an iterator. Give arrays, lists and tuples to "
            "universal_set"
        )
    if method not in SCANNED:
        raise ValueError(f"method is {method!r}; expected 'auto' or 'gram', which read chunks")
    asked = _Asked(epsilon, size, method)
    chunks = chunks.times_roots(weights)
    return _warned(_of_chunks(chunks, asked, progress, checkpoint, checkpoint_rows))


def _warned(found: UniversalSet, largest: _Largest | None = None) -> UniversalSet:
    """Return the exact set for x², after a warning where rows count as 1 and make it larger than rank/ε.

    Without `largest`, of keys in memory, chunks are together here, so that a warning of their axes is due.
    """
    chunks = largest is None
    if chunks:
        warn_of_axes(found.batch, found.scores.shape[-1], found.factor.columns, stacklevel=5)
    if (
        found.guarantee == "superset"
        and not found.by_size
        and np.any(found.sizes > found.factor.resolved_rank.reshape(found.batch) / found.epsilon)
    ):
        xp = array_namespace(found.mask)
        ones = flag_counts(xp.logical_and(found.mask, found.scores == 1))
        warn_of_rank(ones, found.factor, found.epsilon, chunks=chunks, largest=largest, stacklevel=5)
    return found


@dataclass(frozen=True)
class _Asked:
    """Options of `universal_set`; one of `epsilon` and `size` is None."""

    epsilon: float | None
    size: int | None = None
    method: Any = "auto"
    center: bool = False

    def __post_init__(self) -> None:
        """Raise unless one of them is given."""
        if (self.epsilon is None) == (self.size is None):
            given = "neither" if self.epsilon is None else "both"
            raise ValueError(f"epsilon and size: {given} given; expected exactly one, a threshold or a budget")

    def checked(self, n: int | None) -> _Asked:
        """Return the options with checked numbers, for n keys if n is known."""
        epsilon = None if self.epsilon is None else check_epsilon(self.epsilon)
        size = None if self.size is None else whole_number("size", self.size, 0, n, what="a whole number of keys")
        return _Asked(epsilon, size, self.method, self.center)


def set_of(
    matrices: Matrices, f: AttentionFunction | Softmax, epsilon: float, *, center: bool = False
) -> UniversalSet:
    """Return the set of keys that were read, for a checked function and ε, by the method "auto"."""
    asked = _Asked(epsilon, center=center)
    return _exact(matrices, asked) if is_square(f) else _bounded(matrices, f, asked)


def _exact(matrices: Matrices, asked: _Asked, weights: Any = None) -> UniversalSet:
    """Return the set by exact leverage scores."""
    epsilon = asked.epsilon
    matrices, roots, power = weighted(matrices, weights)
    factor = factorize(matrices, method=asked.method, center=asked.center, single="scores", weights=roots)
    above = {} if roots is None else _bounds_of_rounded(factor, matrices, asked, roots)
    found, counted = factor.scores()
    for item, bounds in above.items():
        found[item, :] = to_device(np.minimum(to_numpy(found[item, :]), bounds).astype(found.dtype), found)
    if roots is not None:
        factor, roots = _of_weighted(factor, roots, power)
    scores = SELECT.held(found)
    present = None if matrices.mask is None else SELECT.held(matrices.mask)
    rescore = partial(rescored_all, factor, matrices, weights=roots, above=above)
    left = None
    if epsilon is not None:
        chosen, doubt = at_least(factor, scores, present, epsilon, rescore)
    else:
        chosen, left, doubt = largest_scores(factor, scores, present, asked.size or 0, rescore)
    return result_of(
        matrices,
        chosen,
        found,
        factor,
        scores,
        epsilon=epsilon,
        left=left,
        guarantee="none" if asked.center else "superset" if counted.any() or doubt else "exact",
        total_bound=_total(factor, found, counted),
        present=present,
    )


def _bounds_of_rounded(factor: Factor, matrices: Matrices, asked: _Asked, roots: Float64) -> dict[int, Float64]:
    """Return bounds of the scores of keys times roots (b, n), where rounded products hide directions, by matrix.

    Weights v of which all roots are powers of two, v ≤ w < 4 v, have products without rounding, and a smaller moment.
    So the scores with v, times w/v, are bounds.
    """
    powers = np.ldexp(1.0, np.frexp(roots)[1] - 1)
    rounded = [item for item in factor.hidden if (roots[item] != powers[item]).any()]
    if not rounded:
        return {}
    scores = factorize(matrices, method=asked.method, center=asked.center, single="no", weights=powers).scores()[0]
    bounds = to_numpy(scores).astype(np.float64) * (roots / powers) ** 2 * (1 + _ROUNDED)
    return {item: np.minimum(bounds[item], 1.0) for item in rounded}


_ROUNDED = 2.0**-22  # what scores of float32 keys may be too small by


def _of_weighted(factor: Factor, roots: Float64, power: int) -> tuple[Factor, Float64]:
    """Return the factor of keys times the roots of their weights, from that over a power of two, and the roots.

    The rounding of these products adds to the error of the factor.
    """
    roots, wide = np.ldexp(roots, power), factor.wide
    if wide is not None:  # which holds the keys, whose span no rounded product changes
        wide = replace(wide, rows=replace(wide.rows, weights=roots))
    hidden = {item: fine and _over_power(fine, power) for item, fine in factor.hidden.items()}
    shortened = {item: _over_power(one, power) for item, one in factor.shortened.items()}
    factor = replace(_over_power(factor, power), wide=wide, hidden=hidden, shortened=shortened)
    factor = replace(factor, rows=replace(factor.rows, weights=roots))
    return replace(factor, error=factor.error + 2 * UNIT * factor.condition), roots


def _over_power(factor: Factor, power: int) -> Factor:
    """Return a factor that reads rows divided by a power of two."""
    rows = factor.rows
    with np.errstate(over="ignore", under="ignore"):
        scale = np.ldexp(np.ones(rows.shape[::2]) if rows.scale is None else rows.scale, -power)
    if not ((scale > 0) & np.isfinite(scale)).all():
        raise ValueError("weights leave the range of float64 together with K; expected their largest near 1")
    return replace(factor, rows=replace(rows, scale=scale))


def _of_chunks(
    source: Source, asked: _Asked, progress: Any = None, path: Any = None, every: Any = None
) -> UniversalSet:
    """Return the set of keys in chunks, in two passes (for a size with ties, a few rows are read again)."""
    asked = asked.checked(source.n)
    epsilon, size = asked.epsilon, asked.size
    job = {"epsilon": epsilon, "size": size, "method": asked.method, **source.job}
    checkpoint = Checkpoint.checked(path, every, job)

    def choose(factor: Factor, matrices: Matrices, scores: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], bool]:
        if epsilon is None:
            return np.zeros(scores.shape, np.bool_), False
        rescore = partial(rescored_all, factor, matrices)
        chosen, doubt = at_least(factor, SELECT.held(scores), None, epsilon, rescore)
        return np.asarray(chosen), doubt

    found = two_passes(source, choose, progress, checkpoint, single=asked.method == "auto")
    factor, scores, chosen, left, doubt = found.factor, found.scores, found.chosen, None, False
    present = source.present(found.example.batch, scores.shape[1])
    if size is not None:
        asked.checked(scores.shape[1])

        def rescore(starts: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> Float64:
            again = np.zeros(len(rows))
            for item in np.flatnonzero(np.diff(starts)).tolist():
                part = slice(starts[item], starts[item + 1])
                again[part] = rescored(factor, item, found.rows(item, rows[part]))[0]
            return again

        chosen, left, doubt = largest_scores(factor, scores, present, size, rescore)
    checkpoint.remove()
    guarantee: Guarantee = "superset" if found.counted.any() or doubt else "exact"
    total = _total(factor, scores, found.counted)
    return result_of(
        found.example,
        chosen,
        scores,
        factor,
        scores,
        epsilon=epsilon,
        left=left,
        guarantee=guarantee,
        total_bound=total,
        present=present,
    )


def _total(factor: Factor, scores: Any, counted: npt.NDArray[np.bool_]) -> Float64 | None:
    """Return the bounds of the sums of the scores: the ranks, or the sums themselves where rows count as more."""
    if not counted.any():
        return None
    sums = to_numpy(scores).astype(np.float64).sum(axis=1)
    return np.where(counted & (sums > factor.rank + 0.5), sums, factor.rank.astype(np.float64))


def _from_sketch(matrices: Matrices, asked: _Asked) -> UniversalSet:
    """Return the set of the keys with the largest bounds from a sketch."""
    left, right = sketches_of(asked.method, matrices.n, matrices.d)
    screened = screen(rows_of(matrices, asked.center), left, right)
    ranks = screened.factor.rank.astype(np.float64)
    bounds = Bounds(screened.upper, (name_of(asked.method),), ranks, screened.factor, screened.upper.copy(), None)
    guarantee: Guarantee = "none" if asked.center else "superset"
    return _certified(matrices, Power(2.0), asked, bounds, guarantee, exact_factor=screened.exact)


def _bounded(matrices: Matrices, f: AttentionFunction | Softmax, asked: _Asked) -> UniversalSet:
    """Return the set by certified bounds of f."""
    epsilon = _BLOCK_EPSILON if asked.epsilon is None else asked.epsilon
    bounds = certify(matrices, f, method=asked.method, epsilon=epsilon)
    return _certified(matrices, f, asked, bounds, "superset")


def _certified(
    matrices: Matrices,
    f: AttentionFunction | Softmax,
    asked: _Asked,
    bounds: Bounds,
    guarantee: Guarantee,
    exact_factor: bool = True,
) -> UniversalSet:
    """Return the set of the keys with the largest certified bounds."""
    present = matrices.present
    b, n = present.shape
    left = None
    if asked.epsilon is not None:
        chosen = reaches(bounds.upper, asked.epsilon) & present
    else:
        chosen = np.zeros((b, n), np.bool_)
        for item in range(b):
            order = np.argsort(-np.where(present[item], bounds.upper[item], -1.0), kind="stable")[: asked.size]
            chosen[item, order] = present[item, order]
        left = np.max(np.where(present & ~chosen, bounds.upper, 0.0), axis=1, initial=0.0)
    rescore_known(matrices, bounds.factor, chosen, present, bounds.leverage)
    return result_of(
        matrices,
        chosen,
        bounds.upper,
        bounds.factor,
        bounds.leverage,
        epsilon=asked.epsilon,
        left=left,
        guarantee=guarantee,
        present=matrices.mask,
        f=f.p if isinstance(f, Power) else f,
        certificate=bounds.names,
        total_bound=bounds.total_bound,
        exact_factor=exact_factor,
        lift=bounds.lift,
    )
