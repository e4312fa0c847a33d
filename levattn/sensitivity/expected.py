"""Expected attention scores: the mean attention that a distribution of queries gives each key."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from levattn._core.arrays import Matrices, as_matrices, as_numbers, take_rows, to_device, to_float64, to_numpy
from levattn._core.checks import whole_number
from levattn._core.device import where_arrays_are
from levattn._core.random import as_seed
from levattn._core.types import Flags, Float64, Int64
from levattn._kernels import Arithmetic, kernels_for
from levattn.exceptions import NonFiniteError
from levattn.functions import AttentionFunction, Softmax, as_function, is_square
from levattn.io import KeySource
from levattn.io.source import whole_keys
from levattn.linalg.accumulator import UNIT
from levattn.linalg.factor import Factor, normalizer_rounding, upper_form
from levattn.sensitivity.leverage import factorize
from levattn.sensitivity.shares import BLOCK_ENTRIES, certain_products, share_blocks
from levattn.states import Moments
from levattn.states.moments import apart_from_last

_ALIKE = 1e-9  # relative error allowed in a symmetric, positive semi-definite covariance, and in a weight
_ROUNDING, _RESOLVED = 2.0**-49, 2.0**-10  # of the mean squares of queries, and of their variance
_FEW = 64  # queries per column up to which they are factored in blocks
Rotary = tuple[Float64, Float64]  # cosines and sines, (h, r) each


@dataclass(frozen=True)
class Queries:
    """The known distribution of the queries of a batch of key matrices.

    Mean and moments are of the queries over 2 to the `powers`, column by column, so that squares are in range.
    """

    sample: Float64 | None  # (b, m, d), None where only moments are known
    mean: Float64 | None  # (b, d), None where it is not known
    second: Float64 | None  # (b, d, d), the mean of q qᵀ; None with a sample, which gives it
    covariance: Float64 | None  # (b, d, d), the same for q − mean
    powers: Int64  # (d,)
    group: int = 1  # heads of queries that share the keys; a sample has the queries of the first head first
    rotary: Rotary | None = None  # rotates each query, later, to one of h positions

    def root(self, item: int) -> Float64:
        """Return L with ``L Lᵀ`` the second moment of the rotated queries; from a sample it has more digits."""
        if self.sample is None or self.rotary is not None:
            return symmetric_root(self.turned_second(item))
        Q = np.ldexp(self.sample[item], -self.powers)
        R = _triangle(Q) / math.sqrt(len(Q))
        sizes = np.linalg.norm(R, axis=0)
        values, V = right_svd(R / np.where(sizes > 0, sizes, 1.0))
        kept = values > Q.shape[1] * 2.0**-52 * values.max(initial=0.0)
        return np.asarray(sizes[:, None] * V[kept].T * values[kept])

    def _moment(self, item: int, known: Float64 | None, center: Any) -> Float64:
        """Return the known moment of one matrix, or the moment of the sample about a center."""
        if known is not None or self.sample is None:
            return np.zeros((0, 0)) if known is None else np.asarray(known[item])
        with np.errstate(under="ignore"):
            apart = np.ldexp(self.sample[item], -self.powers) - center
            return np.asarray(apart.T @ apart / len(apart))

    def turned_second(self, item: int) -> Float64:
        """Return the second moment of the rotated queries, averaged over the positions."""
        C = self._moment(item, self.second, 0.0)
        if self.rotary is None:
            return C
        total = np.zeros_like(C)
        for position in range(len(self.rotary[0])):
            total += _turned(_turned(C, self.rotary, position).T, self.rotary, position)
        return np.asarray(total / len(self.rotary[0]))

    def turned_samples(self, item: int) -> Iterator[Float64]:
        """Yield the sample of one matrix, rotated to each position."""
        if self.sample is not None:
            Q: Float64 = self.sample[item]
            for position in range(self.positions):
                yield Q if self.rotary is None else _turned(Q, self.rotary, position)

    @property
    def positions(self) -> int:
        """Number of positions to which queries are rotated."""
        return 1 if self.rotary is None else len(self.rotary[0])

    def normal_draws(self, item: int, count: int, seed: int) -> Float64:
        """Return `count` normal queries of this mean and covariance, each rotated to a random position."""
        center = 0.0 if self.mean is None else self.mean[item]
        L = symmetric_root(self._moment(item, self.covariance, center))
        rng = np.random.default_rng([seed, 1])  # the same draws for each matrix, as if it came alone
        Q = np.ldexp(center + rng.standard_normal((count, L.shape[1])) @ L.T, self.powers)
        if self.rotary is not None:
            Q = _turned(Q, self.rotary, rng.integers(self.positions, size=count))
        return np.asarray(Q)


def _triangle(Q: Float64) -> Float64:
    """Return R of a QR factorization; block by block for few rows.

    BLAS factors such blocks on one thread, so that its other threads do not spin beside ours.
    """
    d = Q.shape[1]
    step = d if len(Q) <= _FEW * d else len(Q)
    R = np.zeros((0, d))
    for start in range(0, len(Q), step):
        R = np.asarray(np.linalg.qr(np.concatenate([R, Q[start : start + step]]), mode="r"))
    return R


def right_svd(A: Float64) -> tuple[Float64, Float64]:
    """Return singular values, descending, and right singular vectors (k, d), by a one-thread driver of LAPACK."""
    from scipy.linalg import svd

    _, values, V = svd(A, full_matrices=False, lapack_driver="gesvd")
    return values, V


def _turned(Q: Float64, rotary: Rotary, position: Any) -> Float64:
    """Return rows rotated by the rotary embedding: the first r columns in pairs (i, i + r/2)."""
    cosine, sine = rotary[0][position], rotary[1][position]
    r = cosine.shape[-1]
    half = np.concatenate([-Q[:, r // 2 : r], Q[:, : r // 2]], axis=1)
    return np.concatenate([Q[:, :r] * cosine + half * sine, Q[:, r:]], axis=1)


def symmetric_root(C: Float64) -> Float64:
    """Return L (d, r) with ``L Lᵀ = C`` for a positive semi-definite C of rank r; columns of C may differ in size."""
    sizes = np.sqrt(np.maximum(np.diag(C), 0.0))
    c = np.where(sizes > 0, sizes, 1.0)
    values, vectors = np.linalg.eigh(C / c[:, None] / c)
    kept = values > len(C) * 2.0**-50 * values.max(initial=0.0)
    return np.asarray(sizes[:, None] * vectors[:, kept] * np.sqrt(values[kept]))


def as_queries(queries: Any, keys: Matrices, rotary: Any = None) -> Queries:
    """Return the known distribution of the queries of these keys, or raise."""
    if isinstance(queries, Moments):
        found = _of_moments(queries, keys)
    elif isinstance(queries, tuple) and len(queries) == 2 and np.ndim(queries[0]) != np.ndim(queries[1]):
        found = _of_normal(*queries, keys)
    else:
        sample, group = _sample(queries, keys)
        found = replace(of_sample(sample, alike=rotary is not None), group=group)
    return replace(found, rotary=as_rotary(rotary, keys.d))


def of_sample(sample: Float64, *, alike: bool = False) -> Queries:
    """Return the distribution of a sample (b, m, d) of at least one query; if `alike`, all columns have one power."""
    powers = np.frexp(np.abs(sample).max(axis=(0, 1), initial=0.0))[1].astype(np.int64)
    if alike:
        powers = np.full_like(powers, powers.max(initial=0))
    with np.errstate(under="ignore"):
        mean = np.ldexp(sample, -powers).mean(axis=1)
    return Queries(sample, mean, None, None, powers)


def _sample(queries: Any, keys: Matrices) -> tuple[Float64, int]:
    """Return queries as (b, g m, d), with the g heads that share keys one after the other, and g."""
    given = as_matrices(queries, "queries")
    sample = to_float64(given.data, given.format)
    if given.d != keys.d:
        raise ValueError(f"queries have {given.d} columns and K has {keys.d}; expected the same number d")
    if not given.n:
        raise ValueError(f"queries have shape {(*given.batch, 0, given.d)}; expected at least one query")
    if not np.isfinite(sample).all():
        bad = np.argwhere(~np.isfinite(sample).all(axis=2))[:5]
        raise NonFiniteError(f"queries hold NaN or infinity, first at {bad.tolist()}; expected finite numbers")
    group = 1
    if given.batch != keys.batch and given.batch:
        *outer, heads = given.batch
        shared = keys.batch[-1] if keys.batch else 1
        if not shared or tuple(outer) != keys.batch[:-1] or heads % shared:
            raise ValueError(
                f"queries have leading axes {given.batch} and K has {keys.batch}; expected the same, none, or a "
                "multiple of the last (query heads that share keys)"
            )
        group = heads // shared
        sample = sample.reshape(math.prod(keys.batch), group * given.n, keys.d)
    return np.broadcast_to(sample, (math.prod(keys.batch), *sample.shape[1:])), group


def _of_moments(moments: Moments, keys: Matrices) -> Queries:
    """Return the queries of second moments, whose last column may be of ones."""
    if moments.diagonal:
        raise TypeError("queries are Moments with diagonal=True; expected all of the second moment")
    if moments.d - keys.d not in (0, 1):
        raise ValueError(
            f"queries are Moments of d = {moments.d} and K has d = {keys.d}; expected the same number, or one more. "
            "A last column of ones adds the mean"
        )
    moments = moments._snapshot()  # all of one time
    G, weight = to_numpy(moments.result()), to_numpy(moments.weight)
    if not np.isfinite(G).all() or not (weight > 0).all():
        raise ValueError(
            "queries are Moments of no queries, or beyond the range of float64; expected some queries, scaled down"
        )
    G = _for_items(G / weight[..., None, None], 2, moments.batch, keys)
    if moments.d == keys.d:
        return Queries(None, None, G, G, np.zeros(keys.d, np.int64))
    if not np.allclose(G[:, -1, -1], 1.0, rtol=_ALIKE, atol=0):
        raise ValueError(
            f"queries are Moments of d = {moments.d}; expected the last column to be of ones, because K has one less"
        )
    covariance = apart_from_last(moments) / weight.reshape(-1, 1, 1)
    covariance = _for_items(covariance.reshape(*moments.batch, keys.d, keys.d), 2, moments.batch, keys)
    if moments.decay is not None:  # sums in float64: what is left of the squares may be rounding
        variance, squares = (np.diagonal(x, axis1=1, axis2=2) for x in (covariance, G[:, :-1, :-1]))
        rounding = _ROUNDING * squares
        if ((rounding > _RESOLVED * variance) & (variance != 0)).any():
            raise ValueError(
                "queries are Moments that decay, too far from zero for their variance to be known; expected Moments "
                "without decay, or their mean and covariance"
            )
    return Queries(None, G[:, :-1, -1], G[:, :-1, :-1], covariance, np.zeros(keys.d, np.int64))


def _of_normal(mean: Any, covariance: Any, keys: Matrices) -> Queries:
    """Return the queries of a mean (..., d) and a covariance (..., d, d)."""
    found = []
    for name, array, axes in (("mean", mean, 1), ("covariance", covariance, 2)):
        values = as_numbers(f"the queries' {name}", array)
        if values.shape[values.ndim - axes :] != (keys.d,) * axes:
            raise ValueError(
                f"the queries' {name} has shape {values.shape}; expected (..., {', '.join(['d'] * axes)}) with "
                f"d = {keys.d}: a pair of arrays is their mean and covariance"
            )
        if not np.isfinite(values).all():
            raise NonFiniteError(f"the queries' {name} holds NaN or infinity; expected finite numbers")
        found.append(_for_items(values, axes, values.shape[: values.ndim - axes], keys))
    center, C = found
    size = np.abs(C).max(axis=(1, 2), initial=0.0)
    skew = np.abs(C - C.swapaxes(1, 2)).max(axis=(1, 2), initial=0.0)
    if (skew > _ALIKE * size).any() or (np.linalg.eigvalsh(C)[:, 0] < -_ALIKE * keys.d * size).any():
        raise ValueError("the queries' covariance is not symmetric and positive semi-definite; expected one that is")
    with np.errstate(over="ignore"):
        second = C + _squares(center)
    if not np.isfinite(second).all():
        raise ValueError(
            "the queries' mean or covariance has squares beyond the range of float64; expected smaller ones"
        )
    return Queries(None, center, second, C, np.zeros(keys.d, np.int64))


def _squares(center: Float64) -> Float64:
    return np.asarray(center[:, :, None] * center[:, None, :])


def _for_items(array: Float64, axes: int, batch: tuple[int, ...], keys: Matrices) -> Float64:
    """Return an array of the queries with one entry for each key matrix."""
    if batch not in ((), keys.batch):
        raise ValueError(f"queries have leading axes {batch} and K has {keys.batch}; expected the same, or none")
    shape = array.shape[array.ndim - axes :]
    return np.broadcast_to(array.reshape(-1, *shape), (math.prod(keys.batch), *shape))


def as_rotary(rotary: Any, d: int) -> Rotary | None:
    """Return the cosines and sines that rotate queries, or raise."""
    if rotary is None:
        return None
    problem = "expected a pair of arrays (h, r), cosines and sines for h positions, r even and at most d"
    if not isinstance(rotary, tuple | list) or len(rotary) != 2:
        raise TypeError(f"rotary is of type {type(rotary).__name__}; {problem}")
    found = []
    for given in rotary:
        array = as_numbers("rotary", given)
        found.append(array.reshape(-1, array.shape[-1] if array.ndim else 1))
    (h, r), other = found[0].shape, found[1].shape
    if other != (h, r) or not h or r % 2 or not 0 < r <= d:
        raise ValueError(f"rotary has arrays of shapes {(h, r)} and {other}, and d is {d}; {problem}")
    squares = found[0] ** 2 + found[1] ** 2  # all equal: some models scale queries by one number
    if not (squares > 0).all() or not np.allclose(squares, squares[0, 0], rtol=2.0**-6, atol=0):
        raise ValueError(f"rotary holds numbers that are no cosines and sines times one number; {problem}")
    return found[0], found[1]


ExpectedMethod = Literal["auto", "normal", "mean"]
_STEP, _FIRST, _LAST = 0.125, -40.0, 100.0  # of the quadrature, in log t
_SAMPLES = 1024
_CANCELLED = 1e-9  # estimated error of the same from which on products are in twice the precision
_SINGLE_PRODUCTS = 2.0**-23  # largest estimated error, of the norm of all scores' roots, for products in float32


@where_arrays_are
def expected_scores(
    K: Any,
    queries: Any,
    /,
    *,
    f: Any = 2,
    method: ExpectedMethod = "auto",
    rotary: Any = None,
    mask: Any = None,
    samples: int | None = None,
    rng: int | np.random.Generator | None = None,
) -> Any:
    r"""Expected attention scores: the mean attention that queries like the given ones give to each key.

    The score of key :math:`k_j` is

    .. math:: s_j = \mathrm{E}_q[A_j(q)], \qquad A_j(q) = f(\langle q, k_j\rangle) / \sum_l f(\langle q, k_l\rangle),

    where q is drawn from the distribution that `queries` describes. Scores lie in [0, 1]. They sum to 1, or, if some
    queries give f = 0 to all keys, to the share of the queries that attend to any key. Leverage scores hold for every
    possible query; expected scores are for the queries of this distribution.

    **Guarantee.** Under the assumed distribution the score is exact ("normal" for x²) or the exact mean over the
    sample ("mean"), up to 1e-9. Products of a sample and the keys that cancel in float64 are computed in twice the
    precision. Where they are so small that Huber, Tukey, L1L2 or Fair of them vanish in float64, it is x²/2 that
    counts. Logits of softmax are rounded, so its scores also err by 2⁻⁵¹ of the largest logit. "normal" for other
    functions gives a mean over draws with a standard error of at most
    :math:`\tfrac12 / \sqrt{\mathtt{samples}}`, which may err either way. The guarantee does not cover other queries.
    By Markov's inequality, at most a share :math:`s_j / \varepsilon` of the queries gives key j as much as ε. So for
    any δ the set :math:`\{j : s_j \ge \delta\varepsilon\}` has at most :math:`1/(\delta\varepsilon)` keys, whatever d
    and n. A key outside it gets ε from at most a share δ of the queries.

    Parameters
    ----------
    K : array of shape (..., n, d)
        Keys as in `leverage_scores` (sparse keys for x² by "normal" only), or files opened with `open_keys`, which are
        loaded.
    queries : array of shape (..., m, d), Moments, or (mean, covariance)
        The known distribution of the queries. A sample of queries, without padding; for softmax times the scale of the
        logits (q/√d in most models). The leading axes of a sample are the axes of K, none, or a multiple of the last
        (heads of queries that share keys). Or their second moments, which `levattn.states.Moments` sums over chunks
        and workers: moments of q for x². Other functions need the mean, so they need moments of q with a last column
        of ones. Or their mean (..., d) and covariance (..., d, d).
    f : float, str, AttentionFunction or Softmax, default 2
        Attention function; a number p is abs(x)^p. `Softmax` needs no radius here.
    method : {"auto", "normal", "mean"}
        "normal": the queries are normal. For x² they have mean zero and the given second moment, which includes their
        mean. "mean": the plain mean over the given queries. "auto": "normal" for x² and where there is no sample, else
        "mean".
    rotary : (array of shape (h, r), array of shape (h, r)), optional
        Cosines and sines of a rotary embedding at h positions of later queries, as ``model.model.rotary_emb`` of
        transformers returns them. They include the common factor, if the model has one. (Entries i and i + r/2 are a
        pair; columns from r on are not rotated.) Give the queries before the embedding: each counts at every position.
        The sample is rotated to all positions, and a draw to a random one. For x² by "normal" the second moment is
        averaged over the positions.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part. The others have the score 0 and their values are not read.
    samples : int, optional
        Number of normal queries to draw for functions other than x², 1024 if left out. A ValueError where no queries
        are drawn.
    rng : int or numpy.random.Generator, optional
        Seed of these draws, 0 if left out.

    Returns
    -------
    array of shape (..., n)
        Scores in the caller's kind of array, on its device: float64 for float64 keys, else float32.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, or `queries` lacks the sample or the mean that the method needs.
    NonFiniteError
        If keys or queries hold NaN or infinity outside the mask.

    See Also
    --------
    leverage_scores : The largest attention that any query can give.
    covering_set : The keys that hold the large scores of new queries with a given coverage.
    levattn.definitions.expected_scores : The definition, in NumPy.

    Notes
    -----
    *x², "normal".* With :math:`L L^T` the second moment of the queries and :math:`L^T K^T K L = U \Lambda U^T`,

    .. math:: s_j = \sum_i w_i (U^T L^T k_j)_i^2, \qquad
        w_i = \int_0^\infty \frac{dt}{(1 + 2 t \lambda_i) \prod_l (1 + 2 t \lambda_l)^{1/2}},

    by the trapezoidal rule in log t, whose relative error is below 1e-10. Time O(n d²) and memory O(n + d²), as for
    leverage scores; with float32 keys errors are below 1e-6 of the largest score. The scale of K and of the queries
    changes nothing. For whitened queries (their second moment is the inverse of KᵀK) the scores are the leverage
    scores divided by the rank. A singular second moment is handled in its row space. Queries orthogonal to all keys
    give scores of 0. If more than some seven digits cancel in products of a sample and the keys, all products are
    computed. So they are for keys of very different lengths, whose normalizer loses digits. This takes time
    O(n m (d + m)) and memory O(m²). Moments, and a sample with `rotary`, have d rows of a rounded root in place of m
    queries. Moments of queries with condition number κ lose κ² units of rounding. Beyond 10⁷ they do not resolve the
    small directions of the queries. Moments that decay are sums in float64. They are refused where their rounding may
    reach a thousandth of the variance of the queries.

    *Otherwise* time O(m n d) for m queries (or draws), twice, in float64. A sample at h positions takes h times as
    long. Memory O(n + m d) and 32 MiB.

    The queries of one text are not a sample of the queries of another. Scores measured on one text say nothing about
    the other, unless the queries are exchangeable. Queries of a causal decoder rotate with their position (`rotary`)
    and change with the text.

    References
    ----------
    Devoto, Jeblick and Jégou, "Expected Attention", arXiv:2510.00636, for the softmax of normal queries. The
    quadrature for x² is ours, with :math:`1/x = \int_0^\infty e^{-tx} dt` as in Magnus, "The exact moments of a ratio
    of quadratic forms in normal variables", Annales d'Économie et de Statistique 4, 1986.

    Examples
    --------
    Queries along the first axis only:

    >>> import numpy as np, levattn
    >>> K = np.array([[1.0, 0], [3, 0], [0, 5]])
    >>> levattn.expected_scores(K, np.array([[1.0, 0.0], [2.0, 0.0]])).round(6)
    array([0.1, 0.9, 0. ])
    """
    if isinstance(K, KeySource):
        with whole_keys(K) as keys:
            return expected_scores(
                keys, queries, f=f, method=method, rotary=rotary, mask=mask, samples=samples, rng=rng
            )
    function = as_function(f)
    if method not in get_args(ExpectedMethod):
        raise ValueError(f"method is {method!r}; expected 'auto', 'normal' or 'mean'")
    square = is_square(function)
    matrices = as_matrices(K, "K", sparse=square and method != "mean").masked(mask)
    known = as_queries(queries, matrices, rotary)
    if method == "auto":
        method = "normal" if square or known.sample is None else "mean"
    draws = method == "normal" and not square
    if not draws and (samples is not None or rng is not None):
        raise ValueError("samples or rng is given, but no queries are drawn; leave them out")
    if square and method == "normal":
        return matrices.wrap(_of_squares(matrices, known))
    require_sample(known, function, draws=draws)
    count = _SAMPLES if samples is None else whole_number("samples", samples)
    seed, present = as_seed(rng), matrices.present
    out = np.zeros(present.shape)
    for item in range(len(out)):
        parts = (known.normal_draws(item, count, seed),) if draws else known.turned_samples(item)
        for Q in parts:
            out[item] += mean_shares(Q, matrices.item(item), present[item], function)
    out /= 1 if draws else known.positions
    kind = np.float64 if matrices.format == "float64" else np.float32
    return matrices.wrap(to_device(out.astype(kind), matrices.data))


def require_sample(known: Queries, f: AttentionFunction | Softmax, *, draws: bool) -> None:
    """Raise if a sample is missing where no queries are drawn, or the mean is unknown."""
    if not draws and known.sample is None:
        raise ValueError("queries are moments; expected a sample of queries for their plain mean, or method='normal'")
    if known.mean is None:
        raise ValueError(
            f"queries are second moments without a mean, which f = {f!r} needs. "
            "Give a sample, their mean and covariance, or Moments of the queries with a last column of ones"
        )


def mean_shares(
    Q: Any,
    keys: Matrices,
    present: Flags,
    f: AttentionFunction | Softmax,
    epsilon: float | None = None,
    elsewhere: Float64 | None = None,
) -> Float64:
    """Return the mean attention of each key of one matrix, (n,), over queries (m, d).

    With ε it is the mean of ``min(A/ε, 1)⁴``, which measures how often and how nearly a key gets ε.
    """
    total = np.zeros(keys.n)
    level = 1.0 if epsilon is None else epsilon
    for _, places, A, _ in share_blocks(
        Q, keys, present, f, elsewhere=elsewhere, level=level, together=epsilon is None
    ):
        if epsilon is not None:
            A /= epsilon
            np.minimum(A, 1.0, out=A)
            np.square(np.square(A, out=A), out=A)
        total[places] += A.sum(axis=0)
    return total / max(len(Q), 1)


def _of_squares(matrices: Matrices, known: Queries) -> Any:
    """Return the scores of x² for centered normal queries, (b, n)."""
    factor = factorize(matrices, method="auto")
    rows, out = factor.all_columns, factor.all_columns.zeros()
    kernels = kernels_for("gram", rows.keys)
    b, d = int(matrices.data.shape[0]), matrices.d
    W = np.zeros((b, d, d))
    arithmetic: list[Arithmetic] = []
    again: dict[int, Float64] = {}
    for item in range(b):
        L = known.root(item)
        W[item], cancellation = _weighted_basis(factor, item, L, known.powers)
        # the normalizer of keys that hide directions has few digits
        if UNIT * cancellation * normalizer_rounding(factor, item) > _CANCELLED:
            # a root has the second moment of the queries, and one power for all columns if there is no plain sample
            Q = L.T if known.sample is None or known.rotary is not None else known.sample[item]
            again[item] = _of_products(Q, matrices.item(item), matrices.present[item])
        quick = factor.arithmetic[item] == "single" and kernels.SINGLE_UNIT * cancellation <= _SINGLE_PRODUCTS
        arithmetic.append("single" if quick else "double")
    for one in dict.fromkeys(arithmetic):
        items = np.array([item for item in range(b) if arithmetic[item] == one], np.int64)
        kernels.sqnorms(rows, items, W[items], out, arithmetic=one, ceiling=1.0)
    for item, scores in again.items():
        out[item, :] = to_device(scores.astype(str(out.dtype).rpartition(".")[2]), out)
    return out


def _of_products(Q: Float64, keys: Matrices, present: Flags) -> Float64:
    """Return the scores (n,) of x² for centered normal queries with the second moment of a sample.

    The products of queries and keys are in twice the precision, so that it does not matter how far they cancel.
    """
    places, out = np.flatnonzero(present), np.zeros(keys.n)
    K = to_float64(take_rows(keys.data, places), keys.format)[0]
    exponents = np.frexp(np.abs(K).max(axis=0, initial=0.0))[1]
    fraction, own = np.frexp(np.where(K.any(axis=0), Q, 0.0))
    own = np.where(fraction != 0, own + exponents, -(2**20))
    even = np.ldexp(fraction, own - own.max(initial=-(2**20)))
    K, step = np.ldexp(K, -exponents), max(len(Q), BLOCK_ENTRIES // len(Q))
    R = np.zeros((0, len(Q)))
    for start in range(0, len(K), step):
        Z = certain_products(K[start : start + step], even)[0]
        R = np.asarray(np.linalg.qr(np.concatenate([R, Z]), mode="r"))
    _, roots, V = np.linalg.svd(R, full_matrices=False)
    kept = roots > 2.0**-50 * roots.max(initial=0.0)
    if not kept.any():
        return out
    total = np.sum(roots**2)
    weights = quadratic_weights(roots[kept] ** 2 / total) / total
    for start in range(0, len(K), step):
        A = certain_products(K[start : start + step], even)[0] @ V[kept].T
        out[places[start : start + step]] = np.minimum(np.square(A) @ weights, 1.0)
    return out


def _weighted_basis(factor: Factor, item: int, L: Float64, powers: Int64) -> tuple[Float64, float]:
    """Return the upper-triangular W with ``s = ‖k W‖²`` for rows as they are read, and the cancellation of products.

    L is a root of the second moment of queries, its rows divided by 2 to these powers. The cancellation is
    ``√(Σ ‖K_i‖² ‖W_i‖²)`` over the columns of the keys and the rows of W, where ‖K W‖ is 1: see Factor.product_error.
    """
    d = factor.columns
    N, exponents = factor.even_normalizer(item)
    shift, live = exponents + powers, L.any(axis=1)
    shift = np.where(live, shift - shift[live].max(initial=-(2**20)), 0)
    with np.errstate(under="ignore"):
        even = np.ldexp(L, shift[:, None])
        largest = np.abs(even).max(initial=0.0)
        if not largest:
            return np.zeros((d, d)), 0.0
        even /= largest
        roots, V = right_svd(N @ even)
    kept = roots > 2.0**-50 * roots.max(initial=0.0)
    if not kept.any():
        return np.zeros((d, d)), np.inf if (np.abs(N) @ np.abs(even)).any() else 0.0
    total = float(np.sum(roots**2))
    shares = roots[kept] ** 2 / total
    w = quadratic_weights(shares)
    A = even @ (V[kept].T * np.sqrt(w / total))
    scale = factor.all_columns.scale
    read = exponents if scale is None else exponents + np.frexp(scale[item])[1] - 1  # rows are read scaled
    cancellation = float(np.sqrt(np.sum(np.square(N).sum(axis=0) * np.square(A).sum(axis=1))))
    return np.asarray(np.ldexp(upper_form(A), -read[:, None])), cancellation


def quadratic_weights(shares: Float64) -> Float64:
    r"""Return ``w_i = ∫₀^∞ (1 + 2tλ_i)⁻¹ Π (1 + 2tλ_l)^{−1/2} dt`` for λ that sum to 1, to about 1e-12.

    The integrand is analytic in log t up to an imaginary part of π, so the trapezoidal rule converges like
    exp(−2π²/step). The integral beyond its ends is below e⁻⁴⁰.
    """
    u = np.arange(_FIRST, _LAST, _STEP)
    grown = 2 * np.exp(u)[:, None] * shares
    logs = u - np.log1p(grown).sum(axis=1) / 2
    w = _STEP * np.sum(np.exp(logs)[:, None] / (1 + grown), axis=0)
    return np.asarray(w / math.fsum(w * shares))
