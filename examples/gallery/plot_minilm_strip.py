r"""
Tokens of a text, shaded by leverage score
==========================================

The keys of two heads of a pretrained sentence encoder, all-MiniLM-L6-v2, over the Gettysburg Address and the opening
of the Declaration of Independence. Of all heads, one has the flattest leverage scores, and the other the least flat.
"""

# %%
# A flat head and a peaked one
# ----------------------------
#
# The scores of a head sum to its rank. The example orders all 72 heads by the share of that sum on their 32 largest
# scores.

import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import spearmanr

import levattn
from levattn.plots import LeverageSpectrumDisplay, TokenStripDisplay

heads = levattn.datasets.minilm()
keys = heads.keys.astype(np.float64)
scores = levattn.leverage_scores(keys)

top = -np.sort(-scores, axis=-1)[..., :32].sum(axis=-1) / scores.sum(axis=-1)
chosen = {
    "flat": np.unravel_index(top.argmin(), top.shape),
    "peaked": np.unravel_index(top.argmax(), top.shape),
}

# %%
# The picture shows the first words, shaded by their scores in these heads. Marks show the universal set of 0.1: the
# tokens that some query can give a tenth of its attention, with :math:`f(x) = x^2`.

epsilon, shown = 0.1, 150
universal = levattn.universal_set(keys, epsilon)

figure, axes = plt.subplots(2, 1, figsize=(8.4, 6.4), layout="constrained")
for ax, (name, head) in zip(axes, chosen.items(), strict=True):
    TokenStripDisplay.from_scores(
        heads.tokens[:shown],
        scores[head][:shown],
        kept=universal.mask[head][:shown],
        columns=80,
        ax=ax,
    )
    ax.set_title(
        f"{name}: layer {head[0]}, head {head[1]}", loc="left", fontsize="medium"
    )

# %%
# The next picture has the scores of all tokens in descending order. The curve falls slowly in the flat head, and fast
# in the peaked one.

figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.8), sharey=True, layout="constrained")
for ax, (name, head) in zip(axes, chosen.items(), strict=True):
    LeverageSpectrumDisplay.from_scores(
        scores[head], epsilon=epsilon, rank=universal.rank[head], ax=ax
    )
    ax.set_title(f"{name}: layer {head[0]}, head {head[1]}", fontsize="medium")

for name, head in chosen.items():
    first = [heads.tokens[j] for j in np.argsort(-scores[head])[:10]]
    print(
        f"{name:6s} rank {universal.rank[head]}, 32 largest {top[head]:.2f} of the sum, |U| = {universal.sizes[head]}"
    )
    print(f"       largest: {' '.join(first)}")

# %%
# Repeated words
# --------------
#
# Similar keys share a direction, and each scores less if there are more of them. The numbers are rank correlations
# between the score of a token and its count in the text:

tokens, inverse, counts = np.unique(
    heads.tokens, return_inverse=True, return_counts=True
)
occurs = counts[inverse]
for name, head in chosen.items():
    print(f"{name:6s} head: {spearmanr(scores[head], occurs).statistic:+.2f}")
print(
    "medians of the layers, first to last:",
    *(
        f"{np.median([spearmanr(s, occurs).statistic for s in layer]):+.2f}"
        for layer in scores
    ),
)

# %%
# Possible and real attention
# ---------------------------
#
# A score is the largest attention that *any* query can give. The queries of this text are only some of these. The
# numbers are the largest score that one of them gives to any token, under :math:`x^2` and under the softmax of the
# model. Beside it stands the rank correlation between the mean attention that tokens receive and their leverage
# scores:

for name, head in chosen.items():
    Q, K = heads.queries[head].astype(np.float64), keys[head]
    squares = (Q @ K.T) ** 2
    squares /= squares.sum(axis=1, keepdims=True)
    logits = heads.scale * Q @ K.T
    softmax = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax /= softmax.sum(axis=1, keepdims=True)
    for kind, A in (("x²", squares), ("softmax", softmax)):
        correlation = spearmanr(scores[head], A.mean(axis=0)).statistic
        print(
            f"{name:6s} head, {kind:7s}: largest {A.max():.3f}, correlation {correlation:+.2f}"
        )

# %%
# Leverage tells which keys can be heavy for some query. It tells neither which tokens are important in the text, nor
# where the model attends: it does not see the queries, and the promise does not cover softmax.
