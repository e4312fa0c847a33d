"""Kernels of latent attention and of linear recurrences."""
