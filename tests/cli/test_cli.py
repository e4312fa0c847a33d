"""The program: what it prints, what it writes, and how it says no."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
safetensors_numpy = pytest.importorskip("safetensors.numpy")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner, Result  # noqa: E402

import levattn  # noqa: E402
from levattn import cli  # noqa: E402

Array = npt.NDArray[Any]


def run(*arguments: str | Path, given: str | None = None) -> Result:
    """Run a command, with `given` on its standard input."""
    return CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments], input=given)


def refused(*arguments: str | Path, status: int = 1) -> str:
    """Run a command that must fail, and return its one line."""
    result = run(*arguments)
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("levattn: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


PAGE = (Path(__file__).parents[2] / "docs" / "program.md").read_text(encoding="utf-8")


def documented(schema: str) -> dict[str, str]:
    """The keys of a document and their types, as docs/program.md lists them."""
    section = PAGE.partition(f"### {schema}\n")[2].partition("\n#")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]+?) \|", section, flags=re.MULTILINE))


def values_of(document: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """All values of a document with their keys as docs/program.md writes them."""
    for key, value in document.items():
        yield path + key, value
        if isinstance(value, dict):
            yield from values_of(value, f"{path}{key}.")
        for item in value if isinstance(value, list) else ():
            if isinstance(item, dict):
                yield from values_of(item, f"{path}{key}[].")


def fits(value: Any, kind: str) -> bool:
    if kind.startswith("array of "):
        return isinstance(value, list) and all(fits(item, kind[9:].removesuffix("s")) for item in value)
    of = {"null": type(None), "string": str, "boolean": bool, "integer": int, "number": (int, float), "object": dict}
    return isinstance(value, of[kind]) and (kind == "boolean" or not isinstance(value, bool))


def assert_as_documented(document: dict[str, Any]) -> None:
    """Compare all keys and types of a document with those of docs/program.md."""
    assert {key for key, _ in values_of(document)} == set(documented(document["schema"]))
    assert_types(document)


def assert_types(document: dict[str, Any]) -> None:
    """Compare the types of what is in a document with those of docs/program.md."""
    keys = documented(document["schema"])
    for key, value in values_of(document):
        assert any(fits(value, kind) for kind in keys[key].split(" or ")), (key, value)


@pytest.fixture
def keys() -> Array:
    rows = np.random.default_rng(5).standard_normal((200, 6))
    rows[[3, 50, 120]] *= 20
    return rows.astype(np.float32)


@pytest.fixture
def file(tmp_path: Path, keys: Array) -> Path:
    np.save(tmp_path / "keys.npy", keys)
    return tmp_path / "keys.npy"


# -- universal-set ---------------------------------------------------------------------------------------


FUNCTIONS = {
    "2": 2,
    "2.0": 2,
    "1.5": 1.5,
    "4": 4,
    "huber": levattn.Huber(),
    "huber:0.5": levattn.Huber(0.5),
    "tukey": levattn.Tukey(),
    "tukey:3": levattn.Tukey(3),
    "l1l2": levattn.L1L2(),
    "fair": levattn.Fair(),
    "fair:0.7": levattn.Fair(0.7),
    "softmax:0.01": levattn.Softmax(0.01),
}
CASES = [*itertools.product(FUNCTIONS, ["--epsilon 0.1", "--size 9"]), ("2", "--size 0"), ("2", "--size 200")]


@pytest.mark.parametrize(("text", "selection"), CASES)
def test_json_and_file_say_what_the_library_says(file: Path, keys: Array, text: str, selection: str) -> None:
    output = file.with_name("set.npz")
    output.write_bytes(b"the old one")
    result = run("universal-set", file, *selection.split(), "--function", text, "--json", "-o", output)
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert_types(document)
    (found,) = document.pop("sets")
    assert document == {
        "schema": "levattn.universal-set/1",
        "levattn": levattn.__version__,
        "file": str(file),
        "id": None,
        "weights": None,
        "tensor": None,
        "columns": None,
        "shape": [200, 6],
        "dtype": "float32",
        "function": text,
        "method": "auto",
        "center": False,
        "duplicates": None,
        "queries": None,
        "queries_tensor": None,
    }
    option, value = selection.split()
    epsilon, size = (float(value), None) if option == "--epsilon" else (None, int(value))
    expected = levattn.universal_set(keys, epsilon, size=size, f=FUNCTIONS[text])
    assert found == {
        "item": [],
        "size": len(expected),
        "epsilon": expected.epsilon,
        "rank": 6,
        "size_bound": expected.size_bound if np.isfinite(expected.size_bound) else None,
        "is_vacuous": expected.is_vacuous,
        "condition": expected.condition,
        "guarantee": expected.guarantee,
        "f": text,
        "indices": expected.indices.tolist(),
        "ids": None,
        "hidden_groups": [],
        "coverage": None,
        "mass": None,
        "threshold_queries": None,
    }
    with np.load(output, allow_pickle=False) as stored:
        named = ("indices", "mask", "scores", "sizes", "epsilon", "guarantee", "rank")
        assert set(stored) == {*named, "size_bound", "is_vacuous", "condition", "f"}
        for name in set(stored) - {"f"}:
            np.testing.assert_array_equal(stored[name], getattr(expected, name))
        assert stored["f"].item() == (FUNCTIONS[text] if text[0].isdigit() else text)


def test_batches_give_one_set_per_matrix(tmp_path: Path, keys: Array) -> None:
    heads = np.stack([keys, keys[::-1], np.repeat(keys[:100], 2, axis=0)]).reshape(3, 1, 200, 6)
    np.save(tmp_path / "heads.npy", heads)
    result = run("universal-set", tmp_path / "heads.npy", "--epsilon", "0.1", "--json", "-o", tmp_path / "sets.npz")
    sets = json.loads(result.stdout)["sets"]
    expected = levattn.universal_set(heads, 0.1)
    assert [found["item"] for found in sets] == [[0, 0], [1, 0], [2, 0]]
    assert [found["size"] for found in sets] == expected.sizes.ravel().tolist()
    for found in sets:
        assert found["indices"] == np.flatnonzero(expected.mask[tuple(found["item"])]).tolist()
    with np.load(tmp_path / "sets.npz", allow_pickle=False) as stored:
        assert "indices" not in stored
        np.testing.assert_array_equal(stored["mask"], expected.mask)
        np.testing.assert_array_equal(stored["sizes"], expected.sizes)
    table = run("universal-set", tmp_path / "heads.npy", "--epsilon", "0.1").stdout
    assert [line.split()[0] for line in table.splitlines() if "exact" in line] == ["0,0", "1,0", "2,0"]


def test_table_explains_a_vacuous_bound_and_shortens_a_long_list(file: Path, keys: Array) -> None:
    result = run("universal-set", file, "--epsilon", "0.1")
    assert result.exit_code == 0
    assert result.stderr == ""
    heads, _, row, *_ = (line.split() for line in result.stdout.splitlines())
    expected = levattn.universal_set(keys, 0.1)
    shown = dict(zip(heads, row, strict=True))
    assert shown["|U|"] == str(len(expected))
    assert (shown["n"], shown["d"], shown["rank"], shown["bound"]) == ("200", "6", "6", "60")
    assert (shown["vacuous"], shown["guarantee"]) == ("no", "exact")
    assert f"keys: {', '.join(map(str, expected.indices))}" in result.stdout
    assert "vacuous: the bound" not in result.stdout
    assert_columns_explained("universal-set", result.stdout)
    output = run("universal-set", file, "--epsilon", "0.01").stdout
    assert "vacuous: the bound rank/ε is not below n" in output
    assert "more (all with --json, --output or --scores)" in output


@pytest.mark.filterwarnings("default::levattn.AxesWarning")
def test_exchanged_axes_are_reported_in_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "keys.npy", np.zeros((60, 3, 4)))
    told = run("universal-set", tmp_path / "keys.npy", "--epsilon", "0.1").stderr.splitlines()
    assert len(told) == 1
    assert told[0].startswith("levattn: K has shape (60, 3, 4): 3 keys of 4 columns")


def test_options_reach_the_library(file: Path, keys: Array) -> None:
    shifted = file.with_name("shifted.npy")
    np.save(shifted, keys + 100)
    result = run("universal-set", shifted, "--epsilon", "0.02", "--center", "--method", "qr", "--json")
    document = json.loads(result.stdout)
    assert (document["center"], document["method"]) == (True, "qr")
    assert document["sets"][0]["indices"] == levattn.universal_set(keys + 100, 0.02, center=True).indices.tolist()
    assert document["sets"][0]["indices"] != levattn.universal_set(keys + 100, 0.02).indices.tolist()


def test_groups_of_near_duplicates_are_reported(tmp_path: Path, keys: Array) -> None:
    keys = np.concatenate([keys, np.tile(np.float32([0, 0, 9, 0, 0, 0]), (50, 1))])
    np.save(tmp_path / "keys.npy", np.stack([keys, keys]))
    arguments = ("universal-set", tmp_path / "keys.npy", "--epsilon", "0.5", "--duplicates", "0.01")
    for found in json.loads(run(*arguments, "--json", "-o", tmp_path / "sets.npz").stdout)["sets"]:
        (group,) = found["hidden_groups"]
        assert group["indices"] == list(range(200, 250))
        assert 0.5 < group["score"] <= 1
        assert found["guarantee"] == "superset"
        assert found["indices"][-50:] == group["indices"]
    with np.load(tmp_path / "sets.npz", allow_pickle=False) as stored:
        assert stored["groups"].shape == (2, 250)
        assert stored["group_scores"].shape == (2, 1)
    assert "hidden in near-duplicates: 2 groups of 100 keys" in run(*arguments).stdout
    assert_as_documented(json.loads(run(*arguments, "--json").stdout))


@pytest.mark.parametrize("save", [np.savez, lambda path, **tensors: safetensors_numpy.save_file(tensors, path)])
def test_one_of_several_tensors(tmp_path: Path, keys: Array, save: Any) -> None:
    path = tmp_path / ("two.npz" if save is np.savez else "two.safetensors")
    save(path, a=keys, b=keys[:50])
    assert "holds 2 arrays ('a', 'b'); say which one with --tensor" in refused("universal-set", path, "--size", "3")
    document = json.loads(run("universal-set", path, "--size", "3", "--tensor", "b", "--json").stdout)
    assert (document["tensor"], document["shape"]) == ("b", [50, 6])
    assert document["sets"][0]["indices"] == levattn.universal_set(keys[:50], size=3).indices.tolist()


def test_table_says_the_function_unless_it_is_the_square(file: Path) -> None:
    shown = run("universal-set", file, "--epsilon", "0.1", "--function", "softmax:4").stdout
    heads, _, row, *rest = (line.split() for line in shown.splitlines())
    assert dict(zip(heads, row, strict=True))["bound"] == "inf"
    assert " ".join(rest[0]) == "function: softmax:4; scores are certified bounds"
    assert "vacuous: the bound is not below n" in shown
    assert "rank/ε" not in shown
    square = run("universal-set", file, "--epsilon", "0.1").stdout
    assert square == run("universal-set", file, "--epsilon", "0.1", "--function", "2.0").stdout
    assert "function" not in square


# -- universal-set for queries like given ones -----------------------------------------------------------


FOR_QUERIES = ("--queries", "q.npy", "--coverage", "0.9")


@pytest.fixture
def queries(file: Path) -> Array:
    sample = np.random.default_rng(6).standard_normal((120, 6)).astype(np.float32)
    np.save(file.with_name("q.npy"), sample)
    return sample


@pytest.mark.parametrize("selection", ["--epsilon 0.1", "--size 9", "--mass 0.6"])
@pytest.mark.parametrize("text", ["2", "huber", "softmax", "softmax:4"])
def test_a_set_with_coverage_is_that_of_the_library(
    file: Path, keys: Array, queries: Array, text: str, selection: str
) -> None:
    output, sample = file.with_name("set.npz"), file.with_name("q.npy")
    command = ("universal-set", file, *selection.split(), "--function", text, "--queries", sample, "--coverage", "0.8")
    result = run(*command, "--json", "-o", output)
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert_types(document)
    assert (document["queries"], document["queries_tensor"]) == (str(sample), None)
    option, value = selection.split()
    epsilon, wish = (float(value), {}) if option == "--epsilon" else (None, {option[2:]: json.loads(value)})
    f = levattn.Softmax() if text == "softmax" else FUNCTIONS.get(text, levattn.Softmax(4))
    expected = levattn.covering_set(keys, queries, epsilon, f=f, coverage=0.8, **wish)
    (found,) = document["sets"]
    assert found["indices"] == expected.indices.tolist()
    assert (found["size_bound"], found["is_vacuous"], found["guarantee"]) == (None, False, "coverage")
    assert (found["epsilon"], found["coverage"], found["mass"]) == (expected.epsilon, 0.8, wish.get("mass"))
    assert found["threshold_queries"] == 60
    with np.load(output, allow_pickle=False) as stored:
        assert ("epsilon" in stored, "mass" in stored) == ((False, True) if "mass" in wish else (True, False))
        assert (stored["coverage"], stored["threshold_queries"], stored["is_vacuous"]) == (0.8, 60, False)
        for name in ("mask", "scores", "needs", "size_bound", "indices"):
            np.testing.assert_array_equal(stored[name], getattr(expected, name))
    table = run(*command).stdout
    heads, _, row, *rest = (line.split() for line in table.splitlines())
    shown = dict(zip(heads, row, strict=True))
    for place in (0, 1):  # in the help, and in docs/program.md
        usual = columns_explained("universal-set")[place]
        own = columns_explained("universal-set", "With --queries there", 2)[place]
        assert [name for name in usual if name != "vacuous"] + own == heads
    assert "vacuous" not in table
    assert (shown["bound"], shown["coverage"], shown["queries"]) == ("-", "0.8", "60")
    assert (shown["mass"], shown["ε"] == "-") == ((value, True) if "mass" in wish else ("-", False))
    promise = {
        "--epsilon": "gives less than ε to each key outside",
        "--size": "gives at most ε to each key outside",
        "--mass": "gives the set at least 0.6 of its attention",
    }[option]
    assert " ".join(rest[0]) == (
        f"function: {text}; a new query, exchangeable with the queries of {sample}, {promise} with probability "
        "0.8 or more, in the mean over samples of queries"
    )


def test_queries_of_several_heads_from_the_file_of_the_keys(tmp_path: Path, keys: Array, queries: Array) -> None:
    heads, sample = np.stack([keys, keys[::-1]]), np.stack([queries] * 4)
    np.savez(tmp_path / "both.npz", k=heads, q=sample)
    of_both = ("universal-set", tmp_path / "both.npz", "--tensor", "k", "--queries", tmp_path / "both.npz")
    options = ("--coverage", "0.9", "--mass", "0.5")
    line = refused(*of_both, *options)
    assert "holds 2 arrays ('k', 'q'); say which one with --queries-tensor" in line
    picture, output = tmp_path / "a.svg", tmp_path / "set.npz"
    result = run(*of_both, *options, "--queries-tensor", "q", "--json", "--plot", picture, "-o", output)
    document = json.loads(result.stdout)
    assert_types(document)
    assert document["queries_tensor"] == "q"
    expected = levattn.covering_set(heads, sample, coverage=0.9, mass=0.5)
    assert [found["size"] for found in document["sets"]] == expected.sizes.tolist()
    assert {found["threshold_queries"] for found in document["sets"]} == {60}
    assert picture.read_bytes().startswith(b"<?xml")
    with np.load(output, allow_pickle=False) as stored:
        np.testing.assert_array_equal(stored["needs"], expected.needs)
    np.save(tmp_path / "empty.npy", heads[:0])
    one_sample = ("--queries", tmp_path / "q.npy", *options)
    assert run("universal-set", tmp_path / "empty.npy", *one_sample).exit_code == 0


def test_bad_queries_are_named_with_their_file(tmp_path: Path, file: Path, queries: Array) -> None:
    broken = queries.copy()
    broken[7, 2] = np.inf
    for name, array, reason in (
        ("few", queries[:10], "queries are 10 for each head; expected at least 9 to set the threshold and as many"),
        ("narrow", queries[:, :5], "queries have 5 columns and the keys have 6; expected the same number d"),
        ("heads", queries.reshape(1, 2, 60, 6), "queries have leading axes (1, 2) and the keys have ()"),
        ("inf", broken, "queries hold NaN or infinity, first at [[0, 7]]; remove these rows and save the file again"),
        ("none", queries[:0], "queries have shape (0, 6); expected at least one query"),
        ("flat", queries[0], "the array has shape (6,), expected (..., n, d); save the queries as rows of a matrix"),
        ("whole", queries.astype(int), "holds int64, expected floats; convert it with --dtype float64"),
    ):
        path = tmp_path / f"{name}.npy"
        np.save(path, array)
        line = refused("universal-set", file, "--queries", path, "--coverage", "0.9", "--mass", "0.5")
        assert line.startswith(f"levattn: {path}: {reason}") or name == "whole"
        assert reason in line
    absent = refused("universal-set", file, "--queries", tmp_path / "a.npy", "--coverage", "0.9", "--mass", "0.5")
    assert absent.startswith(f"levattn: {tmp_path / 'a.npy'}: no such file")
    stored, sample = tmp_path / "q.npz", ("--queries", tmp_path / "q.npz", "--coverage", "0.9", "--mass", "0.5")
    np.savez(stored, q=queries)
    assert "is the file of the queries, which --output would overwrite" in refused(
        "universal-set", file, *sample, "-o", stored
    )


# -- how it says no --------------------------------------------------------------------------------------


ALLOWED = "a number p for |x|^p, huber[:delta], tukey[:c], l1l2, fair[:c] or softmax[:radius]"
ALLOWED += " (without a radius only with --queries)"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--epsilon", "0.1", "--size", "3"), "exactly one of --epsilon and --size"),
        (("--epsilon", "0"), "expected 0 < epsilon <= 1"),
        (("--epsilon", "1.01"), "expected 0 < epsilon <= 1"),
        (("--epsilon", "nan"), "expected 0 < epsilon <= 1"),
        (("--epsilon", "tenth"), "--epsilon"),
        (("--size", "-1"), "--size"),
        (("--size", "201"), "--size is 201, but"),
        (("--size", "3", "--method", "jl"), "jl"),
        (("--size", "3", "--plot", "a.jpg"), "a.jpg ends in '.jpg', expected .png or .svg or .pdf"),
        (("--size", "3", "-o", "a.npy"), "a.npy ends in '.npy', expected .npz"),
        (("--unknown",), "--unknown"),
        (("--size", "3", "--function", "gauss"), f"'gauss': there is no such function. Allowed are {ALLOWED}"),
        (("--size", "3", "--function", ""), "'': there is no such function. Allowed are"),
        (("--size", "3", "--function", "0"), "'0': the number is 0.0; expected a finite number above 0. Allowed are"),
        (("--size", "3", "--function", "nan"), "the number is nan; expected a finite number above 0"),
        (("--size", "3", "--function", "inf"), "the number is inf; expected a finite number above 0"),
        (("--size", "3", "--function", "tukey:-1"), "the number is -1.0; expected a finite number above 0"),
        (("--size", "3", "--function", "huber:"), "'huber:': '' is not a number. Allowed are"),
        (("--size", "3", "--function", "huber:x"), "'huber:x': 'x' is not a number. Allowed are"),
        (("--size", "3", "--function", "l1l2:1"), "l1l2 takes no number"),
        (
            ("--size", "3", "--function", "softmax"),
            "softmax needs the largest norm of a query, as in softmax:4, or a sample of the queries with --queries",
        ),
        (("--mass", "0.8"), "--mass: give --queries as well, a file with a sample of the queries"),
        (("--coverage", "0.9", "--size", "3"), "--coverage: give --queries as well"),
        (
            ("--size", "3", "--coverage", "0.9", "--queries-tensor", "q"),
            "--coverage and --queries-tensor: give --queries as well",
        ),
        (("--coverage", "1"), "coverage is 1.0; expected a number above 0 and below 1"),
        (("--mass", "0"), "mass is 0.0; expected a number above 0 and below 1"),
        (("--queries", "q.npy", "--size", "3"), "--queries needs --coverage, a probability such as 0.9"),
        ((*FOR_QUERIES, "--mass", "0.8", "--size", "3"), "exactly one of --epsilon, --size and --mass"),
        ((*FOR_QUERIES, "--epsilon", "0.1", "--mass", "0.8"), "exactly one of --epsilon, --size and --mass"),
        ((*FOR_QUERIES, "--size", "3", "--center", "--method", "qr"), "--queries goes without --center and --method"),
        ((*FOR_QUERIES, "--epsilon", "0.1", "--duplicates", "0.1"), "--queries goes without --duplicates"),
        (
            (*FOR_QUERIES, "--size", "3", "--memory", "5", "--checkpoint", "a"),
            "--queries goes without --memory and --checkpoint",
        ),
        (
            (*FOR_QUERIES, "--epsilon", "0.1", "--scheduler", "tcp://127.0.0.1:1"),
            "--queries goes without --scheduler",
        ),
        (
            ("--size", "3", "--function", "1", "--method", "qr"),
            "--method qr is for --function 2; others take only auto",
        ),
        (("--size", "3", "--function", "huber", "--center"), "--center is for --function 2"),
        (("--size", "3", "--duplicates", "0.1"), "--duplicates is for --epsilon and --function 2"),
        (("--epsilon", "0.1", "--function", "1", "--duplicates", "0.1"), "--duplicates is for --epsilon"),
        (("--epsilon", "0.1", "--duplicates", "3"), "angle is 3.0; expected 1e-08 <= angle"),
        (("--epsilon", "0.1", "--scheduler", "host"), "--scheduler is 'host', expected an address such as tcp://"),
        (("--epsilon", "0.1", "--method", "qr", "--memory", "5"), "--memory and --checkpoint are for"),
        (("--epsilon", "0.1", "--epsilon=0.2"), "--epsilon comes 2 times; give it once"),
    ],
)
def test_wrong_command_lines(file: Path, arguments: tuple[str, ...], reason: str) -> None:
    line = refused("universal-set", file, *arguments, status=2)
    assert reason in line
    assert line.endswith(" levattn universal-set --help\n")


def test_bad_files_fail_in_one_line_and_leave_nothing(tmp_path: Path, keys: Array) -> None:
    np.save(tmp_path / "nan.npy", np.where(np.arange(200)[:, None] == 7, np.nan, keys))
    np.save(tmp_path / "int.npy", keys.astype(int))
    np.save(tmp_path / "flat.npy", keys[0])
    (tmp_path / "text.npy").write_text("no keys\n")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "nan.npy").read_bytes()[:-1])
    before = {path.name for path in tmp_path.iterdir()}
    for name, reason in {
        "nan.npy": "7",
        "int.npy": "holds int64, expected floats; convert it with --dtype float64",
        "flat.npy": "expected (..., n, d)",
        "text.npy": "does not start as a .npy file does",
        "cut.npy": "is truncated or damaged",
        "none.npy": "no such file; check the path",
    }.items():
        outputs = ("-o", tmp_path / "out.npz", "--plot", tmp_path / "out.png")
        assert reason in refused("universal-set", tmp_path / name, "--epsilon", "0.1", "--json", *outputs)
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("arguments", [[""], ["", "a.npy"], ["a.npy", "--queries", ""], ["a.npy", "--queries="]])
def test_an_empty_argument_is_not_the_current_folder(arguments: list[str]) -> None:
    result = run("universal-set", *arguments)
    assert result.exit_code == 2
    assert result.stderr == (
        "levattn: a path is empty, perhaps an unset variable; expected a value; see levattn universal-set --help\n"
    )


def test_folders_and_several_files_are_one(tmp_path: Path, keys: Array) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    paths = [folder / f"part-{i}.npy" for i in range(11)]
    for i, path in enumerate(paths):
        np.save(path, keys[20 * i : 20 * i + 20])
    expected = levattn.universal_set(keys, 0.1).indices.tolist()
    for arguments in ((folder,), paths, (folder, "--memory", "1", "--checkpoint", tmp_path / "state")):
        result = run("universal-set", *arguments, "--epsilon", "0.1", "--json")
        assert result.exit_code == 0, result.stderr
        document = json.loads(result.stdout)
        assert document["sets"][0]["indices"] == expected
        assert document["file"] == (str(folder) if arguments[0] == folder else list(map(str, paths)))
    assert not (tmp_path / "state").exists()


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, file: Path, keys: Array) -> None:
    state = tmp_path / "state"
    state.write_bytes(b"of another program")
    assert "Name another file" in refused("universal-set", file, "--epsilon", "0.1", "--checkpoint", state)

    def stop(done: int, total: int | None) -> None:
        if done >= 300:
            raise KeyboardInterrupt

    state.unlink()
    with pytest.raises(KeyboardInterrupt):
        levattn.scan_set(
            levattn.open_keys(file, chunk_rows=50), 0.1, progress=stop, checkpoint=state, checkpoint_rows=50
        )
    assert state.exists()
    result = run("universal-set", file, "--epsilon", "0.1", "--checkpoint", state, "--json")
    assert json.loads(result.stdout)["sets"][0]["indices"] == levattn.universal_set(keys, 0.1).indices.tolist()
    assert not state.exists()


def test_workers_of_a_scheduler_find_the_same_set(tmp_path: Path, keys: Array) -> None:
    distributed = pytest.importorskip("distributed")
    heads = np.stack([keys, keys[::-1]])
    np.save(tmp_path / "heads.npy", heads)
    output = tmp_path / "set.npz"
    sizes = levattn.universal_set(heads, 0.1).sizes.tolist()
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0", protocol="tcp"
    ) as cluster:
        address = cluster.scheduler_address
        shown = run("universal-set", tmp_path / "heads.npy", "--epsilon", "0.1", "--scheduler", address, "-o", output)
        told = run("universal-set", tmp_path / "heads.npy", "--epsilon", "0.1", "--scheduler", address, "--json")
    assert shown.exit_code == 0, shown.stderr
    assert "exact" in shown.stdout
    assert [report["size"] for report in json.loads(told.stdout)["sets"]] == sizes
    with np.load(output) as arrays:
        assert arrays["sizes"].tolist() == sizes
        assert len(arrays["indices"]) == len(arrays["member_scores"]) == sum(sizes)


def test_rows_that_are_not_finite_are_named_with_their_file(tmp_path: Path, keys: Array) -> None:
    path = tmp_path / "keys.npy"
    broken, heads = keys.copy(), np.stack([keys, keys])
    broken[[7, 90]] = heads[1, 5] = np.nan
    for array, named in ((broken, "first such rows 7, 90"), (heads, "row 5 of matrix 1 (leading axes flattened)")):
        np.save(path, array)
        line = refused("universal-set", path, "--epsilon", "0.1")
        assert line == f"levattn: {path} holds NaN or infinity: {named}; remove these rows and save the file again\n"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_missing_packages_name_the_remedy(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf'needs {package}.*: pip install "levattn\[cli\]"'):
        cli.main()


def test_missing_matplotlib_fails_in_one_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = file.with_name("a.png")
    assert 'pip install "levattn[plot]"' in refused("universal-set", file, "--size", "3", "--plot", picture)
    assert 'pip install "levattn[plot]"' in refused("demo", "--out", file.with_name("demo"))
    assert [path.name for path in file.parent.iterdir()] == ["keys.npy"]


# -- demo ------------------------------------------------------------------------------------------------


def test_demo_misses_nothing_adds_up_and_draws(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    result = run("demo", "--epsilon", "0.08", "--json", "--out", folder)
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    heads, summary = document["heads"], document["summary"]
    assert [(head["layer"], head["head"]) for head in heads] == [(i, j) for i in range(6) for j in range(12)]
    assert document["epsilon"] == 0.08
    for head in heads:
        assert (head["n"], head["d"], head["rank"], head["missed"]) == (512, 32, 32, 0)
        assert head["size"] <= head["size_bound"] == pytest.approx(400)
        assert head["is_vacuous"] is False
        # Every key of a smallest set is needed by some query, and its worst case is one of those tried.
        assert head["heavy_worst_case"] >= head["size"] > 0
        assert 0 < head["captured_softmax"] <= head["captured_softmax_oracle"] < 1
        assert 0 <= head["coverage_size"] <= 512
    assert summary["heads"] == 72
    assert summary["missed"] == summary["vacuous"] == 0
    assert summary["n"] == 72 * 512
    assert summary["heavy"] == sum(head["heavy"] for head in heads) > 0
    assert summary["captured_softmax"] == pytest.approx(np.mean([head["captured_softmax"] for head in heads]))
    assert document["coverage"] == 0.9
    assert summary["coverage_size"] == sum(head["coverage_size"] for head in heads) < summary["n"] / 2
    # Of 256 queries that follow others of their text; the mean over heads is what coverage promises.
    assert summary["coverage_found"] == pytest.approx(np.mean([head["coverage_found"] for head in heads]))
    assert 0.9 <= summary["coverage_found"] < 1
    assert summary["captured_softmax"] < summary["captured_softmax_expected"] < 1
    assert_as_documented(document)
    assert document["files"] == [str(folder / "demo.png"), str(folder / "demo.svg")]
    assert sorted(path.name for path in folder.iterdir()) == ["demo.png", "demo.svg"]
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "demo.svg").read_bytes().startswith(b"<?xml")


# -- as a program ----------------------------------------------------------------------------------------


def test_version_help_and_status_of_a_real_process(file: Path) -> None:
    def program(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "levattn", *arguments], capture_output=True, text=True, check=False
        )

    shown = run("--version")  # in this process: the others show that there is a program
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, f"levattn {levattn.__version__}\n", "")
    failed = program("universal-set", "nothing.npy", "--size", "3")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("levattn: nothing.npy: no such file")
    found = program("universal-set", str(file), "--size", "3", "--json")
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout)["sets"][0]["indices"] == [3, 50, 120]
    reading, writing = os.pipe()
    os.close(reading)
    closed = subprocess.run(
        [sys.executable, "-m", "levattn", "universal-set", str(file), "--size", "3"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (closed.returncode, closed.stderr) == (141, b"")


# -- help ------------------------------------------------------------------------------------------------

COMMANDS = [
    *("demo", "universal-set", "scores", "inspect", "prune-report", "convert"),
    *("profile", "compress", "ask", "evaluate", "warmup", "completion"),
]


def shown_help(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(cli.build_app(), [*arguments, "--help"])
    assert result.exit_code == 0
    return str(result.stdout)


def test_help_names_the_commands_and_comes_without_being_asked_for() -> None:
    text = shown_help()
    listed = text.partition("Commands:\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in listed.splitlines()] == COMMANDS
    assert "..." not in listed  # no sentence is cut off
    assert re.findall(r"^ +(\d+)  ", text, flags=re.MULTILINE) == ["0", "1", "2", "130", "141", "143"]
    alone = CliRunner(env={"COLUMNS": "80"}).invoke(cli.build_app(), [])
    assert (alone.exit_code, alone.stdout) == (0, text)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_fits_the_terminal_and_shows_examples(command: str) -> None:
    lines = shown_help(command).splitlines()
    assert max(map(len, lines)) <= 80
    examples = [
        line for line in lines if line.startswith(f"    levattn {command} ") or line == f"    levattn {command}"
    ]
    assert len(examples) >= (1 if command == "warmup" else 2)  # which takes nothing
    assert lines[-1]


def test_examples_of_the_help_run(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = shown_help("universal-set") + shown_help("scores").replace("year=2025 --id name", "table.csv --id f0")
    for code in re.findall(r"python -c '(.*)'", text):
        exec(code, {})
    for arguments in re.findall(r"^    levattn ((?:universal-set|scores) .*)$", text, flags=re.MULTILINE):
        command, _, piped = arguments.partition(" < ")
        given = Path(piped).read_bytes() if piped else None
        assert CliRunner().invoke(cli.build_app(), command.split(), input=given).exit_code == 0, arguments
    assert (np.load("keys.npy").shape, np.load("q.npy").shape) == ((99, 8), (99, 8))


def assert_columns_explained(command: str, printed: str, without: Collection[str] = ()) -> None:
    """Compare the columns of a table with those that the help and docs/program.md explain, but for some."""
    columns = printed.split("\n")[0].split()
    for explained in columns_explained(command):
        assert set(without) <= set(explained)
        assert [name for name in explained if name not in without] == columns


def columns_explained(command: str, heading: str = "Output, one row", place: int = 1) -> list[list[str]]:
    """The columns that the help explains below a heading, and those of a table of docs/program.md, by its place."""
    block = shown_help(command).partition(heading)[2].partition(":\n")[2].partition("\n\n")[0]
    section = PAGE.partition(f"## levattn {command}\n")[2].partition("\n## ")[0]
    table = section.split("| column |")[place].partition("\n\n")[0]
    both = (
        re.findall(r"^    (\S.*?)  +", block, flags=re.MULTILINE),
        re.findall(r"^\| (.+?) \| ", table.partition("| --- | --- |\n")[2].replace(r"\|", "∣"), flags=re.MULTILINE),
    )
    return [[name.replace("∣", "|") for cell in cells for name in cell.split(", ")] for cells in both]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("universalset",), "'universal-set'"),
        (("demo", "--epsilom", "0.1"), "--epsilon"),
        (("demo", "--epsilon", "2"), "expected 0 < epsilon <= 1"),
    ],
)
def test_a_near_miss_is_answered_by_the_meaning(typed: tuple[str, ...], meant: str) -> None:
    assert meant in refused(*typed, status=2)


# -- exit status -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [("--help",), ("universal-set", "keys.npy", "--size", "3")])
def test_a_full_disk_behind_standard_output(file: Path, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", "from levattn.cli import main; main()", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, cwd=file.parent, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=with_package()
        )
    assert done.returncode == 1
    assert done.stderr == "levattn: no space left on the disk; free some, or write elsewhere\n"


def with_package() -> dict[str, str]:
    """The environment of a process that finds this package from any folder."""
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


# -- completion ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_script_of_each_shell(shell: str) -> None:
    result = run("completion", shell)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"_LEVATTN_COMPLETE=complete_{shell}" in result.stdout.replace(' = "', "=")
    assert "levattn" in result.stdout.replace("_LEVATTN_", "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("levattn", ""), COMMANDS),
        (("levattn", "un"), ["universal-set"]),
        (("levattn", "universal-set", "--me"), ["--method", "--memory"]),
        (("levattn", "universal-set", "--method", "s"), ["svd"]),
        (("levattn", "universal-set", "--function", "so"), ["softmax", "softmax:"]),
        (("levattn", "prune-report", "--scores", "r"), ["residual", "random"]),
        (("levattn", "universal-set", "ke"), []),  # file names are the shell's own
    ],
)
def test_a_request_for_completion_is_answered(words: tuple[str, ...], offered: list[str]) -> None:
    request = {"_LEVATTN_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    result = CliRunner(env=request).invoke(cli.build_app(), [], prog_name="levattn")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.split() == offered


# -- standard input, several arrays, and the usual threshold ------------------------------------------------


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_keys_come_through_a_pipe(tmp_path: Path, keys: Array, suffix: str) -> None:
    path = tmp_path / f"k{suffix}"
    if suffix == ".safetensors":
        pytest.importorskip("safetensors.numpy").save_file({"k": keys}, path)
    else:
        np.save(path, keys) if suffix == ".npy" else np.savez(path, k=keys)
    result = CliRunner().invoke(cli.build_app(), ["universal-set", "-", "--json"], input=path.read_bytes())
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document["file"] == "standard input"
    assert document["sets"][0]["indices"] == levattn.universal_set(keys, 0.1).indices.tolist()  # the usual threshold


def test_a_pipe_that_holds_no_keys_and_one_beside_a_file_are_refused(file: Path) -> None:
    result = CliRunner().invoke(cli.build_app(), ["universal-set", "-"], input=b"x")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "no other file" in refused("universal-set", "-", file)


@pytest.mark.parametrize(("command", "output"), [("universal-set", "s.npz"), ("scores", "s.npy")])
def test_each_of_several_arrays_has_a_table(tmp_path: Path, keys: Array, command: str, output: str) -> None:
    path = tmp_path / "k.npz"
    np.savez(path, first=keys, second=2 * keys[:50], third=keys)
    names = ("--tensor", "first", "--tensor", "second")
    lines = run(command, path, *names, "--json").stdout.splitlines()
    assert [json.loads(line)["tensor"] for line in lines] == ["first", "second"]
    assert [json.loads(line)["shape"][0] for line in lines] == [200, 50]
    shown = run(command, path, *names).stdout
    assert f"{path}: first\n" in shown
    assert f"{path}: second\n" in shown
    for option in ("--output", "--checkpoint"):
        assert "for one array" in refused(command, path, *names, option, tmp_path / output, status=2)
    assert not (tmp_path / output).exists()
    assert "has no tensor 'fourth'" in refused(command, path, *names, "--tensor", "fourth")  # before any table
