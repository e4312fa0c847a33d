"""A language model of bytes, on the sources of Python's standard library, with each mixer in turn.

The text comes with every Python: the ``.py`` files of the standard library's own folder, by name, every tenth of them
for validation. It differs a little between versions of Python, and the figures with it. All models have the same
number of parameters and read the same bytes in the same order. Besides the bits per byte, it is measured what latents
do: how many of them a position reads, how many are in use at all, and how much weight the window has.

    python examples/latte/byte_lm.py [--quick] [--steps 600] [--window 32] [--seed 0] [--threads 1]
        [--out build/latte]
"""

from __future__ import annotations

import platform
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _models import MIXERS, Decoder, Shape, parameters
from _training import STYLES, Batch, arguments, axes, bits_of, save, table, trained, use_threads
from torch import Tensor

from levattn.attention import repeated_mass
from levattn.nn import Macchiato

RATE, BATCH, LENGTH = 3e-3, 16, 256
LONGER = 4  # times the length of training
VALIDATION = 131_072  # bytes of it that are judged
DELTA = 0.1  # latents begin with a tenth of the weight: with random gates macchiato learns text more slowly
EVERY = 10  # one file in so many is for validation

Bytes = npt.NDArray[np.uint8]


def corpus() -> tuple[Bytes, Bytes]:
    """Return the bytes for training, and those for validation."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda path: path.name)
    if len(files) < EVERY:
        raise FileNotFoundError(f"{folder} has {len(files)} .py files; the text are those of the standard library")
    texts = [path.read_bytes() for path in files]
    parts = [text for i, text in enumerate(texts) if i % EVERY], texts[::EVERY]
    return tuple(np.frombuffer(b"".join(part), np.uint8) for part in parts)


def crops(text: Bytes, starts: npt.NDArray[np.int64], length: int) -> Batch:
    """Return pieces of the text, and the byte that follows each of theirs."""
    pieces = torch.from_numpy(text[starts[:, None] + np.arange(length + 1)].astype(np.int64))
    return Batch(pieces[:, :-1], pieces[:, 1:])


def stream(text: Bytes, length: int, rng: np.random.Generator) -> Iterator[Batch]:
    while True:
        yield crops(text, rng.integers(len(text) - length, size=BATCH), length)


@torch.no_grad()
def latents_of(model: Decoder, tokens: Tensor) -> list[dict[str, float]]:
    """Return, for each block that has latents, what they do on average over heads and positions.

    read: exp of the entropy of p(l|t), how many latents a position reads.
    used: exp of the entropy of the mean of p(l|t) over positions, how many are in use.
    window: p(0|t), the weight of the window (of macchiato alone, from position `window` on).
    repeated: weight that positions of the window get a second time (of the mixture alone).
    """
    inputs: dict[int, Tensor] = {}
    hooks = [
        block.mixer.register_forward_pre_hook(partial(_remember, inputs, i)) for i, block in enumerate(model.blocks)
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    found = []
    for i, block in enumerate(model.blocks):
        mixer, x = block.mixer, inputs[i]
        window = isinstance(mixer, Macchiato)
        maps = (mixer.latent_q, mixer.latent_k) if window else (mixer.Wq, mixer.Wk)
        Q, K = (W(x).unflatten(-1, (mixer.heads, -1)).transpose(1, 2).double() for W in maps)
        p = Q.softmax(-1)
        said = {"read": _entropy(p).exp().mean().item(), "used": _entropy(p.mean((0, 2))).exp().mean().item()}
        if window:
            gate, near = mixer.gate(x).transpose(1, 2).double(), mixer.window
            said["window"] = (gate - Q.logsumexp(-1)).sigmoid()[..., near.size :].mean().item()
            if near.overlap == "mixture":
                said["repeated"] = repeated_mass(Q, K, gate, near)[..., near.size :].mean().item()
        found.append(said)
    return found


def _remember(inputs: dict[int, Tensor], i: int, _: Any, given: tuple[Tensor, ...]) -> None:
    inputs[i] = given[0]


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, steps=600)
    parser.add_argument("--window", type=int, default=32)
    options = parser.parse_args(given)
    use_threads(options.threads)
    training, validation = corpus()
    length, judged, steps = LENGTH, VALIDATION, options.steps
    shape = Shape(
        256, dim=96, depth=2, heads=3, latents=32, window=options.window, hidden=192, convolution=3, delta=DELTA
    )
    if options.quick:
        length, judged, steps = 32, 512, 3
        shape = replace(shape, dim=16, depth=2, heads=2, latents=4, window=8, hidden=16)
    far = LONGER * length
    pieces = np.linspace(0, len(validation) - far - 1, judged // far).astype(np.int64)
    long = crops(validation, pieces, far)
    short = Batch(*(part.reshape(-1, length) for part in long))  # the same bytes, each piece by itself
    results, curves = {}, {}
    learning = np.random.SeedSequence(options.seed)
    for name in MIXERS:
        batches = stream(training, length, np.random.default_rng(learning))
        model, seconds = trained(name, shape, batches, steps=steps, rate=RATE, seed=options.seed)
        bits = bits_of(model, long)
        results[name] = {
            "bits per byte": float(bits_of(model, short).mean()),
            f"in pieces of {LONGER}T": float(bits.mean()),
            "parameters": parameters(model),
            "seconds": seconds,
            "latents": latents_of(model, short.tokens[:32]) if name.startswith(("latte", "macchiato")) else [],
        }
        curves[name] = bits.mean(0).reshape(2 * LONGER, -1).mean(-1)

    shown = [key for key in next(iter(results.values())) if key != "latents"]
    table(
        f"{len(training)} bytes, {steps} steps of {BATCH} pieces of T = {length}; window {shape.window}",
        ("mixer", *shown),
        ((name, *(r[key] for key in shown)) for name, r in results.items()),
    )
    said = ("read", "used", "window", "repeated")
    table(
        f"what the {shape.latents} latents of a head do",
        ("mixer and block", *said),
        (
            (f"{name} {i}", *(block.get(key, "") for key in said))
            for name, r in results.items()
            for i, block in enumerate(r["latents"])
        ),
    )

    figure, (ax,) = axes("position in the piece", "bits per byte")
    places = (np.arange(2 * LONGER) + 0.5) * length / 2
    for name, curve in curves.items():
        ax.plot(places, curve, color=STYLES[name][0], linestyle=STYLES[name][1], marker=".", label=name)
    ax.axvline(length, color="#8C8C8C", linewidth=0.8)
    ax.set_title(f"trained on T = {length}")
    ax.legend(fontsize="small")
    save(
        options.out,
        "byte_lm",
        {
            "python": platform.python_version(),
            "bytes": {"training": len(training), "validation": len(validation), "judged": long.targets.numel()},
            "shape": asdict(shape),
            "length": length,
            "steps": steps,
            "seed": options.seed,
            "threads": options.threads,
            "rate": RATE,
            "batch": BATCH,
            "results": results,
            "curves": {name: curve.tolist() for name, curve in curves.items()},
        },
        figure,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
