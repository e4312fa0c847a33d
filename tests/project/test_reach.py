"""How far tests reach into the library.

Inside: it names what is private, as text.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from reach import INSIDE, MOST, found, reasons


def reasons_of(source: str, folder: Path) -> tuple[str, ...]:
    path = folder / f"test_{abs(hash(source))}.py"  # what is found is kept by the name of the file
    path.write_text(source)
    return reasons(path)


def test_most_lines_of_tests_are_public_and_the_others_say_why() -> None:
    files = found()
    inside = {path: count for path, (count, why) in files.items() if why}
    assert sum(inside.values()) <= MOST * sum(count for count, _ in files.values())
    for path in inside:
        assert INSIDE in (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""), path


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import levattn._core.arrays", "levattn._core.arrays"),
        ("from levattn.sensitivity.two_pass import pack", "levattn.sensitivity.two_pass.pack"),
        ("from levattn.functions import as_function", "levattn.functions.as_function"),
        ("state._sums.settle()", "._sums"),
        ("def f(monkeypatch):\n    monkeypatch.setattr('os.replace', None)", "patches"),
        ("CODE = 'from levattn._core import threads; threads.f()'", "levattn._core.threads"),
    ],
)
def test_what_reaches_inside(tmp_path: Path, source: str, reason: str) -> None:
    assert reason in reasons_of(source, tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        '"""It is not levattn._core that this says."""\nimport levattn.plots\nfrom levattn import sketch',
        "from levattn.functions import Huber\nfrom levattn.exceptions import KeyFileError",
        "class A:\n    _sums = 1\n\nA()._sums",
        "def f(monkeypatch):\n    monkeypatch.setitem(sys.modules, 'zarr', None)",
        "def f(monkeypatch):\n    monkeypatch.setenv('LEVATTN_NUM_THREADS', '1')",
        "import emulator, naive",
    ],
)
def test_what_is_public(tmp_path: Path, source: str) -> None:
    assert reasons_of(source, tmp_path) == ()
