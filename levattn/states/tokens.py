"""The state of token statistics attention."""

from __future__ import annotations

import math
from typing import Any

from levattn._core.checks import check_type
from levattn._core.device import where_arrays_are
from levattn._core.serialize import StoredState, locked, locked_with
from levattn.states.blocks import same_decay
from levattn.states.moments import Moments


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
