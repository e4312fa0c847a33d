"""Exact answers: every float is a rational number, and so is every score of f(x) = x².

Nothing of the library is imported here. Keys are scaled to integers, Gram matrices eliminated without fractions
(Bareiss), and a score is a pair of integers with one denominator for all rows. A direction that no other row reaches
gives exactly 1, and a comparison with ε is a comparison of integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Whole = NDArray[np.object_]  # of Python's integers
Decimals = NDArray[np.object_]

DIGITS = Context(prec=60, Emax=MAX_EMAX, Emin=MIN_EMIN)


def integers(values: Any, axis: int | None = None) -> tuple[Whole, Any]:
    """Integers M and exponents e with ``values = M 2^e``: one exponent for all, or one for each column (axis=0)."""
    x = np.asarray(values, np.float64)
    fraction, exponent = np.frexp(x)
    whole = np.ldexp(fraction, 53).astype(np.int64)
    exponent = np.where(whole == 0, 4096, exponent - 53)
    low = exponent.min(axis=axis, initial=4096)
    shift = np.where(whole == 0, 0, exponent - low)
    return np.asarray(whole.astype(object) << shift.astype(object)), low


def product(A: Whole, B: Whole) -> Whole:
    """A B in integers; numpy has no such product where an axis is empty."""
    if 0 in (*A.shape, *B.shape):
        return np.zeros((A.shape[0], B.shape[1]), object)
    return np.asarray(A @ B)


def adjugate(G: Whole) -> tuple[list[int], Whole, int]:
    """Independent columns I of a Gram matrix G, and N, D > 0 with ``G[I, I]⁻¹ = N / D``."""
    d = len(G)
    table = np.concatenate([G, np.array([[int(i == j) for j in range(d)] for i in range(d)], object).reshape(d, d)], 1)
    kept: list[int] = []
    before = 1
    for k in range(d):  # a Gram matrix: where the pivot is 0 the whole row is, and column k depends on those kept
        pivot = table[k, k]
        if pivot == 0:
            continue
        rest = [i for i in range(d) if i != k]
        table[rest] = (table[rest] * pivot - np.multiply.outer(table[rest, k], table[k])) // before
        before = pivot
        kept.append(k)
    inverse = table[np.ix_(kept, [d + k for k in kept])]
    return kept, inverse, before


def positive(G: Whole) -> bool:
    """Whether a symmetric matrix is positive definite: all its leading minors are positive."""
    table, before = G.copy(), 1
    while len(table):
        pivot = table[0, 0]
        if pivot <= 0:
            return False
        table = (table[1:, 1:] * pivot - np.multiply.outer(table[1:, 0], table[0, 1:])) // before
        before = pivot
    return True


def components(pattern: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Columns that rows connect, those of zeros left out."""
    label = np.arange(pattern.shape[1])
    for row in pattern:
        joined = np.unique(label[row])
        label[np.isin(label, joined[1:])] = joined[0] if len(joined) else 0
    used = pattern.any(axis=0)
    return [np.flatnonzero((label == one) & used) for one in np.unique(label[used])]


@dataclass(frozen=True, eq=False)
class Block:
    """Rows in some columns, in integers: those that are independent, and the inverse of their Gram matrix."""

    among: NDArray[np.int64]
    rows: Whole
    counts: Whole
    inverse: Whole
    denominator: int


