"""Drivers over states that merge: keys in dask arrays or files, and keys shared out among torch processes.

A driver creates, updates, merges and reads states; what holds of the result is what holds of the state. Each module
needs the package that it is named for, and imports it when it is first used:

- `levattn.distributed.dask`: row chunks of a dask array, or of a folder of shards, on threads, processes or a cluster;
- `levattn.distributed.torch`: sequence-sharded keys and values in a process group of torch.distributed.
"""

from __future__ import annotations

from levattn.distributed import dask, torch

__all__ = ["dask", "torch"]
