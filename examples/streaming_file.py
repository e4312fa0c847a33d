"""Universal sets of keys in a file that is larger than the memory that may be used: in two passes, and in one.

python examples/streaming_file.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import levattn

N, D, EPSILON = 500_000, 64, 0.05
MEMORY = 8 * 2**20  # bytes that a chunk of keys may take


def write_keys(path: Path) -> None:
    """Write keys to a file, 100 of them in directions that hardly any other has."""
    rng = np.random.default_rng(0)
    keys = np.lib.format.open_memmap(path, "w+", np.float32, (N, D))
    for start in range(0, N, 50_000):
        keys[start : start + 50_000] = rng.standard_normal((50_000, D)) * np.geomspace(1, 1e-2, D)
    keys[:: N // 100, D // 2 :] *= 100
    keys.flush()


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_keys(folder / "keys.npy")
        source = levattn.open_keys(folder / "keys.npy", memory=MEMORY)
        print(f"{source.n} keys in a file of {(folder / 'keys.npy').stat().st_size / 2**20:.0f} MiB")

        # Two passes: the scores of all keys. Killed, the same call would go on from the checkpoint.
        found = levattn.universal_set(source, EPSILON, progress=True, checkpoint=folder / "checkpoint")
        print(f"two passes: {found}")

        # One pass, as over a stream that is gone once it was read. Values, or whatever, come along with the keys.
        state = levattn.StreamingUniversalSet(EPSILON)
        half = source.n // 2
        for chunk, start in zip(source.between(0, half), range(0, half, source.chunk_rows), strict=True):
            state = state.update(chunk, payload=np.arange(start, start + len(chunk)) / source.n)
        state.save(folder / "state")

        # Another day, or another process, goes on from the saved state.
        state = levattn.StreamingUniversalSet.load(folder / "state")
        for chunk, start in zip(source.between(half, source.n), range(half, source.n, source.chunk_rows), strict=True):
            state = state.update(chunk, payload=np.arange(start, start + len(chunk)) / source.n)
        streamed = state.result()
        size = (folder / "state").stat().st_size / 2**20
        print(f"one pass:   {streamed}, from a state of {size:.1f} MiB")
        print(f"the same keys: {np.array_equal(streamed.indices, found.indices)}")
        print(f"the first three, and where in the file they are: {streamed.indices[:3]}, {streamed.payload[:3]}")


if __name__ == "__main__":
    main()