@dataclass(frozen=True, eq=False)
class Truth:
    """What is true of keys (n, d), queries (m, d) and values (n, v); masked rows have to be zeros."""

    K: Float
    Q: Float

    # -- keys -------------------------------------------------------------------------

    @cached_property
    def _distinct(self) -> tuple[Float, NDArray[np.int64]]:
        """Rows that differ, and the place of each row among them: thousands of rows are but a few."""
        rows, place = np.unique(self.K, axis=0, return_inverse=True)
        return rows, place.reshape(-1)

    @cached_property
    def _whole(self) -> Whole:
        """The distinct rows as integers: their columns may have been multiplied by numbers."""
        return integers(self._distinct[0], axis=0)[0]

    @cached_property
    def _blocks(self) -> list[Block]:
        """Columns that no row connects are eliminated apart: wide keys of narrow blocks cost little."""
        rows, place = self._distinct
        counts = np.bincount(place, minlength=len(rows)).astype(object)
        M = self._whole
        blocks = []
        for columns in components(M != 0):
            among = np.flatnonzero((M[:, columns] != 0).any(axis=1))
            part = M[np.ix_(among, columns)]
            kept, inverse, denominator = adjugate(product(part.T, part * counts[among][:, None]))
            blocks.append(Block(among, part[:, kept], counts[among], inverse, denominator))
        return blocks

    @cached_property
    def condition(self) -> float:
        """A bound on the condition number of the independent columns, scaled to unit norm, within a factor of √d."""
        worst = 1.0
        for block in self._blocks:
            squares = (block.rows * block.rows * block.counts[:, None]).sum(axis=0)
            inflation = sum(int(block.inverse[k, k]) * int(squares[k]) for k in range(len(squares)))
            worst = max(worst, math.sqrt(quotient(inflation, block.denominator) * max(len(squares), 1)))
        return worst

    @cached_property
    def rank(self) -> int:
        return sum(block.rows.shape[1] for block in self._blocks)

    @cached_property
    def _scores(self) -> tuple[Whole, Whole]:
        """Numerators and denominators for each row."""
        distinct, place = self._distinct
        over, under = np.zeros(len(distinct), object), np.ones(len(distinct), object)
        for block in self._blocks:
            over[block.among] = (product(block.rows, block.inverse) * block.rows).sum(axis=1)
            under[block.among] = block.denominator
        return over[place], under[place]

    @cached_property
    def scores(self) -> Float:
        """Leverage scores, rounded once."""
        return np.array([quotient(x, y) for x, y in zip(*self._scores, strict=True)], np.float64)

    def at_least(self, epsilon: float, slack: float = 0.0) -> NDArray[np.bool_]:
        """Which scores are at least ``epsilon (1 − slack)``, without rounding."""
        least = Fraction(epsilon) * (1 - Fraction(slack))
        pairs = zip(*self._scores, strict=True)
        return np.array([x * least.denominator >= least.numerator * y for x, y in pairs], bool)

    def witnessed(self, j: int) -> Float:
        """Products of all keys with the query that gives key j its leverage score, which is 1 there."""
        block, at = self.block_of(j)
        if block is None:
            return np.zeros(len(self.K))
        return self.spread(block, product(product(block.rows, block.inverse), block.rows[at][:, None])[:, 0], at)

    def block_of(self, j: int) -> tuple[Block | None, int]:
        """The block that key j lies in, and its place there; None for a key of zeros."""
        row = self._distinct[1][j]
        for block in self._blocks:
            at = np.flatnonzero(block.among == row)
            if len(at):
                return block, int(at[0])
        return None, 0

    def spread(self, block: Block, z: Whole, at: int) -> Float:
        """Products of the rows of a block, divided by that at a place, for all keys."""
        distinct, place = self._distinct
        out = np.zeros(len(distinct))
        out[block.among] = [quotient(x, z[at]) or 5e-324 * (x != 0) for x in z]  # a size that is too large is safe
        return np.asarray(out[place])

    def group_below(self, members: NDArray[np.bool_], bound: Fraction) -> bool:
        """Whether every query gives these keys, taken together, less than the bound."""
        distinct, place = self._distinct
        counts = np.bincount(place[members], minlength=len(distinct)).astype(object)
        for block in self._blocks:
            rows, some = block.rows, counts[block.among]
            weights = bound.numerator * block.counts - bound.denominator * some
            if not positive(product(rows.T, rows * weights[:, None])):
                return False
        return True

    def prefix(self, n: int) -> Truth:
        return Truth(self.K[:n], self.Q)

    def by_row(self) -> Truth:
        """The same for one query a key, the given ones in turn."""
        if len(self.Q) == len(self.K):
            return self
        return Truth(self.K, self.Q[np.arange(len(self.K)) % len(self.Q)])

    # -- queries ----------------------------------------------------------------------

    @cached_property
    def products(self) -> tuple[Whole, NDArray[np.int64]]:
        """Integers Z (m, n) and exponents (m,) with ``⟨q_i, k_j⟩ = Z_ij 2^e_i``."""
        rows, place = self._distinct
        queries, of = np.unique(self.Q, axis=0, return_inverse=True)
        M, e = integers(rows)
        Z = np.empty((len(queries), len(rows)), object)
        exponents = np.zeros(len(queries), np.int64)
        for i, q in enumerate(queries):
            row, own = integers(q)
            exponents[i] = int(e) + int(own)
            if len(M):
                Z[i] = product(M, row[:, None])[:, 0]
        return Z[of.reshape(-1)][:, place], exponents[of.reshape(-1)]

    @cached_property
    def squares(self) -> Whole:
        return np.asarray(self.products[0] * self.products[0])

    def sums(self, *, causal: bool = False) -> Whole:
        """Normalizers, as integers that belong to `squares`: (m,), or (m, n) of the prefixes."""
        if causal:
            return np.cumsum(self.squares, axis=1)
        return np.array([sum(row) for row in self.squares], object)

    def normalizers(self, *, causal: bool = False) -> tuple[Whole, NDArray[np.int64]]:
        """Integers and exponents of the sums of squares; causal: row i up to key i."""
        sums = self.sums(causal=causal)
        if causal:
            sums = np.array([sums[i, i] for i in range(len(sums))], object)
        return sums, 2 * self.products[1]

    def attention(self, *, causal: bool = False) -> tuple[Whole, Whole]:
        """Numerators (m, n) and denominators (m,) of the scores; rows of zeros have denominator 0."""
        over = self.squares
        if causal:
            over = np.tril(over)
        return over, np.array([sum(row) for row in over], object)

    def values(self) -> Float:
        """Products ⟨q_i, k_j⟩, rounded once."""
        Z, exponents = self.products
        rows = [[scaled(z, int(e)) for z in row] for row, e in zip(Z, exponents, strict=True)]
        return np.array(rows, np.float64).reshape(Z.shape)

    def shares(self, f: Function) -> Iterator[tuple[Decimals, Decimal]]:
        """For each query the values of f at its products with all keys, to 58 digits, and their sum."""
        rows, place = self._distinct
        counts = np.bincount(place, minlength=len(rows))
        few = Truth(rows, self.Q)
        with localcontext(DIGITS):
            for Z, exponent in zip(*few.products, strict=True):
                unit = Decimal(2) ** int(exponent)
                values = f(np.array([Decimal(z) * unit for z in Z], object))
                total = sum((x * int(count) for x, count in zip(values, counts, strict=True)), Decimal(0))
                yield values[place], total

    def softmax(self, scale: float) -> Float:
        """exp of the logits less the largest of their row, to about 1e-13."""
        Z, exponents = self.products
        powers = np.zeros(Z.shape)
        for i, row in enumerate(Z):
            unit = Fraction(scale) * fraction(1, int(exponents[i]))
            largest = max(row, default=0)
            powers[i] = [math.exp(max(quotient((z - largest) * unit.numerator, unit.denominator), -1e4)) for z in row]
        return powers

    def output(self, V: Float, *, causal: bool = False) -> tuple[Whole, Whole, int]:
        """Numerators (m, v), denominators (m,) and the exponent of A V."""
        over, under = self.attention(causal=causal)
        values, e = integers(V)
        return product(over, values), under, int(e)


