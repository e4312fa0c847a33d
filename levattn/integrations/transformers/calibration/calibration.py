"""A budget for each layer and head of a model, and its file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from levattn.io import replace_file

METRICS = ("embedding", "logits", "perplexity")
_FORMAT, _VERSION = "levattn calibration", 2
_RISK = ("risk", "confidence", "texts")


class Calibration(Mapping[tuple[int, int], float]):
    """A budget for each layer and key head, as chosen by `calibrate`; pass it to `prune` as the budget.

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
    options : mapping, optional
        Further options of `prune` that belong to the budgets; ``prune(model, calibration)`` uses them.
    risk, confidence : float, optional
        The wanted expected loss on texts like the sample inputs, and the confidence; None with a target.
    texts : int, optional
        The number of texts that tested the risk.

    Raises
    ------
    ValueError
        If both or neither of target and risk are given, or confidence and texts do not come with risk.

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

    def __init__(
        self,
        budgets: Mapping[tuple[int, int], float],
        model: str,
        metric: str,
        target: float | None,
        reached: float,
        options: Mapping[str, Any] | None = None,
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
        self._budgets = {(int(layer), int(head)): float(share) for (layer, head), share in sorted(budgets.items())}
        self.model = model
        self.metric = metric
        self.target = None if target is None else float(target)
        self.reached = float(reached)
        self.options = dict(options or {})
        self.risk = None if risk is None else float(risk)
        self.confidence = None if confidence is None else float(confidence)
        self.texts = None if texts is None else int(texts)

    def __getitem__(self, key: tuple[int, int]) -> float:
        return self._budgets[key]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._budgets)

    def __len__(self) -> int:
        return len(self._budgets)

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
        return sum(self._budgets.values()) / max(len(self), 1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration to a JSON file, atomically.

        Parameters
        ----------
        path : path-like
            The file.
        """
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self.model,
            "metric": self.metric,
            "target": self.target,
            "reached": self.reached,
            "risk": self.risk,
            "confidence": self.confidence,
            "texts": self.texts,
            "options": self.options,
            "budgets": [[layer, head, share] for (layer, head), share in self._budgets.items()],
        }
        with replace_file(path) as stream:
            stream.write(json.dumps(document, indent=1, allow_nan=False).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a calibration from a file that `save` wrote.

        Parameters
        ----------
        path : path-like
            The file.

        Returns
        -------
        Calibration
            The saved calibration.

        Raises
        ------
        ValueError
            If the file is not a calibration, or is damaged; the message gives the reason.
        OSError
            If the file cannot be read.
        """
        try:
            document = json.loads(Path(path).read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}); expected a file of Calibration.save") from error
        try:
            return cls._from(document)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} is no calibration: {error}; expected a file of Calibration.save") from error

    @classmethod
    def _from(cls, document: Any) -> Calibration:
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT!r}")
        if type(document.get("version")) is not int or not 1 <= document["version"] <= _VERSION:
            raise ValueError(f"it is of version {document.get('version')!r}, and this release reads 1 to {_VERSION}")
        if not isinstance(document["model"], str) or document["metric"] not in METRICS:
            raise ValueError("model or metric is invalid")
        options = document["options"]
        if not isinstance(options, dict):
            raise ValueError("options are no mapping")
        if not all(value is None or isinstance(value, str | int | float) for value in options.values()):
            raise ValueError("options hold more than numbers and names")
        budgets: dict[tuple[int, int], float] = {}
        for layer, head, share in document["budgets"]:
            if not all(type(x) is int and x >= 0 for x in (layer, head)):
                raise ValueError(f"({layer!r}, {head!r}) are no numbers of a layer and a head")
            if type(share) not in (int, float) or not 0 < share <= 1:
                raise ValueError(f"the budget {share!r} is not in (0, 1]")
            if (layer, head) in budgets:
                raise ValueError(f"head {head} of layer {layer} occurs twice")
            budgets[layer, head] = float(share)
        return cls(budgets, document["model"], document["metric"], options=options, **cls._losses_from(document))

    @staticmethod
    def _losses_from(document: dict[str, Any]) -> dict[str, Any]:
        """Return the wanted and the reached loss; files of version 1 have no risk."""
        found = {name: document[name] for name in ("target", "reached")}
        if document["version"] == 1 or document["target"] is not None:
            if not all(_is_finite(value) for value in found.values()):
                raise ValueError("target or reached is no finite number")
            if any(document.get(name) is not None for name in _RISK):
                raise ValueError("it has a target, and risk, confidence or texts as well")
            return found
        found |= {name: document[name] for name in _RISK}
        if not all(_is_finite(found[name]) and 0 < found[name] < 1 for name in ("risk", "confidence")):
            raise ValueError("risk or confidence is no number above 0 and below 1")
        if not _is_finite(found["reached"]) or not 0 <= found["reached"] <= found["risk"]:
            raise ValueError("reached is no number from 0 to the risk")
        if type(found["texts"]) is not int or found["texts"] < 1:
            raise ValueError("texts is no number of texts")
        return found


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
