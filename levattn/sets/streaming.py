"""Universal sets of keys that come in chunks, from a state that merges."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from levattn._core.checks import check_epsilon, check_type, whole_number
from levattn._core.device import where_arrays_are
from levattn._core.serialize import StoredState, lock_of, locked, locked_with, whole
from levattn._core.types import Float64, Int64
from levattn.functions import FAMILIES, AttentionFunction, Power, Softmax, as_function
from levattn.linalg.factor import Factor
from levattn.linalg.reading import refuse_nonfinite
from levattn.linalg.weighted import chunk_times_roots
from levattn.sets.candidates import CandidateStore, ChunkForm, SelectedKeys
from levattn.sets.prefix_bounds import require_bounds
from levattn.sets.result import ListedKeys, frame_of, number_of, refuse_batch, save_arrays, storable_arrays
from levattn.sets.universal import warn_of_axes, warn_of_rank
from levattn.states.blocks import RowNumbers, payload_of, present_rows, readable
from levattn.states.spans import MOST_NUMBERS, stored_spans, with_span, with_spans


@dataclass(frozen=True, eq=False, repr=False)
class StreamedSet(ListedKeys):
    """The universal set of the keys of a stream so far; the result of `StreamingUniversalSet`.

    Attributes
    ----------
    items : tuple of SelectedKeys
        The keys of the set of each matrix of the batch, leading axes flattened; one for a single matrix.
    batch : tuple of int
        Leading axes of the keys; () for one matrix.
    n : int
        Number of rows so far, masked ones among them.
    present : array of int64, shape (...,)
        Number of keys that took part.
    epsilon : float
        The ε that was asked for.
    guarantee : {"exact", "superset"}
        As in `UniversalSet`. For even powers above 2, all keys are held if the products of coordinates were rounded
        and are rank-deficient up to rounding.
    f : float or AttentionFunction
        The attention function; a number is the exponent p of abs(x)^p.
    rank : int or array of int64, shape (...,)
        Numerical rank of the keys; for an even power of the products of p/2 coordinates.
    factor : levattn.linalg.Factor
        The factor of the second moment of the keys, or of these products.
    certificate : tuple of str
        The grounds of the guarantee; see `UniversalSet`.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> levattn.StreamingUniversalSet(0.5).update(np.eye(3)).result()
    StreamedSet(3 of 3 keys, epsilon=0.5, guarantee='exact', rank=3, bound=6, vacuous)
    """

    items: tuple[SelectedKeys, ...]
    batch: tuple[int, ...]
    n: int
    present: Int64
    epsilon: float
    guarantee: Literal["exact", "superset"]
    f: Any
    rank: Any
    factor: Factor = field(repr=False)
    certificate: tuple[str, ...]

    @property
    def _one(self) -> SelectedKeys:
        refuse_batch(self.batch, "indices, keys, member_scores and payload are")
        return self.items[0]

    def _holds(self, index: int) -> bool:
        place = int(np.searchsorted(self.indices, index))
        return place < len(self.indices) and bool(self.indices[place] == index)

    @property
    def indices(self) -> Int64:
        """Ascending row numbers of the keys of the set, int64 (size,), for one matrix."""
        return self._one.indices

    @property
    def keys(self) -> npt.NDArray[Any]:
        """The keys of the set, (size, d), for one matrix."""
        return self._one.keys

    @property
    def member_scores(self) -> Float64:
        """The leverage scores of these keys, or bounds of their sensitivities, float64 (size,), for one matrix."""
        return self._one.scores

    @property
    def scores(self) -> NoReturn:
        """Raise: a stream holds no scores of all keys, as `UniversalSet.scores` are; `member_scores` are of the set.

        Raises
        ------
        AttributeError
            Always.
        """
        raise AttributeError(
            "a StreamedSet has no scores of all keys, which a stream does not hold. Its member_scores are of the keys "
            "of the set, in the order of indices. leverage_scores(K) computes all",
            name="scores",
            obj=self,
        )

    @property
    def payload(self) -> npt.NDArray[Any] | None:
        """The payload of these keys, (size, ...) or None, for one matrix."""
        return self._one.payload

    @property
    def sizes(self) -> Int64:
        """Number of keys in the set of each matrix, int64 (...,)."""
        return np.array([len(item) for item in self.items], np.int64).reshape(self.batch)

    @property
    def size_bound(self) -> Any:
        """The bound on the size: rank/ε, or 8 rank/ε for a block bound of rows in random order; a float, or (...,).

        It is infinite where the set is larger. That is so if rows of a rank-deficient matrix count as 1. For a block
        bound it may also be so if rows came in another order, or are not many times as many as this number.
        """
        block = self.certificate == ("block",)
        with np.errstate(over="ignore"):
            bound = (8.0 if block else 1.0) * self.factor.resolved_rank.reshape(self.batch) / self.epsilon
        bound = np.where(self.sizes > bound, np.inf, bound)
        return bound if self.batch else float(bound)

    @property
    def is_vacuous(self) -> Any:
        """Whether the bound is not below the number of keys, and so says nothing: a bool, or bools (...,)."""
        vacuous = np.asarray(self.size_bound) >= self.present
        return vacuous if self.batch else bool(vacuous)

    def __getitem__(self, index: int | tuple[int, ...]) -> StreamedSet:
        """Return the set of one matrix of a batch, as ``universal[layer, head]``."""
        number = number_of(index, self.batch)
        return replace(
            self,
            items=(self.items[number],),
            batch=(),
            present=np.array(self.present.flat[number]),
            rank=int(self.rank.flat[number]),
            factor=self.factor.item(number),
        )

    def to_frame(self) -> Any:
        """Return the keys of the set as a pandas table.

        Returns
        -------
        pandas.DataFrame
            A row for each key of the set: the place of its matrix in the batch (``axis_0``, ...), ``key`` (its row
            number) and ``score``.

        Raises
        ------
        ImportError
            If pandas is not installed (the extra ``frame``).

        Examples
        --------
        >>> import numpy as np, levattn
        >>> table = levattn.StreamingUniversalSet(0.5).update(np.eye(2)).result().to_frame()  # doctest: +SKIP
        """
        numbers = np.repeat(np.arange(len(self.items)), self.sizes.ravel())
        axes = np.unravel_index(numbers, self.batch) if self.batch else ()
        return frame_of((*axes, self._joined("indices")), self._joined("scores"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the set and its keys to an ``.npz`` file, completely or not at all.

        Parameters
        ----------
        path : path-like
            The file, whose name ends in ``.npz``.

        Raises
        ------
        TypeError
            If `path` is no path.
        ValueError
            If the name is empty, or ends differently.
        OSError
            If the file cannot be written.

        Notes
        -----
        The arrays are indices, keys, member_scores, payload (if there is one), sizes, n, present, epsilon, guarantee,
        rank, size_bound, is_vacuous, condition and f. For a batch the keys of all matrices follow each other, `sizes`
        of them for each. ``numpy.load(path)`` reads them without pickle.

        Examples
        --------
        >>> import pathlib, tempfile, numpy as np, levattn
        >>> found = levattn.StreamingUniversalSet(0.5).update(np.eye(2)).result()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found.save(pathlib.Path(folder, "set.npz"))
        ...     with np.load(pathlib.Path(folder, "set.npz")) as saved:
        ...         saved["indices"], saved["rank"]
        (array([0, 1]), array(2))
        """
        names = ("sizes", "n", "present", "epsilon", "guarantee", "rank", "size_bound", "is_vacuous", "f")
        figures = {name: getattr(self, name) for name in names}
        figures["condition"] = self.factor.condition.reshape(self.batch)
        of_keys = {name: self._joined(name) for name in ("indices", "keys", "payload")}
        save_arrays(path, storable_arrays(of_keys | {"member_scores": self._joined("scores")} | figures))

    def _joined(self, name: str) -> Any:
        """Return the arrays of the keys of all matrices as one; None without payload."""
        arrays = [getattr(item, name) for item in self.items]
        if not arrays:
            return np.zeros(0, np.int64 if name == "indices" else np.float64)
        return None if arrays[0] is None else np.concatenate(arrays)


