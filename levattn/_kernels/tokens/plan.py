"""The plan of the compiled code of token statistics attention, and functions that read and write runs of tokens.

A run is RUN present tokens at a time, so that the numbers of its tokens stay in the first caches. ``like`` is a
pointer, for the dtype; names of addresses end in _at.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from levattn._kernels.jit import helper
from levattn._kernels.llvm import as_pointer, smaller
from levattn._kernels.records import RecordType, Scratch
from levattn._kernels.scratch import fill
from levattn._kernels.tokens.simd import GAIN_BLOCK, dot_run, gather_run

NONE, NORM, DIAGONAL = range(3)  # the indices of LOGITS

RUN = 8 * GAIN_BLOCK
SPAN = 4 * RUN  # tokens of a task over all heads
SLAB = 64 * RUN  # tokens of a head that are worked on before the next step
TABLES = 7  # tables of a number for each token of a run

# P holds logits and then memberships, E the gradients in memberships and then in logits. A, n, M and N are the sums
# before, and A_after, ... the sums to be written. `bounds` are the first token of each sequence and the one after its
# last. `powers` (h, GAIN_BLOCK) and `kept` (h, GAIN_BLOCK + 1) are the powers 1, 2, ... and 0, 1, ... of the decay.
# `flow` (b, h, sequences) holds the terms of the gradient in the temperature. Names from `tokens` on are scratch.
TOKEN_PLAN = RecordType(
    ("W", "offset", "mask", "P", "Y", "D_Y", "D_W", "E"),
    ("group", "head", "token"),
    (
        *(
            "heads",
            "width",
            "size",
            "causal",
            "logits",
            "mean",
            "sequences",
            "bounds",
            "temperature",
            "powers",
            "kept",
        ),
        *("A", "n", "M", "N", "A_after", "n_after", "M_after", "N_after", "flow"),
        *("tokens", "tables", "shares", "row", "other", "rows", "norms", "sums", "totals", "later"),
    ),
    ("least", "ridge", "weight", "gain", "largest"),  # weight is c, largest is the largest number of the dtype
)


@lru_cache(64)
def token_scratch(heads: int, d: int, size: int) -> Scratch:
    """Return the layout of one thread's scratch, by its names in the plan; `size` is the itemsize of the dtype."""
    like = {"tables": TABLES * RUN, "shares": 2 * heads * RUN, "row": heads * d, "other": d, "rows": 2 * RUN * d}
    eights = {"tokens": RUN, "norms": heads * d, "sums": heads * d, "totals": 2 * heads, "later": d}
    return TOKEN_PLAN.scratch(
        {name: size * n for name, n in like.items()} | {name: 8 * n for name, n in eights.items()}
    )


@helper
def head_rows(view, g, k):
    """Return the address of an array's first token of a head, and the step between tokens."""
    return view.at + g * view.group + k * view.head, view.token


@helper
def run_of(p, n):
    return p.width, p.tokens, n


@helper
def sums_of(p, k, sums_at):
    """Return running sums with the powers of a head's decay."""
    return sums_at, p.powers + k * GAIN_BLOCK * p.size, p.kept + k * (GAIN_BLOCK + 1) * 8


@helper
def bounds(p, i):
    """Return the first token of a sequence, and the one after its last."""
    both = as_pointer(p.bounds, 0)
    return both[2 * i], both[2 * i + 1]


@helper
def table(p, i):
    """Return the address of a table of a run."""
    return p.tables + i * RUN * p.size


@helper
def copy_sums(source_at, target_at, n):
    """Copy sums, or write zeros if the source is address 0."""
    source, target = as_pointer(source_at, 0.0), as_pointer(target_at, 0.0)
    for j in range(n):
        target[j] = source[j] if source_at != 0 else 0.0


@helper
def rate_of(p, k):
    """Return the part of a head's sum that is left one token later."""
    return as_pointer(p.kept, 0.0)[k * (GAIN_BLOCK + 1) + 1]


@helper
def temperature_of(like, p, g, k):
    return as_pointer(p.temperature, like)[g * p.heads + k]


@helper
def sums_place(p, g, k, i):
    """Return the number of a head's sums."""
    return (g * p.heads + k) * p.sequences + i


