"""How far tests reach into the library: `python -m tests.sizes tests` prints it.

A test is public if a user could have written it. Such a test survives each change inside the library, and fails where
a user would miss something. A file of tests is inside if it does one of these:

- it imports a module or a name of levattn that is not public. Public are the names in `__all__` of modules without
  underscore, and what `levattn.__all__` names in the homes of functions and errors (`HOMES`);
- it takes an attribute with an underscore that the library defines;
- it patches an object. To hide a package (``None`` in `sys.modules`) or to set a variable of the environment does not
  count;
- it uses a file that is inside, unless that stands for something a user has (`STAND_INS`).

The share is that of lines in files `test_*.py`. Each file inside states the reason in its docstring, after `INSIDE`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import levattn

__all__ = ["INSIDE", "MOST", "found", "reasons", "table"]

TESTS, LIBRARY = Path(__file__).parent, Path(levattn.__file__).parent
INSIDE = "Inside: "  # the reason follows, in the docstring of a file of tests
MOST = 0.5  # of all lines in files of tests
HOMES = ("levattn.exceptions", "levattn.functions")
# Files of the tests that reach inside, and that a test may use and be public: what they stand for a user has.
STAND_INS = {
    "conftest": "settings of the whole suite",
    "emulator": "a CUDA device, where there is none",
    "cli_program": "a shell that runs the program",
    "adversary/routes": "calls of users; only the default sizes of their sketches are read inside",
}
_PRIVATE = re.compile(r"\blevattn(\.\w+)*\._(?!_)\w+")
_FROM = re.compile(r"\bfrom (levattn[\w.]*) import (\w+(?:, \w+)*)")
# a function, a class, or what is assigned or has a type
_DEFINED = re.compile(
    r"(?:\bdef |\bclass |\bself\.|^ *)(_[a-z]\w*[a-z0-9])\b(?= *(?:[(:=]|\[[^]]*\] *=)|, )",
    re.MULTILINE | re.IGNORECASE,
)
_ALL = re.compile(r"^__all__ = \[(.*?)\]", re.MULTILINE | re.DOTALL)
_PATCHES = {"setattr", "delattr", "setitem", "delitem"}


@cache
def public_names(module: str) -> frozenset[str]:
    """Return the names that users may import from a module; none if it is not public."""
    place = LIBRARY.joinpath(*module.split(".")[1:])
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if re.search(r"\._(?!_)", module) or not path.is_file():
        return frozenset()
    text = path.read_text("utf-8")
    names = {name for found in _ALL.findall(text) for name in re.findall(r'"(\w+)"', found)}
    if module in HOMES:
        names |= {*re.findall(r"^class (\w+)", text, re.MULTILINE)} & {*levattn.__all__}
    return frozenset(names)


def is_public_module(name: str) -> bool:
    """Say whether a name is a module that users may import."""
    return bool(public_names(name)) or name in ("levattn.integrations", "levattn.distributed")


@cache
def _definitions(path: Path) -> frozenset[str]:
    """Return the names with an underscore that a file defines."""
    return frozenset(_DEFINED.findall(path.read_text("utf-8")))


@cache
def private_attributes() -> frozenset[str]:
    """Return the names with an underscore that the library defines."""
    return frozenset[str]().union(*map(_definitions, LIBRARY.rglob("*.py")))


def of_import(module: str, names: list[str]) -> Iterator[str]:
    """Yield what an import takes that is not public."""
    if module.partition(".")[0] == "levattn":
        for name in names:
            if name not in public_names(module) and not is_public_module(f"{module}.{name}"):
                yield f"{module}.{name}"


def of_text(text: str) -> Iterator[str]:
    """Yield what a text takes that is not public: a name, or a program for another process."""
    yield from (match.group() for match in _PRIVATE.finditer(text))
    for module, names in _FROM.findall(text):
        yield from of_import(module, names.split(", "))


def of_node(node: ast.AST, own: frozenset[str]) -> Iterator[str]:
    """Yield what a node of source takes that is not public; what the file itself defines is its own."""
    match node:
        case ast.Import():
            for alias in node.names:
                if alias.name.partition(".")[0] == "levattn" and not is_public_module(alias.name):
                    yield alias.name
        case ast.ImportFrom(module=str(module), level=0):
            yield from of_import(module, [alias.name for alias in node.names])
        case ast.Attribute(value=ast.Name(), attr=attr) if attr in _PATCHES:
            yield "patches"
        case ast.Attribute(attr=attr) if attr in private_attributes() and attr not in own:
            yield f".{attr}"
        case ast.Constant(value=str(text)):
            yield from of_text(text)


def _hides_a_package(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("setitem", "delitem")
        and ast.unparse(node.args[0]) == "sys.modules"
    )


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text("utf-8"))))


@cache
def _own_reasons(path: Path) -> tuple[str, ...]:
    """Return what a file itself takes that is not public."""
    nodes, own = _nodes(path), frozenset[str]().union(*map(_definitions, {path, *_used(path)}))
    documents = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    hiding = {id(node.func) for node in nodes if isinstance(node, ast.Call) and _hides_a_package(node)}
    skipped = documents | hiding
    return tuple(reason for node in nodes if id(node) not in skipped for reason in of_node(node, own))


def reasons(path: Path) -> tuple[str, ...]:
    """Return what a file takes that is not public, in order; a file that it uses stands as its name."""
    found, seen, left = [*_own_reasons(path)], {path}, [path]
    while left:
        for used in sorted(_used(left.pop()) - seen):
            seen.add(used)
            name = used.relative_to(TESTS).with_suffix("").as_posix().removesuffix("/__init__")
            if not {name, name.partition("/")[0]} & set(STAND_INS):
                left.append(used)
                found += [name] if _own_reasons(used) else []
    return tuple(dict.fromkeys(found))


@cache
def _used(path: Path) -> set[Path]:
    """Return the files of the tests that a file imports."""
    names: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files: set[Path] = set()
    for name in names:
        for folder in {path.parent, TESTS}:
            place = folder.joinpath(*name.removeprefix("tests.").split("."))
            files |= {file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()}
    return files - {path}


def found(folder: Path = TESTS) -> dict[Path, tuple[int, tuple[str, ...]]]:
    """Return the lines of each file of tests, and what makes it inside."""
    files = sorted(folder.rglob("test_*.py"))
    return {path: (len(path.read_text("utf-8").splitlines()), reasons(path)) for path in files}


def table() -> Iterator[str]:
    """Yield the lines in files that are inside, and the files with what they take."""
    files = found()
    lines = sum(count for count, _ in files.values())
    inside = {path: of_file for path, of_file in files.items() if of_file[1]}
    reached = sum(count for count, _ in inside.values())
    yield f"{lines:7d} lines of tests, {reached} ({reached / lines:.1%}) in {len(inside)} files that reach inside:"
    for path, (count, why) in inside.items():
        more = f" and {len(why) - 4} more" if len(why) > 4 else ""
        yield f"{count:7d} {path.relative_to(TESTS)}: {', '.join(why[:4])}{more}"
