"""Pictures of what a trained token statistics transformer does to images of digits.

maps: the memberships h·Π of each token, head by head and layer by layer; 1 is an even share.
left: how much of the norm of a token's projections is left where its coordinates are multiplied by 1 − Π/(1 + m), as a
step with tied outputs does if heads are orthonormal: dark where a layer acts.
descent: the variational coding rate of the tokens that a layer reads, before and after its step, memberships fixed,
with tied outputs and with others.

    python examples/tost/maps.py [--quick] [--epochs 20] [--rate 0.015] [--seed 0] [--out build/tost]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from _recipe import EPOCHS, accuracy, arguments, digits, pyplot, save, table, trained, use_threads
from _vit import Shape, Transformer
from torch import Tensor

from levattn.attention import memberships, rates

RATE = 1.5e-2
SHOWN = (0, 3, 4, 7)  # digits of the images, of each the first that was left out
STYLES: dict[str, tuple[str, Any, str]] = {"tssa": ("#0072B2", "-", "o"), "tssa tied": ("#D55E00", "--", "s")}


class Layer(NamedTuple):
    """What a layer does to the tokens of some images.

    members: Π (B, h, T).
    left: ‖(1 − Π/(1 + m)) w‖/‖w‖ over all heads and channels, (B, T).
    before, after: the variational rates of the tokens that it reads, and of these with its output added, (B,).
    norm: the largest of the norms ‖U_k‖₂ of its heads. Tied steps cannot raise the rate if it is below √2.
    """

    members: Tensor
    left: Tensor
    before: Tensor
    after: Tensor
    norm: float


@torch.no_grad()
def layers(model: Transformer, images: Tensor) -> list[Layer]:
    """Return what each layer of a transformer with token statistics attention does to images."""
    found = []
    x = model.tokens(images)
    for block in model.blocks:
        Z, mixer = block.norms[0](x), block.mixer
        W = mixer.project(Z).unflatten(-1, (mixer.heads, -1)).transpose(1, 2)
        P = memberships(W, mixer.temperature, form=mixer.form, causal=False)
        weights = P[..., None]
        m = (weights * W**2).sum(2, keepdim=True) / weights.sum(2, keepdim=True)
        U = mixer.project.weight.unflatten(0, (mixer.heads, -1)).transpose(1, 2)
        eps = Z.shape[-1] ** 0.5  # so that c = 1, as in the layer
        before, after = (rates.variational_rate(tokens, P.transpose(1, 2), U, eps) for tokens in (Z, Z + mixer(Z)))
        norm = torch.linalg.matrix_norm(U, ord=2).max().item()
        kept = torch.linalg.vector_norm(W * (1 - weights / (1 + m)), dim=(1, 3))
        found.append(Layer(P, kept / torch.linalg.vector_norm(W, dim=(1, 3)), before, after, norm))
        x = block(x)
    return found


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args(given)
    use_threads(chosen.threads)
    shape, epochs, which = Shape(), chosen.epochs, SHOWN
    if chosen.quick:
        shape, epochs, which = replace(shape, dim=24, depth=2, hidden=48), 1, SHOWN[:2]
    learned, judged = digits(chosen.seed)
    first = [int((judged.labels == digit).nonzero()[0, 0]) for digit in which]
    results, steps, pictures = {}, {}, {}
    for name in STYLES:
        model, _ = trained(name, shape, learned, epochs=epochs, rate=chosen.rate, seed=chosen.seed)
        steps[name] = layers(model, judged.images)
        results[name] = {
            "accuracy": accuracy(model, judged),
            "temperatures": [block.mixer.temperature.tolist() for block in model.blocks],
            "layers": [
                {
                    "least h·Π": shape.heads * layer.members.min().item(),
                    "largest h·Π": shape.heads * layer.members.max().item(),
                    "rate before": layer.before.mean().item(),
                    "rate after": layer.after.mean().item(),
                    "falls": (layer.after < layer.before).double().mean().item(),
                    "largest norm": layer.norm,
                }
                for layer in steps[name]
            ],
        }
        if name == "tssa":
            shown = [layer._replace(members=layer.members[first], left=layer.left[first]) for layer in steps[name]]
            pictures = {"maps": _maps(judged.images[first], shown), "left": _left(judged.images[first], shown)}
    table(
        f"the layers; {len(judged.labels)} images, of which the transformers read "
        + " and ".join(f"{100 * result['accuracy']:.2f} %" for result in results.values()),
        ("output, layer", "h·Π", "rate before", "after", "falls for", "largest ‖U‖₂"),
        (
            (
                f"{name}, {i}",
                f"{layer['least h·Π']:.2f} to {layer['largest h·Π']:.2f}",
                f"{layer['rate before']:.2f}",
                f"{layer['rate after']:.2f}",
                f"{100 * layer['falls']:.0f} %",
                f"{layer['largest norm']:.2f}",
            )
            for name, result in results.items()
            for i, layer in enumerate(result["layers"], 1)
        ),
    )
    said = {"shape": asdict(shape), "epochs": epochs, "rate": chosen.rate, "seed": chosen.seed, "results": results}
    save(chosen.out, "maps", said, **pictures, descent=_descent(steps))
    return 0


def _grid(images: Tensor, columns: int, width: float) -> tuple[Any, Any]:
    """Return a figure with a row for each image, which comes first, and axes for so many columns behind it."""
    figure, axes = pyplot().subplots(
        len(images), 1 + columns, figsize=(width, 0.8 * len(images) + 0.5), layout="constrained"
    )
    for row, image in zip(axes, images, strict=True):
        row[0].imshow(image.numpy(), cmap="gray")
        for ax in row:
            ax.set(xticks=[], yticks=[])
    axes[0, 0].set_title("image", fontsize=8)
    return figure, axes


def _maps(images: Tensor, shown: list[Layer]) -> Any:
    from matplotlib.colors import TwoSlopeNorm

    heads, side = shown[0].members.shape[1], images.shape[-1]
    shares = torch.stack([heads * layer.members for layer in shown])  # (layers, B, h, T)
    top = max(1.01, torch.quantile(shares, 0.995).item())
    norm = TwoSlopeNorm(1.0, vmin=min(0.99, torch.quantile(shares, 0.005).item()), vmax=top)
    figure, axes = _grid(images, len(shown) * heads, 0.8 * len(shown) * heads + 2)
    for i, each in enumerate(shares.flatten(3).permute(0, 2, 1, 3).flatten(0, 1), 1):
        layer, head = divmod(i - 1, heads)
        for ax, share in zip(axes[:, i], each, strict=True):
            drawn = ax.imshow(share.view(side, side).numpy(), cmap="PuOr_r", norm=norm)
        axes[0, i].set_title(f"layer {layer + 1}\nhead {head + 1}", fontsize=8)
    figure.colorbar(drawn, ax=axes, label="h·Π", shrink=0.8, extend="both")
    return figure


def _left(images: Tensor, shown: list[Layer]) -> Any:
    side = images.shape[-1]
    parts = torch.stack([layer.left for layer in shown])
    low, high = parts.min().item(), parts.max().item()
    figure, axes = _grid(images, len(shown), 0.9 * len(shown) + 2.3)
    for i, each in enumerate(parts, 1):
        for ax, part in zip(axes[:, i], each, strict=True):
            drawn = ax.imshow(part.view(side, side).numpy(), cmap="cividis", vmin=low, vmax=high)
        axes[0, i].set_title(f"layer {i}", fontsize=8)
    figure.colorbar(drawn, ax=axes, label="norm left of a token", shrink=0.8)
    return figure


def _descent(steps: dict[str, list[Layer]]) -> Any:
    figure, ax = pyplot().subplots(figsize=(6.4, 4.2), layout="constrained")
    for name, found in steps.items():
        color, dashes, marker = STYLES[name]
        for i, layer in enumerate(found, 1):
            ends = layer.before.mean().item(), layer.after.mean().item()
            ax.plot((i - 0.2, i + 0.2), ends, color=color, linestyle=dashes, label=name if i == 1 else None)
            ax.plot(i - 0.2, ends[0], marker, color=color, markerfacecolor="white")
            ax.plot(i + 0.2, ends[1], marker, color=color)
    ax.set_xticks(range(1, len(found) + 1))
    ax.set(xlabel="layer", title="variational rate of what a layer reads: before (open), after its step (filled)")
    ax.title.set_fontsize(10)
    ax.set_ylabel("nats, means of all images")
    ax.legend(fontsize="small")
    ax.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    sys.exit(main())
