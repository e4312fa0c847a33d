"""Shared code of the operators: check arguments, bring them into one form, and call the kernels."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._core.arrays import (
    array_namespace,
    as_cupy,
    check_flags,
    from_list,
    is_torch,
    on_cuda,
    to_device,
    to_numpy,
    with_shape,
)
from levattn._core.checks import check_offsets, refuse_masked_tensor, shown
from levattn._core.types import dtype_name, format_of
from levattn._kernels import LatentArguments, kernels_for
from levattn._kernels.latent import State
from levattn.states import SoftmaxState

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiling() -> bool:
    """Tell whether torch is tracing the call, so that values are not available."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def untraced(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of a call, run by Python even under torch's compiler, because states are not tensors."""
    if not compiling():
        return function(*arguments, **options)
    from levattn._kernels import tensors

    return tensors.untraced(function, *arguments, **options)


def reads_numbers(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function that reads numbers refuse tensors without any, and be left to Python by torch's compiler."""

    @wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        if sys.modules.get("torch") is None:
            return function(*args, **options)
        return untraced(_read, function, *args, **options)  # type: ignore[no-any-return]

    return call


def _read(function: Any, *args: Any, **options: Any) -> Any:
    if given := [value for value in (*args, *options.values()) if is_torch(value)]:
        from levattn._kernels.tensors import hidden_by

        if (what := hidden_by(given)) is not None:
            raise NotImplementedError(
                f"{function.__name__} was called under {what}, which hides the numbers that the call reads; expected "
                "a call without it, on tensors that hold numbers. Leading axes are a batch, in place of vmap"
            )
    return function(*args, **options)


def cumulative(offsets: Any, T: int) -> Any:
    """Return the bounds of packed sequences, (n + 1,) int64 in main memory, or None if there is only one.

    While torch traces the call, the result is a tensor, which the operator checks when it runs.
    """
    if offsets is None:
        return None
    if compiling():
        torch = sys.modules["torch"]
        return torch.as_tensor(offsets, dtype=torch.int64)
    return check_offsets(_whole_numbers("offsets", offsets), T)


def given_bounds(bounds: Any, T: int) -> Any:
    """Return bounds for kernels; for None, the bounds of one sequence, or None while torch traces the call.

    An array would make T a constant of the graph; the operator knows T when it runs.
    """
    return np.array([0, T], np.int64) if bounds is None and not compiling() else bounds


def refuse_packed(bounds: Any, state: Any, return_state: bool) -> None:
    """Raise if packed sequences come with a state, or are to return one."""
    if bounds is not None and (state is not None or return_state):
        raise ValueError(
            "offsets were given with state or return_state; expected one sequence. Call this for each "
            "sequence, or stack sequences of equal length along a leading axis"
        )


def _whole_numbers(name: str, given: Any) -> npt.NDArray[np.int64]:
    """Return one axis of whole numbers as a numpy array, or raise."""
    array = from_list(given, name, np.int64) if isinstance(given, list | tuple) else given
    found = to_numpy(array) if array_api_compat.is_array_api_obj(array) else np.asarray(None)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(f"{name} is {given!r}; expected one axis of whole numbers")
    if found.size and found.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} is {shown(found)}; expected whole numbers below 2**63")
    return found.astype(np.int64)


_Record = TypeVar("_Record")


def namespace_of(array: Any) -> Any:
    """Return the functions of an array's library, by the names of the array-API standard."""
    if not isinstance(array, np.ndarray) and is_torch(array):
        from array_api_compat import torch as functions

        return functions
    return array_namespace(array)


def launched_again(name: str, arrays: tuple[Any, ...], others: Hashable, call: Callable[[], Any]) -> Any:
    """Return the array that `call` returns; for plain tensors on a device by its kept launches, if there are any.

    `arrays`: all that it reads. `others`: its other arguments, of types that compare as they differ.
    """
    if not compiling() and is_torch(arrays[0]) and arrays[0].is_cuda:
        from levattn._kernels import tensors

        found = tensors.repeated_on_device(name, arrays, others, call)
        if found is not None:
            return found
    return call()