class StreamingUniversalSet(StoredState, name="StreamingUniversalSet", version=1):
    r"""The universal set of keys that come in chunks: one pass, bounded memory, merges.

    For f(x) = x² the result is exactly the result of `universal_set` for the keys so far, unless rounding hides their
    rank (Notes). A leverage score never rises as keys are added, so the state drops a key for good once its score is
    below ε. At most rank/ε keys remain each time they are judged.

    The state numbers the rows as they come. The result has the same bits whatever the sizes of the chunks and the
    number of threads. States of different rows merge in any order, to rounding. Keys may have any condition number up
    to 10¹⁹. Above 10¹³ or so rounding hides their rank, and the set is a superset.

    Parameters
    ----------
    epsilon : float in (0, 1]
        Smallest attention score that counts as large.
    f : float, str, AttentionFunction, default 2
        Attention function with a bound that never rises as keys are added. The set is exact for x². For even powers,
        leverage scores of the products of p/2 coordinates give a superset. For functions of at most quadratic growth,
        the block bound (see `sensitivities`) gives a superset, which depends on the order of the rows. Others are
        refused.
    row_start : int, optional
        Number of the first row. Give it to merge states of several parts of the keys in any order. Without it, the
        rows of a merged state come after the rows that are there.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, or f has no such bound.

    See Also
    --------
    universal_set : The set of keys in memory or in files, in two passes, with the scores of all keys.

    Notes
    -----
    Time O(n d²), several times that for keys of a condition number above some hundreds (with columns scaled alike).
    Memory O(d²/ε) per matrix: at most 2d/ε keys, one block of 2048 rows, and d² numbers for each of log₂(n/2048)
    partial sums. For such keys a sum takes two or three times as many. But beside keys that are 10¹⁹ times as long,
    the others may *all* be held. They count as 1, and `result` warns (`RankWarning`). Small chunks wait, up to 9 MiB
    of rows and payload, until the state can process several blocks together or is read. If more than one thread may be
    used, it processes them in the background, while the next 9 MiB wait. Threads may share a state: each chunk counts
    once, and reads see whole chunks. A block bound has 2/ε sums, and takes time O(n d²/ε).
    For an even power p, D = C(d + p/2 − 1, p/2) takes the place of d.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), Theorem 1 (universal sets) and
    its streaming algorithm. That a prefix never under-estimates: Cohen, Musco, Pachocki, APPROX 2016.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.random.default_rng(0).standard_normal((5000, 8))
    >>> K[[10, 4000], 7] = 300, -400
    >>> state = levattn.StreamingUniversalSet(0.2)
    >>> for start in range(0, 5000, 700):
    ...     state = state.update(K[start : start + 700])
    >>> state.result().indices
    array([  10, 4000])
    """

    def __init__(self, epsilon: float, *, f: Any = 2, row_start: int | None = None) -> None:
        self.epsilon = check_epsilon(epsilon)
        self.f = as_function(f)
        require_bounds(self.f, self.epsilon)
        self._saved_as = _saved_name(self.f)
        self._placed = row_start is not None
        self._next_row = 0 if row_start is None else whole_number("row_start", row_start, 0, MOST_NUMBERS - 1)
        self._spans: list[tuple[int, int]] = []  # of row numbers, ascending
        self._stream: CandidateStore | None = None  # not before the first chunk tells the shape

    def __repr__(self) -> str:
        """Return the figures on one line; nothing is computed for it."""
        state = self._snapshot()
        stream = state._stream
        shape = "no chunk yet" if stream is None else f"n={state.n}, batch={stream.batch}, d={stream.d}"
        return f"StreamingUniversalSet(epsilon={self.epsilon:.6g}, f={self.f!r}, {shape})"

    @property
    def _held_array(self) -> Any:
        return self._stream

    @property
    def n(self) -> int:
        """Number of rows so far, masked ones among them."""
        return sum(stop - start for start, stop in self._spans)

    @property
    def held(self) -> int:
        """Number of keys that are held now, of all matrices."""
        stream = self._settled()
        return 0 if stream is None else stream.held

    @locked
    def _settled(self) -> CandidateStore | None:
        """Return the store of the chunks so far, after all whole blocks; it stays as it is."""
        if self._stream is not None:
            self._stream = self._stream.settled()
        return self._stream

    @where_arrays_are
    def update(self, K: Any, *, mask: Any = None, weights: Any = None, payload: Any = None) -> StreamingUniversalSet:
        """Add a chunk of keys.

        Parameters
        ----------
        K : array of shape (..., m, d)
            Keys, m ≥ 0 of them for each matrix of the batch; kinds and dtypes as in `universal_set`, in all chunks
            alike.
        mask : array of bool, shape (..., m), optional
            True for a key that takes part. The others count as rows.
        weights : array of float, broadcast to (..., m), optional
            The weight w of each key, as in `universal_set`. The set holds the keys √w k, of float64. Give weights
            with all chunks or with none, unless the keys are of float64.
        payload : array of shape (..., m, ...), optional
            Data to hold with the keys, such as their values or token ids: with all chunks or with none.
            Numbers of at most 64 bits; torch's bfloat16 is held as float32.

        Returns
        -------
        StreamingUniversalSet
            The state itself.

        Raises
        ------
        TypeError, ValueError
            If the chunk does not go with those before.
        NonFiniteError
            If the keys hold NaN or infinity outside the mask. After any error the state is as it was.

        Warns
        -----
        AxesWarning
            If the axes of the first chunk look exchanged: 1 < m ≤ d, and more than d matrices (and at least 256) along
            the axis before.
        """
        if type(K) is np.ndarray and mask is None and weights is None and payload is None and self._waits(K):
            return self
        (matrices, rows), rounded = readable(K, mask), False
        if weights is not None:
            matrices, rows, rounded = chunk_times_roots(matrices, rows, weights)
        payloads = () if payload is None else (payload_of(payload, matrices.batch, matrices.n),)
        with lock_of(self):
            if self._stream is None:
                warn_of_axes(matrices.batch, matrices.n, matrices.d, chunk=True)
                stream = CandidateStore(self.epsilon, self.f, matrices.batch, matrices.d, matrices.format, payloads)
            else:
                stream = self._stream.copy()
                stream.form.require(ChunkForm.of(matrices, payloads), "K")
            index = RowNumbers(self._next_row, matrices.n)
            if rounded:
                stream.expect_rounded()
            before = stream.seen
            try:
                stream.push(rows, index, *payloads)
            except FloatingPointError:
                refuse_nonfinite(rows, before)
            stream.present = stream.present + (matrices.n if rows.mask is None else present_rows(rows))
            self._go_on_with(stream, matrices.n)
        return self

    def _waits(self, K: npt.NDArray[Any]) -> bool:
        """Add a chunk of plain keys if it only has to wait, and tell so."""
        with lock_of(self):
            stream = None if self._stream is None else self._stream.with_chunk(K, self._next_row)
            if stream is not None:
                self._go_on_with(stream, K.shape[-2])
        return stream is not None

    def _go_on_with(self, stream: CandidateStore, n: int) -> None:
        """Take the store after `n` further rows, or raise without a change."""
        stop = self._next_row + n
        spans = with_span(self._spans, (self._next_row, stop))
        self._stream, self._spans, self._next_row = stream, spans, stop

    @locked_with
    def merge(self, other: StreamingUniversalSet) -> StreamingUniversalSet:
        """Add the rows of another state, none of which this state may have.

        Parameters
        ----------
        other : StreamingUniversalSet
            A state of the same ε, f, batch, number of columns and dtype. It is not changed.

        Returns
        -------
        StreamingUniversalSet
            The state itself, which now stands for the rows of both.

        Raises
        ------
        TypeError, ValueError
            If the states do not go together, or both have rows of the same numbers.

        Notes
        -----
        Time O(d³ + d³/ε), whatever the number of rows.
        """
        check_type("other", other, StreamingUniversalSet, "StreamingUniversalSet")
        if (other.epsilon, other.f) != (self.epsilon, self.f):
            raise ValueError(
                f"other has epsilon = {other.epsilon} and f = {other.f}; expected {self.epsilon} and {self.f}"
            )
        mine, theirs = self._settled(), other._settled()
        if theirs is None:
            return self
        shift = self._shift_of(other)
        spans = with_spans(self._spans, other._spans, shift)
        if mine is None:
            stream = CandidateStore(self.epsilon, self.f, theirs.batch, theirs.d, theirs.format, theirs.payload)
        else:
            stream = mine.copy()
            stream.form.require(theirs.form, "other")
        stream.merge(theirs, shift)
        self._placed |= other._placed
        self._stream, self._spans = stream, spans
        self._next_row = max(self._next_row, spans[-1][1]) if spans else self._next_row
        return self

    def _shift_of(self, other: StreamingUniversalSet) -> int:
        """Return the number to add to the row numbers of a merged state."""
        if not other._placed:
            return self._next_row
        if self._spans and not self._placed:
            raise ValueError(
                "other has rows with numbers of their own (row_start), and this state has not; expected both or "
                "neither. Make this one with row_start="
            )
        return 0

    def result(self) -> StreamedSet:
        """Return the universal set of the keys so far; the state goes on.

        Returns
        -------
        StreamedSet
            The set, its keys and their payload.

        Raises
        ------
        ValueError
            If there was no chunk yet, so that the shape of the keys is not known.

        Warns
        -----
        RankWarning
            If keys are rank-deficient up to rounding, and count as 1 in a set for x² that is larger than rank/ε.
        """
        with lock_of(self):
            stream, n = self._settled(), self.n
        if stream is None:
            raise ValueError("there was no chunk of keys yet; expected at least one update, if only with 0 rows")
        by, selected, counted = stream.judge()
        square = stream.candidates.running.certificate == "leverage"
        if self.f == Power(2.0) and counted:
            ones = np.array([np.count_nonzero(item.scores == 1) for item in selected]).reshape(stream.batch)

            def largest(number: int) -> tuple[Int64, Float64]:
                held = selected[number]
                return held.indices, np.abs(held.keys.astype(np.float64)).max(axis=1, initial=0.0)

            warn_of_rank(ones, by.factor, self.epsilon, chunks=True, largest=largest, stacklevel=3)
        rank = by.factor.rank.reshape(stream.batch) if stream.batch else int(by.factor.rank[0])
        return StreamedSet(
            items=tuple(selected),
            batch=stream.batch,
            n=n,
            present=stream.present.reshape(stream.batch),
            epsilon=self.epsilon,
            guarantee="exact" if square and not counted else "superset",
            f=self.f.p if isinstance(self.f, Power) else self.f,
            rank=rank,
            factor=by.factor,
            certificate=(stream.candidates.running.certificate,),
        )

    @locked
    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return rows, sums and candidates, as docs/design.md describes them; see `StoredState`."""
        if not self._saved_as:
            raise TypeError(f"f is {self.f!r}; only states of the functions of levattn can be saved")
        stream = self._settled()
        fields: dict[str, Any] = {"epsilon": self.epsilon, "f": self._saved_as, "placed": self._placed}
        fields |= {"next_row": self._next_row, "spans": self._spans, "begun": stream is not None}
        arrays: dict[str, npt.NDArray[Any]] = {}
        if stream is not None:
            more, arrays = stream.parts()
            fields |= more
        return fields, arrays

    @classmethod
    def from_parts(cls, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> StreamingUniversalSet:
        """Return the state of the same rows, sums and candidates; see `StoredState`."""
        name, parameters = fields["f"]
        self = cls(fields["epsilon"], f=FAMILIES[name](**parameters))
        self._placed, self._next_row = bool(fields["placed"]), whole(fields["next_row"])
        self._spans = stored_spans(fields["spans"], self._next_row)
        if fields["begun"]:
            self._stream = CandidateStore.from_parts(fields, arrays, self.epsilon, self.f)
            self._require_rows(self._stream)
        return self

    def _require_rows(self, stream: CandidateStore) -> None:
        """Raise ValueError if a stream has seen other rows than this state."""
        if max(stream.seen, getattr(stream.candidates.running, "merged", 0), stream.present.max(initial=0)) > self.n:
            raise ValueError("more keys take part than there were rows")
        for numbers in (stream.tail.payload[0], *(held.indices for held in stream.candidates.held.items)):
            if ((numbers < 0) | (numbers >= self._next_row)).any():
                raise ValueError("a key is held that has the number of no row")


def _saved_name(f: AttentionFunction | Softmax) -> list[Any]:
    """Return how a saved state names f, empty if it cannot."""
    name = type(f).__name__
    return [name, asdict(f)] if FAMILIES.get(name) is type(f) and is_dataclass(f) else []
