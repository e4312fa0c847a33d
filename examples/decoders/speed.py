"""What compression costs and saves on SmolLM2: time of reading, of a step, and memory, beside dense and earlier forms.

    python examples/decoders/speed.py [--reading 4096] [--decoding 8192] [--budget 0.25] [--rounds 5]

Times are medians of interleaved rounds in one process. Memory is by how much a process shrinks when it lets go of a
cache, and by how much it had grown at most while it read, each in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from smollm2 import CACHE, PROFILE, dense, opened
from tasks import contexts

from levattn.integrations.transformers import HeadProfile, compress

WAYS: dict[str, dict[str, Any]] = {
    "compressed": {},
    "16 bits": {"bits": 16},
    "no fit": {"bits": 16, "references": "none"},
}
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


def read(model: Any, tokens: Any, which: str, budget: float, profile: HeadProfile) -> Any:
    """Return a cache that was made in one of the ways."""
    if which == "dense":
        return dense(model, tokens)
    return compress(model, tokens, budget, heads=profile, **WAYS[which])


def memory(which: str, length: int, budget: float) -> None:
    """Print by how much this process shrinks once a cache is let go, and the most that it held."""
    model, tokens, profile = given(length)
    compress(model, tokens[:, :512], budget, heads=profile)
    begin = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is forgotten
    cache = read(model, tokens, which, budget, profile)
    status = Path("/proc/self/status").read_text().split()
    most, before = 1024 * int(status[status.index("VmHWM:") + 1]) - begin, resident()
    del cache
    print(before - resident(), most)


def given(length: int) -> tuple[Any, Any, HeadProfile]:
    """Return the model, a context and the profile."""
    model, tokenizer = opened()
    return model, torch.tensor([contexts(tokenizer, length, 0)[0].tokens]), HeadProfile.find(PROFILE)


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reading", type=int, default=4096)
    parser.add_argument("--decoding", type=int, default=8192)
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--also", type=float, nargs="*", default=[], help="further budgets, of reading alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", choices=("dense", *WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    if options.memory:
        memory(options.memory, options.decoding, options.budget)
        return
    model, tokens, profile = given(options.decoding)
    part = tokens[:, : options.reading]
    compress(model, part[:, :512], options.budget, heads=profile)
    names = "dense", *WAYS
    reading = {which: partial(read, model, part, which, options.budget, profile) for which in names}
    for budget in options.also:
        reading[f"compressed to {budget:.0%}"] = partial(read, model, part, "compressed", budget, profile)
    found = medians(reading, options.rounds)
    print(f"\nReading {options.reading} tokens, {torch.get_num_threads()} threads, {options.budget:.0%} of the bytes:")
    for which, seconds_of in found.items():
        print(f"  {which}: {seconds_of:.2f} s, {seconds_of / found['dense']:.2f} times dense")
    caches = {which: read(model, tokens, which, options.budget, profile) for which in names}
    found = medians({name: step(model, cache, options.decoding) for name, cache in caches.items()}, 2 * options.rounds)
    print(f"A step after {options.decoding} tokens:")
    for which in names:
        print(f"  {which}: {1e3 * found[which] / STEPS:.1f} ms, {found['dense'] / found[which]:.2f} times as fast")
    print("Memory of the process that the cache takes, and that reading took at most:")
    for which in names:
        command = [sys.executable, __file__, "--memory", which, "--decoding", str(options.decoding)]
        told = subprocess.check_output([*command, "--budget", str(options.budget)], stderr=subprocess.DEVNULL)
        held, most = (int(number) / 2**20 for number in told.split()[-2:])
        print(f"  {which}: {held:.1f} MiB, {most:.1f} MiB")


if __name__ == "__main__":
    main()
