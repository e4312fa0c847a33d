"""Groups of keys: the attention that a query can give a whole group, and groups of near-duplicates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from levattn._core.arrays import Matrices, as_matrices, named_numpy, take_rows, to_device, to_numpy
from levattn._core.checks import real_number
from levattn._core.device import where_arrays_are
from levattn._core.random import as_seed
from levattn._core.threads import parallel_for
from levattn._core.types import Float64, Int64
from levattn.linalg.factor import Factor, blockwise_product, float64_rows
from levattn.sensitivity.leverage import factorize

_CHUNK = 1 << 11  # rows in a block that is whitened, compared or given signatures
_LEAST_ANGLE = 1e-8  # smaller angles are below the rounding of whitened keys
_TINY = 2.0**-500  # squared norms below which a whitened key is computed again from the key scaled up
_SINGLE_CHORD = 2e-6  # error of the distance of two unit vectors in float32, rounded up
_MISS = 1e-4  # probability that a pair at half the angle shares no signature in any round
_SPARE_BITS = 5  # bits of a signature beyond log2 n, so that few unrelated keys share one by chance
_LEADERS = 4  # of a bucket, tried one after the other
_SIGNATURES = 3 << 20  # signatures in memory at a time, four bytes each
_HELD = 1 << 23  # entries of whitened keys that stay in memory between rounds


@where_arrays_are
def group_leverage(K: Any, labels: Any, /, *, mask: Any = None) -> Any:
    r"""Group leverage scores: the largest attention that any query can give to all keys of a group together.

    The score of a group S of keys is

    .. math:: \tau_S = \max_q \sum_{j \in S} \langle q, k_j\rangle^2 / \sum_l \langle q, k_l\rangle^2
        = \lambda_{\max}\Bigl(\sum_{j \in S} x_j x_j^T\Bigr),

    with the whitened keys :math:`x_j = W^T k_j`. None of m copies of a key scores above 1/m, so no universal set of
    ε > 1/m contains any of them. Yet together they may receive all attention of a query, and the score of their group
    shows this. A group's score is at least the largest leverage score of its keys, and at most the sum of these scores
    and 1. Over the groups of a partition the scores sum to at most the rank, so at most rank/ε groups reach ε. Scores
    are exact, up to rounding. Where float64 cannot resolve a direction, a group has the sum of bounds of its keys'
    scores: an *over*-estimate.

    Parameters
    ----------
    K : array of shape (..., n, d)
        Keys, as in `leverage_scores`.
    labels : array of int, shape (..., n)
        The group of each key, numbered from 0; -1 for a key in no group, which is still part of the denominator. A
        numpy array, a list, or an array of any namespace.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part. The others are in no group and their values are not read.

    Returns
    -------
    array of float64, shape (..., g)
        Scores in the caller's kind of array, on its device. The number of groups g is the largest label + 1, over all
        matrices of a batch and masked keys as well. A group without keys has 0.

    Raises
    ------
    TypeError
        If K is not an array of real floating dtype, the labels are not integers, or the mask is not boolean.
    ValueError
        If a shape does not fit, or a label is below -1.
    NonFiniteError
        If the keys hold NaN or infinity outside the mask.

    See Also
    --------
    near_duplicates : Groups of keys that queries hardly tell apart.
    levattn.definitions.group_leverage : The definition, in NumPy.

    Notes
    -----
    Time O(n d²) for the whitening. A group of s keys takes O(s² d + s³), or O(s d² + d³) if s is above the rank.
    Memory beyond K: O(d² + n + g) and some thousand rows. The results are as reproducible, to the bit, as LAPACK's.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), section 3, for single keys.

    Examples
    --------
    No universal set of ε = 0.1 contains any of forty near-copies of a direction, yet some query gives them half of its
    attention:

    >>> import numpy as np, levattn
    >>> rng = np.random.default_rng(0)
    >>> K = rng.standard_normal((1000, 8))
    >>> K[:40] = 5 * np.eye(8)[0] + 0.01 * rng.standard_normal((40, 8))
    >>> len(levattn.universal_set(K, 0.1))
    0
    >>> levattn.group_leverage(K, levattn.near_duplicates(K)).round(2)
    array([0.52])
    """
    matrices = as_matrices(K, "K").masked(mask)
    groups = as_labels(labels, matrices)
    scores = group_scores(factorize(matrices, method="auto", single="no"), groups)
    return matrices.wrap(to_device(scores, matrices.data))


def group_scores(factor: Factor, labels: Int64) -> Float64:
    """Return the group leverage scores of factored keys, (b, g), for labels (b, n)."""
    groups = labels.copy()
    count = int(groups.max(initial=-1)) + 1
    tau = to_numpy(factor.exactly().scores(as_float64=True)[0])
    scores: Float64 = np.zeros((len(groups), count))
    for item in range(len(groups)):
        one = factor.item(item)
        if one.rows.mask is not None:
            groups[item, ~to_numpy(one.rows.mask)[0]] = -1
        if count:
            fine = factor.hidden.get(item, one)  # of the exact rank
            summed = fine is None
            one = one if fine is None or fine is one else fine.on(one.rows)
            scores[item] = _scores(one, groups[item], count, tau[item], summed=summed)
            if item in factor.hidden:  # the scores of such keys are raised by their error as well
                scores[item] = np.minimum(scores[item] * (1 + 4 * float(one.score_error[0])), 1.0)
    return scores


def as_labels(labels: Any, matrices: Matrices) -> Int64:
    """Check the labels that go with `matrices` and return a copy, (b, n) int64."""
    hint = "Give each key the number of its group, and -1 to a key in none"
    if not array_api_compat.is_array_api_obj(labels):
        try:
            labels = np.asarray(labels)
            labels = labels if labels.size else labels.astype(np.int64)
        except ValueError as error:
            raise ValueError(f"labels is a {type(labels).__name__} that makes no array ({error}). {hint}") from error
    found = named_numpy("labels", labels)
    expected = (*matrices.batch, matrices.n)
    if found.shape != expected:
        raise ValueError(f"labels has shape {found.shape}; expected {expected}, one label a key. {hint}")
    if found.dtype.kind not in "iu":
        raise TypeError(f"labels has dtype {labels.dtype}; expected integers. {hint}")
    if found.size and (found.min() < -1 or found.max() >= np.iinfo(np.int64).max):
        worst = int(found.min()) if found.min() < -1 else int(found.max())
        raise ValueError(f"labels holds {worst}; expected numbers of groups, from 0 on, or -1. {hint}")
    return np.array(found, np.int64).reshape(tuple(matrices.data.shape[:2]))


def _scores(factor: Factor, labels: Int64, count: int, tau: Float64, *, summed: bool) -> Float64:
    """Return the scores of the groups of one matrix; if `summed`, sums of its keys' leverage scores `tau`."""
    order = np.argsort(labels, kind="stable")
    order = order[np.searchsorted(labels, 0, sorter=order) :]
    sizes = np.bincount(labels[order], minlength=count)
    starts = np.cumsum(sizes) - sizes
    least, total, scores = np.zeros(count), np.zeros(count), np.zeros(count)
    some = np.flatnonzero(sizes)
    if len(some):
        least[some] = np.maximum.reduceat(tau[order], starts[some])
        total[some] = np.add.reduceat(tau[order], starts[some])
    if summed:
        return np.minimum(total, 1.0)
    rank = _dimensions(factor)
    for size in np.unique(sizes[sizes > 1]).tolist() if rank else []:
        equal, few = np.flatnonzero(sizes == size), size < rank
        for block in _parts(len(equal), max(1, _CHUNK // size)):
            groups = equal[block]
            rows = order[starts[groups, None] + np.arange(size)]
            moments: Float64 = np.zeros((len(groups), min(size, rank), min(size, rank)))
            for part in _parts(size, size if few else _CHUNK):
                X = _whitened(factor, rows[:, part].ravel()).reshape(len(groups), -1, rank)
                Y = X.transpose(0, 2, 1)
                moments += X @ Y if few else Y @ X
            scores[groups] = np.linalg.eigvalsh(moments)[:, -1]
    # rounding may move a score beyond its bounds; a row that counts as 1 has no x, but raises the lower bound
    return np.clip(scores, least, np.maximum(least, np.minimum(total, 1.0)))


def _parts(n: int, step: int) -> Iterator[slice]:
    """Yield the slices of ``range(n)`` in steps."""
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _whitened(factor: Factor, rows: Int64, *, even: bool = False) -> Float64:
    """Return ``x = Wᵀk`` for some rows of one matrix, (m, rank); if `even`, each times a power of two."""
    taken = replace(factor.rows, keys=take_rows(factor.rows.keys, rows), mask=None)
    X = float64_rows(taken, 0, len(rows))
    if even:  # so that no tiny row loses its digits
        X = np.ldexp(X, -np.frexp(np.max(np.abs(X), axis=1, keepdims=True))[1])
    return factor.whitened(X)


def _dimensions(factor: Factor) -> int:
    """Return the number of entries of a whitened key, for a batch of one."""
    return int(np.count_nonzero(np.any(factor.whitening[0] != 0, axis=0)))


@where_arrays_are
def near_duplicates(
    K: Any,
    /,
    *,
    angle: float = 0.1,
    mask: Any = None,
    rng: int | np.random.Generator | None = None,
) -> Any:
    r"""Group keys that are near-duplicates of each other, so that queries hardly tell them apart.

    Two keys are linked if the angle between the whitened keys :math:`x_j = W^T k_j` and :math:`\pm x_l` is at most
    `angle`, and links connect groups. This is the metric in which queries distinguish keys. As f(x) = x² distinguishes
    neither sign nor scale, ``-k`` and ``c * k`` are duplicates of k.

    Every link is verified, up to rounding, but a pair may be *missed*. The method compares keys whose random
    signatures agree, and two keys at half the angle share no signature with a probability of at most 1e-4. If they
    share one, they join one group, unless earlier keys intervene. A single key intervenes if it is linked to, or in a
    group with, only one of the two. Four keys intervene if they are far from both. Pairs between half the angle and
    the whole have no guarantee. A miss can only split a group or leave a key alone: `group_leverage` of the groups
    found is exact.

    Links form chains: keys of a group may be farther than `angle` apart. A group S whose keys are all within `angle`
    of one of them has nearly the sum of its keys' leverage scores,

    .. math:: \cos^2(\mathrm{angle}) \sum_{j \in S} \tau_j \le \tau_S \le \sum_{j \in S} \tau_j .

    Parameters
    ----------
    K : array of shape (..., n, d)
        Keys, as in `leverage_scores`.
    angle : float in [1e-8, π/4], default 0.1
        Largest angle of a link, in radians.
    mask : array of bool, shape (..., n), optional
        True for a key that takes part. The others are in no group and their values are not read.
    rng : int or numpy.random.Generator, optional
        Seed of the signatures, 0 if left out. All matrices of a batch share them.

    Returns
    -------
    array of int64, shape (..., n)
        The group of each key, in the caller's kind of array, on its device. Each matrix numbers its groups from 0 in
        the order of their first keys. Keys without a near-duplicate, zero keys and rows outside the numerical row
        space have -1. The direction of such a row, which `leverage_scores` counts as 1, is unknown.

    Raises
    ------
    TypeError
        If K is not an array of real floating dtype, or an option is of the wrong type.
    ValueError
        If a shape or the angle is wrong.
    NonFiniteError
        If the keys hold NaN or infinity outside the mask.

    See Also
    --------
    group_leverage : The largest attention that a query can give to each group.

    Notes
    -----
    A signature has k ≈ log2(n) + 5 bits: the sides of random hyperplanes on which a whitened key lies, all flipped if
    the first is set. Two keys at an angle θ share one with a probability of at least (1 − θ/π)^k. There are R rounds
    of new hyperplanes, with (1 − (1 − angle/2π)^k)^R at most 1e-4. R is 8 for n = 10⁵ and the default angle, 3 for
    small angles, about 170 for π/4. Each round compares the keys of one signature with the first of them. It then
    compares the keys far from it with the first of the rest, and so on, up to four times. Time
    O(n d² + R n (d k + log n)), memory O(n d), whatever the keys.

    References
    ----------
    Charikar, "Similarity estimation techniques from rounding algorithms", STOC 2002, section 3: the probability that
    the bits of two signatures agree.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> rng = np.random.default_rng(0)
    >>> K = rng.standard_normal((200, 8))
    >>> K[:3] = K[100] * [[1.0], [-1.0], [50.0]]
    >>> K[3] = 1.01 * K[150] + 1e-3
    >>> labels = levattn.near_duplicates(K)
    >>> np.flatnonzero(labels == 0), np.flatnonzero(labels == 1), labels.max()
    (array([  0,   1,   2, 100]), array([  3, 150]), np.int64(1))
    """
    angle = check_angle(angle)
    seed = as_seed(rng)
    matrices = as_matrices(K, "K").masked(mask)
    factor = factorize(matrices, method="auto", single="no")
    labels: Int64 = np.full((factor.rows.shape[0], matrices.n), -1)
    alone = np.zeros(len(labels), np.bool_) if factor.wide is None else factor.wide.independent  # orthogonal keys
    for item in np.flatnonzero(~alone).tolist():
        directions = _directions(factor.item(item))
        labels[item, directions.rows] = _numbered(_linked(directions, angle, np.random.default_rng(seed)))
    return matrices.wrap(to_device(labels, matrices.data))


def check_angle(angle: Any) -> float:
    """Return an angle as a float, or raise."""
    number = real_number("angle", angle, what="a real number, in radians")
    if not _LEAST_ANGLE <= number <= math.pi / 4:
        raise ValueError(
            f"angle is {angle!r}; expected {_LEAST_ANGLE} <= angle <= π/4, in radians (numpy.deg2rad converts degrees)"
        )
    return number


@dataclass(frozen=True)
class _Directions:
    """Whitened keys of one matrix, normalized and rounded to float32; recomputed if they take too much memory."""

    factor: Factor
    rows: Int64
    held: npt.NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def threads(self) -> int | None:
        """Number of threads that may ask for them: precise products use the thread pool themselves."""
        return 1 if self.held is None and self.factor.arithmetic[0] == "compensated" else None

    def of(self, which: slice | npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return some of the directions."""
        if self.held is not None:
            return self.held[which]
        rows = self.rows[which]
        consecutive = len(rows) and rows[-1] - rows[0] + 1 == len(rows)
        with np.errstate(over="ignore", invalid="ignore"):
            if isinstance(which, slice) and consecutive:
                X = self.factor.whitened(float64_rows(self.factor.rows, rows[0], rows[-1] + 1))
            else:
                X = _whitened(self.factor, rows)
        squares = np.einsum("ij,ij->i", X, X)
        tiny = np.flatnonzero(squares < _TINY)
        if len(tiny):
            X[tiny] = _whitened(self.factor, rows[tiny], even=True)
            squares[tiny] = np.einsum("ij,ij->i", X[tiny], X[tiny])
        X *= (1 / np.sqrt(np.where(squares > 0, squares, 1.0)))[:, None]
        return X.astype(np.float32)

    def near(self, a: npt.NDArray[Any], b: npt.NDArray[Any], angle: float) -> npt.NDArray[np.bool_]:
        """Tell which pairs are within the angle of each other, up to sign; in float64 where float32 cannot decide."""
        limit = 2 * math.sin(angle / 2)
        chords: npt.NDArray[Any] = np.empty(len(a), np.float32)
        for part in _parts(len(a), _CHUNK):
            chords[part] = _chords(self.of(a[part]), self.of(b[part]))
        near = chords <= limit
        close = np.flatnonzero(np.abs(chords - limit) <= _SINGLE_CHORD)
        for part in _parts(len(close), _CHUNK):
            pairs = [_normalized(_whitened(self.factor, self.rows[ends[close[part]]], even=True)) for ends in (a, b)]
            near[close[part]] = _chords(*pairs) <= limit
        return np.asarray(near)


def _chords(A: npt.NDArray[Any], B: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the distances of unit vectors, up to sign."""
    signs = np.copysign(A.dtype.type(1), np.einsum("ij,ij->i", A, B))
    A = A - signs[:, None] * B
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", A, A)))


def _normalized(X: Float64) -> Float64:
    squares = np.einsum("ij,ij->i", X, X)[:, None]
    return X / np.sqrt(np.where(squares > 0, squares, 1.0))


def _directions(factor: Factor) -> _Directions:
    """Return the directions of the keys of one matrix, without the keys that have none."""
    n, r = factor.rows.shape[1], _dimensions(factor)
    live = np.ones(n, np.bool_) if factor.rows.mask is None else to_numpy(factor.rows.mask)[0].copy()
    if factor.null_directions:
        factors = (replace(factor, null_directions={}), factor)
        plain, counted = (to_numpy(f.scores(as_float64=True, numerical=True)[0])[0] for f in factors)
        live &= plain == counted
    scores = to_numpy(factor.scores(numerical=True)[0])[0]
    for part in _parts(n, _CHUNK):  # the score of a nonzero key may underflow
        tiny = np.flatnonzero(live[part] & (scores[part] < _TINY)) + part.start
        if len(tiny):
            live[tiny] = _whitened(factor, tiny, even=True).any(axis=1)
    found = _Directions(factor, np.flatnonzero(live))
    if len(found) * r > _HELD:
        return found
    held = np.empty((len(found), r), np.float32)

    def fill(index: int) -> None:
        part = slice(_CHUNK * index, _CHUNK * (index + 1))
        held[part] = found.of(part)

    parallel_for(fill, -(-len(found) // _CHUNK), threads=found.threads)
    return replace(found, held=held)


def _numbered(components: npt.NDArray[Any]) -> Int64:
    """Number the components of at least two members in the order of their first members; the rest is -1."""
    numbers = np.bincount(components)
    found, first = np.unique(components[numbers[components] > 1], return_index=True)
    numbers[:] = -1
    numbers[found[np.argsort(first)]] = np.arange(len(found))
    return np.asarray(numbers[components], np.int64)


def _signature_plan(n: int, angle: float) -> tuple[int, int]:
    """Return the bits of a signature for n keys, and the rounds that make a miss as rare as required."""
    bits = min(max(n - 1, 1).bit_length() + _SPARE_BITS, 32, 64 - n.bit_length())
    missed = -math.expm1(bits * math.log1p(-angle / (2 * math.pi)))
    return bits, max(3, math.ceil(math.log(_MISS) / math.log(missed)))


def _linked(directions: _Directions, angle: float, generator: np.random.Generator) -> npt.NDArray[Any]:
    """Return the component of each unit vector in the graph of the links found."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n, r = len(directions), _dimensions(directions.factor)
    components: npt.NDArray[Any] = np.arange(n, dtype=np.int32 if n < 2**31 else np.int64)
    if n < 2:
        return components
    bits, rounds = _signature_plan(n, angle)
    for part in _parts(rounds, max(1, _SIGNATURES // n)):
        count = part.stop - part.start
        planes = generator.standard_normal((count, bits, r), np.float32)
        for codes in _signatures(directions, planes):
            a, b = _links(directions, codes, components, angle)
            if len(a):
                size = int(components.max()) + 1
                graph = coo_array((np.ones(len(a), np.int8), (components[a], components[b])), shape=(size, size))
                components = connected_components(graph, directed=False)[1].astype(components.dtype)[components]
    return components


def _signatures(directions: _Directions, planes: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Return the signatures of some rounds, (rounds, n): the sides of planes (rounds, bits, r) where rows lie."""
    rounds, bits, r = planes.shape
    columns = np.ascontiguousarray(planes.reshape(rounds * bits, r).T)
    codes = np.empty((rounds, len(directions)), np.uint32)
    flip = np.packbits(np.arange(32) < bits).view(np.uint32)[0]

    def body(index: int) -> None:
        part = slice(_CHUNK * index, _CHUNK * (index + 1))
        products = blockwise_product(directions.of(part), columns).reshape(-1, rounds, bits)
        sides = np.zeros((len(products), rounds, 32), np.bool_)
        np.less(products, 0, out=sides[:, :, :bits])
        words = np.packbits(sides, axis=-1).view(np.uint32)[:, :, 0]
        codes[:, part] = np.where(sides[:, :, 0], words ^ flip, words).T

    parallel_for(body, -(-len(directions) // _CHUNK), threads=directions.threads)
    return codes


def _links(
    directions: _Directions, codes: npt.NDArray[np.uint32], components: npt.NDArray[Any], angle: float
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the verified links between keys of equal codes in different components."""
    n = len(codes)
    shift = np.uint64(n.bit_length())
    buckets = codes.astype(np.uint64)  # with the indices in the low bits, so that one sort orders both
    buckets <<= shift
    buckets |= np.arange(n, dtype=np.uint64)
    buckets.sort()
    members = np.empty(n, components.dtype)
    np.bitwise_and(buckets, (np.uint64(1) << shift) - np.uint64(1), out=members, casting="unsafe")
    buckets >>= shift
    members, buckets = _shared(members, buckets)
    found: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
    for _ in range(_LEADERS):
        if not len(members):
            break
        first = np.append(True, buckets[1:] != buckets[:-1])
        leaders = members[np.maximum.accumulate(np.where(first, np.arange(len(members)), 0))]
        apart = components[members] != components[leaders]
        asked = np.flatnonzero(apart)
        near = asked[directions.near(members[asked], leaders[asked], angle)]
        found.append((members[near], leaders[near]))
        apart[near] = False
        members, buckets = _shared(members[apart], buckets[apart])
    if not found:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found])


def _shared(members: npt.NDArray[Any], buckets: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Leave out the members that are alone in their bucket; buckets are in ascending order."""
    same = buckets[1:] == buckets[:-1]
    kept = np.append(same, False) | np.append(False, same)
    return (members[kept], buckets[kept]) if len(members) else (members, buckets)
