"""Causal selections by leverage scores of centered keys: what exact arithmetic selects, however far the keys are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import naive
from libraries import needs_torch, stored
from pruned_calls import attend, walk
from strategies import Float, as_float64

CHUNK, ROWS = 6, 30
OFFSETS = {"float32": (0.0, 1e3, 2.0**20, 1e6), "float64": (0.0, 1e4, -1e9, 2.0**50, 1.7e15)}


def _steps(seed: int, n: int, d: int) -> Float:
    return np.random.default_rng(seed).integers(-4, 5, (n, d)).astype(np.float64)


KEYS: dict[str, Float] = {
    # name: keys of small whole numbers, which stay exact if an offset is added
    "any": _steps(0, ROWS, 4),
    "one column": _steps(1, ROWS, 1),
    "constant columns": np.hstack([_steps(2, ROWS, 2), np.full((ROWS, 2), 3.0)]),
    "composition": np.random.default_rng(3).multinomial(40, np.full(5, 0.2), ROWS).astype(np.float64),
    "collinear": _steps(4, ROWS, 1) * [1.0, -2, 4],
    "dependent": _steps(5, ROWS, 2) @ _steps(6, 2, 5),
    "repeated": _steps(7, 3, 4)[np.arange(ROWS) % 3],
    "all equal": np.tile(_steps(8, 1, 4), (ROWS, 1)),
    "first apart": np.vstack([np.full((1, 3), 512.0), _steps(9, ROWS - 1, 3)]),
    "a late step": _steps(10, ROWS, 3) + 64.0 * (np.arange(ROWS) >= 20)[:, None],
}


def _selections(K: Float, epsilon: float, room: float) -> tuple[set[int], set[int]]:
    """Return the keys that selections every few positions keep by exact scores, and those too near ε to tell."""
    kept, open_ = set[int](), set[int]()
    for end in range(CHUNK, len(K) + 1, CHUNK):
        scores = naive.leverage_exact(K[:end], center=True)
        here = {*kept, *range(end - CHUNK, end)}
        open_ |= {j for j in here if abs(scores[j] - epsilon) <= room * epsilon}
        kept = {j for j in here if scores[j] >= epsilon}
    return kept, open_


def _kept(K: Any, epsilon: float, steps: int) -> set[int]:
    """Return the keys that are kept in the end, after calls of so many positions."""
    state = None
    for at in range(0, ROWS, steps):
        rows = K[at : at + steps, :]
        _, state = walk(rows, rows, rows, state=state, epsilon=epsilon, scores="leverage", renew_every=CHUNK)
    (part,) = state.parts
    return {*as_float64(part.kept_places)[0].astype(int).tolist()}


@pytest.mark.parametrize("kind", OFFSETS)
@pytest.mark.parametrize("storage", ["numpy", "strict", pytest.param("torch", marks=needs_torch)])
@pytest.mark.parametrize("name", KEYS)
def test_an_offset_changes_no_selection(name: str, storage: str, kind: str) -> None:
    for offset in OFFSETS[kind]:
        K = KEYS[name] + offset
        given = K.astype(kind)
        assert np.array_equal(given, K)
        for epsilon in (0.05, 0.3):
            expected, unsure = _selections(K, epsilon, 1e-5)
            for steps in (ROWS, 5, 1):
                found = _kept(stored(given, storage), epsilon, steps)
                assert found - unsure == expected - unsure, (offset, epsilon, steps)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("storage", ["numpy", pytest.param("torch", marks=needs_torch)])
def test_keys_whose_squares_vanish_are_refused(storage: str, center: bool) -> None:
    """Their scores are those of larger keys, and second moments that underflow do not show them."""
    K = stored(KEYS["any"], storage)
    options = {"size": 3, "scores": "leverage", "center": center, "causal": True, "renew_every": CHUNK}
    attend(K, 0 * K, K, **options)
    attend(K, 2.0**-440 * K, K, **options)
    with pytest.raises(ValueError, match="keys are so small that their squares vanish; expected larger ones"):
        attend(K, 2.0**-560 * K, K, **options)
