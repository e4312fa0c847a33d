"""Latte-Macchiato as a layer: a sliding window of softmax attention, mixed with latents."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from levattn._core.checks import fraction, whole_number
from levattn.attention import macchiato
from levattn.attention.latent.macchiato import check_overlap
from levattn.attention.latent.window import check_softcap
from levattn.nn.base import Cache
from levattn.nn.checks import projection, split_in_heads
from levattn.nn.latents import LatentLayer


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
    >>> layer = Macchiato(16, heads=2, latents=4, window=8)
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
    heads : int
        Number of query heads H, a divisor of `dim`.
    kv_heads : int, optional
        Number of key and value heads, a divisor of `heads`; None for as many as `heads`.
    latents : int
        Number of latents L of each head.
    window : int
        Number of positions W that a row sees in its window, including its own.
    overlap : {"mixture", "exclusive"}
        Whether latents see all positions so far, or only positions before the window.
    rope : bool
        True to rotate queries and keys by their positions.
    vapor : bool
        True to rotate values by the distance of row and position.
    base : float
        Base of the angles of both rotations.
    feature : str or torch.nn.Module, optional
        The map f before the logits of the latents, as in `Latte`.
    softcap : float, optional
        Logits x of the window become c tanh(x/c) with this c > 0.
    delta : float in (0, 1), optional
        The initial weight of the latents: the gate is initially constant, so that the window has a weight of about
        1 − δ. For a layer added to trained weights, use 0.05 to 0.1. Gradients of the latents are proportional to δ,
        so with a much smaller δ training may never use the latents. None for a gate with random initial weights.
    device, dtype : torch.device or str, torch.dtype, optional
        Device and dtype of the parameters, as in torch's own layers.

    Raises
    ------
    TypeError
        If a size or `delta` is not a number, or `feature` is neither a string nor a module.
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
    >>> layer = Macchiato(32, heads=4, kv_heads=2, latents=8, window=4, feature="conv")
    >>> X = torch.randn(2, 10, 32)
    >>> Y = layer(X)
    >>> cache = layer.new_cache()
    >>> steps = [layer(X[:, t : t + 1], cache=cache) for t in range(10)]
    >>> torch.allclose(torch.cat(steps, 1), Y, atol=1e-5)
    True
    """

    _cache_class = MacchiatoCache
    _shown = ("dim", "heads", "kv_heads", "latents", "window", "overlap", "rope", "vapor")

    def __init__(
        self,
        dim: int,
        *,
        heads: int = 8,
        kv_heads: int | None = None,
        latents: int = 64,
        window: int = 128,
        overlap: str = "mixture",
        rope: bool = True,
        vapor: bool = False,
        base: float = 10000.0,
        feature: Any = None,
        softcap: float | None = None,
        delta: float | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.kv_heads = split_in_heads(dim, heads, kv_heads)
        self.window = whole_number("window", window)
        self.head_dim, self.rope = self.dim // self.heads, bool(rope)
        check_overlap(overlap)
        delta = None if delta is None else fraction("delta", delta)
        self.overlap, self.softcap = overlap, check_softcap(softcap)
        factory = {"device": device, "dtype": dtype}
        self._take_options(latents, vapor, base, feature, factory)
        self.Wq, self.Wo = (projection(self.dim, self.dim, **factory) for _ in range(2))
        self.Wk, self.Wv = (projection(self.dim, self.kv_heads * self.head_dim, **factory) for _ in range(2))
        self.latent_q, self.latent_k = (projection(self.dim, self.heads * self.latents, **factory) for _ in range(2))
        self.gate = torch.nn.Linear(self.dim, self.heads, **factory)
        with torch.no_grad():
            self.gate.bias.zero_()
            if delta is None:
                self.gate.weight.normal_(std=self.dim**-0.5)
            else:
                self.gate.weight.zero_()
                # initial logits of latents are normal, so their log-sum-exp is about log L + 1/2
                self.gate.bias.fill_(math.log((1 - delta) / delta) + math.log(self.latents) + 0.5)

    def _state_size(self) -> int:
        ring = 2 * self.kv_heads * self.head_dim + (self.heads * self.latents if self.overlap == "exclusive" else 0)
        return (self.window - 1) * ring + super()._state_size()

    def _mixed(self, x: Any, h: Any, positions: Any) -> partial[Any]:
        q, k = (self._in_heads(W(x), self.head_dim) for W in (self.Wq, self.Wk))
        V = self._values(x, positions)
        if self.rope:
            q, k = (self._rotated(X, positions) for X in (q, k))
        Q, K = (self._in_heads(W(h), self.latents) for W in (self.latent_q, self.latent_k))
        options: dict[str, Any] = {"window": self.window, "overlap": self.overlap, "softcap": self.softcap}
        return partial(macchiato, q, k, V, Q, K, self.gate(x).transpose(1, 2), **options)
