"""Kernels of pruned attention: mixtures, clusters, sums of items."""
