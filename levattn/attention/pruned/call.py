"""Checked arguments of pruned attention as stacks of matrices, and results in the caller's shape and library."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from levattn._core.arrays import is_torch, to_numpy
from levattn._core.jax import from_jax, is_jax
from levattn._core.threads import num_threads, parallel_for, thread_limit
from levattn.attention.arguments import (
    Heads,
    Stacks,
    check_sizes,
    dense_array,
    device_of,
    followable,
    heads_of,
    is_double,
    namespace_of,
    refuse_mixtures,
    reshaped,
    stack_arguments,
    without_gradient,
)
from levattn.attention.pruned.selection import SelectionRule
from levattn.attention.pruned.state import PrunedPart, PrunedState, arrays_of, converted

Piece = tuple[Any, Any, tuple[Any, ...]]  # items of the batch, places of queries, arrays (b', g, m', ...)


@dataclass(frozen=True, eq=False)
class PrunedCall:
    """The arrays of a call as stacks.

    `q`: (b, g, m, d). `K`, `V`: (b, n, d), (b, n, D). `scores`: (b, n) or None. `sample`: (b, g or 1, s, d), queries
    that select keys, or None for q. `present`, `asking`: (b, n) and (b, m) flags of numpy, or None for all. `torch`:
    the module for tensors, if the arguments are tensors. `in_memory`: whether the stacks are views of their memory.
    `narrow`: the dtype of 16 bits that Q, K and V share, if its products are precise enough, or None.
    `weights`: (b, g or 1, m), of the queries, or None.
    """

    q: Any
    K: Any
    V: Any
    scores: Any
    sample: Any
    present: Any
    asking: Any
    heads: Heads
    given: Stacks
    torch: Any
    in_memory: bool
    narrow: Any
    weights: Any = None

    @classmethod
    def of(
        cls,
        arrays: tuple[Any, Any, Any, Any, Any],
        heads: Heads,
        mask: Any,
        query_mask: Any,
        *,
        tied: bool,
        held: tuple[PrunedPart, ...],
        certified: bool,
        weights: Any = None,
        sample: str = "queries",
        stays: bool = False,
    ) -> PrunedCall:
        """Return the call with Q, K, V, scores and queries; if `tied`, the mask of keys is the mask of queries too.

        `held`: the parts of a state. `certified`: whether to bound rounding, which needs wide products.
        `sample`: the caller's name of the queries. `stays`: whether arrays of 16 bits may stay as they are, where
        kernels of a device read them.
        """
        Q, K, V, scores, queries = arrays
        named = {"Q": (heads.per_query("Q", Q, 2), 3), "K": (K, 2), "V": (V, 2), "scores": (scores, 1)}
        named |= {sample: (None if queries is None else heads.per_query(sample, queries, 2), 3)}
        named |= {"weights": (None if weights is None else heads.per_query("weights", weights, 1), 2)}
        stays = stays and is_torch(Q) and _stays_narrow([X for X in (Q, K, V, queries) if X is not None])
        stored = ("Q", "K", "V", sample) if stays else ()
        given = stack_arguments(named, like="V", mask=(mask, K.shape[-2]), stored=stored)
        stacks, torch, in_memory, narrow = given.stacks, None, False, None
        if is_torch(stacks[0]):
            from levattn._kernels import tensors

            torch = tensors
            in_memory = torch.in_memory((*stacks, *(X for part in held for X in arrays_of(part) if is_torch(X))))
            stacks = tuple(map(torch.memory_of, stacks)) if in_memory else stacks
            # a state may hold numbers of another dtype
            if Q.dtype == K.dtype == V.dtype and V.dtype.itemsize == 2 and not held and not certified:
                narrow = V.dtype
        present = None if given.mask is None else to_numpy(given.mask)
        asking = present if tied else None
        if query_mask is not None:
            asking = _query_flags(query_mask, given.batch, stacks[0].shape[2])
        q, k, v, scores, queries, weights = stacks
        return cls(q, k, v, scores, queries, present, asking, heads, given, torch, in_memory, narrow, weights)

    def full_precision(self) -> Any:
        """Return a block without half-precision products of torch, which sums over members are too sensitive for."""
        return nullcontext() if self.torch is None or self.in_memory else self.torch.without_autocast(self.q)

    def groups(self) -> list[tuple[Any, Any, Any]]:
        """Return groups of items with the same keys and queries: the items, keys and queries, None for all."""
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

    def sampled(self, rows: Any, q: Any) -> Any:
        """Return the queries that select the keys of some items; the default is their own queries."""
        return q if self.sample is None else _taken(self.sample, rows, 0)

    def weights_of(self, rows: Any) -> Any:
        """Return the weights of the queries of some items, or None."""
        return _taken(self.weights, rows, 0)

    def combined(self, pieces: list[Piece]) -> list[Any]:
        """Join each array of the pieces into (b, g, m, ...), with zeros at places that no piece has."""
        rows, places, arrays = pieces[0]
        if len(pieces) == 1 and rows is None and places is None:
            return list(arrays)
        b, m = self.q.shape[0], self.q.shape[2]
        order = np.concatenate([np.arange(b) if rows is None else rows for rows, _, _ in pieces])
        found = []
        for same in zip(*(arrays for _, _, arrays in pieces), strict=True):
            stacks = [at_places(array, places, m) for array, (_, places, _) in zip(same, pieces, strict=True)]
            whole = stacks[0] if len(stacks) == 1 else namespace_of(self.q).concat(stacks, axis=0)
            found.append(_taken(whole, np.argsort(order, kind="stable"), 0))
        return found

    def results(self, pieces: list[Piece]) -> list[Any]:
        """Return outputs (..., H, m, D) in the caller's dtype, and the bounds (..., H, m) that follow them, if any."""
        Y, *figures = self.combined(pieces)
        Y, figures = self.torch.laid_out(Y) if self.in_memory else Y, list(map(self.as_given, figures))
        batch = self.given.batch
        figures = [self.heads.joined(reshaped(figure, (*batch, *figure.shape[1:])), 1) for figure in figures]
        return [self.heads.joined(self.given.give_back(Y)), *figures]

    def as_given(self, array: Any) -> Any:
        """Convert an array of the kernels to the library of the arguments."""
        return self.torch.tensor_of(array) if self.in_memory else array

    def with_arrays_of_caller(self, rule: SelectionRule) -> SelectionRule:
        """Return a rule whose function of a user's own sees the library of the arguments, and is checked."""
        function = rule.function
        if function is None:
            return rule

        def scores(K: Any, V: Any) -> Any:
            found = own_scores(function, self.as_given(K), self.as_given(V))
            return self.torch.memory_of(found) if self.in_memory else found

        return replace(rule, function=scores)

    def parts_of(self, state: PrunedState) -> tuple[PrunedPart, ...]:
        """Return the parts of a state with arrays of the library that computes this call."""
        convert = followable
        if self.torch is not None and self.in_memory != state.of_tensors:
            convert = self.torch.memory_of if self.in_memory else self.torch.tensor_of
        elif self.in_memory:
            return state.parts
        return tuple(converted(part, convert) for part in state.parts)


