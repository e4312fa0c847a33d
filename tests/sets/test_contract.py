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
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import levattn
import naive
import strategies
from strategies import LAYOUTS, STORAGE, Float, as_bool, as_float64

pytestmark = pytest.mark.filterwarnings("ignore::levattn.RankWarning")  # some keys here have such ranks

SETTINGS = strategies.examples(8)


# -- the table -----------------------------------------------------------------------


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

    def universal(self, K: Float, *args: Any, **options: Any) -> SimpleNamespace:
        """What `universal_set` found for one matrix, in numpy."""
        with self._limit():
            found = levattn.universal_set(self.convert(self._stack(K)), *args, method=self.method, **options)
        arrays = {"mask": self._item(as_bool(found.mask)), "scores": self._item(as_float64(found.scores))}
        figures = {name: np.asarray(getattr(found, name)) for name in ("rank", "epsilon", "size_bound", "is_vacuous")}
        one = {name: (self._item(each) if each.ndim else each).item() for name, each in figures.items()}
        return SimpleNamespace(**arrays, **one, size=np.count_nonzero(arrays["mask"]), guarantee=found.guarantee)

    def heavy(self, Q: Float, K: Float, epsilon: float, *, size: int | None = None) -> Any:
        """Attention of one pair over the set by the method, of this size if it is given."""
        if self.batch or self.sparse:
            pytest.skip("heavy attention takes one pair of dense matrices")
        with self._limit():
            keys = self.convert(K)
            universal = levattn.universal_set(keys, None if size else epsilon, size=size or None, method=self.method)
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
NARROW = (
    "float16",
    "bfloat16",
    "torch-float16",
    "torch-bfloat16",
    "jax-float16",
    "jax-bfloat16",
)  # small whole numbers are the same in float32

