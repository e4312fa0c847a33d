"""Token statistics attention on the CPU."""

from __future__ import annotations

from levattn._kernels._generic_tokens import add_squares, forward, memberships

__all__ = ["add_squares", "forward", "memberships"]
