"""Factors from moments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from levattn._kernels import Rows
from levattn.linalg.accumulator import GramAccumulator
from levattn.linalg.factor import Factor
from levattn.linalg.gram import DoubleDouble, Exponents
from levattn.linalg.routes import factor_moments, factor_sum


def factor_of(sums: GramAccumulator, tail: Rows) -> Factor:
    """Return the factor of the keys of a sum and of the rows that wait, without holding these rows."""
    if sums.merged is None and not sums.blocks.count:
        return factor_moments(tail, single="scores").forget_keys()
    b, _, d = tail.shape
    return factor_of_sum(*sums.total(tail), Rows(np.empty((b, 0, d), tail.keys.dtype), tail.format))


def factor_of_sum(moments: DoubleDouble, exponents: Exponents, like: Rows) -> Factor:
    """Return the factor of moments of columns times ``2**-exponents``, for keys of the form of `like`.

    It is on the device of `like`, which has no rows.
    """
    scale = np.ldexp(1.0, -exponents) if exponents.any() else None
    return factor_sum(moments.beside(like.keys), replace(like, mask=None, scale=scale))
