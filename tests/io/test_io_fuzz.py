"""Damaged files of keys: each is refused, or read as what its header says. Never a crash, a hang, or other rows.

Every file is made from a sound one by mutations that its kind and number determine. Numbers altered in the data of a
format without checksums cannot be told; there, shape and dtype are all that is asked for.
"""

from __future__ import annotations

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
from key_files import INDEX, write, write_index, write_parquet, write_zarr
from levattn.exceptions import KeyFileError
from levattn.io import open_keys

Array = npt.NDArray[Any]
Files = dict[str, bytes]  # by the path within a folder

K = np.random.default_rng(3).standard_normal((41, 4)).astype(np.float32)
V = K[:, :1]


# -- sound files -------------------------------------------------------------------------------------------


def zarr_codecs(*names: str) -> Any:
    return [getattr(pytest.importorskip("zarr.codecs"), name)() for name in names]


def write_model(folder: Path) -> None:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    write_index(folder, {names[0]: {"K": K}, names[1]: {"V": np.ascontiguousarray(V)}})


def write_shards(folder: Path) -> None:
    write("safetensors", folder, K[10:20], "part-2")
    write("npz", folder, K[20:30], "part-10")
    write("npz-compressed", folder, K[:10], "part-1")
    write("parquet", folder, K[30:], "part-11")
    (folder / "notes.txt").write_bytes(b"not keys")


def files_in(folder: Path) -> Files:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


class Kind(NamedTuple):
    """Sound files, and how they are opened."""

    write: Callable[[Path], object]
    name: str  # what is opened
    tensor: str | None = None
    checked: bool = False  # whether altered data show
    count: int = 100  # how many mutations are tried


def parquet(**options: Any) -> Callable[[Path], object]:
    return lambda folder: write_parquet(folder / "keys.parquet", K, row_group_size=16, **options)


def columns(folder: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(dict(zip("abcd", K.T, strict=True))), folder / "keys.parquet", row_group_size=16)


def lists(folder: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"K": K.tolist()}), folder / "keys.parquet", row_group_size=16)


def text(folder: Path) -> None:
    rows = (",".join(map(repr, row)) for row in K.tolist())
    (folder / "keys.csv").write_text("".join(f"{row}\n" for row in ("a,b,c,d", *rows)))


def zarr(kind: str = "zarr", codecs: tuple[str, ...] = (), **options: Any) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        compressors = {"compressors": zarr_codecs(*codecs)} if codecs else {}
        write_zarr(folder / "keys.zarr", K, kind, chunks=(8, 4), **compressors, **options)

    return make


KINDS = {
    "npy": Kind(lambda folder: write("npy", folder, K), "keys.npy", count=2500),
    "npy-fortran": Kind(
        lambda folder: write("npy", folder, np.asfortranarray(K.astype(">f8"))), "keys.npy", count=1500
    ),
    "npz": Kind(lambda folder: write("npz", folder, K, V=V), "keys.npz", "K", True, count=2500),
    "npz-compressed": Kind(lambda folder: write("npz-compressed", folder, K, V=V), "keys.npz", "K", True, count=2000),
    "safetensors": Kind(lambda folder: write("safetensors", folder, K, V=V), "keys.safetensors", "K", count=2000),
    "index": Kind(write_model, INDEX, "K", count=1000),
    "parquet": Kind(parquet(), "keys.parquet", "K", count=1000),
    "parquet-checksums": Kind(parquet(write_page_checksum=True, compression="zstd"), "keys.parquet", "K", count=1000),
    "parquet-plain": Kind(
        lambda folder: write_parquet(
            folder / "keys.parquet",
            K.astype(np.float16),
            row_group_size=16,
            use_dictionary=False,
            compression="none",
            data_page_version="2.0",
        ),
        "keys.parquet",
        "K",
        count=1000,
    ),
    "parquet-columns": Kind(columns, "keys.parquet", count=1000),
    "parquet-lists": Kind(lists, "keys.parquet", count=1000),
    "csv": Kind(text, "keys.csv", count=1000),
    "folder": Kind(write_shards, "", count=500),
    "zarr": Kind(zarr(), "keys.zarr"),
    "zarr-group": Kind(zarr("zarr-group", compressors=None), "keys.zarr", "K"),
    "zarr-shards": Kind(zarr("zarr-shards"), "keys.zarr"),
    "zarr-blosc": Kind(zarr(codecs=("BloscCodec",)), "keys.zarr"),
    "zarr-gzip": Kind(zarr(codecs=("GzipCodec", "Crc32cCodec")), "keys.zarr"),
}


# -- mutations ---------------------------------------------------------------------------------------------


def write_files(folder: Path, files: Files) -> Path:
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
    kind.write(tmp_path)
    assert outcome(tmp_path, kind) == "read"
    keys = open_keys(tmp_path / kind.name, tensor=kind.tensor).load()
    np.testing.assert_array_equal(keys, K.astype(keys.dtype))


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_refused_or_read(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    (tmp_path / "sound").mkdir()
    kind.write(tmp_path / "sound")
    files = files_in(tmp_path / "sound")
    before = peak_memory()
    outcomes = set()
    for number in range(strategies.trials(kind.count)):
        folder = tmp_path / str(number)
        write_files(folder, one_damaged(name, number, files))
        try:
            outcomes.add(outcome(folder, kind))
        except BaseException as error:
            error.add_note(f"the files are in {folder}")
            raise
        shutil.rmtree(folder)
    assert outcomes >= {"read", "refused"}
    assert outcomes <= {"read", "refused", "missing"} if name == "index" else {"read", "refused"}
    assert peak_memory() - before < 2**28
