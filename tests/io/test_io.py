"""Keys from files: what comes back is what was stored, and every bad file is refused in words."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import stat
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from key_files import ALL, INDEX, WRITERS, check_cut_is_seen, lists_of, write, write_index, write_zarr
from levattn.exceptions import KeyFileError
from levattn.io import KeySource, open_keys, replace_file
from streams import BLOCK

ml_dtypes = pytest.importorskip("ml_dtypes")
pa = pytest.importorskip("pyarrow")
csv = pytest.importorskip("pyarrow.csv")
parquet = pytest.importorskip("pyarrow.parquet")
safetensors_numpy = pytest.importorskip("safetensors.numpy")
zarr = pytest.importorskip("zarr")
zarr_codecs = pytest.importorskip("zarr.codecs")

Array = npt.NDArray[Any]


def npy_of(folder: Path, header: str, data: bytes = b"\0" * 4, version: int = 1) -> Path:
    """Write a file of this header."""
    text = header.encode("latin-1")
    size = len(text).to_bytes(2 if version == 1 else 4, "little")
    path = folder / "a.npy"
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + size + text + data)
    return path


def header_of(shape: object, descr: str = "<f4") -> str:
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}"


def shapes_of_kinds(*shapes: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """All kinds with all shapes that they can have: a column of lists is a matrix."""
    return [(kind, shape) for kind in ALL for shape in shapes if kind != "parquet" or len(shape) == 2]


def refused(message: str, path: Any, error: type[Exception] = KeyFileError, **options: Any) -> None:
    with pytest.raises(error, match=message):
        open_keys(path, **options)


def refused_in_reading(message: str, path: Any, **options: Any) -> None:
    with pytest.raises(KeyFileError, match=message):
        open_keys(path, **options).load()


def check(source: KeySource, K: Array) -> None:
    """What a source says of itself, its chunks and its whole are those of these keys."""
    assert (source.shape, source.dtype) == (K.shape, K.dtype)
    assert (source.n, source.d) == K.shape[-2:]
    chunks = list(source)
    assert all(chunk.shape[-2] == source.chunk_rows for chunk in chunks[:-1])
    for array in (*chunks, source.read(0, source.n)):
        assert (type(array), array.dtype) == (np.ndarray, K.dtype)
        assert array.dtype.isnative
    for found in (np.concatenate([K[..., :0, :], *chunks], axis=-2), source.load()):
        np.testing.assert_array_equal(found.astype(np.float64), K.astype(np.float64))


def some_keys(shape: tuple[int, ...] = (100, 8), dtype: Any = np.float32) -> Array:
    return np.random.default_rng(7).standard_normal(shape).astype(dtype)


# -- what comes back -------------------------------------------------------------------------------------


EMPTY = [(0, 4), (4, 0), (0, 0), (2, 0, 4), (0, 7, 3)]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *shapes_of_kinds((100, 8), (2, 3, 101, 5), (1, 1)),
        *((kind, shape) for kind in ("npy", "npz", "safetensors", "zarr") for shape in EMPTY),
    ],
)
def test_chunks_and_load_return_what_was_stored(tmp_path: Path, kind: str, dtype: Any, shape: tuple[int, ...]) -> None:
    K = some_keys(shape, dtype)
    source = open_keys(write(kind, tmp_path, K), chunk_rows=17)
    assert isinstance(source, KeySource)
    assert source.tensor == (None if kind in ("npy", "zarr", "zarr-shards") else "K")
    for _ in range(2):  # as many passes as one likes
        check(source, K)


@pytest.mark.parametrize(("kind", "shape"), shapes_of_kinds((100, 8), (2, 3, 101, 5)))
def test_any_range_of_rows(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    K = some_keys(shape)
    source = open_keys(write(kind, tmp_path, K), chunk_rows=17)
    for start, stop in [(0, 0), (0, 1), (3, 60), (29, 31), (np.int64(97), 100), (100, 100), (0, source.n)]:
        np.testing.assert_array_equal(source.read(start, stop), K[..., start:stop, :])
        part = source.between(start, stop)
        assert part.chunk_rows == 17
        check(part, K[..., start:stop, :])
    inner = source.between(20, 80).between(5, 25)
    check(inner, K[..., 25:45, :])
    np.testing.assert_array_equal(inner.read(2, 3), K[..., 27:28, :])
    for method in (inner.read, inner.between):
        for start, stop in [(5, 21), (-1, 3), (3, 2)]:
            said = f"start, stop are {start}, {stop}; expected 0 <= start <= stop <= n = 20"
            with pytest.raises(ValueError, match=said):
                method(start, stop)
        with pytest.raises(TypeError, match="float"):
            method(0.0, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "dtype", "order"),
    [("safetensors", ml_dtypes.bfloat16, "C"), ("npy", ">f8", "F"), ("npz", ">f8", "F"), ("npy", "<f8", "F")],
)
def test_other_layouts(tmp_path: Path, kind: str, dtype: Any, order: Any) -> None:
    K = some_keys((40, 6)).astype(dtype)
    path = write(kind, tmp_path, np.asarray(K, order=order))
    check(open_keys(path, chunk_rows=7), K.astype(K.dtype.newbyteorder("=")))


def test_npy_is_memory_mapped(tmp_path: Path) -> None:
    source = open_keys(write("npy", tmp_path, some_keys()))
    K = source.load()
    assert isinstance(K, np.memmap)
    assert not K.flags.writeable
    assert np.shares_memory(next(iter(source)), next(iter(source))) is False  # mapped anew each time


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_one_of_several_tensors(tmp_path: Path, kind: str) -> None:
    tensors: dict[str, Any] = {"a": some_keys((5, 3)), "b": some_keys((7, 2)), "tokens": np.arange(4)}
    path = write(kind, tmp_path, tensors["a"], **tensors)
    source = open_keys(path, tensor="b")
    assert source.tensor == "b"
    check(source, tensors["b"])
    refused(r"holds 4 arrays \('K', 'a', 'b', 'tokens'\); say which one with tensor=", path)
    refused(r"no tensor 'token', it holds 'K', 'a', 'b', 'tokens'; did you mean 'tokens'", path, tensor="token")
    refused(r"'tokens' holds int64, expected floats; convert it with dtype='float64'", path, tensor="tokens")


def test_a_long_list_of_tensors_is_shortened(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors_numpy.save_file({f"layer.{i:03d}": some_keys((2, 2)) for i in range(50)}, path)
    refused(r"'layer.029' and 20 more; did you mean", path, tensor="layer.99")


def test_default_chunks_hold_32_mebibytes(tmp_path: Path) -> None:
    for shape, dtype, rows in (((2_000_000, 64), np.float32, 2**17), ((64, 3, 100_000), np.float64, 1)):
        path = tmp_path / "keys.npy"
        np.lib.format.open_memmap(path, "w+", dtype, shape)
        source = open_keys(path)
        assert source.chunk_rows == rows
        assert sum(chunk.shape[-2] for chunk in source) == source.n == shape[-2]
        path.unlink()


@pytest.mark.parametrize("d", [33, 50, 64, 100])
def test_default_chunks_are_whole_blocks_of_sums(tmp_path: Path, d: int) -> None:
    rows = open_keys(write("npy", tmp_path, np.zeros((3, d), np.float32))).chunk_rows
    assert rows > BLOCK
    assert rows % BLOCK == 0


def test_memory_of_a_chunk(tmp_path: Path) -> None:
    path = write("npy", tmp_path, np.zeros((2, 10_000, 8), np.float32))
    rows = {1: 1, 63: 1, 128: 2, 2**16: 1024, 2**18: 4096, 2**18 + 2**17: 6144, 2**20: 16384}
    assert {memory: open_keys(path, memory=memory).chunk_rows for memory in rows} == rows
    assert open_keys(path, memory=2**25) == open_keys(path)


@pytest.mark.parametrize("kind", ALL)
def test_a_source_can_be_pickled(tmp_path: Path, kind: str) -> None:
    source = open_keys(write(kind, tmp_path, some_keys())).between(10, 30)
    again = pickle.loads(pickle.dumps(source))
    assert again == source
    np.testing.assert_array_equal(again.load(), source.load())
    assert len(pickle.dumps(source)) < 1000


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("kind", ["npy", "safetensors", "parquet", "parquet-lists", "parquet-columns", "csv"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    K = np.random.default_rng(0).random((2**19, 32), np.float32)
    path = tmp_path / f"keys.{kind.partition('-')[0]}"
    columns = {f"x{j}": column for j, column in enumerate(K.T)}
    if kind == "parquet":  # in one row group
        parquet.write_table(pa.table({"K": lists_of(K)}), path, use_dictionary=False)
    elif kind == "parquet-lists":
        parquet.write_table(pa.table({"K": lists_of(K).cast(pa.list_(pa.float32()))}), path, use_dictionary=False)
    elif kind == "parquet-columns":
        parquet.write_table(pa.table(columns), path, use_dictionary=False)
    elif kind == "csv":
        csv.write_csv(pa.table(columns), path)
    else:
        write(kind, tmp_path, K)
    del columns
    del K
    source = open_keys(path, memory=2**20)
    sum(float(chunk[0, 0]) for chunk in source.between(0, 2**16))  # what pyarrow takes once
    before, most = resident(), 0
    for chunk in source:
        chunk.sum()
        most = max(most, resident() - before)
    assert path.stat().st_size > 64 * 2**20
    assert most < 32 * 2**20
    path.unlink()


@pytest.mark.parametrize("kind", ["npy", "safetensors", "parquet"])
def test_a_file_cut_while_it_is_read(tmp_path: Path, kind: str) -> None:
    path = write(kind, tmp_path, some_keys((5000, 64)))
    check_cut_is_seen(path)


@pytest.mark.parametrize("shape", ["(3L, 4L)", "(3, 4)", "( 3 ,4 , )", "(3,4)"])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_headers_of_other_writers(tmp_path: Path, version: int, shape: str) -> None:
    K = some_keys((3, 4))
    header = f'  {{"shape": {shape} , \'fortran_order\':False,"descr":"<f4"}} \n'
    check(open_keys(npy_of(tmp_path, header, K.tobytes(), version)), K)


# -- several files ---------------------------------------------------------------------------------------


def write_shards(folder: Path, K: Array, kinds: list[str], names: list[str]) -> list[Path]:
    parts = np.array_split(K, len(kinds), axis=-2)
    return [write(kind, folder, part, name) for kind, part, name in zip(kinds, parts, names, strict=True)]


def test_a_folder_is_read_in_natural_order(tmp_path: Path) -> None:
    K = some_keys((103, 8))
    kinds = ["npz", "npz-compressed", "safetensors", "parquet", "zarr-group", "npz"]
    write_shards(tmp_path, K, kinds, ["Keys", "keys-2", "keys-9", "keys-10", "keys-10b", "layer-1"])
    for name in (".keys-3.npy", "notes.txt", "config.json", "readme.md", "keys-4.npy.part"):
        (tmp_path / name).write_bytes(b"no keys")
    (tmp_path / "logs").mkdir()
    source = open_keys(tmp_path, tensor="K", chunk_rows=20)
    assert (source.path, source.tensor) == (tmp_path, "K")
    check(source, K)
    for start, stop in [(0, 18), (17, 19), (30, 100), (50, 50), (103, 103)]:
        np.testing.assert_array_equal(source.read(start, stop), K[start:stop])
        check(source.between(start, stop), K[start:stop])
    assert pickle.loads(pickle.dumps(source)) == source


def test_several_paths_are_read_in_their_order(tmp_path: Path) -> None:
    K = some_keys((2, 3, 100, 4))
    shards = write_shards(tmp_path, K, ["npy", "zarr", "npy"], ["b", "c", "a"])
    source = open_keys([str(shards[0]), *shards[1:]], chunk_rows=30)
    assert (source.path, source.tensor) == (tuple(shards), None)
    check(source, K)
    refused("path is an empty sequence", [], error=ValueError)
    refused(r"d\.npy: no such file", [shards[0], tmp_path / "d.npy"], error=FileNotFoundError)


def test_empty_shards(tmp_path: Path) -> None:
    K = some_keys((10, 4))
    paths = [write("npy", tmp_path, part, f"{i}") for i, part in enumerate([K[:0], K[:5], K[5:5], K[5:], K[:0]])]
    source = open_keys(paths, chunk_rows=4)
    check(source, K)
    np.testing.assert_array_equal(source.read(4, 6), K[4:6])
    check(open_keys(paths[:1] * 3), K[:0])


def test_a_folder_without_keys(tmp_path: Path) -> None:
    for name in (".hidden.npy", "notes.txt"):
        refused(r"the folder holds no file of keys \(\.npy, .*zarr store\); check", tmp_path)
        (tmp_path / name).write_bytes(b"no keys")
    refused("holds no file of keys", tmp_path)


@pytest.mark.parametrize("other", [np.zeros((5, 3), np.float32), np.zeros((5, 4)), np.zeros((1, 5, 4), np.float32)])
def test_shards_that_do_not_fit(tmp_path: Path, other: Array) -> None:
    write("npy", tmp_path, some_keys((7, 4)), "a")
    write("npy", tmp_path, other, "b")
    refused(r"b\.npy: holds float.*cannot follow those of float32 \(7, 4\) in .*a\.npy", tmp_path)


def test_a_missing_part_is_noticed(tmp_path: Path) -> None:
    K = some_keys((30, 4))
    shards = write_shards(tmp_path, K, ["npy"] * 3, [f"keys-0000{i}-of-00003" for i in (1, 2, 3)])
    np.testing.assert_array_equal(open_keys(tmp_path).load(), K)
    shards[1].unlink()
    refused(r"the folder holds 2 of 3 files keys-\.\.\.-of-00003\.npy; copy", tmp_path)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("b.npz", lambda path: path.write_bytes(b"PK\x03\x04"), "the file is truncated"),
        ("c.npy", Path.mkdir, "not a regular file"),
        ("d.npy", lambda path: path.symlink_to("nothing.npy"), "not a regular file"),
    ],
)
def test_a_bad_shard_is_named(tmp_path: Path, name: str, make: Callable[[Path], object], message: str) -> None:
    write("npy", tmp_path, some_keys(), "a")
    make(tmp_path / name)
    refused(rf"{name}: {message}", tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npy")
    for path in (tmp_path, tmp_path / "pipe.npy"):
        refused(r"pipe\.npy: not a regular file", path)


def test_changes_of_a_folder_are_noticed(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, some_keys((30, 4)), ["npy"] * 3, ["1", "2", "3"])
    source = open_keys(tmp_path, chunk_rows=5)
    write("npy", tmp_path, some_keys((3, 4)), "4")
    with pytest.raises(KeyFileError, match=r"changed since it was opened, from 3 files to 4; open it again"):
        source.load()
    (tmp_path / "4.npy").unlink()
    write("npy", tmp_path, some_keys((11, 4)), "2")
    with pytest.raises(KeyFileError, match=r"2\.npy: changed since it was opened, from float32 \(10, 4\) to"):
        list(source)
    assert source.read(0, 9).shape == (9, 4)  # the others are as they were
    shards[2].unlink()
    with pytest.raises(KeyFileError, match=r"from 3 files to 2"):
        source.between(0, 5).load()


# -- the index of a model --------------------------------------------------------------------------------


def write_model(folder: Path) -> dict[str, Array]:
    first = {"a.k": some_keys((7, 4))}
    second = {"b.k": some_keys((9, 4)).astype(ml_dtypes.bfloat16), "b.v": some_keys((9, 2))}
    write_index(folder, {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second})
    (folder / "config.json").write_text("{}")
    return first | second


@pytest.mark.parametrize("name", ["", INDEX])
def test_an_index_finds_the_file_of_a_tensor(tmp_path: Path, name: str) -> None:
    tensors = write_model(tmp_path)
    for tensor, K in tensors.items():
        source = open_keys(tmp_path / name, tensor=tensor, chunk_rows=4)
        assert source.tensor == tensor
        check(source, K)
    refused(r"holds 3 arrays \('a.k', 'b.k', 'b.v'\); say which one", tmp_path / name)
    refused(r"no tensor 'c.k', .*did you mean", tmp_path / name, tensor="c.k")
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert open_keys(tmp_path / name, tensor="a.k").shape == (7, 4)
    refused(
        r"tensor 'b.k' is in 'model-00002.*not beside it; copy it there",
        tmp_path / name,
        tensor="b.k",
        error=FileNotFoundError,
    )


def test_an_index_stands_alone_in_a_folder(tmp_path: Path) -> None:
    write_model(tmp_path)
    write("npy", tmp_path, some_keys())
    refused(r"holds both 'model\.safetensors\.index\.json', 'keys\.npy'; open one", tmp_path, tensor="a.k")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is truncated or damaged"),
        ("[" * 100_000, "truncated or damaged"),
        ("\udcff", "truncated or damaged"),
        ("[]", "no weight_map"),
        ('{"weight_map": ["a.k"]}', "no weight_map"),
        ('{"weight_map": {}}', "holds no array"),
        ('{"weight_map": {"a.k": 3}}', "in 3, which is no"),
        ('{"weight_map": {"a.k": "config.json"}}', r"in 'config\.json'"),
        ('{"weight_map": {"a.k": "model-00002-of-00002.safetensors"}}', r"has no tensor 'a\.k', it holds"),
    ],
)
def test_a_damaged_index(tmp_path: Path, content: str, message: str) -> None:
    write_model(tmp_path)
    (tmp_path / INDEX).write_bytes(content.encode("utf-8", "surrogateescape"))
    refused(message, tmp_path / INDEX, tensor="a.k")


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/x.safetensors", "x\0.safetensors", "x" * 300 + ".safetensors"]
)
def test_an_index_leads_nowhere_else(tmp_path: Path, file: str) -> None:
    safetensors_numpy.save_file({"a.k": some_keys((7, 4))}, tmp_path / "x.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a.k": file}}))
    refused("not beside it", folder / INDEX, tensor="a.k", error=FileNotFoundError)


# -- zarr ------------------------------------------------------------------------------------------------


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


CODECS = {
    "none": {"compressors": None},
    "zstd": {"compressors": [zarr_codecs.ZstdCodec(checksum=True)]},
    "blosc": {"compressors": [zarr_codecs.BloscCodec()]},
    "gzip": {"compressors": [zarr_codecs.GzipCodec(), zarr_codecs.Crc32cCodec()]},
    "big-endian": {"serializer": zarr_codecs.BytesCodec(endian="big")},
    "transposed": {"filters": [zarr_codecs.TransposeCodec(order=(1, 0))]},
    "dotted": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
}


@pytest.mark.parametrize("codec", CODECS)
def test_zarr_codecs(tmp_path: Path, codec: str) -> None:
    K = some_keys((101, 6))
    write_zarr(tmp_path / "keys.zarr", K, chunks=(17, 4), **CODECS[codec])
    check(open_keys(tmp_path / "keys.zarr", chunk_rows=20), K)


def test_zarr_groups(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "model")  # a store needs no suffix
    for name in ("layer/K", "layer/V", "layer/rope/angles"):
        group.create_array(name, shape=(9, 4), chunks=(2, 4), dtype="float32")[:] = some_keys((9, 4))
    (tmp_path / "model" / ".cache").mkdir()
    source = open_keys(tmp_path / "model", tensor="layer/K")
    assert source.tensor == "layer/K"
    np.testing.assert_array_equal(source.load(), some_keys((9, 4)))
    refused(r"holds 3 arrays \('layer/K', 'layer/V', 'layer/rope/angles'\)", tmp_path / "model")
    refused(r"no tensor '\.\./model/layer/K', it holds", tmp_path / "model", tensor="../model/layer/K")
    (tmp_path / "model/layer/V/zarr.json").unlink()
    refused(r"damaged \(there is no layer/V/zarr\.json\)", tmp_path / "model", tensor="layer/K")
    zarr.create_group(tmp_path / "empty.zarr")
    refused("holds no array", tmp_path / "empty.zarr")


def test_other_zarr_stores(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "old.zarr", shape=(3, 4), dtype="float32", zarr_format=2)
    refused(r"is a zarr store of version 2; write it again with zarr_format=3", tmp_path / "old.zarr")
    (tmp_path / "none.zarr").mkdir()
    refused(r"the store is truncated or damaged \(there is no zarr\.json\)", tmp_path / "none.zarr")
    (tmp_path / "file.zarr").write_bytes(b"PK")
    refused(r"suffix '\.zarr' is none of", tmp_path / "file.zarr")
    write_zarr(tmp_path / "int.zarr", np.arange(12).reshape(3, 4))
    refused(r"holds int64, expected floats; convert it with dtype=", tmp_path / "int.zarr")
    write_zarr(tmp_path / "keys.zarr", some_keys())
    refused(r"a zarr array holds one array without a name.*leave tensor out", tmp_path / "keys.zarr", tensor="K")


def test_zarr_chunks_that_are_missing_or_too_many(tmp_path: Path) -> None:
    K = some_keys((100, 8))
    path = write("zarr", tmp_path, K)
    K[24:48] = 0
    write_zarr(path, K)  # zarr does not write this chunk
    source = open_keys(path, chunk_rows=24)
    np.testing.assert_array_equal(source.read(48, 100), K[48:])
    with pytest.raises(KeyFileError, match=r"the array lacks chunk c/1/0, .*'write_empty_chunks': True"):
        source.load()
    write_zarr(path, K, config={"write_empty_chunks": True})
    np.testing.assert_array_equal(source.load(), K)
    shutil.copytree(path / "c/4", path / "c/5")
    refused(r"shape \(100, 8\), but there is the chunk c/5/0", path)
    shutil.rmtree(path / "c/5")
    shutil.rmtree(path / "c/4")
    refused(r"the array lacks chunk c/4/0", path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda node: node.update(shape=[10**15, 8]), "lacks chunk c/41666666666666/0"),
        (lambda node: node.update(shape=[100, 10**15]), "lacks chunk"),
        (lambda node: node.update(shape=[40, 8]), "but there is the chunk c/2/0"),
        (lambda node: node.update(shape=[0, 8]), "but there is the chunk c/0/0"),
        (lambda node: node.update(shape=[100]), "in chunks of"),
        (lambda node: node.update(shape=[True, 8]), "impossible shape"),
        (lambda node: node.update(shape=None), "impossible shape"),
        (
            lambda node: node["chunk_grid"]["configuration"].update(chunk_shape=[10**12, 8]),
            "there is the chunk|reshape",
        ),
        (lambda node: node["chunk_grid"].update(name="rectilinear"), "chunk grid 'rectilinear', expected regular"),
        (lambda node: node["chunk_key_encoding"].update(name="x"), "chunk key encoding 'x', expected default, v2"),
        (lambda node: node["codecs"].append({"name": "numcodecs.pickle"}), "codec 'numcodecs.pickle', expected bytes"),
        (lambda node: node["codecs"].insert(0, {"name": "blosc"}), "codec 'blosc', expected bytes"),
        (lambda node: node["codecs"].insert(0, {"name": "sharding_indexed"}), "'bytes', expected sharding_indexed"),
        (lambda node: node["codecs"].clear(), "truncated or damaged"),
        (lambda node: node.update(codecs=[{"name": ["bytes"]}]), "truncated or damaged"),
        (lambda node: node.update(data_type="bfloat16"), "dtype bfloat16, expected float64, float32, float16 or"),
        (lambda node: node.update(data_type={"name": "x"}), r"dtype \{'name': 'x'\}, expected"),
        (lambda node: node.update(zarr_format=2), "neither an array nor a group of zarr v3"),
        (lambda node: node.update(storage_transformers=[{"name": "x"}]), "truncated or damaged"),
        (lambda node: node.pop("fill_value"), "truncated or damaged"),
    ],
)
def test_damaged_zarr_metadata(tmp_path: Path, edit: Callable[[dict[str, Any]], object], message: str) -> None:
    path = write("zarr", tmp_path, some_keys())
    edit_json(path / "zarr.json", edit)
    refused_in_reading(message, path)


def test_absurd_shards_cost_nothing(tmp_path: Path) -> None:
    path = write("zarr-shards", tmp_path, some_keys((40, 8)))

    def edit(node: dict[str, Any]) -> None:
        node["shape"] = node["chunk_grid"]["configuration"]["chunk_shape"] = [24 * 10**10, 8]

    edit_json(path / "zarr.json", edit)
    refused(r"chunk c/0/0 of the array is .*, its index alone needs 160000000000", path)


@pytest.mark.parametrize("codec", ["none", "zstd", "blosc", "gzip"])
def test_damaged_zarr_chunks(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "keys.zarr"
    write_zarr(path, some_keys(), **CODECS[codec])
    chunk = path / "c/2/0"
    content = chunk.read_bytes()
    for damage in (b"", content[:10], content[:-1], content + b"x"):
        chunk.write_bytes(damage)
        refused_in_reading("truncated or damaged", path)


# -- parquet ---------------------------------------------------------------------------------------------


def test_parquet_columns(tmp_path: Path) -> None:
    K, V = some_keys((10, 4)), some_keys((10, 2), np.float64)
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"layer.0.K": lists_of(K), "V": lists_of(V), "text": ["x"] * 10}), path)
    check(open_keys(path, tensor="layer.0.K"), K)
    check(open_keys(path, tensor="V"), V)
    refused(r"holds 2 arrays \('layer\.0\.K', 'V'\); say which one", path)
    refused(r"no tensor 'layer\.0', it holds", path, tensor="layer.0")
    refused(
        r"column 'text' holds string, expected lists of floats; for a column of numbers use columns=",
        path,
        tensor="text",
    )


@pytest.mark.parametrize("rows", [0, 1, 7, 30, 31])
def test_parquet_row_groups(tmp_path: Path, rows: int) -> None:
    K = some_keys((rows, 3))
    check(open_keys(write("parquet", tmp_path, K), chunk_rows=4), K)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (lambda: pa.array([[1, 2]], pa.list_(pa.int32(), 2)), "column 'K' holds int32, expected floats; convert it"),
        (lambda: pa.array([[[1.0]]]), r"column 'K' holds list<.*, expected floats; choose columns of numbers"),
        (lambda: pa.array([{"a": 1.0}]), r"column 'K' holds struct<.*, expected floats"),
        (
            lambda: pa.array([[1, 2], None], pa.list_(pa.float32(), 2)),
            "column 'K' has nulls, the first in row 1|all lists to be of size=2",
        ),
        (lambda: pa.array([[1, 2], [3, None]], pa.list_(pa.float32(), 2)), "column 'K' has nulls"),
    ],
)
def test_other_parquet_columns(tmp_path: Path, column: Callable[[], Any], message: str) -> None:
    parquet.write_table(pa.table({"K": column()}), tmp_path / "a.parquet")
    refused_in_reading(message, tmp_path / "a.parquet")


def test_parquet_checksums_are_compared(tmp_path: Path) -> None:
    K = some_keys((1000, 4))
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pa.table({"K": lists_of(K)}), path, write_page_checksum=True, compression="none", use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refused_in_reading(r"truncated or damaged \(.*(?i:crc|checksum)", path)


# -- what is refused -------------------------------------------------------------------------------------


def test_suffixes_and_missing_files(tmp_path: Path) -> None:
    npy = write("npy", tmp_path, some_keys())
    npy = npy.rename(tmp_path / "KEYS.NPY")
    assert open_keys(str(npy)).shape == (100, 8)
    refused(r"suffix '\.dat' is none of .*rename it", npy.rename(tmp_path / "keys.dat"))
    refused(r"nothing\.npy: no such file; check the path", tmp_path / "nothing.npy", error=FileNotFoundError)
    (tmp_path / "model.pt").write_bytes(pickle.dumps([1, 2]))
    refused(r"never loaded: save the tensor with safetensors", tmp_path / "model.pt")
    (tmp_path / "keys.txt").write_text("1,2\n")
    refused(r"save the keys with numpy\.save or safetensors", tmp_path / "keys.txt")


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "parquet"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"one two three\n" * 9, b"\x93NUMP", b"\x93NUMPX" * 30, b"PK\x03\x04", b"{}", b"\0" * 99],
)
def test_wrong_content(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"keys.{suffix}"
    path.write_bytes(content)
    refused(r"keys\.\w+: .*; (save|write)", path)


class Bomb:
    """Shows itself when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("exploded",))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nothing_is_ever_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bombs = np.array([[Bomb(), Bomb()]], dtype=object)
    np.save("object.npy", bombs, allow_pickle=True)
    Path("pickle.npy").write_bytes(pickle.dumps(bombs))
    np.savez("object.npz", K=bombs)
    with zipfile.ZipFile("pickle.npz", "w") as archive:
        archive.writestr("K.npy", pickle.dumps(bombs))
    Path("pickle.safetensors").write_bytes(pickle.dumps(bombs))
    for name in ("object.npy", "pickle.npy", "object.npz", "pickle.npz"):
        refused(r"pickle.*never loaded", name)
    refused(r"truncated or damaged", "pickle.safetensors")
    assert not Path("exploded").exists()


