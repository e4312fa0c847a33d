"""The screen of the blocks of a stream as they come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from levattn._core.checks import TIE
from levattn._core.types import Float64, Int64
from levattn._kernels import Arithmetic, kernels_for
from levattn.linalg.factor import Factor
from levattn.linalg.gram import PLAIN_ERROR, PLAIN_NOISE, DoubleDouble

_NARROW = 2.0**-60  # squares of columns, and ε, above which float32 has the range for a screen
_SINGLE_ERROR = 2.0**-8  # largest error of a score of such a screen


class Screen:
    """The factor that screens blocks as they come, in float32 where its precision suffices.

    plain: whether all scores are ``‖Wᵀk‖²`` in one arithmetic, whatever the key.
    """

    def __init__(self, factor: Factor, moments: DoubleDouble, raised: Float64 | None, epsilon: float) -> None:
        error, (b, d) = factor.score_error, moments.high.shape[:2]
        simple = np.ones(b, np.bool_)
        for found in (factor.null_directions, factor.spans, factor.hidden):
            simple[list(found)] = False
        if factor.rows.scale is not None:
            simple &= (factor.rows.scale == 1).all(axis=1)
        # ‖|W|ᵀ|k|‖ is at most √(d B) ‖Wᵀk‖, where B bounds the squared inverse, so that four times this is proven;
        # an error below PLAIN_ERROR tells B
        unit = kernels_for("gram", factor.rows.keys).SINGLE_UNIT
        single = error + unit / 2 * (d + 4) * np.sqrt(d * factor.error / PLAIN_NOISE)
        diagonal = moments.diagonal
        near = ((diagonal > _NARROW) & (diagonal < 1 / _NARROW)).all(axis=1) & (epsilon > _NARROW)
        quick = simple & near & (single <= _SINGLE_ERROR) & (factor.error < PLAIN_ERROR)
        arithmetic: list[Arithmetic] = ["single" if q else a for q, a in zip(quick, factor.arithmetic, strict=True)]
        error, factor = np.where(quick, single, error), replace(factor, arithmetic=tuple(arithmetic))
        reached = bool((factor.rank == d).all())
        self.plain = bool(simple.all()) and reached and set(arithmetic) in ({"single"}, {"double"})
        self.factor = factor
        least = np.maximum(epsilon * (1 - np.maximum(4 * error, TIE)), 0.0)
        both = np.stack([least / (1 - least), least])  # x/(1 + x) with the key itself, x without
        self._least = both if raised is None else both / raised

    def reached(self, scores: Any, present: Any, member: bool) -> tuple[Int64, Any]:
        """List the scores (b, m) that are not surely too small; `member` if the keys are among the screen's."""
        return kernels_for("select", scores).reaching(scores, present, self._least[int(member)])
