"""The worst of many questions unlike the text: how much less likely a compressed context makes the dense answers.

The questions are passages of the text, passages of other texts, random tokens, and questions of users. Each answer is
the first eight tokens that the dense model gives. Its loss is a mean over them, in nats.

    python examples/decoders/worst.py [--questions 1000] [--contexts 10] [--budgets 0.12]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from smollm2 import CACHE, PROFILE, dense, log_probabilities, opened
from tasks import contexts, docstrings, reference

from levattn.integrations.transformers import HeadProfile, compress

ANSWER = 8
LENGTHS = 4, 24  # of a question, in tokens
USERS = (
    "\nWhat is this text about?\nAnswer:",
    "\nTranslate the first sentence to French:",
    "\nQ: Who wrote this?\nA:",
    "\nList three facts:\n1.",
    "\n\nimport os\n\ndef main():\n    ",
    "\nThe quick brown fox jumps over the",
    "\n2 + 2 =",
    "\nDear Sir or Madam,",
)


def questions(tokenizer: Any, tokens: list[int], count: int, rng: random.Random) -> Iterator[tuple[str, list[int]]]:
    """Yield kinds of questions, and their tokens."""
    other = docstrings(tokenizer) + reference(tokenizer)
    for number in range(count):
        kind, length = ("own text", "other text", "random tokens", "users")[number % 4], rng.randint(*LENGTHS)
        if kind == "random tokens":
            yield kind, [rng.randrange(20, tokenizer.vocab_size) for _ in range(length)]
        elif kind == "users":
            yield kind, tokenizer(rng.choice(USERS), add_special_tokens=False)["input_ids"]
        else:
            text = tokens if kind == "own text" else other
            start = rng.randrange(len(text) - length)
            yield kind, text[start : start + length]


def answered(model: Any, cache: Any, length: int, asked: list[int]) -> list[int]:
    """Return the likeliest tokens after a question; the dense cache stays as it was."""
    found: list[int] = []
    for _ in range(ANSWER):
        ids = torch.tensor([asked if not found else found[-1:]])
        past = cache.get_seq_length()
        logits = model(ids, position_ids=torch.arange(past, past + ids.shape[1])[None], **{CACHE: cache}).logits
        found.append(int(logits[0, -1].argmax()))
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
    return found


def loss(model: Any, cache: Any, length: int, asked: list[int], answer: list[int]) -> float:
    """Return the mean loss of the tokens of an answer."""
    log_p = log_probabilities(model, cache, length, asked + answer)[-ANSWER - 1 : -1]
    return float(-log_p.gather(1, torch.tensor(answer)[:, None]).mean())


def main() -> None:
    """Ask, and print the largest losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--contexts", type=int, default=10)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.12])
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    model, tokenizer = opened()
    profile, rng = HeadProfile.find(PROFILE), random.Random(0)
    above: dict[tuple[float, str], list[float]] = {}
    for number in range(options.contexts):
        found = contexts(tokenizer, options.length, 500 + number, daily=number % 2 == 1)
        tokens = found[number % len(found)].tokens
        whole = dense(model, torch.tensor([tokens]))
        kept = {share: compress(model, torch.tensor([tokens]), share, heads=profile) for share in options.budgets}
        for kind, asked in questions(tokenizer, tokens, options.questions // options.contexts, rng):
            answer = answered(model, whole, len(tokens), asked)
            least = loss(model, whole, len(tokens), asked, answer)
            for share, cache in kept.items():
                more = loss(model, cache, len(tokens), asked, answer) - least
                above.setdefault((share, kind), []).append(more)
        print(f"# context {number}: {time.strftime('%H:%M:%S')}", flush=True)
    print("\n| bytes | questions | number | mean | 99 % | worst (nats a token above dense) |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for (share, kind), losses in sorted(above.items(), reverse=True):
        figures = f"{np.mean(losses):.3f} | {np.quantile(losses, 0.99):.3f} | {max(losses):.3f}"
        print(f"| {share:.0%} | {kind} | {len(losses)} | {figures} |")


if __name__ == "__main__":
    main()
