"""A sample of rows that come in chunks, in one pass: the rows that a sample of all rows at once would have."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_float64
from levattn._core.checks import check_type, fraction, positive_number, whole_number
from levattn._core.device import where_arrays_are
from levattn._core.random import as_seed, uniforms
from levattn._core.serialize import StoredState, lock_of, locked, locked_with, shaped, whole
from levattn._core.types import Float64, Int64
from levattn._kernels import BLOCK, Rows
from levattn.linalg.accumulator import GramAccumulator, Total, rounded_total, total_arrays, total_of
from levattn.linalg.factor import Factor
from levattn.linalg.reading import as_read, refuse_nonfinite
from levattn.linalg.weighted import checked_weights, exact_products, require_products
from levattn.sensitivity.leverage import ridge_of
from levattn.sensitivity.sampling import RowSample, eigenvalues_of, one_of, promised_distortion
from levattn.sketch.families import chernoff_exponent, log_of_ratio
from levattn.states import factor_of, factor_of_sum
from levattn.states.blocks import BlockBuffer, RowNumbers, as_they_came, in_main_memory, require_format
from levattn.states.spans import MOST_NUMBERS, stored_spans, with_span, with_spans

_STREAM = 103  # of the random numbers of rows
_FORMATS = ("float64", "float32", "float16", "bfloat16")
_LEAST = 1e-12  # sum of ridge leverage scores below which rounding hides it


@dataclass(frozen=True)
class _Rule:
    """The factor c by which leverage scores become probabilities min(1, cτ)."""

    size: int | None
    eta: float | None
    delta: float
    root: float  # of the ridge

    def factor(self, rank: int, mass: float) -> float:
        """Return c for rows of this rank whose scores sum to `mass`: it rises with the rank, or falls with the sum."""
        if self.eta is None:
            return (self.size or 0) / max(mass, _LEAST)
        exponent, most = chernoff_exponent(self.eta), sys.float_info.max  # which takes every row with a score
        return min(log_of_ratio(2 * max(rank, 1), self.delta) / exponent, most) if exponent else most

    def promised(self, c: float, rank: int) -> float:
        """Return the distortion that c promises."""
        return self.eta if self.eta is not None else promised_distortion(c, max(rank, 1), self.delta)


@dataclass(frozen=True, eq=False)
class _Held:
    """Rows that may still be sampled."""

    numbers: Int64
    uniform: Float64  # by which each is decided
    weights: Float64
    scores: Float64  # the smallest leverage score so far
    keys: npt.NDArray[Any]  # as stored

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, which: Any) -> _Held:
        """Return some of the rows."""
        return _Held(*(getattr(self, each.name)[which] for each in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[_Held]) -> _Held:
        """Return the rows of one or more parts."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)))

    def below(self, scores: Float64) -> _Held:
        """Return the rows with scores that are at most these."""
        return replace(self, scores=np.minimum(self.scores, scores))


def _new(beside: Sequence[Any], keys: npt.NDArray[Any]) -> _Held:
    """Return rows (1, m, d) of which nothing is known yet, with their numbers, uniform numbers and weights (1, m)."""
    numbers, uniform, weights = (np.asarray(array)[0] for array in beside)
    return _Held(numbers, uniform, weights, np.ones(len(numbers)), keys[0])


