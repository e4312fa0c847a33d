"""The cost of cutting each head of a decoder, and the split of a budget by these costs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from levattn._core.checks import fraction
from levattn.integrations.transformers.compression.shares import curves, share_of_bytes, split_bytes
from levattn.integrations.transformers.heads_table import HeadsTable
from levattn.io import replace_file

_FORMAT, _VERSION = "levattn head profile", 1
# Factor of the cost of recall; on SmolLM2 it recalls better than 1 at 12 %, at the same loss of text
_RECALL = 4.0
FIGURES = ("recall", "recall_error", "text", "text_error")


class HeadProfile(HeadsTable, Mapping[tuple[int, int], float]):
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

    _labels: ClassVar = {
        "recall": "loss of answers if a head is cut (nats)",
        "text": "loss of text if a head is cut (nats)",
    }

    def __init__(self, rows: Sequence[Mapping[str, Any]], model: str, share: float) -> None:
        self._table: dict[tuple[int, int], dict[str, float]] = {}
        for row in rows:
            key, figures = (row["layer"], row["head"]), {name: row[name] for name in FIGURES}
            if not all(type(number) is int and number >= 0 for number in key) or key in self._table:
                raise ValueError(f"rows name head {key[1]!r} of layer {key[0]!r}; expected each head once, from 0")
            if not all(type(x) in (int, float) and math.isfinite(x) for x in figures.values()):
                raise ValueError(f"rows hold {figures} for head {key[1]} of layer {key[0]}; expected finite numbers")
            self._table[key] = {name: float(x) for name, x in figures.items()}
        if not self._table:
            raise ValueError("rows is empty; expected one for each head")
        self.model = str(model)
        self.share = fraction("share", share)

    def __getitem__(self, key: tuple[int, int]) -> float:
        row = self._table[key]
        return max(row["recall"], 0.0) + max(row["text"], 0.0)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __repr__(self) -> str:
        dearest = max(self, key=self.__getitem__)
        return (
            f"<HeadProfile of {self.model}: {len(self)} heads cut to {self.share:.3g}, the dearest is head "
            f"{dearest[1]} of layer {dearest[0]} ({self[dearest]:.3g} nats)>"
        )

    def shares(self, budget: float) -> dict[tuple[int, int], float]:
        """Return the share of the bytes that each head keeps, so that the sum of the costs is least.

        The method assumes that at a share s the cost of recall is proportional to 1 - √s, and the cost of plain text
        to log(1/s). At `share` both equal the measured costs. With the first curve, heads that recall stay whole when
        bytes are few, because a fact outside the remaining slots is lost. Recall counts four times, because users
        notice a lost answer before slightly worse predictions of text.

        Parameters
        ----------
        budget : float in (0, 1]
            The mean of the shares, at most.

        Returns
        -------
        dict
            The share of each (layer, head).

        Raises
        ------
        ValueError
            If budget is out of range.
        """
        budget = share_of_bytes("budget", budget)
        least = 1e-4 * max(self.values()) + 1e-12  # so that no head costs nothing
        recall, text = curves(self.share)
        costs = {
            head: (_RECALL * max(row["recall"], 0.0) / recall, (max(row["text"], 0.0) + least) / text)
            for head, row in self._table.items()
        }
        return split_bytes(costs, budget)

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each head.

        Returns
        -------
        list of dict
            Rows in the form of the parameter `rows`.
        """
        return [{"layer": layer, "head": head, **row} for (layer, head), row in sorted(self._table.items())]

    _rows = table

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain numbers and strings.

        Returns
        -------
        dict
            ``format``, ``version``, ``model``, ``share`` and ``heads``, the rows.
        """
        known = {"format": _FORMAT, "version": _VERSION, "model": self.model, "share": self.share}
        return {**known, "heads": self.table()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a JSON file, which appears whole or not at all.

        Parameters
        ----------
        path : path-like
            The file.
        """
        with replace_file(path) as stream:
            stream.write(json.dumps(self.to_dict(), indent=1, allow_nan=False).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HeadProfile:
        """Read a profile from a file that `save` wrote.

        Parameters
        ----------
        path : path-like
            The file.

        Returns
        -------
        HeadProfile
            The saved profile.

        Raises
        ------
        ValueError
            If the file is no profile, or is damaged; the message names the fault.
        OSError
            If the file cannot be read.
        """
        try:
            document = json.loads(Path(path).read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}); expected a file of HeadProfile.save") from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ValueError(f"{path} is no profile of heads; expected a file of HeadProfile.save")
        if document.get("version") != _VERSION:
            raise ValueError(f"{path} is of version {document.get('version')!r}, and this release reads {_VERSION}")
        try:
            return cls(document["heads"], document["model"], document["share"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is a damaged profile of heads: {error}") from error
