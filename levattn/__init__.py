"""Numerical linear algebra for heavy-attention detection.

Given keys K there is a small set of them, the same for every query, that holds every large attention score.
`universal_set` finds this set from `leverage_scores`, and `heavy_attention` returns the large scores themselves. For
other attention functions, `sensitivities` bound the largest score of each key. The kind of the input array decides
the device of the computation and the kind of the result.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from levattn._core.threads import thread_limit
from levattn.exceptions import (
    AxesWarning,
    CacheWarning,
    KeyFileError,
    LevattnError,
    NonFiniteError,
    ProfileWarning,
    RankWarning,
    RecallWarning,
    ResidualWarning,
)
from levattn.functions import L1L2, AttentionFunction, Fair, Huber, Power, Softmax, Tukey
from levattn.heavy.attention import causal_heavy_attention, heavy_attention
from levattn.heavy.decoding import CausalUniversalSet, HeavyKeys
from levattn.heavy.result import HeavyAttention, HeavyAttentionBatch
from levattn.io import KeySource, open_keys
from levattn.sensitivity.bounds import Sensitivities, lewis_weights, sensitivities
from levattn.sensitivity.exact import ExactSensitivities, exact_sensitivities
from levattn.sensitivity.expected import expected_scores
from levattn.sensitivity.figures import coherence, effective_dimension
from levattn.sensitivity.groups import group_leverage, near_duplicates
from levattn.sensitivity.leverage import leverage_scores, online_leverage_scores
from levattn.sensitivity.sampling import RowSample, sample_rows, sample_size
from levattn.sensitivity.sketched import SketchedScores, sketched_scores
from levattn.sensitivity.streamed_sample import StreamingRowSample
from levattn.sets.candidates import SelectedKeys
from levattn.sets.coverage import AdaptiveCoverage, covering_set
from levattn.sets.result import UniversalSet
from levattn.sets.streaming import StreamedSet, StreamingUniversalSet
from levattn.sets.universal import scan_set, universal_set

if TYPE_CHECKING:
    from levattn import datasets
    from levattn.warming import warmup

__all__ = [
    "L1L2",
    "AdaptiveCoverage",
    "AttentionFunction",
    "AxesWarning",
    "CacheWarning",
    "CausalUniversalSet",
    "ExactSensitivities",
    "Fair",
    "HeavyAttention",
    "HeavyAttentionBatch",
    "HeavyKeys",
    "Huber",
    "KeyFileError",
    "KeySource",
    "LevattnError",
    "NonFiniteError",
    "Power",
    "ProfileWarning",
    "RankWarning",
    "RecallWarning",
    "ResidualWarning",
    "RowSample",
    "SelectedKeys",
    "Sensitivities",
    "SketchedScores",
    "Softmax",
    "StreamedSet",
    "StreamingRowSample",
    "StreamingUniversalSet",
    "Tukey",
    "UniversalSet",
    "__version__",
    "causal_heavy_attention",
    "coherence",
    "covering_set",
    "datasets",
    "effective_dimension",
    "exact_sensitivities",
    "expected_scores",
    "group_leverage",
    "heavy_attention",
    "leverage_scores",
    "lewis_weights",
    "near_duplicates",
    "online_leverage_scores",
    "open_keys",
    "sample_rows",
    "sample_size",
    "scan_set",
    "sensitivities",
    "sketched_scores",
    "thread_limit",
    "universal_set",
    "warmup",
]

__version__ = "0.1.0"


_PACKAGES = (
    "attention",
    "datasets",
    "definitions",
    "distributed",
    "integrations",
    "nn",
    "plots",
)  # each is imported at its first use

_FUNCTIONS = {"warmup": "warming"}  # as are the modules of these


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"levattn.{_FUNCTIONS[name]}"), name)
    if name in _PACKAGES:
        return importlib.import_module(f"levattn.{name}")
    from difflib import get_close_matches

    near = get_close_matches(name, __dir__(), 1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    # With a name and without the module, Python adds no guess of its own
    raise AttributeError(f"module 'levattn' has no attribute {name!r}{meant}", name=name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
