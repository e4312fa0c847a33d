"""CUDA kernels from source: their text, the table of kernels and types, and their launch.

The sources lie beside the modules that launch them. They are templates in plain C++17 that need no header of the CUDA
toolkit. The table `KERNELS` lists all kernels and their types, and `launch` refuses others. So the tests compile every
kernel that can run.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from levattn._core.types import dtype_name
from levattn._kernels.cuda_compile import OPTIONS, loaded

__all__ = [
    "KERNELS",
    "OPTIONS",
    "THREADS",
    "TYPES",
    "WORDS",
    "Launch",
    "Tape",
    "expression",
    "is_taping",
    "keeps",
    "launch",
    "layout",
    "namespace",
    "new_array",
    "on_device",
    "pointer_to",
    "run_kernel",
    "shared_limit",
    "stored",
    "taped",
    "text",
    "with_rows",
    "with_steps",
]

FOLDER = Path(__file__).parent

_PLAIN_SHARED = 24 * 1024  # bytes of shared memory, beside those in its source, that a kernel may take without asking

TYPES = {"float64": "double", "float32": "float", "float16": "Half", "bfloat16": "Bfloat"}  # types of stored numbers
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}  # by number of bytes
THREADS = 256  # of a block by default

_NUMBERS = {  # the formats of `struct` by type of parameter; all others are addresses
    "bool": "?",
    "int": "i",
    "unsigned int": "I",
    "long long": "q",
    "unsigned long long": "Q",
    "double": "d",
}

_KEYS = tuple(TYPES.values())
_REALS = ("float", "double")
_ONE_REAL = tuple((real,) for real in _REALS)
_LATENTS = {"float": ("16", "32", "64", "128"), "double": ("32", "128")}  # of a block
_TILES = tuple((real, latents) for real, choices in _LATENTS.items() for latents in choices)
_MULTIPLIED_LATENTS = (("32", "1"), ("32", "2"), ("64", "1"), ("64", "2"), ("128", "1"))  # and tiles of columns
_HALVES = (("Half", "float"), ("Bfloat", "float"))  # stored and computed in
_UNITS = (*((real, real, units) for real, most in (("float", "4"), ("double", "2")) for units in ("1", most)),)
_UNITS += tuple((*pair, "4") for pair in _HALVES)  # channels of a thread
_BACK_UNITS = (*((real, real, units) for real in _REALS for units in ("1", "2")), *((*pair, "2") for pair in _HALVES))
_PACKS = (("float", "4"), ("Half", "8"), ("Bfloat", "8"))  # stored, and how many are read at once
_DECODED = tuple((key, "1", "4", "false") for key, _ in _PACKS)  # and rows of a block, and whether slots are codes
_DECODED += tuple((*p, rows, coded) for coded in ("false", "true") for p in _PACKS for rows in ("1", "2", "4", "8"))
_MULTIPLIED = (*((key, key) for key in ("float", "Half", "Bfloat")), ("Half", "float"), ("Bfloat", "float"))

_NEAR = (("float", "float"), *_HALVES, ("Half", "Half"), ("Bfloat", "Bfloat"))

# source -> kernel -> its types; () for a kernel that is not a template
KERNELS: dict[str, dict[str, tuple[tuple[str, ...], ...]]] = {
    "moments": {"moment_blocks": tuple((key,) for key in _KEYS), "add_blocks": ((),), "measure_unevenness": ((),)},
    "products": {
        "square_rows": tuple(product(_KEYS, _REALS)),
        "rows_in_basis": tuple((key, exact) for key in _KEYS for exact in ("false", "true")),
    },
    "tensor": {
        "tensor_moments": tuple((*pair, columns) for pair in _MULTIPLIED for columns in ("64", "128")),
        "tensor_squares": tuple((*pair, columns) for pair in _MULTIPLIED for columns in ("64", "128")),
        "split_factors": (("64",), ("128",)),
    },
    "scan": {
        "scan_columns": tuple((key, what) for key in _KEYS for what in ("false", "true")),
        "sum_apart": tuple((key,) for key in _KEYS),
        "find_nonfinite": tuple((key,) for key in _KEYS),
    },
    "dense": {"invert_cholesky": ((),), "multiply_bases": ((),)},
    "sketch": {
        **dict.fromkeys(("count_digits", "move_rows", "find_starts"), ((),)),
        **dict.fromkeys(("add_parts", "draw_dense"), _ONE_REAL),
        **dict.fromkeys(("sum_runs", "multiply_rows", "transform_rows"), tuple(product(_KEYS, _REALS))),
    },
    "select": {
        **dict.fromkeys(
            ("count_listed", "fill_listed", "count_digits", "choose_digit", "find_ranked", "bound_left"), _ONE_REAL
        ),
        "find_places": ((),),
        "gather_rows": tuple((word,) for word in WORDS.values()),
    },
    "far": dict.fromkeys(("find_distances", "pick_rows", "far_rows"), _ONE_REAL),
    "decode": {"attend_parts": _DECODED, "join_parts": tuple((key,) for key in _KEYS if key != "double")},
    "labels": {
        **dict.fromkeys(("find_nearest", "level_members"), _ONE_REAL),
        "sum_members": tuple(product(_REALS, ("1", "8"))),
        "merge_members": tuple(product(_REALS, ("4",))),
    },
    "codes": {"open_codes": tuple((key,) for key in _KEYS if key != "double")},
    "measure": {
        "sum_rows": tuple((key,) for key in _KEYS),
        "add_chunks": ((),),
        "factor_queries": _ONE_REAL,
    },
    "slots": {"write_slots": _NEAR, "widen_queries": tuple((row,) for row in dict(_NEAR))},
    "choose": dict.fromkeys(("score_rows", "choose_rows"), _ONE_REAL),
    "renew": {"renew_slots": (("2",), ("4",), ("8",))},  # columns of a lane
    "near": {
        "attend_near": tuple((*pair, columns) for pair in _NEAR for columns in ("2", "4", "8")),
        "join_near": tuple((row,) for row in dict(_NEAR)),
    },
    "heavy": {"square_queries": ((),), "count_heavy": ((),), "fill_heavy": ((),)},
    "latent": {
        "find_first": tuple((key,) for key in _KEYS),
        "weigh_rows": (("double", "double"), ("float", "float"), *_HALVES),
        **dict.fromkeys(("combine_sums", "scan_runs"), (*product(_REALS, ("double",)), ("float", "float"))),
        **dict.fromkeys(("sum_runs", "write_rows"), tuple(tile for tile in _TILES if tile[0] == "double")),
        "join_states": ((),),
    },
    "latent_tensor": {
        **dict.fromkeys(("multiply_runs", "multiply_rows"), _MULTIPLIED_LATENTS),
        "add_slices": tuple((key,) for key in _KEYS if key != "double"),
    },
    "latent_half": dict.fromkeys(
        ("half_runs", "half_rows"), tuple((key, *types) for key in ("Half", "Bfloat") for types in _MULTIPLIED_LATENTS)
    ),
    "latent_back": {
        **dict.fromkeys(("finish_rows", "raise_logits"), _ONE_REAL),
        "trace_runs": _TILES,
        "flow_back": tuple((*tile, alone) for tile in _TILES for alone in ("true", "false")),
    },
    "latent_step": {"step_rows": tuple((key,) for key in _KEYS)},
    "decay": {"scan_decayed": _ONE_REAL},
    "tokens": {
        **dict.fromkeys(("sum_tokens", "weigh_tokens", "write_tokens", "attend_tokens"), _UNITS),
        "scan_tokens": _ONE_REAL,
    },
    "tokens_back": {
        **dict.fromkeys(("trace_tokens", "spread_tokens", "finish_tokens"), _BACK_UNITS),
        "sum_temperatures": _ONE_REAL,
    },
}


def namespace() -> Any:
    """Return the module that makes arrays on the device."""
    return _module()


def _module() -> Any:  # the tests put another in its place
    import cupy

    return cupy


def text(file: str) -> str:
    """Return the text of a source or header with its includes in place; file names are unique."""

    def included(match: re.Match[str]) -> str:
        return text(match[1])

    code = next(FOLDER.rglob(file)).read_text(encoding="utf-8")
    return re.sub(r'^#include "(\w+\.cuh)"$', included, code, flags=re.MULTILINE)


def expression(name: str, types: Sequence[str]) -> str:
    """Return the C++ name of a kernel."""
    return f"{name}<{', '.join(types)}>" if types else name


@cache
def stored(dtype: Any) -> str:
    """Return the C++ type of a dtype of CuPy or torch; words of 16 bits stand for bfloat16, which CuPy lacks."""
    return TYPES["bfloat16" if dtype == np.uint16 else dtype_name(dtype)]


class Launch(NamedTuple):
    """A kernel with its types and its grid."""

    source: str
    name: str
    types: tuple[str, ...]
    grid: tuple[int, ...]  # of three numbers
    threads: int
    shared: int


@dataclass
class Tape:
    """The work of a call on a device: arrays that `new_array` makes, arrays that `on_device` sends, and launches."""

    made: list[tuple[Any, bool]] = field(default_factory=list)  # and whether with zeros
    sent: list[Any] = field(default_factory=list)
    launches: list[tuple[Launch, list[Any]]] = field(default_factory=list)


class _Running(threading.local):
    tape: Tape | None = None


_RUNNING = _Running()


@contextmanager
def taped() -> Iterator[Tape]:
    """Give a tape that notes the work of this thread in the block."""
    before, tape = _RUNNING.tape, Tape()
    try:
        _RUNNING.tape = tape
        yield tape
    finally:
        _RUNNING.tape = before


def is_taping() -> bool:
    """Tell whether this thread notes its calls on a tape."""
    return _RUNNING.tape is not None


def keeps(array: Any) -> None:
    """Note an array on the device whose numbers are the same in every call of the kind."""
    if _RUNNING.tape is not None:
        _RUNNING.tape.sent.append(array)


def new_array(shape: Sequence[int], dtype: Any = np.float64, *, zeros: bool = False) -> Any:
    """Return a new array on the device, for a kernel to write; with `zeros` where it does not."""
    made = (namespace().zeros if zeros else namespace().empty)(shape, dtype)
    if _RUNNING.tape is not None:
        _RUNNING.tape.made.append((made, zeros))
    return made


def on_device(array: Any, dtype: Any = None) -> Any:
    """Return an array on the device, contiguous, and copied there if it is numpy's; None for None."""
    if array is None:
        return None
    found = namespace().asarray(array, dtype, order="C")
    if isinstance(array, np.ndarray):
        keeps(found)
    return found


