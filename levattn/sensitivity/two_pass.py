"""Exact scores of keys in chunks, in two passes with checkpoints: one sums second moments, one scores the keys."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, is_torch, layers_of
from levattn._core.checks import check_nonnegative, whole_number
from levattn._core.files import checked_target, remove_halves
from levattn._core.serialize import pack, shaped, unpack, whole
from levattn._core.threads import reported
from levattn._kernels import Rows
from levattn.exceptions import KeyFileError
from levattn.io import KeySource, replace_file
from levattn.io.source import record_of
from levattn.linalg.factor import Factor
from levattn.linalg.reading import RowDigest, rows_named
from levattn.linalg.weighted import chunk_times_roots, exact_products, numbers_of
from levattn.states import Moments
from levattn.states.blocks import in_main_memory

_CHECKPOINT_ROWS = 1 << 22


@dataclass(frozen=True)
class Checkpoint:
    """The file in which the passes save their progress, how often, and for which job."""

    path: Path | None  # of the file, links followed; None for no checkpoints
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
        # written to at once, else a long pass would end where it first writes
        return cls(None if path is None else checked_target(path, "checkpoint", write=True), every, job)

    def tidy(self) -> None:
        """Remove the temporary files of a run that was killed while it wrote."""
        if self.path is not None:
            remove_halves(self.path)

    def remove(self) -> None:
        """Remove the file when the work is done."""
        if self.path is not None:
            with suppress(OSError):  # the work is done
                self.path.unlink()


_VERSION = 3

_SURE = 16  # estimated errors of the scores by which their sum may differ from the rank
_REMEDY = "Turn off shuffling, and copy keys that others write to"
_TOGETHER = 4 << 20  # bytes of small chunks that are joined

Scores = npt.NDArray[Any]


@dataclass(frozen=True)
class Source:
    """Chunks of keys that can be read again and again."""

    chunks: Callable[[int], Iterable[Any]]  # gives the chunks from a row on
    n: int | None  # the number of rows, if known
    name: str  # in errors
    files: KeySource | None = None  # what gives the chunks, if they are in files
    weights: npt.NDArray[Any] | None = None  # (..., n or 1): keys come times the roots of these

    @property
    def sparse(self) -> bool:
        """Whether the keys are sparse matrices in files, which are better read whole."""
        return self.files is not None and self.files.sparse

    def record(self, *, wait: bool = False) -> list[Any] | None:
        """Return the record of the files, None where there is none; `wait` for files that are new."""
        return None if self.files is None else record_of(self.files, wait=wait)

    def refused(self, problem: str) -> ValueError:
        """Return the error of keys that are not the same each time."""
        kind = ValueError if self.files is None else KeyFileError
        return kind(f"K, {self.name}, {problem}")

    def between(self, start: int, *, together: bool = True) -> Iterator[tuple[Matrices, Rows]]:
        """Yield the chunks from the row `start` on; small ones `together`, in memory that is used again."""
        held = _Together()
        for matrices, rows in self._weighted(start):
            if not held.fits(matrices):
                yield from held.given()
            if together and held.take(matrices):
                continue
            yield matrices, rows
        yield from held.given()

    def _weighted(self, start: int) -> Iterator[tuple[Matrices, Rows]]:
        """Yield the chunks from a row on, with weights times their roots."""
        stop = start
        for chunk in self.chunks(start):
            matrices, rows = in_main_memory(chunk)
            start, stop = stop, stop + matrices.n
            if self.weights is None:
                yield matrices, rows
            elif self.weights.shape[-1] == 1:
                yield chunk_times_roots(matrices, rows, self.weights)[:2]
            elif stop > self.weights.shape[-1]:
                raise self._other_length(f"at least {stop}")
            else:
                yield chunk_times_roots(matrices, rows, self.weights[..., start:stop])[:2]
        if self.weights is not None and self.weights.shape[-1] not in (1, stop):
            raise self._other_length(str(stop))

    def _other_length(self, rows: str) -> ValueError:
        """Return the error of weights of another number of rows."""
        return ValueError(
            f"weights has shape {() if self.weights is None else self.weights.shape}, and K gives {rows} rows; "
            "expected one weight for each row"
        )

    def times_roots(self, weights: Any) -> Source:
        """Return the source of the keys times the roots of weights, or raise; with None the same."""
        if weights is None:
            return self
        found = np.atleast_1d(numbers_of(weights))
        check_nonnegative("weights", found)
        source = replace(self, weights=found)
        if self.n is not None and found.shape[-1] not in (1, self.n):
            raise source._other_length(str(self.n))
        return source

    @property
    def rounded(self) -> bool:
        """Whether the products of keys with the roots of their weights are inexact."""
        return self.weights is not None and not exact_products(np.sqrt(self.weights))

    @property
    def job(self) -> dict[str, Any]:
        """The part of a checkpoint's job that tells the weights."""
        if self.weights is None:
            return {}
        digest = hashlib.sha256(np.ascontiguousarray(self.weights, np.float64).tobytes()).hexdigest()
        return {"weights": [list(self.weights.shape), digest]}

    def present(self, batch: tuple[int, ...], n: int) -> npt.NDArray[np.bool_] | None:
        """Return flags (b, n) of the keys of positive weight, None if all keys are."""
        if self.weights is None or (self.weights > 0).all():
            return None
        return np.broadcast_to(self.weights > 0, (*batch, n)).reshape(-1, n)


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


