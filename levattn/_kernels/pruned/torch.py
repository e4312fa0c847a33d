"""Pruned attention of tensors: on a device by torch's fused attention, in main memory by kernels with their gradients.

One token that reads a compressed cache on a device has kernels of its own (`attended_token`).

A slot with the logarithm b of a weight has the logit scale ⟨q, k⟩ + b. Here b is a product as well, of additional
columns of queries and keys. So no kernel needs a mask, and any fused kernel will do, with its gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad, scaled_dot_product_attention

from levattn._core.device import where_arrays_are
from levattn._core.types import Int64
from levattn._kernels.dispatch import kernels_for
from levattn._kernels.pruned import (
    PrunedArguments,
    PrunedGradients,
    RenewalArguments,
    Summaries,
    cuda,
    cuda_decode,
    definition,
    differentiable,
    mapped,
)
from levattn._kernels.pruned.definition import from_rows
from levattn._kernels.tensors import (
    are_plain_on_device,
    has_kernels,
    has_own_memory,
    has_tangent,
    in_plain_memory,
    is_transformed,
    memory_of,
    tensor_of,
)


def on_memory(name: str, *given: Any) -> Any:
    """Return the result of a kernel that has no gradient, on the memory of plain tensors, else of its definition."""
    tensors: list[Any] = []
    for argument in given:
        mapped(argument, tensors.append)
    if not in_plain_memory(tuple(tensors)) or any(tensor.requires_grad for tensor in tensors):
        return getattr(definition, name)(*given)
    read = [mapped(argument, memory_of) for argument in given]
    found = getattr(kernels_for("pruned", next(x for x in map(memory_of, tensors))), name)(*read)
    return tuple(mapped(x, tensor_of) for x in found) if isinstance(found, tuple) else mapped(found, tensor_of)


def levels(labels: Any, values: Any, weight: Any, R: int) -> Any:
    """Return weighted means by label, (b, R)."""
    return on_memory("levels", labels, values, weight, R)


def radii(labels: Any, items: Summaries, item_radii: Any, summaries: Summaries) -> Any:
    """Return bounds (b, R) of the distances of members of summaries from their means."""
    return on_memory("radii", labels, items, item_radii, summaries)


def row_moments(X: Any, squares: bool, chunks: int = 1) -> tuple[Any, Any]:
    """Return the sums (b, d) of rows and, if `squares`, the sums (b, d, d) of x xᵀ in float64, for each chunk."""
    if not is_read_there([X]) or not X.numel():
        return cast(tuple[Any, Any], on_memory("row_moments", X, squares, chunks))
    second = None
    if squares:
        rows = X.unflatten(2, (chunks, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3).flatten(0, 1)
        second = cuda.summed_squares(memory_of(rows), str(X.dtype).rpartition(".")[2])
        if second is None:
            return cast(tuple[Any, Any], on_memory("row_moments", X, squares, chunks))
        second = tensor_of(second)
    return tensor_of(cuda.row_sums(memory_of(X), chunks)), second


def running(sums: Any, before: Any) -> Any:
    """Return sums (chunks, ...) up to and with each chunk, after others (...), in place."""
    if not is_read_there([sums, before]):
        return definition.running(sums, before)
    cuda.running(memory_of(sums), memory_of(before))
    return sums


def renews(keys: Any, values: Any, slots: tuple[int, int], leaving: int) -> bool:
    """Tell whether one kernel renews slots with `leaving` keys each time, also in turn."""
    if keys.dtype != torch.float32 or values.dtype != torch.float32 or not is_read_there([keys, values]):
        return False
    return cuda.can_renew(keys.shape[2], values.shape[2], slots, leaving)


def renewed(x: RenewalArguments, _: dict[str, Any] | None = None) -> Any:
    """Return slots after renewals and flags of faults, or None; see `PrunedKernels`."""
    before = 0 if x.summaries is None else x.summaries.weight.shape[1]
    if not renews(x.keys, x.values, (x.kept.shape[1], max(x.R, before)), x.keys.shape[1] // len(x.queries)):
        return None
    given: list[Any] = []
    mapped(x, given.append)
    if not is_read_there(given):
        return None
    new, *faults = cuda.renew_slots(mapped(x, memory_of))
    kept, values, places, sums, value_sums, *scalars = (None if array is None else tensor_of(array) for array in new)
    held = Summaries(scalars[0], sums, value_sums, *scalars[1:3]) if x.R else None
    return kept, values, places, held, scalars[3], tuple(map(tensor_of, faults))


def factor_queries(total: Any, second: Any, key_total: Any, counts: tuple[int, int], dtype: Any) -> Any:
    """Return a factor of moments of queries, both means and faults, or None; see `LabelKernels`."""
    if not all(map(_on_device, (total, second, key_total))):
        return None
    found = cuda.factor_queries(memory_of(total), memory_of(second), memory_of(key_total), counts, dtype)
    return None if found is None else tuple(map(tensor_of, found))


def reads(X: Any) -> bool:
    """Tell whether kernels of a device score and choose rows."""
    return is_read_there([X]) and X.numel() > 0


def score_rows(X: Any, along: Any, distance: Any, residual: bool) -> tuple[Any, Any]:
    """Return scores (b, n) of rows, and flags of finite squares; see `LabelKernels`."""
    scores, finite = cuda.score_rows(memory_of(X), memory_of(along), memory_of(distance), residual)
    return tensor_of(scores), tensor_of(finite)


def choose_rows(scores: Any, first: Any, count: int) -> tuple[Any, Any, Any]:
    """Return rows (b, count) with the largest scores, flags (b, n) of these, and of numbers; see `LabelKernels`."""
    order, flags, sound = cuda.choose_rows(memory_of(scores), memory_of(first), count)
    return tensor_of(order), tensor_of(flags), tensor_of(sound)


def merge_rows(labels: Any, along: Any, weight: Any, K: Any, V: Any, R: int) -> tuple[Any, Any, Any]:
    """Return roles and tilts (b, n) of rows, and the sums (b, R, d + D + 3) of summaries; see `LabelKernels`."""
    rows = memory_of(K), memory_of(V)
    role, tilts, sums = cuda.merge_rows(memory_of(labels), memory_of(along), memory_of(weight), *rows, R)
    return tensor_of(role), tensor_of(tilts), tensor_of(sums)


def places(K: Any, origin: Any, root: Any, query: Any) -> tuple[Any, Any]:
    """Return keys in another basis, (b, n, d), and their products with a query, (b, n)."""
    return cast(tuple[Any, Any], on_memory("places", K, origin, root, query))


def merged(labels: Any, log_weight: Any, items: Summaries, R: int) -> Summaries:
    """Return R summaries of items."""
    others = labels, log_weight, items.weight, items.offset, items.count
    if not in_plain_memory((*others, items.keys, items.values)) or any(array.requires_grad for array in others):
        return definition.merged(labels, log_weight, items, R)
    return Summaries(*_Merged.apply(items.keys, items.values, *others, R))


class _Merged(torch.autograd.Function):  # type: ignore[misc]
    """Summaries of items, with gradients of their keys and values."""

    @staticmethod
    def forward(
        ctx: Any, keys: Any, values: Any, labels: Any, log_weight: Any, weight: Any, offset: Any, count: Any, R: int
    ) -> tuple[Any, ...]:
        ctx.save_for_backward(labels, log_weight)
        labels, log_weight, *parts = map(memory_of, (labels, log_weight, weight, keys, values, offset, count))
        held = kernels_for("pruned", labels).merged(labels, log_weight, Summaries(*parts), R)
        found = tuple(map(tensor_of, vars(held).values()))
        ctx.mark_non_differentiable(found[0], *found[3:])
        return found

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        labels, log_weight = ctx.saved_tensors
        factor = torch.where(labels >= 0, log_weight.exp(), 0)[..., None]
        b, R, _ = given[1].shape
        at = (labels.clamp(min=0) + R * torch.arange(b)[:, None]).flatten()
        rows = (
            x.reshape(b * R, x.shape[-1]).index_select(0, at).reshape(*labels.shape, x.shape[-1]) for x in given[1:3]
        )
        return *(factor.to(x.dtype) * x for x in rows), *(None,) * 6


def mixed(x: PrunedArguments) -> tuple[Any, Any]:
    """Return the result of a mixture that `is_read`."""
    return cast(tuple[Any, Any], _Mixture.apply(_changed(x, ()), *_arrays(x)))


def _arrays(x: PrunedArguments) -> list[Any]:
    """Return the arrays of a mixture; the first of them may have gradients."""
    held = (None,) * 3 if x.summaries is None else (x.summaries.weight, x.summaries.offset, x.summaries.count)
    return [*differentiable(x), *held, x.kept_count, x.role, x.log_weight]


def is_read(x: PrunedArguments) -> bool:
    """Tell whether kernels read a mixture, and have all of its gradients."""
    arrays = _arrays(x)
    constant = arrays[len(differentiable(x)) :]
    return in_plain_memory(tuple(arrays)) and not any(x is not None and x.requires_grad for x in constant)


def _changed(x: PrunedArguments, arrays: Any) -> PrunedArguments:
    """Return a mixture with other arrays, in the order of `_arrays`; without them if there are none."""
    q, kept, kept_values, sums, sum_values, keys, values, weight, offset, count, there, role, logs = (
        arrays or (None,) * 13
    )
    held = None if x.summaries is None else Summaries(weight, sums, sum_values, offset, count)
    return replace(
        x,
        q=q,
        kept_keys=kept,
        kept_values=kept_values,
        kept_count=there,
        summaries=held,
        keys=keys,
        values=values,
        role=role,
        log_weight=logs,
    )


class _Mixture(torch.autograd.Function):  # type: ignore[misc]
    """A mixture by softmax, by kernels; second derivatives, and gradients in a batch, by its definition."""

    @staticmethod
    def forward(ctx: Any, form: PrunedArguments, *arrays: Any) -> tuple[Any, Any]:
        ctx.save_for_backward(*arrays)
        ctx.form, read = form, mapped(_changed(form, arrays), memory_of)
        Y, rest = map(tensor_of, kernels_for("pruned", read.q).mixture(read))
        ctx.mark_non_differentiable(rest)
        return Y, rest

    @staticmethod
    def backward(ctx: Any, dY: Any, _: Any) -> tuple[Any, ...]:
        arrays, wanted = ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or not in_plain_memory((dY,)):
            return None, *_again(ctx.form, arrays, wanted, dY)
        read = mapped(_changed(ctx.form, arrays), memory_of)
        found = cast(PrunedGradients, kernels_for("pruned", read.q)).mixture_gradients(read, memory_of(dY))
        gradients = [tensor_of(part) if needed else None for part, needed in zip(found, wanted, strict=False)]
        return None, *gradients, *(None,) * (len(wanted) - len(found))


def _again(form: PrunedArguments, arrays: Any, wanted: Any, dY: Any) -> list[Any]:
    """Return gradients by the definition, which torch can differentiate again."""
    followed = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, because kept keys come from keys, which their own gradients must not reach here
        given = [
            (x.view_as(x) if followed else x.detach().requires_grad_()) if needed else x
            for x, needed in zip(arrays, wanted, strict=True)
        ]
        Y, _ = definition.mixture(_changed(form, given))
        leaves = [x for x, needed in zip(given, wanted, strict=True) if needed]
        found = iter(torch.autograd.grad(Y, leaves, dY, create_graph=followed, materialize_grads=True))
    return [next(found) if needed else None for needed in wanted]


_PARTS = 3  # of a logarithm: 8 bits each for bfloat16 and TF32, 11 for float16
# Factor of the columns of logarithms on the other side, because float16 has a narrow range
_LIFT = {torch.float16: 1024.0}
_NARROW = torch.float16, torch.bfloat16
# Each part of a logarithm that hides a slot; finite, because gradients read it
_ABSENT, _FAR = {torch.float16: -60000.0}, -1e30
SCALES = 2.0**-20, 2.0**20  # range of scales, which divide the columns
_DECODED = (torch.float32, torch.float16, torch.bfloat16)  # formats of `attended_token`
_COLUMNS = 8  # fused kernels take rows whose width is a multiple of this
_ITEMS = 65535  # largest batch of matrices of a fused kernel
_ENTRIES = 1 << 26  # logits held at a time: of keys near queries, and without a fused kernel
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


def at_once(q: Any, power: float | None, numbers: int, logits: int) -> int:
    """Return how many chunks one call of `mixture` takes, of so many numbers and logits each."""
    if power is not None or not is_fused(q):
        return definition.at_once(q, power, numbers, logits)
    return _ENTRIES // max(1, numbers + (logits if q.dtype == torch.float64 else 0))  # others have a fused kernel


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
        step = max(1, min(step, _ENTRIES // max(1, math.prod(q.shape[1:3]) * keys.shape[2])))
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


@where_arrays_are
def attended_token(
    q: Any, slots: tuple[Any, ...], near: tuple[Any, Any, Any], scale: float, softcap: float | None
) -> Any:
    """Return the softmax attention (B, H, 1, D) of a token by kernels of a device, or None where they do not run.

    `q`: (B, H, 1, d). `slots`: for each group of heads keys, values, log-weights or None, and the heads' numbers.
    Together the groups have all heads. `near`: keys, values and `present` of the later tokens; see
    `cuda_decode.attend_token`. Nothing is copied, and nothing waits.
    """
    kind, device = q.dtype, q.device
    numbers = [q, *near[:2], *(array for group in slots for array in group[:2])]
    weights = [group[2] for group in slots if group[2] is not None]
    if kind not in _DECODED or not are_plain_on_device((*numbers, *weights)):
        return None
    if any(x.dtype != kind for x in numbers) or any(x.dtype != torch.float32 for x in weights):
        return None
    if any(x.stride(-1) != 1 or x.device != device for x in (*numbers, *weights)):
        return None
    present = near[2]
    if present is not None:
        if present.dtype != torch.bool or present.device != device or present.shape[1:] != near[0].shape[2:3]:
            return None
        if len(present) != len(q):
            near = *near[:2], present.expand(len(q), -1)  # of one sequence, for all
    if any(len(x) != len(q) for x in (*numbers, *weights)):
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    Y, empty = q.new_empty((*q.shape[:3], near[1].shape[3])), partial(q.new_empty, dtype=torch.float32)
    for keys, values, weight, heads in slots:
        if not cuda_decode.attend_token(q, (keys, values, weight), near, heads, scale, softcap, Y, empty):
            return None
    return Y


@where_arrays_are
def opened_codes(coded: tuple[Any, ...], shape: tuple[int, ...], bits: int, dtype: Any) -> Any:
    """Return rows (..., s, d) of codes by a kernel of a device, or None where it does not run; see `Coded`."""
    arrays = [array for array in coded if array is not None]
    if dtype not in _DECODED or not math.prod(shape) or coded[0].device.type != "cuda":
        return None
    if not all(has_kernels(array) and array.is_contiguous() for array in arrays) or not is_read_there(arrays):
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    rows, blocks, held = coded[0].new_empty(shape, dtype=dtype), coded[1].shape[-1], coded[0].shape[-1] * 8 // bits
    cuda_decode.open_codes(coded, held // blocks, bits, rows)
    return rows


def cluster(X: Any, weight: Any, R: int, iterations: int) -> tuple[Any, Any]:
    """Return the cluster of each row, (b, n), and its squared distance to the center."""
    if not _on_device(X):
        return cast(tuple[Any, Any], on_memory("cluster", X, weight, R, iterations))
    picks = tensor_of(cuda.far_rows(memory_of(X), memory_of(weight), R))
    return from_rows(X, weight, picks, iterations)


def assigned(X: Any, squares: Any, centers: Any) -> tuple[Any, Any]:
    """Return the nearest center of each row, and its squared distance."""
    return _by_device("assigned", X, squares, centers)


def label_sums(labels: Any, weight: Any, X: Any, R: int) -> tuple[Any, Any]:
    """Return ``Σ w x`` (b, R, d) and ``Σ w`` (b, R) over the rows with each label."""
    return _by_device("label_sums", labels, weight, X, R)


def _by_device(name: str, *given: Any) -> tuple[Any, Any]:
    """Return the two results of a kernel of a device, or of its definition, which torch differentiates."""
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    followed = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if followed or not all(map(_on_device, tensors)) or has_tangent(tensors):
        return cast(tuple[Any, Any], getattr(definition, name)(*given))
    first, second = getattr(cuda, name)(*map(memory_of, given))
    return tensor_of(first), tensor_of(second)


def is_read_there(tensors: list[Any]) -> bool:
    """Tell whether kernels of a device read tensors, of which there is no gradient and no tangent."""
    if not all(map(_on_device, tensors)) or has_tangent(tensors):
        return False
    return not (torch.is_grad_enabled() and any(X.requires_grad for X in tensors))


def _on_device(X: Any) -> bool:
    """Tell whether kernels of a device read a tensor."""
    if X.device.type != "cuda" or not has_own_memory(X) or not has_kernels(X):
        return False
    return not is_transformed(X) and not torch.compiler.is_compiling()


def mixture(x: PrunedArguments, _: dict[str, Any] | None = None, __: Any = None) -> tuple[Any, Any]:
    """Return the output (b, g, m, D), and the share of the summaries in each query's weights, (b, g, m)."""
    if x.chunks > 1:
        parts = (part.unflatten(0, (x.chunks, -1)).movedim(0, 2).flatten(2, 3) for part in mixture(_chunks_of(x)))
        return next(parts), next(parts)
    (b, _, m, _), first, last = x.q.shape, np.asarray(x.first, np.int64), np.asarray(x.last, np.int64)
    near = int(np.max(last - first, initial=0))
    slots = x.kept_keys.shape[1] + (0 if x.summaries is None else x.summaries.weight.shape[1])
    fused = is_fused(x.q, x.keys, x.values)
    if x.power is None and not fused and slots + near and is_read(x):
        return mixed(definition.scaled(x))
    if x.power is not None or not fused or not b * m * (slots + near):
        return definition.mixture(_widened(x))
    if x.narrow is not None and SCALES[0] < x.narrow[1] < SCALES[1]:
        dtype, scale = x.narrow
        q = (x.q / scale if x.factor == 1 else x.q).to(dtype)
    else:
        x = definition.scaled(_widened(x))
        q, scale = x.q, 1.0
    followed = not near or _is_causal(x, first, last)
    if not followed and cuda.has_few_near(first, last) and _near_is_read(x):
        return _with_near_there(x, q, scale, first, last)
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


