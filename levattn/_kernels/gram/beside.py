"""Second moments, and squared norms of the same rows while they are in the cache."""

from __future__ import annotations

from levattn._kernels.gram.moments import sum_tasks
from levattn._kernels.gram.squares import score_tasks
from levattn._kernels.jit import jit
from levattn._kernels.llvm import address, as_pointer, taken


@jit
def moment_and_sqnorm_tasks(view, X, block, levels, sums, scored, panels, Y, ceiling, scores, tasks, place, most):
    """Sum and score the rows of at most `most` tasks, from number ``place[0]`` on, which other threads take as well.

    See `sum_tasks` and `score_tasks`. Between tasks no thread waits for the GIL.
    """
    next_at = address(place)
    for _ in range(most):
        t = taken(next_at)
        if t >= len(tasks):
            break
        sum_tasks(view, X, block, levels, tasks, t, t + 1, sums)
        score_tasks(scored, panels, Y, tasks, t, t + 1, ceiling, scores)


@jit
def add_in_pairs(sums, groups):
    """Add up matrices in pairs, pairs of pairs, and so on, for each of the groups (first, number), into its first.

    Each number is a power of two.
    """
    size = sums.shape[1] * sums.shape[2]
    for g in range(len(groups)):
        apart, count = 1, groups[g, 1]
        while apart < count:
            for i in range(groups[g, 0], groups[g, 0] + count, 2 * apart):
                target = as_pointer(address(sums) + i * sums.strides[0], sums)
                term = as_pointer(address(sums) + (i + apart) * sums.strides[0], sums)
                for k in range(size):
                    target[k] += term[k]
            apart *= 2