def plain_arrays(*arrays: Any) -> tuple[tuple[Any, ...], bool]:
    """Return plain torch tensors in main memory as numpy arrays, and whether they were tensors.

    The operators' calls to torch would take longer than a short call of the kernels.
    """
    if is_torch(arrays[0]):
        from levattn._kernels import tensors

        found = tensors.memories_of(arrays)
        if found is not None:
            return found, True
    return arrays, False


def as_given(array: Any, were_tensors: bool) -> Any:
    """Return a result for arrays from `plain_arrays` in the type of the input."""
    return sys.modules["torch"].from_numpy(array) if were_tensors else array


def changed(record: _Record, **fields: Any) -> _Record:
    """Return a frozen dataclass with changed fields, in a tenth of the time of `replace`."""
    other = object.__new__(type(record))
    vars(other).update(vars(record))
    vars(other).update(fields)
    return other


def device_of(array: Any) -> Any:
    """Return the device of an array."""
    return array.device if is_torch(array) else array_api_compat.device(array)


def without_gradient(array: Any) -> Any:
    """Return an array detached from gradients of torch."""
    return array.detach() if is_torch(array) else array


def followable(array: Any) -> Any:
    """Copy a tensor that torch made in inference mode, because outside it torch cannot save it for a gradient."""
    if is_torch(array):
        torch = sys.modules["torch"]
        if not torch.compiler.is_compiling() and array.is_inference() and not torch.is_inference_mode_enabled():
            return array.clone()
    return array


def empty_output(q: Any, K: Any, V: Any) -> Any:
    """Return the output (b, g, T, D) of attention without rows.

    q: (b, g, T, d). K, V: (b, n, d) and (b, n, D). The output is a product of all three, so gradients of torch, all
    zero, have a way to them.
    """
    xp = namespace_of(q)
    Y = xp.matmul(xp.matmul(q, xp.matrix_transpose(K)[:, None, :, :]), V[:, None, :, :])
    return xp.astype(Y, V.dtype, copy=False)  # autocast makes products of half precision


def rows_of_items(X: Any, which: Any) -> Any:
    """Return some rows of each item of an array (b, ..., n, C), by their numbers (b, m): (b, ..., m, C)."""
    xp = namespace_of(X)
    *batch, n, C = X.shape
    b, m = which.shape
    each = math.prod(batch) // b if b else 1
    first = n * xp.arange(b * each, device=device_of(X))
    flat = xp.reshape(first, (b, each, 1)) + which[:, None, :]
    found = xp.take(xp.reshape(X, (b * each * n, C)), xp.reshape(flat, (-1,)), axis=0)
    return xp.reshape(found, (*batch, m, C))


def masked_first(mask: Any, offsets: Any = None) -> Any:
    """Return the order (b, n) of positions in which masked positions are the first of their sequence.

    So the positions that take part are adjacent. `offsets`: as `cumulative` returns it.
    """
    xp = namespace_of(mask)
    rank = xp.astype(mask, xp.int64)
    if offsets is not None:
        device = device_of(mask)
        ends, rows = xp.asarray(offsets, device=device), xp.arange(mask.shape[1], device=device)
        rank = rank + 2 * xp.searchsorted(ends[1:], rows, side="right")
    return xp.argsort(rank, axis=1, stable=True)


def running_counts(flags: Any) -> Any:
    """Return the number of flags (b, n, ...) set before each place along the second axis, (b, n + 1, ...)."""
    if is_torch(flags):  # torch's compiler warns about the array-API namespace here
        return sys.modules["torch"].cat([flags.new_zeros(flags[:, :1].shape), flags], 1).cumsum(1)
    xp = array_namespace(flags)
    return xp.cumulative_sum(xp.astype(flags, xp.int64), axis=1, include_initial=True)


@dataclass(frozen=True, eq=False)
class Stacks:
    """The arrays of a call in the form that the kernels read.

    stacks: (b, ...) arrays of one library, device and dtype (float32 or float64), in the order of the arguments.
        Arrays of 16 bits may stay as they are. A missing argument is None. Tensors of torch still carry gradients.
    mask: (b, U) bool, or None.
    batch: the leading axes, whose product is b.
    dtype: the dtype of results.
    """

    stacks: tuple[Any, ...]
    mask: Any
    batch: tuple[int, ...]
    dtype: Any

    def give_back(self, array: Any) -> Any:
        """Return (b, ...) as (batch..., ...) in the caller's dtype."""
        array = reshaped(array, (*self.batch, *array.shape[1:]))
        if isinstance(array, np.ndarray):
            return array.astype(self.dtype, copy=False)
        return namespace_of(array).astype(array, self.dtype, copy=False)


