r"""
Choosing ε
==========

A smaller ε makes a larger set. This example uses the 72 heads of a real encoder. It shows the sizes of the sets, where
the theorem bounds them, and how much attention falls on the set, for :math:`x^2` and for softmax.
"""

# %%
# Sizes and their bound
# ---------------------
#
# The set is exact for each ε. The theorem promises a *small* set only where rank/ε is below the number n of keys.
# Otherwise the bound is vacuous, ``is_vacuous`` says so, and the size depends on the keys alone. The picture shows the
# sizes of all heads below the dashed bound; in the gray zone the bound is vacuous.

import matplotlib.pyplot as plt
import numpy as np

import levattn

heads = levattn.datasets.minilm()
Q, K = heads.queries.astype(np.float32), heads.keys.astype(np.float32)
n, d = K.shape[-2:]

epsilons = np.geomspace(0.02, 0.5, 15)
sets = [levattn.universal_set(K, epsilon) for epsilon in epsilons]
sizes = np.array([universal.sizes.ravel() for universal in sets])  # (epsilons, heads)

print("    ε   size: least median most   bound vacuous")
for epsilon, size, universal in zip(epsilons, sizes, sets, strict=True):
    bound, verdict = (
        np.max(universal.size_bound),
        "yes" if np.all(universal.is_vacuous) else "no",
    )
    print(
        f"{epsilon:.3f} {size.min():11d} {np.median(size):6.0f} {size.max():4d} {bound:7.0f} {verdict:>7s}"
    )


def epsilon_axis(ax):
    ticks = [0.02, 0.05, 0.1, 0.2, 0.5]
    ax.set(xscale="log", xlabel="ε", xlim=(epsilons[0], epsilons[-1]))
    ax.set_xticks(ticks, labels=ticks)
    ax.set_xticks([], minor=True)
    ax.grid(alpha=0.25, lw=0.5)
    ax.legend(loc="upper right", fontsize="small")


figure, ax = plt.subplots(layout="constrained")
ax.fill_between(
    epsilons,
    sizes.min(axis=1),
    sizes.max(axis=1),
    color="#0072B2",
    alpha=0.25,
    lw=0,
    label="72 heads",
)
ax.plot(epsilons, np.median(sizes, axis=1), color="#0072B2", lw=2, label="median")
ax.plot(epsilons, d / epsilons, color="#D55E00", lw=1.5, ls="--", label="bound d/ε")
ax.axhline(n, color="#8C8C8C", lw=1.5, ls=":", label=f"all n = {n} keys")
ax.axvspan(
    epsilons[0], d / n, color="#8C8C8C", alpha=0.15, lw=0, label="bound is vacuous"
)
ax.set(yscale="log", ylim=(0.8, 5000), ylabel="keys of the set")
epsilon_axis(ax)

# %%
# The captured attention
# ----------------------
#
# The picture shows the share of the attention of the text's own queries that falls on the set, as a mean over heads.
# As many random keys would get the share size/n, the dotted line. The sets for :math:`x^2` capture little more than
# that of softmax.


def mean_column(A):
    """Return the mean attention that each key receives, of all queries of its head."""
    return (A / A.sum(axis=-1, keepdims=True)).mean(axis=-2)


products = Q @ K.swapaxes(-1, -2)
logits = heads.scale * products
columns = {
    "x²": mean_column(products**2),
    "softmax": mean_column(np.exp(logits - logits.max(axis=-1, keepdims=True))),
}
captured = {
    name: [(mass * universal.mask).sum(axis=-1).mean() for universal in sets]
    for name, mass in columns.items()
}
share = sizes.mean(axis=1) / n

figure, ax = plt.subplots(layout="constrained")
for (name, found), color in zip(captured.items(), ("#0072B2", "#D55E00"), strict=True):
    ax.plot(
        epsilons, found, color=color, lw=2, ls="-" if name == "x²" else "--", label=name
    )
ax.plot(
    epsilons, share, color="#8C8C8C", lw=1.5, ls=":", label="random keys of that number"
)
ax.set(ylim=(0, 1.02), ylabel="captured attention, mean of 72 heads")
epsilon_axis(ax)

i = int(np.argmin(np.abs(epsilons - 0.1)))
print(
    f"at ε = {epsilons[i]:.3f}: {share[i]:.1%} of the keys capture {captured['x²'][i]:.1%} of x² attention"
)
print(f"and {captured['softmax'][i]:.1%} of softmax attention")

# %%
# A budget instead
# ----------------
#
# ``size=`` takes the keys with the largest scores, and reports the ε that they certify: no key outside can receive
# more from any query. The picture shows that this ε differs from head to head, and more from layer to layer.

budget = 64
by_size = levattn.universal_set(K, size=budget)
certified = np.asarray(by_size.epsilon)
print(
    f"{budget} keys certify ε from {certified.min():.3f} to {certified.max():.3f}, median {np.median(certified):.3f}"
)

figure, ax = plt.subplots(layout="constrained")
for layer, (found, color) in enumerate(
    zip(
        certified,
        ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
        strict=True,
    )
):
    ax.plot(
        np.sort(found),
        color=color,
        marker="os^Dvx"[layer],
        ms=5,
        lw=1.2,
        label=f"layer {layer}",
    )
ax.set(
    xlabel="heads of a layer, by ascending ε",
    ylabel=f"ε that {budget} keys certify",
    ylim=(0, None),
)
ax.grid(alpha=0.25, lw=0.5)
legend = ax.legend(ncols=2, fontsize="small")

# %%
# The softmax mass of a set
# -------------------------
#
# The theorem does not cover softmax, so measure the softmax mass of a set query by query. Here is one head with its
# budget of keys. They are centered, because softmax does not see the mean:

layer, head = 2, 5
centered = levattn.universal_set(K[layer, head], size=budget, center=True)
weights = np.exp(logits[layer, head] - logits[layer, head].max(axis=-1, keepdims=True))
mass = weights[:, centered.mask].sum(axis=-1) / weights.sum(axis=-1)
low, middle, high = np.quantile(mass, [0.05, 0.5, 0.95])
print(
    f"softmax mass on {budget} keys: median over queries {middle:.3f}, of nine in ten {low:.3f} to {high:.3f}"
)

# %%
# To choose ε, take the smallest attention score that matters to you, and look at the size. Or take the number of keys
# that you can afford, and look at the ε. For softmax, measure the captured mass on your own queries, because no ε
# bounds it.
