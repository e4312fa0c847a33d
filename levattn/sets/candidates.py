"""The keys of a stream that may still be of the universal set, and the sums by which blocks are screened."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import item_entries, nonzero, on_cuda
from levattn._core.types import Float64
from levattn._kernels import BLOCK, Rows
from levattn.sets.prefix_bounds import Judged, Reference, Running

__all__ = ["DTYPES", "Candidates", "RunningCandidates", "SelectedKeys"]

_RUN = 64  # blocks that are screened together
_DEVICE_RUN = 1024  # the same on a CUDA device, where each run costs a wait
_RUN_NUMBERS = 1 << 22  # numbers that are made of keys to screen them, at most, but for one block
DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.uint16, "bfloat16": np.uint16}


@dataclass(frozen=True, eq=False)
class SelectedKeys:
    """Some keys of one matrix of a stream.

    Attributes
    ----------
    indices : array of int64, shape (k,)
        Ascending row numbers in the stream.
    keys : array of shape (k, d)
        The keys, in the dtype in which they came (float32 for bfloat16, whose numbers it holds).
    scores : array of float64, shape (k,)
        Their leverage scores for f(x) = x², else certified upper bounds of their sensitivities.
    payload : array of shape (k, ...) or None
        The payload of these keys.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> found = levattn.StreamingUniversalSet(0.9).update(np.eye(2), payload=np.array([7, 8])).result()
    >>> found.items[0].indices, found.items[0].payload
    (array([0, 1]), array([7, 8]))
    """

    indices: npt.NDArray[np.int64]
    keys: npt.NDArray[Any]
    scores: Float64
    payload: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.indices)


@dataclass(frozen=True, eq=False)
class Candidates:
    """Keys of one matrix that are held: row numbers, the keys as stored, and their payloads."""

    indices: npt.NDArray[np.int64]
    keys: npt.NDArray[Any]
    payload: tuple[npt.NDArray[Any], ...]

    def __len__(self) -> int:
        return len(self.indices)

    @classmethod
    def empty(cls, d: int, format: str, payload: Sequence[npt.NDArray[Any]]) -> Candidates:
        """Return no keys, with payloads of each kind."""
        keys = np.zeros((0, d), DTYPES[format])
        return cls(np.zeros(0, np.int64), keys, tuple(np.zeros((0, *a.shape[1:]), a.dtype) for a in payload))

    def take(self, which: npt.NDArray[Any]) -> Candidates:
        """Return some of the keys."""
        return Candidates(self.indices[which], self.keys[which], tuple(array[which] for array in self.payload))

    def __add__(self, other: Candidates) -> Candidates:
        payload = zip(self.payload, other.payload, strict=True)
        return Candidates(
            np.concatenate([self.indices, other.indices]),
            np.concatenate([self.keys, other.keys]),
            tuple(np.concatenate(pair) for pair in payload),
        )


class RunningCandidates:
    """The keys that may still be of the universal set after whole blocks, and the sums over all keys so far.

    Blocks are screened by the keys up to the last block whose number is a power of two, and those that may have a
    bound of at least ε are held. Once twice as many are held as the theorem lets be, they are judged again by all
    keys so far. When that happens depends on the blocks alone, not on the chunks in which they came.
    """

    def __init__(self, epsilon: float, running: Running, format: Any, held: list[Candidates]) -> None:
        self.epsilon, self.running, self.format, self.held = epsilon, running, format, held
        self.limits = np.full(len(held), self.least_limit)
        self._span = _RUN

    def copy(self) -> RunningCandidates:
        """Return candidates that go on from here by themselves."""
        other = RunningCandidates.__new__(RunningCandidates)
        other.__dict__.update(self.__dict__)
        other.running, other.held, other.limits = self.running.copy(), list(self.held), self.limits.copy()
        return other

    @property
    def least_limit(self) -> int:
        """Number of keys of a matrix that may be held, at least, before they are judged again."""
        return math.ceil(min(2 * self.running.expected / self.epsilon, 2.0**62))

    @property
    def blocks(self) -> int:
        """Number of whole blocks so far."""
        return self.running.blocks

    def labels(self, payload: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int64] | None:
        """Return the labels, which are the first payload, (1, k)."""
        return payload[0].reshape(1, -1) if self.running.labeled else None

    def after(self, rows: Rows, index: Any, *payload: npt.NDArray[Any]) -> RunningCandidates:
        """Return what these are after further whole blocks."""
        other = self.copy()
        other._take(rows, index, *payload)
        return other

    def _take(self, rows: Rows, index: Any, *payload: npt.NDArray[Any]) -> None:
        """Add whole blocks; if it raises, these are void."""
        at, left = 0, rows.shape[1] // BLOCK
        longest = _DEVICE_RUN if on_cuda(rows.keys) else _RUN
        while left:
            number = self.blocks + 1
            milestone = number & (number - 1) == 0
            count = 1 if milestone else self._run(left, longest)
            part = slice(at * BLOCK, (at + count) * BLOCK)
            run = rows.between(part.start, part.stop)
            labels = self.labels([array[:, part] for array in payload])
            if milestone:
                self.running.add(run)
                self.running.freeze()
                kept = self.running.screened(run, labels, self.epsilon, member=True)
                hits, over = self._hits(kept, run), list(range(len(self.held)))
            else:
                kept, ahead = self.running.screened_ahead(run, labels, self.epsilon)
                hits = self._hits(kept, run)
                cut, over = self._cut(hits, count)
                self._span = min(2 * self._span, longest) if cut is None else cut
                if cut is not None and cut < count:
                    count, ahead = cut, None
                    run = run.between(0, count * BLOCK)
                    hits = [which[which < count * BLOCK] for which in hits]
                self.running.add(run, ahead)
            full = {item for item in over if len(self.held[item]) or len(hits[item])}
            by = self.running.reference(rows.between(0, 0), None) if full else None
            for item, which in enumerate(hits):
                if not len(which) and item not in full:
                    continue
                there = part.start + which
                more = tuple(item_entries(a, item if len(a) == len(self.held) else 0, there) for a in payload)
                new = Candidates(index[0, there], item_entries(run.keys, item, which), more)
                if by is not None and item in full:  # each by itself, as both together take more memory
                    self.held[item], new = self.pruned(by, item, self.held[item]), self.pruned(by, item, new)
                    self.limits[item] = max(self.least_limit, 2 * (len(self.held[item]) + len(new)))
                self.held[item] = self.held[item] + new
            at, left = at + count, left - count

    def _hits(self, kept: Any, run: Rows) -> list[npt.NDArray[np.int64]]:
        """Return which rows of each matrix are flagged and not masked."""
        if run.mask is not None:
            kept = kept & run.mask
        b, m = run.shape[:2]
        hits = nonzero(kept.reshape(-1))
        if b == 1:
            return [hits]
        edges = np.searchsorted(hits, np.arange(b + 1) * m).tolist()
        return [hits[low:high] - item * m for item, (low, high) in enumerate(pairwise(edges))]

    def _cut(self, hits: list[npt.NDArray[np.int64]], count: int) -> tuple[int | None, list[int]]:
        """Return after how many blocks some matrix holds more keys than it may, None if none does, and which do."""
        first = count + 1
        ends: list[int] = []
        for held, which, limit in zip(self.held, hits, self.limits.tolist(), strict=True):
            room = limit - len(held)
            ends.append(count + 1 if len(which) <= room else 1 + (int(which[room]) // BLOCK if room >= 0 else 0))
            first = min(first, ends[-1])
        return (None, []) if first > count else (first, [item for item, end in enumerate(ends) if end == first])

    def _run(self, left: int, longest: int) -> int:
        """Return how many of the blocks that are left to screen together: up to the next milestone."""
        done = self.blocks
        milestone = 1 << done.bit_length()
        fit = max(1, _RUN_NUMBERS // max(1, BLOCK * len(self.held) * self.running.numbers))
        return min(left, milestone - 1 - done, longest - done % longest, self._span, fit)

    def judged(self, by: Reference, item: int, held: Candidates) -> Judged:
        """Return the bounds of candidates of one matrix."""
        keys = Rows(held.keys[None], self.format)
        return self.running.judge(by, item, keys, self.labels(held.payload), self.epsilon)

    def pruned(self, by: Reference, item: int, held: Candidates) -> Candidates:
        """Return the keys of one matrix that may still have a score of at least ε among all so far."""
        return held.take(self.judged(by, item, held).kept)
