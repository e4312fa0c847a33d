"""What pruned reading costs and saves on SmolLM2: seconds of one reading and the loss of its text, beside dense.

    python examples/decoders/pruned.py [--lengths 1024 2048 6000] [--rounds 3]

The text is Python's language reference. Seconds are medians of interleaved rounds in one process. The loss is the mean
over all positions, over the dense one. Bars, as a user calls it: never slower than 1.03 times dense; with 512 slots at
2048 tokens 1.25 times as fast, and at 6000 tokens 1.7 times; a loss of at most 1.01 at 25 % of the keys, and of 1.025
at 12 %.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from smollm2 import opened
from tasks import reference

from levattn import RecallWarning
from levattn.integrations.transformers import prune

WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "512 slots": (512, {}),
    "512 slots, not measured": (512, {"measure": False}),
    "25 %": (0.25, {}),
    "12 %": (0.12, {}),
}


def losses(model: Any, tokens: Any, way: str) -> tuple[float, float]:
    """Return the seconds of one reading and the mean loss of its tokens."""
    selection, options = WAYS.get(way, (None, {}))
    with torch.no_grad(), nullcontext() if selection is None else prune(model, selection, **options):
        begin = time.perf_counter()
        hidden = model.model(tokens, use_cache=False).last_hidden_state[0]
        taken = time.perf_counter() - begin
        each = [
            model.lm_head(part).log_softmax(-1).gather(1, after[:, None])
            for part, after in zip(hidden[:-1].split(512), tokens[0, 1:].split(512), strict=True)
        ]
    return taken, -float(torch.cat(each).mean())


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 6000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", RecallWarning)
    model, tokenizer = opened()
    text = reference(tokenizer)
    print(f"\n{torch.get_num_threads()} threads, {model.dtype}")
    print("| tokens | reading | seconds | times as fast | loss / dense |\n| ---: | --- | ---: | ---: | ---: |")
    for length in options.lengths:
        tokens = torch.tensor([text[20_000 : 20_000 + length]])
        rounds = [
            {way: losses(model, tokens, way) for way in ("dense", *options.ways)} for _ in range(options.rounds + 1)
        ]
        found = {way: np.median([each[way] for each in rounds[1:]], axis=0) for way in rounds[0]}  # the first warms up
        for way, (seconds, loss) in found.items():
            dense = found["dense"]
            print(
                f"| {length} | {way} | {seconds:.2f} | {dense[0] / seconds:.2f} | {loss / dense[1]:.3f} |", flush=True
            )


if __name__ == "__main__":
    main()
