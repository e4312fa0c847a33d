"""Random samples of rows by their scores, with the weights that keep sums right, and the distortion they reach."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, as_matrices, floats_of, is_torch, take_rows, to_device, to_numpy
from levattn._core.checks import check_nonnegative, count_of_rows, fraction, positive_number, real_number, whole_number
from levattn._core.device import where_arrays_are
from levattn._core.random import as_seed
from levattn._core.sparse import is_scipy_sparse
from levattn._core.types import Float64, Int64, format_of
from levattn._kernels import Rows
from levattn.io import KeySource
from levattn.io.source import whole_keys
from levattn.linalg.factor import Factor
from levattn.linalg.reading import as_read
from levattn.linalg.sums import moments_of_items
from levattn.linalg.weighted import weighted
from levattn.sensitivity.leverage import factorize, ridge_of
from levattn.sensitivity.two_pass import Checkpoint, Source, as_source, two_passes
from levattn.sketch.families import chernoff_exponent, log_of_ratio
from levattn.states.blocks import as_they_came

_BLOCK = 4096  # sampled rows that are whitened together
_MOST_DRAWS = 2**53  # float64 holds their counts


def sample_size(rank: float, /, distortion: float, failure: float = 0.01) -> int:
    r"""Rows that suffice in a sample by leverage scores, drawn with replacement.

    .. math:: m = \Bigl\lceil \frac{r \ln(2r/\delta)}{(1+\eta)\ln(1+\eta) - \eta} \Bigr\rceil

    Let S take the m rows and divide them by :math:`\sqrt{m p_j}`, with :math:`p_j = \tau_j / r`. Then with probability
    at least 1 − δ, ``‖S K y‖²`` is between 1 − η and 1 + η times ``‖K y‖²``, for all y at once.

    Parameters
    ----------
    rank : float
        The rank r of K, or an upper bound such as its number of columns, at least 1.
    distortion, failure : float in (0, 1)
        The largest relative change η of squared norms in the column space, and the probability δ of a larger one.

    Returns
    -------
    int
        Number of rows. If it is not below the number of rows of K, a sample is of no use.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong type or out of its range.

    See Also
    --------
    sample_rows : The sample.

    Notes
    -----
    Whitened rows have squared norms :math:`\tau_j`. So each term of their sum has norm r/m, and the sum has the mean
    I. The size is the one for which the matrix Chernoff bound is δ. With probabilities of at least
    β τ/r, the size is larger by 1/β. Time O(1).

    References
    ----------
    Tropp, "User-friendly tail bounds for sums of random matrices", 2012 (arXiv:1004.4389), Theorem 1.1.

    Examples
    --------
    >>> import levattn
    >>> levattn.sample_size(10, distortion=0.5)
    703
    """
    rank, eta, delta = positive_number("rank", rank), fraction("distortion", distortion), fraction("failure", failure)
    return count_of_rows(
        f"rank = {rank:g}, distortion = {eta:g} and failure = {delta:g}",
        lambda: rank * log_of_ratio(2 * max(rank, 1.0), delta) / chernoff_exponent(eta),
    )


def promised_distortion(rows: float, rank: int, delta: float) -> float:
    """Return the η below 1 at which the bound of so many rows, over the largest norm of a term, is δ, or infinity."""
    needed = log_of_ratio(2 * rank, delta) / rows if rows > 0 else math.inf
    low, high = 0.0, 1.0
    if needed > chernoff_exponent(high):
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if chernoff_exponent(middle) >= needed else (middle, high)
    return high


@dataclass(frozen=True, repr=False, eq=False)
class RowSample:
    """Rows drawn at random, with weights that make sums over them estimates of sums over all rows.

    The result of `sample_rows` and of `StreamingRowSample`, which decides about each row once: so m is 1 for it. A sum
    Σ f(k_j) over all rows is estimated without bias by Σ w f(k) over the sample.

    Attributes
    ----------
    indices : array of int64, shape (s,)
        The rows that were drawn, ascending, each once.
    weights : array of float64, shape (s,)
        The weight w of each: the number of its draws over m p, times its weight in the call.
    counts : array of int64, shape (s,)
        The number of its draws.
    probabilities : array of float64, shape (s,)
        The probability p of each in one draw.
    size : int
        Number m of draws; of `StreamingRowSample` the number s of rows.
    rows_of_all : int
        Number n of rows that were drawn from; of a stream, the number after its last row.
    eigenvalues : tuple of float
        The least and the largest ratio of ``Σ w ⟨k, y⟩²`` to ``‖K y‖²``, for any y outside the null space of K. With a
        ridge λ, both have λ‖y‖² added.
    promised : float
        The distortion that the theorem of `sample_size` promises for these draws, except with probability `failure`;
        infinite where it promises none below 1.
    failure : float
        The probability δ of the promise.
    keys : array of shape (s, d) or None
        The sampled rows of a stream, of files or of chunks, as they came (float32 for bfloat16). None where K is an
        array.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.random.default_rng(0).standard_normal((5000, 4))
    >>> sample = levattn.sample_rows(K, 600, rng=0)
    >>> S = sample.rows(K)
    >>> bool(np.linalg.norm(S.T @ S - K.T @ K, 2) <= sample.distortion * np.linalg.norm(K.T @ K, 2))
    True
    """

    indices: Int64
    weights: Float64
    counts: Int64
    probabilities: Float64
    size: int
    rows_of_all: int
    eigenvalues: tuple[float, float]
    promised: float
    failure: float
    keys: npt.NDArray[Any] | None = None

    @property
    def distortion(self) -> float:
        """The largest relative change of ``‖K y‖²`` over all y that this sample makes; measured, not estimated."""
        return max(1 - self.eigenvalues[0], self.eigenvalues[1] - 1, 0.0)

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        """Return the figures on one line."""
        figures = f"distortion={self.distortion:.6g}, promised={self.promised:.6g}, failure={self.failure:.6g}"
        return f"RowSample({len(self)} of {self.rows_of_all} rows, size={self.size}, {figures})"

    @where_arrays_are
    def rows(self, K: Any = None, /, p: float = 2.0) -> Any:
        """Return the sampled rows of an array, or of the sample's own keys, times ``w^(1/p)``.

        Then ``Σ |⟨k, y⟩|^p`` over them estimates the sum over all rows, as of squares for p = 2: give the keys, and
        the targets of a regression.

        Parameters
        ----------
        K : array of floats of shape (n, ...), or a sparse matrix in CSR format, optional
            The rows, or anything that goes with them. By default the sample's own `keys`, of a stream or of chunks.
        p : float, default 2
            The power, above 0.

        Returns
        -------
        array of shape (s, ...)
            In the kind and dtype of K, but float32 for a narrower one. The sample's own keys come as float64.

        Raises
        ------
        TypeError, ValueError
            If K has other numbers than floats, or not n rows, or p is not above 0. Also if K is left out and the
            sample has no keys, or weights or their products with K leave the range of its dtype.
        """
        p = positive_number("p", p)
        with np.errstate(over="ignore"):
            root = self.weights ** (1 / p)
        if not np.isfinite(root).all():
            raise ValueError(f"p is {p:g}, for which roots of weights exceed all numbers; expected a larger p")
        if K is None:
            if self.keys is None:
                raise ValueError("K is left out, and this sample is of an array; expected that array")
            return _times(self.keys.astype(np.float64), root[:, None])
        if is_scipy_sparse(K):
            format_of(K.dtype, "K", "K.astype('float64')")
        else:
            K, _ = floats_of(K, "K")
        n = K.shape[0] if K.shape else None
        if n != self.rows_of_all:
            raise ValueError(f"K has {n} rows; expected {self.rows_of_all}, the rows that were sampled")
        if is_scipy_sparse(K):
            sparse = K[self.indices].tocsr()
            sparse.data = _times(sparse.data, np.repeat(_roots_as(root, K.dtype), np.diff(sparse.indptr)))
            return sparse
        if isinstance(K, np.ndarray):
            kind = np.float32 if K.dtype.kind == "V" or K.dtype.itemsize == 2 else K.dtype
            roots = _roots_as(root, kind).reshape(-1, *(1,) * (K.ndim - 1))
            return _times(K[self.indices].astype(kind, copy=False), roots)
        xp = array_api_compat.array_namespace(K)
        kind = xp.float32 if str(K.dtype).endswith("float16") else K.dtype
        roots = _roots_as(root, np.float32 if str(kind).endswith("float32") else np.float64)
        taken = xp.take(K, to_device(self.indices, K), axis=0)
        return _times(xp.astype(taken, kind), xp.astype(to_device(roots.reshape(-1, *(1,) * (K.ndim - 1)), K), kind))


def _roots_as(roots: Float64, kind: Any) -> npt.NDArray[Any]:
    """Return roots of weights in a dtype, or raise where they leave its range."""
    with np.errstate(over="ignore", under="ignore"):
        found = roots.astype(kind)
    if not np.isfinite(found).all() or ((found == 0) & (roots > 0)).any():
        raise ValueError(
            f"roots of weights from {roots.min():.3g} to {roots.max():.3g} leave the range of {np.dtype(kind)}; "
            "expected K of float64"
        )
    return found


def _times(rows: Any, roots: Any) -> Any:
    """Return rows times roots of weights, or raise where finite rows leave the range of their dtype."""
    with np.errstate(over="ignore"):
        found = rows * roots
    xp = array_api_compat.array_namespace(found)
    if bool(xp.any(xp.isinf(found) & xp.isfinite(rows))):
        raise ValueError(f"K times the roots of weights leaves the range of {found.dtype}; expected K scaled down")
    return found


@where_arrays_are
def sample_rows(
    K: Any,
    /,
    size: int | None = None,
    *,
    distortion: float | None = None,
    failure: float = 0.01,
    scores: Any = None,
    ridge: float = 0.0,
    uniform: float = 0.0,
    mask: Any = None,
    weights: Any = None,
    rng: int | np.random.Generator | None = None,
) -> RowSample:
    r"""Draw rows with probabilities proportional to their leverage scores, and weigh them.

    The m draws are independent, with replacement. Row j has the probability
    :math:`p_j = (1 - u) s_j / \sum_l s_l + u/n`, with its score s and the share u of `uniform`, and the weight
    :math:`w = 1/(m p_j)` for each of its draws. So :math:`\sum w \, k k^T` has the mean KᵀK.

    For leverage scores and a size of `sample_size`, all ``‖K y‖²`` are kept within 1 ± η, except with probability δ.
    In the end the distortion of the sample is measured. It comes from the eigenvalues of its whitened second moment,
    which are exact up to rounding, because the factor of all rows is known.

    Parameters
    ----------
    K : array of shape (n, d), or chunks of one
        Rows, as in `leverage_scores`; also a sparse matrix. For least squares, ``min ‖K x − y‖``, give the columns
        of K and y together. Then the solution on the sample has at most (1 + η)/(1 − η) times the least sum of
        squares. Chunks, for example from files opened with `open_keys`, are never held together. They are read twice
        for the scores, and then for the sampled rows, which become the `keys` of the sample. With a ridge, a mask or
        weights files are loaded, and other chunks refused.
    size : int, optional
        Number m of draws, at least 1.
    distortion : float in (0, 1), optional
        Instead of `size`: the distortion η that is promised. Where it takes n draws or more, every row is taken, with
        a weight of 1.
    failure : float in (0, 1), default 0.01
        The probability δ that the promise fails.
    scores : array of shape (n,), optional
        Other scores s, finite and of at least 0, such as `lewis_weights` for a regression in :math:`\ell_p`, upper
        bounds of sensitivities, or approximate leverage scores. The promise takes their distance from the leverage
        scores into account. A row of score 0 is never drawn, unless `uniform` is above 0.
    ridge : float, default 0
        The number λ: scores are ridge leverage scores, whose sum is the effective dimension, and the distortion is of
        ``‖K y‖² + λ‖y‖²``. So the sample may be smaller than the rank.
    uniform : float in [0, 1], default 0
        The share u of uniform probabilities, as 0.5. It keeps all weights below n/(u m), so that rows of small scores
        cannot get large weights.
    mask : array of bool, shape (n,), optional
        True for a row that takes part.
    weights : array of float, broadcast to (n,), optional
        The weight of each row, as in `leverage_scores`. It multiplies the weight in the sample.
    rng : int, numpy.random.Generator or None
        Seed of the draws, or a generator that draws a seed; None for the seed 0.

    Returns
    -------
    RowSample
        Rows, weights, the promised distortion and the measured one.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, K is not one matrix, or not exactly one of `size` and `distortion` is given.
    NonFiniteError
        If the rows hold NaN or infinity outside the mask.
    KeyFileError
        A ValueError: if files change while they are read. Other chunks that are not the same each time raise a
        ValueError.

    See Also
    --------
    sample_size : The size of the theorem.
    StreamingRowSample : A sample of rows that come once, or of several parts.
    levattn.definitions.sample_rows : The definition, in NumPy.
    universal_set : The rows of large scores, all of them; it takes no chance, and keeps no sums.

    Notes
    -----
    Time O(n d² + s d²), memory O(n + d² log n) beyond K. For `distortion`, the size is
    :math:`m = \lceil L \ln(2r/\delta) / ((1+\eta)\ln(1+\eta) - \eta) \rceil`, where L is the largest ratio of a
    (ridge) leverage score to its probability: the rank without other options. The promise is for squares alone,
    because for other powers the theorems leave constants open. Chunks give the sample of the same rows in memory,
    unless a draw falls within rounding of the edge of a row.

    References
    ----------
    Drineas, Mahoney and Muthukrishnan, "Sampling algorithms for l2 regression and applications", SODA 2006.
    Tropp, "User-friendly tail bounds for sums of random matrices", 2012 (arXiv:1004.4389), Theorem 1.1.
    Ma, Mahoney and Yu, "A statistical perspective on algorithmic leveraging", JMLR 16, 2015, for `uniform`.
    Cohen, Musco and Musco, "Input sparsity time low-rank approximation via ridge leverage score sampling", SODA 2017,
    for `ridge`. Cohen and Peng, arXiv:1412.0588, for Lewis weights.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.random.default_rng(0).standard_normal((20_000, 5))
    >>> sample = levattn.sample_rows(K, distortion=0.5, rng=1)
    >>> sample.size, sample.distortion < 0.5
    (320, True)
    """
    asked = _Asked.checked(size, distortion, failure, uniform)
    seed, added = as_seed(rng), ridge_of(ridge, 0.0)
    source = as_source(K)
    if source is not None and not (added or source.sparse) and mask is None and weights is None:
        return _sample_of_chunks(source, asked, scores, seed)
    if source is not None:
        if not isinstance(K, KeySource):
            raise ValueError(
                "K gives chunks; expected no ridge, mask or weights. For these options give keys in an array or a "
                "file, or use StreamingRowSample"
            )
        options: dict[str, Any] = {"failure": failure, "scores": scores, "ridge": ridge, "uniform": uniform}
        options |= {"distortion": distortion, "mask": mask, "weights": weights, "rng": seed}
        with whole_keys(K, sparse=True) as keys:
            found = sample_rows(keys, size, **options)
            rows = keys[found.indices]
            chosen = as_matrices(rows.toarray() if is_scipy_sparse(rows) else rows, "K")
            return replace(found, keys=as_they_came(chosen.data[0], chosen.format))
    matrices = as_matrices(K, "K", sparse=True)
    _require_one(matrices)
    matrices, roots, power = weighted(matrices.masked(mask), weights)
    factor = factorize(matrices, method="gram", ridge=added.below(power), weights=roots)
    exact = to_numpy(factor.scores(as_float64=True, numerical=True)[0])[0]
    present = np.full(matrices.n, True) if matrices.mask is None else to_numpy(matrices.mask)[0]
    found = asked.sample(exact, present, scores, int(factor.rank[0]), seed)
    if asked.must_measure(found, exact):
        part = _lack(factor) if added else None
        eigenvalues = eigenvalues_of(factor, _chosen(factor.rows, found.indices), found.weights, part)
        found = replace(found, eigenvalues=eigenvalues)
    given = 1.0 if roots is None else np.ldexp(roots[0, found.indices], power) ** 2
    return replace(found, weights=found.weights * given)


def _require_one(matrices: Matrices) -> None:
    """Raise for a batch of matrices."""
    if matrices.batch:
        raise ValueError(f"K has a batch {matrices.batch} of matrices; expected one matrix (n, d)")


def _sample_of_chunks(source: Source, asked: _Asked, scores: Any, seed: int) -> RowSample:
    """Return the sample of rows that are read again and again."""
    options = {"single": False, "numerical": True, "as_float64": True}
    passes = two_passes(source, None, None, Checkpoint.checked(None, None, {}), **options)
    _require_one(passes.example)
    exact = passes.scores[0]
    found = asked.sample(exact, np.full(len(exact), True), scores, int(passes.factor.rank[0]), seed)
    rows = passes.rows(0, found.indices)
    if asked.must_measure(found, exact):
        found = replace(found, eigenvalues=eigenvalues_of(passes.factor, passes.factor.on(rows).rows, found.weights))
    return replace(found, keys=as_they_came(rows.keys[0], rows.format))


def one_of(size: Any, distortion: Any) -> tuple[int | None, float | None]:
    """Return a size and a distortion, of which exactly one is given, or raise."""
    if (size is None) == (distortion is None):
        given = "neither" if size is None else "both"
        raise ValueError(f"size and distortion: {given} given; expected exactly one, a number of rows or a promise")
    draws = None if size is None else whole_number("size", size, 1, _MOST_DRAWS, what="a whole number of rows")
    return draws, None if distortion is None else fraction("distortion", distortion)


@dataclass(frozen=True)
class _Asked:
    """Options of `sample_rows`; one of `size` and `eta` is None."""

    size: int | None
    eta: float | None
    delta: float
    uniform: float

    @classmethod
    def checked(cls, size: Any, distortion: Any, failure: Any, uniform: Any) -> _Asked:
        """Return the options, or raise."""
        draws, eta = one_of(size, distortion)
        share = real_number("uniform", uniform)
        if not 0 <= share <= 1:
            raise ValueError(f"uniform is {uniform!r}; expected a number from 0 to 1, the share of uniform draws")
        return cls(draws, eta, fraction("failure", failure), share)

    def sample(self, exact: Float64, present: npt.NDArray[np.bool_], scores: Any, rank: int, seed: int) -> RowSample:
        """Return the sample of rows with these leverage scores, as if it had no distortion."""
        own = exact if scores is None else np.where(present, _scores_of(scores, len(exact)), 0.0)
        probabilities = _probabilities(own, present, self.uniform)
        counts, promised = self._draw(probabilities, exact, rank, seed)
        taken = np.flatnonzero(counts)
        chosen, times, m = probabilities[taken], counts[taken], int(counts.sum())
        w = np.ones(len(taken)) if self.eta is not None and not promised else times / (m * chosen)
        return RowSample(taken, w, times, chosen, m, len(exact), (1.0, 1.0), promised, self.delta)

    def must_measure(self, found: RowSample, exact: Float64) -> bool:
        """Tell whether a sample may have a distortion: not all rows of any leverage were taken."""
        return bool(exact.any()) and (self.eta is None or found.promised > 0)

    def _draw(self, probabilities: Float64, exact: Float64, rank: int, seed: int) -> tuple[Int64, float]:
        """Return how often each row is drawn, and the promised distortion; 0 where each row is taken once instead."""
        if not exact.any():
            return _drawn(probabilities, self.size or 0, seed), 0.0
        with np.errstate(divide="ignore", invalid="ignore"):  # the largest norm of a term, times the number of draws
            largest = float(np.max(np.where(exact > 0, exact / probabilities, 0.0)))
        draws = self.size
        if self.eta is not None:
            if not largest < math.inf:
                raise ValueError(
                    "scores are 0 for a row that has leverage; expected positive ones, uniform above 0, or a size in "
                    "place of a distortion"
                )
            exponent = chernoff_exponent(self.eta)
            needed = largest * log_of_ratio(2 * rank, self.delta) / exponent if exponent else math.inf
            there = probabilities > 0
            if needed > np.count_nonzero(there) - 1:
                return there.astype(np.int64), 0.0
            draws = math.ceil(needed)
        return _drawn(probabilities, draws or 0, seed), promised_distortion((draws or 0) / largest, rank, self.delta)


def _scores_of(scores: Any, n: int) -> Float64:
    """Return the caller's scores, (n,), or raise."""
    found = (
        to_numpy(scores.detach() if is_torch(scores) else scores) if hasattr(scores, "shape") else np.asarray(scores)
    )
    if found.dtype.kind not in "fiu":
        raise TypeError(f"scores is of dtype {found.dtype}; expected numbers")
    if found.shape != (n,):
        raise ValueError(f"scores has shape {found.shape}; expected ({n},), one for each row")
    found = found.astype(np.float64)
    check_nonnegative("scores", found)
    return found