BFLOAT16 = r"bfloat16.*safetensors.*view\(ml_dtypes\.bfloat16\)"


@pytest.mark.parametrize("kind", ["npy", "npz"])
@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        *((dtype, "dtype|raw 2-byte") for dtype in ("i8", "u1", "?", "c16", "U4", "S4", "M8[s]", "V2", "V3")),
        ([("a", "f4")], "dtype"),
        (np.longdouble, "dtype longdouble|dtype float128"),
        (ml_dtypes.bfloat16, BFLOAT16),
    ],
)
def test_other_dtypes(tmp_path: Path, kind: str, dtype: Any, message: str) -> None:
    refused(message, write(kind, tmp_path, np.zeros((3, 2), dtype)))


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("shape", [(), (5,)])
def test_fewer_than_two_axes(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    refused(r"has shape \(.*\), expected \(\.\.\., n, d\)", write(kind, tmp_path, np.zeros(shape)))


def test_archives_without_arrays(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("readme.txt", "no arrays")
    safetensors_numpy.save_file({}, tmp_path / "a.safetensors")
    for name in ("a.npz", "a.safetensors"):
        refused(r"holds no array", tmp_path / name)


@pytest.mark.parametrize(
    "shape", ["(-1, 4)", "(True, 4)", f"({10**30}, 4)", f"(0, {2**70})", "(3.0, 2)", "4", "(2, 'a')"]
)
def test_impossible_shapes(tmp_path: Path, shape: str) -> None:
    path = npy_of(tmp_path, header_of(shape), b"\0" * 64)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.write(path, "K.npy")
    for name in ("a.npy", "a.npz"):
        refused("truncated or damaged", tmp_path / name)


@pytest.mark.parametrize("kind", [*WRITERS, "parquet"])
def test_truncated_anywhere(tmp_path: Path, kind: str) -> None:
    whole = write(kind, tmp_path, some_keys((30, 4)))
    content = whole.read_bytes()
    for size in sorted({*range(0, len(content), 13), *range(12), 127, 128, len(content) - 1}):
        whole.write_bytes(content[:size])
        refused(r"keys\.\w+: ", whole)


NO_NUMBERS = [
    *((2**25, 0), (0, 2**25), (2**25, 0, 4), (10**18, 0, 10**18)),
    *((2**24, 0, 1), (2**12, 2**12, 0, 1), (0, 2**13, 2**14), (0, 2**20), (2**10, 0, 2**10), (0, 5, 2**14)),
    *((2, 2**24, 0), (2**62,) * 60 + (0, 1), (0,) * 60 + (2**62, 2**62)),
]


@pytest.mark.parametrize("shape", NO_NUMBERS, ids=lambda shape: "x".join(map(str, shape[-4:])))
def test_many_rows_of_nothing(tmp_path: Path, shape: tuple[int, ...]) -> None:
    refused(r"has shape \(.*\), but holds no number", npy_of(tmp_path, header_of(shape), b""))


@pytest.mark.parametrize("shape", [(2**16, 0, 4), (32, 32, 0, 128), (0, 8, 4096, 128), (0, 4096), (2**24, 0)])
def test_few_rows_of_nothing(tmp_path: Path, shape: tuple[int, ...]) -> None:
    assert open_keys(npy_of(tmp_path, header_of(shape), b"")).shape == shape


CONTROL = "\x1b]0;title\x07\x1b[31mred\x9b2J\x08\r\n\x7f\u202e\u2066\x00\x85\u2028"


def test_control_characters_of_files_are_written_out(tmp_path: Path) -> None:
    folder = tmp_path / CONTROL.replace("\x00", "")
    folder.mkdir()
    text = CONTROL.encode("latin-1", "replace").decode("latin-1")
    npy_of(folder, header_of("(1, 1)", text))
    write("zarr", folder, some_keys())
    edit_json(folder / "keys.zarr" / "zarr.json", lambda node: node.update(data_type={"name": CONTROL}))
    write("zarr", folder, some_keys(), "text")
    edit_json(folder / "text.zarr" / "zarr.json", lambda node: node.update(data_type=CONTROL))
    kind = pa.struct([(CONTROL.replace("\x00", ""), pa.float32())])
    parquet.write_table(pa.table({"K": pa.array([None], kind)}), folder / "struct.parquet")
    column = {CONTROL.replace("\x00", ""): pa.array(["x"])}
    parquet.write_table(pa.table(column), folder / "column.parquet")
    safetensors_numpy.save_file({CONTROL: np.zeros((2, 2)), "K": np.zeros((2, 2))}, folder / "names.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {CONTROL: f"{CONTROL}.safetensors"}})
    )
    (folder / f"other.{CONTROL[:9]}").write_bytes(b"")
    asked: list[tuple[str, str | None]] = [
        *((name, tensor) for name in ("struct.parquet", "column.parquet") for tensor in (None, "K", CONTROL)),
        *((name, None) for name in ("a.npy", "keys.zarr", "text.zarr", "names.safetensors", "nothing.npy", "")),
        *(("model.safetensors.index.json", tensor) for tensor in (None, CONTROL, "K")),
        *(("names.safetensors", tensor) for tensor in (f"{CONTROL}-", "L")),
        (f"other.{CONTROL[:9]}", None),
    ]
    for name, tensor in asked:
        with pytest.raises((KeyFileError, FileNotFoundError)) as caught:
            open_keys(folder / name, tensor=tensor)
        assert str(caught.value).isprintable(), name
        assert r"\x1b[31mred\x9b2J" in str(caught.value)


def test_what_a_message_quotes_is_bounded(tmp_path: Path) -> None:
    write("zarr", tmp_path, some_keys())
    edit_json(tmp_path / "keys.zarr" / "zarr.json", lambda node: node.update(data_type="x" * 10**6))
    with pytest.raises(KeyFileError, match=r"has dtype x+\.\.\.; convert it") as caught:
        open_keys(tmp_path / "keys.zarr")
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (header_of("(1, 1)", "<b4"), "dtype <b4, expected"),
        (header_of("(1, 1)", "f4,f4"), "dtype f4,f4, expected"),
        (header_of("(1, 1)").replace("'<f4'", "[('O', '<f4')]"), r"dtype \[\('O', '<f4'\)\], expected"),
        (header_of("(1, 1)").replace("'<f4'", "[('a', '|O')]"), "pickled"),
        (header_of(f"({'1, ' * 65})"), "has shape of 65 axes, expected"),
        (header_of("(1, 1)").replace("False", "0"), "header cannot be read"),
        ("{'descr': '<f4', 'fortran_order': False}", "header cannot be read"),
        (header_of("(1, 1), 'x': print()"), "header cannot be read"),
        (header_of("(1, 1)") + " or 1", "header cannot be read"),
        (header_of("(1, 1)") + " " * 10_000, "header is cut off"),
        *((opening * (9000 // len(opening)), r"a\.npy: ") for opening in ("(", "[", "{", "-", "{'descr':(")),
    ],
)
def test_other_headers(tmp_path: Path, header: str, message: str) -> None:
    refused(message, npy_of(tmp_path, header))
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x09\x09" + header.encode())
    refused(r"unknown version \(9, 9\)", tmp_path / "a.npy")


def test_safetensors_that_are_not_aligned(tmp_path: Path) -> None:
    K = some_keys((5, 4))
    header = json.dumps({"K": {"dtype": "F32", "shape": [5, 4], "data_offsets": [0, 80]}}).encode()
    header += b" " * ((1 - len(header)) % 4)
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + K.tobytes())
    np.testing.assert_array_equal(open_keys(tmp_path / "a.safetensors").load(), K)


def test_surplus_bytes(tmp_path: Path) -> None:
    path = write("npy", tmp_path, some_keys((30, 4)))
    path.write_bytes(path.read_bytes() + b"x")
    refused(r"\(30, 4\) needs 480 bytes, 481 are there", path)


@pytest.mark.parametrize("kind", ALL)
def test_a_file_that_changed_is_noticed(tmp_path: Path, kind: str) -> None:
    source = open_keys(write(kind, tmp_path, some_keys((10, 4))))
    write(kind, tmp_path, some_keys((11, 4)))
    with pytest.raises(KeyFileError, match=r"changed since it was opened, from float32"):
        source.load()
    with pytest.raises(KeyFileError, match="open it again"):
        next(iter(source))


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "parquet"])
def test_a_file_of_the_time_zero_that_changed_is_noticed(tmp_path: Path, kind: str) -> None:
    """As archives that leave out times unpack it; another change gives it a time, and leaves its size."""
    path = write(kind, tmp_path, some_keys((10, 4)))
    os.utime(path, ns=(0, 0))
    source = open_keys(path)
    np.testing.assert_array_equal(source.load(), some_keys((10, 4)))
    contents = path.read_bytes()
    path.write_bytes(contents)
    with pytest.raises(KeyFileError, match=r"changed since it was opened.*another time"):
        source.load()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tensor": "K"}, KeyFileError, "without a name, got tensor='K'; leave tensor out"),
        ({"tensor": 3}, TypeError, r"tensor must be the name of an array \(str\) or None, got int"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows is 0; expected at least 1"),
        ({"chunk_rows": 2.0}, TypeError, r"chunk_rows is 2\.0; expected a whole number"),
        ({"memory": -1}, ValueError, "memory is -1; expected at least 1"),
        ({"memory": "1 GB"}, TypeError, "memory is '1 GB'; expected a whole number"),
        ({"memory": 1, "chunk_rows": 1}, ValueError, "chunk_rows and memory are both given; expected at most one"),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    refused(message, write("npy", tmp_path, some_keys()), error=error, **options)


@pytest.mark.parametrize(
    ("package", "kind"),
    [("safetensors", "safetensors"), ("ml_dtypes", "safetensors"), ("pyarrow", "parquet"), ("zarr", "zarr")],
)
def test_missing_packages_name_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, kind: str
) -> None:
    dtype = ml_dtypes.bfloat16 if package == "ml_dtypes" else np.float32
    path = write(kind, tmp_path, some_keys(dtype=dtype))
    monkeypatch.setitem(sys.modules, package, None)
    refused(rf'needs {package}: pip install "levattn\[io\]"', path, error=ImportError)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("", ValueError, "path is empty .an unset variable..; expected the path of a file or folder"),
        (["a.npy", ""], ValueError, "path is empty"),
        (b"keys.npy", TypeError, r"path is of type bytes; expected the path .* Decode it by os\.fsdecode\(path\)"),
        (bytearray(b"a"), TypeError, "path is of type bytearray"),
        (None, TypeError, "path is of type NoneType; expected the path of a file or folder"),
        ({"a.npy"}, TypeError, "path is of type set, which has no order; expected a list"),
        ({"a.npy": 1}, TypeError, "path is of type dict, which has no order"),
        (3, TypeError, "path is of type int; expected the path of a file or folder"),
        (np.eye(3), TypeError, "path is of type ndarray; .* Give keys in memory to universal_set directly"),
        (["a.npy", None], TypeError, "path holds None; expected paths of files"),
        ([b"a.npy"], TypeError, "path holds b'a.npy'; expected paths of files"),
    ],
)
def test_what_is_no_path(path: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_keys(path)


def test_a_source_does_not_depend_on_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    K = some_keys((30, 4))
    write_shards(tmp_path, K, ["npy"] * 3, ["1", "2", "3"])
    monkeypatch.chdir(tmp_path)
    sources = open_keys("."), open_keys(["1.npy", Path("2.npy"), "3.npy"])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for source in sources:
        np.testing.assert_array_equal(source.load(), K)
    assert sources[1].path == tuple(tmp_path / f"{i}.npy" for i in (1, 2, 3))


@pytest.mark.parametrize("kind", [kind for kind in ALL if not kind.startswith("zarr")])
def test_another_file_of_the_same_shape_is_noticed(tmp_path: Path, kind: str) -> None:
    path = write(kind, tmp_path, some_keys((10, 4)))
    source, sent = (open_keys(path), pickle.loads(pickle.dumps(open_keys(path))))
    before = path.stat()
    other = write(kind, tmp_path, 2 * some_keys((10, 4)), "other")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    with pytest.raises(KeyFileError, match=r"changed since it was opened, or another file took its place"):
        source.load()
    if before.st_size == path.stat().st_size:  # a source of another process knows only the size and the time
        assert sent.load().shape == (10, 4)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(KeyFileError, match=r"changed since it was opened.*open it again"):
        sent.load()


# -- atomic writing --------------------------------------------------------------------------------------


def test_replace_file_replaces_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with replace_file(path) as stream:
        stream.write(b"first")
        assert not path.exists()
    assert path.read_bytes() == b"first"

    def fail() -> None:
        with replace_file(path) as stream:
            stream.write(b"half of the sec")
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        fail()
    assert path.read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]
    with pytest.raises(FileNotFoundError), replace_file(tmp_path / "none" / "a.bin") as stream:
        stream.write(b"")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
