"""Arrays, threads and files, their parts.

Inside: the number of threads and the memory of an array show in no result, and interrupts are planted.
"""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_arrays import assert_agree, dtype_name, keys, needs_torch

import levattn
import naive
import strategies
from levattn._core import arrays
from levattn._core.arrays import memory_of_tensor
from levattn._core.threads import num_threads
from strategies import STORAGE, as_float64


@pytest.mark.parametrize("limit", [1, np.int64(1), np.uint8(3)])
def test_whole_numbers_of_numpy_limit_threads(limit: Any) -> None:
    with levattn.thread_limit(limit):
        assert num_threads() == int(limit)
        assert type(num_threads()) is int


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_number_of_threads_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEVATTN_NUM_THREADS", raising=False)
    all_cores = num_threads()
    monkeypatch.setenv("LEVATTN_NUM_THREADS", value)
    assert num_threads() == all_cores


def test_an_array_on_the_memory_of_a_tensor_keeps_it() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (torch.randn(4, 3, 2).mT, torch.randn(1, 3).expand(4, 3), torch.tensor(2.0), torch.ones(0, 3)):
        expected, array = tensor.numpy().copy(), memory_of_tensor(tensor)
        kept = weakref.ref(tensor)
        part = array[..., :1] if array.ndim else array
        del tensor, array
        gc.collect()
        assert kept() is not None
        np.testing.assert_array_equal(part, expected[..., :1] if expected.ndim else expected)


def test_an_interrupt_while_a_temporary_file_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = os.open

    def interrupted(path: Any, *options: Any, **more: Any) -> int:
        file = made(path, *options, **more)
        if str(path).endswith(".tmp"):
            os.close(file)
            raise KeyboardInterrupt
        return file

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        levattn.StreamingUniversalSet(0.5).save(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are taken for those of another device, which the compiled kernels cannot read."""
    monkeypatch.setattr(arrays, "_in_main_memory", lambda _: False)


@needs_torch
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("dtype", "bar"), [("float64", 1e-10), ("float32", 1e-6)])
@pytest.mark.parametrize("options", [{}, {"center": True}, {"mask": True}, {"method": "qr"}], ids=str)
@pytest.mark.parametrize("name", ["gaussian-tall", "conditioned-1e6", "deficient-exact", "scale-1e15", "no-row"])
def test_torch_by_the_definitions(name: str, options: dict[str, Any], dtype: Any, bar: float) -> None:
    import torch

    K = STORAGE[dtype](strategies.case(name))
    tensor = torch.from_numpy(K.copy())
    assert isinstance(arrays.as_matrices(tensor, "K").data, torch.Tensor)  # the generic route
    if options.get("mask"):
        options = {"mask": np.arange(len(K)) % 7 > 0}
    assert_agree(tensor, K, bar, **options)


@pytest.mark.parametrize("storage", ["float64", "torch-float64", "strict-float64"])
@pytest.mark.parametrize("lay", [np.asarray, strategies.read_only, strategies.reversed_rows])
def test_numpy_arrays_go_where_another_is(storage: str, lay: Any) -> None:
    if storage not in STORAGE:
        pytest.skip(f"no package for {storage}")
    like, array = STORAGE[storage](keys()), lay(keys(1))
    there = arrays.to_device(array, like)
    assert type(there) is type(like)
    assert np.array_equal(as_float64(there), array)
    assert there is array or storage != "float64"
    assert dtype_name(arrays.to_device(np.arange(3) > 1, like)) == "bool"


@needs_torch
@pytest.mark.usefixtures("elsewhere")
def test_gradients_are_not_followed_by_the_definitions() -> None:
    import torch

    Q, K, V = (torch.from_numpy(keys(seed, shape)) for seed, shape in ((5, (6, 4)), (4, (40, 4)), (6, (40, 3))))
    expected = levattn.heavy_attention(Q.numpy(), K.numpy(), 0.05)
    for tensor in (Q, K, V):
        tensor.requires_grad_(True)
    scores = levattn.leverage_scores(K)
    assert not scores.requires_grad
    np.testing.assert_allclose(scores, naive.leverage_exact(K.detach().numpy()), atol=1e-10)
    found = levattn.universal_set(K, 0.1, mask=torch.arange(40) % 2 == 0)
    assert not found.scores.requires_grad
    heavy = levattn.heavy_attention(Q, K, 0.05)
    np.testing.assert_allclose(heavy.entries.toarray(), expected.entries.toarray(), atol=1e-10)
    output, bound = heavy.apply(V, compensate="mean")
    assert isinstance(output, torch.Tensor)
    assert not output.requires_grad
    for one, other in zip((output, bound), expected.apply(V.detach().numpy(), compensate="mean"), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-10)
