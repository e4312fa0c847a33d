"""Attention over few keys and summaries of the others."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal

from levattn._core.device import where_arrays_are
from levattn._core.jax import by_numpy
from levattn.attention.arguments import check_sizes, dense_array, heads_of, reads_numbers
from levattn.attention.latent.window import check_scale
from levattn.attention.pruned.bidirectional import whole_attention
from levattn.attention.pruned.call import PrunedCall
from levattn.attention.pruned.causal import causal_attention
from levattn.attention.pruned.slots import SCORES, SelectionRule, exponent_of, rule_of
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
    *,
    budget: float | None = None,
    size: int | None = None,
    epsilon: float | None = None,
    summaries: int | None = None,
    window: int | None = None,
    sinks: int | None = None,
    scores: Literal["residual", "expected", "leverage"] | Any = "residual",
    center: bool | None = None,
    f: Literal["softmax"] | float | Power = "softmax",
    causal: bool = False,
    chunk: int | None = None,
    state: PrunedState | None = None,
    return_state: bool = False,
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
    budget : int or float, optional
        Slots for each query: their number, or a share in (0, 1] of the keys that the mask leaves, as a float. If
        `causal`, the share is of the n positions of the call. `Slots.of` splits the slots that other options leave
        open. Give one of budget, size and epsilon. If a state is returned, even a number that covers all keys is
        split.
    size : int, optional
        Number of keys selected for each head of the keys: the keys with the largest scores, on ties the first.
    epsilon : float, optional
        Threshold: selects all keys with a score of at least this. With ``scores="leverage"`` and ``center=False``
        these are the `levattn.universal_set` of the keys for f(x) = x². If `causal`, they are the set of the keys so
        far, from their second moment in float64 alone. That is no guarantee for keys of a condition number above 10⁶
        or so.
    summaries : int, optional
        R, the number of clusters. 0, the default without a budget, drops all other keys.
    window : int, optional
        Number of keys near a query, as in `Slots`: on each side of it (itself included, unless 0). If `causal`, before
        the last selection. 0 without a budget.
    sinks : int, optional
        Number of first keys that are kept whatever their scores; 0 if not given.
    scores : {"residual", "expected", "leverage"} or array of shape (..., G, n)
        The scores that select keys. "expected": the logarithm of the expected weight for a normal query with the mean
        and covariance of the given queries [1]_. "residual": the expected score plus the logarithm of the squared
        distance to the center of the key's own cluster. The center is the mean of nearby keys; if `causal`, it is a
        key or an earlier summary. The distance is the change of the queries' logits, so keys that a summary would get
        wrong score high. "leverage": leverage scores, whatever the queries. An array: your own
        scores.
    center : bool, optional
        Whether to subtract the mean key before leverage scores are computed. The default is True for softmax, which
        the mean does not change. It changes other functions, so these take False only. An offset of all keys changes
        no selection, however large.
    f : "softmax", float or Power
        The attention function: a number p ≥ 1 stands for weights :math:`|\text{scale} \langle q, k\rangle|^p`. There
        :math:`p_c \propto |c|\,|\bar z_c|^p` with w = 1, for keys turned to one side (k or −k), because f is even.
    causal : bool, default False
        Whether row i reads keys 0 to i only. It reads all of them as long as the slots hold them (with a threshold,
        within the first chunk). After that, past keys and queries renew the selection and the summaries every `chunk`
        positions. A row also reads all keys since the last renewal, up to its own.
    chunk : int, optional
        Number of positions between two selections: with a budget as in `Slots.of`, else 64.
    state : PrunedState, optional
        Causal: the state after the earlier positions, from ``return_state=True``. It holds the options of selection:
        leave these out here, but give `f` and `scale` again. To rounding, rows equal the rows of one call for all
        positions.
    return_state : bool, default False
        Causal: whether to return the state after these positions as well.
    scale : float, optional
        Factor of the products; 1/√d if it is None.
    mask : array of bool, shape (..., G, n), optional
        True for a key that takes part; leading axes are broadcast (give (..., 1, n) for one mask for all heads).
        The result is the same as without the other keys, except that a causal budget refers to all n positions.
    query_mask : array of bool, shape (..., G, m), optional
        True for a query that counts. The rows of other queries are zero, and the selection ignores them. The default
        is `mask` where a window or `causal` puts queries and keys at the same positions, else all true. Do not give it
        if `causal`.
    queries : array of shape (..., H, s, d), optional
        Queries that select and summarize keys in place of Q; all of them count. For H heads, for G, or one for all.
        The selection then does not depend on Q, as `pruned_coverage` requires. Do not give it if `causal`.
    return_certificate : bool, default False
        Whether to return bounds of the error as well.

    Returns
    -------
    array of shape (..., H, m, D)
        Outputs in the dtype of `V`. Gradients of torch reach Q, K and V; the selection and the weights w are constant.
        Rows that read no key are zero.
    PrunedState
        The state after these positions, if `return_state`.
    PrunedCertificate
        The bounds, if `return_certificate`.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type, shape or value.
    NonFiniteError
        If scores are NaN, because Q or K holds NaN or infinity.

    See Also
    --------
    levattn.definitions.pruned_attention : The definition, in NumPy.

    Notes
    -----
    If `causal`, each renewal scales the weights of a summary to a mean of 1, in float64. The summary still stands for
    the same mass, so a state goes on for any number of positions. Later positions change no bit of a row, nor does
    another n, except through a budget, which refers to n. For tensors on a device or with gradients they change the
    rounding alone, because the chunks of such tensors are one batch.

    Time O(n R d + n d²) for the selection and O(m s (d + D)) for s slots a query. Memory O(m D + n (d + D)), and 2²²
    logits at a time (2²⁶ for tensors on a device). Causal: O(T s (d + D) + T R (s + R) d / chunk), and a state of
    O(s (d + D) + d²).

    The selection reads numbers. So ``torch.compile`` leaves the call to Python, and ``torch.func.vmap``,
    ``torch.export`` and tensors without numbers are refused. ``torch.func.grad`` and jvp work.

    The guarantee of universal sets (`levattn.universal_set`) holds for abs(x)^p and thresholds. For softmax a
    selection is a heuristic whatever its scores. The certificate bounds the loss, and the summaries carry most of the
    mass that dropping the keys would lose.

    References
    ----------
    .. [1] Devoto, Jeblick and Jégou, "Expected Attention", arXiv:2510.00636.
    .. [2] Kannan, Bhattacharyya, Kacham and Woodruff, "LevAttention", arXiv:2410.05462 (universal sets).
    .. [3] Gonzalez, "Clustering to minimize the maximum intercluster distance", 1985 (where clusters begin).

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import pruned_attention
    >>> rng = np.random.default_rng(0)
    >>> Q, K, V = rng.standard_normal((3, 4, 500, 16))  # four heads
    >>> Y = pruned_attention(Q, K, V, budget=0.2)
    >>> Y.shape
    (4, 500, 16)
    >>> E = np.exp(Q @ K.swapaxes(1, 2) / 4)
    >>> dense = E @ V / E.sum(axis=2, keepdims=True)
    >>> float(np.linalg.norm(Y - dense) / np.linalg.norm(dense)) < 0.7  # keys without any structure are the worst case
    True
    >>> np.allclose(pruned_attention(Q, K, V, budget=1.0), dense)
    True
    """
    power = exponent_of(f)
    Q, K, V = (dense_array(name, array) for name, array in (("Q", Q), ("K", K), ("V", V)))
    check_sizes({"Q": (Q, -1, "d"), "K": (K, -1, "d"), "K ": (K, -2, "n"), "V": (V, -2, "n")})
    m, n = Q.shape[-2], K.shape[-2]
    heads = heads_of(Q, K, V, names=("Q", "K", "V"))
    kind, given = (scores, None) if isinstance(scores, str) else ("given", dense_array("scores", scores))
    if given is None and kind not in SCORES:
        raise ValueError(f"scores is {scores!r}; expected one of {', '.join(SCORES)}, or an array of scores")
    options = {"budget": budget, "size": size, "epsilon": epsilon, "summaries": summaries, "window": window}
    options |= {"sinks": sinks, "chunk": chunk, "center": center}

    def rule_for(keys: int) -> SelectionRule:
        return rule_of(keys, options, kind=kind, power=power, causal=causal, aligned=m == n)

    if state is None:
        open_end = causal and return_state and isinstance(budget, Integral)
        rule = rule_for(max(n, int(budget or 0) + 1) if open_end else n)
    else:
        rule = continued_rule(state, options, kind, power)
    _refuse_mixed(causal, m, n, continued=state is not None or return_state, query_mask=query_mask, queries=queries)
    if given is not None and given.shape[-1:] != (n,):
        raise ValueError(f"scores has shape {tuple(given.shape)}; expected (..., {n}), one for each key")
    tied, held = causal or rule.slots.window > 0, () if state is None else state.parts
    if queries is not None:
        queries = dense_array("queries", queries)
        check_sizes({"queries ": (queries, -2, "s"), "Q": (Q, -1, "d"), "queries": (queries, -1, "d")})
    arrays = Q, K, V, given, queries
    call = PrunedCall.of(arrays, heads, mask, query_mask, tied=tied, held=held, certified=return_certificate)
    factor = check_scale(scale, Q.shape[-1])
    with call.full_precision():
        if causal:
            return causal_attention(call, rule, factor, state, return_state, return_certificate)
        return whole_attention(call, rule_for, factor, return_certificate)


def _refuse_mixed(causal: bool, m: int, n: int, *, continued: bool, query_mask: Any, queries: Any) -> None:
    """Raise for options that go only with causal attention, or only without."""
    if causal and m != n:
        raise ValueError(
            f"Q has {m} rows and K has {n}, and causal is True; expected as many: give earlier keys as state="
        )
    if continued and not causal:
        raise ValueError("state or return_state was given and causal is False; expected them only with causal=True")
    if query_mask is not None and causal:
        raise ValueError("query_mask was given and causal is True; expected mask alone, for queries and keys alike")
    if queries is not None and causal:
        raise ValueError("queries were given and causal is True; expected them only with causal=False")
