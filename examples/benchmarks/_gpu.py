"""What the benchmarks of a CUDA device share: options, keys, interleaved medians, the speed of a copy, and figures."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _keys import KINDS, REAL
from _rivals import interleaved, table, verdict

Array = Any
Calls = dict[str, Callable[[], object]]
COPY = "copy"
FEWER = 256  # without a card sizes are so many times smaller
RUN = 1 << 18  # rows that are made; as making all of them would take long, they come over and over


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
        told = {key: value for key, value in vars(self.options).items() if key != "json"}
        self._kept: dict[str, Any] = {"script": Path(script).name, "device": name, "torch": torch.__version__}
        self._kept |= {"options": told, "times": [], "bars": [], "notes": {}}
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
        """Keys (n, d) by their kind: Gaussian, and like those of heads of MiniLM side by side."""
        for kind in ("Gaussian", REAL):
            some = self.torch.from_numpy(KINDS[kind](min(n, RUN), d, "float32"))
            K = self.torch.empty((n, d), device=self.device, dtype=getattr(self.torch, dtype))
            for start in range(0, n, len(some)):
                part = K[start : start + len(some)]
                part.copy_(some[: len(part)])
            yield kind, K

    def copier(self, nbytes: int) -> Callable[[], object]:
        """A copy on the device that reads so many bytes and writes as many."""
        source = self.torch.zeros(nbytes, dtype=self.torch.uint8, device=self.device)
        target = self.torch.empty_like(source)
        return lambda: target.copy_(source)

    def _seconds(self, calls: Calls) -> dict[str, float]:
        """Median seconds of each call by the events of the device; all take their turn in every round.

        A turn is two calls, of which the second counts: the first compiles what is not compiled yet, and warms the
        clocks. Where the device waits for the calling thread, that counts too.
        """
        if self.device != "cuda":
            return interleaved(calls, self.options.rounds)
        times: dict[str, list[float]] = {name: [] for name in calls}
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(self.options.rounds):
            for name, call in calls.items():
                call()
                begin.record()
                call()
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end) / 1e3)
        return {name: statistics.median(values) for name, values in times.items()}

    def times(self, case: str, calls: Calls, against: str) -> dict[str, float]:
        """Median seconds of each call, also told beside those of one of them."""
        seconds = self._seconds(calls)
        print(f"\n{case}")
        table(
            ["", "ms", f"/ {against}"],
            [[name, f"{1e3 * s:.3f}", f"{s / seconds[against]:.2f}"] for name, s in seconds.items()],
        )
        self._kept["times"].append({"case": case, "milliseconds": {name: 1e3 * s for name, s in seconds.items()}})
        self._save()
        return seconds

    def bar(self, what: str, figure: float, bar: float, *, at_least: bool = True) -> None:
        """Tell whether a bar is met."""
        print(f"{what}: {verdict(figure, bar, at_least=at_least)}")
        met = figure >= bar if at_least else figure <= bar
        one = {"what": what, "figure": figure, "bar": bar, "at least": at_least, "met": met}
        self._kept["bars"].append(one)
        self._kept["counts"]["bars met" if met else "bars missed"] += 1
        self._save()

    def note(self, what: str, told: object) -> None:
        """Tell something that has no bar."""
        print(f"{what}: {told}")
        self._kept["notes"][what] = told
        self._save()


def copy_bandwidth(nbytes: int, seconds: float) -> float:
    """Bytes a second that a copy of so many bytes reads and writes."""
    return 2 * nbytes / seconds


def flash(torch: Any, Q: Array, K: Array, V: Array, *, causal: bool) -> Array:
    """Attention of torch with its flash kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(Q, K, V, is_causal=causal)


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
