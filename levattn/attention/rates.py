r"""Coding rates of tokens: the nats needed to store tokens up to a distortion, together or in groups.

Maximal coding rate reduction makes R − R_c large (`coding_rate`, `compression_rate`). Because R − R_c grows with the
size of Z, it needs a constraint of scale, such as tokens of unit norm. Token statistics attention
(`levattn.attention.tssa`) is a gradient step on R_var (`variational_rate`).

All functions compute in float64 with plain functions of the arrays' library, so gradients of torch reach every array.
Rates are in nats; divide by log 2 for bits.
"""

from __future__ import annotations

import math
from typing import Any

import array_api_compat
import numpy as np

from levattn._core.arrays import to_numpy
from levattn._core.blas import lapack
from levattn._core.checks import real_number
from levattn._core.device import where_arrays_are
from levattn._core.jax import by_numpy
from levattn.attention.arguments import (
    Stacks,
    check_sizes,
    dense_array,
    device_of,
    namespace_of,
    reads_numbers,
    reshaped,
    stack_arguments,
    without_gradient,
)
from levattn.exceptions import NonFiniteError
from levattn.states import Moments

__all__ = [
    "coding_rate",
    "compression_rate",
    "descent_step",
    "head_rate",
    "largest_step",
    "rate_reduction",
    "variational_rate",
]

_LARGE = 1e6  # c‖Z‖²/n, above which the rounding of a Cholesky factor would affect small singular values
_FAR = 1e145  # entries over ε/√d whose squares can be summed
_LEAST = 1e-140  # of ε and of steps
_TOO_FAR = "{0} over eps leaves the range of squares; expected entries of at most about 1e145 eps. Scale {0} down"


@reads_numbers
@where_arrays_are
@by_numpy
def coding_rate(Z: Any, eps: float, /, *, mask: Any = None) -> Any:
    r"""Return the coding rate R of tokens: about the number of nats to store a token up to the distortion ε.

    .. math:: R = \tfrac12 \log\det\bigl(I + \tfrac{d}{n \epsilon^2} Z^T Z\bigr),

    which does not depend on the order of the tokens, nor on the basis of the channels. It is half the sum of
    :math:`-\log(1 - \tau_t)` over the online leverage scores of the tokens (`levattn.online_leverage_scores`) with the
    ridge :math:`n \epsilon^2 / d`.

    Parameters
    ----------
    Z : array of float, shape (..., n, d), or levattn.states.Moments
        Tokens, of any library (numpy, CuPy, torch or another namespace of the array-API standard). Or their full
        second moment, with their number as its weight, for tokens that come in chunks or are merged from shards.
    eps : float
        The distortion ε > 0, finite.
    mask : array of bool, shape (..., n), optional
        True for a token that takes part. Other tokens are ignored.

    Returns
    -------
    array of float64, shape (...,)
        One rate for each matrix of tokens, of at least 0; 0 where there is no token.

    Raises
    ------
    TypeError
        If an argument is not an array of real floats (or of bool), or arrays are of several libraries or devices.
    ValueError
        If a shape or ε is out of range, or a mask comes with `Moments`.

    See Also
    --------
    levattn.definitions.coding_rate : The definition, in NumPy.

    Notes
    -----
    Time O(n d min(n, d)), memory O(min(n, d)²) and Z in float64. The determinant comes from a Cholesky factor of the
    smaller side. Where :math:`d \|Z\|_F^2 / (n \epsilon^2)` is above 10⁶, the rounding of this factor would be too
    large, and the determinant comes from the singular values. The absolute error is below about 1e-10 with the factor,
    and about :math:`2^{-53} \sqrt{d/n} \|Z\|_2 / \epsilon` with the singular values.

    References
    ----------
    Yu, Chan, You, Song and Ma, "Learning Diverse and Discriminative Representations via the Principle of Maximal
    Coding Rate Reduction", arXiv:2006.08558, for R and R_c.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import rates
    >>> from levattn.states import Moments
    >>> Z = np.random.default_rng(0).standard_normal((100, 4))
    >>> rate = rates.coding_rate(Z, 0.5)
    >>> np.allclose(rate, np.linalg.slogdet(np.eye(4) + 4 / (100 * 0.25) * Z.T @ Z)[1] / 2)
    True
    >>> np.allclose(rates.coding_rate(Moments(4).update(Z[:60]).update(Z[60:]), 0.5), rate)
    True
    """
    if isinstance(Z, Moments):
        _refuse_beside(None, mask)
        roots, weights = _roots(Z, eps)
        return _scalar(_rate(roots, weights), Z.batch)
    call, (Z,), present = _tokens({"Z": (Z, 2)}, eps, mask)
    return _scalar(_rate(Z, namespace_of(Z).sum(present, axis=1)), call.batch)


