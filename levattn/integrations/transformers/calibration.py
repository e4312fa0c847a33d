"""A budget for each layer and head of a model, and its file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral
from typing import Any, ClassVar, Self

from levattn._core.checks import check_type, fraction, positive_number, real_number, whole_number
from levattn.attention import Selection
from levattn.integrations.transformers.heads_table import HeadsRecord, by_head, is_number

_OWN = "given", "function"  # scores without a name
METRICS = ("embedding", "logits", "perplexity")
_RISK = ("risk", "confidence", "texts")
_FACTS = ("model", "metric", "target", "reached", *_RISK)


def with_budgets(selection: Selection, budgets: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], Selection]:
    """Return a selection with the budget of each head."""
    return {head: replace(selection, budget=share) for head, share in budgets.items()}


def _is_place(number: Any) -> bool:
    """Tell whether this is the number of a layer or a head."""
    return not isinstance(number, bool) and isinstance(number, Integral) and int(number) >= 0


def _shares_of_heads(budgets: Any) -> dict[tuple[int, int], float]:
    """Return the share of each layer and head as numbers of Python, or raise."""
    check_type("budgets", budgets, Mapping, "a mapping from (layer, head) to a share of the keys")
    found = {}
    for key, share in budgets.items():
        pair = tuple(key) if isinstance(key, tuple | list) else ()
        if len(pair) != 2 or not all(_is_place(number) for number in pair):
            raise ValueError(f"budgets has the key {key!r}; expected the numbers of a layer and a head, from 0")
        found[int(pair[0]), int(pair[1])] = real_number(f"budgets[{key!r}]", share)
        if not 0 < found[int(pair[0]), int(pair[1])] <= 1:
            raise ValueError(f"budgets[{key!r}] is {share!r}; expected a share of the keys in (0, 1]")
    return found


class Calibration(HeadsRecord):
    """A budget for each layer and key head, as chosen by `calibrate`; pass it to `prune` as the selection.

    Parameters
    ----------
    budgets : mapping
        From (layer, head) to the share of the keys, in (0, 1]; 1.0 is dense. The calibration is such a mapping itself,
        and has the other parameters as attributes.
    model : str
        The type of the model.
    metric : {"embedding", "logits", "perplexity"}
        The measured loss.
    target : float, optional
        The wanted loss on the sample inputs; None with a risk.
    reached : float
        The measured loss with these budgets, on the sample inputs or as a mean over the texts that tested the risk.
    selection : Selection, optional
        The other options of the selection, which belong to the budgets; ``prune(model, calibration)`` uses them.
    risk, confidence : float, optional
        The wanted expected loss on texts like the sample inputs, and the confidence; None with a target.
    texts : int, optional
        The number of texts that tested the risk.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type or is out of range. If both or neither of target and risk are given, or
        confidence and texts do not come with risk. Also if the selection has a size, a threshold or an array of
        scores.

    Examples
    --------
    >>> from levattn.integrations.transformers import Calibration
    >>> chosen = Calibration({(0, 0): 0.12, (0, 1): 0.5}, "BertModel", "embedding", 0.01, 0.008)
    >>> chosen[0, 1], round(chosen.mean, 2)
    (0.5, 0.31)
    >>> loss = dict(target=None, reached=0.008, risk=0.02, confidence=0.95, texts=300)
    >>> Calibration(chosen, "BertModel", "embedding", **loss)
    <Calibration of BertModel: 2 heads, 31% of the keys in the mean, embedding 0.008 on 300 texts
    (risk at most 0.02 with confidence 0.95)>
    """

    _format: ClassVar = ("calibration", 3)
    _oldest: ClassVar = 3  # earlier files have options in place of a selection

    def __init__(
        self,
        budgets: Mapping[tuple[int, int], float],
        model: str,
        metric: str,
        target: float | None,
        reached: float,
        selection: Selection | None = None,
        *,
        risk: float | None = None,
        confidence: float | None = None,
        texts: int | None = None,
    ) -> None:
        if (target is None) == (risk is None):
            raise ValueError(f"target is {target!r} and risk is {risk!r}; expected one of them")
        if {value is None for value in (risk, confidence, texts)} == {True, False}:
            raise ValueError(
                f"risk, confidence and texts are {risk!r}, {confidence!r} and {texts!r}; expected all of them or none"
            )
        self._table = dict(sorted(_shares_of_heads(budgets).items()))
        check_type("model", model, str, "the name of a type")
        if metric not in METRICS:
            raise ValueError(f"metric is {metric!r}; expected one of {', '.join(METRICS)}")
        self.model, self.metric = model, metric
        found = Selection() if selection is None else selection
        check_type("selection", found, Selection, "a Selection, or None")
        if found.size is not None or found.epsilon is not None or found.kind == "given":
            raise ValueError(
                f"selection is {found}; expected one with a budget alone, and named scores or a function of keys and "
                "values"
            )
        self.selection = replace(found, budget=None)
        self.target = None if target is None else positive_number("target", target, what="a finite loss above 0")
        self.risk, self.confidence = (
            None if value is None else fraction(name, value)
            for name, value in (("risk", risk), ("confidence", confidence))
        )
        self.texts = None if texts is None else whole_number("texts", texts)
        self.reached = real_number("reached", reached)
        if not math.isfinite(self.reached) or (self.risk is not None and not 0 <= self.reached <= self.risk):
            wish = "a finite loss" if self.risk is None else f"a loss from 0 to the risk, {self.risk:.6g}"
            raise ValueError(f"reached is {reached!r}; expected {wish}")

    def __getitem__(self, key: tuple[int, int]) -> float:
        return float(self._table[key])

    def __repr__(self) -> str:
        if self.target is None:
            wanted = f"on {self.texts} texts (risk at most {self.risk:.3g} with confidence {self.confidence:.6g})"
        else:
            wanted = f"(wanted {self.target:.3g})"
        return (
            f"<Calibration of {self.model}: {len(self)} heads, {self.mean:.0%} of the keys in the mean, "
            f"{self.metric} {self.reached:.3g} {wanted}>"
        )

    @property
    def mean(self) -> float:
        """The mean budget of the heads."""
        return sum(self.values()) / max(len(self), 1)

    def selections(self) -> dict[tuple[int, int], Selection]:
        """Return the selection of each head.

        Returns
        -------
        dict from (layer, head) to Selection
            The selections that `prune` takes.
        """
        return with_budgets(self.selection, self)

    def _facts(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in _FACTS}
        given = {name: value for name, value in vars(self.selection).items() if value is not None}
        if self.selection.kind in _OWN:
            raise ValueError(
                "the selection has a function of scores, which no file holds; expected a name of scores. Keep the "
                "budgets with dict(calibration)"
            )
        return {**facts, "selection": given, "budgets": [[*head, share] for head, share in self.items()]}

    @classmethod
    def _of(cls, document: dict[str, Any]) -> Self:
        found = document
        if not isinstance(found["model"], str) or found["metric"] not in METRICS:
            raise ValueError("model or metric is invalid")
        if not isinstance(found["selection"], dict):
            raise ValueError("selection is no mapping")
        try:
            selection = Selection(**found["selection"])
        except TypeError as error:
            raise ValueError(f"selection has an option of no Selection, or of another type ({error})") from None
        if selection.kind in _OWN:
            raise ValueError("selection has scores without a name")
        if found["target"] is not None:
            if not (is_number(found["target"]) and is_number(found["reached"])):
                raise ValueError("target or reached is no finite number")
            if any(found[name] is not None for name in _RISK):
                raise ValueError("it has a target, and risk, confidence or texts as well")
        elif not all(is_number(found[name]) and 0 < found[name] < 1 for name in ("risk", "confidence")):
            raise ValueError("risk or confidence is no number above 0 and below 1")
        elif not is_number(found["reached"], 0, found["risk"]):
            raise ValueError("reached is no number from 0 to the risk")
        elif type(found["texts"]) is not int or found["texts"] < 1:
            raise ValueError("texts is no number of texts")
        budgets = by_head("budgets", found["budgets"])
        for share in budgets.values():
            if not is_number(share, 0, 1) or share == 0:
                raise ValueError(f"the budget {share!r} is not in (0, 1]")
        return cls(budgets, **{name: found[name] for name in _FACTS}, selection=selection)
