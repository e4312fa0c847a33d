"""Online leverage scores: each key among the keys up to it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import as_matrices
from levattn._core.checks import real_number
from levattn._core.device import where_arrays_are
from levattn._core.types import Float64
from levattn._kernels import Rows
from levattn.linalg.factor import float64_rows
from levattn.linalg.reading import require_finite
from levattn.states.block_buffer import in_main_memory

__all__ = ["online_leverage_scores"]

_TAME = 300  # powers of two of entries that are read as they are
_FAR = 400  # by which an entry may be larger than its unit
_NONE = -(1 << 20)  # the exponent of no entry
_ROWS = 4096  # that are looked at together


@where_arrays_are
def online_leverage_scores(K: Any, /, *, ridge: float = 0.0, mask: Any = None) -> Any:
    r"""Online leverage scores of keys: the largest attention that any query can give each key when it comes.

    The score of key :math:`k_t` is its leverage score among the keys up to it, itself counted in,

    .. math:: \tau_t = k_t^T \Bigl(\lambda I + \sum_{s \le t} k_s k_s^T\Bigr)^+ k_t .

    It is what causal attention can give a key at best, at any time: a leverage score only falls as keys are added. So,
    up to rounding,

    - no online score is below the leverage score of the key among all keys (with the same λ);
    - for λ > 0 scores are below 1, and :math:`\sum_t -\log(1 - \tau_t) = \log\det(I + K^T K / \lambda)`. Hence
      :math:`\sum_t \tau_t \le d \log(1 + \|K\|_F^2 / (d \lambda))`;
    - for λ = 0 a key that opens a new direction scores 1. There are r = rank of these, at distances :math:`\delta_i`
      from the span of the keys before, and the others sum to at most :math:`\log \prod_i \sigma_i^2 / \delta_i^2`,
      with σ the singular values of K that are not 0.

    All is computed in float64, whatever the dtype of the keys. The relative error of a score is about 2⁻⁵³ times the
    condition number of the keys so far (with √λ as a further singular value, and their columns scaled to unit norm
    for λ = 0), whatever their number. The rank is decided key by key, and errs upwards: a key that reaches outside
    the span of those before by more than rounding (about :math:`64 d \, 2^{-53}` of its size, and of what of them
    cancels) scores 1. For ill-conditioned keys of deficient rank that may be one key too many, and later scores are
    *over*-estimates then. It *under*-estimates only what is smaller than rounding.

    Parameters
    ----------
    K : array of shape (..., n, d)
        Keys in the order in which they come, as in `leverage_scores`, but for sparse ones.
    ridge : float, default 0
        The number λ itself, at least 0 (that of `leverage_scores` is relative to the keys). It lowers every score.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part. The others score 0, later keys do not see them, and their values are not read.

    Returns
    -------
    array of shape (..., n)
        Scores in the caller's kind of array, on its device: float64 for float64 keys, else float32. Those of the
        first keys are, to the last bit, what they would be without the later ones.

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

    Notes
    -----
    Time O(n d r) for rank r, on one thread for each matrix, 10 to 30 times that of `leverage_scores`; memory O(d²)
    beyond K and the scores. Keys on another device are moved to main memory, and the scores back. A key is rotated
    into the triangle of those before it, which is held with its rounding errors, by one plane rotation a direction;
    its score is the sum of squares that these rotations take of it.

    References
    ----------
    Cohen, Musco and Pachocki, "Online Row Sampling", arXiv:1604.05448, for the notion and a bound of this kind.
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), name these scores as the way
    to causal attention.

    Examples
    --------
    A direction that comes again counts for less each time:

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
    largest = rows.column_maxima()
    if not np.isfinite(largest).all():
        require_finite(rows, largest)
    root = math.sqrt(ridge)
    from levattn._kernels.online.cpu import online_scores  # compiled code, for which nothing else would load Numba

    scores = np.zeros(rows.shape[:2])
    for start, scale in _units(rows, largest, root):
        scores[:, start:] = online_scores(replace(rows, scale=scale), root * scale)[:, start:]
    return matrices.wrap(scores.astype(np.float64 if rows.format == "float64" else np.float32))


def _units(rows: Rows, largest: Float64, root: float) -> Iterator[tuple[int, Float64]]:
    """Give powers of two (b, d) that keep squares in range, and the rows from which on they are to be used.

    Those of a row are made of the rows up to it: of the first entry of each column, and of entries that are much
    larger than those before.
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
    """Return the exponents of numbers, next to nothing for 0."""
    return np.where(X != 0, np.frexp(X)[1], _NONE)


def _first_entries(rows: Rows) -> npt.NDArray[np.int64]:
    """Return the exponents of the first entry of each column of a batch of one that is not zero."""
    out = np.full(rows.shape[2], _NONE)
    low, step = 0, 16  # mostly the first row has an entry in each column
    while low < rows.shape[1] and (out == _NONE).any():
        X = float64_rows(rows, low, min(low + step, rows.shape[1]))
        low, step = low + step, min(4 * step, _ROWS)
        first = X[np.argmax(X != 0, axis=0), np.arange(len(out))]
        out = np.where(out == _NONE, _exponents(first), out)
    return out