def _probabilities(scores: Float64, present: npt.NDArray[np.bool_], share: float) -> Float64:
    """Return the probabilities of the rows, (n,); zeros if no row can be drawn."""
    largest = scores.max(initial=0.0)
    if not largest:
        return np.zeros(len(scores))
    scaled = scores / largest  # so that no sum overflows
    return np.asarray((1 - share) * scaled / scaled.sum() + share * present / np.count_nonzero(present))


def _drawn(probabilities: Float64, draws: int, seed: int) -> Int64:
    """Return how often each row is drawn, (n,)."""
    ends = np.cumsum(probabilities)
    if not len(ends) or not ends[-1]:
        return np.zeros(len(ends), np.int64)
    places = np.random.default_rng(seed).random(draws) * ends[-1]
    found = np.searchsorted(ends, places, side="right")
    last = int(np.flatnonzero(probabilities)[-1])
    return np.bincount(np.minimum(found, last), minlength=len(ends))


def _chosen(rows: Rows, which: Int64) -> Rows:
    """Return some rows of a matrix, as it is read."""
    weights = None if rows.weights is None else rows.weights[:, which]
    return Rows(take_rows(rows.keys, which), rows.format, shift=rows.shift, scale=rows.scale, weights=weights)


def _lack(factor: Factor) -> Float64:
    """Return the part of a ridge in the whitened moment: I less the moment of the rows."""
    live = np.any(factor.whitening[0] != 0, axis=0)
    whole = moments_of_items(factor.rows, [0], basis=to_device(factor.whitening, factor.rows.keys))
    return np.asarray(np.eye(int(live.sum())) - to_numpy(whole)[0][np.ix_(live, live)])


def eigenvalues_of(factor: Factor, rows: Rows, w: Float64, part: Float64 | None = None) -> tuple[float, float]:
    """Return the least and the largest eigenvalue of ``Σ w x xᵀ`` over whitened rows x, and of another part."""
    rank = np.count_nonzero(np.any(factor.whitening[0] != 0, axis=0))
    G = np.zeros((rank, rank)) if part is None else part
    for start in range(0, len(w), _BLOCK):
        X = factor.whitened(as_read(rows.between(start, start + _BLOCK)))
        G = G + X.T @ (w[start : start + _BLOCK, None] * X)
    found = np.linalg.eigvalsh(G)
    return float(found[0]), float(found[-1])
