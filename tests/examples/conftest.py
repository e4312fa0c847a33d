"""What tests of several examples share."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def example(request):
    """Give a function that imports a module of the example, whose folder is FOLDER of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(request.module.FOLDER)
        yield importlib.import_module


@pytest.fixture
def quick(request, tmp_path):
    """Give a function that runs an example in a process of its own; it returns what was written, and was printed."""
    folder = request.module.FOLDER

    def run(name, *more, pictures=None):
        command = [sys.executable, "-W", "error", folder / f"{name}.py", "--quick", "--out", tmp_path, *more]
        environment = os.environ | {"PYTHONPATH": str(folder.parents[1])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        for picture in pictures or (name,):
            for kind in ("svg", "png"):
                assert (tmp_path / f"{picture}.{kind}").stat().st_size > 1000
        return json.loads((tmp_path / f"{name}.json").read_text()), done.stdout

    return run
