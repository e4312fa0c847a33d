"""Decode steps over a compressed cache on a CUDA device: one token attends to slots and to the tokens after them.

Nothing is copied: kernels read slots, or their codes, and later tokens where they lie. A step takes two launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from levattn._kernels.cuda_source import launch, shared_limit, stored, with_steps

# As in decode.cu
_THREADS = 128  # of a block that reads a chunk
_COLUMNS = 128  # of a block that joins chunks

_ROWS = (1, 2, 4, 8)  # of a block, where it reads packs of numbers
_PLAIN = 4  # rows of a block that reads single numbers
_PACK = 16  # bytes
_SHORTEST, _LONGEST = 64, 256  # keys of a chunk
_MANY = 128  # chunks, from which on they are longer
_STATIC = 1024  # upper bound of the static shared memory of kernels, in bytes
_LISTED = 64  # heads that bits can tell apart
_BLOCKS, _SLABS = 2**31 - 1, 65535  # of a grid along its first axis, and along the others
_OPENED = 32  # rows of a block that opens codes, as in codes.cu


def chunk_of(s: int, t: int) -> int:
    """Return the number of keys of a chunk, for so many slots and later tokens."""
    chunk = _SHORTEST
    while chunk < _LONGEST and s + t > _MANY * chunk:
        chunk *= 2
    return chunk


def head_list(heads: Sequence[int]) -> tuple[int, int] | None:
    """Return the first of ascending heads, and bits for all of them; 0 if they follow each other.

    None if bits cannot tell them.
    """
    first, last = heads[0], heads[-1]
    if last - first + 1 == len(heads):
        return first, 0
    return None if last - first >= _LISTED else (first, sum(1 << (head - first) for head in heads))


class Codes(NamedTuple):
    """Rows (..., s, width) of few bits, in arrays without gaps, as `Coded` of the adapters has them; see codes.cuh."""

    codes: Any
    lows: Any
    steps: Any
    sizes: Any
    means: Any
    width: int
    bits: int

    @property
    def arrays(self) -> list[Any]:
        """The arrays that there are."""
        return [array for array in self[:5] if array is not None]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return (*self.codes.shape[:-1], self.width)

    @property
    def entries(self) -> int:
        """The number of columns of a block."""
        return int(self.codes.shape[-1]) * 8 // self.bits // int(self.lows.shape[-1])

    def are_in_packs(self, pack: int) -> bool:
        """Tell whether so many columns lie in one block, and their codes one after another from a multiple on."""
        sizes = self.width, self.codes.shape[-1], self.entries, _start(self.codes)
        return all(size % pack == 0 for size in sizes)


_NO_CODES = [None] * 8 + [0] * 7  # the parameters of codes


@dataclass(frozen=True, eq=False)
class HeldSlots:
    """The slots of some heads as kernels of a token take them: made once, as slots do not change.

    shape: sequences, heads, slots.

    d, D: columns of keys and of values.

    pack: numbers that are read at once.

    listed: see `head_list`.

    coded: whether slots are codes.

    arrays, codes: parameters of the kernel.
    """

    device: Any
    shape: tuple[int, int, int]
    d: int
    D: int
    pack: int
    listed: tuple[int, int]
    coded: bool
    arrays: list[Any]
    codes: list[Any]

    @classmethod
    def of(cls, keys: Any, values: Any, weights: Any, heads: tuple[int, ...], itemsize: int) -> HeldSlots | None:
        """Return the slots of heads, or None if kernels do not read them.

        keys, values: (B, G, s, d) and (B, G, s, D), of one format of `itemsize` bytes, or `Codes` of such rows.

        weights: logarithms (B, G, s) float32, or None.

        heads: their numbers, ascending.

        Last axes are contiguous.
        """
        pack, listed, codes, coded = _PACK // itemsize, head_list(heads), _NO_CODES, isinstance(keys, Codes)
        if coded != isinstance(values, Codes) or listed is None:
            return None
        (*shape, d), D = keys.shape, values.shape[-1]
        if not d or not D:
            return None
        if coded:
            if not (keys.are_in_packs(pack) and values.are_in_packs(pack)) or values.sizes is not None:
                return None
            rows = [None, 0, 0, 0] * 2
            codes = [*keys[:5], *values[:3]]
            codes += [size for part in (keys, values) for size in (*_sizes(part), part.entries)] + [keys.bits]
        else:
            each = [with_steps(array, 3) for array in (keys, values)]
            rows = [*each[0], *each[1]]
            if d % pack or D % pack or not all(_in_packs(pack, *part) for part in each):
                pack = 1
        arrays, device = [*rows, *with_steps(weights, 2)], getattr(keys.codes if coded else keys, "device", None)
        return cls(device, (shape[0], shape[1], shape[2]), d, D, pack, listed, coded, arrays, codes)


def _sizes(coded: Codes) -> tuple[int, int]:
    return coded.codes.shape[-1], coded.lows.shape[-1]


def attend_token(
    q: Any,
    slots: HeldSlots,
    near: tuple[Any, Any, Any],
    scale: float,
    softcap: float | None,
    Y: Any,
    empty: Callable[[int], Any],
) -> bool:
    """Write to Y (B, H, 1, D) the softmax attention of rows q (B, H, 1, d), and tell whether kernels can do it.

    `near`: keys and values (B, all heads, t, ·), and `present` (B, t) bool, or None. The last token always counts.
    The query heads of each of the heads that have `slots` write their rows.
    `softcap`: c of the logits c tanh(l / c) before weights are added, or None.
    `empty`: returns an array of so many numbers of float32.

    All but log-weights and `present` have the format of the slots, of at most 32 bits. Last axes are contiguous,
    and so is Y.
    """
    (B, G, s), d, D, pack, coded = slots.shape, slots.d, slots.D, slots.pack, slots.coded
    H, (all_heads, t) = q.shape[1], near[0].shape[1:3]
    r, chunk = H // all_heads, chunk_of(s, t)
    keys, values = with_steps(near[0], 3), with_steps(near[1], 3)
    if pack > 1 and not (_in_packs(pack, *keys) and _in_packs(pack, *values)):
        if coded:
            return False
        pack = 1
    rows = next((each for each in _ROWS if each >= r), _ROWS[-1]) if pack > 1 else _PLAIN
    chunks = -(-s // chunk) + -(-t // chunk)
    shared = 4 * (rows * (d + _THREADS * pack + chunk) + 2 * d * coded)
    if shared + _STATIC > shared_limit() or B * G * max(chunks, r) > _BLOCKS:
        return False
    parts = empty(B * G * r * chunks * (2 + D))
    given = [*with_steps(q, 2), *slots.arrays, *keys, *values, *with_steps(near[2], 2), *slots.codes]
    given += [s, t, chunk, G, r, d, D, *slots.listed, scale, softcap or 0.0, parts]
    kind = stored(q.dtype)
    types = kind, str(pack), str(rows), "true" if coded else "false"
    launch("decode", "attend_parts", types, (B * G * chunks, -(-r // rows)), given, threads=_THREADS, shared=shared)
    grid = B * G * r, -(-D // _COLUMNS)
    launch("decode", "join_parts", (kind,), grid, [parts, chunks, G, r, H, D, *slots.listed, Y])
    return True


def open_codes(coded: Codes, rows: Any) -> bool:
    """Write rows (..., s, d) of codes, and tell whether the kernel can do it; see codes.cu."""
    s, d = rows.shape[-2:]
    grid = math.prod(rows.shape[:-2]), -(-s // _OPENED), -(-d // 32)
    if max(grid[1:]) > _SLABS:
        return False
    arguments = [*coded[:5], s, d, *_sizes(coded), coded.entries, coded.bits, rows]
    launch("codes", "open_codes", (stored(rows.dtype),), grid, arguments)
    return True


def _in_packs(pack: int, array: Any, *steps: int) -> bool:
    """Tell whether rows of an array begin at packs of so many numbers; the steps of an axis of one do not count."""
    if _start(array) % _PACK:
        return False
    b, h, n = array.shape[:3]
    return not ((b > 1 and steps[0] % pack) or (h > 1 and steps[1] % pack) or (n > 1 and steps[2] % pack))


def _start(array: Any) -> int:
    """Return where an array or a tensor begins."""
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    return int(array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data)
