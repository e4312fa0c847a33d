"""Token statistics attention on a CUDA device: launches of tokens.cu and tokens_back.cu.

A sequence is cut into runs of 16 tokens, counted from its first one, of which
a block of threads takes all heads and channels. What runs sum up is combined in float64, in an order that depends on
the runs before alone, so that no bit of a causal token depends on what comes after it, nor on the other sequences, and
so that the error in single precision does not grow with the number of tokens.

Each pass over the tokens reads them once. Forward there are three with the logits "diagonal" (sums of squares,
memberships and what they weigh, output), two with others, and the last one writes as many numbers as it reads. What
runs sum up is written and read once more each before and after it is combined, which adds an eighth to that. Passes
go forwards and backwards in turn, so that of some ten megabytes of tokens most are still in the cache. Gradients take
the same passes but for the last one, and then two that read tokens and dY, of which the second writes dW; with
"diagonal" a third one reads the tokens and dW and writes dW again.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from levattn._kernels.cuda_source import TYPES, launch, namespace, on_device, shared_limit, with_rows, with_steps
from levattn._kernels.rows.cuda import sum_in_pairs
from levattn._kernels.tokens.contract import LOGITS, TokenArguments, TokenSums
from levattn._kernels.tokens.definition import add_squares

__all__ = ["add_squares", "backward", "forward", "memberships"]

# What tokens.cuh and tokens.cu have too
_RUN = 16
_MOST = 256  # threads of a block
_COLUMNS, _LINES = 32, 16  # of a scan
_UNITS = {"float": 4, "double": 2}  # channels of a thread, where their number allows it
_BACK_UNITS = 2


def forward(x: TokenArguments, *, state: bool = False) -> tuple[Any, TokenSums | None]:
    """Return the output (b, h, T, d), and if `state` the sums after all tokens of each sequence."""
    work = _Work(x)
    squares, A, n = work.squares(whole=state)
    P, _, sums = work.weigh(squares, sums=work.adds and (state or work.begins))
    starts, M, N = work.weighted(sums, whole=state)
    return work.write(P, starts), (A, n, M, N) if state else None


def memberships(x: TokenArguments) -> Any:
    """Return the memberships (b, h, T)."""
    work = _Work(x)
    return work.weigh(work.squares()[0])[0]


def backward(x: TokenArguments, dY: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of W (b, h, T, d), temperature (b, h), and offset (b, h, T) or None."""
    work = _Work(x)
    squares, *_ = work.squares()
    P, levels, sums = work.weigh(squares, levels=True, sums=work.adds and work.begins)
    starts, *_ = work.weighted(sums)
    return work.gradients(dY, squares, starts, P, levels)


