"""Measure the loss of a decoder if each of its heads is cut, by tasks that need recall and by plain text."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from levattn._core.checks import check_type, fraction, whole_number
from levattn._core.threads import reported
from levattn.integrations.transformers.calls import as_cache_of, inputs_device
from levattn.integrations.transformers.compression.cache import CompressedCache
from levattn.integrations.transformers.compression.compress import compress
from levattn.integrations.transformers.compression.fingerprint import Fingerprint
from levattn.integrations.transformers.compression.layer import CompressedLayer
from levattn.integrations.transformers.compression.profile import DOUBT, HeadProfile, curves
from levattn.integrations.transformers.discovery import attention_modules
from levattn.integrations.transformers.interface import check_model

_log = logging.getLogger("levattn")
_FOLLOWING = 96  # positions of the text after a context whose loss is measured
_COMPANY = 1 / 8  # the budget of the others, in all rounds but the first
_PAIRS = 8  # keys and values that are hidden in a text
_KEY, _VALUE = 2, 4  # their tokens
_PASSAGE = 16  # tokens that are to be repeated
_DTYPE = 16  # bits that stand for the dtype of the model: costs are of positions, whatever bits hold them later
_OTHER_TEXTS = 1_000_003  # times the trials of an earlier profile: what its seed is moved by
_PIECE = 256  # tokens that a model writes at once
_LENGTH = {"min_new_tokens": _PIECE, "max_new_tokens": _PIECE}
_SAMPLED = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}


def head_profile(
    model: Any,
    tokenizer: Any,
    *,
    texts: Sequence[str] | None = None,
    tasks: int = 4,
    positions: int = 1024,
    rounds: int = 3,
    share: float = 1 / 16,
    seed: int = 0,
    earlier: HeadProfile | None = None,
    progress: bool | Callable[[int, int | None], None] | None = None,
) -> HeadProfile:
    """Measure the loss of a decoder if each head of its keys is cut, alone and beside other cut heads.

    Contexts are texts with lines "key = value" of random words in them. After each context the model must answer with
    the values, repeat passages of the context, and continue the text. The model reads the context densely. The first
    round cuts one head to `share`, as `compress` with ``bits=16`` cuts it. It compares the losses of the answers and
    of the text with the losses of the dense cache. In further rounds all heads share an eighth of the bytes, split by
    the costs so far. A head that is whole is cut, and a head that is cut is made whole. The cost of a head is the mean
    over the rounds, because heads that stand in for one another cost nothing alone. The sum over several heads is an
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
    rounds : int, default 3
        The first round finds heads that recall alone. The second finds heads that stand in for others, and a third
        the remaining ones. For a first split in a tenth of the time take ``tasks=1, rounds=1``, and refine it later.
    share : float in (0, 1), default 1/16
        Share of its bytes that a cut head keeps.
    seed : int, default 0
        Seed of the random words, and of the texts that the model writes.
    earlier : HeadProfile, optional
        A profile of this model to refine, such as a quick one. The rounds begin with its split. The result has the
        means over its trials and the new ones. The model writes other texts than it was measured on. Of `texts` again
        the first are used, so give others than before.
    progress : bool or function, optional
        True for a bar, or a function of the steps made and their number. Each token of the texts that the model writes
        is a step, and so is the reading of each context. Each head is a step in each context and round. Before the
        first head an entry of the log "levattn" estimates the time of all heads, if it is above a minute.

    Returns
    -------
    HeadProfile
        Means over the contexts, with confidence intervals, which one context alone does not have. Save it in a folder
        of profiles, where ``heads="auto"`` finds it.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range, a text is too short, or `compress` refuses the model. Also if `earlier` is of
        other weights or another share.

    Notes
    -----
    Time: each context is read five times. Each head of the keys takes six passes over about 100 positions, from its
    layer on. Memory: a dense cache of `positions` and 95 rows of probabilities of the vocabulary for each task.

    References
    ----------
    Own construction, after Xiao et al., "DuoAttention", arXiv:2410.10819, who learn which heads recall.

    Examples
    --------
    >>> import torch
    >>> from levattn.integrations.transformers import head_profile
    >>> profile = head_profile(model, tokenizer, progress=True)  # doctest: +SKIP
    >>> cache = compress(model, context, 0.25, heads=profile)  # doctest: +SKIP
    """
    tasks, positions = whole_number("tasks", tasks), whole_number("positions", positions, 256)
    rounds, share, seed = whole_number("rounds", rounds), fraction("share", share), whole_number("seed", seed, 0)
    check_model(model)
    if model.training:
        raise ValueError("model is in training mode; expected evaluation mode. Call eval()")
    words, heads = _words(tokenizer), _heads_of(model)
    shares = dict.fromkeys(heads, 1.0)
    if earlier is not None:
        shares = _split_of(earlier, model, heads, share)
        seed += _OTHER_TEXTS * earlier.trials
    rng = np.random.default_rng(seed)
    steps = tasks + rounds * tasks * len(heads) + (_PIECE if texts is None else 0)
    with torch.no_grad(), reported(progress, steps, "steps") as advance:
        given = _texts(model, tokenizer, texts, tasks, positions + _FOLLOWING, seed, advance)
        trials: list[_Trial] = []
        for text in given:
            trials.append(_Trial(model, heads, share, *_task(tokenizer, text, positions, words, rng)))
            advance(1)
        found: list[Any] = []
        _tell_time(trials[0].step_seconds(), rounds * tasks * len(heads))
        for _ in range(rounds):
            found.append([trial.costs(shares, advance) for trial in trials])
            profile = _profile(model, heads, np.mean(found, 0), share, len(found))
            profile = profile if earlier is None else earlier.joined(profile)
            shares = _in_order(profile.shares(_COMPANY), heads)
    return profile


def _split_of(earlier: Any, model: Any, heads: list[tuple[int, int]], share: float) -> dict[tuple[int, int], float]:
    """Return the split of the other heads by an earlier profile, or raise if it cannot be refined."""
    check_type("earlier", earlier, HeadProfile, "a HeadProfile to refine, or None")
    if earlier.share != share or set(earlier) != set(heads) or not earlier.fits(model):
        raise ValueError(
            f"earlier is {earlier!r}; expected a profile of this {type(model).__name__} with its {len(heads)} heads "
            f"and share={share:.6g}. Measure a new one without earlier"
        )
    return _in_order(earlier.shares(_COMPANY), heads)


def _in_order(shares: dict[tuple[int, int], float], heads: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Return shares in the order of some heads."""
    return {head: shares[head] for head in heads}


