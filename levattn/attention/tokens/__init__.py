"""Token statistics attention."""
