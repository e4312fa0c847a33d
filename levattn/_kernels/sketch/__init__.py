"""Kernels of random sketches, and the words that they are drawn from."""
