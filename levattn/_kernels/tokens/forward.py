"""Token statistics attention, compiled: running sums of squares, memberships and outputs.

Heads meet in the softmax of their logits only. So there are steps, each over one head of a sequence or over all heads
of some tokens: scores, memberships, outputs, and on the way back the gradients by outputs, by memberships, and by
scores. A task is one step, or all of them for a sequence. Tokens that take part are worked on RUN at a time, so that
what is written down for each of them stays in the first caches.

All but dtypes is numbers here, as references to arrays would be counted at each call: names of addresses end in _at.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from levattn._kernels.jit import helper, jit
from levattn._kernels.llvm import address, as_pointer, larger, smaller
from levattn._kernels.scratch import empty
from levattn._kernels.tokens.simd import BLOCK, dot_run, gather_run, read_run, score_run, share_run, spread_run

__all__ = ["BAND", "KINDS", "SLAB", "SPAN", "VIEWS", "forward_tasks", "scratch_sizes", "square_rows"]

# arrays; P holds logits and then memberships, E the gradients in these and then in the logits
W, OFFSET, MASK, P, Y, D_Y, D_W, E = range(8)
VIEWS = 8

KINDS = ("none", "norm", "diagonal")
_NONE, _NORM, _DIAGONAL = range(3)

ALL, SCORE, SHARE, LAST, BACK, BLAME, REST = range(7)  # steps

RUN = 8 * BLOCK
SPAN = 4 * RUN  # tokens of a task over all heads
SLAB = 64 * RUN  # tokens of a head that are worked on before the next step
BAND = 16  # rows of a second moment
TABLES = 7  # of a number for each token of a run

# places in the plan, of numbers and of addresses, 0 for what there is not
ARRAYS = 0  # (VIEWS, 4), the address of each array and its steps between groups of heads, heads and tokens, in bytes
BOUNDS, SEQUENCES = 1, 2  # (SEQUENCES, 2), the tokens to work on
HEADS, WIDTH, CAUSAL, KIND, MEAN = range(3, 8)
NUMBERS = 8  # LEAST, ...
TEMPERATURE = 9  # (b, h) in the dtype
POWERS, KEPT = 10, 11  # (h, BLOCK) and (h, BLOCK + 1), the powers 1, 2, ... and 0, 1, ... of the decay
OLD_NORMS, OLD_COUNTS, OLD_SUMS, OLD_TOTALS = range(12, 16)  # A, n, M and N before
NEW_NORMS, NEW_COUNTS, NEW_SUMS, NEW_TOTALS = range(16, 20)  # and those to be written
FLOW = 20  # (b, h, SEQUENCES), what the gradient in the temperature is the sum of
TOKENS, TABLE, SHARES = 21, 22, 23  # scratch: numbers of tokens; (TABLES, RUN); (2, h, RUN)
ROW, OTHER, ROWS = 24, 25, 26  # (h, d), d and (RUN, d)
NORMS, SUMS, TOTALS, LATER = range(27, 31)  # in float64: A and M (h, d), n and N (2, h), and d more
FIELDS = 31

LEAST, RIDGE, WEIGHT, GAIN, LARGEST = range(5)  # c is a weight; the largest number of the dtype


class _Kinds(NamedTuple):
    """Pointers to nowhere, for their types."""

    like: Any
    flag: Any
    whole: Any
    wide: Any


@helper
def _address(array):
    return address(array) if array.size else 0


@helper
def _entered(like, flag, given, scratch):
    """Write the plan; return pointers to nowhere, for their types, and one to it. The caller holds the arrays."""
    views, bounds, sizes, numbers, temperature, powers, kept, before, after, flow = given
    whole, narrow, wide = scratch
    c = _Kinds(as_pointer(0, like), as_pointer(0, flag), as_pointer(0, whole), as_pointer(0, wide))
    p = as_pointer(address(whole), whole)
    heads, d, causal, kind, mean = sizes
    p[ARRAYS], p[BOUNDS], p[SEQUENCES] = address(views), address(bounds), len(bounds)
    p[HEADS], p[WIDTH], p[CAUSAL], p[KIND], p[MEAN] = heads, d, causal, kind, mean
    p[NUMBERS], p[TEMPERATURE] = address(numbers), address(temperature)
    p[POWERS], p[KEPT], p[FLOW] = address(powers), address(kept), _address(flow)
    p[OLD_NORMS], p[OLD_COUNTS] = _address(before[0]), _address(before[1])
    p[OLD_SUMS], p[OLD_TOTALS] = _address(before[2]), _address(before[3])
    p[NEW_NORMS], p[NEW_COUNTS] = _address(after[0]), _address(after[1])
    p[NEW_SUMS], p[NEW_TOTALS] = _address(after[2]), _address(after[3])
    s, deep = like.itemsize, heads * d
    p[TOKENS], p[TABLE] = address(whole) + FIELDS * 8, address(narrow)
    p[SHARES] = p[TABLE] + TABLES * RUN * s
    p[ROW] = p[SHARES] + 2 * heads * RUN * s
    p[OTHER] = p[ROW] + deep * s
    p[ROWS] = p[OTHER] + d * s
    p[NORMS] = address(wide)
    p[SUMS] = p[NORMS] + deep * 8
    p[TOTALS] = p[SUMS] + deep * 8
    p[LATER] = p[TOTALS] + 2 * heads * 8
    return c, p


def scratch_sizes(heads: int, d: int) -> tuple[int, int, int]:
    """Return the sizes of the scratch: of int64, of the dtype, of float64."""
    return FIELDS + RUN, TABLES * RUN + 2 * heads * RUN + (heads + 1 + RUN) * d, 2 * heads * (d + 1) + d


@helper
def _number(c, p, which):
    return as_pointer(p[NUMBERS], c.wide)[which]


@helper
def _head(c, p, which, g, k):
    """Return the address of an array's first token of a head."""
    view = as_pointer(p[ARRAYS] + 32 * which, c.whole)
    return view[0] + g * view[1] + k * view[2]


