"""Pruned attention of tensors: on a device by torch's fused attention, in main memory by kernels with their gradients.

One token that reads a compressed cache on a device has kernels of its own (`attended_token`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from levattn._core.device import where_arrays_are
from levattn._kernels.dispatch import kernels_for
from levattn._kernels.pruned import (
    PrunedArguments,
    PrunedGradients,
    RenewalArguments,
    Summaries,
    cpu_decode,
    cuda,
    cuda_decode,
    cuda_renewal,
    definition,
    differentiable,
    mapped,
)
from levattn._kernels.pruned.cpu_decode import HeldRows
from levattn._kernels.pruned.cuda_decode import Codes, HeldSlots
from levattn._kernels.pruned.definition import from_rows
from levattn._kernels.pruned.fused import ENTRIES, is_fused, mixed_by_fused, widened
from levattn._kernels.tensors import (
    are_plain_on_device,
    has_tangent,
    in_plain_memory,
    is_read_there,
    lies_there,
    memory_of,
    tensor_of,
)

DECODED = (torch.float32, torch.float16, torch.bfloat16)  # formats of `attended_token`


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
    return tensor_of(cuda_renewal.row_sums(memory_of(X), chunks)), second


def running(sums: Any, before: Any) -> Any:
    """Return sums (chunks, ...) up to and with each chunk, after others (...), in place."""
    if not is_read_there([sums, before]):
        return definition.running(sums, before)
    cuda_renewal.running(memory_of(sums), memory_of(before))
    return sums


def renews(keys: Any, values: Any, slots: tuple[int, int], leaving: int) -> bool:
    """Tell whether one kernel renews slots with `leaving` keys each time, also in turn."""
    if keys.dtype != torch.float32 or values.dtype != torch.float32 or not is_read_there([keys, values]):
        return False
    return cuda_renewal.can_renew(keys.shape[2], values.shape[2], slots, leaving)


def renewed(x: RenewalArguments, _: dict[str, Any] | None = None) -> Any:
    """Return slots after renewals and flags of faults, or None; see `PrunedKernels`."""
    before = 0 if x.summaries is None else x.summaries.weight.shape[1]
    if not renews(x.keys, x.values, (x.kept.shape[1], max(x.R, before)), x.keys.shape[1] // len(x.queries)):
        return None
    given: list[Any] = []
    mapped(x, given.append)
    if not is_read_there(given):
        return None
    new, *faults = cuda_renewal.renew_slots(mapped(x, memory_of))
    kept, values, places, sums, value_sums, *scalars = (None if array is None else tensor_of(array) for array in new)
    held = Summaries(scalars[0], sums, value_sums, *scalars[1:3]) if x.R else None
    return kept, values, places, held, scalars[3], tuple(map(tensor_of, faults))


def factor_queries(total: Any, second: Any, key_total: Any, counts: tuple[int, int], dtype: Any) -> Any:
    """Return a factor of moments of queries, both means and faults, or None; see `LabelKernels`."""
    if not all(map(lies_there, (total, second, key_total))):
        return None
    found = cuda_renewal.factor_queries(memory_of(total), memory_of(second), memory_of(key_total), counts, dtype)
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


def at_once(q: Any, power: float | None, numbers: int, logits: int) -> int:
    """Return how many chunks one call of `mixture` takes, of so many numbers and logits each."""
    if power is not None or not is_fused(q):
        return definition.at_once(q, power, numbers, logits)
    return ENTRIES // max(1, numbers + (logits if q.dtype == torch.float64 else 0))  # others have a fused kernel


def held_slots(
    slots: Sequence[tuple[Any, Any, Any, tuple[int, ...]]], kind: Any
) -> tuple[HeldSlots, ...] | HeldRows | None:
    """Return the slots of groups of heads as `attended_token` takes them, or None where its kernels do not read them.

    `slots`: for each group keys, values, log-weights or None, and the heads' numbers. Together the groups have all
    heads. Keys and values have the dtype `kind`, or are `Codes` of such rows, in main memory with columns in float32.
    """
    numbers = [x for group in slots for x in group[:2] if not isinstance(x, Codes)]
    codes = [x for group in slots for rows in group[:2] if isinstance(rows, Codes) for x in rows.arrays]
    weights = [group[2] for group in slots if group[2] is not None]
    every = [*numbers, *codes, *weights]
    if kind not in DECODED or any(x.dtype != kind or x.stride(-1) != 1 for x in numbers):
        return None
    if any(x.dtype != torch.float32 or x.stride(-1) != 1 for x in weights):
        return None
    if any(x.device != every[0].device or x.requires_grad for x in every):
        return None
    if every[0].is_cpu:
        plain = in_plain_memory(tuple(every)) and all(x.is_contiguous() for x in codes)
        return HeldRows(slots) if plain and not any(x.is_neg() or x._is_zerotensor() for x in every) else None
    if not are_plain_on_device((*numbers, *weights)):
        return None
    if not _are_read_as_codes(codes):
        return None
    held = [HeldSlots.of(*group, kind.itemsize) for group in slots]
    return None if None in held else cast(tuple[HeldSlots, ...], tuple(held))


def attended_token(
    q: Any, slots: tuple[HeldSlots, ...] | HeldRows, near: tuple[Any, Any, Any], scale: float, softcap: float | None
) -> Any:
    """Return the softmax attention (B, H, 1, D) of a token by kernels, or None where they do not run.

    `q`: (B, H, 1, d). `slots`: the result of `held_slots` for the dtype of `q`. `near`: keys, values and `present` of
    the later tokens; see `cuda_decode.attend_token`. Nothing is copied, and nothing waits for a device.
    """
    if isinstance(slots, HeldRows):
        return _attended_in_memory(q, slots, near, scale, softcap)
    return _attended_on_device(q, slots, near, scale, softcap)


def _attended_in_memory(
    q: Any, slots: HeldRows, near: tuple[Any, Any, Any], scale: float, softcap: float | None
) -> Any:
    kind, given = q.dtype, (q, *near[:2])
    if not in_plain_memory((*given, near[2])) or any(x.dtype != kind or x.stride(-1) != 1 for x in given):
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return None
    if not _fit(near, len(q), q.device) or slots.sequences != len(q):
        return None
    if near[2] is not None:
        near = *near[:2], near[2].expand(len(q), -1)  # of one sequence, for all
    if any(x.is_neg() or x._is_zerotensor() for x in given):  # whose numbers are not in memory
        return None
    found = torch.from_numpy(cpu_decode.attend_token(q, slots, near, scale, softcap))
    if (
        kind == torch.float16
    ):  # codes stand for no number beyond its range, but half a step beyond when they are opened
        most = torch.finfo(kind).max
        found = torch.where(found.isinf(), found, found.clamp(-most, most))
    return found[:, :, None].to(kind)


def _fit(near: tuple[Any, Any, Any], B: int, device: Any) -> bool:
    """Tell whether later tokens are of so many sequences, on a device, and `present` tells of them or of one."""
    keys, values, present = near
    if any(len(x) != B or x.device != device for x in (keys, values)):
        return False
    if present is None:
        return True
    return bool(present.dtype == torch.bool and present.device == device and present.shape[1] == keys.shape[2])


@where_arrays_are
def _attended_on_device(
    q: Any, slots: tuple[HeldSlots, ...], near: tuple[Any, Any, Any], scale: float, softcap: float | None
) -> Any:
    kind, device, numbers = q.dtype, q.device, (q, *near[:2])
    if not are_plain_on_device(numbers) or any(x.dtype != kind or x.stride(-1) != 1 for x in numbers):
        return None
    B = len(q)
    if not _fit(near, B, device) or any(group.shape[0] != B or group.device != device for group in slots):
        return None
    if near[2] is not None and len(near[2]) != B:
        near = *near[:2], near[2].expand(B, -1)  # of one sequence, for all
    if torch.cuda.is_current_stream_capturing():
        return None
    Y, empty = q.new_empty((*q.shape[:3], near[1].shape[3])), partial(q.new_empty, dtype=torch.float32)
    for group in slots:
        if not cuda_decode.attend_token(q, group, near, scale, softcap, Y, empty):
            return None
    return Y


@where_arrays_are
def opened_codes(coded: Codes, dtype: Any) -> Any:
    """Return rows (..., s, d) of codes by a kernel of a device, or None where it does not run."""
    if dtype not in DECODED or not math.prod(coded.shape) or not _are_read_as_codes(coded.arrays):
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    rows = coded.codes.new_empty(coded.shape, dtype=dtype)
    return rows if cuda_decode.open_codes(coded, rows) else None


def _are_read_as_codes(arrays: list[Any]) -> bool:
    return is_read_there(arrays) and all(array.is_contiguous() for array in arrays)


def cluster(X: Any, weight: Any, R: int, iterations: int) -> tuple[Any, Any]:
    """Return the cluster of each row, (b, n), and its squared distance to the center."""
    if not lies_there(X):
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
    if followed or not all(map(lies_there, tensors)) or has_tangent(tensors):
        return cast(tuple[Any, Any], getattr(definition, name)(*given))
    first, second = getattr(cuda, name)(*map(memory_of, given))
    return tensor_of(first), tensor_of(second)


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
        return definition.mixture(widened(x))
    return mixed_by_fused(x, first, last)


def _chunks_of(x: PrunedArguments) -> PrunedArguments:
    """Return a mixture whose chunks are items of its batch."""
    length = x.q.shape[2] // x.chunks
    near = x.keys.shape[1] - (x.chunks - 1) * length
    q = x.q.unflatten(2, (x.chunks, length)).movedim(2, 0).flatten(0, 1)
    keys, values = (rows.unfold(1, near, length).movedim(1, 0).mT.flatten(0, 1) for rows in (x.keys, x.values))
    return replace(x, q=q, keys=keys, values=values, chunks=1)
