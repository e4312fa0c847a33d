"""Attention over few keys and summaries of the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np

from levattn._core.arrays import is_torch, to_numpy
from levattn._kernels import kernels_for
from levattn._kernels.pruned.contract import PrunedArguments, Summaries
from levattn.attention.common.arguments import Stacks, check_sizes, dense_array, reshaped, stacked
from levattn.attention.common.heads import Heads, heads_of
from levattn.attention.common.space import device_of, namespace_of, without_gradient
from levattn.attention.latent.window import check_scale
from levattn.attention.pruned.certificate import PrunedCertificate, bounded, detached, longest_of
from levattn.attention.pruned.choice import Sums, chosen, flips, grouped, measured, rows_at, scored
from levattn.attention.pruned.slots import slots_for
from levattn.attention.pruned.state import (
    PrunedPart,
    PrunedState,
    SelectionRule,
    arrays_of,
    converted,
    empty_part,
    in_range,
    picked,
    stepped,
)
from levattn.functions import Power
from levattn.sensitivity.leverage import check_epsilon, leverage_scores
from levattn.sets.universal import universal_set

__all__ = ["pruned_attention"]

_KINDS = ("residual", "expected", "leverage")


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
    return_certificate: bool = False,
) -> Any:
    r"""Attention to a few keys, and to summaries of all the others.

    A query q attends exactly to the keys E that are near it, selected by their scores, or first in the sequence. The
    others are in R clusters, and each cluster c counts as one key more:

    .. math::

        y = \sum_{j \in E} p_j v_j + \sum_c p_c \bar v_c, \qquad
        p_j \propto e^{z_j}, \quad p_c \propto W_c\, e^{\bar z_c}, \qquad
        \bar z_c = \frac{1}{W_c} \sum_{j \in c} w_j (z_j - \log w_j),
        \quad \bar v_c = \frac{1}{W_c} \sum_{j \in c} w_j v_j,

    with logits :math:`z_j = \text{scale} \langle q, k_j \rangle`, :math:`W_c = \sum_{j \in c} w_j`, and one
    normalization for all. Members that q attends as near keys are taken out of the sums, exactly. The weights are
    :math:`w_j \propto \exp(\text{scale} \langle \bar q, k_j \rangle)` (within a factor of e³ of their cluster's) for
    the mean query q̄: so the summary is the tangent of the cluster's mass at q̄, and with w = 1 the plain centroid with
    the logarithm of its count. Whatever the weights, :math:`W_c e^{\bar z_c} \le \sum_{j \in c} e^{z_j}` by Jensen's
    inequality: a summary never counts for more than its members. If the slots cover all keys, this is dense attention.

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
        Slots for each query, their number or, as a float in (0, 1], the share of the keys that are there (if `causal`:
        of the n positions of the call); what `summaries`,
        `window`, `sinks` and `chunk` leave open is split as `Slots.of` says. One of budget, size and epsilon is given.
        A number that covers all keys is split nevertheless if a state is returned, as more may come.
    size : int, optional
        Keys selected for each head of the keys: those with the largest scores, of equal ones the first.
    epsilon : float, optional
        Or: all keys with a score of at least this. With ``scores="leverage"`` and ``center=False`` these are
        `levattn.universal_set` of the keys, for f(x) = x². If `causal`, of the keys so far, by their second moment in
        float64 alone: for keys of a condition number above 10⁶ or so that is no guarantee.
    summaries : int, optional
        R. With 0 (the default without a budget) all other keys are dropped.
    window : int, optional
        Keys near a query, as in `Slots`: on each side of it (itself included, unless 0), or if `causal` before its
        chunk. 0 without a budget.
    sinks : int, optional
        First keys that are kept whatever their scores; 0 if not given.
    scores : {"residual", "expected", "leverage"} or array of shape (..., G, n)
        What keys are selected by. "expected": the logarithm of the expected weight for a normal query with the mean
        and covariance of the queries at hand [1]_. "residual": that, plus the logarithm of the squared distance to
        the mean of the key's own cluster, measured by how much it changes the queries' logits: keys that a summary
        would get wrong. "leverage": leverage scores, whatever the queries. An array: scores of your own.
    center : bool, optional
        Whether leverage scores are those of the keys less their mean; True for softmax, which does not see the mean,
        if not given. Other functions see it, and take False only.
    f : "softmax", float or Power
        The attention function: a number p ≥ 1 stands for weights :math:`|\text{scale} \langle q, k\rangle|^p`. There
        :math:`p_c \propto |c|\,|\bar z_c|^p` with w = 1, of keys that are turned to one side (k or −k), as f is even.
    causal : bool, default False
        Whether row i reads keys 0 to i only. Selection and summaries are then renewed every `chunk` positions from
        what is past, queries included; between, a row reads its chunk up to itself.
    chunk : int, optional
        Positions between two selections; 64, or an eighth of the budget if that is less.
    state : PrunedState, optional
        Causal: what came before, from ``return_state=True``. It holds the options of selection, which are then left
        out here; `f` and `scale` are given again. Rows are those of one call for all positions, to rounding.
    return_state : bool, default False
        Causal: whether to return the state after these positions as well.
    scale : float, optional
        What products are multiplied by; 1/√d if it is None.
    mask : array of bool, shape (..., G, n), optional
        True for a key that is there; leading axes are broadcast (give (..., 1, n) for one mask for all heads). Others
        are left out altogether: results are those of a call without them, but for causal budgets, which are of n.
    query_mask : array of bool, shape (..., G, m), optional
        True for a query that counts; rows of others are zero, and they take no part in what is known of the queries.
        Where a window or `causal` says that queries and keys are at the same positions it is `mask` if not given, else
        all true. Not if `causal`.
    return_certificate : bool, default False
        Whether to return what is certain of the result.

    Returns
    -------
    array of shape (..., H, m, D)
        Of the dtype of `V`. Gradients of torch reach Q, K and V; the selection and the weights w are constant. Rows
        that read nothing are zero.
    PrunedState
        If `return_state`.
    PrunedCertificate
        If `return_certificate`.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another kind, shape or range.
    NonFiniteError
        If scores are NaN, as they are where Q or K holds NaN or infinity.

    See Also
    --------
    levattn.universal_set : The keys that can receive a large score at all, for f(x) = x² and others, with proof.

    Notes
    -----
    If `causal`, the weights of a summary are scaled to a mean of 1 at every renewal, in float64, which changes nothing
    of what it stands for: so a state goes on for any number of positions. What comes after a row changes no bit of it,
    nor does another n (but through a budget, which is of n).

    Time O(n R d + n d²) for the selection and O(m s (d + D)) for s slots a query; memory O(m D + n (d + D)), and 2²²
    logits at a time. Causal: O(T s (d + D) + T R (s + R) d / chunk), and a state of O(s (d + D) + d²).

    The guarantee of universal sets is for abs(x)^p and by thresholds. For softmax a selection is a heuristic whatever
    its scores: the certificate tells what it lost, and the summaries carry most of what dropping the keys would lose.

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
    power = _power(f)
    Q, K, V = (dense_array(name, array) for name, array in (("Q", Q), ("K", K), ("V", V)))
    check_sizes({"Q": (Q, -1, "d"), "K": (K, -1, "d"), "K ": (K, -2, "n"), "V": (V, -2, "n")})
    m, n = Q.shape[-2], K.shape[-2]
    if causal and m != n:
        raise ValueError(
            f"Q has {m} rows and K has {n}, and causal is True; expected as many: give earlier keys as state="
        )
    heads = heads_of(Q, K, V, names=("Q", "K", "V"))
    if isinstance(scores, str) and scores not in _KINDS:
        raise ValueError(f"scores is {scores!r}; expected one of {', '.join(_KINDS)}, or an array of scores")
    given = None if isinstance(scores, str) else dense_array("scores", scores)
    open_end = causal and return_state and isinstance(budget, Integral)
    rule_of = partial(
        _rule,
        state,
        aligned=m == n,
        options={
            "budget": budget,
            "size": size,
            "epsilon": epsilon,
            "summaries": summaries,
            "window": window,
            "sinks": sinks,
            "chunk": chunk,
            "center": center,
        },
        scores=scores if given is None else "given",
        power=power,
        causal=causal,
    )
    rule = rule_of(max(n, int(budget or 0) + 1) if open_end else n)
    if (state is not None or return_state) and not causal:
        raise ValueError("state or return_state was given and causal is False; expected them only with causal=True")
    if query_mask is not None and causal:
        raise ValueError("query_mask was given and causal is True; expected mask alone, for queries and keys alike")
    if given is not None and given.shape[-1:] != (n,):
        raise ValueError(f"scores has shape {tuple(given.shape)}; expected (..., {n}), one for each key")
    tied = causal or rule.slots.window > 0
    call = _Call.of(Q, K, V, given, heads, mask, query_mask, tied=tied, held=None if state is None else state.parts)
    factor = check_scale(scale, Q.shape[-1])
    with _full_precision(call.q):
        if causal:
            return _causal(call, rule, factor, state, return_state, return_certificate)
        return _whole(call, rule_of, factor, return_certificate)


def _full_precision(like: Any) -> Any:
    """Return a block in which torch does not make products of half precision: sums over members would not bear it."""
    if not is_torch(like):
        return nullcontext()
    from levattn._kernels import tensors as torch_kernels

    return torch_kernels.without_autocast(like)


@dataclass(frozen=True, eq=False)
class _Call:
    """The arrays of a call as stacks.

    q: (b, g, m, d). K, V: (b, n, d), (b, n, D). scores: (b, n) or None. present, asking: (b, n) and (b, m) flags of
    numpy, or None for all.
    """

    q: Any
    K: Any
    V: Any
    scores: Any
    present: Any
    asking: Any
    heads: Heads
    given: Stacks
    tensors: bool

    @classmethod
    def of(
        cls,
        Q: Any,
        K: Any,
        V: Any,
        scores: Any,
        heads: Heads,
        mask: Any,
        query_mask: Any,
        *,
        tied: bool,
        held: tuple[PrunedPart, ...] | None,
    ) -> _Call:
        arrays = {"Q": (heads.per_query("Q", Q, 2), 3), "K": (K, 2), "V": (V, 2), "scores": (scores, 1)}
        given = stacked(arrays, like="V", mask=(mask, K.shape[-2]))
        stacks, tensors = given.stacks, False
        if is_torch(given.stacks[0]):
            from levattn._kernels import tensors as torch_kernels

            before = tuple(array for part in held or () for array in arrays_of(part))
            tensors = torch_kernels.in_memory((*stacks, *before))
            stacks = tuple(map(torch_kernels.memory_of, stacks)) if tensors else stacks
        q, K, V, scores = stacks
        present = None if given.mask is None else to_numpy(given.mask)
        asking = present if tied else None
        if query_mask is not None:
            asking = _query_flags(query_mask, given.batch, q.shape[2])
        return cls(q, K, V, scores, present, asking, heads, given, tensors)

    def groups(self) -> list[tuple[Any, Any, Any]]:
        """Return the items of the batch that have the same keys and queries: which items, keys and queries.

        None stands for all of them.
        """
        b = self.K.shape[0]
        if not b or (self.present is None and self.asking is None):
            return [(None, None, None)]
        sides = [flags for flags in (self.present, self.asking) if flags is not None]
        patterns, inverse = np.unique(np.concatenate(sides, axis=1), axis=0, return_inverse=True)
        found = []
        for i in range(len(patterns)):
            rows = np.flatnonzero(inverse.reshape(-1) == i)
            keys, queries = (
                None if flags is None or flags[rows[0]].all() else np.flatnonzero(flags[rows[0]])
                for flags in (self.present, self.asking)
            )
            found.append((None if len(rows) == b else rows, keys, queries))
        return found

    def taken(self, rows: Any, keys: Any, queries: Any) -> tuple[Any, Any, Any, Any]:
        """Return the queries, keys, values and scores of some items, at some places."""
        return (
            _taken(_taken(self.q, rows, 0), queries, 2),
            *(_taken(_taken(array, rows, 0), keys, 1) for array in (self.K, self.V, self.scores)),
        )

    def combined(self, pieces: list[tuple[Any, Any, Any]]) -> Any:
        """Return items of the batch, (which, query places, (b', g, m', ...)), as (b, g, m, ...), zeros between."""
        if len(pieces) == 1 and pieces[0][0] is None and pieces[0][1] is None:
            return pieces[0][2]
        xp = namespace_of(self.q)
        b, m = self.q.shape[0], self.q.shape[2]
        stacks = [_spread(xp, array, queries, m) for _, queries, array in pieces]
        order = np.concatenate([np.arange(b) if rows is None else rows for rows, _, _ in pieces])
        whole = stacks[0] if len(stacks) == 1 else xp.concat(stacks, axis=0)
        return _taken(whole, np.argsort(order, kind="stable"), 0)

    def output(self, pieces: list[tuple[Any, Any, Any]]) -> Any:
        """Return the same as the result (..., H, m, D), in the caller's dtype."""
        return self.heads.joined(self.given.give_back(self.as_given(self.combined(pieces))))

    def figures(self, pieces: list[tuple[Any, Any, Any]]) -> Any:
        """Return the same of numbers (b, g, m), one a query, as (..., H, m)."""
        whole = self.combined(pieces)
        return self.heads.joined(self.as_given(reshaped(whole, (*self.given.batch, *whole.shape[1:]))), 1)

    def as_given(self, array: Any) -> Any:
        """Return an array of the kernels in the library of the arguments."""
        if not self.tensors:
            return array
        from levattn._kernels import tensors as torch_kernels

        return torch_kernels.tensor_of(array)

    def memory_of(self, part: PrunedPart) -> PrunedPart:
        """Return a part of a state with its arrays as this call computes with them."""
        if not self.tensors:
            return part
        from levattn._kernels import tensors as torch_kernels

        return converted(part, torch_kernels.memory_of)


def _taken(array: Any, places: Any, axis: int) -> Any:
    """Return an array at some places of one axis; None stands for all."""
    if array is None or places is None:
        return array
    xp = namespace_of(array)
    return xp.take(array, xp.asarray(places, device=device_of(array)), axis=axis)


def _spread(xp: Any, array: Any, places: Any, m: int) -> Any:
    """Return (b, g, s, ...) with its rows at some places of m, and zeros between them."""
    if places is None:
        return array
    none = xp.zeros((*array.shape[:2], 1, *array.shape[3:]), dtype=array.dtype, device=device_of(array))
    source = np.zeros(m, np.int64)
    source[places] = np.arange(1, len(places) + 1)
    return _taken(xp.concat([none, array], axis=2), source, 2)


def _query_flags(query_mask: Any, batch: tuple[int, ...], m: int) -> Any:
    flags = to_numpy(dense_array("query_mask", query_mask))
    if flags.dtype != np.bool_:
        raise TypeError(f"query_mask has dtype {flags.dtype}; expected bool, True for a query that counts")
    try:
        return np.broadcast_to(flags, (*batch, m)).reshape(-1, m)
    except ValueError:
        raise ValueError(
            f"query_mask has shape {flags.shape}; expected (..., {m}), and leading axes as those of K"
        ) from None


def _power(f: Any) -> float | None:
    """Return the exponent of an attention function, or None for softmax."""
    if isinstance(f, str) and f == "softmax":
        return None
    f = f.p if isinstance(f, Power) else f
    if not isinstance(f, bool) and isinstance(f, Real) and 1 <= float(f) < math.inf:
        return float(f)
    raise ValueError(f'f is {f!r}; expected "softmax", a number p >= 1 for |x|^p, or levattn.Power(p)')


def _rule(
    state: PrunedState | None,
    n: int,
    *,
    aligned: bool,
    options: dict[str, Any],
    scores: Any,
    power: float | None,
    causal: bool,
) -> SelectionRule:
    """Return how keys are to be chosen: by the options, or as a state says."""
    if state is not None:
        if not isinstance(state, PrunedState):
            raise TypeError(f"state is of type {type(state).__name__}; expected a PrunedState, from return_state=True")
        again = [name for name, value in options.items() if value is not None]
        if again:
            raise ValueError(
                f"state and {', '.join(again)} were given; expected the state alone, which holds these options"
            )
        if state.rule.power != power:
            raise ValueError(f"f is not that of the state (power {state.rule.power}); expected the same function")
        if (state.rule.kind == "given") != (scores == "given"):
            raise ValueError(
                "scores are given in only one of this call and the one that the state is from; expected both"
            )
        if scores not in ("residual", state.rule.kind):
            raise ValueError(f"scores is {scores!r}, and the state has {state.rule.kind!r}; expected no other with it")
        return state.rule
    options = dict(options)
    epsilon, center = options.pop("epsilon"), options.pop("center")
    if epsilon is not None and (
        isinstance(epsilon, bool) or not isinstance(epsilon, Real) or not math.isfinite(epsilon)
    ):
        raise ValueError(f"epsilon is {epsilon!r}; expected a finite number, which scores are compared with")
    if epsilon is not None and scores == "leverage":
        check_epsilon(epsilon)
    if center is not None and scores != "leverage":
        raise ValueError(f'center is {center!r} and scores is {scores!r}; expected center only with scores="leverage"')
    if center and power is not None:
        raise ValueError("center is True and f is a power; expected center only for softmax, which sees no mean")
    slots = slots_for(n, causal=causal, aligned=aligned, by_threshold=epsilon is not None, **options)
    return SelectionRule(
        slots,
        scores,
        None if epsilon is None else float(epsilon),
        power is None if center is None else bool(center),
        power,
    )


def _whole(call: _Call, rule_of: Callable[[int], SelectionRule], factor: float, certified: bool) -> Any:
    """Return the result of attention that is not causal; the rule is of how many keys are there."""
    outputs, kept, most = [], [], 0
    bounds: list[list[Any]] = [[], [], []]
    xp = namespace_of(call.q)
    for rows, keys, queries in call.groups():
        q, K, V, scores = call.taken(rows, keys, queries)
        rule = rule_of(K.shape[1])
        most = max(most, min(rule.slots.total, K.shape[1]))
        near = _near(rule.slots.window, q.shape[2], K.shape[1], keys, queries)
        x, flags = _planned(rule, q * factor, K, V, scores, near)
        Y, rest = kernels_for("pruned", q).mixture(x)
        outputs.append((rows, queries, Y))
        if certified:
            found = _bounds(detached(x), without_gradient(rest), _reach(rule, without_gradient(V)))
            for pieces, array in zip(bounds, found, strict=True):
                pieces.append((rows, queries, array))
            flags = _spread(xp, xp.astype(flags, xp.int64)[:, None, :], keys, call.K.shape[1])
            kept.append((rows, None, flags))
    Y = call.output(outputs)
    if not certified:
        return Y
    flags = call.combined(kept)[:, 0, :] > 0
    lower, upper, error = (call.figures(pieces) for pieces in bounds)
    slots = np.full(call.q.shape[2], most, np.int64)
    kept_flags = call.as_given(reshaped(flags, (*call.given.batch, flags.shape[1])))
    return Y, PrunedCertificate(lower, upper, error, kept_flags, slots)


def _near(window: int, m: int, n: int, keys: Any, queries: Any) -> tuple[list[int], list[int]]:
    """Return where the keys near each query begin and end among those that are there.

    keys, queries: their n and m places, or None where these are all.
    """
    at = np.arange(m) if queries is None else queries
    if not window:
        return [0] * m, [0] * m
    low, high = (at, at + 1) if keys is None else (np.searchsorted(keys, at, side) for side in ("left", "right"))
    return np.maximum(low - window, 0).tolist(), np.minimum(high + window, n).tolist()


def _planned(
    rule: SelectionRule, q: Any, K: Any, V: Any, scores: Any, near: tuple[list[int], list[int]]
) -> tuple[PrunedArguments, Any]:
    """Return the mixture of some items, and which keys are kept (b, n)."""
    xp = namespace_of(q)
    b, g, m, d = q.shape
    n, slots, device = K.shape[1], rule.slots, device_of(q)
    if rule.power is not None:
        K = K * flips(without_gradient(K), Sums.of(without_gradient(K)).second)
    still = without_gradient(K)
    place = xp.arange(n, device=device)
    first = xp.broadcast_to(place < slots.sinks, (b, n))
    selects = slots.selected < n or rule.epsilon is not None
    R = min(slots.summaries, n) if selects else 0
    X = along = clusters = None
    ones = xp.ones(still.shape[:2], dtype=K.dtype, device=device)
    if selects and (R or rule.kind in ("expected", "residual")):
        queries = Sums.of(xp.reshape(without_gradient(q), (b, g * m, d)))
        X, along = measured(queries, Sums.of(still), rule.power, K.dtype).places(still)
    if not selects:
        found = xp.zeros_like(ones)
    elif scores is not None:
        found = without_gradient(scores)
    elif rule.kind == "leverage" and rule.epsilon is not None:  # with its margin for rounding
        inside = universal_set(still, rule.epsilon, center=rule.center).mask
        found = xp.where(inside, xp.full_like(ones, rule.epsilon), xp.zeros_like(ones))
    elif rule.kind == "leverage":
        found = leverage_scores(still, center=rule.center)
    else:
        found, clusters = scored(rule.kind, X, along, ones, R, rule.power)
    order, count, flags = chosen(found, slots.selected, rule.epsilon, first)
    role = xp.where(flags, xp.full_like(place, -2), xp.full_like(place, -1))
    log_weight = summaries = None
    if R:
        items = Summaries(ones, K, V, xp.zeros_like(ones), ones)
        left = xp.astype(~flags, K.dtype)
        labels, log_weight, summaries = grouped(X, along, items, left, R, rule.power, clusters)
        role = xp.where(flags, role, labels)
    x = PrunedArguments(
        q=q if rule.power is None else in_range(q, K),
        kept_keys=rows_at(K, order),
        kept_values=rows_at(V, order),
        kept_count=count,
        summaries=summaries,
        keys=K,
        values=V,
        first=near[0],
        last=near[1],
        role=role,
        log_weight=log_weight,
        power=rule.power,
    )
    return x, flags


def _bounds(x: PrunedArguments, rest: Any, reach: Any) -> tuple[Any, Any, Any]:
    """Return the bounds of `bounded` for a mixture of keys in memory; keys that were dropped are summarized for it."""
    xp = namespace_of(x.q)
    labels, ones = x.role, xp.ones_like(x.keys[..., 0])
    items = Summaries(ones, x.keys, x.values, xp.zeros_like(ones), ones)
    summaries = x.summaries
    if summaries is None:
        labels = xp.where(labels == -1, xp.zeros_like(labels), xp.full_like(labels, -1))
        if not bool(xp.any(labels == 0)):
            return bounded(x, None, rest, reach)
        summaries = kernels_for("pruned", x.q).merged(labels, xp.zeros_like(ones), items, 1)
        x = replace(x, summaries=summaries, role=xp.where(labels == 0, labels, x.role))
        _, rest = kernels_for("pruned", x.q).mixture(x)
    labels, none = xp.where(labels >= 0, labels, xp.full_like(labels, -1)), xp.zeros(ones.shape, dtype=xp.float64)
    radius = kernels_for("pruned", ones).radii(labels, items, none, summaries)
    return bounded(x, radius, rest, reach)


def _reach(rule: SelectionRule, V: Any) -> Any:
    """Return the radius (b,) of a ball that holds the values, and outputs of nothing, which are zero."""
    slots = rule.slots
    reads = slots.summaries or slots.window or slots.sinks or (slots.selected and rule.epsilon is None)
    if rule.power is None and reads and V.shape[1]:
        xp = namespace_of(V)
        V = V - (xp.min(V, axis=1, keepdims=True) / 2 + xp.max(V, axis=1, keepdims=True) / 2)  # any point will do
    return longest_of(V)


def _causal(
    call: _Call, rule: SelectionRule, factor: float, state: PrunedState | None, return_state: bool, certified: bool
) -> Any:
    """Return the result of causal attention, which goes on from a state if there is one."""
    before = 0 if state is None else state.positions
    drops = rule.epsilon is not None or rule.slots.selected < before + call.K.shape[1]
    if certified and drops and not rule.slots.summaries:
        raise ValueError(
            "return_certificate is True and summaries is 0; expected summaries for causal attention, as nothing is "
            "known of keys that were dropped"
        )
    if rule.kind == "given" and call.scores is None:
        raise ValueError("scores are missing; expected those of these keys, as the state was made with scores given")
    xp = namespace_of(call.q)
    outputs: list[Any] = []
    bounds: list[list[Any]] = [[], [], []]
    after = []
    for part, rows, places in _parts(call, state):
        q, K, V, scores = call.taken(rows, places, places)
        found: list[Any] = []

        def watch(x: PrunedArguments, at: PrunedPart, rest: Any, found: list[Any] = found) -> None:
            found.append(bounded(detached(x), at.radius, without_gradient(rest), at.largest))

        Y, part = stepped(rule, part, q * factor, K, V, scores, watch if certified else None)
        outputs.append((rows, places, Y))
        after.append(converted(part, call.as_given) if call.tensors and return_state else part)
        if not found:  # no position
            found.append((without_gradient(q[..., 0]),) * 3)
        for pieces, arrays in zip(bounds, zip(*found, strict=True), strict=False):
            pieces.append((rows, places, xp.concat(list(arrays), axis=2)))
    answer = [call.output(outputs)]
    if return_state:
        answer.append(PrunedState(rule.slots, call.given.batch, rule, tuple(after)))
    if certified:
        ends = np.arange(call.q.shape[2]) + 1 + before
        lower, upper, error = (call.figures(pieces) for pieces in bounds)
        most = ends if rule.epsilon is not None else np.minimum(ends, rule.slots.total)
        answer.append(PrunedCertificate(lower, upper, error, None, most))
    return answer[0] if len(answer) == 1 else tuple(answer)


def _parts(call: _Call, state: PrunedState | None) -> list[tuple[PrunedPart, Any, Any]]:
    """Return what is held of items of the batch, which items they are, and the places of their positions."""
    b = call.K.shape[0]
    if state is None:
        found = []
        for rows, places, _ in call.groups():
            none = np.zeros(0, np.int64)
            part = empty_part(np.arange(b) if rows is None else rows, *call.taken(rows, none, none)[1:])
            found.append((part, rows, places))
        return found
    if state.batch != call.given.batch:
        raise ValueError(f"state has batch {state.batch}; expected {call.given.batch}, as the keys have")
    held, came = (
        _kinds(*pair) for pair in ((state.parts[0].recent, state.parts[0].recent_values), call.given.stacks[1:3])
    )
    if held != came:
        raise ValueError(f"state holds {held}, and K and V are {came}; expected the same")
    found = []
    for rows, places, _ in call.groups():
        chosen_rows = np.arange(b) if rows is None else rows
        for part in map(call.memory_of, state.parts):
            which = np.flatnonzero(np.isin(part.rows, chosen_rows))
            if len(which) == len(part.rows):
                found.append((part, part.rows if len(part.rows) < b else None, places))
            elif len(which):
                found.append((picked(part, which), part.rows[which], places))
    return found


def _kinds(K: Any, V: Any) -> str:
    """Return what keys and values are, to be compared and shown."""
    library = namespace_of(K).__name__.removeprefix("array_api_compat.")
    dtype = str(K.dtype).rpartition(".")[2]
    return f"{dtype} of {library} with d = {K.shape[-1]} and D = {V.shape[-1]}"
