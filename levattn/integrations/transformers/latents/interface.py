"""The attention function of extended layers, which transformers calls."""

from __future__ import annotations

from typing import Any

from levattn.attention import macchiato
from levattn.integrations.transformers.calls import layer_of
from levattn.integrations.transformers.changes import EXTENSION
from levattn.integrations.transformers.interface import Interface, Probe
from levattn.integrations.transformers.latents.cache import latent_layer_for
from levattn.integrations.transformers.masks import causal_padding, padding_mask


def _held_in(cache: Any, module: Any) -> Any:
    return latent_layer_for(cache, module.layer_idx)


def register_latents() -> None:
    """Register the attention of extended layers and its masks with transformers."""
    LATENTS.register(_attention, padding_mask)


LATENTS = Interface(
    name="levattn_macchiato",
    part=EXTENSION,
    held_in=_held_in,  # functions of the module, so that models can be pickled
    install=register_latents,
    maker="macchiato_from",
    attention="the mixture of a window and latents",
    remedy="use the base model",
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
    full = is_causal is False and attention_mask is None and query.shape[2] > 1
    if full or not getattr(module, "is_causal", True):
        raise ValueError(f"{layer_of(module)} is not causal; expected a causal decoder")
    part, call = LATENTS.begin(module, dropout, kwargs)
    if isinstance(part, Probe):
        return part.take(call, query, key, value, sliding_window=sliding_window)
    window = part.window if sliding_window is None else min(part.window, sliding_window)
    mask = causal_padding(attention_mask, query.shape[2], sliding_window)
    held = call.held
    state, feature = (None, None) if held is None else (held.state, held.feature)
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
        return_state=held is not None,
    )
    if held is not None:
        Y, state = Y
        held.advance(state, feature, query.shape[2])
    return Y.transpose(1, 2).contiguous(), None
