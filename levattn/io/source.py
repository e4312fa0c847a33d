"""Sources of keys: the shards of a path, and the rows of all shards as one array."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from levattn._core.checks import whole_number
from levattn._kernels import BLOCK
from levattn.exceptions import KeyFileError
from levattn.io.common import Format, Identity, Opened, Wanted, check_shape, listed, missing_file, refusal, refusing
from levattn.io.formats import (
    INDEX_SUFFIX,
    NPY_MAGIC,
    is_store,
    open_index,
    open_npy,
    open_npz,
    open_safetensors,
    open_zarr,
)
from levattn.io.tables import TEXTS, open_parquet, open_text

_PART = re.compile(r"(.*)-[0-9]+-of-([0-9]{1,18})(\.\w+)", re.DOTALL)


def shards_of(path: Path, suffixes: Collection[str]) -> list[Path]:
    """Return the files of keys at `path`, in the order of their rows."""
    if not path.exists():
        raise missing_file(path, "no such file", f"check the path (it is taken relative to {Path.cwd()})")
    if not path.is_dir() or is_store(path):
        return [path]
    visible = sorted((entry for entry in path.iterdir() if not entry.name.startswith(".")), key=_natural)
    parts = [entry for entry in visible if "=" in entry.name and entry.is_dir() and not is_store(entry)]
    shards = [
        entry for entry in visible if entry not in parts and (entry.suffix.lower() in suffixes or is_store(entry))
    ]
    if parts:
        keys = list(dict.fromkeys(part.name.partition("=")[0] for part in parts))
        if shards or len(keys) > 1:
            names = ", ".join(
                repr(entry.name) for entry in (shards[:1] + parts if shards else _firsts(parts, keys))[:2]
            )
            raise refusal(path, f"the folder holds both {names}", "open one of them")
        return [shard for part in parts for shard in shards_of(part, suffixes)]
    indices = [entry for entry in visible if entry.name.endswith(INDEX_SUFFIX)]
    if indices:
        others = [shard for shard in shards if shard.suffix.lower() != ".safetensors"]
        if len(indices) + len(others) > 1:
            names = ", ".join(repr(entry.name) for entry in [*indices, *others][:2])
            raise refusal(path, f"the folder holds both {names}", "open one of them")
        return indices
    if not shards:
        known = ", ".join(suffixes)
        raise refusal(path, f"the folder holds no file of keys ({known}, or a zarr store)", "check the path")
    numbered = Counter(part.groups() for shard in shards if (part := _PART.fullmatch(shard.name)))
    for (name, count, suffix), found in numbered.items():
        if found != int(count):
            what = f"{name}-...-of-{count}{suffix}"
            raise refusal(path, f"the folder holds {found} of {int(count)} files {what}", "copy the others there")
    return shards


def files_at(path: Path) -> list[Path]:
    """Return the files of keys at `path`, or none if it cannot be opened."""
    try:
        return shards_of(path, _FORMATS)
    except (OSError, KeyFileError):
        return []


def would_join(path: Path, folder: Path) -> bool:
    """Tell whether a file written to `path` would be one of the files of keys of a folder."""
    if not folder.is_dir() or is_store(folder):
        return False
    written = Path(os.path.realpath(path))
    if written.suffix.lower() not in _FORMATS or written.name.startswith("."):
        return False
    return written.parent in {Path(os.path.realpath(file.parent)) for file in files_at(folder)}


def _firsts(parts: list[Path], keys: list[str]) -> list[Path]:
    """Return the first folder of each key."""
    return [next(part for part in parts if part.name.partition("=")[0] == key) for key in keys]


def _natural(path: Path) -> tuple[list[str | int], str]:
    """Return a sorting key by which shard-2 comes before shard-10."""
    pieces: list[str | int] = [*re.split("([0-9]+)", path.name)]
    pieces[1::2] = map(int, pieces[1::2])
    return pieces, path.name


_ID_ROWS = 1 << 16
_KINDS = tuple(map(np.dtype, ("float64", "float32", "float16")))  # to which numbers are converted
_CHUNK_BYTES = 32 * 2**20
_FORMATS: dict[str, Format] = {
    ".npy": open_npy,
    ".npz": open_npz,
    ".safetensors": open_safetensors,
    ".parquet": open_parquet,
    **dict.fromkeys(TEXTS, open_text),
}

_TICK = 20_000_000  # nanoseconds in which times of files may not advance
_COARSE = 2_000_000_000  # the same where they are in whole seconds

_Path = str | os.PathLike[str]


class _Shard(NamedTuple):
    """An array of a source as it was when it was opened; rows of the arrays follow each other."""

    path: Path
    tensor: str | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    columns: tuple[str, ...] | None = None
    sparse: bool = False

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True)
class KeySource:
    """Keys in files, as a re-iterable source of row chunks.

    `open_keys` returns it. Iterating yields numpy arrays of shape ``(..., m, d)`` with ``m <= chunk_rows``:
    consecutive rows, with all leading axes (batch, heads) together. Concatenated along axis -2 they are the
    array of the file, or the arrays of all files one after the other. Each iteration opens the files anew. So an
    algorithm can read a source in several passes, and a source can be pickled and sent to another process.

    Attributes
    ----------
    path : pathlib.Path or tuple of pathlib.Path
        The file or folder, or the given sequence of them, as absolute paths.
    tensor : str or None
        Name of the array inside the file. None if it has no name (``.npy``, a zarr array, `columns`), or not the
        same name in all files.
    shape : tuple of int
        ``(..., n, d)``, from the headers alone.
    dtype : numpy.dtype
        float64, float32, float16, or ml_dtypes' bfloat16, in native byte order: of the files, or the asked one.
    chunk_rows : int
        Number of rows in every chunk except the last, which may be shorter.
    columns : tuple of str or None
        Names of the columns of a table, if each one is a feature.
    id : str or None
        Name of the column that `ids` reads.

    Raises
    ------
    KeyFileError
        While reading, if the data are damaged, or if a file or the number of files changed since the opening. A file
        has changed if its size, time, inode or device differ; no such figure tells a change of a zarr store.

    Notes
    -----
    Chunks are taken from the rows of all files together. So the chunks, and sums over them, do not depend on the
    boundaries between files.

    Memory: ``chunk_rows`` rows at a time. Rows of ``.npy`` and ``.safetensors`` files are memory-mapped and read-only,
    and released chunk by chunk. From a zarr store, only the store's chunks that hold the requested rows are read. This
    is fastest where `chunk_rows` is a multiple of the rows of such a chunk. ``.parquet`` files are read page by page,
    and text four mebibytes at a time. Text is read from its beginning, so its last rows take as long as all rows.
    An array or a sparse matrix in an ``.npz`` file is read whole, because a compressed member has no random access.

    A file must not be cut while it is read, unless it is an ``.npz`` file, text or a zarr store. Its size is checked
    before each chunk. But if it is cut while a chunk is in use, the operating system ends the process (SIGBUS), as
    with every mapped file. Copy a file that may be cut first. Replacing it as a whole, by a rename, does no harm to an
    iteration in progress; the next one raises.

    A source in another process knows the sizes and the times of its files, not their inodes. So another machine may
    read copies, if these keep the times (``cp -p``, ``rsync -t``).

    Examples
    --------
    >>> import tempfile, pathlib, numpy as np, levattn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(pathlib.Path(folder, "layer.npz"), K=np.eye(5, 3), V=np.eye(5))
    ...     source = levattn.open_keys(pathlib.Path(folder, "layer.npz"), tensor="K", chunk_rows=2)
    ...     rank = np.linalg.matrix_rank(sum(chunk.T @ chunk for chunk in source))
    ...     last = source.between(3, 5).load()
    >>> source.shape, int(rank), last.shape
    ((5, 3), 3, (2, 3))
    """

    path: Path | tuple[Path, ...]
    tensor: str | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    columns: tuple[str, ...] | None
    id: str | None
    _shards: tuple[_Shard, ...] = field(repr=False)
    _identities: tuple[Identity, ...] = field(repr=False, compare=False)  # of their files
    _first: int = field(default=0, repr=False)  # row of the shards at which this source begins

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: another machine may see the same files under other numbers."""
        return vars(self) | {"_identities": tuple(Identity(*found[:2]) for found in self._identities)}

    @property
    def n(self) -> int:
        """Number of keys (rows)."""
        return self.shape[-2]

    @property
    def d(self) -> int:
        """Length of each key (columns)."""
        return self.shape[-1]

    @property
    def tables(self) -> bool:
        """Whether all files are tables, with columns by name."""
        return all(shard.path.suffix.lower() in (".parquet", *TEXTS) for shard in self._shards)

    @property
    def sparse(self) -> bool:
        """Whether all files hold sparse matrices of scipy, so that `load` returns one; never in float16."""
        return all(shard.sparse for shard in self._shards) and self.dtype.itemsize > 2

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        with self._reading() as pieces:
            for start in range(0, self.n, self.chunk_rows):
                yield _joined(pieces(start, min(start + self.chunk_rows, self.n)))

    def read(self, start: SupportsIndex, stop: SupportsIndex) -> npt.NDArray[Any]:
        """Return the rows from `start` up to `stop`, exclusive.

        Only these rows are read, except from an ``.npz`` file.

        Parameters
        ----------
        start, stop : int
            ``0 <= start <= stop <= n``.

        Returns
        -------
        numpy.ndarray, shape (..., stop - start, d)
            The rows, with all leading axes.

        Raises
        ------
        KeyFileError
            If the data are damaged, or if a file changed since it was opened.
        FileNotFoundError
            If a file is missing.
        TypeError, ValueError
            If `start` or `stop` is not a whole number, or out of range.
        """
        start, stop = self._checked(start, stop)
        with self._reading() as pieces:
            return _joined(pieces(start, stop))

    def between(self, start: SupportsIndex, stop: SupportsIndex) -> KeySource:
        """Return the source of the rows from `start` up to `stop` alone, without reading them.

        Use it to divide work: each worker gets the source of its rows. If `start` is a multiple of 2048,
        chunks still hold whole blocks of the sums.

        Parameters
        ----------
        start, stop : int
            ``0 <= start <= stop <= n``.

        Returns
        -------
        KeySource
            Of shape ``(..., stop - start, d)``, with the same `path` and `chunk_rows`.

        Raises
        ------
        TypeError, ValueError
            If `start` or `stop` is not a whole number, or out of range.
        """
        start, stop = self._checked(start, stop)
        return replace(self, shape=(*self.shape[:-2], stop - start, self.d), _first=self._first + start)

    def ids(self, indices: npt.ArrayLike | None = None) -> npt.NDArray[Any]:
        """Return the identifiers of some rows, from the column that `open_keys` was given as ``id=``.

        Parameters
        ----------
        indices : array of int, shape (k,), optional
            Row numbers in ``range(n)``, in any order, such as the `indices` of a set. All rows if left out.

        Returns
        -------
        numpy.ndarray, shape (k,)
            Integers or strings, one for each index. Of a text file they are always strings, as they stand there.

        Raises
        ------
        ValueError
            If the source was opened without `id`, or an index is out of range.
        TypeError
            If the indices are not whole numbers.
        KeyFileError
            A ValueError: if the column has nulls, not one kind in all files, or a file changed since it was opened.
        FileNotFoundError
            If a file is missing.

        Notes
        -----
        Reads this column of the files that hold the rows, and no other, in chunks. Memory: the identifiers of the
        rows. Nothing checks that identifiers differ.
        """
        if self.id is None:
            raise ValueError("this source has no identifiers; expected one that open_keys was given a column as id=")
        rows = np.arange(self.n) if indices is None else np.asarray(indices)
        if rows.ndim != 1 or (rows.dtype.kind not in "iu" and rows.size):
            raise TypeError(f"indices are {rows.dtype} {rows.shape}; expected whole numbers (k,), such as set.indices")
        if rows.size and not 0 <= rows.min() <= rows.max() < self.n:
            raise ValueError(f"indices range from {rows.min()} to {rows.max()}; expected 0 <= index < n = {self.n}")
        wanted, places = np.unique(rows.astype(np.int64), return_inverse=True)
        found = [np.empty(0, np.int64)] if not len(wanted) else []
        for low, high in itertools.pairwise(self._starts()):
            inside = wanted[(wanted >= low - self._first) & (wanted < high - self._first)]
            if len(inside):
                row = int(inside[0])
                for part in ids_between(self, row, int(inside[-1]) + 1):
                    found.append(part[inside[(inside >= row) & (inside < row + len(part))] - row])
                    row += len(part)
        _require_one_kind(self, found)
        return np.concatenate(found)[places]

    def load(self) -> Any:
        """Return the whole array, shape ``(..., n, d)``.

        Returns
        -------
        numpy.ndarray, shape (..., n, d), or scipy.sparse.csr_array, shape (n, d)
            A sparse array if the source is `sparse`. A read-only memory map if the keys are in one ``.npy`` or
            ``.safetensors`` file in native byte order. Its numbers are read when they are used, and the file must not
            be cut or changed until then. Otherwise an array in memory.

        Raises
        ------
        KeyFileError
            If the data are damaged or larger than memory, or if a file changed since it was opened. It is a
            ValueError.
        FileNotFoundError
            If a file is missing.
        """
        if self.sparse:
            return self._loaded_sparse()
        with self._reading() as pieces:
            if len(self._shards) == 1 and self._shards[0].dtype == self.dtype:
                return next(pieces(0, self.n))
            with refusing(self._shards[0].path, ValueError):
                whole = np.empty(self.shape, self.dtype)
            for start in range(0, self.n, self.chunk_rows):
                for piece in pieces(start, min(start + self.chunk_rows, self.n)):
                    whole[..., start : start + piece.shape[-2], :] = piece
                    start += piece.shape[-2]
            return whole

    def _loaded_sparse(self) -> Any:
        """Return the sparse matrices of all files as one."""
        import scipy.sparse

        with self._reading(what="sparse") as pieces:
            found = list(pieces(0, self.n))
        return found[0] if len(found) == 1 else scipy.sparse.vstack(found, format="csr")

    def _checked(self, start: SupportsIndex, stop: SupportsIndex) -> tuple[int, int]:
        start, stop = operator.index(start), operator.index(stop)
        if not 0 <= start <= stop <= self.n:
            raise ValueError(f"start, stop are {start}, {stop}; expected 0 <= start <= stop <= n = {self.n}")
        return start, stop

    def _starts(self) -> list[int]:
        """Return the first row of each shard, and at the end the number of rows of all."""
        return [0, *itertools.accumulate(shard.shape[-2] for shard in self._shards)]

    @contextmanager
    def _reading(
        self, *, what: Literal["rows", "ids", "sparse"] = "rows"
    ) -> Iterator[Callable[[int, int], Iterator[Any]]]:
        """Open for reading: yields a function that yields the rows of a range, shard by shard."""
        files = _files(self.path)
        if files != [shard.path for shard in self._shards]:
            problem = f"the folder changed since it was opened, from {len(self._shards)} files to {len(files)}"
            raise refusal(files[0].parent, problem, "open it again")
        starts = self._starts()
        current: tuple[int, Opened] | None = None

        def pieces(start: int, stop: int) -> Iterator[npt.NDArray[Any]]:
            nonlocal current
            start, stop = start + self._first, stop + self._first
            index = min(bisect.bisect_right(starts, start), len(self._shards)) - 1
            while True:
                if current is None or current[0] != index:
                    stack.close()
                    current = index, stack.enter_context(_reopened(self, index))
                offset, end = starts[index : index + 2]
                part = start - offset, min(stop, end) - offset
                opened, path = current[1], self._shards[index].path
                if what == "ids" and opened.ids is not None:
                    yield opened.ids(*part)
                elif what == "sparse" and opened.sparse is not None:
                    found = opened.sparse(*part)
                    found.data = _converted(path, found.data, self.dtype)
                    yield found
                else:
                    yield _converted(path, opened.read(*part), self.dtype)
                start, index = end, index + 1
                if stop <= end:
                    return

        with ExitStack() as stack:
            yield pieces


