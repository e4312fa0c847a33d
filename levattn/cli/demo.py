"""``levattn demo``: the universal sets of 72 heads of a real encoder, checked against brute force."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

import levattn
from levattn import datasets
from levattn._core.types import Float64
from levattn.cli.output import VACUOUS, check_folder, check_target, fail, new_console, print_json, table_of
from levattn.io import replace_file
from levattn.io.common import printable

_COLUMNS = {
    "layer": "layer",
    "head": "head",
    "n": "n",
    "d": "d",
    "rank": "rank",
    "cond": "condition:.3g",
    "|U|": "size",
    "bound": "size_bound:.4g",
    "vacuous": "is_vacuous",
    "worst": "heavy_worst_case",
    "missed": "missed",
    "softmax": "captured_softmax:.1%",
    "|C|": "coverage_size",
    "found": "coverage_found:.1%",
}
_COVERAGE = 0.9


@dataclass(frozen=True)
class _HeadReport:
    """The figures of one head."""

    layer: int
    head: int
    n: int
    d: int
    rank: int
    condition: float
    size: int
    size_bound: float
    is_vacuous: bool
    heavy: int  # entries >= epsilon, for the queries of the text
    heavy_worst_case: int  # entries of the n worst-case queries
    missed: int  # for both, compared with brute force
    captured_x2: float
    captured_softmax: float
    captured_softmax_row_norm: float  # by as many keys of largest norm
    captured_softmax_oracle: float  # by as many keys of largest softmax mass
    heavy_softmax: int  # softmax entries >= epsilon, which the theorem does not cover
    heavy_softmax_in_set: int
    captured_softmax_expected: float  # by as many keys of largest expected score, for unseen queries
    coverage_size: int  # of the set with coverage, for softmax
    coverage_found: float  # share of the queries whose entries >= epsilon all lie in the set


@dataclass(frozen=True)
class _Head:
    report: _HeadReport
    scores: Float64
    norms: Float64
    x2_mass: Float64  # (n,) mean over the queries
    softmax_mass: Float64  # over the queries that gave no expected scores


@dataclass(frozen=True)
class _Covering:
    """Results for softmax from every second query of each head; the other queries judge them."""

    mask: npt.NDArray[np.bool_]  # (..., n) the set with coverage
    expected: Float64  # (..., n) expected scores


def run_demo(epsilon: float, out: Path, as_json: bool) -> None:
    """Run the command."""
    from rich.console import Console
    from rich.progress import track

    from levattn import plots

    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        fail(f"{there} is not a folder; name another with --out")
    check_folder(there, "name another folder with --out")
    files = [out / "demo.png", out / "demo.svg"]
    for file in files:
        check_target(file, "name another folder with --out")
    figure, axes = plots.new_figure(2, 2)
    encoder = datasets.minilm()
    layers, per_layer = encoder.keys.shape[:2]
    places = list(itertools.product(range(layers), range(per_layer)))
    errors = Console(stderr=True)
    shown = track(places, "heads", console=errors, transient=True) if errors.is_terminal else places
    covering = _covering(encoder, epsilon)
    heads = [_measure(place, encoder, epsilon, covering) for place in shown]
    reports = [head.report for head in heads]
    _draw(axes, heads, encoder, epsilon, covering.expected)
    contents = [plots.figure_bytes(figure, path.suffix) for path in files]
    out.mkdir(parents=True, exist_ok=True)
    for path, content in zip(files, contents, strict=True):
        with replace_file(path) as stream:
            stream.write(content)

    summary = _summary(reports)
    if as_json:
        print_json(
            "levattn.demo/1",
            {"data": "all-MiniLM-L6-v2", "epsilon": epsilon, "f": 2, "coverage": _COVERAGE}
            | {"heads": list(map(asdict, reports)), "summary": summary, "files": list(map(str, files))},
        )
    else:
        _print_demo(reports, summary, epsilon, files)
    if summary["missed"]:
        fail(f"{summary['missed']} heavy entries were missed, which must never happen; please report it")


def _covering(encoder: Any, epsilon: float) -> _Covering:
    """Return the sets with coverage of all heads."""
    Q = encoder.scale * np.asarray(encoder.queries[..., ::2, :], np.float64)
    f = levattn.Softmax()
    found = levattn.covering_set(encoder.keys, Q, epsilon, f=f, coverage=_COVERAGE)
    return _Covering(found.mask, np.asarray(levattn.expected_scores(encoder.keys, Q, f=f), np.float64))


def _measure(place: tuple[int, int], encoder: Any, epsilon: float, covering: _Covering) -> _Head:
    Q, K = (np.asarray(array[place], np.float64) for array in (encoder.queries, encoder.keys))
    chosen = levattn.universal_set(encoder.keys[place], epsilon)
    worst = datasets.adversarial_queries(K)
    heavy, heavy_worst = (
        cast(levattn.HeavyAttention, levattn.heavy_attention(given, encoder.keys[place], epsilon, universal=chosen))
        for given in (encoder.queries[place], worst)
    )
    A_worst = _x2_attention(worst, K)
    A, P = _x2_attention(Q, K), _softmax_attention(Q, K, encoder.scale)
    norms, mass = (K * K).sum(axis=1), P.mean(axis=0)
    size, covered, unseen = len(chosen), covering.mask[place], P[1::2]
    left_out = unseen[:, ~covered].max(axis=1, initial=0.0)
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
        captured_softmax_expected=float(unseen.mean(axis=0)[_descending(covering.expected[place])[:size]].sum()),
        coverage_size=int(np.count_nonzero(covered)),
        coverage_found=float((left_out < epsilon).mean()),
    )
    return _Head(report, np.asarray(chosen.scores, np.float64), norms, A.mean(axis=0), unseen.mean(axis=0))


def _x2_attention(Q: Float64, K: Float64) -> Float64:
    """Return all scores from their definition, in float64: brute force, to judge the library."""
    squares = np.square(Q @ K.T)
    totals = squares.sum(axis=1, keepdims=True)
    return np.asarray(np.divide(squares, totals, out=np.zeros_like(squares), where=totals > 0))


def _softmax_attention(Q: Float64, K: Float64, scale: float) -> Float64:
    logits = scale * (Q @ K.T)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _missed(A: Float64, heavy: levattn.HeavyAttention, epsilon: float) -> int:
    return int(np.count_nonzero((epsilon <= A) & (heavy.entries.toarray() == 0)))


def _descending(values: Float64) -> npt.NDArray[np.intp]:
    return np.argsort(-values, axis=-1, kind="stable")


def _summary(reports: list[_HeadReport]) -> dict[str, Any]:
    def total(name: str) -> int:
        return sum(getattr(report, name) for report in reports)

    def mean(name: str) -> float:
        return math.fsum(getattr(report, name) for report in reports) / len(reports)

    counts = (
        "n",
        "size",
        "heavy",
        "heavy_worst_case",
        "missed",
        "heavy_softmax",
        "heavy_softmax_in_set",
        "coverage_size",
    )
    shares = (
        "captured_x2",
        "captured_softmax",
        "captured_softmax_row_norm",
        "captured_softmax_oracle",
        "captured_softmax_expected",
        "coverage_found",
    )
    return (
        {"heads": len(reports), "vacuous": total("is_vacuous")}
        | {name: total(name) for name in counts}
        | {name: mean(name) for name in shares}
    )


def _print_demo(reports: list[_HeadReport], summary: dict[str, Any], epsilon: float, files: list[Path]) -> None:
    table = table_of(map(asdict, reports), _COLUMNS)
    for row, report in zip(table.rows, reports, strict=True):
        row.end_section = report.head == reports[-1].head
    console = new_console()
    console.print(table)
    console.print()
    pictures = f"pictures: {printable(', '.join(map(str, files)))}"
    for sentence in (*_sentences(summary, epsilon, reports[0].n), pictures):
        console.print(sentence, soft_wrap=not console.is_terminal)


def _sentences(s: dict[str, Any], epsilon: float, n: int) -> Iterator[str]:
    """Yield sentences on the meaning of the table, and its limits."""
    share = s["size"] / s["n"]
    yield (
        f"{s['heads']} heads of all-MiniLM-L6-v2, f(x) = x², ε = {epsilon:g}: U holds {s['size']} of "
        f"{s['n']} keys ({share:.1%}), heavy entries missed: {s['missed']}."
    )
    yield (
        f"worst: heavy entries, of at least ε, for the {n} worst-case queries of each head, one built for each "
        f"key ({s['heavy_worst_case']} in all; the {n} queries of the text have {s['heavy']}); missed: entries of "
        "both outside U, by brute force over every entry in float64."
    )
    if s["vacuous"]:
        yield f"{VACUOUS} ({s['vacuous']} of {s['heads']} heads); the sets are still exact."
    else:
        yield "vacuous: no head; every bound rank/ε is below n."
    yield (
        "softmax: the guarantee is for f(x) = x² and does not cover softmax. U captures "
        f"{s['captured_softmax']:.1%} of the softmax mass; as many keys at random {share:.1%}, by row norm "
        f"{s['captured_softmax_row_norm']:.1%}, by expected score {s['captured_softmax_expected']:.1%} (from every "
        f"second query, on the others), the best choice in hindsight {s['captured_softmax_oracle']:.1%}. "
        f"Of {s['heavy_softmax']} softmax entries of at least ε, {s['heavy_softmax_in_set']} lie in U."
    )
    yield (
        f"real queries: C, the set with coverage {_COVERAGE:g} for softmax, is made from every second query of the "
        f"text; it holds {s['coverage_size'] / s['n']:.1%} of the keys, and of the other queries "
        f"{s['coverage_found']:.1%} found all their keys in it (mean over heads)."
    )


def _draw(axes: Any, heads: list[_Head], encoder: Any, epsilon: float, expected: Float64) -> None:
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
    A = np.concatenate([_x2_attention(rows, K) for rows in (Q, datasets.adversarial_queries(K))])
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
    by_queries = orders | {"expected score": _descending(expected.reshape(scores.shape))}
    for ax, name, of_keys, title in (
        (x2, "x2_mass", orders, "x² mass, mean over heads and queries"),
        (softmax, "softmax_mass", by_queries, "softmax mass of unseen queries: not covered by the theorem"),
    ):
        mass = np.stack([getattr(head, name) for head in heads])
        plots.CapturedMassDisplay.from_attention(mass[:, np.newaxis], orders=of_keys, size=size, ax=ax)
        ax.set_title(title)
