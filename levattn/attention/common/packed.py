"""Packed sequences: where each begins and ends among the positions of a call."""

from __future__ import annotations

import sys
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._core.arrays import from_list, to_numpy

__all__ = ["check_offsets", "compiling", "cumulative"]


def compiling() -> bool:
    """Tell whether torch is tracing the call, so that numbers cannot be looked at."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def cumulative(offsets: Any, lengths: Any, T: int) -> Any:
    """Return where packed sequences begin and end, (n + 1,) int64 in main memory, or None if there is only one.

    While torch traces the call it is a tensor, which the operator checks when it runs.
    """
    if offsets is None and lengths is None:
        return None
    if offsets is not None and lengths is not None:
        raise ValueError("offsets and lengths were both given; expected one of them: they say the same")
    name, given = ("offsets", offsets) if lengths is None else ("lengths", lengths)
    if compiling():
        torch = sys.modules["torch"]
        found = torch.as_tensor(given, dtype=torch.int64)
        return found if lengths is None else torch.cat([found.new_zeros(1), torch.cumsum(found, 0)])
    whole = _whole_numbers(name, given)
    if lengths is None:
        return check_offsets(whole, T)
    total = sum(whole.tolist())  # exact: the sum of an array may overflow to T
    if (whole < 0).any() or total != T:
        raise ValueError(
            f"lengths is {_shown(whole)}, which sum to {total}; expected numbers of at least 0 whose sum is T = {T}, "
            "the number of packed positions"
        )
    return check_offsets(np.concatenate([np.zeros(1, np.int64), np.cumsum(whole)]), T)


def check_offsets(offsets: npt.NDArray[np.int64], T: int) -> npt.NDArray[np.int64]:
    """Return offsets that the kernels may follow, or raise."""
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != T or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(
            f"offsets is {_shown(offsets)}; expected whole numbers that ascend from 0 to T = {T}: sequence i is "
            "offsets[i]:offsets[i + 1]"
        )
    return offsets


def _shown(whole: npt.NDArray[Any]) -> str:
    return np.array2string(whole, max_line_width=1000, threshold=8)


def _whole_numbers(name: str, given: Any) -> npt.NDArray[np.int64]:
    """Return one axis of whole numbers as a numpy array, or raise."""
    array = from_list(given, name) if isinstance(given, list | tuple) else given
    if isinstance(given, list | tuple) and not len(given):
        array = array.astype(np.int64)
    found = to_numpy(array) if array_api_compat.is_array_api_obj(array) else np.asarray(None)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(f"{name} is {given!r}; expected one axis of whole numbers")
    if found.size and found.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} is {_shown(found)}; expected whole numbers below 2**63")
    return found.astype(np.int64)