def _stays_narrow(tensors: list[Any]) -> bool:
    """Tell whether kernels of a device read tensors of one format of 16 bits, of which there is no gradient."""
    if len({X.dtype for X in tensors}) > 1 or tensors[0].dtype.itemsize != 2 or tensors[0].device.type == "cpu":
        return False
    from levattn._kernels.pruned.fused import is_fused
    from levattn._kernels.tensors import is_read_there

    return is_fused(*tensors) and is_read_there(tensors)


def sized(Q: Any, K: Any, V: Any, names: tuple[str, str, str] = ("Q", "K", "V")) -> tuple[Any, Any, Any, Heads]:
    """Return Q, K and V as arrays with their heads, or raise an error with the caller's names."""
    Q, K, V = (dense_array(name, array) for name, array in zip(names, (Q, K, V), strict=True))
    q, k, v = names
    check_sizes({q: (Q, -1, "d"), k: (K, -1, "d"), f"{k} ": (K, -2, "n"), v: (V, -2, "n")})
    return Q, K, V, heads_of(Q, K, V, names=names)


def given_scores(scores: Any, K: Any) -> Any:
    """Return scores of a user's own for keys K as an array, or raise."""
    scores = dense_array("scores", from_jax(scores, "scores") if is_jax(scores) else scores)
    if scores.shape[-1:] != K.shape[-2:-1]:
        raise ValueError(f"scores has shape {tuple(scores.shape)}; expected (..., {K.shape[-2]}), one for each key")
    return scores


def own_scores(function: Callable[..., Any], K: Any, V: Any, Q: Any = None) -> Any:
    """Return the scores (b, n) of keys (b, n, d) by a function of a user's own, in their dtype, or raise.

    Q: queries (b, g, n, d) if the function asks for them, else None.
    """
    name, found = ("scores(K, V)", function(K, V)) if Q is None else ("scores(K, V, Q)", function(K, V, Q=Q))
    found = dense_array(name, from_jax(found, name) if is_jax(found) else found)
    if tuple(found.shape) != tuple(K.shape[:2]):
        raise ValueError(f"{name} has shape {tuple(found.shape)}; expected {tuple(K.shape[:2])}, one for each key")
    is_double(name, found)  # refuses other numbers
    refuse_mixtures("K", {"K": K, name: found})
    return namespace_of(K).astype(without_gradient(found), K.dtype, copy=False)


def by_items(attend: Callable[[slice], Any], like: Any, *, worth: bool) -> list[Any]:
    """Call `attend` with all items, or with a part of them on each thread if that is worth it; return the results.

    Threads within kernels would leave the work between kernels to one thread. `like`: an array (b, ...).
    """
    b, threads = like.shape[0], num_threads()
    if not worth or threads == 1 or b < threads or not isinstance(like, np.ndarray):
        return [attend(slice(0, b))]
    found: list[Any] = [None] * threads

    def body(i: int) -> None:
        with thread_limit(1):
            found[i] = attend(slice(b * i // threads, b * (i + 1) // threads))

    parallel_for(body, threads)
    return found


def _taken(array: Any, places: Any, axis: int) -> Any:
    """Return an array at some places of one axis; None stands for all."""
    if array is None or places is None:
        return array
    if not len(places):  # needs no wait for a device
        return array[(*[slice(None)] * axis, slice(0, 0), ...)]
    xp = namespace_of(array)
    return xp.take(array, xp.asarray(places, device=device_of(array)), axis=axis)


def at_places(array: Any, places: Any, m: int) -> Any:
    """Put the rows of (b, g, s, ...) at some of m places, with zeros between them; None stands for all places."""
    if places is None:
        return array
    xp = namespace_of(array)
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
            f"query_mask has shape {flags.shape}; expected (..., {m}), and the leading axes of K"
        ) from None
