"""The steps of a run on a card, each of which is a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .environment import EMULATOR

PARTS = ("environment", "kernels", "contract", "torch", "sanitizer", "benchmarks")
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND_FAULTS = 99  # what compute-sanitizer exits with
# A few tests of every folder of kernels; those that take the library along have memory from CuPy
SANITIZED = {
    "test_cuda.py": ("test_sums_are_those_of_the_cpu_in_pairs", "test_compensated_products_are_rounded_once"),
    "test_cuda_tensor.py": ("test_columns_and_rows_of_all_sizes",),
    "test_cuda_latent.py": ("test_arrays_of_any_layout", "test_runs_as_long_as_they_are"),
    "test_cuda_latent_step.py": ("test_arrays_of_any_layout",),
    "test_cuda_tokens.py": ("test_arrays_of_any_layout", "test_more_runs_than_a_scan_takes_at_a_time"),
    "test_cuda_select.py": ("test_flags_are_set_and_maxima_found", "test_heads_of_which_few_have_ties"),
    "test_cuda_sketch.py": ("test_chunks_add_up", "test_states_take_rows_from_anywhere_and_stay_on_the_device"),
    "test_cuda_heavy.py": ("test_entries_of_chunks_of_keys_are_in_one_order",),
    "test_cuda_library.py": ("test_scores_stay_on_the_device", "test_chunks_of_both_kinds_and_merges"),
}
# What the emulator runs in place of whole parts
SMALL = {
    "kernels": {
        "test_cuda_select.py": ("test_flags_are_set_and_maxima_found", "test_no_rows_are_gathered"),
        "test_cuda_library.py": ("test_scores_stay_on_the_device",),
    },
    "contract": {"core/test_arrays.py": ()},
}


@dataclass(frozen=True)
class Step:
    """A command, and where it leaves what is to be kept: counts of tests (.xml) or figures (.json)."""

    part: str
    name: str
    command: tuple[str, ...] = ()
    result: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    skipped: str = ""  # why it is not run


def pytest_step(
    part: str, name: str, tests: list[str], folder: Path, *options: str, before: tuple[str, ...] = (), **variables: str
) -> Step:
    result = folder / f"{part}-{name.replace('/', '-')}.xml"
    command = (
        *(*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={result}"),
        *(*options, *tests),
    )
    return Step(part, f"{part}/{name}", command, result, {"OMP_NUM_THREADS": "1", **variables})


def shared_out() -> tuple[str, ...]:
    """Options by which a few processes share a file: each has a context on the card."""
    return "--numprocesses", str(min(4, os.cpu_count() or 1))


def chosen(file: str, names: tuple[str, ...]) -> list[str]:
    return [f"{file}::{name}" for name in names] or [file]


def kernels(root: Path, folder: Path, known: dict[str, Any]) -> Iterator[Step]:
    mark = "-m", "cuda and not thorough"
    if known["card"] == EMULATOR:
        for file, names in SMALL["kernels"].items():
            tests = chosen(f"tests/cuda/{file}", names)
            yield pytest_step("kernels", file, tests, folder, *mark, TEST_DEVICE="emulator")
        return
    for path in sorted((root / "tests/cuda").glob("test_*.py")):
        tests = [f"tests/cuda/{path.name}"]
        yield pytest_step("kernels", path.name, tests, folder, *mark, *shared_out(), TEST_DEVICE="")


def contract(root: Path, folder: Path, known: dict[str, Any]) -> Iterator[Step]:
    """The tests of arrays of any library, on those of the card."""
    emulated = known["card"] == EMULATOR
    tests = [f"tests/{file}" for file in SMALL["contract"]] if emulated else ["tests"]
    options = ("-m", "not thorough and not cuda", "-k", "cupy or torch-cuda", *(() if emulated else shared_out()))
    yield pytest_step("contract", "cupy", tests, folder, *options, TEST_DEVICE="emulator" if emulated else "")


def torch(root: Path, folder: Path, known: dict[str, Any]) -> Iterator[Step]:
    if "no torch" in known:
        yield Step("torch", "torch/test_torch.py", skipped=known["no torch"])
    else:
        yield pytest_step("torch", "test_torch.py", ["tests/gpu/test_torch.py"], folder, "-m", "cuda", TEST_DEVICE="")


def sanitizer(root: Path, folder: Path, known: dict[str, Any]) -> Iterator[Step]:
    if known["card"] == EMULATOR or not known["sanitizer"]:
        found = "compute-sanitizer is not found, a part of the CUDA toolkit"
        yield Step("sanitizer", "sanitizer", skipped=found if known["card"] != EMULATOR else "it needs a card")
        return
    for tool in TOOLS:
        before = (
            *(known["sanitizer"], "--tool", tool, "--error-exitcode", str(FOUND_FAULTS), "--launch-timeout", "0"),
            # what CuPy tries and goes without is no fault; what fails for good is an error of Python
            *("--target-processes", "application-only", "--report-api-errors", "no"),
        )
        for file, names in SANITIZED.items():
            options = "-m", "cuda and not thorough", "-p", "tests.gpu.allocator"
            what = "sanitizer", f"{tool}/{file}", chosen(f"tests/cuda/{file}", names), folder, *options
            yield pytest_step(*what, before=before, TEST_DEVICE="", TEST_ZONE="0")


def benchmarks(root: Path, folder: Path, known: dict[str, Any]) -> Iterator[Step]:
    if known["card"] == EMULATOR:
        yield Step("benchmarks", "benchmarks", skipped="the speed of the emulator tells nothing")
        return
    for path in sorted((root / "examples/benchmarks").glob("gpu_*.py")):
        result = folder / f"benchmarks-{path.stem}.json"
        command = sys.executable, str(path), "--json", str(result)
        yield Step("benchmarks", f"benchmarks/{path.name}", command, result)


def all_steps(root: Path, folder: Path, known: dict[str, Any], parts: list[str]) -> list[Step]:
    """The steps of these parts, in the order in which they are run."""
    makers = (kernels, contract, torch, sanitizer, benchmarks)
    return [step for make in makers if make.__name__ in parts for step in make(root, folder, known)]
