"""Row spaces modulo a prime p: each process draws its own, between 2^61 and 2^62, so that no keys can target it.

A float64 is an integer times a power of two and has an exact residue. Residues are in Montgomery's form: x stands for
x / 2^64 modulo p (Montgomery 1985), so that products take no division.
"""

from __future__ import annotations

import math
import secrets
from functools import cache

import numpy as np
import numpy.typing as npt

from levattn._kernels.jit import helper, jit
from levattn._kernels.llvm import product_high
from levattn._kernels.scratch import empty

# The parts of a field: the prime, −1/p modulo 2^64, the residue of 1, a secret number, and powers of two.
_PRIME, _NEGATED, _UNIT, _SECRET, _POWERS = range(5)
_LOWEST, _HIGHEST = -1126, 971  # exponents of float64 as integers of 53 bits
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # for numbers below 2^64 (Sorenson and Webster 2015)

_ZERO, _ONE, _TWO = np.uint64(0), np.uint64(1), np.uint64(2)
_MASK = np.uint64(2**61 - 1)
_MIX = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64
_MIX_2, _MIX_3 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

Field = npt.NDArray[np.uint64]


@cache
def field() -> Field:
    """Return the field of this process."""
    return draw_field()


def draw_field() -> Field:
    """Return a field whose prime is drawn from the 2^55.6 primes between 2^61 and 2^62."""
    p = 0
    while not _is_prime(p):
        p = 2**61 + 2 * secrets.randbelow(2**60) + 1
    power = pow(2, _LOWEST + 128, p)
    powers = [power := power * 2 % p for _ in range(_LOWEST + 1, _HIGHEST + 1)]
    first = [p, -pow(p, -1, 2**64) % 2**64, 2**64 % p, secrets.randbits(64), pow(2, _LOWEST + 128, p)]
    return np.array([*first, *powers], np.uint64)


def _is_prime(p: int) -> bool:
    """Tell whether an odd p below 2^64 is a prime (Miller and Rabin)."""
    if p < 2 or any(p % small == 0 for small in _WITNESSES):
        return p in _WITNESSES
    twos = ((p - 1) & (1 - p)).bit_length() - 1
    return all(_passes(pow(witness, p - 1 >> twos, p), twos, p) for witness in _WITNESSES)


def _passes(x: int, twos: int, p: int) -> bool:
    """Tell whether x is 1, or one of its first squares is −1."""
    return x == 1 or any(pow(x, 2**k, p) == p - 1 for k in range(twos))


@helper
def _sum(field, a, b):
    """Return a + b modulo p, for a, b < p."""
    total = a + b
    return total - field[_PRIME] if total >= field[_PRIME] else total


@helper
def _difference(field, a, b):
    """Return a − b modulo p, for a, b < p."""
    return a - b if a >= b else a + (field[_PRIME] - b)


@helper
def _product(field, a, b):
    """Return a b / 2^64 modulo p, for a, b < p."""
    p, low = field[_PRIME], a * b
    total = product_high(a, b) + product_high(low * field[_NEGATED], p)
    total += _ONE if low else _ZERO  # carried from the lower halves, whose sum is 0 modulo 2^64
    return total - p if total >= p else total


@helper
def _residue(field, x):
    """Return a finite float64 modulo p."""
    fraction, exponent = math.frexp(abs(x))
    m = _product(field, np.uint64(np.int64(math.ldexp(fraction, 53))), field[_POWERS + exponent - 53 - _LOWEST])
    return field[_PRIME] - m if x < 0 and m else m


@helper
def _inverse(field, a):
    """Return 1/a modulo p, as a^(p − 2)."""
    out, power, left = field[_UNIT], a, field[_PRIME] - _TWO
    while left:
        if left & _ONE:
            out = _product(field, out, power)
        power = _product(field, power, power)
        left >>= _ONE
    return out


@helper
def _orthogonal(field, basis, pivots, rank, units, out):
    """Write a random vector that is orthogonal to the basis and to the units to `out`."""
    d = basis.shape[1]
    for c in range(d):
        x = field[_SECRET] + np.uint64(c + 1) * _MIX
        x = (x ^ (x >> np.uint64(30))) * _MIX_2
        x = (x ^ (x >> np.uint64(27))) * _MIX_3
        out[c] = _ZERO if units[c] else (x ^ (x >> np.uint64(31))) & _MASK
    for r in range(rank):
        out[pivots[r]] = _ZERO
    for r in range(rank):
        total = _ZERO
        for c in range(d):  # the columns of other pivots are zero in a reduced basis
            if c != pivots[r] and basis[r, c]:
                total = _sum(field, total, _product(field, basis[r, c], out[c]))
        out[pivots[r]] = field[_PRIME] - total if total else _ZERO


@helper
def _dot(field, row, v):
    total = _ZERO
    for c in range(len(v)):
        if v[c] and row[c] != 0:
            total = _sum(field, total, _product(field, _residue(field, row[c]), v[c]))
    return total


