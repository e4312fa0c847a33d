"""Budgets for each layer and head of a model, chosen for a wanted loss on sample inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from levattn._core.checks import positive_number
from levattn._core.progress import reported
from levattn.integrations.transformers.calibration.calibration import METRICS, Calibration
from levattn.integrations.transformers.pruning.prune import prune
from levattn.nn.checks import fraction

__all__ = ["calibrate", "embeddings", "following", "perplexity"]

_BUDGETS = (0.06, 0.09, 0.12, 0.18, 0.25, 0.35, 0.5)
_OPTIONS = ("summaries", "window", "sinks", "scores", "center", "chunk")
_STEPS = 7  # of a bisection over the errors of all heads


def calibrate(
    model: Any,
    inputs: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    *,
    target: float,
    metric: str = "embedding",
    budgets: Sequence[float] = _BUDGETS,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    progress: bool | Callable[[int, int | None], None] | None = None,
    **options: Any,
) -> Calibration:
    r"""Choose the share of the keys that each layer and head attends to, for a wanted loss on sample inputs.

    The loss compares the pruned model with the dense one on the inputs:

    - ``"embedding"``: 1 − the mean cosine of the embeddings of the two (means of the last hidden states over the
      positions that the attention mask leaves in);
    - ``"logits"``: the mean Kullback–Leibler divergence, in nats, of the pruned model's next tokens from the dense
      one's;
    - ``"perplexity"``: by what share the perplexity of the inputs rises, 0.03 being 3 %; of a causal model.

    First each head is measured with each budget: the relative error of its output against dense attention on the same
    queries, keys and values. Then one bound of these errors is chosen for all heads by bisection, such that with the
    smallest budget within the bound for each head (1.0 where there is none) the loss is at most `target`.

    **Guarantee.** With the returned budgets the loss on these inputs was measured, is `reached`, and is at most
    `target`. It says nothing about other inputs but by their likeness. Nothing is drawn at random.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As for `prune`, in evaluation mode.
    inputs : mapping of str to tensor, or iterable of them
        Batches as the model takes them.
    target : float
        The loss, above 0.
    metric : {"embedding", "logits", "perplexity"}, default "embedding"
        Which loss.
    budgets : sequence of float, default (0.06, 0.09, 0.12, 0.18, 0.25, 0.35, 0.5)
        Shares of the keys to choose from, each above 0 and below 1; dense is always among them.
    layers, heads : iterable of int, optional
        As for `prune`; others stay dense.
    progress : bool or function, optional
        True for a bar, or a function of the forward passes done and their number.
    **options
        Further options of `prune`: summaries, window, sinks, scores, center, chunk.

    Returns
    -------
    Calibration
        The budgets, and the loss that they have.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range, the model has no output that the metric needs, or `prune` refuses the model.
    ImportError
        If `progress` is True and rich is not installed.

    Notes
    -----
    Time: runs the model once for each budget, once dense, and at most 8 times for the bisection, over all inputs.

    References
    ----------
    Own construction; the losses are those that papers on pruned attention report, e.g. Devoto, Jeblick and Jégou,
    "Expected Attention", arXiv:2510.00636.

    Examples
    --------
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from levattn.integrations.transformers import calibrate, prune
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=50)
    >>> model = BertModel(BertConfig(num_attention_heads=2, **sizes)).eval()
    >>> inputs = {"input_ids": torch.arange(40)[None]}
    >>> chosen = calibrate(model, inputs, target=0.01, budgets=(0.25, 0.5))
    >>> chosen.reached <= 0.01
    True
    >>> with torch.no_grad(), prune(model, chosen):
    ...     _ = model(**inputs)
    """
    target = positive_number("target", target, what="a finite loss above 0, e.g. 0.01")
    if metric not in METRICS:
        raise ValueError(f"metric is {metric!r}; expected one of {', '.join(METRICS)}")
    shares = sorted({fraction("budgets", budget) for budget in budgets})
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise TypeError(f"{', '.join(unknown)} is no option here; expected some of {', '.join(_OPTIONS)}")
    batches = [dict(batch) for batch in ([inputs] if isinstance(inputs, Mapping) else inputs)]
    if not batches:
        raise ValueError("inputs is empty; expected at least one batch")
    if model.training:
        raise ValueError(
            "model is in training mode; expected evaluation mode, so that outputs can be compared. Call eval()"
        )
    shared = {"layers": None if layers is None else list(layers), "heads": None if heads is None else list(heads)}
    with reported(progress, len(batches) * (len(shares) + _STEPS + 2)) as advance, torch.no_grad():
        measure = _Loss(model, batches, metric, advance)
        errors = _errors(model, batches, shares, {**shared, **options}, advance)
        chosen, reached = _bisected(errors, target, lambda found: measure(found, options))
    return Calibration(chosen, type(model).__name__, metric, target, reached, options)


def _errors(
    model: Any, batches: list[dict[str, Any]], shares: list[float], options: dict[str, Any], advance: Any
) -> dict[tuple[int, int], dict[float, float]]:
    """Return the relative error of each head's output with each budget, on what comes to it."""
    errors: dict[tuple[int, int], dict[float, float]] = {}
    for share in shares:
        with prune(model, share, **options) as report:
            for batch in batches:
                model(**batch)
                advance(1)
        for row in report.table():
            found = row["error"]
            errors.setdefault((row["layer"], row["head"]), {})[share] = math.inf if found is None else found
    return errors


