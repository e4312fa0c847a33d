"""Compiled attention of one token to slots, their codes, and the tokens after them, wherever they lie.

Keys are read in chunks, each with a softmax of its own, and then the chunks are joined. Rows of 16 bits and codes are
opened block by block, in float32, in which all is computed. Names that end in _at are addresses.
"""

from __future__ import annotations

import numpy as np

from levattn._kernels.jit import STATE_VECTORS, VECTOR_BYTES, helper, jit
from levattn._kernels.llvm import address, as_pointer, smaller
from levattn._kernels.pruned.codes import open_row
from levattn._kernels.pruned.simd import bounded_logits, exponentials, key_tile, raised, value_tile
from levattn._kernels.rows.compiled import FORMATS, read_row
from levattn._kernels.scratch import empty, fill, zeros

TASK_KEYS = 256  # keys of a task
_TOGETHER = 4  # rows of a tile
_BLOCK = 32  # keys that are opened at a time
_SINGLE = FORMATS.index("float32")
AS_CODES = len(FORMATS)  # the format of codes

# The places in the description of rows; a step is in bytes, from one sequence, head or row to the next
_FORMAT, _AT, _OF_SEQUENCE, _OF_HEAD, _OF_ROW, _COLUMNS = range(6)
_BITS, _WIDTH, _LOWS, _STEPS, _BLOCKS, _DIVISORS, _MEANS = range(6, 13)
ROW_WORDS = 13  # the length of a description
# Those in the description of slots, after their keys and values
(
    _WEIGHTS, _WEIGHTS_OF_SEQUENCE, _WEIGHTS_OF_HEAD, _SEQUENCES, HEAD_COUNT, SLOT_COUNT, _FIRST_HEAD, FIRST_TASK,
) = range(2 * ROW_WORDS, 2 * ROW_WORDS + 8)  # fmt: skip
# Those in the description of a call, after later keys and values, whose format queries have
(
    _QUERIES, _QUERIES_OF_SEQUENCE, _QUERIES_OF_HEAD, _SHARING, _LATER,
    _PRESENT, _PRESENT_OF_SEQUENCE, _PRESENT_OF_ROW,
) = range(2 * ROW_WORDS, 2 * ROW_WORDS + 8)  # fmt: skip
FLOATS = VECTOR_BYTES // 4  # numbers of a vector


@helper
def _whole(n):
    """Return n numbers of float32, in whole vectors."""
    return (n + FLOATS - 1) // FLOATS * FLOATS


@helper
def _products(like, rows, q_at, q_step, x_at, x_step, n, vectors, to_at, to_step):
    """Write the products of rows with n keys; `rows`: 1, 2, or a multiple of 4."""
    for i in range(0, rows, _TOGETHER):
        q, to, j = q_at + i * q_step, to_at + i * to_step, 0
        while j < n:
            x, out, four = x_at + j * x_step, to + 4 * j, j + 4 <= n
            if rows == 1:
                if four:
                    key_tile(like, 1, 4, q, q_step, x, x_step, vectors, out, to_step)
                else:
                    key_tile(like, 1, 1, q, q_step, x, x_step, vectors, out, to_step)
            elif rows == 2:
                if four:
                    key_tile(like, 2, 4, q, q_step, x, x_step, vectors, out, to_step)
                else:
                    key_tile(like, 2, 1, q, q_step, x, x_step, vectors, out, to_step)
            elif four:
                key_tile(like, 4, 4, q, q_step, x, x_step, vectors, out, to_step)
            else:
                key_tile(like, 4, 1, q, q_step, x, x_step, vectors, out, to_step)
            j += 4 if four else 1


@helper
def _add_values(like, rows, p_at, p_step, x_at, x_step, n, vectors, to_at, to_step):
    """Add the products of weights with n rows of values; `rows`: 1, 2, or a multiple of 4."""
    for i in range(0, rows, _TOGETHER):
        p, column = p_at + i * p_step, 0
        while column < vectors:
            x, to = x_at + column * VECTOR_BYTES, to_at + i * to_step + column * VECTOR_BYTES
            many = column + STATE_VECTORS <= vectors
            if rows == 1:
                if many:
                    value_tile(like, 1, STATE_VECTORS, p, p_step, x, x_step, n, to, to_step)
                else:
                    value_tile(like, 1, 1, p, p_step, x, x_step, n, to, to_step)
            elif rows == 2:
                if many:
                    value_tile(like, 2, STATE_VECTORS, p, p_step, x, x_step, n, to, to_step)
                else:
                    value_tile(like, 2, 1, p, p_step, x, x_step, n, to, to_step)
            elif many:
                value_tile(like, 4, STATE_VECTORS, p, p_step, x, x_step, n, to, to_step)
            else:
                value_tile(like, 4, 1, p, p_step, x, x_step, n, to, to_step)
            column += STATE_VECTORS if many else 1


