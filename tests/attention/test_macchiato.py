"""Latte-Macchiato: against explicit matrices, at its limits, streamed, packed and masked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import naive_attention as naive
from latent_calls import macchiato, window_attention
from levattn.attention import latte, repeated_mass
from libraries import over_storages, stored

pytestmark = pytest.mark.usefixtures("one_thread")

over_overlaps = pytest.mark.parametrize("overlap", ["mixture", "exclusive"])
T, L, d, D = 29, 4, 4, 3


def some(H: int = 2, G: int = 2, n: int = T, seed: int = 0, scale: float = 1.0) -> list[Any]:
    """q, k, V, q_logits, k_logits and gate of H heads of queries and G of keys."""
    rng = np.random.default_rng(seed)
    shapes = [(H, n, d), (G, n, d), (G, n, D), (H, n, L), (H, n, L), (H, n)]
    q, k, V, Q, K, gate = (rng.standard_normal(shape) for shape in shapes)
    return [q * scale, k, V, Q * scale, 2 * K * scale, gate * scale]


def explicit(arrays: Any, window: int, overlap: str, mask: Any = None, **options: Any) -> tuple[Any, Any]:
    """Outputs and weights of all heads of queries, by matrices."""
    q, k, V, Q, K, gate = arrays
    group = len(q) // len(k)
    exclusive = overlap == "exclusive"
    found = []
    for h in range(len(q)):
        own = h // group
        head = q[h], k[own], V[own], Q[h], K[h] if len(K) == len(q) else K[own], gate[h]
        flags = None if mask is None else mask[own]
        found.append(naive.macchiato(*head, window, exclusive=exclusive, mask=flags, **options))
    outputs, weights = zip(*found, strict=True)
    return np.stack(outputs), np.stack(weights)


def run(arrays: Any, storage: str = "numpy", *, mask: Any = None, **options: Any) -> Any:
    return macchiato(*(stored(x, storage) for x in arrays), mask=stored(mask, storage), **options)


MASKS: dict[str, Any] = {
    "all": None,
    "some": np.random.default_rng(9).random((2, T)) < 0.4,
    "padding": np.stack([np.arange(T) >= 9, np.arange(T) < 20]),
}
over_masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


@over_storages
@over_overlaps
@over_masks
@pytest.mark.parametrize("window", [1, 7, 60])
def test_it_is_the_explicit_matrix(storage: str, overlap: str, mask: Any, window: int) -> None:
    arrays = some()
    for offsets in (None, [0, 11, 11, T]):
        for softcap in (None, 1.5):
            options = {"offsets": offsets, "softcap": softcap}
            answer, _ = explicit(arrays, window, overlap, mask, **options)
            found = run(arrays, storage, window=window, overlap=overlap, mask=mask, **options)
            np.testing.assert_allclose(np.asarray(found), answer, atol=1e-13)


@over_storages
@over_overlaps
@pytest.mark.parametrize(("H", "G"), [(4, 2), (3, 1)])
def test_groups_of_queries_share_keys_and_values(storage: str, overlap: str, H: int, G: int) -> None:
    arrays = some(H, G)
    options = {"window": 6, "overlap": overlap, "mask": MASKS["some"][:G]}
    for logits in (arrays[4], arrays[4][:G]):  # of positions for each head of queries, or of keys
        arrays[4] = logits
        np.testing.assert_allclose(
            np.asarray(run(arrays, storage, **options)), explicit(arrays, **options)[0], atol=1e-13
        )


@over_overlaps
def test_one_head_may_be_under_several_masks(overlap: str) -> None:
    one, masks = [x[0] for x in some()], MASKS["some"]
    both = run(one, window=5, overlap=overlap, mask=masks)
    each = [run(one, window=5, overlap=overlap, mask=mask) for mask in masks]
    np.testing.assert_allclose(both, each, atol=1e-15)


# L12: the limits


@over_storages
@over_overlaps
def test_a_gate_of_infinity_is_the_window_exactly(storage: str, overlap: str) -> None:
    arrays = some(scale=100.0)
    arrays[5][:, ::2] = np.inf
    found = np.asarray(run(arrays, storage, window=4, overlap=overlap))
    alone = np.asarray(window_attention(*(stored(x, storage) for x in arrays[:3]), window=4))
    np.testing.assert_array_equal(found[:, ::2], alone[:, ::2])
    assert np.isfinite(found).all()


@over_storages
def test_a_gate_of_minus_infinity_is_latte(storage: str) -> None:
    arrays = some()
    arrays[5] = np.full((2, T), -np.inf)
    found = np.asarray(run(arrays, storage, window=4))
    answer = np.asarray(latte(*(stored(arrays[i], storage) for i in (3, 4, 2))))
    np.testing.assert_allclose(found, answer, atol=1e-14)
    exclusive = np.asarray(run(arrays, storage, window=4, overlap="exclusive"))
    np.testing.assert_allclose(exclusive[:, 4:], answer_delayed(arrays, 4), atol=1e-13)
    assert (exclusive[:, :4] == 0).all()  # latents have seen nothing, and the window is left out


def answer_delayed(arrays: Any, delay: int) -> Any:
    _, _, V, Q, K, _ = arrays
    rows = []
    for h in range(2):
        P = naive.latent_matrices(K[h], delay)
        rows.append([naive.softmax(Q[h, t]) @ P[:, t] @ V[h] for t in range(delay, T)])
    return np.array(rows)


@over_storages
@over_overlaps
@pytest.mark.parametrize("scale", [1, 30, 300])
def test_weights_sum_to_one_in_single_precision(storage: str, overlap: str, scale: float) -> None:
    arrays = [x.astype(np.float32) for x in some(n=200, scale=scale)]
    arrays[2] = np.broadcast_to(np.eye(200, dtype=np.float32), (2, 200, 200))
    weights = np.asarray(run(arrays, storage, window=16, overlap=overlap))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert (weights >= 0).all()
    assert (np.triu(weights, 1) == 0).all()


@over_overlaps
def test_exclusive_weights_do_not_overlap(overlap: str) -> None:
    arrays = some()
    arrays[2] = np.broadcast_to(np.eye(T), (2, T, T))
    arrays[3] += 50.0  # latents have all the weight that they can have
    weights = run(arrays, window=6, overlap=overlap)
    place = np.arange(T)
    near = weights[:, (place[:, None] >= place) & (place[:, None] - place < 6) & (place[:, None] >= 6)]
    assert (near.max() < 1e-15) == (overlap == "exclusive")


# Streaming


@over_overlaps
@pytest.mark.parametrize("window", [1, 6])
def test_a_state_is_a_ring_and_latents(overlap: str, window: int) -> None:
    arrays = some(4)
    options: dict[str, Any] = {"window": window, "overlap": overlap}
    _, state = run([x[:, :20] for x in arrays], **options, return_state=True)
    y, state = run([x[:, 20:] for x in arrays], **options, state=state, return_state=True)
    np.testing.assert_allclose(y, explicit(arrays, window, overlap)[0][:, 20:], atol=1e-13)
    ring = window - 1
    size = 2 * ring * (d + D) + 4 * L * (D + 2) + (4 * ring * L if overlap == "exclusive" else 0)
    assert (state.size, state.positions) == (size, T)
    held = [state.k, state.V, state.logits, state.latents.m, state.latents.s, state.latents.S]
    assert sum(math.prod(x.shape) for x in held if x is not None) == size


@over_overlaps
def test_a_mask_may_come_late(overlap: str) -> None:
    arrays = some()
    mask = np.ones((2, T), np.bool_)
    mask[:, 15:22] = False
    _, state = run([x[:, :10] for x in arrays], window=8, overlap=overlap, return_state=True)
    y = run([x[:, 10:] for x in arrays], window=8, overlap=overlap, mask=mask[:, 10:], state=state)
    np.testing.assert_allclose(y, explicit(arrays, 8, overlap, mask)[0][:, 10:], atol=1e-13)


def test_half_precision_is_kept_in_the_ring() -> None:
    arrays, parts, state = [x.astype(np.float16) for x in some()], [], None
    whole = run(arrays, window=8, overlap="exclusive")
    for t in range(T):
        step = [x[:, t : t + 1] for x in arrays]
        y, state = run(step, window=8, overlap="exclusive", state=state, return_state=True)
        parts.append(y)
        assert (y.dtype, state.k.dtype, state.V.dtype, state.logits.dtype) == (np.float16,) * 4
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=2e-3)


# The diagnostic


@over_storages
@over_masks
@pytest.mark.parametrize("window", [1, 6, 100])
def test_repeated_mass_is_that_of_the_matrix(storage: str, mask: Any, window: int) -> None:
    _, _, _, Q, K, gate = some()
    gate[0, 3], gate[1, 7] = np.inf, -np.inf
    for offsets in (None, [0, 11, 11, T]):
        answer = [
            naive.repeated_mass(Q[h], K[h], gate[h], window, None if mask is None else mask[h], offsets)
            for h in range(2)
        ]
        found = repeated_mass(
            *(stored(x, storage) for x in (Q, K, gate)), window=window, mask=stored(mask, storage), offsets=offsets
        )
        np.testing.assert_allclose(np.asarray(found), answer, atol=1e-13)


def test_repeated_mass_vanishes_far_beyond_the_window() -> None:
    rng = np.random.default_rng(5)
    Q, K = rng.standard_normal((4000, 8)), 0.1 * rng.standard_normal((4000, 8))
    gate = np.full(4000, 1.0)
    share = 1 - 1 / (1 + np.exp(Q - 1.0).sum(1))
    expected = share * np.minimum(1, 16 / (1 + np.arange(4000)))
    np.testing.assert_allclose(repeated_mass(Q, K, gate, window=16), expected, rtol=0.15)
    assert repeated_mass(Q[0:1], K[0:1], gate[0:1], window=16).shape == (1,)


def test_wrong_arguments_are_named() -> None:
    arrays = some()
    q, k, V, Q, K, gate = arrays
    _, state = run(arrays, window=5, return_state=True)
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (arrays, {"window": 0}, ValueError, "window is 0; expected"),
        (arrays, {"overlap": "both"}, ValueError, "overlap is 'both'; expected"),
        ([q, k, V, Q, K[..., :2], gate], {}, ValueError, "k_logits has shape .*expected L = 4"),
        ([q, k, V, Q, K, gate[:, :9]], {}, ValueError, "gate has shape .*expected T = 29"),
        ([q, k, V, Q, K, gate[:1].repeat(3, 0)], {}, ValueError, "gate has shape .*expected 2 heads"),
        (arrays, {"state": state.latents}, TypeError, "state is of type SoftmaxState; expected"),
        (arrays, {"window": 6, "state": state}, ValueError, "state is of window 5 .*expected 6"),
        (arrays, {"overlap": "exclusive", "state": state}, ValueError, "overlap 'mixture'; expected"),
        ([x[:1] for x in arrays], {"state": state}, ValueError, "state has .batch"),
        (arrays, {"state": state, "offsets": [0, T]}, ValueError, "expected one sequence"),
        (arrays, {"return_state": True, "offsets": [0, T]}, ValueError, "expected one sequence"),
        (arrays, {"storage": "strict", "state": state}, TypeError, "state holds arrays of"),
    ]
    for given, options, error, message in refused:
        with pytest.raises(error, match=message):
            run(given, **{"window": 5} | options)
    with pytest.raises(ValueError, match="k_logits has shape"):
        repeated_mass(Q, K[:, :5], gate, window=3)
    with pytest.raises(ValueError, match="q_logits has 3 heads and k_logits"):
        repeated_mass(Q[[0] * 3], K[[0, 0]], gate, window=3)
