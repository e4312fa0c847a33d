"""The program behind `make gpu`: its records, what it goes on with and refuses, and its first part on the CPU.

Inside: steps of the program for a card are replaced, as there is no card.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tiers
from gpu import calls, cases, loading, program, record, steps
from gpu.environment import CPU
from gpu.steps import Step
from levattn._kernels import cuda_source

CARD = "NVIDIA H100 80GB HBM3"
KNOWN = {"card": CARD, "capability": "9.0", "driver": "580.1", "sanitizer": "", "no torch": "torch is not here"}
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


def counted(passed: int, failed: int = 0, skipped: int = 0) -> str:
    """What a step with tests leaves."""
    counts = {"tests passed": passed, "tests skipped": skipped, "tests failed": failed}
    return json.dumps({"counts": counts, "failed": []})


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
    path = tmp_path / "one.json"
    some = [writing(path, counted(7, skipped=2))]
    for arguments, count in (((), 1), ((), 1), (("--again",), 2)):
        assert main(some, *arguments) == 0
        assert runs(path) == count
    monkeypatch.setattr(record, "digest", lambda *_: "others")
    assert main(some) == 0
    assert runs(path) == 3
    step = held(tmp_path)["steps"]["kernels/one.json"]
    assert step["counts"] == {"tests passed": 7, "tests skipped": 2, "tests failed": 0}
    assert (step["state"], step["digest"]) == ("passed", "others")
    assert "kernels: 7 tests passed, 2 tests skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "status", "state", "told"),
    [
        (counted(7, 2), 1, "failed", "exit status 1\nat the end"),
        (counted(9), steps.FOUND_FAULTS, "failed", "compute-sanitizer found faults"),
        (counted(0, skipped=4), 0, "untested", "all tests were skipped\nat the end"),
        (counted(0), 5, "failed", "exit status 5"),
    ],
)
def test_what_has_not_passed_is_run_again(
    main: Any, tmp_path: Path, text: str, status: int, state: str, told: str
) -> None:
    path = tmp_path / "one.json"
    for count in (1, 2):
        assert main([writing(path, text, status)]) == (0 if state == "untested" else 1)
        assert runs(path) == count
    step = held(tmp_path)["steps"]["kernels/one.json"]
    assert step["state"] == state
    assert told in step["told"]


def test_a_step_that_takes_too_long_is_ended_and_keeps_its_figures(main: Any, tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    figures = {"bars": [{"what": "speed", "met": True}, {"what": "size", "met": False}]}
    counts = {"bars met": 1, "bars missed": 1}
    left = json.dumps(figures | {"counts": counts})
    code = "import sys, time; open(sys.argv[1], 'w').write(sys.argv[2]); time.sleep(600)"
    slow = Step("benchmarks", "benchmarks/slow", (sys.executable, "-c", code, str(path), left), path)
    assert main([slow, writing(tmp_path / "one.json", counted(1))], "--limit", "3") == 1
    kept = held(tmp_path)["steps"]
    assert kept["benchmarks/slow"]["state"] == "cut off by its limit"
    assert kept["benchmarks/slow"]["figures"] == figures
    assert kept["benchmarks/slow"]["counts"] == counts
    assert kept["kernels/one.json"]["state"] == "passed"


def test_a_benchmark_without_what_it_needs_is_untested(main: Any, tmp_path: Path) -> None:
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
    some = [writing(tmp_path / f"{name}.json", counted(1)) for name in ("one", "two")]
    outcome = program.outcome

    def cut_off(step: Step, *rest: Any) -> dict[str, Any]:
        if step is some[1]:
            raise KeyboardInterrupt
        return outcome(step, *rest)

    monkeypatch.setattr(program, "outcome", cut_off)
    with pytest.raises(KeyboardInterrupt):
        main(some)
    assert list(held(tmp_path)["steps"]) == ["kernels/one.json"]
    monkeypatch.setattr(program, "outcome", outcome)
    assert main(some) == 0
    assert runs(some[0].result) == 2
    assert not list(tmp_path.glob("*.part"))


STEP = {"part": "kernels", "digest": "", "told": "", "commit": "", "finished": "", "counts": {}, "seconds": 1.0}
WHOLE = {"format": 2, "card": CARD, "environment": {}, "steps": {"one": {**STEP, "state": "passed"}}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (json.dumps(WHOLE)[:-9], "it is damaged"),
        ("", "it is damaged"),
        ("[]", "no record of format 2"),
        (json.dumps(WHOLE | {"format": 1}), "no record of format 2"),
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
    step = writing(tmp_path / "one.json", counted(1))
    assert main([step]) == 2
    output = capsys.readouterr().out
    assert told in output
    assert str(path) in output
    assert "move it away" in output
    assert path.read_text() == text
    assert runs(tmp_path / "one.json") == 0


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
        step("torch", "untested", "no | torch"),
        step("benchmarks", "passed", bars_met=3),
        step("contract", "passed", digest="of other sources", tests_passed=9),
    ]
    held = {**WHOLE, "environment": KNOWN, "steps": {str(i): one for i, one in enumerate(several)}}
    assert record.row(held, "now") == (
        "| kernels: 7 tests passed, 1 tests failed, 1 of 2 steps failed; torch: untested (no / torch); "
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
    assert "status 1" in program.environment(tmp_path, cpu=False)["why"]


@pytest.mark.parametrize("card", [CARD, CPU])
def test_the_steps_are_there_once_and_name_what_there_is(tmp_path: Path, card: str) -> None:
    known = {**KNOWN, "card": card, "sanitizer": "compute-sanitizer"}
    del known["no torch"]
    found = steps.all_steps(program.ROOT, tmp_path, known, list(steps.PARTS))
    names = [step.name for step in found]
    results = [step.result for step in found if step.result is not None]
    assert len(set(names)) == len(names)
    assert len(set(results)) == len(results)
    assert {step.part for step in found} == set(steps.PARTS) - {"environment"}
    for step in found:
        for test in (argument for argument in step.command if argument.startswith("tests/")):
            file, _, name = test.partition("::")
            tree = ast.parse((program.ROOT / file).read_text("utf-8")) if name else None
            assert (program.ROOT / file).exists()
            assert tree is None or name in {getattr(node, "name", "") for node in tree.body}
        assert all(Path(each).exists() for each in step.command if each.endswith(".py"))
    assert any(step.untested for step in found) == (card == CPU)


def test_the_limits_of_all_steps_fit_two_runs(tmp_path: Path) -> None:
    """Each group takes as long as the slowest of its steps."""
    known = {key: value for key, value in KNOWN.items() if key != "no torch"} | {"sanitizer": "compute-sanitizer"}
    groups: dict[str, float] = {}
    for step in steps.all_steps(program.ROOT, tmp_path, known, list(steps.PARTS)):
        group = step.group or step.name
        groups[group] = max(groups.get(group, 0.0), step.limit)
    assert groups["first"] <= 100
    assert sum(groups.values()) <= 2 * program.SECONDS


@pytest.mark.parametrize("missing", ["sanitizer", "torch"])
def test_what_is_not_there_is_skipped_by_name(tmp_path: Path, missing: str) -> None:
    (step,) = steps.all_steps(program.ROOT, tmp_path, KNOWN, [missing])
    assert step.untested
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
        assert all(figure > 0 for each in times["milliseconds"].values() for figure in each.values())
    assert figures["counts"] == {
        "bars met": sum(bar["met"] for bar in figures["bars"]),
        "bars missed": sum(not bar["met"] for bar in figures["bars"]),
    }
    step = Step(
        "benchmarks", "benchmarks/one", (sys.executable, "-c", WRITE, str(path), json.dumps(figures), "0"), path
    )
    assert main([step]) == 0
    assert sum(held(tmp_path)["steps"]["benchmarks/one"]["counts"].values()) == 4


SCRIPT = """
from _gpu import Bench
bench = Bench("some.py", "", rounds=2)
times = bench.times("a case", {"ours": lambda: sum(range(999)), "rival": lambda: 1 / 0}, "ours")
bench.bar("the rival", times["rival"] / times["ours"], 1.0)
bench.bar("ours", times["ours"], 0.0)
bench.note("no figure", times["rival"])
"""


@pytest.mark.parametrize("seconds", [0, 100])
def test_benchmarks_go_on_without_rivals_and_leave_out_what_has_no_time(tmp_path: Path, seconds: int) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "figures.json"
    subprocess.run(
        [sys.executable, "-c", SCRIPT, "--device", "cpu", "--seconds", str(seconds), "--json", str(path)],
        env=program.surroundings(program.ROOT / "examples/benchmarks"),
        check=True,
    )
    figures = json.loads(path.read_text())
    if seconds:
        assert figures["counts"] == {"bars met": 1, "bars missed": 0}
        assert [*figures["times"][0]["milliseconds"]] == ["ours"]
        assert figures["notes"] == {"a case, rival is left out": "ZeroDivisionError: division by zero"}
    else:
        assert figures["left out"] == ["a case"]
        assert figures["times"] == figures["bars"] == []


FEW = ("scores", "decoder")  # of which the others have no more than sizes of their own


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.thorough) for name in steps.BENCHMARKS]
)
def test_each_benchmark_begins_on_the_cpu_and_knows_its_cases(tmp_path: Path, name: str) -> None:
    """Sizes and options are read, keys are made, and without time all cases are left out."""
    pytest.importorskip("torch")
    path = tmp_path / "figures.json"
    told = benchmark(f"gpu_{name}.py", "--device", "cpu", "--seconds", "0", "--json", str(path))
    if path.exists():
        assert json.loads(path.read_text())["left out"]
    else:
        assert "not installed" in told


def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes first on a card, with tensors in main memory in place of those of a card: two of its processes."""
    pytest.importorskip("torch")
    families = dict(list(cases.FAMILIES.items())[:2])
    monkeypatch.setattr(steps, "FAMILIES", families)
    arguments = ["--device", "cpu", "--quick", "--folder", str(tmp_path), "--limit", "300"]
    assert program.main(arguments) == 0
    first = capsys.readouterr().out.splitlines()
    kept = json.loads((tmp_path / "the-cpu.json").read_text())["steps"]
    assert kept.pop("first/loading")["state"] == "untested"
    assert {step["state"] for step in kept.values()} == {"passed"}
    assert set(kept) == {f"first/{family}" for family in families}
    assert all(step["counts"]["calls right"] >= 2 for step in kept.values())
    with tarfile.open(tmp_path / "the-cpu.tar.gz") as packed:
        assert {"the-cpu.json", "the-cpu/first-scores.log", "the-cpu/first-scores.json"} <= set(packed.getnames())
    assert program.main(arguments) == 0
    again = capsys.readouterr().out.splitlines()
    assert {line for line in again if line.endswith("done before")} == {f"{name}: done before" for name in kept}
    assert again[-2:] == first[-2:]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", list(cases.FAMILIES)[2:])
