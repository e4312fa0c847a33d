"""Attention over few keys and summaries of the others."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Literal

from levattn._core.checks import check_bool
from levattn._core.device import where_arrays_are
from levattn._core.jax import by_numpy
from levattn.attention.arguments import check_sizes, dense_array, reads_numbers
from levattn.attention.latent.window import check_scale
from levattn.attention.pruned.bidirectional import whole_attention
from levattn.attention.pruned.call import PrunedCall, given_scores, sized
from levattn.attention.pruned.causal import causal_attention
from levattn.attention.pruned.selection import SelectionRule, as_selection, exponent_of, rule_of
from levattn.attention.pruned.state import PrunedState, continued_rule
from levattn.functions import Power


@reads_numbers
@where_arrays_are
@by_numpy
def pruned_attention(
    Q: Any,
    K: Any,
    V: Any,
    /,
    selection: Any,
    *,
    f: Literal["softmax"] | float | Power = "softmax",
    scale: float | None = None,
    mask: Any = None,
    query_mask: Any = None,
    queries: Any = None,
    return_certificate: bool = False,
) -> Any:
    r"""Attention to a few keys, and to summaries of all the others.

    A query q attends exactly to a set E of keys: keys near it, keys with large scores, and the first keys of the
    sequence. The other keys form R clusters, and each cluster c counts as one more key:

    .. math::

        y = \sum_{j \in E} p_j v_j + \sum_c p_c \bar v_c, \qquad
        p_j \propto e^{z_j}, \quad p_c \propto W_c\, e^{\bar z_c}, \qquad
        \bar z_c = \frac{1}{W_c} \sum_{j \in c} w_j (z_j - \log w_j),
        \quad \bar v_c = \frac{1}{W_c} \sum_{j \in c} w_j v_j,

    with logits :math:`z_j = \text{scale} \langle q, k_j \rangle`, :math:`W_c = \sum_{j \in c} w_j`, and one
    normalization for all. The sums leave out, exactly, the members that q attends as near keys. The weights are
    :math:`w_j \propto \exp(\text{scale} \langle \bar q, k_j \rangle)` (within a factor of e³ of their cluster's) for
    the mean query q̄. So the summary is the tangent of the cluster's mass at q̄. With w = 1 it is the plain centroid
    with the logarithm of its count. Whatever the weights, :math:`W_c e^{\bar z_c} \le \sum_{j \in c} e^{z_j}` by
    Jensen's inequality: a summary never counts for more than its members. If the slots cover all keys, this is dense
    attention.

    Parameters
    ----------
    Q : array of shape (..., H, m, d)
        Queries: float64, float32, float16 or bfloat16 of numpy, torch, CuPy or another library of the array-API
        standard. With one head, (m, d).
    K : array of shape (..., G, n, d)
        Keys as they enter the attention (after rotary embedding). H is a multiple of G: query head h reads the keys
        of head ``h // (H / G)``, and one selection serves all of them.
    V : array of shape (..., G, n, D)
        Values.
    selection : Selection or number
        The keys to read, and the summaries of the others. A number is a budget: ``Selection(number)``. A share refers
        to the keys that the mask leaves.
    f : "softmax", float or Power
        The attention function: a number p ≥ 1 stands for weights :math:`|\text{scale} \langle q, k\rangle|^p`. There
        :math:`p_c \propto |c|\,|\bar z_c|^p` with w = 1, for keys turned to one side (k or −k), because f is even.
    scale : float, optional
        Factor of the products; 1/√d if it is None.
    mask : array of bool, shape (..., G, n), optional
        True for a key that takes part; leading axes are broadcast (give (..., 1, n) for one mask for all heads).
        The result is the same as without the other keys.
    query_mask : array of bool, shape (..., G, m), optional
        True for a query that counts. The rows of other queries are zero, and the selection ignores them. The default
        is `mask` where a window puts queries and keys at the same positions, else all true.
    queries : array of shape (..., H, s, d), optional
        Queries that select and summarize keys in place of Q; all of them count. For H heads, for G, or one for all.
        The selection then does not depend on Q, as `pruned_coverage` requires.
    return_certificate : bool, default False
        Whether to return bounds of the error as well.

    Returns
    -------
    array of shape (..., H, m, D)
        Outputs in the dtype of `V`. Gradients of torch reach Q, K and V; the selection and the weights w are constant.
        Rows that read no key are zero.
    PrunedCertificate
        The bounds, if `return_certificate`.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type, shape or value.
    NonFiniteError
        If scores are NaN, because Q or K holds NaN or infinity, or your own scores are NaN.

    See Also
    --------
    causal_pruned_attention : The same for keys up to a query's own, in one call or step by step.
    levattn.definitions.pruned_attention : The definition, in NumPy.

    Notes
    -----
    Time O(n R d + n d²) for the selection and O(m s (d + D)) for s slots a query. Memory O(m D + n (d + D)), and 2²²
    logits at a time (2²⁶ for tensors on a device).

    The selection reads numbers. So ``torch.compile`` leaves the call to Python, and ``torch.func.vmap``,
    ``torch.export`` and tensors without numbers are refused. ``torch.func.grad`` and jvp work.

    The guarantee of universal sets (`levattn.universal_set`) holds for abs(x)^p and thresholds. For softmax a
    selection is a heuristic whatever its scores. The certificate bounds the loss, and the summaries carry most of the
    mass that dropping the keys would lose.

    References
    ----------
    .. [1] Kannan, Bhattacharyya, Kacham and Woodruff, "LevAttention", arXiv:2410.05462 (universal sets).
    .. [2] Gonzalez, "Clustering to minimize the maximum intercluster distance", 1985 (where clusters begin).

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import pruned_attention
    >>> rng = np.random.default_rng(0)
    >>> Q, K, V = rng.standard_normal((3, 4, 500, 16))  # four heads
    >>> Y = pruned_attention(Q, K, V, 0.2)
    >>> Y.shape
    (4, 500, 16)
    >>> E = np.exp(Q @ K.swapaxes(1, 2) / 4)
    >>> dense = E @ V / E.sum(axis=2, keepdims=True)
    >>> float(np.linalg.norm(Y - dense) / np.linalg.norm(dense)) < 0.7  # keys without any structure are the worst case
    True
    >>> np.allclose(pruned_attention(Q, K, V, 1.0), dense)
    True
    """
    check_bool(return_certificate=return_certificate)
    selection = as_selection(selection)
    power = exponent_of(f)
    Q, K, V, heads = sized(Q, K, V)
    aligned = Q.shape[-2] == K.shape[-2]
    rule_for = cache(partial(rule_of, selection, power=power, causal=False, aligned=aligned))
    rule = rule_for(K.shape[-2])
    if queries is not None:
        queries = dense_array("queries", queries)
        check_sizes({"queries ": (queries, -2, "s"), "Q": (Q, -1, "d"), "queries": (queries, -1, "d")})
    arrays = Q, K, V, given_scores(selection.scores, K) if selection.kind == "given" else None, queries
    tied, stays = rule.slots.window > 0, power is None and rule.function is None and not return_certificate
    call = PrunedCall.of(
        arrays, heads, mask, query_mask, tied=tied, held=(), certified=return_certificate, stays=stays
    )
    factor = check_scale(scale, Q.shape[-1])
    with call.full_precision():
        return whole_attention(call, rule_for, factor, return_certificate)


@reads_numbers
@where_arrays_are
@by_numpy
def causal_pruned_attention(
    Q: Any,
    K: Any,
    V: Any,
    /,
    selection: Any,
    *,
    f: Literal["softmax"] | float | Power = "softmax",
    scale: float | None = None,
    mask: Any = None,
    return_state: bool = False,
    return_certificate: bool = False,
) -> Any:
    r"""Attention of each row to a few keys up to its own, and to summaries of the earlier others.

    Row i reads keys 0 to i only. The first rows, twice as many as there are slots (or more, by `Selection.start`),
    read all of these keys, as dense attention does. The mean row among them reads as many keys as there are slots.
    (With a threshold they are the rows of the first chunk.) After that, past keys and queries renew the selection and
    the summaries every ``renew_every`` positions. A row also reads all keys since the last renewal, up to its own.
    `pruned_attention` defines slots and summaries.

    Parameters
    ----------
    Q : array of shape (..., H, T, d)
        Queries, as for `pruned_attention`.
    K : array of shape (..., G, T, d)
        Keys at the same positions, as they enter the attention (after rotary embedding).
    V : array of shape (..., G, T, D)
        Values.
    selection : Selection, number or PrunedState
        The keys to read; a number is a budget. A share refers to the T positions of the call, also if the mask leaves
        fewer; from one half on, all rows are dense. Or the state after the earlier positions, which holds the
        selection: give `f` and `scale` again. To rounding, rows equal the rows of one call for all positions, if the
        budget is a number of slots. A state of a selection by given scores takes the scores of the next positions by
        `PrunedState.with_scores`.
    f : "softmax", float or Power
        The attention function, as for `pruned_attention`.
    scale : float, optional
        Factor of the products; 1/√d if it is None.
    mask : array of bool, shape (..., G, T), optional
        True for a position that takes part; leading axes are broadcast. Other rows equal the rows of the call without
        the masked positions, but for a share, which refers to all T. Masked rows are zero.
    return_state : bool, default False
        Whether to return the state after these positions as well. Then even a number that covers all keys is split.
    return_certificate : bool, default False
        Whether to return bounds of the error as well.

    Returns
    -------
    array of shape (..., H, T, D)
        Outputs in the dtype of `V`. Gradients of torch reach Q, K and V; the selection and the weights are constant.
    PrunedState
        The state after these positions, to go on with, if `return_state`. A call changes no state.
    PrunedCertificate
        The bounds, if `return_certificate`.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type, shape or value, or the state is of other heads or another `f`.
    NonFiniteError
        If scores are NaN, because Q or K holds NaN or infinity, or your own scores are NaN.

    See Also
    --------
    pruned_attention : Attention to keys on both sides.

    Notes
    -----
    The selection by a threshold of leverage scores is the set of the keys so far, from their second moment in float64
    alone. That is no guarantee for keys of a condition number above 10⁶ or so.

    Each renewal scales the weights of a summary to a mean of 1, in float64. The summary still stands for the same
    mass, so a state goes on for any number of positions. Later positions change no bit of a row, nor does another T,
    except through a share, which refers to T. For tensors on a device or with gradients they change the rounding
    alone, because the chunks of such tensors are one batch.

    Time O(T s (d + D) + T R (s + R) d / c) for s slots a query, R summaries and renewals every c positions. Memory
    O(T D + s (d + D)), and a state of O(s (d + D) + d²). Before the first selection the state has all keys, up to 2s
    or `Selection.start`. After it, it has fewer than s.

    References
    ----------
    Own construction, with the scores, sets and clusters that `pruned_attention` cites.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import causal_pruned_attention
    >>> Q, K, V = np.random.default_rng(0).standard_normal((3, 4, 300, 16))  # four heads
    >>> Y = causal_pruned_attention(Q, K, V, 64)
    >>> first, state = causal_pruned_attention(Q[:, :200], K[:, :200], V[:, :200], 64, return_state=True)
    >>> second = causal_pruned_attention(Q[:, 200:], K[:, 200:], V[:, 200:], state)
    >>> np.allclose(np.concatenate([first, second], axis=1), Y)
    True
    """
    check_bool(return_state=return_state, return_certificate=return_certificate)
    call, rule, factor, state = _causal_call(Q, K, V, selection, (f, scale, mask), return_state, return_certificate)
    with call.full_precision():
        return causal_attention(call, rule, factor, state, return_state, return_certificate)


@reads_numbers
@where_arrays_are
@by_numpy
def state_alone(Q: Any, K: Any, V: Any, /, selection: Any, *, scale: float | None = None, mask: Any = None) -> Any:
    """Return the state of `causal_pruned_attention` by softmax after these positions, without their outputs."""
    call, rule, factor, state = _causal_call(Q, K, V, selection, ("softmax", scale, mask), True, False)
    with call.full_precision():
        return causal_attention(call, rule, factor, state, True, False, silent=True)


def _causal_call(
    Q: Any, K: Any, V: Any, selection: Any, options: tuple[Any, Any, Any], goes_on: bool, certified: bool
) -> tuple[PrunedCall, SelectionRule, float, PrunedState | None]:
    """Return a causal call, its rule, the factor of its products and the state before it, or raise.

    `options`: f, scale and mask.
    """
    f, scale, mask = options
    state = selection if isinstance(selection, PrunedState) else None
    power = exponent_of(f)
    Q, K, V, heads = sized(Q, K, V)
    T = K.shape[-2]
    if Q.shape[-2] != T:
        raise ValueError(
            f"Q has {Q.shape[-2]} rows and K has {T}; expected as many: give earlier keys in the state of an earlier "
            "call, as selection"
        )
    if state is None:
        selection = as_selection(selection)
        # if a state goes on, a number of slots does not depend on the positions of this call
        endless = goes_on and isinstance(selection.budget, int)
        rule = rule_of(selection, T, power=power, causal=True, aligned=True, endless=endless)
        given = selection.scores
    else:
        rule, given = continued_rule(state, power), state.next_scores
    arrays = Q, K, V, given_scores(given, K) if rule.kind == "given" else None, None
    held = () if state is None else state.parts
    call = PrunedCall.of(arrays, heads, mask, None, tied=True, held=held, certified=certified)
    return call, rule, check_scale(scale, Q.shape[-1]), state
