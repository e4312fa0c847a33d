"""Group leverage against exact arithmetic and its theorems; near-duplicates against all pairs."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import levattn
import naive
import strategies
from levattn import group_leverage, near_duplicates
from levattn.datasets import planted
from levattn.exceptions import NonFiniteError
from strategies import STORAGE, as_float64, examples, integer_keys, real_keys, seeds, stores

needs_torch = pytest.mark.skipif(not strategies.HAS_TORCH, reason="no torch")


def draw_labels(seed: int, n: int) -> Any:
    """Groups of very different sizes, some keys in none, some numbers without a key."""
    rng = np.random.default_rng(seed)
    if rng.random() < 0.3:
        return rng.integers(-1, 2, n)
    return np.minimum(np.floor(rng.exponential(max(n, 1) / 4, n)).astype(int), 2 * n + 1) - 1


def check_theorems(K: Any, labels: Any, scores: Any) -> None:
    """max τ ≤ τ_S ≤ min(1, Σ τ), and over a partition the sum is at most the rank."""
    tau = naive.leverage_exact(K)
    for label, score in enumerate(scores):
        mine = tau[labels == label]
        assert mine.max(initial=0.0) * (1 - 1e-9) <= score <= min(1.0, mine.sum() * (1 + 1e-9))
    assert scores.sum() <= naive.rank_exact(K) * (1 + 1e-9)


# -- group leverage against the definition ------------------------------------------------


def check_scores(K: Any, labels: Any, rtol: float) -> None:
    scores = group_leverage(K, labels)
    assert scores.shape == (max([0, *(labels + 1)]),)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, naive.group_leverage(K, labels), rtol=rtol, atol=1e-300)
    check_theorems(K, labels, scores)


@examples(150)
@given(K=st.one_of(integer_keys(), real_keys()), seed=seeds())
def test_scores_are_those_of_exact_arithmetic(K: Any, seed: int) -> None:
    check_scores(K, draw_labels(seed, len(K)), 1e-9)


@pytest.mark.parametrize("name", [name for name in strategies.CASES if len(strategies.case(name)) <= 150])
def test_scores_of_named_cases(name: str) -> None:
    n, rng = len(strategies.case(name)), np.random.default_rng(len(name))
    labels = np.repeat(np.arange(n), rng.integers(1, 12, n))[:n][rng.permutation(n)]
    check_scores(strategies.case(name), labels, 1e-8)  # the condition numbers of some cases are beyond 1e10


@pytest.mark.parametrize("kappa", [1e3, 1e7, 1e10])
def test_ill_conditioned_keys(kappa: float) -> None:
    """Beyond about 10⁶ rows are turned with compensated products."""
    K = strategies.conditioned(np.random.default_rng(0), 60, 6, kappa)
    assert (levattn.universal_set(K, 0.1).factor.arithmetic[0] == "compensated") == (kappa > 1e6)
    check_scores(K, np.arange(60) % 7, 1e-9)


@stores()
def test_scores_of_every_storage_type(storage: str) -> None:
    rng = np.random.default_rng(0)
    K = STORAGE[storage](rng.standard_normal((60, 4)) * np.exp(rng.standard_normal((60, 1))))
    labels = rng.integers(-1, 9, 60)
    scores = group_leverage(K, labels)
    assert type(scores) is type(K)
    assert str(scores.dtype).rpartition(".")[2] == "float64"
    np.testing.assert_allclose(as_float64(scores), naive.group_leverage(as_float64(K), labels), rtol=1e-9)
    found = near_duplicates(K, angle=0.3)
    assert type(found) is type(K)
    assert str(found.dtype).rpartition(".")[2] == "int64"
    assert as_float64(found).max() >= 0
    np.testing.assert_array_equal(as_float64(found), near_duplicates(as_float64(K), angle=0.3))
    assert tuple(group_leverage(K, found).shape) == (int(as_float64(found).max()) + 1,)


@examples(40)
@given(K=integer_keys(min_rows=2), seed=seeds())
def test_some_query_attains_the_score_and_none_exceeds_it(K: Any, seed: int) -> None:
    labels = draw_labels(seed, len(K))
    scores = group_leverage(K, labels)
    pseudo = np.linalg.pinv(K, rcond=1e-10)
    rng = np.random.default_rng(seed)
    for label in np.unique(labels[labels >= 0]):
        mine = labels == label
        v = np.linalg.svd(K[mine] @ pseudo[:, mine])[2][0]  # of the whitened Gram matrix of the group
        Q = np.vstack([pseudo[:, mine] @ v, K[mine], rng.standard_normal((100, K.shape[1]))])
        mass = naive.attention(Q, K)[:, mine].sum(axis=1)
        assert mass[0] == pytest.approx(scores[label], abs=1e-9)
        assert np.all(mass <= scores[label] + 1e-9)


def test_keys_in_no_group_and_groups_without_keys() -> None:
    K = strategies.case("coherent")
    labels = np.full(len(K), -1)
    assert group_leverage(K, labels).shape == (0,)
    labels[[3, 9]] = 4
    scores = group_leverage(K, labels)
    assert scores.shape == (5,)
    assert np.all(scores[:4] == 0)
    np.testing.assert_allclose(scores, naive.group_leverage(K, labels), rtol=1e-9)
    assert group_leverage(np.zeros((0, 3)), np.zeros(0, int)).shape == (0,)
    assert group_leverage(np.zeros((2, 0, 3)), np.zeros((2, 0), int)).shape == (2, 0)
    np.testing.assert_array_equal(group_leverage(np.zeros((4, 3)), [0, 0, 1, 2]), np.zeros(3))


def test_keys_in_a_direction_below_the_rank_lift_their_group() -> None:
    """Two keys leave the others' plane by more than rounding, in a direction too small to be one of the rank."""
    K = np.random.default_rng(0).standard_normal((3000, 4))
    K[:, 3] = K[:, 0]
    K[8] = K[7]
    K[[7, 8], 3] += 3e-13
    labels = np.arange(3000) % 10
    tau = levattn.leverage_scores(K)
    assert levattn.universal_set(K, 0.5).guarantee == "superset"
    assert np.flatnonzero(tau == 1).tolist() == [7, 8]
    scores = group_leverage(K, labels)
    np.testing.assert_allclose(scores, naive.group_leverage(K, labels), rtol=1e-4)
    assert np.all(scores[[7, 8]] > 0.49)  # they share the direction, which no other key has
    assert group_leverage(K, labels % 7)[[0, 1]].min() > 0.49
    found = near_duplicates(K, angle=1e-3)
    assert found[7] == found[8] == -1
    K[[7, 8], 3] = K[7, 0]
    assert near_duplicates(K, angle=1e-3)[7] == near_duplicates(K, angle=1e-3)[8] >= 0


