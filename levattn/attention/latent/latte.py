"""Latte: latent attention, in time linear in the number of positions."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from levattn._core.arrays import is_torch, on_cuda
from levattn._core.checks import check_bool
from levattn._core.device import where_arrays_are
from levattn._core.jax import by_numpy
from levattn._kernels import kernels_for
from levattn._kernels.latent import GivenSteps, LatentSteps
from levattn.attention.arguments import (
    as_given,
    cumulative,
    dense_arrays,
    latent_attention,
    launched_again,
    plain_arrays,
    reshaped,
    stack_arguments,
    state_after,
    state_stacks,
)
from levattn.states import SoftmaxState
from levattn.states.softmax import held_sums, with_sums

_KINDS = np.dtype(np.float32), np.dtype(np.float64)


def plain_call(Q: Any, K: Any, V: Any, causal: bool) -> Any:
    """Return the output of a call without further arguments, or None unless its arrays are plain."""
    if not _are_plain(Q, K, V) or min(Q.ndim, V.ndim) < 2:
        return None
    *batch, T, L = Q.shape
    U, D = V.shape[-2:]
    if K.shape != (*batch, U, L) or V.shape != (*batch, U, D) or not L or not D or (causal and T != U):
        return None
    if not all(array.flags.aligned and array.strides[-1] == array.itemsize for array in (Q, K, V)):
        return None
    b = math.prod(batch)
    Y = latent_attention(Q.reshape(b, T, L), K.reshape(b, U, L), V.reshape(b, U, D), causal=causal)
    return Y.reshape(*batch, T, D)


def plain_step(Q: Any, K: Any, V: Any, state: Any) -> tuple[Any, SoftmaxState] | None:
    """Return the output of rows and the state after them, or None unless arrays are plain and match the state.

    Arrays of numpy are plain, for one row, and tensors on a device as kernels read them.
    """
    if not isinstance(state, SoftmaxState):
        return None
    if is_torch(Q):
        return _step_of_tensors(Q, K, V, state) if is_torch(K) and is_torch(V) and Q.is_cuda else None
    if not _are_plain(Q, K, V):
        return None
    if Q.shape != (*state.batch, 1, state.latents) or K.shape != Q.shape or V.shape != (*state.batch, 1, state.d):
        return None
    return one_step(Q, K, V, None, state, state.batch)


def _step_of_tensors(Q: Any, K: Any, V: Any, state: SoftmaxState) -> tuple[Any, SoftmaxState] | None:
    from levattn._kernels.tensors import are_as_kernels_read

    if not are_as_kernels_read((Q, K, V)) or Q.ndim < 2:
        return None
    batch, T, sums = state.batch, Q.shape[-2], held_sums(state)
    if Q.shape != (*batch, T, state.latents) or K.shape != Q.shape or V.shape != (*batch, T, state.d) or sums is None:
        return None
    b = math.prod(batch)
    rows = Q.view(b, T, state.latents), K.view(b, T, state.latents), V.view(b, T, state.d)
    found = cast(GivenSteps, kernels_for("latent", Q)).step_as_given(*rows, sums)
    if found is None:
        return None
    Y, (m, s, S) = found
    after = m.reshape(*batch, state.latents), s.reshape(*batch, state.latents), S.reshape(*batch, *S.shape[1:])
    return Y.view(V.shape), with_sums(state, after)


def _are_plain(Q: Any, K: Any, V: Any) -> bool:
    """Tell whether all arrays are numpy's, in the same dtype, float32 or float64."""
    return type(Q) is type(K) is type(V) is np.ndarray and Q.dtype == K.dtype == V.dtype and V.dtype in _KINDS


def are_read_as_stored(*arrays: Any) -> bool:
    """Tell whether kernels of a device read these arrays without conversion: all in the same 16-bit format."""
    first = arrays[0]
    if not is_torch(first):  # torch's compiler must not trace beyond this line
        return on_cuda(first) and all(array.dtype == first.dtype and first.dtype.itemsize == 2 for array in arrays)
    if not first.is_cuda or first.dtype.itemsize != 2 or any(array.dtype != first.dtype for array in arrays):
        return False
    from levattn._kernels.tensors import follows_definition

    return not follows_definition(arrays)


