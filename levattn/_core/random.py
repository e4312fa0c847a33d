"""Counter-based randomness: words that are a pure function of a seed, a stream, a row and a column.

Nothing is drawn in sequence. So a row has the same bucket, sign or normal in every chunk, thread, process and array
library. Four rows share one counter, and each takes a word of it. The generator is Philox4x32-10 (Salmon, Moraes, Dror
and Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.types import Float64

Words = npt.NDArray[np.uint32]

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
INCREMENTS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_TOGETHER = 1 << 16  # rows whose uniform numbers are drawn together, for memory


def as_seed(rng: Any, name: str = "rng") -> int:
    """Return the seed below 2⁶⁴ of None (0), of an integer, or of a Generator (its next seed), or raise."""
    if rng is None:
        return 0
    if isinstance(rng, np.random.Generator):
        return int(rng.integers(2**64, dtype=np.uint64))
    if isinstance(rng, bool) or not isinstance(rng, int | np.integer):
        raise TypeError(f"{name} is {rng!r}; expected a seed, a numpy.random.Generator, or None for the seed 0")
    if not 0 <= rng < 2**64:
        raise ValueError(f"{name} is {rng}; expected a seed of at least 0 and below 2**64")
    return int(rng)


def philox(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Words, Words, Words, Words]:
    """Return the four words of each counter, itself four words, under a seed of 64 bits."""
    a, b, c, d = (np.asarray(word, np.uint64) for word in np.broadcast_arrays(*counter))
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(ROUNDS):
        p, q = a * np.uint64(MULTIPLIERS[0]), c * np.uint64(MULTIPLIERS[1])
        a, c = (q >> _HALF) ^ b ^ np.uint64(key0), (p >> _HALF) ^ d ^ np.uint64(key1)
        b, d = q & _LOW, p & _LOW
        key0, key1 = (key0 + INCREMENTS[0]) & 0xFFFFFFFF, (key1 + INCREMENTS[1]) & 0xFFFFFFFF
    found = tuple(word.astype(np.uint32) for word in (a, b, c, d))
    return found[0], found[1], found[2], found[3]


def words(seed: int, stream: int, start: int, count: int, columns: int) -> Words:
    """Return a random word for each of the rows ``start:start + count`` and each of the columns from 0 on.

    Streams separate the draws of different distributions, or of different parts of one, under the same seed.
    """
    first, last = start >> 2, (start + count + 3) >> 2
    groups = np.arange(first, last, dtype=np.uint64)[:, None]
    column = np.arange(columns, dtype=np.uint64)[None, :]
    found = philox((groups & _LOW, groups >> _HALF, column, stream), seed)
    each = np.stack(found, axis=1).reshape(4 * (last - first), columns)
    return np.ascontiguousarray(each[start - 4 * first :][:count])


def signs(drawn: Words) -> npt.NDArray[np.int8]:
    """Return 1 or −1 for each word, by its lowest bit."""
    return (1 - 2 * (drawn & np.uint32(1)).astype(np.int8)).astype(np.int8)


def below(drawn: Words, size: int) -> npt.NDArray[np.int64]:
    """Return a number below `size` for each word, by its other 31 bits; each has a chance of at most 1/size + 2⁻³¹."""
    return ((drawn >> np.uint32(1)).astype(np.uint64) * np.uint64(size) >> np.uint64(31)).astype(np.int64)


def normals(seed: int, stream: int, start: int, count: int, columns: int) -> Float64:
    """Return independent standard normals for some rows and the columns from 0 on (Box and Muller).

    Columns 2c and 2c + 1 share the two words in their places. The largest possible magnitude is 6.8.
    """
    drawn = words(seed, stream, start, count, columns + columns % 2)
    uniform = (drawn + 0.5) * 2.0**-32
    radius = np.sqrt(-2 * np.log(uniform[:, 0::2]))
    angle = 2 * np.pi * uniform[:, 1::2]
    out = np.empty(drawn.shape)
    np.multiply(radius, np.cos(angle), out=out[:, 0::2])
    np.multiply(radius, np.sin(angle), out=out[:, 1::2])
    return out[:, :columns]


def uniforms(seed: int, stream: int, start: int, count: int) -> Float64:
    """Return independent uniform numbers in [0, 1), of 53 bits, for some rows."""
    out = np.empty(count)
    for at in range(0, count, _TOGETHER):
        part = out[at : at + _TOGETHER]
        high, low = words(seed, stream, start + at, len(part), 2).astype(np.uint64).T
        part[:] = ((high << np.uint64(21)) | (low >> np.uint64(11))) * 2.0**-53
    return out
