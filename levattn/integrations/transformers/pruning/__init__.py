"""Pruned attention in pretrained models."""
