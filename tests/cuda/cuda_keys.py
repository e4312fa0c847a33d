"""Keys as kernels may find them: in any format and layout, with all that is done to rows on the way in."""

from __future__ import annotations

from typing import Any

import numpy as np

from levattn._core.arrays import to_float64
from levattn._kernels import Rows

FORMATS = ("float64", "float32", "float16", "bfloat16")
LAYOUTS = ("plain", "columns", "every other", "backwards", "heads last", "off by one")


def stored(X: Any, format: str) -> Any:
    """Numbers in a format, 16-bit floats as words."""
    if format == "bfloat16":
        return (X.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    X = X.astype(format)
    return X.view(np.uint16) if format == "float16" else X


def laid_out(K: Any, layout: str) -> Any:
    """The same keys in another layout."""
    if layout == "columns":
        return np.ascontiguousarray(K.transpose(2, 0, 1)).transpose(1, 2, 0)
    if layout == "every other":
        return np.repeat(np.repeat(K, 2, axis=1), 2, axis=2)[:, ::2, ::2]
    if layout == "backwards":
        return np.ascontiguousarray(K[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]
    if layout == "heads last":
        return np.ascontiguousarray(K.transpose(1, 0, 2)).transpose(1, 0, 2)
    if layout == "off by one":  # not aligned for vectors
        larger = np.zeros((*K.shape[:2], K.shape[2] + 1), K.dtype)
        larger[:, :, 1:] = K
        return larger[:, :, 1:]
    return K


def rows_of(kind: str, b: int, n: int, d: int, format: str = "float32", *, integers: bool = False) -> Rows:
    """Keys at random in a layout, or `transformed`: with all that is done to rows on the way in, NaN where masked."""
    rng = np.random.default_rng([b, n, d])
    values = rng.integers(-9, 10, (b, n, d)) if integers else rng.standard_normal((b, n, d))
    K = stored(values.astype(np.float64), format)
    if kind != "transformed":
        return Rows(laid_out(K, kind), format)
    mask, scale = rng.random((b, n)) < 0.7, np.exp2(rng.integers(-3, 4, (b, d)))
    shift, weights = rng.standard_normal((b, d)), rng.random((b, n))
    if integers:
        shift, scale, weights = np.rint(3 * shift), np.exp2(rng.integers(0, 3, (b, d))), np.rint(3 * weights)
    rests = np.zeros((2, b, d)) if integers else rng.uniform(-1, 1, (2, b, d)) * [[[2.0**-30]], [[2.0**-60]]]
    K[~mask] = stored(np.full(1, np.nan), format)[0]
    return Rows(K, format, mask, np.stack([shift, *rests], axis=1), scale, weights)


def read(rows: Rows) -> Any:
    """The rows as kernels read them, in float64."""
    X = to_float64(rows.keys, rows.format)
    if rows.scale is not None:
        X = X * rows.scale[:, None]
    if rows.shift is not None:
        X = X - rows.shift[:, :1] - rows.shift[:, 1:2]
    if rows.weights is not None:
        X = X * rows.weights[:, :, None]
    return X if rows.mask is None else np.where(rows.mask[:, :, None], X, 0.0)
