"""The oldest versions that pyproject.toml allows, as requirements for pip.

``python tests/minimum.py`` writes those of the library's own dependencies, ``python tests/minimum.py plot sklearn``
those of these extras too. Of a bound such as ``>=2.0`` it takes the last 2.0.x.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BOUND = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?P<extras>\[[a-z,]+\])?>=(?P<version>\d+(\.\d+)*)")


def project() -> dict[str, Any]:
    """The table ``[project]`` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def lowest(requirement: str) -> str:
    """``numpy>=2.0`` as ``numpy==2.0.*``."""
    found = BOUND.fullmatch(requirement)
    if found is None:
        raise ValueError(f"requirement {requirement!r}: expected NAME>=VERSION and nothing else")
    return f"{found['name']}{found['extras'] or ''}=={found['version']}.*"


def of_extra(extra: str) -> Iterator[str]:
    """The requirements of an extra, and of the extras that it names."""
    for requirement in project()["optional-dependencies"][extra]:
        named = re.fullmatch(r"levattn\[([a-z0-9,]+)\]", requirement)
        if named is None:
            yield requirement
            continue
        for other in named[1].split(","):
            yield from of_extra(other)


def requirements(*extras: str) -> Iterator[str]:
    """The requirements of the library, then those of extras."""
    yield from project()["dependencies"]
    for extra in extras:
        yield from of_extra(extra)


if __name__ == "__main__":
    if sys.version_info >= (3, 13):
        sys.exit("the oldest numpy and scipy have no wheels for this Python: run `make minimum PYTHON=python3.12`")
    sys.stdout.writelines(f"{lowest(requirement)}\n" for requirement in requirements(*sys.argv[1:]))