@reads_numbers
@where_arrays_are
@by_numpy
def compression_rate(Z: Any, Pi: Any, eps: float, /, *, mask: Any = None) -> Any:
    r"""Return the coding rate R_c of tokens in groups, with a separate code for each group.

    .. math::
        R_c = \tfrac12 \sum_k \tfrac{n_k}{n}
            \log\det\bigl(I + \tfrac{d}{n_k \epsilon^2} Z^T \mathrm{diag}(\Pi_k) Z\bigr),
            \qquad n_k = \sum_t \Pi_{tk},

    at most R, and R for a single group. Empty groups contribute nothing.

    Parameters
    ----------
    Z : array of float, shape (..., n, d), or levattn.states.Moments
        Tokens. Or the second moments of the groups, of the batch (..., K), with tokens weighted by their memberships:
        ``Moments(d, (K,)).update(np.broadcast_to(Z, (K, n, d)), weights=Pi.T)``, in any chunks.
    Pi : array of float, shape (..., n, K), or None
        The memberships of the tokens in K groups, of at least 0 and of sum 1 for each token (within 1e-2, for
        memberships of 16 bits). None if Z is `Moments`, which includes the memberships.
    eps, mask : float and array of bool, shape (..., n)
        As in `coding_rate`.

    Returns
    -------
    array of float64, shape (...,)
        One rate for each matrix of tokens.

    Raises
    ------
    TypeError, ValueError
        As `coding_rate`, and if memberships are negative, do not sum to 1, or come with `Moments`.

    Notes
    -----
    Time O(K n d min(n, d)), memory O(K min(n, d)²) and O(K n d). Precision as in `coding_rate`. Where the rate comes
    from singular values, memberships that are exactly 0 have the gradient 0.

    References
    ----------
    Yu et al., arXiv:2006.08558.

    Examples
    --------
    Two groups in different directions; as one group they have a higher rate:

    >>> import numpy as np
    >>> from levattn.attention import rates
    >>> Z = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    >>> Pi = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    >>> bool(rates.compression_rate(Z, Pi, 0.5) < rates.coding_rate(Z, 0.5))
    True
    """
    if isinstance(Z, Moments):
        _refuse_beside(Pi, mask)
        return _scalar(_rate_of_groups(*_groups_of(Z, eps)), Z.batch[:-1])
    call, (Z, Pi), _ = _tokens({"Z": (Z, 2), "Pi": (Pi, 2)}, eps, mask)
    return _scalar(_compression(Z, Pi), call.batch)


@reads_numbers
@where_arrays_are
@by_numpy
def variational_rate(Z: Any, Pi: Any, U: Any, eps: float, /, *, mask: Any = None) -> Any:
    r"""Return the bound R_var of the compression rate, which token statistics attention descends.

    .. math::
        R_{var} = \tfrac12 \sum_k \tfrac{n_k}{n} \sum_i \log\bigl(1 + \tfrac{d}{\epsilon^2}\, m_{ki}\bigr), \qquad
        m_{ki} = \tfrac{1}{n_k} \sum_t \Pi_{tk} \langle u_{ki}, z_t\rangle^2,

    with the columns :math:`u_{ki}` of :math:`U_k`. For concave f with f(0) = 0, the sum of f over a matrix's
    eigenvalues is at most its sum over the diagonal in any orthonormal basis. So R_c ≤ R_var if each :math:`U_k` has
    orthonormal columns that span the tokens of its group. Equality holds if the columns are eigenvectors of the
    group's second moment. For other :math:`U_k` no such bound holds.

    Parameters
    ----------
    Z, Pi : array of float, shapes (..., n, d) and (..., n, K)
        Tokens and their memberships, as in `compression_rate`.
    U : array of float, shape (..., K, d, p)
        One matrix of p columns for each group.
    eps, mask : float and array of bool, shape (..., n)
        As in `coding_rate`.

    Returns
    -------
    array of float64, shape (...,)
        One rate for each matrix of tokens.

    Raises
    ------
    TypeError, ValueError
        As `compression_rate`.

    Notes
    -----
    Time O(K n d p), memory O(K n p). Only the diagonals of second moments are used, which `tssa` keeps.

    References
    ----------
    Wu et al., "Token Statistics Transformer", arXiv:2412.17810, section 3: the theorem and the bound.

    Examples
    --------
    Equality at eigenvectors, but not in another basis:

    >>> import numpy as np
    >>> from levattn.attention import rates
    >>> rng = np.random.default_rng(0)
    >>> Z, one = rng.standard_normal((50, 3)) * [1, 2, 3], np.ones((50, 1))
    >>> V = np.linalg.eigh(Z.T @ Z)[1]
    >>> np.allclose(rates.variational_rate(Z, one, V[None], 0.5), rates.compression_rate(Z, one, 0.5))
    True
    >>> V = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    >>> bool(rates.variational_rate(Z, one, V[None], 0.5) > rates.compression_rate(Z, one, 0.5))
    True
    """
    call, (Z, Pi, U), _ = _tokens({"Z": (Z, 2), "Pi": (Pi, 2), "U": (U, 3)}, eps, mask)
    return _scalar(_variational(Z, Pi, U), call.batch)


