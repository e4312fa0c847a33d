"""Kernels for what float64 does not hold: products in about 100 bits, and exact row spaces."""
