"""Heavy attention: the large scores of given queries, by routes for each function and method."""

from __future__ import annotations

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
    to_numpy,
)
from levattn._core.random import as_seed
from levattn._kernels import Float64, Rows
from levattn.exceptions import NonFiniteError
from levattn.functions import AttentionFunction, Power, Softmax, as_function, is_square
from levattn.heavy.entries import csr_of, entries_of, heavy_places, normalizers_of, of_other_function
from levattn.heavy.normalizers import PRODUCT_ERROR, PreciseSums, even_queries, even_rows, flushed
from levattn.heavy.recovery import estimated_normalizers, recovered_entries, recovery_size
from levattn.heavy.result import Causal, Figures, HeavyAttention, Products, Stored
from levattn.linalg.factor import UNIT
from levattn.sensitivity.approximate import FAILURE
from levattn.sensitivity.leverage import TIE, check_epsilon, refuse_randomness
from levattn.sensitivity.sums import BLOCK_ENTRIES
from levattn.sets.result import UniversalSet, require_set_of
from levattn.sets.universal import universal_set
from levattn.sketch import jl_size

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["heavy_attention"]


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
        return of_other_function(Q64, selected, keys, universal, epsilon, function)
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
        D, error, shift = normalizers_of(even, N, exponents, universal, keys)
    products = _prepared(universal, even, selected, D, error, flushed(Q64, even), epsilon, (stored, exponents, shift))
    found: Any
    others = None
    if method == "countsketch":
        sizes = _sketch_size(sketch_size, 2, recovery_size(len(Q64), epsilon, len(selected)))
        found, captured = _recovered(products, indices, keys.n, epsilon, sizes, as_seed(rng))
    else:
        found, others, captured = entries_of(products, indices, keys.n, epsilon)
    with np.errstate(over="ignore"):
        normalizers = xp.ldexp(D, 2 * (powers + shift))
    residual = xp.where(D > 0, 1 - captured, 0.0)
    return HeavyAttention(
        universal=universal,
        _products=products,
        _figures=Figures(keys.n, normalizers, captured, residual, products.error, found, others),
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
    products: Products, indices: npt.NDArray[np.int64], n: int, epsilon: float, sizes: tuple[int, ...], seed: int
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
        i, j, heavy = heavy_places(some, epsilon, products.error[part])
        found.append((part[i], indices[j], heavy))
    return csr_of(found, (len(D), n)), np.clip(captured, 0.0, 1.0)


def _prepared(
    universal: UniversalSet, Q: Any, keys: Any, D: Any, error: Any, lost: Any, epsilon: float, stored: Stored
) -> Products:
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
    return Products(universal, Power(2.0), Q, keys, D, doubtful | lost, error, epsilon, stored)


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
    causal = Causal(queries, rows, epsilon)
    D, captured, error = np.zeros(keys.n), np.zeros(keys.n), np.zeros(keys.n)
    live = np.zeros(keys.n, np.bool_)
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
    residual, entries = np.where(live, 1 - captured, 0.0), csr_of(found, (keys.n, keys.n))
    return HeavyAttention(
        universal=None,
        _products=causal,
        _figures=Figures(keys.n, D, captured, residual, error, entries),
        alive=np.array(alive, np.int64),
    )


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
