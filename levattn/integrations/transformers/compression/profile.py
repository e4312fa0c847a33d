"""The cost of cutting each head of a decoder, and the split of a budget of bytes by these costs."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any, ClassVar, Self

import numpy as np

from levattn._core.checks import check_type, fraction, real_number
from levattn.attention import Selection
from levattn.attention.pruned.selection import selection_for_models
from levattn.exceptions import RecallWarning
from levattn.integrations.transformers.calibration import Calibration, with_budgets
from levattn.integrations.transformers.heads_table import HeadsRecord, HeadsTable, by_head, is_number

WHILE_READING = 1 / 16  # least share of a head that is pruned: its errors add up over the text that it reads
_RECALL = 2.0  # factor of the cost of recall; at 1, SmolLM2 recalls less at 6 % of the bytes
_FIGURES = ("recall", "recall_error", "text", "text_error")
_PARTS = 192  # of a head's bytes; whole numbers of them add up without rounding, so that budget 1.0 is 1.0 for all
_LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, _PARTS)


class HeadProfile(HeadsRecord, HeadsTable):
    """The cost of cutting each head of the keys of a decoder, in nats a token, as `head_profile` measured it.

    A mapping from (layer, head) to the cost: the loss of answers that need recall, plus the loss of plain text.

    Parameters
    ----------
    rows : sequence of dict
        ``layer`` and ``head`` name the head. Cutting it to `share` raises the mean loss of answers by ``recall``, and
        of the text after the context by ``text``. Both are means over rounds with different shares of other heads.
        ``recall_error`` and ``text_error`` are half the widths of their 95 % confidence intervals over tasks.
    model : str
        The type of the model.
    share : float
        Share of the bytes to which heads were cut.

    Raises
    ------
    ValueError, TypeError
        If `rows` has not one row for each head, or numbers that are not finite.

    Examples
    --------
    >>> from levattn.integrations.transformers import HeadProfile
    >>> figures = dict(recall_error=0.1, text=0.02, text_error=0.01)
    >>> rows = [dict(layer=0, head=0, recall=2.0, **figures), dict(layer=0, head=1, recall=0.0, **figures)]
    >>> profile = HeadProfile(rows, "LlamaForCausalLM", 1 / 16)
    >>> profile[0, 0]
    2.02
    >>> profile.shares(0.5625)
    {(0, 0): 1.0, (0, 1): 0.125}
    """

    _format: ClassVar = ("head profile", 1)
    _labels: ClassVar = {
        "recall": "loss of answers if a head is cut (nats)",
        "text": "loss of text if a head is cut (nats)",
    }

    def __init__(self, rows: Sequence[Mapping[str, Any]], model: str, share: float) -> None:
        self._table = by_head("rows", ((row["layer"], row["head"], row) for row in rows))
        for (layer, head), row in self._table.items():
            figures = {name: row[name] for name in _FIGURES}
            if not all(map(is_number, figures.values())):
                raise ValueError(f"rows hold {figures} for head {head} of layer {layer}; expected finite numbers")
            self._table[layer, head] = {name: float(x) for name, x in figures.items()}
        if not self._table:
            raise ValueError("rows is empty; expected one for each head")
        self.model = str(model)
        self.share = fraction("share", share)

    def __getitem__(self, key: tuple[int, int]) -> float:
        row: dict[str, float] = self._table[key]
        return max(row["recall"], 0.0) + max(row["text"], 0.0)

    def __repr__(self) -> str:
        dearest = max(self, key=self.__getitem__)
        return (
            f"<HeadProfile of {self.model}: {len(self)} heads cut to {self.share:.3g}, the dearest is head "
            f"{dearest[1]} of layer {dearest[0]} ({self[dearest]:.3g} nats)>"
        )

    def shares(self, budget: float, least: float = 0.0) -> dict[tuple[int, int], float]:
        """Return the share of the bytes that each head keeps, so that the sum of the costs is least.

        The method assumes that at a share s the cost of recall is proportional to 1 - s^(1/8), and the cost of plain
        text to 1/s - 1. At `share` both equal the measured costs. With the first curve, heads that recall stay whole
        when bytes are few, because a fact outside the remaining slots is lost. Recall counts twice, because users
        notice a lost answer before slightly worse predictions of text. The second curve is the squared error of a
        head's output, which falls in half where slots double.

        Parameters
        ----------
        budget : float in (0, 1]
            The mean of the shares, at most.
        least : float in [0, 1], default 0
            The smallest share of a head. Shares are whole 192nds of few sizes, so it may be rounded up. If `budget` is
            not above the smallest one, all heads have `budget`.

        Returns
        -------
        dict
            The share of each (layer, head).

        Raises
        ------
        ValueError, TypeError
            If budget or least is out of range, or no number.
        """
        budget, least = share_of_bytes("budget", budget), real_number("least", least)
        if not 0 <= least <= 1:
            raise ValueError(f"least is {least!r}; expected a share of the bytes in [0, 1]")
        floor = 1e-4 * max(self.values()) + 1e-12  # so that no head costs nothing
        recall, text = curves(self.share)
        costs = {
            head: (_RECALL * max(row["recall"], 0.0) / recall, (max(row["text"], 0.0) + floor) / text)
            for head, row in self._table.items()
        }
        return split_bytes(costs, budget, least)

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each head.

        Returns
        -------
        list of dict
            Rows in the form of the parameter `rows`.
        """
        return [{"layer": layer, "head": head, **row} for (layer, head), row in sorted(self._table.items())]

    def _facts(self) -> dict[str, Any]:
        return {"model": self.model, "share": self.share, "heads": self.table()}

    @classmethod
    def _of(cls, document: dict[str, Any]) -> Self:
        return cls(document["heads"], document["model"], document["share"])


