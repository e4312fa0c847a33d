"""Functions that have a bound that never rises as keys are added, and these bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.serialize import shaped
from levattn.functions import AttentionFunction, Power, Softmax
from levattn.sensitivity.lift import lift_columns
from levattn.sets.prefix_bounds import Running, RunningBlocks, RunningSquares, group_count

_MOST_GROUPS = 100_000
_LARGEST_POWER = 64


def _half_power(f: AttentionFunction | Softmax) -> int:
    """Return m of an even power 2m, and 0 for other functions."""
    return int(f.p) // 2 if isinstance(f, Power) and f.p % 2 == 0 else 0


def require_bounds(f: AttentionFunction | Softmax, epsilon: float) -> None:
    """Raise for functions without a bound that never rises, or with one that takes too much memory for ε."""
    if m := _half_power(f):
        if 2 * m > _LARGEST_POWER:
            raise ValueError(
                f"f is {f!r}; expected a power of at most {_LARGEST_POWER}, as its lift has too many columns"
            )
        return
    if isinstance(f, Softmax) or f.growth > 2:
        raise ValueError(
            f"f is {f!r}; expected an even power, or a function of at most quadratic growth. For others, no bound is "
            "known that never rises as keys are added. Use universal_set on all keys"
        )
    if float(f(np.zeros(1))[0]) > 0:
        raise ValueError(
            f"f is {f!r}, which is {float(f(np.zeros(1))[0])} at 0; expected 0 there, so that keys of zeros have no "
            "score. Use universal_set on all keys"
        )
    if 2 / epsilon > _MOST_GROUPS:
        raise ValueError(
            f"epsilon is {epsilon} for f = {f!r}, whose bound takes 2/epsilon second moments; expected at least "
            f"{2 / _MOST_GROUPS}"
        )


def running_bounds(f: AttentionFunction | Softmax, epsilon: float, b: int, d: int) -> Running:
    """Return the bounds for f, which `require_bounds` accepts, of b matrices with d columns."""
    m = _half_power(f)
    return RunningSquares(b, d, m) if m else RunningBlocks(b, d, epsilon)


def require_backed(
    f: AttentionFunction | Softmax, epsilon: float, b: int, d: int, arrays: dict[str, npt.NDArray[Any]]
) -> None:
    """Raise ValueError or LookupError unless the arrays of a saved state have the sizes of its bounds."""
    if m := _half_power(f):
        names, columns = ["exponents"], lift_columns(d, m)
    else:
        names, columns = [f"group{g}.exponents" for g in range(group_count(epsilon))], d
    for name in names:
        shaped(arrays[name], np.int32, (b, columns))