@helper
def _step(c, p, which):
    return as_pointer(p[ARRAYS] + 32 * which, c.whole)[3]


@helper
def _there(c, p, which):
    return as_pointer(p[ARRAYS] + 32 * which, c.whole)[0] != 0


@helper
def _low(c, p, i):
    return as_pointer(p[BOUNDS], c.whole)[2 * i]


@helper
def _high(c, p, i):
    return as_pointer(p[BOUNDS], c.whole)[2 * i + 1]


@helper
def _table(s, p, i):
    """Return the address of a table of a run."""
    return p[TABLE] + i * RUN * s


@helper
def _fill(c, at, n, value):
    target = as_pointer(at, c.like)
    for j in range(n):
        target[j] = value


@helper
def _copy_sums(c, source_at, target_at, n):
    """Copy sums; zeros from address 0."""
    target = as_pointer(target_at, c.wide)
    if source_at == 0:
        for j in range(n):
            target[j] = 0
        return
    source = as_pointer(source_at, c.wide)
    for j in range(n):
        target[j] = source[j]


@helper
def _kept(c, p, k, n):
    return as_pointer(p[KEPT], c.wide)[k * (BLOCK + 1) + n]


@helper
def _temperature(c, p, g, k):
    return as_pointer(p[TEMPERATURE], c.like)[g * p[HEADS] + k]


@helper
def _place(p, g, k, i):
    """Return the number of a head's sums."""
    return (g * p[HEADS] + k) * p[SEQUENCES] + i


@helper
def _take(c, p, g, i, at, high):
    """Write down the next tokens that take part, up to RUN; return how many, and where to go on.

    No run is in two slabs of SLAB tokens.
    """
    tokens = as_pointer(p[TOKENS], c.whole)
    n = 0
    if not _there(c, p, MASK):
        n = smaller(RUN, high - at)
        for t in range(n):
            tokens[t] = at + t
        return n, at + n
    present, step = as_pointer(_head(c, p, MASK, g, 0), c.flag), _step(c, p, MASK)
    high = smaller(high, at - (at - _low(c, p, i)) % SLAB + SLAB)
    while n < RUN and at < high:
        if present[at * step] != 0:
            tokens[n] = at
            n += 1
        at += 1
    return n, at


