"""One table of implementations × one list of properties.

A method, a storage type, a memory layout or a device is one line of `TABLE`. A property is a test function marked with
`contract`; it takes an implementation and keys of small integers, which every storage type holds exactly, so that rows
and columns can be combined without rounding. That scores are the exact ones implies all that follows from the
definition: the order and the signs of rows do not matter, and more rows mean lower scores.

Most lines differ from a line before in storage, layout, threads or batch-mates, where the same bits are promised. They
are held to these bits, and are put through every property by `make test-all` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import levattn
import naive
import strategies
from strategies import LAYOUTS, STORAGE, Float, as_bool, as_float64

SETTINGS = strategies.examples(8)


# -- the table -----------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What `universal_set` found for one matrix, in numpy."""

    mask: NDArray[np.bool_]
    scores: Float
    rank: int
    epsilon: float
    size_bound: float
    is_vacuous: bool
    guarantee: str

    @property
    def size(self) -> int:
        return int(np.count_nonzero(self.mask))


@dataclass(frozen=True)
class Implementation:
    """A way to run the library: how keys are stored, which method, how many threads.

    plain: the line of the table whose bits it has, if any.
    sparse: whether keys are sparse, which heavy attention does not take.
    thorough: whether its properties are left to `make test-all`.
    """

    name: str
    convert: Callable[[Float], Any]
    method: str = "auto"
    threads: int | None = None
    batch: bool = False
    rtol: float = 1e-10
    plain: str = ""
    sparse: bool = False
    thorough: bool = False

    def _stack(self, K: Float) -> Float:
        """The keys between two neighbors that must not matter: long ones and no ones."""
        return np.stack([K[::-1] * 16 + 1, K, np.zeros_like(K)]) if self.batch else K

    def _limit(self) -> Any:
        return nullcontext() if self.threads is None else levattn.thread_limit(self.threads)

    def _item(self, value: Any) -> Any:
        return value[1] if self.batch else value

    def scores(self, K: Float, **options: Any) -> Float:
        if self.batch and options.get("mask") is not None:
            options["mask"] = np.stack([options["mask"]] * 3)
        with self._limit():
            scores = levattn.leverage_scores(self.convert(self._stack(K)), method=self.method, **options)
        return np.asarray(self._item(as_float64(scores)))

    def universal(self, K: Float, *args: Any, **options: Any) -> Found:
        with self._limit():
            found = levattn.universal_set(self.convert(self._stack(K)), *args, method=self.method, **options)
        # By size, every matrix of a batch certifies an ε of its own.
        epsilon = np.asarray(found.epsilon)
        return Found(
            mask=self._item(as_bool(found.mask)),
            scores=self._item(as_float64(found.scores)),
            rank=int(self._item(np.asarray(found.rank))),
            epsilon=float(epsilon[1] if epsilon.ndim else epsilon),
            size_bound=float(self._item(np.asarray(found.size_bound))),
            is_vacuous=bool(self._item(np.asarray(found.is_vacuous))),
            guarantee=found.guarantee,
        )

    def heavy(self, Q: Float, K: Float, epsilon: float) -> Any:
        """Attention of one pair; a batch implementation gives its keys and its set by method."""
        if self.batch or self.sparse:
            pytest.skip("heavy attention takes one pair of dense matrices")
        with self._limit():
            keys = self.convert(K)
            universal = levattn.universal_set(keys, epsilon, method=self.method)
            return levattn.heavy_attention(self.convert(Q), keys, epsilon, universal=universal)

    def close(self, actual: Any, expected: Any) -> None:
        np.testing.assert_allclose(actual, expected, rtol=self.rtol, atol=self.rtol / 100)


def _stored(storage: str, **options: Any) -> Implementation:
    single = "float64" not in storage
    default = 2e-6 if single else 1e-10
    method = options.get("method", "auto")
    name = options.pop("name", f"{storage}-{method}")
    return Implementation(name, STORAGE[storage], rtol=default, **options)


def _laid_out(layout: str, storage: str) -> Implementation:
    implementation = _stored(storage, name=f"{storage}-{layout}", plain=f"{storage}-auto")
    convert = implementation.convert
    return replace(implementation, convert=lambda K: LAYOUTS[layout](convert(K)))


METHODS = ("auto", "gram", "qr", "svd")
NARROW = ("float16", "bfloat16", "torch-float16", "torch-bfloat16")  # small whole numbers are the same in float32

