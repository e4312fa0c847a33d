"""Arrays of JAX: their numbers are read in main memory as numpy arrays, and results go back to their device.

All computation is numpy's, because JAX has no float64 by default. Without float64 no guarantee would hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_Function = TypeVar("_Function", bound=Callable[..., Any])

BY_NUMPY: set[Callable[..., Any]] = set()  # functions that see arrays of JAX as numpy arrays


def by_numpy(function: _Function) -> _Function:
    """Let `where_arrays_are` give a function numpy arrays for arrays of JAX, and return its results as JAX's."""
    BY_NUMPY.add(function)
    return function


def is_jax(array: Any) -> bool:
    """Tell whether an array is JAX's, or stands for one while JAX traces a function."""
    jax = sys.modules.get("jax")  # an array can only come from a module that is loaded
    return jax is not None and isinstance(array, getattr(jax, "Array", ()))  # another thread may be importing it


def from_jax(array: Any, name: str) -> npt.NDArray[Any]:
    """Return the numbers of an array of JAX, on a CPU without a copy; raise if it has none."""
    try:
        return np.asarray(array)
    except sys.modules["jax"].errors.TracerArrayConversionError:
        raise TypeError(
            f"{name} is a tracer of JAX ({type(array).__name__}), which has a shape but no numbers; expected a "
            "concrete array. Call levattn outside of the function that JAX transforms (jit, vmap, grad, scan), or in "
            "it through jax.pure_callback, which has no gradient"
        ) from None


def to_jax(like: Any) -> Callable[[Any], Any]:
    """Return a function that makes numpy arrays to arrays of JAX, on the device of `like`."""
    device = like.device if len(like.devices()) == 1 else None  # several devices: JAX moves a result as it needs it
    committed = device is not None and like.committed

    def put(array: Any) -> Any:
        jax = sys.modules["jax"]
        if committed:
            return jax.device_put(array, device)
        with jax.default_device(device):
            return jax.numpy.asarray(array)

    return put


def has_jax(args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Tell whether there is an array of JAX among the arguments of a call, or in a tuple or a record of them."""
    return any(any(map(is_jax, _held(value).values())) for value in (*args, *options.values()))


def called_by_numpy(function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return the result of a function for arrays of JAX; see `by_numpy`. States hold numpy arrays."""
    names = function.__code__.co_varnames
    given = [*zip(names, args, strict=False), *options.items()]
    found = {name: _numpy_of(value, name) for name, value in given}
    result = function(
        *(found[name] for name, _ in zip(names, args, strict=False)), **{name: found[name] for name in options}
    )
    arrays = (part for _, value in given for part in _held(value).values() if is_jax(part))
    return _given_back(result, to_jax(next(arrays)))


def _numpy_of(value: Any, name: str) -> Any:
    """Return an argument with numpy arrays in place of arrays of JAX, also within a tuple or a record of options."""
    if is_jax(value):
        return from_jax(value, name)
    changed = {label: from_jax(part, f"{name}.{label}") for label, part in _held(value).items() if is_jax(part)}
    if changed and type(value) in (tuple, list):
        return type(value)(changed.get(place, part) for place, part in enumerate(value))
    return replace(value, **changed) if changed else value


def _held(value: Any) -> dict[Any, Any]:
    """Return the parts of a tuple or a record of options by their names, or another value by no name."""
    if type(value) in (tuple, list):
        return dict(enumerate(value))
    if not is_dataclass(value) or isinstance(value, type):
        return {"": value}
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}


def _given_back(result: Any, put: Callable[[Any], Any]) -> Any:
    if isinstance(result, np.ndarray | np.generic):
        return put(result)
    if isinstance(result, tuple):
        return tuple(_given_back(part, put) for part in result)
    if not is_dataclass(result) or isinstance(result, type) or type(result).__name__.endswith("State"):
        return result
    of_any_kind = [field.name for field in fields(result) if field.type == "Any"]  # others are always of numpy
    return replace(result, **{name: _given_back(getattr(result, name), put) for name in of_any_kind})