def open_keys(
    path: _Path | Sequence[_Path],
    *,
    tensor: str | None = None,
    columns: str | Iterable[str] | None = None,
    id: str | None = None,
    dtype: npt.DTypeLike | None = None,
    chunk_rows: SupportsIndex | None = None,
    memory: SupportsIndex | None = None,
) -> KeySource:
    """Open keys in files: .npy, .npz, .safetensors, zarr v3, tables (.parquet, .csv, .tsv), or a folder of such files.

    Only headers are read, and of text the lines are counted. Pass the result to `universal_set` or `leverage_scores`,
    iterate over its row chunks, or load it.

    Parameters
    ----------
    path : path-like, or sequence of path-like
        A path may be:

        - a file, whose suffix tells the format;
        - the ``.safetensors.index.json`` of a model, which names the file beside it that holds `tensor`;
        - a zarr v3 store;
        - a folder, whose files are taken in natural order (``shard-2`` before ``shard-10``);
        - a folder of folders with names like ``year=2025``, as Spark, dask and pandas write them.

        An ``.npz`` file may also be a sparse matrix of `scipy.sparse.save_npz`. `leverage_scores` and `universal_set`
        then read it whole and keep it sparse; its chunks are dense.

        Rows of several files, which may be of different formats, follow each other. A sequence of paths is taken in
        its own order. Each array has shape ``(..., n, d)``; its rows are keys. Its dtype is float64, float32, float16,
        or (``.safetensors`` only) bfloat16. In a table the keys are either columns of numbers, one for each feature,
        or (``.parquet`` only) one column of lists of the same length.
    tensor : str, optional
        Name of the array, or of the column of lists, the same in all files. Required if a file holds several of them.
    columns : str or iterable of str, optional
        Columns of numbers in a table, one for each feature, in this order. If left out, a ``.parquet`` file with
        columns of lists has the keys there. Else all columns are features, without the one of `id` and an index of
        pandas; any that holds no numbers is refused. The value in the name of a folder, as the year in ``year=2025``,
        is a feature if it is named here.
    id : str, optional
        Column of a table with an integer or a string for each row, for `KeySource.ids`. It is no feature. It may also
        be in the names of folders.
    dtype : {"float64", "float32", "float16"}, optional
        Converts the numbers while they are read, integers too, which are refused without it. Numbers are rounded to
        the nearest.
    chunk_rows : int, optional
        Number of rows in a chunk, at least 1.
    memory : int, optional
        Instead of `chunk_rows`: number of bytes that a chunk may take, unless a single row takes more. Chunks consist
        of whole blocks of 2048 rows if as many fit. Default: 32 MiB.

    Returns
    -------
    KeySource
        Shape and dtype, an iterator over ``(..., m, d)`` chunks, any range of rows, and ``load()``.

    Raises
    ------
    FileNotFoundError
        If a file, or a file that the index of a model names, is missing.
    KeyFileError
        A ValueError. It is raised in these cases:

        - a file is truncated, damaged, pickled, or of another kind;
        - the array has fewer than two axes, or holds neither floats nor, with `dtype`, integers;
        - a number is beyond the range of `dtype` (this is found when it is read);
        - `tensor`, `id` or a column is not in the file (the error lists the names in it);
        - `tensor` is left out although there are several arrays;
        - a column has nulls, strings, or lists of several lengths, or two have the same name;
        - a zarr store lacks chunks;
        - a folder holds no file of keys, or not all files numbered like ``-00001-of-00003``;
        - several files differ in dtype or in any axis except the axis of the rows.
    TypeError, ValueError
        If `path` is neither a path nor a sequence of paths, or is empty. Also if a name is no string, `dtype` is
        another, or `chunk_rows` or `memory` is not a positive integer. Also if two options exclude each other:
        `chunk_rows` and `memory`, or `tensor` and `columns`.
    ImportError
        If the package for a format is not installed: safetensors for ``.safetensors``, ml_dtypes for bfloat16,
        pyarrow for tables, or zarr for a zarr store.

    Notes
    -----
    Reading the headers takes all of the time and memory. Nothing is ever unpickled, and no file can name code to run.
    Non-native byte order is converted on reading. In a folder, hidden files and files of other kinds are ignored. If a
    folder holds the index of a model, the index represents the folder. Only a checksum can reveal altered numbers
    under a sound header: ``.npz`` always has one, and zarr and parquet may have one.

    *Text* is UTF-8, with one row a line, separated by commas (``.csv``) or tabs (``.tsv``). Numbers are read as
    float64. The first line names the columns. If all its fields are numbers, and not all of them whole, it is a row,
    and the names are f0, f1, and so on. A first line of whole numbers could be either and is refused. An empty field
    is a null, as is an empty line between rows of one column, and ``nan`` is NaN. Fields in quotes may hold separators
    and new lines. The first mebibyte decides whether a column holds integers.

    Examples
    --------
    >>> import tempfile, pathlib, numpy as np, levattn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(pathlib.Path(folder, "keys-1.npy"), np.ones((700, 8)))
    ...     np.save(pathlib.Path(folder, "keys-2.npy"), np.ones((300, 8)))
    ...     source = levattn.open_keys(folder, chunk_rows=400)
    ...     [chunk.shape for chunk in source]
    [(400, 8), (400, 8), (200, 8)]
    """
    return open_besides(
        path, None, tensor=tensor, columns=columns, id=id, dtype=dtype, chunk_rows=chunk_rows, memory=memory
    )


