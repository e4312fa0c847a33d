"""Peak memory of heavy attention beyond its input and output, against the numbers of queries and keys.

Bar at d = 64, ε = 0.05: O(m + n). From n = 131 072 to n = 1 048 576 at m = 1024 each further key takes at most 32
bytes (its row of K takes 256), and from m = 1024 to m = 16 384 at n = 131 072 each further query at most eight of its
rows in float64; so there is nothing for a pair of both.

    python examples/benchmarks/heavy_memory.py
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
from _rivals import Array, table, verdict

import levattn

D, EPSILON = 64, 0.05
SMALL, MORE_KEYS, MORE_QUERIES = (1024, 131_072), (1024, 1_048_576), (16_384, 131_072)
KEY_BYTES, QUERY_BYTES = 32, 8 * 8 * D
MIB = 2**20


def queries_and_keys(m: int, n: int) -> tuple[Array, Array]:
    """Gaussian rows; 200 keys are longer, and half of the queries lean toward one of these. Without temporaries."""
    rng = np.random.default_rng(n)
    Q, K = np.empty((m, D), np.float32), np.empty((n, D), np.float32)
    for array in (Q, K):
        rng.standard_normal(dtype=np.float32, out=array)
    long = rng.integers(n, size=200)
    K[long] *= np.float32(np.sqrt(0.01 * n))
    for i in range(0, m, 2):
        Q[i] += np.float32(0.5) * K[long[i % 200]]
    return Q, K


def measure(m: int, n: int) -> None:
    """Print the bytes that a call took at its peak and those that it returned, |U|, and the number of entries."""
    levattn.heavy_attention(*queries_and_keys(64, 4096), EPSILON)  # compiles or loads the kernels
    Q, K = queries_and_keys(m, n)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    heavy = levattn.heavy_attention(Q, K, EPSILON)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    entries = heavy.entries
    arrays = (entries.data, entries.indices, entries.indptr)
    arrays += (heavy.normalizers, heavy.captured_mass, heavy.residual_mass)
    arrays += (heavy.universal.mask, heavy.universal.scores, heavy.universal.present)
    output = sum(array.nbytes for array in arrays)
    print(peak - pages * resource.getpagesize(), output, len(heavy.universal), entries.nnz)


def growth(m: int, n: int) -> tuple[int, list[str]]:
    """Measure in a process of its own, the second of two, so that nothing is compiled in it."""
    command = [sys.executable, __file__, "--measure", str(m), str(n)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, output, size, entries = map(int, done.stdout.split())
    given, pairs = 4 * D * (m + n), 4 * m * n
    shown = (f"{x / MIB:.2f}" for x in (given, output, grown, grown - output, pairs))
    return grown - output, [str(m), str(n), str(size), str(entries), *shown]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=int, nargs=2, metavar=("M", "N"), help="one size, in this process")
    asked = parser.parse_args().measure
    if asked:
        measure(*asked)
        return
    sizes = (SMALL, MORE_KEYS, MORE_QUERIES)
    found = {size: growth(*size) for size in sizes}
    table(
        ["m", "n", "|U|", "entries", "input MiB", "output", "grown by", "beyond output", "m × n float32"],
        [found[size][1] for size in sizes],
    )
    beyond = {size: found[size][0] for size in sizes}
    a_key = (beyond[MORE_KEYS] - beyond[SMALL]) / (MORE_KEYS[1] - SMALL[1])
    a_query = (beyond[MORE_QUERIES] - beyond[SMALL]) / (MORE_QUERIES[0] - SMALL[0])
    print("bytes for each further key:", verdict(a_key, KEY_BYTES, at_least=False))
    print("bytes for each further query:", verdict(a_query, QUERY_BYTES, at_least=False))


if __name__ == "__main__":
    main()
