"""Calls of token statistics attention: checks of arguments, the inputs of memberships, and states after a call."""

from __future__ import annotations

import math
import sys
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._core.arrays import is_torch, on_cuda, to_device, to_numpy
from levattn._core.checks import positive_number
from levattn._kernels import TokenArguments, TokenSums
from levattn.attention.arguments import (
    Stacks,
    changed,
    compiling,
    cumulative,
    dense_array,
    dense_arrays,
    device_of,
    given_bounds,
    is_double,
    is_wide,
    namespace_of,
    promoted,
    reshaped,
    stack_arguments,
    untraced,
    without_gradient,
)
from levattn.sensitivity.leverage import leverage_scores
from levattn.states import Moments, TokenState
from levattn.states.blocks import readable, same_decay
from levattn.states.moments import flat_sums, followed

MEMBERSHIPS = ("diag_leverage", "norm", "leverage", "uniform")
NUMBERS = {int, float}  # types of arguments by which a repeated call is recognized

# Constants of the released code that keep sums of squares, and of memberships, above zero
_LEAST_CAUSAL, _LEAST, _RIDGE = 1e-12, 1e-24, 1e-8


@dataclass(frozen=True, eq=False)
class TokenForm:
    r"""A form of token statistics attention: how memberships are computed, the weight of old tokens, and a constant.

    Where a function takes a form, a name or an array stands for the form with this membership.

    Parameters
    ----------
    membership : {"diag_leverage", "norm", "leverage", "uniform"} or array of float, shape (..., h, T)
        The logits :math:`\ell` of the memberships; see `levattn.attention.tssa`.
    normalize : {"sum", "mean"}
        Whether to multiply leverage scores by the number of tokens seen ("mean"); for leverage scores only.
    bias : array of float, shape (..., h, T), optional
        The positional bias b. Not with "uniform".
    decay : float or array of float, shape (h,)
        The factor in (0, 1] by which each new token reduces the weight of all earlier tokens in all sums. Causal only;
        it has no gradient.
    c : float
        The constant c, above 0.

    Notes
    -----
    A record of options: time and memory O(1). Functions check it when they read it, as its limits depend on the
    tokens.

    References
    ----------
    Wu et al., "Token Statistics Transformer", arXiv:2412.17810, section 3 and Algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import TokenForm, tssa
    >>> W = np.random.default_rng(0).standard_normal((4, 100, 8))  # heads, tokens, channels
    >>> Y = tssa(W, form=TokenForm(normalize="mean", decay=0.99))
    >>> np.array_equal(tssa(W, form="norm"), tssa(W, form=TokenForm("norm")))
    True
    """

    membership: Any = "diag_leverage"
    _: KW_ONLY
    normalize: str = "sum"
    bias: Any = None
    decay: Any = 1.0
    c: float = 1.0

    @property
    def _held_array(self) -> Any:
        return self.membership, self.bias, self.decay


Form = tuple[Any, Any, Any, Any, Any]  # the fields of a TokenForm


def form_of(given: Any) -> Form:
    """Return the fields of a form, or of the form with this membership; torch can trace it."""
    if not isinstance(given, TokenForm):
        return given, "sum", None, 1.0, 1.0
    return given.membership, given.normalize, given.bias, given.decay, given.c


@dataclass(frozen=True, eq=False)
class TokenCall:
    """A call with checked arguments."""

    given: Stacks  # the arrays, and the form of results
    x: TokenArguments  # for the kernels, without the state
    bounds: Any  # the result of `cumulative`
    keeps_norms: bool  # whether the state has sums of squares without weights
    leverage: bool  # whether memberships use exact leverage scores, so that the norms are a full second moment
    state: TokenState | None  # not checked yet
    shape: tuple[int, ...]  # of the stack of tokens, (b, h, T, d)

    def with_state(self, sums: TokenSums) -> TokenCall:
        """Return the call with the sums of its state."""
        return changed(self, x=changed(self.x, state=sums))


