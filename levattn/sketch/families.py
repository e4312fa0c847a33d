"""Distributions of sketching matrices S (size, n): their draws for a row, their application, and sizes that suffice.

Each S is the product of a scale and an unscaled matrix. If the entries of the unscaled matrix are integers, its sums
over rows are exact for integer-valued keys.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from levattn._core.checks import count_of_rows, real_number, whole_number
from levattn._core.random import as_seed, below, normals, signs, words
from levattn._core.types import Float64
from levattn._kernels import SKETCH, Rows, kernels_for

# Streams of the generator, so that no two distributions share their words
_PLACES, _NORMALS, _SIGNS, _ROW_SIGNS, _CHOSEN, _BLOCK_SIGNS = range(1, 7)

_LARGEST_BLOCK = 1 << 28  # some random words are drawn for each row of a block
_ENTRIES = 1 << 20  # of a dense S, drawn at a time


@dataclass(frozen=True)
class Distribution(ABC):
    """A distribution of sketching matrices S of `size` rows, with E[SᵀS] = I.

    Attributes
    ----------
    size : int
        Number of rows of a sketch.
    seed : int
        The seed of its sample.

    Raises
    ------
    TypeError, ValueError
        If the size is not a whole number from 1 to 2³¹ − 1, or the seed not one from 0 to 2⁶⁴ − 1.

    Notes
    -----
    With its seed a distribution is a method of `leverage_scores` and `universal_set`, and `Sketch` draws its sample.

    Examples
    --------
    >>> from levattn.sketch import CountSketch, Distribution
    >>> isinstance(CountSketch(8), Distribution), CountSketch(8).scale
    (True, 1.0)
    """

    size: int
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        """Check the size and the seed."""
        object.__setattr__(self, "seed", as_seed(self.seed, "seed"))
        size = whole_number("size", self.size)
        if size >= 2**31:
            raise ValueError(f"size is {size}; expected fewer than 2**31 rows")
        object.__setattr__(self, "size", size)

    @property
    @abstractmethod
    def scale(self) -> float:
        """The factor of the unscaled matrix, by which S keeps norms on average."""

    @abstractmethod
    def columns(self, seed: int, start: int, count: int) -> Float64:
        """Return the unscaled columns of S for the rows ``start:start + count`` of K, (size, count).

        Parameters
        ----------
        seed : int
            The seed.
        start, count : int
            Number of the first row of K, and the count of rows.

        Returns
        -------
        array of float64, shape (size, count)
            The entries before `scale`.
        """

    def add(self, rows: Rows, seed: int, start: int, out: Any) -> None:
        """Add the unscaled sketch of rows, numbered from `start` on, to `out`.

        Parameters
        ----------
        rows : levattn._kernels.Rows
            A batch of keys.
        seed, start : int
            The seed, and the number of the first row.
        out : array of float64 or float32, shape (b, size, d)
            The sum to add to, a numpy array; for rows on a CUDA device, an array on it.
        """
        step = max(1, _ENTRIES // self.size)
        for low in range(0, rows.shape[1], step):
            part = rows.between(low, min(low + step, rows.shape[1]))
            SKETCH.add_products(part, self.columns(seed, start + low, part.shape[1]), out)


class _Sparse(Distribution):
    """A sketch of blocks of equal size: every row of K goes to one place in each block, with a random sign."""

    def _blocks(self) -> int:
        """Return the number of blocks."""
        return 1

    @property
    def scale(self) -> float:
        """1/√(number of blocks)."""
        return 1 / math.sqrt(self._blocks())

    def columns(self, seed: int, start: int, count: int) -> Float64:
        """Return the unscaled columns of S for some rows of K; see `Distribution`."""
        blocks = self._blocks()
        drawn = words(seed, _PLACES, start, count, blocks)
        out: Float64 = np.zeros((self.size, count))
        places = below(drawn, self.size // blocks) + self.size // blocks * np.arange(blocks)
        out[places, np.arange(count)[:, None]] = signs(drawn)
        return out

    def add(self, rows: Rows, seed: int, start: int, out: Any) -> None:
        """Add the unscaled sketch of rows to `out`; see `Distribution`."""
        blocks = self._blocks()
        SKETCH.scatter(rows, seed, _PLACES, start, blocks, self.size // blocks, out)


@dataclass(frozen=True)
class CountSketch(_Sparse):
    """The sparsest sketch: it adds each row of K to one row of the sketch, with a random sign.

    Parameters
    ----------
    size : int
        Number of rows of the sketch; see `countsketch_size`.
    seed : int or numpy.random.Generator, default 0
        The seed of its sample, by keyword; a Generator gives its next seed.

    Raises
    ------
    TypeError, ValueError
        If the size is not a whole number from 1 to 2³¹ − 1, or the seed not one from 0 to 2⁶⁴ − 1.

    Notes
    -----
    Time O(nnz(K)), memory O(size · d).

    References
    ----------
    Clarkson and Woodruff, Low rank approximation and regression in input sparsity time, STOC 2013 (arXiv:1207.6365).

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.sketch import CountSketch, Sketch
    >>> S = Sketch(CountSketch(1000))
    >>> K = np.random.default_rng(0).standard_normal((5000, 3))
    >>> bool(np.allclose(np.linalg.norm(S.apply(K), 2), np.linalg.norm(K, 2), rtol=0.2))
    True
    """


@dataclass(frozen=True)
class OSNAP(_Sparse):
    r"""A sparse sketch: it adds each row of K to `nonzeros` rows of the sketch, with random signs (SJLT).

    The rows of the sketch lie in `nonzeros` blocks of equal size, and a row of K goes to one place in each. Entries
    of S are 0 or :math:`\pm 1/\sqrt{\mathrm{nonzeros}}`.

    Parameters
    ----------
    size : int
        Number of rows of the sketch, a multiple of `nonzeros`; see `osnap_size`.
    nonzeros : int, default 4
        Number of nonzero entries in each column of S.
    seed : int or numpy.random.Generator, default 0
        The seed of its sample, by keyword; a Generator gives its next seed.

    Raises
    ------
    TypeError, ValueError
        If a number is not whole or out of its range, or the size is not a multiple of `nonzeros`.

    Notes
    -----
    Time O(nonzeros · nnz(K)), memory O(size · d).

    References
    ----------
    Nelson and Nguyễn, OSNAP: faster numerical linear algebra algorithms via sparser subspace embeddings, FOCS 2013
    (arXiv:1211.1002), the block construction. Cohen, Nearly tight oblivious subspace embeddings by trace
    inequalities, SODA 2016.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.sketch import OSNAP, Sketch
    >>> S = Sketch(OSNAP(8, nonzeros=2))
    >>> np.count_nonzero(S.matrix(0, 100), axis=0).tolist() == [2] * 100
    True
    """

    nonzeros: int = 4

    def __post_init__(self) -> None:
        """Check the size and the number of nonzeros."""
        super().__post_init__()
        object.__setattr__(self, "nonzeros", whole_number("nonzeros", self.nonzeros))
        if self.size % self.nonzeros:
            raise ValueError(
                f"size is {self.size}; expected a multiple of nonzeros = {self.nonzeros}, the number of blocks "
                "of equal size"
            )

    def _blocks(self) -> int:
        return self.nonzeros


class _Dense(Distribution):
    """A sketch with entries that are drawn one by one, or as bits of words, from a separate stream."""

    _stream: ClassVar[int]

    @property
    def scale(self) -> float:
        """1/√size."""
        return 1 / math.sqrt(self.size)

    def add(self, rows: Rows, seed: int, start: int, out: Any) -> None:
        """Add the unscaled sketch of rows to `out`; see `Distribution`."""
        kernels = kernels_for("sketch", rows.keys)
        if hasattr(kernels, "dense_sketch"):
            kernels.dense_sketch(rows, seed, self._stream, start, self._stream == _NORMALS, out)
        else:
            super().add(rows, seed, start, out)


@dataclass(frozen=True)
class GaussianJL(_Dense):
    r"""A dense sketch with independent normal entries of variance 1/size.

    Parameters
    ----------
    size : int
        Number of rows of the sketch; see `gaussian_size` and `jl_size`.
    seed : int or numpy.random.Generator, default 0
        The seed of its sample, by keyword; a Generator gives its next seed.

    Raises
    ------
    TypeError, ValueError
        If the size is not a whole number from 1 to 2³¹ − 1, or the seed not one from 0 to 2⁶⁴ − 1.

    Notes
    -----
    Time O(size · n d), including the normals. They are the same on every machine to rounding.

    References
    ----------
    Johnson and Lindenstrauss, Extensions of Lipschitz mappings into a Hilbert space, 1984. Davidson and Szarek, Local
    operator theory, random matrices and Banach spaces, 2001, Theorem II.13 (the extreme singular values).

    Examples
    --------
    >>> from levattn.sketch import GaussianJL, Sketch
    >>> Sketch(GaussianJL(3)).matrix(0, 2).shape
    (3, 2)
    """

    _stream = _NORMALS

    def columns(self, seed: int, start: int, count: int) -> Float64:
        """Return the unscaled columns of S for some rows of K; see `Distribution`."""
        return normals(seed, _NORMALS, start, count, self.size).T


@dataclass(frozen=True)
class SignJL(_Dense):
    r"""A dense sketch with independent entries :math:`\pm 1/\sqrt{\mathrm{size}}`.

    Parameters
    ----------
    size : int
        Number of rows of the sketch; see `sign_size` and `jl_size`.
    seed : int or numpy.random.Generator, default 0
        The seed of its sample, by keyword; a Generator gives its next seed.

    Raises
    ------
    TypeError, ValueError
        If the size is not a whole number from 1 to 2³¹ − 1, or the seed not one from 0 to 2⁶⁴ − 1.

    Notes
    -----
    Time O(size · n d).

    References
    ----------
    Achlioptas, Database-friendly random projections, JCSS 66, 2003, Theorem 1.1.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.sketch import SignJL, Sketch
    >>> np.unique(np.abs(Sketch(SignJL(4)).matrix(0, 10))).tolist()
    [0.5]
    """

    _stream = _SIGNS

    def columns(self, seed: int, start: int, count: int) -> Float64:
        """Return the unscaled columns of S for some rows of K; see `Distribution`."""
        drawn = words(seed, _SIGNS, start, count, -(-self.size // 32))
        bits = drawn[:, :, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)
        return np.asarray(1 - 2 * bits.reshape(count, 32 * drawn.shape[1])[:, : self.size].astype(np.float64)).T


@dataclass(frozen=True)
class SRHT(Distribution):
    r"""A subsampled randomized Hadamard transform, block by block.

    The rows of K form blocks of `block` rows by their numbers. In each block, rows get random signs, and the Hadamard
    matrix H mixes them. The sketch keeps `size` rows of H, the same for all blocks. Each kept row gets another random
    sign in each block, and the blocks are added up. So K may come in any chunks and be of any length.

    Parameters
    ----------
    size : int
        Number of rows of the sketch, at most `block`; see `srht_size`.
    block : int, optional
        Number of rows of K to mix, a power of two, at most the larger of 2²⁸ and the default. Default: the first power
        of two at or above 2 · size, at least 256.
    seed : int or numpy.random.Generator, default 0
        The seed of its sample, by keyword; a Generator gives its next seed.

    Raises
    ------
    TypeError, ValueError
        If a number is not whole or out of its range, or the block is not a power of two.

    Notes
    -----
    Time O(n d log block), memory O(block + size · d).

    References
    ----------
    Tropp, Improved analysis of the subsampled randomized Hadamard transform, 2011 (arXiv:1011.1595). Balabanov,
    Beaupère, Grigori and Lederer, Block subsampled randomized Hadamard transform for low-rank approximation on
    distributed architectures, ICML 2023 (arXiv:2210.11295): blocks.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.sketch import SRHT, Sketch
    >>> S = Sketch(SRHT(64)).matrix(0, 256)
    >>> np.unique(np.abs(S)).tolist()
    [0.125]
    """

    block: int = 0

    def __post_init__(self) -> None:
        """Check the size and the block."""
        super().__post_init__()
        default = max(256, 1 << (2 * self.size - 1).bit_length())
        block, most = whole_number("block", self.block, 0) or default, max(default, _LARGEST_BLOCK)
        if block & (block - 1) or not max(4, self.size) <= block <= most:
            raise ValueError(
                f"block is {block}; expected a power of two of at least 4 and of at least size = {self.size}, and of "
                f"at most {most}"
            )
        object.__setattr__(self, "block", block)

    @property
    def scale(self) -> float:
        """1/√size."""
        return 1 / math.sqrt(self.size)

    def _chosen(self, seed: int) -> npt.NDArray[np.int64]:
        """Return the kept rows of the Hadamard matrix, ascending: the rows with the smallest words."""
        order = np.argsort(words(seed, _CHOSEN, 0, self.block, 1)[:, 0], kind="stable")
        return np.sort(order[: self.size])

    def _flips(self, seed: int, first: int, count: int) -> Float64:
        """Return the signs of the rows of the sketch in some blocks, (count, size)."""
        return signs(words(seed, _BLOCK_SIGNS, first, count, self.size)).astype(np.float64)

    def columns(self, seed: int, start: int, count: int) -> Float64:
        """Return the unscaled columns of S for some rows of K; see `Distribution`."""
        numbers = np.arange(start, start + count)
        inner = numbers % self.block
        first = start // self.block
        flips = self._flips(seed, first, (start + count - 1) // self.block + 1 - first if count else 0)
        shared = (self._chosen(seed)[:, None] & inner).astype(np.uint64)
        parity = np.bitwise_count(shared) & 1
        row_signs = signs(words(seed, _ROW_SIGNS, start, count, 1))[:, 0]
        return np.asarray((1.0 - 2.0 * parity) * row_signs * flips[numbers // self.block - first].T)

    def add(self, rows: Rows, seed: int, start: int, out: Any) -> None:
        """Add the unscaled sketch of rows to `out`; see `Distribution`."""
        kernels = kernels_for("sketch", rows.keys)
        if not hasattr(kernels, "subsampled_hadamard"):
            super().add(rows, seed, start, out)
            return
        streams = _ROW_SIGNS, _BLOCK_SIGNS
        kernels.subsampled_hadamard(rows, seed, streams, start, self.block, self._chosen(seed), out)


SKETCHES = {family.__name__: family for family in (CountSketch, OSNAP, GaussianJL, SignJL, SRHT)}


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
    return count_of_rows(
        f"d = {d}, distortion = {eta:g} and failure = {delta:g}", lambda: (d * d + d) / (delta * eta**2)
    )


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
    root = eta / (math.sqrt(1 + eta) + 1)  # √(1 + η) − 1, which would cancel
    return count_of_rows(
        f"d = {d}, distortion = {eta:g} and failure = {delta:g}",
        lambda: ((math.sqrt(d) + math.sqrt(2 * log_of_ratio(2, delta))) / root) ** 2,
    )


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
    return count_of_rows(
        f"d = {d}, distortion = {eta:g} and failure = {delta:g}",
        lambda: ((d * np.log1p(2 / gamma) + log_of_ratio(2, delta)) / (theta**2 / 4 - theta**3 / 6)).min(),
    )


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
    return count_of_rows(
        f"block = {block}, d = {d}, distortion = {eta:g} and failure = {delta:g}",
        lambda: (
            (math.sqrt(d) + math.sqrt(8 * log_of_ratio(2 * block, delta))) ** 2
            * log_of_ratio(4 * d, delta)
            / chernoff_exponent(eta)
        ),
    )


def jl_size(count: int, /, distortion: float, failure: float = 0.01) -> int:
    r"""Rows of a `GaussianJL` or `SignJL` sketch that keeps the norms of some fixed vectors.

    .. math:: m = \lceil \ln(2 N/\delta) / (\eta^2/4 - \eta^3/6) \rceil

    for N vectors. To multiply keys from the right, as `leverage_scores` does with it, N is the number of keys.

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
    return count_of_rows(
        f"count = {count}, distortion = {eta:g} and failure = {delta:g}",
        lambda: log_of_ratio(2 * count, delta) / (eta**2 / 4 - eta**3 / 6),
    )


def chernoff_exponent(eta: float) -> float:
    """Return the exponent of the matrix Chernoff bound, (1 + η) ln(1 + η) − η."""
    if eta < 1e-3:  # where the difference cancels
        return eta * eta * (1 / 2 - eta * (1 / 6 - eta * (1 / 12 - eta * (1 / 20 - eta / 30))))
    return (1 + eta) * math.log1p(eta) - eta


def log_of_ratio(number: float, delta: float) -> float:
    """Return ln(number/δ), also where the ratio is beyond float64."""
    return math.log(number) - math.log(delta) if delta < 1e-200 else math.log(number / delta)


def _checked(d: Any, distortion: Any, failure: Any, name: str = "d") -> tuple[int, float, float]:
    numbers = []
    for what, value in (("distortion", distortion), ("failure", failure)):
        number = real_number(what, value)
        if not 0 < number < 1:
            raise ValueError(f"{what} is {value!r}; expected a number between 0 and 1")
        numbers.append(number)
    return whole_number(name, d), numbers[0], numbers[1]