def test_masked_keys_are_not_read() -> None:
    rng = np.random.default_rng(0)
    K = rng.standard_normal((300, 5))
    K[100:140] = rng.standard_normal(5) + 0.01 * rng.standard_normal((40, 5))
    mask = rng.random(300) < 0.7
    labels = rng.integers(-1, 12, 300)
    labels[~mask] = 12
    for garbage in (np.nan, np.inf, 1e308):
        K[~mask] = garbage
        scores = group_leverage(K, labels, mask=mask)
        assert scores.shape == (13,)
        assert scores[12] == 0
        np.testing.assert_allclose(scores[:12], group_leverage(K[mask], labels[mask]), rtol=1e-10)
        found = near_duplicates(K, mask=mask)
        assert np.all(found[~mask] == -1)
        assert found.max() >= 0
        np.testing.assert_array_equal(found[mask], near_duplicates(K[mask]))


def test_batches_are_their_matrices() -> None:
    rng = np.random.default_rng(0)
    K = rng.standard_normal((2, 3, 120, 5)) * np.exp(rng.standard_normal((2, 3, 120, 1)))
    K[1, 2, 40:50] = K[1, 2, 0] * 7
    K[0, 1, :, 4] = K[0, 1, :, 0]
    mask = rng.random((2, 3, 120)) < 0.8
    labels = rng.integers(-1, 10, (2, 3, 120))
    labels[0, 0] //= 2
    scores, found = group_leverage(K, labels, mask=mask), near_duplicates(K, mask=mask, rng=3)
    assert scores.shape == (2, 3, 10)
    assert found.shape == labels.shape
    for index in np.ndindex(2, 3):
        alone = group_leverage(K[index], labels[index], mask=mask[index])
        np.testing.assert_allclose(scores[index][: len(alone)], alone, rtol=1e-12)
        assert np.all(scores[index][len(alone) :] == 0)
        np.testing.assert_array_equal(found[index], near_duplicates(K[index], mask=mask[index], rng=3))
    assert len(np.unique(found[1, 2][40:50][mask[1, 2, 40:50]])) == 1