class _Store:
    """The rows of a stream that may still be sampled, and the sums over all rows.

    The factor of an earlier prefix screens each block. After blocks 1, 2, 4, ..., and where the state holds too many
    rows, the factor of all blocks so far judges the held rows, and then screens. So the blocks alone decide when rows
    are judged.
    """

    def __init__(self, rule: _Rule, d: int, format: Any) -> None:
        self.rule, self.d, self.format = rule, d, format
        self.sums = GramAccumulator(1, d)
        self.tail = BlockBuffer(1, d, format, np.zeros((1, 0), np.int64), *(np.zeros((1, 0)) for _ in range(2)))
        self.held: list[_Held] = [self.waiting()]
        self.count, self.limit = 0, BLOCK
        self.most = math.inf  # no later c is larger
        self.frozen: Total | None = None  # the moment of the prefix that screens
        self._screen: Factor | None = None

    def copy(self) -> _Store:
        """Return a copy to continue with."""
        other = _Store.__new__(_Store)
        other.__dict__.update(self.__dict__, sums=self.sums.copy(), tail=self.tail.copy(), held=list(self.held))
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle; the screen is made anew."""
        return vars(self) | {"_screen": None}

    def settled(self) -> _Store:
        """Return the state after all whole blocks."""
        if self.tail.count < BLOCK:
            return self
        other = self.copy()
        other.tail.flush(other.take)
        return other

    def expect_rounded(self) -> None:
        """Take rows from here on as rounded, in a state that no copy shares."""
        self.sums.rounded, self._screen = True, None
        if self.frozen is not None:
            self.frozen = rounded_total(self.frozen)

    def waiting(self) -> _Held:
        """Return the rows that wait."""
        return _new(self.tail.payload, self.tail.rows.keys)

    def read(self, held: _Held, mask: Any = None) -> Rows:
        """Return rows times the roots of their weights."""
        rows = Rows(held.keys[None], self.format, mask, weights=np.sqrt(held.weights)[None])
        return Rows(as_read(rows)[None], "float64")

    def take(self, rows: Rows, *beside: Any) -> None:
        """Add whole blocks; after an error the state is void."""
        for start in range(0, rows.shape[1], BLOCK):
            run = rows.between(start, start + BLOCK)
            new = _new([array[:, start : start + BLOCK] for array in beside], run.keys)
            X = self.read(new, run.mask)
            self.sums.add(X)
            if self.frozen is None:
                new = new.take(X.keys[0].any(axis=1))  # no sample has rows of zeros, as masked ones are read
            else:
                x = _scores(self._screening(self.frozen), X, member=False)
                with np.errstate(invalid="ignore"):
                    new = new.below(np.where(np.isinf(x), 1.0, x / (1 + x)))  # among the prefix and the row itself
                new = new.take(new.uniform < self.most * new.scores)
            self.hold(new)
            number = self.sums.blocks.count
            if self.count > self.limit or not number & (number - 1):
                self.judge()

    def hold(self, new: _Held) -> None:
        """Hold rows in memory that nothing else writes to."""
        self.held.append(new)
        self.count += len(new)

    def judge(self) -> None:
        """Drop the held rows that are not in the sample of all blocks so far, and so of no more rows."""
        self.frozen, self._screen = self._total(), None
        factor, held = self._screening(self.frozen), _Held.joined(self.held)
        held = held.below(_scores(factor, self.read(held)))
        self.most = min(self.most, self.rule.factor(self.d, self._mass(factor)))
        self.held = [held.take(held.uniform < self.most * held.scores)]
        self.count = len(self.held[0])
        self.limit = 2 * self.count + BLOCK

    def _screening(self, frozen: Total) -> Factor:
        if self._screen is None:
            self._screen = factor_of_sum(*frozen, self._no_rows()).exactly()
        return self._screen

    def _no_rows(self) -> Rows:
        return Rows(np.zeros((1, 0, self.d)), "float64")

    def _penalty(self) -> Rows:
        """Return rows whose moment is λI."""
        return Rows(self.rule.root * np.eye(self.d)[None], "float64")

    def _total(self, tail: Rows | None = None) -> Total:
        """Return the moment of all blocks, of further rows and of the ridge."""
        sums = self.sums
        if self.rule.root:
            sums = sums.copy()
            sums.merge(*GramAccumulator(1, self.d).total(self._penalty()))
        return sums.total(self._no_rows() if tail is None else tail)

    def _mass(self, factor: Factor) -> float:
        """Return the sum of the scores of all rows of a factor: its rank less the scores of the ridge.

        A ridge below the rounding of the moment reaches out of the row space; its part there counts for nothing.
        """
        rank = float(factor.rank[0])
        if not self.rule.root:
            return rank
        return rank - float(np.sum(factor.whitened(as_read(factor.on(self._penalty()).rows)) ** 2))

    def sample(self, numbers_end: int) -> RowSample:
        """Return the sample of all rows so far; the state is `settled`."""
        waiting = self.waiting()
        held, tail = _Held.joined([*self.held, waiting]), self.read(waiting)
        if self.rule.root:
            factor = factor_of_sum(*self._total(tail), self._no_rows()).exactly()
        else:
            factor = factor_of(self.sums, tail).exactly()
        held, rank = held.below(_scores(factor, self.read(held))), int(factor.rank[0])
        c = min(self.rule.factor(rank, self._mass(factor)), self.most)
        with np.errstate(over="ignore"):
            p = np.minimum(c * held.scores, 1.0)
        kept = np.flatnonzero(held.uniform < p)
        kept = kept[np.argsort(held.numbers[kept])]
        held, p = held.take(kept), p[kept]
        X, w, extremes = self.read(held).keys[0], 1 / p, (1.0, 1.0)
        if self.rule.root:
            X, w = np.concatenate([X, self._penalty().keys[0]]), np.concatenate([w, np.ones(self.d)])
        if rank:
            extremes = eigenvalues_of(factor, factor.on(Rows(X[None], "float64")).rows, w)
        promised = self.rule.promised(c, self.d if self.rule.root else rank) if rank else 0.0
        counts, keys = np.ones(len(held), np.int64), as_they_came(held.keys, self.format)
        figures = extremes, promised, self.rule.delta, keys
        return RowSample(held.numbers, held.weights / p, counts, p, len(held), numbers_end, *figures)

    def merge(self, other: _Store) -> None:
        """Add the rows of another state, which is `settled`; after an error this state is void."""
        waiting = other.waiting()
        self.sums.merge(*other.sums.total(other.read(waiting)))
        self.most = min(self.most, other.most)
        self.hold(_Held.joined([*other.held, waiting]))
        if self.count > self.limit:
            self.judge()


def _scores(factor: Factor, rows: Rows, *, member: bool = True) -> Float64:
    """Return the leverage scores of rows of one matrix."""
    return np.asarray(factor.on(rows).scores(as_float64=True, member=member, numerical=True)[0][0])


class StreamingRowSample(StoredState, name="StreamingRowSample", version=1):
    r"""A sample of the rows of a stream by their leverage scores among all rows, in one pass.

    Row i gets a uniform number :math:`u_i` from the seed and its number i. It is in the sample if
    :math:`u_i < p_i = \min(1, c \tau_i)`, with its leverage score :math:`\tau_i` among all rows, and then has the
    weight :math:`1/p_i`. Rows are decided independently, so :math:`\sum w\, k k^T` has the mean KᵀK.

    A leverage score never rises as rows are added. So the state drops a row for good once :math:`u_i \ge c \tau_i`
    among the rows so far. The sample is the one of all rows at once, up to rounding. It does not depend on the chunks,
    and the sample of merged states not on their order. The bits are the same for all chunks and numbers of threads.

    With :math:`c = \ln(2r/\delta) / ((1+\eta)\ln(1+\eta) - \eta)` for the rank r, the sample keeps all ``‖K y‖²``
    within 1 ± η, except with probability δ. It has at most c r rows on average. `result` also measures the distortion
    that the sample reached, which is exact up to rounding.

    Parameters
    ----------
    size : int, optional
        Number m of rows, at least 1: c is m over the rank. The sample has m rows on average, and fewer where scores
        above 1/c are cut to the probability 1.
    distortion : float in (0, 1), optional
        Instead of `size`: the distortion η that is promised.
    failure : float in (0, 1), default 0.01
        The probability δ that the promise fails.
    ridge : float, default 0
        The number λ, as in `leverage_scores`: scores are ridge leverage scores, and the distortion is of
        ``‖K y‖² + λ‖y‖²``. With it, c is m over the effective dimension, at least 10⁻¹², and r is the number of
        columns.
    row_start : int, default 0
        Number of the first row. States that are to be merged must have different numbers, which give their rows
        different random numbers.
    rng : int, numpy.random.Generator or None
        Seed of the random numbers, or a generator that draws a seed; None for the seed 0.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, or not exactly one of `size` and `distortion` is given.

    See Also
    --------
    sample_rows : Rows in memory or in files, drawn with replacement, by these or by other scores.
    levattn.definitions.poisson_sample : The definition, in NumPy.
    StreamingUniversalSet : The rows of large scores, all of them.

    Notes
    -----
    Time O(n d²). Memory O(d² log n) for the sums, beside the held rows and the rows that wait. These are fewer than
    2048, or up to 9 MiB of small chunks. Each time the state judges the held rows, at most c r are left on average. It
    judges them again before it holds twice as many and two blocks of 2048. A rank may still rise, so a promise takes
    the c of rank d for these decisions.

    A row at the edge of the rank, with a part outside the numerical row space, counts as 1. So the sample has each
    such row; rounding decides which these are, so it may have others after merges in another order. Later rows may
    hide this part of earlier ones, where it becomes smaller than rounding. The earlier rows then keep their smallest
    probability so far, and sums stay unbiased.

    *Argument.* Let x be the whitened rows. A row with :math:`p_i < 1` adds :math:`x_i x_i^T/p_i` with probability
    :math:`p_i`, of norm :math:`\tau_i/p_i \le 1/c`. A row with :math:`p_i = 1` adds a fixed matrix, the sum of equal
    parts of norm at most 1/c, and so does the ridge. All terms are independent, and their sum has the mean I. So the
    matrix Chernoff bound holds, as in `sample_size`.

    References
    ----------
    Tropp, "User-friendly tail bounds for sums of random matrices", 2012 (arXiv:1004.4389), Theorem 1.1.
    Cohen, Musco and Pachocki, "Online Row Sampling", APPROX 2016 (arXiv:1604.05448), decide about each row as it
    comes, by its score so far, and take more rows by a logarithmic factor. This state decides by the final scores, for
    which it keeps the second moment of all rows.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.random.default_rng(0).standard_normal((20_000, 5))
    >>> state = levattn.StreamingRowSample(distortion=0.5, rng=1)
    >>> for start in range(0, 20_000, 700):
    ...     state = state.update(K[start : start + 700])
    >>> sample = state.result()
    >>> S = sample.rows()
    >>> len(sample), sample.distortion < 0.5, S.shape
    (308, True, (308, 5))
    """

    def __init__(
        self,
        size: int | None = None,
        *,
        distortion: float | None = None,
        failure: float = 0.01,
        ridge: float = 0.0,
        row_start: int = 0,
        rng: int | np.random.Generator | None = None,
    ) -> None:
        rows, eta = one_of(size, distortion)
        ridge_of(ridge, 0.0)
        self._rule = _Rule(rows, eta, fraction("failure", failure), math.sqrt(ridge))
        self._next_row = whole_number("row_start", row_start, 0, MOST_NUMBERS - 1)
        self._seed = as_seed(rng)
        self._spans: list[tuple[int, int]] = []  # of row numbers, ascending
        self._store: _Store | None = None  # not before the first chunk tells the shape

    def __repr__(self) -> str:
        """Return the figures on one line; nothing is computed for it."""
        state, rule = self._snapshot(), self._rule
        shape = "no chunk yet" if state._store is None else f"n={state.n}, d={state._store.d}"
        asked = f"size={rule.size}" if rule.eta is None else f"distortion={rule.eta:.6g}"
        return f"StreamingRowSample({asked}, {shape})"

    @property
    def n(self) -> int:
        """Number of rows so far, masked ones among them."""
        return sum(stop - start for start, stop in self._spans)

    @property
    def held(self) -> int:
        """Number of rows that are held now."""
        store = self._settled()
        return 0 if store is None else store.count + store.tail.count

    @locked
    def _settled(self) -> _Store | None:
        """Return the store of the chunks so far, after all whole blocks; it stays as it is."""
        if self._store is not None:
            self._store = self._store.settled()
        return self._store

    @where_arrays_are
    def update(self, K: Any, *, mask: Any = None, weights: Any = None) -> StreamingRowSample:
        """Add a chunk of rows.

        Parameters
        ----------
        K : array of shape (m, d)
            Rows, m ≥ 0; kinds and dtypes as in `leverage_scores`, in all chunks alike, but not sparse. They are held
            and summed in main memory. For least squares, give the columns of K and y together.
        mask : array of bool, shape (m,), optional
            True for a row that takes part. The others count as rows.
        weights : array of float, broadcast to (m,), optional
            The weight of each row, finite and of at least 0, as in `sample_rows`.

        Returns
        -------
        StreamingRowSample
            The state itself.

        Raises
        ------
        TypeError, ValueError
            If the chunk does not go with those before, or is not one matrix.
        NonFiniteError
            If the rows hold NaN or infinity outside the mask. After any error the state is as it was.
        """
        matrices, rows = in_main_memory(K, mask)
        if matrices.batch:
            raise ValueError(f"K has shape {(*matrices.batch, matrices.n, matrices.d)}; expected one matrix (m, d)")
        m, w = matrices.n, np.ones((1, matrices.n))
        if weights is not None:
            w = checked_weights(weights, matrices, rows)
            rows = replace(rows, mask=w > 0)
            require_products(to_float64(rows.keys, rows.format), np.sqrt(w))
        with lock_of(self):
            store = _Store(self._rule, matrices.d, matrices.format) if self._store is None else self._store.copy()
            if matrices.d != store.d:
                raise ValueError(f"K has {matrices.d} columns; expected {store.d} as before")
            require_format("K", matrices.format, store.format)
            start, stop = self._next_row, self._next_row + m
            spans = with_span(self._spans, (start, stop))
            if not exact_products(np.sqrt(w)):
                store.expect_rounded()
            beside = RowNumbers(start, m), uniforms(self._seed, _STREAM, start, m)[None], w
            try:
                store.tail.push(rows, store.take, *beside)
            except FloatingPointError:
                refuse_nonfinite(rows, self.n)
            self._store, self._spans, self._next_row = store, spans, stop
        return self

    @locked_with
    def merge(self, other: StreamingRowSample) -> StreamingRowSample:
        """Add the rows of another state, which must have other numbers.

        Parameters
        ----------
        other : StreamingRowSample
            A state with the same options and seed, and of as many columns and the same dtype. It is not changed.

        Returns
        -------
        StreamingRowSample
            The state itself, which now stands for the rows of both.

        Raises
        ------
        TypeError, ValueError
            If the states do not go together, or both have rows of the same numbers.

        Notes
        -----
        Time O(d³ + h d²) for h held rows, whatever the number of rows.
        """
        check_type("other", other, StreamingRowSample, "StreamingRowSample")
        if (other._rule, other._seed) != (self._rule, self._seed):
            raise ValueError(f"other is {other!r} with other options or another seed; expected those of {self!r}")
        mine, theirs = self._settled(), other._settled()
        if theirs is None:
            return self
        spans = with_spans(self._spans, other._spans)
        store = _Store(self._rule, theirs.d, theirs.format) if mine is None else mine.copy()
        if theirs.d != store.d:
            raise ValueError(f"other has {theirs.d} columns; expected {store.d}")
        require_format("other", theirs.format, store.format)
        store.merge(theirs)
        self._store, self._spans = store, spans
        self._next_row = max(self._next_row, spans[-1][1]) if spans else self._next_row
        return self

    def result(self) -> RowSample:
        """Return the sample of the rows so far; the state goes on.

        Returns
        -------
        RowSample
            The sample, with its rows as `keys`. Its size differs from call to call of other seeds.

        Raises
        ------
        ValueError
            If there was no chunk yet, so that the shape of the rows is not known.
        """
        with lock_of(self):
            store, spans = self._settled(), self._spans
        if store is None:
            raise ValueError("there was no chunk of rows yet; expected at least one update, if only with 0 rows")
        return store.sample(spans[-1][1] if spans else 0)

    @locked
    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return rows, sums and options; see `StoredState`."""
        rule, store = self._rule, self._settled()
        options: dict[str, Any] = {"size": rule.size, "distortion": rule.eta, "failure": rule.delta}
        found: dict[str, Any] = {"options": options, "root": rule.root, "seed": self._seed}
        found |= {"next_row": self._next_row, "spans": self._spans, "begun": store is not None}
        if store is None:
            return found, {}
        more, arrays = store.sums.parts()
        most = store.most if math.isfinite(store.most) else None
        more |= {"d": store.d, "format": store.format, "limit": store.limit, "most": most}
        arrays |= total_arrays("frozen", store.frozen)
        for name, held in (("held", _Held.joined(store.held)), ("tail", store.waiting())):
            arrays |= {f"{name}.{each.name}": getattr(held, each.name) for each in fields(held)}
        return found | more, arrays

    @classmethod
    def from_parts(cls, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> StreamingRowSample:
        """Return the state of the same rows, sums and options; see `StoredState`."""
        self = cls(**fields["options"], row_start=whole(fields["next_row"]), rng=whole(fields["seed"]))
        root = fields["root"]
        ridge_of(root, 0.0)
        self._rule = replace(self._rule, root=float(root))
        self._spans = stored_spans(fields["spans"], self._next_row)
        if fields["begun"]:
            self._store = _restored(self._rule, fields, arrays, self._next_row)
            if max(self._store.sums.blocks.count * BLOCK + self._store.tail.count, self._store.count) > self.n:
                raise ValueError("more rows were summed than there were")
        return self


def _restored(rule: _Rule, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], next_row: int) -> _Store:
    """Return the store of the parts of a state, or raise ValueError, TypeError or LookupError."""
    d, format = whole(fields["d"], 1), fields["format"]
    if format not in _FORMATS:
        raise ValueError(f"rows are of format {format!r}")
    shaped(arrays["exponents"], np.int32, (1, d))  # before the claims of the fields take memory
    store = _Store(rule, d, format)
    store.sums = GramAccumulator.from_parts(fields, arrays, 1, d)
    store.frozen = total_of(arrays, "frozen", 1, d)
    store.limit = whole(fields["limit"])
    if fields["most"] is not None:
        store.most = positive_number("most", fields["most"])
    if store.frozen is not None and math.isinf(store.most):
        raise ValueError("the factor of probabilities does not match the screen")
    held, tail = (_checked(arrays, name, store, next_row) for name in ("held", "tail"))
    beside = (array[None] for array in (tail.numbers, tail.uniform, tail.weights))
    store.tail.hold(store.sums.blocks.count, tail.keys[None], *beside)
    store.held, store.count = [held], len(held)
    return store


def _checked(arrays: dict[str, npt.NDArray[Any]], name: str, store: _Store, next_row: int) -> _Held:
    """Return rows of a stored state, or raise ValueError or LookupError."""
    held = _Held(*(arrays[f"{name}.{each}"] for each in ("numbers", "uniform", "weights", "scores", "keys")))
    k = len(held.numbers)
    shaped(held.numbers, np.int64, (k,))
    for array in (held.uniform, held.weights, held.scores):
        shaped(array, np.float64, (k,))
    shaped(held.keys, store.tail.rows.keys.dtype, (k, store.d))
    if not np.isfinite(to_float64(held.keys, store.format)).all():
        raise ValueError("rows that are held are not finite")
    if ((held.numbers < 0) | (held.numbers >= next_row)).any() or (np.diff(np.sort(held.numbers)) == 0).any():
        raise ValueError("a row is held that has the number of no row, or of another")
    if min(held.uniform.min(initial=0), held.weights.min(initial=0), held.scores.min(initial=0)) < 0:
        raise ValueError("a held number is negative")
    if max(held.uniform.max(initial=0), held.scores.max(initial=0)) > 1:
        raise ValueError("a uniform number or a score is above 1")
    return held
