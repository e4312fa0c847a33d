"""Measurements of a pruned model: the choice of the measured calls of its layers, and the sums of their figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np

from levattn.integrations.transformers.comparison import FIGURES, Sample, compared
from levattn.integrations.transformers.pruned import Arrays, Group
from levattn.integrations.transformers.states import Held

_QUERIES = 64  # of a head in a call
_SEQUENCES = 8  # at most, with these queries
_EVERY = 64  # calls of a layer of which one is measured by default
_GOLDEN = (5**0.5 - 1) / 2
_CONFIDENCE = 0.95

_LOCK = Lock()  # of all counts and sums, as threads may share a model; a lock of their own could not be copied


class Sampler:
    """The choice of the calls of layers that are measured, and of their sequences.

    By default each layer has its turn once in 64 of its calls of more than one token. The turns of layers are spread
    over these calls, and one is in the first. A layer is measured with all its pruned heads. Where the time of a call
    hardly depends on the number of heads, one head would cost as much as all.

    Each layer counts its calls by itself, because threads may call the model at the same time.
    """

    def __init__(self, layers: Iterable[int], measure: bool | None) -> None:
        self.measure = measure
        order = sorted(enumerate(sorted(layers)), key=lambda layer: layer[0] * _GOLDEN % 1)
        self._turns = {layer: place * _EVERY // len(order) for place, (_, layer) in enumerate(order)}
        self._calls = dict.fromkeys(self._turns, 0)

    def sample(self, layer: int, sequences: int, queries: int, keys: int) -> Sample | None:
        """Count a call, and return its sample, or None; `keys` is the number of all positions so far."""
        few = min(sequences, _SEQUENCES)
        each = _QUERIES // few
        if self.measure:
            return Sample(_spread(sequences, few, 0), each)
        most = _QUERIES * queries // keys  # as a query is compared with all keys
        if self.measure is False or queries == 1 or not most:
            return None
        with _LOCK:
            lap, turn = divmod(self._calls[layer], _EVERY)
            self._calls[layer] += 1
        if turn != self._turns[layer]:
            return None
        return Sample(_spread(sequences, few, lap), min(each, most))


def _spread(sequences: int, few: int, first: int) -> Any:
    """Return a few of the numbers below `sequences`, spread evenly, shifted by `first`, ascending."""
    return np.sort((first + np.arange(few) * sequences // few) % sequences)


class FigureSums:
    """The number of units of a sample, the sums of their figures, and the sums of products of figures."""

    def __init__(self) -> None:
        self.units = 0
        self.sums = np.zeros(len(FIGURES))
        self.products = np.zeros((len(FIGURES), len(FIGURES)))

    def add(self, rows: Any) -> None:
        """Add units, (units, figures); those without queries do not count."""
        self.units += int((rows[:, 0] > 0).sum())
        self.sums += rows.sum(0)
        self.products += rows.T @ rows

    @classmethod
    def of(cls, several: Iterable[FigureSums]) -> FigureSums:
        """Return the sums over all units of several samples."""
        found = cls()
        for one in several:
            found.units += one.units
            found.sums += one.sums
            found.products += one.products
        return found

    def figures(self) -> dict[str, Any]:
        """Return the means, the relative error, and half of their intervals.

        A mean is a ratio of sums over units, r = Σx / Σw, where w is the weight of a unit's queries. Its variance is
        by the delta method n/(n−1) Σ(x − rw)² / (Σw)². The error is the root of such a ratio. It is 0 for outputs that
        are all zero, as they should be.
        """
        captured, captured_margin = self._ratio("captured", "weight")
        square, margin = self._ratio("error", "norm")
        if square is None and captured is not None and self.sums[FIGURES.index("error")] == 0:
            # a head without values, whose zeros are right
            square, margin = 0.0, None if captured_margin is None else 0.0
        error = None if square is None else math.sqrt(square)
        return {
            "queries": int(self.sums[0]),
            "slots": self._ratio("slots", "weight")[0],
            "selected": self._ratio("selected", "weight")[0],
            "captured": captured,
            "captured_margin": captured_margin,
            "error": error,
            "error_margin": None if margin is None else margin / (2 * error) if error else 0.0,
        }

    def _ratio(self, name: str, of: str) -> tuple[float | None, float | None]:
        """Return the ratio of the sums of two figures, and half of its interval, or None for fewer than two units."""
        i, j = FIGURES.index(name), FIGURES.index(of)
        x, w, n = float(self.sums[i]), float(self.sums[j]), self.units
        if not w:
            return None, None
        r, P = x / w, self.products
        if n < 2:
            return r, None
        from scipy.special import stdtrit

        spread = max(0.0, P[i, i] - 2 * r * P[i, j] + r * r * P[j, j])
        return r, float(stdtrit(n - 1, (1 + _CONFIDENCE) / 2)) * math.sqrt(spread * n / (n - 1)) / w


class MeasuredCall:
    """The groups of a layer in a measured call, with the time and the figures of each."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.found: list[tuple[Group, float, Any]] = []  # figures (sequences, heads, figures)

    def add(self, group: Group, seconds: float, arrays: Arrays, plan: Sequence[Held] | None, Y: Any) -> None:
        """Compare a group of heads, whose output is Y (B, H, m, D), with dense attention.

        Without a plan the group read all keys.
        """
        self.found.append((group, seconds, compared(arrays, plan, Y, self.sample)))


class Tally:
    """Measurements of a layer.

    of_heads: of each pruned key head, where a unit is a sequence of a call.

    of_layer: of these units with all heads together.

    of_calls: of calls, with all sequences and heads.
    """

    def __init__(self, layer: int, heads: Iterable[int], sampler: Sampler) -> None:
        self.layer, self.sampler = layer, sampler
        self.calls = 0
        self.whole = 0  # calls in which some heads to prune read all keys
        self.sequences = 0  # of these calls
        self.seconds = 0.0
        self.of_heads = {head: FigureSums() for head in heads}
        self.of_layer, self.of_calls = FigureSums(), FigureSums()
        self.measured = 0  # calls

    @property
    def seconds_of_call(self) -> float | None:
        """The mean time of a measured call in pruned attention."""
        return self.seconds / self.measured if self.measured else None

    def begin(self, sequences: int, queries: int, keys: int) -> MeasuredCall | None:
        """Return the measurement of a call, or None."""
        sample = self.sampler.sample(self.layer, sequences, queries, keys)
        return None if sample is None else MeasuredCall(sample)

    def end(self, sequences: int, measurement: MeasuredCall | None, *, whole: bool) -> None:
        """Count a call, and add its figures if it was measured."""
        found = [] if measurement is None else measurement.found
        all_heads = sum(figures.sum(1) for _, _, figures in found)
        with _LOCK:
            self.calls += 1
            self.whole += whole
            self.sequences += sequences
            if measurement is None:
                return
            self.measured += 1
            for group, seconds, figures in found:
                self.seconds += seconds
                for place, head in enumerate(group.heads):
                    self.of_heads[head].add(figures[:, place])
            self.of_layer.add(all_heads)
            self.of_calls.add(all_heads.sum(0, keepdims=True))
