"""What an adversary has broken: the smallest cases, judged as the routes are, and what no route shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

import levattn
from levattn.attention import Selection, causal_pruned_attention, pruned_attention
from strategies import trials

from .families import Case
from .oracle import Centered, Truth
from .promises import CLEAR
from .routes import FUNCTIONS, ROUTES

METHODS = ("auto", "gram", "qr", "svd")
SKETCHES = ("countsketch", "osnap", "srht", "jl")
QUERIES = ("heavy", "heavy of a set", "decoding")


def case(K: Any, Q: Any, epsilon: float, V: Any = None, storage: str = "float64", seed: int = 1) -> Case:
    keys, queries = np.asarray(K, np.float64), np.asarray(Q, np.float64)
    values = np.ones((len(keys), 2)) if V is None else np.asarray(V, np.float64)
    return Case("found", seed, keys, queries, values, epsilon, storage=storage)


def of_each(name: str, options: Any) -> list[str]:
    return [f"{name} {option}" for option in options]


# -- cases for routes -------------------------------------------------------------------------------------------------


def alone_in_a_column_beside_rank_deficiency() -> Iterator[Case]:
    x = np.random.default_rng(2).integers(-4, 5, 6144) * 1.0
    K = np.stack([0 * x, 3 * x, x], 1)
    K[5000, 0] = 1
    yield case(K, [[1.0, 0, 0], [1, 1, -3], [0, 0, 1]], 0.5)


def nearly_equal_columns() -> Iterator[Case]:
    for gap in (1e-10, 1e-7, 1e-12):
        K = np.random.default_rng(0).standard_normal((2000, 8))
        K[:, 1] = K[:, 0] + gap * K[:, 1]
        yield case(K, np.eye(8)[2:], 0.01)


def float32_columns_one_unit_apart() -> Iterator[Case]:
    K = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
    K[:, 1] = np.nextafter(K[:, 0], np.float32(9))
    yield case(K, np.eye(4), 0.01, storage="float32")


def an_entry_above_epsilon() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    K = rng.standard_normal((30, 4))
    K[:, 1] = K[:, 0] + 1e-10 * K[:, 1]
    Q = np.eye(4)[2:]
    A = np.square(Q @ K.T) / np.array([[math.fsum(x * x for x in row)] for row in (Q @ K.T).tolist()])
    yield case(K, Q, float(A.max() * (1 - 1e-7)), rng.standard_normal((30, 2)))


def before_a_key_that_is_much_larger() -> Iterator[Case]:
    yield case([[0, 1.0], [1e16, 0]], np.ones((2, 2)), 0.5, [[7.0, 7], [7, 7]])


def wide_keys_and_a_later_column() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    K = rng.integers(-3, 4, (40, 128)) * 1.0
    K[:, 127] = 0
    K[39, 127] = 1e12
    Q = rng.integers(-3, 4, (40, 128)) * 1.0
    yield case(K, Q, 0.25, rng.integers(-9, 9, (40, 2)))


def rows_graded_beyond_the_precision() -> Iterator[Case]:
    """Five generic rows in five dimensions have the score 1 each, whatever their sizes."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        yield case(rng.standard_normal((5, 5)) * 10.0 ** rng.choice([0, -14, -20, -7], 5)[:, None], np.eye(5), 0.5)


def two_keys_of_a_direction() -> Iterator[Case]:
    """A query that sees only keys 0 and 1 gives each of them half of its attention."""
    for seed in range(40):
        M = np.random.default_rng(seed).integers(-2, 3, (8, 3)).astype(np.float32)
        M[0] = M[1] = [0, 0, 2.0**-20]
        M[2:, 2] = 0
        yield case(M, np.eye(3), 1 / 3, storage="float32")


def a_query_nearly_orthogonal_to_the_keys() -> Iterator[Case]:
    K = np.full((1000, 2), 1e3)
    K[3] = 0, 1e-12
    yield case(K, [[1.0, -1]], 0.5, np.full((1000, 1), 7.0))


def columns_at_the_ends_of_the_range() -> Iterator[Case]:
    for K in (
        [[1e308, 1], [1e308, -1], [1e308, 2], [-1e308, 0]],
        [[1.5e308, 1], [0, 1], [0, 1], [5e-324, 0]],
        [[5e-324, 0], [0, 1e-323], [1.0, 1], [2, 2], [3, 3]],
    ):
        yield case(K, np.eye(2), 0.5)
    K = [[0.0, 2e307, -(2.0**1021)], [0, 0, -1e151], [1, 2.0**1021 * (1 + 2.0**-7), -(2.0**1021)]]
    yield case(K, np.eye(3), 0.5)


