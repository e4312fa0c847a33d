"""Split the texts of batches into texts that choose budgets and texts that test them."""

from __future__ import annotations

from typing import Any

import torch

EVERY = 4  # the first of so many texts is for choosing, the others are for testing


def dealt(model: Any, batches: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int, int]:
    """Return the batches of texts for choosing and for testing, and the number of texts of both."""
    choosing: list[dict[str, Any]] = []
    testing: list[dict[str, Any]] = []
    seen = 0
    for batch in batches:
        count = _texts_in(model, batch)
        numbers = torch.arange(seen, seen + count)
        first = numbers % EVERY == 0
        for part, chosen in ((choosing, first), (testing, ~first)):
            if chosen.any():
                part.append(batch if chosen.all() else _rows(batch, count, chosen.nonzero()[:, 0]))
        seen += count
    for_choosing = -(-seen // EVERY)
    return choosing, testing, for_choosing, seen - for_choosing


def needed_for(tested: int) -> int:
    """Return the least number of texts that leaves `tested` of them for testing."""
    return -(-tested * EVERY // (EVERY - 1))


def _texts_in(model: Any, batch: dict[str, Any]) -> int:
    names = dict.fromkeys(("input_ids", "inputs_embeds", getattr(model, "main_input_name", "input_ids")))
    for name in names:
        if isinstance(batch.get(name), torch.Tensor):
            return len(batch[name])
    raise ValueError(
        f"inputs has a batch of {', '.join(batch) or 'nothing'}; expected one with a tensor {' or '.join(names)} "
        "with risk, which needs single texts"
    )


def _rows(batch: dict[str, Any], count: int, places: Any) -> dict[str, Any]:
    """Return a batch with some of its texts; entries without a row for each text stay."""
    found = dict(batch)
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) == 1:
            continue
        if len(value) != count:
            raise ValueError(
                f"inputs has {name} of shape {tuple(value.shape)} in a batch of {count} texts; expected a row for "
                "each text with risk, which needs single texts. Give each text its own batch"
            )
        found[name] = value[places.to(value.device)]
    return found