@helper
def _clear(c, p, which, g, k, low, high, d):
    """Fill rows of d numbers with zeros, of tokens that are masked."""
    if not _there(c, p, MASK):
        return
    present, skip = as_pointer(_head(c, p, MASK, g, 0), c.flag), _step(c, p, MASK)
    start, step = _head(c, p, which, g, k), _step(c, p, which)
    for t in range(low, high):
        if present[t * skip] == 0:
            _fill(c, start + t * step, d, 0)


@helper
def _write(c, s, p, which, g, k, n, row_at):
    """Write a number for each token of a run."""
    tokens, row = as_pointer(p[TOKENS], c.whole), as_pointer(row_at, c.like)
    start, step = _head(c, p, which, g, k), _step(c, p, which)
    if n and step == s and tokens[n - 1] - tokens[0] == n - 1:
        target = as_pointer(start + tokens[0] * step, c.like)
        for t in range(n):
            target[t] = row[t]
    else:
        for t in range(n):
            as_pointer(start + tokens[t] * step, c.like)[0] = row[t]


@helper
def _read(c, s, p, which, g, k, n, row_at):
    """Read a number for each token of a run."""
    tokens, row = as_pointer(p[TOKENS], c.whole), as_pointer(row_at, c.like)
    start, step = _head(c, p, which, g, k), _step(c, p, which)
    if n and step == s and tokens[n - 1] - tokens[0] == n - 1:
        source = as_pointer(start + tokens[0] * step, c.like)
        for t in range(n):
            row[t] = source[t]
    else:
        for t in range(n):
            row[t] = as_pointer(start + tokens[t] * step, c.like)[0]


@helper
def _powers(s, p, k):
    return p[POWERS] + k * BLOCK * s, p[KEPT] + k * (BLOCK + 1) * 8


@helper
def _gather(c, s, p, g, k, other, n, sums_at, weights_at):
    """Add ``weight · w z`` of a run to sums; z is a row of the array `other`."""
    w_at, w, z_at, z = _head(c, p, W, g, k), _step(c, p, W), _head(c, p, other, g, k), _step(c, p, other)
    powers_at, kept_at = _powers(s, p, k)
    gather_run(c.like, p[WIDTH], p[TOKENS], n, w_at, w, z_at, z, sums_at, powers_at, kept_at, weights_at)


@helper
def _dot(c, s, p, g, k, other, n, row_at, out_at):
    """Write ``Σ w z · row`` of a run; z is a row of the array `other`."""
    w_at, w, z_at, z = _head(c, p, W, g, k), _step(c, p, W), _head(c, p, other, g, k), _step(c, p, other)
    _fill(c, out_at, n, 0)
    dot_run(c.like, p[WIDTH], p[TOKENS], n, w_at, w, z_at, z, row_at, out_at)


@helper
def _advance(c, s, p, g, k, n, weighted, weights_at, sums_at, total):
    """Add the squares of a run to sums, weighted by memberships or 1; return the sum of weights after it."""
    weights = as_pointer(weights_at, c.like)
    if weighted:
        _read(c, s, p, P, g, k, n, weights_at)
    else:
        _fill(c, weights_at, n, 1)
    rate = _kept(c, p, k, 1)
    if rate == 1:
        for t in range(n):
            total += weights[t]
    else:
        for t in range(n):
            total = rate * total + weights[t]
    _gather(c, s, p, g, k, W, n, sums_at, weights_at)
    return total


@helper
def _all(c, s, p, g, k, i, weighted, weights_at, sums_at):
    """Write the sums of a sequence, and return that of the weights."""
    at, high, total = _low(c, p, i), _high(c, p, i), 0.0
    _copy_sums(c, 0, sums_at, p[WIDTH])
    while at < high:
        n, at = _take(c, p, g, i, at, high)
        total = _advance(c, s, p, g, k, n, weighted, weights_at, sums_at, total)
    return total


# -- scores ----------------------------------------------------------------------------------


