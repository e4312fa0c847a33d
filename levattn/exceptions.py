"""Typed errors and warnings; each is also the built-in type that a caller would expect."""

from __future__ import annotations


class LevattnError(Exception):
    """Base class of levattn's own errors."""


class NonFiniteError(LevattnError, ValueError):
    """The keys, queries or values hold NaN or infinity; the message names the first offending rows."""


class KeyFileError(LevattnError, ValueError):
    """A file of keys is damaged, of another kind, or does not hold the requested keys."""


class AxesWarning(UserWarning):
    """The axes of the keys look exchanged: many matrices of few keys, or few keys of very many columns."""


class CacheWarning(UserWarning):
    """Compiled code cannot be kept on disk: results are the same, but each process compiles anew. Given once."""


class ProfileWarning(UserWarning):
    """A profile of heads was measured on other weights than the decoder has."""


class RankWarning(UserWarning):
    """Keys are rank-deficient up to rounding, and more of them count as 1 than can have the score 1.

    A set then holds more than rank/ε of them, or scores add up to more than the rank; the message says how many.
    In streams, files and dask arrays a few keys that are 10¹⁹ times as long as most hide the others, and are named.
    Dense keys in memory have a smaller set.
    """


class RecallWarning(UserWarning):
    """All heads of a decoder are cut alike, so the decoder cannot recall facts of its context."""


class ResidualWarning(UserWarning):
    """Some heads of a compressed context lose far more than the others on queries that were not fitted."""
