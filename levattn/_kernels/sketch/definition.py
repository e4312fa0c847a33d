"""Random sketches as definitions in the array-API standard; `out` is a numpy array."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.arrays import to_numpy
from levattn._core.random import below, signs, words
from levattn._core.types import Float64
from levattn._kernels.rows import Rows
from levattn._kernels.rows.definition import send, transformed_rows

_SKETCHED = 256  # rows for which a dense piece of a sparse sketch is formed


def scatter(rows: Rows, seed: int, stream: int, offset: int, blocks: int, size: int, out: Any) -> None:
    """Add sparse sketches of the matrices to `out`."""
    for low in range(0, rows.shape[1], _SKETCHED):
        part = rows.between(low, min(low + _SKETCHED, rows.shape[1]))
        drawn = words(seed, stream, offset + low, part.shape[1], blocks)
        columns = np.zeros((blocks * size, part.shape[1]))
        columns[below(drawn, size) + size * np.arange(blocks), np.arange(part.shape[1])[:, None]] = signs(drawn)
        add_products(part, columns, out)


def add_products(rows: Rows, S: Float64, out: Any) -> None:
    """Add S times the rows of each matrix to `out`, (b, size, d)."""
    S_here = send(S, rows)
    for item in range(rows.shape[0]):
        out[item] += to_numpy(S_here @ transformed_rows(rows, item, 0, rows.shape[1]))
