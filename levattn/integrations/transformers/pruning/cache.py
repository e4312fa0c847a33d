"""Layers of a transformers cache that hold the states of pruned attention beside keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from levattn._core.serialize import twin
from levattn.attention import PrunedState
from levattn.attention.pruned.state import picked
from levattn.integrations.transformers.cache import refuse_crop, replaced

_OWNER = "a model pruned by prune"


@dataclass(frozen=True)
class Held:
    """The state of some sequences and heads of a layer.

    rows: (b,) numbers of the sequences, a numpy array, or None for all.
    group: the number of the group of heads.
    """

    rows: Any
    group: int
    state: PrunedState


@dataclass
class Progress:
    """The positions of a layer that pruned attention has processed, and its states."""

    pruning: int  # the number of the pruning that computed the states
    positions: int = 0
    states: list[Held] = field(default_factory=list)
    present: Any = None  # (B,), the number of present positions of each sequence, or None for all

    def check(self, layer: str, present: Any) -> None:
        """Raise if the number of present positions so far has changed; present: (B, positions) or None."""
        if present is None and self.present is None:
            return
        now = torch.tensor(self.positions) if present is None else present[:, : self.positions].sum(1)
        before = self.positions if self.present is None else self.present
        if (now.to(torch.int64) != before).any():
            raise ValueError(
                f"{layer} was given an attention mask that leaves out other positions than before; expected the same "
                "positions, as the states depend on them. Begin with an empty cache"
            )


class _Following:
    """A layer that holds the progress of pruned attention and its states."""

    progress: Progress | None = None

    def begin(self, pruning: int) -> Progress:
        """Return the progress of a pruning, or raise if the states belong to another."""
        if self.progress is None:
            self.progress = Progress(pruning)
        if self.progress.pruning != pruning:
            raise ValueError(
                "the cache holds the states of another call of prune; expected an empty cache, or one that this "
                "pruned model has filled. Give an empty DynamicCache"
            )
        return self.progress

    def __copy__(self) -> Any:
        """Return a branch of its own: states are replaced, but progress is updated."""
        other = twin(self)
        other.progress = None if self.progress is None else replace(self.progress)
        return other

    def _select(self, indices: Any) -> None:
        """Take the states of the sequences with these numbers."""
        if self.progress is None:
            return
        chosen = torch.as_tensor(indices).cpu().numpy()
        if chosen.dtype == np.bool_:
            chosen = np.flatnonzero(chosen)
        states = []
        for held in self.progress.states:
            if held.rows is None:
                states.append(replace(held, state=of_sequences(held.state, chosen)))
                continue
            rows = np.flatnonzero(np.isin(chosen, held.rows))
            if len(rows):
                state = of_sequences(held.state, np.searchsorted(held.rows, chosen[rows]))
                states.append(replace(held, rows=rows, state=state))
        present = self.progress.present
        if present is not None:
            present = present[torch.as_tensor(chosen, device=present.device)]
        self.progress = replace(self.progress, states=states, present=present)


class PrunedLayer(_Following):
    """A layer that holds states beside all keys and values, from which a model without pruning can continue.

    A mixin before `DynamicLayer`, so that masks keep the sizes of the replaced layer.
    """

    is_croppable = False

    def reset(self) -> None:
        """Forget all positions."""
        super().reset()  # type: ignore[misc]
        self.progress = self.keys = self.values = None  # some versions keep keys, as zeros
        self.is_initialized = False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Raise where there are states, which cannot forget their last positions."""
        if self.progress is not None:
            refuse_crop(_OWNER)
        super().crop(*args, **kwargs)  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the sequences with these numbers, for beam search."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._select(beam_idx)

    def batch_select_indices(self, indices: Any) -> None:
        """Take the sequences with these numbers."""
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        sequences = self.keys.shape[0] if self.progress is not None else 0  # type: ignore[attr-defined]
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._select(torch.arange(sequences).repeat_interleave(repeats))


class _FullPrunedLayer(PrunedLayer, DynamicLayer):  # type: ignore[misc]
    """A replacement for a layer that attends to all positions."""


class _SlidingPrunedLayer(PrunedLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A replacement for a sliding layer, for sequences no longer than its window."""


def pruned_layer_for(cache: Any, index: int) -> PrunedLayer:
    """Return the layer of a cache that holds states; it replaces an empty layer."""
    return replaced(cache, index, _FullPrunedLayer, _SlidingPrunedLayer, "the states of pruned attention")  # type: ignore[no-any-return]


def of_sequences(state: PrunedState, chosen: Any) -> PrunedState:
    """Return the state of the chosen sequences, a numpy array, out of the batch (sequences, heads)."""
    sequences, heads = state.batch
    items = (chosen[:, None] * heads + np.arange(heads)).reshape(-1)
    parts = []
    for part in state.parts:
        place = np.full(sequences * heads, -1)
        place[part.rows] = np.arange(len(part.rows))
        rows = np.flatnonzero(place[items] >= 0)
        if len(rows):
            parts.append(replace(picked(part, place[items[rows]]), rows=rows))
    return replace(state, batch=(len(chosen), heads), parts=tuple(parts))


def exactly(state: PrunedState, rank: Any) -> tuple[Any, Any]:
    """Return the keys that a query after a state attends exactly, (B, G, n) bool, and how many precede it, (B, G).

    rank: (B, n) int64, the rank of each key among the present keys of its sequence. All keys from the first recent key
    on are flagged, including later ones.
    """
    sequences, heads = state.batch
    flags = torch.zeros((sequences * heads, rank.shape[1]), dtype=torch.bool, device=rank.device)
    counts = torch.zeros(sequences * heads, dtype=torch.int64, device=rank.device)
    for part in state.parts:
        ranks = rank[torch.as_tensor(part.rows // heads, device=rank.device)]
        kept, count = (_tensor(array, rank) for array in (part.kept_places, part.kept_count))
        if count is not None:
            there = torch.arange(kept.shape[1], device=kept.device) < count[:, None]
            kept = kept.where(there, torch.full_like(kept, -1))
        chosen = torch.zeros((len(ranks), part.positions + 1), dtype=torch.bool, device=rank.device)
        chosen.scatter_(1, kept.where(kept >= 0, torch.full_like(kept, part.positions)), True)
        chosen[:, -1] = False
        found = chosen.gather(1, ranks.clamp(0, part.positions))
        rows = torch.as_tensor(part.rows, device=rank.device)
        flags[rows] = found | (ranks >= part.positions - part.recent.shape[1])
        counts[rows] = part.positions
    return flags.unflatten(0, (sequences, heads)), counts.unflatten(0, (sequences, heads))


def _tensor(array: Any, like: Any) -> Any:
    """Return a numpy array or tensor on the device of a tensor."""
    if array is None or isinstance(array, torch.Tensor):
        return array
    return torch.tensor(array, device=like.device)
