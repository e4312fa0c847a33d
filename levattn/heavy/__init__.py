"""Heavy attention: the large scores of given queries, causal ones, and while keys are appended."""