@reads_numbers
@where_arrays_are
@by_numpy
def rate_reduction(Z: Any, Pi: Any, eps: float, /, *, mask: Any = None) -> Any:
    r"""Return the rate reduction R − R_c: the nats that a separate code for each group saves.

    It is at least 0: negative results of rounding become zero. At a fixed scale (tokens of unit norm, or
    groups of a given Frobenius norm), it is largest for compact groups that are far apart.

    Parameters
    ----------
    Z, Pi : array of float, shapes (..., n, d) and (..., n, K), or levattn.states.Moments and None
        Tokens and memberships, or the second moments of the groups, as in `compression_rate`.
    eps, mask : float and array of bool, shape (..., n)
        As in `coding_rate`.

    Returns
    -------
    array of float64, shape (...,)
        One number for each matrix of tokens.

    Raises
    ------
    TypeError, ValueError
        As `compression_rate`.

    Notes
    -----
    Time, memory and precision as for `coding_rate` and `compression_rate`.

    References
    ----------
    Yu et al., arXiv:2006.08558.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import rates
    >>> Z = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    >>> along, across = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1]]), np.full((4, 2), 0.5)
    >>> float(rates.rate_reduction(Z, along, 0.5).round(3)), abs(float(rates.rate_reduction(Z, across, 0.5).round(3)))
    (0.511, 0.0)
    """
    if isinstance(Z, Moments):
        _refuse_beside(Pi, mask)
        roots, weights = _groups_of(Z, eps)
        b, K, m, d = roots.shape
        whole = _rate(roots.reshape(b, K * m, d), weights.sum(axis=1))
        return _scalar(_not_negative(whole - _rate_of_groups(roots, weights)), Z.batch[:-1])
    call, (Z, Pi), present = _tokens({"Z": (Z, 2), "Pi": (Pi, 2)}, eps, mask)
    xp = namespace_of(Z)
    shares = xp.sum(Pi, axis=2)  # 1 up to rounding
    rows = Z * xp.sqrt(xp.where(present > 0, shares, xp.ones_like(shares)))[..., None]
    return _scalar(_not_negative(_rate(rows, xp.sum(shares, axis=1)) - _compression(Z, Pi)), call.batch)


