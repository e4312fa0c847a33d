"""Objects that are no arrays: the error names how each becomes one."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import levattn

X = np.random.default_rng(0).standard_normal((9, 3))


def of_pyarrow(kind: str) -> Any:
    pyarrow = pytest.importorskip("pyarrow")
    lists = pyarrow.FixedSizeListArray.from_arrays(X.ravel(), 3)
    table = pyarrow.table({"keys": lists})
    return {"lists": lists, "column": table.column(0), "table": table, "batch": table.to_batches()[0]}[kind]


class Lazy:
    """As polars.LazyFrame."""

    def collect(self) -> Any:
        return SimpleNamespace(to_numpy=lambda: X)


class Stored:
    """As h5py.Dataset: an array in a file."""

    shape, chunks = X.shape, (4, 3)

    def __getitem__(self, which: Any) -> Any:
        return X[which]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return X


class Exported:
    """What only numpy can read."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return X


class Shared:
    """What only gives its memory."""

    def __dlpack__(self, **options: Any) -> Any:
        return X.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return X.__dlpack_device__()


def of_zarr() -> Any:
    return pytest.importorskip("zarr").array(X)


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (lambda: of_pyarrow("lists"), "K.flatten().to_numpy().reshape(len(K), -1)"),
        (lambda: of_pyarrow("column"), "K.combine_chunks().flatten().to_numpy().reshape(len(K), -1)"),
        (lambda: of_pyarrow("table"), "K.column(0).combine_chunks().flatten().to_numpy().reshape(len(K), -1)"),
        (lambda: of_pyarrow("batch"), "K.column(0).flatten().to_numpy().reshape(len(K), -1)"),
        (Lazy, "K.collect().to_numpy()"),
        (Stored, "K[...]"),
        (of_zarr, "K[...]"),
        (Exported, "numpy.asarray(K)"),
        (Shared, "numpy.from_dlpack(K)"),
        (lambda: np.ma.masked_array(X, np.zeros(X.shape)), "K.data"),
    ],
    ids=["lists", "column", "table", "batch", "lazy", "stored", "zarr", "exported", "shared", "masked"],
)
def test_the_way_to_an_array_is_a_way(make: Any, way: str) -> None:
    K = make()
    for call in (levattn.leverage_scores, lambda keys: levattn.universal_set(keys, 0.1)):
        with pytest.raises(TypeError, match=re.escape(way)):
            call(K)
    np.testing.assert_array_equal(eval(way, {"K": K, "numpy": np}), X)


@pytest.mark.parametrize("make", [Stored, of_zarr], ids=["stored", "zarr"])
def test_the_way_to_chunks_is_a_way(make: Any) -> None:
    K = make()
    with pytest.raises(TypeError, match="or in chunks: ") as raised:
        levattn.universal_set(K, 0.1)
    call = str(raised.value).partition("in chunks: ")[2]
    found = eval(call, {"K": K, "levattn": levattn, "epsilon": 0.1})
    np.testing.assert_array_equal(found.scores, levattn.leverage_scores(X))


def test_the_columns_of_a_table() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({name: X[:, i] for i, name in enumerate("abc")})
    for K in (table, table.to_batches()[0]):
        with pytest.raises(TypeError, match=r"columns of numbers by numpy\.column_stack") as raised:
            levattn.leverage_scores(K)
        way = str(raised.value).rpartition(" by ")[2]
        np.testing.assert_array_equal(eval(way, {"K": K, "numpy": np}), X)
