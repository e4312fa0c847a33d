"""Latent attention, compiled: sums over positions for each latent, that are read as they grow.

A task is a run of rows of one sequence of one head, with the state before it. Exponentials are relative to a reference
logit of each latent, which is raised where a logit exceeds it by more than SLACK, at that very position: what came
before stays as it is, and no sum leaves the range. Rows between two raises, at most ROWS, are a segment: their
exponentials and weights are written down, and tiles of the state run over them in registers.
"""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import jit
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
    raise_references,
    read_positions,
    read_tiles,
    row_address,
    scale_numbers,
    scale_rows,
    sum_rows,
    weigh_rows,
    write_rows,
)
from levattn._kernels.latent.simd import exceeds, exp_row
from levattn._kernels.llvm import as_pointer, smaller
from levattn._kernels.scratch import fill

__all__ = ["forward_tasks", "join_rows", "join_runs", "summary_tasks"]


@jit
def summary_tasks(like, plan, tasks, first, last):
    """Write the states of positions of tasks (head, first position, position after the last)."""
    like, p = as_pointer(0, like), plan[0]
    vectors, de, dx = p.latent_width // p.lanes, p.latent_step, p.channel_step
    top, e = as_pointer(p.held, like), as_pointer(p.e, like)
    m, s, S = as_pointer(p.m, 0.0), as_pointer(p.s, 0.0), as_pointer(p.S, 0.0)
    reference, factors = as_pointer(p.reference, like), as_pointer(p.factors, like)
    exact, exact_state = as_pointer(p.exact_total, 0.0), as_pointer(p.exact_state, 0.0)
    for task in range(first, last):
        head, low, high = tasks[task]
        enter(like, p, -1, 0.0, False)
        for start in range(low, high, ROWS):
            n = smaller(ROWS, high - start)
            copy_row(reference, top, p.latent_width)
            read_positions(like, p, head, start, n, low)
            for i in range(n):
                for j in range(p.latent_width):
                    top[j] = e[i * p.latent_width + j] if e[i * p.latent_width + j] > top[j] else top[j]
            if exceeds(like, p.held, p.reference, vectors):
                raise_references(like, p, p.held, 0.0, p.gain)
                scale_numbers(as_pointer(p.raised, 0.0), factors, p.latent_width)
                scale_rows(as_pointer(p.gains, like), factors, p.latent_width, p.channel_width)
            for i in range(n):
                exp_row(like, p.e + i * de, p.base, p.gain, vectors)
            rows, values = (p.e, de), (p.x, dx)
            grow_tiles(like, p, rows, values, rows, values, n, p.gains, False)
            if (start + n - low) % FOLD == 0 or start + n == high:
                fold_gain(like, p, False)
        for k in range(p.latents):
            m[task * p.latents + k] = reference[k]
            s[task * p.latents + k] = exact[k]
            for j in range(p.channels):
                S[(task * p.latents + k) * p.channels + j] = exact_state[k * p.channel_width + j]


@jit
def join_rows(m, s, n, t, top, total, S, U, out):
    """Write the states of some latents and those of others as one."""
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
    """Add to the state of each run those of the runs before it, unless it is the first of its sequence."""
    for head in range(first, last):
        for k in range(1, len(joins)):
            if joins[k]:
                n, t, U = m[head, k - 1], s[head, k - 1], S[head, k - 1]
                join_rows(m[head, k], s[head, k], n, t, m[head, k], s[head, k], S[head, k], U, S[head, k])


@jit
def forward_tasks(like, plan, tasks, first, last):
    """Write the output of rows; tasks are (head, first row, after the last, first position that there is, place).

    The state before a task is at its place among those of its head, unless there is none.
    """
    like, p = as_pointer(0, like), plan[0]
    de, dx = p.latent_step, p.channel_step
    gate_weights = as_pointer(p.gate_weights, like)
    for task in range(first, last):
        head, low, high, begin, place = tasks[task]
        fresh = enter(like, p, head * p.places + place if p.m != 0 else -1, SLACK, False)
        for start in range(low, high, ROWS):
            n = smaller(ROWS, high - start)
            folds = begins_fold(like, p, fresh, start - low, high - low)
            if p.enters:
                read_positions(like, p, head, start + p.ahead, n, begin)
            copy_rows(like, p, p.Q, head, start, n, p.latents, -np.inf, p.c, p.latent_width)
            y_at = (
                row_address(p.Y, head, start) if p.channels == p.channel_width else p.y
            )  # its rows follow each other
            fill(like, y_at, n * p.channel_width, 0)
            done = 0
            while done < n:
                end, _ = weigh_rows(like, p, head, start, done, n, p.c, folds, False)
                for i in range(done, end):
                    weight = gate_weights[i]
                    if p.gate.at != 0 and weight != 0:
                        value = as_pointer(row_address(p.gate_value, head, start + i), like)
                        out = as_pointer(y_at + i * dx, like)
                        for j in range(p.channels):
                            out[j] = weight * value[j]
                e, c = (p.e + done * de, de), (p.c + done * de, de)
                x, y = (p.x + done * dx, dx), (y_at + done * dx, dx)
                if p.enters:
                    grow_and_read(like, p, e, x, c, y, end - done, p.state, False)
                    if folds:
                        grow_tiles(like, p, e, x, e, x, end - done, p.gains, False)
                        sum_rows(like, e[0], end - done, p.latent_width, p.gain)
                else:
                    read_tiles(like, p, c, y, c, y, end - done, p.state, False)
                done = end
            if folds and (start + n - low) % FOLD == 0:
                fold_gain(like, p, False)
            if p.channels != p.channel_width:
                write_rows(like, p, y_at, p.channel_width, n, p.channels, p.Y, head, start)
