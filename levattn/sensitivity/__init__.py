"""The largest attention of each key: leverage scores, certified bounds of sensitivities, exact ones of few keys."""
