"""The linter of prose finds what it is for, and the first pages can be read without effort."""

from __future__ import annotations

from pathlib import Path

import pytest

from prose import ROOT, Text, docstrings, faults_of, grade, graded, paragraphs, plain, syllables

LONG = " ".join(["word"] * 26) + "."


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (LONG, ["sentence of 26 words"]),
        ("The kernel writes what it reads.", ["noun"]),
        ("The error of a sum is that of its parts.", ["noun"]),
        ("The colour of a curve.", ["spelling"]),
        ("The keys are read by the kernel.", ["passive"]),
        ("What is the rank? The kernel writes the rows that it reads, by default in color.", []),
        ("Set `what it reads`, e.g. ``colour`` in [the page](colour.md), to $that of x$.", []),
    ],
)
def test_rules_find_their_faults(text: str, rules: list[str]) -> None:
    assert [fault.rule for fault in faults_of(Text(ROOT, 1, plain(text)))] == rules


def test_code_tables_and_formulas_are_no_prose() -> None:
    page = f"# {LONG}\n\n```python\n{LONG}\n```\n\n| {LONG} |\n\n$$\n{LONG}\n$$\n\n- An item.\n- Another\n  item.\n"
    assert [(text.line, text.text) for text in paragraphs(page, ROOT)] == [(13, "An item."), (14, "Another item.")]


def test_docstrings_and_messages_of_a_module_are_read(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""A module."""\n\n\ndef f():\n    """Do it."""\n    raise ValueError(f"K is {1}; give another")\n'
    )
    assert [text.text for text in docstrings(path)] == ["A module.", "Do it.", "K is x; give another"]


@pytest.mark.parametrize(("word", "count"), [("key", 1), ("score", 1), ("leverage", 3), ("table", 2), ("matrix", 2)])
def test_syllables_are_counted_by_vowels(word: str, count: int) -> None:
    assert syllables(word) == count


@pytest.mark.parametrize("path", graded(), ids=lambda path: path.name)
def test_a_first_page_takes_at_most_eleven_years_of_school(path: Path) -> None:
    assert grade(path.read_text(encoding="utf-8")) <= 11
