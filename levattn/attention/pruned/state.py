"""The state of causal pruned attention after a number of positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from levattn._kernels.pruned import Summaries, mapped
from levattn.attention.arguments import device_of, namespace_of, without_gradient
from levattn.attention.pruned.choice import Sums
from levattn.attention.pruned.selection import SelectionRule, Slots


@dataclass(frozen=True, eq=False)
class PrunedPart:
    """The state of sequences that have had the same number of positions.

    rows: (b,) int64 of numpy, the numbers of these items in the batch.

    kept, kept_values, kept_scores, kept_places: (b, s, d), (b, s, D), (b, s), (b, s): chosen keys with their
    values, given scores and positions.

    kept_count: (b,) or None.

    summaries: of all other keys except the recent ones, or None. In float64, because errors of repeated merges add up.

    radius: (b, R) in float64; no member is farther from the mean of its cluster.

    recent, recent_values, recent_scores: the last keys, (b, r, ...).

    keys, queries: sums over all positions; second moments of keys only if the rule needs them.

    largest: (b,); no value has a larger norm.

    positions: the number of positions so far.
    """

    rows: Any
    kept: Any
    kept_values: Any
    kept_scores: Any
    kept_places: Any
    kept_count: Any
    summaries: Summaries | None
    radius: Any
    recent: Any
    recent_values: Any
    recent_scores: Any
    keys: Sums
    queries: Sums
    largest: Any
    positions: int


@dataclass(frozen=True, eq=False)
class PrunedState:
    """The state of causal `pruned_attention` after some positions: its size does not grow with their number.

    Before the first selection it holds all keys and values, of fewer than ``2 slots.total`` positions (or
    `Selection.start`). After it, it holds at most ``slots.total`` keys and summaries. No call changes a state; each
    returns a new one.

    Attributes
    ----------
    slots : Slots
        The slots that each query reads.
    batch : tuple of int
        The leading axes of the keys, heads among them.
    rule, parts
        The options of selection and the arrays of the state, for later calls.
    next_scores : array of shape (..., G, T), optional
        Given scores of the positions of the next call.
    of_tensors : bool
        Whether the keys are tensors of torch in main memory. The arrays of the state are then arrays of numpy.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import causal_pruned_attention
    >>> Q, K, V = np.random.default_rng(0).standard_normal((3, 1000, 16))
    >>> Y, state = causal_pruned_attention(Q, K, V, 100, return_state=True)
    >>> int(state.positions), state.slots.total, state.nbytes < 30_000
    (1000, 100, True)
    """

    slots: Slots
    batch: tuple[int, ...]
    rule: SelectionRule
    parts: tuple[PrunedPart, ...]
    next_scores: Any = None
    # tensors would be many small objects, which live long: they cut the memory that the layers of a model reuse
    of_tensors: bool = False

    def with_scores(self, scores: Any) -> PrunedState:
        """Return this state with the scores of the next positions, if its selection goes by given scores.

        Parameters
        ----------
        scores : array of shape (..., G, T)
            A score for each key of the next call.

        Returns
        -------
        PrunedState
            The state for that call.

        Raises
        ------
        ValueError
            If the selection does not go by given scores.
        """
        if self.rule.kind != "given":
            raise ValueError(f"scores were given, and the state selects by {self.rule.kind!r}; expected none")
        return replace(self, next_scores=scores)

    @property
    def positions(self) -> int:
        """The number of positions that the longest sequence has had."""
        return max((part.positions for part in self.parts), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        return sum(_bytes(array) for part in self.parts for array in (part.rows, *arrays_of(part)))


def _bytes(array: Any) -> int:
    xp = namespace_of(array)
    info = xp.finfo if xp.isdtype(array.dtype, "real floating") else xp.iinfo
    return int(math.prod(array.shape) * info(array.dtype).bits // 8)


def continued_rule(state: PrunedState, power: float | None) -> SelectionRule:
    """Return the rule of a state, or raise if the call that continues it has another function, or lacks scores."""
    rule = state.rule
    if rule.power != power:
        raise ValueError(f"f is not the function of the state (power {rule.power}); expected the same function")
    if rule.kind == "given" and state.next_scores is None:
        raise ValueError(
            "selection is the state of a selection by given scores; expected the scores of the next positions: give "
            "state.with_scores(scores)"
        )
    return rule


def empty_part(rule: SelectionRule, rows: Any, K: Any, V: Any, scores: Any) -> PrunedPart:
    """Return the part before the first position, for keys and values like the given stacks."""
    xp = namespace_of(K)
    none, no_values = K[:, :0, :], V[:, :0, :]
    no_scores = None if scores is None else scores[:, :0]
    places = xp.zeros((K.shape[0], 0), dtype=xp.int64, device=device_of(K))
    sums = Sums.of(without_gradient(none))
    if rule.kind == "leverage" and rule.center:
        of_keys = Sums.of(without_gradient(none), centered=True)
    else:
        of_keys = sums if rule.kind == "leverage" or rule.power is not None else replace(sums, second=None)
    zeros = xp.zeros((K.shape[0],), dtype=V.dtype, device=device_of(V))
    return PrunedPart(
        rows, none, no_values, no_scores, places, None, None, None, none, no_values, no_scores, of_keys, sums, zeros, 0
    )


def picked(part: PrunedPart, which: Any) -> PrunedPart:
    """Return a part with the items at the places `which`, an array of numpy."""
    xp = namespace_of(part.recent)
    places = xp.asarray(which, device=device_of(part.recent))
    return replace(converted(part, lambda array: xp.take(array, places, axis=0)), rows=part.rows[which])


def some_of(part: PrunedPart, items: slice) -> PrunedPart:
    """Return a part with a slice of its items, whose arrays are views."""
    return replace(converted(part, lambda array: array[items, ...]), rows=part.rows[items])


def all_of(parts: list[PrunedPart]) -> PrunedPart:
    """Join parts with the same number of positions."""
    xp = namespace_of(parts[0].recent)
    others = [iter(arrays_of(part)) for part in parts]
    found = converted(parts[0], lambda _: xp.concat([next(arrays) for arrays in others], axis=0))
    return replace(found, rows=np.concatenate([part.rows for part in parts]))


def converted(part: PrunedPart, convert: Callable[[Any], Any]) -> PrunedPart:
    """Apply a function to all arrays of a part except `rows`."""
    rows = part.rows
    found: PrunedPart = mapped(part, lambda array: array if array is rows else convert(array))
    return found


def arrays_of(part: PrunedPart) -> list[Any]:
    """Return the arrays of a part except `rows`."""
    found: list[Any] = []
    for name, value in vars(part).items():
        if hasattr(value, "shape"):
            if name != "rows":
                found.append(value)
        elif isinstance(value, Sums | Summaries):
            found += [array for array in vars(value).values() if hasattr(array, "shape")]
    return found
