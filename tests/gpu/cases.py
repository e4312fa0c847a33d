"""Public calls that a card is tried with: their keys come from seeds, so that nothing has to be carried along.

Each call takes arrays of one library and returns an array or several. Cases marked `first` are those of the first
minute. Keys are Gaussian, or rows of heads of MiniLM side by side, as both take other routes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

import levattn
from levattn.attention import Selection, causal_pruned_attention, fit_slots, latte, pruned_attention, tssa
from levattn.datasets import minilm, resampled
from levattn.sketch import OSNAP, SRHT, CountSketch, SignJL, Sketch
from levattn.states import Moments

ALL = ("float32", "bfloat16", "float16", "float64")
WIDE = ("float32", "float64")
SOME = ("float32", "bfloat16")


@dataclass(frozen=True)
class Case:
    """A call, and how its result is judged."""

    arrays: Callable[[], tuple[Any, ...]]  # float64, of numpy
    call: Callable[..., Any]
    dtypes: tuple[str, ...] = SOME
    first: bool = False
    exact: bool = False  # the result is a choice, which is the same everywhere
    narrow: bool = False  # arrays of 16 bits are multiplied in them, and what lies between is rounded to them
    gradients: bool = False  # of tensors, behind the result
    raised: float = 0.0  # by which bounds may be above, relative to the largest: by an estimate of errors


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def together(*shape: int, count: int = 3) -> tuple[Any, ...]:
    """Several arrays of a shape."""
    return tuple(normal(*shape, seed=i) for i in range(count))


@cache
def real(n: int, d: int, b: int = 0) -> Any:
    """Keys (n, d) like those of neighboring heads of MiniLM, or b heads of them."""
    heads = np.asarray(minilm().keys, np.float64).reshape(-1, 512, 32)
    first, width = len(heads) // 2, -(-d // 32)

    def one(i: int) -> Any:
        wide = np.concatenate([heads[(first + i + j) % len(heads)] for j in range(width)], axis=1)[:, :d]
        return wide if n == len(wide) else np.asarray(resampled(wide, n, dtype="float64", rng=i))

    return np.stack([one(i) for i in range(b)]) if b else one(0)


def uneven(n: int = 6000, d: int = 24) -> Any:
    """Gaussian keys of which some are long, so that the largest scores stand out."""
    K = normal(n, d)
    K[:: n // 15] *= 30
    return K


def graded(n: int, d: int, span: float) -> Any:
    """Gaussian keys whose columns shrink."""
    return normal(n, d) * np.geomspace(1, span, d)


def streamed(K: Any) -> Any:
    """The places of the keys of a set that a stream finds."""
    stream = levattn.StreamingUniversalSet(0.05)
    for start in range(0, len(K), 1700):
        stream.update(K[start : start + 1700])
    return np.asarray(stream.result().items[0].indices)


def sampled(K: Any) -> Any:
    """The places of rows that one pass draws."""
    sample = levattn.StreamingRowSample(200, rng=3)
    for start in range(0, len(K), 1700):
        sample.update(K[start : start + 1700])
    return np.asarray(sample.result().indices)


def covered(Q: Any, K: Any) -> Any:
    return levattn.covering_set(K, Q, 0.2, coverage=0.9).mask


def moments(K: Any) -> Any:
    return Moments(K.shape[-1]).update(K).result()


def heavy(Q: Any, K: Any) -> Any:
    return levattn.heavy_attention(Q, K, 0.05).apply(K)[0]


def in_steps(operator: Callable[..., Any], *arrays: Any, cuts: tuple[int, ...] = (0, 100, 101, 102, 140)) -> list[Any]:
    """The results of an operator for parts of the positions, each after the state of the one before."""
    found, after = [], {}
    for low, high in pairwise(cuts):
        Y, state = operator(*(x[..., low:high, :] for x in arrays), return_state=True, **after)
        found.append(Y)
        after = {"state": state}
    return found


def token_steps(W: Any, temperature: Any) -> list[Any]:
    return in_steps(lambda part, **options: tssa(part, temperature, **options), W)


def causal_steps(Q: Any, K: Any, V: Any) -> list[Any]:
    """Rows of causal pruned attention, a few at a time after the first."""
    found, held = [], Selection(**OF_A_CHOICE, renew_every=50)
    for low, high in pairwise((0, 300, 301, 302, 360)):
        parts = (x[..., low:high, :] for x in (Q, K, V))
        Y, held = causal_pruned_attention(*parts, held, return_state=True)
        found.append(Y)
    return found


def fitted(Q: Any, K: Any, V: Any) -> Any:
    return fit_slots(Q, K, V, Selection(24, summaries=0)).values


def pruned(operator: Callable[..., Any], Q: Any, K: Any, V: Any, **options: Any) -> Any:
    return operator(Q, K, V, Selection(**options))


OF_A_CHOICE = {"size": 50, "summaries": 12}
SCORES: dict[str, Case] = {
    "real heads": Case(lambda: (real(512, 64, 2),), levattn.leverage_scores, ALL, first=True),
    "Gaussian heads": Case(lambda: (normal(3, 5000, 40),), levattn.leverage_scores, ALL, first=True),
    "real, 128 columns": Case(lambda: (real(20000, 128),), levattn.leverage_scores, ALL),
    "real, 64 columns": Case(lambda: (real(9000, 64),), levattn.leverage_scores, ALL),
    "300 columns": Case(lambda: (normal(3000, 300),), levattn.leverage_scores, WIDE),
    "every other column": Case(lambda: (normal(4001, 131),), lambda K: levattn.leverage_scores(K[1:, 1::2])),
    "transposed": Case(lambda: (normal(50, 4000),), lambda K: levattn.leverage_scores(K.T), ("float32", "float16")),
    "fewer rows than columns": Case(lambda: (normal(20, 48),), levattn.leverage_scores, WIDE),
    "ill-conditioned": Case(lambda: (graded(4000, 16, 1e-6),), levattn.leverage_scores, WIDE),
    "one column": Case(lambda: (normal(3000, 1),), levattn.leverage_scores),
    "with weights": Case(
        lambda: (uneven(), np.abs(normal(6000))), lambda K, w: levattn.leverage_scores(K, weights=w), WIDE
    ),
    "Lewis weights": Case(lambda: (uneven(2000, 8),), lambda K: levattn.lewis_weights(K, 1.0), WIDE, raised=2.0**-17),
}
SETS: dict[str, Case] = {
    "by a threshold": Case(lambda: (uneven(),), lambda K: levattn.universal_set(K, 0.05).mask, ALL, True, exact=True),
    "real heads, by a threshold": Case(
        lambda: (real(512, 64, 2),), lambda K: levattn.universal_set(K, 0.2).mask, exact=True
    ),
    "by a size": Case(lambda: (real(512, 64, 2),), lambda K: levattn.universal_set(K, size=40).mask, exact=True),
    "fourth powers": Case(
        lambda: (uneven(1500, 6),), lambda K: levattn.universal_set(K, 0.2, f=4).mask, WIDE, exact=True
    ),
    "a stream": Case(lambda: (uneven(),), streamed, ALL, exact=True),
    "rows of one pass": Case(lambda: (uneven(),), sampled, WIDE, exact=True),
    "a covering set": Case(lambda: (normal(300, 24), uneven()), covered, WIDE, exact=True),
    "moments": Case(lambda: (uneven(),), moments, WIDE),
    "heavy attention": Case(lambda: (normal(300, 24), uneven()), heavy, WIDE),
}
SKETCHES: dict[str, Case] = {
    str(distribution): Case(
        lambda: (uneven(),), partial(lambda how, K: Sketch(how).apply(K, dtype="float64"), distribution), first=at == 0
    )
    for at, distribution in enumerate((CountSketch(256), OSNAP(128), SRHT(128), SignJL(64)))
}
LATENT: dict[str, Case] = {
    "causal": Case(lambda: together(2, 3, 300, 16), latte, ALL, first=True, gradients=True),
    "both ways": Case(lambda: together(2, 3, 300, 16), partial(latte, causal=False), WIDE, gradients=True),
    "2100 positions": Case(lambda: together(1, 2, 2100, 64), latte),
    "in steps": Case(lambda: together(2, 3, 140, 16), partial(in_steps, latte), ALL),
}
TOKENS: dict[str, Case] = {
    "causal": Case(lambda: (normal(1, 4, 330, 32), np.ones(4)), tssa, ALL, first=True, gradients=True),
    "both ways": Case(lambda: (normal(1, 4, 330, 32), np.ones(4)), partial(tssa, causal=False), WIDE, gradients=True),
    "norm": Case(lambda: (normal(1, 4, 330, 32), np.ones(4)), partial(tssa, form="norm"), WIDE, gradients=True),
    "in steps": Case(lambda: (normal(1, 4, 140, 32), np.ones(4)), token_steps, ALL),
}
PRUNED: dict[str, Case] = {
    "slots": Case(
        lambda: together(1, 3, 400, 32),
        partial(pruned, pruned_attention, **OF_A_CHOICE),
        ALL,
        first=True,
        narrow=True,
        gradients=True,
    ),
    "a window": Case(
        lambda: together(1, 3, 400, 32), partial(pruned, pruned_attention, **OF_A_CHOICE, window=8), narrow=True
    ),
    "causal": Case(
        lambda: together(1, 3, 400, 32),
        partial(pruned, causal_pruned_attention, **OF_A_CHOICE, renew_every=50),
        narrow=True,
        gradients=True,
    ),
    "causal, in steps": Case(lambda: together(1, 3, 400, 32), causal_steps, narrow=True),
    "all keys": Case(
        lambda: together(1, 3, 400, 32), partial(pruned, pruned_attention, size=400, summaries=0), narrow=True
    ),
    "fitted slots": Case(lambda: together(1, 2, 256, 32), fitted, ("float32",)),
}
FAMILIES: dict[str, dict[str, Case]] = {
    "scores": SCORES,
    "sets": SETS,
    "sketches": SKETCHES,
    "latent": LATENT,
    "tokens": TOKENS,
    "pruned": PRUNED,
}
