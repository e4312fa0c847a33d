"""Sums of blocks: what is found of rows in one reading is what is found of them apart.

Inside: two ways of one sum have to agree to the last bit.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import levattn
from levattn._kernels import BLOCK, PRECISE, Norms, Rows, kernels_for
from levattn._kernels.gram.cpu import BLAS_COLUMNS, moments_and_sqnorms
from levattn._kernels.pairwise import pairwise_sum
from levattn.linalg.accumulator import GramAccumulator


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
@pytest.mark.parametrize("d", [1, 7, 64, BLAS_COLUMNS])
def test_moments_and_norms_of_one_reading_are_those_of_two(d: int, kind: Any, threads: int) -> None:
    rng = np.random.default_rng(d)
    n = 5 * BLOCK if d < BLAS_COLUMNS else BLOCK
    stored = rng.standard_normal((2, n, d)).astype(kind)
    stored = stored.view(np.uint16) if kind == "float16" else stored
    mask = rng.random((2, n)) < 0.9
    rows = Rows(stored, kind, mask, scale=np.ldexp(1.0, rng.integers(-3, 3, (2, d))))
    scored, kernels = Rows(stored, kind, mask), kernels_for("gram", stored)
    W = np.triu(rng.standard_normal((2, d, d)))
    pieces = np.array([[i, i, low, low + BLOCK] for i in range(2) for low in range(0, n, BLOCK)])
    groups = np.array([(0, 4), (4, 1), (5, 4), (9, 1)] if d < BLAS_COLUMNS else [(0, 1), (1, 1)])
    together, apart = scored.zeros(), scored.zeros()
    with levattn.thread_limit(threads):
        found = moments_and_sqnorms(rows, pieces, groups, scored, Norms(W, "single"), together)
        kernels.sqnorms(scored, np.arange(2), W, apart, arithmetic="single")
        each = kernels.moments(rows, pieces)
        expected = [pairwise_sum(each[first : first + count]) for first, count in groups]
        assert found.tobytes() == np.array(expected).tobytes()
    assert together.tobytes() == apart.tobytes()


@pytest.mark.parametrize("sizes", [1.0, 1e200, 1e-200])
def test_few_rows_are_merged_as_their_total_is(sizes: float) -> None:
    rng = np.random.default_rng(0)
    few, many = rng.standard_normal((2, 64, 5)), rng.standard_normal((2, 3 * BLOCK, 5))
    nothing = Rows(few[:, :0], "float64")
    for parts in ((few, few * sizes), (few * sizes, few)):
        mine, other = GramAccumulator(2, 5), GramAccumulator(2, 5)
        mine.add(Rows(many, "float64"))
        other.add(Rows(many, "float64"))
        for part in parts:
            mine.merge_rows(Rows(part, "float64"))
            other.merge(*GramAccumulator(2, 5).total(Rows(part, "float64"), folds=3))
        (a, exponents), (b, others) = mine.total(nothing), other.total(nothing)
        assert a.scaled(others - exponents).high.tobytes() == b.high.tobytes()
        assert a.spans[0].whole


@pytest.mark.parametrize(("folds", "bits"), [(2, 94), (3, 144)])
@pytest.mark.parametrize("kind", ["copies", "cancelling", "wide"])
def test_sums_of_several_parts_hold_so_many_bits(kind: str, folds: int, bits: int) -> None:
    rng = np.random.default_rng(0)
    A, X = rng.standard_normal((2, 3, 5))
    counts = np.array([700, 900, 448])  # the rounding errors of copies have one sign
    if kind == "cancelling":
        A[1], X[1] = -A[0] * (1 + 2.0**-50), X[0]
    elif kind == "wide":
        A *= np.exp(rng.uniform(-40, 40, A.shape))
    rows = rng.permutation(np.repeat(np.arange(3), counts))
    found = PRECISE.expanded_product([(A[rows], X[rows])], 5, symmetric=False, folds=folds)
    for i, j in np.ndindex(5, 5):
        terms = [int(n) * Fraction(a) * Fraction(x) for n, a, x in zip(counts, A[:, i], X[:, j], strict=True)]
        error = sum(map(Fraction, found[:, i, j].tolist())) - sum(terms)
        assert abs(error) <= sum(map(abs, terms)) / 2**bits