def dense_array(name: str, array: Any) -> Any:
    """Return a dense array of any library, converting lists to numpy, or raise."""
    if type(array) is np.ndarray:
        return array
    if isinstance(array, np.ndarray):
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"{name} is a masked array; expected a plain array. Give {name}.data, and leave rows out with mask="
            )
        return array
    if isinstance(array, list | tuple):
        return from_list(array, name)
    if is_torch(array):
        refuse_masked_tensor(array, name)
        if array.is_nested or array.layout is not sys.modules["torch"].strided:
            raise TypeError(
                f"{name} is a nested or sparse torch tensor; expected a dense tensor. Convert it first: "
                f"{name}.to_dense(), or torch.nested.to_padded_tensor({name}, 0.0)"
            )
        return array
    if array_api_compat.is_array_api_obj(array) and not array_api_compat.is_lazy_array(array):
        return array
    raise TypeError(
        f"{name} is of type {type(array).__name__}; expected a dense array (numpy, torch, CuPy or another namespace "
        "of the array-API standard). Convert it first"
    )


def dense_arrays(given: dict[str, tuple[Any, str]], optional: tuple[str, ...] = ()) -> list[Any]:
    """Return the arrays of a call as dense arrays, or raise unless their shared sizes are equal.

    A letter names each of the last axes of an array; axes with the same letter have equal sizes. None stays None for
    `optional` arrays.
    """
    arrays = {
        name: None if array is None and name in optional else dense_array(name, array)
        for name, (array, _) in given.items()
    }
    found = list(arrays.values())
    named = [(axes, array.shape) for array, (_, axes) in zip(found, given.values(), strict=True) if array is not None]
    if all(type(array) is np.ndarray for array in found) and _agree(tuple(named)):
        return found
    check_sizes(
        {
            f"{name} {letter}": (arrays[name], axis - len(axes), letter)
            for name, (_, axes) in given.items()
            for axis, letter in enumerate(axes)
            if arrays[name] is not None
        }
    )
    return found


