"""Token statistics attention on the CPU: says where arrays lie, and shares tasks out over threads.

Where there are many sequences, a task is all of one; else each step is shared out by itself, head by head. What is
computed is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from levattn._kernels import _cpu_tokens as compiled
from levattn._kernels._cpu import _share
from levattn._kernels._cpu_tokens import BAND, KINDS, SPAN, VIEWS, scratch_sizes
from levattn._kernels._cpu_tokens_simd import BLOCK
from levattn._kernels._rows import Float64
from levattn._kernels._statistics import Statistics, TokenSums
from levattn._threads import num_threads

__all__ = ["add_squares", "backward", "forward", "memberships"]

_ENOUGH = 8  # sequences for each thread
_SMALL = 2_000_000  # multiply-adds that are not shared out
_ROWS = 4096  # rows that are read as float64 at a time


def forward(x: Statistics, *, state: bool = False) -> tuple[Any, TokenSums | None]:
    """Return the output (b, h, T, d), and if `state` the sums after all tokens of each sequence."""
    out = _like(x.W)
    after = _after(x) if state else None
    P = np.empty(x.W.shape[:3], x.W.dtype)
    work = _Work(x, after if x.causal or x.state is None else None, P=P, Y=out)
    work.run(compiled.forward_tasks, (compiled.SCORE, compiled.SHARE, compiled.LAST), 4)
    return out, after


def memberships(x: Statistics) -> Any:
    """Return the memberships (b, h, T)."""
    P = np.empty(x.W.shape[:3], x.W.dtype)
    _Work(x, None, P=P).run(compiled.forward_tasks, (compiled.SCORE, compiled.SHARE), 2, reads=False)
    return P


def backward(x: Statistics, dY: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of ``Σ dY · forward(x)`` in W, temperature and offset; None for an offset there is not."""
    b, h, _, _ = x.W.shape
    out = _like(x.W)
    P, E = np.empty((2, *x.W.shape[:3]), x.W.dtype)
    dT = np.zeros((b, h, len(x.offsets) - 1))
    dY = _rows(np.asarray(dY, x.W.dtype))
    work = _Work(x, None, dT, P=P, D_Y=dY, D_W=out, E=E)
    work.run(compiled.forward_tasks, (compiled.SCORE, compiled.SHARE), 2, reads=False)
    work.run(compiled.backward_tasks, (compiled.BACK, compiled.BLAME, compiled.REST), 8)
    offset = None if x.offset is None else E * np.asarray(x.temperature, E.dtype)[..., None]
    return out, dT.sum(axis=2).astype(x.W.dtype), offset


