"""What is published: its metadata, its version in every place that names it, its bounds and its citation.

``make package`` builds the archives and tries the wheel (tests/installed.py); ``make minimum`` tests with the oldest
dependencies (tests/minimum.py). Here only sources are read.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import levattn
from minimum import lowest, of_extra, project, requirements

ROOT = Path(__file__).parents[2]
WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TABLE = project()
EXTRAS: dict[str, list[str]] = TABLE["optional-dependencies"]
CONTRIBUTORS = {"lint", "test", "bench", "docs"}  # extras that no user needs
HEADING = re.compile(r"^## (?P<version>\d+\.\d+\.\d+) \((?P<date>unreleased|\d{4}-\d\d-\d\d)\)$")


def headings() -> list[re.Match[str]]:
    """The headings of releases in the changelog, newest first; one that is not in the form stops the tests."""
    lines = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8").splitlines()
    found = [(line, HEADING.match(line)) for line in lines if line.startswith("## ")]
    assert all(match for _, match in found), [line for line, match in found if not match]
    return [match for _, match in found if match]


def citation() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    return found


# -- the version --------------------------------------------------------------------------------------


def test_the_version_is_written_in_the_package_alone() -> None:
    assert "version" not in TABLE
    assert TABLE["dynamic"] == ["version", "readme"]
    assert WHOLE["tool"]["hatch"]["version"]["path"] == "levattn/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", levattn.__version__)


def test_the_changelog_begins_with_this_version() -> None:
    assert headings()[0]["version"] == levattn.__version__


def test_releases_of_the_changelog_are_ordered() -> None:
    versions = [tuple(map(int, found["version"].split("."))) for found in headings()]
    assert versions == sorted(set(versions), reverse=True)
    dates = [date.fromisoformat(found["date"]) for found in headings() if found["date"] != "unreleased"]
    assert dates == sorted(dates, reverse=True)
    assert len(dates) >= len(versions) - 1  # only the newest may be unreleased


def test_the_citation_is_of_this_version() -> None:
    cited = citation()
    released = headings()[0]["date"]
    assert cited["version"] == levattn.__version__
    assert str(cited.get("date-released", "unreleased")) == released


# -- metadata -----------------------------------------------------------------------------------------


def test_classifiers_are_sorted_and_name_no_license() -> None:
    classifiers = TABLE["classifiers"]
    assert classifiers == sorted(set(classifiers))
    assert not [text for text in classifiers if text.startswith("License")]  # the SPDX expression stands for it
    assert "Typing :: Typed" in classifiers


def test_classifiers_name_each_python_from_the_oldest_on() -> None:
    oldest = re.fullmatch(r">=3\.(\d+)", TABLE["requires-python"])
    assert oldest is not None
    minors = [int(found[1]) for text in TABLE["classifiers"] if (found := re.fullmatch(r".* :: 3\.(\d+)", text))]
    assert minors == list(range(int(oldest[1]), int(oldest[1]) + len(minors)))
    assert minors


def test_tools_check_code_for_the_oldest_python() -> None:
    tools = WHOLE["tool"]
    oldest = TABLE["requires-python"].removeprefix(">=")
    assert tools["mypy"]["python_version"] == oldest
    assert tools["ruff"]["target-version"] == "py" + oldest.replace(".", "")


def test_license_and_readme_are_there() -> None:
    assert TABLE["license"] == "Apache-2.0"
    assert all((ROOT / name).is_file() for name in [*TABLE["license-files"], "README.md"])
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_what_is_not_code_is_within_the_package() -> None:
    package = ROOT / "levattn"
    assert (package / "py.typed").is_file()
    assert list((package / "data").glob("*.npz"))
    assert (package / "data" / "NOTICE.md").is_file()
    assert list((package / "_kernels").rglob("*.cu"))


def test_the_sdist_names_folders_and_files_that_are_there() -> None:
    included = WHOLE["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [name for name in included if not (ROOT / name.lstrip("/")).exists()] == []
    assert {"/levattn", "/tests", "/CITATION.cff"} <= set(included)


# -- dependencies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("requirement", TABLE["dependencies"])
def test_a_dependency_has_a_lower_bound_and_no_upper_one(requirement: str) -> None:
    assert re.fullmatch(r"[a-z-]+==\d+\.\d+\.\*", lowest(requirement))


@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - CONTRIBUTORS))
def test_an_extra_of_users_has_lower_bounds(extra: str) -> None:
    found = [lowest(requirement) for requirement in of_extra(extra)]
    assert found
    assert all(text.endswith(".*") for text in found)


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_an_extra_names_extras_that_there_are(extra: str) -> None:
    named = [
        name for text in EXTRAS[extra] for found in re.findall(r"^levattn\[(.*)\]$", text) for name in found.split(",")
    ]
    assert set(named) <= set(EXTRAS) - {extra}


def test_requirements_of_an_extra_follow_those_of_the_library() -> None:
    assert list(requirements()) == TABLE["dependencies"]
    whole = list(requirements("cli"))
    assert whole[: len(TABLE["dependencies"])] == TABLE["dependencies"]
    assert {"matplotlib", "typer", "pyarrow"} <= {text.partition(">=")[0] for text in whole}


@pytest.mark.parametrize(
    "requirement", ["numpy", "numpy<3", "numpy>=2,<3", "numpy~=2.0", "numpy>=2; python_version<'4'"]
)
def test_other_bounds_have_no_lowest_version(requirement: str) -> None:
    with pytest.raises(ValueError, match="expected NAME>=VERSION"):
        lowest(requirement)


def test_every_extra_that_an_error_names_is_there() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "levattn").rglob("*.py")]
    named = {
        name
        for text in sources
        for found in re.findall(r"levattn\[([a-z0-9,]+)\]\"|needing\(.*, \"(\w+)\"\)", text)
        for name in "".join(found).split(",")
    }
    assert named
    assert named <= set(EXTRAS)


# -- citation -----------------------------------------------------------------------------------------


def test_the_citation_says_what_the_format_requires() -> None:
    cited = citation()
    assert cited["cff-version"] == "1.2.0"
    assert cited["type"] == "software"
    assert cited["title"] == TABLE["name"]
    assert cited["license"] == TABLE["license"]
    assert cited["authors"] == TABLE["authors"]
    assert cited["message"]


def test_the_citation_refers_to_the_paper() -> None:
    (paper,) = citation()["references"]
    assert paper["type"] == "conference-paper"
    assert [author["family-names"] for author in paper["authors"]] == ["Kannan", "Bhattacharyya", "Kacham", "Woodruff"]
    assert paper["identifiers"][0]["value"] == "arXiv:2410.05462"
    assert paper["url"] in TABLE["urls"].values()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", ["test", "test-all", "cuda", "package", "minimum", "docs"])
def test_recipes_are_commands_that_a_shell_takes(target: str) -> None:
    """The marks of make count at the beginning of a line alone: behind other commands a shell would run them."""
    printed = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "python" in printed
    assert not re.findall(r"[;&|]\s*[@+]\S*", printed)
