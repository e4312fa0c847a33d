"""Figures of all leverage scores together: their largest, and the sum under a ridge."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.arrays import to_numpy
from levattn._core.device import where_arrays_are
from levattn.sensitivity.leverage import factorize, read_keys, ridge_of


@where_arrays_are
def coherence(K: Any, /, *, center: bool = False, mask: Any = None, weights: Any = None) -> Any:
    r"""Coherence of keys: their largest leverage score, :math:`\mu = \max_j \tau_j`.

    It lies between rank/n, where all keys weigh alike, and 1, where some key has a direction of its own. Uniform
    samples need some :math:`n \mu \log(r)` rows where `sample_rows` needs :math:`r \log(r)`. Some authors multiply it
    by n/r. Its error is at most the error of the scores that `leverage_scores` returns for float64 keys.

    Parameters
    ----------
    K : array of shape (..., n, d)
        Keys, as in `leverage_scores`; also one sparse matrix.
    center : bool, default False
        Whether the mean of the keys is subtracted first.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part.
    weights : array of float, broadcast to (..., n), optional
        The weight of each key, as in `leverage_scores`.

    Returns
    -------
    float, or array of float64, shape (...)
        The coherence of each matrix, 0 without keys; NumPy's, whatever the kind of K.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, as in `leverage_scores`.
    NonFiniteError
        If the keys hold NaN or infinity outside the mask; the first such rows are named.

    See Also
    --------
    leverage_scores : All scores.

    Notes
    -----
    Time O(n d²) and memory O(d² log n) for each thread, as for `leverage_scores`.

    References
    ----------
    Drineas, Magdon-Ismail, Mahoney and Woodruff, "Fast approximation of matrix coherence and statistical leverage",
    JMLR 13, 2012, Definition 1.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> float(levattn.coherence(np.array([[1.0, 0], [1, 0], [0, 2]])))
    1.0
    """
    matrices, roots, _ = read_keys(K, mask, weights, center)
    factor = factorize(matrices, method="gram", center=center, weights=roots, scores_only=True)
    scores = to_numpy(factor.scores(as_float64=True, numerical=True)[0])
    return np.asarray(scores.max(axis=1, initial=0.0)).reshape(matrices.batch)[()]


@where_arrays_are
def effective_dimension(
    K: Any,
    /,
    *,
    ridge: float = 0.0,
    relative_ridge: float = 0.0,
    center: bool = False,
    mask: Any = None,
    weights: Any = None,
) -> Any:
    r"""Effective dimension of keys: the sum of their ridge leverage scores.

    It is the number of degrees of freedom of ridge regression on K,

    .. math:: d_\lambda = \operatorname{tr}\bigl(K (K^T K + \lambda I)^+ K^T\bigr)
        = \sum_i \frac{\sigma_i^2}{\sigma_i^2 + \lambda},

    with the singular values :math:`\sigma_i` of K that are not 0. It falls from the rank, at λ = 0, toward 0.

    All computation is in float64, whatever the dtype. The relative error is at most the error of the scores that
    `leverage_scores` returns for float64 keys, in either direction.

    Parameters
    ----------
    K : array of shape (..., n, d)
        Keys, as in `leverage_scores`; also one sparse matrix.
    ridge : float, default 0
        The number λ itself, at least 0, in the units of KᵀK.
    relative_ridge : float, default 0
        The number λ over ‖K‖_F²/d, at least 0. One of both arguments may be given. Without them the result is the
        rank.
    center : bool, default False
        Whether the mean of the keys is subtracted first.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part.
    weights : array of float, broadcast to (..., n), optional
        The weight of each key, as in `leverage_scores`: K stands for its rows times the roots of their weights.

    Returns
    -------
    float, or array of float64, shape (...)
        The effective dimension of each matrix, from 0 to its rank; NumPy's, whatever the kind of K.

    Raises
    ------
    TypeError
        If K is not an array of real floating dtype, a ridge is no number, or the mask is not boolean.
    ValueError
        If a shape or a ridge is out of range, or both ridges are given.
    NonFiniteError
        If the keys hold NaN or infinity outside the mask; the first such rows are named.

    See Also
    --------
    leverage_scores : Its terms.
    levattn.definitions.effective_dimension : The definition, in NumPy.

    Notes
    -----
    Time O(n d²) and memory O(d² log n) for each thread, as for `leverage_scores`.

    References
    ----------
    Hastie, Tibshirani and Friedman, "The Elements of Statistical Learning", second edition, equation 3.50.
    Alaoui and Mahoney, "Fast randomized kernel ridge regression with statistical guarantees", NeurIPS 2015, section 2.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.diag([1.0, 2.0, 3.0])
    >>> round(float(levattn.effective_dimension(K, ridge=1.0)), 9)  # 1/2 + 4/5 + 9/10
    2.2
    >>> float(levattn.effective_dimension(K))
    3.0
    """
    added = ridge_of(ridge, relative_ridge)
    matrices, roots, power = read_keys(K, mask, weights, center)
    options: dict[str, Any] = {"ridge": added.below(power), "center": center, "weights": roots}
    factor = factorize(matrices, method="gram", scores_only=True, **options)
    if not added:
        return factor.rank.astype(np.float64).reshape(matrices.batch)[()]
    scores = factor.scores(as_float64=True, numerical=True)[0]
    return np.asarray(to_numpy(scores).sum(axis=1)).reshape(matrices.batch)[()]
