"""In front of latent attention: a gated linear recurrence, a causal convolution, and values rotated by positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.arrays import is_torch
from levattn._core.checks import check_bool, positive_number
from levattn._core.device import where_arrays_are
from levattn._core.jax import by_numpy
from levattn._core.types import dtype_name
from levattn._kernels import kernels_for
from levattn.attention.arguments import (
    cumulative,
    dense_array,
    dense_arrays,
    device_of,
    followable,
    moved,
    namespace_of,
    refuse_packed,
    reshaped,
    rows_of_items,
    running_counts,
    stack_arguments,
    without_gradient,
)

_STEEPEST = 1000.0  # the slope of the square root near 0, where it has none
_POWER = 8.0  # of the decay, as in Griffin


@where_arrays_are
@by_numpy
def rg_lru(
    x: Any,
    gate_x: Any,
    gate_a: Any,
    a_param: Any,
    /,
    *,
    mask: Any = None,
    offsets: Any = None,
    state: Any = None,
    return_state: bool = False,
) -> Any:
    r"""Real-gated linear recurrence: an average of the inputs so far, in which each channel decays at its own speed.

    .. math:: h_t = a_t \odot h_{t-1} + \sqrt{1 - a_t^2} \odot \sigma(\text{gate}_x) \odot x_t, \qquad
       a_t = \exp(-8\, \sigma(\text{gate}_a)\, \mathrm{softplus}(\text{a\_param})),

    where a is 0 at the start of a sequence, so that :math:`h = \sigma(\text{gate}_x) \odot x` there. Masked positions
    neither enter the average nor decay it: later rows equal the rows of the sequence without them.

    Parameters
    ----------
    x : array of shape (..., T, C)
        Input: float64, float32, float16 or bfloat16 of numpy, torch, CuPy or another library of the array-API
        standard.
    gate_x, gate_a : array of shape (..., T, C)
        Logits of the gates, before their sigmoids.
    a_param : array of shape (C,)
        Speeds of decay. If ``softplus(a_param) = −log r`` with r in (0, 1), a half-open gate decays by r⁴.
    mask : array of bool, shape (..., T), optional
        True for a position that takes part.
    offsets : array of int, shape (n + 1,), optional
        Where packed sequences begin, ending with T: ``np.cumsum([0, *lengths])``.
    state : array of shape (..., C + 1), optional
        State after the earlier positions, from `return_state`; not together with packed sequences.
    return_state : bool
        True to return the state after all positions, too: h, followed by 1 if any position took part so far, else 0.

    Returns
    -------
    array of shape (..., T, C)
        The average h, in the dtype of `x`; a masked position has the average of the position before. With
        `return_state`, the pair of h and the state, in float32 or float64 and without gradients.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another kind or shape, or a state comes with packed sequences.

    Notes
    -----
    Time and memory O(TC). The precision is float64 if an argument has it, and float32 otherwise. Gradients of torch
    reach the first four arguments, and can be differentiated again. The slope of the square root is held at 1000 where
    a is next to 1. Neither later positions nor another T change any bit of a row, with one exception: in torch
    exponentials round by their place in an array.

    References
    ----------
    De et al., Griffin, arXiv:2402.19427, section 2.4. Dolga et al., arXiv:2402.17512v5, put it in front of latent
    logits.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import rg_lru
    >>> x = np.random.default_rng(0).standard_normal((10, 3))
    >>> h, state = rg_lru(x[:6], x[:6], x[:6], np.zeros(3), return_state=True)
    >>> rest = rg_lru(x[6:], x[6:], x[6:], np.zeros(3), state=state)
    >>> np.allclose(np.concatenate([h, rest]), rg_lru(x, x, x, np.zeros(3)))
    True
    """
    check_bool(return_state=return_state)
    x, gate_x, gate_a, a_param = dense_arrays(
        {"x": (x, "TC"), "gate_x": (gate_x, "TC"), "gate_a": (gate_a, "TC"), "a_param": (a_param, "C")}
    )
    T, C = x.shape[-2:]
    arguments = {"x": (x, 2), "gate_x": (gate_x, 2), "gate_a": (gate_a, 2), "a_param": (a_param, 1)}
    given = stack_arguments(arguments | {"state": (state, 1)}, like="x", mask=(mask, T))
    bounds = cumulative(offsets, T)
    refuse_packed(bounds, state, return_state)
    X, Gx, Ga, speed, before = given.stacks
    before = followable(before)
    if before is not None and before.shape[1] != C + 1:
        raise ValueError(f"state has {before.shape[1]} numbers along its last axis; expected C + 1 = {C + 1}")
    xp = namespace_of(X)
    if given.mask is not None:
        X, Gx, Ga = (xp.where(given.mask[..., None], part, xp.zeros_like(part)) for part in (X, Gx, Ga))
    places = _places(xp, X, given.mask, bounds)
    first = places == 0
    if given.mask is not None:
        first = first & given.mask
    if before is not None:
        first = first & (before[:, C:] == 0)
    first = first[..., None]
    with np.errstate(over="ignore"):  # of a decay at once
        log_a = -_POWER * _sigmoid(xp, Ga) * xp.logaddexp(speed, xp.zeros_like(speed))[:, None, :]
    a = xp.where(first, xp.zeros_like(log_a), xp.exp(log_a))
    share = xp.where(first, xp.ones_like(log_a), _root(xp, -xp.expm1(2 * log_a)))
    u = share * _sigmoid(xp, Gx) * X
    if given.mask is not None:
        a = xp.where(given.mask[..., None], a, xp.ones_like(a))
        if bounds is not None:  # before the first position: drop the state of the sequence before
            a = xp.where((places < 0)[..., None], xp.zeros_like(a), a)
    h = kernels_for("latent", a).decayed_scan(a, u, None if before is None else before[:, :C])
    out = given.give_back(h)
    if not return_state:
        return out
    begun = xp.ones_like(h[:, :1, 0]) if T else xp.zeros_like(speed[:, :1])
    if given.mask is not None:
        begun = xp.astype(xp.any(given.mask, axis=1, keepdims=True), h.dtype)
    last = h[:, -1, :] if T else xp.zeros_like(speed)
    if before is not None:
        begun, last = xp.maximum(begun, before[:, C:]), last if T else before[:, :C]
    return out, _detached(_batched(xp.concat([last, begun], axis=1), given.batch))


@where_arrays_are
@by_numpy
def causal_conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    /,
    *,
    mask: Any = None,
    offsets: Any = None,
    state: Any = None,
    return_state: bool = False,
) -> Any:
    r"""Convolution of each channel with the inputs so far.

    .. math:: y_{tc} = b_c + \sum_{j=0}^{k-1} w_{c, k-1-j}\, x_{t-j, c},

    with zeros in front of a sequence. Masked positions are left out: later rows equal the rows of the sequence
    without them.

    Parameters
    ----------
    x : array of shape (..., T, C)
        Input: float64, float32, float16 or bfloat16 of numpy, torch, CuPy or another library of the array-API
        standard.
    weight : array of shape (C, k)
        Weights of each channel; the last weights the position itself, as in torch's ``Conv1d``.
    bias : array of shape (C,), optional
        Added to each row.
    mask : array of bool, shape (..., T), optional
        True for a position that takes part. The other rows of the result are zero.
    offsets : array of int, shape (n + 1,), optional
        Where packed sequences begin, ending with T: ``np.cumsum([0, *lengths])``.
    state : array of shape (..., k − 1, C), optional
        State after the earlier positions, from `return_state`; not together with packed sequences.
    return_state : bool
        True to return the state after all positions, too: the last k − 1 inputs that took part, after zeros if there
        are fewer.

    Returns
    -------
    array of shape (..., T, C)
        The convolution, in the dtype of `x`. With `return_state`, the pair of it and the state, in that dtype and
        without gradients.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another kind or shape, or a state comes with packed sequences.

    Notes
    -----
    Time O(TCk), memory O(TC). The precision is float64 if an argument has it, and float32 otherwise. Gradients of
    torch reach the first three arguments.

    References
    ----------
    The convolution in front of the recurrence of De et al., Griffin, arXiv:2402.19427.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import causal_conv
    >>> causal_conv(np.arange(5.0)[:, None], np.array([[-1.0, 1.0]])).ravel()  # differences
    array([0., 1., 1., 1., 1.])
    """
    check_bool(return_state=return_state)
    x, weight, bias = dense_arrays({"x": (x, "TC"), "weight": (weight, "Ck"), "bias": (bias, "C")}, ("bias",))
    T, width = x.shape[-2], weight.shape[-1]
    arguments = {"x": (x, 2), "weight": (weight, 2), "bias": (bias, 1), "state": (state, 2)}
    given = stack_arguments(arguments, like="x", mask=(mask, T))
    bounds = cumulative(offsets, T)
    refuse_packed(bounds, state, return_state)
    X, W, add, before = given.stacks
    b, _, C = X.shape
    if before is not None and tuple(before.shape[1:]) != (width - 1, C):
        raise ValueError(
            f"state has shape {tuple(before.shape[1:])} behind the leading axes; expected {(width - 1, C)}"
        )
    xp = namespace_of(X)
    device = device_of(X)
    places = _places(xp, X, given.mask, bounds)
    if given.mask is not None:
        X = xp.where(given.mask[..., None], X, xp.zeros_like(X))
        order = xp.argsort(xp.astype(~given.mask, xp.int32), axis=1, stable=True)  # unmasked positions first
        X = rows_of_items(X, order)
        places = rows_of_items(places[..., None], order)[..., 0]
    if before is None:
        before = xp.zeros((b, width - 1, C), dtype=X.dtype, device=device)
    all_ = xp.concat([before, X], axis=1)
    out = None
    for j in range(width):
        part = all_[:, width - 1 - j : width - 1 - j + T, :]
        if bounds is not None and j:
            part = xp.where((places >= j)[..., None], part, xp.zeros_like(part))
        part = part * W[:, None, :, width - 1 - j]
        out = part if out is None else out + part
    if add is not None:
        out = out + add[:, None, :]
    if given.mask is not None:
        ranks = running_counts(given.mask)[:, 1:] - 1
        out = rows_of_items(out, xp.where(given.mask, ranks, xp.zeros_like(ranks)))
        out = xp.where(given.mask[..., None], out, xp.zeros_like(out))
    out = given.give_back(out)
    if not return_state:
        return out
    tail = all_[:, T:, :]
    if given.mask is not None:
        counts = xp.sum(xp.astype(given.mask, xp.int64), axis=1, keepdims=True)
        tail = rows_of_items(all_, counts + xp.arange(width - 1, device=device))
    return out, _detached(given.give_back(tail))


def _places(xp: Any, X: Any, mask: Any, bounds: Any) -> Any:
    """Return the number of each position in its sequence, (1, T), or (b, T) counting only unmasked positions."""
    T, device = X.shape[1], device_of(X)
    rows = xp.arange(T, device=device)
    begins = xp.zeros_like(rows)
    if bounds is not None:
        ends = xp.asarray(bounds, device=device)
        begins = xp.take(ends, xp.searchsorted(ends[1:], rows, side="right"))
    if mask is None:
        return (rows - begins)[None, :]
    counts = running_counts(mask)
    return counts[:, 1:] - xp.take(counts, begins, axis=1) - 1


def _sigmoid(xp: Any, x: Any) -> Any:
    return x.sigmoid() if is_torch(x) else xp.exp(-xp.logaddexp(-x, xp.zeros_like(x)))


def _root(xp: Any, x: Any) -> Any:
    """Return the square root, in torch with a slope of at most `_STEEPEST`."""
    if not is_torch(x):
        return xp.sqrt(x)
    from levattn._kernels.latent.torch import held_root

    return held_root(x, _STEEPEST)


def _batched(array: Any, batch: tuple[int, ...]) -> Any:
    return reshaped(array, (*batch, *array.shape[1:]))


def _detached(array: Any) -> Any:
    """Return an array without gradients, in memory of its own."""
    if is_torch(array):
        return array.detach().clone()
    return namespace_of(array).asarray(array, copy=True)


@where_arrays_are
@by_numpy
def rotate_values(V: Any, positions: Any, /, *, base: float = 10000.0, inverse: bool = False) -> Any:
    r"""Rotate pairs of channels by angles that grow with the position.

    The rotation :math:`R_t` of RoPE in halves turns channels i and i + D/2 of position t by the angle
    :math:`t\, \text{base}^{-2i/D}`. With `inverse` it is :math:`R_{-t}`, by the negative angle. Rotate values by
    `inverse` before an attention with weights p, and rotate its output forward. Each value then comes out rotated by
    its distance,

    .. math:: R_t \sum_s p(s \mid t)\, R_{-s} V_s = \sum_s p(s \mid t)\, R_{t-s} V_s,

    so the output depends on relative positions, and the weights do not (VAPOR: value-embedded positional rotations).
    Only differences of positions matter: shifting all of them changes nothing. States hold the values before the
    forward rotation, and decoding needs the position of its own row only.

    Parameters
    ----------
    V : array of shape (..., T, D)
        Values, or queries or keys for RoPE, with an even D. They are float64, float32, float16 or bfloat16 of numpy,
        torch, CuPy or another library of the array-API standard.
    positions : array of int or float, shape (..., T)
        Positions; leading axes are broadcast. They may be as large as 1e9, and of another library.
    base : float
        Base of the angles, above 0.
    inverse : bool
        Whether to rotate by the negative angles.

    Returns
    -------
    array of shape (..., T, D)
        The rotated values, in the dtype of `V`.

    Raises
    ------
    TypeError, ValueError
        If D is odd, or an argument is of another kind, shape or range.

    Notes
    -----
    Time and memory O(TD). Angles, their cosines and sines are computed in float64, accurate to 1e-16 times the
    position.

    References
    ----------
    Dolga et al., arXiv:2402.17512 (VAPOR). Su et al., arXiv:2104.09864 (RoPE). The authors do not say which
    base they use; 10000 is the base of RoPE.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import latte, rotate_values
    >>> Q, K, V = np.random.default_rng(0).standard_normal((3, 50, 8))
    >>> def vapor(positions):
    ...     return rotate_values(latte(Q, K, rotate_values(V, positions, inverse=True)), positions)
    >>> np.allclose(vapor(np.arange(50)), vapor(np.arange(50) + 10_000_000))
    True
    """
    check_bool(inverse=inverse)
    V = dense_array("V", V)
    D = V.shape[-1] if V.ndim > 1 else 0
    if not D or D % 2:
        raise ValueError(f"V has shape {tuple(V.shape)}; expected (..., T, D) with an even D, whose halves are pairs")
    base = positive_number("base", base)
    given = stack_arguments({"V": (V, 2)}, like="V")
    (stack,) = given.stacks
    xp = namespace_of(stack)
    places = dense_array("positions", positions)
    if not _is_real(places):
        raise TypeError(f"positions has dtype {places.dtype}; expected whole numbers or real floats")
    numbers = namespace_of(places)
    places = moved(numbers.astype(without_gradient(places), numbers.float64), stack)
    if not places.shape or places.shape[-1] != V.shape[-2]:
        raise ValueError(
            f"positions has shape {tuple(places.shape)}; expected (..., {V.shape[-2]}), one entry a row of V"
        )
    if len(places.shape) >= V.ndim or any(
        size not in (1, whole) for size, whole in zip(places.shape[-2::-1], V.shape[-3::-1], strict=False)
    ):
        raise ValueError(
            f"positions has shape {tuple(places.shape)}, and V {tuple(V.shape)}; expected leading axes that broadcast "
            "to the leading axes of V"
        )
    half = D // 2
    speeds = base ** (xp.arange(half, dtype=xp.float64, device=device_of(stack)) * (-2 / D))
    angles = places[..., None] * (-speeds if inverse else speeds)
    c, s = (xp.astype(part, stack.dtype) for part in (xp.cos(angles), xp.sin(angles)))
    values = xp.reshape(stack, tuple(V.shape))
    a, b = values[..., :half], values[..., half:]
    rotated = xp.concat([a * c - b * s, a * s + b * c], axis=-1)
    return given.give_back(xp.reshape(rotated, stack.shape))


def _is_real(array: Any) -> bool:
    kind = dtype_name(array.dtype)  # which torch's compiler can follow
    return "int" in kind or "float" in kind
