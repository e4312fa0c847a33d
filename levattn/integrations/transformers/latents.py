"""Extend a pretrained decoder by latents, save their parameters, and remove such an extension or a pruning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from levattn._core.checks import check_type, fraction, whole_number
from levattn.attention import Window, macchiato
from levattn.integrations.transformers.calls import (
    causal_padding,
    layer_of,
    numbers_among,
    padding_mask,
    whole_numbers,
)
from levattn.integrations.transformers.discovery import ModelLayer, discovered, shared_configs
from levattn.integrations.transformers.interface import EXTENSION, RECORD, Interface, check_model
from levattn.integrations.transformers.states import FullLatentLayer, LatentStateLayer, SlidingLatentLayer
from levattn.nn.latents import feature_map, run_feature

_FEATURES = ("conv", "rg_lru")
_OVERLAPS = ("mixture", "exclusive")


def macchiato_from(
    model: Any,
    *,
    window: int = 128,
    latents: int = 64,
    delta: float = 0.05,
    overlap: str = "mixture",
    feature: str | None = None,
    layers: Iterable[int] | None = None,
) -> Any:
    r"""Extend a pretrained causal decoder by latents that read the positions behind a window.

    Each extended layer restricts its attention to the last `window` positions, and keeps its own queries, keys,
    values, rotary embedding, scale and softcap. It mixes this attention with L latents of each head:

    .. math:: y_t = p(0|t)\,\mathrm{SWA}_t + \sum_{l \ge 1} p(l|t) \sum_{s \le t} p(s|l, t)\, V_s,

    where ``p(·|t)`` is one softmax over the gate and the L latent logits of row t. The softmax ``p(s|l, t)`` is over
    the latent logits of the positions seen. All logits are linear in the hidden states that enter the layer, or in a
    `feature` of them. The weights of the base model are frozen; you train the projections to these logits.

    **Guarantee.** The weights of each row are a mixture of distributions over the positions seen, so they sum to 1.
    At the start ``p(0|t) = 1 − δ`` in every row whose latents have seen a position, and 1 in the others. So with
    δ → 0 and a window as long as the sequence, the model equals the base model. Decoding token by token gives the same
    output as a forward pass over the whole sequence, to rounding.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal decoder that uses the attention interface of transformers. It is changed in place.
    window : int, default 128
        W ≥ 1: row t attends to the positions t − W + 1 to t. Layers that slide in the base model keep their own window
        if it is smaller.
    latents : int, default 64
        L ≥ 1, for each head.
    delta : float in (0, 1), default 0.05
        The total weight of the latents at the start. Gradients of the latents are proportional to it, so a very small
        one makes training slow.
    overlap : {"mixture", "exclusive"}, default "mixture"
        Whether latents see all positions up to t, or only those behind the window.
    feature : {"conv", "rg_lru"}, optional
        A module in each layer between the hidden states and the projections to latent logits: a
        `levattn.nn.CausalConv` or a `levattn.nn.RGLRU`. It tells latents the order of near positions. None: no module.
    layers : iterable of int, optional
        Numbers of the layers to extend, from 0; all if None. The others keep their attention and its cache.

    Returns
    -------
    transformers.PreTrainedModel
        The model itself. `latent_parameters` yields the parameters to train, and `remove` removes the extension.

    Raises
    ------
    TypeError, ValueError
        If an option is out of range, or the model is already extended or cannot be extended. It cannot if it is an
        encoder-decoder, or a layer does not use the attention interface. Nor can it if a layer has features that the
        mixture would ignore (biases of positions, sinks, chunks, keys shared between layers). The model then stays
        unchanged.

    Notes
    -----
    Time O(T (W + L) D) for each head, instead of O(T² D). A layer decodes with the last W − 1 keys and values of each
    key/value head and the `MacchiatoState` of its latents, whatever T. The `DynamicCache` that `model.generate` makes,
    or that you pass as its cache, holds both; `state_size` reports them. Gradients do not pass through a cache. Layers
    left out by `layers` keep all their keys and values, and padding masks then take T² booleans as in the base model.
    In transformers 4 they also do in calls without `attention_mask` and cache.

    Padding by `attention_mask` may be left or right, and beam search reorders the states. The layers refuse these by
    name: attention dropout, attention weights (`output_attentions`), packed sequences, and masks of four axes that are
    not causal with padding. They also refuse unknown keywords, caches other than a `DynamicCache` on the device, and
    cropping the cache (assisted generation). As in the base model, a call with a cache does not check whether
    `position_ids` start again.

    The initial key logits use torch's random numbers: `torch.manual_seed` makes them repeatable.

    References
    ----------
    Dolga, Maystre, Cobzarenco, Barber, "Latte: Latent Attention for Linear Time Transformers", TMLR 2025,
    arXiv:2402.17512, section on Latte-Macchiato and on extending a pretrained model, equation 13.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from levattn.integrations.transformers import latent_parameters, macchiato_from
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=50, eos_token_id=None)
    >>> config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    >>> model = macchiato_from(LlamaForCausalLM(config).eval(), window=8, latents=4)
    >>> sum(parameter.numel() for parameter in latent_parameters(model))
    1800
    >>> prompt = torch.arange(20)[None]
    >>> model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0).shape
    torch.Size([1, 25])
    """
    window, latents = whole_number("window", window), whole_number("latents", latents)
    delta = fraction("delta", delta)
    if overlap not in _OVERLAPS:
        raise ValueError(f'overlap is {overlap!r}; expected "mixture" or "exclusive"')
    if feature is not None and feature not in _FEATURES:
        raise ValueError(f'feature is {feature!r}; expected "conv", "rg_lru", or None')
    LATENTS.register()
    chosen = _extendable(model, layers)
    parts = [
        LatentLogits(layer, latents=latents, window=window, overlap=overlap, delta=delta, feature=feature)
        for layer in chosen
    ]
    whole = not shared_configs(model, chosen)  # then the model can make padding masks alone, (B, T)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    LATENTS.change(model, chosen, parts, masks=whole, frozen=trained)
    return model


def remove(model: Any) -> Any:
    """Remove the extension of `macchiato_from`, or the pruning of `prune`, from a model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        An extended or pruned model. It is changed in place: its layers attend to all positions again, and the
        parameters that required gradients before require them again.

    Returns
    -------
    transformers.PreTrainedModel
        The model itself, restored. The parameters of the latents are lost; save them first with `latent_state_dict`.

    Raises
    ------
    ValueError
        If the model is neither extended nor pruned.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from levattn.integrations.transformers import latent_state_dict, macchiato_from, remove
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=50)
    >>> model = macchiato_from(LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)))
    >>> sorted(remove(model).state_dict()) == sorted(LlamaForCausalLM(model.config).state_dict())
    True
    """
    changes = getattr(model, RECORD, None)
    if changes is None:
        raise ValueError(
            f"model is {type(model).__name__}, not extended or pruned; expected one that macchiato_from or prune has "
            "changed"
        )
    changes.undo()
    return model


def latent_parameters(model: Any) -> Iterator[Any]:
    """Yield the parameters that `macchiato_from` added to a model, which are the ones to train.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        An extended model.

    Yields
    ------
    torch.nn.Parameter
        For each extended layer the projections to query logits (heads · L, C), key logits (kv_heads · L, C) and gates
        (heads, C). Also the bias of the gates (heads,), and the parameters of the `feature`. All are in float32 for a
        model in half precision.

    Raises
    ------
    TypeError, ValueError
        If the model is none, or not extended.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from levattn.integrations.transformers import latent_parameters, macchiato_from
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=50)
    >>> model = macchiato_from(LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)), latents=8)
    >>> [tuple(parameter.shape) for parameter in latent_parameters(model)]
    [(32, 32), (32, 32), (4, 32), (4,)]
    """
    for part in _parts(model):
        yield from part.parameters()


def latent_state_dict(model: Any) -> dict[str, Any]:
    """Return the tensors that `macchiato_from` added to a model, by name, e.g. for safetensors.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        An extended model.

    Returns
    -------
    dict of str to torch.Tensor
        Tensors under their names in ``model.state_dict()``, without gradients and not copied. Besides the weights they
        contain the window and the overlap of each layer, so that weights are not loaded into another mixture.

    Raises
    ------
    TypeError, ValueError
        If the model is none, or not extended.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from levattn.integrations.transformers import latent_state_dict, load_latent_state_dict, macchiato_from
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=50)
    >>> config = LlamaConfig(num_attention_heads=4, **sizes)
    >>> trained, fresh = (macchiato_from(LlamaForCausalLM(config), latents=8) for _ in range(2))
    >>> learned = latent_state_dict(trained)
    >>> list(learned)[0]
    'model.layers.0.self_attn.macchiato.query.weight'
    >>> load_latent_state_dict(fresh, learned)
    """
    return {name: tensor.detach() for name, tensor in _named_tensors(model).items()}


def load_latent_state_dict(model: Any, state: dict[str, Any]) -> None:
    """Load the weights that `latent_state_dict` returned for another model into an extended model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model of the same architecture, extended in the same layers with the same `window`, `latents` and `overlap`.
    state : dict of str to torch.Tensor
        The tensors by name. They are copied, to the device and dtype of the model's tensors.

    Raises
    ------
    TypeError, ValueError
        If `state` is no mapping of tensors, or the model is not extended. If a tensor is missing, unknown or of
        another shape, or the window or the overlap differs. The model then stays unchanged.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from levattn.integrations.transformers import latent_state_dict, load_latent_state_dict, macchiato_from
    >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=50)
    >>> config.num_attention_heads = config.num_key_value_heads = 4
    >>> model = macchiato_from(LlamaForCausalLM(config), latents=8, window=16)
    >>> load_latent_state_dict(model, latent_state_dict(model))
    """
    own = _named_tensors(model)
    check_type("state", state, Mapping, "a mapping from names to tensors, as latent_state_dict returns")
    for problem, names in (("lacks", own.keys() - state.keys()), ("has besides", state.keys() - own.keys())):
        if names:
            raise ValueError(
                f"state {problem} {sorted(names)[0]!r} and {len(names) - 1} others; expected the names of "
                "latent_state_dict(model). Extend the model in the same layers"
            )
    for name, tensor in own.items():
        given = state[name]
        check_type(f"state[{name!r}]", given, torch.Tensor, "a tensor of torch")
        if tuple(given.shape) != tuple(tensor.shape):
            raise ValueError(
                f"state has {name!r} of shape {tuple(given.shape)}; expected {tuple(tensor.shape)}. Extend the model "
                "with the same number of latents"
            )
        if name.endswith(".settings") and given.tolist() != tensor.tolist():
            raise ValueError(
                f"state was trained with {_settings(given)}, and the model has {_settings(tensor)}; expected the same"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


def _settings(tensor: Any) -> str:
    """Return the window and the overlap that a tensor holds, for a message."""
    window, overlap = tensor.tolist()
    return f"window={window}, overlap={(dict(enumerate(_OVERLAPS)).get(overlap, overlap))!r}"


def state_size(cache: Any) -> dict[int, int]:
    """Return the bytes that a cache holds for each extended layer, over all sequences.

    Parameters
    ----------
    cache : transformers.DynamicCache
        A cache that an extended model has filled.

    Returns
    -------
    dict of int to int
        Bytes by layer number, for the state of the latents and the ring of the window. The bytes stop growing when the
        ring is full, after `window` positions. Layers that were not extended are left out.

    Raises
    ------
    TypeError
        If `cache` is not a cache.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from levattn.integrations.transformers import macchiato_from, state_size
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=50)
    >>> config = LlamaConfig(num_attention_heads=4, **sizes)
    >>> model = macchiato_from(LlamaForCausalLM(config).eval(), window=8, latents=4)
    >>> with torch.no_grad():
    ...     held = [state_size(model(torch.arange(T)[None])[1]) for T in (10, 40)]
    >>> held[0] == held[1]
    True
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise TypeError(f"cache is of type {type(cache).__name__}; expected a DynamicCache")
    return {index: layer.nbytes() for index, layer in enumerate(layers) if isinstance(layer, LatentStateLayer)}