@helper
def _norms(c, s, p, g, i, k, sums_at):
    """Write the sums A that a sequence starts with, or all of it reads; return the number of tokens."""
    if p[OLD_NORMS] != 0:
        place = _place(p, g, k, i)
        _copy_sums(c, p[OLD_NORMS] + place * p[WIDTH] * 8, sums_at, p[WIDTH])
        return as_pointer(p[OLD_COUNTS], c.wide)[place]
    if p[CAUSAL]:
        _copy_sums(c, 0, sums_at, p[WIDTH])
        return 0.0
    return _all(c, s, p, g, k, i, False, _table(s, p, 0), sums_at)


@helper
def _inverses(c, p, sums_at, row_at):
    """Write what the products of a token are multiplied by in scores, if all tokens see the same sums."""
    row, A = as_pointer(row_at, c.like), as_pointer(sums_at, c.wide)
    for j in range(p[WIDTH]):
        row[j] = p[KIND] == _NORM
        if p[KIND] == _DIAGONAL:
            row[j] = A[j]  # rounded as the sums at tokens are
            row[j] = 1 / larger(_number(c, p, LEAST), row[j]) if row[j] == row[j] else row[j]


@helper
def _score(c, s, p, g, k, n, back, sums_at, row_at, ones_at, scores_at):
    """Write the scores of a run, and if `back` 1/A of each token to `rows`."""
    if p[CAUSAL] and p[KIND] == _DIAGONAL:
        _fill(c, scores_at, n, 0)
        w_at, w = _head(c, p, W, g, k), _step(c, p, W)
        (powers_at, kept_at), d, tokens_at, row_step = _powers(s, p, k), p[WIDTH], p[TOKENS], p[WIDTH] * s
        like, least = c.like, _number(c, p, LEAST)
        if back:
            score_run(
                like, 1, d, tokens_at, n, w_at, w, sums_at, powers_at, kept_at, least, scores_at, p[ROWS], row_step
            )
        else:
            score_run(like, 0, d, tokens_at, n, w_at, w, sums_at, powers_at, kept_at, least, scores_at, 0, 0)
        return
    if p[KIND] == _NONE:
        _fill(c, scores_at, n, 0)
    else:
        _dot(c, s, p, g, k, W, n, row_at, scores_at)
    if p[CAUSAL] and p[NEW_NORMS] != 0:
        _fill(c, ones_at, n, 1)
        _gather(c, s, p, g, k, W, n, sums_at, ones_at)


@helper
def _complete(c, p, g, k, n, count, scores_at, factors_at):
    """Make the scores of a run what the temperature multiplies, and write what a score was multiplied by.

    Returns the number of tokens seen after it.
    """
    scores, factors = as_pointer(scores_at, c.like), as_pointer(factors_at, c.like)
    rate = _kept(c, p, k, 1)
    if p[CAUSAL] and (p[MEAN] or rate != 1):
        for t in range(n):
            count = rate * count + 1
            factors[t] = count if p[MEAN] else 1
    else:
        if p[CAUSAL]:
            count += n
        for t in range(n):
            factors[t] = count if p[MEAN] else 1
    if p[MEAN]:
        for t in range(n):
            scores[t] *= factors[t]
    if _there(c, p, OFFSET):
        start, step = _head(c, p, OFFSET, g, k), _step(c, p, OFFSET)
        tokens = as_pointer(p[TOKENS], c.whole)
        for t in range(n):
            scores[t] += as_pointer(start + tokens[t] * step, c.like)[0]
    return count


@helper
def _logits(c, s, p, g, k, n, count, sums_at, row_at, logits_at):
    """Write the logits of a run; return the number of tokens seen after it."""
    _score(c, s, p, g, k, n, False, sums_at, row_at, _table(s, p, 1), logits_at)
    count = _complete(c, p, g, k, n, count, logits_at, _table(s, p, 2))
    logits, temperature = as_pointer(logits_at, c.like), _temperature(c, p, g, k)
    for t in range(n):
        logits[t] *= temperature
    return count


