"""Images, training, command lines, tables and files, the same for all examples of this folder."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _vit import Shape, Transformer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

FOLDS = 3  # seed s is judged on the part s mod 3 of the images, and has learned the others
BATCH = 64
EPOCHS = 20


class Digits(NamedTuple):
    """Images (N, 8, 8) with pixels from −1 to 1, and their digits (N,)."""

    images: Tensor
    labels: Tensor


def digits(seed: int) -> tuple[Digits, Digits]:
    """Return scikit-learn's images of digits for training, and those that a seed is judged on."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.images / 8 - 1, dtype=torch.float32)[order]
    labels = torch.tensor(bunch.target, dtype=torch.long)[order]
    judged = torch.arange(len(order)) % FOLDS == seed % FOLDS
    return Digits(images[~judged], labels[~judged]), Digits(images[judged], labels[judged])


def placed(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """Return images each at a random place of a canvas of so many pixels, (N, side, side), else blank."""
    free = side - images.shape[-1] + 1
    canvas = images.new_full((len(images), side, side), -1.0)
    down, right = torch.randint(free, (2, len(images), 1), generator=generator)
    pixels = torch.arange(images.shape[-1])
    rows, columns = down + pixels, right + pixels
    canvas[torch.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]] = images
    return canvas


def canvases(judged: Digits, side: int) -> Tensor:
    """Return the images at places that are always the same."""
    return placed(judged.images, side, torch.Generator().manual_seed(0))


def step(model: Transformer, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    """Train on one batch, and return the loss before."""
    loss = functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def optimizer_of(model: Transformer, rate: float) -> torch.optim.Optimizer:
    """Return AdamW, in which norms, biases and temperatures do not decay."""
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim < 2) == vectors], "weight_decay": decay}
        for vectors, decay in ((False, 0.05), (True, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))


def learning_rates(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Return rates that go up over the first tenth of the steps, and down to nothing as a cosine."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, 10 * (i + 1) / steps) * (1 + math.cos(math.pi * min(i, steps) / steps)) / 2
    )


def trained(
    name: str, shape: Shape, learned: Digits, *, epochs: int, rate: float, seed: int
) -> tuple[Transformer, float]:
    """Return a transformer after so many epochs, and the seconds of processor time that they took."""
    torch.manual_seed(seed)
    model = Transformer(name, shape)
    optimizer = optimizer_of(model, rate)
    each = len(learned.labels) // BATCH
    schedule = learning_rates(optimizer, epochs * each)
    orders = torch.Generator().manual_seed(seed)  # the same for all mixers
    started = time.process_time()
    for _ in range(epochs):
        for batch in torch.randperm(len(learned.labels), generator=orders)[: each * BATCH].split(BATCH):
            images = placed(learned.images[batch], shape.side, orders)
            step(model, optimizer, images, learned.labels[batch])
            schedule.step()
    return model.eval(), time.process_time() - started


@torch.no_grad()
def accuracy(model: Transformer, judged: Digits) -> float:
    found = torch.cat([model(images).argmax(-1) for images in canvases(judged, model.shape.side).split(BATCH)])
    return (found == judged.labels).double().mean().item()


def arguments(description: str | None, out: Path = Path("build/tost")) -> argparse.ArgumentParser:
    """Return the options that all examples have."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a run of a few seconds, whose figures mean little")
    parser.add_argument("--out", type=Path, default=out, help="folder of the pictures and the figures")
    return parser


def use_threads(count: int) -> None:
    torch.set_num_threads(count)
    os.environ["LEVATTN_NUM_THREADS"] = str(count)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows whose first entry is a name."""
    drawn = Table()
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="right" if i else "left")
    for row in rows:
        drawn.add_row(*map(str, row))
    console = Console(width=120, highlight=False)
    console.print(f"[bold]{title}[/bold]")
    console.print(drawn)


def pyplot() -> Any:
    """Return matplotlib's interface, which draws into files."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def save(folder: Path, name: str, results: Mapping[str, Any], **figures: Any) -> None:
    """Write ``name.json``, and each figure as ``.svg`` and ``.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    for title, figure in figures.items():
        for kind in ("svg", "png"):
            figure.savefig(folder / f"{title}.{kind}", dpi=150)
        pyplot().close(figure)
    drawn = ", ".join(f"{title}.svg and .png" for title in figures)
    Console().print(f"{folder / name}.json, {drawn} written", highlight=False)
