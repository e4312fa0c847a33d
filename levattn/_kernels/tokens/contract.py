"""What the kernels of token statistics attention read: tokens, and how heads share them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

__all__ = ["LOGITS", "Logits", "TokenArguments", "TokenGradients", "TokenKernels", "TokenSums"]

TokenSums = tuple[Any, Any, Any, Any]  # (A, n, M, N) of each head and sequence, in float64

Logits = Literal["none", "norm", "diagonal"]
LOGITS = get_args(Logits)  # compiled code and sources for devices know them by their places


@dataclass(frozen=True, eq=False)
class TokenArguments:
    """The arguments of token statistics attention, for a stack of groups of heads that share out their tokens.

    With ``x = w²`` channel by channel, token t of head h has the logit ``temperature · (ℓ_t + offset_t)``, and the
    memberships Π_t are the softmax of the logits over the heads. The output is ``−gain Π_t w_t / (1 + c m_t)``, with
    the second moment ``m_t = M_t / (N_t + ridge)``, 0 where that would be 0/0, of the weighted sums ``M_t = Σ Π x``
    and ``N_t = Σ Π`` over the tokens that t sees: those up to itself if `causal`, else all of its sequence. ℓ_t is

    - 0 for the logits "none",
    - ``Σ x_t`` over the channels for "norm",
    - ``Σ x_t / max(A_t, least)`` for "diagonal", where ``A_t = Σ x`` over the tokens that t sees, and if `mean` times
      their number n_t.

    Tokens that a mask leaves out are as if they were not there; their output is 0, and so are their memberships.

    W: (b, h, T, d), float32 or float64, as are all arrays but those named otherwise; with any strides along the first
        three axes, and contiguous along the last. On a CUDA device, where d is a multiple of 4, also float16, or words
        of bfloat16; then the others are of float32, and outputs and dY are stored as W is, but not the gradients.
    temperature: (b, h), of any strides.
    offset: (b, h, T), of any strides (0 among them), or None.
    logits, mean, least: as above; least > 0.
    c, gain, ridge: as above; c > 0 and ridge ≥ 0.
    offsets: (n + 1,) int64 in main memory, ascending from 0 to T: sequence i is ``offsets[i]:offsets[i + 1]``, and
        sees nothing of the others.
    decay: (h,) float64 in main memory, in (0, 1]: what a token before counts for, for each present token after it, in
        all four sums. None for 1. Causal ones only.
    mask: (b, T) bool, True for a token that takes part, or None.
    state: the sums A (b, h, n, d), n (b, h, n), M (b, h, n, d), N (b, h, n) in float64. If `causal`, of tokens before,
        which are seen besides; else of all that is seen: then none of the tokens is added. Or None.
    """

    W: Any
    temperature: Any
    offset: Any
    offsets: npt.NDArray[np.int64]
    causal: bool = True
    logits: Logits = "diagonal"
    mean: bool = False
    least: float = 1e-12
    ridge: float = 1e-8
    c: float = 1.0
    gain: float = 1.0
    decay: npt.NDArray[np.float64] | None = None
    mask: Any = None
    state: TokenSums | None = None


class TokenKernels(Protocol):
    """Token statistics attention. In torch, gradients follow the definitions."""

    def forward(self, x: TokenArguments, *, state: bool = False) -> tuple[Any, TokenSums | None]:
        """Return the output (b, h, T, d) and, if `state`, the sums after all tokens of each sequence, else None.

        The sums are those that were given where no token is added.
        """

    def memberships(self, x: TokenArguments, /) -> Any:
        """Return the memberships (b, h, T)."""

    def add_squares(self, X: Any, mask: Any, weights: Any, decay: Any, held: Any, *, full: bool = False) -> Any:
        """Return the sums of a second moment, or of its diagonal unless `full`, with these rows added."""


class TokenGradients(TokenKernels, Protocol):
    """The same on a device for which there are compiled kernels, with gradients; `state` has none."""

    def backward(self, x: TokenArguments, dY: Any, /) -> tuple[Any, Any, Any]:
        """Return the gradients of ``Σ dY · forward(x)`` in W, temperature (b, h) and offset (b, h, T) or None."""
