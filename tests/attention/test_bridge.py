"""What ties the attentions of this library together: one moment, its diagonal, and its determinant.

Formulas here are written with numpy alone; the functions of the library are compared with them, and with one another.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import levattn
from levattn.attention import rates
from levattn.states import Moments
from libraries import needs_torch
from token_calls import memberships, tssa

pytestmark = pytest.mark.usefixtures("one_thread")

H, T, D = 3, 40, 5


def tokens(seed: int = 0) -> Any:
    """Heads whose channels are correlated and of different sizes, (h, T, d)."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((H, T, D)) @ (rng.standard_normal((H, D, D)) + 2 * np.eye(D)) * [1, 3, 0.2, 1, 10]


def diagonal_scores(W: Any) -> Any:
    """Σ_i w_ti² / Σ_s w_si², (h, T)."""
    return (W**2 / (W**2).sum(axis=1, keepdims=True)).sum(axis=2)


def softmax_over_heads(logits: Any) -> Any:
    E = np.exp(logits - logits.max(axis=0))
    return E / E.sum(axis=0)


def read(state: Moments, W: Any) -> Any:
    """The scores of tokens by the factor of a state, with what the state is not asked to have seen itself."""
    factor, heads = state.factor(), np.asarray(W, np.float64)
    return np.stack([(factor.item(h).whitened(rows) ** 2).sum(-1) for h, rows in enumerate(heads)])


# -- the diagonal of the moment ----------------------------------------------------------


def test_diagonal_leverage_scores_are_the_scores_of_a_diagonal_moment() -> None:
    W = tokens()
    state = Moments(D, (H,), diagonal=True).update(W)
    np.testing.assert_allclose(read(state, W), diagonal_scores(W), rtol=1e-13)
    as_matrices = np.stack([np.diag(np.diag(w.T @ w)) for w in W])
    expected = np.einsum("hti,hij,htj->ht", W, np.linalg.inv(as_matrices), W)
    np.testing.assert_allclose(read(state, W), expected, rtol=1e-12)
    full = Moments(D, (H,)).update(W)
    np.testing.assert_allclose(np.diagonal(full.result(), axis1=1, axis2=2), state.result(), rtol=1e-14)
    np.testing.assert_allclose(read(full, W), levattn.leverage_scores(W), rtol=1e-10)


def test_diagonal_leverage_scores_sum_to_the_number_of_channels_as_exact_ones_do_to_the_rank() -> None:
    W = tokens(1)
    np.testing.assert_allclose(read(Moments(D, (H,), diagonal=True).update(W), W).sum(axis=1), D, rtol=1e-13)
    W[:, :, 4] = W[:, :, 0] + W[:, :, 1]
    np.testing.assert_allclose(read(Moments(D, (H,), diagonal=True).update(W), W).sum(axis=1), D, rtol=1e-13)
    np.testing.assert_allclose(levattn.leverage_scores(W).sum(axis=1), D - 1, rtol=1e-10)


def test_diagonal_and_exact_leverage_agree_where_the_moment_is_diagonal() -> None:
    W = tokens(2)
    turned = np.stack([w @ np.linalg.eigh(w.T @ w)[1] for w in W])
    np.testing.assert_allclose(diagonal_scores(turned), levattn.leverage_scores(turned), rtol=1e-9)
    few = np.array([[[1.0, 2], [2, 1]]])  # and elsewhere by chance
    np.testing.assert_allclose(diagonal_scores(few), levattn.leverage_scores(few), rtol=1e-13)
    assert np.abs(diagonal_scores(W) - levattn.leverage_scores(W)).max() > 0.01


@pytest.mark.parametrize("seed", range(20))
def test_the_correlations_of_channels_bound_exact_by_diagonal_leverage(seed: int) -> None:
    W = tokens(seed)
    exact, diagonal = levattn.leverage_scores(W), diagonal_scores(W)
    for h in range(H):
        norms = np.linalg.norm(W[h], axis=0)
        eigenvalues = np.linalg.eigvalsh(W[h].T @ W[h] / np.outer(norms, norms))
        assert (exact[h] <= diagonal[h] / eigenvalues[0] * (1 + 1e-9)).all()
        assert (exact[h] >= diagonal[h] / eigenvalues[-1] * (1 - 1e-9)).all()


