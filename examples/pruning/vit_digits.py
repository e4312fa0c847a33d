"""Small images of digits, classified by transformers that attend to a few keys: in training, or at inference alone.

The shape of Table 1 of the LevAttention paper (arXiv:2410.05462), on scikit-learn's 1797 images of 8 × 8 pixels, a
token for each pixel. One transformer has softmax attention over all 64 keys. Others are trained with attention to 8 of
them (12 %) in each head, all alike but for what these are chosen by; the first 15 % of their steps have all keys (the
warm start). And the softmax transformer is pruned the same ways at inference alone. All have the same parameters, the
same first weights, and see the same images in the same order; each of three seeds is judged on another third of the
images.

    python examples/pruning/vit_digits.py [--quick] [--seeds 3] [--epochs 20] [--slots 8] [--side 8] [--jobs 1]
        [--out build/pruning]
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tost"))

from _recipe import (
    BATCH,
    EPOCHS,
    accuracy,
    arguments,
    digits,
    learning_rates,
    optimizer_of,
    placed,
    pyplot,
    save,
    step,
    table,
    use_threads,
)
from _vit import Shape, Softmax, Transformer, parameters

from levattn.attention import Selection
from levattn.nn import LevAttention, set_dense

RATE = 5e-3
WARM = 0.15  # share of the steps that have all keys


def row_norm(K: Tensor, _: Tensor) -> Tensor:
    return K.norm(dim=-1)


def chance(K: Tensor, _: Tensor) -> Tensor:
    return torch.rand(K.shape[:-1], dtype=K.dtype)


def ways_of(slots: int) -> dict[str, Selection]:
    """Return how keys are chosen, so many slots a query, by names."""
    half = slots // 2
    return {
        "leverage": Selection(size=slots, scores="leverage"),
        "leverage, half of the slots summaries": Selection(size=slots - half, summaries=half, scores="leverage"),
        "residual, half of the slots summaries": Selection(size=slots - half, summaries=half),
        "row norm": Selection(size=slots, scores=row_norm),
        "random": Selection(size=slots, scores=chance),
    }


def with_layers(model: Transformer, selection: Selection) -> Transformer:
    """Return the transformer with pruned layers in the place of softmax attention, of the same weights."""
    for block in model.blocks:
        old: Softmax = block.mixer
        layer = LevAttention(model.shape.dim, selection, heads=old.heads, bias=False)
        layer.qkv.weight, layer.proj.weight, layer.proj.bias = old.project.weight, old.out.weight, old.out.bias
        block.mixer = layer
    return model


@dataclass(frozen=True)
class Run:
    """One training: of softmax attention if there is no selection, which is then pruned in all ways."""

    selection: Selection | None
    slots: int
    shape: Shape
    epochs: int
    seed: int


def learned(run: Run) -> dict[str, Any]:
    """Return the accuracies that came of a training, by how the model attends when it is judged, and its time."""
    use_threads(1)
    images, judged = digits(run.seed)
    torch.manual_seed(run.seed)
    model = Transformer("softmax", run.shape)
    if run.selection is not None:
        with torch.random.fork_rng(devices=[]):
            with_layers(model, run.selection)
    optimizer = optimizer_of(model, RATE)
    each = len(images.labels) // BATCH
    steps = run.epochs * each
    schedule = learning_rates(optimizer, steps)
    orders = torch.Generator().manual_seed(run.seed)
    started, done = time.process_time(), 0
    for _ in range(run.epochs):
        for batch in torch.randperm(len(images.labels), generator=orders)[: each * BATCH].split(BATCH):
            if run.selection is not None:
                set_dense(model, done < WARM * steps)
            pixels = placed(images.images[batch], run.shape.side, orders)
            step(model, optimizer, pixels, images.labels[batch])
            schedule.step()
            done += 1
    seconds = time.process_time() - started
    model.eval()
    found = {"as trained": accuracy(model, judged)}
    if run.selection is None:
        for name, selection in ways_of(run.slots).items():
            found[name] = accuracy(with_other_layers(model, selection), judged)
    return {"accuracy": found, "seconds": seconds, "parameters": parameters(model)}


def with_other_layers(model: Transformer, selection: Selection) -> Transformer:
    """Return a copy of a softmax transformer that is pruned."""
    other = Transformer("softmax", model.shape)
    other.load_state_dict(model.state_dict())
    return with_layers(other, selection).eval()


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, Path("build/pruning"))
    parser.add_argument("--seeds", type=int, default=3, help="how many; they are 0, 1, ...")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--slots", type=int, default=8, help="keys and summaries that a query reads")
    parser.add_argument("--side", type=int, default=8, help="pixels of the canvas")
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    chosen = parser.parse_args(given)
    shape, epochs, seeds = Shape(side=chosen.side), chosen.epochs, chosen.seeds
    if chosen.quick:
        shape, epochs, seeds = replace(shape, dim=16, depth=1, hidden=32, stem=3), 2, 1
    ways = ways_of(chosen.slots)
    trainings: dict[str, Selection | None] = {"softmax": None, **ways}
    runs = [
        Run(selection, chosen.slots, shape, epochs, seed) for selection in trainings.values() for seed in range(seeds)
    ]
    if chosen.jobs > 1:
        with ProcessPoolExecutor(chosen.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(learned, runs))
    else:
        found = list(map(learned, runs))
    by_training = {name: found[i * seeds : (i + 1) * seeds] for i, name in enumerate(trainings)}
    softmax = by_training.pop("softmax")
    results = {
        "softmax": [result["accuracy"]["as trained"] for result in softmax],
        "trained with": {
            name: [result["accuracy"]["as trained"] for result in seeds_of] for name, seeds_of in by_training.items()
        },
        "at inference alone": {name: [result["accuracy"][name] for result in softmax] for name in ways},
    }
    seconds = {
        name: statistics.median(result["seconds"] for result in seeds_of)
        for name, seeds_of in {"softmax": softmax, **by_training}.items()
    }
    _report(results, seconds, f"{chosen.slots} of {shape.side**2} slots; {epochs} epochs, {seeds} seeds")
    save(
        chosen.out,
        "vit_digits",
        {
            "slots": chosen.slots,
            "keys": shape.side**2,
            "epochs": epochs,
            "seeds": seeds,
            "parameters": sorted({result["parameters"] for result in found}),
            "seconds": seconds,
            **results,
        },
        vit_digits=_drawn(results),
    )
    return 0


def _report(results: dict[str, Any], seconds: dict[str, float], how: str) -> None:
    def percent(numbers: Sequence[float]) -> tuple[str, str]:
        return f"{100 * statistics.fmean(numbers):.2f}", " ".join(f"{100 * number:.2f}" for number in numbers)

    nothing = ("", "")
    table(
        f"accuracy on images left out, %; {how}",
        ("keys chosen by", "trained with", "of each seed", "at inference alone", "of each seed", "training, s"),
        [
            ("all keys (softmax)", *percent(results["softmax"]), *nothing, f"{seconds['softmax']:.1f}"),
            *(
                (
                    name,
                    *percent(results["trained with"][name]),
                    *percent(results["at inference alone"][name]),
                    f"{seconds[name]:.1f}",
                )
                for name in results["trained with"]
            ),
        ],
    )


def _drawn(results: dict[str, Any]) -> Any:
    names = list(results["trained with"])
    figure, ax = pyplot().subplots(figsize=(8, 3.6), layout="constrained")
    for kind, color, offset in (("trained with", "#0072B2", -0.18), ("at inference alone", "#D55E00", 0.18)):
        heights = [100 * statistics.fmean(results[kind][name]) for name in names]
        ax.barh([i + offset for i in range(len(names))], heights, 0.34, color=color, label=kind)
        for i, name in enumerate(names):
            ax.plot(
                [100 * a for a in results[kind][name]], [i + offset] * len(results[kind][name]), "k.", markersize=4
            )
    ax.axvline(100 * statistics.fmean(results["softmax"]), color="k", linestyle="--", label="softmax over all keys")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set(xlabel="accuracy, %", xlim=(0, 100))
    ax.legend(loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=3, fontsize="small", frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
