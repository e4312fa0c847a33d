"""The renewal of a causal selection, compiled: all steps of the selection in one kernel."""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import SCORE_ROWS, SCORE_VECTORS, VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import address, as_pointer, larger, smaller, subtract_rows
from levattn._kernels.pruned import JITTER, SAME, SPREAD_ROUNDING, TILT
from levattn._kernels.pruned.clusters import GUESSES, far_of, farthest, row_room, square_columns, vector_row
from levattn._kernels.pruned.panels import multiply_panels, pack_columns, row_at_view, whole_tiles
from levattn._kernels.pruned.simd import accumulate
from levattn._kernels.scratch import clear, empty, zeros


@helper
def _root(total, second, count, mean, L):
    """Write the mean of queries and a factor of their second moment about it; return whether there is one."""
    d = len(mean)
    trace, whole = 0.0, 0.0
    for i in range(d):
        mean[i] = total[i] / count
    for i in range(d):
        for j in range(d):
            L[i, j] = second[i, j] / count - mean[i] * mean[j]
        trace += L[i, i]
        whole += second[i, i] / count
    least = larger(trace / d * JITTER, whole * SPREAD_ROUNDING)
    for i in range(d):
        L[i, i] += least if least > 0 else 1.0
    lanes, step, at = VECTOR_BYTES // 8, L.shape[1], address(L)
    for i in range(d):  # each row less the rows before it, four at a time; rows not yet made count as zeros
        low = i // lanes * lanes
        for k in range(0, i, 4):
            a, b, c, e = L[k, i], L[k + 1, i], L[k + 2, i], L[k + 3, i]
            b, c, e = b if k + 1 < i else 0.0, c if k + 2 < i else 0.0, e if k + 3 < i else 0.0
            subtract_rows(
                at + (i * step + low) * 8, at + (k * step + low) * 8, step, a, b, c, e, (step - low) // lanes
            )
        pivot = L[i, i]
        if not 0 < pivot < np.inf:
            return False
        scale = 1 / np.sqrt(pivot)
        for j in range(i, d):
            L[i, j] *= scale
    return True