def _heads_of(model: Any) -> list[tuple[int, int]]:
    """Return the layer and head of the keys in layers that do not slide."""
    cache = compress(model, torch.zeros((1, 1), dtype=torch.long, device=inputs_device(model)), 1.0)
    return [(row["layer"], row["head"]) for row in cache.table() if not row["slides"]]


def _tell_time(step: float, steps: int) -> None:
    """Write the time of all steps to the log, where they take more than a minute."""
    minutes = step * steps / 60
    if minutes > 1:
        _log.info("measuring the heads takes about %.2g minutes: %d steps of %.2g seconds", minutes, steps, step)


def _profile(model: Any, heads: list[tuple[int, int]], costs: Any, share: float, rounds: int) -> HeadProfile:
    """Return the profile from costs (tasks, heads, 2): means over tasks, and intervals."""
    errors = [[None, None]] * len(heads)
    if len(costs) > 1:
        errors = (DOUBT * costs.std(0, ddof=1) / len(costs) ** 0.5).tolist()
    rows = []
    for (layer, head), mean, error in zip(heads, costs.mean(0).tolist(), errors, strict=True):
        figures = {"recall": mean[0], "recall_error": error[0], "text": mean[1], "text_error": error[1]}
        rows.append({"layer": layer, "head": head, **figures})
    return HeadProfile(rows, type(model).__name__, share, Fingerprint.of(model), len(costs) * rounds)


def _texts(
    model: Any, tokenizer: Any, texts: Any, count: int, length: int, seed: int, advance: Callable[[int], None]
) -> list[Any]:
    """Return the tokens of texts, or of some that the model writes, or raise if they are too few or too short."""
    if texts is None:
        return _written(model, tokenizer, count, length, seed, advance)
    if isinstance(texts, str) or len(texts) < count or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"texts is {type(texts).__name__}; expected at least tasks={count} strings")
    found = [_tokens(tokenizer, text) for text in texts[:count]]
    for number, tokens in enumerate(found):
        if len(tokens) < length:
            raise ValueError(
                f"texts[{number}] has {len(tokens)} tokens; expected at least {length}. Give longer texts, or fewer "
                "positions"
            )
    return found


