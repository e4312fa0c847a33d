"""What compression costs and saves on SmolLM2: time of reading, time of a step, and memory, beside a dense cache.

    python examples/decoders/speed.py [--reading 4096] [--decoding 8192] [--budget 0.25] [--rounds 5]

Times are medians of interleaved rounds in one process. Memory is by how much a process shrinks when it lets go of a
cache, each in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from smollm2 import CACHE, PROFILE, dense, opened
from tasks import contexts

from levattn.integrations.transformers import HeadProfile, compress

STEPS = 20  # that are timed at once


def seconds(call: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median time of each call, one after the other in each round."""
    times = [{name: seconds(call) for name, call in calls.items()} for _ in range(rounds)]
    return {name: float(np.median([time[name] for time in times])) for name in calls}


def step(model: Any, cache: Any, length: int) -> Callable[[], None]:
    """Return a call that decodes some tokens after a context; it leaves the cache longer."""
    place = iter(range(length, 1 << 30))

    def call() -> None:
        for _ in range(STEPS):
            model(torch.tensor([[7]]), position_ids=torch.tensor([[next(place)]]), **{CACHE: cache})

    return call


def resident() -> int:
    """Return the bytes of this process in memory, without what the allocator could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def memory(which: str, length: int, budget: float) -> None:
    """Print by how much this process shrinks once a cache is let go."""
    model, tokens, profile = given(length)
    cache = dense(model, tokens) if which == "dense" else compress(model, tokens, budget, heads=profile)
    before = resident()
    del cache
    print(before - resident())


def given(length: int) -> tuple[Any, Any, HeadProfile]:
    """Return the model, a context and the profile."""
    model, tokenizer = opened()
    return model, torch.tensor([contexts(tokenizer, length, 0)[0].tokens]), HeadProfile.load(PROFILE)


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reading", type=int, default=4096)
    parser.add_argument("--decoding", type=int, default=8192)
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", choices=("dense", "compressed"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    if options.memory:
        memory(options.memory, options.decoding, options.budget)
        return
    model, tokens, profile = given(options.decoding)
    part = tokens[:, : options.reading]
    compress(model, part[:, :512], options.budget, heads=profile)
    reading = {
        "dense": lambda: dense(model, part),
        "compressed": lambda: compress(model, part, options.budget, heads=profile),
    }
    found = medians(reading, options.rounds)
    print(
        f"reading {options.reading} tokens, {torch.get_num_threads()} threads: dense {found['dense']:.2f} s, with "
        f"compression {found['compressed']:.2f} s, {found['compressed'] / found['dense']:.3f} times"
    )
    caches = {
        "dense": dense(model, tokens),
        "compressed": compress(model, tokens, options.budget, heads=profile),
    }
    found = medians({name: step(model, cache, options.decoding) for name, cache in caches.items()}, 2 * options.rounds)
    print(
        f"a step after {options.decoding} tokens: dense {1e3 * found['dense'] / STEPS:.1f} ms, compressed "
        f"{1e3 * found['compressed'] / STEPS:.1f} ms, {found['dense'] / found['compressed']:.2f} times as fast"
    )
    grown = {}
    for which in caches:
        command = [sys.executable, __file__, "--memory", which, "--decoding", str(options.decoding)]
        grown[which] = int(subprocess.check_output([*command, "--budget", str(options.budget)]).split()[-1])
    print(
        f"memory of the process: dense {grown['dense'] / 2**20:.1f} MiB, compressed "
        f"{grown['compressed'] / 2**20:.1f} MiB, {grown['compressed'] / grown['dense']:.1%}"
    )


if __name__ == "__main__":
    main()
