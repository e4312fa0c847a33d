"""Moments, inverse Cholesky factors and scores of whole matrices, each while its keys are in the cache."""

from __future__ import annotations

from levattn._kernels.factor.cholesky import factor_items
from levattn._kernels.gram.moments import sum_tasks
from levattn._kernels.gram.sample import sample_items
from levattn._kernels.gram.squares import panels_of, score_tasks, write_panels
from levattn._kernels.jit import helper, jit
from levattn._kernels.llvm import address, taken

# The places in the vector of limits, in the order of `ScoreLimits`
UNEVEN, LEAST, LARGEST, RESOLVED, ACCEPTED, QUICK, SINGLE, SPREAD = range(8)
# The places in the vector of sizes: the rows that are summed before sums are combined, and the number of partial sums
UNIT, LEVELS = range(2)


@helper
def _accepted(G, bound, spread, most, single, limits):
    """Tell whether the factor of the moment G is the last one, and `single` precision serves its scores."""
    if not (bound <= most and bound * limits[RESOLVED] < 1):
        return False
    if single and not (bound <= limits[SINGLE] and spread <= limits[SPREAD]):
        return False
    inside = True
    for i in range(len(G)):
        inside = inside and limits[LEAST] <= G[i, i] <= limits[LARGEST]
    return inside


@jit
def head_tasks(views, X, Y, sizes, limits, samples, tasks, place, most, made, uneven, bounds, top, scores, scored):
    """Sum, factor and score at most `most` heads from number ``place[0]`` on, which other threads take as well.

    There are two `views` of keys, one for sums in float64, as X, and one for scores in the precision of Y. Sums have
    that precision too where a sample of the rows is hardly `uneven`; without samples nowhere. `bounds` is room for the
    limits of bounds. Scores are at most `top`, and `scored` becomes true for heads that have them. See `sum_tasks`,
    `cholesky_tasks` and `score_tasks`.
    """
    moments, W, figures = made
    next_at = address(place)
    panels = panels_of(Y)
    for _ in range(most):
        t = taken(next_at)
        if t >= len(tasks):
            break
        quick = False
        if len(samples) > 0:
            sample_items(views[1], Y, 2, X.shape[1], samples, t, t + 1, moments, uneven)
            quick = uneven[t] <= limits[UNEVEN]
        if quick:
            sum_tasks(views[1], Y, sizes[UNIT], sizes[LEVELS], tasks, t, t + 1, moments)
        else:
            sum_tasks(views[0], X, sizes[UNIT], sizes[LEVELS], tasks, t, t + 1, moments)
        bounds[t] = limits[QUICK] if quick else limits[ACCEPTED]
        factor_items(moments, 0.0, bounds, t, t + 1, W, figures)
        if _accepted(moments[t], figures[1, t], figures[2, t], bounds[t], Y.itemsize == 4, limits):
            write_panels(W[t], panels[0])
            score_tasks(views[1], panels, Y, tasks, t, t + 1, top, scores)
            scored[t] = True
