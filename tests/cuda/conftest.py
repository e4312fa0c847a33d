"""What the tests of this folder give to kernels: arrays of numpy, or CuPy's; where there is no card, as strict ones.

Where kernels run, `emulator.card` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import emulator
from emulator import device as emulated
from emulator import places
from emulator.card import MainMemory

ROOMY = MainMemory.shared_limit


@pytest.fixture
def main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on the emulator, even where there is a card."""
    monkeypatch.setattr(emulator, "place", MainMemory())


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches take arrays of numpy."""
    emulator.on_host(monkeypatch)


@pytest.fixture
def roomy(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches on arrays of numpy, where a block may have the shared memory that large cards have."""
    monkeypatch.setattr(MainMemory, "shared_limit", ROOMY)
    if emulator.place.shared_limit < ROOMY:
        pytest.skip("the blocks of this card have less shared memory")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CuPy; where there is no card, the emulator's arrays, which the library takes for CuPy's."""
    return emulated.library_on_device(monkeypatch)


@pytest.fixture
def tensors(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Torch with two devices of the emulator: its streams, and what makes tensors."""
    pytest.importorskip("torch")
    if emulated.DEVICES:
        pytest.skip("the emulator's tensors stand in for those of a card")
    from emulator import tensors
    from levattn._kernels import tensors as read

    streams = tensors.torch_on_devices(monkeypatch)
    monkeypatch.setattr(read, "_OWN_MEMORY", (*read._OWN_MEMORY, tensors.CudaTensor))
    with tensors.Devices() as made:
        for happened in (places.launches, places.waits, places.own):
            happened.clear()
        yield tensors, streams, made
