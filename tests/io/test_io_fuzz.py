"""Damaged files of keys: each is refused, or read as what its header says. Never a crash, a hang, or other rows.

Every file is made from a sound one by mutations that its kind and number determine. Numbers altered in the data of a
format without checksums cannot be told; there, shape and dtype are all that is asked for.
"""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

import strategies
from damage import mutated
from levattn.exceptions import KeyFileError
from levattn.io import open_keys

Array = npt.NDArray[Any]
Files = dict[str, bytes]  # by the path within a folder

K = np.random.default_rng(3).standard_normal((41, 4)).astype(np.float32)


# -- sound files -------------------------------------------------------------------------------------------


def npy(keys: Array = K) -> bytes:
    stream = io.BytesIO()
    np.save(stream, keys)
    return stream.getvalue()


def npz(save: Callable[..., None]) -> bytes:
    stream = io.BytesIO()
    save(stream, K=K, V=K[:, :1])
    return stream.getvalue()


def safetensors(**tensors: Array) -> bytes:
    numpy_format = pytest.importorskip("safetensors.numpy")
    saved: bytes = numpy_format.save(tensors)
    return saved


def parquet(folder: Path, keys: Array = K, **options: Any) -> bytes:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    lists = pa.FixedSizeListArray.from_arrays(pa.array(keys.ravel()), keys.shape[1])
    path = folder / "keys.parquet"
    pq.write_table(pa.table({"K": lists, "token": list(range(len(keys)))}), path, row_group_size=16, **options)
    return path.read_bytes()


def zarr(folder: Path, name: str | None = None, **options: Any) -> Files:
    package = pytest.importorskip("zarr")
    path = folder / "keys.zarr"
    if name is not None:
        package.create_group(path)
    array = package.create_array(path, name=name, shape=K.shape, dtype=K.dtype, chunks=(8, 4), **options)
    array[:] = K
    return {f"keys.zarr/{file.relative_to(path)}": file.read_bytes() for file in path.rglob("*") if file.is_file()}


def zarr_codecs(*names: str) -> Any:
    return [getattr(pytest.importorskip("zarr.codecs"), name)() for name in names]


def model() -> Files:
    first = {"K": "model-00001-of-00002.safetensors", "V": "model-00002-of-00002.safetensors"}
    return {
        "model.safetensors.index.json": json.dumps({"metadata": {"total_size": 820}, "weight_map": first}).encode(),
        first["K"]: safetensors(K=K),
        first["V"]: safetensors(V=K[:, :1]),
    }


def folder_of_all(folder: Path) -> Files:
    return {
        "part-2.safetensors": safetensors(K=K[10:20]),
        "part-10.npz": npz(lambda stream, **_: np.savez(stream, K=K[20:30])),
        "part-1.npz": npz(lambda stream, **_: np.savez_compressed(stream, K=K[:10])),
        "part-11.parquet": parquet(folder, K[30:]),
        "notes.txt": b"not keys",
    }


class Kind(NamedTuple):
    """Sound files, and how they are opened."""

    files: Callable[[Path], Files]
    name: str  # what is opened
    tensor: str | None = None
    checked: bool = False  # whether altered data show
    count: int = 100  # how many mutations are tried


