"""Latent attention on the CPU: cuts rows into runs, and shares the runs out over threads.

Where a sequence has several runs, a first pass computes the sums of each run. Then the threads work on all runs at
once, each from the state of the runs before it.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.types import Int64
from levattn._kernels.jit import VECTOR_BYTES
from levattn._kernels.latent import LatentArguments, State, compiled
from levattn._kernels.latent.backward import backward_tasks
from levattn._kernels.latent.decay_compiled import decay_tasks
from levattn._kernels.latent.plan import LATENT_PLAN, latent_scratch, padded
from levattn._kernels.records import Record
from levattn._kernels.tasks import share, share_one_by_one, threads_for

_RUN = 4096  # most rows of a task; the same for all batches and lengths, because the rounding depends on it

_ROWS = 1024  # of a task whose rows all read the same state

_SCANNED = 512  # bytes of a row in one task of a recurrence: whole cache lines, and enough tasks for the threads

_HANDED = 8  # so many times the work that pays for a second thread pays for handing states over
_States = State | tuple[None, None, None]
_NO_STATE = (None, None, None)
_UNMASKED = np.empty(0, np.bool_)

_Indices = npt.NDArray[np.int64]
_Cuts = list[tuple[int, int, int]]  # the sequence, the first row, the row after the last


def forward(x: LatentArguments) -> Any:
    """Return the output (b, T, D) of latent attention; see `LatentArguments`."""
    b, L, D = len(x.Q), x.Q.shape[2], x.V.shape[2]
    out = np.empty((b, x.Q.shape[1], D), x.V.dtype)
    runs, states = _runs(x) if x.causal else _everywhere(x)
    tasks = _tasks(b, runs)
    work = _Work(x, states, Y=out)
    do = compiled.forward_tasks if x.causal else compiled.everywhere_tasks

    def body(place: Int64, most: int) -> None:
        plan, _scratch = work.record.for_thread()
        do(work.like, plan, tasks, place, most)

    share_one_by_one(body, len(tasks), 2 * out.size * L)
    return out


def backward(x: LatentArguments, dY: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return the gradients of ``Σ dY · forward(x)`` in Q, K, V, gate and gate_value; None for absent arrays."""
    (b, T, L), (_, U, D) = x.Q.shape, x.V.shape
    dQ, dK, dV = (np.zeros((b, n, width), x.V.dtype) for n, width in ((T, L), (U, L), (U, D)))
    gate, gate_value = (None, None) if x.gate is None else (np.empty((b, T), dQ.dtype), np.empty((b, T, D), dQ.dtype))
    runs, states = _runs(x)
    begins, ends, lead = x.offsets[:-1], x.offsets[1:], U
    if x.causal:
        lead = min(max(x.ahead, 0), U)
    first_runs = np.searchsorted([low for low, *_ in runs], x.offsets)
    if len(begins) == 1:  # positions and rows may differ in number
        ends = np.array([U])
    tasks = _tasks(b, list(zip(begins, ends, first_runs[:-1], first_runs[1:], strict=True)))
    each = np.array(runs, np.int64).reshape(-1, 4)
    longest = max((high - low for low, high, *_ in runs), default=0)
    work = _Work(x, states, longest, D_Y=dY, D_Q=dQ, D_K=dK, D_V=dV, D_gate=gate, D_gate_value=gate_value)

    def body(first: int, last: int) -> None:
        plan, _scratch = work.record.for_thread()
        backward_tasks(work.like, plan, lead, tasks, each, first, last)

    share(body, len(tasks), 6 * b * T * D * L)
    return dQ, dK, dV, gate, gate_value


def step(Q: Any, K: Any, V: Any, mask: Any, state: State | None) -> tuple[Any, State] | None:
    """Return the output of one causal row and the state after it; see `LatentSteps`."""
    if state is None:
        return None
    held, shapes = state, [part.shape for part in state]
    L, D = shapes[2][-2:]
    b = held[0].size // L
    present = _UNMASKED if mask is None else _flat(mask, b)
    q, k, v, m, s = _flat(Q, b, L), _flat(K, b, L), _flat(V, b, D), _flat(held[0], b, L), _flat(held[1], b, L)
    S = _flat(held[2], b, L, D)
    Y, top, total, sums = np.empty_like(v), np.empty_like(m), np.empty_like(s), np.empty_like(S)
    exact = []

    def body(first: int, last: int) -> None:
        exact.append(compiled.step_tasks(q, k, v, present, m, s, S, Y, top, total, sums, first, last))

    share(body, b, 2 * S.size)
    if not all(exact):
        return None
    return Y.reshape(V.shape), (top.reshape(shapes[0]), total.reshape(shapes[1]), sums.reshape(shapes[2]))


def _flat(array: Any, *shape: int) -> Any:
    """Return an array in another shape, contiguous and writable."""
    array = array.reshape(shape)
    return array if array.flags.carray else array.copy()