class _Work:
    """One call: its sizes, its runs, and the passes over its tokens."""

    def __init__(self, x: TokenArguments) -> None:
        self.x = x
        self.b, self.h, self.T, self.d = x.W.shape
        self.n = len(x.offsets) - 1
        self.dtype = x.W.dtype
        self.real = TYPES[self.dtype.name]
        self.firsts = np.append(0, np.cumsum(-(-np.diff(x.offsets) // _RUN))).astype(np.int64)
        self.runs = int(self.firsts[-1])
        self.adds = x.causal or x.state is None  # to sums; else all are given
        self.pitch = -(-(self.h * self.d + self.h) // 4) * 4
        self.W = with_rows(x.W)
        offsets, firsts = on_device(np.stack([x.offsets, self.firsts]))
        self._counts = [firsts, self.n]
        self._rates = on_device(x.decay, np.float64)
        self._tokens = [*with_steps(self.W, 3), *with_steps(x.mask, 2), offsets, *self._counts, self._rates]
        self._tokens += [self.h, self.d, self.pitch, x.causal]
        least = max(x.least, float(np.finfo(self.dtype).tiny))
        self._logits = [LOGITS.index(x.logits), x.mean, least]
        self._output = [x.gain, x.c, x.ridge, self.T]
        self._temperature = with_steps(x.temperature, 2)

    # -- forward -----------------------------------------------------------------------

    def squares(self, *, whole: bool = False) -> tuple[Any, Any, Any]:
        """Return what runs or sequences begin with of Σ w², and if `whole` the sums after each sequence."""
        sums = None
        needed = self.x.logits == "diagonal" and self.begins
        if self.adds and (whole or needed):
            sums = self._sums()
            self._pass("tokens", "sum_tokens", self._units(self.W), [sums])
        if not needed and not whole:
            return None, None, None
        return self._scan(sums, None if self.x.state is None else self.x.state[:2], whole=whole)

    def weigh(self, squares: Any, *, levels: bool = False, sums: bool = False) -> tuple[Any, Any, Any]:
        """Return the memberships, what the temperature multiplies, and the sums of runs weighted by memberships."""
        P = self._memberships()
        multiplied = self._memberships() if levels else None
        weighted = self._sums() if sums else None
        offset = with_steps(self.x.offset, 3)
        arguments = [squares, *self._temperature, *offset, *self._logits, self.T, P, multiplied, weighted]
        self._pass("tokens", "weigh_tokens", self._units(self.W), arguments, scores=True, parts=_RUN)
        return P, multiplied, weighted

    def weighted(self, sums: Any, *, whole: bool = False) -> tuple[Any, Any, Any]:
        """Return what runs or sequences begin with of Σ Π w², and if `whole` the sums after each sequence."""
        if not self.begins and not whole:
            return None, None, None
        return self._scan(sums, None if self.x.state is None else self.x.state[2:], whole=whole)

    def write(self, P: Any, starts: Any) -> Any:
        """Return the output."""
        Y = self._like_tokens()
        self._pass("tokens", "write_tokens", self._units(self.W), [starts, P, *self._output, *with_steps(Y, 3)])
        return Y

    # -- gradients ---------------------------------------------------------------------

    def gradients(self, dY: Any, squares: Any, starts: Any, P: Any, levels: Any) -> tuple[Any, Any, Any]:
        """Return the gradients of W, temperature and offset."""
        xp, x = namespace(), self.x
        dY, dW = with_rows(dY), self._like_tokens()
        V = min(_BACK_UNITS, self._units(self.W), self._units(dY))
        through = self.adds and self.begins  # whether anything flows from run to run
        diagonal = x.logits == "diagonal"
        coming = None
        if through:
            flows = self._sums()
            self._pass(
                "tokens_back", "trace_tokens", V, [starts, P, *with_steps(dY, 3), *self._output, flows], parts=1
            )
            coming = self._scan(flows, backwards=True)[0]
        doffset = None if x.offset is None else self._memberships()
        temperatures = xp.empty((self.b, self.runs, self.h))
        e = self._memberships() if diagonal else None
        flows = self._sums() if diagonal and through else None
        arguments = [squares, starts, coming, P, levels, *with_steps(dY, 3), *self._temperature, *self._logits]
        arguments += [*self._output, *with_steps(dW, 3), doffset, temperatures, e, flows]
        self._pass("tokens_back", "spread_tokens", V, arguments, scores=True, parts=_RUN)
        if diagonal:
            coming = self._scan(flows, backwards=True)[0] if through else None
            arguments = [squares, coming, e, self._logits[2], self.T, *with_steps(dW, 3)]
            self._pass("tokens_back", "finish_tokens", V, arguments)
        return dW, sum_in_pairs(temperatures).astype(self.dtype), doffset

    # -- between passes ----------------------------------------------------------------

    @cached_property
    def begins(self) -> bool:
        """Whether runs begin with anything."""
        return not self.x.causal or self.x.state is not None or bool((np.diff(self.firsts) > 1).any())

    def _scan(
        self, sums: Any, first: Any = None, *, whole: bool = False, backwards: bool = False
    ) -> tuple[Any, Any, Any]:
        """Return what runs begin with, or sequences if all tokens see the same, and if `whole` the sums of all."""
        xp = namespace()
        before = [on_device(part, np.float64) for part in first or (None, None)]
        totals = None
        counts = self._counts
        if sums is None:  # there are no runs: sequences end with what they begin with
            counts = [xp.zeros(self.n + 1, np.int64), counts[1]]
        if not self.x.causal:
            totals = xp.empty((self.b, self.n, self.pitch), self.dtype)
        after: Any = [None, None]
        if whole:
            after = [xp.empty((self.b, self.h, self.n, *rest)) for rest in ((self.d,), ())]
        sizes = [self.h, self.d, self.pitch, self.x.causal, backwards]
        grid = (self.b * self.n, -(-(self.h * self.d + self.h) // _COLUMNS))
        arguments = [*counts, *self._kept, *before, *sizes, sums, totals, *after]
        launch("tokens", "scan_tokens", (self.real,), grid, arguments, threads=_COLUMNS * _LINES)
        return sums if self.x.causal else totals, after[0], after[1]

    @cached_property
    def _kept(self) -> list[Any]:
        """Return what a run multiplies the sums before it by, (1 or b, runs, h), and the numbers of an item."""
        if self.x.decay is None:
            return [None, 0]
        xp, lengths = namespace(), np.diff(self.x.offsets)
        counts = np.diff(self.firsts)
        place = np.arange(self.runs) - np.repeat(self.firsts[:-1], counts)
        starts = np.repeat(self.x.offsets[:-1], counts) + _RUN * place
        tokens = np.minimum(np.repeat(lengths, counts) - _RUN * place, _RUN)
        present = on_device(tokens[None, :])
        if self.x.mask is not None:
            sums = xp.cumsum(self.x.mask.astype(np.int64), axis=1)
            sums = xp.concatenate([xp.zeros((self.b, 1), np.int64), sums], axis=1)
            present = sums[:, on_device(starts + tokens)] - sums[:, on_device(starts)]
        kept = on_device(self._rates[None, None, :] ** present[:, :, None])
        return [kept, self.runs * self.h if self.x.mask is not None else 0]

    # -- geometry ----------------------------------------------------------------------

    def _pass(
        self, source: str, name: str, V: int, arguments: list[Any], *, scores: bool = False, parts: int = 0
    ) -> None:
        """Launch a kernel with a block of threads for each run; `scores` and `parts` are what it shares."""
        units = self.h * self.d // V
        rounds = -(-units // _MOST)
        threads = 32 * -(-units // (32 * rounds))
        numbers = scores * self.h * (_RUN + 1) + parts * (threads + 1)
        shared = numbers * self.dtype.itemsize
        if shared + 4096 > shared_limit():
            most = (shared_limit() - 4096) // self.dtype.itemsize // (_RUN + 1) - _MOST - 1
            raise ValueError(f"W has {self.h} heads; expected at most {most} in {self.dtype.name} on this device")
        types = (self.real, str(V))
        given = [*self._tokens, *arguments]
        launch(source, name, types, (self.b * self.runs,), given, threads=threads, shared=shared)

    def _units(self, array: Any) -> int:
        """Return how many channels next to each other a thread can take of an array like W."""
        steps = [step for step, size in zip(with_steps(array, 3)[1:], array.shape, strict=False) if size > 1]
        V = _UNITS[self.real]
        return V if all(step % V == 0 for step in (self.d, *steps)) else 1

    def _sums(self) -> Any:
        return namespace().empty((self.b, self.runs, self.pitch), self.dtype)

    def _memberships(self) -> Any:
        return namespace().empty((self.b, self.h, self.T), self.dtype)

    def _like_tokens(self) -> Any:
        """Return an array for as many numbers as W has, with the heads of a token side by side if W's are."""
        if self.W.strides[1] < self.W.strides[2]:
            return namespace().empty((self.b, self.T, self.h, self.d), self.dtype).transpose(0, 2, 1, 3)
        return namespace().empty((self.b, self.h, self.T, self.d), self.dtype)
