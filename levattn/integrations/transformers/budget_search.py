"""Choose budgets for each layer and head of a model, for a wanted loss on sample inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from levattn._core.checks import fraction, positive_number
from levattn._core.threads import reported
from levattn.attention import Selection
from levattn.integrations.transformers.calibration import METRICS, Calibration
from levattn.integrations.transformers.calls import model_inputs
from levattn.integrations.transformers.compression.profile import READING, HeadProfile, profile_for
from levattn.integrations.transformers.discovery import example_for
from levattn.integrations.transformers.interface import check_model
from levattn.integrations.transformers.losses import Batches, Budgets, Errors, Losses, count_shown, least_texts

_BUDGETS = (0.06, 0.09, 0.12, 0.18, 0.25, 0.35, 0.5)
_STEPS = 7  # of a bisection over the errors of all heads
_CANDIDATES = 12  # budgets to test for a risk
_CONFIDENCE = 0.95
_EVERY = 4  # the first of so many texts is for choosing budgets, the others are for testing them

_Ladder = list[Callable[[], Budgets]]  # functions that make budgets: dense ones first, then from large to small


def calibrate(
    model: Any,
    inputs: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    *,
    target: float | None = None,
    risk: float | None = None,
    confidence: float | None = None,
    metric: str = "embedding",
    budgets: Sequence[Any] = _BUDGETS,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | HeadProfile | str | None = None,
    progress: bool | Callable[[int, int | None], None] | None = None,
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
    budgets : sequence of float or Selection, default (0.06, 0.09, 0.12, 0.18, 0.25, 0.35, 0.5)
        Shares of the keys to choose from, each above 0 and below 1; dense is always included. In a causal model a head
        with half of the keys or more is dense. With a profile shares are means over all heads. Selections have such
        budgets, and the same other options. Where they have no `start`, heads are pruned from twice the slots on, so
        that short texts measure something.
    layers, heads : iterable of int, optional
        As for `prune`; others stay dense.
    heads : HeadProfile or str, in the place of numbers
        A profile that splits budgets over the heads; "auto" and names as in `compress`.
    progress : bool or function, optional
        True for a bar, or a function of the forward passes done and their total.

    Returns
    -------
    Calibration
        The budgets and their loss.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range, the model has no output that the metric needs, or `prune` refuses the model. If
        a loss is not a number: of a text that is all padding, or of a model with infinite outputs.
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
    `risk`: the outputs of two runs on one batch; with `target`, the dense outputs of all inputs as well.

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
    target, risk, confidence = _wanted(target, risk, confidence)
    if metric not in METRICS:
        raise ValueError(f"metric is {metric!r}; expected one of {', '.join(METRICS)}")
    shares, selection = _shares_of(budgets)
    check_model(model)
    batches = _batches(inputs)
    if model.training:
        raise ValueError("model is in training mode; expected evaluation mode. Call model.eval()")
    profile = profile_for(model, heads, None, READING) if isinstance(heads, HeadProfile | str) else None
    if profile and layers is not None:
        raise ValueError(f"heads is a HeadProfile and layers is {layers!r}; expected no layers with a profile")
    choosing, testing = (batches, []) if risk is None else dealt(model, batches, risk, confidence)
    tries = 1 + (_STEPS + 1 if risk is None else _CANDIDATES)  # each pass over the texts, and the dense one
    passes = len(choosing) * (tries + (0 if profile else len(shares))) + len(testing) * tries
    kind = type(model).__name__
    with reported(progress, passes) as advance, torch.no_grad():
        losses = Losses(model, metric, selection, advance, example_for(model, batches[0]))
        if profile:
            ladder: _Ladder = [partial(profile.shares, share, way=READING) for share in (1.0, *reversed(shares))]
        else:
            ladder = _by_errors(losses.of_heads(choosing, shares, layers, heads))
        if risk is None:
            best, reached = _bisected(ladder, target, losses.of_all(choosing))
            return Calibration(best, kind, metric, target, reached, selection)
        candidates = _candidates(ladder[1:], risk, partial(losses.of_texts, choosing))
        tested = losses.of_texts(testing, candidates)
    place = _last_shown(tested, risk, confidence)
    best, reached = candidates[place], float(tested[:, place].mean())
    return Calibration(
        best, kind, metric, None, reached, selection, risk=risk, confidence=confidence, texts=len(tested)
    )


def _shares_of(budgets: Sequence[Any]) -> tuple[list[float], Selection]:
    """Return the shares, ascending, and the selection that has them as budgets, or raise."""
    if isinstance(budgets, str | Mapping) or not isinstance(budgets, Iterable):
        raise TypeError(f"budgets is {budgets!r}; expected a list of shares of the keys, such as [0.12, 0.25]")
    selections = [each if isinstance(each, Selection) else Selection(fraction("budgets", each)) for each in budgets]
    for each in selections:
        if not isinstance(each.budget, float):
            raise ValueError(f"budgets has {each}; expected selections with a share of the keys as budget")
    others = {replace(each, budget=None) for each in selections}
    if not others:
        raise ValueError("budgets is empty; expected at least one share of the keys, such as 0.25")
    if len(others) > 1:
        raise ValueError(f"budgets has selections that differ in more than their budgets; expected one of {others}")
    shares = {fraction("budgets", each.budget) for each in selections}
    (found,) = others
    return sorted(shares), replace(found, start=0) if found.start is None else found


def _wanted(target: Any, risk: Any, confidence: Any) -> tuple[Any, Any, Any]:
    """Return the target, or the risk and its confidence, and None for the others, or raise."""
    if (target is None) == (risk is None):
        raise ValueError(
            f"target is {target!r} and risk is {risk!r}; expected one of them. target is for the loss on the inputs, "
            "risk for similar texts"
        )
    if risk is not None:
        return None, fraction("risk", risk), fraction("confidence", _CONFIDENCE if confidence is None else confidence)
    if confidence is not None:
        raise ValueError(
            f"confidence is {confidence!r} and target is given; expected confidence with risk only. Leave it out, "
            "or give risk instead of target"
        )
    return positive_number("target", target, what="a finite loss above 0, e.g. 0.01"), None, None


def _batches(inputs: Any) -> Batches:
    """Return the batches, or raise."""
    if isinstance(inputs, Mapping | str | torch.Tensor) or not isinstance(inputs, Iterable):
        return [model_inputs("inputs", inputs)]
    batches = [model_inputs(f"inputs[{number}]", batch) for number, batch in enumerate(inputs)]
    if not batches:
        raise ValueError("inputs is empty; expected at least one batch")
    return batches


def dealt(model: Any, batches: Batches, risk: float, confidence: float) -> tuple[Batches, Batches]:
    """Return the batches of texts for choosing and for testing, or raise if the latter are too few for any result."""
    parts: tuple[Batches, Batches] = [], []
    seen = 0
    for batch in batches:
        count = _texts_in(model, batch)
        first = torch.arange(seen, seen + count) % _EVERY == 0
        for part, chosen in zip(parts, (first, ~first), strict=True):
            if chosen.any():
                part.append(batch if chosen.all() else _rows(batch, chosen))
        seen += count
    tested, least = seen * (_EVERY - 1) // _EVERY, least_texts(0.0, risk, confidence)
    if least and tested < least:
        wish = f"risk={risk:g} with confidence={confidence:g}"
        raise ValueError(
            f"inputs has {seen} texts, of which {tested} are for the test of {wish}; expected at least "
            f"{needed_for(least)} texts, {least} of them for the test. Give more texts, a larger risk or a smaller "
            "confidence (no text was tested yet)"
        )
    return parts


def needed_for(tested: int) -> int:
    """Return the least number of texts that leaves `tested` of them for testing."""
    return -(-tested * _EVERY // (_EVERY - 1))


def _texts_in(model: Any, batch: dict[str, Any]) -> int:
    names = dict.fromkeys(("input_ids", "inputs_embeds", model.main_input_name))
    for name in names:
        if isinstance(batch.get(name), torch.Tensor):
            return len(batch[name])
    raise ValueError(
        f"inputs has a batch of {', '.join(batch) or 'nothing'}; expected one with a tensor {' or '.join(names)} "
        "with risk, which needs single texts"
    )


def _rows(batch: dict[str, Any], chosen: Any) -> dict[str, Any]:
    """Return the chosen texts of a batch; entries without a row for each text stay."""
    found = dict(batch)
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) == 1:
            continue
        if len(value) != len(chosen):
            raise ValueError(
                f"inputs has {name} of shape {tuple(value.shape)} in a batch of {len(chosen)} texts; expected a row "
                "for each text with risk, which needs single texts. Give each text its own batch"
            )
        found[name] = value[chosen.to(value.device)]
    return found


def _by_errors(errors: Errors) -> _Ladder:
    """Return budgets by bounds on the errors: each head has the smallest one within the bound, or 1.0."""

    def within(bound: float) -> Budgets:
        return {
            head: min((share for share, error in of.items() if error <= bound), default=1.0)
            for head, of in errors.items()
        }

    bounds = sorted({error for of in errors.values() for error in of.values() if error < math.inf})
    return [partial(within, bound) for bound in (-1.0, *bounds)]


def _bisected(ladder: _Ladder, target: float, loss: Callable[[Budgets], float]) -> tuple[Budgets, float]:
    """Return the smallest budgets found that reach the target, and their loss."""
    low, best, reached = 0, ladder[0](), 0.0  # the budgets at low reach the target, the ones after high do not
    high = middle = len(ladder) - 1  # the smallest budgets come first, because they often do
    for _ in range(_STEPS + 1):
        if low >= high:
            break
        budgets = ladder[middle]()
        found = loss(budgets)
        if found <= target:
            low, best, reached = middle, budgets, found
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return best, reached


def _candidates(ladder: _Ladder, risk: float, losses: Callable[[list[Budgets]], Any]) -> list[Budgets]:
    """Return budgets to test, the largest first, up to the first with a loss above the risk on the choosing texts."""
    if not ladder:
        raise ValueError(
            "inputs has no output of a head to measure in every fourth text; expected texts with unmasked tokens, "
            "and heads with outputs other than 0"
        )
    coarse = _spread(len(ladder))
    means = losses([ladder[place]() for place in coarse]).mean(0)
    last = next((place for place, mean in zip(coarse, means, strict=True) if mean > risk), coarse[-1])
    return [budgets for budgets, _ in groupby(ladder[place]() for place in _spread(last + 1))]


def _spread(count: int) -> list[int]:
    """Return places in a list of `count` items, evenly spread, with the last place."""
    return sorted({-(-count * step // _CANDIDATES) - 1 for step in range(1, _CANDIDATES + 1)})


def _last_shown(losses: Any, risk: float, confidence: float) -> int:
    """Return the place of the last budgets (columns) that the tests show to keep the risk, or raise."""
    shown = count_shown(losses, risk, confidence)
    if shown:
        return shown - 1
    mean = float(losses[:, 0].mean())
    more = least_texts(mean, risk, confidence)
    remedy = f"at least {needed_for(more)} texts of that loss" if more else "a mean loss below the risk"
    raise ValueError(
        f"with the largest budgets, the {len(losses)} tested texts of inputs have a mean loss of {mean:.3g}. This "
        f"does not show risk={risk:g} with confidence={confidence:g}; expected {remedy}. Give "
        f"{'more texts, ' if more else ''}a larger risk or larger budgets"
    )
