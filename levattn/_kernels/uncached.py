"""The warning that compiled code cannot be kept."""

from __future__ import annotations

import warnings
from functools import cache

from levattn.exceptions import CacheWarning


@cache
def say_uncached(reason: str, variable: str) -> None:
    """Warn, once for each reason, that the next process compiles anew; `variable` sets the folder for code."""
    warnings.warn(
        f"compiled code cannot be kept ({reason}), so each process compiles its kernels anew. Set {variable} to a "
        "writable folder with free space",
        CacheWarning,
        stacklevel=3,
    )
