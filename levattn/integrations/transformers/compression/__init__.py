"""Contexts that are read once, compressed, and asked many times."""
