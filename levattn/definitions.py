"""The definitions of the papers, each in a few lines of NumPy that read as its formula.

They take one matrix of float64 numbers for each argument, check nothing, and are slow. The functions of the same names
elsewhere in levattn return the same numbers for any shape, dtype, library and condition number, faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from levattn._core.types import Float64, Int64

__all__ = [
    "attention_scores",
    "coding_rate",
    "covering_set",
    "effective_dimension",
    "expected_scores",
    "fit_slots",
    "group_leverage",
    "heavy_attention",
    "latte",
    "leverage_scores",
    "lewis_weights",
    "online_leverage_scores",
    "poisson_sample",
    "pruned_attention",
    "sample_rows",
    "sensitivities",
    "softmax",
    "tssa",
    "universal_set",
]

_Function = Callable[[Float64], Any]


def _inverse(G: Float64) -> Float64:
    """Return the pseudoinverse of a Gram matrix: eigenvalues up to 10⁻¹² of the largest are rounding errors."""
    return np.asarray(np.linalg.pinv(G, rcond=1e-12, hermitian=True))


def softmax(Z: Float64, axis: int = -1) -> Float64:
    r"""Return :math:`e^{z_j} / \sum_l e^{z_l}` along an axis.

    Parameters
    ----------
    Z : array of shape (..., n)
        Logits, not all −∞.
    axis : int, default -1
        The axis whose numbers sum to 1.

    Returns
    -------
    array of the shape of Z
        Weights of at least 0.

    Notes
    -----
    Time and memory O(n) for each row.

    References
    ----------
    Vaswani et al., "Attention is all you need", NeurIPS 2017, equation 1.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> definitions.softmax(np.log([1.0, 3.0])).round(6).tolist()
    [0.25, 0.75]
    """
    E = np.exp(Z - Z.max(axis, keepdims=True))
    return np.asarray(E / E.sum(axis, keepdims=True))


def leverage_scores(K: Float64, ridge: float = 0.0) -> Float64:
    r"""Return the leverage scores :math:`\tau_j = k_j^T (K^T K + \lambda I)^+ k_j` of the keys.

    Without λ this is the largest x²-attention that any query can give to key j,
    :math:`\sup_y \langle k_j, y\rangle^2 / \|K y\|^2`. The scores sum to the rank.

    Parameters
    ----------
    K : array of shape (n, d)
        Keys.
    ridge : float, default 0
        The number λ, at least 0, in the units of K².

    Returns
    -------
    array of shape (n,)
        Scores in [0, 1].

    See Also
    --------
    levattn.leverage_scores : The same for keys of any condition number.

    Notes
    -----
    Time O(n d² + d³). The Gram matrix squares the condition number: above 10⁶ the scores are wrong in float64.

    References
    ----------
    Kannan, Bhattacharyya, Kacham and Woodruff, "LevAttention", arXiv:2410.05462, Theorem 1.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> definitions.leverage_scores(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])).round(6).tolist()
    [0.5, 0.5, 1.0]
    """
    G = K.T @ K + ridge * np.eye(K.shape[1])
    return np.asarray(np.sum(K @ _inverse(G) * K, axis=1))


def effective_dimension(K: Float64, ridge: float) -> float:
    r"""Return :math:`\sum_i \sigma_i^2 / (\sigma_i^2 + \lambda)`: the sum of the leverage scores with λ.

    Parameters
    ----------
    K : array of shape (n, d)
        Keys.
    ridge : float
        The number λ, above 0.

    Returns
    -------
    float
        A number from 0 to the rank.

    See Also
    --------
    levattn.effective_dimension : The same for batches and sparse keys.

    Notes
    -----
    Time O(n d²).

    References
    ----------
    Hastie, Tibshirani and Friedman, "The Elements of Statistical Learning", second edition, equation 3.50.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> round(definitions.effective_dimension(np.diag([1.0, 2.0, 3.0]), ridge=1.0), 6)
    2.2
    """
    squares = np.linalg.svd(K, compute_uv=False) ** 2
    return float(np.sum(squares / (squares + ridge)))


def online_leverage_scores(K: Float64, ridge: float) -> Float64:
    r"""Return :math:`\tau_t = k_t^T (\lambda I + \sum_{s \le t} k_s k_s^T)^{-1} k_t`: of each key among those so far.

    Parameters
    ----------
    K : array of shape (n, d)
        Keys in the order in which they come.
    ridge : float
        The number λ, above 0.

    Returns
    -------
    array of shape (n,)
        Scores in [0, 1).

    See Also
    --------
    levattn.online_leverage_scores : The same in O(n d²).

    Notes
    -----
    Time O(n² d² + n d³).

    References
    ----------
    Cohen, Musco and Pachocki, "Online row sampling", APPROX 2016, Section 2.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> definitions.online_leverage_scores(np.ones((3, 1)), ridge=1.0).round(6).tolist()
    [0.5, 0.333333, 0.25]
    """
    return np.array([leverage_scores(K[: t + 1], ridge)[t] for t in range(len(K))])


def sample_rows(K: Float64, scores: Float64, size: int, seed: int) -> tuple[Int64, Float64]:
    r"""Draw rows with probabilities :math:`p_j = s_j / \sum_l s_l`, and weigh each draw by :math:`1/(m p_j)`.

    Then :math:`\sum w \, k k^T` over the sample has the mean KᵀK.

    Parameters
    ----------
    K : array of shape (n, d)
        Rows.
    scores : array of shape (n,)
        Scores s of at least 0, such as leverage scores; positive for rows that are not zero.
    size : int
        Number m of draws, with replacement.
    seed : int
        Seed of NumPy's generator.

    Returns
    -------
    indices : array of int, shape (m,)
        The rows that were drawn, in order of the draws.
    weights : array of shape (m,)
        The weight of each.

    See Also
    --------
    levattn.sample_rows : The same with each row once, sizes with a proof, and the distortion that was reached.

    Notes
    -----
    Time O(n + m log n).

    References
    ----------
    Drineas, Mahoney and Muthukrishnan, "Sampling algorithms for l2 regression and applications", SODA 2006.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> K = np.array([[3.0], [4.0], [0.0]])
    >>> rows, weights = definitions.sample_rows(K, np.array([9.0, 16.0, 0.0]), 5, seed=0)
    >>> float(round(weights @ K[rows, 0] ** 2, 6))  # scores of the squares leave no chance
    25.0
    """
    p = scores / np.sum(scores)
    rows = np.random.default_rng(seed).choice(len(K), size=size, p=p)
    return rows, 1 / (size * p[rows])


def poisson_sample(scores: Float64, factor: float, uniform: Float64) -> tuple[Int64, Float64]:
    r"""Take row j if :math:`u_j < p_j = \min(1, c \tau_j)`, with the weight :math:`1/p_j`.

    Then :math:`\sum w \, k k^T` over the sample has the mean KᵀK, and its size has the mean
    :math:`\sum p_j \le c \sum \tau_j`.

    Parameters
    ----------
    scores : array of shape (n,)
        Scores τ of at least 0, such as leverage scores; positive for rows that are not zero.
    factor : float
        The number c, above 0.
    uniform : array of shape (n,)
        Independent uniform numbers u in [0, 1), one for each row.

    Returns
    -------
    indices : array of int, shape (s,)
        The rows that were taken, ascending.
    weights : array of shape (s,)
        The weight of each.

    See Also
    --------
    levattn.StreamingRowSample : The same in one pass over a stream, with the scores of all rows.

    Notes
    -----
    Time O(n).

    References
    ----------
    Cohen, Lee, Musco, Musco, Peng and Sidford, "Uniform sampling for matrix approximation", ITCS 2015, Lemma 4.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> definitions.poisson_sample(np.array([0.1, 0.9, 0.5]), 2.0, np.array([0.3, 0.8, 0.7]))
    (array([1, 2]), array([1., 1.]))
    """
    p = np.minimum(1.0, factor * scores)
    rows = np.flatnonzero(uniform < p)
    return rows, 1 / p[rows]


def group_leverage(K: Float64, labels: Int64) -> Float64:
    r"""Return :math:`\lambda_{\max}(K_S (K^T K)^+ K_S^T)` for each group S of keys.

    This is the largest x²-attention that any query can give to the group as a whole.

    Parameters
    ----------
    K : array of shape (n, d)
        Keys.
    labels : array of int, shape (n,)
        The group of each key, from 0.

    Returns
    -------
    array of shape (groups,)
        Scores in [0, 1].

    See Also
    --------
    levattn.group_leverage : The same for keys of any condition number.

    Notes
    -----
    Time O(n d² + d³), and O(m³) for a group of m keys.

    References
    ----------
    Own construction, from the definition of leverage scores.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> K = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    >>> definitions.group_leverage(K, np.array([0, 0, 1])).round(6).tolist()
    [1.0, 1.0]
    """
    H = K @ _inverse(K.T @ K) @ K.T
    groups = [np.flatnonzero(labels == label) for label in range(labels.max() + 1)]
    return np.array([np.linalg.eigvalsh(H[np.ix_(S, S)])[-1] for S in groups])


def lewis_weights(K: Float64, p: float, rounds: int = 100) -> Float64:
    r"""Return the Lewis weights: :math:`w_j` with :math:`w_j = \tau_j(W^{1/2 - 1/p} K)`.

    Parameters
    ----------
    K : array of shape (n, d)
        Keys without rows of zeros.
    p : float
        The power, above 0.
    rounds : int, default 100
        Rounds of the iteration. Its error falls by the factor 1 − p/2 in each for p < 2, and 1 − 2/p for p > 2.

    Returns
    -------
    array of shape (n,)
        Weights in [0, 1], which sum to the rank.

    See Also
    --------
    levattn.lewis_weights : The same after a few rounds, for all p.

    Notes
    -----
    Time O(n d²) for each round.

    References
    ----------
    Cohen and Peng, "L_p row sampling by Lewis weights", STOC 2015, Section 3, for p < 2. Cohen, Cousins, Lee and Yang,
    "A near-optimal algorithm for approximating the John ellipsoid", COLT 2019, for p > 2.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> definitions.lewis_weights(np.array([[1.0], [3.0]]), p=1).round(6).tolist()
    [0.25, 0.75]
    """
    w = np.ones(len(K))
    for _ in range(rounds):
        G = K.T @ (w[:, None] ** (1 - 2 / p) * K)
        h = np.sum(K @ _inverse(G) * K, axis=1)
        w = h ** (p / 2) if p < 2 else w ** (1 - 2 / p) * h
    return w


def attention_scores(Q: Float64, K: Float64, f: _Function | None = np.square) -> Float64:
    r"""Return the attention :math:`A_{ij} = f(\langle q_i, k_j\rangle) / \sum_l f(\langle q_i, k_l\rangle)`.

    Parameters
    ----------
    Q : array of shape (m, d)
        Queries.
    K : array of shape (n, d)
        Keys.
    f : function or None, default numpy.square
        The attention function, e.g. ``levattn.Huber(1.0)``. None for softmax.

    Returns
    -------
    array of shape (m, n)
        Scores in [0, 1]. A row is 0 where f is 0 for all keys.

    Notes
    -----
    Time O(m n d), memory O(m n).

    References
    ----------
    Kannan, Bhattacharyya, Kacham and Woodruff, "LevAttention", arXiv:2410.05462, for attention with f.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> definitions.attention_scores(np.array([[1.0]]), np.array([[1.0], [3.0]])).tolist()
    [[0.1, 0.9]]
    """
    Z = Q @ K.T
    if f is None:
        return softmax(Z)
    F = f(Z)
    total = F.sum(axis=1, keepdims=True)
    return np.asarray(F / np.where(total > 0, total, 1))


def sensitivities(K: Float64, Q: Float64, f: _Function | None = np.square) -> Float64:
    r"""Return :math:`\max_i A_{ij}`, the largest attention that one of these queries gives to each key.

    The f-sensitivity :math:`\sigma_j = \sup_y f(\langle k_j, y\rangle) / \sum_l f(\langle k_l, y\rangle)` is the
    supremum over all queries, so this is a lower bound on it. For x² it is the leverage score, which the queries
    ``K @ numpy.linalg.pinv(K.T @ K)`` attain.

    Parameters
    ----------
    K : array of shape (n, d)
        Keys.
    Q : array of shape (m, d)
        Queries.
    f : function or None, default numpy.square
        The attention function; None for softmax.

    Returns
    -------
    array of shape (n,)
        Scores in [0, 1].

    See Also
    --------
    levattn.exact_sensitivities : The supremum over all queries, with a certificate.
    levattn.sensitivities : Upper bounds.

    Notes
    -----
    Time O(m n d), memory O(m n).

    References
    ----------
    Kannan, Bhattacharyya, Kacham and Woodruff, "LevAttention", arXiv:2410.05462, for attention with f.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> K = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    >>> worst = K @ np.linalg.pinv(K.T @ K)
    >>> definitions.sensitivities(K, worst).round(6).tolist()
    [0.5, 0.5, 1.0]
    """
    return np.asarray(attention_scores(Q, K, f).max(axis=0))


def universal_set(K: Float64, epsilon: float) -> Int64:
    r"""Return the universal set :math:`U = \{j : \tau_j \ge \varepsilon\}` for x².

    Every key that some query gives an x²-attention of at least ε is in U, which has at most rank(K)/ε keys.

    Parameters
    ----------
    K : array of shape (n, d)
        Keys.
    epsilon : float in (0, 1]
        The threshold ε.

    Returns
    -------
    array of int, shape (size,)
        The numbers of the keys, ascending.

    See Also
    --------
    levattn.universal_set : The same for keys of any condition number, and for other functions.

    Notes
    -----
    Time O(n d² + d³).

    References
    ----------
    Kannan, Bhattacharyya, Kacham and Woodruff, "LevAttention", arXiv:2410.05462, Theorem 1.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> definitions.universal_set(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]]), 0.6).tolist()
    [2]
    """
    return np.flatnonzero(leverage_scores(K) >= epsilon)


def heavy_attention(
    Q: Float64, K: Float64, epsilon: float, f: _Function | None = np.square
) -> tuple[Int64, Int64, Float64]:
    r"""Return all queries i and keys j with :math:`A_{ij} \ge \varepsilon`, and these scores.

    Parameters
    ----------
    Q : array of shape (m, d)
        Queries.
    K : array of shape (n, d)
        Keys.
    epsilon : float in (0, 1]
        The threshold ε.
    f : function or None, default numpy.square
        The attention function; None for softmax.

    Returns
    -------
    (array of int, array of int, array of float)
        Queries, keys and scores, each of shape (count,), in the order of rows.

    See Also
    --------
    levattn.heavy_attention : The same without the m × n scores.

    Notes
    -----
    Time O(m n d), memory O(m n).

    References
    ----------
    Kannan, Bhattacharyya, Kacham and Woodruff, "LevAttention", arXiv:2410.05462, Theorem 1.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> queries, keys, scores = definitions.heavy_attention(np.ones((1, 1)), np.array([[1.0], [3.0]]), 0.5)
    >>> queries.tolist(), keys.tolist(), scores.tolist()
    ([0], [1], [0.9])
    """
    A = attention_scores(Q, K, f)
    queries, keys = np.nonzero(epsilon <= A)
    return queries, keys, A[queries, keys]


def expected_scores(K: Float64, Q: Float64, f: _Function | None = np.square) -> Float64:
    r"""Return :math:`\frac1m \sum_i A_{ij}`, the mean attention that these queries give to each key.

    Parameters
    ----------
    K : array of shape (n, d)
        Keys.
    Q : array of shape (m, d)
        A sample of the queries.
    f : function or None, default numpy.square
        The attention function; None for softmax.

    Returns
    -------
    array of shape (n,)
        Scores that sum to 1, or to the share of the queries that attend to any key.

    See Also
    --------
    levattn.expected_scores : The same, and for normal queries of which only the moments are known.

    Notes
    -----
    Time O(m n d), memory O(m n).

    References
    ----------
    Devoto, Jeblick and Jégou, "Expected Attention", arXiv:2510.00636.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> definitions.expected_scores(np.array([[1.0], [3.0]]), np.array([[1.0], [-2.0]])).tolist()
    [0.1, 0.9]
    """
    return np.asarray(attention_scores(Q, K, f).mean(axis=0))


def covering_set(
    K: Float64, Q: Float64, others: Float64, epsilon: float, coverage: float, f: _Function | None = np.square
) -> Int64:
    r"""Return a set that holds all scores of at least ε of a new query, with a probability of at least `coverage`.

    The expected scores of Q order the keys. Each of the other queries needs a prefix of this order: up to the last key
    that it gives ε. The set is the prefix whose length is the conformal quantile of these lengths, the
    ⌈coverage · (m + 1)⌉-th smallest of the m.

    Parameters
    ----------
    K : array of shape (n, d)
        Keys.
    Q : array of shape (·, d)
        Queries that order the keys.
    others : array of shape (m, d)
        Further queries, exchangeable with a new one. m is at least coverage/(1 − coverage).
    epsilon : float in (0, 1]
        The threshold ε.
    coverage : float in (0, 1)
        The probability, over the draw of `others` and of the new query.
    f : function or None, default numpy.square
        The attention function; None for softmax.

    Returns
    -------
    array of int, shape (size,)
        The numbers of the keys, ascending.

    See Also
    --------
    levattn.covering_set : The same for batches, masks and other wishes; the two halves are drawn from one sample.

    Notes
    -----
    Time O(m n d), memory O(m n).

    References
    ----------
    Lei, G'Sell, Rinaldo, Tibshirani and Wasserman, "Distribution-free predictive inference for regression", JASA 113,
    2018, Theorem 2.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> Q = np.ones((9, 1))
    >>> definitions.covering_set(np.array([[1.0], [3.0]]), Q, Q, 0.5, coverage=0.9).tolist()
    [1]
    """
    order = np.argsort(-expected_scores(K, Q, f), kind="stable")
    heavy = attention_scores(others, K, f)[:, order] >= epsilon
    needed = np.where(heavy, 1 + np.arange(len(K)), 0).max(axis=1)
    place = math.ceil(round(coverage * (len(others) + 1), 9))  # 0.55 · 20 is 11, and not more by a rounding
    length = np.sort(needed)[place - 1]
    return np.sort(order[:length])


def pruned_attention(Q: Float64, K: Float64, V: Float64, kept: Int64, labels: Int64) -> Float64:
    r"""Return softmax attention to the kept keys, and to a summary of each cluster of the others.

    A summary of m keys has their mean key, their mean value, and the logarithm of m added to its logit. So its weight
    is at most the sum of the weights of its members, by Jensen's inequality.

    Parameters
    ----------
    Q : array of shape (m, d)
        Queries.
    K : array of shape (n, d)
        Keys.
    V : array of shape (n, D)
        Values.
    kept : array of int, shape (k,)
        The numbers of the keys that are attended exactly.
    labels : array of int, shape (n,)
        The cluster of each key; of kept keys it is not used.

    Returns
    -------
    array of shape (m, D)
        The outputs.

    See Also
    --------
    levattn.attention.pruned_attention : Chooses keys and clusters, and weights the members of a cluster.

    Notes
    -----
    Time O(n (d + D)) for the slots, and O(d + D) for each query and slot.

    References
    ----------
    Own construction; Kannan et al., "LevAttention", arXiv:2410.05462, drop the other keys.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> K, V = np.zeros((4, 2)), np.arange(4.0)[:, None]
    >>> definitions.pruned_attention(np.ones((1, 2)), K, V, np.array([0]), np.array([0, 0, 0, 0])).round(6).tolist()
    [[1.5]]
    """
    others = np.setdiff1d(np.arange(len(K)), kept)
    slots = [[j] for j in kept] + [others[labels[others] == label] for label in np.unique(labels[others])]
    keys, values = (np.array([X[slot].mean(axis=0) for slot in slots]) for X in (K, V))
    logits = Q @ keys.T / math.sqrt(K.shape[1]) + np.log([len(slot) for slot in slots])
    return np.asarray(softmax(logits) @ values)


def fit_slots(
    Q: Float64, K: Float64, V: Float64, size: int, sinks: int, window: int, weights: Float64
) -> tuple[Int64, Float64, Float64]:
    r"""Return slots, their log-weights and values, fitted to the attention P of queries and to their outputs P V.

    With F the columns of P at the slots, the log-weights are :math:`\log B` for the B in :math:`[e^{-3}, e^3]` that
    minimizes :math:`\sum_i w_i (\sum_s F_{is} B_s - 1)^2 + \mu \|B - 1\|^2`. The values are a ridge regression toward
    the slots' own values. Each stays in the ball that holds the values of all keys.

    Parameters
    ----------
    Q : array of shape (m, d)
        Queries.
    K : array of shape (n, d)
        Keys.
    V : array of shape (n, D)
        Values.
    size : int
        Number of keys with the largest :math:`\max_i w_i P_{ij}^2`.
    sinks : int
        Number of first keys.
    window : int
        Number of last keys; the three are fewer than n together.
    weights : array of shape (m,)
        The weights w of the queries.

    Returns
    -------
    array of int64, shape (s,)
        The places of the slots' keys, ascending.
    array of shape (s,)
        Log-weights.
    array of shape (s, D)
        Values.

    See Also
    --------
    levattn.attention.fit_slots : The same for batches, masks and grouped heads, with residuals.

    Notes
    -----
    Time O(m n (d + D) + (m + s) s²) for each set of variables that the solver of the bounds tries.

    References
    ----------
    Zweiger, Fu, Guo and Kim, "Fast KV Compaction via Attention Matching", arXiv:2602.16284, without ridge toward the
    original values, ball and bounds.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> K, V = np.zeros((4, 1)), np.arange(4.0)[:, None]  # two slots for four equal keys: twice the weight
    >>> places, log_weights, C = definitions.fit_slots(np.ones((9, 1)), K, V, 0, 1, 1, np.ones(9))
    >>> places.tolist(), np.exp(log_weights).round(2).tolist(), C.round(2).tolist()
    ([0, 3], [2.0, 2.0], [[0.0], [3.0]])
    """
    from scipy.optimize import lsq_linear

    P, n, w = softmax(Q @ K.T / math.sqrt(K.shape[1])), len(K), np.sqrt(weights)[:, None]
    order = np.argsort(-(w * P).max(axis=0)[sinks : n - window], kind="stable")
    places = np.sort(np.concatenate([np.arange(sinks), sinks + order[:size], np.arange(n - window, n)]))
    F, s = w * P[:, places], len(places)
    root = math.sqrt(1e-2 * np.mean((F**2).sum(axis=0))) * np.eye(s)
    rows, target = np.vstack([F, root]), np.concatenate([w[:, 0], root.sum(axis=1)])
    B = lsq_linear(rows, target, (math.exp(-3), math.exp(3)), method="bvls", tol=1e-15).x
    X = w * softmax(Q @ K[places].T / math.sqrt(K.shape[1]) + np.log(B))
    ridge = np.full(s, 3e-3 * np.mean((X**2).sum(axis=0)))
    middle = (V.min(axis=0) + V.max(axis=0)) / 2
    radius = np.linalg.norm(V - middle, axis=1).max() or 1.0  # equal values stay as they are
    for raised in range(5):
        C = V[places] + np.linalg.solve(X.T @ X + np.diag(ridge), X.T @ (w * (P @ V) - X @ V[places]))
        far = np.linalg.norm(C - middle, axis=1) / radius
        ridge *= np.where((far > 1) & (raised < 4), 10.0, 1.0)
    return places, np.log(B), np.asarray(middle + (C - middle) / np.maximum(far, 1)[:, None])


def latte(q_logits: Float64, k_logits: Float64, V: Float64, causal: bool) -> Float64:
    r"""Return latent attention :math:`y_t = \sum_l p(l|t) \sum_s p(s|l, t) v_s`.

    :math:`p(l|t)` is the softmax of row t of `q_logits` over the latents, and :math:`p(s|l,t)` that of `k_logits` over
    the positions, up to t if causal.

    Parameters
    ----------
    q_logits : array of shape (T, L)
        Logits of the latents for each row.
    k_logits : array of shape (T, L)
        Logits of the positions for each latent.
    V : array of shape (T, D)
        Values.
    causal : bool
        Whether row t sees positions up to t only.

    Returns
    -------
    array of shape (T, D)
        The outputs.

    See Also
    --------
    levattn.attention.latte : The same in O(T L D).

    Notes
    -----
    Time O(T² L D).

    References
    ----------
    Dolga, Maystre, Cobzarenco and Barber, "Latte: Latent Attention for Linear Time Transformers", arXiv:2402.17512,
    section 3, equations of the bidirectional and the causal model.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> logits = np.zeros((3, 2))
    >>> definitions.latte(logits, logits, np.array([[0.0], [1.0], [2.0]]), causal=True).tolist()
    [[0.0], [0.5], [1.0]]
    """
    T = len(V)
    rows = []
    for t in range(T):
        seen = slice(0, t + 1 if causal else T)
        rows.append(softmax(q_logits[t]) @ softmax(k_logits[seen], axis=0).T @ V[seen])
    return np.array(rows)


def tssa(W: Float64, temperature: Float64, c: float = 1.0) -> Float64:
    r"""Return token statistics attention, :math:`y_{kt} = -c\, \Pi_{kt} w_{kt} / (1 + c\, m_k)`, of all tokens.

    :math:`m_k` is the mean of :math:`w_{kt}^2` over the tokens, weighted by :math:`\Pi_{kt}`. These memberships are
    the softmax over the heads of the temperatures times the diagonal leverage scores.

    Parameters
    ----------
    W : array of shape (h, T, d)
        Projected tokens of h heads.
    temperature : array of shape (h,)
        The temperatures.
    c : float, default 1
        The constant c.

    Returns
    -------
    array of shape (h, T, d)
        The outputs of the heads.

    See Also
    --------
    levattn.attention.tssa : Fast, also causal, with other memberships, decay and states.

    Notes
    -----
    Time and memory O(h T d).

    References
    ----------
    Wu et al., "Token Statistics Transformer", arXiv:2412.17810, section 3 and Algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> definitions.tssa(np.ones((1, 2, 1)), np.ones(1)).tolist()
    [[[-0.5], [-0.5]]]
    """
    leverage = (W**2 / (W**2).sum(axis=1, keepdims=True)).sum(axis=2)
    P = softmax(temperature[:, None] * leverage, axis=0)[:, :, None]
    m = (P * W**2).sum(axis=1, keepdims=True) / P.sum(axis=1, keepdims=True)
    return np.asarray(-c * P * W / (1 + c * m))


def coding_rate(Z: Float64, eps: float) -> float:
    r"""Return the coding rate :math:`\tfrac12 \log\det\bigl(I + \tfrac{d}{n \varepsilon^2} Z^T Z\bigr)`, in nats.

    Parameters
    ----------
    Z : array of shape (n, d)
        Tokens.
    eps : float
        The distortion ε above 0.

    Returns
    -------
    float
        The rate, at least 0.

    See Also
    --------
    levattn.attention.rates.coding_rate : The same for batches, masks and moments.

    Notes
    -----
    Time O(n d² + d³).

    References
    ----------
    Ma, Derksen, Hong and Wright, "Segmentation of multivariate mixed data via lossy data coding and compression",
    TPAMI 29, 2007, Section 3.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn import definitions
    >>> round(definitions.coding_rate(np.ones((4, 1)), eps=1.0), 6)
    0.346574
    """
    n, d = Z.shape
    return float(np.linalg.slogdet(np.eye(d) + d / (n * eps**2) * Z.T @ Z)[1] / 2)
