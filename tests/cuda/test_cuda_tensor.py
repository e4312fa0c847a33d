"""Moments and squared norms on tensor cores, run on the CPU: what they are made of, their errors, and their bits.

Inside: the kernels of tensor cores are compared with plain ones, in blocks that are made small.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_keys import read, rows_of, stored

import emulator
import levattn
import naive
from emulator import on_host
from levattn._kernels import BLOCK, Rows
from levattn._kernels.cuda_source import text
from levattn._kernels.gram import cuda as gram_cuda
from levattn._kernels.gram import cuda_tensor
from levattn.datasets import minilm, resampled

FORMATS = ("float32", "float16", "bfloat16")
UNIT = 2.0**-24

PRIMITIVES = (
    "".join(text(name) for name in ("keys.cuh", "mma.cuh"))
    + """
template <typename Number>
__global__ void __launch_bounds__(32) multiply(const unsigned short *A, const unsigned short *B, float *C) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    unsigned int a[4], b[2];
    float c[4];
    for (int i = 0; i < 4; ++i) {
        const unsigned short *const at = A + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;
        a[i] = at[0] | (unsigned int)at[1] << 16;
        c[i] = C[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    }
    for (int i = 0; i < 2; ++i) b[i] = B[(2 * t + 8 * i) * 8 + g] | (unsigned int)B[(2 * t + 8 * i + 1) * 8 + g] << 16;
    multiply_add(Number(), c, a, b[0], b[1]);
    for (int i = 0; i < 4; ++i) C[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

__global__ void __launch_bounds__(32) multiply_doubles(const double *A, const double *B, double *C) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    double a[8], b[4], c[4];
    for (int i = 0; i < 8; ++i) a[i] = A[(g + i % 2 * 8) * 16 + t + i / 2 * 4];
    for (int i = 0; i < 4; ++i) b[i] = B[(t + 4 * i) * 8 + g], c[i] = C[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    multiply_add(c, a, b);
    for (int i = 0; i < 4; ++i) C[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

__global__ void __launch_bounds__(32) narrow(const float *in, int n, unsigned int *words, float *out) {
    for (int i = threadIdx.x; i < n; i += 32) {
        words[i] = pack(Half{}, in[i], -in[i]);
        out[i] = half_of(words[i], 0) - half_of(words[i], 1);
    }
}
"""
)


def primitive(name: str, *arguments: Any) -> None:
    names = ("multiply<Half>", "multiply<Bfloat>", "multiply_doubles", "narrow")
    emulator.kernel_of_text(PRIMITIVES, names, name, "primitives.cu")((1,), (32,), arguments)


class TestPrimitives:
    @pytest.mark.parametrize(("number", "format"), [("Half", "float16"), ("Bfloat", "bfloat16")])
    def test_products(self, number: str, format: str) -> None:
        rng = np.random.default_rng(0)
        A, B, C = (rng.integers(-9, 10, shape).astype(np.float64) for shape in ((16, 16), (16, 8), (16, 8)))
        found = C.astype(np.float32)
        primitive(f"multiply<{number}>", stored(A, format), stored(B, format), found)
        assert np.array_equal(found, C + A @ B)

    def test_products_of_doubles(self) -> None:
        rng = np.random.default_rng(0)
        A, B, C = (rng.integers(-(2**20), 2**20, shape).astype(float) for shape in ((16, 16), (16, 8), (16, 8)))
        found = C.copy()
        primitive("multiply_doubles", A, B, found)
        assert np.array_equal(found, C + A @ B)

    @pytest.mark.usefixtures("main_memory")
    def test_sums_are_cut_off(self) -> None:
        """By the emulator as by the coarsest of devices: here fifteen products of 3/8 of a unit each."""
        A, B, C = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8), np.float32)
        A[0, :], B[:, 0] = 3 * 2.0**-13, 2.0**-13
        A[0, 0], B[0, 0] = 1, 1
        primitive("multiply<Half>", stored(A, "float16"), stored(B, "float16"), C)
        assert C[0, 0] == 1
        C[0, 0] = -2
        primitive("multiply<Half>", stored(A, "float16"), stored(B, "float16"), C)
        assert C[0, 0] == -1

    def test_halves(self) -> None:
        """Every half, the middle between each two, and what lies beside it."""
        halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
        middles = (halves[:-1] + halves[1:]) / 2
        X = np.concatenate(
            [halves, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf))]
        )
        X = np.concatenate([X, np.float32([65519.9, 65520, 1e30, np.inf])])
        words, out = np.zeros(X.size, np.uint32), np.zeros(X.size, np.float32)
        primitive("narrow", X, np.int32(X.size), words, out)
        with np.errstate(over="ignore"):
            expected = X.astype(np.float16)
        assert np.array_equal((words & 0xFFFF).astype(np.uint16).view(np.float16), expected)
        assert np.array_equal((words >> 16).astype(np.uint16).view(np.float16), -expected)
        assert np.array_equal(out, 2 * expected.astype(np.float32))
        nan = np.zeros(1, np.uint32)
        primitive("narrow", np.float32([np.nan]), np.int32(1), nan, np.zeros(1, np.float32))
        assert np.isnan(nan.view(np.float16)).all()


def moments_of(rows: Rows) -> Any:
    b, n, _ = rows.shape
    return gram_cuda.moments(rows, np.array([[i, i, 0, n] for i in range(b)]), arithmetic="single")


def squares_of(rows: Rows, W: Any, *, triangular: bool = True, wide: bool = False) -> Any:
    out = rows.zeros(as_float64=wide)
    items = np.arange(rows.shape[0])
    if triangular:
        gram_cuda.sqnorms(rows, items, W, out, arithmetic="single")
    else:
        gram_cuda.projected_sqnorms(rows, items, W, out, "single", np.inf)
    return out


def factors_of(b: int, d: int, width: int | None = None) -> Any:
    W = np.random.default_rng(d).standard_normal((b, d, width or d))
    return W if width else np.triu(W) + np.tril(np.full((d, d), np.nan), -1)  # not to be read


@pytest.mark.parametrize("format", FORMATS)
class TestBits:
    def test_layouts_and_orders(self, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for b, n, d in ((2, 70, 40), (1, 100, 128), (2, 33, 7)):
            W = factors_of(b, d)
            rows = rows_of("plain", b, n, d, format)
            room = np.zeros(rows.keys.size + 1, rows.keys.dtype)
            room[1:] = rows.keys.ravel()
            layouts = [rows, *(rows_of(kind, b, n, d, format) for kind in ("columns", "every other"))]
            layouts += [replace(rows, keys=room[1:].reshape(b, n, d)), replace(rows, scale=np.ones((b, d)))]
            layouts += [replace(rows, weights=np.ones((b, n)))]
            found = []
            for order, layout in zip((0, 1, 7, 3, 1, 2), layouts, strict=True):
                on_host(monkeypatch, order)
                found.append((moments_of(layout), squares_of(layout, W)))
            for layout, (G, s) in zip(layouts, found, strict=True):
                if cuda_tensor._multiplied(layout) == cuda_tensor._multiplied(rows):  # in sums of as many rows
                    assert np.array_equal(G, found[0][0])
                assert np.array_equal(s, found[0][1])

    @pytest.mark.usefixtures("host")
    def test_masked_rows_are_zero(self, format: str) -> None:
        rows, W = rows_of("plain", 2, 90, 24, format), factors_of(2, 24)
        keep = np.random.default_rng(0).random((2, 90)) < 0.6
        zeros = np.where(keep[:, :, None], rows.keys, np.zeros((), rows.keys.dtype))
        masked = rows.keys.copy()
        masked[~keep] = stored(np.array([np.nan]), format)[0]
        masked = replace(rows, keys=masked, mask=keep)
        assert np.array_equal(moments_of(masked), moments_of(replace(rows, keys=zeros)))
        assert np.array_equal(squares_of(masked, W), squares_of(replace(rows, keys=zeros), W))

    @pytest.mark.usefixtures("host")
    def test_batch_mates_and_pieces(self, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gram_cuda, "BLOCK", 64)
        rows, W = rows_of("plain", 3, 200, 16, format), factors_of(3, 16)
        G, s = moments_of(rows), squares_of(rows, W)
        monkeypatch.setattr(cuda_tensor, "_BUSY", 1)
        monkeypatch.setattr(cuda_tensor, "_ROOM", 1 << 15)
        assert np.array_equal(squares_of(rows, W), s)
        for i in range(3):
            one = rows.item(i)
            assert np.array_equal(squares_of(one, W[i : i + 1])[0], s[i])
            parts = gram_cuda.moments(one, np.array([[0, 0, 0, 128], [0, 0, 128, 200]]), arithmetic="single")
            assert np.array_equal(parts[0] + parts[1], G[i])


def test_one_block_is_as_long_as_the_librarys(host: None) -> None:
    rows = rows_of("plain", 1, BLOCK + 40, 4)
    X = read(rows)[0]
    np.testing.assert_allclose(moments_of(rows)[0], X.T @ X, atol=40 * UNIT * len(X))


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
def test_columns_and_rows_of_all_sizes(host: None, format: str) -> None:
    """Beyond the range of halves, which scales make up for."""
    rng = np.random.default_rng(1)
    columns, sizes = np.exp2(rng.integers(-25, 25, 20)), np.exp2(rng.integers(-12, 12, (100, 1)))
    K = stored(rng.standard_normal((1, 100, 20)) * columns * sizes, format)
    rows = Rows(K, format)
    X = read(rows)
    size = np.abs(X[0]).T @ np.abs(X[0])
    assert (np.abs(moments_of(rows)[0] - X[0].T @ X[0]) <= 20 * UNIT * size).all()
    W = np.triu(rng.standard_normal((1, 20, 20))) / columns[:, None]
    error = np.sqrt(np.sum((np.abs(X) @ np.abs(W)) ** 2, axis=2))
    norms = np.sqrt(np.sum((X @ W) ** 2, axis=2))
    assert (np.abs(np.sqrt(squares_of(rows, W, wide=True)) - norms) <= 24 * UNIT * error).all()


def test_what_is_not_finite_shows(host: None) -> None:
    for format in FORMATS:
        for value in (np.nan, np.inf):
            K = np.ones((1, 40, 3))
            K[0, 17, 1] = value
            rows = Rows(stored(K, format), format)
            assert not np.isfinite(moments_of(rows)[0, 1, 1])
            found = squares_of(rows, np.triu(np.ones((1, 3, 3))))[0]
            assert not np.isfinite(found[17])
            assert np.isfinite(np.delete(found, 17)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_heads_of_a_model_are_scored_by_tensor_cores(cupy: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their moments are summed in double precision, and their scores are as precise as is promised of them."""
    launched: list[str] = []
    for module in (gram_cuda, cuda_tensor):
        monkeypatch.setattr(module, "launch", noted(module.launch, launched))
    heads = minilm().keys
    K = np.stack(
        [resampled(heads[layer, head], BLOCK, dtype=dtype, rng=0) for layer, head in ((0, 3), (2, 4), (5, 11))]
    )
    found = cupy.asnumpy(levattn.leverage_scores(cupy.asarray(K)))
    assert set(launched) == {"moment_blocks", "add_blocks", "split_factors", "tensor_squares"}
    for scores, keys in zip(found, K, strict=True):
        np.testing.assert_allclose(scores, naive.leverage_svd(keys), rtol=1e-5)


def noted(launch: Any, names: list[str]) -> Any:
    def noted_launch(source: str, name: str, *rest: Any, **options: Any) -> None:
        names.append(name)
        launch(source, name, *rest, **options)

    return noted_launch


def test_where_tensor_cores_multiply(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(cuda_tensor, "launch", noted(cuda_tensor.launch, launched))
    for format, d, expected in (("float32", 128, True), ("float32", 129, False), ("float64", 4, False)):
        rows = rows_of("plain", 1, 20, d, format)
        launched.clear()
        moments_of(rows)
        squares_of(rows, factors_of(1, d))
        assert launched == (["tensor_moments", "split_factors", "tensor_squares"] if expected else [])
    launched.clear()
    squares_of(rows_of("plain", 1, 20, 100), factors_of(1, 100, 129), triangular=False)
    gram_cuda.moments(rows_of("plain", 1, 20, 8), np.array([[0, 0, 0, 20]]), arithmetic="double")
    assert not launched
