"""Compiled kernels that travel with a wheel: an archive for each level of processors, made by `hatch_build.py`.

Code is looked up by the kernel's name, its stamp and the types of its arguments. Numba made it for one version of
Numba and of Python, one system, and one level of processors. Where any of these differs, Numba compiles the kernels.
"""

from __future__ import annotations

import hashlib
import io
import platform
import sys
import sysconfig
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba

ARCHIVES = Path(__file__).with_name("compiled")
_V2 = ("cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
# The features that a level needs, in LLVM's names; the best level comes first
CPU_FEATURES = {
    "x86-64-v4": (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": _V3,
    "aarch64": ("neon",),
}
_MACHINES = {"x86_64": "x86-64", "AMD64": "x86-64", "aarch64": "aarch64", "arm64": "aarch64"}


def versions() -> str:
    """Return the versions on which code depends, besides the processor."""
    python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return f"{sys.platform}, {python}, Numba {numba.__version__}, llvmlite {llvmlite.__version__}"


def entry(function: Any, stamp: str, signature: Any) -> str:
    """Return the archive's name for the code of a function for some types of arguments."""
    whole = f"{function.__module__}.{function.__qualname__} {stamp} {signature}"
    return hashlib.sha256(whole.encode()).hexdigest()


def shipped(name: str) -> bytes | None:
    """Return the code with a name of `entry`, or None."""
    archive = _archive()
    if archive is not None:
        with suppress(Exception):  # a damaged archive, or one without this code
            return archive.read(name)
    return None


@cache
def _archive() -> zipfile.ZipFile | None:
    """Return the archive for this processor, or None if this Numba and this Python did not make one."""
    if numba.config.CPU_NAME is not None or numba.config.CPU_FEATURES is not None:  # for another processor
        return None
    machine = _MACHINES.get(platform.machine(), "none")
    has: dict[str, bool] = llvm.get_host_cpu_features()
    for level, needed in CPU_FEATURES.items():
        # only the level whose vectors have the width by which the library splits its work, not all that run here
        wide = bool(has.get("avx512f")) == ("avx512f" in needed)
        if level.startswith(machine) and wide and all(has.get(feature) for feature in needed):
            with suppress(OSError, zipfile.BadZipFile):
                content = (ARCHIVES / f"{level}.zip").read_bytes()  # not an open file, which forks would share
                archive = zipfile.ZipFile(io.BytesIO(content))
                return archive if archive.comment == versions().encode() else None
    return None
