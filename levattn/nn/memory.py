"""Short memories before latent logits, as layers: a causal convolution and a gated linear recurrence."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from levattn._core.checks import whole_number
from levattn.attention import causal_conv, rg_lru
from levattn.nn.base import Module, check_sequence, split_in_heads

_SLOWEST, _FASTEST = 0.999, 0.9  # the range of initial decays r of the recurrence


class _Memory(Module):
    """A layer whose calls return a state: it applies `_operator` to the result of `_arguments`."""

    dim: int
    _size: int  # of a state, for each sequence
    _operator: ClassVar[Callable[..., Any]]

    def forward(self, x: Any, *, mask: Any = None, offsets: Any = None, state: Any = None) -> tuple[Any, Any]:
        """Return the output for a batch of sequences, and the new state.

        Parameters
        ----------
        x : tensor of shape (B, T, C)
            The input.
        mask : tensor of bool, shape (B, T), optional
            True for a position that takes part.
        offsets : tensor or array of int, shape (n + 1,), optional
            Packed sequences, from 0 to T.
        state : tensor of shape (B, ...), optional
            The state that the previous call returned; not together with packed sequences.

        Returns
        -------
        (tensor of shape (B, T, C), tensor of shape (B, ...) or None)
            The output, and the state; None for packed sequences.

        Raises
        ------
        TypeError, ValueError
            If shapes do not match, the mask is not bool, offsets do not ascend from 0 to T, or offsets come with a
            state.
        """
        check_sequence(self.dim, x)
        attend = partial(type(self)._operator, *self._arguments(x), mask=mask, state=state)
        if offsets is not None:
            return attend(offsets=offsets), None
        return attend(return_state=True)  # type: ignore[no-any-return]

    @abstractmethod
    def _arguments(self, x: Any) -> tuple[Any, ...]:
        """Return the arguments of the operator for an input: inputs and weights."""

    def state_size(self) -> int:
        """Return the number of floats in a state for each sequence.

        Returns
        -------
        int
            The size of a state, divided by the size of its batch.
        """
        return self._size


class CausalConv(_Memory):
    r"""Causal convolution of each channel: `levattn.attention.causal_conv` as a layer.

    Initial weights are uniform on :math:`\pm 1/\sqrt{k}`, and the initial bias is 0.

    Parameters
    ----------
    dim : int
        Number of channels C.
    width : int
        Number of positions k that a row reads, including its own.
    device, dtype : torch.device or str, torch.dtype, optional
        Device and dtype of the parameters, as in torch's own layers.

    Raises
    ------
    TypeError, ValueError
        If a size is not a whole number of at least 1.

    Notes
    -----
    C (k + 1) parameters, time O(TCk). A state has (k − 1) C numbers for each sequence.

    References
    ----------
    De et al., Griffin, arXiv:2402.19427, where the convolution precedes the recurrence.

    Examples
    --------
    >>> import torch
    >>> from levattn.nn import CausalConv
    >>> layer, X = CausalConv(8), torch.randn(2, 10, 8)
    >>> Y, _ = layer(X)
    >>> _, state = layer(X[:, :6])
    >>> torch.allclose(layer(X[:, 6:], state=state)[0], Y[:, 6:], atol=1e-6)
    True
    """

    _operator = staticmethod(causal_conv)
    _shown = ("dim", "width")

    def __init__(self, dim: int, width: int = 4, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.dim, self.width = whole_number("dim", dim), whole_number("width", width)
        self._size, bound = (self.width - 1) * self.dim, self.width**-0.5
        self.weight = torch.nn.Parameter(torch.empty(self.dim, self.width, device=device, dtype=dtype))
        torch.nn.init.uniform_(self.weight, -bound, bound)
        self.bias = torch.nn.Parameter(torch.zeros(self.dim, device=device, dtype=dtype))

    def _arguments(self, x: Any) -> tuple[Any, ...]:
        return x, self.weight.to(x.dtype), self.bias.to(x.dtype)


class RGLRU(_Memory):
    r"""Real-gated linear recurrence: `levattn.attention.rg_lru` with gates computed from the input.

    Each head computes both gates from its own channels, by a square matrix and a bias. With
    :math:`\mathrm{softplus}(\text{a\_param}) = -\log r`, r² is initially uniform on [0.9², 0.999²]. So where its gate
    is half open, a channel decays by a factor of 0.66 to 0.996 a position.

    Parameters
    ----------
    dim : int
        Number of channels C.
    heads : int, optional
        Number of blocks of the gates, a divisor of `dim`; None for the largest of 8, 4, 2, 1 that divides it.
    device, dtype : torch.device or str, torch.dtype, optional
        Device and dtype of the parameters, as in torch's own layers.

    Raises
    ------
    TypeError, ValueError
        If a size is not a whole number of at least 1, or `dim` is not a multiple of `heads`.

    Notes
    -----
    2C (C/heads) + 3C parameters, time O(T C²/heads). A state has C + 1 numbers for each sequence: one for each
    channel, and a flag for whether there was any position so far.

    References
    ----------
    De et al., Griffin, arXiv:2402.19427.

    Examples
    --------
    >>> import torch
    >>> from levattn.nn import RGLRU
    >>> layer, X = RGLRU(8, heads=2), torch.randn(2, 10, 8)
    >>> Y, _ = layer(X)
    >>> _, state = layer(X[:, :6])
    >>> torch.allclose(layer(X[:, 6:], state=state)[0], Y[:, 6:], atol=1e-6)
    True
    """

    _operator = staticmethod(rg_lru)
    _shown = ("dim", "heads")

    def __init__(self, dim: int, heads: int | None = None, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.dim = whole_number("dim", dim)
        _, self.heads, _ = split_in_heads(self.dim, math.gcd(self.dim, 8) if heads is None else heads)
        self._size, width = self.dim + 1, self.dim // self.heads
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

    def _arguments(self, x: Any) -> tuple[Any, ...]:
        gates = (
            torch.einsum("bthi,hij->bthj", x.unflatten(-1, (self.heads, -1)), weight.to(x.dtype)).flatten(-2)
            + bias.to(x.dtype)
            for weight, bias in ((self.gate_x, self.bias_x), (self.gate_a, self.bias_a))
        )
        return (x, *gates, self.a_param)
