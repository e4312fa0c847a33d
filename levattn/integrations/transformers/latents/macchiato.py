"""Extend a pretrained decoder by latents, save their parameters, and remove them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from levattn._core.checks import fraction, whole_number
from levattn.integrations.transformers.changes import EXTENSION, Changes
from levattn.integrations.transformers.discovery import shared_configs
from levattn.integrations.transformers.latents.cache import LatentState
from levattn.integrations.transformers.latents.interface import LATENTS, register_latents
from levattn.integrations.transformers.latents.layers import extendable
from levattn.integrations.transformers.latents.parameters import FEATURES, OVERLAPS, LatentLogits
from levattn.integrations.transformers.pruning.report import REPORT

_RECORD = "_levattn_macchiato"  # the attribute of an extended model that records its changes


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
    if overlap not in OVERLAPS:
        raise ValueError(f'overlap is {overlap!r}; expected "mixture" or "exclusive"')
    if feature is not None and feature not in FEATURES:
        raise ValueError(f'feature is {feature!r}; expected "conv", "rg_lru", or None')
    register_latents()
    chosen = extendable(model, layers)
    modules = [layer.module for layer in chosen]
    whole = not shared_configs(model, modules)
    changes = Changes(EXTENSION)
    options: dict[str, Any] = {
        "latents": latents,
        "window": window,
        "overlap": overlap,
        "delta": delta,
        "feature": feature,
    }
    parts = [LatentLogits(layer, **options) for layer in chosen]
    for module, part in zip(modules, parts, strict=True):
        changes.give_part(module, LATENTS.name, part)
        changes.hooks += LATENTS.hook(module)
    if whole:  # then the model can make padding masks alone, (B, T)
        changes.give_masks(LATENTS.name)
    added = {id(parameter) for part in parts for parameter in part.parameters()}
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in added:
            changes.frozen.append(parameter)
            parameter.requires_grad_(False)
    setattr(model, _RECORD, changes)
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
    report = getattr(model, REPORT, None)
    if report is not None:
        report.remove()
        return model
    _record_of(model).undo()
    delattr(model, _RECORD)
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
    ValueError
        If the model is not extended.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from levattn.integrations.transformers import latent_parameters, macchiato_from
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=50)
    >>> model = macchiato_from(LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)), latents=8)
    >>> [tuple(parameter.shape) for parameter in latent_parameters(model)]
    [(32, 32), (32, 32), (4, 32), (4,)]
    """
    for module in _record_of(model).modules:
        yield from getattr(module, EXTENSION).parameters()


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
    ValueError
        If the model is not extended.

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
    ValueError
        If the model is not extended; if a tensor is missing, unknown or of another shape; or if the window or the
        overlap differs. The model then stays unchanged.

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
    for problem, names in (("lacks", own.keys() - state.keys()), ("has besides", state.keys() - own.keys())):
        if names:
            raise ValueError(
                f"state {problem} {sorted(names)[0]!r} and {len(names) - 1} others; expected the names of "
                "latent_state_dict(model). Extend the model in the same layers"
            )
    for name, tensor in own.items():
        given = state[name]
        if tuple(given.shape) != tuple(tensor.shape):
            raise ValueError(
                f"state has {name!r} of shape {tuple(given.shape)}; expected {tuple(tensor.shape)}. Extend the model "
                "with the same number of latents"
            )
        if name.endswith(".settings") and given.tolist() != tensor.tolist():
            (window, overlap), (own_window, own_overlap) = given.tolist(), tensor.tolist()
            raise ValueError(
                f"state was trained with window={window}, overlap={OVERLAPS[overlap]!r}, and the model has window="
                f"{own_window}, overlap={OVERLAPS[own_overlap]!r}; expected the same"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


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
    return {index: layer.nbytes() for index, layer in enumerate(layers) if isinstance(layer, LatentState)}


def _named_tensors(model: Any) -> dict[str, Any]:
    """Return the weights and settings of an extension by their names in the model."""
    parts = [getattr(module, EXTENSION) for module in _record_of(model).modules]
    own = {id(tensor) for part in parts for tensor in (*part.parameters(), *part.buffers())}
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in named if id(tensor) in own}


def _record_of(model: Any) -> Changes:
    record = getattr(model, _RECORD, None)
    if record is None:
        raise ValueError(f"model is {type(model).__name__}, not extended; expected one that macchiato_from returned")
    return record  # type: ignore[no-any-return]
