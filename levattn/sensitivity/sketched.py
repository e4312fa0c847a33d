"""Approximate leverage scores with bounds that hold with a known probability."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from levattn._core.arrays import to_device
from levattn._core.device import where_arrays_are
from levattn.sensitivity.approximate import FAILURE, screen, sketches_of
from levattn.sensitivity.leverage import check_method, read_keys, rows_of
from levattn.sensitivity.shown import keys_of, span


@dataclass(frozen=True, repr=False, eq=False)
class SketchedScores:
    """Approximate leverage scores, and what is known of their errors.

    The result of `sketched_scores`.

    Attributes
    ----------
    scores : array of shape (..., n)
        The approximate scores, as `leverage_scores` returns them for the same method, in float64.
    lower, upper : array of shape (..., n)
        Bounds between which all exact scores lie, except with probability `failure`.
    distortion : float or array of float64, shape (...)
        The measured η: the sketch of the rows changes every ``‖K y‖²`` by a factor within 1 ± η, except with
        probability `failure`. It is 0 without such a sketch, and infinite where it loses a direction.
    failure : float
        The probability with which a bound may fail.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.random.default_rng(0).standard_normal((3000, 8))
    >>> found = levattn.sketched_scores(K, "osnap")
    >>> exact = levattn.leverage_scores(K)
    >>> bool(np.all((found.lower <= exact) & (exact <= found.upper))), bool(found.distortion < 1)
    (True, True)
    """

    scores: Any
    lower: Any
    upper: Any
    distortion: Any
    failure: float

    @where_arrays_are
    def __repr__(self) -> str:
        """Return the figures on one line; for a batch the least and largest distortion."""
        total = f", total={float(self.scores.sum()):.6g}" if self.scores.ndim == 1 else ""
        figures = f"distortion={span(self.distortion)}, failure={self.failure:.6g}"
        return f"SketchedScores({keys_of(self.scores)}{total}, {figures})"


@where_arrays_are
def sketched_scores(
    K: Any, /, method: Any = "osnap", *, center: bool = False, mask: Any = None, weights: Any = None
) -> SketchedScores:
    r"""Approximate leverage scores with their error: bounds of each score, and the measured distortion η.

    Let S be a sketch of the rows and W the factor of SK. With the extremes λ of the eigenvalues of
    :math:`W^T K^T K W`, each score lies between ``‖Wᵀk‖²/λ_max`` and ``‖Wᵀk‖²/λ_min``. The extremes are measured, so
    that the bounds hold whatever the quality of the sketch.

    They fail with a probability of at most 1e-6, over the random start of Lanczos' method and the random projection.
    Up to d = 320 the extremes come from the factor of the keys, and bounds of a sketch without a projection are sure.

    Parameters
    ----------
    K : array of shape (..., n, d)
        Keys, as in `leverage_scores`; also one sparse matrix.
    method : sketch or its name, default "osnap"
        An approximate method of `leverage_scores`.
    center : bool, default False
        Whether the mean of the keys is subtracted first.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part.
    weights : array of float, broadcast to (..., n), optional
        The weight of each key, as in `leverage_scores`.

    Returns
    -------
    SketchedScores
        Scores, bounds, the distortion and the probability with which they may fail.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, or the method is exact.
    NonFiniteError
        If the keys hold NaN or infinity outside the mask; the first such rows are named.

    See Also
    --------
    leverage_scores : Exact scores, or the approximate ones alone.
    universal_set : A certified superset by the upper bounds.

    Notes
    -----
    The time of `leverage_scores` by the same method, and the time to measure the distortion. This takes O(n d²) up to
    d = 320, and some 80 products of K and a vector beyond. Memory O(d² + n) beyond K and the sketch.

    References
    ----------
    Drineas, Magdon-Ismail, Mahoney and Woodruff, "Fast approximation of matrix coherence and statistical leverage",
    JMLR 13, 2012. Kuczyński and Woźniakowski, 1992, Theorem 4.2, for the measured extremes.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> from levattn.sketch import OSNAP
    >>> K = np.random.default_rng(0).standard_normal((3000, 8))
    >>> found = levattn.sketched_scores(K, OSNAP(1000, seed=1))
    >>> bool(found.distortion < 0.3), found.failure
    (True, 1e-06)
    """
    if not check_method(method):
        raise ValueError(f"method is {method!r}, which is exact; expected a sketch. Use leverage_scores")
    matrices, roots, _ = read_keys(K, mask, weights, center)
    left, right = sketches_of(method, matrices.n, matrices.d)
    found = screen(replace(rows_of(matrices, center), weights=roots), left, right)
    with np.errstate(divide="ignore"):
        distortion = np.maximum(1 / found.ends[:, 0] - 1, 1 - 1 / found.ends[:, 1])
    parts = found.scores, found.lower, found.upper
    scores, lower, upper = (matrices.wrap(to_device(part, matrices.data)) for part in parts)
    return SketchedScores(scores, lower, upper, np.maximum(distortion, 0.0).reshape(matrices.batch)[()], FAILURE)
