"""The ``levattn`` program: universal sets of keys in files, and a demonstration on a real encoder.

Results go to standard output, as tables or (``--json``) as one JSON document; everything else goes to
standard error. Exit status: 0 done, 1 the data or the machine did not allow it, 2 the command line is wrong.
"""

import itertools
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import numpy as np
import numpy.typing as npt

import levattn
from levattn.io import replace_file

if TYPE_CHECKING:
    import typer
    from rich.console import Console
    from rich.table import Table

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

DEMO_EPSILON = 0.1
_INSTALL = 'pip install "levattn[cli]"'
_PICTURES = (".png", ".svg", ".pdf")
_INDICES_SHOWN = 12
_PIPE_WIDTH = 1000
_VACUOUS = "vacuous: the bound rank/ε is not below n, so the theorem alone does not promise that any key is left out"


def main() -> None:
    """Run the program."""
    try:
        app = build_app()
    except ModuleNotFoundError as error:
        sys.exit(f"levattn: the program needs {error.name}, which is not installed: {_INSTALL}")
    app()


class Method(StrEnum):
    """The exact routes to leverage scores."""

    auto = "auto"
    gram = "gram"
    qr = "qr"
    svd = "svd"


def build_app() -> "typer.Typer":
    """Return the program as a typer application.

    Returns
    -------
    typer.Typer
        The application.
    """
    import rich  # noqa: F401 (so that it is missed here, not half-way)
    import typer

    app = typer.Typer(
        add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
    )

    def in_unit_interval(epsilon: float | None) -> float | None:
        if epsilon is not None and not 0 < epsilon <= 1:
            raise typer.BadParameter(f"epsilon is {epsilon}, expected a number in (0, 1]")
        return epsilon

    def ends_in(*suffixes: str) -> Any:
        def check(path: Path | None) -> Path | None:
            if path is not None and path.suffix.lower() not in suffixes:
                raise typer.BadParameter(f"{path} ends in {path.suffix!r}, expected {' or '.join(suffixes)}")
            return path

        return check

    def show_version(asked: bool) -> None:
        if asked:
            typer.echo(f"levattn {levattn.__version__}")
            raise typer.Exit

    @app.callback()
    def program(
        _version: Annotated[
            bool, typer.Option("--version", is_eager=True, callback=show_version, help="Show the version.")
        ] = False,
    ) -> None:
        """Universal sets of attention keys: the few keys that any query can ever attend to heavily."""

    @app.command()
    def demo(
        epsilon: Annotated[
            float, typer.Option(callback=in_unit_interval, help="Threshold of a heavy score, in (0, 1].")
        ] = DEMO_EPSILON,
        out: Annotated[Path, typer.Option(help="Folder for the pictures; made if missing.")] = Path("levattn-demo"),
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    ) -> None:
        """Compute and check the universal sets of all 72 heads of a real encoder, and draw them."""
        with _errors_in_one_line():
            _demo(epsilon, out, as_json)

    @app.command("universal-set")
    def universal_set(
        file: Annotated[Path, typer.Argument(help="Keys (..., n, d) in a .npy, .npz or .safetensors file.")],
        epsilon: Annotated[
            float | None,
            typer.Option(callback=in_unit_interval, help="Keys that can score at least this, in (0, 1]."),
        ] = None,
        size: Annotated[int | None, typer.Option(min=0, help="Or: this many keys of highest score.")] = None,
        tensor: Annotated[str | None, typer.Option(help="Name of the array, if the file holds several.")] = None,
        center: Annotated[bool, typer.Option("--center", help="Subtract the mean key first.")] = False,
        method: Annotated[Method, typer.Option(help="How to compute the scores.")] = Method.auto,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
        plot: Annotated[
            Path | None,
            typer.Option(callback=ends_in(*_PICTURES), help="Draw the spectrum here (.png, .svg, .pdf)."),
        ] = None,
        output: Annotated[
            Path | None,
            typer.Option("--output", "-o", callback=ends_in(".npz"), help="Write the sets here (.npz)."),
        ] = None,
    ) -> None:
        """Find the universal set of the keys in a file, one set per matrix."""
        if (epsilon is None) == (size is None):
            raise typer.BadParameter("give exactly one of --epsilon and --size")
        with _errors_in_one_line():
            _universal_set(_Request(file, tensor, epsilon, size, center, method), as_json, plot, output)

    return app


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Report in one line what bad data, missing packages or a full disk bring about."""
    try:
        yield
    except MemoryError:
        _fail("not enough memory; split the file by heads or by layers")
    except PermissionError as error:
        _fail(f"{error.filename}: no permission; choose another place or change its permissions")
    except (OSError, ValueError, ImportError) as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"levattn: {' '.join(message.split())}\n")
    sys.exit(1)


# -- levattn universal-set -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    file: Path
    tensor: str | None
    epsilon: float | None
    size: int | None
    center: bool
    method: Method


def _universal_set(request: _Request, as_json: bool, plot: Path | None, output: Path | None) -> None:
    for path in (plot, output):
        if path is not None and not path.parent.is_dir():
            _fail(f"{path}: there is no folder {path.parent}; make it first")
    source = levattn.open_keys(request.file, tensor=request.tensor)
    if request.size is not None and request.size > source.shape[-2]:
        import typer

        raise typer.BadParameter(f"--size is {request.size}, but {request.file} holds {source.shape[-2]} keys")
    sets = levattn.universal_set(
        source, request.epsilon, size=request.size, method=request.method.value, center=request.center
    )
    picture = None if plot is None else _spectrum(sets, request, plot.suffix)
    if output is not None:
        with replace_file(output) as stream:
            arrays: dict[str, Any] = _arrays(sets)
            np.savez(stream, **arrays)
    if plot is not None and picture is not None:
        with replace_file(plot) as stream:
            stream.write(picture)
    if as_json:
        _print_json(_request_report(request, source) | {"sets": _set_reports(sets)})
    else:
        _print_sets(sets, source)


def _spectrum(sets: levattn.UniversalSet, request: _Request, suffix: str) -> bytes:
    from levattn import plots

    figure, ((ax,),) = plots.new_figure()
    plots.LeverageSpectrumDisplay.from_scores(
        sets.scores, epsilon=request.epsilon, rank=sets.rank, sizes=sets.sizes, ax=ax
    )
    ax.set_title(request.file.name if request.tensor is None else f"{request.file.name}: {request.tensor}")
    return plots.figure_bytes(figure, suffix)


def _arrays(sets: levattn.UniversalSet) -> dict[str, npt.NDArray[Any]]:
    """Return what a set says as arrays, none of which needs pickling."""
    names = (
        "mask",
        "scores",
        "sizes",
        "epsilon",
        "guarantee",
        "rank",
        "size_bound",
        "is_vacuous",
        "condition",
        "f",
    )
    arrays = {name: np.asarray(getattr(sets, name)) for name in names}
    return arrays | {"indices": sets.indices} if sets.mask.ndim == 1 else arrays


def _request_report(request: _Request, source: levattn.KeySource) -> dict[str, Any]:
    return {
        "levattn": levattn.__version__,
        "file": str(request.file),
        "tensor": source.tensor,
        "shape": source.shape,
        "dtype": source.dtype.name,
        "method": request.method.value,
        "center": request.center,
    }


def _set_reports(sets: levattn.UniversalSet) -> list[dict[str, Any]]:
    """One report per matrix; `item` is its place in the batch, empty for a single matrix."""
    names = ("sizes", "epsilon", "rank", "size_bound", "is_vacuous", "condition")
    lead = sets.mask.shape[:-1]
    columns = {name: np.broadcast_to(getattr(sets, name), lead) for name in names}
    return [
        {"item": item, "size": int(columns["sizes"][item])}
        | {name: columns[name][item].item() for name in names[1:]}
        | {"guarantee": sets.guarantee, "f": sets.f, "indices": np.flatnonzero(sets.mask[item]).tolist()}
        for item in np.ndindex(lead)
    ]


def _print_sets(sets: levattn.UniversalSet, source: levattn.KeySource) -> None:
    n, d = source.shape[-2:]
    table = _table("item", "n", "d", "rank", "condition", "ε", "|U|", "bound", "vacuous", "guarantee")
    reports = _set_reports(sets)
    for report in reports:
        table.add_row(
            ",".join(map(str, report["item"])) or "-",
            str(n),
            str(d),
            str(report["rank"]),
            f"{report['condition']:.3g}",
            f"{report['epsilon']:.4g}",
            str(report["size"]),
            f"{report['size_bound']:.4g}",
            "yes" if report["is_vacuous"] else "no",
            report["guarantee"],
        )
    console = _console()
    console.print(table)
    if len(reports) == 1:
        indices = reports[0]["indices"]
        shown = ", ".join(map(str, indices[:_INDICES_SHOWN])) or "none"
        rest = len(indices) - _INDICES_SHOWN
        console.print(f"keys: {shown}" + (f" and {rest} more (all with --json or --output)" if rest > 0 else ""))
    if any(report["is_vacuous"] for report in reports):
        console.print(_VACUOUS)


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    # A pipe has no width: nothing is cut off there.
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_PIPE_WIDTH)


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)  # thirteen columns in 80 characters
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(_finite(document), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- levattn demo ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _HeadReport:
    """What the demonstration says of one head."""

    layer: int
    head: int
    n: int
    d: int
    rank: int
    condition: float
    size: int
    size_bound: float
    is_vacuous: bool
    heavy: int  # entries >= epsilon of the queries of the text
    heavy_worst_case: int  # the same of the n worst-case queries
    missed: int  # of both, against brute force
    captured_x2: float
    captured_softmax: float
    captured_softmax_row_norm: float  # by as many keys, of largest norm
    captured_softmax_oracle: float  # by as many keys, of largest softmax mass
    heavy_softmax: int  # softmax entries >= epsilon, which the theorem does not cover
    heavy_softmax_in_set: int


@dataclass(frozen=True)
class _Head:
    report: _HeadReport
    scores: Floats
    norms: Floats
    x2_mass: Floats  # (n,) mean over the queries
    softmax_mass: Floats


def _demo(epsilon: float, out: Path, as_json: bool) -> None:
    from rich.console import Console
    from rich.progress import track

    from levattn import datasets, plots

    if out.exists() and not out.is_dir():
        _fail(f"{out} is not a folder; name another with --out")
    figure, axes = plots.new_figure(2, 2)
    encoder = datasets.minilm()
    layers, per_layer = encoder.keys.shape[:2]
    places = list(itertools.product(range(layers), range(per_layer)))
    errors = Console(stderr=True)
    shown = track(places, "heads", console=errors, transient=True) if errors.is_terminal else places
    heads = [_measure(place, encoder, epsilon) for place in shown]
    reports = [head.report for head in heads]
    _draw(axes, heads, encoder, epsilon)
    files = [out / "demo.png", out / "demo.svg"]
    contents = [plots.figure_bytes(figure, path.suffix) for path in files]
    out.mkdir(parents=True, exist_ok=True)
    for path, content in zip(files, contents, strict=True):
        with replace_file(path) as stream:
            stream.write(content)

    summary = _summary(reports)
    if as_json:
        _print_json(
            {"levattn": levattn.__version__, "data": "all-MiniLM-L6-v2", "epsilon": epsilon, "f": 2}
            | {
                "heads": [asdict(report) for report in reports],
                "summary": summary,
                "files": list(map(str, files)),
            }
        )
    else:
        _print_demo(reports, summary, epsilon, files)
    if summary["missed"]:
        _fail(f"{summary['missed']} heavy entries were missed, which must never happen; please report it")


def _measure(place: tuple[int, int], encoder: Any, epsilon: float) -> _Head:
    Q, K = (np.asarray(array[place], np.float64) for array in (encoder.queries, encoder.keys))
    heavy = levattn.heavy_attention(encoder.queries[place], encoder.keys[place], epsilon)
    chosen = heavy.universal
    worst, A_worst = _worst_case(K)
    heavy_worst = levattn.heavy_attention(worst, K, epsilon, universal=chosen)
    A, P = _x2_attention(Q, K), _softmax_attention(Q, K, encoder.scale)
    norms, mass = (K * K).sum(axis=1), P.mean(axis=0)
    size = len(chosen)
    report = _HeadReport(
        layer=place[0],
        head=place[1],
        n=K.shape[0],
        d=K.shape[1],
        rank=int(chosen.rank),
        condition=float(chosen.condition),
        size=size,
        size_bound=float(chosen.size_bound),
        is_vacuous=bool(chosen.is_vacuous),
        heavy=heavy.entries.nnz,
        heavy_worst_case=heavy_worst.entries.nnz,
        missed=_missed(A, heavy, epsilon) + _missed(A_worst, heavy_worst, epsilon),
        captured_x2=float(heavy.captured_mass.mean()),
        captured_softmax=float(mass[chosen.mask].sum()),
        captured_softmax_row_norm=float(mass[_descending(norms)[:size]].sum()),
        captured_softmax_oracle=float(mass[_descending(mass)[:size]].sum()),
        heavy_softmax=int(np.count_nonzero(epsilon <= P)),
        heavy_softmax_in_set=int(np.count_nonzero(epsilon <= P[:, chosen.mask])),
    )
    return _Head(report, np.asarray(chosen.scores, np.float64), norms, A.mean(axis=0), mass)


def _worst_case(K: Floats) -> tuple[Floats, Floats]:
    """The query of each key under which it scores highest, and the attention of these queries."""
    from levattn import datasets

    worst = datasets.adversarial_queries(K)
    return worst, _x2_attention(worst, K)


def _x2_attention(Q: Floats, K: Floats) -> Floats:
    """Brute force, to judge the library by: every score from its definition, in float64."""
    squares = np.square(Q @ K.T)
    totals = squares.sum(axis=1, keepdims=True)
    return np.asarray(np.divide(squares, totals, out=np.zeros_like(squares), where=totals > 0))


def _softmax_attention(Q: Floats, K: Floats, scale: float) -> Floats:
    logits = scale * (Q @ K.T)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _missed(A: Floats, heavy: levattn.HeavyAttention, epsilon: float) -> int:
    return int(np.count_nonzero((epsilon <= A) & (heavy.entries.toarray() == 0)))


def _descending(values: Floats) -> Ints:
    return np.argsort(-values, axis=-1, kind="stable")


def _summary(reports: list[_HeadReport]) -> dict[str, Any]:
    def total(name: str) -> int:
        return sum(getattr(report, name) for report in reports)

    def mean(name: str) -> float:
        return math.fsum(getattr(report, name) for report in reports) / len(reports)

    counts = ("n", "size", "heavy", "heavy_worst_case", "missed", "heavy_softmax", "heavy_softmax_in_set")
    shares = ("captured_x2", "captured_softmax", "captured_softmax_row_norm", "captured_softmax_oracle")
    return (
        {"heads": len(reports), "vacuous": total("is_vacuous")}
        | {name: total(name) for name in counts}
        | {name: mean(name) for name in shares}
    )


def _print_demo(reports: list[_HeadReport], summary: dict[str, Any], epsilon: float, files: list[Path]) -> None:
    table = _table(
        "layer",
        "head",
        "n",
        "d",
        "rank",
        "cond",
        "|U|",
        "bound",
        "vacuous",
        "heavy",
        "worst",
        "missed",
        "softmax",
    )
    for report in reports:
        table.add_row(
            str(report.layer),
            str(report.head),
            str(report.n),
            str(report.d),
            str(report.rank),
            f"{report.condition:.3g}",
            str(report.size),
            f"{report.size_bound:.4g}",
            "yes" if report.is_vacuous else "no",
            str(report.heavy),
            str(report.heavy_worst_case),
            str(report.missed),
            f"{report.captured_softmax:.1%}",
            end_section=report.head == reports[-1].head,
        )
    console = _console()
    console.print(table)
    console.print()
    for sentence in (*_sentences(summary, epsilon, reports[0].n), f"pictures: {', '.join(map(str, files))}"):
        console.print(sentence, soft_wrap=not console.is_terminal)


def _sentences(s: dict[str, Any], epsilon: float, n: int) -> Iterator[str]:
    """What the table means, and what it does not."""
    share = s["size"] / s["n"]
    yield (
        f"{s['heads']} heads of all-MiniLM-L6-v2, f(x) = x², ε = {epsilon:g}: U holds {s['size']} of "
        f"{s['n']} keys ({share:.1%}), heavy entries missed: {s['missed']}."
    )
    yield (
        f"heavy: entries of at least ε, of the {n} queries of the text ({s['heavy']} in all); worst: of the "
        f"{n} worst-case queries of each head, one built against each key ({s['heavy_worst_case']}); missed: "
        "of both, against brute force over every entry in float64."
    )
    if s["vacuous"]:
        yield f"{_VACUOUS} ({s['vacuous']} of {s['heads']} heads); the sets are exact all the same."
    else:
        yield "vacuous: no head; every bound rank/ε is below n."
    yield (
        "softmax: the guarantee is for f(x) = x² and does not cover softmax. U captures "
        f"{s['captured_softmax']:.1%} of the softmax mass; as many keys at random {share:.1%}, by row norm "
        f"{s['captured_softmax_row_norm']:.1%}, the best choice in hindsight "
        f"{s['captured_softmax_oracle']:.1%}. Of {s['heavy_softmax']} softmax entries of at least ε, "
        f"{s['heavy_softmax_in_set']} lie in U."
    )


def _draw(axes: Any, heads: list[_Head], encoder: Any, epsilon: float) -> None:
    from levattn import plots

    (spectrum, heavy_map), (x2, softmax) = axes
    reports = [head.report for head in heads]
    scores = np.stack([head.scores for head in heads])
    plots.LeverageSpectrumDisplay.from_scores(
        scores,
        epsilon=epsilon,
        rank=[report.rank for report in reports],
        sizes=[report.size for report in reports],
        ax=spectrum,
    )
    spectrum.set_title(f"Leverage scores of {len(heads)} heads, n = {reports[0].n}, d = {reports[0].d}")

    shown = max(reports, key=lambda report: report.heavy + report.heavy_worst_case)
    place = (shown.layer, shown.head)
    Q, K = (np.asarray(array[place], np.float64) for array in (encoder.queries, encoder.keys))
    A = np.concatenate([_x2_attention(Q, K), _worst_case(K)[1]])
    inside = levattn.universal_set(encoder.keys[place], epsilon)
    plots.HeavyMapDisplay.from_attention(A, epsilon, inside, ax=heavy_map)
    heavy_map.axhline(len(Q) - 0.5, color="white", lw=1)
    heavy_map.set_title(f"x² attention, layer {shown.layer}, head {shown.head}")
    heavy_map.set_ylabel("queries: of the text, then worst cases")

    orders = {
        "leverage": _descending(scores),
        "row norm": _descending(np.stack([head.norms for head in heads])),
    }
    size = sum(report.size for report in reports) / len(reports)
    for ax, name, title in (
        (x2, "x2_mass", "x² mass, mean over heads and queries"),
        (softmax, "softmax_mass", "softmax mass: not covered by the theorem"),
    ):
        mass = np.stack([getattr(head, name) for head in heads])
        plots.CapturedMassDisplay.from_attention(mass[:, np.newaxis], orders=orders, size=size, ax=ax)
        ax.set_title(title)


if __name__ == "__main__":
    main()