def add_squares(
    X: Any, mask: Any, weights: Any, decay: Any, held: tuple[Any, Any] | None, *, full: bool = False
) -> tuple[Float64, Float64]:
    """Return ``Σ w x²`` (b, d), or if `full` ``Σ w x xᵀ`` (b, d, d), and ``Σ w`` (b,), after the sums `held`.

    Row after row, so that the size of chunks does not show; see `_generic_tokens`.
    """
    b, T, d = X.shape
    if held is None:
        total, mass = np.zeros((b, d, d) if full else (b, 1, d)), np.zeros(b)
    else:
        total, mass = np.array(held[0], np.float64).reshape(b, -1, d), np.array(held[1], np.float64)
    rates = np.empty(0) if decay is None else np.ascontiguousarray(decay, np.float64)
    for low in range(0, T, _ROWS if X.dtype == np.float16 else max(T, 1)):
        part = slice(low, low + _ROWS) if X.dtype == np.float16 else slice(None)
        rows = X[:, part].astype(np.float32) if X.dtype == np.float16 else _rows(X)
        there = np.empty((0, 0), np.uint8) if mask is None else np.ascontiguousarray(mask[:, part]).view(np.uint8)
        w = np.empty((0, 0)) if weights is None else np.ascontiguousarray(weights[:, part], np.float64)
        bands = -(-d // BAND) if full else 1
        arguments = rows, there, w, rates, total, mass, full, bands

        def body(first: int, last: int, arguments: Any = arguments) -> None:
            compiled.square_rows(*arguments, first, last)

        _share(body, b * bands, float(rows.size) * (d if full else 2))
    return total if full else total[:, 0], mass


def _like(W: Any) -> Any:
    """Return an array of the shape of W, in which the heads of a token lie side by side if they do in W."""
    b, h, T, d = W.shape
    if W.strides[1] < W.strides[2]:
        return np.empty((b, T, h, d), W.dtype).transpose(0, 2, 1, 3)
    return np.empty((b, h, T, d), W.dtype)


def _rows(X: Any) -> Any:
    """Return an array whose last axis is contiguous."""
    return X if X.strides[-1] == X.itemsize else np.ascontiguousarray(X)


def _after(x: Statistics) -> TokenSums | None:
    """Return arrays for the sums after all tokens, or the sums there are, if none is added."""
    if x.state is not None and not x.causal:
        return x.state
    if x.state is not None:
        A, n, M, N = (np.array(part, np.float64) for part in x.state)
        return A, n, M, N
    (b, h, _, d), count = x.W.shape, len(x.offsets) - 1
    return np.zeros((b, h, count, d)), np.zeros((b, h, count)), np.zeros((b, h, count, d)), np.zeros((b, h, count))


_FLAG, _FLAT, _DEEP = np.empty(0, np.uint8), np.empty((0, 0, 0)), np.empty((0, 0, 0, 0))
_NO_SUMS: TokenSums = _DEEP, _FLAT, _DEEP, _FLAT


class _Work:
    """What the compiled code works on. It keeps the arrays alive."""

    def __init__(self, x: Statistics, after: TokenSums | None, dT: Any = _FLAT, **further: Any) -> None:
        h, d, kind = x.W.shape[1], x.W.shape[3], x.W.dtype
        self.x, self.like, self._kept = x, np.empty(0, kind), []
        views = np.zeros((VIEWS, 4), np.int64)
        for name, array in {"W": x.W, "OFFSET": x.offset, "MASK": x.mask, **further}.items():
            if array is not None:
                array = _rows(array) if array.ndim == 4 else array
                self._kept.append(array)
                b_step, *steps = array.strides[:3]
                steps = [0, *steps] if array.ndim == 2 else steps
                views[getattr(compiled, name)] = array.__array_interface__["data"][0], b_step, *steps
        if x.decay is None:
            kept = np.ones((h, BLOCK + 1))
        else:
            kept = np.asarray(x.decay, np.float64)[:, None] ** np.arange(BLOCK + 1)
        self._given = (
            views,
            np.array(x.offsets, np.int64),
            (h, d, int(x.causal), KINDS.index(x.logits), int(x.mean and x.logits == "diagonal")),
            (max(float(x.least), float(np.finfo(kind).tiny)), float(x.ridge), float(x.c), float(x.gain)),
            np.array(x.temperature, kind, order="C"),
            np.ascontiguousarray(kept[:, 1:], kind),
            kept,
            _NO_SUMS if x.state is None else tuple(np.array(S, np.float64, order="C") for S in x.state),
            _NO_SUMS if after is None else after,
            dT,
        )

    def run(self, tasks: Callable[..., None], steps: tuple[int, ...], cost: int, *, reads: bool = True) -> None:
        """Do all steps, each for all sequences, or one sequence after another where these are many."""
        (b, h, T, d), n = self.x.W.shape, len(self.x.offsets) - 1
        if not self.x.W.size:
            return
        work = float(cost * self.x.W.size)
        threads = num_threads() if work >= _SMALL else 1
        alone = threads == 1 or b * n >= _ENOUGH * threads
        for step in (compiled.ALL,) if alone else steps:
            over_heads = step in (compiled.SHARE, compiled.BLAME)
            count = b * n if step == compiled.ALL else b * -(-T // SPAN) if over_heads else b * n * h

            def body(first: int, last: int, step: int = step) -> None:
                whole, narrow, wide = scratch_sizes(h, d)
                scratch = np.empty(whole, np.int64), np.empty(narrow, self.like.dtype), np.empty(wide)
                tasks(self.like, _FLAG, self._given, scratch, step, reads, first, last)

            _share(body, count, work)
