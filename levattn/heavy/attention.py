"""Heavy attention: the large attention scores themselves, with exact normalizers and what they leave out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import (
    Matrices,
    array_namespace,
    as_mask,
    as_matrices,
    float64_beside,
    take_entries,
    take_rows,
    to_device,
    to_float64,
    to_numpy,
)
from levattn._core.random import as_seed
from levattn._kernels import (
    Float64,
    Rows,
    kernels_for,
)
from levattn.exceptions import NonFiniteError
from levattn.functions import AttentionFunction, Power, Softmax, as_function, is_square
from levattn.heavy.causal import CHUNK, CausalChunk, causal_chunks
from levattn.heavy.normalizers import (
    LOWEST,
    PRODUCT_ERROR,
    PreciseSums,
    even_queries,
    even_rows,
    flushed,
    normalizers_by,
    relative,
)
from levattn.heavy.recovery import estimated_normalizers, recovered_entries, recovery_size
from levattn.linalg.factor import UNIT, float64_rows
from levattn.linalg.gram import second_moments
from levattn.sensitivity.approximate import FAILURE
from levattn.sensitivity.leverage import TIE, check_epsilon, refuse_randomness
from levattn.sensitivity.lift import lifted_sums
from levattn.sensitivity.sums import (
    BLOCK_ENTRIES,
    LEAST_POSITIVE,
    certain_products,
    entry_change,
    evaluation_error,
    mild_changes,
    mild_entry_change,
    product_noise,
    sums,
    uncertain_sums,
)
from levattn.sets.result import UniversalSet, flag_counts, require_set_of
from levattn.sets.universal import universal_set
from levattn.sketch import jl_size

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["HeavyAttention", "heavy_attention"]

_FEW_COLUMNS = 128  # of values, up to which a 2-norm is computed for each chunk of causal attention
_LEAST = 2.0**-1022  # a score of which nothing is known
_LARGEST_POWER = 1000  # of two in a query
_LARGEST_SHARE = 500  # of two in a term of a sum
_UNKNOWN = 0.1  # relative error of scores from which on nothing is said of a query
_FEW_QUERIES = 1024  # that are summed for once more at a time
_SUM_ERROR = TIE / 2  # estimated relative error from which on a normalizer is summed over the keys


@dataclass(frozen=True, eq=False)
class HeavyAttention:
    """The heavy part of attention with f(x) = x²; the result of `heavy_attention`.

    Attributes
    ----------
    universal : UniversalSet or None
        The set that the entries were taken from; None for causal attention.
    alive : array of int64, shape (chunks,), or None
        For causal attention the number of keys that were kept after each chunk of rows: at most rank/ε, but for
        prefixes so ill-conditioned or rank-deficient that their moments do not tell the scores.
    distortion : float
        For method="jl" the relative error that normalizers may have (but for a probability of 1e-6), and with them
        scores and masses; else 0.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> heavy = levattn.heavy_attention(np.array([[1.0, 0], [1, 1]]), np.eye(2), 0.9)
    >>> heavy.entries.toarray()
    array([[1., 0.],
           [0., 0.]])
    >>> heavy.normalizers, heavy.captured_mass
    (array([1., 2.]), array([1., 1.]))
    """

    universal: UniversalSet | None
    _products: _Products | _Causal = field(repr=False)
    _figures: _Figures = field(repr=False)
    alive: npt.NDArray[np.int64] | None = None
    distortion: float = 0.0

    @property
    def entries(self) -> csr_array:
        """The scores A_ij ≥ ε, exact (of the full softmax-free normalizer), indices sorted.

        Returns
        -------
        scipy.sparse.csr_array, shape (m, n)
        """
        return self._figures.entries

    @property
    def normalizers(self) -> Float64:
        """``Σ ⟨q_i, k_l⟩²`` over all keys; 0 for a query orthogonal to all keys, whose row of A is zero.

        Infinite or 0 where the sum leaves the range of float64, which spoils none of the other figures.

        Returns
        -------
        array of float64, shape (m,)
        """
        return self._figures.of_queries[0]

    @property
    def error(self) -> Float64:
        """Estimated relative error of the normalizer and of the scores of each query.

        It counts the rounding of the products with all keys. Above 1e-9 it is only for queries all but orthogonal to
        the keys, keys of a condition number above 10¹¹ or, for softmax, logits above 10⁶, whose last digits float64
        does not hold. A score within four times this error of ε counts as at least ε, and is among the entries.
        Infinite where nothing is known of the normalizer, as where f underflows for all that a query meets: all keys
        of the set are among the entries then. The values of a function of one's own are taken to be right to some
        roundings.

        Returns
        -------
        array of float64, shape (m,)
        """
        return to_numpy(self._figures.error)

    @property
    def captured_mass(self) -> Float64:
        """``Σ A_ij`` over the keys of the universal set.

        For causal attention over the keys that were kept and those of the row's own chunk.

        Returns
        -------
        array of float64, shape (m,)
        """
        return self._figures.of_queries[1]

    @property
    def residual_mass(self) -> Float64:
        """``Σ A_ij`` over the other keys.

        Returns
        -------
        array of float64, shape (m,)
        """
        return self._figures.of_queries[2]

    def apply(self, V: Any, compensate: Literal["mean"] | None = None) -> tuple[Any, Float64]:
        r"""Multiply the attention on the universal set by the values, with a bound on what is left out.

        The output is :math:`\sum_{j \in U} A_{ij} v_j` with the exact scores A of the full attention. With
        ``compensate="mean"`` the residual mass times the mean value of the other keys is added, which is the best
        guess where the light scores are even.

        Parameters
        ----------
        V : array of shape (n, d_v)
            Values, one a key.
        compensate : {None, "mean"}
            What stands in for the keys outside the set.

        Returns
        -------
        output : array of float64, shape (m, d_v)
            In the kind of array of V.
        error_bound : array of float64, shape (m,)
            For each query a bound on the Euclidean distance to the dense attention output. With residual mass r, e
            the largest leverage score outside U, and v̄ the mean of the n' values outside: plain
            :math:`\min(r \max \|v_j\|, \sqrt{e r}\, \|V_{\bar U}\|_2)`, compensated :math:`\min(r \max
            \|v_j - \bar v\|, \sqrt{e r - r^2/n'}\, \|V_{\bar U} - 1 \bar v^T\|_2)`.

        Raises
        ------
        TypeError, ValueError
            If V does not go with the keys or `compensate` is unknown.
        NonFiniteError
            If the values hold NaN or infinity.

        Notes
        -----
        Time O(m \|U\| (d + d_v) + n d_v²) and memory O(m d_v + n), with blocks of at most 32 MB of scores. The bounds
        hold up to the rounding of the scores, which is estimated and added.

        Examples
        --------
        >>> import numpy as np, levattn
        >>> rng = np.random.default_rng(0)
        >>> Q, K, V = rng.standard_normal((3, 50, 4))
        >>> A = (Q @ K.T) ** 2 / ((Q @ K.T) ** 2).sum(axis=1, keepdims=True)
        >>> output, bound = levattn.heavy_attention(Q, K, 0.1).apply(V, compensate="mean")
        >>> bool((np.linalg.norm(output - A @ V, axis=1) <= bound).all())
        True
        """
        if compensate not in (None, "mean"):
            raise ValueError(f"compensate is {compensate!r}; expected None or 'mean'")
        n = self._figures.n
        values = as_matrices(V, "V")
        if values.batch or values.n != n:
            shape = (*values.batch, values.n, values.d)
            raise ValueError(f"V has shape {shape}; expected ({n}, d_v), one value for each of the {n} keys")
        everything = Rows(values.data, values.format, as_mask(self._products.present, values))
        largest = everything.column_maxima().max(initial=0.0)
        if not np.isfinite(largest):
            bad = everything.nonfinite_rows(0, 5)
            raise NonFiniteError(
                f"V holds NaN or infinity, first in rows {bad}; expected finite values for every key that takes part"
            )
        if isinstance(self._products, _Causal):
            output, bound = self._causal_output(self._products, everything, compensate is not None)
            return values.give_back(output), bound
        power = int(np.frexp(largest)[1])  # taken out of the values, so that squares stay in range
        scaled = replace(everything, scale=np.full((1, values.d), np.ldexp(1.0, -np.clip(power, -1020, 1020))))
        output, bound, error = self._output(self._products, values, scaled, compensate is not None)
        rounding = (error + 16 * UNIT * values.d) * _largest_norm(scaled)
        xp = array_namespace(output)
        with np.errstate(over="ignore"):
            output, bound = xp.ldexp(output, power), to_numpy(xp.ldexp(bound * (1 + TIE) + rounding, power))
        if array_namespace(values.data) is not xp:
            output = to_numpy(output)
        return values.give_back(output), bound

    def _output(self, products: _Products, values: Matrices, scaled: Rows, compensate: bool) -> tuple[Any, Any, Any]:
        """Return the output, its bound, and the relative error of the scores, for values scaled to a tame range."""
        universal, residual = products.universal, self._figures.residual
        xp = array_namespace(residual)
        light = _Light.of(replace(scaled, mask=as_mask(universal._left, values)))
        inside = replace(scaled, keys=take_rows(scaled.keys, universal.indices), mask=None)
        chosen = to_device(float64_rows(inside, 0, inside.shape[1]), residual)
        output = xp.empty((len(residual), values.d))
        for part, scores in products.scores():
            output[part] = scores @ chosen
        error = xp.minimum(4 * products.error, to_device(np.full(1, 2.0), residual)) * _spread(
            len(chosen), products.epsilon
        )
        error = error + 16 * UNIT * len(chosen)
        # what rounding of the scores may hide of the residual mass
        r = xp.where(products.live, residual + error, 0.0)
        # the scores may be rounded to float32, and a bound must not be rounded down
        e = universal._largest_left * (1 + 4 * float(universal.factor.score_error[0]))
        if not compensate:
            return output, xp.minimum(r * light.largest, xp.sqrt(e * r) * light.norm), error
        output += residual[:, None] * to_device(light.mean, residual)
        variance = _variance(e, r, residual - error, light.count)
        return output, xp.minimum(r * light.spread, xp.sqrt(variance) * light.centered_norm), error

    def _causal_output(self, causal: _Causal, values: Rows, compensate: bool) -> tuple[Float64, Float64]:
        """Return the output and its bound chunk by chunk; what is left out lies before the chunk.

        So the bounds are of the values before it. About their own mean those left out are no wider, in the 2-norm,
        than all before the chunk are about theirs.
        """
        m, d = len(self.normalizers), values.shape[2]
        output, bound, before = np.empty((m, d)), np.empty(m), _Before(d)
        for chunk in causal.chunks():
            part = slice(*chunk.rows)
            here = float64_rows(values, *chunk.rows)
            kept = chunk.keys[chunk.keys < chunk.rows[0]]
            chosen = float64_rows(_rows(values, kept), 0, len(kept))
            rest = np.zeros((chunk.scores.shape[1] - len(chunk.keys), d))
            scores = np.zeros((CHUNK, chunk.scores.shape[1]))  # of one shape, as BLAS sums each in its order
            scores[: len(here)] = chunk.scores
            output[part] = (scores @ np.vstack([chosen, here, rest]))[: len(here)]
            error = np.minimum(4 * chunk.error, 2.0) * _spread(chunk.scores.shape[1], causal.epsilon)
            error = np.where(chunk.live, error + 16 * UNIT * chunk.scores.shape[1], 0.0)
            residual = self.residual_mass[part]
            r = np.where(chunk.live, residual + error, 0.0)
            sizes = _norms(here)
            rounding = (error + 16 * UNIT * d) * np.maximum(np.maximum.accumulate(sizes), before.largest)
            with np.errstate(over="ignore"):
                if compensate:
                    left = before.count - int(causal.present[kept].sum())
                    mean = (before.total - chosen.sum(axis=0)) / max(left, 1)
                    output[part] += residual[:, None] * mean
                    spread = before.largest + float(_norms(mean[None])[0])
                    variance = _variance(causal.epsilon, r, residual - error, left)
                    wide = np.minimum(r * spread, np.sqrt(variance) * before.norm(centered=True))
                else:
                    wide = np.minimum(r * before.largest, np.sqrt(causal.epsilon * r) * before.norm(centered=False))
                bound[part] = wide * (1 + TIE) + rounding
            before.add(here, sizes, int(causal.present[part].sum()))
        return output, bound


def _spread(count: int, epsilon: float) -> float:
    """Return what carries the error of a score of ε to a sum of scores, whose roots sum to at most √count."""
    return float(np.sqrt(max(1.0, count * epsilon)))


class _Before:
    """What the bounds of causal attention need of the values before a chunk."""

    def __init__(self, d: int) -> None:
        self.count = 0
        self.total, self.largest = np.zeros(d), 0.0
        self._squares, self._power = np.zeros((d, d)), LOWEST  # Σ v vᵀ, of values divided by 2^power
        self._chunks = 0

    def add(self, V: Float64, sizes: Float64, count: int) -> None:
        """Add the values of `count` keys, with their norms."""
        self.count, self._chunks = self.count + count, self._chunks + 1
        self.total = self.total + V.sum(axis=0)
        self.largest = max(self.largest, float(sizes.max(initial=0.0)))
        if self.largest > 0:
            power = max(self._power, int(np.frexp(np.abs(V).max(initial=0.0))[1]) if sizes.max() > 0 else LOWEST)
            V = np.ldexp(V, -power)
            self._squares = np.ldexp(self._squares, 2 * (self._power - power)) + V.T @ V
            self._power = power

    def norm(self, *, centered: bool) -> float:
        """Return a bound of the 2-norm of the values, or of what they differ from their mean by."""
        if not self.largest > 0:
            return 0.0
        squares = self._squares
        if centered:
            total = np.ldexp(self.total, -self._power)
            squares = squares - np.outer(total, total) / self.count
        trace = float(np.trace(self._squares)) * (2 * self._chunks + 2 * CHUNK + 64 * len(squares)) * UNIT  # rounding
        rows = np.abs(squares).sum(axis=1).max()  # bounds the largest eigenvalue
        largest = np.linalg.eigvalsh(squares)[-1] if len(squares) <= _FEW_COLUMNS else rows
        return float(np.ldexp(np.sqrt(max(largest, 0.0) + trace), self._power))


def _norms(A: Float64) -> Float64:
    """Return the Euclidean norms of the rows; no square leaves the range."""
    power = np.frexp(np.max(np.abs(A), axis=1, initial=0.0))[1]
    with np.errstate(over="ignore"):
        return np.asarray(np.ldexp(np.linalg.norm(np.ldexp(A, -power[:, None]), axis=1), power))


def _rows(rows: Rows, indices: npt.NDArray[np.int64]) -> Rows:
    """Return some rows of a batch of one."""
    mask = None if rows.mask is None else to_device(to_numpy(rows.mask)[:, indices], rows.keys)
    return replace(rows, keys=take_rows(rows.keys, indices), mask=mask)


def _variance(e: float, r: Any, least: Any, count: int) -> Any:
    """Return a bound of the squared norm of light scores about their mean: each at most e, their sum r."""
    xp = array_namespace(r)
    return xp.maximum(e * r - xp.maximum(least, 0.0) ** 2 / max(count, 1), 0.0)


@dataclass(frozen=True)
class _Figures:
    """What is known of each query, and the entries, where they were computed; in main memory once asked for.

    n: number of keys.
    normalizers, captured, residual: (m,), the normalizers and the mass on the keys of the set and on the others.
    error: (m,), estimated relative errors of the scores.
    found: the entries, or their (starts, keys, scores) in CSR order.
    others: entries that are not among these, in main memory.
    """

    n: int
    normalizers: Any
    captured: Any
    residual: Any
    error: Any
    found: csr_array | tuple[Any, Any, Any]
    others: csr_array | None = None

    @cached_property
    def of_queries(self) -> tuple[Float64, Float64, Float64]:
        """Normalizers, captured and residual mass."""
        return to_numpy(self.normalizers), to_numpy(self.captured), to_numpy(self.residual)

    @cached_property
    def entries(self) -> csr_array:
        """The matrix of all entries."""
        from scipy.sparse import csr_array

        if not isinstance(self.found, tuple):
            return self.found
        starts, columns, values = (to_numpy(part) for part in self.found)
        entries = csr_array((values, columns, starts), shape=(len(self.normalizers), self.n))
        return entries if self.others is None else entries + self.others


@dataclass(frozen=True)
class _Causal:
    """What it takes to run through the chunks of causal attention again."""

    queries: Matrices
    rows: Rows
    epsilon: float

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """The keys that take part."""
        mask = self.rows.mask
        return np.full(self.rows.shape[1], True) if mask is None else np.asarray(to_numpy(mask)[0])

    def read(self, start: int, stop: int) -> Float64:
        """Return some queries, or raise where they are not finite."""
        Q = to_float64(self.queries.data[:, start:stop, :], self.queries.format)[0]
        bad = np.flatnonzero(~np.isfinite(Q).all(axis=1))[:5] + start
        if len(bad):
            raise NonFiniteError(f"Q holds NaN or infinity, first in rows {bad.tolist()}; expected finite queries")
        return np.asarray(Q)

    def chunks(self) -> Iterator[CausalChunk]:
        return causal_chunks(self.read, self.rows, self.epsilon)


_Stored = tuple[Any, npt.NDArray[np.int32], Any]


@dataclass(frozen=True)
class _Products:
    """Queries and the keys of a universal set, both scaled by powers of two, and the normalizers that go with them.

    They are in main memory, or for f(x) = x² and queries and keys on a CUDA device there.

    universal: the set.
    f: the attention function.
    normalizers: Σ f(⟨q, k⟩) in the units of the queries, or its logarithm for softmax.
    precise: the queries whose products with keys cancel so far that they take more than float64, or whose scores err
        by so much that thresholds are their own.
    error: estimated relative error of a score of ε in each row.
    epsilon: that ε.
    stored: for f(x) = x² the keys of the set as they are stored, the powers of two of their columns, and those by
        which products of each query are divided in its normalizer.
    """

    universal: UniversalSet
    f: AttentionFunction | Softmax
    queries: Any
    keys: Any
    normalizers: Any
    precise: Any
    error: Any
    epsilon: float
    stored: _Stored | None = None

    @property
    def present(self) -> Any:
        """The keys that take part, or None for all."""
        return self.universal._present

    @property
    def live(self) -> Any:
        """Which queries have a row of A that is not zero."""
        return np.full(len(self.normalizers), True) if isinstance(self.f, Softmax) else self.normalizers > 0

    def _precise_products(self, part: Any) -> Any:
        Q = to_numpy(self.queries[part])
        if self.stored is None:
            zeros = not isinstance(self.f, Softmax)
            return to_device(certain_products(Q, to_numpy(self.keys), zeros=zeros)[0], self.queries)
        keys, exponents, shift = self.stored
        K, powers, unknown = even_rows(to_numpy(keys), -exponents)
        Z = PreciseSums(Q).add(K, powers, unknown)
        with np.errstate(over="ignore"):  # of queries whose normalizer is 0
            return to_device(np.ldexp(Z, powers - to_numpy(shift[part])[:, None]), self.queries)

    def scores(self, among: Any = None) -> Iterator[tuple[Any, Any]]:
        """Give the attention scores on the keys of the set, for a few queries (their numbers) at a time."""
        xp = array_namespace(self.queries)
        step = max(16, BLOCK_ENTRIES // max(len(self.keys), 1))
        for precise in (False, True):
            rows = xp.nonzero(self.precise == precise if among is None else among & (self.precise == precise))[0]
            for start in range(0, len(rows), step):
                part = rows[start : start + step]
                Q, D = self.queries[part], self.normalizers[part, None]
                Z = self._precise_products(part) if precise else Q @ self.keys.T
                if isinstance(self.f, Softmax):
                    some = np.exp(Z - D)
                else:
                    f = Z * Z if is_square(self.f) else self.f(Z)
                    some = xp.where(D > 0, f / xp.where(D > 0, D, 1.0), 0.0)
                if precise:  # where a normalizer is next to unknown, the keys of the set are known to be in it
                    some = some / xp.maximum(some.sum(axis=1, keepdims=True), 1.0)
                    some = xp.where(xp.isinf(self.error[part])[:, None] & (some < _LEAST), _LEAST, some)
                yield part, some


@dataclass(frozen=True)
class _Light:
    """What the error bounds need of the values outside the set."""

    count: int
    mean: Float64
    largest: float  # Euclidean norm of a value
    spread: float  # of a value's difference to the mean
    norm: float  # 2-norm of the matrix of values
    centered_norm: float

    @classmethod
    def of(cls, rows: Rows) -> _Light:
        count = rows.shape[1] if rows.mask is None else int(flag_counts(rows.mask)[0])
        mean = rows.column_sums()[0] / max(count, 1)
        scale = 1.0 if rows.scale is None else rows.scale[0]
        centered = replace(rows, shift=(mean / scale)[None])
        return cls(count, mean, *(_largest_norm(r) for r in (rows, centered)), *map(_spectral_norm, (rows, centered)))


def _largest_norm(rows: Rows) -> float:
    kernels = kernels_for("gram", rows.keys)
    squares = rows.zeros(wide=True)
    kernels.sqnorms(rows, np.zeros(1, np.int64), np.eye(rows.shape[2])[None], squares)
    return float(np.sqrt(float(array_namespace(squares).max(squares)))) if rows.shape[1] else 0.0


def _spectral_norm(rows: Rows) -> float:
    return float(np.sqrt(max(np.linalg.eigvalsh(to_numpy(second_moments(rows, [0])[0]))[-1], 0.0)))


def heavy_attention(
    Q: Any,
    K: Any,
    epsilon: float,
    /,
    *,
    f: Any = 2,
    universal: UniversalSet | None = None,
    causal: bool = False,
    method: Literal["auto", "countsketch", "jl"] = "auto",
    sketch_size: int | tuple[int, int] | None = None,
    mask: Any = None,
    rng: int | np.random.Generator | None = None,
) -> HeavyAttention:
    r"""Find every attention score of at least ε, without forming the attention matrix.

    For f(x) = x² and :math:`A_{ij} = \langle q_i, k_j\rangle^2 / \sum_l \langle q_i, k_l\rangle^2`, only keys of
    the universal set can have a score of at least ε, and the normalizer is :math:`\|N q_i\|^2` with
    :math:`N^T N = K^T K`. So a query costs O(d² + \|U\| d), whatever n. No entry of at least ε is missed, and all
    values are those of the full attention.

    Parameters
    ----------
    Q : array of shape (m, d)
        Queries.
    K : array of shape (n, d)
        Keys; kinds and dtypes as in `leverage_scores`.
    epsilon : float in (0, 1]
        Smallest score that counts as heavy. A score within 1e-9 (relative) of ε, or within four times its error
        (`HeavyAttention.error`) where that is more, counts as at least ε.
    f : float, AttentionFunction or Softmax, default 2
        Attention function; a number p is abs(x)^p. For `Softmax` the queries must lie within its radius.
    universal : UniversalSet, optional
        The universal set of the same keys for ε or less, if it is known already: then nothing of size n is touched
        but the rows of K in the set.
    causal : bool, default False
        Query t attends to the keys up to t alone, and its normalizer is the sum over these; m = n. For x² only, and
        without `universal`: the set of keys changes from row to row.
    method : {"auto", "countsketch", "jl"}
        "auto": exact. For x² without `causal` also "countsketch": entries are recovered from a CountSketch of the
        keys of the set, and those that may be heavy are computed; "jl": normalizers are estimated by a projection.
        See Notes.
    sketch_size : int or (int, int), optional
        Buckets and repetitions of "countsketch", columns of the projection of "jl".
    mask : array of bool, shape (n,), optional
        True for a key that takes part. Not with `universal`, which has its own.
    rng : int or numpy.random.Generator, optional
        Seed of "countsketch" and "jl", 0 if left out.

    Returns
    -------
    HeavyAttention
        The heavy entries as a sparse matrix, with normalizers and masses.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, or `universal` does not cover ε, has the guarantee "none" or an approximate factor, or
        belongs to other keys (its shape and dtype are compared, and the leverage scores of its keys and of a sample of
        the others).
    NonFiniteError
        If queries or keys hold NaN or infinity.

    See Also
    --------
    universal_set : The keys that can be heavy for any query.

    Notes
    -----
    Preparation O(n d²); then O(m (d² + \|U\| d)) with \|U\| ≤ rank/ε. Memory O(m d + n + \|U\| d) and the output. With
    n < d the preparation takes O(n² d), and a normalizer is summed over the keys, O(n d), of which the set has a copy.
    Queries and keys are scaled by powers of two, so that squares neither overflow nor vanish. Sums run in float64; for
    a query so nearly orthogonal to the keys that its products or its normalizer would lose their digits they run as if
    in twice the precision, at about ten times the cost. Only if the keys are rank-deficient as well is such a
    normalizer summed over the keys, O(n d); a query orthogonal to them to rounding has a row of zeros.

    For other functions the normalizer of a query is summed over all keys, O(n d), and once or twice more, as if in
    twice the precision, where rounding of the products could be seen in it; for an even power p > 2 it comes from the
    D = C(d + p/2 − 1, p/2) lifted moments, O(D²), where a lift was among the certificates of the set (up
    to D = 1024 by itself) and that is less.

    With `causal` a key is kept while its score among the keys so far is at least ε: at most rank/ε keys, or more where
    the moments of a prefix are too ill-conditioned to tell (`HeavyAttention.alive`). No entry is missed either.

    "countsketch" with the default size misses an entry with a probability of at most 1e-6 in all, and what it returns
    is exact. "jl" misses none, and normalizers and scores err by at most `HeavyAttention.distortion`, but for a
    probability of 1e-6. The exact route was faster than both at all sizes tried.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462): universal sets (Theorem 1)
    and exact normalizers for even p.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> rng = np.random.default_rng(0)
    >>> K = rng.standard_normal((5000, 16))
    >>> K[7] *= 20
    >>> found = levattn.heavy_attention(K[[7, 8]], K, 0.2)
    >>> found.entries.shape, found.entries.nonzero()[1].tolist()
    ((2, 5000), [7])
    """
    function = as_function(f)
    epsilon = check_epsilon(epsilon)
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"causal is {causal!r}; expected True or False")
    queries, keys = as_matrices(Q, "Q"), as_matrices(K, "K")
    for name, matrices in (("Q", queries), ("K", keys)):
        if matrices.batch:
            shape = (*matrices.batch, matrices.n, matrices.d)
            raise ValueError(f"{name} has shape {shape}; expected one matrix. Call heavy_attention for each head")
    if queries.d != keys.d:
        raise ValueError(f"Q has {queries.d} columns and K has {keys.d}; expected the same number d")
    square = is_square(function)
    if method not in ("auto", "countsketch", "jl"):
        raise ValueError(f"method is {method!r}; expected 'auto', 'countsketch' or 'jl'")
    if method == "auto":
        refuse_randomness("auto", sketch_size, rng)
    elif causal or not square:
        raise ValueError(f"method is {method!r}; expected 'auto' for causal attention and for functions other than x²")
    if causal:
        return _causal_attention(queries, keys, epsilon, function, universal, mask)
    if universal is None:
        universal = universal_set(K, epsilon, f=f, mask=mask)
    elif mask is not None:
        raise ValueError("mask and universal: both given; expected the mask in universal_set alone")
    else:
        _check_universal(universal, keys, epsilon, function)
    # what is not exact, or of other functions, runs in main memory
    beside = keys.data if square and method == "auto" else None
    Q64 = float64_beside(queries.data, queries.format, beside)
    xp = array_namespace(Q64)
    finite = xp.all(xp.isfinite(Q64), axis=1)
    if not xp.all(finite):
        bad = np.flatnonzero(~to_numpy(finite))[:5]
        raise NonFiniteError(f"Q holds NaN or infinity, first in rows {bad.tolist()}; expected finite queries")
    indices = universal.indices
    selected = float64_beside(take_rows(keys.data, indices), keys.format, Q64)
    if not square:
        return _of_other_function(Q64, selected, keys, universal, epsilon, function)
    N, exponents = universal.factor.even_normalizer(0)
    reached = np.any(N != 0, axis=0)
    if not reached.all():  # other entries meet no key
        Q64 = xp.where(to_device(reached, Q64), Q64, 0.0)
    even, powers = even_queries(Q64, exponents)
    stored, selected = selected, xp.ldexp(selected, to_device(-exponents, selected))
    distortion, shift = 0.0, xp.zeros(len(even), dtype=xp.int32)
    if method == "jl":
        columns = _sketch_size(sketch_size, 1, (jl_size(max(len(Q64), 1), 0.5, FAILURE),))[0]
        D, (short, more) = estimated_normalizers(even, N, columns, as_seed(rng))
        distortion = max(short, more)
        if distortion >= 1:
            raise ValueError(
                f"sketch_size is {columns}, which leaves normalizers of {len(Q64)} queries without a bound; expected "
                f"more, such as the default {jl_size(max(len(Q64), 1), 0.5, FAILURE)}"
            )
        error = np.full(len(D), distortion / (1 - distortion))
        epsilon = epsilon / (1 + more)
    else:
        D, error, shift = _normalizers(even, N, exponents, universal, keys)
    products = _prepared(universal, even, selected, D, error, flushed(Q64, even), epsilon, (stored, exponents, shift))
    found: Any
    others = None
    if method == "countsketch":
        sizes = _sketch_size(sketch_size, 2, recovery_size(len(Q64), epsilon, len(selected)))
        found, captured = _recovered(products, indices, keys.n, epsilon, sizes, as_seed(rng))
    else:
        found, others, captured = _entries(products, indices, keys.n, epsilon)
    with np.errstate(over="ignore"):
        normalizers = xp.ldexp(D, 2 * (powers + shift))
    residual = xp.where(D > 0, 1 - captured, 0.0)
    return HeavyAttention(
        universal=universal,
        _products=products,
        _figures=_Figures(keys.n, normalizers, captured, residual, products.error, found, others),
        distortion=distortion,
    )


def _sketch_size(given: Any, count: int, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return a sketch size of so many numbers."""
    sizes = default if given is None else given if isinstance(given, tuple) else (given,)
    whole = all(isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 1 for size in sizes)
    if len(sizes) != count or not whole:
        form = "a whole number" if count == 1 else "a pair of whole numbers, buckets and repetitions,"
        raise ValueError(f"sketch_size is {given!r}; expected {form} of at least 1")
    return tuple(int(size) for size in sizes)


