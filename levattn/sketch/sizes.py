"""Sizes of sketches from theory: numbers of rows that keep a subspace of dimension d, or some vectors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from levattn._core.checks import real_number, whole_number


def countsketch_size(d: int, /, distortion: float, failure: float = 0.01) -> int:
    r"""Rows of a `CountSketch` that embeds a subspace of dimension d.

    .. math:: m = \lceil (d^2 + d) / (\delta \eta^2) \rceil

    With probability at least 1 − δ, :math:`|\|Sx\|^2 - \|x\|^2| \le \eta \|x\|^2` for all x in any fixed subspace of
    dimension d.

    Parameters
    ----------
    d : int
        Dimension of the subspace, such as the number of columns of K.
    distortion, failure : float in (0, 1)
        The distortion η, and the probability δ that it is larger.

    Returns
    -------
    int
        Number of rows.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong type or out of its range.

    Notes
    -----
    Let U be an orthonormal basis of the subspace, with rows u_i. Summed over rows i ≠ j, E‖UᵀSᵀSU − I‖_F² = (1/m) Σ
    (‖u_i‖² ‖u_j‖² + ⟨u_i, u_j⟩²). This is at most (d² + d)/m, and Markov's inequality gives the rest. Fewer than about
    d² rows really fail on coherent rows, so the square is needed. The 1/δ is not needed where blocks are repeated, see
    `osnap_size`.

    References
    ----------
    Nelson and Nguyễn, FOCS 2013 (arXiv:1211.1002), Theorem 3. Clarkson and Woodruff, STOC 2013.

    Examples
    --------
    >>> from levattn.sketch import countsketch_size
    >>> countsketch_size(64, 0.5, 0.1)
    166400
    """
    d, eta, delta = _checked(d, distortion, failure)
    return math.ceil((d * d + d) / (delta * eta**2))


def osnap_size(d: int, /, distortion: float, failure: float = 0.01, *, nonzeros: int = 4) -> int:
    r"""Rows of an `OSNAP` sketch that embeds a subspace of dimension d, from the second moment alone.

    :math:`(d^2 + d)/(\delta\eta^2)` as for `countsketch_size`, rounded up to a multiple of `nonzeros`. The blocks of
    the sketch are independent CountSketches, whose mean has the same second moment as a CountSketch of the whole size.

    Parameters
    ----------
    d : int
        Dimension of the subspace, such as the number of columns of K.
    distortion, failure : float in (0, 1)
        The distortion η, and the probability δ that it is larger.
    nonzeros : int, default 4
        Nonzero entries in each column of S.

    Returns
    -------
    int
        Number of rows.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong type or out of its range.

    Notes
    -----
    This size is proven, but far larger than needed. O(d log(d/δ)/η²) rows with O(log(d/δ)/η) nonzeros are enough
    (Cohen 2016), with unknown constants. `leverage_scores` takes 8 d rows, and `universal_set`
    measures their distortion.

    References
    ----------
    Nelson and Nguyễn, FOCS 2013 (arXiv:1211.1002). Cohen, SODA 2016, for the order that is enough.

    Examples
    --------
    >>> from levattn.sketch import osnap_size
    >>> osnap_size(8, 0.5, 0.1)
    2880
    """
    nonzeros = whole_number("nonzeros", nonzeros)
    return -(-countsketch_size(d, distortion, failure) // nonzeros) * nonzeros


def gaussian_size(d: int, /, distortion: float, failure: float = 0.01) -> int:
    r"""Rows of a `GaussianJL` sketch that embeds a subspace of dimension d.

    .. math:: m = \Bigl\lceil \Bigl(\frac{\sqrt d + \sqrt{2 \ln(2/\delta)}}{\sqrt{1+\eta} - 1}\Bigr)^2 \Bigr\rceil

    Parameters
    ----------
    d : int
        Dimension of the subspace, such as the number of columns of K.
    distortion, failure : float in (0, 1)
        The largest relative change η of squared norms in the subspace, and the probability δ of a larger one.

    Returns
    -------
    int
        Number of rows.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong type or out of its range.

    References
    ----------
    Davidson and Szarek, Local operator theory, random matrices and Banach spaces, 2001, Theorem II.13: singular values
    lie within :math:`1 \pm (\sqrt d + t)/\sqrt m` with probability at least :math:`1 - 2 e^{-t^2/2}`.

    Examples
    --------
    >>> from levattn.sketch import gaussian_size
    >>> gaussian_size(64, 0.5)
    2509
    """
    d, eta, delta = _checked(d, distortion, failure)
    return math.ceil(((math.sqrt(d) + math.sqrt(2 * math.log(2 / delta))) / (math.sqrt(1 + eta) - 1)) ** 2)


def sign_size(d: int, /, distortion: float, failure: float = 0.01) -> int:
    r"""Rows of a `SignJL` sketch that embeds a subspace of dimension d.

    The least over γ of :math:`(d \ln(1 + 2/\gamma) + \ln(2/\delta)) / (\theta^2/4 - \theta^3/6)` with :math:`\theta =
    (1 - 2\gamma) \eta`. A γ-net of the sphere has at most (1 + 2/γ)^d points. The norm of a symmetric matrix is at
    most 1/(1 − 2γ) times its largest quadratic form on the net.

    Parameters
    ----------
    d : int
        Dimension of the subspace, such as the number of columns of K.
    distortion, failure : float in (0, 1)
        The largest relative change η of squared norms in the subspace, and the probability δ of a larger one.

    Returns
    -------
    int
        Number of rows.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong type or out of its range.

    References
    ----------
    Achlioptas, Database-friendly random projections, JCSS 66, 2003, for one vector; the net is folklore.

    Examples
    --------
    >>> from levattn.sketch import sign_size
    >>> sign_size(64, 0.5)
    6730
    """
    d, eta, delta = _checked(d, distortion, failure)
    gamma = np.linspace(0.01, 0.3, 291)
    theta = (1 - 2 * gamma) * eta
    sizes = (d * np.log1p(2 / gamma) + math.log(2 / delta)) / (theta**2 / 4 - theta**3 / 6)
    return math.ceil(float(sizes.min()))


def srht_size(block: int, d: int, /, distortion: float, failure: float = 0.01) -> int:
    r"""Rows of an `SRHT` sketch that embeds a subspace of dimension d, if a block of B rows holds all of K.

    .. math:: m = \Bigl\lceil \bigl(\sqrt d + \sqrt{8 \ln(2B/\delta)}\bigr)^2
        \frac{\ln(4d/\delta)}{(1+\eta)\ln(1+\eta) - \eta} \Bigr\rceil

    Parameters
    ----------
    block : int
        B, the `block` of the sketch, at least the number of rows of K; see Notes for more rows. If the size is above
        B, no sketch with this block is known to suffice: try a larger block.
    d : int
        Dimension of the subspace, such as the number of columns of K.
    distortion, failure : float in (0, 1)
        The largest relative change η of squared norms in the subspace, and the probability δ of a larger one.

    Returns
    -------
    int
        Number of rows.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong type or out of its range.

    Notes
    -----
    Except with probability δ/2, the transformed rows have squared norms of at most (√d + √(8 ln(2B/δ)))²/B. A sample
    of m of them, without replacement, obeys the matrix Chernoff bound. For K of several blocks, a size of the same
    order is proven (Balabanov and others, ICML 2023), with other constants.

    References
    ----------
    Tropp, Improved analysis of the subsampled randomized Hadamard transform, 2011 (arXiv:1011.1595), Lemma 3.3 and
    Theorem 2.2.

    Examples
    --------
    >>> from levattn.sketch import srht_size
    >>> srht_size(2**15, 16, 0.5)
    18728
    """
    d, eta, delta = _checked(d, distortion, failure)
    block = whole_number("block", block)
    rows = (math.sqrt(d) + math.sqrt(8 * math.log(2 * block / delta))) ** 2
    return math.ceil(rows * math.log(4 * d / delta) / ((1 + eta) * math.log1p(eta) - eta))


def jl_size(count: int, /, distortion: float, failure: float = 0.01) -> int:
    r"""Rows of a `GaussianJL` or `SignJL` sketch that keeps the norms of some fixed vectors.

    .. math:: m = \lceil \ln(2 N/\delta) / (\eta^2/4 - \eta^3/6) \rceil

    for N vectors. To multiply keys from the right, as `leverage_scores` does with "jl", N is the number of keys.

    Parameters
    ----------
    count : int
        N, the number of vectors.
    distortion, failure : float in (0, 1)
        The largest relative change η of a squared norm, and the probability δ of a larger one.

    Returns
    -------
    int
        Number of rows.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong type or out of its range.

    References
    ----------
    Achlioptas, JCSS 66, 2003, Theorem 1.1; Dasgupta and Gupta, An elementary proof of a theorem of Johnson and
    Lindenstrauss, 2003.

    Examples
    --------
    >>> from levattn.sketch import jl_size
    >>> jl_size(10**6, 0.5)
    459
    """
    count, eta, delta = _checked(count, distortion, failure, "count")
    return math.ceil(math.log(2 * count / delta) / (eta**2 / 4 - eta**3 / 6))


def _checked(d: Any, distortion: Any, failure: Any, name: str = "d") -> tuple[int, float, float]:
    numbers = []
    for what, value in (("distortion", distortion), ("failure", failure)):
        number = real_number(what, value)
        if not 0 < number < 1:
            raise ValueError(f"{what} is {value!r}; expected a number between 0 and 1")
        numbers.append(number)
    return whole_number(name, d), numbers[0], numbers[1]
