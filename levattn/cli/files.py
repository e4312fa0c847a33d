"""Keys in files, as the command line names them: opened, refused in its words, and their scores written."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import levattn
from levattn.cli.output import check_output, ending_of, fail
from levattn.io.source import files_at, ids_between, open_besides, would_join

_PIPED = re.compile(r"\S*/stdin\.(npy|npz|safetensors)\b")  # the file of what came by a pipe
_HEAD = 9  # bytes, by which these formats are known:
_MAGIC = {".npy": b"\x93NUMPY", ".npz": b"PK\x03\x04", ".safetensors": b"{"}
_PART = 1 << 16  # rows that are written at a time


@dataclass(frozen=True)
class KeyFiles:
    """The files of keys that a command line names, and how they are read."""

    files: tuple[Path, ...]
    tensor: str | None = None
    columns: tuple[str, ...] | None = None
    id: str | None = None
    dtype: str | None = None
    memory: int | None = None  # in bytes
    weights: str | None = None  # a column of weights, which is no feature
    shown: str | None = None  # the name of a file that is not the user's

    @property
    def name(self) -> str:
        """The name of the keys in messages and plots."""
        if self.shown is not None:
            return self.shown
        return str(self.files[0]) if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"

    @property
    def paths(self) -> Path | tuple[Path, ...]:
        """The files as an argument of `open_keys`."""
        return self.files[0] if len(self.files) == 1 else self.files

    @property
    def report(self) -> dict[str, Any]:
        """The part of a JSON document about the files."""
        file = self.name if len(self.files) == 1 else [str(file) for file in self.files]
        return {"file": file, "id": self.id, "weights": self.weights}

    def opened(self, option: str = "--tensor") -> levattn.KeySource:
        """Return the keys, or with another option the queries; an error names options, not arguments."""
        how: dict[str, Any] = {"tensor": self.tensor, "columns": self.columns, "id": self.id, "dtype": self.dtype}
        with _in_words_of_the_program(option):
            if self.weights is None:
                return levattn.open_keys(self.paths, **how, memory=self.memory)
            source = open_besides(self.paths, self.weights, **how, chunk_rows=None, memory=self.memory)
        if self.weights in (source.columns or ()):
            fail(f"--weights {self.weights} is a feature as well; name other --columns")
        if not source.tables:
            fail(f"{self.name}: holds an array without columns, got --weights {self.weights}; leave --weights out")
        return source

    def of_tensors(self, names: Sequence[str | None]) -> list[KeyFiles]:
        """Return the files for each of some arrays; refuse them before any result if one of several is not there."""
        found = [replace(self, tensor=name) for name in names]
        for each in found[1:]:
            each.opened()
        return found

    def weights_of_rows(self) -> npt.NDArray[Any] | None:
        """Return the weights of all rows, (n,), None without --weights."""
        if self.weights is None:
            return None
        with _in_words_of_the_program("--weights"):
            found = levattn.open_keys(self.paths, columns=(self.weights,), dtype="float64", memory=self.memory)
            return np.asarray(found.load())[:, 0]

    @contextmanager
    def from_pipe(self) -> Iterator[KeyFiles]:
        """Yield the files; if - is one of them, save the keys of standard input in a temporary file."""
        pipe = Path("-")
        if pipe not in self.files:
            yield self
            return
        if len(self.files) > 1:
            fail("- stands for standard input; expected no other file with it")
        begin = sys.stdin.buffer.read(_HEAD)
        suffix = next((suffix for suffix, magic in _MAGIC.items() if magic in begin), None)
        if suffix is None:
            fail("standard input holds no keys; expected a file of .npy, .npz or .safetensors")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"stdin{suffix}")
            with path.open("wb") as file:
                file.write(begin)
                shutil.copyfileobj(sys.stdin.buffer, file)
            yield replace(self, files=(path,), shown="standard input")

    @contextmanager
    def working(self, checkpoint: Path | None) -> Iterator[None]:
        """End the program in words of its own for keys that are not finite, and where a checkpoint holds the work."""
        try:
            with _in_words_of_the_program("--tensor"):
                yield
        except levattn.NonFiniteError as error:  # its text names an argument and options that the program lacks
            problem = str(error).partition(";")[0].partition(" of the keys")[0].removeprefix("K ")
            fail(f"{self.name} {problem}; remove these rows and save the file again")
        except KeyboardInterrupt as error:
            if checkpoint is None or not checkpoint.exists():
                raise
            said, status = ending_of(error)
            fail(f"{said}; {checkpoint} holds the progress, so run the same command again to continue", status)


@contextmanager
def _in_words_of_the_program(option: str) -> Iterator[None]:
    """End the program for a file that is refused; the remedy names options, `option` for a tensor."""

    def named(found: re.Match[str]) -> str:
        return f"--{found[1]}" + (f" {found[3]}" if found[3] else "")

    try:
        yield
    except levattn.KeyFileError as error:
        problem, semicolon, remedy = str(error).rpartition("; ")
        remedy = re.sub(r"\b(columns|id|dtype)=('(\w+)')?", named, re.sub(r"\btensor\b=?", option, remedy))
        remedy = re.sub(r"^leave (columns|id) out$", r"leave --\1 out", remedy)
        if option != "--tensor":
            remedy = remedy.replace("the keys", "the queries")
        problem = re.sub(r"got tensor=", f"got {option} ", problem)
        problem = re.sub(r"got (columns|id)=", r"got --\1 ", problem)
        text = problem + semicolon + remedy
        if option == "--weights":
            text = text.replace("--columns", option)
        fail(_PIPED.sub("standard input", text))


def check_targets(
    targets: Sequence[tuple[Path | None, str]], files: Sequence[Path], queries: Path | None = None
) -> None:
    """End the program if it cannot write an output file, or would overwrite a file in use.

    targets: the files to write, each with its option.
    """
    named = [(path, option) for path, option in targets if path is not None]
    read = [*((file, "keys") for file in files), *([(queries, "queries")] if queries else [])]
    for path, option in named:
        check_output(path, option)
        for file, content in read:
            if path.exists() and any(each.exists() and path.samefile(each) for each in (file, *files_at(file))):
                fail(f"{path} is the file of the {content}, which {option} would overwrite; name another")
            if would_join(path, file):
                fail(f"{path} would become a file of the {content} in {file}; name another folder with {option}")
    for (path, option), (other, another) in itertools.combinations(named, 2):
        if os.path.realpath(path) == os.path.realpath(other):
            fail(f"{path} and {other} are the same file; name two with {option} and {another}")


def all_rows(source: levattn.KeySource, scores: npt.NDArray[Any]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield a table of the scores (..., n) of all keys in parts: item in a batch, index, id if there is one, score."""
    for item in np.ndindex(scores.shape[:-1]):
        start = 0
        for count, ids in _counts_and_ids(source):
            yield _part(item, np.arange(start, start + count), ids, scores[item][start : start + count])
            start += count


