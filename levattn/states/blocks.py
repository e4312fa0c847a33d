"""Second moments Σ w k kᵀ of rows as they come: summed over fixed blocks of rows, or running sums that may decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._core.arrays import (
    Matrices,
    array_namespace,
    as_cupy,
    as_matrices,
    named_numpy,
    on_cuda,
    to_device,
    to_float64,
    to_numpy,
)
from levattn._core.device import where_arrays_are
from levattn._core.serialize import is_storable, shaped
from levattn._core.types import Float64, Int64, decode_half
from levattn._kernels import BLOCK, KEYS, Rows, kernels_for
from levattn.linalg.accumulator import Expansion, Exponents, GramAccumulator
from levattn.linalg.factor import Factor
from levattn.linalg.reading import check_finite, refuse_nonfinite, require_room
from levattn.linalg.routes import factor_moments, factor_sum
from levattn.linalg.weighted import exact_products


def factor_of(sums: GramAccumulator, tail: Rows) -> Factor:
    """Return the factor of the keys of a sum and of the rows that wait, without holding these rows."""
    if sums.merged is None and not sums.blocks.count and not sums.rounded:
        return factor_moments(tail, single="scores").forget_keys()
    b, _, d = tail.shape
    return factor_of_sum(*sums.total(tail), Rows(np.empty((b, 0, d), tail.keys.dtype), tail.format))


def factor_of_sum(moments: Expansion, exponents: Exponents, like: Rows) -> Factor:
    """Return the factor of moments of columns times ``2**-exponents``, for keys of the form of `like`.

    It is on the device of `like`, which has no rows.
    """
    scale = np.ldexp(1.0, -exponents) if exponents.any() else None
    return factor_sum(moments.beside(like.keys), replace(like, mask=None, scale=scale))


def held_as(name: str, array: Any) -> Any:
    """Return an array of float64 as a state holds it, or raise."""
    if isinstance(array, np.ndarray) and array.dtype == np.float64:
        return array
    if array_api_compat.is_torch_array(array) and array.device.type == "cpu":
        array = to_numpy(array.detach())
    if not array_api_compat.is_array_api_obj(array) or str(array.dtype).rpartition(".")[2] != "float64":
        kind = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"{name} is of {kind}; expected an array of float64, as the attributes of a state are")
    return array


def same_decay(mine: Any, other: Any, batch: tuple[int, ...]) -> bool:
    """Tell whether decays, None for 1, are the same for all of a batch."""
    if mine is None and other is None:
        return True
    held = (np.broadcast_to(1.0 if decay is None else decay, batch) for decay in (mine, other))
    return bool(np.equal(*held).all())


_WAITING = 9 << 20  # at most this many bytes of rows and payload wait together; one block may take more
_TOGETHER = 16  # at most this many blocks of them
_NO_NUMBERS: Int64 = np.zeros(0, np.int64)
_FEW = 1 << 12  # numbers below which numpy copies and checks as fast as compiled code


def readable(K: Any, mask: Any = None) -> tuple[Matrices, Rows]:
    """Return a chunk of keys of any kind where compiled code can read it: on a CUDA device, or in main memory."""
    matrices = as_matrices(K, "K").masked(mask)
    return (matrices, Rows.of(matrices)) if on_cuda(matrices.data) else matrices_in_memory(matrices, "K")


@where_arrays_are
def in_main_memory(K: Any, mask: Any = None, name: str = "K") -> tuple[Matrices, Rows]:
    """Return a chunk of keys of any kind in main memory."""
    return matrices_in_memory(as_matrices(K, name).masked(mask), name)


def matrices_in_memory(matrices: Matrices, name: str) -> tuple[Matrices, Rows]:
    """Return matrices in main memory, and their rows."""
    if matrices.mask is not None:
        matrices = replace(matrices, mask=to_numpy(matrices.mask))
    if on_cuda(matrices.data):
        matrices = replace(matrices, data=to_numpy(matrices.data), give_back=np.asarray)
    if not isinstance(matrices.data, np.ndarray):
        batch, data, mask = matrices.batch, matrices.data, matrices.mask
        data = data.cpu() if array_api_compat.is_torch_array(data) else to_numpy(data)
        matrices = replace(as_matrices(data, name), batch=batch, mask=mask)
    return matrices, Rows.of(matrices)


def rows_in_memory(rows: Rows) -> Rows:
    """Return rows of a CUDA device in main memory; others as they are."""
    if not on_cuda(rows.keys):
        return rows
    return replace(rows, keys=to_numpy(rows.keys), mask=None if rows.mask is None else to_numpy(rows.mask))


def as_they_came(keys: npt.NDArray[Any], format: Any) -> npt.NDArray[Any]:
    """Return stored keys in the dtype in which they came, float32 for bfloat16."""
    if format == "bfloat16":
        return to_float64(keys, format).astype(np.float32)
    return keys.view(np.float16) if format == "float16" else keys


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
        large = self._is_large(n, together)
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
        if stop < n:
            self._fill(rows.between(stop, n), *(array[:, stop:] for array in payload))

    def with_chunk(self, keys: npt.NDArray[Any], first: int) -> BlockBuffer | None:
        """Return the buffer after a chunk of plain numpy rows (b, m, d), numbered from `first` on, that only wait.

        The payload is row numbers. None if the chunk needs `push`: for an error, a conversion, or because rows are
        given away or take new memory.
        """
        held, n, count, together = self._held.keys, keys.shape[1], self.count, self._together
        stop = count + n
        if stop > held.shape[1] or stop >= (together - self.blocks % together) * BLOCK or self._is_large(n, together):
            return None
        if not _copied_finite(keys, held[:, count:stop], self._payload[0][0, count:stop], first):
            return None
        other = self.copy()
        other.count = stop
        return other

    @staticmethod
    def _is_large(n: int, together: int) -> bool:
        """Tell whether a chunk is worth the work on its blocks alone."""
        return n >= min(together, max(together // 2, 4)) * BLOCK

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
        finite = _copied_finite(rows.keys, place)
        if rows.mask is not None:
            place[~rows.mask] = 0
        if not finite:
            _require_finite(Rows(place, rows.format))
        for there, array in zip(self._payload, payload, strict=True):
            there[:, self.count : stop] = to_numpy(array) if on_cuda(array) else array
        self.count = stop


@cache
def _compiled_copy() -> Callable[..., bool]:
    from levattn._kernels.rows.cpu import copied_finite  # loads Numba

    return copied_finite


def _copied_finite(source: Any, target: Any, numbers: Int64 = _NO_NUMBERS, first: int = 0) -> bool:
    """Copy rows, number them from `first`, and tell whether all numbers of the rows are surely finite."""
    if source.size >= _FEW and _compiled_copy()(source, target, numbers, first):
        return True
    target[...] = source
    if len(numbers):
        numbers[:] = np.arange(first, first + len(numbers))
    return target.dtype.kind == "f" and math.isfinite(np.einsum("bij->", target))  # the fastest sum


def _require_finite(rows: Rows) -> None:
    """Raise FloatingPointError if rows in main memory hold NaN or infinity."""
    if rows.format in ("float64", "float32") and math.isfinite(np.einsum("bij->", rows.keys)):  # the fastest sum
        return
    with np.errstate(over="ignore", invalid="ignore"):
        check_finite(rows, KEYS.column_figures(rows, largest=False))


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


_FORMATS = ("float64", "float32", "float16", "bfloat16")


class BlockSums:
    """The second moment (b, d, d) of rows that are numbered as they come and summed in blocks."""

    def __init__(self, b: int, d: int) -> None:
        self._b, self._d = b, d
        self._weight: Float64 = np.zeros(b)
        # the sums, and rows that wait; both change at once, because several threads may read
        self._held: tuple[GramAccumulator, BlockBuffer | None] = GramAccumulator(b, d), None

    @property
    def _held_array(self) -> Any:
        return self._held[0]

    def add(self, rows: Rows, weights: Any, present: npt.NDArray[np.int64], rounded: bool = False) -> None:
        """Add rows, `present` of them (b,), or raise without a change; rows with weights are held in float64.

        `rounded` tells that the rows were rounded before, as products with roots of weights are.
        """
        gained: Any = present
        if weights is not None:  # Σ w k kᵀ is the second moment of √w k
            weights, rows = to_numpy(weights), rows_in_memory(rows)
            gained = weights.sum(axis=1)
            roots = np.sqrt(weights)
            rounded = rounded or not exact_products(roots)
            rows = Rows(to_float64(rows.keys, rows.format) * roots[..., None], "float64", rows.mask)
        sums, tail = self._held
        sums, tail = sums.copy(), BlockBuffer(self._b, self._d, rows.format) if tail is None else tail.copy()
        sums.rounded = sums.rounded or rounded
        before = tail.blocks * BLOCK + tail.count
        try:
            tail.push(rows, sums.add)
        except FloatingPointError:
            refuse_nonfinite(rows, before)
        self._held, self._weight = (sums, tail), self._weight + gained

    def settle(self) -> tuple[GramAccumulator, BlockBuffer | None]:
        """Add all whole blocks to the sums, and return the sums and the rows that wait."""
        sums, tail = self._held
        if tail is not None and tail.count >= BLOCK:
            sums, tail = sums.copy(), tail.copy()
            tail.flush(sums.add)
            self._held = sums, tail
        return sums, tail

    def _parts(self) -> tuple[GramAccumulator, Rows]:
        sums, tail = self.settle()
        return sums, (tail or BlockBuffer(self._b, self._d, "float64")).rows

    def _total(self) -> tuple[Expansion, Exponents]:
        sums, rows = self._parts()
        return sums.total(rows)

    def result(self) -> Float64:
        """Return the moment."""
        moments, exponents = self._total()
        with np.errstate(over="ignore"):
            return np.array(moments.scaled(-exponents).in_main_memory().high)

    def apart_from_last(self) -> Float64:
        """Return the moment of all columns but the last, less their projections to it, in the digits of the sums."""
        moments, exponents = self._total()
        moments, powers = moments.in_main_memory(), exponents[:, :-1]
        out = np.zeros((self._b, self._d - 1, self._d - 1))
        for item, G in enumerate(moments.high):
            B = np.eye(self._d)
            B[-1, :-1] = -G[:-1, -1] / G[-1, -1]
            H = moments.in_basis(item, B)  # what the rounding of B leaves on the last column is small
            out[item] = H[:-1, :-1] - np.outer(H[:-1, -1], H[:-1, -1]) / H[-1, -1]
        return np.asarray(np.ldexp(out, powers[:, :, None] + powers[:, None, :]))

    def weight(self) -> Float64:
        """Return the sum of the weights."""
        return self._weight.copy()

    def factor(self) -> Factor:
        """Return its factor."""
        return factor_of(*self._parts())

    def check(self, other: BlockSums) -> None:
        """Raise if another's rows cannot be added."""
        _, tail = self._held
        _, its = other._held
        if tail is not None and its is not None:
            mine, format = tail.rows.format, its.rows.format
            if mine != format:
                raise TypeError(f"other has keys of dtype {format}; expected {mine}, as here")

    def merge(self, other: BlockSums, _count: npt.NDArray[np.int64]) -> None:
        """Add another's rows."""
        (sums, tail), (_, its) = self.settle(), other._held
        if its is not None and tail is None:
            tail = BlockBuffer(self._b, self._d, its.rows.format)
        total = other._total()
        sums = sums.copy()
        sums.merge(*total)
        self._held = sums, tail
        self._weight = self._weight + other._weight

    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return the fields and arrays for `from_parts`."""
        sums, tail = self.settle()
        fields, arrays = sums.parts()
        arrays |= {"weight": self._weight}
        if tail is not None:
            arrays |= {"tail": tail.rows.keys}
        return fields | {"format": None if tail is None else tail.rows.format}, arrays

    @classmethod
    def from_parts(cls, fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], b: int, d: int) -> BlockSums:
        """Restore the sums from `parts`, or raise ValueError, TypeError or LookupError."""
        shaped(arrays["exponents"], np.int32, (b, d))  # before the claims of the fields take memory
        self = cls(b, d)
        sums, tail = GramAccumulator.from_parts(fields, arrays, b, d), None
        self._weight = _weights_of(arrays, b)
        if fields["format"] not in (None, *_FORMATS):
            raise ValueError(f"keys are of format {fields['format']!r}")
        if fields["format"] is not None:
            tail = BlockBuffer(b, d, fields["format"])
            tail.hold(sums.blocks.count, arrays["tail"])
        self._held = sums, tail
        return self


class RunningSums:
    """The diagonal (b, d) of a second moment, or all of it (b, d, d), multiplied by decay (b,) before each row.

    Arrays have the library and the device of the first rows, but are numpy's for torch in main memory.
    """

    def __init__(self, b: int, d: int, full: bool, decay: Float64 | None) -> None:
        if full:
            require_room(b, d)
        self.decay = decay
        self._shape = (b, d, d) if full else (b, d)
        self._full = full
        self.rows = 0
        self.held: Any = None

    @property
    def _held_array(self) -> Any:
        return self.held

    def sums(self) -> Any:
        """Return the moment and the sum of weights as they are held; do not write to them."""
        if self.held is None:
            return np.zeros(self._shape), np.zeros(self._shape[:1])
        return self.held

    def add(self, rows: Rows, weights: Any, _present: npt.NDArray[np.int64], _rounded: bool) -> None:
        """Add rows, or raise without a change."""
        held, X = self.held, decode_half(rows.keys, rows.format)
        if held is not None and array_namespace(held[0]) is not array_namespace(X):
            held = tuple(to_device(to_numpy(part), X) for part in held)
        with np.errstate(over="ignore", invalid="ignore"):
            new = kernels_for("tokens", X).add_squares(X, rows.mask, weights, self.decay, held, full=self._full)
        try:
            check_finite(rows, to_numpy(new[0]))
        except FloatingPointError:
            refuse_nonfinite(rows, self.rows)
        self.held, self.rows = new, self.rows + rows.shape[1]

    def result(self) -> Any:
        """Return the moment, a copy."""
        return _copied(self.sums()[0])

    def weight(self) -> Any:
        """Return the sum of the weights, a copy."""
        return _copied(self.sums()[1])

    def factor(self) -> Factor:
        """Return its factor, in main memory."""
        total = to_numpy(self.result())
        if not self._full:
            total = np.where(np.eye(self._shape[1], dtype=np.bool_), total[:, :, None], 0.0)
        exponents = np.zeros(total.shape[:2], np.int32)
        like = Rows(np.empty((total.shape[0], 0, total.shape[1])), "float64")
        return factor_of_sum(Expansion.plain(total), exponents, like)

    def check(self, other: RunningSums) -> None:
        """Raise if the sums of later rows cannot be added."""
        if self.held is None or other.held is None:
            return
        here, there = (array_namespace(sums.held[0]) for sums in (self, other))
        if here is not there:
            raise TypeError(
                f"this state holds arrays of {here.__name__} and was given arrays of {there.__name__}; expected one "
                "library. Keep a state for each, and merge them by their bytes"
            )

    @where_arrays_are
    def merge(self, other: RunningSums, count: npt.NDArray[np.int64]) -> None:
        """Add the sums of later rows, `count` (b,) of them."""
        if other.held is None:
            return
        total, weight = other.held
        if self.held is not None:
            xp = array_namespace(total)
            mine, mass = self.held
            if self.decay is not None:
                kept = self.decay**count
                kept = kept if isinstance(mine, np.ndarray) else to_device(kept, mine)
                mine = mine * xp.reshape(kept, (-1, *[1] * (mine.ndim - 1)))
                mass = mass * kept
            total, weight = mine + total, mass + weight
        self.held, self.rows = (total, weight), self.rows + other.rows

    def parts(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return the fields and arrays for `restore`."""
        total, weight = map(to_numpy, self.sums())
        return {"rows": self.rows}, {"total": total, "weight": weight}

    def restore(self, rows: int, total: Float64, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Restore a moment and the other arrays of `parts`, or raise ValueError or LookupError."""
        diagonal = np.diagonal(total, axis1=1, axis2=2) if self._full else total
        if np.isnan(total).any() or (diagonal < 0).any():
            raise ValueError("a sum of squares is negative or NaN")
        self.rows, self.held = rows, (total, _weights_of(arrays, len(total)))


def _weights_of(arrays: dict[str, npt.NDArray[Any]], b: int) -> Float64:
    """Return the sums of weights among the arrays of a state, or raise ValueError or LookupError."""
    weight = shaped(arrays["weight"], np.float64, (b,))
    if (weight < 0).any():
        raise ValueError("a sum of weights is negative")
    return weight


def _copied(array: Any) -> Any:
    return array_namespace(array).asarray(array, copy=True)