def checked_call(W: Any, temperature: Any, form: Form, causal: Any, mask: Any, offsets: Any, state: Any) -> TokenCall:
    """Check the arguments of `tssa` or `memberships`; `entered` checks the state."""
    known = type(temperature) in NUMBERS and is_of_numbers(form, causal) and mask is None and offsets is None
    if known and type(W) is np.ndarray and W.dtype.char in "fd":
        like = _call_like(W.shape, W.dtype, temperature, form, causal)
        stack = promoted(W, W.dtype.char == "d").reshape(like.shape)
        return changed(like, x=changed(like.x, W=stack), state=state)
    if known and is_torch(W) and not compiling():
        from levattn._kernels.cuda_source import keeps
        from levattn._kernels.tensors import is_on_device

        if is_on_device(W) and W.ndim > 2 and (_is_read_as_stored(W) or W.dtype.itemsize != 2):
            wide = is_wide(W)
            like = _call_like(tuple(W.shape), np.dtype(np.float64 if wide else np.float32), temperature, form, causal)
            theta = _temperatures(temperature, W)
            keeps(theta)
            theta = theta.expand(like.shape[:2])
            x = changed(like.x, W=W.reshape(like.shape), temperature=theta)
            return changed(like, x=x, given=changed(like.given, dtype=W.dtype), state=state)
    return _checked(W, temperature, form, causal, mask, offsets, state)


def is_of_numbers(form: Form, causal: Any) -> bool:
    """Tell whether a form has no arrays and no leverage scores, so that its fields tell a call from others."""
    membership, normalize, bias, decay, c = form
    named = isinstance(membership, str) and isinstance(normalize, str) and isinstance(causal, bool) and bias is None
    return named and membership != "leverage" and {type(decay), type(c)} <= NUMBERS


@lru_cache(256, typed=True)
def _call_like(shape: tuple[int, ...], dtype: Any, temperature: Any, form: Form, causal: bool) -> TokenCall:
    """Return a checked call for an array of this shape, without the array."""
    W = np.broadcast_to(np.empty(shape[-1:], dtype), shape)
    call = _checked(W, temperature, form, causal, None, None, None)
    return changed(call, x=changed(call.x, W=None), given=changed(call.given, stacks=()))


def _checked(W: Any, temperature: Any, form: Form, causal: Any, mask: Any, offsets: Any, state: Any) -> TokenCall:
    membership, normalize, bias, decay, c = form
    W = _with_heads(W)
    if not isinstance(membership, str) and not hasattr(membership, "shape"):
        raise TypeError(
            f"form is, or has a membership, of type {type(membership).__name__}; expected a TokenForm, one of "
            f"{', '.join(map(repr, MEMBERSHIPS))}, or an array of logits"
        )
    name = membership if isinstance(membership, str) else "logits"
    check_form(name, normalize, bool(causal), bias)
    own = None if isinstance(membership, str) else membership
    W, theta, own, bias = dense_arrays(
        {
            "W": (W, "hTd"),
            "temperature": (_temperatures(temperature, W), "h"),
            "membership": (own, "hT"),
            "bias": (bias, "hT"),
        },
        ("membership", "bias"),
    )
    h, T, d = W.shape[-3:]
    if bias is not None:  # multiplied before it is repeated along the batch
        bias = d * promoted(bias, is_double("bias", bias))
    logits = {label: (None if a is None else a[..., None], 3) for label, a in (("membership", own), ("bias", bias))}
    stored = ("W",) if name != "leverage" and _is_read_as_stored(W) else ()
    given = stack_arguments(
        {"W": (W, 3), "temperature": (theta, 1), **logits}, like="W", mask=(mask, T), stored=stored
    )
    stack, theta, own, bias = given.stacks
    bounds = cumulative(offsets, T)
    rates = decay_rates(decay, h, bool(causal))
    offset = None if bias is None else bias[..., 0]
    if name == "leverage":
        own = _leverage(stack, given.mask, bounds, normalize == "mean", state)[..., None]
    if own is not None:
        offset = own[..., 0] if offset is None else offset + own[..., 0]
    released = name == "diag_leverage" and normalize == "sum"
    x = TokenArguments(
        stack,
        theta,
        offset,
        given_bounds(bounds, T),
        bool(causal),
        "diagonal" if name == "diag_leverage" else "norm" if name == "norm" else "none",
        normalize == "mean" and name == "diag_leverage",
        (_LEAST_CAUSAL if causal else _LEAST) if released else _least_normal(stack),
        _RIDGE if released else 0.0,
        c := positive_number("c", c),
        c,  # the gain of the output
        rates,
        given.mask,
    )
    return TokenCall(given, x, bounds, name == "diag_leverage", name == "leverage", state, stack.shape)


