"""Latent attention, compiled: sums over positions for each latent, that are read as they grow.

A task is a run of rows of one sequence of one head, with the state before it. Exponentials are relative to a reference
logit of each latent, which is raised where a logit exceeds it by more than SLACK, at that very position: what came
before stays as it is, and no sum leaves the range. Rows between two raises, at most ROWS, are a segment: their
exponentials and weights are written down, and tiles of the state run over them in registers.

`views` (arrays, 3) holds the address of each array and its steps between heads and rows, in bytes; the address of an
array that is not there is 0. Rows are copied to scratch of whole vectors, `room`. Names that end in _at are addresses.
"""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import STATE_VECTORS, VECTOR_BYTES, helper, jit
from levattn._kernels.latent.simd import copy_vectors, differs, exceeds, exp_row, fold_vectors, state_tile, weigh_row
from levattn._kernels.llvm import address, as_pointer, larger, smaller
from levattn._kernels.rows.compiled import copy_numbers
from levattn._kernels.scratch import empty

__all__ = [
    "BESIDE",
    "D_BESIDE",
    "D_GATE",
    "D_Q",
    "D_Y",
    "FOLD",
    "GATE",
    "PLAIN",
    "ROWS",
    "SINGLE",
    "SLACK",
    "VIEWS",
    "Q",
    "add_rows",
    "copy_rows",
    "enter",
    "fill_row",
    "fold_gain",
    "forward_tasks",
    "grow_and_read",
    "grow_tiles",
    "is_due",
    "join_rows",
    "join_runs",
    "place_of",
    "raise_references",
    "read_positions",
    "read_tiles",
    "rescale",
    "scale_columns",
    "scale_rows",
    "summary_tasks",
    "write_positions",
    "write_rows",
]

# places in `views`
Q, K, V, GATE, BESIDE, MASK, Y, D_Y, D_Q, D_K, D_V, D_GATE, D_BESIDE = range(13)
VIEWS = 13
ROWS = 32  # of a segment: what it reads and writes stays in the first cache
SLACK = 8.0  # e^SLACK times the number of positions is what a sum can be larger than its largest term
FOLD = 64  # rows whose gain is summed apart, and then added to sums in float64
PLAIN = 192  # rows of a run before which nothing is, up to which a sum is not large yet
TALL = 4  # rows of a tile
SINGLE = 9  # rows of scratch that stand alone


@helper
def place_of(views, which, head, row):
    return views[which, 0] + head * views[which, 1] + row * views[which, 2]


@helper
def fill_row(like, address, n, value):
    target = as_pointer(address, like)
    for j in range(n):
        target[j] = value


