"""Longer sequences than those of training: bits per token by position, up to four times as far.

Each sequence is a Markov chain whose transition probabilities are its own, drawn from a Dirichlet distribution, so
that the further a reader is the better it can know them. The best that any reader can do is known: counts of the
transitions so far, plus the prior (Laplace's rule). Models train on T positions and are judged on T, 2T and 4T.

    python examples/latte/extrapolation.py [--quick] [--steps 500] [--seed 0] [--threads 1] [--out build/latte]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from _models import MIXERS, Shape, parameters
from _training import STYLES, Batch, arguments, axes, bits_of, save, table, trained, use_threads

RATE, BATCH, HELD_OUT = 4e-3, 32, 128
LONGER = 4  # times the length of training


@dataclass(frozen=True)
class Chains:
    """Markov chains of so many symbols, each with its own transitions.

    concentration: of the symmetric Dirichlet distribution that each row of transition probabilities is drawn from.
    """

    symbols: int = 16
    concentration: float = 0.2
    length: int = 128

    def sample(self, count: int, length: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return so many chains with so many positions."""
        rows = rng.dirichlet(np.full(self.symbols, self.concentration), (count, self.symbols))
        below = rows.cumsum(-1)
        chains = np.empty((count, length), np.int64)
        chains[:, 0] = rng.integers(self.symbols, size=count)
        drawn, items = rng.random((count, length)), np.arange(count)
        for t in range(1, length):
            reached = below[items, chains[:, t - 1]] < drawn[:, t, None]
            chains[:, t] = np.minimum(reached.sum(-1), self.symbols - 1)  # rows may sum to a little less than 1
        return chains

    def best(self, chains: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the bits of each next symbol for a reader who knows the prior, (count, length − 1)."""
        count, length = chains.shape
        seen, items = np.full((count, self.symbols, self.symbols), self.concentration), np.arange(count)
        bits = np.empty((count, length - 1))
        for t in range(1, length):
            row = seen[items, chains[:, t - 1]]
            bits[:, t - 1] = np.log2(row.sum(-1) / row[items, chains[:, t]])
            seen[items, chains[:, t - 1], chains[:, t]] += 1
        return bits


def next_of(chains: npt.NDArray[np.int64]) -> Batch:
    tokens = torch.from_numpy(chains)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def stream(chains: Chains, rng: np.random.Generator) -> Iterator[Batch]:
    while True:
        yield next_of(chains.sample(BATCH, chains.length + 1, rng))


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, steps=500)
    options = parser.parse_args(given)
    use_threads(options.threads)
    chains, steps, count = Chains(), options.steps, HELD_OUT
    shape = Shape(chains.symbols, dim=64, depth=2, heads=2, latents=16, window=16, hidden=128, convolution=3)
    if options.quick:
        chains, steps, count = Chains(symbols=4, length=16), 3, 4
        shape = replace(shape, vocabulary=4, dim=16, latents=4, window=4, hidden=16)
    T = chains.length
    learning, judging = np.random.SeedSequence(options.seed).spawn(2)
    long = chains.sample(count, LONGER * T + 1, np.random.default_rng(judging))
    bits = {"best possible": chains.best(long)}
    made = {}
    for name in MIXERS:
        batches = stream(chains, np.random.default_rng(learning))
        model, seconds = trained(name, shape, batches, steps=steps, rate=RATE, seed=options.seed)
        bits[name] = bits_of(model, next_of(long))
        made[name] = {"parameters": parameters(model), "seconds": seconds}

    spans = {"T/2 to T": (T // 2, T), "T to 2T": (T, 2 * T), "2T to 4T": (2 * T, 4 * T)}
    rows = {name: {span: float(b[:, slice(*ends)].mean()) for span, ends in spans.items()} for name, b in bits.items()}
    table(
        f"bits per token by position; trained on T = {T}, window {shape.window}, {shape.latents} latents a head",
        ("mixer", *spans, "parameters", "seconds"),
        (
            (name, *row.values(), *made.get(name, {"parameters": "", "seconds": ""}).values())
            for name, row in rows.items()
        ),
    )

    (figure, (ax,)) = axes("position", "bits per token")
    width = max(1, T // 8)
    places = np.arange(LONGER * T).reshape(-1, width).mean(-1)
    for name, b in bits.items():
        color, dashes = STYLES.get(name, ("#000000", "-"))
        ax.plot(places, b.mean(0).reshape(-1, width).mean(-1), color=color, linestyle=dashes, label=name)
    ax.axvline(T, color="#8C8C8C", linewidth=0.8)
    ax.text(T, ax.get_ylim()[1], " end of training", va="top", size="small")
    ax.set_xscale("log", base=2)
    ax.legend(fontsize="small")
    results = {
        "chains": asdict(chains),
        "shape": asdict(shape),
        "steps": steps,
        "seed": options.seed,
        "threads": options.threads,
        "rate": RATE,
        "batch": BATCH,
        "bits per token": rows,
        "models": made,
        "curves": {name: b.mean(0).reshape(-1, width).mean(-1).tolist() for name, b in bits.items()},
    }
    save(options.out, "extrapolation", results, figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
