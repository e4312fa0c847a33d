"""What the benchmarks of a CUDA device share: CuPy or a word why not, interleaved medians, the speed of a copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any
COPY = "copy"


def cupy_or_exit() -> Any:
    """CuPy where it finds a CUDA device; else the program says so and ends, without an error."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError) as error:
        print(f"nothing is measured: this needs CuPy and a CUDA device ({error})")
        raise SystemExit(0) from None
    return cupy


def device_name(cp: Any) -> str:
    """The name of the current device."""
    name: bytes = cp.cuda.runtime.getDeviceProperties(cp.cuda.runtime.getDevice())["name"]
    return name.decode()


def interleaved_on_device(cp: Any, candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each candidate by the events of the device; all take their turn in every round.

    A turn is two calls, of which the second counts: the first compiles what is not compiled yet, and warms the clocks.
    Where the device waits for the calling thread, that counts too.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    begin, end = cp.cuda.Event(), cp.cuda.Event()
    for _ in range(rounds):
        for name, call in candidates.items():
            call()
            begin.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(cp.cuda.get_elapsed_time(begin, end) / 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def copier(cp: Any, nbytes: int) -> Callable[[], object]:
    """A copy on the device that reads so many bytes and writes as many."""
    source = cp.zeros(nbytes // 8)
    target = cp.empty_like(source)
    return lambda: cp.copyto(target, source)


def copy_bandwidth(nbytes: int, seconds: float) -> float:
    """Bytes a second that a copy of so many bytes reads and writes."""
    return 2 * nbytes / seconds


def normal_keys(cp: Any, n: int, d: int, dtype: str) -> Array:
    """Keys on the device: a run of random rows over and over, as drawing all of them would take long."""
    some = np.random.default_rng(0).standard_normal((min(n, 1 << 18), d)).astype(dtype)
    keys = cp.empty((n, d), dtype)
    for start in range(0, n, len(some)):
        part = keys[start : start + len(some)]
        part[...] = cp.asarray(some[: len(part)])
    return keys
