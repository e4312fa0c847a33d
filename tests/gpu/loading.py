"""Every kernel of the table loaded on a card, with the registers and the memory of a thread that it takes there.

``python -m tests.gpu.loading --json FILE``; kernels that the cache on disk lacks are compiled in several processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from levattn._kernels import cuda_source

# As cuFuncGetAttribute counts them
FIGURES = {"registers": 4, "local bytes": 3, "shared bytes": 1, "threads": 0}
Kernel = tuple[str, str, tuple[str, ...]]


def table() -> list[Kernel]:
    """Source, name and types of every kernel."""
    return [
        (source, name, types)
        for source, kernels in cuda_source.KERNELS.items()
        for name, choices in kernels.items()
        for types in choices
    ]


def loaded(kernel: Kernel) -> dict[str, Any]:
    """What a card tells of a kernel, or why it does not load."""
    import cupy

    begun, told = time.monotonic(), {"source": kernel[0], "kernel": cuda_source.expression(*kernel[1:])}
    try:
        function = cuda_source._compiled(*kernel, 0)._function
        got = {name: cupy.cuda.driver.funcGetAttribute(at, function.ptr) for name, at in FIGURES.items()}
    except Exception as error:
        return {**told, "wrong": f"{type(error).__name__}: {str(error)[:1000]}"}
    return {**told, **got, "seconds": round(time.monotonic() - begun, 3), "wrong": ""}


def compiled(kernel: Kernel) -> None:
    """Leave a kernel in the cache; this process alone ends if NVRTC takes it along."""
    loaded(kernel)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.loading", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the figures of all kernels go")
    options = parser.parse_args(arguments)
    begun, kernels = time.monotonic(), table()
    workers = max(1, min(14, (os.cpu_count() or 1) - 1))
    # NVRTC may keep one compilation waiting for another in a process
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compiled, kernels))
    told = [loaded(kernel) for kernel in kernels]
    wrong, local = ([each for each in told if each.get(key)] for key in ("wrong", "local bytes"))
    counts = {
        "kernels loaded": len(told) - len(wrong),
        "kernels not loaded": len(wrong),
        "with local memory": len(local),
    }
    options.json.write_text(json.dumps({"counts": counts, "kernels": told}, indent=0), "utf-8")
    for each in local:
        print(f"{each['kernel']} takes {each['local bytes']} bytes of local memory")
    for each in wrong:
        print(f"WRONG  {each['kernel']}: {each['wrong']}")
    print(f"{counts['kernels loaded']} of {len(told)} kernels loaded in {time.monotonic() - begun:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