@helper
def copy_rows(like, address, step, rows, n, fill, target_at, width):
    """Write rows of n numbers, `step` bytes apart, to padded rows."""
    size = like.itemsize
    whole = n // (VECTOR_BYTES // size)
    done = whole * (VECTOR_BYTES // size)
    for i in range(rows):
        source_at, row_at = address + i * step, target_at + i * width * size
        copy_vectors(like, source_at, row_at, whole)
        if done < width:
            source, target = as_pointer(source_at, like), as_pointer(row_at, like)
            for j in range(done, n):
                target[j] = source[j]
            for j in range(n, width):
                target[j] = fill


@helper
def write_rows(like, row_at, width, rows, n, address, step):
    """Write the first n numbers of padded rows to rows that are `step` bytes apart."""
    size = like.itemsize
    whole = n // (VECTOR_BYTES // size)
    for i in range(rows):
        source_at, target_at = row_at + i * width * size, address + i * step
        copy_vectors(like, source_at, target_at, whole)
        source, target = as_pointer(source_at, like), as_pointer(target_at, like)
        for j in range(whole * (VECTOR_BYTES // size), n):
            target[j] = source[j]


@helper
def read_positions(like, flag, views, head, first, rows, begin, latents, channels, logits_at, wide, values_at, deep):
    """Write logits and values of positions to padded rows; −inf and zeros for those before `begin` and masked ones.

    The values of a position whose logits all are −inf are zeros as well.
    """
    size = like.itemsize
    missing = smaller(larger(begin - first, 0), rows)
    k_at, v_at = logits_at + missing * wide * size, values_at + missing * deep * size
    fill_row(like, logits_at, missing * wide, -np.inf)
    fill_row(like, values_at, missing * deep, 0)
    k, v, masks = place_of(views, K, head, first), place_of(views, V, head, first), place_of(views, MASK, head, first)
    there = rows - missing
    copy_rows(like, k + missing * views[K, 2], views[K, 2], there, latents, -np.inf, k_at, wide)
    copy_rows(like, v + missing * views[V, 2], views[V, 2], there, channels, 0, v_at, deep)
    least = like.dtype.type(-np.inf)
    masked, step, vectors = views[MASK, 0] != 0, views[MASK, 2], wide // (VECTOR_BYTES // size)
    for i in range(missing, rows):
        if masked and as_pointer(masks + i * step, flag)[0] == 0:
            fill_row(like, logits_at + i * wide * size, wide, -np.inf)
        if not differs(like, logits_at + i * wide * size, least, vectors):
            fill_row(like, values_at + i * deep * size, deep, 0)


@helper
def write_positions(like, flag, views, head, first, rows, begin, latents, channels, logits_at, wide, values_at, deep):
    """Write the gradients of positions that there are and that are not masked."""
    size = like.itemsize
    for i in range(smaller(larger(begin - first, 0), rows), rows):
        if views[MASK, 0] == 0 or as_pointer(place_of(views, MASK, head, first + i), flag)[0] != 0:
            write_rows(like, logits_at + i * wide * size, wide, 1, latents, place_of(views, D_K, head, first + i), 0)
            write_rows(like, values_at + i * deep * size, deep, 1, channels, place_of(views, D_V, head, first + i), 0)


@helper
def raise_references(logits, slack, reference, base, limit, total, factors):
    """Raise the references that a row exceeds to its logits, and write by what the sums are to be multiplied."""
    for j in range(len(logits)):
        factors[j] = 1
        if logits[j] > limit[j]:
            factors[j] = np.exp(reference[j] - logits[j])
            total[j] *= factors[j]
            reference[j] = logits[j]
            base[j] = logits[j]
            limit[j] = logits[j] + slack


@helper
def add_rows(like, row_at, n, gain):
    """Add n padded rows to one."""
    width = len(gain)
    for i in range(n):
        row = as_pointer(row_at + i * width * like.itemsize, like)
        for j in range(width):
            gain[j] += row[j]


@helper
def _multiply(kept, factors):
    for j in range(len(factors)):
        kept[j] *= factors[j]


@helper
def is_due(single, fresh, row, rows):
    """Tell whether what a row of a run adds is summed apart; the last rows are not followed by any."""
    return single and row // FOLD < (rows - 1) // FOLD and not (fresh and row < PLAIN)


@helper
def fold_gain(like, kept, gain, total, wide_total, gains, state, wide_state, turned):
    """Add what was gained since the last time to the sums in float64, and begin anew with these, rounded.

    Additions of single positions to a sum that is much larger are rounded, and for like ones all in one direction. So
    they are summed apart, and the state that rows read forgets its own rounding here. References have been raised by
    as much as `kept` says. The state has latents along its rows, or along its columns if `turned`.
    """
    raised = False
    for j in range(len(kept)):
        raised = raised or kept[j] != 1
        wide_total[j] = wide_total[j] * kept[j] + gain[j]
        total[j] = wide_total[j]
        gain[j] = 0
    if raised:
        _scale(wide_state, kept, turned)
    kept[:] = 1
    vectors = state.size // (VECTOR_BYTES // like.itemsize)
    fold_vectors(like, address(gains), address(wide_state), address(state), vectors)


@helper
def scale_rows(state, factors):
    for i in range(len(state)):
        if factors[i] != 1:
            f = factors[i]
            for j in range(state.shape[1]):
                state[i, j] *= f


@helper
def scale_columns(state, factors):
    for i in range(len(state)):
        for j in range(len(factors)):
            state[i, j] *= factors[j]


@helper
def _scale(state, factors, turned):
    """Multiply the latents of a state, which are its rows, or its columns if `turned`."""
    if turned:
        scale_columns(state, factors)
    else:
        scale_rows(state, factors)


@helper
def rescale(factors, state, turned, folds, kept, gain, gains):
    """Follow references that were raised with a state, and if it `folds` with what is summed apart."""
    _scale(state, factors, turned)
    if folds:
        _multiply(kept, factors)
        _multiply(gain, factors)
        _scale(gains, factors, turned)


def _tiles(adds, reads):
    """Return a function that does what `state_tile` does for a whole state (rows, width), step by step."""

    @helper
    def run(like, add, da, x, dx, read, dr, y, dy, n, state_at, rows, width):
        size = like.itemsize
        lanes = VECTOR_BYTES // size
        dt = width * size
        for i in range(0, rows, TALL):
            a, r = add + i * size, read + i * size
            low = 0
            while low < width:
                v, o, s = x + low * size, y + low * size, state_at + i * dt + low * size
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


grow_tiles = _tiles(1, 0)
read_tiles = _tiles(0, 1)
grow_and_read = _tiles(1, 1)


@helper
def enter(state_m, state_s, task, slack, reference, base, limit, total, wide_total, kept):
    """Take the state before a run: its references, and its sums, which are relative to them; return if it has none."""
    reference[:] = -np.inf
    wide_total[:] = 0
    kept[:] = 1
    fresh = True
    if len(state_m):
        for k in range(state_m.shape[1]):
            reference[k] = state_m[task, k]
            wide_total[k] = state_s[task, k]
            fresh = fresh and reference[k] == -np.inf and wide_total[k] == 0
    copy_numbers(wide_total, total)
    for k in range(len(reference)):
        base[k] = 0 if reference[k] == -np.inf else reference[k]
        limit[k] = reference[k] + slack
    return fresh


@jit
def summary_tasks(like, flag, views, latents, channels, tasks, m, s, S, room, wide_room, first, last):
    """Write the states of positions of tasks (head, first position, position after the last) to rows of m, s and S."""
    size = like.itemsize
    lanes = VECTOR_BYTES // size
    wide, deep = -(-latents // lanes) * lanes, -(-channels // lanes) * lanes
    reference, base, limit, total, factors, top, gain = room[: 7 * wide].reshape(7, wide)
    kept, wide_total = wide_room[: 2 * wide].reshape(2, wide)
    wide_state = wide_room[2 * wide :][: wide * deep].reshape(wide, deep)
    state, gains = room[SINGLE * wide :][: 2 * wide * deep].reshape(2, wide, deep)
    e_at = address(room) + (SINGLE * wide + 2 * wide * deep) * size
    x_at = e_at + ROWS * wide * size
    de, dx = wide * size, deep * size
    for task in range(first, last):
        head, low, high = tasks[task]
        enter(empty(0.0, (0, 0)), empty(0.0, (0, 0)), task, 0.0, reference, base, limit, total, wide_total, kept)
        wide_state[:] = 0
        gains[:] = 0
        gain[:] = 0
        for start in range(low, high, ROWS):
            n = smaller(ROWS, high - start)
            copy_numbers(reference, top)
            read_positions(like, flag, views, head, start, n, low, latents, channels, e_at, wide, x_at, deep)
            E = room[SINGLE * wide + 2 * wide * deep :][: n * wide].reshape(n, wide)
            for i in range(n):
                for j in range(wide):
                    top[j] = E[i, j] if E[i, j] > top[j] else top[j]
            if exceeds(like, address(top), address(reference), wide // lanes):
                raise_references(top, 0.0, reference, base, limit, gain, factors)
                _multiply(kept, factors)
                scale_rows(gains, factors)
            for i in range(n):
                exp_row(like, e_at + i * de, address(base), address(gain), wide // lanes)
            grow_tiles(like, e_at, de, x_at, dx, e_at, de, x_at, dx, n, address(gains), wide, deep)
            if (start + n - low) % FOLD == 0 or start + n == high:
                fold_gain(like, kept, gain, total, wide_total, gains, state, wide_state, False)
        for k in range(latents):
            m[task, k] = reference[k]
            s[task, k] = wide_total[k]
            for j in range(channels):
                S[task, k, j] = wide_state[k, j]


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
def forward_tasks(
    like,
    flag,
    views,
    latents,
    channels,
    ahead,
    enters,
    tasks,
    places,
    state_m,
    state_s,
    state_S,
    room,
    wide_room,
    first,
    last,
):
    """Write the output of rows; tasks are (head, first row, after the last, first position that there is, place).

    The state before a task is at its place among the `places` of its head, unless there is none. With row t position
    ``t + ahead`` enters the state; without `enters` none does.
    """
    size = like.itemsize
    lanes = VECTOR_BYTES // size
    wide, deep = -(-latents // lanes) * lanes, -(-channels // lanes) * lanes
    vectors = wide // lanes
    reference, base, limit, total, factors, gain = room[: 6 * wide].reshape(6, wide)
    kept, wide_total = wide_room[: 2 * wide].reshape(2, wide)
    wide_state = wide_room[2 * wide :][: wide * deep].reshape(wide, deep)
    limit_at, base_at, total_at = address(limit), address(base), address(total)
    state, gains = room[SINGLE * wide :][: 2 * wide * deep].reshape(2, wide, deep)
    state_at, gains_at = address(state), address(gains)
    e_at = address(room) + (SINGLE * wide + 2 * wide * deep) * size
    c_at = e_at + ROWS * wide * size
    x_at = c_at + ROWS * wide * size
    padded_at = x_at + ROWS * deep * size
    de, dx = wide * size, deep * size
    least = like.dtype.type(-np.inf)
    for task in range(first, last):
        head, low, high, begin, place = tasks[task]
        place += head * places
        fresh = enter(state_m, state_s, place, SLACK, reference, base, limit, total, wide_total, kept)
        wide_state[:] = 0
        if len(state_m):
            for k in range(latents):
                for j in range(channels):
                    wide_state[k, j] = state_S[place, k, j]
        copy_numbers(wide_state, state)
        gains[:] = 0
        gain[:] = 0
        for start in range(low, high, ROWS):
            n = smaller(ROWS, high - start)
            folds = is_due(enters and size == 4, fresh, start - low, high - low)
            if folds and start - low == PLAIN and fresh:
                copy_numbers(total, wide_total)
                copy_numbers(state, wide_state)
            if enters:
                position = start + ahead
                read_positions(like, flag, views, head, position, n, begin, latents, channels, e_at, wide, x_at, deep)
            copy_rows(like, place_of(views, Q, head, start), views[Q, 2], n, latents, -np.inf, c_at, wide)
            out_at = place_of(views, Y, head, start)
            y_at = out_at if channels == deep else padded_at  # rows of the output follow each other
            fill_row(like, y_at, n * deep, 0)
            done = 0
            while done < n:
                i = done
                if enters and exceeds(like, e_at + i * de, limit_at, vectors):
                    logits = room[(e_at + i * de - address(room)) // size :][:wide]
                    raise_references(logits, SLACK, reference, base, limit, total, factors)
                    rescale(factors, state, False, folds, kept, gain, gains)
                while i < n:
                    if enters:
                        if i > done and exceeds(like, e_at + i * de, limit_at, vectors):
                            break
                        exp_row(like, e_at + i * de, base_at, total_at, vectors)
                    gate = least
                    if views[GATE, 0] != 0:
                        gate = as_pointer(place_of(views, GATE, head, start + i), like)[0]
                    row_at = c_at + i * de
                    p = weigh_row(like, False, row_at, total_at, gate, vectors, row_at, row_at)
                    if views[GATE, 0] != 0 and p != 0:
                        beside = as_pointer(place_of(views, BESIDE, head, start + i), like)
                        out = as_pointer(y_at + i * dx, like)
                        for j in range(channels):
                            out[j] = p * beside[j]
                    i += 1
                e, c, x, y = e_at + done * de, c_at + done * de, x_at + done * dx, y_at + done * dx
                if enters:
                    grow_and_read(like, e, de, x, dx, c, de, y, dx, i - done, state_at, wide, deep)
                    if folds:
                        grow_tiles(like, e, de, x, dx, e, de, x, dx, i - done, gains_at, wide, deep)
                        add_rows(like, e, i - done, gain)
                else:
                    read_tiles(like, c, de, y, dx, c, de, y, dx, i - done, state_at, wide, deep)
                done = i
            if folds and (start + n - low) % FOLD == 0:
                fold_gain(like, kept, gain, total, wide_total, gains, state, wide_state, False)
            if channels != deep:
                write_rows(like, y_at, deep, n, channels, out_at, views[Y, 2])