@reads_numbers
@where_arrays_are
@by_numpy
def head_rate(W: Any, eps: float = 0.1, /, *, mask: Any = None) -> Any:
    r"""Return the coding rates of normalized tokens, summed over the heads.

    .. math:: \tfrac12 \sum_k \log\det\bigl(I + \tfrac{p}{T \epsilon^2} \hat W_k^T \hat W_k\bigr),

    where the T tokens of a head are first scaled to norm 1; a token of zeros stays zero. Use it to probe layers: if
    the rate falls from layer to layer, the tokens of a head become more similar.

    Parameters
    ----------
    W : array of float, shape (..., h, T, p)
        Tokens projected to the p channels of each of h heads.
    eps : float, default 0.1
        The distortion ε > 0, finite. The default has ε² = 0.01, as in the reference.
    mask : array of bool, shape (..., T), optional
        True for a token that takes part.

    Returns
    -------
    array of float64, shape (...,)
        One sum for each group of heads.

    Raises
    ------
    TypeError, ValueError
        As `coding_rate`.

    Notes
    -----
    Time O(h T p min(T, p)).

    References
    ----------
    Yu et al., "White-Box Transformers via Sparse Rate Reduction", arXiv:2306.01129, which measures this rate in each
    layer.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import rates
    >>> W = np.random.default_rng(0).standard_normal((2, 4, 50, 8))
    >>> np.allclose(rates.head_rate(W), rates.head_rate(7 * W)), rates.head_rate(W).shape
    (True, (2,))
    """
    call, (W,), present = _tokens({"W": (W, 3)}, None, mask)
    xp = namespace_of(W)
    b, h, T, p = W.shape
    most = xp.max(xp.abs(W), axis=-1, keepdims=True)  # divided out first, so that no square overflows
    W = W / xp.where(most > 0, most, xp.ones_like(most))
    squares = xp.sum(W * W, axis=-1, keepdims=True)
    W = W / xp.sqrt(xp.where(squares > 0, squares, xp.ones_like(squares)))
    counts = xp.broadcast_to(xp.sum(present, axis=1)[:, None], (b, h))
    rates = _rate(xp.reshape(W * _gain(p, eps), (b * h, T, p)), xp.reshape(counts, (b * h,)))
    return _scalar(xp.sum(xp.reshape(rates, (b, h)), axis=1), call.batch)


@reads_numbers
@where_arrays_are
@by_numpy
def descent_step(Z: Any, Pi: Any, U: Any, eps: float, /, *, step: float, mask: Any = None) -> Any:
    r"""Return tokens after a gradient descent step on R_var: token statistics attention with tied outputs.

    .. math::
        z_t^+ = z_t - \alpha H_t z_t, \qquad H_t = \sum_k \Pi_{tk} U_k D_k U_k^T, \qquad
        D_k = \mathrm{diag}_i\Bigl(\frac{c}{1 + c\, m_{ki}}\Bigr), \qquad c = d/\epsilon^2,

    with the second moments :math:`m_{ki}` of the tokens before the step. The result is
    :math:`Z - n \alpha \nabla R_{var}(Z)` with fixed memberships Π, the operator of the paper with α = τ/n.

    *Descent.* R_var does not rise, for fixed Π and any :math:`U_k`, orthogonal or not, if

    .. math:: \alpha \, c \, \max_k \|U_k\|_2^2 \le 2 .

    Proof: log(1 + x) is below its tangents. The tangents at the moments of Z give, for any Z′,
    :math:`R_{var}(Z') \le R_{var}(Z) + \tfrac{1}{2n} \sum_t (z_t'^T H_t z_t' - z_t^T H_t z_t)`. For the step, an
    eigenvalue λ of :math:`H_t` contributes :math:`\lambda ((1 - \alpha\lambda)^2 - 1) \langle v, z_t\rangle^2`, which
    is not positive as :math:`0 \le \alpha\lambda \le \alpha c \max_k \|U_k\|_2^2 \le 2`.

    So with steps strictly below the bound (`largest_step`), R_var falls unless the gradient is zero. Where memberships
    sum to 1 + δ because of rounding, eigenvalues may be larger by this factor, and the bound is smaller by the factor
    1/(1 + δ). There is no guarantee if memberships are recomputed from the new tokens, for untied outputs, or for
    steps on normalized tokens.

    Parameters
    ----------
    Z, Pi, U : array of float, shapes (..., n, d), (..., n, K) and (..., K, d, p)
        As in `variational_rate`.
    eps : float
        The distortion ε > 0, finite.
    step : float
        The step α, above 0 and finite. It may be larger than `largest_step`.
    mask : array of bool, shape (..., n), optional
        True for a token that takes part. Other tokens are returned unchanged.

    Returns
    -------
    array of shape (..., n, d)
        The new tokens, in the dtype of Z.

    Raises
    ------
    TypeError, ValueError
        As `compression_rate`, and if the step is out of range.

    Notes
    -----
    Time O(K n d p), memory O(K n p). `levattn.attention.tssa` computes the same for projected tokens, in one pass.

    References
    ----------
    Wu et al., arXiv:2412.17810, section 3, for the operator. The theorem is our own.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import rates
    >>> rng = np.random.default_rng(0)
    >>> Z, U = rng.standard_normal((20, 4)), rng.standard_normal((3, 4, 2))
    >>> Pi = rng.dirichlet(np.ones(3), 20)
    >>> new = rates.descent_step(Z, Pi, U, 1.0, step=0.999 * float(rates.largest_step(U, 1.0)))
    >>> bool(rates.variational_rate(new, Pi, U, 1.0) < rates.variational_rate(Z, Pi, U, 1.0))
    True
    """
    alpha = _positive("step", _number(step))
    call, (Z, Pi, U), _ = _tokens({"Z": (Z, 2), "Pi": (Pi, 2), "U": (U, 3)}, eps, mask)
    xp = namespace_of(Z)
    plain = xp.astype(call.stacks[0], Z.dtype)  # scaling Z back would round
    gain = _gain(Z.shape[2], eps)
    taken = xp.zeros_like(Z)
    for k in range(Pi.shape[2]):
        V = U[:, k, :, :]
        W, m = _moments(Z, Pi[:, :, k], V)
        W = W * (alpha * gain**2 / (1 + m))[:, None, :] * Pi[:, :, k, None]
        taken = taken + xp.matmul(W, xp.matrix_transpose(V))
    return call.give_back(plain - taken / gain)


