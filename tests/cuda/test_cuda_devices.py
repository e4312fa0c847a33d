"""Arrays on a CUDA device that is not the current one, and tensors of torch on its stream and in its memory.

Inside: tensors and devices are planted that the machine lacks.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from test_cuda_library import EVERYTHING, keys

import levattn
from emulator import DeviceError, device, places
from levattn._core import arrays
from levattn._core.device import where_arrays_are
from levattn._kernels import BLOCK, LatentArguments, TokenArguments
from levattn._kernels.cuda_source import with_steps
from levattn._kernels.gram import cuda as gram_cuda
from levattn._kernels.rows import Rows
from levattn._kernels.rows.cuda import key_arguments
from levattn.attention import Selection, TokenForm, causal_pruned_attention, latte, pruned_attention, tssa
from levattn.sketch import CountSketch, Sketch, SketchedRows
from levattn.states import Moments, SoftmaxState
from strategies import as_float64

pytestmark = pytest.mark.skipif(not device.AVAILABLE, reason="there is neither a CUDA device nor g++ to emulate one")
needs_two = pytest.mark.skipif(device.DEVICES == 1, reason="there is one CUDA device")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not device.DEVICES:
        device.library_on_device(monkeypatch)
    import cupy

    return cupy


def state_of(K: Any, _Q: Any) -> Any:
    merged = SoftmaxState(8, 8).update(K[:700], K[:700]).merge(SoftmaxState(8, 8).update(K[700:], K[700:]))
    return SoftmaxState.from_bytes(merged.to_bytes()).result()


def sketch_of(K: Any, _Q: Any) -> Any:
    S = Sketch(CountSketch(64))
    return SketchedRows(S, 8).update(K[:700]).merge(SketchedRows(S, 8).update(K[700:], 700)).result()


MORE: dict[str, Callable[..., Any]] = {
    "a set's figures": lambda K, _: np.concatenate([(u := levattn.universal_set(K, 0.05)).indices, u.sizes[None]]),
    "softmax state": state_of,
    "diagonal": lambda K, _: Moments(8, diagonal=True).update(K[:700]).update(K[700:]).result(),
    "moments": lambda K, _: Moments(8).update(K).result(),
    "sketch": sketch_of,
    "sample": lambda K, _: levattn.StreamingRowSample(100).update(K).result().weights,
    "stream": lambda K, _: levattn.StreamingUniversalSet(0.05).update(K).result().member_scores,
    "latte": lambda K, _: latte(K[None], K[None], K[None]),
    "tssa": lambda K, _: tssa(K[None]),
    "output": lambda K, Q: levattn.heavy_attention(Q, K, 0.2).apply(K)[0],
}
CALLS = {name: call for name, call in {**EVERYTHING, **MORE}.items() if name != "expected scores, softmax"}  # divides


@needs_two
@pytest.mark.parametrize("name", CALLS)
def test_a_call_works_where_its_arrays_are(cupy: Any, name: str) -> None:
    given = keys(1500), keys(40, seed=1)
    here = CALLS[name](*map(cupy.asarray, given))
    with cupy.cuda.Device(1):
        there = tuple(map(cupy.asarray, given))
    found = CALLS[name](*there)
    assert cupy.cuda.runtime.getDevice() == 0
    if hasattr(found, "device") and not isinstance(found, np.ndarray):
        assert found.device == there[0].device
        with found.device:
            found = found.get()
    assert np.array_equal(as_float64(found), as_float64(here), equal_nan=True)


@needs_two
def test_arrays_on_two_devices_are_named(cupy: Any) -> None:
    K = cupy.asarray(keys(100))
    with cupy.cuda.Device(1):
        mask = cupy.asarray(np.ones(100, np.bool_))
    with pytest.raises(TypeError, match=r"K is on CUDA device 0 and mask on CUDA device 1; .*cupy.asarray\(mask\)"):
        levattn.leverage_scores(K, mask=mask)
    state = SoftmaxState(8, 8).update(K, K)
    with cupy.cuda.Device(1):
        other = cupy.asarray(keys(100))
    with pytest.raises(TypeError, match="this SoftmaxState is on CUDA device 0 and logits on CUDA device 1"):
        state.update(other, other)
    with pytest.raises(TypeError, match=r"q_logits is on CUDA device 0 and .* on CUDA device 1"):
        latte(K[None], other[None], other[None])


def test_a_step_of_tensors_has_the_bits_of_a_step_of_arrays(tensors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous tensors take a path with fewer checks; it has the same stream, device and bits."""
    import cupy
    import torch

    from levattn._kernels import tensors as read
    from levattn._kernels.latent import torch as kernels

    there, streams, _ = tensors
    monkeypatch.setattr(read, "_PLAIN", (there.CudaTensor,))
    streams.current[1] = 7
    numbers = [np.random.default_rng(size).standard_normal((2, 3, 5, size)).astype(np.float32) for size in (6, 7)]
    first, rest = ([X[..., part, :].copy() for X in numbers] for part in (slice(2), slice(2, 5)))
    with cupy.cuda.Device(1):
        (Q, V), (q, v) = (map(cupy.asarray, part) for part in (first, rest))
        _, before = latte(Q, Q, V, return_state=True)
        expected, after = latte(q, q, v, state=before, return_state=True)
    usual: list[Any] = []
    follows = kernels.follows_definition
    monkeypatch.setattr(kernels, "follows_definition", lambda given: usual.append(given) or follows(given))
    q, v = (there.CudaTensor(torch.from_numpy(X), 1) for X in rest)
    apart = there.CudaTensor(torch.from_numpy(np.asfortranarray(rest[1])), 1)
    for given, direct in ((v, True), (apart, False)):
        usual.clear()
        places.launches.clear()
        found, state = latte(q, q, given, state=before, return_state=True)
        assert (not usual) == direct
        assert isinstance(found, there.CudaTensor)
        assert found.device == torch.device("cuda", 1)
        assert places.launches == [(1, 7)]
        pairs = [(found.inner.numpy(), expected), *((getattr(state, x).held, getattr(after, x)) for x in "msS")]
        assert all(np.array_equal(one, other.held) for one, other in pairs)


