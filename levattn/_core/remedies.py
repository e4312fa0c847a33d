"""What to do with an object that is no array, for errors."""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def remedy_of(array: Any, name: str) -> str:
    """Return how an array comes of something that is none; its package is known by its methods, and not imported."""
    if isinstance(array, str | os.PathLike):
        return f"Open a file of keys first: {name} = levattn.open_keys({os.fspath(array)!r})"
    package = type(array).__module__.partition(".")[0]
    if package == "pandas":  # nullable columns become objects otherwise
        return f"Convert it first: {name}.to_numpy('float64', na_value=numpy.nan), and leave gaps out by mask="
    if package == "levattn" and hasattr(array, "load"):
        return f"Load the keys: {name}.load(), or read them in chunks: levattn.universal_set({name}, epsilon).scores"
    if package == "dask":
        return (
            "For arrays on workers use levattn.distributed.dask.leverage_scores or its universal_set, or call "
            f"{name}.compute() first"
        )
    if isinstance(array, np.ma.MaskedArray):
        return f"Give {name}.data, and the rows that count by mask=~numpy.ma.getmaskarray({name}).any(axis=-1)"
    if hasattr(array, "column_names") and hasattr(array, "columns"):  # pyarrow's tables
        column = f"{name}.column(0).combine_chunks()" if hasattr(array, "combine_chunks") else f"{name}.column(0)"
        return (
            f"Convert it first: a column of lists by {column}.flatten().to_numpy().reshape(len({name}), -1), columns "
            f"of numbers by numpy.column_stack([c.to_numpy() for c in {name}.columns])"
        )
    if hasattr(array, "to_pylist"):  # pyarrow's arrays of lists, of which to_numpy makes objects
        flat = f"{name}.combine_chunks()" if hasattr(array, "combine_chunks") else name
        return f"Convert it first: {flat}.flatten().to_numpy().reshape(len({name}), -1)"
    if hasattr(array, "to_numpy"):
        return f"Convert it first: {name}.to_numpy()"
    if hasattr(array, "collect"):  # lazy frames
        return f"Compute it first: {name}.collect().to_numpy()"
    if hasattr(array, "chunks") and hasattr(array, "__getitem__"):  # arrays in files of zarr or HDF5
        rows = f"({name}[i : i + 65536] for i in range(0, {name}.shape[0], 65536))"
        return f"Read it first: {name}[...], or in chunks: levattn.universal_set(lambda: {rows}, epsilon)"
    for method, way in (("__dlpack__", "from_dlpack"), ("__array__", "asarray")):
        if hasattr(array, method):
            return f"Convert it first: numpy.{way}({name})"
    return "Convert it to an array first; rows that do not count are left out by mask="
