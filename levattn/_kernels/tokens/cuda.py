"""Token statistics attention on a CUDA device: launches of tokens.cu and tokens_back.cu.

A sequence is cut into runs of 16 tokens, counted from its first token. A block of threads takes all heads and channels
of a run. The sums of runs are combined in float64, in an order that depends on earlier runs alone. So no bit of a
causal token depends on later tokens or on other sequences. The error in single precision does not grow with the number
of tokens. If no sequence has more than one run, as in decoding, one launch does all steps, with the same bits.

Otherwise each pass reads the tokens once, and a block that needs them again keeps them in shared memory. With the
logits "diagonal" there are three forward passes: sums of squares, memberships with their weighted sums, and output.
Other logits need two. The last pass writes as many numbers as it reads. A pass needs the sums of all earlier runs from
other blocks, and blocks do not wait for each other, so fewer passes are impossible. The sums of runs, a sixteenth of
the tokens, are written and read once before they are combined, and once after. Passes go forward and backward in turn,
so that most of some ten megabytes of tokens are still in the cache. Gradients take the same passes except the last,
then two that read tokens and dY; the second writes dW. With "diagonal" a third pass reads the tokens and dW, and
writes dW again.

Kernels widen tokens of float16 and bfloat16 (words) as they read them, and round outputs as they write them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from levattn._core.cached import cached_property
from levattn._core.types import Int64
from levattn._kernels.cuda_source import (
    launch,
    namespace,
    new_array,
    on_device,
    shared_limit,
    stored,
    with_rows,
    with_steps,
)
from levattn._kernels.tokens import LOGITS, TokenArguments, TokenSums

# The same constants as in tokens.cuh and tokens.cu
_RUN = 16
_MOST = 256  # threads of a block
_COLUMNS, _LINES = 32, 16  # of a scan
_SUMMING = 128  # threads of a block that sums gradients of temperatures
_UNITS = {"float": 4, "double": 2}  # channels of a thread, where their number allows it
_BACK_UNITS = 2
_MOST_C, _MOST_GAIN = 1e12, 1e24  # beyond these, products of float32 may leave its range
_TINY = {"float": 2.0**-126, "double": 2.0**-1022}  # the smallest normal numbers
_STATIC = 4096  # upper bound of the static shared memory of a kernel, in bytes


def forward(x: TokenArguments, *, state: bool = False) -> tuple[Any, TokenSums | None]:
    """Return the output (b, h, T, d), and if `state` the sums after all tokens of each sequence."""
    work = _Work(x)
    if work.short:
        return work.attend(state=state)
    squares, A, n = work.squares(whole=state)
    P, _, sums = work.weigh(squares, sums=work.adds and (state or work.begins))
    starts, M, N = work.weighted(sums, whole=state)
    return work.write(P, starts), (A, n, M, N) if state else None


def memberships(x: TokenArguments) -> Any:
    """Return the memberships (b, h, T)."""
    work = _Work(x)
    return work.weigh(work.squares()[0])[0]


def backward(x: TokenArguments, dY: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of W (b, h, T, d), temperature (b, h), and offset (b, h, T) or None.

    Where second moments take products of float32 out of its range, gradients of W and temperature are NaN. To choose
    float64 instead, the call would have to read the moments, and so wait for the device.
    """
    kind = x.temperature.dtype
    if kind == np.float32 and (x.c > _MOST_C or x.gain > _MOST_GAIN):
        found = backward(_widened(x), _wide(dY))
        return tuple(part if part is None else part.astype(kind) for part in found)  # type: ignore[return-value]
    work = _Work(x)
    squares, *_ = work.squares()
    P, levels, sums = work.weigh(squares, levels=True, sums=work.adds and work.begins)
    starts, *_ = work.weighted(sums)
    return work.gradients(dY, squares, starts, P, levels)


