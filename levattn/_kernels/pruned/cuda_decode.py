"""Decode steps over a compressed cache on a CUDA device: one token attends to slots and to the tokens after them.

Nothing is copied: kernels read slots and later tokens where they lie. A step takes two launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

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
_BLOCKS = 2**31 - 1
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


def attend_token(
    q: Any,
    slots: tuple[Any, Any, Any],
    near: tuple[Any, Any, Any],
    heads: tuple[int, ...],
    scale: float,
    softcap: float | None,
    Y: Any,
    empty: Callable[[int], Any],
) -> bool:
    """Write to Y (B, H, 1, D) the softmax attention of rows q (B, H, 1, d), and tell whether kernels can do it.

    `slots`: keys (B, G, s, d), values (B, G, s, D), and log-weights (B, G, s) float32 or None.
    `near`: keys and values (B, all heads, t, ·), and `present` (B, t) bool, or None. The last token always counts.
    `heads`: the numbers of the G heads, ascending, among all of them. The query heads of each write their rows.
    `softcap`: c of the logits c tanh(l / c) before weights are added, or None.
    `empty`: returns an array of so many numbers of float32.

    All but log-weights and `present` have one format, of at most 32 bits. Last axes are contiguous, and Y is.
    """
    (B, G, s, d), D = slots[0].shape, slots[1].shape[3]
    H, (all_heads, t), listed = q.shape[1], near[0].shape[1:3], head_list(heads)
    if listed is None or not d or not D:
        return False
    r, chunk = H // all_heads, chunk_of(s, t)
    held = [with_steps(array, 3) for array in (*slots[:2], *near[:2])]
    pack = _PACK // q.dtype.itemsize
    packed = d % pack == 0 and D % pack == 0 and all(_in_packs(pack, *each) for each in held)
    pack = pack if packed else 1
    rows = next((each for each in _ROWS if each >= r), _ROWS[-1]) if packed else _PLAIN
    chunks = -(-s // chunk) + -(-t // chunk)
    shared = 4 * rows * (d + _THREADS * pack + chunk)
    if shared + _STATIC > shared_limit() or B * G * max(chunks, r) > _BLOCKS:
        return False
    parts = empty(B * G * r * chunks * (2 + D))
    given = [*with_steps(q, 2), *held[0], *held[1], *with_steps(slots[2], 2), *held[2], *held[3]]
    given += [*with_steps(near[2], 2), s, t, chunk, G, r, d, D, *listed, scale, softcap or 0.0, parts]
    kind = stored(q.dtype)
    grid = B * G * chunks, -(-r // rows)
    launch("decode", "attend_parts", (kind, str(pack), str(rows)), grid, given, threads=_THREADS, shared=shared)
    launch(
        "decode",
        "join_parts",
        (kind,),
        (B * G * r, -(-D // _COLUMNS)),
        [parts, chunks, G, r, H, D, *listed, Y],
    )
    return True


def open_codes(coded: tuple[Any, ...], entries: int, bits: int, rows: Any) -> None:
    """Write rows (..., s, d) of codes, lows, steps, sizes and means, or None; see codes.cu."""
    codes, lows, steps, sizes, means = coded
    (s, d), w, blocks = rows.shape[-2:], codes.shape[-1], lows.shape[-1]
    grid = math.prod(rows.shape[:-2]), -(-s // _OPENED), -(-d // 32)
    arguments = [codes, lows, steps, sizes, means, s, d, w, blocks, entries, bits, rows]
    launch("codes", "open_codes", (stored(rows.dtype),), grid, arguments)


def _in_packs(pack: int, array: Any, *steps: int) -> bool:
    """Tell whether rows of an array begin at packs of so many numbers; the steps of an axis of one do not count."""
    if hasattr(array, "data_ptr"):
        start = array.data_ptr()
    else:
        start = array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data
    if start % _PACK:
        return False
    b, h, n = array.shape[:3]
    return not ((b > 1 and steps[0] % pack) or (h > 1 and steps[1] % pack) or (n > 1 and steps[2] % pack))
