"""The warning that compiled code cannot be kept."""

from __future__ import annotations

import warnings
from functools import cache

from levattn.exceptions import CacheWarning

__all__ = ["say_uncached"]


@cache
def say_uncached(reason: str, variable: str) -> None:
    """Warn, once for each reason, that the next process will compile anew; a variable names where code is kept."""
    warnings.warn(
        f"compiled code cannot be kept ({reason}), so that each process compiles anew what it calls; set "
        f"{variable} to a folder that can be written and has room",
        CacheWarning,
        stacklevel=3,
    )
