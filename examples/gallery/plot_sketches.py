r"""
Leverage scores from a sketch
=============================

Approximate scores err both ways. :py:func:`~levattn.universal_set` measures how much a sketch distorts the keys, and
makes a superset from its scores. So it misses nothing, and keeps more keys.
"""

# %%
# Approximate against exact scores
# --------------------------------
#
# The picture shows the ratio of each approximate score to the exact one. The ratios lie on both sides of 1.

import matplotlib.pyplot as plt
import numpy as np

import levattn

K = levattn.datasets.planted(20_000, 32, strength=10, rng=0).keys
exact = levattn.leverage_scores(K)
methods = {
    "countsketch": "#0072B2",
    "srht": "#D55E00",
    "osnap": "#009E73",
    "jl": "#CC79A7",
}

figure, ax = plt.subplots(layout="constrained")
ratios = [levattn.leverage_scores(K, method=method) / exact for method in methods]
violins = ax.violinplot(ratios, orientation="horizontal", showextrema=True)
ax.axvline(1, color="black", lw=1, ls="--")
ax.set_yticks(range(1, len(methods) + 1), labels=list(methods))
ax.set(xscale="log", xlabel="approximate score / exact score")
ax.set_xticks([0.5, 1, 2, 5], labels=["0.5", "1", "2", "5"])
ax.set_xticks([], minor=True)
ax.grid(alpha=0.25, lw=0.5)
for method, ratio in zip(methods, ratios, strict=True):
    print(f"{method:12s} {ratio.min():.2f} to {ratio.max():.2f}")

# %%
# Supersets
# ---------
#
# The picture shows the number of keys in the superset of each method, beside the exact set. The supersets lie on or
# above the black line. `levattn.UniversalSet.rechecked` computes the exact scores of the remaining keys, and so
# makes the set exact again.

epsilons = np.geomspace(0.002, 0.5, 13)
figure, ax = plt.subplots(layout="constrained")
ax.plot(
    epsilons,
    [len(levattn.universal_set(K, e)) for e in epsilons],
    color="black",
    lw=2,
    label="exact",
)
for (method, color), dashes in zip(
    methods.items(), ("-", "--", "-.", ":"), strict=True
):
    sizes = [len(levattn.universal_set(K, e, method=method)) for e in epsilons]
    ax.plot(epsilons, sizes, color=color, lw=1.5, ls=dashes, label=method)
ax.set(xscale="log", xlabel="ε", ylabel="keys of the set")
ax.set_yscale("symlog", linthresh=1)  # which has a place for 0
ax.set_ylim(0, 2 * len(K))
ax.set_xticks([0.002, 0.01, 0.1, 0.5], labels=["0.002", "0.01", "0.1", "0.5"])
ax.set_xticks([], minor=True)
ax.grid(alpha=0.25, lw=0.5)
legend = ax.legend()

# %%
# At 32 columns none of these methods is faster than the exact scores; that begins at thousands of columns.

here = levattn.universal_set(K, 0.1).mask
for method in methods:
    missed = np.count_nonzero(here & ~levattn.universal_set(K, 0.1, method=method).mask)
    print(f"keys of the exact set that the superset by {method} lacks: {missed}")
