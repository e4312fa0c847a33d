"""Kernels of heavy attention: normalizers of queries, heavy entries."""
