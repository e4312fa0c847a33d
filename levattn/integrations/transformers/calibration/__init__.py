"""Budgets for a wanted loss."""
