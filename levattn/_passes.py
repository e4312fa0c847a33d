"""Exact scores of keys that are read in chunks, in two passes: one sums their second moments, one scores them."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._array import Matrices
from levattn._bytes import pack, shaped, unpack, whole
from levattn._kernels import Rows
from levattn._progress import reported
from levattn._tail import in_main_memory
from levattn.io import KeySource, replace_file
from levattn.linalg import Factor
from levattn.states import Moments

__all__ = ["Checkpoint", "Source", "as_source", "two_passes"]

_VERSION = 1
_CHECKPOINT_ROWS = 1 << 22

_FIRST_ROWS = 256  # by which a source is known again

Scores = npt.NDArray[Any]


@dataclass(frozen=True)
class Source:
    """Chunks of keys that can be read again and again.

    chunks: returns an iterable of them, from the first row or a later one.
    n: the number of rows where it is known.
    """

    chunks: Callable[[int], Iterable[Any]]
    n: int | None

    def between(self, start: int) -> Iterator[tuple[Matrices, Rows]]:
        """Give the chunks from the row `start` on."""
        for chunk in self.chunks(start):
            yield in_main_memory(chunk)

    def digest(self) -> str:
        """Return a digest of the first rows, however they are cut into chunks."""
        digest, seen, kind = hashlib.blake2b(digest_size=16), 0, ""
        for matrices, rows in self.between(0):
            kind = f"{matrices.format} {matrices.batch} {matrices.d}"
            first = np.ascontiguousarray(rows.between(0, _FIRST_ROWS - seen).keys.transpose(1, 0, 2))
            digest.update(first.tobytes())
            seen += len(first)
            if seen == _FIRST_ROWS:
                break
        return f"{kind} {digest.hexdigest()}"

    def rows(self, item: int, which: npt.NDArray[np.int64], example: Matrices) -> Rows:
        """Read some rows of one matrix once more, (1, k, d)."""
        parts, before = [np.empty((0, example.d), example.data.dtype)], 0
        for matrices, _ in self.between(0):
            inside = which[(which >= before) & (which < before + matrices.n)]
            parts.append(matrices.data[item, inside - before])
            before += matrices.n
        return Rows(np.concatenate(parts)[None], example.format)


def as_source(K: Any) -> Source | None:
    """Return what gives the chunks of K, None where K is an array; raise where it gives them only once."""
    if isinstance(K, KeySource):
        return Source(lambda start: K.between(start, K.n), K.n)
    if type(K).__module__.startswith("dask."):
        raise TypeError(
            f"K is of type {type(K).__name__} of dask; expected an array or chunks here. For arrays on workers use "
            "levattn.distributed.dask.universal_set"
        )
    if isinstance(K, list | tuple | str | bytes | dict) or hasattr(K, "shape"):
        return None
    if isinstance(K, Iterator):
        raise TypeError(
            f"K is of type {type(K).__name__}, whose chunks can be read only once, and this takes two passes; "
            "expected an object that can be iterated again, or a function that returns an iterator. For one pass over "
            "a generator use StreamingUniversalSet"
        )
    if isinstance(K, Iterable):
        return Source(lambda start: _rows_from(K, start), None)
    return Source(lambda start: _rows_from(K(), start), None) if callable(K) else None


def _rows_from(chunks: Iterable[Any], start: int) -> Iterator[Any]:
    """Give the chunks without the rows before `start`."""
    for chunk in chunks:
        size = int(chunk.shape[-2])
        if size > start or not start:
            yield chunk[..., start:, :] if start else chunk
        start = max(start - size, 0)


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often the passes write down how far they came, and for what job.

    path: the file; None for no checkpoints.
    every: rows from one to the next.
    job: what must be the same when the passes go on from it.
    """

    path: str | os.PathLike[str] | None
    every: int
    job: dict[str, Any]

    @classmethod
    def checked(cls, path: Any, every: Any, job: dict[str, Any]) -> Checkpoint:
        """Return a checkpoint, or raise for options of the wrong kind."""
        if every is None:
            every = _CHECKPOINT_ROWS
        elif path is None:
            raise ValueError(f"checkpoint_rows is {every!r} without checkpoint; expected the path of a file as well")
        if isinstance(every, bool) or not isinstance(every, int | np.integer):
            raise TypeError(f"checkpoint_rows is {every!r}; expected a whole number of rows")
        if every < 1:
            raise ValueError(f"checkpoint_rows is {every}; expected at least 1")
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(f"checkpoint is of type {type(path).__name__}; expected the path of a file")
        return cls(path, int(every), job)


@dataclass(frozen=True)
class Passes:
    """What two passes over the keys found.

    factor: of all keys.
    scores: (b, n).
    counted: (b,) whether a row counts as 1.
    chosen: (b, n) what `choose` returned.
    example: a chunk, which tells the batch, the format and the kind of array.
    """

    factor: Factor
    scores: Scores
    counted: npt.NDArray[np.bool_]
    chosen: npt.NDArray[np.bool_]
    example: Matrices