def _named_tensors(model: Any) -> dict[str, Any]:
    """Return the weights and settings of an extension by their names in the model."""
    own = {id(tensor) for part in _parts(model) for tensor in (*part.parameters(), *part.buffers())}
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in named if id(tensor) in own}


def _parts(model: Any) -> list[LatentLogits]:
    """Return the parts of the extended layers of a model, or raise if there are none."""
    check_type("model", model, torch.nn.Module, "a model of transformers")
    parts = [module for module in model.modules() if isinstance(module, LatentLogits)]
    if not parts:
        raise ValueError(f"model is {type(model).__name__}, not extended; expected one that macchiato_from returned")
    return parts


def _extendable(model: Any, layers: Iterable[int] | None) -> list[ModelLayer]:
    """Return the layers of a causal decoder with these numbers (None for all), or raise if one cannot be extended."""
    check_model(model)
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"model is {type(model).__name__}, an encoder-decoder or with cross-attention; expected a causal decoder"
        )
    wanted = whole_numbers("layers", layers)
    there = discovered(LATENTS, model, wanted)
    chosen = {number: there[number] for number in numbers_among("layers", wanted, list(there))}
    for number, layer in chosen.items():
        types = getattr(layer.module.config, "layer_types", None)
        kind = types[number] if types else "full_attention"
        problem = None
        if kind not in ("full_attention", "sliding_attention"):
            problem = f"is of type {kind!r}; expected full_attention or sliding_attention"
        elif not layer.handed or layer.call.hidden is None:
            problem = "takes no hidden_states, or does not pass its keywords to its attention; expected both"
        elif kind == "sliding_attention" and layer.sliding_window is None:
            problem = "slides, but does not pass its window to its attention; expected sliding_window"
        if problem is not None:
            raise ValueError(f"layer {number} {problem}. Leave it out of layers ({layer.name})")
    return list(chosen.values())


