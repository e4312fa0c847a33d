"""Random sketches on a CUDA device, run on the CPU, against the words, the CPU's kernels, and matrices written out.

Keys of small integers have exact sums: they tell what must not matter. Keys of real numbers tell in which order rows
are added up.

Inside: kernels are compared with the random words they take, in tiles that are made small.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cuda_keys import FORMATS, LAYOUTS, laid_out, read, rows_of
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from emulator import in_orders
from levattn._core.random import below, normals, signs, words
from levattn._kernels import Rows
from levattn._kernels.cuda_source import THREADS, text
from levattn._kernels.sketch import cuda as sketch_cuda
from levattn.exceptions import NonFiniteError
from levattn.sketch import OSNAP, SRHT, CountSketch, Distribution, GaussianJL, SignJL, Sketch, SketchedRows
from strategies import Float, as_float64, examples

SEED = 2**64 - 5
FAR = 2**40 + 3  # a number of a row: its group of four has a number of more than 32 bits
STREAM = 1

pytestmark = pytest.mark.usefixtures("host")
integers = partial(rows_of, integers=True)


def cut(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    for name, value in CUTS[how].items():
        monkeypatch.setattr(sketch_cuda, name, value)


def sparse_matrix(seed: int, offset: int, n: int, blocks: int, size: int) -> Float:
    """The unscaled matrix of a sparse sketch."""
    drawn = words(seed, STREAM, offset, n, blocks)
    S = np.zeros((blocks, size, n))
    for block in range(blocks):
        S[block, below(drawn[:, block], size), np.arange(n)] = signs(drawn[:, block])
    return S.reshape(blocks * size, n)


# -- constants -----------------------------------------------------------------------------


def test_constants_are_those_of_the_source() -> None:
    code = text("sketch.cu")
    for name in ("THREADS", "TILE", "GROUP", "SIDE", "FLIPS"):
        (figure,) = re.findall(rf"constexpr int {name} = (\d+)", code) or re.findall(rf"\b{name} = (\d+)", code)
        assert int(figure) == (THREADS if name == "THREADS" else getattr(sketch_cuda, f"_{name}")), name


# -- all sketches --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A sketch of a size: what adds it to an array, and the matrix (size, n) that it multiplies n rows with."""

    size: int
    add: Callable[..., None]
    matrix: Callable[[int], Float]
    error: float = 0.0  # of entries of the matrix, which are integers elsewhere

    def of(self, rows: Rows, dtype: Any = np.float64) -> Any:
        out = np.zeros((rows.shape[0], self.size, rows.shape[2]), dtype)
        self.add(rows, out)
        return out


def sparse(blocks: int, size: int, offset: int = FAR) -> Case:
    def add(rows: Rows, out: Any) -> None:
        sketch_cuda.scatter(rows, SEED, STREAM, offset, blocks, size, out)

    return Case(blocks * size, add, lambda n: sparse_matrix(SEED, offset, n, blocks, size))


def dense(size: int, offset: int, *, normal: bool) -> Case:
    def add(rows: Rows, out: Any) -> None:
        sketch_cuda.dense_sketch(rows, SEED, 2 if normal else 3, offset, normal, out)

    if normal:
        return Case(size, add, lambda n: normals(SEED, 2, offset, n, size).T, 1e-13)
    return Case(size, add, lambda n: SignJL(size).columns(SEED, offset, n))


def product(size: int) -> Case:
    def matrix(n: int) -> Float:
        return np.random.default_rng(n).integers(-5, 6, (size, n)).astype(np.float64)

    return Case(size, lambda rows, out: sketch_cuda.add_products(rows, matrix(rows.shape[1]), out), matrix)


def hadamard(size: int, block: int, offset: int) -> Case:
    distribution = SRHT(size, block=block)

    def add(rows: Rows, out: Any) -> None:
        sketch_cuda.subsampled_hadamard(rows, SEED, (4, 6), offset, block, distribution._chosen(SEED), out)

    return Case(size, add, lambda n: distribution.columns(SEED, offset, n))


