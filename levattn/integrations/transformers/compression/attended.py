"""Attention to the slots of a context and to later tokens, with the fused attention of torch where possible."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from levattn._kernels.pruned.torch import SCALES, attended_slots
from levattn.integrations.transformers.compression.slots import HeadSlots

_LOGITS = 1 << 24  # largest number of entries of a mask, and of logits where no kernel is fused, over all heads
_ALIGNED = 16  # the distance between rows of a mask is a multiple of this, or torch copies the mask


def attended(
    q: Any,
    groups: tuple[HeadSlots, ...],
    tail: tuple[Any, Any],
    present: Any,
    scale: float,
    softcap: float | None,
) -> Any:
    """Return the output (B, H, T, D) of queries that read the slots of a context and the tokens after it.

    `q`: (B, H, T, d). `tail`: keys and values (B, G, t, ·) of the later tokens. The last T have the positions of q,
    and attention to them is causal. `present`: (B, t) bool, False for padding; None if there is no padding. Padding
    reads the context and itself.
    """
    B, H, T = q.shape[:3]
    t, each = tail[0].shape[2], H // tail[0].shape[1]
    by_columns = _by_columns(q, present, scale, softcap)
    heads = each if by_columns else B * H  # that have their own rows in a mask, if there is one
    step = max(1, _LOGITS // (heads * (t + max(group.keys.shape[2] for group in groups))))
    parts = []
    for first in range(0, T, step):
        rows = q[:, :, first : first + step]
        count = rows.shape[2]
        end = t - T + first + count  # none of the rows sees later tokens
        near = tail[0][:, :, :end], tail[1][:, :, :end]
        seen = None
        if not by_columns and (T > 1 or present is not None):
            seen = _seen(count, end, None if present is None else present[:, :end], q.device)
        parts.append(_of_rows(rows, groups, near, seen, scale, softcap, by_columns))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _on_device(q: Any) -> bool:
    return bool(q.device.type != "cpu")


def _by_columns(q: Any, present: Any, scale: float, softcap: float | None) -> bool:
    """Tell whether log-weights become columns of keys: on a device, for several rows without padding.

    A single row reads all keys, so its mask has one number for each key, and columns would be more.
    """
    many = q.shape[2] > 1 and present is None and softcap is None
    return many and _on_device(q) and SCALES[0] < scale < SCALES[1]


def _seen(count: int, t: int, present: Any, device: Any) -> Any:
    """Return which tokens after the context the last `count` positions see, (B or 1, 1, count, t) bool."""
    place = torch.arange(t, device=device)
    own = place[t - count :, None]
    seen = (place <= own)[None]
    if present is not None:
        seen = seen & (present[:, None] | (place == own))
    return seen[:, None]


def _of_rows(
    q: Any,
    groups: tuple[HeadSlots, ...],
    tail: tuple[Any, Any],
    seen: Any,
    scale: float,
    softcap: float | None,
    by_columns: bool,
) -> Any:
    each = q.shape[1] // tail[0].shape[1]
    if seen is not None:
        seen = seen.repeat(1, 1, each, 1)  # one copy for each query head that shares keys
    Y, parts = None, []
    if not torch.is_grad_enabled():
        Y = torch.empty((*q.shape[:3], tail[1].shape[-1]), dtype=q.dtype, device=q.device)
        each_head = Y.unflatten(1, (-1, each))
    for group in groups:
        rows = _of_heads(q.unflatten(1, (-1, each)), group.heads)
        near = _of_heads(tail[0], group.heads), _of_heads(tail[1], group.heads)
        if by_columns:
            found = _causal(rows.flatten(1, 2), group, near, scale).unflatten(1, (-1, each))
        else:
            found = _mixture(rows.flatten(2, 3), group, near, seen, scale, softcap).unflatten(2, (each, -1))
        if Y is None:  # a backward pass may need what is there already
            parts.append(found)
        elif _is_run(group.heads):
            each_head[:, group.heads[0] : group.heads[-1] + 1] = found
        else:
            each_head[:, torch.as_tensor(group.heads)] = found
    if Y is None:
        order = torch.as_tensor([head for group in groups for head in group.heads], device=q.device).argsort()
        Y = torch.cat(parts, 1).index_select(1, order).flatten(1, 2)
    return Y


def _causal(q: Any, group: HeadSlots, near: tuple[Any, Any], scale: float) -> Any:
    """Fused attention to slots and later tokens at once, with log-weights as products; `near` ends where q does."""
    keys, values = (torch.cat(pair, 2) for pair in zip((group.keys, group.values), near, strict=True))
    weight = group.log_weight
    if weight is not None:
        weight = pad(weight.to(torch.promote_types(q.dtype, torch.float32)), (0, near[0].shape[2]))
    return attended_slots(q, keys, values, weight, scale, causal=True)


def _is_run(heads: tuple[int, ...]) -> bool:
    return heads[-1] - heads[0] + 1 == len(heads)


def _of_heads(array: Any, heads: tuple[int, ...]) -> Any:
    """Return the part (B, len(heads), ...) of an array (B, G, ...), a view where the heads follow each other."""
    if _is_run(heads):
        return array[:, heads[0] : heads[-1] + 1]
    return array.index_select(1, torch.as_tensor(heads, device=array.device))


def _mixture(q: Any, group: HeadSlots, near: tuple[Any, Any], seen: Any, scale: float, softcap: float | None) -> Any:
    """Return the softmax mixture (B, G, L, D) of rows (B, G, L, d) over slots and the tokens after them.

    `seen`: (B or 1, 1, L, t) bool, or None if all rows see all of these tokens.
    """
    asked = (q, *near, group.keys, group.values)
    graded = torch.is_grad_enabled() and any(array.requires_grad for array in asked)
    alike = group.keys.shape[-1] == group.values.shape[-1]
    if softcap is not None or not alike or (graded and not _on_device(q)):
        return _by_products(q, group, near, seen, scale, softcap)
    if _on_device(q):
        return _by_one_call(q, group, near, seen, scale)
    return _by_parts(q, group, near, seen, scale)


def _by_parts(q: Any, group: HeadSlots, near: tuple[Any, Any], seen: Any, scale: float) -> Any:
    """Fused attention to slots and to later tokens, joined by the logarithms of their sums, without a copy."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kind = torch.promote_types(q.dtype, torch.float32)  # torch would misread a mask of another width
    weight = None
    if group.log_weight is not None:
        weight = group.log_weight.to(kind)[:, :, None].expand(*q.shape[:3], -1)
    far, far_sum = fused(q, group.keys, group.values, 0.0, False, attn_mask=weight, scale=scale)
    mask = None
    if seen is not None:
        mask = torch.zeros(1, dtype=kind).masked_fill(~seen, -torch.inf).expand(*q.shape[:3], -1)
    after, after_sum = fused(q, *near, 0.0, False, attn_mask=mask, scale=scale)
    share = torch.sigmoid(far_sum - after_sum)[..., None]
    return torch.lerp(after.to(share.dtype), far.to(share.dtype), share).to(q.dtype)