class LatentLogits(torch.nn.Module):  # type: ignore[misc]
    """Projections of hidden states (B, T, C) to the logits of latents and the gate of the window.

    A feature with a short memory may precede the logits; the gate reads the hidden states themselves.

    Query logits and gates are per query head. Key logits are per key/value head, because a latent stores means of
    values, which a group of query heads shares. Each query head weights these means by its own logits. The group needs
    one projection of keys, whose cost does not grow with the number of query heads.

    Initially the query logits are zero and the gate equals its bias. So p(0|t) = 1 − δ in every row whose latents have
    seen a position. The random key logits differ between latents, so every parameter has a gradient.
    """

    def __init__(
        self, layer: ModelLayer, *, latents: int, window: int, overlap: str, delta: float, feature: str | None
    ) -> None:
        super().__init__()
        like = layer.query
        hidden, heads = layer.call.hidden.shape[-1], like.shape[1]
        self.latents, self.window, self.overlap = latents, window, overlap
        # in half precision, updates that are small relative to the weight would be lost
        dtype = torch.promote_types(like.dtype, torch.float32)
        where: dict[str, Any] = {"device": like.device, "dtype": dtype}
        self.feature = feature_map(feature, hidden, **where)
        self.query = torch.nn.Linear(hidden, heads * latents, bias=False, **where)
        self.key = torch.nn.Linear(hidden, layer.heads * latents, bias=False, **where)
        self.gate = torch.nn.Linear(hidden, heads, **where)
        torch.nn.init.zeros_(self.query.weight)
        torch.nn.init.normal_(self.key.weight, std=1 / math.sqrt(hidden))
        torch.nn.init.zeros_(self.gate.weight)
        torch.nn.init.constant_(self.gate.bias, math.log1p(-delta) - math.log(delta) + math.log(latents))
        # saved with the weights, as a tensor, because their files hold nothing else
        self.register_buffer("settings", torch.tensor([window, _OVERLAPS.index(overlap)], device=like.device))

    def forward(self, hidden: Any, present: Any, state: Any) -> tuple[Any, Any, Any, Any]:
        """Return q_logits (B, heads, T, L), k_logits (B, kv_heads, T, L), gate (B, heads, T) and the feature's state.

        present: (B, T) bool, False for padding, which the feature leaves out, or None. state: the feature's state
        before these positions, or None.
        """
        hidden = hidden.to(self.gate.weight.dtype)
        if present is not None:
            hidden = hidden.masked_fill(~present[..., None], 0)  # as in `Layer`: NaN there would reach all gradients
        read, state = run_feature(self.feature, hidden, None, state, present)
        gate = self.gate(hidden).transpose(1, 2)
        return self._by_head(self.query(read)), self._by_head(self.key(read)), gate, state

    def _by_head(self, logits: Any) -> Any:
        return logits.unflatten(-1, (-1, self.latents)).transpose(1, 2)


