r"""
The patches that heads keep
===========================

A small vision transformer learns scikit-learn's digits. Each head attends to 8 of 64 keys, the keys with the largest
leverage scores, chosen for each image anew. Which patches are these, and do they follow the digit?
"""

# %%
# A transformer of one layer
# --------------------------
#
# A patch is a square of 3 × 3 pixels, one around each of the 8 × 8 pixels. `~levattn.nn.LevAttention` selects keys in
# each call, by leverage scores of the keys minus their mean, which softmax does not see. The gradient treats the
# choice as a constant. Training attends to all keys for the first 15 % of the steps. A third of the images is left out
# for the test.

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from sklearn.datasets import load_digits
from torch import nn

from levattn.attention import Selection, pruned_attention
from levattn.nn import LevAttention, set_dense

HEADS, WIDTH, SIZE, SIDE = 4, 32, 8, 8
FEW = Selection(size=SIZE, scores="leverage")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = LevAttention(WIDTH, FEW, heads=HEADS, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.places = nn.Parameter(torch.randn(SIDE**2, WIDTH) / 2)
        self.block = Block()
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))

    def tokens(self, images):
        return self.patches(images[:, None]).flatten(2).transpose(1, 2) + self.places

    def forward(self, images):
        return self.head(self.block(self.tokens(images)).mean(dim=1))


digits = load_digits()
images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32)
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
judged, learned = order[: len(order) // 3], order[len(order) // 3 :]

torch.manual_seed(0)
model = Classifier()
epochs, batch = 4, 32
steps = epochs * (len(learned) // batch)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.05)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
for step in range(steps):
    if step % (steps // epochs) == 0:
        shuffled = learned[torch.randperm(len(learned))]
    part = shuffled[step % (steps // epochs) * batch :][:batch]
    set_dense(model, step < 0.15 * steps)
    loss = nn.functional.cross_entropy(model(images[part]), labels[part])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
model.eval()


@torch.no_grad()
def accuracy(dense):
    set_dense(model, dense)
    return (
        (model(images[judged]).argmax(dim=1) == labels[judged]).double().mean().item()
    )


print(
    f"accuracy on {len(judged)} images left out, by {SIZE} keys of {SIDE**2} in each head: {accuracy(False):.3f}"
)
print(f"the same weights, attending to all keys: {accuracy(True):.3f}")

# %%
# The kept patches
# ----------------
#
# The layer calls `~levattn.attention.pruned_attention`, whose certificate tells which keys were selected. The top row
# shows images. The bottom row shows the kept patches; a patch is brighter if more of the four heads keep it.


@torch.no_grad()
def kept_by_heads(x):
    """Return which patches are kept, (images, heads, 8, 8)."""
    parts = model.block.attention.qkv(model.block.norms[0](model.tokens(x))).unflatten(
        -1, (3, HEADS, -1)
    )
    _, certificate = pruned_attention(
        *parts.permute(2, 0, 3, 1, 4), FEW, return_certificate=True
    )
    return certificate.kept.unflatten(-1, (SIDE, SIDE)).numpy()


shown = torch.stack([judged[labels[judged] == digit][0] for digit in (0, 1, 3, 4, 7)])
kept = kept_by_heads(images[shown])

figure, axes = plt.subplots(2, len(shown), figsize=(8.4, 3.5), layout="constrained")
for above, below, image, share in zip(
    *axes, images[shown], kept.mean(axis=1), strict=True
):
    above.imshow(image.numpy(), cmap="gray")
    drawn = below.imshow(share, cmap="viridis", vmin=0, vmax=1)
    for ax in (above, below):
        ax.set(xticks=[], yticks=[])
figure.colorbar(drawn, ax=axes, label="share of heads that keep a patch", pad=0.02)
print("digits:", *labels[shown].tolist())

# %%
# This picture lays the kept patches over the image. The image is gray, so the colors show only the share of the heads.

figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.3), layout="constrained")
for ax, i in zip(axes, (0, 3), strict=True):
    ax.imshow(images[shown[i]].numpy(), cmap="gray")
    drawn = ax.imshow(kept[i].mean(axis=0), cmap="viridis", vmin=0, vmax=1, alpha=0.55)
    ax.set(xticks=[], yticks=[])
shades = ScalarMappable(drawn.norm, drawn.cmap)  # opaque, unlike what is drawn
figure.colorbar(shades, ax=axes, label="share of heads that keep a patch", pad=0.02)
print(
    "patches that at least half of the heads keep:",
    *(kept[[0, 3]].mean(axis=1) >= 0.5).sum(axis=(1, 2)),
)

# %%
# Places or strokes?
# ------------------
#
# The picture shows the share of the heads that keep a patch, over all left-out images: on the left by its place, on
# the right by the brightness of its middle pixel. The dashed line is the share by chance.

everything = kept_by_heads(images[judged])
brightness = (images[judged].numpy() + 1) / 2
levels = np.linspace(0, 1, 6)
level = np.digitize(brightness, levels[1:-1])
by_level = [everything.mean(axis=1)[level == i].mean() for i in range(len(levels) - 1)]

figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.4), layout="constrained")
drawn = left.imshow(everything.mean(axis=(0, 1)), cmap="viridis", vmin=0)
figure.colorbar(drawn, ax=left, label="share of heads and images", pad=0.02)
left.set(xticks=[], yticks=[], title="by place")
right.bar((levels[:-1] + levels[1:]) / 2, by_level, 0.17, color="#0072B2")
right.axhline(SIZE / SIDE**2, color="#D55E00", ls="--", lw=1.5, label="by chance")
right.set(
    xlabel="brightness of the middle pixel",
    ylabel="share of heads that keep it",
    title="by brightness",
)
right.legend(fontsize="small")
print(
    "share of heads that keep a patch, dark to bright:",
    *(f"{share:.2f}" for share in by_level),
)

# %%
# If a head kept the same places in every image, two images would share all of its kept patches.

images_at = everything.sum(axis=0).reshape(HEADS, -1)
common = (images_at * (images_at - 1)).sum(axis=1) / (
    len(judged) * (len(judged) - 1) * SIZE
)
print(
    "share of its patches that a head keeps in another image too:",
    *(f"{share:.2f}" for share in common),
)
print(f"by chance: {SIZE / SIDE**2:.2f}; always the same places: 1.00")

# %%
# A head keeps a patch because some query could give much attention to its key, not because the patch matters for the
# digit. And this is one small model with one seed, so nothing about accuracy follows for other models.
