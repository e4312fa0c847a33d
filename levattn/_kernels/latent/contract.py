"""What the kernels of latent attention read: logits, values, and which positions a row may see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["LatentArguments", "LatentGradients", "LatentKernels", "LatentSteps", "State"]

State = tuple[Any, Any, Any]  # (m, s, S) of the softmax over positions, of each sequence and latent


@dataclass(frozen=True, eq=False)
class LatentArguments:
    """The arguments of latent attention, for a stack of heads.

    Row t weighs the latents by ``p(l|t)``, the softmax of Q[t], and each latent weighs the positions u that row t may
    see by ``p(u|l, t)``, the softmax of K[:, l] over them: ``y_t = Σ_l p(l|t) Σ_u p(u|l, t) V_u``. A latent that has
    seen no position yet takes no part in the softmax over latents; where none has, the row is zero.

    Arrays are float32 or float64, all of one kind, with any strides along the first two axes (0 among them) and
    contiguous numbers along the last. On a device Q, K and V may be of one format of 16 bits (bfloat16 as words, where
    arrays are CuPy's), beside others of float32: then so is the output, and all else is float32. `backward` takes none
    of these, but for tensors, which it widens.

    Q: (b, T, L) logits of the latents.
    K: (b, U, L) logits of the positions; −inf for one that a latent does not see.
    V: (b, U, D) values.
    offsets: (n + 1,) int64 in main memory, ascending from 0 to T: sequence i is ``offsets[i]:offsets[i + 1]``, and
        sees nothing of the others. More than one sequence have U = T.
    causal: row t sees the positions ``u ≤ t + ahead`` of its sequence (both counted from its beginning), else all.
    ahead: at most 0 where U = T: rows that are −ahead positions behind. U − T ≥ ahead always.
    gate: (b, T) the logit of one more component, whose output is `gate_value`, (b, T, D); or both None. It takes no
        part where it is −inf.
    mask: (b, U) bool, False for a position that nobody sees, or None. Its values and logits are not used.
    state: what every row of a sequence sees besides: m (b, n, L), s (b, n, L), S (b, n, L, D) in float64 with
        ``Σ e^{K−m}`` and ``Σ e^{K−m} V``; m = −inf where there is nothing. Or None.
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


class LatentKernels(Protocol):
    """Latent attention, and linear recurrences. In torch, gradients follow the definitions."""

    def forward(self, x: LatentArguments, /) -> Any:
        """Return the output (b, T, D)."""

    def summary(self, K: Any, V: Any, mask: Any, offsets: npt.NDArray[np.int64], /) -> State:
        """Return the state of all positions."""

    def joined(self, state: State, other: State, /) -> State:
        """Return two states as one."""

    def decayed_scan(self, a: Any, x: Any, first: Any = None, *, reverse: bool = False) -> Any:
        """Return the linear recurrence ``h_t = a_t h_{t−1} + x_t`` of each channel."""


class LatentGradients(LatentKernels, Protocol):
    """The same on a device for which there are compiled kernels, with gradients; `state` has none."""

    def backward(self, x: LatentArguments, dY: Any, /) -> tuple[Any, Any, Any, Any, Any]:
        """Return the gradients of ``Σ dY · forward(x)`` in Q, K, V, gate and gate_value, or None."""


class LatentSteps(LatentKernels, Protocol):
    """The same where a step of decoding is short."""

    def step(self, Q: Any, K: Any, V: Any, mask: Any, state: State | None, /) -> tuple[Any, State] | None:
        """Return the output of causal rows and the state after them, or None: by `forward` and `summary` then.

        Arrays are as those of `LatentArguments`, in main memory with any leading axes. None is the state of no
        position, where arrays are on a device; one that is returned has one leading axis there. In main memory it is
        a single row, with the bits of `forward`. On a device up to 8 rows are summed up in double precision, and more
        take the way of `forward` where no state is before them.
        """