def summary(K: Any, V: Any, mask: Any, offsets: _Indices) -> State:
    """Return the state of all positions of each sequence, in float64."""
    cuts = _cuts(offsets)
    parts = _summaries(LatentArguments(K, K, V, offsets, False, mask=mask), [(low, high) for _, low, high in cuts])
    n = len(offsets) - 1
    if [i for i, _, _ in cuts] == list(range(n)):
        return parts
    state = _nothing(len(K), n, K.shape[2], V.shape[2])
    for place, (sequence, _, _) in enumerate(cuts):
        _add(state, sequence, parts, place)
    return state


def joined(state: State, other: State) -> State:
    """Return the joined state of two states, whose arrays are (..., L) and (..., L, D) in float64."""
    m, s, S = (np.require(part, requirements=["C", "W"]) for part in state)
    n, t, U = (np.require(part, requirements=["C", "W"]) for part in other)
    new = np.empty_like(m), np.empty_like(s), np.empty_like(S)
    D = S.shape[-1]

    def body(first: int, last: int) -> None:
        rows = slice(first, last)
        flat = (part.reshape(-1)[rows] for part in (m, s, n, t, *new[:2]))
        deep = (part.reshape(-1, D)[rows] for part in (S, U, new[2]))
        compiled.join_rows(*flat, *deep)

    share(body, m.size, 2 * S.size)
    return new


