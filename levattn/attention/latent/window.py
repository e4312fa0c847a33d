"""Softmax attention in a sliding window, in slices: memory grows with the window, not with all pairs of positions."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import numpy as np

from levattn._core.arrays import is_torch
from levattn._core.checks import positive_number, real_number, whole_number
from levattn._core.device import where_arrays_are
from levattn._core.jax import by_numpy
from levattn._kernels.pairwise import surely_finite
from levattn.attention.arguments import (
    compiling,
    cumulative,
    dense_arrays,
    device_of,
    empty_output,
    heads_of,
    masked_first,
    namespace_of,
    rows_of_items,
    running_counts,
    stack_arguments,
)

_PAIRS = 1 << 20  # pairs of positions held at a time, over all heads: about the size of the last cache
_MANY_PAIRS = 1 << 24  # the same if logits are not written, or on a device, which needs large calls
_LEAST = 32  # rows of a block: the products of smaller blocks cost more than the pairs that they save


Overlap = Literal["mixture", "exclusive"]


@dataclass(frozen=True)
class Window:
    r"""The window of positions that a row sees by softmax attention, and how its logits are formed.

    Where a function takes a window, a whole number stands for a window of this size.

    Parameters
    ----------
    size : int
        W, at least 1: the number of positions that a row sees, including its own.
    overlap : {"mixture", "exclusive"}
        Whether the latents of `macchiato` see the positions of the window, too.
    scale : float, optional
        Factor of the products of queries and keys; :math:`1/\sqrt d` if it is None.
    softcap : float, optional
        Logits x of the window become :math:`c \tanh(x/c)` with this c > 0.

    Raises
    ------
    TypeError, ValueError
        If an option has a wrong type or is out of range.

    See Also
    --------
    levattn.attention.macchiato : A mixture of a window and latents.

    Notes
    -----
    A record of options: time and memory O(1).

    References
    ----------
    Dolga et al., arXiv:2402.17512v5, Latte-Macchiato. The overlap "exclusive" is ours.

    Examples
    --------
    >>> from levattn.attention import Window
    >>> Window(128, overlap="exclusive")
    Window(size=128, overlap='exclusive', scale=None, softcap=None)
    """

    size: int
    _: KW_ONLY
    overlap: Overlap = "mixture"
    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        object.__setattr__(self, "size", whole_number("window", self.size))  # numbers of Python, not of NumPy
        if self.overlap not in get_args(Overlap):
            raise ValueError(f"overlap is {self.overlap!r}; expected 'mixture' or 'exclusive'")
        if self.scale is not None:
            object.__setattr__(self, "scale", check_scale(self.scale, 1))
        if self.softcap is not None:
            softcap = positive_number("softcap", self.softcap, what="a finite number above 0, or None for no bound")
            object.__setattr__(self, "softcap", softcap)


def window_of(given: Any) -> Window:
    """Return a window, or the window of a given size."""
    return given if isinstance(given, Window) else Window(given)


@where_arrays_are
@by_numpy
def window_attention(
    q: Any,
    k: Any,
    V: Any,
    /,
    window: Window | int,
    *,
    mask: Any = None,
    offsets: Any = None,
) -> Any:
    r"""Softmax attention of each position to itself and the window − 1 positions before it.

    .. math:: y_t = \sum_{s \in (t-W, t]} p(s|t) V_s, \qquad
       p(s|t) = \mathrm{softmax}_s\; \phi(\text{scale}\, \langle q_t, k_s \rangle),

    over the window, with :math:`\phi(x) = c \tanh(x/c)` for ``softcap = c`` and
    :math:`\phi(x) = x` without. It is exact: with a window of at least T it is causal softmax attention. Weights of a
    row sum to 1. Masked positions have no place: other rows equal the rows of the sequence without
    masked positions, and rows of masked positions are zero. NaN and infinite numbers affect only the rows that see
    them. Such a number in a value makes its channel NaN in these rows, and such a number in a key all channels.

    Parameters
    ----------
    q : array of shape (..., H, T, d)
        Queries: float64, float32, float16 or bfloat16 of numpy, torch, CuPy or another library of the array-API
        standard. With one head, (T, d).
    k : array of shape (..., G, T, d)
        Keys, of the same library and device. H is a multiple of G: query head h reads the keys of head ``h // (H /
        G)``.
    V : array of shape (..., G, T, D)
        Values.
    window : Window or int
        A `Window`, whose overlap has no meaning here, or its size W.
    mask : array of bool, shape (..., G, T), optional
        True for a position that takes part; leading axes are broadcast. Nothing of the others is used.
    offsets : array of int, shape (n + 1,), optional
        Where packed sequences begin, ending with T: ``np.cumsum([0, *lengths])``. No sequence sees another.

    Returns
    -------
    array of shape (..., H, T, D)
        The output, in the dtype of `V`. The precision is float64 if an argument has it, and float32 otherwise.
        Gradients of torch reach q, k and V.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another kind, shape or range.

    Notes
    -----
    Time O(T W (d + D)) for each head, in blocks of W/2 rows against 3W/2 keys. Memory O(T D), and some 2²⁰ logits at a
    time (2²⁴ in other libraries than numpy). For gradients torch keeps O(T W) bits, or numbers with a softcap.

    Later positions change no bit of a row. The array library computes the products, and its rounding depends on the
    shapes of the factors. So rows agree only to rounding for another T, and in torch with a softcap for other batches.

    While ``torch.compile`` or ``torch.export`` traces a call, it takes all blocks at once, in one graph for all
    lengths beyond the window. Memory is then O(T W) where torch's kernel writes logits.

    Gradients can be differentiated again with a softcap, and without one inside
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``. The other kernels of torch have first derivatives only.
    Forward mode works, alone and over reverse mode.

    References
    ----------
    Beltagy, Peters, Cohan, arXiv:2004.05150 (the window). Dolga et al., arXiv:2402.17512, where it is one component of
    a mixture.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import window_attention
    >>> q, k, V = np.random.default_rng(0).standard_normal((3, 100, 8))
    >>> Y = window_attention(q, k, V, 16)
    >>> p = np.exp(k[50 - 15 : 50 + 1] @ q[50] / np.sqrt(8))
    >>> np.allclose(Y[50], p / p.sum() @ V[50 - 15 : 50 + 1])
    True
    """
    window = window_of(window)
    q, k, V = dense_arrays({"q": (q, "Td"), "k": (k, "Td"), "V": (V, "TD")})
    heads = heads_of(q, k, V)
    given = stack_arguments(heads.of_queries(q=q) | {"k": (k, 2), "V": (V, 2)}, like="V", mask=(mask, V.shape[-2]))
    bounds = cumulative(offsets, q.shape[-2])
    options = window_options(window, q.shape[-1])
    if given.mask is None:
        Y, _ = windowed(*given.stacks, **options, offsets=bounds)
        return heads.joined(given.give_back(Y))
    order = masked_first(given.mask, bounds)
    stacks = (rows_of_items(x, order) for x in given.stacks)
    mask = rows_of_items(given.mask[..., None], order)[..., 0]
    Y, _ = windowed(*stacks, **options, mask=mask, offsets=bounds)
    back = namespace_of(order).argsort(order, axis=1)
    return heads.joined(given.give_back(rows_of_items(Y, back)))


def window_options(window: Window, d: int) -> dict[str, Any]:
    """Return the arguments of `windowed`, for keys of d columns."""
    return {"window": window.size, "scale": check_scale(window.scale, d), "softcap": window.softcap}


def check_scale(scale: Any, d: int) -> float:
    """Return the factor of the products of queries and keys, or raise."""
    if scale is None:
        return 1 / math.sqrt(max(d, 1))
    number = real_number("scale", scale, what="a finite number, or None for 1/√d")
    if not math.isfinite(number):
        raise ValueError(f"scale is {scale!r}; expected a finite number, or None for 1/√d")
    return number


def windowed(
    q: Any,
    k: Any,
    V: Any,
    *,
    window: int,
    scale: float,
    softcap: float | None = None,
    mask: Any = None,
    offsets: Any = None,
) -> tuple[Any, Any]:
    """Return the output (b, g, T, D) of attention in a window, and which rows see a position, (b, T).

    The second result is None if all rows do. Rows that see no position are zero.

    q: (b, g, T, d), g queries for each key and position.

    k, V: (b, U, d) and (b, U, D). Row t is at position t + U − T; with several sequences U = T.

    mask: (b, U) bool, False for a position that no row sees; its key and value are not used.

    offsets: as `cumulative` returns it.
    """
    xp = namespace_of(q)
    (b, g, T, _), U = q.shape, k.shape[1]
    device = device_of(q)
    if not b * g * T:
        return empty_output(q, k, V), None
    window = window if compiling() else min(window, U)
    rows = xp.arange(U - T, U, device=device)
    begins = xp.zeros_like(rows)
    if offsets is not None:
        bounds = xp.asarray(offsets, device=device)
        begins = xp.take(bounds, xp.searchsorted(bounds[1:], rows, side="right"))
    lowest = xp.maximum(rows - (window - 1), begins)
    seen = spoilt = None
    if mask is not None:
        seen = _any_in_window(xp, mask, lowest)
        k, V = (xp.where(mask[..., None], x, xp.zeros_like(x)) for x in (k, V))  # NaN there would spread
        q = xp.where(seen[:, None, :, None], q, xp.zeros_like(q))  # large ones overflow in torch's gradients
    if not surely_finite(q, k, V):  # zero times NaN is NaN: keep NaN out of products and gradients
        asks, whole = (xp.all(xp.isfinite(x), axis=-1, keepdims=True) for x in (q, k))
        good = xp.isfinite(V)
        spoilt = _any_in_window(xp, ~(good & whole), lowest)[:, None, :, :] | ~asks
        q, k, V = (xp.where(flags, x, xp.zeros_like(x)) for flags, x in ((asks, q), (whole, k), (good, V)))
    if compiling():
        Y = _at_once(xp, q, k, V, mask, (rows, lowest), window, scale, softcap)
    else:
        Y = _in_runs(xp, q, k, V, mask, (rows, lowest), window, scale, softcap)
    Y = xp.astype(Y, V.dtype, copy=False)  # autocast makes products of half precision
    if spoilt is not None:
        Y = xp.where(spoilt, xp.asarray(math.nan, dtype=Y.dtype, device=device), Y)
    return (Y if seen is None else xp.where(seen[:, None, :, None], Y, xp.zeros_like(Y))), seen


def _in_runs(
    xp: Any, q: Any, k: Any, V: Any, mask: Any, places: tuple[Any, Any], window: int, scale: float, softcap: Any
) -> Any:
    """Return the output (b, g, T, D) of rows at some places, each from the lowest position that it sees."""
    (b, g, T, _), U, (rows, lowest) = q.shape, k.shape[1], places
    block = max(1, min(T, max(_LEAST, window // 2)))
    pairs = g * block * (block + window - 1)
    held = _PAIRS if isinstance(q, np.ndarray) else _MANY_PAIRS
    items = max(1, min(b, held // pairs))
    run = max(1, held // (items * pairs)) * block
    cuts = [(low, min(low + run, T - T % block)) for low in range(0, T - T % block, run)]
    cuts += [(T - T % block, T)] if T % block else []
    outputs = []
    for q_, k_, V_, mask_ in zip(*(_cut(x, items, b) for x in (q, k, V, mask)), strict=True):
        queries = _slabs(xp, q_, 2, 0, 0, cuts)
        others = (_slabs(xp, x, 1, U - T, window - 1, cuts) for x in (k_, V_, mask_))
        results = []
        for (low, high), slab_q, slab_k, slab_v, flags in zip(cuts, queries, *others, strict=True):
            step = min(block, high - low)
            here, least = (xp.reshape(x[low:high], (-1, step)) for x in (rows, lowest))
            sees = _sees(xp, here, least, window)
            results.append(_slice(xp, slab_q, slab_k, slab_v, flags, sees, step, scale, softcap))
        outputs.append(results[0] if len(results) == 1 else xp.concat(results, axis=2))
    return outputs[0] if len(outputs) == 1 else xp.concat(outputs, axis=0)


def _at_once(
    xp: Any, q: Any, k: Any, V: Any, mask: Any, places: tuple[Any, Any], window: int, scale: float, softcap: Any
) -> Any:
    """Return the output (b, g, T, D) while torch traces the call: loops would make T a constant of the graph."""
    T, U, (rows, lowest) = q.shape[2], k.shape[1], places
    if window >= U:
        place = xp.arange(U, device=device_of(q))
        sees = (place >= lowest[:, None]) & (place <= rows[:, None])
        return _slice(xp, q, k, V, mask, sees[None, ...], T, scale, softcap)
    pad = sys.modules["torch"].nn.functional.pad
    block = 1 if T == 1 else max(_LEAST, window // 2)
    more = (T // block + 2) * block - T  # rows that are dropped: torch makes other graphs for none, and for one block
    k, V = (pad(x, (0, 0, window - 1, more))[:, U - T :, :] for x in (k, V))
    mask = None if mask is None else pad(mask, (window - 1, more))[:, U - T :]
    rows, lowest = xp.arange(U - T, U + more, device=device_of(q)), pad(lowest, (0, more))
    sees = _sees(xp, rows.unflatten(0, (-1, block)), lowest.unflatten(0, (-1, block)), window)
    return _slice(xp, pad(q, (0, 0, 0, more)), k, V, mask, sees, block, scale, softcap)[:, :, :T, :]


def _any_in_window(xp: Any, flags: Any, lowest: Any) -> Any:
    """Tell whether a flag (b, U, ...) is set from the lowest position of a row to its own, (b, T, ...)."""
    counts = running_counts(flags)
    return counts[:, flags.shape[1] - lowest.shape[0] + 1 :, ...] > xp.take(counts, lowest, axis=1)


def _cut(x: Any, size: int, count: int) -> Any:
    """Return an array in runs along its first axis; in torch the gradient of all of them is one array."""
    if x is None:
        return [None] * -(-count // size)
    if size >= count:
        return [x]
    return x.split(size) if is_torch(x) else [x[low : min(low + size, count), ...] for low in range(0, count, size)]


def _slabs(xp: Any, x: Any, axis: int, skipped: int, lead: int, cuts: list[tuple[int, int]]) -> Iterator[Any]:
    """Return the parts of an array that runs of rows read: ``skipped + low − lead`` to ``skipped + high`` of each.

    Zeros stand for positions before the first.
    """
    if x is None:
        yield from [None] * len(cuts)
    elif is_torch(x):  # the gradient of each slice has the size of x, so slices would take time T²
        head, *pieces = x.split([skipped, *(high - low for low, high in cuts)], axis)
        held = head.narrow(axis, max(skipped - lead, 0), min(skipped, lead))
        missing = lead - held.shape[axis]
        if missing:
            held = xp.concat([x.new_zeros((*x.shape[:axis], missing, *x.shape[axis + 1 :])), held], axis=axis)
        for piece in pieces:
            slab = xp.concat([held, piece], axis=axis) if lead else piece
            yield slab
            held = slab.narrow(axis, slab.shape[axis] - lead, lead)
    else:
        before = (slice(None),) * axis
        for low, high in cuts:
            first = skipped + low - lead
            slab = x[(*before, slice(max(first, 0), skipped + high), ...)]
            if first < 0:
                shape = (*x.shape[:axis], -first, *x.shape[axis + 1 :])
                zeros = xp.zeros(shape, dtype=x.dtype, device=device_of(x))
                slab = xp.concat([zeros, slab], axis=axis)
            yield slab


def _sees(xp: Any, rows: Any, lowest: Any, window: int) -> Any:
    """Tell which positions of its slab each row of a block (N, step) sees, (N, step, step + window − 1)."""
    step, rows, lowest = rows.shape[1], rows[..., None], lowest[..., None]
    base = rows[:, :1, :] - (window - 1)
    place = xp.arange(step + window - 1, dtype=xp.int32, device=device_of(rows))
    least, most = (xp.astype(x - base, xp.int32) for x in (lowest, rows))
    return (place >= least) & (place <= most)


def _blocks(xp: Any, slab: Any, step: int, size: int) -> Any:
    """Return the overlapping parts of an array (b, n, ...) that begin `step` apart, (b, N, size, ...)."""
    count = (slab.shape[1] - size) // step + 1
    if not compiling() and count == 1:
        return slab[:, None, ...]
    if is_torch(slab):
        return slab.unfold(1, size, step).movedim(-1, 2)
    return xp.stack([slab[:, low : low + size, ...] for low in range(0, count * step, step)], axis=1)


def _slice(
    xp: Any, q: Any, k: Any, V: Any, mask: Any, sees: Any, step: int, scale: float, softcap: float | None
) -> Any:
    """Return the output (b, g, n, D) of some blocks of rows."""
    b, g, n, d = q.shape
    size = sees.shape[-1]
    count = n // step
    q = xp.reshape(xp.permute_dims(xp.reshape(q, (b, g, count, step, d)), (0, 2, 1, 3, 4)), (b, count, g * step, d))
    k, V = _blocks(xp, k, step, size), _blocks(xp, V, step, size)
    sees = sees[None, ...]
    if mask is not None:
        sees = sees & _blocks(xp, mask, step, size)[:, :, None, :]
    if g > 1:
        shape = (sees.shape[0], count, g * step, size)
        sees = xp.reshape(xp.broadcast_to(sees[:, :, None, :, :], (*shape[:2], g, step, size)), shape)
    Y = (
        _fused(q, k, V, sees, scale)
        if softcap is None and _is_fused(q, k, V)
        else _explicit(xp, q, k, V, sees, scale, softcap)
    )
    Y = xp.reshape(Y, (b, count, g, step, V.shape[-1]))
    return xp.reshape(xp.permute_dims(Y, (0, 2, 1, 3, 4)), (b, g, count * step, V.shape[-1]))


def _explicit(xp: Any, q: Any, k: Any, V: Any, sees: Any, scale: float, softcap: float | None) -> Any:
    """Return the softmax of some products times values; zero if a row sees no position."""
    logits = xp.matmul(q * (scale if softcap is None else scale / softcap), xp.matrix_transpose(k))
    if softcap is not None:
        logits = softcap * xp.tanh(logits)
    logits = xp.where(sees, logits, xp.asarray(-math.inf, dtype=logits.dtype, device=device_of(logits)))
    top = xp.max(logits, axis=-1, keepdims=True)
    E = xp.exp(logits - xp.where(top == -math.inf, xp.zeros_like(top), top))
    total = xp.sum(E, axis=-1, keepdims=True)
    return xp.matmul(E, V) / xp.where(total == 0, xp.ones_like(total), total)


def _is_fused(*arrays: Any) -> bool:
    """Tell whether to call torch's fused kernels, which have no forward mode."""
    if not is_torch(arrays[0]):
        return False
    from levattn._kernels import tensors

    return not tensors.has_tangent(arrays)


def _fused(q: Any, k: Any, V: Any, sees: Any, scale: float) -> Any:
    """Return softmax attention by torch's fused kernels; arbitrary numbers if a row sees no position."""
    sees = sees | ~sees.any(-1, keepdim=True)  # an empty softmax is NaN in some releases
    torch = sys.modules["torch"]
    return torch.nn.functional.scaled_dot_product_attention(q, k, V, attn_mask=sees, scale=scale)
