"""Mixtures of pruned attention by torch's fused attention, on a device.

A slot with the logarithm b of a weight has the logit scale ⟨q, k⟩ + b. Here b is a product as well, of additional
columns of queries and keys. So no kernel needs a mask, and any fused kernel will do, with its gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad, scaled_dot_product_attention

from levattn._core.types import Int64
from levattn._kernels.pruned import PrunedArguments, Summaries, cuda_near, definition, mapped
from levattn._kernels.pruned.cuda_decode import HeldSlots, attend_token
from levattn._kernels.tensors import has_tangent, is_read_there, is_transformed, memory_of, tensor_of

_PARTS = 3  # of a logarithm: 8 bits each for bfloat16 and TF32, 11 for float16
# Factor of the columns of logarithms on the other side, because float16 has a narrow range
_LIFT = {torch.float16: 1024.0}
_NARROW = torch.float16, torch.bfloat16
# Each part of a logarithm that hides a slot; finite, because gradients read it
_ABSENT, _FAR = {torch.float16: -60000.0}, -1e30
SCALES = 2.0**-20, 2.0**20  # range of scales, which divide the columns
_COLUMNS = 8  # fused kernels take rows whose width is a multiple of this
_ITEMS = 65535  # largest batch of matrices of a fused kernel
ENTRIES = 1 << 26  # logits held at a time: of keys near queries, and without a fused kernel
_LEAST = 16  # positions of a block
_SCALARS = ("weight", "offset", "count")  # of summaries
# Attention that also tells the logarithms of sums, and its arguments after the tensors
_TELLING: dict[str, tuple[str, dict[str, Any]]] = {
    "FLASH_ATTENTION": ("_scaled_dot_product_flash_attention", {}),
    "EFFICIENT_ATTENTION": (
        "_scaled_dot_product_efficient_attention",
        {"attn_bias": None, "compute_log_sumexp": True},
    ),
    "CUDNN_ATTENTION": ("_scaled_dot_product_cudnn_attention", {"attn_bias": None, "compute_log_sumexp": True}),
}
_REMAINS = 0.25  # lower limit for rounding, where at least a half remains in exact arithmetic


def is_fused(*tensors: Any) -> bool:
    """Tell whether fused attention takes tensors: on a device, with gradients in reverse mode only."""
    return tensors[0].device.type != "cpu" and not any(map(is_transformed, tensors)) and not has_tangent(tensors)


def attended_slots(
    q: Any, keys: Any, values: Any, log_weight: Any, scale: float, *, causal: bool = False, own: Any = None
) -> Any:
    """Return softmax attention (b, H, m, D) to slots with log-weights: one call of fused attention.

    `q`: (b, H, m, d). `keys`, `values`: (b, G, s, d) and (b, G, s, D), with H a multiple of G, all of one dtype.
    `scale`: within SCALES.
    `log_weight`: (b, G, s), added to the logits, or None; -inf hides a slot, whose values must be finite.
    `causal`: row i reads the slots up to s - m + i only.
    `own`: (b, H, m) or None; the logit of the last slot in row i, instead of its product.

    The absolute error of a logarithm b is at most 2^-24 abs(b), in float16 also scale 2^-15, with a cutoff at
    10^7 scale. Rows that read hidden slots alone return a mean of their values.
    """
    b, H, m, _ = q.shape
    G, s, D = values.shape[1:]
    rows, slots = [q], [keys]
    lift = _LIFT.get(q.dtype, 1.0)
    if log_weight is not None:
        parts = _parts(log_weight / (scale * lift), q.dtype)
        rows.append(q.new_full((), lift).expand(*q.shape[:3], parts.shape[-1]))
        slots.append(parts)
    if own is not None:
        parts = _parts(own / (scale * lift), q.dtype)
        rows.append(parts)
        last = (torch.arange(s, device=q.device) == s - 1).to(q.dtype) * lift
        slots.append(last[:, None].expand(*keys.shape[:3], parts.shape[-1]))
    width = -(-max(sum(part.shape[-1] for part in rows), D) // _COLUMNS) * _COLUMNS
    q, keys = (_joined(parts, width) for parts in (rows, slots))
    values = _joined([values], width)
    mask = None
    if causal and m > 1:
        if m == s:
            keys, values = (array.repeat_interleave(H // G, 1) for array in (keys, values))
            return _fused(q, keys, values, scale, is_causal=True)[..., :D]
        place = torch.arange(s, device=q.device)
        mask = (place <= place[s - m :, None]).repeat(H // G, 1)
    # joins the rows of all queries that share slots
    found = _fused(q.reshape(b, G, H // G * m, width), keys, values, scale, attn_mask=mask)
    return found.reshape(b, H, m, width)[..., :D]


def _parts(logarithms: Any, dtype: Any) -> Any:
    """Split numbers (...) into parts (..., parts) that narrow dtypes hold; -inf becomes finite, far below.

    The first part has the gradient of the number, because a gradient of each would be rounded to the format of parts.
    """
    if dtype == torch.float64:
        return torch.where(logarithms == -torch.inf, _FAR, logarithms).to(dtype)[..., None]
    least = _ABSENT.get(dtype, _FAR)
    kind = torch.float16 if dtype == torch.float16 else torch.bfloat16
    bounded, found = logarithms.float().clamp(_PARTS * least, -_PARTS * least), []
    left = bounded.detach()
    for _ in range(_PARTS):
        part = left.clamp(least, -least).to(kind)
        found.append(part.to(dtype))
        left = left - part.float()
    if bounded.requires_grad:
        found[0] = found[0] + (bounded - bounded.detach()).to(dtype)
    return torch.stack(found, -1)


def _joined(parts: list[Any], width: int) -> Any:
    """Return columns side by side, padded with zeros to `width`."""
    missing = width - sum(part.shape[-1] for part in parts)
    if missing:
        parts = [*parts, parts[0].new_zeros(()).expand(*parts[0].shape[:-1], missing)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _fused(q: Any, keys: Any, values: Any, scale: float, **options: Any) -> Any:
    """Return the attention of torch, in pieces if one call would be refused or would hold too many logits."""
    step = _ITEMS
    if q.dtype == torch.float64 and q.device.type != "cpu":  # no fused kernel takes float64
        step = max(1, min(step, ENTRIES // max(1, math.prod(q.shape[1:3]) * keys.shape[2])))
    parts = [
        scaled_dot_product_attention(q[i : i + step], keys[i : i + step], values[i : i + step], scale=scale, **options)
        for i in range(0, len(q), step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, eq=False)
class _Slots:
    """Kept keys and summaries as slots (b, s, ·), in the dtype of products; a last column of values marks summaries.

    Without summaries there is no such column: heads of 128 channels keep a width for which fused kernels are fastest.
    """

    keys: Any
    values: Any
    log_weight: Any
    kept: int


def mixed_by_fused(x: PrunedArguments, first: Int64, last: Int64) -> tuple[Any, Any]:
    """Return the result of a mixture by softmax by fused attention; there are slots or near keys, and queries.

    `first`, `last`: of the mixture.
    """
    near = int(np.max(last - first, initial=0))
    if x.narrow is not None and SCALES[0] < x.narrow[1] < SCALES[1]:
        dtype, scale = x.narrow
        q = (x.q / scale if x.factor == 1 else x.q).to(dtype)
    else:
        x = definition.scaled(widened(x))
        q, scale = x.q, 1.0
    followed = not near or _is_causal(x, first, last)
    if not followed and cuda_near.has_few_near(first, last) and _near_is_read(x):
        return _with_near_there(x, q, scale, first, last)
    if followed and near and x.q.shape[2] == 1 and _near_is_read(x):
        found = _of_token(x, q, scale, int(first[0]))
        if found is not None:
            return found
    held = _slots(x, q.dtype)
    D, marked = x.values.shape[-1], x.summaries is not None
    if followed:
        keys, values, weight = held.keys, held.values, held.log_weight
        if near:
            low = int(first[0])
            recent = pad(x.values[:, low:].to(q.dtype), (0, int(marked)))
            keys = torch.cat([keys, x.keys[:, low:].to(q.dtype)], 1)
            values = torch.cat([values, recent], 1)
            weight = None if weight is None else pad(weight, (0, recent.shape[1]))
        weight = None if weight is None else weight[:, None]
        found = attended_slots(q, keys[:, None], values[:, None], weight, scale, causal=near > 0).to(x.q.dtype)
        return found[..., :D], found[..., D] if marked else found.new_zeros(found.shape[:-1])
    return _with_near(x, q, scale, held, first, last)


def widened(x: PrunedArguments) -> PrunedArguments:
    """Return a mixture whose arrays of 16 bits are of float32."""
    return mapped(x, lambda array: array.float() if array.dtype in _NARROW else array)  # type: ignore[no-any-return]


def _is_causal(x: PrunedArguments, first: Int64, last: Int64) -> bool:
    """Tell whether each query is near all keys up to one that advances with it and ends at the last key."""
    end = x.keys.shape[1] - len(last) + 1
    rising = np.arange(end, end + len(last))
    return x.role is None and bool(np.all(first == first[0])) and np.array_equal(last, rising)


def _slots(x: PrunedArguments, dtype: Any) -> _Slots:
    """Return the slots that all queries of an item read."""
    s, kind = x.kept_keys.shape[1], torch.promote_types(x.q.dtype, torch.float32)
    keys, weight = x.kept_keys, None
    values = x.kept_values if x.summaries is None else pad(x.kept_values, (0, 1))
    if x.kept_count is not None:
        there = torch.arange(s, device=x.q.device) < x.kept_count[:, None]
        values = torch.where(there[..., None], values, 0)
        weight = torch.zeros_like(there, dtype=kind).masked_fill(~there, -torch.inf)
    if x.summaries is not None:
        held = x.summaries
        there = (held.count > 0.5) & (held.weight > 0)
        total = torch.where(there, held.weight, 1)
        logs = torch.where(there, total.log() - held.offset / total, -torch.inf).to(kind)
        means, mean_values = (array / total[..., None] for array in (held.keys, held.values))
        mean_values = torch.where(there[..., None], mean_values, 0)
        keys = torch.cat([keys, means.to(kind)], 1)
        values = torch.cat([values, pad(mean_values.to(kind), (0, 1), value=1.0)], 1)
        weight = torch.cat([logs.new_zeros((len(logs), s)) if weight is None else weight, logs], 1)
    return _Slots(keys.to(dtype), values.to(dtype), weight, s)


def _with_near(x: PrunedArguments, q: Any, scale: float, held: _Slots, first: Int64, last: Int64) -> tuple[Any, Any]:
    """Return outputs and rest masses where members of summaries are near queries: fused sums less these members.

    All slots have the mass M and the mean value y. A query also reads near keys, and summaries without them, of mass A
    and mean a. It must not read these summaries whole, of mass C and mean c. Outputs are
    (M y + A a − C c) / (M + A − C). Fused attention sees one more slot, of mass A, and returns M y / (M + A) and
    A / (M + A). By the log-sum inequality a summary never counts for more than some members and a summary of the
    others, so C ≤ A. With C ≤ M, M + A − C is at least half of M + A, so nothing cancels.
    """
    D = x.values.shape[-1]
    mass, gone, change = _near(definition.scaled(widened(x)), q, scale, held, first, last)
    nothing = held.keys.new_zeros((len(q), 1, held.keys.shape[-1]))
    keys = torch.cat([held.keys, nothing], 1)
    more = torch.arange(D + 2, device=q.device).eq(D + 1).to(q.dtype).expand(len(q), 1, -1)
    values = torch.cat([pad(held.values, (0, D + 2 - held.values.shape[-1])), more], 1)
    weight = None if held.log_weight is None else pad(held.log_weight, (0, 1))[:, None]
    found = attended_slots(q, keys[:, None], values[:, None], weight, scale, own=mass).to(x.q.dtype)
    share = found[..., D + 1 :]
    found = (found[..., : D + 1] + share * change) / (1 - share * gone[..., None]).clamp(min=_REMAINS)
    return found[..., :D], found[..., D].clamp(min=0)


def _with_near_there(x: PrunedArguments, q: Any, scale: float, first: Int64, last: Int64) -> tuple[Any, Any]:
    """Return the result of `_with_near` by kernels of a device."""
    shape, (d, D), sums, held = q.shape[:3], (q.shape[-1], x.values.shape[-1]), None, None
    rows, members = (tuple(map(memory_of, pair)) for pair in ((x.keys, x.values), (x.role, x.log_weight)))
    if x.summaries is None and x.kept_count is None:
        slots = _slots(x, q.dtype)
        found = _with_sums(q, slots, scale)
        if found is not None:
            near = cuda_near.attend_near(memory_of(q), rows, (first, last), members, None, None, scale)
            return _joined_there(*found, near, shape)
    width = -(-max(d + 2 * _PARTS, D + 2) // _COLUMNS) * _COLUMNS
    if x.summaries is not None:
        sums = memory_of(_side_by_side(x.summaries, torch.float32))
    kept, read = tuple(map(memory_of, (x.kept_keys, x.kept_values, x.kept_count))), memory_of(q)
    keys, values, logs = cuda_near.write_slots(kept, sums, scale, (width, width), read.dtype)
    if sums is not None and x.role is not None:
        held = keys, values, logs
    near = cuda_near.attend_near(read, rows, (first, last), members, held, None if held is None else sums, scale)
    asked = tensor_of(cuda_near.widen_queries(read, near[0], scale, width)).flatten(1, 2)
    found = _fused(asked[:, None], tensor_of(keys)[:, None], tensor_of(values)[:, None], scale)
    return _joined_there(found.view(*shape, width), None, near, shape)


def _of_token(x: PrunedArguments, q: Any, scale: float, low: int) -> tuple[Any, Any] | None:
    """Return the result for one row that reads all slots and the keys from `low` on, by the kernels of a token.

    None where they do not run. A column of the values marks summaries, as in `_slots`; with it come others, so that
    rows still begin at packs.
    """
    d, D, sums, read = q.shape[-1], x.values.shape[-1], None, memory_of(q)
    count, more = x.kept_keys.shape[1], 0
    if x.summaries is not None:
        sums, more = memory_of(_side_by_side(x.summaries, torch.float32)), _COLUMNS
        count += sums.shape[1]
    if not count:
        return None
    kept = tuple(map(memory_of, (x.kept_keys, x.kept_values, x.kept_count)))
    parts = cuda_near.write_slots(kept, sums, scale, (d, D + more), read.dtype)
    keys, values, logs = (tensor_of(array)[:, None] for array in parts)
    weighted = sums is not None or x.kept_count is not None
    slots = HeldSlots.of(keys[:, :, :count], values[:, :, :count], logs if weighted else None, (0,), q.dtype.itemsize)
    if slots is None:
        return None
    values_near = pad(x.values[:, None, low:], (0, more)) if more else x.values[:, None, low:]
    near = *(memory_of(rows.to(q.dtype)) for rows in (x.keys[:, None, low:], values_near)), None
    Y = q.new_empty((*q.shape[:3], D + more))
    if not attend_token(read, slots, near, scale, None, Y, partial(q.new_empty, dtype=torch.float32)):
        return None
    Y = Y.to(x.q.dtype)
    return Y[..., :D], Y[..., D] if more else Y.new_zeros(Y.shape[:-1])


def _joined_there(found: Any, sums: Any, near: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return outputs and rest masses: attention to slots joins the sums over near keys."""
    Y, rest = cuda_near.join_near(memory_of(found.flatten(0, 2)), memory_of(sums), near)
    return tensor_of(Y).unflatten(0, shape), tensor_of(rest).view(shape)


