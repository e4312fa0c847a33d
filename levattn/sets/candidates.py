"""The keys of a stream that may still belong to the universal set, and the sums that screen blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace, on_cuda, to_device, to_numpy
from levattn._core.checks import check_chunk
from levattn._core.device import on_a_device, where_arrays_are
from levattn._core.serialize import counts, shaped, whole
from levattn._core.threads import Background, num_threads
from levattn._core.types import Float64, Int64
from levattn._kernels import BLOCK, SELECT, Rows, kernels_for
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
from levattn.states.blocks import BlockBuffer, RowNumbers, as_they_came, require_format, rows_in_memory

DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.uint16, "bfloat16": np.uint16}
_MOST_COMING = 64  # runs of blocks whose keys are held apart before they are joined


@dataclass(frozen=True, eq=False)
class Candidates:
    """Keys that are held: row numbers, the keys as stored, and their payloads."""

    indices: Any
    keys: Any
    payload: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays of the keys, (k, ...) each."""
        return self.indices, self.keys, *self.payload

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> Candidates:
        """Return the keys that have these `arrays`."""
        return cls(arrays[0], arrays[1], tuple(arrays[2:]))

    @classmethod
    def empty(cls, d: int, format: str, payload: Sequence[npt.NDArray[Any]]) -> Candidates:
        """Return no keys, with payloads of each kind."""
        keys = np.zeros((0, d), DTYPES[format])
        return cls(np.zeros(0, np.int64), keys, tuple(np.zeros((0, *a.shape[1:]), a.dtype) for a in payload))

    def take(self, which: Any) -> Candidates:
        """Return some of the keys."""
        return Candidates.of([array[which] for array in self.arrays])

    @classmethod
    def joined(cls, parts: Sequence[Candidates]) -> Candidates:
        """Return the keys of one or more parts in main memory, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls.of([np.concatenate(a) for a in zip(*(part.arrays for part in parts), strict=True)])

    def __add__(self, other: Candidates) -> Candidates:
        return Candidates.joined([self, other])


class HeldCandidates:
    """The held keys of each matrix; the latest keys of all matrices lie together on the device where they came.

    counts: the number of held keys, (b,).
    """

    def __init__(self, items: list[Candidates]) -> None:
        self.counts = np.array([len(item) for item in items], np.int64)
        # the keys of each matrix, and the latest keys with the starts of all matrices; both change at once
        self._held: tuple[list[Candidates], list[tuple[Int64, Candidates]]] = items, []

    def __len__(self) -> int:
        """Return the number of matrices."""
        return len(self.counts)

    @property
    def _held_array(self) -> Any:
        return tuple(new.arrays for _, new in self._held[1])

    def copy(self) -> HeldCandidates:
        """Return an independent copy."""
        other = HeldCandidates.__new__(HeldCandidates)
        (items, coming), other.counts = self._held, self.counts.copy()
        other._held = list(items), list(coming)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, in main memory."""
        return {"counts": self.counts, "_held": (self.items, [])}

    @property
    def items(self) -> list[Candidates]:
        """The keys of each matrix, in main memory."""
        if self._held[1]:
            self.hold(self.parts())
        return self._held[0]

    @where_arrays_are
    def parts(self) -> list[list[Candidates]]:
        """Return the keys of each matrix in main memory, in one part or in two: the last ones apart."""
        items, coming = self._held
        came: list[list[Candidates]] = [[] for _ in items]
        for (starts, _), part in zip(coming, _in_main_memory([each for _, each in coming]), strict=True):
            for item in np.flatnonzero(np.diff(starts)).tolist():
                came[item].append(part.take(slice(starts[item], starts[item + 1])))
        return [[item, Candidates.joined(new)] if new else [item] for item, new in zip(items, came, strict=True)]

    def forget(self) -> None:
        """Hold no keys until others come by `hold`."""
        self._held = [], []

    def hold(self, parts: list[list[Candidates]]) -> None:
        """Hold these keys of each matrix, and no others."""
        items = [Candidates.joined(each) for each in parts]
        self._held, self.counts = (items, []), np.array([len(item) for item in items], np.int64)

    def __getitem__(self, item: int) -> Candidates:
        return self.items[item]

    def __setitem__(self, item: int, held: Candidates) -> None:
        self.items[item] = held
        self.counts[item] = len(held)

    def add(self, starts: Int64, new: Candidates) -> None:
        """Add keys of all matrices; the keys of matrix i begin at ``starts[i]``."""
        items, coming = self._held
        self._held = items, [*coming, (starts, new)]
        self.counts += np.diff(starts)
        if len(coming) >= _MOST_COMING:
            _ = self.items

    def keep(self, like: Any, score: Callable[[Any, Any], Any], least: Float64) -> None:
        """Keep the keys whose scores are not below `least` (b,), all at once on the CUDA device of `like`.

        score: maps keys (b, w, d), w for the matrix with most keys, and flags (b, w) of existing keys to scores.
        """
        items, coming = self._held
        parts = [(np.cumsum([0, *map(len, items)]), Candidates.joined(items)), *coming]
        parts = [(starts, part) for starts, part in parts if starts[-1]]
        xp = array_namespace(like)
        whole = [
            xp.concat([array if on_cuda(array) else to_device(array, like) for array in each])
            for each in zip(*(part.arrays for _, part in parts), strict=True)
        ]
        firsts = np.cumsum([0, *(starts[-1] for starts, _ in parts[:-1])])
        edges = np.stack([first + starts for first, (starts, _) in zip(firsts, parts, strict=True)])
        lengths, starts = np.diff(edges, axis=1).T.reshape(-1), np.cumsum([0, *self.counts])
        order = np.arange(starts[-1]) + np.repeat(edges[:, :-1].T.reshape(-1) - np.cumsum(lengths) + lengths, lengths)
        places = to_device(order, like)
        keys, there = SELECT.stacked(whole[1][None], starts, places)
        kept, found = SELECT.reaching(score(keys, there), there, least)
        found = found + to_device(np.repeat(starts[:-1], np.diff(kept)), like)
        alone = kept[[0, -1]]
        found = SELECT.gathered(places[None], alone, found)
        new = Candidates.of([SELECT.gathered(array[None], alone, found) for array in whole])
        empty = [item.take(slice(0)) for item in items]
        self._held, self.counts = (empty, [(kept, new)]), np.diff(kept)


