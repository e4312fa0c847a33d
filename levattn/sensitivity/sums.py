"""Sums of f(⟨q, k⟩) over keys, and bounds of their error from the rounding of the products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, to_float64
from levattn._core.types import Float64
from levattn._kernels import kernels_for
from levattn.exceptions import NonFiniteError
from levattn.functions import L1L2, AttentionFunction, Fair, Huber, Power, Softmax, Tukey, scale_of
from levattn.linalg.factor import UNIT
from levattn.linalg.span import zero_products

BLOCK_ENTRIES = 1 << 19  # numbers in a block of products of queries and keys, or of keys
_NOTHING = 2.0**-104  # relative rounding of twice the precision
LEAST_POSITIVE = 2.0**-1074  # of float64
_COARSE = np.ldexp(1.0, np.arange(4, 60, 4))  # ratios of a product to its error
_FINE = 2.0 ** np.arange(0, 4, 0.5)
_SHARE = 1e-12  # relative change of a sum from all products that are far larger than their error
# For each function its largest slope T, in units of its parameter, and a bound of T/√f(T)
_SLOPES = {Huber: (1.0, 1.4143), Tukey: (0.2863, 1.4743), Fair: (1.0, 1.8054), L1L2: (1.4143, 1.5539)}


def product_noise(size: Any, d: int) -> Any:
    """Return the largest error of float64 products of d terms, for ``size = Σ |q_i||k_i|``."""
    return (d + 2) * UNIT * size + 2 * d * LEAST_POSITIVE


def certain_products(Q: Float64, K: Float64, *, zeros: bool = True) -> tuple[Float64, Float64]:
    """Return ⟨q, k⟩ as in twice the precision, and the largest error of each; with `zeros` a 0 is exact."""
    d = Q.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):
        Z, size = kernels_for("precise", Q).precise_products(Q, K), np.abs(Q) @ np.abs(K).T
        noise = _NOTHING * d**2 * size + 4 * d * LEAST_POSITIVE
        if zeros:
            doubtful = np.nonzero(np.abs(Z) <= noise)
            if len(doubtful[0]):
                nothing = zero_products(Q, K, doubtful)
                Z, noise = np.where(nothing, 0.0, Z), np.where(nothing, 0.0, noise)
        noise += 2 * UNIT * np.abs(Z)
    return Z, noise


def evaluation_error(f: AttentionFunction | Softmax, D: Float64, epsilon: float) -> Any:
    """Return the relative error that evaluating f adds to shares of at least ε, and to the sum.

    A function of the user is assumed to be right to a few units of rounding times its growth. For softmax D holds
    logarithms, which have an error of their own.
    """
    if isinstance(f, Softmax):
        return UNIT * (3 * np.abs(np.where(np.isneginf(D), 0.0, D)) - math.log(epsilon) + 16)
    if isinstance(f, Fair):  # u − log(1 + u) loses digits down to u = 1e-3, where the series begins
        return 8192 * UNIT
    return 8 * UNIT * (f.growth + 1)


def _floor(f: AttentionFunction | Softmax) -> float:
    """Return the largest part of a value of f that may be lost to underflow."""
    if isinstance(f, Softmax):
        return 0.0
    return 32 * LEAST_POSITIVE * max(1.0, scale_of(f) ** 2, float(f(np.ones(1))[0]))


def is_bounded_by_sums(f: AttentionFunction | Softmax) -> bool:
    """Tell whether `mild_changes` bounds the change of a sum from the rounding of the products."""
    return isinstance(f, Softmax) or type(f) in _SLOPES or (isinstance(f, Power) and f.p >= 1)


def mild_changes(f: AttentionFunction | Softmax, D: Float64, count: float, noise: Float64) -> Float64:
    """Bound ``Σ |f(z') − f(z)| / Σ f(z)`` over `count` products where ``|z' − z| ≤ noise``, from the sums D alone.

    For functions of which too little is known, it bounds only the part that `sums` leaves out. For powers p of at
    least 1 it follows from the inequalities of Minkowski and Hölder. The slopes of the other functions are at most
    min(x, T) for a T. Its square is at most f(x) T²/f(T), because f(x)/x² does not grow.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if isinstance(f, Softmax):
            return np.asarray(np.expm1(noise))
        if isinstance(f, Power) and f.p >= 1:
            root = noise * (count / D) ** (1 / f.p)
            change = f.p * root * (1 + root) ** (f.p - 1)
        elif type(f) in _SLOPES:
            slope, ratio = _SLOPES[type(f)]
            T = slope * float(getattr(f, "delta", getattr(f, "c", 1.0)))
            curved = noise * (noise / D) * count + ratio * noise * np.sqrt(count / D)
            change = np.minimum(noise * (T / D) * count, curved)
        else:
            change = np.zeros(len(D))
        change = change + count * (_floor(f) / D)
        return np.where(change >= 0, change, np.inf)


def mild_entry_change(f: AttentionFunction | Softmax, D: Float64, epsilon: float, noise: Float64) -> Float64:
    """Bound the relative change of every f(z) of at least 0.995 εD, where the error of z is at most `noise`.

    Such a z is larger than any t with f(t) below that. So the growth p of f bounds the change by 1 − (1 − noise/t)^p.
    The search for the largest t tries multiples of the noise, with some twenty values of f for each query.
    """
    if isinstance(f, Softmax):
        return np.asarray(np.expm1(noise))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        least = 0.99 * epsilon * D[:, None]
        known = _last(np.asarray(f(noise[:, None] * _COARSE)) < least, _COARSE)
        ladder = known[:, None] * _FINE
        times = known * _last(np.asarray(f(noise[:, None] * ladder)) < least, _FINE)
        return np.where(known > 0, -np.expm1(f.growth * np.log1p(-1.1 / np.maximum(times, 2.0))), np.inf)


def _last(below: npt.NDArray[np.bool_], steps: Float64) -> Float64:
    """Return for each row the last step up to which all are below, or 0."""
    count = np.count_nonzero(np.logical_and.accumulate(below, axis=1), axis=1)
    return np.where(count > 0, steps[np.maximum(count - 1, 0)], 0.0)


def entry_change(
    Q: Float64, selected: Float64, f: AttentionFunction | Softmax, D: Float64, epsilon: float, *, precise: bool
) -> Float64:
    """Return the largest relative change of any f(z) of at least about εD among these keys, by the error of each z."""
    out = np.zeros(len(Q))
    step = _step(Q)
    for start in range(0, len(selected), step):
        rows = selected[start : start + step]
        Z, noise = _products(Q, rows, f, precise=precise)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if isinstance(f, Softmax):
                heavy, change = Z + noise - D[:, None] >= math.log(epsilon / 2), np.expm1(noise)
            else:
                high, low = _high_and_low(f, Z, noise)
                heavy = (high >= 0.5 * epsilon * D[:, None]) & (high > 0)
                change = np.where(heavy, (high - low) / high, 0.0)
            change = np.where(heavy, np.where(change >= 0, change, np.inf), 0.0)
        out = np.fmax(out, np.max(change, axis=1, initial=0.0))
    return out


def _products(Q: Float64, rows: Float64, f: AttentionFunction | Softmax, *, precise: bool) -> tuple[Float64, Float64]:
    """Return ⟨q, k⟩, in float64 or as in twice the precision, and the error of each."""
    if precise:
        return certain_products(Q, rows, zeros=not isinstance(f, Softmax))
    with np.errstate(over="ignore", invalid="ignore"):
        return Q @ rows.T, product_noise(np.abs(Q) @ np.abs(rows).T, Q.shape[1])


def _high_and_low(f: AttentionFunction, Z: Float64, noise: Float64) -> tuple[Float64, Float64]:
    size = np.abs(Z)
    return f(size + noise), f(np.maximum(size - noise, 0.0))


def sums(
    Q: Float64, keys: Matrices, present: npt.NDArray[np.bool_], f: AttentionFunction | Softmax
) -> tuple[Float64, Float64, Float64 | float]:
    """Return Σ f(⟨q, k⟩) over all keys for each query, or its logarithm for softmax, from products in float64.

    Also return the largest entries of the keys, (d,), and a relative error. It covers the addition and, for functions
    that `mild_changes` does not bound, the products. Few products are so small that their terms are examined one by
    one.
    """
    total, top, change = np.zeros(len(Q)), np.full(len(Q), -np.inf), np.zeros(len(Q))
    largest, parts, known = np.zeros(keys.d), 0, is_bounded_by_sums(f)
    for rows in key_blocks(keys, present, Q):
        with np.errstate(over="ignore", invalid="ignore"):
            Z = Q @ rows.T
        if not np.isfinite(Z).all():
            _refuse_overflow(rows, f)
        here = np.max(np.abs(rows), axis=0)
        largest, parts = np.maximum(largest, here), parts + 1
        with np.errstate(over="ignore", invalid="ignore"):
            if isinstance(f, Softmax):
                before, top = top, np.maximum(Z.max(axis=1), top)
                total = total * np.exp(before - top) + np.exp(Z - top[:, None]).sum(axis=1)
                continue
            total += f(Z).sum(axis=1)
            if not known:
                change += small_changes(f, np.abs(Z), product_noise(np.abs(Q) @ here, keys.d))
    error = np.zeros(len(Q))
    if not known:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            error = change / total + _SHARE
    return _result(total, top, Q, f), largest, np.where(error >= 0, error, np.inf) + (parts + 32) * UNIT


def small_changes(f: AttentionFunction, size: Float64, noise: Float64, share: float = _SHARE) -> Float64:
    """Bound the change of ``Σ f(z)``, of the sizes of z, from errors of `noise`, (m,), except for a `share` of it."""
    few = np.flatnonzero(size < (noise * max(16.0, 1.2 * f.growth / share))[:, None])
    at = few // size.shape[1]
    high, low = _high_and_low(f, size.ravel()[few], noise[at])
    return np.asarray(np.bincount(at, high - low, len(size)), np.float64)


def uncertain_sums(
    Q: Float64, keys: Matrices, present: npt.NDArray[np.bool_], f: AttentionFunction | Softmax, *, precise: bool
) -> tuple[Float64, Float64, float]:
    """Return the sums of `sums`, and a bound of ``Σ |f(z') − f(z)|`` in units of them; z' are the true products.

    The bound takes f at both ends of the interval in which each product lies. Products are in float64 or, if
    `precise`, as in twice the precision, with exact zeros.
    """
    total, top, change = np.zeros(len(Q)), np.full(len(Q), -np.inf), np.zeros(len(Q))
    parts = 0
    for rows in key_blocks(keys, present, Q):
        Z, noise = _products(Q, rows, f, precise=precise)
        if not np.isfinite(Z).all():
            _refuse_overflow(rows, f)
        parts += 1
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if isinstance(f, Softmax):
                before, top = top, np.maximum(Z.max(axis=1), top)
                apart = Z - top[:, None]
                total = total * np.exp(before - top) + np.exp(apart).sum(axis=1)
                # e^z (e^δ − 1), without the cancellation where δ is tiny, nor 0 times infinity where it is large
                grown = np.where(noise < 1, np.exp(apart) * np.expm1(np.minimum(noise, 1.0)), np.exp(apart + noise))
                change = change * np.exp(before - top) + grown.sum(axis=1)
            else:
                high, low = _high_and_low(f, Z, noise)
                total += f(Z).sum(axis=1)
                possible = np.count_nonzero(np.abs(Z) + noise, axis=1)
                change += (high - low).sum(axis=1) + _floor(f) * possible
    D = _result(total, top, Q, f)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        share = np.where(change == 0, 0.0, change / total)
    return D, np.where(share >= 0, share, np.inf), (parts + 32) * UNIT


def _step(Q: Float64) -> int:
    """Return the number of keys in a block for these queries."""
    return int(max(16, BLOCK_ENTRIES // max(Q.shape)))


def key_blocks(keys: Matrices, present: npt.NDArray[np.bool_], Q: Float64) -> Iterator[Float64]:
    """Yield the keys in float64, in blocks for these queries."""
    step = _step(Q)
    for start in range(0, keys.n, step):
        part = slice(start, min(start + step, keys.n))
        rows = to_float64(keys.data[:, part, :], keys.format)[0][present[part]]
        if len(rows):
            yield rows


def _result(total: Float64, top: Float64, Q: Float64, f: AttentionFunction | Softmax) -> Float64:
    if isinstance(f, Softmax):
        with np.errstate(divide="ignore"):
            return np.asarray(top + np.log(total))
    if np.isinf(total).any():
        _refuse_overflow(Q, f)
    return total


def _refuse_overflow(rows: Float64, f: AttentionFunction | Softmax) -> NoReturn:
    """Raise for keys that are not finite, or products that are not."""
    if not np.isfinite(rows).all():
        raise NonFiniteError("K holds NaN or infinity; expected finite keys, the same as in the set")
    raise ValueError(
        f"Q and K have products that leave the range of float64 for f = {f!r}; expected smaller ones. Scale Q down"
    )
