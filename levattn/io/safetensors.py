"""`.safetensors` files, and the index of a model in several such files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from levattn.io.common import (
    Opened,
    choose,
    damaged,
    identity_of,
    mapped_rows,
    missing_file,
    needing_package,
    refusal,
    refusing,
    wrong_dtype,
)

INDEX_SUFFIX = ".safetensors.index.json"
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


@contextmanager
def open_safetensors(path: Path, tensor: str | None) -> Iterator[Opened]:
    """Open a tensor."""
    with needing_package(path, "safetensors"):
        from safetensors import SafetensorError, safe_open
    with path.open("rb") as stream:
        # The package checks the whole header, but its slices copy slowly, so this module maps the rows.
        with refusing(path, (SafetensorError, OSError)), safe_open(path, framework="numpy") as tensors:
            name = choose(path, sorted(tensors.keys()), tensor)
        with refusing(path, (ValueError, KeyError)):
            length = int.from_bytes(stream.read(8), "little")
            entry = json.loads(stream.read(length))[name]
            stored, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if stored == "BF16":
            dtype = _bfloat16()
        elif stored in _FLOATS:
            dtype = np.dtype(_FLOATS[stored])
        else:
            raise wrong_dtype(path, f"tensor {name!r}", stored, "F64, F32, F16 or BF16")
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise damaged(path, f"tensor {name!r}", f"{dtype} {shape} in {stop - start} bytes")
        read = mapped_rows(path, stream, dtype, shape, offset=8 + length + start)
        yield Opened(name, shape, dtype, read, identity_of(stream))


def _bfloat16() -> np.dtype[Any]:
    with needing_package("bfloat16", "ml_dtypes"):
        import ml_dtypes
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


@contextmanager
def open_index(path: Path, tensor: str | None) -> Iterator[Opened]:
    """Open the shard that holds a tensor, according to the index of a model."""
    with refusing(path, (ValueError, RecursionError)):
        index = json.loads(path.read_bytes())
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict):
        raise damaged(path, "the index", "it has no weight_map that says which file holds which tensor")
    name = choose(path, sorted(shards), tensor)
    file = shards[name]
    if not isinstance(file, str) or not file.endswith(".safetensors"):
        raise damaged(path, "the index", f"it places tensor {name!r} in {file!r}, which is no .safetensors file")
    # Only names in the folder count, so that an index cannot lead to other folders.
    if file not in (entry.name for entry in path.parent.iterdir()):
        raise missing_file(path, f"tensor {name!r} is in {file!r}, which is not beside it", "copy it there")
    shard = path.parent / file
    if not shard.is_file():
        raise refusal(shard, "not a regular file", f"it should be the .safetensors file that {path} names")
    with open_safetensors(shard, name) as opened:
        yield opened
