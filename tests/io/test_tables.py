"""Keys in tables: columns of numbers, lists, text, folders of partitions, identifiers, and conversions of numbers."""

from __future__ import annotations

import csv
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import levattn
from key_files import check_cut_is_seen, write
from levattn.exceptions import KeyFileError
from levattn.io import KeySource, open_keys

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
scipy_sparse = pytest.importorskip("scipy.sparse")

Array = npt.NDArray[Any]

N, D = 101, 3
K = np.random.default_rng(5).standard_normal((N, D))
NAMES = ["a", "b", "c"]
IDS = [f"row {i:03}" for i in range(N)]
TABLES = ["parquet", "csv", "tsv"]


def save(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    """Write columns as the suffix says; text by repr, which float64 reads back to the bit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pa.table(columns), path, **{"row_group_size": 30, **options})
        return path
    separator = "\t" if path.suffix == ".tsv" else ","
    rows = zip(*(np.asarray(column).tolist() for column in columns.values()), strict=True)
    lines = [separator.join(columns), *(separator.join(map(str, row)) for row in rows)]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def features(X: Array = K) -> dict[str, Any]:
    return dict(zip(NAMES, X.T, strict=True))


def refused(message: str, path: Any, error: type[Exception] = KeyFileError, **options: Any) -> None:
    with pytest.raises(error, match=message):
        open_keys(path, **options).load()


def check(source: KeySource, X: Array) -> None:
    """All ways of reading give these rows."""
    assert (source.shape, source.dtype) == (X.shape, X.dtype)
    n = len(X)
    for _ in range(2):
        np.testing.assert_array_equal(np.concatenate([X[:0], *source]), X)
    np.testing.assert_array_equal(source.load(), X)
    for start, stop in ((0, 0), (n // 3, n // 2), (n - 1, n), (1, n)):
        np.testing.assert_array_equal(source.read(start, stop), X[start:stop])
        np.testing.assert_array_equal(source.between(start, stop).load(), X[start:stop])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(source)).load(), X)


# -- columns of numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("chunk_rows", [1000, 7])
def test_a_column_for_each_feature(tmp_path: Path, kind: str, chunk_rows: int) -> None:
    source = open_keys(save(tmp_path / f"keys.{kind}", features()), chunk_rows=chunk_rows)
    assert (source.columns, source.tensor, source.id) == (("a", "b", "c"), None, None)
    check(source, K)
    chosen = open_keys(tmp_path / f"keys.{kind}", columns=["c", "a"], chunk_rows=chunk_rows)
    assert chosen.columns == ("c", "a")
    check(chosen, K[:, [2, 0]])
    check(open_keys(tmp_path / f"keys.{kind}", columns="b"), K[:, [1]])


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_longer_than_a_batch(tmp_path: Path, kind: str) -> None:
    X = np.random.default_rng(6).integers(-9, 9, (90_000, D)) + 0.5
    path = save(tmp_path / f"keys.{kind}", {**features(X), "name": np.arange(len(X))}, row_group_size=40_000)
    source = open_keys(path, id="name", chunk_rows=20_000)
    check(source, X)
    rows = np.array([89_999, 3, 70_000, 3])
    assert source.ids(rows).tolist() == [int(row) if kind == "parquet" else str(row) for row in rows]


def test_the_widest_of_several_types(tmp_path: Path) -> None:
    columns = {"a": K[:, 0].astype(np.float32), "b": K[:, 1].astype(np.float16), "c": K[:, 2]}
    check(
        open_keys(save(tmp_path / "keys.parquet", columns)), np.stack([x.astype(float) for x in columns.values()], 1)
    )
    check(
        open_keys(tmp_path / "keys.parquet", columns=["a", "b"]),
        np.stack([columns["a"], columns["b"].astype(np.float32)], 1),
    )


def test_an_index_of_pandas_is_no_feature(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(K, columns=NAMES, index=np.arange(N) ** 2)[::2]
    frame.to_parquet(tmp_path / "keys.parquet")
    check(open_keys(tmp_path / "keys.parquet"), K[::2])
    assert open_keys(tmp_path / "keys.parquet", id="__index_level_0__").ids([1]).tolist() == [4]
    frame.to_csv(tmp_path / "keys.csv")
    refused(r"has a column without a name \(pandas writes its index so\); choose", tmp_path / "keys.csv")
    check(open_keys(tmp_path / "keys.csv", id=""), K[::2])


@pytest.mark.parametrize("kind", TABLES)
def test_nan_is_read_and_nulls_are_refused(tmp_path: Path, kind: str) -> None:
    X = K.copy()
    X[40, 1] = np.nan
    path = save(tmp_path / f"keys.{kind}", features(X))
    check(open_keys(path), X)
    with pytest.raises(levattn.NonFiniteError, match="row 40"):
        levattn.universal_set(open_keys(path), 0.1)
    b = [None if row == 70 else x for row, x in enumerate(K[:, 1].tolist())]
    if kind == "parquet":
        save(path, features() | {"b": b})
    else:
        path.write_text(path.read_text().replace(repr(K[70, 1].item()), ""))
        X[40, 1] = K[40, 1]
    refused(r"column 'b' has nulls, the first in row 70; leave out the rows with nulls", path)
    check(open_keys(path, columns=["a", "c"]), K[:, [0, 2]])


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_other_columns_are_refused(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path / f"keys.{kind}", features() | {"text": IDS, "whole": range(N), "flag": [True] * N})
    refused(r"column 'text' holds string, expected floats; choose columns of numbers with columns=", path)
    refused(r"column 'flag' holds bool, expected floats; choose", path, columns=["a", "flag"])
    refused(r"column 'whole' holds int64, expected floats; convert it with dtype=", path, columns=["a", "whole"])
    refused(r"has no column 'A', it holds 'a', 'b', 'c', .*; give one of these as columns=", path, columns=["A", "b"])
    refused(r"has no column 'texts', .*; did you mean 'text'\?", path, id="texts")
    refused(r"column 'flag' holds bool, expected integers or strings", path, id="flag") if kind == "parquet" else None
    both = np.column_stack([K[:, 0], np.arange(N)])
    check(open_keys(path, columns=["a", "whole"], dtype="float64"), both)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(K[:, 0]), pa.array(K[:, 1])], names=["a", "a"])
    parquet.write_table(table, tmp_path / "keys.parquet")
    (tmp_path / "keys.csv").write_text("a,a\n1.5,2\n")
    for name in ("keys.parquet", "keys.csv"):
        refused(r"several columns have the same name, 'a'; rename them", tmp_path / name)


def test_files_with_other_columns_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "1.parquet", features())
    save(tmp_path / "2.csv", dict(reversed(features().items())))
    refused(r"2\.csv: has the columns 'c', 'b', 'a', and .*1\.parquet has 'a', 'b', 'c'; choose columns", tmp_path)
    check(open_keys(tmp_path, columns=["c", "a"], chunk_rows=30), np.concatenate([K, K])[:, [2, 0]])
    np.save(tmp_path / "3.npy", K)
    refused(r"3\.npy: holds an array without columns, got columns=\('a',\); leave columns out", tmp_path, columns="a")
    refused(r"3\.npy: holds an array without columns, got id='a'; leave id out", tmp_path / "3.npy", id="a")


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    path = save(tmp_path / "keys.parquet", features())
    for options, error, message in (
        ({"columns": []}, ValueError, "one or more names"),
        ({"columns": ["a", "a"]}, ValueError, "each once"),
        ({"columns": ["a"], "id": "a"}, ValueError, "without the one of id"),
        ({"columns": [1]}, TypeError, r"columns are \(1,\); expected names"),
        ({"columns": 3}, TypeError, "expected names"),
        ({"columns": ["a"], "tensor": "b"}, ValueError, "expected one of them"),
        ({"id": 3}, TypeError, "id must be the name of a column"),
        ({"dtype": "int32"}, ValueError, "dtype is 'int32'; expected 'float64', 'float32' or 'float16'"),
        ({"dtype": "number"}, ValueError, "dtype is 'number'; expected"),
    ):
        refused(message, path, error, **options)


# -- columns of lists --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [lambda t: pa.list_(t), lambda t: pa.large_list(t), lambda t: pa.list_(t, D)])
@pytest.mark.parametrize("number", [np.float64, np.float32, np.float16, np.int8])
def test_lists_of_one_length(tmp_path: Path, kind: Callable[[Any], Any], number: Any) -> None:
    X = (10 * K).astype(number)
    lists = pa.array(list(X), kind(pa.from_numpy_dtype(number)))
    path = save(tmp_path / "keys.parquet", {"K": lists, "text": IDS, "token": range(N)})
    if number is np.int8:
        refused("column 'K' holds int8, expected floats; convert it with dtype=", path)
        X = X.astype(np.float32)
    source = open_keys(path, id="text", dtype="float32" if number is np.int8 else None, chunk_rows=17)
    assert (source.tensor, source.columns) == ("K", None)
    check(source, X)
    assert source.ids([100, 0]).tolist() == [IDS[100], IDS[0]]


def test_lists_of_other_lengths_are_refused(tmp_path: Path) -> None:
    lists = K.tolist()
    for row, there, message in (
        (50, [1.0], "column 'K' holds lists of 3 and of 1 numbers, expected one length"),
        (50, None, "column 'K' has nulls, the first in row 50"),
        (0, None, "column 'K' has nulls, the first in row 0"),
        (50, [1.0, None, 2.0], "column 'K' has nulls"),
        (0, [], "column 'K' holds lists of 0 numbers, expected at least 1"),
    ):
        path = save(tmp_path / "keys.parquet", {"K": [there if i == row else x for i, x in enumerate(lists)]})
        refused(message, path)
    save(path, {"K": pa.array([], pa.list_(pa.float32()))})
    refused("has no rows, so that the length of the lists in column 'K' is not known", path)


# -- text --------------------------------------------------------------------------------------------------


def test_text_without_names(tmp_path: Path) -> None:
    path = tmp_path / "keys.csv"
    np.savetxt(path, K, delimiter=",")
    source = open_keys(path)
    assert source.columns == ("f0", "f1", "f2")
    check(source, K)
    check(open_keys(path, columns=["f2", "f0"]), K[:, [2, 0]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,1\n2.5,3\n", "begins with a line of whole numbers, '0', '1', which may be names or a row; write a line"),
        ("x,0.5\n2.5,3\n", "begins with a line that holds '0.5' beside text; write a line of names"),
        ("a;b\n2.5;3\n", "has one column, 'a;b', by the separator of its suffix; separate .csv files by commas"),
        ("a\tb\n2.5\t3\n", r"has one column, 'a\\tb', by the separator"),
        ("a,b\n2.5,3\n1\n", r"truncated or damaged \(CSV parse error: .*Expected 2 columns, got 1"),
        (
            "a,b\n2.5,3.5\n" + "1.5,2.5\n" * 600_000 + "x,3\n",
            r"truncated or damaged \(.*Row #600003: .*conversion error.*'x'",
        ),
        ("2.5,3.5\n" + "1.5,2.5\n" * 600_000 + "1\n", r"damaged \(.*Row #600002: Expected 2 columns, got 1"),
        ("a,b\n2.5,NA\n", "column 'b' holds string"),
        ("a,b\n2.5,\n", "column 'b' has nulls, the first in row 0"),
        ("", r"truncated or damaged \("),
        (
            "a,b\n1,2\n3,4\n",
            "column 'a' holds int64, expected floats; convert it with dtype='float64' or dtype='float32', or leave",
        ),
    ],
)
def test_other_text_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys.csv").write_text(text)
    refused(message, tmp_path / "keys.csv")


def test_layouts_of_text(tmp_path: Path) -> None:
    path = tmp_path / "keys.csv"
    expected = np.array([[1.0, 2.5], [3.0, -4e-300]])
    for text in (
        "a,b\n1,2.5\n3,-4e-300",
        '\ufeffa,b\r\n"1","2.5"\r\n\r\n3,-4e-300\r\n',
        'a,"b"\n1.0,2.50\n3,-4E-300\n',
    ):
        path.write_bytes(text.encode())
        check(open_keys(path, dtype="float64"), expected)
    path.write_text("a,b\n")
    assert open_keys(path).shape == (0, 2)
    refused(r"a \.csv file holds one array without a name, got tensor='a'", path, tensor="a")


def test_identifiers_in_text_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "keys.csv").write_text('name,a\n007,1.5\n"x,y",2.5\n1e5,3.5\n,4.5\n')
    source = open_keys(tmp_path / "keys.csv", id="name")
    assert source.ids().tolist() == ["007", "x,y", "1e5", ""]
    check(source, np.array([[1.5], [2.5], [3.5], [4.5]]))


ROWS_IN_QUOTES = {
    "newlines": '{0}.5,"token {0}\n7.5,more"\n',
    "quotes": '{0}.5,"token ""{0}"""\n',
    "both": '{0}.5,"{0}""\n""\n""\n"\n',
    "plain quotes": '{0}.5,5" pipe {0}\n',
    "both kinds": '{0}.5,5" pipe {0}\n{0}.5,"a\n""\n{0}.5"\n',
    "returns": '{0}.5,"token {0}\r\n\r\n"\r\n',
}


