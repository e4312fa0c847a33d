"""The data of compiled latent attention: its plan, padded rows, and the sums of the latents.

Rows are copied to scratch of whole vectors. The state of the latents, Σ e V, has a row for each latent. In the
backward pass it is `by_channel`, with a row for each channel. ``like`` is a pointer that carries the dtype. Names of
address arguments end in _at.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from levattn._kernels.jit import STATE_VECTORS, VECTOR_BYTES, helper
from levattn._kernels.latent.simd import (
    copy_vectors,
    differs,
    exceeds,
    exp_row,
    fold_vectors,
    state_tile,
    top_rows,
    weigh_row,
)
from levattn._kernels.llvm import as_pointer, larger, smaller
from levattn._kernels.records import RecordType, Scratch
from levattn._kernels.scratch import fill

ROWS = 32  # of a segment: its data stays in the first-level cache
SLACK = 8.0  # a sum is at most e^SLACK times the number of positions times its largest term
FOLD = 64  # rows whose gain is summed separately, and then added to sums in float64
PLAIN = 192  # in a run without a state before it, sums are not yet large up to this row
TALL = 4  # rows of a tile

# Numbers of each latent. The last raise multiplies the sums by `factors`. `raised`, in float64, is the product of
# these since the gain was last added. The sums of the backward pass are relative to `held`.
# `top` and `least` are the largest logits (or the limits, where these are larger) and the smallest logits of the
# positions last read.
_LATENT = ("reference", "base", "limit", "total", "factors", "gain", "held", "rho", "top", "least")
# Rows of a segment: e^{K − base} and V of positions, weights c = p/s and p of latents, 1/s, rows of the output
_ROWS = {"e": "latents", "x": "channels", "c": "latents", "p": "latents", "inverses": "latents", "y": "channels"}
# and in the backward pass the products of dY and the state, dY, and the gradients of values
_ROWS_BACK = {"g": "latents", "z": "channels", "v": "channels"}

# m, s and S are the states before runs (or the states to be written), `places` for each head. `enters` tells whether
# position t + `ahead` enters the state with row t. For a run, `weights` and `changes` are c and c g/s of every row,
# `references` are the references of its segments, and `segments` (n, 3) their first row, number of rows, and place of
# references.
LATENT_PLAN = RecordType(
    (*("Q", "K", "V", "gate", "gate_value", "mask", "Y", "D_Y"), *("D_Q", "D_K", "D_V", "D_gate", "D_gate_value")),
    ("head", "row"),
    (
        *("latents", "latent_width", "latent_step", "channels", "channel_width", "channel_step", "size", "lanes"),
        *("ahead", "enters", "places", "m", "s", "S"),
        *(*_LATENT, "gate_weights", *_ROWS, *_ROWS_BACK, "state", "gains", "raised", "exact_total", "exact_state"),
        *("R", "T", "weights", "changes", "references", "segments"),
    ),
)


def padded(n: int, kind: np.dtype[Any]) -> int:
    """Return n, rounded up to whole vectors of numbers."""
    lanes: int = VECTOR_BYTES // kind.itemsize
    return -(-n // lanes) * lanes


@lru_cache(64)
def latent_scratch(latents: int, channels: int, size: int, longest: int | None) -> Scratch:
    """Return the layout of one thread's scratch, by its names in the plan.

    Rows are padded to `latents` and `channels` numbers, of `size` bytes each; `longest` is the longest run of a
    backward pass.
    """
    widths, state = {"latents": latents, "channels": channels}, latents * channels
    like = dict.fromkeys(_LATENT, latents) | {name: ROWS * widths[what] for name, what in _ROWS.items()}
    like |= {name: FOLD * like[name] // ROWS for name in ("e", "x")}
    like |= {"gate_weights": ROWS, "state": state, "gains": state}
    eights = {"raised": latents, "exact_total": latents, "exact_state": state}
    if longest is not None:
        like |= {name: ROWS * widths[what] for name, what in _ROWS_BACK.items()} | {"R": state, "T": state}
        like |= {"weights": longest * latents, "changes": longest * latents, "references": (longest + 1) * latents}
        eights |= {"segments": 3 * longest}
    return LATENT_PLAN.scratch(
        {name: size * n for name, n in like.items()} | {name: 8 * n for name, n in eights.items()}
    )


# -- rows ------------------------------------------------------------------------------------


@helper
def row_address(view, head, row):
    return view.at + head * view.head + row * view.row


@helper
def copy_row(source, target, n):
    for j in range(n):
        target[j] = source[j]


@helper
def copy_rows(like, p, view, head, first, rows, n, padding, target_at, width):
    """Copy rows of n numbers from an array to padded rows."""
    whole = n // p.lanes
    for i in range(rows):
        source_at, row_at = row_address(view, head, first + i), target_at + i * width * p.size
        copy_vectors(like, source_at, row_at, whole)
        source, target = as_pointer(source_at, like), as_pointer(row_at, like)
        for j in range(whole * p.lanes, n):
            target[j] = source[j]
        for j in range(n, width):
            target[j] = padding


@helper
def write_rows(like, p, row_at, width, rows, n, view, head, first):
    """Copy the first n numbers of padded rows to rows of an array."""
    whole = n // p.lanes
    for i in range(rows):
        source_at, target_at = row_at + i * width * p.size, row_address(view, head, first + i)
        copy_vectors(like, source_at, target_at, whole)
        source, target = as_pointer(source_at, like), as_pointer(target_at, like)
        for j in range(whole * p.lanes, n):
            target[j] = source[j]


@helper
def _is_masked(p, head, position):
    return p.mask.at != 0 and as_pointer(row_address(p.mask, head, position), np.uint8(0))[0] == 0


@helper
def read_positions(like, p, head, first, rows, begin):
    """Write logits of positions to padded rows at `e`; return the address of values, and whether a limit is exceeded.

    Positions before `begin` and masked ones have logits −inf. A position with logits of −inf only has values of zero.
    Rows of values are padded too, or are rows of the array itself where these need no padding.
    """
    missing = smaller(larger(begin - first, 0), rows)
    there, de, dx, least = rows - missing, p.latent_step, p.channel_step, as_pointer(p.least, like)
    copy_row(as_pointer(p.limit, like), as_pointer(p.top, like), p.latent_width)
    fill(like, p.least, p.latent_width, np.inf)
    e_at, vectors = p.e + missing * de, p.latent_width // p.lanes
    if missing == 0 and p.mask.at == 0 and p.latents == p.latent_width:
        top_rows(like, row_address(p.K, head, first), p.K.row, p.e, de, rows, p.top, p.least, vectors)
    else:
        fill(like, p.e, missing * p.latent_width, -np.inf)
        copy_rows(like, p, p.K, head, first + missing, there, p.latents, -np.inf, e_at, p.latent_width)
        for i in range(missing, rows):
            if _is_masked(p, head, first + i):
                fill(like, p.e + i * de, p.latent_width, -np.inf)
        top_rows(like, p.e, de, p.e, de, rows, p.top, p.least, vectors)
    lowest = np.inf
    for j in range(p.latents):
        lowest = least[j] if least[j] < lowest else lowest
    higher = exceeds(like, p.top, p.limit, vectors)
    if lowest > -np.inf and p.channels == p.channel_width and p.V.row == dx:
        return row_address(p.V, head, first), higher
    fill(like, p.x, missing * p.channel_width, 0)
    copy_rows(like, p, p.V, head, first + missing, there, p.channels, 0, p.x + missing * dx, p.channel_width)
    for i in range(missing, rows if lowest == -np.inf else missing):
        if not differs(like, p.e + i * de, -np.inf, vectors):
            fill(like, p.x + i * dx, p.channel_width, 0)
    return p.x, higher


@helper
def write_positions(like, p, head, first, rows, begin):
    """Write the gradients of positions from `begin` on that are not masked."""
    for i in range(smaller(larger(begin - first, 0), rows), rows):
        if not _is_masked(p, head, first + i):
            write_rows(like, p, p.p + i * p.latent_step, p.latent_width, 1, p.latents, p.D_K, head, first + i)
            write_rows(like, p, p.v + i * p.channel_step, p.channel_width, 1, p.channels, p.D_V, head, first + i)


# -- sums ------------------------------------------------------------------------------------


@helper
def raise_references(like, p, logits_at, slack, total_at):
    """Raise the references that a row exceeds to its logits, and write the factors of the sums."""
    logits, total, factors = as_pointer(logits_at, like), as_pointer(total_at, like), as_pointer(p.factors, like)
    reference, base, limit = as_pointer(p.reference, like), as_pointer(p.base, like), as_pointer(p.limit, like)
    for j in range(p.latent_width):
        factors[j] = 1
        if logits[j] > limit[j]:
            factors[j] = np.exp(reference[j] - logits[j])
            total[j] *= factors[j]
            reference[j] = logits[j]
            base[j] = logits[j]
            limit[j] = logits[j] + slack


@helper
def sum_rows(like, row_at, rows, n, gain_at):
    """Add padded rows of n numbers to one row."""
    gain, row = as_pointer(gain_at, like), as_pointer(row_at, like)
    for i in range(rows):
        for j in range(n):
            gain[j] += row[i * n + j]


@helper
def scale_numbers(numbers, factors, n):
    for j in range(n):
        numbers[j] *= factors[j]


@helper
def scale_rows(state, factors, rows, n):
    for i in range(rows):
        if factors[i] != 1:
            f = factors[i]
            for j in range(n):
                state[i * n + j] *= f


@helper
def scale_columns(state, factors, rows, n):
    for i in range(rows):
        for j in range(n):
            state[i * n + j] *= factors[j]


@helper
def _scale(p, state, factors, by_channel):
    """Multiply the latents of a state by factors."""
    if by_channel:
        scale_columns(state, factors, p.channel_width, p.latent_width)
    else:
        scale_rows(state, factors, p.latent_width, p.channel_width)


@helper
def enter(like, p, place, slack, by_channel):
    """Load the state before a run, none if its place is negative; tell whether no position is before the run.

    The state consists of the references and of sums relative to them.
    """
    reference, base, limit = as_pointer(p.reference, like), as_pointer(p.base, like), as_pointer(p.limit, like)
    total, gain, raised = as_pointer(p.total, like), as_pointer(p.gain, like), as_pointer(p.raised, 0.0)
    exact, exact_state = as_pointer(p.exact_total, 0.0), as_pointer(p.exact_state, 0.0)
    m, s, S = as_pointer(p.m, 0.0), as_pointer(p.s, 0.0), as_pointer(p.S, 0.0)
    state, gains = as_pointer(p.state, like), as_pointer(p.gains, like)
    fresh = True
    for k in range(p.latent_width):
        reference[k], exact[k] = -np.inf, 0
        if place >= 0 and k < p.latents:
            reference[k], exact[k] = m[place * p.latents + k], s[place * p.latents + k]
            fresh = fresh and reference[k] == -np.inf and exact[k] == 0
        total[k], gain[k], raised[k] = exact[k], 0, 1
        base[k] = 0 if reference[k] == -np.inf else reference[k]
        limit[k] = reference[k] + slack
    for at in range(p.latent_width * p.channel_width):
        exact_state[at], gains[at] = 0, 0
    if place >= 0:
        along, across = (1, p.latent_width) if by_channel else (p.channel_width, 1)
        for k in range(p.latents):
            for j in range(p.channels):
                exact_state[k * along + j * across] = S[(place * p.latents + k) * p.channels + j]
    copy_row(exact_state, state, p.latent_width * p.channel_width)
    return fresh


@helper
def begins_fold(like, p, fresh, row, rows):
    """Tell whether the gain of a row is summed separately; no rows follow the last ones of a run."""
    folds = p.enters != 0 and p.size == 4 and row // FOLD < (rows - 1) // FOLD and not (fresh and row < PLAIN)
    if folds and row == PLAIN and fresh:
        copy_row(as_pointer(p.total, like), as_pointer(p.exact_total, 0.0), p.latent_width)
        copy_row(as_pointer(p.state, like), as_pointer(p.exact_state, 0.0), p.latent_width * p.channel_width)
    return folds


@helper
def fold_gain(like, p, by_channel):
    """Add the gain since the last fold to the sums in float64, and continue with these sums, rounded.

    Adding single positions to a much larger sum rounds each of them, and equal ones all in one direction. So the
    gain is summed separately, and the state that rows read loses its accumulated rounding here. `raised` holds the
    factors of the references that rose meanwhile.
    """
    raised, exact = as_pointer(p.raised, 0.0), as_pointer(p.exact_total, 0.0)
    total, gain = as_pointer(p.total, like), as_pointer(p.gain, like)
    changed = False
    for j in range(p.latent_width):
        changed = changed or raised[j] != 1
        exact[j] = exact[j] * raised[j] + gain[j]
        total[j] = exact[j]
        gain[j] = 0
    if changed:
        _scale(p, as_pointer(p.exact_state, 0.0), raised, by_channel)
    for j in range(p.latent_width):
        raised[j] = 1
    fold_vectors(like, p.gains, p.exact_state, p.state, p.latent_width * p.channel_width // p.lanes)


@helper
def _follow(like, p, folds, by_channel):
    """Scale the state to raised references, and if it `folds`, the gain as well."""
    factors = as_pointer(p.factors, like)
    _scale(p, as_pointer(p.state, like), factors, by_channel)
    if folds:
        scale_numbers(as_pointer(p.raised, 0.0), factors, p.latent_width)
        scale_numbers(as_pointer(p.gain, like), factors, p.latent_width)
        _scale(p, as_pointer(p.gains, like), factors, by_channel)


def _tiles(adds, reads):
    """Return a function that applies `state_tile` to a whole state, tile by tile.

    Its add, x, read and y are (address, step), as for `state_tile`.
    """

    @helper
    def run(like, p, add, x, read, y, n, state_at, by_channel):
        rows, width = (p.channel_width, p.latent_width) if by_channel else (p.latent_width, p.channel_width)
        held = 8 if adds == 2 else p.size
        size, lanes, dt = p.size, p.lanes, width * held
        for i in range(0, rows, TALL):
            a, r = (add[0] + i * size, add[1]), (read[0] + i * size, read[1])
            low = 0
            while low < width:
                v, o, s = (x[0] + low * size, x[1]), (y[0] + low * size, y[1]), state_at + i * dt + low * held
                left = (width - low) // lanes
                if left >= STATE_VECTORS:
                    state_tile(like, TALL, STATE_VECTORS, adds, reads, a, v, r, o, n, s, dt)
                    low += STATE_VECTORS * lanes
                elif left >= 2:
                    state_tile(like, TALL, 2, adds, reads, a, v, r, o, n, s, dt)
                    low += 2 * lanes
                else:
                    state_tile(like, TALL, 1, adds, reads, a, v, r, o, n, s, dt)
                    low += lanes

    return run


grow_tiles = _tiles(1, 0)
fold_tiles = _tiles(2, 0)
read_tiles = _tiles(0, 1)
grow_and_read = _tiles(1, 1)


def _weighing_one(how):
    """Return a function that writes c = p/s of a row of a block, and keeps the weight of its gate; see `weigh_row`."""

    @helper
    def run(like, p, head, start, i, q_at, c_at, weights, inverses):
        gate = -np.inf
        if p.gate.at != 0:
            gate = as_pointer(row_address(p.gate, head, start + i), like)[0]
        vectors = p.latent_width // p.lanes
        weight = weigh_row(like, how, q_at, c_at, p.total, gate, vectors, weights, inverses)
        as_pointer(p.gate_weights, like)[i] = weight

    return run


weigh_given = _weighing_one(2)


def _weighing(one):
    """Return a function that weighs rows of a block from the row `done` on, until references are raised again.

    It adds the exponentials of the positions that enter with these rows. With `one` for each row, it writes c = p/s
    over the logits of the latents at `c_at`. References rise only if some logit of the block is `higher` than its
    limit. It returns the row after the last, and whether references rose at the first.
    """

    @helper
    def run(like, p, head, start, done, n, c_at, higher, folds, by_channel):
        vectors, step = p.latent_width // p.lanes, p.latent_step
        raised = higher and exceeds(like, p.e + done * step, p.limit, vectors)
        if raised:
            raise_references(like, p, p.e + done * step, SLACK, p.total)
            _follow(like, p, folds, by_channel)
        i = done
        while i < n:
            if p.enters:
                if higher and i > done and exceeds(like, p.e + i * step, p.limit, vectors):
                    break
                exp_row(like, p.e + i * step, p.base, p.total, vectors)
            row_at, kept = c_at + i * step, i * step
            one(like, p, head, start, i, row_at, row_at, p.p + kept, p.inverses + kept)
            i += 1
        return i, raised

    return run


weigh_rows = _weighing(_weighing_one(0))
weigh_and_keep = _weighing(_weighing_one(1))
