"""Every kind of dask array, given to every function that takes one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import levattn
from levattn.states import Moments, SoftmaxState

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

from levattn.distributed.dask import (  # noqa: E402 (of no use without dask)
    leverage_scores,
    query_moments,
    softmax_state,
    universal_set,
)

EARLY = tuple(map(int, dask.__version__.split(".")[:2])) < (2024, 12)  # an array's tasks are tuples


@pytest.fixture(autouse=True)
def in_this_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute in this thread, unless the test has a client."""
    with dask.config.set(scheduler=None if "client" in request.fixturenames else "synchronous"):
        yield


def plain(n: int = 60, d: int = 3) -> Any:
    K = np.random.default_rng(0).standard_normal((n, d))
    K[::7] *= 30
    return K


def chunked(K: Any = None, rows: Any = 17, columns: Any = -1) -> Any:
    K = plain() if K is None else K
    return da.from_array(K, chunks=(rows, columns))


def rows_as_lists(K: Any) -> Any:
    return [dask.delayed(part) for part in np.array_split(K, 4)]


def from_parts(sizes: Any) -> Any:
    parts = np.split(plain(), [20, 21])
    sizes = [len(part) for part in parts] if sizes == "known" else [np.nan] * len(parts)
    return da.concatenate(
        [
            da.from_delayed(dask.delayed(np.array)(part), (size, 3), dtype=float)
            for part, size in zip(parts, sizes, strict=True)
        ],
        allow_unknown_chunksizes=True,
    )


def frame(**options: Any) -> Any:
    pandas, frames = pytest.importorskip("pandas"), pytest.importorskip("dask.dataframe")
    table = pandas.DataFrame(plain(), columns=["a", "b", "c"])
    return frames.from_pandas(table, npartitions=3, **options)


def optimized(K: Any) -> Any:
    return dask.optimize(K)[0]


def by_hand(K: Any) -> Any:
    """An array of a graph of tuples, with a task for two chunks whose name may be a number from dask 2024.12 on."""
    made = "made" if EARLY else 7
    graph = {("keys", i, 0): (np.add, made, float(i)) for i in range(2)} | {made: (np.array, "stored"), "stored": K}
    return da.Array(graph, "keys", ((len(K), len(K)), (K.shape[1],)), dtype=K.dtype)


def with_an_annotation(K: Any) -> Any:
    with dask.annotate(priority=3, retries=2):
        return chunked(K) * 2.0


