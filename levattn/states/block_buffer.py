"""Rows of a stream on their way: where compiled code can read them, and in whole blocks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, as_cupy, as_mask, as_matrices, on_cuda, to_device, to_float64, to_numpy
from levattn._core.serialize import is_storable, shaped
from levattn._kernels import BLOCK, Rows
from levattn.linalg.reading import check_finite

__all__ = [
    "BlockBuffer",
    "RowNumbers",
    "in_main_memory",
    "payload_of",
    "present_rows",
    "readable",
    "require_format",
    "rows_in_memory",
]


def readable(K: Any, mask: Any = None) -> tuple[Matrices, Rows]:
    """Return a chunk of keys of any kind where compiled code can read it: on a CUDA device, or in main memory."""
    matrices = as_matrices(K, "K")
    if on_cuda(matrices.data):
        return matrices, Rows(matrices.data, matrices.format, as_mask(mask, matrices))
    return _moved(matrices, as_mask(mask, matrices), "K")


def in_main_memory(K: Any, mask: Any = None, name: str = "K") -> tuple[Matrices, Rows]:
    """Return a chunk of keys of any kind in main memory."""
    matrices = as_matrices(K, name)
    return _moved(matrices, as_mask(mask, matrices), name)


def _moved(matrices: Matrices, present: Any | None, name: str) -> tuple[Matrices, Rows]:
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
    return replace(rows, keys=to_numpy(rows.keys), mask=None if rows.mask is None else to_numpy(rows.mask))


class BlockBuffer:
    """Rows that wait for their block of 2048 to fill; masked ones are held as zeros.

    `payload` are arrays like those that come with the rows, (b or 1, m, ...), or row numbers, and wait with them.
    """

    def __init__(self, b: int, d: int, format: Any, *payload: npt.NDArray[Any]) -> None:
        self.count = 0
        dtype = {"float64": np.float64, "float32": np.float32}.get(format, np.uint16)
        self._held = Rows(np.zeros((b, 0, d), dtype), format)
        self._payload = [np.zeros((like.shape[0], 0, *like.shape[2:]), like.dtype) for like in payload]

    def copy(self) -> BlockBuffer:
        """Return a tail that goes on from here; this one keeps its rows as long as it is not pushed itself."""
        other = copy.copy(self)
        other._payload = list(self._payload)
        return other

    @property
    def rows(self) -> Rows:
        """The rows that wait; they change with the next that come."""
        return self._held.between(0, self.count)

    @property
    def payload(self) -> list[npt.NDArray[Any]]:
        """What waits with them."""
        return [array[:, : self.count] for array in self._payload]

    def hold(self, keys: npt.NDArray[Any], *payload: npt.NDArray[Any]) -> None:
        """Hold these rows, as they are stored, and no others; raise ValueError if they are of another kind."""
        b, _, d = self._held.shape
        if keys.ndim != 3 or keys.shape[1] >= BLOCK:
            raise ValueError(f"rows of shape {keys.shape} wait; expected fewer than {BLOCK} of each matrix")
        shaped(keys, self._held.keys.dtype, (b, keys.shape[1], d))
        if not np.isfinite(to_float64(keys, self._held.format)).all():
            raise ValueError("rows that wait are not finite")
        for array, like in zip(payload, self._payload, strict=True):
            shaped(array, like.dtype, (like.shape[0], keys.shape[1], *like.shape[2:]), finite=False)
        self.count = 0
        self._fill(replace(self._held, keys=keys), *payload)

    def push(self, rows: Rows, take: Callable[..., None], *payload: Any) -> None:
        """Give all blocks that are whole with these rows to `take`, and keep the others.

        Rows that are not finite raise FloatingPointError. If it raises, the tail is void; its copies are not.
        """
        require_format("K", rows.format, self._held.format)
        at = self._fill(rows, *payload) if self.count else 0
        if self.count == BLOCK:  # a block is summed where its last rows are
            take(replace(self.rows, keys=to_device(self.rows.keys, rows.keys)), *self.payload)
            self._empty()
        whole = (rows.shape[1] - at) // BLOCK * BLOCK
        if whole:
            take(rows.between(at, at + whole), *(array[:, at : at + whole] for array in payload))
        rest = rows.between(at + whole, rows.shape[1])
        waiting = rest if rest.shape[1] else rows.between(0, at)
        with np.errstate(over="ignore", invalid="ignore"):
            check_finite(waiting, waiting.column_sums())
        self._fill(rest, *(array[:, at + whole :] for array in payload))

    def _empty(self) -> None:
        """Hold nothing, in new memory, as a copy may hold what is here."""
        self.count = 0
        self._held = replace(self._held, keys=self._held.keys[:, :0].copy())
        self._payload = [array[:, :0].copy() for array in self._payload]

    def _fill(self, rows: Rows, *payload: Any) -> int:
        """Take rows up to the end of the block and return their number; what was held before is not touched."""
        taken = min(BLOCK - self.count, rows.shape[1])
        stop = self.count + taken
        if stop > self._held.shape[1]:
            size = min(max(stop, 2 * self._held.shape[1], 64), BLOCK)
            self._held = replace(self._held, keys=_longer(self._held.keys, size))
            self._payload = [_longer(array, size) for array in self._payload]
        part = rows_in_memory(rows.between(0, taken))
        place = self._held.keys[:, self.count : stop]
        place[...] = part.keys
        if part.mask is not None:
            place[~part.mask] = 0
        for held, array in zip(self._payload, payload, strict=True):
            held[:, self.count : stop] = to_numpy(array[:, :taken])
        self.count = stop
        return taken


def require_format(name: str, given: Any, before: Any) -> None:
    """Raise if keys, named so, are of another dtype than those before them."""
    if given != before:
        raise TypeError(
            f"{name} has dtype {given}; the chunks before had {before}. Expected one dtype in all chunks: "
            "convert them alike"
        )


def _longer(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Return the array with room for more rows."""
    out = np.zeros((array.shape[0], size, *array.shape[2:]), array.dtype)
    out[:, : array.shape[1]] = array
    return out


class RowNumbers:
    """Consecutive row numbers (1, n), that are not written out before they are asked for."""

    def __init__(self, first: int, n: int) -> None:
        self._numbers = range(first, first + n)

    @property
    def shape(self) -> tuple[int, int]:
        """(1, n)."""
        return 1, len(self._numbers)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: tuple[Any, Any]) -> Any:
        """Return the numbers ``[:, a:b]``, or those ``[0, places]`` of an array of places."""
        if isinstance(key[1], slice):
            part = self._numbers[key[1]]
            return RowNumbers(part.start, len(part))
        return self._numbers.start + np.asarray(key[1], np.int64)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[np.int64]:
        return np.arange(self._numbers.start, self._numbers.stop, dtype=np.int64)[None]


def present_rows(rows: Rows) -> npt.NDArray[np.int64]:
    """Return how many rows of each matrix take part."""
    if rows.mask is None:
        return np.full(rows.shape[0], rows.shape[1], np.int64)
    return to_numpy(rows.mask.sum(axis=1, dtype=np.int64))


def payload_of(payload: Any, batch: tuple[int, ...], n: int) -> Any:
    """Return what comes beside n keys as an array (b, n, ...), of numpy or on its CUDA device, or raise."""
    if array_api_compat.is_torch_array(payload):
        payload = payload.detach()
        payload = payload.float() if str(payload.dtype) == "torch.bfloat16" else payload  # which holds its numbers
    array = as_cupy(payload, "payload")
    if array is None:
        array = to_numpy(payload) if hasattr(payload, "shape") else np.asarray(payload)
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
