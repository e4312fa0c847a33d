"""Latent attention on the CPU: the arguments of the compiled code, shared out over threads."""

from __future__ import annotations

from levattn._kernels._generic_latent import decayed_scan, forward, summary

__all__ = ["decayed_scan", "forward", "summary"]
