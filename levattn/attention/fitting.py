"""Slots that stand for all keys of a head, fitted to reference queries by least squares."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from levattn._core.arrays import is_torch, to_numpy
from levattn._core.blas import blas_limit
from levattn._core.device import where_arrays_are
from levattn._core.jax import by_numpy
from levattn._core.threads import num_threads, parallel_for, thread_limit
from levattn._core.types import Float64, Int64, dtype_name
from levattn.attention.arguments import (
    check_sizes,
    dense_array,
    device_of,
    is_double,
    namespace_of,
    reads_numbers,
    reshaped,
    stack_arguments,
    without_gradient,
)
from levattn.attention.latent.window import check_scale
from levattn.attention.pruned.call import PrunedCall, given_scores, sized
from levattn.attention.pruned.selection import (
    BY_ATTENTION,
    Checks,
    Selection,
    SelectionRule,
    as_selection,
    function_of,
    slots_to_fit,
)
from levattn.attention.regression import HeadFit, Rounding, Weighted, fitted_heads, heads_at_once, slot_weights
from levattn.exceptions import NonFiniteError

_Part = tuple[Any, Any, HeadFit]  # items of the batch, places of their keys or None for all, and their slots

_LARGEST = {
    "float16": 2.0**16 - 2.0**5,
    "bfloat16": 2.0**128 - 2.0**120,
    "float32": 2.0**128 - 2.0**104,
    "float64": sys.float_info.max,
}
_EVERY = 8  # one row of so many is left out of the fit


@dataclass(frozen=True, eq=False)
class FittedSlots:
    r"""Slots that stand for the keys of each head, as `fit_slots` returns them.

    Attributes
    ----------
    keys : array of shape (..., G, s, d)
        Keys :math:`c_s` of the slots, in the dtype of K.
    values : array of shape (..., G, s, D)
        Their fitted values :math:`C_s`, in the dtype of V.
    log_weights : array of shape (..., G, s)
        Numbers :math:`\beta_s` from −3 to 3 that attention adds to the logits, in float64 if V is, else in float32. In
        rows behind the last slot of a head they are −∞.
    indices : array of int64, shape (..., G, s)
        The places of the keys in K, ascending; −1 in rows behind the last slot.
    mass_residual : array of float64, shape (..., G)
        :math:`\sqrt{\sum_i w_i (\sum_s F_{is} B_s - 1)^2 / \sum_i w_i}` over the unseen queries.
    output_residual : array of float64, shape (..., G)
        :math:`\sqrt{\sum_i w_i \|\hat y_i - y_i\|^2 / \sum_i w_i \|y_i\|^2}` over the unseen queries, for outputs
        ŷ by the slots, before values of 16 bits are rounded, and y by all keys. Like the other residual, it is NaN
        without unseen queries of any weight.
    bounded : array of int64, shape (..., G)
        Number of slots whose log-weight is −3 or 3.
    clipped : array of int64, shape (..., G)
        Number of slots whose value was put back onto the ball of the values.
    scale : float
        Factor of the products of queries and keys.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import fit_slots
    >>> Q, K, V = np.random.default_rng(0).standard_normal((3, 400, 16))
    >>> slots = fit_slots(Q, K, V, 40)
    >>> slots.keys.shape, slots.indices[:5].tolist(), int(slots.clipped)
    ((40, 16), [0, 26, 33, 38, 56], 0)
    >>> slots.attend(Q[:3]).shape
    (3, 16)
    """

    keys: Any = field(repr=False)
    values: Any = field(repr=False)
    log_weights: Any = field(repr=False)
    indices: Int64 = field(repr=False)
    mass_residual: Float64
    output_residual: Float64
    bounded: Int64
    clipped: Int64
    scale: float

    @property
    def _held_array(self) -> Any:
        return self.keys

    @reads_numbers
    @where_arrays_are
    @by_numpy
    def attend(self, Q: Any, /) -> Any:
        """Return the attention of any queries to the slots.

        Parameters
        ----------
        Q : array of shape (..., H, m, d)
            Queries, in the library of the slots; H is a multiple of G.

        Returns
        -------
        array of shape (..., H, m, D)
            Outputs in the dtype of `values`, with gradients of torch; zero for a head without slots.

        Raises
        ------
        TypeError, ValueError
            If Q has a wrong type or shape.
        NonFiniteError
            If products of queries and keys are not finite.
        """
        Q = dense_array("Q", Q)
        check_sizes({"keys": (self.keys, -1, "d"), "Q": (Q, -1, "d")})
        Q, keys, values, heads = sized(Q, self.keys, self.values, names=("Q", "keys", "values"))
        named = {"Q": (heads.per_query("Q", Q, 2), 3), "keys": (keys, 2), "values": (values, 2)}
        given = stack_arguments(named | {"log_weights": (self.log_weights, 1)}, like="values")
        q, c, C, beta = given.stacks
        with np.errstate(over="ignore", invalid="ignore"), _full_precision(q):
            return heads.joined(given.give_back(_attention(q * self.scale, c, C, beta)))


@reads_numbers
@where_arrays_are
@by_numpy
def fit_slots(
    Q: Any,
    K: Any,
    V: Any,
    selection: Any,
    /,
    *,
    weights: Any = None,
    unseen: Any = None,
    scale: float | None = None,
    mask: Any = None,
    rounded: tuple[Rounding, Rounding] | None = None,
) -> FittedSlots:
    r"""Few keys with weights and values by which reference queries attend as by all keys.

    Let :math:`P_{ij} = \exp(\text{scale} \langle q_i, k_j \rangle - \ell_i)` be the attention of reference query i,
    with :math:`\ell_i` the logarithm of the sum, and :math:`y_i = \sum_j P_{ij} v_j`. Slots are the first keys, the
    last keys, and the keys with the largest :math:`\max_i w_i P_{ij}^2`. (Numbers within 2⁻¹⁶ of the last one's are
    ties, and the first of them are taken.) With :math:`F_{is}` the column of P of slot s, its log-weight is
    :math:`\beta_s = \log B_s`, where B minimizes

    .. math::

        \sum_i w_i \Bigl(\sum_s F_{is} B_s - 1\Bigr)^2 + \mu\, \|B - 1\|^2, \qquad e^{-3} \le B_s \le e^3.

    Let X be the softmax of the slots' logits plus β. A ridge toward the slots' own values :math:`V_S` gives

    .. math::

        C = V_S + \bigl(X^T W X + \mathrm{diag}(\lambda)\bigr)^{-1} X^T W \,(Y - X V_S).

    μ and λ are 1 % and 0.3 % of the mean diagonals of :math:`F^T W F` and :math:`X^T W X`.
    For a slot outside of the ball below, :math:`\lambda_s` is raised tenfold, at most four times. A slot that is still
    outside goes to the nearest point of the ball. If the slots cover all keys, log-weights are 0 and values unchanged,
    as they are where there is nothing to fit to.

    **Guarantee.** Let v̄ be the middle of the ranges of a head's values, and r the largest distance of a value from it.
    Softmax outputs are convex combinations of the :math:`C_s`, which lie in the ball of radius r about v̄. So **every**
    query, however unlike the references, has an output in that ball, as it has with all keys. (To
    :math:`10^{-12} r`, and to the rounding of `values` and of the softmax in their dtype.) There is no guarantee of
    errors: the residuals are measured on unseen queries, and say nothing about queries that are unlike these.

    Parameters
    ----------
    Q : array of shape (..., H, m, d)
        Reference queries: float64, float32, float16 or bfloat16 of numpy, torch, CuPy or another library of the
        array-API standard. Every eighth row (the last one, of 2 to 7 rows) is not fitted but unseen, unless `unseen`
        is given.
    K : array of shape (..., G, n, d)
        Keys as they enter the attention; H is a multiple of G, as for `pruned_attention`.
    V : array of shape (..., G, n, D)
        Values.
    selection : Selection or number
        How many slots there are: a budget or a size, with counts or shares as in a compressed cache. `window` is the
        last keys, a quarter of a budget by default, and `sinks` the first keys, one of a budget. Its `scores` select
        the others. By default they are "attention", the maxima above. There are no summaries.
    weights : array of shape (..., H, m), optional
        Weights of at least 0 of the rows of Q, such as the square of the share of attention that the context gets; 1
        by default. A common factor does not matter. For H heads, for G, or one for all.
    unseen : array of shape (..., H, m', d), optional
        Queries on which the residuals are measured, with weights 1. Then all rows of Q are fitted. For H heads, for G,
        or one for all.
    scale : float, optional
        Factor of the products; 1/√d if it is None.
    mask : array of bool, shape (..., G, n), optional
        True for a key that takes part; leading axes are broadcast. The result is the same as without the others.
    rounded : pair of functions, optional
        How keys and values will be held, in fewer bits for example. The first function takes the keys (b, s, d) of the
        slots of some heads and returns them rounded. The second one takes their values (b, s, D). Log-weights and
        values are then fitted to rounded keys, and residuals measure rounded keys and values. The result is unrounded.
        For JAX both see NumPy arrays.

    Returns
    -------
    FittedSlots
        Slots of each head of the keys, with their residuals on unseen queries. It has no gradient.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type, shape or value.
    NonFiniteError
        If an argument, a product of queries and keys, or a score is NaN or infinite.

    See Also
    --------
    pruned_attention : Attention to keys and summaries that are selected, not fitted.
    levattn.definitions.fit_slots : The definition, in NumPy.

    Notes
    -----
    Time O(m n (d + D) + m s (min(m, s) + d + D)) for each head. That includes a few systems of m or s unknowns,
    whichever are fewer. (Some s of them, if keys lie on a smooth curve.) Memory O(m D + n (d + D) + min(m, s) s), and
    2²² logits at a time in each thread, or one row of them. (On a device 2²⁶.) In main memory, threads share
    the heads. The Gram matrices and all that is solved are in float64. Bounds hold by a projected Newton method [2]_
    that ends at the minimum, to rounding. Rank-deficient and graded F need no care, because the ridges bound condition
    numbers, by 1 + 100 s for the weights.

    Four safeguards are not in [1]_. The sum of a query's own terms normalizes its row, not the largest term. The ridge
    goes toward the original values: without it the residual on fitted rows is the best, and on others the worst.
    Values stay in the ball, and weights within :math:`e^{\pm 3}`.

    References
    ----------
    .. [1] Zweiger, Fu, Guo and Kim, "Fast KV Compaction via Attention Matching", arXiv:2602.16284, 2026.
    .. [2] Bertsekas, "Projected Newton methods for optimization problems with simple constraints", SIAM J. Control
       Optim. 20, 1982.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import fit_slots, pruned_attention
    >>> rng = np.random.default_rng(0)
    >>> Q, K, V = rng.standard_normal((3, 4, 500, 16))  # four heads
    >>> slots = fit_slots(Q, K, V, 0.2)
    >>> slots.values.shape, slots.output_residual.shape
    ((4, 100, 16), (4,))
    >>> new = rng.standard_normal((4, 50, 16))
    >>> dense = pruned_attention(new, K, V, 1.0)
    >>> fitted, selected = slots.attend(new), pruned_attention(new, K, V, 0.2)
    >>> bool(np.linalg.norm(fitted - dense) < 0.8 * np.linalg.norm(selected - dense))
    True
    """
    selection = as_selection(selection, fitted=True)
    Q, K, V, heads = sized(Q, K, V)
    _rule(selection, K.shape[-2])
    if weights is not None:
        weights = dense_array("weights", weights)
        check_sizes({"Q": (Q, -2, "m"), "weights": (weights, -1, "m")})
        weights = weights if Q.shape[-2] else None
    if unseen is not None:
        unseen = dense_array("unseen", unseen)
        check_sizes({"unseen ": (unseen, -2, "m'"), "Q": (Q, -1, "d"), "unseen": (unseen, -1, "d")})
    scores = given_scores(selection.scores, K) if selection.kind == "given" else None
    factor = check_scale(scale, Q.shape[-1])
    Q, K, V, scores, unseen, weights = (without_gradient(array) for array in (Q, K, V, scores, unseen, weights))
    arrays = Q, K, V, scores, unseen
    call = PrunedCall.of(
        arrays, heads, mask, None, tied=False, held=(), certified=True, weights=weights, sample="unseen"
    )
    if rounded is not None:
        rounded = _with_arrays_of_caller(call, rounded)
    fitted = partial(_fitted, call, selection, factor, rounded)
    with call.full_precision(), np.errstate(all="ignore"):
        parts = [part for rows, keys, _ in call.groups() for part in fitted(rows, keys)]
        return _joined(call, parts, K, V, factor)


def _full_precision(q: Any) -> Any:
    """Return a block without half-precision products of torch, which overflow, and whose shares do not sum to 1."""
    if not is_torch(q):
        return nullcontext()
    from levattn._kernels.tensors import without_autocast

    return without_autocast(q)


def _attention(q: Any, c: Any, C: Any, log_weights: Any) -> Any:
    """Return the attention (b, g, m, D) of queries (b, g, m, d) to slots; zero for a head without any."""
    xp, checks = namespace_of(q), Checks()
    z = xp.matmul(q, xp.matrix_transpose(c)[:, None, :, :])
    checks.expect(
        xp.all(xp.isfinite(without_gradient(z))),
        "products of Q and keys are not finite; give finite queries with smaller entries, or of float64",
    )
    checks.settle()
    z = z + log_weights[:, None, None, :]
    if not z.shape[3]:
        return xp.matmul(z, C[:, None, :, :])
    largest = float(xp.finfo(C.dtype).max)
    Y = xp.matmul(slot_weights(z), C[:, None, :, :])
    return xp.clip(Y, -largest, largest)  # beyond by rounding alone


def _rule(selection: Selection, n: int) -> SelectionRule:
    """Return the rule of a selection for a head of n keys, or raise."""
    function = function_of(selection)
    kind = BY_ATTENTION if selection.scores is None else selection.kind if function is None else "function"
    return SelectionRule(slots_to_fit(selection, n), kind, None, selection.center is not False, None, function)


def _with_arrays_of_caller(call: PrunedCall, rounded: Any) -> tuple[Rounding, Rounding]:
    """Return a user's functions of arrays for arrays of the call; they check the arrays that come back."""
    pair = rounded if isinstance(rounded, tuple) else ()
    if len(pair) != 2 or not all(map(callable, pair)):
        raise TypeError(f"rounded is {rounded!r}; expected two functions, of keys and of values, or None")

    def of_call(function: Rounding, array: Any) -> Any:
        given = call.as_given(array)
        again = given.clone() if is_torch(given) else namespace_of(given).asarray(given, copy=True)
        found = dense_array("the result of rounded", function(again))
        if found.shape != given.shape or type(found) is not type(given):
            raise ValueError(
                f"rounded returned {type(found).__name__} {tuple(found.shape)} for {type(given).__name__} "
                f"{tuple(given.shape)}; expected an array of the same kind and shape"
            )
        found = without_gradient(namespace_of(given).astype(found, given.dtype, copy=False))
        if not bool(namespace_of(found).all(namespace_of(found).isfinite(found))):
            raise NonFiniteError("rounded returned NaN or infinity; expected finite numbers, as keys and values are")
        return call.torch.memory_of(found) if call.in_memory else found

    return partial(of_call, pair[0]), partial(of_call, pair[1])


def _fitted(call: PrunedCall, selection: Selection, factor: float, rounded: Any, rows: Any, keys: Any) -> list[_Part]:
    """Return the slots of some items, which have the same keys: None stands for all, of items and of keys."""
    q, K, V, scores = call.taken(rows, keys, None)
    w, checks, (b, n, _) = call.weights_of(rows), Checks(), K.shape
    sample = None if call.sample is None else call.sampled(rows, q)
    _expect_numbers(checks, Q=q, K=K, V=V, weights=w, unseen=sample)
    if w is not None:
        xp = namespace_of(w)
        checks.expect(xp.all(w >= 0), "weights has a number below 0; expected at least 0", ValueError)
    checks.settle()
    items = np.arange(b) if rows is None else rows
    if not n:
        return [(items, keys, _no_slots(K, V))]
    rule = call.with_arrays_of_caller(_rule(selection, n))
    fit, unseen = _split(q * factor, w, None if sample is None else sample * factor)
    slots = rule.slots.selected + rule.slots.window + rule.slots.sinks
    largest = _LARGEST[dtype_name(call.given.dtype)]
    step = heads_at_once(max(fit.q.shape[1], unseen.q.shape[1]), n, min(slots, n), K)
    # threads run no code of a user
    threads = 1 if rounded or rule.function is not None or not isinstance(K, np.ndarray) else num_threads()
    step = min(step, max(1, -(-b // threads)))
    starts = range(0, max(b, 1), step)
    found: list[Any] = [None] * len(starts)

    def keep(i: int) -> None:
        some = slice(starts[i], min(starts[i] + step, b))
        arrays = K[some, ...], V[some, ...], None if scores is None else scores[some, ...]
        with np.errstate(all="ignore"), thread_limit(1) if threads > 1 and len(starts) > 1 else nullcontext():
            heads = fitted_heads(rule, fit.of(some), unseen.of(some), arrays, largest, rounded, checks)
        found[i] = items[some], keys, heads

    with blas_limit(1) if isinstance(K, np.ndarray) else nullcontext():  # however many threads there are
        parallel_for(keep, len(starts), threads=threads)
    return found


def _expect_numbers(checks: Checks, **arrays: Any) -> None:
    """Expect arrays to be finite; None is none."""
    for name, array in arrays.items():
        if array is not None:
            xp = namespace_of(array)
            checks.expect(xp.all(xp.isfinite(array)), f"{name} holds NaN or infinity; give finite numbers")


def _split(q: Any, w: Any, unseen: Any) -> tuple[Weighted, Weighted]:
    """Return the rows to fit and the unseen rows, of all query heads that share keys together."""
    xp, (b, g, m, _) = namespace_of(q), q.shape
    w = xp.ones((b, g, m), dtype=q.dtype, device=device_of(q)) if w is None else xp.broadcast_to(w, (b, g, m))
    if unseen is not None:
        return _weighted(q, w), _weighted(unseen, xp.ones_like(unseen[..., 0]))
    place = np.arange(m)
    out = place % _EVERY == _EVERY - 1 if m >= _EVERY else (place == m - 1) & (m > 1)
    sides = []
    for which in (~out, out):
        at = xp.asarray(np.flatnonzero(which), device=device_of(q))
        sides.append(_weighted(xp.take(q, at, axis=2), xp.take(w, at, axis=2)))
    return sides[0], sides[1]


def _weighted(q: Any, w: Any) -> Weighted:
    """Return queries (b, g, m, d) and their weights (b, g, m) as rows; the largest weight of a head is 1."""
    xp, (b, g, m, d) = namespace_of(q), q.shape
    w = xp.astype(reshaped(w, (b, g * m)), xp.float64)
    if m:
        largest = xp.max(w, axis=1, keepdims=True)
        w = w / xp.where(largest > 0, largest, xp.ones_like(largest))
    return Weighted(reshaped(q, (b, g * m, d)), w)


def _no_slots(K: Any, V: Any) -> HeadFit:
    """Return the fit of heads (b, 0, d) without keys."""
    xp, b = namespace_of(K), K.shape[0]
    none = xp.zeros((b, 0), dtype=xp.int64, device=device_of(K))
    zero, nan = (xp.full((b,), value, dtype=xp.float64, device=device_of(K)) for value in (0.0, math.nan))
    return HeadFit(none, None, K, V, K[:, :, 0], nan, nan, zero, zero)


def _joined(call: PrunedCall, parts: list[_Part], K: Any, V: Any, scale: float) -> FittedSlots:
    """Return the slots of all items in the caller's shape, library and dtypes; K and V are the caller's."""
    xp, s = namespace_of(call.K), max(fit.places.shape[1] for *_, fit in parts)
    order = np.argsort(np.concatenate([items for items, *_ in parts]), kind="stable")

    def all_of(name: str, dtype: Any, behind: float = 0.0) -> Any:
        arrays = [_padded(getattr(fit, name), s, behind) for *_, fit in parts]
        whole = arrays[0] if len(arrays) == 1 else xp.concat(arrays, axis=0)
        whole = xp.take(whole, xp.asarray(order, device=device_of(whole)), axis=0)
        given = call.as_given(reshaped(whole, (*call.given.batch, *whole.shape[1:])))
        return namespace_of(given).astype(given, dtype, copy=False)

    def figures(arrays: list[Any], dtype: Any) -> Any:
        whole = np.concatenate([to_numpy(array) for array in arrays])[order]
        return whole.astype(dtype).reshape((*call.given.batch, *whole.shape[1:]))

    fits, wide = [fit for *_, fit in parts], namespace_of(V)
    return FittedSlots(
        all_of("keys", K.dtype),
        all_of("values", V.dtype),
        all_of("log_weights", wide.float64 if is_double("V", V) else wide.float32, -math.inf),
        figures([_places(fit, keys, s) for _, keys, fit in parts], np.int64),
        figures([fit.mass for fit in fits], np.float64),
        figures([fit.output for fit in fits], np.float64),
        figures([fit.bounded for fit in fits], np.int64),
        figures([fit.clipped for fit in fits], np.int64),
        scale,
    )


def _padded(array: Any, s: int, behind: float) -> Any:
    """Return an array (b, s', ...) with a number in the rows behind, (b, s, ...)."""
    xp, missing = namespace_of(array), s - array.shape[1]
    if not missing:
        return array
    shape = (array.shape[0], missing, *array.shape[2:])
    return xp.concat([array, xp.full(shape, behind, dtype=array.dtype, device=device_of(array))], axis=1)


def _places(fit: HeadFit, keys: Any, s: int) -> Int64:
    """Return the places (b, s) of slots among all keys, and -1 behind the last slot.

    `keys`: the keys that take part, or None for all.
    """
    places = to_numpy(fit.places).astype(np.int64)
    places = places if keys is None else np.asarray(keys, np.int64)[places]
    if fit.there is not None:
        places = np.where(to_numpy(fit.there), places, -1)
    return np.pad(places, ((0, 0), (0, s - places.shape[1])), constant_values=-1)
