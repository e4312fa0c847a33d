"""Softmax averages of values, one for each latent, and statistics of tokens for each head."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from levattn._core.arrays import Matrices, array_namespace, as_matrices, on_cuda, to_numpy
from levattn._core.checks import batch_of, check_type, whole_number
from levattn._core.device import where_arrays_are
from levattn._core.serialize import StoredState, locked, locked_with, shaped, twin, whole
from levattn._core.types import decode_half
from levattn._kernels import kernels_for
from levattn._kernels.latent import State
from levattn.states.blocks import held_as, same_decay
from levattn.states.moments import Moments

_MOST_UNSEEN = 2**31  # largest number of sums in a saved state without positions


class SoftmaxState(StoredState, name="SoftmaxState", version=1):
    """Softmax averages of values over positions that come in chunks, one for each latent.

    For logits K (positions × latents) and values V it holds ``m = max K``, ``s = Σ e^{K − m}`` and
    ``S = Σ e^{K − m} V``, the sums over positions. It reads ``S / s``: for each latent the mean of the values under
    the softmax of its logits. A latent is anything with its own softmax over positions. It may be a latent value of
    `levattn.attention.latte`, or a query, whose logits are its products with keys. For queries this is exact
    attention, split over parts of the keys.

    Merging is associative and commutative, and the state of a set of positions is the same for all ways to split it,
    up to rounding. The state is in float64 whatever the logits and values are, so its error does not grow with their
    number. (On the CPU, numbers of at most float32 are summed in float32 for 64 positions at a time.)

    Parameters
    ----------
    latents : int
        Number of latents L.
    d : int
        Number of channels D of the values.
    batch : tuple of int
        Leading axes (batch, heads).

    Raises
    ------
    TypeError, ValueError
        If a size is no whole number, or `latents` or `d` is below 1.

    Notes
    -----
    Time O(TLD) for T positions, memory L (D + 2) float64 numbers for each item of the batch. A latent that has seen no
    position, or only logits of −inf, reads zero. NaN spreads to every result that it enters.

    References
    ----------
    Milakov and Gimelshein, arXiv:1805.02867, section 3 (the merge). Dolga et al., arXiv:2402.17512 (latents).

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.states import SoftmaxState
    >>> rng = np.random.default_rng(0)
    >>> Q, K, V = rng.standard_normal((3, 100, 8))
    >>> logits = K @ Q[:2].T  # of two queries
    >>> state = SoftmaxState(2, 8).update(logits[:60], V[:60])
    >>> state = state.merge(SoftmaxState(2, 8).update(logits[60:], V[60:]))
    >>> A = np.exp(logits) / np.exp(logits).sum(axis=0)
    >>> np.allclose(state.result(), A.T @ V)
    True
    """

    def __init__(self, latents: int, d: int, batch: tuple[int, ...] = ()) -> None:
        self.latents = whole_number("latents", latents, 1)
        self.d = whole_number("d", d, 1)
        self.batch = batch_of(batch)
        self._held: State | None = None

    def __repr__(self) -> str:
        """Return the shape."""
        return f"<{type(self).__name__} of {self.latents} latents, d = {self.d}, batch {self.batch}>"

    @property
    def _held_array(self) -> Any:
        return self._held

    @property
    def m(self) -> Any:
        """The largest logit of each latent, (..., L); −inf where there is none."""
        return self._sums()[0]

    @property
    def s(self) -> Any:
        """The sums of exponentials relative to `m`, (..., L); 0 where there is none."""
        return self._sums()[1]

    @property
    def S(self) -> Any:  # noqa: N802
        """The sums of values times these exponentials, (..., L, D)."""
        return self._sums()[2]

    def _sums(self) -> State:
        held = self._held
        if held is None:
            s = np.zeros((*self.batch, self.latents))
            return np.full_like(s, -np.inf), s, np.zeros((*s.shape, self.d))
        return held

    @classmethod
    def from_arrays(cls, m: Any, s: Any, S: Any) -> SoftmaxState:
        """Return the state that holds these arrays, without a copy; torch tensors in main memory become numpy arrays.

        Parameters
        ----------
        m, s : array of float64, shape (..., L)
            As the attributes of the same name.
        S : array of float64, shape (..., L, D)
            Of the same kind.

        Returns
        -------
        SoftmaxState
            With the batch (...).

        Raises
        ------
        TypeError
            If an argument is no array of float64.
        ValueError
            If the shapes do not match.
        """
        m, s, S = (held_as(name, part) for name, part in (("m", m), ("s", s), ("S", S)))
        if S.ndim < 2 or tuple(m.shape) != tuple(S.shape[:-1]) or tuple(s.shape) != tuple(m.shape):
            raise ValueError(
                f"m, s and S have shapes {tuple(m.shape)}, {tuple(s.shape)} and {tuple(S.shape)}; expected (..., L), "
                "(..., L) and (..., L, D)"
            )
        *batch, latents, d = map(int, S.shape)
        if not latents or not d:
            return cls(latents, d)  # raises with the cause
        self = cls.__new__(cls)
        self.latents, self.d, self.batch, self._held = latents, d, tuple(batch), (m, s, S)
        return self

    @where_arrays_are
    def update(self, logits: Any, V: Any, mask: Any = None) -> SoftmaxState:
        """Add a chunk of positions.

        Parameters
        ----------
        logits : array of shape (..., T, L)
            The logit of each position for each latent, T ≥ 0 of them; −inf for a position that a latent does not see.
        V : array of shape (..., T, D)
            Values. Both are of any kind that `levattn.leverage_scores` takes, of one library and device. The state
            holds arrays of the same library, but numpy arrays for torch in main memory.
        mask : array of bool, shape (..., T), optional
            True for a position that takes part.

        Returns
        -------
        SoftmaxState
            The state itself.

        Raises
        ------
        TypeError
            If an argument is no array of floats, or of another library or device than the state.
        ValueError
            If a shape does not match the state.
        """
        K, values = as_matrices(logits, "logits").masked(mask), as_matrices(V, "V")
        if (K.batch, K.d) != (self.batch, self.latents) or (values.batch, values.d) != (self.batch, self.d):
            raise ValueError(
                f"logits and V have shapes {(*K.batch, K.n, K.d)} and {(*values.batch, values.n, values.d)}; expected "
                f"{(*self.batch, 'T', self.latents)} and {(*self.batch, 'T', self.d)} in this state"
            )
        if values.n != K.n:
            raise ValueError(f"V has {values.n} positions and logits have {K.n}; expected as many")
        double = "float64" in (K.format, values.format)
        L, X = (_as_computed(array, double) for array in (K, values))
        parts = kernels_for("latent", K.data).summary(L, X, K.mask, np.array([0, K.n]))
        xp = array_namespace(parts[2])
        m, s, S = (xp.reshape(part, (*self.batch, *part.shape[2:])) for part in parts)
        return self._join((m, s, S))

    @where_arrays_are
    def merge(self, other: SoftmaxState) -> SoftmaxState:
        """Add the positions of another state.

        Parameters
        ----------
        other : SoftmaxState
            A state of the same batch and sizes. It is not changed.

        Returns
        -------
        SoftmaxState
            This state, which now has the positions of both.

        Raises
        ------
        TypeError, ValueError
            If the states were made for different shapes, or their arrays are of different libraries.
        """
        check_type("other", other, SoftmaxState, "SoftmaxState")
        mine, theirs = (self.batch, self.latents, self.d), (other.batch, other.latents, other.d)
        if mine != theirs:
            raise ValueError(f"other has (batch, latents, d) = {theirs}; expected {mine}, as here")
        held = other._held
        return self if held is None else self._join(held)

    @locked
    def _join(self, other: State) -> SoftmaxState:
        if self._held is None:
            self._held = other
            return self
        xp = array_namespace(other[2])
        if array_namespace(self._held[2]) is not xp:
            raise TypeError(
                f"this state holds arrays of {type(self._held[2]).__module__} and was given arrays of {xp.__name__}; "
                "expected one library. Keep a state for each, and merge them by their bytes"
            )
        self._held = kernels_for("latent", other[2]).joined(self._held, other)
        return self

    @where_arrays_are
    def result(self) -> Any:
        """Return the mean of the values under the softmax of each latent.

        Returns
        -------
        array of float64, shape (..., L, D)
            Zero for a latent that has seen no position.
        """
        _, s, S = self._sums()
        xp = array_namespace(S)
        return S / xp.where(s == 0, xp.ones_like(s), s)[..., None]

    def __copy__(self) -> SoftmaxState:
        return twin(self)  # arrays are never written to

    @where_arrays_are
    def parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the three sums, or no array; see `StoredState`."""
        fields: dict[str, Any] = {"latents": self.latents, "d": self.d, "batch": list(self.batch)}
        held = self._held
        fields["empty"] = held is None
        return fields, {} if held is None else dict(zip("msS", map(to_numpy, held), strict=True))

    @classmethod
    def from_parts(cls, fields: dict[str, Any], arrays: dict[str, Any]) -> SoftmaxState:
        """Return the state of the same sums; see `StoredState`."""
        latents, d = whole(fields["latents"], 1), whole(fields["d"], 1)
        batch = tuple(whole(size) for size in fields["batch"])
        if fields["empty"] and math.prod(batch) * latents * d > _MOST_UNSEEN:
            raise ValueError(f"no array backs {latents} latents of {d} columns in a batch {batch}")
        self = cls(latents, d, batch)
        shapes = {"m": (*batch, latents), "s": (*batch, latents), "S": (*batch, latents, d)}
        if (fields["empty"], set(arrays)) not in ((True, set()), (False, set(shapes))):
            raise ValueError(f"it holds the arrays {sorted(arrays)}")
        if arrays:
            m, s, S = (shaped(arrays[name], np.float64, shape, finite=False) for name, shape in shapes.items())
            self._held = m, s, S
        return self


