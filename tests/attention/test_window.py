"""Softmax attention in a sliding window: against loops, in slices, with groups of queries.

Inside: slices of a window are made small.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import naive_attention as naive
from latent_calls import window_attention
from levattn import attention
from levattn.attention import Window
from levattn.attention.latent import window as latent_window
from libraries import over_storages, stored

pytestmark = pytest.mark.usefixtures("one_thread")


def some(T: int, H: int = 4, G: int = 2, d: int = 6, D: int = 5, dtype: Any = np.float64) -> Any:
    rng = np.random.default_rng(T + H)
    q, k, V = (rng.standard_normal((2, heads, T, width)) for heads, width in ((H, d), (G, d), (G, D)))
    return q.astype(dtype), k.astype(dtype), V.astype(dtype)


def expected(q: Any, k: Any, V: Any, window: int, mask: Any = None, **options: Any) -> Any:
    out = np.zeros((*q.shape[:3], V.shape[3]))
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        flags = None if mask is None else mask[b]
        for h in range(q.shape[1]):
            own = h // group
            out[b, h] = naive.window_matrix(q[b, h], k[b, own], window, mask=flags, **options) @ V[b, own]
    return out


@over_storages
@pytest.mark.parametrize("pairs", [1 << 20, 1000], ids=["whole", "slices"])
@pytest.mark.parametrize(("T", "window"), [(1, 1), (5, 3), (97, 8), (150, 64), (70, 1000), (64, 1), (0, 4)])
def test_the_window_is_that_of_the_loops(
    monkeypatch: pytest.MonkeyPatch, storage: str, pairs: int, T: int, window: int
) -> None:
    monkeypatch.setattr(latent_window, "_PAIRS", pairs)
    monkeypatch.setattr(latent_window, "_MANY_PAIRS", pairs)
    q, k, V = some(T)
    rng = np.random.default_rng(0)
    for softcap in (None, 2.0):
        for mask in (None, rng.random((2, T)) < 0.3):
            for offsets in (None, [0, T // 3, T // 3, T]):
                options = {"softcap": softcap, "offsets": offsets}
                Y = window_attention(
                    *(stored(x, storage) for x in (q, k, V)),
                    window=window,
                    mask=None if mask is None else stored(mask[:, None, :], storage),
                    **options,
                )
                np.testing.assert_allclose(np.asarray(Y), expected(q, k, V, window, mask, **options), atol=1e-13)


@over_storages
def test_a_batch_may_end_with_a_shorter_run(monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    for name in ("_PAIRS", "_MANY_PAIRS"):
        monkeypatch.setattr(latent_window, name, 300)  # of 140 pairs a sequence
    q, k, V = (np.concatenate([x, x[:1]]) for x in some(5))
    Y = window_attention(*(stored(x, storage) for x in (q, k, V)), window=3)
    np.testing.assert_allclose(np.asarray(Y), expected(q, k, V, 3), atol=1e-13)


@pytest.mark.parametrize(("H", "G"), [(1, 1), (6, 3), (6, 1), (2, 2)])
@over_storages
def test_groups_of_queries_read_their_head_of_keys(storage: str, H: int, G: int) -> None:
    q, k, V = some(40, H, G)
    Y = window_attention(*(stored(x, storage) for x in (q, k, V)), window=9, scale=0.3)
    np.testing.assert_allclose(np.asarray(Y), expected(q, k, V, 9, scale=0.3), atol=1e-13)


@pytest.mark.parametrize("scale", [1, 30, 300])
@over_storages
def test_weights_sum_to_one_at_any_scale(storage: str, scale: float) -> None:
    q, k, _ = some(60, dtype=np.float32)
    arrays = (stored(x, storage) for x in (q * np.float32(scale), k, np.ones((2, 2, 60, 3), np.float32)))
    np.testing.assert_allclose(np.asarray(window_attention(*arrays, window=16)), 1, atol=1e-6)


@over_storages
def test_masked_positions_have_no_place_and_are_not_read(storage: str) -> None:
    q, k, V = some(30)
    mask = np.ones((2, 1, 30), np.bool_)
    mask[:, :, 10:17] = False
    k[:, :, 10:17], V[:, :, 10:17] = np.nan, np.inf
    Y = window_attention(*(stored(x, storage) for x in (q, k, V)), window=4, mask=stored(mask, storage))
    Y = np.asarray(Y)
    assert np.isfinite(Y).all()
    assert (Y[:, :, 10:17] == 0).all()
    assert (Y[:, :, mask[0, 0]] != 0).any(-1).all()
    there = np.delete(np.arange(30), range(10, 17))
    alone = window_attention(*(x[:, :, there] for x in (q, k, V)), window=4)
    np.testing.assert_allclose(Y[:, :, there], alone, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [1e9, 1e18, 3e38, 1e100, 1e300])
def test_large_numbers_in_padding_reach_no_gradient(size: float) -> None:
    torch = pytest.importorskip("torch")
    kind = torch.float32 if size < 1e38 else torch.float64
    mask = torch.ones(1, 1, 10, dtype=torch.bool)
    mask[..., 7:] = False
    for seed in range(10):
        draw = torch.Generator().manual_seed(seed)
        arrays = [torch.randn((1, 2, 10, 3), generator=draw, dtype=kind) for _ in range(3)]

        def gradients(factor: float, arrays: Any = arrays) -> Any:
            leaves = [torch.where(mask[..., None], x, factor * x).requires_grad_() for x in arrays]
            Y = window_attention(*leaves, 4, mask=mask)
            return torch.autograd.grad(Y.square().sum(), leaves)

        for found, expected in zip(gradients(size), gradients(0.0), strict=True):
            assert torch.equal(found, expected)


@over_storages
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_window_and_sequence(storage: str, softcap: float | None, bad: float) -> None:
    q, k, V = some(40, 2, 1)
    mask = np.ones(40, np.bool_)
    mask[[18, 23]] = False
    options: dict[str, Any] = {"window": 5, "softcap": softcap, "offsets": [0, 20, 40], "mask": stored(mask, storage)}
    whole = np.asarray(window_attention(*(stored(x, storage) for x in (q, k, V)), **options))
    for place, rows in ((25, range(25, 30)), (17, (17, 19)), (18, ()), (38, (38, 39))):
        for channels, arrays in (([1], (k, V.copy())), (range(5), (k.copy(), V))):
            arrays[len(channels) == 1][:, :, place, 1] = bad
            Y = np.asarray(window_attention(*(stored(x, storage) for x in (q, *arrays)), **options))
            spoilt = np.zeros(Y.shape, np.bool_)
            for row in rows:
                spoilt[:, :, row, channels] = True
            np.testing.assert_array_equal(np.isnan(Y), spoilt)
            np.testing.assert_allclose(Y[~spoilt], whole[~spoilt], rtol=0, atol=1e-13)


def test_wrong_arguments_are_named() -> None:
    q, k, V = some(10)
    refused: list[tuple[tuple[Any, Any, Any], dict[str, Any], type[Exception], str]] = [
        ((q, k, V), {"window": 0}, ValueError, "window is 0; expected"),
        ((q, k, V), {"window": True}, TypeError, "window is True; expected"),
        ((q, k, V), {"scale": math.inf}, ValueError, "scale is inf; expected"),
        ((q, k, V), {"scale": "1"}, TypeError, "scale is '1'; expected"),
        ((q, k, V), {"softcap": -1}, ValueError, "softcap is -1; expected"),
        ((q, k[..., :3], V), {}, ValueError, "k has shape .*expected d = 6"),
        ((q, k[:, :, :3], V), {}, ValueError, "k has shape .*expected T = 10"),
        ((q[:, :3], k, V), {}, ValueError, "q has 3 heads and k has 2"),
        ((q, k, V[:, [0, 1, 1]]), {}, ValueError, "k has 2 heads and V has 3"),
        ((q[:, :0], k, V), {}, ValueError, r"q, k, V have \[0, 2, 2\] heads; expected at least one"),
        ((q, "k", V), {}, TypeError, "k is of type str"),
    ]
    for arrays, options, error, message in refused:
        with pytest.raises(error, match=message):
            window_attention(*arrays, **{"window": 3} | options)


def test_a_window_holds_numbers_of_python() -> None:
    """Sizes of few bits would overflow, and a softcap of float64 would give logits of float32 another dtype."""
    window = Window(np.uint8(200), overlap="exclusive", scale=np.float32(0.5), softcap=np.float64(3))
    assert [type(x) for x in (window.size, window.scale, window.softcap)] == [int, float, float]
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((3, 400, 4), dtype=np.float32)
    logits = (*rng.standard_normal((2, 400, 3), dtype=np.float32), np.zeros(400, np.float32))
    same = Window(200, overlap="exclusive", scale=0.5, softcap=3.0)
    np.testing.assert_array_equal(
        attention.macchiato(*arrays, logits, window), attention.macchiato(*arrays, logits, same)
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"size": 0}, ValueError, "window is 0; expected at least 1"),
        ({"size": 2.0}, TypeError, "window is 2.0; expected a whole number"),
        ({"overlap": "both"}, ValueError, "overlap is 'both'; expected 'mixture' or 'exclusive'"),
        ({"scale": math.inf}, ValueError, "scale is inf; expected a finite number"),
        ({"softcap": -2}, ValueError, "softcap is -2; expected a finite number above 0"),
    ],
)
def test_wrong_options_of_a_window_are_named(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Window(**{"size": 8} | options)
