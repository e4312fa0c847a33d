"""Choose budgets for each layer and head of a model, for a wanted loss on sample inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from levattn._core.checks import fraction, positive_number
from levattn._core.threads import reported
from levattn.integrations.transformers.calibration.calibration import METRICS, Calibration
from levattn.integrations.transformers.calibration.losses import Loss, text_losses
from levattn.integrations.transformers.calibration.risk import count_shown, least_texts
from levattn.integrations.transformers.calibration.texts import dealt, needed_for
from levattn.integrations.transformers.calls import model_inputs
from levattn.integrations.transformers.changes import check_model
from levattn.integrations.transformers.compression.profile import HeadProfile
from levattn.integrations.transformers.discovery import discovered
from levattn.integrations.transformers.pruning.interface import PRUNED, register
from levattn.integrations.transformers.pruning.prune import prune

_BUDGETS = (0.06, 0.09, 0.12, 0.18, 0.25, 0.35, 0.5)
_OPTIONS = ("summaries", "window", "sinks", "scores", "center", "chunk")
_STEPS = 7  # of a bisection over the errors of all heads
_CANDIDATES = 12  # budgets to test for a risk
_CONFIDENCE = 0.95

_Budgets = dict[tuple[int, int], float]
_Errors = dict[tuple[int, int], dict[float, float]]  # the error of each head's output at each share of the keys


def calibrate(
    model: Any,
    inputs: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    *,
    target: float | None = None,
    risk: float | None = None,
    confidence: float | None = None,
    metric: str = "embedding",
    budgets: Sequence[float] = _BUDGETS,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | HeadProfile | None = None,
    progress: bool | Callable[[int, int | None], None] | None = None,
    **options: Any,
) -> Calibration:
    r"""Choose the share of the keys that each layer and head attends to, for a wanted loss on texts.

    The loss compares the pruned model with the dense one:

    - ``"embedding"``: 1 − the mean cosine between the embeddings of the two models. An embedding is the mean of the
      last hidden states over the positions that the attention mask leaves in;
    - ``"logits"``: the mean Kullback–Leibler divergence, in nats, of the pruned model's next tokens from the dense
      model's;
    - ``"perplexity"``: the relative increase of the inputs' perplexity, 0.03 being 3 %; for a causal model.

    A profile as `heads` splits budgets over the heads (`HeadProfile.shares`), and `calibrate` chooses only their sum.
    This accounts for the recall of heads, which a sample of plain text does not show. Without a profile, `calibrate`
    first measures the relative error of each head's output with each budget, against dense attention on the same
    arrays. A common bound on these errors gives each head the smallest budget within the bound (1.0
    if no budget is). Larger bounds give smaller budgets. Either `target` or `risk` determines the bound.

    **Guarantee of a target.** Bisection finds the bound. The loss on these inputs was measured with the returned
    budgets, is `reached`, and is at most `target`. It says nothing about other inputs, except if they are similar.

    **Guarantee of a risk.** Let the texts be drawn independently from one distribution. With probability at least
    `confidence` over these texts, the expected loss of a further text is then at most `risk` with the returned
    budgets. A text is one sequence of a batch (one image for a vision model). Its loss is computed for the text alone
    and **clipped to [0, 1]**. So a divergence above 1 nat, a cosine below 0 and a perplexity that more than doubles
    count as 1, and a perplexity that falls counts as 0. The guarantee is about the mean of this clipped loss over
    texts, not about each text. Every fourth text, from the first, measures the heads and chooses at most 12
    bounds. The other texts test these bounds, from the largest budgets to the smallest, until a test fails. (This is
    Learn then Test with fixed-sequence testing and Hoeffding–Bentkus p-values.) `reached` is the mean clipped loss of
    the tested texts.

    The texts, their order and the options must not depend on the contents of the texts or on earlier results. Texts
    sorted by length, or tested by an earlier call, do not have this confidence. For a second call use new texts, or
    give each of k calls the confidence 1 − (1 − `confidence`)/k. Nothing is drawn at random.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As for `prune`, in evaluation mode.
    inputs : mapping of str to tensor, or iterable of them
        Batches of the model's inputs. With `risk`, each tensor of a batch has a row for each text, or one row for all
        texts.
    target : float, optional
        The loss on the inputs, above 0. Give either target or risk.
    risk : float, optional
        The expected loss on texts like the inputs, above 0 and below 1.
    confidence : float, optional
        The confidence that the risk holds, above 0 and below 1; 0.95 if not given. Use it with `risk` only.
    metric : {"embedding", "logits", "perplexity"}, default "embedding"
        The loss.
    budgets : sequence of float, default (0.06, 0.09, 0.12, 0.18, 0.25, 0.35, 0.5)
        Shares of the keys to choose from, each above 0 and below 1; dense is always included. With a profile they
        are means over all heads.
    layers, heads : iterable of int, optional
        As for `prune`; others stay dense.
    heads : HeadProfile, in the place of numbers
        A profile that splits budgets over the heads.
    progress : bool or function, optional
        True for a bar, or a function of the forward passes done and their total.
    **options
        Options of `prune`: summaries, window, sinks, scores, center, chunk.

    Returns
    -------
    Calibration
        The budgets and their loss.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range, the model has no output that the metric needs, or `prune` refuses the model.
        Each batch must be a mapping of tensors. With `risk` also if the texts are too few to show the risk, or have
        too large a loss with all tested budgets. The message then gives a sufficient number of texts. With `risk`,
        dense budgets, which have no loss, are never returned.
    ImportError
        If `progress` is True and rich is not installed.

    Notes
    -----
    Time with `target`: the model runs once for each budget, once dense, and at most 8 times for the bisection, over
    all inputs. With `risk`, it runs once for each budget, once dense and 12 times on a quarter of the texts. On the
    others it runs once dense and at most 12 times, so 7 budgets cost about 15 runs over all texts. Batches whose texts
    have the same length are faster, as for budgets in shares `prune` processes each length separately. Memory with
    `risk`: the outputs of two runs on one batch; with `target`, the outputs of two runs on all inputs.

    Number of texts: without any loss, n tested texts show a risk if
    :math:`(1 - \text{risk})^n \le 1 - \text{confidence}`, which takes 199 texts for 0.02 and 0.95, 149 of them
    tested. With a mean loss of half of that risk it takes about 1280. Texts cut from the same document are not
    independent: use one text of each document.

    References
    ----------
    Own construction; papers on pruned attention report these losses, e.g. Devoto, Jeblick and Jégou,
    "Expected Attention", arXiv:2510.00636. The tests of a risk: Angelopoulos, Bates, Candès, Jordan and Lei, "Learn
    then Test", arXiv:2110.01052, Section 2.2. Their p-values: Bates, Angelopoulos, Lei, Malik and Jordan,
    "Distribution-free, risk-controlling prediction sets", JACM 68, 2021, Section 3.1.

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

    Budgets for further texts like these 40:

    >>> texts = {"input_ids": torch.randint(50, (40, 30), generator=torch.Generator().manual_seed(0))}
    >>> chosen = calibrate(model, texts, risk=0.1, confidence=0.9, budgets=(0.25, 0.5))
    >>> chosen.texts, chosen.reached <= 0.1
    (30, True)
    """
    wanted = _wanted(target, risk, confidence)
    if metric not in METRICS:
        raise ValueError(f"metric is {metric!r}; expected one of {', '.join(METRICS)}")
    shares = sorted({fraction("budgets", budget) for budget in budgets})
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise TypeError(f"{', '.join(unknown)} is no option here; expected options among {', '.join(_OPTIONS)}")
    check_model(model)
    batches = _batches(inputs)
    if model.training:
        raise ValueError(
            "model is in training mode; expected evaluation mode, to make outputs comparable. Call model.eval()"
        )
    if isinstance(heads, HeadProfile) and layers is not None:
        raise ValueError(f"heads is a HeadProfile and layers is {layers!r}; expected no layers with a profile")
    source = _Source(model, shares, layers, heads, options)
    if isinstance(wanted, tuple):
        with torch.no_grad():
            return _by_risk(source, batches, metric, *wanted, progress)
    with reported(progress, len(batches) * (source.passes + _STEPS + 2)) as advance, torch.no_grad():
        measure = Loss(model, batches, metric, advance)
        chosen, reached = _bisected(source.ladder(batches, advance), wanted, lambda found: measure(found, options))
    return Calibration(chosen, type(model).__name__, metric, wanted, reached, options)


def _batches(inputs: Any) -> list[dict[str, Any]]:
    """Return the batches, or raise."""
    if isinstance(inputs, Mapping | str | torch.Tensor) or not isinstance(inputs, Iterable):
        return [model_inputs("inputs", inputs)]
    batches = [model_inputs(f"inputs[{number}]", batch) for number, batch in enumerate(inputs)]
    if not batches:
        raise ValueError("inputs is empty; expected at least one batch")
    return batches


def _wanted(target: Any, risk: Any, confidence: Any) -> float | tuple[float, float]:
    """Return the target, or the risk and the confidence, or raise."""
    if (target is None) == (risk is None):
        raise ValueError(
            f"target is {target!r} and risk is {risk!r}; expected one of them. target is for the loss on the inputs, "
            "risk for similar texts"
        )
    if risk is None:
        if confidence is not None:
            raise ValueError(
                f"confidence is {confidence!r} and target is given; expected confidence with risk only. Leave it out, "
                "or give risk instead of target"
            )
        return positive_number("target", target, what="a finite loss above 0, e.g. 0.01")
    confidence = _CONFIDENCE if confidence is None else confidence
    return fraction("risk", risk), fraction("confidence", confidence)


@dataclass(frozen=True)
class _Ladder:
    """Budgets to choose from, the largest first: their number, the budgets at a place, and the dense budgets."""

    count: int
    at: Callable[[int], _Budgets]
    dense: _Budgets


class _Source:
    """The source of budgets: the errors of heads on texts, or a profile of the heads."""

    def __init__(self, model: Any, shares: list[float], layers: Any, heads: Any, options: dict[str, Any]) -> None:
        self.model, self.shares, self.options = model, shares, options
        self.profile = heads if isinstance(heads, HeadProfile) else None
        self.layers = layers if layers is None else list(layers)
        self.heads = heads if heads is None or self.profile else list(heads)

    @property
    def passes(self) -> int:
        """Number of times that the model reads each batch."""
        return 0 if self.profile else len(self.shares)

    def ladder(self, batches: list[dict[str, Any]], advance: Callable[[int], None]) -> _Ladder:
        """Return the budgets, measured on these batches if there is no profile."""
        profile, shares = self.profile, self.shares
        if profile:
            return _Ladder(len(shares), lambda i: profile.shares(shares[-1 - i]), dict.fromkeys(profile, 1.0))
        errors = self._errors(batches, advance)
        bounds = sorted({error for of in errors.values() for error in of.values() if error < math.inf})
        return _Ladder(len(bounds), lambda i: _within(errors, bounds[i]), dict.fromkeys(errors, 1.0))

    def _errors(self, batches: list[dict[str, Any]], advance: Callable[[int], None]) -> _Errors:
        """Return the relative error of each head's output with each budget, on the inputs of that head."""
        layers = self.layers
        if layers is None and self.heads is None:  # named, because heads get different budgets in the end
            register()
            layers = list(discovered(PRUNED, self.model, None))
        errors: _Errors = {}
        for share in self.shares:
            with prune(self.model, share, layers=layers, heads=self.heads, **self.options) as report:
                for batch in batches:
                    self.model(**batch)
                    advance(1)
            for row in report.table():
                found = row["error"]
                errors.setdefault((row["layer"], row["head"]), {})[share] = math.inf if found is None else found
        return errors


