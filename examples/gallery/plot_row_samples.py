r"""
Samples of rows
===============

A sample of rows stands for all rows in sums of squares. Drawn by leverage scores, it keeps the promise of a theorem.
Equal probabilities lose the rows that no other row resembles.
"""

# %%
# Distortion by size
# ------------------
#
# Two of the 20 000 rows have a column of their own. The picture shows the measured distortion of ten samples of each
# size, and the distortion that the theorem promises with probability 0.99. A sample with neither of the two rows has
# a distortion of 1, and a small sample with one of them gives it too large a weight.

import matplotlib.pyplot as plt
import numpy as np

import levattn

K = np.random.default_rng(0).standard_normal((20_000, 16))
K[2:, 15] = 0

sizes = np.geomspace(300, 10_000, 12).astype(int)
ways = {
    "equal probabilities": ("#D55E00", "v", {"uniform": 1}),
    "leverage scores": ("#0072B2", "o", {}),
}
figure, ax = plt.subplots(layout="constrained")
for name, (color, marker, options) in ways.items():
    samples = [
        [levattn.sample_rows(K, m, rng=seed, **options) for seed in range(10)]
        for m in sizes
    ]
    found = [[sample.distortion for sample in some] for some in samples]
    ax.plot(sizes, found, color=color, marker=marker, ms=4, ls="", alpha=0.5)
    ax.plot([], [], color=color, marker=marker, ls="", label=name)
    print(f"{name}: {np.min(found):.2f} to {np.max(found):.2f}")
promised = [some[0].promised for some in samples]
ax.plot(sizes, promised, color="black", ls="--", label="promised by leverage")
ax.set(xscale="log", yscale="log", xlabel="rows", ylabel="distortion")
ax.set_xticks([300, 1000, 3000, 10_000], labels=["300", "1000", "3000", "10 000"])
ax.set_xticks([], minor=True)
ax.grid(alpha=0.25, lw=0.5)
legend = ax.legend()

# %%
# One pass
# --------
#
# `levattn.StreamingRowSample` decides about each row by a random number of its own, and drops a row for good once its
# score among the rows so far is too small. The number of rows held stays bounded, and the sample is the one of all
# rows at once.

state = levattn.StreamingRowSample(1000, rng=1)
for chunk in np.array_split(K, 40):
    state.update(chunk)
whole = levattn.StreamingRowSample(1000, rng=1).update(K).result()
sample = state.result()
print(f"{len(sample)} of {state.n} rows, {state.held} held")
print("the rows of one chunk:", np.array_equal(sample.indices, whole.indices))
