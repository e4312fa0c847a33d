"""Input arrays: their namespace, device and memory, and the conversion of results back to the caller's kind."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._core.checks import refuse_masked_tensor
from levattn._core.jax import from_jax, is_jax, to_jax
from levattn._core.sparse import Csr, from_csr, is_scipy_sparse
from levattn._core.types import decode_half, dtype_name, format_of


class _Memory(ctypes.c_char * 2**62):  # type: ignore[misc]  # larger than any array: the sizes of an array bound what is read
    """Memory that an array reads; it keeps the tensor alive."""

    __slots__ = ("tensor",)


class _Kinds(dict[Any, np.dtype[Any]]):
    """The dtype of numpy for each dtype of torch, by its name."""

    def __missing__(self, dtype: Any) -> np.dtype[Any]:
        self[dtype] = found = np.dtype(str(dtype).rpartition(".")[2])
        return found


_KINDS = _Kinds()


@cache
def _with_memory() -> tuple[type, ...]:
    """Return the types of tensors that may have memory of their own."""
    torch = sys.modules["torch"]
    return torch.Tensor, torch.nn.Parameter


def memory_of_tensor(tensor: Any) -> npt.NDArray[Any]:
    """Return a dense tensor in main memory as a numpy array on the same memory, without its gradient.

    ``tensor.numpy()`` would do the same, but it forbids for good to resize the memory, as FSDP does with parameters.
    """
    if type(tensor) not in _with_memory() or tensor._is_zerotensor():
        return np.asarray(tensor.detach().numpy())  # refuses tensors that have no memory of their own
    kind = _KINDS[tensor.dtype]
    memory = _Memory.from_address(tensor.data_ptr())
    memory.tensor = tensor
    strides = None if tensor.is_contiguous() else [step * kind.itemsize for step in tensor.stride()]
    return np.ndarray(tensor.shape, kind, memory, 0, strides)


def plain_tensor(tensor: Any, name: str) -> Any:
    """Return a torch tensor as dense numbers without a gradient; raise if it has no such numbers."""
    refuse_masked_tensor(tensor, name)
    if tensor.is_nested:
        raise TypeError(
            f"{name} is a nested torch tensor; expected a dense one. Convert it first, e.g. "
            f"torch.nested.to_padded_tensor({name}, 0.0), and leave the padding out by mask="
        )
    layout = str(tensor.layout)
    if layout != "torch.strided":
        raise TypeError(
            f"{name} is a torch tensor of layout {layout}; expected a dense one (torch.strided). "
            f"Convert it first: {name}.to_dense()"
        )
    if tensor.is_meta:
        raise TypeError(
            f"{name} is a torch tensor on the device meta, which has a shape but no numbers; expected a tensor that "
            "holds data. Compute it on a real device first, such as device='cpu'"
        )
    tensor = without_wrappers(tensor.detach().resolve_neg())
    if sys.modules["torch"]._C._functorch.is_batchedtensor(tensor) or type(tensor).__name__ in (
        "FakeTensor",
        "FunctionalTensor",
    ):
        raise TypeError(
            f"{name} is a torch tensor within torch.func.vmap, torch.export or FakeTensorMode, which hold its numbers "
            f"back; expected a tensor that holds data. Call without them: leading axes of {name} are a batch"
        )
    return tensor


def without_wrappers(tensor: Any) -> Any:
    """Return the numbers that torch.func.grad or jvp follow, which a call reads without a gradient."""
    wrappers = sys.modules["torch"]._C._functorch
    while wrappers.is_gradtrackingtensor(tensor):
        tensor = wrappers.get_unwrapped(tensor)
    return tensor


def seen(tensor: Any) -> Any:
    """Return a tensor without a gradient, such as a mask, without the wrappers of torch.func.grad and jvp."""
    return tensor if tensor.requires_grad else without_wrappers(tensor)


_LEAST_AXES = 3  # of the keys of a layer: heads, positions, columns


def cached_keys(K: Any) -> Any | None:
    """Return the keys of a cache as one array (layers, ..., n, d), None if K is no cache; raise if layers differ."""
    layers = layers_of(K)
    if layers is None:
        return None
    one = "K.layers[i].keys" if hasattr(K, "layers") else "K.key_cache[i]" if hasattr(K, "key_cache") else "K[i][0]"
    kind = type(K).__name__
    if not layers or any(getattr(keys, "ndim", 0) < _LEAST_AXES for keys in layers):
        empty = [i for i, keys in enumerate(layers) if getattr(keys, "ndim", 0) < _LEAST_AXES]
        raise ValueError(
            f"K is a {kind} that holds no keys{f' in layers {empty}' if layers else ''}; expected the cache of a "
            f"model that has read its tokens. Give one layer as {one}"
        )
    for name, figure in (("shapes", lambda keys: tuple(keys.shape)), ("devices", array_api_compat.device)):
        found = list(dict.fromkeys(map(figure, layers)))
        if len(found) > 1:
            raise ValueError(
                f"K is a {kind} whose layers have {name} {', '.join(map(str, found))}; expected all alike. Give one "
                f"layer as {one}"
            )
    return array_api_compat.array_namespace(*layers).stack(layers)


def layers_of(K: Any) -> list[Any] | None:
    """Return the keys of each layer of a cache, or None if K is no cache."""
    if hasattr(K, "layers") and hasattr(K, "get_seq_length"):
        return [getattr(layer, "keys", None) for layer in K.layers]
    if hasattr(K, "key_cache"):
        return list(K.key_cache)
    if isinstance(K, tuple) and K and all(_is_pair(item) for item in K):
        return [keys for keys, *_ in K]
    return None


def _is_pair(item: Any) -> bool:
    """Tell whether an item is (keys, values), two arrays with the same positions."""
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and all(getattr(array, "ndim", 0) >= _LEAST_AXES for array in item)
        and tuple(item[0].shape[:-1]) == tuple(item[1].shape[:-1])
    )


def remedy_of(array: Any, name: str) -> str:
    """Return how an array comes of something that is none; its package is known by its methods, and not imported."""
    if isinstance(array, str | os.PathLike):
        return f"Open a file of keys first: {name} = levattn.open_keys({os.fspath(array)!r})"
    package = type(array).__module__.partition(".")[0]
    if package == "pandas":  # nullable columns become objects otherwise
        return f"Convert it first: {name}.to_numpy('float64', na_value=numpy.nan), and leave gaps out by mask="
    if package == "levattn" and not hasattr(array, "between"):
        return f"A set, a state or another result of levattn is no array: give the rows themselves as {name}"
    if package == "levattn":
        if name != "K":
            return f"Load them: {name}.load()"
        return (
            f"Load the keys: {name}.load(), or read their leverage scores in chunks: levattn.leverage_scores({name})"
        )
    if package == "dask":
        return (
            "For arrays on workers use levattn.distributed.dask.leverage_scores or its universal_set, or call "
            f"{name}.compute() first"
        )
    if isinstance(array, np.ma.MaskedArray):
        return f"Give {name}.data, and the rows that count by mask=~numpy.ma.getmaskarray({name}).any(axis=-1)"
    if hasattr(array, "column_names") and hasattr(array, "columns"):  # pyarrow's tables
        column = f"{name}.column(0).combine_chunks()" if hasattr(array, "combine_chunks") else f"{name}.column(0)"
        return (
            f"Convert it first: a column of lists by {column}.flatten().to_numpy().reshape(len({name}), -1), columns "
            f"of numbers by numpy.column_stack([c.to_numpy() for c in {name}.columns])"
        )
    if hasattr(array, "to_pylist"):  # pyarrow's arrays of lists, of which to_numpy makes objects
        flat = f"{name}.combine_chunks()" if hasattr(array, "combine_chunks") else name
        return f"Convert it first: {flat}.flatten().to_numpy().reshape(len({name}), -1)"
    if hasattr(array, "to_numpy"):
        return f"Convert it first: {name}.to_numpy()"
    if hasattr(array, "collect"):  # lazy frames
        return f"Compute it first: {name}.collect().to_numpy()"
    if hasattr(array, "chunks") and hasattr(array, "__getitem__"):  # arrays in files of zarr or HDF5
        rows = f"({name}[i : i + 65536] for i in range(0, {name}.shape[0], 65536))"
        return f"Read it first: {name}[...], or in chunks: levattn.universal_set(lambda: {rows}, epsilon)"
    for method, way in (("__dlpack__", "from_dlpack"), ("__array__", "asarray")):
        if hasattr(array, method):
            return f"Convert it first: numpy.{way}({name})"
    return "Convert it to an array first; rows that do not count are left out by mask="


_PLAIN = {np.dtype(kind): kind for kind in ("float64", "float32")}  # formats of numpy that the kernels read directly
_NUMPY_HAS_THEM = hasattr(np, "__array_namespace_info__")  # the functions of the array-API standard


@dataclass(frozen=True)
class Matrices:
    """A checked stack of matrices in the form that the kernels read.

    data: (b, n, d). On the CPU it is a numpy array in which 16-bit floats are uint16 words, else an array-API array.
        It may also be one sparse matrix, a `Csr`.

    batch: the leading axes, whose product is b.

    format: of the numbers ("float64", "float32", "float16", "bfloat16").

    give_back: a function. It turns a numpy array (or an array of the namespace) into the caller's kind, on its device.

    mask: (b, n) bool where the data are, True for rows that take part; None for all.
    """

    data: Any
    batch: tuple[int, ...]
    format: Any
    give_back: Callable[[Any], Any]
    mask: Any = None

    @property
    def n(self) -> int:
        """Number of rows of each matrix."""
        return int(self.data.shape[1])

    @property
    def d(self) -> int:
        """Number of columns."""
        return int(self.data.shape[2])

    def item(self, index: int) -> Matrices:
        """Return one matrix as a batch of one, without a copy."""
        mask = None if self.mask is None else self.mask[index : index + 1, :]
        return replace(self, data=self.data[index : index + 1, :, :], batch=(), mask=mask)

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Flags (b, n) of the rows that take part, in main memory."""
        return np.ones(self.data.shape[:2], np.bool_) if self.mask is None else to_numpy(self.mask)

    def masked(self, mask: Any) -> Matrices:
        """Return the matrices with a caller's mask (..., n) of the rows that take part, or raise; None is no mask."""
        return self if mask is None else replace(self, mask=_flags_of(mask, self))

    def wrap(self, array: Any) -> Any:
        """Return (b, ...) as (batch..., ...) in the caller's kind."""
        shape = (*self.batch, *array.shape[1:])
        return self.give_back(with_shape(array, shape))


