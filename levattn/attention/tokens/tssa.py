"""Token statistics attention: heads scale their tokens by second moments, in time linear in the number of tokens."""

from __future__ import annotations

from typing import Any

from levattn._core.arrays import is_torch
from levattn._core.checks import check_bool
from levattn._core.device import where_arrays_are
from levattn._core.jax import by_numpy
from levattn._kernels import kernels_for
from levattn.attention.arguments import as_given, launched_again, plain_arrays, reads_numbers, reshaped, untraced
from levattn.attention.tokens.arguments import (
    NUMBERS,
    Form,
    TokenForm,
    checked_call,
    entered,
    form_of,
    is_of_numbers,
    token_state_after,
)
from levattn.states import TokenState


@where_arrays_are
@by_numpy
def tssa(
    W: Any,
    temperature: Any = 1.0,
    /,
    *,
    form: TokenForm | Any = "diag_leverage",
    causal: bool = True,
    mask: Any = None,
    offsets: Any = None,
    state: TokenState | None = None,
    return_state: bool = False,
) -> Any:
    r"""Token statistics self-attention: each head shrinks its part of a token by second moments of its tokens.

    Each head k has projections :math:`w_{kt} = U_k^\top z_t` of tokens :math:`z_t`. Memberships
    :math:`\Pi_{kt}` distribute a token over the heads, and

    .. math::

        y_{kt} = -c \, \frac{\Pi_{kt}\, w_{kt}}{1 + c\, m_{kt}}, \qquad
        m_{kt} = \frac{\sum_s \Pi_{ks}\, w_{ks}^2}{\sum_s \Pi_{ks}},

    for each channel, with sums over the tokens :math:`s \le t` if `causal`, and otherwise over all. The memberships
    are :math:`\Pi_{\cdot t} = \mathrm{softmax}_k(\theta_k (\ell_{kt} + d\, b_{kt}))` over the heads, with temperatures
    :math:`\theta`, a bias b, and

    - ``"diag_leverage"``, from the authors' code: :math:`\ell_{kt} = \sum_i w_{kti}^2 / \sum_s w_{ksi}^2` over the
      channels. This is the diagonal leverage score of the token (online, among the tokens so far, if `causal`);
    - ``"norm"``, from the paper: :math:`\ell_{kt} = \|w_{kt}\|^2`, with :math:`\theta = 1/(2\eta)`;
    - ``"leverage"``: :math:`\ell_{kt}`, the leverage score of the token among all tokens of its head; not if `causal`;
    - ``"uniform"``: :math:`\Pi = 1/h`, for any temperature;
    - an array: :math:`\ell` itself.

    The paper's operator has "norm" and tied outputs, ``c = D / eps**2``, and outputs times a step τ/n. Here D is
    the number of channels of z (usually h d). Its rows are the last rows of the bidirectional form on their prefix.
    The released operator has ``c = 1``, no step and untied outputs. Its rows differ from the bidirectional form,
    because each membership keeps the statistics of its own time. Multiply the outputs of all heads by
    :math:`[U_1, \dots, U_h]` (tied) or by another matrix (untied), and add the result to the tokens.

    Always :math:`|y| \le c\, \Pi\, |w|`. Other tokens enter only through 2d + 1 statistics of each head, so no
    value is copied. Use another layer for retrieval and recall, which need copies.

    Diagonal leverage scores become small for many tokens: their mean over N tokens is d/N, and the softmax of small
    logits is uniform. With ``TokenForm(normalize="mean")`` the operator multiplies scores by the number of tokens
    seen. Scores then have the mean d at any length, and a temperature of about :math:`d^{-1/2}` keeps logits of order
    1. With a decay below 1, old tokens have little weight.

    Parameters
    ----------
    W : array of float, shape (..., h, T, d)
        Projected tokens of h heads, of any library (numpy, CuPy, torch or another namespace of the array-API
        standard), in float64, float32, float16 or bfloat16. Strides are arbitrary: the kernels read
        ``X.unflatten(-1, (h, -1)).transpose(1, 2)`` of a layer's output in place, and the result has the same layout.
    temperature : float or array of float, shape (..., h)
        The temperatures θ. Leading axes of all arrays broadcast as in numpy.
    form : TokenForm, str or array of float, shape (..., h, T)
        Membership, normalization, bias, decay and c, a `TokenForm`. One of the names above, or ℓ, stands for the form
        with this membership.
    causal : bool
        True if token t sees the tokens up to itself, False if it sees all tokens of its sequence.
    mask : array of bool, shape (..., T), optional
        True for a token that takes part. Other tokens are ignored, and their outputs are 0.
    offsets : array of int, shape (n + 1,), optional
        Packed sequences, which do not see each other: from 0 to T, ascending, sequence i being
        ``offsets[i]:offsets[i + 1]``. Known elsewhere as ``cu_seqlens``. From numbers of tokens they are
        ``np.cumsum([0, *lengths])``.
    state : TokenState, optional
        If `causal`, the earlier tokens that tokens also see, as returned with `return_state`. Otherwise all tokens
        that they see: the call then adds none of its tokens. Its batch is (..., h), followed by n for packed
        sequences. It is not changed, and its `norms` are read for leverage scores only.
    return_state : bool
        True to return also the state after all tokens.

    Returns
    -------
    array of shape (..., h, T, d)
        The output in the dtype of W. With `return_state`, a pair of the output and a `levattn.states.TokenState`.

    Raises
    ------
    TypeError
        If an argument is not an array of real floats (or of bool, or of int), or arrays are of several libraries or
        devices.
    ValueError
        If shapes do not match, a number is out of range, or options exclude each other.

    See Also
    --------
    levattn.definitions.tssa : The definition, in NumPy.

    Notes
    -----
    Time O(T h d), memory for the result and O(h (T + d)). No other memory of size T × h × d is needed, except float32
    copies of tokens of 16 bits and their output. A decoding step is a call with T = 1, a `state` and `return_state`.

    The operator computes in float64 if any array is float64, and otherwise in float32. Sums of more than a few tokens
    are in float64, so errors do not grow with T. Like the released code, "diag_leverage" raises smaller sums of
    squares to 1e-12 (not causal: to 1e-24) and adds 1e-8 to sums of memberships, unless ``normalize="mean"``. The
    other forms have no such constants, and a moment 0/0 is 0. Squares must not overflow: in float32 tokens below 1e19.
    With ``normalize="mean"`` they must not underflow either: tokens above 1e-17.

    Gradients in float32 are right on the CPU wherever outputs are. If a moment or c is too large or small for that, or
    a logit is above 256, they are formed in float64, which takes longer. On a CUDA device c may have any size, too.
    But logits should be below 256 there, second moments m from 1e-24 to 1e16, and c m below 1e12. If the moments of a
    head are not, the gradients of its tokens and its temperature are NaN.

    In torch, gradients reach W, the temperature, the bias and an array of logits. ``torch.compile`` keeps the operator
    whole, except for "leverage" and calls with states. Gradients do not reach states, nor come from states. There are
    no second derivatives. Within ``torch.func`` the definitions run instead, far more slowly.

    References
    ----------
    .. [1] Wu, Ding, Lu, Pai, Zhang, Wang, Yu, Ma and Haeffele, "Token Statistics Transformer: Linear-Time Attention
       via Variational Rate Reduction", arXiv:2412.17810, section 3 (the operator) and Algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import tssa
    >>> W = np.random.default_rng(0).standard_normal((4, 100, 8))  # heads, tokens, channels
    >>> Y = tssa(W)
    >>> head, state = tssa(W[:, :60], return_state=True)
    >>> np.allclose(tssa(W[:, 60:], state=state), Y[:, 60:])
    True
    >>> paper = tssa(W, 0.5, form="norm")
    >>> np.allclose(paper[:, -1], tssa(W, 0.5, form="norm", causal=False)[:, -1])
    True
    """
    check_bool(causal=causal, return_state=return_state)
    return answer(W, temperature, form_of(form), causal, mask, offsets, state, return_state)


