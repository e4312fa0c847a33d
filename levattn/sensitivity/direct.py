"""The certificate of leverage scores alone, for powers: ‖Ky‖₂ against ‖Ky‖_p."""

from __future__ import annotations

import numpy as np

from levattn._core.arrays import to_numpy
from levattn._kernels import Float64, Rows
from levattn.functions import AttentionFunction, Power, Softmax
from levattn.linalg.factor import Factor
from levattn.sensitivity.certificate import LOG_ERROR, Problem

__all__ = ["Direct"]


class Direct:
    """Bounds from leverage scores; for x² these are the sensitivities themselves."""

    name = "leverage"

    def applies(self, f: AttentionFunction | Softmax) -> bool:
        """Tell whether f is a power."""
        return isinstance(f, Power)

    def is_cheap(self, _problem: Problem) -> bool:
        """Tell that "auto" takes it."""
        return True

    def bound(self, problem: Problem) -> tuple[Float64, Factor | None]:
        """Return bounds (b, n)."""
        return _direct(problem.tau, problem.growth, problem.rows), None


def _direct(tau: Float64, p: float, rows: Rows) -> Float64:
    """Bound by comparing ‖Ky‖₂ with ‖Ky‖_p; in logarithms, as large powers of small numbers leave the range."""
    with np.errstate(divide="ignore"):
        logs = np.log(tau)
    if p <= 2:
        constant = np.max(logs, axis=1, keepdims=True, initial=-np.inf)
        constant = np.where(np.isfinite(constant), constant, 0.0) * (1 - p / 2)
    else:
        n = np.full((len(tau), 1), tau.shape[1]) if rows.mask is None else to_numpy(rows.mask).sum(axis=1)[:, None]
        constant = (p / 2 - 1) * np.log(np.maximum(n, 1))
    return np.asarray(np.exp(np.minimum(constant + p / 2 * logs + LOG_ERROR * (1 + p), 0.0)))
