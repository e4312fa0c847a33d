"""The keys of a stream that may still belong to the universal set, and the sums that screen blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import on_cuda, to_numpy
from levattn._core.types import Float64, Int64
from levattn._kernels import BLOCK, Rows, kernels_for
from levattn.sets.held_candidates import Candidates, HeldCandidates
from levattn.sets.prefix_bounds import Judged, Reference, Running
from levattn.states.block_buffer import RowNumbers

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
            number = self.blocks + 1
            milestone = number & (number - 1) == 0
            count = 1 if milestone else self._run(left, longest)
            part = slice(at * BLOCK, (at + count) * BLOCK)
            run = rows.between(part.start, part.stop)
            beside = [index[:, part], *(array[:, part] for array in payload)]
            labels = self.labels(beside[1:])
            if milestone:
                self.running.add(run)
                self.running.freeze()
                starts, places = self.running.screened(run, labels, self.epsilon, member=True)
                over = list(range(len(self.held)))
            else:
                (starts, places), ahead = self.running.screened_ahead(run, labels, self.epsilon)
                cut, over = self._cut(starts, places)
                self._span = min(2 * self._span, longest) if cut is None else cut
                if cut is not None and cut < count:
                    count, ahead = cut, None
                    run = run.between(0, count * BLOCK)
                    starts, places = _first_of(starts, to_numpy(places), count * BLOCK)
                self.running.add(run, ahead)
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
            by = self.running.reference(rows.between(0, 0), None)
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
        return min(left, milestone - 1 - done, longest - done % longest, self._span, fit)

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