def on_cuda(array: Any) -> bool:
    """Tell whether the CUDA kernels read an array, which then is a CuPy array."""
    return not isinstance(array, np.ndarray) and bool(array_api_compat.is_cupy_array(array))


def is_away(array: Any) -> bool:
    """Tell whether an array is CuPy's, or a tensor outside of main memory."""
    return on_cuda(array) or (is_torch(array) and array.device.type != "cpu")


def array_namespace(*arrays: Any) -> Any:
    """Return the namespace of some arrays, with functions named as in the array-API standard.

    NumPy is such a namespace from 2.1 on. Importing array-api-compat's wrapper of NumPy takes longer than importing
    this library.
    """
    if _NUMPY_HAS_THEM and all(isinstance(array, np.ndarray | np.generic) for array in arrays):
        return np
    return array_api_compat.array_namespace(*arrays)


def with_shape(array: Any, shape: tuple[int, ...]) -> Any:
    """Return an array of any library with another shape."""
    if isinstance(array, np.ndarray) or on_cuda(array):
        return array.reshape(shape)
    return array_namespace(array).reshape(array, shape)


def is_torch(array: Any) -> bool:
    """Tell whether an array is a tensor of torch."""
    torch = sys.modules.get("torch")  # a tensor can only come from a torch that is loaded
    return torch is not None and isinstance(array, torch.Tensor)


