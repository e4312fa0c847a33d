"""Latte as a layer."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from levattn.attention import latte
from levattn.nn.base import Cache
from levattn.nn.checks import projection, split_in_heads
from levattn.nn.latents import LatentLayer

__all__ = ["Latte", "LatteCache"]


class LatteCache(Cache):
    """What decoding by `Latte` keeps of the positions so far, as ``new_cache()`` of a layer returns it.

    The same number of floats however many positions there were: `Latte.state_size` for each sequence. Gradients do not
    pass through it.

    Attributes
    ----------
    position : int
        Number of positions so far.
    state : SoftmaxState or None
        The softmax over positions of each latent, in float64, for each sequence and head; None before the first ones.
    feature : tensor of shape (B, ...), or None
        The state of the feature in front of the logits.

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
    r"""Latent attention as a layer, in the place of multi-head attention: time linear in the number of positions.

    Of an input X (T, C) each head makes logits :math:`Q = f(X) W_q` and :math:`K = f(X) W_k` of L latents and values
    :math:`V = X W_v`, takes `levattn.attention.latte` of these, and all heads together are multiplied by :math:`W_o`.
    There are no biases, and weights begin as normal numbers of standard deviation :math:`1/\sqrt{C}`.

    Parameters
    ----------
    dim : int
        Number of channels C of the input and of the output.
    heads : int
        Number of heads H, a divisor of `dim`.
    latents : int
        Number of latents L of each head. The reference implementation counts those of all heads together, H · L.
    causal : bool
        True if a position sees itself and those before, False if it sees all.
    vapor : bool
        True to turn values by the distance of row and position (`levattn.attention.rotate_values`). ``dim / heads`` is
        even then.
    base : float
        Of the angles.
    feature : str or torch.nn.Module, optional
        The map f in front of the two projections to logits: "conv" or "rg_lru" for a short memory, a module of one's
        own on (B, T, C), or None for none. Modules with a state have ``state_size()`` and
        ``forward(x, *, offsets, state)``, which returns the output and the state after it.
    device, dtype : torch.device or str, torch.dtype, optional
        Of the parameters, as in torch's own layers.

    Raises
    ------
    TypeError
        If a size is no whole number, or `feature` is neither a string nor a module.
    ValueError
        If a size or `base` is out of its range, `dim` no multiple of `heads`, ``dim / heads`` odd with `vapor`, or
        `feature` a string that is not known.

    Notes
    -----
    Parameters: 2C(HL + C), and those of the feature. Time of a call O(TC(HL + C)) for the projections and O(TLC) for
    attention. A cache has H L (C/H + 2) floats for each sequence, and those of the feature; a step of decoding takes
    time O(C (H L + C)), and copies them once. Numbers of float16 and bfloat16, and autocast, are computed in float32
    within attention.

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
        vapor: bool = False,
        base: float = 10000.0,
        feature: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads, _ = split_in_heads(dim, heads)
        self.head_dim, self.causal = self.dim // self.heads, bool(causal)
        factory = {"device": device, "dtype": dtype}
        self._take_options(latents, vapor, base, feature, factory)
        self.Wq, self.Wk = (projection(self.dim, self.heads * self.latents, **factory) for _ in range(2))
        self.Wv, self.Wo = (projection(self.dim, self.dim, **factory) for _ in range(2))

    def _mixed(self, x: Any, h: Any, positions: Any) -> partial[Any]:
        Q, K = (self._in_heads(W(h), self.latents) for W in (self.Wq, self.Wk))
        return partial(latte, Q, K, self._values(x, positions), causal=self.causal)
