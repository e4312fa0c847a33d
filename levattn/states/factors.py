"""Factors from moments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import array_api_compat
import numpy as np

from levattn._core.arrays import to_numpy
from levattn._kernels import Rows
from levattn.linalg.accumulator import GramAccumulator
from levattn.linalg.factor import Factor
from levattn.linalg.gram import DoubleDouble, Exponents
from levattn.linalg.routes import factor_moments, factor_sum


def factor_of(sums: GramAccumulator, tail: Rows) -> Factor:
    """Return the factor of the keys of a sum and of the rows that wait, without holding these rows."""
    if sums.merged is None and not sums.blocks.count:
        return factor_moments(tail, single="scores").forget_keys()
    b, _, d = tail.shape
    return factor_of_sum(*sums.total(tail), Rows(np.empty((b, 0, d), tail.keys.dtype), tail.format))


def factor_of_sum(moments: DoubleDouble, exponents: Exponents, like: Rows) -> Factor:
    """Return the factor of moments of columns times ``2**-exponents``, for keys of the form of `like`.

    It is on the device of `like`, which has no rows.
    """
    scale = np.ldexp(1.0, -exponents) if exponents.any() else None
    return factor_sum(moments.beside(like.keys), replace(like, mask=None, scale=scale))


def held_as(name: str, array: Any) -> Any:
    """Return an array of float64 as a state holds it, or raise."""
    if isinstance(array, np.ndarray) and array.dtype == np.float64:
        return array
    if array_api_compat.is_torch_array(array) and array.device.type == "cpu":
        array = to_numpy(array.detach())
    if not array_api_compat.is_array_api_obj(array) or str(array.dtype).rpartition(".")[2] != "float64":
        kind = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"{name} is of {kind}; expected an array of float64, as the attributes of a state are")
    return array


def same_decay(mine: Any, other: Any, batch: tuple[int, ...]) -> bool:
    """Tell whether decays, None for 1, are the same for all of a batch."""
    if mine is None and other is None:
        return True
    held = (np.broadcast_to(1.0 if decay is None else decay, batch) for decay in (mine, other))
    return bool(np.equal(*held).all())
