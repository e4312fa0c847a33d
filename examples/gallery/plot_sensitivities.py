r"""
Bounds for other attention functions
====================================

For functions other than :math:`x^2` the largest attention score of a key takes an optimization. The library bounds it
from above, and a set made of bounds misses nothing. This example draws the bounds beside the exact values, which are
known for few keys.
"""

# %%
# Few keys, and their sensitivities
# ---------------------------------
#
# :py:func:`~levattn.exact_sensitivities` brackets the sensitivity of each key. Each bound of
# :py:func:`~levattn.sensitivities` lies above it, and ``"auto"`` takes the least of them, key by key. In the picture
# no mark lies below the black line, the sensitivities themselves.

import matplotlib.pyplot as plt
import numpy as np

import levattn

few = (
    np.random.default_rng(0).standard_normal((60, 3))
    * np.geomspace(3, 0.3, 60)[:, None]
)
functions = {"|x|": 1, "|x|³": 3, "x⁴": 4}
styles = {
    "leverage": ("#0072B2", "o"),
    "lewis": ("#D55E00", "s"),
    "lift": ("#009E73", "^"),
}

figure, axes = plt.subplots(1, 3, figsize=(10, 3.8), layout="constrained", sharey=True)
for ax, (name, p) in zip(axes, functions.items(), strict=True):
    exact = levattn.exact_sensitivities(few, p)
    order = np.argsort(-exact.lower)
    for method in levattn.sensitivities(few, p).certificate:
        color, marker = styles[method]
        upper = levattn.sensitivities(few, p, method=method).upper
        ax.plot(upper[order], color=color, marker=marker, ms=4, lw=0, label=method)
        print(
            f"{name:4s} {method:8s} sum {upper.sum():5.2f}, of the sensitivities {exact.lower.sum():.2f}"
        )
    ax.plot(exact.lower[order], color="black", lw=2, label="sensitivity")
    ax.set(title=f"f(x) = {name}", xlabel="keys by sensitivity", yscale="log")
    ax.grid(alpha=0.25, lw=0.5)
axes[0].set_ylabel("largest attention score")
handles, labels = axes[2].get_legend_handles_labels()
legend = axes[0].legend(handles, labels, loc="lower left")

# %%
# Sets for several functions
# --------------------------
#
# This example takes one set of keys, of which five are long, under functions of different growth. The block bound
# serves every function that grows at most as fast as :math:`x^2`, so the sets of these functions are equal. For
# softmax the set depends on the allowed length of the queries.

epsilon = 0.1
K = np.random.default_rng(1).standard_normal((2000, 8))
K[:5] *= 30
for f in (
    1.5,
    2,
    4,
    levattn.Huber(1.0),
    levattn.Tukey(),
    levattn.Fair(),
    levattn.Softmax(0.5),
    levattn.Softmax(2.0),
):
    found = levattn.universal_set(K, epsilon, f=f)
    print(
        f"{f!s:36s} {len(found):4d} keys, {found.guarantee}, by {', '.join(found.certificate)}"
    )

# %%
# A bound above the exact value keeps keys that cannot be heavy, but it never loses one. For softmax and long queries
# the set leaves out next to nothing: :doc:`plot_choose_epsilon` shows how much of softmax a set for :math:`x^2`
# captures.
