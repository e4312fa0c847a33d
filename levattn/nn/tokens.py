"""Token statistics attention as a layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from levattn._core.checks import check_bool, check_type, positive_number, whole_number
from levattn._kernels.tensors import hidden_by
from levattn.attention.arguments import compiling, cumulative, untraced
from levattn.attention.tokens.arguments import MEMBERSHIPS, TokenForm, check_form, decay_rates, form_of
from levattn.attention.tokens.tssa import answer
from levattn.nn.base import Cache, Recurrent, projection, split_in_heads
from levattn.states import TokenState

# Names of this library, and the corresponding names in the public image and language models
_IMAGES = {
    "project.weight": "qkv.weight",
    "project.bias": "qkv.bias",
    "temperature": "temp",
    "out.weight": "to_out.0.weight",
    "out.bias": "to_out.0.bias",
}
_LANGUAGE = {
    "project.weight": "c_attn.weight",
    "project.bias": "c_attn.bias",
    "temperature": "temp",
    "position_bias": "denom_bias",
    "out.weight": "c_proj.weight",
    "out.bias": "c_proj.bias",
}


def read_released(state_dict: Any, prefix: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options and the state dict of the layer whose stored names start with a prefix, or raise."""
    check_type("state_dict", state_dict, Mapping, "a dict of tensors")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix is {prefix!r}; expected a string, e.g. 'blocks.3.attn.'")
    found = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    layouts = [names for names in (_IMAGES, _LANGUAGE) if names["project.weight"] in found]
    if len(layouts) != 1:
        raise ValueError(
            f"state_dict has {'both' if layouts else 'neither'} of {prefix}qkv.weight and {prefix}c_attn.weight; "
            "expected one of them, for an image or a language model. End a prefix with its dot: "
            "'blocks.3.attn.', 'transformer.h.0.attn.'"
        )
    names = {mine: prefix + theirs for mine, theirs in layouts[0].items()}
    _refuse_unknown(found, layouts[0], prefix)
    needed = [theirs for mine, theirs in names.items() if not mine.endswith(".bias")]
    if missing := [name for name in needed if name not in state_dict]:
        raise ValueError(f"state_dict has no {', '.join(missing)}; expected all weights of a layer")
    tensors = {mine: state_dict[theirs] for mine, theirs in names.items() if theirs in state_dict}
    for mine, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{names[mine]} is no tensor of floats; expected weights that the released code stored")
    _refuse_misshapen(tensors, names)
    # The released temperatures and position biases have a last axis, which broadcasts along channels
    tensors = {mine: t[..., 0] if mine in ("temperature", "position_bias") else t for mine, t in tensors.items()}
    places = tensors.get("position_bias")
    options = {
        "dim": int(tensors["project.weight"].shape[1]),
        "heads": len(tensors["temperature"]),
        "causal": layouts[0] is _LANGUAGE,
        "positions": None if places is None else int(places.shape[1]),
        "bias": "project.bias" in tensors,
        "out_bias": "out.bias" in tensors,
    }
    return options, tensors


