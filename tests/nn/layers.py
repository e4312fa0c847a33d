"""What tests of layers share: kinds of layers, their forms, and one with an input."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from levattn.attention import Selection, TokenForm, Window  # noqa: E402
from levattn.nn import Latte, LevAttention, Macchiato, TokenStatistics  # noqa: E402

T, C = 17, 12


class RunningSum(torch.nn.Module):
    """A feature with a state: the input and half of what was before."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def state_size(self) -> int:
        return self.dim

    def forward(self, x: Any, *, offsets: Any = None, state: Any = None) -> Any:
        h = x.new_zeros(x.shape[0], x.shape[2]) if state is None else state
        starts = [] if offsets is None else list(offsets)
        rows = []
        for t in range(x.shape[1]):
            h = x[:, t] + (0 if t in starts else 0.5 * h)
            rows.append(h)
        return torch.stack(rows, 1) if rows else x, h


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "latte": (Latte, {"latents": 5}),
    "macchiato": (Macchiato, {"latents": 5, "window": 6, "rope": False}),
    "tokens": (TokenStatistics, {"causal": True}),
    "few": (LevAttention, {"causal": True, "selection": Selection(8, scores="leverage", renew_every=4)}),
}
CAUSAL: dict[str, dict[str, Any]] = {
    "latte": {},
    "latte, vapor": {"vapor": True},
    "latte, memory": {"feature": RunningSum(C)},
    "latte, conv": {"feature": "conv"},
    "latte, rg_lru": {"feature": "rg_lru", "vapor": True},
    "latte, map": {"feature": torch.nn.LayerNorm(C), "vapor": True},
    "macchiato": {},
    "macchiato, exclusive": {"window": Window(6, overlap="exclusive")},
    "macchiato, rotated": {"rope": True, "vapor": True, "kv_heads": 1},
    "macchiato, conv": {"feature": "conv", "window": Window(6, overlap="exclusive"), "rope": True},
    "macchiato, rg_lru": {"feature": "rg_lru", "window": Window(6, softcap=5.0), "kv_heads": 1},
    "macchiato, map": {"feature": torch.nn.LayerNorm(C), "window": 40},
    "tokens": {},
    "tokens, mean": {"form": TokenForm(normalize="mean"), "bias": True},
    "tokens, norm": {"form": TokenForm("norm", decay=0.9), "out_bias": False},
    "tokens, uniform": {"form": TokenForm("uniform", decay=[0.9, 0.5, 1.0])},
    "tokens, positions": {"positions": 23, "form": TokenForm(c=2.0)},
    "tokens, tied": {"output": "tied", "positions": T, "form": "norm"},
}
ALL: dict[str, dict[str, Any]] = CAUSAL | {
    f"{name}, all": {**options, "causal": False}
    for name, options in CAUSAL.items()
    if not name.startswith("macchiato") and getattr(options.get("form"), "decay", 1.0) == 1.0
}
ALL["tokens, leverage"] = {"form": TokenForm("leverage", normalize="mean"), "causal": False}


def layer_and_input(name: str, B: int = 2, T: int = T, *, dtype: Any = torch.float64, **more: Any) -> Any:
    """A layer whose parameters are all of order 1, so that each of them shows, and an input."""
    torch.manual_seed(0)
    cls, usual = KINDS[name.partition(",")[0]]
    layer = cls(C, **{"heads": 3, **usual, **ALL.get(name, {}), **more}).to(dtype)
    with torch.no_grad():
        for label, parameter in layer.named_parameters():
            if not label.startswith("feature"):
                values = torch.randn(parameter.shape, dtype=torch.float64)
                parameter.copy_(values / (C**0.5 if parameter.ndim == 2 else 1))
    return layer, torch.randn(B, T, C, dtype=torch.float64).to(dtype)
