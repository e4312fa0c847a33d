"""Published rules for the keys that a cache keeps, by name: scores of keys, and how many keys go to other kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

import numpy as np

from levattn.attention.arguments import device_of, namespace_of

_TURNS = 64.0  # of a key's length: nearby keys get unlike numbers, and rounding changes few


@dataclass(frozen=True)
class Baseline:
    """The options that a rule has where a user gives none: counts, or shares as in a `Selection`.

    function: of keys and values, or None if the rule needs the queries of a context.
    """

    sinks: float = 0
    window: float = 0
    function: Callable[[Any, Any], Any] | None = None


def _random(seed: int, K: Any, V: Any) -> Any:  # noqa: ARG001 (scores of keys alone)
    """Return a number in [0, 1) for each key (b, n): the same number for the same key."""
    xp = namespace_of(K)
    draw = np.random.default_rng(seed).standard_normal(K.shape[-1])
    along = xp.matmul(K, xp.asarray(draw, dtype=K.dtype, device=device_of(K))[:, None])[..., 0]
    size = _norms(K)
    turns = _TURNS * along / xp.where(size > 0, size, xp.ones_like(size))
    return turns - xp.floor(turns)


def _small_norms(K: Any, V: Any) -> Any:  # noqa: ARG001
    return -_norms(K)


def _alike(K: Any, V: Any) -> Any:  # noqa: ARG001
    return namespace_of(K).zeros_like(K[..., 0])


def _norms(K: Any) -> Any:
    """Return the norms of keys, without overflow."""
    xp = namespace_of(K)
    largest = xp.max(xp.abs(K), axis=-1, keepdims=True)
    rows = K / xp.where(largest > 0, largest, xp.ones_like(largest))
    return largest[..., 0] * xp.sqrt(xp.sum(rows * rows, axis=-1))


BASELINES = {
    "random": Baseline(function=partial(_random, 0)),
    "norm": Baseline(function=_small_norms),
    "streaming": Baseline(sinks=4, window=1.0, function=_alike),
    "h2o": Baseline(window=0.5),
    "snapkv": Baseline(window=32),
    "tova": Baseline(),
}


def baseline_of(scores: Any) -> Baseline | None:
    """Return the rule with a name, such as "random:3" with the seed 3, or None if there is none."""
    if not isinstance(scores, str):
        return None
    name, given, seed = scores.partition(":")
    if name == "random" and given and seed.isdecimal():
        return Baseline(function=partial(_random, int(seed)))
    return None if given else BASELINES.get(name)


def asks_queries(scores: Any) -> bool:
    """Tell whether scores need the queries of a context: a rule, or a function with a free parameter Q."""
    if not callable(scores):
        rule = baseline_of(scores)
        return rule is not None and rule.function is None
    try:
        found = signature(_read_by(scores)).parameters.get("Q")
    except (TypeError, ValueError):  # written in another language
        return False
    if found is not None and found.kind is Parameter.POSITIONAL_ONLY:
        raise TypeError("scores has a parameter Q by position alone; expected one that Q=queries can name")
    return found is not None and not _binds_queries(scores)


def _binds_queries(function: Any) -> bool:
    """Tell whether a partial has a Q of its own."""
    return isinstance(function, partial) and ("Q" in function.keywords or _binds_queries(function.func))


def _read_by(function: Any) -> Any:
    """Return a function whose parameters a call has: of a module of torch its `forward`, and within a partial too."""
    if isinstance(function, partial):
        return partial(_read_by(function.func), *function.args, **function.keywords)
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(function).__mro__}
    return function.forward if ("torch", "Module") in kinds else function
