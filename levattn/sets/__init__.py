"""Universal sets: of keys in memory, in two passes, in one; and sets for queries like given ones."""