def _with_sums(q: Any, held: _Slots, scale: float) -> tuple[Any, Any] | None:
    """Return attention (b, g, m, D) to all slots, and the logarithms of the masses of rows, if torch tells them.

    So no column is needed: fused kernels are fastest for powers of two.
    """
    b, g, m, d = q.shape
    if not 0 < b <= _ITEMS or d != held.values.shape[-1] or d % _COLUMNS or not held.keys.shape[1]:
        return None
    given = q.reshape(b, 1, g * m, d), held.keys[:, None], held.values[:, None]
    telling = _telling(SDPBackend(torch._fused_sdp_choice(*given, scale=scale)).name)
    if telling is None:
        return None
    try:
        found, sums = telling(*given, scale=scale)[:2]
    except NotImplementedError:  # on a device that has no such kernel
        return None
    return found.view(q.shape), sums.reshape(b, -1)[:, : g * m].reshape(-1)


@cache
def _telling(kernel: str) -> Any:
    """Return the function of torch for a kernel of attention, or None where this release has another."""
    name, options = _TELLING.get(kernel, ("", {}))
    function = getattr(torch.ops.aten, name, None) if name else None
    if function is None:
        return None
    known = [argument.name for argument in function.default._schema.arguments]
    return partial(function, **options) if {"scale", *options} <= set(known) else None


