"""Which card there is, and what will run on it: ``python -m tests.gpu.environment`` prints it as JSON.

A process of its own, because a driver that fails may take its process along.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CPU = "the CPU"  # in place of a card, to try the program


def first_line(*command: str) -> str:
    """The first line that a program prints, empty where there is no such program or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.splitlines() or [""])[0].strip()


def sanitizer() -> str:
    """Where compute-sanitizer is, empty where it is not found: toolkits do not put it on the path."""
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    folders = [os.environ.get("PATH", "")] + [
        str(Path(root) / folder) for root in roots if root for folder in ("bin", "extras/compute-sanitizer")
    ]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders)) or ""


def installed(*names: str) -> str:
    """The version of the first of these packages that is installed."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def of_machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "compiler": first_line("g++", "--version"),
        "sanitizer": sanitizer(),
        "torch": installed("torch"),
        "fla": installed("flash-linear-attention"),
        "kvpress": installed("kvpress"),
    }


def of_torch(*, needs_a_card: bool) -> dict[str, Any]:
    """Why torch cannot be tested here, if it cannot."""
    try:
        import torch
    except ImportError as error:
        return {"no torch": f"torch cannot be imported ({error})"}
    if needs_a_card and not torch.cuda.is_available():
        return {"no torch": f"torch {torch.__version__} finds no CUDA device"}
    return {"torch CUDA": torch.version.cuda}


def found() -> dict[str, Any]:
    """The current card of CuPy and the versions of all that runs on it; no `card`, but `why`, where there is none."""
    try:
        import cupy

        runtime = cupy.cuda.runtime
        count = runtime.getDeviceCount()
        if count == 0:
            return {"why": "CuPy finds no CUDA device"}
        properties = runtime.getDeviceProperties(runtime.getDevice())
    except (ImportError, RuntimeError) as error:
        return {"why": f"CuPy finds no CUDA device ({error})"}
    return {
        "card": properties["name"].decode(),
        "cards": count,
        "capability": f"{properties['major']}.{properties['minor']}",
        "memory": int(properties["totalGlobalMem"]),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "CUDA of the driver": runtime.driverGetVersion(),
        "CUDA": runtime.runtimeGetVersion(),
        "NVRTC": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cupy": cupy.__version__,
        **of_machine(),
        **of_torch(needs_a_card=True),
    }


def without_a_card() -> dict[str, Any]:
    return {"card": CPU, "cards": 1, **of_machine(), **of_torch(needs_a_card=False)}


if __name__ == "__main__":
    print(json.dumps(without_a_card() if "--cpu" in sys.argv[1:] else found()))
