"""Random sketches on a CUDA device, run on the CPU, against the words, the CPU's kernels, and matrices written out.

Keys of small integers have exact sums: they tell what must not matter. Keys of real numbers tell in which order rows
are added up.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import emulator
from emulator.device import library_on_device
from levattn._core import random as _core_random
from levattn._core.arrays import to_float64
from levattn._core.random import below, normals, signs, words
from levattn._kernels import Rows
from levattn._kernels.cuda_source import text
from levattn._kernels.sketch import cpu as sketch_cpu
from levattn._kernels.sketch import cuda as sketch_cuda
from levattn._kernels.sketch import definition
from levattn._kernels.sketch.cuda import scatter
from levattn.exceptions import NonFiniteError
from levattn.sketch import OSNAP, SRHT, CountSketch, Distribution, GaussianJL, SignJL, Sketch, SketchedRows
from strategies import Float, examples

FORMATS = ("float64", "float32", "float16", "bfloat16")
ORDERS = (0, 1, 5)  # in which threads and blocks take turns
SEED = 2**64 - 5
FAR = 2**40 + 3  # a number of a row: its group of four has a number of more than 32 bits
STREAM = 1

# What decides how the work is cut up, and all values that cut up small keys in many ways
CUTS: dict[str, dict[str, int]] = {
    "as it is": {},
    "parts": {"_SHORTEST": 1},
    "many parts": {"_SHORTEST": 1, "_NEAR": 64},
    "digits": {"_DIGIT": 3},
    "digits of parts": {"_DIGIT": 1, "_SHORTEST": 2},
    "runs of rows": {"_ORDERED": 64, "_NUMBERED": 64},
}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.on_host(monkeypatch)


def in_orders(function: Callable[[], Any]) -> Any:
    """What a function returns, which has the same bits in every order."""
    results = []
    for seed in ORDERS:
        emulator.order = seed
        results.append(function())
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    return results[0]


def cut(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    for name, value in CUTS[how].items():
        monkeypatch.setattr(sketch_cuda, name, value)


def stored(X: Float, format: str) -> Any:
    """Keys in a format, 16-bit floats as words."""
    if format == "bfloat16":
        return (X.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    X = X.astype(format)
    return X.view(np.uint16) if format == "float16" else X


def laid_out(K: Any, layout: str) -> Any:
    """The same keys in another layout."""
    if layout == "columns":
        return np.ascontiguousarray(K.transpose(2, 0, 1)).transpose(1, 2, 0)
    if layout == "every other":
        return np.repeat(np.repeat(K, 2, axis=1), 2, axis=2)[:, ::2, ::2]
    if layout == "backwards":
        return np.ascontiguousarray(K[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]
    if layout == "padded":
        wider = np.zeros((*K.shape[:2], K.shape[2] + 16), K.dtype)
        wider[:, :, 8:-8] = K
        return wider[:, :, 8:-8]
    return K


LAYOUTS = ("plain", "columns", "every other", "backwards", "padded")


def integers(b: int, n: int, d: int, format: str = "float32", layout: str = "plain") -> Rows:
    K = np.random.default_rng([b, n, d]).integers(-9, 10, (b, n, d)).astype(np.float64)
    return Rows(laid_out(stored(K, format), layout), format)


def reals(b: int, n: int, d: int, format: str = "float32", layout: str = "plain") -> Rows:
    K = np.random.default_rng([b, n, d]).standard_normal((b, n, d))
    return Rows(laid_out(stored(K, format), layout), format)


def transformed(rows: Rows, *, whole: bool = True) -> Rows:
    """Rows with all that is done to them on the way in, by integers if `whole`; what is masked is NaN."""
    b, n, d = rows.shape
    rng = np.random.default_rng(n)
    mask = rng.random((b, n)) < 0.6
    keys = rows.keys.copy()
    keys[~mask] = stored(np.full(1, np.nan), rows.format)[0]
    shift, scale, weights = (
        rng.integers(-3, 4, (b, d)),
        np.exp2(rng.integers(0, 3, (b, d))),
        rng.integers(0, 4, (b, n)),
    )
    if not whole:
        shift, weights = rng.standard_normal((b, d)), rng.random((b, n))
    return Rows(keys, rows.format, mask, shift.astype(np.float64), scale, weights.astype(np.float64))


def read(rows: Rows) -> Float:
    """The rows as kernels read them."""
    X = to_float64(rows.keys, rows.format)
    if rows.shift is not None and rows.scale is not None and rows.weights is not None:
        X = (X - rows.shift[:, None]) * rows.scale[:, None] * rows.weights[:, :, None]
    return X if rows.mask is None else np.where(rows.mask[:, :, None], X, 0.0)


def sparse_matrix(seed: int, offset: int, n: int, blocks: int, size: int) -> Float:
    """The unscaled matrix of a sparse sketch."""
    drawn = words(seed, STREAM, offset, n, blocks)
    S = np.zeros((blocks, size, n))
    for block in range(blocks):
        S[block, below(drawn[:, block], size), np.arange(n)] = signs(drawn[:, block])
    return S.reshape(blocks * size, n)


def sketched(function: Callable[..., None], rows: Rows, size: int, *args: Any, dtype: Any = np.float64) -> Any:
    """What a function adds to zeros."""
    out = np.zeros((rows.shape[0], size, rows.shape[2]), dtype)
    function(rows, *args, out)
    return out


# -- what is drawn -----------------------------------------------------------------------------


def test_constants_are_those_of_the_generator() -> None:
    code = text("philox.cuh")
    for name in ("MULTIPLIERS", "INCREMENTS"):
        (figures,) = re.findall(rf"#define PHILOX_{name} (.*)", code)
        assert tuple(int(figure, 16) for figure in figures.split(", ")) == getattr(_core_random, name)
    assert re.findall(r"#define PHILOX_ROUNDS (\d+)", code) == [str(_core_random.ROUNDS)]


def test_constants_are_those_of_the_source() -> None:
    code = text("sketch.cu")
    for name in ("THREADS", "TILE", "GROUP", "SIDE", "FLIPS"):
        (figure,) = re.findall(rf"constexpr int {name} = (\d+)", code) or re.findall(rf"\b{name} = (\d+)", code)
        assert int(figure) == getattr(sketch_cuda, f"_{name}"), name
    assert sketch_cuda._WARPS * 32 == sketch_cuda._THREADS


DRAW = """
__global__ void __launch_bounds__(256)
    draw(unsigned long long seed, unsigned int stream, long long group, unsigned int column, unsigned int size,
         unsigned int *drawn, unsigned int *places, double *numbers) {
    const Words words = draw_words(seed, stream, group, column);
    for (int j = 0; j < PHILOX_GROUP; ++j) {
        drawn[j] = words.of[j];
        places[j] = below(words.of[j], size);
        numbers[j] = with_sign(words.of[j], 1.0);
    }
}
"""


@examples(200)
@given(
    seed=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
    group=st.integers(0, 2**60) | st.integers(2**30, 2**34),
    column=st.integers(0, 40),
    size=st.integers(1, 2**31 - 1) | st.integers(1, 100),
)
def test_words_are_those_of_the_generator(seed: int, stream: int, group: int, column: int, size: int) -> None:
    kernel = emulator.compiled(text("philox.cuh") + DRAW, ("draw",))["draw"]
    drawn, places, numbers = np.zeros(4, np.uint32), np.zeros(4, np.uint32), np.zeros(4)
    which = np.uint64(seed), np.uint32(stream), np.int64(group), np.uint32(column), np.uint32(size)
    kernel((1,), (1,), (*which, drawn, places, numbers))
    expected = words(seed, stream, 4 * group, 4, column + 1)[:, column]
    assert np.array_equal(drawn, expected)
    assert np.array_equal(places, below(expected, size))
    assert np.array_equal(numbers, signs(expected))


# -- sparse sketches -----------------------------------------------------------------------------

SHAPES = [  # b, n, d, blocks, size
    (1, 1, 1, 1, 1),
    (1, 100, 64, 1, 7),
    (2, 333, 5, 1, 5000),  # more places than rows, and two digits
    (3, 70, 65, 3, 4),
    (1, 40, 300, 5, 9),
    (70, 9, 3, 2, 3),
    (1, 4200, 2, 1, 1),  # two tiles
    (1, 4500, 3, 1, 4096),  # as many places as fit into one digit
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_have_the_sums_of_the_cpu(shape: tuple[int, ...]) -> None:
    b, n, d, blocks, size = shape
    args = SEED, STREAM, FAR, blocks, size
    expected = sparse_matrix(SEED, FAR, n, blocks, size) @ read(integers(b, n, d))
    for format in FORMATS:
        for dtype in (np.float64, np.float32):
            rows = integers(b, n, d, format)
            found = in_orders(partial(sketched, scatter, rows, blocks * size, *args, dtype=dtype))
            assert found.dtype == dtype
            assert np.array_equal(found, expected)
    assert np.array_equal(sketched(sketch_cpu.scatter, integers(b, n, d), blocks * size, *args), expected)
    assert np.array_equal(sketched(definition.scatter, integers(b, n, d), blocks * size, *args), expected)


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("shape", [(2, 700, 9, 1, 60), (1, 300, 20, 3, 9), (1, 4200, 1, 2, 2)], ids=str)
def test_how_work_is_cut_up_changes_no_sum_of_integers(
    how: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    b, n, d, blocks, size = shape
    cut(monkeypatch, how)
    rows = integers(b, n, d)
    found = in_orders(partial(sketched, scatter, rows, blocks * size, SEED, STREAM, 5, blocks, size))
    assert np.array_equal(found, sparse_matrix(SEED, 5, n, blocks, size) @ read(rows))


@examples(60)
@given(
    n=st.integers(1, 200) | st.integers(1, 3 * sketch_cuda._TILE),
    blocks=st.integers(1, 4),
    size=st.integers(1, 12) | st.integers(1, 9000),
    parts=st.integers(1, 5),
    digit=st.sampled_from([1, 4, 12]),
    offset=st.sampled_from([0, 1, FAR]),
)
def test_rows_are_put_in_order(n: int, blocks: int, size: int, parts: int, digit: int, offset: int) -> None:
    """By part, block and place, and those of one place as they were."""
    n, span = n // blocks + 1, -(-(n // blocks + 1) // parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sketch_cuda, "_DIGIT", digit)
        ordered, starts, step = sketch_cuda._order(n, SEED, STREAM, offset, blocks, size, span)
    drawn = words(SEED, STREAM, offset, n, blocks)
    expected, counts = [], []
    for first in range(0, n, span):
        part = drawn[first : first + span]
        for block in range(blocks):
            order = np.argsort(below(part[:, block], size), kind="stable")
            expected.append(2 * (first + order) + (part[order, block] & 1))
            counts.append(np.bincount(below(part[:, block], size), minlength=size))
    assert np.array_equal(ordered, np.concatenate(expected))
    assert np.array_equal(np.diff(starts[::step]), np.concatenate(counts))
    assert starts[0] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_matter(layout: str) -> None:
    for b, n, d in ((2, 90, 16), (1, 200, 65), (3, 50, 1)):
        for format in FORMATS:
            rows = integers(b, n, d, format, layout)
            found = sketched(scatter, rows, 12, SEED, STREAM, FAR, 2, 6)
            assert np.array_equal(found, sparse_matrix(SEED, FAR, n, 2, 6) @ read(integers(b, n, d)))


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_done_to_rows_on_the_way_in(format: str) -> None:
    for b, n, d in ((2, 150, 16), (1, 33, 5)):
        rows = transformed(integers(b, n, d, format))
        expected = sparse_matrix(SEED, 3, n, 1, 10) @ read(rows)
        for dtype in (np.float64, np.float32):
            assert np.array_equal(sketched(scatter, rows, 10, SEED, STREAM, 3, 1, 10, dtype=dtype), expected)
        only_masked = Rows(rows.keys, format, rows.mask)
        expected = sparse_matrix(SEED, 3, n, 1, 10) @ read(only_masked)
        assert np.array_equal(sketched(scatter, only_masked, 10, SEED, STREAM, 3, 1, 10), expected)
        rows = transformed(reals(b, n, d, format), whole=False)
        expected = sparse_matrix(SEED, 3, n, 1, 10) @ read(rows)
        np.testing.assert_allclose(sketched(scatter, rows, 10, SEED, STREAM, 3, 1, 10), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (0, 0, 1)], ids=str)
def test_nothing_is_added_where_there_is_nothing(shape: tuple[int, int, int]) -> None:
    rows = Rows(np.zeros(shape, np.float32), "float32")
    out = np.full((shape[0], 6, shape[2]), 7.0)
    scatter(rows, SEED, STREAM, 0, 2, 3, out)
    assert np.all(out == 7)


@examples(15)
@given(edges=st.lists(st.integers(0, 300), max_size=4), start=st.sampled_from([0, 3, FAR]))
def test_chunks_add_up(edges: list[int], start: int) -> None:
    rows = integers(2, 300, 6)
    cuts = [0, *sorted(edges), 300]
    out = np.zeros((2, 20, 6))
    for low, high in pairwise(cuts):
        scatter(rows.between(low, high), SEED, STREAM, start + low, 4, 5, out)
    assert np.array_equal(out, sparse_matrix(SEED, start, 300, 4, 5) @ read(rows))


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_real_keys_have_the_same_bits_in_any_order_layout_and_batch(
    how: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, how)
    for dtype, error in ((np.float64, 2.0**-53), (np.float32, 2.0**-24)):
        rows = reals(3, 400, 24, format)
        args = 21, SEED, STREAM, FAR, 3, 7
        found = in_orders(partial(sketched, scatter, rows, *args, dtype=dtype))
        S = sparse_matrix(SEED, FAR, 400, 3, 7)
        assert np.all(np.abs(found - S @ read(rows)) <= 400 * error * (np.abs(S) @ np.abs(read(rows))))
        for layout in LAYOUTS:
            other = Rows(laid_out(rows.keys, layout), format)
            assert np.array_equal(sketched(scatter, other, *args, dtype=dtype), found)
        alone = sketched(scatter, rows.item(1), *args, dtype=dtype)
        assert np.array_equal(alone[0], found[1])


# -- dense sketches ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 130, 66, 70), (1, 1500, 3, 5), (0, 4, 2, 3), (1, 0, 2, 3)], ids=str
)
@pytest.mark.parametrize("format", FORMATS)
def test_products(shape: tuple[int, ...], format: str) -> None:
    b, n, d, size = shape
    S = np.random.default_rng(n).integers(-5, 6, (size, n)).astype(np.float64)
    for layout in ("plain", "columns"):
        rows = integers(b, n, d, format, layout)
        found = in_orders(partial(sketched, sketch_cuda.add_products, rows, size, S))
        assert np.array_equal(found, S @ read(rows))
        assert np.array_equal(sketched(sketch_cuda.add_products, rows, size, S, dtype=np.float32), found)
    rows = transformed(reals(b, n, d, format), whole=False)
    expected = S @ read(rows)
    np.testing.assert_allclose(sketched(sketch_cuda.add_products, rows, size, S), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("drawn", [1 << 25, 500])
@pytest.mark.parametrize("offset", [0, 5, FAR])
def test_dense_sketches(drawn: int, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_cuda, "_DRAWN", drawn)
    for b, n, d, size in ((2, 333, 5, 67), (1, 70, 65, 1), (1, 1, 1, 32), (1, 0, 3, 4)):
        rows = integers(b, n, d)
        drawn_signs = SignJL(size).columns(SEED, offset, n)
        drawn_normals = normals(SEED, 2, offset, n, size).T
        for dtype, tolerance in ((np.float64, 1e-11), (np.float32, 1e-2)):
            sketch = partial(sketched, sketch_cuda.dense_sketch, rows, size, dtype=dtype)
            found = in_orders(partial(sketch, SEED, 3, offset, False))
            assert np.array_equal(found, drawn_signs @ read(rows))
            found = sketch(SEED, 2, offset, True)
            np.testing.assert_allclose(found, drawn_normals @ read(rows), rtol=0, atol=tolerance)


def test_products_have_the_same_bits_in_any_order_layout_and_batch() -> None:
    rows = reals(3, 1300, 6)
    args = 9, SEED, 2, 7, True
    found = in_orders(partial(sketched, sketch_cuda.dense_sketch, rows, *args))
    for layout in LAYOUTS:
        assert np.array_equal(
            sketched(sketch_cuda.dense_sketch, Rows(laid_out(rows.keys, layout), "float32"), *args), found
        )
    assert np.array_equal(sketched(sketch_cuda.dense_sketch, rows.item(2), *args)[0], found[2])


# -- Hadamard transforms --------------------------------------------------------------------------


@pytest.mark.parametrize("fewest", [10, 3, 2])
@pytest.mark.parametrize(
    ("distribution", "shape", "offset"),
    [
        (SRHT(4, block=4), (1, 1, 1), 3),
        (SRHT(5, block=8), (2, 100, 3), FAR),
        (SRHT(7, block=16), (70, 20, 2), 0),
        (SRHT(13, block=512), (1, 1200, 17), 1022),
        (SRHT(9, block=256), (2, 40, 33), 255),
        (SRHT(1100, block=2048), (1, 50, 2), 5),  # more rows than signs are drawn at a time
    ],
    ids=str,
)
def test_hadamard_transforms_of_integers_are_exact(
    fewest: int, distribution: SRHT, shape: tuple[int, int, int], offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sketch_cuda, "_FEWEST", fewest)
    monkeypatch.setattr(sketch_cuda, "_TRANSFORMED", 1 << (16 if fewest == 10 else fewest + 5))
    size, block = distribution.size, distribution.block
    args = SEED, (4, 6), offset, block, distribution._chosen(SEED)
    for format, dtype in zip(FORMATS, (np.float64, np.float32, np.float64, np.float32), strict=True):
        for layout in ("plain", "columns"):
            rows = integers(*shape, format, layout)
            found = sketched(sketch_cuda.subsampled_hadamard, rows, size, *args, dtype=dtype)
            assert np.array_equal(found, distribution.columns(SEED, offset, shape[1]) @ read(rows))
    rows = transformed(integers(*shape))
    found = in_orders(partial(sketched, sketch_cuda.subsampled_hadamard, rows, size, *args))
    assert np.array_equal(found, distribution.columns(SEED, offset, shape[1]) @ read(rows))


def test_hadamard_transforms_have_the_same_bits_in_any_order_layout_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    distribution = SRHT(3, block=16)
    rows = reals(3, 900, 6)
    args = 3, SEED, (4, 6), 7, 16, distribution._chosen(SEED)
    found = in_orders(partial(sketched, sketch_cuda.subsampled_hadamard, rows, *args))
    np.testing.assert_allclose(found, distribution.columns(SEED, 7, 900) @ read(rows), rtol=0, atol=1e-11)
    for layout in LAYOUTS:
        other = Rows(laid_out(rows.keys, layout), "float32")
        assert np.array_equal(sketched(sketch_cuda.subsampled_hadamard, other, *args), found)
    assert np.array_equal(sketched(sketch_cuda.subsampled_hadamard, rows.item(2), *args)[0], found[2])
    out = np.ones((3, 3, 0))
    sketch_cuda.subsampled_hadamard(Rows(np.zeros((3, 0, 6)), "float64"), *args[1:], out)


# -- through the public names, on arrays that never become numpy's by themselves ------------------------------


@pytest.fixture
def xp(monkeypatch: pytest.MonkeyPatch) -> Any:
    return library_on_device(monkeypatch)


FAMILIES: list[Distribution] = [CountSketch(20), OSNAP(24), GaussianJL(11), SignJL(40), SRHT(20)]


def whole_numbers(n: int, d: int) -> NDArray[np.float32]:
    return np.random.default_rng(n).integers(-9, 10, (n, d)).astype(np.float32)


@pytest.mark.parametrize("distribution", FAMILIES, ids=str)
def test_sketches_stay_on_the_device(distribution: Distribution, xp: Any) -> None:
    K = whole_numbers(300, 5)
    sketch = Sketch(distribution, SEED)
    found = sketch.apply(xp.asarray(K), row_start=3)
    assert type(found) is type(xp.zeros(1))
    assert np.allclose(found.get(), sketch.apply(K, row_start=3), rtol=0, atol=1e-11)

    state = SketchedRows(sketch, 5).update(K[:100])
    assert isinstance(state.read(), np.ndarray)
    state.update(xp.asarray(K[100:200])).update(K[200:])
    other = SketchedRows(sketch, 5).update(xp.asarray(K[100:])[:100], row_start=100)
    merged = SketchedRows(sketch, 5).update(K[:100]).merge(other).update(xp.asarray(K[200:]), row_start=200)
    for found in (state, merged, SketchedRows.from_bytes(state.to_bytes()).merge(SketchedRows(sketch, 5))):
        values = found.read()
        values = values if isinstance(values, np.ndarray) else values.get()
        assert np.allclose(values, sketch.apply(K), rtol=0, atol=1e-11)
    assert type(state.read()) is type(merged.read()) is type(xp.zeros(1))
    assert SketchedRows.from_bytes(merged.to_bytes()).count == 300


def test_rows_on_the_device_that_are_not_finite(xp: Any) -> None:
    K = whole_numbers(60, 3)
    state = SketchedRows(Sketch(CountSketch(7)), 3).update(xp.asarray(K))
    K[[7, 31], 1] = np.nan
    with pytest.raises(NonFiniteError, match=r"first in rows \[7, 31\]"):
        state.update(xp.asarray(K))
    assert state.count == 60
