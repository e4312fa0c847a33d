"""Heavy attention: the large attention scores themselves, with exact normalisers and what they leave out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from levattn._array import Matrices, as_matrices, to_float64, to_numpy
from levattn._kernels import Float64, Rows, heavy_entries, kernels_for, query_norms
from levattn.exceptions import NonFiniteError
from levattn.linalg import UNIT, Factor
from levattn.states import second_moments
from levattn.universal import TIE, UniversalSet, check_epsilon, take, universal_set

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["HeavyAttention", "heavy_attention"]

_QUERY_ROWS = 4096  # queries that are worked on at a time
_NORMALIZER_ERROR = TIE / 2  # estimated relative error beyond which a normaliser is summed over all keys


@dataclass(frozen=True)
class HeavyAttention:
    """The heavy part of attention with f(x) = x²; the result of `heavy_attention`.

    Attributes
    ----------
    entries : scipy.sparse.csr_array, shape (m, n)
        The scores A_ij ≥ ε, exact (of the full softmax-free normaliser), indices sorted.
    normalizers : array of float64, shape (m,)
        ``Σ ⟨q_i, k_l⟩²`` over all keys; 0 for a query orthogonal to all keys, whose row of A is zero.
    captured_mass : array of float64, shape (m,)
        ``Σ A_ij`` over the keys of the universal set.
    residual_mass : array of float64, shape (m,)
        ``Σ A_ij`` over the other keys.
    universal : UniversalSet
        The set that the entries were taken from.

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

    entries: csr_array
    normalizers: Float64
    captured_mass: Float64
    residual_mass: Float64
    universal: UniversalSet
    _queries: Float64 = field(repr=False)
    _keys: Float64 = field(repr=False)

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
        Time O(m |U| (d + d_v) + n d_v²) and memory O(m d_v + n).

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
        n = self.entries.shape[1]
        values = as_matrices(V, "V")
        if values.batch or values.n != n:
            shape = (*values.batch, values.n, values.d)
            raise ValueError(f"V has shape {shape}; expected ({n}, d_v), one value for each of the {n} keys")
        inside = to_numpy(self.universal.mask)
        present = self.universal.present
        chosen = to_float64(take(values.data, np.flatnonzero(inside)), values.format)[0]
        light = _Light.of(values, present & ~inside)
        if not (np.isfinite(chosen).all() and np.isfinite(light.spread)):
            everything = Rows(values.data, values.format, _as_device_mask(present, values))
            bad = kernels_for(everything).nonfinite_rows(everything, 0, 5)
            raise NonFiniteError(
                f"V holds NaN or infinity, first in rows {bad}; expected finite values for every key that takes part"
            )

        output = np.empty((len(self._queries), values.d))
        for start in range(0, len(output), _QUERY_ROWS):
            part = slice(start, start + _QUERY_ROWS)
            D = self.normalizers[part, None]
            scores = (self._queries[part] @ self._keys.T) ** 2 / np.where(D > 0, D, 1.0)
            output[part] = np.where(D > 0, scores, 0.0) @ chosen
        r = self.residual_mass
        outside = to_numpy(self.universal.scores)[present & ~inside]
        # the scores may be rounded to float32, and a bound must not be rounded down
        e = float(outside.max(initial=0.0)) * (1 + 4 * float(self.universal.factor.score_error[0]))
        if compensate is None:
            bound = np.minimum(r * light.largest, np.sqrt(e * r) * light.norm)
        else:
            output += r[:, None] * light.mean
            variance = np.maximum(e * r - r * r / max(light.count, 1), 0.0)
            bound = np.minimum(r * light.spread, np.sqrt(variance) * light.centred_norm)
        rounding = 16 * UNIT * max(len(chosen), values.d) * float(np.abs(chosen).max(initial=0.0))
        return values.give_back(output), bound * (1 + TIE) + rounding


