"""Sets with coverage for a sequence of queries whose distribution changes."""

from __future__ import annotations

from bisect import insort
from typing import Any

import numpy as np

from levattn._core.arrays import as_matrices, to_float64, to_numpy
from levattn._core.checks import check_type, real_number
from levattn._core.device import where_arrays_are
from levattn._core.serialize import SharedState, lock_of, locked, twin
from levattn._core.types import Flags, Int64
from levattn.exceptions import NonFiniteError
from levattn.functions import as_function
from levattn.sets.coverage import Covered, conformal_place, logarithms
from levattn.sets.result import UniversalSet, require_set_of


class AdaptiveCoverage(SharedState):
    r"""The keys that the next query needs, adjusted after each query to reach the coverage in the long run.

    A set with coverage promises nothing for queries that are not exchangeable with the given ones, such as the later
    queries of a text. This class looks at every query after it has been served: if it missed a key, the set grows,
    else it shrinks a little.

    **Guarantee.** Let T queries come, whatever they are, and let γ be the rate. The share of queries that found all
    their keys is less than the coverage c by at most :math:`(1 - c + \gamma) / (\gamma T)`. It is more than c by at
    most :math:`(c + \gamma) / (\gamma T)`, plus the contribution of queries that need no key, which any set covers.
    It is a statement about the mean over queries, not about any single one.

    Parameters
    ----------
    K : array of shape (n, d)
        Keys, one matrix.
    universal : UniversalSet
        Their set with coverage, by `epsilon` or by `mass`, from `universal_set` with ``queries=``. Its scores order
        the keys.
    rate : float in (0, 1), default 0.02
        The γ above: with a larger γ sets follow changes faster, and vary more.

    Attributes
    ----------
    seen, missed : int
        Number of queries so far, and number of queries that lacked a key.

    Raises
    ------
    TypeError, ValueError
        If the set has no coverage, was made for a size, or belongs to other keys.

    Notes
    -----
    A query costs time O(n d + n), and the memory of its need. The object holds the keys.

    References
    ----------
    Gibbs and Candès, "Adaptive conformal inference under distribution shift", NeurIPS 2021 (arXiv:2106.00170),
    Proposition 4.1.

    Examples
    --------
    >>> import numpy as np, levattn
    >>> rng = np.random.default_rng(0)
    >>> K, Q = rng.standard_normal((200, 8)), rng.standard_normal((100, 8))
    >>> found = levattn.universal_set(K, 0.05, f=levattn.Softmax(), queries=Q, coverage=0.9)
    >>> following = levattn.AdaptiveCoverage(K, found)
    >>> covered = following.update(rng.standard_normal((2000, 8)) + 1)  # other queries than those given
    >>> following.seen, bool(abs(covered.mean() - 0.9) < 0.03)
    (2000, True)
    """

    @where_arrays_are
    def __init__(self, K: Any, universal: UniversalSet, /, *, rate: float = 0.02) -> None:
        check_type("universal", universal, UniversalSet, "the result of universal_set with queries and coverage")
        if universal.coverage is None or universal.needs is None or universal.by_size or universal.batch:
            raise ValueError(
                f"universal is {universal!r}; expected the set with coverage of one matrix, by epsilon or by mass"
            )
        if not 0 < real_number("rate", rate) < 1:
            raise ValueError(f"rate is {rate!r}; expected a number above 0 and below 1, e.g. 0.02")
        self._keys = as_matrices(K, "K")
        if self._keys.batch:
            raise ValueError(f"K has leading axes {self._keys.batch}; expected one matrix, the keys of universal")
        require_set_of(self._keys, universal)
        self._present, self._f, self._rate = universal.present, as_function(universal.f), float(rate)
        self._wish = Covered(universal.coverage, universal.epsilon if universal.mass is None else None, universal.mass)
        scores = np.where(self._present, to_numpy(universal.scores).astype(np.float64), -np.inf)
        self._order: Int64 = np.argsort(-scores, kind="stable")[: np.count_nonzero(self._present)]
        self._needs = universal.needs.tolist()
        self._level = universal.coverage
        self.seen = self.missed = 0

    @property
    def _held_array(self) -> Any:
        return self._keys.data

    def _snapshot(self) -> AdaptiveCoverage:
        """Return a branch of its own, which shares the keys."""
        with lock_of(self):
            other = twin(self)
            other._needs = self._needs.copy()  # `update` inserts into the list
        return other

    __copy__ = _snapshot

    @property
    @locked
    def size(self) -> int:
        """The number of keys that the next query gets."""
        if self._level >= 1:
            return len(self._order)
        place = conformal_place(len(self._needs), self._level) - 1
        return 0 if place < 0 else len(self._order) if place >= len(self._needs) else int(self._needs[place])

    @property
    @locked
    def indices(self) -> Int64:
        """Ascending indices of these keys, int64 (size,)."""
        return np.sort(self._order[: self.size])

    @locked
    @where_arrays_are
    def update(self, Q: Any, elsewhere: Any = None) -> Flags:
        """Adjust the set after queries that have been served, one after the other.

        Parameters
        ----------
        Q : array of shape (m, d), or (H, m, d)
            Queries in their order, as for `universal_set`. If H heads share the keys, all must find their keys.
        elsewhere : array of shape (m,), or (H, m), optional
            The logarithms for keys outside K, as in `universal_set`.

        Returns
        -------
        array of bool, shape (m,)
            Whether each query found all its keys in its set.

        Raises
        ------
        TypeError, ValueError
            If `Q` does not fit the keys.
        NonFiniteError
            If `Q` holds NaN or infinity.
        """
        given = as_matrices(Q, "Q")
        if len(given.batch) > 1 or given.d != self._keys.d:
            raise ValueError(
                f"Q has shape {(*given.batch, given.n, given.d)}; expected (m, {self._keys.d}), or (H, m, "
                f"{self._keys.d}) of H heads"
            )
        heads = to_float64(given.data, given.format)
        rows = heads.reshape(-1, given.d)
        if not np.isfinite(rows).all():
            bad = np.flatnonzero(~np.isfinite(heads).all(axis=(0, 2)))[:5]
            raise NonFiniteError(f"Q holds NaN or infinity, first in rows {bad.tolist()}; expected finite queries")
        covered = np.zeros(given.n, np.bool_)
        own = (*given.batch, given.n)
        rest = None if elsewhere is None else logarithms(elsewhere, self._f, (len(rows),), own)
        needs = self._wish.needs(rows, self._keys, self._present, self._f, self._order, rest)
        for i, need in enumerate(needs.reshape(len(heads), given.n).max(axis=0, initial=0).tolist()):
            covered[i] = need <= self.size
            level = self._level + self._rate * (self._wish.coverage - covered[i])
            seen, missed = self.seen + 1, self.missed + (not covered[i])
            # the least value, because queries that need no key would lower the level without end
            level = max(level, -self._rate)
            # no interrupt and no fork comes between these lines, which run no code of Python's
            self._level, self.seen, self.missed = level, seen, missed
            insort(self._needs, need)
        return covered
