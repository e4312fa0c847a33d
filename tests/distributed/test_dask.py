"""Keys in dask arrays and in shards on disk: the set and the scores of all rows, wherever they are computed."""

from __future__ import annotations

import logging
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import levattn
from levattn.exceptions import KeyFileError, NonFiniteError
from strategies import conditioned, examples, graded, integer_deficient, near_deficient, tiny_direction

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")
distributed = pytest.importorskip("distributed")

from levattn.distributed.dask import (  # noqa: E402 (of no use without dask)
    from_keys,
    leverage_scores,
    query_moments,
    sample_rows,
    softmax_state,
    universal_set,
    universal_set_of_files,
)
from levattn.states import SoftmaxState  # noqa: E402


@pytest.fixture(autouse=True)
def in_this_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute in this thread, unless the test has a cluster."""
    with dask.config.set(scheduler=None if {"client", "remote"} & {*request.fixturenames} else "synchronous"):
        yield


def keys(n: int = 9000, d: int = 6, seed: int = 0) -> np.ndarray:
    """Gaussian keys with some that are large."""
    K = np.random.default_rng(seed).standard_normal((n, d))
    K[:: max(1, n // 7)] *= 40
    return K


def in_chunks(K: np.ndarray, sizes: list[int]) -> Any:
    """K with these chunks and one for the rows that are left."""
    rows = K.shape[-2]
    cut = [max(0, min(size, rows - sum(sizes[:i]))) for i, size in enumerate(sizes)]
    return da.from_array(K, chunks=(*((s,) for s in K.shape[:-2]), (*cut, rows - sum(cut)), (K.shape[-1],)))


def unknown(K: Any) -> Any:
    """The same rows, in chunks of unknown sizes."""
    with dask.config.set(scheduler="synchronous"):
        found = K[da.ones(K.shape[0], chunks=(K.chunks[0],), dtype=bool)]
    assert np.isnan(found.shape[0])
    return found


def check(found: levattn.StreamedSet, K: Any, epsilon: float) -> None:
    """Compare a set with that of the keys in memory."""
    expected = levattn.universal_set(K, epsilon)
    assert found.n == K.shape[-2]
    assert found.guarantee == expected.guarantee == "exact"
    assert np.array_equal(found.rank, expected.rank)
    rows = np.asarray(expected.mask).reshape(-1, K.shape[-2])
    scores = np.asarray(expected.scores, np.float64).reshape(rows.shape)
    for item, which, score in zip(found.items, rows, scores, strict=True):
        assert np.array_equal(item.indices, np.flatnonzero(which))
        np.testing.assert_allclose(item.scores, score[which], rtol=1e-6)


# -- sets and scores ----------------------------------------------------------------------------------


@examples(40)
@given(st.lists(st.integers(0, 3000), max_size=20), st.sampled_from([0.01, 0.05, 0.3, 1.0]), st.booleans())
def test_any_chunks_give_the_set_and_the_scores(sizes: list[int], epsilon: float, known: bool) -> None:
    K = keys()
    X = in_chunks(K, sizes)
    X = X if known else unknown(X)
    check(universal_set(X, epsilon=epsilon).compute(), K, epsilon)
    scores = leverage_scores(X)
    assert scores.numblocks == X.numblocks[:1]
    assert not known or scores.chunks == X.chunks[:1]
    np.testing.assert_allclose(scores.compute(), levattn.leverage_scores(K), rtol=1e-12)


@examples(20)
@given(st.lists(st.integers(0, 3000), max_size=20))
def test_any_chunks_give_the_sample(sizes: list[int]) -> None:
    K = keys()
    for options in ({"size": 100}, {"distortion": 0.8, "ridge": 5.0}):
        found = sample_rows(in_chunks(K, sizes), rng=3, **options).compute()
        expected = levattn.StreamingRowSample(rng=3, **options).update(K).result()
        assert found.indices.tolist() == expected.indices.tolist()
        np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-12)
        np.testing.assert_array_equal(found.keys, K[found.indices])
        assert found.rows_of_all == len(K)


def test_samples_that_are_refused() -> None:
    X = da.from_array(keys(), chunks=(1000, 6))
    with pytest.raises(ValueError, match=r"K has chunks of unknown size.*compute_chunk_sizes"):
        sample_rows(unknown(X), 5)
    with pytest.raises(ValueError, match="one matrix"):
        sample_rows(X.reshape(2, 4500, 6), 5)
    with pytest.raises(ValueError, match="neither"):
        sample_rows(X)
    X[3500, 2] = np.nan
    with pytest.raises(NonFiniteError, match=r"chunk 3 of the rows.*row 500"):
        sample_rows(X, 5).compute()


@pytest.mark.parametrize(
    "K",
    [
        pytest.param(conditioned(np.random.default_rng(1), 6000, 8, 1e10), id="ill-conditioned"),
        pytest.param(conditioned(np.random.default_rng(2), 6000, 8, 1e6), id="condition 1e6"),
        pytest.param(integer_deficient(np.random.default_rng(3), 4000, 6, 3), id="rank-deficient"),
        pytest.param(tiny_direction(np.random.default_rng(4), 3000, 5, 1e-9), id="a direction of one row"),
        pytest.param(graded(np.random.default_rng(5), 3000, 6) * 1e170, id="columns of all sizes"),
        pytest.param(np.zeros((50, 3)), id="zeros"),
        pytest.param(np.random.default_rng(6).standard_normal((4, 9)), id="fewer rows than columns"),
    ],
)
def test_hard_keys(K: np.ndarray) -> None:
    X = da.from_array(K, chunks=(-(-len(K) // 11), K.shape[1]))
    check(universal_set(X, 0.02).compute(), K, 0.02)
    np.testing.assert_allclose(leverage_scores(X).compute(), levattn.leverage_scores(K), rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", ">f8"])
def test_storage_types(dtype: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    K = keys().astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    X = da.from_array(K, chunks=(2500, 6))
    check(universal_set(X, 0.05).compute(), K, 0.05)
    scores, expected = leverage_scores(X), levattn.leverage_scores(K)
    assert scores.dtype == scores.compute().dtype == expected.dtype
    np.testing.assert_allclose(scores.compute(), expected, rtol=1e-12 if dtype in ("float64", ">f8") else 2e-6)


@pytest.mark.parametrize("known", [True, False])
def test_weights(known: bool) -> None:
    K = keys(4000).astype(np.float32)
    w = np.random.default_rng(1).random(4000) * (np.arange(4000) % 5 > 0)
    X = np.sqrt(w)[:, None] * K.astype(np.float64)
    lazy, lazy_w = in_chunks(K, [1500, 700]), da.from_array(w, chunks=((1500, 700, 1800),) if not known else (900,))
    if not known:
        lazy, lazy_w = unknown(lazy), lazy_w[da.ones(4000, chunks=lazy_w.chunks, dtype=bool)]
    found = universal_set(lazy, 0.02, weights=lazy_w).compute()
    check(found, X, 0.02)
    assert found.present == np.count_nonzero(w)
    np.testing.assert_array_equal(found.keys, X[found.indices])
    scores = leverage_scores(lazy, weights=lazy_w)
    assert scores.dtype == scores.compute().dtype == np.float64
    np.testing.assert_allclose(scores.compute(), levattn.leverage_scores(K, weights=w), rtol=2e-6, atol=1e-15)
    if known:
        np.testing.assert_array_equal(leverage_scores(lazy, weights=w).compute(), scores.compute())
        with pytest.raises(
            ValueError, match=r"weights has shape \(3999,\); expected one that broadcasts to \(4000,\)"
        ):
            universal_set(lazy, 0.1, weights=w[1:])
    else:
        with pytest.raises(ValueError, match="because their number is unknown"):
            leverage_scores(lazy, weights=da.from_array(w, chunks=(4000,)))
    each = leverage_scores(in_chunks(K, [1500, 700]), weights=np.full(4000, 2.0)).compute()
    for weight in (2.0, da.from_array(np.array(2.0))):
        np.testing.assert_allclose(leverage_scores(lazy, weights=weight).compute(), each, rtol=1e-12)
    with pytest.raises(ValueError, match=r"weights\[\d+\] is -"):
        universal_set(lazy, 0.1, weights=-lazy_w).compute()
    with pytest.raises(ValueError, match="weights is -1; expected finite numbers of at least 0"):
        leverage_scores(lazy, weights=-1.0)


def test_batches_cut_columns_and_selected_rows() -> None:
    K = keys(24_000).reshape(2, 3, 4000, 6)
    X = da.from_array(K, chunks=(1, 2, 900, 4))
    check(universal_set(X, 0.05).compute(), K, 0.05)
    scores = leverage_scores(X)
    assert scores.chunks == ((2,), (3,), (900, 900, 900, 900, 400))
    np.testing.assert_allclose(scores.compute(), levattn.leverage_scores(K), rtol=1e-10)
    for columns in (4, 6):
        X = da.from_array(keys(), chunks=(400, columns))
        check(universal_set(X[X[:, 1] > 0], 0.05).compute(), keys()[keys()[:, 1] > 0], 0.05)


@pytest.mark.filterwarnings("ignore::levattn.RankWarning")
def test_rows_at_the_edge_of_the_rank_make_it_a_superset() -> None:
    K = near_deficient(np.random.default_rng(0), 600, 5, 1e-17)
    alone = levattn.StreamingUniversalSet(0.1).update(K).result()
    found = universal_set(da.from_array(K, chunks=(100, 5)), 0.1).compute()
    assert (found.guarantee, found.rank) == (alone.guarantee, alone.rank)


@pytest.mark.parametrize("f", [4, levattn.Power(6)])
def test_even_powers(f: Any) -> None:
    K = keys(3000, 3)
    found = universal_set(da.from_array(K, chunks=(700, 3)), 0.05, f=f).compute()
    alone = levattn.StreamingUniversalSet(0.05, f=f).update(K).result()
    assert np.array_equal(found.indices, alone.indices)
    assert (found.guarantee, found.f) == ("superset", alone.f)
    assert set(levattn.universal_set(K, 0.05, f=f).indices) <= set(found.indices)


def test_no_rows(tmp_path: Path) -> None:
    found = universal_set(da.zeros((0, 3), chunks=(5, 3)), 0.1).compute()
    assert (found.n, len(found), found.rank) == (0, 0, 0)
    assert leverage_scores(da.zeros((0, 3), chunks=(5, 3))).compute().shape == (0,)
    np.save(tmp_path / "none.npy", np.ones((0, 3)))
    for epsilon in (0.1, 5e-324):  # for which 1/ε is not even a number
        assert universal_set_of_files(tmp_path / "none.npy", epsilon).n == 0


def test_the_same_chunks_give_the_same_bits() -> None:
    X = da.from_array(keys(), chunks=(700, 6))
    results = []
    for scheduler in ("synchronous", "threads", "threads"):
        with dask.config.set(scheduler=scheduler):
            results.append((universal_set(X, 0.01).compute(), leverage_scores(X).compute()))
    for found, scores in results[1:]:
        assert np.array_equal(found.member_scores, results[0][0].member_scores)
        assert np.array_equal(scores, results[0][1])


def counted(tasks: list[tuple[str, int]], name: str, value: Any) -> Any:
    tasks.append((name, len(value)))
    return value


@pytest.mark.parametrize("start", [0, 1])
def test_reading_is_lazy_and_as_often_as_said(start: int) -> None:
    seen: list[tuple[str, int]] = []
    K = keys(9000 + start)
    X = da.from_array(K, chunks=((3000 + start, 3000, 3000), 6))[start:]
    X = X.map_blocks(lambda part: counted(seen, "keys", part), dtype=K.dtype)
    seen.clear()  # of what dask tries on no rows
    lazy, scores = universal_set(X, 0.1), leverage_scores(X)
    assert seen == []
    lazy.compute()
    assert seen == [("keys", 3000)] * 3
    seen.clear()
    scores.map_blocks(lambda part: counted(seen, "scores", part), dtype=float, meta=np.empty(0)).compute()
    assert sorted(seen) == [("keys", 3000)] * 6 + [("scores", 3000)] * 3
    # a chunk is let go before the next is read, in the second pass too
    assert [name for name, _ in seen[3:]] == ["keys", "scores"] * 3


# -- files --------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, part in enumerate(np.split(keys().astype(np.float32), [1000, 1000, 6000])):
        np.save(folder / f"shard-{number}.npy", part)
    return folder


def test_shards_are_read_in_chunks(shards: Path) -> None:
    K = keys().astype(np.float32)
    X = from_keys(levattn.open_keys(shards, chunk_rows=4000))
    assert (X.chunks, X.dtype) == (((4000, 4000, 1000), (6,)), K.dtype)
    assert np.array_equal(X.compute(), K)
    assert np.array_equal(X[5990:6010, 2].compute(), K[5990:6010, 2])
    check(universal_set(X, 0.05).compute(), K, 0.05)
    np.testing.assert_allclose(leverage_scores(X).compute(), levattn.leverage_scores(K), rtol=2e-6)
    assert np.array_equal(from_keys(sorted(shards.iterdir())[::-1]).compute()[:3000], K[6000:])


def test_the_set_of_files(shards: Path) -> None:
    check(universal_set_of_files(levattn.open_keys(shards, memory=700 * 24), 0.05), keys().astype(np.float32), 0.05)
    check(universal_set_of_files(levattn.open_keys(shards, memory=700 * 24), epsilon=1), keys().astype(np.float32), 1)
    found = universal_set_of_files([shards / "shard-3.npy"], 0.05, f=4)
    assert (found.n, found.f) == (3000, 4)


@pytest.mark.parametrize("path", ["", ["", "keys.npy"], None, 3, b"keys.npy", np.eye(3), {"a.npy", "b.npy"}])
def test_what_is_no_path_is_refused_as_by_open_keys(path: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^path (is|holds)") as refused:
        levattn.open_keys(path)
    for call in (from_keys, lambda path: universal_set_of_files(path, 0.1)):
        with pytest.raises(refused.type, match=re.escape(str(refused.value))):
            call(path)


def test_a_tensor_of_several(tmp_path: Path) -> None:
    K = keys(600).reshape(2, 300, 6)
    np.savez(tmp_path / "layer.npz", K=K, V=np.ones((2, 300, 3)))
    found = universal_set_of_files(levattn.open_keys(tmp_path / "layer.npz", tensor="K", memory=2 * 128 * 48), 0.05)
    check(found, K, 0.05)
    with pytest.raises(KeyFileError, match="tensor"):
        universal_set_of_files(tmp_path / "layer.npz", 0.05)


def test_chunks_that_are_not_the_same_when_they_are_computed_again_are_refused() -> None:
    K = np.random.default_rng(0).standard_normal((1000, 4))
    seen: list[int] = []

    def once_else(chunk: Any, block_id: Any) -> Any:
        seen.append(block_id[0])
        chunk = chunk.copy()
        if seen.count(2) == 2:
            chunk[[7, 8]] = chunk[[8, 7]]
        return chunk

    X = da.from_array(K, chunks=(300, 4)).map_blocks(once_else, dtype=K.dtype, meta=np.empty((0, 0)))
    with pytest.raises(ValueError, match=r"chunk 2 of the rows of K held other keys.*K = K\.persist\(\)"):
        leverage_scores(X).compute(scheduler="sync")


def test_paths_do_not_depend_on_the_folder_of_the_worker(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shards.parent)
    one, several = from_keys("shards"), from_keys([Path("shards", "shard-0.npy")])
    monkeypatch.chdir(shards)
    assert one.compute().shape == (9000, 6)
    assert several.compute().shape == (1000, 6)


def test_a_file_that_changed_is_refused(shards: Path) -> None:
    X = from_keys(shards)
    np.save(shards / "shard-0.npy", np.ones((7, 6), np.float32))
    with pytest.raises(KeyFileError, match="changed"):
        universal_set(X, 0.1).compute()


# -- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [lambda K: universal_set(K, 0.1), leverage_scores])
def test_wrong_arguments_show_before_anything_is_computed(call: Callable[[Any], Any]) -> None:
    columns = da.ones((5, 4))[:, da.from_array(np.ones(4, bool), chunks=2)]
    for K, error, message in (
        (np.ones((5, 3)), TypeError, r"ndarray; expected a dask array.*from_keys"),
        (da.ones(5), ValueError, r"shape \(5,\)"),
        (da.ones((5, 3), dtype="int64"), TypeError, "int64"),
        (da.ones((5, 0)), ValueError, "at least one column"),
        (columns, ValueError, "compute_chunk_sizes"),
    ):
        with pytest.raises(error, match=message):
            call(K)
    check(universal_set(columns.compute_chunk_sizes(), 0.5).compute(), np.ones((5, 4)), 0.5)
    with pytest.raises(ValueError, match="epsilon is 2"):
        universal_set(da.ones((5, 3)), 2)
    with pytest.raises(ValueError, match="f is"):
        universal_set(da.ones((5, 3)), 0.1, f=levattn.Softmax(2.0))
    with pytest.raises(FileNotFoundError):
        from_keys("no such file.npy")


def test_names_the_rows_that_are_not_finite(tmp_path: Path) -> None:
    K = keys()
    K[8017] = np.inf
    X = da.from_array(K, chunks=(3000, 6))
    for lazy in (universal_set(X, 0.1), leverage_scores(X)):
        with pytest.raises(NonFiniteError, match=r"chunk 2 of the rows: .* row 2017 of this part;.* Remove them$"):
            lazy.compute()
    np.save(tmp_path / "keys.npy", K)
    with pytest.raises(NonFiniteError, match=r"rows from 5000 on: .* row 3017 of this part;.* Remove them$"):
        universal_set_of_files(levattn.open_keys(tmp_path / "keys.npy", memory=500 * 48), 0.08)


@pytest.mark.parametrize("package", ["dask", "distributed"])
def test_says_what_to_install(package: str, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    X = da.ones((5, 3))
    for module in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    wants = rf'needs {package}: pip install "levattn\[dask\]"'
    with pytest.raises(ImportError, match=wants):
        universal_set_of_files(shards, 0.1, client="tcp://127.0.0.1:1")
    if package == "dask":
        for call in (lambda: universal_set(X, 0.1), lambda: leverage_scores(X), lambda: from_keys(shards)):
            with pytest.raises(ImportError, match=wants):
                call()


# -- a cluster: in this process, which is spoken to by messages as another would be, or of processes ---


def cluster_of(**options: Any) -> Any:
    quiet = {"dashboard_address": ":0", "silence_logs": logging.CRITICAL}
    return distributed.LocalCluster(n_workers=2, threads_per_worker=1, **quiet, **options)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of(processes=False, protocol="tcp") as found:
        yield found


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    with cluster_of(processes=True) as found:
        yield found


@pytest.fixture
def client(cluster: Any) -> Iterator[Any]:
    yield from client_of(cluster)


@pytest.fixture
def remote(processes: Any) -> Iterator[Any]:
    yield from client_of(processes)


def client_of(cluster: Any) -> Iterator[Any]:
    with distributed.Client(cluster) as found:
        found.wait_for_workers(2)
        yield found


@pytest.mark.thorough
def test_on_processes(remote: Any, processes: Any, shards: Path) -> None:
    K = keys()
    X = da.from_array(K, chunks=(700, 6))
    check(universal_set(X, 0.02).compute(), K, 0.02)
    check(universal_set(X, 0.02, client=remote), K, 0.02)
    check(universal_set(X, 0.02, client=processes), K, 0.02)
    np.testing.assert_allclose(leverage_scores(X).compute(), levattn.leverage_scores(K), rtol=1e-12)
    check(
        universal_set_of_files(levattn.open_keys(shards, memory=700 * 24), 0.05, client=remote),
        K.astype(np.float32),
        0.05,
    )


def test_by_the_address_of_a_scheduler(cluster: Any, shards: Path) -> None:
    found = universal_set_of_files(shards, 0.05, client=cluster.scheduler_address)
    check(found, keys().astype(np.float32), 0.05)
    assert not distributed.client._get_global_client()  # nothing else is computed there from now on


def test_what_comes_to_the_client_does_not_grow_with_the_rows(client: Any) -> None:
    for n in (40_000, 400_000):
        K = da.random.default_rng(0).normal(size=(n, 4), chunks=(20_000, 4))
        assert len(pickle.dumps(universal_set(K, 0.5).compute())) < 4000


def test_errors_come_to_the_client(client: Any) -> None:
    K = keys()
    K[17] = np.nan
    with pytest.raises(NonFiniteError, match="chunk 0"):
        universal_set(da.from_array(K, chunks=(3000, 6)), 0.1).compute()


@pytest.mark.thorough
def test_a_killed_worker_changes_nothing(remote: Any, tmp_path: Path) -> None:
    K = keys(24_000)

    def slowly(part: np.ndarray, block_id: Any = None) -> np.ndarray:
        if len(part) > 1:
            Path(tmp_path, f"{block_id[0]}-{os.getpid()}").touch()
            time.sleep(0.05)
        return part

    X = da.from_array(K, chunks=(600, 6)).map_blocks(slowly, dtype=K.dtype, meta=np.empty((0, 6)))
    victim = next(iter(remote.run(os.getpid).values()))
    future = remote.compute(universal_set(X, 0.02))
    while len(list(tmp_path.glob(f"*-{victim}"))) < 6:
        assert not future.done()
        time.sleep(0.01)
    os.kill(victim, signal.SIGKILL)
    assert not future.done()
    check(future.result(timeout=120), K, 0.02)
    read = [path.name.partition("-")[0] for path in tmp_path.iterdir()]
    assert len(read) > len(set(read)) == 40  # what the victim had in hand was read again


# -- moments of queries -------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [False, True])
def test_query_moments_are_those_of_all_queries(mean: bool) -> None:
    Q = np.random.default_rng(0).normal(1, 2, (2, 500, 4))
    state = query_moments(in_chunks(Q, [100, 0, 300]), mean=mean).compute()
    whole = np.concatenate([Q, np.ones((2, 500, 1))], axis=2) if mean else Q
    np.testing.assert_allclose(state.result(), whole.swapaxes(1, 2) @ whole, rtol=1e-12)
    np.testing.assert_array_equal(state.weight, [500, 500])


def test_query_moments_refuse_what_is_no_array_of_queries() -> None:
    with pytest.raises(TypeError, match="Q is of type ndarray"):
        query_moments(np.zeros((9, 2)))
    with pytest.raises(TypeError, match="mean is 'yes'; expected True or False"):
        query_moments(in_chunks(np.zeros((9, 2)), [4]), mean="yes")


# -- softmax states -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[500], [100, 0, 300], [1, 2, 3]])
@pytest.mark.parametrize("others", [[500], [250], None])
def test_softmax_state_is_that_of_all_positions(sizes: list[int], others: list[int] | None) -> None:
    rng = np.random.default_rng(0)
    logits, V = rng.normal(scale=20, size=(2, 500, 4)), rng.normal(size=(2, 500, 3))
    if others is None:  # chunks of unknown size, which are alike
        logits, V = logits[0], V[0]
        parts = [unknown(in_chunks(array, sizes)) for array in (logits, V)]
    else:
        parts = [in_chunks(logits, sizes), in_chunks(V, others)]
    state = softmax_state(*parts).compute()
    alone = SoftmaxState(4, 3, logits.shape[:-2]).update(logits, V)
    np.testing.assert_allclose(state.result(), alone.result(), rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(state.m, alone.m)


def test_softmax_state_refuses_what_does_not_go_together() -> None:
    for chunk, V in ((4, np.zeros((9, 2, 2))), (9, np.zeros((8, 2)))):
        with pytest.raises(ValueError, match="as many positions"):
            softmax_state(in_chunks(np.zeros((9, 2)), [chunk]), in_chunks(V, [4]))
    with pytest.raises(TypeError, match="V is of type ndarray"):
        softmax_state(in_chunks(np.zeros((9, 2)), [4]), np.zeros((9, 2)))
