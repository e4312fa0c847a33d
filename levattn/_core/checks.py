"""Checks of single arguments: an error names the argument, its value and the expected value."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

TIE = 1e-9  # relative slack within which a score counts as equal to ε, and so as in the set


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Name the `extra` of levattn to install if an import in the block fails; `what` says who needs the package."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f'{what}: pip install "levattn[{extra}]"') from error


def check_type(name: str, value: Any, kind: Any, expected: str) -> None:
    """Raise TypeError unless an argument is an instance of a class, or of any of several classes."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is of type {type(value).__name__}; expected {expected}")


def check_bool(**given: Any) -> None:
    """Raise TypeError unless arguments, by their names, are True or False."""
    for name, value in given.items():
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name} is {value!r:.60}; expected True or False")


def batch_of(batch: Any) -> tuple[int, ...]:
    """Return the sizes of a batch, or raise."""
    if not isinstance(batch, tuple | list):
        raise TypeError(f"batch is {batch!r}; expected a tuple of sizes, such as (batch, heads)")
    return tuple(whole_number("batch", size, 0) for size in batch)


def whole_number(
    name: str, value: Any, least: int = 1, most: int | None = None, *, what: str = "a whole number"
) -> int:
    """Return an argument that is a whole number of Python or numpy in a range, or raise; `what` names its unit.

    Arrays and tensors are refused, whatever they hold.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (hasattr(value, "ndim") and not isinstance(value, np.integer)):
        raise TypeError(f"{name} is {value!r}; expected {what}")
    if number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"{least} <= {name} <= {most}"
        raise ValueError(f"{name} is {number}; expected {bounds}")
    return number


def real_number(name: str, value: Any, *, what: str = "a real number") -> float:
    """Return an argument that is a real number of Python or numpy, or raise."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} is {value!r}; expected {what}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is {value}; expected {what} in the range of float64") from None


def positive_number(name: str, value: Any, *, what: str = "a finite number above 0") -> float:
    """Return an argument that is a finite number above 0, or raise."""
    number = real_number(name, value, what=what)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {value!r}; expected {what}")
    return number


def check_offsets(offsets: npt.NDArray[np.int64], T: int) -> npt.NDArray[np.int64]:
    """Return offsets of packed sequences if they are valid for the kernels, or raise."""
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != T or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(
            f"offsets is {shown(offsets)}; expected whole numbers that ascend from 0 to T = {T}: sequence i is "
            "offsets[i]:offsets[i + 1]"
        )
    return offsets


def fraction(name: str, value: Any) -> float:
    """Return an argument that is a number between 0 and 1, such as a probability or a share, or raise."""
    number = real_number(name, value)
    if not 0 < number < 1:
        raise ValueError(f"{name} is {value!r}; expected a number above 0 and below 1, e.g. 0.9")
    return number


def check_epsilon(epsilon: Any) -> float:
    """Return ε as a float in (0, 1], or raise."""
    number = real_number("epsilon", epsilon, what="a real number in (0, 1]")
    if not 0 < number <= 1:
        raise ValueError(f"epsilon is {epsilon!r}; expected 0 < epsilon <= 1, as attention scores sum to 1")
    return number


def check_nonnegative(name: str, numbers: npt.NDArray[Any]) -> None:
    """Raise ValueError unless numbers are finite and at least 0; the error names the first that is not."""
    wrong = ~((numbers >= 0) & np.isfinite(numbers))
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0])
        at = f"[{', '.join(map(str, place))}]" if place else ""
        raise ValueError(f"{name}{at} is {numbers[place]:.6g}; expected finite numbers of at least 0")


def check_chunk(chunk: Any, state: Any, name: str = "K") -> None:
    """Raise ValueError unless a chunk of rows has the batch and the number of columns of its state."""
    if chunk.d != state.d or chunk.batch != state.batch:
        raise ValueError(
            f"{name} has batch {chunk.batch} and d = {chunk.d}; expected batch {state.batch} and d = {state.d}, "
            "which all chunks share"
        )


def count_of_rows(given: str, rows: Callable[[], Any]) -> int:
    """Return the number of rows, rounded up, that a theorem asks for; raise where it is beyond float64."""
    with np.errstate(all="ignore"):
        try:
            number = float(rows())
        except (ZeroDivisionError, OverflowError):
            number = math.inf
    if not number < math.inf:
        raise ValueError(f"{given} need more rows than float64 counts; expected a larger distortion and failure")
    return math.ceil(number)


def shown(numbers: npt.NDArray[Any]) -> str:
    """Return an array as text for an error, in one line."""
    return np.array2string(numbers, max_line_width=1000, threshold=8)


def refuse_masked_tensor(tensor: Any, name: str) -> None:
    """Raise for a tensor of torch.masked, whose mask would be lost."""
    if type(tensor).__name__ == "MaskedTensor":
        raise TypeError(
            f"{name} is a MaskedTensor; expected a plain tensor. Give {name}.get_data(), and leave rows out by mask="
        )
