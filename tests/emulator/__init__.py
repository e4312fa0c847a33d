"""The CUDA kernels on the CPU: compiled with g++, their launches checked as a device would and more strictly.

``emulated`` gives one kernel, ``on_host`` runs all that `cuda_source.launch` is asked for. Arrays are numpy's. A
kernel works on copies between zones of NaN, so that what it reads out of bounds poisons its results and what it
writes there is reported; shared memory is NaN when a block begins. Barriers that cannot fill are reported, and so are
threads that leave the bounds of a C array, touch memory that is not there, divide by zero or shift too far. Arguments
have the parameters' types or are refused. ``order`` is the seed of the order in which threads and blocks take turns
(0: as they are numbered). Where there is a card, the kernels that the library asks for run on it, with arguments that
were checked and copied in the same manner (`card.py`).

What the CPU cannot show: races between blocks that run at once, spinning until another block has come (it hangs),
missing ``__threadfence``, conversions of numbers that are out of range, the last bits of functions other than
+ - * / sqrt and fma, and how much a device can hold (registers: ``test_cuda_compile.py``).
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import index
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from levattn._core.arrays import as_cupy, is_torch
from levattn._kernels import cuda_source

from .card import CHOSEN, LEAST_SHARED, Card, MainMemory, StandIn, device_count, true_card
from .zones import DeviceError, copies_of

__all__ = [
    "DeviceError",
    "Host",
    "Kernel",
    "compiled",
    "declared",
    "emulated",
    "in_orders",
    "kernel_of_text",
    "of_the_table",
    "on_host",
    "stand_in",
]

order = 1

SHIM = Path(__file__).with_name("cuda_host.hpp")
# Headers that no host compiler takes, and what stands in for them
HEADERS = {
    cuda_source.text(f"{name}.cuh"): Path(__file__).with_name(f"{name}.hpp").read_text(encoding="utf-8")
    for name in ("half", "narrow", "copies", "mma", "shared", "tf32", "approximate")
}
CACHE = Path(__file__).parents[2] / ".pytest_cache" / "emulator"
CPU = Path("/proc/cpuinfo")
# Instructions of the processor, without which each fma is a call
THERE = {"avx2", "fma"} & set(CPU.read_text(encoding="utf-8").split() if CPU.exists() else ())
FLAGS = (
    *("-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"),
    *(
        "-w",
        "-fPIC",
        "-fstack-clash-protection",
        "-fvisibility=hidden",
        "-fno-gnu-unique",
    ),  # libraries share no static variable
    "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero",  # reported by the shim
    *sorted(f"-m{name}" for name in THERE),
)

MOST_THREADS = 1024
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
PLAIN_SHARED = 48 * 1024  # more than this a kernel has to ask for

# What may be given for a parameter or a pointer to it
NUMBERS = {
    "bool": ("?",),
    "char": ("i1",),
    "signed char": ("i1",),
    "unsigned char": ("u1", "?"),
    "short": ("i2",),
    "unsigned short": ("u2",),
    "int": ("i4",),
    "unsigned int": ("u4",),
    "long": ("i8",),
    "unsigned long": ("u8",),
    "long long": ("i8",),
    "unsigned long long": ("u8",),
    "float": ("f4",),
    "double": ("f8",),
    "Half": ("u2", "f2"),
    "Bfloat": ("u2",),
    "void": ("f4", "f2", "u2"),  # in a format that another parameter tells
}


@dataclass(frozen=True)
class Declared:
    """A kernel as its source declares it."""

    name: str
    template: str  # with its parameters; empty for a kernel that is no template
    bound: str  # the largest block, or empty


def declared(code: str) -> Iterator[Declared]:
    """The kernels of a source."""
    found = re.finditer(
        r"(?P<template>template\s*<[^>]*>\s*)?(?:static\s+)?__global__\s+(?:void\s+)?"
        r"(?:__launch_bounds__\s*\((?P<bound>(?:[^()]|\([^()]*\))*)\)\s*)?(?:void\s+)?(?P<name>\w+)\s*\(",
        re.sub(r"//.*", "", code),
    )
    for match in found:
        bound = re.split(r",(?![^(]*\))", match["bound"] or "")[0]
        yield Declared(match["name"], (match["template"] or "").strip(), bound.strip())


@cache  # read once for all launches; a test has a folder of its own
def _code_of(folder: Path, source: str) -> str:
    return cuda_source.text(f"{source}.cu")


def emulated(source: str, name: str, types: Sequence[str]) -> Kernel:
    """A kernel of the table `KERNELS`, on the card if there is one."""
    if tuple(types) not in cuda_source.KERNELS[source][name]:
        raise LookupError(f"{cuda_source.expression(name, types)} of {source}.cu is not in the table KERNELS")
    code = _code_of(cuda_source.FOLDER, source)
    kernel = compiled(code, of_the_table(source), f"{source}.cu")[cuda_source.expression(name, types)]
    return kernel if isinstance(place, MainMemory) else _on_card(kernel, place, source, name, tuple(types))


@cache
def _on_card(kernel: Kernel, card: Card, source: str, name: str, types: tuple[str, ...]) -> Kernel:
    return Kernel(kernel.entry, card, card.of_table(source, name, types))


def kernel_of_text(code: str, names: tuple[str, ...], name: str, title: str) -> Kernel:
    """One of the kernels of a source text, on the card if there is one."""
    kernel = compiled(code, names, title)[name]
    if isinstance(place, MainMemory):
        return kernel
    layout = "".join("P" if kind.endswith("*") else np.dtype(NUMBERS[kind][0]).char for kind in kernel.parameters)
    return Kernel(kernel.entry, place, place.of_text(code, names, name, layout))


def of_the_table(source: str) -> tuple[str, ...]:
    """The C++ names of all kernels of a source."""
    table = cuda_source.KERNELS[source]
    return tuple(cuda_source.expression(kernel, each) for kernel, choices in table.items() for each in choices)


@cache
def compiled(code: str, names: tuple[str, ...], title: str = "kernels.cu") -> dict[str, Kernel]:
    """Kernels of a source text, by their C++ names."""
    for header, other in HEADERS.items():
        code = code.replace(header, other)
    bounds = [
        f"{kernel.template} constexpr long long bound_{kernel.name} = {kernel.bound or MOST_THREADS};"
        for kernel in declared(code)
    ]
    entries = [f"emulated::entry_of(&{name}, bound_{name})," for name in names]
    table = "\n".join(
        (
            *(*bounds, "static emulated::Entry emulated_table[] = {", *entries, "};"),
            "emulated::Entry *const emulated::entries = emulated_table;",
        )
    )
    library = _library(
        f'{SHIM.read_text(encoding="utf-8")}\n#line 1 "{title}"\n{code}\n#line 1 "table of {title}"\n{table}\n', title
    )
    return {name: Kernel(Entry(library, k, name)) for k, name in enumerate(names)}


def _library(text: str, title: str) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the CUDA kernels run on the CPU where Linux and g++ are")
    key = hashlib.sha256("\0".join((text, compiler, platform.machine(), *FLAGS)).encode()).hexdigest()[:32]
    path = CACHE / f"{Path(title).stem}-{key}.so"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            code, object_file, built = (Path(folder, f"code.{suffix}") for suffix in ("cpp", "o", "so"))
            code.write_text(text, encoding="utf-8")
            steps = ([*FLAGS, "-c", "-o", object_file, code], ["-shared", "-o", built, object_file])
            for arguments in steps:
                done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(f"g++ does not compile {title}:\n{done.stderr[:8000]}")
            built.replace(path)
    library = ctypes.CDLL(str(path))
    library.emulated_signature.restype = library.emulated_run.restype = ctypes.c_char_p
    library.emulated_bound.restype = ctypes.c_longlong
    library.lock = threading.Lock()  # of the threads, fibers and static variables that its kernels share
    return library


class Entry:
    """A kernel of a library, called with numbers and addresses as a driver calls it."""

    def __init__(self, library: ctypes.CDLL, number: int, name: str) -> None:
        self.name = name
        self.parameters = tuple(library.emulated_signature(number).decode().split(";")[:-1])
        self.bound = library.emulated_bound(number)
        self.max_dynamic_shared_size_bytes = PLAIN_SHARED
        self._library, self._number = library, number

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0) -> None:
        values = [np.asarray(value) for value in args]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        triple = ctypes.c_uint32 * 3
        with self._library.lock:
            failure = self._library.emulated_run(
                self._number,
                triple(*grid),
                triple(*block),
                ctypes.c_ulonglong(shared_mem),
                pointers,
                ctypes.c_ulonglong(order),
            )
        if failure:
            raise DeviceError(f"{self.name}, {failure.decode()}")


class Kernel:
    """A kernel that is called as CuPy's are, with arrays of numpy; it runs in main memory or on a card."""

    def __init__(self, entry: Entry, where: MainMemory | Card | None = None, on_card: Any = None) -> None:
        self.entry, self.name, self.parameters, self.bound = entry, entry.name, entry.parameters, entry.bound
        self.on_card = on_card
        self.max_dynamic_shared_size_bytes = PLAIN_SHARED
        self._where = MainMemory() if where is None else where

    @property
    def was_asked_for_shared_memory(self) -> bool:
        return self.max_dynamic_shared_size_bytes != PLAIN_SHARED

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0) -> None:
        grid, block, shared = self._geometry(grid, block, shared_mem)
        self._check(args)
        copies = copies_of([(k, arg) for k, arg in enumerate(args) if isinstance(arg, np.ndarray) and arg.size])
        with self._where.holding(copies) as starts:
            places = {
                k: start + at for copy, start in zip(copies, starts, strict=True) for k, at in copy.offsets.items()
            }
            values = tuple(
                np.uint64(places.get(k, 0)) if parameter.endswith("*") else args[k]
                for k, parameter in enumerate(self.parameters)
            )
            self._where.launch(self, grid, block, values, shared_mem=shared)
        for copy in copies:
            copy.check(self.name)
            copy.give_back([k for k in copy.offsets if " const*" not in self.parameters[k]])

    def _geometry(
        self, grid: Sequence[int], block: Sequence[int], shared: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        grid, block = (tuple(map(index, sizes)) for sizes in (grid, block))
        shared = index(shared)

        def refuse(what: str) -> None:
            raise DeviceError(f"{self.name}: {what}; it was launched with grid={grid}, block={block}, {shared=}")

        for name, sizes in (("grid", grid), ("block", block)):
            if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
                refuse(f"a {name} has one to three positive dimensions")
        if any(size > most for size, most in zip(grid, MOST_BLOCKS, strict=False)):
            refuse(f"a grid has at most {MOST_BLOCKS} blocks")
        if int(np.prod(block)) > MOST_THREADS or (len(block) == 3 and block[2] > 64):
            refuse(f"a block has at most {MOST_THREADS} threads, 64 of them in z")
        if int(np.prod(block)) > self.bound:
            refuse(f"its __launch_bounds__ are {self.bound} threads")
        if not 0 <= shared <= self._where.shared_limit:
            refuse(f"a block has at most {self._where.shared_limit} bytes of shared memory")
        if shared > self.max_dynamic_shared_size_bytes:
            refuse(f"its max_dynamic_shared_size_bytes are {self.max_dynamic_shared_size_bytes}")
        one = (1, 1)
        return (*grid, *one)[:3], (*block, *one)[:3], shared

    def _check(self, args: Sequence[Any]) -> None:
        if len(args) != len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments, got {len(args)}")
        for k, (parameter, arg) in enumerate(zip(self.parameters, args, strict=True)):
            if fault := (_pointer_fault if parameter.endswith("*") else _scalar_fault)(parameter, arg):
                raise TypeError(f"argument {k} of {self.name} is {parameter}: {fault}")


class Launched:
    """A kernel as `cuda_source.launch` calls it, with numbers that get the types of its parameters by `struct`."""

    def __init__(self, kernel: Kernel, layout: str) -> None:
        self.__dict__.update(kernel=kernel, layout=layout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.kernel, name, value)

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0) -> None:
        given = tuple(typed(kind, value) for kind, value in zip(self.layout, args, strict=True))
        self.kernel(grid, block, given, shared_mem=shared_mem)


