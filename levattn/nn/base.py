"""Base classes of layers and of their decoding caches, and short memories in front of latents."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch

from levattn._core.checks import check_type, whole_number
from levattn.attention import causal_conv, rg_lru


def split_in_heads(dim: Any, heads: Any, kv_heads: Any = None) -> tuple[int, int, int]:
    """Return the numbers of channels, heads, and heads of keys and values (None: as many as heads), or raise."""
    channels, count = whole_number("dim", dim), whole_number("heads", heads)
    if channels % count:
        raise ValueError(f"dim is {dim} and heads is {heads}; expected a multiple of heads")
    groups = count if kv_heads is None else whole_number("kv_heads", kv_heads)
    if count % groups:
        raise ValueError(f"heads is {heads} and kv_heads is {kv_heads}; expected a multiple of kv_heads")
    return channels, count, groups


def refuse_bidirectional(causal: bool) -> None:
    """Raise unless a layer is causal and can decode."""
    if not causal:
        raise ValueError("the layer has causal=False, so it cannot decode position by position; make it causal=True")


def refuse_repeated() -> None:
    """Raise for a call with a cache within a backward pass, in which torch's checkpoints repeat calls."""
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise ValueError(
            "cache was given within a backward pass, where torch.utils.checkpoint repeats the call and advances the "
            "cache again; expected no cache in a checkpoint. Call the layer with its cache outside the checkpoint"
        )


def projection(dim: int, width: int, *, bias: bool = False, std: float | None = None, **factory: Any) -> Any:
    """Return a linear map with normal initial weights (of deviation 1/√dim if `std` is None) and zero biases."""
    linear = torch.nn.Linear(dim, width, bias=bool(bias), **factory)
    torch.nn.init.normal_(linear.weight, std=dim**-0.5 if std is None else std)
    if bias:
        torch.nn.init.zeros_(linear.bias)
    return linear


def check_sequence(dim: int, x: Any) -> None:
    """Raise unless the input of a layer is a batch of sequences."""
    check_type("x", x, torch.Tensor, "a tensor of torch")
    if x.ndim != 3 or x.shape[2] != dim:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected (B, T, {dim})")


def check_input(dim: int, x: Any, mask: Any, offsets: Any, cache: Any, kind: type) -> None:
    """Raise unless the arguments of a call match the layer and each other; `kind` is the class of its caches."""
    check_type("cache", cache, kind | None, f"a {kind.__name__}, as new_cache of the layer returns")
    check_sequence(dim, x)
    check_type("mask", mask, torch.Tensor | None, "a tensor of torch")
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != tuple(x.shape[:2])):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; expected {tuple(x.shape[:2])} and "
            "torch.bool, True for a position that takes part"
        )
    if cache is not None and offsets is not None:
        raise ValueError("cache and offsets were both given; expected one of them: a cache is for unpacked sequences")


def checked_positions(x: Any, positions: Any, *, read: bool) -> Any:
    """Return positions as int64, or raise unless they match the input; `read`: whether the layer reads them."""
    if positions is None:
        return None
    if not read:
        raise ValueError(
            "positions was given and no part of the layer reads positions; leave it out, or make the layer with "
            "vapor, rope or position biases"
        )
    check_type("positions", positions, torch.Tensor, "a tensor of torch")
    if tuple(positions.shape) not in (tuple(x.shape[1:2]), tuple(x.shape[:2])):
        raise ValueError(
            f"positions has shape {tuple(positions.shape)}; expected {tuple(x.shape[1:2])} or {tuple(x.shape[:2])}"
        )
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"positions has dtype {positions.dtype}; expected whole numbers")
    return positions.long()  # as an index, bytes would be a mask


def check_sequences(name: str, x: Any, state: Any) -> None:
    """Raise unless a state is of as many sequences as the input; one would else be read as many equal ones."""
    if isinstance(state, torch.Tensor) and state.ndim and len(state) != len(x):
        raise ValueError(
            f"{name} holds {len(state)} sequences and x has {len(x)}; expected as many. Begin anew for other sequences"
        )


class Cache:
    """The decoding state for the positions so far."""

    def __init__(self) -> None:
        self.position = 0
        self.state: Any = None
        self.feature: Any = None
        self._taken_part: Any = 0  # how many positions of each sequence: one number, or (B, 1)

    def numbers(self) -> int:
        """Return the number of floats in the cache, over all sequences.

        Returns
        -------
        int
            Zero before the first positions.
        """
        held = 0 if self.state is None else self._numbers()
        return held + (0 if self.feature is None else int(self.feature.numel()))

    @abstractmethod
    def _numbers(self) -> int:
        """Return the number of floats in the state."""