def open_besides(
    path: Any, besides: str | None, *, tensor: Any, columns: Any, id: Any, dtype: Any, chunk_rows: Any, memory: Any
) -> KeySource:
    """Return the source of `open_keys`; the column `besides` of a table is no feature unless `columns` names it."""
    paths = _checked_paths(path)
    wanted = _checked_wanted(tensor, columns, id, dtype)._replace(besides=besides)
    if chunk_rows is not None and memory is not None:
        raise ValueError("chunk_rows and memory are both given; expected at most one, a number of rows or of bytes")
    rows = None if chunk_rows is None else whole_number("chunk_rows", chunk_rows)
    budget = _CHUNK_BYTES if memory is None else whole_number("memory", memory)

    shards, identities = [], []
    for file in _files(paths):
        with _opened(file, wanted) as opened:
            shards.append(_shard_of(file.absolute(), opened))
            identities.append(opened.identity)
    first = shards[0]
    for shard in shards[1:]:
        _require_alike(shard, first, wanted)
    shape = (*first.shape[:-2], sum(shard.shape[-2] for shard in shards), first.shape[-1])
    name = first.tensor if len({shard.tensor for shard in shards}) == 1 else None
    kind = first.dtype if wanted.dtype is None else wanted.dtype
    rows = rows or _rows_within(budget, shape, kind)
    whole = tuple(each.absolute() for each in paths) if isinstance(paths, tuple) else paths.absolute()
    return KeySource(whole, name, shape, kind, rows, first.columns, id, tuple(shards), tuple(identities))


