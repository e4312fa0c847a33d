"""Mergeable statistics of keys, values and tokens: an identity, ``update``, ``merge``, and a read-out.

An algorithm on a state runs on all data at once, in chunks and across machines without further mathematics.
"""

from __future__ import annotations

from levattn.states.blocks import factor_of, factor_of_sum
from levattn.states.moments import Moments
from levattn.states.softmax import SoftmaxState, TokenState

__all__ = ["Moments", "SoftmaxState", "TokenState", "factor_of", "factor_of_sum"]