def _chunks_of(x: PrunedArguments) -> PrunedArguments:
    """Return a mixture whose chunks are items of its batch."""
    length = x.q.shape[2] // x.chunks
    near = x.keys.shape[1] - (x.chunks - 1) * length
    q = x.q.unflatten(2, (x.chunks, length)).movedim(2, 0).flatten(0, 1)
    keys, values = (rows.unfold(1, near, length).movedim(1, 0).mT.flatten(0, 1) for rows in (x.keys, x.values))
    return replace(x, q=q, keys=keys, values=values, chunks=1)


def _widened(x: PrunedArguments) -> PrunedArguments:
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
    mass, gone, change = _near(definition.scaled(_widened(x)), q, scale, held, first, last)
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
            near = cuda.attend_near(memory_of(q), rows, (first, last), members, None, None, scale)
            return _joined_there(*found, near, shape)
    width = -(-max(d + 2 * _PARTS, D + 2) // _COLUMNS) * _COLUMNS
    if x.summaries is not None:
        sums = memory_of(_side_by_side(x.summaries, torch.float32))
    kept, read = tuple(map(memory_of, (x.kept_keys, x.kept_values, x.kept_count))), memory_of(q)
    keys, values, logs = cuda.write_slots(kept, sums, scale, width, read.dtype)
    if sums is not None and x.role is not None:
        held = keys, values, logs
    near = cuda.attend_near(read, rows, (first, last), members, held, None if held is None else sums, scale)
    asked = tensor_of(cuda.widen_queries(read, near[0], scale, width)).flatten(1, 2)
    found = _fused(asked[:, None], tensor_of(keys)[:, None], tensor_of(values)[:, None], scale)
    return _joined_there(found.view(*shape, width), None, near, shape)


def _joined_there(found: Any, sums: Any, near: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return outputs and rest masses: attention to slots joins the sums over near keys."""
    Y, rest = cuda.join_near(memory_of(found.flatten(0, 2)), memory_of(sums), near)
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
    if x.q.dtype == torch.float64 or max(x.q.shape[-1], x.values.shape[-1]) > cuda.MOST_COLUMNS:
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
    each = max(1, _ENTRIES // (b * max(g * step, width) * 2 * width))
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
