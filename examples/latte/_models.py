"""A small decoder whose mixer of positions can be exchanged, everything else being the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from levattn.attention import Window, rotate_values
from levattn.nn import CausalConv, Latte, Macchiato

MIXERS = ("latte", "window", "macchiato-mixture", "macchiato-exclusive", "softmax")


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    latents: of each head, where the mixer has some.
    window: of the mixers that have one.
    hidden: width of the MLP beside a macchiato mixer, which has the most parameters. The MLPs beside others are
        wider, so that all decoders of a shape have the same number of parameters, but for less than a unit's.
    convolution: width of the causal convolution in front of each mixer, added to what it reads.
    delta: the weight that latents of macchiato begin with, as in `levattn.nn.Macchiato.give_latents`.
    """

    vocabulary: int
    dim: int
    depth: int
    heads: int
    latents: int
    window: int
    hidden: int
    convolution: int
    delta: float | None = None


class Softmax(nn.Module):
    """Softmax attention with rotary embedding, over all positions so far or over a window of them."""

    def __init__(self, dim: int, *, heads: int, window: int | None = None) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.Wq, self.Wk, self.Wv, self.Wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        places = torch.arange(T, device=x.device)
        q, k, v = (W(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for W in (self.Wq, self.Wk, self.Wv))
        q, k = rotate_values(q, places), rotate_values(k, places)
        if self.window is None or self.window >= T:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            distance = places[:, None] - places
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < self.window))
        return self.Wo(y.transpose(1, 2).flatten(-2))


def mixer_of(name: str, shape: Shape) -> nn.Module:
    """Return a mixer (B, T, dim) → (B, T, dim)."""
    latents = {"heads": shape.heads, "latents": shape.latents}

    def macchiato(overlap: str) -> nn.Module:
        layer = Macchiato(shape.dim, Window(shape.window, overlap=overlap), **latents)
        return layer if shape.delta is None else layer.give_latents(shape.delta)

    made: dict[str, Callable[[], nn.Module]] = {
        "latte": lambda: Latte(shape.dim, **latents),
        "window": lambda: Softmax(shape.dim, heads=shape.heads, window=shape.window),
        "macchiato-mixture": lambda: macchiato("mixture"),
        "macchiato-exclusive": lambda: macchiato("exclusive"),
        "softmax": lambda: Softmax(shape.dim, heads=shape.heads),
    }
    return made[name]()


class Block(nn.Module):
    """Mixer and MLP, each behind a norm and added to what it reads."""

    def __init__(self, name: str, shape: Shape) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(shape.dim) for _ in range(2))
        self.convolution = CausalConv(shape.dim, shape.convolution)
        self.mixer = mixer_of(name, shape)
        self.mlp = nn.Sequential(
            nn.Linear(shape.dim, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, shape.dim, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        x = x + self.mixer(h + self.convolution(h)[0])
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """Tokens (B, T) to logits of what comes next, (B, T, vocabulary)."""

    def __init__(self, name: str, shape: Shape) -> None:
        super().__init__()
        self.shape = replace(shape, hidden=shape.hidden + _spare(name, shape) // (2 * shape.dim + 1))
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim)
        self.blocks = nn.ModuleList(Block(name, self.shape) for _ in range(shape.depth))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, where: Tensor | None = None) -> Tensor:
        """Return logits of all positions, or of those alone where a mask (B, T) is True, (count, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x if where is None else x[where]))


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _spare(name: str, shape: Shape) -> int:
    """How many parameters a mixer has fewer than that of macchiato."""
    with torch.random.fork_rng(), torch.device("meta"):
        return parameters(mixer_of("macchiato-mixture", shape)) - parameters(mixer_of(name, shape))
