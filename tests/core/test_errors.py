"""Bad input: a typed error that names the argument, what came, and what to do.

Empty matrices, one row, zero rows and rank 0 are no errors: they have defined results.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import levattn
import strategies
from levattn import attention, exceptions
from levattn.sketch import OSNAP, SignJL, Sketch
from levattn.states import Moments
from strategies import STORAGE, as_bool, as_float64, stores

needs_torch = pytest.mark.skipif(not strategies.HAS_TORCH, reason="no torch")
GOOD = np.random.default_rng(0).standard_normal((12, 3))
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "leverage_scores": levattn.leverage_scores,
    "universal_set": lambda K, **options: levattn.universal_set(K, 0.1, **options),
    "heavy_attention": lambda K, **options: levattn.heavy_attention(np.ones((2, 3)), K, 0.1, **options),
}

METHODS = ("auto", "gram", "qr", "svd")


def fails(call: Callable[[], Any], error: type[Exception], *words: str) -> None:
    """The call raises an error whose message has all words, whatever their case, and is a sentence with a remedy."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert re.search(word, message, re.IGNORECASE), f"{word!r} is not in: {message}"
    assert len(message) > 25
    assert len(message.splitlines()) <= 12


# -- keys and masks, in every function that takes them ------------------------------------


def spoilt(value: float) -> Any:
    K = GOOD.copy()
    K[[4, 7], 1] = value
    return K


def ones(dtype: Any) -> Any:
    return np.ones((4, 3)).astype(np.int64).astype(dtype)


def wrong_keys() -> Iterator[Any]:
    """Name, keys, error, and words of the message."""
    for value in (np.nan, np.inf, -np.inf):
        words = (r"\b4\b", r"\b7\b", "mask|remove|clean|replace")
        yield str(value), spoilt(value), exceptions.NonFiniteError, *words
    for shape in ((), (5,)):
        yield f"shape {shape}", np.ones(shape), ValueError, r"\bn, ?d\b", re.escape(str(shape))
    for dtype in (np.int64, np.int8, np.uint16, np.bool_):
        yield np.dtype(dtype).name, ones(dtype), TypeError, np.dtype(dtype).name, "float", "real"
    for dtype in (np.complex64, np.complex128, object, "U3", "M8[s]"):
        yield f"of {dtype}", ones(dtype), TypeError, "float"
    for value in (None, "keys.npy", 3.0, {"K": 1}):
        yield repr(value), value, TypeError, "array", type(value).__name__
    yield "uneven", [[1.0, 2.0], [3.0]], ValueError, "list", "equal length", "pad"
    uneven = [np.ones((4, 3)), np.ones((5, 3))]
    yield "uneven chunks", uneven, ValueError, "list", "give universal_set a function that returns an iterator"
    yield "no columns", np.ones((4, 0)), ValueError, r"\bd\b|column"


def test_keys_in_files_and_on_workers_name_the_function_that_takes_them(tmp_path: Path) -> None:
    np.save(tmp_path / "keys.npy", GOOD)
    source = levattn.open_keys(tmp_path / "keys.npy")
    for call in (
        lambda: levattn.online_leverage_scores(source),
        lambda: levattn.heavy_attention(GOOD, source, 0.1),
    ):
        fails(call, TypeError, "KeySource", r"K\.load\(\)", r"levattn\.leverage_scores\(K\)")
    array = pytest.importorskip("dask.array").from_array(GOOD)
    fails(lambda: levattn.leverage_scores(array), TypeError, r"levattn\.distributed\.dask\.leverage_scores")


def wrong_masks() -> Iterator[Any]:
    for shape in ((11,), (12, 1), (1, 12), (12, 3), ()):
        yield f"shape {shape}", np.ones(shape, bool), ValueError, re.escape(str(shape)), r"\(12,\)"
    for dtype in (np.int64, np.float64, object):
        yield f"of {dtype}", np.ones(12, dtype), TypeError, "bool"
    yield "uneven", [[True], [True, False]], ValueError, "list", "equal length", "pad"


