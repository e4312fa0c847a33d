"""Kernels beyond float64: products in about 100 bits, and exact row spaces."""
