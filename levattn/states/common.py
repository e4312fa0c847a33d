"""Checks of the arguments of states."""

from __future__ import annotations

from typing import Any

import array_api_compat
import numpy as np

from levattn._core.arrays import to_numpy


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