def table(rows: Iterator[Any]) -> pytest.MarkDecorator:
    """Parameters `given`, the error and the words, of rows that begin with their names."""
    found = [pytest.param(given, error, words, id=name) for name, given, error, *words in rows]
    return pytest.mark.parametrize(("given", "error", "words"), found)


@pytest.mark.crossed
@pytest.mark.parametrize("function", FUNCTIONS)
@table(wrong_keys())
def test_wrong_keys(function: str, given: Any, error: Any, words: list[str]) -> None:
    fails(lambda: FUNCTIONS[function](given), error, r"\bK\b", *words)


@pytest.mark.crossed
@pytest.mark.parametrize("function", FUNCTIONS)
@table(wrong_masks())
def test_wrong_masks(function: str, given: Any, error: Any, words: list[str]) -> None:
    fails(lambda: FUNCTIONS[function](GOOD, mask=given), error, r"\bmask\b", *words)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("row", [0, 1, 2999])
def test_every_method_finds_a_single_number_that_is_not_finite(row: int, value: float, method: str) -> None:
    K = np.random.default_rng(0).standard_normal((3000, 4))
    K[row, 2] = value
    fails(lambda: levattn.leverage_scores(K, method=method), exceptions.NonFiniteError, rf"\b{row}\b")


@stores()
def test_non_finite_keys_in_every_storage_type(storage: str) -> None:
    K = GOOD.copy()
    K[5, 0] = np.nan
    stored = STORAGE[storage](K)
    fails(lambda: levattn.leverage_scores(stored), exceptions.NonFiniteError, r"\bK\b", r"\b5\b")


def test_errors_are_of_the_library_and_of_values() -> None:
    assert {exceptions.LevattnError, ValueError} <= set(exceptions.NonFiniteError.__mro__)


def test_many_non_finite_rows_are_not_all_listed() -> None:
    K = np.full((100_000, 3), np.nan)
    with pytest.raises(exceptions.NonFiniteError, match=r"\b0\b.*\b1\b") as caught:
        levattn.leverage_scores(K)
    assert len(str(caught.value)) < 600


def test_non_finite_rows_of_a_head() -> None:
    K = np.zeros((2, 3, 6, 4))
    K[1, 2, 5, 0] = np.inf
    fails(lambda: levattn.leverage_scores(K), exceptions.NonFiniteError, r"\bK\b", r"1, ?2, ?5|row 5")


def test_finite_keys_whose_squares_overflow_are_not_refused() -> None:
    assert np.all(np.isfinite(levattn.leverage_scores(GOOD * 1e300)))
    assert np.all(np.isfinite(levattn.leverage_scores((GOOD * 1e38).astype(np.float32))))


def test_masked_arrays_and_sparse_matrices_are_not_densified_silently() -> None:
    import scipy.sparse

    fails(lambda: levattn.leverage_scores(scipy.sparse.csc_matrix(GOOD)), TypeError, r"\bK\b")
    fails(lambda: levattn.leverage_scores(np.ma.masked_array(GOOD, GOOD > 1)), TypeError, r"\bK\b", "mask")


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
    flags = STORAGE[storage](GOOD) > 0
    fails(lambda: levattn.leverage_scores(flags), TypeError, r"\bK\b", "bool", "float", remedy)


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
        fails(lambda given=tensor: levattn.leverage_scores(given), TypeError, r"\bK\b", *words)
    for mask, words in (
        ((K[:, 0] > 0).to_sparse(), ("sparse_coo", r"mask\.to_dense\(\)")),
        (K[:, 0].bfloat16().requires_grad_(), ("bfloat16", "bool")),
    ):
        fails(lambda given=mask: levattn.leverage_scores(GOOD, mask=given), TypeError, r"\bmask\b", *words)


