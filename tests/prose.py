"""A linter for the prose of pages, docstrings and messages: `python -m tests.prose`, part of `make lint`.

Its rules are those of the Google developer style guide that a program can check: short sentences, named subjects and
objects, American spelling, and no passive whose agent stands beside it. Code, tables, formulas and links' targets are
no prose. `python -m tests.prose --grades [REVISION]` prints how hard README and guide are to read.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST = 25  # words of a sentence

# Passages that may break a rule, by a part of the passage, and why
EXCEPTIONS: dict[str, str] = {}

_QUESTIONS = "|".join(("is", "are", "does", "do", "can", "if", "should", "to"))
_IZED = "|".join(
    (
        "normal",
        "general",
        "real",
        "recogn",
        "organ",
        "optim",
        "minim",
        "maxim",
        "summar",
        "regular",
        "equal",
        "initial",
    )
)
_BRITISH = (
    *("colour", "behaviour", "favour", "neighbour", "centre[ds]?", "metre", "analyse[ds]?", "grey", "labelled"),
    *("modelled", "cancelled", "travelled", "whilst", "amongst", "programme", "catalogue", "artefact", "licence"),
    *("defence", "towards", "afterwards", f"(?:{_IZED})is(?:e|ed|es|ing|ation)"),
)
_PARTICIPLES = "|".join(
    (
        r"\w+ed",
        "made",
        "found",
        "read",
        "held",
        "kept",
        "given",
        "taken",
        "written",
        "shown",
        "done",
        "built",
        "chosen",
    )
)
PATTERNS = {
    # The clause names nobody and nothing: "what it reads" for "the rows that it reads"
    "noun": rf"(?<![\w-])(?:[Ww]hat (?!(?:{_QUESTIONS}) )(?=\w)|[Tt]hat of "
    "|[Tt]hose (?:of|which|that|in|from|with|for) )",
    "spelling": rf"(?i)\b(?:{'|'.join(_BRITISH)})\b",
    "passive": rf"(?i)\b(?:is|are|was|were|be|been|being) (?:\w+ly )?(?:{_PARTICIPLES}) by "
    "(?!hand|default|step|themselves|itself|one)",
}


@dataclass(frozen=True)
class Text:
    """A paragraph of prose and where it begins."""

    path: Path
    line: int
    text: str


@dataclass(frozen=True)
class Fault:
    """A rule that a paragraph breaks."""

    text: Text
    rule: str
    passage: str

    def __str__(self) -> str:
        return f"{self.text.path.relative_to(ROOT)}:{self.text.line}: {self.rule}: {self.passage}"


def plain(text: str) -> str:
    """Markdown or reStructuredText without its marks: code becomes a word."""
    text = re.sub(r"\{[\w:]+\}`~?([^`<]*?)(?:\s*<[^`]*>)?`", "Name", text)
    text = re.sub(r":[\w:]+:`[^`]*`|``[^`]*``|`[^`]*`", "Name", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\$[^$]*\$", "x", text)
    text = re.sub(r"https?://\S+", "link", text)
    return re.sub(r"\s+", " ", re.sub(r"[*_|]", "", text)).strip()


def paragraphs(page: str, path: Path, first: int = 1) -> Iterator[Text]:
    """The paragraphs and items of lists of a page, without blocks of code, tables, headings and directives."""
    page = re.sub(r"^(```|~~~|\$\$).*?^\1[ \t]*$", lambda m: "\n" * m[0].count("\n"), page, flags=re.M | re.S)
    page = re.sub(r"<!--.*?-->", lambda m: "\n" * m[0].count("\n"), page, flags=re.S)
    held: list[str] = []
    start = first
    for number, line in enumerate([*page.splitlines(), ""], first):
        skipped = re.match(r"\s*(\||#|:::|:[\w-]+:|\.\. |>>>|\.\.\. |---|===|\+--)", line)
        item = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        if held and (not line.strip() or skipped or item):
            yield Text(path, start, plain(" ".join(held)))
            held = []
        if not line.strip() or skipped:
            continue
        if not held:
            start = number
        held.append(line[item.end() :] if item else line)


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph; a colon or a semicolon ends none."""
    return [each for each in re.split(r"(?<=[.!?])[\"')]*\s+(?=[A-Z\"'(])", text) if each]


def faults_of(text: Text) -> Iterator[Fault]:
    for each in sentences(text.text):
        words = re.findall(r"[^\W\d_][\w'’-]*", each)
        if len(words) > LONGEST:
            yield Fault(text, f"sentence of {len(words)} words", each)
    for rule, pattern in PATTERNS.items():
        for found in re.finditer(pattern, text.text):
            yield Fault(text, rule, text.text[max(0, found.start() - 30) : found.end() + 30])


def docstrings(path: Path) -> Iterator[Text]:
    """The docstrings of a module, and the texts of the errors that it raises."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node, clean=True)
            if found:
                text = re.sub(r"\n *\n?References\n *-+\n.*", "", found, flags=re.S)
                text = re.sub(r"^\w[\w*, ]* : .*$", "", text, flags=re.M)
                formula = r"^( *)\.\. math::.*\n(?:(?:\1 +.*)?\n)*"
                text = re.sub(formula, lambda m: "\n" * m[0].count("\n"), text, flags=re.M)
                yield from paragraphs(text, path, node.body[0].lineno)
        if isinstance(node, ast.Raise) and node.exc is not None:
            parts = [n.value for n in ast.walk(node.exc) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            yield Text(path, node.lineno, plain("x".join(parts)))


def texts() -> Iterator[Text]:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    for path in sorted(
        p for p in pages if "generated" not in p.parts and p.relative_to(ROOT).parts[:2] != ("docs", "gallery")
    ):
        yield from paragraphs(path.read_text("utf-8"), path)
    for path in sorted((ROOT / "levattn").rglob("*.py")):
        yield from docstrings(path)


def syllables(word: str) -> int:
    """The syllables of a word, by its groups of vowels: within one of a dictionary's for most words."""
    groups = len(re.findall(r"[aeiouy]+", word.lower()))
    silent = re.search(r"[^aeiouyl]e$|[^aeiouydt]ed$", word.lower()) is not None
    return max(1, groups - silent)


def grade(page: str) -> float:
    """The grade of Flesch and Kincaid: the years of school that a text takes."""
    found = [each for text in paragraphs(page, Path()) for each in sentences(text.text)]
    words = [word for each in found for word in re.findall(r"[A-Za-z][A-Za-z'’]*", each)]
    if not words:
        return 0.0
    return 0.39 * len(words) / len(found) + 11.8 * sum(map(syllables, words)) / len(words) - 15.59


def graded() -> list[Path]:
    """The pages that a reader begins with."""
    return [ROOT / "README.md", ROOT / "docs" / "start.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]


def print_grades(revision: str | None) -> None:
    """Print the grades of README and guide, and those that a revision had."""
    for path in graded():
        name, line = str(path.relative_to(ROOT)), f"{grade(path.read_text('utf-8')):5.1f}"
        if revision is not None:
            before = subprocess.run(("git", "show", f"{revision}:{name}"), cwd=ROOT, capture_output=True, text=True)
            line += f"  (was {grade(before.stdout):.1f})" if not before.returncode else "  (new)"
        print(f"{line}  {name}")


def main() -> int:
    if sys.argv[1:2] == ["--grades"]:
        print_grades(sys.argv[2] if len(sys.argv) > 2 else None)
        return 0
    faults = [
        fault for text in texts() for fault in faults_of(text) if not any(part in fault.passage for part in EXCEPTIONS)
    ]
    for fault in faults:
        print(fault)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