@helper
def _score_head(c, s, p, g, i, k):
    """Write the logits of a head, and the sums A after its tokens."""
    count, at, high = _norms(c, s, p, g, i, k, p[NORMS]), _low(c, p, i), _high(c, p, i)
    _inverses(c, p, p[NORMS], p[ROW])
    while at < high:
        n, at = _take(c, p, g, i, at, high)
        count = _logits(c, s, p, g, k, n, count, p[NORMS], p[ROW], _table(s, p, 0))
        _write(c, s, p, P, g, k, n, _table(s, p, 0))
    _keep(c, p, p[NEW_NORMS], p[NEW_COUNTS], _place(p, g, k, i), p[NORMS], count)


@helper
def _keep(c, p, sums_after, totals_after, place, sums_at, total):
    """Write sums after a sequence, if they are wanted."""
    if sums_after != 0:
        _copy_sums(c, sums_at, sums_after + place * p[WIDTH] * 8, p[WIDTH])
        as_pointer(totals_after, c.wide)[place] = total


@helper
def _share_tokens(c, s, p, g, i, low, high):
    """Replace the logits of some tokens by memberships."""
    at = low
    while at < high:
        n, at = _take(c, p, g, i, at, high)
        for k in range(p[HEADS]):
            _read(c, s, p, P, g, k, n, p[SHARES] + k * RUN * s)
        share_run(c.like, p[HEADS], n, p[SHARES], RUN * s)
        for k in range(p[HEADS]):
            _write(c, s, p, P, g, k, n, p[SHARES] + k * RUN * s)
    for k in range(p[HEADS]):
        _clear(c, p, P, g, k, low, high, 1)


# -- outputs ---------------------------------------------------------------------------------


@helper
def _slope(c, p, total):
    """Return ``c / N``; c for no weight at all, and a finite number for the smallest one."""
    weight = total + _number(c, p, RIDGE)
    if weight == 0:
        weight = 1.0
    slope = _number(c, p, WEIGHT) / weight
    return _number(c, p, LARGEST) if slope > _number(c, p, LARGEST) else slope


@helper
def _weigh(c, p, k, n, total, members_at, slopes_at, factors_at):
    """Write slopes and factors of a run, given memberships; return the sum of these after it."""
    members, slopes, factors = (
        as_pointer(members_at, c.like),
        as_pointer(slopes_at, c.like),
        as_pointer(factors_at, c.like),
    )
    rate = _kept(c, p, k, 1)
    for t in range(n):
        if p[CAUSAL]:
            total = rate * total + members[t]
        slopes[t] = _slope(c, p, total)
        factors[t] = -_number(c, p, GAIN) * members[t]
    return total


@helper
def _moments(c, s, p, g, i, k, sums_at, members_at):
    """Write the sums M that a sequence starts with, or that all of it reads; return the sum N of memberships."""
    if p[OLD_NORMS] != 0:
        place = _place(p, g, k, i)
        _copy_sums(c, p[OLD_SUMS] + place * p[WIDTH] * 8, sums_at, p[WIDTH])
        return as_pointer(p[OLD_TOTALS], c.wide)[place]
    if p[CAUSAL]:
        _copy_sums(c, 0, sums_at, p[WIDTH])
        return 0.0
    return _all(c, s, p, g, k, i, True, members_at, sums_at)


@helper
def _shrinkage(c, p, total, sums_at, row_at):
    """Write ``1 / (1 + c M / N)`` for all tokens of a sequence."""
    row, M, slope = as_pointer(row_at, c.like), as_pointer(sums_at, c.wide), _slope(c, p, total)
    for j in range(p[WIDTH]):
        row[j] = 1 / (1 + slope * M[j])


@helper
def _outputs(c, s, p, g, k, n, total, sums_at, row_at, members_at):
    """Write the outputs of a run; return the sum of memberships after it."""
    slopes_at, factors_at = _table(s, p, 1), _table(s, p, 2)
    w_at, w, y_at, y = _head(c, p, W, g, k), _step(c, p, W), _head(c, p, Y, g, k), _step(c, p, Y)
    powers_at, kept_at = _powers(s, p, k)
    total = _weigh(c, p, k, n, total, members_at, slopes_at, factors_at)
    if p[CAUSAL]:
        read_run(
            *(c.like, p[WIDTH], p[TOKENS], n, w_at, w, y_at, y, sums_at, powers_at, kept_at),
            *(members_at, slopes_at, factors_at),
        )
    else:
        spread_run(c.like, p[WIDTH], p[TOKENS], n, w_at, w, y_at, y, row_at, factors_at)
    return total