@needs_torch
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.filterwarnings("ignore")  # prototypes of torch warn
def test_odd_tensors_are_refused_with_the_way_out(function: str) -> None:
    import torch
    from torch.masked import masked_tensor

    from levattn.attention import pruned_attention

    K = torch.from_numpy(GOOD)
    masked = masked_tensor(K, K > 0)
    for tensor, words in (
        (torch.nested.nested_tensor([K, K[:5]]), ("nested", "to_padded_tensor", "mask=")),
        (K.to_sparse_csr(), ("sparse_csr", r"K\.to_dense\(\)")),
        (torch.eye(4).to_sparse_bsr((2, 2)), ("sparse_bsr", r"K\.to_dense\(\)")),
        (torch.quantize_per_tensor(K.float(), 0.1, 0, torch.qint8), ("qint8", r"K\.dequantize\(\)")),
        (K.to(torch.complex64), ("complex64", r"K\.real")),
        (masked, ("MaskedTensor", r"K\.get_data\(\)", "mask=")),
    ):
        fails(lambda given=tensor: FUNCTIONS[function](given), TypeError, r"\bK\b", *words)
    fails(lambda: FUNCTIONS[function](GOOD, mask=masked > 0), TypeError, "mask is a MaskedTensor", "get_data")
    fails(lambda: pruned_attention(masked, K, K, 3), TypeError, "Q is a MaskedTensor", "get_data")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_odd_arrays_are_refused_with_the_way_out(function: str) -> None:
    call = FUNCTIONS[function]
    columns = [(name, float) for name in "abc"]
    table = np.zeros(12, columns)
    unstructured = r"numpy\.lib\.recfunctions\.structured_to_unstructured\(K\)"
    for given in (table, table.view(np.recarray)):
        fails(lambda given=given: call(given), TypeError, r"\bK\b", unstructured)
    flags = np.ma.masked_array(np.ones(12, bool), np.arange(12) < 3)
    fails(lambda: call(GOOD, mask=flags), TypeError, "mask is a masked array", r"mask\.filled\(False\)")
    plain, again = call(GOOD), call(GOOD.view(np.matrix))  # which is an array
    for name in ("scores", "normalizers"):
        np.testing.assert_array_equal(getattr(again, name, 0), getattr(plain, name, 0))


def test_the_remedy_for_tables_makes_numbers() -> None:
    pandas = pytest.importorskip("pandas")
    plain = pandas.DataFrame(GOOD)
    nullable = plain.astype("Float64")
    for table in (plain, nullable, nullable.mask(plain > 0)):
        fails(lambda given=table: levattn.leverage_scores(given), TypeError, r"K\.to_numpy\('float64', na_value=")
        found = table.to_numpy("float64", na_value=np.nan)
        known = ~np.isnan(found).any(axis=1)
        assert levattn.leverage_scores(found, mask=known).shape == (12,)


@pytest.mark.parametrize("dtype", ["float16", "longdouble", "int64", "complex128"])
def test_sparse_keys_of_other_formats(dtype: str) -> None:
    import scipy.sparse

    K = scipy.sparse.csr_array(GOOD)
    K.data = K.data.astype(dtype)
    for call in (levattn.leverage_scores, lambda given: levattn.universal_set(given, 0.1)):
        remedy = r"K\.real" if dtype == "complex128" else r"K\.astype\('float(32|64)'\)"
        fails(lambda call=call: call(K), TypeError, r"\bK\b", "float64", "float32", remedy)


# -- other arguments ----------------------------------------------------------------------


def nan_row() -> Any:
    Q = np.ones((9, 3))
    Q[6, 2] = np.nan
    return Q


def attend(Q: Any, K: Any = GOOD, epsilon: Any = 0.1, **options: Any) -> Any:
    return levattn.heavy_attention(Q, K, epsilon, **options)


