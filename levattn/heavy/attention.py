"""Heavy attention: the large scores of given queries, with a route for each function and method."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np

from levattn._core.arrays import Matrices, array_namespace, as_matrices, float64_beside, take_rows, to_numpy
from levattn._core.checks import TIE, check_epsilon
from levattn._core.device import where_arrays_are
from levattn._kernels import KEYS
from levattn.exceptions import NonFiniteError
from levattn.functions import AttentionFunction, Softmax, as_function, is_square
from levattn.heavy.causal import Causal
from levattn.heavy.entries import csr_of, heavy_places, of_other_function
from levattn.heavy.normalizers import require_finite_queries
from levattn.heavy.result import Figures, HeavyAttention, HeavyAttentionBatch, keys_of_heads
from levattn.heavy.squares import HEAVY_NAMES, HEAVY_SKETCHES, HeavyMethod, of_squares
from levattn.sets.result import UniversalSet, check_universal, item_of, require_set_of
from levattn.sets.universal import set_of
from levattn.states.blocks import matrices_in_memory

_Found = HeavyAttention | HeavyAttentionBatch


@where_arrays_are
def heavy_attention(
    Q: Any,
    K: Any,
    /,
    epsilon: float,
    *,
    f: Any = 2,
    universal: UniversalSet | None = None,
    method: HeavyMethod = "auto",
    mask: Any = None,
) -> _Found:
    r"""Find every attention score of at least ε, without forming the attention matrix.

    Let f(x) = x² and :math:`A_{ij} = \langle q_i, k_j\rangle^2 / \sum_l \langle q_i, k_l\rangle^2`. Only keys of the
    universal set can have a score of at least ε, and the normalizer is :math:`\|N q_i\|^2` with
    :math:`N^T N = K^T K`. So a query costs O(d² + \|U\| d), whatever n. The result misses no entry of at least ε, and
    all its values are the values of the full attention.

    Parameters
    ----------
    Q : array of shape (..., m, d)
        Queries. They have the leading axes of K, no leading axes, or the axes of K with a multiple of the last. Then
        each head of keys serves several heads of queries.
    K : array of shape (..., n, d)
        Keys; array types and dtypes as in `leverage_scores`.
    epsilon : float in (0, 1]
        Smallest score that counts as heavy. A score within 1e-9 (relative) of ε, or within four times its error
        (`HeavyAttention.error`) where that is more, counts as at least ε.
    f : float, str, AttentionFunction or Softmax, default 2
        Attention function; a number p is abs(x)^p. For `Softmax` the queries must lie within its radius.
    universal : UniversalSet, optional
        The universal set of the same keys for ε or less, if it is known already. For x² the call then reads the rows
        of K in the set and a sample of the others, or all rows where n < d. Other functions read all rows (Notes).
        A `StreamedSet` does not suffice, because it has no scores of other keys.
        With a set with coverage all returned entries are right, and a query misses none with
        the probability of the set.
    method : {"auto", "countsketch", "jl"} or a sketch
        "auto": exact. Two more are for x². "countsketch": recover entries from CountSketches of the
        keys of the set, and compute the entries that may be heavy. "jl": estimate the normalizers by a projection. The
        names stand for sizes that Notes explain, and the seed 0. R repetitions of B buckets, and k columns, are the
        sketches ``OSNAP(B * R, nonzeros=R, seed=0)`` and ``GaussianJL(k, seed=0)`` of `levattn.sketch`.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part. Do not give it with `universal`, which has its own mask.

    Returns
    -------
    HeavyAttention, or HeavyAttentionBatch where Q or K has leading axes
        The heavy entries as a sparse matrix, with normalizers and masses. A batch has one for each head of queries.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong. Also if `universal` does not cover ε, has the guarantee "none" or an approximate
        factor, or belongs to other keys. (The check compares shape and dtype, and the leverage scores of its keys and
        of a sample of the others.)
    NonFiniteError
        If queries or keys hold NaN or infinity.

    See Also
    --------
    causal_heavy_attention : The scores where each query attends to the keys up to its own.
    universal_set : The keys that can be heavy for any query.
    levattn.definitions.heavy_attention : The definition, in NumPy.

    Notes
    -----
    Preparation O(n d²); then O(m (d² + \|U\| d)) with \|U\| ≤ rank/ε. Memory O(m d + n + \|U\| d) and the output. With
    n < d the preparation takes O(n² d), and a normalizer is a sum over the keys, O(n d). The set holds their copy.
    Squares neither overflow nor vanish. A query may be so nearly orthogonal to the keys that float64 would lose
    digits. Its sums are then computed as if in twice the precision, at about ten times the cost. If the keys are
    rank-deficient as well, the sums run over all keys, O(n d). A query orthogonal to the keys up to rounding has a row
    of zeros.

    For other functions the normalizer of a query is a sum over all keys, O(n d). The sum is repeated once or twice
    where rounding of the products could change it. For an even power p > 2, D = C(d + p/2 − 1, p/2) lifted moments
    give it in O(D²) if that is less. This needs a lift among the certificates of the set (by default up to D = 1024).

    "countsketch" has 32/ε buckets, or 8 \|U\| if these are fewer, and 2.42 ln(1e6 m/ε) repetitions. It misses an entry
    with a probability of at most 1e-6 in all, and its entries are exact. "jl" has ``jl_size(m, 0.5, 1e-6)`` columns.
    It misses none. Its normalizers and scores err by at most `HeavyAttention.distortion`, except with a probability of
    1e-6. The probabilities are for each head. The exact route was faster than both at all sizes tried.

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
    queries, keys = _checked(Q, K)
    if not isinstance(method, HEAVY_SKETCHES) and not (isinstance(method, str) and method in HEAVY_NAMES):
        raise ValueError(
            f"method is {method!r}; expected 'auto', 'countsketch' or 'jl', or a sketch: OSNAP(buckets * repetitions, "
            "nonzeros=repetitions) or GaussianJL(columns)"
        )
    if method != "auto" and not is_square(function):
        raise ValueError(f"method is {method!r}; expected 'auto' for functions other than x²")
    epsilon = check_epsilon(epsilon)
    sets = _sets_of(universal, keys, epsilon, function, mask)
    return _of_heads(queries, keys, partial(_by_set, keys, sets, function, epsilon, method))