def _in_main_memory(tensor: Any) -> bool:
    """Tell whether the compiled kernels can read a torch tensor; the definitions take other tensors."""
    return bool(tensor.device.type == "cpu")


@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


def has_cupy() -> bool:
    """Tell whether tensors on a CUDA device can be handed to CuPy."""
    return "cupy" in sys.modules or _is_installed("cupy")


@cache
def _dtype_of(dtype: Any) -> np.dtype[Any]:
    """Return the dtype of CuPy for a dtype of torch; bfloat16 numbers, which CuPy lacks, become words."""
    kind = dtype_name(dtype)
    return np.dtype(np.uint16 if kind == "bfloat16" else kind)


def refuse_capture() -> None:
    """Raise if torch captures a CUDA graph."""
    if sys.modules["torch"].cuda.is_current_stream_capturing():
        raise ValueError(
            "a tensor came while torch captures a CUDA graph; expected a call outside. A graph would not read again "
            "the small tables that kernels take from main memory. Capture the code before and after this call"
        )


def as_cupy(array: Any) -> Any | None:
    """Return an array on a CUDA device as a CuPy array on the same memory; None for other arrays and without CuPy.

    bfloat16 numbers, which CuPy lacks, become words. CuPy works on torch's stream (`device`), so nothing waits.
    """
    if not (is_torch(array) and array.is_cuda and has_cupy()):
        return array if on_cuda(array) else None
    import cupy

    refuse_capture()
    dtype, start = _dtype_of(array.dtype), array.data_ptr()
    size = array.untyped_storage().nbytes() - array.storage_offset() * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(start, size, array, array.device.index)
    steps = None if array.is_contiguous() else tuple([step * dtype.itemsize for step in array.stride()])
    return cupy.ndarray(tuple(array.shape), dtype, cupy.cuda.MemoryPointer(memory, 0), steps)


