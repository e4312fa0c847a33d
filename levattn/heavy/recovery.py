"""Heavy entries recovered from a CountSketch of the keys of a set, and normalizers estimated by a projection."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from levattn._core.random import below, signs, words
from levattn._core.types import Float64
from levattn._kernels import Rows, kernels_for
from levattn.sensitivity.approximate import FAILURE, projection_spread
from levattn.sketch import GaussianJL

_PLACES = 102  # random stream
_ENTRIES = 1 << 22  # estimates in memory at a time

Recovered = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Float64]


def recovery_size(m: int, epsilon: float, n: int) -> tuple[int, int]:
    """Return buckets and repetitions that miss any of at most m/ε heavy entries with probability at most `FAILURE`.

    In one repetition the estimate of ⟨q, k⟩ has a variance of at most D/buckets. So its error exceeds √(εD)/2 with a
    probability of at most 4/(buckets ε) = 1/8. The probability that this happens in more than half of the repetitions
    is at most (4 · 1/8 · 7/8)^(repetitions/2). Otherwise the median of a heavy entry is at least √(εD)/2. If n keys
    are in 8 n buckets, a key shares its bucket with a probability of at most 1/8, and else its estimate is exact.
    """
    buckets = math.ceil(min(32 / epsilon, 8 * max(n, 1)))
    repetitions = 2 * (math.log(FAILURE / max(m, 1)) + math.log(epsilon)) / math.log(4 * (1 / 8) * (7 / 8))
    return buckets, math.ceil(repetitions) | 1


def recovered_entries(
    Q: Float64, keys: Float64, D: Float64, epsilon: float, buckets: int, repetitions: int, seed: int
) -> Recovered:
    """Return rows, columns and scores of the entries of at least ε that a CountSketch of the keys finds.

    The keys are sketched, not the queries: est = sign · ⟨q, bucket of the key⟩, and the median of the repetitions.
    Entries whose estimates could be heavy are computed. Rows with D = 0 have no entries.
    """
    n, d = keys.shape
    drawn = words(seed, _PLACES, 0, n, repetitions)
    buckets_of = below(drawn, buckets) + buckets * np.arange(repetitions)
    sign = signs(drawn).astype(np.float64)
    sketched = np.zeros((1, buckets * repetitions, d))
    rows = Rows(keys[None], "float64")
    kernels_for("sketch", rows.keys).scatter(rows, seed, _PLACES, 0, repetitions, buckets, sketched)
    found: list[Recovered] = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    step = max(1, _ENTRIES // max(n * repetitions, buckets * repetitions, 1))
    for start in range(0, len(Q), step):
        part = slice(start, start + step)
        P = Q[part] @ sketched[0].T
        estimates = np.median(P[:, buckets_of] * sign, axis=2)
        live = D[part] > 0
        i, j = np.nonzero((estimates**2 >= 0.25 * epsilon * D[part, None]) & live[:, None])
        products = np.einsum("ij,ij->i", Q[part][i], keys[j])
        scores = products**2 / D[part][i]
        large = scores >= epsilon
        found.append((i[large] + start, j[large], scores[large]))
    i, j, scores = (np.concatenate(each) for each in zip(*found, strict=True))
    return i, j, scores


def estimated_normalizers(Q: Float64, N: Float64, columns: int, seed: int) -> tuple[Float64, tuple[float, float]]:
    """Return ``‖ΠNq‖²`` for every query, and the relative amounts that it may lie below and above ``‖Nq‖²``."""
    family = GaussianJL(columns)
    projected = family.columns(seed, 0, len(N)) * family.scale @ N
    Y = Q @ projected.T
    return np.asarray(np.einsum("ij,ij->i", Y, Y)), projection_spread(columns, len(Q))
