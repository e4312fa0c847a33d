"""`levattn warmup`, and the line that says why a first call takes long.

Inside: the list of calls that are compiled is replaced, and a cache is looked into.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import levattn
from levattn import warming

pytest.importorskip("typer")
from typer.testing import CliRunner

from levattn import cli
from levattn._kernels import cache
from levattn._kernels.gram.moments import moment_tasks

SAY = cache._say_that_it_compiles  # before the fixture of all tests replaces it


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the calls that were made, in place of those that compile."""
    numbers: list[int] = []
    monkeypatch.setattr(warming, "calls", lambda: [lambda i=i: numbers.append(i) for i in range(3)])
    return numbers


def test_all_calls_are_made_and_counted(made: list[int]) -> None:
    seen: list[tuple[int, int | None]] = []
    levattn.warmup(progress=lambda done, total: seen.append((done, total)))
    assert made == [0, 1, 2]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(TypeError, match="progress is 'yes'"):
        levattn.warmup(progress="yes")  # type: ignore[arg-type]


def test_the_program_makes_them_too(made: list[int]) -> None:
    result = CliRunner().invoke(cli.build_app(), ["warmup"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "levattn: the kernels are compiled\n")
    assert made == [0, 1, 2]


def test_each_call_is_of_the_public_library() -> None:
    found = warming.calls()
    half = len(found) // 2
    assert [call.__code__ for call in found[:half]] == [call.__code__ for call in found[half:]]
    assert [found[i]().dtype for i in (0, half)] == ["float32", "float64"]


def test_the_calls_compile_the_kernels_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    kernels: list[Any] = [
        import_module(f"levattn._kernels.{name}")
        for name in ("latent.backward", "latent.decay_compiled", "tokens.backward", "pruned.backward")
    ]
    found = {kernel for module in kernels for name, kernel in vars(module).items() if name.endswith("_tasks")}
    for call in warming._of_gradients(np.float32):
        assert call().isfinite().all()
    assert [kernel for kernel in found if not kernel.overloads] == []
    monkeypatch.setattr(warming, "find_spec", lambda _: None)
    names = {name for call in warming.calls() for name in call.__code__.co_names}
    assert "_followed" not in names


def test_a_process_says_once_that_it_compiles(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_say_that_it_compiles", SAY)
    SAY.cache_clear()
    kernel: Any = moment_tasks
    with caplog.at_level(logging.INFO, "levattn"):
        for _ in range(2):
            assert kernel._cache.load_overload(("no such types",), kernel.targetctx) is None
    assert [record.getMessage() for record in caplog.records] == [
        "Numba compiles kernels for this processor, once; `levattn warmup` compiles all of them"
    ]
