"""Peak memory of every public function of n keys, beyond the keys: one million of d = 64 in float32.

Bar: at most 50 MiB, the result included, whatever the layout of the keys: whole, read-only and memory-mapped, every
second row of a larger array, every second column, the transpose of a stack of heads. Each row is a process of its
own, which has compiled and loaded what it needs on few keys before; the figure is the growth of its peak of resident
memory (pages of a mapped file are not counted: they can be dropped).

    python examples/benchmarks/memory.py [--rows 1000000] [--only leverage_scores ...] [--layouts whole mapped ...]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _rivals import Array, table, verdict

import levattn

D, FEW, MIB = 64, 20_000, 2**20
BAR = 50.0
SLOW = 600  # seconds after which a row is given up


def _queries(d: int) -> Array:
    return np.random.default_rng(1).standard_normal((256, d), dtype=np.float32)


def _streamed(K: Array) -> object:
    stream = levattn.StreamingUniversalSet(0.05)
    for start in range(0, len(K), 65_536):
        stream.update(K[start : start + 65_536])
    return stream.result()


def _moments(K: Array) -> object:
    from levattn.states import Moments

    return Moments(K.shape[1]).update(K)


def _sketched(family: str) -> Callable[[Array], object]:
    def call(K: Array) -> object:
        from levattn import sketch

        return sketch.Sketch(getattr(sketch, family)(1024), 0).apply(K)

    return call


FUNCTIONS: dict[str, Callable[[Array], object]] = {
    "leverage_scores": levattn.leverage_scores,
    "leverage_scores, gram": lambda K: levattn.leverage_scores(K, method="gram"),
    "leverage_scores, qr": lambda K: levattn.leverage_scores(K, method="qr"),
    "leverage_scores, countsketch": lambda K: levattn.leverage_scores(K, method="countsketch"),
    "leverage_scores, osnap": lambda K: levattn.leverage_scores(K, method="osnap"),
    "leverage_scores, srht": lambda K: levattn.leverage_scores(K, method="srht"),
    "leverage_scores, jl": lambda K: levattn.leverage_scores(K, method="jl"),
    "leverage_scores, center": lambda K: levattn.leverage_scores(K, center=True),
    "online_leverage_scores": levattn.online_leverage_scores,
    "universal_set": lambda K: levattn.universal_set(K, 0.01),
    "universal_set, size": lambda K: levattn.universal_set(K, size=1000),
    "universal_set, osnap": lambda K: levattn.universal_set(K, 0.01, method="osnap"),
    "universal_set, |x|": lambda K: levattn.universal_set(K, 0.01, f=1),
    "universal_set, |x|^3": lambda K: levattn.universal_set(K, 0.01, f=3),
    "universal_set, Huber": lambda K: levattn.universal_set(K, 0.01, f=levattn.Huber(1.0)),
    "universal_set, softmax": lambda K: levattn.universal_set(K, 0.01, f=levattn.Softmax(1.0)),
    "covering_set": lambda K: levattn.covering_set(K, _queries(K.shape[1]), 0.01, coverage=0.9),
    "expected_scores": lambda K: levattn.expected_scores(K, _queries(K.shape[1])),
    "sensitivities, |x|": lambda K: levattn.sensitivities(K, 1),
    "lewis_weights": lambda K: levattn.lewis_weights(K, 1.0),
    "near_duplicates": lambda K: levattn.near_duplicates(K),
    "heavy_attention": lambda K: levattn.heavy_attention(_queries(K.shape[1]), K, 0.01),
    "heavy_attention, |x|": lambda K: levattn.heavy_attention(_queries(K.shape[1])[:16], K, 0.01, f=1),
    "StreamingUniversalSet": _streamed,
    "Moments": _moments,
    "Sketch, CountSketch": _sketched("CountSketch"),
    "Sketch, OSNAP": _sketched("OSNAP"),
    "Sketch, SRHT": _sketched("SRHT"),
}


def _filled(out: Array) -> Array:
    """Write Gaussian keys of which 200 are longer, with a mean, a block at a time."""
    rng = np.random.default_rng(0)
    for start in range(0, len(out), 16_384):
        part = out[start : start + 16_384]
        part[:] = rng.standard_normal(part.shape, dtype=np.float32) + np.float32(0.5)
        part[:: 16_384 // 4] *= np.float32(30)
    return out


def _whole(n: int, _: Path) -> Array:
    return _filled(np.empty((n, D), np.float32))


def _mapped(n: int, folder: Path) -> Array:
    file = np.lib.format.open_memmap(folder / f"{n}.npy", "w+", np.float32, (n, D))
    _filled(file)
    file.flush()
    return np.load(folder / f"{n}.npy", mmap_mode="r")


def _every_second_row(n: int, _: Path) -> Array:
    return _filled(np.empty((n, 2, D), np.float32)[:, 0])


def _every_second_column(n: int, _: Path) -> Array:
    return _filled(np.empty((n, D, 2), np.float32)[:, :, 0])


def _transposed(n: int, _: Path) -> Array:
    return _filled(np.empty((D, n), np.float32).T)


LAYOUTS: dict[str, Callable[[int, Path], Array]] = {
    "whole": _whole,
    "mapped": _mapped,
    "rows": _every_second_row,
    "columns": _every_second_column,
    "transposed": _transposed,
}


def _resident(kind: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {kind}")


class _Watch:
    """The largest anonymous resident memory while this is on, looked at every millisecond."""

    def __enter__(self) -> _Watch:
        import threading

        self.most, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(0.001):
            self.most = max(self.most, _resident("RssAnon"))

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.most = max(self.most, _resident("RssAnon"))


def measure(name: str, layout: str, n: int) -> None:
    """Print the MiB that a function takes beyond its keys."""
    call = FUNCTIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        few = LAYOUTS[layout](FEW, Path(folder))
        call(few)
        K = LAYOUTS[layout](n, Path(folder))
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # pages that were left free would not be seen again
        before = _resident("RssAnon")
        with _Watch() as watch:
            result = call(K)
        print((watch.most - before) / MIB, result is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--only", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["whole"])
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure, options.rows)
        return
    rows, worst = [], 0.0
    for name in options.only:
        cells = []
        for layout in options.layouts:
            command = [sys.executable, __file__, "--rows", str(options.rows), "--measure", name, layout]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=SLOW)
            except subprocess.TimeoutExpired:
                cells.append(f"> {SLOW} s")
                continue
            if done.returncode:
                cells.append(done.stderr.strip().splitlines()[-1][:60])
                continue
            figure = float(done.stdout.split()[0])
            worst = max(worst, figure)
            cells.append(f"{figure:.1f}")
        rows.append([name, *cells])
        print(name, *cells, flush=True)
    print()
    table([f"MiB beyond {options.rows} keys", *options.layouts], rows)
    print("most:", verdict(worst, BAR, at_least=False))


if __name__ == "__main__":
    main()