@reads_numbers
@where_arrays_are
@by_numpy
def memberships(
    W: Any,
    temperature: Any = 1.0,
    /,
    *,
    form: TokenForm | Any = "diag_leverage",
    causal: bool = True,
    mask: Any = None,
    offsets: Any = None,
    state: TokenState | None = None,
) -> Any:
    """Return the memberships of `tssa`: for each token a distribution over the heads.

    They show the tokens that matter to a head, as attention maps do, and weight the tokens of a state (`TokenState`).

    Parameters
    ----------
    W : array of float, shape (..., h, T, d)
        Tokens, projected to the heads.
    temperature, form, causal, mask, offsets, state : as in `tssa`
        Arguments of `tssa` that determine the memberships. A state needs only its `norms`.

    Returns
    -------
    array of shape (..., h, T)
        At least 0, summing to 1 over the heads; 0 for masked tokens. In float64 if any array is, else in float32,
        without gradients.

    Raises
    ------
    TypeError, ValueError
        As `tssa`.

    Notes
    -----
    Time O(T h d), memory for the result.

    References
    ----------
    Wu et al., arXiv:2412.17810, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import memberships
    >>> W = np.random.default_rng(0).standard_normal((4, 100, 8))
    >>> np.allclose(memberships(W).sum(axis=0), 1)
    True
    """
    check_bool(causal=causal)
    call = entered(checked_call(W, temperature, form_of(form), causal, mask, offsets, state), reads=False)
    x = call.x
    found = kernels_for("tokens", x.W).memberships(x)
    return reshaped(found, (*call.given.batch, *found.shape[1:]))