def two_passes(
    source: Source,
    choose: Callable[[Factor, Matrices, Scores], npt.NDArray[np.bool_]],
    progress: Any,
    checkpoint: Checkpoint,
) -> Passes:
    """Score the keys of a source by all of them; `choose` looks at each chunk with its scores."""
    run = _Run(source, choose, checkpoint)
    with reported(progress, None if source.n is None else 2 * source.n) as advance:
        advance(run.resume())
        for rows in run.first_pass():
            advance(rows)
        for rows in run.second_pass():
            advance(rows)
    return run.finish()


class _Run:
    """Two passes under way."""

    def __init__(self, source: Source, choose: Any, checkpoint: Checkpoint) -> None:
        self._source, self._choose, self._checkpoint = source, choose, checkpoint
        self._moments: Moments | None = None
        self._factor: Factor | None = None
        self._n: int | None = None  # known after the first pass
        self._done = 0  # rows of the present pass
        self._written = 0  # of these, at the last checkpoint
        self._example: Matrices | None = None
        self._scores: list[Scores] = []
        self._chosen: list[npt.NDArray[np.bool_]] = []
        self._counted: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._digest = ""

    def resume(self) -> int:
        """Go on from a checkpoint if there is one; return the number of rows that need not be read again."""
        if self._checkpoint.path is None:
            return 0
        self._digest = self._source.digest()
        path = Path(self._checkpoint.path)
        if not path.exists():
            return 0
        try:
            fields, arrays = unpack(path.read_bytes(), "TwoPasses", _VERSION)
            if fields["job"] != self._job:
                raise ValueError("it is of another run, or the keys have changed")
            self._moments = Moments.from_parts(fields["moments"], arrays)
            self._n, self._done = fields["n"], whole(fields["done"])
            if self._n is not None:
                shape = (math.prod(self._moments.batch), self._done)
                self._scores = [shaped(arrays["scores"], arrays["scores"].dtype, shape, finite=False)]
                self._chosen = [shaped(arrays["chosen"], np.bool_, shape)]
                self._counted = shaped(arrays["counted"], np.bool_, shape[:1])
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"checkpoint {path} cannot be gone on from: {error}. Name another file, or remove it to begin anew"
            ) from error
        self._written = self._done
        return self._done + (self._n or 0)

    @property
    def _job(self) -> dict[str, Any]:
        return self._checkpoint.job | {"first": self._digest}

    def first_pass(self) -> Iterator[int]:
        """Sum up the second moments of the rows that are left, and give their numbers."""
        if self._n is not None:
            return
        for matrices, rows in self._source.between(self._done):
            if self._moments is None:
                self._moments = Moments(matrices.d, matrices.batch)
            self._moments.add(matrices, rows)
            self._example = self._example or matrices
            self._done += matrices.n
            self._write_if_due()
            yield matrices.n
        if self._moments is None:
            raise ValueError("K gave no chunk of keys; expected at least one, if only with 0 rows")
        self._n, self._done, self._written = self._done, 0, 0

    def second_pass(self) -> Iterator[int]:
        """Score the rows that are left, and give their numbers."""
        if self._moments is None:
            raise AssertionError("the second pass comes after the first")
        factor = self._factor = self._moments.factor()
        for matrices, rows in self._source.between(self._done):
            scores, counted = factor.on(rows).scores()
            self._scores.append(scores)
            self._chosen.append(self._choose(factor, matrices, scores))
            self._counted = self._counted | counted if len(self._counted) else counted
            self._example = self._example or matrices
            self._done += matrices.n
            self._write_if_due()
            yield matrices.n

    def finish(self) -> Passes:
        """Return what was found, and remove the checkpoint."""
        if self._done != self._n:
            raise ValueError(
                f"K gave {self._n} rows in the first pass and {self._done} in the second; expected the same keys each "
                "time it is read"
            )
        if self._factor is None or self._example is None:
            raise AssertionError("there was no pass")
        if self._checkpoint.path is not None:
            Path(self._checkpoint.path).unlink(missing_ok=True)
        scores, chosen = (np.concatenate(parts, axis=1) for parts in (self._scores, self._chosen))
        return Passes(self._factor, scores, self._counted, chosen, self._example)

    def _write_if_due(self) -> None:
        due = self._done - self._written >= self._checkpoint.every
        if self._checkpoint.path is None or self._moments is None or not due:
            return
        self._written = self._done
        moments, arrays = self._moments.parts()
        fields = {"job": self._job, "n": self._n, "done": self._done, "moments": moments}
        if self._scores:
            self._scores = [np.concatenate(self._scores, axis=1)]
            self._chosen = [np.concatenate(self._chosen, axis=1)]
            arrays |= {"scores": self._scores[0], "chosen": self._chosen[0], "counted": self._counted}
        with replace_file(self._checkpoint.path) as stream:
            stream.write(pack("TwoPasses", _VERSION, fields, arrays))
