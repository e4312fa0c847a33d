"""Peak memory of a stream beyond one chunk, and its results on a file that is larger than that.

Bars for d = 64 and float32 keys in chunks of 65 536 rows:
- at ε = 0.05 and 0.1, n = 10⁶ and 10⁷ alike, the memory that one pass takes at its peak is at most 2 (d² + 3 d²/ε)
  numbers of eight bytes, whatever the keys: Gaussian, heavy-tailed, growing exponentially (so that every block is
  held), ill-conditioned;
- in chunks of 2048 rows, which wait for one another, it takes at most 18 MiB more;
- one pass and two passes over a file of 10⁷ keys find the same indices as `universal_set` of the mapped file.

Memory is what numpy reports to tracemalloc, in a process of its own after a first short stream. The growth of resident
memory, a second figure, also counts what compiled code and the allocator take.

    python examples/benchmarks/streaming_memory.py [--rows 1000000 10000000] [--file-rows 10000000] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from _rivals import Array, once, table, verdict

import levattn

D, CHUNK = 64, 65_536
SMALL, WAITING = 2048, 18 * 2**20  # rows of a small chunk, and bytes that such ones may take beyond the bar
EPSILONS = (0.05, 0.1)
DOUBLINGS = 240  # of the sizes of growing keys: the range of float32
SHORT = 4 * CHUNK
MIB = 2**20


class Generator:
    """Chunks of keys made in one buffer: once it is there, making them takes no memory."""

    def __init__(self, kind: str, n: int, rows: int = CHUNK) -> None:
        self.n, self.rows, self.rng = n, rows, np.random.default_rng(0)
        self.fill: Callable[[int], None] = getattr(self, "fill_" + kind.replace("-", "_"))
        self.buffer = np.empty((CHUNK, D), np.float32)
        self.first, self.second = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
        self.raw = np.empty_like(self.buffer) if kind == "ill-conditioned" else None
        turn = np.linalg.qr(np.random.default_rng(1).standard_normal((D, D)))[0]
        self.mix = (np.geomspace(1, 1e-6, D)[:, None] * turn).astype(np.float32)
        self.steps = np.arange(CHUNK, dtype=np.float32)

    def __iter__(self) -> Iterator[Array]:
        for start in range(0, self.n, CHUNK):
            self.fill(start)
            for low in range(0, min(CHUNK, self.n - start), self.rows):
                yield self.buffer[low : min(low + self.rows, self.n - start)]

    def fill_gaussian(self, _: int) -> None:
        self.rng.standard_normal(dtype=np.float32, out=self.buffer)

    def fill_heavy_tailed(self, start: int) -> None:
        """Gaussian keys times a Cauchy variable each, the quotient of two normal ones."""
        self.fill_gaussian(start)
        self.rng.standard_normal(dtype=np.float32, out=self.first)
        self.rng.standard_normal(dtype=np.float32, out=self.second)
        np.abs(self.second, out=self.second)
        np.maximum(self.second, np.float32(1e-6), out=self.second)
        np.divide(self.first, self.second, out=self.first)
        np.multiply(self.buffer, self.first[:, None], out=self.buffer)

    def fill_growing(self, start: int) -> None:
        self.fill_gaussian(start)
        np.add(self.steps, np.float32(start), out=self.first)
        np.multiply(self.first, np.float32(DOUBLINGS / self.n), out=self.first)
        np.subtract(self.first, np.float32(DOUBLINGS / 2), out=self.first)
        np.minimum(self.first, np.float32(DOUBLINGS / 2), out=self.first)  # in rows beyond the last
        np.exp2(self.first, out=self.first)
        np.multiply(self.buffer, self.first[:, None], out=self.buffer)

    def fill_ill_conditioned(self, _: int) -> None:
        self.rng.standard_normal(dtype=np.float32, out=self.raw)
        np.matmul(self.raw, self.mix, out=self.buffer)


KINDS = ("gaussian", "heavy-tailed", "growing", "ill-conditioned")


def resident(figure: str) -> int:
    """Resident bytes of this process: `VmRSS` now, `VmHWM` at most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(figure):
            return 1024 * int(line.split()[1])
    return 0


