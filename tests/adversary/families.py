"""Hostile keys, queries and values, each from a family and a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Generator = np.random.Generator


@dataclass(frozen=True, eq=False)
class Case:
    """What a route is tried on. Keys, queries and values are float64 that the storage type holds."""

    family: str
    seed: int
    keys: Float
    queries: Float
    values: Float
    epsilon: float
    mask: NDArray[np.bool_] | None = None
    storage: str = "float64"
    layout: str = "C"

    @property
    def K(self) -> Any:
        return stored(self.keys, self.storage, self.layout)

    @property
    def Q(self) -> Any:
        return stored(self.queries, self.storage, self.layout)

    @property
    def V(self) -> Any:
        return stored(self.values, self.storage, self.layout)

    @property
    def present(self) -> Float:
        """The keys, zeros in the place of those that the mask leaves out."""
        return self.keys if self.mask is None else np.where(self.mask[:, None], self.keys, 0.0)


def stored(values: Any, storage: str, layout: str) -> Any:
    """The values in a storage type and a memory layout."""
    import ml_dtypes
    import numpy as np

    x = np.ascontiguousarray(values).astype(ml_dtypes.bfloat16 if storage == "bfloat16" else storage)
    if layout == "F":
        return np.asfortranarray(x)
    if layout == "strided":
        wide = np.full((2 * x.shape[0], 3 * x.shape[1]), 77, x.dtype)
        wide[::2, 1::3] = x
        return wide[::2, 1::3]
    if layout == "reversed":
        return np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1]
    return x


@dataclass(frozen=True, eq=False)
class Made:
    """Keys of a family that names more than them: an ε, and queries that its keys are hostile to.

    epsilon: None to draw one. queries: of keys as they are stored; they take the first places. values: None to draw
    them.
    """

    keys: Float
    epsilon: float | None = None
    queries: Callable[[Float], Float] = lambda K: np.zeros((0, K.shape[1]))
    values: Float | None = None


LAYOUTS = ("C", "F", "strided", "reversed")
STORAGES = ("float64", "float32", "float16", "bfloat16")
_LARGEST = {"float64": 1.7e308, "float32": 3.4e38, "float16": 6.5e4, "bfloat16": 3.3e38}


def rounded(values: Any, storage: str) -> Float:
    """The nearest values that the storage type holds, none of them infinite."""
    limit = _LARGEST[storage]
    return np.asarray(stored(np.clip(values, -limit, limit), storage, "C").astype(np.float64))


# -- keys ------------------------------------------------------------------------------------------------------------

_RATIONAL = (1.0, 0.5, 1 / 3, 0.25, 0.2, 0.1, 2 / 3, 0.75, 0.01, 0.9, 1e-3)


def _shape(rng: Generator, most: int = 12) -> tuple[int, int]:
    return int(rng.integers(1, most + 1)), int(rng.integers(1, 6))


def _small(rng: Generator, n: int, d: int, bound: int = 3) -> Float:
    return rng.integers(-bound, bound + 1, (n, d)).astype(np.float64)


def _size(rng: Generator, span: float, *shape: int) -> Float:
    """Powers of two, or random numbers, over many magnitudes."""
    exponent = rng.uniform(-span, span, shape)
    return 2.0 ** np.rint(exponent) if rng.random() < 0.6 else 2.0**exponent


def zero_columns(rng: Generator) -> Float:
    n, d = _shape(rng)
    K = _small(rng, n, d) * (rng.random(d) < 0.6)
    if rng.random() < 0.5:  # but for one row
        K[rng.integers(n), rng.integers(d)] = rng.choice([1.0, -2.0, 1e-20, 1e20, 3e-8])
    return K


def late_columns(rng: Generator) -> Float:
    """Columns that no key reaches before some row, and then far larger or smaller ones."""
    n, d = _shape(rng)
    K = _small(rng, n, d)
    for c in range(d):
        if rng.random() < 0.7:
            K[: rng.integers(0, n + 1), c] = 0
            K[:, c] *= float(_size(rng, 60, 1)[0])
    return K


def graded_rows(rng: Generator) -> Float:
    n, d = _shape(rng)
    span = float(rng.choice([10, 30, 60, 200, 480]))
    K = rng.standard_normal((n, d)) if rng.random() < 0.6 else _small(rng, n, d)
    return K * _size(rng, span, n, 1)


def graded_columns(rng: Generator) -> Float:
    n, d = _shape(rng)
    span = float(rng.choice([10, 60, 480, 900]))
    K = rng.standard_normal((n, d)) if rng.random() < 0.5 else _small(rng, n, d)
    K = K * _size(rng, span, 1, d)
    if rng.random() < 0.3:
        K = K * _size(rng, 40, n, 1)
    return K


def ulps_apart(rng: Generator) -> Float:
    """Columns or rows that differ in their last bits."""
    n, d = _shape(rng)
    K = rng.standard_normal((n, d))
    gap = float(rng.choice([2.0**-52, 2.0**-50, 1e-13, 1e-10, 1e-6]))
    if d > 1 and rng.random() < 0.7:
        a, b = rng.choice(d, 2, replace=False)
        K[:, a] = K[:, b] * (1 + gap * rng.integers(-2, 3, n))
    else:
        K[:] = K[0] * (1 + gap * rng.integers(-2, 3, (n, d)))
    return K


def dependent_integers(rng: Generator) -> Float:
    n, d = _shape(rng)
    r = int(rng.integers(1, d + 1))
    K = (_small(rng, n, r, 4) @ _small(rng, r, d, 2)).astype(np.float64)
    if rng.random() < 0.4:
        K[rng.integers(n), rng.integers(d)] += float(rng.choice([1, 1e-9, 2.0**-40, 2.0**-52, 1e9]))
    if rng.random() < 0.3:
        K[:, rng.integers(d)] = 0
    return K


def ties(rng: Generator) -> Made:
    """Scores that are exactly ε, as far as ε has a float: copies, Hadamard rows, blocks of one direction."""
    kind = rng.integers(4)
    d = int(rng.integers(1, 5))
    if kind == 0:
        m = int(rng.integers(1, 6))
        return Made(np.repeat(np.eye(d) * _size(rng, 20, 1, d), m, axis=0), 1 / m)
    if kind == 1:
        H = np.array([[1.0]])
        for _ in range(rng.integers(1, 4)):
            H = np.block([[H, H], [H, -H]])
        d = int(rng.integers(1, len(H) + 1))
        return Made(H[:, rng.permutation(len(H))[:d]] * _size(rng, 30, 1, d), d / len(H))
    if kind == 2:  # one direction with squares 9 : 16, 1 : 3, ...
        a, b, epsilon = [(3.0, 4.0, 0.36), (1.0, 1.0, 0.5), (1.0, 3.0, 0.1), (4.0, 3.0, 0.64), (2.0, 4.0, 0.2)][
            int(rng.integers(5))
        ]
        K = np.kron(np.eye(d), [[a], [b]]) @ _unimodular(rng, d)
        return Made(K, epsilon)
    K = np.vstack([np.eye(d)] * 2)
    K[:d] *= 2.0 ** int(rng.integers(-3, 4))
    K = K @ _unimodular(rng, d)
    return Made(K, float(K[0] @ np.linalg.solve(K.T @ K, K[0])))


def _unimodular(rng: Generator, d: int) -> Float:
    A = np.tril(rng.integers(-2, 3, (d, d)), -1) + np.eye(d)
    return (A @ A.T[rng.permutation(d)]).astype(np.float64)


def extreme(rng: Generator) -> Float:
    """Denormal, near overflow, or both."""
    n, d = _shape(rng)
    K = rng.standard_normal((n, d)) if rng.random() < 0.5 else _small(rng, n, d)
    kind = rng.integers(5)
    if kind == 0:
        return K * 2.0 ** float(rng.choice([-1074, -1070, -1050, -1022, -540]))
    if kind == 1:
        return np.clip(K * 2.0 ** float(rng.choice([1021, 1000, 512, 510])), -1.7e308, 1.7e308)
    scale = 2.0 ** rng.choice([-1074.0, -1022, -500, 0, 500, 1020], (n, 1) if kind == 2 else (1, d))
    if kind == 4:
        scale = 2.0 ** rng.choice([-1074.0, -540, -100, 0, 100, 540, 1020], (n, d))
    return np.clip(K * scale, -1.7e308, 1.7e308)


def duplicated(rng: Generator) -> Float:
    n, d = _shape(rng)
    K = rng.standard_normal((n, d)) if rng.random() < 0.5 else _small(rng, n, d)
    K = K[rng.integers(0, max(n // 2, 1), n)]
    return K * rng.choice([1.0, -1, 2, 0, 3, 2.0**-30], (n, 1)) if rng.random() < 0.5 else K


def few_rows(rng: Generator) -> Float:
    d = int(rng.integers(2, 9))
    n = int(rng.integers(1, d + 1))
    K = rng.standard_normal((n, d)) if rng.random() < 0.6 else _small(rng, n, d)
    if rng.random() < 0.6:
        K = K * _size(rng, float(rng.choice([5, 30, 60])), n, 1)
    if n > 1 and rng.random() < 0.3:
        K[-1] = K[0] * 3 - (K[1] if n > 2 else 0)
    return K


def nearly_dependent(rng: Generator) -> Float:
    """A key that leaves the space of the others by a small part of its size."""
    n, d = _shape(rng)
    n, d = max(n, 2), max(d, 2)
    r = int(rng.integers(1, d))
    K = rng.standard_normal((n, r)) @ rng.standard_normal((r, d))
    if rng.random() < 0.5:
        K = _small(rng, n, r) @ _small(rng, r, d)
    j = rng.integers(n)
    K[j] += 10.0 ** rng.uniform(-17, -1) * rng.standard_normal(d) * np.linalg.norm(K[j])
    if rng.random() < 0.3:
        K = K * _size(rng, 30, n, 1)
    return K


def mixed(rng: Generator) -> Float:
    """Rows of several families."""
    d = int(rng.integers(1, 6))
    parts = []
    for _ in range(int(rng.integers(2, 4))):
        K = keys_of(str(rng.choice([f for f in FAMILIES if f not in _UNMIXED])), rng)
        K = np.pad(K, ((0, 0), (0, max(d - K.shape[1], 0))))[:, rng.permutation(max(d, K.shape[1]))[:d]]
        parts.append(K[:6])
    return np.vstack(parts)[rng.permutation(sum(map(len, parts)))]


def many(rng: Generator) -> Float:
    """Thousands of rows, most of them multiples of a few, and one with a direction of its own."""
    n, d = int(rng.choice([300, 2048, 2049, 4100, 6144])), int(rng.integers(2, 5))
    r = int(rng.integers(1, d + 1))
    base = _small(rng, int(rng.integers(r, r + 3)), r) @ _small(rng, r, d, 2)
    if rng.random() < 0.5:
        base[:, rng.integers(d)] = 0
    K = base[rng.integers(0, len(base), n)] * rng.integers(-4, 5, (n, 1))
    for _ in range(int(rng.integers(1, 4))):
        j = rng.integers(n)
        K[j] = _small(rng, 1, d)[0] if rng.random() < 0.5 else 0
        K[j, rng.integers(d)] = float(rng.choice([1, 1e-6, 1e6, 2.0**-30, 2.0**40, 1e-12, 7]))
    if rng.random() < 0.3:
        K = K * _size(rng, 40, 1, d)
    return K


def wide(rng: Generator) -> Float:
    """64 to 130 columns in blocks of their own, of small integers: some are empty, dependent, or met by one row."""
    d = int(rng.choice([64, 65, 100, 128, 130]))
    n = int(rng.integers(d // 2, d + 40))
    K = np.zeros((n, d))
    columns, free = rng.permutation(d), rng.permutation(n)
    start = 0
    while start < d:
        block = columns[start : start + rng.integers(1, 6)]
        start += len(block)
        rows, free = np.split(free, [min(int(rng.integers(0, 2 * len(block) + 1)), len(free))])
        K[np.ix_(rows, block)] = _small(rng, len(rows), len(block))
        if len(block) > 1 and rng.random() < 0.3:
            K[:, block[0]] = K[:, block[1]] * float(rng.choice([1, -2, 2.0**-20]))
    if rng.random() < 0.5:
        K = K * _size(rng, float(rng.choice([10, 40])), 1, d)
    if rng.random() < 0.3:
        K = K * _size(rng, 20, n, 1)
    return K


def plain(rng: Generator) -> Float:
    n, d = _shape(rng)
    return rng.standard_normal((n, d))


def heads(rng: Generator) -> Float:
    """A block of the queries, keys or values of a trained model, with one hostile edit or two."""
    from levattn.datasets import minilm

    packaged = minilm()
    kind = (packaged.keys, packaged.queries, packaged.values)[int(rng.choice(3, p=[0.7, 0.15, 0.15]))]
    layers, of_layer, rows, columns = kind.shape
    K = kind[rng.integers(layers), rng.integers(of_layer)].astype(np.float64)
    n, d = _shape(rng)
    start = int(rng.integers(rows - n + 1))
    chosen = rng.permutation(rows)[:n] if rng.random() < 0.5 else np.arange(start, start + n)
    K = K[np.ix_(chosen, rng.permutation(columns)[:d])]
    for edit in rng.integers(0, 8, int(rng.integers(1, 3))):
        if edit == 0:
            K[:, rng.integers(d)] = 0
        elif edit == 1:
            K = K * _size(rng, float(rng.choice([10, 60, 300])), n, 1)
        elif edit == 2:
            K = K * _size(rng, float(rng.choice([10, 60, 300])), 1, d)
        elif edit == 3:
            K = K[rng.integers(0, n, n)]
        elif edit == 4:
            K = rounded(K, str(rng.choice(STORAGES[1:])))
        elif edit == 5:
            K[: rng.integers(0, n + 1), rng.integers(d)] = 0
        elif edit == 6:  # differences of neighbors, that nearly cancel
            K[1:] = K[:-1] + (K[1:] - K[:-1]) * 2.0 ** -float(rng.integers(10, 50))
        else:
            K = K - K.mean(axis=0)
    return K


_BITS = 61  # exact row spaces and zero products are found modulo 2^61 - 1, where 2^61 is 1


def resonances(rng: Generator) -> Made:
    """Numbers that differ and are equal modulo 2^61 - 1, or are 0 there."""
    kind = rng.integers(4)
    if kind == 0:
        return _multiples_of_the_prime(rng)
    n, d = int(rng.integers(2, 13)), int(rng.integers(2, 5))
    if kind == 1:  # powers of two in any places
        return Made(2.0 ** rng.integers(-100, 101, (n, d)) * rng.choice([1.0, 1.0, -1.0, 0.0], (n, d)))
    r = int(rng.integers(1, d))
    K = _small(rng, n, r) @ _small(rng, r, d)
    K[0] = rng.choice([1.0, -1.0, 2.0], d)
    odd = rng.permutation(n)[: int(rng.integers(1, 3))]  # rows in the space of the others, but for powers of 2^61
    K[odd] = K[0] * 2.0 ** (_BITS * rng.integers(-3, 4, (len(odd), d)) + rng.integers(-200, 201, (len(odd), 1)))
    return Made(K * 2.0 ** rng.integers(-30, 31, d) if kind == 3 else K)


def _multiples_of_the_prime(rng: Generator) -> Made:
    """Queries whose product with one key is a small multiple of 2^61 - 1, and 0 with most others."""
    a, m, scale = int(rng.integers(60, 110)), float(rng.integers(1, 4)), 2.0 ** rng.integers(-20, 21, 4)
    q = np.array([2.0**a, -(2.0**a), 1, -1])
    row = np.array([2.0**a, 2.0**a, m * 2.0**_BITS, m])
    K = np.kron(rng.integers(-3, 4, (int(rng.integers(0, 9)), 2)), [1.0, 1.0])
    if rng.random() < 0.5:
        K = K * 2.0**_BITS
    K = rng.permutation(np.vstack([K, row])) * scale
    return Made(K, queries=lambda stored: np.vstack([q / scale, 3 * q / scale])[: len(stored)])


def copies(rng: Generator) -> Made:
    """Very many copies of one or two rows of random numbers, a few odd rows, and queries orthogonal to copies."""
    n, d = int(rng.choice([300, 700, 2048, 4096, 20000])), int(rng.choice([2, 2, 3]))
    base = rng.standard_normal((int(rng.choice([1, 1, 1, 2])), d))
    odd = rng.standard_normal((int(rng.integers(1, 4)), d)) * rng.choice([1.0, 1.0, 1e-4, 1e3], d)
    kind = rng.integers(4)
    if kind < 2:
        odd = np.eye(d)[rng.integers(0, d, len(odd))] * rng.choice([1.0, 1.0, 1e-3, 1e-6, 1e3])
    elif kind == 2:  # copies but for a small part of one number
        base, odd = base[:1], base[:1] * [*np.ones(d - 1), 1 - 10.0 ** rng.uniform(-6, -3.5)]
        odd = np.repeat(odd, int(rng.choice([1, n // 3])), axis=0)
    K = np.vstack([base[rng.integers(0, len(base), n)], odd])
    if rng.random() < 0.6:
        K = rng.permutation(K)
    # what each of n copies in a direction of their own scores, rounded down
    tie = float(np.nextafter(1 / rng.choice([n, len(odd)]), 0)) if kind == 2 or rng.random() < 0.3 else None
    return Made(K, tie, partial(_across, base=base))


def _across(K: Float, base: Float) -> Float:
    """Queries (b, -a) for rows of K that start with (a, b): those most like the base rows, and their neighbors."""
    near = [int(np.abs(K - row).sum(axis=1).argmin()) for row in base]
    Q = np.zeros((2 * len(near), K.shape[1]))
    Q[:, :2] = np.repeat(K[near, 1::-1] * [1, -1], 2, axis=0)
    Q[1::2, 0] *= 1 + 2.0**-20
    return Q


def long(rng: Generator) -> Float:
    """More rows than causal attention takes at a time, which are few different ones."""
    n, d = int(rng.choice([257, 300, 513, 600])), int(rng.integers(1, 4))
    base = _small(rng, int(rng.integers(1, 6)), d) if rng.random() < 0.6 else rng.standard_normal((3, d))
    K = base[rng.integers(0, len(base), n)]
    for j in rng.integers(0, n, int(rng.integers(0, 4))):  # alone, perhaps beyond the first 256 rows
        K[j] = base[0] * float(rng.choice([0.0, 1.0, -1.0]))
        K[j, rng.integers(d)] += float(rng.choice([1.0, 2.0**-30, 2.0**20, 1e-12, 1e9]))
    if rng.random() < 0.3:
        K[: rng.integers(0, n), rng.integers(d)] = 0
    if rng.random() < 0.3:
        K = K * _size(rng, 40, 1, d)
    return K


def offsets(rng: Generator) -> Float:
    """Keys far from zero beside their differences, of any rank: numbers that are counted from a remote origin."""
    kind = rng.integers(6)
    if kind == 0:
        K = few_rows(rng)
    elif kind == 1:
        K = duplicated(rng)
    elif kind == 2:
        K = rng.standard_normal(_shape(rng)) * _size(rng, 10, 1, 1)
    elif kind == 3:
        n, d = _shape(rng)
        K = np.sort(rng.integers(0, 10**6, (n, 1)), axis=0) * rng.integers(-1, 3, (1, d)).astype(np.float64)
    else:
        K = dependent_integers(rng)
    n, d = K.shape
    span = float(rng.choice([8, 20, 40, 52]))
    offset = np.rint(2.0 ** rng.uniform(0, span, d)) if rng.random() < 0.7 else 2.0 ** rng.uniform(-span, span, d)
    offset = offset * rng.choice([1.0, 1.0, -1.0, 0.0], d)
    if rng.random() < 0.3:
        offset[:] = float(rng.choice([255, 1e4, 1e6, 1.7e12, 1e15]))
    K = K + offset
    if rng.random() < 0.2:  # one key whose place is not remote
        K[rng.integers(n)] = rng.choice([0.0, 1.0, -3.0])
    return K * _size(rng, 60, 1, d) if rng.random() < 0.2 else K


def compositions(rng: Generator) -> Float:
    """Rows of shares that sum to a constant, exactly or but for rounding, perhaps beside columns that do not."""
    n, d = int(rng.integers(1, 13)), int(rng.integers(2, 7))
    K = rng.multinomial(int(rng.choice([1, 4, 60, 1000])), rng.dirichlet(np.ones(d)), n).astype(np.float64)
    kind = rng.integers(4)
    if kind == 0:
        K = K / np.maximum(K.sum(axis=1, keepdims=True), 1)
    elif kind == 1:
        K = K * 2.0 ** rng.integers(-20, 20)
    elif kind == 2:
        K = rng.dirichlet(np.ones(d), n)
    if rng.random() < 0.3:
        K = np.column_stack([K, _small(rng, n, 1) + float(rng.choice([0, 1e6, 1e12]))])
    if rng.random() < 0.3:
        K = K[rng.integers(0, n, n)]
    return K


def cancelling(rng: Generator) -> Made:
    """Large whole numbers in two columns alike, queries for which they cancel, and small columns that decide."""
    n, d = int(rng.integers(5, 30)), int(rng.integers(2, 5))
    bits = int(rng.integers(20, 50))
    pairs = np.repeat(rng.integers(2 ** (bits - 1), 2**bits, (n, 1)), 2, axis=1)
    small = rng.integers(-3, 4, (n, d - 1))
    small[rng.integers(n)] *= 4
    K = np.hstack([pairs, small]) * 2.0 ** rng.integers(-20, 21, d + 1)
    if rng.random() < 0.2:  # beyond what powers of products hold, or products of other functions
        K = K * 2.0 ** float(rng.choice([-1040, -600, 600, 900]))

    def queries(K: Float) -> Float:
        x = rng.integers(2 ** (bits - 1), 2**bits, len(K))
        e = rng.integers(1, 4, (len(K), d - 1)) * rng.choice([1, 1, 1, 0], (len(K), d - 1))
        _, powers = np.frexp(np.abs(K).max(axis=0))
        Q = np.hstack([np.stack([x, -x], axis=1), e]).astype(np.float64)
        Q[rng.random(len(K)) < 0.1, 0] += 1  # some do not cancel
        ratio = K[0, 1] / K[0, 0] if K[0, 0] else 1.0
        Q[:, 1] /= ratio if np.isfinite(ratio) and ratio else 1.0
        return np.ldexp(Q, np.where(np.arange(d + 1) < 2, 0, np.clip(powers[0] - powers - bits, -900, 900)))

    return Made(K, queries=queries)


def edges(rng: Generator) -> Made:
    """Values from the least number to the largest: of one size, of a size for each key, column or number."""
    n, d = int(rng.choice([1, 3, 12, 30, 40, 300], p=[0.1, 0.2, 0.3, 0.2, 0.15, 0.05])), int(rng.integers(1, 5))
    K = rng.standard_normal((n, d)) if rng.random() < 0.6 else _small(rng, n, d)
    if rng.random() < 0.5:
        K = K * rng.choice([0.1, 1.0, 3.0, 10.0], (n, 1))
    V = rng.standard_normal((n, 2)) if rng.random() < 0.5 else rng.integers(-9, 10, (n, 2)) / 9
    sizes = [
        5e-324,
        1e-320,
        2.0**-1060,
        2.0**-1030,
        1e-300,
        1e-163,
        1e-40,
        1e-20,
        1.0,
        1e19,
        1e38,
        1e160,
        1e300,
        3e306,
    ]
    shape = [(), (n, 1), (1, 2), (n, 2)][int(rng.choice(4, p=[0.55, 0.15, 0.15, 0.15]))]
    V = V * rng.choice([*sizes, 1.7e308], shape)
    if rng.random() < 0.2:
        V[:] = V[0]
    epsilon = float(rng.choice([0.05, 0.1, 0.3, 0.5, 1.0]))
    if rng.random() < 0.7:
        return Made(K, epsilon=epsilon, values=V)

    def queries(K: Float) -> Float:
        """Products so small that values of functions near x²/2 are lost, of all queries or of some."""
        size = rng.choice([1e-320, 1e-300, 1e-200, 1e-170, 2.0**-540, 1e-161, 1e-158, 1e-150, 1.0], (len(K), 1))
        return rng.integers(-9, 10, K.shape) * (size if rng.random() < 0.5 else size[0])

    return Made(K, epsilon=epsilon, values=V, queries=queries)


FAMILIES: dict[str, Callable[[Generator], Any]] = {
    f.__name__: f
    for f in (
        plain,
        heads,
        zero_columns,
        late_columns,
        graded_rows,
        graded_columns,
        ulps_apart,
        dependent_integers,
        ties,
        extreme,
        duplicated,
        few_rows,
        nearly_dependent,
        mixed,
        many,
        wide,
        resonances,
        copies,
        long,
        offsets,
        compositions,
        cancelling,
        edges,
    )
}
LARGE = ("many", "wide", "copies", "long")  # a case of which takes as long as a dozen others
_UNMIXED = ("mixed", "ties", "heads", "resonances", "cancelling", "edges", "offsets", "compositions", *LARGE)


def _made(family: str, rng: Generator) -> Made:
    made = FAMILIES[family](rng)
    return made if isinstance(made, Made) else Made(made)


def keys_of(family: str, rng: Generator) -> Float:
    return np.asarray(_made(family, rng).keys, np.float64)


# -- queries and values ----------------------------------------------------------------------------------------------


def _queries(rng: Generator, K: Float, count: int) -> Float:
    n, d = K.shape
    size = np.abs(K).max(axis=0)
    size = np.where(size > 0, size, 1.0)
    _, powers = np.frexp(size)
    even = np.ldexp(K, -powers)
    out = []
    for kind in rng.integers(0, 9, count):
        q = np.zeros(d)
        if kind == 0:
            q[rng.integers(d)] = 1
        elif kind == 1:
            q = rng.standard_normal(d)
        elif kind <= 4:  # the query that gives a key its leverage score, as floats find it
            q = np.ldexp(np.linalg.pinv(even.T @ even, rcond=1e-15, hermitian=True) @ even[rng.integers(n)], -powers)
        elif kind == 5:  # orthogonal to some keys, up to rounding
            some = even[rng.permutation(n)[: max(d - 1, 1)]]
            q = np.ldexp(np.linalg.svd(some)[2][-1], -powers)
        elif kind == 6:  # orthogonal to some keys by small integers
            some = K[rng.permutation(n)[: max(d - 1, 1)]]
            a, b = rng.permutation(d)[:2] if d > 1 else (0, 0)
            q[a], q[b] = -some[0, b], some[0, a]
        elif kind == 7:
            q = rng.integers(-1, 2, d).astype(np.float64)
        else:
            q = K[rng.integers(n)].copy()
        if rng.random() < 0.15:
            q = q * 2.0 ** float(rng.choice([-500, -100, 100, 400]))
        out.append(np.clip(np.nan_to_num(q, posinf=1e300, neginf=-1e300), -1e300, 1e300))
    return np.array(out).reshape(count, d)


def _values(rng: Generator, n: int) -> Float:
    V = rng.integers(-9, 10, (n, 2)).astype(np.float64)
    kind = rng.integers(6)
    if kind == 0:
        return V * 2.0 ** float(rng.choice([-600, -100, 100, 500]))
    if kind == 1:
        return V * _size(rng, 30, n, 1)
    if kind == 2:
        return np.full((n, 2), 7.0)
    return V


def case(family: str, seed: int) -> Case:
    """The case of a seed, always the same."""
    rng = np.random.default_rng([seed, *family.encode()])
    with np.errstate(all="ignore"):
        made = _made(family, rng)
        epsilon = float(rng.choice(_RATIONAL)) if made.epsilon is None else made.epsilon
        storage = str(rng.choice(STORAGES, p=[0.65, 0.2, 0.05, 0.1]))
        K = rounded(made.keys, storage)
        n = len(K)
        Q = _queries(rng, K, n if n <= 40 else 12 if n <= 10000 else 3)
        own = made.queries(K)[: len(Q)]
        Q[: len(own)] = own
        Q = rounded(Q, storage)
        mask = rng.random(n) < 0.8 if rng.random() < 0.2 else None
        found = Case(
            family=family,
            seed=seed,
            keys=K,
            queries=Q,
            values=rounded(_values(rng, n) if made.values is None else made.values, storage),
            epsilon=min(max(epsilon, 1e-9), 1.0),
            mask=mask,
            storage=storage,
            layout=str(rng.choice(LAYOUTS)),
        )
        if made.epsilon is None and rng.random() < 0.3:
            found = replace(found, epsilon=_of_a_key(found, rng))
    return found


def _of_a_key(found: Case, rng: Generator) -> float:
    """A score that some key has, rounded: a tie, or a unit away from one."""
    from .oracle import Truth

    scores = Truth(found.present, found.queries).scores
    epsilon = float(scores[rng.integers(len(scores))])
    epsilon *= float(rng.choice([1.0, 1.0, 1 - 2.0**-52, 1 - 1e-10, 1 + 1e-10]))
    return min(max(epsilon, 1e-9), 1.0)
