"""Token statistics attention, compiled: the way back.

Heads meet again where gradients in memberships become those in logits. Sums at tokens are gone through anew, from
places kept every RUN tokens, as gradients need them from the end.
"""

from __future__ import annotations

from levattn._kernels.jit import helper, jit
from levattn._kernels.llvm import as_pointer, smaller
from levattn._kernels.scratch import empty
from levattn._kernels.tokens.forward import (
    _DIAGONAL,
    _NONE,
    ALL,
    BACK,
    BLAME,
    CAUSAL,
    D_W,
    D_Y,
    FLOW,
    GAIN,
    HEADS,
    KIND,
    LATER,
    LEAST,
    OLD_NORMS,
    OTHER,
    REST,
    ROW,
    ROWS,
    RUN,
    SEQUENCES,
    SHARES,
    SPAN,
    SUMS,
    TOKENS,
    WEIGHT,
    WIDTH,
    E,
    P,
    W,
    _advance,
    _clear,
    _complete,
    _copy_sums,
    _dot,
    _entered,
    _fill,
    _gather,
    _head,
    _high,
    _inverses,
    _kept,
    _low,
    _moments,
    _norms,
    _number,
    _place,
    _powers,
    _read,
    _score,
    _shrinkage,
    _slope,
    _step,
    _table,
    _take,
    _temperature,
    _weigh,
    _write,
)
from levattn._kernels.tokens.simd import back_run, blend_run, mend_run, past_run, rest_run

__all__ = ["backward_tasks"]


