"""Latent attention, its mixture with a window, and the features in front of it."""
