"""Kernels of token statistics attention."""