TABLE = [
    *(
        _stored(storage, method=method, thorough=storage == "float32" and method in ("gram", "svd"))
        for storage in ("float64", "float32")
        for method in METHODS
    ),
    *(
        _stored(s, plain=f"{s.removeprefix('torch-')}-auto")
        for s in ("torch-float64", "torch-float32")
        if s in STORAGE
    ),
    *(_stored(s, plain="float32-auto") for s in NARROW if s in STORAGE),
    *(
        _stored(s, method=m, thorough=m != "auto" or s not in ("strict-float64", "cupy-float32", "torch-cuda-float32"))
        for s in STORAGE
        if s.startswith(("strict", "cupy", "torch-cuda"))
        for m in (METHODS if s in ("strict-float32", "cupy-float32") else ("auto",))
    ),
    *(
        Implementation(
            f"csr-{dtype}-{method}",
            lambda K, dtype=dtype: strategies.csr(K, dtype),
            method,
            rtol=2e-6 if dtype == "float32" else 1e-10,
            sparse=True,
            thorough=dtype == "float32" and method != "auto",
        )
        for dtype in ("float64", "float32")
        for method in ("auto", "gram", "qr")
    ),
    *(_laid_out(layout, "float32") for layout in LAYOUTS),
    _laid_out("sliced", "float64"),
    _laid_out("memmap", "float16"),
    _stored("float32", name="float32-heads", batch=True, plain="float32-auto"),
    _stored("float64", name="float64-heads", batch=True, plain="float64-auto"),
    *(
        _stored(s, name=f"{s}-heads", batch=True, plain=plain, thorough=not plain)
        for s, plain in (("torch-bfloat16", "float32-auto"), ("strict-float64", ""), ("cupy-float32", ""))
        if s in STORAGE
    ),
    _stored("float32", name="float32-one-thread", threads=1, plain="float32-auto"),
    _stored("float32", name="float32-two-threads", threads=2, plain="float32-auto"),
    _stored("float64", name="float64-heads-two-threads", batch=True, threads=2, plain="float64-auto"),
]
NAMED = {impl.name: impl for impl in TABLE}


def _lines(lines: list[Implementation], thorough: Callable[[Implementation], bool]) -> Any:
    params = [pytest.param(one, id=one.name, marks=pytest.mark.thorough if thorough(one) else ()) for one in lines]
    return pytest.mark.parametrize("impl", params)


contract = _lines(TABLE, lambda impl: impl.thorough or bool(impl.plain))
alike = _lines([impl for impl in TABLE if impl.plain], lambda impl: impl.thorough)
keys = strategies.integer_keys


# -- the bits of another line of the table ---------------------------------------------


@alike
@SETTINGS
@given(K=keys(), epsilon=strategies.epsilons(), seed=strategies.seeds())
def test_bits_of_the_plain_array(impl: Implementation, K: Float, epsilon: float, seed: int) -> None:
    plain = NAMED[impl.plain]
    mask = np.random.default_rng(seed).random(len(K)) < 0.6
    options: list[dict[str, Any]] = [{}, {"center": True}, {"ridge": 0.1}, {"mask": mask}]
    for option in options:
        np.testing.assert_array_equal(impl.scores(K, **option), plain.scores(K, **option))
    for threshold, size in ((epsilon, None), (None, seed % (len(K) + 1))):
        one, other = (way.universal(K, threshold, size=size) for way in (impl, plain))
        for name, value in vars(one).items():
            np.testing.assert_array_equal(value, getattr(other, name), err_msg=name)
    if not impl.batch:
        Q = _queries(K, seed)
        V = np.random.default_rng(seed + 1).integers(-9, 10, (len(K), 4)).astype(np.float64)
        found, wanted = (_attention(way, Q, K, V, epsilon) for way in (impl, plain))
        for name, value in found.items():
            np.testing.assert_array_equal(value, wanted[name], err_msg=name)


def _attention(impl: Implementation, Q: Float, K: Float, V: Float, epsilon: float) -> dict[str, Any]:
    heavy = impl.heavy(Q, K, epsilon)
    output, bound = heavy.apply(impl.convert(V))
    figures = {
        "normalizers": heavy.normalizers,
        "captured": heavy.captured_mass,
        "residual": heavy.residual_mass,
        "output": output,
        "bound": bound,
    }
    return {"entries": heavy.entries.toarray()} | {name: as_float64(value) for name, value in figures.items()}


# -- property 1: range, rank, zero rows, rows outside the span of the others ----------


@contract
@SETTINGS
@given(K=keys())
def test_scores_are_the_exact_ones(impl: Implementation, K: Float) -> None:
    scores = impl.scores(K)
    impl.close(scores, naive.leverage_exact(K))
    assert np.all(scores >= 0)
    assert np.all(scores <= 1)


