"""Keys and values that a cache hands to a model's own attention, in place of slots that attention cannot read.

Attention of the kinds "sdpa" and "eager" takes a few operations, which are recorded until queries, mask and scale are
known. Then the cache computes the output. Any other operation raises, so no attention reads them as plain numbers.
Nothing is changed on the model, so any number of threads may read caches with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch


@dataclass(frozen=True, eq=False)
class Asked:
    """The request of attention: queries (B, H, T, d), a mask as transformers makes it, and the scale of logits."""

    q: Any
    mask: Any
    scale: float
    softcap: float | None


class UnreadError(ValueError):
    """An attention does something else with keys than the kinds "sdpa" and "eager" do."""


class Reading(Protocol):
    """A call of a layer that reads a cache."""

    @property
    def number(self) -> int:
        """The number of the layer."""

    @property
    def rows(self) -> int:
        """Positions of the call."""

    @property
    def real(self) -> tuple[Any, Any] | None:
        """Keys and values that the model's attention reads itself, if it can."""

    def answered(self, asked: Asked) -> Any:
        """Return the output (B, H, T, D), or None if the model's attention computes it from `real`."""


@dataclass(frozen=True, eq=False)
class _Record:
    """A record of the steps so far on keys or values, or on the logits or weights of attention."""

    reading: Reading
    kind: str  # "keys", "values", "logits" or "weights"
    real: Any = None  # the numbers, where attention reads them itself
    turned: bool = False  # whether the last two axes are exchanged
    copies: int = 1  # of all heads one after another; not of each head side by side
    q: Any = None
    scale: float = 1.0
    bound: float | None = None  # the factor of a hyperbolic tangent
    bounded: bool = False
    mask: Any = None


class _StandIn(torch.Tensor):  # type: ignore[misc]
    """A tensor with a shape and no numbers."""

    record: _Record

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__get__":
            name = function.__self__.__name__
        if name in _FIGURES:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs or {})
        step = _STEPS.get(name)
        found = None if step is None else step(function, *args, **kwargs or {})
        if found is None:
            raise _refusal(name or str(function), args)
        return found

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _refusal(str(function), args)

    def __repr__(self, **_: Any) -> str:
        return f"<{self.record.kind} of a cache of levattn, {tuple(self.shape)}>"


