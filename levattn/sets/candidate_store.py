"""The state of a stream of keys: candidates for the universal set, and rows that wait for their block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import on_cuda, to_float64
from levattn._core.device import on_a_device
from levattn._core.serialize import counts, shaped, whole
from levattn._core.threads import Background, num_threads
from levattn._kernels import BLOCK, Rows
from levattn.functions import AttentionFunction, Softmax
from levattn.sets.candidates import RunningCandidates, SelectedKeys
from levattn.sets.held_candidates import DTYPES, Candidates, HeldCandidates
from levattn.sets.prefix_bounds import Reference, Running, RunningBlocks, RunningSquares
from levattn.sets.prefix_functions import require_backed, running_bounds
from levattn.states.block_buffer import BlockBuffer, RowNumbers, require_format, rows_in_memory


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
        """Raise if keys of another form cannot be added; `name` names them in the message."""
        if (other.batch, other.d) != (self.batch, self.d):
            raise ValueError(
                f"{name} has batch {other.batch} and d = {other.d}; expected {self.batch} and d = {self.d} as before"
            )
        require_format(name, other.format, self.format)
        if other.payload != self.payload:
            tails = (("".join(f", {size}" for size in shape), dtype) for shape, dtype in self.payload)
            shapes = [f"{dtype} of shape (..., m{tail})" for tail, dtype in tails]
            raise ValueError(f"payload of {name} differs from that before; expected {shapes[0] if shapes else 'none'}")


class CandidateStore:
    """The state of a stream of keys whose shape is known: candidates after whole blocks, and the rows that wait.

    Blocks that waited together are processed in the background, while the next rows come.
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
        self._bounds: Running = running_bounds(f, epsilon, b, d)  # of no blocks
        numbers = np.zeros((1, 0), np.int64)
        if self._bounds.labeled:
            payload = [numbers, *payload]
        self.tail = BlockBuffer(b, d, format, numbers, *payload)
        self.present = np.zeros(b, np.int64)
        held = [Candidates.empty(d, format, [array[0] for array in payload]) for _ in range(b)]
        self._candidates = RunningCandidates(epsilon, self._bounds, format, held)
        self._coming: Background[RunningCandidates] | None = None
        self.form = ChunkForm.of(self, self.payload)

    @property
    def _held_array(self) -> Any:
        return self._candidates

    @property
    def candidates(self) -> RunningCandidates:
        """The candidates after all blocks taken so far, for which this waits."""
        coming = self._coming
        if coming is not None:
            self._candidates = coming.result()
            self._coming = None
        return self._candidates

    @property
    def payload(self) -> list[npt.NDArray[Any]]:
        """Arrays like the payloads of the keys, without rows."""
        return [array[:, :0] for array in self.tail.payload[1 + self._bounds.labeled :]]

    def push(self, rows: Rows, index: RowNumbers, *payload: npt.NDArray[Any]) -> None:
        """Add a chunk, or raise FloatingPointError if it is not finite; after an error the state is void."""
        if isinstance(self._bounds, RunningBlocks):
            payload = (self._bounds.label(self.seen, rows.shape[1]), *payload)
        else:
            if self._bounds.m > 1:  # products of coordinates are made in main memory
                rows = rows_in_memory(rows)
            self._bounds.require_range(rows)
        self.tail.push(rows, self._take, index, *payload, take_held=self._take_meanwhile)

    def _take(self, rows: Rows, index: Any, *payload: npt.NDArray[Any]) -> None:
        self._candidates = self.candidates.after(rows, index, *payload)

    def _take_meanwhile(self, rows: Rows, index: Any, *payload: npt.NDArray[Any]) -> None:
        """Take rows that nothing writes to, in the background if more than one thread may be used.

        The first rows stay in the foreground, because they load and compile kernels.
        """
        before = self.candidates
        if num_threads() == 1 or on_cuda(rows.keys) or on_a_device(before) or not before.blocks:
            self._take(rows, index, *payload)
        else:
            self._coming = Background(lambda: before.after(rows, index, *payload))

    @property
    def seen(self) -> int:
        """Number of rows that were pushed."""
        return self.tail.blocks * BLOCK + self.tail.count

    @property
    def held(self) -> int:
        """Number of keys that are held, of all matrices."""
        held = self.candidates.held
        return int(held.counts.sum()) + self.tail.count * len(held)

    def settled(self) -> CandidateStore:
        """Return the state after all whole blocks: this one, or its replacement."""
        if self.tail.count < BLOCK:
            return self
        other = self.copy()
        other.tail.flush(other._take)
        return other

    def copy(self) -> CandidateStore:
        """Return a copy to continue with; do not update this state any more, because they share rows."""
        other = CandidateStore.__new__(CandidateStore)
        other.__dict__.update(self.__dict__, tail=self.tail.copy())
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, after the work under way."""
        return self.__dict__ | {"_candidates": self.candidates, "_coming": None}

    def judge(self) -> tuple[Reference, list[SelectedKeys], bool]:
        """Return the reference, the keys that may have a score of at least ε, and whether any matrix is `counted`.

        This method and `merge` and `parts` expect a `settled` state.
        """
        candidates = self.candidates
        by = candidates.running.reference(self.tail.rows, candidates.labels(self.tail.payload[1:]))
        selected, counted = [], False
        for item in range(len(candidates.held)):
            held = candidates.held[item] + self._waiting(item)
            judged = candidates.judged(by, item, held)
            found = held.take(judged.kept)
            order = np.argsort(found.indices)
            found, scores = found.take(order), judged.upper[judged.kept][order]
            counted |= judged.counted
            payload = found.payload[-1] if self.payload else None
            selected.append(SelectedKeys(found.indices, self._as_given(found.keys), scores, payload))
        return by, selected, counted

    def _waiting(self, item: int) -> Candidates:
        """Return the waiting rows of one matrix."""
        index, *payload = self.tail.payload
        waiting = tuple(array[item if len(array) == len(self.present) else 0] for array in payload)
        return Candidates(index[0], self.tail.rows.keys[item], waiting)

    def _as_given(self, keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.format == "bfloat16":
            return to_float64(keys, self.format).astype(np.float32)
        return keys.view(np.float16) if self.format == "float16" else keys

    def merge(self, other: CandidateStore, shift: int) -> None:
        """Add another stream, its row numbers raised by `shift`; after an error this state is void."""
        mine, theirs = self.candidates.copy(), other.candidates
        labels = theirs.labels(other.tail.payload[1:])
        waiting = [np.arange(other.tail.count)] * len(theirs.held)
        if theirs.blocks:
            starts, places = theirs.running.screened(other.tail.rows, labels, self.epsilon, member=False)
            waiting = np.split(places, starts[1:-1])
        turn = mine.running.turn if isinstance(mine.running, RunningBlocks) else 0
        mine.running.merge(theirs.running, other.tail.rows, labels)  # type: ignore[arg-type]  # of the same f
        self.present = self.present + other.present
        full = []
        for item in range(len(mine.held)):
            new = theirs.held[item] + other._waiting(item).take(waiting[item])
            payload = new.payload
            if isinstance(mine.running, RunningBlocks):
                payload = ((payload[0] + turn) % len(mine.running.groups), *payload[1:])
            mine.held[item] = mine.held[item] + Candidates(new.indices + shift, new.keys, payload)
            if len(mine.held[item]) > mine.limits[item]:
                full.append(item)
        if full:
            by = mine.running.reference(self.tail.rows.between(0, 0), None)
            for item in full:
                mine.held[item] = mine.pruned(by, item, mine.held[item])
                mine.limits[item] = max(mine.least_limit, 2 * len(mine.held[item]))
        self._candidates = mine

    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return fields and arrays from which `from_parts` restores the state."""
        candidates = self.candidates
        fields, arrays = candidates.running.parts()
        fields |= {"batch": list(self.batch), "d": self.d, "format": self.format}
        fields |= {"beside": len(self.tail.payload) - 1}
        arrays |= {"present": self.present, "limits": candidates.limits}
        arrays |= {"counts": candidates.held.counts}
        arrays |= {"tail.keys": self.tail.rows.keys}
        arrays |= {f"tail.beside{i}": array for i, array in enumerate(self.tail.payload)}
        if candidates.held.items:
            everything = Candidates.joined(candidates.held.items)
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
        """Restore the state from `parts`, or raise ValueError, TypeError or LookupError."""
        batch, d, format = tuple(whole(size) for size in fields["batch"]), whole(fields["d"], 1), fields["format"]
        b, dtype = math.prod(batch), np.dtype(DTYPES[format])
        waiting = arrays["tail.keys"].shape  # shapes are checked before the fields' claims take memory
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
        candidates = self._candidates = self._candidates.copy()
        running = candidates.running
        running.restore(fields, arrays)
        self.tail.hold(running.blocks, arrays["tail.keys"], arrays["tail.beside0"], *likes)
        if isinstance(running, RunningSquares):
            running.require_range(self.tail.rows)
        self.present, candidates.limits = present, limits
        edges, total = np.cumsum(held)[:-1], sum(held.tolist())
        if b:
            indices = np.split(shaped(arrays["held.indices"], np.int64, (total,)), edges)
            keys = np.split(shaped(arrays["held.keys"], dtype, (total, d)), edges)
            pieces = [arrays[f"held.beside{i}"] for i in range(len(likes))]
            for piece, like in zip(pieces, likes, strict=True):
                shaped(piece, like.dtype, (total, *like.shape[2:]), finite=False)
            payload = [np.split(piece, edges) for piece in pieces]
            candidates.held = HeldCandidates(
                [
                    Candidates(i, k, tuple(part[at] for part in payload))
                    for at, (i, k) in enumerate(zip(indices, keys, strict=True))
                ]
            )
        if isinstance(running, RunningBlocks):
            labels = [self.tail.payload[1], *(held.payload[0] for held in candidates.held.items)]
            if any(((part < 0) | (part >= len(running.groups))).any() for part in labels):
                raise ValueError("a label is of no group")
        return self
