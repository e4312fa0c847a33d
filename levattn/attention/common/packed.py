"""Packed sequences: the begin and end of each among the positions of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._core.arrays import from_list, is_torch, to_numpy
from levattn._core.checks import check_offsets, shown

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiling() -> bool:
    """Tell whether torch is tracing the call, so that values are not available."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def untraced(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of a call, run by Python even under torch's compiler, because states are not tensors."""
    if not compiling():
        return function(*arguments, **options)
    from levattn._kernels import tensors

    return tensors.untraced(function, *arguments, **options)


def reads_numbers(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function that reads numbers refuse tensors without any, and be left to Python by torch's compiler."""

    @wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        if sys.modules.get("torch") is None:
            return function(*args, **options)
        return untraced(_read, function, *args, **options)  # type: ignore[no-any-return]

    return call


def _read(function: Any, *args: Any, **options: Any) -> Any:
    if given := [value for value in (*args, *options.values()) if is_torch(value)]:
        from levattn._kernels.tensors import hidden_by

        if (what := hidden_by(given)) is not None:
            raise NotImplementedError(
                f"{function.__name__} was called under {what}, which hides the numbers that the call reads; expected "
                "a call without it, on tensors that hold numbers. Leading axes are a batch, in place of vmap"
            )
    return function(*args, **options)


def cumulative(offsets: Any, lengths: Any, T: int) -> Any:
    """Return the bounds of packed sequences, (n + 1,) int64 in main memory, or None if there is only one.

    While torch traces the call, the result is a tensor, which the operator checks when it runs.
    """
    if offsets is None and lengths is None:
        return None
    if offsets is not None and lengths is not None:
        raise ValueError("offsets and lengths were both given; expected one of them, as they mean the same")
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
            f"lengths is {shown(whole)}, which sum to {total}; expected numbers of at least 0 whose sum is T = {T}, "
            "the number of packed positions"
        )
    return check_offsets(np.concatenate([np.zeros(1, np.int64), np.cumsum(whole)]), T)


def given_bounds(bounds: Any, T: int) -> Any:
    """Return bounds for kernels; for None, the bounds of one sequence, or None while torch traces the call.

    An array would make T a constant of the graph; the operator knows T when it runs.
    """
    return np.array([0, T], np.int64) if bounds is None and not compiling() else bounds


def refuse_packed(bounds: Any, state: Any, return_state: bool) -> None:
    """Raise if packed sequences come with a state, or are to return one."""
    if bounds is not None and (state is not None or return_state):
        raise ValueError(
            "offsets or lengths were given with state or return_state; expected one sequence. Call this for each "
            "sequence, or stack sequences of equal length along a leading axis"
        )


def _whole_numbers(name: str, given: Any) -> npt.NDArray[np.int64]:
    """Return one axis of whole numbers as a numpy array, or raise."""
    array = from_list(given, name) if isinstance(given, list | tuple) else given
    if isinstance(given, list | tuple) and not len(given):
        array = array.astype(np.int64)
    found = to_numpy(array) if array_api_compat.is_array_api_obj(array) else np.asarray(None)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(f"{name} is {given!r}; expected one axis of whole numbers")
    if found.size and found.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} is {shown(found)}; expected whole numbers below 2**63")
    return found.astype(np.int64)
