"""Seconds that ``import levattn`` adds to ``import numpy``: medians over fresh interpreters, interleaved.

Bar: at most 100 ms.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

ROUNDS = 15
BAR_MS = 100.0


def import_ms(module: str) -> float:
    """Milliseconds that a fresh interpreter takes for one import."""
    code = f"import time\nstart = time.perf_counter()\nimport {module}\nprint(1e3 * (time.perf_counter() - start))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    modules = ("numpy", "levattn")
    for module in modules:  # the first import of each writes byte code and warms the file cache
        import_ms(module)
    times: dict[str, list[float]] = {module: [] for module in modules}
    for _ in range(ROUNDS):
        for module in modules:
            times[module].append(import_ms(module))

    print(f"{'import':<10}{'median ms':>11}{'min ms':>9}{'max ms':>9}   ({ROUNDS} interpreters each)")
    for module, values in times.items():
        print(f"{module:<10}{statistics.median(values):11.1f}{min(values):9.1f}{max(values):9.1f}")
    extra = statistics.median(times["levattn"]) - statistics.median(times["numpy"])
    verdict = "met" if extra <= BAR_MS else "MISSED"
    print(f"levattn adds {extra:.1f} ms to numpy; bar {BAR_MS:.0f} ms: {verdict}")


if __name__ == "__main__":
    main()
