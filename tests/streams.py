"""Keys that try a stream, and what tests of streams share."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from strategies import Float


def named_rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def heavy_tailed(rng: np.random.Generator, n: int, d: int) -> Float:
    """Gaussian rows of heavy-tailed length."""
    return np.asarray(rng.standard_normal((n, d)) * np.clip(np.abs(rng.standard_cauchy((n, 1))), 1e-2, 1e3))


def turned(rng: np.random.Generator, K: Float) -> Float:
    return K @ np.asarray(np.linalg.qr(rng.standard_normal((K.shape[1],) * 2))[0])


def near_deficient(K: Float) -> Float:
    """The keys with a last column that is all but the sum of the others."""
    K = K.copy()
    K[:, -1] = K[:, :-1].sum(axis=1) + 1e-10 * K[:, -1]
    return K


def in_chunks(state: Any, K: Any, cuts: Sequence[int] = (), *, mask: Any = None, payload: Any = None) -> Any:
    """Update a state with all keys, in chunks that end at the cuts; a payload has the keys' axes first."""
    lead = (slice(None),) * (K.ndim - 2)
    for low, high in pairwise([0, *cuts, K.shape[-2]]):
        rows: Any = (*lead, slice(low, high)) if lead else slice(low, high)
        present, held = (None if array is None else array[rows] for array in (mask, payload))
        chunk = K[(*lead, slice(low, high), slice(None))]
        assert state.update(chunk, mask=present, payload=held) is state
    return state


def check_error(error: BaseException, *words: str) -> None:
    """The message contains all words, whatever their case, and is a sentence with a remedy."""
    for word in words:
        assert re.search(word, str(error), re.IGNORECASE), f"{word!r} is not in: {error}"
    assert len(str(error)) > 25
