"""Tables and their identifiers in the program, `levattn scores`, and runs that a signal ends."""

from __future__ import annotations

import csv
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

from test_cli import assert_as_documented, assert_columns_explained, refused, run  # noqa: E402

import levattn  # noqa: E402

Array = npt.NDArray[Any]

N = 200
NAMES = [f"row {i}" for i in range(N)]


@pytest.fixture
def keys() -> Array:
    rows = np.random.default_rng(5).standard_normal((N, 3))
    rows[[3, 50, 120]] *= 20
    return rows


@pytest.fixture
def table(tmp_path: Path, keys: Array) -> Path:
    columns = {"name": NAMES, **dict(zip("abc", keys.T, strict=True)), "count": range(N)}
    parquet.write_table(pa.table(columns), tmp_path / "table.parquet", row_group_size=70)
    return tmp_path / "table.parquet"


OF_TABLE = ("--columns", "a,b,c", "--id", "name")


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The rows of a written table, as numbers and texts."""
    if path.suffix == ".parquet":
        return list(parquet.read_table(path).to_pylist())
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    with path.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    return [row | {"index": int(row["index"]), "score": float(row["score"])} for row in found]


# -- universal-set -----------------------------------------------------------------------------------------


def test_a_set_names_its_keys(tmp_path: Path, table: Path, keys: Array) -> None:
    expected = levattn.universal_set(keys, 0.1)
    chosen = expected.indices.tolist()
    names = [NAMES[row] for row in chosen]
    shown = run("universal-set", table, *OF_TABLE)
    assert shown.exit_code == 0, shown.stderr
    assert ", ".join(f"{row} ({name})" for row, name in zip(chosen, names, strict=True)) in shown.stdout
    told = run("universal-set", table, *OF_TABLE, "--json", "-o", tmp_path / "set.npz")
    document = json.loads(told.stdout)
    assert_as_documented(
        document | {"sets": [{**document["sets"][0], "hidden_groups": [{"score": 1.0, "indices": []}]}]}
    )
    assert (document["id"], document["columns"]) == ("name", ["a", "b", "c"])
    assert document["sets"][0]["ids"] == names
    with np.load(tmp_path / "set.npz") as stored:
        assert stored["ids"].tolist() == names
        assert stored["indices"].tolist() == chosen
    for option in (("--method", "qr"), ("--size", "3", "--function", "huber"), ("--duplicates", "0.1")):
        document = json.loads(run("universal-set", table, *OF_TABLE, *option, "--json").stdout)
        assert document["sets"][0]["ids"] == [NAMES[row] for row in document["sets"][0]["indices"]]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_scores_of_a_set(tmp_path: Path, table: Path, keys: Array, suffix: str) -> None:
    expected = levattn.universal_set(keys, 0.05)
    path = tmp_path / f"heavy{suffix}"
    assert run("universal-set", table, *OF_TABLE, "--epsilon", "0.05", "--scores", path).exit_code == 0
    scores = expected.scores[expected.mask].tolist()
    assert rows_in(path) == [
        {"index": row, "id": NAMES[row], "score": score}
        for row, score in zip(expected.indices.tolist(), scores, strict=True)
    ]
    heads = np.stack([keys, keys[::-1]])
    np.save(tmp_path / "heads.npy", heads)
    assert run("universal-set", tmp_path / "heads.npy", "--epsilon", "0.05", "--scores", path).exit_code == 0
    sets = levattn.universal_set(heads, 0.05)
    assert [(row["item"], row["index"], row["score"]) for row in rows_in(path)] == [
        (str(item), index, sets.scores[item, index]) for item, index in np.argwhere(sets.mask).tolist()
    ]
    assert run("universal-set", table, *OF_TABLE, "--size", "0", "--scores", path).exit_code == 0
    assert rows_in(path) == []


def test_a_table_on_workers(tmp_path: Path, table: Path, keys: Array) -> None:
    distributed = pytest.importorskip("distributed")
    expected = levattn.universal_set(keys, 0.1).indices.tolist()
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0", protocol="tcp"
    ) as cluster:
        result = run(
            *("universal-set", table, *OF_TABLE, "--scheduler", cluster.scheduler_address, "--json"),
            *("--epsilon", "0.1", "--scores", tmp_path / "heavy.csv"),
        )
    assert json.loads(result.stdout)["sets"][0]["ids"] == [NAMES[row] for row in expected]
    assert [row["id"] for row in rows_in(tmp_path / "heavy.csv")] == [NAMES[row] for row in expected]


def test_queries_in_a_table_take_the_columns_of_the_keys(tmp_path: Path, table: Path, keys: Array) -> None:
    Q = np.random.default_rng(7).standard_normal((60, 3))
    columns = {"c": Q[:, 2], "a": Q[:, 0], "other": Q[:, 0], "b": Q[:, 1]}
    parquet.write_table(pa.table(columns), tmp_path / "q.parquet")
    result = run("universal-set", table, *OF_TABLE, "--queries", tmp_path / "q.parquet", "--coverage", "0.8", "--json")
    expected = levattn.covering_set(keys, Q, 0.1, coverage=0.8)
    assert json.loads(result.stdout)["sets"][0]["indices"] == expected.indices.tolist()
    np.save(tmp_path / "q.npy", Q)
    result = run("universal-set", table, *OF_TABLE, "--queries", tmp_path / "q.npy", "--coverage", "0.8", "--json")
    assert json.loads(result.stdout)["sets"][0]["indices"] == expected.indices.tolist()


def test_integers_are_converted_on_request(tmp_path: Path, table: Path) -> None:
    whole = np.random.default_rng(8).integers(-9, 9, (50, 4))
    np.save(tmp_path / "whole.npy", whole)
    line = refused("universal-set", tmp_path / "whole.npy")
    assert "holds int64, expected floats; convert it with --dtype float64 or --dtype float32\n" in line
    document = json.loads(run("universal-set", tmp_path / "whole.npy", "--dtype", "float32", "--json").stdout)
    assert document["dtype"] == "float32"
    assert document["sets"][0]["indices"] == levattn.universal_set(whole.astype(np.float32), 0.1).indices.tolist()
    assert (
        "beyond the range of float16; name a wider --dtype\n"
        in refused("universal-set", tmp_path / "large.npy", "--dtype", "float16")
        if not np.save(tmp_path / "large.npy", whole * 10**6)
        else False
    )
    assert "convert it with --dtype" in refused("scores", table, "--columns", "a,count")


def test_a_column_whose_name_has_a_comma(tmp_path: Path) -> None:
    path, X = tmp_path / "units.csv", np.random.default_rng(0).standard_normal((9, 2))
    np.savetxt(path, X, "%.17g", ",", header='x,"y, in ""m"""', comments="")
    for columns in ((), ("--columns", 'x,"y, in ""m"""')):
        assert run("scores", path, *columns, "-o", tmp_path / "found.npy").exit_code == 0
        np.testing.assert_allclose(np.load(tmp_path / "found.npy"), levattn.leverage_scores(X), rtol=1e-9)


