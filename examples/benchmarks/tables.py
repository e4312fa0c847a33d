"""How fast keys are read from tables: chunks of open_keys beside pyarrow's own reading, which makes no matrix.

The ratio is the time of pyarrow over ours, so that 1 is as fast. It reads in batches (`ParquetFile.iter_batches`,
`csv.open_csv`), as we do, or whole with all threads (`parquet.read_table`, `csv.read_csv`), for files that fit into
memory. Its columns lie apart, and only "rows" makes a matrix of each batch, as our chunks are. Bar: at least 0.7 of
reading in batches without a matrix. Files are in the cache of the system.

    python examples/benchmarks/tables.py [--rounds 7] [--bytes 200000000]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from _rivals import table, verdict

import levattn

SHAPES = ((8, "float64"), (64, "float32"), (64, "float64"), (512, "float32"))
BAR = 0.7


def as_rows(batches: Any) -> None:
    """Make a matrix of rows of each batch."""
    for batch in batches:
        np.column_stack([column.to_numpy(zero_copy_only=False) for column in batch.columns])


def drained(chunks: Any) -> None:
    """Read all chunks, and keep none."""
    deque(chunks, maxlen=0)


def ways(path: Path) -> dict[str, Callable[[], object]]:
    """Return pyarrow's ways to read a file, and ours."""
    if path.suffix == ".csv":
        return {
            "ours": lambda: drained(levattn.open_keys(path)),
            "batches": lambda: drained(pa.csv.open_csv(path)),
            "rows": lambda: as_rows(pa.csv.open_csv(path)),
            "whole": lambda: pa.csv.read_csv(path),
        }
    return {
        "ours": lambda: drained(levattn.open_keys(path)),
        "batches": lambda: drained(pa.parquet.ParquetFile(path).iter_batches()),
        "rows": lambda: as_rows(pa.parquet.ParquetFile(path).iter_batches()),
        "whole": lambda: pa.parquet.read_table(path),
    }


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median time of each call, one after the other in each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):  # the first round warms up
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bytes", type=int, default=200_000_000, help="of the numbers; a tenth of them as text")
    options = parser.parse_args()
    rows, least = [], 9.0
    for d, dtype in SHAPES:
        for suffix in (".parquet", ".csv"):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, f"keys{suffix}")
                n = options.bytes // (d * np.dtype(dtype).itemsize) // (10 if suffix == ".csv" else 1)
                K = np.random.default_rng(0).standard_normal((n, d)).astype(dtype)
                columns = pa.table({f"f{i}": column for i, column in enumerate(K.T)})
                if suffix == ".csv":
                    pa.csv.write_csv(columns, path)
                else:
                    pa.parquet.write_table(columns, path)
                found = medians(ways(path), options.rounds)
                size = path.stat().st_size / 1e6
            ratios = [found[name] / found["ours"] for name in ("batches", "rows", "whole")]
            least = min(least, ratios[0])
            rates = [f"{size / found[name]:.0f}" for name in ("ours", "batches", "rows", "whole")]
            rows.append([f"{suffix[1:]}, {dtype}, d = {d}", *rates, *(f"{ratio:.2f}" for ratio in ratios)])
    header = "open_keys", "pyarrow: batches", "rows", "whole", "ratio to batches", "to rows", "to whole"
    table(["MB/s of the file", *header], rows)
    print("smallest ratio:", verdict(least, BAR))


if __name__ == "__main__":
    main()
