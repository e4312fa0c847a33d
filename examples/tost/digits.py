"""Small images of digits, classified by transformers with softmax attention and with token statistics attention.

Scikit-learn's 1797 images of 8 × 8 pixels. A token is a pixel, 64 of them to an image. All transformers have the same
number of parameters and see the same images in the same order. Each seed leaves out another third of the images, so
that three seeds judge each image once. With ``--side 10`` images lie anywhere on a larger canvas, so that a pixel says
nothing before it is known where the others are.

    python examples/tost/digits.py [--quick] [--seeds 3] [--epochs 20] [--rates 0.005 0.015] [--mixers all]
        [--side 8] [--stem 1] [--jobs 2] [--out build/tost]
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _recipe import (
    BATCH,
    EPOCHS,
    Digits,
    accuracy,
    arguments,
    canvases,
    digits,
    optimizer_of,
    pyplot,
    save,
    step,
    table,
    trained,
    use_threads,
)
from _vit import MIXERS, Shape, Transformer, mixer_of, parameters

RATES = (5e-3, 1.5e-2)
MEASURED = 512  # images of the step whose memory is measured
LENGTHS = (64, 256, 1024, 4096)  # tokens of the mixers that are timed

# Of Okabe and Ito; markers and dashes tell the curves apart as well.
STYLES: dict[str, tuple[str, Any, str]] = {
    "softmax": ("#CC79A7", (0, (5, 1)), "s"),
    "leverage keys": ("#D55E00", "-.", "D"),
    "tssa": ("#0072B2", "-", "o"),
    "tssa leverage": ("#009E73", "--", "^"),
}


@dataclass(frozen=True)
class Run:
    """One training: a mixer, and how a transformer with it learns."""

    mixer: str
    shape: Shape
    epochs: int
    rate: float
    seed: int


def learned(run: Run) -> dict[str, Any]:
    """Return what came of a training: accuracy, processor time, and the number of parameters."""
    use_threads(1)
    images, judged = digits(run.seed)
    model, seconds = trained(run.mixer, run.shape, images, epochs=run.epochs, rate=run.rate, seed=run.seed)
    return {
        "accuracy": accuracy(model, judged),
        "of those learned": accuracy(model, images),
        "seconds": seconds,
        "milliseconds for an image": 1e3 * inference(model, judged) / len(judged.labels),
        "parameters": parameters(model),
    }


@torch.no_grad()
def inference(model: Transformer, judged: Digits) -> float:
    """Return the seconds of processor time that all images take, a batch at a time."""
    batches = canvases(judged, model.shape.side).split(BATCH)
    return median_time(lambda: [model(images) for images in batches], 3)


def median_time(work: Callable[[], Any], repeats: int) -> float:
    """Return the median of seconds of processor time, after a call that does not count."""
    times = []
    for _ in range(repeats + 1):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return statistics.median(times[1:])


def memory(mixer: str, shape: Shape, images: int) -> int:
    """Return by how many bytes a step of training makes this process grow, which should be a new one."""
    use_threads(1)
    torch.manual_seed(0)
    model = Transformer(mixer, shape)
    optimizer = optimizer_of(model, RATES[0])
    pixels, labels = torch.randn(images, shape.side, shape.side), torch.zeros(images, dtype=torch.long)
    step(model, optimizer, pixels[:2], labels[:2])  # loads the kernels, and makes the optimizer's moments
    held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    step(model, optimizer, pixels, labels)
    return max(0, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held)


@torch.no_grad()
def layer_times(shape: Shape, lengths: Sequence[int], repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of processor time of mixers alone, with their linear maps, of one sequence each."""
    use_threads(1)
    found = {}
    for name in STYLES:
        torch.manual_seed(0)
        mixer = mixer_of(name, shape)
        inputs = [torch.randn(1, T, shape.dim) for T in lengths]
        found[name] = [1e3 * median_time(partial(mixer, x), repeats) for x in inputs]
    return found


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many; they are 0, 1, ...")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="of learning, each for all mixers")
    parser.add_argument("--mixers", nargs="+", choices=(*MIXERS, "all"), default=["all"])
    parser.add_argument("--side", type=int, default=8, help="pixels of the canvas")
    parser.add_argument("--stem", type=int, default=1, help="side of the square of pixels that a token begins as")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes of one thread each")
    chosen = parser.parse_args(given)
    mixers = MIXERS if "all" in chosen.mixers else tuple(chosen.mixers)
    shape = Shape(side=chosen.side, stem=chosen.stem)
    epochs, seeds, rates, lengths, repeats = chosen.epochs, chosen.seeds, tuple(chosen.rates), LENGTHS, 5
    if chosen.quick:
        shape, epochs, seeds = replace(shape, dim=16, depth=1, hidden=32, stem=3), 4, 1
        rates, lengths, repeats = (3e-2,), LENGTHS[:2], 1
    runs = [(mixer, rate) for mixer in mixers for rate in rates]
    tasks = [Run(mixer, shape, epochs, rate, seed) for mixer, rate in runs for seed in range(seeds)]
    grown: dict[str, int] = {}
    if chosen.quick:
        found = list(map(learned, tasks))
    else:
        found, grown = _in_processes(tasks, chosen.jobs)
    results = {run: _together(found[i * seeds : (i + 1) * seeds]) for i, run in enumerate(runs)}
    best = {mixer: max(rates, key=lambda rate: results[mixer, rate]["accuracy"]) for mixer in mixers}
    times = layer_times(shape, lengths, repeats)
    side = f"on {shape.side} × {shape.side} pixels, tokens of {shape.stem} × {shape.stem}"
    _report(results, best, grown, times, lengths, f"{side}; {epochs} epochs, {seeds} seeds")
    name = "digits" + f"_on_{chosen.side}" * (chosen.side != 8) + f"_stem_{chosen.stem}" * (chosen.stem != 1)
    save(
        chosen.out,
        name,
        {
            "shape": asdict(shape),
            "epochs": epochs,
            "seeds": seeds,
            "batch": BATCH,
            "results": [{"mixer": mixer, "rate": rate} | result for (mixer, rate), result in results.items()],
            "better rate": best,
            "memory": {"images": MEASURED, "bytes": grown},
            "layer": {"lengths": lengths, "milliseconds": times},
        },
        **{name: _drawn({mixer: results[mixer, rate] for mixer, rate in best.items()}, times, lengths)},
    )
    return 0


