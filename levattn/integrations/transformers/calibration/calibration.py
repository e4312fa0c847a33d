"""A budget for each layer and head of a model, as it is held and written down."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from levattn.io import replace_file

__all__ = ["METRICS", "Calibration"]

METRICS = ("embedding", "logits", "perplexity")
_FORMAT, _VERSION = "levattn calibration", 1


class Calibration(Mapping[tuple[int, int], float]):
    """A budget for each layer and head of the keys, as `calibrate` chose it; `prune` takes it as its budget.

    Parameters
    ----------
    budgets : mapping
        From (layer, head) to the share of the keys, in (0, 1]; 1.0 is dense. The calibration is such a mapping, and
        has the others as attributes.
    model : str
        The type of the model.
    metric : {"embedding", "logits", "perplexity"}
        What was measured.
    target, reached : float
        The loss that was wanted, and the one measured on the sample inputs with these budgets.
    options : mapping, optional
        Further options of `prune` that the budgets are for; ``prune(model, calibration)`` uses them.

    Examples
    --------
    >>> from levattn.integrations.transformers import Calibration
    >>> chosen = Calibration({(0, 0): 0.12, (0, 1): 0.5}, "BertModel", "embedding", 0.01, 0.008)
    >>> chosen[0, 1], round(chosen.mean, 2)
    (0.5, 0.31)
    """

    def __init__(
        self,
        budgets: Mapping[tuple[int, int], float],
        model: str,
        metric: str,
        target: float,
        reached: float,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._budgets = {(int(layer), int(head)): float(share) for (layer, head), share in sorted(budgets.items())}
        self.model = model
        self.metric = metric
        self.target = float(target)
        self.reached = float(reached)
        self.options = dict(options or {})

    def __getitem__(self, key: tuple[int, int]) -> float:
        return self._budgets[key]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._budgets)

    def __len__(self) -> int:
        return len(self._budgets)

    def __repr__(self) -> str:
        return (
            f"<Calibration of {self.model}: {len(self)} heads, {self.mean:.0%} of the keys in the mean, "
            f"{self.metric} {self.reached:.3g} (wanted {self.target:.3g})>"
        )

    @property
    def mean(self) -> float:
        """The mean budget of the heads."""
        return sum(self._budgets.values()) / max(len(self), 1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration to a JSON file, which appears whole or not at all.

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
            As it was saved.

        Raises
        ------
        ValueError
            If the file is not one, or is damaged; the message tells what is wrong.
        OSError
            If it cannot be read.
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
            raise ValueError("it does not begin as one")
        if type(document.get("version")) is not int or document["version"] != _VERSION:
            raise ValueError(f"it is of version {document.get('version')!r}, and this release reads {_VERSION}")
        if not isinstance(document["model"], str) or document["metric"] not in METRICS:
            raise ValueError("model or metric is not what they can be")
        options = document["options"]
        if not isinstance(options, dict):
            raise ValueError("options are no mapping")
        if not all(value is None or isinstance(value, str | int | float) for value in options.values()):
            raise ValueError("options hold more than numbers and names")
        target, reached = document["target"], document["reached"]
        budgets: dict[tuple[int, int], float] = {}
        for layer, head, share in document["budgets"]:
            if not all(type(x) is int and x >= 0 for x in (layer, head)):
                raise ValueError(f"({layer!r}, {head!r}) are no numbers of a layer and a head")
            if type(share) not in (int, float) or not 0 < share <= 1:
                raise ValueError(f"the budget {share!r} is not in (0, 1]")
            if (layer, head) in budgets:
                raise ValueError(f"head {head} of layer {layer} is there twice")
            budgets[layer, head] = float(share)
        if not all(type(x) in (int, float) and math.isfinite(x) for x in (target, reached)):
            raise ValueError("target or reached is no finite number")
        return cls(budgets, document["model"], document["metric"], target, reached, options)
