"""The factor of a second moment: rank, error, scores, normalizers and witness queries."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import (
    Matrices,
    array_namespace,
    as_matrices,
    on_cuda,
    take_entries,
    to_device,
    to_numpy,
    where,
)
from levattn._core.blas import lapack
from levattn._core.cached import cached_property
from levattn._core.device import where_arrays_are
from levattn._core.sparse import Csr
from levattn._core.types import Flags, Float64, Int64
from levattn._kernels import GRAM, KEYS, PRECISE, Arithmetic, Rows
from levattn.linalg.accumulator import UNIT
from levattn.linalg.reading import as_read
from levattn.linalg.span import Relations, Span, nonzero_rows
from levattn.linalg.wide import Wide

_LIFT = 2.0**500  # multiplies rows whose squares may underflow: rows with a squared norm below _TINY
_TINY = 2.0**-960
_LARGEST_LIFT = 2.0**1000  # under this factor no nonzero entry has a square of zero
_ONE_THREAD = 1 << 18  # OpenBLAS computes products of up to so many multiplications in one thread
_LEAST_BLOCK = 8  # rows of such a product; BLAS is slow with fewer


@dataclass(eq=False)
class Scored:
    """Scores of the rows of a factor, (b, n), that were computed beside it, up to 1; only for matrices with a flag."""

    scores: Any
    flags: Flags

    def take(self) -> tuple[Any, Flags]:
        """Return the scores and flags, once: the caller may write to them."""
        taken, self.scores = self.scores, None
        return taken, self.flags


@dataclass(frozen=True, repr=False, eq=False)
class Factor:
    """A batch of factors, one for each key matrix K: a W such that K W has orthonormal columns.

    So ‖Wᵀk‖² is the leverage score of a key k. A single matrix has a batch of one. `UniversalSet.factor` holds the
    factor of its keys.

    Attributes
    ----------
    rows : levattn._kernels.Rows
        The keys, with the shift and scale under which they were factored. For `wide` keys these are only the factored
        columns, and d below is the number of these columns.
    W : array of float64, shape (b, d, d)
        The factors of the rows after shift and scale; on the device of the moments.
    rank : array of int64, shape (b,)
        Numerical rank.
    error : array of float64, shape (b,)
        Estimate of the relative error that W causes in a score, or in a normalizer computed from W. Decisions allow
        for four times as much.
    arithmetic : tuple of str
        Arithmetic in which scores are computed, for each matrix.
    product_error : array of float64, shape (b,)
        Estimate of the relative error that float32 products cause in a score; 0 where products are in float64.
    basis, correction : array of float64, shape (b, d, d), or None
        Where the arithmetic is compensated, ``W = basis correction``.
    null_directions : dict
        For each rank-deficient matrix, by its number, an orthonormal basis (d, k) of the equilibrated directions left
        out, and the column norms (d,) that equilibrate.
    spans : dict
        For each rank-deficient matrix, by its number, the exact row space of the keys, where it is known.
    hidden : dict
        For each matrix with an exact rank above its numerical rank, by its number, a factor of the exact rank. None
        if no such factor has correct digits.
    shortened : dict
        For matrices among these with keys that are far longer than most, a factor of the exact rank with these keys
        shortened. Its scores are upper bounds.
    projection : array of float64, shape (b, d, k), or None
        Random projection of the whitened rows, where scores are computed from it.
    wide : levattn.linalg.wide.Wide or None
        For keys with fewer rows than columns, the keys, and the columns that were factored in their place. `on`,
        `witness` and `normalizer` take and return rows and queries of all columns.
    scored : Scored or None
        Scores of the rows that are there already, for `leverage_scores`.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> K = np.random.default_rng(0).standard_normal((500, 4))
    >>> factor = levattn.universal_set(K, 0.5).factor
    >>> q = factor.witness(K[3])
    >>> scores = (K @ q) ** 2 / ((K @ q) ** 2).sum()
    >>> bool(np.isclose(scores[3], levattn.leverage_scores(K)[3]))
    True
    >>> bool(np.isclose(((factor.normalizer[0] @ q) ** 2).sum(), ((K @ q) ** 2).sum()))
    True
    """

    rows: Rows
    W: Any
    rank: npt.NDArray[np.int64]
    error: Float64
    arithmetic: tuple[Arithmetic, ...]
    product_error: Float64
    basis: Float64 | None = None
    correction: Float64 | None = None
    null_directions: dict[int, tuple[Float64, Float64]] = field(default_factory=dict)
    spans: dict[int, Span | Relations] = field(default_factory=dict)
    hidden: dict[int, Factor | None] = field(default_factory=dict)
    shortened: dict[int, Factor] = field(default_factory=dict)
    projection: Float64 | None = None
    wide: Wide | None = None
    scored: Scored | None = None

    def __repr__(self) -> str:
        """Return the figures on one line; for a batch the largest ones."""
        matrices = f" in {len(self.rank)} matrices" if len(self.rank) != 1 else ""
        rank, error = max(self.rank.tolist(), default=0), max(self.error.tolist(), default=0.0)
        return f"Factor(rank={rank} of {self.columns} columns{matrices}, error={error:.3g})"

    @property
    def _held_array(self) -> Any:
        return self.W, self.rows.keys, self.all_columns.keys

    @property
    def all_columns(self) -> Rows:
        """The keys with all their columns; `rows` lacks some where they are wide."""
        return self.rows if self.wide is None else self.wide.rows

    @property
    def columns(self) -> int:
        """Number of columns of the keys."""
        return self.all_columns.shape[2]

    @property
    def shift(self) -> Float64 | None:
        """The vectors subtracted from the keys, (b, columns), rounded."""
        rows = self.all_columns
        if rows.shift is None:
            return None
        return np.asarray(rows.shift[:, 0] if rows.scale is None else rows.shift[:, 0] / rows.scale)

    @cached_property
    @where_arrays_are
    def whitening(self) -> Float64:
        """W in main memory, (b, d, d)."""
        return to_numpy(self.W)

    def on(self, rows: Rows) -> Factor:
        """Return this factor for other rows, read with the same shift and scale.

        Parameters
        ----------
        rows : levattn._kernels.Rows
            Rows of the same batch.

        Returns
        -------
        Factor
            Its `scores` are the scores of these rows.
        """
        if self.wide is not None:
            rows = self.wide.picked(rows)
        return replace(self, rows=replace(rows, shift=self.rows.shift, scale=self.rows.scale), scored=None)

    def item(self, index: int) -> Factor:
        """Return the factor of one matrix of the batch, as a batch of one.

        Parameters
        ----------
        index : int
            Number of the matrix.

        Returns
        -------
        Factor
            The factor of this matrix.
        """
        one = slice(index, index + 1)
        return replace(
            self,
            rows=self.rows.item(index),
            W=self.W[one],
            rank=self.rank[one],
            error=self.error[one],
            arithmetic=self.arithmetic[one],
            product_error=self.product_error[one],
            basis=None if self.basis is None else self.basis[one],
            correction=None if self.correction is None else self.correction[one],
            null_directions={0: self.null_directions[index]} if index in self.null_directions else {},
            spans={0: self.spans[index]} if index in self.spans else {},
            hidden={0: self.hidden[index]} if index in self.hidden else {},
            shortened={0: self.shortened[index]} if index in self.shortened else {},
            projection=None if self.projection is None else self.projection[one],
            wide=None if self.wide is None else self.wide.item(index),
            scored=None,
        )

    @property
    def resolved_rank(self) -> Int64:
        """The sums of the scores at most, (b,): the exact rank where a factor of that rank is known, else `rank`."""
        out = self.rank.copy()
        for item, fine in self.hidden.items():
            if fine is not None or item in self.shortened:
                out[item] = self.spans[item].rank
        return out

    def exactly(self) -> Factor:
        """Return the factor with scores computed in float64 throughout.

        Returns
        -------
        Factor
            With no arithmetic in float32.
        """
        arithmetic: tuple[Arithmetic, ...] = tuple("double" if a == "single" else a for a in self.arithmetic)
        return replace(self, arithmetic=arithmetic, product_error=np.zeros_like(self.product_error), scored=None)

    @where_arrays_are
    def forget_keys(self) -> Factor:
        """Return the factor without a reference to the keys.

        Returns
        -------
        Factor
            Without rows. It keeps a copy of wide keys, which are smaller than a normalizer.
        """
        b, _, d = self.rows.shape
        rows = replace(self.rows, keys=np.empty((b, 0, d)), mask=None, weights=None)
        return replace(self, rows=rows, wide=None if self.wide is None else self.wide.held(), scored=None)

    @property
    def score_error(self) -> Float64:
        """Estimate of the relative error of a score, with its rounding, (b,)."""
        return np.asarray(self.error + self.product_error + (UNIT if self.rows.format == "float64" else 2.0**-24))

    @property
    def normalizer_error(self) -> Float64:
        """Estimate of the relative error that the factor causes in a normalizer, (b,)."""
        return self.error if self.wide is None else np.zeros(len(self.error))

    @where_arrays_are
    def scores(
        self, *, as_float64: bool = False, member: bool = True, numerical: bool = False
    ) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Return the leverage scores of the rows, and which matrices have rows that were counted as 1 or bounded.

        Where the exact rank of the keys is above the numerical rank, the scores are computed at the exact rank and
        raised by their error. Where that is impossible, all nonzero rows count as 1. So no score is too small,
        except for `score_error`.

        Parameters
        ----------
        as_float64 : bool, default False
            Whether scores are always float64.
        member : bool, default True
            Whether the rows are among the factored keys. If not, ``kᵀG⁺k`` may be more than 1, and is infinite for a
            row outside the row space.
        numerical : bool, default False
            Whether directions below the numerical rank are left out. Rows that reach into them by more than rounding
            then count as 1 (or are infinite). If these are more than the columns, they have the scores of the exact
            rank, where these are known.

        Returns
        -------
        scores : array of shape (b, n)
            The scores: float64 for float64 keys or with `as_float64`, else float32, in the kernels' namespace. They
            are 0 for masked rows.
        counted : array of bool, shape (b,)
            True for a matrix with rows that were counted as 1 or bounded.

        Raises
        ------
        ValueError
            If `member` is False and the keys have fewer rows than columns.

        See Also
        --------
        scores_of : The scores of other rows.
        """
        if self.wide is not None and not member:
            raise ValueError(
                "rows are scored against keys with fewer rows than columns; expected the rows of these keys"
            )
        ceiling = 1.0 if member else np.inf  # rounding may lift a score above 1
        out, left = self._begun(as_float64, member)
        arithmetics = np.array(self.arithmetic)[left]
        for arithmetic in dict.fromkeys(arithmetics.tolist()):
            items = left[arithmetics == arithmetic]
            if arithmetic == "compensated" and self.basis is not None and self.correction is not None:
                W, basis = self.correction[items], self.basis[items]
            else:
                W, basis = (self.W if len(items) == len(self.arithmetic) else take_entries(self.W, items)), None
            if self.projection is not None:
                GRAM.projected_sqnorms(self.rows, items, self.projection[items], out, arithmetic, ceiling)
                continue
            GRAM.sqnorms(self.rows, items, W, out, basis=basis, arithmetic=arithmetic, ceiling=ceiling)
        counted = np.zeros(self.rows.shape[0], np.bool_)
        if not member:
            self._mark_dead_columns(out, known=not numerical)
        for item, span in self.spans.items() if not numerical else ():
            if not member:
                self._set(out, item, span.outside(self.rows.item(item)), np.inf)
            if item in self.hidden:
                counted[item] = self._raise_hidden(item, out, ceiling)
        for item in self.null_directions:
            if item not in self.spans or (numerical and (item in self.hidden or not member)):
                counted[item] = self._count_null_directions(item, out, ceiling)
                if member and counted[item] and item in self.hidden:
                    self._lower_where_too_many(item, out)
        if self.wide is not None:
            for item in np.flatnonzero(self.wide.clear if numerical else self.wide.independent).tolist():
                live = self.wide.live(self.rows.item(item))
                self._set(out, item, live, self.wide.score(item))
                self._set(out, item, ~live, 0.0)
                counted[item] = False
        if not member:  # products that leave the range may cancel to NaN, and no score may be too small
            if isinstance(out, np.ndarray) or on_cuda(out):
                array_namespace(out).fmin(out, np.inf, out=out)
            else:
                out[...] = where(array_namespace(out).isnan(out), np.inf, out)
        return out, counted

    def _begun(self, as_float64: bool, member: bool) -> tuple[Any, Int64]:
        """Return an array for the scores, and the numbers of the matrices whose scores it lacks."""
        if self.scored is not None and not as_float64 and member and self.projection is None:
            scores, flags = self.scored.take()
            if scores is not None:
                return scores, np.flatnonzero(~flags)
        return self.rows.zeros(as_float64=as_float64, written=True), np.arange(len(self.arithmetic))

    @where_arrays_are
    def scores_of(self, X: Any, /) -> Any:
        """Return the scores of any rows, which need not be among the factored keys: ``kᵀ G⁺ k``.

        It is the largest ``⟨q, k⟩²/‖K q‖²`` over all queries q. For a row of the keys this is its leverage score. For
        a new row it is τ/(1 − τ), where τ is the score that it would have among the keys. It is infinite for a row
        outside the row space by more than rounding; for keys with fewer rows than columns, by anything. It is also
        infinite where it is beyond the range of float64.

        Parameters
        ----------
        X : array of shape (..., m, d)
            Rows, for each matrix of the batch; centered keys take their mean from them. A sparse matrix as well.

        Returns
        -------
        array of float64, shape (..., m)
            Scores, at least 0 and maybe above 1. NaN for a row that holds NaN or infinity.

        Raises
        ------
        TypeError
            If X is no array of real floating dtype, or lies elsewhere than the factor.
        ValueError
            If its batch or its number of columns is another, or the keys are sparse with fewer rows than columns.
        """
        matrices, rows = self._given(X, "X")
        factor, wide = self.on(rows).exactly(), self.wide
        out = replace(factor, wide=None).scores(as_float64=True, member=False, numerical=True)[0]
        if wide is not None:
            if isinstance(wide.rows.keys, Csr):
                raise ValueError(
                    "the keys are sparse, with fewer rows than columns; expected dense ones, because their row space "
                    "is decided in a dense basis. Give the factor of K.toarray()"
                )
            for item in range(len(self.rank)):
                new = replace(rows.item(item), shift=wide.rows.shift, scale=None)
                self._set(out, item, Span.of(wide.rows.item(item)).outside(new), np.inf)
        xp = array_namespace(out)
        for item in np.flatnonzero(to_numpy(xp.any(xp.isinf(out), axis=1))).tolist():
            unknown = np.zeros(matrices.n, np.bool_)
            unknown[KEYS.nonfinite_rows(rows, item, matrices.n)] = True
            self._set(out, item, unknown, np.nan)
        return matrices.wrap(out)

    @where_arrays_are
    def cross_leverage(self, A: Any, B: Any | None = None, /) -> Float64:
        """Return the cross-leverage ``aᵀ G⁺ b`` of rows, whose squares are at most the product of their scores.

        For rows of the keys these are the entries of the hat matrix ``K G⁺ Kᵀ``, the projection to the column space.

        Parameters
        ----------
        A : array of shape (..., m, d)
            Rows, for each matrix of the batch.
        B : array of shape (..., l, d), optional
            Other rows; A itself if left out.

        Returns
        -------
        array of float64, shape (..., m, l)
            NumPy's, whatever the kind of A; NaN for a row whose score is infinite, as `scores_of` decides.

        Raises
        ------
        TypeError, ValueError
            As in `scores_of`.
        """
        first, x = self._whitened_rows(A, "A")
        _, y = (first, x) if B is None else self._whitened_rows(B, "B")
        products = np.stack([a @ b.T for a, b in zip(x, y, strict=True)]) if x else np.zeros((0, 0, 0))
        return products.reshape(*first, *products.shape[1:])

    def _whitened_rows(self, X: Any, name: str) -> tuple[tuple[int, ...], list[Float64]]:
        """Return the batch of some rows and the whitened rows of each matrix, with a last column, NaN outside."""
        matrices, rows = self._given(X, name)
        outside = np.isinf(to_numpy(self.scores_of(X))).reshape(len(self.rank), -1)
        whitened = []
        for item in range(len(self.rank)):
            one = self.item(item).on(rows.item(item))
            with np.errstate(over="ignore", invalid="ignore"):  # of rows that become NaN
                found = one.whitened(as_read(one.rows))
            # a column of its own makes products NaN, also where the rank is 0
            unknown = np.where(outside[item], np.nan, 0.0)[:, None]
            whitened.append(np.hstack([np.where(outside[item][:, None], 0.0, found), unknown]))
        return matrices.batch, whitened

    def _given(self, X: Any, name: str) -> tuple[Matrices, Rows]:
        """Return rows of the caller for each matrix of the batch, or raise."""
        matrices = as_matrices(X, name, sparse=True)
        b = math.prod(matrices.batch)
        if matrices.d != self.columns or b != len(self.rank):
            raise ValueError(
                f"{name} has {b} matrices of {matrices.d} columns; expected {len(self.rank)} of {self.columns}, as "
                "the keys of the factor have"
            )
        if on_cuda(matrices.data) != on_cuda(self.W):
            raise TypeError(f"{name} is of type {type(X).__name__}; expected an array on the device of the factor")
        return matrices, Rows.of(matrices)

    def _set(self, out: Any, item: int, which: npt.NDArray[np.bool_], value: float) -> bool:
        """Set the scores that `which` marks in a matrix; return whether there are any."""
        if which.any():
            out[item, :] = where(to_device(which, out), value, out[item, :])
        return bool(which.any())

    def _mark_dead_columns(self, out: Any, *, known: bool) -> None:
        """Set the scores of rows to infinity that are nonzero in a column in which all factored keys are zero.

        `known` tells that exact row spaces, where they are known, decide about such rows.
        """
        for item in np.flatnonzero(self.rank < self.rows.shape[2]).tolist():
            dead = ~np.any(self.whitening[item] != 0, axis=1)
            if dead.any() and not (known and item in self.spans):
                one = self.rows.item(item)
                size = one.zeros(as_float64=True)
                with np.errstate(over="ignore"):
                    GRAM.sqnorms(one, np.array([0]), np.diag(dead * _LARGEST_LIFT)[None], size)
                out[item, :] = where(size[0, :] > 0, np.inf, out[item, :])

    def _raise_hidden(self, item: int, out: Any, ceiling: float) -> bool:
        """Raise the scores of a matrix to its exact rank; return whether any row was counted or bounded."""
        scores = self._at_exact_rank(item, ceiling)
        if scores is None:
            return self._set(out, item, nonzero_rows(self.rows.item(item)), ceiling)
        xp = array_namespace(out)
        out[item, :] = xp.maximum(out[item, :], xp.astype(scores, out.dtype))
        return True

    def _lower_where_too_many(self, item: int, out: Any) -> None:
        """Take the scores at the exact rank where more rows than columns count as 1, beside far longer rows.

        Both bound the scores from above, which add up to no more than the rank.
        """
        if np.count_nonzero(to_numpy(out[item, :] == 1)) > self.columns:
            scores = self._at_exact_rank(item, 1.0)
            if scores is not None:
                xp = array_namespace(out)
                out[item, :] = xp.minimum(out[item, :], xp.astype(scores, out.dtype))

    def _at_exact_rank(self, item: int, ceiling: float) -> Any:
        """Return the scores of a matrix at its exact rank, raised by their error, or None if they are not known."""
        found = None
        for one in (self.hidden[item], self.shortened.get(item)):
            if one is None:
                continue
            with np.errstate(over="ignore", invalid="ignore"):  # keys of their own length leave the range
                scores = one.on(self.rows.item(item)).scores(as_float64=True, member=ceiling == 1)[0][0, :]
            scores = scores * (1 + 4 * float(one.score_error[0]))
            scores = where(~(scores <= ceiling), ceiling, scores)
            found = scores if found is None else array_namespace(scores).minimum(found, scores)
        return found

    def _count_null_directions(self, item: int, out: Any, value: float) -> bool:
        """Set the scores of rows that reach outside the kept directions by more than rounding to `value`."""
        Z, c = self.null_directions[item]
        d = len(c)
        one = self.rows.item(item)
        # float32 has the precision that the decision needs, but not the range
        length, size = one.zeros(as_float64=True), one.zeros(as_float64=True)

        def measure(lift: float) -> None:
            GRAM.sqnorms(one, np.array([0]), (upper_form(Z) / c[:, None])[None] * lift, length)
            GRAM.sqnorms(one, np.array([0]), np.diag(1 / c)[None] * lift, size)

        measure(1.0)
        noise = (64 * UNIT) ** 2 * d
        beyond: Any = length[0, :] > noise * size[0, :]
        tiny = size[0, :] < _TINY
        if self.rows.format == "float64" and bool(to_numpy(tiny).any()):  # squares may have underflowed
            measure(_LIFT)
            beyond |= tiny & (length[0, :] > noise * size[0, :])
            # nonzero rows whose squares underflow nevertheless
            beyond |= (size[0, :] == 0) & to_device(nonzero_rows(one), size)
        out[item, :] = where(beyond, value, out[item, :])
        return bool(to_numpy(beyond).any())

    @cached_property
    def normalizer(self) -> Float64:
        """Upper-triangular N with ``‖N q‖² = Σ ⟨q, k⟩²`` over the keys, for any query q, (b, columns, columns)."""
        out = np.zeros((len(self.rank), self.columns, self.columns))
        for item in range(len(out)):
            N, exponents = self.even_normalizer(item)
            N = N if self.wide is None else np.asarray(lapack(np.linalg.qr, N, mode="r"))
            out[item, : len(N)] = np.ldexp(N, exponents)
        return out

    @where_arrays_are
    def even_normalizer(self, item: int) -> tuple[Float64, npt.NDArray[np.int32]]:
        """Return N with columns scaled to a norm of about 1, and the exponents of the powers of two taken out.

        Keys divided by these powers and queries multiplied by them have the same products. The squares of the
        products stay in range, however large or small the columns were.

        Parameters
        ----------
        item : int
            Number of the matrix.

        Returns
        -------
        N : array of float64, shape (d, d)
            The scaled normalizer; for wide keys, the scaled keys, (n, columns).
        exponents : array of int32, shape (d,)
            The exponents; (columns,) for wide keys.
        """
        if self.wide is not None:
            N = as_read(self.wide.rows.item(item))
            exponents = np.frexp(column_norms(N))[1].astype(np.int32)
            return np.ldexp(N, -exponents), exponents
        if item not in self._normalizers:
            self._normalizers[item] = self._even_normalizer(item)
        return self._normalizers[item]

    @cached_property
    def _normalizers(self) -> dict[int, tuple[Float64, npt.NDArray[np.int32]]]:
        """The results of `even_normalizer`."""
        return {}

    def _even_normalizer(self, item: int) -> tuple[Float64, npt.NDArray[np.int32]]:
        B, C = self._parts(item)
        live, kept = np.any(B != 0, axis=1), np.any(B != 0, axis=0)
        N = np.zeros(B.shape)
        solve = PRECISE.precise_solutions
        if np.count_nonzero(live) == np.count_nonzero(kept) > 0:
            inverse = solve(np.ascontiguousarray(B[np.ix_(live, kept)]), np.eye(int(live.sum())))
            if self.arithmetic[item] == "compensated":
                inverse = solve(np.ascontiguousarray(C[np.ix_(kept, kept)]), inverse)
            N[np.ix_(kept, live)] = inverse.T
        elif kept.any():
            even, c = _columns(self, item, B)
            inverse = _left_inverse(even[:, kept]) * c
            N[kept] = solve(np.ascontiguousarray(C[np.ix_(kept, kept)]), np.ascontiguousarray(inverse.T)).T
            N = np.where(live, lapack(np.linalg.qr, N, mode="r"), 0.0)
        exponents = np.frexp(column_norms(N))[1].astype(np.int32)
        N = np.ldexp(N, -exponents)
        return N, exponents - self._scale_powers(item)

    def _scale_powers(self, item: int) -> npt.NDArray[np.int32]:
        """Return the exponents of the scale under which the keys were factored, (d,)."""
        if self.rows.scale is None:
            return np.zeros(self.rows.shape[2], np.int32)
        return np.asarray(np.frexp(self.rows.scale[item])[1] - 1, np.int32)

    def _parts(self, item: int) -> tuple[Float64, Float64]:
        """Return B and C with W = B C; where there is a basis, W is the rounded product."""
        if self.basis is None or self.correction is None or self.arithmetic[item] != "compensated":
            W = self.whitening[item]
            return W, np.diag(np.any(W != 0, axis=0).astype(np.float64))
        return self.basis[item], self.correction[item]

    @cached_property
    def condition(self) -> Float64:
        """2-norm condition number of the keys on their row space, (b,); 1 for rank 0."""
        out = np.ones(len(self.rank))
        for item, rank in enumerate(self.rank):
            if rank:
                N, powers = self.even_normalizer(item)
                s = lapack(np.linalg.svd, np.ldexp(N, powers - powers.max()), compute_uv=False)
                with np.errstate(over="ignore"):
                    out[item] = s[0] / s[rank - 1] if s[rank - 1] > 0 else np.inf
        return out

    def whitened(self, X: Float64) -> Float64:
        """Return ``x = Wᵀk`` for rows k after shift and scale, for a batch of one.

        Parameters
        ----------
        X : array of float64, shape (m, d)
            The rows.

        Returns
        -------
        array of float64, shape (m, rank)
            The whitened rows, whose squared norms are their scores.
        """
        W = self.whitening[0]
        if self.arithmetic[0] == "compensated" and self.basis is not None and self.correction is not None:
            W = self.correction[0]
            X = PRECISE.precise_products(X, np.ascontiguousarray(self.basis[0].T))
        return blockwise_product(X, np.asarray(W[:, np.any(W != 0, axis=0)]))

    @where_arrays_are
    def witness(self, k: Float64, item: int = 0) -> Float64:
        """Return the query ``G⁺ k`` for a key: no query gives k a larger attention score.

        For wide keys it is nonzero only in the factored columns, so it is not the shortest such query.

        Parameters
        ----------
        k : array of float64, shape (d,) or (m, d)
            A key, or rows of keys.
        item : int, default 0
            Number of the matrix.

        Returns
        -------
        array of float64, shape (d,) or (m, d)
            The query, or one for each key.
        """
        W = self.whitening[item]
        if self.rows.scale is not None:
            W = W * self.rows.scale[item][:, None]
        if self.wide is not None:
            k = self.wide.gathered(k, item)
        q: Float64 = k @ W @ W.T
        return q if self.wide is None else self.wide.spread(q, item)


