"""The factor of keys: its rank, its error, the scores of other rows."""

from __future__ import annotations

from levattn.linalg.factor import Factor

__all__ = ["Factor"]
