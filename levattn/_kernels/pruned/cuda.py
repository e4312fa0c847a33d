"""Clusters for pruned attention on a CUDA device: one launch chooses their first centers."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._kernels.cuda_source import TYPES, launch, namespace, on_device, shared_limit
from levattn._kernels.pruned import definition
from levattn._kernels.pruned.definition import from_rows, sample_step, weighted_mean

_THREADS = 512
_STATIC = 1024  # upper bound of the static shared memory of the kernel, in bytes
_APART = 8  # numbers between rows in shared memory


def cluster(X: Any, weight: Any, R: int, iterations: int) -> tuple[Any, Any]:
    """Return the cluster of each row, (b, n), and its squared distance to the center."""
    return from_rows(X, weight, far_rows(X, weight, R), iterations)


def far_rows(X: Any, weight: Any, R: int) -> Any:
    """Return the rows (b, R) int64 that are the first centers of clusters, from one launch."""
    xp, (b, n, d), size = namespace(), X.shape, X.dtype.itemsize
    step = sample_step(n, R)
    count = -(-n // step)
    room = shared_limit() - _STATIC - d * size
    if room < 0:  # a row does not fit
        return definition.far_rows(X, weight, R)
    inside = count * size <= room
    room -= inside * count * size
    resident = min(count, room // ((d + _APART) * size))
    outside = None if inside else xp.empty((b, count), X.dtype)
    picks = xp.empty((b, R), np.int64)
    given = on_device(X), on_device(weight, X.dtype), on_device(weighted_mean(X, weight))
    shared = (d + inside * count + resident * (d + _APART)) * size
    arguments = [*given, n, d, step, count, R, resident, inside, outside, picks]
    launch("far", "far_rows", (TYPES[X.dtype.name],), (b,), arguments, threads=_THREADS, shared=shared)
    return picks
