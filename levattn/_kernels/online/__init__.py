"""Kernels of online leverage scores: rows appended to a triangle."""