@helper
def take(p, g, i, at, high):
    """List the next present tokens, up to RUN; return their number, and the token to go on from.

    No run crosses from one slab of SLAB tokens to the next.
    """
    tokens = as_pointer(p.tokens, 0)
    n = 0
    if p.mask.at == 0:
        n = smaller(RUN, high - at)
        for t in range(n):
            tokens[t] = at + t
        return n, at + n
    mask_at, step = head_rows(p.mask, g, 0)
    present = as_pointer(mask_at, np.uint8(0))
    high = smaller(high, at - (at - bounds(p, i)[0]) % SLAB + SLAB)
    while n < RUN and at < high:
        if present[at * step] != 0:
            tokens[n] = at
            n += 1
        at += 1
    return n, at


@helper
def clear_masked(like, p, view, g, k, low, high, d):
    """Fill the rows of masked tokens, of d numbers, with zeros."""
    if p.mask.at == 0:
        return
    (mask_at, skip), (start, step) = head_rows(p.mask, g, 0), head_rows(view, g, k)
    present = as_pointer(mask_at, np.uint8(0))
    for t in range(low, high):
        if present[t * skip] == 0:
            fill(like, start + t * step, d, 0)


@helper
def write(like, p, view, g, k, n, row_at):
    """Write a number for each token of a run."""
    tokens, row = as_pointer(p.tokens, 0), as_pointer(row_at, like)
    start, step = head_rows(view, g, k)
    if n and step == p.size and tokens[n - 1] - tokens[0] == n - 1:
        target = as_pointer(start + tokens[0] * step, like)
        for t in range(n):
            target[t] = row[t]
    else:
        for t in range(n):
            as_pointer(start + tokens[t] * step, like)[0] = row[t]


@helper
def read_numbers(like, p, view, g, k, n, row_at):
    """Read a number for each token of a run."""
    tokens, row = as_pointer(p.tokens, 0), as_pointer(row_at, like)
    start, step = head_rows(view, g, k)
    if n and step == p.size and tokens[n - 1] - tokens[0] == n - 1:
        source = as_pointer(start + tokens[0] * step, like)
        for t in range(n):
            row[t] = source[t]
    else:
        for t in range(n):
            row[t] = as_pointer(start + tokens[t] * step, like)[0]


@helper
def gather(like, p, g, k, view, n, sums_at, weights_at):
    """Add ``weight · w z`` of a run to sums; z is a row of the array."""
    w, z = head_rows(p.W, g, k), head_rows(view, g, k)
    gather_run(like, run_of(p, n), w, z, sums_of(p, k, sums_at), weights_at)


@helper
def dot(like, p, g, k, view, n, row_at, out_at):
    """Write ``Σ w z · row`` of a run; z is a row of the array."""
    fill(like, out_at, n, 0)
    dot_run(like, run_of(p, n), head_rows(p.W, g, k), head_rows(view, g, k), row_at, out_at)


@helper
def advance(like, p, g, k, n, weighted, weights_at, sums_at, total):
    """Add the squares of a run to sums, weighted by memberships or 1; return the sum of weights after it."""
    weights = as_pointer(weights_at, like)
    if weighted:
        read_numbers(like, p, p.P, g, k, n, weights_at)
    else:
        fill(like, weights_at, n, 1)
    rate = rate_of(p, k)
    if rate == 1:
        for t in range(n):
            total += weights[t]
    else:
        for t in range(n):
            total = rate * total + weights[t]
    gather(like, p, g, k, p.W, n, sums_at, weights_at)
    return total


@helper
def begin_sums(like, p, g, i, k, weighted, sums_at, weights_at):
    """Write the sums A, or M if `weighted`, before a sequence, or those seen by all of it; return n or N."""
    place, d = sums_place(p, g, k, i), p.width
    if p.A != 0:
        before, totals = (p.M, p.N) if weighted else (p.A, p.n)
        copy_sums(before + place * d * 8, sums_at, d)
        return as_pointer(totals, 0.0)[place]
    copy_sums(0, sums_at, d)
    (at, high), total = bounds(p, i), 0.0
    while at < high and not p.causal:
        n, at = take(p, g, i, at, high)
        total = advance(like, p, g, k, n, weighted, weights_at, sums_at, total)
    return total


@helper
def end_sums(p, g, i, k, weighted, sums_at, total):
    """Write the sums A or M after a sequence, with n or N, if they are wanted."""
    place, d = sums_place(p, g, k, i), p.width
    after, totals = (p.M_after, p.N_after) if weighted else (p.A_after, p.n_after)
    if after != 0:
        copy_sums(sums_at, after + place * d * 8, d)
        as_pointer(totals, 0.0)[place] = total