def measure(kind: str, epsilon: float, n: int, *, traced: bool, chunk: int = CHUNK) -> None:
    """Print the bytes that a stream takes at its peak, the keys held in the end, and the size of the set."""

    def stream(rows: int) -> tuple[int, int]:
        state, most = levattn.StreamingUniversalSet(epsilon), 0
        for keys in Generator(kind, rows) if rows != n else chunks:
            state = state.update(keys)
            if chunk == CHUNK:  # small ones do not wait where something is read
                most = max(most, state.held)
        return most, len(state.result())

    stream(SHORT if traced else 2048)  # loads the kernels; a longer one would leave its memory to the other
    chunks = Generator(kind, n, chunk)
    chunks.fill(0)
    gc.collect()
    if traced:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        held, size = stream(n)
        print(tracemalloc.get_traced_memory()[1] - before, held, size)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        before = resident("VmRSS")
        held, size = stream(n)
        print(resident("VmHWM") - before, held, size)


def in_a_process(kind: str, epsilon: float, n: int, how: str) -> list[int]:
    command = [sys.executable, __file__, "--measure", kind, str(epsilon), str(n), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(figure) for figure in done.stdout.split()]


def bar_of(epsilon: float) -> float:
    return 2 * (D * D + 3 * D * D / epsilon) * 8


def memory(sizes: list[int]) -> None:
    rows, worst, small = [], dict.fromkeys(EPSILONS, 0.0), 0.0
    for epsilon in EPSILONS:
        for kind in KINDS:
            for n in sizes:
                peak, held, size = in_a_process(kind, epsilon, n, "traced")
                grown = in_a_process(kind, epsilon, n, "resident")[0]
                small = max(small, in_a_process(kind, epsilon, n, "small")[0] - bar_of(epsilon))
                share = peak / bar_of(epsilon)
                worst[epsilon] = max(worst[epsilon], share)
                figures = (f"{peak / MIB:.2f}", f"{bar_of(epsilon) / MIB:.2f}", f"{share:.2f}", f"{grown / MIB:.2f}")
                rows.append([kind, f"{epsilon:g}", f"{n:.0e}", str(held), str(size), *figures])
    table(["keys", "ε", "n", "held", "|U|", "peak MiB", "bar MiB", "peak / bar", "resident"], rows)
    for epsilon, share in worst.items():
        print(f"most of peak / bar at ε = {epsilon:g}:", verdict(share, 1, at_least=False))
    print(f"MiB beyond the bar in chunks of {SMALL} rows:", verdict(small / MIB, WAITING / MIB, at_least=False))


def file(n: int, folder: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as made:
        path = Path(made, "keys.npy")
        keys = np.lib.format.open_memmap(path, "w+", np.float32, (n, D))
        for start, chunk in zip(range(0, n, CHUNK), Generator("heavy-tailed", n), strict=True):
            keys[start : start + CHUNK] = chunk
        keys.flush()
        del keys
        found: dict[str, Array] = {}
        source = levattn.open_keys(path)

        def one_pass() -> None:
            state = levattn.StreamingUniversalSet(EPSILONS[0])
            for chunk in source:
                state = state.update(chunk)
            found["one pass"] = state.result().indices

        def two_passes() -> None:
            found["two passes"] = levattn.universal_set(source, EPSILONS[0]).indices

        def mapped() -> None:
            found["mapped"] = levattn.universal_set(np.load(path, mmap_mode="r"), EPSILONS[0]).indices

        seconds = {call.__name__: once(call) for call in (mapped, two_passes, one_pass)}
        print(f"\n{n} heavy-tailed keys in a file of {path.stat().st_size / 1e9:.2f} GB, ε = {EPSILONS[0]}")
        print(", ".join(f"{name.replace('_', ' ')}: {s:.1f} s" for name, s in seconds.items()))
        for name in ("two passes", "one pass"):
            same = np.array_equal(found[name], found["mapped"])
            print(f"{name}: {len(found[name])} keys, {'the same as of' if same else 'OTHERS THAN of'} the mapped file")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--file-rows", type=int, default=10_000_000, help="0 for no file")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to write the file of keys")
    parser.add_argument("--measure", nargs=4, metavar=("KIND", "EPSILON", "N", "HOW"), help="one, in this process")
    options = parser.parse_args()
    if options.measure:
        kind, epsilon, n, how = options.measure
        measure(kind, float(epsilon), int(n), traced=how != "resident", chunk=SMALL if how == "small" else CHUNK)
        return
    memory(options.rows)
    if options.file_rows:
        file(options.file_rows, options.folder)


if __name__ == "__main__":
    main()
