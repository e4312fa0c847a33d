"""Kernels of random sketches, and the random words behind them."""