def few_rows() -> Iterator[Case]:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 11))
        yield case(rng.standard_normal((n, 5)) * 10.0 ** rng.integers(-8, 9, (n, 1)), np.eye(5), 0.5)


def a_large_entry_where_no_key_has_one() -> Iterator[Case]:
    for n in (1, 100):  # recent keys, and factored ones
        for large in (1e100, 4e179, 1e300):
            yield case(np.tile([[0.0, 1.0]], (n, 1)), [[large, 1.0]], 0.01)


def the_smallest_number() -> Iterator[Case]:
    yield case([[5e-324]], [[1.0]], 0.5)


def tables_no_larger_than_the_keys_ask_for() -> Iterator[Case]:
    yield case(np.ones((2, 1)), np.ones((1, 1)), 1e-9)


def products_beyond_the_range() -> Iterator[Case]:
    """The right entry or a typed refusal, not a warning of numpy."""
    yield case([[1e301]], [[1e300]], 0.5)


def independent_keys() -> Iterator[Case]:
    """Each has the score 1; the condition number of their sketch is some 200."""
    K = [[-0.671875, -1.2421875, -2.0], [0.0791015625, -0.125, 0.6640625], [0.8515625, 2.0, 2.0]]
    for storage in ("bfloat16", "float32", "float64"):
        for seed in range(20):
            yield case(K, np.eye(3), 1.0, storage=storage, seed=seed)


def the_only_key_that_a_query_meets() -> Iterator[Case]:
    """Its score is 1; its product is below twice the precision, or one of its entries or the query's out of range."""
    cancels = np.array([[1, 2.0**-60, 2.0**-200, -(2.0**-60), -1], *np.eye(5)[1:] - np.eye(5)[0]])
    yield case(cancels[:1], np.ones((1, 5)), 0.1)
    yield case(cancels, np.ones((1, 5)), 0.1)
    tiny, far = 2.0**-545, 2.0**1021
    across = [[0, 0, 1, tiny], [1, -1, 0, 0], [2, -2, 0, 0], [3, -3, 0, 0], [1, -1, 0, 0]]
    yield case(across, [[1, 1, 0, tiny]], 0.1, np.full((5, 1), 7.0))
    yield case([[1, 0, -1e-323], [0, far, -far]], [[0, 1e300, 1e300]], 0.1, np.full((2, 1), 7.0))
    yield case([[0, 0, 1], [far, -far, 6e-163]], [[-1.0, -1, 1]], 0.1, np.full((2, 1), 7.0))


def values_at_the_ends_of_the_range() -> Iterator[Case]:
    """Of one size, from the least number to the largest."""
    rng = np.random.default_rng(0)
    K, Q, V = rng.standard_normal((60, 3)), rng.standard_normal((60, 3)), rng.standard_normal((60, 2))
    V /= np.abs(V).max()
    for largest in (5e-324, 1e-320, 2.0**-1060, 2.0**-1021, 1e-163, 1e160, 3.6e306, 1.7e308):
        yield case(K, Q, 0.3, V * largest)
    yield case(K, Q, 0.3, np.full((60, 2), 7e306))  # whose sums are beyond it
    for largest in (2.0**-149, 1e-40, 1e-20, 1e20, 1e37, 3.4e38):
        yield case(np.float32(K), np.float32(Q), 0.3, np.float32(V * largest), storage="float32")


def a_query_that_is_repeated() -> Iterator[Case]:
    """In float32, where a batch rounds otherwise than a query alone."""
    for seed in range(30):
        K, Q, V = np.random.default_rng(seed).standard_normal((3, 40, 4)).astype(np.float32)
        yield case(3 * K, Q, 0.3, V[:, :2], storage="float32", seed=seed)