@helper
def _choose(scores, count, flags, room):
    """Flag the `count` largest scores, on ties the first."""
    n, low, high, rank = len(scores), 0, len(scores) - 1, count - 1
    for i in range(n):
        room[i] = scores[i]
    while low < high:  # Hoare's selection of the smallest chosen score
        pivot, i, j = room[(low + high) // 2], low, high
        while i <= j:
            while room[i] > pivot:
                i += 1
            while room[j] < pivot:
                j -= 1
            if i <= j:
                room[i], room[j] = room[j], room[i]
                i += 1
                j -= 1
        if rank <= j:
            high = j
        elif rank >= i:
            low = i
        else:
            break
    left = count
    for i in range(n):
        left -= count > 0 and scores[i] > room[rank]
    for i in range(n):
        tie = left > 0 and scores[i] == room[rank]
        flags[i] = count > 0 and (tie or scores[i] > room[rank])
        left -= tie


@helper
def _row(kept, view, item, i):
    """Return the address of row i among kept rows, followed by leaving rows."""
    _, s, width = kept.shape
    return address(kept) + (item * s + i) * width * kept.itemsize if i < s else row_at_view(view, item, 0, i - s)


@helper
def _balance(row, values, scalars):
    """Scale a summary to weights with a mean of 1; scalars: weight, offset and count."""
    factor = scalars[2] / scalars[0]
    for k in range(len(row)):
        row[k] *= factor
    for k in range(len(values)):
        values[k] *= factor
    scalars[1] = factor * (scalars[1] + np.log(factor) * scalars[0])
    scalars[0] *= factor


@helper
def _place(like, item, given, origin, turned, item_rows, packed, X, sums, shut, times, n):
    """Write n items, less the origin, and their places X to panels, and their sums; return their weight.

    `turned`: the transposed factor of the measure, then the mean query. `shut`: as for `farthest`.
    """
    kept, _, views, held, _, scalars = given
    d, before, size, width, tall = kept.shape[2], held.shape[1], like.itemsize, packed.shape[2], X.shape[1]
    weight = 0.0
    for i in range(n):
        own, item_row = 1.0, item_rows[i % width]
        if i < before:
            own = scalars[item, i, 2]
            inverse = 1.0 / scalars[item, i, 0] if own > 0 else 1.0
            for k in range(d):
                item_row[k] = like.dtype.type(held[item, i, k] * inverse) - origin[item, k]
        else:
            source = as_pointer(_row(kept, views[0], item, i - before), like)
            for k in range(d):
                item_row[k] = source[k] - origin[item, k]
        if i % width == width - 1 or i == n - 1:
            pack_columns(like, address(item_rows), d * size, i % width + 1, d, address(packed[i // width]))
        times[0] = own
        accumulate(like, address(item_row), address(times), d, address(sums))
        weight += own
        shut[i] = 0 if own > 0 else -np.inf
    for p in range(len(packed)):
        for r in range(0, tall, SCORE_ROWS):  # of a triangle, followed by the query
            low = r if r + SCORE_ROWS <= d else 0
            at, from_at = address(packed[p]) + low * width * size, address(turned) + (r * d + low) * size
            to = address(X[p]) + r * width * size
            multiply_panels(like, False, from_at, d * size, SCORE_ROWS, at, 1, 0, d - low, to, width * size)
    return weight


@helper
def _keep(like, item, to, flags, places, kept, kept_values, views, new_kept, new_values, new_places):
    """Write the flagged keys, their values and their places into item `to`."""
    d, D = kept.shape[2], kept_values.shape[2]
    at = 0
    for i in range(len(flags)):
        if flags[i]:
            new_places[to, at] = places[i]
            source = as_pointer(_row(kept, views[0], item, i), like)
            others = as_pointer(_row(kept_values, views[1], item, i), like)
            for k in range(d):
                new_kept[to, at, k] = source[k]
            for k in range(D):
                new_values[to, at, k] = others[k]
            at += 1


@helper
def _sum_up(like, item, to, given, labels, along, level, times, summed, summed_values, new_scalars):
    """Write the summaries of items by labels, −1 for none, into item `to`.

    along: log mass at the mean query per unit of weight.
    """
    kept, kept_values, views, held, held_values, scalars = given
    d, D, before, R = kept.shape[2], kept_values.shape[2], held.shape[1], summed.shape[1]
    clear(summed, to * R * d, R * d)
    clear(summed_values, to * R * D, R * D)
    clear(new_scalars, to * R * 3, R * 3)
    for c in range(R):
        level[0, c] = level[1, c] = 0
    for i in range(len(along)):
        own = scalars[item, i, 2] if i < before else 1.0
        if own <= 0:
            labels[i] = -1
        c = int(labels[i])
        if c >= 0:
            level[0, c] += own * along[i]
            level[1, c] += own
    for i in range(len(along)):
        c = int(labels[i])
        if c < 0:
            continue
        tilt = float(along[i]) - level[0, c] / level[1, c]
        tilt = larger(-TILT, smaller(TILT, tilt))
        factor = np.exp(tilt)
        times[0] = factor
        target, whole, shift, members = new_scalars[to, c], 1.0, 0.0, 1.0
        keys_to, values_to = address(summed) + (to * R + c) * d * 8, address(summed_values) + (to * R + c) * D * 8
        if i < before:
            row = item * before + i
            accumulate(level, address(held) + row * d * 8, address(times), d, keys_to)
            accumulate(level, address(held_values) + row * D * 8, address(times), D, values_to)
            whole, shift, members = scalars[item, i, 0], scalars[item, i, 1], scalars[item, i, 2]
        else:
            accumulate(like, _row(kept, views[0], item, i - before), address(times), d, keys_to)
            accumulate(like, _row(kept_values, views[1], item, i - before), address(times), D, values_to)
        target[0] += factor * whole
        target[1] += factor * (shift + tilt * whole)
        target[2] += members
    for c in range(R):
        if new_scalars[to, c, 2] > 0:
            _balance(summed[to, c], summed_values[to, c], new_scalars[to, c])


@helper
def _bound(like, item, to, given, labels, count, radius, summed, new_scalars, new_radius, gap):
    """Write bounds of the distances of members of summaries from their means."""
    kept, _, views, held, _, scalars = given
    d, before = kept.shape[2], held.shape[1]
    for c in range(new_radius.shape[1]):
        new_radius[to, c] = 0
    for i in range(count):
        c = int(labels[i])
        if c < 0:
            continue
        whole = new_scalars[to, c, 0]
        if i < before:
            far = far_of(held[item, i], scalars[item, i, 0], summed[to, c], whole, gap) + radius[item, i]
        else:
            far = far_of(as_pointer(_row(kept, views[0], item, i - before), like), 1.0, summed[to, c], whole, gap)
        far *= 1 + (d + 8) * 2.0**-52
        if not far <= new_radius[to, c]:
            new_radius[to, c] = far


@jit
def renewal_tasks(
    like,
    views,
    sizes,
    queries,
    kept,
    kept_values,
    kept_places,
    held,
    held_values,
    scalars,
    radius,
    total,
    second,
    origin,
    new_kept,
    new_values,
    new_places,
    summed,
    summed_values,
    new_scalars,
    new_radius,
    sound,
    first,
    last,
):
    """Write the kept keys and the summaries after renewals in turn, and whether their numbers were finite.

    A task is a sequence. Arrays have an item for each chunk of each of b sequences: see `panels`. The results of item
    i go into item i + `ahead`: into the next chunk if `ahead` is b.

    `views`: of the leaving keys and values. `sizes`: their number, the position of the first, sinks, whether scores
    are residuals, and `ahead`. `queries`: their number at each renewal. `scalars`, `new_scalars`: (items, R, 3),
    weights, offsets and counts of summaries.
    """
    leaving, oldest, sinks, residual, ahead = sizes
    b = len(sound) // len(queries)
    s, d = kept.shape[1:]
    before, R = held.shape[1], summed.shape[1]
    n = before + s + leaving
    candidates = n - before
    room, rows = row_room(like, n), zeros(like, (GUESSES, d))
    width = SCORE_VECTORS * VECTOR_BYTES // like.itemsize
    count, tall = room[0].shape[1] // width, whole_tiles(d + 1)
    packed, X = zeros(like, (count, d, width)), empty(like, (count, tall, width))
    gap, times = vector_row(d), empty(0.0, (1,))
    L, turned = zeros(0.0, ((d + 3) // 4 * 4, len(gap))), zeros(like, (tall, d))
    query, sums, mean = empty(0.0, (d,)), empty(0.0, (d,)), empty(like, (d,))
    item_rows, along, chosen = empty(like, (width, d)), empty(like, (n,)), empty(0, (R,))
    scores, order = empty(like, (candidates,)), empty(like, (candidates,))
    flags, places = empty(0, (candidates,)), empty(0, (candidates,))
    level = empty(0.0, (2, R))
    squares, least, labels, shut = room[0][0], room[0][1], room[0][2], room[0][3]
    tiny = like.dtype.type(1e-30)
    for task in range(first * len(queries), last * len(queries)):
        item, turn = task // len(queries) + task % len(queries) * b, task % len(queries)
        to = item + ahead
        sound[item] = _root(total[item], second[item], queries[turn], query, L)
        if not sound[item]:
            continue
        for k in range(d):
            sums[k] = 0
            turned[d, k] = query[k]
            for j in range(d):
                turned[j, k] = L[j, k] if k >= j else 0.0
        given = kept, kept_values, views, held, held_values, scalars
        weight = _place(like, item, given, origin, turned, item_rows, packed, X, sums, shut, times, n)
        square_columns(like, X, d, room)
        for i in range(n):
            along[i] = X[i // width, d, i % width]
            if i < before and scalars[item, i, 2] > 0:
                along[i] -= like.dtype.type(scalars[item, i, 1] / scalars[item, i, 0])
            sound[item] &= np.isfinite(squares[i]) and np.isfinite(along[i])
        if not sound[item]:
            continue
        for stage in range(2):  # residuals need clusters of all keys; otherwise kept keys are in no cluster
            if (stage == 0) == residual:
                for j in range(d):
                    middle = 0.0
                    for k in range(j, d):
                        middle += turned[j, k] * sums[k]
                    mean[j] = middle / weight if weight > 0 else 0.0
                if R:
                    farthest(like, X, n, d, mean, room, rows, chosen)
                else:
                    for i in range(n):
                        least[i], labels[i] = squares[i], -1
                continue
            for i in range(candidates):
                at = before + i
                scores[i] = along[at] + squares[at] / 2
                if residual:
                    scores[i] += np.log(larger(least[at], larger(SAME * squares[at], tiny)))
                places[i] = kept_places[item, i] if i < s else oldest + turn * leaving + i - s
                if places[i] < sinks:
                    scores[i] = np.inf
            _choose(scores, new_kept.shape[1], flags, order)
            for i in range(candidates):
                if flags[i] and not residual:
                    at = before + i
                    shut[at] = -np.inf
                    weight -= 1
                    for k in range(d):
                        sums[k] -= packed[at // width, k, at % width]
        _keep(like, item, to, flags, places, kept, kept_values, views, new_kept, new_values, new_places)
        for i in range(candidates):
            if flags[i]:
                labels[before + i] = -1
        _sum_up(like, item, to, given, labels, along, level, times, summed, summed_values, new_scalars)
        if new_radius.shape[1]:
            _bound(like, item, to, given, labels, n, radius, summed, new_scalars, new_radius, gap)