def tensor_behind(array: Any) -> Any | None:
    """Return the torch tensor whose memory a CuPy array uses, or None if the memory is CuPy's."""
    owner = getattr(array.data.mem, "_owner", None)
    return owner if is_torch(owner) else None


def as_tensor(array: Any) -> Any:
    """Return a CuPy array as a torch tensor on the same memory.

    If torch owns the memory, the tensor shares its storage, so that ``record_stream`` and the like take effect.
    """
    torch = sys.modules["torch"]
    owner = tensor_behind(array)
    if owner is None:
        if array.dtype == np.bool_:  # not all releases of CuPy export it
            return torch.from_dlpack(array.view(np.uint8)).view(torch.bool)
        return torch.from_dlpack(array)
    tensor = torch.empty(0, dtype=getattr(torch, array.dtype.name), device=owner.device)
    if not array.size:
        return tensor.reshape(array.shape)
    storage = owner.untyped_storage()
    start, *steps = (step // array.itemsize for step in (array.data.ptr - storage.data_ptr(), *array.strides))
    return tensor.set_(storage, start, tuple(array.shape), tuple(steps))


def from_list(values: Any, name: str, of_none: Any = None) -> npt.NDArray[Any]:
    """Return nested lists as a numpy array; raise if they form no array.

    A list without entries tells no dtype: it gets the dtype `of_none`, if there is one.
    """
    try:
        found = np.asarray(values)
        return found if found.size or of_none is None else found.astype(of_none)
    except (ValueError, TypeError, RuntimeError) as error:
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{name} is a {type(values).__name__} that makes no array ({problem}); expected numbers in rows of "
            f"equal length. {_remedy_of_list(values, name)}"
        ) from error


def _remedy_of_list(values: Any, name: str) -> str:
    """Return how an array, or chunks, come of lists that form no array."""
    if name == "K" and all(len(getattr(value, "shape", ())) > 1 for value in values):
        return (
            "Join chunks into one array, or give universal_set a function that returns an iterator of them: "
            "lambda: iter(chunks)"
        )
    return "Pad short rows and leave the padding out by mask=, and stack arrays into one"


