"""Squared attention of queries on a CUDA device: normalizers, and heavy entries in two passes.

Queries, keys and results are float64 arrays of the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._kernels.cuda_source import launch, namespace, on_device
from levattn._kernels.rows.cuda import sum_in_pairs

_TILE = 64  # queries of a block
_CHUNK = 2048  # keys that a block counts: a count and a sum are kept for each query and chunk


def query_norms(Q: Any, N: Any) -> tuple[Any, Any]:
    """Return the normalizers of queries."""
    xp, (m, d) = namespace(), Q.shape
    squares, bounds = xp.empty(m), xp.empty(m)
    arguments = [on_device(Q), on_device(N, np.float64), m, len(N), d, squares, bounds]
    launch("heavy", "square_queries", (), (-(-m // _TILE),), arguments)
    return squares, bounds


def heavy_entries(Q: Any, keys: Any, indices: Any, normalizers: Any, epsilon: float) -> tuple[Any, Any, Any, Any]:
    """Extract heavy entries."""
    xp, (m, d), u = namespace(), Q.shape, len(keys)
    chunks = max(1, -(-u // _CHUNK))
    grid = (-(-m // _TILE) * chunks,)
    Q, keys, normalizers = on_device(Q), on_device(keys), on_device(normalizers)
    numbers = [normalizers, epsilon, m, u, d, _CHUNK, chunks]
    counts, masses = xp.empty((m, chunks), np.int64), xp.empty((m, chunks))
    launch("heavy", "count_heavy", (), grid, [Q, keys, *numbers, counts, masses])
    offsets = xp.zeros(m * chunks + 1, np.int64)
    if counts.size:
        offsets[1:] = xp.cumsum(counts.reshape(-1))
    total = int(offsets[-1])
    found, scores = xp.empty(total, np.int64), xp.empty(total)
    if total:
        arguments = [Q, keys, on_device(indices, np.int64), *numbers, offsets, found, scores]
        launch("heavy", "fill_heavy", (), grid, arguments)
    return offsets[::chunks], found, scores, sum_in_pairs(masses)
