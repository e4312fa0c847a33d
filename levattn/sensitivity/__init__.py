"""How heavy each key can become: leverage scores, certified bounds of sensitivities, and exact ones of few keys."""