@needs_torch
def test_labels_of_any_namespace() -> None:
    import torch

    K = strategies.case("duplicated")
    labels = np.arange(len(K)) // 3
    expected = group_leverage(K, labels)
    for given_labels in (labels.tolist(), torch.from_numpy(labels), labels.astype(np.uint8), labels.astype(">i4")):
        np.testing.assert_array_equal(group_leverage(K, given_labels), expected)
    torch_scores = group_leverage(torch.from_numpy(K.copy()), torch.from_numpy(labels))
    np.testing.assert_array_equal(torch_scores.numpy(), expected)


# -- near-duplicates ----------------------------------------------------------------------


def check_groups(K: Any, found: Any, angle: float) -> None:
    """Groups are connected by pairs within the angle, have two keys or more, and are numbered by their first ones."""
    linked = naive.angles(naive.whitened(K)) <= angle * (1 + 1e-6)
    for label in range(found.max(initial=-1) + 1):
        members = np.flatnonzero(found == label)
        assert len(members) >= 2
        assert np.all(naive.components(linked[np.ix_(members, members)]) == 0)
    numbers, first = np.unique(found[found >= 0], return_index=True)
    np.testing.assert_array_equal(numbers, np.arange(len(numbers)))
    assert np.all(np.diff(first) > 0)