def ids_between(source: KeySource, start: int, stop: int) -> Iterator[npt.NDArray[Any]]:
    """Yield the identifiers of the rows of a source from `start` up to `stop`, in parts."""
    with source._reading(what="ids") as pieces:
        first = None
        for low in range(start, stop, _ID_ROWS):
            for part in pieces(low, min(low + _ID_ROWS, stop)):
                first = part if first is None else first
                _require_one_kind(source, (first, part))
                yield part


def record_of(source: KeySource, *, wait: bool = False) -> list[Any] | None:
    """Return a record of the files of a source that is another one after any change.

    None where the system does not tell every change. This holds for zarr stores, and for files so new that another
    change might bring them the same time. `wait` until they are older, if that takes no longer than a tick.
    """
    found: list[Any] = [source._first, *source.shape, source.dtype.name]
    for index, shard in enumerate(source._shards):
        with _reopened(source, index) as opened:
            identity = opened.identity
        age = time.time_ns() - max(identity.time, identity.changed)
        if wait and 0 <= age < _TICK:
            time.sleep(1e-9 * (_TICK - age))
            return record_of(source)
        coarse = not (identity.time % 1_000_000_000 or identity.changed % 1_000_000_000)
        if not identity.changed or age < (_COARSE if coarse else _TICK):
            return None
        what = [shard.tensor, shard.columns and list(shard.columns), shard.dtype.name]
        found.append([*what, list(shard.shape), *identity._replace(device=0)])
    return found