@pytest.mark.parametrize("command", ["universal-set", "scores"])
def test_wrong_names_of_columns(tmp_path: Path, table: Path, command: str) -> None:
    for arguments, reason in (
        (
            ("--columns", "a,d"),
            "has no column 'd', it holds 'name', 'a', 'b', 'c', 'count'; give one of these as --columns",
        ),
        (("--id", "names"), "has no column 'names', it holds 'name', 'a', 'b', 'c', 'count'; did you mean 'name'?"),
        ((), "column 'name' holds string, expected floats; choose columns of numbers with --columns, and name the"),
    ):
        assert reason in refused(command, table, *arguments)
    for columns in ("a,,b", "a,a", "", 'a,"b', "a\nb"):
        assert "expected different names with commas" in refused(command, table, f"--columns={columns}", status=2)
    np.save(tmp_path / "keys.npy", np.eye(3))
    line = refused(command, tmp_path / "keys.npy", "--id", "name")
    assert line.endswith("holds an array without columns, got --id 'name'; leave --id out\n")


# -- scores ------------------------------------------------------------------------------------------------


def scores_of(keys: Any, options: tuple[str, ...], queries: Array) -> Array:
    """The scores of the library that these options ask for."""
    f = options[options.index("--function") + 1] if "--function" in options else 2
    if "--queries" in options:
        return np.asarray(levattn.expected_scores(keys, queries, f=f))
    return np.asarray(levattn.leverage_scores(keys) if f == 2 else levattn.sensitivities(keys, f).upper)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ((), "leverage"),
        (("--function", "huber:0.5"), "sensitivity"),
        (("--function", "softmax:0.5"), "sensitivity"),
        (("--queries", "q.npy"), "expected"),
        (("--queries", "q.npy", "--function", "softmax"), "expected"),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet", ".npy"])
