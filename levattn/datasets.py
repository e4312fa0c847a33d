"""Example keys: heads of a real encoder, any number of similar keys, worst-case queries, planted models.

No module of the library imports this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from levattn._core.checks import positive_number, real_number, whole_number
from levattn._core.types import Float64, Int64

__all__ = ["AttentionHeads", "Planted", "adversarial_queries", "minilm", "planted", "resampled"]

Float16Array: TypeAlias = npt.NDArray[np.float16]
RNGLike: TypeAlias = int | np.random.SeedSequence | np.random.BitGenerator | np.random.Generator
Variant: TypeAlias = Literal["isotropic", "anisotropic", "duplicated"]
_DRAWN = 1 << 14  # rows drawn at a time


@dataclass(frozen=True, eq=False, repr=False)
class AttentionHeads:
    """Queries, keys and values of all heads of an encoder over one text.

    Attributes
    ----------
    queries, keys, values : ndarray of float16, shape (layers, heads, n, d)
        The inputs of the attention of each head, before the logits are scaled. Read-only.
    tokens : tuple of str
        The n tokens of the text, one per row.
    scale : float
        Factor of the logits in the model: a head computes softmax(scale * Q K^T) V.

    Examples
    --------
    >>> from levattn.datasets import minilm
    >>> heads = minilm()
    >>> heads.queries.shape, heads.queries.dtype.name, len(heads.tokens)
    ((6, 12, 512, 32), 'float16', 512)
    """

    queries: Float16Array
    keys: Float16Array
    values: Float16Array
    tokens: tuple[str, ...]
    scale: float

    def __repr__(self) -> str:
        layers, heads, n, d = self.keys.shape
        return f"AttentionHeads(layers={layers}, heads={heads}, n={n}, d={d})"


@cache
def minilm() -> AttentionHeads:
    """Load the 72 attention heads of all-MiniLM-L6-v2 over a public-domain English text.

    A pretrained sentence encoder reads the Gettysburg Address and the opening of the Declaration of Independence.
    Attention is bidirectional, there is no padding, and positions are part of the embeddings. So the keys are the keys
    inside the logits.

    Returns
    -------
    AttentionHeads
        Arrays of shape (6, 12, 512, 32), float16; ``scale`` is 1/sqrt(32). Every call returns the same object.

    Notes
    -----
    Memory 7.1 MB, read from the installed package on the first call. Sources, licenses and the sha256 of the file:
    ``levattn/data/NOTICE.md``; the script that made it: ``examples/make_minilm_data.py``.

    References
    ----------
    Wang, Wei, Dong, Bao, Yang, Zhou. MiniLM: Deep Self-Attention Distillation for Task-Agnostic Compression
    of Pre-Trained Transformers. NeurIPS 2020.

    Examples
    --------
    >>> from levattn.datasets import minilm
    >>> heads = minilm()
    >>> heads
    AttentionHeads(layers=6, heads=12, n=512, d=32)
    >>> heads.tokens[:5]
    ('[CLS]', 'four', 'score', 'and', 'seven')
    >>> heads.keys[2, 5].shape  # the keys of layer 2, head 5
    (512, 32)
    """
    with (
        (files("levattn") / "data" / "minilm_l6_v2.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as stored,
    ):
        queries, keys, values = (stored[name] for name in ("queries", "keys", "values"))
        tokens = tuple(stored["tokens"].tolist())
    for array in (queries, keys, values):
        array.setflags(write=False)
    return AttentionHeads(queries, keys, values, tokens, scale=1 / math.sqrt(keys.shape[-1]))


def resampled(
    K: npt.ArrayLike,
    n: int,
    /,
    *,
    smoothing: float = 0.5,
    dtype: npt.DTypeLike = np.float32,
    rng: RNGLike | None = None,
) -> npt.NDArray[Any]:
    r"""Draw any number of keys that look like given ones: their mean, their covariance, and their tails.

    This is a smoothed bootstrap that keeps the variance. Let μ and :math:`C = L L^\top` be the mean and the covariance
    of the m given keys. Every new key draws a row i of them and a standard normal g:

    .. math:: k = \mu + \sqrt{1 - h^2}\,(k_i - \mu) + h\, L g .

    So for any smoothing h the mean of a new key is μ and its covariance C, exactly. The excess of its fourth moments
    is :math:`(1 - h^2)^2` times the excess of the given keys. So large key matrices can resemble the keys of a real
    head; h = 0 gives copies of its rows, and h = 1 Gaussian keys.

    Parameters
    ----------
    K : array_like, shape (m, d)
        The given keys, finite, m at least 1: heads side by side for keys of more columns.
    n : int
        Number of keys to draw, at least 0.
    smoothing : float in [0, 1], default 0.5
        The h above.
    dtype : dtype, default float32
        A floating dtype of the returned keys.
    rng : int, SeedSequence, BitGenerator, Generator or None
        Passed to `numpy.random.default_rng`; None draws fresh entropy.

    Returns
    -------
    ndarray of shape (n, d)
        The new keys.

    Raises
    ------
    TypeError
        If K does not hold real numbers, `n` is not whole, or `dtype` is not a floating dtype.
    ValueError
        If K does not have two axes, has no rows, or holds NaN or infinity. Also if a number is outside its range.

    Notes
    -----
    Time O(m d² + n d²), memory O(m d + d²) beyond the returned keys.

    References
    ----------
    Silverman, Young. The bootstrap: to smooth or not to smooth? Biometrika 74, 1987 (the shrunk smoothed bootstrap).

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.datasets import minilm, resampled
    >>> heads = minilm().keys[2]
    >>> K = resampled(np.hstack([heads[4], heads[5]]), 100_000, rng=0)
    >>> K.shape, K.dtype.name
    ((100000, 64), 'float32')
    >>> bool(abs(K[:, :32].mean(axis=0) - heads[4].mean(axis=0, dtype=float)).max() < 0.02)
    True
    """
    given = _real_array(K, "K")
    if given.ndim != 2 or not len(given):
        raise ValueError(f"K has shape {given.shape}; expected (m, d) with at least one key")
    n = whole_number("n", n, 0, None)
    h = real_number("smoothing", smoothing)
    if not 0 <= h <= 1:
        raise ValueError(f"smoothing is {smoothing!r}; expected a number from 0 to 1")
    kind = np.dtype(dtype)
    if kind.kind != "f":
        raise TypeError(f"dtype is {kind}; expected a floating dtype, such as float32")
    mean = given.mean(axis=0)
    about = given - mean
    _, s, Vt = np.linalg.svd(about, full_matrices=False)
    turned = (h / math.sqrt(len(given)) * s)[:, None] * Vt  # h Lᵀ
    about *= math.sqrt(1 - h * h)
    about += mean
    generator = np.random.default_rng(rng)
    out = np.empty((n, given.shape[1]), kind)
    for start in range(0, n, _DRAWN):
        rows = out[start : start + _DRAWN]
        rows[:] = about[generator.integers(len(given), size=len(rows))]
        rows += generator.standard_normal((len(rows), len(s))) @ turned
    return out


def _real_array(K: npt.ArrayLike, name: str) -> Float64:
    """Return finite real numbers as a new array of float64, or raise."""
    array = np.asarray(K)
    if array.dtype.kind in "cOSUMm":
        raise TypeError(f"{name} must hold real numbers, got dtype {array.dtype}; convert it to a float dtype")
    numbers = array.astype(np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError(f"{name} must be finite, got NaN or infinity; remove or replace these rows")
    return numbers


def adversarial_queries(K: npt.ArrayLike, /) -> Float64:
    r"""Return for every key the query that attains its leverage score.

    Row j is :math:`y_j = (K^\top K)^+ k_j`, the solution of

    .. math:: \max_y \; \frac{\langle k_j, y\rangle^2}{\sum_l \langle k_l, y\rangle^2} = \tau_j .

    With f(x) = x^2 no query gives key j a larger score. So a set of keys misses no large score exactly when it
    misses none on these n queries. The query is scaled so that :math:`\langle k_j, y_j\rangle = \sum_l \langle k_l,
    y_j\rangle^2 = \tau_j`. A zero key has the zero query.

    Parameters
    ----------
    K : array_like, shape (..., n, d)
        Keys: finite real numbers of any dtype; used as float64.

    Returns
    -------
    ndarray of float64, shape (..., n, d)
        The queries. Where K has dependent columns, a row can differ from :math:`(K^\top K)^+ k_j` by a
        vector orthogonal to all keys, which changes no score.

    Raises
    ------
    TypeError
        If K does not hold real numbers.
    ValueError
        If K has fewer than two axes or a value that is not finite.

    Notes
    -----
    One singular value decomposition per matrix, O(n d min(n, d)) time and O(n d) memory: meant for tests.
    Columns are first brought to one scale, so that graded columns do not look nearly rank-deficient. Directions
    whose singular value is then below max(n, d) times the float64 rounding unit count as absent.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff. LevAttention: Time, Space, and Streaming Efficient Algorithm for
    Heavy Attentions. 2024.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.datasets import adversarial_queries
    >>> K = np.array([[3.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> weights = (adversarial_queries(K) @ K.T) ** 2
    >>> scores = weights / weights.sum(axis=1, keepdims=True)
    >>> bool(np.allclose(np.diag(scores), [1.0, 0.5, 0.5]))
    True
    """
    keys = _real_array(K, "K")
    if keys.ndim < 2:
        raise ValueError(f"K must have shape (..., n, d), got {keys.shape}; pass one key per row")
    n, d = keys.shape[-2:]
    # Powers of two: scaling there and back rounds nothing.
    _, exponents = np.frexp(np.abs(keys).max(axis=-2, keepdims=True, initial=0.0))
    inverse = np.linalg.pinv(np.ldexp(keys, -exponents), rcond=max(n, d) * np.finfo(np.float64).eps)
    queries: Float64 = np.ldexp(np.swapaxes(inverse, -1, -2), -exponents)
    return queries


@dataclass(frozen=True, eq=False, repr=False)
class Planted:
    """Keys with known heavy rows, as `planted` makes them.

    Attributes
    ----------
    keys : ndarray of float64, shape (n, d)
        Planted and background keys, in random order.
    queries : ndarray of float64, shape (m, d)
        Each asks for one planted direction.
    indices : ndarray of int64, shape (k,)
        Rows of ``keys`` that are planted, ascending.
    groups : ndarray of int64, shape (k,)
        The planted direction of the row, 0 ... n_planted - 1.
    targets : ndarray of int64, shape (m,)
        The planted direction that the query asks for.
    planted_score, background_score : float
        Predicted leverage score of a planted key, and predicted largest one of a background key.

    Examples
    --------
    >>> from levattn.datasets import planted
    >>> model = planted(1000, 16, n_planted=3, n_queries=5, rng=0)
    >>> model.keys.shape, model.indices.shape, model.targets
    ((1000, 16), (3,), array([0, 1, 2, 0, 1]))
    """

    keys: Float64
    queries: Float64
    indices: Int64
    groups: Int64
    targets: Int64
    planted_score: float
    background_score: float

    def __repr__(self) -> str:
        n, d = self.keys.shape
        return (
            f"Planted(n={n}, d={d}, planted={len(self.indices)}, planted_score={self.planted_score:.3g}, "
            f"background_score={self.background_score:.3g})"
        )


_QUERY_NOISE = 0.1  # the length of the noise of a query, about


def planted(
    n: int,
    d: int,
    *,
    variant: Variant = "anisotropic",
    n_planted: int | None = None,
    strength: float = 3.0,
    noise: float = 0.05,
    background_rank: int | None = None,
    copies: int | None = None,
    n_queries: int | None = None,
    rng: RNGLike | None = None,
) -> Planted:
    r"""Draw keys of which a known few have a large leverage score.

    With orthonormal :math:`b_1, \dots, b_d` and separate standard normal g, g' for every row, a key is

    .. math::

        k_j = \alpha\, b_{i(j)} + \sigma g  \quad\text{(planted)}, \qquad
        k_l = \sigma g + B g'               \quad\text{(background)},

    where i(j) is one of the s = ``n_planted`` first directions. The columns of B are ``background_rank``
    of the others. Only isotropic noise meets a planted direction. So with c copies of each and r columns of B

    .. math::

        \tau_{\text{planted}} \approx \frac{\alpha^2}{c\,\alpha^2 + n\sigma^2} + \frac{d - s - r}{n},

    .. math::

        \max \tau_{\text{background}} \lesssim \frac{(\sqrt d + \sqrt{2 \ln n})^2}{n}.

    Where the first is larger, the planted rows are the universal set of every threshold between the two.

    Parameters
    ----------
    n, d : int
        Number of keys and their dimension, at least 1.
    variant : {"anisotropic", "isotropic", "duplicated"}
        - *isotropic*: no B; planted keys also have the largest norms.
        - *anisotropic*: with a ``strength`` below the root of ``background_rank``, background keys have the
          larger norms. So norms mislead where leverage scores do not.
        - *duplicated*: as anisotropic, with each planted key c times up to noise. A copy scores about 1/c at
          most, so single keys mislead too and only the group as a whole is heavy.
    n_planted : int, optional
        Number s of planted directions, 1 to d. Default: d // 4, at least 1.
    strength, noise : float
        :math:`\alpha > 0` and :math:`\sigma > 0`, in units of one background coordinate.
    background_rank : int, optional
        Columns of B, 1 to d - s; not for *isotropic*. Default: d // 2, at most d - s.
    copies : int, optional
        Number c of copies, at least 2, with s c at most n; only for *duplicated*. Default: n / d, rounded up
        and fitted to that range, which makes a copy score like an average key.
    n_queries : int, optional
        Number of queries, at least 0; they ask for the directions in turn. A query is :math:`b_i + 0.1 g / \sqrt d`,
        with noise of a length of about 0.1. Default: s.
    rng : int, SeedSequence, BitGenerator, Generator or None
        Passed to `numpy.random.default_rng`; None draws fresh entropy.

    Returns
    -------
    Planted
        Keys, queries, the planted rows, and their predicted scores.

    Raises
    ------
    TypeError
        If an argument is not a number, or not whole where it should be.
    ValueError
        If an argument is outside its range, or given to a variant that does not have it.

    Notes
    -----
    The two scores are predictions for n much larger than d, not bounds. Time O(n d²), memory O(n d).

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.datasets import planted
    >>> model = planted(4096, 32, rng=0)
    >>> model
    Planted(n=4096, d=32, planted=8, planted_score=0.47, background_score=0.0231)
    >>> U = np.linalg.svd(model.keys, full_matrices=False)[0]
    >>> scores = np.sum(U**2, axis=1)
    >>> np.array_equal(np.flatnonzero(scores >= 0.1), model.indices)
    True
    >>> norms = np.linalg.norm(model.keys, axis=1)
    >>> len(np.intersect1d(np.argsort(norms)[-8:], model.indices))  # the 8 largest norms find none
    0
    """
    if variant not in get_args(Variant):
        raise ValueError(f"variant must be one of {', '.join(get_args(Variant))}, got {variant!r}")
    n = whole_number("n", n, 1, None)
    d = whole_number("d", d, 1, None)
    s = whole_number("n_planted", max(1, d // 4) if n_planted is None else n_planted, 1, min(n, d))
    m = whole_number("n_queries", s if n_queries is None else n_queries, 0, None)
    positive_number("strength", strength)
    positive_number("noise", noise)
    rank = _background_rank(variant, background_rank, d, s)
    c = _copies(variant, copies, n, d, s)

    generator = np.random.default_rng(rng)
    basis = np.linalg.qr(generator.standard_normal((d, d)))[0].T
    rows = generator.permutation(n)[: s * c]
    order = np.argsort(rows)
    indices, groups = rows[order], (np.arange(s * c) % s)[order]

    background = generator.standard_normal((n, rank)) @ basis[s : s + rank]
    background[indices] = strength * basis[groups]
    keys = background + noise * generator.standard_normal((n, d))
    targets = np.arange(m) % s
    queries = basis[targets] + _QUERY_NOISE / math.sqrt(d) * generator.standard_normal((m, d))
    return Planted(
        keys=keys,
        queries=queries,
        indices=indices,
        groups=groups,
        targets=targets,
        planted_score=min(1.0, strength**2 / (c * strength**2 + n * noise**2) + (d - s - rank) / n),
        background_score=min(1.0, (math.sqrt(d) + math.sqrt(2 * math.log(n))) ** 2 / n),
    )


def _background_rank(variant: Variant, asked: int | None, d: int, s: int) -> int:
    """Return the number of directions that background keys favor."""
    if variant == "isotropic":
        if asked is not None:
            raise ValueError(f"background_rank is not for variant 'isotropic', got {asked}; leave it out")
        return 0
    if s == d:
        raise ValueError(
            f"n_planted must be below d for variant {variant!r}, whose background needs other directions; got "
            f"n_planted {s}, d {d}. Change them or take variant 'isotropic'"
        )
    return whole_number("background_rank", min(d // 2, d - s) if asked is None else asked, 1, d - s)


def _copies(variant: Variant, asked: int | None, n: int, d: int, s: int) -> int:
    """Return the number of keys per planted direction."""
    if variant != "duplicated":
        if asked is not None:
            raise ValueError(f"copies is not for variant {variant!r}, got {asked}; leave it out")
        return 1
    usual = max(2, min(-(-n // d), n // s))
    return whole_number("copies", usual if asked is None else asked, 2, n // s)
