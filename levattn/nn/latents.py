"""Latte and Latte-Macchiato as layers: a feature before the logits, and values rotated by their positions."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
import torch

from levattn._core.checks import check_bool, check_type, fraction, positive_number, whole_number
from levattn.attention import Window, latte, macchiato, rotate_values
from levattn.attention.latent.window import window_of
from levattn.nn.base import RGLRU, Cache, CausalConv, Recurrent, check_sequences, projection, split_in_heads

_NAMED: dict[str, Any] = {"conv": CausalConv, "rg_lru": RGLRU}


def feature_map(feature: Any, dim: int, **factory: Any) -> Any:
    """Return the module for a `feature` argument, or None.

    A module with a state has `state_size()`, the number of floats for each sequence, and
    ``forward(x, *, offsets=None, state=None)``, which returns the output and the new state. Any other module maps each
    position separately.
    """
    if feature is None or isinstance(feature, torch.nn.Module):
        return feature
    check_type("feature", feature, str, "a name, a torch module, or None")
    if feature in _NAMED:
        return _NAMED[feature](dim, **factory)
    names = "".join(f"{name!r}, " for name in _NAMED)
    raise ValueError(f"feature is {feature!r}; expected {names}a torch module, or None")


def feature_size(feature: Any) -> int:
    """Return the size of a feature's state for each sequence."""
    return int(feature.state_size()) if hasattr(feature, "state_size") else 0


def run_feature(feature: Any, x: Any, offsets: Any, state: Any, mask: Any = None) -> tuple[Any, Any]:
    """Return a feature's output for (B, T, C), and its new state.

    x is zero at masked positions, which the memories of this library leave out.
    """
    if feature is None:
        return x, None
    if isinstance(feature, CausalConv | RGLRU):
        return feature(x, mask=mask, offsets=offsets, state=state)  # type: ignore[no-any-return]
    if not hasattr(feature, "state_size"):
        return feature(x), None
    return feature(x, offsets=offsets, state=state)  # type: ignore[no-any-return]


CacheType = TypeVar("CacheType", bound=Cache)


_BASE = 10000.0  # of the angles of rotations


def _base(name: str, given: Any) -> bool | float:
    """Return whether to rotate, or the base of the angles."""
    if isinstance(given, bool | np.bool_):
        return bool(given)
    base = positive_number(name, given, what="True, False, or the base of the angles, such as 10000.0")
    if base <= 1:
        raise ValueError(
            f"{name} is {given!r}; expected True, False, or a base of the angles above 1, such as 10000.0"
        )
    return base


