"""A small transformer of images whose mixer of tokens can be exchanged, everything else being the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

import levattn
from levattn.attention import TokenForm
from levattn.nn import TokenStatistics


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer.

    hidden: width of the MLP beside softmax attention, which has the most parameters. The MLPs beside others are wider,
        so that all transformers of a shape have the same number of parameters, but for less than a unit's.
    stem: side of the square of pixels that a token begins as; there is one token for each pixel, in the middle of it.
    side: pixels of the canvas that images lie on, in either direction.
    share: of the keys that mixers read which choose among them.
    """

    dim: int = 48
    depth: int = 3
    heads: int = 4
    hidden: int = 96
    stem: int = 1
    side: int = 8
    classes: int = 10
    share: float = 0.25


class Softmax(nn.Module):
    """Softmax attention, over all keys or over some that each head chooses for each image, for all its queries alike.

    choose: "leverage" for the keys that a universal set of this size holds, which are those of the largest leverage
        scores; "random" for others each time; None for all. The choice has no gradient.
    """

    def __init__(self, dim: int, *, heads: int, choose: str | None = None, share: float = 1.0) -> None:
        super().__init__()
        self.heads, self.choose, self.share = heads, choose, share
        self.project, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        Q, K, V = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.choose is not None:
            places = self.chosen(K.detach())[..., None].expand(-1, -1, -1, K.shape[-1])
            K, V = K.gather(2, places), V.gather(2, places)
        Y = functional.scaled_dot_product_attention(Q, K, V)
        return self.out(Y.transpose(1, 2).flatten(-2))

    def chosen(self, K: Tensor) -> Tensor:
        """Return the places of the keys that are read, (B, h, size)."""
        size = max(1, round(self.share * K.shape[2]))
        if self.choose == "random":
            return torch.rand(K.shape[:3], device=K.device).topk(size, dim=-1).indices
        mask = levattn.universal_set(K, size=size).mask
        return mask.nonzero()[:, -1].view(*K.shape[:2], size)


class Nothing(nn.Module):
    """No mixer: tokens see nothing of each other until they are averaged at the end."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def _statistics(form: TokenForm | str = "diag_leverage", *, output: str = "untied") -> Callable[[Shape], nn.Module]:
    def make(shape: Shape) -> nn.Module:
        layer = TokenStatistics(shape.dim, form, heads=shape.heads, output=output)
        # The layer begins as the released models do, with 0.02, which suits some hundred channels.
        for linear in filter(None, (layer.project, layer.out)):
            nn.init.normal_(linear.weight, std=shape.dim**-0.5)
        return layer

    return make


_MADE: dict[str, Callable[[Shape], nn.Module]] = {
    "softmax": lambda shape: Softmax(shape.dim, heads=shape.heads),
    "leverage keys": lambda shape: Softmax(shape.dim, heads=shape.heads, choose="leverage", share=shape.share),
    "random keys": lambda shape: Softmax(shape.dim, heads=shape.heads, choose="random", share=shape.share),
    "tssa": _statistics(),
    "tssa tied": _statistics(output="tied"),
    "tssa mean": _statistics(TokenForm(normalize="mean")),
    "tssa norm": _statistics("norm"),
    "tssa leverage": _statistics("leverage"),
    "tssa uniform": _statistics("uniform"),
    "nothing": lambda _: Nothing(),
}
MIXERS = tuple(_MADE)


def mixer_of(name: str, shape: Shape) -> nn.Module:
    """Return a mixer (B, T, dim) → (B, T, dim)."""
    return _MADE[name](shape)


class Block(nn.Module):
    """Mixer and MLP, each behind a norm and added to what it reads."""

    def __init__(self, name: str, shape: Shape) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(shape.dim) for _ in range(2))
        self.mixer = mixer_of(name, shape)
        self.mlp = nn.Sequential(
            nn.Linear(shape.dim, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, shape.dim, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Images (B, side, side) to logits of classes (B, classes), by way of a token for each pixel and their mean."""

    def __init__(self, name: str, shape: Shape) -> None:
        super().__init__()
        self.shape = replace(shape, hidden=shape.hidden + _spare(name, shape) // (2 * shape.dim + 1))
        self.stem = nn.Conv2d(1, shape.dim, shape.stem, padding=shape.stem // 2)
        self.places = nn.Parameter(torch.randn(shape.side**2, shape.dim) / 2)
        self.blocks = nn.ModuleList(Block(name, self.shape) for _ in range(shape.depth))
        self.norm, self.head = nn.LayerNorm(shape.dim), nn.Linear(shape.dim, shape.classes)

    def tokens(self, images: Tensor) -> Tensor:
        """Return what the first block reads, (B, T, dim)."""
        return self.stem(images[:, None]).flatten(2).transpose(1, 2) + self.places

    def forward(self, images: Tensor) -> Tensor:
        x = self.tokens(images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _spare(name: str, shape: Shape) -> int:
    """How many parameters a mixer has fewer than softmax attention."""
    with torch.random.fork_rng(devices=[]):
        return parameters(mixer_of("softmax", shape)) - parameters(mixer_of(name, shape))
