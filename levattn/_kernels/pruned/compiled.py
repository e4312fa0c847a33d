"""Pruned attention, compiled: mixtures over kept keys, summaries and near keys, and the clusters of keys.

Products are tiles of rows by panels: PANEL numbers of each of n rows side by side, and the rows one behind the other.
A row of logits has the kept keys first, then the summaries, then the near keys, each part in whole panels. `bias` is
added to it: what says that a place is empty (−inf), and the logarithm of what a summary stands for.

A view is (address, steps in bytes between items, heads and rows). Names that end in _at are addresses.
"""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import SCORE_ROWS, SCORE_VECTORS, VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import address, as_pointer, larger, smaller
from levattn._kernels.pruned.simd import apart, exponentials, matrix_tile, nearest, raised
from levattn._kernels.scratch import clear, empty, filled, zeros

__all__ = [
    "ROWS",
    "add_tasks",
    "assign_tasks",
    "far_tasks",
    "level_tasks",
    "mixture_tasks",
    "moment_tasks",
    "pack_centers",
    "pack_slots",
    "place_tasks",
    "radius_tasks",
]

ROWS = 48  # of a block: whole tiles on all machines, and their logits stay in the second cache


@helper
def _row_at(view, item, head, row):
    return view[0] + item * view[1] + head * view[2] + row * view[3]


@helper
def _row_of(X, row):
    """Return a pointer to a row of a C array, by its number in all of it."""
    return as_pointer(address(X) + row * X.shape[X.ndim - 1] * X.itemsize, X)