def _in_processes(tasks: list[Run], jobs: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        found = []
        for run, result in zip(tasks, pool.map(learned, tasks), strict=True):
            found.append(result)
            said = f"{run.mixer}, rate {run.rate:g}, seed {run.seed}: {100 * result['accuracy']:.2f} %"
            print(f"{len(found)} of {len(tasks)}: {said}", file=sys.stderr)
    with ProcessPoolExecutor(jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        mixers = dict.fromkeys(run.mixer for run in tasks)
        grown = list(pool.map(partial(memory, shape=tasks[0].shape, images=MEASURED), mixers))
    return found, dict(zip(mixers, grown, strict=True))


def _together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the seeds have in common: all accuracies, and medians of times."""
    accuracies = [result["accuracy"] for result in found]
    return {
        "accuracies": accuracies,
        "accuracy": statistics.fmean(accuracies),
        "spread": max(accuracies) - min(accuracies),
        "of those learned": statistics.fmean(result["of those learned"] for result in found),
        "seconds": statistics.median(result["seconds"] for result in found),
        "milliseconds for an image": statistics.median(result["milliseconds for an image"] for result in found),
        "parameters": found[0]["parameters"],
    }


def _report(
    results: dict[tuple[str, float], Any],
    best: dict[str, float],
    grown: dict[str, int],
    times: dict[str, list[float]],
    lengths: Sequence[int],
    how: str,
) -> None:
    def percent(numbers: Sequence[float]) -> str:
        return " ".join(f"{100 * number:.2f}" for number in numbers)

    table(
        f"accuracy on images left out, %, at the better rate of each; {how}",
        (
            "mixer",
            "parameters",
            "rate",
            "mean",
            "of each seed",
            "learned",
            "training, s",
            "an image, ms",
            "memory, MB",
        ),
        (
            (
                mixer,
                r["parameters"],
                f"{rate:g}",
                percent([r["accuracy"]]),
                percent(r["accuracies"]),
                percent([r["of those learned"]]),
                f"{r['seconds']:.1f}",
                f"{r['milliseconds for an image']:.2f}",
                f"{grown[mixer] / 1e6:.0f}" if mixer in grown else "",
            )
            for mixer, rate in best.items()
            for r in [results[mixer, rate]]
        ),
    )
    rates = sorted({rate for _, rate in results})
    table(
        "means at all rates of learning, %",
        ("mixer", *(f"{rate:g}" for rate in rates)),
        ((mixer, *(percent([results[mixer, rate]["accuracy"]]) for rate in rates)) for mixer in best),
    )
    table(
        "a mixer alone, forward, one sequence, milliseconds of a processor",
        ("mixer", *(f"{T} tokens" for T in lengths)),
        ((mixer, *(f"{number:.2f}" for number in row)) for mixer, row in times.items()),
    )


def _drawn(results: dict[str, Any], times: dict[str, list[float]], lengths: Sequence[int]) -> Any:
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for i, result in enumerate(results.values()):
        left.plot([100 * a for a in result["accuracies"]], [i] * len(result["accuracies"]), "o", color="#0072B2")
        left.plot(100 * result["accuracy"], i, "|", color="#D55E00", markersize=18, markeredgewidth=2)
    left.set_yticks(range(len(results)), results)
    left.invert_yaxis()
    left.set(xlabel="accuracy, %", title="each seed (dots) and their mean (bars)")
    for name, row in times.items():
        color, dashes, marker = STYLES[name]
        right.plot(lengths, row, color=color, linestyle=dashes, marker=marker, label=name)
    right.set(xscale="log", yscale="log", xlabel="tokens", title="a mixer alone, forward, ms of a processor")
    right.set_xticks(lengths, map(str, lengths))
    right.minorticks_off()
    right.legend(fontsize="small")
    for ax in (left, right):
        ax.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    sys.exit(main())