@helper
def _output_head(c, s, p, g, i, k):
    """Write the outputs of a head, and the sums M after its tokens."""
    members_at, low, high = _table(s, p, 0), _low(c, p, i), _high(c, p, i)
    total, at = _moments(c, s, p, g, i, k, p[SUMS], members_at), low
    _shrinkage(c, p, total, p[SUMS], p[ROW])
    while at < high:
        n, at = _take(c, p, g, i, at, high)
        _read(c, s, p, P, g, k, n, members_at)
        total = _outputs(c, s, p, g, k, n, total, p[SUMS], p[ROW], members_at)
    _clear(c, p, Y, g, k, low, high, p[WIDTH])
    _keep(c, p, p[NEW_SUMS], p[NEW_TOTALS], _place(p, g, k, i), p[SUMS], total)


@helper
def _clear_all(c, p, which, g, low, high, d):
    for k in range(p[HEADS]):
        _clear(c, p, which, g, k, low, high, d)


@helper
def _keep_all(c, p, g, i, counts, totals):
    deep = p[WIDTH] * 8
    for k in range(p[HEADS]):
        place = _place(p, g, k, i)
        _keep(c, p, p[NEW_NORMS], p[NEW_COUNTS], place, p[NORMS] + k * deep, counts[k])
        _keep(c, p, p[NEW_SUMS], p[NEW_TOTALS], place, p[SUMS] + k * deep, totals[k])


@helper
def _causal_sequence(c, s, p, g, i, reads):
    """Write the outputs of a sequence, or its memberships, run by run: each is read from memory once."""
    heads, low, high, deep, table = p[HEADS], _low(c, p, i), _high(c, p, i), p[WIDTH] * 8, RUN * s
    counts, totals = as_pointer(p[TOTALS], c.wide), as_pointer(p[TOTALS] + 8 * heads, c.wide)
    for k in range(heads):
        counts[k] = _norms(c, s, p, g, i, k, p[NORMS] + k * deep)
        totals[k] = _moments(c, s, p, g, i, k, p[SUMS] + k * deep, 0)
    _inverses(c, p, p[NORMS], p[ROW])
    at = low
    while at < high:
        n, at = _take(c, p, g, i, at, high)
        for k in range(heads):
            counts[k] = _logits(c, s, p, g, k, n, counts[k], p[NORMS] + k * deep, p[ROW], p[SHARES] + k * table)
        share_run(c.like, heads, n, p[SHARES], table)
        for k in range(heads):
            members_at = p[SHARES] + k * table
            if reads:
                totals[k] = _outputs(c, s, p, g, k, n, totals[k], p[SUMS] + k * deep, p[ROW], members_at)
            else:
                _write(c, s, p, P, g, k, n, members_at)
    _clear_all(c, p, Y if reads else P, g, low, high, p[WIDTH] if reads else 1)
    _keep_all(c, p, g, i, counts, totals)


