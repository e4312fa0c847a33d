"""Checks of arguments by themselves: an error names the argument, what came and what was expected."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = ["check_type", "needing", "real_number", "whole_number"]


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Say how to install what an import in the block lacks: `what` needs a package, which an extra of levattn has."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f'{what}: pip install "levattn[{extra}]"') from error


def check_type(name: str, value: Any, kind: Any, expected: str) -> None:
    """Raise TypeError unless an argument is an instance of a class, or of one of several."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is of type {type(value).__name__}; expected {expected}")


def whole_number(
    name: str, value: Any, least: int = 1, most: int | None = None, *, what: str = "a whole number"
) -> int:
    """Return an argument that is a whole number of Python or numpy in a range, or raise; `what` says what it counts.

    Arrays and tensors are none, whatever they hold.
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