def choose(*arguments: Any, **options: Any) -> Any:
    return levattn.universal_set(GOOD, *arguments, **options)


def set_of(K: Any) -> Any:
    return levattn.universal_set(np.array(K), 0.1)


def apply(V: Any, **options: Any) -> Any:
    return attend(GOOD).apply(V, **options)


def wrong_arguments() -> Iterator[Any]:
    """Name, call, errors, and words of the message."""
    either = (TypeError, ValueError)
    remedy = r"numpy\.array\(K, 'float64'\)"
    yield "integers", partial(levattn.leverage_scores, [[1, 2], [3, 4]]), TypeError, r"\bK\b", "int64", remedy
    several = partial(attend, np.ones((3, 5, 3)), np.ones((2, 12, 3)))
    yield "heads that do not go together", several, ValueError, r"\bQ\b", r"\bK\b", r"\(3,\)", r"\(2,\)", "multiple"
    yield "one query", partial(attend, np.ones(3)), ValueError, r"\bQ\b"
    yield "another width", partial(attend, np.ones((2, 5))), ValueError, r"\bQ\b", r"\bK\b", r"\b5\b", r"\b3\b"
    yield "non-finite queries", partial(attend, nan_row()), exceptions.NonFiniteError, r"\bQ\b", r"\b6\b"
    for dtype in (np.int64, np.complex128, object):
        yield f"queries of {np.dtype(dtype)}", partial(attend, np.ones((2, 3), dtype)), TypeError, r"\bQ\b"
    for value in (0.0, -0.1, 1.0000001, 2.0, np.nan, np.inf):
        words = ("epsilon", r"\(0, 1\]|0 < epsilon <= 1", re.escape(str(value)))
        yield f"set of {value}", partial(choose, value), ValueError, *words
        yield f"attention of {value}", partial(attend, GOOD, GOOD, value), ValueError, *words
    for value in ("0.1", [0.1], 1j, np.array([0.1, 0.2]), True):
        yield f"epsilon {value!r}", partial(choose, value), TypeError, "epsilon"
    for value in (-1, 13, 10**9):
        words = ("size", r"\[0, 12\]|0 <= size <= 12", re.escape(str(value)))
        yield f"size {value}", partial(choose, size=value), ValueError, *words
    for value in (2.5, 3.0, "3", True, None):
        yield f"size {value!r} of another type", partial(choose, size=value), either, "size"
    yield "epsilon and size", partial(choose, 0.1, size=3), ValueError, "epsilon", "size", "both|one of|exactly one"
    yield "neither", choose, ValueError, "epsilon", "size", "neither|one of|exactly one"
    for name in ("leverage_scores", "universal_set"):
        unknown = partial(FUNCTIONS[name], GOOD, method="cholesky")
        yield f"{name} by no method", unknown, ValueError, "method", "cholesky", "auto", "gram", r"\bqr\b", "svd"
        yield f"{name} by None", partial(FUNCTIONS[name], GOOD, method=None), either, "method"
    for value in (-1e-3, np.nan, np.inf):
        for name in ("ridge", "relative_ridge"):
            for function in (levattn.leverage_scores, levattn.effective_dimension):
                call = partial(function, GOOD, **{name: value})
                yield f"{name} {value} of {function.__name__}", call, ValueError, rf"^{name} is", re.escape(str(value))
    both = partial(levattn.leverage_scores, GOOD, ridge=1, relative_ridge=2)
    yield "two ridges", both, ValueError, "ridge and relative_ridge are 1 and 2", "one of them"
    for value in (-1e-3, np.nan, 1.5, 0.0, 1e-17):
        yield f"rtol {value}", partial(levattn.leverage_scores, GOOD, rtol=value), ValueError, "rtol"
    for method in (SignJL(20), (OSNAP(20), 8), Sketch(OSNAP(20))):
        call = partial(levattn.leverage_scores, GOOD, method=method)
        yield f"scores by {method}", call, ValueError, "method", "OSNAP", re.escape(repr(method))
    for f in (-1, 0, np.nan, "softmax", None, True):
        yield f"f {f!r}", partial(choose, 0.1, f=f), (*either, NotImplementedError), r"\bf\b"
    yield "values of another length", partial(apply, np.ones((11, 2))), ValueError, r"\bV\b", r"\b11\b", r"\b12\b"
    yield "values without columns", partial(apply, np.ones(12)), ValueError, r"\bV\b"
    yield "non-finite values", partial(apply, np.full((12, 2), np.nan)), exceptions.NonFiniteError, r"\bV\b"
    yield "complex values", partial(apply, np.ones((12, 2), complex)), TypeError, r"\bV\b"
    median = partial(apply, np.ones((12, 2)), compensate="median")
    yield "compensation", median, ValueError, "compensate", "mean", "None"
    yield "a mask for a set", partial(attend, GOOD, universal=np.ones(12, bool)), TypeError, "universal"
    yield "other keys", lambda: attend(GOOD, universal=set_of(GOOD[:7])), ValueError, "universal", r"\b7\b", r"\b12\b"
    yield "a set of a batch", lambda: attend(GOOD, universal=set_of([GOOD, GOOD])), ValueError, "universal"
    yield "indices of a batch", lambda: set_of([GOOD, GOOD]).indices, ValueError, "indices", r"universal\[head\]"
    yield "length of a batch", lambda: len(set_of([GOOD, GOOD])), either, "sizes"


