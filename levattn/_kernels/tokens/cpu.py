"""Token statistics attention on the CPU: splits sequences and heads over threads, and calls the compiled kernels.

With many sequences, a task is one whole sequence. Otherwise each step is shared out by itself, head by head. Both
compute the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from levattn._core.types import Float64
from levattn._kernels.records import Record
from levattn._kernels.tasks import share, threads_for
from levattn._kernels.tokens import LOGITS, TokenArguments, TokenSums
from levattn._kernels.tokens import forward as compiled
from levattn._kernels.tokens.backward import backward_tasks
from levattn._kernels.tokens.forward import forward_tasks
from levattn._kernels.tokens.plan import SLAB, SPAN, TOKEN_PLAN, token_scratch
from levattn._kernels.tokens.simd import GAIN_BLOCK
from levattn._kernels.tokens.squares import BAND, square_rows

_ENOUGH = 4  # sequences for each thread, so that they are balanced
_ROWS = 4096  # rows of float16 that are widened at a time


def forward(x: TokenArguments, *, state: bool = False) -> tuple[Any, TokenSums | None]:
    """Return the output (b, h, T, d), and if `state` the sums after all tokens of each sequence."""
    stepped = _step(x) if state and x.W.shape[2] == 1 else None
    if stepped is not None:
        return stepped
    out, after = _like(x.W), None
    if x.state is not None and not x.causal:
        after = x.state
    elif state:
        after = _begin(x)
    _Work(x, after if x.causal or x.state is None else None, Y=out).forward()
    return out, after if state else None


def _step(x: TokenArguments) -> tuple[Any, TokenSums] | None:
    """Return the output of one causal token and the sums after it, or None if the plan needs more than addresses.

    The bits are the same as in any call: the compiled code is the same, but gets its arrays with less Python.
    """
    W, before, (b, h, _, d) = x.W, x.state, x.W.shape
    if before is None or not x.causal or len(x.offsets) != 2:
        return None
    if not (x.offset is x.mask is x.decay is None) or threads_for(4.0 * W.size) > 1:
        return None
    if not (W.flags.carray and all(part.flags.carray and part.dtype == np.float64 for part in before)):
        return None
    reals = float(x.least), float(x.ridge), float(x.c), float(x.gain)
    like, record = _one_token(h, d, W.dtype, LOGITS.index(x.logits), x.mean and x.logits == "diagonal", *reals)
    A, n, M, N = before
    Y, after = np.empty_like(W), (np.empty_like(A), np.empty_like(n), np.empty_like(M), np.empty_like(N))
    temperature, (plan, _scratch) = np.array(x.temperature, W.dtype, order="C"), record.for_thread()
    compiled.place_arrays(plan, W, Y, temperature, before, after)
    forward_tasks(like, plan, compiled.ALL, 1, True, 0, b)
    return Y, after


@lru_cache(64)
def _one_token(h: int, d: int, kind: Any, logits: int, mean: bool, *reals: float) -> tuple[Any, Record]:
    """Return an array of a kind, and the record for calls of one token, without addresses."""
    record = Record(*_numbers(h, d, kind, True, logits, mean, 1, *reals), bounds=np.array([[0, 1]], np.int64))
    record.put({name: np.empty((1, h, 1, d), kind) for name in ("W", "Y")})
    return np.empty(0, kind), record


def memberships(x: TokenArguments) -> Any:
    """Return the memberships (b, h, T)."""
    work = _Work(x)
    work.share_out()
    return work.P


def backward(x: TokenArguments, dY: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of ``Σ dY · forward(x)`` in W, temperature and offset; None if there is no offset."""
    b, h, _, _ = x.W.shape
    out, flow = _like(x.W), np.zeros((b, h, len(x.offsets) - 1))
    E = np.empty(x.W.shape[:3], x.W.dtype)
    work = _Work(x, flow=flow, D_Y=np.asarray(dY, x.W.dtype), D_W=out, E=E)
    work.share_out()
    work.backward()
    if np.isnan(flow).any() and x.W.dtype == np.float32:
        found = backward(_widened(x), np.asarray(dY, np.float64))
        with np.errstate(over="ignore"):
            dW, slopes, offset = (part if part is None else part.astype(np.float32) for part in found)
        out[...] = dW
        return out, slopes, offset
    offset = None if x.offset is None else E * np.asarray(x.temperature, E.dtype)[..., None]
    return out, flow.sum(axis=2).astype(x.W.dtype), offset


