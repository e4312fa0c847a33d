"""Options that several commands have."""

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from levattn._core.checks import check_epsilon, fraction
from levattn.cli.files import KeyFiles

RESULTS = "Results"
WORK = "Reading of keys"
FOR_QUERIES = "For queries like given ones"
PAGE = "https://levattn.readthedocs.io/en/stable/program.html"


def by_library(name: str) -> Any:
    """Return a check of an optional value: the library's own check of that name."""

    def check(value: float | None) -> float | None:
        from levattn.sensitivity import groups

        checks: dict[str, Callable[[float], object]] = {
            "epsilon": check_epsilon,
            "angle": groups.check_angle,
            "coverage": partial(fraction, "coverage"),
            "mass": partial(fraction, "mass"),
        }
        try:
            if value is not None:
                checks[name](value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        return value

    return check


def ends_in(*suffixes: str) -> Any:
    """Return a check that a file, if named, ends in any of these suffixes."""

    def check(path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() not in suffixes:
            raise typer.BadParameter(f"{path} ends in {path.suffix!r}, expected {' or '.join(suffixes)}")
        return path

    return check


AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        rich_help_panel=RESULTS,
        help=f"Print one JSON document instead of the table. {PAGE} lists its keys.",
    ),
]
HeavyFrom = Annotated[
    float, typer.Option(callback=by_library("epsilon"), help="Least score of a heavy key, in (0, 1].")
]
Picture = Annotated[
    Path | None,
    typer.Option(
        callback=ends_in(".png", ".svg", ".pdf"),
        rich_help_panel=RESULTS,
        help="Draw the results into this .png, .svg or .pdf file: the scores of a file, largest first, or the `mass` "
        "of each layer and head of a model.",
    ),
]
WebPage = Annotated[
    Path | None,
    typer.Option(
        callback=ends_in(".html", ".htm"),
        rich_help_panel=RESULTS,
        help="Write the results into this .html file: one page for a browser, without other files.",
    ),
]
Profile = Annotated[
    str,
    typer.Option(
        metavar="auto|none|NAME|FILE",
        help="Profile that decides how the budget is split over the heads: the known one of this model (auto), none, "
        "so that all heads have the same share, a known one by its name, or a file that `levattn profile` made. Known "
        "are those of levattn, and those in the folder that LEVATTN_PROFILES names.",
    ),
]
ModelPath = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a Hugging Face model: config.json, .safetensors and a tokenizer; or a .gguf file. Nothing is "
        "downloaded.",
    ),
]


KeyPaths = Annotated[
    list[Path],
    typer.Argument(
        help="Keys (..., n, d) of floats: .npy, .npz, .safetensors (or its .index.json), a zarr store, columns of a "
        ".parquet, .csv or .tsv table, or a folder of such files; - for one of the first three from standard input. "
        "The rows of several files follow each other.",
        metavar="PATH...",
        show_default=False,
    ),
]
Tensor = Annotated[
    list[str] | None,
    typer.Option(
        rich_help_panel=WORK,
        help="Name of the array, if a file holds several. If given more than once, each array gets its own table, or "
        "with --json a line.",
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=WORK,
        metavar="NAME,NAME,...",
        help="Columns of a table, one for each feature; all columns of numbers if left out. A name with a comma is in "
        "double quotes.",
    ),
]
Id = Annotated[
    str | None,
    typer.Option(
        "--id",
        rich_help_panel=WORK,
        metavar="NAME",
        help="Column of a table that names its rows, by integers or strings. The results name keys by it too.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=WORK,
        metavar="NAME",
        help="Column of a table with the weight w of each row: scores are those of √w times the row. "
        "With --function 2.",
    ),
]
Dtype = Annotated[
    Literal["float64", "float32", "float16"] | None,
    typer.Option(rich_help_panel=WORK, help="Convert the numbers while they are read. Integers need it."),
]
CheckpointPath = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=WORK,
        help="File with the progress of the passes, written every 4 million keys or so. If it exists, the passes "
        "continue from it. It is removed in the end.",
    ),
]
QueriesTensor = Annotated[
    str | None,
    typer.Option(rich_help_panel=FOR_QUERIES, help="Name of the array, if the file of the queries holds several."),
]


def key_files(
    files: list[Path],
    tensor: str | None,
    columns: str | None,
    id: str | None,
    dtype: str | None,
    memory: int | None,
    weights: str | None,
) -> KeyFiles:
    """Return the files of keys that a command line names, or raise; `memory` is in MiB."""
    names = None if columns is None else _names_in(columns)
    return KeyFiles(tuple(files), tensor, names, id, dtype, None if memory is None else memory * 2**20, weights)


def tensors_in(tensor: list[str] | None, alone: dict[str, Path | None]) -> list[str | None]:
    """Return the arrays that --tensor names, or None alone; raise if a file of `alone`, for one array, meets several.

    alone: the files that are for one array, by their options.
    """
    names: list[str | None] = [*tensor] if tensor else [None]
    if len(names) > 1 and any(path is not None for path in alone.values()):
        *first, last = alone
        raise typer.BadParameter(f"{', '.join(first)} and {last} are for one array; give one --tensor")
    return names


def _names_in(columns: str) -> tuple[str, ...]:
    """Return the names in --columns, or raise."""
    try:
        (names,) = map(tuple, csv.reader([columns], strict=True))
    except (csv.Error, ValueError):  # an open quote, or more lines than one
        names = ("",)
    if not names or "" in names or len(set(names)) < len(names):
        raise typer.BadParameter(
            f"--columns is {columns!r}, expected different names with commas between them. Put a name that has a "
            "comma into double quotes"
        )
    return names


def slots_or_share(budget: float, heads: str) -> float:
    """Return --budget as a number of slots (int) or a share (float), or raise; a profile splits shares alone."""
    if not (0 < budget <= 1 or (budget > 1 and budget.is_integer())):
        raise typer.BadParameter(f"--budget is {budget}, expected a whole number of slots or a share in (0, 1]")
    if heads not in ("auto", "none") and budget > 1:
        raise typer.BadParameter(f"--budget is {budget:g} and --heads is given, expected a share in (0, 1] to split")
    return int(budget) if budget > 1 else budget
