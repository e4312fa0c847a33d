"""One pass over keys on a CUDA device in chunks, against `universal_set` of all of them at once.

Bar: a stream takes in keys at 0.7 of the speed at least, in chunks of 2²⁰ rows. Other chunks are told beside it, and
what the same chunks take when they are copied to main memory first.

    python examples/benchmarks/gpu_streaming.py [--rows 16777216] [--columns 64] [--rounds 7]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from _gpu import cupy_or_exit, device_name, interleaved_on_device, normal_keys
from _rivals import table, verdict

import levattn

EPSILON = 0.05
CHUNKS = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
BAR_CHUNK = 1 << 20


def one_pass(K: Any, rows: int, *, to_main_memory: bool = False) -> Any:
    stream = levattn.StreamingUniversalSet(EPSILON)
    for start in range(0, len(K), rows):
        part = K[start : start + rows]
        stream.update(part.get() if to_main_memory else part)
    return stream.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1 << 24)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    cp = cupy_or_exit()
    print(device_name(cp))
    for dtype in ("float32", "float16"):
        K = normal_keys(cp, options.rows, options.columns, dtype)
        routes: dict[str, Callable[[], object]] = {"at once": partial(levattn.universal_set, K, EPSILON)}
        routes |= {f"chunks of {rows}": partial(one_pass, K, rows) for rows in CHUNKS}
        routes["through main memory"] = partial(one_pass, K, BAR_CHUNK, to_main_memory=True)
        times = interleaved_on_device(cp, routes, options.rounds)
        print(f"\n{options.rows} keys, d = {options.columns}, {dtype}")
        table(
            ["route", "ms", "speed / at once"],
            [[name, f"{1e3 * s:.2f}", f"{times['at once'] / s:.2f}"] for name, s in times.items()],
        )
        print(f"chunks of {BAR_CHUNK}:", verdict(times["at once"] / times[f"chunks of {BAR_CHUNK}"], 0.7))
        found = one_pass(K, BAR_CHUNK).items[0].indices.tolist()
        same = found == levattn.universal_set(K, EPSILON).indices.tolist()
        print(f"{len(found)} keys in the set,", "the same" if same else "NOT THE SAME")


if __name__ == "__main__":
    main()
