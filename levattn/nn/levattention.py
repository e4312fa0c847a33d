"""Attention to few keys as a layer, with the same selection in training and inference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from levattn._core.checks import check_bool, check_type
from levattn._kernels.tensors import has_tangent
from levattn.attention import PrunedState, Selection, causal_pruned_attention, pruned_attention
from levattn.attention.pruned.selection import exponent_of, rule_of, selection_for_models
from levattn.attention.pruned.state import converted
from levattn.nn.base import Layer, projection, split_in_heads


class Prunable:
    """A layer that `set_dense` can switch: it attends to all keys while `dense`, and otherwise to few."""

    dense: bool = False


def set_dense(model: Any, dense: bool = True) -> None:
    """Let all `LevAttention` layers of a model attend to all keys, or to few again.

    Begin training with all keys (a warm start): the authors use full attention for about the first 15 % of the
    steps.

    Parameters
    ----------
    model : torch.nn.Module
        The model, or one layer.
    dense : bool
        Whether layers attend to all keys.

    Raises
    ------
    TypeError
        If `model` is not a module, or `dense` is not a bool.
    ValueError
        If the model has no such layer.

    Examples
    --------
    >>> import torch
    >>> from levattn.attention import Selection
    >>> from levattn.nn import LevAttention, set_dense
    >>> model = torch.nn.Sequential(LevAttention(16, Selection(size=8), heads=2), torch.nn.LayerNorm(16))
    >>> for step in range(100):
    ...     set_dense(model, step < 15)
    >>> model[0].dense
    False
    """
    check_type("model", model, torch.nn.Module, "a torch.nn.Module")
    check_bool(dense=dense)
    layers = [module for module in model.modules() if isinstance(module, Prunable)]
    if not layers:
        raise ValueError(f"model is a {type(model).__name__} without a LevAttention layer; expected at least one")
    for layer in layers:
        layer.dense = dense


class LevAttentionCache:
    """The decoding cache of a `LevAttention` layer, as returned by its ``new_cache()``.

    For each sequence and key head it has keys and values, and O(d²) numbers for the selection. Before the first
    selection it has all keys, fewer than twice as many as a query has slots (or than `Selection.start`). After it, it
    has at most as many as slots. So its size does not grow with the number of positions. Gradients do not pass through
    it.

    Attributes
    ----------
    position : int
        Number of positions so far.
    state : PrunedState or None
        The selected keys, the summaries, and the keys of the window and the chunk; None at the start.

    Examples
    --------
    >>> import torch
    >>> from levattn.nn import LevAttention
    >>> layer = LevAttention(16, 20, heads=2, causal=True)
    >>> cache = layer.new_cache()
    >>> _ = layer(torch.zeros(3, 50, 16), cache=cache)
    >>> cache.position, cache.state.slots.total
    (50, 20)
    """

    def __init__(self) -> None:
        self.position = 0
        self.state: PrunedState | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in the cache; 0 before the first positions."""
        return 0 if self.state is None else self.state.nbytes


