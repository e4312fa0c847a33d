"""Adapters to other libraries: ``levattn.integrations.sklearn`` and others, each imported at its first use."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("kvpress", "sklearn", "timm", "transformers")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"levattn.integrations.{name}")
    raise AttributeError(f"module 'levattn.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
