"""Compile kernels where a wheel is built, so that whoever installs it has nothing to compile.

The hook of the build backend does so if LEVATTN_KERNELS is set in the environment, as by `make wheel`. Without it the
wheel is for every system, and compiles at the first call. A checkout gets the same by `make kernels`, which runs

    python hatch_build.py [LEVEL ...]

with the levels that this machine can compile for if none is given. Each becomes an archive in the folder
`levattn/_kernels/compiled`.
"""

from __future__ import annotations

import os
import pickle
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
NEEDED = ("numpy", "scipy", "numba", "array-api-compat")  # by the hook, beside hatchling
COMPILED = "levattn/_kernels/compiled"
LINUX = ("manylinux_2_17", "musllinux")

# Record for which types of arguments the kernels are compiled by the calls of `levattn.warmup`
RECORD = """
import pickle, sys
import levattn
levattn.warmup()
found = {}
for name, module in list(sys.modules.items()):
    if name.startswith("levattn._kernels."):
        for kernel in vars(module).values():
            if getattr(kernel, "signatures", None):
                found[kernel.__module__, kernel.__name__] = list(kernel.signatures)
pickle.dump(found, open(sys.argv[1], "wb"))
"""

COMPILE = """
import importlib, pickle, sys
from levattn._kernels.cache import packed
found = {}
for (module, name), signatures in pickle.load(open(sys.argv[1], "rb")).items():
    kernel = getattr(importlib.import_module(module), name)
    for signature in signatures:
        kernel.compile(signature)
    found |= packed(kernel)
pickle.dump(found, open(sys.argv[2], "wb"))
"""


def run(code: str, *arguments: str, **environment: str) -> None:
    """Run a program of the checkout with no code compiled before."""
    with tempfile.TemporaryDirectory() as cache:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
        path = os.pathsep.join([str(ROOT), *sys.path[1:]])
        new = inherited | {"NUMBA_CACHE_DIR": cache, "PYTHONPATH": path} | environment
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, env=new)


def build(levels: list[str], to: Path) -> list[Path]:
    """Make the archives, of the levels named or of all that this machine can compile for; return their paths."""
    sys.path.insert(0, str(ROOT))
    from levattn._kernels.cache import CPU_FEATURES, versions

    kind = {"AMD64": "x86", "x86_64": "x86", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    levels = levels or [level for level in CPU_FEATURES if level.startswith(kind)]
    if not levels or not set(levels) <= set(CPU_FEATURES):
        raise SystemExit(f"no kernels are made for {levels or kind}; expected some of {', '.join(CPU_FEATURES)}")
    to.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        signatures, code = Path(folder, "signatures"), Path(folder, "code")
        run(RECORD, str(signatures))
        paths = []
        for level in levels:
            features = ",".join(f"+{feature}" for feature in CPU_FEATURES[level])
            cpu = "generic" if level == "aarch64" else level
            run(COMPILE, str(signatures), str(code), NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features)
            paths.append(to / f"{level}.zip")
            part = paths[-1].with_suffix(".part")
            with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.comment = versions().encode()
                for name, content in sorted(pickle.loads(code.read_bytes()).items()):
                    archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
            part.replace(paths[-1])
    return paths


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a program
    pass
else:
    from packaging.tags import sys_tags

    def _tag() -> str:
        """Return the tag of this Python and system; on Linux that of an old C library, which is not called."""
        platforms = ((tag.platform, tag) for tag in sys_tags())
        return str(next(tag for name, tag in platforms if "linux" not in name or name.startswith(LINUX)))

    class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
        """The hook: archives and the tag of a wheel that has them."""

        def dependencies(self) -> list[str]:
            """Return what the build needs beside hatchling."""
            return list(NEEDED) if self._asked() else []

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Put the archives into the wheel."""
            if self._asked() and version == "standard":
                self._made = tempfile.TemporaryDirectory()  # until the wheel is written and the process ends
                for path in build([], Path(self._made.name)):
                    build_data["force_include"][str(path)] = f"{COMPILED}/{path.name}"
                build_data["pure_python"], build_data["tag"] = False, _tag()

        def _asked(self) -> bool:
            return os.environ.get("LEVATTN_KERNELS", "0") not in ("", "0")


if __name__ == "__main__":
    for made in build(sys.argv[1:], ROOT / COMPILED):
        print(f"{made}: {made.stat().st_size / 2**20:.1f} MB")
