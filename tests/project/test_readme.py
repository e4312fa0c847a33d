"""The examples of README.md and of the documentation's pages run, in order, as a reader would run them.

The ``python`` blocks of a file share one namespace and one empty folder; a block with ``>>>`` prompts is
checked against the output that it shows. In a ``console`` block the lines that begin with ``$ levattn`` are
run, in the same folder, so that a command may read the file that a block before it wrote.

Inside: pictures and heads are replaced by small ones, for time.
"""

from __future__ import annotations

import doctest
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from levattn import datasets, plots
from levattn.cli import build_app

MINILM = datasets.minilm
ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
CHECK = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NEEDS_EXTRAS = {"dask", "torch", "transformers"}  # what a page may use and a machine may lack


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page where the text begins."""

    language: str
    text: str
    line: int


def blocks_of(page: str) -> Iterator[Block]:
    for fence in re.finditer(r"^```(\w+)[^\n]*\n(.*?)^```\s*$", page, flags=re.MULTILINE | re.DOTALL):
        yield Block(fence[1], fence[2], page.count("\n", 0, fence.start(2)) + 1)


def run_python(block: Block, page: str, namespace: dict[str, object]) -> None:
    if ">>> " not in block.text:
        # Empty lines in front, so that a traceback shows the line of the page.
        exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), namespace)
        return
    parsed = doctest.DocTestParser().get_doctest(block.text, namespace, page, page, block.line - 1)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=CHECK, verbose=False)
    runner.run(parsed, out=report.append, clear_globs=False)
    namespace.update(parsed.globs)
    assert not report, "".join(report)


def run_console(block: Block, page: str) -> None:
    for command in re.findall(r"^\$ levattn\b((?:.*\\\n)*.*)$", block.text, flags=re.MULTILINE):
        arguments = shlex.split(command.replace("\\\n", " "))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(datasets, "minilm", few_heads)
            patch.setattr(plots, "figure_bytes", lambda *_: b"")
            done = CliRunner().invoke(build_app(), arguments)
        assert done.exit_code == 0, f"{page}: levattn {command}\n{done.output}"


def few_heads() -> datasets.AttentionHeads:
    """The data of ``levattn demo``, of one layer: tests/cli/test_cli.py runs it on all of them, and draws them."""
    found = MINILM()
    return replace(found, queries=found.queries[:1], keys=found.keys[:1], values=found.values[:1])


def run_page(page: str, name: str) -> int:
    """Run a page's examples in the folder where this is; the number of blocks in the languages that are run."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    count = 0
    for block in blocks_of(page):
        if block.language == "python":
            run_python(block, name, namespace)
        elif block.language == "console":
            run_console(block, name)
        count += block.language in ("python", "console")
    return count


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        count = run_page(path.read_text("utf-8"), path.name)
    except ModuleNotFoundError as missing:
        if missing.name not in NEEDS_EXTRAS:
            raise
        pytest.skip(f"{path.name} uses {missing.name}, which is not installed")
    assert count or path != README, "README.md shows no example: add a ```python block"


PAGE = """
```python
K = [1, 2]
```
```python
>>> sum(K)
3
```
```text
not run
```
"""


def uneven_rows(page: str) -> list[int]:
    """Return the lines of tables that have fewer or more cells than the line before, or do not end."""
    without_code = re.sub(r"^(```.*?^```)", lambda block: "\n" * block[0].count("\n"), page, flags=re.M | re.DOTALL)
    lines = [re.sub(r"`[^`]*`|\\\|", "", line) for line in without_code.splitlines()]
    return [
        number
        for number, (before, line) in enumerate(pairwise(lines), 2)
        if before.startswith("|")
        and line.strip()
        and not line.startswith("<!--")
        and before.count("|") != line.count("|")
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_rows_of_a_table_have_as_many_cells(path: Path) -> None:
    assert uneven_rows(path.read_text("utf-8")) == []


def test_uneven_rows_are_found() -> None:
    even = "| a | b |\n|---|---|\n| `x|y` | \\| |\n\n```sh\n| a |\n| a | b |\n```\n"
    assert uneven_rows(even) == []
    assert uneven_rows(even + "| a | b |\n|---|---|\n| c |\nd |\n") == [11, 12]


def test_blocks_share_a_namespace() -> None:
    assert run_page(PAGE, "page") == 2


def test_wrong_output_is_reported() -> None:
    with pytest.raises(AssertionError, match=r"Expected:\s+4\s+Got:\s+3"):
        run_page(PAGE.replace("3\n", "4\n"), "page")


def test_failing_block_names_the_line_of_the_page() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_page("text\n\n```python\nx = 1\n1 / 0\n```\n", "page.md")
    frame = caught.traceback[-1]
    assert (str(frame.path), frame.lineno + 1) == ("page.md", 5)
