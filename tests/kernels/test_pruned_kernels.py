"""The kernels of pruned attention on the CPU against their definitions, and the same bits on any number of threads.

Inside: kernels are compared with their definition.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import array_api_strict
import numpy as np
import pytest

from levattn import thread_limit
from levattn._kernels import tasks
from levattn._kernels.pruned import PrunedArguments, definition, differentiable, mapped
from levattn._kernels.pruned import cpu as pruned_cpu
from levattn.attention import causal_pruned_attention
from libraries import needs_torch
from mixtures import mixture, summaries
from pruned_calls import attend

TOLERANCE = {"float64": 1e-12, "float32": 2e-5}
over_dtypes = pytest.mark.parametrize("dtype", ["float64", "float32"])
over_powers = pytest.mark.parametrize("power", [None, 1.0, 2.0, 3.5])


def strict(value: Any) -> Any:
    """Arrays of numpy, and what holds them, in the strict namespace; others as they are."""
    return mapped(value, lambda array: array_api_strict.asarray(np.ascontiguousarray(array)))


def close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def agree(x: PrunedArguments) -> None:
    tolerance = TOLERANCE[x.q.dtype.name]
    for found, expected in zip(pruned_cpu.mixture(x), definition.mixture(strict(x)), strict=True):
        close(found, expected, tolerance)


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is shared out even where it is small."""
    monkeypatch.setattr(tasks, "_THREAD_WORK", 0)
    monkeypatch.setattr(tasks, "_RUN_WORK", 1)


SHAPES: dict[str, dict[str, Any]] = {
    "labeled": {},
    "apart": {"labeled": False},
    "counted": {"counted": True},
    "grouped": {"g": 3},
    "no summaries": {"R": 0, "labeled": False},
    "dropped": {"R": 0},
    "no window": {"window": 0},
    "nothing kept": {"s": 0},
    "one query": {"m": 1, "n": 5, "window": 9},
    "keys beyond": {"m": 48, "n": 61},
    "several panels": {"m": 200, "n": 200, "d": 64, "D": 40, "s": 70, "R": 33, "window": 50},
    "several parts": {"m": 1300, "n": 1300, "b": 1, "g": 2, "d": 16, "D": 24, "s": 40, "R": 20, "window": 30},
}


def gradients_by_definition(x: PrunedArguments, dY: Any) -> Any:
    import torch

    held = mapped(x, lambda array: torch.from_numpy(np.ascontiguousarray(array)))
    leaves = [array.requires_grad_() for array in differentiable(held) if array is not None]
    found = torch.autograd.grad(definition.mixture(held)[0], leaves, torch.from_numpy(dY), materialize_grads=True)
    return [part.numpy() for part in found]


@needs_torch
@over_dtypes
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_mixtures_are_those_of_the_definition(dtype: str, shape: str) -> None:
    x = mixture(dtype, **SHAPES[shape])
    dY = np.random.default_rng(1).standard_normal((*x.q.shape[:3], x.values.shape[2])).astype(dtype)
    found = pruned_cpu.mixture_gradients(x, dY)
    found = [part for part, array in zip(found, differentiable(x), strict=True) if array is not None]
    for one, other in zip(found, gradients_by_definition(x, dY), strict=True):
        close(one, other, TOLERANCE[dtype] * max(1.0, float(np.abs(other).max(initial=0.0))))


@pytest.mark.parametrize("shape", ["labeled", "several parts"])
def test_gradients_of_mixtures_have_the_same_bits_on_any_number_of_threads(shape: str, small_tasks: None) -> None:
    x = mixture("float32", **SHAPES[shape])
    dY = np.random.default_rng(1).standard_normal((*x.q.shape[:3], x.values.shape[2])).astype("float32")
    found = []
    for threads in (1, 3):
        with thread_limit(threads):
            found.append(pruned_cpu.mixture_gradients(x, dY))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@over_dtypes
@over_powers
@pytest.mark.parametrize("labeled", [True, False], ids=["labeled", "apart"])
def test_mixtures_are_their_definition(dtype: str, power: float | None, labeled: bool) -> None:
    agree(mixture(dtype, power=power, labeled=labeled, counted=True))


@over_powers
@pytest.mark.parametrize(
    "shape",
    [
        {"d": 1, "D": 1, "n": 3, "m": 3},
        {"g": 3, "m": 50, "n": 50},
        {"g": 7, "m": 1, "n": 9},
        {"g": 60, "m": 2, "n": 9},
        {"m": 200, "n": 90, "window": 0},
        {"m": 97, "n": 97, "window": 40},
        {"s": 0},
        {"R": 0},
        {"R": 1, "s": 1, "d": 16, "D": 33},
        {"s": 40, "R": 37, "d": 64, "D": 64},
        {"s": 0, "R": 0},
        {"s": 0, "R": 0, "window": 0},
        {"b": 1},
        {"b": 0},
        {"m": 0, "n": 5},
    ],
    ids=str,
)
def test_mixtures_of_all_shapes(shape: dict[str, int], power: float | None) -> None:
    x = mixture(power=power, **shape)
    if x.q.size:
        agree(x)
    else:
        assert [part.shape for part in pruned_cpu.mixture(x)] == [(*x.q.shape[:3], 5), x.q.shape[:3]]