@helper
def _marks(c, s, p, g, i, k, weighted, weights_at, total):
    """Go through a sequence; return sums, sums of weights and first tokens of its runs, and the number of these."""
    at, high, d = _low(c, p, i), _high(c, p, i), p[WIDTH]
    most = -(-(high - at) // RUN)
    marks, totals, places = empty(0.0, (most, d)), empty(0.0, (most,)), empty(0, (most,))
    sums = as_pointer(p[SUMS], c.wide)
    run = 0
    while at < high:
        for j in range(d):
            marks[run, j] = sums[j]
        totals[run], places[run] = total, at
        n, at = _take(c, p, g, i, at, high)
        total = _advance(c, s, p, g, k, n, weighted, weights_at, p[SUMS], total)
        run += 1
    return marks, totals, places, run


@helper
def _resume(c, p, marks, run):
    sums = as_pointer(p[SUMS], c.wide)
    for j in range(marks.shape[1]):
        sums[j] = marks[run, j]


@helper
def _steps(c, p, n, members_at, slopes_at, steps_at):
    """Write what ``w r² dY`` is multiplied by to be the gradient in M."""
    members, slopes, steps = (
        as_pointer(members_at, c.like),
        as_pointer(slopes_at, c.like),
        as_pointer(steps_at, c.like),
    )
    for t in range(n):
        steps[t] = _number(c, p, GAIN) * members[t] * slopes[t]


@helper
def _back_causal(c, s, p, g, i, k):
    members_at, slopes_at, factors_at, steps_at = _table(s, p, 0), _table(s, p, 1), _table(s, p, 2), _table(s, p, 3)
    dots_at, means_at, others_at = _table(s, p, 4), _table(s, p, 5), _table(s, p, 6)
    steps, dots, means = as_pointer(steps_at, c.like), as_pointer(dots_at, c.like), as_pointer(means_at, c.like)
    others = as_pointer(others_at, c.like)
    w_at, w, out_at, out = _head(c, p, W, g, k), _step(c, p, W), _head(c, p, D_W, g, k), _step(c, p, D_W)
    dy_at, dy = _head(c, p, D_Y, g, k), _step(c, p, D_Y)
    powers_at, kept_at = _powers(s, p, k)
    high, past, rate, row_step = _high(c, p, i), 0.0, _kept(c, p, k, 1), p[WIDTH] * s
    total = _moments(c, s, p, g, i, k, p[SUMS], members_at)
    marks, totals, places, runs = _marks(c, s, p, g, i, k, True, members_at, total)
    for run in range(runs - 1, -1, -1):
        n, _ = _take(c, p, g, i, places[run], high)
        _resume(c, p, marks, run)
        _read(c, s, p, P, g, k, n, members_at)
        _weigh(c, p, k, n, totals[run], members_at, slopes_at, factors_at)
        _steps(c, p, n, members_at, slopes_at, steps_at)
        _fill(c, dots_at, n, 0)
        _fill(c, means_at, n, 0)
        _fill(c, others_at, n, 0)
        back_run(
            *(c.like, p[WIDTH], p[TOKENS], n, w_at, w, dy_at, dy, out_at, out, p[SUMS], powers_at, kept_at),
            *(members_at, slopes_at, factors_at, steps_at, p[ROWS], row_step, dots_at, means_at),
        )
        past_run(
            *(c.like, p[WIDTH], p[TOKENS], n, w_at, w, out_at, out, p[ROWS], row_step, p[LATER], powers_at, kept_at),
            *(members_at, others_at),
        )
        for t in range(n - 1, -1, -1):
            past = rate * past + steps[t] / _number(c, p, WEIGHT) * means[t]
            dots[t] = others[t] - _number(c, p, GAIN) * dots[t] - past
        _write(c, s, p, E, g, k, n, dots_at)


@helper
def _back_everywhere(c, s, p, g, i, k):
    members_at, slopes_at, factors_at = _table(s, p, 0), _table(s, p, 1), _table(s, p, 2)
    steps_at, dots_at, others_at = _table(s, p, 3), _table(s, p, 4), _table(s, p, 5)
    dots, others = as_pointer(dots_at, c.like), as_pointer(others_at, c.like)
    w_at, w, out_at, out = _head(c, p, W, g, k), _step(c, p, W), _head(c, p, D_W, g, k), _step(c, p, D_W)
    dy_at, dy = _head(c, p, D_Y, g, k), _step(c, p, D_Y)
    low, high, d, past = _low(c, p, i), _high(c, p, i), p[WIDTH], 0.0
    total = _moments(c, s, p, g, i, k, p[SUMS], members_at)
    _shrinkage(c, p, total, p[SUMS], p[ROW])
    alone = p[OLD_NORMS] != 0  # no sum depends on the tokens
    at = low
    while at < high and not alone:
        n, at = _take(c, p, g, i, at, high)
        _read(c, s, p, P, g, k, n, members_at)
        _weigh(c, p, k, n, total, members_at, slopes_at, factors_at)
        _steps(c, p, n, members_at, slopes_at, steps_at)
        _gather(c, s, p, g, k, D_Y, n, p[LATER], steps_at)
    row, other, M = as_pointer(p[ROW], c.like), as_pointer(p[OTHER], c.like), as_pointer(p[SUMS], c.wide)
    sums, slope = as_pointer(p[LATER], c.wide), _slope(c, p, total)
    for j in range(d):
        sums[j] *= row[j] * row[j]
        other[j] = sums[j]
        past += sums[j] * (slope * M[j] / _number(c, p, WEIGHT))
    at = low
    while at < high:
        n, at = _take(c, p, g, i, at, high)
        _read(c, s, p, P, g, k, n, members_at)
        _weigh(c, p, k, n, total, members_at, slopes_at, factors_at)
        _dot(c, s, p, g, k, D_Y, n, p[ROW], dots_at)
        _fill(c, others_at, n, 0)
        if not alone:
            _dot(c, s, p, g, k, W, n, p[OTHER], others_at)
        for t in range(n):
            dots[t] = others[t] - _number(c, p, GAIN) * dots[t] - past
        _write(c, s, p, E, g, k, n, dots_at)
        blend_run(
            *(c.like, d, p[TOKENS], n, w_at, w, dy_at, dy, out_at, out, p[ROW], factors_at, p[OTHER], members_at)
        )


@helper
def _back_head(c, s, p, g, i, k):
    """Write the gradients in memberships, and what outputs give W at once."""
    _copy_sums(c, 0, p[LATER], p[WIDTH])
    if p[CAUSAL]:
        _back_causal(c, s, p, g, i, k)
    else:
        _back_everywhere(c, s, p, g, i, k)
    low, high = _low(c, p, i), _high(c, p, i)
    _clear(c, p, D_W, g, k, low, high, p[WIDTH])
    _clear(c, p, E, g, k, low, high, 1)


@helper
def _blame_tokens(c, s, p, g, i, low, high):
    """Replace the gradients in memberships of some tokens by those in logits."""
    heads, at = p[HEADS], low
    mean = as_pointer(_table(s, p, 0), c.like)
    while at < high:
        n, at = _take(c, p, g, i, at, high)
        _fill(c, _table(s, p, 0), n, 0)
        for k in range(heads):
            members_at, blame_at = p[SHARES] + k * RUN * s, p[SHARES] + (heads + k) * RUN * s
            _read(c, s, p, P, g, k, n, members_at)
            _read(c, s, p, E, g, k, n, blame_at)
            members, blame = as_pointer(members_at, c.like), as_pointer(blame_at, c.like)
            for t in range(n):
                mean[t] += members[t] * blame[t]
        for k in range(heads):
            members_at, blame_at = p[SHARES] + k * RUN * s, p[SHARES] + (heads + k) * RUN * s
            members, blame = as_pointer(members_at, c.like), as_pointer(blame_at, c.like)
            for t in range(n):
                blame[t] = members[t] * (blame[t] - mean[t])
            _write(c, s, p, E, g, k, n, blame_at)


@helper
def _blame(c, s, p, g, i, k, n, scores_at, factors_at, slopes_at):
    """Write the gradients in the bare scores of a run, given what the temperature multiplies."""
    _read(c, s, p, E, g, k, n, slopes_at)
    scores, factors, slopes = (
        as_pointer(scores_at, c.like),
        as_pointer(factors_at, c.like),
        as_pointer(slopes_at, c.like),
    )
    temperature, total = _temperature(c, p, g, k), 0.0
    for t in range(n):
        total += slopes[t] * scores[t]
        slopes[t] *= temperature * factors[t]
    as_pointer(p[FLOW], c.wide)[_place(p, g, k, i)] += total


@helper
def _rest_causal(c, s, p, g, i, k):
    scores_at, factors_at, slopes_at, ones_at = _table(s, p, 0), _table(s, p, 1), _table(s, p, 2), _table(s, p, 3)
    w_at, w, out_at, out = _head(c, p, W, g, k), _step(c, p, W), _head(c, p, D_W, g, k), _step(c, p, D_W)
    powers_at, kept_at = _powers(s, p, k)
    high = _high(c, p, i)
    count = _norms(c, s, p, g, i, k, p[SUMS])
    marks, totals, places, runs = _marks(c, s, p, g, i, k, False, ones_at, count)
    for run in range(runs - 1, -1, -1):
        n, _ = _take(c, p, g, i, places[run], high)
        _resume(c, p, marks, run)
        _score(c, s, p, g, k, n, True, p[SUMS], p[ROW], ones_at, scores_at)
        _complete(c, p, g, k, n, totals[run], scores_at, factors_at)
        _blame(c, s, p, g, i, k, n, scores_at, factors_at, slopes_at)
        rest_run(
            *(c.like, p[WIDTH], p[TOKENS], n, w_at, w, out_at, out, p[ROWS], p[WIDTH] * s, p[LATER]),
            *(powers_at, kept_at, slopes_at),
        )


@helper
def _rest_everywhere(c, s, p, g, i, k):
    """As there, where scores are by the same row for all tokens."""
    scores_at, factors_at, slopes_at, ones_at = _table(s, p, 0), _table(s, p, 1), _table(s, p, 2), _table(s, p, 3)
    w_at, w, out_at, out = _head(c, p, W, g, k), _step(c, p, W), _head(c, p, D_W, g, k), _step(c, p, D_W)
    low, high, d = _low(c, p, i), _high(c, p, i), p[WIDTH]
    count, at = _norms(c, s, p, g, i, k, p[SUMS]), low
    _inverses(c, p, p[SUMS], p[ROW])
    turns = p[KIND] == _DIAGONAL and p[OLD_NORMS] == 0  # sums depend on the tokens
    while at < high:
        n, at = _take(c, p, g, i, at, high)
        _score(c, s, p, g, k, n, False, p[SUMS], p[ROW], ones_at, scores_at)
        count = _complete(c, p, g, k, n, count, scores_at, factors_at)
        _blame(c, s, p, g, i, k, n, scores_at, factors_at, slopes_at)
        if turns:
            _gather(c, s, p, g, k, W, n, p[LATER], slopes_at)
    if p[KIND] == _NONE:
        return
    row, less = as_pointer(p[ROW], c.like), as_pointer(p[OTHER], c.like)
    A, sums = as_pointer(p[SUMS], c.wide), as_pointer(p[LATER], c.wide)
    for j in range(d):
        less[j] = A[j]
        less[j] = sums[j] * row[j] * row[j] if turns and not less[j] < _number(c, p, LEAST) else 0
    slopes, factors, temperature = (
        as_pointer(slopes_at, c.like),
        as_pointer(factors_at, c.like),
        _temperature(c, p, g, k),
    )
    at = low
    while at < high:
        n, at = _take(c, p, g, i, at, high)
        _read(c, s, p, E, g, k, n, slopes_at)
        for t in range(n):
            slopes[t] *= temperature * factors[0]
        mend_run(c.like, d, p[TOKENS], n, w_at, w, out_at, out, p[ROW], slopes_at, p[OTHER])


@helper
def _rest_head(c, s, p, g, i, k):
    """Add what logits give W, and write the gradient in the temperature."""
    _copy_sums(c, 0, p[LATER], p[WIDTH])
    as_pointer(p[FLOW], c.wide)[_place(p, g, k, i)] = 0
    if p[CAUSAL] and p[KIND] == _DIAGONAL:
        _rest_causal(c, s, p, g, i, k)
    else:
        _rest_everywhere(c, s, p, g, i, k)


@jit
def backward_tasks(like, flag, given, scratch, step, spans, reads, first, last):
    """Do tasks of one step of the way back, or all of them for sequences; memberships are known."""
    c, p = _entered(like, flag, given, scratch)
    s = like.itemsize
    for task in range(first, last):
        if step == ALL:
            g, i = task // p[SEQUENCES], task % p[SEQUENCES]
            for k in range(p[HEADS]):
                _back_head(c, s, p, g, i, k)
            _blame_tokens(c, s, p, g, i, _low(c, p, i), _high(c, p, i))
            for k in range(p[HEADS]):
                _rest_head(c, s, p, g, i, k)
        elif step == BLAME:
            g, i = task // (spans * p[SEQUENCES]), task // spans % p[SEQUENCES]
            low = _low(c, p, i) + task % spans * SPAN
            _blame_tokens(c, s, p, g, i, low, smaller(low + SPAN, _high(c, p, i)))
        else:
            g, i, k = task // (p[HEADS] * p[SEQUENCES]), task // p[HEADS] % p[SEQUENCES], task % p[HEADS]
            if step == BACK:
                _back_head(c, s, p, g, i, k)
            elif step == REST:
                _rest_head(c, s, p, g, i, k)
