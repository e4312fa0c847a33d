"""Latent attention on the CPU: cuts rows into runs, and shares these out over threads.

A state grows in the arithmetic of the values within a run, and is held in float64 between runs: so errors do not grow
with the number of positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._kernels import _cpu_latent
from levattn._kernels._cpu import _share
from levattn._kernels._cpu_jit import VECTOR_BYTES
from levattn._kernels._decay import decayed_scan
from levattn._kernels._mixture import Mixture, State

__all__ = ["backward", "decayed_scan", "forward", "summary"]

_RUN = 4096  # positions that are summed in one piece

_Indices = npt.NDArray[np.int64]
_Cuts = list[tuple[int, int, int]]  # the sequence, the first row, the row after the last


def forward(x: Mixture) -> Any:
    """Return the output (b, T, D) of latent attention; see `Mixture`."""
    b, L, D = len(x.Q), x.Q.shape[2], x.V.shape[2]
    out = np.empty((b, x.Q.shape[1], D), x.V.dtype)
    runs = _cuts(x.offsets)
    tasks = _tasks(b, [(low, high, x.offsets[i]) for i, low, high in runs])
    views = _Views(x, Y=out)
    arguments = (*views.kinds, views.table, L, D, x.ahead, x.causal, tasks, *_before(x, runs))
    size = views.room(L, D)

    def body(first: int, last: int) -> None:
        _cpu_latent.forward_tasks(*arguments, np.empty(size, out.dtype), first, last)

    _share(body, len(tasks), 2 * out.size * L)
    return out


def backward(x: Mixture, dY: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return the gradients of ``Σ dY · forward(x)`` in Q, K, V, gate and beside; None for what there is not."""
    (b, T, L), (_, U, D) = x.Q.shape, x.V.shape
    dQ, dK, dV = (np.zeros((b, n, width), x.V.dtype) for n, width in ((T, L), (U, L), (U, D)))
    gate, beside = (None, None) if x.gate is None else (np.empty((b, T), dQ.dtype), np.empty((b, T, D), dQ.dtype))
    runs = _cuts(x.offsets)
    begins, ends, lead = x.offsets[:-1], x.offsets[1:], U
    if x.causal:
        lead = min(max(x.ahead, 0), U)
    if len(begins) == 1:  # positions and rows may differ in number
        ends = np.array([U])
    bounds = np.searchsorted([i for i, _, _ in runs], np.arange(len(begins) + 1))
    tasks = _tasks(b, list(zip(begins, ends, bounds[:-1], bounds[1:], strict=True)))
    views = _Views(x, D_Y=dY, D_Q=dQ, D_K=dK, D_V=dV, D_GATE=gate, D_BESIDE=beside)
    each = np.array([(low, high) for _, low, high in runs], np.int64).reshape(-1, 2)
    before = _before(x, runs)
    arguments = (*views.kinds, views.table, L, D, x.ahead, x.causal, lead, tasks, each, *before)
    longest = max((high - low for _, low, high in runs), default=0)
    size = views.room(L, D, longest)

    def body(first: int, last: int) -> None:
        _cpu_latent.backward_tasks(*arguments, np.empty(size, dQ.dtype), first, last)

    _share(body, len(tasks), 6 * b * T * D * L)
    return dQ, dK, dV, gate, beside


def summary(K: Any, V: Any, mask: Any, offsets: _Indices) -> State:
    """Return the state of all positions of each sequence, in float64."""
    state = _nothing(len(K), len(offsets) - 1, K.shape[2], V.shape[2])
    cuts = _cuts(offsets)
    parts = _summaries(Mixture(K, K, V, offsets, False, mask=mask), [(low, high) for _, low, high in cuts])
    for place, (sequence, _, _) in enumerate(cuts):
        _add(state, sequence, parts, place)
    return state


def _cuts(offsets: _Indices) -> _Cuts:
    """Cut sequences into runs."""
    return [
        (i, low, min(low + _RUN, int(end)))
        for i, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
        for low in range(begin, end, _RUN)
    ]


def _tasks(b: int, rows: list[tuple[Any, ...]]) -> _Indices:
    """Return the tasks of all heads, one head after the other: (head, ...)."""
    if not rows:
        return np.empty((0, 5), np.int64)
    each = np.array(rows, np.int64)
    heads = np.repeat(np.arange(b), len(rows))
    return np.column_stack([heads, np.tile(each, (b, 1))])