@contextmanager
def whole_keys(K: Any, *, sparse: bool = False) -> Iterator[Any]:
    """Yield the whole array of keys in files, and other keys as they are; raise if the files changed meanwhile.

    Sparse matrices in files are made dense, unless the caller takes `sparse` ones.
    """
    if not isinstance(K, KeySource):
        yield K
        return
    yield K.load() if sparse or not K.sparse else K.read(0, K.n)
    for index in range(len(K._shards)):  # pages of a map may have been read more than once
        with _reopened(K, index):
            pass


def _checked_paths(path: Any) -> Path | tuple[Path, ...]:
    """Return the path or paths of keys, or raise."""
    many = not isinstance(path, str | os.PathLike)
    if isinstance(path, set | frozenset | dict):
        raise TypeError(f"path is of type {type(path).__name__}, which has no order; expected a list of paths")
    if many and (isinstance(path, bytes | bytearray) or hasattr(path, "shape") or not isinstance(path, Iterable)):
        remedy = "Decode it by os.fsdecode(path)" if isinstance(path, bytes | bytearray) else _remedy(path)
        raise TypeError(
            f"path is of type {type(path).__name__}; expected the path of a file or folder (str or os.PathLike), or a "
            f"sequence of paths. {remedy}"
        )
    found = []
    for each in path if many else (path,):
        if not isinstance(each, str | os.PathLike) or isinstance(os.fspath(each), bytes):
            raise TypeError(f"path holds {each!r}; expected paths of files (str or os.PathLike)")
        if not os.fspath(each):
            raise ValueError("path is empty (an unset variable?); expected the path of a file or folder")
        found.append(Path(each))
    return tuple(found) if many else found[0]