def decayed_scan(a: Any, x: Any, first: Any = None, *, reverse: bool = False) -> Any:
    """Return ``h_t = a_t h_{t−1} + x_t`` for (b, T, C), from `first` (b, C) or 0; see `definition` for `reverse`."""
    kind = np.result_type(a, x)
    a, x = (np.ascontiguousarray(np.broadcast_to(part, x.shape), kind) for part in (a, x))
    b, _, channels = x.shape
    start = np.zeros((b, channels), kind)
    if first is not None and not reverse:
        start[:] = first
    out = np.empty_like(x)
    width = max(1, _SCANNED // kind.itemsize)
    tasks = b * -(-channels // width)
    share(lambda low, high: decay_tasks(a, x, start, width, reverse, low, high, out), tasks, x.size)
    return out


def _cuts(offsets: _Indices, size: int = _RUN) -> _Cuts:
    """Cut sequences into runs of at most `size` rows."""
    cuts = []
    for i, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        edges = [*range(begin, end, size), end]
        cuts += [(i, low, high) for low, high in pairwise(edges)]
    return cuts


def _tasks(b: int, rows: list[tuple[Any, ...]]) -> _Indices:
    """Return the tasks of all heads, one head after the other: (head, ...)."""
    return _same_tasks(b, *rows) if len(rows) == 1 else _all_tasks(b, rows)


@lru_cache(64)
def _same_tasks(b: int, rows: tuple[Any, ...]) -> _Indices:
    return _all_tasks(b, [rows])


def _all_tasks(b: int, rows: list[tuple[Any, ...]]) -> _Indices:
    tasks = np.empty((b, len(rows), 1 + len(rows[0]) if rows else 5), np.int64)
    tasks[:, :, 0] = np.arange(b)[:, None]
    if rows:
        tasks[:, :, 1:] = rows
    return tasks.reshape(-1, tasks.shape[2])


class _Work:
    """Arguments of compiled code, with states (b · places, ...) that it reads or writes.

    `longest` is the longest run of rows, for the backward pass.
    """

    def __init__(self, x: LatentArguments, states: _States, longest: int | None = None, **further: Any) -> None:
        (b, _, L), D, kind, (m, s, S) = x.Q.shape, x.V.shape[2], x.V.dtype, states
        places = 0 if m is None else len(m) // max(b, 1)
        self.like = np.empty(0, kind)
        self.record = Record(
            *_numbers(L, D, kind, longest, x.causal, x.ahead, places),
            **{"Q": x.Q, "K": x.K, "V": x.V, "gate": x.gate, "gate_value": x.gate_value, "mask": x.mask},
            **{"m": m, "s": s, "S": S, **further},
        )


@lru_cache(64)
def _numbers(L: int, D: int, kind: Any, longest: int | None, enters: bool, ahead: int, places: int) -> Any:
    """Return the fields that records of all such calls share."""
    size, latents, channels = kind.itemsize, padded(L, kind), padded(D, kind)
    return Record.begun(
        LATENT_PLAN,
        latent_scratch(latents, channels, size, longest),
        **{"latents": L, "latent_width": latents, "latent_step": latents * size},
        **{"channels": D, "channel_width": channels, "channel_step": channels * size},
        **{"size": size, "lanes": VECTOR_BYTES // size, "ahead": ahead, "enters": enters, "places": places},
    )


def _nothing(b: int, n: int, L: int, D: int) -> State:
    return np.full((b, n, L), -np.inf), np.zeros((b, n, L)), np.zeros((b, n, L, D))


def _add(states: State, at: int, others: State, place: int) -> None:
    """Merge state `place` of `others` into state `at`, in place."""
    new = joined(tuple(part[:, at] for part in states), tuple(part[:, place] for part in others))
    for held, part in zip(states, new, strict=True):
        held[:, at] = part


def _summaries(x: LatentArguments, cuts: list[tuple[int, int]]) -> State:
    """Return the states of cuts of the positions: m (b, cuts, L), s, S."""
    (b, _, L), D = x.K.shape, x.V.shape[2]
    m, s, S = _nothing(b, len(cuts), L, D)
    tasks, work = _tasks(b, list(cuts)), _Work(x, (m, s, S))

    def body(first: int, last: int) -> None:
        plan, _scratch = work.record.for_thread()
        compiled.summary_tasks(work.like, plan, tasks, first, last)

    share(body, len(tasks), b * sum(high - low for low, high in cuts) * L * D)
    return m, s, S


def _lead(x: LatentArguments) -> State | None:
    """Return the state that all rows of a sequence read, with positions before the first row; None without any."""
    positions, last = x.offsets, x.K.shape[1]
    if x.causal:
        last = min(max(x.ahead, 0), last)
    if len(x.offsets) == 2:
        positions = np.array([0, last])
    elif x.causal:  # no position is before the first row
        last = 0
    if not last:
        return x.state
    whole = summary(x.K, x.V, x.mask, positions)
    if x.state is not None:
        for i in range(whole[0].shape[1]):
            _add(whole, i, x.state, i)
    return whole


def _everywhere(x: LatentArguments) -> tuple[list[tuple[int, int, int, int, int]], _States]:
    """Cut rows that see all of their sequence into (first, after the last, first position, after the last, place).

    The place is -1 where a task sums the positions itself: if each sequence is a run, and there are enough for all
    threads. No bit depends on the cuts, or on which task sums the positions.
    """
    (b, T, L), (_, U, D), n = x.Q.shape, x.V.shape[:3], len(x.offsets) - 1
    begins, ends = x.offsets[:-1].tolist(), x.offsets[1:].tolist()
    lasts = [U] if n == 1 else ends  # positions and rows of one sequence may differ in number
    longest = max((last - first for first, last in zip(begins, lasts, strict=True)), default=0)
    if x.state is None and longest <= _RUN and b * n >= threads_for(b * (T + U) * L * D / _HANDED):
        return [(*rows, *rows[:1], last, -1) for *rows, last in zip(begins, ends, lasts, strict=True)], _NO_STATE
    lead = _lead(x)
    states = _NO_STATE if lead is None else _representable(lead, x.V.dtype)  # None without positions
    cuts = _cuts(x.offsets, _ROWS)
    return [(low, high, begins[i], lasts[i], -1 if lead is None else i) for i, low, high in cuts], states


def _runs(x: LatentArguments) -> tuple[list[tuple[int, int, int, int]], _States]:
    """Cut the rows into runs (first, after the last, first position of the sequence, place of the state before it).

    States lie head by head, (b · places, ...); empty if no run needs one.
    """
    (b, T, _), begins = x.Q.shape, x.offsets.tolist()
    if x.causal and x.state is None and x.ahead <= 0 and len(begins) == 2 and T <= _RUN:
        return [(0, T, 0, 0)], _NO_STATE
    lead = _lead(x)
    cuts = _cuts(x.offsets)
    later = [k > 0 and cuts[k - 1][0] == i for k, (i, _, _) in enumerate(cuts)]
    if not x.causal or not any(later):
        states = _NO_STATE if lead is None else _representable(lead, x.V.dtype)
        return [(low, high, begins[i], i) for i, low, high in cuts], states
    entered = [(0, 0)]
    entered += [(max(low + x.ahead, begins[i]), max(high + x.ahead, begins[i])) for i, low, high in cuts[:-1]]
    sums = _summaries(x, [part if joins else (0, 0) for part, joins in zip(entered, later, strict=True)])
    if lead is not None:
        for k, (i, _, _) in enumerate(cuts):
            if not later[k]:
                _add(sums, k, lead, i)
    joins = np.array(later)
    share(lambda low, high: compiled.join_runs(*sums, joins, low, high), b, sums[2].size)
    return [(low, high, begins[i], k) for k, (i, low, high) in enumerate(cuts)], _representable(sums, x.V.dtype)


def _representable(state: State, kind: Any) -> State:
    """Return a state (b, n, ...) as (b · n, ...), with references that the dtype of the values holds exactly."""
    m, s, S = state
    with np.errstate(over="ignore"):
        rounded = m.astype(kind).astype(np.float64)
    if (rounded != m).any():
        if np.isinf(rounded[np.isfinite(m)]).any():
            raise ValueError(
                f"state holds logits of up to {np.abs(m[np.isfinite(m)]).max():.3g}; expected logits in the range of "
                f"{np.dtype(kind)}. Give the logits or values in float64"
            )
        with np.errstate(invalid="ignore"):
            factor = np.where(np.isfinite(m), np.exp(m - rounded), 1.0)
        m, s, S = rounded, s * factor, S * factor[..., None]
    L, D = S.shape[2:]
    return m.reshape(-1, L), s.reshape(-1, L), S.reshape(-1, L, D)