def even_basis(factor: Factor, item: int, exponents: npt.NDArray[np.int32]) -> tuple[Float64, Float64] | None:
    """Return upper-triangular B and C, (d, d), for which ``‖C⁻¹ B⁻¹ q‖²`` is the normalizer of a scaled query.

    `Factor.even_normalizer` gives the exponents of the scale. B and C hold digits that their rounded inverse loses.
    None for rank-deficient keys, and so for wide ones: their normalizers have no such form.
    """
    if factor.rank[item] < len(exponents):
        return None
    B, C = factor._parts(item)
    return np.ldexp(B, (exponents + factor._scale_powers(item))[:, None]), C


def even_whitening(factor: Factor, item: int, exponents: npt.NDArray[np.int32]) -> Float64:
    """Return W, (d, d), for unscaled keys divided by the powers of two of `Factor.even_normalizer`.

    It is infinite where it overflows.
    """
    with np.errstate(over="ignore"):
        powers = exponents + factor._scale_powers(item)
        return np.asarray(np.ldexp(factor.whitening[item], powers[:, None]))


def normalizer_rounding(factor: Factor, item: int) -> float:
    """Return the error of √D, for a normalizer D, in units of ``2⁻⁵³ ‖|N| |q|‖``; it is at least √d."""
    if factor.wide is not None:
        return 2 * float(np.sqrt(factor.columns))  # rounding of the products with the keys, and of their shift
    compensated = factor.arithmetic[item] == "compensated"
    if not compensated and factor.rank[item] == factor.columns:
        return float(np.sqrt(factor.columns))  # W is all there is
    B, C = factor._parts(item)
    d, kept = len(B), np.any(C != 0, axis=0)
    few = np.count_nonzero(kept) < np.count_nonzero(np.any(B != 0, axis=1))
    C, spread = C[np.ix_(kept, kept)], 1.0
    if compensated and len(C):
        spread = float(lapack(np.linalg.norm, np.abs(lapack(np.linalg.inv, C)) @ np.abs(C), 2))
    if few and len(C):  # the columns of B span the row space of the keys only up to rounding
        s = lapack(np.linalg.svd, _columns(factor, item, B)[0][:, kept], compute_uv=False)
        more = 64 * d if item in factor.hidden else 8.0  # hidden directions also add to a normalizer
        spread *= more * float(s[0] / s[-1]) if s[-1] > 0 else np.inf
    return float(np.sqrt(d)) * spread


