"""Universal sets and softmax states of positions that are distributed over the processes of a torch group.

For a universal set each rank makes a `levattn.StreamingUniversalSet` of its own rows. The ranks exchange these states
without their keys, so sums of d² numbers. Then they exchange the keys that reach ε among the keys of all ranks, with
their values. Softmax states are exchanged as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import as_matrices, to_float64
from levattn._core.checks import check_bool, check_type, needing
from levattn._core.device import where_arrays_are
from levattn._core.serialize import pack, unpack
from levattn._kernels import BLOCK
from levattn.sets.candidates import SelectedKeys
from levattn.sets.streaming import StreamedSet, StreamingUniversalSet
from levattn.states import SoftmaxState

__all__ = ["Traffic", "softmax_state", "universal_set"]

_VERSION = 1  # of the messages
_CHUNK_BYTES = 64 * 2**20  # of keys, copied into main memory at a time
_WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
# Fields of a shard that must be the same on all ranks.
_ALIKE = {
    "batch": "the batch",
    "d": "d",
    "dtype": "the dtype of K_local",
    "payload": "payload (its dtype and further axes)",
    "epsilon": "epsilon",
    "f": "f",
}

_Fields = dict[str, Any]
_Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank gathered to find a set, including its own bytes.

    Attributes
    ----------
    shapes : int
        Descriptions of the shards of all ranks before the work begins, and the sizes of all messages.
    moments : int
        The states of all ranks without their keys.
    selected : int
        The keys of the set, their row numbers, and their values.
    dense : int
        The bytes of all keys and values, for comparison.

    Examples
    --------
    >>> from levattn.distributed.torch import Traffic
    >>> traffic = Traffic(shapes=1_000, moments=40_000, selected=9_000, dense=5_000_000)
    >>> traffic.saved, traffic.ratio
    (4950000, 100.0)
    """

    shapes: int
    moments: int
    selected: int
    dense: int

    @property
    def gathered(self) -> int:
        """The sum of all gathered bytes."""
        return self.shapes + self.moments + self.selected

    @property
    def saved(self) -> int:
        """The bytes saved, compared with gathering all keys and values; negative for few keys."""
        return self.dense - self.gathered

    @property
    def ratio(self) -> float:
        """The ratio of the bytes of all keys and values to the gathered bytes."""
        return self.dense / self.gathered


