"""Bad input: a typed error that names the argument, what came, and what to do.

Empty matrices, one row, zero rows and rank 0 are no errors: they have defined results.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import levattn
import strategies
from levattn import exceptions
from levattn._core.threads import num_threads
from strategies import STORAGE, as_bool, as_float64, stores

needs_torch = pytest.mark.skipif(not strategies.HAS_TORCH, reason="no torch")
GOOD = np.random.default_rng(0).standard_normal((12, 3))
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "leverage_scores": levattn.leverage_scores,
    "universal_set": lambda K, **options: levattn.universal_set(K, 0.1, **options),
    "heavy_attention": lambda K, **options: levattn.heavy_attention(np.ones((2, 3)), K, 0.1, **options),
}

takes_keys = pytest.mark.parametrize("function", list(FUNCTIONS.values()), ids=list(FUNCTIONS))


def check(error: BaseException, *words: str) -> None:
    """The message contains all words, whatever their case, and is a sentence with a remedy."""
    message = str(error)
    for word in words:
        assert re.search(word, message, re.IGNORECASE), f"{word!r} is not in: {message}"
    assert len(message) > 25
    assert len(message.splitlines()) <= 12


# -- keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["auto", "gram", "qr", "svd"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("row", [0, 1, 2999])
def test_every_method_finds_a_single_number_that_is_not_finite(row: int, value: float, method: str) -> None:
    K = np.random.default_rng(0).standard_normal((3000, 4))
    K[row, 2] = value
    with pytest.raises(exceptions.NonFiniteError, match=rf"\b{row}\b"):
        levattn.leverage_scores(K, method=method)


@takes_keys
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_keys_name_their_rows(function: Callable[..., Any], value: Any) -> None:
    K = GOOD.copy()
    K[[4, 7], 1] = value
    with pytest.raises(exceptions.NonFiniteError) as caught:
        function(K)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, exceptions.LevattnError)
    check(caught.value, r"\bK\b", r"\b4\b", r"\b7\b", "mask|remove|clean|replace")


@stores()
def test_non_finite_keys_in_every_storage_type(storage: str) -> None:
    K = GOOD.copy()
    K[5, 0] = np.nan
    with pytest.raises(exceptions.NonFiniteError) as caught:
        levattn.leverage_scores(STORAGE[storage](K))
    check(caught.value, r"\bK\b", r"\b5\b")


def test_many_non_finite_rows_are_not_all_listed() -> None:
    K = np.full((100_000, 3), np.nan)
    with pytest.raises(exceptions.NonFiniteError) as caught:
        levattn.leverage_scores(K)
    check(caught.value, r"\b0\b", r"\b1\b")
    assert len(str(caught.value)) < 600


def test_non_finite_rows_of_a_head() -> None:
    K = np.zeros((2, 3, 6, 4))
    K[1, 2, 5, 0] = np.inf
    with pytest.raises(exceptions.NonFiniteError) as caught:
        levattn.leverage_scores(K)
    check(caught.value, r"\bK\b", r"1, ?2, ?5|row 5")


def test_finite_keys_whose_squares_overflow_are_not_refused() -> None:
    assert np.all(np.isfinite(levattn.leverage_scores(GOOD * 1e300)))
    assert np.all(np.isfinite(levattn.leverage_scores((GOOD * 1e38).astype(np.float32))))


@takes_keys
@pytest.mark.parametrize("shape", [(), (5,)])
def test_keys_of_too_few_axes(function: Callable[..., Any], shape: Any) -> None:
    with pytest.raises(ValueError, match=r"\bK\b") as caught:
        function(np.ones(shape))
    check(caught.value, r"\bn, ?d\b", re.escape(str(shape)))


def test_heavy_attention_takes_one_pair() -> None:
    with pytest.raises(ValueError, match=r"\bK\b") as caught:
        levattn.heavy_attention(np.ones((2, 3)), np.ones((2, 12, 3)), 0.1)
    check(caught.value, "one|loop|head|batch", r"\(2, ?12, ?3\)")
    with pytest.raises(ValueError, match=r"\bQ\b"):
        levattn.heavy_attention(np.ones((2, 4, 3)), GOOD, 0.1)
    with pytest.raises(ValueError, match=r"\bQ\b"):
        levattn.heavy_attention(np.ones(3), GOOD, 0.1)


@takes_keys
@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.uint16, np.bool_])
def test_integer_keys(function: Callable[..., Any], dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"\bK\b") as caught:
        function(np.ones((4, 3), dtype))
    check(caught.value, np.dtype(dtype).name, "float", "real")


@takes_keys
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128, object, "U3", "M8[s]"])
def test_keys_of_other_types(function: Callable[..., Any], dtype: Any) -> None:
    K = np.ones((4, 3)).astype(np.int64).astype(dtype)
    with pytest.raises(TypeError, match=r"\bK\b") as caught:
        function(K)
    check(caught.value, "float")


@takes_keys
@pytest.mark.parametrize("value", [None, "keys.npy", 3.0, {"K": 1}])
def test_keys_that_are_no_array(function: Callable[..., Any], value: Any) -> None:
    with pytest.raises(TypeError, match=r"\bK\b") as caught:
        function(value)
    check(caught.value, "array", type(value).__name__)


def test_masked_arrays_and_sparse_matrices_are_not_densified_silently() -> None:
    import scipy.sparse

    with pytest.raises(TypeError, match=r"\bK\b"):
        levattn.leverage_scores(scipy.sparse.csc_matrix(GOOD))
    with pytest.raises(TypeError, match=r"\bK\b") as caught:
        levattn.leverage_scores(np.ma.masked_array(GOOD, GOOD > 1))
    check(caught.value, "mask")


@pytest.mark.parametrize(
    ("storage", "remedy"),
    [
        ("float64", r"\bK\.astype\('float64'\)"),
        ("torch-float64", r"\bK\.to\(torch\.float64\)"),
        ("strict-float64", r"\bxp\.astype\(K, xp\.float64\)"),
    ],
)
def test_the_remedy_for_a_dtype_is_one_of_the_namespace(storage: str, remedy: str) -> None:
    if storage not in STORAGE:
        pytest.skip(f"no package for {storage}")
    with pytest.raises(TypeError, match=r"\bK\b") as caught:
        levattn.leverage_scores(STORAGE[storage](GOOD) > 0)
    check(caught.value, "bool", "float", remedy)


def test_lists_of_integers() -> None:
    with pytest.raises(TypeError, match=r"\bK\b") as caught:
        levattn.leverage_scores([[1, 2], [3, 4]])
    check(caught.value, "int64", r"numpy\.array\(K, 'float64'\)")


@takes_keys
def test_lists_that_make_no_array(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"\bK\b") as caught:
        function([[1.0, 2.0], [3.0]])
    check(caught.value, "list", "equal length", "pad")
    with pytest.raises(ValueError, match=r"\bmask\b") as caught:
        function(GOOD, mask=[[True], [True, False]])
    check(caught.value, "list", "equal length", "pad")


@needs_torch
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_tensors_without_dense_numbers() -> None:
    import torch

    K = torch.from_numpy(GOOD)
    for tensor, words in (
        (K.to_sparse(), (r"sparse_coo", r"K\.to_dense\(\)")),
        (K.to("meta"), ("meta", "no numbers", "device")),
        (torch.nested.nested_tensor([K, K[:5]]), ("nested", "to_padded_tensor", "mask=")),
    ):
        with pytest.raises(TypeError, match=r"\bK\b") as caught:
            levattn.leverage_scores(tensor)
        check(caught.value, *words)
    with pytest.raises(TypeError, match=r"\bmask\b") as caught:
        levattn.leverage_scores(GOOD, mask=(K[:, 0] > 0).to_sparse())
    check(caught.value, "sparse_coo", r"mask\.to_dense\(\)")
    with pytest.raises(TypeError, match=r"\bmask\b") as caught:
        levattn.leverage_scores(GOOD, mask=K[:, 0].bfloat16().requires_grad_())
    check(caught.value, "bfloat16", "bool")


@takes_keys
def test_no_columns(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"\bK\b") as caught:
        function(np.ones((4, 0)))
    check(caught.value, r"\bd\b|column")


# -- queries ------------------------------------------------------------------------------


def test_queries_of_another_width() -> None:
    with pytest.raises(ValueError, match=r"\bQ\b") as caught:
        levattn.heavy_attention(np.ones((2, 5)), GOOD, 0.1)
    check(caught.value, r"\bK\b", r"\b5\b", r"\b3\b")


def test_non_finite_queries_name_their_rows() -> None:
    Q = np.ones((9, 3))
    Q[6, 2] = np.nan
    with pytest.raises(exceptions.NonFiniteError) as caught:
        levattn.heavy_attention(Q, GOOD, 0.1)
    check(caught.value, r"\bQ\b", r"\b6\b")


@pytest.mark.parametrize("dtype", [np.int64, np.complex128, object])
def test_queries_of_other_types(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"\bQ\b"):
        levattn.heavy_attention(np.ones((2, 3), dtype), GOOD, 0.1)


# -- epsilon and size ---------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, -0.1, 1.0000001, 2.0, np.nan, np.inf])
def test_epsilon_out_of_range(epsilon: Any) -> None:
    for call in (
        lambda: levattn.universal_set(GOOD, epsilon),
        lambda: levattn.heavy_attention(GOOD, GOOD, epsilon),
    ):
        with pytest.raises(ValueError, match="epsilon") as caught:
            call()
        check(caught.value, r"\(0, 1\]|0 < epsilon <= 1", re.escape(str(epsilon)))


@pytest.mark.parametrize("epsilon", ["0.1", [0.1], 1j, np.array([0.1, 0.2]), True])
def test_epsilon_of_another_type(epsilon: Any) -> None:
    with pytest.raises(TypeError, match="epsilon"):
        levattn.universal_set(GOOD, epsilon)


@pytest.mark.parametrize("epsilon", [np.float32(0.5), np.float64(0.5), 1])
def test_numbers_of_other_types_are_numbers(epsilon: Any) -> None:
    assert levattn.universal_set(GOOD, epsilon).epsilon == float(epsilon)


@pytest.mark.parametrize("size", [-1, 13, 10**9])
def test_size_out_of_range(size: Any) -> None:
    with pytest.raises(ValueError, match="size") as caught:
        levattn.universal_set(GOOD, size=size)
    check(caught.value, r"\[0, 12\]|0 <= size <= 12", re.escape(str(size)))


def test_a_size_beyond_the_unmasked_keys_takes_them_all() -> None:
    mask = np.arange(12) < 5
    found = levattn.universal_set(GOOD, size=6, mask=mask)
    assert np.array_equal(found.mask, mask)
    assert found.epsilon == 0


@pytest.mark.parametrize("size", [2.5, 3.0, "3", True, None])
def test_size_of_another_type(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="size"):
        levattn.universal_set(GOOD, size=size)


def test_numpy_integers_are_sizes() -> None:
    assert len(levattn.universal_set(GOOD, size=np.int64(3))) == 3


def test_both_or_neither_of_epsilon_and_size() -> None:
    with pytest.raises(ValueError, match="epsilon") as caught:
        levattn.universal_set(GOOD, 0.1, size=3)
    check(caught.value, "size", "both|one of|exactly one")
    with pytest.raises(ValueError, match="epsilon") as caught:
        levattn.universal_set(GOOD)
    check(caught.value, "size", "neither|one of|exactly one")


# -- options ------------------------------------------------------------------------------


@takes_keys
@pytest.mark.parametrize("shape", [(11,), (12, 1), (1, 12), (12, 3), ()])
def test_mask_of_another_shape(function: Callable[..., Any], shape: Any) -> None:
    with pytest.raises(ValueError, match="mask") as caught:
        function(GOOD, mask=np.ones(shape, bool))
    check(caught.value, re.escape(str(shape)), r"\(12,\)")


@takes_keys
@pytest.mark.parametrize("dtype", [np.int64, np.float64, object])
def test_mask_of_another_type(function: Callable[..., Any], dtype: Any) -> None:
    with pytest.raises(TypeError, match="mask") as caught:
        function(GOOD, mask=np.ones(12, dtype))
    check(caught.value, "bool")


@pytest.mark.parametrize("function", [FUNCTIONS["leverage_scores"], FUNCTIONS["universal_set"]])
def test_unknown_method(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="method") as caught:
        function(GOOD, method="cholesky")
    check(caught.value, "cholesky", "auto", "gram", r"\bqr\b", "svd")
    with pytest.raises((TypeError, ValueError), match="method"):
        function(GOOD, method=None)


@pytest.mark.parametrize("ridge", [-1e-3, np.nan, np.inf])
def test_ridge_out_of_range(ridge: float) -> None:
    with pytest.raises(ValueError, match="ridge") as caught:
        levattn.leverage_scores(GOOD, ridge=ridge)
    check(caught.value, re.escape(str(ridge)))


@pytest.mark.parametrize("rtol", [-1e-3, np.nan, 1.5, 0.0, 1e-17])
def test_rtol_out_of_range(rtol: float) -> None:
    with pytest.raises(ValueError, match="rtol"):
        levattn.leverage_scores(GOOD, rtol=rtol)


@pytest.mark.parametrize("method", ["auto", "gram", "qr", "svd"])
@pytest.mark.parametrize("option", [{"sketch_size": 100}, {"rng": 0}])
def test_options_of_sketches_with_an_exact_method(method: str, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))) as caught:
        levattn.leverage_scores(GOOD, method=method, **option)
    check(caught.value, "exact", method)


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        levattn.leverage_scores(GOOD, "gram")
    with pytest.raises(TypeError):
        levattn.universal_set(GOOD, 0.1, 3)
    with pytest.raises(TypeError):
        levattn.leverage_scores(K=GOOD)


@pytest.mark.parametrize("f", [-1, 0, np.nan, "softmax", None, True])
def test_other_attention_functions(f: Any) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=r"\bf\b"):
        levattn.universal_set(GOOD, 0.1, f=f)


def test_values_that_do_not_fit() -> None:
    heavy = levattn.heavy_attention(GOOD, GOOD, 0.1)
    with pytest.raises(ValueError, match=r"\bV\b") as caught:
        heavy.apply(np.ones((11, 2)))
    check(caught.value, r"\b11\b", r"\b12\b")
    with pytest.raises(ValueError, match=r"\bV\b"):
        heavy.apply(np.ones(12))
    with pytest.raises(exceptions.NonFiniteError, match=r"\bV\b"):
        heavy.apply(np.full((12, 2), np.nan))
    with pytest.raises(TypeError, match=r"\bV\b"):
        heavy.apply(np.ones((12, 2), complex))
    with pytest.raises(ValueError, match="compensate") as caught:
        heavy.apply(np.ones((12, 2)), compensate="median")
    check(caught.value, "mean", "None")


def test_universal_sets_that_do_not_fit() -> None:
    with pytest.raises(TypeError, match="universal"):
        levattn.heavy_attention(GOOD, GOOD, 0.1, universal=np.ones(12, bool))
    other = levattn.universal_set(GOOD[:7], 0.1)
    with pytest.raises(ValueError, match="universal") as caught:
        levattn.heavy_attention(GOOD, GOOD, 0.1, universal=other)
    check(caught.value, r"\b7\b", r"\b12\b")
    batch = levattn.universal_set(np.stack([GOOD, GOOD]), 0.1)
    with pytest.raises(ValueError, match="universal"):
        levattn.heavy_attention(GOOD, GOOD, 0.1, universal=batch)


def test_a_batch_has_no_indices() -> None:
    found = levattn.universal_set(np.stack([GOOD, GOOD]), 0.1)
    with pytest.raises(ValueError, match="indices") as caught:
        _ = found.indices
    check(caught.value, "mask")
    with pytest.raises((TypeError, ValueError), match="sizes"):
        len(found)


@pytest.mark.parametrize("limit", [0, -1, np.int64(0), 1.5, 2.0, "2", True, np.True_, None])
def test_thread_limit_out_of_range(limit: Any) -> None:
    whole = isinstance(limit, int | np.integer) and not isinstance(limit, bool)
    expected, text = (ValueError, "expected at least 1") if whole else (TypeError, "a whole number of threads")
    shown = str(limit) if whole else repr(limit)
    with pytest.raises(expected, match=f"n is {re.escape(shown)}; .*{text}"), levattn.thread_limit(limit):
        pass


@pytest.mark.parametrize("limit", [1, np.int64(1), np.uint8(3)])
def test_whole_numbers_of_numpy_limit_threads(limit: Any) -> None:
    with levattn.thread_limit(limit):
        assert num_threads() == int(limit)
        assert type(num_threads()) is int


def test_a_failed_call_leaves_the_input_alone() -> None:
    K = GOOD.copy()
    K[3] = np.nan
    before = K.copy()
    with pytest.raises(exceptions.NonFiniteError):
        levattn.universal_set(K, 0.1)
    assert np.array_equal(K, before, equal_nan=True)


# -- not errors ---------------------------------------------------------------------------


@stores()
@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 4), (0, 5, 4), (2, 0, 6, 4)])
def test_empty_arrays(storage: str, shape: Any) -> None:
    keys = STORAGE[storage](np.ones(shape))
    scores = levattn.leverage_scores(keys)
    assert as_float64(scores).shape == shape[:-1]
    found = levattn.universal_set(keys, 0.1)
    assert as_bool(found.mask).shape == shape[:-1]
    assert np.all(np.asarray(found.rank) == (0 if shape[-2] == 0 else 1))
    if len(shape) == 2:
        assert len(found) == 0
        assert found.rank == 0
        assert np.asarray(found.indices).shape == (0,)
        assert len(levattn.universal_set(keys, size=0)) == 0
        Q = STORAGE[storage](np.ones((3, 4)))
        heavy = levattn.heavy_attention(Q, keys, 0.1)
        assert heavy.entries.shape == (3, 0)
        assert not np.any(as_float64(heavy.normalizers))
        output, bound = heavy.apply(STORAGE[storage](np.ones((0, 2))), compensate="mean")
        assert as_float64(output).shape == (3, 2)
        assert not np.any(as_float64(output))
        assert not np.any(as_float64(bound))


def test_no_queries() -> None:
    heavy = levattn.heavy_attention(np.ones((0, 3)), GOOD, 0.1)
    assert heavy.entries.shape == (0, 12)
    output, bound = heavy.apply(np.ones((12, 2)))
    assert output.shape == (0, 2)
    assert bound.shape == (0,)


@pytest.mark.parametrize("method", ["auto", "gram", "qr", "svd"])
def test_keys_of_zeros(method: str) -> None:
    K = np.zeros((5, 3))
    assert not np.any(levattn.leverage_scores(K, method=method))
    assert not np.any(levattn.leverage_scores(K, method=method, ridge=0.1))
    found = levattn.universal_set(K, 1e-300, method=method)
    assert len(found) == 0
    assert found.rank == 0
    assert found.size_bound == 0
    heavy = levattn.heavy_attention(np.ones((2, 3)), K, 0.1, universal=found)
    assert heavy.entries.nnz == 0
    assert not np.any(heavy.captured_mass)


def test_a_mask_without_keys() -> None:
    K = np.full((5, 3), np.nan)
    mask = np.zeros(5, bool)
    assert not np.any(levattn.leverage_scores(K, mask=mask))
    assert not np.any(levattn.leverage_scores(K, mask=mask, center=True))
    found = levattn.universal_set(K, 0.1, mask=mask)
    assert len(found) == 0
    assert found.rank == 0
    heavy = levattn.heavy_attention(np.ones((2, 3)), K, 0.1, mask=mask)
    assert heavy.entries.nnz == 0


@pytest.mark.parametrize("method", ["auto", "gram", "qr", "svd"])
def test_one_row(method: str) -> None:
    for row in (GOOD[:1], GOOD[:1] * 1e-200, np.array([[0.0, 1e-300, 0.0]])):
        assert levattn.leverage_scores(row, method=method) == pytest.approx(1, rel=1e-12)
        assert len(levattn.universal_set(row, 1.0, method=method)) == 1
        assert levattn.leverage_scores(row, method=method, center=True) == pytest.approx(0, abs=1e-12)


def test_a_zero_query_has_no_attention() -> None:
    Q = np.vstack([np.zeros(3), GOOD[:1]])
    heavy = levattn.heavy_attention(Q, GOOD, 0.01)
    assert heavy.normalizers[0] == 0
    assert heavy.entries[0].nnz == 0
    assert heavy.captured_mass[0] == 0
    output, bound = heavy.apply(np.ones((12, 2)), compensate="mean")
    assert not np.any(output[0])
    assert bound[0] < 1e-12


def test_a_query_outside_the_row_space() -> None:
    K = GOOD.copy()
    K[:, 2] = 0
    heavy = levattn.heavy_attention(np.array([[0.0, 0.0, 1.0], [1.0, 0.0, 5.0]]), K, 0.01)
    assert heavy.normalizers[0] == 0
    assert heavy.entries[0].nnz == 0
    assert heavy.entries[1].nnz > 0
