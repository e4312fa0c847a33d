"""Two dask workers against one, and what a process group sends instead of all keys and values.

Bar: on keys in a file (4·10⁶ × 64 float32, ε = 0.01), two worker processes of one thread each find the universal set
at least 1.6 times as fast as one. Leverage scores, in two passes over the file, and the set in this process on as many
threads are told without a bar.

Below it the bytes that `levattn.distributed.torch` gathers, against those of gathering all keys and values, for heads
of bfloat16 keys that are shared out among two ranks.

    python examples/benchmarks/distributed_drivers.py [--rounds 7] [--n 4000000]
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from _rivals import THREADS, Array, interleaved, table, verdict

import levattn
from levattn.distributed import dask as over_dask
from levattn.distributed import torch as over_torch

D, EPSILON = 64, 0.01
SHARDED = [(n, d, 8, ranks) for n in (32_768, 131_072) for d in (64, 128) for ranks in (2,)]
SHARDED_EPSILON = 0.01
LARGE = 500  # keys in each file or head that stand out


def some_large(K: Array, rng: np.random.Generator) -> None:
    """Make some keys so long that they are of the set."""
    K[..., rng.integers(K.shape[-2], size=LARGE), :] *= np.sqrt(0.02 * K.shape[-2] / K.shape[-1])


def write_keys(path: Path, n: int) -> None:
    rng = np.random.default_rng(0)
    K = np.lib.format.open_memmap(path, "w+", np.float32, (n, D))
    for start in range(0, n, 1 << 16):
        rng.standard_normal(dtype=np.float32, out=K[start : start + (1 << 16)])
    some_large(K, rng)
    K.flush()


def by_workers(path: Path, rounds: int) -> None:
    from distributed import Client, LocalCluster

    K = over_dask.from_keys(path)
    calls: dict[str, Any] = {}
    sets = {}
    with ExitStack() as stack:
        for workers in (1, 2):
            cluster = stack.enter_context(
                LocalCluster(
                    n_workers=workers,
                    threads_per_worker=1,
                    processes=True,
                    dashboard_address=":0",
                    silence_logs=logging.ERROR,
                )
            )
            client = stack.enter_context(Client(cluster, set_as_default=False))
            sets[workers] = over_dask.universal_set_of_files(path, EPSILON, client=client).indices
            calls |= {
                f"set, {workers}": lambda client=client: over_dask.universal_set_of_files(
                    path, EPSILON, client=client
                ),
                f"scores, {workers}": lambda client=client: client.compute(
                    over_dask.leverage_scores(K).max(), sync=True
                ),
            }
        source = levattn.open_keys(path)
        for threads in (1, 2):
            calls[f"here, {threads}"] = lambda threads=threads: in_this_process(source, threads)
        times = interleaved(calls, rounds)
    if not np.array_equal(sets[1], sets[2]) or not np.array_equal(sets[1], in_this_process(source, 2).indices):
        raise SystemExit("the sets differ")
    size = f"{K.shape[0]} x {D} float32 keys in {K.npartitions} chunks"
    print(f"{size}, ε = {EPSILON}, set of {len(sets[1])} keys, {THREADS} cores; seconds:\n")
    names = {
        "set": "dask: universal_set",
        "scores": "dask: leverage_scores, their maximum",
        "here": "one process: StreamingUniversalSet",
    }
    rows = []
    for key, name in names.items():
        one, two = times[f"{key}, 1"], times[f"{key}, 2"]
        rows.append([name, f"{one:.3f}", f"{two:.3f}", f"{one / two:.2f}"])
    table(["", "1 worker or thread", "2", "1 / 2"], rows)
    print("\none worker / two workers:", verdict(times["set, 1"] / times["set, 2"], 1.6))


def in_this_process(source: levattn.KeySource, threads: int) -> levattn.StreamedSet:
    with levattn.thread_limit(threads):
        state = levattn.StreamingUniversalSet(EPSILON)
        for chunk in source:
            state.update(chunk)
        return state.result()


def shard(rank: int, store: str, n: int, d: int, heads: int, ranks: int) -> None:
    """Find the set of random heads on one of the ranks, and print from the first what it took."""
    import torch
    import torch.distributed as dist

    os.environ["LEVATTN_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    rng = np.random.default_rng(rank)
    K, V = (rng.standard_normal((heads, n // ranks, d), dtype=np.float32) for _ in range(2))
    some_large(K, rng)
    K, V = (torch.from_numpy(array).to(torch.bfloat16) for array in (K, V))
    sets, traffic = over_torch.universal_set(K, SHARDED_EPSILON, payload=V)
    if rank == 0:
        kib = [f"{size / 1024:.0f}" for size in (traffic.moments, traffic.selected, traffic.gathered, traffic.dense)]
        row = [f"{heads} x {n} x {d}, {ranks} ranks", str(int(sets.sizes.sum())), *kib, f"{traffic.ratio:.1f}"]
        Path(store).with_suffix(".row").write_text("\t".join(row))
    dist.destroy_process_group()


def by_ranks(folder: Path) -> None:
    import torch

    rows = []
    for number, case in enumerate(SHARDED):
        store = folder / f"store-{number}"
        torch.multiprocessing.spawn(shard, (str(store), *case), nprocs=case[-1])
        rows.append(store.with_suffix(".row").read_text().split("\t"))
    print(f"\nKiB gathered on each rank, ε = {SHARDED_EPSILON}, bfloat16 keys and values:\n")
    table(["heads x n x d", "keys in the sets", "moments", "sets", "in all", "all K and V", "ratio"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--n", type=int, default=4_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if find_spec("distributed") is None:
            print('dask is not installed: pip install "levattn[dask]"')
        else:
            write_keys(folder / "keys.npy", options.n)
            by_workers(folder / "keys.npy", options.rounds)
        if find_spec("torch") is None:
            print("torch is not installed")
        else:
            by_ranks(folder)


if __name__ == "__main__":
    main()
