"""Kernels that read keys: strides, half formats, mask, shift and scale; sums and faults of columns."""