def test_scores_are_those_of_the_library(
    tmp_path: Path,
    table: Path,
    keys: Array,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    kind: str,
    suffix: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    queries = np.random.default_rng(9).standard_normal((30, 3))
    np.save("q.npy", queries)
    expected = scores_of(keys, options, queries)
    path = tmp_path / f"scores{suffix}"
    of_table = OF_TABLE if suffix != ".npy" else OF_TABLE[:2]
    result = run("scores", table, *of_table, *options, "-o", path, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert_as_documented(document)
    assert (document["kind"], document["output"], document["shape"]) == (kind, str(path), [N, 3])
    if suffix == ".npy":
        np.testing.assert_allclose(np.load(path), expected, rtol=2e-9)
    else:
        rows = rows_in(path)
        assert [(row["index"], row["id"]) for row in rows] == list(enumerate(NAMES))
        np.testing.assert_allclose([row["score"] for row in rows], expected, rtol=2e-9)
    (report,) = document["matrices"]
    order = np.argsort(-expected, kind="stable")[:12]
    assert report["indices"] == order.tolist()
    assert report["ids"] == ([NAMES[row] for row in order] if suffix != ".npy" else None)
    figures = [report["sum"], report["largest"], report["smallest"], *report["scores"]]
    wanted = [expected.sum(), expected.max(), expected.min(), *expected[order]]
    np.testing.assert_allclose(figures, wanted, rtol=1e-8)


def test_scores_as_a_table(table: Path, keys: Array) -> None:
    result = run("scores", table, *OF_TABLE)
    assert result.exit_code == 0, result.stderr
    assert_columns_explained("scores", result.stdout)
    first = levattn.leverage_scores(keys).argmax()
    assert f"keys of largest score: {first} (row {first}): " in result.stdout


def test_scores_of_batches_and_of_no_keys(tmp_path: Path, keys: Array) -> None:
    heads = np.stack([keys, keys[::-1]]).astype(np.float32)
    np.save(tmp_path / "heads.npy", heads)
    path = tmp_path / "scores.csv"
    document = json.loads(run("scores", tmp_path / "heads.npy", "-o", path, "--json").stdout)
    expected = levattn.leverage_scores(heads)
    assert [report["item"] for report in document["matrices"]] == [[0], [1]]
    assert [(row["item"], row["index"]) for row in rows_in(path)] == [(str(i), j) for i in (0, 1) for j in range(N)]
    np.testing.assert_allclose([row["score"] for row in rows_in(path)], expected.ravel(), rtol=2e-5)
    np.save(tmp_path / "none.npy", keys[:0])
    (tmp_path / "none.csv").write_text("name,a\n")
    for arguments in ((tmp_path / "none.npy",), (tmp_path / "none.csv", "--id", "name")):
        result = run("scores", *arguments, "-o", path)
        assert result.exit_code == 0, result.stderr
        assert "keys of largest score: none" in result.stdout
        assert rows_in(path) == []


def test_scores_of_a_table_of_many_rows(tmp_path: Path) -> None:
    count = 150_000
    X = np.random.default_rng(3).standard_normal((count, 2))
    columns = {"a": X[:, 0], "b": X[:, 1], "name": np.arange(count)[::-1]}
    for part, rows in enumerate((slice(0, 70_001), slice(70_001, count))):
        where = tmp_path / "table" / f"part={part}" / "keys.parquet"
        where.parent.mkdir(parents=True)
        parquet.write_table(pa.table({name: column[rows] for name, column in columns.items()}), where)
    output = tmp_path / "scores.parquet"
    result = run("scores", tmp_path / "table", "--id", "name", "--memory", "1", "-o", output)
    assert result.exit_code == 0, result.stderr
    written = parquet.read_table(output)
    np.testing.assert_array_equal(written["id"].to_numpy(), columns["name"])
    np.testing.assert_array_equal(written["index"].to_numpy(), np.arange(count))
    np.testing.assert_allclose(written["score"].to_numpy(), levattn.leverage_scores(X), rtol=2e-9)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--queries-tensor", "q"), "give --queries as well"),
        (("--function", "huber", "--memory", "3"), "--memory and --checkpoint are for --function 2 without --queries"),
        (("--queries", "q.npy", "--checkpoint", "state"), "--memory and --checkpoint are for --function 2"),
        (("--id", "a", "-o", "scores.npy"), "scores.npy has no place for the identifiers of --id"),
        (("-o", "scores.txt"), "ends in '.txt', expected .parquet or .csv or .jsonl or .npy"),
        (("--function", "softmax"), "softmax needs the largest norm of a query"),
        (("--columns", "a", "--columns", "b"), "--columns comes 2 times; give it once with commas between the names"),
        (("-o", "a.csv", "--output", "b.csv"), "--output comes 2 times; give it once"),
        (("--dtype", "int8"), "'int8' is not one of 'float64', 'float32', 'float16'"),
    ],
)
def test_wrong_command_lines_of_scores(table: Path, arguments: tuple[str, ...], reason: str) -> None:
    line = refused("scores", table, *arguments, status=2)
    assert reason in line
    assert line.endswith(" levattn scores --help\n")


