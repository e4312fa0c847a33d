"""The clusters of keys, compiled: places of keys, their clusters, and sums over clusters."""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import SCORE_ROWS, SCORE_VECTORS, VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import address, as_pointer, larger, smaller
from levattn._kernels.pruned.panels import (
    TILE_ROWS,
    multiply_rows,
    pack_columns,
    row_at_view,
    whole_tiles,
)
from levattn._kernels.pruned.simd import (
    accumulate,
    add_columns,
    approach,
    length_squared,
    matrix_tile,
    nearest,
    square_tile,
    squared,
    widen,
)
from levattn._kernels.scratch import clear, empty, filled, zeros

GUESSES = 4  # far rows that `farthest` multiplies at once: about two of them are chosen


@jit
def moments_of_rows(like, view, sizes, total, second, first, last):
    """Write ``Σ x`` over rows to (b, d), and ``Σ x xᵀ`` to (b, d, d) unless that has no rows, in float64.

    `sizes`: heads, and rows of each.
    """
    heads, n = sizes
    d, squares = total.shape[1], second.shape[1] > 0
    width = SCORE_VECTORS * (VECTOR_BYTES // total.itemsize)
    panels = (d + width - 1) // width
    deep = larger(whole_tiles(d), panels * width)
    rows, added = zeros(0.0, (TILE_ROWS, deep)), empty(0.0, (panels * width,))
    sums = empty(0.0, (whole_tiles(d) if squares else 0, panels * width))
    at, step = address(rows), deep * 8
    for item in range(first, last):
        clear(added, 0, added.size)
        clear(sums, 0, sums.size)
        stretches = (n + TILE_ROWS - 1) // TILE_ROWS
        for block in range(heads * stretches):
            head, low = block // stretches, block % stretches * TILE_ROWS
            count = smaller(TILE_ROWS, n - low)
            for r in range(count):
                widen(like, row_at_view(view, item, head, low + r), d, at + r * step)
            add_columns(rows, at, step, count, panels * SCORE_VECTORS, address(added))
            for p in range(panels if squares else 0):  # later rows are on the other side of the diagonal
                column, to = p * width * 8, address(sums) + p * width * 8
                for i in range(0, smaller(d, (p + 1) * width), SCORE_ROWS):
                    square_tile(
                        rows,
                        SCORE_ROWS,
                        SCORE_VECTORS,
                        at + i * 8,
                        at + column,
                        step,
                        count,
                        to + i * panels * width * 8,
                        panels * width * 8,
                    )
        for i in range(d):
            total[item, i] = added[i]
        for i in range(d if squares else 0):
            for j in range(i, d):
                second[item, i, j] = sums[i, j]
                second[item, j, i] = sums[i, j]


@jit
def place_tasks(like, view, origin, panels, X, along, first, last):
    """Write ``(k − origin) L`` and ``⟨query, k − origin⟩`` of blocks of rows; the query is the last column of L."""
    _, n, d = X.shape
    rows, out = zeros(like, (TILE_ROWS, d)), empty(like, (TILE_ROWS, panels.shape[1] * panels.shape[3]))
    stretches = (n + TILE_ROWS - 1) // TILE_ROWS
    for task in range(first, last):
        item, low = task // stretches, task % stretches * TILE_ROWS
        count = smaller(TILE_ROWS, n - low)
        for i in range(count):
            source = as_pointer(row_at_view(view, item, 0, low + i), like)
            for k in range(d):
                rows[i, k] = source[k] - origin[item, k]
        multiply_rows(False, rows, count, panels[item], d, out)
        for i in range(count):
            target = X[item, low + i]
            for k in range(d):
                target[k] = out[i, k]
            along[item, low + i] = out[i, d]


@helper
def row_room(like, n):
    """Return scratch of `farthest` for n rows: squares, least, labels and shut, then products and rows."""
    deep = (n + SCORE_VECTORS * VECTOR_BYTES // like.itemsize - 1) // (SCORE_VECTORS * VECTOR_BYTES // like.itemsize)
    deep *= SCORE_VECTORS * VECTOR_BYTES // like.itemsize
    return empty(like, (4, deep)), empty(like, (GUESSES, deep))


@helper
def farthest(like, panels, n, d, mean, room, rows, chosen):
    """Choose columns of panels that are far from one another: write their places, and the nearest choice of each.

    The farthest from the mean comes first, then always the farthest from all choices, on ties the first. `room`: from
    `row_room`, with `squares` and `shut` filled. Several far rows are multiplied at once, as likely next choices.
    """
    numbers, products = room
    width, deep = panels.shape[2], numbers.shape[1]
    squares, least, labels, shut = numbers[0], numbers[1], numbers[2], numbers[3]
    size = like.itemsize
    lanes, vectors = VECTOR_BYTES // size, deep * size // VECTOR_BYTES
    place, farthest_of = 0, like.dtype.type(-np.inf)
    for p in range(deep // width):
        away = least[p * width : (p + 1) * width]
        for j in range(width):
            away[j] = 0
        for k in range(d):
            row, middle = panels[p, k], mean[k]
            for j in range(width):
                gap = row[j] - middle
                away[j] += gap * gap
    for j in range(n):
        if least[j] + shut[j] > farthest_of:
            place, farthest_of = j, least[j] + shut[j]
        least[j] = np.inf
    for j in range(n, deep):
        least[j], shut[j] = np.inf, -np.inf
    names, far = filled(0, GUESSES, -1), empty(like, (2, lanes))
    for c in range(len(chosen)):
        found = -1
        for i in range(GUESSES):
            if names[i] == place:
                found = i
        if found < 0:
            names[0], count, found = place, 1, 0
            for lane in range(lanes if c else 0):
                value, j = far[0, lane], smaller(int(far[1, lane]), n - 1)
                if j != place and value > 0 and (count < GUESSES or value > least[names[count - 1]]):
                    at = smaller(count, GUESSES - 1)
                    while at > 1 and value > least[names[at - 1]]:
                        names[at] = names[at - 1]
                        at -= 1
                    names[at] = j
                    count = smaller(count + 1, GUESSES)
            for i in range(GUESSES):
                if i >= count:
                    names[i] = -1
                panel, lane = panels[larger(names[i], 0) // width], larger(names[i], 0) % width
                for k in range(d):
                    rows[i, k] = panel[k, lane]
            for p in range(deep // width):
                to = address(products) + p * width * size
                matrix_tile(
                    like, GUESSES, SCORE_VECTORS, 0, address(rows), d * size, address(panels[p]), d, to, deep * size
                )
        chosen[c] = place
        at = address(products) + found * deep * size
        place = approach(
            like,
            at,
            squares[place],
            address(squares),
            like.dtype.type(c),
            address(least),
            address(labels),
            address(shut),
            vectors,
            address(far),
        )


@helper
def square_columns(like, panels, d, room):
    """Write the squared lengths of the columns of panels, rounded like their products."""
    squares, width = room[0][0], panels.shape[2]
    for p in range(len(squares) // width):
        squared(like, address(panels[p]), SCORE_VECTORS, d, address(squares) + p * width * like.itemsize)


@jit
def far_tasks(X, weight, step, centers, labels, distances, first, last):
    """Write rows that are far from one another as centers (b, R, d), chosen among every `step`-th row.

    If the choice is among all rows, also write the nearest center of each row, and its squared distance.
    """
    _, n, d = X.shape
    count = (n + step - 1) // step
    room, rows = row_room(X, count), zeros(X, (GUESSES, d))
    width = SCORE_VECTORS * VECTOR_BYTES // X.itemsize
    panels = zeros(X, (room[0].shape[1] // width, d, width))
    sums, mean = empty(0.0, (d,)), empty(X, (d,))
    chosen = empty(0, (centers.shape[1],))
    for item in range(first, last):
        sums[:] = 0
        total, x = 0.0, X[item]
        for i in range(n):
            w = weight[item, i]
            if w > 0:
                total += w
                for k in range(d):
                    sums[k] += w * x[i, k]
        for k in range(d):
            mean[k] = sums[k] / (total if total > 0 else 1.0)
        for i in range(count):
            room[0][3, i] = 0 if weight[item, i * step] > 0 else -np.inf
        for p in range(len(panels)):
            at, here = address(x) + p * width * step * d * X.itemsize, smaller(width, count - p * width)
            pack_columns(X, at, step * d * X.itemsize, here, d, address(panels[p]))
        square_columns(X, panels, d, room)
        farthest(X, panels, count, d, mean, room, rows, chosen)
        for c in range(len(chosen)):
            for k in range(d):
                centers[item, c, k] = x[chosen[c] * step, k]
        for i in range(n if step == 1 else 0):
            labels[item, i], distances[item, i] = int(room[0][2, i]), room[0][1, i]


@jit
def pack_centers(centers, panels, norms, first, last):
    """Write centers times −2 to panels, and their squared norms, infinite for missing centers."""
    R, d = centers.shape[1:]
    width, size = panels.shape[3], panels.itemsize
    for item in range(first, last):
        norms[item] = np.inf
        for p in range(panels.shape[1]):
            at, here = address(centers[item]) + p * width * d * size, smaller(width, R - p * width)
            pack_columns(centers, at, d * size, here, d, address(panels[item, p]))
            for k in range(d):
                row = panels[item, p, k]
                for j in range(width):
                    row[j] *= -2
        for c in range(R):
            square = centers.dtype.type(0)
            for k in range(d):
                square += centers[item, c, k] * centers[item, c, k]
            norms[item, c] = square


@jit
def assign_tasks(X, panels, norms, labels, distances, first, last):
    """Write the nearest center of each row, and its squared distance, for blocks of rows."""
    _, n, d = X.shape
    size, width = X.itemsize, panels.shape[3]
    lanes = VECTOR_BYTES // size
    deep = panels.shape[1] * width
    rows, out = zeros(X, (TILE_ROWS, d)), empty(X, (TILE_ROWS, deep))
    squares, least = empty(X, (TILE_ROWS,)), empty(X, (1,))
    stretches = (n + TILE_ROWS - 1) // TILE_ROWS
    for task in range(first, last):
        item, low = task // stretches, task % stretches * TILE_ROWS
        here = smaller(TILE_ROWS, n - low)
        for i in range(here):
            source = X[item, low + i]
            square = X.dtype.type(0)
            for k in range(d):
                rows[i, k] = source[k]
                square += source[k] * source[k]
            squares[i] = square
        multiply_rows(False, rows, here, panels[item], d, out)
        for i in range(here):
            row_at = address(out) + i * deep * size
            label = nearest(X, row_at, address(norms[item]), deep // lanes, address(least))
            distance = least[0] + squares[i]
            labels[item, low + i] = label
            distances[item, low + i] = 0 if distance < 0 else distance


@jit
def add_tasks(like, view, width, labels, factor, total, first, last):
    """Add each row, times its factor, to the sum of its label (b, R, width) in float64; −1 is no label."""
    n, times = labels.shape[1], empty(0.0, (1,))
    for item in range(first, last):
        for i in range(n):
            c = labels[item, i]
            times[0] = factor[item, i]
            if c >= 0 and times[0] != 0:
                target = address(total) + (item * total.shape[1] + c) * width * 8
                accumulate(like, row_at_view(view, item, 0, i), address(times), width, target)


@jit
def level_tasks(labels, values, weight, total, mass, first, last):
    """Add the weighted values and the weights of entries to the sums of their labels, in float64."""
    for item in range(first, last):
        for i in range(labels.shape[1]):
            c = labels[item, i]
            if c >= 0:
                total[item, c] += values[item, i] * weight[item, i]
                mass[item, c] += weight[item, i]


@helper
def vector_row(d):
    """Return scratch for d numbers in whole vectors."""
    return zeros(0.0, ((d + VECTOR_BYTES // 8 - 1) // (VECTOR_BYTES // 8) * (VECTOR_BYTES // 8),))


@helper
def far_of(own, own_weight, other, other_weight, gap):
    """Return the distance of the means of two summaries, from their sums and weights; gap: from `vector_row`."""
    d = len(other)
    inverse = 1.0 / own_weight if own_weight > 0 else 1.0
    whole = 1.0 / other_weight if other_weight > 0 else 1.0
    for k in range(d):
        gap[k] = own[k] * inverse
    for k in range(d):
        gap[k] -= other[k] * whole
    square, scale = length_squared(gap, address(gap), len(gap) * 8 // VECTOR_BYTES), 1.0
    if not 1e-200 < square < 1e200:  # a square may have under- or overflowed
        scale = 0.0
        for k in range(d):
            scale = larger(scale, abs(gap[k]))
        square, scale = 0.0, scale if scale > 0 else 1.0
        for k in range(d):
            square += (gap[k] / scale) ** 2
    return scale * np.sqrt(square)


@jit
def radius_tasks(labels, keys, weight, item_radii, centers, center_weight, radii, first, last):
    """Raise the radius of each label to a bound of its items' distances from the center; weights divide keys."""
    n, d = keys.shape[1:]
    gap, up = vector_row(d), 1 + (d + 8) * 2.0**-52
    for item in range(first, last):
        for i in range(n):
            c = labels[item, i]
            if c >= 0:
                far = far_of(keys[item, i], weight[item, i], centers[item, c], center_weight[item, c], gap)
                far = up * (item_radii[item, i] + far)
                if not far <= radii[item, c]:
                    radii[item, c] = far
