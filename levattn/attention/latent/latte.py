"""Latte: latent attention, in time linear in the number of positions."""

from __future__ import annotations

from typing import Any

from levattn._core.device import where_arrays_are
from levattn._core.jax import by_numpy
from levattn.attention.common.arguments import (
    cumulative,
    dense_arrays,
    latent_attention,
    stack_arguments,
    state_after,
    state_stacks,
)
from levattn.attention.common.space import as_given, plain_arrays
from levattn.attention.latent.plain import are_read_as_stored, one_step, plain_call, plain_step
from levattn.states import SoftmaxState


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
    lengths: Any = None,
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
        Logits of the positions for each latent. U = T, unless `causal` is False and neither `offsets` nor `lengths` is
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
        T and U, and sees no other sequence. Other libraries call them ``cu_seqlens``.
    lengths : array of int, shape (n,), optional
        Number of positions of each packed sequence, in place of `offsets`.
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
        If shapes do not match, offsets do not ascend from 0 to T, or both offsets and lengths are given.

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
    on later positions.

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
    (q_logits, k_logits, V), tensors = plain_arrays(q_logits, k_logits, V)
    whole = offsets is lengths is None
    steps = return_state and causal and whole
    if mask is None and whole:
        stepped = plain_step(q_logits, k_logits, V, state) if steps else None
        if stepped is not None:
            return as_given(stepped[0], tensors), stepped[1]
        Y = plain_call(q_logits, k_logits, V, bool(causal)) if state is None and not return_state else None
        if Y is not None:
            return as_given(Y, tensors)
    rows = "T" if causal or offsets is not None or lengths is not None else "U"
    q_logits, k_logits, V = dense_arrays(
        {"q_logits": (q_logits, "TL"), "k_logits": (k_logits, rows + "L"), "V": (V, rows + "D")}
    )
    arguments = {"q_logits": (q_logits, 2), "k_logits": (k_logits, 2), "V": (V, 2)}
    names = tuple(arguments) if are_read_as_stored(q_logits, k_logits, V) else ()
    given = stack_arguments(arguments, like="V", mask=(mask, V.shape[-2]), stored=names)
    Q, K, V = given.stacks
    bounds = cumulative(offsets, lengths, Q.shape[1])
    stepped = one_step(Q, K, V, given.mask, state, given.batch) if steps else None
    if stepped is not None:
        return as_given(given.give_back(stepped[0]), tensors), stepped[1]
    options = {"causal": bool(causal), "mask": given.mask, "state": state_stacks(state, given.batch, bounds, K, V)}
    Y = as_given(given.give_back(latent_attention(Q, K, V, offsets=bounds, **options)), tensors)
    return (Y, state_after(state, given.batch, bounds, K, V, given.mask)) if return_state else Y
