"""Kernels: the only place that knows a device. A folder for each task, a file for each device; see `dispatch`."""

from __future__ import annotations

from levattn._core.types import Float64
from levattn._kernels.dispatch import FACTOR, GRAM, HEAVY, KEYS, PRECISE, PRUNING, SELECT, SKETCH, kernels_for
from levattn._kernels.gram import Norms
from levattn._kernels.latent import LatentArguments
from levattn._kernels.pairwise import PairwiseSum
from levattn._kernels.rows import BLOCK, Arithmetic, Pieces, Rows
from levattn._kernels.tokens import TokenArguments, TokenSums

__all__ = [
    "BLOCK",
    "FACTOR",
    "GRAM",
    "HEAVY",
    "KEYS",
    "PRECISE",
    "PRUNING",
    "SELECT",
    "SKETCH",
    "Arithmetic",
    "Float64",
    "LatentArguments",
    "Norms",
    "PairwiseSum",
    "Pieces",
    "Rows",
    "TokenArguments",
    "TokenSums",
    "kernels_for",
]
