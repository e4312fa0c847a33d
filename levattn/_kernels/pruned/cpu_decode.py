"""Decode steps over a compressed cache in main memory: one token attends to slots and to the tokens after them.

Nothing is copied or opened as a whole: kernels read slots, or their codes, and later tokens where they lie. (Slots of
another dtype than the token, as autocast has them, are converted before.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from levattn._core.types import Int64
from levattn._kernels.pruned import decode
from levattn._kernels.pruned.cuda_decode import Codes
from levattn._kernels.rows.compiled import FORMATS
from levattn._kernels.tasks import share

_OPENED = 4  # multiply-adds in the time that a number takes to be opened

# keys, values, log-weights or None, and numbers of heads
HeldGroup = tuple[Any, Any, Any, tuple[int, ...]]


class HeldRows:
    """The slots of all heads of a layer as the kernel of a token takes them.

    Slots do not change, but their tensors may move: libraries that share memory between processes do that.
    """

    def __init__(self, groups: Sequence[HeldGroup]) -> None:
        """Describe slots, whose arrays have contiguous last axes, and whose codes have no gaps."""
        self.groups = groups
        self.heads = np.array([head for *_, own in groups for head in own], np.int64)
        self.sequences = int(groups[0][0].shape[0])
        # multiply-adds for a query head, but for later tokens
        self.work = float(sum(math.prod(K.shape[:3]) * (K.shape[3] + V.shape[3]) for K, V, *_ in groups))
        self._described = self._description()

    def table(self) -> Int64:
        """Return a new table that describes each group where it lies now."""
        if _pointers(self.groups) != self._described[0]:
            self._described = self._description()  # at once, as other threads may read it
        return self._described[1].copy()

    def _description(self) -> tuple[list[int], Int64]:
        table, place = [], 0
        for keys, values, weights, heads in self.groups:
            given = [0, 0, 0] if weights is None else [weights.data_ptr(), *_steps(weights)[:2]]
            table.append([*_described(keys), *_described(values), *given, *keys.shape[:3], place, 0])
            place += len(heads)
        return _pointers(self.groups), np.array(table, np.int64)


def _pointers(groups: Sequence[HeldGroup]) -> list[int]:
    """Return the addresses of all arrays."""
    found = []
    for group in groups:
        for rows in group[:3]:
            if isinstance(rows, Codes):
                found += [array.data_ptr() for array in rows.arrays]
            elif rows is not None:
                found.append(rows.data_ptr())
    return found


def _steps(array: Any) -> list[int]:
    """Return the bytes from one entry to the next along each axis."""
    return [step * array.element_size() for step in array.stride()]


def _described(rows: Any) -> list[int]:
    """Return the description of rows or codes (B, G, s, d) that compiled code reads."""
    if not isinstance(rows, Codes):
        found = [FORMATS.index(str(rows.dtype).rpartition(".")[2]), rows.data_ptr(), *_steps(rows)[:3], rows.shape[3]]
        return found + [0] * (decode.ROW_WORDS - len(found))
    at = [0 if array is None else array.data_ptr() for array in rows[:5]]
    s, width, blocks = rows.shape[2], rows.codes.shape[-1], rows.lows.shape[-1]
    return [decode.AS_CODES, at[0], 0, s, 0, rows.width, rows.bits, width, at[1], at[2], blocks, at[3], at[4]]


def attend_token(q: Any, slots: HeldRows, near: tuple[Any, Any, Any], scale: float, softcap: float | None) -> Any:
    """Return the softmax attention (B, H, D) of rows q (B, H, 1, d) in float32.

    `near`: keys and values (B, heads, t, ·), and `present` (B, t) bool, or None. The last token always counts.
    `softcap`: c of the logits c tanh(l / c) before weights are added, or None.

    Rows have 32 or 16 bits, queries as many as later keys, and contiguous last axes.
    """
    keys, values, present = near
    (B, H, _, d), (G, t), D = q.shape, keys.shape[1:3], values.shape[3]
    sharing, table = H // G, slots.table()
    whole = -(-D // decode.FLOATS) * decode.FLOATS
    chunks = -(-table[:, decode.SLOT_COUNT] // decode.TASK_KEYS) + -(-t // decode.TASK_KEYS)
    ends = np.cumsum(B * table[:, decode.HEAD_COUNT] * chunks)
    table[1:, decode.FIRST_TASK], tasks = ends[:-1], int(ends[-1])
    out = np.empty((B, H, D), np.float32)
    there = [0, 0, 0] if present is None else [present.data_ptr(), *_steps(present)]
    asked = [q.data_ptr(), *_steps(q)[:2], sharing, t, *there]
    call = np.array([*_described(keys), *_described(values), *asked], np.int64)
    parts = np.empty((tasks, sharing, 2 + whole), np.float32)
    bound = np.float32(softcap or 0.0)
    work = (slots.work + B * G * t * (d + D)) * (sharing + _OPENED)
    body = partial(decode.token_tasks, parts, table, call, slots.heads, np.float32(scale), bound)
    share(body, tasks, work)
    decode.join_chunks(parts, table, call, slots.heads, out)
    return out
