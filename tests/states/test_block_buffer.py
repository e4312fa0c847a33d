"""Rows on their way to sums: whole blocks in order, no row lost, few that wait, and copies that keep theirs.

Inside: which rows wait shows in no result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from levattn._kernels import Rows
from levattn.states.blocks import BlockBuffer, RowNumbers
from strategies import Float, examples
from streams import BLOCK

WAITING = 9 << 20  # bytes


class Taken:
    """What a buffer gave away."""

    def __init__(self) -> None:
        self.keys: list[Float] = []
        self.numbers: list[Any] = []

    def __call__(self, rows: Rows, index: Any, beside: Any) -> None:
        assert rows.shape[1] % BLOCK == 0 < rows.shape[1]
        self.keys.append(np.array(rows.keys))
        self.numbers.append(np.array(np.asarray(index)))
        assert np.array_equal(np.asarray(beside)[0, :, 0], self.numbers[-1][0])


def all_rows(taken: Taken, buffer: BlockBuffer) -> tuple[Float, Any]:
    """The rows that were given away and those that wait, and their numbers."""
    return np.concatenate([*taken.keys, buffer.rows.keys], 1), np.concatenate([*taken.numbers, buffer.payload[0]], 1)


@given(
    sizes=st.lists(st.sampled_from([0, 1, 511, 512, BLOCK, 5000, 9 * BLOCK, 20 * BLOCK + 3]), max_size=12),
    flushes=st.sets(st.integers(0, 11)),
    width=st.sampled_from([1, 40, 300]),
    b=st.integers(1, 2),
)
@examples(20)
def test_rows_come_in_order_and_few_wait(sizes: list[int], flushes: set[int], width: int, b: int) -> None:
    d, seen, taken = 2, 0, Taken()
    buffer = BlockBuffer(b, d, "float64", np.zeros((1, 0), np.int64), np.zeros((1, 0, width)))
    for step, size in enumerate(sizes):
        numbers = np.arange(seen, seen + size, dtype=np.float64)
        keys = np.broadcast_to(numbers[None, :, None], (b, size, d))
        before, kept = buffer, np.array(buffer.rows.keys)
        buffer = buffer.copy()
        buffer.push(
            Rows(keys, "float64"), taken, RowNumbers(seen, size), np.repeat(numbers, width).reshape(1, size, width)
        )
        assert np.array_equal(before.rows.keys, kept)
        seen += size
        if step in flushes:
            buffer = buffer.copy()
            buffer.flush(taken)
            assert buffer.count == seen % BLOCK
        assert buffer.blocks * BLOCK + buffer.count == seen
        assert buffer.count <= 16 * BLOCK
        assert buffer.count < BLOCK or buffer.count * 8 * (b * d + width + 1) <= WAITING
    rows, index = all_rows(taken, buffer)
    assert np.array_equal(rows, np.broadcast_to(np.arange(seen, dtype=np.float64)[None, :, None], (b, seen, d)))
    assert np.array_equal(index, np.arange(seen)[None])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_wait(bad: float) -> None:
    keys = np.full((1, 10, 3), 1e308)  # whose sum is beyond float64
    buffer = BlockBuffer(1, 3, "float64")
    buffer.push(Rows(keys, "float64"), lambda _: None)
    keys[0, 7, 1] = bad
    before = buffer.copy()
    with pytest.raises(FloatingPointError):
        buffer.push(Rows(keys, "float64"), lambda _: None)
    mask = np.ones((1, 10), bool)
    mask[0, 7] = False
    before.push(Rows(keys, "float64", mask), lambda _: None)
    assert before.count == 20
    assert not before.rows.keys[0, 17].any()
