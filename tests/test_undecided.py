"""Queries of which float64, or twice its precision, knows next to nothing: entries are returned with their error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import levattn
from strategies import Float


def plain(q: Float, K: Float) -> tuple[Any, Any, Any]:
    found = levattn.heavy_attention(q[None], K, 0.1)
    return found.entries.toarray()[0], found.error[0], found


def causal(q: Float, K: Float) -> tuple[Any, Any, Any]:
    Q = np.vstack([np.zeros((len(K) - 1, len(q))), q])
    found = levattn.heavy_attention(Q, K, 0.1, causal=True)
    return found.entries.toarray()[-1], found.error[-1], found


def decoding(q: Float, K: Float) -> tuple[Any, Any, Any]:
    found = levattn.CausalUniversalSet(0.1).update(K).heavy(q[None])
    row = np.zeros(len(K))
    row[found.indices] = found.scores
    return row, found.error[0], None


TINY = 2.0**-545
CASES = {
    "a product below twice the precision": (np.ones(5), np.array([[1, 2.0**-60, 2.0**-200, -(2.0**-60), -1]])),
    "the same beside others": (
        np.ones(5),
        np.array([[1, 2.0**-60, 2.0**-200, -(2.0**-60), -1], *np.eye(5)[1:] - np.eye(5)[0]]),
    ),
    "an entry out of range": (
        np.array([1, 1, 0, TINY]),
        np.array([[0, 0, 1, TINY], [1, -1, 0, 0], [2, -2, 0, 0], [3, -3, 0, 0], [1, -1, 0, 0]]),
    ),
    "a key's entry out of range": (
        np.array([0, 1e300, 1e300]),
        np.array([[1, 0, -1e-323], [0, 2.0**1021, -(2.0**1021)]]),
    ),
    "the same of a key that gets next to nothing": (
        np.array([-1.0, -1, 1]),
        np.array([[0, 0, 1], [2.0**1021, -(2.0**1021), 6e-163]]),
    ),
}


@pytest.mark.parametrize("route", [plain, causal, decoding])
@pytest.mark.parametrize("name", CASES)
def test_the_only_key_that_a_query_meets_is_returned(name: str, route: Any) -> None:
    """All other keys are orthogonal to the query, so that the first one has a score of 1."""
    q, K = CASES[name]
    row, error, found = route(q, K)
    assert row[0] > 0
    assert error > 0.25 or abs(row[0] - 1) <= 1e-9
    if found is not None:
        output, bound = found.apply(np.full((len(K), 1), 7.0))
        assert abs(output[-1, 0] - 7) <= bound[-1]


@pytest.mark.parametrize("more", [1, 2, 100, 255])
def test_causal_outputs_do_not_depend_on_the_length(more: int) -> None:
    rng = np.random.default_rng(0)
    Q, K, V = rng.standard_normal((3, 512, 20))
    V = V[:, :8]
    first = 256 + more
    whole, part = (levattn.heavy_attention(Q[:n], K[:n], 0.05, causal=True) for n in (512, first))
    for compensate in (None, "mean"):
        outputs = [found.apply(V[: len(found.error)], compensate=compensate) for found in (whole, part)]
        for mine, its in zip(*outputs, strict=True):
            np.testing.assert_array_equal(mine[:first], its)
    np.testing.assert_array_equal(whole.error[:first], part.error)


@pytest.mark.parametrize("p", [0.5, 1, 3, 6])
@pytest.mark.parametrize("power", [-1074, -900, 0, 700])
def test_powers_lose_no_small_entries_of_queries(p: float, power: int) -> None:
    """Query and keys meet in one product of 2¹⁰ and one of 2⁰, however far their entries are apart."""
    K = np.array([[0.0, 2.0**-200], [2.0 ** min(-power, 1000), 0.0]])
    Q = np.array([[2.0 ** max(power, -1000), 2.0**210]])
    found = levattn.heavy_attention(Q, K, 1e-3, f=p)
    share = 2.0 ** (10 * p)
    expected = np.array([share, 1]) / (share + 1)
    assert found.entries.toarray()[0] == pytest.approx(np.where(expected < 1e-3, 0, expected), rel=1e-9)
    assert found.error[0] < 1e-12