def _counts_and_ids(source: levattn.KeySource) -> Iterator[tuple[int, npt.NDArray[Any] | None]]:
    """Yield the numbers of the rows of parts, at least one, and their identifiers if there are any."""
    if source.id is not None and source.n:
        for ids in ids_between(source, 0, source.n):
            yield len(ids), ids
        return
    none = None if source.id is None else np.empty(0, np.int64)
    for start in range(0, max(source.n, 1), _PART):
        yield min(_PART, source.n - start), none


def member_rows(
    batch: tuple[int, ...], indices: Sequence[npt.NDArray[Any]], ids: Any, scores: Sequence[npt.NDArray[Any]]
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield a table of the scores of some keys of each matrix of a batch, as `all_rows` does."""
    for item, which, values in zip(np.ndindex(batch), indices, scores, strict=True):
        yield _part(item, which, None if ids is None else np.asarray(ids), values)


def _part(item: tuple[int, ...], indices: Any, ids: Any, scores: Any) -> dict[str, npt.NDArray[Any]]:
    columns: dict[str, npt.NDArray[Any]] = {}
    if item:
        columns["item"] = np.full(len(indices), ",".join(map(str, item)))
    columns["index"] = np.asarray(indices, np.int64)
    if ids is not None:
        columns["id"] = ids
    return columns | {"score": np.asarray(scores)}
