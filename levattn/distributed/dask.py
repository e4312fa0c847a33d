"""Sets, scores, samples, query moments and softmax states of dask arrays: one state per chunk, merged in a tree.

The states and the result are the same as in one process. Tasks are pure, so dask may run any of them again. A lost
worker costs the time of its chunks, and changes no result.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from levattn._core.checks import check_bool, check_nonnegative, check_type, needing
from levattn._core.random import as_seed
from levattn._core.threads import num_threads, thread_limit
from levattn.exceptions import NonFiniteError
from levattn.io import KeySource, open_keys
from levattn.linalg.factor import Factor
from levattn.linalg.reading import RowDigest, rows_named
from levattn.linalg.weighted import chunk_times_roots, numbers_of
from levattn.sensitivity.streamed_sample import StreamingRowSample
from levattn.sets.streaming import StreamedSet, StreamingUniversalSet
from levattn.states import Moments, SoftmaxState
from levattn.states.blocks import in_main_memory, readable, rows_in_memory

__all__ = [
    "from_keys",
    "leverage_scores",
    "query_moments",
    "sample_rows",
    "softmax_state",
    "universal_set",
    "universal_set_of_files",
]

_FAN_IN = 8  # states that one task merges
_RANGE = 64  # times d/ε: rows of one task's state, at least

_Path = str | os.PathLike[str]


@overload
def universal_set(K: Any, /, epsilon: float, *, f: Any = 2, weights: Any = None, client: None = None) -> Any: ...


@overload
def universal_set(K: Any, /, epsilon: float, *, f: Any = 2, weights: Any = None, client: Any) -> StreamedSet: ...


def universal_set(K: Any, /, epsilon: float, *, f: Any = 2, weights: Any = None, client: Any = None) -> Any:
    """Universal set of the keys of a dask array: one pass over its chunks, each in its place.

    Each chunk makes a `levattn.StreamingUniversalSet`, and a tree merges neighbors. For f(x) = x² the set is exact,
    with the indices of ``levattn.universal_set(K, epsilon)``; for other functions it is a superset. The
    same chunks give the same bits in every run, on any workers; other chunks agree to rounding.

    Parameters
    ----------
    K : dask.array.Array of shape (..., n, d)
        Keys of a float dtype. Chunks may have any number of rows, even an unknown one; other axes are joined first.
    epsilon, f : float or AttentionFunction
        As in `levattn.StreamingUniversalSet`.
    weights : array or dask.array.Array of float, shape (..., n), optional
        The weight of each key, as in `levattn.universal_set`. The set holds the keys √w k, of float64.
    client : distributed.Client, str or cluster, optional
        The place to compute the set now: a client, the address of a scheduler ("tcp://..."), or a cluster.

    Returns
    -------
    dask.delayed.Delayed or StreamedSet
        With `client`, the `levattn.StreamedSet`; without it, a lazy value that computes the set.

    Raises
    ------
    ImportError
        If dask, or for `client` distributed, is not installed.
    TypeError, ValueError
        If K is not a dask array of keys, or ε or f is invalid.
    NonFiniteError
        When computed, if the keys hold NaN or infinity. The error names the chunk and the rows in it.

    Warns
    -----
    RankWarning
        When computed, if keys are rank-deficient up to rounding, as from `levattn.StreamingUniversalSet`.

    Notes
    -----
    Time O(n d²), divided by the number of workers. Memory of a worker: its chunks, and O(d²/ε) for each state. The
    client gets the O(d/ε) keys of the set and their factor, but nothing of size n. Chunks should have many more than
    d/ε rows, because a state holds about all of its first d/ε rows. In a worker of dask.distributed, kernels use as
    many threads as the worker has; elsewhere ``LEVATTN_NUM_THREADS`` limits them.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), Theorem 1 (universal sets)
    and its streaming algorithm, whose states this function merges.

    Examples
    --------
    >>> import numpy as np, dask.array as da
    >>> from levattn.distributed.dask import universal_set
    >>> K = np.random.default_rng(0).standard_normal((5000, 8))
    >>> K[[10, 4000], 7] = 300, -400
    >>> lazy = universal_set(da.from_array(K, chunks=(700, 8)), 0.2)
    >>> lazy.compute(scheduler="threads").indices
    array([  10, 4000])
    """
    _require_dask()
    K = _in_row_chunks(K)
    new = partial(StreamingUniversalSet, epsilon, f=f)
    new().update(_no_rows(K))  # raises for wrong arguments
    if weights is None:
        states = _by_chunk(_chunk_state, K, new=new)
    else:
        states = _by_chunk(_weighted_state, K, _weights_for(K, weights), new=new)
    lazy = _in_tree(states, new, StreamingUniversalSet.result)
    return _computed(lazy, client)


def leverage_scores(K: Any, /, *, weights: Any = None) -> Any:
    """Leverage scores of the keys of a dask array, in its own chunks.

    They agree with `levattn.leverage_scores`, up to rounding.

    Parameters
    ----------
    K : dask.array.Array of shape (..., n, d)
        Keys, in chunks as in `universal_set`.
    weights : array or dask.array.Array of float, shape (..., n), optional
        The weight of each key, as in `levattn.leverage_scores`.

    Returns
    -------
    dask.array.Array of shape (..., n)
        Lazy scores in the row chunks of K: float64 for float64 keys and with weights, else float32.

    Raises
    ------
    ImportError
        If dask is not installed.
    TypeError, ValueError
        If K is not a dask array of keys.
    ValueError
        When computed, if a chunk is not the same keys in both passes. The error names it.
    NonFiniteError
        When computed, if the keys hold NaN or infinity. The error names the chunk and the rows in it.

    Notes
    -----
    Time O(n d²) and two passes: the first sums second moments, and the second uses their factor. Chunks of K are
    *computed twice* rather than held in between, so that memory is bounded, and compared by a digest of all their
    rows. If K fits in memory, call ``K.persist()`` first.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), section 3 for f(x) = x².

    Examples
    --------
    >>> import dask.array as da
    >>> from levattn.distributed.dask import leverage_scores
    >>> K = da.concatenate([da.eye(3, chunks=2), da.ones((1, 3), chunks=2)])
    >>> leverage_scores(K).compute(scheduler="threads").round(6)
    array([0.75, 0.75, 0.75, 0.75])
    """
    _require_dask()
    K = _in_row_chunks(K)
    if weights is not None:
        like = {"dtype": np.float64, "chunks": K.chunks, "meta": _no_rows(K).astype(np.float64)}
        K = K.map_blocks(_times_roots, _weights_for(K, weights), **like)
    no_rows = _no_rows(K)
    matrices, _ = in_main_memory(no_rows)  # raises for a wrong K
    new = partial(_Reading, no_rows, rounded=weights is not None)
    factor = _in_tree(_by_chunk(_chunk_state, K, new=new), new, _Reading.factor)
    dtype = np.dtype("float64" if matrices.format == "float64" else "float32")
    return _again(K, factor).map_blocks(
        _scores, factor, dtype=dtype, drop_axis=K.ndim - 1, meta=np.empty((0,) * (K.ndim - 1), dtype)
    )


def sample_rows(
    K: Any,
    /,
    size: int | None = None,
    *,
    distortion: float | None = None,
    failure: float = 0.01,
    ridge: float = 0.0,
    rng: int | np.random.Generator | None = None,
    client: Any = None,
) -> Any:
    """Sample of the rows of a dask array by their leverage scores: one pass over its chunks, each in its place.

    Each chunk makes a `levattn.StreamingRowSample`, and a tree merges neighbors. The number of a row decides about it,
    so any chunks give the sample of one state of all rows, up to rounding.

    Parameters
    ----------
    K : dask.array.Array of shape (n, d)
        Rows, in chunks of known sizes.
    size, distortion, failure, ridge, rng : int, float, float, float, int or numpy.random.Generator
        As in `levattn.StreamingRowSample`.
    client : distributed.Client, str or cluster, optional
        As in `universal_set`.

    Returns
    -------
    dask.delayed.Delayed or RowSample
        With `client`, the `levattn.RowSample`; without it, a lazy value that computes the sample.

    Raises
    ------
    ImportError
        If dask, or for `client` distributed, is not installed.
    TypeError, ValueError
        If K is not a dask array of rows in chunks of known sizes, or an option is invalid.
    NonFiniteError
        When computed, if the rows hold NaN or infinity. The error names the chunk and the rows in it.

    Notes
    -----
    Time O(n d²), divided by the number of workers. Memory of a worker: its chunks, and a state for each. A state holds
    about all of its first c r rows, c and r as in `levattn.StreamingRowSample`. So chunks should have many more.

    References
    ----------
    Tropp, "User-friendly tail bounds for sums of random matrices", 2012 (arXiv:1004.4389), Theorem 1.1.

    Examples
    --------
    >>> import numpy as np, dask.array as da, levattn
    >>> from levattn.distributed.dask import sample_rows
    >>> K = np.random.default_rng(0).standard_normal((5000, 4))
    >>> sample = sample_rows(da.from_array(K, chunks=(700, 4)), 200, rng=1).compute(scheduler="threads")
    >>> bool((sample.indices == levattn.StreamingRowSample(200, rng=1).update(K).result().indices).all())
    True
    """
    _require_dask()
    K = _in_row_chunks(K)
    if K.ndim > 2:
        raise ValueError(f"K has shape {K.shape}; expected one matrix (n, d)")
    if any(map(math.isnan, K.chunks[-2])):
        raise ValueError(
            "K has chunks of unknown size; expected known ones, because the numbers of rows decide about them. Call "
            "K.compute_chunk_sizes() first"
        )
    options: dict[str, Any] = {"distortion": distortion, "failure": failure, "ridge": ridge, "rng": as_seed(rng)}
    new = partial(StreamingRowSample, size, **options)
    new().update(_no_rows(K))  # raises for wrong arguments
    return _computed(_in_tree(_by_chunk(_sampled_state, K, new=new), new, StreamingRowSample.result), client)


def query_moments(Q: Any, /, *, mean: bool = False, client: Any = None) -> Any:
    """Second moments of the queries of a dask array: one pass over the chunks, each in its place.

    They agree with one `levattn.states.Moments` of all queries, to rounding. `levattn.expected_scores` takes them.

    Parameters
    ----------
    Q : dask.array.Array of shape (..., m, d)
        Queries, in chunks as in `universal_set`.
    mean : bool, default False
        Whether each query gets a last column of ones, which adds the mean. The moments then have d + 1 columns.
    client : distributed.Client, str or cluster, optional
        As in `universal_set`.

    Returns
    -------
    dask.delayed.Delayed or Moments
        The state as a lazy value; with `client`, the state itself.

    Raises
    ------
    ImportError
        If dask, or for `client` distributed, is not installed.
    TypeError, ValueError
        If Q is not a dask array of queries.
    NonFiniteError
        When computed, if queries hold NaN or infinity. The error names the chunk and the rows in it.

    Notes
    -----
    Time O(m d²), divided by the number of workers. A merge adds O(d²) numbers for each item of the batch.

    Examples
    --------
    >>> import numpy as np, dask.array as da, levattn
    >>> from levattn.distributed.dask import query_moments
    >>> Q, K = np.random.default_rng(0).standard_normal((2, 1000, 4))
    >>> state = query_moments(da.from_array(Q, chunks=(300, 4))).compute(scheduler="threads")
    >>> np.allclose(levattn.expected_scores(K, state), levattn.expected_scores(K, Q))
    True
    """
    _require_dask()
    check_bool(mean=mean)
    Q = _in_row_chunks(Q, "Q")
    if mean:
        Q = Q.map_blocks(_with_ones, dtype=Q.dtype, chunks=(*Q.chunks[:-1], (Q.shape[-1] + 1,)))
    new = partial(_moments_of, _no_rows(Q))
    new()  # raises for a wrong Q
    return _computed(_in_tree(_by_chunk(_chunk_state, Q, new=new), new, Moments.copy), client)


def softmax_state(logits: Any, V: Any, /, *, client: Any = None) -> Any:
    """Softmax state of values over all positions of dask arrays: one pass over the chunks, each in its place.

    It agrees with one `levattn.states.SoftmaxState` to rounding. The same chunks give the same bits in every run.

    Parameters
    ----------
    logits : dask.array.Array of shape (..., T, L)
        The logits of positions and latents, in chunks of any size along the positions.
    V : dask.array.Array of shape (..., T, D)
        Values. Their chunks are made equal to the chunks of the logits, unless both have equal chunks of unknown size.
    client : distributed.Client, str or cluster, optional
        As in `universal_set`.

    Returns
    -------
    dask.delayed.Delayed or SoftmaxState
        The state as a lazy value; with `client`, the state itself.

    Raises
    ------
    ImportError
        If dask, or for `client` distributed, is not installed.
    TypeError, ValueError
        If an argument is not a dask array, or the shapes do not match.

    Notes
    -----
    Time O(TLD), divided by the number of workers. A merge takes L (D + 2) numbers for each item of the batch.

    References
    ----------
    Milakov and Gimelshein, arXiv:1805.02867, section 3 (the merge).

    Examples
    --------
    >>> import numpy as np, dask.array as da
    >>> from levattn.distributed.dask import softmax_state
    >>> logits, V = np.random.default_rng(0).standard_normal((2, 1000, 4))
    >>> lazy = softmax_state(da.from_array(logits, chunks=(300, 4)), da.from_array(V, chunks=(500, 4)))
    >>> A = np.exp(logits) / np.exp(logits).sum(axis=0)
    >>> np.allclose(lazy.compute(scheduler="threads").result(), A.T @ V)
    True
    """
    _require_dask()
    logits, V = _in_row_chunks(logits, "logits"), _in_row_chunks(V, "V")
    rows, known = logits.chunks[-2], not any(map(math.isnan, (*logits.chunks[-2], *V.chunks[-2])))
    if known and logits.shape[-2] == V.shape[-2]:
        V = V.rechunk({V.ndim - 2: rows})
    if V.numblocks != logits.numblocks or (known and V.chunks[-2] != rows):
        raise ValueError(
            f"V has chunks {V.chunks} and logits have {logits.chunks}; expected as many positions, and equal batches"
        )
    new = partial(SoftmaxState, logits.shape[-1], V.shape[-1], tuple(logits.shape[:-2]))
    new().update(_no_rows(logits), _no_rows(V))  # raises for wrong arguments
    lazy = _in_tree(_by_chunk(_chunk_state, logits, V, new=new), new, SoftmaxState.copy)
    return _computed(lazy, client)


def from_keys(source: KeySource | _Path | Sequence[_Path], /) -> Any:
    """Keys in files as a dask array; each worker reads the chunks that it needs by the same paths.

    Parameters
    ----------
    source : KeySource, path-like, or sequence of path-like
        A source from `levattn.open_keys`, which has options for the tensor and the chunks; or paths for it.

    Returns
    -------
    dask.array.Array of shape (..., n, d)
        Lazy keys in chunks of ``source.chunk_rows`` rows.

    Raises
    ------
    ImportError
        If dask is not installed.
    FileNotFoundError, KeyFileError
        As in `levattn.open_keys`; while computing also if the size or the time of a file changed since it was opened.
    TypeError, ValueError
        As in `levattn.open_keys`, if `source` is neither a source nor paths.

    Notes
    -----
    This call reads headers only. Memory of a worker: a chunk for each of its threads, 32 MiB by default.

    Examples
    --------
    >>> import pathlib, tempfile, numpy as np, levattn
    >>> from levattn.distributed.dask import from_keys, universal_set
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(pathlib.Path(folder, "shard-1.npy"), np.eye(3))
    ...     np.save(pathlib.Path(folder, "shard-2.npy"), np.ones((97, 3)))
    ...     K = from_keys(levattn.open_keys(folder, chunk_rows=40))
    ...     K.chunks[0], universal_set(K, 0.5).compute(scheduler="threads").indices
    ((40, 40, 20), array([0, 1, 2]))
    """
    _require_dask()
    source = _as_source(source)
    return _over(source, source.chunk_rows, _read, source.dtype)


def universal_set_of_files(
    source: KeySource | _Path | Sequence[_Path],
    /,
    epsilon: float,
    *,
    f: Any = 2,
    client: Any = None,
) -> StreamedSet:
    """Universal set of keys in files, computed on the workers of a dask scheduler.

    It is the set of `universal_set`, with its guarantee. Each task reads a long range of rows, chunk by chunk, into
    one state. ``levattn universal-set PATH... --scheduler ADDRESS`` runs this.

    Parameters
    ----------
    source : KeySource, path-like, or sequence of path-like
        As in `from_keys`, on a file system that all workers share. A task holds one chunk at a time.
    epsilon : float in (0, 1]
        As in `universal_set`.
    f : float, str or AttentionFunction, default 2
        As in `universal_set`.
    client : distributed.Client, str or cluster, optional
        As in `universal_set`. By default, dask chooses the scheduler.

    Returns
    -------
    StreamedSet
        The set, computed.

    Raises
    ------
    ImportError
        If dask, or for `client` distributed, is not installed.
    FileNotFoundError, KeyFileError
        As in `levattn.open_keys`.
    TypeError, ValueError
        If ε or f is invalid.
    NonFiniteError
        If the keys hold NaN or infinity. The error names the start of the range and the rows in it.
    OSError
        If no scheduler answers at that address.

    Warns
    -----
    RankWarning
        If keys are rank-deficient up to rounding, as from `levattn.StreamingUniversalSet`.

    Notes
    -----
    One pass over the files; cost as in `universal_set`. Neither the ranges nor the bits of the set depend on the
    scheduler.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), Theorem 1 (universal sets).

    Examples
    --------
    >>> import pathlib, tempfile, numpy as np
    >>> from levattn.distributed.dask import universal_set_of_files
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(pathlib.Path(folder, "shard-1.npy"), np.eye(3))
    ...     np.save(pathlib.Path(folder, "shard-2.npy"), np.ones((97, 3)))
    ...     universal_set_of_files(folder, 0.5).indices
    array([0, 1, 2])
    """
    _require_dask()
    source = _as_source(source)
    new = partial(StreamingUniversalSet, epsilon, f=f)
    new().update(_no_rows(source))  # raises for wrong arguments
    rows = math.ceil(min(_RANGE * source.d / epsilon, 2.0**62) / source.chunk_rows) * source.chunk_rows
    lazy = _in_tree(_over(source, rows, _range_state, object, new=new), new, StreamingUniversalSet.result)
    found: StreamedSet = lazy.compute() if client is None else _computed(lazy, client)
    return found


# -- on the client: the graph -----------------------------------------------------------------------


def _require_dask() -> None:
    with needing("this needs dask", "dask"):
        import dask.array  # noqa: F401 (missing if dask was installed without extras)


def _computed(lazy: Any, client: Any) -> Any:
    """Compute a value on a client, or on a new client for a scheduler; without either, return the lazy value."""
    if client is None:
        return lazy
    with needing("this needs distributed", "dask"):
        from distributed import Client
    if isinstance(client, Client):
        return client.compute(lazy, sync=True)
    with Client(client, set_as_default=False) as own:
        return own.compute(lazy, sync=True)


def _as_source(source: KeySource | _Path | Sequence[_Path]) -> KeySource:
    return source if isinstance(source, KeySource) else open_keys(source)


def _in_row_chunks(K: Any, name: str = "K") -> Any:
    """Return an array with chunks along the rows only."""
    import dask.array as da

    remedy = "Make one by dask.array.from_array, or of files by levattn.distributed.dask.from_keys"
    check_type(name, K, da.Array, f"a dask array. {remedy}")
    if K.ndim < 2:
        raise ValueError(f"{name} has shape {K.shape}; expected (..., n, d), rows last but one")
    others = [axis for axis in range(K.ndim) if axis != K.ndim - 2]
    if any(math.isnan(K.shape[axis]) for axis in others):
        raise ValueError(
            f"{name} has shape {K.shape}; expected known sizes, except for the number of rows. Call "
            f"{name}.compute_chunk_sizes() first"
        )
    split = {axis: -1 for axis in others if K.numblocks[axis] > 1}
    return K.rechunk(split) if split else K


def _for_each_row(K: Any, weight: Any) -> Any:
    """Return the weight of each row of a chunk."""
    return np.broadcast_to(weight, K.shape[:-1])


def _weights_for(K: Any, weights: Any) -> Any:
    """Return weights (..., n, 1) in the chunks of the rows of K."""
    import dask.array as da

    w = weights
    if not isinstance(w, da.Array):
        numbers = numbers_of(w)
        check_nonnegative("weights", numbers)
        w = da.from_array(numbers)
    known = not any(map(math.isnan, (*w.shape, *K.shape)))
    if known:
        try:
            w = da.broadcast_to(w, K.shape[:-1])
        except ValueError:
            raise ValueError(f"weights has shape {w.shape}; expected one that broadcasts to {K.shape[:-1]}") from None
        w = w.rechunk(K.chunks[:-1])
    elif w.ndim == 0:
        w = da.map_blocks(_for_each_row, K, w, drop_axis=K.ndim - 1, dtype=w.dtype)
    elif w.ndim != K.ndim - 1 or w.numblocks != K.numblocks[:-1]:
        raise ValueError(
            f"weights has chunks {w.chunks}, and K has {K.chunks}; expected the same chunks of rows, "
            "because their number is unknown. Call K.compute_chunk_sizes() first"
        )
    return w[..., None]


def _no_rows(K: Any) -> npt.NDArray[Any]:
    """Return an array like the chunks, without rows."""
    return np.empty((*K.shape[:-2], 0, K.shape[-1]), K.dtype)


def _over(source: KeySource, rows: int, task: Callable[..., Any], dtype: Any, **options: Any) -> Any:
    """Return a dask array with one block for each run of `rows` rows of a source."""
    import dask.array as da
    from dask import delayed

    *batch, n, d = source.shape
    sizes = [min(rows, n - start) for start in range(0, n, rows)] or [0]
    return da.map_blocks(
        task,
        delayed(source, traverse=False),  # one node of the graph, not a copy in each task
        chunks=(*((size,) for size in batch), tuple(sizes), (d,)),
        dtype=dtype,
        meta=np.empty((0,) * len(source.shape), dtype),
        **options,
    )


def _by_chunk(task: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """Return a dask array whose blocks are states, one for each chunk of rows of arrays with equal chunks."""
    import dask.array as da

    meta = np.empty((0,) * arrays[0].ndim, object)
    return da.map_blocks(task, *arrays, dtype=object, meta=meta, enforce_ndim=False, **options)


def _in_tree(states: Any, new: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
    """Return a lazy read-out of all states; neighbors are merged in order, so that rows keep their order."""
    import dask.array as da

    axes = tuple(range(states.ndim))
    whole = da.reduction(
        states,
        chunk=_unchanged,
        combine=partial(_merge, new=new),
        aggregate=partial(_merge, new=new, read=read),
        axis=axes,
        concatenate=False,
        split_every=dict.fromkeys(axes, _FAN_IN),
        dtype=object,
        meta=np.empty((), object),
    )
    return whole.to_delayed().item()


def _again(K: Any, after: Any) -> Any:
    """Return K from new tasks that wait for `after`, a lazy value of K; dask would hold all of K until then.

    Data in the graph, and chunks that a cluster holds, stay as they are.
    """
    import dask.array as da
    from dask.base import clone_key
    from dask.core import flatten
    from dask.graph_manipulation import bind
    from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

    try:
        from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef, convert_legacy_task
    except ImportError:
        return bind(K, after, seed=after.key)
    if not hasattr(Task, "substitute"):  # before 2024.12, where arrays have none of these tasks
        return bind(K, after, seed=after.key)
    new_name = cache(partial(clone_key, seed=after.key))

    def renamed(key: Any) -> Any:
        if isinstance(key, tuple) and isinstance(key[0], str):
            return new_name(key[0]), *key[1:]
        return new_name(key) if isinstance(key, str) else (new_name("task"), key)

    def is_made(node: Any) -> bool:
        if isinstance(node, Alias):  # one of itself, or of no task, is the future of a chunk
            return node.target != node.key and node.target in every
        return isinstance(node, GraphNode) and not isinstance(node, DataNode)

    every = set(K.dask)
    nodes = {
        name: {key: convert_legacy_task(key, task, every) for key, task in layer.items()}
        for name, layer in K.dask.layers.items()
    }
    new = {key: renamed(key) for layer in nodes.values() for key, node in layer.items() if is_made(node)}
    name, waits = new_name("again"), TaskRef(after.key)
    layers, dependencies = {**K.dask.layers, **after.dask.layers}, {**K.dask.dependencies, **after.dask.dependencies}
    for old, layer in nodes.items():
        tasks = {new[key]: node.substitute(new, key=new[key]) for key, node in layer.items() if key in new}
        for key, node in layer.items():
            if key in new and isinstance(node, Task) and not node.dependencies & new.keys():
                tasks[new[key]] = Task(new[key], _first, tasks[new[key]], waits)
        layers[renamed(old)] = MaterializedLayer(tasks, K.dask.layers[old].annotations)
        dependencies[renamed(old)] = {old, *after.__dask_layers__(), *map(renamed, K.dask.dependencies[old])}
    chunks = {(name, *key[1:]): Alias((name, *key[1:]), new.get(key, key)) for key in flatten(K.__dask_keys__())}
    layers[name], dependencies[name] = MaterializedLayer(chunks), {K.name, renamed(K.name)}
    return da.Array(HighLevelGraph(layers, dependencies), name, K.chunks, meta=K)


# -- on the workers: the tasks ------------------------------------------------------------------------


def _times_roots(K: Any, weights: Any) -> Any:
    """Return a chunk of keys times the roots of its weights (..., m, 1)."""
    matrices, rows = in_main_memory(K)
    made, *_ = chunk_times_roots(matrices, rows, weights[..., 0])
    return made.data.reshape(K.shape)


@contextmanager
def _threads_of_worker() -> Iterator[None]:
    """Limit the kernels to the threads of a worker of dask.distributed."""
    threads = num_threads()
    if "distributed" in sys.modules:  # a worker has loaded it
        from distributed import get_worker

        with suppress(ValueError):  # outside a worker
            threads = min(threads, get_worker().state.nthreads)
    with thread_limit(threads):
        yield


@contextmanager
def _named(part: str) -> Iterator[None]:
    """Add to an error the part of the keys in which its rows are counted."""
    try:
        with rows_named("this part"):
            yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{part}: {error}") from error


def _first(value: Any, _: Any) -> Any:
    return value


def _unchanged(state: Any, axis: Any, keepdims: Any) -> Any:  # noqa: ARG001 (dask passes them)
    return state


def _merge(states: Any, new: Callable[[], Any], read: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Merge states into a new one; the given states stay unchanged, because dask may need them again.

    Dask passes nested lists of states, with one level for each axis of the keys.
    """
    while isinstance(states[0], list):
        states = [state for part in states for state in part]
    with _threads_of_worker():
        merged = new()
        for state in states:
            merged.merge(state)
        return merged if read is None else read(merged)


