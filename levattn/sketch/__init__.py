"""Random sketches ``S K`` of the rows of K, whose randomness is a pure function of a seed and of row numbers.

A distribution (`CountSketch`, `OSNAP`, `GaussianJL`, `SignJL`, `SRHT`) is apart from its sample, a `Sketch`: that is
the matrix S, of which any part can be had, and which is applied to rows whose numbers are known. So the sketch of K is
the sum of the sketches of its parts, in whatever chunks and order they come; `SketchedRows` is that sum as a state.
"""

from levattn.sketch.families import OSNAP, SRHT, CountSketch, Distribution, GaussianJL, SignJL
from levattn.sketch.operator import Sketch, SketchedRows
from levattn.sketch.sizes import countsketch_size, gaussian_size, jl_size, osnap_size, sign_size, srht_size

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