def _recovered(
    products: _Products, indices: npt.NDArray[np.int64], n: int, epsilon: float, sizes: tuple[int, ...], seed: int
) -> tuple[csr_array, Float64]:
    """Return the heavy entries that a CountSketch gives away, and the mass on the keys of the set by their moments."""
    threshold = epsilon * (1 - TIE)
    Q, keys, D = products.queries, products.keys, products.normalizers
    plain = np.where(products.precise, 0.0, D)
    i, j, scores = recovered_entries(Q, keys, plain, threshold, sizes[0], sizes[1], seed)
    found = [(i, indices[j], scores)]
    inside = np.einsum("ij,ij->i", Q @ (keys.T @ keys), Q)
    captured = np.divide(inside, D, out=np.zeros(len(D)), where=D > 0)
    for part, some in products.scores(products.precise):
        captured[part] = some.sum(axis=1)
        i, j, heavy = _heavy(some, epsilon, products.error[part])
        found.append((part[i], indices[j], heavy))
    return _csr(found, (len(D), n)), np.clip(captured, 0.0, 1.0)


def _prepared(
    universal: UniversalSet, Q: Any, keys: Any, D: Any, error: Any, lost: Any, epsilon: float, stored: _Stored
) -> _Products:
    """Decide which queries take more than float64 for the products that make an entry of at least ε.

    Of those in `lost` nothing is known, as entries of theirs are out of range.
    """
    xp, d = array_namespace(Q), Q.shape[1]
    largest = xp.max(xp.abs(keys), axis=0) if len(keys) else xp.zeros(d)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        product = d * UNIT * xp.where(D > 0, xp.einsum("ij,j->i", xp.abs(Q), largest) / xp.sqrt(epsilon * D), 0.0)
    doubtful = (product > PRODUCT_ERROR) | (error > TIE / 8) | (stored[2] != 0)
    places = to_numpy(xp.nonzero(doubtful)[0])
    if len(places):  # of products in twice the precision
        few = to_numpy(take_entries(Q, places))
        loss = np.zeros(len(few))
        near = even_rows(to_numpy(stored[0]), -stored[1])
        shift = to_numpy(stored[2])[places]
        for part in np.array_split(np.arange(len(few)), max(1, len(few) * len(keys) // BLOCK_ENTRIES)):
            sums = PreciseSums(few[part])
            sums.add(*near)
            total, _, root = sums.result(len(keys))
            size = np.ldexp(total, 2 * np.where(total > 0, sums.shift - shift[part], 0))
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                lose = root * np.sqrt(size / (epsilon * to_numpy(D)[places[part]]))
            loss[part] = np.where(np.isinf(root), np.inf, lose)
        product[to_device(places, D)] = to_device(UNIT + np.where(np.isnan(loss), 0.0, loss), D)
    error = xp.where(D > 0, error + 2 * product, 0.0)
    error = xp.where(lost, xp.full_like(error, float("inf")), error)
    return _Products(universal, Power(2.0), Q, keys, D, doubtful | lost, error, epsilon, stored)


def _causal_attention(
    queries: Matrices,
    keys: Matrices,
    epsilon: float,
    f: AttentionFunction | Softmax,
    universal: UniversalSet | None,
    mask: Any,
) -> HeavyAttention:
    """Do what `heavy_attention` does where each query attends to the keys up to its own."""
    if not is_square(f):
        raise ValueError(f"f is {f!r}; expected 2 for causal attention")
    if universal is not None:
        raise ValueError("universal and causal: both given; expected no set, as it changes from row to row")
    if queries.n != keys.n:
        raise ValueError(
            f"Q has {queries.n} rows and K has {keys.n}; expected as many queries as keys where causal=True"
        )
    rows = Rows(keys.data, keys.format, as_mask(mask, keys))
    largest = rows.column_maxima()[0]
    if not np.isfinite(largest).all():
        bad = rows.nonfinite_rows(0, 5)
        raise NonFiniteError(f"K holds NaN or infinity, first in rows {bad}; expected finite keys")
    causal = _Causal(queries, rows, epsilon)
    D, captured, error = np.zeros(keys.n), np.zeros(keys.n), np.zeros(keys.n)
    live = np.zeros(keys.n, np.bool_)
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    alive = []
    for chunk in causal.chunks():
        part = slice(*chunk.rows)
        D[part], captured[part], live[part] = chunk.normalizers, chunk.captured, chunk.live
        error[part] = chunk.error
        i, j, heavy = _heavy(chunk.scores, epsilon, chunk.error)
        found.append((chunk.rows[0] + i, chunk.keys[j], heavy))
        alive.append(chunk.alive)
    captured = np.clip(captured, 0.0, 1.0)
    residual, entries = np.where(live, 1 - captured, 0.0), _csr(found, (keys.n, keys.n))
    return HeavyAttention(
        universal=None,
        _products=causal,
        _figures=_Figures(keys.n, D, captured, residual, error, entries),
        alive=np.array(alive, np.int64),
    )


def _of_other_function(
    Q: Float64,
    selected: Float64,
    keys: Matrices,
    universal: UniversalSet,
    epsilon: float,
    f: AttentionFunction | Softmax,
) -> HeavyAttention:
    """Do what `heavy_attention` does for a function whose normalizer is a sum over all keys."""
    if isinstance(f, Softmax):
        _check_radius(Q, f)
    powers, lost = np.zeros(len(Q), np.int32), np.zeros(len(Q), np.bool_)
    if isinstance(f, Power):  # homogeneous: the scale of a query is taken out, so that powers stay in range
        N, exponents = universal.factor.even_normalizer(0)
        Q = np.where(np.any(N != 0, axis=0), Q, 0.0)  # other entries meet no key
        even, taken = even_queries(Q, exponents)
        powers = np.frexp(np.sqrt(kernels_for("heavy", even).query_norms(even, N)[0]))[1].astype(np.int32)
        largest = np.max(np.abs(even), axis=1, initial=0.0)
        powers = np.where(largest > 0, powers, 0) + taken
        fraction, exponent = np.frexp(Q)
        least = np.min(np.where(fraction != 0, exponent, 1 << 20), axis=1, initial=1 << 20)
        powers = np.clip(least + 1021, powers - int(_LARGEST_SHARE / max(f.p, 1)), powers)  # no entry loses digits
        powers = np.maximum(powers, np.max(exponent, axis=1, initial=0) - _LARGEST_POWER)
        given, Q = Q, np.ldexp(fraction, exponent - powers[:, None])
        lost = flushed(given, Q)
    D, error, precise = _other_sums(Q, selected, keys, universal, epsilon, f)
    error, precise = np.where(lost, np.inf, error), precise | lost
    products = _Products(universal, f, Q, selected, D, precise, error, epsilon)
    captured = np.zeros(len(Q))
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    for part, scores in products.scores():
        captured[part] = scores.sum(axis=1)
        i, j, heavy = _heavy(scores, epsilon, error[part])
        found.append((part[i], universal.indices[j], heavy))
    captured = np.clip(captured, 0.0, 1.0)
    with np.errstate(over="ignore"):
        normalizers = np.exp(D) if isinstance(f, Softmax) else D
        if isinstance(f, Power):
            normalizers = _powered(D, f.p * powers)
    residual = np.where(products.live, 1 - captured, 0.0)
    return HeavyAttention(
        universal=universal,
        _products=products,
        _figures=_Figures(keys.n, normalizers, captured, residual, error, _csr(found, (len(Q), keys.n))),
    )


def _powered(D: Float64, powers: npt.NDArray[Any]) -> Float64:
    """Return D times 2 to these powers, which need not be whole; infinite or 0 where that leaves the range."""
    whole = np.floor(powers)
    return np.asarray(np.ldexp(D * 2.0 ** (powers - whole), np.clip(whole, -(2**20), 2**20).astype(np.int32)))


def _heavy(
    scores: Float64, epsilon: float, error: Float64
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Float64]:
    """Return the rows, columns and values of scores (m, k) that may be at least ε, for relative errors (m,)."""
    least = np.maximum(epsilon * (1 - np.maximum(TIE, 4 * error)), LEAST_POSITIVE)
    places = np.flatnonzero(scores >= least[:, None])  # faster than to look for rows and columns at once
    i, j = np.divmod(places, max(scores.shape[1], 1))
    return i, j, scores.ravel()[places]


def _csr(
    found: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Float64]], shape: tuple[int, int]
) -> csr_array:
    """Return the matrix of entries that were found in parts: rows, columns and values."""
    from scipy.sparse import csr_array

    rows, columns, values = (np.concatenate(each) for each in zip(*found, strict=True))
    return csr_array((values, (rows, columns)), shape=shape)