def test_what_comes_first_is_right_on_the_cpu(tmp_path: Path, family: str) -> None:
    """The processes of other families, without the processes."""
    pytest.importorskip("torch")
    path = tmp_path / "calls.json"
    assert calls.main(["--device", "cpu", "--first", "--only", family, "--json", str(path)]) == 0
    counts = json.loads(path.read_text())["counts"]
    assert counts["calls right"] >= 2
    assert counts["calls wrong"] == 0


# -- calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_references_come_from_seeds(family: str) -> None:
    for case in cases.FAMILIES[family].values():
        for one, other in zip(case.arrays(), case.arrays(), strict=True):
            assert one.dtype == np.float64
            assert np.array_equal(one, other)


def faults_of(call: Callable[..., Any], **options: Any) -> str:
    """What is wrong with a call whose reference is that of doubled keys."""
    pytest.importorskip("torch")
    known = calls.expected(cases.Case(lambda: (cases.normal(9, 4),), lambda K: 2 * K, **options), "float32")
    found = calls.results(cases.Case(tuple, call), calls.tensors([cases.normal(9, 4)], "float32", "cpu"))
    return "; ".join(calls.faults(found, known, exact=options.get("exact", False)))


def test_faults_of_calls_are_found() -> None:
    assert faults_of(lambda K: 2 * K) == ""
    assert faults_of(lambda K: K + K * (1 + 2**-17)).startswith("off by")
    assert faults_of(lambda K: (2 * K)[1:]).startswith("the shape (8, 4)")
    assert faults_of(lambda K: 2 * K.log()) == "numbers that are not finite"
    assert faults_of(lambda K: [2 * K, K]) == "2 arrays in place of 1"
    assert faults_of(lambda K: 2 * K, exact=True) == ""
    assert faults_of(lambda K: (2 * K).where(K.max() > K, 0), exact=True) == "1 of 36 differ"


