"""Kernels that read keys: strides, half formats, mask, shift and scale; column sums and maxima; nonfinite rows."""
