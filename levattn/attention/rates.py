r"""Coding rates of tokens: how many nats it takes to store them up to a distortion, whole or in groups.

For n tokens Z of d channels, with memberships Π of K groups (rows of sum 1, :math:`n_k = \sum_t \Pi_{tk}`) and
:math:`c = d/\epsilon^2`,

.. math::

    R &= \tfrac12 \log\det\bigl(I + \tfrac{c}{n} Z^T Z\bigr), \qquad
    R_c = \tfrac12 \sum_k \tfrac{n_k}{n} \log\det\bigl(I + \tfrac{c}{n_k} Z^T \mathrm{diag}(\Pi_k) Z\bigr), \\
    R_{var} &= \tfrac12 \sum_k \tfrac{n_k}{n} \sum_i \log\bigl(1 + c\, m_{ki}\bigr), \qquad
    m_{ki} = \tfrac{1}{n_k} \sum_t \Pi_{tk} \langle u_{ki}, z_t\rangle^2 .

Maximal coding rate reduction makes R − R_c large. It needs a constraint of scale, such as tokens of unit norm: R − R_c
grows with the size of Z. Token statistics attention (`levattn.attention.tssa`) is a gradient step on R_var.

All is computed in float64, in plain functions of the arrays' library, so that gradients of torch reach every array.
Rates are in nats; divide by log 2 for bits.
"""

from __future__ import annotations

import math
from typing import Any

import array_api_compat
import numpy as np

from levattn._array import to_numpy
from levattn.attention._common import Prepared, check_sizes, prepare
from levattn.attention._space import device_of, namespace_of
from levattn.states import Moments

__all__ = [
    "coding_rate",
    "compression_rate",
    "descent",
    "descent_step",
    "head_rate",
    "largest_step",
    "rate_reduction",
    "variational_rate",
]

_LARGE = 1e12  # of c‖Z‖², from which on rounding a Cholesky factor would show in small singular values
_SUM = 1e-2  # by which memberships of a token may miss 1, as those of 16 bits do


def coding_rate(Z: Any, eps: float, /, *, mask: Any = None) -> Any:
    r"""Return the coding rate R of tokens: the nats that storing them up to the distortion ε takes, for each token.

    .. math:: R = \tfrac12 \log\det\bigl(I + \tfrac{d}{n \epsilon^2} Z^T Z\bigr),

    which does not depend on the order of the tokens, and not on the basis of the channels. It is half the sum of
    :math:`-\log(1 - \tau_t)` over the online leverage scores of the tokens (`levattn.online_leverage_scores`) with the
    ridge :math:`n \epsilon^2 / d`, so it is known as soon as the second moment is.

    Parameters
    ----------
    Z : array of float, shape (..., n, d), or levattn.states.Moments
        Tokens, of any library (numpy, CuPy, torch or another namespace of the array-API standard). Or the second
        moment of them (not only its diagonal), with their number as its weight: tokens that came in chunks, or were
        merged from shards.
    eps : float
        The distortion ε > 0, finite.
    mask : array of bool, shape (..., n), optional
        True for a token that takes part. The others are as if they were not there.

    Returns
    -------
    array of float64, shape (...,)
        One rate for each matrix of tokens, of at least 0; 0 where there is no token.

    Raises
    ------
    TypeError
        If Z is no array of real floats and no `Moments`, or the mask is not boolean.
    ValueError
        If a shape or ε is out of range, or there is a mask beside `Moments`.

    Notes
    -----
    Time O(n d min(n, d)), memory O(min(n, d)²) and Z in float64. The determinant comes from a Cholesky factor of the
    smaller side; where :math:`c \|Z\|^2` is above 10¹², for which that would be rounded too much, from the
    singular values. The error is about 1e-13 in absolute terms up to there, and grows as
    :math:`2^{-53} \sqrt{c} \|Z\|` beyond.

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
    >>> np.isclose(rate, np.linalg.slogdet(np.eye(4) + 4 / (100 * 0.25) * Z.T @ Z)[1] / 2)
    True
    >>> np.isclose(rates.coding_rate(Moments(4).update(Z[:60]).update(Z[60:]), 0.5), rate)
    True
    """
    eps = _distortion(eps)
    if isinstance(Z, Moments):
        _refuse_beside(Z, None, mask, "mask")
        return _scalar(_rate_of(_root(Z), np.asarray(to_numpy(Z.weight)), eps))
    call, Z, present = _tokens(Z, mask)
    xp = namespace_of(Z)
    return _scalar(_back(call, _rate_of(Z, xp.sum(present, axis=1), eps)))


