"""Tensors of torch that say they are on a CUDA device of the emulator, where neither torch nor the machine has one.

They hold a tensor in main memory, on which torch's own functions run; operators of the library run as they would on a
device. There are no gradients: torch's engine asks for a true device.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from levattn._kernels import repeats

_FREE = (
    "empty",
    "new_empty",
    "new_empty_strided",
    "empty_like",
    "empty_strided",
    "detach",
    "view",
    "_unsafe_view",
    "set_",
    "alias",
)
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default


class CudaTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor on a device of the emulator."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: int) -> Any:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("cuda", device),
        )
        self.inner = inner.detach()
        return self

    def data_ptr(self) -> int:
        return int(self.inner.data_ptr())

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def set_(self, *where: Any) -> Any:
        """A tensor that lies there: the shape of this one cannot change."""
        return CudaTensor(torch.empty(0, dtype=self.dtype, device="cpu").set_(*where), self.device.index)

    def contiguous(self, **_options: Any) -> Any:
        """A copy where rows do not follow each other, as torch makes it, whose own code asks for a true device."""
        return self if self.is_contiguous() else self.clone(memory_format=torch.contiguous_format)

    def __getitem__(self, index: Any) -> Any:
        """Rows as `torch.Tensor` has them, whose own code asks for a true device."""
        return CudaTensor(self.inner[_without_device(index)], self.device.index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.inner[_without_device(index)] = _without_device(value)

    def __invert__(self) -> Any:
        return torch.bitwise_not(self)

    def __repr__(self, **_options: Any) -> str:
        return f"CudaTensor({self.inner!r}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), options: Any = None) -> Any:
        return on_devices(function, args, options or {})


def _without_device(value: Any) -> Any:
    return tree_map(lambda x: x.inner if isinstance(x, CudaTensor) else x, value)


def on_devices(function: Any, args: Any, options: dict[str, Any]) -> Any:
    """What a function returns for tensors of the emulator's devices, on their device or where it is told."""
    if function.namespace == "levattn":
        with Devices.last:  # torch leaves it while it calls this
            return OPDEFS[function._schema.name]._init_fn(*args, **options)
    devices: list[int] = []

    def bare(value: Any) -> Any:
        if isinstance(value, CudaTensor):
            devices.append(value.device.index)
            return value.inner
        return value

    args, options = tree_map(bare, (args, options))
    assert len(set(devices)) < 2, "torch was given tensors of two devices"
    there = bool(devices)
    if options.get("device") is not None:
        asked = torch.device(options["device"])
        devices, options["device"] = ([asked.index] if asked.type == "cuda" else []), "cpu"
    moved = function is torch.ops.aten._to_copy.default and there != bool(devices)
    if moved or (there and function is torch.ops.aten._local_scalar_dense.default):
        Devices.last.crossed.append("back" if there else "there")
    name = function._schema.name.removeprefix("aten::")
    views = any(x.alias_info is not None and not x.alias_info.is_write for x in function._schema.arguments)
    if (devices or there) and not views and name not in _FREE:
        Devices.last.ran.append(name)
    result = _attended(*args, **options) if function is _FLASH else function(*args, **options)
    if name.startswith("new_empty"):  # what nobody has written is NaN
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(result.untyped_storage()).fill_(255)
    return tree_map(lambda x: CudaTensor(x, devices[0]) if devices and isinstance(x, torch.Tensor) else x, result)


def _attended(q: Any, keys: Any, values: Any, *_: Any, scale: float) -> tuple[Any, ...]:
    """What flash attention of a device returns, by that of main memory."""
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, scale=scale)
    none = torch.empty(0, device="cpu")
    return (*found, none, none, q.shape[2], keys.shape[2], none, none, none)


class Devices(TorchDispatchMode):  # type: ignore[misc]
    """Within it torch makes tensors on the emulator's devices.

    asked: the bytes that it was asked for. ran: its functions that made numbers there, each of which is a launch or a
    few; functions of views are not among them. crossed: which tensors it copied "there", and which figures or tensors
    came "back"; a program waits for either.
    """

    last: Any

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.ran: list[str] = []
        self.crossed: list[str] = []
        Devices.last = self

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), options: Any = None) -> Any:
        result = on_devices(function, args, options or {})
        if function is torch.ops.aten.empty.memory_format and isinstance(result, CudaTensor):
            self.asked.append(result.inner.nbytes)
        return result


class Streams(threading.local):
    """Torch's current stream of each device, for a thread: by its handle."""

    def __init__(self) -> None:
        self.current = {0: 0, 1: 0}


def torch_on_devices(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Let torch say that it has CUDA devices, until the test ends; return its current streams."""
    streams = Streams()
    repeats.forget_calls()  # calls of other tests, whose geometry may have been another
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    current = lambda device: SimpleNamespace(cuda_stream=streams.current[device])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: streams.current[device], raising=False)
    return streams