FOUND: list[tuple[Callable[[], Iterator[Case]], list[str]]] = [
    (
        alone_in_a_column_beside_rank_deficiency,
        [
            *("set auto", "stream", *QUERIES, *of_each("sketch", SKETCHES)),
            *of_each("set", ("Huber(1.0)", "Tukey(4.685)", "Fair(1.4)", "L1L2()", "Power(1.5)")),
            *of_each("stream", ("Huber(1.0)", "Tukey(4.685)", "Fair(1.4)", "L1L2()")),
        ],
    ),
    (nearly_equal_columns, ["heavy", "decoding"]),
    (float32_columns_one_unit_apart, ["heavy"]),
    (an_entry_above_epsilon, [*QUERIES]),
    (before_a_key_that_is_much_larger, ["heavy causal", "future"]),
    (wide_keys_and_a_later_column, ["heavy causal"]),
    (rows_graded_beyond_the_precision, ["set auto", "set qr", "stream", "size auto", "two passes"]),
    (two_keys_of_a_direction, ["set Power(0.5)"]),
    (a_query_nearly_orthogonal_to_the_keys, [*QUERIES]),
    (
        values_at_the_ends_of_the_range,
        [
            "heavy",
            "heavy of a set",
            "heavy of two passes",
            "heavy causal",
            "pruned",
            "pruned causal",
            "pruned coverage",
        ],
    ),
    (a_query_that_is_repeated, ["pruned coverage"]),
    (
        columns_at_the_ends_of_the_range,
        [f"{name} {method}" for name in ("set", "size", "scores") for method in METHODS],
    ),
    (few_rows, ["layout auto", "layout qr"]),
    (a_large_entry_where_no_key_has_one, ["heavy", "decoding"]),
    (the_only_key_that_a_query_meets, ["heavy", "heavy causal", "decoding"]),
    (the_smallest_number, ["set Power(4)", "set Power(6)"]),
    (tables_no_larger_than_the_keys_ask_for, ["heavy countsketch"]),
    (products_beyond_the_range, of_each("heavy", FUNCTIONS)),
    (independent_keys, of_each("sketch", SKETCHES[:3])),
]


@pytest.mark.parametrize(("cases", "names"), FOUND, ids=[cases.__name__ for cases, _ in FOUND])
def test_promises_hold_where_they_once_did_not(cases: Callable[[], Iterator[Case]], names: list[str]) -> None:
    for found in cases():
        truth = Truth(found.keys, found.queries)
        for name in names:
            assert ROUTES[name].breaches(found, truth) == [], name
            assert cases is products_beyond_the_range or not ROUTES[name].refused(found), name


# -- what no route shows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "f"), [("block", levattn.Huber()), ("lewis", 1.5)])
def test_a_key_alone_in_a_column_by_each_certificate(method: Any, f: Any) -> None:
    (found,) = alone_in_a_column_beside_rank_deficiency()
    assert 5000 in levattn.universal_set(found.keys, 0.5, f=f, method=method).indices


@pytest.mark.parametrize("method", METHODS)
def test_a_set_of_a_size_certifies_what_it_leaves_out_and_little_more(method: Any) -> None:
    """Scores 1, 1/11, 9/11 and 1/11, which the factor of graded float16 keys has to 1e-7."""
    K = np.array([[-64992.0, 1.0, -64992.0], [3.0, 0.0, 3.0], [-9.0, 0.0, -9.0], [3.0, 0.0, 3.0]], "float16")
    found = levattn.universal_set(K, size=2, method=method)
    assert found.indices.tolist() == [0, 2]
    assert 1 / 11 * (1 - 1e-9) <= found.epsilon <= 1 / 11 * (1 + 1e-5)
    chunks = levattn.universal_set(lambda: iter([K[:2], K[2:]]), size=2)
    assert 1 / 11 * (1 - 1e-9) <= chunks.epsilon <= 1 / 11 * (1 + 1e-5)


@pytest.mark.parametrize("K", [[[1e-300], [1e300]], [[1e-323], [2e307]], [[0.0, 1e-300], [1, 0], [0, 1e300]]])
def test_online_scores_do_not_see_the_future(K: Any) -> None:
    scores = levattn.online_leverage_scores(np.array(K))
    for n in range(1, len(K) + 1):
        np.testing.assert_array_equal(scores[:n], levattn.online_leverage_scores(np.array(K)[:n]))
    assert scores[0] == 1


