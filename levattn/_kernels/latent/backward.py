"""Gradients of latent attention, compiled: a forward pass over each run of rows, then a backward one; see `compiled`.

Forward, the state Σ e V has a row for each channel. Backward, the states of later rows are R = Σ c dY, its transpose
T, and rho, the sum of their `changes`. The gradient of a value is ``Σ_l e R_l``, and the gradient of a logit is
``e (⟨V, R_l⟩ − rho)``.
"""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import helper, jit
from levattn._kernels.latent.plan import (
    FOLD,
    ROWS,
    SLACK,
    begins_fold,
    copy_row,
    copy_rows,
    enter,
    fold_gain,
    grow_and_read,
    grow_tiles,
    read_positions,
    read_tiles,
    row_address,
    scale_columns,
    scale_rows,
    sum_rows,
    weigh_and_keep,
    write_positions,
    write_rows,
)
from levattn._kernels.latent.simd import copy_vectors, differs, dot_vectors, exp_row, key_row, query_row
from levattn._kernels.llvm import as_pointer, smaller
from levattn._kernels.scratch import fill


@helper
def _drop_rows_of_no_weight(like, p, first, last, c_at):
    """Write zeros for the weights of rows whose gradient is zero, such as masked rows."""
    de, dx, gate_weights = p.latent_step, p.channel_step, as_pointer(p.gate_weights, like)
    for i in range(first, last):
        if not differs(like, p.z + i * dx, 0.0, p.channel_width // p.lanes):
            fill(like, c_at + i * de, p.latent_width, 0)
            fill(like, p.p + i * de, p.latent_width, 0)
            gate_weights[i] = 0


@helper
def _row_gradients(like, p, head, start, n, skip):
    """Write the gradients of the logits of rows and of their gates, and keep the `changes` of the rows."""
    de, dx, vectors = p.latent_step, p.channel_step, p.latent_width // p.lanes
    gate_weights = as_pointer(p.gate_weights, like)
    for i in range(n):
        at, row = i * de, start + i
        c_at = p.weights + skip + at
        mean = dot_vectors(like, c_at, p.g + at, vectors)
        if p.gate.at != 0:
            weight, z = gate_weights[i], p.z + i * dx
            copy_rows(like, p, p.gate_value, head, row, 1, p.channels, 0, p.x, p.channel_width)
            product = dot_vectors(like, p.x, z, p.channel_width // p.lanes) if weight != 0 else weight
            mean += weight * product
            as_pointer(row_address(p.D_gate, head, row), like)[0] = weight * (product - mean)
            dY, out = as_pointer(z, like), as_pointer(row_address(p.D_gate_value, head, row), like)
            for j in range(p.channels):
                out[j] = weight * dY[j]
        query_row(like, c_at, p.g + at, p.p + at, p.inverses + at, mean, vectors)
    write_rows(like, p, p.p, p.latent_width, n, p.latents, p.D_Q, head, start)
    copy_vectors(like, p.g, p.changes + skip, n * vectors)


@helper
def _go_through(like, p, head, low, high, begin, place):
    """Repeat the forward pass over a run, with the gradients of its rows; return the number of its segments."""
    de, dx = p.latent_step, p.channel_step
    reference, references = as_pointer(p.reference, like), as_pointer(p.references, like)
    segments = as_pointer(p.segments, 0)
    fresh = enter(like, p, place, SLACK, True)
    copy_row(reference, references, p.latent_width)
    raises, count = 0, 0
    for start in range(low, high, ROWS):
        n, skip = smaller(ROWS, high - start), (start - low) * de
        folds = begins_fold(like, p, fresh, start - low, high - low)
        x_at, higher = p.x, False
        if p.enters:
            x_at, higher = read_positions(like, p, head, start + p.ahead, n, begin)
        c_at = p.weights + skip
        copy_rows(like, p, p.Q, head, start, n, p.latents, -np.inf, c_at, p.latent_width)
        copy_rows(like, p, p.D_Y, head, start, n, p.channels, 0, p.z, p.channel_width)
        fill(like, p.g, n * p.latent_width, 0)
        done = 0
        while done < n:
            end, raised = weigh_and_keep(like, p, head, start, done, n, c_at, higher, folds, True)
            if raised:
                raises += 1
                copy_row(reference, as_pointer(p.references + raises * de, like), p.latent_width)
            _drop_rows_of_no_weight(like, p, done, end, c_at)
            e, x, z, g = (p.e + done * de, de), (x_at + done * dx, dx), (p.z + done * dx, dx), (p.g + done * de, de)
            if p.enters:
                grow_and_read(like, p, x, e, z, g, end - done, p.state, True)
                if folds:
                    grow_tiles(like, p, x, e, x, e, end - done, p.gains, True)
                    sum_rows(like, e[0], end - done, p.latent_width, p.gain)
            else:
                read_tiles(like, p, z, g, z, g, end - done, p.state, True)
            segments[3 * count], segments[3 * count + 1], segments[3 * count + 2] = start + done, end - done, raises
            count += 1
            done = end
        if folds and (start + n - low) % FOLD == 0:
            fold_gain(like, p, True)
        _row_gradients(like, p, head, start, n, skip)
    return count


@helper
def _refer_to(like, p, place):
    """Make the states of later rows relative to the references of a segment."""
    now, held = as_pointer(p.references + place * p.latent_step, like), as_pointer(p.held, like)
    base, rho, factors = as_pointer(p.base, like), as_pointer(p.rho, like), as_pointer(p.factors, like)
    for j in range(p.latent_width):
        factors[j] = 1 if held[j] == now[j] or held[j] == -np.inf else np.exp(now[j] - held[j])
        held[j] = now[j]
        base[j] = 0 if now[j] == -np.inf else now[j]
        rho[j] *= factors[j]
    scale_rows(as_pointer(p.R, like), factors, p.latent_width, p.channel_width)
    scale_columns(as_pointer(p.T, like), factors, p.channel_width, p.latent_width)


@helper
def _read_exponentials(like, p, head, first, n, begin):
    """Write e of positions and room for gradients, and return where their values are."""
    x_at, _ = read_positions(like, p, head, first, n, begin)
    for i in range(n):
        exp_row(like, p.e + i * p.latent_step, p.base, p.total, p.latent_width // p.lanes)
    fill(like, p.v, n * p.channel_width, 0)
    fill(like, p.p, n * p.latent_width, 0)
    return x_at


@helper
def _go_back(like, p, head, low, begin, count):
    """Add the segments of a run to the states of later rows, last segment first; its positions read them."""
    de, dx, vectors = p.latent_step, p.channel_step, p.latent_width // p.lanes
    segments = as_pointer(p.segments, 0)
    for k in range(count - 1, -1, -1):
        start, n, place = segments[3 * k], segments[3 * k + 1], segments[3 * k + 2]
        if k == count - 1 or place != segments[3 * k + 5]:
            _refer_to(like, p, place)
        x_at = p.x
        if p.enters:
            x_at = _read_exponentials(like, p, head, start + p.ahead, n, begin)
        copy_rows(like, p, p.D_Y, head, start, n, p.channels, 0, p.z, p.channel_width)
        rows, end = (start - low) * de, n - 1
        c, z = (p.weights + rows + end * de, -de), (p.z + end * dx, -dx)
        e, x, v, g = (p.e + end * de, -de), (x_at + end * dx, -dx), (p.v + end * dx, -dx), (p.p + end * de, -de)
        if p.enters:
            grow_and_read(like, p, c, z, e, v, n, p.R, False)
            grow_and_read(like, p, z, c, x, g, n, p.T, True)
        else:
            grow_tiles(like, p, c, z, c, z, n, p.R, False)
            grow_tiles(like, p, z, c, z, c, n, p.T, True)
        for i in range(end, -1, -1):  # without positions nothing reads these writes
            key_row(like, p.e + i * de, p.p + i * de, p.rho, p.changes + rows + i * de, vectors)
        if p.enters:
            write_positions(like, p, head, start + p.ahead, n, begin)


@helper
def _lead_gradients(like, p, head, begin, last):
    """Write the gradients of positions before the first row, which all rows read."""
    de, dx = p.latent_step, p.channel_step
    fill(like, p.g, p.latent_width, 0)
    for start in range(begin, last, ROWS):
        n = smaller(ROWS, last - start)
        x_at = _read_exponentials(like, p, head, start, n, begin)
        e, x, v, g = (p.e, de), (x_at, dx), (p.v, dx), (p.p, de)
        read_tiles(like, p, e, v, e, v, n, p.R, False)
        read_tiles(like, p, x, g, x, g, n, p.T, True)
        for i in range(n):
            key_row(like, p.e + i * de, p.p + i * de, p.rho, p.g, p.latent_width // p.lanes)
        write_positions(like, p, head, start, n, begin)


@jit
def backward_tasks(like, plan, lead, tasks, runs, first, last):
    """Write the gradients of tasks (head, first position of a sequence, after the last, its first run, after them).

    Runs are (first row, row after the last, first position, place), with the state before each at its place, as in
    `forward_tasks`. These states include the first `lead` positions of a sequence, which all rows read.
    """
    like, p = as_pointer(0, like), plan[0]
    for task in range(first, last):
        head, begin, end, early, late = tasks[task]
        fill(like, p.R, p.latent_width * p.channel_width, 0)
        fill(like, p.T, p.latent_width * p.channel_width, 0)
        fill(like, p.rho, p.latent_width, 0)
        fill(like, p.held, p.latent_width, -np.inf)
        for run in range(late - 1, early - 1, -1):
            low, high, _, place = runs[run]
            count = _go_through(like, p, head, low, high, begin, head * p.places + place if p.m != 0 else -1)
            _go_back(like, p, head, low, begin, count)
        _lead_gradients(like, p, head, begin, smaller(begin + lead, end))