@where_arrays_are
def universal_set(
    K_local: Any, /, epsilon: float, *, payload: Any = None, mask: Any = None, group: Any = None, f: Any = 2
) -> tuple[StreamedSet, Traffic]:
    """Universal set of keys that are sharded along the sequence, with its values, on every rank of a process group.

    It is the set of a `levattn.StreamingUniversalSet` of all shards in the order of the ranks. For f(x) = x² it is
    exact, with the indices of ``levattn.universal_set``; for other functions it is a superset. This is a collective
    operation: all ranks of the group call it, and get the same set. The same shards give the same bits in every run;
    other shards agree to rounding.

    Parameters
    ----------
    K_local : array of shape (..., m, d)
        The keys of this rank, any number m ≥ 0 of them, on any device. Kinds and dtypes as in `levattn.universal_set`.
        Batch, d and dtype are the same on all ranks.
    epsilon : float in (0, 1]
        Smallest attention score that counts as large, the same on all ranks.
    payload : array of shape (..., m, ...), optional
        Rows to gather with the keys, such as their values: on all ranks or on none.
    mask : array of bool, shape (..., m), optional
        True for a key that takes part, False for padding. Masked keys still count as rows.
    group : torch.distributed.ProcessGroup, optional
        The group. Its backend needs all_gather and broadcast, such as gloo or NCCL (which uses the current CUDA
        device). Default: all processes.
    f : float, str or AttentionFunction, default 2
        As in `levattn.StreamingUniversalSet`, the same on all ranks.

    Returns
    -------
    sets : StreamedSet
        The set, with row numbers among the rows of all ranks, as numpy arrays. `payload` holds the values of these
        keys. bfloat16 keys and values become float32.
    traffic : Traffic
        The gathered bytes, and the bytes of all keys and values.

    Raises
    ------
    ImportError
        If torch is not installed.
    TypeError, ValueError
        If an argument is wrong or differs between ranks, or if this process is in no group. If one rank fails, such
        as by keys that are not finite, all ranks fail. The failing rank raises its own error, and the others a
        ValueError that quotes it. If a rank ends or never calls, the group's timeout applies.

    Warns
    -----
    RankWarning
        If keys are rank-deficient up to rounding, as from `levattn.StreamingUniversalSet`.

    Notes
    -----
    Time O(m d²) on each rank, and O(P d³) to merge the states of P ranks. For each matrix of the batch, a rank gathers
    about 4 d² bytes from every other rank, and up to 20 d² of ill-conditioned keys. For an even power p,
    D = C(d + p/2 − 1, p/2) takes the place of d; for other functions it is a number of such matrices. Then a rank
    gathers at most rank/ε keys with their values. Keys on a device come to main memory chunk by chunk.

    The states are gathered and merged in the order of the ranks, and not reduced on the way. An all-reduce of moments
    in float64 would lose digits that scores of ill-conditioned keys need, and it would choose its own order of sums.

    References
    ----------
    Kannan, Bhattacharyya, Kacham, Woodruff, LevAttention, ICLR 2025 (arXiv:2410.05462), Theorem 1 (universal sets)
    and its streaming algorithm, whose states this function merges.

    Examples
    --------
    One process is a group as well:

    >>> import torch, torch.distributed as dist
    >>> from levattn.distributed.torch import universal_set
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> K = torch.cat([torch.eye(3), torch.ones(97, 3)])
    >>> sets, traffic = universal_set(K, 0.5, payload=torch.arange(100.0))
    >>> dist.destroy_process_group()
    >>> sets.indices, sets.payload
    (array([0, 1, 2]), array([0., 1., 2.], dtype=float32))
    """
    ranks = _Ranks(group)
    told = ranks.together("Shard", lambda: (_described(K_local, epsilon, payload, mask, f), {}))
    shards = [fields for fields, _ in told]
    _require_alike(shards, _ALIKE)
    shapes = ranks.gathered

    mine: _Arrays = {}

    def without_keys() -> tuple[_Fields, _Arrays]:
        before = sum(shard["n"] for shard in shards[: ranks.rank])
        state = StreamingUniversalSet(epsilon, f=f, row_start=before)
        for K, options in _parts(K_local, payload, mask):
            state.update(K, **options)
        sealed = StreamingUniversalSet(epsilon, f=f, row_start=0).merge(state)  # one sum, and fewer keys
        fields, arrays = sealed.parts()
        mine.update(_of_keys(arrays))
        return _compact(fields, arrays | _chosen(mine, np.zeros(0, np.int64)))

    sums = ranks.together("Sums", without_keys)
    moments = ranks.gathered - shapes
    whole = StreamingUniversalSet(epsilon, f=f, row_start=0)

    def selected() -> tuple[_Fields, _Arrays]:
        for fields, arrays in sums:
            whole.merge(_expanded(fields, arrays))
        matrices, items = _matrices(mine), _holding(whole, mine).items
        heavy = [np.isin(mine["held.indices"][matrices == at], item.indices) for at, item in enumerate(items)]
        return {}, _chosen(mine, np.flatnonzero(np.concatenate([*heavy, np.zeros(0, np.bool_)])))

    sets = _holding(whole, _joined([arrays for _, arrays in ranks.together("Keys", selected)]))
    if _is_bfloat16(payload):
        sets = replace(sets, items=tuple(map(_with_numbers, sets.items)))
    dense = sum(shard["bytes"] for shard in shards)
    return sets, Traffic(shapes, moments, ranks.gathered - shapes - moments, dense)


@where_arrays_are
def softmax_state(state: SoftmaxState, /, *, before: bool = False, group: Any = None) -> SoftmaxState:
    """Softmax state of the positions of all ranks of a process group, or of all ranks before this one.

    Latent attention over the whole sequence reads the state of all ranks. Causal latent attention over the shard of a
    rank continues from the state of the ranks before it (``state=``). This is a collective operation: all ranks of the
    group call it. States are merged in the order of the ranks, so every rank has the same bits.

    Parameters
    ----------
    state : SoftmaxState
        The positions of this rank, of the same batch and sizes on all ranks.
    before : bool, default False
        Whether to merge only the states of ranks with a lower number; the same on all ranks.
    group : torch.distributed.ProcessGroup, optional
        As in `universal_set`.

    Returns
    -------
    SoftmaxState
        The merged state, with numpy arrays; with `before`, the empty state on the first rank.

    Raises
    ------
    ImportError
        If torch is not installed.
    TypeError, ValueError
        If the argument is not a state, or the states do not match; on all ranks alike, as in `universal_set`.

    Notes
    -----
    Time O(P L D) for P ranks. For each item of the batch, a rank gathers L (D + 2) float64 numbers from every other
    rank, whatever the length of the sequence.

    References
    ----------
    Milakov and Gimelshein, arXiv:1805.02867, section 3 (the merge).

    Examples
    --------
    One process is a group as well:

    >>> import numpy as np, torch.distributed as dist
    >>> from levattn.distributed.torch import softmax_state
    >>> from levattn.states import SoftmaxState
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mine = SoftmaxState(2, 3).update(np.zeros((4, 2)), np.ones((4, 3)))
    >>> whole, earlier = softmax_state(mine), softmax_state(mine, before=True)
    >>> dist.destroy_process_group()
    >>> whole.result()[0], earlier.result()[0]
    (array([1., 1., 1.]), array([0., 0., 0.]))
    """
    ranks = _Ranks(group)

    def mine() -> tuple[_Fields, _Arrays]:
        check_type("state", state, SoftmaxState, "SoftmaxState")
        sizes = [state.latents, state.d, list(state.batch)]
        check_bool(before=before)
        return {"sizes": sizes, "before": bool(before)}, {"state": np.frombuffer(state.to_bytes(), np.uint8)}

    told = ranks.together("Softmax", mine)
    _require_alike([fields for fields, _ in told], {"sizes": "(latents, d, batch) of the state", "before": "before"})
    whole = SoftmaxState(state.latents, state.d, state.batch)
    for _, arrays in told[: ranks.rank if before else None]:
        whole.merge(SoftmaxState.from_bytes(arrays["state"].tobytes()))
    return whole


