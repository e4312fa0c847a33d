"""The definitions against exact arithmetic, and the functions of the same names against the definitions."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import levattn
import naive
from levattn import definitions
from levattn.attention import Selection, fit_slots, latte, pruned_attention
from levattn.attention.rates import coding_rate
from token_calls import tssa

SEEDS = range(3)
FUNCTIONS = [
    ("square", np.square, 2),
    ("huber", levattn.Huber(1.0), levattn.Huber(1.0)),
    ("fourth", levattn.Power(4), 4),
    ("softmax", None, levattn.Softmax()),
]
MATRICES = {
    "tall": lambda rng: rng.standard_normal((60, 5)),
    "wide": lambda rng: rng.standard_normal((4, 7)),
    "deficient": lambda rng: (rng.integers(-3, 4, (30, 2)) @ rng.integers(-3, 4, (2, 6))).astype(float),
    "repeated": lambda rng: np.repeat(rng.integers(-3, 4, (8, 3)).astype(float), 3, axis=0),
    "zeros among them": lambda rng: rng.standard_normal((20, 3)) * (rng.random((20, 1)) < 0.7),
}


@pytest.fixture(params=MATRICES, name="K")
def matrix(request):
    return MATRICES[request.param](np.random.default_rng(0))


def close(found, wanted, tolerance=1e-9):
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=tolerance, atol=tolerance)


def test_leverage_scores_equal_exact_arithmetic(K):
    close(definitions.leverage_scores(K), naive.leverage_exact(K))


@pytest.mark.filterwarnings("ignore::levattn.RankWarning")
def test_scores_of_the_library_are_those_defined(K):
    close(levattn.leverage_scores(K), definitions.leverage_scores(K))
    relative = 0.3
    absolute = relative * np.sum(K**2) / K.shape[1]
    close(levattn.leverage_scores(K, relative_ridge=relative), definitions.leverage_scores(K, absolute))
    close(levattn.leverage_scores(K, ridge=absolute), definitions.leverage_scores(K, absolute))
    dimension = definitions.effective_dimension(K, absolute)
    close([levattn.effective_dimension(K, relative_ridge=relative)], [dimension])
    close([definitions.leverage_scores(K, absolute).sum()], [dimension])
    close(levattn.online_leverage_scores(K, ridge=0.5), definitions.online_leverage_scores(K, 0.5))
    labels = np.arange(len(K)) % 3
    close(levattn.group_leverage(K, labels), definitions.group_leverage(K, labels))


def test_universal_set_is_the_one_defined():
    for seed in SEEDS:
        K = np.random.default_rng(seed).standard_t(2, (80, 4))
        assert levattn.universal_set(K, 0.1).indices.tolist() == definitions.universal_set(K, 0.1).tolist()


def test_worst_queries_attain_leverage_scores_and_no_query_exceeds_them(K):
    tau = definitions.leverage_scores(K)
    worst = K @ np.linalg.pinv(K.T @ K, hermitian=True)
    close(definitions.sensitivities(K, worst), tau)
    random = np.random.default_rng(1).standard_normal((200, K.shape[1]))
    assert np.all(definitions.sensitivities(K, random) <= tau + 1e-9)


@pytest.mark.parametrize("p", [1.0, 1.5, 3.0, 5.0])
def test_lewis_weights_solve_their_equation(p):
    K = np.random.default_rng(2).standard_normal((40, 4))
    w = definitions.lewis_weights(K, p)
    close(definitions.leverage_scores(w[:, None] ** (0.5 - 1 / p) * K), w)
    close(w.sum(), 4)
    close(levattn.lewis_weights(K, p, iterations=60), w, 1e-6)


@pytest.mark.parametrize(("f", "ours"), [row[1:] for row in FUNCTIONS], ids=[row[0] for row in FUNCTIONS])
def test_attention_and_its_parts_agree(f, ours):
    rng = np.random.default_rng(3)
    K, Q = rng.standard_normal((30, 4)), rng.standard_normal((50, 4))
    A = definitions.attention_scores(Q, K, f)
    close(A, naive.shares(Q, K, f))
    close(levattn.expected_scores(K, Q, f=ours, method="mean"), definitions.expected_scores(K, Q, f))
    if f is np.square:
        queries, keys, scores = definitions.heavy_attention(Q, K, 0.2)
        found = levattn.heavy_attention(Q, K, 0.2)
        entries = found.entries.tocoo()
        pairs = set(zip(entries.row.tolist(), entries.col.tolist(), strict=True))
        assert pairs == set(zip(queries.tolist(), keys.tolist(), strict=True))
        close(scores, A[queries, keys])


def test_covering_set_covers_with_its_probability():
    missed, trials = 0, 400
    rng = np.random.default_rng(4)
    K = rng.standard_normal((40, 3))
    for _ in range(trials):
        Q = rng.standard_normal((39, 3)) * [3, 1, 0.2]
        kept = definitions.covering_set(K, Q[:19], Q[19:38], 0.1, coverage=0.9)
        heavy = definitions.attention_scores(Q[38:], K)[0] >= 0.1
        missed += not set(np.flatnonzero(heavy)) <= set(kept.tolist())
    assert missed <= 0.1 * trials + 3 * (trials * 0.1 * 0.9) ** 0.5


@pytest.mark.parametrize(("coverage", "m", "place"), [(0.55, 19, 11), (0.9, 9, 9), (0.8, 19, 16), (0.8, 20, 17)])
def test_covering_set_takes_the_quantile_of_conformal_prediction(coverage, m, place):
    """Query i attends to key i alone, and keys are in their order: it needs i + 1 of them."""
    K, order = np.eye(m), np.diag(1.0 / np.arange(1, m + 1) ** 2)
    kept = definitions.covering_set(K, np.vstack([np.eye(m)[: m - i] for i in range(m)]), order, 0.5, coverage)
    assert kept.tolist() == list(range(place))
    found = levattn.covering_set(K, np.eye(m), 0.5, coverage=coverage, scores=-np.arange(m))
    assert found.indices.tolist() == list(range(place))


def test_pruned_attention_with_all_keys_is_dense_and_a_summary_weighs_at_most_its_members():
    rng = np.random.default_rng(5)
    Q, K, V = rng.standard_normal((6, 4)), rng.standard_normal((20, 4)), rng.standard_normal((20, 2))
    dense = definitions.softmax(Q @ K.T / 2) @ V
    close(definitions.pruned_attention(Q, K, V, np.arange(20), np.zeros(20, int)), dense)
    close(pruned_attention(Q, K, V, 1.0), dense, 1e-6)
    kept = np.array([3, 7])
    mass = definitions.pruned_attention(Q, K, np.isin(np.arange(20), kept).astype(float)[:, None], kept, np.zeros(20))
    true = definitions.softmax(Q @ K.T / 2)[:, kept].sum(axis=1, keepdims=True)
    assert np.all(mass >= true - 1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_fitted_slots_are_those_defined(seed):
    rng = np.random.default_rng(8 + seed)
    Q, K, V = rng.standard_normal((40, 4)), rng.standard_normal((30, 4)), rng.standard_normal((30, 2))
    w = rng.random(40)
    places, log_weights, C = definitions.fit_slots(2 * Q, K, V, 5, 1, 2, w)
    found = fit_slots(2 * Q, K, V, Selection(size=5, sinks=1, window=2), weights=w, unseen=Q)
    assert found.indices.tolist() == places.tolist()
    close(found.log_weights, log_weights)
    close(found.values, C)
    *_, same = definitions.fit_slots(Q, K, np.full((30, 2), 0.3), 5, 1, 2, w)  # the ball is a point
    close(same, np.full((8, 2), 0.3))


@pytest.mark.parametrize("causal", [False, True])
def test_latte_is_the_one_defined(causal):
    rng = np.random.default_rng(6)
    q, k, V = rng.standard_normal((9, 3)), rng.standard_normal((9, 3)), rng.standard_normal((9, 2))
    close(latte(q, k, V, causal=causal), definitions.latte(q, k, V, causal))


def test_tssa_and_coding_rate_are_those_defined():
    rng = np.random.default_rng(7)
    W, temperature = rng.standard_normal((3, 8, 4)), rng.uniform(0.5, 3, 3)
    found = tssa(W, temperature, causal=False, c=2.0)
    close(found, definitions.tssa(W, temperature, c=2.0), 1e-6)  # 1e-8 is added to its sums
    Z = rng.standard_normal((20, 4))
    close(coding_rate(Z, 0.5), definitions.coding_rate(Z, 0.5))


def test_each_name_means_what_it_means_elsewhere():
    homes = [importlib.import_module(name) for name in ("levattn", "levattn.attention", "levattn.attention.rates")]
    elsewhere = {name for home in homes for name in home.__all__}
    assert set(definitions.__all__) - elsewhere == {"attention_scores", "poisson_sample", "softmax"}
