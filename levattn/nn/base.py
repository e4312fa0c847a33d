"""What layers share: how they are called, decode and are shown, and the caches that they decode with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch

from levattn.nn.checks import check_input, refuse_bidirectional

__all__ = ["Cache", "Layer", "Module", "Recurrent"]


class Cache:
    """What decoding keeps of the positions so far."""

    def __init__(self) -> None:
        self.position = 0
        self.state: Any = None
        self.feature: Any = None

    def numbers(self) -> int:
        """Return how many floats are held, of all sequences together.

        Returns
        -------
        int
            Zero before the first positions.
        """
        held = 0 if self.state is None else self._numbers()
        return held + (0 if self.feature is None else int(self.feature.numel()))

    @abstractmethod
    def _numbers(self) -> int:
        """Return how many floats the state holds."""


C = TypeVar("C")


class Module(torch.nn.Module):  # type: ignore[misc]
    """A module that shows some of its attributes."""

    _shown: ClassVar[tuple[str, ...]] = ()

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._shown}

    def extra_repr(self) -> str:
        """Return what `print` shows of the layer.

        Returns
        -------
        str
            The options that it was made with.
        """
        return ", ".join(f"{name}={value!r}" for name, value in self._options().items())


class Layer(Module, Generic[C]):
    """A layer in the place of multi-head attention, on (B, T, C), that decodes with a cache."""

    _cache_class: type[C]
    dim: int
    causal: bool = True

    def new_cache(self) -> C:
        """Return an empty cache of decoding, for a batch of any size.

        Returns
        -------
        LatteCache, MacchiatoCache, TokenStatisticsCache or LevAttentionCache
            That of this kind of layer: ``forward(x, cache=cache)`` reads and updates it.

        Raises
        ------
        ValueError
            If the layer is not causal: then all rows change with every new position.
        """
        refuse_bidirectional(self.causal)
        return self._cache_class()

    def _called(self, x: Any, mask: Any, offsets: Any, cache: C | None) -> Any:
        """Return the attention of a batch of sequences, for a call that is checked first."""
        check_input(self.dim, x, mask, offsets, cache, self._cache_class)
        if cache is not None:
            refuse_bidirectional(self.causal)
        return self._combined(self._attended(x, mask, offsets, cache).transpose(1, 2).flatten(-2))

    @abstractmethod
    def _attended(self, x: Any, mask: Any, offsets: Any, cache: Any) -> Any:
        """Return what the heads make of a checked call, (B, H, T, D)."""

    @abstractmethod
    def _combined(self, Y: Any) -> Any:
        """Return the output of what the heads made, side by side."""


class Recurrent(Layer[C]):
    """A layer whose cache has the same number of floats however many positions there were."""

    def forward(self, x: Any, *, mask: Any = None, offsets: Any = None, cache: C | None = None) -> Any:
        """Return the attention of a batch of sequences.

        Parameters
        ----------
        x : tensor of shape (B, T, C)
            The input.
        mask : tensor of bool, shape (B, T), optional
            True for a position that takes part.
        offsets : tensor or array of int, shape (n + 1,), optional
            Packed sequences, which see nothing of each other: where each begins, from 0 to T.
        cache : LatteCache, MacchiatoCache or TokenStatisticsCache, optional
            What `new_cache` returned: the input goes on where the last one ended, and the cache is updated.

        Returns
        -------
        tensor of shape (B, T, C)
            The output.

        Raises
        ------
        TypeError
            If `x` or `mask` is no tensor, `cache` none of this layer, or offsets are no whole numbers.
        ValueError
            If shapes do not go together, the options of the call exclude one another, the layer has a cache and is not
            causal, or a sequence has more positions than a layer that counts them.
        """
        return self._called(x, mask, offsets, cache)

    def state_size(self) -> int:
        """Return how many floats decoding keeps for each sequence; with a window, from so many positions on.

        Returns
        -------
        int
            The size of a cache, divided by the size of its batch.

        Raises
        ------
        ValueError
            If the layer is not causal, so that it has no cache.
        """
        refuse_bidirectional(self.causal)
        return self._state_size()

    @abstractmethod
    def _state_size(self) -> int:
        """Return the same for a layer that is causal."""

    def _continued(self, attend: Callable[..., Any], count: int, offsets: Any, cache: Any) -> Any:
        """Return what an operator answers; with a cache, from its state, by which it moves on by so many positions."""
        if cache is None:
            return attend(offsets=offsets)
        Y, cache.state = attend(state=cache.state, return_state=True)
        cache.position += count
        return Y