class LatentLayer(Recurrent[CacheType]):
    """A layer with `latents` latents in each head, whose logits read a `feature` of the input."""

    heads: int
    head_dim: int
    rope: bool | float = False

    def _take_options(self, latents: Any, vapor: bool | float, feature: Any, factory: dict[str, Any]) -> None:
        """Check and store the options that layers with latents share."""
        self.latents = whole_number("latents", latents)
        if (vapor or self.rope) and self.head_dim % 2:
            raise ValueError(
                f"dim / heads is {self.head_dim}; expected an even number, as rotations act on pairs of channels"
            )
        self.vapor = _base("vapor", vapor)
        self.feature = feature_map(feature, self.dim, **factory)

    def _state_size(self) -> int:
        return self.heads * self.latents * (self.head_dim + 2) + feature_size(self.feature)

    def _reads_positions(self) -> bool:
        return bool(self.vapor or self.rope)

    def _attended(self, x: Any, mask: Any, offsets: Any, cache: CacheType | None, positions: Any) -> Any:
        T, before, memory = x.shape[1], 0, None
        if cache is not None:
            before, memory = cache._taken_part, cache.feature
        if positions is None and self._reads_positions():
            positions = before + torch.arange(T, device=x.device)
            if mask is not None:  # only those that take part count
                positions = before + (mask.cumsum(1) - 1).clamp(min=0)
        check_sequences("cache", x, memory)
        h, memory = run_feature(self.feature, x, offsets, memory, mask)
        flags = None if mask is None else mask[:, None, :]
        Y = self._continued(partial(self._mixed(x, h, positions), mask=flags), T, offsets, cache)
        if cache is not None:
            cache._taken_part = before + (T if mask is None else mask.sum(1, keepdim=True))
            cache.feature = None if memory is None else memory.detach()
        return self._rotated(Y, positions, self.vapor) if self.vapor else Y

    @abstractmethod
    def _mixed(self, x: Any, h: Any, positions: Any) -> partial[Any]:
        """Return the operator with its arguments, from the input and its feature."""

    def _values(self, x: Any, positions: Any) -> Any:
        V = self._in_heads(self.Wv(x), self.head_dim)
        return self._rotated(V, positions, self.vapor, inverse=True) if self.vapor else V

    def _combined(self, Y: Any) -> Any:
        return self.Wo(Y)

    @staticmethod
    def _rotated(X: Any, positions: Any, base: bool | float, *, inverse: bool = False) -> Any:
        places = positions if positions.ndim == 1 else positions[:, None, :]
        return rotate_values(X, places, base=_BASE if base is True else base, inverse=inverse)

    @staticmethod
    def _in_heads(X: Any, width: int) -> Any:
        """Return (B, T, heads · width) as (B, heads, T, width)."""
        return X.reshape(*X.shape[:-1], X.shape[-1] // width, width).transpose(1, 2)


class LatteCache(Cache):
    """The decoding cache of a `Latte` layer, as returned by its ``new_cache()``.

    Its size does not depend on the number of positions: it has `Latte.state_size` floats for each sequence. Gradients
    do not pass through it.

    Attributes
    ----------
    position : int
        Number of positions so far.
    state : SoftmaxState or None
        The softmax over positions of each latent, in float64, for each sequence and head; None at the start.
    feature : tensor of shape (B, ...), or None
        The state of the feature before the logits.

    Examples
    --------
    >>> import torch
    >>> from levattn.nn import Latte
    >>> layer = Latte(16, heads=2, latents=4)
    >>> cache = layer.new_cache()
    >>> _ = layer(torch.zeros(3, 5, 16), cache=cache)
    >>> cache.position, cache.numbers() == 3 * layer.state_size()
    (5, True)
    """

    def _numbers(self) -> int:
        return sum(math.prod(part.shape) for part in (self.state.m, self.state.s, self.state.S))


class Latte(LatentLayer[LatteCache]):
    r"""Latent attention as a layer that replaces multi-head attention, in time linear in the number of positions.

    From an input X (T, C) each head computes logits :math:`Q = f(X) W_q` and :math:`K = f(X) W_k` of L latents, and
    values :math:`V = X W_v`. It computes `levattn.attention.latte` of these, and :math:`W_o` maps all heads together
    to the output. There are no biases. Initial weights are normal with standard deviation :math:`1/\sqrt{C}`.

    Parameters
    ----------
    dim : int
        Number of channels C of the input and of the output.
    heads : int
        Number of heads H, a divisor of `dim`.
    latents : int
        Number of latents L of each head. The reference implementation counts the latents of all heads, H · L.
    causal : bool
        True if a position sees itself and earlier positions, False if it sees all.
    vapor : bool or float
        True, or the base of the angles, to rotate values by the distance of row and position
        (`levattn.attention.rotate_values`). ``dim / heads`` must then be even. True stands for a base of 10000.
    feature : str or torch.nn.Module, optional
        The map f before the projections to logits: "conv" or "rg_lru" for a short memory, your own module on
        (B, T, C), or None. Modules with a state have ``state_size()`` and ``forward(x, *, offsets, state)``, which
        returns the output and the new state.
    device, dtype : torch.device or str, torch.dtype, optional
        Device and dtype of the parameters, as in torch's own layers.

    Raises
    ------
    TypeError
        If a size is not a whole number, or `feature` is neither a string nor a module.
    ValueError
        If a size or a base is out of range, or `dim` is not a multiple of `heads`. Also if ``dim / heads`` is odd
        with `vapor`, or `feature` is an unknown string.

    Notes
    -----
    Parameters: 2C(HL + C), and the parameters of the feature. Time of a call O(TC(HL + C)) for the projections and
    O(TLC) for attention. A cache has H L (C/H + 2) floats for each sequence, and the state of the feature. A decoding
    step takes time O(C (H L + C)), and copies the cache once. In float16, bfloat16 and autocast, attention computes in
    float32.

    References
    ----------
    Dolga, Maystre, Cobzarenco, Barber, "Latte: Latent Attention for Linear Time Transformers", arXiv:2402.17512.

    Examples
    --------
    >>> import torch
    >>> from levattn.nn import Latte
    >>> layer = Latte(32, heads=4, latents=8)
    >>> X = torch.randn(2, 10, 32)
    >>> Y = layer(X)
    >>> cache = layer.new_cache()
    >>> steps = [layer(X[:, t : t + 1], cache=cache) for t in range(10)]
    >>> torch.allclose(torch.cat(steps, 1), Y, atol=1e-5)
    True
    """

    _cache_class = LatteCache
    _shown = ("dim", "heads", "latents", "causal", "vapor")

    def __init__(
        self,
        dim: int,
        *,
        heads: int = 8,
        latents: int = 64,
        causal: bool = True,
        vapor: bool | float = False,
        feature: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        check_bool(causal=causal)
        super().__init__()
        self.dim, self.heads, _ = split_in_heads(dim, heads)
        self.head_dim, self.causal = self.dim // self.heads, bool(causal)
        factory = {"device": device, "dtype": dtype}
        self._take_options(latents, vapor, feature, factory)
        self.Wq, self.Wk = (projection(self.dim, self.heads * self.latents, **factory) for _ in range(2))
        self.Wv, self.Wo = (projection(self.dim, self.dim, **factory) for _ in range(2))

    def _mixed(self, x: Any, h: Any, positions: Any) -> partial[Any]:
        Q, K = (self._in_heads(W(h), self.latents) for W in (self.Wq, self.Wk))
        return partial(latte, Q, K, self._values(x, positions), causal=self.causal)


class MacchiatoCache(Cache):
    """The decoding cache of a `Macchiato` layer, as returned by its ``new_cache()``.

    From `window` positions on its size is constant: `Macchiato.state_size` floats for each sequence. Gradients do not
    pass through it.

    Attributes
    ----------
    position : int
        Number of positions so far.
    state : MacchiatoState or None
        The last keys and values, and the sums of the latents; None at the start.
    feature : tensor of shape (B, ...), or None
        The state of the feature before the logits.

    Examples
    --------
    >>> import torch
    >>> from levattn.nn import Macchiato
    >>> layer = Macchiato(16, 8, heads=2, latents=4)
    >>> cache = layer.new_cache()
    >>> _ = layer(torch.zeros(3, 20, 16), cache=cache)
    >>> cache.position, cache.numbers() == 3 * layer.state_size()
    (20, True)
    """

    def _numbers(self) -> int:
        return int(self.state.size)


class Macchiato(LatentLayer[MacchiatoCache]):
    r"""A mixture of softmax attention in a window and latents, as a layer that replaces multi-head attention.

    From an input X (T, C) each head computes queries, keys, values and a gate. From f(X) it computes logits of L
    latents for rows and positions. It combines these by `levattn.attention.macchiato`, and an output matrix maps all
    heads together to the output. Latents have no position, so RoPE rotates only the queries and keys of the window.
    `vapor` rotates the values, which both parts share.

    Parameters
    ----------
    dim : int
        Number of channels C of the input and of the output.
    window : Window or int
        A `levattn.attention.Window`, or its size W with overlap "mixture".
    heads : int
        Number of query heads H, a divisor of `dim`.
    kv_heads : int, optional
        Number of key and value heads, a divisor of `heads`; None for as many as `heads`.
    latents : int
        Number of latents L of each head.
    rope : bool or float
        True, or the base of the angles, to rotate queries and keys by their positions. True stands for 10000.
    vapor : bool or float
        True, or the base of the angles, to rotate values by the distance of row and position.
    feature : str or torch.nn.Module, optional
        The map f before the logits of the latents, as in `Latte`.
    device, dtype : torch.device or str, torch.dtype, optional
        Device and dtype of the parameters, as in torch's own layers.

    Raises
    ------
    TypeError
        If a size is not a number, or `feature` is neither a string nor a module.
    ValueError
        If a size is below 1, `dim` is not a multiple of `heads`, or `heads` is not a multiple of `kv_heads`. Also if
        ``dim / heads`` is odd with `rope` or `vapor`, or an option is out of range.

    Notes
    -----
    Time of a call O(T (C² + C H L)) for the projections and O(T C (W + L)) for attention. No T × T matrix is
    formed. With G key and value heads, a cache has 2 (W − 1) G C/H floats for each sequence when the window is full.
    It has (W − 1) H L more in the mode "exclusive", H L (C/H + 2) for the latents, and the state of the feature. A
    decoding step takes time O(C² + C H L + W C), and copies the cache once.

    The gate reads the input, not f of it; the paper leaves this open.

    References
    ----------
    Dolga, Maystre, Cobzarenco, Barber, "Latte: Latent Attention for Linear Time Transformers", arXiv:2402.17512v5.

    Examples
    --------
    >>> import torch
    >>> from levattn.nn import Macchiato
    >>> layer = Macchiato(32, 4, heads=4, kv_heads=2, latents=8, feature="conv")
    >>> X = torch.randn(2, 10, 32)
    >>> Y = layer(X)
    >>> cache = layer.new_cache()
    >>> steps = [layer(X[:, t : t + 1], cache=cache) for t in range(10)]
    >>> torch.allclose(torch.cat(steps, 1), Y, atol=1e-5)
    True
    """

    _cache_class = MacchiatoCache
    _shown = ("dim", "heads", "kv_heads", "latents", "rope", "vapor")

    def __init__(
        self,
        dim: int,
        window: Window | int = 128,
        *,
        heads: int = 8,
        kv_heads: int | None = None,
        latents: int = 64,
        rope: bool | float = True,
        vapor: bool | float = False,
        feature: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.kv_heads = split_in_heads(dim, heads, kv_heads)
        self.window = window_of(window)
        self.head_dim, self.rope = self.dim // self.heads, _base("rope", rope)
        factory = {"device": device, "dtype": dtype}
        self._take_options(latents, vapor, feature, factory)
        self.Wq, self.Wo = (projection(self.dim, self.dim, **factory) for _ in range(2))
        self.Wk, self.Wv = (projection(self.dim, self.kv_heads * self.head_dim, **factory) for _ in range(2))
        self.latent_q, self.latent_k = (projection(self.dim, self.heads * self.latents, **factory) for _ in range(2))
        self.gate = torch.nn.Linear(self.dim, self.heads, **factory)
        with torch.no_grad():
            self.gate.bias.zero_()
            self.gate.weight.normal_(std=self.dim**-0.5)

    def _options(self) -> dict[str, Any]:
        shown = super()._options() | {"window": self.window.size, "overlap": self.window.overlap}
        return shown | ({} if self.window.softcap is None else {"softcap": self.window.softcap})

    def give_latents(self, weight: float) -> Self:
        """Make the gate constant, so that the latents of a new layer have about a given weight.

        For a layer added to trained weights, use 0.05 to 0.1. Gradients of the latents are proportional to the weight,
        so with a much smaller one training may never use the latents.

        Parameters
        ----------
        weight : float in (0, 1)
            The weight δ of the latents; the window has a weight of about 1 − δ.

        Returns
        -------
        Macchiato
            The layer.

        Raises
        ------
        TypeError, ValueError
            If the weight is not a number, or out of range.

        Examples
        --------
        >>> from levattn.nn import Macchiato
        >>> layer = Macchiato(32, window=4).give_latents(0.1)
        >>> bool(layer.gate.weight.any())
        False
        """
        weight = fraction("weight", weight)
        with torch.no_grad():
            self.gate.weight.zero_()
            # initial logits of latents are normal, so their log-sum-exp is about log L + 1/2
            self.gate.bias.fill_(math.log((1 - weight) / weight) + math.log(self.latents) + 0.5)
        return self

    def _state_size(self) -> int:
        exclusive = self.window.overlap == "exclusive"
        ring = 2 * self.kv_heads * self.head_dim + (self.heads * self.latents if exclusive else 0)
        return (self.window.size - 1) * ring + super()._state_size()

    def _mixed(self, x: Any, h: Any, positions: Any) -> partial[Any]:
        q, k = (self._in_heads(W(x), self.head_dim) for W in (self.Wq, self.Wk))
        V = self._values(x, positions)
        if self.rope:
            q, k = (self._rotated(X, positions, self.rope) for X in (q, k))
        Q, K = (self._in_heads(W(h), self.latents) for W in (self.latent_q, self.latent_k))
        return partial(macchiato, q, k, V, (Q, K, self.gate(x).transpose(1, 2)), self.window)