def _tokens(tokenizer: Any, text: str) -> Any:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def _written(
    model: Any, tokenizer: Any, count: int, length: int, seed: int, advance: Callable[[int], None]
) -> list[Any]:
    """Return the tokens of texts that a model samples token by token, each in several pieces."""
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    pieces = -(-length // _PIECE)
    start = torch.full((count * pieces, 1), 0 if first is None else int(first), device=inputs_device(model))
    unused = {"pad_token_id": int(start[0, 0] == 0)}  # because all pieces have one length
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = {"attention_mask": torch.ones_like(start), "streamer": _Steps(advance)}
        found = model.generate(start, **whole, **_SAMPLED, **_LENGTH, **unused)
    return list(found[:, 1:].reshape(count, -1)[:, :length].cpu().numpy())


class _Steps:
    """A streamer of `generate` that counts the tokens that each sequence gets."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance, self._begun = advance, False

    def put(self, _tokens: Any) -> None:
        """Receive the prompt, and then each token."""
        if self._begun:
            self._advance(1)
        self._begun = True

    def end(self) -> None:
        """Receive nothing."""


def _words(tokenizer: Any) -> Any:
    """Return the tokens of a vocabulary that are a space and a word of ASCII letters, or ordinary ones if few are."""
    tokens = range(len(tokenizer))
    words = [token for token in tokens if re.fullmatch(" [A-Za-z]{3,}", tokenizer.decode([token]))]
    if len(words) < _PAIRS * (_KEY + _VALUE):
        words = sorted(set(tokens) - set(getattr(tokenizer, "all_special_ids", ())))
    return np.array(words)


def _task(tokenizer: Any, text: Any, positions: int, words: Any, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Return a context, questions on it with flags of the answers, and the text after it with flags, all True.

    The context is the first positions of a text, tokens (n,), with pairs of random words hidden in it: lines
    "key = value". A question is the line up to the value. For some passages of the text, the question is their first
    half.
    """
    equal, line = (_tokens(tokenizer, mark) for mark in (" =", "\n"))
    pairs = [(rng.choice(words, _KEY), rng.choice(words, _VALUE)) for _ in range(_PAIRS)]
    lines = [np.concatenate([line, key, equal, value, line]) for key, value in pairs]
    room = positions - sum(map(len, lines))
    cuts = np.sort(rng.choice(np.arange(room // 16, room - room // 16), _PAIRS, replace=False))
    *pieces, last = np.split(text[:room], cuts)
    context = [part for pair in zip(pieces, lines, strict=True) for part in pair]
    asked = [([line, pairs[i][0], equal], pairs[i][1]) for i in rng.permutation(_PAIRS)]
    for start in rng.integers(0, room - _PASSAGE, _PAIRS // 4):
        first, rest = np.split(text[start : start + _PASSAGE], 2)
        asked.append(([line, first], rest))
    questions = np.concatenate([part for question, answer in asked for part in (*question, answer)])
    lengths = [length for question, answer in asked for length in (sum(map(len, question)), len(answer))]
    answers, after = np.repeat([False, True] * len(asked), lengths), text[room : room + _FOLLOWING]
    return np.concatenate([*context, last]), (questions, answers), (after, np.ones(len(after), bool))


class _Trial:
    """A task whose context a model has read, with all heads whole and with all heads cut to a share."""

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

    def costs(self, shares: dict[tuple[int, int], float], advance: Callable[[int], None]) -> list[Any]:
        """Return the costs (2,) of cutting each head from whole to the share, where the others have `shares`.

        A whole head is cut. A cut head is made whole, and the curves convert its gain into the cost of a cut.
        """
        low = compress(self._model, self._context, shares, bits=_DTYPE)
        replays = [Replay(self._model) for _ in self._asked]
        before, found = self._losses(low, [replay.recorded() for replay in replays]), []
        for (layer, head), kept in shares.items():
            changed = _exchanged(low, self._light if kept == 1 else self._whole, layer, head)
            rise = self._losses(changed, [replay.begun_at(layer) for replay in replays]) - before
            found.append(rise if kept == 1 else -rise * (curves(self._share) / curves(kept)))
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


def _exchanged(cache: CompressedCache, other: CompressedCache, layer: int, head: int) -> CompressedCache:
    """Return a cache with one head taken from another cache of the same context."""
    parts = [(group, set(group.heads) - {head}) for group in cache.layers[layer].groups]
    parts += [(group, set(group.heads) & {head}) for group in other.layers[layer].groups]
    groups = tuple(group.of_heads(tuple(sorted(heads))) for group, heads in parts if heads)
    changed = cache.copy()
    changed.layers[layer] = CompressedLayer(layer, groups, cache.layers[layer].present)
    return changed


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