def _numpy_words(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a numpy array of floats, with 16-bit floats viewed as words."""
    if not array.dtype.isnative or not array.flags.aligned:
        array = array.astype(array.dtype.newbyteorder("="))
    array = np.asarray(array)  # keeps a memory map, but drops its subclass
    return array.view(np.uint16) if array.dtype.itemsize == 2 else array


def as_matrices(array: Any, name: str, *, sparse: bool = False) -> Matrices:
    """Check that `array` is a (..., n, d) array of real floats with d ≥ 1 and return it as `Matrices`.

    CPU arrays and tensors are copied only if they are unaligned or in foreign byte order, or if their leading axes
    cannot be merged. Gradients are not followed. With `sparse`, a scipy CSR matrix (n, d) is
    accepted; results then are numpy arrays.
    """
    plain = _PLAIN.get(array.dtype) if type(array) is np.ndarray else None
    if plain is not None and array.ndim > 1 and array.shape[-1] and array.flags.aligned:  # most chunks of a stream
        batch = array.shape[:-2]
        return Matrices(array.reshape(math.prod(batch), *array.shape[-2:]), batch, plain, np.asarray)
    if is_scipy_sparse(array):
        if not sparse:
            raise TypeError(
                f"{name} is a scipy sparse matrix; expected a dense array here. leverage_scores and universal_set, by "
                f"their exact methods and for f = 2, take sparse keys (csr). Convert it first: {name}.toarray()"
            )
        held = from_csr(array, name)
        return Matrices(held, (), held.values.dtype.name, np.asarray)
    cached = cached_keys(array) if name == "K" else None
    data, kind, give_back = _dense(array if cached is None else cached, name)
    if data.ndim < 2:
        raise ValueError(
            f"{name} has shape {tuple(data.shape)}; expected (..., n, d), rows last but one. "
            f"Give one row as {name}[None, :]"
        )
    if data.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(data.shape)}; expected at least one column (d >= 1)")
    batch = tuple(int(size) for size in data.shape[:-2])
    shape = (math.prod(batch), int(data.shape[-2]), int(data.shape[-1]))
    return Matrices(with_shape(data, shape), batch, kind, give_back)


def floats_of(array: Any, name: str) -> tuple[Any, str]:
    """Return a dense array of real floats, also of a list, and its format; raise for anything else."""
    conversion = f"{name}.astype('float64')"
    if isinstance(array, list | tuple):
        array, conversion = from_list(array, name), f"numpy.array({name}, 'float64')"
    elif is_torch(array):
        array, conversion = plain_tensor(array, name), f"{name}.to(torch.float64)"
    elif is_jax(array):
        conversion = f"{name}.astype('float32')"
    known = isinstance(array, np.ndarray) or is_torch(array) or is_jax(array)
    if not known:
        known = array_api_compat.is_array_api_obj(array) and not array_api_compat.is_lazy_array(array)
    if not known or isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is of type {type(array).__name__}; expected a dense array (numpy, torch, CuPy or another "
            f"namespace of the array-API standard). {remedy_of(array, name)}"
        )
    if not isinstance(array, np.ndarray) and not is_torch(array) and not is_jax(array) and as_cupy(array) is None:
        conversion = f"xp.astype({name}, xp.float64) of its namespace xp"
    return array, format_of(array.dtype, name, conversion)


def _dense(array: Any, name: str) -> tuple[Any, str, Callable[[Any], Any]]:
    """Return the numbers of an array for the kernels, their format, and a function back to the array's kind."""
    array, kind = floats_of(array, name)
    shared = as_cupy(array)
    if isinstance(array, np.ndarray):
        return _numpy_words(array), kind, np.asarray
    if is_jax(array):
        return _numpy_words(from_jax(array, name)), kind, to_jax(array)
    if shared is not None:

        def to_cupy(result: Any) -> Any:
            here = sys.modules["cupy"].asarray(result)
            return as_tensor(here) if is_torch(array) else here

        return shared.view(np.uint16) if shared.dtype.itemsize == 2 else shared, kind, to_cupy
    if is_torch(array) and _in_main_memory(array):
        torch = sys.modules["torch"]
        words = without_wrappers(array.view(torch.uint16)) if array.element_size() == 2 else array
        return memory_of_tensor(words), kind, torch.from_numpy

    def to_library(result: Any) -> Any:
        return to_device(result, array) if isinstance(result, np.ndarray) else result

    return array, kind, to_library


def check_flags(name: str, flags: Any, expected: tuple[Any, ...], meaning: str) -> None:
    """Raise unless an array of flags has dtype bool and the expected shape.

    Its leading axes may have size 1, and are arbitrary if the expected shape begins with an ellipsis. `meaning` names
    the items whose flag is True.
    """
    if isinstance(flags, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; expected a plain one. Give {name}.filled(False) or {name}.data")
    shape = tuple(flags.shape)
    leading = shape[:-1] if ... in expected else expected[:-1]
    alike = len(shape) == len(leading) + 1 and all(s in (1, e) for s, e in zip(shape, leading, strict=False))
    if not alike or shape[-1] != expected[-1]:
        sizes = str(expected).replace("Ellipsis", "...")
        one = meaning.partition(" that ")[0]
        raise ValueError(
            f"{name} has shape {shape}; expected {sizes}, one entry for {one} (leading axes of size 1 are repeated)"
        )
    if dtype_name(flags.dtype) != "bool":
        raise TypeError(f"{name} has dtype {flags.dtype}; expected bool, True for {meaning}")


def _flags_of(mask: Any, matrices: Matrices) -> Any:
    """Check a (..., n) boolean mask of `matrices` and return it as (b, n)."""
    if is_torch(mask):
        mask = plain_tensor(mask, "mask")
    elif not array_api_compat.is_array_api_obj(mask):
        mask = from_list(mask, "mask", np.bool_)
    expected = (*matrices.batch, matrices.n)
    check_flags("mask", mask, expected, "a key that takes part")
    if isinstance(matrices.data, np.ndarray | Csr):
        return np.array(np.broadcast_to(named_numpy("mask", mask), expected).reshape(matrices.data.shape[:2]))
    xp = array_namespace(matrices.data)
    if on_cuda(matrices.data):
        shared = as_cupy(mask)
        mask = mask if shared is None else shared
    if array_namespace(mask) is xp:
        found = xp.asarray(mask, device=array_api_compat.device(matrices.data))
    else:
        found = to_device(named_numpy("mask", mask), matrices.data)
    return xp.reshape(xp.broadcast_to(found, expected), tuple(matrices.data.shape[:2]))


def to_device(array: npt.NDArray[Any], like: Any) -> Any:
    """Return a numpy array in the namespace and on the device of `like`; for numpy, the array itself."""
    if isinstance(like, np.ndarray | Csr):
        return array
    xp = array_namespace(like)
    # torch refuses negative strides, and warns of read-only memory
    return xp.asarray(np.require(array, requirements=["C", "W"]), device=array_api_compat.device(like))


def take_rows(data: Any, rows: npt.NDArray[np.int64]) -> Any:
    """Return some rows of every matrix of a batch (b, n, d)."""
    if isinstance(data, Csr):
        return data.take(rows)
    if isinstance(data, np.ndarray):
        return data[:, rows, :]
    return array_namespace(data).take(data, to_device(rows, data), axis=1)


def take_entries(array: Any, which: npt.NDArray[np.int64]) -> Any:
    """Return some entries along the first axis."""
    if isinstance(array, np.ndarray):
        return array[which]
    return array_namespace(array).take(array, to_device(which, array), axis=0)


def lengths(X: Any) -> Any:
    """Return the norms (...) of rows (..., d) without under- or overflow: 0 only for rows of zeros."""
    xp = array_namespace(X)
    if not X.shape[-1]:
        return xp.sum(X, axis=-1)
    top = xp.max(xp.abs(X), axis=-1)
    scaled = X / xp.where(top > 0, top, xp.ones_like(top))[..., None]
    return top * xp.sqrt(xp.sum(scaled * scaled, axis=-1))


def nonzero(flags: Any) -> npt.NDArray[np.int64]:
    """Return the indices of true flags (n,), in main memory."""
    if on_cuda(flags):
        return to_numpy(array_namespace(flags).nonzero(flags)[0])
    return np.flatnonzero(flags)


def where(condition: Any, value: float, otherwise: Any) -> Any:
    """Return `value` where the condition holds, else `otherwise`, on the device of `otherwise`."""
    if isinstance(otherwise, np.ndarray):
        return np.where(condition, value, otherwise)
    xp = array_namespace(otherwise)
    return xp.where(condition, xp.full_like(otherwise, value), otherwise)


def named_numpy(name: str, array: Any) -> npt.NDArray[Any]:
    """Return an argument as a numpy array, or raise if it is a tracer of JAX."""
    return from_jax(array, name) if is_jax(array) else to_numpy(array)


def to_numpy(array: Any) -> npt.NDArray[Any]:
    """Return an array of any namespace and device as a numpy array."""
    if isinstance(array, np.ndarray):
        return np.asarray(array)
    if on_cuda(array):
        return np.asarray(array.get())
    if array_api_compat.is_torch_array(array):
        array = seen(array_api_compat.to_device(array, "cpu"))
        if _in_main_memory(array) and not array.is_conj() and not array.is_neg() and not array.requires_grad:
            return memory_of_tensor(array)
    return np.asarray(array)


def as_numbers(name: str, values: Any) -> npt.NDArray[np.float64]:
    """Return an array of any library, or nested lists, as numpy float64; raise if they are no real numbers."""
    if is_torch(values):
        values = values.detach()
        values = values.float() if values.is_floating_point() and values.element_size() == 2 else values
    array = named_numpy(name, values) if hasattr(values, "shape") else from_list(values, name)
    array = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name} has dtype {array.dtype}; expected real numbers")
    return np.asarray(array, np.float64)


def to_float64(data: Any, kind: str) -> npt.NDArray[np.float64]:
    """Return the numbers of `data`, whose format is `kind`, as a new numpy array of float64."""
    if isinstance(data, Csr):
        data = data.to_dense()
    if on_cuda(data):
        data = to_numpy(data)
    if isinstance(data, np.ndarray):
        return np.array(decode_half(data, kind), dtype=np.float64, order="C")
    xp = array_namespace(data)
    return np.array(to_numpy(xp.astype(data, xp.float64)), dtype=np.float64, order="C")


def float64_beside(data: Any, kind: str, other: Any) -> Any:
    """Return the rows of a batch of one in float64, on a CUDA device if they and `other` are there."""
    if on_cuda(data) and on_cuda(other):
        return decode_half(data, kind)[0].astype(np.float64)
    return to_float64(data, kind)[0]
