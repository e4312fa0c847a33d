"""States, their parts.

Inside: failures are planted while a state is saved, and sums are added in orders that no state takes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_state_bytes import gaussian, one

from levattn import StreamingUniversalSet
from levattn._kernels import PairwiseSum


def test_a_failed_save_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    one(gaussian(5)).save(path)
    before = path.read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            one(gaussian(50)).save(path)
    monkeypatch.setattr(StreamingUniversalSet, "to_bytes", fail)
    with pytest.raises(OSError, match="no space"):
        one(gaussian(50)).save(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_pairwise_sums_are_one_tree() -> None:
    terms = np.random.default_rng(9).standard_normal(11)
    singly, jointly = PairwiseSum(), PairwiseSum()
    for term in terms:
        singly.add(term)
    jointly.add((terms[0] + terms[1]) + (terms[2] + terms[3]), 2)
    jointly.add((terms[4] + terms[5]) + (terms[6] + terms[7]), 2)
    jointly.add(terms[8] + terms[9], 1)
    jointly.add(terms[10])
    assert singly.total() == jointly.total()
    assert PairwiseSum().total() is None
    with pytest.raises(ValueError, match="cannot begin"):
        jointly.add(terms[0], 1)
