"""Second moments in float64, and in two parts where float64 does not suffice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import on_cuda, take_entries, to_device, to_numpy
from levattn._core.device import where_arrays_are
from levattn._core.serialize import shaped
from levattn._core.types import Flags, Float64
from levattn._kernels import BLOCK, Arithmetic, PairwiseSum, Pieces, Rows, kernels_for
from levattn.linalg.span import Span

UNIT = 2.0**-53  # rounding of float64
PLAIN_ERROR = 2.5e-10  # estimated relative error of scores up to which moments are summed in float64
PLAIN_NOISE = 24 * UNIT  # error of such a sum, relative to the columns: the largest observed, for copied rows
SETTLED = PLAIN_ERROR / 4  # estimated error up to which sums in float64 begin
LARGEST_EXPONENT = 1024  # of the scale of a column
Exponents = npt.NDArray[np.int32]


def pieces_of(n: int, longest: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Split `n` rows into runs of whole powers of two of blocks, of a level of at most `longest`.

    Return the runs (first row, row after the last) and their levels. An incomplete last block has level −1.
    """
    whole = n // BLOCK
    runs, levels, at = [], [], 0
    while at < whole:
        level = min(longest, (whole - at).bit_length() - 1, (at & -at).bit_length() - 1 if at else 63)
        runs.append((at * BLOCK, (at + (1 << level)) * BLOCK))
        levels.append(level)
        at += 1 << level
    if n % BLOCK:
        runs.append((whole * BLOCK, n))
        levels.append(-1)
    return runs, levels


def second_moments(
    rows: Rows, items: Sequence[int], *, basis: Float64 | None = None, arithmetic: Arithmetic = "double"
) -> Any:
    """Return ``Σ xᵀx`` over the rows x of each matrix of `items`, (s, d, d), in the one order of design rule 8.

    If given, an upper triangular `basis` (s, d, d) multiplies each row first. Sums of rows on a CUDA device stay
    there.
    """
    _, n, d = rows.shape
    kernels = kernels_for("gram", rows.keys)
    runs, levels = pieces_of(n, kernels.longest_run(rows, len(items)))
    listed = [(slot, item, *run) for slot, item in enumerate(items) for run in runs]
    pieces: Pieces = np.array(listed, np.int64).reshape(-1, 4)
    whole: PairwiseSum[Any] = PairwiseSum(owned=True)
    tail = None
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the range
        parts = kernels.moments(rows, pieces, basis=basis, arithmetic=arithmetic)
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

    @property
    def diagonal(self) -> Float64:
        """The diagonals of the moments, (b, d), in main memory."""
        return diagonals(self.high) if self.known is None else self.known

    def in_main_memory(self) -> DoubleDouble:
        """Return the same moments in main memory."""
        return self if self.known is None else self._fetched()

    @where_arrays_are
    def _fetched(self) -> DoubleDouble:
        return replace(self, high=to_numpy(self.high), known=None)

    def beside(self, array: Any) -> DoubleDouble:
        """Return the same moments on the device of an array, but in main memory if some have two parts."""
        if not on_cuda(array) or self.low is not None:
            return self.in_main_memory()
        return self if self.known is not None else replace(self, high=to_device(self.high, array), known=self.diagonal)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, in main memory."""
        return dict(vars(self.in_main_memory()))

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
        multiply = kernels_for("precise", B).twofold_product
        Y = multiply([(part, B) for part in parts], len(B), symmetric=False)
        high, low = multiply([(B, part) for part in Y], len(B), symmetric=True)
        return np.asarray(high + low)

    def errors(self, items: Flags) -> Float64:
        """Estimate the relative error that rounding of sums of float64 brings into scores; 0 for other items."""
        errors = np.zeros(len(items))
        chosen = np.flatnonzero(items)
        kernels = kernels_for("factor", self.high)
        some = self.high if items.all() else take_entries(self.high, chosen)
        found = kernels.inverse_cholesky(some, limit=SETTLED / PLAIN_NOISE)
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