C = TypeVar("C")


class Module(torch.nn.Module):  # type: ignore[misc]
    """A module that shows some of its attributes."""

    _shown: ClassVar[tuple[str, ...]] = ()

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._shown}

    def extra_repr(self) -> str:
        """Return the text that `print` shows for the layer.

        Returns
        -------
        str
            The layer's options.
        """
        return ", ".join(f"{name}={value!r}" for name, value in self._options().items())


class Layer(Module, Generic[C]):
    """A layer that replaces multi-head attention, on (B, T, C), and decodes with a cache."""

    _cache_class: type[C]
    dim: int
    causal: bool = True

    def new_cache(self) -> C:
        """Return an empty decoding cache, for a batch of any size.

        Returns
        -------
        LatteCache, MacchiatoCache, TokenStatisticsCache or LevAttentionCache
            A cache for this class of layers: ``forward(x, cache=cache)`` reads and updates it.

        Raises
        ------
        ValueError
            If the layer is not causal, because every new position then changes all rows.
        """
        refuse_bidirectional(self.causal)
        return self._cache_class()

    def _called(self, x: Any, mask: Any, offsets: Any, cache: C | None, positions: Any = None) -> Any:
        """Check a call, and return the attention of a batch of sequences."""
        check_input(self.dim, x, mask, offsets, cache, self._cache_class)
        positions = checked_positions(x, positions, read=self._reads_positions())
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)  # zero times NaN would reach the gradients of weights
        if cache is not None:
            refuse_bidirectional(self.causal)
            refuse_repeated()
        return self._combined(self._attended(x, mask, offsets, cache, positions).transpose(1, 2).flatten(-2))

    def _reads_positions(self) -> bool:
        """Tell whether the layer reads the positions of a call."""
        return False

    @abstractmethod
    def _attended(self, x: Any, mask: Any, offsets: Any, cache: Any, positions: Any) -> Any:
        """Return the outputs of the heads for a checked call, (B, H, T, D)."""

    @abstractmethod
    def _combined(self, Y: Any) -> Any:
        """Return the output of the layer from the concatenated outputs of the heads."""


class Recurrent(Layer[C]):
    """A layer whose cache has the same number of floats for any number of positions."""

    def forward(
        self, x: Any, *, mask: Any = None, offsets: Any = None, cache: C | None = None, positions: Any = None
    ) -> Any:
        """Return the attention of a batch of sequences.

        Masked positions have no place: other rows equal the rows of the sequence without masked positions. So do the
        rows of later calls with the cache. So prompts may be padded on either side.

        Parameters
        ----------
        x : tensor of shape (B, T, C)
            The input.
        mask : tensor of bool, shape (B, T), optional
            True for a position that takes part.
        offsets : tensor or array of int, shape (n + 1,), optional
            Starts of packed sequences, which do not see each other, from 0 to T.
        cache : LatteCache, MacchiatoCache or TokenStatisticsCache, optional
            A cache from `new_cache`: the input continues the positions in the cache, and the call updates it.
        positions : tensor of shape (T,) or (B, T), optional
            Positions for rotations (`vapor`, `rope`) and position biases. The default counts the positions of each
            sequence that take part, from 0 on, or from the number in the cache.

        Returns
        -------
        tensor of shape (B, T, C)
            The output.

        Raises
        ------
        TypeError
            If an argument is not a tensor, `cache` is of another class, or offsets are not whole numbers.
        ValueError
            If shapes do not match, options of the call exclude each other, or a layer with a cache is not causal. Also
            if a sequence has more positions than the position biases of the layer, or no part of the layer reads the
            given positions. The same holds if ``torch.utils.checkpoint`` repeats a call with a cache.
        """
        return self._called(x, mask, offsets, cache, positions)

    def state_size(self) -> int:
        """Return the number of floats in a cache for each sequence; with a window, once the window is full.

        Returns
        -------
        int
            The size of a cache, divided by the size of its batch.

        Raises
        ------
        ValueError
            If the layer is not causal, and so has no cache.
        """
        refuse_bidirectional(self.causal)
        return self._state_size()

    @abstractmethod
    def _state_size(self) -> int:
        """Return `state_size` of a causal layer."""

    def _continued(self, attend: Callable[..., Any], count: int, offsets: Any, cache: Any) -> Any:
        """Return the result of an operator; with a cache, continue from its state and advance it by `count`."""
        if cache is None:
            return attend(offsets=offsets)
        Y, cache.state = attend(state=cache.state, return_state=True)
        cache.position += count
        return Y


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
        check_sequences("state", x, state)
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