@dataclass(frozen=True)
class HeadSelections:
    """The selection that each head keeps.

    named: by (layer, head).

    rest: of heads that are not named, or None if `named` must have all heads.

    source: the argument that named heads, for messages.

    whole: heads that keep all positions, in codes.
    """

    named: Mapping[tuple[int, int], Selection]
    rest: Selection | None
    source: str
    whole: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def of(
        cls, selection: Any, profile: Any, full: Collection[int], sliding: Collection[int], gain: float
    ) -> HeadSelections:
        """Return the selections from the arguments of `compress`, for a model with these layers, or raise.

        `gain`: how many positions of a head can be held in the bytes of one.
        """
        if isinstance(selection, HeadProfile):
            raise TypeError(
                "selection is a HeadProfile; expected a share, and the profile as heads: compress(model, context, "
                "0.25, heads=profile)"
            )
        if profile is not None:
            check_type("heads", profile, HeadProfile, "a HeadProfile, or None. A mapping as selection names heads")
        selection = selection.selections() if isinstance(selection, Calibration) else selection
        if isinstance(selection, Mapping):
            if profile is not None:
                raise ValueError("selection names heads, and heads is given; expected one of the two. Leave heads out")
            found = cls(_named(selection), Selection(1.0), "selection")
        elif profile is None:
            found = cls({}, _of_cache("selection", selection), "selection")
        else:
            whole = _of_cache("selection", selection)
            if not isinstance(whole.budget, float):
                raise ValueError(
                    f"heads is a HeadProfile and selection is {whole}; expected a share of the bytes as budget, which "
                    "the profile splits"
                )
            gain = 1.0 if whole.budget == 1.0 else gain
            shares = profile.shares(min(1.0, whole.budget * gain))  # of the positions
            coded = frozenset(head for head, share in shares.items() if share == 1.0)
            budgets = {head: share / gain for head, share in shares.items()}
            found = cls(with_budgets(whole, budgets), None, "heads", coded)
        for layer, head in found.named:
            if layer in sliding:
                raise ValueError(
                    f"{found.source} names head {head} of layer {layer}, which slides and keeps its window; expected "
                    "layers that attend to all positions"
                )
            if layer not in full:
                raise ValueError(f"{found.source} names layer {layer}; expected one of the {len(full)} of the model")
        cut = found.rest is not None and found.rest.budget != 1.0
        if not full and cut:
            raise ValueError(
                "all layers of the model slide and keep their windows, so nothing is cut; expected the budget 1.0"
            )
        share = 0.0 if found.rest is None or not isinstance(found.rest.budget, float) else found.rest.budget
        if cut and share * gain < 1:
            warnings.warn(
                f"all heads are cut alike ({found.rest}), because there is no profile of them: decoders then fail to "
                "recall facts of the context. Give heads=head_profile(model, tokenizer)",
                RecallWarning,
                stacklevel=3,
            )
        return found

    def distinct(self) -> set[Selection]:
        """Return all selections."""
        return {own for own in (*self.named.values(), self.rest) if own is not None}

    def of_layer(self, layer: int, heads: int) -> list[Selection]:
        """Return the selections of the heads of a layer, or raise if a named head does not exist or one is missing."""
        for number, head in self.named:
            if number == layer and not 0 <= head < heads:
                raise ValueError(f"{self.source} names head {head} of layer {layer}; expected one of {heads} heads")
        found: list[Any] = [self.named.get((layer, head), self.rest) for head in range(heads)]
        if None in found:
            head = found.index(None)
            raise ValueError(f"{self.source} has no cost of head {head} of layer {layer}; expected all heads")
        return found

    def renew_every(self) -> int | None:
        """Return how often a cache renews its slots, or raise if heads differ in it."""
        every = {own.renew_every for own in self.distinct() if own.budget != 1.0}
        if len(every) > 1:
            raise ValueError(f"selection has several values of renew_every, {every}; expected one for all heads")
        return every.pop() if every else None if self.rest is None else self.rest.renew_every


