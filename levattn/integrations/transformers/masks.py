"""Attention masks of transformers, and the positions that they let through."""

from __future__ import annotations

from typing import Any

import torch

_HIDDEN = -1e4  # a mask adds at most this to a masked logit


def seen_by(mask: Any, keys: int) -> Any:
    """Return which keys each row may see, (B, T or 1, U) bool, or (B, U) for a padding mask.

    The masks of transformers are bool, or added to the logits. U is at least the number of `keys`.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4) or mask.shape[-1] < keys:
        shown = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f"a layer was given the attention mask {shown}; expected (B, U) or (B, 1, T, U). Give the model an "
            "attention_mask of shape (batch, positions)"
        )
    if mask.ndim == 2:
        return mask.bool()
    if mask.shape[1] != 1:
        raise ValueError(
            f"a layer was given the attention mask {tuple(mask.shape)}, one for each head; expected (B, 1, T, U). "
            "Give the model an attention_mask of shape (batch, positions)"
        )
    mask = mask[:, 0]
    if mask.dtype == torch.bool:
        return mask
    if ((mask != 0) & (mask > _HIDDEN)).any():
        raise ValueError(
            "the attention mask adds numbers to logits, as biases of positions do; expected a padding mask, which "
            "adds 0 or masks a position. Leave the biases out, or use the base model"
        )
    return mask == 0


def padding_mask(*args: Any, **kwargs: Any) -> Any:
    """Return which positions are not padding, (B, U), or None for all: a mask function for transformers.

    The masks that transformers makes for kernels that unpad contain padding alone. Where the model may need more, such
    as packed sequences or overlays, this function makes the whole mask and checks it.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if kwargs.get("allow_is_causal_skip") is True:
        return ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"](*args, **kwargs)
    whole = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **whole)
    return causal_padding(mask, mask.shape[-2], kwargs.get("local_size"))


def causal_padding(mask: Any, T: int, sliding_window: int | None) -> Any:
    """Return which of the last T positions are not padding, (B, T), or None for all; raise if a mask is not causal.

    sliding_window: the number of positions that a row may see, including itself, or None for all.
    """
    if mask is None:
        return None
    allowed = seen_by(mask, T)[..., -T:]  # made for the attention of other layers, where they keep it
    if mask.ndim == 2:
        return allowed
    present = allowed.diagonal(dim1=-2, dim2=-1)
    rows = torch.arange(T, device=mask.device)
    behind = rows[:, None] - rows
    window = (behind >= 0) & (behind < (T if sliding_window is None else sliding_window))
    if not torch.equal(allowed, window & present[:, None, :]):
        raise ValueError(
            _not_with_padding(f"the attention mask of shape {tuple(mask.shape)} is not causal", "packed ones")
        )
    return None if present.all() else present


def padding_and_kind(layer: str, mask: Any, rows: int, keys: int, causal: bool, *, whole: bool) -> tuple[Any, bool]:
    """Return which keys are not padding, (B, keys) bool or None for all, and whether attention is causal.

    causal: the default if the mask does not tell. whole: whether no mask means that all keys are there, rows last.
    """
    if mask is None:
        if causal and 1 < rows < keys and not whole:
            raise ValueError(
                f"{layer} was given no attention mask for {rows} queries and {keys} keys; expected one, as their "
                "order is unknown without it. Give the model an attention_mask of shape (batch, positions)"
            )
        return None, causal
    seen = seen_by(mask, keys)
    if seen.shape[-1] != keys:
        raise ValueError(
            f"{layer} was given the attention mask {tuple(mask.shape)} for {keys} keys; expected one with as many "
            "columns. Give a DynamicCache, or none"
        )
    present = seen if seen.ndim == 2 else seen[:, -1]
    if seen.ndim == 3 and seen.shape[1] == 1 < rows:
        causal = False
    elif seen.ndim == 3 and rows > 1:
        place = torch.arange(keys, device=seen.device)
        both = {True: present[:, None] & (place <= place[keys - rows :, None]), False: present[:, None]}
        way = next((way for way in (causal, not causal) if _same(seen, both[way])), None)
        if way is None:
            problem = (
                f"{layer} was given an attention mask of shape {tuple(mask.shape)} that is neither full nor causal"
            )
            raise ValueError(_not_with_padding(problem, "windows, packed ones"))
        causal = way
    return (None if present.all() else present), causal


def _not_with_padding(problem: str, besides: str) -> str:
    """Return the message for a mask with more than padding."""
    return (
        f"{problem} with padding; expected one sequence in each row, and no {besides} (position_ids that start again) "
        "or overlays. Give the model an attention_mask of shape (batch, positions), 0 for padding"
    )


def _same(seen: Any, expected: Any) -> bool:
    """Tell whether a mask is as expected; in some versions, rows that should see nothing see everything."""
    nothing = ~expected.any(-1, keepdim=True) & seen.all(-1, keepdim=True)
    return bool(((seen == expected) | nothing).all())