@table(wrong_arguments())
def test_wrong_arguments(given: Callable[[], Any], error: Any, words: list[str]) -> None:
    fails(given, error, *words)


def test_options_are_keyword_only() -> None:
    for call in (
        lambda: levattn.leverage_scores(GOOD, "gram"),
        lambda: levattn.universal_set(GOOD, 0.1, 3),
        lambda: levattn.leverage_scores(K=GOOD),
    ):
        fails(call, TypeError)


@pytest.mark.parametrize("epsilon", [np.float32(0.5), np.float64(0.5), 1])
def test_numbers_of_other_types_are_numbers(epsilon: Any) -> None:
    assert choose(epsilon).epsilon == float(epsilon)
    assert len(choose(size=np.int64(3))) == 3


def test_a_size_beyond_the_unmasked_keys_takes_them_all() -> None:
    mask = np.arange(12) < 5
    found = choose(size=6, mask=mask)
    assert np.array_equal(found.mask, mask)
    assert found.epsilon == 0


@pytest.mark.parametrize("limit", [0, -1, np.int64(0), 1.5, 2.0, "2", True, np.True_, None])
def test_thread_limit_out_of_range(limit: Any) -> None:
    whole = isinstance(limit, int | np.integer) and not isinstance(limit, bool)
    expected, text = (ValueError, "expected at least 1") if whole else (TypeError, "a whole number of threads")
    shown = str(limit) if whole else repr(limit)
    with pytest.raises(expected, match=f"n is {re.escape(shown)}; .*{text}"), levattn.thread_limit(limit):
        pass


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_wrong_number_of_threads_is_an_error_of_the_first_call(value: str) -> None:
    code = "import numpy, levattn; levattn.leverage_scores(numpy.eye(3))"
    environment = os.environ | {"LEVATTN_NUM_THREADS": value}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert f"ValueError: LEVATTN_NUM_THREADS is {value!r}; expected a whole number" in done.stderr


def test_a_failed_call_leaves_the_input_alone() -> None:
    K = GOOD.copy()
    K[3] = np.nan
    before = K.copy()
    fails(lambda: levattn.universal_set(K, 0.1), exceptions.NonFiniteError)
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