class _Views:
    """Where the arrays of a mixture lie, for compiled code: addresses, and steps in bytes. It keeps them alive."""

    def __init__(self, x: Mixture, **further: Any) -> None:
        names = {"Q": x.Q, "K": x.K, "V": x.V, "GATE": x.gate, "BESIDE": x.beside, "MASK": x.mask, **further}
        self.table = np.zeros((_cpu_latent.VIEWS, 3), np.int64)
        self.kinds = np.empty(1, x.V.dtype), np.empty(1, np.uint8)
        self._lanes = VECTOR_BYTES // x.V.dtype.itemsize
        self._kept = []
        for name, array in names.items():
            if array is not None:
                if array.ndim == 3 and array.strides[2] != array.itemsize:
                    array = np.ascontiguousarray(array)
                self._kept.append(array)
                self.table[getattr(_cpu_latent, name)] = array.ctypes.data, *array.strides[:2]

    def room(self, L: int, D: int, longest: int | None = None) -> int:
        """Return how many numbers of scratch a task takes, backwards if given the longest run of rows."""
        wide, deep = -(-L // self._lanes) * self._lanes, -(-D // self._lanes) * self._lanes
        size: int = _cpu_latent.SINGLE * wide + wide * deep + _cpu_latent.ROWS * (4 * wide + 3 * deep)
        return size if longest is None else size + 2 * wide * deep + (3 * longest + 1) * wide


def _nothing(b: int, n: int, L: int, D: int) -> State:
    return np.full((b, n, L), -np.inf), np.zeros((b, n, L)), np.zeros((b, n, L, D))


def _add(states: State, at: int, others: State, place: int) -> None:
    """Merge one of some states into one of others, in place."""
    m, s, S = (part[:, at] for part in states)
    n, t, U = (part[:, place] for part in others)
    top = np.maximum(m, n)
    base = np.where(top == -np.inf, 0.0, top)
    kept, added = np.exp(m - base), np.exp(n - base)
    m[...] = top
    s[...] = kept * s + added * t
    S[...] = kept[..., None] * S + added[..., None] * U


def _summaries(x: Mixture, cuts: list[tuple[int, int]]) -> State:
    """Return the states of cuts of the positions: m (b, cuts, L), s, S."""
    (b, _, L), D = x.K.shape, x.V.shape[2]
    m, s, S = _nothing(b, len(cuts), L, D)
    tasks, views = _tasks(b, list(cuts)), _Views(x)
    flat = m.reshape(-1, L), s.reshape(-1, L), S.reshape(-1, L, D)
    arguments = (*views.kinds, views.table, L, D, tasks, *flat)
    size = views.room(L, D)

    def body(first: int, last: int) -> None:
        _cpu_latent.summary_tasks(*arguments, np.empty(size, x.V.dtype), first, last)

    _share(body, len(tasks), b * sum(high - low for low, high in cuts) * L * D)
    return m, s, S


def _lead(x: Mixture) -> State | None:
    """Return what all rows of a sequence read: its state, and positions before those of rows; None for nothing."""
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


def _before(x: Mixture, runs: _Cuts) -> State:
    """Return the state before each run of rows, (b · runs, ...); empty arrays where no run has any."""
    (b, _, L), D = x.Q.shape, x.V.shape[2]
    lead = _lead(x)
    growing = x.causal and any(low > x.offsets[i] for i, low, _ in runs)
    if lead is None and not growing:
        return np.empty((0, L)), np.empty((0, L)), np.empty((0, L, D))
    lead = _nothing(b, len(x.offsets) - 1, L, D) if lead is None else lead
    before: State = tuple(part[:, [i for i, _, _ in runs]] for part in lead)
    if growing:
        begins = x.offsets.tolist()
        entered = [(max(low + x.ahead, begins[i]), max(high + x.ahead, begins[i])) for i, low, high in runs]
        parts = _summaries(x, entered)
        for r in range(1, len(runs)):
            if runs[r][0] == runs[r - 1][0]:
                for held in before:
                    held[:, r] = held[:, r - 1]
                _add(before, r, parts, r - 1)
    return _representable(before, x.V.dtype)


def _representable(state: State, kind: Any) -> State:
    """Return a state (b, n, ...) as (b · n, ...), with references that the dtype of the values holds exactly."""
    m, s, S = state
    rounded = m.astype(kind).astype(np.float64)
    with np.errstate(invalid="ignore"):
        factor = np.where(np.isfinite(m), np.exp(m - rounded), 1.0)
    if (factor != 1).any():
        m, s, S = rounded, s * factor, S * factor[..., None]
    L, D = S.shape[2:]
    return m.reshape(-1, L), s.reshape(-1, L), S.reshape(-1, L, D)
