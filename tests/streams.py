"""Keys that try a stream, and what tests of streams share."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from strategies import Float, integer_deficient

BLOCK = 2048  # rows that the library sums at a time, from the first key on


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


def prefixes(n: int, d: int, late: int) -> dict[str, Callable[[np.random.Generator], Float]]:
    """Named keys that try whatever reads a prefix: from row `late` on they are of another size, or of more rank."""
    rows = np.arange(n)[:, None]
    after, first = rows >= late, np.eye(d)[0]

    def tailed(rng: np.random.Generator) -> Float:
        return heavy_tailed(rng, n, d)

    def conditioned(small: float) -> Callable[[np.random.Generator], Float]:
        return lambda rng: turned(rng, tailed(rng) * np.geomspace(1, small, d))

    def changing(before: Any, then: Any) -> Callable[[np.random.Generator], Float]:
        return lambda rng: tailed(rng) * np.where(after, then, before)

    return {
        "gaussian": lambda rng: rng.standard_normal((n, d)),
        "heavy-tailed": tailed,
        "copies": lambda rng: heavy_tailed(rng, 7, d)[rng.integers(0, 7, n)],
        "ties": lambda _: np.tile(np.eye(d), (n // d + 1, 1))[:n],
        "growing": lambda rng: tailed(rng) * np.exp(rows * 30 / n),
        "shrinking": lambda rng: tailed(rng) * np.exp(-rows * 30 / n),
        "one-huge-row": lambda rng: tailed(rng) * np.where(rows == late, 1 + (1e9 - 1) * first, 1),
        "rank-grows": changing(first, 1),
        "rank-grows-turned": lambda rng: (
            np.rint(tailed(rng) * 64) * np.where(after, 1, first) @ (rng.integers(-3, 4, (d, d)) + 7 * np.eye(d))
        ),
        "deficient": lambda rng: integer_deficient(rng, n, d, 2),
        "zeros-first": changing(0, 1),
        "zero-columns": changing(first, 1 - np.eye(d)[1]),
        "all-zero": lambda _: np.zeros((n, d)),
        "conditioned-1e6": conditioned(1e-6),
        "conditioned-1e8": conditioned(1e-8),
        "conditioned-1e12": conditioned(1e-12),
        "near-deficient": lambda rng: near_deficient(tailed(rng)),
        "scale-1e150": lambda rng: tailed(rng) * 1e150,
        "scale-1e300": lambda rng: tailed(rng) * 1e300,
        "scale-1e-300": lambda rng: tailed(rng) * 1e-300,
        "columns-1e200": lambda rng: tailed(rng) * 10.0 ** np.resize([0, -200, 200], d),
        "tiny-then-huge": changing(1e-150, 1e150),
        "huge-then-tiny": changing(1e150, 1e-150),
        "tiny-column-late": changing(1 - np.eye(d)[-1], 10.0 ** (-200 * np.eye(d)[-1])),
        "huge-column-late": changing(1 - np.eye(d)[-1], 10.0 ** (200 * np.eye(d)[-1])),
    }


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
