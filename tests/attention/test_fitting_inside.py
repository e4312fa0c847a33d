"""Least squares within bounds, and fits that take their logits in blocks.

Inside: the matrices here have entries of both signs and nearly dependent columns, as no attention has, so that many
variables meet and leave their bounds. Blocks are smaller than the library's.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from scipy.optimize import lsq_linear

from levattn.attention import Selection, box, fit_slots, regression
from strategies import Float

LOW, HIGH = 0.05, 20.0
KINDS = ("positive", "signed", "repeated", "graded", "sums", "of one direction")


def problem(kind: str, seed: int) -> tuple[Float, Float, Float, Float]:
    """Rows (b, r, s) and targets (b, r) of least squares, their Gram matrices and right-hand sides."""
    rng = np.random.default_rng(seed)
    r, s = int(rng.choice([1, 3, 20, 60])), int(rng.choice([1, 2, 10, 40]))
    F = rng.random((3, r, s)) ** 4
    if kind == "signed":
        F = rng.standard_normal((3, r, s))
    elif kind == "repeated":
        F = F[:, :, rng.integers(0, 1 + s // 3, s)]
    elif kind == "graded":
        F *= 10.0 ** rng.uniform(-3, 0, (3, 1, s))
    elif kind == "sums":
        F = np.broadcast_to(np.tril(np.ones((r, s))), (3, r, s)) + 0 * F
    elif kind == "of one direction":
        F = rng.standard_normal((3, r, 1)) * rng.standard_normal((3, 1, s)) + 0.01 * rng.standard_normal((3, r, s))
    target = np.full((3, r), 10.0 ** rng.uniform(-1, 2))
    ridge = 1e-4 * (F**2).sum(axis=(1, 2)) / s
    F = np.concatenate([F, np.sqrt(ridge)[:, None, None] * np.eye(s)], axis=1)
    target = np.concatenate([target, np.repeat(np.sqrt(ridge)[:, None], s, axis=1)], axis=1)
    return F, target, F.swapaxes(1, 2) @ F, np.einsum("brs,br->bs", F, target)


@pytest.mark.parametrize("bold", [20, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_minimum_is_reached(kind: str, bold: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(box, "_BOLD", bold)  # without bold steps the end is proven
    for seed in range(20):
        F, target, H, g = problem(kind, seed)
        x = box.least_in_box(box.Quadratic(H), g, np.ones_like(g), LOW, HIGH)
        assert np.all((x >= LOW) & (x <= HIGH))
        gradient, noise = np.einsum("bij,bj->bi", H, x) - g, np.einsum("bij,bj->bi", np.abs(H), x) + np.abs(g)
        fine = np.abs(gradient) <= 1e-11 * noise
        assert np.all(fine | ((x == LOW) & (gradient > 0)) | ((x == HIGH) & (gradient < 0)))
        for i in range(3):
            wanted = lsq_linear(F[i], target[i], (LOW, HIGH), method="bvls", tol=1e-15, max_iter=10_000).x
            np.testing.assert_allclose(x[i], wanted, rtol=1e-6, atol=1e-7)


def test_no_step_goes_up_and_batch_mates_do_not_matter() -> None:
    for kind in KINDS:
        F, target, H, g = problem(kind, 3)
        x = box.least_in_box(box.Quadratic(H), g, np.ones_like(g), LOW, HIGH)
        ours, theirs = (np.linalg.norm(np.einsum("brs,bs->br", F, y) - target, axis=1) for y in (x, np.ones_like(g)))
        assert np.all(ours <= theirs * (1 + 1e-12))
        again = box.least_in_box(box.Quadratic(H), g, x, LOW, HIGH)
        np.testing.assert_allclose(again, x, rtol=1e-7, atol=1e-9)
        for i in range(3):
            alone = box.least_in_box(box.Quadratic(H[i : i + 1]), g[i : i + 1], np.ones_like(g[:1]), LOW, HIGH)
            np.testing.assert_array_equal(alone, x[i : i + 1])


REPEATED = [[[0.030390010754266505] * 3 + [0.21770035328042225], [0.19136480354476348] * 3 + [0.9511792446559916]]]
WHOLE = [[[1.0, 0, 0, 0], [0, 1, 0, 1], [1, 1, 0, 1], [0, 0, 1, 0], [0, 0, 1, 0]]]


@pytest.mark.parametrize(("F", "target"), [(REPEATED, 1.00574227), (WHOLE, 29.17665542)])
def test_variables_at_a_distance_of_rounding_from_a_bound_end_no_path(F: Any, target: float) -> None:
    """Equal columns reach a bound together up to rounding; a variable next to a bound comes and goes by rounding."""
    low, high = np.exp(-3), np.exp(3)
    for order in itertools.permutations(range(4)):
        rows = np.array(F)[:, :, order]
        for factor in np.linspace(target, 1.001 * target, 20):
            H = rows.swapaxes(1, 2) @ rows + 1e-2 * (rows**2).sum() / 4 * np.eye(4)
            g = factor * rows.sum(axis=1) + 1e-2 * (rows**2).sum() / 4
            x = box.least_in_box(box.Quadratic(H), g, np.ones_like(g), low, high)
            gradient, noise = np.einsum("bij,bj->bi", H, x) - g, np.einsum("bij,bj->bi", H, x) + g
            fine = np.abs(gradient) <= 1e-11 * noise
            assert np.all(fine | ((x == low) & (gradient > 0)) | ((x == high) & (gradient < 0)))


@pytest.mark.parametrize("ridge", [3e-3, 1e-2, 10.0])
@pytest.mark.parametrize("kind", ["plain", "repeated", "graded", "zeros"])
def test_few_rows_are_solved_as_their_gram_matrix(kind: str, ridge: float) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        R = rng.random((3, 5, 17)) ** rng.choice([1, 8])
        if kind == "repeated":
            R = R[:, :, rng.integers(0, 4, 17)]
        elif kind == "graded":
            R *= 10.0 ** rng.uniform(-6, 0, (3, 1, 17))
        elif kind == "zeros":
            R[1] = 0
            R[:, :, 3] = 0
        rho = ridge * np.maximum((R**2).sum(axis=(1, 2), keepdims=True) / 17, 1e-3)
        g = np.einsum("brs,br->bs", R, 3 * rng.random((3, 5))) + rho[:, :, 0]
        H = R.swapaxes(1, 2) @ R + rho * np.eye(17)
        few, formed = box.Quadratic(None, R, rho), box.Quadratic(H)
        room = 1e-12 / min(ridge, 1)
        F, y = (rng.random((3, 17)) < 0.7).astype(float), rng.standard_normal((3, 17))
        np.testing.assert_allclose(few.solved(F, y), formed.solved(F, y), rtol=room, atol=room / rho.min())
        x = box.least_in_box(few, g, np.ones_like(g), LOW, HIGH)
        gradient, noise = np.einsum("bij,bj->bi", H, x) - g, np.einsum("bij,bj->bi", H, x) + g
        fine = np.abs(gradient) <= 1e-11 * noise
        assert np.all(fine | ((x == LOW) & (gradient > 0)) | ((x == HIGH) & (gradient < 0)))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_definite_systems_are_solved(library: str) -> None:
    """By Cholesky factors; a matrix that is semidefinite up to rounding has none."""
    rng = np.random.default_rng(0)
    F, y = rng.standard_normal((3, 20, 9)), rng.standard_normal((3, 9, 2))
    A = F.swapaxes(1, 2) @ F
    if library == "torch":
        torch = pytest.importorskip("torch")
        found = box.definite_solutions(torch.from_numpy(A), torch.from_numpy(y)).numpy()
    else:
        A[1] = np.diag([*np.ones(8), -1e-16])
        found = box.definite_solutions(A, y)
    np.testing.assert_allclose(A @ found, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_have_the_minimum_of_their_gram_matrix(kind: str) -> None:
    """Products of nonnegative rows are their own sizes; bounds may be below zero, where they are not."""
    for seed, (low, high) in itertools.product(range(5), ((0.05, 20.0), (-0.5, 1.5))):
        rng = np.random.default_rng(seed)
        R = np.abs(problem(kind, seed)[0])
        rho = np.maximum(1e-2 * (R**2).sum(axis=(1, 2), keepdims=True) / R.shape[2], 1e-3)
        g = np.einsum("brs,br->bs", R, 3 * rng.random(R.shape[:2]))
        formed = box.Quadratic(R.swapaxes(1, 2) @ R + rho * np.eye(R.shape[2]))
        few, start = box.Quadratic(None, R, rho), np.ones_like(g)
        found, expected = (box.least_in_box(H, g, start, low, high) for H in (few, formed))
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-9)


def test_nothing_to_solve() -> None:
    for b, s in ((0, 3), (2, 0)):
        assert box.least_in_box(
            box.Quadratic(np.ones((b, s, s))), np.ones((b, s)), np.ones((b, s)), LOW, HIGH
        ).shape == (b, s)


@pytest.mark.parametrize("limit", [1, 100, 3000])
def test_blocks_of_logits_change_rounding_alone(limit: int, monkeypatch: Any) -> None:
    rng = np.random.default_rng(0)
    Q, K, V = (
        rng.standard_normal((3, 6, 25, 4)),
        rng.standard_normal((3, 2, 30, 4)),
        rng.standard_normal((3, 2, 30, 3)),
    )
    options = {"weights": rng.random((3, 6, 25)), "mask": rng.random((3, 2, 30)) < 0.8}
    selection = Selection(size=5, sinks=1)
    whole = fit_slots(Q, K, V, selection, **options)
    monkeypatch.setattr(regression, "_LOGITS", limit)
    parts = fit_slots(Q, K, V, selection, **options)
    for name in ("keys", "values", "log_weights", "indices", "mass_residual", "output_residual", "bounded", "clipped"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-9, atol=1e-11, err_msg=name)