def compression_rate(Z: Any, Pi: Any, eps: float, /, *, mask: Any = None) -> Any:
    r"""Return the coding rate R_c of tokens in groups, each group in a code of its own.

    .. math::
        R_c = \tfrac12 \sum_k \tfrac{n_k}{n}
            \log\det\bigl(I + \tfrac{d}{n_k \epsilon^2} Z^T \mathrm{diag}(\Pi_k) Z\bigr),

    at most R, and R for a single group. Empty groups count for nothing.

    Parameters
    ----------
    Z : array of float, shape (..., n, d), or levattn.states.Moments
        Tokens, as in `coding_rate`. Or the second moments of the groups, of the batch (..., K): those of the tokens
        weighted by their memberships, ``Moments(d, (K,)).update(np.broadcast_to(Z, (K, n, d)), weights=Pi.T)``, in
        as many chunks as they come in.
    Pi : array of float, shape (..., n, K), or None
        The memberships of the tokens in K groups, of at least 0 and of sum 1 for each token (within 1e-2, for those
        of 16 bits). None where Z is `Moments`, which holds what is needed of them.
    eps : float
        The distortion ε > 0, finite.
    mask : array of bool, shape (..., n), optional
        True for a token that takes part. The others are as if they were not there.

    Returns
    -------
    array of float64, shape (...,)
        One rate for each matrix of tokens.

    Raises
    ------
    TypeError
        If an argument is no array of real floats, or arrays are of several libraries or devices.
    ValueError
        If shapes do not go together, ε is out of range, memberships are negative or do not sum to 1, or Pi or a mask
        is given beside `Moments`.

    Notes
    -----
    Time O(K n d min(n, d)), memory O(K min(n, d)²) and O(K n d). Precision as in `coding_rate`. Beyond the size at
    which it takes singular values, memberships that are exactly 0 have the gradient 0.

    References
    ----------
    Yu et al., arXiv:2006.08558.

    Examples
    --------
    Two groups in directions of their own; as one they cost more:

    >>> import numpy as np
    >>> from levattn.attention import rates
    >>> Z = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    >>> Pi = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    >>> bool(rates.compression_rate(Z, Pi, 0.5) < rates.coding_rate(Z, 0.5))
    True
    """
    eps = _distortion(eps)
    if isinstance(Z, Moments):
        _refuse_beside(Z, Pi, mask, "Pi and mask")
        _require_groups(Z)
        return _scalar(_grouped_rate(_root(Z), None, np.asarray(to_numpy(Z.weight)), eps))
    call, Z, Pi = _members(Z, Pi, mask)
    return _scalar(_back(call, _grouped(Z, Pi, eps)))


def variational_rate(Z: Any, Pi: Any, U: Any, eps: float, /, *, mask: Any = None) -> Any:
    r"""Return the bound R_var of the compression rate that token statistics attention descends.

    .. math::
        R_{var} = \tfrac12 \sum_k \tfrac{n_k}{n} \sum_i \log\Bigl(1 + \tfrac{d}{n_k \epsilon^2} \sum_t \Pi_{tk}
            \langle u_{ki}, z_t\rangle^2\Bigr),

    with the columns :math:`u_{ki}` of :math:`U_k`. For f concave with f(0) = 0 the sum of f over the eigenvalues of a
    matrix is at most that over its diagonal, in any orthonormal basis. So R_c ≤ R_var wherever each :math:`U_k` has
    orthonormal columns that span the tokens of its group, with equality if they are eigenvectors of its second
    moment. For other :math:`U_k` no such bound holds.

    Parameters
    ----------
    Z : array of float, shape (..., n, d)
        Tokens, of any library.
    Pi : array of float, shape (..., n, K)
        Memberships, as in `compression_rate`.
    U : array of float, shape (..., K, d, p)
        One matrix of p columns for each group.
    eps : float
        The distortion ε > 0, finite.
    mask : array of bool, shape (..., n), optional
        True for a token that takes part. The others are as if they were not there.

    Returns
    -------
    array of float64, shape (...,)
        One rate for each matrix of tokens.

    Raises
    ------
    TypeError
        If an argument is no array of real floats, or arrays are of several libraries or devices.
    ValueError
        If shapes do not go together, ε is out of range, or memberships are negative or do not sum to 1.

    Notes
    -----
    Time O(K n d p), memory O(K n p). Only the diagonals of second moments are used: those that `tssa` keeps.

    References
    ----------
    Wu et al., "Token Statistics Transformer", arXiv:2412.17810, section 3: the theorem and the bound.

    Examples
    --------
    Equality at eigenvectors, and not in another basis:

    >>> import numpy as np
    >>> from levattn.attention import rates
    >>> rng = np.random.default_rng(0)
    >>> Z, one = rng.standard_normal((50, 3)) * [1, 2, 3], np.ones((50, 1))
    >>> V = np.linalg.eigh(Z.T @ Z)[1]
    >>> np.isclose(rates.variational_rate(Z, one, V[None], 0.5), rates.compression_rate(Z, one, 0.5))
    True
    >>> V = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    >>> bool(rates.variational_rate(Z, one, V[None], 0.5) > rates.compression_rate(Z, one, 0.5))
    True
    """
    eps = _distortion(eps)
    call, Z, Pi, U = _projected(Z, Pi, U, mask)
    return _scalar(_back(call, _variational(Z, Pi, U, eps)))


