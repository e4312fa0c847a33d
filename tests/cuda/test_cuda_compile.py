"""The CUDA sources compile, for what the table says and within what a device can hold. No device is needed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import emulator
from levattn._kernels import cuda_source
from levattn._kernels.cuda_source import FOLDER, KERNELS, OPTIONS

# 100 compiles as well, and takes as long as the others together: CUDA_ARCHITECTURES=100,90,80 in the environment.
ARCHITECTURES = tuple(map(int, os.environ.get("CUDA_ARCHITECTURES", "90,80").split(",")))
MOST_STACK = 512  # bytes of a thread: a counter of blocks fits, a tile that missed the registers does not

SOURCES = sorted(path.stem for path in FOLDER.rglob("*.cu"))


@pytest.fixture(scope="module")
def nvrtc() -> Any:
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"CuPy or NVRTC is not installed: {error}")
    return nvrtc


def faults_of(nvrtc: Any, code: str, names: tuple[str, ...], architecture: int) -> Iterator[str]:
    """What is wrong with kernels once they are compiled for an architecture."""
    program = nvrtc.createProgram(code, "kernels.cu", (), ())
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v"))
        except nvrtc.NVRTCError:
            yield f"sm_{architecture}: {nvrtc.getProgramLog(program)}"
            return
        log = nvrtc.getProgramLog(program)
        lowered = {nvrtc.getLoweredName(program, name): name for name in names}
    finally:
        nvrtc.destroyProgram(program)
    yield from (f"sm_{architecture}: {line}" for line in log.splitlines() if "warning" in line)
    size = r"(\d+) bytes "
    figures = re.findall(
        rf"Function properties for (\w+)\n.*?{size}stack frame, {size}spill stores, {size}spill loads", log
    )
    told = {lowered[symbol]: tuple(map(int, sizes)) for symbol, *sizes in figures if symbol in lowered}
    for name in names:
        if name not in told:
            yield f"sm_{architecture}: the log does not tell of {name}"
            continue
        stack, *spills = told[name]
        if any(spills):
            yield f"sm_{architecture}: {name} spills {max(spills)} bytes of registers"
        if stack > MOST_STACK:
            yield f"sm_{architecture}: {name} takes {stack} bytes of stack"


@pytest.mark.parametrize("source", sorted(KERNELS))
def test_what_the_table_names_compiles_without_spills(nvrtc: Any, source: str) -> None:
    code, names = cuda_source.text(f"{source}.cu"), emulator.of_the_table(source)
    with ThreadPoolExecutor(2) as pool:
        faults = pool.map(lambda architecture: list(faults_of(nvrtc, code, names, architecture)), ARCHITECTURES)
        assert not [fault for each in faults for fault in each]


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("__global__ void fill(double *x) { x[0] = y; }", "undefined"),
        ("__global__ void fill(double *x) { int unused; x[0] = 1; }", "warning"),
        (
            "__global__ void fill(double *x, int k) { double a[99]; a[k] = x[k]; x[1] = a[x[0] > 0]; }",
            "792 bytes of stack",
        ),
        (
            "__global__ void __launch_bounds__(1024, 2) fill(double *x) {\n"
            "    double a[64];\n"
            "    for (int i = 0; i < 64; ++i) a[i] = x[i];\n"
            "    for (int k = 0; k < 9; ++k) for (int i = 0; i < 64; ++i) a[i] = fma(a[i], a[63 - i], x[i + k]);\n"
            "    for (int i = 0; i < 64; ++i) x[i] = a[i];\n"
            "}",
            "spills",
        ),
    ],
    ids=["error", "warning", "stack", "spills"],
)
def test_the_check_finds(nvrtc: Any, code: str, fault: str) -> None:
    assert fault in "\n".join(faults_of(nvrtc, code, ("fill",), ARCHITECTURES[0]))


def test_the_table_names_the_sources() -> None:
    assert sorted(KERNELS) == SOURCES


@pytest.mark.parametrize("source", SOURCES)
class TestSource:
    def test_its_kernels_are_those_of_the_table(self, source: str) -> None:
        kernels = list(emulator.declared(cuda_source.text(f"{source}.cu")))
        assert sorted(kernel.name for kernel in kernels) == sorted(KERNELS.get(source, ()))
        for kernel in kernels:
            parameters = kernel.template.count(",") + 1 if kernel.template else 0
            assert {len(types) for types in KERNELS[source][kernel.name]} == {parameters}, kernel.name

    def test_its_kernels_say_how_large_a_block_may_be(self, source: str) -> None:
        """Without, a block may need more registers than there are, which only a device would tell."""
        assert not [kernel.name for kernel in emulator.declared(cuda_source.text(f"{source}.cu")) if not kernel.bound]

    def test_it_includes_headers_of_the_folder_alone(self, source: str) -> None:
        assert "#include" not in cuda_source.text(f"{source}.cu")


def test_no_kernel_escapes_the_search() -> None:
    for path in FOLDER.rglob("*.cu*"):
        code = re.sub(r"//.*", "", path.read_text())
        assert code.count("__global__") == len(list(emulator.declared(code))), path.name
