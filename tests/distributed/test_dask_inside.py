"""Dask, its parts.

Inside: what is merged, and how many threads a worker has, no result shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")
distributed = pytest.importorskip("distributed")
from test_dask import (  # noqa: E402
    client,
    cluster,
    keys,
)

import levattn  # noqa: E402
from levattn.distributed.dask import (  # noqa: E402
    _merge,
)
from levattn.states import Moments  # noqa: E402

__all__ = ["client", "cluster"]  # fixtures


@pytest.mark.parametrize("new", [lambda: levattn.StreamingUniversalSet(0.1), lambda: Moments(6)], ids=["set", "sums"])
def test_merging_leaves_the_states_as_they_are(new: Callable[[], Any]) -> None:
    states = [new().update(part) for part in np.split(keys(), 3)]
    before = [state.to_bytes() for state in states]
    first, second = (_merge([states], new).to_bytes() for _ in range(2))
    assert first == second
    assert [state.to_bytes() for state in states] == before


def test_kernels_have_the_threads_of_their_worker(client: Any) -> None:
    def threads() -> tuple[int, int]:
        from levattn._core.threads import num_threads
        from levattn.distributed.dask import _threads_of_worker

        with levattn.thread_limit(2):
            before = num_threads()
            with _threads_of_worker():
                return before, num_threads()

    assert client.submit(threads).result() == (2, 1)
    assert threads() == (2, 2)
