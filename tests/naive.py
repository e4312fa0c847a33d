"""Slow and obvious definitions that judge the library; nothing of it is imported here.

Stored keys are exact data: every float is a dyadic rational, so the Gram matrix of the
keys is an exact integer matrix up to powers of two. `leverage_exact` forms it in integers,
decides the rank in exact arithmetic and inverts it with hundreds of decimal digits, which
gives every score to full double precision at any conditioning. What it finds is kept, as many
tests ask for the scores of the same keys. The other functions are the definitions in float64,
written for reading.

Names and meanings follow the library where it has a counterpart. All functions take one
matrix of keys (n, d); `mask` marks the keys that take part.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from naive_attention import softmax

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]
Exact = NDArray[np.object_]

# Two primes below 2**31: products of residues fit into int64.
PRIMES = (2147483629, 2147483587)


# -- exact arithmetic ----------------------------------------------------------------


def to_integers(K: ArrayLike, *, common: bool = False) -> Exact:
    """Keys times a power of two per column (one for all if `common`), as exact integers."""
    values = np.asarray(K, dtype=np.float64)
    if not np.all(np.isfinite(values)):
        raise ValueError("keys must be finite")
    if values.size == 0:
        return np.zeros(values.shape, dtype=object)
    fraction, exponent = np.frexp(values)
    whole = np.ldexp(fraction, 53).astype(np.int64)
    lowest_bit = np.where(whole == 0, 1, whole & -whole)
    zeros = np.rint(np.log2(lowest_bit.astype(np.float64))).astype(np.int64)
    unit = np.where(whole == 0, 10**6, exponent - 53 + zeros)
    base = np.min(unit) if common else np.min(unit, axis=0)
    shift = np.where(whole == 0, 0, unit - base)
    return np.asarray((whole >> zeros).astype(object) << shift.astype(object))


def independent_columns(M: Exact) -> list[int]:
    """Columns that span the column space of an integer matrix, found modulo a prime.

    A set independent modulo a prime is independent; the converse fails only for the few
    primes that divide a minor, hence two of them where the first finds less than full rank.
    """
    columns = _independent_modulo(M, PRIMES[0])
    if len(columns) == min(M.shape):
        return columns
    return max(columns, _independent_modulo(M, PRIMES[1]), key=len)


def _independent_modulo(M: Exact, prime: int) -> list[int]:
    if M.size == 0:
        return []
    residues = (M % prime).astype(np.int64)
    columns: list[int] = []
    top = 0
    for column in range(residues.shape[1]):
        candidates = np.flatnonzero(residues[top:, column])
        if candidates.size == 0:
            continue
        pivot = top + int(candidates[0])
        residues[[top, pivot]] = residues[[pivot, top]]
        inverse = pow(int(residues[top, column]), -1, prime)
        factors = residues[top + 1 :, column] * inverse % prime
        rest = residues[top + 1 :, column + 1 :]  # the columns before are done with
        rest -= factors[:, None] * residues[top, column + 1 :] % prime
        rest %= prime
        columns.append(column)
        top += 1
        if top == residues.shape[0]:
            break
    return columns


def rank_exact(K: ArrayLike) -> int:
    """Rank of the stored keys as a matrix of rational numbers."""
    keys = np.asarray(K, dtype=np.float64)
    return _rank(keys.tobytes(), keys.shape)


@lru_cache(maxsize=256)
def _rank(data: bytes, shape: tuple[int, ...]) -> int:
    return len(independent_columns(to_integers(np.frombuffer(data).reshape(shape))))


def inverse_exact(M: Exact, A: Exact, digits: int) -> tuple[Exact, int]:
    """Integers N and an exponent b with A⁻¹ ≈ N 2⁻ᵇ; A symmetric positive definite, of integers, in products with M.

    A⁻¹ is found with so many digits and cut off to multiples of 2⁻ᵇ, which changes mᵀA⁻¹m for a row m of M by
    2⁻ᵇ‖m‖₁² at most: 2⁻²⁰⁰ of it, as no eigenvalue of A is above its trace.
    """
    size = len(A)
    b = 200 + 2 * (size * max(abs(int(M.max())), abs(int(M.min())))).bit_length() + int(np.trace(A)).bit_length()
    with decimal.localcontext() as context:
        context.prec = digits
        context.Emax = decimal.MAX_EMAX
        context.Emin = decimal.MIN_EMIN
        schur = _decimals(A)
        lower = _decimals(np.eye(size, dtype=np.int64).astype(object))  # L⁻¹ of A = L diag(pivots) Lᵀ
        pivots: list[Decimal] = []
        for k in range(size):
            pivot = schur[k, k]
            if pivot <= 0:
                raise ArithmeticError("too few digits: a pivot is not positive")
            pivots.append(pivot)
            factor = schur[k + 1 :, k] / pivot
            schur[k + 1 :, k + 1 :] -= np.multiply.outer(factor, schur[k, k + 1 :])
            lower[k + 1 :, : k + 1] -= np.multiply.outer(factor, lower[k, : k + 1])
        inverse = (lower / np.array(pivots)[:, None]).T @ lower
        inverse = inverse * Decimal(2) ** b
    return np.array([int(x) for x in inverse.reshape(-1)], dtype=object).reshape(size, size), b


def inverse_of_gram(M: Exact) -> tuple[Exact, int]:
    """The same of MᵀM, for independent columns, with so many digits that all scores add up to the rank."""
    G = M.T @ M
    digits = 100 + 2 * _digits(M)
    for _ in range(7):
        try:
            N, b = inverse_exact(M, G, digits)
        except ArithmeticError:
            pass
        else:
            if abs(int(_quadratic(M, N).sum()) - (M.shape[1] << b)) < 1 << (b - 133):  # 1e-40
                return N, b
        digits *= 2
    raise ArithmeticError("the scores do not add up to the rank")


def _quadratic(M: Exact, N: Exact) -> Exact:
    """mᵀ N m for all rows of M, in integers."""
    return np.asarray(((M @ N) * M).sum(axis=1))


def _decimals(A: Exact) -> Exact:
    result = np.empty(A.shape, dtype=object)
    flat = result.reshape(-1)
    for i, value in enumerate(A.reshape(-1)):
        flat[i] = Decimal(int(value))
    return result


def leverage_exact(
    K: ArrayLike,
    *,
    ridge: float = 0.0,
    relative_ridge: float = 0.0,
    center: bool = False,
    mask: ArrayLike | None = None,
) -> Float:
    """Leverage scores of the stored keys, correct to the last bits of a double.

    `ridge` is λ itself; λ = relative_ridge · ‖K‖_F² / d, taken after masking and centering.
    """
    kept, scatter = _take_part(K, mask)
    share = Fraction(relative_ridge)
    if ridge:
        X = np.array([[Fraction(x) for x in k] for k in kept.tolist()], dtype=object).reshape(kept.shape)
        X = X - sum(X) / len(X) if center and len(X) else X
        total = sum((x * x for x in X.ravel()), Fraction(0))
        share = Fraction(ridge) * kept.shape[1] / total if total else Fraction(0)
    return scatter(_scores(kept.tobytes(), kept.shape, share, center))


@lru_cache(maxsize=256)
def _scores(data: bytes, shape: tuple[int, ...], ridge: Fraction, center: bool) -> Float:
    M = to_integers(np.frombuffer(data).reshape(shape), common=ridge > 0)
    if center and M.shape[0] > 0:
        M = M * M.shape[0] - M.sum(axis=0)[None, :]
    if M.size == 0 or not np.any(M != 0):
        return np.zeros(M.shape[0])
    scale = 1
    if ridge > 0:
        d = M.shape[1]
        shrink = ridge.numerator * int((M * M).sum())
        scale = ridge.denominator * d
        A = scale * (M.T @ M) + shrink * np.eye(d, dtype=np.int64).astype(object)
        N, b = inverse_exact(M, A, digits=200 + 2 * _digits(M))
    else:
        M = M[:, independent_columns(M)]
        N, b = inverse_of_gram(M)
    return np.array([scale * int(x) / (1 << b) for x in _quadratic(M, N)])


def _digits(M: Exact) -> int:
    return max(len(str(abs(int(x)))) for x in (M.max(), M.min()))


def _take_part(K: ArrayLike, mask: ArrayLike | None) -> tuple[Float, Callable[[Float], Float]]:
    """Keys that take part, and the map that puts their scores back (0 for the others)."""
    stored = np.asarray(K)
    keep = np.ones(stored.shape[0], bool) if mask is None else np.asarray(mask, bool)

    def scatter(scores: Float) -> Float:
        result = np.zeros(keep.shape[0])
        result[keep] = scores
        return result

    return np.asarray(stored[keep], dtype=np.float64), scatter


# -- definitions in float64 ----------------------------------------------------------


def leverage_svd(K: ArrayLike) -> Float:
    """Squared row norms of the left singular vectors; singular values of rounding errors are cut."""
    keys = np.asarray(K, dtype=np.float64)
    if keys.size == 0 or not np.any(keys):
        return np.zeros(keys.shape[0])
    U, s, _ = np.linalg.svd(keys / np.max(np.abs(keys)), full_matrices=False)
    keep = s > max(keys.shape) * float(np.finfo(np.float64).eps) / 2 * s[0]
    return np.asarray(np.sum(U[:, keep] ** 2, axis=1))


def condition_number(K: ArrayLike) -> float:
    """Ratio of the largest to the smallest singular value within the exact rank."""
    keys = np.asarray(K, dtype=np.float64)
    rank = rank_exact(keys)
    if rank == 0:
        return 1.0
    s = np.linalg.svd(keys / np.max(np.abs(keys)), compute_uv=False)
    return float(s[0] / s[rank - 1])


def attention_exact(Q: ArrayLike, K: ArrayLike) -> Float:
    """Scores of x² attention in exact arithmetic, each rounded once; powers of two that all keys share cancel."""
    queries = np.asarray(Q, dtype=np.float64)
    keys = to_integers(K, common=True)
    A = np.zeros((len(queries), len(keys)))
    for i, q in enumerate(queries):
        products = keys @ to_integers(q[None], common=True)[0] if keys.size else []
        squares = [int(x) ** 2 for x in products]
        total = sum(squares)
        if total:
            A[i] = [x / total for x in squares]  # of Python's integers: rounded once
    return A


def adversarial_queries(K: ArrayLike) -> Float:
    """Rows k_jᵀ (KᵀK)⁺: the query on which key j has the attention τ_j."""
    keys = np.asarray(K, dtype=np.float64)
    if keys.size == 0 or not np.any(keys):
        return np.zeros_like(keys)
    scale = np.max(np.abs(keys))
    return np.asarray(np.linalg.pinv(keys / scale, rcond=1e-15).T / scale)


def attention(Q: ArrayLike, K: ArrayLike, *, mask: Bool | None = None, dtype: Any = np.float64) -> NDArray[Any]:
    """A_ij = ⟨q_i,k_j⟩² / Σ_l ⟨q_i,k_l⟩²; a row whose sum is 0 is 0."""
    keys, queries = (np.asarray(X, dtype=np.float64) for X in (K, Q))
    keys = keys if mask is None else np.where(mask[:, None], keys, 0)
    A = np.zeros((queries.shape[0], keys.shape[0]), dtype=dtype)
    if A.size == 0:
        return A
    keys = (keys / _scale(keys)).astype(dtype)
    queries = (queries / np.array([[_scale(query)] for query in queries])).astype(dtype)
    Z = queries @ keys.T
    largest = np.max(np.abs(Z), axis=1, keepdims=True)
    seen = largest[:, 0] > 0
    weights = (Z[seen] / largest[seen]) ** 2
    A[seen] = weights / np.sum(weights, axis=1, keepdims=True)
    return A


def normalizers(Q: ArrayLike, K: ArrayLike) -> Float:
    """Σ_l ⟨q_i,k_l⟩² for every query."""
    keys, queries = (np.asarray(X, dtype=np.float64) for X in (K, Q))
    Z = np.array([keys @ query for query in queries], np.longdouble).reshape(len(queries), len(keys))
    return np.asarray(np.sum(Z * Z, axis=1), np.float64)


def captured_mass(Q: ArrayLike, K: ArrayLike, selected: ArrayLike) -> Float:
    """Attention that falls on the selected keys (a boolean per key), for every query."""
    return np.asarray(attention(Q, K)[:, np.asarray(selected, bool)].sum(axis=1))


def universal_set(
    K: ArrayLike,
    epsilon: float | None = None,
    *,
    size: int | None = None,
    mask: ArrayLike | None = None,
) -> Bool:
    """Keys of exact score ≥ ε, or the `size` first ones by (score descending, index)."""
    scores = leverage_exact(K, mask=mask)
    if epsilon is not None:
        return np.asarray(scores >= epsilon)
    keep = np.ones(scores.shape[0], bool) if mask is None else np.asarray(mask, bool)
    order = [int(j) for j in np.lexsort((np.arange(scores.shape[0]), -scores)) if keep[j]]
    selected = np.zeros(scores.shape[0], bool)
    selected[order[:size]] = True
    return selected


def output(A: Float, V: ArrayLike, selected: Bool, compensate: Literal["mean"] | None = None) -> Float:
    """A_U V_U, plus r_i times the mean of the left-out values where compensated."""
    values = np.asarray(V, dtype=np.float64)
    result = A[:, selected] @ values[selected]
    left_out = values[~selected]
    if compensate == "mean" and left_out.shape[0] > 0:
        residual = A[:, ~selected].sum(axis=1)
        result = result + residual[:, None] * left_out.mean(axis=0)
    return np.asarray(result)


def output_error_bound(
    A: Float,
    V: ArrayLike,
    selected: Bool,
    largest_left_out: float,
    compensate: Literal["mean"] | None = None,
) -> Float:
    """Bound on ‖(A V)_i − output_i‖ from r_i and the largest score left out.

    plain: min(r·max‖v_j‖, √(e r)·‖V_Ū‖₂);
    compensated: min(r·max‖v_j − v̄‖, √(e r − r²/n')·‖V_Ū − 1v̄ᵀ‖₂).
    """
    left_out = np.asarray(V, dtype=np.float64)[~selected]
    count = left_out.shape[0]
    r = A[:, ~selected].sum(axis=1)
    if count == 0:
        return np.zeros(A.shape[0])
    light = largest_left_out * r
    if compensate == "mean":
        left_out = left_out - left_out.mean(axis=0)
        light = np.maximum(light - r**2 / count, 0)
    farthest = max(float(np.linalg.norm(v)) for v in left_out)
    spectral = float(np.linalg.norm(left_out, 2))
    return np.asarray(np.minimum(r * farthest, np.sqrt(light) * spectral))


def _scale(x: Float) -> float:
    """A power of two near the largest entry: dividing by it is exact."""
    largest = float(np.max(np.abs(x), initial=0.0))
    return float(2.0 ** np.frexp(largest)[1]) if largest > 0 else 1.0


# -- other functions -----------------------------------------------------------------


def largest_scores(K: ArrayLike, f: Callable[[Float], Any], *, seed: int = 0) -> Float:
    """Scores of an even f that some queries do give the keys: nearly the largest ones, for few keys.

    Queries start as the worst ones of x², as ones that are orthogonal to all keys but some and as random ones, in many
    sizes; random steps improve the best of each key. The rounding of products counts against the key.
    """
    keys = np.asarray(K, dtype=np.float64)
    result = np.zeros(len(keys))
    live = np.flatnonzero(keys.any(axis=1))
    if live.size == 0:
        return result
    keys, rng = keys[live], np.random.default_rng(seed)
    _, s, Vt = np.linalg.svd(keys, full_matrices=False)
    rank = int(np.count_nonzero(s > 1e-12 * s[0]))
    turn, own = Vt[:rank] / s[:rank, None], np.arange(len(keys))
    whitened = keys @ turn.T

    def scores(Q: Float) -> Float:
        size = np.abs(Q @ keys.T)
        doubt = 4 * keys.shape[1] * np.finfo(np.float64).eps * (np.abs(Q) @ np.abs(keys).T)
        return np.asarray(f(np.maximum(size - doubt, 0)) / np.sum(f(size + doubt), axis=-1, keepdims=True))

    others = whitened[rng.integers(len(keys), size=(300, rank - 1))]
    orthogonal = np.linalg.svd(others, full_matrices=True)[2][:, -1]
    starts = np.vstack([whitened, orthogonal, rng.standard_normal((300, rank))]) @ turn
    starts /= np.max(np.abs(starts @ keys.T), axis=1, keepdims=True)
    tried = np.geomspace(1e-4, 1e10, 43)[:, None, None] * starts
    top = np.stack([scores(Q).argmax(axis=0) for Q in tried])
    Q = np.take_along_axis(tried, top[:, :, None], axis=1)  # for each size and key
    best, spread = scores(Q)[:, own, own], np.full((len(Q), len(keys)), 0.3)
    for step in range(600):
        if step == 40:
            kept = np.argsort(-best, axis=0)[:4]
            best, spread = (np.take_along_axis(x, kept, axis=0) for x in (best, spread))
            Q = np.take_along_axis(Q, kept[:, :, None], axis=0)
        length = np.linalg.norm(Q @ Vt[:rank].T * s[:rank], axis=2) / np.sqrt(rank)
        trial = Q + (spread * length)[:, :, None] * (rng.standard_normal((*best.shape, rank)) @ turn)
        trial *= np.exp(spread * rng.standard_normal(best.shape))[:, :, None]
        value = scores(trial)[:, own, own]
        better = value > best
        best, Q = np.where(better, value, best), np.where(better[:, :, None], trial, Q)
        spread = np.clip(spread * np.where(better, 1.5, 0.9), 1e-8, 1)
    result[live] = best.max(axis=0)
    return result


# -- groups --------------------------------------------------------------------------


def group_leverage(K: ArrayLike, labels: ArrayLike, *, mask: ArrayLike | None = None) -> Float:
    """λ_max(K_S (KᵀK)⁺ K_Sᵀ) for the keys S of each label; these matrices are exact but for one rounding."""
    names = np.asarray(labels)
    keep = np.ones(len(names), bool) if mask is None else np.asarray(mask, bool)
    kept, _ = _take_part(K, mask)
    M = to_integers(kept)
    M = M[:, independent_columns(M)]
    scores = np.zeros(int(names.max(initial=-1)) + 1)
    if M.shape[1]:
        N, b = inverse_of_gram(M)
        for label in range(len(scores)):
            members = M[names[keep] == label]
            if len(members):
                products = members @ N @ members.T
                scores[label] = np.linalg.eigvalsh([[int(x) / (1 << b) for x in row] for row in products])[-1]
    return scores


def whitened(K: ArrayLike, *, mask: ArrayLike | None = None) -> Float:
    """Left singular vectors of tame keys: row j has the leverage score of key j as its squared norm."""
    kept, _ = _take_part(K, mask)
    U, s, _ = np.linalg.svd(kept, full_matrices=False)
    result = np.zeros((len(np.asarray(K)), U.shape[1]))
    there = np.ones(len(result), bool) if mask is None else np.asarray(mask, bool)
    U[~kept.any(axis=1)] = 0  # of the SVD they are rounding errors
    result[there] = U * (s > 1e-12 * s.max(initial=0))
    return result


def angles(X: Float) -> Float:
    """Angles between all rows up to sign; a row of zeros is at π/2 to all others."""
    result = np.full((len(X), len(X)), np.pi / 2)
    there = np.flatnonzero(np.any(X, axis=1))
    U = X[there] / np.linalg.norm(X[there], axis=1, keepdims=True)
    for i, u in zip(there, U, strict=True):
        chords = np.minimum(np.linalg.norm(U - u, axis=1), np.linalg.norm(U + u, axis=1))
        result[i, there] = 2 * np.arcsin(np.minimum(chords / 2, 1.0))
    return result


def components(linked: Bool) -> NDArray[np.int64]:
    """The component of each node of a graph, by its first node; a node alone has its own number."""
    result = np.full(len(linked), -1)
    for start in range(len(linked)):
        if result[start] >= 0:
            continue
        waiting = [start]
        while waiting:
            node = waiting.pop()
            if result[node] < 0:
                result[node] = start
                waiting += [int(other) for other in np.flatnonzero(linked[node] | linked[:, node])]
    return result


# -- random words and sketches -----------------------------------------------------------


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10, as printed by Salmon, Moraes, Dror and Shaw (SC 2011), on plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = right >> 32 ^ c1 ^ k0, right & 0xFFFFFFFF, left >> 32 ^ c3 ^ k1, left & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_word(seed: int, stream: int, row: int, column: int) -> int:
    """The word of one row and column: four rows share a counter."""
    group = row // 4
    counter = (group % 2**32, group // 2**32, column, stream)
    return philox(counter, (seed % 2**32, seed // 2**32))[row % 4]


def random_normal(seed: int, stream: int, row: int, column: int) -> float:
    """One of the two normals that Box and Muller make of the words of a pair of columns."""
    u, v = ((random_word(seed, stream, row, column - column % 2 + i) + 0.5) / 2**32 for i in (0, 1))
    turn = math.sin if column % 2 else math.cos
    return math.sqrt(-2 * math.log(u)) * turn(2 * math.pi * v)


def hadamard(size: int) -> Float:
    """Sylvester's Hadamard matrix."""
    H = np.ones((1, 1))
    while len(H) < size:
        H = np.block([[H, H], [H, -H]])
    return H


def distortion(SU: ArrayLike) -> float:
    """By how much a sketch SU of an orthonormal basis U changes squared norms at most, relatively."""
    X = np.asarray(SU, dtype=np.float64)
    return float(np.max(np.abs(np.linalg.eigvalsh(X.T @ X) - 1)))


# -- latent attention --------------------------------------------------------------------


def latte_weights(
    Q: ArrayLike,
    K: ArrayLike,
    *,
    causal: bool = True,
    mask: ArrayLike | None = None,
    offsets: list[int] | None = None,
) -> Float:
    """The matrix of Latte (rows of Q × positions of K): each row mixes what the latents see by their softmax.

    A latent that sees nothing is no part of the mixture, and a mixture of nothing is zero.
    """
    Q, K = np.asarray(Q, dtype=np.float64), np.asarray(K, dtype=np.float64)
    counts = np.ones(len(K), dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    P = np.zeros((len(Q), len(K)))
    for t in range(len(Q)):
        low, high = 0, len(K)
        if offsets is not None:
            low, high = next((a, b) for a, b in pairwise(offsets) if a <= t < b)
        last = t if causal else high - 1
        components = []
        for latent in range(Q.shape[1]):
            seen = [s for s in range(low, last + 1) if counts[s] and K[s, latent] > -np.inf]
            if seen and Q[t, latent] > -np.inf:
                components.append((Q[t, latent], seen, softmax(K[seen, latent])))
        if components:
            for weight, (_, seen, p) in zip(softmax([logit for logit, _, _ in components]), components, strict=True):
                P[t, seen] += weight * p
    return P


def latte(Q: ArrayLike, K: ArrayLike, V: ArrayLike, **options: Any) -> Float:
    """The outputs of Latte by its matrix; masked values are not read."""
    P, V = latte_weights(Q, K, **options), np.asarray(V, dtype=np.float64)
    return np.stack([sum((p * v for p, v in zip(row, V, strict=True) if p > 0), np.zeros(V.shape[1])) for row in P])


def latte_recurrence(Q: ArrayLike, K: ArrayLike, V: ArrayLike) -> Float:
    """Causal Latte token by token: the maximum, the sum and the weighted values of each latent."""
    Q, K, V = (np.asarray(x, dtype=np.float64) for x in (Q, K, V))
    m, s, S = np.full(K.shape[1], -np.inf), np.zeros(K.shape[1]), np.zeros((K.shape[1], V.shape[1]))
    rows = []
    for q, k, v in zip(Q, K, V, strict=True):
        top = np.maximum(m, k)
        a, b = np.exp(m - top), np.exp(k - top)
        m, s, S = top, a * s + b, a[:, None] * S + b[:, None] * v
        rows.append((softmax(q) / s) @ S)
    return np.stack(rows)


# -- queries that come -------------------------------------------------------------------


def shares(Q: ArrayLike, K: ArrayLike, f: Callable[[Float], Any] | None, mask: ArrayLike | None = None) -> Float:
    """The attention of every query, key by key and query by query; f is None for softmax."""
    queries, (keys, scatter) = np.asarray(Q, dtype=np.float64), _take_part(K, mask)
    rows = []
    for q in queries:
        z = np.array([float(q @ k) for k in keys])
        values = np.exp(z - z.max(initial=-np.inf)) if f is None else np.asarray(f(z))
        total = values.sum()
        rows.append(scatter(values / total if total > 0 else np.zeros(len(keys))))
    return np.array(rows).reshape(len(queries), -1)


def turned(q: Float, cosine: Float, sine: Float) -> Float:
    """A query with its pairs of entries i and i + r/2 turned as plane vectors; entries from r on stay."""
    result, half = np.array(q, dtype=np.float64), len(cosine) // 2
    for i in range(half):
        x, y = float(q[i]), float(q[i + half])
        result[i] = x * cosine[i] - y * sine[i]
        result[i + half] = x * sine[i + half] + y * cosine[i + half]
    return result


def weight_by_quadrature(eigenvalues: Float, i: int) -> float:
    """∫ (1 + 2tλ_i)⁻¹ Π (1 + 2tλ_l)^{−1/2} dt by an adaptive rule of scipy, in log t and in pieces."""
    from scipy.integrate import quad

    def integrand(u: float) -> float:
        t = math.exp(u)
        return math.exp(u - 0.5 * float(np.log1p(2 * t * eigenvalues).sum())) / (1 + 2 * t * eigenvalues[i])

    cuts = np.linspace(-60, 130, 20)
    return math.fsum(quad(integrand, a, b, epsabs=0, epsrel=1e-12, limit=200)[0] for a, b in pairwise(cuts))


def expected_squares(C: ArrayLike, K: ArrayLike) -> Float:
    """The mean x² attention of normal queries of mean zero and covariance C, by adaptive quadrature."""
    keys = np.asarray(K, dtype=np.float64)
    values, vectors = np.linalg.eigh(np.asarray(C, dtype=np.float64))
    L = vectors * np.sqrt(np.maximum(values, 0.0))
    eigenvalues, U = np.linalg.eigh(L.T @ keys.T @ keys @ L)
    there = eigenvalues > 1e-13 * eigenvalues.max(initial=0.0)
    if not there.any():
        return np.zeros(len(keys))
    eigenvalues, U = eigenvalues[there], U[:, there]
    weights = [weight_by_quadrature(eigenvalues / eigenvalues.max(), i) for i in range(len(eigenvalues))]
    return np.asarray((keys @ L @ U) ** 2 @ np.array(weights) / eigenvalues.max())


def conformal(values: ArrayLike, coverage: Fraction) -> float:
    """The smallest of m values that at least the share `coverage` of all m + 1 reaches, if the new one is larger."""
    ordered = sorted(float(value) for value in np.asarray(values))
    for place, value in enumerate(ordered, start=1):
        if Fraction(place, len(ordered) + 1) >= coverage:
            return value
    return math.inf


def prefix_needed(row: Float, order: list[int], *, epsilon: float | None = None, mass: float | None = None) -> int:
    """How many keys of an order one query needs: all of at least ε, or so many that they hold a mass."""
    if not np.any(row):
        return 0
    if epsilon is not None:
        return max((place + 1 for place, key in enumerate(order) if row[key] >= epsilon), default=0)
    held = 0.0
    for place, key in enumerate(order):
        held += row[key]
        if held >= (mass or 0.0):
            return place + 1
    return len(order)
