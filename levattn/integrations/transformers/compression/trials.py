"""Trials of the heads of a decoder: the losses of answers and of text if a head is cut, beside whole and cut heads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from levattn.attention import Selection
from levattn.integrations.transformers.calls import as_cache_of, inputs_device, parameters_of
from levattn.integrations.transformers.compression.cache import CompressedCache
from levattn.integrations.transformers.compression.compress import compress
from levattn.integrations.transformers.compression.layer import CompressedLayer
from levattn.integrations.transformers.compression.profile import CACHE, READING, curves
from levattn.integrations.transformers.discovery import attention_modules
from levattn.integrations.transformers.pruning import prune

_DTYPE = 16  # bits that stand for the dtype of the model: costs are of positions, whatever bits hold them later
_EVERY = 4  # of the positions of a text that a model reads, one of so many tells the loss of text
Shares = dict[tuple[int, int], float]


class CacheTrial:
    """A task whose context a model has read densely; the heads of its cache are cut."""

    def __init__(
        self, model: Any, heads: list[tuple[int, int]], share: float, context: Any, *asked: tuple[Any, Any]
    ) -> None:
        self._model, self._share = model, share
        device = inputs_device(model)
        self._context = torch.tensor(context[None], device=device)
        self._asked = [(torch.tensor(tokens, device=device), counted[1:]) for tokens, counted in asked]
        self._whole = compress(model, self._context, 1.0)
        self._likely = self._log_p(self._whole, self._asked[1][0]).exp()  # of tokens of the text after the context
        self._light = compress(model, self._context, dict.fromkeys(heads, share), bits=_DTYPE)

    def costs(self, shares: Shares, advance: Callable[[int], None]) -> list[Any]:
        """Return the costs (2,) of cutting each head from whole to the share, where the others have `shares`.

        A whole head is cut. A cut head is made whole, and the curves convert its gain into the cost of a cut.
        """
        low = compress(self._model, self._context, shares, bits=_DTYPE)
        replays = [Replay(self._model) for _ in self._asked]
        before, found = self._losses(low, [replay.recorded() for replay in replays]), []
        for (layer, head), kept in shares.items():
            changed = _exchanged(low, self._light if kept == 1 else self._whole, layer, head)
            rise = self._losses(changed, [replay.begun_at(layer) for replay in replays]) - before
            found.append(_cost_of_cut(rise, kept, self._share, CACHE))
            advance(1)
        return found

    def step_seconds(self) -> float:
        """Return about the time in which `costs` measures a head: half of the layers are computed in the mean."""
        start = time.perf_counter()
        self._losses(self._light, [nullcontext(), nullcontext()])
        return (time.perf_counter() - start) / 2

    def _losses(self, cache: CompressedCache, passes: list[Any]) -> Any:
        """Return the mean losses of answers and of the text after the context, in nats a token, in such passes.

        The loss of the text is its mean over all texts that the model could write there with the whole cache.
        """
        (asked, counted), (text, _) = self._asked
        with passes[0]:
            answers = -self._log_p(cache, asked).gather(1, asked[1:, None])[:, 0].double().cpu().numpy()
        with passes[1]:
            terms = torch.where(
                self._likely > 0, self._likely * self._log_p(cache, text), 0
            )  # no token of -inf counts
            others = -terms.sum(1, dtype=torch.float64).cpu().numpy()
        return np.array([answers[counted].mean(), others.mean()])

    def _log_p(self, cache: CompressedCache, tokens: Any) -> Any:
        """Return log-probabilities of the next token after each but the last of some tokens."""
        logits = self._model(tokens[None], **as_cache_of(self._model, cache.copy())).logits[0, :-1]
        return logits.float().log_softmax(-1)


def _cost_of_cut(rise: Any, kept: float, share: float, way: str) -> Any:
    """Return the cost of a cut to a share, from the rise of the losses as a head that has `kept` is changed."""
    return rise if kept == 1 else -rise * (curves(share, way) / curves(kept, way))


def _exchanged(cache: CompressedCache, other: CompressedCache, layer: int, head: int) -> CompressedCache:
    """Return a cache with one head taken from another cache of the same context."""
    parts = [(group, set(group.heads) - {head}) for group in cache.layers[layer].groups]
    parts += [(group, set(group.heads) & {head}) for group in other.layers[layer].groups]
    groups = tuple(group.of_heads(tuple(sorted(heads))) for group, heads in parts if heads)
    changed = cache.copy()
    changed.layers[layer] = CompressedLayer(layer, groups, cache.layers[layer].present)
    return changed


class ReadingTrial:
    """A task that a model reads with pruned heads: the context, the questions, and the answers.

    Some positions in the second half of the context tell the loss of text.
    """

    def __init__(
        self, model: Any, heads: list[tuple[int, int]], share: float, context: Any, *asked: tuple[Any, Any]
    ) -> None:
        self._model, self._share = model, share
        (questions, counted), _ = asked
        whole, n, device = np.concatenate([context, questions]), len(context), inputs_device(model)
        self._tokens = torch.tensor(whole[None], device=device)
        answers = n + np.flatnonzero(counted)
        self._places = torch.tensor(np.concatenate([answers - 1, np.arange(n // 2, n - 1, _EVERY)]), device=device)
        self._answers = torch.tensor(whole[answers], device=device)
        self._likely = self._log_p()[len(answers) :].exp()
        self._heads = heads

    def costs(self, shares: Shares, advance: Callable[[int], None]) -> list[Any]:
        """Return the costs (2,) of pruning each head, as `CacheTrial.costs` does."""
        replay, found = Replay(self._model), []
        before = self._losses(shares, replay.recorded())
        for (layer, head), kept in shares.items():
            changed = shares | {(layer, head): self._share if kept == 1 else 1.0}
            rise = self._losses(changed, replay.begun_at(layer)) - before
            found.append(_cost_of_cut(rise, kept, self._share, READING))
            advance(1)
        return found

    def step_seconds(self) -> float:
        """Return about the time in which `costs` measures a head: half of the layers are computed in the mean."""
        start = time.perf_counter()
        self._losses(dict.fromkeys(self._heads, self._share), nullcontext())
        return (time.perf_counter() - start) / 2

    def _losses(self, shares: Shares, reading: Any) -> Any:
        """Return the mean losses of answers and of text, in nats a token, with so much of each head."""
        cut: Any = {head: Selection(share, start=0) for head, share in shares.items() if share < 1}
        with prune(self._model, cut, measure=False) if cut else nullcontext(), reading:
            log_p = self._log_p()
        answers, text = log_p.split([len(self._answers), len(self._likely)])
        terms = torch.where(self._likely > 0, self._likely * text, 0)  # no token of -inf counts
        right = answers.gather(1, self._answers[:, None])
        return np.array([-float(right.double().mean()), -float(terms.sum(1, dtype=torch.float64).mean())])

    def _log_p(self) -> Any:
        """Return log-probabilities of the next token at the places that count."""
        if "logits_to_keep" in parameters_of(self._model)[0]:
            logits = self._model(self._tokens, use_cache=False, logits_to_keep=self._places).logits[0]
        else:
            logits = self._model(self._tokens, use_cache=False).logits[0, self._places]
        return logits.float().log_softmax(-1)


class Replay:
    """The recorded outputs of a decoder's layers for some tokens; a changed layer costs only the layers from it on."""

    def __init__(self, model: Any) -> None:
        self._layers = {
            attention.layer_idx: layer
            for stack in model.modules()
            if isinstance(stack, torch.nn.ModuleList)
            for layer in stack
            for attention in attention_modules(layer)
            if getattr(attention, "layer_idx", None) is not None
        }
        self._outputs: dict[int, Any] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the outputs of the layers in the pass made meanwhile."""

        def note(number: int, _module: Any, _args: Any, output: Any) -> None:
            self._outputs[number] = output

        with ExitStack() as hooks:
            for number, layer in self._layers.items():
                hooks.enter_context(layer.register_forward_hook(partial(note, number)))
            yield

    @contextmanager
    def begun_at(self, first: int) -> Iterator[None]:
        """Let the layers before the given one return their recorded outputs instead of computing."""
        with ExitStack() as changes:
            for number, layer in self._layers.items():
                if number < first:
                    if "forward" in vars(layer):  # accelerate sets one
                        changes.callback(setattr, layer, "forward", layer.forward)
                    else:
                        changes.callback(delattr, layer, "forward")
                    layer.forward = lambda *_, output=self._outputs[number], **__: output
            yield
