"""What a rewriting of prose changed besides words: ``python -m tests.figures REVISION [FOLDER ...]``.

The numbers and the code of each page and of each module's docstrings and messages are compared with those of a
revision. A number or a piece of code that came or went is printed; a rewriting of prose alone prints nothing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^[ \t]*(`{3,})(?!\{(?:note|tip|warning|admonition)).*?^[ \t]*\1[ \t]*$", re.M | re.S)
NUMBER = re.compile(r"(?<![\w.])\d[\d ]*(?:\.\d+)?(?:e-?\d+)?(?!\w)|(?<=×)\d+|10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")


def figures(page: str) -> Counter[str]:
    """The blocks of code of a page or docstring, its lines of doctest, and the numbers beside them."""
    found = Counter(re.sub(r"\s+", " ", block[0]) for block in BLOCK.finditer(page))
    rest = BLOCK.sub("", page)
    found.update(line.strip() for line in rest.splitlines() if line.strip().startswith((">>> ", "... ")))
    rest = "\n".join(line for line in rest.splitlines() if not line.strip().startswith((">>> ", "... ")))
    found.update(re.sub(r" (?!\d{3})|\s+$", "", number) for number in NUMBER.findall(rest))
    return found


def prose(path: str, text: str) -> str:
    """The page itself, or the docstrings and strings of a module."""
    if not path.endswith(".py"):
        return text
    strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return "\n\n".join(each for each in strings if isinstance(each, str))


def git(*words: str) -> str:
    return subprocess.run(("git", *words), cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main(revision: str, folders: list[str]) -> int:
    changed = 0
    for path in git("diff", "--name-only", "--diff-filter=M", revision, "--", *(folders or ["."])).splitlines():
        if not path.endswith((".md", ".py")):
            continue
        before = figures(prose(path, git("show", f"{revision}:{path}")))
        after = figures(prose(path, (ROOT / path).read_text("utf-8")))
        for sign, more in (("-", before - after), ("+", after - before)):
            for found, times in sorted(more.items()):
                changed += 1
                print(f"{path}: {sign} {found}" + (f" ({times} times)" if times > 1 else ""))
    return bool(changed)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("Name a revision: python -m tests.figures REVISION [FOLDER ...]")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