@pytest.mark.parametrize("link", [False, True])
def test_no_device_pipe_or_folder_is_replaced(tmp_path: Path, link: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, error in (("pipe", FileExistsError), ("folder", IsADirectoryError)):
        path = tmp_path / name
        if link:
            path = tmp_path / f"link to {name}"
            path.symlink_to(name)
        with pytest.raises(error, match=f"path is a .*{name}"), replace_file(path) as stream:
            stream.write(b"")
    with pytest.raises(FileExistsError, match="path is a device"), replace_file(os.devnull) as stream:
        stream.write(b"")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="leads to itself"):
        replace_file(tmp_path / "loop").__enter__()
    (tmp_path / "link").symlink_to("new.bin")
    with replace_file(tmp_path / "link") as stream:
        stream.write(b"new")
    assert (tmp_path / "new.bin").read_bytes() == b"new"
    assert {path.name for path in tmp_path.iterdir()} == {"loop", "link", "new.bin"}
    with pytest.raises(IsADirectoryError, match="path is a folder"):
        replace_file(f"{tmp_path}/newdir/").__enter__()


def test_errors_of_writing_name_the_file(tmp_path: Path) -> None:
    for path in (None, 3, b"a.bin", io.BytesIO()):
        with pytest.raises(TypeError, match=r"path is of type \w+; expected the path of a file"):
            replace_file(path).__enter__()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="path is empty"):
        replace_file("").__enter__()
    with pytest.raises(FileNotFoundError, match=r"none/a\.bin'$"):
        replace_file(tmp_path / "none" / "a.bin").__enter__()