@contract
@SETTINGS
@given(K=keys())
def test_scores_add_up_to_the_rank(impl: Implementation, K: Float) -> None:
    rank = naive.rank_exact(K)
    found = impl.universal(K, 0.5)
    assert found.rank == rank
    impl.close(np.sum(impl.scores(K)), rank)
    assert not np.any(impl.scores(K)[~np.any(K != 0, axis=1)])


@contract
@SETTINGS
@given(K=keys(columns=(3, 8), min_rows=1))
def test_a_row_outside_the_span_of_the_others_scores_one(impl: Implementation, K: Float) -> None:
    K = K.copy()
    K[:, -1] = 0
    j = K.shape[0] // 2
    K[j, -1] = 1
    impl.close(impl.scores(K)[j], 1)
    assert impl.universal(K, 1.0).mask[j]


# -- property 2: invariances ----------------------------------------------------------


@contract
@SETTINGS
@given(K=keys(), data=st.data())
def test_invertible_right_multiplication(impl: Implementation, K: Float, data: st.DataObject) -> None:
    R = data.draw(strategies.invertible(K.shape[1]))
    impl.close(impl.scores(K @ R), impl.scores(K))


@contract
@SETTINGS
@given(K=keys(), exponent=st.integers(-10, 7))
def test_scaling(impl: Implementation, K: Float, exponent: int) -> None:
    impl.close(impl.scores(K * 2.0**exponent), impl.scores(K))


# -- property 4: copies ---------------------------------------------------------------


@contract
@SETTINGS
@given(K=keys(columns=(3,)), copies=st.integers(1, 5))
def test_copies_share_a_score(impl: Implementation, K: Float, copies: int) -> None:
    k = np.array([1.0, -2.0, 1.0])
    scores = impl.scores(np.vstack([np.tile(k, (copies, 1)), K]))
    if naive.rank_exact(np.vstack([k, K])) > naive.rank_exact(K):
        expected = 1 / copies
    else:
        t = k @ np.linalg.pinv(K.T @ K) @ k
        expected = t / (1 + copies * t)
    impl.close(scores[:copies], np.full(copies, expected))


# -- property 5: ties -----------------------------------------------------------------


@contract
@pytest.mark.parametrize("m", [1, 2, 3, 5, 7, 10, 20])
def test_identity_blocks_tie_at_one_over_m_and_are_in(impl: Implementation, m: int) -> None:
    K = strategies.identity_blocks(8, m)
    found = impl.universal(K, 1 / m)
    impl.close(found.scores, np.full(8 * m, 1 / m))
    assert np.all(found.mask)
    assert found.size == 8 * m
    assert not np.any(impl.universal(K, min(1.0, 1.001 / m)).mask) or m == 1


@contract
@SETTINGS
@given(K=strategies.invertible(8), n=st.integers(1, 8))
def test_independent_rows_score_one(impl: Implementation, K: Float, n: int) -> None:
    K = K[:n]
    impl.close(impl.scores(K), np.ones(K.shape[0]))
    assert np.all(impl.universal(K, 1.0).mask)


# -- property 6: deficient columns ----------------------------------------------------


