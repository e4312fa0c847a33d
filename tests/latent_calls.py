"""Calls of attention in a window with the options of the window by name, as tables of tests write them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from levattn import attention
from levattn.attention import Window

_NAMES = tuple(field.name for field in fields(Window) if field.name != "size")


def in_window(options: dict[str, Any]) -> dict[str, Any]:
    """Return options in which a window has the place of its size and its options."""
    window = {name: value for name, value in options.items() if name in _NAMES}
    others = {name: value for name, value in options.items() if name not in _NAMES}
    return others | ({"window": Window(options["window"], **window)} if window else {})


def macchiato(q: Any, k: Any, V: Any, q_logits: Any, k_logits: Any, gate: Any, **options: Any) -> Any:
    """Return the mixture of a window and latents."""
    return attention.macchiato(q, k, V, (q_logits, k_logits, gate), **in_window(options))


def window_attention(*arrays: Any, **options: Any) -> Any:
    """Return softmax attention in a window."""
    return attention.window_attention(*arrays, **in_window(options))