# What decides how the work is cut up, and values that cut up small keys in many ways
CUTS: dict[str, dict[str, int]] = {
    "as it is": {},
    "parts": {"_SHORTEST": 1},
    "many parts": {"_SHORTEST": 1, "_NEAR": 64},
    "digits": {"_DIGIT": 3},
    "digits of parts": {"_DIGIT": 1, "_SHORTEST": 2},
    "runs of rows": {"_ORDERED": 64, "_NUMBERED": 64},
    "few drawn": {"_DRAWN": 500},
    "blocks of 8": {"_FEWEST": 3, "_TRANSFORMED": 1 << 8},
    "blocks of 4": {"_FEWEST": 2, "_TRANSFORMED": 1 << 7},
}
SPARSE_CUTS = ("as it is", "parts", "many parts", "digits", "digits of parts", "runs of rows")
DENSE_CUTS = ("as it is", "few drawn")
HADAMARD_CUTS = ("as it is", "blocks of 8", "blocks of 4")

SHAPES: list[tuple[Case, tuple[int, int, int], tuple[str, ...]]] = [
    (sparse(1, 1), (1, 1, 1), ("as it is",)),
    (sparse(1, 7), (1, 100, 64), ("as it is",)),
    (sparse(1, 5000), (2, 333, 5), ("as it is",)),  # more places than rows, and two digits
    (sparse(3, 4), (3, 70, 65), ("as it is",)),
    (sparse(5, 9), (1, 40, 300), ("as it is",)),
    (sparse(2, 3), (70, 9, 3), ("as it is",)),
    (sparse(1, 1), (1, 4200, 2), ("as it is",)),  # two tiles
    (sparse(1, 4096), (1, 4500, 3), ("as it is",)),  # as many places as fit into one digit
    (sparse(1, 60, 5), (2, 700, 9), SPARSE_CUTS),
    (sparse(3, 9, 5), (1, 300, 20), SPARSE_CUTS),
    (sparse(2, 2, 5), (1, 4200, 1), SPARSE_CUTS),
    (product(1), (1, 1, 1), ("as it is",)),
    (product(70), (2, 130, 66), ("as it is",)),
    (product(5), (1, 1500, 3), ("as it is",)),
    *(
        (dense(67, offset, normal=normal), (2, 333, 5), DENSE_CUTS)
        for normal in (False, True)
        for offset in (0, 5, FAR)
    ),
    *((dense(1, 5, normal=normal), (1, 70, 65), DENSE_CUTS) for normal in (False, True)),
    *((dense(32, FAR, normal=normal), (1, 1, 1), DENSE_CUTS) for normal in (False, True)),
    (hadamard(4, 4, 3), (1, 1, 1), HADAMARD_CUTS),
    (hadamard(5, 8, FAR), (2, 100, 3), HADAMARD_CUTS),
    (hadamard(7, 16, 0), (70, 20, 2), HADAMARD_CUTS),
    (hadamard(13, 512, 1022), (1, 1200, 17), HADAMARD_CUTS),
    (hadamard(9, 256, 255), (2, 40, 33), HADAMARD_CUTS),
    (hadamard(1100, 2048, 5), (1, 50, 2), HADAMARD_CUTS),  # more rows than signs are drawn at a time
]
ITEMS = [
    pytest.param(*each, cut, id=f"{each[0].add.__qualname__.partition('.')[0]} {each[0].size} {each[1]} {cut}")
    for *each, cuts in SHAPES
    for cut in cuts
]