# -- the group ----------------------------------------------------------------------------------------


class _Ranks:
    """The processes of a group, which take every step together: all of them continue, or none."""

    def __init__(self, group: Any) -> None:
        with needing("this needs torch", "torch"):
            import torch
            import torch.distributed as dist
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("there is no process group; call torch.distributed.init_process_group first")
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group; only members of the group may call this")
        self.gathered = 0  # bytes so far
        self._group = group
        backends = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
        self._device = torch.device("cpu" if "cpu:" in backends else backends.partition(":")[0])

    def together(self, kind: str, work: Callable[[], tuple[_Fields, _Arrays]]) -> list[tuple[_Fields, _Arrays]]:
        """Return the results of all ranks, in order; if one rank fails, raise on all of them."""
        failure: Exception | None = None
        try:
            message = pack(kind, _VERSION, *work())
        except Exception as error:  # of any kind, because the others are waiting
            failure = error
            message = pack(kind, _VERSION, {"failure": f"{type(error).__name__}: {error}"}, {})
        answers = [unpack(data, kind, _VERSION) for data in self._gather(message)]
        if failure is not None:
            raise failure
        failed = [
            f"rank {rank}: {fields['failure']}" for rank, (fields, _) in enumerate(answers) if "failure" in fields
        ]
        if failed:
            raise ValueError(f"another rank of the group failed, {'; '.join(failed)}")
        return answers

    def _gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks."""
        import torch
        import torch.distributed as dist

        mine = torch.tensor([len(message)], device=self._device)
        sizes = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(sizes, mine, group=self._group)
        # Broadcasts, because an all-gather needs equal sizes, and the longest message may be much longer than others.
        buffers, waiting = [], []
        for rank, size in enumerate(map(int, sizes)):
            if rank == self.rank:
                buffer = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)
            else:
                buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            source = rank if self._group is None else dist.get_global_rank(self._group, rank)
            waiting.append(dist.broadcast(buffer, source, group=self._group, async_op=True))
            buffers.append(buffer)
        for work in waiting:
            work.wait()
        self.gathered += sum(len(buffer) for buffer in buffers) + mine.element_size() * self.size
        return [buffer.cpu().numpy().tobytes() for buffer in buffers]


# -- descriptions of shards ---------------------------------------------------------------------------


def _described(K: Any, epsilon: Any, payload: Any, mask: Any, f: Any) -> _Fields:
    """Check the arguments of a rank, without reading its keys, and describe them."""
    state = StreamingUniversalSet(epsilon, f=f)
    state.parts()  # raises for functions whose states cannot be sent
    matrices = as_matrices(K, "K_local").masked(mask)
    shape, width = (*matrices.batch, matrices.n), _WIDTHS[matrices.format]
    fields: _Fields = {"epsilon": state.epsilon, "f": repr(state.f), "batch": list(matrices.batch), "d": matrices.d}
    fields |= {
        "dtype": matrices.format,
        "payload": None,
        "n": matrices.n,
        "bytes": math.prod(shape) * matrices.d * width,
    }
    if payload is not None:
        if not hasattr(payload, "shape"):
            raise TypeError(f"payload is of type {type(payload).__name__}; expected an array or a tensor")
        if tuple(payload.shape[: len(shape)]) != shape:
            raise ValueError(
                f"payload has shape {tuple(payload.shape)}; expected {shape} and further axes, one entry for each key"
            )
        fields["payload"] = [str(payload.dtype).removeprefix("torch."), list(payload.shape[len(shape) :])]
        fields["bytes"] += math.prod(payload.shape) * payload.dtype.itemsize
    return fields


def _require_alike(told: list[_Fields], names: dict[str, str]) -> None:
    """Raise, on all ranks alike, if a field differs between ranks; `names` gives the text for each field."""
    for name, what in names.items():
        values = [fields[name] for fields in told]
        if values.count(values[0]) < len(values):
            raise ValueError(f"{what} differs between the ranks of the group: {values}; expected the same on all")


def _parts(K: Any, payload: Any, mask: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the keys in chunks with mask and payload; chunks on a device come into main memory one by one."""
    K, mask = (array if array is None or hasattr(array, "shape") else np.asarray(array) for array in (K, mask))
    n, lead = K.shape[-2], (slice(None),) * (K.ndim - 2)
    row = max(1, math.prod(K.shape[:-2]) * K.shape[-1] * 8)
    size = max(1, _CHUNK_BYTES // row // BLOCK) * BLOCK
    for start in range(0, max(n, 1), size):
        part = slice(start, start + size)
        beside = None if payload is None else _storable(payload[(*lead, part)])
        yield K[..., part, :], {"payload": beside, "mask": None if mask is None else mask[..., part]}


def _is_bfloat16(V: Any) -> bool:
    return V is not None and str(V.dtype).endswith("bfloat16")


def _storable(V: Any) -> Any:
    """Return values as a state holds them, without widening: tensors as numpy arrays, and bfloat16 as words."""
    if hasattr(V, "detach"):
        import torch

        return (V.detach().view(torch.int16) if _is_bfloat16(V) else V).numpy(force=True)
    return V.view(np.int16) if _is_bfloat16(V) else V


def _with_numbers(item: SelectedKeys) -> SelectedKeys:
    """Return keys whose values are float32 numbers again, after words of bfloat16."""
    words = np.asarray(item.payload).view(np.uint16)
    return replace(item, payload=to_float64(words, "bfloat16").astype(np.float32))


# -- states as messages -------------------------------------------------------------------------------


def _of_keys(arrays: _Arrays) -> _Arrays:
    """Return the arrays of the keys that a state holds, one matrix after the other."""
    return {name: array for name, array in arrays.items() if name == "counts" or name.startswith("held.")}


def _matrices(held: _Arrays) -> npt.NDArray[np.int64]:
    """Return the matrix of each key."""
    return np.repeat(np.arange(len(held["counts"])), held["counts"])


def _chosen(held: _Arrays, which: npt.NDArray[np.int64]) -> _Arrays:
    """Return some of the keys, in the same order."""
    counts = np.bincount(_matrices(held)[which], minlength=len(held["counts"])).astype(np.int64)
    return {name: array[which] for name, array in held.items() if name != "counts"} | {"counts": counts}


def _joined(of_ranks: list[_Arrays]) -> _Arrays:
    """Return the keys of all ranks by matrix, and for each matrix in the order of the ranks."""
    order = np.argsort(np.concatenate([_matrices(held) for held in of_ranks]), kind="stable")
    names = of_ranks[0].keys() - {"counts"}
    joined = {name: np.concatenate([held[name] for held in of_ranks])[order] for name in names}
    return joined | {"counts": np.sum([held["counts"] for held in of_ranks], axis=0)}


def _holding(state: StreamingUniversalSet, held: _Arrays) -> StreamedSet:
    """Return the set of a state if it holds these keys, which must be among its rows."""
    fields, arrays = state.parts()
    return StreamingUniversalSet.from_parts(fields, arrays | held).result()


def _compact(fields: _Fields, arrays: _Arrays) -> tuple[_Fields, _Arrays]:
    """Return the parts of a state as few numbers: zeros as shapes, symmetric matrices as triangles."""
    arrays = dict(arrays)
    zeros: dict[str, Any] = {}
    triangles: dict[str, int] = {}
    for name, array in list(arrays.items()):
        d = array.shape[-1] if array.ndim > 1 else 0
        if not array.any():
            zeros[name] = [array.dtype.str, list(array.shape)]
            del arrays[name]
        elif array.shape[-2:] == (d, d) and np.array_equal(array, array.swapaxes(-1, -2)):
            triangles[name] = d
            arrays[name] = array[..., *np.triu_indices(d)]
    return {"state": fields, "zeros": zeros, "triangles": triangles}, arrays


def _expanded(fields: _Fields, arrays: _Arrays) -> StreamingUniversalSet:
    """Return the state that `_compact` split into parts."""
    arrays = arrays | {name: np.zeros(shape, dtype) for name, (dtype, shape) in fields["zeros"].items()}
    for name, d in fields["triangles"].items():
        row, column = np.triu_indices(d)
        square = np.empty((*arrays[name].shape[:-1], d, d), arrays[name].dtype)
        square[..., row, column] = square[..., column, row] = arrays[name]
        arrays[name] = square
    return StreamingUniversalSet.from_parts(fields["state"], arrays)
