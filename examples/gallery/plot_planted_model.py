r"""
Planted keys, and copies that hide each other
=============================================

`~levattn.datasets.planted` draws keys of which a known few have a large leverage score, in three variants. One variant
copies the planted keys. Then no single key is heavy for any query, and only groups of them are.
"""

# %%
# Three variants
# --------------
#
# Each variant plants keys in directions that the other keys reach only by noise. *isotropic*: the planted keys are
# also the longest. *anisotropic*: most other keys are longer. *duplicated*: as anisotropic, and each planted key comes
# many times. The pictures show norm and leverage score of each key. The planted keys lie above ε, except for the
# copies.

import matplotlib.pyplot as plt
import numpy as np

import levattn
from levattn.datasets import planted
from levattn.plots import LeverageSpectrumDisplay

n, d, epsilon = 4000, 32, 0.1
models = {
    variant: planted(n, d, variant=variant, rng=0)
    for variant in ("isotropic", "anisotropic", "duplicated")
}

figure, axes = plt.subplots(1, 3, figsize=(8.4, 4.2), sharey=True, layout="constrained")
for ax, (variant, model) in zip(axes, models.items(), strict=True):
    norms, scores = (
        np.linalg.norm(model.keys, axis=1),
        levattn.leverage_scores(model.keys),
    )
    others = np.delete(np.arange(n), model.indices)
    ax.scatter(
        norms[others],
        scores[others],
        s=6,
        color="#8C8C8C",
        alpha=0.5,
        lw=0,
        label="others",
    )
    ax.scatter(
        norms[model.indices],
        scores[model.indices],
        s=18,
        color="#D55E00",
        marker="D",
        lw=0,
        label="planted",
        zorder=3,
    )
    ax.axhline(epsilon, color="#0072B2", ls="--", lw=1.5, label=f"ε = {epsilon}")
    ax.set(title=variant, xlabel="norm of the key", yscale="log")
    ax.grid(alpha=0.25, lw=0.5)
axes[0].set_ylabel("leverage score")
axes[0].legend(loc="center right", fontsize="small")
for variant, model in models.items():
    print(f"{variant}: {model}")

# %%
# Two rules look for the planted keys: one takes as many of the largest leverage scores, the other as many of the
# largest norms.

print("                planted  by leverage  by norm  |U| at ε")
for variant, model in models.items():
    norms, scores = (
        np.linalg.norm(model.keys, axis=1),
        levattn.leverage_scores(model.keys),
    )
    size = len(model.indices)
    by_scores, by_norms = (
        np.isin(np.argsort(-values)[:size], model.indices).sum()
        for values in (scores, norms)
    )
    universal = levattn.universal_set(model.keys, epsilon)
    print(
        f"{variant:14s}  {size:7d}  {by_scores:11d}  {by_norms:7d}  {len(universal):8d}"
    )

# %%
# The spectrum of the anisotropic variant has a few large scores, and then a gap. The planted keys are the universal
# set for every ε in the gap. `~levattn.datasets.Planted` predicts both ends of the gap.

model = models["anisotropic"]
scores = levattn.leverage_scores(model.keys)
LeverageSpectrumDisplay.from_scores(scores, epsilon=epsilon, rank=d)

lightest, largest_other = (
    scores[model.indices].min(),
    np.delete(scores, model.indices).max(),
)
print(
    f"lightest planted key: {lightest:.3f}, predicted for a planted key:   {model.planted_score:.3f}"
)
print(
    f"heaviest other key:   {largest_other:.4f}, predicted for the largest one: {model.background_score:.4f}"
)

# %%
# Copies
# ------
#
# Copies of a key have similar scores, so each scores at most one over their number. With more than 1/ε copies none is
# in the set, though together they may receive nearly all attention of a query. `~levattn.near_duplicates` finds groups
# of keys that queries hardly tell apart, from the keys alone. It measures angles of whitened keys, as queries see
# them. In directions that hold only noise, whitening makes the noise large. There copies differ, and queries can tell
# them apart. With other keys in all directions (``background_rank``) queries hardly can.

settings = {"variant": "duplicated", "copies": 30, "rng": 0}
for background_rank in (d // 2, d - d // 4):
    model = planted(n, d, background_rank=background_rank, **settings)
    K = model.keys
    labels = levattn.near_duplicates(K)
    hits = np.count_nonzero(labels[model.indices] >= 0)
    print(
        f"background in {background_rank} of {d} dimensions: {hits} of {len(model.indices)} copies are in groups"
    )

print(
    f"groups: {labels.max() + 1}, of {np.unique(labels[labels >= 0], return_counts=True)[1]} keys"
)
pairs = set(zip(labels[model.indices].tolist(), model.groups.tolist(), strict=True))
print(
    "each group has the copies of one planted key:",
    len(pairs) == labels.max() + 1 == model.groups.max() + 1,
)

# %%
# With these groups the set also holds each group that some query can give ε as a whole. A query of the model attends
# to a planted direction. The output compares the shares of its attention on both sets. The larger set is a superset:
# none of the copies in it is heavy by itself.

plain = levattn.universal_set(K, epsilon)
grouped = plain.with_groups(K, labels)
A = (model.queries @ K.T) ** 2
A /= A.sum(axis=1, keepdims=True)

print(plain)
print(grouped)
for name, universal in (("without groups", plain), ("with groups", grouped)):
    print(
        f"{name}: attention held, mean of {len(A)} queries {A[:, universal.mask].sum(axis=1).mean():.3f}"
    )

# %%
# How many copies it takes
# ------------------------
#
# The picture shows the largest score of a single copy and the scores of the groups, by the number of copies. A single
# copy falls below ε, but a group stays high. The scores differ by noise, so the heaviest copy may be a little above
# 1/copies.

counts = np.array([2, 3, 5, 8, 12, 20, 50, 100, 200])
alone, together = [], []
for count in counts:
    model = planted(n, d, background_rank=d - d // 4, **settings | {"copies": count})
    alone.append(levattn.leverage_scores(model.keys)[model.indices].max())
    labels = np.full(n, -1)
    labels[model.indices] = model.groups
    together.append(levattn.group_leverage(model.keys, labels))

figure, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
ax.fill_between(
    counts,
    np.min(together, axis=1),
    np.max(together, axis=1),
    color="#009E73",
    alpha=0.25,
    lw=0,
)
ax.plot(
    counts,
    np.median(together, axis=1),
    "s-",
    color="#009E73",
    label="a group (median, range)",
)
ax.plot(counts, alone, "o-", color="#D55E00", label="the heaviest copy")
ax.plot(counts, 1 / counts, ":", color="#8C8C8C", lw=2, label="1/copies")
ax.axhline(epsilon, color="#0072B2", ls="--", lw=1.5, label=f"ε = {epsilon}")
ax.set(
    xscale="log",
    yscale="log",
    xlabel="copies of each planted key",
    ylabel="leverage score",
)
ax.grid(alpha=0.25, lw=0.5)
ax.legend(loc="lower left")

hidden = np.flatnonzero(np.array(alone) < epsilon)
print(
    f"no copy reaches ε from {counts[hidden[0]] if len(hidden) else 'none of these'} copies on"
)
print(f"least score of a group: {np.min(together):.2f}")

# %%
# The scores of groups are exact for the given groups. `near_duplicates` does not promise to find all near-copies: it
# may miss a pair with a small probability, which splits its group or leaves a key alone.
