"""The program behind `make gpu`: its records, what it goes on with and refuses, and a run on the emulator.

Inside: steps of the program for a card are replaced, as there is no card.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiers
from gpu import program, record, steps
from gpu.environment import EMULATOR
from gpu.steps import Step

CARD = "NVIDIA H100 80GB HBM3"
KNOWN = {"card": CARD, "capability": "9.0", "driver": "580.1", "sanitizer": "", "no torch": "torch is not here"}
XML = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'
WRITE = """
import pathlib, sys
pathlib.Path(sys.argv[1]).write_text(sys.argv[2])
print("at the end")
sys.exit(int(sys.argv[3]))
"""


def writing(path: Path, text: str, status: int = 0, part: str = "kernels") -> Step:
    """A step that leaves a text, ends with a status, and tells how often it ran."""
    command = sys.executable, "-c", f"open({str(path.with_name('runs'))!r}, 'a').write('1')\n{WRITE}"
    return Step(part, f"{part}/{path.name}", (*command, str(path), text, str(status)), path)


def runs(path: Path) -> int:
    counted = path.with_name("runs")
    return len(counted.read_text()) if counted.exists() else 0


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The program with a card and steps of the test's own; its folder is the test's."""

    def called(some: list[Step], *arguments: str, known: dict[str, Any] = KNOWN) -> int:
        monkeypatch.setattr(program, "environment", lambda *_, **__: known)
        monkeypatch.setattr(program, "all_steps", lambda *_: some)
        return program.main([*arguments, "--folder", str(tmp_path)])

    return called


def held(tmp_path: Path) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "nvidia-h100-80gb-hbm3.json").read_text()))


# -- steps and records ------------------------------------------------------------------------


def test_what_has_passed_is_not_run_again_with_the_same_sources(
    main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.xml"
    some = [writing(path, XML.format(9, 0, 0, 2))]
    for arguments, count in (((), 1), ((), 1), (("--again",), 2)):
        assert main(some, *arguments) == 0
        assert runs(path) == count
    monkeypatch.setattr(record, "digest", lambda *_: "others")
    assert main(some) == 0
    assert runs(path) == 3
    step = held(tmp_path)["steps"]["kernels/one.xml"]
    assert step["counts"] == {"tests passed": 7, "tests skipped": 2, "tests failed": 0}
    assert (step["state"], step["digest"]) == ("passed", "others")
    assert "kernels: 7 tests passed, 2 tests skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "status", "state", "told"),
    [
        (XML.format(9, 1, 1, 0), 1, "failed", "exit status 1\nat the end"),
        (XML.format(9, 0, 0, 0), steps.FOUND_FAULTS, "failed", "compute-sanitizer found faults"),
        (XML.format(4, 0, 0, 4), 0, "skipped", "at the end"),
        (XML.format(0, 0, 0, 0), 5, "failed", "exit status 5"),
    ],
)
def test_what_has_not_passed_is_run_again(
    main: Any, tmp_path: Path, text: str, status: int, state: str, told: str
) -> None:
    path = tmp_path / "one.xml"
    for count in (1, 2):
        assert main([writing(path, text, status)]) == (0 if state == "skipped" else 1)
        assert runs(path) == count
    step = held(tmp_path)["steps"]["kernels/one.xml"]
    assert step["state"] == state
    assert told in step["told"]


