"""The CUDA kernels of moments, products and scans, run on the CPU, against their definitions.

Inside: kernels are compared with those of main memory, in blocks that are made small.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from cuda_keys import FORMATS, read, rows_of

import emulator
from emulator import on_host
from levattn._core.arrays import to_float64
from levattn._kernels import BLOCK, Rows, cuda_source
from levattn._kernels.factor import cpu as factor_cpu
from levattn._kernels.factor import cuda as factor_cuda
from levattn._kernels.gram import cpu as gram_cpu
from levattn._kernels.gram import cuda as gram_cuda
from levattn._kernels.gram.cuda_tensor import has_tensor_products
from levattn._kernels.rows import cuda as rows_cuda
from levattn.linalg.accumulator import pieces_of
from levattn.linalg.centered import centered

# Of threads and blocks: as they are numbered and at random; the thorough tests have another one at random
ORDERS = 0, 1, 7


@pytest.fixture(
    params=[pytest.param(order, marks=pytest.mark.thorough if order == 7 else ()) for order in ORDERS],
    ids="order{}".format,
)
def device(monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    on_host(monkeypatch, request.param)


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram_cuda, "BLOCK", 16)


KINDS = ("plain", "columns", "every other", "transformed")
SHAPES = (
    *((1, 1, 1), (2, 70, 3), (1, 200, 64), (2, 33, 65), (1, 50, 130), (1, 40, 257), (2, 0, 5)),
    # Tiles of tensor cores
    *((2, 31, 2), (1, 100, 8), (1, 65, 20), (1, 70, 31), (1, 64, 33), (3, 63, 36), (2, 129, 64), (1, 97, 96)),
    *((1, 32, 100), (1, 35, 127), (2, 257, 128)),
)
UNITS = {"double": 2.0**-53, "single": 2.0**-24}


def each_kind(few: int) -> list[Any]:
    """The first shapes with each kind of keys, and the others with plain ones, in each order.

    What reads other kinds of keys takes no part in what threads do together: one order will do, the one at random.
    """
    return [
        pytest.param(
            order, kind, shape, marks=() if order == 1 or (order, kind) == (0, "plain") else pytest.mark.thorough
        )
        for k, shape in enumerate(SHAPES)
        for kind in (KINDS if k < few else KINDS[:1])
        for order in ORDERS
    ]


@pytest.mark.parametrize(("device", "kind", "shape"), each_kind(7), ids=str, indirect=["device"])
def test_moments(device: None, kind: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    b, n, d = shape
    middle = n // 32 * 16
    pieces = np.array([[0, b - 1, 0, middle], [1, 0, middle, n], [0, b - 1, middle, middle], [0, 0, 0, n]])
    for format in FORMATS:
        rows = rows_of(kind, b, n, d, format)
        X = read(rows)
        for arithmetic, unit in UNITS.items():
            found = gram_cuda.moments(rows, pieces, arithmetic=arithmetic)
            # A sum of 32 loses up to a unit and a half for each 8 products, one added to others half a unit; in
            # double precision 64 products are summed one after the other
            most = 16 + n / 32 if has_tensor_products(rows) else 64
            for G, (_, item, start, stop) in zip(found, pieces, strict=True):
                part = X[item, start:stop]
                assert (np.abs(G - part.T @ part) <= most * unit * (np.abs(part).T @ np.abs(part))).all()
                assert np.array_equal(G, G.T)


@pytest.mark.parametrize(("device", "kind", "shape"), each_kind(7), ids=str, indirect=["device"])
def test_squared_norms(device: None, kind: str, shape: tuple[int, int, int]) -> None:
    b, n, d = shape
    W = np.triu(np.random.default_rng(2).standard_normal((b, d, d)))
    lower = W + np.tril(np.full((d, d), np.nan), -1)  # not to be read
    items = np.arange(b)[::-1]
    for format in FORMATS:
        rows = rows_of(kind, b, n, d, format)
        X = read(rows)[items]
        bound = np.linalg.norm(np.abs(X) @ np.abs(W), axis=2)
        for arithmetic, unit in UNITS.items():
            for out in (rows.zeros(), rows.zeros(as_float64=True)):
                gram_cuda.sqnorms(rows, items, lower, out, arithmetic=arithmetic)
                stored_unit = max(unit, np.finfo(out.dtype).eps)
                assert (np.abs(np.sqrt(out[items]) - np.linalg.norm(X @ W, axis=2)) <= 24 * stored_unit * bound).all()
                gram_cuda.sqnorms(rows, items, lower, out, arithmetic=arithmetic, ceiling=0.5)
                assert out.max(initial=0) <= 0.5


def in_order(terms: Any) -> Any:
    """The sum of terms, combined like the bits of a binary counter and then from the lowest level upward."""
    levels: dict[int, Any] = {}
    for term in terms:
        level = 0
        while level in levels:
            term = levels.pop(level) + term
            level += 1
        levels[level] = term
    total = None
    for level in sorted(levels):
        total = levels[level] if total is None else levels[level] + total
    return 0.0 if total is None else total


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("d", [1, 7, 70, 600])
def test_how_uneven_directions_are(d: int) -> None:
    K = np.random.default_rng(d).standard_normal((3, 40, d)) * np.geomspace(1, 1e-3, d)
    K[1, :, d // 2] = 0
    K[2, 5, 0] = np.nan
    found = gram_cuda.measured_unevenness(Rows(K, "float64"))
    assert np.isnan(found[2])
    for keys, figure in zip(K[:2], found, strict=False):
        C = keys / np.maximum(np.sqrt((keys**2).sum(axis=0)), 1e-300)
        np.testing.assert_allclose(figure, (np.square(C.T @ C)).sum() / d - d / 40, rtol=1e-12 * d, atol=1e-12 * d)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("d", [1, 3, 23])
def test_blocks_are_added_up_in_one_order(d: int) -> None:
    counts = (0, 1, 2, 3, 5, 8, 511, 512, 513, 1000) if d < 4 else (9, 0, 130)
    firsts = np.concatenate([[0], np.cumsum(counts)])
    rng = np.random.default_rng(d)
    partial = rng.standard_normal((firsts[-1], d, d)) * np.exp2(rng.integers(-20, 20, (firsts[-1], 1, 1)))
    partial[:, np.tri(d, d, -1) > 0] = np.nan  # not to be read
    for longest in (max(counts), 1 << 20, 1):  # by as many threads as that needs
        out = np.full((len(counts), d, d), np.nan)
        gram_cuda._add_blocks(partial, firsts, longest, out)
        for G, low, high in zip(out, firsts[:-1], firsts[1:], strict=True):
            expected = np.triu(in_order(partial[low:high]) + np.zeros((d, d)))
            assert np.array_equal(np.triu(G), expected)
            assert np.array_equal(G, G.T)


@pytest.mark.usefixtures("host")
def test_copies_of_a_row_are_summed_as_precisely_as_promised() -> None:
    """Their errors have one sign: the products of a whole block, added up one by one, lose more than 96 units."""
    candidates = np.random.default_rng(0).integers(2**25, 2**26, 500).astype(np.float64)  # whose squares are exact
    serial = np.zeros(500)
    for _ in range(BLOCK):
        serial += candidates**2
    errors = np.abs(serial / BLOCK / candidates**2 - 1)
    worst = np.argsort(errors)[-4:]
    assert (errors[worst] > 96 * 2.0**-53).all()
    K = np.broadcast_to(candidates[worst], (1, BLOCK, 4))
    G = gram_cuda.moments(Rows(K, "float64"), np.array([[0, 0, 0, BLOCK]]))[0]
    assert (np.abs(np.diagonal(G) / BLOCK / candidates[worst] ** 2 - 1) <= 96 * 2.0**-53).all()


@pytest.mark.parametrize("d", [20, 70])
def test_double_precision_has_the_bits_of_the_plain_array(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any layout and format, order of threads, batch and run."""
    n = 150
    plain = rows_of("plain", 2, n, d)
    layouts = [plain, rows_of("columns", 2, n, d), rows_of("every other", 2, n, d)]
    layouts += [Rows(plain.keys.astype(np.float64), "float64"), replace(plain, mask=np.ones((2, n), np.bool_))]
    layouts += [replace(plain, weights=np.ones((2, n))), replace(plain, shift=np.zeros((2, 3, d)))]
    W = np.triu(np.random.default_rng(0).standard_normal((2, d, d)))
    pieces = np.array([[0, 0, 0, n], [1, 1, 0, n]])
    found = []
    for order, rows in enumerate(layouts):
        on_host(monkeypatch, order)
        small_blocks(monkeypatch)
        s = rows.zeros(as_float64=True)
        gram_cuda.sqnorms(rows, np.arange(2), W, s)
        found.append((gram_cuda.moments(rows, pieces), s))
        for part, other in zip(found[-1], found[0], strict=True):
            assert np.array_equal(part, other)
    G, s = found[0]
    alone = plain.item(1)
    parts = gram_cuda.moments(alone, np.array([[0, 0, 0, 128], [0, 0, 128, n]]))
    assert np.array_equal(parts[0] + parts[1], G[1])
    assert np.array_equal(gram_cuda.moments(alone, np.array([[0, 0, 0, n]]))[0], G[1])
    one = alone.zeros(as_float64=True)
    gram_cuda.sqnorms(alone, np.zeros(1, np.int64), W[1:], one)
    assert np.array_equal(one[0], s[1])


