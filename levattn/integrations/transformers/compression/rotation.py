"""Queries at other positions: the angles by which a model turns queries, measured on the model itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from levattn.integrations.transformers.calls import as_cache_of, inputs_device
from levattn.integrations.transformers.compression.cache import CompressedCache, token_positions
from levattn.integrations.transformers.compression.stand_in import UnreadError

_TOKENS = 2  # that the model reads at each position; each has a query in every head
_PARTS = (1.0, 0.5, 0.25, 0.75)  # of a head's width that may turn; a config may name another


class FixedError(ValueError):
    """Queries of a model cannot be moved, or its slots not be fitted; the message goes on after its name.

    `always`: whether slots cannot be fitted to other queries either.
    """

    def __init__(self, message: str, *, always: bool = False) -> None:
        super().__init__(message)
        self.always = always


@dataclass(frozen=True, eq=False)
class Rotation:
    """How a layer turns queries (..., d): the pairs of entries that turn, and the angle of each for one position."""

    first: Any
    second: Any
    angles: Any

    def moved(self, q: Any, by: Any) -> Any:
        """Return queries (..., m, d) as they are so many positions later, (m,)."""
        turn = by.to(torch.float64)[:, None] * self.angles
        cos, sin = turn.cos().to(q), turn.sin().to(q)
        a, b = q[..., self.first], q[..., self.second]
        found = q.clone()
        found[..., self.first], found[..., self.second] = a * cos - b * sin, a * sin + b * cos
        return found


def rotations(model: Any, layers: Any, origin: Any, positions: int) -> dict[int, Rotation]:
    """Return the rotation of each layer, or raise if queries do not turn.

    They are measured at the positions for which the model was made, whatever the context, or else below `positions`.
    `layers`: empty layers of a cache. The model reads single tokens at the positions 0, 1, 2, 4, ... A single token
    attends to itself alone, so that in all layers its queries differ by their position, and by nothing else.
    """
    config = model.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None) or positions
    places = [0, *(1 << i for i in range(most.bit_length()) if 1 << i < most)]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.linspace(vocabulary // 3, vocabulary - vocabulary // 3 - 1, _TOKENS).long()
    rows = tokens.repeat_interleave(len(places))[:, None].to(inputs_device(model))
    present, base = torch.ones_like(rows, dtype=torch.bool), model.base_model
    if token_positions(model, present) is None:
        raise FixedError("takes no position_ids")
    seen: dict[int, Any] = {}

    def look(number: int, q: Any, k: Any, v: Any, scale: float, softcap: float | None) -> None:  # noqa: ARG001
        if softcap is not None:
            raise FixedError(f"bounds the logits of layer {number} by {softcap:g}", always=True)
        seen[number] = q[:, :, 0].unflatten(0, (_TOKENS, -1)).transpose(0, 1).flatten(1, 2).double()  # (places, ., d)

    for layer in layers:
        layer.look = look
    positions = torch.tensor(places * _TOKENS, device=rows.device)[:, None]
    cache = CompressedCache(layers, rows, present, origin)
    try:
        base(input_ids=rows, position_ids=positions, use_cache=True, **as_cache_of(base, cache))
    except (UnreadError, AttributeError) as error:
        if isinstance(error, AttributeError) and error.obj is not cache:
            raise
        raise FixedError("has layers that keep no keys and values, or attention that is not read") from error
    half = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
    tolerance, part = 2.0**-5 if half else 2.0**-10, _named_part(model)
    alike: dict[Any, list[int]] = {}
    for number, q in seen.items():
        alike.setdefault((q.shape, q.device), []).append(number)
    found: dict[int, tuple[float, Rotation]] = {}
    for numbers in alike.values():
        # all at once, because each operation on so few numbers takes a device as long as one on many
        each = _rotations(torch.stack([seen[number] for number in numbers]), places, part)
        found |= dict(zip(numbers, each, strict=True))
    for number in seen:
        if not found[number][0] <= tolerance:
            raise FixedError(f"does not turn the queries of layer {number} by their position, as rotary positions do")
    return {number: found[number][1] for number in seen}


def _rotations(q: Any, places: list[int], named: float) -> list[tuple[float, Rotation]]:
    """Return for each l the rotation that best turns queries q[l, 0] of position 0 into q[l, i] of position places[i].

    With its error, relative to the queries. `named`: the part of their width that turns by the config of the model.
    """
    pairs = []
    for part in dict.fromkeys((named, *_PARTS)):
        r = int(q.shape[3] * part) // 2 * 2
        order = torch.arange(r, device=q.device)
        pairs += [(order[: r // 2], order[r // 2 :]), (order[::2], order[1::2])]
    turned = torch.cat([_turned(q, first, second) for first, second in pairs], 2)
    angles = _angles(turned, places).split([len(first) for first, _ in pairs], 1)
    shifts, size, errors = torch.tensor(places, device=q.device), _norms(q).clamp(min=1e-300), []
    for (first, second), angle in zip(pairs, angles, strict=True):
        found = Rotation(first, second, angle[:, None, None])  # of each layer
        later = found.moved(q[:, :1].expand_as(q).transpose(1, 2), shifts).transpose(1, 2)
        errors.append(_norms(later - q) / size)
    best: list[tuple[float, Rotation]] = []
    for number, tries in enumerate(torch.stack(errors, 1).nan_to_num(nan=torch.inf).tolist()):
        error = min(tries)
        which = tries.index(error)
        first, second = pairs[which]
        best.append((error, Rotation(first, second, angles[which][number])))
    return best


def _norms(q: Any) -> Any:
    """Return the norm of the queries of each layer."""
    return q.flatten(1).norm(dim=1)


def _named_part(model: Any) -> float:
    """Return the part of a head's width that turns, as the config says."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    return float(rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0)


def _turned(q: Any, first: Any, second: Any) -> Any:
    """Return numbers (layers, places, pairs) with the angles by which pairs have turned at each of the places."""
    z = torch.complex(q[..., first], q[..., second])
    return (z[:, :1].conj() * z).sum(2)  # the sum of all rows has their common angle


def _angles(turned: Any, places: list[int]) -> Any:
    """Return the angle (layers, pairs) of each pair for one position: each of the places doubles its digits."""
    at = turned.angle().unbind(1)
    angle = torch.zeros_like(at[0])
    for place, here in zip(places[1:], at[1:], strict=True):
        rest = torch.remainder(here - place * angle + math.pi, 2 * math.pi) - math.pi
        angle = angle + rest / place
    return angle
