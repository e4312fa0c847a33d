"""Losses of a pruned model against the dense model, on all texts or for each text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from levattn.integrations.transformers.pruning import prune


class Loss:
    """The loss of budgets on all inputs."""

    def __init__(self, model: Any, batches: list[dict[str, Any]], metric: str, advance: Callable[[int], None]) -> None:
        self.model, self.batches, self.metric, self.advance = model, batches, metric, advance
        self.dense = self._read()

    def __call__(self, budgets: dict[tuple[int, int], float], options: dict[str, Any]) -> float:
        """Return the loss with these budgets and options of `prune`."""
        with prune(self.model, budgets, measure=False, **options):
            found = self._read()
        if self.metric == "perplexity":
            return perplexity(found) / perplexity(self.dense) - 1
        total = count = 0.0
        for mine, dense in zip(found, self.dense, strict=True):
            values = _distances(self.metric, mine, dense)
            if self.metric == "logits":
                values = values[dense[1]]
            total += float(values.sum())
            count += values.numel()
        return max(0.0, total / count)

    def _read(self) -> list[tuple[Any, Any]]:
        found = []
        for batch in self.batches:
            found.append(_read(self.model, batch, self.metric))
            self.advance(1)
        return found


def text_losses(
    model: Any,
    batches: list[dict[str, Any]],
    candidates: Sequence[dict[tuple[int, int], float]],
    metric: str,
    options: dict[str, Any],
    advance: Callable[[int], None],
) -> npt.NDArray[np.float64]:
    """Return the loss of each text (rows), at most 1, with each of several budgets (columns).

    Memory holds the outputs of two runs on one batch at a time.
    """
    rows = []
    for batch in batches:
        dense = _read(model, batch, metric)
        advance(1)
        losses = []
        for budgets in candidates:
            with prune(model, budgets, measure=False, **options):
                mine = _read(model, batch, metric)
            advance(1)
            losses.append(_by_text(metric, mine, dense).clamp(0, 1).cpu().numpy())
        rows.append(np.stack(losses, axis=1))
    found = np.concatenate(rows).astype(np.float64)
    if np.isnan(found).any():
        raise ValueError(
            "inputs has a text whose loss is not a number; expected texts with an unmasked token (two for "
            "perplexity), and a model with finite outputs"
        )
    return found


def _by_text(metric: str, mine: tuple[Any, Any], dense: tuple[Any, Any]) -> Any:
    """Return the loss of each text of a batch; not a number for a text without positions."""
    values = _distances(metric, mine, dense)
    if metric == "embedding":
        return values
    there = dense[1]
    means = torch.where(there, values, 0).sum(1) / there.sum(1)
    return torch.expm1(means) if metric == "perplexity" else means


def _distances(metric: str, mine: tuple[Any, Any], dense: tuple[Any, Any]) -> Any:
    """Return one minus the cosine of each text, or the divergence or the increase of −log p at each position."""
    if metric == "embedding":
        return 1 - torch.nn.functional.cosine_similarity(mine[0], dense[0], dim=-1)
    if metric == "perplexity":
        return dense[0] - mine[0]
    return (dense[0].exp() * (dense[0] - mine[0])).sum(-1)


def _read(model: Any, batch: dict[str, Any], metric: str) -> tuple[Any, Any]:
    """Return the inputs of the loss, in float64: embeddings, or log-probabilities and flags of the ones to count."""
    output = model(**batch)
    if metric == "embedding":
        if getattr(output, "last_hidden_state", None) is None:
            _refuse(model, metric, "last_hidden_state", "logits")
        return embeddings(batch, output), None
    if getattr(output, "logits", None) is None or output.logits.ndim != 3:
        _refuse(model, metric, "logits of each position", "embedding")
    if metric == "logits":
        return output.logits.double().log_softmax(-1), _present(batch, output.logits)
    if "input_ids" not in batch:
        raise ValueError('inputs has no input_ids; expected them with metric="perplexity"')
    return following(batch, output)


def _refuse(model: Any, metric: str, missing: str, other: str) -> None:
    raise ValueError(
        f"{type(model).__name__} returns no {missing}, which metric={metric!r} needs; expected another "
        f"metric, e.g. {other!r}, or a model with that output"
    )


def _present(batch: dict[str, Any], like: Any) -> Any:
    mask = batch.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)
    return mask.bool()


def embeddings(batch: dict[str, Any], output: Any) -> Any:
    """Return the means of an output's last hidden states over unmasked positions, in float64."""
    states = output.last_hidden_state
    mask = _present(batch, states)[..., None]
    return (states.double() * mask).sum(1) / mask.sum(1)


def following(batch: dict[str, Any], output: Any) -> tuple[Any, Any]:
    """Return the log-probability of each next token in an output, in float64, and flags of the ones to count."""
    log_p, there = output.logits[:, :-1].double().log_softmax(-1), _present(batch, output.logits)
    return log_p.gather(-1, batch["input_ids"][:, 1:, None])[..., 0], there[:, 1:] & there[:, :-1]


def perplexity(parts: list[tuple[Any, Any]]) -> float:
    """Return the perplexity from the results of `following` for all batches."""
    total = sum(float(values[there].sum()) for values, there in parts)
    return math.exp(-total / sum(int(there.sum()) for _, there in parts))