def test_identifiers_of_two_kinds_are_refused_and_leave_nothing(tmp_path: Path, keys: Array) -> None:
    features = dict(zip("abc", keys.T, strict=True))
    for name, ids in (("1", range(N)), ("2", NAMES)):
        parquet.write_table(pa.table({"name": ids, **features}), tmp_path / f"{name}.parquet")
    for suffix in (".csv", ".parquet"):
        out = tmp_path / f"scores{suffix}"
        line = refused("scores", tmp_path / "1.parquet", tmp_path / "2.parquet", "--id", "name", "-o", out)
        assert "column 'name' does not hold one kind of integers or strings in all files; save it as one type" in line
        assert not out.exists()


def test_outputs_that_would_overwrite_the_keys(tmp_path: Path, table: Path) -> None:
    before = table.read_bytes()
    assert "is the file of the keys, which --output would overwrite" in refused(
        "scores", table, *OF_TABLE, "-o", table
    )
    line = refused("scores", table, *OF_TABLE, "-o", tmp_path / "x.csv", "--checkpoint", tmp_path / "x.csv")
    assert "are the same file; name two with --output and --checkpoint" in line
    line = refused("universal-set", table, *OF_TABLE, "--scores", table)
    assert "is the file of the keys, which --scores would overwrite" in line
    assert table.read_bytes() == before


def test_rows_that_are_not_finite_and_nulls(tmp_path: Path, keys: Array) -> None:
    path = tmp_path / "keys.csv"
    path.write_text("a,b\n1.5,2\n3,nan\n")
    assert refused("scores", path, "--dtype", "float64").endswith(
        f"{path} holds NaN or infinity: row 1; remove these rows and save the file again\n"
    )
    path.write_text("a,b\n1.5,2\n3,\n")
    line = refused("scores", path, "--dtype", "float64", "-o", tmp_path / "scores.csv")
    assert "column 'b' has nulls, the first in row 1; leave out the rows with nulls" in line
    assert not (tmp_path / "scores.csv").exists()


# -- signals -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_the_handler_of_a_caller_stays(table: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert run("scores", table, *OF_TABLE).exit_code == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert run("scores", table, *OF_TABLE).exit_code == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    found = []
    thread = threading.Thread(target=lambda: found.append(run("scores", table, *OF_TABLE).exit_code))
    thread.start()
    thread.join()
    assert found == [0]


def test_weights_in_a_column(tmp_path: Path, table: Path, keys: Array) -> None:
    count = np.arange(N)
    expected = levattn.leverage_scores(keys, weights=count)
    told = json.loads(
        run("scores", table, "--id", "name", "--weights", "count", "--dtype", "float64", "--json").stdout
    )
    assert_as_documented(told)
    assert (told["weights"], told["columns"]) == ("count", ["a", "b", "c"])
    order = np.argsort(-expected, kind="stable")[:12].tolist()
    assert told["matrices"][0]["indices"] == order
    np.testing.assert_allclose(told["matrices"][0]["scores"], expected[order], rtol=1e-9)
    weighted = ("universal-set", table, *OF_TABLE, "--weights", "count", "--epsilon", "0.05", "--json")
    found = json.loads(run(*weighted).stdout)
    assert found["sets"][0]["indices"] == levattn.universal_set(keys, 0.05, weights=count).indices.tolist()
    for options, words in (
        (("--weights", "a", "--columns", "a,b"), "--weights a is a feature as well"),
        (("--weights", "none", "--columns", "a,b"), "give one of these as --weights"),
        (("--weights", "name", "--columns", "a,b"), "name"),
    ):
        assert words in refused("scores", table, *options)
    np.save(tmp_path / "keys.npy", keys)
    whole = ("scores", table, "--id", "name", "--weights", "count", "--json")  # of integers, and no feature
    np.testing.assert_allclose(json.loads(run(*whole).stdout)["matrices"][0]["scores"], expected[order], rtol=1e-9)
    np.savez(tmp_path / "two.npz", a=keys, b=keys)
    several = ("universal-set", tmp_path / "two.npz", "--tensor", "a", "--tensor", "b", "--weights", "count")
    assert "array without columns, got --weights count" in refused(*several)
    told = refused("scores", tmp_path / "keys.npy", "--weights", "count")
    assert "array without columns, got --weights count; leave --weights out" in told
    for command in (
        ("scores", table, "--function", "huber"),
        ("universal-set", table, "--center"),
        ("universal-set", table, "--scheduler", "tcp://10.0.0.1:8786"),
    ):
        assert "--weights is for --function 2" in refused(*command, "--weights", "count", status=2)
