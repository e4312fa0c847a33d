"""Rows of a stream: put where compiled code can read them, and buffered into whole blocks, several together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._core.arrays import (
    Matrices,
    as_cupy,
    as_mask,
    as_matrices,
    named_numpy,
    on_cuda,
    to_device,
    to_float64,
    to_numpy,
)
from levattn._core.device import where_arrays_are
from levattn._core.serialize import is_storable, shaped
from levattn._kernels import BLOCK, Rows
from levattn.linalg.reading import check_finite

_WAITING = 9 << 20  # at most this many bytes of rows and payload wait together; one block may take more
_TOGETHER = 16  # at most this many blocks of them


def readable(K: Any, mask: Any = None) -> tuple[Matrices, Rows]:
    """Return a chunk of keys of any kind where compiled code can read it: on a CUDA device, or in main memory."""
    matrices = as_matrices(K, "K")
    if on_cuda(matrices.data):
        return matrices, Rows(matrices.data, matrices.format, as_mask(mask, matrices))
    return matrices_in_memory(matrices, as_mask(mask, matrices), "K")


@where_arrays_are
def in_main_memory(K: Any, mask: Any = None, name: str = "K") -> tuple[Matrices, Rows]:
    """Return a chunk of keys of any kind in main memory."""
    matrices = as_matrices(K, name)
    return matrices_in_memory(matrices, as_mask(mask, matrices), name)


def matrices_in_memory(matrices: Matrices, present: Any | None, name: str) -> tuple[Matrices, Rows]:
    """Return matrices and their mask in main memory."""
    if on_cuda(matrices.data):
        matrices = replace(matrices, data=to_numpy(matrices.data), give_back=np.asarray)
    if not isinstance(matrices.data, np.ndarray):
        batch, data = matrices.batch, matrices.data
        data = data.cpu() if array_api_compat.is_torch_array(data) else to_numpy(data)
        matrices = replace(as_matrices(data, name), batch=batch)
    if present is not None:
        present = to_numpy(present)
    return matrices, Rows(matrices.data, matrices.format, present)


def rows_in_memory(rows: Rows) -> Rows:
    """Return rows of a CUDA device in main memory; others as they are."""
    if not on_cuda(rows.keys):
        return rows
    return replace(rows, keys=to_numpy(rows.keys), mask=None if rows.mask is None else to_numpy(rows.mask))


class BlockBuffer:
    """Rows that wait until their block of 2048 is full; rows of small chunks wait until several blocks are.

    Masked rows are held as zeros. `payload` are arrays like the payload of the rows, (b or 1, m, ...), or row numbers,
    and wait with them. `blocks` is the number of blocks that were given away.
    """

    def __init__(self, b: int, d: int, format: Any, *payload: npt.NDArray[Any]) -> None:
        self.count = self.blocks = 0
        dtype = {"float64": np.float64, "float32": np.float32}.get(format, np.uint16)
        self._held = Rows(np.zeros((b, 0, d), dtype), format)
        self._payload = [np.zeros((like.shape[0], 0, *like.shape[2:]), like.dtype) for like in payload]
        self._before = 0  # rows for which there was room before they were given away
        arrays = (self._held.keys, *self._payload)
        block = BLOCK * sum(math.prod((len(array), *array.shape[2:])) * array.itemsize for array in arrays)
        fit = _WAITING // block if block else _TOGETHER
        self._together = min(_TOGETHER, 1 << (max(fit, 1).bit_length() - 1))  # blocks; a power of two

    def copy(self) -> BlockBuffer:
        """Return a copy to continue with; this buffer keeps its rows until a push to it."""
        other = BlockBuffer.__new__(BlockBuffer)
        other.__dict__.update(self.__dict__)
        return other

    @property
    def rows(self) -> Rows:
        """The rows that wait; the next push changes them."""
        return self._held.between(0, self.count)

    @property
    def payload(self) -> list[npt.NDArray[Any]]:
        """The payload of the rows that wait."""
        return [array[:, : self.count] for array in self._payload]

    def hold(self, blocks: int, keys: npt.NDArray[Any], *payload: npt.NDArray[Any]) -> None:
        """Hold stored rows that come after so many blocks; raise ValueError if they are of another kind."""
        b, _, d = self._held.shape
        if keys.ndim != 3 or keys.shape[1] >= BLOCK:
            raise ValueError(f"rows of shape {keys.shape} wait; expected fewer than {BLOCK} of each matrix")
        shaped(keys, self._held.keys.dtype, (b, keys.shape[1], d))
        if not np.isfinite(to_float64(keys, self._held.format)).all():
            raise ValueError("rows that wait are not finite")
        for array, like in zip(payload, self._payload, strict=True):
            shaped(array, like.dtype, (like.shape[0], keys.shape[1], *like.shape[2:]), finite=False)
        self.count, self.blocks = 0, blocks
        self._fill(replace(self._held, keys=keys), *payload)

    def push(
        self, rows: Rows, take: Callable[..., None], *payload: Any, take_held: Callable[..., None] | None = None
    ) -> None:
        """Add rows: they wait here, or whole blocks of them and of the waiting rows go to `take`.

        Blocks that waited go to `take_held`, if there is one; nothing else writes to them any more. Rows that are not
        finite raise FloatingPointError. After an error the buffer is void, but its copies are not.
        """
        require_format("K", rows.format, self._held.format)
        n = rows.shape[1]
        together = 1 if on_cuda(rows.keys) else self._together
        room = (together - self.blocks % together) * BLOCK
        if self.count >= room:
            self.flush(take_held or take)
        large = n >= min(together, max(together // 2, 4)) * BLOCK
        if not large and self.count + n < room:
            self._fill(rows, *payload)
            return
        at = 0
        whole = n if large else room
        if self.count:
            stop = -(-self.count // BLOCK) * BLOCK if large else room
            at = stop - self.count
            self._fill(rows.between(0, at), *(array[:, :at] for array in payload))
            self._give(take_held or take, rows.keys)
            whole = n - at if large else 0
        stop = at + whole // BLOCK * BLOCK
        if stop > at:
            take(rows.between(at, stop), *(array[:, at:stop] for array in payload))
            self.blocks += (stop - at) // BLOCK
        self._fill(rows.between(stop, n), *(array[:, stop:] for array in payload))

    def flush(self, take: Callable[..., None]) -> None:
        """Give all whole blocks to `take`; after an error the buffer is void."""
        whole, rest = self.count // BLOCK * BLOCK, self.count % BLOCK
        if whole:
            rows, payload = self.rows.between(whole, self.count), [array[:, whole:] for array in self.payload]
            self.count = whole
            self._give(take, self._held.keys)
            if rest:
                self._fill(rows, *payload)

    def _give(self, take: Callable[..., None], like: Any) -> None:
        """Give all rows, which are whole blocks, to `take`, on the device of `like`.

        New memory holds later rows, because a copy of the buffer may hold the memory of these.
        """
        rows = self.rows
        take(replace(rows, keys=to_device(rows.keys, like)), *self.payload)
        self.blocks, self.count, self._before = self.blocks + self.count // BLOCK, 0, self._held.shape[1]
        self._held = replace(self._held, keys=self._held.keys[:, :0].copy())
        self._payload = [array[:, :0].copy() for array in self._payload]

    def _fill(self, rows: Rows, *payload: Any) -> None:
        """Append rows, without a change to the rows held before."""
        if not rows.shape[1]:
            return
        stop, held = self.count + rows.shape[1], self._held.shape[1]
        if stop > held:
            size = max(stop, self._before, min(max(2 * held, 64), self._together * BLOCK))
            self._held = replace(self._held, keys=_longer(self._held.keys, size))
            self._payload = [_longer(array, size) for array in self._payload]
        rows = rows_in_memory(rows)
        place = self._held.keys[:, self.count : stop]
        place[...] = rows.keys
        if rows.mask is not None:
            place[~rows.mask] = 0
        _require_finite(Rows(place, rows.format))
        for there, array in zip(self._payload, payload, strict=True):
            there[:, self.count : stop] = to_numpy(array) if on_cuda(array) else array
        self.count = stop


def _require_finite(rows: Rows) -> None:
    """Raise FloatingPointError if rows in main memory hold NaN or infinity."""
    if rows.format in ("float64", "float32") and math.isfinite(np.einsum("bij->", rows.keys)):  # the fastest sum
        return
    with np.errstate(over="ignore", invalid="ignore"):
        check_finite(rows, rows.column_sums())


def require_format(name: str, given: Any, before: Any) -> None:
    """Raise if keys have another dtype than the keys before; `name` names them in the message."""
    if given != before:
        raise TypeError(
            f"{name} has dtype {given}; the chunks before had {before}. Expected one dtype in all chunks: "
            "convert them alike"
        )


def _longer(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Return the array with room for more rows."""
    out = np.empty((array.shape[0], size, *array.shape[2:]), array.dtype)
    out[:, : array.shape[1]] = array
    return out


