"""Rotations of values by position: against loops, and that only distances count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import naive_attention as naive
from latent_calls import macchiato
from levattn.attention import latte, rotate_values
from libraries import STORAGES, stored


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("inverse", [False, True])
def test_rotations_are_those_of_the_loops(storage: str, inverse: bool) -> None:
    V = np.random.default_rng(0).standard_normal((2, 3, 7, 6))
    places = np.array([0, 1, 2, 5, 3, 100, 1000])
    answer = np.stack([[naive.rotate(x, places, 50.0, inverse) for x in item] for item in V])
    kinds: list[Any] = [places, places.tolist(), places.astype(float), np.broadcast_to(places, (3, 7))]
    for positions in (*kinds, stored(places, storage), np.broadcast_to(places, (2, 1, 7))):
        found = rotate_values(stored(V, storage), positions, base=50.0, inverse=inverse)
        np.testing.assert_allclose(np.asarray(found), answer, atol=1e-13)


def test_rows_may_have_positions_of_their_own_and_half_precision() -> None:
    V, places = np.ones((2, 3, 4), np.float16), np.array([[0, 1, 2], [7, 8, 10_000_000]])
    found = rotate_values(V, places)
    assert found.dtype == np.float16
    for item in range(2):
        np.testing.assert_allclose(found[item], naive.rotate(V[item], places[item]), atol=2e-3)


def test_turning_back_is_the_inverse_and_keeps_lengths() -> None:
    V = np.random.default_rng(1).standard_normal((50, 8))
    turned = rotate_values(V, np.arange(50))
    np.testing.assert_allclose(rotate_values(turned, np.arange(50), inverse=True), V, atol=1e-14)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(V, axis=1), atol=1e-13)


def attended(kind: str, rng: np.random.Generator, dtype: Any) -> Any:
    """Attention of some values turned back, as a function of where positions begin."""
    q, k, V, Q, K = rng.standard_normal((5, 60, 8)).astype(dtype)
    gate = rng.standard_normal(60).astype(dtype)

    def run(start: int) -> Any:
        places = np.arange(start, start + 60)
        values = rotate_values(V, places, inverse=True)
        if kind == "latte":
            return rotate_values(latte(Q, K, values), places)
        return rotate_values(macchiato(q, k, values, Q, K, gate, window=8), places)

    return run


@pytest.mark.parametrize("kind", ["latte", "macchiato"])
@pytest.mark.parametrize("shift", [1, 1000, 10_000_000])
def test_shifting_all_positions_changes_nothing(kind: str, shift: int) -> None:
    run = attended(kind, np.random.default_rng(2), np.float64)
    np.testing.assert_allclose(run(shift), run(0), atol=1e-14 + 1e-15 * shift)
    single = attended(kind, np.random.default_rng(2), np.float32)
    np.testing.assert_allclose(single(shift), run(0), atol=2e-6)


def test_values_are_turned_by_their_distance() -> None:
    rng = np.random.default_rng(3)
    Q, K, V = rng.standard_normal((3, 20, 4))
    weights = naive.latent_matrices(K)
    P = np.zeros((20, 20))
    for t in range(20):
        P[t] = naive.softmax(Q[t]) @ weights[:, t]
    answer = np.stack([sum(P[t, s] * naive.rotate(V[s : s + 1], [t - s])[0] for s in range(t + 1)) for t in range(20)])
    places = np.arange(20)
    found = rotate_values(latte(Q, K, rotate_values(V, places, inverse=True)), places)
    np.testing.assert_allclose(found, answer, atol=1e-14)


def test_wrong_arguments_are_named() -> None:
    V = np.zeros((2, 5, 4))
    for call, error, message in (
        (lambda: rotate_values(V[..., :3], np.arange(5)), ValueError, r"V has shape \(2, 5, 3\); expected .* even D"),
        (lambda: rotate_values(V[0, 0], np.arange(5)), ValueError, "V has shape"),
        (lambda: rotate_values(V[0, 0, 0], np.arange(5)), ValueError, r"V has shape \(\)"),
        (lambda: rotate_values(V, np.arange(4)), ValueError, r"positions has shape \(4,\); expected \(..., 5\)"),
        (lambda: rotate_values(V, 3), TypeError, "positions is of type int"),
        (lambda: rotate_values(V, np.zeros((3, 5))), ValueError, "expected leading axes that broadcast"),
        (lambda: rotate_values(V, np.zeros((1, 2, 5))), ValueError, "expected leading axes that broadcast"),
        (lambda: rotate_values(V, np.arange(5) + 0j), TypeError, "positions has dtype complex128; expected whole"),
        (lambda: rotate_values(V, np.ones(5, bool)), TypeError, "positions has dtype bool; expected whole"),
        (lambda: rotate_values(V, np.arange(5), base=0), ValueError, "base is 0; expected"),
    ):
        with pytest.raises(error, match=message):
            call()
