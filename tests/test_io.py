"""Keys from files: what comes back is what was stored, and every bad file is refused in words."""

from __future__ import annotations

import io
import os
import pickle
import stat
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from levattn._kernels import BLOCK
from levattn.exceptions import KeyFileError
from levattn.io import KeySource, open_keys, replace_file

ml_dtypes = pytest.importorskip("ml_dtypes")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

Array = npt.NDArray[Any]
Writer = Callable[[Path, Array], Path]

WRITERS = ["npy", "npz", "npz-compressed", "safetensors"]


def write(kind: str, folder: Path, K: Array) -> Path:
    path = folder / f"keys.{kind.removesuffix('-compressed')}"
    if kind == "npy":
        np.save(path, K)
    elif kind == "npz":
        np.savez(path, K=K)
    elif kind == "npz-compressed":
        np.savez_compressed(path, K=K)
    else:
        safetensors_numpy.save_file({"K": np.ascontiguousarray(K)}, path)
    return path


def some_keys(shape: tuple[int, ...] = (100, 8), dtype: Any = np.float32) -> Array:
    return np.random.default_rng(7).standard_normal(shape).astype(dtype)


# -- what comes back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("shape", [(100, 8), (2, 3, 101, 5), (1, 1)])
def test_chunks_and_load_return_what_was_stored(tmp_path: Path, kind: str, dtype: Any, shape: tuple[int, ...]) -> None:
    K = some_keys(shape, dtype)
    source = open_keys(write(kind, tmp_path, K), chunk_rows=17)
    assert isinstance(source, KeySource)
    assert (source.shape, source.dtype) == (K.shape, K.dtype)
    assert source.tensor == (None if kind == "npy" else "K")
    for _ in range(2):  # as many passes as one likes
        chunks = list(source)
        assert all(chunk.shape[-2] == 17 for chunk in chunks[:-1])
        assert {(type(chunk), chunk.dtype) for chunk in chunks} == {(np.ndarray, K.dtype)}
        np.testing.assert_array_equal(np.concatenate(chunks, axis=-2), K)
    np.testing.assert_array_equal(source.load(), K)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (2, 0, 4), (0, 7, 3)])
def test_empty_arrays(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    source = open_keys(write(kind, tmp_path, some_keys(shape)), chunk_rows=3)
    assert source.shape == source.load().shape == shape
    assert sum(chunk.shape[-2] for chunk in source) == shape[-2]


def test_bfloat16(tmp_path: Path) -> None:
    K = some_keys((2, 50, 4)).astype(ml_dtypes.bfloat16)
    source = open_keys(write("safetensors", tmp_path, K), chunk_rows=20)
    assert source.dtype == np.dtype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.concatenate(list(source), axis=-2).astype(float), K.astype(float))
    np.testing.assert_array_equal(source.load().astype(float), K.astype(float))


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_fortran_and_swapped_bytes(tmp_path: Path, kind: str) -> None:
    K = some_keys((40, 6), np.float64)
    swapped = np.asfortranarray(K.astype(K.dtype.newbyteorder("S")))
    source = open_keys(write(kind, tmp_path, swapped), chunk_rows=7)
    assert source.dtype == K.dtype
    assert source.dtype.isnative
    assert all(chunk.dtype.isnative for chunk in source)
    np.testing.assert_array_equal(np.concatenate(list(source)), K)
    np.testing.assert_array_equal(source.load(), K)


def test_npy_is_memory_mapped(tmp_path: Path) -> None:
    source = open_keys(write("npy", tmp_path, some_keys()))
    K = source.load()
    assert isinstance(K, np.memmap)
    assert not K.flags.writeable
    assert np.shares_memory(next(iter(source)), next(iter(source))) is False  # mapped anew each time


def test_upper_case_suffix_and_string_path(tmp_path: Path) -> None:
    path = write("npy", tmp_path, some_keys()).rename(tmp_path / "KEYS.NPY")
    assert open_keys(str(path)).shape == (100, 8)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_one_of_several_tensors(tmp_path: Path, kind: str) -> None:
    tensors: dict[str, Any] = {"a": some_keys((5, 3)), "b": some_keys((7, 2)), "tokens": np.arange(4)}
    path = tmp_path / f"x.{kind}"
    if kind == "npz":
        np.savez(path, **tensors)
    else:
        safetensors_numpy.save_file(tensors, path)
    source = open_keys(path, tensor="b")
    assert (source.tensor, source.shape) == ("b", (7, 2))
    np.testing.assert_array_equal(source.load(), tensors["b"])
    with pytest.raises(KeyFileError, match=r"holds 3 arrays \('a', 'b', 'tokens'\); say which one with tensor="):
        open_keys(path)
    with pytest.raises(KeyFileError, match=r"no tensor 'token', it holds 'a', 'b', 'tokens'; did you mean 'tokens'"):
        open_keys(path, tensor="token")
    with pytest.raises(KeyFileError, match=r"'tokens' has dtype (int|I)64, expected"):
        open_keys(path, tensor="tokens")


