"""Token statistics attention, compiled: running sums of squares, memberships and outputs, and their gradients.

Heads meet in the softmax of their logits only. So there are steps, each over one head of a sequence or over all heads
of some tokens: scores, memberships, outputs, and on the way back the gradients by outputs, by memberships, and by
scores. A task is one step, or all of them for a sequence, head after head. Tokens that take part are worked on BLOCK
at a time: sums at these are the rounded sum before them plus their gain, which is then added in float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from levattn._kernels._cpu_jit import jit
from levattn._kernels._cpu_simd import as_pointer
from levattn._kernels._cpu_tokens_simd import (
    back_block,
    blend_block,
    dot_block,
    gather_block,
    mend_block,
    past_block,
    read_block,
    rest_block,
    score_block,
    share_block,
    spread_block,
)

__all__ = ["BLOCK", "KINDS", "SPAN", "VIEWS", "Plan", "backward_tasks", "forward_tasks", "square_rows"]

# places in `views`
W, OFFSET, MASK, P, Y, D_Y, D_W, E = range(8)
VIEWS = 8

KINDS = ("none", "norm", "diagonal")
_NONE, _NORM, _DIAGONAL = range(3)

ALL, SCORE, SHARE, LAST, BACK, BLAME, REST = range(7)  # steps

BLOCK = 16  # tokens whose gain is summed apart
CHUNK = 8  # blocks between two places where sums are kept for the way back
SPAN = 512  # tokens of a task over all heads


class Plan(NamedTuple):
    """What the compiled code works on.

    like, flag: any array of the dtype, and of uint8.
    views: (VIEWS, 4), the address of each array, 0 if it is not there, and its steps between groups of heads, heads
        and tokens, in bytes. P holds logits and then memberships, E the gradients in these and then in the logits.
    offsets: (n + 1,), the sequences.
    sizes: groups, heads, channels, and whether it is causal, the kind of logits, and whether these are means.
    temperature: (b, h).
    powers, kept: (h, BLOCK) in the dtype, and (h, BLOCK + 1) in float64, powers 1, 2, ... and 0, 1, ... of the decay.
    numbers: least, ridge, c, gain.
    A, n, M, N: the sums before, or arrays without a first axis.
    after_A, after_n, after_M, after_N: the sums to write, or as much.
    dT: (b, h, n), what the gradient in the temperature is the sum of.
    """

    like: Any
    flag: Any
    views: Any
    offsets: Any
    sizes: Any
    temperature: Any
    powers: Any
    kept: Any
    numbers: Any
    A: Any
    n: Any
    M: Any
    N: Any
    after_A: Any
    after_n: Any
    after_M: Any
    after_N: Any
    dT: Any


@jit
def _take(p, g, at, high, tokens):
    """Write the numbers of the next tokens that take part, up to BLOCK; return how many, and where to go on."""
    masks, step = p.views[MASK, 0], p.views[MASK, 3]
    n = 0
    if masks == 0:
        n = min(BLOCK, high - at)
        for k in range(n):
            tokens[k] = at + k
        return n, at + n
    present = as_pointer(masks + g * p.views[MASK, 1], p.flag)
    while n < BLOCK and at < high:
        if present[at * step] != 0:
            tokens[n] = at
            n += 1
        at += 1
    return n, at


@jit
def _at(p, which, g, k):
    return p.views[which, 0] + g * p.views[which, 1] + k * p.views[which, 2]


@jit
def _clear(p, which, g, k, low, high, d):
    """Fill rows of d numbers with zeros, of tokens that are masked."""
    if p.views[MASK, 0] == 0:
        return
    present = as_pointer(p.views[MASK, 0] + g * p.views[MASK, 1], p.flag)
    start, step = _at(p, which, g, k), p.views[which, 3]
    for t in range(low, high):
        if present[t * p.views[MASK, 3]] == 0:
            row = as_pointer(start + t * step, p.like)
            for j in range(d):
                row[j] = 0


@jit
def _write(p, which, g, k, tokens, n, row):
    start, step = _at(p, which, g, k), p.views[which, 3]
    for t in range(n):
        as_pointer(start + tokens[t] * step, p.like)[0] = row[t]


@jit
def _read(p, which, g, k, tokens, n, row):
    start, step = _at(p, which, g, k), p.views[which, 3]
    for t in range(n):
        row[t] = as_pointer(start + tokens[t] * step, p.like)[0]


@jit
def _gather(p, g, k, other, tokens, n, sums, rate, weights):
    """Add ``weight · w z`` of a block to sums; z is a row of the array `other`."""
    w, z = p.views[W, 3], p.views[other, 3]
    gather_block(
        *(p.like, len(sums), tokens.ctypes.data, n, _at(p, W, g, k), w, _at(p, other, g, k), z, sums.ctypes.data),
        *(rate, p.kept[k, n], weights.ctypes.data),
    )


@jit
def _dot(p, g, k, other, tokens, n, row, out):
    """Write ``Σ w z · row`` of a block; z is a row of the array `other`."""
    w, z = p.views[W, 3], p.views[other, 3]
    out[:] = 0
    dot_block(
        *(p.like, len(row), tokens.ctypes.data, n, _at(p, W, g, k), w, _at(p, other, g, k), z, row.ctypes.data),
        out.ctypes.data,
    )


@jit
def _count(p, g, k, tokens, n, count, scores, factors):
    """Complete the scores of a block to what the temperature multiplies, and write what a score was multiplied by.

    Returns the number of tokens seen after it.
    """
    causal, mean = p.sizes[3], p.sizes[5]
    offsets, step = _at(p, OFFSET, g, k), p.views[OFFSET, 3]
    for t in range(n):
        if causal:
            count = p.kept[k, 1] * count + 1
        factors[t] = count if mean else 1
        scores[t] *= factors[t]
        if p.views[OFFSET, 0] != 0:
            scores[t] += as_pointer(offsets + tokens[t] * step, p.like)[0]
    return count


@jit
def _all_squares(p, g, k, low, high, tokens, ones, A):
    """Write the sum of squares of a sequence; return the number of tokens."""
    A[:] = 0
    at, count = low, 0.0
    while at < high:
        n, at = _take(p, g, at, high, tokens)
        _gather(p, g, k, W, tokens, n, A, p.like.dtype.type(1), ones)
        count += n
    return count


@jit
def _norms(p, g, k, i, tokens, ones, A, row):
    """Write the sums A that a sequence starts with, or all of it reads, and 1/A; return the number of tokens."""
    count = 0.0
    if len(p.A):
        A[:] = p.A[g, k, i]
        count = p.n[g, k, i]
    elif p.sizes[3]:
        A[:] = 0
    else:
        count = _all_squares(p, g, k, p.offsets[i], p.offsets[i + 1], tokens, ones, A)
    least = p.like.dtype.type(p.numbers[0])
    for j in range(len(row)):
        row[j] = p.sizes[4] == _NORM
        if p.sizes[4] == _DIAGONAL:
            value = p.like.dtype.type(A[j])
            row[j] = 1 / (least if least > value else value)
    return count


@jit
def _score(p, g, k, tokens, n, ones, A, row, inverses, scores):
    """Write the scores of a block; with rows to write them to, also 1/A, and A stays as it is."""
    like, d = p.like, len(row)
    causal, kind = p.sizes[3], p.sizes[4]
    rate = like.dtype.type(p.kept[k, 1])
    if causal and kind == _DIAGONAL:
        scores[:] = 0
        w_at, step, powers_at = _at(p, W, g, k), p.views[W, 3], p.powers[k].ctypes.data
        least, tokens_at = like.dtype.type(p.numbers[0]), tokens.ctypes.data
        sums_at, kept, out_at = A.ctypes.data, p.kept[k, n], scores.ctypes.data
        if len(inverses):
            to, row_step = inverses.ctypes.data, d * like.itemsize
            score_block(
                like, 1, d, tokens_at, n, w_at, step, sums_at, rate, kept, powers_at, least, out_at, to, row_step
            )
        else:
            score_block(like, 0, d, tokens_at, n, w_at, step, sums_at, rate, kept, powers_at, least, out_at, 0, 0)
        return
    if kind == _NONE:
        scores[:] = 0
    else:
        _dot(p, g, k, W, tokens, n, row, scores)
    if causal and len(p.after_A):
        _gather(p, g, k, W, tokens, n, A, rate, ones)


@jit
def _score_head(p, g, i, k):
    """Write the logits of a head, and the sums A after its tokens."""
    d, low, high = p.sizes[2], p.offsets[i], p.offsets[i + 1]
    tokens, A = np.empty(BLOCK, np.int64), np.empty(d)
    row, inverses = np.empty(d, p.like.dtype), np.empty((0, d), p.like.dtype)
    scores, factors, ones = np.ones((3, BLOCK), p.like.dtype)
    count, at = _norms(p, g, k, i, tokens, ones, A, row), low
    while at < high:
        n, at = _take(p, g, at, high, tokens)
        _score(p, g, k, tokens, n, ones, A, row, inverses, scores)
        count = _count(p, g, k, tokens, n, count, scores, factors)
        for t in range(n):
            scores[t] *= p.temperature[g, k]
        _write(p, P, g, k, tokens, n, scores)
    if len(p.after_A):
        p.after_A[g, k, i] = A
        p.after_n[g, k, i] = count


@jit
def _share_tokens(p, g, low, high):
    """Replace the logits of some tokens by memberships."""
    heads = p.sizes[1]
    tokens = np.empty(BLOCK, np.int64)
    table = np.zeros((heads, BLOCK), p.like.dtype)
    at = low
    while at < high:
        n, at = _take(p, g, at, high, tokens)
        for k in range(heads):
            _read(p, P, g, k, tokens, n, table[k])
        share_block(p.like, BLOCK, heads, table.ctypes.data)
        for k in range(heads):
            _write(p, P, g, k, tokens, n, table[k])
    for k in range(heads):
        _clear(p, P, g, k, low, high, 1)


@jit
def _slope(p, total):
    """Return ``c / N``; c for no weight at all, and a finite number for the smallest one."""
    weight = total + p.numbers[1]
    if weight == 0:
        weight = 1.0
    slope = p.numbers[2] / weight
    return p.like.dtype.type(3e38 if slope > 3e38 else slope)


@jit
def _weigh(p, g, k, tokens, n, total, members, slopes, factors):
    """Write memberships, slopes and factors of a block; return the sum of memberships after it."""
    _read(p, P, g, k, tokens, n, members)
    for t in range(n):
        if p.sizes[3]:
            total = p.kept[k, 1] * total + members[t]
        slopes[t] = _slope(p, total)
        factors[t] = -p.numbers[3] * members[t]
    return total


@jit
def _moments(p, g, k, i, tokens, members, M):
    """Write the sums M that a sequence starts with, or all of it reads; return the sum N of memberships."""
    low, high, total = p.offsets[i], p.offsets[i + 1], 0.0
    if len(p.A):
        M[:] = p.M[g, k, i]
        return p.N[g, k, i]
    M[:] = 0
    if p.sizes[3]:
        return total
    at = low
    while at < high:
        n, at = _take(p, g, at, high, tokens)
        _read(p, P, g, k, tokens, n, members)
        for t in range(n):
            total += members[t]
        _gather(p, g, k, W, tokens, n, M, p.like.dtype.type(1), members)
    return total


@jit
def _shrinkage(p, M, total, row):
    """Write ``1 / (1 + c M / N)``."""
    slope = _slope(p, total)
    for j in range(len(row)):
        row[j] = 1 / (1 + slope * p.like.dtype.type(M[j]))


@jit
def _output_head(p, g, i, k):
    """Write the outputs of a head, and the sums M after its tokens."""
    like, d, low, high = p.like, p.sizes[2], p.offsets[i], p.offsets[i + 1]
    tokens, M, row = np.empty(BLOCK, np.int64), np.empty(d), np.empty(d, like.dtype)
    members, slopes, factors = np.ones((3, BLOCK), like.dtype)
    total, at = _moments(p, g, k, i, tokens, members, M), low
    w_at, w, y_at, y = _at(p, W, g, k), p.views[W, 3], _at(p, Y, g, k), p.views[Y, 3]
    tokens_at, factors_at = tokens.ctypes.data, factors.ctypes.data
    _shrinkage(p, M, total, row)
    while at < high:
        n, at = _take(p, g, at, high, tokens)
        total = _weigh(p, g, k, tokens, n, total, members, slopes, factors)
        if p.sizes[3]:
            read_block(
                *(like, d, tokens_at, n, w_at, w, y_at, y, M.ctypes.data, like.dtype.type(p.kept[k, 1])),
                *(p.kept[k, n], p.powers[k].ctypes.data, members.ctypes.data, slopes.ctypes.data, factors_at),
            )
        else:
            spread_block(like, d, tokens_at, n, w_at, w, y_at, y, row.ctypes.data, factors_at)
    _clear(p, Y, g, k, low, high, d)
    if len(p.after_A):
        p.after_M[g, k, i] = M
        p.after_N[g, k, i] = total


@jit
def forward_tasks(p, step, reads, first, last):
    """Do tasks of one step, or all steps of sequences; outputs only if it `reads`."""
    heads, d, count = p.sizes[1], p.sizes[2], len(p.offsets) - 1
    spans = -(-p.offsets[count] // SPAN)
    for task in range(first, last):
        if step == ALL:
            g, i = task // count, task % count
            for k in range(heads):
                _score_head(p, g, i, k)
            _share_tokens(p, g, p.offsets[i], p.offsets[i + 1])
            if reads:
                for k in range(heads):
                    _output_head(p, g, i, k)
        elif step == SHARE:
            low = task % spans * SPAN
            _share_tokens(p, task // spans, low, min(low + SPAN, p.offsets[count]))
        else:
            g, i, k = task // (heads * count), task // heads % count, task % heads
            if step == SCORE:
                _score_head(p, g, i, k)
            elif step == LAST:
                _output_head(p, g, i, k)


@jit
def _advance(p, g, k, tokens, n, weighted, members, sums, total):
    """Add the squares of a block to sums, weighted by memberships or by 1; return the sum of weights after it."""
    if weighted:
        _read(p, P, g, k, tokens, n, members)
    for t in range(n):
        total = p.kept[k, 1] * total + members[t]
    _gather(p, g, k, W, tokens, n, sums, p.like.dtype.type(p.kept[k, 1]), members)
    return total


@jit
def _marks(p, g, i, k, weighted, members, sums, total):
    """Go through a sequence, and return the sums, the sums of weights and the first token of each chunk."""
    at, high = p.offsets[i], p.offsets[i + 1]
    most = -(-(high - at) // (CHUNK * BLOCK))
    tokens, marks = np.empty(BLOCK, np.int64), np.empty((most, len(sums)))
    totals, places = np.empty(most), np.empty(most, np.int64)
    block = 0
    while at < high:
        if block % CHUNK == 0:
            marks[block // CHUNK], totals[block // CHUNK], places[block // CHUNK] = sums, total, at
        n, at = _take(p, g, at, high, tokens)
        total = _advance(p, g, k, tokens, n, weighted, members, sums, total)
        block += 1
    return marks[: -(-block // CHUNK)], totals, places


@jit
def _chunk(p, g, k, weighted, members, at, high, sums, total, tokens, counts, starts, befores):
    """Go through a chunk, and write the sums before each of its blocks; return the number of these."""
    block = 0
    while at < high and block < CHUNK:
        starts[block], befores[block] = sums, total
        counts[block], at = _take(p, g, at, high, tokens[block])
        total = _advance(p, g, k, tokens[block], counts[block], weighted, members, sums, total)
        block += 1
    return block


@jit
def _back_block(p, g, k, tokens, n, total, M, sums, past, gammas, tables):
    """Write what a block of causal outputs gives W, and the gradients in memberships.

    `sums` and `past` are those of Γ and of ``⟨Γ, m⟩`` over later tokens; returns the second with this block.
    """
    like, d = p.like, len(M)
    members, slopes, factors, steps, dots, means, others = tables[:7]
    rate, c, gain = p.kept[k, 1], p.numbers[2], p.numbers[3]
    _weigh(p, g, k, tokens, n, total, members, slopes, factors)
    for t in range(n):
        steps[t] = gain * members[t] * slopes[t]
    tables[4:7] = 0
    w_at, w, out_at, out = _at(p, W, g, k), p.views[W, 3], _at(p, D_W, g, k), p.views[D_W, 3]
    tokens_at, powers_at, row_step = tokens.ctypes.data, p.powers[k].ctypes.data, d * like.itemsize
    back_block(
        *(like, d, tokens_at, n, w_at, w, _at(p, D_Y, g, k), p.views[D_Y, 3], out_at, out, M.ctypes.data),
        *(like.dtype.type(rate), powers_at, members.ctypes.data, slopes.ctypes.data, factors.ctypes.data),
        *(steps.ctypes.data, gammas.ctypes.data, row_step, dots.ctypes.data, means.ctypes.data),
    )
    past_block(
        *(like, d, tokens_at, n, w_at, w, out_at, out, gammas.ctypes.data, row_step, sums.ctypes.data),
        *(like.dtype.type(rate), p.kept[k, n], powers_at, members.ctypes.data, others.ctypes.data),
    )
    for t in range(n - 1, -1, -1):
        past = rate * past + steps[t] / c * means[t]
        dots[t] = others[t] - gain * dots[t] - past
    _write(p, E, g, k, tokens, n, dots)
    return past


@jit
def _back_causal(p, g, i, k, sums, tables):
    like, d, high = p.like, p.sizes[2], p.offsets[i + 1]
    tokens, counts = np.empty((CHUNK, BLOCK), np.int64), np.empty(CHUNK, np.int64)
    M, starts, befores, gammas = np.empty(d), np.empty((CHUNK, d)), np.empty(CHUNK), np.empty((BLOCK, d), like.dtype)
    total = _moments(p, g, k, i, tokens[0], tables[0], M)
    marks, totals, places = _marks(p, g, i, k, True, tables[0], M, total)
    past = 0.0
    for c in range(len(marks) - 1, -1, -1):
        blocks = _chunk(
            *(p, g, k, True, tables[0], places[c], high, marks[c], totals[c], tokens, counts, starts, befores)
        )
        for j in range(blocks - 1, -1, -1):
            past = _back_block(p, g, k, tokens[j], counts[j], befores[j], starts[j], sums, past, gammas, tables)


@jit
def _back_everywhere(p, g, i, k, sums, tables):
    like, d, low, high = p.like, p.sizes[2], p.offsets[i], p.offsets[i + 1]
    tokens, M = np.empty(BLOCK, np.int64), np.empty(d)
    row, other = np.zeros((2, d), like.dtype)
    members, slopes, factors, steps, dots, _, others = tables[:7]
    total = _moments(p, g, k, i, tokens, members, M)
    _shrinkage(p, M, total, row)
    gain, past, at = p.numbers[3], 0.0, low
    alone = len(p.A) > 0  # no sum depends on the tokens
    while at < high and not alone:
        n, at = _take(p, g, at, high, tokens)
        _weigh(p, g, k, tokens, n, total, members, slopes, factors)
        for t in range(n):
            steps[t] = gain * members[t] * slopes[t]
        _gather(p, g, k, D_Y, tokens, n, sums, like.dtype.type(1), steps)
    slope = _slope(p, total)
    for j in range(d):
        sums[j] *= row[j] * row[j]
        other[j] = sums[j]
        past += sums[j] * (slope * M[j] / p.numbers[2])
    at = low
    w_at, w, out_at, out = _at(p, W, g, k), p.views[W, 3], _at(p, D_W, g, k), p.views[D_W, 3]
    while at < high:
        n, at = _take(p, g, at, high, tokens)
        _weigh(p, g, k, tokens, n, total, members, slopes, factors)
        _dot(p, g, k, D_Y, tokens, n, row, dots)
        others[:] = 0
        if not alone:
            _dot(p, g, k, W, tokens, n, other, others)
        for t in range(n):
            dots[t] = others[t] - gain * dots[t] - past
        _write(p, E, g, k, tokens, n, dots)
        blend_block(
            *(like, d, tokens.ctypes.data, n, w_at, w, _at(p, D_Y, g, k), p.views[D_Y, 3], out_at, out),
            *(row.ctypes.data, factors.ctypes.data, other.ctypes.data, members.ctypes.data),
        )


@jit
def _back_head(p, g, i, k):
    """Write the gradients in memberships, and what outputs give W at once."""
    tables = np.ones((7, BLOCK), p.like.dtype)
    sums = np.zeros(p.sizes[2])
    if p.sizes[3]:
        _back_causal(p, g, i, k, sums, tables)
    else:
        _back_everywhere(p, g, i, k, sums, tables)
    low, high = p.offsets[i], p.offsets[i + 1]
    _clear(p, D_W, g, k, low, high, p.sizes[2])
    _clear(p, E, g, k, low, high, 1)


@jit
def _blame_tokens(p, g, low, high):
    """Replace the gradients in memberships of some tokens by those in logits."""
    heads = p.sizes[1]
    tokens = np.empty(BLOCK, np.int64)
    members, blame = np.zeros((2, heads, BLOCK), p.like.dtype)
    mean = np.empty(BLOCK, p.like.dtype)
    at = low
    while at < high:
        n, at = _take(p, g, at, high, tokens)
        mean[:] = 0
        for k in range(heads):
            _read(p, P, g, k, tokens, n, members[k])
            _read(p, E, g, k, tokens, n, blame[k])
            for t in range(BLOCK):
                mean[t] += members[k, t] * blame[k, t]
        for k in range(heads):
            for t in range(BLOCK):
                blame[k, t] = members[k, t] * (blame[k, t] - mean[t])
            _write(p, E, g, k, tokens, n, blame[k])


@jit
def _blame(p, g, i, k, tokens, n, scores, factors, slopes):
    """Write the gradients in the bare scores of a block, given what the temperature multiplies."""
    _read(p, E, g, k, tokens, n, slopes)
    total = 0.0
    for t in range(n):
        total += slopes[t] * scores[t]
        slopes[t] *= p.temperature[g, k] * factors[t]
    p.dT[g, k, i] += total


@jit
def _rest_causal(p, g, i, k, sums, tables):
    like, d, high = p.like, p.sizes[2], p.offsets[i + 1]
    tokens, counts = np.empty((CHUNK, BLOCK), np.int64), np.empty(CHUNK, np.int64)
    A, starts, befores, inverses = np.empty(d), np.empty((CHUNK, d)), np.empty(CHUNK), np.empty((BLOCK, d), like.dtype)
    row = np.empty(d, like.dtype)
    scores, factors, slopes, ones = tables[:4]
    count = _norms(p, g, k, i, tokens[0], ones, A, row)
    marks, totals, places = _marks(p, g, i, k, False, ones, A, count)
    w_at, w, out_at, out = _at(p, W, g, k), p.views[W, 3], _at(p, D_W, g, k), p.views[D_W, 3]
    for c in range(len(marks) - 1, -1, -1):
        blocks = _chunk(
            *(p, g, k, False, ones, places[c], high, marks[c], totals[c], tokens, counts, starts, befores)
        )
        for j in range(blocks - 1, -1, -1):
            n = counts[j]
            _score(p, g, k, tokens[j], n, ones, starts[j], row, inverses, scores)
            _count(p, g, k, tokens[j], n, befores[j], scores, factors)
            _blame(p, g, i, k, tokens[j], n, scores, factors, slopes)
            rest_block(
                *(like, d, tokens[j].ctypes.data, n, w_at, w, out_at, out, inverses.ctypes.data, d * like.itemsize),
                *(sums.ctypes.data, like.dtype.type(p.kept[k, 1]), p.kept[k, n], p.powers[k].ctypes.data),
                slopes.ctypes.data,
            )


@jit
def _rest_everywhere(p, g, i, k, sums, tables):
    """As there, where scores are by the same row for all tokens."""
    like, d, low, high, kind = p.like, p.sizes[2], p.offsets[i], p.offsets[i + 1], p.sizes[4]
    tokens, A = np.empty(BLOCK, np.int64), np.empty(d)
    row, less = np.zeros((2, d), like.dtype)
    nothing = np.empty((0, d), like.dtype)
    scores, factors, slopes, ones = tables[:4]
    count = _norms(p, g, k, i, tokens, ones, A, row)
    w_at, w, out_at, out = _at(p, W, g, k), p.views[W, 3], _at(p, D_W, g, k), p.views[D_W, 3]
    at = low
    while at < high:
        n, at = _take(p, g, at, high, tokens)
        _score(p, g, k, tokens, n, ones, A, row, nothing, scores)
        count = _count(p, g, k, tokens, n, count, scores, factors)
        _blame(p, g, i, k, tokens, n, scores, factors, slopes)
        if kind == _DIAGONAL and not len(p.A):
            _gather(p, g, k, W, tokens, n, sums, like.dtype.type(1), slopes)
    if kind == _NONE:
        return
    for j in range(d):
        if kind == _DIAGONAL and not like.dtype.type(A[j]) < like.dtype.type(p.numbers[0]):
            less[j] = sums[j] * row[j] * row[j]
    at = low
    while at < high:
        n, at = _take(p, g, at, high, tokens)
        _read(p, E, g, k, tokens, n, slopes)
        for t in range(n):
            slopes[t] *= p.temperature[g, k] * factors[0]
        mend_block(
            *(like, d, tokens.ctypes.data, n, w_at, w, out_at, out, row.ctypes.data, slopes.ctypes.data),
            less.ctypes.data,
        )


@jit
def _rest_head(p, g, i, k):
    """Add what logits give W, and write the gradient in the temperature."""
    tables = np.ones((4, BLOCK), p.like.dtype)
    sums = np.zeros(p.sizes[2])
    p.dT[g, k, i] = 0
    if p.sizes[3] and p.sizes[4] == _DIAGONAL:
        _rest_causal(p, g, i, k, sums, tables)
    else:
        _rest_everywhere(p, g, i, k, sums, tables)


@jit
def backward_tasks(p, step, first, last):
    """Do tasks of one step of the way back, or all of them for sequences; memberships are known."""
    heads, count = p.sizes[1], len(p.offsets) - 1
    spans = -(-p.offsets[count] // SPAN)
    for task in range(first, last):
        if step == ALL:
            g, i = task // count, task % count
            for k in range(heads):
                _back_head(p, g, i, k)
            _blame_tokens(p, g, p.offsets[i], p.offsets[i + 1])
            for k in range(heads):
                _rest_head(p, g, i, k)
        elif step == BLAME:
            low = task % spans * SPAN
            _blame_tokens(p, task // spans, low, min(low + SPAN, p.offsets[count]))
        else:
            g, i, k = task // (heads * count), task // heads % count, task % heads
            if step == BACK:
                _back_head(p, g, i, k)
            elif step == REST:
                _rest_head(p, g, i, k)


@jit
def square_rows(X, mask, weights, rates, total, mass, full, first, last):
    """Add ``w x²`` of the rows x of some matrices to `total`, or if `full` ``w x xᵀ``, row after row, and w to `mass`."""
    d = X.shape[2]
    wide = np.empty(d)
    for i in range(first, last):
        for t in range(X.shape[1]):
            if len(mask) and not mask[i, t]:
                continue
            weight = weights[i, t] if len(weights) else 1.0
            rate = rates[i] if len(rates) else 1.0
            mass[i] = rate * mass[i] + weight
            for j in range(d):
                wide[j] = X[i, t, j]
            if full:
                for r in range(d):
                    left = weight * wide[r]
                    row = total[i, r]
                    for j in range(d):
                        row[j] = rate * row[j] + left * wide[j]
            else:
                row = total[i, 0]
                for j in range(d):
                    row[j] = rate * row[j] + weight * wide[j] * wide[j]