@dataclass(frozen=True)
class _Light:
    """What the error bounds need of the values outside the set."""

    count: int
    mean: Float64
    largest: float  # Euclidean norm of a value
    spread: float  # of a value's difference to the mean
    norm: float  # 2-norm of the matrix of values
    centred_norm: float

    @classmethod
    def of(cls, values: Matrices, outside: Any) -> _Light:
        rows = Rows(values.data, values.format, _as_device_mask(outside, values))
        kernels = kernels_for(rows)
        count = int(outside.sum())
        mean = kernels.column_sums(rows)[0] / max(count, 1)
        if not np.isfinite(mean).all():
            return cls(count, mean, np.inf, np.inf, np.inf, np.inf)
        centred = replace(rows, shift=mean[None])
        return cls(count, mean, *(_largest_norm(r) for r in (rows, centred)), *map(_spectral_norm, (rows, centred)))


def _as_device_mask(mask: Any, matrices: Matrices) -> Any:
    if isinstance(matrices.data, np.ndarray):
        return mask[None]
    import array_api_compat

    xp = array_api_compat.array_namespace(matrices.data)
    return xp.asarray(mask[None], device=array_api_compat.device(matrices.data))


def _largest_norm(rows: Rows) -> float:
    kernels = kernels_for(rows)
    squares = kernels.wide_zeros(rows)
    kernels.sqnorms(rows, np.zeros(1, np.int64), np.eye(rows.shape[2])[None], squares)
    return float(np.sqrt(to_numpy(squares).max(initial=0.0)))


def _spectral_norm(rows: Rows) -> float:
    return float(np.sqrt(max(np.linalg.eigvalsh(second_moments(rows, [0])[0])[-1], 0.0)))


