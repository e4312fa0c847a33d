"""Heavy attention: the large scores of given queries, also with a causal mask and while keys are appended."""
