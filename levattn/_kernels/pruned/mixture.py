"""Compiled pruned attention: one softmax, or power, over selected keys, summaries of clusters and near keys.

A row of logits has the kept keys first, in whole vectors, then the summaries, up to whole panels, then the near keys.
The kernel adds `bias` to it. For a softmax it is −inf at an empty place, and log Σ w − Σ w log w / Σ w at a summary.
"""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import address, as_pointer, larger, smaller
from levattn._kernels.pruned.panels import (
    TILE_ROWS,
    multiply_panels,
    pack_columns,
    pack_row,
    row_at_view,
    row_pointer,
    whole_tiles,
)
from levattn._kernels.pruned.simd import exponentials, raised
from levattn._kernels.scratch import clear, empty, filled, zeros


@helper
def whole_vectors(like, n):
    lanes = VECTOR_BYTES // like.itemsize
    return (n + lanes - 1) // lanes * lanes


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
    d, D, size = keys.shape[2], values.shape[2], keys.itemsize
    begin, slots = whole_vectors(keys, s), bias.shape[1]
    nothing, one = 0.0 if power else -np.inf, keys.dtype.type(1)
    rows = empty(keys, (slots, d))
    for item in range(first, last):
        clear(rows, 0, rows.size)
        for j in range(slots):
            bias[item, j] = nothing
        there = smaller(count[item], s)
        for j in range(there):
            source, row = row_pointer(keys, item * s + j), rows[j]
            for k in range(d):
                row[k] = source[k]
            pack_row(row_pointer(values, item * s + j), one, D, value_panels[item], j)
            bias[item, j] = 0
        for j in range(there, slots):
            c = j - begin
            if c < 0 or c >= R or members[item, c] <= 0.5:
                pack_row(row_pointer(values, 0), one, 0, value_panels[item], j)
                continue
            inverse = means.dtype.type(1) / weight[item, c]
            source, row = row_pointer(means, item * R + c), rows[j]
            for k in range(d):
                row[k] = source[k] * inverse
            pack_row(row_pointer(mean_values, item * R + c), inverse, D, value_panels[item], j)
            shift = -offset[item, c] * inverse
            bias[item, j] = shift if power else np.log(weight[item, c]) + shift
        for p in range(slots // width):
            at = address(rows) + p * width * d * size
            pack_columns(keys, at, d * size, width, d, address(key_panels[item, p]))


@jit
def pack_near(like, views, sizes, role, key_panels, value_panels, first, last):
    """Write the keys (b, n) that may be near, and their values, to panels: a task is one panel of keys.

    `views`: of queries, keys and values. `sizes`: n, and the length of values. `role`: (b, n), or without rows. Keys
    that are never attended become zeros, because a power of zero is zero.
    """
    _, count, d, width = key_panels.shape
    unit, (n, D) = like.dtype.type(1), sizes
    for task in range(first, last):
        item, p = task // count, task % count
        low, panel = p * width, key_panels[item, p]
        here = smaller(width, n - low)
        pack_columns(like, row_at_view(views[1], item, 0, low), views[1, 3], here, d, address(panel))
        for j in range(width):
            there = j < here
            if len(role) and there and role[item, low + j] == -2:
                there = False
                for k in range(d):
                    panel[k, j] = 0
            row = low + j if there else 0
            pack_row(
                as_pointer(row_at_view(views[2], item, 0, row), like),
                unit,
                D if there else 0,
                value_panels[item],
                low + j,
            )


@helper
def take_out(row, bias, begin, near, low, high, role, weight, log_weight, sums, power, room):
    """Take the near keys low to high out of summaries in a row of logits; return the number of changed summaries.

    The rest of a summary has the logit of one key, which counts as many times as its weight says. `sums`: weight,
    offset and count of each summary. `room`: marks, the changed summaries, their new weights, and scratch that ends
    with the inverses of these weights.
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
            inverse = 1 / left
            row[place] = (whole * row[place] - sums[1, c] - gone[1, t]) * inverse - bias[place]
            gone[1, t] = inverse
        else:
            row[place] = 0.0 if power else -np.inf
    return touched


@helper
def put_right(row, begin, near, low, high, role, weight, sums, touched, room):
    """Turn weights of summaries without near keys into weights of whole summaries, less the shares of near keys."""
    marks, which, after, gone = room
    for t in range(touched):
        c = which[t]
        gone[0, t] = row[begin + c] * gone[1, t] if after[t] > 0 else 0.0
        row[begin + c] = gone[0, t] * sums[0, c]
    for j in range(low, high):
        c = role[j]
        if c >= 0:
            row[near + j] -= weight[j] * gone[0, marks[c]]


@helper
def forget(touched, room):
    """Take the marks of a row away, before the next row."""
    marks, which, _, _ = room
    for t in range(touched):
        marks[which[t]] = -1


@helper
def fill_block(bias, near, start, end, padded, role, log_weight, nothing, shift, names, weight, logs):
    """Write the shifts of the logits of a block, and the roles and weights of its near keys.

    `bias`, `role`, `log_weight`: of one item.
    """
    for j in range(near):
        shift[j] = bias[j]
    for j in range(padded):
        absent = start + j >= end
        if len(role) and not absent:
            names[j] = role[start + j]
            absent = names[j] == -2
        if len(log_weight) and start + j < end:
            logs[j] = log_weight[start + j]
            weight[j] = np.exp(logs[j])
        shift[near + j] = nothing if absent else 0.0


@helper
def top_of(row, shift):
    """Add the shifts to a row of logits, and return the largest, or 0 if all are −inf."""
    at = address(row)
    top = raised(row, at, address(shift), len(row) // (VECTOR_BYTES // row.itemsize))
    return row.dtype.type(0) if top == -np.inf else top


@helper
def row_weights(row, top, begin, near, touched, room):
    """Replace logits of a row by exponentials relative to `top`; return their sum, and that over summaries."""
    size = row.itemsize
    lanes = VECTOR_BYTES // size
    at = address(row)
    total = exponentials(row, at, top, begin // lanes)
    share = exponentials(row, at + begin * size, top, (near - begin) // lanes)
    for t in range(touched):
        c = begin + room[1][t]
        more = row[c] * (room[2][t] - 1)
        row[c] += more
        share += more
    return total + (share + exponentials(row, at + near * size, top, (len(row) - near) // lanes)), share


@helper
def _powers(row, bias, begin, near, power, sums, touched, room):
    """Replace logits of a row by powers relative to the largest; return their sum, and the sum over summaries."""
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
    factor,
    power,
    key_panels,
    value_panels,
    bias,
    near_keys,
    near_values,
    sums,
    edges,
    role,
    log_weight,
    D,
    rest,
    first,
    last,
):
    """Write outputs and the share of summaries of blocks of rows, from the last block of the last item on.

    `views`: of queries, keys, values and outputs, D numbers each. `sizes`: number of kept keys, positions and heads of
    a block, and the most near keys of a block. `factor`: of queries, in their dtype. `near_keys`, `near_values`: from
    `pack_near`. `sums`: (b, 3, R). `edges`: first and last of the near keys. `role`, `log_weight`: (b, n), or without
    rows.
    """
    size = like.itemsize
    kept, tall, many, widest = sizes
    _, heads, m = rest.shape
    width, d, R = key_panels.shape[3], key_panels.shape[2], sums.shape[2]
    begin = whole_vectors(like, kept)
    near = key_panels.shape[1] * width
    deep = value_panels.shape[1] * width
    widest = smaller((widest + width - 1) // width + 1, near_keys.shape[1]) * width
    full, every = near + widest, near_keys.shape[1] * width
    rows_q = zeros(like, (TILE_ROWS, d))
    L, out = empty(like, (TILE_ROWS, full)), empty(like, (TILE_ROWS, deep))
    shift = zeros(like, (full,))
    names, weight, logs = filled(0, widest, -1), filled(0.0, widest, 1.0), zeros(0.0, (widest,))
    inverse, top = empty(like, (TILE_ROWS,)), empty(like, (TILE_ROWS,))
    room = filled(0, R, -1), empty(0, (R,)), empty(0.0, (R,)), empty(0.0, (3, R))
    stretches, groups = (m + tall - 1) // tall, (heads + many - 1) // many
    q_view, y_view = views[0], views[3]
    q_at, l_at, y_at = address(rows_q), address(L), address(out)
    nothing = 0.0 if power else -np.inf
    for task in range(first, last):
        place = len(rest) * stretches * groups - 1 - task  # blocks of causal rows grow, and the smallest are best last
        item, at = place // (stretches * groups), place % (stretches * groups)
        head, low = at // stretches * many, at % stretches * tall
        others, high = smaller(heads, head + many), smaller(m, low + tall)
        positions = high - low
        rows = positions * (others - head)
        panel = edges[0, low] // width
        start, end = panel * width, larger(edges[0, low], edges[1, high - 1])
        padded = (end - start + width - 1) // width * width if end > edges[0, low] else 0
        for i in range(rows):
            source = as_pointer(row_at_view(q_view, item, head + i // positions, low + i % positions), like)
            for k in range(d):
                rows_q[i, k] = source[k] * factor
        roles, log_weights = role[item if len(role) else 0], log_weight[item if len(log_weight) else 0]
        fill_block(bias[item], near, start, end, padded, roles, log_weights, nothing, shift, names, weight, logs)
        whole = whole_tiles(rows)
        panels_at, count, to_at, step = address(key_panels[item]), near // width, l_at, d * width * size
        for _ in range(2):  # in a loop, so that the call is compiled once
            multiply_panels(like, False, q_at, d * size, whole, panels_at, count, step, d, to_at, full * size)
            panels_at, count, to_at = address(near_keys[item]) + start * d * size, padded // width, l_at + near * size
        apart = power == 0 and not (len(role) and R)  # then no row waits for the one before
        for i in range(rows):
            position = low + i % positions
            one, other = edges[0, position] - start, larger(edges[0, position], edges[1, position]) - start
            row = L[i, : near + padded]
            for j in range(one):
                row[near + j] = nothing
            for j in range(near + other, near + padded):
                row[j] = nothing
            if apart:
                top[i] = top_of(row, shift)
        for i in range(rows):
            position = low + i % positions
            one, other = edges[0, position] - start, larger(edges[0, position], edges[1, position]) - start
            row, touched = L[i, : near + padded], 0
            if len(role) and R:
                touched = take_out(
                    row, shift, begin, near, one, other, names, weight, logs, sums[item], power != 0, room
                )
            if power:
                total, share = _powers(row, shift, begin, near, power, sums[item], touched, room)
            else:
                highest = top[i] if apart else top_of(row, shift)
                total, share = row_weights(row, highest, begin, near, touched, room)
            inverse[i] = 1 / total if total != 0 else 0.0
            rest[item, head + i // positions, position] = share * inverse[i]
            if touched:
                put_right(row, begin, near, one, other, names, weight, sums[item], touched, room)
                forget(touched, room)
        panels_at, step, n, from_at = address(value_panels[item]), near * width * size, near, l_at
        for part in range(2):
            multiply_panels(
                like, part > 0, from_at, full * size, whole, panels_at, deep // width, step, n, y_at, deep * size
            )
            panels_at, step, n = address(near_values[item]) + start * width * size, every * width * size, padded
            from_at = l_at + near * size
        for i in range(rows):
            target = as_pointer(row_at_view(y_view, item, head + i // positions, low + i % positions), like)
            for j in range(D):
                target[j] = out[i, j] * inverse[i]