@where_arrays_are
def causal_heavy_attention(Q: Any, K: Any, /, epsilon: float, *, mask: Any = None) -> _Found:
    r"""Find every attention score of at least ε where query t attends to the keys up to t alone, for f(x) = x².

    The scores are :math:`A_{tj} = \langle q_t, k_j\rangle^2 / \sum_{l \le t} \langle q_t, k_l\rangle^2` for j ≤ t. The
    set of keys that can be heavy changes from row to row. A key is kept while its leverage score among the keys so far
    is at least ε; this score never rises again. So no entry is missed.

    Parameters
    ----------
    Q : array of shape (..., n, d)
        Queries, with leading axes as in `heavy_attention`.
    K : array of shape (..., n, d)
        Keys, as many as queries; array types and dtypes as in `leverage_scores`.
    epsilon : float in (0, 1]
        Smallest score that counts as heavy, as in `heavy_attention`.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part.

    Returns
    -------
    HeavyAttention, or HeavyAttentionBatch where Q or K has leading axes
        The heavy entries as a sparse matrix (n, n), with normalizers and masses. A batch has one for each head of
        queries.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, or Q and K have different numbers of rows.
    NonFiniteError
        If queries or keys hold NaN or infinity.

    See Also
    --------
    heavy_attention : The scores where each query attends to all keys.
    CausalUniversalSet : The same while keys are appended.
    levattn.definitions.heavy_attention : The definition for one query, whose keys are those up to its own.

    Notes
    -----
    Time O(n d²/ε), besides the products within chunks of 256 rows. At most rank/ε keys are kept, or more where the
    moments of a prefix are too ill-conditioned to decide (`HeavyAttention.alive`). The results of a row do not depend
    on later rows, to the last bit. Keys on another device are moved to main memory.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462): universal sets (Theorem 1).

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.eye(3)[[0, 1, 0, 0]]
    >>> levattn.causal_heavy_attention(K, K, 0.5).entries.toarray()
    array([[1. , 0. , 0. , 0. ],
           [0. , 1. , 0. , 0. ],
           [0.5, 0. , 0.5, 0. ],
           [0. , 0. , 0. , 0. ]])
    """
    epsilon = check_epsilon(epsilon)
    queries, keys = _checked(Q, K)
    if queries.n != keys.n:
        raise ValueError(
            f"Q has {queries.n} rows and K has {keys.n}; expected as many queries as keys for causal attention"
        )
    return _of_heads(queries, keys, partial(_causal_attention, keys.masked(mask), epsilon))


def _checked(Q: Any, K: Any) -> tuple[Matrices, Matrices]:
    """Return queries and keys that go together."""
    queries, keys = as_matrices(Q, "Q"), as_matrices(K, "K")
    if queries.d != keys.d:
        raise ValueError(f"Q has {queries.d} columns and K has {keys.d}; expected the same number d")
    keys_of_heads(queries.batch, keys.batch)  # raises for leading axes that do not go together
    return queries, keys


