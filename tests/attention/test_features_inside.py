"""The recurrence of short memories.

Inside: it is judged for shapes and signs that no memory gives it.
"""

from __future__ import annotations

import numpy as np
import pytest

from levattn import thread_limit
from levattn._kernels.latent import cpu, definition

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(2, 0, 3), (1, 1, 1), (3, 7, 130), (2, 50, 64), (0, 4, 2), (2, 4, 0)], ids=str)
def test_the_compiled_scan_is_its_definition(kind: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    a, x, first = (rng.uniform(-1, 1, size).astype(kind) for size in (shape, shape, (shape[0], shape[2])))
    for options in ({}, {"first": first}, {"reverse": True}):
        found = cpu.decayed_scan(a, x, **options)
        assert found.dtype == kind
        np.testing.assert_allclose(
            found, definition.decayed_scan(a, x, **options), atol={"float32": 2e-6, "float64": 1e-14}[kind]
        )
    a[:, ::3] = 0
    with_nan = x.copy()
    with_nan[:, 1::3] = np.nan
    for options in ({}, {"first": np.full_like(first, np.nan)}, {"reverse": True}):
        found, other = (table.decayed_scan(a, with_nan, **options) for table in (cpu, definition))
        np.testing.assert_array_equal(np.isnan(found), np.isnan(other))
        assert np.isfinite(found[:, 2::3] if options.get("reverse") else found[:, ::3]).all()
    turned = np.asfortranarray(a), x[:, ::-1][:, ::-1]
    np.testing.assert_array_equal(cpu.decayed_scan(*turned), cpu.decayed_scan(a, x))


def test_the_compiled_scan_has_the_same_bits_on_any_number_of_threads() -> None:
    rng = np.random.default_rng(4)
    a, x = rng.uniform(0, 1, (2, 3, 2000, 400))
    many = cpu.decayed_scan(a, x)
    with thread_limit(1):
        np.testing.assert_array_equal(cpu.decayed_scan(a, x), many)
