"""Calls of pruned attention with the options of a selection by name, as tables of tests write them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from levattn.attention import PrunedState, Selection, causal_pruned_attention, pruned_attention

_NAMES = tuple(field.name for field in fields(Selection))


def selected(options: dict[str, Any]) -> tuple[Selection, dict[str, Any]]:
    """Return the selection of these options, and the options that are left."""
    return (
        Selection(**{name: value for name, value in options.items() if name in _NAMES}),
        {name: value for name, value in options.items() if name not in _NAMES},
    )


def walk(*arrays: Any, state: PrunedState | None = None, **options: Any) -> Any:
    """Return the result of causal pruned attention, where a state has the place of the selection."""
    selection, others = selected(options)
    return causal_pruned_attention(*arrays, selection if state is None else state, **others, return_state=True)


def attend(*arrays: Any, causal: bool = False, state: PrunedState | None = None, **options: Any) -> Any:
    """Return the output of pruned attention, causal or not, and its certificate if an option asks for it."""
    selection, others = selected(options)
    if causal:
        return causal_pruned_attention(*arrays, selection if state is None else state, **others)
    return pruned_attention(*arrays, selection, **others)
