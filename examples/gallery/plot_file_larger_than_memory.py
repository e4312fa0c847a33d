"""
A file larger than memory
=========================

Keys in a file are read in chunks of a size that you name: in two passes with the scores of all keys, or in one. The
file is small enough here to be written at once; the memory that is used does not depend on that.
"""

# %%
# A file of keys
# --------------
#
# 400 000 keys of 64 float32 numbers, written block by block. A hundred of them point where hardly any other does.

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import psutil

import levattn
from levattn.plots import LeverageSpectrumDisplay

n, d, block, epsilon = 400_000, 64, 40_000, 0.05
folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "keys.npy"

rng = np.random.default_rng(0)
keys = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(n, d))
for start in range(0, n, block):
    keys[start : start + block] = rng.standard_normal((block, d), dtype=np.float32) * np.geomspace(1, 1e-2, d)
keys[:: n // 100, d // 2 :] *= 100
keys.flush()
del keys

# %%
# :py:func:`~levattn.open_keys` reads the header alone. ``memory`` is how many bytes a chunk may take.

source = levattn.open_keys(path, memory=8 * 2**20)
file_size = path.stat().st_size / 2**20
print(f"{source.n} keys in {file_size:.0f} MiB; a chunk has {source.chunk_rows} rows")

# %%
# Two passes
# ----------
#
# The first pass adds up the second moment, the second computes the scores of all keys. ``progress`` is called after
# each chunk; here it notes how much memory the process has resident, mapped pages of the file among it (psutil comes
# with ``levattn[dask]``). A call on the first rows has compiled the kernels before. With ``checkpoint`` the same call,
# if it is killed, goes on where it was.


def resident():
    return psutil.Process().memory_info().rss / 2**20


levattn.universal_set(source.between(0, 8192), epsilon)
before, two_passes = resident(), []


def watch(done, _):
    two_passes.append((done / n, resident() - before))


checkpoint = Path(folder.name) / "checkpoint"
found = levattn.universal_set(source, epsilon, progress=watch, checkpoint=checkpoint, checkpoint_rows=100_000)
print(found)
print(f"the checkpoint is removed in the end: {not checkpoint.exists()}")

# %%
# One pass
# --------
#
# A state needs no second reading, as for a stream that is gone once it was read. It gives the keys of the set and
# their scores, not those of the others.

state = levattn.StreamingUniversalSet(epsilon)
state.update(source.read(0, 4096)).result()  # compiles
state = levattn.StreamingUniversalSet(epsilon)
before, one_pass = resident(), []
for chunk in source:
    state = state.update(chunk)
    one_pass.append((state.n / n, resident() - before))

streamed = state.result()
print(streamed)
print("the same keys:", np.array_equal(streamed.indices, found.indices))

# %%
# Memory against what was read
# ----------------------------

figure, ax = plt.subplots(layout="constrained")
for name, curve, color, dashes in (
    ("two passes", two_passes, "#0072B2", "-"),
    ("one pass", one_pass, "#D55E00", "--"),
):
    ax.plot(*np.transpose(curve), color=color, ls=dashes, lw=2, label=name)
    print(f"{name}: resident memory grew by {max(more for _, more in curve):.1f} MiB at most")
ax.axhline(file_size, color="#8C8C8C", ls=":", lw=1.5, label="size of the file")
ax.set(xlabel="passes over the file", ylabel="more resident memory than before (MiB)")
ax.grid(alpha=0.25, lw=0.5)
legend = ax.legend()

# %%
# The scores of all keys, which only two passes give:

display = LeverageSpectrumDisplay.from_scores(found.scores, epsilon=epsilon, rank=found.rank)
folder.cleanup()

# %%
# Two passes take O(n) memory for the scores, 4 bytes a key of float32, besides a chunk; one pass takes O(d²/ε).
# Neither holds the keys. The operating system may keep read pages of the file in its cache, which is not the process's
# memory.
