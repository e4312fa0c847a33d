r"""
Tokens of a text, shaded by leverage score
==========================================

The keys of two heads of a pretrained sentence encoder, all-MiniLM-L6-v2, over the Gettysburg Address and the opening
of the Declaration of Independence: that in which the leverage scores are flattest, and that in which they are least
so.
"""

# %%
# A flat head and a peaked one
# ----------------------------
#
# All 72 heads by what share of the sum of the scores their 32 largest have. The scores of a head sum to its rank.

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
# The first words, shaded by their scores in these heads. The universal set of 0.1 is marked: the tokens that some
# query can give a tenth of its attention, with :math:`f(x) = x^2`.

epsilon, shown = 0.1, 150
universal = levattn.universal_set(keys, epsilon)

figure, axes = plt.subplots(2, 1, figsize=(8.4, 6.4), layout="constrained")
for ax, (name, head) in zip(axes, chosen.items(), strict=True):
    TokenStripDisplay.from_scores(
        heads.tokens[:shown], scores[head][:shown], kept=universal.mask[head][:shown], columns=80, ax=ax
    )
    ax.set_title(f"{name}: layer {head[0]}, head {head[1]}", loc="left", fontsize="medium")

# %%
# The scores of both heads in descending order, of all tokens.

figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.8), sharey=True, layout="constrained")
for ax, (name, head) in zip(axes, chosen.items(), strict=True):
    LeverageSpectrumDisplay.from_scores(scores[head], epsilon=epsilon, rank=universal.rank[head], ax=ax)
    ax.set_title(f"{name}: layer {head[0]}, head {head[1]}", fontsize="medium")

for name, head in chosen.items():
    first = [heads.tokens[j] for j in np.argsort(-scores[head])[:10]]
    print(
        f"{name:6s} rank {universal.rank[head]}, 32 largest {top[head]:.2f} of the sum, |U| = {universal.sizes[head]}"
    )
    print(f"       largest: {' '.join(first)}")

# %%
# Words that come again
# ---------------------
#
# Keys that resemble each other share a direction, and each scores the less the more there are. Rank correlations of
# the score of a token with how often it occurs in the text:

tokens, inverse, counts = np.unique(heads.tokens, return_inverse=True, return_counts=True)
occurs = counts[inverse]
for name, head in chosen.items():
    print(f"{name:6s} head: {spearmanr(scores[head], occurs).statistic:+.2f}")
print(
    "medians of the layers, first to last:",
    *(f"{np.median([spearmanr(s, occurs).statistic for s in layer]):+.2f}" for layer in scores),
)

# %%
# What can be heavy, and what is
# ------------------------------
#
# A score is the largest attention that *any* query can give. The queries of this text are others. The largest score
# that one of them gives to any token, under :math:`x^2` and under the softmax of the model, and the rank correlation
# of what tokens receive on average with their leverage scores:

for name, head in chosen.items():
    Q, K = heads.queries[head].astype(np.float64), keys[head]
    squares = (Q @ K.T) ** 2
    squares /= squares.sum(axis=1, keepdims=True)
    logits = heads.scale * Q @ K.T
    softmax = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax /= softmax.sum(axis=1, keepdims=True)
    for kind, A in (("x²", squares), ("softmax", softmax)):
        correlation = spearmanr(scores[head], A.mean(axis=0)).statistic
        print(f"{name:6s} head, {kind:7s}: largest {A.max():.3f}, correlation {correlation:+.2f}")

# %%
# Leverage says what can be heavy for some query. It does not say what is important in the text, nor what the model
# attends to: it does not see the queries, and the promise does not cover softmax.
