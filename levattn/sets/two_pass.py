"""Exact scores of keys in chunks, in two passes: one sums their second moments, one scores them."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, is_torch
from levattn._core.caches import layers_of
from levattn._core.checks import whole_number
from levattn._core.progress import reported
from levattn._core.serialize import pack, shaped, unpack, whole
from levattn._kernels import Rows
from levattn.io import KeySource, replace_file
from levattn.linalg.factor import Factor
from levattn.linalg.reading import rows_named
from levattn.states import Moments
from levattn.states.block_buffer import in_main_memory

__all__ = ["Checkpoint", "Source", "as_source", "two_passes"]

_VERSION = 1
_CHECKPOINT_ROWS = 1 << 22

_FIRST_ROWS = 256  # in a fingerprint
_APART = 2048  # distance of the later rows in a fingerprint
_TOGETHER = 4 << 20  # bytes of small chunks that are joined
_MIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)  # of SplitMix64

Scores = npt.NDArray[Any]


@dataclass(frozen=True)
class Source:
    """Chunks of keys that can be read again and again."""

    chunks: Callable[[int], Iterable[Any]]  # gives the chunks from a row on
    n: int | None  # the number of rows, if known

    def between(self, start: int, *, together: bool = True) -> Iterator[tuple[Matrices, Rows]]:
        """Yield the chunks from the row `start` on; small ones `together`, in memory that is used again."""
        held = _Together()
        for chunk in self.chunks(start):
            matrices, rows = in_main_memory(chunk)
            if not held.fits(matrices):
                yield from held.given()
            if together and held.take(matrices):
                continue
            yield matrices, rows
        yield from held.given()

    def rows(self, item: int, which: npt.NDArray[np.int64], example: Matrices) -> Rows:
        """Read some rows of one matrix again, (1, k, d)."""
        parts, before = [np.empty((0, example.d), example.data.dtype)], 0
        for matrices, _ in self.between(0):
            inside = which[(which >= before) & (which < before + matrices.n)]
            parts.append(matrices.data[item, inside - before])
            before += matrices.n
        return Rows(np.concatenate(parts)[None], example.format)


class _Together:
    """Small chunks of one kind, copied into one because each call has a fixed cost."""

    def __init__(self) -> None:
        self._like: Matrices | None = None
        self._count, self._keys = 0, np.empty((0, 0, 0))

    def fits(self, keys: Matrices) -> bool:
        """Tell whether a chunk fits with the held ones, or none are held."""
        like = self._like
        if like is None:
            return True
        alike = isinstance(keys.data, np.ndarray) and (keys.batch, keys.d, keys.format, keys.data.dtype) == (
            like.batch,
            like.d,
            like.format,
            like.data.dtype,
        )
        return alike and self._count + keys.n <= self._keys.shape[1]

    def take(self, keys: Matrices) -> bool:
        """Copy a chunk that fits, unless it is large."""
        if self._like is None:
            row = math.prod((len(keys.data), keys.d)) * getattr(keys.data, "itemsize", 0)
            if not row or 2 * keys.n * row > _TOGETHER:
                return False
            self._like, shape = keys, (len(keys.data), _TOGETHER // row, keys.d)
            if self._keys.shape != shape or self._keys.dtype != keys.data.dtype:
                self._keys = np.empty(shape, keys.data.dtype)
        self._keys[:, self._count : self._count + keys.n] = keys.data
        self._count += keys.n
        return True

    def given(self) -> Iterator[tuple[Matrices, Rows]]:
        """Yield the held chunks as one, if there are any; its memory is used again."""
        if self._like is not None:
            keys = replace(self._like, data=self._keys[:, : self._count])
            self._like, self._count = None, 0
            yield keys, Rows(keys.data, keys.format)


def as_source(K: Any) -> Source | None:
    """Return the source of the chunks of K, None where K is an array; raise where K gives chunks only once."""
    if is_torch(K):  # a nested tensor cannot be asked for its shape
        return None
    if isinstance(K, KeySource):
        return Source(lambda start: K.between(start, K.n) if K.n else [K.load()], K.n)
    if type(K).__module__.startswith("dask."):
        raise TypeError(
            f"K is of type {type(K).__name__} of dask; expected an array or chunks here. For arrays on workers use "
            "levattn.distributed.dask.universal_set"
        )
    if (
        isinstance(K, list | tuple | str | bytes | dict | os.PathLike)
        or hasattr(K, "shape")
        or layers_of(K) is not None
    ):
        return None
    if isinstance(K, Iterator):
        raise TypeError(
            f"K is of type {type(K).__name__}, which gives its chunks only once; expected an object to iterate twice, "
            "or a function that returns an iterator. For one pass over a generator use StreamingUniversalSet"
        )
    if isinstance(K, Iterable):
        return Source(lambda start: _rows_from(K, start), None)
    return Source(lambda start: _rows_from(K(), start), None) if callable(K) else None


def _rows_from(chunks: Iterable[Any], start: int) -> Iterator[Any]:
    """Yield the chunks without the rows before `start`."""
    for chunk in chunks:
        if not start:
            yield chunk
            continue
        size = int(chunk.shape[-2])
        if size > start:
            yield chunk[..., start:, :]
        start = max(start - size, 0)


def _fingerprint(keys: Matrices, at: int, stop: int | None = None) -> int:
    """Return a checksum of a chunk that begins at the row `at`, up to the row `stop`.

    It covers the first rows and some later ones. The checksums of chunks add up to the checksum of the whole, modulo
    2^64.
    """
    end = at + keys.n if stop is None else min(at + keys.n, stop)
    later = range(-(-max(at, _FIRST_ROWS) // _APART) * _APART, end, _APART)
    rows = np.array([*range(at, min(end, _FIRST_ROWS)), *later], np.int64)
    if not len(rows):
        return 0
    part = np.ascontiguousarray(keys.data[:, rows - at].swapaxes(0, 1))
    words = part.reshape(len(rows), len(keys.data) * keys.d).view(np.uint16).astype(np.uint64)
    place = rows.astype(np.uint64)[:, None] * _MIX[0] ^ np.arange(words.shape[1], dtype=np.uint64) * _MIX[1]
    return int(np.sum(words * (place * _MIX[2] | np.uint64(1)), dtype=np.uint64))


@dataclass(frozen=True)
class Checkpoint:
    """The file in which the passes save their progress, how often, and for which job."""

    path: str | os.PathLike[str] | None  # of the file; None for no checkpoints
    every: int  # rows from one to the next
    job: dict[str, Any]  # options that must be the same when the passes resume

    @classmethod
    def checked(cls, path: Any, every: Any, job: dict[str, Any]) -> Checkpoint:
        """Return a checkpoint, or raise for options of the wrong kind."""
        if every is None:
            every = _CHECKPOINT_ROWS
        elif path is None:
            raise ValueError(f"checkpoint_rows is {every!r} without checkpoint; expected the path of a file as well")
        every = whole_number("checkpoint_rows", every, what="a whole number of rows")
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(f"checkpoint is of type {type(path).__name__}; expected the path of a file")
        return cls(path, every, job)

    def tidy(self) -> None:
        """Remove the temporary files of a run that was killed while it wrote."""
        if self.path is not None:
            target = Path(os.path.realpath(self.path))
            for half in target.parent.glob(f".{glob.escape(target.name)}.{'?' * 12}.tmp"):
                half.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the file when the work is done."""
        if self.path is not None:
            Path(self.path).unlink(missing_ok=True)


