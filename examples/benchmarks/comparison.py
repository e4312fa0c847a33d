"""The tables of docs/comparison.md: levattn beside other libraries, each table with all of them in one run.

    python examples/benchmarks/comparison.py                  # every table, printed: some minutes on two cores
    python examples/benchmarks/comparison.py --only speed latte
    python examples/benchmarks/comparison.py --write          # and put into the page
    python examples/benchmarks/comparison.py --avx2 --write   # times without AVX-512

On a processor without AVX-512 the tables of times are those that the page has for such processors. ``--avx2`` measures
them elsewhere: levattn, numpy's and scipy's BLAS, numpy, torch and JAX are then limited to AVX2.

A library that is not installed has a row that says so. The presses of kvpress need transformers below 5.3:
`make peer-kvpress` makes such an environment, .venv-peer-kvpress. `--quick` is a run of small sizes to try the
command; its figures mean little.
"""

from __future__ import annotations

import argparse
import os
import platform
import time

import _comparison_attention
import _comparison_cost
import _comparison_quality
import _comparison_scores
from _libraries import RIVALS, missing, version, versions
from _page import AVX2, TIMES, Table, processor, source, write
from _rivals import limit_to_avx2

from levattn._kernels.jit import VECTOR_BYTES

SECTIONS = {
    **_comparison_scores.SECTIONS,
    **_comparison_quality.SECTIONS,
    **_comparison_attention.SECTIONS,
    **_comparison_cost.SECTIONS,
}
MACHINE = "machine"
NEED_TORCH = ("pruned", "latte", "tssa", "cost-positions")


def machine() -> str:
    """Return a list of what the tables were measured on and with."""
    rivals = (f"- {name}: {version(name) or missing(name)}" for name in RIVALS)
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return "\n".join(
        [
            f"- {processor()}; {platform.system()}, Python {platform.python_version()}",
            f"- load of the machine over 1, 5 and 15 minutes when the run began: {load}",
            f"- levattn {version('levattn')}, numba {version('numba')}",
            *rivals,
        ]
    )


def measured(name: str, *, quick: bool) -> Table:
    """Return a table, which without torch may say no more than that."""
    if name in NEED_TORCH and version("torch") is None:
        return Table(name, [name], [[f"torch: {missing('torch')}"]])
    section, packages = SECTIONS[name]
    table = section(quick=quick)
    if not all(map(version, packages)):
        table.losses = table.losses or None  # who was not there was not compared
    return table


def main() -> None:
    """Measure and print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="TABLE")
    parser.add_argument("--avx2", action="store_true", help="measure times without AVX-512")
    parser.add_argument("--quick", action="store_true", help="small sizes and one round")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/comparison.md")
    options = parser.parse_args()
    if options.avx2:
        limit_to_avx2()
    narrow = VECTOR_BYTES < 64
    print(machine())
    bodies = {} if narrow else {MACHINE: machine()}
    for name in options.only or (TIMES if options.avx2 else SECTIONS):
        begin = time.perf_counter()
        table = measured(name, quick=options.quick)
        limited = "limited to AVX2; " if options.avx2 else ""
        body = table.markdown(limited + source(versions(SECTIONS[name][1]), quick=options.quick))
        print(f"\n## {name} ({time.perf_counter() - begin:.0f} s)\n\n{body}", flush=True)
        bodies[name + AVX2 if narrow and name in TIMES else name] = body
        if options.write:
            write(bodies)


if __name__ == "__main__":
    main()
