"""Drivers over states that merge: keys in dask arrays or files, and keys distributed over torch processes.

A driver creates, updates, merges and reads states, so its result has the guarantees of the state. Each module needs
the package in its name, and imports it at its first use:

- `levattn.distributed.dask`: row chunks of a dask array, or of a folder of shards, on threads, processes or a cluster;
- `levattn.distributed.torch`: sequence-sharded keys and values in a process group of torch.distributed.
"""

from __future__ import annotations

from levattn.distributed import dask, torch

__all__ = ["dask", "torch"]