@pytest.mark.parametrize(("small", "storage"), [(1e-30, "f4"), (1e-170, "f8")])
@pytest.mark.parametrize("f", [levattn.Tukey(), 0.001], ids=str)
def test_scores_that_underflow(small: float, storage: str, f: Any) -> None:
    """Far out both keys count alike, or all but: the small one has 0.40 to 0.5 of the attention."""
    assert 1 in levattn.universal_set(np.array([[1.0], [small]], storage), 0.4, f=f).indices


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1.0, 1e10, 1e18, 1e30])
@pytest.mark.parametrize("storage", ["f4", "f8"])
def test_softmax_bounds_at_any_scale(size: float, storage: str) -> None:
    """Two keys, 0 and −size: the query 4/size gives the first 1/(1 + e⁻⁴)."""
    K = np.array([[0.0], [-size]], storage)
    assert levattn.sensitivities(K, levattn.Softmax(4 / size)).upper[0] >= 1 / (1 + math.exp(-4)) * (1 - 1e-6)
    assert 0 in levattn.universal_set(K, 0.9, f=levattn.Softmax(4 / size)).indices


def test_softmax_with_a_graded_matrix() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        scales = rng.permutation(np.geomspace(1e-5, 1e5, 3))
        U = np.linalg.qr(rng.standard_normal((3, 3)))[0]
        even = (U * [1, 0.3, 0.1]) @ U.T
        S = even * np.outer(scales, scales)
        Y = rng.standard_normal((40, 3))
        Y[0] = 4 * np.eye(3)[scales.argmin()]
        Z = Y @ np.linalg.cholesky((even + even.T) / 2)  # K L: queries are L u with u of norm at most 2
        apart = Z - Z.mean(axis=0)
        z = 2 * Z @ (apart / np.linalg.norm(apart, axis=1, keepdims=True)).T
        weights = np.exp(z - z.max(axis=0))
        bound = levattn.sensitivities(Y / scales, levattn.Softmax(2.0, (S + S.T) / 2)).upper
        assert np.all(bound >= np.diagonal(weights / weights.sum(axis=0)) * (1 - 1e-9))


def test_pruned_attention_of_drifting_and_of_large_keys() -> None:
    selection = Selection(size=1, summaries=1, renew_every=1)
    drift, ones = np.arange(400, dtype=np.float32)[:, None], np.ones((400, 1), np.float32)
    Y, _ = causal_pruned_attention(ones[:200], -drift[:200], ones[:200], selection, return_state=True)
    np.testing.assert_allclose(Y, 1, rtol=1e-5)
    K = 30 * np.random.default_rng(0).standard_normal((300, 4)).astype(np.float32)
    assert np.isfinite(causal_pruned_attention(K, K, K, selection)).all()
    far = np.arange(400.0)[:, None] * np.ones(4)
    assert np.isfinite(causal_pruned_attention(-far, -far, far, selection)).all()


@pytest.mark.parametrize(("scale", "storage"), [(1e-30, "f4"), (1e-170, "f8")])
def test_bounds_of_tiny_values(scale: float, storage: str) -> None:
    rng = np.random.default_rng(0)
    Q, K = rng.standard_normal((2, 60, 4)).astype(storage)
    V = (rng.standard_normal((60, 2)) * scale).astype(storage)
    output, certificate = pruned_attention(Q, K, V, Selection(size=8, summaries=4), return_certificate=True)
    A = np.exp(np.float64(Q) @ np.float64(K).T / 2)
    dense = (A / A.sum(axis=1, keepdims=True)) @ (np.float64(V) / scale)
    error = np.linalg.norm(np.float64(output) / scale - dense, axis=1)
    assert error.max() > 1e-3
    assert np.all(error <= np.float64(certificate.error_bound) / scale * (1 + 1e-4))