@contract
@SETTINGS
@given(K=keys(columns=(3,)), seed=strategies.seeds())
def test_dependent_columns_change_nothing(impl: Implementation, K: Float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    extra = [np.zeros((K.shape[0], 2)), K @ rng.integers(-2, 3, (3, 3))]
    K8 = np.hstack([K, *extra])[:, rng.permutation(8)]
    impl.close(impl.scores(K8), impl.scores(K))
    assert impl.universal(K8, 0.5).rank == naive.rank_exact(K)


# -- property 7: nothing is missed, and nothing but ties is held beyond the definition --


@contract
@SETTINGS
@given(K=keys(), epsilon=strategies.epsilons(), seed=strategies.seeds())
def test_no_entry_is_missed(impl: Implementation, K: Float, epsilon: float, seed: int) -> None:
    found = impl.universal(K, epsilon)
    Q = np.random.default_rng(seed).standard_normal((20, K.shape[1]))
    dense = naive.attention(np.vstack([Q, naive.adversarial_queries(K)]), K)
    missed = np.any(dense >= epsilon, axis=0) & ~found.mask
    assert not np.any(missed)
    assert np.all(found.mask[naive.universal_set(K, epsilon)])
    assert np.all(naive.leverage_exact(K)[found.mask] >= epsilon * (1 - 1e-6))  # which some query gives the key
    assert found.guarantee == "exact"


# -- property 8: size -------------------------------------------------------------------


@contract
@SETTINGS
@given(K=keys(), epsilon=strategies.epsilons())
def test_size_bound(impl: Implementation, K: Float, epsilon: float) -> None:
    found = impl.universal(K, epsilon)
    rank = naive.rank_exact(K)
    assert found.epsilon == epsilon
    assert found.size_bound == pytest.approx(rank / epsilon)
    assert found.size <= rank / epsilon * (1 + 1e-9)
    assert found.is_vacuous == (found.size_bound >= K.shape[0])


@contract
@SETTINGS
@given(K=keys(), size=st.integers(0, 24))
def test_selection_by_size(impl: Implementation, K: Float, size: int) -> None:
    size = min(size, K.shape[0])
    found = impl.universal(K, size=size)
    assert found.size == size
    exact = naive.leverage_exact(K)
    left_out = exact[~found.mask]
    if size == K.shape[0]:
        assert found.epsilon == 0
    else:
        impl.close(found.epsilon, np.max(left_out))
        assert np.all(exact[found.mask] >= np.max(left_out) * (1 - impl.rtol) - impl.rtol / 100)
    # Equal keys tie: the earlier ones go first.
    for j in np.flatnonzero(found.mask):
        earlier = np.flatnonzero(np.all(K[:j] == K[j], axis=1))
        assert np.all(found.mask[earlier])


# -- properties 9, 10, 14, 23, 24: attention --------------------------------------------


def _queries(K: Float, seed: int) -> Float:
    """Small integers, so that every storage type holds them: random ones, keys and zero."""
    rng = np.random.default_rng(seed)
    random = rng.integers(-4, 5, (12, K.shape[1])).astype(np.float64)
    return np.vstack([random, K[:6], np.zeros((1, K.shape[1]))])


@contract
@SETTINGS
@given(K=keys(), epsilon=strategies.epsilons(), seed=strategies.seeds())
def test_heavy_entries_are_dense_thresholding(impl: Implementation, K: Float, epsilon: float, seed: int) -> None:
    Q = _queries(K, seed)
    heavy = impl.heavy(Q, K, epsilon)
    dense = naive.attention(Q, K)
    entries = heavy.entries.tocsr()
    assert entries.shape == dense.shape
    assert entries.dtype == np.float64
    assert entries.has_sorted_indices
    found = np.zeros(dense.shape, bool)
    found[entries.nonzero()] = True
    assert np.all(found[dense >= epsilon])
    assert not np.any(found[dense < epsilon * (1 - 1e-8)])
    np.testing.assert_allclose(entries.toarray()[found], dense[found], rtol=1e-12)


@contract
@SETTINGS
@given(K=keys(), seed=strategies.seeds())
def test_normalizers_and_masses(impl: Implementation, K: Float, seed: int) -> None:
    Q = _queries(K, seed)
    heavy = impl.heavy(Q, K, 0.2)
    expected = naive.normalizers(Q, K)
    np.testing.assert_allclose(as_float64(heavy.normalizers), expected, rtol=1e-12, atol=1e-12)
    captured = as_float64(heavy.captured_mass)
    selected = as_bool(heavy.universal.mask)
    np.testing.assert_allclose(captured, naive.captured_mass(Q, K, selected), rtol=1e-11, atol=1e-12)
    residual = naive.captured_mass(Q, K, ~selected)
    np.testing.assert_allclose(as_float64(heavy.residual_mass), residual, rtol=1e-9, atol=1e-12)


@contract
@pytest.mark.parametrize("compensate", [None, "mean"])
@SETTINGS
@given(K=keys(), epsilon=strategies.epsilons(), seed=strategies.seeds())
def test_output_and_bound(impl: Implementation, compensate: Any, K: Float, epsilon: float, seed: int) -> None:
    Q = _queries(K, seed)
    V = np.random.default_rng(seed + 1).integers(-9, 10, (K.shape[0], 4)).astype(np.float64)
    heavy = impl.heavy(Q, K, epsilon)
    output, bound = (as_float64(x) for x in heavy.apply(impl.convert(V), compensate=compensate))
    dense = naive.attention(Q, K)
    selected = as_bool(heavy.universal.mask)
    rounding = 1e-10  # of the definition; small whole numbers are exact in every type
    expected = naive.output(dense, V, selected, compensate)
    np.testing.assert_allclose(output, expected, rtol=0, atol=rounding)
    error = np.linalg.norm(dense @ V - output, axis=1)
    assert np.all(error <= bound * (1 + 1e-9) + rounding)
    largest = np.max(naive.leverage_exact(K), where=~selected, initial=0.0)
    tight = naive.output_error_bound(dense, V, selected, max(largest, epsilon), compensate)
    assert np.all(bound <= tight * (1 + 1e-6) + rounding + 1e-6)


@contract
@SETTINGS
@given(K=keys(min_rows=1), seed=strategies.seeds())
def test_a_set_of_all_keys_gives_dense_attention(impl: Implementation, K: Float, seed: int) -> None:
    if impl.batch or impl.sparse:
        pytest.skip("heavy attention takes one pair of dense matrices")
    Q = _queries(K, seed)
    stored = impl.convert(K)
    everything = levattn.universal_set(stored, size=K.shape[0], method=impl.method)
    heavy = levattn.heavy_attention(impl.convert(Q), stored, 1e-6, universal=everything)
    V = np.random.default_rng(seed + 1).integers(-9, 10, (K.shape[0], 4)).astype(np.float64)
    output, bound = heavy.apply(V)
    dense = naive.attention(Q, K)
    np.testing.assert_allclose(as_float64(output), dense @ V, rtol=1e-10, atol=1e-10)
    assert np.all(as_float64(bound) <= 1e-6)
    np.testing.assert_allclose(as_float64(heavy.residual_mass), 0, atol=1e-12)


# -- property 27: row norms are not leverage --------------------------------------------


@contract
def test_row_norms_do_not_pass(impl: Implementation) -> None:
    # A long common direction and a short one that only two keys carry: norms rank the
    # two last, leverage first, and turning the axes changes nothing.
    rng = np.random.default_rng(27)
    K = np.zeros((120, 8))
    K[:, 0] = rng.integers(20, 30, 120)
    K[:, 1] = rng.integers(-20, 21, 120)
    K[[40, 77]] = 0
    K[40, 5] = K[77, 6] = 1
    turn = np.kron(np.eye(4), np.array([[1.0, 1.0], [1.0, -1.0]]))
    for keys_of_one_turn in (K, K @ turn):
        scores = impl.scores(keys_of_one_turn)
        impl.close(scores[[40, 77]], 1)
        assert np.max(np.delete(scores, [40, 77])) < 0.2
        norms = np.linalg.norm(keys_of_one_turn, axis=1)
        assert set(np.argsort(norms)[:2]) == {40, 77}
        assert set(np.flatnonzero(impl.universal(keys_of_one_turn, size=2).mask)) == {40, 77}


# -- property 30: centering, and the other options ----------------------------------------


@contract
@SETTINGS
@given(K=keys(columns=(3,), min_rows=1))
def test_centering(impl: Implementation, K: Float) -> None:
    n = K.shape[0]
    centered = impl.scores(K, center=True)
    impl.close(centered, naive.leverage_exact(K, center=True))
    impl.close(centered + 1 / n, impl.scores(np.hstack([np.ones((n, 1)), K])))
    impl.close(impl.scores(K + 2.0, center=True), centered)


@contract
@SETTINGS
@given(K=keys(), ridge=st.sampled_from([1e-3, 0.1, 2.0]))
def test_ridge(impl: Implementation, K: Float, ridge: float) -> None:
    scores = impl.scores(K, ridge=ridge)
    impl.close(scores, naive.leverage_exact(K, ridge=ridge))
    assert np.all(scores <= impl.scores(K) * (1 + impl.rtol) + impl.rtol / 100)


@contract
@pytest.mark.parametrize("center", [False, True])
@SETTINGS
@given(K=keys(), seed=strategies.seeds())
def test_masked_keys_are_removed(impl: Implementation, center: bool, K: Float, seed: int) -> None:
    mask = np.random.default_rng(seed).random(K.shape[0]) < 0.6
    expected = naive.leverage_exact(K, center=center, mask=mask)
    garbage = K.copy()
    garbage[~mask] = np.nan
    stacked: Any = np.stack([mask] * 3) if impl.batch else mask
    if impl.name.startswith("strict"):
        import array_api_strict

        stacked = array_api_strict.asarray(stacked)
    with impl._limit():
        stored = impl.convert(impl._stack(garbage))
        if impl.batch:
            stored = impl.convert(np.stack([garbage, garbage, garbage]))
        scores = levattn.leverage_scores(stored, method=impl.method, center=center, mask=stacked)
        found = levattn.universal_set(stored, 0.1, method=impl.method, center=center, mask=stacked)
    scores = impl._item(as_float64(scores))
    impl.close(scores, expected)
    assert not np.any(scores[~mask])
    selected = impl._item(as_bool(found.mask))
    assert not np.any(selected[~mask])
    assert np.all(selected[expected >= 0.1])


@contract
@SETTINGS
@given(K=keys())
def test_scores_of_the_set_are_the_scores(impl: Implementation, K: Float) -> None:
    assert np.array_equal(impl.universal(K, 0.3).scores, impl.scores(K))
