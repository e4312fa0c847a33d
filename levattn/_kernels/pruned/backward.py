"""The gradients of the mixtures of pruned attention for a softmax, compiled; see `mixture`.

With weights p, outputs Y = Σ p v and their gradient dY, the gradient of a logit is p (⟨dY, v⟩ − ⟨dY, Y⟩). A summary
without near keys hands its own on to these keys as it hands on its weight. So one row of coefficients gives the
gradients of values, and another the gradients of keys and queries.
"""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import address, as_pointer, larger, smaller
from levattn._kernels.pruned.mixture import fill_block, forget, put_right, row_weights, take_out, top_of, whole_vectors
from levattn._kernels.pruned.panels import TILE_ROWS, multiply_panels, pack_row, row_at_view, whole_tiles
from levattn._kernels.pruned.simd import logit_gradients, mean_of, turned_tile
from levattn._kernels.scratch import clear, empty, filled, zeros


@helper
def _load(like, view, item, head, low, positions, rows, X, panels):
    """Read the rows of a block to an array and as rows of panels, with zeros behind them."""
    n = X.shape[1]
    for i in range(TILE_ROWS):
        if i < rows:
            source = as_pointer(row_at_view(view, item, head + i // positions, low + i % positions), like)
            for k in range(n):
                X[i, k] = source[k]
        else:
            clear(X, i * n, n)
        pack_row(X[i], like.dtype.type(1), n, panels, i)


@helper
def _turned(X, columns, to_at):
    """Write the first columns of a block of rows as rows."""
    size = X.itemsize
    lanes, step = VECTOR_BYTES // size, X.shape[1] * size
    for j in range(0, columns, lanes):
        for i in range(0, TILE_ROWS, lanes):
            to = to_at + (j * TILE_ROWS + i) * size
            turned_tile(X, address(X) + i * step + j * size, step, to, TILE_ROWS * size)


@helper
def _rest_of_values(row, begin, near, low, high, role, weight, sums, touched, room):
    """Turn products with mean values of summaries into products with mean values without near keys."""
    marks, which, after, gone = room
    for t in range(touched):
        gone[2, t] = 0
    for j in range(low, high):
        c = role[j]
        if c >= 0:
            gone[2, marks[c]] += weight[j] * row[near + j]
    for t in range(touched):
        c = which[t]
        if after[t] > 0:
            row[begin + c] = (sums[0, c] * row[begin + c] - gone[2, t]) * gone[1, t]


@jit
def mixture_back_tasks(
    like, views, sizes, slots, nears, bias, sums, edges, role, log_weight, starts, found, first, last
):
    """Write gradients of queries, and add gradients of keys and values; a task is a part of an item's positions.

    `views`: of queries, gradients of outputs, and gradients of queries. `sizes`: number of kept keys, positions and
    heads of a block, the most near keys of a block, heads, positions, and parts. `slots`, `nears`: panels of keys as
    columns and as rows, and of values as columns. `sums`, `edges`, `role`, `log_weight`: as of `mixture_tasks`.
    `starts`: where the near keys of each part begin among the keys, and among rows of results. `found`: gradients of
    the keys and values of slots (b, parts, slots, ...), and of near keys (b, rows, ...), zeros before.
    """
    size = like.itemsize
    kept, tall, many, widest, heads, m, parts = sizes
    key_panels, key_rows, value_panels = slots
    near_keys, near_key_rows, near_values = nears
    slot_keys, slot_values, side_keys, side_values = found
    width, d, D, R = key_panels.shape[3], key_panels.shape[2], value_panels.shape[2], sums.shape[2]
    begin, near = whole_vectors(like, kept), key_panels.shape[1] * width
    deep, high_deep = slot_keys.shape[3], slot_values.shape[3]
    widest = smaller((widest + width - 1) // width + 1, near_keys.shape[1]) * width
    full, every = near + widest, near_keys.shape[1] * width
    rows_q, rows_y = zeros(like, (TILE_ROWS, d)), zeros(like, (TILE_ROWS, D))
    panel_q, panel_y = (
        zeros(like, (deep // width, TILE_ROWS, width)),
        zeros(like, (high_deep // width, TILE_ROWS, width)),
    )
    L, G, out = zeros(like, (TILE_ROWS, full)), zeros(like, (TILE_ROWS, full)), empty(like, (TILE_ROWS, deep))
    turned = zeros(like, (whole_tiles(full) + TILE_ROWS, TILE_ROWS))
    shift = zeros(like, (full,))
    names, weight, logs = filled(0, widest, -1), filled(0.0, widest, 1.0), zeros(0.0, (widest,))
    room = filled(0, R, -1), empty(0, (R,)), empty(0.0, (R,)), empty(0.0, (3, R))
    stretches, groups = (m + tall - 1) // tall, (heads + many - 1) // many
    l_at, g_at, t_at, full_step, tile_step = address(L), address(G), address(turned), full * size, TILE_ROWS * size
    q_view, y_view, to_view = views[0], views[1], views[2]
    for task in range(first, last):
        item, part = task // parts, task % parts
        for at in range(stretches * part // parts * groups, stretches * (part + 1) // parts * groups):
            head, low = at % groups * many, at // groups * tall
            others, high = smaller(heads, head + many), smaller(m, low + tall)
            positions = high - low
            rows = positions * (others - head)
            panel = edges[0, low] // width
            start, end = panel * width, larger(edges[0, low], edges[1, high - 1])
            padded = (end - start + width - 1) // width * width if end > edges[0, low] else 0
            _load(like, q_view, item, head, low, positions, rows, rows_q, panel_q)
            _load(like, y_view, item, head, low, positions, rows, rows_y, panel_y)
            roles, log_weights = role[item if len(role) else 0], log_weight[item if len(log_weight) else 0]
            fill_block(bias[item], near, start, end, padded, roles, log_weights, -np.inf, shift, names, weight, logs)
            whole = whole_tiles(rows)
            for k in range(4):  # in a loop, so that the call is compiled once
                x, n = (address(rows_q), d) if k < 2 else (address(rows_y), D)
                to = (l_at if k < 2 else g_at) + (near * size if k % 2 else 0)
                panels = address(key_panels[item]) if k < 2 else address(value_panels[item])
                count = near // width
                if k % 2:
                    panels = address(near_keys[item]) if k < 2 else address(near_values[item])
                    panels, count = panels + start * n * size, padded // width
                multiply_panels(like, False, x, n * size, whole, panels, count, n * width * size, n, to, full_step)
            for i in range(rows):
                position = low + i % positions
                one, other = edges[0, position] - start, larger(edges[0, position], edges[1, position]) - start
                row, products = L[i, : near + padded], G[i, : near + padded]
                for j in range(one):
                    row[near + j] = -np.inf
                for j in range(near + other, near + padded):
                    row[j] = -np.inf
                touched = 0
                if len(role) and R:
                    touched = take_out(
                        row, shift, begin, near, one, other, names, weight, logs, sums[item], False, room
                    )
                total, _ = row_weights(row, top_of(row, shift), begin, near, touched, room)
                if touched:
                    _rest_of_values(products, begin, near, one, other, names, weight, sums[item], touched, room)
                vectors = (near + padded) * size // VECTOR_BYTES
                inverse = like.dtype.type(1 / total if total != 0 else 0.0)
                center = mean_of(like, l_at + i * full_step, g_at + i * full_step, inverse, vectors)
                logit_gradients(like, l_at + i * full_step, g_at + i * full_step, center, vectors)
                if touched:
                    put_right(row, begin, near, one, other, names, weight, sums[item], touched, room)
                    put_right(products, begin, near, one, other, names, weight, sums[item], touched, room)
                    forget(touched, room)
            for i in range(rows, TILE_ROWS):
                clear(L, i * full, full)
                clear(G, i * full, full)
            side = starts[1, part] + start - starts[0, part]
            for k in range(4):  # the slots read rows beyond their own too, for sums that no one reads
                columns = padded if k % 2 else near
                if not k % 2:
                    _turned(L if k < 2 else G, near + padded, t_at)
                    clear(turned, (near + padded) * TILE_ROWS, TILE_ROWS * TILE_ROWS)
                panels, depth = (address(panel_y), high_deep) if k < 2 else (address(panel_q), deep)
                if k % 2:
                    to = address(side_values[item]) if k < 2 else address(side_keys[item])
                else:
                    to = address(slot_values[item, part]) if k < 2 else address(slot_keys[item, part])
                multiply_panels(
                    like,
                    True,
                    t_at + (near * tile_step if k % 2 else 0),
                    tile_step,
                    whole_tiles(columns),
                    panels,
                    depth // width,
                    tile_step * width,
                    TILE_ROWS,
                    to + (side * depth * size if k % 2 else 0),
                    depth * size,
                )
            x, panels, n, step = g_at, address(key_rows[item]), near, near * width * size
            for k in range(2):
                multiply_panels(
                    like, k > 0, x, full_step, whole, panels, deep // width, step, n, address(out), deep * size
                )
                x, n, step = g_at + near * size, padded, every * width * size
                panels = address(near_key_rows[item]) + start * width * size
            for i in range(rows):
                target = as_pointer(row_at_view(to_view, item, head + i // positions, low + i % positions), like)
                for k in range(d):
                    target[k] = out[i, k]
