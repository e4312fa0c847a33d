"""Shared code of operators: arguments, groups of heads, packed sequences, namespaces."""
