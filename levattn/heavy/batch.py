"""The result of `heavy_attention` for a batch: the result of each head, and their figures side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import array_namespace, as_matrices
from levattn._core.device import where_arrays_are
from levattn._core.types import Float64
from levattn.heavy.result import HeavyAttention
from levattn.sets.views import number_of, span


@dataclass(frozen=True, eq=False, repr=False)
class HeavyAttentionBatch:
    """The heavy part of attention of a batch of heads; the result of `heavy_attention` for Q and K with leading axes.

    ``found[layer, head]`` is the `HeavyAttention` of one head, with its sparse entries.

    Attributes
    ----------
    items : tuple of HeavyAttention
        The results, leading axes of the queries flattened.
    batch : tuple of int
        Leading axes of the queries, or of the keys where the queries have none.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> rng = np.random.default_rng(0)
    >>> Q, K = rng.standard_normal((2, 6, 5, 4)), rng.standard_normal((2, 3, 100, 4))  # two heads share keys
    >>> found = levattn.heavy_attention(Q, K, 0.1)
    >>> found.batch, found[1, 5].entries.shape, found.normalizers.shape
    ((2, 6), (5, 100), (2, 6, 5))
    """

    items: tuple[HeavyAttention, ...]
    batch: tuple[int, ...]
    _heads: npt.NDArray[np.int64] = field(repr=False)  # of the keys of each item
    _shared: tuple[int, ...] = field(repr=False)  # leading axes of the keys

    @property
    def _held_array(self) -> Any:
        return self.items

    def __getitem__(self, index: int | tuple[int, ...]) -> HeavyAttention:
        """Return the result of one head."""
        return self.items[number_of(index, self.batch)]

    def __iter__(self) -> Iterator[HeavyAttention]:
        """Give the results of all heads, leading axes flattened."""
        return iter(self.items)

    def __len__(self) -> int:
        """Return the number of heads."""
        return len(self.items)

    @where_arrays_are
    def __repr__(self) -> str:
        """Return the figures on one line."""
        entries = span([item.entries.nnz for item in self.items])
        return (
            f"HeavyAttentionBatch({entries} entries in each of {self.batch}, captured_mass {span(self.captured_mass)})"
        )

    def _stacked(self, name: str) -> Float64:
        figures = [getattr(item, name) for item in self.items]
        return np.stack(figures).reshape(*self.batch, -1) if figures else np.zeros((*self.batch, 0))

    @property
    def normalizers(self) -> Float64:
        """The normalizers, float64 (..., m); see `HeavyAttention`."""
        return self._stacked("normalizers")

    @property
    def error(self) -> Float64:
        """Estimated relative errors of normalizers and scores, float64 (..., m); see `HeavyAttention`."""
        return self._stacked("error")

    @property
    def captured_mass(self) -> Float64:
        """The share of attention on the keys of the set, float64 (..., m); see `HeavyAttention`."""
        return self._stacked("captured_mass")

    @property
    def residual_mass(self) -> Float64:
        """The share of attention on the other keys, float64 (..., m); see `HeavyAttention`."""
        return self._stacked("residual_mass")

    @where_arrays_are
    def apply(self, V: Any, compensate: Literal["mean"] | None = None) -> tuple[Any, Float64]:
        """Multiply the attention on the universal sets by the values, with bounds on the parts left out.

        Parameters
        ----------
        V : array of shape (..., n, d_v)
            Values, one a key, with the leading axes of the keys.
        compensate : {None, "mean"}
            See `HeavyAttention.apply`.

        Returns
        -------
        output : array of float64, shape (..., m, d_v)
            In the kind of array of V.
        error_bound : array of float64, shape (..., m)
            See `HeavyAttention.apply`.

        Raises
        ------
        TypeError, ValueError
            If V does not match the keys or `compensate` is unknown.
        NonFiniteError
            If the values hold NaN or infinity.
        """
        values = as_matrices(V, "V")
        if values.batch != self._shared:
            shape = (*values.batch, values.n, values.d)
            raise ValueError(
                f"V has shape {shape}; expected the leading axes {self._shared} of the keys before (n, d_v)"
            )
        if not self.items:
            raise ValueError(f"the batch {self.batch} has no heads; expected at least one")
        found = [
            item._applied(values.item(int(head)), compensate)
            for item, head in zip(self.items, self._heads, strict=True)
        ]
        outputs, bounds = zip(*found, strict=True)
        xp = array_namespace(*outputs)
        output = xp.reshape(xp.stack(outputs), (*self.batch, *outputs[0].shape))
        return output, np.stack(bounds).reshape(*self.batch, -1)


def keys_of_heads(queries: tuple[int, ...], keys: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the matrix of keys that each matrix of queries attends to, from their leading axes, or raise."""
    heads = np.arange(math.prod(keys), dtype=np.int64).reshape(keys)
    if queries in ((), keys):
        return heads.ravel()
    shared = keys[-1] if keys else 1
    if queries[:-1] != keys[:-1] or not shared or queries[-1] % shared:
        raise ValueError(
            f"Q has leading axes {queries} and K has {keys}; expected equal axes, none for Q, or "
            "a last one that is a multiple of K's"
        )
    return heads.reshape(*keys[:-1], shared).repeat(queries[-1] // shared, axis=-1).ravel()
