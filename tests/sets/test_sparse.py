"""Sparse keys: the scores and sets of the same keys written out, and nothing of their size in memory."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given

import levattn
import naive
import strategies
from levattn.sketch import OSNAP, SRHT, CountSketch, Distribution, GaussianJL, SignJL, Sketch, SketchedRows
from strategies import Float, csr
from streams import BLOCK, named_rng

SETTINGS = strategies.examples(25)
FORMATS = ("float64", "float32")

formats = pytest.mark.parametrize("dtype", FORMATS)
sparse_methods = pytest.mark.parametrize("method", ["auto", "gram", "qr"])


def sparsified(rng: np.random.Generator, n: int, d: int, density: float) -> Float:
    return np.asarray(rng.standard_normal((n, d)) * (rng.random((n, d)) < density))


def relative_error(scores: Any, exact: Float, d: int) -> float:
    """Largest relative error over the scores above 10⁻³ d/n."""
    counted = exact > 1e-3 * d / max(exact.shape[0], 1)
    error = np.abs(scores[counted].astype(np.float64) - exact[counted]) / exact[counted]
    return float(np.max(error, initial=0.0))


def ill_conditioned(rng: np.random.Generator, n: int, d: int, kappa: float) -> Float:
    """Sparse keys, each column the one before it but for less and less of its own."""
    keys = sparsified(rng, n, d, 0.3)
    for c in range(1, d):
        keys[:, c] = keys[:, c - 1] + keys[:, c] * kappa ** (-c / (d - 1))
    return keys


# -- hard keys --------------------------------------------------------------------------------


@sparse_methods
@formats
@pytest.mark.parametrize("name", list(strategies.CASES))
def test_named_keys(name: str, dtype: str, method: str) -> None:
    stored = strategies.stored_case(name, dtype)
    if stored is None:
        pytest.skip(f"{name} does not fit into {dtype}")
    keys, values = stored
    thinned = np.where(named_rng(name).random(keys.shape) < 0.5, keys, 0)
    for K in (keys, thinned):
        exact = naive.leverage_exact(K)
        scores = levattn.leverage_scores(csr(K), method=method)
        assert type(scores) is np.ndarray
        assert scores.dtype == dtype
        loose = 1e-7 if name in ("near-deficient-1e-10", "conditioned-1e10") else 1e-10
        bar = loose if dtype == "float64" else 1e-6
        assert relative_error(scores, exact, values.shape[1]) <= bar
        np.testing.assert_allclose(scores, exact, atol=bar, rtol=0)
        assert levattn.universal_set(csr(K), 0.5, method=method).rank == naive.rank_exact(K)


@pytest.mark.parametrize(
    ("dtype", "kappa", "bar"),
    [
        *(("float32", kappa, 1e-6) for kappa in (1.0, 1e2, 1e4)),
        *(("float32", kappa, 1e-5) for kappa in (1e5, 1e7)),
        *(("float64", kappa, 1e-10) for kappa in (1.0, 1e2, 1e4, 1e6)),
        *(("float64", kappa, 1e-7) for kappa in (1e8, 1e10, 1e12)),
    ],
)
@sparse_methods
def test_the_bars_of_dense_keys(method: str, dtype: str, kappa: float, bar: float) -> None:
    keys = ill_conditioned(named_rng(f"ill {kappa}"), 700, 24, kappa).astype(dtype)
    exact = naive.leverage_exact(keys)
    assert relative_error(levattn.leverage_scores(csr(keys), method=method), exact, 24) <= bar


@formats
@pytest.mark.parametrize("d", [40, 300])
@pytest.mark.parametrize("density", [0.02, 0.1, 0.6])
def test_the_scores_of_the_keys_written_out(density: float, d: int, dtype: str) -> None:
    """Through the kernels for few and many columns, and for rows that are hardly sparse."""
    n = 7001 if d == 40 else 2501  # some blocks and a part of one
    keys = sparsified(named_rng(f"same {density} {d}"), n, d, density).astype(dtype)
    keys[::17] = 0
    scores, dense = levattn.leverage_scores(csr(keys)), levattn.leverage_scores(keys)
    np.testing.assert_allclose(scores, dense, rtol=1e-12 if dtype == "float64" else 1e-6)
    for epsilon in (0.05, 0.15, 0.5):
        found, expected = levattn.universal_set(csr(keys), epsilon), levattn.universal_set(keys, epsilon)
        assert np.array_equal(found.mask, expected.mask)
        assert (found.rank, found.guarantee) == (expected.rank, expected.guarantee)
        assert found.condition == pytest.approx(expected.condition)
    found, expected = levattn.universal_set(csr(keys), size=100), levattn.universal_set(keys, size=100)
    assert np.array_equal(found.mask, expected.mask)
    assert found.epsilon == pytest.approx(expected.epsilon, rel=1e-12)


@formats
@pytest.mark.parametrize("n", [1, 7, 2047, 2048, 2049, 5000, 3 * BLOCK + 1])
def test_row_counts_around_block_edges(n: int, dtype: str) -> None:
    for d in (8, 260):
        keys = sparsified(named_rng(f"rows {n} {d}"), n, d, 0.3 if d == 8 else 0.03).astype(dtype)
        scores = levattn.leverage_scores(csr(keys))
        bar = 1e-11 if dtype == "float64" else 1e-6
        np.testing.assert_allclose(scores, levattn.leverage_scores(keys), rtol=bar, atol=bar / 100)


@formats
@pytest.mark.parametrize("exponents", [(-100, -90, 0, 100), (-40, 30, 20, 0)])
def test_columns_and_rows_of_any_size(exponents: tuple[int, ...], dtype: str) -> None:
    keys = sparsified(named_rng("scales"), 3000, 40, 0.2).astype(dtype)
    scores = levattn.leverage_scores(csr(keys))
    columns = np.resize(np.array(exponents), 40)
    bar = 1e-12 if dtype == "float64" else 1e-6
    np.testing.assert_allclose(levattn.leverage_scores(csr(np.ldexp(keys, columns))), scores, rtol=bar)
    rows = np.ones((3000, 1), dtype)
    rows[5], rows[::3] = 2.0**14, 2.0**-20
    np.testing.assert_allclose(
        levattn.leverage_scores(csr(keys * rows)), naive.leverage_svd(keys * rows), rtol=bar * 100, atol=bar
    )


def test_entries_beyond_the_range_of_squares() -> None:
    keys = sparsified(named_rng("range"), 500, 12, 0.3)
    exact = naive.leverage_exact(keys)
    for scale in (1e150, 1e-150, 1e300, 1e-300):
        np.testing.assert_allclose(levattn.leverage_scores(csr(keys * scale)), exact, rtol=1e-10, atol=1e-12)


def test_rows_outside_the_numerical_row_space_count_as_one() -> None:
    K = sparsified(named_rng("outside"), 3000, 6, 0.5)
    K[:, -1] = K[:, 0]
    K[7, -1] += 1e-17 + 2.0**-52 * abs(K[7, -1])
    expected = levattn.universal_set(K, 0.5)
    found = levattn.universal_set(csr(K), 0.5)
    assert np.array_equal(found.mask, expected.mask)
    assert (found.rank, found.guarantee) == (expected.rank, expected.guarantee)


def test_groups_of_sparse_keys() -> None:
    keys = np.vstack([np.tile(np.eye(1, 8) * 3, (40, 1)), sparsified(named_rng("groups"), 300, 8, 0.3)])
    labels = np.where(np.arange(340) < 40, 0, -1)
    found = levattn.universal_set(csr(keys), 0.3).with_groups(csr(keys), labels)
    expected = levattn.universal_set(keys, 0.3).with_groups(keys, labels)
    assert np.array_equal(found.mask, expected.mask)
    np.testing.assert_allclose(found.group_scores, expected.group_scores, rtol=1e-10)


def test_the_set_serves_the_keys_written_out() -> None:
    keys = sparsified(named_rng("serve"), 600, 12, 0.2)
    found = levattn.universal_set(csr(keys), 0.2)
    Q = named_rng("queries").standard_normal((50, 12))
    heavy = levattn.heavy_attention(Q, keys, 0.2, universal=found)
    expected = levattn.heavy_attention(Q, keys, 0.2)
    assert np.array_equal(heavy.entries.toarray() > 0, expected.entries.toarray() > 0)


# -- bits ---------------------------------------------------------------------------------------


# keys and options; of those written out, 39 blocks, one thread takes 7 in one run, and two take runs of 4 and 3
THREADED: dict[str, tuple[Callable[[np.random.Generator], Float], dict[str, Any]]] = {
    "few columns": (lambda rng: sparsified(rng, 60_001, 24, 0.2), {}),
    "many columns": (lambda rng: sparsified(rng, 9001, 300, 0.1), {}),
    "hardly sparse": (lambda rng: sparsified(rng, 20_001, 24, 0.8), {}),
    "ill-conditioned": (lambda rng: ill_conditioned(rng, 30_001, 16, 1e9), {}),
    "deficient": (lambda rng: np.repeat(sparsified(rng, 30_001, 8, 0.3), 2, axis=1), {}),
    "written out": (lambda rng: sparsified(rng, 39 * BLOCK, 3, 0.5) + 0.1, {"center": True}),
}


@formats
@pytest.mark.parametrize("name", list(THREADED))
def test_thread_count_changes_no_bit(name: str, dtype: str) -> None:
    make, options = THREADED[name]
    K = csr(make(named_rng(name)), dtype)
    scores = levattn.leverage_scores(K, **options)
    for threads in (1, 2, 3, 7):
        with levattn.thread_limit(threads):
            assert np.array_equal(levattn.leverage_scores(K, **options), scores)


def test_equal_rows_have_equal_bits() -> None:
    for d in (3, 17, 300):
        distinct = sparsified(named_rng("equal"), 40, d, 0.2)
        rows = named_rng("order").integers(0, 40, 5000)
        scores = levattn.leverage_scores(csr(distinct[rows]))
        for row in range(40):
            assert np.unique(scores[rows == row]).size <= 1


# -- forms of the same matrix ----------------------------------------------------------------------


def with_parts(K: Any, change: Callable[[Any, str], Any]) -> Any:
    """The matrix with other arrays of the same entries."""
    K.data, K.indices, K.indptr = (change(getattr(K, name), name) for name in ("data", "indices", "indptr"))
    return K


def read_only(K: Any) -> Any:
    for part in (K.data, K.indices, K.indptr):
        part.flags.writeable = False
    return K


def with_zeros(values: Float) -> Any:
    """Every entry of every other row stored, zero or not."""
    stored = np.ones(values.shape, bool)
    stored[::2] = values[::2] != 0
    rows, columns = np.nonzero(stored)
    indptr = np.concatenate([[0], np.cumsum(stored.sum(axis=1))])
    return scipy.sparse.csr_array((values[rows, columns], columns, indptr), shape=values.shape)


def boasting(values: Float) -> Any:
    """Out of order, with flags that say otherwise."""
    K = strategies.csr_with_duplicates(values)
    K.has_sorted_indices = K.has_canonical_format = True
    return K


ROOM = {"data": [np.nan] * 5, "indices": [10**6] * 5, "indptr": []}
FORMS: dict[str, Callable[[Float], Any]] = {
    "csr_matrix": scipy.sparse.csr_matrix,
    "int64 indices": lambda K: with_parts(csr(K), lambda part, name: part if name == "data" else part.astype(int)),
    "read-only": lambda K: read_only(csr(K)),
    "duplicates": strategies.csr_with_duplicates,
    "read-only duplicates": lambda K: read_only(strategies.csr_with_duplicates(K)),
    "flags that are wrong": boasting,
    "explicit zeros": with_zeros,
    "more room than entries": lambda K: with_parts(
        csr(K), lambda part, name: np.append(part, np.array(ROOM[name], part.dtype))
    ),
    "strided": lambda K: with_parts(csr(K), lambda part, name: part if name == "indptr" else np.repeat(part, 3)[::3]),
    "foreign byte order": lambda K: with_parts(
        csr(K), lambda part, name: part.astype(part.dtype.newbyteorder()) if name == "data" else part
    ),
    "transposed": lambda K: scipy.sparse.csc_array(K.T.copy()).T,
    "sliced": lambda K: csr(np.vstack([K, K]))[: len(K)],
}


@pytest.mark.parametrize("form", list(FORMS))
@SETTINGS
@given(K=strategies.sparse_keys())
def test_forms_change_no_bit(form: str, K: Float) -> None:
    stored = FORMS[form](K)
    before = [part.copy() for part in (stored.data, stored.indices, stored.indptr)]
    scores = levattn.leverage_scores(stored)
    if form == "explicit zeros":  # which may change what is taken for sparse
        np.testing.assert_allclose(scores, levattn.leverage_scores(csr(K)), rtol=1e-12, atol=1e-14)
    else:
        assert np.array_equal(scores, levattn.leverage_scores(csr(K)))
    after = (stored.data, stored.indices, stored.indptr)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True))


def test_nothing_as_large_as_the_keys_written_out() -> None:
    n, d = 60_000, 1024
    K = scipy.sparse.random_array((n, d), density=0.002, format="csr", rng=named_rng("memory"), dtype=np.float32)
    levattn.leverage_scores(K[:5000])  # compiles
    tracemalloc.start()
    try:
        levattn.leverage_scores(K)
        levattn.universal_set(K, 0.5)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < n * d * 4 / 2


def test_importing_levattn_loads_no_sparse_matrices() -> None:
    code = "import sys, levattn, numpy as np; levattn.leverage_scores(np.eye(3)); print('scipy.sparse' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


# -- refusals ------------------------------------------------------------------------------------------

GOOD = sparsified(named_rng("good"), 60, 6, 0.4)


@pytest.mark.parametrize("form", ["csc", "coo", "bsr", "dia", "dok", "lil"])
def test_other_formats_name_the_remedy(form: str) -> None:
    K = scipy.sparse.coo_array(GOOD).asformat(form)
    for call in (levattn.leverage_scores, lambda K: levattn.universal_set(K, 0.5)):
        with pytest.raises(TypeError, match=rf"K is a scipy sparse matrix in {form} format.*K\.tocsr\(\)"):
            call(K)
    assert np.array_equal(levattn.leverage_scores(K.tocsr()), levattn.leverage_scores(csr(GOOD)))


@pytest.mark.parametrize(
    "call",
    [
        lambda K: levattn.heavy_attention(GOOD[:3], K, 0.5),
        lambda K: levattn.heavy_attention(K, GOOD, 0.5),
        lambda K: levattn.sensitivities(K, 4),
        lambda K: levattn.universal_set(K, 0.5, f=4),
        lambda K: levattn.universal_set(K, 0.5, f=levattn.Softmax(1.0)),
        lambda K: levattn.near_duplicates(K, angle=0.1),
        lambda K: levattn.online_leverage_scores(K),
        lambda K: levattn.states.Moments(6).update(K),
    ],
    ids=["heavy keys", "heavy queries", "sensitivities", "p = 4", "softmax", "near duplicates", "online", "moments"],
)
def test_what_takes_no_sparse_matrix_says_so(call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"sparse.*\.toarray\(\)"):
        call(csr(GOOD))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *(
            (lambda score=score: score(csr(GOOD), method="svd"), ValueError, "method is 'svd'.*'auto', 'gram' or 'qr'")
            for score in (levattn.leverage_scores, lambda K, method: levattn.universal_set(K, 0.5, method=method))
        ),
        *(
            (
                lambda dtype=dtype: levattn.leverage_scores(csr(np.rint(GOOD), dtype)),
                TypeError,
                rf"K has dtype .*{remedy}",
            )
            for dtype, remedy in (
                *((dtype, r"K\.astype\('float64'\)") for dtype in ("int64", "bool", "longdouble")),
                ("complex128", r"K\.real"),
            )
        ),
        (lambda: levattn.leverage_scores(scipy.sparse.csr_array((4, 0))), ValueError, "at least one column"),
        (
            lambda: levattn.leverage_scores(scipy.sparse.coo_array(np.ones(4)).tocsr()),
            ValueError,
            r"expected one matrix \(n, d\)",
        ),
        (lambda: levattn.leverage_scores(csr(GOOD), mask=np.ones(3, bool)), ValueError, r"mask has shape \(3,\)"),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_keys_without_rows_or_entries() -> None:
    assert levattn.leverage_scores(scipy.sparse.csr_array((0, 4))).shape == (0,)
    assert not np.any(levattn.leverage_scores(scipy.sparse.csr_array((5, 4))))


@pytest.mark.parametrize(
    ("part", "change", "problem"),
    [
        ("indices", lambda x: np.where(np.arange(len(x)) == 3, 6, x), "indices run from 0 to 6"),
        ("indices", lambda x: np.where(np.arange(len(x)) == 3, -1, x), "indices run from -1"),
        ("indices", lambda x: x[:-1], "indptr ends at"),
        ("indices", lambda x: x.astype(float), "indices is an array of float64"),
        ("data", lambda x: x[:-2], "indptr ends at"),
        ("data", lambda x: x[None], "data is an array"),
        ("indptr", lambda x: x[::-1], "indptr does not ascend from 0"),
        ("indptr", lambda x: x + 1, "indptr does not ascend from 0"),
        ("indptr", lambda x: x[:-1], "indptr has 60 entries, which should be 61"),
        ("indptr", lambda x: np.where(np.arange(len(x)) == 5, x[7], x), "indptr does not ascend"),
    ],
)
def test_corrupted_matrices_are_refused(part: str, change: Callable[[Any], Any], problem: str) -> None:
    K = csr(GOOD)
    setattr(K, part, change(getattr(K, part)))
    with pytest.raises(ValueError, match=rf"K is a corrupted sparse matrix: .*{problem}"):
        levattn.leverage_scores(K)


@formats
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@sparse_methods
def test_rows_that_are_not_finite_are_named(method: str, value: float, dtype: str) -> None:
    K = csr(GOOD, dtype)
    rows = [5, 41]
    for row in rows:
        K.data[K.indptr[row]] = value
    with pytest.raises(levattn.exceptions.NonFiniteError, match=r"rows 5, 41"):
        levattn.leverage_scores(K, method=method)
    mask = np.ones(60, bool)
    mask[rows] = False
    expected = levattn.leverage_scores(csr(GOOD[mask], dtype), method=method)
    np.testing.assert_allclose(levattn.leverage_scores(K, method=method, mask=mask)[mask], expected, rtol=1e-6)


# -- sketches ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("countsketch", CountSketch(600, seed=3)),
        ("osnap", (OSNAP(256, seed=3), GaussianJL(40, seed=3))),
        ("srht", SRHT(128, seed=3)),
        ("jl", GaussianJL(40, seed=3)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@formats
def test_approximate_scores_are_those_of_the_keys_written_out(name: str, method: Any, dtype: str) -> None:
    K = sparsified(named_rng(name), 5000, 12, 0.2)
    mask = named_rng("mask").random(5000) < 0.8
    options: Any = {"method": method, "mask": mask}
    for center in (False, True):
        sparse = levattn.leverage_scores(csr(K, dtype), center=center, **options)
        dense = levattn.leverage_scores(K.astype(dtype), center=center, **options)
        assert sparse.dtype == dense.dtype
        np.testing.assert_allclose(sparse, dense, rtol=1e-3 if dtype == "float32" else 1e-9, atol=1e-12)
    found = levattn.universal_set(csr(K, dtype), 0.02, **options)
    exact = levattn.universal_set(K.astype(dtype), 0.02, mask=mask)
    assert not np.any(exact.mask & ~found.mask)
    again = found.rechecked(csr(K, dtype))
    np.testing.assert_array_equal(again.mask, exact.mask)


@pytest.mark.parametrize(
    "family", [CountSketch(100), OSNAP(64), GaussianJL(20), SignJL(20), SRHT(40, 64)], ids=lambda f: type(f).__name__
)
def test_sketches_are_those_of_the_keys_written_out(family: Distribution) -> None:
    K = np.rint(10 * sparsified(named_rng("sketch"), 5000, 7, 0.1))
    S = Sketch(family, 5)
    dense = S.apply(K, row_start=11)
    exact = not isinstance(family, GaussianJL)
    for part in (S.apply(csr(K, "float64"), row_start=11), S.apply(csr(K, "float32"), row_start=11)):
        np.testing.assert_allclose(part, dense, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-10)
    with levattn.thread_limit(1):
        np.testing.assert_array_equal(
            S.apply(csr(K, "float64"), row_start=11), S.apply(csr(K, "float64"), row_start=11)
        )
    state = SketchedRows(S, 7)
    for start in (3000, 0, 1000, 2000, 4000):
        state.update(csr(K[start : start + 1000], "float64"), row_start=11 + start)
    np.testing.assert_allclose(state.result(), dense, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-10)
