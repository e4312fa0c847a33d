"""
Keys on a dask cluster
======================

Chunks of keys lie on the workers of a cluster. Each worker turns its chunks into states, and the states merge in a
tree. The resulting set equals the set of all keys in memory.
"""

# %%
# A cluster
# ---------
#
# Two workers in threads of this process stand for a real cluster; ``Client`` takes the address of a real one just as
# well.

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from dask.distributed import Client, LocalCluster

import levattn
from levattn.distributed.dask import from_keys, leverage_scores, universal_set

cluster = LocalCluster(
    n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
)
client = Client(cluster)

# %%
# Keys in chunks
# --------------
#
# There are six files of keys, as several processes would write them. Each worker reads the chunks that it works on.
# Any dask array works instead. Chunks may have any size, but should have many more rows than d/ε, because a state
# holds about that many rows.

epsilon = 0.1
K = levattn.datasets.planted(60_000, 32, strength=20, rng=0).keys
folder = tempfile.TemporaryDirectory()
for i, shard in enumerate(np.split(K, 6)):
    np.save(Path(folder.name) / f"shard-{i}.npy", shard)

keys = from_keys(levattn.open_keys(folder.name, chunk_rows=10_000))
print(f"{keys.numblocks[0]} chunks of {keys.chunksize[0]} keys")

# %%
# The set, computed on the cluster
# --------------------------------

found = universal_set(keys, epsilon, client=client)
print(found)

in_memory = levattn.universal_set(K, epsilon)
print(
    "the keys of the set in memory:", np.array_equal(found.indices, in_memory.indices)
)
print(
    f"largest relative difference of scores: {np.abs(found.member_scores / in_memory.member_scores - 1).max():.1e}"
)

# %%
# The scores of all keys
# ----------------------
#
# The scores take a second reading of the chunks. They are a dask array again, in the chunks of the keys. So nothing of
# size n comes to the client unless you ask for it, as here for the picture. The picture shows the scores of all six
# chunks: only the keys of the universal set lie above ε.

scores = leverage_scores(keys)
values = client.compute(scores).result()
print(f"sum of the scores {values.sum():.6f}, rank {found.rank}")

figure, ax = plt.subplots(layout="constrained")
colors = ("#56B4E9", "#8C8C8C")
for i, (start, rows) in enumerate(
    zip(np.cumsum((0, *keys.chunks[0])), keys.chunks[0], strict=False)
):
    at = np.arange(start, start + rows)
    ax.scatter(at, values[at], s=3, color=colors[i % 2], lw=0, rasterized=True)
    ax.text(
        start + rows / 2, 1.15, f"chunk {i}", ha="center", va="bottom", fontsize="small"
    )
ax.scatter(
    found.indices,
    found.member_scores,
    s=45,
    marker="D",
    color="#D55E00",
    label=f"universal set: {len(found)} keys",
)
ax.axhline(epsilon, color="#0072B2", ls="--", lw=1.5, label=f"ε = {epsilon}")
ax.set(
    yscale="log", ylim=(values.min() / 2, 2.5), xlabel="row", ylabel="leverage score"
)
ax.grid(alpha=0.25, lw=0.5)
ax.legend(loc="center right")

client.close()
cluster.close()
folder.cleanup()

# %%
# The indices do not depend on chunks or workers; with other chunks the scores agree to rounding. A lost worker costs
# only the time of its chunks. For small arrays a cluster is slower than one call in memory. Use it for keys that do
# not fit.
