"""Kernels of latent attention and of linear recurrences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

State = tuple[Any, Any, Any]  # (m, s, S) of the softmax over positions, of each sequence and latent


@dataclass(frozen=True, eq=False)
class LatentArguments:
    """The arguments of latent attention, for a stack of heads.

    Row t computes ``y_t = Σ_l p(l|t) Σ_u p(u|l, t) V_u``. Here ``p(l|t)`` is the softmax of Q[t] over the latents.
    ``p(u|l, t)`` is the softmax of K[:, l] over the positions u that row t may see. A latent that has seen no position
    yet takes no part in the softmax over latents. Where no latent takes part, the row is zero.

    All arrays are float32, or all are float64. The first two axes have any strides (also 0), and numbers along the
    last axis are contiguous. On a device Q, K and V may have one format of 16 bits (bfloat16 as words in CuPy arrays).
    Then the output has the same format, and all other arrays are float32. Products are of numbers of that format: the
    output is off by at most six roundings of the largest value. `backward` takes these formats only as tensors, which
    it widens.

    Q: (b, T, L) logits of the latents.

    K: (b, U, L) logits of the positions; −inf for a position that a latent does not see.

    V: (b, U, D) values.

    offsets: (n + 1,) int64 in main memory, ascending from 0 to T: sequence i is ``offsets[i]:offsets[i + 1]``, and
        sees no other sequence. With more than one sequence U = T.

    causal: row t sees the positions ``u ≤ t + ahead`` of its sequence (both counted from its beginning), else all.

    ahead: at most 0 where U = T: rows that are −ahead positions behind. U − T ≥ ahead always.

    gate: (b, T) the logit of one more component, whose output is `gate_value`, (b, T, D); or both None. It takes no
        part where it is −inf.

    mask: (b, U) bool, False for a position that no row sees, or None. Its values and logits are not used.

    state: positions that every row of a sequence sees too, or None: m (b, n, L), s (b, n, L), S (b, n, L, D).
        They are float64, with s = ``Σ e^{K−m}`` and S = ``Σ e^{K−m} V``. Without positions m = −inf.
    """

    Q: Any
    K: Any
    V: Any
    offsets: npt.NDArray[np.int64]
    causal: bool
    ahead: int = 0
    gate: Any = None
    gate_value: Any = None
    mask: Any = None
    state: State | None = None


class LatentOperators(Protocol):
    """Latent attention and linear recurrences, which tensors have as well, with gradients."""

    def forward(self, x: LatentArguments, /) -> Any:
        """Return the output (b, T, D)."""

    def summary(self, K: Any, V: Any, mask: Any, offsets: npt.NDArray[np.int64], /) -> State:
        """Return the state of all positions."""

    def decayed_scan(self, a: Any, x: Any, first: Any = None, *, reverse: bool = False) -> Any:
        """Return the linear recurrence ``h_t = a_t h_{t−1} + x_t`` of each channel."""


class LatentKernels(LatentOperators, Protocol):
    """All kernels of latent attention. In torch, gradients follow the definitions."""

    def joined(self, state: State, other: State, /) -> State:
        """Return the state of the positions of both states."""


class LatentGradients(Protocol):
    """The gradients of latent attention, where compiled kernels exist; `state` has none."""

    def backward(self, x: LatentArguments, dY: Any, /) -> tuple[Any, Any, Any, Any, Any]:
        """Return the gradients of ``Σ dY · forward(x)`` in Q, K, V, gate and gate_value, or None."""


class LatentSteps(Protocol):
    """A short path for decode steps."""

    def step(self, Q: Any, K: Any, V: Any, mask: Any, state: State | None, /) -> tuple[Any, State] | None:
        """Return the output of causal rows and the state after them, or None: then use `forward` and `summary`.

        Arrays are as in `LatentArguments`; in main memory they have any leading axes. There a call has one row, a
        state, and the bits of `forward`. On a device None as `state` means no position, and the returned state has
        one leading axis. Up to 8 rows are summed in double precision there. More rows take the path
        of `forward`, if no state is before them.
        """


class GivenSteps(Protocol):
    """The same for tensors on a device that are as kernels read them, without a mask."""

    def step_as_given(self, Q: Any, K: Any, V: Any, state: State | None, /) -> tuple[Any, State] | None:
        """Return the output and the state after the rows as `LatentSteps.step` does, with fewer checks."""
