"""Keys of KV caches: caches of transformers, and tuples of (keys, values), one pair for each layer."""

from __future__ import annotations

from typing import Any

import array_api_compat

_LEAST_AXES = 3  # of the keys of a layer: heads, positions, columns


def cached_keys(K: Any) -> Any | None:
    """Return the keys of a cache as one array (layers, ..., n, d), None if K is no cache; raise if layers differ."""
    layers = layers_of(K)
    if layers is None:
        return None
    one = "K.layers[i].keys" if hasattr(K, "layers") else "K.key_cache[i]" if hasattr(K, "key_cache") else "K[i][0]"
    kind = type(K).__name__
    if not layers or any(getattr(keys, "ndim", 0) < _LEAST_AXES for keys in layers):
        empty = [i for i, keys in enumerate(layers) if getattr(keys, "ndim", 0) < _LEAST_AXES]
        raise ValueError(
            f"K is a {kind} that holds no keys{f' in layers {empty}' if layers else ''}; expected the cache of a "
            f"model that has read its tokens. Give one layer as {one}"
        )
    for name, figure in (("shapes", lambda keys: tuple(keys.shape)), ("devices", array_api_compat.device)):
        found = list(dict.fromkeys(map(figure, layers)))
        if len(found) > 1:
            raise ValueError(
                f"K is a {kind} whose layers have {name} {', '.join(map(str, found))}; expected all alike. Give one "
                f"layer as {one}"
            )
    return array_api_compat.array_namespace(*layers).stack(layers)


def layers_of(K: Any) -> list[Any] | None:
    """Return the keys of each layer of a cache, or None if K is no cache."""
    if hasattr(K, "layers") and hasattr(K, "get_seq_length"):
        return [getattr(layer, "keys", None) for layer in K.layers]
    if hasattr(K, "key_cache"):
        return list(K.key_cache)
    if isinstance(K, tuple) and K and all(_is_pair(item) for item in K):
        return [keys for keys, *_ in K]
    return None


def _is_pair(item: Any) -> bool:
    """Tell whether an item is (keys, values), two arrays with the same positions."""
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and all(getattr(array, "ndim", 0) >= _LEAST_AXES for array in item)
        and tuple(item[0].shape[:-1]) == tuple(item[1].shape[:-1])
    )
