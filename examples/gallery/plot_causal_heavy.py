r"""
Heavy keys while decoding
=========================

A decoder appends a key at each step and attends to the keys so far with a new query. `~levattn.CausalUniversalSet`
returns every attention score of at least ε over the whole prefix, and holds only the keys that can still receive one.
This is attention with :math:`f(x) = x^2`.
"""

# %%
# Keys that come one after another
# --------------------------------
#
# Most keys lie in half of the dimensions. Now and then a key points out of these, in one of a few directions, which
# later keys share. Each query asks for the direction of one such key, drawn from the keys so far.

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LinearSegmentedColormap

import levattn

n, d = 1500, 16
epsilon = 0.1
rng = np.random.default_rng(0)

K = np.zeros((n, d))
K[:, :8] = rng.standard_normal((n, 8))
rare = np.flatnonzero(rng.random(n) < 0.025)
K[rare] = 3 * np.eye(d)[rng.integers(8, d, len(rare))]
K += 0.03 * rng.standard_normal((n, d))

Q = rng.standard_normal((n, d))
for t in range(rare[0], n):
    Q[t] = K[rng.choice(rare[rare <= t])] + 0.2 * rng.standard_normal(d)

# %%
# One step at a time
# ------------------
#
# ``update`` appends a key, and ``heavy`` returns the heavy entries of a query over all keys so far. The picture draws
# them as points, with a column for each query. A key stays visible as long as few others share its direction. Then it
# fades, and the state drops it.

state = levattn.CausalUniversalSet(epsilon)
held, found = np.zeros(n, int), []
for t in range(n):
    state = state.update(K[t : t + 1])
    held[t] = state.held
    found.append(state.heavy(Q[t : t + 1]))

query = np.repeat(np.arange(n), [len(heavy.indices) for heavy in found])
key = np.concatenate([heavy.indices for heavy in found])
score = np.concatenate([heavy.scores for heavy in found])

figure, ax = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
ax.fill([0, n, n], [0, n, 0], color="#8C8C8C", alpha=0.12, lw=0, label="keys so far")
blues = LinearSegmentedColormap.from_list("blues", ["#56B4E9", "#0072B2", "black"])
points = ax.scatter(query, key, c=score, s=10, cmap=blues, vmin=epsilon, vmax=1, lw=0)
figure.colorbar(points, ax=ax, label="attention score", pad=0.02)
ax.set(
    xlabel="position of the query",
    ylabel="position of the key",
    xlim=(0, n),
    ylim=(0, n),
)
ax.legend(loc="upper left", frameon=False)
print(f"heavy entries found: {len(score)}")

# %%
# Brute force checks the result: how many entries of at least ε are missed, how many are below ε, and how large is the
# error of the scores? `~levattn.causal_heavy_attention` takes all queries at once and returns the same entries.

A = np.tril((Q @ K.T) ** 2)
A /= A.sum(axis=1, keepdims=True)
here = np.zeros((n, n), bool)
here[query, key] = True
together = levattn.causal_heavy_attention(Q, K, epsilon).entries

print(f"missed:            {np.count_nonzero(A[~here] >= epsilon)}")
print(f"below ε:           {np.count_nonzero(A[here] < epsilon * (1 - 1e-9))}")
print(f"largest error:     {np.abs(A[query, key] - score).max():.1e}")
print(f"same in one call:  {np.array_equal(together.toarray() > 0, here)}")

# %%
# The held keys
# -------------
#
# The state drops a key once its leverage score among the keys so far is below ε, because that score never rises again.
# At most rank/ε keys have a score above ε. The state judges keys in groups of max(64, d), which makes the saw teeth in
# the picture.

figure, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
ax.plot(np.arange(1, n + 1), color="#8C8C8C", ls=":", lw=2, label="all keys")
ax.axhline(
    d / epsilon + max(64, d),
    color="#D55E00",
    ls="--",
    lw=1.5,
    label="bound: rank/ε, and 64 not yet judged",
)
ax.plot(held, color="#0072B2", lw=1.5, label="keys held")
ax.set(xlabel="position", ylabel="keys", yscale="log")
ax.grid(alpha=0.25, lw=0.5)
ax.legend(loc="lower right")
print(f"held at the end: {held[-1]} of {n} keys; most at any time: {held.max()}")

# %%
# Online and final leverage scores
# --------------------------------
#
# The online leverage score of a key is its leverage score among the keys up to it. This is the largest attention that
# any query can give the key at its arrival. The score among all keys is never larger: in the picture no key's brown
# point lies above its blue one.

online = levattn.online_leverage_scores(K)
final = levattn.leverage_scores(K)

figure, ax = plt.subplots(figsize=(6.4, 4.8), layout="constrained")
curves = (
    ("online: among the keys so far", online, "#0072B2", "o"),
    ("among all keys", final, "#BF8300", "v"),
)
for label, scores, color, marker in curves:
    sizes = np.where(scores >= epsilon, 20, 6)
    ax.scatter(
        np.arange(n), scores, s=sizes, color=color, marker=marker, lw=0, label=label
    )
ax.axhline(epsilon, color="#D55E00", lw=1.2, ls="--", label=f"ε = {epsilon}")
ax.set(xlabel="position of the key", ylabel="leverage score", yscale="log")
ax.grid(alpha=0.25, lw=0.5)
ax.legend(loc="lower left", fontsize="small")

print(f"keys of at least ε when they come: {np.count_nonzero(online >= epsilon)}")
print(f"and among all keys:                {np.count_nonzero(final >= epsilon)}")
print(f"largest final less online score:   {np.max(final - online):.1e}")

# %%
# The promise is about single keys: each dropped key stays below ε, for every query and :math:`f(x) = x^2`. Together
# the dropped keys can hold most of the mass. ``captured_mass`` gives, query by query, the mass of the held keys.

captured = np.array([heavy.captured_mass[0] for heavy in found])
print(f"mass of the keys held: mean {captured.mean():.2f}, least {captured.min():.2f}")
