"""A small causal language model over pruned attention: perplexity of text, and needles found again, by budget.

A decoder of Llama's kind (3 layers of 4 heads, 2 of keys, rotary positions) learns the sources of Python's standard
library, byte by byte, and to find needles in them: lines ``key 4821 = 7730``, whose value is asked for at the end of
the context. Then each query attends to a fixed number of slots instead of all earlier positions, in all layers, and
nothing is trained again. A budget is a share of the context. The first positions, twice as many as slots, read all
keys before them. So the last table tells what budgets are of the keys that dense attention reads on average.

Methods: levattn's default and its other scores; two scores that know less of keys, with the same summaries and window;
and what is left without some of the parts, whose slots the others take. A window is what all have.

Bar: perplexity within 3 % of dense at 25 %.

    pip install -e '.[transformers,cli]'
    python examples/pruning/causal.py [--quick] [--budgets 6 12 25] [--seed 0] [--threads 1] [--json]
        [--again] [--out build/pruning]

Training takes some minutes; its weights are kept in ``--out`` and read again, unless ``--again`` is given.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from _text_model import Phase, Recipe, corpus, model_for, nats_of, needles, pieces, recall_of
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from levattn.attention import Selection, Slots

BUDGETS = (6.0, 12.0, 25.0)  # per cent of the context; half of it is dense attention
BAR, BAR_AT = 1.03, 25.0
PHASES = (
    Phase(48, 120, 1.0),  # copying is learned from hardly anything but needles, at the start
    Phase(96, 120, 0.7),
    Phase(256, 200, 0.5),
    Phase(512, 240, 0.5),
)
QUICK = Recipe(
    width=32, depth=2, heads=2, kv_heads=1, hidden=64, phases=(Phase(36, 6, 1.0), Phase(96, 4, 0.5)), batch=288
)

Scores: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Method: TypeAlias = Callable[[Slots], Selection]  # how slots are used


def row_norm(K: Tensor, _: Tensor) -> Tensor:
    return K.norm(dim=-1)


def chance(K: Tensor, _: Tensor) -> Tensor:
    """Return numbers that have nothing to do with attention, the same for a key at each selection."""
    return torch.frac(1e6 * torch.sin(1e3 * K.sum(-1)))


def parts(slots: Slots, scores: str | Scores = "residual") -> Selection:
    """Return the selection that asks for these slots."""
    named = asdict(slots)
    return Selection(size=named.pop("selected"), renew_every=named.pop("chunk"), **named, scores=scores, start=0)


def kept_alone(slots: Slots, scores: str | Scores = "residual") -> Selection:
    """Return the selection without summaries: more keys are selected, all others dropped."""
    return parts(replace(slots, selected=slots.selected + slots.summaries, summaries=0), scores)


def summaries_alone(slots: Slots) -> Selection:
    return parts(replace(slots, selected=0, summaries=slots.selected + slots.summaries))


def window_alone(slots: Slots, sinks: int = 0) -> Selection:
    return parts(Slots(0, 0, slots.total - slots.chunk - sinks, sinks, slots.chunk))


DEFAULT = "levattn"
METHODS: Mapping[str, Method] = {
    DEFAULT: parts,
    "levattn, expected attention": partial(parts, scores="expected"),
    "levattn, leverage": partial(parts, scores="leverage"),
    "row norm": partial(parts, scores=row_norm),
    "random keys": partial(parts, scores=chance),
    "summaries only": summaries_alone,
    "levattn, no summaries": kept_alone,
    "expected attention, no summaries": partial(kept_alone, scores="expected"),
    "leverage, no summaries": partial(kept_alone, scores="leverage"),
    "row norm, no summaries": partial(kept_alone, scores=row_norm),
    "random keys, no summaries": partial(kept_alone, scores=chance),
    "window only": window_alone,
    "window and 4 sinks": partial(window_alone, sinks=4),
}


def slots_read(slots: Slots, n: int) -> float:
    """Return how many slots a query has at most, the mean over n positions."""
    total = 0
    for place in range(n):
        recent = place + 1  # up to the query itself
        if place >= 2 * slots.total:  # from the first selection on
            recent = min(recent, slots.window + (place - 2 * slots.total) % slots.chunk + 1)
        total += recent + min(place + 1 - recent, slots.selected + slots.sinks + slots.summaries)
    return total / n


def pruned(model: Any, selection: Selection) -> AbstractContextManager[Any]:
    """Return the context within which a decoder reads a selection of the keys."""
    from levattn.integrations.transformers import prune

    layers = range(model.config.num_hidden_layers)  # named, as nothing is to be recalled
    return prune(model, selection, layers=layers, measure=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    drawn = Table()
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="right" if i else "left")
    for row in rows:
        drawn.add_row(*row)
    console = Console(width=120, highlight=False)
    console.print(f"[bold]{title}[/bold]")
    console.print(drawn)


def show(results: dict[str, Any]) -> None:
    """Print the tables and the bar."""
    dense, runs, shares = results["dense"], results["runs"], results["slots"]
    heads = [f"{percent} %" for percent in shares]
    methods = list(dict.fromkeys(run["method"] for run in runs))

    def rows(cell: Callable[[dict[str, Any]], str]) -> list[list[str]]:
        return [[method, *(cell(run) for run in runs if run["method"] == method)] for method in methods]

    table(
        f"Perplexity over that of dense attention: {dense['perplexity']:.3f}, {dense['bits per byte']:.3f} bits",
        ("method", *heads),
        rows(lambda run: f"{run['perplexity'] / dense['perplexity']:.4f}"),
    )
    table(
        f"Needles found ({dense['needles found']:.3f} by dense attention)",
        ("method", *heads),
        rows(lambda run: f"{run['needles found']:.3f}"),
    )
    table(
        f"Slots of a query, {results['context']} positions; dense attention reads {results['dense keys']:.1f} keys",
        ("", *heads),
        (
            ["at most", *(str(share["most"]) for share in shares.values())],
            ["mean", *(f"{share['mean']:.1f}" for share in shares.values())],
            ["mean, of dense", *(f"{share['mean'] / results['dense keys']:.3f}" for share in shares.values())],
        ),
    )
    for bar, kept in results["bars"].items():
        print(f"{bar}: {'kept' if kept else 'missed'}")


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a run of a few seconds, whose figures mean nothing")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS, help="per cent of the context")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="some methods by name")
    parser.add_argument("--pieces", type=int, default=16, help="pieces of text; half as many as rows with needles")
    parser.add_argument("--lines", type=int, default=1, help="needles in a row, of which one is asked for")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more help on a machine with nothing else to do")
    parser.add_argument("--again", action="store_true", help="train although there are weights")
    parser.add_argument("--json", action="store_true", help="print figures for machines")
    parser.add_argument("--out", type=Path, default=Path("build/pruning"), help="folder of the weights")
    options = parser.parse_args(given)
    unknown = set(options.methods) - set(METHODS)
    if unknown:
        raise SystemExit(f"--methods is {', '.join(unknown)}; expected some of: {', '.join(METHODS)}")
    torch.set_num_threads(options.threads)
    os.environ["LEVATTN_NUM_THREADS"] = str(options.threads)
    recipe = replace(QUICK if options.quick else Recipe(phases=PHASES), seed=options.seed)
    training, validation = corpus()
    file = options.out / f"causal{'_quick' if options.quick else ''}.safetensors"
    model = model_for(recipe, training, file, again=options.again)

    length, count = recipe.context, 4 if options.quick else options.pieces
    text = pieces(validation, count, length)
    rows = needles(validation, 2 * count, length, options.seed, options.lines)

    def measured(of: Any) -> dict[str, float]:
        nats = nats_of(of, text)
        return {
            "perplexity": math.exp(nats),
            "bits per byte": nats / math.log(2),
            "needles found": recall_of(of, rows),
        }

    dense = measured(model)
    splits = {percent: Selection(percent / 100).slots(length, causal=True) for percent in options.budgets}
    tasks = [(name, percent) for name in options.methods for percent in options.budgets]
    bar = track(tasks, "methods and budgets", console=Console(stderr=True), transient=True, disable=options.json)
    runs = []
    for name, percent in bar:
        with pruned(model, METHODS[name](splits[percent])):
            runs.append({"method": name, "percent": percent, **measured(model)})
    bars = {
        f"perplexity of {run['perplexity'] / dense['perplexity']:.4f} <= {BAR} times dense at {BAR_AT:g} %": run[
            "perplexity"
        ]
        <= BAR * dense["perplexity"]
        for run in runs
        if run["method"] == DEFAULT and run["percent"] == BAR_AT
    }
    results = {
        "python": platform.python_version(),
        "recipe": asdict(recipe),
        "parameters": sum(p.numel() for p in model.parameters()),
        "context": length,
        "judged": {"bytes": text[:, 1:].numel(), "needles": len(rows), "lines": options.lines},
        "dense keys": (length + 1) / 2,
        "slots": {
            f"{percent:g}": {"most": slots.total, "mean": slots_read(slots, length), "split": asdict(slots)}
            for percent, slots in splits.items()
        },
        "dense": dense,
        "runs": runs,
        "bars": bars,
    }
    if options.json:
        print(json.dumps(results, indent=1, ensure_ascii=False))
    else:
        show(results)
    return 0 if all(bars.values()) or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
