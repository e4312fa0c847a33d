"""Leverage scores of the best approximation of some rank, of keys as they are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_numpy
from levattn._core.sparse import Csr
from levattn._core.types import Float64
from levattn._kernels import GRAM, KEYS, Rows
from levattn.linalg.accumulator import UNIT
from levattn.linalg.factor import Factor
from levattn.linalg.reading import as_read
from levattn.linalg.wide import folded


def scores_of_rank(rows: Rows, factor: Factor, count: int) -> npt.NDArray[Any]:
    """Return the scores (b, n) of the best approximations of a rank, for rows and their factor."""
    out = np.zeros(rows.shape[:2])
    for item in range(len(out)):
        one = factor.item(item)
        if count >= one.rank[0]:
            out[item] = to_numpy(one.scores(as_float64=True, numerical=True)[0])[0]
        else:
            out[item] = _by_factor(one, count) if one.wide is None else _by_rows(rows.item(item), count)
    return out if rows.format == "float64" else out.astype(np.float32)


def _by_rows(one: Rows, count: int) -> Float64:
    """Return the scores of a batch of one by its own singular vectors."""
    U, s, _ = np.linalg.svd(_dense(one), full_matrices=False)
    _check_gap(s, count)
    return np.asarray(np.sum(U[:, :count] ** 2, axis=1))


def _by_factor(factor: Factor, count: int) -> Float64:
    """Return the scores of a batch of one by right singular vectors, which K and its normalizer share."""
    rows = factor.rows
    N, exponents = factor.even_normalizer(0)
    power = int(exponents.max())
    with np.errstate(under="ignore"):
        _, s, Vt = np.linalg.svd(np.ldexp(N, exponents - power))
    _check_gap(s, count)
    P = np.ldexp(Vt[:count].T / s[:count], -power) / (1.0 if rows.scale is None else rows.scale[0][:, None])
    scores = rows.zeros(as_float64=True)
    GRAM.projected_sqnorms(rows, np.array([0]), P[None], scores, "double", 1.0)
    return np.asarray(to_numpy(scores)[0])


def _dense(one: Rows) -> Float64:
    """Return rows of a batch of one in float64, over a power of two; of sparse ones n columns of the same moments."""
    if isinstance(one.keys, Csr):
        made, _ = folded(replace(one, weights=None), KEYS.column_figures(replace(one, weights=None), largest=True))
        one = replace(made, weights=one.weights)
    X = as_read(one)
    return np.asarray(np.ldexp(X, -np.frexp(np.max(np.abs(X), initial=0.0))[1]))


def _check_gap(s: Float64, count: int) -> None:
    """Raise where singular values have no gap after so many."""
    if not s[count - 1] - s[count] > 64 * len(s) * UNIT * s[0]:
        raise ValueError(
            f"rank is {count}, and singular values {count} and {count + 1} of K are equal up to rounding; expected "
            "one with a gap after it"
        )
