"""Measure the loss of a decoder if each of its heads is cut, by tasks that need recall and by plain text."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from levattn._core.checks import check_type, whole_number
from levattn._core.threads import reported
from levattn.integrations.transformers.calls import check_generates, check_tokenizer, counting_from, inputs_device
from levattn.integrations.transformers.compression.compress import compress
from levattn.integrations.transformers.compression.fingerprint import Fingerprint
from levattn.integrations.transformers.compression.profile import CACHE, DOUBT, READING, HeadProfile, way_of
from levattn.integrations.transformers.compression.trials import CacheTrial, ReadingTrial
from levattn.integrations.transformers.interface import check_model
from levattn.integrations.transformers.pruning import prune

_log = logging.getLogger("levattn")
_FOLLOWING = 96  # positions of the text after a context whose loss is measured
_SHARE = 1 / 16  # of its bytes that a cut head keeps
_COMPANY = {CACHE: 1 / 8, READING: 1 / 4}  # the budget of the others, in all rounds but the first
_PAIRS = 8  # keys and values that are hidden in a text
_KEY, _VALUE = 2, 4  # their tokens
_PASSAGE = 16  # tokens that are to be repeated
_OTHER_TEXTS = 1_000_003  # times the trials of an earlier profile: what its seed is moved by
_PIECE = 256  # tokens that a model writes at once
TRIALS = {CACHE: CacheTrial, READING: ReadingTrial}
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
    way: str = CACHE,
    seed: int = 0,
    earlier: HeadProfile | None = None,
    progress: bool | Callable[[int, int | None], None] | None = None,
) -> HeadProfile:
    """Measure the loss of a decoder if each head of its keys is cut, alone and beside other cut heads.

    Contexts are texts with lines "key = value" of random words in them. After each context the model must answer with
    the values, and repeat passages of the context. Heads are cut in one of two ways, and a profile serves this way
    alone, because errors of layers add up while a model reads:

    - "cache", for `compress`: the model reads the context densely, and then its cache is cut, with ``bits=16``. Plain
      text is text after the context;
    - "reading", for `prune`: the model reads context and questions with pruned heads. Plain text is every fourth
      position in the second half of the context.

    The first round cuts one head to a sixteenth. It compares the losses of the answers and of plain text with the
    losses of the dense model. In further rounds all heads share an eighth of the bytes, for reading a quarter, split
    by the costs so far. A head that is whole is cut, and a head that is cut is made whole. The cost of a head is the
    mean over the rounds, because heads that stand in for one another cost nothing alone. The sum over several heads is
    an assumption.

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
    way : {"cache", "reading"}, default "cache"
        How heads are cut.
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
        If an argument is out of range, a text is too short, or `compress` or `prune` refuses the model. Also if
        `earlier` is of other weights, another share or another way.

    Notes
    -----
    Time for caches: each context is read five times. Each head of the keys takes six passes over about 100 positions,
    from its layer on. For reading, each head takes a pass over about ``positions + 100`` in each round, from its layer
    on. Memory: a dense cache of `positions`, or the outputs of all layers, and 95 or about ``positions / 8`` rows of
    probabilities of the vocabulary for each task.

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
    rounds, seed, way = whole_number("rounds", rounds), whole_number("seed", seed, 0), way_of(way)
    check_model(model)
    if model.training:
        raise ValueError("model is in training mode; expected evaluation mode. Call eval()")
    check_tokenizer(tokenizer)
    words, heads = _words(tokenizer), _heads_of(model, way)
    check_generates(model)
    shares = dict.fromkeys(heads, 1.0)
    if earlier is not None:
        shares = _split_of(earlier, model, heads, way)
        seed += _OTHER_TEXTS * earlier.trials
    rng = np.random.default_rng(seed)
    steps = tasks + rounds * tasks * len(heads) + (_PIECE if texts is None else 0)
    with torch.no_grad(), counting_from(model, {}), reported(progress, steps, "steps") as advance:
        given = _texts(model, tokenizer, texts, tasks, positions + _FOLLOWING, seed, advance)
        trials: list[Any] = []
        for text in given:
            trials.append(TRIALS[way](model, heads, _SHARE, *_task(tokenizer, text, positions, words, rng)))
            advance(1)
        found: list[Any] = []
        _tell_time(trials[0].step_seconds(), rounds * tasks * len(heads))
        for _ in range(rounds):
            found.append([trial.costs(shares, advance) for trial in trials])
            profile = _profile(model, heads, np.mean(found, 0), way, len(found))
            profile = profile if earlier is None else earlier.joined(profile)
            shares = _in_order(profile.shares(_COMPANY[way]), heads)
    return profile


def _split_of(earlier: Any, model: Any, heads: list[tuple[int, int]], way: str) -> dict[tuple[int, int], float]:
    """Return the split of the other heads by an earlier profile, or raise if it cannot be refined."""
    check_type("earlier", earlier, HeadProfile, "a HeadProfile to refine, or None")
    known = earlier.share == _SHARE and earlier.way == way
    if not known or set(earlier) != set(heads) or not earlier.fits(model):
        raise ValueError(
            f"earlier is {earlier!r}, way={earlier.way!r}; expected a profile of this {type(model).__name__} with its "
            f"{len(heads)} heads, cut to {_SHARE:.6g}, and way={way!r}. Measure a new one without earlier"
        )
    return _in_order(earlier.shares(_COMPANY[earlier.way]), heads)


def _in_order(shares: dict[tuple[int, int], float], heads: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Return shares in the order of some heads."""
    return {head: shares[head] for head in heads}


def _heads_of(model: Any, way: str) -> list[tuple[int, int]]:
    """Return the layer and head of the keys in layers that do not slide, or raise for a model that cannot be cut."""
    cache = compress(model, torch.zeros((1, 1), dtype=torch.long, device=inputs_device(model)), 1.0)
    heads = [(row["layer"], row["head"]) for row in cache.table() if not row["slides"]]
    if not heads:
        raise ValueError(
            f"all layers of {type(model).__name__} slide, whose heads keep their windows; expected a model with a "
            "layer that attends to all positions. Use this one without a profile"
        )
    if way == READING:
        prune(model, dict.fromkeys(heads, _SHARE)).remove()
    return heads


def _tell_time(step: float, steps: int) -> None:
    """Write the time of all steps to the log, where they take more than a minute."""
    minutes = step * steps / 60
    if minutes > 1:
        _log.info("measuring the heads takes about %.2g minutes: %d steps of %.2g seconds", minutes, steps, step)


def _profile(model: Any, heads: list[tuple[int, int]], costs: Any, way: str, rounds: int) -> HeadProfile:
    """Return the profile from costs (tasks, heads, 2): means over tasks, and intervals."""
    errors = [[None, None]] * len(heads)
    if len(costs) > 1:
        errors = (DOUBT * costs.std(0, ddof=1) / len(costs) ** 0.5).tolist()
    rows = []
    for (layer, head), mean, error in zip(heads, costs.mean(0).tolist(), errors, strict=True):
        figures = {"recall": mean[0], "recall_error": error[0], "text": mean[1], "text_error": error[1]}
        rows.append({"layer": layer, "head": head, **figures})
    return HeadProfile(rows, type(model).__name__, _SHARE, Fingerprint.of(model), len(costs) * rounds, way)


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