@dataclass(frozen=True, eq=False)
class Centered(Truth):
    """What is true of keys less their mean: of those that the mask (n,) leaves, and zeros in place of the others.

    With H the projection on the columns of the keys as they are, a score is ``H_ii + r_i² / ‖r‖² - 1/n`` for the
    residual ``r = 1 - H 1``: blocks stay apart. Where r is zero, a constant lies in the columns, and the keys are
    centered and eliminated anew.
    """

    mask: NDArray[np.bool_]

    @cached_property
    def _plain(self) -> Truth:
        return Truth(self.K, self.Q)

    @cached_property
    def _residual(self) -> tuple[list[Whole], Fraction]:
        """``D r - D`` of the keys of each block, D its denominator, and ‖r‖²."""
        parts, size = [], Fraction(int(self.mask.sum()))
        for block in self._plain._blocks:
            sums = (block.counts[:, None] * block.rows).sum(axis=0)
            solution = product(block.inverse, sums[:, None])
            parts.append(-product(block.rows, solution)[:, 0])
            size -= Fraction(int(product(sums[None], solution)[0, 0]), block.denominator)
        return parts, size

    @cached_property
    def rank(self) -> int:
        return self._plain.rank if self._residual[1] else super().rank

    @cached_property
    def condition(self) -> float:
        rest, n = self._residual[1], int(self.mask.sum())
        if not rest:
            return super().condition
        inflation, columns = Fraction(0), 0
        for block in self._plain._blocks:
            sums = (block.counts[:, None] * block.rows).sum(axis=0)
            squares = (block.rows * block.rows * block.counts[:, None]).sum(axis=0)
            solution = product(block.inverse, sums[:, None])[:, 0]
            for k, total in enumerate(sums):
                inverse = Fraction(int(block.inverse[k, k]), block.denominator)
                inverse += Fraction(int(solution[k]), block.denominator) ** 2 / rest
                inflation += inverse * (int(squares[k]) - Fraction(int(total) ** 2, n))
            columns += len(sums)
        return max(1.0, math.sqrt(quotient(inflation.numerator * max(columns, 1), inflation.denominator)))

    @cached_property
    def _scores(self) -> tuple[Whole, Whole]:
        parts, rest = self._residual
        if not rest:
            return super()._scores
        distinct, place = self._plain._distinct
        over, under = self._plain._scores
        n, residual = int(self.mask.sum()), np.full(len(distinct), Fraction(1), object)
        for block, part in zip(self._plain._blocks, parts, strict=True):
            residual[block.among] += [Fraction(int(x), block.denominator) for x in part]
        found = [
            Fraction(int(x), int(y)) + residual[row] ** 2 / rest - Fraction(1, n) if there else Fraction(0)
            for x, y, row, there in zip(over, under, place, self.mask, strict=True)
        ]
        return np.array([x.numerator for x in found], object), np.array([x.denominator for x in found], object)

    @cached_property
    def _distinct(self) -> tuple[Float, NDArray[np.int64]]:
        """Rows with one more column, of ones for those that are there."""
        rows, place = np.unique(np.column_stack([self.K, self.mask]), axis=0, return_inverse=True)
        return rows, place.reshape(-1)

    @cached_property
    def _whole(self) -> Whole:
        """The rows less their mean, times the number of rows that are there."""
        rows, place = self._distinct
        there = rows[:, -1] > 0
        counts = np.where(there, np.bincount(place, minlength=len(rows)), 0).astype(object)
        M = integers(rows[:, :-1], axis=0)[0]
        return np.where(there[:, None], M * int(counts.sum()) - (counts[:, None] * M).sum(axis=0), 0)


