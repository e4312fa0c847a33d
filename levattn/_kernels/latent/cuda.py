"""Latent attention on a CUDA device: launches of the sources latent*.cu and decay.cu.

Sequences are cut into runs (`Runs`). A block of threads takes one run, with up to 128 latents and columns. No bit
of a row depends on later rows, other sequences or other heads. Forward passes use tensor cores in single precision,
not in double. Gradients are summed position by position in both. Numbers of 16 bits have kernels of their own, whose
products are of such numbers. A few rows after a state take one launch (`step_at_once`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from levattn._core.cached import cached_property
from levattn._core.types import Int64
from levattn._kernels.cuda_source import (
    KERNELS,
    THREADS,
    TYPES,
    launch,
    namespace,
    new_array,
    on_device,
    shared_limit,
    stored,
    with_rows,
    with_steps,
)
from levattn._kernels.latent import LatentArguments, State
from levattn._kernels.rows.cuda import sum_in_pairs

FOLLOWED, ROWS, POSITIONS = 7, 6, 5  # fields of a run, as runs.cuh has them

_SHORTEST, _LONGEST = 128, 1024  # positions of a run, powers of two
_EIGHTH = 8  # a run is this part of the positions before it, between these two
_STRETCH = 256  # rows of a block where all see the same positions
_EVERYTHING = 1 << 62  # last position that a noncausal row sees


class Runs:
    """Runs in the order of their sequences, (count, 8) as `Run` in runs.cuh, and the first run of each sequence.

    After `sent`, kernels take them as `arguments`, or with the sequences as `listed`.
    """

    def __init__(self, table: Int64, sequences: int) -> None:
        self.table = table
        self.spans = np.searchsorted(table[:, 0], np.arange(sequences + 1)).astype(np.int64)
        self._most = table.max(axis=0, initial=0).tolist()
        self.arguments: list[Any] = []
        self.listed: list[Any] = []

    def __len__(self) -> int:
        return len(self.table)

    def any(self, field: int) -> bool:
        """Tell whether a field, of which no number is negative, is other than 0 in any run."""
        return bool(self._most[field] > 0)

    def most(self, field: int) -> int:
        """Return the largest number of a field, at least 0."""
        return int(self._most[field])

    def sent(self, table: Any, spans: Any) -> Runs:
        """Return these runs with their arrays on the device."""
        other = object.__new__(Runs)
        vars(other).update(vars(self), arguments=[table, len(self)], listed=[table, spans, len(self)])
        return other


class _Plan:
    """The runs of positions and of rows, and all their tables as one array, which a call copies to the device."""

    def __init__(self, bounds: Int64, *all_runs: Runs) -> None:
        self._runs = all_runs
        parts = [bounds, *(part.ravel() for runs in all_runs for part in (runs.table, runs.spans))]
        self._whole, self._ends = np.concatenate(parts), np.cumsum([part.size for part in parts]).tolist()

    def sent(self) -> tuple[Any, Runs, Runs]:
        """Return the bounds, the runs of positions and the runs of rows on the device, after one copy."""
        whole = on_device(self._whole)
        first, *others = (whole[start:end] for start, end in pairwise([0, *self._ends]))
        found = [runs.sent(*others[2 * i : 2 * i + 2]) for i, runs in enumerate(self._runs)]
        return first, found[0], found[-1]


def _planned(offsets: tuple[int, ...], U: int, causal: bool, ahead: int, sums: bool, own: bool) -> _Plan:
    """Return the plan of a call; `own` tells whether one sequence of rows sees all U positions."""
    bounds = np.array(offsets, np.int64)
    rows, begins = np.diff(bounds), bounds[:-1]
    lengths = np.full(1, U) if own and len(rows) == 1 else rows
    ends = np.append(begins, begins[-1:] + lengths[-1:])
    if causal:
        return _Plan(ends, causal_runs(bounds, ahead, sums=sums))
    return _Plan(ends, plain_runs(lengths, begins, POSITIONS), plain_runs(rows, begins, ROWS))


_planned_before = lru_cache(64)(_planned)  # of one sequence, as calls of a model repeat their lengths


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


# As in latent_step.cu
_ROWS = 8
_COLUMNS = 32
_STATIC = 8 * _ROWS * _ROWS * _COLUMNS + 64  # bytes of shared memory in its source


def step_at_once(Q: Any, K: Any, V: Any, mask: Any, state: State | None) -> tuple[Any, State] | None:
    """Return the output (b, T, D) of up to 8 causal rows, and the state after them; see `LatentSteps`.

    Q, K and V may be contiguous tensors, and the output then is one. None for more rows, or more latents than fit into
    shared memory.
    """
    (b, T, L), D = Q.shape, V.shape[2]
    shared = 3 * 8 * T * L
    if not 0 < T <= _ROWS or shared + _STATIC > shared_limit():
        return None
    before = [None if state is None else on_device(part, np.float64) for part in state or (None,) * 3]
    after = new_array((b, L)), new_array((b, L)), new_array((b, L, D))
    if hasattr(V, "new_empty"):
        given, Y = (Q, K, V), V.new_empty((b, T, D))
    else:
        given, Y = (with_rows(Q), with_rows(K), with_rows(V)), new_array((b, T, D), V.dtype)
    arguments = [step for array in given for step in with_steps(array, 2)]
    arguments += [*with_steps(mask, 2), T, L, D, *before, Y, *after]
    grid = (b, -(-D // _COLUMNS))
    launch("latent_step", "step_rows", (stored(V.dtype),), grid, arguments, threads=32 * _ROWS, shared=shared)
    return Y, after


_BUSY = 528  # blocks of threads below which a block of a forward pass takes fewer columns

# As in latent_tensor.cu
_MULTIPLIED = (32, 64, 128)  # latents of a block
_MULTIPLIERS = 128  # threads of a block
_TILE = 64  # columns of a tile; a block has one tile or two
_CHUNK = 16  # steps of a chunk
_APART = 8  # numbers between lines
_PAIRS = 2 * 16 * 20 + 4 * 16  # numbers besides lines: weights of pairs of steps, and the scales of rows

# As in latent_half.cu, which has the same blocks
_HALF_CHUNK = 64

# As in latent.cuh and latent.cu
_CLASSES = {"float": (16, 32, 64, 128), "double": (32, 128)}  # latents of a block
_WIDEST = 128  # columns of a block
_PIECE = 64  # rows of a warp's block
_CHANNELS, _LINES = 32, 16


def forward(x: LatentArguments) -> Any:
    """Return the output (b, T, D) of latent attention; see `LatentArguments`."""
    work = _Work(x)
    if not work.T:
        return new_array((work.b, 0, work.D), x.V.dtype)
    starts = work.starts() if x.causal else work.everything()
    return work.rows(work.row_weights(), starts)


def backward(x: LatentArguments, dY: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return the gradients of Q, K, V, the gate and its values; the last two are None without a gate."""
    xp, work = namespace(), _Work(x)
    if not work.T:
        dQ, dK, dV, dgate, dgate_value = (
            None if part is None else xp.zeros(part.shape, work.dtype)
            for part in (x.Q, x.K, x.V, x.gate, x.gate_value)
        )
        return dQ, dK, dV, dgate, dgate_value
    weights = work.row_weights()
    return work.gradients(with_rows(dY), weights, work.starts() if x.causal else work.everything())