def as_source(K: Any, name: str = "K") -> Source | None:
    """Return the source of the chunks of K, None where K is an array; raise where K gives chunks only once.

    `name`: of the argument, in errors.
    """
    if is_torch(K):  # a nested tensor cannot be asked for its shape
        return None
    if isinstance(K, KeySource):
        return Source(lambda start: K.between(start, K.n) if K.n else [K.load()], K.n, _named(K), K)
    if type(K).__module__.startswith("dask."):
        raise TypeError(
            f"{name} is of type {type(K).__name__} of dask; expected an array or chunks here. For arrays on workers "
            "use levattn.distributed.dask.leverage_scores, or its universal_set or sample_rows"
        )
    if (
        isinstance(K, list | tuple | str | bytes | dict | os.PathLike)
        or hasattr(K, "shape")
        or hasattr(K, "to_pylist")  # a column of pyarrow is no chunks
        or layers_of(K) is not None
    ):
        return None
    if isinstance(K, Iterator):
        raise TypeError(
            f"{name} is of type {type(K).__name__}, which gives its chunks only once; expected an object to iterate "
            "twice, or a function that returns an iterator. For one pass over a generator use StreamingUniversalSet, "
            "or StreamingRowSample for a sample"
        )
    if isinstance(K, Iterable):
        return Source(lambda start: _rows_from(K, start), None, f"an iterable of type {type(K).__name__}")
    if not callable(K):
        return None
    return Source(lambda start: _rows_from(_returned(K, name), start), None, f"the function {_function_name(K)}")


def _returned(K: Callable[[], Any], name: str) -> Iterable[Any]:
    """Return the chunks that a function gives, or raise if it gives something else, as one array."""
    found = K()
    array = is_torch(found) or any(hasattr(found, name) for name in ("__array__", "__dlpack__", "tocsr"))
    if not array and not isinstance(found, str | bytes | dict | os.PathLike):
        with suppress(TypeError):
            chunks: Iterator[Any] = iter(found)
            return chunks
    remedy = "Give an array itself, not a function of it" if array else "A function that yields chunks returns one"
    raise TypeError(
        f"{name}, the function {_function_name(K)}, returned {type(found).__name__}; expected an iterator of chunks, "
        f"e.g. iter([K[:1000], K[1000:]]). {remedy}"
    )


def _named(files: KeySource) -> str:
    """Return the files in words."""
    if isinstance(files.path, tuple):
        return f"{files.path[0]} and {len(files.path) - 1} more" if len(files.path) > 1 else str(files.path[0])
    return str(files.path)


def _function_name(K: Any) -> str:
    """Return the name of a function of chunks."""
    return str(getattr(K, "__qualname__", type(K).__name__))