def _remedy(path: Any) -> str:
    """Return what to do with something that is no path."""
    if path is None:
        return "Give the path of a file, such as 'keys.npy'"
    return "Give keys in memory to universal_set directly"


def _files(path: Path | tuple[Path, ...]) -> list[Path]:
    paths = path if isinstance(path, tuple) else (path,)
    if not paths:
        raise ValueError("path is an empty sequence; expected at least one file")
    return [file for each in paths for file in shards_of(each, _FORMATS)]


def _checked_wanted(tensor: Any, columns: Any, id: Any, dtype: Any) -> Wanted:
    """Return what to read of the files, or raise for options of the wrong kind."""
    if tensor is not None and not isinstance(tensor, str):
        raise TypeError(f"tensor must be the name of an array (str) or None, got {type(tensor).__name__}")
    if id is not None and not isinstance(id, str):
        raise TypeError(f"id must be the name of a column (str) or None, got {type(id).__name__}")
    if columns is not None:
        columns = (
            (columns,) if isinstance(columns, str) else tuple(columns) if isinstance(columns, Iterable) else columns
        )
        if not isinstance(columns, tuple) or not all(isinstance(name, str) for name in columns):
            raise TypeError(f"columns are {columns!r}; expected names of columns (str)")
        if not columns or len(set(columns)) < len(columns) or id in columns:
            raise ValueError(f"columns are {columns!r}; expected one or more names, each once, without the one of id")
        if tensor is not None:
            raise ValueError(
                f"tensor is {tensor!r} and columns are given; expected one of them, a column of lists or of numbers"
            )
    try:
        kind = None if dtype is None else np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind is not None and kind not in _KINDS:
        raise ValueError(f"dtype is {dtype!r}; expected 'float64', 'float32' or 'float16'")
    return Wanted(tensor, columns, id, kind)


