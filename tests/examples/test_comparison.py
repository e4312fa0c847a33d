"""The tables of the comparison page: how they are written, and that each has a place; nothing is measured."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "benchmarks"


@pytest.fixture(scope="module")
def page():
    """Give the module that writes tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("_page")


def _table(page, name, *losses):
    return page.Table(name, ["route", "ms"], [["levattn", "1"], ["rival", "2"]], list(losses), ["a note"])


def test_a_table_is_markdown_with_losses_notes_and_its_source(page):
    text = _table(page, "speed", "a rival is 2.00 times as fast").markdown("where and when")
    assert text == (
        "| route | ms |\n| --- | ---: |\n| levattn | 1 |\n| rival | 2 |\n\n"
        "- levattn loses: a rival is 2.00 times as fast\n- a note\n\n*where and when*"
    )
    assert "- levattn loses nowhere in this table" in _table(page, "speed").markdown("")


def test_tables_come_between_their_markers_and_gather_their_losses(page, tmp_path):
    path, names = tmp_path / "page.md", ("speed", "latte", page.LOSSES)
    path.write_text("\n\nbetween\n\n".join(page.block(name, "old") for name in names))
    bodies = {name: _table(page, name, rf"of {name} \1").markdown("") for name in names[:2]}
    losses = "- speed: of speed \\1\n- latte: of latte \\1"
    for _ in range(2):  # writing them again changes nothing
        page.write(bodies, path)
        expected = (page.block(name, body) for name, body in (bodies | {page.LOSSES: losses}).items())
        assert path.read_text() == "\n\nbetween\n\n".join(expected)
    page.write({"speed": _table(page, "speed").markdown("")}, path)
    assert page.block(page.LOSSES, "- latte: of latte \\1") in path.read_text()
    before = path.read_text()
    with pytest.raises(ValueError, match="not exactly one block 'nowhere'"):
        page.write({"speed": "new", "nowhere": "new"}, path)
    assert path.read_text() == before


def test_losses_of_one_reason_stand_below_it(page):
    speed, memory = (
        _table(page, name, *told).markdown("") for name, told in (("speed", ["a"]), ("memory", ["b", "c"]))
    )
    rows = page.losses(page.block("memory", memory) + page.block("speed", speed)).splitlines()
    assert rows[0] == "- speed: a"
    assert rows[2:] == ["  - memory: b", "  - memory: c"]
    assert re.match(r"- \*\*[^.]+\.\*\* [A-Z]", rows[1])


def test_every_rival_that_is_faster_at_all_is_a_loss(page):
    times = {"levattn": 2.0, "a": 3.0, "b": 1.6, "c": 1.0}
    assert page.slower(times, "levattn", "here", {"c": "not leverage"}) == [
        "here: c (not leverage) is 2.00 times as fast",
        "here: b is 1.25 times as fast",
    ]
    assert page.slower({"levattn": 1.0, "a": 1.0}, "levattn", "here") == []
    assert page.slower({"levattn": 1.0}, "levattn", "here") == []


def _sections() -> set[str]:
    """Return the names of all tables, read in the scripts: to import them needs torch."""
    names = set()
    for path in FOLDER.glob("_comparison_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "SECTIONS":
                names |= {ast.literal_eval(key) for key in node.value.keys}
    return names


def test_the_page_has_one_place_for_each_table_and_its_command(page):
    places = re.findall(r"^<!-- ([\w-]+): (.+) -->$", page.PAGE.read_text(), re.M)
    expected = {name: page.COMMAND.format(name=name) for name in _sections()}
    expected |= {name + page.AVX2: f"{expected[name]} --avx2" for name in page.TIMES}
    general = {"machine", page.LOSSES}
    assert len(places) == len(expected) + len(general)
    assert {name: command for name, command in places if name not in general} == expected


def test_tables_of_other_pages_are_where_the_page_includes_them_from(page):
    text = page.PAGE.read_text()
    included = re.findall(r'^```{include} (\S+)\n:start-after: "(.+)"\n:end-before: "(.+)"\n```$', text, re.M)
    assert len(included) == text.count("{include}") == 2
    for path, *marks in included:
        source = (page.PAGE.parent / path).read_text()
        assert [source.count(mark) for mark in marks] == [1, 1]
        assert source.index(marks[0]) < source.index(marks[1])
