"""Short memories in front of latent logits, as layers: a causal convolution and a gated linear recurrence."""

from __future__ import annotations

import math
from typing import Any

import torch

from levattn._core.checks import whole_number
from levattn.attention import causal_conv, rg_lru
from levattn.nn.checks import check_sequence, split_in_heads

__all__ = ["RGLRU", "CausalConv"]

_SLOWEST, _FASTEST = 0.999, 0.9  # the decays r that the recurrence begins between


class CausalConv(torch.nn.Module):  # type: ignore[misc]
    r"""Convolution of each channel with its last inputs: `levattn.attention.causal_conv` as a layer.

    Weights begin uniform on :math:`\pm 1/\sqrt{k}`, the bias at 0.

    Parameters
    ----------
    dim : int
        Number of channels C.
    width : int
        Number of positions k that a row reads, its own among them.
    device : torch.device or str, optional
        Of the parameters, as in torch's own layers.
    dtype : torch.dtype, optional
        The same.

    Raises
    ------
    TypeError, ValueError
        If a size is no whole number of at least 1.

    Notes
    -----
    C (k + 1) parameters, time O(TCk). A state has (k − 1) C numbers for each sequence.

    References
    ----------
    As in front of the recurrence of De et al., Griffin, arXiv:2402.19427.

    Examples
    --------
    >>> import torch
    >>> from levattn.nn import CausalConv
    >>> layer, X = CausalConv(8), torch.randn(2, 10, 8)
    >>> Y, _ = layer(X)
    >>> head, state = layer(X[:, :6])
    >>> tail, _ = layer(X[:, 6:], state=state)
    >>> torch.allclose(torch.cat([head, tail], 1), Y, atol=1e-6)
    True
    """

    def __init__(self, dim: int, width: int = 4, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.dim, self.width = whole_number("dim", dim), whole_number("width", width)
        bound = self.width**-0.5
        self.weight = torch.nn.Parameter(torch.empty(self.dim, self.width, device=device, dtype=dtype))
        torch.nn.init.uniform_(self.weight, -bound, bound)
        self.bias = torch.nn.Parameter(torch.zeros(self.dim, device=device, dtype=dtype))

    def forward(self, x: Any, *, mask: Any = None, offsets: Any = None, state: Any = None) -> tuple[Any, Any]:
        """Return the convolution of a batch of sequences, and the state after it.

        Parameters
        ----------
        x : tensor of shape (B, T, C)
            The input.
        mask : tensor of bool, shape (B, T), optional
            True for a position that takes part.
        offsets : tensor or array of int, shape (n + 1,), optional
            Packed sequences, from 0 to T.
        state : tensor of shape (B, k − 1, C), optional
            What came before, not together with packed sequences.

        Returns
        -------
        (tensor of shape (B, T, C), tensor of shape (B, k − 1, C) or None)
            The output, and the state; None for packed sequences.

        Raises
        ------
        TypeError, ValueError
            If shapes do not go together, the mask is not of bool, or offsets do not ascend from 0 to T or are given
            together with a state.
        """
        check_sequence(self.dim, x)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        if offsets is not None:
            return causal_conv(x, weight, bias, mask=mask, offsets=offsets, state=state), None
        out, state = causal_conv(x, weight, bias, mask=mask, state=state, return_state=True)
        return out, state

    def state_size(self) -> int:
        """Return how many numbers a state has for each sequence.

        Returns
        -------
        int
            (k − 1) C.
        """
        return (self.width - 1) * self.dim

    def extra_repr(self) -> str:
        """Return what `print` shows of the layer.

        Returns
        -------
        str
            The options that it was made with.
        """
        return f"dim={self.dim}, width={self.width}"


class RGLRU(torch.nn.Module):  # type: ignore[misc]
    r"""Real-gated linear recurrence: `levattn.attention.rg_lru` with gates that it reads from its input.

    Each head makes both gates of its own channels, by a square matrix and a bias. With
    :math:`\mathrm{softplus}(\text{a\_param}) = -\log r`, r² begins uniform on [0.9², 0.999²], so that a channel decays
    by 0.66 to 0.996 a position where its gate is half open.

    Parameters
    ----------
    dim : int
        Number of channels C.
    heads : int, optional
        Number of blocks of the gates, a divisor of `dim`; None for the largest of 8, 4, 2, 1 that divides it.
    device : torch.device or str, optional
        Of the parameters, as in torch's own layers.
    dtype : torch.dtype, optional
        The same.

    Raises
    ------
    TypeError, ValueError
        If a size is no whole number of at least 1, or `dim` no multiple of `heads`.

    Notes
    -----
    2C (C/heads) + 3C parameters, time O(T C²/heads). A state has C + 1 numbers for each sequence: one for each
    channel, and whether there was any position so far.

    References
    ----------
    De et al., Griffin, arXiv:2402.19427.

    Examples
    --------
    >>> import torch
    >>> from levattn.nn import RGLRU
    >>> layer, X = RGLRU(8, heads=2), torch.randn(2, 10, 8)
    >>> Y, _ = layer(X)
    >>> head, state = layer(X[:, :6])
    >>> tail, _ = layer(X[:, 6:], state=state)
    >>> torch.allclose(torch.cat([head, tail], 1), Y, atol=1e-6)
    True
    """

    def __init__(self, dim: int, heads: int | None = None, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.dim = whole_number("dim", dim)
        _, self.heads = split_in_heads(self.dim, math.gcd(self.dim, 8) if heads is None else heads)
        width = self.dim // self.heads
        factory = {"device": device, "dtype": dtype}
        self.gate_x, self.gate_a = (
            torch.nn.Parameter(torch.empty(self.heads, width, width, **factory)) for _ in range(2)
        )
        for weight in (self.gate_x, self.gate_a):
            torch.nn.init.normal_(weight, std=width**-0.5)
        self.bias_x, self.bias_a = (torch.nn.Parameter(torch.zeros(self.dim, **factory)) for _ in range(2))
        self.a_param = torch.nn.Parameter(torch.empty(self.dim, **factory))
        with torch.no_grad():
            squares = torch.empty(self.dim, device=device).uniform_(_FASTEST**2, _SLOWEST**2)
            self.a_param.copy_(torch.log(torch.expm1(-0.5 * torch.log(squares))))

    def forward(self, x: Any, *, mask: Any = None, offsets: Any = None, state: Any = None) -> tuple[Any, Any]:
        """Return the recurrence of a batch of sequences, and the state after it.

        Parameters
        ----------
        x : tensor of shape (B, T, C)
            The input.
        mask : tensor of bool, shape (B, T), optional
            True for a position that takes part.
        offsets : tensor or array of int, shape (n + 1,), optional
            Packed sequences, from 0 to T.
        state : tensor of shape (B, C + 1), optional
            What came before, not together with packed sequences.

        Returns
        -------
        (tensor of shape (B, T, C), tensor of shape (B, C + 1) or None)
            The output, and the state; None for packed sequences.

        Raises
        ------
        TypeError, ValueError
            If shapes do not go together, the mask is not of bool, or offsets do not ascend from 0 to T or are given
            together with a state.
        """
        check_sequence(self.dim, x)
        gates = (
            torch.einsum("bthi,hij->bthj", x.unflatten(-1, (self.heads, -1)), weight.to(x.dtype)).flatten(-2)
            + bias.to(x.dtype)
            for weight, bias in ((self.gate_x, self.bias_x), (self.gate_a, self.bias_a))
        )
        arguments = (x, *gates, self.a_param)
        if offsets is not None:
            return rg_lru(*arguments, mask=mask, offsets=offsets, state=state), None
        out, state = rg_lru(*arguments, mask=mask, state=state, return_state=True)
        return out, state

    def state_size(self) -> int:
        """Return how many numbers a state has for each sequence.

        Returns
        -------
        int
            C + 1.
        """
        return self.dim + 1

    def extra_repr(self) -> str:
        """Return what `print` shows of the layer.

        Returns
        -------
        str
            The options that it was made with.
        """
        return f"dim={self.dim}, heads={self.heads}"