@pytest.mark.parametrize("p", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("f", [1.0, 1e-100])
def test_what_a_set_leaves_out_counts_although_its_products_vanish(p: float, f: float) -> None:
    """The second key has (1.5e-458)^p of the attention of the first, which no product in float64 tells from 0."""
    K, Q = np.array([[-2e307, 0.0], [3e-151, 0.0], [0.0, 1.0]]), np.array([[f, 0.0]] * 4)
    order = np.array([3.0, 1, 2], np.float32)
    found = levattn.covering_set(K, Q, f=levattn.Power(p), coverage=0.8, scores=order, size=2)
    share = 10 ** (p * (math.log10(1.5) - 458))
    assert share <= found.epsilon <= 1e-70
    whole = levattn.covering_set(K[[0, 2]], Q, f=levattn.Power(p), coverage=0.8, scores=order[[0, 2]], size=1)
    assert whole.epsilon == 0  # no query meets the third key


@pytest.mark.parametrize("wish", [{"mass": 0.99}, {"epsilon": 0.2}, {"size": 1}], ids=str)
def test_a_product_that_vanishes_beside_others_that_cancel_may_be_all(wish: Any) -> None:
    """The last query is orthogonal to the first key, so the second has all of its attention."""
    K, Q = np.array([[-(2.0**501), 2.0**501], [0.0, -4e-308]]), np.array([[0.0, 0.0]] * 3 + [[-1.0, -1.0]])
    order = np.array([2.0, 1.0], np.float32)
    found = levattn.covering_set(K, Q, f=levattn.Power(3), coverage=0.8, scores=order, **wish)
    assert found.mask[1] or found.epsilon == 1


def test_a_sparse_entry_that_vanishes_beside_the_largest_of_its_column() -> None:
    from scipy.sparse import csr_array

    K = csr_array(np.array([[0.0, -1e307, 1.0], [0.0, 5e-324, 0.0]]))
    np.testing.assert_array_equal(levattn.universal_set(K, 0.5).indices, [0, 1])


@pytest.mark.parametrize(
    "rows",
    [
        [[0.0, 0.0, 0.0, -5e-324], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 7e150]],
        [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2e-308], [0.0, 0.0, 1.0, -7e305]],
        [[-1.0, 7e150], [1.0, -7e150], [0.0, 5e-324]],  # less its mean, the third row vanishes in the scaled columns
    ],
)
def test_a_direction_that_vanishes_in_scaled_columns_counts_less_the_mean(rows: Any) -> None:
    """All rows less their mean have the score 2/3, of which the smallest entries decide."""
    from scipy.sparse import csr_array

    K = np.array(rows)
    stored = [(K, method) for method in ("auto", "gram", "qr", "svd")] + [(csr_array(K), "auto")]
    for keys, method in stored:
        assert levattn.universal_set(keys, 0.5, method=method, center=True).mask.all()
        cut = levattn.universal_set(keys, size=1, method=method, center=True)
        assert cut.epsilon >= 2 / 3 - 1e-9


@pytest.mark.parametrize("center", [False, True])
def test_masked_keys_out_of_the_range_of_the_others_warn_of_nothing(center: bool) -> None:
    import array_api_strict

    K, mask = (array_api_strict.asarray(np.array(x)) for x in ([[1e307], [4e-308]], [False, True]))
    found = levattn.universal_set(K, 0.1, mask=mask, center=center)
    assert np.asarray(found.mask).tolist() == [False, not center]


@pytest.mark.parametrize("f", [levattn.Tukey(), levattn.Huber(), levattn.L1L2(), levattn.Fair()], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**-300, 2.0**-500, 2.0**300])
def test_values_are_not_tiny_where_large_products_cancel(f: Any, scale: float) -> None:
    """Both products are 0 in float64, and their values of f are equal or far from those of x²."""
    K = np.array([[-1.0, -2.0, 2.0], [1.0, 1.0, -1.0]])
    Q = scale * np.array([[-5e103, float.fromhex("0x1.6a09e667f3bcdp+396"), float.fromhex("0x1.6a09e667f3bccp+396")]])
    products = [float(sum(Fraction(a) * Fraction(b) for a, b in zip(key, Q[0], strict=True))) for key in K.tolist()]
    values = f(np.array(products))
    expected = values / values.sum()
    np.testing.assert_allclose(levattn.expected_scores(K, Q, f=f, method="mean"), expected, rtol=1e-12)
    found = levattn.heavy_attention(Q, K, 0.2, f=f)
    np.testing.assert_allclose(found.entries.toarray()[0], np.where(expected >= 0.2, expected, 0), rtol=1e-9)


