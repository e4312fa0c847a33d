"""Second moments of blocks of keys as they come, in numbers of several parts where float64 does not suffice."""

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
_SURE_BOUND = 2.0**40  # of the inverse, up to which two parts hold what there is; float64 tells it well enough
LARGEST_EXPONENT = 1024  # of the scale of a column
Exponents = npt.NDArray[np.int32]
Folds = npt.NDArray[np.int8]


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
class Expansion:
    """A batch of second moments, each the sum of one to three matrices: floating-point expansions.

    Rounding errors of the sum of two parts are relative to the sizes of columns: 2⁻⁹⁴, and of three 2⁻¹⁴⁴. Sums that
    had fewer parts before were as precise as the moments so far required.
    """

    high: Any  # (b, d, d) the moments; they may be on a CUDA device if none has a second part
    rest: Float64 | None  # (k, b, d, d) one or two further parts; None stands for zeros
    folds: Folds  # (b,) the number of parts that count for an item
    spans: tuple[Span, ...] = ()  # the exact row spaces of the items of a whole sum; () for a part of a sum
    known: Float64 | None = None  # (b, d) the diagonals of moments on a device, in main memory for decisions
    rounded: bool = False  # whether rows were rounded before they came, so that the last digits tell nothing of keys

    @classmethod
    def plain(cls, moments: Any, known: Float64 | None = None) -> Expansion:
        """Return moments that have one part."""
        if known is None and on_cuda(moments):
            known = to_numpy(moments.diagonal(axis1=1, axis2=2))
        return cls(moments, None, np.ones(len(moments), np.int8), (), known)

    @property
    def _held_array(self) -> Any:
        return self.high

    @cached_property
    def diagonal(self) -> Float64:
        """The diagonals of the moments, (b, d), in main memory."""
        return diagonals(self.high).copy() if self.known is None else self.known

    def in_main_memory(self) -> Expansion:
        """Return these moments in main memory."""
        return self if self.known is None else self._fetched()

    @where_arrays_are
    def _fetched(self) -> Expansion:
        return replace(self, high=to_numpy(self.high), known=None)

    def beside(self, array: Any) -> Expansion:
        """Return these moments on the device of an array, but in main memory if some have several parts."""
        if not on_cuda(array) or self.rest is not None:
            return self.in_main_memory()
        return self if self.known is not None else replace(self, high=to_device(self.high, array), known=self.diagonal)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, in main memory."""
        return {name: value for name, value in vars(self.in_main_memory()).items() if name != "diagonal"}

    def __add__(self, other: Expansion) -> Expansion:
        """Return the sum, in as many parts as the moment of each item that has more."""
        if (self.known is None) != (other.known is None):
            self, other = self.in_main_memory(), other.in_main_memory()
        folds = np.maximum(self.folds, other.folds)
        total = self.high + other.high
        if not _several(folds):
            known = None if self.known is None or other.known is None else self.known + other.known
            return Expansion(total, None, folds, (), known)
        rest = np.zeros((int(folds.max()) - 1, *total.shape))
        for fold in (2, 3):
            items = np.flatnonzero(folds == fold)
            if len(items):
                parts = _exact_sum_of(self.parts(items, fold), other.parts(items, fold))
                total[items], rest[: fold - 1, items] = parts[0], parts[1:]
        return Expansion(total, rest, folds)

    def parts(self, items: Any, fold: int) -> Float64:
        """Return so many parts of some items, (fold, k, d, d)."""
        out = np.zeros((fold, *self.high[items].shape))
        out[0] = self.high[items]
        if self.rest is not None:
            held = self.rest[: fold - 1, items]
            out[1 : 1 + len(held)] = held
        return out

    @classmethod
    def from_arrays(cls, arrays: dict[str, npt.NDArray[Any]], name: str, b: int, d: int) -> Expansion:
        """Return the moments whose parts have this name."""
        high, rest = shaped(arrays[f"{name}.high"], np.float64, (b, d, d)), arrays.get(f"{name}.rest")
        folds = folds_of(arrays, f"{name}.folds", b)
        rest = None if rest is None else shaped(rest, np.float64, (2 if len(rest) == 2 else 1, b, d, d))
        if (diagonals(high) < 0).any():
            raise ValueError("a second moment has a negative entry on its diagonal")
        if f"{name}.units" not in arrays:
            return cls(high, rest, folds)
        return cls(high, rest, folds, spans_of(arrays, name, b, d), None, _flag(arrays[f"{name}.rounded"]))

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Return the parts by name, from which `from_arrays` restores the moments."""
        high, rest = self.in_main_memory().high, self.rest
        rest = rest if rest is None or rest[1:].any() else rest[:1]
        held = {"high": high, "rest": rest, "folds": self.folds}
        arrays = {f"{name}.{key}": value for key, value in held.items() if value is not None}
        if self.spans:
            arrays |= span_arrays(self.spans, name) | {f"{name}.rounded": np.array(self.rounded)}
        return arrays

    def scaled(self, change: Exponents) -> Expansion:
        """Return the moments of columns divided by powers of two (b, d), in main memory unless all are one."""
        if not change.any():
            return self
        powers = -(change[:, :, None] + change[:, None, :])
        rest = None if self.rest is None else np.ldexp(self.rest, powers)
        return replace(self, high=np.ldexp(self.in_main_memory().high, powers), rest=rest, known=None)

    def in_basis(self, item: int, B: Float64) -> Float64:
        """Return ``BᵀGB`` of one item, rounded at the end."""
        fold = max(2, int(self.folds[item]))
        Y = PRECISE.expanded_product(
            [(part, B) for part in self.parts(item, fold)], len(B), symmetric=False, folds=fold
        )
        H = PRECISE.expanded_product([(B, part) for part in Y], len(B), symmetric=True, folds=fold)
        return np.asarray(H[0] + (H[1] if fold == 2 else H[1] + H[2]))

    def errors(self, items: Flags) -> Float64:
        """Estimate the relative error that rounding of sums of float64 brings into scores; 0 for other items."""
        errors = np.zeros(len(items))
        chosen = np.flatnonzero(items)
        some = self.high if items.all() else take_entries(self.high, chosen)
        found = FACTOR.inverse_cholesky(some, limit=SETTLED / PLAIN_NOISE)
        errors[chosen] = PLAIN_NOISE * found.bound
        return errors