def one_step(Q: Any, K: Any, V: Any, mask: Any, state: Any, batch: tuple[int, ...]) -> tuple[Any, SoftmaxState] | None:
    """Return the output of causal rows, shaped as V, and the state after them, or None if no kernel does the step.

    Leading axes are `batch`, for arrays of numpy only, or one axis of the product of `batch`.
    """
    sizes = batch, Q.shape[-1], V.shape[-1]
    fits = isinstance(state, SoftmaxState) and (state.batch, state.latents, state.d) == sizes
    if state is not None and not fits:
        return None
    in_main_memory, sums = isinstance(Q, np.ndarray), None if state is None else held_sums(state)
    if in_main_memory:
        if state is None or Q.shape[-2] != 1:
            return None
        m, s, S = sums = state.m, state.s, state.S
        if not (isinstance(m, np.ndarray) and isinstance(s, np.ndarray) and isinstance(S, np.ndarray)):
            return None
    elif not (is_torch(Q) or on_cuda(Q)):
        return None
    found = cast(LatentSteps, kernels_for("latent", Q)).step(Q, K, V, mask, sums)
    if found is None:
        return None
    Y, (m, s, S) = found
    if not in_main_memory:
        m, s, S = (reshaped(part, (*batch, *part.shape[1:])) for part in (m, s, S))
    return Y, with_sums(SoftmaxState(sizes[1], sizes[2], batch) if state is None else state, (m, s, S))


@where_arrays_are
@by_numpy
def latte(
    q_logits: Any,
    k_logits: Any,
    V: Any,
    /,
    *,
    causal: bool = True,
    mask: Any = None,
    offsets: Any = None,
    state: SoftmaxState | None = None,
    return_state: bool = False,
) -> Any:
    r"""Compute latent attention: every row mixes L averages of the values, one for each latent.

    The latents l are the hidden variable of a mixture:

    .. math::

        p(l \mid t) = \mathrm{softmax}_l\, Q_{t l}, \qquad
        p(s \mid l, t) = e^{K_{s l}} / \sum_{r \le t} e^{K_{r l}} \quad (s \le t), \qquad
        y_t = \sum_l p(l \mid t) \sum_s p(s \mid l, t) V_s,

    Without `causal` the sums run over all positions of the sequence. The weights of a row are at least 0 and sum to
    1 over positions, except for rows of zeros (below). So each channel of :math:`y_t` lies between the smallest and
    the largest value that row t sees, up to rounding. Causal row t equals the last row of the bidirectional form on
    the positions up to t.

    A latent takes no part in the softmax over latents until it has seen a position. It sees no masked position, and
    none with a logit of −inf for it. A row is zero if no latent takes part, or if its `q_logits` are −inf for all
    latents that do, where torch's softmax gives NaN. Other infinite logits and NaN act as in torch's softmax: −inf
    gives a weight of zero. NaN or +inf make every output that uses them NaN. The `k_logits` and V of a masked
    position are not used. Its `q_logits` are, because its row is an output like the others.

    Parameters
    ----------
    q_logits : array of float, shape (..., T, L)
        Logits of the latents for each row.
    k_logits : array of float, shape (..., U, L)
        Logits of the positions for each latent. U = T, unless `causal` is False and no `offsets` are
        given.
    V : array of float, shape (..., U, D)
        Values. The leading axes of all arrays broadcast as in numpy, so heads may share values. The arrays come from
        one library (numpy, CuPy, torch or another namespace of the array-API standard) and lie on one device. Numpy
        converts lists to arrays. Each array may be float64, float32, float16 or bfloat16.
    causal : bool
        True if row t sees positions up to t, False if it sees all of its sequence.
    mask : array of bool, shape (..., U), optional
        True for a position that takes part.
    offsets : array of int, shape (n + 1,), optional
        Bounds of packed sequences, ascending from 0 to T. Sequence i is ``offsets[i]:offsets[i + 1]`` along the axes
        T and U, and sees no other sequence. Other libraries call them ``cu_seqlens``. From lengths of the sequences
        they are ``np.cumsum([0, *lengths])``.
    state : SoftmaxState, optional
        The positions before, which every row sees as well, as `return_state` gave them. Its batch is the broadcast
        leading axes, followed by n for packed sequences. The call does not change it.
    return_state : bool
        True to return also the state after all positions.

    Returns
    -------
    array of shape (..., T, D)
        The output, in the dtype of V. With `return_state`, the pair of it and a `levattn.states.SoftmaxState`.

    Raises
    ------
    TypeError
        If an argument is no array of real floats (or of bool, or of int), or arrays come from several libraries or
        devices.
    ValueError
        If shapes do not match, or offsets do not ascend from 0 to T.

    See Also
    --------
    levattn.definitions.latte : The definition, in NumPy.

    Notes
    -----
    Time is O(TLD). Memory is O(LD), plus O(T(L + D)) for arrays of other precisions and layouts. States between runs
    of positions add O(TLD/4096) float64 numbers. Nothing of size T × T or T × L × D is formed. A decode step is a call
    with T = 1, a `state` and `return_state`.

    The computation is in float64 if any array is float64. Otherwise it is in float32, and sums of more than a few
    positions are in float64, so that errors do not grow with T. Sums are divided only when a row reads them, so
    values beyond about 1e28 in float32, or 1e298 in float64, may overflow. The largest logit that a row sees is
    subtracted in every exponential. So the result is accurate whatever the size of the logits, and does not depend
    on later positions. On a CUDA device, arrays of one format of 16 bits stay as they are, and weights are rounded
    to it. Then a row is off by at most six roundings of that format (2⁻¹¹ for float16, 2⁻⁸ for bfloat16) of the
    largest value.

    In torch, gradients reach `q_logits`, `k_logits` and V through an operator that ``torch.compile`` keeps whole.
    Gradients neither reach states nor come from them, and the compiler leaves states to Python. There are no second
    derivatives. Within ``torch.func`` (grad, vmap, jvp and others) the definitions run instead. They are much slower,
    and gradients keep 16 TL numbers and more.

    References
    ----------
    Dolga, Maystre, Cobzarenco, Barber, "Latte: Latent Attention for Linear Time Transformers", arXiv:2402.17512,
    section 3, equations of the bidirectional and the causal model.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import latte
    >>> rng = np.random.default_rng(0)
    >>> Q, K = rng.standard_normal((2, 100, 16))
    >>> V = rng.standard_normal((100, 8))
    >>> Y = latte(Q, K, V)
    >>> np.allclose(Y[0], V[0])  # the first row sees nothing else
    True
    >>> head, state = latte(Q[:60], K[:60], V[:60], return_state=True)
    >>> np.allclose(latte(Q[60:], K[60:], V[60:], state=state), Y[60:])
    True
    """
    check_bool(causal=causal, return_state=return_state)
    (Q, K, V), tensors = plain_arrays(q_logits, k_logits, V)
    arrays = Q, K, V
    if mask is None and offsets is None and state is None and not return_state:
        Y = plain_call(Q, K, V, bool(causal))
        if Y is None:
            Y = launched_again("latte", arrays, bool(causal), lambda: _answer(arrays, causal, None, None, None, False))
        return as_given(Y, tensors)
    if mask is None and offsets is None and causal and return_state:
        stepped = plain_step(Q, K, V, state)
        if stepped is not None:
            return as_given(stepped[0], tensors), stepped[1]
    found = _answer(arrays, causal, mask, offsets, state, return_state)
    return (as_given(found[0], tensors), found[1]) if return_state else as_given(found, tensors)