@pytest.mark.parametrize(("case", "shape", "how"), ITEMS)
def test_sums_are_those_of_the_matrix_in_any_format_layout_and_order(
    case: Case, shape: tuple[int, int, int], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers have exact sums, and are the same however the work is cut up."""
    cut(monkeypatch, how)
    S, exact = case.matrix(shape[1]), read(integers("plain", *shape))
    found = in_orders(case.of, integers("plain", *shape))
    np.testing.assert_allclose(found, S @ exact, rtol=0, atol=case.error * 9 * shape[1])
    if how != "as it is":
        return
    for k, format in enumerate(FORMATS):
        for dtype in (np.float64, np.float32):
            other = case.of(integers(LAYOUTS[k], *shape, format), dtype)
            assert other.dtype == dtype
            np.testing.assert_allclose(other, found, rtol=0, atol=1e-2 if case.error and dtype == np.float32 else 0)
    for whole, error in ((True, 0), (False, 1e-9)):
        rows = rows_of("transformed", *shape, integers=whole)
        np.testing.assert_allclose(case.of(rows), S @ read(rows), rtol=0, atol=error + 1e-9 * (case.error > 0))
        masked = Rows(rows.keys, rows.format, rows.mask)
        np.testing.assert_allclose(case.of(masked), S @ read(masked), rtol=0, atol=error + 1e-9 * (case.error > 0))


REAL = [
    *((sparse(3, 7), 400, 24, how) for how in SPARSE_CUTS),
    (dense(9, 7, normal=True), 1300, 6, "as it is"),
    (hadamard(3, 16, 7), 900, 6, "as it is"),
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("case", "n", "d", "how"), REAL, ids=[f"{each[0].size} {each[3]}" for each in REAL])
def test_real_keys_have_the_same_bits_in_any_order_layout_and_batch(
    case: Case, n: int, d: int, how: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, how)
    rows, S = rows_of("plain", 3, n, d, format), case.matrix(n)
    for dtype, error in ((np.float64, 2.0**-53), (np.float32, 2.0**-24)):
        found = in_orders(case.of, rows, dtype)
        assert np.all(np.abs(found - S @ read(rows)) <= n * error * (np.abs(S) @ np.abs(read(rows))))
        for layout in LAYOUTS:
            assert np.array_equal(case.of(Rows(laid_out(rows.keys, layout), format), dtype), found)
        assert np.array_equal(case.of(rows.item(1), dtype)[0], found[1])


@pytest.mark.parametrize(
    "case", [sparse(2, 3), product(6), dense(6, 0, normal=True), dense(6, 5, normal=False), hadamard(6, 16, 3)]
)
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (0, 0, 1)], ids=str)
def test_nothing_is_added_where_there_is_nothing(case: Case, shape: tuple[int, int, int]) -> None:
    out = np.full((shape[0], 6, shape[2]), 7.0)
    case.add(Rows(np.zeros(shape, np.float32), "float32"), out)
    assert np.all(out == 7)


# -- the order of rows ---------------------------------------------------------------------------


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


@examples(15)
@given(edges=st.lists(st.integers(0, 300), max_size=4), start=st.sampled_from([0, 3, FAR]))
def test_chunks_add_up(edges: list[int], start: int) -> None:
    rows = integers("plain", 2, 300, 6)
    out = np.zeros((2, 20, 6))
    for low, high in pairwise([0, *sorted(edges), 300]):
        sketch_cuda.scatter(rows.between(low, high), SEED, STREAM, start + low, 4, 5, out)
    assert np.array_equal(out, sparse(4, 5, start).of(rows))


# -- through the public names, on arrays that never become numpy's by themselves ------------------------------


FAMILIES: list[Distribution] = [CountSketch(20), OSNAP(24), GaussianJL(11), SignJL(40), SRHT(20)]


def whole_numbers(n: int, d: int) -> NDArray[np.float32]:
    return np.random.default_rng(n).integers(-9, 10, (n, d)).astype(np.float32)


@pytest.mark.parametrize("distribution", FAMILIES, ids=str)
def test_states_take_rows_from_anywhere_and_stay_on_the_device(distribution: Distribution, cupy: Any) -> None:
    K = whole_numbers(300, 5)
    sketch = Sketch(distribution, SEED)
    state = SketchedRows(sketch, 5).update(K[:100])
    assert isinstance(state.result(), np.ndarray)
    state.update(cupy.asarray(K[100:200])).update(K[200:])
    other = SketchedRows(sketch, 5).update(cupy.asarray(K[100:])[:100], row_start=100)
    merged = SketchedRows(sketch, 5).update(K[:100]).merge(other).update(cupy.asarray(K[200:]), row_start=200)
    for found in (state, merged, SketchedRows.from_bytes(state.to_bytes()).merge(SketchedRows(sketch, 5))):
        np.testing.assert_allclose(as_float64(found.result()), sketch.apply(K), rtol=0, atol=1e-11)
    assert type(state.result()) is type(merged.result()) is type(cupy.zeros(1))
    assert SketchedRows.from_bytes(merged.to_bytes()).count == 300


def test_rows_on_the_device_that_are_not_finite(cupy: Any) -> None:
    K = whole_numbers(60, 3)
    state = SketchedRows(Sketch(CountSketch(7)), 3).update(cupy.asarray(K))
    K[[7, 31], 1] = np.nan
    with pytest.raises(NonFiniteError, match=r"first in rows \[67, 91\]"):
        state.update(cupy.asarray(K))
    assert state.count == 60
