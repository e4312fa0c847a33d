"""The weight of a mixture that counts positions of the window twice."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_device, to_numpy
from levattn._core.checks import whole_number
from levattn._core.device import where_arrays_are
from levattn._core.jax import by_numpy
from levattn._core.types import Float64
from levattn.attention.common.arguments import dense_arrays, stack_arguments
from levattn.attention.common.heads import heads_of
from levattn.attention.common.packed import cumulative, reads_numbers
from levattn.attention.common.space import without_gradient


@reads_numbers
@where_arrays_are
@by_numpy
def repeated_mass(
    q_logits: Any,
    k_logits: Any,
    gate: Any,
    /,
    *,
    window: int,
    mask: Any = None,
    offsets: Any = None,
    lengths: Any = None,
) -> Any:
    r"""The weight that `macchiato` gives to the positions of the window a second time, by its latents.

    .. math:: \sum_{l \ge 1} p(l \mid t) \sum_{s \in (t-W, t]} p(s \mid l, t),

    in the mode "mixture"; in "exclusive" it is zero. For nearly equal logits of the positions it is about
    :math:`(1 - p(0 \mid t)) \min(1, W/t)`, which vanishes for positions far beyond W. If it does not vanish, latents
    attend to near positions, and "exclusive" makes them attend to other positions.

    Parameters
    ----------
    q_logits : array of shape (..., H, T, L)
        Logits of the rows, as in `macchiato`.
    k_logits : array of shape (..., H, T, L) or (..., G, T, L)
        Logits of the positions.
    gate : array of shape (..., H, T)
        Logits of the window.
    window : int
        W, at least 1.
    mask : array of bool, shape (..., G, T), optional
        True for a position that takes part. The others have no place, and their rows are zero.
    offsets, lengths : whole numbers, shape (n + 1,) or (n,), optional
        Where packed sequences begin, ending with T, or how long they are.

    Returns
    -------
    array of float64, shape (..., H, T)
        Between 0 and 1, in torch without gradients. Errors of the running sums add up with T: about 1e-13 for a
        million positions, plus 1e-16 times the largest logits.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another kind, shape or range.

    Notes
    -----
    Time O(T L) for each head, in main memory. Memory O(T L) numbers of float64, for one head at a time. Arguments of
    another precision or on a device are copied besides. The running sums Z of exponentials give the share of the
    window, 1 − Z(t − W)/Z(t), for each latent.

    References
    ----------
    A remark of the public reviews of Dolga et al., arXiv:2402.17512: positions in the window count twice. Weights
    still sum to 1.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import repeated_mass
    >>> r = repeated_mass(np.zeros((1000, 4)), np.zeros((1000, 4)), np.zeros(1000), window=10)
    >>> r[[9, 99, 999]]  # the window has 1/5 of the weight, as each latent
    array([0.8  , 0.08 , 0.008])
    """
    window = whole_number("window", window)
    q_logits, k_logits, gate = dense_arrays(
        {"q_logits": (q_logits, "TL"), "k_logits": (k_logits, "TL"), "gate": (gate, "T")}
    )
    heads = heads_of(q_logits, k_logits, k_logits, names=("q_logits", "k_logits", "k_logits"))
    arguments = heads.of_queries(q_logits=q_logits, gate=gate[..., None]) | {"k_logits": (k_logits, 2)}
    T = q_logits.shape[-2]
    given = stack_arguments(arguments, like="q_logits", mask=(mask, T))
    bounds = cumulative(offsets, lengths, T)
    ends = [0, T] if bounds is None else bounds.tolist()
    stacks = (without_gradient(x) for x in given.stacks)
    Q, gates, K = (to_numpy(x) for x in stacks)
    flags = np.ones(K.shape[:2], np.bool_) if given.mask is None else to_numpy(given.mask)
    gates = np.broadcast_to(gates[..., 0], Q.shape[:-1])
    out = np.zeros(Q.shape[:-1])
    for item, sees in enumerate(flags):
        for low, high in pairwise(ends):
            there = low + np.flatnonzero(sees[low:high])  # the others have no place
            share = _share(K[item, there].astype(np.float64), window)
            for head in range(Q.shape[1]):
                rows = item, head, there
                out[rows] = _repeated(Q[rows], share, gates[rows])
    out = out.reshape(*given.batch, *out.shape[1:])
    return heads.joined(to_device(out, q_logits), 1)


def _share(K: Float64, window: int) -> tuple[Float64, npt.NDArray[np.bool_]]:
    """Return the weight that each latent gives to the window of a row, and whether it has seen a position, (T, L)."""
    Z = np.logaddexp.accumulate(K, axis=0)
    live = np.isfinite(Z)
    before = np.full_like(Z, -np.inf)
    before[window:] = Z[:-window]
    return -np.expm1(before - np.where(live, Z, 0.0)), live


def _repeated(
    Q: npt.NDArray[Any],
    share: tuple[Float64, npt.NDArray[np.bool_]],
    gate: npt.NDArray[Any],
) -> Float64:
    """Return the repeated weight (T,) of one sequence, from the result of `_share`."""
    weights, live = share
    gate = gate.astype(np.float64)[:, None]
    alone = gate == np.inf
    logits = np.concatenate([np.where(alone, 0.0, gate), np.where(live & ~alone, Q, -np.inf)], axis=-1)
    top = logits.max(axis=-1, keepdims=True)
    E = np.exp(logits - np.where(top == -np.inf, 0.0, top))
    total = E.sum(axis=-1)
    repeated: Float64 = np.einsum("tl,tl->t", E[:, 1:], weights) / np.where(total > 0, total, 1.0)
    return repeated