def test_summaries_whose_members_all_are_near_are_left_out() -> None:
    x = mixture(s=0, R=2, window=61)  # the last summary has these members alone
    agree(x)
    assert np.all(pruned_cpu.mixture(x)[1] < 1)


def test_queries_that_read_nothing_have_zero_rows() -> None:
    Y, rest = pruned_cpu.mixture(mixture(s=0, R=0, window=0))
    assert not Y.any()
    assert not rest.any()


def test_large_logits_leave_no_range() -> None:
    x = mixture("float32")
    x.q[:] *= 200
    agree(x)
    assert np.isfinite(pruned_cpu.mixture(x)[0]).all()


def test_views_that_are_not_contiguous() -> None:
    x = mixture(g=2)
    parts = {name: np.moveaxis(np.moveaxis(getattr(x, name), 0, -2).copy(), -2, 0) for name in ("q", "keys", "values")}
    other = replace(x, **parts)
    assert not other.q.flags.c_contiguous
    for one, two in zip(pruned_cpu.mixture(x), pruned_cpu.mixture(other), strict=True):
        np.testing.assert_array_equal(one, two)


CLUSTERS = [(2, 301, 7, 12), (1, 40, 1, 3), (2, 5, 3, 9), (3, 64, 16, 1), (1, 2100, 2, 4)]


@over_dtypes
@pytest.mark.parametrize("iterations", [0, 3])
@pytest.mark.parametrize("shape", CLUSTERS, ids=str)
def test_clusters_are_their_definition(shape: tuple[int, ...], iterations: int, dtype: str) -> None:
    b, n, d, R = shape
    rng = np.random.default_rng(1)
    centers = 10 * rng.standard_normal((b, 1 + R // 2, d))  # groups that are apart, so that rounding decides nothing
    X = np.take_along_axis(centers, rng.integers(0, centers.shape[1], (b, n, 1)), 1)
    X = (X + (0.3 if dtype == "float64" else 0) * rng.standard_normal((b, n, d))).astype(dtype)
    weight = (rng.random((b, n)) * (rng.random((b, n)) < 0.8)).astype(dtype)
    labels, distance = pruned_cpu.cluster(X, weight, R, iterations)
    expected, other = (np.asarray(a) for a in definition.cluster(strict(X), strict(weight), R, iterations))
    if dtype == "float64":
        np.testing.assert_array_equal(labels, expected)
        close(distance, other, 1e-9)
    else:  # rows of one group are the same: they lie on their center
        assert labels.dtype == expected.dtype
        assert labels.min() >= 0
        assert labels.max() < R
        np.testing.assert_allclose(distance, other, atol=2e-4 * float((X**2).max()))


def test_a_row_is_in_the_nearest_cluster() -> None:
    rng = np.random.default_rng(2)
    X = rng.standard_normal((2, 500, 19)).astype(np.float32)
    labels, distance = pruned_cpu.cluster(X, np.ones((2, 500), np.float32), 17, 0)
    for x, own, gap in zip(X.astype(np.float64), labels, distance, strict=True):
        centers = np.stack([x[own == c][np.argmin(gap[own == c])] for c in range(17)])  # they begin as rows
        apart = ((x[:, None] - centers) ** 2).sum(-1)
        np.testing.assert_allclose(gap, apart.min(1), atol=1e-4)
        np.testing.assert_allclose(apart[np.arange(500), own], apart.min(1), atol=1e-4)


@over_dtypes
@pytest.mark.parametrize("shape", CLUSTERS, ids=str)
def test_sums_by_label_are_their_definition(shape: tuple[int, ...], dtype: str) -> None:
    b, n, d, R = shape
    rng = np.random.default_rng(3)
    labels = rng.integers(-1, R, (b, n))
    values, weight, tilt = (rng.random((b, n)).astype(dtype) for _ in range(3))
    given = labels, values, weight
    close(pruned_cpu.levels(*given, R), definition.levels(*map(strict, given), R), TOLERANCE[dtype])
    given = labels, tilt, summaries(rng, b, n, d, d + 2, dtype)
    found, expected = pruned_cpu.merged(*given, R), definition.merged(*map(strict, given), R)
    for name, array in vars(found).items():
        close(array, getattr(expected, name), 20 * TOLERANCE[dtype])


@over_dtypes
@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1.0, 1e30, 1e200])
def test_radii_are_their_definition_and_bounds(scale: float, dtype: str) -> None:
    b, n, d, R = 2, 40, 3, 5
    rng = np.random.default_rng(8)
    labels, item_radii = rng.integers(-1, R, (b, n)), scale * rng.random((b, n))
    items, centers = summaries(rng, b, n, d, 2, "float64"), summaries(rng, b, R, d, 2, "float64")
    scale = min(max(scale, 1e-30), 1e30) if dtype == "float32" else scale
    items, centers = (replace(held, keys=scale * held.keys) for held in (items, centers))
    items = mapped(items, lambda X: X.astype(dtype))
    found = pruned_cpu.radii(labels, items, item_radii, centers)
    expected = np.asarray(definition.radii(strict(labels), strict(items), strict(item_radii), strict(centers)))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    means, others = (
        x.keys.astype(np.longdouble) / np.where(x.weight > 0, x.weight, 1)[..., None] for x in (items, centers)
    )
    for i, c in np.ndindex(b, R):
        inside = labels[i] == c
        far = item_radii[i] + np.sqrt(((means[i] - others[i, c]) ** 2).sum(axis=-1))
        bound = far[inside].max(initial=0)
        assert bound <= found[i, c] <= bound * (1 + 1e-14)


