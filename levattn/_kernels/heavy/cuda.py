"""Squared attention of queries on a CUDA device: normalizers, and heavy entries in two passes.

Queries, keys and results are float64 arrays of the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._kernels.cuda_source import launch, namespace
from levattn._kernels.rows.cuda import on_device, sum_in_pairs

__all__ = ["heavy_entries", "query_norms"]

_TILE = 64  # queries of a block
_THREADS = 256
_CHUNK = 2048  # keys that a block counts: a count and a sum are kept for each query and chunk


def query_norms(Q: Any, N: Any) -> tuple[Any, Any]:
    """Return the normalizers of queries."""
    xp, (m, d) = namespace(), Q.shape
    squares, bounds = xp.empty(m), xp.empty(m)
    arguments = [on_device(Q), on_device(N, np.float64), np.int64(m), np.int32(len(N)), np.int32(d), squares, bounds]
    launch("heavy", "square_queries", (), (-(-m // _TILE),), _THREADS, arguments)
    return squares, bounds


def heavy_entries(Q: Any, keys: Any, indices: Any, normalizers: Any, epsilon: float) -> tuple[Any, Any, Any, Any]:
    """Extract heavy entries."""
    xp, (m, d), u = namespace(), Q.shape, len(keys)
    chunks = max(1, -(-u // _CHUNK))
    grid = (-(-m // _TILE) * chunks,)
    Q, keys, normalizers = on_device(Q), on_device(keys), on_device(normalizers)
    sizes = [np.int64(m), np.int64(u), np.int32(d), np.int32(_CHUNK), np.int32(chunks)]
    counts, masses = xp.empty((m, chunks), np.int64), xp.empty((m, chunks))
    arguments = [Q, keys, normalizers, np.float64(epsilon), *sizes, counts, masses]
    launch("heavy", "count_heavy", (), grid, _THREADS, arguments)
    offsets = xp.zeros(m * chunks + 1, np.int64)
    if counts.size:
        offsets[1:] = xp.cumsum(counts.reshape(-1))
    total = int(offsets[-1])
    found, scores = xp.empty(total, np.int64), xp.empty(total)
    arguments = [Q, keys, on_device(indices, np.int64), normalizers, np.float64(epsilon), *sizes]
    if total:
        launch("heavy", "fill_heavy", (), grid, _THREADS, [*arguments, offsets, found, scores])
    return offsets[::chunks], found, scores, sum_in_pairs(masses)