def handed_over(reading: Reading, heads: int, positions: int, like: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return stand-ins for keys and values (B, heads, positions, ·), with the batch, widths and types of `like`."""
    found = []
    for kind, array, real in zip(("keys", "values"), like, reading.real or (None, None), strict=True):
        shape = (array.shape[0], heads, positions, array.shape[3])
        found.append(_made(_Record(reading, kind, real), shape, array.dtype, array.device))
    return found[0], found[1]


def _made(record: _Record, shape: Any, dtype: Any, device: Any) -> _StandIn:
    held = record.real
    if held is not None:
        shape, dtype = held.shape, held.dtype
    found = torch.Tensor._make_wrapper_subclass(_StandIn, tuple(shape), dtype=dtype, device=device)
    found.record = record
    return found  # type: ignore[no-any-return]


def _refusal(name: str, args: Any) -> Exception:
    number = next((x.record.reading.number for x in _flat(args) if isinstance(x, _StandIn)), None)
    if name == "linear":
        return UnreadError(
            f"layer {number} of the model keeps latents, from which its heads make their keys; expected keys of each "
            "head. Such caches are small already: give a DynamicCache"
        )
    return UnreadError(
        f"layer {number} of the model calls {name} on the keys of a cache of levattn, or on what came of them; "
        "expected attention of the kind 'sdpa' or 'eager' without attention weights, dropout, sinks or other "
        "additions. Call model.set_attn_implementation('sdpa'), or give a DynamicCache"
    )


def _flat(args: Any) -> list[Any]:
    found: list[Any] = []
    for x in args if isinstance(args, tuple | list) else [args]:
        found += _flat(x) if isinstance(x, tuple | list) else [x]
    return found


# -- the steps of attention: each returns what it makes, or None if the step is none of attention ---------------------


def _after(
    function: Any, x: _StandIn, shape: Any, *args: Any, of: Any = None, dtype: Any = None, **changes: Any
) -> Any:
    """Return a stand-in after a step; `function(*args)` are the same step on real numbers, `of` in their place."""
    real = x.record.real
    if real is not None:
        real = of if of is not None else function(real, *args)
    return _made(replace(x.record, real=real, **changes), shape, dtype or x.dtype, x.device)


def _typed(function: Any, x: _StandIn, *args: Any, **kwargs: Any) -> Any:
    return _stays(function, x, *args, **kwargs) if args or kwargs else x.dtype


def _stays(function: Any, x: _StandIn, *args: Any, **kwargs: Any) -> Any:
    """Another layout or type of number: of logits and weights too."""
    of = None if x.record.real is None else function(x.record.real, *args, **kwargs)
    named = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
    kinds = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
    like = next((a.dtype for a in args if isinstance(a, torch.Tensor)), x.dtype)
    dtype = named[0] if named else kinds.get(getattr(function, "__name__", ""), like)
    return _after(function, x, x.shape, of=of, dtype=dtype)


def _index(function: Any, x: _StandIn, index: Any) -> Any:
    """Insert an axis before the axis of positions, for copies of heads; or take all by slices."""
    index = index if isinstance(index, tuple) else (index,)
    if x.record.kind not in ("keys", "values") or Ellipsis in [i for i in index if not isinstance(i, slice)]:
        return None
    at, shape = 0, list[int]()
    for i in index:
        if i is None:
            shape.append(1)
            continue
        if not isinstance(i, slice) or i.indices(x.shape[at]) != (0, x.shape[at], 1):
            return None
        shape.append(x.shape[at])
        at += 1
    shape += x.shape[at:]
    if shape not in (list(x.shape), [*x.shape[:2], 1, *x.shape[2:]]):
        return None
    return _after(function, x, shape, index)


def _expand(function: Any, x: _StandIn, *sizes: Any) -> Any:
    sizes = tuple(_flat(sizes))
    shape = [have if want == -1 else want for have, want in zip(x.shape, sizes, strict=False)]
    if len(sizes) != x.ndim or any(a != b for i, (a, b) in enumerate(zip(shape, x.shape, strict=True)) if i != 2):
        return None
    return _after(function, x, shape, *sizes) if x.ndim == 5 or shape == list(x.shape) else None


def _reshape(function: Any, x: _StandIn, *sizes: Any) -> Any:
    """Copies of heads side by side, or the same shape."""
    sizes = tuple(_flat(sizes))
    known = math.prod(size for size in sizes if size != -1)
    shape = [x.numel() // known if size == -1 else size for size in sizes] if known else list(sizes)
    B, *heads, n, d = x.shape
    if shape not in ([B, math.prod(heads), n, d], list(x.shape)) or x.ndim < 4:
        return None
    return _after(function, x, shape, *sizes)


def _repeat(function: Any, x: _StandIn, repeats: Any, dim: int | None = None, **_: Any) -> Any:
    if x.ndim != 4 or dim != 1 or not isinstance(repeats, int) or x.record.kind not in ("keys", "values"):
        return None
    B, G, n, d = x.shape
    return _after(function, x, (B, G * repeats, n, d), repeats, 1)


def _tile(function: Any, x: _StandIn, *repeats: Any) -> Any:
    sizes = tuple(_flat(repeats))
    if (
        x.ndim != 4
        or len(sizes) != 4
        or sizes[0] != 1
        or sizes[2:] != (1, 1)
        or x.record.kind not in ("keys", "values")
    ):
        return None
    B, G, n, d = x.shape
    return _after(function, x, (B, G * sizes[1], n, d), *sizes, copies=x.record.copies * sizes[1])


def _transpose(function: Any, x: _StandIn, a: int = -2, b: int = -1) -> Any:
    if x.ndim != 4 or {a % 4, b % 4} != {2, 3} or x.record.kind != "keys":
        return None
    of = None if x.record.real is None else x.record.real.transpose(2, 3)
    return _after(function, x, (*x.shape[:2], x.shape[3], x.shape[2]), of=of, turned=not x.record.turned)


def _product(function: Any, a: Any, b: Any) -> Any:
    """Queries with keys, or weights with values."""
    if isinstance(a, _StandIn):
        if a.record.kind != "weights" or not isinstance(b, _StandIn) or b.record.kind != "values":
            return None
        return _output(function, a.record, (a.record.real, b.record.real), a.shape[2])
    if b.record.kind != "keys" or not b.record.turned or a.ndim != 4:
        return None
    of = None if b.record.real is None else function(a, b.record.real)
    shape = (*a.shape[:3], b.shape[3])
    return _after(function, b, shape, of=of, dtype=a.dtype, kind="logits", q=a, turned=False)


def _output(function: Any, record: _Record, real: Any, rows: int) -> Any:
    if record.scale <= 0 or rows != record.reading.rows:
        return None
    found = _answered(record, Asked(record.q, record.mask, record.scale, record.bound))
    return function(*real) if found is None else found


def _answered(record: _Record, asked: Asked) -> Any:
    """Return the output of a layer for queries whose heads stand in the order of the heads of the keys."""
    if record.copies == 1:
        return record.reading.answered(asked)
    q = asked.q.unflatten(1, (record.copies, -1)).transpose(1, 2).flatten(1, 2)
    found = record.reading.answered(replace(asked, q=q))
    return None if found is None else found.unflatten(1, (-1, record.copies)).transpose(1, 2).flatten(1, 2)


def _times(function: Any, a: Any, b: Any) -> Any:
    return _scaled(function, a, b, lambda x: x)


def _over(function: Any, a: Any, b: Any) -> Any:
    return _scaled(function, a, b, lambda x: 1 / x) if isinstance(a, _StandIn) else None


def _scaled(function: Any, a: Any, b: Any, factor: Callable[[float], float]) -> Any:
    """Logits times a number, before or after their hyperbolic tangent."""
    x, other = (a, b) if isinstance(a, _StandIn) else (b, a)
    if isinstance(other, torch.Tensor) and not isinstance(other, _StandIn) and other.numel() == 1:
        other = float(other)
    record = x.record
    if record.kind != "logits" or record.mask is not None or not isinstance(other, int | float):
        return None
    of = None if record.real is None else function(*(r.record.real if isinstance(r, _StandIn) else r for r in (a, b)))
    if record.bounded:
        if record.bound is not None:
            return None
        bound = factor(float(other))
        return _after(function, x, x.shape, of=of, bound=bound, scale=record.scale * bound)
    return _after(function, x, x.shape, of=of, scale=record.scale * factor(float(other)))


def _tanh(function: Any, x: _StandIn) -> Any:
    record = x.record
    if record.kind != "logits" or record.bounded or record.mask is not None:
        return None
    return _after(function, x, x.shape, bounded=True)


def _masked(function: Any, a: Any, b: Any) -> Any:
    x, mask = (a, b) if isinstance(a, _StandIn) else (b, a)
    record = x.record
    if record.kind != "logits" or record.mask is not None or not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        return None
    if isinstance(mask, _StandIn) or record.bounded != (record.bound is not None):
        return None
    return _after(function, x, x.shape, mask, mask=mask)


def _softmax(function: Any, x: _StandIn, dim: int | None = None, *args: Any, dtype: Any = None, **_: Any) -> Any:
    record = x.record
    dtype = next((a for a in args if isinstance(a, torch.dtype)), dtype)
    if record.kind != "logits" or dim not in (-1, 3) or record.bounded != (record.bound is not None):
        return None
    of = None if record.real is None else torch.softmax(record.real, -1, dtype=dtype)
    return _after(function, x, x.shape, of=of, dtype=dtype, kind="weights")


def _dropout(function: Any, x: _StandIn, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: ARG001
    return x if x.record.kind == "weights" and not (p and training) else None


def _fused(
    function: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **others: Any,
) -> Any:
    if not all(isinstance(x, _StandIn) for x in (key, value)) or dropout_p or key.record.turned or query.ndim != 4:
        return None
    record, shape = key.record, query.shape
    rows = record.reading.rows
    q = query if shape[2] == rows else query.reshape(shape[0], -1, rows, shape[3])  # one query of each head, in groups
    if key.ndim != 4 or (shape[2] != rows and rows != 1):
        return None
    factor = shape[3] ** -0.5 if scale is None else float(scale)
    found = _answered(record, Asked(q, attn_mask, factor, None))
    if found is not None:
        return found.reshape(*shape[:3], found.shape[3])
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, **others}
    return function(query, record.real, value.record.real, **options)


_FIGURES = {  # what a tensor says of itself without its numbers
    "__len__",
    "device",
    "dim",
    "dtype",
    "element_size",
    "get_device",
    "grad",
    "grad_fn",
    "is_complex",
    "is_conj",
    "is_contiguous",
    "is_cpu",
    "is_cuda",
    "is_floating_point",
    "is_hpu",
    "is_inference",
    "is_leaf",
    "is_meta",
    "is_mkldnn",
    "is_mps",
    "is_neg",
    "is_nested",
    "is_npu",
    "is_quantized",
    "is_signed",
    "is_sparse",
    "is_xpu",
    "itemsize",
    "layout",
    "ndim",
    "ndimension",
    "nelement",
    "numel",
    "requires_grad",
    "shape",
    "size",
    "stride",
}
_STEPS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("contiguous", "to", "type_as", "float", "half", "bfloat16", "double", "detach", "clone"), _stays),
    **dict.fromkeys(("matmul", "__matmul__", "__rmatmul__"), _product),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "__imul__", "multiply", "mul_"), _times),
    **dict.fromkeys(("div", "__truediv__", "__itruediv__", "true_divide", "div_"), _over),
    **dict.fromkeys(("add", "__add__", "__radd__", "__iadd__", "add_"), _masked),
    **dict.fromkeys(("reshape", "view"), _reshape),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "mT"), _transpose),
    "__getitem__": _index,
    "expand": _expand,
    "repeat": _tile,
    "type": _typed,
    "repeat_interleave": _repeat,
    "tanh": _tanh,
    "softmax": _softmax,
    "dropout": _dropout,
    "scaled_dot_product_attention": _fused,
}
