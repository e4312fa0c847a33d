"""Inspect the keys of a model's layers: their universal sets, and the attention on these sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

import levattn
from levattn.integrations.transformers.calls import model_inputs
from levattn.integrations.transformers.heads_table import HeadsTable, in_columns
from levattn.integrations.transformers.pruned import Arrays, Group
from levattn.integrations.transformers.pruning import observed

_QUERIES = 256  # of a sequence, whose attention is measured
COLUMNS = {
    "layer": "layer",
    "head": "head",
    "n": "n",
    "d": "d",
    "κ": "condition:.3g",
    "|U|": "size:.0f",
    "share": "share:.0%",
    "rank/ε": "bound",
    "max": "largest:.3f",
    "mass": "captured:.3f",
    "heavy": "heavy",
    "caught": "heavy_captured:.0%",
}


class Inspection(HeadsTable):
    """The results of `inspect_model`: a row for each layer and key head.

    Attributes
    ----------
    model : str
        The type of the model.
    epsilon : float
        The threshold of the universal sets.
    rows : list of dict
        Each row has the keys:

        - ``layer`` and ``head``;
        - ``n`` and ``d``, the number of keys (summed over sequences) and of their columns;
        - ``condition``, the condition number of the keys on their range, and ``rank``;
        - ``size`` of the universal set for x², ``share`` of the keys in it, and ``bound``, rank/ε;
        - ``vacuous``, whether the bound is not below n;
        - ``largest``, the largest leverage score;
        - ``captured``, the mean softmax mass on the set;
        - ``heavy``, the number of softmax scores of at least ε among the measured queries;
        - ``heavy_captured``, the share of these scores on keys of the set (None if there are none).

        For several sequences, sizes are means, and condition numbers are the largest.

    Examples
    --------
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from levattn.integrations.transformers import inspect_model
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=50)
    >>> model = BertModel(BertConfig(num_attention_heads=2, **sizes)).eval()
    >>> found = inspect_model(model, {"input_ids": torch.arange(40)[None]}, epsilon=0.5)
    >>> len(found.rows), found.rows[0]["n"], found.rows[0]["rank"]
    (4, 40, 16)
    >>> print(found)  # doctest: +ELLIPSIS
    layer  head   n   d ...
    """

    _labels: ClassVar = {
        "size": "keys in the universal set",
        "share": "share of the keys in the universal set",
        "captured": "softmax mass on the universal set",
        "heavy_captured": "share of heavy softmax scores on the universal set",
        "largest": "largest leverage score",
        "condition": "condition number of the keys",
    }

    def __init__(self, model: str, epsilon: float, rows: list[dict[str, Any]]) -> None:
        self.model = model
        self.epsilon = epsilon
        self.rows = rows

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each layer and key head.

        Returns
        -------
        list of dict
            Copies of `rows`.
        """
        return [dict(row) for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Return the model, the threshold and the rows as plain numbers and strings.

        Returns
        -------
        dict
            ``model``, ``epsilon`` and ``heads``, the rows.
        """
        return {"model": self.model, "epsilon": self.epsilon, "heads": self.rows}

    def __str__(self) -> str:
        """Return a table in plain text, with the columns of ``levattn inspect``, and the means of share and mass."""
        return "\n".join([in_columns(printed(self.rows), COLUMNS), *mean_line(self.rows)])

    def __repr__(self) -> str:
        return f"<Inspection of {self.model}: {len(self.rows)} heads, epsilon={self.epsilon}>"


def printed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows to print in `COLUMNS`: a star marks a bound that is vacuous."""
    return [row | {"bound": f"{row['bound']:.0f}{'*' if row['vacuous'] else ''}"} for row in rows]


def mean_line(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line that compares the mean share of the keys in the sets with their mean mass; none without rows."""
    if not rows:
        return []
    share, mass = (sum(row[name] for row in rows) / len(rows) for name in ("share", "captured"))
    return [f"mean over heads: {share:.0%} of the keys hold {mass:.0%} of the softmax mass"]


def inspect_model(
    model: Any,
    inputs: Mapping[str, Any],
    *,
    epsilon: float = 0.05,
    layers: Iterable[int] | None = None,
) -> Inspection:
    r"""Compute the universal sets of a model's keys for f(x) = x², and the softmax attention on these sets.

    The universal set is exact: it holds every key that some query can give an x²-attention of at least ε. The softmax
    figures are measurements: the mass on the set, and the share of the scores of at least ε on its keys.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As for `prune`. It runs once, and stays unchanged.
    inputs : mapping of str to tensor
        A batch of the model's inputs, e.g. ``tokenizer(text, return_tensors="pt")``.
    epsilon : float in (0, 1], default 0.05
        The threshold.
    layers : iterable of int, optional
        Numbers of the layers to inspect. If None, all layers without a window, or with one that holds the inputs.

    Returns
    -------
    Inspection
        A row for each layer and head.

    Raises
    ------
    TypeError, ValueError
        If epsilon is out of range, or inputs is no mapping of tensors, or as `prune` raises for unsupported models and
        inputs.

    Notes
    -----
    Time O(n d²) a head, and O(n d) for each of up to 256 queries of a sequence; memory for their softmax scores.

    References
    ----------
    Kannan, Bhattacharyya, Kacham and Woodruff, LevAttention, arXiv:2410.05462, Theorem 1.

    Examples
    --------
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from levattn.integrations.transformers import inspect_model
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=50)
    >>> model = BertModel(BertConfig(num_attention_heads=2, **sizes)).eval()
    >>> found = inspect_model(model, {"input_ids": torch.arange(40)[None]}, layers=[1])
    >>> [(row["layer"], row["head"]) for row in found.rows]
    [(1, 0), (1, 1)]
    """
    rows = []
    for layer, calls in observed(model, model_inputs("inputs", inputs), layers).items():
        for head in range(calls[0].k.shape[1] if calls else 0):
            parts = [part for arrays in calls for part in _figures(arrays, head, epsilon)]
            if parts:
                rows.append({"layer": layer, "head": head, **_together(parts)})
    return Inspection(type(model).__name__, float(epsilon), rows)


def _figures(arrays: Arrays, head: int, epsilon: float) -> Iterator[dict[str, Any]]:
    """Yield the figures of each sequence: of its keys, their universal set, and the softmax scores of some queries."""
    of_head = arrays.of_heads(Group((head,), None))
    for b in range(arrays.k.shape[0]):
        there = torch.arange(arrays.k.shape[2], device=arrays.k.device)
        if arrays.present is not None:
            there = there[arrays.present[b]]
        n = len(there)
        if not n:
            continue
        K = of_head.k[b, 0, there].detach()
        places = there[np.unique(np.linspace(0, n - 1, _QUERIES).astype(np.int64))]
        P = of_head.of_sequences([b]).dense_weights(places)[0][..., there].reshape(-1, n).double()
        universal = levattn.universal_set(K, epsilon)
        inside, heavy = torch.as_tensor(universal.mask, device=P.device), universal.epsilon <= P
        yield {
            "n": n,
            "d": K.shape[1],
            "condition": float(universal.condition),
            "rank": int(universal.rank),
            "size": float(inside.sum()),
            "bound": float(universal.size_bound),
            "vacuous": bool(universal.is_vacuous),
            "largest": float(universal.scores.max()),
            "captured": float(P[:, inside].sum(1).mean()),
            "heavy": int(heavy.sum()),
            "caught": int(heavy[:, inside].sum()),
        }


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of several sequences as one row: sums of numbers, means of sizes, else the largest."""
    row = {name: max(part[name] for part in parts) for name in parts[0]}
    row |= {name: sum(part[name] for part in parts) for name in ("n", "heavy", "caught")}
    row |= {name: sum(part[name] for part in parts) / len(parts) for name in ("size", "captured")}
    caught = row.pop("caught")
    share = row["size"] * len(parts) / row["n"]
    return {**row, "share": share, "heavy_captured": caught / row["heavy"] if row["heavy"] else None}
