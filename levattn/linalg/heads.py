"""Many matrices in main memory: the moments, factor and scores of each in one task, which reads its keys once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from levattn._core.types import Float64
from levattn._kernels import BLOCK, Rows, kernels_for
from levattn.linalg.preconditioned import ROUNDING
from levattn.linalg.sums import ISOTROPIC, LONG, SINGLE_SUMS, range_of_squares, sampled_rows

if TYPE_CHECKING:
    from levattn._kernels.factor.heads import FactoredHeads

SINGLE_PRODUCTS = 2.0**-17  # estimated relative error of scores up to which products are in float32


def single_error(rows: Rows, spreads: Float64) -> Float64:
    """Return the estimated relative error of scores by products in float32, (b,).

    `spreads` (b,) are the sums of the squares of each W, for columns of unit norm.

    Let columns be equilibrated, with moment H, and products k W be rounded like a random walk. They change a score
    by about u √tr H⁻¹ at most. This holds because the largest ratio of Σ k_i² ‖W_i‖² to ‖k W‖² is at most Σ ‖W_i‖²
    for H_ii = 1. Where two parts of a mean are subtracted, entries are rounded twice before; once by a weight.
    """
    return np.asarray(kernels_for("gram", rows.keys).SINGLE_UNIT * np.sqrt(_roundings(rows) * spreads))


def _roundings(rows: Rows) -> int:
    return 1 + 2 * (rows.shift is not None) + (rows.weights is not None)


def single_bound(n: int) -> float:
    """Return the largest bound of the squared norm of an inverse factor for scores by products in float32."""
    return math.inf if n >= BLOCK else SINGLE_SUMS


def heads_if_many(rows: Rows, target: float, cut: float, single: str) -> FactoredHeads | None:
    """Return moments, factors and scores of matrices, as `factor_moments` finds them step by step without a ridge.

    There are no scores of matrices that need more steps. None stands for keys of which each step had better take all.
    """
    _, n, d = rows.shape
    if not isinstance(rows.keys, np.ndarray) or not d <= n < LONG:
        return None
    from levattn._kernels.factor.heads import ScoreLimits, factored_heads  # keys are in main memory

    narrow = rows.format != "float64" and single != "no"
    unit = kernels_for("gram", rows.keys).SINGLE_UNIT
    limits = ScoreLimits(
        uneven=ISOTROPIC,
        range=range_of_squares(rows, narrow),
        resolved=d * cut * cut,
        accepted=target / ROUNDING,
        quick=SINGLE_SUMS,
        single=single_bound(n),
        spread=(SINGLE_PRODUCTS / unit) ** 2 / _roundings(rows),
    )
    return factored_heads(rows, sampled_rows(rows, single), limits, "single" if narrow else "double")