def test_a_long_list_of_tensors_is_shortened(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors_numpy.save_file({f"layer.{i:03d}": some_keys((2, 2)) for i in range(50)}, path)
    with pytest.raises(KeyFileError, match=r"'layer.029' and 20 more; did you mean"):
        open_keys(path, tensor="layer.99")


def test_default_chunks_hold_32_mebibytes(tmp_path: Path) -> None:
    tall = np.lib.format.open_memmap(tmp_path / "tall.npy", "w+", np.float32, (2_000_000, 64))
    del tall
    source = open_keys(tmp_path / "tall.npy")
    assert source.chunk_rows == 32 * 2**20 // (64 * 4)
    assert sum(chunk.shape[0] for chunk in source) == 2_000_000
    wide = np.lib.format.open_memmap(tmp_path / "wide.npy", "w+", np.float64, (64, 3, 100_000))
    del wide
    assert open_keys(tmp_path / "wide.npy").chunk_rows == 1
    (tmp_path / "tall.npy").unlink()
    (tmp_path / "wide.npy").unlink()


@pytest.mark.parametrize("d", [33, 50, 64, 100])
def test_default_chunks_are_whole_blocks_of_sums(tmp_path: Path, d: int) -> None:
    rows = open_keys(write("npy", tmp_path, np.zeros((3, d), np.float32))).chunk_rows
    assert rows > BLOCK
    assert rows % BLOCK == 0


def test_a_source_can_be_pickled(tmp_path: Path) -> None:
    source = open_keys(write("npy", tmp_path, some_keys()))
    assert pickle.loads(pickle.dumps(source)) == source


# -- what is refused -------------------------------------------------------------------------------------


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.npy: no such file; check the path"):
        open_keys(tmp_path / "nothing.npy")
    with pytest.raises(KeyFileError, match="not a regular file"):
        open_keys(tmp_path)


def test_unknown_suffix(tmp_path: Path) -> None:
    npy = write("npy", tmp_path, some_keys())
    with pytest.raises(KeyFileError, match=r"suffix '\.dat' is none of .*rename it"):
        open_keys(npy.rename(tmp_path / "keys.dat"))
    (tmp_path / "model.pt").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(KeyFileError, match=r"never loaded: save the tensor with safetensors"):
        open_keys(tmp_path / "model.pt")
    (tmp_path / "keys.csv").write_text("1,2\n")
    with pytest.raises(KeyFileError, match=r"save the keys with numpy\.save or safetensors"):
        open_keys(tmp_path / "keys.csv")


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"one two three\n" * 9, b"\x93NUMP", b"\x93NUMPX" * 30, b"PK\x03\x04", b"{}", b"\0" * 99],
)
def test_wrong_content(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"keys.{suffix}"
    path.write_bytes(content)
    with pytest.raises(KeyFileError, match=r"keys\.\w+: .*; (save|write)"):
        open_keys(path)


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
        with pytest.raises(KeyFileError, match=r"pickle.*never loaded"):
            open_keys(name)
    with pytest.raises(KeyFileError, match=r"truncated or damaged"):
        open_keys("pickle.safetensors")
    assert not Path("exploded").exists()


@pytest.mark.parametrize("kind", ["npy", "npz"])
@pytest.mark.parametrize("dtype", ["i8", "u1", "?", "c16", "U4", "S4", "M8[s]", "V2", "V3", [("a", "f4")]])
def test_other_dtypes(tmp_path: Path, kind: str, dtype: Any) -> None:
    with pytest.raises(KeyFileError, match=r"dtype|raw 2-byte"):
        open_keys(write(kind, tmp_path, np.zeros((3, 2), dtype)))


def test_bfloat16_in_npy_names_the_remedy(tmp_path: Path) -> None:
    path = write("npy", tmp_path, some_keys((4, 3)).astype(ml_dtypes.bfloat16))
    with pytest.raises(KeyFileError, match=r"bfloat16.*safetensors.*view\(ml_dtypes\.bfloat16\)"):
        open_keys(path)
    with pytest.raises(KeyFileError, match=r"dtype longdouble|dtype float128"):
        open_keys(write("npy", tmp_path, np.zeros((3, 2), np.longdouble)))


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("shape", [(), (5,)])
def test_fewer_than_two_axes(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(KeyFileError, match=r"has shape \(.*\), expected \(\.\.\., n, d\)"):
        open_keys(write(kind, tmp_path, np.zeros(shape)))


def test_archives_without_arrays(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("readme.txt", "no arrays")
    safetensors_numpy.save_file({}, tmp_path / "a.safetensors")
    for name in ("a.npz", "a.safetensors"):
        with pytest.raises(KeyFileError, match=r"holds no array"):
            open_keys(tmp_path / name)


@pytest.mark.parametrize("shape", ["(-1, 4)", "(True, 4)", "(10**30, 4)", "(0, 2**70)", "(3.0, 2)", "4", "(2, 'a')"])
def test_impossible_shapes(tmp_path: Path, shape: str) -> None:
    shape = shape.replace("10**30", str(10**30)).replace("2**70", str(2**70))
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 64
    (tmp_path / "a.npy").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("K.npy", content)
    for name in ("a.npy", "a.npz"):
        with pytest.raises(KeyFileError, match=r"truncated or damaged"):
            open_keys(tmp_path / name)


@pytest.mark.parametrize("kind", WRITERS)
def test_truncated_anywhere(tmp_path: Path, kind: str) -> None:
    whole = write(kind, tmp_path, some_keys((30, 4)))
    content = whole.read_bytes()
    cut = tmp_path / f"cut{whole.suffix}"
    for size in sorted({*range(0, len(content), 13), *range(12), 127, 128, len(content) - 1}):
        cut.write_bytes(content[:size])
        with pytest.raises(KeyFileError):
            open_keys(cut)


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_damaged_bytes_never_surprise(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    content = bytearray(write(kind, tmp_path, some_keys((9, 4))).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / f"damaged.{kind.removesuffix('-compressed')}"
    path.write_bytes(content)
    try:
        source = open_keys(path)
        rows = sum(chunk.shape[-2] for chunk in source)
    except KeyFileError:
        return
    assert rows == source.shape[-2]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(header=st.text("(){}[],:'\"\\ <f4descrfortran_ordershapeTrueFalse0123456789\n#", max_size=200))
def test_nonsense_headers_never_surprise(tmp_path: Path, header: str) -> None:
    text = header.encode()
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    with pytest.raises(KeyFileError):
        open_keys(tmp_path / "a.npy")


@pytest.mark.parametrize("opening", ["(", "[", "{", "-", "{'descr':("])
def test_deeply_nested_headers(tmp_path: Path, opening: str) -> None:
    text = (opening * 9000)[:9000].encode()
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    with pytest.raises(KeyFileError):
        open_keys(tmp_path / "a.npy")


def test_damaged_data_show_when_they_are_read(tmp_path: Path) -> None:
    path = write("npz", tmp_path, some_keys((5000, 4)))
    content = bytearray(path.read_bytes())
    content[40_000] ^= 1
    path.write_bytes(content)
    source = open_keys(path)
    with pytest.raises(KeyFileError, match=r"damaged .*CRC"):
        source.load()


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_that_changed_is_noticed(tmp_path: Path, kind: str) -> None:
    source = open_keys(write(kind, tmp_path, some_keys((10, 4))))
    write(kind, tmp_path, some_keys((11, 4)))
    with pytest.raises(KeyFileError, match=r"changed since it was opened, from float32"):
        source.load()
    with pytest.raises(KeyFileError, match="open it again"):
        next(iter(source))


def test_bad_arguments(tmp_path: Path) -> None:
    path = write("npy", tmp_path, some_keys())
    with pytest.raises(KeyFileError, match="without a name, got tensor='K'; leave tensor out"):
        open_keys(path, tensor="K")
    with pytest.raises(TypeError, match=r"tensor must be the name of an array \(str\) or None, got int"):
        open_keys(path, tensor=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_rows must be at least 1, got 0"):
        open_keys(path, chunk_rows=0)
    with pytest.raises(TypeError, match="chunk_rows must be a positive integer, got float"):
        open_keys(path, chunk_rows=2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("package", ["safetensors", "ml_dtypes"])
def test_missing_packages_name_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    path = write("safetensors", tmp_path, some_keys().astype(ml_dtypes.bfloat16))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'needs {package}: pip install "levattn\[io\]"'):
        open_keys(path)


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


def test_replace_file_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replace_file(tmp_path / "none" / "a.bin") as stream:
        stream.write(b"")


def test_in_memory_writers_work_on_the_stream(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.arange(3))
    with replace_file(tmp_path / "a.npz") as stream:
        np.savez(stream, a=np.arange(3))
    assert (tmp_path / "a.npz").read_bytes() == buffer.getvalue()
