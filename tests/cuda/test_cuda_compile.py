"""The CUDA sources compile, for what the table says and within what a device can hold. No device is needed.

A release of NVRTC makes the same of the same text. So what it made is on record (`compile_record`), and only sources
that are not are compiled again.

Inside: sources are compiled for cards that are not there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import nvrtc_library
import pytest
from compile_record import Record

import emulator
from levattn._kernels import cuda_source
from levattn._kernels.cuda_compile import OPTIONS, architecture, compiled
from levattn._kernels.cuda_source import FOLDER, KERNELS, expression

ARCHITECTURES = tuple(map(int, os.environ.get("CUDA_ARCHITECTURES", "100,90,80").split(",")))
# Releases of NVRTC, and the cards for which each compiles one of the types of each kernel, of one source for the one
# card and of the next one for the other; for a card that it does not know (100 by 12.0) PTX, as it would there. The
# thorough tests compile all types for all cards, also by 12.4, which is between these two.
RELEASES = (("12.0", (80, 100)), ("12.9", (100, 100)))
ALL_RELEASES = tuple((version, card) for version in ("12.0", "12.4", "12.9", "13.0") for card in (80, 90, 100))
# A release that spills more easily than the newest one, and the card on which it ran: it compiles types that vary one
# parameter of a kernel at a time, and thoroughly all
WITHOUT_SPILLS = ("13.0", 90)
UNUSED = "--diag-suppress=177"  # no warnings of functions that other types call
MOST_STACK = 512  # bytes of a thread: a counter of blocks fits, a tile that missed the registers does not

SOURCES = sorted(path.stem for path in FOLDER.rglob("*.cu"))


@pytest.fixture(scope="module")
def nvrtc() -> Any:
    return nvrtc_library.of_cupy()


@pytest.fixture(scope="module")
def record() -> Iterator[Record]:
    held = Record.read()
    yield held
    held.write()


def recorded_faults(record: Record, nvrtc: Any, source: str, names: tuple[str, ...], card: int) -> list[str]:
    """What is wrong with kernels of a source once they are compiled for a card, as it is on record if it is."""
    code, target = cuda_source.text(f"{source}.cu"), architecture(nvrtc, card)
    text = (code, *names, *OPTIONS, str(MOST_STACK))
    return record.found(
        f"{source} {target}",
        nvrtc_library.name_of(nvrtc),
        text,
        lambda: list(faults_of(nvrtc, code, names, card, UNUSED)),
    )


def faults_of(nvrtc: Any, code: str, names: tuple[str, ...], card: int, *options: str) -> Iterator[str]:
    """What is wrong with kernels once they are compiled for a card."""
    try:
        made = compiled(nvrtc, code, names, architecture(nvrtc, card), ("--ptxas-options=-v", *options))
    except RuntimeError as error:
        yield str(error)
        return
    lowered = {made.names[name]: name for name in names}
    yield from (f"sm_{card}: {line}" for line in made.log.splitlines() if "warning" in line)
    size = r"(\d+) bytes "
    figures = re.findall(
        rf"Function properties for (\w+)\n.*?{size}stack frame, {size}spill stores, {size}spill loads", made.log
    )
    told = {lowered[symbol]: tuple(map(int, sizes)) for symbol, *sizes in figures if symbol in lowered}
    for name in names:
        if name not in told:
            yield f"sm_{card}: the log does not tell of {name}"
            continue
        stack, *spills = told[name]
        if any(spills):
            yield f"sm_{card}: {name} spills {max(spills)} bytes of registers"
        if stack > MOST_STACK:
            yield f"sm_{card}: {name} takes {stack} bytes of stack"


# Three or four words of 255 registers, on these architectures alone: no order of the code that was tried does better
KNOWN = {
    ("latent_tensor", 100): "sm_100: multiply_rows<64, 2> spills 16 bytes of registers",
    ("tensor", 80): "sm_80: tensor_moments<float, float, 128> spills 12 bytes of registers",
}


def one_of_each(source: str, number: int) -> tuple[str, ...]:
    """The C++ name of each kernel of a source, with one of its types."""
    return tuple(expression(name, choices[number % len(choices)]) for name, choices in KERNELS[source].items())


def known_faults(source: str) -> set[str]:
    return {fault for (known, card), fault in KNOWN.items() if source == known and card in ARCHITECTURES}


@pytest.mark.parametrize("source", sorted(KERNELS))
def test_the_newest_release_compiles_each_kernel_without_spills(nvrtc: Any, record: Record, source: str) -> None:
    names = one_of_each(source, -1)
    found = {fault for card in ARCHITECTURES for fault in recorded_faults(record, nvrtc, source, names, card)}
    assert found <= known_faults(source)


@pytest.mark.thorough
@pytest.mark.parametrize("source", sorted(KERNELS))
def test_what_the_table_names_compiles_without_spills(nvrtc: Any, source: str) -> None:
    code, names = cuda_source.text(f"{source}.cu"), emulator.of_the_table(source)
    with ThreadPoolExecutor(2) as pool:
        faults = pool.map(lambda card: list(faults_of(nvrtc, code, names, card)), ARCHITECTURES)
        found = {fault for each in faults for fault in each}
    assert found == known_faults(source)


def varied(source: str) -> tuple[str, ...]:
    """The C++ names of the kernels of a source, with types that differ from the first ones in one place at most."""
    return tuple(
        expression(name, types)
        for name, choices in KERNELS[source].items()
        for types in choices
        if sum(one != other for one, other in zip(types, choices[0], strict=True)) <= 1
    )


@pytest.mark.parametrize(
    "names_of", [varied, pytest.param(emulator.of_the_table, marks=pytest.mark.thorough)], ids=["varied", "all"]
)
@pytest.mark.parametrize("source", sorted(KERNELS))
def test_an_older_release_compiles_without_spills(nvrtc: Any, record: Record, source: str, names_of: Any) -> None:
    version, card = WITHOUT_SPILLS
    names = names_of(source)
    assert recorded_faults(record, nvrtc_library.release(version), source, names, card) == []


def other_code(old: Any, card: int, source: str, names: tuple[str, ...]) -> list[str]:
    """How what a release makes of a source differs from code for a card that it knows, and else from PTX."""
    target = architecture(old, card)
    made = compiled(old, cuda_source.text(f"{source}.cu"), names, target)
    if set(made.names) != set(names):
        return [f"{target}: the names are {sorted(made.names)}"]
    if target == f"sm_{card}":
        return [] if made.code.startswith(b"\x7fELF") else [f"{target}: no code for the card"]
    known = b"\n.target sm_90\n" in made.code and all(name.encode() in made.code for name in made.names.values())
    return [] if known else [f"{target}: no PTX"]


def compiles(record: Record, version: str, card: int, source: str, names: tuple[str, ...]) -> None:
    """A source compiles by a release, to code for a card that it knows and else to PTX of one before."""
    old = nvrtc_library.release(version)
    target = architecture(old, card)
    assert target == f"sm_{card}" or (version in ("12.0", "12.4"), card, target) == (True, 100, "compute_90")
    text = (cuda_source.text(f"{source}.cu"), *names, *OPTIONS)
    key, library = f"{source} {target} code", nvrtc_library.name_of(old)
    assert record.found(key, library, text, lambda: other_code(old, card, source, names)) == []


@pytest.mark.parametrize("source", sorted(KERNELS))
def test_older_releases_compile_each_kernel(nvrtc: Any, record: Record, source: str) -> None:
    place = sorted(KERNELS).index(source)

    def one(number: int) -> None:
        version, cards = RELEASES[number]
        compiles(record, version, cards[place % 2], source, one_of_each(source, number))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(len(RELEASES))))


@pytest.mark.thorough
@pytest.mark.crossed
@pytest.mark.parametrize(("version", "card"), ALL_RELEASES)
@pytest.mark.parametrize("source", sorted(KERNELS))
def test_older_releases_compile_what_the_table_names(
    nvrtc: Any, record: Record, source: str, version: str, card: int
) -> None:
    compiles(record, version, card, source, emulator.of_the_table(source))


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


def test_what_is_on_record_is_not_compiled_and_all_else_is() -> None:
    made: list[str] = []

    def made_now(fault: str) -> Callable[[], list[str]]:
        return lambda: [made.append(fault) or fault]  # type: ignore[func-returns-value]

    def asked(record: Record, text: str, library: str, fault: str) -> list[str]:
        return record.found("source sm_90", library, (text, "kernel"), made_now(fault))

    first = Record({}, "")
    assert asked(first, "code", "13.0.88", "spills") == ["spills"]
    assert asked(Record(first.asked, ""), "code", "13.0.88", "none") == ["spills"]
    assert made == ["spills"]
    others = [("code ", "13.0.88", ""), ("code", "13.0.89", ""), ("code", "13.0.88", "again")]
    for text, library, mode in others:
        assert asked(Record(first.asked, mode), text, library, mode) == [mode]
    assert len(made) == 1 + len(others)


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
        code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        assert code.count("__global__") == len(list(emulator.declared(code))), path.name
