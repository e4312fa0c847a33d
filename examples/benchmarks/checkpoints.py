"""Runs with checkpoints that are killed at random moments, and go on to the result of an undisturbed run.

Bar: ``kill -9`` at 50 random moments of `universal_set` over a file in two passes: 50 identical results, to the last
bit of every score. A run that goes on is killed again in half of the cases.

    python examples/benchmarks/checkpoints.py [--kills 50] [--rows 1000000] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from _rivals import once, verdict

import levattn
from levattn.io import replace_file

D, EPSILON = 64, 0.01
CHUNK, EVERY = 8192, 32_768


def write_keys(path: Path, n: int) -> None:
    """Keys whose rows are of very different sizes, so that a few hundred are in the set."""
    rng = np.random.default_rng(0)
    keys = np.lib.format.open_memmap(path, "w+", np.float32, (n, D))
    for start in range(0, n, CHUNK):
        part = keys[start : start + CHUNK]
        rng.standard_normal(dtype=np.float32, out=part)
        part *= np.exp(2 * rng.standard_normal((len(part), 1))).astype(np.float32)
    keys.flush()


def run(keys: str, checkpoint: str, result: str) -> None:
    """One run, in a process of its own. It says when it begins, and each time rows are done."""
    levattn.universal_set(np.eye(D, dtype=np.float32), EPSILON)  # loads the kernels
    print("ready", flush=True)
    found = levattn.scan_set(
        levattn.open_keys(keys, chunk_rows=CHUNK),
        EPSILON,
        checkpoint=checkpoint,
        checkpoint_rows=EVERY,
        progress=lambda done, _: print(done, flush=True),
    )
    with replace_file(result) as stream:
        np.savez(stream, indices=found.indices, scores=found.scores, normalizer=found.factor.normalizer)


@dataclass
class Runs:
    """Runs over one file, and what became of them.

    killed: rows that were done when a run was killed.
    begun: rows that had been done when a run began.
    seconds: what the last one took, without the start of its process.
    """

    folder: Path
    killed: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def result(self) -> Path:
        return self.folder / "result.npz"

    def go(self, seconds: float | None) -> bool:
        """Begin or go on, and kill after so many seconds; return whether the run came to its end before."""
        paths = map(str, (self.folder / "keys.npy", self.checkpoint, self.result))
        command = [sys.executable, __file__, "--run", *paths]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            if child.stdout is None or child.stdout.readline() != "ready\n":
                raise SystemExit("a run did not begin")
            start = time.perf_counter()
            if seconds is not None:
                time.sleep(seconds)
                child.kill()
            done = [int(line) for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
            self.seconds = time.perf_counter() - start
        if seconds is None and child.returncode:
            raise SystemExit(f"a run failed with {child.returncode}")
        self.begun += done[:1]
        if self.result.exists():
            return True
        self.killed.append(done[-1] if done else 0)
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to write the file of keys")
    parser.add_argument("--run", nargs=3, metavar=("KEYS", "CHECKPOINT", "RESULT"), help="one run, in this process")
    options = parser.parse_args()
    if options.run:
        run(*options.run)
        return
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        write_keys(folder / "keys.npy", options.rows)
        runs = Runs(folder)
        runs.go(None)
        whole, expected = runs.seconds, dict(np.load(runs.result))
        mapped = levattn.universal_set(np.load(folder / "keys.npy", mmap_mode="r"), EPSILON)
        if not np.array_equal(mapped.indices, expected["indices"]):
            raise SystemExit("the undisturbed run finds other keys than a call with all of them in memory")
        source = levattn.open_keys(folder / "keys.npy", chunk_rows=CHUNK)
        calls = {
            "without": lambda: levattn.universal_set(source, EPSILON),
            "with": lambda: levattn.scan_set(source, EPSILON, checkpoint=runs.checkpoint, checkpoint_rows=EVERY),
        }
        times = {name: min(once(call) for _ in range(5)) for name, call in calls.items()}
        print(
            f"{options.rows} keys, {len(mapped)} in the set, a checkpoint every {EVERY} rows: {times['with']:.2f} s, "
            f"without checkpoints {times['without']:.2f} s"
        )
        runs, identical, again, finished = Runs(folder), 0, 0, 0
        while len(runs.killed) - again < options.kills:
            runs.result.unlink(missing_ok=True)
            if runs.go(rng.uniform(0, whole)):
                finished += 1  # before it was killed; that does not count
                continue
            while rng.random() < 0.5 and not runs.go(rng.uniform(0, whole)):
                again += 1
            if not runs.result.exists():
                runs.go(None)
            found = np.load(runs.result)
            others = [name for name in expected if not np.array_equal(found[name], expected[name])]
            others += ["checkpoint"] * runs.checkpoint.exists()
            identical += not others
            if others:
                print(f"after kills at rows {runs.killed} these differ: {', '.join(others)}")
        left = len(list(folder.glob(".*.tmp")))
    first, went_on = sum(rows < options.rows for rows in runs.killed), sum(rows > 0 for rows in runs.begun)
    print(
        f"{len(runs.killed)} runs killed, {first} in the first pass and {len(runs.killed) - first} in the second, "
        f"{again} of them not for the first time; {finished} came to their end before"
    )
    print(f"{went_on} runs went on from a checkpoint; {left} half-written files were left")
    print("identical results:", verdict(identical, options.kills))


if __name__ == "__main__":
    main()
