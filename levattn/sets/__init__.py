"""Universal sets: of keys in memory, in two passes, in one."""
