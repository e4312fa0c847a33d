"""Bounds of the sensitivities of keys among all keys so far, for keys that come in blocks.

A sensitivity never rises as keys are added, so a key can be dropped for good once its bound is below ε. The bounds
here do not rise either, so the keys left in the end do not depend on when keys are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace, on_cuda, to_device, to_float64, to_numpy
from levattn._core.cached import cached_property
from levattn._core.checks import TIE
from levattn._core.serialize import MOST_ROWS, shaped, whole
from levattn._core.types import Flags, Float64, Int64
from levattn._kernels import BLOCK, KEYS, SELECT, Arithmetic, Norms, Rows, kernels_for
from levattn.functions import AttentionFunction, Power, Softmax
from levattn.linalg.accumulator import (
    PLAIN_ERROR,
    PLAIN_NOISE,
    UNIT,
    Expansion,
    GramAccumulator,
    Terms,
    Total,
    rounded_total,
    total_arrays,
    total_of,
)
from levattn.linalg.factor import Factor
from levattn.linalg.reading import as_read
from levattn.sensitivity.certificates import lift_columns, lifted_rows, root_error
from levattn.states import factor_of, factor_of_sum
from levattn.states.blocks import rows_in_memory

_NARROW = 2.0**-60  # squares of columns, and ε, above which float32 has the range for a screen, and for its scores
_SINGLE_ERROR = 2.0**-8  # largest error of a score of such a screen


class Screen:
    """The factor that screens blocks as they come, in float32 where its precision suffices.

    plain: whether all scores are ``‖Wᵀk‖²`` in one arithmetic, whatever the key.
    """

    def __init__(self, factor: Factor, moments: Expansion, raised: Float64 | None, epsilon: float) -> None:
        error, (b, d) = factor.score_error, moments.high.shape[:2]
        simple = np.ones(b, np.bool_)
        for found in (factor.null_directions, factor.spans, factor.hidden):
            simple[list(found)] = False
        if factor.rows.scale is not None:
            simple &= (factor.rows.scale == 1).all(axis=1)
        # ‖|W|ᵀ|k|‖ is at most √(d B) ‖Wᵀk‖, where B bounds the squared inverse, so that four times this is proven;
        # an error below PLAIN_ERROR tells B
        unit = kernels_for("gram", factor.rows.keys).SINGLE_UNIT
        single = error + unit / 2 * (d + 4) * np.sqrt(d * factor.error / PLAIN_NOISE)
        diagonal = moments.diagonal
        near = ((diagonal > _NARROW) & (diagonal < 1 / _NARROW)).all(axis=1) & (epsilon > _NARROW)
        quick = simple & near & (single <= _SINGLE_ERROR) & (factor.error < PLAIN_ERROR)
        self.own = factor  # with the arithmetic in which it came
        factor = factor if epsilon > _NARROW else factor.exactly()
        arithmetic: list[Arithmetic] = ["single" if q else a for q, a in zip(quick, factor.arithmetic, strict=True)]
        error, factor = np.where(quick, single, error), replace(factor, arithmetic=tuple(arithmetic))
        reached = bool((factor.rank == d).all())
        self.plain = bool(simple.all()) and reached and set(arithmetic) in ({"single"}, {"double"})
        self.factor, self.raised = factor, raised
        least = np.maximum(epsilon * (1 - np.maximum(4 * error, TIE)), 0.0)
        both = np.stack([least / (1 - least), least])  # x/(1 + x) with the key itself, x without
        self._least = both if raised is None else both / raised

    @cached_property
    def norms(self) -> Norms:
        """The scores, if all are plain."""
        return Norms(self.factor.whitening, self.factor.arithmetic[0])

    def reached(self, scores: Any, present: Any, member: bool) -> tuple[Int64, Any]:
        """List the scores (b, m) that are not surely too small; `member` if the keys are among the screen's."""
        return SELECT.reaching(scores, present, self._least[int(member)])


_SUBBLOCKS = 16  # of a block of rows, that go to different groups
_DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}  # in bits
_RANGE = 400  # powers of two within which products of coordinates keep their squares in range

Labels = npt.NDArray[np.int64]
Ahead = tuple[Rows, Terms]  # rows as the sums read them, and their moments
Listed = tuple[Int64, Any]  # where the lists of all matrices begin, (b + 1,), and the rows listed, where the keys are