def _in_main_memory(parts: list[Candidates]) -> list[Candidates]:
    """Return keys in main memory; one copy fetches all arrays on a CUDA device."""
    sent = [array for part in parts for array in part.arrays if on_cuda(array)]
    if not sent:
        return parts
    xp = array_namespace(sent[0])
    words, at = xp.concat([array.reshape(-1).view(np.uint8) for array in sent]).get(), 0
    out = []
    for part in parts:
        arrays = []
        for array in part.arrays:
            found = array
            if on_cuda(array):
                found = words[at : at + array.nbytes].copy().view(array.dtype).reshape(array.shape)
                at += array.nbytes
            arrays.append(found)
        out.append(Candidates.of(arrays))
    return out


_RUN = 64  # blocks that are screened together
_DEVICE_RUN = 1024  # the same on a CUDA device, where each run costs a wait
_JUDGED_NUMBERS = 1 << 26  # at most this many numbers of keys, which a CUDA device judges at once
_RUN_NUMBERS = 1 << 22  # at most this many numbers, made of keys to screen them together; one block may take more


@dataclass(frozen=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        """Return the figures on one line."""
        payload = "" if self.payload is None else f", payload {self.payload.dtype}"
        return f"SelectedKeys({len(self)} keys of {self.keys.shape[1]} columns{payload})"


class RunningCandidates:
    """The keys that may still belong to the universal set after whole blocks, and the sums over all keys so far.

    New blocks are screened against the keys up to the last block whose number is a power of two. Keys that may have a
    bound of at least ε are held. Once twice as many are held as the theorem allows, they are judged again against all
    keys so far. When that happens depends on the blocks alone, not on the chunks in which they came.
    """

    def __init__(self, epsilon: float, running: Running, format: Any, held: list[Candidates]) -> None:
        self.epsilon, self.running, self.format, self.held = epsilon, running, format, HeldCandidates(held)
        self.limits = np.full(len(held), self.least_limit)
        self._span = _RUN

    def copy(self) -> RunningCandidates:
        """Return an independent copy."""
        other = RunningCandidates.__new__(RunningCandidates)
        other.__dict__.update(self.__dict__)
        other.running, other.held, other.limits = self.running.copy(), self.held.copy(), self.limits.copy()
        return other

    @property
    def _held_array(self) -> Any:
        return self.running, self.held

    @property
    def least_limit(self) -> int:
        """Smallest limit: how many keys of a matrix may be held before they are judged again."""
        return math.ceil(min(2 * self.running.expected / self.epsilon, 2.0**62))

    @property
    def blocks(self) -> int:
        """Number of whole blocks so far."""
        return self.running.blocks

    def labels(self, payload: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int64] | None:
        """Return the labels, which are the first payload, (1, k)."""
        return payload[0].reshape(1, -1) if self.running.labeled else None

    def after(self, rows: Rows, index: Any, *payload: npt.NDArray[Any]) -> RunningCandidates:
        """Return the candidates after further whole blocks."""
        other = self.copy()
        other._take(rows, index, *payload)
        return other

    def _take(self, rows: Rows, index: Any, *payload: npt.NDArray[Any]) -> None:
        """Add whole blocks; after an error the candidates are void."""
        at, left = 0, rows.shape[1] // BLOCK
        longest = _DEVICE_RUN if on_cuda(rows.keys) else _RUN
        while left:
            first = not self.blocks
            count = 1 if first else self._run(left, longest)
            part = slice(at * BLOCK, (at + count) * BLOCK)
            run = rows.between(part.start, part.stop)
            beside = [index[:, part], *(array[:, part] for array in payload)]
            labels = self.labels(beside[1:])
            over: list[int] = []
            if first:
                self.running.add(run)
                self.running.freeze(run, self.epsilon)
                starts, places = self.running.screened(run, labels, self.epsilon, member=True)
            else:
                (starts, places), ahead = self.running.screened_ahead(run, labels, self.epsilon)
                cut, over = self._cut(starts, places)
                self._span = min(2 * self._span, longest) if cut is None else cut
                if cut is not None and cut < count:
                    count, ahead = cut, None
                    run = run.between(0, count * BLOCK)
                    starts, places = _first_of(starts, to_numpy(places), count * BLOCK)
                self.running.add(run, ahead)
            milestone = self.blocks & (self.blocks - 1) == 0
            if milestone:
                over = list(range(len(self.held)))
            if milestone and not first:
                self.running.freeze(run, self.epsilon)
            if starts[-1]:
                arrays = beside[0], run.keys, *beside[1:]
                self.held.add(starts, Candidates.of([_gathered(array, starts, places) for array in arrays]))
            self._judge_again([item for item in over if self.held.counts[item]], run, milestone)
            at, left = at + count, left - count

    def _judge_again(self, full: list[int], rows: Rows, frozen: bool) -> None:
        """Drop the keys of some matrices that no longer belong to the set.

        A CUDA device judges the keys of all matrices at once, if their factors are sound. If the screen is `frozen`
        after all keys so far, it judges them.
        """
        if not full:
            return
        b, _, d = rows.shape
        fits = b * int(self.held.counts.max()) * d <= _JUDGED_NUMBERS
        if on_cuda(rows.keys) and fits and (bar := self.running.bar(rows, self.epsilon, frozen)):
            factor, bounds = bar
            least = np.full(b, -np.inf)
            least[full] = bounds[full]

            def score(keys: Any, there: Any) -> Any:
                return factor.on(Rows(keys, self.format, there)).scores(as_float64=True)[0]

            self.held.keep(rows.keys, score, least)
        else:
            by = self.running.reference(rows.between(0, 0), None, frozen=frozen and not on_cuda(rows.keys))
            parts = self.held.parts()
            self.held.forget()
            for item in full:  # each part by itself, of which nothing else has a hold, as both take more memory
                for i in range(len(parts[item])):
                    parts[item][i] = self.pruned(by, item, parts[item][i])
            self.held.hold(parts)
        self.limits[full] = np.maximum(self.least_limit, 2 * self.held.counts[full])

    def _cut(self, starts: Int64, places: Any) -> tuple[int | None, list[int]]:
        """Return after how many blocks a matrix holds too many keys, None if none does, and which matrices do."""
        room = self.limits - self.held.counts
        if starts[-1] <= np.minimum.reduce(room, initial=starts[-1]):
            return None, []
        over = np.flatnonzero(np.diff(starts) > room)
        if not len(over):
            return None, []
        places, ends = to_numpy(places), np.ones(len(over), np.int64)
        some = room[over] >= 0
        ends[some] += places[(starts[:-1] + room)[over[some]]] // BLOCK
        return int(ends.min()), over[ends == ends.min()].tolist()

    def _run(self, left: int, longest: int) -> int:
        """Return how many of the remaining blocks to screen together: up to the next milestone."""
        done = self.blocks
        milestone = 1 << done.bit_length()
        fit = max(1, _RUN_NUMBERS // max(1, BLOCK * len(self.held) * self.running.numbers))
        return self.running.fitting(min(left, milestone - done, longest - done % longest, self._span, fit))

    def judged(self, by: Reference, item: int, held: Candidates) -> Judged:
        """Return the bounds of candidates of one matrix."""
        keys = Rows(held.keys[None], self.format)
        return self.running.judge(by, item, keys, self.labels(held.payload), self.epsilon)

    def pruned(self, by: Reference, item: int, held: Candidates) -> Candidates:
        """Return the keys of one matrix that may still have a score of at least ε among all so far."""
        return held.take(self.judged(by, item, held).kept)


def _gathered(array: Any, starts: Int64, places: Any) -> Any:
    """Return the listed rows of an array (b or 1, m, ...), on a CUDA device if the array or the list is there."""
    if isinstance(array, RowNumbers):
        return array[0, places]
    return kernels_for("select", array if on_cuda(array) else places).gathered(array, starts, places)


def _first_of(starts: Int64, places: Int64, stop: int) -> tuple[Int64, Int64]:
    """Return the lists of the rows that come before `stop`."""
    before = places < stop
    return np.concatenate([[0], np.cumsum(before)])[starts], places[before]


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
        check_chunk(other, self, name)
        require_format(name, other.format, self.format)
        if other.payload != self.payload:
            came, before = (
                [f"{dtype} of shape (..., m{''.join(f', {size}' for size in shape)})" for shape, dtype in form.payload]
                for form in (other, self)
            )
            raise ValueError(
                f"payload of {name} is {came[0] if came else 'left out'}; expected {before[0] if before else 'none'}, "
                "as before. Give the same kind with all chunks, or none"
            )


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
        simple = isinstance(self._bounds, RunningSquares) and self._bounds.m == 1 and not self.form.payload
        # the dtype of keys that may come by `with_chunk`
        self._plain = np.dtype(format) if simple and format in ("float64", "float32") else None

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

    def expect_rounded(self) -> None:
        """Take keys from here on as rounded before they came, so that their last digits tell nothing."""
        if not self.candidates.running.rounded:
            self._candidates = self.candidates.copy()
            self._candidates.running.expect_rounded()

    def push(self, rows: Rows, index: RowNumbers, *payload: npt.NDArray[Any]) -> None:
        """Add a chunk, or raise FloatingPointError if it is not finite; after an error the state is void."""
        if isinstance(self._bounds, RunningBlocks):
            payload = (self._bounds.label(self.seen, rows.shape[1]), *payload)
        else:
            if self._bounds.m > 1:  # products of coordinates are made in main memory
                rows = rows_in_memory(rows)
            self._bounds.require_range(rows)
        self.tail.push(rows, self._take, index, *payload, take_held=self._take_meanwhile)

    def with_chunk(self, K: npt.NDArray[Any], first: int) -> CandidateStore | None:
        """Return the state after a chunk of plain numpy keys, numbered from `first` on, that only wait.

        Return None for a chunk that needs `push`; a stream of small chunks has few.
        """
        shape = K.shape
        if self._plain is None or K.dtype != self._plain:
            return None
        if len(shape) < 2 or shape[:-2] != self.batch or shape[-1] != self.d or not shape[-2]:
            return None
        tail = self.tail.with_chunk(K.reshape(len(self.present), *shape[-2:]), first)
        if tail is None:
            return None
        other = CandidateStore.__new__(CandidateStore)
        other.__dict__.update(self.__dict__, tail=tail, present=self.present + shape[-2])
        return other

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
            selected.append(SelectedKeys(found.indices, as_they_came(found.keys, self.format), scores, payload))
        return by, selected, counted

    def _waiting(self, item: int) -> Candidates:
        """Return the waiting rows of one matrix."""
        index, *payload = self.tail.payload
        waiting = tuple(array[item if len(array) == len(self.present) else 0] for array in payload)
        return Candidates(index[0], self.tail.rows.keys[item], waiting)

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
