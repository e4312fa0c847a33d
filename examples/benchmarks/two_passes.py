"""What it costs that two passes compare the keys that they read: with the comparison, as a multiple of without.

The rows of a source are its n keys. For files the system tells every change, so that nothing is read for it; with a
checkpoint, and for functions and other iterables, a digest of all bytes tells. Functions return chunks that lie in
memory, which costs nothing beside them, or read them from a file first.

Bar: at most 1.03. Kernels digest rows that are in their cache, so that the digest costs arithmetic alone. That is 4 ns
for 256 bytes with vectors of 32 bytes, twice. So few columns miss the bar: the passes do d² work for a row.

    python examples/benchmarks/two_passes.py [--rounds 15] [--bytes 256000000] [--threads 1] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
from _rivals import table, verdict

import levattn
from levattn.linalg.reading import RowDigest
from levattn.sensitivity import two_pass

EPSILON, CHUNK = 0.01, 32 << 20
SHAPES = ((64, "float32"), (128, "float32"), (64, "float64"), (64, "float16"), (16, "float32"))


def _nothing(*_: object, **__: object) -> None:
    """Stand for what is left out; a mock would keep the chunks that it is given."""


@contextmanager
def compared(which: bool) -> Iterator[None]:
    """Passes that compare what they read, or not."""
    if which:
        yield
        return
    with (
        mock.patch.object(two_pass, "record_of", return_value=["the same"]),
        mock.patch.object(RowDigest, "watched", lambda _, rows: rows),
        mock.patch.object(RowDigest, "add", _nothing),
        mock.patch.object(RowDigest, "difference", _nothing),
    ):
        yield


def ratio(call: Callable[[], object], rounds: int, clock: Callable[[], float]) -> tuple[float, float, float]:
    """Median of the ratios of neighbors, and the quartiles."""
    ratios = []
    for i in range(rounds):
        seconds = {}
        for which in (True, False) if i % 2 else (False, True):
            with compared(which):
                call()
                start = clock()
                call()
                seconds[which] = clock() - start
        ratios.append(seconds[True] / seconds[False])
    low, median, high = statistics.quantiles(ratios, n=4)
    return low, median, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bytes", type=int, default=256_000_000, help="of the keys")
    parser.add_argument("--threads", type=int, default=1, help="with one, seconds are of the processor")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to write the file of keys")
    options = parser.parse_args()
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rows, worst = [], {"files": 0.0, "others": 0.0}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, levattn.thread_limit(options.threads):
        path, checkpoint = Path(folder, "keys.npy"), Path(folder, "checkpoint")
        for d, dtype in SHAPES:
            row = d * np.dtype(dtype).itemsize
            n, step = options.bytes // row, CHUNK // row
            K = np.random.default_rng(0).standard_normal((n, d)).astype(dtype)
            np.save(path, K)
            time.sleep(0.1)  # a file that is new is read for its digest as well
            source = levattn.open_keys(path)

            def held(K: np.ndarray = K, step: int = step) -> Iterator[np.ndarray]:
                return (K[at : at + step] for at in range(0, len(K), step))

            def read(n: int = n, d: int = d, dtype: str = dtype, step: int = step) -> Iterator[np.ndarray]:
                with path.open("rb") as stream:
                    stream.seek(128)
                    for at in range(0, n, step):
                        yield np.fromfile(stream, dtype, min(step, n - at) * d).reshape(-1, d)

            calls: dict[str, Callable[[], object]] = {
                "file": lambda source=source: levattn.universal_set(source, EPSILON),
                "file, checkpoint": lambda source=source: levattn.scan_set(source, EPSILON, checkpoint=checkpoint),
                "function, read": lambda read=read: levattn.universal_set(read, EPSILON),
                "function, memory": lambda held=held: levattn.universal_set(held, EPSILON),
            }
            for name, call in calls.items():
                low, median, high = ratio(call, options.rounds, clock)
                rows.append([f"{name}, d = {d}, {dtype}", f"{median:.3f}", f"{low:.3f} to {high:.3f}"])
                kind = "files" if name == "file" else "others"
                worst[kind] = max(worst[kind], median)
    table(["", "with / without", "half of the rounds"], rows)
    for kind, most in worst.items():
        print(f"{kind}:", verdict(most, 1.03, at_least=False))


if __name__ == "__main__":
    main()
