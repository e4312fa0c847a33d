"""Rows with weights: each is read times the root of its weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import array_api_compat
import numpy as np

from levattn._core.arrays import (
    Matrices,
    array_namespace,
    as_cupy,
    named_numpy,
    on_cuda,
    to_device,
    to_float64,
    to_numpy,
)
from levattn._core.checks import check_nonnegative
from levattn._core.sparse import Csr
from levattn._core.types import Float64
from levattn._kernels import KEYS, Rows
from levattn.linalg.reading import as_read, each_in_memory, read_in_pieces

_SMALLEST = 2.0**-1022  # normal number
_FAR = 300  # powers of two by which the roots of weights may differ, so that no product with a key underflows


def numbers_of(weights: Any, *, here: bool = True) -> Any:
    """Return weights as an array of numbers, `here` in main memory, or raise."""
    if array_api_compat.is_torch_array(weights):
        weights = weights.detach()
        weights = weights.float() if weights.is_floating_point() and weights.element_size() == 2 else weights
    found = None if here else as_cupy(weights)
    if found is None:
        found = named_numpy("weights", weights) if array_api_compat.is_array_api_obj(weights) else np.asarray(weights)
        found = found.astype(np.float32) if found.dtype.name == "bfloat16" else found
    if found.dtype.kind not in "fiu":
        raise TypeError(f"weights is of dtype {found.dtype}; expected numbers")
    return found


def checked_weights(weights: Any, matrices: Matrices, rows: Rows) -> Any:
    """Return weights as (b, m) in float64 where the rows are, 0 for masked ones, or raise."""
    shape = (*matrices.batch, matrices.n)
    here = isinstance(rows.keys, np.ndarray | Csr)
    found = numbers_of(weights, here=here)
    if not here and isinstance(found, np.ndarray):
        found = array_namespace(rows.keys).asarray(found)
    xp = array_namespace(found)
    try:
        found = xp.reshape(xp.broadcast_to(xp.astype(found, xp.float64), shape), rows.shape[:2])
    except ValueError:
        raise ValueError(f"weights has shape {tuple(found.shape)}; expected one that broadcasts to {shape}") from None
    if rows.mask is not None:
        found = xp.where(rows.mask, found, xp.zeros_like(found))
    if not bool(xp.all((found >= 0) & xp.isfinite(found))):
        check_nonnegative("weights", to_numpy(found).reshape(shape))
    return found


def weighted(matrices: Matrices, weights: Any) -> tuple[Matrices, Float64 | None, int]:
    """Return the keys of positive weight, the roots of the weights (b, n) over a power of two, and that power.

    Scores do not depend on a common factor of the weights.
    """
    if weights is None:
        return matrices, None, 0
    if isinstance(matrices.data, np.ndarray | Csr) or on_cuda(matrices.data):
        found = to_numpy(checked_weights(weights, matrices, Rows.of(matrices)))
    else:  # of an array of any other library
        mask = None if matrices.mask is None else to_numpy(matrices.mask)
        found = checked_weights(weights, matrices, Rows(np.empty((*matrices.data.shape[:2], 0)), "float64", mask))
    roots = np.sqrt(found)
    there = roots > 0
    power = int(np.frexp(roots.max(initial=0.0))[1])
    roots = np.ldexp(roots, -power)
    if roots.min(initial=1.0, where=there) < 2.0**-_FAR:
        raise ValueError(
            f"weights are from {found.min(initial=np.inf, where=there):.3g} to {found.max():.3g}; expected positive "
            f"ones that differ by a factor of at most 2^{2 * _FAR}. Give smaller ones as 0 to leave their keys out"
        )
    if not there.all():
        held = to_device(there, matrices.data)
        matrices = replace(matrices, mask=held if matrices.mask is None else matrices.mask & held)
    return matrices, np.where(there, roots, 1.0), power


def exact_products(roots: Float64) -> bool:
    """Tell whether keys times these roots are not rounded: all roots are powers of two, or 0."""
    return bool((np.frexp(roots)[0][roots > 0] == 0.5).all())


def chunk_times_roots(matrices: Matrices, rows: Rows, weights: Any) -> tuple[Matrices, Rows, bool]:
    """Return a chunk of keys times the roots of their weights, of float64 in main memory, and whether it is rounded.

    Keys of weight 0 and masked keys become masked zeros, whatever they hold.
    """
    roots = np.sqrt(to_numpy(checked_weights(weights, matrices, rows)))
    there = roots > 0
    keys = np.where(there[:, :, None], to_float64(rows.keys, rows.format), 0.0)
    require_products(keys, roots)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # of entries that do not matter in their row
        keys *= roots[:, :, None]
    mask = None if there.all() else there
    made = replace(matrices, data=keys, format="float64", mask=mask)
    return made, Rows(keys, "float64", mask), not exact_products(roots)


_SAMPLE = 4096  # rows that tell how large entries of columns, and rows, usually are
_LONG, _LONGER = 20, 24  # powers of two: a row is far longer than most; how much longer than all others it may stay
_ONE = np.zeros(1, np.int64)
_NOTHING = -1e6  # stands for the exponent of zero


def shortened(rows: Rows) -> Rows | None:
    """Return a batch of one, as it is read, with rows scaled down that are far longer than most; None without any.

    To shorten a row k by a factor α < 1 takes (1 − α²)kkᵀ from the moment, so scores only rise. By one such row, which
    stays 2²⁴ times as long, the scores of the others rise by a relative n 2⁻⁴⁸ or so. By several of different lengths
    they may rise by more.
    """
    n = rows.shape[1]
    if isinstance(rows.keys, Csr) or rows.shift is not None or not n:
        return None
    step = -(-n // _SAMPLE)
    mask, weights = (None if x is None else x[:, ::step] for x in (rows.mask, rows.weights))
    ((_, some),) = each_in_memory(replace(rows, keys=rows.keys[:, ::step, :], mask=mask, weights=weights), _ONE)
    sample = as_read(some)
    usual = np.array([np.median(np.frexp(column[column != 0])[1]) if column.any() else 0 for column in sample.T])
    sizes = _sizes(sample, usual)
    most = float(np.median(sizes[sizes > _NOTHING])) + _LONG if sample.any() else 0.0
    if _sizes(KEYS.column_figures(rows, largest=True), usual)[0] <= most:
        return None
    ((_, one),) = each_in_memory(rows, _ONE)
    sizes = np.concatenate([_sizes(X, usual) for X in read_in_pieces(one)])
    limit = sizes.max(where=sizes <= most, initial=_NOTHING) + _LONGER
    if sizes.max() <= limit:
        return None
    powers = np.floor(np.minimum(limit - sizes, 0.0)).astype(np.int32)
    return Rows(np.ldexp(as_read(one), powers[:, None])[None], "float64")


def _sizes(X: Float64, usual: Float64) -> Float64:
    """Return the largest exponent of each row less the usual ones of its columns."""
    return np.asarray(np.where(X != 0, np.frexp(X)[1] - usual, _NOTHING).max(axis=1))


def require_products(keys: Float64, roots: Float64) -> None:
    """Raise where the largest entry of a row of keys (b, m, d) times its root (b, m) leaves the range of float64."""
    sizes = np.max(np.abs(keys), axis=2, initial=0.0)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        products = sizes * roots
    inside = (products >= _SMALLEST) & np.isfinite(products)
    if (np.isfinite(sizes) & (sizes > 0) & (roots > 0) & ~inside & (roots != 1)).any():
        raise ValueError("weights leave the range of float64 together with K; expected their largest near 1")
