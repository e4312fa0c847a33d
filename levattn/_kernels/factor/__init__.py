"""Kernels of small matrices: inverse Cholesky factors, products in about 100 bits, exact row spaces."""
