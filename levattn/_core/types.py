"""Type aliases of NumPy arrays, and the names of the floating-point dtypes that levattn reads."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


_FLOATS = ("float64", "float32", "float16", "bfloat16")


def format_of(dtype: Any, name: str, conversion: str) -> str:
    """Return the name of the format of real floats, or raise with a `conversion` as the remedy."""
    kind = dtype_name(dtype)
    if kind not in _FLOATS:
        if kind.startswith("complex"):
            conversion = f"{name}.real, or the real and the imaginary parts as columns"
        elif kind.startswith(("qint", "quint")):  # of torch
            conversion = f"{name}.dequantize()"
        elif getattr(dtype, "names", None):
            conversion = f"numpy.lib.recfunctions.structured_to_unstructured({name})"
        raise TypeError(
            f"{name} has dtype {dtype}; expected a real floating dtype ({', '.join(_FLOATS)}). "
            f"Convert it first, e.g. {conversion}"
        )
    return kind


def dtype_name(dtype: Any) -> str:
    return _numpy_name(dtype) if isinstance(dtype, np.dtype) else str(dtype).rpartition(".")[2]


@lru_cache(maxsize=64)
def _numpy_name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # NumPy builds the name anew each time


def decode_half(data: Any, kind: str) -> Any:
    """Return the numbers of a numpy or CuPy array in which 16-bit floats are words."""
    if kind == "float16":
        return data.view(np.float16)
    return (data.astype(np.uint32) << 16).view(np.float32) if kind == "bfloat16" else data
