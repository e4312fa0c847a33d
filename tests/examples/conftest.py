"""What tests of several examples share."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(scope="module")
def example(request):
    """Give a function that imports a module of the example, whose folder is FOLDER of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(request.module.FOLDER)
        yield importlib.import_module
