"""What comes back: type, namespace, dtype and device of the input, which is never written to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import levattn
import naive
import strategies
from strategies import STORAGE, as_bool, as_float64, stores

RESULT_DTYPE = {
    "float64": "float64",
    "float32": "float32",
    "float16": "float32",
    "bfloat16": "float32",
}

needs_torch = pytest.mark.skipif(not strategies.HAS_TORCH, reason="no torch")
needs_strict = pytest.mark.skipif(not strategies.HAS_STRICT, reason="no array_api_strict")


def keys(seed: int = 0, shape: tuple[int, ...] = (40, 4)) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


def library(array: Any) -> str:
    return type(array).__module__.split(".")[0]


def dtype_name(array: Any) -> str:
    return str(array.dtype).split(".")[-1]


# -- type, namespace, dtype ---------------------------------------------------------------


@stores()
@pytest.mark.parametrize("shape", [(40, 4), (2, 3, 40, 4), (0, 4), (3, 40, 4)])
def test_scores_come_back_as_the_type_of_the_keys(storage: str, shape: Any) -> None:
    K = STORAGE[storage](keys(1, shape))
    scores = levattn.leverage_scores(K)
    assert type(scores) is type(K)
    assert dtype_name(scores) == RESULT_DTYPE[storage.split("-")[-1]]
    assert tuple(scores.shape) == shape[:-1]


@stores()
def test_universal_sets_come_back_as_the_type_of_the_keys(storage: str) -> None:
    K = STORAGE[storage](keys(2))
    found = levattn.universal_set(K, 0.1)
    assert type(found.mask) is type(K)
    assert type(found.scores) is type(K)
    assert dtype_name(found.mask) == "bool"
    assert dtype_name(found.scores) == RESULT_DTYPE[storage.split("-")[-1]]
    assert dtype_name(found.indices) == "int64"
    kinds = {
        "epsilon": float,
        "rank": int,
        "guarantee": str,
        "is_vacuous": bool,
        "size_bound": float,
        "condition": float,
    }
    assert {name: type(getattr(found, name)) for name in kinds} == kinds
    assert isinstance(repr(found), str)
    assert found.f == 2


@stores("float32", "torch-float32", "torch-bfloat16", "strict-float32")
def test_a_batch_reports_per_item(storage: str) -> None:
    K = STORAGE[storage](keys(3, (2, 3, 40, 4)))
    for epsilon, size in ((0.1, None), (None, 7)):
        found = levattn.universal_set(K, epsilon, size=size)
        for name in ("rank", "sizes", "size_bound", "is_vacuous", "condition"):
            assert np.asarray(getattr(found, name)).shape == (2, 3), name
        assert np.asarray(found.rank).dtype == np.int64
        assert np.asarray(found.sizes).dtype == np.int64
        assert np.asarray(found.epsilon).shape == ((2, 3) if epsilon is None else ())
        assert np.array_equal(np.asarray(found.sizes), as_bool(found.mask).sum(axis=-1))
        assert isinstance(repr(found), str)


def test_a_set_cannot_be_changed() -> None:
    found = levattn.universal_set(keys(), 0.1)
    with pytest.raises(AttributeError):
        found.epsilon = 0.5


@stores()
def test_attention_comes_back(storage: str) -> None:
    from scipy import sparse

    K, Q, V = (STORAGE[storage](keys(seed, shape)) for seed, shape in ((4, (40, 4)), (5, (6, 4)), (6, (40, 3))))
    heavy = levattn.heavy_attention(Q, K, 0.05)
    assert isinstance(heavy.entries, (sparse.csr_matrix, sparse.csr_array))
    assert heavy.entries.dtype == np.float64
    assert heavy.entries.shape == (6, 40)
    for name in ("normalizers", "captured_mass", "residual_mass"):
        figures = getattr(heavy, name)
        assert isinstance(figures, np.ndarray), name
        assert figures.dtype == np.float64
        assert figures.shape == (6,)
    np.testing.assert_allclose(as_float64(heavy.captured_mass) + as_float64(heavy.residual_mass), 1, rtol=1e-6)
    for compensate in (None, "mean"):
        output, bound = heavy.apply(V, compensate=compensate)
        assert type(output) is type(V)
        assert tuple(output.shape) == (6, 3)
        assert tuple(bound.shape) == (6,)


@needs_torch
def test_torch_details() -> None:
    import torch

    K = torch.randn(30, 4, dtype=torch.float32, requires_grad=True)
    scores = levattn.leverage_scores(K)
    assert not scores.requires_grad
    np.testing.assert_allclose(as_float64(scores), naive.leverage_exact(as_float64(K)), rtol=1e-6)
    mask = torch.arange(30) % 2 == 0
    found = levattn.universal_set(K, 0.1, mask=mask)
    assert not torch.any(found.mask & ~mask)
    assert found.mask.device == K.device
    view = torch.randn(2, 30, 3, 4).transpose(1, 2)  # the layout that attention modules hand over
    for head in range(3):
        np.testing.assert_allclose(
            levattn.leverage_scores(view)[1, head], naive.leverage_exact(view[1, head]), rtol=1e-6
        )
    expanded = K.detach().expand(3, 30, 4)
    assert torch.equal(levattn.leverage_scores(expanded)[2], levattn.leverage_scores(expanded)[0])


@needs_torch
def test_a_tensor_with_the_negative_bit_is_resolved() -> None:
    import torch

    K = torch.complex(torch.zeros(40, 4, dtype=torch.float64), torch.from_numpy(keys())).conj().imag
    assert K.is_neg()
    mask = torch.arange(40) % 5 > 0
    expected = levattn.leverage_scores(keys(), mask=mask.numpy())
    assert np.array_equal(np.asarray(levattn.leverage_scores(K, mask=mask)), expected)


@needs_strict
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_memory_of_tensors_that_were_read_can_be_freed(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    K = torch.randn(2, 40, 3).to(getattr(torch, dtype))
    mask = torch.ones(2, 40, dtype=torch.bool)
    levattn.leverage_scores(K, mask=mask)
    levattn.heavy_attention(K, K, 0.5)
    levattn.states.Moments(3, (2,)).update(K)
    for tensor in (K, mask):
        tensor.untyped_storage().resize_(0)


def test_numbers_that_torch_hides_are_named() -> None:
    torch = pytest.importorskip("torch")
    K = torch.randn(2, 40, 3, dtype=torch.float64)
    scores = levattn.leverage_scores(K)
    assert torch.equal(torch.func.grad(lambda K: K.sum() + levattn.leverage_scores(K).sum())(K), torch.ones_like(K))
    seen: list[Any] = []
    torch.func.grad(lambda K: (seen.append(levattn.leverage_scores(K.half().double())), K.sum())[1])(K)
    torch.testing.assert_close(seen[0], scores, atol=1e-2, rtol=0)
    with pytest.raises(TypeError, match=r"K is a torch tensor within torch.func.vmap.*leading axes of K are a batch"):
        torch.func.vmap(levattn.leverage_scores)(K)


def test_the_strict_namespace_in_every_version() -> None:
    import array_api_strict as xp

    for version in ("2023.12", "2024.12"):
        with xp.ArrayAPIStrictFlags(api_version=version):
            K = xp.asarray(keys())
            exact = naive.leverage_exact(keys())
            np.testing.assert_allclose(as_float64(levattn.leverage_scores(K)), exact, rtol=1e-10)
            centered = naive.leverage_exact(keys(), center=True)
            np.testing.assert_allclose(as_float64(levattn.leverage_scores(K, center=True)), centered, rtol=1e-9)


@needs_strict
def test_a_mask_of_another_library() -> None:
    import array_api_strict as xp

    mask = np.arange(40) < 30
    expected = naive.leverage_exact(keys(), mask=mask)
    for K, its_mask in (
        (keys(), mask),
        (keys(), mask.tolist()),
        (keys(), np.repeat(mask, 2)[::2]),
        (xp.asarray(keys()), xp.asarray(mask)),
        (xp.asarray(keys()), mask),
        (xp.asarray(keys()), mask.tolist()),
        (xp.asarray(keys()), strategies.read_only(mask[::-1])[::-1]),
        (keys(), xp.asarray(mask)),
    ):
        np.testing.assert_allclose(as_float64(levattn.leverage_scores(K, mask=its_mask)), expected, rtol=1e-10)
    with pytest.raises((TypeError, ValueError), match="mask"):
        levattn.leverage_scores(xp.asarray(keys()), mask="all")


# -- input is only read -------------------------------------------------------------------


@stores()
def test_input_is_not_written(storage: str) -> None:
    raw = keys(7)
    K, Q, V = STORAGE[storage](raw), STORAGE[storage](keys(8, (5, 4))), STORAGE[storage](keys(9))
    before = [as_float64(x) for x in (K, Q, V)]
    for options in ({}, {"center": True}, {"relative_ridge": 0.1}, {"method": "qr"}, {"method": "svd"}):
        levattn.leverage_scores(K, **options)
    levattn.universal_set(K, size=5)
    levattn.heavy_attention(Q, K, 0.1).apply(V, compensate="mean")
    for array, values in zip((K, Q, V), before, strict=True):
        assert np.array_equal(as_float64(array), values)


def test_columns_of_queries_of_another_library_may_lie_side_by_side() -> None:
    xp = pytest.importorskip("array_api_strict")
    K, Q = keys(4, (40, 4)), keys(5, (6, 4))
    plain = levattn.heavy_attention(Q, K, 0.05)
    turned = levattn.heavy_attention(xp.asarray(np.ascontiguousarray(Q.T)).T, xp.asarray(K), 0.05)
    assert np.array_equal(plain.entries.toarray(), turned.entries.toarray())


def test_sets_of_a_batch_of_another_library_are_taken_one_by_one() -> None:
    xp = pytest.importorskip("array_api_strict")
    stack, labels = np.stack([keys(4, (40, 4)), keys(5, (40, 4))]), np.arange(80).reshape(2, 40) % 9
    K, Q = xp.asarray(stack), xp.asarray(stack[:, :6])
    for method in ("auto", "osnap"):
        found, plain = (levattn.universal_set(k, 0.3, method=method) for k in (K, stack))
        if method == "osnap":
            found, plain = found.rechecked(K), plain.rechecked(stack)
        else:
            found, plain = found.with_groups(K, xp.asarray(labels)), plain.with_groups(stack, labels)
        assert np.array_equal(as_bool(found.mask), plain.mask)
        assert np.array_equal(as_bool(found[1].mask), plain[1].mask)
        heavy = levattn.heavy_attention(Q, K, 0.3, universal=found)
        assert np.array_equal(
            heavy[0].entries.toarray(), levattn.heavy_attention(stack[0, :6], stack[0], 0.3).entries.toarray()
        )


def test_results_do_not_alias_the_input() -> None:
    K = np.ones((4, 1))
    scores = levattn.leverage_scores(K)
    scores[...] = 7
    assert np.array_equal(K, np.ones((4, 1)))


@pytest.mark.parametrize(
    "K", [keys().astype(">f8"), np.broadcast_to(keys(), (3, 40, 4))], ids=["swapped", "broadcast"]
)
def test_keys_that_lie_otherwise(K: Any) -> None:
    expected = np.broadcast_to(naive.leverage_exact(keys()), K.shape[:-1])
    np.testing.assert_allclose(levattn.leverage_scores(K), expected, rtol=1e-10)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="long double is float64 here")
def test_long_double_is_refused() -> None:
    with pytest.raises(TypeError, match=r"longdouble|float128"):
        levattn.leverage_scores(keys().astype(np.longdouble))


# -- the generic definitions and the compiled kernels agree ---------------------------------


def assert_agree(array: Any, K: Any, bar: float, **options: Any) -> None:
    """Scores and sets of an array are those of the same keys in numpy, but for keys within the bar of ε."""
    scores = levattn.leverage_scores(array, **options)
    assert dtype_name(scores) == K.dtype.name
    np.testing.assert_allclose(as_float64(scores), levattn.leverage_scores(K, **options), rtol=0, atol=bar)
    found, expected = (levattn.universal_set(keys, 0.05, **options) for keys in (array, K))
    assert type(found.mask) is type(array)
    assert found.rank == expected.rank
    np.testing.assert_allclose(as_float64(found.scores), expected.scores, rtol=0, atol=bar)
    differing = as_bool(found.mask) != expected.mask
    assert np.all(np.abs(expected.scores[differing] - 0.05) < bar)


@needs_strict
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", [n for n in strategies.CASES if n not in ("scale-1e150", "scale-1e-150")])
def test_generic_and_compiled_agree(name: str, dtype: Any) -> None:
    K = STORAGE[dtype](strategies.case(name))
    loose = name in ("conditioned-1e10", "near-deficient-1e-10")
    bar = 1e-7 if loose else 1e-10 if dtype == "float64" else 1e-6
    assert_agree(STORAGE[f"strict-{dtype}"](strategies.case(name)), K, bar)


@needs_torch
@pytest.mark.parametrize("kind", ["wrapper", "zeros"])
def test_tensors_without_memory_of_their_own_are_refused(kind: str) -> None:
    import torch
    from torch.testing._internal.two_tensor import TwoTensor

    K = torch.ones(50, 3)
    given = TwoTensor(K, K.clone()) if kind == "wrapper" else torch._efficientzerotensor((50, 3))  # type: ignore[attr-defined]
    with pytest.raises((RuntimeError, TypeError)):
        levattn.leverage_scores(given)
