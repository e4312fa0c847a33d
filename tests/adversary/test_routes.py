"""A first look of the adversary: all families over all routes, few seeds; `make adversary` has two minutes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import levattn
from emulator import device
from strategies import as_bool, as_float64, trials

from .families import FAMILIES, LARGE, case
from .oracle import Truth
from .routes import ROUTES, Route, judge_set

SEEDS = {**dict.fromkeys(LARGE, 1), "many": 2}  # the others are small


@pytest.mark.parametrize("family", FAMILIES)
def test_promises_hold(family: str) -> None:
    broken = []
    for seed in range(trials(SEEDS.get(family, 8))):
        found = case(family, seed)
        truth = Truth(found.present, found.queries)
        broken += [
            f"{name}, {family} {seed}: {breach}"
            for name, route in ROUTES.items()
            if route.admits(found)
            for breach in route.breaches(found, truth)
        ]
    assert not broken, "\n".join([*broken, "for a script: python -m tests.adversary --families " + family])


def on_a_device(K: Any, epsilon: float, mask: Any) -> Any:
    """A set of keys that lie on the emulated CUDA device, read back."""
    with pytest.MonkeyPatch.context() as patch:
        xp = device.library_on_device(patch)
        found = levattn.universal_set(
            xp.asarray(np.ascontiguousarray(K)), epsilon, mask=None if mask is None else xp.asarray(mask)
        )
        return replace(found, mask=as_bool(found.mask), scores=as_float64(found.scores))


@pytest.mark.skipif(not device.AVAILABLE, reason="there is neither a CUDA device nor g++ to emulate one")
@pytest.mark.parametrize("family", ["zero_columns", "graded_rows", "dependent_integers", "ties", "extreme"])
def test_promises_hold_on_a_device(family: str) -> None:
    route = Route("device", on_a_device, judge_set)
    for seed in range(4):
        found = case(family, seed)
        if found.storage != "bfloat16":
            assert route.breaches(found) == [], f"{family} {seed}"
