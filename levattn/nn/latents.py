"""The base class of layers with latents: a feature before the logits, and values rotated by their positions."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, TypeVar

import torch

from levattn._core.checks import positive_number, whole_number
from levattn.attention import rotate_values
from levattn.nn.base import Cache, Recurrent
from levattn.nn.features import feature_map, feature_size, run_feature

CacheType = TypeVar("CacheType", bound=Cache)


class LatentLayer(Recurrent[CacheType]):
    """A layer with `latents` latents in each head, whose logits read a `feature` of the input."""

    heads: int
    head_dim: int
    rope: bool = False

    def _take_options(self, latents: Any, vapor: bool, base: Any, feature: Any, factory: dict[str, Any]) -> None:
        """Check and store the options that layers with latents share."""
        self.latents = whole_number("latents", latents)
        if (vapor or self.rope) and self.head_dim % 2:
            raise ValueError(
                f"dim / heads is {self.head_dim}; expected an even number, as rotations act on pairs of channels"
            )
        self.vapor, self.base = bool(vapor), positive_number("base", base)
        self.feature = feature_map(feature, self.dim, **factory)

    def _state_size(self) -> int:
        return self.heads * self.latents * (self.head_dim + 2) + feature_size(self.feature)

    def _reads_positions(self) -> bool:
        return self.vapor or self.rope

    def _attended(self, x: Any, mask: Any, offsets: Any, cache: CacheType | None, positions: Any) -> Any:
        T, before, memory = x.shape[1], 0, None
        if cache is not None:
            before, memory = cache._taken_part, cache.feature
        if positions is None and self._reads_positions():
            positions = before + torch.arange(T, device=x.device)
            if mask is not None:  # only those that take part count
                positions = before + (mask.cumsum(1) - 1).clamp(min=0)
        h, memory = run_feature(self.feature, x, offsets, memory, mask)
        flags = None if mask is None else mask[:, None, :]
        Y = self._continued(partial(self._mixed(x, h, positions), mask=flags), T, offsets, cache)
        if cache is not None:
            cache._taken_part = before + (T if mask is None else mask.sum(1, keepdim=True))
            cache.feature = None if memory is None else memory.detach()
        return self._rotated(Y, positions) if self.vapor else Y

    @abstractmethod
    def _mixed(self, x: Any, h: Any, positions: Any) -> partial[Any]:
        """Return the operator with its arguments, from the input and its feature."""

    def _values(self, x: Any, positions: Any) -> Any:
        V = self._in_heads(self.Wv(x), self.head_dim)
        return self._rotated(V, positions, inverse=True) if self.vapor else V

    def _combined(self, Y: Any) -> Any:
        return self.Wo(Y)

    def _rotated(self, X: Any, positions: Any, *, inverse: bool = False) -> Any:
        places = positions if positions.ndim == 1 else positions[:, None, :]
        return rotate_values(X, places, base=self.base, inverse=inverse)

    @staticmethod
    def _in_heads(X: Any, width: int) -> Any:
        """Return (B, T, heads · width) as (B, heads, T, width)."""
        return X.reshape(*X.shape[:-1], X.shape[-1] // width, width).transpose(1, 2)
