"""Budgets that are chosen for a wanted loss."""