@pytest.mark.parametrize("row", ROWS_IN_QUOTES)
@pytest.mark.parametrize("rows", [3, 120_000], ids=["one piece", "several"])
def test_fields_in_quotes_are_read_as_by_the_standard_library(tmp_path: Path, row: str, rows: int) -> None:
    path = tmp_path / "keys.csv"
    path.write_text("a,id\n" + "".join(map(ROWS_IN_QUOTES[row].format, range(rows))), newline="")
    with path.open(newline="") as stream:
        _, *expected = csv.reader(stream)
    source = open_keys(path, id="id")
    assert source.shape == (len(expected), 1)
    check(source, np.array([[float(number)] for number, _ in expected]))
    assert source.ids([0, len(expected) - 1]).tolist() == [expected[0][1], expected[-1][1]]


@pytest.mark.parametrize("shift", range(0, 12, 3))
def test_a_newline_in_quotes_where_a_piece_ends_is_no_row(tmp_path: Path, shift: int) -> None:
    path, piece = tmp_path / "keys.csv", 4 * 2**20
    begin, row, special = "a,id\n", "0.25,x\n", '9.5,"tok\n7.5,more"\n'
    begin += row * ((piece - 80) // len(row))
    begin += f"0.{'5' * (piece - len(begin) - 18 - shift)},x\n"
    path.write_text(begin + special + row * 1000)
    source = open_keys(path, id="id")
    assert source.shape == (begin.count("\n") + 1000, 1)
    K = source.load()[:, 0]
    assert (K == 9.5).sum() == 1
    assert not (K == 7.5).any()


@pytest.mark.parametrize("empty", [1, 3, 4 * 2**20 + 1])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_empty_lines_where_a_piece_ends(tmp_path: Path, empty: int, shift: int) -> None:
    path, piece = tmp_path / "keys.csv", 4 * 2**20
    rows = (piece - 8) // 4
    begin = "n0\n" + ".55\n" * rows
    begin += f"0.{'5' * (piece - len(begin) - 3 + shift)}\n"
    path.write_text(begin + "\n" * empty)
    assert open_keys(path).shape == (rows + 1, 1)
    path.write_text(begin + "\n" * empty + "1.5\n")
    refused("nulls, the first in row", path)
    path.write_text(begin.replace("\n", ",.5\n").replace("n0,.5", "n0,n1") + "\n" * empty + "1.5,2.5\n")
    assert open_keys(path).shape == (rows + 2, 2)


def test_an_empty_line_is_a_null_where_there_is_one_column(tmp_path: Path) -> None:
    path = tmp_path / "keys.csv"
    for text in (
        "\ufeff\n\na\n1.5\n2.5",
        "\ufeffa\n1.5\n2.5",
        "\n\na\n1.5\n2.5",
        "a\n1.5\n2.5\n\n\n",
        "1.5\r\n2.5\r\n\r\n",
    ):
        path.write_text(text, newline="")
        check(open_keys(path), np.array([[1.5], [2.5]]))
    for text in ("a\n1.5\n\n2.5\n", "1.5\n\n2.5\n", "a\n\n1.5\n"):
        path.write_text(text)
        refused("nulls, the first in row", path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_text_of_many_pieces(tmp_path: Path, end: str) -> None:
    n = 40_000
    numbers = np.random.default_rng(15).integers(-(10**6), 10**6, (n, 2))
    lines = ["id,a,b", *(f"row {i},{a}.{'0' * 60}5,{b}.{'5' * 60}" for i, (a, b) in enumerate(numbers.tolist()))]
    lines[5:5] = [""] * 3
    lines[20_000:20_000] = [""] * (6 * 2**20)  # more than is read at once
    (tmp_path / "keys.csv").write_bytes(end.join(lines).encode())
    source = open_keys(tmp_path / "keys.csv", id="id", chunk_rows=9973)
    ids = [f"row {i}" for i in range(n)]
    assert source.ids().tolist() == ids
    K = np.array([[float(text) for text in line.split(",")[1:]] for line in lines[1:] if line])
    check(source, K)
    assert list(source.ids([30_000, 3])) == [ids[30_000], ids[3]]


def test_a_long_line_of_text(tmp_path: Path) -> None:
    X = np.random.default_rng(8).standard_normal((3, 3000))
    np.savetxt(tmp_path / "keys.csv", X, delimiter=",", fmt="%400.17g")
    assert (tmp_path / "keys.csv").stat().st_size > 3 * 2**20
    np.testing.assert_array_equal(open_keys(tmp_path / "keys.csv").load(), X)


# -- folders of partitions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_folders_of_partitions(tmp_path: Path, kind: str) -> None:
    for year, part in ((2009, K[:30]), (2010, K[30:70]), (10000, K[70:])):
        for name, rows in (("x-2", part[10:]), ("x-10", part[:10])):
            where = tmp_path / f"year={year}" / f"place=North%20{name[0]}" / f"{name}.{kind}"
            save(where, features(rows) | {"n": np.arange(len(rows))})
    order = np.concatenate(
        [np.r_[start + 10 : stop, start : start + 10] for start, stop in ((0, 30), (30, 70), (70, N))]
    )
    source = open_keys(tmp_path, columns=NAMES, id="n", chunk_rows=17)
    check(source, K[order])
    assert list(map(int, source.ids([0, 20, 29, 100]))) == [0, 0, 9, 9]
    years = np.repeat([2009.0, 2010, 10000], [30, 40, 31])
    check(open_keys(tmp_path, columns=["year", "b"], dtype="float64"), np.column_stack([years, K[order, 1]]))
    check(open_keys(tmp_path, columns=["year"], dtype="float32"), years[:, None].astype(np.float32))
    assert open_keys(tmp_path, columns=["a"], id="year").ids([0, 30, 70]).tolist() == [2009, 2010, 10000]
    assert open_keys(tmp_path, columns=["a"], id="place").ids([0]).tolist() == ["North x"]
    refused("column 'place' holds string, expected floats", tmp_path, columns=["a", "place"])
    refused("column 'year' holds int64, expected floats; convert it", tmp_path, columns=["a", "year"])
    np.save(tmp_path / "more.npy", K)
    refused("the folder holds both 'more.npy' and|the folder holds both 'more.npy', 'year=", tmp_path)
    (tmp_path / "more.npy").unlink()
    (tmp_path / "month=1").mkdir()
    refused("the folder holds both 'month=1', 'year=2009'; open one of them", tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_column_hides_a_folder_of_its_name(tmp_path: Path, kind: str) -> None:
    where = tmp_path / "a=7" / "b=8" / "x=9" / f"keys.{kind}"
    save(where, features())
    check(open_keys(tmp_path), K)
    check(open_keys(tmp_path, columns=["b", "a"]), K[:, [1, 0]])
    source = open_keys(tmp_path, columns="a", id="x")
    assert source.ids([0]).tolist() == [9]
    check(source, K[:, [0]])
    mixed = np.column_stack([K[:, 1], np.full(N, 9.0), K[:, 0]])
    check(open_keys(where, columns=["b", "x", "a"], dtype="float64"), mixed)


def test_partitions_that_pyarrow_writes(tmp_path: Path) -> None:
    label = ["a b/c" if i % 2 else "x" for i in range(N)]
    parquet.write_to_dataset(pa.table(features() | {"label": label}), tmp_path, partition_cols=["label"])
    source = open_keys(tmp_path, id="label")
    assert source.columns == tuple(NAMES)
    assert sorted(source.ids()) == sorted(label)
    np.testing.assert_array_equal(source.load()[source.ids() == "x"], K[::2])


# -- identifiers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        np.arange(N)[::-1],
        np.arange(N, dtype=np.uint8),
        IDS,
        pa.array(IDS, pa.large_string()),
        pa.array(IDS).dictionary_encode(),
        pa.array(np.arange(N) // 2).dictionary_encode(),
    ],
)
def test_identifiers(tmp_path: Path, names: Any) -> None:
    plain = names.to_pylist() if hasattr(names, "to_pylist") else list(names)
    for shard, rows in enumerate((slice(0, 40), slice(40, 41), slice(41, N))):
        save(tmp_path / f"{shard}.parquet", features(K[rows]) | {"name": names[rows]})
    source = open_keys(tmp_path, id="name")
    assert (source.id, source.columns) == ("name", ("a", "b", "c"))
    assert source.ids().tolist() == plain
    for rows in ([], [0], [100, 40, 39, 41, 40, 0], np.arange(N)[::-1]):
        assert source.ids(rows).tolist() == [plain[row] for row in rows]
    assert source.between(35, 60).ids([0, 24]).tolist() == [plain[35], plain[59]]
    found = levattn.universal_set(source, 0.1)
    assert source.ids(found.indices).tolist() == [plain[row] for row in found.indices]


def test_wrong_identifiers_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "1.parquet", features() | {"name": [None if i == 77 else i for i in range(N)]})
    source = open_keys(path, id="name")
    with pytest.raises(KeyFileError, match="column 'name' has nulls, the first in row 77"):
        source.ids()
    with pytest.raises(ValueError, match=r"indices range from 0 to 101; expected 0 <= index < n = 101"):
        source.ids([0, 101])
    for wrong in (0.5, [0.5], [[1]], 3):
        with pytest.raises(TypeError, match="expected whole numbers"):
            source.ids(wrong)
    with pytest.raises(ValueError, match="has no identifiers; expected one that open_keys was given a column as id="):
        open_keys(path, columns=NAMES).ids()
    indices = pa.array([0, None, *[0] * (N - 2)], pa.int8())
    save(path, features() | {"name": pa.DictionaryArray.from_arrays(indices, pa.array(["x"]))})
    with pytest.raises(KeyFileError, match="column 'name' has nulls, the first in row 1"):
        open_keys(path, id="name").ids([0])
    save(path, features() | {"name": range(N)})
    save(tmp_path / "2.parquet", features() | {"name": IDS})
    for rows in ([0, 150], None):
        with pytest.raises(KeyFileError, match="does not hold one kind of integers or strings in all files"):
            open_keys(tmp_path, id="name").ids(rows)
    refused("column 'a' holds double, expected integers or strings; name another with id=", path, id="a")


# -- conversions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "zarr", "parquet"])
@pytest.mark.parametrize("number", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
@pytest.mark.parametrize("dtype", ["float64", np.float32])
def test_integers_are_converted_on_request(tmp_path: Path, kind: str, number: Any, dtype: Any) -> None:
    if kind == "safetensors":
        pytest.importorskip("safetensors")
    X = np.random.default_rng(9).integers(0, 100, (N, D)).astype(number)
    path = write(kind, tmp_path, X)
    refused(f"holds {np.dtype(number)}, expected floats; convert it with dtype='float64' or dtype='float32'", path)
    check(open_keys(path, dtype=dtype, chunk_rows=17), X.astype(dtype))


def test_floats_are_rounded_on_request(tmp_path: Path) -> None:
    path = write("npy", tmp_path, K)
    check(open_keys(path, dtype="float32"), K.astype(np.float32))
    check(open_keys(path, dtype="float16"), K.astype(np.float16))
    np.save(tmp_path / "single.npy", K.astype(np.float32))
    pair = [path, tmp_path / "single.npy"]
    refused("whose rows cannot follow", pair)
    check(open_keys(pair, dtype="float64"), np.concatenate([K, K.astype(np.float32)]))
    rows = open_keys(path, dtype="float32", memory=2**20).chunk_rows
    assert rows == 2 * open_keys(path, memory=2**20).chunk_rows


def test_numbers_out_of_range_are_refused(tmp_path: Path) -> None:
    for X in (np.array([[1e300, 1.0]]), np.array([[70_000, 1]])):
        np.save(tmp_path / "keys.npy", X)
        refused(
            "holds numbers beyond the range of float16; name a wider dtype=", tmp_path / "keys.npy", dtype="float16"
        )
    np.save(tmp_path / "keys.npy", np.array([[np.inf, np.nan]]))
    check(open_keys(tmp_path / "keys.npy", dtype="float16"), np.array([[np.inf, np.nan]], np.float16))


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr", "dia"])
def test_sparse_matrices_of_scipy(tmp_path: Path, kind: str) -> None:
    S = scipy_sparse.random(50, 6, 0.3, "csr", rng=0)
    scipy_sparse.save_npz(tmp_path / "keys.npz", S.asformat(kind))
    source = open_keys(tmp_path / "keys.npz", chunk_rows=20)
    assert (source.sparse, source.shape, source.dtype) == (True, (50, 6), np.dtype("float64"))
    np.testing.assert_array_equal(np.concatenate(list(source)), S.toarray())
    loaded = source.load()
    assert scipy_sparse.issparse(loaded)
    assert loaded.format == "csr"
    np.testing.assert_array_equal(loaded.toarray(), S.toarray())
    np.testing.assert_array_equal(source.between(7, 30).load().toarray(), S.toarray()[7:30])
    w = np.arange(50)
    for options in ({}, {"weights": w}, {"ridge": 0.5}):
        np.testing.assert_array_equal(
            levattn.leverage_scores(source, **options), levattn.leverage_scores(S, **options)
        )
    dense = levattn.universal_set(S.toarray(), 0.2)
    for found in (
        levattn.universal_set(source, 0.2),
        levattn.scan_set(source, 0.2),
        levattn.StreamingUniversalSet(0.2).update(source.read(0, 50)).result(),
    ):
        assert found.indices.tolist() == dense.indices.tolist()
    sample, other = levattn.sample_rows(source, 30, rng=1), levattn.sample_rows(S, 30, rng=1)
    np.testing.assert_array_equal(sample.indices, other.indices)
    np.testing.assert_array_equal(sample.keys, S.toarray()[other.indices])
    for f in (1.0, "huber"):
        found = levattn.universal_set(source, 0.2, f=f)
        assert found.indices.tolist() == levattn.universal_set(S.toarray(), 0.2, f=f).indices.tolist()


def test_sparse_files_in_float16_are_read_as_dense_ones(tmp_path: Path) -> None:
    S = scipy_sparse.random(50, 6, 0.3, "csr", rng=0)
    scipy_sparse.save_npz(tmp_path / "keys.npz", S)
    source = open_keys(tmp_path / "keys.npz", dtype="float16")
    X = S.toarray().astype(np.float16)
    assert not source.sparse
    np.testing.assert_array_equal(source.load(), X)
    np.testing.assert_allclose(levattn.leverage_scores(source), levattn.leverage_scores(X), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("index", [77, 10**9, -501, -(10**9)])
@pytest.mark.parametrize("kind", ["csc", "csr", "bsr", "coo"])
def test_indices_beyond_the_matrix_are_refused(tmp_path: Path, kind: str, index: int) -> None:
    stored = scipy_sparse.random(500, 6, 0.3, "csr", rng=0).asformat(kind)
    scipy_sparse.save_npz(tmp_path / "keys.npz", stored)
    with np.load(tmp_path / "keys.npz") as parts:
        parts = dict(parts)
    name = "row" if kind == "coo" else "indices"
    parts[name][3] = index + 500
    np.savez(tmp_path / "keys.npz", **parts)
    with pytest.raises(levattn.KeyFileError, match="truncated or damaged"):
        open_keys(tmp_path / "keys.npz").load()


def test_several_sparse_files(tmp_path: Path) -> None:
    S = scipy_sparse.random(60, 5, 0.4, "csr", dtype=np.float32, rng=1)
    (tmp_path / "parts").mkdir()
    scipy_sparse.save_npz(tmp_path / "parts" / "a-1.npz", S[:25])
    scipy_sparse.save_npz(tmp_path / "parts" / "a-2.npz", S[25:].tocoo())
    source = open_keys(tmp_path / "parts", dtype="float64")
    np.testing.assert_array_equal(source.load().toarray(), S.toarray().astype(np.float64))
    np.savez(tmp_path / "parts" / "a-3.npz", S.toarray()[:3])
    mixed = open_keys(tmp_path / "parts")
    assert not mixed.sparse
    np.testing.assert_array_equal(mixed.load(), np.concatenate([S.toarray(), S.toarray()[:3]]))


def test_sparse_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.npz"
    S = scipy_sparse.random(50, 6, 0.3, "csr", rng=0)
    scipy_sparse.save_npz(path, (10 * S).astype(np.int64))
    refused("the sparse matrix holds int64, expected floats; convert it with dtype=", path)
    np.testing.assert_array_equal(
        open_keys(path, dtype="float32").load().toarray(), (10 * S).astype(np.int64).toarray().astype(np.float32)
    )
    parts = {"format": np.array("csr"), "shape": np.array([50, 6]), "data": S.data, "indices": S.indices}
    for wrong in (
        {"indptr": S.indptr[:-1]},
        {"indptr": S.indptr, "indices": np.where(S.indices == 3, 9, S.indices)},
        {"indptr": S.indptr, "shape": np.array([40, 6])},
        {"indptr": S.indptr, "shape": np.array([-50, 6])},
        {"indptr": S.indptr, "shape": np.array([50.0, 6.0])},
        {"indptr": S.indptr, "shape": np.array([50])},
        {"indptr": S.indptr, "format": np.array("other")},
        {},
    ):
        np.savez(path, **parts | wrong)
        with pytest.raises(levattn.KeyFileError, match=r"truncated or damaged|expected \(\.\.\., n, d\)"):
            open_keys(path).load()


# -- in passes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TABLES)
def test_sets_of_tables_are_those_of_arrays(tmp_path: Path, kind: str) -> None:
    X = np.random.default_rng(10).standard_t(2, (5000, 3))
    path = save(tmp_path / f"keys.{kind}", features(X) | {"name": np.arange(5000)})
    source = open_keys(path, id="name", chunk_rows=700)
    expected = levattn.universal_set(X, 0.02)
    found = levattn.universal_set(source, 0.02)
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_array_equal(found.scores, expected.scores)


def test_bounds_of_files_are_those_of_arrays(tmp_path: Path) -> None:
    source = open_keys(save(tmp_path / "keys.parquet", features()))
    for f in (4, "huber", "softmax:2"):
        expected = levattn.sensitivities(K, f)
        np.testing.assert_array_equal(levattn.sensitivities(source, f).upper, expected.upper)


class StoppedError(Exception):
    """Ends a run half-way."""


@pytest.mark.parametrize("kind", TABLES)
def test_a_checkpoint_of_one_choice_of_columns_is_no_other(tmp_path: Path, kind: str) -> None:
    X = np.random.default_rng(11).standard_normal((5000, 3))
    path = save(tmp_path / f"keys.{kind}", features(X))

    def stop(done: int, _: int | None) -> None:
        if done > 6000:
            raise StoppedError

    def scan(columns: list[str], progress: Any = None) -> Any:
        source = open_keys(path, columns=columns, chunk_rows=500)
        return levattn.scan_set(
            source, 0.02, progress=progress, checkpoint=tmp_path / "checkpoint", checkpoint_rows=500
        )

    with pytest.raises(StoppedError):
        scan(["a", "b"], stop)
    with pytest.raises(ValueError, match="is of other keys than K"):
        scan(["b", "c"])
    expected = levattn.universal_set(X[:, :2], 0.02)
    np.testing.assert_array_equal(scan(["a", "b"]).indices, expected.indices)


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_that_is_cut_while_it_is_read(tmp_path: Path, kind: str) -> None:
    X = np.random.default_rng(12).standard_normal((50_000, 3))
    path = save(tmp_path / f"keys.{kind}", features(X))
    check_cut_is_seen(path)


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_that_changes_is_refused(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path / f"keys.{kind}", features() | {"name": IDS})
    source = open_keys(path, id="name")
    save(path, features(K[:90]) | {"name": IDS[:90]})
    for read in (source.load, source.ids, lambda: source.read(0, 1)):
        with pytest.raises(KeyFileError, match="changed since it was opened"):
            read()