@pytest.mark.parametrize("letter", ["x", "é"])
def test_names_may_be_as_long_as_the_system_allows(tmp_path: Path, letter: str) -> None:
    path = tmp_path / (letter * (255 // len(letter.encode())))
    for content in (b"first", b"second"):
        with replace_file(path) as stream:
            stream.write(content)
        assert path.read_bytes() == content
    assert [*tmp_path.iterdir()] == [path]
    with pytest.raises(OSError, match="too long"), replace_file(tmp_path / ("x" * 256)) as stream:
        stream.write(b"")
    assert [*tmp_path.iterdir()] == [path]


def test_replace_file_follows_links_and_the_umask(tmp_path: Path) -> None:
    (tmp_path / "real.bin").write_bytes(b"old")
    (tmp_path / "link.bin").symlink_to(tmp_path / "real.bin")
    with replace_file(tmp_path / "link.bin") as stream:
        stream.write(b"new")
    assert (tmp_path / "link.bin").is_symlink()
    assert (tmp_path / "real.bin").read_bytes() == b"new"
    (tmp_path / "plain").write_bytes(b"")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("real.bin", "plain")}
    assert len(modes) == 1


@pytest.mark.skipif(os.name == "nt", reason="files have no such modes")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444, 0o777])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path, seen = tmp_path / "a.bin", []
    path.write_bytes(b"old")
    path.chmod(mode)
    with replace_file(path) as stream:
        stream.write(b"new")
        seen = [stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()]
    assert path.read_bytes() == b"new"
    assert {stat.S_IMODE(path.stat().st_mode), *seen} == {mode}