@jit
def mark_zeros(field, Q, K, rows, columns, out):
    """Set `out` at the pairs of rows and columns for which the row of Q and the row of K are orthogonal."""
    d = Q.shape[1]
    for t in range(len(rows)):
        total = _ZERO
        for c in range(d):
            q, k = Q[rows[t], c], K[columns[t], c]
            if q != 0 and k != 0:
                total = _sum(field, total, _product(field, _residue(field, q), _residue(field, k)))
        if total == _ZERO:
            out[rows[t], columns[t]] = True


@jit
def orthogonal_vector(field, basis, pivots, rank, units, out):
    """Write a random vector that is orthogonal to the basis and to the units to `out`."""
    _orthogonal(field, basis, pivots, rank, units, out)


@jit
def relation_vector(field, top, bottom, unit, out):
    """Write a random combination of the columns of ``top / (bottom unit)``, three matrices (d, k), to `out`."""
    for c in range(top.shape[0]):
        total = _ZERO
        for i in range(top.shape[1]):
            if top[c, i] == 0:
                continue
            x = field[_SECRET] + np.uint64(i + 1) * _MIX
            x = (x ^ (x >> np.uint64(30))) * _MIX_2
            term = _product(field, (x ^ (x >> np.uint64(31))) & _MASK, _residue(field, top[c, i]))
            if bottom[c, i] != 1 or unit[c, i] != 1:
                below = _product(field, _residue(field, bottom[c, i]), _residue(field, unit[c, i]))
                term = _product(field, term, _inverse(field, below))
            total = _sum(field, total, term)
        out[c] = total


@jit
def mark_products(field, rows, v, out):
    """Set `out` for the rows that are not orthogonal to a vector of residues."""
    for r in range(rows.shape[0]):
        out[r] = _dot(field, rows[r], v) != _ZERO


@helper
def _entry_dot(field, indices, values, start, stop, v):
    total = _ZERO
    for p in range(start, stop):
        x, y = np.float64(values[p]), v[np.uintp(indices[p])]
        if x == 1.0:  # most entries of designs
            total = _sum(field, total, y)
        elif y and x != 0:
            total = _sum(field, total, _product(field, _residue(field, x), y))
    return total


@jit
def entry_product_tasks(field, indptr, indices, values, mask, v, first, last, out):
    """Do `mark_products` for the sparse rows ``first:last``, as `csr_compiled` describes them."""
    for r in range(first, last):
        out[r] = (not mask.size or mask[r]) and _entry_dot(
            field, indices, values, indptr[r], indptr[r + 1], v
        ) != _ZERO


@helper
def _insert(field, new, basis, pivots, rank):
    """Extend the basis, in reduced row echelon form, by a row of residues (which changes), and return its rank."""
    d = len(new)
    for r in range(rank):
        factor = new[pivots[r]]
        if factor:
            for c in range(d):
                new[c] = _difference(field, new[c], _product(field, factor, basis[r, c]))
    pivot = 0
    while pivot < d and new[pivot] == _ZERO:
        pivot += 1
    if pivot == d:
        return rank
    scale = _inverse(field, new[pivot])
    at = 0
    for c in range(d):
        new[c] = _product(field, scale, new[c])
    for r in range(rank):
        factor = basis[r, pivot]
        if factor:
            for c in range(d):
                basis[r, c] = _difference(field, basis[r, c], _product(field, factor, new[c]))
        at += 1 if pivots[r] < pivot else 0
    for r in range(rank, at, -1):
        for c in range(d):
            basis[r, c] = basis[r - 1, c]
        pivots[r] = pivots[r - 1]
    for c in range(d):
        basis[at, c] = new[c]
    pivots[at] = pivot
    return rank + 1


@jit
def insert_rows(field, rows, basis, pivots, rank, units, chosen):
    """Extend the basis by the rows outside the span, write their indices to `chosen`, and return the basis's rank."""
    d = rows.shape[1]
    v, new = empty(np.uint64(0), (d,)), empty(np.uint64(0), (d,))
    _orthogonal(field, basis, pivots, rank, units, v)
    for i in range(rows.shape[0]):
        if _dot(field, rows[i], v) != _ZERO:
            for c in range(d):
                new[c] = _ZERO if units[c] else _residue(field, rows[i, c])
            chosen[rank] = i
            rank = _insert(field, new, basis, pivots, rank)
            _orthogonal(field, basis, pivots, rank, units, v)
    return rank


@jit
def insert_entries(field, indptr, indices, values, mask, basis, pivots, rank, units, chosen):
    """Do `insert_rows` for sparse rows, as `csr_compiled` describes them."""
    d = basis.shape[1]
    v, new = empty(np.uint64(0), (d,)), empty(np.uint64(0), (d,))
    _orthogonal(field, basis, pivots, rank, units, v)
    for i in range(len(indptr) - 1):
        if mask.size and not mask[i]:
            continue
        if _entry_dot(field, indices, values, indptr[i], indptr[i + 1], v) != _ZERO:
            new[:] = _ZERO
            for p in range(indptr[i], indptr[i + 1]):
                c = np.uintp(indices[p])
                if not units[c]:
                    new[c] = _residue(field, np.float64(values[p]))
            chosen[rank] = i
            rank = _insert(field, new, basis, pivots, rank)
            _orthogonal(field, basis, pivots, rank, units, v)
    return rank