ARRAYS: dict[str, Callable[[], Any]] = {
    "from an array": chunked,
    "one chunk": lambda: chunked(rows=-1),
    "a row a chunk": lambda: chunked(rows=1),
    "cut columns": lambda: chunked(columns=2),
    "sliced": lambda: chunked()[3:50],
    "sliced ones": lambda: da.ones((4, 2), chunks=2)[:3],
    "sliced by chunks": lambda: chunked()[17:34],
    "strided": lambda: chunked()[::3],
    "reversed": lambda: chunked()[::-1],
    "reversed columns": lambda: chunked()[5:, ::-1],
    "empty slice": lambda: chunked()[5:5],
    "a list of rows": lambda: chunked()[[50, 3, 3, 20]],
    "rows of a dask array": lambda: chunked()[da.from_array(np.array([50, 3, 20]), chunks=2)],
    "transposed": lambda: chunked(plain().T, 2, 17).T,
    "swapped axes": lambda: da.from_array(plain(60, 6).reshape(3, 20, 6), chunks=(2, 7, 6)).swapaxes(1, 2),
    "reshaped": lambda: da.from_array(plain(60, 6).ravel(), chunks=37).reshape(-1, 6),
    "rechunked": lambda: chunked().rechunk((25, 2)).rechunk((11, 3)),
    "concatenated": lambda: da.concatenate([chunked(), da.ones((5, 3)), chunked()[::2]]),
    "stacked": lambda: da.stack([chunked(), chunked() + 1.0, chunked()[::-1]]),
    "block": lambda: da.block([[chunked(), chunked()[:, :1] + 1.0]]),
    "tiled": lambda: da.tile(chunked(), (2, 1)),
    "padded": lambda: da.pad(chunked(), ((1, 2), (0, 0)), mode="edge"),
    "uneven chunks": lambda: chunked(rows=(1, 40, 2, 17)),
    "empty chunks": lambda: chunked(rows=(0, 30, 0, 0, 30, 0)),
    "known parts of delayed": lambda: from_parts("known"),
    "unknown parts of delayed": lambda: from_parts("unknown"),
    "boolean rows": lambda: (K := chunked())[K[:, 0] > 0],
    "sized boolean rows": lambda: (K := chunked())[K[:, 0] > 0].compute_chunk_sizes(),
    "sliced boolean rows": lambda: (K := chunked())[K[:, 0] > 0][:, 1:],
    "map_blocks": lambda: chunked().map_blocks(np.negative, dtype=float),
    "map_blocks of columns": lambda: chunked().map_blocks(lambda K: K[:, :2], dtype=float, chunks=((17,) * 4, (2,))),
    "map_overlap": lambda: chunked().map_overlap(lambda K: K + 1.0, depth=2, boundary="reflect", dtype=float),
    "persisted": lambda: chunked().persist(),
    "slice of persisted": lambda: chunked().persist()[3:50] + 1.0,
    "sum of persisted and not": lambda: chunked().persist() + chunked(plain()[::-1].copy()),
    "optimized": lambda: optimized(chunked()[2:40] * 2.0),
    "optimized twice": lambda: optimized(optimized(chunked()[2:40] * 2.0)[1:] + 1.0),
    "by hand": lambda: by_hand(plain()),
    "annotated": lambda: with_an_annotation(plain()),
    "arithmetic": lambda: (chunked() - chunked().mean(axis=0)) / 3.0,
    "matrix product": lambda: chunked() @ da.from_array(plain(3, 3), chunks=2),
    "singular vectors": lambda: da.linalg.svd(chunked(rows=20))[0],
    "random": lambda: da.random.default_rng(0).normal(size=(60, 3), chunks=(13, 3)),
    "where": lambda: da.where(chunked() > 0, chunked(), -1.0),
    "from a function": lambda: da.fromfunction(lambda i, j: np.cos(i * j + i), chunks=9, shape=(50, 3), dtype=float),
    "broadcast": lambda: da.broadcast_to(chunked(rows=-1), (2, 60, 3)),
    "cast": lambda: chunked().astype("float32"),
    "half": lambda: chunked().astype("float16")[4:],
    "other byte order": lambda: chunked(plain().astype(">f8"))[4:],
    "values of a frame": lambda: frame().values,
    "values of some rows of a frame": lambda: (table := frame())[table.a > 0][["c", "a"]].values,
    "an array of a frame": lambda: frame().to_dask_array(lengths=True),
    "one partition": lambda: frame().partitions[1].values,
    "bags of rows": lambda: da.concatenate([da.from_delayed(part, (15, 3), float) for part in rows_as_lists(plain())]),
    "stored later": lambda: da.from_array(np.asfortranarray(plain()), chunks=(17, 3), inline_array=True)[2:],
    "unfused": lambda: da.from_array(plain(), chunks=(17, 3), name=False, lock=True, asarray=False)[2:],
}  # fmt: skip


def scores(X: Any, K: Any) -> None:
    lazy, expected = leverage_scores(X), levattn.leverage_scores(K)
    found = lazy.compute()
    assert (lazy.dtype, lazy.ndim, lazy.numblocks) == (
        expected.dtype,
        expected.ndim,
        (*(1,) * (X.ndim - 2), X.numblocks[-2]),
    )
    tolerance = 1e-9 if K.dtype.itemsize == 8 else 2e-6
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-14)
    np.testing.assert_allclose(lazy.sum().compute(), expected.sum(), rtol=1e-5)  # a part of a larger graph
    np.testing.assert_array_equal(dask.compute(X, lazy)[1], found)  # beside the keys themselves


def members(X: Any, K: Any) -> None:
    found, expected = universal_set(X, 0.2).compute(), levattn.universal_set(K, 0.2)
    assert (found.n, found.guarantee) == (K.shape[-2], "exact")
    rows = np.asarray(expected.mask).reshape(len(found.items), K.shape[-2])
    assert [list(item.indices) for item in found.items] == [list(np.flatnonzero(row)) for row in rows]


def moments(X: Any, K: Any) -> None:
    for mean in (False, True):
        whole = np.concatenate([K, np.ones_like(K[..., :1])], axis=-1) if mean else K
        state = Moments(whole.shape[-1], whole.shape[:-2]).update(whole)
        found = query_moments(X, mean=mean).compute()
        np.testing.assert_allclose(found.result(), state.result(), rtol=1e-10, atol=1e-10)
        np.testing.assert_array_equal(found.weight, state.weight)


