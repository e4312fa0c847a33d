"""Latte-Macchiato: a sliding window of softmax attention and latents as the components of one mixture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_device, to_numpy
from levattn._core.checks import check_bool
from levattn._core.device import where_arrays_are
from levattn._core.jax import by_numpy
from levattn._core.types import Float64
from levattn.attention.arguments import (
    cumulative,
    dense_arrays,
    device_of,
    heads_of,
    latent_attention,
    masked_first,
    namespace_of,
    reads_numbers,
    refuse_packed,
    reshaped,
    rows_of_items,
    stack_arguments,
    state_after,
    state_stacks,
    without_gradient,
)
from levattn.attention.latent.window import Overlap, Window, window_of, window_options, windowed
from levattn.states import SoftmaxState


@dataclass(frozen=True, eq=False)
class MacchiatoState:
    """The state of `macchiato` after some positions, in a size that does not grow with their number.

    It holds the sums of the latents and a ring: the last window − 1 positions as they came, which the window of the
    next row sees. With overlap "mixture" the latents sum over all positions. With "exclusive" they sum over the
    positions that have left the ring, and the ring holds their logits, too.

    Attributes
    ----------
    latents : SoftmaxState
        The sums of the latents, of the batch (..., H).
    k, V : array of shape (b, r, d) and (b, r, D)
        Keys and values of the ring, the latest last, in their original dtypes. r is at most window − 1, and b is the
        product of `batch`.
    logits : array of shape (b H / G, r, L) or None
        Logits of the ring for the latents, with overlap "exclusive".
    mask : array of bool, shape (b, r), or None
        True for positions of the ring that may be seen; None if no mask was ever given.
    batch : tuple of int
        The leading axes (..., G) of keys and values.
    window : int
        The window.
    overlap : {"mixture", "exclusive"}
        Whether the latents see the positions of the window.
    positions : int
        Number of positions so far.

    Notes
    -----
    No method changes a state, and `macchiato` makes new ones, so one state can continue several sequences.

    References
    ----------
    Dolga et al., arXiv:2402.17512v5, Latte-Macchiato. The state of the exclusive mode is ours.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import macchiato
    >>> rng = np.random.default_rng(0)
    >>> q, k, V, Q, K = rng.standard_normal((5, 300, 8))
    >>> _, state = macchiato(q, k, V, (Q, K, np.zeros(300)), 32, return_state=True)
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
    def _held_array(self) -> Any:
        return self.latents, self.V

    @property
    def size(self) -> int:
        """Number of floats that the state holds."""
        ring: int = sum(math.prod(part.shape) for part in (self.k, self.V, self.logits) if part is not None)
        return ring + math.prod(self.latents.batch) * self.latents.latents * (self.latents.d + 2)


