"""
A file larger than memory
=========================

The library reads keys in a file in chunks of a size that you name. Two passes give the scores of all keys; one pass
gives the set. The file here is small, so that the example can write it at once; the memory use does not depend on
that.
"""

# %%
# A file of keys
# --------------
#
# The file has 400 000 keys of 64 float32 numbers, written block by block. A hundred of them point where hardly any
# other key does.

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
    keys[start : start + block] = rng.standard_normal(
        (block, d), dtype=np.float32
    ) * np.geomspace(1, 1e-2, d)
keys[:: n // 100, d // 2 :] *= 100
keys.flush()
del keys

# %%
# :py:func:`~levattn.open_keys` reads the header alone. ``memory`` is the number of bytes that a chunk may take.

source = levattn.open_keys(path, memory=8 * 2**20)
file_size = path.stat().st_size / 2**20
print(f"{source.n} keys in {file_size:.0f} MiB; a chunk has {source.chunk_rows} rows")

# %%
# Two passes
# ----------
#
# The first pass adds up the second moment, and the second computes the scores of all keys. ``progress`` is called
# after each chunk. Here it notes the resident memory of the process, which includes mapped pages of the file (psutil
# comes with ``levattn[dask]``). A call on the first rows has compiled the kernels before. With ``checkpoint``, the
# same call continues where it was killed.


def resident():
    return psutil.Process().memory_info().rss / 2**20


levattn.universal_set(source.between(0, 8192), epsilon)
before, two_passes = resident(), []


def watch(done, _):
    two_passes.append((done / n, resident() - before))


checkpoint = Path(folder.name) / "checkpoint"
found = levattn.scan_set(
    source, epsilon, progress=watch, checkpoint=checkpoint, checkpoint_rows=100_000
)
print(found)
print(f"the checkpoint is removed in the end: {not checkpoint.exists()}")

# %%
# One pass
# --------
#
# A state needs no second reading, so it suits a stream that is gone after one reading. It gives the keys of the set
# and their scores, but no scores of other keys.

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
# Memory against the rows read
# ----------------------------

figure, ax = plt.subplots(layout="constrained")
for name, curve, color, dashes in (
    ("two passes", two_passes, "#0072B2", "-"),
    ("one pass", one_pass, "#D55E00", "--"),
):
    ax.plot(*np.transpose(curve), color=color, ls=dashes, lw=2, label=name)
    print(
        f"{name}: resident memory grew by {max(more for _, more in curve):.1f} MiB at most"
    )
ax.axhline(file_size, color="#8C8C8C", ls=":", lw=1.5, label="size of the file")
ax.set(xlabel="passes over the file", ylabel="more resident memory than before (MiB)")
ax.grid(alpha=0.25, lw=0.5)
legend = ax.legend()

# %%
# Neither curve comes near the dotted line, the size of the file.
#
# Only two passes give the scores of all keys. In descending order they show a hundred keys above ε, and then a gap:

display = LeverageSpectrumDisplay.from_scores(
    found.scores, epsilon=epsilon, rank=found.rank
)
folder.cleanup()

# %%
# Two passes take O(n) memory for the scores, 4 bytes a key of float32, besides a chunk. One pass takes O(d²/ε).
# Neither holds the keys. The operating system may keep pages of the file in its cache, which is not the process's
# memory.
