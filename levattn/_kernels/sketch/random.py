"""The compiled Philox generator: random words, signs and normal numbers, as `levattn._core.random` defines them."""

from __future__ import annotations

import math

import numpy as np

from levattn._core.random import INCREMENTS, MULTIPLIERS, ROUNDS
from levattn._kernels.jit import helper

GROUP = 4  # rows that share a counter

_M0, _M1 = (np.uint64(m) for m in MULTIPLIERS)
_I0, _I1 = (np.uint32(i) for i in INCREMENTS)
_HALF = np.uint64(32)

_ROOT = 0x3FE6A09E667F3BCD  # the bits of the square root of one half
_TO_ROOT = 0x3FF0000000000000 - _ROOT
_FRACTION = 0x000FFFFFFFFFFFFF
_BIAS = 1023 + 32  # of the exponent of a word times 2**-32
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # the first times 1000 is exact
_STEP = 2 * math.pi / 2**32


def key_words(seed: int) -> tuple[np.uint32, np.uint32]:
    """Return the two words of a seed."""
    return np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)


@helper
def _philox(group, column, stream, key0, key1):
    """Return the words of four rows in one column."""
    a, b, c, d = np.uint32(group), np.uint32(np.uint64(group) >> _HALF), np.uint32(column), np.uint32(stream)
    for _ in range(ROUNDS):
        p, q = np.uint64(a) * _M0, np.uint64(c) * _M1
        a, c = np.uint32(q >> _HALF) ^ b ^ key0, np.uint32(p >> _HALF) ^ d ^ key1
        b, d = np.uint32(q), np.uint32(p)
        key0, key1 = np.uint32(key0 + _I0), np.uint32(key1 + _I1)
    return a, b, c, d


@helper
def fill_words(key0, key1, stream, column, first, out):
    """Write the words of one column for the rows from ``4 * first`` on; `out` has a multiple of four of them."""
    for i in range(out.size // GROUP):
        a, b, c, d = _philox(first + i, column, stream, key0, key1)
        out[GROUP * i] = a
        out[GROUP * i + 1] = b
        out[GROUP * i + 2] = c
        out[GROUP * i + 3] = d


@helper
def fill_group(key0, key1, stream, group, first, count, out):
    """Write the words of the four rows from ``4 * group`` on in `count` columns from `first` on."""
    row0, row1, row2, row3 = out[0], out[1], out[2], out[3]
    for i in range(count):
        a, b, c, d = _philox(group, first + i, stream, key0, key1)
        row0[i] = a
        row1[i] = b
        row2[i] = c
        row3[i] = d


@helper
def fill_signs(key0, key1, stream, group, first, count, drawn, out):
    """Write the signs of four rows, the bits of words, in `count` columns from `first` on, both multiples of 32.

    `drawn` has room for the words of four rows.
    """
    fill_group(key0, key1, stream, group, first // 32, count // 32, drawn)
    for k in range(GROUP):
        for i in range(count // 32):
            word, to = drawn[k, i], out[k, 32 * i : 32 * i + 32]
            for bit in range(32):
                to[bit] = 1 - 2 * np.int32(word >> np.uint32(bit) & np.uint32(1))


@helper
def fill_normals(key0, key1, stream, group, first, count, drawn, out):
    """Write the normals of four rows in `count` columns from `first` on, both even.

    `drawn` has room for the words of four rows. All is plain arithmetic, because the compiler does not vectorize calls
    of logarithms or sines.
    """
    fill_group(key0, key1, stream, group, first, count, drawn)
    for k in range(GROUP):
        word, to = drawn[k], out[k]
        for i in range(count // 2):
            radius = np.sqrt(2 * _minus_log(word[2 * i]))
            x, y = _cos_sin(word[2 * i + 1])
            to[2 * i] = radius * x
            to[2 * i + 1] = radius * y


@helper
def _minus_log(word):
    """Return the logarithm of ``(word + 1/2) / 2**32``, negated (the algorithm and coefficients of FDLIBM)."""
    bits = np.float64(word + 0.5).view(np.int64) + np.int64(_TO_ROOT)
    exponent = np.float64((bits >> np.int64(52)) - np.int64(_BIAS))
    f = np.int64((bits & np.int64(_FRACTION)) + np.int64(_ROOT)).view(np.float64) - 1.0  # in [√½ − 1, √2 − 1)
    s = f / (2.0 + f)
    z = s * s
    series = 1.531383769920937332e-01 + z * 1.479819860511658591e-01
    series = 2.222219843214978396e-01 + z * (1.818357216161805012e-01 + z * series)
    series = 3.999999999940941908e-01 + z * (2.857142874366239149e-01 + z * series)
    series = z * (6.666666666666735130e-01 + z * series)
    half = 0.5 * f * f
    return half - (s * (half + series) + exponent * _LN2_LOW) - f - exponent * _LN2_HIGH


@helper
def _cos_sin(word):
    """Return cosine and sine of ``2π (word + 1/2) / 2**32``: an eighth of a turn by series (FDLIBM), then turned."""
    quarter = np.uint32(word + np.uint32(1 << 29)) >> np.uint32(30)
    x = (np.float64(np.int32(word - (quarter << np.uint32(30)))) + 0.5) * _STEP
    z = x * x
    sine = 2.75573137070700676789e-06 + z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)
    sine = 8.33333333332248946124e-03 + z * (-1.98412698298579493134e-04 + z * sine)
    sine = x + x * z * (-1.66666666666666324348e-01 + z * sine)
    cosine = -2.75573143513906633035e-07 + z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11)
    cosine = -1.38888888888741095749e-03 + z * (2.48015872894767294178e-05 + z * cosine)
    cosine = 1.0 - (0.5 * z - z * z * (4.16666666666666019037e-02 + z * cosine))
    odd = quarter & np.uint32(1)
    a = sine if odd else cosine
    b = cosine if odd else sine
    a = -a if np.uint32(quarter + np.uint32(1)) & np.uint32(2) else a
    b = -b if quarter & np.uint32(2) else b
    return a, b
