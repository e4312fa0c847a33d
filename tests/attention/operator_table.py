"""The attention operators as one table: what their tests share, whatever library the arrays are of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import levattn
from latent_calls import macchiato, window_attention
from levattn.attention import causal_conv, latte, rg_lru
from pruned_calls import attend, walk
from token_calls import tssa

T = -1  # the axis of positions in a shape


@dataclass(frozen=True)
class Operator:
    """An operator as a function of arrays, of which those with positions have a batch too."""

    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]  # of one item
    unread: tuple[int, ...] = ()  # the arrays of which nothing is read where a mask leaves a position out
    has_heads: bool = False  # a mask has an axis for them
    side_by_side: bool = False  # tensors of torch lie as layers make them: heads beside one another

    def arrays(self, length: int, batch: tuple[int, ...] = (2,), *, seed: int = 0, scale: float = 1.0) -> list[Any]:
        """Numbers at random for so many positions."""
        found = []
        for place, shape in enumerate(self.shapes):
            sizes = tuple(length if size == T else size for size in shape)
            rng = np.random.default_rng([seed, place, *sizes])
            found.append(scale * rng.standard_normal((*batch, *sizes) if T in shape else sizes))
        return found

    def leaves(
        self, length: int, batch: tuple[int, ...] = (2,), *, dtype: str = "float64", **options: Any
    ) -> list[Any]:
        """The same as tensors of torch that require gradients."""
        import torch

        found = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in self.arrays(length, batch, **options)]
        if self.side_by_side:
            found[0] = found[0].transpose(-3, -2).contiguous().transpose(-3, -2)
        return [x.requires_grad_() for x in found]

    def each(self, change: Callable[[Any], Any], arrays: list[Any]) -> list[Any]:
        """The arrays, of which those with positions are changed."""
        return [change(x) if T in shape else x for x, shape in zip(arrays, self.shapes, strict=True)]

    def cut(self, arrays: list[Any], low: int, high: int) -> list[Any]:
        """The arrays at some positions."""
        return [
            x[(..., slice(low, high), *[slice(None)] * (len(shape) - shape.index(T) - 1))] if T in shape else x
            for x, shape in zip(arrays, self.shapes, strict=True)
        ]

    def mask(self, flags: Any) -> Any:
        """Flags (..., T) as the operator takes them; None stays None."""
        return flags if flags is None or not self.has_heads else flags[..., None, :]


def _tssa(W: Any, temperature: Any, bias: Any, **options: Any) -> Any:
    return tssa(W, temperature, bias=bias, **options)


def _tssa_of_logits(W: Any, temperature: Any, logits: Any, **options: Any) -> Any:
    return tssa(W, temperature, membership=logits, **options)


_LATENT = ((T, 3), (T, 3), (T, 2))
_WINDOW = ((2, T, 3), (1, T, 3), (1, T, 2))
_MIXTURE = ((2, T, 4), (1, T, 4), (1, T, 3), (2, T, 4), (2, T, 4), (2, T))
_TOKENS = ((3, T, 2), (3,), (3, T))
_FORMS: dict[str, dict[str, Any]] = {"": {}, ", mean": {"normalize": "mean"}, ", norm": {"membership": "norm"}}

LATTE: dict[str, Operator] = {
    "latte": Operator(latte, _LATENT, (1, 2)),
    "latte everywhere": Operator(partial(latte, causal=False), _LATENT, (1, 2)),
}
WINDOWS: dict[str, Operator] = {
    "window": Operator(partial(window_attention, window=4), _WINDOW, (1, 2), True),
    "window, capped": Operator(partial(window_attention, window=4, softcap=1.5), _WINDOW, (1, 2), True),
}
MIXTURES: dict[str, Operator] = {
    "macchiato": Operator(partial(macchiato, window=6), _MIXTURE, (1, 2, 4), True),
    "macchiato, exclusive": Operator(
        partial(macchiato, window=6, overlap="exclusive", softcap=3.0), _MIXTURE, (1, 2, 4), True
    ),
}
TSSA: dict[str, Operator] = {
    **{
        f"tssa{form}": Operator(partial(_tssa, **options), _TOKENS, (0, 2), side_by_side=True)
        for form, options in _FORMS.items()
    },
    "tssa, uniform": Operator(partial(tssa, membership="uniform"), _TOKENS[:2], (0,), side_by_side=True),
    "tssa, logits": Operator(_tssa_of_logits, _TOKENS, (0, 2), side_by_side=True),
}
TSSA_EVERYWHERE: dict[str, Operator] = {
    f"{name} everywhere": Operator(partial(form.run, causal=False), form.shapes, form.unread, side_by_side=True)
    for name, form in TSSA.items()
} | {
    "tssa, leverage": Operator(partial(_tssa, membership="leverage", causal=False), _TOKENS, (0, 2), side_by_side=True)
}
MEMORIES: dict[str, Operator] = {
    "rg_lru": Operator(rg_lru, (*[(T, 4)] * 3, (4,)), (0, 1, 2)),
    "causal_conv": Operator(causal_conv, ((T, 4), (4, 3), (4,)), (0,)),
}

# every form of tssa, by its options
TSSA_FORMS: dict[str, dict[str, Any]] = {
    "released": {},
    "released-bidirectional": {"causal": False},
    "paper": {"membership": "norm"},
    "paper-bidirectional": {"membership": "norm", "causal": False},
    "uniform": {"membership": "uniform"},
    "uniform-bidirectional": {"membership": "uniform", "causal": False},
    "mean": {"normalize": "mean"},
    "mean-bidirectional": {"normalize": "mean", "causal": False},
    "decayed": {"decay": 0.9},
    "decayed-mean": {"decay": [0.5, 0.9, 1.0], "normalize": "mean"},
    "decayed-paper": {"decay": 0.9, "membership": "norm"},
    "scaled": {"c": 4.0, "membership": "norm"},
}


def products(K: Any, V: Any) -> Any:
    """Return scores of a user's own, which a change of the key's sign changes."""
    return K[:, :, 0] * (V[:, :, 0] - V[:, :, 1])


# every form of pruned_attention, by its options; if causal, with renewals every 5 positions, none selects first after
# more than 32 positions
PRUNED_FORMS: dict[str, dict[str, Any]] = {
    "default": {"size": 5, "summaries": 4, "window": 2},
    "no-window": {"size": 4, "summaries": 5},
    "dropped": {"size": 6, "window": 1, "sinks": 2},
    "summaries-alone": {"size": 0, "summaries": 6},
    "expected": {"size": 4, "summaries": 4, "scores": "expected"},
    "leverage": {"size": 4, "summaries": 3, "sinks": 2, "scores": "leverage"},
    "threshold": {"epsilon": 0.25, "summaries": 3, "scores": "leverage", "center": False},
    "scaled": {"size": 4, "summaries": 4, "window": 1, "scale": 2.0},
    "own": {"size": 4, "summaries": 3, "scores": "given"},
    "function": {"size": 4, "summaries": 3, "sinks": 1, "scores": products},
    "function-squares": {"size": 4, "summaries": 3, "f": 2, "scores": products},
    "squares": {"size": 5, "summaries": 4, "window": 2, "f": 2},
    "cubes": {"size": 4, "summaries": 4, "f": levattn.Power(3), "scores": "expected"},
    "fourths": {"size": 5, "sinks": 1, "f": 4.0},
    "absolutes": {"size": 5, "summaries": 3, "f": 1, "scores": "leverage"},
}


def _pruned(Q: Any, K: Any, V: Any, *own: Any, form: dict[str, Any], **options: Any) -> Any:
    return attend(Q, K, V, **form | ({"scores": own[0]} if own else {}) | options)


def _pruned_causal(
    Q: Any,
    K: Any,
    V: Any,
    *own: Any,
    form: dict[str, Any],
    state: Any = None,
    return_state: bool = False,
    **options: Any,
) -> Any:
    if own:
        form, state = form | {"scores": own[0]}, None if state is None else state.with_scores(own[0])
    found = walk(Q, K, V, state=state, **{"renew_every": 5} | form | options)
    return found if return_state else (found[0], *found[2:]) if found[2:] else found[0]


def of_forms(*, causal: bool) -> dict[str, Operator]:
    """All forms of pruned attention, and those of token statistics attention that are causal, or that are not."""
    end = "" if causal else " everywhere"
    run = _pruned_causal if causal else _pruned
    found = {}
    for name, form in PRUNED_FORMS.items():
        shapes = ((4, T, 5), (2, T, 5), (2, T, 3), *([(2, T)] if name == "own" else []))
        found[f"pruned, {name}{end}"] = Operator(partial(run, form=form), shapes, (0, 1, 2), True)
    for name, form in TSSA_FORMS.items():
        if form.get("causal", True) == causal:
            found[f"tssa, {name}"] = Operator(partial(tssa, **form), ((3, T, 4), (3,)), (0,))
    return found
