"""
A universal set
===============

Stub.
"""

import levattn
from levattn.plots import LeverageSpectrumDisplay

model = levattn.datasets.planted(4096, 32, rng=0)
scores = levattn.leverage_scores(model.keys)
LeverageSpectrumDisplay.from_scores(scores, epsilon=0.1, rank=32)