@where_arrays_are
@by_numpy
def macchiato(
    q: Any,
    k: Any,
    V: Any,
    logits: tuple[Any, Any, Any],
    /,
    window: Window | int,
    *,
    mask: Any = None,
    offsets: Any = None,
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

    With overlap "mixture" latents sum over all positions :math:`s \le t`, as in the paper. Positions of the window
    then get weight from both parts, and `repeated_mass` says how much. With "exclusive" latents see only the
    positions :math:`s \le t - W` before the window, and no position gets weight twice.

    A component that sees no position takes no part in the softmax. If no component is left, the row is zero. Masked
    positions have no place: other rows equal the rows of the sequence without masked positions, and rows of masked
    positions are zero. A gate of −inf leaves the window out of a row. With +inf only the window counts, and
    the row equals the row of `window_attention` exactly.

    Parameters
    ----------
    q : array of shape (..., H, T, d)
        Queries of the window, rotated already if the keys are. With one head, all arrays may lack the axis H.
    k : array of shape (..., G, T, d)
        Keys of the window; H is a multiple of G, and query head h reads head ``h // (H / G)``.
    V : array of shape (..., G, T, D)
        Values of both parts.
    logits : tuple of three arrays
        Q of shape (..., H, T, L), the logits of the latents for each row. K of shape (..., H, T, L) or (..., G, T, L),
        the logits of the positions for each latent. It is −inf for a position that a latent does not see. And the gate
        g of shape (..., H, T), the logit of the window for each row. All arrays are of one library (numpy, CuPy, torch
        or another namespace of the array-API standard) and on one device. Each is float64, float32, float16 or
        bfloat16.
    window : Window or int
        The `Window`, or its size with overlap "mixture".
    mask : array of bool, shape (..., G, T), optional
        True for a position that takes part; leading axes are broadcast. Nothing of the others is used.
    offsets : array of int, shape (n + 1,), optional
        Where packed sequences begin, ending with T: ``np.cumsum([0, *lengths])``. No sequence sees another.
    state : MacchiatoState, optional
        State after the earlier positions, from `return_state`; not together with packed sequences. It is not changed.
    return_state : bool
        True to return the state after all positions, too.

    Returns
    -------
    array of shape (..., H, T, D)
        The output, in the dtype of V. With `return_state`, the pair of it and a `MacchiatoState`.

    Raises
    ------
    TypeError
        If an argument is no array of real floats (or of bool, or of int), or arrays are of several libraries or
        devices.
    ValueError
        If shapes do not fit together, an option is out of range, or the state has another window, overlap or shape.

    Notes
    -----
    Time O(T W (d + D) + T L D) for each head, memory O(T (L + D)) besides the memory of `window_attention`. A state
    holds (W − 1)(d + D) floats for each head of keys and L (D + 2) for each head of queries, with "exclusive"
    (W − 1) L more. A step of decoding is a call with T = 1, a `state` and `return_state`; its outputs equal the
    outputs of one call to rounding.

    Later positions change no bit of a row. For another T rows agree to rounding, as `window_attention` says.

    In torch gradients reach all six arrays. They do not reach states, and none come from them. There are first
    derivatives only, and forward mode in ``torch.func.jvp`` alone.

    References
    ----------
    Dolga, Maystre, Cobzarenco, Barber, "Latte: Latent Attention for Linear Time Transformers", arXiv:2402.17512v5,
    Latte-Macchiato. The softmax over L + 1 logits is our reading of it, and the exclusive mode is ours.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import Window, macchiato
    >>> rng = np.random.default_rng(0)
    >>> q, k, V, Q, K = rng.standard_normal((5, 300, 8))
    >>> gate = rng.standard_normal(300)
    >>> window = Window(32, overlap="exclusive")
    >>> Y = macchiato(q, k, V, (Q, K, gate), window)
    >>> head, tail = ([x[rows] for x in (q, k, V, Q, K, gate)] for rows in (slice(0, 299), slice(299, 300)))
    >>> _, state = macchiato(*head[:3], head[3:], window, return_state=True)
    >>> np.allclose(macchiato(*tail[:3], tail[3:], window, state=state), Y[299:])
    True
    """
    check_bool(return_state=return_state)
    window = window_of(window)
    size, overlap = window.size, window.overlap
    q_logits, k_logits, gate = _three(logits)
    q, k, V, q_logits, k_logits, gate = dense_arrays(
        {"q": (q, "Td"), "k": (k, "Td"), "V": (V, "TD")}
        | {"q_logits": (q_logits, "TL"), "k_logits": (k_logits, "TL"), "gate": (gate, "T")}
    )
    heads = heads_of(q, k, V)
    of_queries = heads.of_queries(q=q, q_logits=q_logits, k_logits=k_logits, gate=gate[..., None])
    given = stack_arguments(of_queries | {"k": (k, 2), "V": (V, 2)}, like="V", mask=(mask, V.shape[-2]))
    bounds = cumulative(offsets, q.shape[-2])
    refuse_packed(bounds, state, return_state)
    order = None if given.mask is None else masked_first(given.mask, bounds)
    queries, *of_latents, keys, values = (x if order is None else rows_of_items(x, order) for x in given.stacks)
    present = None if order is None else rows_of_items(given.mask[..., None], order)[..., 0]
    Q, K, gates = (_spread(x, heads.group) for x in of_latents)
    seen = new = _Positions(keys, values, K, present)
    latents, batch = None, heads.leading(given.batch)
    if state is not None:
        _check_state(state, size, overlap, given.batch, new)
        seen, latents = _followed(state, new), state.latents
    near, some = windowed(
        queries, seen.k, seen.V, **window_options(window, q.shape[-1]), mask=seen.mask, offsets=bounds
    )
    read = (seen if overlap == "exclusive" else new).for_queries(heads.group)
    ahead = read.V.shape[1] - Q.shape[1] - size if overlap == "exclusive" else 0
    before = state_stacks(latents, batch, None, K, values)
    Y = _mixed(Q, read, gates[..., 0], near, some, ahead=ahead, offsets=bounds, state=before)
    result = heads.joined(given.give_back(Y if order is None else _in_place(Y, present, order)))
    if not return_state:
        return result
    if latents is None:
        latents = SoftmaxState(K.shape[2], values.shape[2], batch)
    return result, MacchiatoState(
        **_ring_and_latents(seen, read, latents, size, overlap, (k.dtype, V.dtype, k_logits.dtype)),
        batch=given.batch,
        window=size,
        overlap=overlap,
        positions=q.shape[-2] + (0 if state is None else state.positions),
    )


def _three(logits: Any) -> tuple[Any, Any, Any]:
    if not isinstance(logits, tuple | list) or len(logits) != 3:
        raise TypeError(
            f"logits is of type {type(logits).__name__}; expected a tuple of three arrays: the logits of rows for "
            "latents, the logits of positions, and the gate"
        )
    return logits[0], logits[1], logits[2]


def _in_place(Y: Any, present: Any, order: Any) -> Any:
    """Return the rows of an output in the order of the call, with zeros for masked positions."""
    xp = namespace_of(Y)
    Y = xp.where(present[:, None, :, None], Y, xp.zeros_like(Y))
    return rows_of_items(Y, xp.argsort(order, axis=1))


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


def _mixed(Q: Any, read: _Positions, gate: Any, near: Any, some: Any, **options: Any) -> Any:
    """Return the output (b, g, T, D) of the softmax over the latents and the window, whose output is `near`.

    some: True for rows that see a position in their window, (b, T), or None for all.
    """
    xp, (_, group, *_) = namespace_of(Q), near.shape
    value = _spread(near, group)
    if some is not None:
        gate = xp.where(_spread(some[:, None, :], group), gate, xp.full_like(gate, -math.inf))
    alone = gate == math.inf  # a softmax would be NaN
    gate = xp.where(alone, xp.zeros_like(gate), gate)
    options |= {"causal": True, "gate": gate, "gate_value": value, "mask": read.mask}
    Y = xp.where(alone[..., None], value, latent_attention(Q, read.logits, read.V, **options))
    return reshaped(Y, tuple(near.shape))


def _spread(array: Any, group: int) -> Any:
    """Return (b, 1, ...) or (b, group, ...) as (b group, ...), repeated for each of a group."""
    b, _, *last = array.shape
    array = namespace_of(array).broadcast_to(array, (b, group, *last))
    return reshaped(array, (b * group, *last))


def _followed(state: MacchiatoState, new: _Positions) -> _Positions:
    """Return the positions of the ring and the new positions after them."""
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
    mask = xp.concat(list(flags), axis=1)
    if new.mask is None:  # masked positions of a ring are its first
        return _Positions(k, V, logits, mask)
    order, b = masked_first(mask), mask.shape[0]
    if logits.shape[1] == mask.shape[1]:
        split = reshaped(logits, (b, logits.shape[0] // max(b, 1), *logits.shape[1:]))
        logits = reshaped(rows_of_items(split, order), tuple(logits.shape))
    k, V, flags = (rows_of_items(x, order) for x in (k, V, mask[..., None]))
    return _Positions(k, V, logits, flags[..., 0])


def _ring_and_latents(
    seen: _Positions, read: _Positions, latents: SoftmaxState, window: int, overlap: Overlap, kinds: tuple[Any, ...]
) -> dict[str, Any]:
    """Return the arrays of a state for positions `seen` by the window and `read` by latents, in the dtypes `kinds`."""
    ring = min(seen.V.shape[1], window - 1)
    exclusive = overlap == "exclusive"
    entered = read.until(read.V.shape[1] - (ring if exclusive else 0))
    if entered.V.shape[1]:
        latents = state_after(latents, latents.batch, None, entered.logits, entered.V, entered.mask)
    return {
        "latents": latents,
        "k": _last(seen.k, ring, kinds[0]),
        "V": _last(seen.V, ring, kinds[1]),
        "logits": _last(seen.logits, ring, kinds[2]) if exclusive else None,
        "mask": None if seen.mask is None else _last(seen.mask, ring, seen.mask.dtype),
    }


def _last(array: Any, n: int, dtype: Any) -> Any:
    """Return the last n positions in memory of their own, without gradients."""
    xp = namespace_of(array)
    array = without_gradient(array)
    return xp.astype(array[:, array.shape[1] - n :, ...], dtype, copy=True)


def _check_state(state: Any, window: int, overlap: str, batch: tuple[int, ...], new: _Positions) -> None:
    """Raise unless a state fits a call."""
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


@reads_numbers
@where_arrays_are
@by_numpy
def repeated_mass(
    q_logits: Any,
    k_logits: Any,
    gate: Any,
    /,
    window: Window | int,
    *,
    mask: Any = None,
    offsets: Any = None,
) -> Any:
    r"""The weight that `macchiato` gives to the positions of the window a second time, by its latents.

    .. math:: \sum_{l \ge 1} p(l \mid t) \sum_{s \in (t-W, t]} p(s \mid l, t),

    in the mode "mixture"; in "exclusive" it is zero. For nearly equal logits of the positions it is about
    :math:`(1 - p(0 \mid t)) \min(1, W/t)`, which vanishes for positions far beyond W. If it does not vanish, latents
    attend to near positions, and "exclusive" makes them attend to other positions.

    Parameters
    ----------
    q_logits : array of shape (..., H, T, L)
        Logits of the rows, as in `macchiato`.
    k_logits : array of shape (..., H, T, L) or (..., G, T, L)
        Logits of the positions.
    gate : array of shape (..., H, T)
        Logits of the window.
    window : Window or int
        The `Window`, or its size W.
    mask : array of bool, shape (..., G, T), optional
        True for a position that takes part. The others have no place, and their rows are zero.
    offsets : array of int, shape (n + 1,), optional
        Where packed sequences begin, ending with T: ``np.cumsum([0, *lengths])``.

    Returns
    -------
    array of float64, shape (..., H, T)
        Between 0 and 1, in torch without gradients. Errors of the running sums add up with T: about 1e-13 for a
        million positions, plus 1e-16 times the largest logits.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another kind, shape or range.

    Notes
    -----
    Time O(T L) for each head, in main memory. Memory O(T L) numbers of float64, for one head at a time. Arguments of
    another precision or on a device are copied besides. The running sums Z of exponentials give the share of the
    window, 1 − Z(t − W)/Z(t), for each latent.

    References
    ----------
    A remark of the public reviews of Dolga et al., arXiv:2402.17512: positions in the window count twice. Weights
    still sum to 1.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import repeated_mass
    >>> r = repeated_mass(np.zeros((1000, 4)), np.zeros((1000, 4)), np.zeros(1000), window=10)
    >>> r[[9, 99, 999]]  # the window has 1/5 of the weight, as each latent
    array([0.8  , 0.08 , 0.008])
    """
    window = window_of(window).size
    q_logits, k_logits, gate = dense_arrays(
        {"q_logits": (q_logits, "TL"), "k_logits": (k_logits, "TL"), "gate": (gate, "T")}
    )
    heads = heads_of(q_logits, k_logits, k_logits, names=("q_logits", "k_logits", "k_logits"))
    arguments = heads.of_queries(q_logits=q_logits, gate=gate[..., None]) | {"k_logits": (k_logits, 2)}
    T = q_logits.shape[-2]
    given = stack_arguments(arguments, like="q_logits", mask=(mask, T))
    bounds = cumulative(offsets, T)
    ends = [0, T] if bounds is None else bounds.tolist()
    stacks = (without_gradient(x) for x in given.stacks)
    Q, gates, K = (to_numpy(x) for x in stacks)
    flags = np.ones(K.shape[:2], np.bool_) if given.mask is None else to_numpy(given.mask)
    gates = np.broadcast_to(gates[..., 0], Q.shape[:-1])
    out = np.zeros(Q.shape[:-1])
    for item, sees in enumerate(flags):
        for low, high in pairwise(ends):
            there = low + np.flatnonzero(sees[low:high])  # the others have no place
            share = _share(K[item, there].astype(np.float64), window)
            for head in range(Q.shape[1]):
                rows = item, head, there
                out[rows] = _repeated(Q[rows], share, gates[rows])
    out = out.reshape(*given.batch, *out.shape[1:])
    return heads.joined(to_device(out, q_logits), 1)


def _share(K: Float64, window: int) -> tuple[Float64, npt.NDArray[np.bool_]]:
    """Return the weight that each latent gives to the window of a row, and whether it has seen a position, (T, L)."""
    Z = np.logaddexp.accumulate(K, axis=0)
    live = np.isfinite(Z)
    before = np.full_like(Z, -np.inf)
    before[window:] = Z[:-window]
    return -np.expm1(before - np.where(live, Z, 0.0)), live


def _repeated(
    Q: npt.NDArray[Any],
    share: tuple[Float64, npt.NDArray[np.bool_]],
    gate: npt.NDArray[Any],
) -> Float64:
    """Return the repeated weight (T,) of one sequence, from the result of `_share`."""
    weights, live = share
    gate = gate.astype(np.float64)[:, None]
    alone = gate == np.inf
    logits = np.concatenate([np.where(alone, 0.0, gate), np.where(live & ~alone, Q, -np.inf)], axis=-1)
    top = logits.max(axis=-1, keepdims=True)
    E = np.exp(logits - np.where(top == -np.inf, 0.0, top))
    total = E.sum(axis=-1)
    repeated: Float64 = np.einsum("tl,tl->t", E[:, 1:], weights) / np.where(total > 0, total, 1.0)
    return repeated
