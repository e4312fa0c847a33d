"""Ill-conditioned matrices on a CUDA device, factored there side by side: only figures are copied from the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from levattn._core.arrays import array_namespace, take_entries, to_numpy
from levattn._core.types import Flags, Float64, Int64
from levattn._kernels import Arithmetic, kernels_for
from levattn.linalg.gram import PLAIN_NOISE, UNIT
from levattn.linalg.preconditioned import MOST_ROUNDS, ROUNDING, SPLIT_ERROR, MatrixFactor

# returns the moments of the keys of the listed matrices, (k,), each in its own basis, (k, d, d), on the device
MomentsThere = Callable[[Int64, Any, Arithmetic], Any]


@dataclass
class Together:
    """The rounds of `precondition` for matrices of a batch, (k, d, d), on the device of their moments.

    A round takes a few launches and one copy of figures, however many matrices take part. A matrix that loses
    directions leaves the others, because lost directions need singular vectors. It goes on in main memory.

    moments_in: computes the moments of keys in bases.

    target, cut, limit: as in `precondition`.

    begun: for matrices that left after the first round, their bases, and the moments in these bases.
    """

    moments_in: MomentsThere
    target: float
    cut: float
    limit: float
    begun: dict[int, tuple[Float64, Float64]] = field(default_factory=dict)

    def factored(self, G: Any) -> Iterator[tuple[Int64, Any, list[MatrixFactor]]]:
        """Yield, after each round, the matrices that are done, their whitening matrices, and their factors.

        Parameters
        ----------
        G : array of the device, shape (k, d, d)
            Moments of keys that have no column of zeros.
        """
        kernels, d = kernels_for("factor", G), G.shape[1]
        which, bases, H, largest = np.arange(len(G)), None, G, np.zeros(0)
        sizes = array_namespace(G).sqrt(G.diagonal(axis1=1, axis2=2))
        for turn in range(MOST_ROUNDS):
            made = kernels.rebased(H, sizes, bases, 16 * d * UNIT, self.target / ROUNDING)
            if bases is None:
                largest = np.sqrt(made.of_moments())
            lost = ~(made.frobenius() * (self.cut * largest) < 1) | ~made.whole()
            self._leave(which, bases, H, lost)
            done = ~lost & (made.good | (turn == MOST_ROUNDS - 1))
            if done.any():
                at = np.flatnonzero(done)
                condition, bound = (largest * made.spectral())[at], made.bound[at]
                yield which[at], *self._finished(which[at], _some(made.W, at), _some(sizes, at), condition, bound)
            left = np.flatnonzero(~lost & ~done)
            if not len(left):
                return
            which, largest, sizes, bases = which[left], largest[left], _some(sizes, left), _some(made.W, left)
            H = self.moments_in(which, bases, "double")

    def _leave(self, which: Int64, bases: Any, H: Any, lost: Flags) -> None:
        """Record the bases and moments of matrices that leave the others."""
        at = np.flatnonzero(lost)
        if bases is not None and len(at):
            begun = zip(to_numpy(_some(bases, at)), to_numpy(_some(H, at)), strict=True)
            self.begun.update(zip(which[at].tolist(), begun, strict=True))

    def _finished(
        self, which: Int64, W: Any, sizes: Any, condition: Float64, bound: Float64
    ) -> tuple[Any, list[MatrixFactor]]:
        """Accept W, or correct it by moments with compensated products, as `precondition` does."""
        fine = np.flatnonzero(condition > self.limit)
        error, none = PLAIN_NOISE * bound + 2 * UNIT * condition, np.zeros((W.shape[1], 0))
        whitening, parts = W, {}
        if len(fine):
            basis = _some(W, fine)
            H = self.moments_in(which[fine], basis, "compensated")
            again = kernels_for("factor", H).rebased(H, _some(sizes, fine), basis, 16 * W.shape[1] * UNIT, np.inf)
            sound = again.good & again.whole()
            error[fine] = np.where(sound, PLAIN_NOISE * again.bound + SPLIT_ERROR * condition[fine], np.inf)
            xp = array_namespace(W)
            pairs = to_numpy(xp.stack([basis, again.C], axis=1))
            parts = dict(zip(fine[sound].tolist(), pairs[sound], strict=True))
            whitening = _replaced(W, fine[sound], _some(again.W, np.flatnonzero(sound)))
        factors = []
        for i, each in enumerate(error.tolist()):
            basis, correction = parts.get(i, (whitening[i], None))
            factors.append(MatrixFactor(whitening[i], basis, correction, W.shape[1], each, none, np.zeros(0)))
        return whitening, factors


def _some(array: Any, which: Int64) -> Any:
    """Return the listed entries along the first axis, in ascending order; the array itself if all are listed."""
    return array if len(which) == len(array) else take_entries(array, which)


def _replaced(array: Any, which: Int64, entries: Any) -> Any:
    """Return the array with some entries along the first axis replaced."""
    if len(which) == len(array):
        return entries
    out = array.copy()
    out[array_namespace(array).asarray(which)] = entries
    return out
