"""
Keys that come in chunks
========================

A stream of keys is read once. The state holds few of them, however many came, and its universal set equals the set of
all keys in memory. States of different workers merge, and travel as bytes.
"""

# %%
# One pass
# --------
#
# :py:class:`~levattn.StreamingUniversalSet` keeps the second moment of all keys, and each key until its leverage score
# among the keys *so far* is below ε. A score never rises as keys are added, so a dropped key could not come back.

import matplotlib.pyplot as plt
import numpy as np

import levattn

epsilon = 0.02
n, d = 200_000, 32
K = levattn.datasets.planted(n, d, strength=30, rng=0).keys.astype(np.float32)

state = levattn.StreamingUniversalSet(epsilon)
rows, held, sizes = [], [], []
for start in range(0, n, 1000):
    state = state.update(
        K[start : start + 1000], payload=np.arange(start, start + 1000)
    )
    rows.append(state.n)
    held.append(state.held)
    sizes.append(len(state.result()))

streamed = state.result()
print(streamed)
print(
    f"most keys held after a chunk: {max(held)} of {n}; bound {2 * d / epsilon + 2048:.0f}"
)

# %%
# The picture shows held keys against rows seen. A state holds at most 2d/ε keys, and at most one block of 2048 rows
# that it has not yet judged. The set itself has at most rank/ε keys at all times. So the blue line stays below the
# dashed bound, while the rows seen keep growing.

figure, ax = plt.subplots(layout="constrained")
ax.plot(rows, rows, color="#8C8C8C", ls="-.", label="rows seen")
ax.axhline(
    2 * d / epsilon + 2048, color="#D55E00", ls="--", lw=1.5, label="bound 2d/ε + 2048"
)
ax.plot(rows, held, color="#0072B2", lw=2, label="keys held")
ax.plot(rows, sizes, color="#009E73", lw=2, label="universal set so far")
ax.set_yscale("symlog", linthresh=1)  # which has a place for 0
ax.set(xscale="log", ylim=(0, None), xlabel="rows seen", ylabel="keys")
ax.grid(alpha=0.25, lw=0.5)
legend = ax.legend()

# %%
# The same as in memory
# ---------------------
#
# The payload comes back for the keys of the set. Here it has row numbers; usually it has values or token ids.

in_memory = levattn.universal_set(K, epsilon)
print(
    "the keys of the set in memory:",
    np.array_equal(streamed.indices, in_memory.indices),
)
print(
    "payloads belong to their keys:", np.array_equal(streamed.payload, streamed.indices)
)
print("rows:", streamed.indices)

# %%
# The sizes of the chunks do not change a bit of the result:

whole = levattn.StreamingUniversalSet(epsilon).update(K).result()
print(
    "scores with the same bits, in one chunk:",
    np.array_equal(whole.member_scores, streamed.member_scores),
)

# %%
# Two workers, and bytes
# ----------------------
#
# Each worker has half of the rows. ``row_start`` gives their rows different numbers, and states merge in any order.
# The bytes hold a header, arrays and a checksum, no pickle; ``save`` and ``load`` do the same with a file.

first = levattn.StreamingUniversalSet(epsilon, row_start=0).update(K[: n // 2])
second = levattn.StreamingUniversalSet(epsilon, row_start=n // 2).update(K[n // 2 :])

message = second.to_bytes()
print(
    f"the second half has {K[n // 2 :].nbytes / 2**20:.1f} MiB, its state {len(message) / 2**20:.2f} MiB"
)

merged = levattn.StreamingUniversalSet.from_bytes(message).merge(first).result()
print(
    "merged, the keys of the set in memory:",
    np.array_equal(merged.indices, in_memory.indices),
)
print(
    f"largest relative difference of scores: {np.abs(merged.member_scores / streamed.member_scores - 1).max():.1e}"
)

# %%
# At any time the state promises the set of all rows so far. It does not promise scores of dropped keys, which take a
# second reading. Nor does it promise less memory than all keys where 2d/ε exceeds their number.
