"""The tests of kernels on a card: what is sent there, what comes back, and what is reported; on a stand-in for one.

Inside: it is about the stand-in for a card, and about its launches.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_keys import rows_of

import emulator
from emulator import DeviceError, Kernel, card, compiled
from levattn._kernels import cuda_source
from levattn._kernels.gram import cuda as gram_cuda

MUCH = 200_000  # bytes of shared memory, which a kernel has to ask for


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card in main memory, which is the one of the tests; what it holds, and how much it did, at hand."""
    place = emulator.stand_in()
    monkeypatch.setattr(emulator, "place", place)
    return place._runtime


def kernel(code: str) -> Kernel:
    return emulator.kernel_of_text(code, ("run",), "run", "kernels.cu")


def test_results_are_those_of_main_memory(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, pieces = rows_of("every other", 2, 100, 24), np.array([[0, 0, 0, 100], [1, 1, 30, 90]])
    found = []
    for place in (emulator.place, card.MainMemory()):
        monkeypatch.setattr(emulator, "place", place)
        emulator.on_host(monkeypatch)
        found.append(gram_cuda.moments(rows, pieces))
        assert stand_in.launches > 0
        launches = stand_in.launches
        found.append(gram_cuda.moments(rows, pieces, arithmetic="single"))
        assert (stand_in.launches > launches) == (place is not emulator.place or len(found) == 2)
    assert np.array_equal(found[0], found[2])
    assert np.array_equal(found[1], found[3])
    assert not stand_in._held


def test_views_aliases_and_addresses_are_kept(stand_in: Any) -> None:
    run = kernel("""
        __global__ void run(const int *in, int *out, int step, unsigned long long *where) {
            out[(int)threadIdx.x * step] = in[threadIdx.x] + 1;
            *where = (unsigned long long)out % 256;
        }""")
    table, where = np.arange(60, dtype=np.int32).reshape(12, 5), np.zeros(1, np.uint64)
    run((1,), (4,), (table[0, :4], table[1:, 2], np.int32(5), where))  # of the same memory
    assert table[1:5, 2].tolist() == [1, 2, 3, 4]
    assert table[5:, 2].tolist() == list(range(27, 60, 5))
    assert where[0] == 7 * 4
    constant = np.arange(4, dtype=np.int32)
    constant.setflags(write=False)
    run((1,), (4,), (constant, table[1:, 2], np.int32(5), where))
    assert stand_in.launches == 2


@pytest.mark.parametrize("index", [-1, 20, 5000])
def test_writing_out_of_bounds_is_reported_and_reading_poisons(stand_in: Any, index: int) -> None:
    run = kernel(
        "__global__ void run(const double *in, double *out, long long at) { out[at] = in[0]; out[0] = in[3]; }"
    )
    out = np.zeros(20)
    with pytest.raises(DeviceError, match=rf"8 bytes out of bounds around argument 1 .* {8 * index} bytes"):
        run((1,), (1,), (np.ones(3), out, np.int64(index)))
    run((1,), (1,), (np.ones(3), out, np.int64(19)))
    assert np.isnan(out[0])
    assert out[19] == 1
    assert not stand_in._held


def test_what_goes_wrong_on_the_card_names_the_kernel_and_leaves_nothing_there(stand_in: Any) -> None:
    run = kernel("__global__ void run(int *out) { out[0] = 1 / (int)blockIdx.x; }")
    with pytest.raises(DeviceError, match=r"run, on the card: .*divides by zero"):
        run((1,), (1,), (np.zeros(1, np.int32),))
    assert not stand_in._held
    for wrong, told in (((0,), "positive"), ((2**31,), "blocks")):
        with pytest.raises(DeviceError, match=told):
            run(wrong, (1,), (np.zeros(1, np.int32),))
    with pytest.raises(TypeError, match="argument 0 of run"):
        run((1,), (1,), (np.zeros(1),))
    assert stand_in.launches == 0


def test_shared_memory_is_asked_for(stand_in: Any) -> None:
    code = (
        cuda_source.text("shared.cuh") + "__global__ void run(int *out) { DYNAMIC_SHARED(bytes); out[0] = bytes[0]; }"
    )
    run, out = kernel(code), np.zeros(1, np.int32)
    with pytest.raises(DeviceError, match="max_dynamic_shared_size_bytes"):
        run((1,), (1,), (out,), shared_mem=MUCH)
    run.max_dynamic_shared_size_bytes = MUCH
    run((1,), (1,), (out,), shared_mem=MUCH)
    assert run.on_card.max_dynamic_shared_size_bytes == MUCH
    stand_in.deviceGetAttribute = lambda _attribute, _device: 99 * 1024  # of a smaller card
    with pytest.raises(DeviceError, match="at most 101376 bytes"):
        run((1,), (1,), (out,), shared_mem=MUCH)


def test_the_library_on_arrays_as_strict_as_those_of_the_card(stand_in: Any, cupy: Any) -> None:
    import levattn

    K = np.random.default_rng(0).standard_normal((300, 6))
    scores = levattn.leverage_scores(cupy.asarray(K))
    np.testing.assert_allclose(scores.get(), levattn.leverage_scores(K), rtol=1e-9)
    assert stand_in.launches > 0


def test_kernels_of_a_true_card_are_those_that_users_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even while a test has put the emulator in their place."""
    emulator.on_host(monkeypatch)
    asked: list[Any] = []

    def compiled_for(source: str, name: str, types: tuple[str, ...], device: int) -> str:
        asked.append((cuda_source.namespace(), source, name, types, device))
        return "a kernel"

    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 3)))
    monkeypatch.setattr(card, "CUPY", fake)
    monkeypatch.setattr(card, "TRUE", {"_module": lambda: fake, "_compiled": compiled_for})
    assert card.true_card().of_table("moments", "add_blocks", ()) == "a kernel"
    assert asked == [(fake, "moments", "add_blocks", (), 3)]
    assert isinstance(cuda_source.namespace(), emulator.Host)


def test_compiled_kernels_of_other_texts_stay_in_main_memory(stand_in: Any) -> None:
    out = np.zeros(1, np.int32)
    compiled("__global__ void run(int *out) { out[0] = 7; }", ("run",))["run"]((1,), (1,), (out,))
    assert (out[0], stand_in.launches) == (7, 0)
