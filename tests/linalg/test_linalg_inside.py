"""Factors, their parts.

Inside: the memory of a machine is made small.
"""

from __future__ import annotations

import numpy as np
import pytest

import levattn
from levattn.linalg import reading
from levattn.states import Moments


def test_states_refuse_sums_larger_than_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_memory", lambda: 10**6)
    with pytest.raises(ValueError, match=r"d = 354 .* 1002528 bytes.*transposed"):
        Moments(354)
    with pytest.raises(ValueError, match="transposed"):
        Moments(354, decay=0.5)
    assert Moments(353).d == 353
    assert Moments(354, diagonal=True).d == 354
    K = np.ones((2, 354))
    for state in (levattn.StreamingUniversalSet(0.5), levattn.CausalUniversalSet(0.5)):
        with pytest.raises(ValueError, match="transposed"):
            state.update(K)
        state.update(K[:, :100])  # it is as it was
    monkeypatch.setattr(reading, "_memory", lambda: None)
    assert Moments(10**6).d == 10**6