def test_calls_go_on_after_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(K: Any) -> Any:
        raise RuntimeError("not today")

    pytest.importorskip("torch")
    well = cases.Case(lambda: (cases.normal(9, 4),), lambda K: 2 * K, ("float32",))
    monkeypatch.setitem(calls.FAMILIES, "sets", {"one": replace(well, call=fails), "two": well})
    assert calls.main(["--device", "cpu", "--only", "sets", "--json", str(tmp_path / "x.json")]) == 1
    assert json.loads((tmp_path / "x.json").read_text())["counts"] == {"calls right": 1, "calls wrong": 1}
    assert "WRONG  sets, one, a tensor, float32  RuntimeError: not today" in capsys.readouterr().out


def test_kernels_are_loaded_with_their_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The card's answers are made up: the second kernel takes local memory, and the third does not load."""
    cupy = pytest.importorskip("cupy")
    path, three = tmp_path / "kernels.json", loading.table()[:3]

    def function(*kernel: Any) -> Any:
        if kernel[:3] == three[2]:
            raise RuntimeError("no image")
        return SimpleNamespace(_function=SimpleNamespace(ptr=8 * (kernel[:3] == three[1])))

    monkeypatch.setattr(loading, "table", lambda: three)
    monkeypatch.setattr(cuda_source, "_compiled", function)
    monkeypatch.setattr(cupy.cuda.driver, "funcGetAttribute", lambda at, pointer: pointer if at == 3 else 32)
    assert loading.main(["--json", str(path)]) == 1
    told = json.loads(path.read_text())
    assert told["counts"] == {"kernels loaded": 2, "kernels not loaded": 1, "with local memory": 1}
    assert [each.get("local bytes") for each in told["kernels"]] == [0, 8, None]
    output = capsys.readouterr().out
    assert f"{cuda_source.expression(*three[1][1:])} takes 8 bytes of local memory" in output
    assert "RuntimeError: no image" in output