def step(Q: Any, K: Any, V: Any, mask: Any, state: State | None) -> tuple[Any, State] | None:
    """Return the output of causal rows and the state after them; see `LatentSteps`.

    A few rows take one launch. With more rows and no state before them, one pass sums runs for both rows and state.
    """
    found = step_at_once(Q, K, V, mask, state)
    if found is not None or state is not None or not Q.shape[1]:
        return found
    x = LatentArguments(Q, K, V, np.array([0, Q.shape[1]]), causal=True, mask=mask)
    return _Work(x, sums=True).rows_and_totals()


def summary(K: Any, V: Any, mask: Any, offsets: npt.NDArray[np.int64]) -> State:
    """Return the state of all positions of each sequence, in float64."""
    no_rows = new_array((len(K), 0, K.shape[2]), K.dtype)
    work = _Work(LatentArguments(no_rows, K, V, offsets, causal=False, mask=mask), own=False)
    return work.totals()


def joined(state: State, other: State) -> State:
    """Return the joined state of two states, whose arrays are (..., L) and (..., L, D) in float64."""
    D = state[2].shape[-1]
    arguments = [on_device(part, np.float64) for part in (*state, *other)]
    m, s, S = (new_array(part.shape) for part in state)
    blocks = -(-m.size * max(D, 1) // THREADS)
    launch("latent", "join_states", (), (blocks,), [*arguments, m.size, D, m, s, S])
    return m, s, S


def decayed_scan(a: Any, x: Any, first: Any = None, *, reverse: bool = False) -> Any:
    """Return ``h_t = a_t h_{t−1} + x_t`` for (b, T, C), from `first` (b, C) or 0; see `definition` for `reverse`."""
    xp, (b, T, C) = namespace(), x.shape
    dtype = np.result_type(a.dtype, x.dtype)
    out = new_array((b, T, C), dtype)
    before = None if first is None or reverse else on_device(first, dtype)
    a, x = (part.astype(dtype, copy=False) for part in (xp.broadcast_to(a, x.shape), x))
    if T:
        arguments = [*_rows(a), *_rows(x), before, T, C, reverse, out]
        grid = (b * -(-C // _CHANNELS),)
        launch("decay", "scan_decayed", (TYPES[dtype.name],), grid, arguments, threads=_CHANNELS * _LINES)
    return out


class _Shared(NamedTuple):
    """Shared memory of a block: for each step of a chunk lines of latents and of columns, and other numbers."""

    latents: int
    columns: int
    sums: int  # numbers of each latent, for the whole run
    others: int = 0


@dataclass(frozen=True)
class _Starts:
    """The states before runs: references and sums (b, slots, L), states (b, slots, L, D), or nothing."""

    references: Any = None
    sums: Any = None
    states: Any = None
    slots: int = 0

    @property
    def arguments(self) -> list[Any]:
        return [self.references, self.sums, self.states, self.slots]


class _Work:
    """One call: its sizes, its runs, and the launches of each pass."""

    def __init__(self, x: LatentArguments, *, own: bool = True, sums: bool = False) -> None:
        self.x = x
        self.b, self.T, self.L = x.Q.shape
        self.U, self.D = x.V.shape[1:]
        self.n = len(x.offsets) - 1
        self.key = stored(x.V.dtype)
        self.dtype = np.dtype(np.float64 if self.key == "double" else np.float32)  # of the computation
        self.real = TYPES[self.dtype.name]
        plan = _planned_before if self.n == 1 else _planned
        given = tuple(x.offsets.tolist()), self.U, bool(x.causal), x.ahead, sums, own
        self.bounds, self.position_runs, self.row_runs = plan(*given).sent()
        self.width = next((width for width in _CLASSES[self.real] if width >= self.L), _CLASSES[self.real][-1])
        self.slices = max(1, -(-self.L // self.width))
        self.positions = [*_rows(x.K), *_rows(x.V), *with_steps(x.mask, 2)]

    # -- before rows -------------------------------------------------------------------

    def starts(self) -> _Starts:
        """Return the state before each run of causal attention."""
        if self.x.state is None and not self.position_runs.any(FOLLOWED):
            return _Starts()
        return self._combined(self.position_runs)[0]

    def totals(self) -> State:
        """Return the state of all positions, added to the given state, in float64."""
        return self._combined(self.position_runs, np.dtype(np.float64))[1]

    def rows_and_totals(self) -> tuple[Any, State]:
        """Return the output of causal rows of one sequence, and the state after it, in float64."""
        starts, (m, s, S) = self._combined(self.position_runs, np.dtype(np.float64))
        return self.rows(self.row_weights(), starts), (m[:, 0, :], s[:, 0, :], S[:, 0, :, :])

    def everything(self) -> _Starts:
        """Return the state of all positions, which every row reads, with a slot for each sequence."""
        return _Starts(*self._combined(self.position_runs, self.dtype)[1], self.n)

    def _combined(self, runs: Runs, totals: Any = None) -> tuple[_Starts, State]:
        """Return the states before runs, and with `totals`, a dtype, the state of all positions."""
        shape = (self.b, len(runs), self.L)
        maxima, sums, states = (new_array(each, self.dtype) for each in (shape, shape, (*shape, self.D)))
        if runs.any(FOLLOWED):
            tail = [*runs.arguments, self.L, self.D, maxima, sums, states]
            if self.real == "float":
                self._multiply("runs", runs, [*self.positions, *tail])
            else:
                block = self._block(len(runs))
                self._walk("sum_runs", runs, block, [*self.positions, *tail], _Shared(2, 2, 3))
        before = [on_device(part, np.float64) for part in self.x.state or [None] * 3]
        entered, kept, gained = (new_array(each) for each in ((self.b, self.n, self.L), shape, shape))
        whole: Any = [None] * 3
        if totals is not None:
            whole = [new_array((self.b, self.n, self.L, *rest), totals) for rest in ((), (), (self.D,))]
        sizes = [self.b, self.n, self.L]
        arguments = [*runs.listed, *sizes, *before[:2], maxima, sums, entered, kept, gained, *whole[:2]]
        launch("latent", "combine_sums", self._types(whole[0]), (-(-self.b * self.n * self.L // THREADS),), arguments)
        factors = [before[2], entered, kept, gained, None]
        self._scan(runs, FOLLOWED, states, factors, whole[2])
        return _Starts(maxima, sums, states, len(runs)), tuple(whole)

    def _scan(self, runs: Runs, field: int, x: Any, factors: list[Any], into: Any, *, backwards: bool = False) -> None:
        D = x.shape[3] if x.ndim == 4 else 1
        arguments = [*runs.listed, self.b, self.n, self.L, D, field, backwards, *factors, x, into]
        launch("latent", "scan_runs", self._types(into), (-(-self.b * self.n * self.L * D // THREADS),), arguments)

    def _types(self, whole: Any) -> tuple[str, str]:
        """Return the types of numbers: in the states of runs, and in the state of all positions."""
        return self.real, "double" if whole is None else TYPES[whole.dtype.name]

    # -- rows --------------------------------------------------------------------------

    def row_weights(self) -> list[Any]:
        """Return the largest logit of each row, the inverse of its sum of exponentials, and the weight of its gate."""
        runs, x = self.row_runs, self.x
        first = new_array((self.b, self.n, self.L), np.int32)
        maxima = None if x.state is None else on_device(x.state[0], np.float64)
        arguments = [*_rows(x.K), *with_steps(x.mask, 2), self.bounds, self.n, maxima, self.L, first]
        launch("latent", "find_first", (self.key,), (self.n * self.b, -(-self.L // 32)), arguments)
        found = [new_array((self.b, self.T), self.dtype) for _ in range(3)]
        if x.gate is None:
            found[2] = None
        sizes = [self.n, self.L, self.T]
        arguments = [*_rows(x.Q), *with_steps(x.gate, 2), first, *runs.arguments, *sizes, *found]
        launch("latent", "weigh_rows", (self.key, self.real), self._pieces(runs, ROWS), arguments)
        return found

    def rows(self, weights: list[Any], starts: _Starts) -> Any:
        """Return the output."""
        runs, x, shape = self.row_runs, self.x, (self.b, self.slices, self.T, self.D)
        tail = [
            *_rows(x.Q),
            *_rows(x.gate_value),
            *weights,
            *starts.arguments,
            *runs.arguments,
            self.L,
            self.D,
            self.T,
        ]
        if self.real == "double":
            parts = new_array(shape, self.dtype)
            held = _Shared(4, 2 if x.gate is None else 4, 2, others=6)
            self._walk("write_rows", runs, self._block(len(runs)), [*self.positions, *tail, parts], held)
            return _summed(parts)
        wide = self.slices > 1
        parts = new_array(shape, self.dtype if wide else x.V.dtype)
        halves = [] if self.key == "float" else [wide]
        self._multiply("rows", runs, [*self.positions, *tail, *halves, parts])
        if not wide:
            return _summed(parts)
        out = new_array((self.b, self.T, self.D), x.V.dtype)
        blocks = -(-out.size // THREADS)
        arguments = [parts, self.b, self.slices, self.T * self.D, out]
        launch("latent_tensor", "add_slices", (self.key,), (blocks,), arguments)
        return out

    # -- gradients ---------------------------------------------------------------------

    def gradients(self, dY: Any, weights: list[Any], starts: _Starts) -> tuple[Any, Any, Any, Any, Any]:
        """Return the gradients of Q, K, V, the gate and its values."""
        x = self.x
        b, T, U, L, D = self.b, self.T, self.U, self.L, self.D
        threads, columns = block = self._block(None)
        E, c = new_array((b, U, L), self.dtype), new_array((b, T, L), self.dtype)
        read = new_array((b, columns, T, L), self.dtype)
        crossing = x.causal and self.row_runs.any(FOLLOWED)
        kept, given = (new_array((b, len(self.row_runs), L)) if crossing else None for _ in range(2))
        sizes = [L, D, T]
        arguments = [*self.positions, *_rows(dY), *starts.arguments, *self.row_runs.arguments, *sizes, U]
        arguments += [E, c, read, kept, given]
        self._walk("trace_runs", self.row_runs, block, arguments, _Shared(2 + threads // 32, 4, 2))
        growths = _summed(read)
        dQ, dgate, dgate_value = new_array((b, T, L), self.dtype), None, None
        if x.gate is not None:
            dgate, dgate_value = new_array((b, T), self.dtype), new_array((b, T, D), self.dtype)
        arguments = [*_rows(x.Q), *_rows(dY), *_rows(x.gate_value), *weights, *self.row_runs.arguments, *sizes]
        arguments += [c, growths, dQ, dgate, dgate_value]
        launch("latent_back", "finish_rows", (self.real,), self._pieces(self.row_runs, ROWS), arguments)
        if not x.causal:
            references = [starts.references, self.n]
            arguments = [*_rows(x.K), *with_steps(x.mask, 2), *references, *self.position_runs.arguments, L, U, E]
            launch("latent_back", "raise_logits", (self.real,), self._pieces(self.position_runs, POSITIONS), arguments)
        dK, dV = self._flows([*_rows(dY), E, c, growths], kept, given)
        return dQ, dK, dV, dgate, dgate_value

    def _flows(self, read: list[Any], kept: Any, given: Any) -> tuple[Any, Any]:
        """Return dK and dV, summed over the rows and runs of rows that see each position."""
        b, L, D = self.b, self.L, self.D
        threads, columns = block = self._block(None)
        sizes = [L, D, self.T, self.U]
        runs, coming = self.row_runs, [None, None, 0]
        if kept is not None or not self.x.causal:
            flows, sums = new_array((b, len(runs), L, D), self.dtype), new_array((b, len(runs), L), self.dtype)
            arguments = [*_rows(None), *read, *runs.arguments, *sizes, *coming, flows, sums, None, None]
            self._walk("flow_back", runs, block, arguments, _Shared(6, 2, 1), "true")
            whole: Any = [None, None]
            if not self.x.causal:
                whole = [new_array((b, self.n, L, D), self.dtype), new_array((b, self.n, L), self.dtype)]
            factors = [None, None, kept, None, given]
            for part, all_of_it in zip((flows, sums), whole, strict=True):
                self._scan(runs, ROWS, part, factors, all_of_it, backwards=True)
            coming = [flows, sums, len(runs)]
            if not self.x.causal:
                coming = [*whole, self.n]
        runs = self.position_runs
        dV = new_array((b, self.slices, self.U, D), self.dtype, zeros=True)
        dK = new_array((b, columns, self.U, L), self.dtype, zeros=True)
        arguments = [*_rows(self.x.V), *read, *runs.arguments, *sizes, *coming, None, None, dV, dK]
        self._walk("flow_back", runs, block, arguments, _Shared(6 + threads // 32, 4, 1), "false")
        return _summed(dK), _summed(dV)

    # -- geometry ----------------------------------------------------------------------

    @cached_property
    def _warp_columns(self) -> int:
        lanes = 32 // (8 if self.width > 64 else 4)
        return lanes * (8 if self.real == "float" else 4)

    def _block(self, runs: int | None) -> tuple[int, int]:
        """Return the threads of a block and the blocks along the columns.

        In a forward pass columns are independent, so blocks have fewer columns where there would be few blocks.
        """
        columns = self._warp_columns
        warps = min(_WIDEST // columns, max(1, -(-self.D // columns)))
        while runs is not None and warps > 1 and runs * self.b * self.slices * -(-self.D // (warps * columns)) < _BUSY:
            warps = -(-warps // 2)
        return 32 * warps, max(1, -(-self.D // (warps * columns)))

    def _pieces(self, runs: Runs, field: int) -> tuple[int, int]:
        return len(runs) * self.b, -(-runs.most(field) // _PIECE)

    def _multiply(self, what: str, runs: Runs, arguments: list[Any]) -> None:
        """Launch a kernel that computes the sums of runs, or their rows, by products."""
        width = next((width for width in _MULTIPLIED if width >= self.L), _MULTIPLIED[-1])
        tiles = 2 if self.D > _TILE and width < _MULTIPLIED[-1] else 1  # as many as the registers hold
        columns = tiles * _TILE
        grid = (len(runs) * self.b, max(1, -(-self.D // columns)), self.slices)
        types = (str(width), str(tiles))
        if self.key == "float":
            shared = _tensor_bytes(width, columns, rows=what == "rows")
            launch("latent_tensor", f"multiply_{what}", types, grid, arguments, threads=_MULTIPLIERS, shared=shared)
            return
        shared = _half_bytes(width, columns, rows=what == "rows")
        launch("latent_half", f"half_{what}", (self.key, *types), grid, arguments, threads=_MULTIPLIERS, shared=shared)

    def _walk(
        self, name: str, runs: Runs, block: tuple[int, int], arguments: list[Any], held: _Shared, *types: str
    ) -> None:
        """Launch a kernel that computes runs step by step."""
        threads, columns = block
        source, nbytes = ("latent", 64) if name in KERNELS["latent"] else ("latent_back", 32)  # of a column of a chunk
        line = held.latents * self.width + held.columns * threads // 32 * self._warp_columns + held.others
        numbers = nbytes // self.dtype.itemsize * line + held.sums * self.width
        shared = numbers * self.dtype.itemsize + 32  # and the bits of steps
        grid = (len(runs) * self.b, columns, self.slices)
        launch(source, name, (self.real, str(self.width), *types), grid, arguments, threads=threads, shared=shared)


def _tensor_bytes(latents: int, columns: int, *, rows: bool) -> int:
    """Return the bytes of shared memory of a block of latent_tensor.cu."""
    lines = (7 if rows else 3) * (latents + _APART) + 2 * (columns + _APART)
    return 4 * (_CHUNK * lines + 3 * latents + 8 + _PAIRS * rows)


def _half_bytes(latents: int, columns: int, *, rows: bool) -> int:
    """Return the bytes of shared memory of a block of latent_half.cu."""
    lines = (4 if rows else 3) * (latents + _APART) + columns + _APART + (_HALF_CHUNK + _APART) * rows
    return 2 * _HALF_CHUNK * lines + 4 * (2 * _MULTIPLIERS + latents + 4 * _HALF_CHUNK * rows + 5)


def _rows(array: Any) -> list[Any]:
    """Return an array of rows, or None, as arguments of a kernel, with the steps along its first two axes."""
    return with_steps(array if array is None else with_rows(array), 2)


def _summed(parts: Any) -> Any:
    """Return the sum over slices, axis 1."""
    return parts.reshape(len(parts), *parts.shape[2:]) if parts.shape[1] == 1 else sum_in_pairs(parts)
