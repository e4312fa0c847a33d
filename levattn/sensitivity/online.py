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
from levattn.states.blocks import in_main_memory

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
        The number λ itself, at least 0 (the ridge of `leverage_scores` is relative to the keys). It lowers every
        score.
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
    largest = rows.column_maxima()
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
