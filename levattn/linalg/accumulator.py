"""Second moments of blocks of keys as they come, in double-double arithmetic where float64 does not suffice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace, on_cuda, take_entries, to_device, to_numpy
from levattn._core.cached import cached_property
from levattn._core.device import where_arrays_are
from levattn._core.serialize import MOST_ROWS, shaped, whole
from levattn._core.types import Flags, Float64, Int64
from levattn._kernels import BLOCK, FACTOR, GRAM, KEYS, PRECISE, Arithmetic, Norms, PairwiseSum, Pieces, Rows
from levattn.linalg.reading import check_finite, each_in_memory, read_in_pieces, require_room
from levattn.linalg.span import Span

UNIT = 2.0**-53  # rounding of float64
PLAIN_ERROR = 2.5e-10  # estimated relative error of scores up to which moments are summed in float64
PLAIN_NOISE = 24 * UNIT  # error of such a sum, relative to the columns: the largest observed, for copied rows
SETTLED = PLAIN_ERROR / 4  # estimated error up to which sums in float64 begin
LARGEST_EXPONENT = 1024  # of the scale of a column
Exponents = npt.NDArray[np.int32]


def pieces_of(n: int, longest: int, shares: int = 1) -> tuple[list[tuple[int, int]], list[int]]:
    """Split `n` rows into runs of 2^j blocks each, with j at most `longest`.

    Return the runs (first row, row after the last) and their levels. An incomplete last block has level −1. A run is
    at most one of so many `shares` of the blocks that are left.
    """
    whole = n // BLOCK
    runs, levels, at = [], [], 0
    while at < whole:
        most = max(1, (whole - at) // shares)
        level = min(longest, most.bit_length() - 1, (at & -at).bit_length() - 1 if at else 63)
        runs.append((at * BLOCK, (at + (1 << level)) * BLOCK))
        levels.append(level)
        at += 1 << level
    if n % BLOCK:
        runs.append((whole * BLOCK, n))
        levels.append(-1)
    return runs, levels


def _cpu() -> Any:
    from levattn._kernels.gram import cpu  # loads Numba

    return cpu


def second_moments(
    rows: Rows, items: Sequence[int], *, basis: Float64 | None = None, arithmetic: Arithmetic = "double"
) -> Any:
    """Return ``Σ xᵀx`` over the rows x of each matrix of `items`, (s, d, d), in the one order of design rule 8.

    If given, an upper triangular `basis` (s, d, d) multiplies each row first. Sums of rows on a CUDA device stay
    there.
    """
    _, n, d = rows.shape
    longest = GRAM.longest_run(rows, len(items))
    if on_cuda(rows.keys) and 0 < n <= BLOCK << longest:  # a device adds up any number of blocks in the same order
        return GRAM.moments(rows, _whole_matrices(n, tuple(items)), basis=basis, arithmetic=arithmetic)
    shares = _cpu().shares(rows, len(items)) if isinstance(rows.keys, np.ndarray) else 1
    runs, levels = pieces_of(n, longest, shares)
    listed = [(slot, item, *run) for slot, item in enumerate(items) for run in runs]
    pieces: Pieces = np.array(listed, np.int64).reshape(-1, 4)
    whole: PairwiseSum[Any] = PairwiseSum(owned=True)
    tail = None
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the range
        parts = GRAM.moments(rows, pieces, basis=basis, arithmetic=arithmetic)
        if len(runs) == 1:
            return parts
        parts = parts.reshape(len(items), len(runs), d, d)
        for index, level in enumerate(levels):
            if level < 0:
                tail = parts[:, index]
            else:
                whole.add(parts[:, index], level)
        total = whole.total(tail)
    return np.zeros((len(items), d, d)) if total is None else total


@lru_cache(16)
def _whole_matrices(n: int, items: tuple[int, ...]) -> Pieces:
    """Return pieces, not to be written to, that are matrices of n rows each."""
    return np.array([(slot, item, 0, n) for slot, item in enumerate(items)], np.int64).reshape(-1, 4)


def diagonals(G: Float64) -> Float64:
    """Return the diagonal of each matrix of a batch."""
    return np.diagonal(G, axis1=1, axis2=2)


@dataclass(frozen=True, eq=False)
class DoubleDouble:
    """A batch of second moments; for ill-conditioned keys, each is the sum of two matrices."""

    high: Any  # (b, d, d) the moments; they may be on a CUDA device if none has a second part
    low: Float64 | None  # (b, d, d) the second parts; None stands for zeros
    double_double: Flags  # (b,) the items for which `low` counts; the others are plain sums of float64
    spans: tuple[Span, ...] = ()  # the exact row spaces of the items of a whole sum; () for a part of a sum
    known: Float64 | None = None  # (b, d) the diagonals of moments on a device, in main memory for decisions

    @classmethod
    def plain(cls, moments: Any, known: Float64 | None = None) -> DoubleDouble:
        """Return moments that have no second part."""
        if known is None and on_cuda(moments):
            known = to_numpy(moments.diagonal(axis1=1, axis2=2))
        return cls(moments, None, np.zeros(len(moments), np.bool_), (), known)

    @property
    def _held_array(self) -> Any:
        return self.high

    @cached_property
    def diagonal(self) -> Float64:
        """The diagonals of the moments, (b, d), in main memory."""
        return diagonals(self.high).copy() if self.known is None else self.known

    def in_main_memory(self) -> DoubleDouble:
        """Return these moments in main memory."""
        return self if self.known is None else self._fetched()

    @where_arrays_are
    def _fetched(self) -> DoubleDouble:
        return replace(self, high=to_numpy(self.high), known=None)

    def beside(self, array: Any) -> DoubleDouble:
        """Return these moments on the device of an array, but in main memory if some have two parts."""
        if not on_cuda(array) or self.low is not None:
            return self.in_main_memory()
        return self if self.known is not None else replace(self, high=to_device(self.high, array), known=self.diagonal)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, in main memory."""
        return {name: value for name, value in vars(self.in_main_memory()).items() if name != "diagonal"}

    def __add__(self, other: DoubleDouble) -> DoubleDouble:
        """Return the sum, in twofold arithmetic for items with two parts in either moment."""
        if (self.known is None) != (other.known is None):
            self, other = self.in_main_memory(), other.in_main_memory()
        either = self.double_double | other.double_double
        total = self.high + other.high
        if not either.any():
            known = None if self.known is None or other.known is None else self.known + other.known
            return DoubleDouble(total, None, either, (), known)
        part = total - self.high
        low = (self.high - (total - part)) + (other.high - part)
        for term in (self.low, other.low):
            if term is not None:
                low += term
        low[~either] = 0.0
        high = total + low
        return DoubleDouble(high, low - (high - total), either)

    @classmethod
    def from_arrays(cls, arrays: dict[str, npt.NDArray[Any]], name: str, b: int, d: int) -> DoubleDouble:
        """Return the moments whose parts have this name."""
        high, low = shaped(arrays[f"{name}.high"], np.float64, (b, d, d)), arrays.get(f"{name}.low")
        low = None if low is None else shaped(low, np.float64, (b, d, d))
        if (diagonals(high) < 0).any():
            raise ValueError("a second moment has a negative entry on its diagonal")
        spans = spans_of(arrays, name, b, d) if f"{name}.units" in arrays else ()
        return cls(high, low, shaped(arrays[f"{name}.wide"], np.bool_, (b,)), spans)

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Return the parts by name, from which `from_arrays` restores the moments."""
        high = self.in_main_memory().high
        held = {"high": high, "low": self.low, "wide": self.double_double}
        arrays = {f"{name}.{key}": value for key, value in held.items() if value is not None}
        return arrays | (span_arrays(self.spans, name) if self.spans else {})

    def scaled(self, change: Exponents) -> DoubleDouble:
        """Return the moments of columns divided by powers of two (b, d), in main memory unless all are one."""
        if not change.any():
            return self
        powers = -(change[:, :, None] + change[:, None, :])
        low = None if self.low is None else np.ldexp(self.low, powers)
        return replace(self, high=np.ldexp(self.in_main_memory().high, powers), low=low, known=None)

    def in_basis(self, item: int, B: Float64) -> Float64:
        """Return ``BᵀGB`` of one item, rounded at the end."""
        parts = (self.high[item],) if self.low is None else (self.high[item], self.low[item])
        Y = PRECISE.twofold_product([(part, B) for part in parts], len(B), symmetric=False)
        high, low = PRECISE.twofold_product([(B, part) for part in Y], len(B), symmetric=True)
        return np.asarray(high + low)

    def errors(self, items: Flags) -> Float64:
        """Estimate the relative error that rounding of sums of float64 brings into scores; 0 for other items."""
        errors = np.zeros(len(items))
        chosen = np.flatnonzero(items)
        some = self.high if items.all() else take_entries(self.high, chosen)
        found = FACTOR.inverse_cholesky(some, limit=SETTLED / PLAIN_NOISE)
        errors[chosen] = PLAIN_NOISE * found.bound
        return errors


def span_arrays(spans: tuple[Span, ...], name: str) -> dict[str, npt.NDArray[Any]]:
    """Return row spaces as arrays, from which `spans_of` restores them."""
    return {
        f"{name}.units": np.array([span.units for span in spans], np.bool_),
        f"{name}.ranks": np.array([len(span.rows) for span in spans], np.int64),
        f"{name}.rows": np.concatenate([span.rows for span in spans]) if spans else np.zeros((0, 0)),
    }


def spans_of(arrays: dict[str, npt.NDArray[Any]], name: str, b: int, d: int) -> tuple[Span, ...]:
    """Restore the row spaces from `span_arrays`, or raise ValueError."""
    units, ranks = shaped(arrays[f"{name}.units"], np.bool_, (b, d) if b else (0,)), arrays[f"{name}.ranks"]
    edges = np.cumsum(shaped(ranks, np.int64, (b,)))
    if (ranks < 0).any() or (ranks > d).any():
        raise ValueError("a row space has more dimensions than columns")
    rows = shaped(arrays[f"{name}.rows"], np.float64, (int(ranks.sum()), d) if b else (0, 0))
    parts = np.split(rows, edges[:-1]) if b else []
    return tuple(Span.checked(mine, part) for mine, part in zip(units, parts, strict=True))


_LEAST, _LARGEST = 2.0**-700, 2.0**900  # range in which squares, and the rounding errors of their sums, are sound
_LEVEL = 6  # of the longest run that is summed together; a run that must be split costs its time again
_PIECE_LEVEL = 2  # of the longest part of a run for one thread: it should still be in the cache when it is scored
_DEVICE_LEVEL = 10  # the same on a CUDA device, where each run costs a wait
_TOGETHER = 1 << 28  # at most this many bytes of the moments of several runs that a device finds at once
_MARGIN = 1.2  # by which later blocks may be larger than those before, so that a run of them is not split
_MOST = 1 << 20  # more blocks than a run has
_FEW = 4  # sums of runs, whose room a part of them may keep
_SURE = 2.0**-7  # estimated error of a score up to which columns are independent
_FAR = 300  # powers of two by which columns may be larger or smaller than the one taken out
Terms = dict[tuple[int, int], DoubleDouble]  # moments of runs, by their first row and level


class GramAccumulator:
    """The second moments of blocks of keys, precise enough for the scores of keys of any condition number.

    Sums are in float64 as long as it holds their digits. The error of a sum is relative to the sizes of the columns.
    So the error of a score is relative to the squared condition number of the columns scaled to equal size. This
    number can grow; the sums so far are then still good by themselves, and later sums are twofold. Each decision
    follows a block and rests on figures of the blocks so far, so it does not depend on how many come together.

    Where squares would leave the range, the sum divides columns by powers of two, `exponents` (b, d).

    Sums of rows on a CUDA device stay there while all of them are plain. Figures for decisions come to main memory.
    """

    def __init__(self, b: int, d: int) -> None:
        require_room(b, d)
        self.blocks: PairwiseSum[DoubleDouble] = PairwiseSum()
        self.merged: DoubleDouble | None = None
        self.exponents: Exponents = np.zeros((b, d), np.int32)
        self.double_double: Flags = np.zeros(b, np.bool_)  # the matrices whose next block is summed in it
        self.settled: Float64 = np.zeros((b, d))  # the diagonal when the error was last estimated
        self.room: Float64 = np.zeros(b)  # the factor by which it may grow before the next estimate
        self._largest: Float64 = np.zeros((b, d))  # and so the diagonal then; a column that was zero says nothing yet
        self._near = 0  # the number of blocks up to which there is surely room, if they are like those before
        self.spans = (Span.nothing(d),) * b

    def copy(self) -> GramAccumulator:
        """Return an independent copy."""
        other = GramAccumulator.__new__(GramAccumulator)
        other.__dict__.update(self.__dict__, blocks=self.blocks.copy())
        return other

    @property
    def _held_array(self) -> Any:
        return tuple(part.high for part in self.blocks.levels.values())

    def add(self, rows: Rows, terms: Terms | None = None) -> None:
        """Add whole blocks of rows, some of whose `terms_beside` may be known. After an error the sum is void."""
        at, n, smaller, exponents = 0, rows.shape[1], 0, self.exponents
        here = on_cuda(rows.keys)
        longest = _DEVICE_LEVEL if here else _LEVEL
        if any((part.known is not None) != here for part in self.blocks.levels.values()):
            self._move(lambda part: part.beside(rows.keys))
        if here:
            terms = self._terms_at_once(rows)
        while at < n:
            level = 0 if self.double_double.any() else _level(self.blocks.count, (n - at) // BLOCK, longest)
            while level and at + (BLOCK << level) == smaller:  # the rest of a run that was split
                level -= 1
            known = terms if terms is not None and self.exponents is exponents else {}
            if level and (at, level) not in known:
                level = self.fitting(1 << level).bit_length() - 1
            while not self._take(rows.between(at, at + (BLOCK << level)), level, known.get((at, level))):
                smaller = at + (BLOCK << level)
                level -= 1
            at += BLOCK << level

    def fitting(self, blocks: int) -> int:
        """Return for how many of some further blocks there is room if they are like those before, but at least 1."""
        if self.blocks.count + blocks <= self._near:
            return blocks
        diagonal = sum((part.diagonal for part in self.blocks.levels.values()), np.zeros_like(self._largest))
        growing, room = self._largest < _MOST * diagonal, float(_MOST)
        if growing.any():
            least = float(np.minimum.reduce(self._largest[growing] / diagonal[growing]))
            room = (least - 1) * self.blocks.count / _MARGIN
        self._near = self.blocks.count + min(int(room / 2), self.blocks.count)  # then it looks again
        return max(1, min(blocks, int(room)))

    def terms_beside(self, rows: Rows, scored: Rows, norms: Norms, out: Any) -> Terms:
        """Return the moments of the runs of whole blocks, in main memory, that `add` will sum.

        Write the `norms` of the same rows, as `scored` reads them, to `out` while they are in the cache.
        """
        (b, n, d), cpu = rows.shape, _cpu()  # no other device has this kernel
        first, turn = self.blocks.count, 1 << _LEVEL  # blocks after which the lengths of runs repeat
        first = min(first, turn + first % turn)
        runs, pieces, groups = _runs_of(first, n // BLOCK, cpu.shares(rows, b), cpu.unit_of(d))
        if b != 1:
            items = np.arange(b)[:, None, None]
            groups = (groups + len(pieces) * items * (1, 0)).reshape(-1, 2)
            pieces = (pieces + items * (1, 1, 0, 0)).reshape(-1, 4)
        parts = cpu.moments_and_sqnorms(self.scaled(rows), pieces, groups, scored, norms, out)
        if len(runs) == 1:
            return {runs[0]: DoubleDouble.plain(parts)}
        parts = parts.reshape(b, len(runs), d, d)  # a view would keep the sums of all runs
        return {run: DoubleDouble.plain(parts[:, i].copy()) for i, run in enumerate(runs)}

    def _terms_at_once(self, rows: Rows) -> Terms:
        """Return the moments of all runs of rows on a CUDA device that `add` will sum, with one wait.

        Return none if blocks are summed one by one, or would take too much memory together.
        """
        b, n, d = rows.shape
        longest, runs, pieces, at = GRAM.longest_run(rows, b), [], [], 0
        while at < n:
            level = _level(self.blocks.count + at // BLOCK, (n - at) // BLOCK, _DEVICE_LEVEL)
            mine = pieces_of(BLOCK << level, longest)[0]
            runs.append((at, level, len(mine)))
            pieces += [(0, item, at + low, at + high) for low, high in mine for item in range(b)]
            at += BLOCK << level
        if self.double_double.any() or not pieces or 8 * d * d * len(pieces) > _TOGETHER:
            return {}
        with np.errstate(over="ignore", invalid="ignore"):
            sums, parts, place = GRAM.moments(self.scaled(rows), np.array(pieces, np.int64)), [], 0
            sums = sums.reshape(-1, b, d, d)
            for _, _, count in runs:
                part, place = sums[place : place + count], place + count
                while len(part) > 1:
                    part = part[::2] + part[1::2]
                part = part.copy() if count == 1 and len(sums) > _FEW else part  # a view keeps the sums of all runs
                parts.append(part.reshape(b, d, d))
        diagonal = to_numpy(array_namespace(sums).stack([part.diagonal(axis1=1, axis2=2) for part in parts]))
        found = zip(runs, parts, diagonal, strict=True)
        return {(at, level): DoubleDouble.plain(part, known) for (at, level, _), part, known in found}

    def _move(self, moved: Callable[[DoubleDouble], DoubleDouble]) -> None:
        """Move the sums of blocks."""
        self.blocks = PairwiseSum(self.blocks.count, {k: moved(part) for k, part in self.blocks.levels.items()})

    def scaled(self, rows: Rows) -> Rows:
        """Return the rows as the sum reads them."""
        return replace(rows, scale=np.ldexp(1.0, -self.exponents)) if self.exponents.any() else rows

    def _take(self, run: Rows, level: int, term: DoubleDouble | None = None) -> bool:
        """Add a run of 2^level blocks, or return False if it must be split into smaller runs."""
        term = term or self._term(run)
        far = self._far(run, term)
        if far is not None:
            if level:
                return False
            self._rescale(far)
            term = self._term(run)
        if self.double_double.any():
            term = self._in_double_double(term, run, self.double_double)
        blocks = self.blocks.copy()
        blocks.add(term, level)
        diagonal = sum(part.diagonal for _, part in sorted(blocks.levels.items()))
        errors, within = None, diagonal <= self._largest
        if not within.all() or self.double_double.any():
            due = self.double_double | ~within.all(axis=1)
            if level:
                return False
            errors = self._settle(blocks, term, run, due)
        else:
            self.blocks = blocks
        self._cover(run, np.asarray(diagonal), self.blocks.total, errors)
        return True

    def _cover(
        self, rows: Rows, diagonal: Float64, total: Callable[[], DoubleDouble | None], errors: Float64 | None = None
    ) -> None:
        """Extend the row spaces by rows; `total` gives the moments, of this diagonal, of all rows not merged.

        `errors` are the errors of these moments or bounds of them, if known.
        """
        if all(span.whole for span in self.spans):
            return
        live = diagonal > 0
        if self.merged is not None:
            live |= self.merged.diagonal > 0
        ranks = np.array([span.rank for span in self.spans], np.int64)
        missing = np.count_nonzero(live, axis=1) > ranks
        if not missing.any():
            return
        spans, new = list(self.spans), missing & (ranks == 0)
        if errors is None:
            moments = total() if new.any() else None
            errors = np.full(len(new), np.inf) if moments is None else moments.errors(new)
        sure = missing & new & (errors <= _SURE)  # well-conditioned: their columns are independent
        for item in np.flatnonzero(sure).tolist():
            spans[item] = replace(spans[item], units=live[item])
        for item, one in each_in_memory(rows, np.flatnonzero(missing & ~sure)):
            spans[item] = spans[item].extended(one)
        self.spans = tuple(spans)

    def _settle(self, blocks: PairwiseSum[DoubleDouble], term: DoubleDouble, run: Rows, due: Flags) -> Float64 | None:
        """Add one block, and decide in which arithmetic the sum continues for the items that are due.

        Return bounds of the errors of the sum, or None if some of it became twofold.
        """
        total = blocks.total()
        if total is None:
            raise AssertionError("a sum of no blocks")
        errors = total.errors(due)
        twofold = (errors > SETTLED) & ~self.double_double
        if twofold.any():
            blocks = self.blocks.copy()
            blocks.add(self._in_double_double(term, run, twofold))
        settled = due & (errors <= SETTLED)
        with np.errstate(divide="ignore"):
            self.room = np.where(settled, PLAIN_ERROR / errors, self.room)
        self._set_room(np.where(settled[:, None], total.diagonal, self.settled))
        self.double_double = (self.double_double | twofold) & ~settled
        self.blocks = blocks
        return None if twofold.any() else np.where(due, errors, np.inf)

    def _set_room(self, settled: Float64) -> None:
        """Set the diagonal at the last estimate, after which the sum has `room`."""
        with np.errstate(over="ignore", invalid="ignore"):
            self.settled, self._largest = settled, np.where(settled > 0, settled * self.room[:, None], 0.0)

    def _term(self, run: Rows) -> DoubleDouble:
        with np.errstate(over="ignore", invalid="ignore"):
            return DoubleDouble.plain(second_moments(self.scaled(run), range(run.shape[0])))

    def _in_double_double(self, term: DoubleDouble, run: Rows, items: Flags) -> DoubleDouble:
        """Return the term with the moments of some items summed in twofold arithmetic."""
        term = term.in_main_memory()
        high = term.high.copy()
        low = np.zeros_like(high) if term.low is None else term.low.copy()
        for item, one in each_in_memory(self.scaled(run), np.flatnonzero(items)):
            pairs = ((X, X) for X in read_in_pieces(one))
            high[item], low[item] = PRECISE.twofold_product(pairs, run.shape[2], symmetric=True)
        return DoubleDouble(high, low, term.double_double | items)

    def _far(self, run: Rows, term: DoubleDouble) -> Exponents | None:
        """Return other exponents if squares of this run leave the range, else None."""
        diagonal = term.diagonal
        least = np.minimum.reduce(diagonal, axis=None, initial=1.0)  # in half of the time of `min`
        if least >= _LEAST and np.maximum.reduce(diagonal, axis=None, initial=1.0) <= _LARGEST:
            return None
        check_finite(run, diagonal)
        largest = KEYS.column_figures(run, largest=True)
        found = np.clip(np.frexp(largest)[1], -1020, 1020).astype(np.int32)
        above = found - self.exponents
        far = (largest > 0) & ((above > _FAR) | ((above < -_FAR) & ~self._seen()))
        return np.where(far, found, self.exponents) if far.any() else None

    def _rescale(self, exponents: Exponents) -> None:
        change = exponents - self.exponents
        self._move(lambda part: part.scaled(change))
        self.merged = None if self.merged is None else self.merged.scaled(change)
        self._set_room(np.ldexp(self.settled, -2 * change))
        self.exponents = exponents

    @where_arrays_are
    def total(self, tail: Rows, *, twofold: bool = False) -> tuple[DoubleDouble, Exponents]:
        """Return the moments of all blocks, of merged sums and of fewer rows than a block, and the exponents.

        The sum is twofold if asked for, or where float64 would not hold the digits of these rows.
        """
        if not tail.shape[1]:
            moments = self.blocks.total() or self.merged
            if moments is None:
                moments = DoubleDouble.plain(np.zeros((*self.exponents.shape, self.exponents.shape[1])))
            elif self.merged is not None and moments is not self.merged:
                moments = moments + self.merged
            return replace(moments, spans=self.spans), self.exponents
        whole = self.copy()
        term = whole._term(tail)
        far = whole._far(tail, term)
        if far is not None:
            whole._rescale(far)
            term = whole._term(tail)
        held = next(iter(whole.blocks.levels.values()), term)
        moments = whole._with(term.beside(held.high))
        bad = np.ones(len(term.double_double), np.bool_)
        if not twofold:
            bad = moments.errors(bad) > PLAIN_ERROR
        if bad.any():
            moments = whole._with(whole._in_double_double(term, tail, bad))
        whole._cover(tail, moments.diagonal, lambda: moments)
        return replace(moments, spans=whole.spans), whole.exponents

    def _with(self, tail: DoubleDouble) -> DoubleDouble:
        """Return the sum of all, in the order of `second_moments`."""
        total = self.blocks.total(tail) or tail
        return total if self.merged is None else total + self.merged

    def merge(self, other: DoubleDouble, exponents: Exponents) -> None:
        """Add the total of another sum."""
        both = np.where(self._seen() & (self.exponents > exponents), self.exponents, exponents)
        both = np.where(other.diagonal > 0, both, self.exponents).astype(np.int32)
        self._rescale(both)
        other, spans = other.scaled(both - exponents), other.spans
        high = other.in_main_memory().high
        low = np.zeros_like(high) if other.low is None else other.low
        other = DoubleDouble(high, low, np.ones(len(other.double_double), np.bool_))
        self.merged = other if self.merged is None else self.merged + other
        self.spans = tuple(mine + its for mine, its in zip(self.spans, spans, strict=True))

    def merge_rows(self, rows: Rows) -> None:
        """Add the total of fewer rows than a block, as `merge` does, in twofold arithmetic."""
        b, _, d = rows.shape
        if all(span.whole for span in self.spans):
            nothing = DoubleDouble.plain(np.empty((b, d, d)))
            term = self._in_double_double(nothing, rows, ~nothing.double_double)
            if np.isfinite(term.high).all() and self._far(rows, term) is None:
                self.merged = term if self.merged is None else self.merged + term
                return
        self.merge(*GramAccumulator(b, d).total(rows, twofold=True))

    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return the fields and arrays of the sum; `from_parts` restores it."""
        arrays = {"exponents": self.exponents, "wide": self.double_double, "settled": self.settled, "room": self.room}
        held = {str(level): part for level, part in sorted(self.blocks.levels.items())}
        if self.merged is not None:
            held["merged"] = self.merged
        for name, part in held.items():
            arrays |= part.arrays(name)
        arrays |= span_arrays(self.spans, "sum")
        return {"blocks": self.blocks.count, "terms": list(held)}, arrays

    @classmethod
    def from_parts(
        cls, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], b: int, d: int
    ) -> GramAccumulator:
        """Restore the sum from `parts`, or raise ValueError, TypeError or LookupError."""
        self, blocks = cls(b, d), whole(fields["blocks"], most=MOST_ROWS // BLOCK)
        self.exponents = shaped(arrays["exponents"], np.int32, (b, d))
        self.double_double = shaped(arrays["wide"], np.bool_, (b,))
        self.room = shaped(arrays["room"], np.float64, (b,), finite=False)
        self._set_room(shaped(arrays["settled"], np.float64, (b, d)))
        terms = {name: DoubleDouble.from_arrays(arrays, name, b, d) for name in fields["terms"]}
        self.merged = terms.pop("merged", None)
        levels = {int(name): part for name, part in terms.items() if name in map(str, range(63))}
        if len(levels) < len(terms) or sum(1 << level for level in levels) != blocks:
            raise ValueError(f"{blocks} blocks are not the sum of the levels {list(terms)}")
        largest = np.abs(self.exponents.astype(np.int64)).max(initial=0)
        if largest > LARGEST_EXPONENT or not (self.settled >= 0).all() or not (self.room >= 0).all():
            raise ValueError("exponents, or diagonals or room of sums, are out of range")
        self.blocks, self.spans = PairwiseSum(blocks, levels), spans_of(arrays, "sum", b, d)
        return self

    def _seen(self) -> Flags:
        """Return which columns have had an entry that is not zero, (b, d)."""
        seen = np.zeros(self.exponents.shape, np.bool_)
        for part in (*self.blocks.levels.values(), *([] if self.merged is None else [self.merged])):
            seen |= part.diagonal > 0
        return seen


Total = tuple[DoubleDouble, Exponents]


def total_arrays(name: str, total: Total | None) -> dict[str, npt.NDArray[Any]]:
    """Return the total of a sum as arrays, from which `total_of` restores it; none of them for no total."""
    return {} if total is None else total[0].arrays(name) | {f"{name}.exponents": total[1]}


def total_of(arrays: dict[str, npt.NDArray[Any]], name: str, b: int, d: int) -> Total | None:
    """Restore a total from `total_arrays`, or raise ValueError or LookupError."""
    if f"{name}.high" not in arrays:
        return None
    exponents = shaped(arrays[f"{name}.exponents"], np.int32, (b, d))
    if np.abs(exponents.astype(np.int64)).max(initial=0) > LARGEST_EXPONENT:
        raise ValueError("the exponents of a sum are out of range")
    return DoubleDouble.from_arrays(arrays, name, b, d), exponents


def _level(first: int, left: int, longest: int) -> int:
    """Return the level of the run to add next, after `first` blocks, where `left` have come."""
    return min(left.bit_length() - 1, (first & -first).bit_length() - 1, longest) if first else 0


@lru_cache(maxsize=256)
def _runs_of(first: int, blocks: int, shares: int, unit: int) -> tuple[list[tuple[int, int]], Pieces, Int64]:
    """Return the runs of so many blocks after `first`, by first row and level, and their pieces for the first matrix.

    The pieces of each run follow as its first piece and their number. A piece has at least `unit` rows, but at most
    one of so many `shares` of the rows that are left.
    """
    runs: list[tuple[int, int]] = []
    pieces: list[tuple[int, int, int, int]] = []
    groups, at = [], 0
    while at < blocks:
        level = _level(first + at, blocks - at, _LEVEL)
        begin, low, before = at * BLOCK, 0, len(pieces)
        at += 1 << level
        while begin + low < at * BLOCK:
            size = min(BLOCK << min(level, _PIECE_LEVEL), low & -low or BLOCK << level)
            while size > unit and size * shares > blocks * BLOCK - begin - low:
                size //= 2
            pieces.append((0, 0, begin + low, begin + low + size))
            low += size
        groups.append((before, len(pieces) - before))
        runs.append((begin, level))
    return runs, np.array(pieces), np.array(groups)
