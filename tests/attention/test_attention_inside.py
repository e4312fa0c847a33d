"""Attention, its parts.

Inside: clusters, choices and schedules are parts of results, and no result shows them alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_pruned_schedule import BUDGET, arrays

import naive_attention
import strategies
from levattn import thread_limit
from levattn._kernels import kernels_for, tasks
from levattn._kernels.pruned import cpu
from levattn.attention import causal_pruned_attention
from levattn.attention.pruned.choice import chosen
from levattn.attention.pruned.selection import Checks
from levattn.exceptions import NonFiniteError
from pruned_calls import attend, walk


@pytest.mark.parametrize("kind", ["gaussian", "duplicated", "one-column", "zero-rows", "planted"])
def test_clusters_are_those_of_k_means(kind: str) -> None:
    X = strategies.case(kind)[:150]
    n, R = len(X), 7
    weight = np.random.default_rng(0).integers(0, 4, n).astype(float)
    kernels = kernels_for("pruned", X)
    labels, distance = kernels.cluster(X[None], weight[None], R, 2)
    mine, squared = naive_attention.k_means(X, weight, R)
    np.testing.assert_allclose(distance[0], squared, atol=1e-9 * max(1.0, squared.max()))
    if kind not in ("duplicated", "zero-rows"):  # whose equal distances are decided by rounding
        np.testing.assert_array_equal(labels[0], mine)
    inside = np.eye(R)[labels[0]] * weight[:, None]
    levels = kernels.levels(labels, X[None, :, 0], weight[None], R)
    np.testing.assert_allclose(levels[0], inside.T @ X[:, 0] / np.maximum(inside.sum(axis=0), 1), atol=1e-12)


@pytest.mark.parametrize("size", [0, 1, 5, 40, 60])
def test_how_many_are_chosen_may_be_known(size: int) -> None:
    rng = np.random.default_rng(size)
    scores = rng.integers(-2, 3, (3, 40)).astype(float)
    first = rng.permuted(np.arange(120).reshape(3, 40) % 40 < 4, axis=1)
    known, unknown = (chosen(scores, size, None, first, forced, Checks()) for forced in (4, None))
    assert known[1] is unknown[1] is None
    np.testing.assert_array_equal(known[0], unknown[0])
    np.testing.assert_array_equal(known[2], unknown[2])


@pytest.mark.parametrize("causal", [False, True])
def test_items_on_threads_of_their_own_have_the_same_bits(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_THREAD_WORK", 0)
    X = arrays(5, 300, heads=7)
    results = []
    for threads in (1, 2, 3):
        with thread_limit(threads):
            answer = (walk if causal else attend)(*X, budget=BUDGET, return_certificate=True)
            results.append((answer[0], answer[-1].error_bound, *([answer[1].parts[0].kept] if causal else [])))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_a_threshold_chooses_infinite_scores_first_and_of_equal_ones_the_first() -> None:
    scores = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -np.inf, np.inf, 0.0, 2.0, -1.0, -np.inf])
    places, count, flags = chosen(np.stack([scores, -scores]), 20, 2.0, np.zeros((2, 12), bool), None, Checks())
    assert count.tolist() == [7, 2]
    assert places[1, :2].tolist() == [6, 11]
    assert flags.sum(axis=1).tolist() == [7, 2]


@pytest.mark.parametrize(("size", "factor"), [(1.0, 1.0), (1e15, 1e6), (1e19, 1.0)])
def test_many_chunks_in_one_call_are_those_of_one_at_a_time(
    size: float, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside: a long sequence takes several calls of many chunks; here they are made short.

    Their numbers are the same, and so is the error where squares overflow once the queries grow: then the second call
    begins again from the state after the first, whose memory it has used.
    """
    rng = np.random.default_rng(1)

    def attended(at: int, limit: int) -> Any:
        monkeypatch.setattr(cpu, "_AT_ONCE", limit)
        Q, K, V = given.copy()
        K[:, at] *= np.float32(size)
        Q[:, 130:] *= np.float32(factor)
        try:
            return causal_pruned_attention(Q, K, V, 32)
        except NonFiniteError as error:
            return str(error)

    for at in range(70, 84):  # the last keys that the first call may keep are among these
        given = rng.standard_normal((3, 2, 300, 8)).astype(np.float32)
        np.testing.assert_array_equal(attended(at, 40000), attended(at, 0))