class LevAttention(Prunable, Layer[LevAttentionCache]):
    r"""Multi-head self-attention to the keys with the largest leverage scores in each head, as a layer.

    A linear map computes queries, keys and values from an input X (T, C). A second linear map is applied to
    `levattn.attention.pruned_attention` of these. Each call selects keys anew, and gradients treat the selection as a
    constant. So training optimizes attention restricted to these keys, as in the paper. Begin with ``dense = True``
    for the first part of training (`set_dense`).

    Parameters
    ----------
    dim : int
        Number of channels C of the input and of the output.
    selection : Selection or number
        The keys that a query attends to. The layer of the paper has
        ``Selection(size=32, scores="leverage")``. A float is a share of the positions of a call, or of the first call
        with a cache.
    heads : int
        Number of query heads, a divisor of `dim`.
    kv_heads : int, optional
        Number of key and value heads, a divisor of `heads`; as many as `heads` if not given.
    f : "softmax", float or Power
        The attention function, as in `levattn.attention.pruned_attention`.
    causal : bool
        True if a position sees itself and earlier positions, False if it sees all.
    bias, out_bias : bool
        Whether the two linear maps have biases.
    device, dtype : torch.device or str, torch.dtype, optional
        Device and dtype of the parameters, as in torch's own layers.

    Attributes
    ----------
    dense : bool
        Whether the layer attends to all keys; False at first. You may set it at any time; the state dict does not
        contain it.
    qkv : torch.nn.Linear
        The map to queries, keys and values, in this order. If `kv_heads` equals `heads`, the parameters of `qkv` and
        `proj` have the same names and order as in ``timm.layers.Attention``.
    proj : torch.nn.Linear
        The output map.

    Raises
    ------
    TypeError, ValueError
        If a size or an option of attention is invalid, or `dim` is not a multiple of `heads`, or `heads` not of
        `kv_heads`.

    Notes
    -----
    Time of a call O(TC²) for the linear maps, and the time of `pruned_attention`. While ``dense``, softmax without a
    mask uses torch's own ``scaled_dot_product_attention``.

    Initial weights are normal with standard deviation :math:`1/\sqrt{C}`, and initial biases are zero.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, "LevAttention", arXiv:2410.05462, section 6.

    Examples
    --------
    >>> import torch
    >>> from levattn.attention import Selection
    >>> from levattn.nn import LevAttention
    >>> layer = LevAttention(32, Selection(size=8, scores="leverage"), heads=4)
    >>> X = torch.randn(2, 64, 32)
    >>> layer(X).shape
    torch.Size([2, 64, 32])
    >>> causal = LevAttention(32, 24, heads=4, causal=True)
    >>> Y, cache = causal(X), causal.new_cache()
    >>> steps = [causal(X[:, t : t + 1], cache=cache) for t in range(64)]
    >>> torch.allclose(torch.cat(steps, 1), Y, atol=1e-4)
    True
    """

    _cache_class = LevAttentionCache
    _shown = ("dim", "heads", "causal")

    def __init__(
        self,
        dim: int,
        selection: Any,
        *,
        heads: int = 8,
        kv_heads: int | None = None,
        f: Any = "softmax",
        causal: bool = False,
        bias: bool = True,
        out_bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        check_bool(causal=causal, bias=bias, out_bias=out_bias)
        super().__init__()
        self.dim, self.heads, self.kv_heads = split_in_heads(dim, heads, kv_heads)
        self.head_dim = self.dim // self.heads
        self.causal, self.f = bool(causal), f
        self.selection = checked_selection(selection, causal=self.causal, f=f)
        factory = {"device": device, "dtype": dtype}
        width = self.dim + 2 * self.kv_heads * self.head_dim
        self.qkv = projection(self.dim, width, bias=bias, **factory)
        self.proj = projection(self.dim, self.dim, bias=out_bias, **factory)

    def forward(self, x: Any, *, mask: Any = None, cache: LevAttentionCache | None = None) -> Any:
        """Return the attention of a batch of sequences.

        Masked positions have no place: other rows equal the rows of the sequence without masked positions.

        Parameters
        ----------
        x : tensor of shape (B, T, C)
            The input.
        mask : tensor of bool, shape (B, T), optional
            True for a position that takes part.
        cache : LevAttentionCache, optional
            A cache from `new_cache`: the input continues the positions in the cache, and the call updates it.

        Returns
        -------
        tensor of shape (B, T, C)
            The output. Rows of masked positions equal the bias of the output map.

        Raises
        ------
        TypeError
            If `x` or `mask` is not a tensor, or `cache` is not a `LevAttentionCache`.
        ValueError
            If shapes do not match, or there is a cache and the layer is dense or not causal. Also if
            ``torch.utils.checkpoint`` repeats a call with a cache.
        """
        return self._called(x, mask, None, cache)

    def _attended(self, x: Any, mask: Any, _offsets: Any, cache: LevAttentionCache | None, _positions: Any) -> Any:
        G, d = self.kv_heads, self.head_dim
        parts = self.qkv(x).split([self.dim, G * d, G * d], dim=-1)
        Q, K, V = (X.unflatten(-1, (-1, d)).transpose(1, 2) for X in parts)
        options: dict[str, Any] = {"f": self.f}
        if mask is not None:
            options["mask"] = mask[:, None, :]
            if not self.causal:
                options["query_mask"] = mask[:, None, :]
        if cache is not None:
            return self._step(Q, K, V, cache, options)
        if self.dense:
            return attend_to_all(Q, K, V, causal=self.causal, **options)
        if self.causal:
            return causal_pruned_attention(Q, K, V, self.selection, **options)
        return pruned_attention(Q, K, V, self.selection, **options)

    def _combined(self, Y: Any) -> Any:
        return self.proj(Y)

    def _step(self, Q: Any, K: Any, V: Any, cache: LevAttentionCache, options: dict[str, Any]) -> Any:
        if self.dense:
            raise ValueError("cache was given and the layer is dense; expected dense=False, as a cache holds few keys")
        selection = self.selection if cache.state is None else cache.state
        Y, state = causal_pruned_attention(Q, K, V, selection, **options, return_state=True)
        if not state.of_tensors:  # else it has arrays of numpy, which have no gradients
            state = replace(state, parts=tuple(converted(part, torch.Tensor.detach) for part in state.parts))
        cache.position, cache.state = cache.position + Q.shape[2], state
        return Y

    def _options(self) -> dict[str, Any]:
        grouped = {"kv_heads": self.kv_heads} if self.kv_heads != self.heads else {}
        function = {} if self.f == "softmax" else {"f": self.f}
        return super()._options() | {"selection": self.selection} | grouped | function | {"dense": self.dense}


def checked_selection(
    selection: Any, *, causal: bool = False, f: Any = "softmax", name: str = "selection"
) -> Selection:
    """Return the selection of a layer, or raise if `pruned_attention` would refuse it for any keys."""
    found = selection_for_models(selection, name)
    rule_of(found, 1 << 20, power=exponent_of(f), causal=causal, aligned=True)
    return found


def attend_to_all(Q: Any, K: Any, V: Any, *, causal: bool, f: Any, **masks: Any) -> Any:
    """Return the attention of Q (B, H, T, d) to all keys."""
    T = K.shape[2]
    if f == "softmax" and not masks and not has_tangent((Q, K, V)):
        grouped = bool(Q.shape[1] != K.shape[1])
        return torch.nn.functional.scaled_dot_product_attention(Q, K, V, is_causal=causal, enable_gqa=grouped)
    if causal:  # one chunk, in which a row reads all positions up to its own
        everything = Selection(size=0, renew_every=max(T, 1))
        return causal_pruned_attention(Q, K, V, everything, f=f, **masks)
    return pruned_attention(Q, K, V, Selection(size=T), f=f, **masks)
