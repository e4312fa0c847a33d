"""Which tests are left to `make test-all` and `make cuda`, and which files are run first: a plugin of pytest.

Of large tables of parameters those items are left to `make test-all` that vary more than one axis at once. A test of
several axes (decorators `parametrize`) keeps all of its items if they are few, or if it is marked `crossed`, because
what it looks for lies in the combinations. Else an item that departs from the first value of more than one axis is
thorough. So are storages of which another width is among the rest. Long lists of named keys are dealt out: each test
of a file has the first and a quarter of them, and the next test the next quarter.

Tests of the CUDA kernels and of what else there is for devices, in the folders `cuda` and `gpu`, are
marked `cuda`: `make cuda` runs them. The contract on CuPy arrays, which the emulator runs, is among all others.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import strategies

# A table of more items varies one axis at a time
FEW = 8
# A longer list of named keys is dealt out in so many parts
MANY, PARTS = 16, 4
# What these are stored as has representatives: other widths of the same kind of array
OTHER_STORAGE = {
    "torch-float64",
    "torch-float16",
    "strict-float32",
    "jax-float64",
    "jax-float16",
    "cupy-float64",
    "cupy-float16",
}

# Files that were measured to take longest, so that no process ends with one of them; but first one that compiles most
# kernels, and beside it, in another process, those that need others. So do sources for cards, and sources for the CPU.
FIRST = (
    *("test_routes", "test_tssa_torch", "test_transformers", "test_prune", "test_pruned", "test_cli", "test_plots"),
    *("test_streaming", "test_contract", "test_exact", "test_sparse", "test_sensitivity", "test_decoding"),
    *("test_passes", "test_sketch", "test_undecided", "test_state_bytes", "test_linalg", "test_accuracy"),
    *("test_misses", "test_operators", "test_compiled", "test_found", "test_approximate", "test_wide"),
    *("test_causality", "test_latte", "test_latent_torch", "test_io", "test_cli_inside", "test_cli_contexts"),
    *("test_transformations", "test_evaluate", "test_shared_states", "test_cache_operations", "test_compress"),
    *("test_context_files", "test_coverage", "test_causal", "test_streamed_sample", "test_import", "test_readme"),
    *("test_cuda_compile", "test_cuda_sketch", "test_emulator", "test_cuda_library", "test_cuda", "test_cuda_latent"),
    *("test_cuda_tokens", "test_cuda_devices", "test_gpu_program", "test_cuda_costs", "test_cuda_ill_conditioned"),
)


def is_of_kernels(path: Path) -> bool:
    """Whether a file has tests of the CUDA kernels one by one, or of a card."""
    return path.parent.name in ("cuda", "gpu")


def departs(item: Any, first: Any) -> int:
    """Of how many axes the item has another value than the first."""
    axes = [marker.args[0] for marker in item.iter_markers("parametrize")]
    names = [axis.replace(",", " ").split() if isinstance(axis, str) else list(axis) for axis in axes]
    value, base = item.callspec.params, first.callspec.params
    return sum(any(name in value and value[name] is not base[name] for name in axis) for axis in names)


def dealt_places(same: list[Any]) -> dict[Any, int]:
    """The places of the named keys of a test in their list, if that is long."""
    for axis in ("kind", "name"):
        values = list(dict.fromkeys(str(other.callspec.params.get(axis)) for other in same))
        if len(values) > MANY and (axis == "kind" or set(values) <= set(strategies.CASES)):
            return {other: values.index(str(other.callspec.params[axis])) for other in same}
    return {}


class Tiers:
    """The hook that marks and sorts items."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        order = {name: place for place, name in enumerate(FIRST)}
        items.sort(key=lambda item: order.get(item.path.stem, len(FIRST)))
        tests: dict[object, list[Any]] = defaultdict(list)
        for item in items:
            if is_of_kernels(item.path):
                item.add_marker(pytest.mark.cuda)
            if hasattr(item, "callspec"):
                tests[item.getparent(pytest.Module), item.getparent(pytest.Class), item.originalname].append(item)
        dealt: dict[object, int] = defaultdict(int)  # in each file, how many tests had their part of a list
        for same in tests.values():
            if any(same[0].iter_markers("crossed")):
                continue
            places = dealt_places(same)
            part = dealt[same[0].path] % PARTS
            dealt[same[0].path] += bool(places)
            for item in same:
                other = item.callspec.params.get("storage") in OTHER_STORAGE
                elsewhere = places.get(item, 0) > 0 and places[item] % PARTS != part
                if other or elsewhere or (len(same) > FEW and departs(item, same[0]) > 1):
                    item.add_marker(pytest.mark.thorough)
