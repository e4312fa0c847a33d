"""Second moments and squared norms on the tensor cores of a CUDA device: launches of tensor.cu.

They replace the plain kernels for products in single precision and up to 128 columns. The format and the shape alone
decide which kernel runs. So the bits depend neither on the layout of the keys nor on the rest of their batch. Where
the layout does not allow the fastest copies, the same kernels read the keys one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._kernels.cuda_source import launch, namespace, on_device, with_steps
from levattn._kernels.rows import Pieces, Rows
from levattn._kernels.rows.cuda import MOST_SLABS, key_arguments, key_type

_ROOM = 1 << 28  # bytes of split factors at a time
_BUSY = 528  # blocks of threads that take turns over the rows; each has a copy of the factor

# Constants of tensor.cu as well
_WIDEST = 128
_STAGE = 32 * 128  # entries of keys
_STAGES = {"float": 3, "Half": 6, "Bfloat": 6}
_BYTES = {"float": 4, "Half": 2, "Bfloat": 2}
_SIDE = 32
_SCORE_WARPS = {"float": 8, "Half": 6, "Bfloat": 6}
_SCORE_ROWS = {"float": 16, "Half": 32, "Bfloat": 32}  # of a warp


def has_tensor_products(rows: Rows, width: int = 1) -> bool:
    """Tell whether tensor cores multiply these keys with one another, and with a matrix of so many columns."""
    return rows.format != "float64" and max(rows.shape[2], width) <= _WIDEST


def listed_items(rows: Rows, items: Any) -> Any:
    """Return a list of matrices on the device, or None where they are all matrices in order."""
    listed = np.asarray(items, np.int64)
    b = rows.shape[0]
    return None if len(listed) == b and (listed == np.arange(b)).all() else on_device(listed)


def tensor_moments(rows: Rows, arguments: list[Any], blocks: int) -> None:
    """Launch `tensor_moments` with the arguments of `moment_blocks`."""
    padded, raw = _padded(rows.shape[2]), _multiplied(rows)
    tiles = padded // _SIDE * (padded // _SIDE + 1) // 2
    threads = 32 * tiles * (_WIDEST // padded)
    shared = _STAGES[raw] * _STAGE * _BYTES[raw]
    if raw == "float":
        shared += 2 * _STAGE * 2 + 4 * _WIDEST  # both parts, and the scales of columns
    types = key_type(rows), raw, str(padded)
    launch("tensor", "tensor_moments", types, (blocks,), arguments, threads=threads, shared=shared)


def tensor_squares(rows: Rows, items: Pieces, W: Any, out: Any, ceiling: float, *, triangular: bool) -> None:
    """Write ``‖k W‖²`` of every key of the matrices `items`, for entries of W in single precision."""
    xp = namespace()
    _, n, d = rows.shape
    width = W.shape[2]
    padded, raw = _padded(max(d, width)), _multiplied(rows)
    types = key_type(rows), raw, str(padded)
    threads, at_once = 32 * _SCORE_WARPS[raw], _SCORE_WARPS[raw] * _SCORE_ROWS[raw]
    matrices, listed = on_device(W, np.float64), listed_items(rows, items)
    _, out_step = with_steps(out, 1)
    either = (None, out) if out.dtype == np.float64 else (out, None)
    arguments = [*key_arguments(rows), n, listed]
    tail = [width, triangular, ceiling, *either, out_step]
    step = min(MOST_SLABS, _ROOM // (4 * padded * padded))
    for before in range(0, len(items), step):
        slots = min(step, len(items) - before)
        factors, scales = xp.empty((slots, padded * padded), np.uint32), xp.empty((slots, padded), np.float32)
        given = [matrices[before : before + slots], d, width, triangular, factors, scales]
        launch("tensor", "split_factors", (str(padded),), (slots,), given)
        grid = (min(-(-n // at_once), -(-_BUSY // slots)), slots)
        given = [*arguments, before, factors, scales, *tail]
        shared = 4 * padded * padded + 4 * padded
        launch("tensor", "tensor_squares", types, grid, given, threads=threads, shared=shared)


def _padded(columns: int) -> int:
    return 64 if columns <= 64 else _WIDEST


def _multiplied(rows: Rows) -> str:
    """Return the C++ type of the factors of products: 16 bits if the keys, changed on reading, need no more."""
    changed = (
        rows.shift is not None or rows.weights is not None or (rows.scale is not None and rows.format == "float16")
    )
    return "float" if changed else key_type(rows)