TABLE = [
    *(
        _stored(storage, method=method, thorough=storage == "float32" and method in ("gram", "svd"))
        for storage in ("float64", "float32")
        for method in METHODS
    ),
    *(
        _stored(s, plain=f"{s.partition('-')[2]}-auto")
        for s in ("torch-float64", "torch-float32", "jax-float64", "jax-float32")
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
        for s, plain in (
            *((s, "float32-auto") for s in ("torch-bfloat16", "jax-bfloat16")),
            *(("strict-float64", ""), ("cupy-float32", "")),
        )
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


# -- properties 1, 2, 4, 6 to 8: scores, ranks and sets are the exact ones ---------------


def _with_a_row_outside(K: Float) -> Float:
    """Keys of which one alone has the last direction."""
    K = K * (np.arange(K.shape[1]) < K.shape[1] - 1)
    K[len(K) // 2 : len(K) // 2 + 1, -1] = 1
    return K


def _with_dependent_columns(K: Float, seed: int) -> Float:
    rng = np.random.default_rng(seed)
    columns = np.hstack([K, np.zeros((len(K), 2)), K @ rng.integers(-2, 3, (K.shape[1], 3))])
    return np.asarray(columns[:, rng.permutation(columns.shape[1])])


# Keys made of any keys; the second argument draws what else they take
KINDS: dict[str, Callable[[Float, Any], Float]] = {
    "any": lambda K, _: K,
    "sparse": lambda _, draw: draw(strategies.sparse_keys()),
    "in another basis": lambda K, draw: K @ draw(strategies.invertible(K.shape[1])),
    "scaled": lambda K, draw: K * 2.0 ** draw(st.integers(-10, 7)),
    "copies": lambda K, draw: np.vstack(
        [np.tile(np.resize([1.0, -2, 1], K.shape[1]), (draw(st.integers(1, 5)), 1)), K]
    ),
    "independent rows": lambda _, draw: draw(strategies.invertible(8))[: draw(st.integers(1, 8))],
    "a row outside the span of the others": lambda K, _: _with_a_row_outside(K),
    "dependent columns": lambda K, draw: _with_dependent_columns(K, draw(strategies.seeds())),
}


@st.composite
def keys_of_all_kinds(draw: st.DrawFn) -> Float:
    return KINDS[draw(st.sampled_from([*KINDS]))](draw(keys()), draw)


@contract
@strategies.examples(48)
@given(K=keys_of_all_kinds(), epsilon=strategies.epsilons(), seed=strategies.seeds())
def test_scores_and_sets_are_the_exact_ones(impl: Implementation, K: Float, epsilon: float, seed: int) -> None:
    exact, rank = naive.leverage_exact(K), naive.rank_exact(K)
    scores = impl.scores(K)
    impl.close(scores, exact)
    assert np.all((scores >= 0) & (scores <= 1))
    assert not np.any(scores[~np.any(K != 0, axis=1)])
    impl.close(np.sum(scores), rank)
    Q = np.random.default_rng(seed).standard_normal((20, K.shape[1]))
    dense = naive.attention(np.vstack([Q, naive.adversarial_queries(K)]), K)
    for threshold in (epsilon, 1.0):
        found = impl.universal(K, threshold)
        assert (found.epsilon, found.rank, found.guarantee) == (threshold, rank, "exact")
        assert np.array_equal(found.scores, scores)
        assert not np.any(np.any(dense >= threshold, axis=0) & ~found.mask)
        assert np.all(found.mask[naive.universal_set(K, threshold)])
        assert np.all(exact[found.mask] >= threshold * (1 - 1e-6))  # which some query gives the key
        assert found.size_bound == pytest.approx(rank / threshold)
        assert found.size <= rank / threshold * (1 + 1e-9)
        assert found.is_vacuous == (found.size_bound >= len(K))


# -- property 5: ties -----------------------------------------------------------------


TURN = np.array([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])


@contract
@pytest.mark.parametrize("basis", [np.eye(1), np.eye(3), np.eye(8), 3 * TURN], ids=["1", "3", "8", "turned"])
def test_identity_blocks_tie_at_one_over_m_and_are_in(impl: Implementation, basis: Float) -> None:
    for m in (1, 2, 3, 5, 6, 7, 10, 11, 13, 20, 41, 49, 100):
        K = strategies.identity_blocks(len(basis), m) @ basis
        found = impl.universal(K, 1 / m)
        impl.close(found.scores, np.full(len(K), 1 / m))
        assert np.all(found.mask), m
        assert m == 1 or not np.any(impl.universal(K, min(1.0, 1.001 / m)).mask), m


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
@strategies.examples(16)
@given(K=keys(), whole=st.booleans(), epsilon=strategies.epsilons(), seed=strategies.seeds())
def test_heavy_attention_is_that_of_the_definition(
    impl: Implementation, K: Float, whole: bool, epsilon: float, seed: int
) -> None:
    Q = _queries(K, seed)
    V = np.random.default_rng(seed + 1).integers(-9, 10, (K.shape[0], 4)).astype(np.float64)
    heavy = impl.heavy(Q, K, epsilon, size=len(K) if whole else None)  # a set of all keys, or those of ε
    dense, selected = naive.attention(Q, K), as_bool(heavy.universal.mask)
    entries = heavy.entries.tocsr()
    assert entries.shape == dense.shape
    assert entries.dtype == np.float64
    assert entries.has_sorted_indices
    found = np.zeros(dense.shape, bool)
    found[entries.nonzero()] = True
    assert np.all(found[dense >= epsilon])
    assert not np.any(found[dense < epsilon * (1 - 1e-8)])
    np.testing.assert_allclose(entries.toarray()[found], dense[found], rtol=1e-12)
    figures = {"rtol": 1e-11, "atol": 1e-12}
    np.testing.assert_allclose(as_float64(heavy.normalizers), naive.normalizers(Q, K), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(as_float64(heavy.captured_mass), naive.captured_mass(Q, K, selected), **figures)
    residual = naive.captured_mass(Q, K, ~selected)
    np.testing.assert_allclose(as_float64(heavy.residual_mass), residual, rtol=1e-9, atol=1e-12)
    rounding = 1e-10  # of the definition; small whole numbers are exact in every type
    largest = np.max(naive.leverage_exact(K), where=~selected, initial=0.0)
    for compensate in (None, "mean"):
        output, bound = (as_float64(x) for x in heavy.apply(impl.convert(V), compensate=compensate))
        expected = naive.output(dense, V, selected, compensate)
        np.testing.assert_allclose(output, expected, rtol=0, atol=rounding)
        error = np.linalg.norm(dense @ V - output, axis=1)
        assert np.all(error <= bound * (1 + 1e-9) + rounding)
        tight = naive.output_error_bound(dense, V, selected, max(largest, epsilon), compensate)
        assert np.all(bound <= tight * (1 + 1e-6) + rounding + 1e-6)
        assert not np.all(selected) or np.all(bound <= 1e-6)


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


# -- property 30: centering, a ridge and a mask -------------------------------------------


OPTIONS: list[dict[str, Any]] = [{}, {"center": True}, {"ridge": 1e-3}, {"ridge": 0.1}, {"ridge": 2.0}]


@contract
@strategies.examples(32)
@given(K=keys(), options=st.sampled_from(OPTIONS), masked=st.booleans(), seed=strategies.seeds())
def test_options_and_masked_keys(
    impl: Implementation, K: Float, options: dict[str, Any], masked: bool, seed: int
) -> None:
    mask = np.random.default_rng(seed).random(K.shape[0]) < 0.6 if masked else np.ones(K.shape[0], bool)
    expected = naive.leverage_exact(K, mask=mask, **options)
    garbage = np.where(mask[:, None], K, np.nan)
    stacked: Any = np.stack([mask] * 3) if impl.batch else mask
    stored = np.stack([garbage] * 3) if impl.batch else garbage
    if impl.name.startswith("strict"):
        import array_api_strict

        stacked = array_api_strict.asarray(stacked)
    with impl._limit():
        scores = levattn.leverage_scores(impl.convert(stored), method=impl.method, mask=stacked, **options)
    scores = impl._item(as_float64(scores))
    impl.close(scores, expected)
    assert not np.any(scores[~mask])
    if "ridge" in options:
        assert np.all(scores <= naive.leverage_exact(K, mask=mask) * (1 + impl.rtol) + impl.rtol / 100)
        return
    with impl._limit():
        found = levattn.universal_set(impl.convert(stored), 0.1, method=impl.method, mask=stacked, **options)
    selected = impl._item(as_bool(found.mask))
    assert not np.any(selected[~mask])
    assert np.all(selected[expected >= 0.1])
