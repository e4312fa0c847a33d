"""Files of keys in all formats, written by their packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from levattn.exceptions import KeyFileError
from levattn.io import open_keys

__all__ = [
    "ALL",
    "INDEX",
    "WRITERS",
    "check_cut_is_seen",
    "lists_of",
    "write",
    "write_index",
    "write_parquet",
    "write_zarr",
]

Array = npt.NDArray[Any]

WRITERS = ["npy", "npz", "npz-compressed", "safetensors"]  # of any shape and dtype
ALL = [*WRITERS, "parquet", "zarr", "zarr-group", "zarr-shards"]
INDEX = "model.safetensors.index.json"


def write(kind: str, folder: Path, K: Array, name: str = "keys", **others: Array) -> Path:
    """Write keys, as "K" where the format has names, and other arrays beside them; return the path."""
    path = folder / f"{name}.{kind.partition('-')[0]}"
    if kind == "npy":
        np.save(path, K)
    elif kind == "npz":
        np.savez(path, K=K, **others)
    elif kind == "npz-compressed":
        np.savez_compressed(path, K=K, **others)
    elif kind == "safetensors":
        tensors = {name: np.ascontiguousarray(array) for name, array in {"K": K, **others}.items()}
        pytest.importorskip("safetensors.numpy").save_file(tensors, path)
    elif kind == "parquet":
        write_parquet(path, K)
    else:
        write_zarr(path, K, kind)
    return path


def lists_of(K: Array) -> Any:
    """Return rows as a column of pyarrow."""
    pa = pytest.importorskip("pyarrow")
    return pa.FixedSizeListArray.from_arrays(pa.array(K.ravel()), K.shape[1])


def write_parquet(path: Path, K: Array, **options: Any) -> None:
    table = pytest.importorskip("pyarrow").table({"K": lists_of(K), "token": range(len(K))})
    pytest.importorskip("pyarrow.parquet").write_table(table, path, **{"row_group_size": 30, **options})


def write_zarr(path: Path, K: Array, kind: str = "zarr", **options: Any) -> None:
    zarr = pytest.importorskip("zarr")
    if kind == "zarr-group":
        zarr.create_group(path, overwrite=True)
    options = {"chunks": (*(1,) * (K.ndim - 2), 24, max(1, K.shape[-1])), **options}
    if kind == "zarr-shards":
        options["shards"] = (*options["chunks"][:-2], 2 * options["chunks"][-2], options["chunks"][-1])
    array = zarr.create_array(
        path, name="K" if kind == "zarr-group" else None, shape=K.shape, dtype=K.dtype, overwrite=True, **options
    )
    array[...] = K


def write_index(folder: Path, files: dict[str, dict[str, Array]]) -> None:
    """Write files of tensors and the index that says which file holds which tensor."""
    for name, tensors in files.items():
        pytest.importorskip("safetensors.numpy").save_file(tensors, folder / name)
    where = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))


def check_cut_is_seen(path: Path) -> None:
    """Check that a file which is cut while it is read is refused."""
    chunks = iter(open_keys(path, chunk_rows=10))
    next(chunks)
    with path.open("r+b") as stream:
        stream.truncate(100_000)
    with pytest.raises(KeyFileError, match=r"truncated or damaged \(it was cut while it was read\)"):
        next(chunks)
