"""What an installed wheel holds and does where nothing but its runtime dependencies is installed.

``make package`` and ``make wheel`` run it as ``python -I tests/installed.py`` from another folder, so that it is the
wheel that is imported. It names the first thing that is wrong.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import pkgutil
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "levattn"

# Modules that cannot be imported without an optional package, and the extra that each must name. Parts of the program
# are imported by the program alone, which has a check of its own.
NEEDS = {
    "levattn.nn": "torch",
    "levattn.integrations.kvpress": "kvpress",
    "levattn.integrations.sklearn": "sklearn",
    "levattn.integrations.timm": "timm",
    "levattn.integrations.transformers": "transformers",
}
PROGRAM = "levattn.cli."
FOR_TENSORS = {  # which tensors alone call for
    "levattn._kernels.latent.torch",
    "levattn._kernels.tensors",
    "levattn._kernels.tokens.torch",
    "levattn.attention.tokens.torch",
}
COMPILED = "levattn/_kernels/compiled/"


def check(holds: object, what: str) -> None:
    """Leave with a message unless something holds."""
    if not holds:
        sys.exit(f"the installed package: {what}")


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def optional_distributions() -> set[str]:
    """The names of the distributions that extras ask for."""
    required = importlib.metadata.requires("levattn") or []
    named = {re.split(r"[^\w.-]", text)[0] for text in required if "extra ==" in text}
    return {normalized(name) for name in named} - {"levattn"}


def check_environment() -> None:
    installed = {normalized(found.name) for found in importlib.metadata.distributions()}
    check(optional_distributions(), "its metadata names no extra")
    extra = optional_distributions() & installed
    check(not extra, f"there are optional packages beside it, so that this says nothing: {', '.join(sorted(extra))}")


def check_files() -> None:
    """All sources and data are there, and nothing else but compiled kernels."""
    files = importlib.metadata.files("levattn") or []
    packed = {file.as_posix() for file in files if "__pycache__" not in file.parts and file.parts[0] == "levattn"}
    sources = {path.relative_to(SOURCES.parent) for path in SOURCES.rglob("*") if path.is_file()}
    expected = {path.as_posix() for path in sources if not {"__pycache__", "compiled"} & set(path.parts)}
    packed = {name for name in packed if not name.startswith(COMPILED)}
    check(packed == expected, f"these files are in the wheel or in the sources only: {sorted(packed ^ expected)}")
    for kind in ("py.typed", ".cu", ".cuh", ".npz"):
        check(any(name.endswith(kind) for name in packed), f"it has no {kind} file")


def check_import() -> None:
    before = set(sys.modules)
    levattn = importlib.import_module("levattn")
    check(SOURCES not in Path(levattn.__file__ or "").parents, "what was imported are the sources, not the wheel")
    check(levattn.__version__ == importlib.metadata.version("levattn"), "its version is not that of its metadata")
    loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
    late = loaded & {"scipy", "numba", "llvmlite"}
    check(not late, f"import levattn loads {', '.join(sorted(late))}")


def public_modules() -> Iterator[str]:
    levattn = importlib.import_module("levattn")
    for module in pkgutil.walk_packages(levattn.__path__, "levattn.", onerror=lambda _: None):
        if not any(part.startswith("_") for part in module.name.split(".")) and not module.name.startswith(PROGRAM):
            yield module.name


def check_modules() -> None:
    found = [name for name in public_modules() if name not in FOR_TENSORS]
    check(set(NEEDS) <= set(found), f"modules are missing: {sorted(set(NEEDS) - set(found))}")
    for name in found:
        needed = next((extra for module, extra in NEEDS.items() if f"{name}.".startswith(f"{module}.")), None)
        if needed is None:
            importlib.import_module(name)
        else:
            refuses(lambda name=name: importlib.import_module(name), needed, f"import {name}")


def refuses(call: Callable[[], object], extra: str, what: str) -> None:
    """Check that a call says which extra to install."""
    try:
        call()
    except ImportError as error:
        check(f'pip install "levattn[{extra}]"' in str(error), f"{what} does not name its extra: {error}")
    else:
        check(False, f"{what} works without the extra {extra}")


def check_program() -> None:
    program = Path(sysconfig.get_path("scripts")) / "levattn"
    ran = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    said = 'pip install "levattn[cli]"' in ran.stderr and "Traceback" not in ran.stderr
    check(ran.returncode and said, f"the program without its extra says: {ran.stderr}")


def check_sets(folder: Path) -> None:
    import numpy as np

    import levattn

    model = levattn.datasets.planted(256, 8, rng=0)
    keys = model.keys
    found = levattn.universal_set(keys, 0.1)
    check(np.array_equal(found.indices, model.indices), "universal_set does not find the planted keys")
    heavy = levattn.heavy_attention(model.queries, keys, 0.1)
    check(heavy.entries.nnz == len(model.indices), "heavy_attention does not find the planted entries")
    stream = levattn.StreamingUniversalSet(0.1).update(keys[:100]).update(keys[100:])
    check(np.array_equal(stream.result().indices, found.indices), "the streamed set differs")
    np.save(folder / "keys.npy", keys)
    source = levattn.open_keys(folder / "keys.npy")
    check(np.array_equal(levattn.universal_set(source, 0.1).indices, found.indices), "the set of a file differs")
    check(levattn.datasets.minilm().keys.shape[-2:] == (512, 32), "the keys of the demonstration are not there")
    profiles = importlib.resources.files("levattn") / "data" / "profiles"
    check((profiles / "smollm2-135m-instruct.json").is_file(), "the profile of SmolLM2 is not there")


def check_attention() -> None:
    import numpy as np

    from levattn.attention import latte, pruned_attention, tssa

    rng = np.random.default_rng(0)
    Q, K, V = rng.standard_normal((3, 2, 40, 8))
    for name, output in (
        ("latte", latte(Q, K, V)),
        ("tssa", tssa(V)),
        ("pruned_attention", pruned_attention(Q, K, V, 10)),
    ):
        check(output.shape == V.shape and np.isfinite(output).all(), f"{name} returns {output}")


def check_compiled(expected: bool) -> None:
    """There are compiled kernels where they are expected, and with them nothing was compiled."""
    files = importlib.metadata.files("levattn") or []
    there = any(file.as_posix().startswith(COMPILED) for file in files)
    check(there == expected, f"it has {'' if there else 'no '}compiled kernels")
    if there:
        modules = [module for name, module in sys.modules.items() if name.startswith("levattn._kernels.")]
        kernels = [value for module in modules for value in vars(module).values() if hasattr(value, "stats")]
        missed = sorted({kernel.__name__ for kernel in kernels if sum(kernel.stats.cache_misses.values())})
        check(kernels and not missed, f"these kernels were compiled, although others came with it: {missed}")


def check_extras(folder: Path) -> None:
    import numpy as np

    import levattn
    from levattn import distributed, plots

    scores = np.array([1.0, 0.5, 0.5])
    refuses(lambda: plots.LeverageSpectrumDisplay.from_scores(scores), "plot", "a picture")
    refuses(lambda: distributed.dask.universal_set(None, 0.1), "dask", "a set of a dask array")
    (folder / "keys.parquet").write_bytes(b"")
    refuses(lambda: levattn.universal_set(levattn.open_keys(folder / "keys.parquet"), 0.1), "io", "a .parquet file")


def main() -> None:
    check_environment()
    check_files()
    check_import()
    check_modules()
    check_program()
    with tempfile.TemporaryDirectory() as folder:
        check_sets(Path(folder))
        check_extras(Path(folder))
    if "--compiled" in sys.argv:  # else it takes long, and finds no more than the imports of its modules
        check_attention()
    check_compiled("--compiled" in sys.argv)
    sys.stdout.write(f"levattn {importlib.metadata.version('levattn')} works with its runtime dependencies alone.\n")


if __name__ == "__main__":
    main()
