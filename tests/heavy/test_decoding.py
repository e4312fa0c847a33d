"""Causal sets: the heavy entries of any query over a prefix that grows, against the definition over all of it."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import levattn
import naive
import strategies
from adversary.families import Case
from adversary.oracle import Truth
from adversary.promises import Breach
from adversary.routes import judge_decoding
from levattn import CausalUniversalSet, HeavyKeys, NonFiniteError
from strategies import STORAGE, Float, as_float64, examples, stores
from streams import check_error, heavy_tailed, in_chunks, named_rng, prefixes

N, D = 150, 3  # rows that are factored twice, and some that wait
TIE = 1e-9  # relative slack within which a score counts as equal to ε
SOUND = 1e-3  # relative error of scores, as stated, up to which they are compared with the definition


# -- prefixes ------------------------------------------------------------------------------------


KINDS = prefixes(N, D, late=80)
FULL_RANK = (
    *("gaussian", "heavy-tailed", "copies", "ties", "scale-1e150", "scale-1e300", "scale-1e-300", "columns-1e200"),
    *("conditioned-1e6", "conditioned-1e8", "one-huge-row", "growing"),
)
kinds = pytest.mark.parametrize("kind", KINDS)


@cache
def keys(kind: str) -> Float:
    K = np.array(KINDS[kind](named_rng(kind)), np.float64)
    K.flags.writeable = False
    return K


def even(K: Float) -> Float:
    """Powers of two that bring the columns of the keys to a size of about 1."""
    return np.asarray(np.ldexp(1.0, -np.frexp(np.max(np.abs(K), axis=0, initial=0.0))[1]))


def queries(rng: np.random.Generator, K: Float) -> Float:
    """For a prefix: random ones, the worst of some of its keys, axes, and those all but orthogonal to it."""
    scale = even(K)
    worst = naive.adversarial_queries(K * scale)
    some = np.unique([*rng.integers(0, len(K), 2), len(K) - 1])
    last = np.linalg.svd(K * scale, full_matrices=len(K) < D)[2][-1:]
    Q = np.vstack([rng.standard_normal((2, D)), worst[some], np.eye(D), last, last + 1e-12 * rng.standard_normal(D)])
    with np.errstate(over="ignore"):
        scaled = Q * scale
    return scaled[np.isfinite(scaled).all(axis=1)]


# -- helpers -------------------------------------------------------------------------------------


def appended(K: Any, epsilon: float, cuts: Any = (), **options: Any) -> CausalUniversalSet:
    """The set after all keys, in chunks that end at the cuts."""
    state: CausalUniversalSet = in_chunks(CausalUniversalSet(epsilon), K, cuts, **options)
    return state


def entries(found: HeavyKeys, query: int) -> tuple[Any, Any]:
    """Indices and scores of one query."""
    part = slice(found.starts[query], found.starts[query + 1])
    return found.indices[part], found.scores[part]


def bits(found: HeavyKeys) -> tuple[Any, ...]:
    return tuple(None if value is None else value.tobytes() for value in vars(found).values())


def breaches(found: HeavyKeys, Q: Float, K: Float, epsilon: float, truth: Truth | None = None) -> list[Breach]:
    """Entries, scores, normalizers and masses that are not those of exact arithmetic."""
    case = Case("found", 0, K, Q, K, epsilon)
    return list(judge_decoding(case, Truth(K, Q) if truth is None else truth, [(len(K), found)]))


# -- every step ----------------------------------------------------------------------------------


@kinds
def test_promises_hold_at_every_step(kind: str) -> None:
    """Errors are small for every query of keys of full rank, else for those that see more of them than rounding."""
    K, rng = keys(kind), named_rng(f"{kind} queries")
    states = [CausalUniversalSet(epsilon) for epsilon in (0.3, 1 / 17)]
    for t in range(1, N + 1):
        held = [state.update(K[t - 1 : t]).held for state in states]
        assert [state.n for state in states] == [t, t]
        if t > 9 and t % 9 != 1 and t not in (63, 64, 65, 81, 128, N):
            continue
        Q, scale = queries(rng, K[:t]), even(K[:t])
        truth = Truth(K[:t], Q)
        seen = np.linalg.norm((Q / scale) @ (K[:t] * scale).T, axis=1)
        size = np.linalg.norm(Q / scale, axis=1) * np.linalg.norm(K[:t] * scale)
        for state, count in zip(states, held, strict=True):
            assert count <= min(t, truth.rank / state.epsilon * (1 + 2 * TIE) + max(64, D))
            found = state.heavy(Q)
            assert breaches(found, Q, K[:t], state.epsilon, truth) == []
            large = found.error > (TIE if kind in FULL_RANK and t >= 2 * D else SOUND)
            assert np.all(seen[large] <= (0 if kind in FULL_RANK else 1e-8) * size[large])


@pytest.mark.parametrize("rank", [1, 2])
def test_queries_all_but_orthogonal_to_deficient_keys(rank: int) -> None:
    # What these queries see of the keys is the rounding of the queries. Either that is resolved, or the error says so.
    for seed in range(25):
        rng = np.random.default_rng([rank, seed])
        K = strategies.integer_deficient(rng, 70, D, rank)
        Q = rng.standard_normal((12, D - rank)) @ np.linalg.svd(K)[2][rank:]
        truth = Truth(K, Q)
        for cuts in ([], [66], range(1, 70)):
            assert breaches(appended(K, 1 / 17, cuts).heavy(Q), Q, K, 1 / 17, truth) == []


@pytest.mark.parametrize("kind", ["product", "less-mean", "far-longer"])
def test_few_keys_are_held_where_rounding_hides_their_rank(kind: str) -> None:
    rng = named_rng(kind)
    K = rng.standard_normal((400, D))
    if kind == "product":
        K = rng.standard_normal((400, 2)) @ rng.standard_normal((2, D))
    elif kind == "less-mean":
        K -= K.mean(axis=1, keepdims=True)
    else:
        K[[9, 90]] *= 1e17
    state = appended(K, 0.1, range(7, 400, 7))
    assert state.held <= D / 0.1 * (1 + 1e-5) + 64
    Q = np.vstack([queries(rng, K), K[:4], np.linalg.svd(K)[2]])
    assert breaches(state.heavy(Q), Q, K, 0.1) == []


@kinds
@given(data=st.data())
@examples(4)
def test_promises_hold_for_any_chunks(kind: str, data: st.DataObject) -> None:
    K, cuts = keys(kind), sorted(data.draw(st.lists(st.integers(0, N), max_size=6)))
    Q = queries(named_rng(f"{kind} chunks"), K)
    assert breaches(appended(K, 0.1, cuts).heavy(Q), Q, K, 0.1) == []


def test_asking_changes_nothing() -> None:
    K = keys("conditioned-1e6")
    Q = queries(named_rng("asking"), K)
    state, silent = CausalUniversalSet(0.1), CausalUniversalSet(0.1)
    for t in range(N):
        state.update(K[t : t + 1]).heavy(Q)
        silent.update(K[t : t + 1])
        assert state.held == silent.held
    assert bits(state.heavy(Q)) == bits(silent.heavy(Q)) == bits(state.heavy(Q))


@pytest.mark.parametrize("m", [64, 65, 73])
def test_ties_are_in(m: int) -> None:
    K = np.tile(np.eye(D), (m, 1))
    found = appended(K, 1 / m, [100]).heavy(np.eye(D))
    assert np.array_equal(found.starts, [0, m, 2 * m, 3 * m])
    np.testing.assert_allclose(found.scores, 1 / m, rtol=1e-14)
    assert np.array_equal(found.indices, np.arange(3 * m).reshape(m, 3).T.ravel())


@pytest.mark.parametrize("small", [2.0**-20, 2.0**-30, 2.0**-36, 2.0**-40])
def test_ties_of_ill_conditioned_keys_are_in(small: float) -> None:
    # three directions of m copies each; the query that sees one of them alone is exact
    T = np.array([[1, 1, 1], [0, small, 3 * small], [0, 0, small]])
    Q = np.array([[1, 0, 0], [-1, 1 / small, 0], [2, -3 / small, 1 / small]])
    for m in range(33, 110):
        found = appended(np.tile(T, (m, 1)), 1 / m, [70]).heavy(Q)
        assert np.diff(found.starts).tolist() == [m, m, m]
        assert np.all(np.abs(found.scores * m - 1) <= TIE + 4 * np.repeat(found.error, m))


# -- what is held -----------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [2, 5, 70])
@pytest.mark.parametrize("step", [1, 63, 64, 1000, 5000])
def test_no_more_keys_are_held_than_the_theorem_lets_be(step: int, d: int) -> None:
    epsilon, n = 0.2, 300 if step == 1 else 3000
    for growth in (0.0, 0.01, -0.01):
        K = heavy_tailed(named_rng(f"held {d}"), n, d) * np.exp(growth * np.arange(n))[:, None]
        state = CausalUniversalSet(epsilon)
        for low in range(0, n, step):
            state.update(K[low : low + step])
            assert state.held <= d / epsilon * (1 + 2 * TIE) + max(64, d) - 1
        Q = np.vstack([K[-1:], np.linalg.solve(K.T @ K, K[-1])[None]])
        found, A = state.heavy(Q), naive.attention(Q, K)
        for query in range(2):
            indices, scores = entries(found, query)
            assert np.array_equal(indices, np.flatnonzero(A[query] >= epsilon))
            np.testing.assert_allclose(scores, A[query, indices], rtol=1e-8)


def test_no_more_are_held_while_every_key_is_new() -> None:
    d, epsilon = 4, 0.25
    state = CausalUniversalSet(epsilon)
    for t in range(2000):
        state.update(np.eye(d)[[t % d]] * 1.3 ** (t / 10))
        assert state.held <= d / epsilon + 63


def test_keys_of_zeros_are_let_go() -> None:
    state = appended(np.zeros((1000, 4)), 0.1, [3, 500])
    assert state.held <= 63
    found = state.heavy(np.vstack([np.eye(4), np.zeros((1, 4))]))
    assert not np.any(found.normalizers)
    assert not np.any(found.captured_mass)
    assert found.indices.size == 0
    assert found.error.max() <= 1e-15


def test_a_key_let_go_is_never_heavy_again() -> None:
    # Scores among the keys so far only fall: no entry is heavy later for a key whose leverage score was below ε.
    K, epsilon = keys("heavy-tailed"), 0.1
    state, least = CausalUniversalSet(epsilon), np.full(N, np.inf)
    for t in range(1, N + 1):
        least[:t] = np.minimum(least[:t], naive.leverage_svd(K[:t]))
        found = state.update(K[t - 1 : t]).heavy(naive.adversarial_queries(K[:t]))
        assert np.all(least[found.indices] >= epsilon * (1 - 2 * TIE))
        assert np.array_equal(np.unique(found.indices), np.flatnonzero(least[:t] >= epsilon))


# -- dtypes, masks, batches, payload --------------------------------------------------------------------


@stores()
def test_every_storage_type(storage: str) -> None:
    stored = STORAGE[storage](heavy_tailed(named_rng("stored"), 300, 4).clip(-1e3, 1e3))
    K = as_float64(stored)
    Q = np.vstack([named_rng("stored queries").standard_normal((5, 4)), naive.adversarial_queries(K)[::30]])
    asked = STORAGE[storage](Q / np.abs(Q).max(axis=1, keepdims=True))
    state = appended(stored, 0.05, [1, 100, 100])
    assert breaches(state.heavy(asked), as_float64(asked), K, 0.05) == []
    assert breaches(state.heavy(Q), Q, K, 0.05) == []  # queries of another dtype


@stores("float64", "float16", "bfloat16", "torch-bfloat16")
@pytest.mark.parametrize("garbage", [np.nan, -np.inf, 1e4])
def test_masked_rows_are_never_heavy(garbage: float, storage: str) -> None:
    rng = named_rng("masked")
    K = heavy_tailed(rng, 300, 4).clip(-1e3, 1e3)
    mask = rng.random(300) < 0.6
    mask[100:180] = False
    K[~mask] = garbage
    stored = STORAGE[storage](K)
    kept = np.where(mask[:, None], as_float64(stored), 0)
    Q = np.vstack([rng.standard_normal((5, 4)), naive.adversarial_queries(kept)[::20]])
    state = appended(stored, 0.05, [1, 150, 190], mask=mask)
    found = state.heavy(Q)
    assert breaches(found, Q, kept, 0.05) == []
    assert np.all(mask[found.indices])
    assert state.n == 300
    assert appended(stored, 0.05, mask=np.zeros(300, bool)).heavy(Q).indices.size == 0


def test_every_head_is_its_own_set_and_queries_come_in_groups() -> None:
    heads = np.stack([keys(kind) for kind in KINDS]).reshape(5, -1, N, D)
    mask = named_rng("heads").random(heads.shape[:-1]) < 0.9
    payload = np.arange(heads[..., 0].size * 2).reshape(*heads.shape[:-1], 2)
    groups = np.stack([queries(named_rng("groups"), keys("gaussian"))[:4] * even(keys(kind)) for kind in KINDS])
    Q = groups.reshape(5, -1, 4, D)
    state = appended(heads, 0.1, [1, 70, 150], mask=mask, payload=payload)
    found = state.heavy(Q)
    assert len(found) == len(KINDS)
    held = 0
    for each, at in zip(found, np.ndindex(heads.shape[:2]), strict=True):
        alone = appended(heads[at], 0.1, [1, 70, 150], mask=mask[at], payload=payload[at])
        assert bits(alone.heavy(Q[at])) == bits(each)
        held += alone.held
        for query in range(4):  # each query by itself, too
            indices, scores = entries(alone.heavy(Q[at][query : query + 1]), 0)
            assert np.array_equal(indices, entries(each, query)[0])
            np.testing.assert_allclose(scores, entries(each, query)[1], rtol=1e-12)
        assert np.array_equal(each.payload, payload[at][each.indices])
    assert state.held == held


def test_no_rows_and_no_queries() -> None:
    state = CausalUniversalSet(0.1).update(np.ones((0, 3)))
    found = state.heavy(np.ones((2, 3)))
    assert (state.n, state.held) == (0, 0)
    assert found.starts.tolist() == [0, 0, 0]
    assert not np.any(found.normalizers)
    state.update(keys("gaussian")).update(np.ones((0, 3)))
    assert state.n == N
    none = state.heavy(np.ones((0, 3)))
    assert (none.starts.tolist(), none.indices.size, none.normalizers.size) == ([0], 0, 0)
    assert state.update(np.ones((0, 3)), mask=np.ones(0, bool)).n == N


@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e160, 1e300])
def test_queries_of_any_size(size: float) -> None:
    K = keys("heavy-tailed")
    state, Q = appended(K, 0.1, [100]), named_rng("sizes").standard_normal((20, D))
    found, same = state.heavy(Q * size), state.heavy(Q)
    assert np.array_equal(found.indices, same.indices)
    np.testing.assert_allclose(found.scores, same.scores, rtol=1e-12)
    with np.errstate(over="ignore", under="ignore"):
        np.testing.assert_allclose(found.normalizers, same.normalizers * size * size, rtol=1e-12)


# -- errors --------------------------------------------------------------------------------------------


def good(n: int) -> Float:
    return np.tile(keys("gaussian")[:20], (n // 20 + 1, 1))[:n]


BAD_QUERIES: dict[str, tuple[type[Exception], tuple[str, ...], Any]] = {
    "columns": (ValueError, (r"\bQ\b", "d = 4", "d = 3"), np.ones((2, 4))),
    "batch": (ValueError, (r"\bQ\b", "batch", r"\(2,\)", r"\(\.\.\., g, d\)"), np.ones((2, 1, 3))),
    "one-axis": (ValueError, (r"\bQ\b", "d"), np.ones(3)),
    "nan": (NonFiniteError, (r"\bQ\b", r"\b1\b", "finite"), np.array([[1.0, 1, 1], [1, np.nan, 1]])),
    "infinity": (NonFiniteError, (r"\bQ\b", r"\b0\b", "finite"), np.array([[1.0, 1, np.inf]])),
    "integers": (TypeError, (r"\bQ\b", "int64"), np.ones((2, 3), int)),
    "no-array": (TypeError, (r"\bQ\b", "array"), "query"),
}


@pytest.mark.parametrize("name", BAD_QUERIES)
@pytest.mark.parametrize("before", [20, 100])
def test_bad_queries(before: int, name: str) -> None:
    kind, words, Q = BAD_QUERIES[name]
    state = appended(good(before), 0.2)
    seen = bits(state.heavy(np.eye(3)))
    with pytest.raises(kind) as caught:
        state.heavy(Q)
    check_error(caught.value, *words)
    assert bits(state.heavy(np.eye(3))) == seen


def test_a_normalizer_lost_to_rounding_is_not_called_zero() -> None:
    """Keys on one line, none of them held, and a query that is orthogonal to them up to its last digit."""
    K = np.outer(np.where(np.arange(64) % 2, 1.0, -0.75), [0, -(2.0**-30), 2.0**-15])
    q = np.array([[0.0, np.sqrt(2) * (1 + 2.0**-52) * 2.0**28, np.sqrt(2) * 2.0**13]])
    assert any(sum(Fraction(x) * Fraction(y) for x, y in zip(q[0], k, strict=True)) for k in K)
    found = levattn.CausalUniversalSet(0.5).update(K).heavy(q)
    assert found.normalizers[0] > 0 or found.error[0] > 1
