"""The clusters of keys, compiled: where keys are, which are together, and sums over those."""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import SCORE_VECTORS, VECTOR_BYTES, jit
from levattn._kernels.llvm import address, as_pointer, larger, smaller
from levattn._kernels.pruned.panels import TILE_ROWS, multiply_rows, pack_column, pack_row, row_at_view, whole_tiles
from levattn._kernels.pruned.simd import apart, nearest
from levattn._kernels.scratch import empty, zeros

__all__ = [
    "add_tasks",
    "assign_tasks",
    "far_tasks",
    "level_tasks",
    "moments_of_rows",
    "pack_centers",
    "place_tasks",
    "radius_tasks",
]


@jit
def moments_of_rows(like, view, n, d, second, first, last):
    """Write ``Σ x [xᵀ 1]`` over n rows to (b, d, d + 1), in float64."""
    width = SCORE_VECTORS * (VECTOR_BYTES // second.itemsize)
    panels = (d + width) // width
    in_columns, rows = zeros(0.0, (whole_tiles(d), TILE_ROWS)), zeros(0.0, (panels, TILE_ROWS, width))
    total, unit = empty(0.0, (whole_tiles(d), panels * width)), like.dtype.type(1)
    for item in range(first, last):
        for i in range(d):
            for j in range(panels * width):
                total[i, j] = 0
        for low in range(0, n, TILE_ROWS):
            count = smaller(TILE_ROWS, n - low)
            for r in range(count):
                source = as_pointer(row_at_view(view, item, 0, low + r), like)
                for i in range(d):
                    in_columns[i, r] = source[i]
                pack_row(source, unit, d, rows, r)
                rows[d // width, r, d % width] = 1
            multiply_rows(True, in_columns, d, rows, count, total)
        for i in range(d):
            for j in range(d + 1):
                second[item, i, j] = total[i, j]


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


@jit
def far_tasks(X, weight, step, centers, first, last):
    """Write rows that are far from one another as centers (b, R, d), chosen among every `step`-th row."""
    _, n, d = X.shape
    size = X.itemsize
    lanes = VECTOR_BYTES // size
    padded = (d + lanes - 1) // lanes * lanes
    count = (n + step - 1) // step
    rows, mean = zeros(X, (count, padded)), zeros(X, (1, padded))
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
            away[i] = apart(X, at + i * padded * size, address(mean), padded // lanes)
            if weight[item, i * step] <= 0:
                away[i] = -1
            if away[i] > away[place]:
                place = i
        for c in range(centers.shape[1]):
            center_at = at + place * padded * size
            for k in range(d):
                centers[item, c, k] = rows[place, k]
            following, largest = 0, X.dtype.type(-2)
            for i in range(count):
                distance = apart(X, at + i * padded * size, center_at, padded // lanes)
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
            pack_column(centers[item, c], centers.dtype.type(-2), panels[item], c)
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
    """Add each row, times its factor, to the sum of its label (b, R, width) in float64; −1 has none."""
    n = labels.shape[1]
    for item in range(first, last):
        for i in range(n):
            c = labels[item, i]
            f = factor[item, i]
            if c >= 0 and f != 0:
                source, target = as_pointer(row_at_view(view, item, 0, i), like), total[item, c]
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
def radius_tasks(labels, keys, weight, item_radii, centers, center_weight, radii, first, last):
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
                far = up * (item_radii[item, i] + scale * np.sqrt(square))
                if not far <= radii[item, c]:
                    radii[item, c] = far
