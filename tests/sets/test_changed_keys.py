"""Keys that are not the same each time they are read: each pass, and each run that goes on, notices any change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import levattn
from levattn.exceptions import KeyFileError

N, EPSILON = 6500, 0.3
ROW = 2700  # which no sample of rows would take

K0 = np.random.default_rng(0).standard_normal((N, 4)).astype(np.float32)


def one_bit(K: Any) -> None:
    K[ROW, 1:2].view(np.uint32)[:] ^= 1


def one_row(K: Any) -> None:
    K[ROW] *= 100


def exchanged(K: Any) -> None:
    K[[ROW, ROW + 1]] = K[[ROW + 1, ROW]]


def negated(K: Any) -> None:
    K[[ROW, ROW + 2]] *= -1


CHANGES: dict[str, Callable[[Any], None]] = {
    change.__name__: change for change in (one_bit, one_row, exchanged, negated)
}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


class KilledError(Exception):
    """Stands for what ends a process."""


def changed(change: Callable[[Any], None]) -> Any:
    K = K0.copy()
    change(K)
    return K


# -- ways to change a file ------------------------------------------------------------------------


def save(path: Path, K: Any) -> None:
    if path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file({"K": K}, path)
    elif path.suffix == ".npz":
        np.savez(path, K=K)
    else:
        np.save(path, K)


def rewritten(path: Path, K: Any) -> None:
    """The same file with other contents."""
    other = path.with_name(f"other{path.suffix}")
    save(other, K)
    with path.open("r+b") as stream:
        stream.write(other.read_bytes())
        stream.truncate()
    other.unlink()


def restored(path: Path, K: Any) -> None:
    """The same file with other contents, and the time of the first ones."""
    before = path.stat()
    rewritten(path, K)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def between_the_passes(act: Callable[[], None]) -> Callable[[int, int | None], None]:
    """A progress callback that acts once, at the end of the first pass."""
    acted: list[int] = []

    def call(done: int, _: int | None) -> None:
        if done >= N and not acted:
            acted.append(done)
            time.sleep(0.02)  # a tick of the clock of the file system
            act()

    return call


# -- from one pass to the other -------------------------------------------------------------------


def test_a_shard_that_changes(tmp_path: Path) -> None:
    for name, part in zip("abc", np.array_split(K0, 3), strict=True):
        save(tmp_path / f"{name}.npy", part)
    source = levattn.open_keys(tmp_path, chunk_rows=700)
    act = between_the_passes(lambda: restored(tmp_path / "b.npy", np.array_split(changed(one_bit), 3)[1]))
    with pytest.raises(KeyFileError, match="rows 2048 to 4095"):
        levattn.scan_set(source, EPSILON, progress=act)


def test_a_zarr_store_that_changes(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    path = tmp_path / "keys.zarr"
    array = zarr.create_array(path, shape=K0.shape, chunks=(500, 4), dtype="float32")
    array[:] = K0

    def act() -> None:
        array[ROW] = 2 * K0[ROW]

    with pytest.raises(KeyFileError, match="rows 2048 to 4095"):
        levattn.scan_set(levattn.open_keys(path), EPSILON, progress=between_the_passes(act))


# -- functions and iterables ----------------------------------------------------------------------


def in_turn(*readings: Any) -> Callable[[], Iterator[Any]]:
    left = iter(readings)

    def keys_of_a_table() -> Iterator[Any]:
        K = next(left)
        return iter([K[:1000], K[1000:]])

    return keys_of_a_table


@every_change
def test_a_function_that_returns_other_keys(change: Any) -> None:
    with pytest.raises(ValueError, match=r"K, the function .*keys_of_a_table, gave other keys.*rows 2048 to 4095"):
        levattn.universal_set(in_turn(K0, changed(change)), EPSILON)


@every_change
def test_the_reading_that_tells_ties_apart(change: Any) -> None:
    K = np.tile(np.eye(4, dtype=np.float32), (N // 4, 1))
    other = K.copy()
    change(other)
    assert levattn.universal_set(in_turn(*[K] * 4), size=5).indices.tolist() == [*range(5)]
    with pytest.raises(ValueError, match=r"other keys.*rows 2048 to 4095"):
        levattn.universal_set(in_turn(K, K, other, other), size=5)


def test_random_keys() -> None:
    rng = np.random.default_rng(0)

    class Random:
        def __iter__(self) -> Iterator[Any]:
            return iter([rng.standard_normal((700, 4)), rng.standard_normal((700, 4))])

    with pytest.raises(ValueError, match=r"K, an iterable of type Random, gave other keys.*rows 0 to"):
        levattn.universal_set(Random(), EPSILON)
    with pytest.raises(ValueError, match=r"K, the function .*lambda.*Turn off shuffling"):
        levattn.universal_set(lambda: [rng.permutation(K0)], EPSILON)


def test_what_comes_only_once() -> None:
    chunks = (part for part in [K0])
    with pytest.raises(ValueError, match="6500 rows in the first pass and 0 in the second"):
        levattn.universal_set(lambda: chunks, EPSILON)


# -- from one run to the next ---------------------------------------------------------------------

in_each_pass = pytest.mark.parametrize("rows", [3500, 10_500])


def left_at(rows: int, K: Any, checkpoint: Path) -> None:
    """Leave the checkpoint of a run that was killed after so many rows."""

    def call(done: int, _: int | None) -> None:
        if done >= rows:
            raise KilledError

    with pytest.raises(KilledError):
        levattn.scan_set(K, EPSILON, checkpoint=checkpoint, checkpoint_rows=700, progress=call)


@in_each_pass
@every_change
def test_other_keys_of_a_function_between_the_runs(tmp_path: Path, rows: int, change: Any) -> None:
    def given(K: Any) -> Callable[[], Iterator[Any]]:
        return lambda: (K[at : at + 700] for at in range(0, N, 700))

    left_at(rows, given(K0), tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"K has changed: rows 2048 to .* hold other keys"):
        levattn.scan_set(given(changed(change)), EPSILON, checkpoint=tmp_path / "checkpoint")