def _with_heads(W: Any) -> Any:
    """Return tokens (..., h, T, d) as a dense array, or raise."""
    W = dense_array("W", W)
    if W.ndim < 3:
        raise ValueError(f"W has shape {tuple(W.shape)}; expected (..., h, T, d), heads last but two")
    if not W.shape[-3]:
        raise ValueError(f"W has shape {tuple(W.shape)}; expected at least one head (its last axis but two)")
    return W


def _is_read_as_stored(W: Any) -> bool:
    """Tell whether kernels of a device read tokens of 16 bits and write such outputs."""
    if not is_torch(W):
        return on_cuda(W) and bool(W.dtype.itemsize == 2 and W.shape[-1] % 4 == 0)
    if W.device.type != "cuda" or W.dtype.itemsize != 2 or W.shape[-1] % 4:
        return False
    from levattn._kernels.tensors import has_kernels

    return bool(has_kernels(W))


def _least_normal(array: Any) -> float:
    """Return the constant that replaces these in forms that do not depend on the scale of tokens."""
    return 2.0**-1022 if is_wide(array) else 2.0**-126


def check_form(name: str, normalize: Any, causal: bool, bias: Any) -> None:
    """Raise if a form of memberships does not match other arguments."""
    if name not in (*MEMBERSHIPS, "logits"):
        raise ValueError(
            f"membership is {name!r}; expected one of {', '.join(map(repr, MEMBERSHIPS))}, an array, or a TokenForm"
        )
    if not isinstance(normalize, str) or normalize not in ("sum", "mean"):
        raise ValueError(f"normalize is {normalize!r}; expected 'sum' or 'mean'")
    if normalize == "mean" and name not in ("diag_leverage", "leverage"):
        raise ValueError(
            f"normalize is 'mean' and membership is {'an array' if name == 'logits' else repr(name)}; expected "
            "leverage scores, whose sum can be normalized. Leave normalize out, and choose the temperature"
        )
    if name == "leverage" and causal:
        raise ValueError(
            "membership is 'leverage' and causal is True; expected causal=False: these scores depend on all tokens. "
            "Give levattn.online_leverage_scores(W) as membership, or use 'diag_leverage'"
        )
    if name == "uniform" and bias is not None:
        raise ValueError("bias was given and membership is 'uniform'; expected no bias, as it would have no effect")


def _temperatures(temperature: Any, W: Any) -> Any:
    """Return temperatures as an array with an axis of heads, in the library of W."""
    h = W.shape[-3]
    if isinstance(temperature, int | float | np.number) and not isinstance(temperature, bool):
        if isinstance(temperature, int) and abs(temperature) > sys.float_info.max:
            raise ValueError(f"temperature is {temperature}; expected a number in the range of float64")
        if not -math.inf < float(temperature) < math.inf:  # which torch's compiler can trace
            raise ValueError(f"temperature is {temperature!r}; expected a finite number")
        xp = namespace_of(W)
        kind = "float64" if is_wide(W) else "float32"  # the dtype of the computation, also for halves
        return xp.full((h,), float(temperature), dtype=getattr(xp, kind), device=device_of(W))
    theta = dense_array("temperature", temperature)
    if not theta.ndim:
        return namespace_of(theta).broadcast_to(theta, (h,))
    return theta


