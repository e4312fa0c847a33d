"""Heavy attention on a CUDA device, run on the CPU, against its definitions.

Inside: kernels are compared with those of main memory.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import levattn
import naive
from emulator import in_orders
from levattn._kernels.heavy import cpu as heavy_cpu
from levattn._kernels.heavy import cuda as heavy_cuda
from strategies import as_float64, examples, integer_keys

pytestmark = pytest.mark.usefixtures("host")


# -- normalizers -----------------------------------------------------------------------


@pytest.mark.parametrize("m", [0, 1, 63, 64, 65, 130])
@pytest.mark.parametrize("d", [1, 7, 16, 65])
def test_normalizers_are_squared_norms(m: int, d: int) -> None:
    rng = np.random.default_rng([m, d])
    Q, N = rng.standard_normal((m, d)), rng.standard_normal((d + 13, d))
    squares, bounds = in_orders(heavy_cuda.query_norms, Q, N)
    np.testing.assert_allclose(squares, np.sum((Q @ N.T) ** 2, axis=1), rtol=1e-12)
    np.testing.assert_allclose(bounds, np.sum((np.abs(Q) @ np.abs(N).T) ** 2, axis=1), rtol=1e-13)
    Q, N = np.rint(3 * Q), np.rint(3 * N)  # whose sums are exact
    squares, bounds = heavy_cuda.query_norms(Q, N)
    np.testing.assert_array_equal(squares, np.sum((Q @ N.T) ** 2, axis=1))
    np.testing.assert_array_equal(bounds, np.sum((np.abs(Q) @ np.abs(N).T) ** 2, axis=1))


# -- entries ---------------------------------------------------------------------------


def matrix(found: Any, n: int) -> Any:
    """The entries of a sparse matrix as a dense one, 0 where there is none; columns ascend in each row."""
    starts, columns, scores, _ = found
    assert starts[0] == 0
    assert starts[-1] == len(columns) == len(scores)
    out = np.zeros((len(starts) - 1, n))
    for row, (low, high) in enumerate(pairwise(starts)):
        assert np.all(np.diff(columns[low:high]) > 0)
        out[row, columns[low:high]] = scores[low:high]
    return out


@examples(40)
@given(K=integer_keys(min_rows=1, max_rows=140), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_entries_are_those_of_the_full_attention(K: Any, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    m = data.draw(st.sampled_from([0, 1, 5, 64, 70]))
    Q = rng.integers(-3, 4, (m, K.shape[1])).astype(np.float64)
    epsilon = data.draw(st.sampled_from([1.0, 0.5, 0.1, 0.02, 1e-6]))
    indices = np.flatnonzero(rng.random(len(K)) < data.draw(st.sampled_from([0.0, 0.3, 1.0])))
    A = naive.attention(Q, K)
    D = np.sum((Q @ K.T) ** 2, axis=1)  # whole numbers, so that both are exact
    found = in_orders(heavy_cuda.heavy_entries, Q, K[indices], indices, D, epsilon * (1 - 1e-12))
    part = np.zeros(A.shape)
    part[:, indices] = A[:, indices]
    np.testing.assert_allclose(matrix(found, len(K)), np.where(part >= epsilon * (1 - 1e-12), part, 0), rtol=1e-12)
    np.testing.assert_allclose(found[3], part.sum(axis=1), rtol=1e-12)


@pytest.mark.parametrize("u", [63, 64, 65, 2047, 2048, 2049, 5000])
def test_entries_of_chunks_of_keys_are_in_one_order(u: int) -> None:
    rng = np.random.default_rng(u)
    keys, Q = rng.standard_normal((u, 3)), rng.standard_normal((5, 3))
    keys *= np.clip(np.abs(rng.standard_cauchy((u, 1))), 0.1, 50)
    D = np.sum((Q @ keys.T) ** 2, axis=1)
    D[2] = 0
    indices = np.sort(rng.choice(10 * u, u, replace=False))
    found = in_orders(heavy_cuda.heavy_entries, Q, keys, indices, D, 1e-4)
    expected = heavy_cpu.heavy_entries(Q, keys, indices, D, 1e-4)
    assert found[0][-1] > 10
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-9)
    np.testing.assert_allclose(found[3], expected[3], rtol=1e-12)


def test_no_bit_depends_on_the_other_queries() -> None:
    rng = np.random.default_rng(3)
    keys, Q = rng.standard_normal((2100, 5)), rng.standard_normal((100, 5))
    D, indices = np.sum((Q @ keys.T) ** 2, axis=1), np.arange(2100)
    starts, columns, scores, mass = heavy_cuda.heavy_entries(Q, keys, indices, D, 1e-3)
    for i in (0, 63, 99):
        one = heavy_cuda.heavy_entries(Q[i : i + 1], keys, indices, D[i : i + 1], 1e-3)
        part = slice(starts[i], starts[i + 1])
        np.testing.assert_array_equal(one[1], columns[part])
        np.testing.assert_array_equal(one[2], scores[part])
        assert one[3][0] == mass[i]


# -- attention on the device -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["ill-conditioned", "deficient", "large", "float16"])
def test_heavy_attention_is_exact(kind: str, cupy: Any) -> None:
    """Of keys that take more than the product of two matrices; others are in the contract table."""
    rng = np.random.default_rng(5)
    K, Q, V = (rng.standard_normal(shape) for shape in ((300, 5), (70, 5), (300, 3)))
    if kind == "ill-conditioned":  # the witnesses take more than float64
        K = K * np.geomspace(1, 1e-9, 5) @ np.linalg.qr(rng.standard_normal((5, 5)))[0]
        Q = np.vstack([Q, levattn.universal_set(K, 0.5).factor.witness(K[:60])])
    if kind == "deficient":  # the last query's normalizer is a sum over the keys
        K[:, 4] = K[:, 0]
        K[[7, 9], 4] += 1e-9, 2e-9
        Q = np.vstack([Q, [[1.0, 0, 0, 0, -1]]])
    if kind == "large":
        K, Q = K * 1e160, Q * np.geomspace(1e-200, 1e200, 70)[:, None]
    if kind == "float16":
        K, Q = K.astype(np.float16), Q.astype(np.float16)
    found = levattn.heavy_attention(cupy.asarray(Q), cupy.asarray(K), 0.02)
    expected = levattn.heavy_attention(Q, K, 0.02)
    np.testing.assert_array_equal(found.entries.indptr, expected.entries.indptr)
    np.testing.assert_array_equal(found.entries.indices, expected.entries.indices)
    np.testing.assert_allclose(found.entries.data, expected.entries.data, rtol=2e-9)
    for name in ("normalizers", "captured_mass"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=2e-9)
    np.testing.assert_allclose(found.residual_mass, expected.residual_mass, atol=2e-9)
    # a bound holds the root of the largest score left, raised by four times the error that its factor states
    stated = 1e-6 + 2 * found.universal.factor.score_error.max()
    for compensate in (None, "mean"):
        other, other_bound = expected.apply(V, compensate=compensate)
        for result in (found, expected):
            for values in (V, cupy.asarray(V)):  # where the values are does not have to be where the keys are
                output, bound = result.apply(values, compensate=compensate)
                assert type(output) is type(values)
                np.testing.assert_allclose(as_float64(output), other, rtol=1e-8, atol=1e-9)
                np.testing.assert_allclose(bound, other_bound, rtol=stated, atol=1e-8)


def test_queries_in_main_memory_and_keys_on_the_device(cupy: Any) -> None:
    rng = np.random.default_rng(6)
    K, Q = rng.standard_normal((200, 4)), rng.standard_normal((20, 4))
    expected = levattn.heavy_attention(Q, K, 0.05).entries.toarray()
    for queries, keys in ((Q, cupy.asarray(K)), (cupy.asarray(Q), K)):
        found = levattn.heavy_attention(queries, keys, 0.05).entries.toarray()
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_queries_that_are_not_finite_are_refused(cupy: Any) -> None:
    K = np.eye(3)
    with pytest.raises(levattn.NonFiniteError, match=r"\[1\]"):
        levattn.heavy_attention(cupy.asarray(np.array([[1.0, 1, 1], [np.nan, 0, 0]])), cupy.asarray(K), 0.5)
    assert levattn.heavy_attention(cupy.asarray(K[:0]), cupy.asarray(K), 0.5).entries.shape == (0, 3)
