"""Rotations by position: relative positions in values, with unchanged weights of attention."""

from __future__ import annotations

from typing import Any

from levattn._core.checks import positive_number
from levattn._core.device import where_arrays_are
from levattn._core.jax import by_numpy
from levattn.attention.common.arguments import dense_array, moved, stack_arguments
from levattn.attention.common.space import device_of, namespace_of, without_gradient


@where_arrays_are
@by_numpy
def rotate_values(V: Any, positions: Any, /, *, base: float = 10000.0, inverse: bool = False) -> Any:
    r"""Rotate pairs of channels by angles that grow with the position.

    The rotation :math:`R_t` of RoPE in halves turns channels i and i + D/2 of position t by the angle
    :math:`t\, \text{base}^{-2i/D}`. With `inverse` it is :math:`R_{-t}`, by the negative angle. Rotate values by
    `inverse` before an attention with weights p, and rotate its output forward. Each value then comes out rotated by
    its distance,

    .. math:: R_t \sum_s p(s \mid t)\, R_{-s} V_s = \sum_s p(s \mid t)\, R_{t-s} V_s,

    so the output depends on relative positions, and the weights do not (VAPOR: value-embedded positional rotations).
    Only differences of positions matter: shifting all of them changes nothing. States hold the values before the
    forward rotation, and decoding needs the position of its own row only.

    Parameters
    ----------
    V : array of shape (..., T, D)
        Values, or queries or keys for RoPE, with an even D. They are float64, float32, float16 or bfloat16 of numpy,
        torch, CuPy or another library of the array-API standard.
    positions : array of int or float, shape (..., T)
        Positions; leading axes are broadcast. They may be as large as 1e9, and of another library.
    base : float
        Base of the angles, above 0.
    inverse : bool
        Whether to rotate by the negative angles.

    Returns
    -------
    array of shape (..., T, D)
        The rotated values, in the dtype of `V`.

    Raises
    ------
    TypeError, ValueError
        If D is odd, or an argument is of another kind, shape or range.

    Notes
    -----
    Time and memory O(TD). Angles, their cosines and sines are computed in float64, accurate to 1e-16 times the
    position.

    References
    ----------
    Dolga et al., arXiv:2402.17512 (VAPOR). Su et al., arXiv:2104.09864 (RoPE). The authors do not say which
    base they use; 10000 is the base of RoPE.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import latte, rotate_values
    >>> Q, K, V = np.random.default_rng(0).standard_normal((3, 50, 8))
    >>> def vapor(positions):
    ...     return rotate_values(latte(Q, K, rotate_values(V, positions, inverse=True)), positions)
    >>> np.allclose(vapor(np.arange(50)), vapor(np.arange(50) + 10_000_000))
    True
    """
    V = dense_array("V", V)
    D = V.shape[-1]
    if V.ndim < 2 or not D or D % 2:
        raise ValueError(f"V has shape {tuple(V.shape)}; expected (..., T, D) with an even D, whose halves are pairs")
    base = positive_number("base", base)
    given = stack_arguments({"V": (V, 2)}, like="V")
    (stack,) = given.stacks
    xp = namespace_of(stack)
    places = dense_array("positions", positions)
    if not _is_real(places):
        raise TypeError(f"positions has dtype {places.dtype}; expected whole numbers or real floats")
    numbers = namespace_of(places)
    places = moved(numbers.astype(without_gradient(places), numbers.float64), stack)
    if not places.shape or places.shape[-1] != V.shape[-2]:
        raise ValueError(
            f"positions has shape {tuple(places.shape)}; expected (..., {V.shape[-2]}), one entry a row of V"
        )
    if len(places.shape) >= V.ndim or any(
        size not in (1, whole) for size, whole in zip(places.shape[-2::-1], V.shape[-3::-1], strict=False)
    ):
        raise ValueError(
            f"positions has shape {tuple(places.shape)}, and V {tuple(V.shape)}; expected leading axes that broadcast "
            "to the leading axes of V"
        )
    half = D // 2
    speeds = base ** (xp.arange(half, dtype=xp.float64, device=device_of(stack)) * (-2 / D))
    angles = places[..., None] * (-speeds if inverse else speeds)
    c, s = (xp.astype(part, stack.dtype) for part in (xp.cos(angles), xp.sin(angles)))
    values = xp.reshape(stack, tuple(V.shape))
    a, b = values[..., :half], values[..., half:]
    rotated = xp.concat([a * c - b * s, a * s + b * c], axis=-1)
    return given.give_back(xp.reshape(rotated, stack.shape))


def _is_real(array: Any) -> bool:
    kind = str(array.dtype).rpartition(".")[2]  # by name, which torch's compiler can follow
    return "int" in kind or "float" in kind