@where_arrays_are
@by_numpy
def largest_step(U: Any, eps: float, /) -> Any:
    r"""Return the largest step for which token statistics attention never raises R_var, for fixed memberships.

    .. math:: \frac{2}{c \max_k \|U_k\|_2^2}, \qquad c = d/\epsilon^2,

    with the largest singular values of the :math:`U_k`. The bound holds for all tokens and memberships; `descent_step`
    has the proof. For some of them larger steps do not raise R_var either, and for others it rises at twice the bound.

    Parameters
    ----------
    U : array of float, shape (..., K, d, p)
        One matrix of p columns for each group.
    eps : float
        The distortion ε > 0, finite.

    Returns
    -------
    array of float64, shape (...,)
        One bound for each set of matrices; infinite where all are zero.

    Raises
    ------
    TypeError, ValueError
        If U is not an array of real floats with at least three axes, or ε is out of range.

    Notes
    -----
    Time O(K d p min(d, p)).

    References
    ----------
    As for `descent_step`.

    Examples
    --------
    With orthonormal columns, the bound is 2 ε²/d:

    >>> import numpy as np
    >>> from levattn.attention import rates
    >>> float(rates.largest_step(np.eye(4).reshape(4, 2, 2).transpose(1, 0, 2), 1.0).round(6))
    0.5
    """
    call = stack_arguments({"U": (dense_array("U", U), 3)}, like="U")
    U = call.stacks[0]
    xp = namespace_of(U)
    _, K, d, _ = U.shape
    if not K:
        raise ValueError(f"U has shape {tuple(U.shape)}; expected at least one group")
    sizes = xp.max(lapack(xp.linalg.svdvals, xp.astype(U, xp.float64)), axis=-1)
    largest = xp.max(sizes, axis=-1) * _gain(d, eps)
    least = _or_one(xp, largest)
    return _scalar(xp.where(largest > 0, 2 / (least * least), xp.full_like(largest, math.inf)), call.batch)


def _tokens(arguments: dict[str, tuple[Any, int]], eps: float | None, mask: Any) -> tuple[Stacks, list[Any], Any]:
    """Check the arrays of a call, and return their stacks in float64 and the present tokens as (b, n) of 0 and 1.

    Unless ε is None, tokens are returned over ε/√d, because rates depend only on this quotient. Masked tokens are 0.
    """
    arrays = {name: dense_array(name, given) for name, (given, _) in arguments.items()}
    places = {"Z": "nd", "Pi": "nK", "U": "Kdp", "W": "hTp"}
    check_sizes(
        {
            f"{name} {symbol}": (array, axis - len(places[name]), symbol)
            for name, array in arrays.items()
            for axis, symbol in enumerate(places[name])
        }
    )
    first = next(iter(arrays))
    call = stack_arguments(
        {name: (arrays[name], axes) for name, (_, axes) in arguments.items()},
        like=first,
        mask=(mask, arrays[first].shape[-2]),
    )
    xp = namespace_of(call.stacks[0])
    stacks = [xp.astype(part, xp.float64) for part in call.stacks]
    b, n = stacks[0].shape[0], stacks[0].shape[-2]
    present = xp.ones((b, n), dtype=xp.float64, device=device_of(stacks[0]))
    if call.mask is not None:
        present = xp.astype(call.mask, xp.float64)
        for place, name in enumerate(arrays):
            if name != "U":
                flags = call.mask[:, None, :, None] if name == "W" else call.mask[..., None]
                stacks[place] = xp.where(flags, stacks[place], xp.zeros_like(stacks[place]))
    for name, part in zip(arrays, stacks, strict=True):
        if not bool(xp.all(xp.isfinite(part))):
            raise NonFiniteError(f"{name} holds NaN or infinity; expected finite numbers. Leave tokens out with mask=")
    if eps is not None:
        stacks[0] = stacks[0] * _gain(stacks[0].shape[-1], eps)
        if not bool(xp.all(xp.abs(stacks[0]) <= _FAR)):
            raise ValueError(_TOO_FAR.format(first))
    if "Pi" in arrays:
        _check_memberships(xp, stacks[1], present, str(arrays["Pi"].dtype))
    return call, stacks, present


