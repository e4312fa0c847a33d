"""A small causal decoder of bytes that learns text and finds needles in it: data, training, weights, what is measured.

The text comes with every Python: the ``.py`` files of the standard library's own folder, by name, every tenth of them
for validation. Needles are lines like ``key 4821 = 7730`` that replace as many bytes of it; later the line comes
again, and whoever reads it can know the four digits of the value only from where it stood before.
"""

from __future__ import annotations

import json
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor
from torch.nn import functional

__all__ = ["Phase", "Recipe", "corpus", "model_for", "nats_of", "needles", "pieces", "recall_of"]

Bytes = npt.NDArray[np.uint8]

EVERY = 10  # one file in so many is for validation
DIGITS = 4
TOGETHER = 16  # rows at a time where nothing is learned
BEHIND = 96  # bytes at least between a needle and the question that is judged
REPEATED = 0.85  # of the lines after a first one: others are new needles


class Phase(NamedTuple):
    """Steps of training at one length, and the share of rows that hold needles."""

    length: int
    steps: int
    needles: float


@dataclass(frozen=True)
class Recipe:
    """What decides on the weights, together with the text."""

    width: int = 128
    depth: int = 3
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 344
    phases: tuple[Phase, ...] = ()
    batch: int = 2048  # bytes a step
    rate: float = 3e-3
    deviation: float = 0.06  # of initial weights: with 0.02 needles are not learned in this time
    base: float = 1e6  # of rotary positions: half of each head hardly turns within the context
    seed: int = 0

    @property
    def context(self) -> int:
        return max(phase.length for phase in self.phases)

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)


class Batch(NamedTuple):
    """Bytes (B, T + 1), and whether each of the last T is an answer, or nobody could know it."""

    tokens: Tensor
    answers: Tensor
    hidden: Tensor


