"""The page about torch's transformations says what the cells of its table do: each works, or names a way out."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if not row.has_gradient])
def test_calls_without_a_gradient_give_their_numbers_within_a_gradient(row: str) -> None:
    module, inputs = ROWS[row].module(), ROWS[row].inputs(11)
    mask = torch.arange(11) < torch.tensor([11, 7])[:, None]
    found = []

    def loss(x: Any) -> Any:
        found.append(module(x, *inputs[1:], mask=mask & (x.flatten(1)[:, :1] > -torch.inf)))
        return x.sum() + found[0].sum()

    assert (torch.func.grad(loss)(inputs[0]) == 1).all()
    torch.testing.assert_close(found[0], module(*inputs, mask=mask))
