"""Synthetic recall tasks: pairs hidden in a text, and questions after it for these pairs and for passages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from levattn.integrations.transformers.calls import inputs_device

_PAIRS = 8  # keys and values that are hidden in a text
_KEY, _VALUE = 2, 4  # their tokens
_PASSAGE = 16  # tokens that are to be repeated
_PIECE = 256  # tokens that a model writes at once


@dataclass(frozen=True)
class Task:
    """A context, questions on it, and the text that follows it.

    context, questions, text: tokens, (n,). answers: True for tokens of the questions that are answers, (m,) bool.
    """

    context: Any
    questions: Any
    answers: Any
    text: Any


def made_up(tokenizer: Any, text: Any, positions: int, following: int, rng: np.random.Generator) -> Task:
    """Return a task with its pairs hidden in the first positions of a text, tokens (n,).

    Keys and values are random words of the tokenizer's vocabulary. Each pair is a line "key = value", and its question
    is the line up to the value. For some passages of the text, the question is their first half.
    """
    words = _words(tokenizer)
    equal, line = (tokenizer(mark, add_special_tokens=False)["input_ids"] for mark in (" =", "\n"))
    pairs = [(rng.choice(words, _KEY).tolist(), rng.choice(words, _VALUE).tolist()) for _ in range(_PAIRS)]
    lines = [[*line, *key, *equal, *value, *line] for key, value in pairs]
    room = positions - sum(map(len, lines))
    cuts = np.sort(rng.choice(np.arange(room // 16, room - room // 16), _PAIRS, replace=False))
    context: list[int] = []
    tokens, last = text.tolist(), 0
    for cut, hidden in zip(cuts.tolist(), lines, strict=True):
        context += tokens[last:cut] + hidden
        last = cut
    context += tokens[last:room]
    questions: list[int] = []
    answers: list[bool] = []
    for i in rng.permutation(_PAIRS).tolist():
        key, value = pairs[i]
        asked = [*line, *key, *equal]
        questions += [*asked, *value]
        answers += [False] * len(asked) + [True] * len(value)
    for start in rng.integers(0, room - _PASSAGE, _PAIRS // 4).tolist():
        questions += [*line, *tokens[start : start + _PASSAGE]]
        answers += [False] * (len(line) + _PASSAGE // 2) + [True] * (_PASSAGE - _PASSAGE // 2)
    after = tokens[room : room + following]
    return Task(*(torch.tensor(part) for part in (context, questions, answers, after)))


def written_by(model: Any, tokenizer: Any, count: int, length: int, seed: int) -> list[Any]:
    """Return texts (length,) that a model samples token by token, each in several pieces."""
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    pieces = -(-length // _PIECE)
    start = torch.full((count * pieces, 1), 0 if first is None else int(first), device=inputs_device(model))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=_PIECE,
            min_new_tokens=_PIECE,
            pad_token_id=int(start[0, 0] == 0),  # not used, because all pieces have one length
        )
    return list(found[:, 1:].reshape(count, -1)[:, :length].cpu())


def _words(tokenizer: Any) -> Any:
    """Return the tokens of a vocabulary that are a space and a word of ASCII letters, or ordinary ones if few are."""
    found = []
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token])
        if text.startswith(" ") and len(text) > 3 and text[1:].isalpha() and text[1:].isascii():
            found.append(token)
    if len(found) < _PAIRS * (_KEY + _VALUE):
        ordinary = sorted(set(range(len(tokenizer))) - set(getattr(tokenizer, "all_special_ids", ())))
        return np.asarray(ordinary)
    return np.asarray(found)
