"""Kernels that select keys by their scores."""
