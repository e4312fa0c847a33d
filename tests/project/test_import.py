"""What ``import levattn`` costs: numpy, array-api-compat and nothing else, whatever is installed.

The time it takes is measured by examples/benchmarks/import_time.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FREE = "numpy, numpy.typing, array_api_compat"  # dependencies that the import may load
OPTIONAL = [
    "cupy",
    "dask",
    "jax",
    "matplotlib",
    "ml_dtypes",
    "pyarrow",
    "rich",
    "safetensors",
    "sklearn",
    "timm",
    "torch",
    "transformers",
    "typer",
    "zarr",
]


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds this package."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )


def loaded_by(code: str) -> set[str]:
    """The top-level packages, beyond the standard library and the free ones, that code loads."""
    found = run(
        f"import json, sys, {FREE}\nbefore = set(sys.modules)\n{code}\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    )
    assert found.returncode == 0, found.stderr
    return set(json.loads(found.stdout)) - set(sys.stdlib_module_names)


def test_import_loads_only_numpy_and_array_api_compat() -> None:
    assert loaded_by("import levattn") == {"levattn"}


def test_listing_the_names_loads_nothing_more() -> None:
    assert loaded_by("import levattn; dir(levattn)") == {"levattn"}


def test_adapters_are_imported_at_their_first_use() -> None:
    pytest.importorskip("sklearn")
    assert loaded_by("import levattn; dir(levattn.integrations)") == {"levattn"}
    assert "sklearn" in loaded_by("import levattn; levattn.integrations.sklearn.LeverageScorer")


# What takes seconds to import, and whoever compiles a model, or has one, has imported: package -> work, module
LATE = {
    "torch": (
        "import torch, levattn.nn; from levattn.attention import latte, pruned_attention, tssa; "
        "X = torch.ones(2, 40, 8); latte(X, X, X); tssa(X); pruned_attention(X, X, X, 0.5); "
        "levattn.nn.TokenStatistics(8).requires_grad_(False)(X)",
        "torch._dynamo",
    ),
    "transformers": ("import levattn.integrations.transformers", "transformers.modeling_utils"),
}


@pytest.mark.parametrize("package", LATE)
def test_work_does_not_wake_what_is_slow_to_import(package: str) -> None:
    pytest.importorskip(package)
    work, module = LATE[package]
    found = run(f"import sys; {work}; assert {module!r} not in sys.modules")
    assert found.returncode == 0, found.stderr


def test_work_on_numpy_arrays_loads_no_optional_package() -> None:
    work = "import numpy as np, levattn; levattn.universal_set(np.eye(5, 3), 0.5)"
    assert loaded_by(work).isdisjoint(OPTIONAL)


def test_import_warns_and_prints_nothing() -> None:
    found = run("import warnings; warnings.simplefilter('error'); import levattn")
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_program_without_its_extra_says_what_to_install(missing: str) -> None:
    found = run(f"import sys; sys.modules[{missing!r}] = None\nfrom levattn.cli import main\nsys.exit(main())")
    assert found.returncode != 0
    assert "levattn[cli]" in found.stderr
    assert "Traceback" not in found.stderr
