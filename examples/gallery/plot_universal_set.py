r"""
The universal set of a key matrix
=================================

Of 4096 keys, eight can receive a tenth of some query's attention. Their leverage scores show it, but their norms do
not, and no query has to be known. This is attention with :math:`f(x) = x^2`: query i gives key j the score
:math:`A_{ij} = \langle q_i, k_j\rangle^2 / \sum_l \langle q_i, k_l\rangle^2`.
"""

# %%
# Keys with a few planted ones
# ----------------------------
#
# Each planted key has a direction that only noise shares with it. The others are spread over half of the dimensions,
# and most of them are longer.

import matplotlib.pyplot as plt
import numpy as np

import levattn
from levattn.plots import HeavyMapDisplay, LeverageSpectrumDisplay

epsilon = 0.1
model = levattn.datasets.planted(4096, 32, rng=0)
K = model.keys

universal = levattn.universal_set(K, epsilon)
print(universal)
print(
    "the planted keys, and no others:", np.array_equal(universal.indices, model.indices)
)

# %%
# Norms and leverage scores
# -------------------------
#
# The leverage score :math:`\tau_j = k_j^\top (K^\top K)^+ k_j` is the largest attention that any query can give key j.
# The set consists of the keys with :math:`\tau_j \ge \varepsilon`. In the picture these keys lie above the dashed
# line, although most other keys are longer.

norms = np.linalg.norm(K, axis=1)
scores = np.asarray(universal.scores)

figure, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
light = ~universal.mask
ax.scatter(
    norms[light],
    scores[light],
    s=8,
    color="#8C8C8C",
    alpha=0.5,
    lw=0,
    label="other keys",
)
ax.scatter(
    norms[universal.mask],
    scores[universal.mask],
    s=50,
    color="#D55E00",
    marker="D",
    label="universal set",
)
ax.axhline(epsilon, color="#0072B2", lw=1.5, ls="--", label=f"ε = {epsilon}")
ax.set(yscale="log", xlabel="norm of the key", ylabel="leverage score")
ax.grid(alpha=0.25, lw=0.5)
ax.legend(loc="center right")

longest = np.argsort(norms)[::-1]
print(
    f"keys that are longer than every key of the set: {np.count_nonzero(norms > norms[universal.mask].max())}"
)
print(
    f"keys of the set among the {len(universal)} longest: {universal.mask[longest[: len(universal)]].sum()}"
)

# %%
# The next picture has all scores in descending order. They add up to the rank of K, so at most rank/ε of them reach ε,
# however many keys there are. The vertical line is this bound; the set is much smaller.

display = LeverageSpectrumDisplay.from_scores(
    scores, epsilon=epsilon, rank=universal.rank
)
print(f"sum of the scores {scores.sum():.6f}, rank {universal.rank}")

# %%
# The worst query of each key
# ---------------------------
#
# The query :math:`(K^\top K)^+ k_j` gives key j exactly its leverage score, so the threshold cannot be improved. Brute
# force confirms this for every key:


def attention(Q):
    """Return the full m × n matrix."""
    products = (Q @ K.T) ** 2
    return products / products.sum(axis=1, keepdims=True)


worst = levattn.datasets.adversarial_queries(K)
attained = np.array([attention(worst[j : j + 1])[0, j] for j in range(len(K))])
print(
    f"largest difference of attained score and leverage score: {np.abs(attained - scores).max():.1e}"
)
print(f"keys that reach ε by their worst query: {np.flatnonzero(attained >= epsilon)}")
print(f"keys of the set:                        {universal.indices}")

# %%
# Heavy entries of given queries
# ------------------------------
#
# :py:func:`~levattn.heavy_attention` looks at the keys of the set alone. Its entries are scores of the full attention,
# because the normalizer of a query follows from the d × d second moment of the keys. Half of these queries ask for a
# planted direction, the others for none in particular. The picture shows all heavy entries on columns of the set.

rng = np.random.default_rng(1)
Q = np.concatenate([model.queries.repeat(8, axis=0), rng.standard_normal((64, 32))])
Q += 0.02 * rng.standard_normal(Q.shape)
heavy = levattn.heavy_attention(Q, K, epsilon, universal=universal)

full = attention(Q)
is_heavy = full >= epsilon
print(
    f"entries found: {heavy.entries.nnz}; entries of at least ε by brute force: {np.count_nonzero(is_heavy)}"
)
print(
    f"largest difference of these entries: {np.abs(heavy.entries - np.where(is_heavy, full, 0)).max():.1e}"
)

display = HeavyMapDisplay.from_attention(full, epsilon, universal)

# %%
# Other choices of as many keys
# -----------------------------
#
# Other choices of as many keys would miss entries. The choices are the longest keys, the keys of largest mean
# attention over *other* queries, and random keys (mean of 1000 draws).

size = len(universal)
columns = np.count_nonzero(is_heavy, axis=0)
others = rng.standard_normal((256, 32))
drawn = np.mean(
    [columns[rng.choice(len(K), size, replace=False)].sum() for _ in range(1000)]
)
found = {
    "universal set": columns[universal.indices].sum(),
    "longest keys": columns[longest[:size]].sum(),
    "mean attention": columns[np.argsort(-attention(others).mean(axis=0))[:size]].sum(),
    "random keys": drawn,
}
for name, count in found.items():
    print(f"{name:15s} {count:6.2f} of {columns.sum()} heavy entries")

# %%
# The promise is about all queries, including the worst ones: a key of the set need not be heavy for your queries. And
# it is about :math:`x^2`; for softmax see :doc:`plot_choose_epsilon`.
