"""A minute of the adversary in every run of the tests: fixed seeds, all families over all routes."""

from __future__ import annotations

import pytest

from .families import FAMILIES, case
from .oracle import Truth
from .routes import ROUTES

SEEDS = {"many": 2, "wide": 1}  # the others are small


@pytest.mark.parametrize("family", FAMILIES)
def test_promises_hold(family: str) -> None:
    broken = []
    for seed in range(SEEDS.get(family, 8)):
        found = case(family, seed)
        truth = Truth(found.present, found.queries)
        broken += [
            f"{name}, {family} {seed}: {breach}"
            for name, route in ROUTES.items()
            if route.admits(found)
            for breach in route.breaches(found, truth)
        ]
    assert not broken, "\n".join([*broken, "for a script: python -m tests.adversary --families " + family])
