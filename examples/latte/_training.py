"""Training, command lines, tables, pictures and files, the same for all examples of this folder."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from _models import MIXERS, Decoder, Shape
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.nn import functional

IGNORED = -100  # a target that nobody is asked for

# Of Okabe and Ito; the dashes tell the curves apart as well.
STYLES = dict(
    zip(
        MIXERS,
        (("#0072B2", "-"), ("#8C8C8C", ":"), ("#009E73", "--"), ("#D55E00", "-."), ("#CC79A7", (0, (5, 1)))),
        strict=True,
    )
)


class Batch(NamedTuple):
    """Tokens (B, T) and what comes next at each position (B, T), `IGNORED` where nobody asks."""

    tokens: Tensor
    targets: Tensor


def arguments(description: str, steps: int) -> argparse.ArgumentParser:
    """Return the options that all examples have."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a run of a few seconds, whose figures mean nothing")
    parser.add_argument("--steps", type=int, default=steps, help="steps of training for each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more help on a machine with nothing else to do")
    parser.add_argument("--out", type=Path, default=Path("build/latte"), help="folder of the picture and the figures")
    return parser


def use_threads(count: int) -> None:
    torch.set_num_threads(count)
    os.environ["LEVATTN_NUM_THREADS"] = str(count)


@contextmanager
def progress(title: str, steps: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on the terminal; give a function that counts a step and says how things are."""
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=steps, note="")
        yield lambda note: bar.update(task, advance=1, note=note)


def loss_of(model: Decoder, batch: Batch, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy in nats of the targets that are asked for."""
    where = batch.targets != IGNORED
    return functional.cross_entropy(model(batch.tokens, where), batch.targets[where], reduction=reduction)


def trained(
    name: str, shape: Shape, batches: Iterable[Batch], *, steps: int, rate: float, seed: int, title: str = ""
) -> tuple[Decoder, float]:
    """Return a decoder after so many steps of AdamW, and the seconds that they took.

    The rate of learning goes up over the first twentieth of the steps, and down to nothing as a cosine.
    """
    torch.manual_seed(seed)
    model = Decoder(name, shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / warm) * (1 + math.cos(math.pi * min(i, steps) / steps)) / 2
    )
    started = time.perf_counter()
    with progress(title or name, steps) as advance:
        for _, batch in zip(range(steps), batches, strict=False):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            advance(f"{loss.item():.3f} nats")
    return model.eval(), time.perf_counter() - started


@torch.no_grad()
def bits_of(model: Decoder, batch: Batch) -> npt.NDArray[np.float64]:
    """Return the bits of each next token, (count, length)."""
    parts = [
        functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        for tokens, targets in zip(batch.tokens.split(32), batch.targets.split(32), strict=True)
    ]
    return torch.cat(parts).double().numpy() / np.log(2)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows whose first entry is a name and whose others are numbers."""
    drawn = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="right" if i else "left")
    for row in rows:
        drawn.add_row(*(f"{entry:.3f}" if isinstance(entry, float) else str(entry) for entry in row))
    Console(width=120).print(drawn)


def axes(xlabel: str, ylabel: str, count: int = 1) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, side by side."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, made = pyplot.subplots(1, count, figsize=(6.4 * count, 4.2), layout="constrained", squeeze=False)
    for ax in made[0]:
        ax.set(xlabel=xlabel, ylabel=ylabel)
        ax.grid(alpha=0.3)
    return figure, list(made[0])


def save(folder: Path, name: str, results: Mapping[str, Any], figure: Any) -> None:
    """Write ``name.json``, ``name.svg`` and ``name.png``."""
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    for kind in ("svg", "png"):
        figure.savefig(folder / f"{name}.{kind}", dpi=150)
    pyplot.close(figure)
    Console().print(f"{folder / name}.json, .svg and .png written", highlight=False)