def _answer(arrays: tuple[Any, ...], causal: Any, mask: Any, offsets: Any, state: Any, return_state: Any) -> Any:
    """Return the result of `latte` for arrays of any kind, and if `return_state` the state."""
    q_logits, k_logits, V = arrays
    rows = "T" if causal or offsets is not None else "U"
    q_logits, k_logits, V = dense_arrays(
        {"q_logits": (q_logits, "TL"), "k_logits": (k_logits, rows + "L"), "V": (V, rows + "D")}
    )
    arguments = {"q_logits": (q_logits, 2), "k_logits": (k_logits, 2), "V": (V, 2)}
    names = tuple(arguments) if are_read_as_stored(q_logits, k_logits, V) else ()
    given = stack_arguments(arguments, like="V", mask=(mask, V.shape[-2]), stored=names)
    Q, K, V = given.stacks
    bounds = cumulative(offsets, Q.shape[1])
    steps = return_state and causal and offsets is None
    stepped = one_step(Q, K, V, given.mask, state, given.batch) if steps else None
    if stepped is not None:
        return given.give_back(stepped[0]), stepped[1]
    options = {"causal": bool(causal), "mask": given.mask, "state": state_stacks(state, given.batch, bounds, K, V)}
    Y = given.give_back(latent_attention(Q, K, V, offsets=bounds, **options))
    return (Y, state_after(state, given.batch, bounds, K, V, given.mask)) if return_state else Y