def test_the_plugin_counts_tests_as_they_end(tmp_path: Path) -> None:
    test, counts = tmp_path / "test_some.py", tmp_path / "counts.json"
    test.write_text(
        "import pytest\n"
        "def test_one(): pass\n"
        "def test_two(): assert False\n"
        "def test_three(): pytest.skip()\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError\n"
        "def test_four(broken): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.outcomes", "--rootdir", str(tmp_path), str(test)]
    done = subprocess.run(command, env=program.surroundings(GPU_OUTCOMES=str(counts)), capture_output=True)
    assert done.returncode == 1
    found = json.loads(counts.read_text())
    assert found["counts"] == {"tests passed": 1, "tests skipped": 1, "tests failed": 2}
    assert [name.partition("::")[2] for name in found["failed"]] == ["test_two", "test_four"]


def test_what_failed_before_comes_last(main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = [writing(tmp_path / "one.json", counted(1, 1), 1), writing(tmp_path / "two.json", counted(1))]
    assert main(some[:1]) == 1
    capsys.readouterr()
    assert main(some) == 1
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("ker")] == [
        "kernels/two.json",
        "kernels/one.json",
    ]


def test_a_run_whose_time_is_over_begins_nothing(main: Any, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    assert main([writing(path, counted(1))], "--seconds", "5") == 0
    assert runs(path) == 0
    assert held(tmp_path)["steps"]["kernels/one.json"]["told"] == "no time was left for it"


def test_steps_of_a_group_run_side_by_side(main: Any, tmp_path: Path) -> None:
    """Each ends once the other has begun."""
    code = (
        "import pathlib, sys, time; mine, other = map(pathlib.Path, sys.argv[1:]); mine.touch()\n"
        "while not other.exists(): time.sleep(0.01)\n"
        "print('both')"
    )
    one, two = tmp_path / "1", tmp_path / "2"
    some = [
        Step("kernels", f"kernels/{mine.name}", (sys.executable, "-c", code, str(mine), str(other)), group="both")
        for mine, other in ((one, two), (two, one))
    ]
    assert main(some) == 0
    assert {step["told"] for step in held(tmp_path)["steps"].values()} == {"both"}
