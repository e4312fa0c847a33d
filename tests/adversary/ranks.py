"""Ranks of a torch process group: processes that stay, and are given their rows of the keys case after case."""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
from datetime import timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

RANKS = 3  # groups of the first one, two and three of them are tried
_PATIENCE = timedelta(seconds=60)


def _groups(folder: str, rank: int) -> list[Any]:
    """Join the others, and return the groups of the first ranks; all ranks make all groups, in this order."""
    import torch.distributed as dist

    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=_PATIENCE)
    return [dist.new_group(list(range(count)), timeout=_PATIENCE) for count in range(1, RANKS + 1)]


@cache
def _started() -> tuple[list[Any], list[subprocess.Popen[bytes]]]:
    """Start the other ranks, which end when this process does, and return the groups and them."""
    import levattn

    folder = tempfile.mkdtemp()
    path = os.pathsep.join([str(Path(levattn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    others = [
        subprocess.Popen(
            [sys.executable, __file__, folder, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        for rank in range(1, RANKS)
    ]
    return _groups(folder, 0), others


@atexit.register
def stop() -> None:
    """End the other ranks and leave the group, if there is one: this process may join another."""
    if not _started.cache_info().currsize:
        return
    import torch.distributed as dist

    _, others = _started()
    for other in others:
        with other:  # closes its pipes, at which it ends, and waits for it
            pass
    dist.destroy_process_group()
    _started.cache_clear()


def universal_set_of_ranks(K: Any, epsilon: float, mask: Any, seed: int) -> Any:
    """The set of keys on one to three ranks, cut anywhere: what rank 0 has, and all others must have."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, RANKS + 1))
    edges = [0, *np.sort(rng.integers(0, len(K) + 1, count - 1)).tolist(), len(K)]
    shards = [
        (np.ascontiguousarray(K[low:high]), epsilon, None if mask is None else mask[low:high])
        for low, high in pairwise(edges)
    ]
    groups, others = _started()
    try:
        return _asked(count, shards, groups, others)
    except (TimeoutError, OSError, EOFError):  # of no use any more: the next case starts others
        for other in others:
            other.kill()
        stop()
        raise


def _asked(count: int, shards: list[Any], groups: list[Any], others: list[Any]) -> Any:
    from levattn.distributed.torch import universal_set

    for other, shard in zip(others[: count - 1], shards[1:], strict=True):
        pickle.dump((count, *shard), other.stdin)
        other.stdin.flush()
    try:
        K, epsilon, mask = shards[0]
        own, _ = universal_set(K, epsilon, mask=mask, group=groups[count - 1])
    finally:
        found = [pickle.load(other.stdout) for other in others[: count - 1]]
    if any(isinstance(one, str) or not np.array_equal(one, own.indices) for one in found):
        raise RuntimeError(f"rank 0 has the keys {own.indices.tolist()}, the others {found}")
    return own


def _serve(folder: str, rank: int) -> None:
    """Answer with the indices of the set, or with the error."""
    import torch.distributed as dist

    from levattn.distributed.torch import universal_set

    groups = _groups(folder, rank)
    answers = sys.stdout.buffer
    while True:
        try:
            count, K, epsilon, mask = pickle.load(sys.stdin.buffer)
        except EOFError:
            dist.destroy_process_group()
            return
        try:
            answer: Any = universal_set(K, epsilon, mask=mask, group=groups[count - 1])[0].indices
        except (TypeError, ValueError) as error:
            answer = str(error)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