def _rows_from(chunks: Iterable[Any], start: int) -> Iterator[Any]:
    """Yield the chunks without the rows before `start`."""
    for chunk in chunks:
        if isinstance(chunk, list | tuple) and chunk and len(getattr(chunk[0], "shape", ())) > 1:
            raise TypeError(
                f"a chunk is a {type(chunk).__name__} of arrays; expected an array (..., n, d). Data "
                "loaders give such groups: give the keys of each, e.g. lambda: (keys for keys, *_ in loader)"
            )
        if not start:
            yield chunk
            continue
        size = int(chunk.shape[-2])
        if size > start:
            yield chunk[..., start:, :]
        start = max(start - size, 0)


_Choose = Callable[[Factor, Matrices, Scores], tuple[npt.NDArray[np.bool_], bool]]


@dataclass(frozen=True)
class Passes:
    """The result of two passes over the keys."""

    factor: Factor  # of all keys
    scores: Scores  # (b, n)
    counted: npt.NDArray[np.bool_]  # (b,) whether a row counts as 1
    chosen: npt.NDArray[np.bool_]  # (b, n) what `choose` returned
    example: Matrices  # a chunk, for the batch, the format and the kind of array
    rows: Callable[[int, npt.NDArray[np.int64]], Rows]  # reads some rows of one matrix again, (1, k, d)


def two_passes(
    source: Source,
    choose: _Choose | None,
    progress: Any,
    checkpoint: Checkpoint,
    *,
    single: bool = True,
    numerical: bool = False,
    as_float64: bool = False,
) -> Passes:
    """Score the keys of a source among all of them; `choose`, if given, gets each chunk with its scores.

    `single` allows scores in float32, and `numerical` and `as_float64` are options of `Factor.scores`. The caller
    removes the checkpoint.
    """
    run = _Run(source, choose, checkpoint, single, {"numerical": numerical, "as_float64": as_float64})
    with reported(progress, None if source.n is None else 2 * source.n) as advance:
        advance(run.resume())
        for rows in run.first_pass():
            advance(rows)
        for rows in run.second_pass():
            advance(rows)
    return run.finish()


