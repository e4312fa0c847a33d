"""The attention function that transformers calls, the hooks that bring it what it needs, and the masks it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from levattn.attention import macchiato
from levattn.integrations.transformers.calls import cache_among, given_to, layer_of, refuse, seen_by
from levattn.integrations.transformers.latents.cache import StateLayer, layer_for

__all__ = ["EXTENSION", "NAME", "LatentCall", "LatentProbe", "check_reached", "hand_on", "padding_mask", "register"]

NAME = "levattn_macchiato"  # no "flash", "sdpa", "flex_attention", "/" or ":", which transformers reads in names
EXTENSION = "macchiato"  # the submodule of an attention module that holds what is trained


@dataclass
class LatentCall:
    """One call of an attention module, on its way from the hook in front to the attention function."""

    hidden: Any
    held: StateLayer | None
    reached: bool = False


@dataclass
class LatentProbe(LatentCall):
    """A call that is only to tell what the module hands to attention."""

    heads: int = 0
    kv_heads: int = 0
    sliding_window: int | None = None
    like: Any = None


def register() -> None:
    """Tell transformers the attention function and the masks that go with it, by name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, padding_mask)


def hand_on(
    names: tuple[str, ...], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add to a call of an attention module what its attention function will need: a forward pre-hook."""
    given = given_to(names, args, kwargs)
    past = cache_among(given)
    held = None
    if past is not None:
        held = layer_for(past, module.layer_idx)
        held.expected = True
    return args, {**kwargs, NAME: LatentCall(given["hidden_states"], held)}


def check_reached(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG001
    """Raise if an attention module did not call the attention function: a forward hook."""
    call = kwargs[NAME]
    if call.reached:
        return
    layer = layer_of(module)
    if isinstance(call, LatentProbe):
        raise ValueError(
            f"{layer} does not go through the attention interface of transformers; expected a model whose "
            "attention can be chosen by its config"
        )
    raise RuntimeError(
        f"{layer} did not call the attention of macchiato_from; expected the attention implementation {NAME!r} in "
        f"its config, found {module.config._attn_implementation!r}. Leave it as it is, or call remove(model)"
    )


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
    call = kwargs.pop(NAME, None)
    if call is None:
        raise ValueError(
            f"the attention implementation {NAME!r} was chosen by hand for {type(module).__name__}; expected a layer "
            "that macchiato_from extended. Call it on the model"
        )
    call.reached = True
    full = is_causal is False and attention_mask is None and query.shape[2] > 1
    if full or not getattr(module, "is_causal", True):
        raise ValueError(f"{layer_of(module)} is not causal; expected a causal decoder")
    refuse(
        layer_of(module),
        dropout,
        kwargs,
        attention="the mixture of a window and latents",
        remedy="use the base model",
    )
    if isinstance(call, LatentProbe):
        call.heads, call.kv_heads, call.sliding_window, call.like = query.shape[1], key.shape[1], sliding_window, query
        return torch.zeros_like(query[..., :1]).expand(*query.shape[:3], value.shape[-1]).transpose(1, 2), None
    part = getattr(module, EXTENSION)
    window = part.window if sliding_window is None else min(part.window, sliding_window)
    mask = _present(attention_mask, query.shape[2], sliding_window)
    state, feature = (None, None) if call.held is None else (call.held.state, call.held.feature)
    q_logits, k_logits, gate, feature = part(call.hidden, mask, feature)
    Y = macchiato(
        query,
        key,
        value,
        q_logits,
        k_logits,
        gate,
        window=window,
        overlap=part.overlap,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        mask=None if mask is None else mask[:, None, :],
        state=state,
        return_state=call.held is not None,
    )
    if call.held is not None:
        Y, state = Y
        call.held.advance(state, feature, query.shape[2])
    return Y.transpose(1, 2).contiguous(), None


def padding_mask(*args: Any, **kwargs: Any) -> Any:
    """Return which positions are no padding, (B, U), or None for all.

    What transformers makes for kernels that unpad has no more than padding in it. Where the model may want more, its
    whole mask is made and looked at: packed sequences, overlays of its own.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if kwargs.get("allow_is_causal_skip") is True:
        return ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"](*args, **kwargs)
    whole = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **whole)
    return _present(mask, mask.shape[-2], kwargs.get("local_size"))


def _present(mask: Any, T: int, sliding_window: int | None) -> Any:
    """Return which of the last T positions are no padding, (B, T), or None for all, of a mask by transformers."""
    if mask is None:
        return None
    allowed = seen_by(mask, T)[..., -T:]  # where other layers keep their attention, the mask is made for theirs
    if mask.ndim == 2:
        return allowed
    present = allowed.diagonal(dim1=-2, dim2=-1)
    rows = torch.arange(T, device=mask.device)
    behind = rows[:, None] - rows
    window = (behind >= 0) & (behind < (T if sliding_window is None else sliding_window))
    if not torch.equal(allowed, window & present[:, None, :]):
        raise ValueError(
            f"the attention mask of shape {tuple(mask.shape)} is not causal with padding; expected one sequence in "
            "each row, and no packed ones (position_ids that start again) or overlays. Give the model an "
            "attention_mask of shape (batch, positions), 0 for padding"
        )
    return None if present.all() else present
