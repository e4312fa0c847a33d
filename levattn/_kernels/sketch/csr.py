"""Random sketches of sparse keys on the CPU: sparse sketches entry by entry, others from blocks of dense rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.threads import parallel_for
from levattn._core.types import Float64
from levattn._kernels.gram.csr_compiled import scatter_entries
from levattn._kernels.pairwise import pairwise_sum
from levattn._kernels.rows import BLOCK, Rows
from levattn._kernels.rows.csr import blocks_of, entries_of
from levattn._kernels.sketch import cpu
from levattn._kernels.sketch.random import key_words


def scatter(rows: Rows, seed: int, stream: int, offset: int, blocks: int, size: int, out: Any) -> None:
    """Add a sparse sketch of the rows to `out`."""
    n = rows.shape[1]
    if rows.shift is not None:
        for low, dense in blocks_of(rows):
            cpu.scatter(dense, seed, stream, offset + low, blocks, size, out)
        return
    arguments = entries_of(rows)
    keys = key_words(seed)
    read = float(rows.keys.indptr[-1] - rows.keys.indptr[0]) * blocks
    parts = 1  # as many sketches as cost little beside the entries, whatever the number of threads
    while parts < 8 and 4 * parts * out[0].size <= read:
        parts *= 2
    sums = np.zeros((parts, *out[0].shape), out.dtype)

    def body(part: int) -> None:
        run = n * part // parts, n * (part + 1) // parts
        scatter_entries(*arguments, *run, *keys, stream, offset, blocks, size, sums[part])

    parallel_for(body, parts)
    out[0] += pairwise_sum(sums)


def add_products(rows: Rows, S: Float64, out: Any) -> None:
    """Add S times the rows to `out`."""
    for low, dense in blocks_of(rows):
        cpu.add_products(dense, S[:, low : low + dense.shape[1]], out)


def dense_sketch(rows: Rows, seed: int, stream: int, offset: int, normal: bool, out: Any) -> None:
    """Add a dense sketch of the rows to `out`."""
    for low, dense in blocks_of(rows):
        cpu.dense_sketch(dense, seed, stream, offset + low, normal, out)


def subsampled_hadamard(
    rows: Rows, seed: int, streams: tuple[int, int], offset: int, block: int, chosen: Any, out: Any
) -> None:
    """Add a subsampled Hadamard transform of the rows to `out`."""
    for low, dense in blocks_of(rows, max(BLOCK, block)):
        cpu.subsampled_hadamard(dense, seed, streams, offset + low, block, chosen, out)