def wide_of_all_sizes(seed: int) -> Any:
    """Wide keys with few entries, of sizes from 2^-50 to 2^50."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 9))
    d, count = n + int(rng.integers(0, 8)), int(rng.integers(1, 3 * n))
    K = np.zeros((n, d), np.float32)
    entries = rng.standard_normal(count) * 2.0 ** rng.integers(-50, 50, count)
    K[rng.integers(0, n, count), rng.integers(0, d, count)] = entries
    return K


def some_of_all_sizes() -> Any:
    K = np.zeros((8, 9), np.float32)
    K[[0, 2, 3], [7, 5, 4]] = 7.2951831e-09, -6.8813760e08, 4.3019676e-12
    K[5, [3, 5, 8]] = -7.9999496e12, 1.1757252e-06, 7.6504111e-14
    K[7, [1, 3, 4, 5, 7]] = -2.1558681e-12, -3.2688755e01, 1.7434224e-05, -6.3713989e10, -5.7503367e-13
    return K


def few_of_all_sizes() -> Any:
    K = np.zeros((7, 8), np.float32)
    rows, columns = [1, 1, 2, 3, 4, 5, 5, 5, 5, 6, 6], [1, 4, 7, 7, 7, 0, 1, 4, 6, 0, 5]
    entries = """-0x1.cc2b5cp-5 0x1.341ac4p-15 -0x1.322df2p+42 0x1.15d58ap-2 -0x1.be031ap-30 -0x1.34e414p+5
        -0x1.df80fcp+42 0x1.2f78bep+1 0x1.fc5a58p+49 0x1.80df32p-19 0x1.2396eep-36"""
    K[rows, columns] = [float.fromhex(entry) for entry in entries.split()]
    return K


def test_columns_that_stand_for_wide_keys_are_well_conditioned() -> None:
    """A column that is independent by its rounding alone once stood for keys that have a better one."""
    tried, seeds = 0, range(trials(2400))
    for K in (some_of_all_sizes(), few_of_all_sizes(), *map(wide_of_all_sizes, seeds)):
        exact, nothing = K.astype(np.float64), np.zeros((0, K.shape[1]))
        for truth in (Truth(exact, nothing), Centered(exact, nothing, np.ones(len(K), bool))):
            if truth.condition <= CLEAR:
                tried += 1
                found = levattn.universal_set(K, 0.2, center=isinstance(truth, Centered))
                assert found.rank == truth.rank
                if not isinstance(truth, Centered):
                    assert levattn.universal_set(csr_array(K), 0.2).rank == truth.rank
    assert tried > len(seeds) / 2


def keys_that_cancel(seed: int) -> tuple[Any, Any]:
    """Keys of a few sizes, and queries of signs: many products are far below the rounding of their terms."""
    rng = np.random.default_rng(seed)
    sizes = np.array([0.0, 1.0, 1.0, 2.0**40, 2.0**60, 2.0 ** rng.integers(100, 300)])
    K = rng.choice(sizes, (5, 3)) * rng.choice([-1.0, 1.0], (5, 3))
    K[1, 2] = -K[1, 0]
    return K, rng.choice([-1.0, 0.0, 1.0], (4, 3))


@pytest.mark.parametrize("f", ["1", "2", "3", "0.5", "huber:1", "tukey:1", "fair:1.4", "l1l2"])
def test_a_share_that_rounding_hides_is_not_below_the_level_of_a_set(f: str) -> None:
    """All four queries count at this coverage, so epsilon is at least the exact share of every key left out."""
    function, seen = levattn.functions.as_function(f if ":" in f or f == "l1l2" else float(f)), 0
    large = [[0.0] * 3, [-2.6e38, 1.0, 2.6e38], [0.0, 3e38, 0.0]]
    cases = [(np.array(large), np.array([[-1.0, 1.0, -1.0]] * 4)), *map(keys_that_cancel, range(60))]
    for K, Q in cases:
        order = np.arange(len(K), 0, -1, dtype=np.float32)
        order[1] = 0.0
        found = levattn.covering_set(K, Q, f=function, coverage=0.8, scores=order, size=len(K) - 1)
        for q in Q:
            exact = [sum(Fraction(a) * Fraction(b) for a, b in zip(q, k, strict=True)) for k in K]
            values = function(np.array([float(z) for z in exact]))
            if exact[1] and values[1] > 0:
                seen += 1
                assert found.epsilon >= values[1] / values.sum() * (1 - 1e-6)
    assert seen > 30


@pytest.mark.parametrize("f", ["1", "2", "0.5", "huber:1", "tukey:1", "fair:1.4", "l1l2"])
def test_products_whose_terms_have_no_finite_sum_of_sizes(f: str) -> None:
    """The two terms cancel, so the query attends to no key, or to the other one."""
    function = levattn.functions.as_function(f if ":" in f or f == "l1l2" else float(f))
    for exponent in (509, 1020, 1021):
        size = 1.5 * 2.0**exponent
        K, Q = np.array([[size, -size], [0.0, 1e-3]]), np.array([[-3.0, -3.0]])
        np.testing.assert_array_equal(levattn.expected_scores(K[:1], Q, f=function, method="mean"), [0.0])
        found = levattn.expected_scores(K, Q, f=function, method="mean")
        np.testing.assert_allclose(found, [0.0, 1.0], atol=1e-12)