def answer(
    W: Any,
    temperature: Any,
    form: Form,
    causal: Any,
    mask: Any,
    offsets: Any = None,
    state: Any = None,
    return_state: bool = False,
) -> Any:
    """Return the result of `tssa` for the fields of a form."""
    arguments = W, temperature, form, causal, mask, offsets, state, return_state
    if return_state or state is not None:  # states are not tensors, so torch does not trace this call
        return untraced(_answer, *arguments)
    return _answer(*arguments)


def _answer(
    W: Any, temperature: Any, form: Form, causal: Any, mask: Any, offsets: Any, state: Any, return_state: bool
) -> Any:
    alone = mask is None and offsets is None and state is None and not return_state
    if not alone or not is_torch(W) or not W.is_cuda or not is_of_numbers(form, causal):
        return _computed(W, temperature, form, causal, mask, offsets, state, return_state)
    number = type(temperature) in NUMBERS
    arrays, others = ((W,), (temperature, form, causal)) if number else ((W, temperature), (None, form, causal))
    return launched_again(
        "tssa", arrays, others, lambda: _computed(W, temperature, form, causal, None, None, None, False)
    )


def _computed(
    W: Any, temperature: Any, form: Form, causal: Any, mask: Any, offsets: Any, state: Any, return_state: bool
) -> Any:
    membership, normalize, bias, *others = form
    numbers, named = isinstance(temperature, int | float), isinstance(membership, str)
    found, tensors = plain_arrays(W, None if numbers else temperature, None if named else membership, bias)
    if tensors:
        W, bias = found[0], found[3]
        temperature, membership = temperature if numbers else found[1], membership if named else found[2]
    fields = (membership, normalize, bias, *others)
    call = entered(checked_call(W, temperature, fields, causal, mask, offsets, state))
    Y, sums = kernels_for("tokens", call.x.W).forward(call.x, state=return_state)
    Y = as_given(call.given.give_back(Y), tensors)
    return (Y, token_state_after(call, sums)) if return_state else Y
