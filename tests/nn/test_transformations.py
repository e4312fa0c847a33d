"""The page about torch's transformations says what the cells of its table do: each works, or names a way out."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from transformations import COLUMNS, PAGE, REFUSALS, ROWS, of_ranks, outcome, page, read_page  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")

STATED = read_page(PAGE.read_text(encoding="utf-8"))
# What compiles, or starts processes, takes long: representatives of each mechanism, and all others thoroughly
OFTEN = ("nn.Latte", "nn.TokenStatistics(causal=True)", "nn.LevAttention")
CELLS = [
    pytest.param(row, name, marks=[pytest.mark.thorough] if column.slow and row not in OFTEN else [])
    for name, column in COLUMNS.items()
    if not column.ranks
    for row in ROWS
]


@pytest.mark.crossed
@pytest.mark.parametrize(("row", "column"), CELLS)
def test_a_cell_does_what_the_page_says(row: str, column: str) -> None:
    assert outcome(row, column) == STATED[f"{row}|{column}"]


@pytest.mark.parametrize("rows", [OFTEN, pytest.param(tuple(ROWS), marks=pytest.mark.thorough)], ids=["some", "all"])
def test_a_cell_of_two_processes_does_what_the_page_says(rows: tuple[str, ...]) -> None:
    found = of_ranks(list(rows))
    assert found == {cell: STATED[cell] for cell in found}
    assert len(found) == len(rows) * sum(column.ranks for column in COLUMNS.values())


def test_the_page_is_written_from_its_cells() -> None:
    assert page(STATED) == PAGE.read_text(encoding="utf-8")
    assert set(REFUSALS) <= set(STATED.values())  # no way out is listed that no cell needs
