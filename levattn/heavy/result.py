"""The result of `heavy_attention`: entries, normalizers, and outputs with an error bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import (
    Matrices,
    array_namespace,
    as_matrices,
    lengths,
    take_rows,
    to_device,
    to_numpy,
)
from levattn._core.cached import cached_property
from levattn._core.checks import TIE
from levattn._core.device import where_arrays_are
from levattn._core.types import Float64
from levattn._kernels import GRAM, KEYS, Rows
from levattn.exceptions import NonFiniteError
from levattn.functions import AttentionFunction, Softmax, is_square
from levattn.heavy.causal import CHUNK, Causal
from levattn.heavy.normalizers import LEAST, LOWEST
from levattn.linalg.accumulator import UNIT, second_moments
from levattn.linalg.centered import means
from levattn.linalg.factor import float64_rows
from levattn.sensitivity.shares import BLOCK_ENTRIES, LEAST_POSITIVE
from levattn.sensitivity.shown import span
from levattn.sets.result import UniversalSet, flag_counts, html_table, number_of
from levattn.states.blocks import matrices_in_memory

if TYPE_CHECKING:
    from scipy.sparse import csr_array


_LARGE = 2.0**1020
_ENTRIES_SHOWN = 10
_FEW_COLUMNS = 128  # of values, up to which a 2-norm is computed for each chunk of causal attention


@dataclass(frozen=True, eq=False, repr=False)
class HeavyAttention:
    """The heavy part of attention with a function f; the result of `heavy_attention`.

    Attributes
    ----------
    universal : UniversalSet or None
        The set that the entries were taken from; None for causal attention.
    alive : array of int64, shape (chunks,), or None
        For causal attention the number of keys kept after each chunk of rows. It is at most rank/ε, except for
        prefixes so ill-conditioned or rank-deficient that their moments do not determine the scores.
    distortion : float
        For method="jl" the relative error that normalizers, scores and masses may have (except with a probability of
        1e-6); else 0.

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
    _products: Products | Causal = field(repr=False)
    _figures: Figures = field(repr=False)
    alive: npt.NDArray[np.int64] | None = None
    distortion: float = 0.0

    @property
    def _held_array(self) -> Any:
        return self._figures.normalizers, self.universal

    @where_arrays_are
    def __repr__(self) -> str:
        """Return the figures on one line."""
        m, n = self.entries.shape
        keys = f"in a set of {len(self.universal)}" if self.universal is not None else "causal"
        mass = f", captured_mass {span(self.captured_mass)}" if m else ""
        return f"HeavyAttention({self.entries.nnz} entries of {m} queries x {n} keys, {keys}{mass})"

    @where_arrays_are
    def _repr_html_(self) -> str:
        m, n = self.entries.shape
        rows = [("queries", str(m)), ("keys", str(n)), ("entries", str(self.entries.nnz))]
        rows.append(
            ("keys in the set", str(len(self.universal))) if self.universal is not None else ("form", "causal")
        )
        if m:
            rows.append(("captured mass", span(self.captured_mass)))
        largest = self.entries.tocoo()
        order = np.argsort(-largest.data, kind="stable")[:_ENTRIES_SHOWN]
        shown = ", ".join(f"({largest.row[i]}, {largest.col[i]}): {largest.data[i]:.3g}" for i in order)
        rows.append(("largest, (query, key)", shown or "none"))
        return html_table(self, rows)

    @property
    @where_arrays_are
    def entries(self) -> csr_array:
        """The scores A_ij ≥ ε, with exact normalizers: a scipy.sparse.csr_array (m, n) with sorted indices."""
        return self._figures.entries

    @property
    @where_arrays_are
    def normalizers(self) -> Float64:
        """``Σ f(⟨q_i, k_l⟩)`` over all keys, float64 (m,).

        For f(x) = x² it is 0 for a query orthogonal to all keys, whose row of A is zero. It is infinite or 0 if the
        sum leaves the range of float64, which does not affect the other figures.
        """
        return self._figures.of_queries[0]

    @property
    @where_arrays_are
    def error(self) -> Float64:
        """Estimated relative error of the normalizer and of the scores of each query, float64 (m,).

        It exceeds 1e-9 only for queries nearly orthogonal to the keys, keys of a condition number above 10¹¹ or, for
        softmax, logits above 10⁶. A score within four times this error of ε counts as at least ε, and is among the
        entries. The error is infinite where the normalizer is unknown, for example if f underflows for all keys of a
        query. All keys of the set are then among the entries. The values of your own function are assumed to be right
        to some roundings.
        """
        return to_numpy(self._figures.error)

    @property
    @where_arrays_are
    def captured_mass(self) -> Float64:
        """``Σ A_ij`` over the keys of the universal set, float64 (m,).

        For causal attention, over the kept keys and the keys of the row's own chunk.
        """
        return self._figures.of_queries[1]

    @property
    @where_arrays_are
    def residual_mass(self) -> Float64:
        """``Σ A_ij`` over the other keys, float64 (m,)."""
        return self._figures.of_queries[2]

    @where_arrays_are
    def apply(self, V: Any, compensate: Literal["mean"] | None = None) -> tuple[Any, Float64]:
        r"""Multiply the attention on the universal set by the values, with a bound on the part left out.

        The output is :math:`\sum_{j \in U} A_{ij} v_j` with the exact scores A of the full attention.
        ``compensate="mean"`` adds the residual mass times the mean value of the other keys, which is the best guess
        where the light scores are even.

        Parameters
        ----------
        V : array of shape (n, d_v)
            Values, one per key.
        compensate : {None, "mean"}
            The approximation of the keys outside the set.

        Returns
        -------
        output : array of float64, shape (m, d_v)
            In the kind of array of V; without gradients, as all scores and sets.
        error_bound : array of float64, shape (m,)
            For each query a bound on the Euclidean distance to the dense attention output. With residual mass r, e
            the largest leverage score outside U, and v̄ the mean of the n' values outside: plain
            :math:`\min(r \max \|v_j\|, \sqrt{e r}\, \|V_{\bar U}\|_2)`, compensated :math:`\min(r \max
            \|v_j - \bar v\|, \sqrt{e r - r^2/n'}\, \|V_{\bar U} - 1 \bar v^T\|_2)`.

        Raises
        ------
        TypeError, ValueError
            If V does not match the keys or `compensate` is unknown.
        NonFiniteError
            If the values hold NaN or infinity.

        Notes
        -----
        Time O(m \|U\| (d + d_v) + n d_v²) and memory O(m d_v + n), with blocks of at most 32 MB of scores. The bounds
        include the estimated rounding of the scores.

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
        return self._applied(as_matrices(V, "V"), compensate)

    def _applied(self, values: Matrices, compensate: Literal["mean"] | None) -> tuple[Any, Float64]:
        """Return the output and its bound for given values."""
        if compensate not in (None, "mean"):
            raise ValueError(f"compensate is {compensate!r}; expected None or 'mean'")
        n = self._figures.n
        if values.batch or values.n != n:
            shape = (*values.batch, values.n, values.d)
            raise ValueError(f"V has shape {shape}; expected ({n}, d_v), one value for each of the {n} keys")
        products = self._products
        if isinstance(products, Causal):
            everything = matrices_in_memory(values.masked(products.present), "V")[1]
        else:
            everything = Rows.of(values.masked(products.universal._present))
        largest = KEYS.column_figures(everything, largest=True).max(initial=0.0)
        if not np.isfinite(largest):
            bad = KEYS.nonfinite_rows(everything, 0, 5)
            raise NonFiniteError(
                f"V holds NaN or infinity, first in rows {bad}; expected finite values for every key that takes part"
            )
        if isinstance(products, Causal):
            output, bound = self._causal_output(products, everything, compensate is not None)
            return values.give_back(output), bound
        # powers are taken out of the values, so that squares stay in range: by a factor that is in range as well, and
        # at once from values so large that their differences might overflow
        above = 8 if largest > _LARGE else 0
        if above:
            everything = replace(everything, keys=everything.keys * 2.0**-above)
        power = max(int(np.frexp(largest)[1]) - above, -1020)
        scaled = replace(everything, scale=np.full((1, values.d), np.ldexp(1.0, -power)))
        output, bound, error = self._output(products, values, scaled, compensate is not None)
        rounding = (error + 16 * UNIT * values.d) * _largest_norm(scaled)
        xp = array_namespace(output)
        with np.errstate(over="ignore"):
            output, bound = xp.ldexp(output, power + above), xp.ldexp(bound * (1 + TIE) + rounding, power + above)
        bound = _in_range(output, to_numpy(bound + (values.d * LEAST_POSITIVE if largest > 0 else 0.0)))
        if array_namespace(values.data) is not xp:
            output = to_numpy(output)
        return values.give_back(output), bound

    def _output(self, products: Products, values: Matrices, scaled: Rows, compensate: bool) -> tuple[Any, Any, Any]:
        """Return the output, its bound, and the relative error of the scores, for values scaled to a tame range."""
        universal, residual = products.universal, self._figures.residual
        xp = array_namespace(residual)
        light = _Light.of(replace(scaled, mask=values.masked(universal._left).mask))
        inside = replace(scaled, keys=take_rows(scaled.keys, universal.indices), mask=None)
        chosen = to_device(float64_rows(inside, 0, inside.shape[1]), residual)
        output = xp.empty((len(residual), values.d))
        for part, scores in products.scores():
            output[part] = scores @ chosen
        error = xp.minimum(4 * products.error, to_device(np.full(1, 2.0), residual)) * _spread(
            len(chosen), products.epsilon
        )
        error = error + 16 * UNIT * len(chosen)
        # rounding of the scores may hide some of the residual mass
        r = xp.where(products.live, residual + error, 0.0)
        # the scores may be rounded to float32, and a bound must not be rounded down
        e = universal._largest_left * (1 + 4 * float(universal.factor.score_error[0]))
        if not compensate:
            return output, xp.minimum(r * light.largest, xp.sqrt(e * r) * light.norm), error
        output += residual[:, None] * to_device(light.mean, residual)
        variance = _variance(e, r, residual - error, light.count)
        return output, xp.minimum(r * light.spread, xp.sqrt(variance) * light.centered_norm), error

    def _causal_output(self, causal: Causal, values: Rows, compensate: bool) -> tuple[Float64, Float64]:
        """Return the output and its bound chunk by chunk; the keys left out lie before the chunk.

        So the bounds use the values before the chunk. Centered at their mean, the values left out have at most the
        2-norm of all values before the chunk, centered at theirs.
        """
        m, d = len(self.normalizers), values.shape[2]
        output, bound, before = np.empty((m, d)), np.empty(m), _Before(d)
        for chunk in causal.chunks():
            part = slice(*chunk.rows)
            here = float64_rows(values, *chunk.rows)
            kept = chunk.keys[chunk.keys < chunk.rows[0]]
            mask = None if values.mask is None else values.mask[:, kept]
            chosen = float64_rows(replace(values, keys=values.keys[:, kept], mask=mask), 0, len(kept))
            rest = np.zeros((chunk.scores.shape[1] - len(chunk.keys), d))
            scores = np.zeros((CHUNK, chunk.scores.shape[1]))  # with one shape, BLAS sums in one order
            scores[: len(here)] = chunk.scores
            with np.errstate(over="ignore", invalid="ignore"):
                output[part] = (scores @ np.vstack([chosen, here, rest]))[: len(here)]
            error = np.minimum(4 * chunk.error, 2.0) * _spread(chunk.scores.shape[1], causal.epsilon)
            error = np.where(chunk.live, error + 16 * UNIT * chunk.scores.shape[1], 0.0)
            residual = self.residual_mass[part]
            r = np.where(chunk.live, residual + error, 0.0)
            if compensate:
                left = before.count - int(causal.present[kept].sum())
                mean = (before.total - np.ldexp(chosen, -before.power).sum(axis=0)) / max(left, 1)
                with np.errstate(over="ignore", invalid="ignore"):
                    output[part] += residual[:, None] * np.ldexp(mean, before.power)
                spread = before.largest + float(lengths(mean[None])[0])
                variance = _variance(causal.epsilon, r, residual - error, left)
                distance = np.minimum(r * spread, np.sqrt(variance) * before.norm(centered=True))
            else:
                distance = np.minimum(r * before.largest, np.sqrt(causal.epsilon * r) * before.norm(centered=False))
            with np.errstate(over="ignore"):
                sizes = np.maximum(np.maximum.accumulate(lengths(here)), np.ldexp(before.largest, before.power))
                rounding = (error + 16 * UNIT * d) * sizes
                # a product that leaves the range is off by a step, whatever the size of the values
                steps = np.where(sizes > 0, (chunk.scores.shape[1] + 2) * d * LEAST_POSITIVE, 0.0)
                total = np.ldexp(distance * (1 + TIE), before.power) + rounding + steps
            bound[part] = _in_range(output[part], total)
            before.add(here, int(causal.present[part].sum()))
        return output, bound


def _spread(count: int, epsilon: float) -> float:
    """Return the factor from the error of a score of ε to a sum of scores, whose roots sum to at most √count."""
    return float(np.sqrt(max(1.0, count * epsilon)))


class _Before:
    """Figures of the values before a chunk, divided by 2^power, for the bounds of causal attention.

    No square and no sum of values leaves the range, and later values do not decide the unit.
    """

    def __init__(self, d: int) -> None:
        self.count, self.power = 0, LOWEST
        self.total, self.largest = np.zeros(d), 0.0
        self._squares = np.zeros((d, d))  # Σ v vᵀ
        self._chunks = 0

    def add(self, V: Float64, count: int) -> None:
        """Add the values of `count` keys."""
        self.count, self._chunks = self.count + count, self._chunks + 1
        largest = np.abs(V).max(initial=0.0)
        power = max(self.power, int(np.frexp(largest)[1]) if largest > 0 else LOWEST)
        V, change = np.ldexp(V, -power), self.power - power
        self.total = np.ldexp(self.total, change) + V.sum(axis=0)
        self.largest = max(float(np.ldexp(self.largest, change)), float(lengths(V).max(initial=0.0)))
        self._squares = np.ldexp(self._squares, 2 * change) + V.T @ V
        self.power = power

    def norm(self, *, centered: bool) -> float:
        """Return a bound of the 2-norm of the values so divided, or of their differences from their mean."""
        if not self.largest > 0:
            return 0.0
        squares = self._squares
        if centered:
            squares = squares - np.outer(self.total, self.total) / self.count
        trace = float(np.trace(self._squares)) * (2 * self._chunks + 2 * CHUNK + 64 * len(squares)) * UNIT  # rounding
        rows = np.abs(squares).sum(axis=1).max()  # bounds the largest eigenvalue
        largest = np.linalg.eigvalsh(squares)[-1] if len(squares) <= _FEW_COLUMNS else rows
        return float(np.sqrt(max(largest, 0.0) + trace))


def _in_range(output: Any, bound: Float64) -> Float64:
    """Return the bounds of outputs (m, d), infinite where the output has left the range."""
    return np.where(to_numpy(array_namespace(output).isfinite(output)).all(axis=1), bound, np.inf)


def _variance(e: float, r: Any, least: Any, count: int) -> Any:
    """Return a bound of the squared norm of light scores about their mean: each at most e, their sum r."""
    xp = array_namespace(r)
    return xp.maximum(e * r - xp.maximum(least, 0.0) ** 2 / max(count, 1), 0.0)


@dataclass(frozen=True)
class Figures:
    """The figures of each query and the entries, where they were computed; the properties move them to main memory."""

    n: int  # number of keys
    normalizers: Any  # (m,)
    captured: Any  # (m,), the mass on the keys of the set
    residual: Any  # (m,), the mass on the other keys
    error: Any  # (m,), estimated relative errors of the scores
    found: csr_array | tuple[Any, Any, Any]  # the entries, or their (starts, keys, scores) in CSR order
    others: csr_array | None = None  # further entries, in main memory

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
class PreciseQueries:
    """Queries whose products with the keys of a set need more than float64, all in main memory."""

    places: npt.NDArray[np.int64]  # their numbers among all queries
    normalizers: Float64  # as in `Products`
    error: Float64  # as in `Products`
    multiply: Callable[[slice], Float64]  # gives products of a part with the keys, in the units of the normalizers


@dataclass(frozen=True)
class Products:
    """Queries and the keys of a universal set, both scaled by powers of two, and their normalizers.

    They are in main memory, or for f(x) = x² on the CUDA device of queries and keys. The products of `precise` queries
    cancel so far that they need more than float64, or the errors of their scores need thresholds of their own.
    """

    universal: UniversalSet
    f: AttentionFunction | Softmax
    queries: Any
    keys: Any
    normalizers: Any  # Σ f(⟨q, k⟩) in the units of the queries, or its logarithm for softmax
    precise: Any  # flags of queries
    error: Any  # estimated relative error of a score of ε in each row
    epsilon: float  # that ε
    few: PreciseQueries | None  # the precise queries in main memory, if there are any

    @property
    def live(self) -> Any:
        """Flags of queries with a nonzero row of A."""
        return np.full(len(self.normalizers), True) if isinstance(self.f, Softmax) else self.normalizers > 0

    @property
    def _step(self) -> int:
        return max(16, BLOCK_ENTRIES // max(len(self.keys), 1))

    def _shares(self, Z: Any, D: Any) -> Any:
        """Return scores from products and normalizers."""
        if isinstance(self.f, Softmax):
            return np.exp(Z - D)
        xp, values = array_namespace(Z), Z * Z if is_square(self.f) else self.f(Z)
        return xp.where(D > 0, values / xp.where(D > 0, D, 1.0), 0.0)

    def precise_scores(self) -> Iterator[tuple[npt.NDArray[np.int64], Float64, Float64]]:
        """Yield some of the precise queries (their numbers) at a time, their scores on the set, and the errors."""
        few = self.few
        if few is None:
            return
        for start in range(0, len(few.places), self._step):
            part = slice(start, start + self._step)
            some = self._shares(few.multiply(part), few.normalizers[part, None])
            # where a normalizer is nearly unknown, it contains at least the keys of the set
            some = some / np.maximum(some.sum(axis=1, keepdims=True), 1.0)
            unknown = np.isinf(few.error[part])[:, None]
            yield few.places[part], np.where(unknown & (some < LEAST), LEAST, some), few.error[part]

    def scores(self) -> Iterator[tuple[Any, Any]]:
        """Yield the scores of all queries in the same way, on the device of the queries."""
        rows = array_namespace(self.queries).nonzero(~self.precise)[0]
        for start in range(0, len(rows), self._step):
            part = rows[start : start + self._step]
            yield part, self._shares(self.queries[part] @ self.keys.T, self.normalizers[part, None])
        for places, some, _ in self.precise_scores():
            yield to_device(places, self.queries), to_device(some, self.queries)


@dataclass(frozen=True)
class _Light:
    """Figures of the values outside the set, for the error bounds."""

    count: int
    mean: Float64
    largest: float  # largest Euclidean norm of a value
    spread: float  # largest norm of a value less the mean
    norm: float  # 2-norm of the matrix of values
    centered_norm: float

    @classmethod
    def of(cls, rows: Rows) -> _Light:
        count = rows.shape[1] if rows.mask is None else int(flag_counts(rows.mask)[0])
        parts, _ = means(rows)
        both = rows, replace(rows, shift=parts)
        return cls(count, parts[0, 0], *map(_largest_norm, both), *map(_spectral_norm, both))


def _largest_norm(rows: Rows) -> float:
    squares = rows.zeros(as_float64=True)
    GRAM.sqnorms(rows, np.zeros(1, np.int64), np.eye(rows.shape[2])[None], squares)
    return float(np.sqrt(float(array_namespace(squares).max(squares)))) if rows.shape[1] else 0.0


def _spectral_norm(rows: Rows) -> float:
    return float(np.sqrt(max(np.linalg.eigvalsh(to_numpy(second_moments(rows, [0])[0]))[-1], 0.0)))


@dataclass(frozen=True, eq=False, repr=False)
class HeavyAttentionBatch:
    """The heavy part of attention of a batch of heads; the result of `heavy_attention` for Q and K with leading axes.

    ``found[layer, head]`` is the `HeavyAttention` of one head, with its sparse entries.

    Attributes
    ----------
    items : tuple of HeavyAttention
        The results, leading axes of the queries flattened.
    batch : tuple of int
        Leading axes of the queries, or of the keys where the queries have none.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> rng = np.random.default_rng(0)
    >>> Q, K = rng.standard_normal((2, 6, 5, 4)), rng.standard_normal((2, 3, 100, 4))  # two heads share keys
    >>> found = levattn.heavy_attention(Q, K, 0.1)
    >>> found.batch, found[1, 5].entries.shape, found.normalizers.shape
    ((2, 6), (5, 100), (2, 6, 5))
    """

    items: tuple[HeavyAttention, ...]
    batch: tuple[int, ...]
    _heads: npt.NDArray[np.int64] = field(repr=False)  # of the keys of each item
    _shared: tuple[int, ...] = field(repr=False)  # leading axes of the keys

    @property
    def _held_array(self) -> Any:
        return self.items

    def __getitem__(self, index: int | tuple[int, ...]) -> HeavyAttention:
        """Return the result of one head."""
        return self.items[number_of(index, self.batch)]

    def __iter__(self) -> Iterator[HeavyAttention]:
        """Give the results of all heads, leading axes flattened."""
        return iter(self.items)

    def __len__(self) -> int:
        """Return the number of heads."""
        return len(self.items)

    @where_arrays_are
    def __repr__(self) -> str:
        """Return the figures on one line."""
        entries = span([item.entries.nnz for item in self.items])
        return (
            f"HeavyAttentionBatch({entries} entries in each of {self.batch}, captured_mass {span(self.captured_mass)})"
        )

    @where_arrays_are
    def _repr_html_(self) -> str:
        entries = span([item.entries.nnz for item in self.items])
        rows = [("batch", str(self.batch)), ("entries in each", entries), ("captured mass", span(self.captured_mass))]
        return html_table(self, rows)

    def _stacked(self, name: str) -> Float64:
        figures = [getattr(item, name) for item in self.items]
        return np.stack(figures).reshape(*self.batch, -1) if figures else np.zeros((*self.batch, 0))

    @property
    def normalizers(self) -> Float64:
        """The normalizers, float64 (..., m); see `HeavyAttention`."""
        return self._stacked("normalizers")

    @property
    def error(self) -> Float64:
        """Estimated relative errors of normalizers and scores, float64 (..., m); see `HeavyAttention`."""
        return self._stacked("error")

    @property
    def captured_mass(self) -> Float64:
        """The share of attention on the keys of the set, float64 (..., m); see `HeavyAttention`."""
        return self._stacked("captured_mass")

    @property
    def residual_mass(self) -> Float64:
        """The share of attention on the other keys, float64 (..., m); see `HeavyAttention`."""
        return self._stacked("residual_mass")

    @where_arrays_are
    def apply(self, V: Any, compensate: Literal["mean"] | None = None) -> tuple[Any, Float64]:
        """Multiply the attention on the universal sets by the values, with bounds on the parts left out.

        Parameters
        ----------
        V : array of shape (..., n, d_v)
            Values, one a key, with the leading axes of the keys.
        compensate : {None, "mean"}
            See `HeavyAttention.apply`.

        Returns
        -------
        output : array of float64, shape (..., m, d_v)
            In the kind of array of V, without gradients.
        error_bound : array of float64, shape (..., m)
            See `HeavyAttention.apply`.

        Raises
        ------
        TypeError, ValueError
            If V does not match the keys or `compensate` is unknown.
        NonFiniteError
            If the values hold NaN or infinity.
        """
        values = as_matrices(V, "V")
        if values.batch != self._shared:
            shape = (*values.batch, values.n, values.d)
            raise ValueError(
                f"V has shape {shape}; expected the leading axes {self._shared} of the keys before (n, d_v)"
            )
        if not self.items:
            raise ValueError(f"the batch {self.batch} has no heads; expected at least one")
        found = [
            item._applied(values.item(int(head)), compensate)
            for item, head in zip(self.items, self._heads, strict=True)
        ]
        outputs, bounds = zip(*found, strict=True)
        xp = array_namespace(*outputs)
        output = xp.reshape(xp.stack(outputs), (*self.batch, *outputs[0].shape))
        return output, np.stack(bounds).reshape(*self.batch, -1)


def keys_of_heads(queries: tuple[int, ...], keys: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the matrix of keys that each matrix of queries attends to, from their leading axes, or raise."""
    heads = np.arange(math.prod(keys), dtype=np.int64).reshape(keys)
    if queries in ((), keys):
        return heads.ravel()
    shared = keys[-1] if keys else 1
    if queries[:-1] != keys[:-1] or not shared or queries[-1] % shared:
        raise ValueError(
            f"Q has leading axes {queries} and K has {keys}; expected equal axes, none for Q, or "
            "a last one that is a multiple of K's"
        )
    return heads.reshape(*keys[:-1], shared).repeat(queries[-1] // shared, axis=-1).ravel()