@over_dtypes
@pytest.mark.parametrize(("n", "d"), [(1, 3), (63, 7), (700, 1), (700, 33)])
def test_moments_and_places_are_their_definition(n: int, d: int, dtype: str) -> None:
    rng = np.random.default_rng(4)
    X, root = rng.standard_normal((2, n, d)).astype(dtype), rng.standard_normal((2, d, d)).astype(dtype)
    origin, query = rng.standard_normal((2, 2, d)).astype(dtype)
    of_heads = np.stack([X, -2 * X, X + 1], axis=2).transpose(0, 2, 1, 3)  # heads of a row side by side
    for rows, chunks in ((X[:, None], 1), (of_heads, 1), (of_heads, 7 if n % 7 == 0 else 1)):
        pair = pruned_cpu.row_moments(rows, True, chunks), definition.row_moments(strict(rows), True, chunks)
        for found, expected in zip(*pair, strict=True):
            close(found, expected, 1e-11)
        total, none = pruned_cpu.row_moments(rows, False, chunks)
        close(total, pair[1][0], 1e-11)
        assert none is None
    wide = X.astype(np.float64)
    close(definition.row_moments(X[:, None], True)[1], np.einsum("bnd,bne->bde", wide, wide), 1e-11)
    given = X, origin, root, query
    for found, expected in zip(pruned_cpu.places(*given), definition.places(*map(strict, given)), strict=True):
        close(found, expected, 5 * TOLERANCE[dtype])


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize(
    "options", [{"budget": 60}, {"budget": 40, "causal": True}, {"budget": 50, "f": 2.0}], ids=str
)
def test_the_same_bits_on_any_number_of_threads(options: dict[str, Any]) -> None:
    Q, K, V = np.random.default_rng(5).standard_normal((3, 2, 400, 9))
    results = []
    for threads in (1, 3):
        with thread_limit(threads):
            results.append(attend(Q, K, V, **options))
    np.testing.assert_array_equal(*results)


@needs_torch
@pytest.mark.parametrize("causal", [False, True])
def test_tensors_without_gradients_have_the_bits_of_numpy(causal: bool) -> None:
    import torch

    Q, K, V = np.random.default_rng(6).standard_normal((3, 2, 150, 8)).astype(np.float32)
    tensors = [torch.from_numpy(array) for array in (Q, K, V)]
    expected = attend(Q, K, V, budget=40, causal=causal)
    found = attend(*tensors, budget=40, causal=causal)
    assert isinstance(found, torch.Tensor)
    np.testing.assert_array_equal(found.numpy(), expected)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    followed = attend(*leaves, budget=40, causal=causal)
    assert followed.requires_grad
    close(followed.detach().numpy(), expected, 1e-5)
    with torch.no_grad():
        np.testing.assert_array_equal(attend(*leaves, budget=40, causal=causal).numpy(), expected)
    half = attend(*(tensor.bfloat16() for tensor in tensors), budget=40, causal=causal)
    assert half.dtype is torch.bfloat16


@needs_torch
def test_a_state_of_tensors_goes_on_with_and_without_gradients() -> None:
    import torch

    X = torch.from_numpy(np.random.default_rng(7).standard_normal((3, 2, 90, 8)))
    expected = causal_pruned_attention(*X, 30)
    _, state = causal_pruned_attention(*X[:, :, :50], 30, return_state=True)
    with pytest.raises(ValueError, match=r"state holds float64 of torch .* K and V are float64 of numpy"):
        causal_pruned_attention(*X[:, :, 50:70].numpy(), state)
    plain, after = causal_pruned_attention(*X[:, :, 50:70], state, return_state=True)
    close(plain, expected[:, 50:70])
    followed = causal_pruned_attention(*X[:, :, 70:].clone().requires_grad_(), after)
    close(followed.detach(), expected[:, 70:])
