"""Split a budget of bytes over the heads of a model."""

from __future__ import annotations

import heapq
import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from levattn.exceptions import RecallWarning

_LEVELS = (1 / 64, 1 / 48, 1 / 32, 1 / 24, 1 / 16, 1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 1.0)


@dataclass(frozen=True)
class Shares:
    """The share of the bytes that each head keeps.

    named: by (layer, head).

    rest: the share of heads that are not named, or None if `named` must have all heads.

    source: the argument that gave the shares, for messages.
    """

    named: Mapping[tuple[int, int], float]
    rest: float | None
    source: str

    @classmethod
    def of(cls, budget: Any, profile: Any, full: Collection[int], sliding: Collection[int]) -> Shares:
        """Return the shares from the arguments of `compress`, for a model with these layers, or raise."""
        if isinstance(budget, Mapping):
            if profile is not None:
                raise ValueError("budget names heads, and heads is given; expected one of the two. Leave heads out")
            named = {_pair(key): share_of_bytes(f"budget[{key!r}]", share) for key, share in budget.items()}
            found = cls(named, 1.0, "budget")
        else:
            share = share_of_bytes("budget", budget)
            found = cls({}, share, "budget") if profile is None else cls(profile.shares(share), None, "heads")
        found._check_layers(full, sliding)
        if found.rest is not None and found.rest < 1:
            warnings.warn(
                f"all heads are cut to {found.rest:.0%}, because there is no profile of them: decoders then fail to "
                "recall facts of the context. Give heads=head_profile(model, tokenizer)",
                RecallWarning,
                stacklevel=3,
            )
        return found

    def _check_layers(self, full: Collection[int], sliding: Collection[int]) -> None:
        for layer, head in self.named:
            if layer in sliding:
                raise ValueError(
                    f"{self.source} names head {head} of layer {layer}, which slides and keeps its window; expected "
                    "layers that attend to all positions"
                )
            if layer not in full:
                raise ValueError(f"{self.source} names layer {layer}; expected one of the {len(full)} of the model")
        if not full and self.rest not in (None, 1.0):
            raise ValueError(
                "all layers of the model slide and keep their windows, so there is nothing to cut; expected budget=1.0"
            )

    def of_layer(self, layer: int, heads: int) -> list[float]:
        """Return the shares of the heads of a layer, or raise if a named head does not exist or a share is missing."""
        for number, head in self.named:
            if number == layer and head >= heads:
                raise ValueError(
                    f"{self.source} names head {head} of layer {layer}; expected one of its {heads} heads"
                )
        shares = []
        for head in range(heads):
            share = self.named.get((layer, head), self.rest)
            if share is None:
                raise ValueError(f"{self.source} has no cost of head {head} of layer {layer}; expected all heads")
            shares.append(share)
        return shares


def curves(share: float) -> Any:
    """Return the costs of recall and of plain text at a share of a head's bytes, (2,), up to factors of the head."""
    return np.array([1 - math.sqrt(share), -math.log(share)])


def split_bytes(costs: Mapping[tuple[int, int], tuple[float, float]], budget: float) -> dict[tuple[int, int], float]:
    """Return a share for each head, their mean at most a budget, so that the sum of the costs is least.

    costs: (a, b) of each head, the factors of its `curves`.

    Shares take few levels, so that heads of a layer share groups. All begin at the lowest level. Each step raises the
    head for which the sum falls most for each byte. This is optimal but for the step that the budget cuts off, because
    costs are convex. The remaining bytes go to the heads with the lowest share.
    """
    levels = [budget, *(level for level in _LEVELS if level > budget)] if budget < _LEVELS[0] else list(_LEVELS)
    at, at_level = dict.fromkeys(costs, 0), {level: curves(level) for level in levels}
    left = (budget - levels[0]) * len(costs)

    def rise(head: tuple[int, int]) -> tuple[float, tuple[int, int]]:
        low, high = levels[at[head] : at[head] + 2]
        fall = float(np.dot(costs[head], at_level[low] - at_level[high]))
        return -fall / (high - low), head

    heap = [rise(head) for head in costs]
    heapq.heapify(heap)
    while heap:
        _, head = heapq.heappop(heap)
        more = levels[at[head] + 1] - levels[at[head]]
        if more > left * (1 + 1e-12):
            continue
        left, at[head] = left - more, at[head] + 1
        if at[head] + 1 < len(levels):
            heapq.heappush(heap, rise(head))
    shares = {head: levels[i] for head, i in at.items()}
    low = min(shares.values())
    few = [head for head, share in shares.items() if share == low]
    return shares | dict.fromkeys(few, min(1.0, low + left / len(few)))


def share_of_bytes(name: str, value: Any) -> float:
    """Return an argument that is a share of the bytes, or raise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} is {value!r}; expected a share of the bytes in (0, 1]")
    return float(value)


def _pair(key: Any) -> tuple[int, int]:
    if not (isinstance(key, tuple) and len(key) == 2 and all(isinstance(x, Integral) for x in key)):
        raise TypeError(f"budget has the key {key!r}; expected (layer, head)")
    return int(key[0]), int(key[1])
