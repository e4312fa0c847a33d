"""States after a million positions: finite, and those of the definition, for logits and scales that go anywhere."""

from __future__ import annotations

import numpy as np
import pytest

from levattn.attention import latte
from levattn.states import Moments
from token_calls import tssa

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, CHUNK = 1_000_000, 20_000
SCALES = 10.0 ** np.asarray([-30, 0, 30, -15, 15])[np.arange(STEPS // CHUNK) % 5]  # of each chunk

# name -> logits of all positions
LOGITS = {
    "rise": lambda t: 0.5 * t,
    "fall": lambda t: -0.5 * t,
    "wide": lambda t: 40 * np.sin(t),
    "saw": lambda t: t % 70_000.0,
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("rise", "float32"),
        ("saw", "float32"),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in (("fall", "float32"), ("wide", "float32"))),
        pytest.param("rise", "float64", marks=pytest.mark.thorough),
    ],
)
def test_latent_states_of_a_million_positions(name: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    K = LOGITS[name](np.arange(STEPS)).astype(dtype)[:, None]
    V = (np.repeat(SCALES, CHUNK) * (1 + rng.random(STEPS))).astype(dtype)[:, None]
    Q, state = np.zeros((CHUNK, 1), dtype), None
    for low in range(0, STEPS, CHUNK):
        cut = slice(low, low + CHUNK)
        Y, state = latte(Q, K[cut], V[cut], state=state, return_state=True)
        assert np.isfinite(Y).all()
    for _ in range(100):  # steps of decoding: nothing more is seen
        Y, state = latte(Q[:1], np.full((1, 1), -np.inf, dtype), V[:1], state=state, return_state=True)
    E = np.exp(K.astype(np.longdouble) - K.max())
    expected = (E * V).sum() / E.sum()
    # a logit of 5e5 is exact to half a unit of its last place in the state's float64 and in float32 both
    np.testing.assert_allclose(Y[-1, 0], float(expected), rtol={"float64": 1e-12, "float32": 1e-5}[dtype])


@pytest.mark.parametrize(("dtype", "decay"), [("float64", 0.5), ("float32", 0.999), ("float32", 1.0)])
def test_token_states_of_a_million_tokens(dtype: str, decay: float) -> None:
    rng, state = np.random.default_rng(1), None
    for scale in SCALES * (np.arange(len(SCALES)) < 45):  # at the end all are zero, and what decays dies out
        scale = scale if dtype == "float64" else min(scale, 1e15)  # squares have to be within its range
        W = (scale * rng.standard_normal((2, CHUNK, 1))).astype(dtype)
        Y, state = tssa(W, decay=decay, state=state, return_state=True)
        assert np.isfinite(Y).all()
    assert state is not None
    for part in (state.norms, state.tokens):
        total, weight = part.sums()
        assert np.isfinite(total).all()
        assert np.all((total == 0) if decay == 0.5 else (total >= 0))
        assert np.isfinite(weight).all()
        assert np.all(weight >= 0)


@pytest.mark.parametrize("diagonal", [False, True])
def test_decaying_moments_of_a_million_rows(diagonal: bool) -> None:
    rng, decay, last = np.random.default_rng(2), 0.999, 200_000  # what is before has a factor of e⁻²⁰⁰
    X = np.repeat(SCALES, CHUNK)[:, None] * rng.standard_normal((STEPS, 2))
    moments = Moments(2, diagonal=diagonal, decay=decay)
    for low in range(0, STEPS, CHUNK):
        moments = moments.update(X[low : low + CHUNK])
    total, weight = moments.sums()
    factors, wide = np.longdouble(decay) ** np.arange(last - 1, -1, -1), X[-last:].astype(np.longdouble)
    expected = (factors * wide.T) @ wide
    norms = np.sqrt(np.diag(expected))
    size = norms * norms if diagonal else np.outer(norms, norms)
    # a step rounds by half a unit, and what it rounds decays as well
    assert np.all(abs(total - (np.diag(expected) if diagonal else expected)) <= 2 / (1 - decay) * 2.0**-52 * size)
    np.testing.assert_allclose(float(weight), float(factors.sum()), rtol=1e-12)
