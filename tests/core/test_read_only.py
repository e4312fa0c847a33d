"""Arrays that cannot be written, or of swapped bytes: every public entry point reads them as plain arrays.

Inside: what was compiled is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import levattn
import specializations
import strategies
from levattn import attention, sketch, states
from libraries import needs_jax, stored

N, D = 60, 4
# name -> shapes of the arrays, and a function of them; the result is made of arrays
ENTRIES: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]] = {
    "leverage_scores": (((N, D),), levattn.leverage_scores),
    "leverage_scores, centered": (((2, N, D),), lambda K: levattn.leverage_scores(K, center=True, relative_ridge=0.1)),
    "universal_set": (((N, D),), lambda K: levattn.universal_set(K, 0.1).mask),
    "universal_set, f": (((N, D),), lambda K: levattn.universal_set(K, 0.1, f=levattn.Huber()).scores),
    "universal_set, coverage": (
        ((N, D), (40, D)),
        lambda K, Q: levattn.covering_set(K, Q, 0.1, coverage=0.8).mask,
    ),
    "heavy_attention": (
        ((N, D), (N, D), (N, 2)),
        lambda Q, K, V: levattn.heavy_attention(Q, K, 0.2).apply(V)[0],
    ),
    "heavy_attention, causal": (
        ((N, D), (N, D), (N, 2)),
        lambda Q, K, V: levattn.causal_heavy_attention(Q, K, 0.2).apply(V)[0],
    ),
    "heavy_attention, softmax": (
        ((9, D), (N, D)),
        lambda Q, K: levattn.heavy_attention(Q, K, 0.2, f=levattn.Softmax(9.0)).normalizers,
    ),
    "CausalUniversalSet": (
        ((N, D), (5, D)),
        lambda K, Q: levattn.CausalUniversalSet(0.2).update(K).heavy(Q).scores,
    ),
    "expected_scores": (((N, D), (30, D)), levattn.expected_scores),
    "expected_scores, mean": (((N, D), (30, D)), lambda K, Q: levattn.expected_scores(K, Q, f=levattn.Fair())),
    "expected_scores, normal": (((N, D), (D,)), lambda K, mean: levattn.expected_scores(K, (mean, np.eye(D)))),
    "sensitivities": (((N, D),), lambda K: levattn.sensitivities(K, 4).upper),
    "exact_sensitivities": (((9, 2),), lambda K: levattn.exact_sensitivities(K, levattn.Softmax(1.0)).upper),
    "lewis_weights": (((N, D),), lambda K: levattn.lewis_weights(K, 4)),
    "group_leverage": (((N, D),), lambda K: levattn.group_leverage(K, np.arange(N) // 6)),
    "near_duplicates": (((N, D),), levattn.near_duplicates),
    "online_leverage_scores": (((N, D),), levattn.online_leverage_scores),
    "StreamingUniversalSet": (
        ((N, D), (N, D)),
        lambda A, B: levattn.StreamingUniversalSet(0.1).update(A).update(B).result().indices,
    ),
    "StreamingRowSample": (
        ((N, D), (N, D)),
        lambda A, B: levattn.StreamingRowSample(20).update(A).update(B).result().weights,
    ),
    "sketch": (((N, D),), lambda K: sketch.Sketch(sketch.CountSketch(20)).apply(K)),
    "Moments": (((N, D), (N,)), lambda K, w: states.Moments(D).update(K, weights=w**2).result()),
    "SoftmaxState": (((N, 3), (N, 2)), lambda L, V: states.SoftmaxState(3, 2).update(L, V).result()),
    "latte": (((N, 3), (N, 3), (N, 2)), attention.latte),
    "window_attention": (((2, N, D), (1, N, D), (1, N, 2)), lambda *x: attention.window_attention(*x, window=5)),
    "macchiato": (
        ((2, N, D), (1, N, D), (1, N, 3), (2, N, D), (2, N, D), (2, N)),
        lambda *x: attention.macchiato(*x[:3], x[3:], window=6),
    ),
    "tssa": (((3, N, 2), (3,)), attention.tssa),
    "tssa, a number": (((3, N, 2),), lambda W: attention.tssa(W, 0.3)),
    "memberships": (((3, N, 2), (3,)), attention.memberships),
    "rg_lru": (((N, D), (N, D), (N, D), (D,)), attention.rg_lru),
    "causal_conv": (((N, D), (D, 3), (D,)), attention.causal_conv),
    "rotate_values": (((N, D), (N,)), attention.rotate_values),
    "fit_slots": (((N, D), (N, D), (N, 2)), lambda *x: attention.fit_slots(*x, 9).values),
    **{
        f"pruned_attention, {scores}": (
            ((2, N, D), (1, N, D), (1, N, 2)),
            lambda *x, scores=scores: attention.causal_pruned_attention(*x, attention.Selection(20, scores=scores)),
        )
        for scores in ("residual", "expected", "leverage")
    },
    "pruned_attention": (((2, N, D), (1, N, D), (1, N, 2)), lambda *x: attention.pruned_attention(*x, 20)),
    "pruned_coverage": (
        ((N, D), (N, D), (N, 2)),
        lambda *x: attention.pruned_coverage(*x, 0.3, coverage=0.8).error,
    ),
}


def _arrays(name: str) -> list[Any]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape) for shape in ENTRIES[name][0]]


@pytest.mark.parametrize("kind", ["read-only", "memmap", pytest.param("jax", marks=needs_jax)])
@pytest.mark.parametrize("name", ENTRIES)
def test_arrays_that_cannot_be_written_are_read(name: str, kind: str) -> None:
    arrays, function, error = _arrays(name), ENTRIES[name][1], 1e-12
    if kind == "jax":
        given = [stored(array, "jax") for array in arrays]
        arrays, error = [np.array(array) for array in given], 1e-5  # of float32, unless jax is told otherwise
    else:
        given = [strategies.LAYOUTS[kind](array) for array in arrays]
        assert not any(array.flags.writeable for array in given)
    expected = np.asarray(function(*arrays))
    compiled = specializations.here()
    found = np.asarray(function(*given))
    np.testing.assert_allclose(found, expected, rtol=error)
    assert specializations.here() == compiled
    for array, plain in zip(given, arrays, strict=True):
        np.testing.assert_array_equal(array, plain)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_order_of_bytes_changes_no_bit(name: str) -> None:
    arrays, function = _arrays(name), ENTRIES[name][1]
    swapped = [array.astype(array.dtype.newbyteorder()) for array in arrays]
    np.testing.assert_array_equal(np.asarray(function(*swapped)), np.asarray(function(*arrays)))
