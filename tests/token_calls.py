"""Calls of token statistics attention with the fields of a form by name, as tables of tests write them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from levattn import attention
from levattn.attention import TokenForm

_NAMES = tuple(field.name for field in fields(TokenForm))


def formed(options: dict[str, Any]) -> dict[str, Any]:
    """Return options in which a form has the place of its fields; without these fields there is no form."""
    form = {name: value for name, value in options.items() if name in _NAMES}
    others = {name: value for name, value in options.items() if name not in _NAMES}
    return others | {"form": TokenForm(**form)} if form else others


def tssa(*arrays: Any, **options: Any) -> Any:
    """Return token statistics attention."""
    return attention.tssa(*arrays, **formed(options))


def memberships(*arrays: Any, **options: Any) -> Any:
    """Return the memberships of the operator."""
    return attention.memberships(*arrays, **formed(options))
