"""Latte-Macchiato: a sliding window of softmax attention and latents as the components of one mixture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from levattn._core.checks import whole_number
from levattn._kernels.latent.contract import State
from levattn.attention.common.arguments import (
    check_sizes,
    dense_array,
    latent_attention,
    reshaped,
    stacked,
    state_after,
    state_stacks,
)
from levattn.attention.common.heads import heads_of
from levattn.attention.common.packed import cumulative
from levattn.attention.common.space import device_of, namespace_of, without_gradient
from levattn.attention.latent.window import check_scale, check_softcap, windowed
from levattn.states import SoftmaxState

__all__ = ["MacchiatoState", "macchiato"]

Overlap = Literal["mixture", "exclusive"]


@dataclass(frozen=True, eq=False)
class MacchiatoState:
    """What `macchiato` has to know of the positions so far, in a size that does not grow with their number.

    It holds the sums of the latents, and the last window − 1 positions as they came: a row sees them and itself by its
    window. With overlap "mixture" the latents have all positions; with "exclusive" those that have left the ring, and
    the ring holds their logits, too.

    Attributes
    ----------
    latents : SoftmaxState
        The sums of the latents, of the batch (..., H).
    k, V : array of shape (b, r, d) and (b, r, D)
        Keys and values of the ring, the latest last, in the dtypes that they came in. r is at most window − 1, and b
        the product of `batch`.
    logits : array of shape (b H / G, r, L) or None
        Their logits for the latents, for overlap "exclusive".
    mask : array of bool, shape (b, r), or None
        Which of them may be seen; None if no mask was ever given.
    batch : tuple of int
        The leading axes (..., G) of keys and values.
    window : int
        The window.
    overlap : {"mixture", "exclusive"}
        What the latents see.
    positions : int
        How many positions there were.

    Notes
    -----
    No method changes a state, and `macchiato` makes new ones, so that a sequence may be continued in several ways.

    References
    ----------
    .. [1] Dolga, Maystre, Cobzarenco and Barber, "Latte: Latent Attention for Linear Time Transformers",
       arXiv:2402.17512v5, Latte-Macchiato. What a state has to hold for the exclusive mode is ours.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import macchiato
    >>> rng = np.random.default_rng(0)
    >>> q, k, V, Q, K = rng.standard_normal((5, 300, 8))
    >>> _, state = macchiato(q, k, V, Q, K, np.zeros(300), window=32, return_state=True)
    >>> state.size  # 31 keys and values, and 8 latents
    576
    """

    latents: SoftmaxState
    k: Any
    V: Any
    logits: Any
    mask: Any
    batch: tuple[int, ...]
    window: int
    overlap: Overlap
    positions: int

    @property
    def size(self) -> int:
        """Number of floats that the state holds."""
        ring: int = sum(math.prod(part.shape) for part in (self.k, self.V, self.logits) if part is not None)
        return ring + math.prod(self.latents.batch) * self.latents.latents * (self.latents.d + 2)


def macchiato(
    q: Any,
    k: Any,
    V: Any,
    q_logits: Any,
    k_logits: Any,
    gate: Any,
    /,
    *,
    window: int,
    overlap: Overlap = "mixture",
    scale: float | None = None,
    softcap: float | None = None,
    mask: Any = None,
    offsets: Any = None,
    lengths: Any = None,
    state: MacchiatoState | None = None,
    return_state: bool = False,
) -> Any:
    r"""Mix softmax attention in a sliding window with causal latent attention, by one softmax over both.

    .. math::

        p(0..L \mid t) = \mathrm{softmax}\,[g_t, Q_{t1}, \dots, Q_{tL}], \qquad
        y_t = p(0 \mid t) \sum_{s \in (t-W, t]} p_W(s \mid t) V_s
            + \sum_{l \ge 1} p(l \mid t) \sum_{s} p(s \mid l, t) V_s,

    with the weights :math:`p_W` of `window_attention` and :math:`p(s \mid l, t)` of `latte`. Every component is a
    distribution over positions up to t, so that the weights of a row sum to 1, in both modes.

    Latents sum over all positions :math:`s \le t` with overlap "mixture", as in the paper; then positions of the
    window get weight from both parts, and `repeated_mass` says how much. With "exclusive" latents see only the
    positions :math:`s \le t - W` before the window, and no position gets weight twice.

    A component that sees no position takes no part in the softmax: a latent, and the window where all of it is masked.
    Where none is left, the row is zero. Logits of −inf in `gate` leave the window out of a row, and +inf is a window
    alone: then the row is that of `window_attention`, exactly.

    Parameters
    ----------
    q : array of shape (..., H, T, d)
        Queries of the window, rotated already where keys are. With one head, all arrays may lack the axis H.
    k : array of shape (..., G, T, d)
        Keys of the window; H is a multiple of G, and query head h reads head ``h // (H / G)``.
    V : array of shape (..., G, T, D)
        Values, of both parts.
    q_logits : array of shape (..., H, T, L)
        Logits of the latents for each row.
    k_logits : array of shape (..., H, T, L) or (..., G, T, L)
        Logits of the positions for each latent; −inf for a position that a latent does not see.
    gate : array of shape (..., H, T)
        Logit of the window for each row. The arrays are of one library (numpy, CuPy, torch or another namespace of the
        array-API standard) and on one device; they are float64, float32, float16 or bfloat16, each of its own.
    window : int
        W, at least 1: how many positions the window holds, that of the row among them.
    overlap : {"mixture", "exclusive"}
        Whether latents see the positions of the window, too.
    scale : float, optional
        What products of queries and keys are multiplied by; 1/√d if it is None.
    softcap : float, optional
        Products x of queries and keys, scaled, become c tanh(x/c) with this c > 0.
    mask : array of bool, shape (..., G, T), optional
        True for a position that may be seen; leading axes are broadcast. Keys, values and logits of the others are not
        used.
    offsets, lengths : whole numbers, shape (n + 1,) or (n,), optional
        Where packed sequences begin, ending with T, or how long they are. No sequence sees another.
    state : MacchiatoState, optional
        What came before, as `return_state` gave it; not together with packed sequences. It is not changed.
    return_state : bool
        True to return the state after all positions, too.

    Returns
    -------
    array of shape (..., H, T, D)
        In the dtype of V. Or the pair of it and a `MacchiatoState`, if `return_state`.

    Raises
    ------
    TypeError
        If an argument is no array of real floats (or of bool, or of int), or arrays are of several libraries or
        devices.
    ValueError
        If shapes do not go together, an option is out of range, or the state is of another window, overlap or shape.

    Notes
    -----
    Time O(T W (d + D) + T L D) for each head, memory O(T (L + D)) besides what `window_attention` says. A state holds
    (W − 1)(d + D) floats for each head of keys and L (D + 2) for each head of queries, with "exclusive" (W − 1) L
    more. A step of decoding is a call with T = 1, a `state` and `return_state`; its outputs are those of one call to
    rounding.

    What comes after a row changes no bit of it; for another T rows agree to rounding, as `window_attention` says.

    In torch gradients reach all six arrays. They do not reach states, and none come from them. There are first
    derivatives only, and forward mode in ``torch.func.jvp`` alone.

    References
    ----------
    .. [1] Dolga, Maystre, Cobzarenco and Barber, "Latte: Latent Attention for Linear Time Transformers",
       arXiv:2402.17512v5, Latte-Macchiato. The softmax over L + 1 logits is our reading of it, and the
       exclusive mode is ours.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import macchiato
    >>> rng = np.random.default_rng(0)
    >>> q, k, V, Q, K = rng.standard_normal((5, 300, 8))
    >>> gate = rng.standard_normal(300)
    >>> Y = macchiato(q, k, V, Q, K, gate, window=32, overlap="exclusive")
    >>> head, tail = ([x[rows] for x in (q, k, V, Q, K, gate)] for rows in (slice(0, 299), slice(299, 300)))
    >>> _, state = macchiato(*head, window=32, overlap="exclusive", return_state=True)
    >>> np.allclose(macchiato(*tail, window=32, overlap="exclusive", state=state), Y[299:])
    True
    """
    window, softcap = whole_number("window", window), check_softcap(softcap)
    if overlap not in ("mixture", "exclusive"):
        raise ValueError(f"overlap is {overlap!r}; expected 'mixture' or 'exclusive'")
    named = zip(("q", "k", "V", "q_logits", "k_logits", "gate"), (q, k, V, q_logits, k_logits, gate), strict=True)
    q, k, V, q_logits, k_logits, gate = (dense_array(name, array) for name, array in named)
    check_sizes(
        {"q": (q, -2, "T"), "k": (k, -2, "T"), "V": (V, -2, "T"), "q .": (q, -1, "d"), "k .": (k, -1, "d")}
        | {"q_logits": (q_logits, -2, "T"), "k_logits": (k_logits, -2, "T"), "gate": (gate, -1, "T")}
        | {"q_logits .": (q_logits, -1, "L"), "k_logits .": (k_logits, -1, "L")}
    )
    heads = heads_of(q, k, V)
    arguments = {
        "q": (heads.per_query("q", q, 2), 3),
        "k": (k, 2),
        "V": (V, 2),
        "q_logits": (heads.per_query("q_logits", q_logits, 2), 3),
        "k_logits": (heads.per_query("k_logits", k_logits, 2), 3),
        "gate": (heads.per_query("gate", gate[..., None], 2), 3),
    }
    given = stacked(arguments, like="V", mask=(mask, V.shape[-2]))
    bounds = cumulative(offsets, lengths, q.shape[-2])
    if bounds is not None and (state is not None or return_state):
        raise ValueError(
            "offsets or lengths were given with state or return_state; expected one sequence then: call macchiato for "
            "each sequence, or stack sequences of one length along a leading axis"
        )
    stack_q, stack_k, stack_v, *of_queries = given.stacks
    Q, K, gates = (_spread(x, heads.group) for x in of_queries)
    new = _Positions(stack_k, stack_v, K, given.mask)
    lead = heads.leading(given.batch)
    seen, before = new, None
    if state is not None:
        _check_state(state, window, overlap, given.batch, new)
        seen = _followed(state, new)
        before = state_stacks(state.latents, lead, None, K, stack_v)
    gate_value, some = windowed(
        stack_q,
        seen.k,
        seen.V,
        window=window,
        scale=check_scale(scale, q.shape[-1]),
        softcap=softcap,
        mask=seen.mask,
        offsets=bounds,
    )
    shape = tuple(gate_value.shape)
    read = (seen if overlap == "exclusive" else new).for_queries(heads.group)
    ahead = read.V.shape[1] - Q.shape[1] - window if overlap == "exclusive" else 0
    gate_value, some = (
        _spread(gate_value, heads.group),
        None if some is None else _spread(some[:, None, :], heads.group),
    )
    Y = _mixed(Q, read, gates[..., 0], gate_value, some, ahead, bounds, before)
    result = heads.joined(given.give_back(reshaped(Y, shape)))
    if not return_state:
        return result
    ring = min(seen.V.shape[1], window - 1)
    entered = read.until(read.V.shape[1] - (ring if overlap == "exclusive" else 0))
    latents = SoftmaxState(K.shape[2], stack_v.shape[2], lead) if state is None else state.latents
    if entered.V.shape[1]:
        latents = state_after(latents, lead, None, entered.logits, entered.V, entered.mask)
    return result, MacchiatoState(
        latents=latents,
        k=_last(seen.k, ring, k.dtype),
        V=_last(seen.V, ring, V.dtype),
        logits=_last(seen.logits, ring, k_logits.dtype) if overlap == "exclusive" else None,
        mask=None if seen.mask is None else _last(seen.mask, ring, seen.mask.dtype),
        batch=given.batch,
        window=window,
        overlap=overlap,
        positions=q.shape[-2] + (0 if state is None else state.positions),
    )


@dataclass(frozen=True, eq=False)
class _Positions:
    """Positions as the kernels read them: k (b, n, d), V (b, n, D), logits (b g, n, L), mask (b, n) or None."""

    k: Any
    V: Any
    logits: Any
    mask: Any

    def for_queries(self, group: int) -> _Positions:
        """Return values and mask for each head of queries, (b g, n, ...)."""
        mask = None if self.mask is None else _spread(self.mask[:, None, :], group)
        return _Positions(self.k, _spread(self.V[:, None, :, :], group), self.logits, mask)

    def until(self, n: int) -> _Positions:
        """Return the first n."""
        mask = None if self.mask is None else self.mask[:, :n]
        return _Positions(self.k, self.V[:, :n, :], self.logits[:, :n, :], mask)


def _mixed(
    Q: Any, read: _Positions, gate: Any, gate_value: Any, some: Any, ahead: int, bounds: Any, before: State | None
) -> Any:
    """Return the output (b, T, D) of the softmax over the latents and what is gate_value them."""
    xp = namespace_of(Q)
    if some is not None:
        gate = xp.where(some, gate, xp.full_like(gate, -math.inf))
    alone = gate == math.inf  # a softmax would be NaN
    gate = xp.where(alone, xp.zeros_like(gate), gate)
    Y = latent_attention(
        Q,
        read.logits,
        read.V,
        causal=True,
        offsets=bounds,
        ahead=ahead,
        gate=gate,
        gate_value=gate_value,
        mask=read.mask,
        state=before,
    )
    return xp.where(alone[..., None], gate_value, Y)


def _spread(array: Any, group: int) -> Any:
    """Return (b, 1, ...) or (b, group, ...) as (b group, ...), repeated for each of a group."""
    b, _, *core = array.shape
    array = namespace_of(array).broadcast_to(array, (b, group, *core))
    return reshaped(array, (b * group, *core))


def _followed(state: MacchiatoState, new: _Positions) -> _Positions:
    """Return the positions of the ring and those behind them."""
    xp = namespace_of(new.V)
    k, V, logits = (
        b if a is None else xp.concat([xp.astype(a, b.dtype), b], axis=1)
        for a, b in ((state.k, new.k), (state.V, new.V), (state.logits, new.logits))
    )
    if state.mask is None and new.mask is None:
        return _Positions(k, V, logits, None)
    flags = (
        xp.ones(array.shape[:2], dtype=xp.bool, device=device_of(array)) if mask is None else mask
        for mask, array in ((state.mask, state.V), (new.mask, new.V))
    )
    return _Positions(k, V, logits, xp.concat(list(flags), axis=1))


def _last(array: Any, n: int, dtype: Any) -> Any:
    """Return the last n positions in memory of their own, without gradients."""
    xp = namespace_of(array)
    array = without_gradient(array)
    return xp.astype(array[:, array.shape[1] - n :, ...], dtype, copy=True)


def _check_state(state: Any, window: int, overlap: str, batch: tuple[int, ...], new: _Positions) -> None:
    """Raise unless a state goes with a call."""
    if not isinstance(state, MacchiatoState):
        raise TypeError(
            f"state is of type {type(state).__name__}; expected a MacchiatoState, as return_state gives it"
        )
    if (state.window, state.overlap) != (window, overlap):
        raise ValueError(
            f"state is of window {state.window} and overlap {state.overlap!r}; expected {window} and {overlap!r}, as "
            "the call"
        )
    mine, call = (state.batch, state.k.shape[2], state.V.shape[2]), (batch, new.k.shape[2], new.V.shape[2])
    if mine != call:
        raise ValueError(f"state has (batch of keys, d, D) = {mine}; expected {call}, as k and V")
    if namespace_of(state.V) is not namespace_of(new.V):
        raise TypeError(f"state holds arrays of {type(state.V).__module__}; expected the library of V")