def with_steps(array: Any, axes: int) -> list[Any]:
    """Return an array, a tensor or None as arguments of a kernel, with the strides of its first axes, in numbers."""
    if array is None:
        return [None] + [0] * axes
    if hasattr(array, "stride"):
        return [array, *array.stride()[:axes]]
    size = array.itemsize
    return [array, *[step // size for step in array.strides[:axes]]]


def with_rows(array: Any) -> Any:
    """Return an array with a contiguous last axis."""
    if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        return namespace().ascontiguousarray(array)
    return array


def launch(
    source: str,
    name: str,
    types: Sequence[str],
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    *,
    threads: int = THREADS,
    shared: int = 0,
) -> None:
    """Run a kernel on the current stream, unless the grid is empty.

    Arguments are arrays or tensors on the device, None for an absent array, and numbers, which take the parameters'
    types.
    """
    if 0 in grid:
        return
    what = Launch(source, name, tuple(types), (*grid, 1, 1)[:3], threads, shared)
    if _RUNNING.tape is not None:
        _RUNNING.tape.launches.append((what, list(arguments)))
    kernel, kinds = _ready(what), layout(source, name)
    given = [_address(x) if kind == "P" else x for kind, x in zip(kinds, arguments, strict=True)]
    kernel(what.grid, (threads, 1, 1), given, shared_mem=shared)


def run_kernel(what: Launch, given: list[Any]) -> None:
    """Run a kernel on the current stream; `given` are numbers, and addresses of arrays."""
    _ready(what)(what.grid, (what.threads, 1, 1), given, shared_mem=what.shared)


def _ready(what: Launch) -> Any:
    """Return a kernel for the current device, which may take its shared memory."""
    kernel = _compiled(what.source, what.name, what.types, namespace().cuda.runtime.getDevice())
    if what.shared > _PLAIN_SHARED and what.shared > kernel.max_dynamic_shared_size_bytes:
        kernel.max_dynamic_shared_size_bytes = what.shared
    return kernel


def pointer_to(array: Any) -> Any:
    """Return where an array or tensor begins, 0 for None, as a kernel takes it."""
    return _address(array)


def _address(array: Any) -> Any:  # the tests put another in its place
    if array is None:
        return 0
    return array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr


@cache
def layout(source: str, name: str) -> str:
    """Return the types of the parameters of a kernel, as `struct` has them."""
    code = re.sub(r"//.*|\\\n", "", text(f"{source}.cu"))
    (listed,) = re.findall(rf"__global__[^;{{}}]* {name}\(([^)]*)\)", code)
    for macro, parameters in re.findall(r"#define (\w+_PARAMETERS) (.*)", code):
        listed = listed.replace(macro, parameters)
    return "".join(_NUMBERS.get(re.sub(r"\s*\w+$", "", each).strip(), "P") for each in listed.split(","))


def shared_limit() -> int:
    """Return the bytes of shared memory that a block of threads may have on the current device."""
    return _shared_limit(namespace().cuda.runtime.getDevice())


@cache
def _shared_limit(device: int) -> int:
    runtime = namespace().cuda.runtime
    return int(runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device))


@cache
def _compiled(source: str, name: str, types: tuple[str, ...], device: int) -> Any:
    if types not in KERNELS[source][name]:
        raise LookupError(f"{expression(name, types)} of {source}.cu is not in the table KERNELS")
    return loaded(namespace(), text(f"{source}.cu"), expression(name, types), device, layout(source, name))