@dataclass(frozen=True)
class Reference:
    """Factors from which keys are bounded."""

    factor: Factor  # of all keys so far
    groups: tuple[Factor, ...] = ()  # of the groups of keys, if there are any
    # (b,) the factor by which a score may exceed the computed one, because lifted keys are rounded; infinite where
    # rounding hides directions
    raised: Float64 | None = None


@dataclass(frozen=True)
class Judged:
    """The bounds of some keys of one matrix."""

    upper: Float64  # (k,)
    kept: Flags  # keys that may be at least ε, in doubt as well
    counted: bool  # whether a kept key may have a smaller score, because it has a bound only or is too close to ε


class RunningSquares:
    """Leverage scores of keys, or of the products of m of their coordinates, among all keys so far.

    Rounded products that lack directions give no bound, so all keys are held then.

    The keys up to an earlier block are the `screen`. Scores with respect to these keys and the key itself screen the
    blocks as they come.
    """

    labeled = False  # whether keys come with labels of the groups in which they are summed
    certificate: Literal["leverage", "lift"]

    def __init__(self, b: int, d: int, m: int = 1) -> None:
        self.certificate = "leverage" if m == 1 else "lift"
        self.m = m
        self.columns = lift_columns(d, m)
        self.sums = GramAccumulator(b, self.columns)
        self.frozen: Total | None = None
        self._screen: Screen | None = None

    def copy(self) -> RunningSquares:
        """Return an independent copy."""
        other = RunningSquares.__new__(RunningSquares)
        other.__dict__.update(self.__dict__, sums=self.sums.copy())
        return other

    @property
    def blocks(self) -> int:
        """Number of blocks so far."""
        return self.sums.blocks.count

    @property
    def numbers(self) -> int:
        """Number of values computed from a key to screen it; none where it is read as it is."""
        return 0 if self.m == 1 else self.columns

    @property
    def expected(self) -> float:
        """ε times the number of keys whose bound is at least ε, at most."""
        return float(self.columns)

    def read(self, rows: Rows) -> Rows:
        """Return the rows whose leverage scores are the bounds."""
        return rows if self.m == 1 else lifted_rows(rows, self.m)

    def require_range(self, rows: Rows) -> None:
        """Raise for keys whose products of coordinates leave the range of float64."""
        if self.m == 1:
            return
        least = 2.0 ** (-1020 / self.m)
        for item in range(rows.shape[0]):
            size = np.abs(as_read(rows.item(item)))
            faint = size[(size > 0) & (size < least)]
            if faint.size:
                raise ValueError(
                    f"K has entries of {faint.min():.3g}; expected zeros, or at least {least:.3g}, because products "
                    f"of {self.m} of them underflow. Scale all chunks of K alike, by a power of two"
                )
        largest = KEYS.column_figures(rows, largest=True)
        largest = largest[(largest > 0) & np.isfinite(largest)]
        if np.abs(np.frexp(largest)[1] * self.m).max(initial=0) > _RANGE:
            raise ValueError(
                f"K has columns with largest entries {largest.min():.3g} to {largest.max():.3g}; expected them nearer "
                f"to 1, because products of {self.m} leave the range of float64. Scale all chunks of K alike, by a "
                "power of two"
            )

    def fitting(self, blocks: int) -> int:
        """Return of how many of the next blocks the sums by `screened_ahead` are likely to be of use."""
        return blocks if self.sums.several else self.sums.fitting(blocks)

    def add(self, rows: Rows, ahead: Ahead | None = None) -> None:
        """Add whole blocks; `ahead` comes from `screened_ahead`."""
        if ahead is None:
            self.sums.add(self.read(rows))
        else:
            self.sums.add(*ahead)

    @property
    def rounded(self) -> bool:
        """Whether keys were rounded before they came."""
        return self.sums.rounded and (self.frozen is None or self.frozen[0].rounded)

    def expect_rounded(self) -> None:
        """Take keys from here on as rounded, in sums that no copy shares."""
        self.sums.rounded, self._screen = True, None
        if self.frozen is not None:
            self.frozen = rounded_total(self.frozen)

    def freeze(self, rows: Rows, epsilon: float) -> None:
        """Take all blocks so far for the screen of keys such as `rows`."""
        b, d = self.sums.exponents.shape
        self.frozen = self.sums.total(Rows(np.zeros((b, 0, d)), "float64"))
        self._screen = None
        self._made_screen(rows, epsilon)

    def screened(self, rows: Rows, _labels: Labels | None, epsilon: float, member: bool) -> Listed:
        """List the keys that may have a bound of at least ε; `member` if all of them are among the screen's."""
        screen, rows = self._made_screen(rows, epsilon), self.read(rows)
        scores = screen.factor.on(rows).scores(as_float64=epsilon <= _NARROW, member=member)[0]
        return screen.reached(scores, rows.mask, member)

    def screened_ahead(self, rows: Rows, labels: Labels | None, epsilon: float) -> tuple[Listed, Ahead | None]:
        """List the keys outside the screen that may have a bound of at least ε; return the sums for `add` as well."""
        screen = self._made_screen(rows, epsilon)
        # sums of several parts take each block by itself; beside them a second reading costs nothing
        apart = self.sums.several or epsilon <= _NARROW
        if apart or not screen.plain or not isinstance(rows.keys, np.ndarray):
            return self.screened(rows, labels, epsilon, member=False), None
        rows = self.read(rows)
        factor = screen.factor
        scored = rows if factor.wide is None and factor.rows.scale is None else factor.on(rows).rows
        scores = np.empty(rows.shape[:2], np.float64 if rows.format == "float64" else np.float32)
        terms = self.sums.terms_beside(rows, scored, screen.norms, scores)
        return screen.reached(scores, rows.mask, member=False), (rows, terms)

    def _made_screen(self, rows: Rows, epsilon: float) -> Screen:
        if self.frozen is None:
            raise AssertionError("there is no screen yet")
        if self._screen is None or on_cuda(self._screen.factor.rows.keys) != on_cuda(rows.keys):
            like = _no_rows(self.read(rows.between(0, 0)))
            factor = factor_of_sum(*self.frozen, like)
            raised = self._lift_error(self.frozen[0], factor, rows.format)
            self._screen = Screen(factor, self.frozen[0], raised, epsilon)
        return self._screen

    def reference(self, tail: Rows, _labels: Labels | None, *, frozen: bool = False) -> Reference:
        """Return the reference for `judge`: all keys so far, with the rows that wait.

        If the screen is `frozen` after all keys so far, and no row waits, it has the factor already.
        """
        if frozen and self._screen is not None:
            return Reference(self._screen.own, raised=self._screen.raised)
        if self.m == 1:
            return Reference(factor_of(self.sums, tail))
        lifted = self.read(tail)
        moments, exponents = self.sums.total(lifted)
        factor = factor_of_sum(moments, exponents, lifted.between(0, 0))
        return Reference(factor, raised=self._lift_error(moments, factor, tail.format))

    def bar(self, rows: Rows, epsilon: float, frozen: bool) -> tuple[Factor, Float64] | None:
        """Return the factor of all keys so far and the least scores that keys may have, (b,), on the device of `rows`.

        None if comparing scores is not enough; `frozen` if the screen has all keys so far.
        """
        if self.m > 1:
            return None
        if frozen:
            factor = self._made_screen(rows, epsilon).factor.exactly()
        else:
            nothing = _no_rows(rows)
            factor = factor_of_sum(*self.sums.total(nothing), nothing).exactly()
        least = epsilon * (1 - np.maximum(TIE, 4 * factor.error))
        sound = (factor.rank == self.columns).all() and set(factor.arithmetic) == {"double"} and (least > 0).all()
        return (factor, least) if sound else None

    def judge(self, by: Reference, item: int, keys: Rows, _labels: Labels | None, epsilon: float) -> Judged:
        """Bound keys (1, k, d) of one matrix, which are among the keys of the reference."""
        one = by.factor.item(item).exactly()
        upper, counted = one.on(self.read(keys)).scores(as_float64=True)
        upper = to_numpy(upper)[0]
        live = upper > 0
        if not live.all():
            live |= _not_zero(keys)
        if by.raised is not None:
            with np.errstate(invalid="ignore"):
                upper = np.where(live, np.fmin(upper * by.raised[item], 1.0), 0.0)
        slack = max(TIE, 4 * float(one.error[0]))
        kept = ~(upper < epsilon * (1 - slack)) & live
        doubt = slack > 2 * TIE and bool((kept & ~(upper >= epsilon * (1 + slack))).any())
        return Judged(upper, kept, bool(counted[0]) or doubt)

    def _lift_error(self, moments: Expansion, factor: Factor, format: str) -> Float64 | None:
        """Return the factor by which rounding of the products may raise a score, (b,); None if products are exact."""
        if self.m * _DIGITS[format] <= _DIGITS["float64"]:
            return None
        sizes = np.sqrt(moments.diagonal)
        return root_error(factor, self.m * UNIT, sizes) ** 2

    def merge(self, other: RunningSquares, tail: Rows, _labels: Labels | None) -> None:
        """Add the rows of another, with the rows that wait there."""
        self.sums.merge(*other.sums.total(self.read(tail)))

    @property
    def _held_array(self) -> Any:
        return self.sums, None if self.frozen is None else self.frozen[0]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, in main memory; the screen is made anew."""
        return vars(self) | {"_screen": None}

    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return fields and arrays for `restore`."""
        fields, arrays = self.sums.parts()
        return fields, arrays | total_arrays("frozen", self.frozen)

    def restore(self, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Restore the bounds from `parts`, or raise ValueError, TypeError or LookupError."""
        b, columns = self.sums.exponents.shape
        self.sums = GramAccumulator.from_parts(fields, arrays, b, columns)
        self.frozen = total_of(arrays, "frozen", b, columns)
        if (self.frozen is None) != (self.blocks == 0):
            raise ValueError("the screen does not match the number of blocks")


class RunningBlocks:
    """Bounds for all functions of at most quadratic growth, from the scores of a key with respect to groups of keys.

    Let ⟨k, y⟩ = 1, and let 1/t be the least ‖K_g y‖² of a group of keys. The group adds at least min(1, 1/t) to
    Σ min(1, ⟨k_l, y⟩²). In the group of k, the key itself adds 1, and the others at least min(1, 1/t − 1). A group
    that grows only adds more. Rows go to the groups in turn, a part of a block at a time.
    """

    labeled = True
    certificate: Literal["block"] = "block"

    def __init__(self, b: int, d: int, epsilon: float) -> None:
        self.columns, self.blocks = d, 0
        self.merged = 0  # parts of blocks that came by merging
        self.groups = [GramAccumulator(b, d) for _ in range(group_count(epsilon))]
        self.frozen: list[Total] = []
        self._screen: tuple[Factor, ...] = ()

    @property
    def numbers(self) -> int:
        """Number of values computed from a key to screen it."""
        return len(self.groups)

    @property
    def expected(self) -> float:
        """ε times the number of keys whose bound is at least ε, at most, where rows come in random order."""
        return 8.0 * self.columns

    def copy(self) -> RunningBlocks:
        """Return an independent copy."""
        other = RunningBlocks.__new__(RunningBlocks)
        other.__dict__.update(self.__dict__, groups=[sums.copy() for sums in self.groups])
        return other

    def label(self, first: int, n: int) -> Labels:
        """Return the groups (1, n) of the rows from the number `first` on."""
        size = BLOCK // _SUBBLOCKS
        return np.arange(first, first + n, dtype=np.int64)[None] // size % len(self.groups)

    def fitting(self, blocks: int) -> int:
        """Return of how many of the next blocks sums are of use: there are none ahead of `add`."""
        return blocks

    def add(self, rows: Rows, _ahead: Any = None) -> None:
        """Add whole blocks."""
        self._count(self.groups, rows, self.label(self.blocks * BLOCK, rows.shape[1])[0])
        self.blocks += rows.shape[1] // BLOCK

    @staticmethod
    def _count(groups: list[GramAccumulator], rows: Rows, labels: Labels) -> None:
        """Add runs of rows of one label each to their groups."""
        rows = rows_in_memory(rows)
        b, n, d = rows.shape
        edges = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), n]
        for low, high in pairwise(edges if n else []):
            groups[labels[low]].merge(*GramAccumulator(b, d).total(rows.between(low, high)))

    @property
    def rounded(self) -> bool:
        """Whether keys were rounded before they came."""
        return all(sums.rounded for sums in self.groups) and all(moments.rounded for moments, _ in self.frozen)

    def expect_rounded(self) -> None:
        """Take keys from here on as rounded, in sums that no copy shares."""
        for sums in self.groups:
            sums.rounded = True
        self.frozen, self._screen = [rounded_total(frozen) for frozen in self.frozen], ()

    def freeze(self, _rows: Rows, _epsilon: float) -> None:
        """Take all blocks so far for the screen."""
        b, d = self.groups[0].exponents.shape
        nothing = Rows(np.zeros((b, 0, d)), "float64")
        self.frozen = [sums.total(nothing) for sums in self.groups]
        self._screen = ()

    def screened(self, rows: Rows, labels: Labels | None, epsilon: float, member: bool) -> Listed:
        """List the keys that may have a bound of at least ε; `member` if all of them are among the screen's."""
        if not self._screen or on_cuda(self._screen[0].rows.keys) != on_cuda(rows.keys):
            self._screen = tuple(factor_of_sum(*frozen, _no_rows(rows)) for frozen in self.frozen)
        sums = self._sums(self._screen, rows, labels, member)
        most = np.full(len(sums), -1.0)  # of negated sums, so that sums of at most 1 / ε are listed
        return SELECT.reaching(sums * (-epsilon * (1 - TIE)), rows.mask, most)

    def screened_ahead(self, rows: Rows, labels: Labels | None, epsilon: float) -> tuple[Listed, None]:
        """List the keys outside the screen that may have a bound of at least ε; `add` then computes all sums."""
        return self.screened(rows, labels, epsilon, member=False), None

    @staticmethod
    def _sums(groups: Sequence[Factor], rows: Rows, labels: Labels | None, member: bool) -> Any:
        """Return a lower bound of the sums over the groups, (b, m), on the device of the rows."""
        total = rows.zeros(as_float64=True)
        own = np.full((1, rows.shape[1]), -1) if labels is None else labels
        own = to_device(own, total)
        for group, factor in enumerate(groups):
            t = factor.on(rows).scores(member=False)[0].astype(np.float64)
            raised = to_device(1 + 4 * factor.score_error[:, None] + TIE, total)
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
                each = np.fmax(1 / (t * raised), 0.0)  # where nothing is known
            most = np.minimum(each, 1.0)
            mine = np.maximum(np.minimum(each, 2.0), 1.0) if member else 1 + most
            total += array_namespace(total).where(own == group, mine, most)
        return total

    def reference(self, tail: Rows, labels: Labels | None, *, frozen: bool = False) -> Reference:  # noqa: ARG002
        """Return the reference for `judge`: all keys so far, with the rows that wait, fewer than a block."""
        groups = [sums.copy() for sums in self.groups]
        if labels is not None:
            self._count(groups, tail, labels[0])
        b, _, d = tail.shape
        everything, nothing = GramAccumulator(b, d), Rows(np.empty((b, 0, d), tail.keys.dtype), tail.format)
        totals = [sums.total(nothing) for sums in groups]
        for total in totals:
            everything.merge(*total)
        factor = factor_of_sum(*everything.total(nothing), nothing)
        return Reference(factor, tuple(factor_of_sum(*total, nothing) for total in totals))

    def bar(self, _rows: Rows, _epsilon: float, _frozen: bool) -> None:
        """Return None, because other sums than scores decide."""

    def judge(self, by: Reference, item: int, keys: Rows, labels: Labels | None, epsilon: float) -> Judged:
        """Bound keys (1, k, d) of one matrix, which are among the keys of the reference."""
        groups = [factor.item(item).exactly() for factor in by.groups]
        upper = np.minimum(1 / np.maximum(self._sums(groups, keys, labels, member=True)[0], 1e-300), 1.0)
        upper = np.where(_not_zero(keys), upper, 0.0)
        return Judged(upper, (upper >= epsilon * (1 - TIE)), False)

    @property
    def turn(self) -> int:
        """Number of places by which a merge shifts the groups of another, so that no group stays small."""
        return self.blocks * _SUBBLOCKS + self.merged

    def merge(self, other: RunningBlocks, tail: Rows, labels: Labels | None) -> None:
        """Add the rows of another, with the rows that wait there."""
        turn, count, nothing = self.turn, len(self.groups), tail.between(0, 0)
        for g, its in enumerate(other.groups):
            self.groups[(g + turn) % count].merge(*its.total(nothing))
        if labels is not None:
            self._count(self.groups, tail, (labels[0] + turn) % count)
        self.merged += other.turn + -(-tail.shape[1] * _SUBBLOCKS // BLOCK)

    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return fields and arrays for `restore`."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        for g, sums in enumerate(self.groups):
            arrays |= {f"group{g}.{name}": array for name, array in sums.parts()[1].items()}
            arrays |= total_arrays(f"frozen{g}", self.frozen[g] if self.frozen else None)
        return {"blocks": self.blocks, "merged": self.merged}, arrays

    def restore(self, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Restore the bounds from `parts`, or raise ValueError, TypeError or LookupError."""
        b, d = self.groups[0].exponents.shape
        self.blocks = whole(fields["blocks"], most=MOST_ROWS // BLOCK)
        self.merged = whole(fields["merged"], most=MOST_ROWS)
        for g in range(len(self.groups)):
            start = f"group{g}."
            own = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
            terms = ["merged"] if "merged.high" in own else []
            self.groups[g] = GramAccumulator.from_parts({"blocks": 0, "terms": terms}, own, b, d)
        frozen = [total_of(arrays, f"frozen{g}", b, d) for g in range(len(self.groups))]
        self.frozen = [each for each in frozen if each is not None]
        if len(self.frozen) != (len(self.groups) if self.blocks else 0):
            raise ValueError("the screen does not match the number of blocks")


Running = RunningSquares | RunningBlocks


def group_count(epsilon: float) -> int:
    """Return the number of groups of `RunningBlocks`."""
    return math.ceil(2 / epsilon)


def _no_rows(rows: Rows) -> Rows:
    """Return a batch of the same form without rows, which keeps no reference to the given ones."""
    b, _, d = rows.shape
    return Rows(array_namespace(rows.keys).empty((b, 0, d), dtype=rows.keys.dtype), rows.format)


def _not_zero(keys: Rows) -> Flags:
    """Tell which keys (1, k, d) have a nonzero entry, (k,); their scores may still underflow."""
    return np.asarray(to_float64(keys.keys, keys.format)[0].any(axis=1))


_MOST_GROUPS = 100_000
_LARGEST_POWER = 64


def _half_power(f: AttentionFunction | Softmax) -> int:
    """Return m of an even power 2m, and 0 for other functions."""
    return int(f.p) // 2 if isinstance(f, Power) and f.p % 2 == 0 else 0


def require_bounds(f: AttentionFunction | Softmax, epsilon: float) -> None:
    """Raise for functions without a bound that never rises, or with one that takes too much memory for ε."""
    if m := _half_power(f):
        if 2 * m > _LARGEST_POWER:
            raise ValueError(
                f"f is {f!r}; expected a power of at most {_LARGEST_POWER}, as its lift has too many columns"
            )
        return
    if isinstance(f, Softmax) or f.growth > 2:
        raise ValueError(
            f"f is {f!r}; expected an even power, or a function of at most quadratic growth. For others, no bound is "
            "known that never rises as keys are added. Use universal_set on all keys"
        )
    if float(f(np.zeros(1))[0]) > 0:
        raise ValueError(
            f"f is {f!r}, which is {float(f(np.zeros(1))[0])} at 0; expected 0 there, so that keys of zeros have no "
            "score. Use universal_set on all keys"
        )
    if 2 / epsilon > _MOST_GROUPS:
        raise ValueError(
            f"epsilon is {epsilon} for f = {f!r}, whose bound takes 2/epsilon second moments; expected at least "
            f"{2 / _MOST_GROUPS}"
        )


def running_bounds(f: AttentionFunction | Softmax, epsilon: float, b: int, d: int) -> Running:
    """Return the bounds for f, which `require_bounds` accepts, of b matrices with d columns."""
    m = _half_power(f)
    return RunningSquares(b, d, m) if m else RunningBlocks(b, d, epsilon)


def require_backed(
    f: AttentionFunction | Softmax, epsilon: float, b: int, d: int, arrays: dict[str, npt.NDArray[Any]]
) -> None:
    """Raise ValueError or LookupError unless the arrays of a saved state have the sizes of its bounds."""
    if m := _half_power(f):
        names, columns = ["exponents"], lift_columns(d, m)
    else:
        names, columns = [f"group{g}.exponents" for g in range(group_count(epsilon))], d
    for name in names:
        shaped(arrays[name], np.int32, (b, columns))
