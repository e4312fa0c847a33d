"""Latent attention, compiled: sums over positions for each latent, which rows read as the sums grow.

A task is a run of rows of one sequence of one head, with the state before it. Exponentials are relative to a reference
logit of each latent. A position whose logit exceeds the reference by more than SLACK raises it, so no sum overflows,
and earlier rows are not affected. Rows between two raises, at most ROWS, are a segment. Scratch holds the exponentials
and weights of a segment, while tiles of the state stay in registers.
"""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import STATE_VECTORS, VECTOR_BYTES, helper, jit
from levattn._kernels.latent.plan import (
    FOLD,
    ROWS,
    SLACK,
    begins_fold,
    copy_row,
    copy_rows,
    enter,
    fold_gain,
    fold_tiles,
    grow_and_read,
    grow_tiles,
    raise_references,
    read_positions,
    row_address,
    scale_numbers,
    scale_rows,
    sum_rows,
    weigh_given,
    weigh_rows,
    write_rows,
)
from levattn._kernels.latent.simd import exp_row, row_tile, step_tile, weigh_plain_row, weigh_row
from levattn._kernels.llvm import address, as_pointer, smaller, taken
from levattn._kernels.scratch import empty, fill


@helper
def _sum_up(like, p, head, low, high):
    """Write the references of positions, and their sums in float64; tiles sum FOLD positions at a time."""
    vectors, de, dx = p.latent_width // p.lanes, p.latent_step, p.channel_step
    factors, gain = as_pointer(p.factors, like), as_pointer(p.gain, like)
    exact, exact_state = as_pointer(p.exact_total, 0.0), as_pointer(p.exact_state, 0.0)
    enter(like, p, -1, 0.0, False)
    for start in range(low, high, FOLD):
        n = smaller(FOLD, high - start)
        x_at, higher = read_positions(like, p, head, start, n, low)
        if higher:
            raise_references(like, p, p.top, 0.0, p.gain)
            scale_numbers(exact, factors, p.latent_width)
            scale_rows(exact_state, factors, p.latent_width, p.channel_width)
        for i in range(n):
            exp_row(like, p.e + i * de, p.base, p.gain, vectors)
        rows, values = (p.e, de), (x_at, dx)
        fold_tiles(like, p, rows, values, rows, values, n, p.exact_state, False)
        for j in range(p.latent_width):
            exact[j] += gain[j]
            gain[j] = 0


@jit
def summary_tasks(like, plan, tasks, first, last):
    """Write the state of the positions of each task (head, first position, position after the last)."""
    like, p = as_pointer(0, like), plan[0]
    m, s, S = as_pointer(p.m, 0.0), as_pointer(p.s, 0.0), as_pointer(p.S, 0.0)
    reference = as_pointer(p.reference, like)
    exact, exact_state = as_pointer(p.exact_total, 0.0), as_pointer(p.exact_state, 0.0)
    for task in range(first, last):
        head, low, high = tasks[task]
        _sum_up(like, p, head, low, high)
        for k in range(p.latents):
            m[task * p.latents + k] = reference[k]
            s[task * p.latents + k] = exact[k]
            for j in range(p.channels):
                S[(task * p.latents + k) * p.channels + j] = exact_state[k * p.channel_width + j]