def _of_heads(queries: Matrices, keys: Matrices, one: Callable[[Matrices, int], HeavyAttention]) -> _Found:
    """Return the results of `one` for all heads; an error names the head."""
    if not (queries.batch or keys.batch):
        return one(queries, 0)
    heads, batch, found = keys_of_heads(queries.batch, keys.batch), queries.batch or keys.batch, []
    for i, head in enumerate(heads.tolist()):
        try:
            found.append(one(queries.item(i if queries.batch else 0), head))
        except NonFiniteError as error:
            place = tuple(map(int, np.unravel_index(i, batch)))
            raise NonFiniteError(f"at {place} of the batch {batch}: {error}") from None
    return HeavyAttentionBatch(tuple(found), batch, heads, keys.batch)


def _sets_of(
    universal: Any, keys: Matrices, epsilon: float, f: AttentionFunction | Softmax, mask: Any
) -> UniversalSet:
    """Return the universal sets of all heads of keys: new sets, or the given sets after a check."""
    if universal is None:
        return set_of(keys.masked(mask), f, epsilon)
    if mask is not None:
        raise ValueError("mask and universal: both given; expected the mask in universal_set alone")
    _check_universal(keys, universal, epsilon, f)
    return cast(UniversalSet, universal)


def _by_set(
    keys: Matrices, sets: UniversalSet, f: Any, epsilon: float, method: HeavyMethod, queries: Matrices, head: int
) -> HeavyAttention:
    """Return the result of some queries for one head of keys, whose set is known."""
    mine, universal = keys.item(head), item_of(sets, head)
    square = is_square(f)
    # approximate methods and other functions run in main memory
    beside = mine.data if square and method == "auto" else None
    Q64 = float64_beside(queries.data, queries.format, beside)
    xp = array_namespace(Q64)
    require_finite_queries(to_numpy(xp.all(xp.isfinite(Q64), axis=1)))
    selected = float64_beside(take_rows(mine.data, universal.indices), mine.format, Q64)
    if square:
        return of_squares(Q64, selected, mine, universal, epsilon, method)
    return of_other_function(Q64, selected, mine, universal, epsilon, f)


def _causal_attention(keys: Matrices, epsilon: float, queries: Matrices, head: int) -> HeavyAttention:
    """Return the result for one head of keys where each query attends to the keys up to its own."""
    _, queried = matrices_in_memory(queries, "Q")
    _, rows = matrices_in_memory(keys.item(head), "K")
    if not np.isfinite(KEYS.column_figures(rows, largest=True)).all():
        bad = KEYS.nonfinite_rows(rows, 0, 5)
        raise NonFiniteError(f"K holds NaN or infinity, first in rows {bad}; expected finite keys")
    causal, n = Causal(queried, rows, epsilon), rows.shape[1]
    D, captured, error, live = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n, np.bool_)
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    alive = []
    for chunk in causal.chunks():
        part = slice(*chunk.rows)
        D[part], captured[part], live[part] = chunk.normalizers, chunk.captured, chunk.live
        error[part] = chunk.error
        i, j, heavy = heavy_places(chunk.scores, epsilon, chunk.error)
        found.append((chunk.rows[0] + i, chunk.keys[j], heavy))
        alive.append(chunk.alive)
    captured = np.clip(captured, 0.0, 1.0)
    residual = np.where(live, 1 - captured, 0.0)
    return HeavyAttention(
        universal=None,
        _products=causal,
        _figures=Figures(n, D, captured, residual, error, csr_of(found, (n, n))),
        alive=np.array(alive, np.int64),
    )


def _check_universal(keys: Matrices, universal: Any, epsilon: float, f: AttentionFunction | Softmax) -> None:
    check_universal(universal)
    if as_function(universal.f) != f:
        raise ValueError(f"universal is of f = {universal.f!r} and f is {f!r}; expected the set of the same function")
    if universal.guarantee == "none":
        raise ValueError(
            "universal guarantees nothing for attention over K (it was made with center=True); "
            "expected a set with guarantee 'exact', 'superset' or 'coverage'"
        )
    if universal.epsilon is None:
        raise ValueError(
            f"universal was made for a mass of {universal.mass:.6g} and knows no epsilon; "
            "expected a set made with epsilon or size"
        )
    if not universal.exact_factor:
        raise ValueError(
            f"universal is of method {universal.certificate[0]!r} and has no exact normalizers; expected a set of an "
            "exact method, or universal.rechecked(K)"
        )
    require_set_of(keys, universal)
    margins = np.maximum(TIE, 4 * universal.factor.score_error).tolist()
    known = np.broadcast_to(universal.epsilon, universal.batch).ravel().tolist()
    for least, margin in zip(known, margins, strict=True):
        if least > epsilon or (universal.by_size and epsilon <= least * (1 + margin)):
            relation = "more than" if universal.by_size else "at least"
            raise ValueError(
                f"universal holds the scores of {relation} {least:.6g}, but epsilon is {epsilon:.6g}. "
                "Make the set with this epsilon, or give one that is larger than the set's"
            )
