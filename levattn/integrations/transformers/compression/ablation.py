"""Measure the loss of a decoder if each of its heads is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from levattn._core.checks import fraction, whole_number
from levattn._core.threads import reported
from levattn.integrations.transformers.calls import as_cache_of, inputs_device
from levattn.integrations.transformers.changes import check_model
from levattn.integrations.transformers.compression.cache import CompressedCache
from levattn.integrations.transformers.compression.compress import compress
from levattn.integrations.transformers.compression.layer import CompressedLayer
from levattn.integrations.transformers.compression.profile import FIGURES, HeadProfile
from levattn.integrations.transformers.compression.replay import Replay
from levattn.integrations.transformers.compression.shares import curves
from levattn.integrations.transformers.compression.tasks import Task, made_up, written_by

_FOLLOWING = 96  # positions of the text after a context whose loss is measured
_COMPANY = 1 / 8  # the budget of the others, in all rounds but the first
# Round 1 finds heads that recall alone, round 2 heads that stand in for others, round 3 the remaining ones
_ROUNDS = 3
_DOUBT = 1.96  # standard errors on each side of a mean, of a confidence of 95 %


def head_profile(
    model: Any,
    tokenizer: Any,
    *,
    texts: Sequence[str] | None = None,
    tasks: int = 4,
    positions: int = 1024,
    share: float = 1 / 16,
    seed: int = 0,
    progress: bool | Callable[[int, int | None], None] | None = None,
) -> HeadProfile:
    """Measure the loss of a decoder if each head of its keys is cut, alone and beside other cut heads.

    Contexts are texts with lines "key = value" of random words in them. After each context the model must answer with
    the values, repeat passages of the context, and continue the text. The model reads the context densely. The first
    round cuts one head to `share`, as `compress` cuts it. It compares the losses of the answers and of the text with
    the losses of the dense cache. In two further rounds all heads share an eighth of the bytes, split by the costs so
    far. A head that is whole is cut, and a head that is cut is made whole. The cost of a head is the mean over the
    rounds, because heads that stand in for one another cost nothing alone. The sum over several heads is an
    assumption.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal decoder, in evaluation mode.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    texts : sequence of str, optional
        Plain texts, each of more than `positions` tokens. By default the model writes them itself.
    tasks : int, default 4
        Number of contexts. Of `texts`, only the first `tasks` are used.
    positions : int, default 1024
        Tokens of a context.
    share : float in (0, 1), default 1/16
        Share of its bytes that a cut head keeps.
    seed : int, default 0
        Seed of the random words, and of the texts that the model writes.
    progress : bool or function, optional
        True for a bar, or a function of the heads measured and their total number (three rounds over all contexts).

    Returns
    -------
    HeadProfile
        Means over the contexts, with confidence intervals.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range, a text is too short, or `compress` refuses the model.

    Notes
    -----
    Time: each context is read five times. Each head of the keys takes six passes over about 100 positions, from its
    layer on. Memory: a dense cache of `positions` for each task.

    References
    ----------
    Own construction, after Xiao et al., "DuoAttention", arXiv:2410.10819, who learn which heads recall.

    Examples
    --------
    >>> import torch
    >>> from levattn.integrations.transformers import head_profile
    >>> profile = head_profile(model, tokenizer, progress=True)  # doctest: +SKIP
    >>> cache = compress(model, context, budget=0.25, heads=profile)  # doctest: +SKIP
    """
    tasks, positions = whole_number("tasks", tasks), whole_number("positions", positions, 256)
    share, seed = fraction("share", share), whole_number("seed", seed, 0)
    check_model(model)
    if model.training:
        raise ValueError("model is in training mode; expected evaluation mode. Call eval()")
    given = _texts(model, tokenizer, texts, tasks, positions, seed)
    rng = np.random.default_rng(seed)
    asked = [made_up(tokenizer, text, positions, _FOLLOWING, rng) for text in given]
    name = type(model).__name__
    with torch.no_grad():
        trials = [_Trial.of(model, task, share) for task in asked]
    heads = _heads(trials[0].whole)
    shares, rounds = dict.fromkeys(heads, 1.0), []
    with torch.no_grad(), reported(progress, _ROUNDS * tasks * len(heads), "heads") as advance:
        for _ in range(_ROUNDS):
            rounds.append([trial.costs(shares, share, advance) for trial in trials])
            shares = _profile(rounds, name, share).shares(_COMPANY)
    return _profile(rounds, name, share)


def _profile(rounds: list[list[dict[tuple[int, int], Any]]], model: str, share: float) -> HeadProfile:
    """Return the profile from the costs of each head in each round and task: means, and intervals over tasks."""
    rows = []
    for layer, head in sorted(rounds[0][0]):
        costs = np.mean([[task[layer, head] for task in found] for found in rounds], 0)
        means, errors = costs.mean(0), np.zeros(2)
        if len(costs) > 1:
            errors = _DOUBT * costs.std(0, ddof=1) / len(costs) ** 0.5
        figures = (float(means[0]), float(errors[0]), float(means[1]), float(errors[1]))
        rows.append({"layer": layer, "head": head, **dict(zip(FIGURES, figures, strict=True))})
    return HeadProfile(rows, model, share)


def _texts(model: Any, tokenizer: Any, texts: Any, tasks: int, positions: int, seed: int) -> list[Any]:
    """Return the tokens of texts, long enough for a context and the text after it."""
    if texts is None:
        return written_by(model, tokenizer, tasks, positions + _FOLLOWING, seed)
    if isinstance(texts, str) or len(texts) < tasks or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"texts is {type(texts).__name__}; expected at least tasks={tasks} strings")
    found = []
    for number, text in enumerate(texts[:tasks]):
        tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(tokens) < positions + _FOLLOWING:
            raise ValueError(
                f"texts[{number}] has {len(tokens)} tokens; expected at least {positions + _FOLLOWING}. Give longer "
                "texts, or fewer positions"
            )
        found.append(tokens)
    return found


@dataclass(frozen=True)
class _Trial:
    """A task whose context was read: the cache with all heads whole, and the cache with all heads cut."""

    model: Any
    task: Task
    whole: CompressedCache
    light: CompressedCache

    @classmethod
    def of(cls, model: Any, task: Task, share: float) -> _Trial:
        """Read the context of a task."""
        context = task.context[None].to(inputs_device(model))
        whole = compress(model, context, budget=1.0)
        light = compress(model, context, budget=dict.fromkeys(_heads(whole), share))
        return cls(model, task, whole, light)

    def costs(self, shares: dict[tuple[int, int], float], share: float, advance: Callable[[int], None]) -> Any:
        """Return the cost of cutting each head from whole to `share`, where the others have `shares`.

        A whole head is cut. A cut head is made whole, and the curves convert its gain into the cost of a cut.
        """
        low = compress(self.model, self.task.context[None].to(inputs_device(self.model)), budget=shares)
        losses, found = _Losses(self.model, self.task, low), {}
        for (layer, head), kept in shares.items():
            changed = _exchanged(low, self.light if kept == 1 else self.whole, layer, head)
            rise = losses.with_changed(changed, layer) - losses.before
            found[layer, head] = rise if kept == 1 else -rise * (curves(share) / curves(kept))
            advance(1)
        return found


class _Losses:
    """The mean losses of answers, and of the text after the context, in nats a token, with a cache and with others."""

    def __init__(self, model: Any, task: Task, cache: CompressedCache) -> None:
        self._model, self._task = model, task
        self._replays = Replay(model), Replay(model)
        with self._replays[0].recorded():
            asked = self._asked(cache)
        with self._replays[1].recorded():
            text = self._text(cache)
        self.before = np.array([asked, text])

    def with_changed(self, cache: CompressedCache, layer: int) -> Any:
        """Return the losses with a cache that differs from the given layer on."""
        with self._replays[0].begun_at(layer):
            asked = self._asked(cache)
        with self._replays[1].begun_at(layer):
            return np.array([asked, self._text(cache)])

    def _asked(self, cache: CompressedCache) -> float:
        return float(_loss(self._model, cache.copy(), self._task.questions)[self._task.answers[1:]].mean())

    def _text(self, cache: CompressedCache) -> float:
        return float(_loss(self._model, cache.copy(), self._task.text).mean())


def _heads(cache: CompressedCache) -> list[tuple[int, int]]:
    """Return the heads that can be cut: the heads of the layers that do not slide."""
    return [(row["layer"], row["head"]) for row in cache.table() if not row["slides"]]


def _exchanged(cache: CompressedCache, other: CompressedCache, layer: int, head: int) -> CompressedCache:
    """Return a cache with one head taken from another cache of the same context."""
    changed = cache.copy()
    groups = []
    for group in cache.layers[layer].groups:
        rest = tuple(number for number in group.heads if number != head)
        groups += [group.of_heads(rest)] if rest else []
    groups += [group.of_heads((head,)) for group in other.layers[layer].groups if head in group.heads]
    changed.layers[layer] = CompressedLayer(layer, tuple(groups), cache.context_length)
    return changed


def _loss(model: Any, cache: CompressedCache, tokens: Any) -> Any:
    """Return the loss of each token after the first, (n - 1,), of numpy."""
    tokens = tokens.to(inputs_device(model))
    logits = model(tokens[None], **as_cache_of(model, cache)).logits[0, :-1].float()
    return nn.functional.cross_entropy(logits, tokens[1:], reduction="none").double().cpu().numpy()
