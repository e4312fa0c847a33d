"""The rule by which pruned attention chooses keys, and its options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from levattn.attention.pruned.slots import Slots, slots_for
from levattn.functions import Power
from levattn.sensitivity.leverage import check_epsilon

SCORES = ("residual", "expected", "leverage")


@dataclass(frozen=True)
class SelectionRule:
    """How keys are chosen, the same for all positions of a sequence; `kind` is one of `SCORES`, or "given"."""

    slots: Slots
    kind: str
    epsilon: float | None
    center: bool
    power: float | None

    @property
    def first(self) -> int:
        """Causal: the number of positions before the first selection: the slots, or a chunk with a threshold."""
        return self.slots.chunk if self.epsilon is not None else self.slots.total

    def until_selection(self, positions: int) -> int:
        """Return how many positions come before the next selection, at least one."""
        return self.first - positions if positions < self.first else self.slots.chunk - self.since_selection(positions)

    def since_selection(self, positions: int) -> int:
        """Return how many positions came after the last selection; `positions` is at least `first`."""
        return (positions - self.first) % self.slots.chunk

    def selects_at(self, positions: int) -> bool:
        """Tell whether a selection follows after this number of positions."""
        return positions >= self.first and not self.since_selection(positions)


def exponent_of(f: Any) -> float | None:
    """Return the exponent of an attention function, or None for softmax."""
    if isinstance(f, str) and f == "softmax":
        return None
    f = f.p if isinstance(f, Power) else f
    if not isinstance(f, bool) and isinstance(f, Real) and 1 <= float(f) < math.inf:
        return float(f)
    raise ValueError(f'f is {f!r}; expected "softmax", a number p >= 1 for |x|^p, or levattn.Power(p)')


def rule_of(
    n: int, options: dict[str, Any], *, kind: str, power: float | None, causal: bool, aligned: bool
) -> SelectionRule:
    """Return the rule that the options of a call ask for with n keys, or raise."""
    options = dict(options)
    epsilon, center = options.pop("epsilon"), options.pop("center")
    if epsilon is not None and (
        isinstance(epsilon, bool) or not isinstance(epsilon, Real) or not math.isfinite(epsilon)
    ):
        raise ValueError(f"epsilon is {epsilon!r}; expected a finite number, a threshold of scores")
    if epsilon is not None and kind == "leverage":
        check_epsilon(epsilon)
    if center is not None and kind != "leverage":
        raise ValueError(f'center is {center!r} and scores is {kind!r}; expected center only with scores="leverage"')
    if center and power is not None:
        raise ValueError("center is True and f is a power; expected center only for softmax")
    slots = slots_for(n, causal=causal, aligned=aligned, by_threshold=epsilon is not None, **options)
    return SelectionRule(
        slots,
        kind,
        None if epsilon is None else float(epsilon),
        power is None if center is None else bool(center),
        power,
    )
