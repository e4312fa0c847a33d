"""Pruned attention: the choice of keys, the summaries of the others, its state and its certificate."""
