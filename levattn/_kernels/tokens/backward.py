"""Token statistics attention, compiled: the backward pass.

Heads interact where gradients in memberships become gradients in logits. Gradients need the sums at tokens in reverse
order, so they are formed again, starting from copies kept every RUN tokens.
"""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import helper, jit
from levattn._kernels.llvm import as_pointer, smaller
from levattn._kernels.scratch import empty, fill
from levattn._kernels.tokens.forward import (
    ALL,
    D_LOGITS,
    D_MEMBERSHIPS,
    D_SCORES,
    complete,
    inverses,
    score,
    shrinkage,
    slope_of,
    weigh,
)
from levattn._kernels.tokens.plan import (
    DIAGONAL,
    NONE,
    RUN,
    SPAN,
    advance,
    begin_sums,
    bounds,
    clear_masked,
    copy_sums,
    dot,
    gather,
    head_rows,
    rate_of,
    read_numbers,
    run_of,
    sums_of,
    sums_place,
    table,
    take,
    temperature_of,
    write,
)
from levattn._kernels.tokens.simd import (
    causal_output_gradients,
    causal_score_gradients,
    output_gradients,
    score_gradients,
    sum_gradients,
)

# Beyond these products of float32 may leave its range: c, the gain, c m, second moments m, and gain² m³
_MOST_C, _MOST_GAIN, _MOST_SHRINKAGE, _LEAST_M, _MOST_M, _LEAST_PRODUCT = 1e12, 1e24, 1e12, 1e-24, 1e16, 1e-60
_MOST_LOGIT = 256.0  # rounding a larger one changes memberships, and with them gradients, by up to 1e-4