def _attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Return the mixture of a layer's windowed attention and its latents: (B, T, heads, D), and no weights."""
    full = is_causal is False and attention_mask is None and query.shape[2] > 1
    if full or not getattr(module, "is_causal", True):
        raise ValueError(f"{layer_of(module)} is not causal; expected a causal decoder")
    part, call = LATENTS.begin(module, dropout, kwargs)
    if isinstance(part, ModelLayer):
        return part.take(call, query, key, value, sliding_window=sliding_window)
    window = part.window if sliding_window is None else min(part.window, sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask = causal_padding(attention_mask, query.shape[2], sliding_window)
    held = call.held
    state, feature = (None, None) if held is None else (held.state, held.feature)
    *logits, feature = part(call.hidden, mask, feature)
    mask = None if mask is None else mask[:, None, :]
    near = Window(window, overlap=part.overlap, scale=scale, softcap=softcap)
    Y = macchiato(query, key, value, logits, near, mask=mask, state=state, return_state=held is not None)
    if held is not None:
        Y, state = Y
        held.advance(state, feature, held.positions + query.shape[2])
    return Y.transpose(1, 2).contiguous(), None


LATENTS = Interface(
    name="levattn_macchiato",
    part=EXTENSION,
    function=_attention,
    masks=padding_mask,
    cache_layers=(FullLatentLayer, SlidingLatentLayer),
    maker="macchiato_from",
    attention="the mixture of a window and latents",
    remedy="use the base model",
)