def _check_radius(Q: Float64, f: Softmax) -> None:
    """Raise if a query lies outside the ball or ellipsoid for which softmax is certified."""
    bad = np.flatnonzero(~f.contains(Q))
    if len(bad):
        raise ValueError(
            f"Q has {len(bad)} queries outside the set of f = {f!r}, first in rows {bad[:5].tolist()}; "
            "expected queries within the radius. Give a larger radius (with the scale of the logits multiplied in)"
        )


def _other_sums(
    Q: Float64,
    selected: Float64,
    keys: Matrices,
    universal: UniversalSet,
    epsilon: float,
    f: AttentionFunction | Softmax,
) -> tuple[Float64, Float64, npt.NDArray[np.bool_]]:
    """Return Σ f(⟨q, k⟩) for each query, the error of its scores of ε, and for which of them products are precise.

    The sums are of products in float64, or come from lifted moments where these are known and cost less. Where what is
    known of the sums alone does not show that rounding leaves them be, it is found for every product, and where it
    does not, these are computed as in twice the precision.
    """
    D, error = _mild_sums(Q, selected, keys, universal, epsilon, f)
    doubtful = np.zeros(len(Q), np.bool_)
    for precise in (False, True):
        doubtful = ~(error <= PRODUCT_ERROR)
        for part in np.array_split(np.flatnonzero(doubtful), -(-int(doubtful.sum()) // _FEW_QUERIES) or 1):
            if not len(part):
                continue
            D[part], change, adding = uncertain_sums(Q[part], keys, universal.present, f, precise=precise)
            entry = entry_change(Q[part], selected, f, D[part], epsilon, precise=precise)
            error[part] = change + entry + np.where(D[part] == 0, 0.0, adding + evaluation_error(f, D[part], epsilon))
            if precise:
                error[part] = np.where(error[part] <= _UNKNOWN, error[part], np.inf)
                if not isinstance(f, Softmax):
                    D[part] = np.where((D[part] == 0) & (error[part] > 0), _LEAST, D[part])
    return D, error, doubtful


def _mild_sums(
    Q: Float64,
    selected: Float64,
    keys: Matrices,
    universal: UniversalSet,
    epsilon: float,
    f: AttentionFunction | Softmax,
) -> tuple[Float64, Float64]:
    """Return the sums in float64, and as much of their error and that of scores of ε as follows from them."""
    lift, d = universal._lift, Q.shape[1]
    D, error, others = np.zeros(len(Q)), np.zeros(len(Q)), np.full(len(Q), True)
    with np.errstate(over="ignore"):
        if lift is not None and universal.rank == d and lift.rows.shape[2] ** 2 <= keys.n * d and isinstance(f, Power):
            D, error = lifted_sums(Q, universal.factor, lift, round(f.p / 2))
            others = ~(error <= _SUM_ERROR)
        if others.any() or not len(Q):
            D[others], largest, error[others] = sums(Q[others], keys, universal.present, f)
            count = keys.n
        else:
            largest, count = np.max(np.abs(selected), axis=0, initial=0.0), len(selected)
        noise = product_noise(np.abs(Q) @ largest, d)
        change = mild_changes(f, D, count, noise) + mild_entry_change(f, D, epsilon, noise)
        nothing = (D == 0) & ~np.any(Q, axis=1) & (not isinstance(f, Softmax))  # queries of zeros
        return D, np.where(nothing, 0.0, error + change + evaluation_error(f, D, epsilon))


def _entries(
    products: _Products, indices: npt.NDArray[np.int64], n: int, epsilon: float
) -> tuple[tuple[Any, Any, Any], csr_array | None, Any]:
    """Return the scores of at least ε, those of precise queries by themselves, and the mass on the keys of the set."""
    xp = array_namespace(products.queries)
    threshold = epsilon * (1 - TIE)
    D = xp.where(products.precise, 0.0, products.normalizers)
    starts, columns, values, captured = kernels_for("heavy", products.queries).heavy_entries(
        products.queries, products.keys, indices, D, threshold
    )
    others = []
    for part, some in products.scores(products.precise):
        rows, scores = to_numpy(part), to_numpy(some)
        captured[part] = to_device(scores.sum(axis=1), captured)
        i, j, heavy = _heavy(scores, epsilon, to_numpy(products.error)[rows])
        others.append((rows[i], indices[j], heavy))
    return (starts, columns, values), _csr(others, (len(D), n)) if others else None, xp.clip(captured, 0.0, 1.0)


def _check_universal(universal: Any, keys: Matrices, epsilon: float, f: AttentionFunction | Softmax) -> None:
    if isinstance(universal, UniversalSet):
        if as_function(universal.f) != f:
            raise ValueError(
                f"universal is of f = {universal.f!r} and f is {f!r}; expected the set of the same function"
            )
        if universal.guarantee == "none":
            raise ValueError(
                "universal promises nothing for attention over K (it was made with center=True); "
                "expected a set with guarantee 'exact' or 'superset'"
            )
    require_set_of(keys, universal)
    margin = max(TIE, 4 * float(universal.factor.score_error[0]))
    if universal.epsilon > epsilon or (universal.by_size and epsilon <= universal.epsilon * (1 + margin)):
        relation = "more than" if universal.by_size else "at least"
        raise ValueError(
            f"universal holds the scores of {relation} {universal.epsilon:.6g}, but epsilon is {epsilon:.6g}; "
            "make the set with this epsilon, or ask for more"
        )


def _normalizers(
    Q: Any, N: Float64, exponents: npt.NDArray[np.int32], universal: UniversalSet, keys: Matrices
) -> tuple[Any, Any, Any]:
    """Return ``Σ ⟨q, k⟩²`` for each query, over 4 to a power that is returned, and its estimated relative error."""
    D, loss = normalizers_by(universal.factor, Q, N, exponents)
    xp = array_namespace(D)
    error = relative(loss, D) + float(universal.factor.normalizer_error[0])
    shift = xp.zeros(len(D), dtype=xp.int32)
    doubtful = xp.nonzero(~(error <= _SUM_ERROR))[0]
    if len(doubtful):
        sums, present = PreciseSums(to_numpy(Q[doubtful])), universal.present
        step = max(16, BLOCK_ENTRIES // len(doubtful))
        for start in range(0, keys.n, step):
            part = slice(start, min(start + step, keys.n))
            rows = to_float64(keys.data[:, part, :], keys.format)[0][present[part]]
            sums.add(*even_rows(rows, -exponents))
        total, rounding, _ = sums.result(keys.n)
        D[doubtful], error[doubtful] = to_device(total, D), to_device(rounding, D)
        shift[doubtful] = to_device(np.where(total > 0, sums.shift, 0).astype(np.int32), D)
    return D, error, shift
