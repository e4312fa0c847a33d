"""Conversion between states of token statistics attention and the sums that the kernels read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import is_torch, to_device, to_numpy
from levattn._kernels import TokenSums
from levattn.attention.arguments import reshaped, without_gradient
from levattn.attention.tokens.arguments import TokenCall
from levattn.states import Moments, TokenState
from levattn.states.blocks import same_decay
from levattn.states.moments import flat_sums, followed


def _axes(call: TokenCall) -> tuple[int, ...]:
    """Return the axes of the state of a call."""
    axes = (*call.given.batch, int(call.x.W.shape[1]))
    return axes if call.bounds is None else (*axes, len(call.bounds) - 1)


def entered(call: TokenCall, *, reads: bool = True) -> TokenCall:
    """Return a call with the sums of its state; without `reads` the state needs no weighted sums."""
    if call.state is None:
        return call
    return call.with_state(_sums_of(call, reads))


def _sums_of(call: TokenCall, needs_tokens: bool) -> TokenSums:
    """Check a state, and return its sums in the form that the kernels read."""
    state, W = call.state, call.x.W
    if not isinstance(state, TokenState):
        raise TypeError(f"state is of type {type(state).__name__}; expected a levattn.states.TokenState")
    axes, d, rates = _axes(call), int(W.shape[3]), call.x.decay
    shape = (int(W.shape[0]), int(W.shape[1]), len(call.x.offsets) - 1)
    found: list[Any] = []
    for name, part, needed in (("norms", state.norms, call.keeps_norms), ("tokens", state.tokens, needs_tokens)):
        if part is None and needed:
            raise ValueError(f"state has no {name}, which this call reads; expected a TokenState with {name}=")
        if part is None or (name == "norms" and not call.keeps_norms):
            found += [np.zeros((*shape, d)), np.zeros(shape)]
            continue
        if not part.diagonal or (part.batch, part.d) != (axes, d):
            raise ValueError(
                f"state has {name} with diagonal={part.diagonal}, batch {part.batch} and d = {part.d}; expected "
                f"diagonal=True, batch {axes} and d = {d}, as W has"
            )
        expected = None if rates is None else rates if call.bounds is None else rates[:, None]
        if not same_decay(part.decay, expected, axes):
            raise ValueError(f"state has {name} with decay {part.decay}; expected {rates}, as in this call")
        total, weight = flat_sums(part)
        found += [reshaped(total, (*shape, d)), reshaped(weight, shape)]
    if all(type(part) is np.ndarray for part in found) and isinstance(W, np.ndarray):
        return found[0], found[1], found[2], found[3]
    if isinstance(W, np.ndarray) or (is_torch(W) and W.device.type == "cpu"):
        found = [to_numpy(part) for part in found]
    elif not is_torch(W):
        found = [to_device(part, W) if isinstance(part, np.ndarray) else part for part in found]
    return found[0], found[1], found[2], found[3]


def token_state_after(call: TokenCall, sums: TokenSums | None) -> TokenState:
    """Return sums (b, h, n, ...) of the kernels as a state."""
    if sums is None:
        raise AssertionError("a kernel did not return the sums that it was asked for")
    x, axes = call.x, _axes(call)
    if not x.causal and call.state is not None:
        return call.state.copy()
    A, n, M, N = sums
    decay = 1.0 if x.decay is None else x.decay if call.bounds is None else x.decay[:, None]
    added = _counts(call)

    def after(before: Moments | None, sums: Any, weight: Any) -> Moments:
        if before is not None:
            return followed(before, sums, weight, added)
        total, mass = reshaped(sums, (*axes, *sums.shape[3:])), reshaped(weight, axes)
        return Moments.from_arrays(total, mass, np.broadcast_to(added, axes), decay=decay)

    before = TokenState() if call.state is None else call.state
    norms = after(before.norms, A, n) if call.keeps_norms else None
    if call.leverage:
        W, there = call.given.give_back(x.W), call.given.mask
        if call.bounds is not None:
            raise ValueError(
                "return_state was given with membership 'leverage' and packed sequences; expected one sequence"
            )
        there = None if there is None else reshaped(there[:, None, :], (*call.given.batch, 1, x.W.shape[2]))
        norms = Moments(int(W.shape[-1]), axes).update(without_gradient(W), there)
    return TokenState(norms, after(before.tokens, M, N))


def _counts(call: TokenCall) -> int | npt.NDArray[np.int64]:
    """Return the number of tokens that take part: one number, or an array of the axes of the state."""
    x, axes = call.x, _axes(call)
    if x.mask is None and call.bounds is None:
        return int(x.W.shape[2])
    ends = np.asarray(x.offsets)
    if x.mask is None:
        counts = np.broadcast_to(np.diff(ends), (x.W.shape[0], len(ends) - 1))
    else:
        mask = to_numpy(x.mask)
        sums = np.concatenate([np.zeros((len(mask), 1), np.int64), np.cumsum(mask, axis=1, dtype=np.int64)], axis=1)
        counts = np.diff(sums[:, ends], axis=1)
    counts = np.broadcast_to(counts[:, None, :], (*x.W.shape[:2], len(ends) - 1))
    return np.array(counts, np.int64).reshape(axes)
