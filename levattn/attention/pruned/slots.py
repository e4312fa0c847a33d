"""The slots of a query of pruned attention: how many keys of each kind it reads, and the rule that selects them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from levattn._core.arrays import is_torch, on_cuda
from levattn._core.checks import whole_number
from levattn.attention.arguments import namespace_of
from levattn.exceptions import NonFiniteError
from levattn.functions import Power
from levattn.sensitivity.leverage import check_epsilon

_CHUNK = 64  # positions between two selections of causal attention by default
_NARROW = 16  # below this half, slots of a chunk go to other kinds, which matter more in small budgets
_NEAR = 8  # keys on each side of a query at most, where a budget is split


@dataclass(frozen=True)
class Slots:
    """The slots that each query of `pruned_attention` has, by their kinds.

    Attributes
    ----------
    selected : int
        Keys chosen by their scores, for each head of the keys.
    summaries : int
        Clusters that stand for all keys that are neither selected nor first.
    window : int
        Keys near a query. Not causal: on each side of it, which takes ``2 window + 1`` slots (none for 0).
        Causal: at least this many keys before the last selection.
    sinks : int
        Number of first keys of the sequence, kept whatever their scores.
    chunk : int
        Causal: positions between two selections; a query reads the keys since the last one up to its own. Else 0.

    Examples
    --------
    >>> from levattn.attention import Slots
    >>> Slots.of(0.2, 512)
    Slots(selected=17, summaries=68, window=8, sinks=0, chunk=0)
    >>> Slots.of(0.2, 512).total
    102
    """

    selected: int
    summaries: int = 0
    window: int = 0
    sinks: int = 0
    chunk: int = 0

    @property
    def total(self) -> int:
        """The largest number of slots of a query, which the last query before a selection has."""
        near = self.window + self.chunk if self.chunk else (2 * self.window + 1 if self.window else 0)
        return self.selected + self.summaries + self.sinks + near

    @classmethod
    def of(cls, budget: float, n: int, *, causal: bool = False) -> Slots:
        """Split a budget: two fifths at most for the keys near a query, four fifths of the rest for summaries.

        Scores select keys for the remaining slots. (On a pretrained encoder near keys matter most with few slots, and
        summaries with many; examples/pruning.)

        Parameters
        ----------
        budget : int or float
            Slots for each query: their number, or a share of the keys in (0, 1], rounded down.
        n : int
            Number of keys.
        causal : bool, default False
            Whether the attention is causal. Then up to half goes to the chunk (a quarter below 64 slots) and an eighth
            to the keys before it. Summaries get five eighths of the rest.

        Returns
        -------
        Slots
            Slots whose ``total`` is the budget; if it covers all keys, ``selected = n`` and nothing else.

        Raises
        ------
        TypeError, ValueError
            If the budget is not a number, or below one slot.
        """
        return cls._split(_total(budget, n), n, causal)

    @classmethod
    def _split(cls, total: int, n: int, causal: bool) -> Slots:
        if total >= n:
            return cls(n, chunk=_CHUNK if causal else 0)
        if causal:
            chunk, window = max(1, total // 4, total // 2 - _NARROW), total // 8
            left = total - window - chunk
            return cls(left - left * 5 // 8, left * 5 // 8, window, 0, chunk)
        window = max(0, min(_NEAR, (total * 2 // 5 - 1) // 2))
        near = 2 * window + 1 if window else 0
        summaries = (total - near) * 4 // 5
        return cls(total - near - summaries, summaries, window)


def slots_for(
    n: int,
    *,
    causal: bool,
    aligned: bool,
    budget: Any,
    size: Any,
    by_threshold: bool,
    summaries: Any,
    window: Any,
    sinks: Any,
    chunk: Any,
) -> Slots:
    """Return the slots that the options of a call ask for, or raise; `aligned`: queries and keys share positions."""
    if (budget is None) + (size is None) + (not by_threshold) != 2:
        raise ValueError(
            f"budget={budget!r}, size={size!r} and epsilon={'given' if by_threshold else None} were given; expected "
            "one of the three"
        )
    if chunk is not None and not causal:
        raise ValueError(f"chunk is {chunk!r} and causal is False; expected chunk only with causal=True")
    if window and not aligned:
        raise ValueError(
            f"window is {window!r}, but there are not as many queries as keys; expected window=0, as no key is near "
            "a query"
        )
    total = n if budget is None else _total(budget, n)
    usual = Slots(0, chunk=_CHUNK if causal else 0) if budget is None else Slots._split(total, n, causal)
    parts = {
        "summaries": _count("summaries", summaries, 0, usual.summaries),
        "window": _count("window", window, 0, usual.window if aligned else 0),
        "sinks": _count("sinks", sinks),
        "chunk": _count("chunk", chunk, 1, usual.chunk) if causal else 0,
    }
    if budget is None:
        return Slots(n if by_threshold else _count("size", size), **parts)
    if total >= n:
        return usual
    left = total - Slots(0, **parts).total
    if left < 0:
        shown = ", ".join(f"{name}={value}" for name, value in parts.items())
        raise ValueError(
            f"budget={budget!r} is {total} slots, and {shown} take {total - left}; expected a larger budget"
        )
    return Slots(left, **parts)


def _total(budget: Any, n: int) -> int:
    """Return the number of slots of a budget, a number or a share of n keys, or raise."""
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise TypeError(f"budget is {budget!r}; expected a number of slots, or a share of the keys in (0, 1]")
    if isinstance(budget, Integral):
        total = int(budget)
        if total < 1:
            raise ValueError(f"budget is {budget!r}; expected at least one slot")
        return total
    if not 0 < float(budget) <= 1:
        raise ValueError(f"budget is {budget!r}; expected a whole number of slots, or a share of the keys in (0, 1]")
    return max(1, int(float(budget) * n + 1e-9))


def _count(name: str, value: Any, least: int = 0, default: int = 0) -> int:
    if value is None:
        return default
    return whole_number(name, value, least)


class Checks:
    """Conditions that hold unless numbers are not finite or out of range, each with its message.

    Reading a condition from a device waits for the device, so conditions of tensors and of CuPy wait until `settle`.
    Other conditions are checked at once.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, str, type[ValueError]]] = []

    def expect(self, holds: Any, message: str, kind: type[ValueError] = NonFiniteError) -> None:
        """Raise an error with a message, now or in `settle`, unless `holds`, an array without axes, is true."""
        if is_torch(holds) or on_cuda(holds):
            self._waiting.append((holds, message, kind))
        elif not bool(holds):
            raise kind(message)

    def settle(self) -> None:
        """Raise for the first condition so far that does not hold, with one wait for all."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        xp = namespace_of(waiting[0][0])
        if not bool(xp.all(xp.stack([holds for holds, *_ in waiting]))):
            message, kind = next((message, kind) for holds, message, kind in waiting if not bool(holds))
            raise kind(message)


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
