"""Latent attention, compiled: sums over positions for each latent, that are read as they grow, and their gradients.

A task is a run of rows of one sequence of one head, with the state before it. Exponentials are relative to a reference
logit of each latent, which is raised where a logit exceeds it by more than SLACK, at that very position: what came
before stays as it is, and no sum leaves the range. Rows between two raises, at most ROWS, are a segment: their
exponentials and weights are written down, and tiles of the state run over them in registers.

`views` (arrays, 3) holds the address of each array and its steps between heads and rows, in bytes; 0 for an address of
an array that is not there. Rows are padded to whole vectors.
"""

from __future__ import annotations

import numpy as np

from levattn._kernels._cpu_jit import STATE_VECTORS, VECTOR_BYTES, jit
from levattn._kernels._cpu_latent_simd import exceeds, exp_row, state_tile, weigh_row
from levattn._kernels._cpu_simd import as_pointer

__all__ = ["VIEWS", "forward_tasks", "summary_tasks"]

# places in `views`
Q, K, V, GATE, BESIDE, MASK, Y, D_Y, D_Q, D_K, D_V, D_GATE, D_BESIDE = range(13)
VIEWS = 13

ROWS = 32  # of a segment: what it reads and writes stays in the first cache
SLACK = 4.0  # e^SLACK times the number of positions is what a sum can be larger than its largest term
TALL = 4  # rows of a tile


@jit
def _at(views, which, head, row):
    return views[which, 0] + head * views[which, 1] + row * views[which, 2]


@jit
def _copy_row(like, address, n, fill, row):
    """Write the n numbers at an address to a padded row."""
    source = as_pointer(address, like)
    for j in range(n):
        row[j] = source[j]
    for j in range(n, len(row)):
        row[j] = fill


@jit
def _write_row(like, row, n, address):
    target = as_pointer(address, like)
    for j in range(n):
        target[j] = row[j]


@jit
def _write_number(like, value, address):
    as_pointer(address, like)[0] = value


@jit
def _read_number(like, address):
    return as_pointer(address, like)[0]


@jit
def _read_position(like, flag, views, head, position, latents, channels, logits, values):
    """Write the logits and values of a position to padded rows; −inf and zeros if nobody sees it or there is none."""
    seen = position >= 0
    if seen and views[MASK, 0] != 0:
        seen = as_pointer(_at(views, MASK, head, position), flag)[0] != 0
    if seen:
        _copy_row(like, _at(views, K, head, position), latents, -np.inf, logits)
        seen = False
        for j in range(latents):
            seen = seen or logits[j] != -np.inf
    if seen:
        _copy_row(like, _at(views, V, head, position), channels, 0, values)
    else:
        logits[:] = -np.inf
        values[:] = 0


@jit
def _raise_references(logits, reference, base, limit, total, factors):
    """Raise the references that a row exceeds to its logits, and write by what the sums are to be multiplied."""
    for j in range(len(logits)):
        factors[j] = 1
        if logits[j] > limit[j]:
            factors[j] = np.exp(reference[j] - logits[j])
            total[j] *= factors[j]
            reference[j] = logits[j]
            base[j] = logits[j]
            limit[j] = logits[j] + SLACK


@jit
def _scale_rows(state, factors):
    for i in range(len(state)):
        if factors[i] != 1:
            f = factors[i]
            for j in range(state.shape[1]):
                state[i, j] *= f


@jit
def _scale_columns(state, factors):
    for i in range(len(state)):
        for j in range(len(factors)):
            state[i, j] *= factors[j]


def _tiles(adds, reads):
    """Return a function that does what `state_tile` does for a whole state, over n rows of the arrays."""

    @jit
    def run(like, add, x, read, y, n, backwards, state):
        size = like.itemsize
        lanes = VECTOR_BYTES // size
        rows, width = state.shape
        da, dx, dr, dy = add.strides[0], x.strides[0], read.strides[0], y.strides[0]
        a_at, x_at, r_at, y_at = add.ctypes.data, x.ctypes.data, read.ctypes.data, y.ctypes.data
        if backwards:
            a_at, x_at, r_at, y_at = (
                a_at + (n - 1) * da,
                x_at + (n - 1) * dx,
                r_at + (n - 1) * dr,
                y_at + (n - 1) * dy,
            )
            da, dx, dr, dy = -da, -dx, -dr, -dy
        to, dt = state.ctypes.data, width * size
        for i in range(0, rows, TALL):
            a, r = a_at + i * size, r_at + i * size
            low = 0
            while low < width:
                v, o, s = x_at + low * size, y_at + low * size, to + i * dt + low * size
                left = (width - low) // lanes
                if left >= STATE_VECTORS:
                    state_tile(like, TALL, STATE_VECTORS, adds, reads, a, da, v, dx, r, dr, o, dy, n, s, dt)
                    low += STATE_VECTORS * lanes
                elif left >= 2:
                    state_tile(like, TALL, 2, adds, reads, a, da, v, dx, r, dr, o, dy, n, s, dt)
                    low += 2 * lanes
                else:
                    state_tile(like, TALL, 1, adds, reads, a, da, v, dx, r, dr, o, dy, n, s, dt)
                    low += lanes

    return run


_grow = _tiles(1, 0)
_read = _tiles(0, 1)
_grow_and_read = _tiles(1, 1)


