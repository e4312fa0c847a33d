"""A sample of rows in one pass: the same for all chunks and merges, unbiased, and within its promise."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_sampling import KEYS, ratios

import levattn
from levattn import StreamingRowSample
from strategies import Float
from streams import BLOCK, named_rng, prefixes

N, D, LATE = 5000, 5, 2300
STREAMS = prefixes(N, D, LATE)
OPTIONS: dict[str, dict[str, Any]] = {
    "size": {"size": 60},
    "distortion": {"distortion": 0.5},
    "ridge": {"size": 40, "ridge": 3.0},
}
CUTS = [(), (1, 2, 1000, 2047), (BLOCK,), (2300, 4096), tuple(range(70, N, 70))]


def one(K: Any, row_start: int = 0, **options: Any) -> StreamingRowSample:
    return StreamingRowSample(**{"rng": 5} | options, row_start=row_start).update(K)


def bits(sample: levattn.RowSample) -> tuple[Any, ...]:
    held = (getattr(sample, name) for name in ("indices", "weights", "counts", "probabilities", "keys"))
    numbers = sample.size, sample.rows_of_all, sample.eigenvalues, sample.promised, sample.failure
    return *numbers, *(array.tobytes() for array in held)


def alike(one: levattn.RowSample, other: levattn.RowSample, rtol: float = 1e-6) -> None:
    """The same rows, and the same numbers up to rounding."""
    assert one.indices.tolist() == other.indices.tolist()
    np.testing.assert_allclose(one.weights, other.weights, rtol=rtol)
    np.testing.assert_allclose(one.eigenvalues, other.eigenvalues, atol=rtol)
    np.testing.assert_array_equal(one.keys, other.keys)


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", STREAMS)
def test_one_pass_is_the_same_for_all_chunks_bytes_and_merges(name: str, kind: str) -> None:
    K, options = STREAMS[name](named_rng(name)), OPTIONS[kind]
    whole = one(K, **options).result()
    for cuts in CUTS:
        state = StreamingRowSample(**options, rng=5)
        for part in np.split(K, cuts):
            state.update(part)
            if len(cuts) == 4:
                state = StreamingRowSample.from_bytes(state.to_bytes())
            if len(cuts) == 2:
                state.result()
        assert bits(state.result()) == bits(whole)
    edges = (0, 1900, LATE, N)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        parts = [one(K[edges[i] : edges[i + 1]], edges[i], **options) for i in order]
        alike(parts[0].merge(parts[1]).merge(parts[2]).result(), whole)
        assert parts[0].n == N


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", ["gaussian", "copies", "rank-grows-turned", "deficient", "columns-1e200"])
def test_eigenvalues_and_probabilities_are_those_of_all_rows(name: str, kind: str) -> None:
    K, options = STREAMS[name](named_rng(name)), OPTIONS[kind]
    sample, ridge = one(K, **options).result(), options.get("ridge", 0.0)
    scores = levattn.leverage_scores(K, ridge=ridge)
    np.testing.assert_array_equal(sample.keys, K[sample.indices])
    c = sample.probabilities[0] / scores[sample.indices[0]] if sample.probabilities[0] < 1 else None
    if c is not None:
        np.testing.assert_allclose(sample.probabilities, np.minimum(1, c * scores[sample.indices]), rtol=1e-6)
    np.testing.assert_allclose(sample.weights, 1 / sample.probabilities)
    if not ridge:  # whose part depends on the units of the columns
        sizes = np.maximum(np.abs(K).max(axis=0), 1e-300)
        np.testing.assert_allclose(sample.eigenvalues, ratios(K / sizes, sample.indices, sample.weights), atol=1e-6)
    elif np.abs(K).max() < 1e9:
        np.testing.assert_allclose(sample.eigenvalues, ratios(K, sample.indices, sample.weights, ridge), atol=1e-6)
    assert (sample.counts == 1).all()
    assert (sample.size, sample.rows_of_all) == (len(sample), N)
    np.testing.assert_allclose(sample.rows(), sample.rows(K))


def minilm() -> Float:
    """Real keys: every head of MiniLM has some rows of high leverage."""
    head = levattn.datasets.minilm().keys
    return np.asarray(head.reshape(-1, *head.shape[-2:])[3], np.float64)[:, :8]


SMALL: dict[str, Callable[[], Float]] = {
    "planted": lambda: levattn.datasets.planted(1500, 6, rng=0).keys,
    "coherent": lambda: np.vstack([np.random.default_rng(1).standard_normal((1200, 6)), 30 * np.eye(6)]),
    "real": lambda: np.repeat(minilm(), max(1, 1500 // len(minilm())), axis=0),
    "graded": lambda: np.random.default_rng(2).standard_cauchy((1500, 6)) * 10.0 ** np.array([0, 150, -150, 9, -9, 3]),
}
ETA, DELTA, SEEDS = 0.7, 0.1, 1000


@pytest.mark.parametrize("name", SMALL)
def test_the_theorem_holds_over_many_seeds(name: str) -> None:
    """At most a share δ of the samples may exceed η, and least squares follow from the distortion of each.

    The share of failures is below δ at these seeds; the theorem is not tight.
    """
    K = SMALL[name]()
    y = K @ (1 / np.abs(K).max(axis=0)) + np.random.default_rng(3).standard_cauchy(len(K))
    even = K / np.abs(K).max(axis=0)  # for the solver below
    whole, failures, sizes = np.column_stack([K, y]), 0, []
    least = np.sum((even @ np.linalg.lstsq(even, y, rcond=None)[0] - y) ** 2)
    for seed in range(SEEDS):
        sample = one(whole, distortion=ETA, failure=DELTA, rng=seed).result()
        failures += sample.distortion > ETA
        sizes.append(len(sample))
        assert (sample.promised, sample.failure) == (ETA, DELTA)
        if seed < 200:
            x = np.linalg.lstsq(sample.rows(even), sample.rows(y), rcond=None)[0]
            eta = min(sample.distortion, 1 - 1e-9)
            assert least * (1 - 1e-9) <= np.sum((even @ x - y) ** 2) <= (1 + eta) / (1 - eta) * least * (1 + 1e-9)
    assert failures <= DELTA * SEEDS
    c = math.log(2 * whole.shape[1] / DELTA) / ((1 + ETA) * math.log(1 + ETA) - ETA)
    p = np.minimum(1, c * levattn.leverage_scores(whole))
    error = math.sqrt(np.sum(p * (1 - p)) / SEEDS)
    assert abs(np.mean(sizes) - p.sum()) <= 5 * error + 1e-9
    assert p.sum() <= c * whole.shape[1] < len(K) / 2  # else it would say nothing


def test_sums_over_the_sample_are_unbiased() -> None:
    """The mean over many samples is the sum over all rows, within five standard errors."""
    K, y = np.random.default_rng(0).standard_normal((3000, 3)) * [1, 10, 0.1], np.array([1.0, -0.2, 5.0])
    sums, halves = [], []
    for seed in range(300):
        sample = one(K, size=30, rng=seed).result()
        sums.append(np.sum((sample.rows() @ y) ** 2))
        halves.append(np.sum(sample.weights * (sample.indices < 1000)))
    for found, expected in ((sums, np.sum((K @ y) ** 2)), (halves, 1000)):
        assert abs(np.mean(found) - expected) < 5 * np.std(found) / math.sqrt(len(found))


def test_few_rows_are_held() -> None:
    K = np.random.default_rng(0).standard_normal((60_000, 8)).astype(np.float32)
    state = StreamingRowSample(300)
    for part in np.array_split(K, 40):
        state.update(part)
        assert state.held < 3 * 300 + 2 * BLOCK
    assert len(state.to_bytes()) < (3 * 300 + 2 * BLOCK) * (8 * 4 + 32) + 40 * 8 * 64
    turning = StreamingRowSample(300)  # each part has a direction of its own, and later parts are larger
    for i, part in enumerate(np.array_split(K, 40)):
        turning.update(part * np.eye(8, dtype=np.float32)[i // 5] * 10.0 ** (i // 5))
        assert turning.held < 4 * 300 + 4 * BLOCK
    assert len(turning.result()) < 500


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_weights_masks_and_other_dtypes(dtype: Any) -> None:
    rng = np.random.default_rng(4)
    K = rng.standard_normal((3000, 4)).astype(dtype)
    w, mask = np.where(rng.random(3000) < 0.2, 0.0, rng.random(3000) + 0.1), np.arange(3000) % 3 > 0
    lost = K.copy()
    lost[~mask] = np.nan
    lost[w == 0] = np.inf
    state = StreamingRowSample(200, rng=3)
    for part in (slice(0, 700), slice(700, 3000)):
        state.update(lost[part], weights=w[part], mask=mask[part])
    sample = state.result()
    whole = np.sqrt(np.where(mask, w, 0.0))[:, None] * K.astype(np.float64)
    expected = StreamingRowSample(200, rng=3).update(whole).result()
    assert sample.indices.tolist() == expected.indices.tolist()
    np.testing.assert_allclose(sample.weights, w[sample.indices] * expected.weights, rtol=1e-9)
    np.testing.assert_allclose(sample.eigenvalues, expected.eigenvalues, rtol=1e-9)
    assert sample.keys is not None
    assert sample.keys.dtype == dtype
    np.testing.assert_array_equal(sample.keys, K[sample.indices])
    assert one(K, size=20).update(K, weights=2.0).n == 6000


@pytest.mark.parametrize("rows", [BLOCK, 20 * BLOCK])
def test_masked_rows_of_whole_blocks_are_not_read(rows: int) -> None:
    K = np.random.default_rng(0).standard_normal((rows, 3))
    mask = np.arange(rows) % 2 == 0
    lost = np.where(mask[:, None], K, np.nan)
    held = [StreamingRowSample(50).update(lost, mask=mask), StreamingRowSample(50).update(lost, weights=mask * 1.0)]
    expected = StreamingRowSample(50).update(np.where(mask[:, None], K, 0.0))
    for state in held:
        assert bits(state.result()) == bits(expected.result())
        assert state.held < 1000


def test_rows_of_torch() -> None:
    torch = pytest.importorskip("torch")
    K = torch.tensor(np.random.default_rng(0).standard_normal((3000, 4)))
    alike(one(K, size=50).result(), one(K.numpy(), size=50).result(), 1e-12)
    short = one(K.to(torch.bfloat16), size=50).result()
    assert short.keys is not None
    assert short.keys.dtype == np.float32
    np.testing.assert_array_equal(short.keys, K.to(torch.bfloat16).float().numpy()[short.indices])


def test_rows_that_alone_have_a_direction_are_always_taken() -> None:
    for seed in range(20):
        K = np.zeros((9000, 3))
        K[:, 0] = 1
        K[[3, 8000], [1, 2]] = 1e-30, 1e200
        sample = one(K, size=4, rng=seed).result()
        assert {3, 8000} <= set(sample.indices)
        assert sample.weights[np.isin(sample.indices, [3, 8000])].tolist() == [1.0, 1.0]
    late = np.random.default_rng(0).standard_normal((9000, 2))
    late[8999] = 1e9, 1e9
    assert 8999 in one(late, size=3).result().indices


def test_a_later_row_that_hides_others_leaves_sums_unbiased() -> None:
    """The first rows have a direction that is rounding beside the later ones, and that then counts as 1 in each."""
    K = np.repeat([[1e-25, -1e-25], [1.0, 1.0]], 3 * BLOCK, axis=0)
    counts = []
    for seed in range(100):
        sample = one(K, size=40, rng=seed).result()
        first = sample.indices < 3 * BLOCK
        counts.append(np.sum(sample.weights[first]))
        assert np.count_nonzero(first) < 200
    assert abs(np.mean(counts) - 3 * BLOCK) < 5 * np.std(counts) / 10


def test_few_and_no_rows() -> None:
    for K in (np.zeros((0, 3)), np.zeros((5, 3)), np.zeros((3 * BLOCK, 3))):
        for options in OPTIONS.values():
            sample = one(K, **options).result()
            assert (len(sample), sample.distortion, sample.rows_of_all) == (0, 0.0, len(K))
            assert sample.rows().shape == (0, 3)
    wide = one(np.random.default_rng(0).standard_normal((4, 9)), size=4).result()
    np.testing.assert_allclose(wide.weights, np.ones(4), rtol=1e-12)  # scores are 1 up to rounding
    empty = StreamingRowSample(3).merge(StreamingRowSample(3, row_start=7))
    assert (empty.n, empty.held, repr(empty)) == (0, 0, "StreamingRowSample(size=3, no chunk yet)")
    with pytest.raises(ValueError, match="no chunk of rows yet"):
        empty.result()
    assert repr(one(np.eye(3), distortion=0.25)) == "StreamingRowSample(distortion=0.25, n=3, d=3)"
    missing = one(np.repeat(np.eye(3), 50, axis=0), size=1, rng=2).result()
    assert missing.promised == math.inf


def test_a_ridge_below_the_rounding_of_dependent_keys_changes_no_row() -> None:
    """Its part beyond the numerical row space was taken from the sum of the scores, which left none for the rows."""
    K = np.random.default_rng(0).standard_normal((5000, 3))
    K[:, 2] = K[:, 0]
    plain, damped = (one(K, size=40, ridge=ridge) for ridge in (0.0, 1e-40))
    assert damped.held == plain.held < 2500
    assert np.array_equal(damped.result().indices, plain.result().indices)


def test_a_ridge_takes_fewer_rows() -> None:
    K = np.random.default_rng(0).standard_normal((6000, 30)) * np.geomspace(1, 1e-4, 30)
    plain, damped = (one(K, distortion=0.8, ridge=ridge).result() for ridge in (0.0, 10.0))
    assert len(damped) < len(plain) / 2
    assert max(damped.distortion, plain.distortion) <= 0.8
    far = one(K, size=50, ridge=1e30).result()  # which hides all rows
    assert far.distortion < 1e-9


def test_the_bits_do_not_depend_on_the_threads() -> None:
    K = np.random.default_rng(0).standard_normal((20_000, 12)).astype(np.float32)
    found = []
    for threads in (1, 2, 3):
        with levattn.thread_limit(threads):
            state = one(K, size=100)
            found.append((state.to_bytes(), bits(state.result())))
    assert found[0] == found[1] == found[2]


def test_a_sample_is_copied_and_pickled() -> None:
    sample = one(KEYS["tall"], size=30).result()
    for again in (copy.copy(sample), copy.deepcopy(sample), pickle.loads(pickle.dumps(sample))):
        assert bits(again) == bits(sample)
        assert again.distortion == sample.distortion


# -- sample_rows of chunks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"size": 300},
        {"distortion": 0.6},
        {"distortion": 0.01},
        {"size": 200, "uniform": 0.5},
        {"size": 200, "scores": np.arange(6000.0) % 7},
    ],
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_chunks_give_the_sample_of_an_array(dtype: Any, options: dict[str, Any], tmp_path: Path) -> None:
    K = (np.random.default_rng(0).standard_normal((6000, 5)) * np.geomspace(1, 9, 6000)[:, None]).astype(dtype)
    expected = levattn.sample_rows(K, rng=1, **options)
    assert expected.keys is None
    np.save(tmp_path / "keys.npy", K)
    for chunks in (lambda: np.array_split(K, 7), levattn.open_keys(tmp_path / "keys.npy", chunk_rows=1000)):
        sample = levattn.sample_rows(chunks, rng=1, **options)
        assert sample.indices.tolist() == expected.indices.tolist()
        assert (sample.size, sample.promised) == (expected.size, pytest.approx(expected.promised))
        np.testing.assert_allclose(sample.weights, expected.weights, rtol=1e-9)
        np.testing.assert_allclose(sample.eigenvalues, expected.eigenvalues, rtol=1e-9)
        assert sample.keys is not None
        np.testing.assert_array_equal(sample.keys, K[sample.indices])
        assert sample.keys.dtype == dtype
        assert (sample.rows().dtype, sample.rows(K).dtype) == (np.float64, max(np.dtype(dtype), np.dtype(np.float32)))
        np.testing.assert_allclose(sample.rows(), sample.rows(K), rtol=1e-6)


@pytest.mark.parametrize("kind", ["tall", "deficient", "dummies", "ill-conditioned", "wide"])
def test_chunks_of_hard_rows(kind: str) -> None:
    K = KEYS[kind]
    expected = levattn.sample_rows(K, 100, rng=1)
    sample = levattn.sample_rows(lambda: np.array_split(K, 3), 100, rng=1)
    assert sample.indices.tolist() == expected.indices.tolist()
    np.testing.assert_allclose(sample.eigenvalues, expected.eigenvalues, rtol=1e-5, atol=1e-6)


def test_files_are_loaded_for_other_options(tmp_path: Path) -> None:
    K = KEYS["tall"]
    np.save(tmp_path / "keys.npy", K)
    source = levattn.open_keys(tmp_path / "keys.npy", chunk_rows=90)
    for options in ({"ridge": 2.0}, {"mask": np.arange(400) > 20}, {"weights": np.arange(400.0)}):
        sample, expected = (levattn.sample_rows(keys, 50, rng=2, **options) for keys in (source, K))
        assert sample.indices.tolist() == expected.indices.tolist()
        assert sample.weights.tolist() == expected.weights.tolist()
        np.testing.assert_array_equal(sample.keys, K[sample.indices])
        with pytest.raises(ValueError, match="K gives chunks; expected no ridge, mask or weights"):
            levattn.sample_rows(lambda: [K], 50, **options)


def test_chunks_that_are_refused() -> None:
    K = KEYS["tall"]
    with pytest.raises(TypeError, match="only once"):
        levattn.sample_rows(iter([K]), 5)
    with pytest.raises(ValueError, match="one matrix"):
        levattn.sample_rows(lambda: [np.stack([K, K])], 5)
    with pytest.raises(ValueError, match=r"scores has shape \(3,\)"):
        levattn.sample_rows(lambda: [K], 5, scores=np.ones(3))
    for changed in (2, 3):  # the keys of the second pass, and the sampled rows
        turns = iter([*[K] * (changed - 1), K + 1])
        with pytest.raises(ValueError, match="gave other keys"):
            levattn.sample_rows(lambda turns=turns: [next(turns)], 5)
    with pytest.raises(ValueError, match="K is left out"):
        levattn.sample_rows(K, 5).rows()


def test_rows_of_narrow_keys_have_room_for_their_weights() -> None:
    state = StreamingRowSample(1).update(np.full((4, 1), 300, np.float16), weights=1e5)
    sample = state.result()
    np.testing.assert_allclose(sample.rows(), np.sqrt(sample.weights)[:, None] * 300)
    K = np.full((200_000, 1), 100, np.float16)
    for rows in (levattn.sample_rows(lambda: [K], 1).rows(), levattn.sample_rows(K, 1).rows(K)):
        np.testing.assert_allclose(rows, 100 * np.sqrt(200_000))
    torch = pytest.importorskip("torch")
    found = levattn.sample_rows(torch.tensor(K), 1).rows(torch.tensor(K))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, 100 * np.sqrt(200_000))
    narrow = np.ones((4, 1), np.float32)
    with pytest.raises(ValueError, match="leave the range of float32; expected K of float64"):
        levattn.sample_rows(narrow, 2, weights=1e-100).rows(narrow)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ValueError, "size and distortion: neither"),
        ({"size": 3, "distortion": 0.5}, ValueError, "both"),
        ({"size": 0}, ValueError, "size is 0"),
        ({"size": 2.5}, TypeError, "size is 2.5"),
        ({"distortion": 1}, ValueError, "distortion is 1"),
        ({"size": 3, "failure": 2}, ValueError, "failure is 2"),
        ({"size": 3, "ridge": -1}, ValueError, "ridge is -1"),
        ({"size": 3, "rng": "a"}, TypeError, "rng is 'a'"),
        ({"size": 3, "row_start": -1}, ValueError, "row_start is -1"),
        ({"size": 3, "row_start": 2**62}, ValueError, "row_start is"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        StreamingRowSample(**options)


@pytest.mark.parametrize(
    ("K", "options", "error", "words"),
    [
        (np.ones((2, 4, 5)), {}, ValueError, r"K has shape \(2, 4, 5\); expected one matrix"),
        (np.ones((4, 6)), {}, ValueError, "K has 6 columns; expected 5"),
        (np.ones((4, 5), np.float32), {}, TypeError, "float32"),
        (np.full((4, 5), np.nan), {}, levattn.NonFiniteError, "first such rows 400, 401, 402"),
        (np.full((2 * BLOCK, 5), np.inf), {}, levattn.NonFiniteError, "row"),
        (np.ones((4, 5)), {"weights": np.ones(3)}, ValueError, "weights has shape"),
        (np.ones((4, 5)), {"weights": -1.0}, ValueError, r"weights\[0\] is -1"),
        (np.full((4, 5), 1e300), {"weights": 1e30}, ValueError, "weights leave the range of float64"),
        (np.full((4, 5), 1e-200), {"weights": 1e-300}, ValueError, "weights leave the range of float64"),
        (np.ones((4, 5)), {"mask": np.ones(4)}, TypeError, "mask"),
    ],
)
def test_chunks_that_do_not_fit_leave_the_state_as_it_was(
    K: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    state = one(KEYS["tall"], size=20)
    before = state.to_bytes()
    with pytest.raises(error, match=words):
        state.update(K, **options)
    assert state.to_bytes() == before


def test_states_that_do_not_go_together() -> None:
    K = KEYS["tall"]
    state = one(K, size=20)
    before = state.to_bytes()
    for other, words in (
        (one(K, size=20), "rows 0 to 399 are there already; expected others. Number them by row_start="),
        (one(K, 399, size=20), "rows 399 to 399 are there already"),
        (one(K, 400, size=21), "other options"),
        (one(K, 400, size=20, rng=6), "another seed"),
        (one(K, 400, size=20, ridge=1.0), "other options"),
        (one(K[:, 1:], 400, size=20), "other has 4 columns; expected 5"),
    ):
        with pytest.raises(ValueError, match=words):
            state.merge(other)
    with pytest.raises(TypeError, match="float32"):
        state.merge(one(K.astype(np.float32), 400, size=20))
    with pytest.raises(TypeError, match="other is of type int"):
        state.merge(3)  # type: ignore[arg-type]
    assert state.to_bytes() == before
    assert state.merge(one(K, 400, size=20)).update(K).result().rows_of_all == 1200