def _chunk_state(*arrays: Any, new: Callable[[], Any], block_id: Any = None, **options: Any) -> Any:
    with _threads_of_worker(), _named(f"chunk {block_id[-2]} of the rows"):
        return new().update(*arrays, **options)


def _weighted_state(K: Any, weights: Any, new: Callable[[], Any], block_id: Any = None) -> Any:
    return _chunk_state(K, new=new, block_id=block_id, weights=weights[..., 0])


def _sampled_state(K: Any, new: Callable[..., Any], block_id: Any = None, block_info: Any = None) -> Any:
    start = block_info[0]["array-location"][-2][0]
    return _chunk_state(K, new=partial(new, row_start=start), block_id=block_id)


def _moments_of(no_rows: npt.NDArray[Any]) -> Moments:
    """Return a state that knows the dtype of the keys."""
    return Moments(no_rows.shape[-1], no_rows.shape[:-2]).update(no_rows)


def _with_ones(Q: Any) -> Any:
    """Return rows with a last column of ones."""
    return np.concatenate([Q, np.ones((*Q.shape[:-1], 1), Q.dtype)], axis=-1)


class _Reading:
    """The moments of chunks, and a digest of the rows of each."""

    def __init__(self, no_rows: npt.NDArray[Any], rounded: bool) -> None:
        self.moments, self._rounded = _moments_of(no_rows), rounded
        self.digests: list[RowDigest] = []

    def update(self, K: Any) -> _Reading:
        """Add a chunk."""
        digest, (matrices, rows) = RowDigest(), readable(K)
        rows = digest.watched(rows)
        self.moments.add(matrices, rows, rounded=self._rounded)
        digest.add(rows_in_memory(rows))
        self.digests.append(digest)
        return self

    def merge(self, other: _Reading) -> None:
        """Add the chunks of another, which follow."""
        self.moments.merge(other.moments)
        self.digests += other.digests

    def factor(self) -> tuple[Factor, list[RowDigest]]:
        """Return the factor of all rows, and the digests."""
        return self.moments.factor(), self.digests


def _scores(K: Any, known: tuple[Factor, list[RowDigest]], block_id: Any = None) -> Any:
    factor, digests = known
    with _threads_of_worker():
        before, now, (matrices, rows) = digests[block_id[-1]], RowDigest(), in_main_memory(K)
        rows = now.watched(rows)
        scores, _ = factor.on(rows).scores(numerical=True)
        now.add(rows)
        if now.rows != before.rows or now.difference(before, whole=True) is not None:
            raise ValueError(
                f"chunk {block_id[-1]} of the rows of K held other keys when it was computed again; expected the same "
                "keys each time. Hold them by K = K.persist(), or make them with a seed"
            )
        return matrices.wrap(scores)


def _read(source: KeySource, block_info: Any = None) -> npt.NDArray[Any]:
    return source.read(*_range(block_info))


def _range_state(source: KeySource, new: Callable[[], Any], block_info: Any = None) -> Any:
    start, stop = _range(block_info)
    state = new().update(_no_rows(source))
    with _threads_of_worker(), _named(f"rows from {start} on"):
        for chunk in source.between(start, stop):
            state.update(chunk)
    return state


def _range(block_info: Any) -> tuple[int, int]:
    start, stop = block_info[None]["array-location"][-2]
    return int(start), int(stop)