def heavy_attention(
    Q: Any,
    K: Any,
    epsilon: float,
    /,
    *,
    f: float = 2,
    universal: UniversalSet | None = None,
    mask: Any = None,
) -> HeavyAttention:
    r"""Find every attention score of at least ε, without forming the attention matrix.

    For f(x) = x² and :math:`A_{ij} = \langle q_i, k_j\rangle^2 / \sum_l \langle q_i, k_l\rangle^2`, only keys of
    the universal set can have a score of at least ε, and the normaliser is :math:`\|N q_i\|^2` with
    :math:`N^T N = K^T K`. So a query costs O(d² + |U| d), whatever n. No entry of at least ε is missed, and all
    values are those of the full attention.

    Parameters
    ----------
    Q : array of shape (m, d)
        Queries.
    K : array of shape (n, d)
        Keys; kinds and dtypes as in `leverage_scores`.
    epsilon : float in (0, 1]
        Smallest score that counts as heavy. A score within 1e-9 (relative) of ε counts as at least ε.
    f : float, default 2
        Attention function |x|^f; 2 is the only one so far.
    universal : UniversalSet, optional
        The universal set of the same keys for ε or less, if it is known already: then nothing of size n is touched
        but the rows of K in the set.
    mask : array of bool, shape (n,), optional
        True for a key that takes part. Not with `universal`, which has its own.

    Returns
    -------
    HeavyAttention

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, or `universal` belongs to other keys or does not cover ε.
    NonFiniteError
        If queries or keys hold NaN or infinity.

    See Also
    --------
    universal_set : The keys that can be heavy for any query.

    Notes
    -----
    Preparation O(n d²); then O(m (d² + |U| d)) with |U| ≤ rank/ε. Memory O(m d + n + |U| d) and the output.
    Sums run in float64. A query so nearly orthogonal to the keys that ``‖N q‖²`` would lose its digits gets its
    normaliser summed over the keys, O(n d); one that is orthogonal to them to rounding has a row of zeros.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462): universal sets (Theorem 1)
    and exact normalisers for even p.

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
    from scipy.sparse import csr_array

    if isinstance(f, bool) or not isinstance(f, int | float) or f != 2:
        raise ValueError(f"f is {f!r}; expected 2, for the attention function x²")
    epsilon = check_epsilon(epsilon)
    queries, keys = as_matrices(Q, "Q"), as_matrices(K, "K")
    for name, matrices in (("Q", queries), ("K", keys)):
        if matrices.batch:
            shape = (*matrices.batch, matrices.n, matrices.d)
            raise ValueError(f"{name} has shape {shape}; expected one matrix. Call heavy_attention for each head")
    if queries.d != keys.d:
        raise ValueError(f"Q has {queries.d} columns and K has {keys.d}; expected the same number d")
    if universal is None:
        universal = universal_set(K, epsilon, mask=mask)
    elif mask is not None:
        raise ValueError("mask and universal: both given; expected the mask in universal_set alone")
    else:
        _check_universal(universal, keys, epsilon)
    Q64 = to_float64(queries.data, queries.format)[0]
    if not np.isfinite(Q64).all():
        bad = np.flatnonzero(~np.isfinite(Q64).all(axis=1))[:5]
        raise NonFiniteError(f"Q holds NaN or infinity, first in rows {bad.tolist()}; expected finite queries")
    indices = universal.indices
    selected = to_float64(take(keys.data, indices), keys.format)[0]
    D = _normalizers(Q64, universal.factor, keys, universal.present)
    starts, columns, values, captured = heavy_entries(Q64, selected, indices, D, epsilon * (1 - TIE))
    captured = np.clip(captured, 0.0, 1.0)
    return HeavyAttention(
        entries=csr_array((values, columns, starts), shape=(queries.n, keys.n)),
        normalizers=D,
        captured_mass=captured,
        residual_mass=np.where(D > 0, 1 - captured, 0.0),
        universal=universal,
        _queries=Q64,
        _keys=selected,
    )


def _check_universal(universal: Any, keys: Matrices, epsilon: float) -> None:
    if not isinstance(universal, UniversalSet):
        raise TypeError(f"universal is of type {type(universal).__name__}; expected the result of universal_set")
    shape = tuple(universal.mask.shape)
    if shape != (keys.n,):
        raise ValueError(f"universal is of keys of shape {shape}; expected the set of K's {keys.n} keys")
    if universal.factor.rows.shape[2] != keys.d:
        raise ValueError(f"universal is of keys with d = {universal.factor.rows.shape[2]}; K has d = {keys.d}")
    if universal.guarantee == "none":
        raise ValueError(
            "universal promises nothing for attention over K (it was made with center=True); "
            "expected a set with guarantee 'exact' or 'superset'"
        )
    if universal.epsilon > epsilon:
        raise ValueError(
            f"universal holds the scores of at least {universal.epsilon:.6g}, but epsilon is {epsilon:.6g}; "
            "make the set with this epsilon, or ask for more"
        )


def _normalizers(Q: Float64, factor: Factor, keys: Matrices, present: Any) -> Float64:
    """Return ``Σ ⟨q, k⟩²`` for each query; by the factor where that is precise, else summed over the keys."""
    N = factor.normalizer[0]
    D, size = query_norms(Q, N)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = 2 * UNIT * np.sqrt(Q.shape[1] * size / D) + float(factor.error[0])
    norms = np.sum(N * N, axis=0)  # squared column norms of the keys
    for i in np.flatnonzero(~(error <= _NORMALIZER_ERROR)).tolist():
        exact = _summed(Q[i], keys, present)
        floor = (Q.shape[1] * UNIT) ** 2 * Q.shape[1] * float(np.sum(Q[i] ** 2 * norms))
        D[i] = exact if exact > floor else 0.0
    return D


def _summed(q: Float64, keys: Matrices, present: Any) -> float:
    total = 0.0
    for start in range(0, keys.n, _QUERY_ROWS):
        part = slice(start, min(start + _QUERY_ROWS, keys.n))
        rows = to_float64(keys.data[:, part, :], keys.format)[0][present[part]]
        total += float(np.sum((rows @ q) ** 2))
    return total
