"""Latte as a layer."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from levattn.attention import latte
from levattn.nn.base import Cache
from levattn.nn.checks import projection, split_in_heads
from levattn.nn.latents import LatentLayer


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
    vapor : bool
        True to rotate values by the distance of row and position (`levattn.attention.rotate_values`). ``dim / heads``
        must then be even.
    base : float
        Base of the rotation angles.
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
        If a size or `base` is out of range, or `dim` is not a multiple of `heads`. Also if ``dim / heads`` is odd
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