@pytest.mark.parametrize("transform", ["grad", "vmap", "functionalize"])
def test_a_step_within_torch_func_takes_the_usual_path(
    tensors: Any, monkeypatch: pytest.MonkeyPatch, transform: str
) -> None:
    """Results are wrapped there, also those of plain tensors, and have no memory to read."""
    import torch

    from levattn._kernels import tensors as read
    from levattn._kernels.latent import torch as kernels

    there, _, _ = tensors
    monkeypatch.setattr(read, "_PLAIN", (there.CudaTensor,))
    Q, V = (there.CudaTensor(torch.ones(2, 3, 1, size), 0) for size in (6, 7))
    _, state = latte(Q, Q, V, return_state=True)
    monkeypatch.setattr(kernels, "follows_definition", lambda _: pytest.fail("is asked"))

    def of_plain(x: Any) -> Any:
        latte(Q, Q, V, state=state, return_state=True)
        return x.sum()

    with pytest.raises(pytest.fail.Exception, match="is asked"):
        getattr(torch.func, transform)(of_plain)(torch.ones(3))


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_calls_on_plain_tensors_are_the_same_within_torch_func(tensors: Any, transform: str) -> None:
    """A loss may choose keys that it does not differentiate."""
    import torch

    there, _, _ = tensors
    K = there.CudaTensor(torch.from_numpy(keys(300)), 1)
    calls = (levattn.leverage_scores, lambda K: levattn.universal_set(K, 0.1).mask)
    found: list[Any] = []

    def of_plain(x: Any) -> Any:
        found.extend(arrays.without_wrappers(call(K)).inner for call in calls)
        return x.sum()

    getattr(torch.func, transform)(of_plain)(torch.ones(3))
    assert all(torch.equal(one, call(K).inner) for one, call in zip(found, calls, strict=True))


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
def test_plain_tokens_have_the_bits_of_others(tensors: Any, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Checks of plain tensors are remembered by their shape and format."""
    import torch

    from levattn._kernels import tensors as read

    there, streams, _ = tensors
    streams.current[1] = 7
    for d in (8, 6):  # of which kernels read 8 numbers of 16 bits as they are
        X = np.random.default_rng(d).standard_normal((2, 20, 3, d)).astype(kind)
        W = there.CudaTensor(torch.from_numpy(X), 1).transpose(1, 2)
        for options in ({}, {"causal": False, "form": "norm"}, {"form": TokenForm(decay=0.9)}):
            expected = tssa(W, 2, **options)
            with monkeypatch.context() as patch:
                patch.setattr(read, "_PLAIN", (there.CudaTensor,))
                first, again = tssa(W, 2, **options), tssa(W, 2, **options)
                Y, state = tssa(W, 2.0, **options | {"causal": True}, return_state=True)
                tssa(W, 2, **options | {"causal": True}, state=state)
            for found in (first, again):
                assert (found.dtype, found.shape, found.device) == (W.dtype, W.shape, torch.device("cuda", 1))
                assert torch.equal(found.inner, expected.inner)
            assert torch.equal(Y.inner, first.inner) or not options.get("causal", True)
    assert set(places.launches) == {(1, 7)}


TENSOR_CALLS: dict[str, Callable[..., Any]] = {
    "scores": levattn.leverage_scores,
    "mask": lambda K: levattn.universal_set(K, 0.1).mask,
    "latte": lambda K: latte(K, K, K),
    "tssa": tssa,
    "pruned": lambda K: pruned_attention(K, K, K, Selection(size=20, summaries=30, window=2)),
    "pruned, causal": lambda K: causal_pruned_attention(
        K, K, K, Selection(size=20, summaries=9, window=2, renew_every=40)
    ),
}


@pytest.mark.parametrize("name", TENSOR_CALLS)
def test_tensors_take_the_stream_and_the_memory_of_torch(tensors: Any, name: str) -> None:
    import torch

    there, streams, made = tensors
    streams.current[1] = 7
    K = torch.from_numpy(keys(500, 8, np.float64)[None])
    found = TENSOR_CALLS[name](there.CudaTensor(K, 1))
    assert isinstance(found, there.CudaTensor)
    assert found.device == torch.device("cuda", 1)
    assert set(places.launches) == {(1, 7)}
    assert made.asked
    assert not places.own
    assert not places.waits
    assert places.CURRENT.device == 0
    torch.testing.assert_close(found.inner, TENSOR_CALLS[name](K), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", [pruned_attention, causal_pruned_attention], ids=lambda call: call.__name__)
def test_tensors_of_another_class_are_left_to_torch(call: Any, tensors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers may lie elsewhere, as those of torch.distributed do: no kernel of pruned attention reads them."""
    import torch

    from levattn._kernels import tensors as read

    there, _, _ = tensors
    X = torch.from_numpy(keys(150, 8)[None]).float()
    monkeypatch.setattr(read, "_OWN_MEMORY", (torch.Tensor, torch.nn.Parameter))
    places.launches.clear()
    found = call(*(there.CudaTensor(X, 0) for _ in range(3)), Selection(40))
    assert not places.launches
    torch.testing.assert_close(found.inner, call(X, X, X, Selection(40)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("options", "most"), [({"summaries": 0}, 32), ({}, 70)], ids=["without summaries", "with"])
def test_pruned_attention_of_tensors_has_few_launches(tensors: Any, options: Any, most: int) -> None:
    """Of kernels and of torch, whose attention is several functions in main memory; and one wait, at the end."""
    import torch

    there, _, made = tensors
    Q, K, V = (there.CudaTensor(torch.from_numpy(keys(300, 16)[None]).bfloat16(), 0) for _ in range(3))
    made.crossed.clear()
    made.ran.clear()
    places.launches.clear()
    pruned_attention(Q, K, V, Selection(60, window=4, **options))
    assert len(made.ran) + len(places.launches) <= most
    assert made.crossed == ["back"]


@pytest.mark.parametrize("kind", ["residual", "expected"])
def test_selections_of_causal_tensors_wait_for_nothing(tensors: Any, kind: str) -> None:
    """What is not finite is asked for once, after all. However many selections there are, as many kernels run."""
    import torch

    there, _, made = tensors
    crossed, launched = [], []
    for n in (300, 620):
        K = there.CudaTensor(torch.from_numpy(keys(n, 8)[None]), 0)
        made.crossed.clear()
        made.ran.clear()
        places.launches.clear()
        causal_pruned_attention(K, K, K, Selection(size=9, summaries=7, window=4, scores=kind, renew_every=40))
        crossed.append(list(made.crossed))
        launched.append((len(places.launches), len(made.ran)))
    assert crossed[0] == crossed[1] == ["back"]
    assert launched[0] == launched[1] <= (15, 190)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_tensors_of_each_format(tensors: Any, dtype: str) -> None:
    import torch

    K, mask = torch.from_numpy(keys(500, 5)).to(getattr(torch, dtype)), torch.arange(500) % 3 > 0
    cuda = tensors[0].CudaTensor
    found = levattn.leverage_scores(cuda(K, 0), mask=cuda(mask, 0))
    expected = levattn.leverage_scores(K, mask=mask)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.inner, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("d", [8, 5])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_tokens_of_each_format_and_their_states(
    tensors: Any, dtype: str, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state stays on the device: each step is one launch, and nothing is sent or waited for."""
    import torch

    from levattn._kernels import tensors as kernel_tensors

    there, streams, _ = tensors
    streams.current[1] = 3
    monkeypatch.setattr(kernel_tensors, "_PLAIN", (torch.Tensor, there.CudaTensor))  # as true tensors are
    W = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, 30, d))).to(getattr(torch, dtype))
    theta = torch.ones(3, dtype=W.dtype)
    part, state = tssa(there.CudaTensor(W[:, :, :20], 1), there.CudaTensor(theta, 1), return_state=True)
    parts = [part]
    for t in range(20, 30):
        places.launches.clear()
        given = there.CudaTensor(W[:, :, t : t + 1], 1), there.CudaTensor(theta, 1)
        part, state = tssa(*given, state=state, return_state=True)
        assert places.launches == [(1, 3)]
        parts.append(part)
    assert not places.waits
    assert not places.own
    found = torch.cat([part.inner for part in parts], 2)
    assert found.dtype == W.dtype
    expected = tssa(W, theta)
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]  # of the last digit
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-6)
    whole = tssa(there.CudaTensor(W, 1), there.CudaTensor(theta, 1))
    torch.testing.assert_close(whole.inner, expected, rtol=tolerance, atol=1e-6)


@pytest.fixture
def cache_slots() -> Any:
    """The module of compressed heads, and a test of theirs."""
    pytest.importorskip("transformers", minversion="4.56")
    from levattn.integrations.transformers.compression import slots

    return slots


def heads_of(slots: Any, kind: Any, s: int = 70, t: int = 9, D: int = 8) -> tuple[Any, ...]:
    """A token's queries, slots of two groups of heads, and the tokens after them, in room for more."""
    import torch

    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return torch.from_numpy(rng.standard_normal(shape)).to(kind)

    weight = drawn(2, 2, s).float()
    weight[:, 0, 3] = -torch.inf
    groups = tuple(
        slots.HeadSlots(heads, drawn(2, 2, size, 16), drawn(2, 2, size, D), logs, None)
        for heads, size, logs in (((0, 3), s, weight), ((1, 2), 2 * s, None))
    )
    return drawn(2, 12, 1, 16), groups, (drawn(2, 4, 2 * t, 16), drawn(2, 4, 2 * t, D)), rng.random((2, t)) < 0.7


def moved(slots: Any, arrays: tuple[Any, ...], put: Callable[[Any], Any], t: int = 9) -> tuple[Any, ...]:
    """The same on a device."""
    import torch

    q, groups, room, present = arrays
    groups = tuple(
        slots.HeadSlots(group.heads, *(None if x is None else put(x) for x in group.arrays)) for group in groups
    )
    return put(q), groups, [put(x)[:, :, :t] for x in room], put(torch.from_numpy(present))


@contextmanager
def operators() -> Iterator[list[str]]:
    """The names of torch's operators that are called, in order, without those that give views."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Called(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), options: Any = None) -> Any:
            name = function.overloadpacket.__name__
            called.extend([] if name in ("slice", "detach", "alias") else [name])
            return function(*args, **(options or {}))

    called: list[str] = []
    with Called():
        yield called


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_token_reads_a_compressed_cache_where_it_lies(
    tensors: Any, cache_slots: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launches for a group of heads, on torch's stream and in its memory; nothing is sent or waited for."""
    import torch

    from levattn._kernels import tensors as kernel_tensors

    there, streams, made = tensors
    streams.current[1] = 7
    monkeypatch.setattr(kernel_tensors, "_PLAIN", (torch.Tensor, there.CudaTensor))  # as true tensors are
    arrays = heads_of(cache_slots, getattr(torch, dtype))
    for padded, softcap in ((False, None), (True, None), (True, 0.8)):
        q, groups, near, present = moved(cache_slots, arrays, lambda x: there.CudaTensor(x, 1))
        there_present = present if padded else None
        places.launches.clear()
        made.crossed.clear()
        with operators() as called:
            found = cache_slots.attended(q, groups, near, there_present, 0.3, softcap)
        assert (found.dtype, found.device) == (q.dtype, torch.device("cuda", 1))
        assert places.launches == [(1, 7)] * 4
        assert called == ["new_empty"] * 3  # the output, and partial sums of each group
        assert not places.own
        assert not places.waits
        assert not made.crossed
        q, groups, near, present = moved(cache_slots, arrays, lambda x: x.double() if x.is_floating_point() else x)
        expected = cache_slots.attended(q, groups, near, present if padded else None, 0.3, softcap)
        tolerance = {"float32": 0, "float16": 2**-10, "bfloat16": 2**-7}[dtype]  # of the last digit
        torch.testing.assert_close(found.inner.double(), expected, rtol=tolerance, atol=3e-6)


def test_a_mask_of_one_sequence_is_that_of_all(
    tensors: Any, cache_slots: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from levattn._kernels import tensors as kernel_tensors

    there = tensors[0]
    monkeypatch.setattr(kernel_tensors, "_PLAIN", (torch.Tensor, there.CudaTensor))  # as true tensors are
    arrays = heads_of(cache_slots, torch.float32)
    arrays = (*arrays[:3], arrays[3][:1])
    found, expected = (
        cache_slots.attended(*moved(cache_slots, arrays, put), 0.3, None)
        for put in (lambda x: there.CudaTensor(x, 1), lambda x: x)
    )
    assert places.launches[-4:] == [(1, 0)] * 4
    torch.testing.assert_close(found.inner, expected, rtol=0, atol=3e-6)


def test_moments_for_a_cache_are_summed_where_tensors_are(tensors: Any, cache_slots: Any) -> None:
    import torch

    there, streams, _ = tensors
    streams.current[1] = 7
    Q, K = torch.from_numpy(keys(60, 8)[None]), torch.from_numpy(keys(50, 8)[None])
    found = cache_slots.Seen.of(there.CudaTensor(Q, 1), there.CudaTensor(K, 1))
    found = found.plus(found).of_heads([0])
    assert set(places.launches) <= {(1, 7)}
    expected = cache_slots.Seen.of(Q, K).plus(cache_slots.Seen.of(Q, K))
    second = where_arrays_are(as_float64)(found.queries.second)
    np.testing.assert_allclose(second, expected.queries.second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_codes_are_opened_on_the_stream_of_torch(tensors: Any, dtype: str, bits: int) -> None:
    import torch

    coding = pytest.importorskip("levattn.integrations.transformers.compression.coding")
    there, streams, _ = tensors
    streams.current[1] = 7
    rows = torch.from_numpy(keys(50, 12)[None]).to(getattr(torch, dtype))
    coded = coding.Coded.of(rows, bits, columns=True)
    arrays = {name: there.CudaTensor(x, 1) for name, x in vars(coded).items() if isinstance(x, torch.Tensor)}
    places.launches.clear()
    found = coding.Coded(**{**vars(coded), **arrays}).opened()
    assert places.launches == [(1, 7)]
    assert (found.dtype, found.device) == (rows.dtype, torch.device("cuda", 1))
    torch.testing.assert_close(found.inner, coded.opened(), rtol=2**-7, atol=1e-5)


def test_a_step_of_a_layer_copies_a_token(tensors: Any, cache_slots: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one format, without a mask: only the token's key and value move, and nothing is waited for."""
    import torch

    from levattn._kernels import tensors as kernel_tensors
    from levattn.integrations.transformers.compression.layer import CompressedLayer

    there, _, made = tensors
    monkeypatch.setattr(kernel_tensors, "_PLAIN", (torch.Tensor, there.CudaTensor))
    q, groups, near, _ = moved(cache_slots, heads_of(cache_slots, torch.bfloat16), lambda x: there.CudaTensor(x, 1))
    layer = CompressedLayer(0, groups, there.CudaTensor(torch.ones(2, 300, dtype=torch.bool), 1))
    with torch.no_grad():
        layer._append(*near)
        for _ in range(3):
            places.launches.clear()
            made.crossed.clear()
            with operators() as called:
                tail = layer._append(*(x[:, :, :1] for x in near))
                layer._answered(tail, q, None, 0.3, None)
            assert called == ["copy_"] * 2 + ["new_empty"] * 3
            assert len(places.launches) == 2 * len(groups)
            assert not made.crossed
        mask = torch.arange(300 + layer.tail.length)[None, None, None].expand(2, -1, -1, -1) != 301
        places.launches.clear()
        found = layer._answered(tail, q, there.CudaTensor(mask, 1), 0.3, None)
        assert len(made.crossed) == 2  # whether all are there, and which are not
        assert len(places.launches) == 2 * len(groups)
        expected = cache_slots.attended(q, groups, tail, there.CudaTensor(mask[:, 0, 0, 300:], 1), 0.3, None)
        assert torch.equal(found.inner, expected.inner)


@pytest.mark.parametrize("fitted", [True, False])
def test_a_layer_is_compressed_with_few_waits(tensors: Any, cache_slots: Any, fitted: bool) -> None:
    """For heads that are alike: as many waits for eight of them as for two, beside those of the steps of a fit."""
    import torch

    from levattn.integrations.transformers.compression import compress, profile, references, rotation
    from levattn.integrations.transformers.compression.cache import CompressedCache
    from levattn.integrations.transformers.compression.layer import CompressedLayer

    there, _, made = tensors
    put = partial(there.CudaTensor, device=0)
    turn = rotation.Rotation(put(torch.arange(4)), put(torch.arange(4, 8)), put(torch.linspace(0, 1, 4).double()))
    waits = []
    for G in (2, 8):
        q, k, v = (put(torch.from_numpy(keys(h * 300, 8).reshape(1, h, 300, 8)).bfloat16()) for h in (2 * G, G, G))
        tokens, present = put(torch.zeros(1, 300, dtype=torch.int64)), put(torch.ones(1, 300, dtype=torch.bool))
        cache = CompressedCache([CompressedLayer(0)], tokens, present, None)
        fit = references.References({0: turn}, tokens[:, :0], present[:, :0])
        chosen = profile.HeadSelections.of(Selection(0.25, summaries=0 if fitted else 0.5), None, {0}, set(), 4.0)
        keeper = compress._Keeper(cache, chosen, fit if fitted else None, 8, rules=False)
        keeper.first, keeper.last = 0, 300
        made.crossed.clear()
        cache.layers[0].look(0, q, k, v, 8**-0.5, None)
        waits.append(made.crossed.count("back"))
        assert keeper.found[0][0].bits == 8
    assert max(waits) <= (32 if fitted else 4)
    assert fitted or waits[0] == waits[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_token_reads_codes_where_they_lie(
    tensors: Any, cache_slots: Any, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it reads the numbers that they stand for, in no more launches; and nothing is made of them."""
    import torch

    from levattn._kernels import tensors as kernel_tensors
    from levattn.integrations.transformers.compression.layer import CompressedLayer

    there = tensors[0]
    monkeypatch.setattr(kernel_tensors, "_PLAIN", (torch.Tensor, there.CudaTensor))
    q, groups, room, _ = heads_of(cache_slots, torch.bfloat16, D=16)
    coded = tuple(group.coded(bits) for group in groups)
    opened = tuple(group.opened() for group in coded)

    def put(X: Any) -> Any:
        return there.CudaTensor(X, 1) if isinstance(X, torch.Tensor) else X

    def there_of(group: Any) -> Any:
        keys, values = (
            replace(x, **{name: put(part) for name, part in vars(x).items()}) if bits == group.bits else put(x)
            for x in (group.keys, group.values)
        )
        return cache_slots.HeadSlots(group.heads, keys, values, put(group.log_weight), None)

    found = []
    for held in (coded, opened):
        layer = CompressedLayer(0, tuple(map(there_of, held)), put(torch.ones(2, 300, dtype=torch.bool)))
        with torch.no_grad():
            tail = layer._append(*(put(x) for x in room))
            places.launches.clear()
            with operators() as called:
                found.append(layer._answered(tail, put(q), None, 0.3, None))
        assert called == ["new_empty"] * 3
        assert len(places.launches) == 2 * len(groups)
    assert torch.equal(found[0].inner, found[1].inner)


@pytest.mark.parametrize("reason", ["double", "mixed", "strided", "capture", "gradient", "func"])
def test_other_tokens_take_the_functions_of_torch(
    tensors: Any, cache_slots: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from levattn._kernels import tensors as kernel_tensors
    from levattn._kernels.pruned.torch import attended_token

    there, _, _ = tensors
    monkeypatch.setattr(kernel_tensors, "_PLAIN", (torch.Tensor, there.CudaTensor))
    arrays = heads_of(cache_slots, torch.float64 if reason == "double" else torch.float32)
    q, groups, near, _ = moved(cache_slots, arrays, lambda x: there.CudaTensor(x, 1))

    def of_kernels(q: Any) -> Any:
        slots = cache_slots.held_by_kernels(groups, near[0].dtype)
        places.launches.clear()
        found = None if slots is None else attended_token(q, slots, (*near, None), 0.3, None)
        assert (found is None) == (not places.launches)
        return found

    if reason == "mixed":
        q = there.CudaTensor(q.inner.half(), 1)
    elif reason == "strided":
        q = there.CudaTensor(q.inner.repeat_interleave(2, 3)[..., ::2], 1)
    elif reason == "capture":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    elif reason == "gradient":
        q = q.requires_grad_()
        with torch.no_grad():
            assert of_kernels(q) is not None
    elif reason == "func":
        torch.func.functionalize(lambda x: pytest.fail("runs") if of_kernels(q) is not None else x)(torch.ones(3))
        return
    assert of_kernels(q) is None


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_latents_of_each_format_and_their_states(tensors: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is not cast; a state stays on the device: steps are one launch, and nothing is sent or waited for."""
    import torch

    from levattn._kernels import tensors as kernel_tensors

    there, streams, _ = tensors
    streams.current[1] = 3
    monkeypatch.setattr(kernel_tensors, "_PLAIN", (torch.Tensor, there.CudaTensor))  # as true tensors are
    rng, kind = np.random.default_rng(0), getattr(torch, dtype)
    arrays = [torch.from_numpy(rng.standard_normal((2, 3, 30, size))).to(kind) for size in (6, 6, 8)]

    def part(low: int, high: int) -> list[Any]:
        return [there.CudaTensor(array[:, :, low:high], 1) for array in arrays]

    first, state = latte(*part(0, 20), return_state=True)
    parts = [first]
    for low, high in ((20, 21), (21, 22), (22, 30)):
        places.launches.clear()
        Y, state = latte(*part(low, high), state=state, return_state=True)
        assert places.launches == [(1, 3)]
        parts.append(Y)
    assert not places.waits
    assert not places.own
    found = torch.cat([each.inner for each in parts], 2)
    assert found.dtype == kind
    expected, room = latte(*arrays), latent_room(arrays[2])
    torch.testing.assert_close(found, expected, rtol=0, atol=room)
    torch.testing.assert_close(latte(*part(0, 30)).inner, expected, rtol=0, atol=room)


def latent_room(V: Any) -> float:
    """The error of latent attention: in 16 bits six roundings of the largest value, and one for what it is held to."""
    import torch

    kind = torch.finfo(V.dtype)
    return 7 * kind.eps / 2 * float(V.abs().max()) if kind.bits == 16 else {32: 1e-5, 64: 1e-12}[kind.bits]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gradients_of_tokens_of_each_format(tensors: Any, dtype: str) -> None:
    import torch

    from levattn._kernels.tokens.torch import STATISTICS

    there, _, made = tensors
    W, dY = torch.from_numpy(np.random.default_rng(1).standard_normal((2, 2, 3, 30, 8))).to(getattr(torch, dtype))
    theta, offsets = torch.ones(2, 3), np.array([0, 30])

    def gradients(dY: Any, W: Any, theta: Any) -> Any:
        return STATISTICS.backward(dY, *STATISTICS.arguments(TokenArguments(W, theta, None, offsets)))

    expected = gradients(dY.float(), W.float(), theta)
    with made:
        found = gradients(*(there.CudaTensor(part, 1) for part in (dY, W, theta)))
    assert found[0].dtype == W.dtype
    tolerance = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]  # of the last digit
    torch.testing.assert_close(found[0].inner.float(), expected[0], rtol=tolerance, atol=1e-5)
    torch.testing.assert_close(found[1].inner, expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gradients_of_latents_of_each_format(tensors: Any, dtype: str) -> None:
    import torch

    from levattn._kernels.latent.torch import ATTENTION

    there, _, made = tensors
    rng, kind = np.random.default_rng(1), getattr(torch, dtype)
    given = [torch.from_numpy(rng.standard_normal((2, 30, size))).to(kind) for size in (8, 5, 5, 8)]

    def results(dY: Any, *arrays: Any) -> Any:
        arguments = ATTENTION.arguments(LatentArguments(*arrays, np.array([0, 30]), True))
        return ATTENTION.forward(*arguments), *ATTENTION.backward(dY, *arguments)[:3]

    expected = results(*(part.float() for part in given))
    with made:
        found = results(*(there.CudaTensor(part, 1) for part in given))
    assert {part.dtype for part in found} == {kind}
    torch.testing.assert_close(found[0].inner.float(), expected[0], rtol=0, atol=latent_room(given[3]))
    tolerance = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]  # of the last digit
    for part, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(part.inner.float(), other, rtol=tolerance, atol=1e-5)


def test_memory_of_torch_is_read_within_a_call_that_entered(tensors: Any) -> None:
    """Else CuPy would work on a stream of its own, on whichever device is current: the emulator refuses."""
    import torch

    K = tensors[0].CudaTensor(torch.from_numpy(keys(50, 8)), 0)
    with pytest.raises(DeviceError, match="where_arrays_are"):
        arrays.as_cupy(K)
    assert where_arrays_are(arrays.as_cupy)(K).shape == (50, 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stream_of_tensors_goes_on_as_torch_does(tensors: Any, dtype: str) -> None:
    import torch

    there, streams, made = tensors
    streams.current[1] = 7
    K = torch.from_numpy(np.stack([keys(4 * BLOCK, 8), keys(4 * BLOCK, 8, seed=1)])).to(getattr(torch, dtype))
    found, moments = levattn.StreamingUniversalSet(0.05), Moments(8, (2,))
    for part in (slice(0, 3 * BLOCK), slice(3 * BLOCK, None)):
        found.update(
            there.CudaTensor(K[:, part], 1),
            payload=there.CudaTensor(torch.arange(2 * 4 * BLOCK).reshape(2, -1)[:, part], 1),
        )
        moments.update(there.CudaTensor(K[:, part], 1))
    items, sums = found.result().items, moments.result()
    assert set(places.launches) == {(1, 7)}
    assert made.asked
    assert not places.own
    assert not places.waits
    assert places.CURRENT.device == 0
    expected = levattn.StreamingUniversalSet(0.05).update(K, payload=torch.arange(2 * 4 * BLOCK).reshape(2, -1))
    for item, other in zip(items, expected.result().items, strict=True):
        assert np.array_equal(item.indices, other.indices)
        assert np.array_equal(item.keys, other.keys)
        assert np.array_equal(item.payload, other.payload)
    np.testing.assert_allclose(sums, Moments(8, (2,)).update(K).result(), rtol=1e-12, atol=1e-8)


def test_tensors_wait_for_what_a_stream_holds_of_cupy(tensors: Any, cupy: Any) -> None:
    import torch

    there, streams, _ = tensors
    streams.current[0] = 5
    K = keys(4 * BLOCK, 8)
    state = levattn.StreamingUniversalSet(0.05).update(cupy.asarray(K[: 2 * BLOCK]))
    state.update(there.CudaTensor(torch.from_numpy(K[2 * BLOCK :]), 0))
    assert places.waits[:2] == [(5, 0), (0, 5)]


@needs_two
def test_states_of_two_devices_are_merged_in_main_memory(cupy: Any) -> None:
    K = keys(6 * BLOCK, 8)
    parts = []
    for number in (0, 1):
        with cupy.cuda.Device(number):
            part = cupy.asarray(K[3 * BLOCK * number :][: 3 * BLOCK])
        parts.append((levattn.StreamingUniversalSet(0.05).update(part), Moments(8).update(part)))
    with pytest.raises(TypeError, match="this StreamingUniversalSet is on CUDA device 0 and K on CUDA device 1"):
        parts[0][0].update(part)
    (found, sums), (other, its) = parts
    expected = levattn.StreamingUniversalSet(0.05).update(K).result()
    assert found.merge(other).result().indices.tolist() == expected.indices.tolist()
    np.testing.assert_allclose(sums.merge(its).result(), Moments(8).update(K).result(), rtol=1e-12, atol=1e-9)
    assert cupy.cuda.runtime.getDevice() == 0


def test_arrays_of_cupy_beside_tensors_are_waited_for(tensors: Any, cupy: Any) -> None:
    import torch

    there, streams, _ = tensors
    streams.current[0] = 5
    K = there.CudaTensor(torch.from_numpy(keys(500, 8)), 0)
    levattn.leverage_scores(K, mask=cupy.asarray(np.ones(500, np.bool_)))
    assert places.waits == [(5, 0), (0, 5)]


def test_operators_enter_in_threads_of_their_own(tensors: Any) -> None:
    import torch

    there, streams, made = tensors
    x = there.CudaTensor(torch.from_numpy(keys(300, 8))[None], 1)
    failed: list[BaseException] = []

    def run() -> None:
        streams.current[1] = 9
        try:
            with made:
                torch.ops.levattn.decayed_scan(x, x, None, False)
        except BaseException as error:
            failed.append(error)

    latte(x, x, x)
    places.launches.clear()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed
    assert set(places.launches) == {(1, 9)}


def test_a_graph_is_not_captured(tensors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    K = tensors[0].CudaTensor(torch.from_numpy(keys(500, 8)), 0)
    with pytest.raises(ValueError, match="CUDA graph"):
        levattn.leverage_scores(K)


def test_operators_tell_that_a_graph_cannot_hold_them() -> None:
    torch = pytest.importorskip("torch")
    from levattn._kernels.latent import torch as latent_torch

    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    if unsafe is None:
        pytest.skip("this torch has no such tag")
    assert unsafe in latent_torch.ATTENTION.forward._opoverload.tags


def test_the_step_over_a_batch_of_one_does_not_matter(cupy: Any) -> None:
    """DLPack of torch up to 2.9 gives it as 1 number."""
    held = keys(300, 64)
    plain = Rows(cupy.asarray(held[None]), "float32")
    odd = np.lib.stride_tricks.as_strided(held, (1, *held.shape), (held.itemsize, *held.strides))
    if device.DEVICES:
        pytest.skip("CuPy makes the steps of its arrays itself")
    rows = Rows(device.DeviceArray(odd), "float32")
    assert with_steps(rows.keys, 3)[1] == 1
    assert key_arguments(rows)[1:4] == key_arguments(plain)[1:4] == [0, 64, 1]
    pieces = np.array([[0, 0, 0, 300]])
    for arithmetic in ("double", "single"):
        found, expected = (gram_cuda.moments(each, pieces, arithmetic=arithmetic) for each in (rows, plain))
        assert np.array_equal(found, expected)


# -- that no public call is left out -------------------------------------------------------------

ENTERED = where_arrays_are(lambda: None).__code__
PACKAGES = (
    *("levattn", "levattn.attention", "levattn.attention.rates", "levattn.linalg", "levattn.states", "levattn.sketch"),
    "levattn.distributed.torch",
)
# What takes arrays and does not enter, and why
ELSEWHERE = {
    "KeySource.ids": "arrays of numpy, for rows of files",
    "Moments.from_arrays": "it holds them as they are",
    "SoftmaxState.from_arrays": "it holds them as they are",
    "PrunedState.with_scores": "it holds them for the next call",
    "Distribution.add": "it is called by those that entered",
    "Moments.add": "it is called by those that entered",
    "Softmax.contains": "arrays of numpy",
    "Softmax.__call__": "arrays of numpy",
    "Factor.whitened": "arrays of numpy; W comes by `whitening`",
    "factor_of": "sums that enter by themselves",
    "factor_of_sum": "moments that enter by themselves",
}


def public_calls() -> dict[str, Any]:
    """Functions and methods of the packages that take an array, by what their docstrings say."""
    found: dict[str, Any] = {}
    for package in PACKAGES:
        module = pytest.importorskip(package)
        for name in module.__all__:
            member = getattr(module, name)
            if inspect.isclass(member):
                inside = {f"{name}.{key}": value for key, value in vars(member).items() if not key.startswith("_")}
                found |= {key: getattr(value, "__func__", value) for key, value in inside.items()}
            else:
                found[name] = member
    return {name: member for name, member in found.items() if inspect.isfunction(member) and _takes_arrays(member)}


def _takes_arrays(function: Any) -> bool:
    _, _, behind = (function.__doc__ or "").partition("Parameters\n")
    return " : array" in behind.partition("Returns\n")[0].partition("Raises\n")[0]


def _enters(function: Any) -> bool:
    """Tell whether a call enters the device itself or in what it wraps, such as within the lock of a state."""
    while function is not None and function.__code__ is not ENTERED:
        function = getattr(function, "__wrapped__", None)
    return function is not None


def test_every_public_call_that_takes_arrays_enters() -> None:
    calls = public_calls()
    assert len(calls) > 25
    outside = {name for name, member in calls.items() if not _enters(member)}
    assert outside - ELSEWHERE.keys() == set()