# -- memberships -------------------------------------------------------------------------


def test_logits_of_released_memberships_are_diagonal_leverage_scores() -> None:
    W, theta = tokens(3), np.array([1.0, 4.0, 9.0])
    scores = read(Moments(D, (H,), diagonal=True).update(W), W)
    P = memberships(W, theta, causal=False)
    np.testing.assert_allclose(P, softmax_over_heads(theta[:, None] * scores), rtol=1e-11)
    logits = np.log(P)
    np.testing.assert_allclose(
        logits - logits[:1], theta[:, None] * diagonal_scores(W) - theta[0] * diagonal_scores(W)[:1], atol=1e-11
    )


def test_logits_of_leverage_memberships_are_exact_leverage_scores() -> None:
    W, theta = tokens(4), np.array([1.0, 4.0, 9.0])
    P = memberships(W, theta, membership="leverage", causal=False)
    np.testing.assert_allclose(P, softmax_over_heads(theta[:, None] * levattn.leverage_scores(W)), rtol=1e-9)


def test_logits_of_causal_memberships_are_online_leverage_scores_channel_by_channel() -> None:
    W, theta = tokens(5), np.array([1.0, 4.0, 9.0])
    channels = W.transpose(0, 2, 1)[..., None]  # of one column each: there the diagonal is all
    online = levattn.online_leverage_scores(channels).sum(axis=1)
    np.testing.assert_allclose(online, (W**2 / np.cumsum(W**2, axis=1)).sum(axis=2), rtol=1e-12)
    np.testing.assert_allclose(memberships(W, theta), softmax_over_heads(theta[:, None] * online), rtol=1e-11)
    for t in (0, 7, T - 1):
        so_far = Moments(D, (H,), diagonal=True).update(W[:, : t + 1])
        np.testing.assert_allclose(read(so_far, W[:, t : t + 1])[:, 0], online[:, t], rtol=1e-12)


def test_online_scores_are_at_least_those_among_all_tokens_and_sum_to_a_harmonic_number() -> None:
    W = tokens(6)
    channels = W.transpose(0, 2, 1)[..., None]
    online = levattn.online_leverage_scores(channels).sum(axis=1)
    assert (online >= diagonal_scores(W) * (1 - 1e-12)).all()
    assert (levattn.online_leverage_scores(W) >= levattn.leverage_scores(W) * (1 - 1e-9)).all()
    rng = np.random.default_rng(7)
    many = rng.standard_normal((400, 1, 200, 1))  # exchangeable: the score of token t is 1/t on average
    mean = levattn.online_leverage_scores(many)[:, 0].mean(axis=0)
    assert mean.sum() == pytest.approx(sum(1 / t for t in range(1, 201)), rel=0.05)


def test_scores_dilute_with_the_number_of_tokens_unless_they_are_multiplied_by_it() -> None:
    rng = np.random.default_rng(8)
    spread = {}
    for n in (16, 4096):
        W = rng.standard_normal((H, n, D))
        assert diagonal_scores(W).mean() == pytest.approx(D / n, rel=1e-12)
        for normalize in ("sum", "mean"):
            P = memberships(W, 1.0, causal=False, normalize=normalize)
            spread[n, normalize] = np.abs(H * P - 1).mean()
    assert spread[4096, "sum"] < 0.02 * spread[16, "sum"]
    assert spread[4096, "mean"] > 0.5 * spread[16, "mean"]


# -- the operator and its rate -------------------------------------------------------------


def problem(seed: int) -> tuple[Any, Any, float]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((T, 6)), rng.standard_normal((H, 6, D)) / 3, 0.7


def test_token_statistics_attention_with_tied_outputs_is_the_descent_step() -> None:
    Z, U, eps = problem(9)
    step, theta = 0.5 * float(rates.largest_step(U, eps)), np.ones(H)
    W = Z @ U
    options: dict[str, Any] = {"membership": "norm", "causal": False}
    P = memberships(W, theta, **options)
    np.testing.assert_allclose(P, softmax_over_heads((W**2).sum(axis=2)), rtol=1e-12)
    Y = tssa(W, theta, c=6 / eps**2, **options)
    tied = Z + step * np.einsum("htp,hdp->td", Y, U)
    np.testing.assert_allclose(tied, rates.descent_step(Z, P.T, U, eps, step=step), rtol=1e-11, atol=1e-12)
    assert rates.variational_rate(tied, P.T, U, eps) < rates.variational_rate(Z, P.T, U, eps)