def _shard_of(path: Path, opened: Opened) -> _Shard:
    sparse = opened.sparse is not None
    return _Shard(path, opened.tensor, opened.shape, _native(opened.dtype), opened.columns, sparse)


def _require_alike(shard: _Shard, first: _Shard, wanted: Wanted) -> None:
    """Refuse a shard with other rows than the first one."""
    if _without_rows(shard.shape) != _without_rows(first.shape) or (
        wanted.dtype is None and shard.dtype != first.dtype
    ):
        problem = f"holds {shard}, whose rows cannot follow those of {first} in {first.path}"
        raise refusal(shard.path, problem, "save all of the keys with one dtype and one shape of rows")
    if (shard.columns or first.columns) and shard.columns != first.columns:
        problem = f"has the columns {listed(shard.columns or ())}, and {first.path} has {listed(first.columns or ())}"
        raise refusal(shard.path, problem, "choose columns of all files with columns=")


@contextmanager
def _opened(path: Path, wanted: Wanted) -> Iterator[Opened]:
    with _format_of(path)(path, wanted) as opened:
        check_shape(path, opened)
        for option, given, found in (("columns", wanted.columns, opened.columns), ("id", wanted.id, opened.ids)):
            if given is not None and found is None:
                raise refusal(path, f"holds an array without columns, got {option}={given!r}", f"leave {option} out")
        yield opened


