"""Figures of results, as text."""

from __future__ import annotations

from typing import Any

import numpy as np


def keys_of(scores: Any) -> str:
    """Return the number of keys that have scores (..., n), as text."""
    *batch, n = scores.shape
    return f"{n} keys" + (f" in each of {tuple(batch)}" if batch else "")


def span(values: Any) -> str:
    """Return a figure, or the least and the largest figure of a batch."""
    found = np.asarray(values)
    if not found.size:
        return "none"
    low, high = f"{found.min():.6g}", f"{found.max():.6g}"
    return low if low == high else f"{low} to {high}"
