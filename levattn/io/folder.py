"""The files of a path: the path itself, or the shards in a folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from levattn.io.common import missing_file, refusal
from levattn.io.safetensors import INDEX_SUFFIX
from levattn.io.zarr import is_store

_PART = re.compile(r"(.*)-[0-9]+-of-([0-9]{1,18})(\.\w+)", re.DOTALL)


def shards_of(path: Path, suffixes: Collection[str]) -> list[Path]:
    """Return the files of keys at `path`, in the order of their rows."""
    if not path.exists():
        raise missing_file(path, "no such file", f"check the path (it is taken relative to {Path.cwd()})")
    if not path.is_dir() or is_store(path):
        return [path]
    visible = sorted((entry for entry in path.iterdir() if not entry.name.startswith(".")), key=_natural)
    shards = [entry for entry in visible if entry.suffix.lower() in suffixes or is_store(entry)]
    indices = [entry for entry in visible if entry.name.endswith(INDEX_SUFFIX)]
    if indices:
        others = [shard for shard in shards if shard.suffix.lower() != ".safetensors"]
        if len(indices) + len(others) > 1:
            names = ", ".join(repr(entry.name) for entry in [*indices, *others][:2])
            raise refusal(path, f"the folder holds both {names}", "open one of them")
        return indices
    if not shards:
        known = ", ".join(suffixes)
        raise refusal(path, f"the folder holds no file of keys ({known}, or a zarr store)", "check the path")
    parts = Counter(part.groups() for shard in shards if (part := _PART.fullmatch(shard.name)))
    for (name, count, suffix), found in parts.items():
        if found != int(count):
            what = f"{name}-...-of-{count}{suffix}"
            raise refusal(path, f"the folder holds {found} of {int(count)} files {what}", "copy the others there")
    return shards


def _natural(path: Path) -> tuple[list[str | int], str]:
    """Return a sorting key by which shard-2 comes before shard-10."""
    pieces: list[str | int] = [*re.split("([0-9]+)", path.name)]
    pieces[1::2] = map(int, pieces[1::2])
    return pieces, path.name
