"""Attention in linear time: operators on logits and values of any array library, with gradients in torch."""

from __future__ import annotations

from levattn.attention._certificate import PrunedCertificate
from levattn.attention._features import causal_conv, rg_lru
from levattn.attention._latte import latte
from levattn.attention._macchiato import MacchiatoState, macchiato
from levattn.attention._pruned import pruned_attention
from levattn.attention._pruned_state import PrunedState
from levattn.attention._repeated import repeated_mass
from levattn.attention._slots import Slots
from levattn.attention._tssa import memberships, tssa
from levattn.attention._vapor import rotate_values
from levattn.attention._window import window_attention

__all__ = [
    "MacchiatoState",
    "PrunedCertificate",
    "PrunedState",
    "Slots",
    "causal_conv",
    "latte",
    "macchiato",
    "memberships",
    "pruned_attention",
    "repeated_mass",
    "rg_lru",
    "rotate_values",
    "tssa",
    "window_attention",
]
