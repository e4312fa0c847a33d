"""One pass over keys on a CUDA device in chunks, against `universal_set` of all of them at once.

Bar: a stream takes in keys at 0.7 of the speed at least, in chunks of 2²⁰ rows. Other chunks are told beside it, and
what the same chunks take when they are copied to main memory first.

    python examples/benchmarks/gpu_streaming.py [--rows 16777216] [--columns 64] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

from functools import partial
from typing import Any

from _gpu import Bench, Calls

import levattn

EPSILON = 0.05
CHUNKS = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
BAR_CHUNK, BAR = 1 << 20, 0.7
AT_ONCE = "at once"
HEAVY = 16  # keys so long that they are in the set, which would else be empty


def one_pass(K: Any, rows: int, *, to_main_memory: bool = False) -> Any:
    stream = levattn.StreamingUniversalSet(EPSILON)
    for start in range(0, len(K), rows):
        part = K[start : start + rows]
        stream.update(part.cpu() if to_main_memory else part)
    return stream.result()


def main() -> None:
    bench = Bench(__file__, __doc__, rounds=7, rows=1 << 24, columns=64)
    n, d, chunk = bench.sized(bench.options.rows), bench.options.columns, bench.sized(BAR_CHUNK)
    for dtype in ("float32", "float16"):
        for kind, K in bench.keys(n, d, dtype):
            K[:: n // HEAVY] *= (n / d) ** 0.5
            case = f"{n} keys, d = {d}, {dtype}, {kind}"
            calls: Calls = {AT_ONCE: partial(levattn.universal_set, K, EPSILON)}
            calls |= {f"chunks of {rows}": partial(one_pass, K, rows) for rows in map(bench.sized, CHUNKS)}
            calls["through main memory"] = partial(one_pass, K, chunk, to_main_memory=True)
            times = bench.times(case, calls, AT_ONCE)
            bench.bar(f"{case}, speed of a stream", times[AT_ONCE] / times[f"chunks of {chunk}"], BAR)
            if not times:
                continue
            found = one_pass(K, chunk).items[0].indices.tolist()
            same = found == levattn.universal_set(K, EPSILON).indices.tolist()
            bench.note(f"{case}, the set", f"{len(found)} keys, {'the same' if same else 'NOT THE SAME'} at once")


if __name__ == "__main__":
    main()