def same_partition(found: Any, truth: Any) -> bool:
    """Whether two ways to number the same groups agree; truth has -1 for keys in none."""
    pairs = set(zip(found.tolist(), truth.tolist(), strict=True))
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) and (-1 in truth) == (
        (-1, -1) in pairs
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_planted_duplicates_are_found_completely(seed: int, dtype: Any) -> None:
    model = planted(
        3000, 16, variant="duplicated", n_planted=4, background_rank=12, copies=25, noise=0.01, strength=2.0, rng=seed
    )
    truth = np.full(3000, -1)
    truth[model.indices] = model.groups
    K = model.keys.astype(dtype)
    found = near_duplicates(K, rng=seed)
    assert same_partition(found, truth)
    assert found.max() == 3
    scores, tau = group_leverage(K, found), levattn.leverage_scores(K)
    for label in range(4):
        total = tau[found == label].sum(dtype=np.float64)
        assert math.cos(0.1) ** 2 * total <= scores[label] <= total * (1 + 1e-5)
    assert tau.max() < 0.1 < 0.9 < scores.min()
    assert np.all(near_duplicates(np.random.default_rng(24).standard_normal((20_000, 24)), rng=seed) == -1)


@pytest.mark.parametrize("angle", [1e-8, 1e-4, 0.1, math.pi / 4])
def test_copies_with_signs_and_scales(angle: float) -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal((40, 48))  # independent, so orthogonal once they are whitened
    truth = np.repeat(np.arange(40), 6)
    factors = rng.choice([-1.0, 1.0], 240) * 2.0 ** rng.integers(-200, 30, 240)
    factors[::6] = 1.0
    truth = np.append(truth, np.full(5, -1))
    K = np.vstack([np.repeat(base, 6, axis=0) * factors[:, None], np.zeros((5, 48))])
    shuffle = rng.permutation(len(K))
    found = near_duplicates(K[shuffle], angle=angle)
    assert same_partition(found, truth[shuffle])
    assert found[found >= 0][0] == 0


def test_tiny_copies_keep_their_digits() -> None:
    """Their whitened squares are below the range of float64."""
    K = np.random.default_rng(0).standard_normal((50, 4))
    K = np.vstack([K, K[:3] * -1e-200, K[3:5] * 1e-290])
    found = near_duplicates(K, angle=1e-8)
    np.testing.assert_array_equal(found, [0, 1, 2, 3, 4, *[-1] * 45, 0, 1, 2, 3, 4])


@pytest.mark.parametrize("name", ["no-row", "one-row", "one-zero-row", "all-zero", "one-column", "deficient-rank-1"])
def test_too_few_keys_for_a_pair_and_keys_on_a_line(name: str) -> None:
    K = strategies.case(name)
    expected = np.where(K.any(axis=1), 0, -1) if len(K) > 1 else np.full(len(K), -1)
    np.testing.assert_array_equal(near_duplicates(K), expected)


@examples(60)
@given(K=integer_keys(max_rows=30), angle=st.sampled_from([1e-6, 0.05, 0.3, 0.7]), seed=seeds())
def test_small_keys_against_all_pairs(K: Any, angle: float, seed: int) -> None:
    found = near_duplicates(K, angle=angle, rng=seed)
    check_groups(K, found, angle)
    if angle == 1e-6:  # multiples of a key share every signature
        exact = naive.components(naive.angles(naive.whitened(K)) <= 1e-7)
        alone = np.array([np.count_nonzero(exact == c) == 1 for c in exact], bool)
        assert same_partition(found, np.where(alone, -1, exact))


def test_keys_in_the_plane_chain_into_one_group() -> None:
    """All angles are dense there, so every link of the chain has a bucket to be found in."""
    K = np.random.default_rng(0).standard_normal((2000, 2))
    np.testing.assert_array_equal(near_duplicates(K), np.zeros(2000))


def pairs_at(angle: float, count: int, d: int, seed: int) -> Any:
    """Pairs of rows at an angle from each other, and d more, which make the second moment a multiple of the identity.

    So the angle is the same in the whitened metric, up to rounding.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, d))
    y = rng.standard_normal((count, d))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    y -= np.sum(x * y, axis=1, keepdims=True) * x
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    K = np.stack([x, np.cos(angle) * x + np.sin(angle) * y], axis=1).reshape(2 * count, d)
    G = K.T @ K
    fill = 1.01 * np.linalg.norm(G, 2) * np.eye(d) - G
    return np.vstack([K, np.linalg.cholesky(fill).T])


@pytest.mark.parametrize("angle", [3e-8, 1e-6, 1e-3, 0.1])
def test_the_edge_of_the_angle_is_decided_in_float64(angle: float) -> None:
    """Pairs just within are linked, pairs just beyond are not, however coarse float32 is."""
    slack = 1e-3 if angle > 1e-6 else 0.05  # rounding of the keys is 1e-16, of whitened ones some 1e-15
    inside = near_duplicates(pairs_at(angle * (1 - slack), 200, 8, 1), angle=angle, rng=0)[:400].reshape(-1, 2)
    beyond = near_duplicates(pairs_at(angle * (1 + slack), 200, 8, 1), angle=angle, rng=0)[:400].reshape(-1, 2)
    assert np.mean((inside[:, 0] >= 0) & (inside[:, 0] == inside[:, 1])) > 0.9
    if angle < 0.01:  # elsewhere other keys link them
        assert np.all(beyond == -1)


def test_seeds_and_generators() -> None:
    rng = np.random.default_rng(0)
    K = rng.standard_normal((3000, 3))  # dense enough for misses, so that another seed shows
    default = near_duplicates(K, angle=0.02)
    np.testing.assert_array_equal(default, near_duplicates(K, angle=0.02, rng=0))
    assert not np.array_equal(default, near_duplicates(K, angle=0.02, rng=1))
    generated = [near_duplicates(K, angle=0.02, rng=np.random.default_rng(7)) for _ in range(2)]
    np.testing.assert_array_equal(*generated)
    shared = np.random.default_rng(7)
    first, second = (near_duplicates(K, angle=0.02, rng=shared) for _ in range(2))
    np.testing.assert_array_equal(first, generated[0])
    assert not np.array_equal(first, second)


def test_one_of_several_threads_gives_the_same_groups() -> None:
    K = strategies.conditioned(np.random.default_rng(0), 9000, 12, 1e9)
    K[5000:5040] = K[17]
    found = near_duplicates(K)
    with levattn.thread_limit(1):
        np.testing.assert_array_equal(near_duplicates(K), found)
    assert found[17] == found[5000] >= 0


# -- hidden mass and errors ---------------------------------------------------------------


GOOD = np.random.default_rng(0).standard_normal((12, 3))
BAD = np.where(np.arange(12)[:, None] == 4, np.nan, GOOD)


def grouped(K: Any = GOOD, labels: Any = np.zeros(12, int), **options: Any) -> Any:  # noqa: B008
    return group_leverage(K, labels, **options)


HINT = "Give each key the number of its group"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: grouped(labels=np.zeros(11, int)), ValueError, (r"labels has shape \(11,\)", r"\(12,\)", HINT)),
        (lambda: grouped(labels=np.zeros((1, 12), int)), ValueError, (r"labels has shape \(1, 12\)", HINT)),
        (lambda: grouped(labels=np.zeros(12)), TypeError, ("labels has dtype float64", "integers", HINT)),
        (lambda: grouped(labels=np.zeros(12, bool)), TypeError, ("labels has dtype bool", HINT)),
        (lambda: grouped(labels=np.arange(12) - 2), ValueError, ("labels holds -2", "-1", HINT)),
        (lambda: grouped(labels=np.full(12, 2**64 - 1, np.uint64)), ValueError, ("holds 18446744073709551615", HINT)),
        (lambda: grouped(labels=[[0], [1, 2]]), ValueError, ("labels is a list", HINT)),
        (lambda: near_duplicates(GOOD, angle=0.0), ValueError, ("angle is 0.0", "1e-08", "π/4")),
        (lambda: near_duplicates(GOOD, angle=1.0), ValueError, ("angle is 1.0", "deg2rad")),
        (lambda: near_duplicates(GOOD, angle=math.nan), ValueError, ("angle is nan",)),
        (lambda: near_duplicates(GOOD, angle="wide"), TypeError, ("angle is 'wide'", "radians")),  # type: ignore[arg-type]
        (lambda: near_duplicates(GOOD, angle=True), TypeError, ("angle is True",)),
        (lambda: near_duplicates(GOOD, rng="seed"), TypeError, ("rng is 'seed'", "Generator")),  # type: ignore[arg-type]
        (lambda: near_duplicates(GOOD, rng=1.5), TypeError, ("rng is 1.5",)),  # type: ignore[arg-type]
        (lambda: near_duplicates(GOOD, rng=True), TypeError, ("rng is True",)),
        (lambda: near_duplicates(GOOD, rng=-1), ValueError, ("rng is -1",)),
        *(
            case
            for function in (grouped, near_duplicates)
            for case in (
                (lambda function=function: function(GOOD, mask=np.ones(5, bool)), ValueError, ("mask has shape",)),
                (lambda function=function: function(GOOD, mask=np.ones(12)), TypeError, ("mask has dtype",)),
                (lambda function=function: function(np.ones((12, 3), int)), TypeError, ("K has dtype int64",)),
                (lambda function=function: function(BAD), NonFiniteError, (r"\b4\b",)),
            )
        ),
    ],
)
def test_wrong_arguments(call: Any, error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert re.search(word, str(caught.value)), f"{word!r} is not in: {caught.value}"


def test_sets_hold_the_mass_that_copies_hide() -> None:
    model = planted(6000, 16, variant="duplicated", n_planted=3, copies=200, background_rank=13, rng=0)
    K, epsilon = model.keys, 0.2
    plain = levattn.universal_set(K, epsilon)
    labels = near_duplicates(K)
    assert not plain.mask[model.indices].any()
    found = plain.with_groups(K, labels)
    stack = np.stack([K, K[::-1]])
    both = levattn.universal_set(stack, epsilon).with_groups(stack, np.stack([labels, labels[::-1]]))
    for mask in (found.mask, both.mask[0], both.mask[1][::-1]):
        assert mask[model.indices].all()
        assert mask.sum() == len(model.indices) + len(plain)
    assert found.guarantee == both.guarantee == "superset"
    assert "3 hidden groups" in repr(found)
    assert found.hidden_groups.sum() == 3
    np.testing.assert_allclose(found.group_scores, group_leverage(K, labels), rtol=1e-12)
    mass = levattn.heavy_attention(model.queries, K, epsilon, universal=found).captured_mass
    dense = (model.queries @ K.T) ** 2
    np.testing.assert_allclose(mass, dense[:, found.mask].sum(axis=1) / dense.sum(axis=1), rtol=1e-9)
    assert mass.min() > 0.3
    assert levattn.heavy_attention(model.queries, K, epsilon).captured_mass.max(initial=0.0) < 0.05


def test_groups_that_do_not_go_with_a_set() -> None:
    K = np.random.default_rng(0).standard_normal((30, 4))
    labels, plain = np.zeros(30, np.int64), levattn.universal_set(K, 0.5)
    with_groups = plain.with_groups(K, labels)  # one group of all keys has a score of 1
    assert with_groups.mask.all()
    none = plain.with_groups(K, np.full(30, -1))
    assert none.hidden_groups.shape == plain.hidden_groups.shape == (0,)
    assert none.guarantee == plain.guarantee
    for found, problem in (
        (levattn.universal_set(K, size=3), "the set is by size; expected a set for f = 2 by an exact method"),
        (levattn.universal_set(K, 0.1, f=1), "the set is of f = 1"),
        (levattn.universal_set(K, 0.1, f=4, method="leverage"), "the set is of f = 4"),
        (levattn.universal_set(K, 0.1, method="osnap"), "the set is by osnap"),
        (levattn.covering_set(K, K, 0.1, coverage=0.9), "the set is by conformal"),
        (with_groups, "has groups already"),
    ):
        with pytest.raises(ValueError, match=problem):
            found.with_groups(K, labels)
    for other in (2 * K[::-1], K[:20], K[:, :3], K[None]):
        with pytest.raises(ValueError, match="this set is of"):
            plain.with_groups(other, labels)
    with pytest.raises(ValueError, match="labels has shape"):
        plain.with_groups(K, labels[1:])


def test_keys_given_again_may_be_of_another_library() -> None:
    torch = pytest.importorskip("torch")
    K, mask = np.random.default_rng(0).standard_normal((60, 4)), np.arange(60) > 5
    tensor, options = torch.from_numpy(K), {"epsilon": 0.2, "mask": mask}
    again = levattn.universal_set(K, **options).with_groups(tensor, np.arange(60) // 6)
    for found in (again, levattn.universal_set(K, method="osnap", **options).rechecked(tensor)):
        heavy = levattn.heavy_attention(tensor[:3], tensor, 0.2, universal=found)
        expected = levattn.heavy_attention(K[:3], K, 0.2, mask=mask)
        np.testing.assert_allclose(heavy.entries.toarray(), expected.entries.toarray(), rtol=1e-12)
        assert type(heavy.apply(tensor)[0]) is type(found.scores) is torch.Tensor
        np.testing.assert_array_equal(found.present, mask)


@pytest.mark.parametrize("shape", [(400, 4), (2, 400, 4), (6, 400)])
def test_keys_given_again_are_finite(shape: tuple[int, ...]) -> None:
    """Also the keys that are not compared with those of the set."""
    K = np.random.default_rng(0).standard_normal(shape)
    n, labels = shape[-2], np.zeros(shape[:-1], np.int64)
    mask = np.arange(n) != n - 1
    found = [(levattn.universal_set(K, 0.99, mask=np.broadcast_to(mask, shape[:-1])).with_groups, (labels,))]
    if n > shape[-1]:
        sketched = levattn.universal_set(K, 0.99, method="osnap", mask=np.broadcast_to(mask, shape[:-1]))
        found.append((sketched.rechecked, ()))
    K[..., n - 1, :] = np.nan  # takes no part
    for again, labeled in found:
        again(K, *labeled)
        K[..., 1, 0] = np.inf
        with pytest.raises(levattn.NonFiniteError, match=r"K holds NaN or infinity.*\b1\b"):
            again(K, *labeled)
        K[..., 1, 0] = 0.5


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("width", [4, 40, "rank-deficient"])
@pytest.mark.parametrize("masked", [False, True])
def test_groups_of_a_set_have_the_scores_of_the_same_keys(center: bool, width: int | str, masked: bool) -> None:
    """With the mask and the center of the set; wide keys, and keys of a smaller rank, too."""
    rng = np.random.default_rng(3)
    K = rng.integers(-3, 4, (30, width if isinstance(width, int) else 6)).astype(float)
    if width == "rank-deficient":
        K[:, 5] = K[:, 0] - K[:, 1]
    labels, mask = rng.integers(-1, 4, 30), rng.random(30) < 0.8 if masked else None
    there = np.full(30, True) if mask is None else mask
    found = levattn.universal_set(K, 0.4, center=center, mask=mask).with_groups(K, labels)
    shifted = there.sum() * K - K[there].sum(axis=0) * center  # whole numbers, so that the rank is exact
    truth = naive.group_leverage(shifted[there], labels[there])
    np.testing.assert_allclose(found.group_scores[: len(truth)], truth, rtol=1e-9)
    assert not found.group_scores[len(truth) :].any()
    heavy = np.isin(labels, np.flatnonzero(found.group_scores >= 0.4)) & there
    plain = levattn.universal_set(K, 0.4, center=center, mask=mask)
    np.testing.assert_array_equal(found.mask, plain.mask | heavy)
    assert found.guarantee == ("none" if center else "superset" if (found.mask & ~plain.mask).any() else "exact")
