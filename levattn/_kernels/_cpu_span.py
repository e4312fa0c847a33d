"""Row spaces modulo the prime p = 2^61 − 1, where a float64, an integer times a power of two, has an exact residue."""

from __future__ import annotations

import math

import numpy as np

from levattn._kernels._cpu_jit import helper, jit

__all__ = ["insert_residues", "insert_rows", "mark_outside", "mark_zeros"]

_BITS = np.uint64(61)
_PRIME = np.uint64(2**61 - 1)
_HALF = np.uint64(2**31 - 1)
_QUARTER = np.uint64(2**30 - 1)
_SHIFT, _REST, _ONE, _ZERO = np.uint64(31), np.uint64(30), np.uint64(1), np.uint64(0)
_MIX = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64
_MIX_2, _MIX_3 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@helper
def _reduced(x):
    """Return x modulo p, for x < 2^64."""
    x = (x & _PRIME) + (x >> _BITS)
    return x - _PRIME if x >= _PRIME else x


@helper
def _product(a, b):
    """Return a b modulo p, for a, b < p."""
    a1, a0, b1, b0 = a >> _SHIFT, a & _HALF, b >> _SHIFT, b & _HALF
    middle = a1 * b0 + a0 * b1
    return _reduced(_reduced((a1 * b1 << _ONE) + (middle >> _REST) + ((middle & _QUARTER) << _SHIFT)) + a0 * b0)


@helper
def _residue(x):
    """Return a finite float64 modulo p."""
    fraction, exponent = math.frexp(abs(x))
    m = np.uint64(np.int64(math.ldexp(fraction, 53)))
    turn = np.uint64((exponent - 53) % 61)  # 2^61 is 1
    m = ((m << turn) & _PRIME) | (m >> (_BITS - turn)) if turn else m
    m = _reduced(m)
    return _PRIME - m if x < 0 and m else m


@helper
def _inverse(a):
    """Return 1/a modulo p, as a^(p − 2)."""
    out, power, left = _ONE, a, np.uint64(2**61 - 3)
    while left:
        if left & _ONE:
            out = _product(out, power)
        power = _product(power, power)
        left >>= _ONE
    return out


@helper
def _orthogonal(basis, pivots, rank, units, out):
    """Write a vector to `out` that is orthogonal to the basis and to the units, and else looks random."""
    d = basis.shape[1]
    for c in range(d):
        x = np.uint64(c + 1) * _MIX
        x = (x ^ (x >> np.uint64(30))) * _MIX_2
        x = (x ^ (x >> np.uint64(27))) * _MIX_3
        out[c] = _ZERO if units[c] else _reduced(x ^ (x >> np.uint64(31)))
    for r in range(rank):
        out[pivots[r]] = _ZERO
    for r in range(rank):
        total = _ZERO
        for c in range(d):  # the columns of other pivots are zero in a reduced basis
            if c != pivots[r] and basis[r, c]:
                total = _reduced(total + _product(basis[r, c], out[c]))
        out[pivots[r]] = _PRIME - total if total else _ZERO


@helper
def _dot(row, v):
    total = _ZERO
    for c in range(len(v)):
        if v[c] and row[c] != 0:
            total = _reduced(total + _product(_residue(row[c]), v[c]))
    return total


@jit
def mark_zeros(Q, K, rows, columns, out):
    """Set `out` at the pairs of rows and columns for which the row of Q and the row of K are orthogonal."""
    d = Q.shape[1]
    for t in range(len(rows)):
        total = _ZERO
        for c in range(d):
            q, k = Q[rows[t], c], K[columns[t], c]
            if q != 0 and k != 0:
                total = _reduced(total + _product(_residue(q), _residue(k)))
        if total == _ZERO:
            out[rows[t], columns[t]] = True


@jit
def mark_outside(rows, basis, pivots, rank, units, out):
    """Set `out` for the rows that are not in the span of the basis and the units."""
    v = np.empty(rows.shape[1], np.uint64)
    _orthogonal(basis, pivots, rank, units, v)
    for r in range(rows.shape[0]):
        out[r] = _dot(rows[r], v) != _ZERO


@helper
def _insert(new, basis, pivots, rank):
    """Extend the basis, reduced row echelon, by a row of residues (which is changed), and return its rank."""
    d = len(new)
    for r in range(rank):
        factor = new[pivots[r]]
        if factor:
            for c in range(d):
                new[c] = _reduced(new[c] + _PRIME - _product(factor, basis[r, c]))
    pivot = 0
    while pivot < d and new[pivot] == _ZERO:
        pivot += 1
    if pivot == d:
        return rank
    scale = _inverse(new[pivot])
    at = 0
    for c in range(d):
        new[c] = _product(scale, new[c])
    for r in range(rank):
        factor = basis[r, pivot]
        if factor:
            for c in range(d):
                basis[r, c] = _reduced(basis[r, c] + _PRIME - _product(factor, new[c]))
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
def insert_rows(rows, basis, pivots, rank, units):
    """Extend the basis by the rows that are not in the span, and return its rank."""
    d = rows.shape[1]
    v, new = np.empty(d, np.uint64), np.empty(d, np.uint64)
    _orthogonal(basis, pivots, rank, units, v)
    for i in range(rows.shape[0]):
        if _dot(rows[i], v) != _ZERO:
            for c in range(d):
                new[c] = _ZERO if units[c] else _residue(rows[i, c])
            rank = _insert(new, basis, pivots, rank)
            _orthogonal(basis, pivots, rank, units, v)
    return rank


@jit
def insert_residues(rows, basis, pivots, rank, units):
    """Do the same for rows of residues."""
    new = np.empty(rows.shape[1], np.uint64)
    for i in range(rows.shape[0]):
        for c in range(rows.shape[1]):
            new[c] = _ZERO if units[c] else rows[i, c]
        rank = _insert(new, basis, pivots, rank)
    return rank
