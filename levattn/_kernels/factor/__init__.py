"""Kernels of inverse Cholesky factors of small matrices."""
