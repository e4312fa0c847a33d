"""Ill-conditioned keys on a CUDA device: re-based side by side there, by the decisions of main memory.

Inside: rounds and room are limited, and factors compared by their parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import levattn
from emulator import device
from levattn._kernels import Rows
from levattn._kernels.factor import cpu as factor_cpu
from levattn._kernels.factor import cuda as factor_cuda
from levattn.linalg import preconditioned, routes
from levattn.linalg.routes import factor_moments

pytestmark = pytest.mark.skipif(not device.AVAILABLE, reason="there is neither a CUDA device nor g++ to emulate one")

N, D = 300, 12

SPREADS = {
    "of condition 1e5": 1e-5,
    "of condition 1e9": 1e-9,
    "of condition 1e11": 1e-11,
    "of condition 1e13": 1e-13,
}


def spread(smallest: float, seed: int, rank: int = D) -> Any:
    """Keys with singular values down to `smallest`, in directions of their own."""
    rng = np.random.default_rng(seed)
    U, V = (np.linalg.qr(rng.standard_normal((size, rank)))[0] for size in (N, D))
    return 30 * (U * np.geomspace(1, smallest, rank)) @ V.T


def kinds() -> dict[str, Any]:
    rng = np.random.default_rng(9)
    found = {name: spread(smallest, seed) for seed, (name, smallest) in enumerate(SPREADS.items())}
    found["sound"] = rng.standard_normal((N, D))
    found["of rank 7"] = rng.integers(-9, 10, (N, 7)) @ rng.integers(-9, 10, (7, D)).astype(np.float64)
    found["of rank 9, ill-conditioned"] = spread(1e-7, 20, 9)
    found["with a column of zeros"] = spread(1e-8, 21)
    found["with a column of zeros"][:, 5] = 0
    found["with a faint direction"] = spread(1e-4, 22)
    found["with a faint direction"][:, 0] = found["with a faint direction"][:, 1]
    found["with a faint direction"][17, 0] *= 1 + 2.0**-49
    found["of zeros"] = np.zeros((N, D))
    return found


KEYS = kinds()


def compare(found: Any, expected: Any) -> None:
    """The decisions are the same, and the figures to what they claim."""
    assert np.array_equal(found.rank, expected.rank)
    assert found.arithmetic == expected.arithmetic
    assert found.null_directions.keys() == expected.null_directions.keys()
    assert found.spans.keys() == expected.spans.keys()
    assert found.hidden.keys() == expected.hidden.keys()
    assert np.array_equal(np.isfinite(found.error), np.isfinite(expected.error))
    np.testing.assert_allclose(found.error, expected.error, rtol=0.05, atol=1e-15)
    scores, others = found.scores(as_float64=True)[0].get(), expected.scores(as_float64=True)[0]
    for item, error in enumerate(found.score_error + expected.score_error):
        # where there is more below the numerical rank, rounding turns the row space
        most = 1e-5 if item in expected.hidden else 4 * error
        np.testing.assert_allclose(scores[item], others[item], rtol=most, atol=1e-12)


@pytest.mark.parametrize("wide", [False, True], ids=["blocks of threads", "blocks of columns"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_heads_of_all_kinds_side_by_side(cupy: Any, dtype: str, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if wide:
        monkeypatch.setattr(factor_cuda, "_WIDE", 1)
        monkeypatch.setattr(factor_cuda, "_BLOCK", 5)
    K = np.stack(list(KEYS.values())).astype(dtype)
    for single in ("no", "yes"):
        expected = factor_moments(Rows(K, dtype), single=single)
        found = factor_moments(Rows(cupy.asarray(K), dtype), single=single)
        compare(found, expected)
    assert "double" in found.arithmetic
    assert dtype == "float32" or "compensated" in found.arithmetic
    expected, found = levattn.universal_set(K, 0.1), levattn.universal_set(cupy.asarray(K), 0.1)
    assert np.array_equal(found.mask.get(), expected.mask)
    assert found.guarantee == expected.guarantee


@pytest.mark.parametrize("name", KEYS)
def test_a_head_has_the_same_bits_alone_and_beside_others(cupy: Any, name: str) -> None:
    K = np.stack(list(KEYS.values()))
    item = list(KEYS).index(name)
    whole = levattn.universal_set(cupy.asarray(K), 0.1).factor
    alone = levattn.universal_set(cupy.asarray(K[item : item + 1]), 0.1).factor
    assert np.array_equal(whole.whitening[item], alone.whitening[0])
    assert whole.error[item] == alone.error[0]


@pytest.mark.parametrize("ridge", [0.0, 1e-12])
@pytest.mark.parametrize("rtol", [None, 1e-6])
def test_a_ridge_and_a_tolerance_decide_as_in_main_memory(cupy: Any, ridge: float, rtol: float | None) -> None:
    K = np.stack([KEYS[name] for name in SPREADS])
    options: dict[str, Any] = {"relative_ridge": ridge, "rtol": rtol}
    expected = levattn.leverage_scores(K, **options)
    np.testing.assert_allclose(levattn.leverage_scores(cupy.asarray(K), **options).get(), expected, rtol=1e-5)


def test_more_heads_than_there_is_room_for(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    K = cupy.asarray(np.stack([KEYS[name] for name in SPREADS]))
    expected = levattn.universal_set(K, 0.1).factor
    monkeypatch.setattr(routes, "_ROOM", 3 * D * D)
    found = levattn.universal_set(K, 0.1).factor
    assert np.array_equal(found.whitening, expected.whitening)
    assert np.array_equal(found.error, expected.error)


def test_rounds_end(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not good after the last round is taken as it is, with the error that it has."""
    K = np.stack([KEYS["of condition 1e5"], KEYS["sound"]])
    usual = levattn.universal_set(K, 0.1).factor.error[0]
    for module in (preconditioned, routes):
        monkeypatch.setattr(module, "MOST_ROUNDS", 1)
    expected = levattn.universal_set(K, 0.1).factor.error
    assert expected[0] > 1e3 * usual
    np.testing.assert_allclose(levattn.universal_set(cupy.asarray(K), 0.1).factor.error, expected, rtol=0.05)