def _exact_sum_of(one: Float64, other: Float64) -> list[Float64]:
    """Return the parts of the sum of two expansions, (k, ...): only rounding of the last parts is lost."""

    def exact_sum(a: Float64, b: Float64) -> tuple[Float64, Float64]:
        total = a + b
        part = total - a
        return total, (a - (total - part)) + (b - part)

    parts, carried = list(one), list[Float64]()
    for at in range(len(parts) - 1):
        rests = []
        for term in (other[at], *carried):
            parts[at], rest = exact_sum(parts[at], term)
            rests.append(rest)
        carried = rests
    for term in (other[-1], *carried):
        parts[-1] = parts[-1] + term
    for _ in range(len(parts) - 1):
        for at in range(len(parts) - 1, 0, -1):
            parts[at - 1], parts[at] = exact_sum(parts[at - 1], parts[at])
    return parts


def _folds_for(errors: Float64, most: float) -> Folds:
    """Return how many parts sums take whose estimated error would be so large in float64: one up to `most`."""
    return np.asarray(1 + (errors > most) + ~(errors <= PLAIN_NOISE * _SURE_BOUND), np.int8)


def _several(folds: Folds) -> bool:
    return bool((folds > 1).any())


def _flag(array: npt.NDArray[Any]) -> bool:
    return bool(shaped(array, np.bool_, ()))


def folds_of(arrays: dict[str, npt.NDArray[Any]], name: str, b: int) -> Folds:
    """Restore numbers of parts, or raise ValueError."""
    folds = shaped(arrays[name], np.int8, (b,))
    if ((folds < 1) | (folds > 3)).any():
        raise ValueError(f"a moment has {folds.max()} parts")
    return folds


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
Terms = dict[tuple[int, int], Expansion]  # moments of runs, by their first row and level