def softmax(X: Any, K: Any) -> None:
    state = SoftmaxState(K.shape[-1], K.shape[-1], K.shape[:-2]).update(K, K)
    found = softmax_state(X, X * 1.0 if X.dtype.isnative else X).compute()
    np.testing.assert_allclose(found.result(), state.result(), rtol=1e-4 if K.dtype.itemsize == 2 else 1e-6)


FUNCTIONS = {"leverage_scores": scores, "universal_set": members, "query_moments": moments, "softmax_state": softmax}


@pytest.mark.filterwarnings("ignore::levattn.RankWarning")
@pytest.mark.parametrize("function", list(FUNCTIONS))
@pytest.mark.parametrize("array", list(ARRAYS))
def test_every_array_is_taken(array: str, function: str) -> None:
    X = ARRAYS[array]()
    FUNCTIONS[function](X, X.compute())


# -- the second pass -----------------------------------------------------------------------------------


def test_persisted_chunks_are_not_computed_again() -> None:
    seen: list[int] = []
    K = chunked().map_blocks(lambda part: seen.append(len(part)) or part, dtype=float, meta=np.empty((0, 0))).persist()
    seen.clear()
    leverage_scores(K).compute()
    assert seen == []
    shifted = (K + 1.0).map_blocks(lambda part: seen.append(len(part)) or part, dtype=float, meta=np.empty((0, 0)))
    leverage_scores(shifted).compute()
    assert sorted(seen) == sorted([*K.chunks[0], *K.chunks[0]])


@pytest.mark.skipif(EARLY, reason="dask makes the tasks of the second pass")
def test_annotations_are_those_of_the_first_pass() -> None:
    marked = [layer.annotations for layer in leverage_scores(with_an_annotation(plain())).dask.layers.values()]
    assert sum(annotations == {"priority": 3, "retries": 2} for annotations in marked) >= 2


def test_the_same_array_has_the_same_scores_twice() -> None:
    seen: list[int] = []
    K = chunked()[3:].map_blocks(lambda part: seen.append(len(part)) or part, dtype=float, meta=np.empty((0, 0)))
    first, second = dask.compute(leverage_scores(K), leverage_scores(K))
    np.testing.assert_array_equal(first, second)
    assert len(seen) == 2 * K.numblocks[0]


# -- on a cluster, which holds chunks as futures -------------------------------------------------------


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    quiet = {"dashboard_address": ":0", "silence_logs": logging.CRITICAL}
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=False, **quiet) as cluster,
        distributed.Client(cluster) as found,
    ):
        yield found


# Scattered data have keys of their own (hash=False): if the scheduler learns late that equal data of an earlier test
# are no longer needed, it would drop those that have the same key.
ON_CLUSTER: dict[str, Callable[[Any], Any]] = {
    "persisted": lambda client: client.persist(chunked()),
    "slice of persisted": lambda client: client.persist(chunked())[3:50],
    "sum of persisted and not": lambda client: client.persist(chunked()) + chunked()[::-1],
    "a future": lambda client: da.from_delayed(client.submit(plain), (60, 3), float),
    "futures": lambda client: da.concatenate(
        [da.from_delayed(part, (15, 3), float) for part in client.scatter(np.split(plain(), 4), hash=False)]
    ),
    "a task of a future": lambda client: da.from_delayed(
        dask.delayed(np.negative)(client.scatter(plain(), hash=False)), (60, 3), float
    ),
    "a saved one": lambda client: (
        client.publish_dataset(chunked().persist(), name="keys", override=True),
        client.get_dataset("keys"),
    )[1],
    "sliced": lambda _: ARRAYS["sliced"](),
    "boolean rows": lambda _: ARRAYS["boolean rows"](),
    "map_overlap": lambda _: ARRAYS["map_overlap"](),
    "values of a frame": lambda _: ARRAYS["values of a frame"](),
}  # fmt: skip


@pytest.mark.parametrize("function", list(FUNCTIONS))
@pytest.mark.parametrize("array", list(ON_CLUSTER))
def test_every_array_on_a_cluster_is_taken(array: str, function: str, client: Any) -> None:
    X = ON_CLUSTER[array](client)
    FUNCTIONS[function](X, X.compute())
