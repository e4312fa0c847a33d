"""Pruned attention of tensors in main memory by compiled kernels, with gradients of a mixture by softmax.

The selection has no gradient, and runs on the memory of plain tensors. Second derivatives, gradients in batches and
powers follow the definitions, and so do tensors that are not plain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from levattn._kernels.dispatch import kernels_for
from levattn._kernels.pruned import PrunedArguments, PrunedGradients, Summaries, definition, differentiable, mapped
from levattn._kernels.tensors import in_plain_memory, memory_of, tensor_of


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


def row_moments(X: Any, squares: bool) -> tuple[Any, Any]:
    """Return the sums (b, d) of rows and, if `squares`, the sums (b, d, d) of x xᵀ in float64."""
    return cast(tuple[Any, Any], on_memory("row_moments", X, squares))


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