def _by_one_call(q: Any, group: HeadSlots, near: tuple[Any, Any], seen: Any, scale: float) -> Any:
    """Fused attention to slots and later tokens at once, with log-weights and the mask added to the logits."""
    slots, count = group.keys.shape[2], group.keys.shape[2] + near[0].shape[2]
    rows = 1 if seen is None else q.shape[2]
    bias = q.new_zeros((*q.shape[:2], rows, -(-count // _ALIGNED) * _ALIGNED))[..., :count]
    if group.log_weight is not None:
        bias[..., :slots] = group.log_weight[:, :, None]
    if seen is not None:
        bias[..., slots:].masked_fill_(~seen, -torch.inf)
    keys, values = (torch.cat(pair, 2) for pair in zip((group.keys, group.values), near, strict=True))
    return scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=scale)


def _by_products(
    q: Any, group: HeadSlots, near: tuple[Any, Any], seen: Any, scale: float, softcap: float | None
) -> Any:
    """Two products and one softmax: for bounded logits, and for gradients on the CPU."""
    rows, s = q * scale, group.keys.shape[2]

    def logits(K: Any) -> Any:
        found = (rows @ K.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
        return found if softcap is None else torch.tanh(found / softcap) * softcap

    far, after = logits(group.keys), logits(near[0])
    if group.log_weight is not None:
        far = far + group.log_weight[:, :, None]
    if seen is not None:
        after = after.masked_fill(~seen, -torch.inf)
    P = torch.softmax(torch.cat([far, after], -1), -1).to(group.values.dtype)
    return P[..., :s] @ group.values + P[..., s:] @ near[1]