@helper
def _marks(like, p, g, i, k, weighted, weights_at, total):
    """Go through a sequence; return the sums, sums of weights and first tokens of its runs, and their number."""
    (at, high), d = bounds(p, i), p.width
    most = -(-(high - at) // RUN)
    marks, totals, places = empty(0.0, (most, d)), empty(0.0, (most + 1,)), empty(0, (most,))
    sums = as_pointer(p.sums, 0.0)
    run = 0
    while at < high:
        for j in range(d):
            marks[run, j] = sums[j]
        totals[run], places[run] = total, at
        n, at = take(p, g, i, at, high)
        total = advance(like, p, g, k, n, weighted, weights_at, p.sums, total)
        run += 1
    totals[run] = total
    return marks, totals, places, run


@helper
def _is_far(p, total, sums_at):
    """Tell whether the gradients in float32 of tokens with these sums may leave its range."""
    M, top = as_pointer(sums_at, 0.0), 0.0
    if p.size == 8 or not total > 0:
        return False
    for j in range(p.width):
        top = M[j] if not M[j] <= top else top
    m = top / total
    if m == 0:
        return p.weight > _MOST_C or p.gain > _MOST_GAIN
    near = p.weight <= _MOST_C and p.gain <= _MOST_GAIN and p.weight * m <= _MOST_SHRINKAGE
    return not (near and _LEAST_M <= m <= _MOST_M and p.gain * p.gain * m * m * m >= _LEAST_PRODUCT)


@helper
def _resume(p, marks, run):
    sums = as_pointer(p.sums, 0.0)
    for j in range(marks.shape[1]):
        sums[j] = marks[run, j]


@helper
def _weigh_back(like, p, g, k, n, total, members_at, slopes_at, factors_at, steps_at):
    """Read memberships; write slopes, factors, and steps, by which ``w r² dY`` becomes the gradient in M."""
    read_numbers(like, p, p.P, g, k, n, members_at)
    weigh(like, p, k, n, total, members_at, slopes_at, factors_at)
    members, slopes, steps = as_pointer(members_at, like), as_pointer(slopes_at, like), as_pointer(steps_at, like)
    for t in range(n):
        steps[t] = p.gain * members[t] * slopes[t]


@helper
def _back_causal(like, p, g, i, k):
    members_at, slopes_at, factors_at, steps_at = table(p, 0), table(p, 1), table(p, 2), table(p, 3)
    dots_at, means_at, others_at = table(p, 4), table(p, 5), table(p, 6)
    steps, dots, means = as_pointer(steps_at, like), as_pointer(dots_at, like), as_pointer(means_at, like)
    others = as_pointer(others_at, like)
    w, dy, out, gammas = (
        head_rows(p.W, g, k),
        head_rows(p.D_Y, g, k),
        head_rows(p.D_W, g, k),
        (p.rows, p.width * p.size),
    )
    high, past, rate = bounds(p, i)[1], 0.0, rate_of(p, k)
    total = begin_sums(like, p, g, i, k, True, p.sums, members_at)
    marks, totals, places, runs = _marks(like, p, g, i, k, True, members_at, total)
    far = runs > 0 and _is_far(p, totals[runs], p.sums)
    for index in range(runs - 1, -1, -1):
        n, _ = take(p, g, i, places[index], high)
        _resume(p, marks, index)
        far |= _is_far(p, totals[index], p.sums)
        _weigh_back(like, p, g, k, n, totals[index], members_at, slopes_at, factors_at, steps_at)
        fill(like, dots_at, n, 0)
        fill(like, means_at, n, 0)
        fill(like, others_at, n, 0)
        run, sums, later = run_of(p, n), sums_of(p, k, p.sums), sums_of(p, k, p.later)
        causal_output_gradients(
            *(like, run, w, dy, out, sums, members_at, slopes_at, factors_at, steps_at, gammas, dots_at, means_at)
        )
        sum_gradients(like, run, w, out, gammas, later, members_at, others_at)
        for t in range(n - 1, -1, -1):
            past = rate * past + steps[t] / p.weight * means[t]
            dots[t] = others[t] - p.gain * dots[t] - past
        write(like, p, p.E, g, k, n, dots_at)
    return far


@helper
def _back_everywhere(like, p, g, i, k):
    members_at, slopes_at, factors_at = table(p, 0), table(p, 1), table(p, 2)
    steps_at, dots_at, others_at = table(p, 3), table(p, 4), table(p, 5)
    dots, others = as_pointer(dots_at, like), as_pointer(others_at, like)
    w, dy, out = head_rows(p.W, g, k), head_rows(p.D_Y, g, k), head_rows(p.D_W, g, k)
    (low, high), past = bounds(p, i), 0.0
    total = begin_sums(like, p, g, i, k, True, p.sums, members_at)
    shrinkage(like, p, total, p.sums, p.row)
    far = _is_far(p, total, p.sums)
    alone = p.A != 0  # no sum depends on the tokens
    at = low
    while at < high and not alone:
        n, at = take(p, g, i, at, high)
        _weigh_back(like, p, g, k, n, total, members_at, slopes_at, factors_at, steps_at)
        gather(like, p, g, k, p.D_Y, n, p.later, steps_at)
    row, other, M = as_pointer(p.row, like), as_pointer(p.other, like), as_pointer(p.sums, 0.0)
    sums, slope = as_pointer(p.later, 0.0), slope_of(p, total)
    for j in range(p.width):
        sums[j] *= row[j] * row[j]
        other[j] = sums[j]
        past += sums[j] * (slope * M[j] / p.weight)
    at = low
    while at < high:
        n, at = take(p, g, i, at, high)
        read_numbers(like, p, p.P, g, k, n, members_at)
        weigh(like, p, k, n, total, members_at, slopes_at, factors_at)
        dot(like, p, g, k, p.D_Y, n, p.row, dots_at)
        fill(like, others_at, n, 0)
        if not alone:
            dot(like, p, g, k, p.W, n, p.other, others_at)
        for t in range(n):
            dots[t] = others[t] - p.gain * dots[t] - past
        write(like, p, p.E, g, k, n, dots_at)
        output_gradients(like, run_of(p, n), w, dy, out, p.row, factors_at, p.other, members_at)
    return far


@helper
def _membership_gradients(like, p, g, i, k):
    """Write the gradients in memberships, and the part of the gradient in W that comes through outputs.

    NaN in place of the gradient in the temperature says that the range of float32 may be too small.
    """
    copy_sums(0, p.later, p.width)
    far = _back_causal(like, p, g, i, k) if p.causal else _back_everywhere(like, p, g, i, k)
    as_pointer(p.flow, 0.0)[sums_place(p, g, k, i)] = np.nan if far else 0.0
    low, high = bounds(p, i)
    clear_masked(like, p, p.D_W, g, k, low, high, p.width)
    clear_masked(like, p, p.E, g, k, low, high, 1)


@helper
def _logit_gradients(like, p, g, i, low, high):
    """Replace the gradients in memberships of some tokens by gradients in logits."""
    heads, at, step = p.heads, low, RUN * p.size
    mean, top, base = as_pointer(table(p, 0), like), as_pointer(table(p, 1), like), as_pointer(table(p, 2), like)
    while at < high:
        n, at = take(p, g, i, at, high)
        fill(like, table(p, 0), n, 0)
        fill(like, table(p, 1), n, 0)
        fill(like, table(p, 2), n, 0)
        for k in range(heads):
            members_at, slopes_at = p.shares + k * step, p.shares + (heads + k) * step
            read_numbers(like, p, p.P, g, k, n, members_at)
            read_numbers(like, p, p.E, g, k, n, slopes_at)
            members, slopes = as_pointer(members_at, like), as_pointer(slopes_at, like)
            for t in range(n):
                base[t] = slopes[t] if members[t] > top[t] else base[t]
                top[t] = members[t] if members[t] > top[t] else top[t]
        for k in range(heads):
            members_at, slopes_at = p.shares + k * step, p.shares + (heads + k) * step
            members, slopes = as_pointer(members_at, like), as_pointer(slopes_at, like)
            for t in range(n):  # from the head of most membership on: near 1, the mean would be its slope alone
                slopes[t] -= base[t]
                mean[t] += members[t] * slopes[t]
        for k in range(heads):
            members_at, slopes_at = p.shares + k * step, p.shares + (heads + k) * step
            members, slopes = as_pointer(members_at, like), as_pointer(slopes_at, like)
            for t in range(n):
                slopes[t] = members[t] * (slopes[t] - mean[t])
            write(like, p, p.E, g, k, n, slopes_at)


@helper
def _slopes(like, p, g, i, k, n, scores_at, factors_at, slopes_at):
    """Write the gradients in the bare scores of a run, given the scores that the temperature multiplies."""
    read_numbers(like, p, p.E, g, k, n, slopes_at)
    scores, factors, slopes = as_pointer(scores_at, like), as_pointer(factors_at, like), as_pointer(slopes_at, like)
    temperature, total, most = temperature_of(like, p, g, k), 0.0, 0.0
    for t in range(n):
        total += slopes[t] * scores[t]
        logit = abs(temperature * scores[t]) if slopes[t] != 0 else 0.0
        most = logit if logit > most else most
        slopes[t] *= temperature * factors[t]
    far = p.size == 4 and most > _MOST_LOGIT
    as_pointer(p.flow, 0.0)[sums_place(p, g, k, i)] += np.nan if far else total


@helper
def _score_gradients_causal(like, p, g, i, k):
    scores_at, factors_at, slopes_at, ones_at = table(p, 0), table(p, 1), table(p, 2), table(p, 3)
    w, out, rows, later = (
        head_rows(p.W, g, k),
        head_rows(p.D_W, g, k),
        (p.rows, 2 * p.width * p.size),
        sums_of(p, k, p.later),
    )
    high = bounds(p, i)[1]
    count = begin_sums(like, p, g, i, k, False, p.sums, scores_at)
    marks, totals, places, runs = _marks(like, p, g, i, k, False, ones_at, count)
    for run in range(runs - 1, -1, -1):
        n, _ = take(p, g, i, places[run], high)
        _resume(p, marks, run)
        score(like, p, g, k, n, True, p.sums, p.row, ones_at, scores_at)
        complete(like, p, g, k, n, totals[run], scores_at, factors_at)
        _slopes(like, p, g, i, k, n, scores_at, factors_at, slopes_at)
        causal_score_gradients(like, run_of(p, n), w, out, rows, later, slopes_at)


@helper
def _score_gradients_everywhere(like, p, g, i, k):
    """Write the gradients of scores where all tokens share one row of factors."""
    scores_at, factors_at, slopes_at, ones_at = table(p, 0), table(p, 1), table(p, 2), table(p, 3)
    w, out, (low, high) = head_rows(p.W, g, k), head_rows(p.D_W, g, k), bounds(p, i)
    count, at = begin_sums(like, p, g, i, k, False, p.sums, scores_at), low
    inverses(like, p, p.sums, p.row)
    depends = p.logits == DIAGONAL and p.A == 0  # sums depend on the tokens
    while at < high:
        n, at = take(p, g, i, at, high)
        score(like, p, g, k, n, False, p.sums, p.row, ones_at, scores_at)
        count = complete(like, p, g, k, n, count, scores_at, factors_at)
        _slopes(like, p, g, i, k, n, scores_at, factors_at, slopes_at)
        if depends:
            gather(like, p, g, k, p.W, n, p.later, slopes_at)
    if p.logits == NONE:
        return
    row, less = as_pointer(p.row, like), as_pointer(p.other, like)
    A, sums = as_pointer(p.sums, 0.0), as_pointer(p.later, 0.0)
    for j in range(p.width):
        less[j] = A[j]
        less[j] = sums[j] * row[j] * row[j] if depends and not less[j] < p.least else 0
    slopes, factors = as_pointer(slopes_at, like), as_pointer(factors_at, like)
    temperature = temperature_of(like, p, g, k)
    at = low
    while at < high:
        n, at = take(p, g, i, at, high)
        read_numbers(like, p, p.E, g, k, n, slopes_at)
        for t in range(n):
            slopes[t] *= temperature * factors[0]
        score_gradients(like, run_of(p, n), w, out, p.row, slopes_at, p.other)


@helper
def _score_gradients(like, p, g, i, k):
    """Add the part of the gradient in W that comes through logits, and the gradient in the temperature."""
    copy_sums(0, p.later, p.width)
    if p.causal and p.logits == DIAGONAL:
        _score_gradients_causal(like, p, g, i, k)
    else:
        _score_gradients_everywhere(like, p, g, i, k)


@jit
def backward_tasks(like, plan, step, spans, reads, first, last):
    """Do tasks of one step of the backward pass, or all steps of sequences; memberships are known."""
    like, p = as_pointer(0, like), plan[0]
    for task in range(first, last):
        if step == ALL:
            g, i = task // p.sequences, task % p.sequences
            low, high = bounds(p, i)
            for k in range(p.heads):
                _membership_gradients(like, p, g, i, k)
            _logit_gradients(like, p, g, i, low, high)
            for k in range(p.heads):
                _score_gradients(like, p, g, i, k)
        elif step == D_LOGITS:
            g, i = task // (spans * p.sequences), task // spans % p.sequences
            low, high = bounds(p, i)
            low += task % spans * SPAN
            _logit_gradients(like, p, g, i, low, smaller(low + SPAN, high))
        else:
            g, i, k = task // (p.heads * p.sequences), task // p.heads % p.sequences, task % p.heads
            if step == D_MEMBERSHIPS:
                _membership_gradients(like, p, g, i, k)
            elif step == D_SCORES:
                _score_gradients(like, p, g, i, k)
