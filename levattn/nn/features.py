"""Maps of the input before its projection to latent logits, such as a short memory."""

from __future__ import annotations

from typing import Any

import torch

from levattn._core.checks import check_type
from levattn.nn.memory import RGLRU, CausalConv

_NAMED: dict[str, Any] = {"conv": CausalConv, "rg_lru": RGLRU}


def feature_map(feature: Any, dim: int, **factory: Any) -> Any:
    """Return the module for a `feature` argument, or None.

    A module with a state has `state_size()`, the number of floats for each sequence, and
    ``forward(x, *, offsets=None, state=None)``, which returns the output and the new state. Any other module maps each
    position separately.
    """
    if feature is None or isinstance(feature, torch.nn.Module):
        return feature
    check_type("feature", feature, str, "a name, a torch module, or None")
    if feature in _NAMED:
        return _NAMED[feature](dim, **factory)
    names = "".join(f"{name!r}, " for name in _NAMED)
    raise ValueError(f"feature is {feature!r}; expected {names}a torch module, or None")


def feature_size(feature: Any) -> int:
    """Return the size of a feature's state for each sequence."""
    return int(feature.state_size()) if hasattr(feature, "state_size") else 0


def run_feature(feature: Any, x: Any, offsets: Any, state: Any, mask: Any = None) -> tuple[Any, Any]:
    """Return a feature's output for (B, T, C), and its new state.

    The memories of this library leave out masked positions; any other feature reads zeros there.
    """
    if feature is None:
        return x, None
    if isinstance(feature, CausalConv | RGLRU):
        return feature(x, mask=mask, offsets=offsets, state=state)  # type: ignore[no-any-return]
    if mask is not None:
        x = x.masked_fill(~mask[..., None], 0)
    if not hasattr(feature, "state_size"):
        return feature(x), None
    return feature(x, offsets=offsets, state=state)  # type: ignore[no-any-return]
