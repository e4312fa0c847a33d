"""Latte as a layer."""

from __future__ import annotations

import math
from typing import Any

import torch

from levattn._core.checks import whole_number
from levattn.attention import latte, rotate_values
from levattn.attention.latent.vapor import check_base
from levattn.nn.checks import check_input, projection, refuse_bidirectional, split_in_heads
from levattn.nn.features import feature_map, feature_size, run_feature
from levattn.states import SoftmaxState

__all__ = ["Latte", "LatteCache"]


class LatteCache:
    """What decoding keeps of the positions so far, the same number of floats however many they are.

    A module's ``new_cache()`` makes one, and its ``forward(x, cache=cache)`` reads and updates it. It goes with one
    module and one batch of sequences. Gradients do not pass through it.

    Attributes
    ----------
    position : int
        Number of positions so far.
    state : SoftmaxState or None
        The softmax over positions of each latent, in float64, for each sequence and head; None before the first ones.
    feature : tensor of shape (B, ...), or None
        The state of the feature in front of the logits.

    Notes
    -----
    With H heads, L latents and C channels, H L (C/H + 2) floats for each sequence, and those of the feature, whatever
    the number of positions; a step of decoding takes time O(C (H L + C)), and copies them once.

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

    def __init__(self) -> None:
        self.position = 0
        self.state: SoftmaxState | None = None
        self.feature: Any = None

    def numbers(self) -> int:
        """Return how many floats are held, of all sequences together.

        Returns
        -------
        int
            Zero before the first positions.
        """
        held = [] if self.state is None else [self.state.m, self.state.s, self.state.S]
        held += [] if self.feature is None else [self.feature]
        return sum(math.prod(array.shape) for array in held)


class Latte(torch.nn.Module):  # type: ignore[misc]
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
        True to tell latents how far away values are: channels of a head are turned in pairs by angles that grow with
        the distance of row and position (`levattn.attention.rotate_values`). ``dim / heads`` is even then.
    base : float
        Of these angles: pair i of D/2 turns by ``base ** (-2i / D)`` for each position.
    feature : str or torch.nn.Module, optional
        The map f in front of the two projections to logits: "conv" or "rg_lru" for a short memory, a module of one's
        own on (B, T, C), or None for none. Modules with a state have ``state_size()`` and
        ``forward(x, *, offsets, state)``, which returns the output and the state after it.
    device : torch.device or str, optional
        Of the parameters, as in torch's own layers.
    dtype : torch.dtype, optional
        The same.

    Raises
    ------
    TypeError
        If a size is no whole number, or `feature` is neither a string nor a module.
    ValueError
        If a size is below 1, `dim` no multiple of `heads`, ``dim / heads`` odd with `vapor`, `base` no finite number
        above 0, or `feature` a string that is not known.

    Notes
    -----
    Parameters: 2C(HL + C), and those of the feature. Time of a call O(TC(HL + C)) for the projections and O(TLC) for
    attention, in which nothing of size T × T is formed. A cache has H L (C/H + 2) floats for each sequence.

    Numbers of float16 and bfloat16, and autocast, are computed in float32 within attention.

    References
    ----------
    .. [1] Dolga, Maystre, Cobzarenco and Barber, "Latte: Latent Attention for Linear Time Transformers",
       arXiv:2402.17512.

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
        self.dim, self.heads = split_in_heads(dim, heads)
        self.latents = whole_number("latents", latents)
        self.head_dim = self.dim // self.heads
        if vapor and self.head_dim % 2:
            raise ValueError(
                f"dim / heads is {self.head_dim}; expected an even number, as vapor turns pairs of channels"
            )
        self.causal, self.vapor, self.base = bool(causal), bool(vapor), check_base(base)
        factory = {"device": device, "dtype": dtype}
        self.feature = feature_map(feature, self.dim, **factory)
        self.Wq, self.Wk = (projection(self.dim, self.heads * self.latents, **factory) for _ in range(2))
        self.Wv, self.Wo = (projection(self.dim, self.dim, **factory) for _ in range(2))

    def new_cache(self) -> LatteCache:
        """Return an empty cache of decoding, for a batch of any size.

        Returns
        -------
        LatteCache
            What ``forward(x, cache=cache)`` reads and updates.

        Raises
        ------
        ValueError
            If the layer is not causal: then all rows change with every new position.
        """
        refuse_bidirectional(self.causal)
        return LatteCache()

    def state_size(self) -> int:
        """Return how many floats decoding keeps for each sequence.

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
        return self.heads * self.latents * (self.head_dim + 2) + feature_size(self.feature)

    def forward(self, x: Any, *, mask: Any = None, offsets: Any = None, cache: LatteCache | None = None) -> Any:
        """Return the attention of a batch of sequences.

        Parameters
        ----------
        x : tensor of shape (B, T, C)
            The input.
        mask : tensor of bool, shape (B, T), optional
            True for a position that takes part.
        offsets : tensor or array of int, shape (n + 1,), optional
            Packed sequences, from 0 to T, as in `levattn.attention.latte`.
        cache : LatteCache, optional
            What `new_cache` returned: the input goes on where the last one ended, and the cache is updated.

        Returns
        -------
        tensor of shape (B, T, C)
            The output.

        Raises
        ------
        TypeError
            If `x` or `mask` is no tensor, `cache` no `LatteCache`, or offsets are no whole numbers.
        ValueError
            If shapes do not go together, or the options of the call exclude one another.
        """
        check_input(self.dim, x, mask, offsets, cache, LatteCache)
        if cache is not None:
            refuse_bidirectional(self.causal)
        start = 0 if cache is None else cache.position
        h, memory = run_feature(self.feature, x, offsets, None if cache is None else cache.feature, mask)
        Q, K, V = (X.unflatten(-1, (self.heads, -1)).transpose(1, 2) for X in (self.Wq(h), self.Wk(h), self.Wv(x)))
        positions = torch.arange(start, start + x.shape[1], device=x.device) if self.vapor else None
        if self.vapor:
            V = rotate_values(V, positions, base=self.base, inverse=True)
        mask = None if mask is None else mask[:, None, :]
        if cache is None:
            Y = latte(Q, K, V, causal=self.causal, mask=mask, offsets=offsets)
        else:
            Y, state = latte(Q, K, V, mask=mask, state=cache.state, return_state=True)
            cache.position, cache.state = start + x.shape[1], state
            cache.feature = None if memory is None else memory.detach()
        if self.vapor:
            Y = rotate_values(Y, positions, base=self.base)
        return self.Wo(Y.transpose(1, 2).flatten(-2))

    def extra_repr(self) -> str:
        """Return what `print` shows of the layer.

        Returns
        -------
        str
            The options that it was made with.
        """
        return f"dim={self.dim}, heads={self.heads}, latents={self.latents}, causal={self.causal}, vapor={self.vapor}"