@helper
def _rows_at(like, part, item, sequence, head, low, n, room):
    """Return the address of n rows in float32 and the step between them: in place, or opened in `room`.

    `part`: the description of rows. `item`: the number of the head among all of its group's sequences.
    """
    format, columns = part[_FORMAT], part[_COLUMNS]
    if format == AS_CODES:
        rows, at, step = part[_OF_HEAD], address(room), 4 * room.shape[1]
        size, divisors = 2 * part[_BLOCKS], part[_DIVISORS]
        means = part[_MEANS]
        if divisors:
            divisors, means = divisors + 4 * columns * item, means + 4 * columns * item
        for i in range(n):
            row = item * rows + low + i
            codes = part[_AT] + part[_WIDTH] * row
            lows, steps = part[_LOWS] + size * row, part[_STEPS] + size * row
            open_row(
                like,
                part[_BITS],
                codes,
                part[_WIDTH],
                lows,
                steps,
                part[_BLOCKS],
                columns,
                divisors,
                means,
                at + step * i,
            )
        return at, step
    source = part[_AT] + sequence * part[_OF_SEQUENCE] + head * part[_OF_HEAD] + low * part[_OF_ROW]
    if format == _SINGLE and columns * 4 % VECTOR_BYTES == 0:
        return source, part[_OF_ROW]
    size = 4 if format == _SINGLE else 2
    for i in range(n):
        read_row(like, format, source + i * part[_OF_ROW], size, columns, address(room) + 4 * room.shape[1] * i)
    return address(room), 4 * room.shape[1]


@helper
def _chunks(n):
    return (n + TASK_KEYS - 1) // TASK_KEYS


@helper
def _rows_of(sharing):
    """Return the rows of tiles for so many query heads that share keys."""
    return sharing if sharing <= 2 else (sharing + _TOGETHER - 1) // _TOGETHER * _TOGETHER


@helper
def _biases(call, group, slots, item, sequence, low, n, bias):
    """Write what is added to the logits of n slots or later tokens: log-weights, and −inf for padding."""
    count = _whole(n)
    fill(bias, address(bias), n, 0.0)
    fill(bias, address(bias) + 4 * n, count - n, -np.inf)
    if slots and group[_WEIGHTS]:
        head = item - sequence * group[HEAD_COUNT]
        at = group[_WEIGHTS] + sequence * group[_WEIGHTS_OF_SEQUENCE] + head * group[_WEIGHTS_OF_HEAD] + 4 * low
        weights = as_pointer(at, bias)
        for i in range(n):
            bias[i] = weights[i]
    elif not slots and call[_PRESENT]:
        at = call[_PRESENT] + sequence * call[_PRESENT_OF_SEQUENCE] + low * call[_PRESENT_OF_ROW]
        present = as_pointer(at, np.uint8(0))
        for i in range(n):
            own = low + i == call[_LATER] - 1  # the token itself always counts
            bias[i] = 0.0 if present[i * call[_PRESENT_OF_ROW]] or own else -np.inf