def _widened(x: TokenArguments) -> TokenArguments:
    """Return the arguments in float64, whose range holds the products of gradients for all tokens of float32."""
    W, temperature, offset = (
        None if part is None else np.asarray(part, np.float64) for part in (x.W, x.temperature, x.offset)
    )
    least = 2.0**-1022 if x.least == 2.0**-126 else x.least  # the smallest normal number of the dtype
    return replace(x, W=W, temperature=temperature, offset=offset, least=least)


def add_squares(
    X: Any, mask: Any, weights: Any, decay: Any, held: tuple[Any, Any] | None, *, full: bool = False
) -> tuple[Float64, Float64]:
    """Return ``Σ w x²`` (b, d), or if `full` ``Σ w x xᵀ`` (b, d, d), and ``Σ w`` (b,), after the sums `held`.

    Rows are added one by one, so that the size of chunks does not change the bits; see `definition`.
    """
    b, T, d = X.shape
    if held is None:
        total, mass = np.zeros((b, d, d) if full else (b, 1, d)), np.zeros(b)
    else:
        total, mass = np.array(held[0], np.float64).reshape(b, d if full else 1, d), np.array(held[1], np.float64)
    rates = np.empty(0) if decay is None else np.ascontiguousarray(decay, np.float64)
    half = X.dtype == np.float16
    for low in range(0, T, _ROWS if half else max(T, 1)):
        part = slice(low, low + _ROWS) if half else slice(None)
        rows = X[:, part].astype(np.float32) if half else X
        rows = rows if rows.strides[-1] == rows.itemsize else np.ascontiguousarray(rows)
        there = np.empty((0, 0), np.uint8) if mask is None else np.ascontiguousarray(mask[:, part]).view(np.uint8)
        w = np.empty((0, 0)) if weights is None else np.ascontiguousarray(weights[:, part], np.float64)
        bands = -(-d // BAND) if full else 1
        arguments = rows, there, w, rates, total, mass, full, bands

        def body(first: int, last: int, arguments: Any = arguments) -> None:
            square_rows(*arguments, first, last)

        share(body, b * bands, float(rows.size) * (d if full else 2))
    return total if full else total[:, 0], mass


def _like(W: Any) -> Any:
    """Return an array of the shape of W, in which the heads of a token lie side by side if they do in W."""
    b, h, T, d = W.shape
    if W.strides[1] < W.strides[2]:
        return np.empty((b, T, h, d), W.dtype).transpose(0, 2, 1, 3)
    return np.empty((b, h, T, d), W.dtype)


def _begin(x: TokenArguments) -> TokenSums:
    """Return the sums before the tokens, in arrays of their own."""
    if x.state is not None:
        A, n, M, N = (np.array(part, np.float64, order="C") for part in x.state)
        return A, n, M, N
    (b, h, _, d), count = x.W.shape, len(x.offsets) - 1
    return np.zeros((b, h, count, d)), np.zeros((b, h, count)), np.zeros((b, h, count, d)), np.zeros((b, h, count))


def _powers(decay: Any, kind: Any) -> dict[str, Any]:
    """Return the powers of decays in float64, and from the first power on in the dtype of a call."""
    powers = np.asarray(decay, np.float64)[:, None] ** np.arange(GAIN_BLOCK + 1)
    return {"kept": powers, "powers": np.ascontiguousarray(powers[:, 1:], kind)}


@lru_cache(64)
def _numbers(h: int, d: int, kind: Any, causal: bool, logits: int, mean: bool, sequences: int, *reals: float) -> Any:
    """Return the arguments for records of calls, without arrays and without decay."""
    numbers = {"heads": h, "width": d, "size": kind.itemsize, "causal": causal, "logits": logits, "mean": mean}
    info, (least, ridge, weight, gain) = np.finfo(kind), reals
    return Record.begun(
        TOKEN_PLAN,
        token_scratch(h, d, kind.itemsize),
        **numbers,
        **_powers(np.ones(h), kind),
        sequences=sequences,
        least=max(least, float(info.tiny)),
        ridge=ridge,
        weight=weight,
        gain=gain,
        largest=float(info.max),
    )


class _Work:
    """The plan of one call of the compiled code; P holds the memberships, once they are known."""

    def __init__(self, x: TokenArguments, after: TokenSums | None = None, **further: Any) -> None:
        (_, h, _, d), kind, n = x.W.shape, x.W.dtype, len(x.offsets) - 1
        self.P = np.empty(x.W.shape[:3], kind)
        self._x, self._like = x, np.empty(0, kind)
        self._bounds = np.empty((n, 2), np.int64)
        self._bounds[:, 0], self._bounds[:, 1] = x.offsets[:-1], x.offsets[1:]
        logits, mean = LOGITS.index(x.logits), x.mean and x.logits == "diagonal"
        reals = float(x.least), float(x.ridge), float(x.c), float(x.gain)
        self._plan = Record(
            *_numbers(h, d, kind, x.causal, logits, mean, n, *reals),
            **{"W": x.W, "offset": x.offset, "mask": None if x.mask is None else x.mask[:, None], "P": self.P},
            **{"bounds": self._bounds, "temperature": np.ascontiguousarray(x.temperature, kind), **further},
        )
        self._after = after
        if x.decay is not None:
            self._plan.put(_powers(x.decay, kind))
        self._put_sums("", x.state)
        self._put_sums("_after", after)

    def _put_sums(self, when: str, sums: TokenSums | None) -> None:
        if sums is not None:
            A, n, M, N = (np.asarray(part, np.float64) for part in sums)
            self._plan.put({"A" + when: A, "n" + when: n, "M" + when: M, "N" + when: N})

    def forward(self) -> None:
        """Write the outputs."""
        work = 4.0 * self._x.W.size
        if self._alone(work):
            self._do(forward_tasks, compiled.ALL, work)
            return
        lows, highs = self._bounds.T.copy()
        longest = slab = int((highs - lows).max())
        if self._x.causal and slab > SLAB:  # so that tokens are still in the caches at the last step
            slab = SLAB
            sums = _begin(self._x) if self._after is None else self._after
            self._put_sums("", sums)
            self._put_sums("_after", sums)
        for low in range(0, longest, slab):
            self._bounds[:, 0] = np.minimum(lows + low, highs)
            self._bounds[:, 1] = np.minimum(lows + low + slab, highs)
            for step in (compiled.SCORES, compiled.MEMBERSHIPS, compiled.OUTPUTS):
                self._do(forward_tasks, step, work)

    def share_out(self) -> None:
        """Write the memberships."""
        work = 2.0 * self._x.W.size
        for step in (compiled.ALL,) if self._alone(work) else (compiled.SCORES, compiled.MEMBERSHIPS):
            self._do(forward_tasks, step, work, reads=False)

    def backward(self) -> None:
        """Write the gradients."""
        work = 8.0 * self._x.W.size
        steps = compiled.D_MEMBERSHIPS, compiled.D_LOGITS, compiled.D_SCORES
        for step in (compiled.ALL,) if self._alone(work) else steps:
            self._do(backward_tasks, step, work)

    def _alone(self, work: float) -> bool:
        """Tell whether a thread works on whole sequences, instead of sharing them with others."""
        threads = threads_for(work)
        return threads == 1 or len(self._x.W) * len(self._bounds) >= _ENOUGH * threads

    def _do(self, tasks: Callable[..., None], step: int, work: float, *, reads: bool = True) -> None:
        """Do the tasks of a step."""
        b, h = self._x.W.shape[:2]
        spans, count = 1, b * len(self._bounds)
        if step in (compiled.MEMBERSHIPS, compiled.D_LOGITS):
            spans = -(-int(np.diff(self._bounds).max(initial=0)) // SPAN)
            count *= spans
        elif step != compiled.ALL:
            count *= h

        def body(first: int, last: int) -> None:
            plan, _scratch = self._plan.for_thread()
            tasks(self._like, plan, step, spans, reads, first, last)

        if self._x.W.size:
            share(body, count, work)
