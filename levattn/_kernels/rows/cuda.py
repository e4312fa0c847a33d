"""Keys as arguments of CUDA kernels, in the order of `KEY_PARAMETERS` in keys.cuh."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._kernels.cuda_source import NOTHING, TYPES, namespace
from levattn._kernels.rows.contract import Rows

__all__ = ["key_arguments", "key_type", "on_device", "sum_in_pairs"]


def key_type(rows: Rows) -> str:
    """Return the C++ type of the stored numbers."""
    return TYPES[rows.format]


def on_device(array: Any, dtype: Any = None) -> Any:
    """Return an array of the device, copied there if it is numpy's, with rows next to each other."""
    return namespace().asarray(array, dtype, order="C")


def key_arguments(rows: Rows) -> list[Any]:
    """Return the keys and what is done to them as arguments of a kernel."""
    steps = [np.int64(step // rows.keys.itemsize) for step in rows.keys.strides]
    mask, mask_step = _beside(rows.mask, np.bool_)
    weights, weight_step = _beside(rows.weights, np.float64)
    shift, scale = (
        NOTHING if columns is None else on_device(columns, np.float64) for columns in (rows.shift, rows.scale)
    )
    return [rows.keys, *steps, mask, mask_step, shift, scale, weights, weight_step, np.int32(rows.shape[2])]


def sum_in_pairs(terms: Any) -> Any:
    """Return the sum over axis 1 in pairs, pairs of pairs, and so on, of which the last may be a single one."""
    while terms.shape[1] > 1:
        whole = terms.shape[1] // 2 * 2
        terms = namespace().concatenate([terms[:, 0:whole:2] + terms[:, 1:whole:2], terms[:, whole:]], axis=1)
    return terms.sum(axis=1)


def _beside(array: Any, dtype: Any) -> tuple[Any, np.int64]:
    """Return what is beside the rows (b, n), or nothing, and how far its matrices are apart."""
    if array is None:
        return NOTHING, np.int64(0)
    array = on_device(array, dtype)
    return array, np.int64(array.shape[1])
