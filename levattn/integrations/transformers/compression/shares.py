"""How a budget of bytes is split over the heads of a model."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

from levattn.exceptions import RecallWarning

__all__ = ["SHARES", "shares_for", "split_bytes"]

SHARES = (1 / 64, 1 / 48, 1 / 32, 1 / 24, 1 / 16, 1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 1.0)


def shares_for(budget: Any, profile: Any) -> Callable[[int, int], float]:
    """Return the share of the bytes that a head keeps, by the number of its layer and its own, or raise."""
    if isinstance(budget, Mapping):
        if profile is not None:
            raise ValueError("budget names heads, and heads is given; expected one of the two. Leave heads out")
        named = {_pair(key): _in_range(f"budget[{key!r}]", share) for key, share in budget.items()}
        return lambda layer, head: named.get((layer, head), 1.0)
    share = _in_range("budget", budget)
    if profile is None:
        if share < 1:
            warnings.warn(
                f"all heads are cut to {share:.0%}, as there is no profile of them: decoders lose what they should "
                "recall. Give heads=head_profile(model, tokenizer)",
                RecallWarning,
                stacklevel=3,
            )
        return lambda *_: share
    shares = split_bytes({head: profile.cost(*head) for head in profile}, share)

    def of(layer: int, head: int) -> float:
        if (layer, head) not in shares:
            raise ValueError(f"heads does not tell what head {head} of layer {layer} costs; expected all heads")
        return shares[layer, head]

    return of


def split_bytes(
    costs: Mapping[tuple[int, int], Callable[[float], float]], budget: float
) -> dict[tuple[int, int], float]:
    """Return a share for each head of which the mean is at most a budget, so that the sum of the costs is least.

    costs: what each head costs at a share, falling. Shares are among `SHARES`; the steps are those of the convex hulls
    of the costs, from the steepest, which is optimal but for the step that the budget cuts off. What is left then goes
    to the heads with the smallest share.
    """
    least = min(budget, SHARES[0])
    levels = sorted({least, *SHARES, *((budget,) if budget < SHARES[0] else ())})
    at = dict.fromkeys(costs, 0)
    total, used = budget * len(costs), least * len(costs)

    def steepest(head: tuple[int, int]) -> tuple[float, int] | None:
        here, cost = at[head], costs[head]
        steps = (
            ((cost(levels[here]) - cost(levels[i])) / (levels[i] - levels[here]), i)
            for i in range(here + 1, len(levels))
        )
        return max(steps, default=None)

    heap = [(-step[0], head, step[1]) for head in costs if (step := steepest(head))]
    heapq.heapify(heap)
    while heap:
        _, head, to = heapq.heappop(heap)
        more = levels[to] - levels[at[head]]
        if used + more > total * (1 + 1e-12):
            continue
        used, at[head] = used + more, to
        if step := steepest(head):
            heapq.heappush(heap, (-step[0], head, step[1]))
    shares = {head: levels[i] for head, i in at.items()}
    low = min(shares.values())
    few = [head for head, share in shares.items() if share == low]
    if low < 1:
        raised = min(low + (total - used) / len(few), min((x for x in levels if x > low), default=1.0))
        shares.update(dict.fromkeys(few, raised))
    return shares


def _in_range(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} is {value!r}; expected a share of the bytes in (0, 1]")
    return float(value)


def _pair(key: Any) -> tuple[int, int]:
    if not (isinstance(key, tuple) and len(key) == 2 and all(isinstance(x, Integral) for x in key)):
        raise TypeError(f"budget has the key {key!r}; expected (layer, head)")
    return int(key[0]), int(key[1])