@helper
def _even_sequence(c, s, p, g, i, reads):
    """The same for a sequence all of whose tokens see the same sums: these are made first."""
    heads, low, high, deep, table, row = p[HEADS], _low(c, p, i), _high(c, p, i), p[WIDTH] * 8, RUN * s, p[WIDTH] * s
    counts, totals = as_pointer(p[TOTALS], c.wide), as_pointer(p[TOTALS] + 8 * heads, c.wide)
    alone, at = p[OLD_NORMS] != 0, low
    for k in range(heads):
        place = _place(p, g, k, i)
        counts[k] = as_pointer(p[OLD_COUNTS], c.wide)[place] if alone else 0
        totals[k] = as_pointer(p[OLD_TOTALS], c.wide)[place] if alone else 0
        _copy_sums(c, p[OLD_NORMS] + place * deep if alone else 0, p[NORMS] + k * deep, p[WIDTH])
        _copy_sums(c, p[OLD_SUMS] + place * deep if alone else 0, p[SUMS] + k * deep, p[WIDTH])
    while at < high and not alone:
        n, at = _take(c, p, g, i, at, high)
        for k in range(heads):
            counts[k] = _advance(c, s, p, g, k, n, False, _table(s, p, 0), p[NORMS] + k * deep, counts[k])
    for k in range(heads):
        _inverses(c, p, p[NORMS] + k * deep, p[ROW] + k * row)
    at = low
    while at < high:
        n, at = _take(c, p, g, i, at, high)
        for k in range(heads):
            row_at, logits_at = p[ROW] + k * row, p[SHARES] + k * table
            counts[k] = _logits(c, s, p, g, k, n, counts[k], p[NORMS] + k * deep, row_at, logits_at)
        share_run(c.like, heads, n, p[SHARES], table)
        for k in range(heads):
            members_at = p[SHARES] + k * table
            _write(c, s, p, P, g, k, n, members_at)
            if reads and not alone:
                totals[k] = _advance(c, s, p, g, k, n, True, members_at, p[SUMS] + k * deep, totals[k])
    at = low
    for k in range(heads):
        _shrinkage(c, p, totals[k], p[SUMS] + k * deep, p[ROW] + k * row)
    while at < high and reads:
        n, at = _take(c, p, g, i, at, high)
        for k in range(heads):
            _read(c, s, p, P, g, k, n, _table(s, p, 0))
            _outputs(c, s, p, g, k, n, totals[k], 0, p[ROW] + k * row, _table(s, p, 0))
    _clear_all(c, p, Y if reads else P, g, low, high, p[WIDTH] if reads else 1)
    _keep_all(c, p, g, i, counts, totals)


@jit
def forward_tasks(like, flag, given, scratch, step, spans, reads, first, last):
    """Do tasks of one step, or all steps of sequences; outputs only if it `reads`.

    Steps over all heads have `spans` tasks for each sequence.
    """
    c, p = _entered(like, flag, given, scratch)
    s = like.itemsize
    for task in range(first, last):
        if step == ALL and p[CAUSAL]:
            _causal_sequence(c, s, p, task // p[SEQUENCES], task % p[SEQUENCES], reads)
        elif step == ALL:
            _even_sequence(c, s, p, task // p[SEQUENCES], task % p[SEQUENCES], reads)
        elif step == SHARE:
            g, i = task // (spans * p[SEQUENCES]), task // spans % p[SEQUENCES]
            low = _low(c, p, i) + task % spans * SPAN
            _share_tokens(c, s, p, g, i, low, smaller(low + SPAN, _high(c, p, i)))
        else:
            g, i, k = task // (p[HEADS] * p[SEQUENCES]), task // p[HEADS] % p[SEQUENCES], task % p[HEADS]
            if step == SCORE:
                _score_head(c, s, p, g, i, k)
            elif step == LAST:
                _output_head(c, s, p, g, i, k)


@jit
def square_rows(X, mask, weights, rates, total, mass, full, bands, first, last):
    """Add ``w x²`` of rows x to `total`, or if `full` ``w x xᵀ``, row after row, and w to `mass`.

    A task is a matrix of rows, or if `full` a band of BAND rows of its moment.
    """
    d = X.shape[2]
    wide = empty(0.0, (d,))
    for task in range(first, last):
        i, low = task // bands, task % bands * BAND
        high = smaller(low + BAND, d) if full else 1
        rate = rates[i] if len(rates) else 1.0
        for t in range(X.shape[1]):
            if len(mask) and not mask[i, t]:
                continue
            w = weights[i, t] if len(weights) else 1.0
            if low == 0:
                mass[i] = rate * mass[i] + w
            for j in range(d):
                wide[j] = X[i, t, j]
            for k in range(low, high):
                row, left = total[i, k], wide[k]
                for j in range(d):
                    row[j] = rate * row[j] + w * ((left if full else wide[j]) * wide[j])