def moments(d: int) -> tuple[Any, Any, Any]:
    """Moments that are sound, that need a shift, and that have no factor without one; sizes, and bases."""
    rng = np.random.default_rng(d)
    A = rng.standard_normal((4, 3 * d, d))
    A[1] *= np.geomspace(1, 1e-6, d)
    A[1] = A[1] @ np.linalg.qr(rng.standard_normal((d, d)))[0]
    A[2] *= np.exp2(rng.integers(-40, 40, d))
    G = np.swapaxes(A, 1, 2) @ A
    G[3] = np.outer(A[3, 0], A[3, 0]) * (1 + 1e-9 * np.eye(d)) - 1e-7 * np.diag(A[3, 0] ** 2)
    return G, np.sqrt(G.diagonal(axis1=1, axis2=2)), np.triu(rng.standard_normal((4, d, d)))


@pytest.mark.parametrize("how", ["shared", "room", "blocks of columns"])
@pytest.mark.usefixtures("host")
def test_rounds_of_the_device_are_those_of_main_memory(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: dict[str, dict[str, Any]] = {
        "shared": {},
        "room": {"shared_limit": lambda: 1 << 10},
        "blocks of columns": {"_WIDE": 1, "_BLOCK": 7},
    }
    for name, value in changed[how].items():
        monkeypatch.setattr(factor_cuda, name, value)
    for d in (1, 2, 17, 33, 65):
        G, sizes, bases = moments(d)
        for accepted in (np.inf, 1e6):
            for given in (None, bases):
                found = factor_cuda.rebased(G, sizes, given, 1e-10, accepted)
                expected = factor_cpu.rebased(G, sizes, given, 1e-10, accepted)
                assert found.good.tolist() == expected.good.tolist()
                assert found.whole().tolist() == expected.whole().tolist() == 4 * [True]
                np.testing.assert_allclose(found.bound[:3], expected.bound[:3], rtol=1e-3)
                even, other = (sizes[:, :, None] * each.W for each in (found, expected))
                largest = np.abs(other).max(axis=(1, 2), keepdims=True)
                np.testing.assert_allclose(even[:3] / largest[:3], other[:3] / largest[:3], atol=1e-3)
                assert (np.tril(found.W, -1) == 0).all()
                own = sizes[:, :, None] * found.W
                np.testing.assert_allclose(found.frobenius(), np.linalg.norm(own, axis=(1, 2)), rtol=1e-9)
                norms = np.linalg.norm(own, 2, axis=(1, 2))
                assert (found.spectral() <= norms * (1 + 1e-9)).all()
                assert (found.spectral() >= 0.9 * norms).all()
                if given is None:
                    assert found.W is found.C
                    np.testing.assert_allclose(found.of_moments(), expected.of_moments(), rtol=1e-6)
                else:
                    np.testing.assert_allclose(found.W, given @ found.C, rtol=1e-9, atol=1e-9 * np.abs(found.W).max())


@pytest.mark.parametrize("n", [2100, 3 * 2048])
def test_hard_heads_of_several_runs_of_rows_are_those_of_main_memory(cupy: Any, n: int) -> None:
    rng = np.random.default_rng(0)
    K = rng.standard_normal((4, n, 8))
    for head in (1, 2, 3):
        turned = np.linalg.qr(rng.standard_normal((8, 8)))[0]
        K[head] = K[head] * np.geomspace(1, 1e-6 / head, 8) @ turned
    K[:, 7] *= 4
    found, expected = levattn.universal_set(cupy.asarray(K), 0.01), levattn.universal_set(K, 0.01)
    np.testing.assert_allclose(found.scores.get(), expected.scores, rtol=1e-9)
    assert found.guarantee == expected.guarantee == "exact"
    assert found.sizes.tolist() == expected.sizes.tolist()
