"""Tests that losses in [0, 1] are small in expectation, by p-values that hold for any number of texts.

This module does not need torch.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def p_value(total: float, count: int, risk: float) -> float:
    """Return the Hoeffding–Bentkus p-value of an expected loss above `risk`, for independent losses with this sum.

    Consider `count` independent losses in [0, 1] of one distribution with an expectation above `risk`. For every u,
    the value is then at most u with probability at most u. See Bates, Angelopoulos, Lei, Malik and Jordan,
    "Distribution-free, risk-controlling prediction sets", JACM 68, 2021, Section 3.1. The value is the smaller of
    Hoeffding's bound by relative entropy, which is smaller for a sum of 0, and Bentkus's by a binomial tail.
    """
    from scipy.special import bdtr

    bentkus = math.e * float(bdtr(math.ceil(total), count, risk))
    return min(1.0, _hoeffding(total / count, count, risk), bentkus)


def least_texts(mean: float, risk: float, confidence: float) -> int | None:
    """Return a number of losses with this mean that shows a risk with a confidence; None if no number does.

    For a mean of 0 the number is minimal: it is the least n with (1 − risk)ⁿ ≤ 1 − confidence. For other means
    Bentkus's bound may need slightly fewer losses.
    """
    rate = _relative_entropy(min(mean, risk), risk)
    if rate <= 0:
        return None
    count = math.ceil(min(-math.log(1 - confidence) / rate, 1e18))
    return count if _hoeffding(mean, count, risk) <= 1 - confidence else count + 1


def count_shown(losses: npt.NDArray[np.float64], risk: float, confidence: float) -> int:
    """Return how many candidates, from the first, the tests show to have an expected loss of at most `risk`.

    The losses are for texts (rows) and candidates (columns), in an order that does not depend on these texts. Each
    candidate is tested at the whole level 1 − `confidence`, and the first failure ends the tests. With probability at
    most 1 − `confidence`, a candidate before it has an expected loss above the risk. This is fixed-sequence testing;
    see Angelopoulos, Bates, Candès, Jordan and Lei, "Learn then Test", arXiv:2110.01052, Section 2.2.
    """
    for place, of in enumerate(losses.T):
        if p_value(math.fsum(of), len(of), risk) > 1 - confidence:
            return place
    return len(losses.T)


def _hoeffding(mean: float, count: int, risk: float) -> float:
    return math.exp(-count * _relative_entropy(min(mean, risk), risk))


def _relative_entropy(a: float, b: float) -> float:
    """Return the relative entropy of a coin with probability a from a coin with b, in nats, for 0 <= a <= b < 1."""
    return (a * math.log(a / b) if a else 0.0) + (1 - a) * (math.log1p(-a) - math.log1p(-b))
