"""Groups of torch, their parts.

Inside: what travels between ranks no result shows, and chunks are made small.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
from test_torch_distributed import (  # noqa: E402
    alone,
    generator,
    heads,
    row_numbers,
)

import levattn  # noqa: E402
from levattn.distributed.torch import _compact, _expanded, universal_set  # noqa: E402
from strategies import conditioned  # noqa: E402

__all__ = ["alone"]  # fixtures


@pytest.mark.parametrize("condition", [1, 1e10])
def test_states_travel_without_loss(condition: float) -> None:
    K = conditioned(generator(0), 5000, 7, condition)
    state = levattn.StreamingUniversalSet(0.02, row_start=3).update(np.stack([K, 3 * K]))
    for sent in (state, levattn.StreamingUniversalSet(0.02, row_start=0).merge(state)):
        fields, arrays = _compact(*sent.parts())
        assert _expanded(fields, arrays).to_bytes() == sent.to_bytes()
    assert {"merged.high", "merged.rest"} - fields["zeros"].keys() <= fields["triangles"].keys()


@pytest.mark.parametrize(("condition", "share"), [(1, 4), (1e5, 8), (1e10, 20)])
@pytest.mark.usefixtures("alone")
def test_bytes_of_a_state_are_those_of_the_page(condition: float, share: int) -> None:
    """Half of a symmetric matrix, or of two or three, and then d rows that span the others."""
    d = 128
    _, traffic = universal_set(conditioned(generator(0), 3000, d, condition), 0.5)
    assert traffic.moments == pytest.approx(share * d * d, rel=0.1)


def test_keys_come_in_chunks(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"payload": row_numbers(heads()), "mask": heads()[..., 1] < 1}
    whole = universal_set(heads(), 0.05, **given)
    monkeypatch.setattr("levattn.distributed.torch._CHUNK_BYTES", 1)  # so blocks of 2048 rows
    parts = universal_set(heads(), epsilon=0.05, **given)
    assert parts[1] == whole[1]
    for one, other in zip(parts[0].items, whole[0].items, strict=True):
        for name in ("indices", "scores", "keys", "payload"):
            assert len(getattr(one, name))
            assert np.array_equal(getattr(one, name), getattr(other, name))
