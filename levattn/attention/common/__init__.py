"""What operators share: arguments, groups of heads, packed sequences, namespaces."""