def _check_memberships(xp: Any, Pi: Any, present: Any, dtype: str) -> None:
    if not bool(xp.all(Pi >= 0)):
        raise ValueError("Pi holds a number below 0; expected memberships, of at least 0 and of sum 1 for each token")
    missed = xp.abs(xp.sum(Pi, axis=2) - present)
    name = dtype.rpartition(".")[2]  # rounded to 16 bits, but computed in more; others also have rounded sums
    room = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": (4 + Pi.shape[2]) * 2.0**-23}.get(
        name, (4 + Pi.shape[2]) * 2.0**-52
    )
    if not bool(xp.all(missed <= room)):
        raise ValueError(
            f"Pi has a row whose sum is off 1 by more than {room:.2g}, which rounding does not explain; expected "
            "memberships of sum 1 along the last axis. Divide them by their sums (a softmax in float32 too, "
            "once it is in float64), and leave tokens out with mask="
        )


def _not_negative(x: Any) -> Any:
    """Set numbers that rounding made negative to 0, and keep their gradients."""
    xp = namespace_of(x)
    below = without_gradient(x)
    return x - xp.where(below < 0, below, xp.zeros_like(below))


def _number(value: Any) -> Any:
    """Return an array without axes, such as `largest_step` returns, as a number; leave others unchanged."""
    return float(value) if array_api_compat.is_array_api_obj(value) and not value.ndim else value


def _positive(name: str, value: Any) -> float:
    """Return a number as a float, or raise unless its powers are in range."""
    number = real_number(name, value)
    if not _LEAST < number < 1 / _LEAST:
        raise ValueError(
            f"{name} is {value!r}; expected a number above 0, between {_LEAST:g} and {1 / _LEAST:g}. Rates depend on "
            "Z/eps alone: scale both by the same factor"
        )
    return number


def _gain(d: int, eps: Any) -> float:
    """Return √d/ε."""
    return math.sqrt(d) / _positive("eps", eps)


def _refuse_beside(Pi: Any, mask: Any) -> None:
    """Raise for arguments that moments already include."""
    for name, given in (("Pi", Pi), ("mask", mask)):
        if given is not None:
            raise ValueError(
                f"{name} is given beside Moments, which already include it; expected None. Give it to their update, "
                "as weights= or mask="
            )


def _roots(moments: Moments, eps: Any) -> tuple[Any, Any]:
    """Return matrices (b, d, d) with the second moments of the tokens over ε²/d, and the weights (b,)."""
    if moments.diagonal:
        raise ValueError("Z is a diagonal Moments; expected the full second moment. Make it without diagonal=True")
    with np.errstate(over="ignore"):
        roots = moments.factor().normalizer * _gain(moments.d, eps)
    if not (np.abs(roots) <= _FAR).all():
        raise ValueError(_TOO_FAR.format("Z"))
    return roots, np.asarray(to_numpy(moments.weight)).reshape(-1)


def _groups_of(moments: Moments, eps: Any) -> tuple[Any, Any]:
    """Return the results of `_roots` as (b, K, d, d) and (b, K)."""
    if not moments.batch or not moments.batch[-1]:
        raise ValueError(
            f"Z is a Moments of batch {moments.batch}; expected one of each group, (..., K). For a single group, use "
            "batch (1,)"
        )
    roots, weights = _roots(moments, eps)
    K, d = moments.batch[-1], moments.d
    return roots.reshape(-1, K, d, d), weights.reshape(-1, K)


