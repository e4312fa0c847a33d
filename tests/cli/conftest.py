"""Fixtures of the program's tests."""

from __future__ import annotations

import pytest

from levattn._kernels import cache


@pytest.fixture(autouse=True)
def _compiling_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test depend on what was compiled before it."""
    monkeypatch.setattr(cache, "_say_that_it_compiles", lambda: None)