def quotient(over: int, under: int) -> float:
    """over/under, rounded once; 0 and infinity beyond the range."""
    if under == 0:
        return 0.0
    try:
        return over / under
    except OverflowError:
        return math.inf if (over > 0) == (under > 0) else -math.inf


def scaled(whole: int, exponent: int) -> float:
    """``whole 2^exponent``, rounded once."""
    return quotient(whole << max(exponent, 0), 1 << max(-exponent, 0))


def fraction(whole: int, exponent: int) -> Fraction:
    return Fraction(whole << max(exponent, 0), 1 << max(-exponent, 0))


# -- other functions --------------------------------------------------------------------------------------------------
# Of arrays of float64, good to some units in the last place, or of decimals, in the context of 60 digits.

Function = Callable[[Any], Any]


def alike(value: float, x: Any) -> Any:
    """A number of the kind that an array holds."""
    return Decimal(value) if x.dtype == object else value


def power(p: float) -> Function:
    return lambda x: np.abs(x) ** alike(p, x)


def huber(delta: float) -> Function:
    def f(x: Any) -> Any:
        size, at = np.abs(x), alike(delta, x)
        return np.where(size <= at, np.minimum(size, at) ** 2 / 2, at * (size - at / 2))

    return f


def tukey(c: float) -> Function:
    def f(x: Any) -> Any:
        at = alike(c, x)
        u = np.minimum(np.abs(x) / at, alike(1, x)) ** 2
        return at * at / 6 * u * (3 - 3 * u + u * u)

    return f