def _scalar(rates: Any, batch: tuple[int, ...]) -> Any:
    """Return rates (b,) as (batch...); a number instead of a numpy array without axes."""
    rates = reshaped(rates, batch)
    return rates[()] if isinstance(rates, np.ndarray) else rates


def _or_one(xp: Any, counts: Any) -> Any:
    return xp.where(counts > 0, counts, xp.ones_like(counts))


def _rate(Z: Any, counts: Any) -> Any:
    """Return ½ logdet(I + ZᵀZ/n), (b,), for rows Z (b, m, d) and numbers n (b,)."""
    xp = namespace_of(Z)
    return _logdet(Z / xp.sqrt(_or_one(xp, counts))[:, None, None]) / 2


def _rate_of_groups(roots: Any, weights: Any) -> Any:
    """Return the compression rates (b,) of groups given by matrices (b, K, m, d) and their weights (b, K)."""
    b, K, m, d = roots.shape
    rates = _rate(roots.reshape(b * K, m, d), weights.reshape(b * K)).reshape(b, K)
    return (rates * weights).sum(axis=1) / _or_one(np, weights.sum(axis=1))


def _compression(Z: Any, Pi: Any) -> Any:
    """Return the compression rates (b,) of tokens (b, n, d), with one group in memory at a time."""
    xp = namespace_of(Z)
    sizes = xp.sum(Pi, axis=1)
    shares = sizes / _or_one(xp, xp.sum(sizes, axis=1))[:, None]
    weights = Pi / _or_one(xp, sizes)[:, None, :]
    parts = [shares[:, k] * _logdet(Z, weights[:, :, k]) for k in range(Pi.shape[2])]
    return sum(parts[1:], parts[0]) / 2


def _variational(Z: Any, Pi: Any, U: Any) -> Any:
    xp = namespace_of(Z)
    sizes = xp.sum(Pi, axis=1)
    shares = sizes / _or_one(xp, xp.sum(sizes, axis=1))[:, None]
    parts = [
        shares[:, k] * xp.sum(xp.log1p(_moments(Z, Pi[:, :, k], U[:, k, :, :])[1]), axis=1) for k in range(Pi.shape[2])
    ]
    return sum(parts[1:], parts[0]) / 2


def _moments(Z: Any, weights: Any, U: Any) -> tuple[Any, Any]:
    """Return tokens (b, n, p) projected by U (b, d, p), and their second moments (b, p), weighted by (b, n)."""
    xp = namespace_of(Z)
    W = xp.matmul(Z, U)
    shares = weights / _or_one(xp, xp.sum(weights, axis=1))[:, None]
    return W, xp.sum(shares[..., None] * (W * W), axis=1)


def _logdet(Z: Any, weights: Any = None) -> Any:
    """Return logdet(I + Zᵀ diag(weights) Z), (b,), for rows (b, n, d) and weights (b, n), or 1."""
    xp = namespace_of(Z)
    b, n, d = Z.shape
    if not b or not n:
        return xp.sum(Z, axis=(1, 2))
    weighted = Z if weights is None else weights[..., None] * Z
    if not bool(xp.all(xp.sum(weighted * Z, axis=(1, 2)) <= _LARGE)):
        # the rounding of a Cholesky factor, relative to the largest singular value, would affect small ones
        if weights is not None:
            there = weights > 0
            Z = xp.where(there, xp.sqrt(xp.where(there, weights, xp.ones_like(weights))), weights)[..., None] * Z
        s = lapack(xp.linalg.svdvals, Z)
        return xp.sum(xp.log1p(s * s), axis=1)
    side = xp.eye(min(n, d), dtype=Z.dtype, device=device_of(Z))
    if d <= n:
        M = side + xp.matmul(xp.matrix_transpose(weighted), Z)
    elif weights is None:
        M = side + xp.matmul(Z, xp.matrix_transpose(Z))
    else:  # not symmetric, to avoid the square root of a weight, which has no derivative at 0
        return xp.linalg.slogdet(side + xp.matmul(weighted, xp.matrix_transpose(Z)))[1]
    return 2 * xp.sum(xp.log(xp.linalg.diagonal(xp.linalg.cholesky(M))), axis=1)
