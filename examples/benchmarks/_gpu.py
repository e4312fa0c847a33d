"""What the benchmarks of a CUDA device share: options, keys, times, the speed of a copy, rivals, and figures.

A call that fails is told and left out, and the others go on. With ``--seconds`` a script leaves out cases, and says
which.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from _keys import REAL, beside
from _rivals import table, verdict

from levattn.datasets import minilm

Array = Any
Calls = dict[str, Callable[[], object]]


class Seconds(dict[str, float]):
    """Seconds by name, NaN for what was not measured."""

    def __missing__(self, name: str) -> float:
        return math.nan


COPY = "copy"
FEWER = 256  # without a card sizes are so many times smaller
RUN = 1 << 20  # rows that are made at a time
SMOOTHING = 0.5  # of rows like those of real heads, as in `levattn.datasets.resampled`
FLUSHED = 256 << 20  # bytes that are written to drive others out of the L2 cache
AHEAD = 200_000  # cycles for which the device waits, so that the host is ahead of it
CASE_SECONDS = 4.0  # for the rounds of a case; of slower calls there is one
COLD, WARM, HOST = "cold", "warm", "host"


def torch_or_exit(device: str) -> Any:
    """torch where it has the device, and CuPy beside it; else the program says so and ends, without an error."""
    try:
        import torch

        if device == "cuda" and not torch.cuda.is_available():
            raise ImportError("torch finds no CUDA device")
        if device == "cuda":
            import cupy  # noqa: F401 (without which ours are not the kernels)
    except ImportError as error:
        print(f"nothing is measured: this needs CuPy, and torch with a CUDA device ({error})")
        raise SystemExit(0) from None
    return torch


class Bench:
    """The options of a script, and what it measures: printed, and with ``--json`` kept in a file after each case."""

    def __init__(self, script: str, text: str, *, rounds: int, **sizes: int) -> None:
        """Read the options: `sizes` and rounds, with these values where they are not given."""
        parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        for name, size in {"rounds": rounds, **sizes}.items():
            parser.add_argument(f"--{name}", type=int, default=size, help=f"{size} if left out")
        parser.add_argument("--json", type=Path, help="a file for the figures")
        parser.add_argument("--seconds", type=float, default=math.inf, help="after which no case is begun")
        parser.add_argument(
            *("--device",),
            choices=["cuda", "cpu"],
            default="cuda",
            help=f"cpu tries the script on sizes {FEWER} times smaller: its figures tell nothing",
        )
        self.options = parser.parse_args()
        self.device: str = self.options.device
        self.torch = torch = torch_or_exit(self.device)
        name = torch.cuda.get_device_name() if self.device == "cuda" else "the CPU, to try the script"
        self._end = time.monotonic() + self.options.seconds
        told = {key: value for key, value in vars(self.options).items() if key not in ("json", "seconds")}
        self._kept: dict[str, Any] = {"script": Path(script).name, "device": name, "torch": torch.__version__}
        self._kept |= {"options": told, "times": [], "bars": [], "notes": {}, "left out": []}
        self._kept["counts"] = {"bars met": 0, "bars missed": 0}
        print(f"{name}; {', '.join(f'{key} {value}' for key, value in told.items() if key != 'device')}")

    def _save(self) -> None:
        path: Path | None = self.options.json
        if path is not None:
            beside = path.with_name(path.name + ".part")
            beside.write_text(json.dumps(self._kept, indent=1) + "\n", "utf-8")
            beside.replace(path)

    def sized(self, n: int, least: int = 64) -> int:
        """So many, and without a card fewer."""
        return n if self.device == "cuda" else max(n // FEWER, least)

    def normal(self, *shape: int, dtype: str = "float32") -> Array:
        generator = self.torch.Generator(self.device).manual_seed(0)
        return self.torch.randn(shape, device=self.device, generator=generator).to(getattr(self.torch, dtype))

    def keys(self, n: int, d: int, dtype: str) -> Iterator[tuple[str, Array]]:
        """Keys (n, d) by their kind: Gaussian, and like those of heads of MiniLM side by side. They are made there."""
        torch = self.torch
        heads = minilm().keys.astype(np.float64)
        rows = beside(heads.reshape(-1, *heads.shape[2:]), d)
        mean = rows.mean(axis=0)
        noise = SMOOTHING / math.sqrt(len(rows)) * (rows - mean)
        shrunk = math.sqrt(1 - SMOOTHING**2) * (rows - mean) + mean
        rows, noise = (torch.from_numpy(X.astype(np.float32)).to(self.device) for X in (shrunk, noise))
        for kind in ("Gaussian", REAL):
            generator = torch.Generator(self.device).manual_seed(0)
            K = torch.empty((n, d), device=self.device, dtype=getattr(torch, dtype))
            for part in K.split(RUN):
                if kind == REAL:
                    at = torch.randint(len(rows), (len(part),), device=self.device, generator=generator)
                    drawn = torch.randn((len(part), len(noise)), device=self.device, generator=generator)
                    part.copy_(rows[at] + drawn @ noise)
                else:
                    part.copy_(torch.randn(part.shape, device=self.device, generator=generator))
            yield kind, K

    def copier(self, nbytes: int) -> Callable[[], object]:
        """A copy on the device that reads so many bytes of random bits and writes as many."""
        source = self.torch.randint(0, 256, (nbytes,), dtype=self.torch.uint8, device=self.device)
        target = self.torch.empty_like(source)
        return lambda: target.copy_(source)

    def _runs(self, name: str, call: Callable[[], object]) -> float:
        """Seconds of the second call, of the first if that is slow, and NaN for a call that fails, which is told."""
        try:
            seconds = math.inf
            for _ in range(2):
                start = time.perf_counter()
                call()
                self._wait()
                seconds = time.perf_counter() - start
                if seconds > CASE_SECONDS:
                    break
            return seconds
        except Exception as error:  # a rival may lack anything
            self.note(f"{name} is left out", f"{type(error).__name__}: {str(error)[:200]}")
            if self.device == "cuda":
                self.torch.cuda.empty_cache()
            return math.nan

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def _once(self, call: Callable[[], object]) -> dict[str, float]:
        """Seconds of a call by the events of the device, without its numbers in the L2 cache and with them.

        And seconds after which the call returned. Where the device waits for the calling thread, its time counts that.
        """
        if self.device != "cuda":
            start = time.perf_counter()
            call()
            return dict.fromkeys((COLD, WARM, HOST), time.perf_counter() - start)
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        found = {}
        for which in (COLD, WARM):
            if which == COLD:
                self._flushing.fill_(1)
            self.torch.cuda._sleep(AHEAD)
            begin.record()
            start = time.perf_counter()
            call()
            found[HOST] = time.perf_counter() - start
            end.record()
            end.synchronize()
            found[which] = begin.elapsed_time(end) / 1e3
        return found

    @cached_property
    def _flushing(self) -> Array:
        return self.torch.empty(FLUSHED, dtype=self.torch.uint8, device=self.device)

    def _busy(self, call: Callable[[], object]) -> dict[str, float]:
        """For how many seconds the device works, in how many launches; nothing where the profiler does not tell."""
        if self.device != "cuda":
            return {}
        try:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                call()
                self._wait()
            some = [event for event in seen.events() if str(event.device_type).endswith("CUDA")]
        except Exception as error:  # it needs rights on some machines
            self.note("the profiler tells nothing", str(error)[:200])
            return {}
        return {"busy": sum(event.time_range.elapsed_us() for event in some) / 1e6, "launches": len(some)}

    def times(self, case: str, calls: Calls, against: str) -> Seconds:
        """Median seconds of each call with a cold L2 cache; NaN for a call that failed or was left out.

        All calls take their turn in every round. The first calls compile and warm the clocks, and do not count.
        """
        if time.monotonic() > self._end:
            print(f"\n{case}: left out, as the time is over")
            self._kept["left out"].append(case)
            self._save()
            return Seconds()
        print(f"\n{case}")
        firsts = {name: self._runs(f"{case}, {name}", call) for name, call in calls.items()}
        left = {name: call for name, call in calls.items() if not math.isnan(firsts[name])}
        round_seconds = 2 * sum(firsts[name] for name in left)
        rounds = int(min(CASE_SECONDS, max(self._end - time.monotonic(), 0.0)) / max(round_seconds, 1e-9))
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in left}
        for _ in range(min(self.options.rounds, max(rounds, 2 if round_seconds < CASE_SECONDS else 1))):
            for name, call in left.items():
                measured[name].append(self._once(call))
        found = {
            name: {which: statistics.median(each[which] for each in some) for which in some[0]}
            for name, some in measured.items()
        }
        if against in left:
            found[against] |= self._busy(left[against])
        self._tell(case, found, against)
        return Seconds({name: each[COLD] for name, each in found.items()})

    def _tell(self, case: str, found: dict[str, dict[str, float]], against: str) -> None:
        base = found.get(against, {}).get(COLD, math.nan)
        rows = [
            [name, *(f"{1e3 * each[which]:.3f}" for which in (COLD, WARM, HOST)), f"{each[COLD] / base:.2f}"]
            for name, each in found.items()
        ]
        table(["", "ms, cold", "warm", "host", f"/ {against}"], rows)
        busy = found.get(against, {})
        if "busy" in busy:
            print(f"{against}: the device works for {1e3 * busy['busy']:.3f} ms in {busy['launches']} launches")
        figures = {
            name: {key: value if key == "launches" else 1e3 * value for key, value in each.items()}
            for name, each in found.items()
        }
        self._kept["times"].append({"case": case, "milliseconds": figures})
        self._save()

    def bar(self, what: str, figure: float, bar: float, *, at_least: bool = True) -> None:
        """Tell whether a bar is met; nothing of a figure that was not measured."""
        if math.isnan(figure):
            return
        print(f"{what}: {verdict(figure, bar, at_least=at_least)}")
        met = figure >= bar if at_least else figure <= bar
        one = {"what": what, "figure": figure, "bar": bar, "at least": at_least, "met": met}
        self._kept["bars"].append(one)
        self._kept["counts"]["bars met" if met else "bars missed"] += 1
        self._save()

    def note(self, what: str, told: object) -> None:
        """Tell something that has no bar; nothing of a figure that was not measured."""
        if isinstance(told, float) and math.isnan(told):
            return
        print(f"{what}: {told}")
        self._kept["notes"][what] = told
        self._save()


def copy_bandwidth(nbytes: int, seconds: float) -> float:
    """Bytes a second that a copy of so many bytes reads and writes."""
    return 2 * nbytes / seconds


DEFAULT, FLASH, CUDNN = "attention, torch's choice", "flash attention", "cuDNN attention"


def attended(torch: Any, which: str, Q: Array, K: Array, V: Array, *, causal: bool = False) -> Array:
    """Attention of torch to all keys, by one of its kernels; on a CPU by the kernel that it chooses."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend = torch.nn.functional.scaled_dot_product_attention
    if which == DEFAULT or Q.device.type == "cpu":
        return attend(Q, K, V, is_causal=causal)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if which == FLASH else SDPBackend.CUDNN_ATTENTION):
        return attend(Q, K, V, is_causal=causal)


def dense(torch: Any, *tensors: Array, causal: bool = False) -> Calls:
    """Attention of torch by each of its kernels, of tensors (b, h, n, d)."""
    return {which: partial(attended, torch, which, *tensors, causal=causal) for which in (DEFAULT, FLASH, CUDNN)}


def forward_and_backward(torch: Any, route: Callable[..., Array], tensors: tuple[Array, ...]) -> Any:
    """The gradients of all tensors for ones behind a route."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    Y = route(*leaves)
    return torch.autograd.grad(Y, leaves, torch.ones_like(Y))


def has(package: str) -> bool:
    """Whether a rival is installed; else the program says that it is left out."""
    if find_spec(package) is None:
        print(f"{package} is not installed, and not measured")
        return False
    return True