class RowNumbers:
    """Consecutive row numbers (1, n), which become an array only when needed."""

    def __init__(self, first: int, n: int) -> None:
        self._numbers = range(first, first + n)

    @property
    def shape(self) -> tuple[int, int]:
        """(1, n)."""
        return 1, len(self._numbers)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: tuple[Any, Any]) -> Any:
        """Return the numbers ``[:, a:b]``, or the numbers ``[0, places]`` for an array of places."""
        if isinstance(key[1], slice):
            part = self._numbers[key[1]]
            return RowNumbers(part.start, len(part))
        places = key[1] if on_cuda(key[1]) else np.asarray(key[1], np.int64)
        return self._numbers.start + places

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[np.int64]:
        return np.arange(self._numbers.start, self._numbers.stop, dtype=np.int64)[None]


def present_rows(rows: Rows) -> npt.NDArray[np.int64]:
    """Return how many rows of each matrix take part."""
    if rows.mask is None:
        return np.full(rows.shape[0], rows.shape[1], np.int64)
    return to_numpy(rows.mask.sum(axis=1, dtype=np.int64))


def payload_of(payload: Any, batch: tuple[int, ...], n: int) -> Any:
    """Return the payload of n keys as an array (b, n, ...), of numpy or on its CUDA device, or raise."""
    if array_api_compat.is_torch_array(payload):
        payload = payload.detach()
        payload = payload.float() if str(payload.dtype) == "torch.bfloat16" else payload  # which holds its numbers
    array = as_cupy(payload)
    if array is None:
        array = named_numpy("payload", payload) if hasattr(payload, "shape") else np.asarray(payload)
    if array.shape[: len(batch) + 1] != (*batch, n):
        raise ValueError(
            f"payload has shape {array.shape}; expected {(*batch, n)} and further axes, one entry for each key"
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not is_storable(array.dtype):
        raise TypeError(
            f"payload has dtype {array.dtype}; expected numbers of at most 64 bits, complex ones of 128, or bool. "
            "Convert it, or give the row numbers of other objects"
        )
    return array.reshape(math.prod(batch), *array.shape[len(batch) :])
