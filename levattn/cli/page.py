"""A self-contained HTML page: heads as a heat map and a table, and a text with its kept tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

from levattn.cli.output import cell
from levattn.io import replace_file

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1e21; --faint: #60666e; --line: #d9dce0;
  --shade: 31 101 181 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #e4e6e9; --faint: #9aa1a9; --line: #363a40; --shade: 88 160 240 }
}
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.4rem; margin: .5rem 0; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p { color: var(--faint); margin: .25rem 0 .75rem; max-width: 48rem }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: .75rem; margin: 1rem 0 }
dl div { border: 1px solid var(--line); border-radius: .4rem; padding: .4rem .7rem }
dt { color: var(--faint); font-size: .85rem }
dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th { color: var(--faint); font-weight: normal }
.heat th { padding: 0 .35rem; font-size: .8rem; text-align: right }
.heat thead th { text-align: center }
.heat td { min-width: 1.5rem; height: 1.5rem; padding: 0; border: 1px solid var(--line) }
.heat td.none { background: repeating-linear-gradient(45deg, var(--line) 0 2px, transparent 2px 6px) }
.rows th, .rows td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid var(--line) }
.key { display: inline-block; width: 6rem; height: .8rem; vertical-align: middle; border: 1px solid var(--line);
  background: linear-gradient(to right, transparent, rgb(var(--shade))) }
.text { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: .4rem;
  padding: .7rem; color: var(--ink); line-height: 1.7 }
td[style], span[style] { background: rgb(var(--shade) / var(--v)) }
details { margin: 2rem 0 }
summary { font-size: 1.1rem; cursor: pointer }
</style>
</head>
<body>
<h1>$title</h1>
<dl>
$facts
</dl>
$sections
</body>
</html>
""")
_DARKEST = 0.6  # of the shade behind words, so that they stay legible


@dataclass(frozen=True)
class HeatMap:
    """A number for each layer and head.

    values: by (layer, head). A head without a number has None, and a missing head is left out.

    top: the number with the full color; None for the largest number.

    by_root: whether colors follow the square root, so that the others stay visible beside one large number.
    """

    title: str
    values: Mapping[tuple[int, int], float | None]
    form: str
    top: float | None = None
    by_root: bool = False

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], key: str, title: str, form: str, **options: Any) -> HeatMap:
        """Return the heat map of one column of rows that have a layer and a head."""
        return cls(title, {(row["layer"], row["head"]): row[key] for row in rows}, form, **options)

    def html(self) -> str:
        """Return the section of the page."""
        numbers = [x for x in self.values.values() if x is not None and math.isfinite(x)]
        top = self.top if self.top is not None else max(numbers, default=0.0)
        heads = sorted({head for _, head in self.values})
        lines = [f"<h2>{escape(self.title)}</h2>"]
        scale = ", colored by the square root" if self.by_root else ""
        lines.append(
            f'<p>0 <span class="key"></span> {top:{self.form}}{scale}. Point at a head to read its number.</p>'
        )
        lines.append('<div class="wide"><table class="heat">')
        lines.append("<thead><tr><th>layer \\ head</th>" + "".join(f"<th>{head}</th>" for head in heads))
        lines[-1] += "</tr></thead>\n<tbody>"
        for layer in sorted({layer for layer, _ in self.values}):
            cells = "".join(self._cell(layer, head, top) for head in heads)
            lines.append(f"<tr><th>{layer}</th>{cells}</tr>")
        return "\n".join([*lines, "</tbody></table></div>"])

    def _cell(self, layer: int, head: int, top: float) -> str:
        value = self.values.get((layer, head))
        place = f"layer {layer}, head {head}"
        if value is None or not math.isfinite(value):
            return f'<td class="none" title="{place}: -"></td>'
        share = min(max(value / top, 0.0), 1.0) if top > 0 else 0.0
        share = share**0.5 if self.by_root else share
        return f'<td style="--v:{share:.3f}" title="{place}: {value:{self.form}}"></td>'


@dataclass(frozen=True)
class KeptText:
    """A text in pieces, one for each token, and for each the number of cut heads that keep it."""

    pieces: Sequence[str]
    kept: Sequence[int]
    heads: int

    def html(self) -> str:
        """Return the section of the page; consecutive tokens with the same number are one piece."""
        most = max(self.kept, default=0)
        lines = [
            "<h2>Tokens that the cut heads keep</h2>",
            f'<p>0 <span class="key"></span> {most}: number of the {self.heads} cut heads that keep a token itself, '
            "colored by the square root; the other heads read it in a summary. Point at the text to read the "
            "number.</p>",
        ]
        spans = []
        place = 0
        for count, run in groupby(zip(self.kept, self.pieces, strict=True), key=lambda pair: pair[0]):
            words = [piece for _, piece in run]
            last = place + len(words) - 1
            where = f"token {place}" if last == place else f"tokens {place} to {last}"
            shade = _DARKEST * (count / most) ** 0.5 if most else 0.0
            title = f"{where}: kept by {count} of {self.heads} cut heads"
            spans.append(f'<span style="--v:{shade:.3f}" title="{title}">{escape("".join(words))}</span>')
            place = last + 1
        return "\n".join([*lines, f'<div class="text">{"".join(spans)}</div>'])


def write_page(
    path: Path,
    title: str,
    facts: Mapping[str, str],
    maps: Sequence[HeatMap],
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    text: KeptText | None = None,
) -> None:
    """Write a page, whole or not at all: facts, heat maps, a text, and a table with the columns of `table_of`."""
    shown = "\n".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    sections = [heat.html() for heat in maps]
    if text is not None:
        sections.append(text.html())
    sections.append(_table(rows, columns))
    page = _PAGE.substitute(title=escape(title), facts=shown, sections="\n".join(sections))
    with replace_file(path) as stream:
        stream.write(page.encode("utf-8", "replace"))


def _table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    fields = [column.partition(":") for column in columns.values()]
    lines = ["<details><summary>All numbers</summary>", '<div class="wide"><table class="rows">']
    lines.append("<thead><tr>" + "".join(f"<th>{escape(name)}</th>" for name in columns) + "</tr></thead>\n<tbody>")
    lines += [
        "<tr>" + "".join(f"<td>{escape(cell(row[key], form))}</td>" for key, _, form in fields) + "</tr>"
        for row in rows
    ]
    return "\n".join([*lines, "</tbody></table></div>", "</details>"])
