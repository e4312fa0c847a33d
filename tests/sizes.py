"""Count the code of the package, and the parameters of its public functions.

``python -m tests.sizes`` prints lines of Python without docstrings, comments and blanks, lines of CUDA as they are,
and files. It lists all public functions and classes with more than seven parameters. A folder as argument counts that
folder alone; of `tests` it says how far they reach into the library (`reach.py`).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import levattn
from tests import reach

ROOT = Path(levattn.__file__).parent
PACKAGES = ("", "attention", "attention.rates", "definitions", "nn", "sketch", "states", "plots", "datasets", "linalg")
PACKAGES += ("distributed.dask", "distributed.torch", "integrations.transformers", "integrations.sklearn")
MANY = 7


def code_lines(source: str) -> int:
    """Return the number of lines that hold code."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            skipped |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(1 for number, line in lines if number not in skipped and line.strip() and line.strip()[0] != "#")


def counted(folder: Path) -> dict[str, int]:
    """Return the lines of Python and of CUDA in a folder, and the number of files."""
    python, cuda = sorted(folder.rglob("*.py")), [p for p in folder.rglob("*") if p.suffix in (".cu", ".cuh")]
    return {
        "lines of Python": sum(code_lines(path.read_text("utf-8")) for path in python),
        "lines of CUDA": sum(len(path.read_text("utf-8").splitlines()) for path in cuda),
        "files of Python": len(python),
        "files of CUDA": len(cuda),
    }


def parameters_of(value: Any) -> int:
    """Return the number of parameters of a function, or of making an object."""
    try:
        return len(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return 0


def is_result(value: Any) -> bool:
    """Tell whether functions alone make objects of a class: its docstring has attributes, and no parameters."""
    return isinstance(value, type) and "Attributes\n" in (text := value.__doc__ or "") and "Parameters\n" not in text


def public_calls() -> Iterator[tuple[str, int]]:
    """Yield all public functions, and classes whose objects users make, with the number of their parameters."""
    seen: set[int] = set()
    for package in PACKAGES:
        module = importlib.import_module(f"levattn.{package}".rstrip("."))
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and id(value) not in seen and not is_result(value):
                seen.add(id(value))
                yield f"{module.__name__}.{name}", parameters_of(value)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    for what, number in counted(folder).items():
        print(f"{number:7d} {what}")
    if folder.resolve() == Path(__file__).parent:
        print("\n".join(reach.table()))
    if len(sys.argv) == 1:
        calls = sorted(public_calls(), key=lambda pair: (-pair[1], pair[0]))
        print(f"{len(calls):7d} public functions and classes; calls with more than {MANY} parameters:")
        print("\n".join(f"{number:7d} {name}" for name, number in calls if number > MANY))
