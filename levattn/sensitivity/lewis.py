"""The certificates of powers: leverage scores alone, and Lewis weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace, to_device
from levattn._core.types import Float64
from levattn._kernels import Rows
from levattn.functions import Power, is_square
from levattn.linalg.factor import UNIT, Factor
from levattn.linalg.routes import factor_moments
from levattn.sensitivity.contract import LOG_ERROR, Certificate, Problem, by_chunks, in_row_space, raised_scores
from levattn.sensitivity.lift import root_error

_LEAST_WEIGHT = 1e-20  # of a row, relative to the largest, so that weighted keys stay well scaled


def _direct(problem: Problem) -> tuple[Float64, None]:
    """Bound by comparing ‖Ky‖₂ with ‖Ky‖_p; in logarithms, because large powers of small numbers underflow."""
    tau, p = problem.tau, problem.growth
    with np.errstate(divide="ignore"):
        logs = np.log(tau)
    if p <= 2:
        constant = np.max(logs, axis=1, keepdims=True, initial=-np.inf)
        constant = np.where(np.isfinite(constant), constant, 0.0) * (1 - p / 2)
    else:
        constant = (p / 2 - 1) * np.log(np.maximum(problem.counts[:, None], 1))
    return np.asarray(np.exp(np.minimum(constant + p / 2 * logs + LOG_ERROR * (1 + p), 0.0))), None


def iterated(
    rows: Rows, tau: Float64, rank: npt.NDArray[np.int64], p: float, iterations: int
) -> tuple[Float64, Float64, Float64, Float64]:
    """Iterate toward Lewis weights w from equal weights, with leverage scores `tau` and ranks `rank`.

    Return the row weights v, at most 1 (read-only where they are equal), and the leverage scores of the weighted rows.
    Also return the factor (b,) by which the rounding of weighted rows may raise the root of a score. The last result
    is a scale (b, 1): v times it is w^{1/2 − 1/p}. Where new weights would push directions beyond the rank
    tolerance, the weights before them stay.
    """
    live = tau > 0
    v: Float64 = np.broadcast_to(np.ones(1), tau.shape)
    mean: Float64 = np.zeros(tau.shape if p >= 4 else (len(tau), 0))
    going, moved, scale = np.ones(len(tau), np.bool_), np.ones(len(tau)), np.ones((len(tau), 1))
    last: Factor | None = None
    for step in range(iterations):
        new: Float64 = np.empty(tau.shape)

        def body(part: slice, v: Float64 = v, tau: Float64 = tau, new: Float64 = new, step: int = step) -> None:
            t = tau[:, part]
            if p < 4:  # w = (τ/v²)^{p/2}
                new[:, part] = (t / v[:, part] ** 2) ** (p / 4 - 0.5)
            else:
                mean[:, part] += (t - mean[:, part]) / (step + 1)
                new[:, part] = mean[:, part] ** (0.5 - 1 / p)

        with np.errstate(divide="ignore", over="ignore"):
            by_chunks(body, v.shape[1])
        largest = np.max(new, axis=1, keepdims=True, initial=0.0, where=live & np.isfinite(new))
        largest[largest == 0] = 1.0
        new /= largest
        np.clip(new, _LEAST_WEIGHT, 1.0, out=new)
        new[~live] = 1.0
        new[~going] = v[~going]
        factor = factor_moments(replace(rows, weights=new))
        sound = (factor.rank == rank) & np.isfinite(factor.score_error)
        lost = going & ~sound
        if last is not None and lost.any():
            moved[lost] = root_error(last, UNIT)[lost]
        going &= sound
        if not going.any():
            break
        last = factor
        scale = np.where(going[:, None], largest * (scale ** (1 - p / 2) if p < 4 else 1.0), scale)
        if going.all():
            v, tau = new, np.zeros(0)  # frees memory for the scores
            tau = raised_scores(factor, live)
        else:
            scores = raised_scores(factor, live)
            v, tau = (np.where(going[:, None], x, y) for x, y in ((new, v), (scores, tau)))
    if last is not None and going.any():
        moved[going] = root_error(last, UNIT)[going]
    return v, tau, moved, scale


def _of_each(problem: Problem) -> tuple[Float64, None]:
    """Bound by Lewis weights; for keys that lack directions, of as many independent columns as their rank.

    These columns have the same column space, and so the same sensitivities. They are independent by far more than the
    rounding of weighted rows.
    """
    factor, tau, p, iterations = replace(problem.factor, wide=None), problem.tau, problem.growth, problem.iterations
    rows = replace(factor.rows, scale=None)
    lacking = factor.rank < np.count_nonzero(np.any(factor.whitening != 0, axis=2), axis=1)
    if not lacking.any():
        return _lewis(rows, tau, factor.rank, p, iterations), None
    upper = np.ones(tau.shape)
    for item in range(len(tau)):
        one, its_tau = rows.item(item), tau[item : item + 1]
        if lacking[item]:
            if not in_row_space(factor, item):
                continue
            within = factor_moments(_independent(one, factor.even_normalizer(item)[0], int(factor.rank[item])))
            if within.rank[0] < factor.rank[item]:
                continue
            one, its_tau = replace(within.rows, scale=None), raised_scores(within)
        upper[item] = _lewis(one, its_tau, factor.rank[item : item + 1], p, iterations)[0]
    return upper, None


def _independent(rows: Rows, N: Float64, rank: int) -> Rows:
    """Return as many columns of one matrix as it has rank; they span the column space. N has the same row space."""
    from scipy.linalg import qr

    columns = np.asarray(qr(N, mode="r", pivoting=True)[1][:rank], np.int64)
    keys = array_namespace(rows.keys).take(rows.keys, to_device(columns, rows.keys), axis=2)
    return Rows(keys, rows.format, rows.mask)


def _lewis(rows: Rows, tau: Float64, rank: npt.NDArray[np.int64], p: float, iterations: int) -> Float64:
    r"""Bound by any weights.

    Let v = w^{1/2−1/p}, M = Σ v² k kᵀ, h = (kᵀM⁺k)^{p/2} and z = Ky. Then \|z_j\|^p ≤ h_j (yᵀMy)^{p/2}. Here
    (yᵀMy)^{p/2} is at most (Σw)^{p/2−1} ‖z‖_p^p for p ≥ 2 (Hölder). For p ≤ 2 it is at most c^{2/p−1} ‖z‖_p^p with
    c = max h/w.
    """
    v, weighted, moved, _ = iterated(rows, tau, rank, p, iterations)
    live = weighted > 0
    # in place, to save memory
    log_w = v if v.flags.writeable else v.copy()
    log_h = weighted.copy() if weighted is tau else weighted
    raised = p * np.log(moved)[:, None]

    def body(part: slice) -> None:
        with np.errstate(divide="ignore"):
            logs = np.log(log_w[:, part])
            log_h[:, part] = p / 2 * (np.log(log_h[:, part]) - 2 * logs) + raised
        log_w[:, part] = 2 * p / (p - 2) * logs

    by_chunks(body, log_w.shape[1])
    if p >= 2:
        top = np.max(log_w, axis=1, keepdims=True, initial=-np.inf, where=live)
        top = np.where(np.isfinite(top), top, 0.0)
        log_w -= top
        weights = np.exp(log_w, out=log_w)
        weights[~live] = 0.0
        total = np.sum(weights, axis=1, keepdims=True)
        constant = (p / 2 - 1) * (top + np.log(np.maximum(total, 1.0)))
    else:
        ratios = np.subtract(log_h, log_w, out=log_w)
        ratio = np.max(ratios, axis=1, keepdims=True, initial=-np.inf, where=live)
        constant = (2 / p - 1) * np.where(np.isfinite(ratio), ratio, 0.0)
    log_h += constant
    log_h += LOG_ERROR * (1 + p + 1 / p + p / abs(p - 2))
    return np.asarray(np.exp(np.minimum(log_h, 0.0, out=log_h), out=log_h))


DIRECT_BOUND = Certificate("leverage", lambda f: isinstance(f, Power), _direct)
LEWIS_BOUND = Certificate("lewis", lambda f: isinstance(f, Power) and not is_square(f), _of_each)
