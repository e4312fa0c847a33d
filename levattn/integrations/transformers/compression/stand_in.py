"""Keys and values that a cache hands to a model's own attention, in place of slots that attention cannot read.

Attention of the kinds "sdpa" and "eager" takes a few operations, which are recorded until queries, mask and scale are
known. Then the cache computes the output. Any other operation raises, so no attention reads them as plain numbers.
Nothing is changed on the model, so any number of threads may read caches with it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from levattn.attention.arguments import untraced

# Takes queries (B, H, T, d), a mask as transformers makes it, the scale of logits and their bound or None, and returns
# the output (B, H, T, D); or None if the model's attention computes it
Answer = Callable[[Any, Any, float, float | None], Any]


class UnreadError(ValueError):
    """An attention does something else with keys than the kinds "sdpa" and "eager" do."""


@dataclass(eq=False, slots=True)
class _Record:
    """A record of the steps so far on keys or values, or on the logits or weights of attention.

    number: the layer that is read. rows: positions of the call. real: whether attention reads the numbers itself.
    """

    number: int
    rows: int
    answered: Answer
    real: bool
    device: Any
    kind: str  # keys, turned keys (their last two axes exchanged), values, logits, tanh, bounded, masked or weights
    shape: Any
    dtype: Any
    held: Any = None  # the numbers, where attention reads them itself; else a meta tensor if a step needed one
    copies: int = 1  # of all heads one after another; not of each head side by side
    q: Any = None
    scale: float = 1.0
    bound: float | None = None  # the factor of a hyperbolic tangent
    mask: Any = None

    @property
    def shadow(self) -> Any:
        """A tensor of this shape and dtype, for steps that change them: most calls have none."""
        if self.held is None:
            self.held = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return self.held


class _StandIn(torch.Tensor):  # type: ignore[misc]
    """A tensor with a shape and no numbers."""

    record: _Record

    # read often, without torch's way around
    @property
    def shape(self) -> Any:
        """The shape of the numbers that it stands for."""
        return self.record.shape

    @property
    def ndim(self) -> int:
        """The number of its axes."""
        return len(self.record.shape)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # a graph would hold the shadows
            return untraced(cls.__torch_function__, function, types, args, kwargs)
        read, kwargs = getattr(function, "__name__", "") == "__get__", kwargs or {}  # read: a property
        name = getattr(function.__self__ if read else function, "__name__", "")
        kinds, step = _STEPS.get(name, ((), None))
        if step is None and (read or name.startswith("is_") or name in _FIGURES):
            with torch._C.DisableTorchFunctionSubclass():
                found = function(*args, **kwargs)
            if not isinstance(found, torch.Tensor):
                return found
        first = next(_stand_ins((args, list(kwargs.values()))))
        made = step(function, *args, **kwargs) if step is not None and first.record.kind in kinds else None
        if made is None:
            raise _refusal(name or str(function), first, args)
        if name.startswith("__i") or name.strip("_") + "_" == name:  # in place
            first.record = made.record
            return first
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _refusal(str(function), next(_stand_ins((args, list((kwargs or {}).values())))), args)

    def __repr__(self, **_: Any) -> str:
        return f"<{self.record.kind} of a cache of levattn, {tuple(self.shape)}>"


class _Formed(threading.local):
    latest: Sequence[weakref.ref[_StandIn]] = ()  # the two weights of attention that were last in use in a thread
    number: int = -1  # of the layer whose keys were last handed over in it


_formed = _Formed()


def handed_over(number: int, rows: int, answered: Answer, arrays: Sequence[Any], length: int | None) -> list[Any]:
    """Return stand-ins for the keys and values that the last `rows` positions read in a layer.

    `length`: how many they are, of which `arrays` are the last; None if the model's attention reads the arrays.
    """
    if number <= _formed.number:  # another call begins, and an error may still hold weights of an earlier one
        _formed.latest = ()
    _formed.number = number
    kept = [x for x in (weights() for weights in _formed.latest) if x is not None]
    if len(kept) == 2:  # some models keep one until the next layer returns
        raise UnreadError(
            f"the weights of attention of layer {kept[0].record.number} are kept, as by output_attentions=True; "
            "expected not, as weights are not formed over slots. Leave output_attentions out, or give a DynamicCache"
        )
    made = []
    for kind, array in zip(("keys", "values"), arrays, strict=True):
        shape, held = array.shape, array
        if length is not None:
            shape, held = torch.Size((*shape[:2], length, shape[3])), None
        made.append(
            _made(_Record(number, rows, answered, length is None, array.device, kind, shape, array.dtype, held))
        )
    return made


def _made(record: _Record) -> _StandIn:
    found = torch.Tensor._make_wrapper_subclass(_StandIn, record.shape, dtype=record.dtype, device=record.device)
    found.record = record
    return found  # type: ignore[no-any-return]


def _stand_ins(args: Any) -> Iterator[_StandIn]:
    for x in args:
        if isinstance(x, _StandIn):
            yield x
        elif isinstance(x, tuple | list):
            yield from _stand_ins(x)


def _refusal(name: str, x: _StandIn, args: Any) -> Exception:
    layer = f"layer {x.record.number} of the model"
    if name == "linear":
        return UnreadError(
            f"{layer} keeps latents, from which its heads make their keys; expected keys of each head. Such caches "
            "are small already: give a DynamicCache"
        )
    if name == "transpose" and {*args[1:]} == {1, 2}:
        name = "transpose(1, 2), as attention of the kind 'flash_attention_2' does,"
    return UnreadError(
        f"{layer} calls {name} on the keys of a cache of levattn, or on what came of them; expected attention of the "
        "kind 'sdpa' or 'eager' without attention weights, dropout, sinks or other additions. Call "
        "model.set_attn_implementation('sdpa'), or give a DynamicCache"
    )


# -- the steps of attention: each returns what it makes, or None if the step is none of attention ---------------------


def _after(x: _StandIn, shadow: Any, **changes: Any) -> _StandIn:
    """Return a stand-in after a step."""
    return _made(replace(x.record, shape=shadow.shape, dtype=shadow.dtype, held=shadow, **changes))


def _stays(function: Any, x: _StandIn, *args: Any, **kwargs: Any) -> Any:
    """Another layout or type of number."""
    shadow = x.record.shadow
    if function.__name__ == "type" and not args:
        return None
    if x.record.real or not (args or kwargs):
        return _after(x, function(shadow, *args, **kwargs))
    types = [getattr(arg, "dtype", arg) for arg in (*args, *kwargs.values())]  # without devices
    return _after(x, shadow.to(next((kind for kind in types if isinstance(kind, torch.dtype)), shadow.dtype)))


def _layout(function: Any, x: _StandIn, *args: Any, **kwargs: Any) -> Any:
    """The same heads, or copies of them, side by side or one after another."""
    sizes = tuple if function.__name__ == "__getitem__" else tuple | list
    parts = args[0] if args and isinstance(args[0], sizes) else args
    if not all(part is None or part is ... or isinstance(part, int | slice) for part in (*parts, *kwargs.values())):
        return None
    found = function(x.record.shadow, *args, **kwargs)
    if found.ndim not in (4, 5) or (found.shape[0], *found.shape[-2:]) != (x.shape[0], *x.shape[-2:]):
        return None
    before, now = x.shape[1:-2], found.shape[1:-2]  # heads, and copies of each if they have an axis
    if now[0] % math.prod(before) if len(now) == 1 else now[0] != before[0] or (len(before) == 1 and now[1] > 1):
        return None
    again = now[0] // before[0] if function.__name__ in ("repeat", "tile") else 1
    return _after(x, found, copies=x.record.copies * again)


def _transpose(_: Any, x: _StandIn, dim0: int = -2, dim1: int = -1) -> Any:
    if x.ndim != 4 or {dim0 % 4, dim1 % 4} != {2, 3}:
        return None
    return _after(x, x.record.shadow.transpose(2, 3), kind="turned keys" if x.record.kind == "keys" else "keys")


def _product(function: Any, a: Any, b: Any) -> Any:
    """Queries with keys, or weights with values."""
    if not isinstance(b, _StandIn) or a.ndim != 4 or b.ndim != 4:
        return None
    kinds = [x.record.kind for x in (a, b) if isinstance(x, _StandIn)]
    if kinds == ["turned keys"]:
        real, shape = b.record.real, (*a.shape[:3], b.shape[3])
        logits = function(a, b.record.shadow) if real else a.new_empty(shape, device="meta")
        return _after(b, logits, kind="logits", q=a)
    if kinds != ["weights", "values"] or a.record.scale <= 0 or a.shape[2] != a.record.rows:
        return None
    found = _answered(a.record, a.record.q, a.record.mask, a.record.scale, a.record.bound)
    if found is None:
        return function(a.record.shadow, b.record.shadow)
    _formed.latest = [*_formed.latest[-1:], weakref.ref(a)]
    return found


def _answered(record: _Record, q: Any, mask: Any, scale: float, bound: float | None) -> Any:
    """Return the output of a layer for queries whose heads stand in the order of the heads of the keys."""
    if record.copies == 1:
        return record.answered(q, mask, scale, bound)
    q = q.unflatten(1, (record.copies, -1)).transpose(1, 2).flatten(1, 2)
    found = record.answered(q, mask, scale, bound)
    return None if found is None else found.unflatten(1, (-1, record.copies)).transpose(1, 2).flatten(1, 2)


def _scaled(function: Any, a: Any, b: Any) -> Any:
    """Logits times or over a number, before or after their hyperbolic tangent."""
    x, other = (a, b) if isinstance(a, _StandIn) else (b, a)
    over, number = "div" in function.__name__, other
    if isinstance(other, torch.Tensor) and not isinstance(other, _StandIn) and other.numel() == 1:
        number = float(other)
    if not isinstance(number, int | float) or (over and x is b):
        return None
    factor = 1 / number if over else number
    shadow = function(x.record.shadow, other if x.record.real else number)
    if x.record.kind == "tanh":
        return _after(x, shadow, kind="bounded", bound=factor, scale=x.record.scale * factor)
    return _after(x, shadow, scale=x.record.scale * factor)


def _masked(function: Any, a: Any, b: Any) -> Any:
    x, mask = (a, b) if isinstance(a, _StandIn) else (b, a)
    if not isinstance(mask, torch.Tensor) or isinstance(mask, _StandIn) or mask.ndim != 4:
        return None
    return _after(x, function(x.record.shadow, mask.to(x.record.shadow.device)), kind="masked", mask=mask)


def _softmax(function: Any, x: _StandIn, dim: int | None = None, *args: Any, **kwargs: Any) -> Any:
    return _after(x, function(x.record.shadow, dim, *args, **kwargs), kind="weights") if dim in (-1, 3) else None


def _fused(function: Any, query: Any, key: Any, value: Any, *more: Any, **options: Any) -> Any:
    options = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), more, strict=False)), **options}
    kinds = [x.record.kind for x in (key, value) if isinstance(x, _StandIn)]
    if kinds != ["keys", "values"] or options.get("dropout_p") or query.ndim != 4 or key.ndim != 4:
        return None
    record, shape, rows = key.record, query.shape, key.record.rows
    if shape[2] != rows and rows != 1:
        return None
    q = query if shape[2] == rows else query.reshape(shape[0], -1, rows, shape[3])  # one query of each head, in groups
    scale = options.get("scale")
    scale = shape[3] ** -0.5 if scale is None else float(scale)
    found = _answered(record, q, options.get("attn_mask"), scale, None)
    if found is None:
        return function(query, record.shadow, value.record.shadow, **options)
    return found if q is query else found.reshape(*shape[:3], found.shape[3])


_FIGURES = {"__len__", "dim", "element_size", "get_device", "ndimension", "nelement", "numel", "size", "stride"}
_KEYS = ("keys", "turned keys")
_ANY = (*_KEYS, "values", "logits", "tanh", "bounded", "masked", "weights")
_STEPS: dict[str, tuple[tuple[str, ...], Any]] = {  # names of torch: of which kinds of stand-ins they are steps
    name: (kinds, step)
    for names, kinds, step in (
        ("contiguous to type type_as float half bfloat16 double detach clone", _ANY, _stays),
        ("__getitem__ unsqueeze expand reshape view flatten", (*_KEYS, "values"), _layout),
        ("repeat tile repeat_interleave", (*_KEYS, "values"), _layout),
        ("transpose swapaxes swapdims mT", _KEYS, _transpose),
        ("matmul __matmul__", ("turned keys", "weights"), _product),
        ("mul __mul__ __rmul__ __imul__ multiply mul_", ("logits", "tanh"), _scaled),
        ("div __truediv__ __itruediv__ true_divide div_", ("logits", "tanh"), _scaled),
        ("tanh", ("logits",), lambda function, x: _after(x, function(x.record.shadow), kind="tanh")),
        ("add __add__ __radd__ __iadd__ add_", ("logits", "bounded"), _masked),
        ("softmax", ("logits", "bounded", "masked"), _softmax),
        ("dropout", ("weights",), lambda _, x, p=0.5, training=True, **__: None if p and training else x),
        ("scaled_dot_product_attention", ("keys",), _fused),
    )
    for name in names.split()
}