def test_a_step_that_takes_too_long_is_ended_and_keeps_its_figures(main: Any, tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    figures = {"bars": [{"what": "speed", "met": True}, {"what": "size", "met": False}]}
    code = "import sys, time; open(sys.argv[1], 'w').write(sys.argv[2]); time.sleep(600)"
    slow = Step("benchmarks", "benchmarks/slow", (sys.executable, "-c", code, str(path), json.dumps(figures)), path)
    assert main([slow, writing(tmp_path / "one.xml", XML.format(1, 0, 0, 0))], "--limit", "3") == 1
    kept = held(tmp_path)["steps"]
    assert kept["benchmarks/slow"]["state"] == "timed out"
    assert kept["benchmarks/slow"]["figures"] == figures
    assert kept["benchmarks/slow"]["counts"] == {"bars met": 1, "bars missed": 1}
    assert kept["kernels/one.xml"]["state"] == "passed"


def test_a_benchmark_without_what_it_needs_is_skipped(main: Any, tmp_path: Path) -> None:
    step = Step(
        "benchmarks", "benchmarks/none", (sys.executable, "-c", "print('nothing is measured')"), tmp_path / "x.json"
    )
    assert main([step]) == 0
    assert held(tmp_path)["steps"]["benchmarks/none"]["told"] == "nothing is measured"


def test_steps_find_the_packages_of_the_caller(main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "packages"
    monkeypatch.setenv("PYTHONPATH", str(other))
    step = Step("benchmarks", "benchmarks/path", (sys.executable, "-c", "import sys; print(sys.path)"), tmp_path / "x")
    assert main([step]) == 0
    told = held(tmp_path)["steps"]["benchmarks/path"]["told"]
    assert 0 < told.index(repr(str(program.ROOT))) < told.index(repr(str(other)))


def test_records_are_kept_after_each_step(main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [writing(tmp_path / f"{name}.xml", XML.format(1, 0, 0, 0)) for name in ("one", "two")]
    outcome = program.outcome

    def cut_off(step: Step, *rest: Any) -> dict[str, Any]:
        if step is some[1]:
            raise KeyboardInterrupt
        return outcome(step, *rest)

    monkeypatch.setattr(program, "outcome", cut_off)
    with pytest.raises(KeyboardInterrupt):
        main(some)
    assert list(held(tmp_path)["steps"]) == ["kernels/one.xml"]
    monkeypatch.setattr(program, "outcome", outcome)
    assert main(some) == 0
    assert runs(some[0].result) == 2
    assert not list(tmp_path.glob("*.part"))


STEP = {"part": "kernels", "digest": "", "told": "", "commit": "", "finished": "", "counts": {}, "seconds": 1.0}
WHOLE = {"format": 1, "card": CARD, "environment": {}, "steps": {"one": {**STEP, "state": "passed"}}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (json.dumps(WHOLE)[:-9], "it is damaged"),
        ("", "it is damaged"),
        ("[]", "no record of format 1"),
        (json.dumps(WHOLE | {"format": 2}), "no record of format 1"),
        (json.dumps(WHOLE | {"card": "another"}), "'another'"),
        (json.dumps(WHOLE | {"steps": []}), "missing"),
        (json.dumps(WHOLE | {"steps": {"one": {**STEP, "state": "fine"}}}), "'one' lacks a known state"),
        (json.dumps(WHOLE | {"steps": {"one": {"state": "passed"}}}), "lacks part, digest"),
        (json.dumps(WHOLE | {"steps": {"one": 3}}), "it is damaged"),
    ],
)
def test_damaged_records_are_refused_and_left_alone(
    main: Any, tmp_path: Path, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nvidia-h100-80gb-hbm3.json"
    path.write_text(text)
    step = writing(tmp_path / "one.xml", XML.format(1, 0, 0, 0))
    assert main([step]) == 2
    output = capsys.readouterr().out
    assert told in output
    assert str(path) in output
    assert "move it away" in output
    assert path.read_text() == text
    assert runs(tmp_path / "one.xml") == 0


def test_the_name_of_the_sources_follows_them_and_what_runs_on_them(tmp_path: Path) -> None:
    (tmp_path / "levattn").mkdir()
    source = tmp_path / "levattn" / "kernel.cu"
    source.write_text("one")
    first = record.digest(tmp_path, KNOWN)
    (tmp_path / "levattn" / "notes.txt").write_text("no source")
    assert record.digest(tmp_path, dict(reversed(KNOWN.items()))) == first
    others = [record.digest(tmp_path, KNOWN | {"driver": "590"})]
    for change in (lambda: source.write_text("two"), lambda: source.rename(source.with_name("other.cu"))):
        change()
        others.append(record.digest(tmp_path, KNOWN))
    assert len({first, *others}) == 4


def test_the_row_of_the_table() -> None:
    def step(part: str, state: str, told: str = "", digest: str = "now", **counts: int) -> dict[str, Any]:
        named = {key.replace("_", " "): count for key, count in counts.items()}
        more = {"commit": "abc", "finished": "2026-11-25T10:00:00+00:00"}
        return {**STEP, **more, "part": part, "state": state, "told": told, "digest": digest, "counts": named}

    several = [
        step("kernels", "passed", tests_passed=5, tests_skipped=0),
        step("kernels", "failed", "a | b", tests_passed=2, tests_failed=1),
        step("torch", "skipped", "no | torch"),
        step("benchmarks", "passed", bars_met=3),
        step("contract", "passed", digest="of other sources", tests_passed=9),
    ]
    held = {**WHOLE, "environment": KNOWN, "steps": {str(i): one for i, one in enumerate(several)}}
    assert record.row(held, "now") == (
        "| kernels: 7 tests passed, 1 tests failed, 1 of 2 steps failed; torch: skipped (no / torch); "
        "benchmarks: 3 bars met | NVIDIA H100 80GB HBM3, capability 9.0, driver 580.1 | 2026-11-25, abc | `make gpu` |"
    )


# -- what is run ------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "status"), [((), 0), (("--required",), 2)])
def test_without_a_card_it_says_so_in_a_line(
    main: Any, tmp_path: Path, arguments: tuple[str, ...], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], *arguments, known={"why": "CuPy finds no CUDA device"}) == status
    assert capsys.readouterr().out == "nothing is run: CuPy finds no CUDA device\n"
    assert not list(tmp_path.iterdir())


def test_a_driver_that_takes_its_process_along_is_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "status 1" in program.environment(tmp_path, emulated=False)["why"]


@pytest.mark.parametrize("card", [CARD, EMULATOR])
def test_the_steps_are_there_once_and_name_what_there_is(tmp_path: Path, card: str) -> None:
    known = {**KNOWN, "card": card, "sanitizer": "compute-sanitizer"}
    if card == CARD:
        del known["no torch"]
    found = steps.all_steps(program.ROOT, tmp_path, known, list(steps.PARTS))
    names = [step.name for step in found]
    results = [step.result for step in found if step.result is not None]
    assert len(set(names)) == len(names)
    assert len(set(results)) == len(results)
    assert {step.part for step in found} == set(steps.PARTS) - {"environment"}
    assert all(step.skipped for step in found) is False
    for step in found:
        for test in (argument for argument in step.command if argument.startswith("tests/")):
            file, _, name = test.partition("::")
            tree = ast.parse((program.ROOT / file).read_text("utf-8")) if name else None
            assert (program.ROOT / file).exists()
            assert tree is None or name in {getattr(node, "name", "") for node in tree.body}
    if card == CARD:
        assert not any(step.skipped for step in found)
        checked = {
            argument.partition("::")[0] for step in found if step.part == "sanitizer" for argument in step.command
        }
        assert {f"tests/cuda/{name}" for name in steps.SANITIZED} <= checked


@pytest.mark.parametrize("missing", ["sanitizer", "torch"])
def test_what_is_not_there_is_skipped_by_name(tmp_path: Path, missing: str) -> None:
    (step,) = steps.all_steps(program.ROOT, tmp_path, KNOWN, [missing])
    assert step.skipped
    assert not step.command


def test_the_default_run_leaves_the_tests_of_a_card_out() -> None:
    assert tiers.is_of_kernels(program.ROOT / "tests/gpu/test_torch.py")


def benchmark(name: str, *arguments: str) -> str:
    """What a benchmark prints where there is no card."""
    script = program.ROOT / "examples/benchmarks" / name
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=program.surroundings(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_benchmarks_without_a_card_say_so_in_a_line() -> None:
    told = benchmark("gpu_attention.py").splitlines()
    assert len(told) == 1
    assert told[0].startswith("nothing is measured")


def test_benchmarks_keep_their_figures(main: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "figures.json"
    sizes = ["--rounds", "1", "--rows", str(1 << 20), "--columns", "8"]
    told = benchmark("gpu_streaming.py", "--device", "cpu", *sizes, "--json", str(path))
    figures = json.loads(path.read_text())
    assert figures["options"] == {"rounds": 1, "rows": 1 << 20, "columns": 8, "device": "cpu"}
    assert len(figures["times"]) == len(figures["bars"]) == len(figures["notes"]) == 4
    assert all(bar["met"] == (bar["figure"] >= bar["bar"]) for bar in figures["bars"])
    assert all("16 keys, the same" in note for note in figures["notes"].values())
    assert {"Gaussian", "like MiniLM's"} == {times["case"].rpartition(", ")[2] for times in figures["times"]}
    for times in figures["times"]:
        assert times["case"] in told
        assert all(figure > 0 for figure in times["milliseconds"].values())
    step = Step(
        "benchmarks", "benchmarks/one", (sys.executable, "-c", WRITE, str(path), json.dumps(figures), "0"), path
    )
    assert main([step]) == 0
    assert sum(held(tmp_path)["steps"]["benchmarks/one"]["counts"].values()) == 4


def test_a_run_on_the_emulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--emulated", "--only", "environment", "kernels", "--folder", str(tmp_path)]
    assert program.main(arguments) == 0
    first = capsys.readouterr().out.splitlines()
    kept = json.loads((tmp_path / "emulator.json").read_text())
    assert {step["state"] for step in kept["steps"].values()} == {"passed"}
    assert sum(step["counts"]["tests passed"] for step in kept["steps"].values()) == 3
    assert first[-1].startswith("| kernels: 3 tests passed | emulator")
    assert program.main(arguments) == 0
    again = capsys.readouterr().out.splitlines()
    assert [line for line in again if line.endswith("done before")] == [
        f"{name}: done before" for name in kept["steps"]
    ]
    assert again[-1] == first[-1]