def test_concatenated_orthonormal_heads_shrink_every_token_and_the_rate() -> None:
    rng = np.random.default_rng(10)
    U = np.linalg.qr(rng.standard_normal((6, 6)))[0].reshape(6, 3, 2).transpose(1, 0, 2)
    for _ in range(50):
        Z = rng.standard_normal((T, 6)) * np.exp(rng.uniform(-3, 3))
        W = Z @ U
        P = memberships(W, 1.0, causal=False)
        Y = tssa(W, 1.0, causal=False)  # as released: c = 1, within the bound of 2
        tied = Z + np.einsum("htp,hdp->td", Y, U)
        assert (np.linalg.norm(tied, axis=1) <= np.linalg.norm(Z, axis=1)).all()
        eps = math.sqrt(6)  # for which c is 1
        assert rates.variational_rate(tied, P.T, U, eps) < rates.variational_rate(Z, P.T, U, eps)


@needs_torch
def test_the_operator_is_the_gradient_of_the_variational_rate() -> None:
    import torch

    Z, U, eps = problem(11)
    W = Z @ U
    P = memberships(W, 1.0, membership="norm", causal=False)
    z = torch.from_numpy(Z).requires_grad_()
    (gradient,) = torch.autograd.grad(
        rates.variational_rate(z, torch.from_numpy(P.T.copy()), torch.from_numpy(U), eps), z
    )
    Y = tssa(W, 1.0, membership="norm", causal=False, c=6 / eps**2)
    np.testing.assert_allclose(np.einsum("htp,hdp->td", Y, U), -T * gradient.numpy(), rtol=1e-9, atol=1e-12)


def test_the_state_of_token_statistics_attention_holds_the_variational_rate() -> None:
    Z, U, eps = problem(12)
    W = Z @ U
    P = memberships(W, 1.0, membership="norm")
    _, state = tssa(W, 1.0, membership="norm", return_state=True)
    sizes = np.asarray(state.tokens.weight)
    second = np.asarray(state.tokens.result()) / sizes[:, None]
    rate = (sizes / T * np.log1p(6 / eps**2 * second).sum(axis=1)).sum() / 2
    assert rate == pytest.approx(rates.variational_rate(Z, P.T, U, eps), rel=1e-12)


# -- the determinant -----------------------------------------------------------------------


def test_online_leverage_scores_telescope_to_the_coding_rate_of_tokens_and_of_groups() -> None:
    W, eps = tokens(13), 0.3
    ridge = T * eps**2 / D
    each = -np.log1p(-levattn.online_leverage_scores(W, ridge=ridge)) / 2
    np.testing.assert_allclose(each.sum(axis=1), rates.coding_rate(W, eps), rtol=1e-11)
    for t in (1, 10, T):  # the determinant of every prefix
        determinants = [np.linalg.slogdet(np.eye(D) + w[:t].T @ w[:t] / ridge)[1] / 2 for w in W]
        np.testing.assert_allclose(each[:, :t].sum(axis=1), determinants, rtol=1e-11)
    Z, P = W[0], memberships(W, 1.0).T
    total = 0.0
    for k in range(H):
        size = P[:, k].sum()
        online = levattn.online_leverage_scores(np.sqrt(P[:, k : k + 1]) * Z, ridge=size * eps**2 / D)
        total += size / T * -np.log1p(-online).sum() / 2
    assert total == pytest.approx(rates.compression_rate(Z, P, eps), rel=1e-11)


def test_the_score_of_the_next_token_is_that_by_the_state_before_it() -> None:
    Z = tokens(14)[0]
    state, scores = Moments(D), levattn.online_leverage_scores(Z)
    for t in range(T):
        if t >= D:
            x = float(read(state, Z[None, t : t + 1])[0, 0])  # among the tokens before it
            assert scores[t] == pytest.approx(x / (1 + x), rel=1e-9)
        state.update(Z[t : t + 1])
    np.testing.assert_allclose(scores[:D], 1, rtol=1e-12)
