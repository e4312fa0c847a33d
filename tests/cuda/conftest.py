"""Where the tests of this folder run kernels: on arrays of numpy, or on arrays as strict as CuPy's."""

from __future__ import annotations

from typing import Any

import pytest

import emulator
from emulator import device as emulated


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run on the emulator, and take arrays of numpy."""
    emulator.on_host(monkeypatch)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library takes arrays of the emulator for CuPy's."""
    return emulated.library_on_device(monkeypatch)