@lru_cache(1024)
def _agree(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> bool:
    """Tell whether the shared sizes of shapes are equal; letters before each shape name its last axes."""
    known: dict[str, int] = {}
    return all(
        len(shape) >= len(axes)
        and all(known.setdefault(*size) == size[1] for size in zip(axes, shape[-len(axes) :], strict=True))
        for axes, shape in shapes
    )


def stack_arguments(
    arguments: dict[str, tuple[Any, int]],
    *,
    like: str,
    mask: tuple[Any, int] | None = None,
    stored: tuple[str, ...] = (),
) -> Stacks:
    """Check the arrays of a call, promote them to one dtype, broadcast their leading axes and stack these.

    `arguments` names each array and its number of axes after the leading axes; an array may be None. `like` names the
    array whose dtype the results have. `mask` is the caller's mask and the number of positions; it is moved to the
    device of the arrays. The last axis of stacks of numpy and CuPy is contiguous. The arrays of 16 bits that
    `stored` names stay unchanged, unless another array is float64.
    """
    arrays = {name: (dense_array(name, given), axes) for name, (given, axes) in arguments.items() if given is not None}
    first, flags = next(iter(arrays)), None
    if all(type(array) is np.ndarray for array, _ in arrays.values()):
        if mask is not None and mask[0] is not None:
            flags = _flags(*mask, arrays[first][0])
        named = [(name, axes, array.shape, array.dtype) for name, (array, axes) in arrays.items()]
        double, batch = _known_layout(tuple(named), None if flags is None else flags.shape[:-1])
    else:
        double, leading = _layout(arrays)
        refuse_mixtures(first, {name: array for name, (array, _) in arrays.items()})
        if mask is not None and mask[0] is not None:
            flags = _flags(*mask, arrays[first][0])
            leading["mask"] = tuple(flags.shape[:-1])
        batch = _broadcast(leading)
    numbers = {
        name: array if name in stored and not double else promoted(array, double)
        for name, (array, _) in arrays.items()
    }
    stacks = [
        None if given is None else _stacked(numbers[name], batch, axes) for name, (given, axes) in arguments.items()
    ]
    return Stacks(tuple(stacks), None if flags is None else _stacked(flags, batch, 1), batch, arrays[like][0].dtype)


def _layout(arrays: dict[str, tuple[Any, int]]) -> tuple[bool, dict[str, tuple[int, ...]]]:
    """Return whether any array is float64, and the leading axes of each, or raise; each comes with its other axes."""
    leading: dict[str, tuple[int, ...]] = {}
    double = False
    for name, (array, axes) in arrays.items():
        if array.ndim < axes:
            _refuse_short(name, array, axes)
        if axes > 1 and not array.shape[-1]:
            raise ValueError(f"{name} has shape {tuple(array.shape)}; expected at least one column (its last axis)")
        double = is_double(name, array) or double
        leading[name] = tuple(array.shape[: array.ndim - axes])
    return double, leading


@lru_cache(1024)
def _known_layout(
    named: tuple[tuple[str, int, tuple[int, ...], Any], ...], flags: tuple[int, ...] | None
) -> tuple[bool, tuple[int, ...]]:
    """Return whether any numpy array is float64, and the broadcast leading axes, or raise.

    named: the names of arrays, the number of their other axes, shapes and dtypes. flags: the leading axes of a mask.
    """
    alike = {name: (np.broadcast_to(np.empty((), dtype), shape), axes) for name, axes, shape, dtype in named}
    double, leading = _layout(alike)
    return double, _broadcast(leading if flags is None else leading | {"mask": flags})


def check_sizes(sizes: dict[str, tuple[Any, int, str]]) -> None:
    """Raise unless the shared sizes of arrays are equal: each entry is (array, axis from the end, symbol).

    The first array with a symbol sets its size. A key is the array's name, and may have more text after a space.
    """
    known: dict[str, tuple[int, str]] = {}
    for label, (array, axis, symbol) in sizes.items():
        name = label.partition(" ")[0]
        if array.ndim < -axis:
            _refuse_short(name, array, -axis)
        size = array.shape[axis]
        expected, owner = known.setdefault(symbol, (size, name))
        if size != expected:
            raise ValueError(
                f"{name} has shape {tuple(array.shape)}; expected {symbol} = {expected} along axis {axis}, "
                f"as {owner} has"
            )


def state_stacks(state: Any, batch: tuple[int, ...], bounds: Any, K: Any, V: Any) -> State | None:
    """Check a state of earlier positions, and return its arrays as (b, n, ...) in the library of the stacks K and V.

    `bounds` is the result of `cumulative`. None stays None; for torch in main memory the arrays are numpy arrays.
    """
    if state is None:
        return None
    if not isinstance(state, SoftmaxState):
        raise TypeError(f"state is of type {type(state).__name__}; expected a levattn.states.SoftmaxState")
    n, L, D = 1 if bounds is None else len(bounds) - 1, K.shape[2], V.shape[2]
    expected = batch if bounds is None else (*batch, n)
    if (state.batch, state.latents, state.d) != (expected, L, D):
        raise ValueError(
            f"state has batch {state.batch}, {state.latents} latents and d = {state.d}; expected batch {expected}, "
            f"{L} latents and d = {D}, as the logits and values have"
        )
    b = math.prod(batch)
    parts = (reshaped(part, (b, n, *part.shape[len(expected) :])) for part in (state.m, state.s, state.S))
    here = isinstance(K, np.ndarray) or is_torch(K)
    m, s, S = (to_device(part, K) if not here and isinstance(part, np.ndarray) else part for part in parts)
    return m, s, S


def state_after(state: Any, batch: tuple[int, ...], bounds: Any, K: Any, V: Any, mask: Any) -> SoftmaxState:
    """Return the state after the positions of stacks, from an earlier state or from None."""
    return untraced(_state_after, state, batch, bounds, K, V, mask)  # type: ignore[no-any-return]


def _state_after(state: Any, batch: tuple[int, ...], bounds: Any, K: Any, V: Any, mask: Any) -> SoftmaxState:
    ends = np.array([0, K.shape[1]], np.int64) if bounds is None else np.asarray(bounds)
    axes = batch if bounds is None else (*batch, len(bounds) - 1)
    parts = kernels_for("latent", K).summary(K, V, mask, ends)
    m, s, S = (reshaped(part, (*axes, *part.shape[2:])) for part in parts)
    new = SoftmaxState.from_arrays(m, s, S)
    return new if state is None else state.copy().merge(new)


def latent_attention(Q: Any, K: Any, V: Any, *, offsets: Any = None, **options: Any) -> Any:
    """Return the output (b, T, D) of latent attention on stacks, by their kernels; see `LatentArguments`.

    offsets: the result of `cumulative`. Gradients of torch reach Q, K, V, gate and gate_value.
    """
    return kernels_for("latent", Q).forward(LatentArguments(Q, K, V, given_bounds(offsets, Q.shape[1]), **options))


def _refuse_short(name: str, array: Any, axes: int) -> None:
    raise ValueError(
        f"{name} has shape {tuple(array.shape)}; expected at least {axes} axes. Add the missing axes, e.g. "
        f"{name}[None, ...]"
    )


def refuse_mixtures(first: str, arrays: dict[str, Any]) -> None:
    """Raise unless all arrays are of the same library and on the same device."""
    head = arrays[first]
    if isinstance(head, np.ndarray):
        same = all(isinstance(array, np.ndarray) for array in arrays.values())
    else:
        home = _home(head)
        same = all(_home(array) == home for array in arrays.values())
    if not same:
        other = next(name for name, array in arrays.items() if _home(array) != _home(head))
        came, expected = (" on ".join(map(str, _home(array))) for array in (arrays[other], head))
        raise TypeError(f"{other} is of {came}, and {first} of {expected}; expected one library and device for both")


def _home(array: Any) -> tuple[Any, Any]:
    """Return the library and the device of an array."""
    if isinstance(array, np.ndarray):
        return "numpy", "cpu"
    if is_torch(array):
        return "torch", array.device
    return type(array).__module__.partition(".")[0], array_api_compat.device(array)


def is_double(name: str, array: Any) -> bool:
    """Tell whether an array of real floats is float64, or raise for another kind."""
    if isinstance(array, np.ndarray) and array.dtype.char in "fd":
        return bool(array.dtype.char == "d")
    return format_of(array.dtype, name, f"{name} to float64") == "float64"


def is_wide(array: Any) -> bool:
    """Tell whether an array is float64 by the name of its dtype, which torch's compiler can trace."""
    if isinstance(array, np.ndarray):
        return dtype_name(array.dtype) == "float64"  # in any order of bytes
    return str(array.dtype).endswith("float64")


def promoted(array: Any, double: bool) -> Any:
    """Return an array in the dtype of the computation, with a contiguous last axis where kernels read it."""
    if isinstance(array, np.ndarray):
        array = np.asarray(array, np.float64 if double else np.float32)
        return array if array.flags.aligned and _is_dense_along_rows(array) else array.copy()
    xp = namespace_of(array)
    array = xp.astype(array, xp.float64 if double else xp.float32, copy=False)
    return array if is_torch(array) or not on_cuda(array) or _is_dense_along_rows(array) else array.copy()


def _is_dense_along_rows(array: Any) -> bool:
    return bool(array.strides[-1] == array.itemsize or array.shape[-1] == 1)


def _broadcast(shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape to which named leading axes broadcast, or raise."""
    first, *others = shapes.values()
    if all(shape == first for shape in others):
        return first
    axes = max(len(shape) for shape in shapes.values())
    batch = []
    for axis in range(-axes, 0):
        # no set, whose entries torch would make constants of a graph
        sizes = [shape[axis] for shape in shapes.values() if len(shape) >= -axis and shape[axis] != 1]
        if any(size != sizes[0] for size in sizes[1:]):
            shown = ", ".join(f"{shape} of {name}" for name, shape in shapes.items())
            raise ValueError(
                f"the leading axes {shown} do not broadcast; expected equal sizes, or 1, along each, from the last"
            )
        batch.append(sizes[0] if sizes else 1)
    return tuple(batch)


def _stacked(array: Any, batch: tuple[int, ...], axes: int) -> Any:
    """Return (..., axes) as (b, axes), broadcast; a copy only if the leading axes cannot share a stride."""
    last = tuple(array.shape[array.ndim - axes :])
    shape, full = (math.prod(batch), *last), (*batch, *last)
    if tuple(array.shape) == shape:
        return array
    if isinstance(array, np.ndarray) and array.size == math.prod(shape):
        return array.reshape(shape)
    if tuple(array.shape) != full:
        array = namespace_of(array).broadcast_to(array, full)
    return reshaped(array, shape)


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """Return an array of any library in another shape."""
    if type(array) is np.ndarray:
        return array.reshape(shape)
    return namespace_of(array).reshape(array, shape) if is_torch(array) else with_shape(array, shape)


def moved(array: Any, like: Any) -> Any:
    """Return an array in the library and on the device of another."""
    if _home(array) == _home(like):
        return array
    if is_torch(array) and is_torch(like):
        return array.to(like.device)
    if on_cuda(like) and (shared := as_cupy(array)) is not None:
        return shared
    found = to_numpy(array)
    # a backward pass of torch may read it after the caller has refilled the array
    return to_device(found.copy() if is_torch(like) else found, like)


def _flags(mask: Any, U: int, like: Any) -> Any:
    """Return a (..., U) boolean mask in the library and on the device of an array, or raise."""
    if type(mask) is type(like) is np.ndarray and mask.dtype.char == "?" and mask.shape[-1:] == (U,):
        return mask
    mask = from_list(mask, "mask", np.bool_) if isinstance(mask, list | tuple) else dense_array("mask", mask)
    check_flags("mask", mask, (..., U), "a position that takes part")
    return moved(mask, like)


@dataclass(frozen=True)
class Heads:
    """Numbers of heads."""

    shared: int  # key and value heads, G
    group: int  # query heads that read each of them
    bare: bool  # whether no argument has an axis of heads

    def per_query(self, name: str, array: Any, axes: int) -> Any:
        """Return a dense array (..., H, axes) as (..., G, H / G, axes).

        It may also have one head for each group, or for all; the other size is then 1.
        """
        xp = namespace_of(array)
        last = tuple(array.shape[array.ndim - axes :])
        if array.ndim == axes:
            return array[None, ...]
        lead, heads = tuple(array.shape[: array.ndim - axes - 1]), array.shape[array.ndim - axes - 1]
        if heads == self.shared * self.group:
            split = (self.shared, self.group)
        elif heads in (1, self.shared):
            split = (heads, 1)
        else:
            raise ValueError(
                f"{name} has shape {tuple(array.shape)}; expected {self.shared * self.group} heads as the queries have"
                + (f", or {self.shared} as the keys have" if self.group > 1 else "")
            )
        return xp.reshape(array, (*lead, *split, *last))

    def of_queries(self, **arrays: Any) -> dict[str, tuple[Any, int]]:
        """Return dense arrays (..., H, T, n) in the form for `stacked`: (..., G, H / G, T, n), of 3 axes each."""
        return {name: (self.per_query(name, array, 2), 3) for name, array in arrays.items()}

    def joined(self, array: Any, axes: int = 2) -> Any:
        """Return a result (..., G, H / G, axes) as (..., H, axes)."""
        shape = self.leading(tuple(array.shape[: array.ndim - axes - 1])) + tuple(array.shape[array.ndim - axes :])
        return namespace_of(array).reshape(array, shape)

    def leading(self, batch: tuple[int, ...]) -> tuple[int, ...]:
        """Return the leading axes of a result from the leading axes of keys and values."""
        return batch if self.bare else (*batch[:-1], self.shared * self.group)


def heads_of(q: Any, k: Any, V: Any, *, names: tuple[str, str, str] = ("q", "k", "V")) -> Heads:
    """Return the heads of dense queries, keys and values, or raise an error with the caller's names."""
    heads = [array.shape[-3] if array.ndim > 2 else 1 for array in (q, k, V)]
    shared = max(heads[1:])
    if not all(heads):
        raise ValueError(f"{', '.join(names)} have {heads} heads; expected at least one of each")
    if any(count not in (1, shared) for count in heads[1:]):
        raise ValueError(f"{names[1]} has {heads[1]} heads and {names[2]} has {heads[2]}; expected as many")
    if heads[0] % shared and heads[0] != 1:
        raise ValueError(
            f"{names[0]} has {heads[0]} heads and {names[1]} has {shared}; expected a multiple, so that each head of "
            f"{names[1]} serves equally many of {names[0]}"
        )
    return Heads(shared, max(1, heads[0] // shared), all(array.ndim == 2 for array in (q, k, V)))