@pytest.mark.parametrize(("d", "runs"), [(256, 1), (1024, 1), (1500, 3)])
@pytest.mark.parametrize("arithmetic", UNITS)
def test_wide_keys_take_few_launches(d: int, runs: int, arithmetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels of the library alone: a product of CuPy's of float32 would obey CUPY_TF32, which drops 13 bits."""

    class Recorder(emulator.Host):
        def __getattr__(self, name: str) -> Any:
            assert name in {"empty", "zeros", "asarray", "float64", "int64"}, name
            return getattr(np, name)

    on_host(monkeypatch)
    monkeypatch.setattr(cuda_source, "_module", Recorder)
    launched: list[str] = []

    def note(_source: str, name: str, *_rest: Any, **_options: Any) -> None:
        launched.append(name)

    monkeypatch.setattr(gram_cuda, "launch", note)
    n = 60_000
    rows = Rows(np.broadcast_to(np.float32(0), (1, n, d)), "float32")
    spans, _ = pieces_of(n, gram_cuda.longest_run(rows, 1))
    gram_cuda.moments(rows, np.array([[0, 0, *span] for span in spans]), arithmetic=arithmetic)
    assert launched == runs * ["moment_blocks", "add_blocks"]
    launched.clear()
    W = np.broadcast_to(0.0, (1, d, d))
    gram_cuda.sqnorms(rows, np.zeros(1, np.int64), W, np.broadcast_to(np.float32(0), (1, n)), arithmetic=arithmetic)
    assert launched == ["square_rows"]


@pytest.mark.parametrize("arithmetic", ["double", "compensated"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_a_basis(device: None, kind: str, arithmetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    rng = np.random.default_rng(1)
    for d, format in ((66, "float32"), (9, "float64")):
        monkeypatch.setattr(gram_cuda, "_ROOM", 8 * d * 16)
        rows = rows_of(kind, 2, 70, d, format)
        B, W = np.triu(rng.standard_normal((2, 2, d, d)))
        Y = read(rows)[::-1] @ B
        spans = ((0, 64), (0, 70))
        pieces = np.array([[slot, 1 - slot, *span] for slot, span in enumerate(spans)])
        found = gram_cuda.moments(rows, pieces, basis=B, arithmetic=arithmetic)
        for G, part, (_, stop) in zip(found, Y, spans, strict=True):
            size = np.abs(part[:stop]).T @ np.abs(part[:stop])
            assert np.abs(G - part[:stop].T @ part[:stop]).max() <= 1e-13 * size.max()
        out = rows.zeros(as_float64=True)
        gram_cuda.sqnorms(rows, np.array([1, 0]), W, out, basis=B, arithmetic=arithmetic)
        np.testing.assert_allclose(out[::-1], np.sum((Y @ W) ** 2, axis=2), rtol=1e-11)


@pytest.mark.parametrize("arithmetic", ["double", "compensated"])
def test_heads_in_bases_have_the_same_bits_in_any_batch_and_room(
    device: None, arithmetic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    rows, rng = rows_of("transformed", 5, 70, 7), np.random.default_rng(3)
    B, W = np.triu(rng.standard_normal((2, 5, 7, 7)))
    spans = ((0, 70), (0, 64), (64, 70), (32, 32), (16, 17))
    pieces = np.array([[slot, (slot * 2 + k) % 5, *span] for slot in range(5) for k, span in enumerate(spans)])
    items = np.array([3, 0, 4, 1])
    alone = np.concatenate([gram_cuda.moments(rows, one[None], basis=B, arithmetic=arithmetic) for one in pieces])
    norms = rows.zeros(as_float64=True)
    for slot, item in enumerate(items):
        one = np.array([item])
        gram_cuda.sqnorms(rows, one, W[slot, None], norms, basis=B[slot, None], arithmetic=arithmetic)
    for room in (1 << 28, 8 * 7 * 48, 1):
        monkeypatch.setattr(gram_cuda, "_ROOM", room)
        assert np.array_equal(gram_cuda.moments(rows, pieces, basis=B, arithmetic=arithmetic), alone)
        out = rows.zeros(as_float64=True)
        gram_cuda.sqnorms(rows, items, W[:4], out, basis=B[:4], arithmetic=arithmetic)
        assert np.array_equal(out, norms)


@pytest.mark.usefixtures("host")
def test_heads_in_bases_take_the_launches_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(gram_cuda, "launch", lambda _source, name, *_rest, **_options: launched.append(name))
    for heads in (1, 9):
        launched.clear()
        rows, B = rows_of("plain", heads, 50, 6), np.zeros((heads, 6, 6))
        gram_cuda.moments(rows, np.array([[item, item, 0, 50] for item in range(heads)]), basis=B)
        gram_cuda.sqnorms(rows, np.arange(heads), B, rows.zeros(), basis=B, arithmetic="compensated")
        assert launched == ["rows_in_basis", "moment_blocks", "add_blocks", "rows_in_basis", "square_rows"]


def test_sums_are_those_of_the_cpu_in_pairs(device: None) -> None:
    """Integers have exact sums; for others the order of blocks is that of the CPU, whatever the pieces."""
    rng = np.random.default_rng(0)
    K = rng.standard_normal((1, 7 * BLOCK + 5, 4))
    rows = Rows(K, "float64")
    whole, parts = (
        gram_cuda.moments(rows, np.array(pieces))
        for pieces in ([[0, 0, 0, 4 * BLOCK]], [[0, 0, i * BLOCK, (i + 1) * BLOCK] for i in range(4)])
    )
    assert np.array_equal(whole[0], (parts[0] + parts[1]) + (parts[2] + parts[3]))
    integers = Rows(rng.integers(-9, 10, K.shape).astype(np.float64), "float64")
    pieces = np.array([[0, 0, 0, K.shape[1]]])
    assert np.array_equal(gram_cuda.moments(integers, pieces), gram_cpu.moments(integers, pieces))


def test_room_for_partial_sums_changes_nothing(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of("plain", 5, 300, 7)
    small_blocks(monkeypatch)
    pieces = np.array([[i, i, a, z] for i in range(5) for a, z in ((0, 128), (128, 300))])
    expected = gram_cuda.moments(rows, pieces)
    for room in (1, 8 * 49 * 9, 8 * 49 * 40):
        monkeypatch.setattr(gram_cuda, "_ROOM", room)
        assert np.array_equal(gram_cuda.moments(rows, pieces), expected)
        assert 0 <= gram_cuda.longest_run(rows, 5) <= 5


def test_compensated_products_are_rounded_once(device: None) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((1, 40, 2))
    K = np.concatenate([x, x, x * 2.0**-40], axis=2)  # big parts cancel
    B = np.zeros((1, 6, 6))
    B[0, :2, 5], B[0, 2:4, 5], B[0, 4:, 5] = 1e6, -1e6, 3.0
    out = np.zeros((1, 40))
    W = np.zeros((1, 6, 6))
    W[0, 5, 5] = 1.0
    gram_cuda.sqnorms(Rows(K, "float64"), np.zeros(1, np.int64), W, out, basis=B, arithmetic="compensated")
    np.testing.assert_allclose(out[0], (3 * K[0, :, 4:].sum(axis=1)) ** 2, rtol=1e-12)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("d", "width"), [(3, 1), (66, 70), (8, 5), (5, 3), (40, 64), (64, 9), (3, 100), (70, 70), (257, 3)], ids=str
)
def test_projected_squared_norms(device: None, format: str, d: int, width: int) -> None:
    rows = rows_of("transformed", 2, 70, d, format)
    X, P = read(rows)[::-1], np.random.default_rng(5).standard_normal((2, d, width))
    bound = np.sum((np.abs(X) @ np.abs(P)) ** 2, axis=2)
    for arithmetic, unit in UNITS.items():
        out = rows.zeros(as_float64=True)
        gram_cuda.projected_sqnorms(rows, np.array([1, 0]), P, out, arithmetic, np.inf)
        assert (np.abs(out[::-1] - np.sum((X @ P) ** 2, axis=2)) <= 48 * unit * bound).all()


@pytest.mark.parametrize("kind", KINDS)
def test_columns(device: None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    for b, n, d in (*SHAPES[:6], (1, 0, 3), (3, 100, 300)):
        rows = rows_of(kind, b, n, d)
        X = read(rows)
        np.testing.assert_allclose(
            rows_cuda.column_figures(rows, largest=False), X.sum(axis=1), rtol=1e-12, atol=1e-12
        )
        assert np.array_equal(rows_cuda.column_figures(rows, largest=True), np.abs(X).max(axis=1, initial=0.0))


@pytest.mark.parametrize("d", [5, 64])
def test_columns_have_the_same_bits_in_any_layout_and_batch(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host(monkeypatch)
    rows = rows_of("plain", 2, BLOCK + 300, d)
    sums = rows_cuda.column_figures(rows, largest=False)
    for order, other in enumerate(
        (rows_of("columns", 2, BLOCK + 300, d), replace(rows, weights=np.ones(rows.shape[:2])))
    ):
        on_host(monkeypatch, order + 2)
        assert np.array_equal(rows_cuda.column_figures(other, largest=False), sums)
    assert np.array_equal(rows_cuda.column_figures(rows.item(1), largest=False)[0], sums[1])
    first, rest = (
        rows_cuda.column_figures(rows.between(*span), largest=False) for span in ((0, BLOCK), (BLOCK, BLOCK + 300))
    )
    assert np.array_equal(first + rest, sums)


def exact(numbers: Any) -> Any:
    """Numbers as whole multiples of 2**-150, which they are."""
    whole = np.array([int(x) for x in (numbers * 2.0**150).ravel().tolist()], object).reshape(numbers.shape)
    assert (whole.astype(np.float64) == numbers * 2.0**150).all()
    return whole


@pytest.mark.parametrize("kind", KINDS)
def test_sums_apart_from_an_origin_hold_twice_the_digits(
    device: None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    for b, n, d in ((1, 1, 1), (2, 150, 20), (3, 300, 70), (2, 0, 3)):
        rows = replace(rows_of(kind, b, n, d), shift=None, weights=None)
        origin = 1e9 * np.random.default_rng(0).standard_normal((b, d))
        high, low = rows_cuda.sums_apart(rows, origin)
        keep = np.ones((b, n), bool) if rows.mask is None else rows.mask
        sums = np.where(keep[:, :, None], exact(read(rows)) - exact(origin)[:, None], 0).sum(axis=1)
        for at in np.ndindex(b, d):
            sum_of_column = Fraction(sums[at], 2**150)
            fault = Fraction(high[at]) + Fraction(low[at]) - sum_of_column
            assert abs(fault) <= abs(sum_of_column) * Fraction(2) ** -90


def test_products_with_a_basis_add_what_a_shift_loses(device: None) -> None:
    """Keys far from zero, in a basis that leaves little of them: as the kernels of main memory have them."""
    rng = np.random.default_rng(1)
    K = rng.standard_normal((2, 150, 6)) * 1e-3 + 1e6 * rng.standard_normal((2, 1, 6))
    K[:, :, 5] = K[:, :, 4] * (1 + 2.0**-40 * rng.integers(-3, 4, (2, 150)))
    rows = centered(Rows(K, "float64", rng.random((2, 150)) < 0.8))
    basis = np.tile(np.eye(6), (2, 1, 1))
    basis[:, 4, 5] = -K[:, 0, 5] / K[:, 0, 4]
    basis[:, :, 5] *= 1e9
    pieces = np.array([[0, 0, 0, 150], [1, 1, 0, 150]])
    G = gram_cuda.moments(rows, pieces, basis=basis, arithmetic="compensated")
    expected = gram_cpu.moments(rows, pieces, basis=basis, arithmetic="compensated")
    np.testing.assert_allclose(G, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())
    found, other = rows.zeros(as_float64=True), rows.zeros(as_float64=True)
    for kernels, out in ((gram_cuda, found), (gram_cpu, other)):
        kernels.sqnorms(rows, np.arange(2), basis, out, basis=basis, arithmetic="compensated")
    np.testing.assert_allclose(found, other, rtol=1e-11, atol=0)


def test_rows_that_are_not_finite(device: None) -> None:
    K = np.zeros((2, 50, 40), np.float32)
    K[1, [3, 17, 49], [0, 39, 33]] = np.nan, np.inf, -np.inf
    rows = Rows(K, "float32")
    assert rows_cuda.nonfinite_rows(rows, 1, 5) == [3, 17, 49]
    assert rows_cuda.nonfinite_rows(rows, 1, 2) == [3, 17]
    assert rows_cuda.nonfinite_rows(rows, 0, 5) == []
    mask = np.ones((2, 50), np.bool_)
    mask[1, 17] = False
    assert rows_cuda.nonfinite_rows(Rows(K, "float32", mask), 1, 5) == [3, 49]
    assert np.isnan(rows_cuda.column_figures(rows, largest=True)[1, 0])
    assert np.isinf(rows_cuda.column_figures(rows, largest=True)[1, [33, 39]]).all()


FACTORED = {
    "shared": {},
    "room": {"shared_limit": lambda: 1 << 10},
    **{f"blocks of {block}": {"_WIDE": 1, "_BLOCK": block} for block in (4, 7, 16)},
}


@pytest.mark.parametrize("how", FACTORED)
def test_inverse_cholesky(device: None, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FACTORED[how].items():
        monkeypatch.setattr(factor_cuda, name, value)
    rng = np.random.default_rng(6)
    for d in (1, 2, 5, 16, 17, 33, 65):
        A = rng.standard_normal((5, 2 * d + 1, d))
        A[1, :, d // 2] = 0  # a column of zeros
        A[2] *= np.exp2(rng.integers(-60, 60, d))
        G = np.swapaxes(A, 1, 2) @ A
        G[3] -= (1.5 if d > 1 else 0) * np.linalg.eigvalsh(G[3])[0] * np.eye(d)  # not positive definite
        G[4] = np.outer(A[4, 0], A[4, 0])  # of rank 1: a pivot by rounding, or by the shift
        sure = slice(0, 3)
        size = np.sqrt(np.diagonal(G, axis1=1, axis2=2))[sure, :, None]
        for shift in (0.0, 1e-3):
            found, other = factor_cuda.inverse_cholesky(G, shift), factor_cpu.inverse_cholesky(G, shift)
            W, pivot, bound = found.W, found.pivot, found.bound
            expected = other.W, other.pivot, other.bound
            assert np.array_equal(pivot[:4] > 0, expected[1][:4] > 0)
            assert (pivot[sure] > 0).all()
            if "blocks" not in how:  # which tell no more of a pivot than its sign
                np.testing.assert_allclose(pivot[sure], expected[1][sure], rtol=1e-9)
            np.testing.assert_allclose(bound[sure], expected[2][sure], rtol=1e-9)
            np.testing.assert_allclose(size * W[sure], size * expected[0][sure], atol=1e-9)
            assert np.array_equal(W[1] != 0, expected[0][1] != 0)
            assert np.array_equal(found.ranks()[sure], other.ranks()[sure])
            assert np.array_equal(found.extremes(), other.extremes())
            np.testing.assert_allclose(found.spreads()[sure], other.spreads()[sure], rtol=1e-9)
            if d > 1 and pivot[4] > 0:
                assert bound[4] > (1e12 if not shift else 1e2)


@pytest.mark.parametrize("how", ["shared", "blocks of 7"])
def test_bounds_above_a_limit_are_norms(device: None, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FACTORED[how].items():
        monkeypatch.setattr(factor_cuda, name, value)
    A = np.random.default_rng(7).standard_normal((3, 50, 17)) * np.geomspace(1, 1e-3, 17)
    A[1, :, 5] = 0
    G = np.swapaxes(A, 1, 2) @ A
    before = factor_cuda.inverse_cholesky(G)
    norms = np.linalg.norm(np.sqrt(np.diagonal(G, axis1=1, axis2=2))[:, :, None] * before.W, 2, axis=(1, 2)) ** 2
    for limit in (1.0, np.array([1.0, 1.0, np.inf])):
        bound, far = factor_cuda.inverse_cholesky(G, limit=limit).bound, np.broadcast_to(limit, 3) < np.inf
        assert np.array_equal(bound[~far], before.bound[~far])
        assert (bound[far] <= np.minimum(before.bound, norms * (1 + 1e-9))[far]).all()
        assert (bound[far] >= 0.9 * norms[far]).all()
        np.testing.assert_allclose(bound, factor_cpu.inverse_cholesky(G, limit=limit).bound, rtol=1e-6)


def test_wide_matrices_have_the_same_bits_in_any_batch(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of products may sum in an order that depends on the batch, the strides or the place in memory."""
    products, wrong, real = 0, [], cupy.matmul

    def suspicious(a: Any, b: Any) -> Any:
        nonlocal products
        products += 1
        wrong.extend(x.shape for x in (a, b) if x.ndim != 2 or not x.flags.c_contiguous)
        return real(a, b)

    for name, value in FACTORED["blocks of 16"].items():
        monkeypatch.setattr(factor_cuda, name, value)
    A = np.random.default_rng(7).standard_normal((3, 80, 41)) * np.geomspace(1, 1e-3, 41)
    G, sizes, bases = np.swapaxes(A, 1, 2) @ A, np.linalg.norm(A, axis=1), np.triu(A[:, :41])
    monkeypatch.setattr(cupy, "matmul", suspicious)

    def everything(items: slice) -> list[Any]:
        there = [cupy.asarray(X[items]) for X in (G, sizes, bases)]
        first = factor_cuda.inverse_cholesky(there[0], limit=1.0)
        second = factor_cuda.rebased(*there, 1e-10, np.inf)
        return [cupy.asnumpy(first.W), first.figures, cupy.asnumpy(second.W), second.figures, second.norms]

    whole = everything(slice(None))
    for i in range(3):
        for one, other in zip(everything(slice(i, i + 1)), whole, strict=True):
            assert np.array_equal(one[0], other[i])
    assert products
    assert not wrong


def test_what_cannot_be_factored_says_so(device: None) -> None:
    G = np.array(
        [[[1.0, 2.0], [2.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], [[1.0, np.nan], [np.nan, 1.0]], np.zeros((2, 2))]
    )
    found = factor_cuda.inverse_cholesky(G)
    W, pivot, bound = found.W, found.pivot, found.bound
    assert found.extremes()[0].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert found.ranks()[[1, 3]].tolist() == [2, 0]
    H = np.array([[[1.0, 0.0], [0.0, np.nan]]])
    least, most = factor_cuda.inverse_cholesky(H).extremes()
    assert not (least[0] > -np.inf and most[0] < np.inf)
    assert not pivot[0] > 0
    assert not pivot[2] > 0
    assert pivot[1] == bound[1] == 1
    assert pivot[3] == np.inf
    assert bound[3] == 0
    assert not W[3].any()


def test_halves_and_bfloats_are_read_as_they_are(device: None) -> None:
    """All 65 536 words of either format, NaN left out."""
    words = np.arange(65536, dtype=np.uint16)
    for format in ("float16", "bfloat16"):
        with np.errstate(invalid="ignore"):  # signalling NaN
            values = to_float64(words, format)
        keys = words[~np.isnan(values)].reshape(1, -1, 1)
        expected = values[~np.isnan(values)]
        rows = Rows(np.ascontiguousarray(keys.transpose(0, 2, 1)), format)  # one row, a column each
        assert np.array_equal(rows_cuda.column_figures(rows, largest=True)[0], np.abs(expected))
        finite = np.isfinite(expected)
        assert np.array_equal(rows_cuda.column_figures(rows, largest=False)[0][finite], expected[finite])
