"""What an answer gains from a compressed cache by the length of the context: bytes, and the time of a token.

    python examples/decoders/lengths.py [--lengths 1024 4096 16384 65536] [--budget 0.12] [--rounds 5]

Neither depends on what the context says. So the dense cache of n positions has random keys and values, and the
compressed one has the slots that fit into the bytes, of the first tokens of a text of random words. Times are medians
of interleaved rounds in one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch
from smollm2 import opened
from speed import STEPS, medians, step
from transformers import DynamicCache

from levattn.integrations.transformers import compress

BITS = 8


def random_cache(model: Any, length: int) -> Any:
    """Return a dense cache of some positions with random keys and values."""
    config, cache = model.config, DynamicCache()
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn(2, 1, heads, length, width, dtype=model.dtype), layer)
    return cache


def whole_bytes(model: Any, length: int) -> int:
    """Return the bytes of a dense cache of 16 bits."""
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * width * length


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--budget", type=float, default=0.12, help="share of the bytes of a dense cache of 16 bits")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    model, _ = opened()
    tokens = torch.randint(100, 40_000, (1, max(options.lengths)), generator=torch.Generator().manual_seed(0))
    print(f"\n{torch.get_num_threads()} threads, {model.dtype}, {options.budget:.0%} of the bytes in {BITS} bits")
    print("| tokens | dense, 16 bits | compressed | a token, dense | compressed | times as fast |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for length in options.lengths:
        slots = int(options.budget * length * 16 / BITS)
        read = slots * 11 // 10  # a context that has as many to choose from, and little more, as reading takes long
        cache = compress(model, tokens[:, :read], slots / read * BITS / 16, bits=BITS, references="none")
        held = cache.nbytes
        caches = {"dense": random_cache(model, length), "compressed": cache}
        starts = {"dense": length, "compressed": read}
        calls: dict[str, Callable[[], Any]] = {name: step(model, each, starts[name]) for name, each in caches.items()}
        medians(calls, 1)
        found = medians(calls, options.rounds)
        dense, short = (1e3 * found[name] / STEPS for name in caches)
        sizes = f"{whole_bytes(model, length) / 2**20:.0f} MiB | {held / 2**20:.1f} MiB"
        print(f"| {length} | {sizes} | {dense:.0f} ms | {short:.0f} ms | {dense / short:.2f} |", flush=True)


if __name__ == "__main__":
    main()
