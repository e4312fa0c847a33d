"""The cache of compiled code: used again while the sources of the kernels are as they were, and only then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import levattn

CALL = """
import numpy as np
from levattn._kernels import _cpu, inverse_cholesky

inverse_cholesky(np.eye(2)[None], 0.0)
stats = _cpu.cholesky_tasks.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def hits_and_misses(root: Path) -> str:
    """Call a kernel of the package under `root` in a fresh interpreter; "1 0": from the cache, "0 1": compiled."""
    environment = {**os.environ, "PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(root / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", CALL], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_code_is_compiled_again_when_another_file_of_the_kernels_changes(tmp_path: Path) -> None:
    source = Path(levattn.__file__).parent
    shutil.copytree(source, tmp_path / "levattn", ignore=shutil.ignore_patterns("__pycache__", "data"))
    assert hits_and_misses(tmp_path) == "0 1"
    assert hits_and_misses(tmp_path) == "1 0"
    with (tmp_path / "levattn" / "_kernels" / "_cpu_simd.py").open("a") as stream:
        stream.write("# changed\n")
    assert hits_and_misses(tmp_path) == "0 1"
    assert hits_and_misses(tmp_path) == "1 0"
