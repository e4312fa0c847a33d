"""Keys that come as the cache of a model: the keys of each layer, and never the values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import levattn

torch = pytest.importorskip("torch")

LAYERS, HEADS, N, D = 3, 2, 40, 4


def keys_and_values() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return tuple(torch.from_numpy(rng.standard_normal((LAYERS, 1, HEADS, N, D))) for _ in range(2))


def of_transformers(K: Any, V: Any) -> Any:
    cache = pytest.importorskip("transformers").DynamicCache()
    for layer, (keys, values) in enumerate(zip(K, V, strict=True)):
        cache.update(keys, values, layer)
    return cache


CACHES = {
    "transformers": of_transformers,
    "key_cache": lambda K, V: SimpleNamespace(key_cache=list(K), value_cache=list(V)),
    "pairs": lambda K, V: tuple(zip(K, V, strict=True)),
    "pairs of numpy": lambda K, V: tuple(zip(K.numpy(), V.numpy(), strict=True)),
}


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_stands_for_the_keys_of_its_layers(kind: str) -> None:
    K, V = keys_and_values()
    cache = CACHES[kind](K, V)
    found = levattn.universal_set(cache, 0.3)
    assert found.batch == (LAYERS, 1, HEADS)
    np.testing.assert_array_equal(found.mask, levattn.universal_set(K, 0.3).mask)
    np.testing.assert_array_equal(levattn.leverage_scores(cache), levattn.leverage_scores(K))


def test_one_pass_takes_a_cache() -> None:
    K, V = keys_and_values()
    state = levattn.StreamingUniversalSet(0.3).update(of_transformers(K, V))
    assert state.result().batch == (LAYERS, 1, HEADS)


def test_layers_of_several_shapes_and_empty_caches_are_refused() -> None:
    K, V = keys_and_values()
    cache = of_transformers(K, V)
    cache.layers[1].keys = cache.layers[1].keys[..., :7, :]
    with pytest.raises(ValueError, match=r"K is a DynamicCache whose layers have shapes .* as K\.layers\[i\]\.keys"):
        levattn.universal_set(cache, 0.3)
    with pytest.raises(ValueError, match="K is a DynamicCache that holds no keys"):
        levattn.universal_set(type(cache)(), 0.3)
    with pytest.raises(ValueError, match=r"holds no keys in layers \[0, 1\].*K\.key_cache\[i\]"):
        levattn.leverage_scores(SimpleNamespace(key_cache=[[], []]))


@pytest.mark.parametrize(
    ("K", "message"),
    [
        ("keys.npy", r"K = levattn\.open_keys\('keys\.npy'\)"),
        (SimpleNamespace(shape=(2, 2), to_numpy=lambda: np.eye(2)), r"K\.to_numpy\(\)"),
    ],
)
def test_what_is_no_array_comes_with_the_way_to_one(K: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        levattn.universal_set(K, 0.1)