@dataclass(frozen=True)
class Passes:
    """The result of two passes over the keys."""

    factor: Factor  # of all keys
    scores: Scores  # (b, n)
    counted: npt.NDArray[np.bool_]  # (b,) whether a row counts as 1
    chosen: npt.NDArray[np.bool_]  # (b, n) what `choose` returned
    example: Matrices  # a chunk, for the batch, the format and the kind of array


def two_passes(
    source: Source,
    choose: Callable[[Factor, Matrices, Scores], tuple[npt.NDArray[np.bool_], bool]],
    progress: Any,
    checkpoint: Checkpoint,
    *,
    single: bool = True,
) -> Passes:
    """Score the keys of a source among all of them; `choose` gets each chunk with its scores.

    `single` allows scores in float32. The caller removes the checkpoint.
    """
    run = _Run(source, choose, checkpoint, single)
    with reported(progress, None if source.n is None else 2 * source.n) as advance:
        advance(run.resume())
        for rows in run.first_pass():
            advance(rows)
        for rows in run.second_pass():
            advance(rows)
    return run.finish()


class _Run:
    """Two passes in progress."""

    def __init__(self, source: Source, choose: Any, checkpoint: Checkpoint, single: bool) -> None:
        self._source, self._choose, self._checkpoint, self._single = source, choose, checkpoint, single
        self._moments: Moments | None = None
        self._factor: Factor | None = None
        self._n: int | None = None  # known after the first pass
        self._done = 0  # rows of the present pass
        self._written = 0  # of these, at the last checkpoint
        self._example: Matrices | None = None
        self._scores: Scores = np.zeros((1, 0))  # in the second pass with room for all rows
        self._chosen: npt.NDArray[np.bool_] = np.zeros((1, 0), np.bool_)
        self._counted: npt.NDArray[np.bool_] = np.zeros(1, np.bool_)
        self._seen = [0, 0, 0]  # fingerprints: of the first rows, of the first and of the second pass

    def resume(self) -> int:
        """Resume from a checkpoint if there is one; return the number of rows that need not be read again."""
        if self._checkpoint.path is None:
            return 0
        self._checkpoint.tidy()
        path = Path(self._checkpoint.path)
        if not path.exists():
            return 0
        try:
            fields, arrays = unpack(path.read_bytes(), "TwoPasses", _VERSION)
            self._n, self._done = None if fields["n"] is None else whole(fields["n"]), whole(fields["done"])
            self._seen, kind = [whole(figure) for figure in fields["seen"]], fields["kind"]
            if fields["job"] != self._checkpoint.job:
                raise ValueError("it is of another run")
            self._moments = Moments.from_parts(fields["moments"], arrays)
            if self._n is not None:
                shape = (math.prod(self._moments.batch), self._done)
                self._scores = shaped(arrays["scores"], arrays["scores"].dtype, shape, finite=False)
                self._chosen = shaped(arrays["chosen"], np.bool_, shape)
                self._counted = shaped(arrays["counted"], np.bool_, shape[:1])
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"checkpoint {path} cannot be resumed: {error}. Name another file, or remove it to begin anew"
            ) from error
        if not self._begins_alike(kind):
            raise ValueError(
                f"checkpoint {path} is of other keys than K, or K has changed; expected the same keys. Name another "
                "file, or remove it to begin anew"
            )
        self._written = self._done
        return self._done + (self._n or 0)

    def _begins_alike(self, kind: str) -> bool:
        """Tell whether the first rows of the source, and its number of rows, match the checkpoint."""
        n, known, at, seen = self._source.n, self._n, 0, 0
        stop = min(_FIRST_ROWS, self._done if known is None else known)
        if n is not None and (n < self._done if known is None else n != known):
            return False
        for keys, _ in self._source.between(0, together=False):
            self._example = self._example or keys
            seen += _fingerprint(keys, at, stop)
            at += keys.n
            if at >= stop:
                break
        return self._kind == kind and seen % 2**64 == self._seen[0]

    @property
    def _kind(self) -> str:
        """The kind of the keys, in words."""
        like = self._example
        return "" if like is None else f"{like.format} keys of batch {like.batch} and d = {like.d}"

    def _count(self, keys: Matrices) -> None:
        """Count a chunk as done."""
        second = 1 + (self._n is not None)
        self._seen[second] = (self._seen[second] + _fingerprint(keys, self._done)) % 2**64
        if second == 1 and self._done < _FIRST_ROWS:
            self._seen[0] = (self._seen[0] + _fingerprint(keys, self._done, _FIRST_ROWS)) % 2**64
        self._example = self._example or keys
        self._done += keys.n
        self._write_if_due()

    def first_pass(self) -> Iterator[int]:
        """Sum the second moments of the remaining rows, and yield their numbers."""
        if self._n is not None:
            return
        for matrices, rows in self._source.between(self._done, together=self._checkpoint.path is None):
            if self._moments is None:
                self._moments = Moments(matrices.d, matrices.batch)
            with rows_named("the keys"):
                self._moments.add(matrices, rows)
            self._count(matrices)
            yield matrices.n
        if self._moments is None:
            raise ValueError("K gave no chunk of keys; expected at least one, if only with 0 rows")
        self._n, self._done, self._written = self._done, 0, 0

    def _make_room(self, n: int, none: Scores) -> None:
        """Make room for the scores of `n` rows, of the kind of `none`, and keep the scores so far."""
        scores, chosen = np.empty((len(none), n), none.dtype), np.empty((len(none), n), np.bool_)
        scores[:, : self._done], chosen[:, : self._done] = self._scores, self._chosen
        self._scores, self._chosen = scores, chosen

    def second_pass(self) -> Iterator[int]:
        """Score the remaining rows, and yield their numbers."""
        if self._moments is None or self._n is None:
            raise AssertionError("the second pass comes after the first")
        factor = self._moments.factor()
        factor = self._factor = factor if self._single else factor.exactly()
        self._make_room(self._n, factor.scores()[0])
        for matrices, rows in self._source.between(self._done, together=self._checkpoint.path is None):
            self._require_alike(matrices)
            part = slice(self._done, self._done + matrices.n)
            if part.stop > self._n:
                raise ValueError(self._other_number(f"at least {part.stop}"))
            scores, counted = factor.on(rows).scores()
            self._chosen[:, part], doubt = self._choose(factor, matrices, scores)
            self._scores[:, part], self._counted = scores, self._counted | counted | doubt
            self._count(matrices)
            yield matrices.n

    def _require_alike(self, keys: Matrices) -> None:
        """Raise for a chunk of the second pass that cannot belong to the keys of the first."""
        like = self._example
        if like is not None and (keys.batch, keys.d, keys.format) != (like.batch, like.d, like.format):
            raise ValueError(
                f"K gave {self._kind} in the first pass, and {keys.format} ones of batch {keys.batch} and d = "
                f"{keys.d} in the second; expected the same keys each time"
            )

    def _other_number(self, second: str) -> str:
        return (
            f"K gave {self._n} rows in the first pass and {second} in the second; expected the same keys each time it "
            "is read"
        )

    def finish(self) -> Passes:
        """Return the results, or raise if the passes read different keys."""
        if self._done != self._n:
            raise ValueError(self._other_number(f"{self._done}"))
        if self._seen[1] != self._seen[2]:
            raise ValueError(
                "K gave other keys, or in another order, in the second pass than in the first; expected the same keys "
                "each time it is read. Turn off shuffling"
            )
        if self._factor is None or self._example is None:
            raise AssertionError("there was no pass")
        return Passes(self._factor, self._scores, self._counted, self._chosen, self._example)

    def _write_if_due(self) -> None:
        due = self._done - self._written >= self._checkpoint.every
        if self._checkpoint.path is None or self._moments is None or not due:
            return
        self._written = self._done
        moments, arrays = self._moments.parts()
        fields: dict[str, Any] = {"job": self._checkpoint.job, "n": self._n, "done": self._done, "seen": self._seen}
        fields |= {"kind": self._kind, "moments": moments}
        if self._n is not None:
            arrays |= {"scores": self._scores[:, : self._done], "chosen": self._chosen[:, : self._done]}
            arrays |= {"counted": self._counted}
        with replace_file(self._checkpoint.path) as stream:
            stream.write(pack("TwoPasses", _VERSION, fields, arrays))