@contextmanager
def _reopened(source: KeySource, index: int) -> Iterator[Opened]:
    """Open a shard of a source again; raise if it is not as it was."""
    shard, before = source._shards[index], source._identities[index]
    tensor = None if shard.columns else shard.tensor
    with _opened(shard.path, Wanted(tensor, shard.columns, source.id, source.dtype, shard.shape[-2])) as opened:
        now = _shard_of(shard.path, opened)
        if now != shard:
            raise refusal(shard.path, f"changed since it was opened, from {shard} to {now}", "open it again")
        for name in ("size", "time", "inode", "device"):
            known, found = getattr(before, name), getattr(opened.identity, name)
            counts = before.size if name == "time" else known  # no file is empty, but archives may set the time 0
            if counts and found != known:
                problem = f"changed since it was opened, or another file took its place (another {name})"
                raise refusal(shard.path, problem, "open it again")
        yield opened


def _format_of(path: Path) -> Format:
    if path.is_dir() and is_store(path):
        return open_zarr
    if not os.path.lexists(path):
        raise missing_file(path, "no such file", "it was there before: put it back, or open the keys again")
    if not path.is_file():
        raise refusal(path, "not a regular file", f"give the path of a {', '.join(_FORMATS)} file or of a folder")
    if path.name.lower().endswith(INDEX_SUFFIX):
        return open_index
    try:
        return _FORMATS[path.suffix.lower()]
    except KeyError:
        problem = f"suffix {path.suffix!r} is none of {', '.join(_FORMATS)}"
        raise refusal(path, problem, _conversion_hint(path)) from None


def _conversion_hint(path: Path) -> str:
    with path.open("rb") as stream:
        start = stream.read(8)
    if start.startswith(NPY_MAGIC):
        return "its content is a .npy file: rename it"
    if path.suffix.lower() in {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}:
        return "such files hold pickled objects, which are never loaded: save the tensor with safetensors"
    return "save the keys with numpy.save or safetensors"


def _converted(path: Path, rows: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return rows in another dtype, or refuse numbers beyond its range."""
    if rows.dtype == dtype:
        return rows
    with np.errstate(over="ignore"):
        found = rows.astype(dtype, copy=False)
    if (
        not np.can_cast(rows.dtype, dtype)
        and not np.isfinite(found).all()
        and (np.isfinite(rows) > np.isfinite(found)).any()
    ):
        raise refusal(path, f"holds numbers beyond the range of {dtype}", "name a wider dtype=")
    return found


def _require_one_kind(source: KeySource, parts: Iterable[npt.NDArray[Any]]) -> None:
    """Raise if identifiers are integers in one file and strings in another."""
    if len({part.dtype.kind for part in parts}) > 1:
        problem = f"column {source.id!r} does not hold one kind of integers or strings in all files"
        raise refusal(source._shards[0].path, problem, "save it as one type")


def _joined(pieces: Iterator[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    parts = list(pieces)
    return np.asarray(parts[0]) if len(parts) == 1 else np.concatenate(parts, axis=-2)


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _without_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1])


def _rows_within(budget: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    row_bytes = math.prod(_without_rows(shape)) * dtype.itemsize
    rows = max(1, budget // max(1, row_bytes))
    return rows - rows % BLOCK if rows > BLOCK else rows  # whole blocks: no chunk straddles a block of a sum