def decay_rates(decay: Any, h: int, causal: bool) -> npt.NDArray[np.float64] | None:
    """Return a decay for each head, or None if nothing decays; torch can trace this for numbers of Python."""
    if isinstance(decay, int | float) and decay == 1:
        return None
    if is_torch(decay) and decay.requires_grad:
        raise ValueError("decay requires a gradient; expected a constant, which has none. Give decay.detach()")
    each = list(decay) if isinstance(decay, list | tuple) else [decay] * h
    if not all(isinstance(rate, int | float) for rate in each):
        rates = np.asarray(to_numpy(decay) if array_api_compat.is_array_api_obj(decay) else decay)
        each = np.broadcast_to(rates, h).tolist() if rates.dtype.kind in "fiu" and rates.shape in ((), (h,)) else []
    if len(each) != h:
        raise ValueError(f"decay is {decay!r}; expected a number in (0, 1], or one for each of {h} heads")
    if not all(0 < rate <= 1 for rate in each):
        raise ValueError(f"decay is {decay!r}; expected numbers above 0 and at most 1")
    if all(rate == 1 for rate in each):
        return None
    if not causal:
        raise ValueError("decay was given and causal is False; expected causal=True, as decay needs ordered tokens")
    return np.array(each, np.float64)


def _leverage(W: Any, mask: Any, bounds: Any, mean: bool, state: Any) -> Any:
    """Return the leverage scores (b, h, T) of the tokens of each head and sequence; gradients of torch reach W."""
    if state is not None:
        if bounds is not None:
            raise ValueError(
                "membership is 'leverage', and a state and packed sequences are given; expected one of them"
            )
        norms = state.norms if isinstance(state, TokenState) else None
        if norms is None or norms.diagonal:
            raise ValueError(
                "state has no full second moment as norms, which membership 'leverage' needs; expected "
                "TokenState(Moments(d, (..., h)).update(W))"
            )
        if is_torch(W) and W.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise ValueError(
                "membership is 'leverage', a state is given and W requires a gradient, which does not go through it; "
                "give W.detach(), or no state"
            )
    ends = [0, W.shape[2]] if bounds is None else np.asarray(bounds).tolist()
    parts = []
    for low, high in pairwise(ends):
        if low == high:
            continue
        there = None if mask is None else mask[:, None, low:high]
        part = W[:, :, low:high, :]
        if state is not None:
            scores = _scores_in(state.norms, part, there)
        elif is_torch(part):
            from levattn.attention.tokens.torch import leverage

            scores = untraced(leverage, part, there)
        else:
            scores = leverage_scores(part, mask=there)
        if mean:
            n = high - low if there is None else namespace_of(W).sum(namespace_of(W).astype(there, W.dtype), axis=-1)
            n = state.norms.count.reshape(*W.shape[:2]) if state is not None else n
            scores = scores * (n if isinstance(n, int) else _per_token(n, scores))
        parts.append(scores)
    return namespace_of(W).concat(parts, axis=2) if parts else W[..., 0]


def _per_token(n: Any, scores: Any) -> Any:
    """Return numbers of tokens (b, h or 1) in a form that multiplies scores (b, h, T)."""
    if isinstance(n, np.ndarray) and not isinstance(scores, np.ndarray):
        n = namespace_of(scores).asarray(n.astype(np.float64), dtype=scores.dtype, device=device_of(scores))
    return n[..., None].astype(scores.dtype) if isinstance(n, np.ndarray) else n[..., None]


def _scores_in(norms: Moments, W: Any, mask: Any) -> Any:
    """Return ``w G⁺ w`` of tokens (b, h, T, d), with a full second moment of these and other tokens."""
    matrices, rows = readable(without_gradient(W), mask)
    scores = norms.factor().on(rows).scores(numerical=True)[0]
    found = matrices.give_back(reshaped(scores, tuple(W.shape[:3])))
    return to_device(found, W) if isinstance(found, np.ndarray) else found


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
