"""Token statistics attention, compiled: running sums of squares, memberships and outputs.

Heads interact only in the softmax of their logits. So the work has steps, each over one head of a sequence or over all
heads of some tokens. The steps are scores, memberships and outputs; backward, the gradients in memberships, in logits,
and in scores. A task is one step, or all steps for a sequence.
"""

from __future__ import annotations

from levattn._kernels.jit import helper, jit
from levattn._kernels.llvm import address, as_pointer, larger, smaller
from levattn._kernels.scratch import fill
from levattn._kernels.tokens.plan import (
    DIAGONAL,
    NONE,
    NORM,
    RUN,
    SPAN,
    advance,
    begin_sums,
    bounds,
    clear_masked,
    copy_sums,
    dot,
    end_sums,
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
from levattn._kernels.tokens.simd import read_run, score_run, share_run, spread_run

ALL, SCORES, MEMBERSHIPS, OUTPUTS, D_MEMBERSHIPS, D_LOGITS, D_SCORES = range(7)  # steps


# -- scores ----------------------------------------------------------------------------------


@helper
def inverses(like, p, sums_at, row_at):
    """Write the row of factors of a token's products in scores, if all tokens see the same sums."""
    row, A = as_pointer(row_at, like), as_pointer(sums_at, 0.0)
    for j in range(p.width):
        row[j] = p.logits == NORM
        if p.logits == DIAGONAL:
            row[j] = A[j]  # rounded as the sums at tokens are
            row[j] = 1 / larger(p.least, row[j]) if row[j] == row[j] else row[j]


@helper
def score(like, p, g, k, n, back, sums_at, row_at, ones_at, scores_at):
    """Write the scores of a run, and if `back`, 1/A and 1 − x/A of each token to `rows`."""
    if p.causal and p.logits == DIAGONAL:
        fill(like, scores_at, n, 0)
        run, w, sums = run_of(p, n), head_rows(p.W, g, k), sums_of(p, k, sums_at)
        rows = p.rows, 2 * p.width * p.size
        if back:
            score_run(like, run, 1, w, sums, p.least, scores_at, rows)
        else:
            score_run(like, run, 0, w, sums, p.least, scores_at, rows)
        return
    if p.logits == NONE:
        fill(like, scores_at, n, 0)
    else:
        dot(like, p, g, k, p.W, n, row_at, scores_at)
    if p.causal and p.A_after != 0:
        fill(like, ones_at, n, 1)
        gather(like, p, g, k, p.W, n, sums_at, ones_at)


@helper
def complete(like, p, g, k, n, count, scores_at, factors_at):
    """Multiply the scores of a run by factors, which are written, and add offsets; return the tokens seen after it."""
    scores, factors = as_pointer(scores_at, like), as_pointer(factors_at, like)
    rate = rate_of(p, k)
    if p.causal and (p.mean or rate != 1):
        for t in range(n):
            count = rate * count + 1
            factors[t] = count if p.mean else 1
    else:
        if p.causal:
            count += n
        for t in range(n):
            factors[t] = count if p.mean else 1
    if p.mean:
        for t in range(n):
            scores[t] *= factors[t]
    if p.offset.at != 0:
        start, step = head_rows(p.offset, g, k)
        tokens = as_pointer(p.tokens, 0)
        for t in range(n):
            scores[t] += as_pointer(start + tokens[t] * step, like)[0]
    return count


@helper
def _logits(like, p, g, k, n, count, sums_at, row_at, logits_at):
    """Write the logits of a run; return the number of tokens seen after it."""
    score(like, p, g, k, n, False, sums_at, row_at, table(p, 1), logits_at)
    count = complete(like, p, g, k, n, count, logits_at, table(p, 2))
    logits, temperature = as_pointer(logits_at, like), temperature_of(like, p, g, k)
    for t in range(n):
        logits[t] *= temperature
    return count


@helper
def _score_head(like, p, g, i, k):
    """Write the logits of a head, and the sums A after its tokens."""
    count = begin_sums(like, p, g, i, k, False, p.norms, table(p, 0))
    at, high = bounds(p, i)
    inverses(like, p, p.norms, p.row)
    while at < high:
        n, at = take(p, g, i, at, high)
        count = _logits(like, p, g, k, n, count, p.norms, p.row, table(p, 0))
        write(like, p, p.P, g, k, n, table(p, 0))
    end_sums(p, g, i, k, False, p.norms, count)


@helper
def _share_tokens(like, p, g, i, low, high):
    """Replace the logits of some tokens by memberships."""
    at, step = low, RUN * p.size
    while at < high:
        n, at = take(p, g, i, at, high)
        for k in range(p.heads):
            read_numbers(like, p, p.P, g, k, n, p.shares + k * step)
        share_run(like, p.heads, n, p.shares, step)
        for k in range(p.heads):
            write(like, p, p.P, g, k, n, p.shares + k * step)
    for k in range(p.heads):
        clear_masked(like, p, p.P, g, k, low, high, 1)


# -- outputs ---------------------------------------------------------------------------------


@helper
def slope_of(p, total):
    """Return ``c / N``; c for no weight at all, and a finite number for the smallest one."""
    weight = total + p.ridge
    if weight == 0:
        weight = 1.0
    slope = p.weight / weight
    return p.largest if slope > p.largest else slope


@helper
def weigh(like, p, k, n, total, members_at, slopes_at, factors_at):
    """Write slopes and factors of a run, given memberships; return the sum of memberships after it."""
    members, slopes = as_pointer(members_at, like), as_pointer(slopes_at, like)
    factors, rate = as_pointer(factors_at, like), rate_of(p, k)
    for t in range(n):
        if p.causal:
            total = rate * total + members[t]
        slopes[t] = slope_of(p, total)
        factors[t] = -p.gain * members[t]
    return total


@helper
def shrinkage(like, p, total, sums_at, row_at):
    """Write ``1 / (1 + c M / N)`` for all tokens of a sequence."""
    row, M, slope = as_pointer(row_at, like), as_pointer(sums_at, 0.0), slope_of(p, total)
    for j in range(p.width):
        row[j] = 1 / (1 + slope * M[j])


@helper
def _outputs(like, p, g, k, n, total, sums_at, row_at, members_at):
    """Write the outputs of a run; return the sum of memberships after it."""
    run, w, y = run_of(p, n), head_rows(p.W, g, k), head_rows(p.Y, g, k)
    slopes_at, factors_at = table(p, 1), table(p, 2)
    total = weigh(like, p, k, n, total, members_at, slopes_at, factors_at)
    if p.causal:
        read_run(like, run, w, y, sums_of(p, k, sums_at), members_at, slopes_at, factors_at)
    else:
        spread_run(like, run, w, y, row_at, factors_at)
    return total


@helper
def _output_head(like, p, g, i, k):
    """Write the outputs of a head, and the sums M after its tokens."""
    members_at, (low, high) = table(p, 0), bounds(p, i)
    total, at = begin_sums(like, p, g, i, k, True, p.sums, members_at), low
    shrinkage(like, p, total, p.sums, p.row)
    while at < high:
        n, at = take(p, g, i, at, high)
        read_numbers(like, p, p.P, g, k, n, members_at)
        total = _outputs(like, p, g, k, n, total, p.sums, p.row, members_at)
    clear_masked(like, p, p.Y, g, k, low, high, p.width)
    end_sums(p, g, i, k, True, p.sums, total)


@helper
def _finish(like, p, g, i, reads, counts, totals):
    """Write zeros for masked tokens of a sequence, and the sums after it."""
    (low, high), deep = bounds(p, i), p.width * 8
    for k in range(p.heads):
        if reads:
            clear_masked(like, p, p.Y, g, k, low, high, p.width)
        else:
            clear_masked(like, p, p.P, g, k, low, high, 1)
        end_sums(p, g, i, k, False, p.norms + k * deep, counts[k])
        end_sums(p, g, i, k, True, p.sums + k * deep, totals[k])


@helper
def _causal_sequence(like, p, g, i, reads):
    """Write the outputs of a sequence, or its memberships, run by run: each is read from memory once."""
    heads, deep, step = p.heads, p.width * 8, RUN * p.size
    counts, totals = as_pointer(p.totals, 0.0), as_pointer(p.totals + 8 * heads, 0.0)
    for k in range(heads):
        counts[k] = begin_sums(like, p, g, i, k, False, p.norms + k * deep, 0)
        totals[k] = begin_sums(like, p, g, i, k, True, p.sums + k * deep, 0)
    inverses(like, p, p.norms, p.row)
    at, high = bounds(p, i)
    while at < high:
        n, at = take(p, g, i, at, high)
        for k in range(heads):
            counts[k] = _logits(like, p, g, k, n, counts[k], p.norms + k * deep, p.row, p.shares + k * step)
        share_run(like, heads, n, p.shares, step)
        for k in range(heads):
            members_at = p.shares + k * step
            if reads:
                totals[k] = _outputs(like, p, g, k, n, totals[k], p.sums + k * deep, p.row, members_at)
            else:
                write(like, p, p.P, g, k, n, members_at)
    _finish(like, p, g, i, reads, counts, totals)


@helper
def _even_sequence(like, p, g, i, reads):
    """Write the outputs of a sequence that is not causal: sum over all tokens first, then process each."""
    heads, deep, step, row = p.heads, p.width * 8, RUN * p.size, p.width * p.size
    counts, totals = as_pointer(p.totals, 0.0), as_pointer(p.totals + 8 * heads, 0.0)
    alone, (low, high) = p.A != 0, bounds(p, i)
    for k in range(heads):
        place = sums_place(p, g, k, i)
        counts[k] = as_pointer(p.n, 0.0)[place] if alone else 0
        totals[k] = as_pointer(p.N, 0.0)[place] if alone else 0
        copy_sums(p.A + place * deep if alone else 0, p.norms + k * deep, p.width)
        copy_sums(p.M + place * deep if alone else 0, p.sums + k * deep, p.width)
    at = low
    while at < high and not alone:
        n, at = take(p, g, i, at, high)
        for k in range(heads):
            counts[k] = advance(like, p, g, k, n, False, table(p, 0), p.norms + k * deep, counts[k])
    for k in range(heads):
        inverses(like, p, p.norms + k * deep, p.row + k * row)
    at = low
    while at < high:
        n, at = take(p, g, i, at, high)
        for k in range(heads):
            row_at, logits_at = p.row + k * row, p.shares + k * step
            counts[k] = _logits(like, p, g, k, n, counts[k], p.norms + k * deep, row_at, logits_at)
        share_run(like, heads, n, p.shares, step)
        for k in range(heads):
            members_at = p.shares + k * step
            write(like, p, p.P, g, k, n, members_at)
            if reads and not alone:
                totals[k] = advance(like, p, g, k, n, True, members_at, p.sums + k * deep, totals[k])
    at = low
    for k in range(heads):
        shrinkage(like, p, totals[k], p.sums + k * deep, p.row + k * row)
    while at < high and reads:
        n, at = take(p, g, i, at, high)
        for k in range(heads):
            read_numbers(like, p, p.P, g, k, n, table(p, 0))
            _outputs(like, p, g, k, n, totals[k], 0, p.row + k * row, table(p, 0))
    _finish(like, p, g, i, reads, counts, totals)


@jit
def place_arrays(plan, W, Y, temperature, before, after):
    """Write the addresses of tokens, outputs, temperatures and sums, all contiguous, to a plan."""
    p = plan[0]
    p.W.at, p.Y.at, p.temperature = address(W), address(Y), address(temperature)
    p.A, p.n, p.M, p.N = address(before[0]), address(before[1]), address(before[2]), address(before[3])
    p.A_after, p.n_after = address(after[0]), address(after[1])
    p.M_after, p.N_after = address(after[2]), address(after[3])


@jit
def forward_tasks(like, plan, step, spans, reads, first, last):
    """Do tasks of one step, or all steps of sequences; outputs only if `reads`.

    Steps over all heads have `spans` tasks for each sequence.
    """
    like, p = as_pointer(0, like), plan[0]
    for task in range(first, last):
        if step == ALL:
            g, i = task // p.sequences, task % p.sequences
            if p.causal:
                _causal_sequence(like, p, g, i, reads)
            else:
                _even_sequence(like, p, g, i, reads)
        elif step == MEMBERSHIPS:
            g, i = task // (spans * p.sequences), task // spans % p.sequences
            low, high = bounds(p, i)
            low += task % spans * SPAN
            _share_tokens(like, p, g, i, low, smaller(low + SPAN, high))
        else:
            g, i, k = task // (p.heads * p.sequences), task // p.heads % p.sequences, task % p.heads
            if step == SCORES:
                _score_head(like, p, g, i, k)
            elif step == OUTPUTS:
                _output_head(like, p, g, i, k)