def _bisected(
    errors: dict[tuple[int, int], dict[float, float]], target: float, loss: Callable[[dict[Any, float]], float]
) -> tuple[dict[tuple[int, int], float], float]:
    """Return the budgets within the largest bound of the errors that was found to reach the target, and their loss."""
    bounds = sorted({error for of in errors.values() for error in of.values() if error < math.inf})

    def within(bound: float) -> dict[tuple[int, int], float]:
        return {
            head: min((share for share, error in of.items() if error <= bound), default=1.0)
            for head, of in errors.items()
        }

    best = (dict.fromkeys(errors, 1.0), 0.0)
    low, high = -1, len(bounds) - 1  # the bound at low reaches the target, those above high do not
    for _ in range(_STEPS + 1):
        if low >= high:
            break
        middle = high if low < 0 and high == len(bounds) - 1 else (low + high + 1) // 2
        found = within(bounds[middle])
        value = loss(found)
        if value <= target:
            low, best = middle, (found, value)
        else:
            high = middle - 1
    return best


class _Loss:
    """How far a pruned model is from the dense one."""

    def __init__(self, model: Any, batches: list[dict[str, Any]], metric: str, advance: Callable[[int], None]) -> None:
        self.model, self.batches, self.metric, self.advance = model, batches, metric, advance
        self.dense = [self._read(batch) for batch in batches]

    def __call__(self, budgets: dict[tuple[int, int], float], options: dict[str, Any]) -> float:
        with prune(self.model, budgets, measure=False, **options):
            found = [self._read(batch) for batch in self.batches]
        if self.metric == "perplexity":
            return perplexity(found) / perplexity(self.dense) - 1
        total = count = 0.0
        for mine, dense in zip(found, self.dense, strict=True):
            if self.metric == "embedding":
                values = 1 - torch.nn.functional.cosine_similarity(mine[0], dense[0], dim=-1)
            else:
                values = (dense[0].exp() * (dense[0] - mine[0])).sum(-1)[dense[1]]
            total += float(values.sum())
            count += values.numel()
        return max(0.0, total / count)

    def _read(self, batch: dict[str, Any]) -> tuple[Any, Any]:
        """Return what the loss is made of, in float64: embeddings, or log-probabilities and which of them count."""
        output = self.model(**batch)
        self.advance(1)
        if self.metric == "embedding":
            if getattr(output, "last_hidden_state", None) is None:
                self._refuse("last_hidden_state", "logits")
            return embeddings(batch, output), None
        if getattr(output, "logits", None) is None or output.logits.ndim != 3:
            self._refuse("logits of each position", "embedding")
        if self.metric == "logits":
            return output.logits.double().log_softmax(-1), _present(batch, output.logits)
        if "input_ids" not in batch:
            raise ValueError('inputs has no input_ids; expected them with metric="perplexity"')
        return following(batch, output)

    def _refuse(self, missing: str, other: str) -> None:
        raise ValueError(
            f"{type(self.model).__name__} returns no {missing}, which metric={self.metric!r} is of; expected another "
            f"metric, e.g. {other!r}, or a model with that output"
        )


def _present(batch: dict[str, Any], like: Any) -> Any:
    mask = batch.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)
    return mask.bool()


def embeddings(batch: dict[str, Any], output: Any) -> Any:
    """Return the means of an output's last hidden states over the positions that are there, in float64."""
    states = output.last_hidden_state
    mask = _present(batch, states)[..., None]
    return (states.double() * mask).sum(1) / mask.sum(1)


def following(batch: dict[str, Any], output: Any) -> tuple[Any, Any]:
    """Return the log-probability of each next token in an output, in float64, and which of them count."""
    log_p, there = output.logits[:, :-1].double().log_softmax(-1), _present(batch, output.logits)
    return log_p.gather(-1, batch["input_ids"][:, 1:, None])[..., 0], there[:, 1:] & there[:, :-1]


def perplexity(parts: list[tuple[Any, Any]]) -> float:
    """Return the perplexity of what `following` returned for all batches."""
    total = sum(float(values[there].sum()) for values, there in parts)
    return math.exp(-total / sum(int(there.sum()) for _, there in parts))
