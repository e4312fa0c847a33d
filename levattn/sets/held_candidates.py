"""The keys of a stream that may still belong to the universal set: of one matrix, and of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace, on_cuda, to_device
from levattn._core.device import where_arrays_are
from levattn._core.types import Float64, Int64
from levattn._kernels import kernels_for

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
        select, xp = kernels_for("select", like), array_namespace(like)
        whole = [
            xp.concat([array if on_cuda(array) else to_device(array, like) for array in each])
            for each in zip(*(part.arrays for _, part in parts), strict=True)
        ]
        firsts = np.cumsum([0, *(starts[-1] for starts, _ in parts[:-1])])
        edges = np.stack([first + starts for first, (starts, _) in zip(firsts, parts, strict=True)])
        lengths, starts = np.diff(edges, axis=1).T.reshape(-1), np.cumsum([0, *self.counts])
        order = np.arange(starts[-1]) + np.repeat(edges[:, :-1].T.reshape(-1) - np.cumsum(lengths) + lengths, lengths)
        places = to_device(order, like)
        keys, there = select.stacked(whole[1][None], starts, places)
        kept, found = select.reaching(score(keys, there), there, least)
        found = found + to_device(np.repeat(starts[:-1], np.diff(kept)), like)
        alone = kept[[0, -1]]
        found = select.gathered(places[None], alone, found)
        new = Candidates.of([select.gathered(array[None], alone, found) for array in whole])
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