def test_flags_and_labels_of_no_keys_may_be_an_empty_list() -> None:
    """Its dtype is float64 to NumPy."""
    keys = np.ones((0, 3))
    for mask in ([], ()):
        assert len(levattn.universal_set(keys, 0.1, mask=mask)) == 0
        assert levattn.StreamingUniversalSet(0.1).update(keys, mask=mask).n == 0
        assert attention.tssa(keys[None], mask=mask).shape == (1, 0, 3)
    assert levattn.universal_set(np.ones((2, 0, 3)), 0.1, mask=[[], []]).rank.tolist() == [0, 0]
    assert len(levattn.group_leverage(keys, [])) == 0
    fails(lambda: levattn.universal_set(keys, 0.1, mask=np.zeros(0)), TypeError, "mask", "float64", "bool")


def test_no_queries() -> None:
    heavy = levattn.heavy_attention(np.ones((0, 3)), GOOD, 0.1)
    assert heavy.entries.shape == (0, 12)
    output, bound = heavy.apply(np.ones((12, 2)))
    assert output.shape == (0, 2)
    assert bound.shape == (0,)


@pytest.mark.parametrize("method", METHODS)
def test_keys_of_zeros(method: str) -> None:
    K = np.zeros((5, 3))
    assert not np.any(levattn.leverage_scores(K, method=method))
    assert not np.any(levattn.leverage_scores(K, method=method, relative_ridge=0.1))
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


def test_a_zero_query_has_no_attention() -> None:
    Q = np.vstack([np.zeros(3), GOOD[:1]])
    heavy = levattn.heavy_attention(Q, GOOD, 0.01)
    assert heavy.normalizers[0] == 0
    assert heavy.entries[0].nnz == 0
    assert heavy.captured_mass[0] == 0
    output, bound = heavy.apply(np.ones((12, 2)), compensate="mean")
    assert not np.any(output[0])
    assert bound[0] < 1e-12


# -- flags ------------------------------------------------------------------------------------------------------------

X = np.ones((4, 2))
FLAGGED: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "latte": (partial(attention.latte, X, X, X), ("causal", "return_state")),
    "macchiato": (partial(attention.macchiato, X, X, X, (X, X, X[:, 0]), 2), ("return_state",)),
    "rg_lru": (partial(attention.rg_lru, X, X, X, X[0]), ("return_state",)),
    "causal_conv": (partial(attention.causal_conv, X, X[:2]), ("return_state",)),
    "rotate_values": (partial(attention.rotate_values, X, np.arange(4)), ("inverse",)),
    "tssa": (partial(attention.tssa, X[None], 1.0), ("causal", "return_state")),
    "memberships": (partial(attention.memberships, X[None]), ("causal",)),
    "pruned_attention": (partial(attention.pruned_attention, X, X, X, 2), ("return_certificate",)),
    "causal_pruned_attention": (
        partial(attention.causal_pruned_attention, X, X, X, 2),
        ("return_state", "return_certificate"),
    ),
    "Selection.slots": (partial(attention.Selection(8).slots, 100), ("causal",)),
    "Moments": (partial(Moments, 2), ("diagonal",)),
    "leverage_scores": (partial(levattn.leverage_scores, X), ("center",)),
    "universal_set": (partial(levattn.universal_set, X, 0.5), ("center",)),
    "universal_set of chunks": (partial(levattn.universal_set, lambda: iter([X]), 0.5), ("center",)),
    "sketched_scores": (partial(levattn.sketched_scores, X), ("center",)),
    "coherence": (partial(levattn.coherence, X), ("center",)),
    "effective_dimension": (partial(levattn.effective_dimension, X), ("center",)),
}


@pytest.mark.parametrize("name", FLAGGED)
def test_a_flag_is_true_or_false(name: str) -> None:
    call, flags = FLAGGED[name]
    for flag in flags:
        for wrong in ("False", 0, None, np.array([True, False])):
            with pytest.raises(TypeError, match=f"^{flag} is .*; expected True or False"):
                call(**{flag: wrong})
        call(**{flag: np.bool_(False)})
