"""Second moments, and squared norms of the same rows while they are in the cache."""

from __future__ import annotations

from levattn._kernels.gram.moments import sum_tasks
from levattn._kernels.gram.squares import score_tasks
from levattn._kernels.jit import jit
from levattn._kernels.llvm import address, as_pointer, taken
from levattn._kernels.scratch import empty


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
def add_in_pairs(sums, pieces, groups, out):
    """Write the sums of the groups of pieces (first, number) to `out`, added in pairs of equally many rows.

    Pieces and groups have powers of two of rows, and begin at multiples of them. `sums` may have more columns, and are
    lost.
    """
    size = sums.shape[1] * sums.shape[2]
    waiting = empty(groups, (len(pieces) + 1, 2))  # sums that wait for an equal one, and their rows
    for g in range(len(groups)):
        count = 0
        for piece in range(groups[g, 0], groups[g, 0] + groups[g, 1]):
            at, rows = piece, pieces[piece, 3] - pieces[piece, 2]
            while count and waiting[count - 1, 1] == rows:
                count -= 1
                target = as_pointer(address(sums) + waiting[count, 0] * sums.strides[0], sums)
                term = as_pointer(address(sums) + at * sums.strides[0], sums)
                for k in range(size):
                    target[k] += term[k]
                at, rows = waiting[count, 0], 2 * rows
            waiting[count, 0], waiting[count, 1] = at, rows
            count += 1
        for i in range(out.shape[1]):
            for j in range(out.shape[2]):
                out[g, i, j] = sums[groups[g, 0], i, j]
