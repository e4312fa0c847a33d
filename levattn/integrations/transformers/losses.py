"""Losses of a pruned model against the dense model, and tests that they are small for further texts as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from levattn.attention import Selection
from levattn.integrations.transformers.calibration import with_budgets
from levattn.integrations.transformers.calls import whole_numbers
from levattn.integrations.transformers.discovery import discovered, whole_layers
from levattn.integrations.transformers.pruned import PRUNED
from levattn.integrations.transformers.pruning import prune, register
from levattn.integrations.transformers.report import PruneReport

Batches = list[dict[str, Any]]
Budgets = dict[tuple[int, int], float]
Errors = dict[tuple[int, int], dict[float, float]]  # of each head's output, at each share of the keys


@dataclass(frozen=True)
class Losses:
    """The losses of budgets of a selection; `advance` hears of each pass over a batch.

    example: inputs of trial calls, or None for the default ones.
    """

    model: Any
    metric: str
    selection: Selection
    advance: Callable[[int], None]
    example: dict[str, Any] | None = None

    def pruned(self, budgets: Budgets) -> PruneReport:
        """Prune the model by these budgets, which measures nothing."""
        return prune(self.model, with_budgets(self.selection, budgets), measure=False, example=self.example)

    def of_all(self, batches: Batches) -> Callable[[Budgets], float]:
        """Return a function from budgets to the loss on all inputs; it keeps the outputs of the dense model."""
        dense = [self._read(batch) for batch in batches]

        def loss(budgets: Budgets) -> float:
            with self.pruned(budgets):
                sums = [self._sums(batch, before) for batch, before in zip(batches, dense, strict=True)]
            found = float(self._from_sums(torch.cat(sums).sum(0)))
            return found if self.metric == "perplexity" else max(0.0, found)

        return loss

    def of_texts(self, batches: Batches, candidates: Sequence[Budgets]) -> Any:
        """Return the loss of each text (rows), in [0, 1], with each of several budgets (columns).

        Memory holds the outputs of two runs on one batch at a time.
        """
        rows = []
        for batch in batches:
            dense, sums = self._read(batch), []
            for budgets in candidates:
                with self.pruned(budgets):
                    sums.append(self._sums(batch, dense))
            rows.append(torch.stack(sums, 1))
        return self._from_sums(torch.cat(rows)).clamp(0, 1).numpy()

    def of_heads(self, batches: Batches, shares: Sequence[float], layers: Any, heads: Any) -> Errors:
        """Return the relative errors of the outputs of heads, each on the inputs of that head."""
        layers, heads = whole_numbers("layers", layers), whole_numbers("heads", heads)
        if layers is None and heads is None:  # named, because heads get different budgets in the end
            register()
            layers = whole_layers(self.model, discovered(PRUNED, self.model, None, self.example))
        found: Errors = {}
        for share in shares:
            few = replace(self.selection, budget=share)
            of_all = {"layers": layers, "heads": heads, "measure": True, "example": self.example}
            with prune(self.model, few, **of_all) as report:
                for batch in batches:
                    self.model(**batch)
                    self.advance(1)
            for row in report.table():
                error = math.inf if row["error"] is None else row["error"]
                found.setdefault((row["layer"], row["head"]), {})[share] = error
        return found

    def _read(self, batch: dict[str, Any]) -> tuple[Any, Any]:
        """Return the inputs of the loss, in float64: embeddings, or log-probabilities, and flags of those to count."""
        output = self.model(**batch)
        self.advance(1)
        needed, other = ("last_hidden_state", "logits") if self.metric == "embedding" else ("logits", "embedding")
        found = getattr(output, needed, None)
        if found is None or found.ndim != 3:
            raise ValueError(
                f"{type(self.model).__name__} returns no {needed} of each position, which metric={self.metric!r} "
                f"needs; expected another metric, e.g. {other!r}, or a model with that output"
            )
        if self.metric == "embedding":
            return embeddings(batch, output)[:, None], torch.ones_like(found[:, :1, 0], dtype=torch.bool)
        if self.metric == "logits":
            return found.double().log_softmax(-1), _present(batch, found)
        if "input_ids" not in batch:
            raise ValueError('inputs has no input_ids; expected them with metric="perplexity"')
        return following(batch, output)

    def _sums(self, batch: dict[str, Any], dense: tuple[Any, Any]) -> Any:
        """Return for each text the sum of the values of the loss, whose mean it is, and their number, (texts, 2)."""
        (mine, _), (before, counted) = self._read(batch), dense
        if self.metric == "embedding":
            values = 1 - torch.nn.functional.cosine_similarity(mine, before, dim=-1)
        elif self.metric == "logits":
            values = (before.exp() * (before - mine)).sum(-1)
        else:
            values = before - mine
        return torch.stack([torch.where(counted, values, 0).sum(1), counted.sum(1, dtype=torch.float64)], 1).cpu()

    def _from_sums(self, sums: Any) -> Any:
        means = sums[..., 0] / sums[..., 1]
        if means.isnan().any():
            raise ValueError(
                "inputs has a text whose loss is not a number; expected texts with an unmasked token (two for "
                "perplexity), and a model with finite outputs"
            )
        return means.expm1() if self.metric == "perplexity" else means


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


def p_value(total: float, count: int, risk: float) -> float:
    """Return the Hoeffding–Bentkus p-value of an expected loss above `risk`, for independent losses with this sum.

    Consider `count` independent losses in [0, 1] of one distribution with an expectation above `risk`. For every u,
    the value is then at most u with probability at most u. See Bates, Angelopoulos, Lei, Malik and Jordan,
    "Distribution-free, risk-controlling prediction sets", JACM 68, 2021, Section 3.1. The value is the smaller of
    Hoeffding's bound by relative entropy, which is smaller for a sum of 0, and Bentkus's by a binomial tail.
    """
    from scipy.special import bdtr

    hoeffding = math.exp(-count * _relative_entropy(total / count, risk))
    return min(1.0, hoeffding, math.e * float(bdtr(math.ceil(total), count, risk)))


def least_texts(mean: float, risk: float, confidence: float) -> int | None:
    """Return a number of losses with this mean that shows a risk with a confidence; None if no number does.

    For a mean of 0 the number is minimal: it is the least n with (1 − risk)ⁿ ≤ 1 − confidence. For other means
    Bentkus's bound may need slightly fewer losses.
    """
    rate = _relative_entropy(mean, risk)
    if rate <= 0:
        return None
    count = math.ceil(min(-math.log(1 - confidence) / rate, 1e18))
    return count if math.exp(-count * rate) <= 1 - confidence else count + 1


def count_shown(losses: Any, risk: float, confidence: float) -> int:
    """Return how many candidates, from the first, the tests show to have an expected loss of at most `risk`.

    The losses are for texts (rows) and candidates (columns), in an order that does not depend on these texts. Each
    candidate is tested at the whole level 1 − `confidence`, and the first failure ends the tests. With probability at
    most 1 − `confidence`, a candidate before it has an expected loss above the risk. This is fixed-sequence testing;
    see Angelopoulos, Bates, Candès, Jordan and Lei, "Learn then Test", arXiv:2110.01052, Section 2.2.
    """
    for place, of in enumerate(losses.T):
        if p_value(math.fsum(of), len(of), risk) > 1 - confidence:
            return place
    return len(losses.T)


def _relative_entropy(mean: float, risk: float) -> float:
    """Return the relative entropy of coins with these probabilities, in nats; 0 for a mean above the risk."""
    a = min(mean, risk)
    return (a * math.log(a / risk) if a else 0.0) + (1 - a) * (math.log1p(-a) - math.log1p(-risk))
