"""Attention in linear time: operators on logits and values of any array library, with gradients in torch."""

from __future__ import annotations

from levattn.attention import rates as rates
from levattn.attention.fitting import FittedSlots, fit_slots
from levattn.attention.latent.features import causal_conv, rg_lru, rotate_values
from levattn.attention.latent.latte import latte
from levattn.attention.latent.macchiato import MacchiatoState, macchiato, repeated_mass
from levattn.attention.latent.window import Window, window_attention
from levattn.attention.pruned.certificate import PrunedCertificate
from levattn.attention.pruned.coverage import PrunedCoverage, pruned_coverage
from levattn.attention.pruned.pruned import causal_pruned_attention, pruned_attention
from levattn.attention.pruned.selection import Selection, Slots
from levattn.attention.pruned.state import PrunedState
from levattn.attention.tokens.arguments import TokenForm
from levattn.attention.tokens.tssa import memberships, tssa

__all__ = [
    "FittedSlots",
    "MacchiatoState",
    "PrunedCertificate",
    "PrunedCoverage",
    "PrunedState",
    "Selection",
    "Slots",
    "TokenForm",
    "Window",
    "causal_conv",
    "causal_pruned_attention",
    "fit_slots",
    "latte",
    "macchiato",
    "memberships",
    "pruned_attention",
    "pruned_coverage",
    "repeated_mass",
    "rg_lru",
    "rotate_values",
    "tssa",
    "window_attention",
]
