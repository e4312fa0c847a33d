"""Runs of latent attention on a CUDA device: the cuts of sequences, and the tables of runs that kernels read.

Cuts depend only on the number of positions before them. Early runs are short, so that few positions keep many blocks
busy. Later runs are longer, because each run stores a state.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.types import Int64
from levattn._kernels.cuda_source import on_device

FOLLOWED, ROWS, POSITIONS = 7, 6, 5  # fields of a run, as runs.cuh has them

_SHORTEST, _LONGEST = 128, 1024  # positions of a run, powers of two
_EIGHTH = 8  # a run is this part of the positions before it, between these two
_STRETCH = 256  # rows of a block where all see the same positions
_EVERYTHING = 1 << 62  # last position that a noncausal row sees


class Runs:
    """Runs in the order of their sequences, (count, 8) as `Run` in runs.cuh, and the first run of each sequence.

    After `send_runs`, kernels take them as `arguments`, or with the sequences as `listed`.
    """

    def __init__(self, table: Int64, sequences: int) -> None:
        self.table = table
        self.spans = np.searchsorted(table[:, 0], np.arange(sequences + 1)).astype(np.int64)
        self.arguments: list[Any] = []
        self.listed: list[Any] = []

    def __len__(self) -> int:
        return len(self.table)

    def any(self, field: int) -> bool:
        return bool(self.table[:, field].any())

    def most(self, field: int) -> int:
        return int(self.table[:, field].max(initial=0))


def send_runs(bounds: Int64, *all_runs: Runs) -> Any:
    """Copy bounds and runs to the device in one copy, and return the bounds there."""
    parts = [bounds, *(part.ravel() for runs in all_runs for part in (runs.table, runs.spans))]
    ends = np.cumsum([part.size for part in parts]).tolist()
    whole = on_device(np.concatenate(parts))
    first, *others = (whole[end - part.size : end] for part, end in zip(parts, ends, strict=True))
    for runs, table, spans in zip(all_runs, others[::2], others[1::2], strict=True):
        runs.arguments, runs.listed = [table, len(runs)], [table, spans, len(runs)]
    return first


def _cuts(length: int) -> Int64:
    """Return the starts of runs of positions, from 0 to the first that is at least `length`."""
    cuts = [0]
    while cuts[-1] < length:
        before = 1 << max(cuts[-1].bit_length() - 1, 0)
        cuts.append(cuts[-1] + min(max(before // _EIGHTH, _SHORTEST), _LONGEST))
    return np.asarray(cuts, np.int64)


def _stretches(lengths: Int64, cuts: Int64) -> tuple[Int64, Int64, Int64]:
    """Cut sequences: return the sequence, the start and the stop of every part."""
    counts = np.searchsorted(cuts, lengths)
    sequences = np.repeat(np.arange(len(lengths)), counts)
    numbers = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)
    return sequences, cuts[numbers], np.minimum(cuts[1:][numbers], lengths[sequences])


def plain_runs(lengths: Int64, begins: Int64, field: int) -> Runs:
    """Return runs of positions only, or of rows only that see everything; `field` selects which."""
    longest = int(lengths.max(initial=0))
    cuts = _cuts(longest) if field == POSITIONS else np.arange(0, longest + _STRETCH, _STRETCH)
    sequences, starts, stops = _stretches(lengths, cuts)
    table = np.zeros((len(sequences), 8), np.int64)
    table[:, 0] = table[:, 1] = sequences
    table[:, 2 if field == POSITIONS else 3] = begins[sequences] + starts
    table[:, 4] = _EVERYTHING
    table[:, field] = stops - starts
    table[:, FOLLOWED] = field == POSITIONS
    return Runs(table, len(lengths))


def causal_runs(offsets: Int64, ahead: int, *, sums: bool = False) -> Runs:
    """Return the runs of causal attention: rows that see nothing yet, positions before the first row, and both.

    Only with `sums` are the sums of a sequence's last run needed.
    """
    lengths, begins = np.diff(offsets), offsets[:-1]
    blind, starts, stops = _stretches(
        np.minimum(lengths, max(-ahead, 0)), np.arange(0, int(lengths.max(initial=0)) + _LONGEST, _LONGEST)
    )
    early = np.zeros((len(blind), 8), np.int64)
    early[:, 0] = blind
    early[:, 3], early[:, 4], early[:, ROWS] = begins[blind] + starts, starts + ahead, stops - starts
    seen = np.maximum(lengths + ahead, 0)
    cuts = _cuts(int(seen.max(initial=0)))
    if ahead > 0:
        cuts = np.union1d(cuts, [ahead])
    sequences, starts, stops = _stretches(seen, cuts)
    table = np.zeros((len(sequences), 8), np.int64)
    table[:, 0], table[:, 2], table[:, 4] = sequences, begins[sequences] + starts, starts
    table[:, 3] = begins[sequences] + np.maximum(starts - ahead, 0)
    table[:, POSITIONS] = stops - starts
    table[:, ROWS] = np.where(starts >= ahead, stops - starts, 0)
    table = np.concatenate([early, table])
    table = table[np.argsort(table[:, 0], kind="stable")]
    table[:, 1] = np.arange(len(table))
    followed = np.append(table[1:, 0] == table[:-1, 0], False)[: len(table)]
    table[:, FOLLOWED] = (table[:, POSITIONS] > 0) & (followed | sums)
    return Runs(table, len(lengths))