@jit
def token_tasks(parts, groups, call, heads, scale, bound, first, last):
    """Attend to chunks of slots or of later tokens: write the largest logit, the sum and the values to `parts`.

    `parts`: (tasks, rows, 2 + columns of values in whole vectors) float32. `groups`: their descriptions.
    `heads`: the numbers of their heads. `bound`: of logits, or 0.
    """
    sharing, wide = call[_SHARING], parts.shape[2] - 2
    rows, deep = _rows_of(sharing), _whole(call[_COLUMNS])
    # zeros behind the columns of keys stay
    keys, values, q = zeros(parts, (_BLOCK, deep)), zeros(parts, (_BLOCK, wide)), zeros(parts, (rows, deep))
    logits, bias, sums = empty(parts, (rows, TASK_KEYS)), empty(parts, (TASK_KEYS,)), empty(parts, (rows, wide))
    k = 0
    for task in range(first, last):
        while k + 1 < len(groups) and task >= groups[k + 1, FIRST_TASK]:
            k += 1
        group = groups[k]
        far = _chunks(group[SLOT_COUNT])
        item, chunk = divmod(task - group[FIRST_TASK], far + _chunks(call[_LATER]))
        slots = chunk < far
        sequence, place = divmod(item, group[HEAD_COUNT])
        own = heads[group[_FIRST_HEAD] + place]  # the number of the head in the model
        part, head, low = (group, place, chunk * TASK_KEYS) if slots else (call, own, (chunk - far) * TASK_KEYS)
        n = smaller(TASK_KEYS, (group[SLOT_COUNT] if slots else call[_LATER]) - low)
        for i in range(sharing):
            at = call[_QUERIES] + sequence * call[_QUERIES_OF_SEQUENCE] + (own * sharing + i) * call[_QUERIES_OF_HEAD]
            size = 4 if call[_FORMAT] == _SINGLE else 2
            read_row(parts, call[_FORMAT], at, size, call[_COLUMNS], address(q) + 4 * deep * i)
            for c in range(deep):
                q[i, c] *= scale
        for i in range(0, n, _BLOCK):
            here = smaller(_BLOCK, n - i)
            x, step = _rows_at(parts, part[:ROW_WORDS], item, sequence, head, low + i, here, keys)
            to = address(logits) + 4 * i
            _products(parts, rows, address(q), 4 * deep, x, step, here, deep // FLOATS, to, 4 * TASK_KEYS)
        _biases(call, group, slots, item, sequence, low, n, bias)
        count = _whole(n) // FLOATS
        for i in range(sharing):
            row = address(logits) + 4 * TASK_KEYS * i
            fill(parts, row + 4 * n, _whole(n) - n, 0.0)
            if bound > 0:
                bounded_logits(parts, row, bound, count)
            for c in range(n):
                if bias[c] == -np.inf:  # a key that nobody sees may be NaN
                    logits[i, c] = 0
            top = raised(parts, row, address(bias), count)
            parts[task, i, 0] = top
            parts[task, i, 1] = exponentials(parts, row, parts.dtype.type(0) if top == -np.inf else top, count)
        for i in range(rows):
            fill(parts, address(sums) + 4 * wide * i, wide, 0.0)
        for i in range(0, n, _BLOCK):
            here = smaller(_BLOCK, n - i)
            x, step = _rows_at(parts, part[ROW_WORDS : 2 * ROW_WORDS], item, sequence, head, low + i, here, values)
            p = address(logits) + 4 * i
            _add_values(parts, rows, p, 4 * TASK_KEYS, x, step, here, wide // FLOATS, address(sums), 4 * wide)
        for i in range(sharing):
            for c in range(wide):
                parts[task, i, 2 + c] = sums[i, c]


@jit
def join_chunks(parts, groups, call, heads, out):
    """Write the outputs (B, H, D) of the parts of all chunks, in float32."""
    sharing = call[_SHARING]
    total = empty(parts, (parts.shape[2] - 2,))
    for k in range(len(groups)):
        group = groups[k]
        count = _chunks(group[SLOT_COUNT]) + _chunks(call[_LATER])
        for item in range(group[_SEQUENCES] * group[HEAD_COUNT]):
            sequence, place = divmod(item, group[HEAD_COUNT])
            begin = group[FIRST_TASK] + item * count
            for i in range(sharing):
                top = parts[begin, i, 0]
                for j in range(1, count):
                    if parts[begin + j, i, 0] > top or top != top:
                        top = parts[begin + j, i, 0]
                fill(parts, address(total), len(total), 0.0)
                weight = parts.dtype.type(0)
                for j in range(count):
                    factor = np.exp(parts[begin + j, i, 0] - top)
                    weight += factor * parts[begin + j, i, 1]
                    for c in range(len(total)):
                        total[c] += factor * parts[begin + j, i, 2 + c]
                row = out[sequence, heads[group[_FIRST_HEAD] + place] * sharing + i]
                for c in range(len(row)):
                    row[c] = total[c] / weight
