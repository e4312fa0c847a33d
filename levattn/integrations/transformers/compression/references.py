"""Slots of a context that are fitted to its own queries, moved behind it, and to queries of tokens after it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from levattn.attention import Selection, fit_slots
from levattn.attention.pruned.baselines import baseline_of
from levattn.attention.pruned.selection import FITTED_SINKS
from levattn.integrations.transformers.compression.cache import tokens_and_present
from levattn.integrations.transformers.compression.coding import Coded, wide
from levattn.integrations.transformers.compression.rotation import Rotation
from levattn.integrations.transformers.compression.slots import SlotArrays, Split

_ROWS = 480  # queries of a context that a head of keys is fitted to, about, and as many of the tokens after it
_FEWEST = 96  # of each head of queries
_OWN = 0.25  # weight of a query of the context; another's is the square of its share of attention


@dataclass(frozen=True, eq=False)
class References:
    """The rotation of each layer, and tokens (B, R) that are read after the context and forgotten, with their flags.

    `rotations`: None for a model whose queries cannot be moved.
    """

    rotations: dict[int, Rotation] | None
    tokens: Any
    present: Any

    @classmethod
    def of(cls, references: Any, tokens: Any, present: Any, rotations: dict[int, Rotation] | None) -> References:
        """Return the references of a context (B, P) from the argument of `compress`, or raise."""
        if isinstance(references, str):
            n = tokens.shape[1] if references == "repeat" else 0
            return cls(rotations, tokens[:, :n], present[:, :n])
        found, there = tokens_and_present("references", references)
        if len(found) not in (1, len(tokens)):
            raise ValueError(
                f"references have {len(found)} rows and the context {len(tokens)}; expected as many, or one for all"
            )
        found, there = (part.to(tokens.device).expand(len(tokens), -1) for part in (found, there))
        return cls(rotations, found.to(tokens), there)

    def slots_of(
        self, number: int, b: int, arrays: tuple[Any, Any, Any], later: tuple[Any, Any], how: Selection, bits: int
    ) -> tuple[SlotArrays, Any]:
        """Return the slots of heads of a sequence, and the errors of their outputs on queries that were left out.

        `arrays`: queries (h, g, n, d) times their scale, keys and values (h, n, ·) of the context. `later`: queries
        and keys of the tokens after it. `bits`: in which the slots will be held.
        """
        Q, K, _ = arrays
        rows = [] if self.rotations is None else [_own_queries(self.rotations[number], Q)]
        if self.tokens.shape[1]:
            rows.append(_following(*later, K, self.present[b].to(K.device)))
        asked, weights = (torch.cat(parts, 2) for parts in zip(*rows, strict=True))
        return _fitted(asked, weights, *arrays[1:], how, bits)


def _fitted(Q: Any, weights: Any, K: Any, V: Any, how: Selection, bits: int) -> tuple[SlotArrays, Any]:
    """Return the slots of heads, and the errors of their outputs on queries that were left out.

    `Q`: (h, g, m, d), times their scale, and `weights`: (h, g, m, 1). `K`, `V`: (h, n, ·).
    """

    def rounded(rows: Any, *, columns: bool) -> Any:
        return Coded.of(rows, bits, columns=columns).opened()

    roundings = None if bits == 16 else (partial(rounded, columns=True), partial(rounded, columns=False))
    found = fit_slots(
        Q.flatten(0, 1), wide(K), wide(V), how, weights=weights.flatten(0, 1)[..., 0], scale=1.0, rounded=roundings
    )
    places = torch.from_numpy(found.indices).to(K.device, torch.int32)
    largest = torch.finfo(V.dtype).max
    held = (
        found.keys.to(K.dtype),
        found.values.clamp(-largest, largest).to(V.dtype),
        found.log_weights.to(torch.float32),
        places,
    )
    return held, torch.from_numpy(found.output_residual)


def _own_queries(rotation: Rotation, Q: Any) -> tuple[Any, Any]:
    """Return queries (h, g, m, d) of the second half of n positions, moved behind them, and their weights.

    `Q`: (h, g, n, d).
    """
    n = Q.shape[2]
    places = _spread(torch.arange(n // 2, n, device=Q.device), Q)
    moved = rotation.moved(wide(Q[:, :, places]), n - places)
    return moved, torch.full_like(moved[..., :1], _OWN)


def _following(Q: Any, later: Any, K: Any, there: Any) -> tuple[Any, Any]:
    """Return queries (h, g, m, d) of the tokens after a context, and their weights.

    `Q`: (h, g, R, d). `later`: (h, R, d), the keys of these tokens, and `there`: (R,) which are no padding.
    """
    rows = _spread(there.nonzero()[:, 0], Q)
    asked, place = wide(Q[:, :, rows]), torch.arange(len(there), device=Q.device)
    context = (asked @ wide(K)[:, None].mT).logsumexp(-1, keepdim=True)
    hidden = (place > rows[:, None]) | ~there
    after = (asked @ wide(later)[:, None].mT).masked_fill(hidden, -math.inf).logsumexp(-1, keepdim=True)
    return asked, torch.sigmoid(context - after) ** 2


def _spread(places: Any, Q: Any) -> Any:
    """Return places at equal distances, with the last: not more than queries (1, g, ...) need to be fitted to."""
    step = max(1, -(-len(places) // max(_FEWEST, _ROWS // Q.shape[1])))
    return places.flip(0)[::step].flip(0)


def counted(selection: Selection, split: Split, count: int, scores: Any) -> Selection:
    """Return the selection of a head that keeps so many slots, as `fit_slots` takes it; `scores`: given ones, or None.

    A published rule has its own sinks.
    """
    usual = selection.sinks is None and selection.budget is not None and baseline_of(selection.scores) is None
    sinks = min(split.sinks, FITTED_SINKS) if usual else split.sinks  # none in later chunks
    slots = replace(split, sinks=sinks).rule(count).slots
    center = selection.center if selection.kind == "leverage" else None
    scores = selection.scores if scores is None else scores
    return Selection(size=slots.selected, window=slots.window, sinks=slots.sinks, scores=scores, center=center)
