"""Kernels of token statistics attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

TokenSums = tuple[Any, Any, Any, Any]  # (A, n, M, N) of each head and sequence, in float64

Logits = Literal["none", "norm", "diagonal"]
LOGITS = get_args(Logits)  # compiled code and sources for devices use their indices


@dataclass(frozen=True, eq=False)
class TokenArguments:
    """The arguments of token statistics attention, for a stack of groups of heads that share out their tokens.

    With ``x = w²`` channel by channel, token t of head h has the logit ``temperature · (ℓ_t + offset_t)``. The
    memberships Π_t are the softmax of the logits over the heads. The output is ``−gain Π_t w_t / (1 + c m_t)``, with
    the second moment ``m_t = M_t / (N_t + ridge)``, or 0 where that would be 0/0. The weighted sums ``M_t = Σ Π x``
    and ``N_t = Σ Π`` are over the tokens that t sees: up to itself if `causal`, else all of its sequence. ℓ_t is

    - 0 for the logits "none",
    - ``Σ x_t`` over the channels for "norm",
    - ``Σ x_t / max(A_t, least)`` for "diagonal", where ``A_t = Σ x`` over the tokens that t sees, and if `mean` times
      their number n_t.

    Masked tokens count as absent; their output and their memberships are 0.

    - W: (b, h, T, d), float32 or float64, like all arrays without another dtype below. Any strides along the first
      three axes; contiguous along the last. On a CUDA device, if d is a multiple of 4, also float16, or words of
      bfloat16. Then the other arrays are float32; outputs and dY are stored as W is, but gradients are not.
    - temperature: (b, h), of any strides.
    - offset: (b, h, T), of any strides (0 among them), or None.
    - logits, mean, least: of ℓ; least > 0.
    - c, gain, ridge: of the output; c > 0 and ridge ≥ 0.
    - offsets: (n + 1,) int64 in main memory, ascending from 0 to T. Sequence i is ``offsets[i]:offsets[i + 1]``, and
      does not see the other sequences.
    - decay: (h,) float64 in main memory, in (0, 1]. Each present token multiplies the terms of all tokens before it by
      the decay, in all four sums. None for 1. Only if `causal`.
    - mask: (b, T) bool, True for a token that takes part, or None.
    - state: the sums A (b, h, n, d), n (b, h, n), M (b, h, n, d), N (b, h, n) in float64, or None. If `causal`, they
      are sums of earlier tokens, which are seen too. Otherwise they cover all that is seen, and no token is added.
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


class TokenOperators(Protocol):
    """Token statistics attention, which tensors have as well, with gradients."""

    def forward(self, x: TokenArguments, *, state: bool = False) -> tuple[Any, TokenSums | None]:
        """Return the output (b, h, T, d) and, if `state`, the sums after all tokens of each sequence, else None.

        Where no token is added, the sums are the given ones.
        """

    def memberships(self, x: TokenArguments, /) -> Any:
        """Return the memberships (b, h, T)."""


class TokenKernels(TokenOperators, Protocol):
    """All kernels of token statistics attention. In torch, gradients follow the definitions."""

    def add_squares(self, X: Any, mask: Any, weights: Any, decay: Any, held: Any, *, full: bool = False) -> Any:
        """Return the sums of a second moment, or of its diagonal unless `full`, with these rows added."""


class TokenGradients(Protocol):
    """The gradients of token statistics attention, where compiled kernels exist; `state` has none."""

    def backward(self, x: TokenArguments, dY: Any, /) -> tuple[Any, Any, Any]:
        """Return the gradients of ``Σ dY · forward(x)`` in W, temperature (b, h) and offset (b, h, T) or None."""