def held_sums(state: SoftmaxState) -> State | None:
    """Return the sums that a state holds, or None where it has seen nothing."""
    return state._held


def with_sums(state: SoftmaxState, held: State) -> SoftmaxState:
    """Return the state of sums that continue the sums of another, without a copy or a check."""
    other = twin(state)
    other._held = held
    return other


def _as_computed(matrices: Matrices, double: bool) -> Any:
    """Return the numbers of matrices as float64 or float32."""
    data = matrices.data
    kind = "float64" if double else "float32"
    if isinstance(data, np.ndarray) or on_cuda(data):
        return decode_half(data, matrices.format).astype(kind, copy=False)
    xp = array_namespace(data)
    return xp.astype(data, getattr(xp, kind), copy=False)


class TokenState(StoredState, name="TokenState", version=1):
    """The statistics of tokens in token statistics attention: one or two diagonal second moments for each head.

    `tokens` holds ``M = Σ Π w²`` and ``N = Σ Π``, the squares of projected tokens w weighted by their memberships Π.
    Where memberships depend on the other tokens, `norms` holds the sums for them, ``A = Σ w²`` and the number of
    tokens. Each is a `Moments`, so that sums merge the states of parts of a sequence.

    In causal attention the memberships of a token stay as they were when it came. So later tokens need only a state of
    the tokens before: `levattn.attention.tssa` returns it (``return_state=True``) and takes it (``state=``). Without
    `causal` memberships depend on all tokens, so chunks or shards take two rounds. First merge all `norms`, then the
    `tokens` with weights from these, and then read outputs.

    Parameters
    ----------
    norms : Moments, optional
        Of the tokens without weights; diagonal, except for memberships by exact leverage scores, which need the full
        moment. None if memberships depend on no other token.
    tokens : Moments, optional
        Diagonal, weighted by memberships. None until it is known.

    Raises
    ------
    TypeError, ValueError
        If an argument is not a `Moments`, `tokens` is not diagonal, or their shapes or decays differ.

    Notes
    -----
    Memory: 2 d + 2 numbers of float64 for each head with diagonal `norms`, d + 1 without, whatever the number of
    tokens.

    References
    ----------
    Wu et al., "Token Statistics Transformer", arXiv:2412.17810, Algorithm 1.

    Examples
    --------
    Bidirectional attention of two shards, the same as of both together:

    >>> import numpy as np
    >>> from levattn.attention import memberships, tssa
    >>> from levattn.states import Moments, TokenState
    >>> W = np.random.default_rng(0).standard_normal((4, 100, 8))  # heads, tokens, channels
    >>> shards = W[:, :60], W[:, 60:]
    >>> norms = [Moments(8, (4,), diagonal=True).update(S) for S in shards]
    >>> seen = TokenState(norms[0].merge(norms[1]))
    >>> weights = [memberships(S, causal=False, state=seen) for S in shards]
    >>> sums = [Moments(8, (4,), diagonal=True).update(S, weights=w) for S, w in zip(shards, weights)]
    >>> seen.tokens = sums[0].merge(sums[1])
    >>> Y = [tssa(S, causal=False, state=seen) for S in shards]
    >>> np.allclose(np.concatenate(Y, 1), tssa(W, causal=False))
    True
    """

    def __init__(self, norms: Moments | None = None, tokens: Moments | None = None) -> None:
        for name, moments in (("norms", norms), ("tokens", tokens)):
            check_type(name, moments, Moments | None, "levattn.states.Moments")
        if tokens is not None and not tokens.diagonal:
            raise ValueError("tokens is a full second moment; expected Moments(d, batch, diagonal=True)")
        if norms is not None and tokens is not None:
            mine, theirs = (norms.batch, norms.d), (tokens.batch, tokens.d)
            if mine != theirs or not same_decay(norms.decay, tokens.decay, norms.batch):
                raise ValueError(
                    f"norms has batch, d and decay {(*mine, norms.decay)}, and tokens {(*theirs, tokens.decay)}; "
                    "expected the same"
                )
        self.norms, self.tokens = norms, tokens

    @locked_with
    @where_arrays_are
    def merge(self, other: TokenState) -> TokenState:
        """Add the tokens of another state; where sums decay, after the tokens of this one.

        Each state has its own tokens. If `tssa` was given a state, the state that it returns has these tokens already:
        do not merge the two. Where memberships depend on the tokens before, so do the sums of a later shard. Read its
        memberships from the norms before it (``memberships(W, state=TokenState(norms))``), and make `tokens` from
        these by ``Moments.update(W, weights=)``.

        Parameters
        ----------
        other : TokenState
            A state of the same form and shapes; it does not change.

        Returns
        -------
        TokenState
            This state, now with the tokens of both.

        Raises
        ------
        TypeError, ValueError
            If `other` has another type, form or shape.
        """
        check_type("other", other, TokenState, "TokenState")
        if [part is None for part in self._all] != [part is None for part in other._all]:
            raise ValueError(f"other holds {other._names}; expected {self._names}, as here")
        pairs = [(mine, theirs) for mine, theirs in zip(self._all, other._all, strict=True) if mine is not None]
        for mine, theirs in pairs:
            mine.check(theirs)
        for mine, theirs in pairs:
            if theirs is not None:
                mine.merge(theirs)
        return self

    @property
    def _held_array(self) -> Any:
        return self._all

    @property
    def _all(self) -> tuple[Moments | None, Moments | None]:
        return self.norms, self.tokens

    @property
    def _names(self) -> str:
        held = [name for name, part in zip(("norms", "tokens"), self._all, strict=True) if part is not None]
        return " and ".join(held) or "nothing"

    def numbers(self) -> int:
        """Return the number of float64 numbers in the state.

        Returns
        -------
        int
            For both moments, the sums and their weights.
        """
        held = [part for part in self._all if part is not None]
        return sum(math.prod(part.batch) * (part.d ** (1 if part.diagonal else 2) + 1) for part in held)

    @locked
    @where_arrays_are
    def parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parts of both moments; see `StoredState`."""
        fields: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        for name, part in zip(("norms", "tokens"), self._all, strict=True):
            fields[name] = None
            if part is not None:
                fields[name], found = part.parts()
                arrays |= {f"{name}.{key}": array for key, array in found.items()}
        return fields, arrays

    @classmethod
    def from_parts(cls, fields: dict[str, Any], arrays: dict[str, Any]) -> TokenState:
        """Return the state of both moments; see `StoredState`."""
        parts = []
        for name in ("norms", "tokens"):
            own = {key.partition(".")[2]: array for key, array in arrays.items() if key.startswith(f"{name}.")}
            parts.append(None if fields[name] is None else Moments.from_parts(fields[name], own))
        return cls(*parts)
