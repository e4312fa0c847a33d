"""`levattn warmup`, and the line that says why a first call takes long.

Inside: the list of calls that are compiled is replaced, and a cache is looked into.
"""

from __future__ import annotations

import logging
import warnings
from importlib import import_module
from typing import Any

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
    of = {"sets": (0, 1), "heavy": (2,)}
    uses = {use: lambda _, own=own: [lambda i=i: numbers.append(i) for i in own] for use, own in of.items()}
    monkeypatch.setattr(warming, "USES", uses)
    return numbers


def test_all_calls_are_made_and_counted(made: list[int]) -> None:
    seen: list[tuple[int, int | None]] = []
    levattn.warmup(progress=lambda done, total: seen.append((done, total)))
    assert made == [0, 1, 2, 0, 1, 2]  # with both dtypes
    assert seen == [(done, 6) for done in range(1, 7)]
    with pytest.raises(TypeError, match="progress is 'yes'"):
        levattn.warmup(progress="yes")  # type: ignore[arg-type]


def test_the_calls_of_a_use_are_made_once(made: list[int]) -> None:
    levattn.warmup("heavy", "heavy")
    assert made == [2, 2]
    with pytest.raises(ValueError, match="there is no use 'set'; expected 'sets', 'heavy', or nothing for all"):
        levattn.warmup("set")
    for wrong in (["heavy"], 3, b"heavy"):
        with pytest.raises(TypeError, match=r"uses holds .*; expected names"):
            levattn.warmup(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("uses", [(), ("heavy",), ("heavy", "sets")])
def test_the_program_makes_them_too(made: list[int], uses: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli.build_app(), ["warmup", *uses])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "levattn: the kernels are compiled\n")
    assert made == {(): [0, 1, 2] * 2, ("heavy",): [2, 2], ("heavy", "sets"): [2, 0, 1] * 2}[uses]


def test_the_program_does_not_call_code_compiled_that_no_folder_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiling() -> None:
        warnings.warn("compiled code cannot be kept (no folder can be written)", levattn.CacheWarning, stacklevel=1)

    monkeypatch.setattr(warming, "USES", {"sets": lambda _: [compiling]})
    result = CliRunner().invoke(cli.build_app(), ["warmup"])
    assert result.exit_code == 1
    assert result.stderr == "levattn: compiled code cannot be kept (no folder can be written)\n"


def test_the_program_refuses_an_unknown_use() -> None:
    told = CliRunner().invoke(cli.build_app(), ["warmup", "--help"]).stdout
    assert all(use in told for use in warming.USES)
    result = CliRunner().invoke(cli.build_app(), ["warmup", "set"])
    assert result.exit_code == 2
    for use in warming.USES:
        assert f"'{use}'" in result.stderr


def test_each_call_is_of_the_public_library() -> None:
    found = warming.calls(tuple(warming.USES))
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
    for call in warming.calls(("latte", "tssa", "pruned")):
        if "_followed" in call.__code__.co_names:
            assert call().isfinite().all()
    assert [kernel for kernel in found if not kernel.overloads] == []
    monkeypatch.setattr(warming, "find_spec", lambda _: None)
    names = {name for call in warming.calls(tuple(warming.USES)) for name in call.__code__.co_names}
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