class _Run:
    """Two passes in progress.

    Each reading must give the same keys. The record of the files tells whether it does, if they have one. It must be
    the same at the end, and in a run that resumes. Else a digest of all rows tells, and the rows that an earlier run
    did are read again. With a checkpoint there always is a digest, because the next run may find the files elsewhere.
    """

    def __init__(
        self, source: Source, choose: _Choose | None, checkpoint: Checkpoint, single: bool, options: dict[str, bool]
    ) -> None:
        self._source, self._choose, self._checkpoint = source, choose, checkpoint
        self._single, self._options = single, options
        self._moments: Moments | None = None
        self._factor: Factor | None = None
        self._n: int | None = None  # known after the first pass
        self._done = 0  # rows of the present pass
        self._written = 0  # of these, at the last checkpoint
        self._example: Matrices | None = None
        self._scores: Scores = np.zeros((1, 0))  # in the second pass with room for all rows
        self._chosen: npt.NDArray[np.bool_] = np.zeros((1, 0), np.bool_)
        self._counted: npt.NDArray[np.bool_] = np.zeros(1, np.bool_)
        self._record = source.record(wait=checkpoint.path is not None)
        self._seen: tuple[RowDigest, ...] = (RowDigest(), RowDigest())  # of the first and of the second pass
        self._digests = self._record is None or checkpoint.path is not None
        self._kind_before: str | None = None  # of the keys of an earlier run whose rows are to be read again

    def resume(self) -> int:
        """Resume from a checkpoint if there is one; return the number of rows that need not be worked on again."""
        if self._checkpoint.path is None:
            return 0
        self._checkpoint.tidy()
        path = self._checkpoint.path
        if not path.exists():
            return 0
        try:
            fields, arrays = unpack(path.read_bytes(), "TwoPasses", _VERSION, "it", "the progress of two passes")
            self._n, self._done = None if fields["n"] is None else whole(fields["n"]), whole(fields["done"])
            kind, record = fields["kind"], fields["record"]
            if fields["job"] != self._checkpoint.job:
                raise ValueError("it is of another run")
            self._moments = Moments.from_parts(fields["moments"], arrays)
            batch = self._moments.batch
            if self._n is None:
                self._seen = RowDigest.restored(arrays, "first", self._done, batch), RowDigest()
            else:
                pairs = ("first", self._n), ("second", self._done)
                self._seen = tuple(RowDigest.restored(arrays, name, rows, batch) for name, rows in pairs)
                shape = (math.prod(batch), self._done)
                self._scores = shaped(arrays["scores"], arrays["scores"].dtype, shape, finite=False)
                self._chosen = shaped(arrays["chosen"], np.bool_, shape)
                self._counted = shaped(arrays["counted"], np.bool_, shape[:1])
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"checkpoint {path} cannot be resumed: {error}. Name another file, or remove it to begin anew"
            ) from error
        n = self._source.n
        if n is not None and (n < self._done if self._n is None else n != self._n):
            raise self._other_keys(f"there are {n} rows")
        if record is None or record != self._record:
            self._kind_before = kind
        elif self._example is None:
            self._example = next((keys for keys, _ in self._source.between(0, together=False)), None)
        self._written = self._done
        return self._done + (self._n or 0)

    def _other_keys(self, found: str) -> ValueError:
        """Return the error of a checkpoint of other keys."""
        return ValueError(
            f"checkpoint {self._checkpoint.path} is of other keys than K, or K has changed: {found}; expected the "
            "same keys. Name another file, or remove it to begin anew"
        )

    def _rest(self) -> Iterator[tuple[Matrices, Rows]]:
        """Yield the rows that the present pass lacks; compare the rows of an earlier run first, if necessary."""
        before, done = self._kind_before, self._done
        self._kind_before, again = None, RowDigest()
        start, together = (done if before is None else 0), self._checkpoint.path is None
        for matrices, rows in self._source.between(start, together=together):
            known = 0 if before is None else min(matrices.n, done - again.rows)
            if not known:
                yield matrices, rows
                continue
            self._example = self._example or matrices
            if _kind_of(matrices) != before:
                raise self._other_keys(f"they are {_kind_of(matrices)}, and were {before}")
            again.add(rows.between(0, known))
            if again.rows == done:
                self._require_known(again)
            if known < matrices.n:
                yield replace(matrices, data=matrices.data[:, known:]), rows.between(known, matrices.n)
        if before is not None and again.rows < done:
            raise self._other_keys(f"there are {again.rows} rows")

    def _require_known(self, again: RowDigest) -> None:
        """Raise if the rows that an earlier run did are other rows now."""
        unlike = again.difference(self._seen[self._n is not None], whole=True)
        if unlike is not None:
            raise self._other_keys(f"rows {unlike[0]} to {unlike[1]} hold other keys, or in another order")

    def _count(self, keys: Matrices, rows: Rows) -> None:
        """Count a chunk as done, with the rows that kernels have read."""
        if self._digests:
            self._seen[self._n is not None].add(rows)
            self._require_same(self._seen[self._n is not None], self._done)
        self._example = self._example or keys
        self._done += keys.n
        self._write_if_due()

    def _require_same(self, seen: RowDigest, start: int = 0, *, whole: bool = False) -> None:
        """Raise if rows from a row on are not as they were in the first pass."""
        unlike = seen.difference(self._seen[0], start, whole=whole)
        if unlike is not None:
            raise self._source.refused(
                f"gave other keys, or in another order, in the second pass, in rows {unlike[0]} to {unlike[1]}; "
                f"expected the same keys each time. {_REMEDY}"
            )

    def first_pass(self) -> Iterator[int]:
        """Sum the second moments of the remaining rows, and yield their numbers."""
        if self._n is not None:
            return
        for matrices, rows in self._rest():
            if self._moments is None:
                self._moments = Moments(matrices.d, matrices.batch)
            rows = self._seen[0].watched(rows) if self._digests else rows
            with rows_named("the keys"):
                self._moments.add(matrices, rows, rounded=self._source.rounded)
            self._count(matrices, rows)
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
        self._make_room(self._n, factor.scores(**self._options)[0])
        for matrices, rows in self._rest():
            self._require_alike(matrices)
            part = slice(self._done, self._done + matrices.n)
            if part.stop > self._n:
                raise self._other_number(f"at least {part.stop}")
            rows = self._seen[1].watched(rows) if self._digests else rows
            scores, counted = factor.on(rows).scores(**self._options)
            chosen, doubt = (False, False) if self._choose is None else self._choose(factor, matrices, scores)
            self._chosen[:, part] = chosen
            self._scores[:, part], self._counted = scores, self._counted | counted | doubt
            self._count(matrices, rows)
            yield matrices.n

    def _require_alike(self, keys: Matrices) -> None:
        """Raise for a chunk of the second pass that cannot belong to the keys of the first."""
        like = self._example
        if like is not None and (keys.batch, keys.d, keys.format) != (like.batch, like.d, like.format):
            raise self._source.refused(
                f"gave {_kind_of(like)} in the first pass, and {keys.format} ones of batch {keys.batch} and d = "
                f"{keys.d} in the second; expected the same keys each time"
            )

    def _other_number(self, second: str) -> ValueError:
        return self._source.refused(
            f"gave {self._n} rows in the first pass and {second} in the second; expected the same keys each time it "
            "is read"
        )

    def finish(self) -> Passes:
        """Return the results, or raise if the passes read different keys."""
        if self._done != self._n:
            raise self._other_number(f"{self._done}")
        if self._factor is None or self._example is None:
            raise AssertionError("there was no pass")
        self._require_end(self._seen[1])
        self._require_rank(self._factor)
        return Passes(self._factor, self._scores, self._counted, self._chosen, self._example, self._rows)

    def _require_end(self, seen: RowDigest) -> None:
        """Raise if a reading that came to its end differs from the first pass."""
        if self._digests:
            self._require_same(seen, whole=True)
        elif self._source.record() != self._record:
            raise self._source.refused(
                "was changed, moved or linked while it was read; expected the same file from the first pass to the "
                "end. Call again, on a copy if others still write to it"
            )

    def _require_rank(self, factor: Factor) -> None:
        """Raise if the scores do not add up to the rank, as they do for the keys of the first pass alone."""
        sums, ranks = self._scores.sum(axis=1, dtype=np.float64), factor.rank
        near = np.abs(sums - ranks) <= _SURE * factor.score_error * np.maximum(ranks, 1)
        for item in np.flatnonzero(~near & ~self._counted & np.isfinite(factor.score_error)):
            raise self._source.refused(
                f"gave other keys in the second pass: scores add up to {sums[item]:.6g}, not to the rank "
                f"{ranks[item]}; expected the same keys each time. {_REMEDY}"
            )

    def _rows(self, item: int, which: npt.NDArray[np.int64]) -> Rows:
        """Read some rows of one matrix again, (1, k, d)."""
        if self._example is None:
            raise AssertionError("there was no pass")
        like, seen = self._example, RowDigest()
        parts, before = [np.empty((0, like.d), like.data.dtype)], 0
        for matrices, rows in self._source.between(0):
            self._require_alike(matrices)
            if self._digests:
                seen.add(rows)
            inside = which[(which >= before) & (which < before + matrices.n)]
            parts.append(matrices.data[item, inside - before])
            before += matrices.n
        if before != self._n:
            raise self._other_number(f"{before}")
        self._require_end(seen)
        return Rows(np.concatenate(parts)[None], like.format)

    def _write_if_due(self) -> None:
        due = self._done - self._written >= self._checkpoint.every
        if self._checkpoint.path is None or self._moments is None or self._example is None or not due:
            return
        self._written = self._done
        moments, arrays = self._moments.parts()
        fields: dict[str, Any] = {"job": self._checkpoint.job, "n": self._n, "done": self._done}
        fields |= {"kind": _kind_of(self._example), "record": self._record, "moments": moments}
        arrays |= self._seen[0].arrays("first")
        if self._n is not None:
            arrays |= self._seen[1].arrays("second")
            arrays |= {"scores": self._scores[:, : self._done], "chosen": self._chosen[:, : self._done]}
            arrays |= {"counted": self._counted}
        with replace_file(self._checkpoint.path) as stream:
            stream.write(pack("TwoPasses", _VERSION, fields, arrays))


def _kind_of(keys: Matrices) -> str:
    """Return the kind of the keys, in words."""
    return f"{keys.format} keys of batch {keys.batch} and d = {keys.d}"