def _wide(array: Any) -> Any:
    """Return an array in float64; words are bfloat16."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def _widened(x: TokenArguments) -> TokenArguments:
    """Return the arguments in float64."""
    offset = None if x.offset is None else _wide(x.offset)
    least = 2.0**-1022 if x.least == 2.0**-126 else x.least  # the smallest normal number of the dtype
    return replace(x, W=_wide(x.W), temperature=_wide(x.temperature), offset=offset, least=least)


@dataclass(frozen=True)
class _Plan:
    """The runs of a call."""

    places: Int64  # the first token and the first run of each sequence, and their ends, (2, n + 1)
    longest: int  # sequence
    runs: int
    several: bool  # whether a sequence has more than one run


def _planned(offsets: tuple[int, ...]) -> _Plan:
    bounds = np.array(offsets, np.int64)
    lengths = np.diff(bounds)
    counts = -(-lengths // _RUN)
    firsts = np.append(0, np.cumsum(counts)).astype(np.int64)
    longest, several = int(lengths.max(initial=0)), bool((counts > 1).any())
    return _Plan(np.stack([bounds, firsts]), longest, int(firsts[-1]), several)


_planned_before = lru_cache(64)(_planned)  # of one sequence, as calls of a model repeat their lengths


class _Work:
    """One call: its sizes, its runs, and the passes over its tokens."""

    def __init__(self, x: TokenArguments) -> None:
        self.x = x
        self.b, self.h, self.T, self.d = x.W.shape
        self.n = len(x.offsets) - 1
        self.key = stored(x.W.dtype)
        self.dtype = x.temperature.dtype  # of the computation
        self.real = stored(self.dtype)
        offsets = tuple(x.offsets.tolist())
        self.plan = _planned_before(offsets) if self.n == 1 else _planned(offsets)
        self.adds = x.causal or x.state is None  # to sums; else all sums are given
        self.pitch = -(-(self.h * self.d + self.h) // 4) * 4
        self.W = self._readable(x.W)
        self._rates = on_device(x.decay, np.float64)
        least = max(x.least, _TINY[self.real])
        self._logits = [LOGITS.index(x.logits), x.mean, least]
        self._output = [x.gain, x.c, x.ridge, self.T]
        self._sizes = [self.h, self.d, self.pitch, x.causal]
        self._weighing = [*with_steps(x.temperature, 2), *with_steps(x.offset, 3), *self._logits]

    # -- sequences of one run ----------------------------------------------------------

    @cached_property
    def short(self) -> bool:
        """Whether a block sees all of a sequence, and has room for its sums."""
        if self.plan.longest > _RUN:
            return False
        return self._geometry(self._units(self.W), rows=2, scores=True, parts=_RUN)[1] + _STATIC <= shared_limit()

    def attend(self, *, state: bool) -> tuple[Any, TokenSums | None]:
        """Return the output, and if `state` the sums after all tokens of each sequence."""
        x = self.x
        before = self._states(x.state) if x.state is not None else (None,) * 4
        after = (*self._empty_sums(), *self._empty_sums()) if state and self.adds else (None,) * 4
        V, Y = self._units(self.W), self._like_tokens(x.W.dtype)
        threads, shared, room = self._geometry(V, rows=2, scores=True, parts=_RUN, reads=3)
        offsets = None if self.n == 1 else on_device(x.offsets)
        given = [*with_steps(self.W, 3), *with_steps(x.mask, 2), offsets, None, self.n, self._rates, *self._sizes]
        given += [room, *before, self.adds, *self._weighing, *self._output, *with_steps(Y, 3), *after]
        types = (self.key, self.real, str(V))
        launch("tokens", "attend_tokens", types, (self.b * self.n,), given, threads=threads, shared=shared)
        return Y, (after if self.adds else before) if state else None

    # -- forward -----------------------------------------------------------------------

    def squares(self, *, whole: bool = False) -> tuple[Any, Any, Any]:
        """Return Σ w² before each run or sequence, and if `whole` the sums after each sequence."""
        sums = None
        needed = self.x.logits == "diagonal" and self.begins
        if self.adds and (whole or needed):
            sums = self._sums()
            self._pass("tokens", "sum_tokens", self._units(self.W), [self._counts, sums])
        if not needed and not whole:
            return None, None, None
        return self._scan(sums, None if self.x.state is None else self.x.state[:2], whole=whole)

    def weigh(self, squares: Any, *, levels: bool = False, sums: bool = False) -> tuple[Any, Any, Any]:
        """Return the memberships, the factors of the temperature, and the sums of runs weighted by memberships."""
        P = self._memberships()
        multiplied = self._memberships() if levels else None
        weighted = self._sums() if sums else None
        arguments = [squares, *self._weighing, self.T, self._counts, P, multiplied, weighted]
        reads = (self.x.logits != "none") + sums
        self._pass("tokens", "weigh_tokens", self._units(self.W), arguments, reads=reads, scores=True, parts=_RUN)
        return P, multiplied, weighted

    def weighted(self, sums: Any, *, whole: bool = False) -> tuple[Any, Any, Any]:
        """Return Σ Π w² before each run or sequence, and if `whole` the sums after each sequence."""
        if not self.begins and not whole:
            return None, None, None
        return self._scan(sums, None if self.x.state is None else self.x.state[2:], whole=whole)

    def write(self, P: Any, starts: Any) -> Any:
        """Return the output."""
        Y = self._like_tokens(self.x.W.dtype)
        self._pass("tokens", "write_tokens", self._units(self.W), [starts, P, *self._output, *with_steps(Y, 3)])
        return Y

    # -- gradients ---------------------------------------------------------------------

    def gradients(self, dY: Any, squares: Any, starts: Any, P: Any, levels: Any) -> tuple[Any, Any, Any]:
        """Return the gradients of W, temperature and offset."""
        x = self.x
        dY, dW = self._readable(dY), self._like_tokens(self.dtype)
        V = min(_BACK_UNITS, self._units(self.W), self._units(dY))
        through = self.adds and self.begins  # whether runs depend on earlier runs
        diagonal = x.logits == "diagonal"
        coming = None
        if through:
            flows = self._sums()
            self._pass(
                "tokens_back", "trace_tokens", V, [starts, P, *with_steps(dY, 3), *self._output, flows], parts=1
            )
            coming = self._scan(flows, backwards=True)[0]
        doffset = None if x.offset is None else self._memberships()
        temperatures = new_array((self.b, self.plan.runs, self.h))
        e = self._memberships() if diagonal else None
        flows = self._sums() if diagonal and through else None
        temperature = with_steps(x.temperature, 2)
        arguments = [squares, starts, coming, P, levels, *with_steps(dY, 3), *temperature, *self._logits]
        arguments += [*self._output, *with_steps(dW, 3), doffset, temperatures, e, flows]
        reads = 1 + x.causal + (x.logits == "norm" or flows is not None)
        self._pass("tokens_back", "spread_tokens", V, arguments, reads=reads, scores=True, parts=_RUN)
        if diagonal:
            coming = self._scan(flows, backwards=True)[0] if through else None
            arguments = [squares, coming, e, self._logits[2], self.T, *with_steps(dW, 3)]
            self._pass("tokens_back", "finish_tokens", V, arguments, reads=1 + x.causal)
        dtemperature = new_array((self.b, self.h), self.dtype)
        arguments = [temperatures, self.b, self.plan.runs, self.h, dtemperature]
        grid = (-(-self.b * self.h // (_SUMMING // 32)),)
        launch("tokens_back", "sum_temperatures", (self.real,), grid, arguments, threads=_SUMMING)
        return dW, dtemperature, doffset

    # -- between passes ----------------------------------------------------------------

    @cached_property
    def begins(self) -> bool:
        """Whether runs begin with nonzero sums."""
        return not self.x.causal or self.x.state is not None or self.plan.several

    def _scan(
        self, sums: Any, first: Any = None, *, whole: bool = False, backwards: bool = False
    ) -> tuple[Any, Any, Any]:
        """Return the sums before each run, or of each sequence if all tokens see the same, and if `whole` all sums."""
        xp = namespace()
        before = self._states(first or (None, None))
        totals, firsts = None, self._places[1]
        if sums is None:  # without runs, sequences end with their first sums
            firsts = xp.zeros(self.n + 1, np.int64)
        if not self.x.causal:
            totals = new_array((self.b, self.n, self.pitch), self.dtype)
        after = self._empty_sums() if whole else (None, None)
        grid = (self.b * self.n, -(-(self.h * self.d + self.h) // _COLUMNS))
        arguments = [firsts, self.n, self._rates, self._counts, *before, *self._sizes, backwards, sums, totals, *after]
        launch("tokens", "scan_tokens", (self.real,), grid, arguments, threads=_COLUMNS * _LINES)
        return sums if self.x.causal else totals, after[0], after[1]

    @cached_property
    def _counts(self) -> Any:
        """Return an array for the number of tokens of each run that take part, if sums decay; a pass writes it."""
        return None if self._rates is None else new_array((self.b, self.plan.runs), np.int32)

    def _states(self, sums: Any) -> tuple[Any, ...]:
        return tuple(on_device(part, np.float64) for part in sums)

    def _empty_sums(self) -> tuple[Any, Any]:
        """Return arrays for a sum of each sequence and its weight."""
        shape = (self.b, self.h, self.n)
        return new_array((*shape, self.d)), new_array(shape)

    # -- geometry ----------------------------------------------------------------------

    @cached_property
    def _places(self) -> tuple[Any, Any]:
        """Return the first token and the first run of each sequence."""
        offsets, firsts = on_device(self.plan.places)
        return offsets, firsts

    def _geometry(
        self, V: int, *, rows: int = 0, scores: bool = False, parts: int = 0, reads: int = 1
    ) -> tuple[int, int, int]:
        """Return the threads of a block, its bytes of shared memory, and the bytes of these that hold tokens.

        A block holds tokens that it reads more than once, if two blocks have room for them. A single block would wait
        for each of its reads.
        """
        units = self.h * self.d // V
        rounds = -(-units // _MOST)
        threads = 32 * -(-units // (32 * rounds))
        numbers = rows * self.pitch + scores * self.h * (_RUN + 1) + parts * (threads + 1)
        shared, room = numbers * self.dtype.itemsize, 0
        if reads > 1:
            room = -(-min(self.plan.longest, _RUN) * self.h * self.d * self.W.itemsize // 16) * 16
            room = room if 2 * (shared + room + _STATIC) <= shared_limit() else 0
        return threads, shared + room, room

    def _pass(
        self, source: str, name: str, V: int, arguments: list[Any], *, reads: int | None = None, **shares: Any
    ) -> None:
        """Launch a kernel with a block for each run; `reads`: how often it reads its tokens, if it may hold them."""
        threads, shared, room = self._geometry(V, reads=reads or 0, **shares)
        if shared + _STATIC > shared_limit():
            most = (shared_limit() - _STATIC) // self.dtype.itemsize // (_RUN + 1) - _MOST - 1
            raise ValueError(f"W has {self.h} heads; expected at most {most} in {self.dtype.name} on this device")
        offsets, firsts = self._places
        given = [*with_steps(self.W, 3), *with_steps(self.x.mask, 2), offsets, firsts, self.n, self._rates]
        given += [*self._sizes, *([] if reads is None else [room]), *arguments]
        types = (self.key, self.real, str(V))
        launch(source, name, types, (self.b * self.plan.runs,), given, threads=threads, shared=shared)

    def _readable(self, array: Any) -> Any:
        """Return an array like W with adjacent channels; for 16 bits, aligned for the channels of a thread."""
        array = with_rows(array)
        halves = array.itemsize == 2 and self._units(array) == 1
        return namespace().ascontiguousarray(array) if halves else array

    def _units(self, array: Any) -> int:
        """Return how many adjacent channels of an array like W a thread can take."""
        steps = [step for step, size in zip(with_steps(array, 3)[1:], array.shape, strict=False) if size > 1]
        V = _UNITS[self.real]
        return V if all(step % V == 0 for step in (self.d, *steps)) else 1

    def _sums(self) -> Any:
        return new_array((self.b, self.plan.runs, self.pitch), self.dtype)

    def _memberships(self) -> Any:
        return new_array((self.b, self.h, self.T), self.dtype)

    def _like_tokens(self, dtype: Any) -> Any:
        """Return an array of the shape of W, with the heads of a token side by side if W has them so."""
        if self.W.strides[1] < self.W.strides[2]:
            return new_array((self.b, self.T, self.h, self.d), dtype).transpose(0, 2, 1, 3)
        return new_array((self.b, self.h, self.T, self.d), dtype)
