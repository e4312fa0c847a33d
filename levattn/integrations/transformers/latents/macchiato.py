"""Extend a pretrained decoder by latents, keep what they learn, and take them off again."""

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

__all__ = [
    "latent_parameters",
    "latent_state_dict",
    "load_latent_state_dict",
    "macchiato_from",
    "remove",
    "state_size",
]

_RECORD = "_levattn_macchiato"  # the attribute of an extended model that remembers what it was


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
    r"""Extend a pretrained causal decoder by latents that read what is behind a window.

    Each extended layer keeps its attention, restricted to the last `window` positions, with its own queries, keys,
    values, rotary embedding, scale and softcap, and mixes it with L latents of each head:

    .. math:: y_t = p(0|t)\,\mathrm{SWA}_t + \sum_{l \ge 1} p(l|t) \sum_{s \le t} p(s|l, t)\, V_s,

    where ``p(·|t)`` is one softmax over the gate and the L latent logits of row t, ``p(s|l, t)`` the softmax of the
    latent logits of the positions seen, and all logits are linear in the hidden states that enter the layer, or in a
    `feature` of them. The weights of the base model are frozen; the projections to these logits are to be trained.

    **Guarantee.** Weights are a mixture of distributions over the positions seen, so those of every row sum to 1. At
    the start ``p(0|t) = 1 − δ`` in every row whose latents have seen a position, and 1 in the others; so with δ → 0
    and a window as long as the sequence the model is the base model. Decoding token by token gives what a forward pass
    over the whole sequence gives, to rounding.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal decoder whose attention goes through the attention interface of transformers. It is changed in place.
    window : int, default 128
        W ≥ 1: row t attends to the positions t − W + 1 to t. Layers that slide in the base model keep their own window
        where that is smaller.
    latents : int, default 64
        L ≥ 1, for each head.
    delta : float in (0, 1), default 0.05
        The weight of all latents together at the start. Gradients of the latents are proportional to it, so a very
        small one is slow to train.
    overlap : {"mixture", "exclusive"}, default "mixture"
        Whether latents see all positions up to t, or only those behind the window.
    feature : {"conv", "rg_lru"}, optional
        What stands between the hidden states and the projections to latent logits, one of each layer, and gives
        latents the order of near positions: a `levattn.nn.CausalConv` or a `levattn.nn.RGLRU`. Nothing if None.
    layers : iterable of int, optional
        Numbers of the layers to extend, from 0; all if None. The others keep their attention and its cache.

    Returns
    -------
    transformers.PreTrainedModel
        The model itself. `latent_parameters` gives what is to be trained, `remove` takes the extension off.

    Raises
    ------
    TypeError, ValueError
        If an option is out of range, if the model is extended already, or if it is one that cannot be extended: an
        encoder-decoder, a layer that does not go through the attention interface or hands it what the mixture would
        ignore (biases of positions, sinks, chunks, keys shared between layers). The model is then as it was.

    Notes
    -----
    Time O(T (W + L) D) for each head, instead of O(T² D). A layer decodes with the last W − 1 keys and values of each
    key/value head and the `MacchiatoState` of its latents, whatever T; both are held in the `DynamicCache` that
    `model.generate` makes, or that is given as its cache. `state_size` reports them. Gradients do not pass
    through a cache. Where `layers` leaves some out, these keep all their keys and values, and masks of padding take T²
    booleans as in the base model; so they do in transformers 4 for calls without `attention_mask` and cache.

    Padding by `attention_mask` may be left or right, and beam search takes states along. Refused by name when they
    come: attention dropout, attention weights (`output_attentions`), packed sequences, masks of four axes that are not
    causal with padding, keywords that are not known, caches other than a `DynamicCache` on the device, and forgetting
    positions (assisted generation). As in the base model, a call with a cache does not look whether `position_ids`
    start again.

    The new logits of keys start from torch's random numbers: `torch.manual_seed` makes them repeatable.

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
    if whole:  # then the masks of the model are ours too: of padding alone, (B, T)
        changes.give_masks(LATENTS.name)
    added = {id(parameter) for part in parts for parameter in part.parameters()}
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in added:
            changes.frozen.append(parameter)
            parameter.requires_grad_(False)
    setattr(model, _RECORD, changes)
    return model


def remove(model: Any) -> Any:
    """Take the extension of `macchiato_from`, or the pruning of `prune`, off a model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        An extended or pruned model. It is changed in place: its layers attend to all positions again, and the
        parameters that were to be trained before are so again.

    Returns
    -------
    transformers.PreTrainedModel
        The model itself, as it was before; what the latents had learned is gone, see `latent_state_dict`.

    Raises
    ------
    ValueError
        If the model is neither.

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
    """Yield the parameters that `macchiato_from` added to a model: what is to be trained.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        An extended model.

    Yields
    ------
    torch.nn.Parameter
        For each extended layer the projections to logits of queries (heads · L, C), of keys (kv_heads · L, C) and to
        gates (heads, C), the bias of the gates (heads,), and those of the `feature`; float32 for a model in half
        precision.

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
    """Return what `macchiato_from` added to a model, as tensors by name, e.g. for safetensors.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        An extended model.

    Returns
    -------
    dict of str to torch.Tensor
        Under the names that they have in ``model.state_dict()``, without gradients and not copied. Besides the weights
        it has the window and the overlap of each layer, so that weights are not loaded into another mixture.

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
    """Give an extended model the weights that `latent_state_dict` returned of another.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model of the same kind, extended in the same layers with the same `window`, `latents` and `overlap`.
    state : dict of str to torch.Tensor
        The tensors by name. They are copied, to the device and dtype of the model's.

    Raises
    ------
    ValueError
        If the model is not extended, or a tensor is missing, not known or of another shape, or another window or
        overlap is among them. The model is then as it was.

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
                "with as many latents"
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
    """Return how many bytes a cache holds for each extended layer, of all its sequences together.

    Parameters
    ----------
    cache : transformers.DynamicCache
        A cache that an extended model has filled.

    Returns
    -------
    dict of int to int
        Bytes by number of the layer: the state of the latents, and the ring of the window, which is full after
        `window` positions; from then on the number stays. Layers that were not extended are not in it.

    Raises
    ------
    TypeError
        If it is no cache.

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