@helper
def _pack_column(source, factor, panels, column):
    """Write a row times a factor as a column of panels (panels, n, width)."""
    width = panels.shape[2]
    panel, lane = panels[column // width], column % width
    for k in range(panels.shape[1]):
        panel[k, lane] = source[k] * factor


@helper
def _pack_row(source, factor, n, panels, row):
    """Write n numbers times a factor as a row of panels, and zeros behind them."""
    width = panels.shape[2]
    for p in range(len(panels)):
        target, low = panels[p, row], p * width
        here = smaller(width, n - low)
        for j in range(here):
            target[j] = source[low + j] * factor
        for j in range(larger(here, 0), width):
            target[j] = 0


@helper
def _products(like, adds, x_at, x_step, rows, panels_at, count, step, n, to_at, to_step):
    """Write the products of rows (whole tiles of them) with panels of n rows, or add them if `adds`."""
    for p in range(count):
        panel, to = panels_at + p * step, to_at + p * SCORE_VECTORS * VECTOR_BYTES
        for r in range(0, rows, SCORE_ROWS):
            x, out = x_at + r * x_step, to + r * to_step
            if adds:
                matrix_tile(like, SCORE_ROWS, SCORE_VECTORS, 1, x, x_step, panel, n, out, to_step)
            else:
                matrix_tile(like, SCORE_ROWS, SCORE_VECTORS, 0, x, x_step, panel, n, out, to_step)


@helper
def _whole_tiles(rows):
    return (rows + SCORE_ROWS - 1) // SCORE_ROWS * SCORE_ROWS


@jit
def pack_slots(
    keys,
    values,
    count,
    weight,
    means,
    mean_values,
    offset,
    members,
    power,
    key_panels,
    value_panels,
    bias,
    first,
    last,
):
    """Write kept keys (b, s, d) and values, and summaries as means, to panels; `count` (b,) of the keys are there."""
    s, R, width = keys.shape[1], weight.shape[1], key_panels.shape[3]
    begin = (s + width - 1) // width * width
    D = values.shape[2]
    nothing, one = 0.0 if power else -np.inf, keys.dtype.type(1)
    many_keys, many_values, places = key_panels[0].size, value_panels[0].size, bias.shape[1]
    for item in range(first, last):
        clear(key_panels, item * many_keys, many_keys)
        clear(value_panels, item * many_values, many_values)
        for j in range(places):
            bias[item, j] = nothing
        for j in range(smaller(count[item], s)):
            row = item * s + j
            _pack_column(_row_of(keys, row), one, key_panels[item], j)
            _pack_row(_row_of(values, row), one, D, value_panels[item], j)
            bias[item, j] = 0
        for c in range(R):
            if members[item, c] > 0.5:
                row = item * R + c
                inverse = means.dtype.type(1) / weight[item, c]
                _pack_column(_row_of(means, row), inverse, key_panels[item], begin + c)
                _pack_row(_row_of(mean_values, row), inverse, D, value_panels[item], begin + c)
                shift = -offset[item, c] / weight[item, c]
                bias[item, begin + c] = shift if power else np.log(weight[item, c]) + shift


@helper
def _take_out(row, bias, begin, near, low, high, role, weight, log_weight, sums, power, room):
    """Take the near keys low to high out of the summaries in a row of logits; return how many these are.

    sums: weight, offset and count of each summary. room: marks, which summaries, and their weights afterwards.
    """
    marks, which, after, gone = room
    touched = 0
    for j in range(low, high):
        c = role[j]
        if c >= 0:
            if marks[c] < 0:
                marks[c], which[touched] = touched, c
                for i in range(3):
                    gone[i, touched] = 0
                touched += 1
            t = marks[c]
            gone[0, t] += weight[j]
            gone[1, t] += weight[j] * (row[near + j] - log_weight[j])
            gone[2, t] += 1
    for t in range(touched):
        c = which[t]
        whole, place = sums[0, c], begin + c
        left = whole - gone[0, t]
        after[t] = 0
        if sums[2, c] - gone[2, t] > 0.5 and left > 0:
            after[t] = left
            mean = (whole * row[place] - sums[1, c] - gone[1, t]) / left
            row[place] = mean - bias[place] if power else mean + np.log(left) - bias[place]
        else:
            row[place] = 0.0 if power else -np.inf
    return touched


@helper
def _put_right(row, begin, near, low, high, role, weight, sums, touched, room):
    """Make weights of a row those of the values in memory: of whole summaries, less what near keys have in them."""
    marks, which, after, gone = room
    for t in range(touched):
        c = which[t]
        gone[0, t] = row[begin + c] / after[t] if after[t] > 0 else 0.0
        row[begin + c] = gone[0, t] * sums[0, c]
    for j in range(low, high):
        c = role[j]
        if c >= 0:
            row[near + j] -= weight[j] * gone[0, marks[c]]
    for t in range(touched):
        marks[which[t]] = -1


@helper
def _powers(row, bias, begin, near, power, sums, touched, room):
    """Replace logits of a row by powers relative to the largest; return the sum, and that of summaries alone."""
    _, which, after, _ = room
    top = 0.0
    for j in range(len(row)):
        row[j] = abs(row[j] + bias[j])
        top = row[j] if row[j] > top else top
    if top == 0:
        top = 1.0
    total, share = 0.0, 0.0
    for j in range(len(row)):
        x = row[j] / top
        row[j] = x * x if power == 2 else x**power
    for t in range(touched):  # the others stand for all of their members
        row[begin + which[t]] *= after[t] / sums[0, which[t]]
    for c in range(sums.shape[1]):
        row[begin + c] *= sums[0, c]
        share += row[begin + c]
    for j in range(begin):
        total += row[j]
    for j in range(near, len(row)):
        total += row[j]
    return total + share, share


@jit
def mixture_tasks(
    like,
    views,
    sizes,
    power,
    key_panels,
    value_panels,
    bias,
    sums,
    edges,
    role,
    log_weight,
    Y,
    rest,
    first,
    last,
):
    """Write outputs and the share of summaries of blocks of rows, one after the other for each item.

    views: of queries, keys and values. sizes: rows of keys that are kept; positions and heads of a block; the most
    near keys of a block. sums: (b, 3, R). edges: first and last of the near keys. role, log_weight: (b, n), or without
    rows.
    """
    size = like.itemsize
    lanes = VECTOR_BYTES // size
    kept, tall, many, widest = sizes
    _, heads, m, D = Y.shape
    width, d, R = key_panels.shape[3], key_panels.shape[2], sums.shape[2]
    begin = (kept + width - 1) // width * width
    near = key_panels.shape[1] * width
    deep = value_panels.shape[1] * width
    full = near + (widest + width - 1) // width * width
    rows_q = zeros(like, (ROWS, d))
    L, out = empty(like, (ROWS, full)), empty(like, (ROWS, deep))
    near_keys = empty(like, ((full - near) // width, d, width))
    near_values = empty(like, (value_panels.shape[1], full - near, width))
    shift = zeros(like, (full,))
    names, weight, logs = filled(0, widest, -1), filled(0.0, widest, 1.0), zeros(0.0, (widest,))
    inverse = empty(like, (ROWS,))
    room = filled(0, R, -1), empty(0, (R,)), empty(0.0, (R,)), empty(0.0, (3, R))
    stretches, groups = (m + tall - 1) // tall, (heads + many - 1) // many
    q_view, k_view, v_view = views[0], views[1], views[2]
    q_at, l_at, y_at = address(rows_q), address(L), address(out)
    near_keys_at, near_values_at = address(near_keys), address(near_values)
    nothing, unit = 0.0 if power else -np.inf, like.dtype.type(1)
    for task in range(first, last):
        item, at = task // (stretches * groups), task % (stretches * groups)
        head, low = at // stretches * many, at % stretches * tall
        others, high = smaller(heads, head + many), smaller(m, low + tall)
        positions = high - low
        rows = positions * (others - head)
        start = edges[0, low]
        n = larger(start, edges[1, high - 1]) - start
        padded = (n + width - 1) // width * width
        for i in range(rows):
            source = as_pointer(_row_at(q_view, item, head + i // positions, low + i % positions), like)
            for k in range(d):
                rows_q[i, k] = source[k]
        for j in range(near):
            shift[j] = bias[item, j]
        for j in range(n):
            absent = False
            if len(role):
                names[j] = role[item, start + j]
                absent = names[j] == -2
            if len(log_weight):
                logs[j] = log_weight[item, start + j]
                weight[j] = np.exp(logs[j])
            shift[near + j] = nothing if absent else 0.0
            _pack_column(as_pointer(_row_at(k_view, item, 0, start + j), like), unit, near_keys, j)
            _pack_row(as_pointer(_row_at(v_view, item, 0, start + j), like), unit, D, near_values, j)
            if absent:  # a power of nothing is nothing
                for k in range(d):
                    near_keys[j // width, k, j % width] = 0
        for j in range(n, padded):
            shift[near + j] = nothing
            for k in range(d):
                near_keys[j // width, k, j % width] = 0
            for p in range(len(near_values)):
                near_values[p, j] = 0
        whole = _whole_tiles(rows)
        panels_at, count, to_at = address(key_panels[item]), near // width, l_at
        for _ in range(2):  # in a loop, so that it is compiled once
            _products(like, False, q_at, d * size, whole, panels_at, count, d * width * size, d, to_at, full * size)
            panels_at, count, to_at = near_keys_at, padded // width, l_at + near * size
        for i in range(rows):
            position = low + i % positions
            one, other = edges[0, position] - start, larger(edges[0, position], edges[1, position]) - start
            row = L[i, : near + padded]
            for j in range(one):
                row[near + j] = nothing
            for j in range(near + other, near + padded):
                row[j] = nothing
            touched = 0
            if len(role) and R:
                touched = _take_out(
                    row, shift, begin, near, one, other, names, weight, logs, sums[item], power != 0, room
                )
            row_at = l_at + i * full * size
            if power:
                total, share = _powers(row, shift, begin, near, power, sums[item], touched, room)
            else:
                top = raised(like, row_at, address(shift), (near + padded) // lanes)
                if top == -np.inf:
                    top = like.dtype.type(0)
                total = exponentials(like, row_at, top, begin // lanes)
                share = exponentials(like, row_at + begin * size, top, (near - begin) // lanes)
                total += share + exponentials(like, row_at + near * size, top, padded // lanes)
            inverse[i] = 1 / total if total != 0 else 0.0
            rest[item, head + i // positions, position] = share * inverse[i]
            if touched:
                _put_right(row, begin, near, one, other, names, weight, sums[item], touched, room)
        panels_at, step, n, from_at = address(value_panels[item]), near * width * size, near, l_at
        for part in range(2):
            _products(
                like, part > 0, from_at, full * size, whole, panels_at, deep // width, step, n, y_at, deep * size
            )
            panels_at, step, n = near_values_at, (full - near) * width * size, padded
            from_at = l_at + near * size
        for i in range(rows):
            target = Y[item, head + i // positions, low + i % positions]
            for j in range(D):
                target[j] = out[i, j] * inverse[i]


@jit
def moment_tasks(like, wide, view, n, d, second, first, last):
    """Write ``Σ x [xᵀ 1]`` over n rows to (b, d, d + 1), in the dtype of `wide`."""
    size = wide.itemsize
    width = SCORE_VECTORS * (VECTOR_BYTES // size)
    panels = (d + width) // width
    deep = panels * width
    turned, rows = zeros(wide, (_whole_tiles(d), ROWS)), zeros(wide, (panels, ROWS, width))
    total, unit = empty(wide, (_whole_tiles(d), deep)), like.dtype.type(1)
    for item in range(first, last):
        for i in range(d):
            for j in range(deep):
                total[i, j] = 0
        for low in range(0, n, ROWS):
            count = smaller(ROWS, n - low)
            for r in range(count):
                source = as_pointer(_row_at(view, item, 0, low + r), like)
                for i in range(d):
                    turned[i, r] = source[i]
                _pack_row(source, unit, d, rows, r)
                rows[d // width, r, d % width] = 1
            _products(
                wide,
                True,
                address(turned),
                ROWS * size,
                len(turned),
                address(rows),
                panels,
                ROWS * width * size,
                count,
                address(total),
                deep * size,
            )
        for i in range(d):
            for j in range(d + 1):
                second[item, i, j] = total[i, j]


@jit
def place_tasks(like, view, origin, panels, X, along, first, last):
    """Write ``(k − origin) L`` and ``⟨query, k − origin⟩`` of blocks of rows; the query is the last column of L."""
    _, n, d = X.shape
    size, width = like.itemsize, panels.shape[3]
    deep = panels.shape[1] * width
    rows, out = zeros(like, (ROWS, d)), empty(like, (ROWS, deep))
    stretches = (n + ROWS - 1) // ROWS
    for task in range(first, last):
        item, low = task // stretches, task % stretches * ROWS
        count = smaller(ROWS, n - low)
        for i in range(count):
            source = as_pointer(_row_at(view, item, 0, low + i), like)
            for k in range(d):
                rows[i, k] = source[k] - origin[item, k]
        whole = _whole_tiles(count)
        _products(
            like,
            False,
            address(rows),
            d * size,
            whole,
            address(panels[item]),
            deep // width,
            d * width * size,
            d,
            address(out),
            deep * size,
        )
        for i in range(count):
            target = X[item, low + i]
            for k in range(d):
                target[k] = out[i, k]
            along[item, low + i] = out[i, d]


@jit
def far_tasks(X, weight, step, centers, first, last):
    """Write rows that are far from one another as centers (b, R, d), chosen among every `step`-th row."""
    _, n, d = X.shape
    size = X.itemsize
    lanes = VECTOR_BYTES // size
    wide = (d + lanes - 1) // lanes * lanes
    count = (n + step - 1) // step
    rows, mean = zeros(X, (count, wide)), zeros(X, (1, wide))
    sums = empty(0.0, (d,))
    away = empty(X, (count,))
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
            mean[0, k] = sums[k] / (total if total > 0 else 1.0)
        place = 0
        at = address(rows)
        for i in range(count):
            for k in range(d):
                rows[i, k] = x[i * step, k]
            away[i] = apart(X, at + i * wide * size, address(mean), wide // lanes)
            if weight[item, i * step] <= 0:
                away[i] = -1
            if away[i] > away[place]:
                place = i
        for c in range(centers.shape[1]):
            center_at = at + place * wide * size
            for k in range(d):
                centers[item, c, k] = rows[place, k]
            following, largest = 0, X.dtype.type(-2)
            for i in range(count):
                distance = apart(X, at + i * wide * size, center_at, wide // lanes)
                held = away[i]
                if c == 0 and held >= 0:
                    held = distance
                held = distance if distance < held else held
                away[i] = held
                if held > largest:
                    following, largest = i, held
            place = following


@jit
def pack_centers(centers, panels, norms, first, last):
    """Write centers times −2 to panels, and their squared norms, which are infinite where there is none."""
    R, d = centers.shape[1:]
    for item in range(first, last):
        panels[item] = 0
        norms[item] = np.inf
        for c in range(R):
            _pack_column(centers[item, c], centers.dtype.type(-2), panels[item], c)
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
    rows, out = zeros(X, (ROWS, d)), empty(X, (ROWS, deep))
    squares, least = empty(X, (ROWS,)), empty(X, (1,))
    stretches = (n + ROWS - 1) // ROWS
    for task in range(first, last):
        item, low = task // stretches, task % stretches * ROWS
        here = smaller(ROWS, n - low)
        for i in range(here):
            source = X[item, low + i]
            square = X.dtype.type(0)
            for k in range(d):
                rows[i, k] = source[k]
                square += source[k] * source[k]
            squares[i] = square
        whole = _whole_tiles(here)
        _products(
            X,
            False,
            address(rows),
            d * size,
            whole,
            address(panels[item]),
            deep // width,
            d * width * size,
            d,
            address(out),
            deep * size,
        )
        for i in range(here):
            row_at = address(out) + i * deep * size
            label = nearest(X, row_at, address(norms[item]), deep // lanes, address(least))
            distance = least[0] + squares[i]
            labels[item, low + i] = label
            distances[item, low + i] = 0 if distance < 0 else distance


@jit
def add_tasks(like, view, width, labels, factor, total, first, last):
    """Add each row, times its factor, to the sum of its label (b, R, width) in float64; −1 has none."""
    n = labels.shape[1]
    for item in range(first, last):
        for i in range(n):
            c = labels[item, i]
            f = factor[item, i]
            if c >= 0 and f != 0:
                source, target = as_pointer(_row_at(view, item, 0, i), like), total[item, c]
                for k in range(width):
                    target[k] += f * source[k]


@jit
def level_tasks(labels, values, weight, total, mass, first, last):
    """Add values times weights, and weights, of each entry to those of its label, in float64."""
    for item in range(first, last):
        for i in range(labels.shape[1]):
            c = labels[item, i]
            if c >= 0:
                total[item, c] += values[item, i] * weight[item, i]
                mass[item, c] += weight[item, i]


@jit
def radius_tasks(labels, keys, weight, reach, centers, center_weight, radii, first, last):
    """Raise the radius of each label to how far its items may be from its center; keys are divided by weights."""
    n, d = keys.shape[1:]
    up = 1 + (d + 8) * 2.0**-52
    for item in range(first, last):
        for i in range(n):
            c = labels[item, i]
            if c >= 0:
                own, other = keys[item, i], centers[item, c]
                own_weight, whole_weight = weight[item, i], center_weight[item, c]
                inverse = 1.0 / own_weight if own_weight > 0 else 1.0
                whole = 1.0 / whole_weight if whole_weight > 0 else 1.0
                square = 0.0
                for k in range(d):
                    gap = own[k] * inverse - other[k] * whole
                    square += gap * gap
                scale = 1.0
                if not 1e-200 < square < 1e200:  # a square may have under- or overflowed
                    scale = 0.0
                    for k in range(d):
                        scale = larger(scale, abs(own[k] * inverse - other[k] * whole))
                    square, scale = 0.0, scale if scale > 0 else 1.0
                    for k in range(d):
                        gap = (own[k] * inverse - other[k] * whole) / scale
                        square += gap * gap
                far = up * (reach[item, i] + scale * np.sqrt(square))
                if not far <= radii[item, c]:
                    radii[item, c] = far