class GramAccumulator:
    """The second moments of blocks of keys, precise enough for the scores of keys of any condition number.

    Sums are in float64 as long as it holds their digits. The error of a sum is relative to the sizes of the columns.
    So the error of a score is relative to the squared condition number of the columns scaled to equal size. This
    number can grow; the sums so far are then still good by themselves, and later sums have two parts, or three. Each
    decision follows a block and rests on figures of the blocks so far, so it does not depend on how many come
    together.

    Where squares would leave the range, the sum divides columns by powers of two, `exponents` (b, d).

    Sums of rows on a CUDA device stay there while all of them are plain. Figures for decisions come to main memory.
    """

    def __init__(self, b: int, d: int, *, rounded: bool = False) -> None:
        require_room(b, d)
        self.rounded = rounded
        self.blocks: PairwiseSum[Expansion] = PairwiseSum()
        self.merged: Expansion | None = None
        self.exponents: Exponents = np.zeros((b, d), np.int32)
        self.folds: Folds = np.ones(b, np.int8)  # the number of parts in which the next block of a matrix is summed
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
            level = 0 if self.several else _level(self.blocks.count, (n - at) // BLOCK, longest)
            while level and at + (BLOCK << level) == smaller:  # the rest of a run that was split
                level -= 1
            known = terms if terms is not None and self.exponents is exponents else {}
            if level and (at, level) not in known:
                level = self.fitting(1 << level).bit_length() - 1
            while not self._take(rows.between(at, at + (BLOCK << level)), level, known.get((at, level))):
                smaller = at + (BLOCK << level)
                level -= 1
            at += BLOCK << level

    @property
    def several(self) -> bool:
        """Whether the next block of some matrix is summed in several parts."""
        return _several(self.folds)

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
            return {runs[0]: Expansion.plain(parts)}
        parts = parts.reshape(b, len(runs), d, d)  # a view would keep the sums of all runs
        return {run: Expansion.plain(parts[:, i].copy()) for i, run in enumerate(runs)}

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
        if self.several or not pieces or 8 * d * d * len(pieces) > _TOGETHER:
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
        return {(at, level): Expansion.plain(part, known) for (at, level, _), part, known in found}

    def _move(self, moved: Callable[[Expansion], Expansion]) -> None:
        """Move the sums of blocks."""
        self.blocks = PairwiseSum(self.blocks.count, {k: moved(part) for k, part in self.blocks.levels.items()})

    def scaled(self, rows: Rows) -> Rows:
        """Return the rows as the sum reads them."""
        return replace(rows, scale=np.ldexp(1.0, -self.exponents)) if self.exponents.any() else rows

    def _take(self, run: Rows, level: int, term: Expansion | None = None) -> bool:
        """Add a run of 2^level blocks, or return False if it must be split into smaller runs."""
        term = term or self._term(run)
        far = self._far(run, term)
        if far is not None:
            if level:
                return False
            self._rescale(far)
            term = self._term(run)
        if self.several:
            term = self._expanded(term, run, self.folds)
        blocks = self.blocks.copy()
        blocks.add(term, level)
        diagonal = sum(part.diagonal for _, part in sorted(blocks.levels.items()))
        errors, within = None, diagonal <= self._largest
        if not within.all() or self.several:
            due = (self.folds > 1) | ~within.all(axis=1)
            if level:
                return False
            errors = self._settle(blocks, term, run, due)
        else:
            self.blocks = blocks
        self._cover(run, np.asarray(diagonal), self.blocks.total, errors)
        return True

    def _cover(
        self, rows: Rows, diagonal: Float64, total: Callable[[], Expansion | None], errors: Float64 | None = None
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

    def _settle(self, blocks: PairwiseSum[Expansion], term: Expansion, run: Rows, due: Flags) -> Float64 | None:
        """Add one block, and decide in which arithmetic the sum continues for the items that are due.

        Return bounds of the errors of the sum, or None if some of it takes more parts from this block on.
        """
        total = blocks.total()
        if total is None:
            raise AssertionError("a sum of no blocks")
        errors = total.errors(due)
        folds = np.where(due, _folds_for(errors, SETTLED), self.folds)
        more = folds > self.folds
        if more.any():
            blocks = self.blocks.copy()
            blocks.add(self._expanded(term, run, np.where(more, folds, 1)))
        settled = due & (folds == 1)
        with np.errstate(divide="ignore"):
            self.room = np.where(settled, PLAIN_ERROR / errors, self.room)
        self._set_room(np.where(settled[:, None], total.diagonal, self.settled))
        self.folds, self.blocks = folds, blocks
        return None if more.any() else np.where(due, errors, np.inf)

    def _set_room(self, settled: Float64) -> None:
        """Set the diagonal at the last estimate, after which the sum has `room`."""
        with np.errstate(over="ignore", invalid="ignore"):
            self.settled, self._largest = settled, np.where(settled > 0, settled * self.room[:, None], 0.0)

    def _term(self, run: Rows) -> Expansion:
        with np.errstate(over="ignore", invalid="ignore"):
            return Expansion.plain(second_moments(self.scaled(run), range(run.shape[0])))

    def _expanded(self, term: Expansion, run: Rows, folds: Folds) -> Expansion:
        """Return the term with moments summed in so many parts, for the items for which these are more than one."""
        term = term.in_main_memory()
        items, held = np.flatnonzero(folds > 1), 0 if term.rest is None else len(term.rest)
        high, rest = term.high.copy(), np.zeros((max(held, int(folds.max(initial=1)) - 1), *term.high.shape))
        if term.rest is not None:
            rest[:held] = term.rest
        for item, one in each_in_memory(self.scaled(run), items):
            pairs, fold = ((X, X) for X in read_in_pieces(one)), int(folds[item])
            parts = PRECISE.expanded_product(pairs, run.shape[2], symmetric=True, folds=fold)
            high[item], rest[: fold - 1, item] = parts[0], parts[1:]
        return Expansion(high, rest, np.where(folds > 1, folds, term.folds))

    def _far(self, run: Rows, term: Expansion) -> Exponents | None:
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
    def total(self, tail: Rows, *, folds: int = 1) -> tuple[Expansion, Exponents]:
        """Return the moments of all blocks, of merged sums and of fewer rows than a block, and the exponents.

        These rows are summed in at least so many parts, and in more where float64 would not hold their digits.
        """
        if not tail.shape[1]:
            moments = self.blocks.total() or self.merged
            if moments is None:
                moments = Expansion.plain(np.zeros((*self.exponents.shape, self.exponents.shape[1])))
            elif self.merged is not None and moments is not self.merged:
                moments = moments + self.merged
            return replace(moments, spans=self.spans, rounded=self.rounded), self.exponents
        whole = self.copy()
        term = whole._term(tail)
        far = whole._far(tail, term)
        if far is not None:
            whole._rescale(far)
            term = whole._term(tail)
        held = next(iter(whole.blocks.levels.values()), term)
        moments = whole._with(term.beside(held.high))
        needed = np.full(len(term.folds), folds, np.int8)
        if folds < 3:
            needed = np.maximum(needed, _folds_for(moments.errors(needed > 0), PLAIN_ERROR))
        if _several(needed):
            moments = whole._with(whole._expanded(term, tail, needed))
        whole._cover(tail, moments.diagonal, lambda: moments)
        return replace(moments, spans=whole.spans, rounded=self.rounded), whole.exponents

    def _with(self, tail: Expansion) -> Expansion:
        """Return the sum of all, in the order of `second_moments`."""
        total = self.blocks.total(tail) or tail
        return total if self.merged is None else total + self.merged

    def merge(self, other: Expansion, exponents: Exponents) -> None:
        """Add the total of another sum."""
        both = np.where(self._seen() & (self.exponents > exponents), self.exponents, exponents)
        both = np.where(other.diagonal > 0, both, self.exponents).astype(np.int32)
        self._rescale(both)
        other, spans, self.rounded = other.scaled(both - exponents), other.spans, self.rounded or other.rounded
        high = other.in_main_memory().high
        rest = np.zeros((2, *high.shape))  # so that the order of merges makes no visible difference
        if other.rest is not None:
            rest[: len(other.rest)] = other.rest
        other = Expansion(high, rest, np.full(len(high), 3, np.int8))
        self.merged = other if self.merged is None else self.merged + other
        self.spans = tuple(mine + its for mine, its in zip(self.spans, spans, strict=True))

    def merge_rows(self, rows: Rows) -> None:
        """Add the total of fewer rows than a block, as `merge` does, in three parts."""
        b, _, d = rows.shape
        if all(span.whole for span in self.spans):
            term = self._expanded(Expansion.plain(np.empty((b, d, d))), rows, np.full(b, 3, np.int8))
            if np.isfinite(term.high).all() and self._far(rows, term) is None:
                self.merged = term if self.merged is None else self.merged + term
                return
        self.merge(*GramAccumulator(b, d).total(rows, folds=3))

    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return the fields and arrays of the sum; `from_parts` restores it."""
        arrays: dict[str, npt.NDArray[Any]] = {"exponents": self.exponents, "folds": self.folds}
        arrays |= {"settled": self.settled, "room": self.room}
        held = {str(level): part for level, part in sorted(self.blocks.levels.items())}
        if self.merged is not None:
            held["merged"] = self.merged
        for name, part in held.items():
            arrays |= part.arrays(name)
        arrays |= span_arrays(self.spans, "sum") | {"rounded": np.array(self.rounded)}
        return {"blocks": self.blocks.count, "terms": list(held)}, arrays

    @classmethod
    def from_parts(
        cls, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], b: int, d: int
    ) -> GramAccumulator:
        """Restore the sum from `parts`, or raise ValueError, TypeError or LookupError."""
        self, blocks = cls(b, d, rounded=_flag(arrays["rounded"])), whole(fields["blocks"], most=MOST_ROWS // BLOCK)
        self.exponents = shaped(arrays["exponents"], np.int32, (b, d))
        self.folds = folds_of(arrays, "folds", b)
        self.room = shaped(arrays["room"], np.float64, (b,), finite=False)
        self._set_room(shaped(arrays["settled"], np.float64, (b, d)))
        terms = {name: Expansion.from_arrays(arrays, name, b, d) for name in fields["terms"]}
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


Total = tuple[Expansion, Exponents]


def rounded_total(total: Total) -> Total:
    """Return a total whose last digits tell nothing of keys."""
    return replace(total[0], rounded=True), total[1]


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
    return Expansion.from_arrays(arrays, name, b, d), exponents


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