def corpus() -> tuple[Bytes, Bytes]:
    """Return the bytes for training, and those for validation."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda path: path.name)
    if len(files) < EVERY:
        raise FileNotFoundError(f"{folder} has {len(files)} .py files; the text are those of the standard library")
    texts = [path.read_bytes() for path in files]
    parts = [text for i, text in enumerate(texts) if i % EVERY], texts[::EVERY]
    return tuple(np.frombuffer(b"".join(part), np.uint8) for part in parts)


def line(key: int, value: int) -> Bytes:
    return np.frombuffer(f"\nkey {key:0{DIGITS}d} = {value:0{DIGITS}d}\n".encode(), np.uint8)


LINE = len(line(0, 0))
KEY = slice(5, 5 + DIGITS)  # of a line
VALUE = slice(LINE - 1 - DIGITS, LINE - 1)


def crops(text: Bytes, starts: npt.NDArray[np.int64], length: int) -> Bytes:
    return text[starts[:, None] + np.arange(length)]


def batch_of(text: Bytes, rows: int, length: int, share: float, rng: np.random.Generator) -> Batch:
    """Return rows of text, in some of which lines are needles, new ones and earlier ones again.

    Half of these have two lines, a needle and its question; the others up to as many as there is room for. All
    distances occur: where they are multiples of a line's length, models learn to copy from so far back, and nothing
    else.
    """
    tokens = crops(text, rng.integers(len(text) - length, size=rows), length + 1)
    answers, hidden = np.zeros((2, rows, length + 1), bool)
    places = (length + 1) // LINE
    for row in range(round(rows * share)):
        count = 2 if row % 2 else rng.integers(2, places, endpoint=True)
        free = length + 1 - count * LINE
        starts = np.sort(rng.integers(free, size=count, endpoint=True)) + LINE * np.arange(count)
        seen: list[npt.NDArray[np.int64]] = []
        for i, start in enumerate(starts):
            new = i == 0 or (i < count - 1 and rng.random() > REPEATED)
            if new:
                seen.append(rng.integers(10**DIGITS, size=2))
            cut = slice(start, start + LINE)
            tokens[row, cut] = line(*(seen[-1] if new else seen[rng.integers(len(seen))]))
            hidden[row, cut][KEY] = True
            (hidden if new else answers)[row, cut][VALUE] = True
    parts = tokens.astype(np.int64), answers[:, 1:], hidden[:, 1:]
    return Batch(*(torch.from_numpy(part) for part in parts))


def batches(text: Bytes, recipe: Recipe) -> Iterator[Batch]:
    rng = np.random.default_rng(recipe.seed)
    for phase in recipe.phases:
        for _ in range(phase.steps):
            rows = max(2, recipe.batch // phase.length)
            yield batch_of(text, rows, phase.length, phase.needles, rng)


def pieces(text: Bytes, count: int, length: int) -> Tensor:
    """Return pieces (count, length + 1) of the text, at equal distances."""
    starts = np.linspace(0, len(text) - length - 1, count).astype(np.int64)
    return torch.from_numpy(crops(text, starts, length + 1).astype(np.int64))


def needles(text: Bytes, count: int, length: int, seed: int, lines: int = 1) -> Tensor:
    """Return rows (count, length + 1) of text with some needles, at whose end the first of them comes again.

    The last bytes of a row are the value; the needle stands at a random place at least `BEHIND` bytes before.
    """
    rng = np.random.default_rng(seed)
    rows = crops(text, rng.integers(len(text) - length - 1, size=count), length + 1)
    room = length + 1 - LINE - min(BEHIND, length // 4)
    for row in rows:
        places = room // LINE
        starts = rng.integers(room + 1 - places * LINE) + LINE * rng.choice(places, lines, replace=False)
        keys = rng.choice(10**DIGITS, lines, replace=False)
        found = [line(key, value) for key, value in zip(keys, rng.integers(10**DIGITS, size=lines), strict=True)]
        for start, needle in zip(starts, found, strict=True):
            row[start : start + LINE] = needle
        row[1 - LINE :] = found[0][:-1]
    return torch.from_numpy(rows.astype(np.int64))


def untrained(recipe: Recipe) -> Any:
    """Return a decoder of Llama's kind with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=recipe.width,
        intermediate_size=recipe.hidden,
        num_hidden_layers=recipe.depth,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=recipe.context,
        initializer_range=recipe.deviation,
        rope_theta=recipe.base,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(model: Any, text: Bytes, recipe: Recipe) -> None:
    """Train by AdamW on the mean loss of text plus that of answers; the rate goes up, and down as a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.01)
    steps, warm = recipe.steps, max(1, recipe.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / warm) * (1 + math.cos(math.pi * min(i, steps) / steps)) / 2
    )
    model.train()
    bar = track(batches(text, recipe), "training", total=steps, console=Console(stderr=True), transient=True)
    for batch in bar:
        logits = model(batch.tokens[:, :-1]).logits
        losses = functional.cross_entropy(logits.mT, batch.tokens[:, 1:], reduction="none")
        loss = losses[~batch.hidden & ~batch.answers].mean() + losses[batch.answers].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def model_for(recipe: Recipe, text: Bytes, file: Path, *, again: bool = False) -> Any:
    """Return the trained decoder: from a file of weights, if it is of this recipe and this text, or trained anew."""
    model = untrained(recipe)
    wanted = {"recipe": json.dumps(asdict(recipe)), "bytes": str(len(text))}
    if not again and file.exists():
        with safe_open(file, "pt") as weights:
            found = weights.metadata() or {}
        if all(found.get(name) == value for name, value in wanted.items()):
            load_model(model, file)
            return model.eval()
    train(model, text, recipe)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_model(model, str(file), wanted)
    return model.eval()


@torch.no_grad()
def nats_of(model: Any, rows: Tensor) -> float:
    """Return the mean cross-entropy of each byte but the first, in nats."""
    parts = [
        functional.cross_entropy(model(part[:, :-1]).logits.mT, part[:, 1:], reduction="none")
        for part in rows.split(TOGETHER)
    ]
    return torch.cat(parts).double().mean().item()


@torch.no_grad()
def recall_of(model: Any, rows: Tensor) -> float:
    """Return how often the largest logits give all digits of the value at the end."""
    found = [model(part[:, :-1], logits_to_keep=DIGITS).logits.argmax(-1) for part in rows.split(TOGETHER)]
    return (torch.cat(found) == rows[:, -DIGITS:]).all(-1).double().mean().item()
