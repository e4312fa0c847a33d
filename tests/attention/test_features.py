"""Short memories in front of latent logits: against loops, in chunks, packed and masked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import naive_attention as naive
from levattn.attention import causal_conv, rg_lru
from libraries import over_storages, stored

pytestmark = pytest.mark.usefixtures("one_thread")

T, C = 23, 3


class Case:
    """One of the two memories with numbers to read, its definition, and its state's shape behind the batch."""

    def __init__(self, name: str, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.name = name
        self.inputs = list(rng.standard_normal((3 if name == "rg_lru" else 1, 2, T, C)))
        self.others = [rng.standard_normal(C)] if name == "rg_lru" else [rng.standard_normal((C, 4)), np.ones(C)]
        self.run = {"rg_lru": rg_lru, "causal_conv": causal_conv}[name]
        self.state = (C + 1,) if name == "rg_lru" else (3, C)

    def expected(self, mask: Any = None, offsets: Any = None) -> Any:
        return np.stack(
            [
                getattr(naive, self.name)(
                    *(x[i] for x in self.inputs), *self.others, mask=None if mask is None else mask[i], offsets=offsets
                )
                for i in range(2)
            ]
        )

    def __call__(self, storage: str, rows: Any = slice(None), mask: Any = None, **options: Any) -> Any:
        flags = None if mask is None else stored(mask[:, rows], storage)
        arrays = [stored(x[:, rows], storage) for x in self.inputs] + [stored(x, storage) for x in self.others]
        return self.run(*arrays, mask=flags, **options)


def masks() -> list[Any]:
    rng = np.random.default_rng(1)
    behind = np.ones((2, T), np.bool_)
    behind[0, 15:], behind[1, :12] = False, False
    return [None, rng.random((2, T)) < 0.5, rng.random((2, T)) < 0.06, behind]


over_cases = pytest.mark.parametrize("name", ["rg_lru", "causal_conv"])
over_masks = pytest.mark.parametrize("mask", masks(), ids=["all", "half", "few", "padding"])


@over_storages
@over_cases
@over_masks
@pytest.mark.parametrize("offsets", [None, [0, 9, 9, T]], ids=["one", "packed"])
def test_rows_are_those_of_the_loops(storage: str, name: str, mask: Any, offsets: Any) -> None:
    case = Case(name)
    found = np.asarray(case(storage, mask=mask, offsets=offsets))
    np.testing.assert_allclose(found, case.expected(mask, offsets), atol=1e-13)


def test_the_recurrence_keeps_the_power_of_its_input() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((4000, 50))
    open_gates, slow = np.full_like(x, 50.0), np.linspace(-8, 0, 50)
    h = rg_lru(x, open_gates, open_gates, slow)
    assert abs(h[1000:].var() - 1) < 0.1
    np.testing.assert_array_equal(h[0], x[0])  # nothing decays at the start


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_fastest_decay_keeps_each_input_alone(dtype: Any) -> None:
    x, largest = np.ones((5, 1), dtype), np.full(1, np.finfo(dtype).max, dtype)
    np.testing.assert_array_equal(rg_lru(x, x, x, largest), rg_lru(x[:1], x[:1], x[:1], largest).repeat(5, 0))


def test_wrong_arguments_are_named() -> None:
    x, w = np.zeros((2, 5, 3)), np.zeros((3, 4))
    for call, error, message in (
        (lambda: rg_lru(x, x[:, :4], x, x[0, 0]), ValueError, "gate_x has shape .*expected T = 5"),
        (lambda: rg_lru(x, x, x, np.zeros(4)), ValueError, "a_param has shape .*expected C = 3"),
        (lambda: rg_lru(x, x, x, x[0, 0], state=np.zeros((2, 3))), ValueError, r"state has 3 .*expected C \+ 1 = 4"),
        (lambda: rg_lru(x, x, x, x[0, 0], offsets=[0, 5], return_state=True), ValueError, "expected one sequence"),
        (lambda: causal_conv(x, w[:2]), ValueError, "weight has shape .*expected C = 3"),
        (lambda: causal_conv(x, w, np.zeros(2)), ValueError, "bias has shape .*expected C = 3"),
        (lambda: causal_conv(x, w, state=np.zeros((2, 4, 3))), ValueError, r"state has shape \(4, 3\)"),
        (lambda: causal_conv(x, w, offsets=[0, 5], state=np.zeros((2, 3, 3))), ValueError, "expected one sequence"),
    ):
        with pytest.raises(error, match=message):
            call()


# What one packed sequence holds does not reach another


@over_storages
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_sequence_that_is_not_finite_stays_apart(bad: float, storage: str) -> None:
    rng = np.random.default_rng(5)
    arrays = rng.standard_normal((3, 2, 40, 3))
    speed, offsets = rng.standard_normal(3), [0, 13, 14, 33, 40]
    expected = rg_lru(*(stored(part, storage) for part in arrays), stored(speed, storage), offsets=offsets)
    for first, last in ((0, 13), (13, 14), (14, 33), (33, 40)):
        for which in range(3):
            dirty = arrays.copy()
            dirty[which, 1, first:last, 1] = bad
            with np.errstate(all="ignore"):
                found = rg_lru(*(stored(part, storage) for part in dirty), stored(speed, storage), offsets=offsets)
            changed = np.asarray(found) != np.asarray(expected)
            changed[1, first:last, 1] = False
            assert not changed.any(), (first, which)


# The compiled recurrence
