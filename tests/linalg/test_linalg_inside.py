"""Factors, their parts.

Inside: the memory of a machine is made small, and sparse keys must not be read in another basis.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import levattn
import strategies
from levattn.linalg import reading, sums
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


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_dependent_sparse_columns_take_no_pass_in_another_basis(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = np.random.default_rng(0).integers(0, [8, 5], (300, 2))
    K = np.hstack([np.eye(8)[levels[:, 0]], factor * np.eye(5)[levels[:, 1]]])
    whole = sums.moments_of_items

    def without_basis(*arguments: Any, **options: Any) -> Any:
        assert options.get("basis") is None
        return whole(*arguments, **options)

    monkeypatch.setattr(sums, "moments_of_items", without_basis)
    assert levattn.universal_set(strategies.csr(K), 0.1).rank == 12
    with pytest.raises(AssertionError):
        levattn.universal_set(K, 0.1)  # dense keys take such a pass
