"""Kernels of heavy attention: normalizers of queries, heavy entries."""

from __future__ import annotations

from typing import Any, Protocol


class HeavyKernels(Protocol):
    """Squared attention of queries: arrays of float64 and int64, in main memory or on one CUDA device."""

    def query_norms(self, Q: Any, N: Any, /) -> tuple[Any, Any]:
        """Return ``‖N q‖²`` for every row q of Q, and ``‖|N| |q|‖²``, which bounds its terms that cancel."""

    def heavy_entries(
        self, Q: Any, keys: Any, indices: Any, normalizers: Any, epsilon: float, /
    ) -> tuple[Any, Any, Any, Any]:
        """Return (starts, key indices, scores) of the entries of at least ε, in CSR order, and each query's mass.

        `keys` are the selected rows and `indices` their ascending numbers; nothing of size queries × keys is formed.
        """
