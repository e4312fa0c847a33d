"""Attention in linear time: operators on logits and values of any array library, with gradients in torch."""

from __future__ import annotations

from levattn.attention._features import causal_conv, rg_lru
from levattn.attention._latte import latte
from levattn.attention._macchiato import MacchiatoState, macchiato
from levattn.attention._repeated import repeated_mass
from levattn.attention._tssa import memberships, tssa
from levattn.attention._vapor import rotate_values
from levattn.attention._window import window_attention

__all__ = [
    "MacchiatoState",
    "causal_conv",
    "latte",
    "macchiato",
    "memberships",
    "repeated_mass",
    "rg_lru",
    "rotate_values",
    "tssa",
    "window_attention",
]