@jit
def summary_tasks(like, flag, views, latents, channels, tasks, first, last, m, s, S):
    """Write the states of positions of tasks (head, first position, position after the last) to rows of m, s and S."""
    lanes = VECTOR_BYTES // like.itemsize
    wide, deep = -(-latents // lanes) * lanes, -(-channels // lanes) * lanes
    E, X = np.empty((ROWS, wide), like.dtype), np.empty((ROWS, deep), like.dtype)
    reference, base, top, total, factors = (
        np.empty(wide, like.dtype),
        np.empty(wide, like.dtype),
        np.empty(wide, like.dtype),
        np.empty(wide, like.dtype),
        np.empty(wide, like.dtype),
    )
    state = np.empty((wide, deep), like.dtype)
    for task in range(first, last):
        head, low, high = tasks[task]
        reference[:] = -np.inf
        base[:] = 0
        total[:] = 0
        state[:] = 0
        for start in range(low, high, ROWS):
            n = min(ROWS, high - start)
            top[:] = reference
            for i in range(n):
                _read_position(like, flag, views, head, start + i, latents, channels, E[i], X[i])
                for j in range(wide):
                    top[j] = E[i, j] if E[i, j] > top[j] else top[j]
            risen = False
            for j in range(wide):
                factors[j] = 1
                if top[j] > reference[j]:
                    risen = True
                    factors[j] = np.exp(reference[j] - top[j])
                    total[j] *= factors[j]
                    reference[j] = top[j]
                    base[j] = top[j]
            if risen:
                _scale_rows(state, factors)
            for i in range(n):
                exp_row(like, E[i].ctypes.data, base.ctypes.data, total.ctypes.data, wide // lanes)
            _grow(like, E, X, E, X, n, False, state)
        for k in range(latents):
            m[task, k] = reference[k]
            s[task, k] = total[k]
            for j in range(channels):
                S[task, k, j] = state[k, j]


@jit
def _begin(state_m, state_s, task, reference, base, limit, total):
    """Take the state before a run: its references, which the sums are relative to."""
    latents = state_m.shape[1]
    reference[:] = -np.inf
    total[:] = 0
    if len(state_m):
        for k in range(latents):
            reference[k] = state_m[task, k]
            total[k] = state_s[task, k]
    for k in range(len(reference)):
        base[k] = 0 if reference[k] == -np.inf else reference[k]
        limit[k] = reference[k] + SLACK


@jit
def forward_tasks(like, flag, views, latents, channels, ahead, enters, tasks, first, last, state_m, state_s, state_S):
    """Write the output of the rows of tasks (head, first row, row after the last, first position that there is).

    With row t position ``t + ahead`` enters the state. Without `enters` no position
    enters the state, which then is all that rows read.
    """
    lanes = VECTOR_BYTES // like.itemsize
    wide, deep = -(-latents // lanes) * lanes, -(-channels // lanes) * lanes
    vectors = wide // lanes
    E, C = np.empty((ROWS, wide), like.dtype), np.empty((ROWS, wide), like.dtype)
    X, out = np.empty((ROWS, deep), like.dtype), np.empty((ROWS, deep), like.dtype)
    reference, base, limit, total, factors = (
        np.empty(wide, like.dtype),
        np.empty(wide, like.dtype),
        np.empty(wide, like.dtype),
        np.empty(wide, like.dtype),
        np.empty(wide, like.dtype),
    )
    state = np.empty((wide, deep), like.dtype)
    least = like.dtype.type(-np.inf)
    for task in range(first, last):
        head, low, high, begin = tasks[task]
        _begin(state_m, state_s, task, reference, base, limit, total)
        state[:] = 0
        if len(state_S):
            for k in range(latents):
                for j in range(channels):
                    state[k, j] = state_S[task, k, j]
        for start in range(low, high, ROWS):
            n = min(ROWS, high - start)
            for i in range(n):
                if enters:
                    position = start + i + ahead
                    position = position if position >= begin else -1
                    _read_position(like, flag, views, head, position, latents, channels, E[i], X[i])
                _copy_row(like, _at(views, Q, head, start + i), latents, -np.inf, C[i])
                out[i] = 0
            done = 0
            while done < n:
                i = done
                if enters and exceeds(like, E[i].ctypes.data, limit.ctypes.data, vectors):
                    _raise_references(E[i], reference, base, limit, total, factors)
                    _scale_rows(state, factors)
                while i < n:
                    if enters:
                        if i > done and exceeds(like, E[i].ctypes.data, limit.ctypes.data, vectors):
                            break
                        exp_row(like, E[i].ctypes.data, base.ctypes.data, total.ctypes.data, vectors)
                    gate = least
                    if views[GATE, 0] != 0:
                        gate = _read_number(like, _at(views, GATE, head, start + i))
                    at = C[i].ctypes.data
                    p = weigh_row(like, False, at, total.ctypes.data, gate, vectors, at, at)
                    if p > 0:
                        beside = as_pointer(_at(views, BESIDE, head, start + i), like)
                        for j in range(channels):
                            out[i, j] = p * beside[j]
                    elif p != 0:
                        out[i] = p
                    i += 1
                if enters:
                    _grow_and_read(like, E[done:i], X[done:i], C[done:i], out[done:i], i - done, False, state)
                else:
                    _read(like, C[done:i], out[done:i], C[done:i], out[done:i], i - done, False, state)
                done = i
            for i in range(n):
                _write_row(like, out[i], channels, _at(views, Y, head, start + i))