def typed(kind: str, value: Any) -> Any:
    """A number as a kernel gets it, in a format of `struct`; an array, or zero, for an address."""
    if kind == "P":
        return np.intp(0) if value is None else value
    return np.dtype(kind).type(*struct.unpack(kind, struct.pack(kind, value)))


def _kinds(parameter: str) -> tuple[np.dtype, ...]:
    kind = re.sub(r"( const)?\*$", "", parameter)
    if kind not in NUMBERS:
        raise TypeError(f"the emulator knows no parameters of type {parameter}; add it to NUMBERS")
    return tuple(map(np.dtype, NUMBERS[kind]))


def _pointer_fault(parameter: str, arg: Any) -> str | None:
    kinds = _kinds(parameter)
    wanted = f"expected a numpy array of {' or '.join(map(str, kinds))}, or NOTHING"
    if isinstance(arg, np.intp) and arg == 0:
        return None
    if not isinstance(arg, np.ndarray):
        return f"{wanted}, got {arg!r} of type {type(arg).__name__}"
    if arg.dtype not in kinds:
        return f"{wanted}, got one of {arg.dtype}"
    if not arg.flags.aligned:
        return "the array is not aligned, which a device cannot read; copy it"
    if not parameter.endswith(" const*") and not arg.flags.writeable:
        return "the array is read-only; copy it, or declare the parameter const"
    return None


