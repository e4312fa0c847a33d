"""Approximate leverage scores and bounds, from a sketch of the keys or by projection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from levattn._core.arrays import to_numpy
from levattn._core.blas import lapack
from levattn._core.random import normals
from levattn._core.types import Float64
from levattn._kernels import Rows
from levattn.linalg.accumulator import UNIT
from levattn.linalg.factor import Factor, even_whitening, float64_rows, normalizer_rounding
from levattn.linalg.routes import factor_moments
from levattn.linalg.span import Span, nonzero_rows
from levattn.sketch import OSNAP, SRHT, CountSketch, Distribution, GaussianJL, Sketch
from levattn.sketch.operator import unscaled_sketch

SCORE_SKETCHES: dict[str, Any] = {"countsketch": CountSketch, "osnap": OSNAP, "srht": SRHT, "jl": GaussianJL}
_LEFT = CountSketch | OSNAP | SRHT

FAILURE = 1e-6  # probability with which a randomized bound may fail
_START = 101  # random stream of the start of Lanczos' method
_SINGLE_ERROR = 1e-9  # largest error of a float64 factor for which float32 products are as accurate as a sketch
_SINGLE_BOUND = 1.2e-13  # the same for products that bound scores: their error raises the bounds
_SINGLE_RANGE = 2.0**100  # the largest entries of float32 products, and one over the smallest
_SINGLE_SUMS = 1.2e-11  # largest error of a factor for which float32 sums of a sketch are as accurate
_MEASURED = 320  # columns up to which moments cost less than steps of Lanczos' method
_LARGEST = 2.0**400  # numbers up to this have squares in range
_STEPS = 40  # of Lanczos' method
_BLOCK = 1 << 20  # entries of keys in one product


def check_sketches(method: Any) -> bool:
    """Tell whether a method is a sketch or a pair; raise for sketches that give no scores."""
    if not isinstance(method, Distribution | tuple):
        return False
    left, right = _pair_of(method)
    if not isinstance(left, _LEFT | None) or not isinstance(right, GaussianJL | None):
        raise ValueError(
            f"method is {method!r}; expected a CountSketch, OSNAP, SRHT or GaussianJL. A pair is a sketch of rows and "
            "a projection of columns, such as (OSNAP(4096), GaussianJL(400))"
        )
    return True


def _pair_of(method: Any) -> tuple[Any, Any]:
    if isinstance(method, tuple):
        return method if len(method) == 2 and None not in method else (method, method)
    return (None, method) if isinstance(method, GaussianJL) else (method, None)


def sketches_of(method: Any, n: int, d: int) -> tuple[Distribution | None, GaussianJL | None]:
    """Return the sketch of the rows and the projection from the right of a method that was checked; None for none."""
    if isinstance(method, str):
        sizes = {"countsketch": min(4 * d * d, max(16 * d, n // 8)), "jl": 8 * math.ceil(math.log(max(n, 2)))}
        method = SCORE_SKETCHES[method](sizes.get(method, 8 * d))
    left, right = _pair_of(method)
    if left is not None and left.size < d:
        raise ValueError(
            f"method is {method!r}; expected at least d = {d} rows of a sketch, because fewer lose directions of the "
            "keys"
        )
    return left, right


def name_of(method: Any) -> str:
    """Return the name of the method that sketches of its family have."""
    first = method[0] if isinstance(method, tuple) else method
    return next((name for name, family in SCORE_SKETCHES.items() if isinstance(first, family)), method)


def sketched_factor(rows: Rows, sketch: Sketch, limit: float = _SINGLE_ERROR) -> Factor:
    """Return the factor of a sketch of the keys, for the keys; `limit` as in `_in_single`."""
    factor = _of_single_sums(rows, sketch) if rows.format != "float64" else None
    if factor is None:
        out = unscaled_sketch(sketch, rows, 0)
        factor = factor_moments(Rows(out * sketch.distribution.scale, "float64"), single="no")
    # sums of keys are rounded, so they do not give the exact row space of the keys
    return _in_single(replace(factor, rows=_scaled_alike(rows, factor.rows), spans={}, hidden={}, shortened={}), limit)


def _scaled_alike(rows: Rows, others: Rows) -> Rows:
    return rows if others.scale is None else rows.scaled(others.scale)


def _in_single(factor: Factor, limit: float) -> Factor:
    """Return the factor with float32 products where its error in float64 is at most the limit.

    That error is at least 2u times the condition number of the keys. The error of the products grows with this
    condition number, and with the root of the number of columns.
    """
    short = factor.rows.format != "float64"
    arithmetic, products = list(factor.arithmetic), factor.product_error.copy()
    for item, error in enumerate(factor.error.tolist()):
        if short and arithmetic[item] == "double" and error <= limit and _fits_single(factor.whitening[item]):
            arithmetic[item] = "single"
            products[item] = 2.0**-22 * max(1.0, math.sqrt(factor.rows.shape[2]) / 8) * error / (2 * UNIT)
    return replace(factor, arithmetic=tuple(arithmetic), product_error=products)


def _fits_single(W: Float64) -> bool:
    """Tell whether the entries of W that matter are normal numbers of float32, for each column of the keys."""
    sizes = np.max(np.abs(W), axis=1, initial=0.0)
    return bool(
        sizes.max(initial=0.0) <= _SINGLE_RANGE and sizes.min(initial=1.0, where=sizes > 0) >= 1 / _SINGLE_RANGE
    )


def _of_single_sums(rows: Rows, sketch: Sketch) -> Factor | None:
    """Return the factor of a sketch summed in float32, or None where such sums may lack accuracy.

    They do where columns depend on each other. Rounded sums then lie beside the row space of the keys, or span more
    directions. In the second case they are ill-conditioned, so that their factor needs compensated products.
    """
    out = rows.sketch_zeros(sketch.distribution.size, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        sketch.distribution.add(rows, sketch.distribution.seed, 0, out)
        out *= np.float32(sketch.distribution.scale)
    if not np.isfinite(out).all():
        return None
    factor = factor_moments(Rows(out, "float32"), single="no")
    independent = not factor.null_directions and "compensated" not in factor.arithmetic
    return factor if independent and np.all(factor.error <= _SINGLE_SUMS) else None


def projected(factor: Factor, family: GaussianJL, limit: float = _SINGLE_ERROR) -> Factor:
    """Return the factor with scores from random combinations of the whitened columns; `limit` as in `_in_single`."""
    directions = family.columns(family.seed, 0, factor.whitening.shape[-1]).T * family.scale
    return _in_single(replace(factor, projection=factor.whitening @ directions), limit)


@dataclass(frozen=True)
class Screened:
    """Bounds of leverage scores from a sketch."""

    lower: Float64  # (b, n)
    upper: Float64  # (b, n)
    scores: Float64  # (b, n) of the sketch, at most 1
    ends: Float64  # (b, 2) the least and the largest ratio of squared norms, of keys to their sketch
    factor: Factor  # of the keys where `exact`, else of the sketch
    exact: bool


def screen(rows: Rows, left: Distribution | None, right: GaussianJL | None) -> Screened:
    """Return bounds of the leverage scores; they fail with a probability of at most `FAILURE`.

    Let A = WᵀGW for the factor W of a sketch, and let λ be its least eigenvalue. Then a key's score is
    xᵀA⁻¹x ≤ ‖x‖²/λ with x = Wᵀk, and at least ‖x‖² over the largest eigenvalue. The factor of the keys measures both
    where it costs little, else Lanczos' method does. Factors, which hold up to that probability, bound how far
    projected scores fall short or exceed.
    """
    b, n, d = rows.shape
    exact = factor_moments(rows, single="scores") if left is None or d <= _MEASURED else None
    if left is None and exact is not None:
        factor, ends = exact, np.ones((b, 2))
    elif left is not None:
        factor = sketched_factor(rows, Sketch(left), _SINGLE_BOUND)
        chance = FAILURE / (2 * max(b, 1))  # of both ends; the projection may fail with the other half
        ends = np.array(
            [_ends(factor, i, left.seed, chance) if exact is None else _compared(factor, exact, i) for i in range(b)]
        ).reshape(b, 2)
    if right is not None:
        factor = projected(factor, right, _SINGLE_BOUND)
    # not as members of K: their scores would be cut at 1 before the division
    found, _ = factor.scores(as_float64=True, member=False)
    scores = to_numpy(found).astype(np.float64)
    short, over = (0.0, 0.0) if right is None else projection_spread(right.size, 2 * n * b)  # with half of `FAILURE`
    least = 4 * d * np.where(np.array(factor.arithmetic) == "single", 2.0**-126, 2.0**-1022)[:, None]
    faint = (scores < least) & (True if rows.mask is None else to_numpy(rows.mask))  # squares may have underflowed
    for item in np.flatnonzero(faint.any(axis=1)).tolist():
        faint[item] &= nonzero_rows(rows.item(item))
    slack = 4 * factor.score_error[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        upper = np.fmin(np.where(faint, least, scores) * (1 + slack) / (ends[:, :1] * (1 - short)), 1.0)
        lower = np.fmin(np.nan_to_num(scores * np.maximum(1 - slack, 0.0) / (ends[:, 1:] * (1 + over))), upper)
    lower[faint | np.isinf(scores)] = 0.0  # or outside the row space of the sketch, where it bounds from neither side
    if left is None:
        lower[list(factor.hidden)] = 0.0  # of which the scores are raised
    for item in range(b) if left is not None else ():  # directions may be hidden from the sketch, or not measured
        if exact is not None:
            hidden = item in exact.hidden or factor.rank[item] < exact.rank[item]
        else:
            hidden = factor.rank[item] < min(n, d) and factor.rank[item] < Span.of(rows.item(item)).rank
        if hidden:
            lower[item], ends[item] = 0.0, (0.0, np.inf)
        if not ends[item, 0] > 0:  # no number bounds a score, but zero rows and those left out have none
            upper[item] = nonzero_rows(rows.item(item))
    return Screened(lower, upper, np.fmin(scores, 1.0), ends, factor if exact is None else exact, exact is not None)


def projection_spread(columns: int, count: int) -> tuple[float, float]:
    """Return η, η′: projection changes squared norms of `count` vectors by factors from 1 − η to 1 + η′.

    This holds except with probability `FAILURE`. A chi-squared variable of k degrees is below (1 − η) k with a
    probability of at most exp((ln(1 − η) + η) k/2). It is above (1 + η′) k with a probability of at most
    exp((ln(1 + η′) − η′) k/2).
    """
    least = 2 * math.log(FAILURE / (2 * max(count, 1))) / columns
    below = _crossing(lambda x: math.log1p(-x) + x, least, 1 - 2.0**-52)
    return below, _crossing(lambda x: math.log1p(x) - x, least, 4 + 4 * abs(least))


def _crossing(falling: Callable[[float], float], value: float, high: float) -> float:
    """Return the number from 0 to `high` at which a falling function reaches the value, rounded up."""
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if falling(middle) <= value else (middle, high)
    return high


def _compared(factor: Factor, exact: Factor, item: int) -> tuple[float, float]:
    """Return bounds of the least and the largest eigenvalue of WᵀGW = (NW)ᵀNW, with the factor N of the keys."""
    N, exponents = exact.even_normalizer(item)
    W = even_whitening(factor, item, exponents)
    live = np.any(W != 0, axis=0)
    if not live.any():
        return 1.0, 1.0
    if not np.max(np.abs(W)) < _LARGEST:  # all but the smallest numbers of the sketch cancel
        return 0.0, math.inf
    off = float(np.linalg.norm(N) * np.linalg.norm(W)) * UNIT * max(4.0, normalizer_rounding(exact, item))
    found = lapack(np.linalg.svd, N @ W[:, live], compute_uv=False)
    least, largest = float(found[-1]) - off, float(found[0]) + off  # as NW is rounded
    slack = 4 * float(exact.error[item])
    return max(least, 0.0) ** 2 * (1 - slack), largest**2 * (1 + slack)


def _ends(factor: Factor, item: int, seed: int, chance: float) -> tuple[float, float]:
    """Return bounds of the least and the largest eigenvalue of WᵀGW, by Lanczos' method; one fails with this `chance`.

    The start is random; let k be the number of steps and r the dimension. With a probability of at most
    1.648 √r exp(−√ε (2k − 1)), the method misses an end of the spectrum by more than ε times its width. (Kuczyński and
    Woźniakowski 1992, Theorem 4.2; shifts do not change Krylov spaces.)
    """
    W = factor.whitening[item]
    live = np.flatnonzero(np.any(W != 0, axis=0))
    r = len(live)
    if not r:
        return 1.0, 1.0
    steps = min(_STEPS, r)
    epsilon = (math.log(2 * 1.648 * math.sqrt(r) / chance) / (2 * steps - 1)) ** 2
    q = normals(seed, _START, 0, r, 1)[:, 0]
    basis = [q / np.linalg.norm(q)]
    alpha, beta = [], []
    for _ in range(steps):
        v = _times(factor, item, W[:, live], basis[-1])
        alpha.append(float(v @ basis[-1]))
        Q = np.stack(basis)
        for _ in range(2):
            v = v - Q.T @ (Q @ v)
        size = float(np.linalg.norm(v))
        if size <= 1e-12 * abs(alpha[0]):
            break
        beta.append(size)
        basis.append(v / size)
    T = np.diag(alpha) + np.diag(beta[: len(alpha) - 1], 1) + np.diag(beta[: len(alpha) - 1], -1)
    values = lapack(np.linalg.eigvalsh, T)
    width = float(values[-1] - values[0])
    beyond = epsilon * width / max(1 - 2 * epsilon, 1e-3)
    # products K(Wx) cancel where columns depend on each other; an error e of each moves ends by at most 3√k e
    beyond += 3 * math.sqrt(len(alpha)) * UNIT * _cancellation(factor, item) * abs(float(values[-1]))
    return max(float(values[0]) - beyond, 0.0) * (1 - 1e-9), (float(values[-1]) + beyond) * (1 + 1e-9)


def _cancellation(factor: Factor, item: int) -> float:
    """Return ``√(Σ ‖K_i‖² ‖W_i‖²)`` over the columns of the keys and the rows of W, where ‖KW‖ is about 1."""
    sizes = np.sum([np.einsum("ij,ij->j", X, X) for X in _blocks(factor, item)], axis=0)
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(np.sqrt(sizes) * np.linalg.norm(factor.whitening[item], axis=1)))


def _times(factor: Factor, item: int, W: Float64, x: Float64) -> Float64:
    """Return WᵀKᵀKW x, summed over blocks of keys."""
    y = W @ x
    out = np.zeros(len(y))
    for X in _blocks(factor, item):
        out += X.T @ (X @ y)
    return np.asarray(W.T @ out)


def _blocks(factor: Factor, item: int) -> Iterator[Float64]:
    """Yield the keys of one matrix, in float64."""
    one = factor.rows.item(item)
    step = max(256, _BLOCK // one.shape[2])
    for start in range(0, one.shape[1], step):
        yield float64_rows(one, start, min(start + step, one.shape[1]))
