"""Settings of the whole suite: no test is defined here."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import specializations
import strategies
import tiers
from cli_program import program
from emulator import device

__all__ = ["program"]  # a fixture of several files

os.environ.setdefault("MPLBACKEND", "Agg")  # no test opens a window

# The same examples in every run, so that a red run can be repeated; no deadline, because the first example
# compiles kernels. To search for new counterexamples: pytest --hypothesis-profile=search
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=strategies.EXAMPLES)
settings.register_profile("thorough", derandomize=True, deadline=None, max_examples=200)
settings.register_profile(
    "search",
    deadline=None,
    max_examples=1000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

# The examples of these modules need a package that the suite can do without.
NEEDS = {"levattn/distributed/torch.py": "torch"}
# These need it to be imported at all.
NEEDED_BY = {
    "torch": (
        "levattn/nn",
        "levattn/_kernels/latent/torch.py",
        "levattn/_kernels/tensors.py",
        "levattn/_kernels/tokens/torch.py",
        "levattn/attention/tokens/torch.py",
        "levattn/integrations/transformers",
        "levattn/integrations/timm.py",
    ),
    "transformers": ("levattn/integrations/transformers",),
    "timm": ("levattn/integrations/timm.py",),
    "kvpress": ("levattn/integrations/kvpress.py",),
}


def stub_torchvision() -> None:
    """Let timm be imported where torchvision is built for CUDA and torch is not: its operators are never called."""
    if find_spec("timm") is None or find_spec("torch") is None:
        return
    import torch

    if torch.version.cuda is None:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(operators)  # what is registered goes with the object


_KEPT: list[object] = []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out whose tests are all deselected, unless they are named."""
    return (tiers.is_of_kernels(collection_path) and config.option.markexpr == "not thorough and not cuda") or None


# What is imported and collected lives to the end: looking through it again and again was a third of collection.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # looking for cycles as often as by default takes a twentieth of the tests
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(specializations.Counter())
    config.pluginmanager.register(tiers.Tiers())
    stub_torchvision()
    root = Path(__file__).parents[1]
    missing = [root / path for package, paths in NEEDED_BY.items() if find_spec(package) is None for path in paths]
    config.option.ignore = [*(config.option.ignore or []), *map(str, missing)]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors one after another: handing them to threads costs more than they do."""
    if find_spec("torch") is None:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """A test leaves nothing that torch compiled, of which it keeps only so many forms."""
    yield
    import torch

    torch._dynamo.reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for path, package in NEEDS.items():
            if item.path.as_posix().endswith(path) and find_spec(package) is None:
                item.add_marker(pytest.mark.skip(reason=f"{package} is not installed"))


@contextmanager
def float64_of_jax() -> Iterator[None]:
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:  # also after a test that fails or is skipped
        jax.config.update("jax_enable_x64", before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Give tests on CuPy arrays the emulator where there is no CUDA device, and tests on arrays of JAX its float64."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    names = params.get("storage"), getattr(params.get("impl"), "name", None)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if any(str(name).startswith("jax") for name in names):
            stack.enter_context(float64_of_jax())
        if not device.DEVICES and any(str(name).startswith("cupy") for name in names):
            device.library_on_device(patch)
        return (yield)


@pytest.fixture(autouse=True)
def _compiling_is_not_said(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test of the program depend on the kernels that were compiled before it."""
    if request.path.parent.name == "cli":
        monkeypatch.setattr("levattn._kernels.cache._say_that_it_compiles", lambda: None)


@pytest.fixture(autouse=True, scope="module")
def _short_texts_are_pruned(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let `prune` begin at twice the slots, and prune short calls: its models are small, and its texts short.

    For all of a module, as fixtures of modules prune as well.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name == "integrations" and find_spec("torch") and find_spec("transformers"):
            for name in ("START", "FEW", "REST"):
                patch.setattr(f"levattn.integrations.transformers.pruned.{name}", 0)
        yield
