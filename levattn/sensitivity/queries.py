"""The known distribution of queries: a sample of them, or their mean and second moment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from levattn._core.arrays import Matrices, as_matrices, as_numbers, to_float64, to_numpy
from levattn._core.types import Float64, Int64
from levattn.exceptions import NonFiniteError
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
    G, weight = to_numpy(moments.read()), to_numpy(moments.weight)
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
