"""The steps of a run on a card, in the order of their worth. Each is a process of its own with a limit of its own.

The limits fit all steps into nine minutes on sixteen cores. Steps of a group run side by side: those that wait for
compilers of the host more than for the card. Benchmarks run alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .cases import FAMILIES
from .environment import CPU

PARTS = ("environment", "first", "calls", "kernels", "torch", "contract", "benchmarks", "sanitizer")
QUICK = PARTS[:2]
TESTS = "tests"  # the group of kernels, torch and contract
FOUND_FAULTS = 99  # what compute-sanitizer exits with
NEEDS_A_CARD = "it needs a card"
# Of the host, whatever the card is
NOT_OF_A_CARD = ("test_card.py", "test_cuda_compile.py", "test_cuda_loading.py", "test_emulator.py")
NOT_OF_A_CARD += ("test_gpu_program.py",)
# Files with tests of arrays of CuPy, by folder
CONTRACT = {
    "core": ("arrays", "errors"),
    "attention": ("latte", "operators", "tssa"),
    "sets": ("contract", "misses", "streaming"),
    "sensitivity": ("approximate", "expected", "groups", "online"),
    "states": ("moments", "softmax_state", "state_bytes"),
    "linalg": ("centered", "wide"),
    "sketch": ("sketch",),
    "heavy": ("decoding",),
}
# Tool, and the families of calls that it watches
SANITIZED = (
    ("memcheck", "scores"),
    ("memcheck", "latent", "tokens"),
    ("memcheck", "sets", "sketches"),
    ("memcheck", "pruned"),
    ("racecheck", "latent", "tokens"),
    ("racecheck", "sets", "sketches"),
    ("racecheck", "scores"),
    ("synccheck", "latent", "tokens"),
    ("initcheck", "scores", "sets"),
)
# The order of their worth; each has so many seconds, and says which cases it leaves out
BENCHMARKS = ("scores", "pruned", "latte", "tssa", "decoder", "attention", "streaming", "sketches")
BENCHMARK_SECONDS = 14
# What the CPU runs in place of whole parts
SMALL = {
    "kernels": "tests/cuda/test_cuda_select.py::test_flags_are_set_and_maxima_found",
    "torch": "tests/gpu/test_torch.py::test_columns_of_subnormal_numbers",
    "contract": "tests/core/test_arrays.py",
}


@dataclass(frozen=True)
class Step:
    """A command, and the JSON file in which it leaves counts and figures."""

    part: str
    name: str
    command: tuple[str, ...] = ()
    result: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    untested: str = ""  # why it is not run
    limit: float = 60.0
    group: str = ""  # steps of one run side by side


def on_cpu(known: dict[str, Any]) -> bool:
    return bool(known["card"] == CPU)


def module(part: str, name: str, folder: Path, *arguments: str, before: tuple[str, ...] = (), **more: Any) -> Step:
    """A program of this folder."""
    result = folder / f"{part}-{name}.json"
    program = "loading" if name == "loading" else "calls"
    command = (*before, sys.executable, "-m", f"tests.gpu.{program}", "--json", str(result), *arguments)
    environment = {"OMP_NUM_THREADS": "1", **more.pop("environment", {})}
    return Step(part, f"{part}/{name}", command, result, environment, group=part, **more)


def first(folder: Path, known: dict[str, Any]) -> Iterator[Step]:
    if on_cpu(known):
        yield Step("first", "first/loading", untested=NEEDS_A_CARD)
    else:
        yield module("first", "loading", folder, limit=100)
    if "no torch" in known:
        yield Step("first", "first/calls", untested=known["no torch"])
        return
    where = ("--device", "cpu") if on_cpu(known) else ()
    for family in FAMILIES:
        yield module("first", family, folder, "--first", "--only", family, *where, limit=60)


def calls(folder: Path, known: dict[str, Any]) -> Iterator[Step]:
    why = NEEDS_A_CARD if on_cpu(known) else known.get("no torch", "")
    if why:
        yield Step("calls", "calls", untested=why)
        return
    for family in FAMILIES:
        yield module("calls", family, folder, "--only", family, limit=110)


def pytest_step(part: str, folder: Path, tests: list[str], processes: int, *options: str, **variables: str) -> Step:
    """Some tests, shared out to processes, each of which has a context on the card."""
    result = folder / f"{part}.json"
    shared = ("--numprocesses", str(processes), "--dist", "worksteal") if find_spec("xdist") else ()
    command = (
        *(sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "tests.gpu.outcomes"),
        *("-p", "no:benchmark"),  # which warns of processes, and warnings are errors
        *(*shared, *options, *tests),
    )
    environment = {"OMP_NUM_THREADS": "1", "GPU_OUTCOMES": str(result), **variables}
    return Step(part, f"{part}/tests", command, result, environment, limit=170, group=TESTS)


def cores(share: int) -> int:
    return max(1, (os.cpu_count() or 1) // share)


def kernels(folder: Path, known: dict[str, Any], root: Path) -> Iterator[Step]:
    small = on_cpu(known)
    files = [f"tests/cuda/{each.name}" for each in sorted((root / "tests/cuda").glob("test_*.py"))]
    tests = [SMALL["kernels"]] if small else [each for each in files if Path(each).name not in NOT_OF_A_CARD]
    options = "-m", "cuda and not thorough"
    yield pytest_step("kernels", folder, tests, cores(2), *options, TEST_DEVICE="emulator" if small else "")


def torch(folder: Path, known: dict[str, Any]) -> Iterator[Step]:
    if "no torch" in known:
        yield Step("torch", "torch/tests", untested=known["no torch"])
        return
    small = on_cpu(known)
    tests = [SMALL["torch"] if small else "tests/gpu/test_torch.py"]
    variables = {"TEST_DEVICE": "", "TEST_TORCH": "cpu" if small else "cuda"}
    yield pytest_step("torch", folder, tests, cores(4), "-m", "cuda", **variables)


def contract(folder: Path, known: dict[str, Any]) -> Iterator[Step]:
    """The tests of arrays of any library, on those of the card."""
    small = on_cpu(known)
    files = [f"tests/{name}/test_{each}.py" for name, some in CONTRACT.items() for each in some]
    options = "-m", "not thorough and not cuda", "-k", "cupy or torch-cuda"
    tests = [SMALL["contract"]] if small else files
    yield pytest_step("contract", folder, tests, cores(4), *options, TEST_DEVICE="emulator" if small else "")


def sanitizer(folder: Path, known: dict[str, Any]) -> Iterator[Step]:
    missing = "" if known.get("sanitizer") else "compute-sanitizer is not found, a part of the CUDA toolkit"
    why = NEEDS_A_CARD if on_cpu(known) else missing or known.get("no torch", "")
    if why:
        yield Step("sanitizer", "sanitizer", untested=why)
        return
    for tool, *families in SANITIZED:
        before = (
            *(known["sanitizer"], "--tool", tool, "--error-exitcode", str(FOUND_FAULTS), "--launch-timeout", "0"),
            # what CuPy tries and goes without is no fault; what fails for good is an error of Python
            *("--target-processes", "application-only", "--report-api-errors", "no", "--print-limit", "40"),
        )
        # each array has an allocation of its own, whose bounds the tool sees
        environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        name, options = f"{tool}-{'-'.join(families)}", {"before": before, "environment": environment, "limit": 90}
        yield module("sanitizer", name, folder, "--plain", "--only", *families, **options)


def benchmarks(folder: Path, known: dict[str, Any], root: Path) -> Iterator[Step]:
    why = "the speed of the CPU tells nothing" if on_cpu(known) else known.get("no torch", "")
    if why:
        yield Step("benchmarks", "benchmarks", untested=why)
        return
    for name in BENCHMARKS:
        script, result = root / f"examples/benchmarks/gpu_{name}.py", folder / f"benchmarks-{name}.json"
        command = sys.executable, str(script), "--seconds", str(BENCHMARK_SECONDS), "--json", str(result)
        yield Step("benchmarks", f"benchmarks/{name}", command, result, limit=40)


def all_steps(root: Path, folder: Path, known: dict[str, Any], parts: list[str]) -> list[Step]:
    """The steps of these parts, in the order in which they are run."""
    makers = {
        "first": lambda: first(folder, known),
        "calls": lambda: calls(folder, known),
        "kernels": lambda: kernels(folder, known, root),
        "torch": lambda: torch(folder, known),
        "contract": lambda: contract(folder, known),
        "benchmarks": lambda: benchmarks(folder, known, root),
        "sanitizer": lambda: sanitizer(folder, known),
    }
    return [step for part, make in makers.items() if part in parts for step in make()]
