"""The counter of code."""

from __future__ import annotations

from pathlib import Path

import naive
from sizes import code_lines, counted, parameters_of, public_calls


def test_only_code_counts(tmp_path: Path) -> None:
    function = 'def f(a, *, b=2):\n    """Return a."""\n    return a\n'
    source = f'"""Text.\n\nMore.\n"""\n\n# A comment\nx = 1  # of a line\n\n\n{function}'
    assert code_lines(source) == 3
    (tmp_path / "one.py").write_text(source)
    (tmp_path / "two.cu").write_text("// CUDA\n\nint x;\n")
    assert list(counted(tmp_path).values()) == [3, 3, 1, 1]
    assert parameters_of(naive.adversarial_queries) == 1


def test_each_public_call_is_counted_once() -> None:
    names = [name for name, _ in public_calls()]
    assert "levattn.universal_set" in names
    assert len(set(names)) == len(names)
