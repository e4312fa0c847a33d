"""Multi-query associative recall: which mixers find the value of a key again, far beyond a window.

A sequence is pairs of a key and a value, and filler with queries in it: each key comes back once, and what is asked
for there is its value (Arora et al., arXiv:2312.04927). Three parts:

1. all mixers on queries further away from the values than the window;
2. Latte with fewer latents than there are keys, on the same;
3. window and mixtures of both overlaps on queries at any distance: who finds near values, and who far ones.

Bar: 0.95 of part 1 for both overlaps of macchiato, where the window alone stays below 0.6.

    python examples/latte/mqar.py [--quick] [--steps 600] [--seed 0] [--threads 1] [--out build/latte]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from _models import MIXERS, Decoder, Shape, parameters
from _training import IGNORED, STYLES, arguments, axes, save, table, trained, use_threads
from torch import Tensor

RATE, BATCH, HELD_OUT = 4e-3, 32, 512
SWEEP = (4, 8, 16, 32)
BAR, FAILURE = 0.95, 0.6


@dataclass(frozen=True)
class Task:
    """Tokens are keys from 0, then values, then the filler.

    pairs: of different keys in a sequence, at its beginning.
    gap: the least distance of a query to the value that it asks for.
    """

    keys: int = 32
    values: int = 32
    pairs: int = 8
    length: int = 96
    gap: int = 16

    @property
    def filler(self) -> int:
        return self.keys + self.values

    @property
    def vocabulary(self) -> int:
        return self.filler + 1


class Recall(NamedTuple):
    """Tokens, the value that each query asks for, and how far back it stands (0 where there is no query)."""

    tokens: Tensor
    targets: Tensor
    distances: Tensor


def sequences(task: Task, count: int, rng: np.random.Generator) -> Recall:
    """Return so many sequences, each with its own pairs, and its queries at random places in random order."""
    first = 2 * task.pairs - 1 + task.gap  # the first place of a query: the last value is one before the filler
    if task.pairs > min(task.keys, task.length - first):
        raise ValueError(f"{task} has no room for a query of each pair, or too few keys")
    keys = rng.permuted(np.tile(np.arange(task.keys), (count, 1)), axis=1)[:, : task.pairs]
    values = rng.integers(task.keys, task.filler, (count, task.pairs))
    places = rng.permuted(np.tile(np.arange(first, task.length), (count, 1)), axis=1)[:, : task.pairs]
    tokens = np.full((count, task.length), task.filler)
    targets, distances = np.full_like(tokens, IGNORED), np.zeros_like(tokens)
    stands = np.arange(1, 2 * task.pairs, 2)
    tokens[:, stands - 1], tokens[:, stands] = keys, values
    np.put_along_axis(tokens, places, keys, 1)
    np.put_along_axis(targets, places, values, 1)
    np.put_along_axis(distances, places, places - stands, 1)
    return Recall(*(torch.from_numpy(array) for array in (tokens, targets, distances)))


def stream(task: Task, rng: np.random.Generator) -> Iterator[Recall]:
    while True:
        yield sequences(task, BATCH, rng)


@torch.no_grad()
def hits(model: Decoder, held_out: Recall) -> tuple[Tensor, Tensor]:
    """Return which queries were answered rightly, and their distances."""
    asked = held_out.targets != IGNORED
    found = [
        model(tokens, here).argmax(-1) for tokens, here in zip(held_out.tokens.split(64), asked.split(64), strict=True)
    ]
    return torch.cat(found) == held_out.targets[asked], held_out.distances[asked]


def by_distance(right: Tensor, distances: Tensor, edges: Sequence[int]) -> list[float]:
    """Return the accuracy at distances from each edge up to before the next."""
    bins = torch.bucketize(distances, torch.tensor(edges[1:-1]), right=True)
    return [right[bins == i].double().mean().item() for i in range(len(edges) - 1)]


class Runs:
    """Models of one seed: the same sequences for each of them, and others to judge them by."""

    def __init__(self, steps: int, seed: int, held_out: int) -> None:
        self.steps, self.seed, self.held_out = steps, seed, held_out

    def result(self, name: str, shape: Shape, task: Task, title: str, edges: Sequence[int]) -> dict[str, Any]:
        learning, judging = (np.random.default_rng(s) for s in np.random.SeedSequence(self.seed).spawn(2))
        model, seconds = trained(
            name, shape, stream(task, learning), steps=self.steps, rate=RATE, seed=self.seed, title=title
        )
        right, distances = hits(model, sequences(task, self.held_out, judging))
        return {
            "accuracy": right.double().mean().item(),
            "by distance": by_distance(right, distances, edges),
            "parameters": parameters(model),
            "seconds": seconds,
        }


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, steps=600)
    options = parser.parse_args(given)
    use_threads(options.threads)
    task = Task()
    shape = Shape(task.vocabulary, dim=64, depth=2, heads=2, latents=64, window=16, hidden=128, convolution=3)
    sweep: Sequence[int] = SWEEP
    runs = Runs(options.steps, options.seed, HELD_OUT)
    if options.quick:
        task = Task(keys=8, values=8, pairs=2, length=24, gap=4)
        shape = replace(shape, vocabulary=task.vocabulary, dim=16, latents=8, window=4, hidden=16)
        sweep, runs = (2,), Runs(3, options.seed, 32)
    anywhere = replace(task, gap=1)
    far, near = (0, task.length + 1), (1, shape.window, 2 * shape.window, 4 * shape.window, task.length + 1)

    everyone = {name: runs.result(name, shape, task, name, far) for name in MIXERS}
    fewer = {
        L: runs.result("latte", replace(shape, latents=L), task, f"latte, {L} latents a head", far) for L in sweep
    }
    fewer[shape.latents] = everyone["latte"]
    mixed = {
        name: runs.result(name, shape, anywhere, f"{name}, any distance", near)
        for name in ("window", "macchiato-mixture", "macchiato-exclusive")
    }

    table(
        f"1. queries at least {task.gap} from their values, window {shape.window}, {shape.latents} latents a head",
        ("mixer", "accuracy", "parameters", "seconds"),
        ((name, r["accuracy"], r["parameters"], r["seconds"]) for name, r in everyone.items()),
    )
    table(
        f"2. latte, {task.keys} possible keys and {task.pairs} in a sequence, {shape.heads} heads",
        ("latents of a head", "accuracy"),
        ((L, r["accuracy"]) for L, r in fewer.items()),
    )
    spans = [f"{low} to {high - 1}" for low, high in pairwise(near)]
    table(
        "3. queries at any distance: accuracy by the distance to the value",
        ("mixer", "all", *spans),
        ((name, r["accuracy"], *r["by distance"]) for name, r in mixed.items()),
    )
    kept = all(everyone[name]["accuracy"] >= BAR for name in MIXERS if name.startswith("macchiato"))
    kept = kept and everyone["window"]["accuracy"] <= FAILURE
    print(f"bar (both overlaps >= {BAR}, window <= {FAILURE}): {'kept' if kept else 'missed'}")

    figure, (left, right) = axes("", "accuracy", count=2)
    left.bar(list(everyone), [r["accuracy"] for r in everyone.values()], color=[STYLES[n][0] for n in everyone])
    left.tick_params("x", rotation=20)
    left.set_title("queries beyond the window")
    for name, r in mixed.items():
        right.plot(spans, r["by distance"], color=STYLES[name][0], linestyle=STYLES[name][1], marker="o", label=name)
    right.set(title="queries at any distance", xlabel="distance of query and value", ylim=(-0.03, 1.03))
    right.legend()
    results = {
        "task": asdict(task),
        "shape": asdict(shape),
        "steps": runs.steps,
        "seed": options.seed,
        "threads": options.threads,
        "rate": RATE,
        "batch": BATCH,
        "beyond the window": everyone,
        "latents": fewer,
        "any distance": {"edges": near, "results": mixed},
        "bar kept": kept,
    }
    save(options.out, "mqar", results, figure)
    return 0 if kept or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