def l1l2(x: Any) -> Any:
    return x * x / (np.sqrt(1 + x * x / 2) + 1)


def fair(c: float) -> Function:
    def f(x: Any) -> Any:
        at = alike(c, x)
        u = np.abs(x) / at
        near = np.minimum(u, alike(0.01, x))
        series = sum((-1) ** k * near**k / k for k in range(2, 32))
        logarithm = np.frompyfunc(lambda y: (1 + y).ln(), 1, 1) if x.dtype == object else np.log1p
        return at * at * np.where(u < alike(0.01, x), series, u - logarithm(u))

    return f


def shares(f: Function, z: Float) -> Float:
    """f(z)/Σf(z) along the last axis, and 0 where it leaves the range."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
        values = f(z)
        total = values.sum(axis=-1, keepdims=True)
        least = np.min(values, axis=-1, keepdims=True, initial=1.0, where=values > 0)
        return np.where(np.isfinite(total) & (least > 1e-280) & (total > 0), values / total, 0.0)


def queries_for(truth: Truth, j: int, rng: np.random.Generator) -> Iterator[Float]:
    """Products of the keys with some queries under which key j, whose product is 1, may get much attention."""
    z = truth.witnessed(j)
    if not z[j]:
        return
    yield z
    block, at = truth.block_of(j)
    if block is None or not 2 <= block.rows.shape[1] <= len(block.rows):
        return
    for _ in range(3):  # orthogonal to all but one of some independent keys: for functions that count the others
        others = [i for i in rng.permutation(len(block.rows)) if i != at][: block.rows.shape[1] - 1]
        y = orthogonal(block.rows[others])
        if y is None:
            continue
        z = product(block.rows, y[:, None])[:, 0]
        if z[at]:
            yield truth.spread(block, z, at)


def orthogonal(A: Whole) -> Whole | None:
    """An integer vector, not 0, orthogonal to the r − 1 rows of A; None where those are dependent."""
    r = A.shape[1]
    table, columns, before = A.copy(), [], 1
    for k in range(len(table)):
        there = next(
            ((i, c) for c in range(r) for i in range(k, len(table)) if c not in columns and table[i, c]), None
        )
        if there is None:
            return None
        i, c = there
        table[[k, i]] = table[[i, k]]
        rest = [i for i in range(len(table)) if i != k]
        table[rest] = (table[rest] * table[k, c] - np.multiply.outer(table[rest, c], table[k])) // before
        before = table[k, c]
        columns.append(c)
    free = next(c for c in range(r) if c not in columns)
    y = np.zeros(r, object)
    y[free] = before
    for k, c in enumerate(columns):
        y[c] = -table[k, free]
    return y
