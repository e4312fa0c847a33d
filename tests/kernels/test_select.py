"""Thresholds of scores: what they decide does not depend on the precision in which scores are held.

Inside: the kernel is judged for counts that no call asks for.
"""

from __future__ import annotations

import numpy as np

from levattn._kernels.select import definition


def test_bounds_of_narrow_scores_compare_as_in_float64() -> None:
    rng = np.random.default_rng(0)
    bounds = np.concatenate([rng.random(3000) * 10.0 ** rng.integers(-50, 41, 3000), [0.0, np.inf, -np.inf, np.nan]])
    nearest = bounds.astype(np.float64).clip(-3e38, 3e38).astype(np.float32)
    scores = np.stack([nearest, *(np.nextafter(nearest, np.float32(end)) for end in (-np.inf, np.inf))], axis=1)
    wide = definition.threshold(scores.astype(np.float64), None, bounds, bounds)
    for found, expected in zip(definition.threshold(scores, None, bounds, bounds), wide, strict=True):
        assert np.array_equal(found, expected)