def _refuse_unknown(found: dict[str, Any], layout: dict[str, str], prefix: str) -> None:
    if unknown := sorted(set(found) - set(layout.values())):
        shown = ", ".join(prefix + name for name in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        raise ValueError(
            f"state_dict has {shown}, which is not of a layer of token statistics; expected, after the prefix, "
            f"{', '.join(layout.values())} alone"
        )


def _refuse_misshapen(tensors: dict[str, Any], names: dict[str, str]) -> None:
    dim = tensors["project.weight"].shape[-1] if tensors["project.weight"].ndim else 0
    temperature = tensors["temperature"]
    heads = len(temperature) if temperature.ndim else 0
    places = tensors.get("position_bias")
    expected = {
        "project.weight": (dim, dim),
        "project.bias": (dim,),
        "temperature": (heads, 1),
        "position_bias": (heads, places.shape[1] if places is not None and places.ndim > 1 else 0, 1),
        "out.weight": (dim, dim),
        "out.bias": (dim,),
    }
    for mine, tensor in tensors.items():
        if tuple(tensor.shape) != expected[mine] or not tensor.numel():
            raise ValueError(
                f"{names[mine]} has shape {tuple(tensor.shape)}; expected {expected[mine]}, with dim = {dim} as "
                f"{names['project.weight']} and {heads} heads as {names['temperature']} have"
            )


class TokenStatisticsCache(Cache):
    """The decoding cache of a `TokenStatistics` layer, as returned by its ``new_cache()``.

    Its size does not depend on the number of tokens: it has `TokenStatistics.state_size` floats for each sequence.
    Gradients do not pass through it.

    Attributes
    ----------
    position : int
        Number of positions so far.
    state : TokenState or None
        The sums of each sequence and head, in float64; None at the start.

    Examples
    --------
    >>> import torch
    >>> from levattn.nn import TokenStatistics
    >>> layer = TokenStatistics(16, heads=2, causal=True)
    >>> cache = layer.new_cache()
    >>> _ = layer(torch.zeros(3, 5, 16), cache=cache)
    >>> cache.position, cache.numbers() == 3 * layer.state_size()
    (5, True)
    """

    def _numbers(self) -> int:
        return int(self.state.numbers())


class TokenStatistics(Recurrent[TokenStatisticsCache]):
    r"""Token statistics self-attention as a layer: time linear in the number of tokens, and half the weights.

    From an input X (T, C) each head k computes tokens :math:`W_k = X U_k` of d = C/h channels, and
    `levattn.attention.tssa` of these. An output matrix maps all heads together to the output: its own (untied), or
    :math:`[U_1, \dots, U_h]^\top` (tied). Add the output to the tokens, as in any transformer: ``x + layer(norm(x))``.

    The layer never copies a value from one token to another. Use another layer (`Latte`) for recall, which needs it.

    Parameters
    ----------
    dim : int
        Number of channels C of the input and of the output.
    form : TokenForm or str
        A `levattn.attention.TokenForm` without arrays, or its membership: "diag_leverage" as the released code, "norm"
        as the paper, "leverage" or "uniform". Temperatures are initially :math:`d^{-1/2}` with ``normalize="mean"``,
        and otherwise 1. The decay is not learned.
    heads : int
        Number of heads h, a divisor of `dim`.
    causal : bool
        True if a token sees itself and earlier tokens, False if it sees all.
    output : {"untied", "tied"}
        Whether the output has its own matrix. With tied outputs, no biases, ``c = 1`` and :math:`\|U_k\|_2 <
        \sqrt 2`, adding the output to the input tokens lowers the variational rate
        (`levattn.attention.rates.variational_rate`) for fixed memberships. After a norm there is no such guarantee.
    positions : int, optional
        The length of the longest sequence, for position biases as in the released language models; None for no
        biases. Each head adds the bias of a position to the mean score of a channel. Masked tokens have no position,
        and each packed sequence begins at the first position.
    bias, out_bias : bool
        Whether the two linear maps have biases; `out_bias` is for untied outputs.
    device, dtype : torch.device or str, torch.dtype, optional
        Device and dtype of the parameters, as in torch's own layers.

    Attributes
    ----------
    project : torch.nn.Linear
        The maps :math:`[U_1, \dots, U_h]`, whose weight (C, C) has :math:`U_k^\top` as rows k d to (k + 1) d.
    temperature : torch.nn.Parameter of shape (h,), or None
        The temperatures of the heads; None with "uniform".
    position_bias : torch.nn.Parameter of shape (h, positions), or None
        The biases of positions, initially zero.
    out : torch.nn.Linear or None
        The output map, if it is untied.

    Raises
    ------
    TypeError
        If a number is of another type.
    ValueError
        If a size is below 1, `dim` is not a multiple of `heads`, a number is out of range, or options exclude each
        other.

    Notes
    -----
    Parameters: 2C² + h and the biases, or C² + h if tied. Time of a call O(TC²) for the linear maps and O(TC) for
    attention. A cache has 2(C + h) floats for each sequence with "diag_leverage", else C + h. A decoding step takes
    time O(C²), and copies the cache once. Rows of masked tokens equal the bias of the output.

    Initial weights are normal with standard deviation 0.02, and initial biases are zero, as in the authors' code.
    Their language models of n layers divide the initial weights of ``layer.out`` by ``sqrt(2 * n)``. The
    authors' language models exclude temperatures and position biases from weight decay; see `no_weight_decay`. Their
    code applies dropout to the factors 1/(1 + c m) and the output; this layer has no dropout. In float16, bfloat16 and
    autocast, attention computes in float32.

    References
    ----------
    Wu et al., "Token Statistics Transformer", arXiv:2412.17810, section 3 and Algorithm 1.

    Examples
    --------
    >>> import torch
    >>> from levattn.nn import TokenStatistics
    >>> layer = TokenStatistics(32, heads=4, causal=True)
    >>> X = torch.randn(2, 10, 32)
    >>> Y = layer(X)
    >>> cache = layer.new_cache()
    >>> steps = [layer(X[:, t : t + 1], cache=cache) for t in range(10)]
    >>> torch.allclose(torch.cat(steps, 1), Y, atol=1e-6)
    True
    """

    _cache_class = TokenStatisticsCache
    _shown = ("dim", "heads", "causal")

    def __init__(
        self,
        dim: int,
        form: TokenForm | str = "diag_leverage",
        *,
        heads: int = 8,
        causal: bool = False,
        output: str = "untied",
        positions: int | None = None,
        bias: bool = False,
        out_bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        check_bool(causal=causal, bias=bias, out_bias=out_bias)
        super().__init__()
        self.dim, self.heads, _ = split_in_heads(dim, heads)
        self.head_dim, self.causal = self.dim // self.heads, bool(causal)
        self.form = self._checked_form(form, positions)
        if output not in ("untied", "tied"):
            raise ValueError(f"output is {output!r}; expected 'untied' or 'tied'")
        self.positions = None if positions is None else whole_number("positions", positions)
        factory = {"device": device, "dtype": dtype}
        self.project = projection(self.dim, self.dim, bias=bias, std=0.02, **factory)
        begin = self.head_dim**-0.5 if self.form.normalize == "mean" else 1.0
        temperature = None if self.form.membership == "uniform" else torch.full((self.heads,), begin, **factory)
        places = None if self.positions is None else torch.zeros(self.heads, self.positions, **factory)
        for name, values in (("temperature", temperature), ("position_bias", places)):
            self.register_parameter(name, None if values is None else torch.nn.Parameter(values))
        self.out = None
        if output == "untied":
            self.out = projection(self.dim, self.dim, bias=out_bias, std=0.02, **factory)

    def _checked_form(self, given: Any, positions: Any) -> TokenForm:
        """Return a form without arrays, or raise."""
        membership, normalize, bias, decay, c = form_of(given)
        if not isinstance(membership, str) or membership not in MEMBERSHIPS:
            given = repr(membership) if isinstance(membership, str | None) else f"of type {type(membership).__name__}"
            raise ValueError(
                f"membership is {given}; expected one of {', '.join(map(repr, MEMBERSHIPS))}, or a TokenForm with one "
                "of them"
            )
        if bias is not None:
            raise ValueError(
                "form has a bias, whose numbers would not be learned; expected none. Give positions=, the length of "
                "the longest sequence, for a parameter position_bias"
            )
        check_form(membership, normalize, self.causal, None)
        if membership == "uniform" and positions is not None:
            raise ValueError(
                "positions was given and membership is 'uniform'; expected positions=None, as no bias would be used"
            )
        rates = decay_rates(decay, self.heads, self.causal)
        each = [1.0] if rates is None else rates.tolist()
        decay = each[0] if len(set(each)) == 1 else tuple(each)
        return TokenForm(membership, normalize=normalize, decay=decay, c=positive_number("c", c))

    @classmethod
    def from_released(
        cls, state_dict: Any, prefix: str = "", *, device: Any = None, dtype: Any = None
    ) -> TokenStatistics:
        """Return a layer in the form of the released code, with released weights.

        Parameters
        ----------
        state_dict : dict of tensors
            The stored tensors of a public model, with names after the prefix. Image models, which are not causal, have
            ``qkv.weight``, ``temp`` and ``to_out.0.weight``. Language models, which are causal, have
            ``c_attn.weight``, ``temp``, ``denom_bias`` and ``c_proj.weight``. Linear maps may also have ``.bias``.
        prefix : str
            The prefix of the names of this layer, e.g. "blocks.3.attn." or "transformer.h.0.attn.".
        device, dtype : torch.device or str, torch.dtype, optional
            Device and dtype of the parameters; by default the same as the stored weights.

        Returns
        -------
        TokenStatistics
            It computes the same output as the released layer in evaluation mode. To copy its weights to an existing
            layer, pass its ``state_dict()`` to ``load_state_dict``.

        Raises
        ------
        TypeError
            If an argument, or a stored value, is of another type.
        ValueError
            If a name after the prefix is missing or unknown, or shapes do not match.

        Examples
        --------
        >>> import torch
        >>> from levattn.nn import TokenStatistics
        >>> stored = {"qkv.weight": torch.randn(12, 12), "temp": torch.ones(3, 1)}
        >>> stored |= {"to_out.0.weight": torch.randn(12, 12), "to_out.0.bias": torch.zeros(12)}
        >>> TokenStatistics.from_released(stored)
        TokenStatistics(
          dim=12, heads=3, causal=False, membership='diag_leverage', output='untied'
          (project): Linear(in_features=12, out_features=12, bias=False)
          (out): Linear(in_features=12, out_features=12, bias=True)
        )
        """
        options, tensors = read_released(state_dict, prefix)
        weight = tensors["project.weight"]
        layer = cls(**options, device=device or weight.device, dtype=dtype or weight.dtype)
        layer.load_state_dict(tensors)
        return layer

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters to exclude from weight decay.

        Returns
        -------
        set of str
            Names within this layer. Optimizers that call this method on a whole model (timm's) need the names with the
            path of the layer, from the model's own method.
        """
        held = {"temperature": self.temperature, "position_bias": self.position_bias}
        return {name for name, parameter in held.items() if parameter is not None}

    def _state_size(self) -> int:
        return (2 if self.form.membership == "diag_leverage" else 1) * (self.dim + self.heads)

    def _reads_positions(self) -> bool:
        return self.position_bias is not None

    def _attended(self, x: Any, mask: Any, offsets: Any, cache: TokenStatisticsCache | None, positions: Any) -> Any:
        bias = self._bias(x, mask, offsets, cache) if positions is None else self._bias_at(positions, mask)
        membership, normalize, _, decay, c = form_of(self.form)
        form = membership, normalize, bias, decay, c
        W = self.project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # a view, without a copy
        temperature = 1.0 if self.temperature is None else self.temperature
        return self._continued(partial(answer, W, temperature, form, self.causal, mask), x.shape[1], offsets, cache)

    def _combined(self, Y: Any) -> Any:
        if self.out is not None:
            return self.out(Y)
        weight = self.project.weight
        if not isinstance(weight, torch.Tensor):  # quantize_dynamic replaces it by a method
            weight = weight().dequantize()
        if type(weight).__name__ == "DTensor" and type(Y) is torch.Tensor:
            raise ValueError(
                "project was sharded alone, and the tied output reads its weight after project has run; expected both "
                "together: fully_shard(layer), not fully_shard(layer.project). Or make the layer with output='untied'"
            )
        return Y @ weight

    def _bias(self, x: Any, mask: Any, offsets: Any, cache: TokenStatisticsCache | None) -> Any:
        """Return the biases of the tokens' positions, (h, T) or (B, h, T), or None."""
        if self.position_bias is None:
            return None
        T = x.shape[1]
        before = 0 if cache is None or cache.state is None else untraced(_counts, cache.state, x)
        if mask is None and offsets is None and isinstance(before, int):
            self._refuse_longer(before + T)
            return self.position_bias[:, before : before + T]
        return self._bias_at(
            _places(x, mask, offsets) + (before if isinstance(before, int) else before[:, None]), mask
        )

    def _bias_at(self, places: Any, mask: Any) -> Any:
        """Return the biases at given positions."""
        if mask is not None:
            places = torch.where(mask, places, 0)
        if not compiling() and places.numel() and hidden_by([places]) is None:  # else torch checks the index below
            if int(places.min()) < 0:
                raise ValueError(f"positions has {int(places.min())}; expected whole numbers of at least 0")
            self._refuse_longer(int(places.max()) + 1)
        else:  # an index below 0 would count from the end
            places = torch.where(places < 0, self.position_bias.shape[1], places)
        found = self.position_bias[:, places]
        return found if found.ndim == 2 else found.transpose(0, 1)

    def _refuse_longer(self, count: int) -> None:
        if count > self.position_bias.shape[1]:
            raise ValueError(
                f"a sequence has {count} tokens and the layer {self.positions} positions; expected at most as many "
                "tokens. Make the layer with more positions or without (positions=None), or shorten the sequence"
            )

    def _options(self) -> dict[str, Any]:
        others = {"normalize": "sum", "decay": 1.0, "c": 1.0}
        shown = {"membership": self.form.membership, "output": "tied" if self.out is None else "untied"}
        shown |= {
            name: getattr(self.form, name) for name, usual in others.items() if getattr(self.form, name) != usual
        }
        return super()._options() | shown | ({} if self.positions is None else {"positions": self.positions})


def _counts(state: TokenState, x: Any) -> Any:
    """Return the number of tokens of each sequence in a state: one number if they are equal, else (B,)."""
    counts = np.zeros(0, np.int64) if state.tokens is None else state.tokens.count[..., 0]
    if counts.shape != (x.shape[0],):
        return 0  # a batch that does not match the cache, which attention refuses
    if len(set(counts.tolist())) == 1:
        return int(counts[0])
    return torch.from_numpy(counts.copy()).to(x.device)


def _places(x: Any, mask: Any, offsets: Any) -> Any:
    """Return the position of each token in its sequence, (T,), or (B, T) with a mask."""
    T = x.shape[1]
    order = torch.arange(T, device=x.device)
    starts = torch.zeros_like(order)
    if offsets is not None:
        ends = torch.as_tensor(cumulative(offsets, T), device=x.device)
        starts = ends[torch.searchsorted(ends[1:], order, right=True)]
    if mask is None:
        return order - starts
    before = mask.cumsum(1) - mask.long()
    return before - before[:, starts]