def _near_is_read(x: PrunedArguments) -> bool:
    """Tell whether a kernel of a device takes the near keys, if there are few: without gradients."""
    given = (x.q, x.keys, x.values, x.kept_keys, x.kept_values, x.role, x.log_weight, *vars(x.summaries or x).values())
    if x.q.dtype == torch.float64 or max(x.q.shape[-1], x.values.shape[-1]) > cuda_near.MOST_COLUMNS:
        return False
    return is_read_there([array for array in given if isinstance(array, torch.Tensor)])


def _side_by_side(held: Summaries, dtype: Any) -> Any:
    """Return the sums, weights, offsets and counts of summaries (b, R, d + D + 3)."""
    parts = (held.keys, held.values, *(vars(held)[name][..., None] for name in _SCALARS))
    return torch.cat([part.to(dtype) for part in parts], -1)


def _near(x: PrunedArguments, q: Any, scale: float, held: _Slots, first: Int64, last: Int64) -> tuple[Any, Any, Any]:
    """Return log A and C / A (b, g, m), and (A a - C c) / A with its share of summaries (b, g, m, D + 1).

    Positions are cut into blocks; a block takes the keys near any of its positions.
    """
    b, g, m, _ = q.shape
    step = max(_LEAST, int(np.max(last - first)))
    blocks = -(-m // step)
    edges = np.zeros((3, blocks * step), np.int64)
    edges[:2, :m] = first, last
    begins = edges[0, ::step]
    ends = edges[1, np.minimum(np.arange(1, blocks + 1) * step, m) - 1]
    width = max(1, int(np.max(ends - begins)))
    edges[2] = np.repeat(begins, step)
    bounds = torch.from_numpy(edges).to(q.device).unflatten(1, (blocks, step))
    summaries = None if x.summaries is None else _side_by_side(x.summaries, x.q.dtype)
    rows = tuple(_blocks(array, blocks, step) for array in (x.q, q))
    each = max(1, ENTRIES // (b * max(g * step, width) * 2 * width))
    pieces = []
    for low in range(0, blocks, each):
        part = slice(low, low + each)
        pieces.append(
            _of_blocks(x, [array[:, part] for array in rows], scale, held, summaries, bounds[:, part], width)
        )
    found = pieces[0] if len(pieces) == 1 else [torch.cat(parts, 1) for parts in zip(*pieces, strict=True)]
    mass, gone, change = (array.unflatten(2, (g, step)).transpose(1, 2).flatten(2, 3)[:, :, :m] for array in found)
    return mass, gone, change


def _blocks(q: Any, blocks: int, step: int) -> Any:
    """Lay queries (b, g, m, d) out by blocks of positions, (b, blocks, g · step, d)."""
    q = pad(q, (0, 0, 0, blocks * step - q.shape[2]))
    return q.unflatten(2, (blocks, step)).transpose(1, 2).flatten(2, 3)


def _of_blocks(
    x: PrunedArguments, rows: list[Any], scale: float, held: _Slots, summaries: Any, bounds: Any, width: int
) -> tuple[Any, Any, Any]:
    """Return the sums of `_near` for some blocks (b, blocks, rows, ...); rows: queries, also for fused attention."""
    q, narrow = rows
    blocks, step = bounds.shape[1:]
    place = bounds[2, :, :1] + torch.arange(width, device=q.device)
    within = (bounds[0, :, :, None] <= place[:, None]) & (place[:, None] < bounds[1, :, :, None])
    within = within.repeat(1, q.shape[2] // step, 1)
    flat = place.clamp(max=x.keys.shape[1] - 1).flatten()

    def taken(array: Any) -> Any:
        return array.index_select(1, flat).unflatten(1, (blocks, width))

    near, values = q @ taken(x.keys).mT, pad(taken(x.values), (0, 1))
    if x.role is None or summaries is None:
        here = within if x.role is None else within & (taken(x.role) > -2)[:, :, None]
        P, mass = _weights(near.masked_fill(~here, -torch.inf))
        return mass, torch.zeros_like(mass), P @ values
    role = taken(x.role)
    logs = torch.zeros_like(near[:, :, 0]) if x.log_weight is None else taken(x.log_weight)
    slot = role.clamp(min=0).flatten(1)[..., None]

    def of_slots(array: Any, first: int) -> Any:
        found = array.gather(1, (slot + first).expand(-1, -1, array.shape[-1]))
        return found.unflatten(1, (blocks, width))

    mass, found, touched = _without_members(q, near, values, within, role, logs, of_slots(summaries, 0))
    # The same rounded numbers that fused attention reads
    keys, values, weight = (
        of_slots(array.to(q.dtype), held.kept) for array in (held.keys, held.values, held.log_weight[..., None])
    )
    logits = scale * (narrow.to(q.dtype) @ keys.mT) + weight.mT - mass[..., None]
    P, gone = _weights(logits.masked_fill(~touched, -torch.inf))
    gone = gone.clamp(max=0).exp()  # C ≤ A, except for rounding
    return mass, gone, found - gone[..., None] * (P @ values)


def _without_members(
    q: Any, near: Any, values: Any, within: Any, role: Any, logs: Any, sums: Any
) -> tuple[Any, Any, Any]:
    """Return log A, a with its share of summaries, and flags of summaries that have members near a row.

    Each near key has a column (b, blocks, rows, width) for itself. The first near key of a summary in a block has one
    for the summary as well. `near`: logits of keys. `sums`: of the summaries, side by side.
    """
    (D, width), d = values.shape[-1:] + near.shape[-1:], q.shape[-1]
    sum_keys, sum_values, scalars = sums.split([d, D - 1, 3], -1)
    weight, offset, count = (array[:, :, None] for array in scalars.unbind(-1))
    same = (role[..., :, None] == role[..., None, :]) & (role >= 0)[..., None]
    stands = (role >= 0) & ~same.triu(1).any(-2)
    member, inside = same.to(q.dtype), within.to(q.dtype)
    out = inside * logs.exp()[:, :, None]  # the weight that each row takes out
    members = inside @ member
    weight = weight - out @ member
    inner = q @ sum_keys.mT - offset - (out * (near - logs[:, :, None])) @ member
    touched = (members > 0.5) & stands[:, :, None]
    left = touched & (count - members > 0.5) & (weight > 0)
    weight = torch.where(left, weight, 1)
    here = within & (role > -2)[:, :, None]
    keys, others = near.masked_fill(~here, -torch.inf), (inner / weight + weight.log()).masked_fill(~left, -torch.inf)
    P, mass = _weights(torch.cat([keys, others], -1))
    share = P[..., width:]
    coefficient = share / weight
    direct = P[..., :width] - (coefficient @ member.mT) * out
    found = (direct @ values)[..., :-1] + coefficient @ sum_values
    return mass, torch.cat([found, share.sum(-1, keepdim=True)], -1), touched


def _weights(logits: Any) -> tuple[Any, Any]:
    """Return the weights of each row, and the logarithms of their sums; zeros and -inf for rows without logits."""
    top = logits.amax(-1, keepdim=True).detach()
    E = (logits - torch.where(top == -torch.inf, 0, top)).exp()
    total = E.sum(-1, keepdim=True)
    there = total > 0
    total = torch.where(there, total, 1)
    return E / total, torch.where(there, total.log() + top, -torch.inf)[..., 0]
