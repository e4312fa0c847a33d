"""The state of a stream: sums over all keys so far, and the keys that may still be of the universal set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import item_entries, nonzero, on_cuda, to_float64
from levattn._core.serialize import counts, shaped, whole
from levattn._core.types import Float64
from levattn._kernels import BLOCK, Rows
from levattn.functions import AttentionFunction, Softmax
from levattn.sets.prefix_bounds import (
    Judged,
    Reference,
    Running,
    RunningBlocks,
    RunningSquares,
    require_backed,
    running_bounds,
)
from levattn.states.block_buffer import BlockBuffer, RowNumbers, require_format

__all__ = ["CandidateStore", "Candidates", "ChunkForm", "SelectedKeys"]

_RUN = 64  # blocks that are screened together
_DEVICE_RUN = 1024  # the same on a CUDA device, where each run costs a wait
_RUN_NUMBERS = 1 << 22  # numbers that are made of keys to screen them, at most, but for one block
_DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.uint16, "bfloat16": np.uint16}


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


@dataclass(frozen=True)
class ChunkForm:
    """The form of keys in a chunk and of their payloads, which is the same in all chunks of a stream."""

    batch: tuple[int, ...]
    d: int
    format: Any
    payload: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]  # shape and dtype for one key

    @classmethod
    def of(cls, keys: Any, payload: Sequence[npt.NDArray[Any]]) -> ChunkForm:
        """Return the form of keys, with payloads (b or 1, m, ...)."""
        return cls(keys.batch, keys.d, keys.format, tuple((array.shape[2:], array.dtype) for array in payload))

    def require(self, other: ChunkForm, name: str) -> None:
        """Raise if keys of another form, named so, cannot be added."""
        if (other.batch, other.d) != (self.batch, self.d):
            raise ValueError(
                f"{name} has batch {other.batch} and d = {other.d}; expected {self.batch} and d = {self.d} as before"
            )
        require_format(name, other.format, self.format)
        if other.payload != self.payload:
            tails = (("".join(f", {size}" for size in shape), dtype) for shape, dtype in self.payload)
            shapes = [f"{dtype} of shape (..., m{tail})" for tail, dtype in tails]
            raise ValueError(f"payload of {name} differs from that before; expected {shapes[0] if shapes else 'none'}")


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
        keys = np.zeros((0, d), _DTYPES[format])
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


class CandidateStore:
    """The state of a stream of keys whose shape is known.

    Blocks are screened by the keys up to the last block whose number is a power of two, and those that may have a
    bound of at least ε are held. Once twice as many are held as the theorem lets be, they are judged again by all
    keys so far. When that happens depends on the blocks alone, not on the chunks in which they came.
    """

    def __init__(
        self,
        epsilon: float,
        f: AttentionFunction | Softmax,
        batch: tuple[int, ...],
        d: int,
        format: Any,
        payload: Sequence[npt.NDArray[Any]],
    ) -> None:
        b = math.prod(batch)
        self.epsilon, self.batch, self.d, self.format = epsilon, batch, d, format
        self.running: Running = running_bounds(f, epsilon, b, d)
        numbers = np.zeros((1, 0), np.int64)
        if self.running.labeled:
            payload = [numbers, *payload]
        self.tail = BlockBuffer(b, d, format, numbers, *payload)
        self.present = np.zeros(b, np.int64)
        self.held = [Candidates.empty(d, format, [array[0] for array in payload]) for _ in range(b)]
        self.limits = np.full(b, self._least_limit)
        self._span = _RUN
        self._shares = False  # with the state that this one was copied from
        self.form = ChunkForm.of(self, self.payload)

    @property
    def _least_limit(self) -> int:
        return math.ceil(min(2 * self.running.expected / self.epsilon, 2.0**62))

    @property
    def blocks(self) -> int:
        """Number of whole blocks so far."""
        return self.running.blocks

    @property
    def payload(self) -> list[npt.NDArray[Any]]:
        """Arrays like the payloads of the keys, without rows."""
        return [array[:, :0] for array in self.tail.payload[1 + self.running.labeled :]]

    def push(self, rows: Rows, index: RowNumbers, *payload: npt.NDArray[Any]) -> None:
        """Add a chunk; FloatingPointError if it is not finite. If it raises, the state is void."""
        if isinstance(self.running, RunningBlocks):
            labels = self.running.label(self.seen, rows.shape[1])
            self.tail.push(rows, self._take, index, labels, *payload)
        else:
            self.running.require_range(rows)
            self.tail.push(rows, self._take, index, *payload)

    @property
    def seen(self) -> int:
        """Number of rows that were pushed."""
        return self.tail.blocks * BLOCK + self.tail.count

    def settled(self) -> CandidateStore:
        """Return the state after all blocks that are whole: this one, or one that takes its place."""
        if self.tail.count < BLOCK:
            return self
        other = self.copy()
        other.tail.flush(other._take)
        return other

    def copy(self) -> CandidateStore:
        """Return a state that goes on from here; this one is not to be updated any more, as they share rows."""
        other = CandidateStore.__new__(CandidateStore)
        other.__dict__.update(self.__dict__, tail=self.tail.copy(), _shares=True)
        return other

    def _unshare(self) -> None:
        """Copy what changes when blocks are taken, which most chunks do not reach."""
        if self._shares:
            self.running, self.held, self.limits = self.running.copy(), list(self.held), self.limits.copy()
            self._shares = False

    def _labels(self, payload: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int64] | None:
        """Return the labels, which are the first payload, (1, k)."""
        return payload[0].reshape(1, -1) if self.running.labeled else None

    def _take(self, rows: Rows, index: Any, *payload: npt.NDArray[Any]) -> None:
        """Add whole blocks; if it raises, the state is void."""
        self._unshare()
        at, left = 0, rows.shape[1] // BLOCK
        longest = _DEVICE_RUN if on_cuda(rows.keys) else _RUN
        while left:
            number = self.blocks + 1
            milestone = number & (number - 1) == 0
            count = 1 if milestone else self._run(left, longest)
            part = slice(at * BLOCK, (at + count) * BLOCK)
            run = rows.between(part.start, part.stop)
            labels = self._labels([array[:, part] for array in payload])
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
                    self.held[item], new = self._pruned(by, item, self.held[item]), self._pruned(by, item, new)
                    self.limits[item] = max(self._least_limit, 2 * (len(self.held[item]) + len(new)))
                self.held[item] = self.held[item] + new
            at, left = at + count, left - count

    def _hits(self, kept: Any, run: Rows) -> list[npt.NDArray[np.int64]]:
        """Return which rows of each matrix are flagged and not masked."""
        if run.mask is not None:
            kept = kept & run.mask
        b, m = run.shape[:2]
        hits = nonzero(kept.reshape(-1))
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

    def _judged(self, by: Reference, item: int, held: Candidates) -> Judged:
        keys = Rows(held.keys[None], self.format)
        return self.running.judge(by, item, keys, self._labels(held.payload), self.epsilon)

    def _pruned(self, by: Reference, item: int, held: Candidates) -> Candidates:
        """Return the keys of one matrix that may still have a score of at least ε among all so far."""
        return held.take(self._judged(by, item, held).kept)

    def judge(self) -> tuple[Reference, list[SelectedKeys], bool]:
        """Return what all keys are judged by, those that may have a score of at least ε, and if one counts as 1.

        The state is `settled`, as it is for what follows.
        """
        by = self.running.reference(self.tail.rows, self._labels(self.tail.payload[1:]))
        selected, counted = [], False
        for item in range(len(self.held)):
            held = self.held[item] + self._waiting(item)
            judged = self._judged(by, item, held)
            found = held.take(judged.kept)
            order = np.argsort(found.indices)
            found, scores = found.take(order), judged.upper[judged.kept][order]
            counted |= judged.counted
            payload = found.payload[-1] if self.payload else None
            selected.append(SelectedKeys(found.indices, self._as_given(found.keys), scores, payload))
        return by, selected, counted

    def _waiting(self, item: int) -> Candidates:
        """Return the rows of one matrix that wait."""
        index, *payload = self.tail.payload
        waiting = tuple(array[item if len(array) == len(self.held) else 0] for array in payload)
        return Candidates(index[0], self.tail.rows.keys[item], waiting)

    def _as_given(self, keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.format == "bfloat16":
            return to_float64(keys, self.format).astype(np.float32)
        return keys.view(np.float16) if self.format == "float16" else keys

    def merge(self, other: CandidateStore, shift: int) -> None:
        """Add another stream, whose row numbers are raised by `shift`; if it raises, this state is void."""
        self._unshare()
        labels = other._labels(other.tail.payload[1:])
        waiting = np.ones((len(other.held), other.tail.count), np.bool_)
        if other.blocks:
            waiting = other.running.screened(other.tail.rows, labels, self.epsilon, member=False)
        turn = self.running.turn if isinstance(self.running, RunningBlocks) else 0
        self.running.merge(other.running, other.tail.rows, labels)  # type: ignore[arg-type]  # of the same f
        self.present = self.present + other.present
        full = []
        for item in range(len(self.held)):
            new = other.held[item] + other._waiting(item).take(waiting[item])
            payload = new.payload
            if isinstance(self.running, RunningBlocks):
                payload = ((payload[0] + turn) % len(self.running.groups), *payload[1:])
            self.held[item] = self.held[item] + Candidates(new.indices + shift, new.keys, payload)
            if len(self.held[item]) > self.limits[item]:
                full.append(item)
        if full:
            by = self.running.reference(self.tail.rows.between(0, 0), None)
            for item in full:
                self.held[item] = self._pruned(by, item, self.held[item])
                self.limits[item] = max(self._least_limit, 2 * len(self.held[item]))

    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return fields and arrays from which `from_parts` makes the state again."""
        fields, arrays = self.running.parts()
        fields |= {"batch": list(self.batch), "d": self.d, "format": self.format}
        fields |= {"beside": len(self.tail.payload) - 1}
        arrays |= {"present": self.present, "limits": self.limits}
        arrays |= {"counts": np.array([len(held) for held in self.held], np.int64)}
        arrays |= {"tail.keys": self.tail.rows.keys}
        arrays |= {f"tail.beside{i}": array for i, array in enumerate(self.tail.payload)}
        everything = sum(self.held[1:], start=self.held[0]) if self.held else None
        if everything is not None:
            arrays |= {"held.indices": everything.indices, "held.keys": everything.keys}
            arrays |= {f"held.beside{i}": array for i, array in enumerate(everything.payload)}
        return fields, arrays

    @classmethod
    def from_parts(
        cls,
        fields: dict[str, Any],
        arrays: dict[str, npt.NDArray[Any]],
        epsilon: float,
        f: AttentionFunction | Softmax,
    ) -> CandidateStore:
        """Return the state that `parts` took apart, or raise ValueError, TypeError or LookupError."""
        batch, d, format = tuple(whole(size) for size in fields["batch"]), whole(fields["d"], 1), fields["format"]
        b, dtype = math.prod(batch), np.dtype(_DTYPES[format])
        waiting = arrays["tail.keys"].shape  # looked at, as are the others, before room is made for what they claim
        if waiting[0] != b or waiting[2:] != (d,):
            raise ValueError(f"rows of shape {waiting} wait for {b} matrices of {d} columns")
        present, held = (counts(arrays[name], (b,)) for name in ("present", "counts"))
        limits = shaped(arrays["limits"], np.int64, (b,))
        if (limits < 0).any():
            raise ValueError("a limit is negative")
        require_backed(f, epsilon, b, d, arrays)
        likes = [arrays[f"tail.beside{i + 1}"] for i in range(whole(fields["beside"]))]
        labeled = running_bounds(f, epsilon, b, d).labeled
        self = cls(epsilon, f, batch, d, format, [like[:, :0] for like in likes[labeled:]])
        self.running.restore(fields, arrays)
        self.tail.hold(self.blocks, arrays["tail.keys"], arrays["tail.beside0"], *likes)
        if isinstance(self.running, RunningSquares):
            self.running.require_range(self.tail.rows)
        self.present, self.limits = present, limits
        edges, total = np.cumsum(held)[:-1], sum(held.tolist())
        if b:
            indices = np.split(shaped(arrays["held.indices"], np.int64, (total,)), edges)
            keys = np.split(shaped(arrays["held.keys"], dtype, (total, d)), edges)
            pieces = [arrays[f"held.beside{i}"] for i in range(len(likes))]
            for piece, like in zip(pieces, likes, strict=True):
                shaped(piece, like.dtype, (total, *like.shape[2:]), finite=False)
            payload = [np.split(piece, edges) for piece in pieces]
            self.held = [
                Candidates(i, k, tuple(part[at] for part in payload))
                for at, (i, k) in enumerate(zip(indices, keys, strict=True))
            ]
        if isinstance(self.running, RunningBlocks):
            labels = [self.tail.payload[1], *(held.payload[0] for held in self.held)]
            if any(((part < 0) | (part >= len(self.running.groups))).any() for part in labels):
                raise ValueError("a label is of no group")
        return self