@jit
def step_tasks(Q, K, V, mask, m, s, S, Y, top, total, sums, first, last):
    """Write the output of one causal row of each head, with the bits of `forward_tasks`, and the states after it.

    Logits, values and outputs are (b, L) or (b, D), a mask (b,) or of length zero, states (b, L) and (b, L, D). Return
    whether the dtype of the values holds all references exactly; if not, the written numbers are useless.
    """
    L, D, size = Q.shape[1], V.shape[1], Q.itemsize
    lanes = VECTOR_BYTES // size
    vectors = -(-L // lanes)
    width = vectors * lanes
    # logits and then exponentials, their references, their sums, scales of the sums, weights, limits
    rows, x = empty(Q, (6, width)), empty(V, (D,))
    e_at, step = address(rows), width * size
    base_at, held_at, scales_at, c_at = e_at + step, e_at + 2 * step, e_at + 3 * step, e_at + 4 * step
    # factors of the sums before, factors of the position, zeros, and room for unused results
    factors = empty(m, (4, width))
    old_at, gained_at = address(factors), address(factors) + 8 * width
    zeros_at, rest_at = old_at + 16 * width, old_at + 24 * width
    exact = True
    for head in range(first, last):
        seen, some = len(mask) == 0 or mask[head], False
        fill(m, old_at, 4 * width, -np.inf)
        fill(m, zeros_at, width, 0)
        fill(Q, e_at, 6 * width, -np.inf)
        fill(Q, base_at, 2 * width, 0)
        for j in range(L):
            reference, before = m[head, j], s[head, j]
            if seen:
                rows[0, j] = K[head, j]
            logit = rows[0, j]
            some = some or logit != -np.inf
            rows[1, j], rows[2, j], rows[3, j], rows[4, j] = reference, before, 1, Q[head, j]
            exact = exact and rows[1, j] == reference
            rows[5, j] = rows[1, j] + SLACK
            if logit > rows[5, j]:
                rows[3, j] = np.exp(rows[1, j] - logit)
                rows[2, j] *= rows[3, j]
                rows[1, j] = logit
            elif reference == -np.inf:
                rows[1, j] = 0
            top[head, j] = logit if logit > reference else reference
            if reference > -np.inf or before != 0:
                factors[0, j] = reference - top[head, j]
            if logit != -np.inf:
                factors[1, j] = (logit if logit > -np.inf else -np.inf) - top[head, j]
        for row in range(2):
            exp_row(m, old_at + 8 * row * width, zeros_at, rest_at, width // (VECTOR_BYTES // 8))
        for j in range(L):
            if rows[0, j] != -np.inf:
                factors[1, j] *= rows[0, j] - rows[0, j] + 1
            total[head, j] = factors[0, j] * s[head, j] + factors[1, j]
        exp_row(Q, e_at, base_at, held_at, vectors)
        weigh_row(Q, 0, c_at, c_at, held_at, -np.inf, vectors, c_at, c_at)
        for j in range(D):
            x[j] = V[head, j] if some else 0
        S_at, new_at, left = address(S) + head * L * D * 8, address(sums) + head * L * D * 8, D
        x_at, y_at = address(x), address(Y) + head * D * size
        while left > 0:
            places, factors_at = (S_at, new_at, 8 * D, L), (e_at, c_at, scales_at, old_at, gained_at)
            if left >= 4 * lanes:
                step_tile(Q, 0, 4, places, factors_at, x_at, y_at)
                n = 4 * lanes
            elif left >= lanes:
                step_tile(Q, 0, 1, places, factors_at, x_at, y_at)
                n = lanes
            else:
                step_tile(Q, 1, 1, places, factors_at, x_at, y_at)
                n = 1
            S_at, new_at, x_at, y_at, left = S_at + 8 * n, new_at + 8 * n, x_at + size * n, y_at + size * n, left - n
    return exact


@jit
def join_rows(m, s, n, t, top, total, S, U, out):
    """Write the joined states of latents (m, s, S) and (n, t, U)."""
    for i in range(len(m)):
        largest = n[i] if n[i] > m[i] else m[i]
        a = np.exp(m[i] - largest) if m[i] > -np.inf or s[i] != 0 else 0.0
        b = np.exp(n[i] - largest) if n[i] > -np.inf or t[i] != 0 else 0.0
        top[i] = largest
        total[i] = a * s[i] + b * t[i]
        for j in range(S.shape[1]):
            out[i, j] = a * S[i, j] + b * U[i, j]


@jit
def join_runs(m, s, S, joins, first, last):
    """Add the states of earlier runs of a sequence to the state of each run."""
    for head in range(first, last):
        for k in range(1, len(joins)):
            if joins[k]:
                n, t, U = m[head, k - 1], s[head, k - 1], S[head, k - 1]
                join_rows(m[head, k], s[head, k], n, t, m[head, k], s[head, k], S[head, k], U, S[head, k])


@helper
def _output_rows(like, p, head, start, n):
    """Return the address of padded output rows, set to zero: rows of the array itself, if these need no padding."""
    y_at = row_address(p.Y, head, start) if p.channels == p.channel_width else p.y
    fill(like, y_at, n * p.channel_width, 0)
    return y_at


@helper
def _add_gates(like, p, head, start, first, last, y_at):
    """Write the weighted output of the gate to rows of the output."""
    gate_weights = as_pointer(p.gate_weights, like)
    for i in range(first, last):
        weight = gate_weights[i]
        if p.gate.at != 0 and weight != 0:
            value = as_pointer(row_address(p.gate_value, head, start + i), like)
            out = as_pointer(y_at + i * p.channel_step, like)
            for j in range(p.channels):
                out[j] = weight * value[j]


@jit
def forward_tasks(like, plan, tasks, next_task, most):
    """Write the output of causal rows, of at most `most` tasks, which threads take one by one.

    Tasks are (head, first row, row after the last, first position of the sequence, place). The state before a task, if
    any, is at its place among the states of its head.
    """
    like, p, next_at = as_pointer(0, like), plan[0], address(next_task)
    de, dx = p.latent_step, p.channel_step
    for _ in range(most):
        task = taken(next_at)
        if task >= len(tasks):
            break
        head, low, high, begin, place = tasks[task]
        fresh = enter(like, p, head * p.places + place if p.m != 0 else -1, SLACK, False)
        for start in range(low, high, ROWS):
            n = smaller(ROWS, high - start)
            folds = begins_fold(like, p, fresh, start - low, high - low)
            x_at, higher = read_positions(like, p, head, start + p.ahead, n, begin)
            copy_rows(like, p, p.Q, head, start, n, p.latents, -np.inf, p.c, p.latent_width)
            y_at = _output_rows(like, p, head, start, n)
            done = 0
            while done < n:
                end, _ = weigh_rows(like, p, head, start, done, n, p.c, higher, folds, False)
                _add_gates(like, p, head, start, done, end, y_at)
                e, c = (p.e + done * de, de), (p.c + done * de, de)
                x, y = (x_at + done * dx, dx), (y_at + done * dx, dx)
                grow_and_read(like, p, e, x, c, y, end - done, p.state, False)
                if folds:
                    grow_tiles(like, p, e, x, e, x, end - done, p.gains, False)
                    sum_rows(like, e[0], end - done, p.latent_width, p.gain)
                done = end
            if folds and (start + n - low) % FOLD == 0:
                fold_gain(like, p, False)
            if p.channels != p.channel_width:
                write_rows(like, p, y_at, p.channel_width, n, p.channels, p.Y, head, start)


def _reading(rows, vectors):
    """Return a function that adds the weights `c` times some vectors of the state to n rows of the output."""

    @helper
    def run(like, p, n, state_at, y_at):
        step, i = p.channel_step, 0
        while i < n:
            c, state, y = (p.c + i * p.latent_step, p.latent_step), (state_at, step), (y_at + i * step, step)
            if n - i >= rows:
                row_tile(like, rows, vectors, c, state, y, p.latent_width)
                i += rows
            else:
                row_tile(like, 1, vectors, c, state, y, p.latent_width)
                i += 1

    return run


_read_wide = _reading(4, STATE_VECTORS)
_read_narrow = _reading(8, 1)


@helper
def _read_rows(like, p, n, y_at):
    """Add the weights `c` times the state to n rows of the output."""
    low = 0
    while low < p.channel_width:
        at = low * p.size
        if p.channel_width - low >= STATE_VECTORS * p.lanes:
            _read_wide(like, p, n, p.state + at, y_at + at)
            low += STATE_VECTORS * p.lanes
        else:
            _read_narrow(like, p, n, p.state + at, y_at + at)
            low += p.lanes


@jit
def everywhere_tasks(like, plan, tasks, next_task, most):
    """Write the output of rows that see all of their sequence; threads take tasks as in `forward_tasks`.

    Tasks are (head, first row, after the last, first position, after the last, place). The state is at its place among
    the states of its head. If the place is negative, the task sums the positions itself.
    """
    like, p, next_at = as_pointer(0, like), plan[0], address(next_task)
    vectors, de = p.latent_width // p.lanes, p.latent_step
    total, inverses = as_pointer(p.total, like), as_pointer(p.inverses, like)
    for _ in range(most):
        task = taken(next_at)
        if task >= len(tasks):
            break
        head, low, high, begin, end, place = tasks[task]
        if place < 0:
            _sum_up(like, p, head, begin, end)
            copy_row(as_pointer(p.exact_total, 0.0), total, p.latent_width)
            copy_row(as_pointer(p.exact_state, 0.0), as_pointer(p.state, like), p.latent_width * p.channel_width)
        else:
            enter(like, p, head * p.places + place, SLACK, False)
        plain = p.gate.at == 0  # also, all latents have seen a position, so that none is left out
        for j in range(p.latent_width):
            inverses[j] = 1 if total[j] == 0 else 1 / total[j]
            plain = plain and total[j] != 0
        for start in range(low, high, ROWS):
            n = smaller(ROWS, high - start)
            q_at, step = row_address(p.Q, head, start), p.Q.row
            if p.latents != p.latent_width:
                q_at, step = p.c, de
                copy_rows(like, p, p.Q, head, start, n, p.latents, -np.inf, q_at, p.latent_width)
            for i in range(n):
                q, c = q_at + i * step, p.c + i * de
                if not (plain and weigh_plain_row(like, q, c, p.inverses, vectors)):
                    weigh_given(like, p, head, start, i, q, c, p.p, p.inverses)
            y_at = _output_rows(like, p, head, start, n)
            _add_gates(like, p, head, start, 0, n, y_at)
            _read_rows(like, p, n, y_at)
            if p.channels != p.channel_width:
                write_rows(like, p, y_at, p.channel_width, n, p.channels, p.Y, head, start)
