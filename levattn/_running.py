"""Bounds of the sensitivities of keys among all keys so far, for keys that come in blocks.

A sensitivity never rises as keys are added, so a key that is bounded below ε once can be let go for good. The bounds
here do not rise either, so what is left in the end does not depend on when that is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._array import to_numpy
from levattn._bytes import shaped
from levattn._kernels import Float64, Rows
from levattn._lift import lift_columns, lifted_rows
from levattn._moments import MomentSum, Twofold
from levattn.leverage import TIE
from levattn.linalg import Factor
from levattn.states import factor_of, factor_of_sum

__all__ = ["Judged", "RunningSquares"]

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Judged:
    """The bounds of some keys of one matrix.

    upper: (k,) the bounds.
    kept: which of them may be at least ε; doubt counts as that.
    counted: which of them count as 1, as they reach outside the numerical row space.
    """

    upper: Float64
    kept: Flags
    counted: bool


class RunningSquares:
    """Leverage scores of keys, or of the products of m of their coordinates, among all keys so far.

    The scores that blocks are screened by as they come are those against the keys up to an earlier block, the
    `screen`; the key itself counted in.
    """

    def __init__(self, b: int, d: int, m: int = 1) -> None:
        self.m = m
        self.columns = lift_columns(d, m)
        self.sums = MomentSum(b, self.columns)
        self.frozen: tuple[Twofold, npt.NDArray[np.int32]] | None = None
        self._screen: Factor | None = None

    def copy(self) -> RunningSquares:
        """Return bounds that go on from here by themselves."""
        other = RunningSquares.__new__(RunningSquares)
        other.__dict__.update(self.__dict__, sums=self.sums.copy())
        return other

    def read(self, rows: Rows) -> Rows:
        """Return the rows whose leverage scores are the bounds."""
        return rows if self.m == 1 else lifted_rows(rows, self.m)

    def add(self, rows: Rows) -> None:
        """Add whole blocks."""
        self.sums.add(self.read(rows))

    def freeze(self) -> None:
        """Take all blocks so far for the screen."""
        b, d = self.sums.exponents.shape
        self.frozen = self.sums.total(Rows(np.zeros((b, 0, d)), "float64"))
        self._screen = None

    def screened(self, rows: Rows, epsilon: float, member: bool) -> Flags:
        """Tell which keys may have a bound of at least ε, (b, m); `member` if all of them are among the screen's."""
        if self.frozen is None:
            raise AssertionError("there is no screen yet")
        rows = self.read(rows)
        if self._screen is None:
            like = Rows(np.empty((rows.shape[0], 0, self.columns), rows.keys.dtype), rows.format)
            self._screen = factor_of_sum(*self.frozen, like)
        scores = to_numpy(self._screen.on(rows).scores(member=member)[0])
        least = epsilon * (1 - np.maximum(4 * self._screen.score_error, TIE))
        if not member:
            least = least / (1 - least)  # x/(1 + x) with the key itself, x without
        return np.asarray(~(scores < np.maximum(least, 0.0)[:, None].astype(scores.dtype)))

    def factor(self, tail: Rows) -> Factor:
        """Return the factor of all keys so far, with fewer than a block that wait."""
        return factor_of(self.sums, self.read(tail))

    def judge(self, factor: Factor, item: int, keys: Rows, epsilon: float) -> Judged:
        """Bound keys (1, k, d) of one matrix that are among the factored ones."""
        one = factor.item(item).exactly()
        upper, counted = one.on(self.read(keys)).scores(wide=True)
        upper = to_numpy(upper)[0]
        slack = max(TIE, 4 * float(one.error[0]))
        return Judged(upper, ~(upper < epsilon * (1 - slack)), bool(counted[0]))

    def merge(self, other: RunningSquares, tail: Rows) -> None:
        """Add what another has seen, with the rows that wait there."""
        self.sums.merge(*other.sums.total(other.read(tail)))

    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return fields and arrays from which `from_parts` makes it again."""
        fields, arrays = self.sums.parts()
        if self.frozen is not None:
            moments, exponents = self.frozen
            held = {f"frozen.{key}": value for key, value in vars(moments).items() if value is not None}
            arrays |= held | {"frozen.exponents": exponents}
        return fields, arrays

    @classmethod
    def from_parts(
        cls, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], b: int, d: int, m: int
    ) -> RunningSquares:
        """Return the bounds that `parts` took apart, or raise ValueError, TypeError or LookupError."""
        self = cls(b, d, m)
        self.sums = MomentSum.from_parts(fields, arrays, b, self.columns)
        if "frozen.high" in arrays:
            exponents = shaped(arrays["frozen.exponents"], np.int32, (b, self.columns))
            self.frozen = Twofold.from_arrays(arrays, "frozen", b, self.columns), exponents
        return self