def curves(share: float) -> Any:
    """Return the costs of recall and of plain text at a share of a head's bytes, (2,), up to factors of the head."""
    return np.array([1 - share**0.125, 1 / share - 1])


def split_bytes(
    costs: Mapping[tuple[int, int], tuple[float, float]], budget: float, least: float = 0.0
) -> dict[tuple[int, int], float]:
    """Return a share for each head, their mean at most a budget, so that the sum of the costs is least.

    costs: (a, b) of each head, the factors of its `curves`.

    Shares take few levels, so that heads of a layer share groups. All begin at the lowest level. Steps to the next
    level come in the order in which the sum falls most for each byte. This is optimal but for the steps that the
    budget cuts off, because costs are convex. The remaining bytes go to the heads with the lowest share.
    """
    levels = [level for level in _LEVELS if level >= least * _PARTS]
    if budget * _PARTS <= levels[0]:
        return dict.fromkeys(costs, budget)
    steps = [(high - low, *(curves(low / _PARTS) - curves(high / _PARTS))) for low, high in pairwise(levels)]
    order = sorted(
        (-(a * recall + b * text) / more, head, i)
        for head, (a, b) in costs.items()
        for i, (more, recall, text) in enumerate(steps)
    )
    at, left = dict.fromkeys(costs, 0), (budget * _PARTS - levels[0]) * len(costs)
    for _, head, i in order:
        more = steps[i][0]
        if at[head] == i and more <= left * (1 + 1e-12):
            left, at[head] = left - more, i + 1
    shares = {head: levels[i] / _PARTS for head, i in at.items()}
    low = min(shares.values())
    few = [head for head, share in shares.items() if share == low]
    return shares | dict.fromkeys(few, min(1.0, low + left / _PARTS / len(few)))


def share_of_bytes(name: str, value: Any) -> float:
    """Return an argument that is a share of the bytes, or raise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} is {value!r}; expected a share of the bytes in (0, 1]")
    return float(value)


def _named(selection: Mapping[Any, Any]) -> dict[tuple[int, int], Selection]:
    """Return the selections of heads that a mapping names, or raise."""
    found = {}
    for key, own in selection.items():
        pair = key if isinstance(key, tuple) else ()
        if len(pair) != 2 or any(isinstance(x, bool) or not isinstance(x, Integral) for x in pair):
            raise TypeError(f"selection has the key {key!r}; expected (layer, head)")
        found[int(key[0]), int(key[1])] = _of_cache(f"selection[{key!r}]", own)
    return found


def _of_cache(name: str, selection: Any) -> Selection:
    """Return a selection that a cache can keep, or raise."""
    found = selection_for_models(selection, name)
    if found.budget is None and found.size is None:
        raise ValueError(f"{name} is {found}; expected a budget or a size of a cache")
    return found