def rate_reduction(Z: Any, Pi: Any, eps: float, /, *, mask: Any = None) -> Any:
    r"""Return the rate reduction R − R_c: what is saved by a code for each group.

    It is at least 0, and largest where groups are far apart and each is compact, if tokens are held to a scale. Without
    such a constraint (tokens of unit norm, or groups of a given Frobenius norm) it grows with the size of Z.

    Parameters
    ----------
    Z : array of float, shape (..., n, d), or levattn.states.Moments
        Tokens, or the second moments of the groups, as in `compression_rate`. That of all tokens is their sum.
    Pi : array of float, shape (..., n, K), or None
        Memberships. None where Z is `Moments`.
    eps : float
        The distortion ε > 0, finite.
    mask : array of bool, shape (..., n), optional
        True for a token that takes part. The others are as if they were not there.

    Returns
    -------
    array of float64, shape (...,)
        One number for each matrix of tokens.

    Raises
    ------
    TypeError
        If an argument is no array of real floats, or arrays are of several libraries or devices.
    ValueError
        If shapes do not go together, ε is out of range, memberships are negative or do not sum to 1, or Pi or a mask
        is given beside `Moments`.

    Notes
    -----
    Cost and precision are those of `coding_rate` and `compression_rate`.

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
    eps = _distortion(eps)
    if isinstance(Z, Moments):
        _refuse_beside(Z, Pi, mask, "Pi and mask")
        _require_groups(Z)
        roots, weights = _root(Z), np.asarray(to_numpy(Z.weight))
        *batch, K, m, d = roots.shape
        whole = _rate_of(roots.reshape(*batch, K * m, d), weights.sum(axis=-1), eps)
        return _scalar(whole - _grouped_rate(roots, None, weights, eps))
    call, Z, Pi = _members(Z, Pi, mask)
    xp = namespace_of(Z)
    present = xp.astype(xp.sum(Pi, axis=2) > 0, xp.float64)
    whole = _rate_of(Z * present[..., None], xp.sum(present, axis=1), eps)
    return _scalar(_back(call, whole - _grouped(Z, Pi, eps)))


def head_rate(W: Any, eps: float = 0.1, /, *, mask: Any = None) -> Any:
    r"""Return the coding rates of tokens of unit norm, head by head, summed over the heads.

    .. math:: \tfrac12 \sum_k \log\det\bigl(I + \tfrac{p}{T \epsilon^2} \hat W_k^T \hat W_k\bigr),

    where the T tokens of a head are scaled to norm 1 first. A probe of what layers do: a rate that falls from layer
    to layer says that the tokens of a head come together.

    Parameters
    ----------
    W : array of float, shape (..., h, T, p)
        Tokens projected to the p channels of each of h heads.
    eps : float, default 0.1
        The distortion ε > 0, finite. The default has ε² = 0.01, as the reference has it.
    mask : array of bool, shape (..., T), optional
        True for a token that takes part. The others are as if they were not there.

    Returns
    -------
    array of float64, shape (...,)
        One sum for each group of heads.

    Raises
    ------
    TypeError, ValueError
        As in `coding_rate`, and where W has fewer than three axes.

    Notes
    -----
    Time O(h T p min(T, p)). A token of zeros stays one.

    References
    ----------
    Yu et al., "White-Box Transformers via Sparse Rate Reduction", arXiv:2306.01129: the rate of tokens that is measured
    layer by layer there.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import rates
    >>> W = np.random.default_rng(0).standard_normal((2, 4, 50, 8))
    >>> np.allclose(rates.head_rate(W), rates.head_rate(7 * W)), rates.head_rate(W).shape
    (True, (2,))
    """
    eps = _distortion(eps)
    call = prepare({"W": (W, 3)}, like="W", mask=(mask, _axis(W, -2)))
    (W,) = _wide(call)
    xp = namespace_of(W)
    b, h, T, p = W.shape
    flags = _present(call, W, T)
    W = xp.where((flags > 0)[:, None, :, None], W, xp.zeros_like(W))
    # The largest entry goes first, so that no square leaves the range
    most = xp.max(xp.abs(W), axis=-1, keepdims=True) if T else W[..., :1]
    W = W / xp.where(most > 0, most, xp.ones_like(most))
    squares = xp.sum(W * W, axis=-1, keepdims=True)
    W = W / xp.sqrt(xp.where(squares > 0, squares, xp.ones_like(squares)))
    counts = xp.sum(flags, axis=1)[:, None] * xp.ones_like(squares[:, :, 0, 0] if T else xp.zeros_like(W[..., 0, 0]))
    rates = _rate_of(xp.reshape(W, (b * h, T, p)), xp.reshape(counts, (b * h,)), eps)
    return _scalar(_back(call, xp.sum(xp.reshape(rates, (b, h)), axis=1)))
