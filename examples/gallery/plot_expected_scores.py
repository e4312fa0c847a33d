r"""
Sets for your queries
=====================

A universal set serves every possible query. The queries of a real encoder are few and alike. Half of them predict the
keys to which the other half attends, and the number of keys that suffices to miss nothing.
"""

# %%
# Which keys get the attention
# ----------------------------
#
# The scores see every second query of the text, and the softmax attention of the others is measured. The picture
# compares four orders of the keys of each of 72 heads. They are by leverage scores (whatever the queries), by norm
# (the shortest first, which is best for these heads), by expected scores from the queries seen, and in hindsight by
# the measured attention. Expected scores come close to hindsight.

import matplotlib.pyplot as plt
import numpy as np

import levattn

heads = levattn.datasets.minilm()
Q, K = heads.scale * heads.queries.astype(np.float64), heads.keys.astype(np.float64)
seen, new = Q[..., ::2, :], Q[..., 1::2, :]
softmax = levattn.Softmax()  # of queries like those given, so without a radius

logits = new @ K.swapaxes(-1, -2)
A = np.exp(logits - logits.max(axis=-1, keepdims=True))
A /= A.sum(axis=-1, keepdims=True)

orders = {
    "hindsight": A.mean(axis=-2),
    "expected scores": levattn.expected_scores(K, seen, f=softmax),
    "leverage scores": levattn.leverage_scores(K, center=True),
    "shortest keys": -np.linalg.norm(K, axis=-1),
}
n = K.shape[-2]
shares = np.arange(1, n + 1) / n

figure, ax = plt.subplots(layout="constrained")
styles = {"hindsight": ("#8C8C8C", ":"), "expected scores": ("#D55E00", "-")}
styles |= {"leverage scores": ("#0072B2", "--"), "shortest keys": ("#009E73", "-.")}
for name, scores in orders.items():
    order = np.argsort(-scores, axis=-1)
    captured = (
        np.take_along_axis(A.mean(axis=-2), order, axis=-1)
        .cumsum(axis=-1)
        .mean(axis=(0, 1))
    )
    ax.plot(
        shares, captured, color=styles[name][0], ls=styles[name][1], lw=2, label=name
    )
    print(
        f"{name:16s} a tenth of the keys holds {captured[n // 10]:.1%}, a third {captured[n // 3]:.1%}"
    )
ax.plot([0, 1], [0, 1], color="black", lw=0.8, label="random keys")
ax.set(
    xlabel="share of the keys",
    ylabel="captured softmax attention of new queries",
    xlim=(0, 1),
    ylim=(0, 1),
)
ax.grid(alpha=0.25, lw=0.5)
legend = ax.legend(loc="lower right", fontsize="small")

# %%
# How many keys to miss nothing
# -----------------------------
#
# ``coverage=`` says how often a new query must find *all* the keys to which it gives at least ε. A quarter of the
# queries orders the keys, and a quarter sets the number of keys, by conformal prediction. The method assumes only that
# new queries are exchangeable with the sample, which holds for places of one text drawn at random.

epsilon = 0.05
rng = np.random.default_rng(0)
order = rng.permutation(Q.shape[-2])
seen, new = Q[..., order[:256], :], Q[..., order[256:], :]
logits = new @ K.swapaxes(-1, -2)
A = np.exp(logits - logits.max(axis=-1, keepdims=True))
A /= A.sum(axis=-1, keepdims=True)

coverages = [0.8, 0.9, 0.95]
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
for coverage in coverages:
    found = levattn.covering_set(K, seen, epsilon, f=softmax, coverage=coverage)
    missed = (epsilon <= A) & ~found.mask[..., None, :]
    reached = 1 - missed.any(axis=-1).mean(axis=-1)
    sizes = np.sort(found.sizes.ravel()) / n
    left.plot(
        np.arange(1, sizes.size + 1), sizes, lw=1.5, label=f"coverage {coverage:g}"
    )
    right.plot(
        [coverage] * reached.size,
        reached.ravel(),
        "o",
        ms=3,
        color="#0072B2",
        alpha=0.3,
    )
    right.plot(coverage, reached.mean(), "D", ms=7, color="#D55E00")
    print(
        f"coverage {coverage:g}: {sizes.mean():.1%} of the keys, reached {reached.mean():.1%}"
    )
right.plot(coverages, coverages, color="#8C8C8C", ls=":", label="asked for")
left.set(xlabel="heads, by their size", ylabel="share of the keys", ylim=(0, 1))
right.set(xlabel="coverage asked for", ylabel="coverage reached, heads and mean")
for ax in (left, right):
    ax.grid(alpha=0.25, lw=0.5)
legend = left.legend(fontsize="small")
legend = right.legend(fontsize="small", loc="lower right")

# %%
# The left picture shows the size of the set for each head. The right picture shows the reached coverage of the heads
# (dots) and their mean (diamonds). The promise is for the mean over draws of the queries, so single heads lie on both
# sides of the dotted line. Where many queries need equally many keys (often none), the reached coverage exceeds the
# requested one.

# %%
# Queries that change
# -------------------
#
# Later queries of a text need not be like earlier ones. ``AdaptiveCoverage`` looks at each query after serving it, and
# adjusts the number of keys. Here the queries of one head grow by half after a while. If too many queries in a row
# lacked a key, the next ones get all n. In the picture the set grows during the longer queries (gray) and shrinks
# afterward.

head, f = K[5, 4], softmax
served = np.concatenate([new[5, 4], 1.5 * new[5, 4], new[5, 4]])
found = levattn.covering_set(head, seen[5, 4], epsilon, f=f, coverage=0.9)
following = levattn.AdaptiveCoverage(head, found, rate=0.03)
sizes, covered = [], []
for q in served:
    sizes.append(following.size)
    covered.append(following.update(q[None])[0])
logits = served @ head.T
weights = np.exp(logits - logits.max(axis=1, keepdims=True))
weights /= weights.sum(axis=1, keepdims=True)
plain = ~((epsilon <= weights) & ~found.mask).any(axis=1)
third = len(new[5, 4])
print(f"longer queries: the set as it was covers {plain[third : 2 * third].mean():.1%}")
print(f"and the one that follows {np.mean(covered[third : 2 * third]):.1%}")

figure, ax = plt.subplots(layout="constrained")
ax.plot(sizes, color="#D55E00", lw=1.5, label="keys of the set that follows")
ax.axhline(
    len(found),
    color="#0072B2",
    ls="--",
    lw=1.5,
    label="keys of the set with coverage 0.9",
)
ax.axvspan(third, 2 * third, color="#8C8C8C", alpha=0.15, lw=0, label="longer queries")
ax.set(
    xlabel="query", ylabel="keys", yscale="log", ylim=(1, 2 * n), xlim=(0, len(served))
)
ax.grid(alpha=0.25, lw=0.5)
legend = ax.legend(fontsize="small", loc="upper right")