def _left_inverse(W: Float64) -> Float64:
    """Return the pseudoinverse X of a matrix of full column rank, in twice the precision, then rounded."""
    X = lapack(np.linalg.pinv, W, rcond=0.0)
    for _ in range(2):  # Newton steps, each of which squares the error
        pair = np.ascontiguousarray(X.T), np.ascontiguousarray(W)
        high, low = PRECISE.expanded_product([pair], W.shape[1], symmetric=False)
        X = X - ((high - np.eye(len(high))) + low) @ X
    return np.asarray(X)


def blockwise_product(X: npt.NDArray[Any], W: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return X W in blocks that BLAS computes in one thread: its other threads would go on spinning beside ours."""
    m, d = X.shape
    step = _ONE_THREAD // max(W.size, 1)
    if step < _LEAST_BLOCK or step >= m:
        return np.asarray(X @ W)
    whole = m // step * step
    out = np.empty((m, W.shape[1]), X.dtype)
    np.matmul(X[:whole].reshape(-1, step, d), W, out=out[:whole].reshape(-1, step, W.shape[1]))
    out[whole:] = X[whole:] @ W
    return out


def _columns(factor: Factor, item: int, B: Float64) -> tuple[Float64, Float64]:
    """Return B for keys with columns scaled to nearly unit norm, and the norms."""
    c = factor.null_directions[item][1] if item in factor.null_directions else _row_sizes(B)
    c = np.where(np.isfinite(c), c, 1.0)
    return c[:, None] * B, c


def _row_sizes(W: Float64) -> Float64:
    sizes = np.sqrt(np.sum(W * W, axis=1))
    return np.where(sizes > 0, 1 / np.where(sizes > 0, sizes, 1), 1.0)


def upper_form(A: Float64) -> Float64:
    """Return an upper-triangular (d, d) matrix T with ``T Tᵀ = A Aᵀ``, zero columns first."""
    d, k = A.shape
    T = np.zeros((d, d))
    R: Any = lapack(np.linalg.qr, A.T[:, ::-1], mode="r")  # scipy's `rq` would be loaded for long
    T[:, d - k :] = R.T[::-1, ::-1]
    return np.triu(T)


def column_norms(R: Float64) -> Float64:
    """Return the Euclidean norms of the columns; no square overflows."""
    largest = np.max(np.abs(R), axis=0, initial=0.0)
    return np.asarray(largest * np.linalg.norm(R / np.where(largest > 0, largest, 1.0), axis=0))


def float64_rows(rows: Rows, start: int, stop: int) -> Float64:
    """Return some rows of a batch of one in float64, as `as_read` does."""
    return as_read(rows.between(start, stop))