def _scalar_fault(parameter: str, arg: Any) -> str | None:
    kinds = _kinds(parameter)
    if isinstance(arg, np.generic) and arg.dtype in kinds:
        return None
    return f"expected a numpy scalar of {' or '.join(map(str, kinds))}, got {arg!r} of type {type(arg).__name__}"


class Host:
    """numpy with the few names of CuPy that the library uses; memory that nobody has written is NaN."""

    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0))

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(*args: Any, **options: Any) -> np.ndarray:
        return _poisoned(np.empty(*args, **options))

    @staticmethod
    def empty_like(*args: Any, **options: Any) -> np.ndarray:
        return _poisoned(np.empty_like(*args, **options))

    @staticmethod
    def asnumpy(array: np.ndarray) -> np.ndarray:
        return np.asarray(array)


def _poisoned(array: np.ndarray) -> np.ndarray:
    array.ravel("K").view(np.uint8)[...] = 0xFF
    return array


def on_host(monkeypatch: pytest.MonkeyPatch, seed: int = 1) -> Host:
    """Let `cuda_source` take arrays of numpy, and run kernels in main memory or on a card, until the test ends.

    In main memory a block has no more shared memory than on any card, so that all launches fit there.
    """
    host = Host()

    def of_host(source: str, name: str, types: tuple[str, ...], _device: int) -> Launched:
        return Launched(emulated(source, name, types), cuda_source.layout(source, name))

    monkeypatch.setattr(cuda_source, "_module", lambda: host)
    monkeypatch.setattr(cuda_source, "_compiled", of_host)
    monkeypatch.setattr(cuda_source, "_address", lambda array: as_cupy(array) if is_torch(array) else array)
    monkeypatch.setattr(cuda_source, "_shared_limit", lambda _device: place.shared_limit)
    monkeypatch.setattr(MainMemory, "shared_limit", LEAST_SHARED)
    monkeypatch.setattr(sys.modules[__name__], "order", seed)
    return host


def in_orders(function: Any, *args: Any) -> Any:
    """What a function returns, which has the same bits in every order in which threads and blocks take turns.

    A card chooses the order itself: there the function is called again and again.
    """
    global order
    results = []
    for seed in (0, 1, 5):
        order = seed
        result = function(*args)
        results.append(result if isinstance(result, tuple) else (result,))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    return result


def stand_in() -> Card:
    """A card whose memory is main memory, and whose kernels are those of the emulator."""

    def of_table(source: str, name: str, types: tuple[str, ...]) -> Entry:
        code = cuda_source.text(f"{source}.cu")
        return compiled(code, of_the_table(source), f"{source}.cu")[cuda_source.expression(name, types)].entry

    return Card(StandIn(), of_table, lambda code, names, name, _layout: compiled(code, names)[name].entry)


if CHOSEN not in ("", "emulator", "stand-in"):
    raise ValueError(
        f"TEST_DEVICE is {CHOSEN!r}; expected 'emulator', 'stand-in', or nothing: a card where there is one"
    )

# Where kernels run that the library asks for
place: MainMemory | Card = stand_in() if CHOSEN == "stand-in" else true_card() if device_count() else MainMemory()