def _within(errors: _Errors, bound: float) -> _Budgets:
    """Return the smallest budget of each head whose error is within a bound, or 1.0."""
    return {
        head: min((share for share, error in of.items() if error <= bound), default=1.0) for head, of in errors.items()
    }


def _bisected(ladder: _Ladder, target: float, loss: Callable[[_Budgets], float]) -> tuple[_Budgets, float]:
    """Return the smallest budgets found that reach the target, and their loss."""
    best = (ladder.dense, 0.0)
    low, high = -1, ladder.count - 1  # the budgets at low reach the target, budgets after high do not
    for _ in range(_STEPS + 1):
        if low >= high:
            break
        middle = high if low < 0 and high == ladder.count - 1 else (low + high + 1) // 2
        found = ladder.at(middle)
        value = loss(found)
        if value <= target:
            low, best = middle, (found, value)
        else:
            high = middle - 1
    return best


def _by_risk(
    source: _Source, batches: list[dict[str, Any]], metric: str, risk: float, confidence: float, progress: Any
) -> Calibration:
    """Return the smallest budgets that the tests show to keep the risk."""
    model, options = source.model, source.options
    choosing, testing, first, tested = dealt(model, batches)
    wish = f"risk={risk:g} with confidence={confidence:g}"
    least = least_texts(0.0, risk, confidence)
    if least and tested < least:
        raise ValueError(
            f"inputs has {first + tested} texts, of which {tested} are for the test of {wish}; expected at least "
            f"{needed_for(least)} texts, {least} of them for the test. Give more texts, a larger risk or a smaller "
            "confidence (no text was tested yet)"
        )
    passes = len(choosing) * (source.passes + 1 + _CANDIDATES) + len(testing) * (1 + _CANDIDATES)
    with reported(progress, passes) as advance:
        candidates = _candidates(
            source.ladder(choosing, advance),
            risk,
            lambda some: text_losses(model, choosing, some, metric, options, advance).mean(0),
        )
        losses = text_losses(model, testing, candidates, metric, options, advance)
    shown = count_shown(losses, risk, confidence)
    if not shown:
        mean = float(losses[:, 0].mean())
        more = least_texts(mean, risk, confidence)
        remedy = f"at least {needed_for(more)} texts of that loss" if more else "a mean loss below the risk"
        raise ValueError(
            f"inputs has {first + tested} texts, and {tested} of them have a mean loss of {mean:.3g} with the largest "
            f"budgets, which does not show {wish}; expected {remedy}. Give "
            f"{'more texts, ' if more else ''}a larger risk or larger budgets"
        )
    reached = float(losses[:, shown - 1].mean())
    return Calibration(
        candidates[shown - 1],
        type(model).__name__,
        metric,
        None,
        reached,
        options,
        risk=risk,
        confidence=confidence,
        texts=tested,
    )


def _candidates(ladder: _Ladder, risk: float, loss: Callable[[list[_Budgets]], Any]) -> list[_Budgets]:
    """Return budgets to test, the largest first, up to the first with a loss above the risk on the choosing texts."""
    if not ladder.count:
        raise ValueError(
            "inputs has no output of a head to measure in every fourth text; expected texts with unmasked tokens, "
            "and heads with outputs other than 0"
        )
    coarse = _spread(ladder.count)
    losses = loss([ladder.at(place) for place in coarse])
    last = next((place for place, value in zip(coarse, losses, strict=True) if value > risk), coarse[-1])
    found = [ladder.at(place) for place in _spread(last + 1)]
    return [one for place, one in enumerate(found) if not place or one != found[place - 1]]


def _spread(count: int) -> list[int]:
    """Return places in a list of `count` items, evenly spread, with the last place."""
    return sorted({-(-count * step // _CANDIDATES) - 1 for step in range(1, _CANDIDATES + 1)})
