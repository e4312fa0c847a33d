"""The interface of a certificate, the problem that it bounds, and functions that several certificates share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import take_rows, to_float64, to_numpy
from levattn._core.threads import parallel_for
from levattn._core.types import Float64
from levattn._kernels import Rows
from levattn.functions import AttentionFunction, Softmax
from levattn.linalg.factor import Factor

LOG_ERROR = 1e-12  # of a logarithm; raises the bounds
_CHUNK = 1 << 15  # keys in a slice


@dataclass(frozen=True)
class Problem:
    """The keys and options of a request for bounds. A masked key has the bound 0."""

    f: AttentionFunction | Softmax
    factor: Factor  # of the keys
    rows: Rows  # for softmax the caller's keys, else the factor's rows, with exactly the same column space
    tau: Float64  # (b, n) leverage scores, raised by their error; 0 for zero keys only
    epsilon: float  # keys with a smaller bound are of no interest
    iterations: int  # of Lewis weights
    rng: int | np.random.Generator | None

    @property
    def growth(self) -> float:
        """The exponent p of f(x) ≤ |x/y|^p f(y); 0 for softmax."""
        return 0.0 if isinstance(self.f, Softmax) else float(self.f.growth)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Number of keys of each matrix that take part, (b,)."""
        mask = self.rows.mask
        return np.full(self.tau.shape[0], self.tau.shape[1]) if mask is None else to_numpy(mask).sum(axis=1)


@dataclass(frozen=True)
class Certificate:
    """A proof that no query gives a key more attention than a bound."""

    name: str  # as in `method` and `Sensitivities.certificate`
    applies: Callable[[AttentionFunction | Softmax], bool]
    bound: Callable[[Problem], tuple[Float64, Factor | None]]  # (b, n), and the factor of lifted keys as in `Bounds`
    is_cheap: Callable[[Problem], bool] = lambda _: True  # whether "auto" uses it


def raised_scores(factor: Factor, live: npt.NDArray[np.bool_] | None = None) -> Float64:
    """Return leverage scores in float64, raised by their estimated error, at most 1; 0 for zero rows only.

    `live` flags the nonzero rows. If it is left out their entries decide, because a score may underflow.
    """
    given, _ = factor.scores()
    least = 4 * factor.rows.shape[2] * (2.0**-126 if "32" in str(given.dtype) else 2.0**-1022)
    scores = to_numpy(given).astype(np.float64)
    with np.errstate(invalid="ignore"):
        scores *= 1 + 4 * factor.score_error[:, None]
    low = ~(scores >= least)  # smaller squares may have underflowed; NaN where the error is infinite
    if low.any():
        there = _not_zero(factor.rows, low) if live is None else live & low
        scores[low] = np.where(there[low], np.where(np.isnan(scores[low]), 1.0, least), 0.0)
    return np.minimum(scores, 1.0, out=scores)


def _not_zero(rows: Rows, among: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Tell which rows `among` these take part and have a nonzero entry, (b, n)."""
    found = np.zeros(among.shape, np.bool_)
    if rows.mask is not None:
        among = among & to_numpy(rows.mask)
    for item in np.flatnonzero(among.any(axis=1)).tolist():
        which = np.flatnonzero(among[item])
        found[item, which] = to_float64(take_rows(rows.item(item).keys, which), rows.format)[0].any(axis=1)
    return found


def by_chunks(body: Callable[[slice], None], n: int, size: int = _CHUNK) -> None:
    """Call `body` on slices of n keys that stay in the cache, on all threads."""
    parallel_for(lambda i: body(slice(i * size, min((i + 1) * size, n))), -(-n // size))


def in_row_space(factor: Factor, item: int) -> bool:
    """Tell whether all keys lie exactly in the row space of the factor."""
    return item not in factor.null_directions or (item in factor.spans and item not in factor.hidden)