KINDS = {
    "npy": Kind(lambda _: {"keys.npy": npy()}, "keys.npy", count=2500),
    "npy-fortran": Kind(lambda _: {"keys.npy": npy(np.asfortranarray(K.astype(">f8")))}, "keys.npy", count=1500),
    "npz": Kind(lambda _: {"keys.npz": npz(np.savez)}, "keys.npz", "K", True, count=2500),
    "npz-compressed": Kind(lambda _: {"keys.npz": npz(np.savez_compressed)}, "keys.npz", "K", True, count=2000),
    "safetensors": Kind(
        lambda _: {"keys.safetensors": safetensors(K=K, V=K[:, :1])}, "keys.safetensors", "K", count=2000
    ),
    "index": Kind(lambda _: model(), "model.safetensors.index.json", "K", count=1000),
    "parquet": Kind(lambda folder: {"keys.parquet": parquet(folder)}, "keys.parquet", "K", count=1000),
    "parquet-checksums": Kind(
        lambda folder: {"keys.parquet": parquet(folder, write_page_checksum=True, compression="zstd")},
        "keys.parquet",
        "K",
        count=1000,
    ),
    "parquet-plain": Kind(
        lambda folder: {
            "keys.parquet": parquet(
                folder, K.astype(np.float16), use_dictionary=False, compression="none", data_page_version="2.0"
            )
        },
        "keys.parquet",
        "K",
        count=1000,
    ),
    "folder": Kind(folder_of_all, "", count=500),
    "zarr": Kind(zarr, "keys.zarr"),
    "zarr-group": Kind(lambda folder: zarr(folder, "K", compressors=None), "keys.zarr", "K"),
    "zarr-shards": Kind(lambda folder: zarr(folder, shards=(16, 4)), "keys.zarr"),
    "zarr-blosc": Kind(lambda folder: zarr(folder, compressors=zarr_codecs("BloscCodec")), "keys.zarr"),
    "zarr-gzip": Kind(lambda folder: zarr(folder, compressors=zarr_codecs("GzipCodec", "Crc32cCodec")), "keys.zarr"),
}


# -- mutations ---------------------------------------------------------------------------------------------


def write(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def one_damaged(kind: str, number: int, files: Files) -> Files:
    chance = random.Random(f"{kind} {number}")
    name = chance.choice(sorted(files))
    return {**files, name: mutated(files[name], chance)}


def outcome(folder: Path, kind: Kind) -> str:
    """Read the keys in all ways, and return how that went; fail if it did not go as promised."""
    with warnings.catch_warnings(record=True) as leaked:
        warnings.simplefilter("always")
        try:
            source = open_keys(folder / kind.name, tensor=kind.tensor, chunk_rows=7)
            chunks = list(source)
            whole = source.load()
            part = source.read(source.n // 3, source.n // 2)
        except (KeyFileError, FileNotFoundError) as error:
            refused = error
        else:
            refused = None
    assert leaked == []
    if refused is not None:
        assert re.search(r": .*; \w", str(refused), re.DOTALL), f"no reason or no remedy: {refused}"
        return "refused" if isinstance(refused, KeyFileError) else "missing"
    assert whole.shape == source.shape
    assert {array.dtype for array in (*chunks, whole, part)} == {source.dtype}
    assert all(chunk.shape[-2] == 7 for chunk in chunks[:-1])
    np.testing.assert_array_equal(np.concatenate([whole[..., :0, :], *chunks], axis=-2), whole)
    np.testing.assert_array_equal(part, whole[..., source.n // 3 : source.n // 2, :])
    if kind.checked:
        np.testing.assert_array_equal(whole, K)
    return "read"


def peak_memory() -> int:
    """The most memory that this process ever had, in bytes; 0 where it is not told."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*([0-9]+) kB", status.read_text()) if status.exists() else None
    return 1024 * int(found[1]) if found else 0


@pytest.mark.parametrize("name", KINDS)
def test_sound_files_are_read(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    folder = write(tmp_path / "copy", kind.files(tmp_path))
    assert outcome(folder, kind) == "read"
    keys = open_keys(folder / kind.name, tensor=kind.tensor).load()
    np.testing.assert_array_equal(keys, K.astype(keys.dtype))


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_refused_or_read(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    files = kind.files(tmp_path)
    before = peak_memory()
    outcomes = set()
    for number in range(strategies.trials(kind.count)):
        folder = tmp_path / str(number)
        write(folder, one_damaged(name, number, files))
        try:
            outcomes.add(outcome(folder, kind))
        except BaseException as error:
            error.add_note(f"the files are in {folder}")
            raise
        shutil.rmtree(folder)
    assert outcomes >= {"read", "refused"}
    assert outcomes <= {"read", "refused", "missing"} if name == "index" else {"read", "refused"}
    assert peak_memory() - before < 2**28
