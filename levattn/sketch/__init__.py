"""Random sketches ``S K`` of the rows of K, whose randomness is a pure function of a seed and of row numbers.

A distribution (`CountSketch`, `OSNAP`, `GaussianJL`, `SignJL`, `SRHT`) is separate from its sample, a `Sketch`. The
sample is the matrix S: it can return any part of itself, and applies to rows whose numbers are known. So the sketch of
K is the sum of the sketches of its parts, for any chunks and any order. `SketchedRows` is that sum as a state.
"""

from levattn.sketch.families import (
    OSNAP,
    SRHT,
    CountSketch,
    Distribution,
    GaussianJL,
    SignJL,
    countsketch_size,
    gaussian_size,
    jl_size,
    osnap_size,
    sign_size,
    srht_size,
)
from levattn.sketch.operator import Sketch, SketchedRows

__all__ = [
    "OSNAP",
    "SRHT",
    "CountSketch",
    "Distribution",
    "GaussianJL",
    "SignJL",
    "Sketch",
    "SketchedRows",
    "countsketch_size",
    "gaussian_size",
    "jl_size",
    "osnap_size",
    "sign_size",
    "srht_size",
]
