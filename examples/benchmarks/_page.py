"""Tables of the comparison page: what a measurement returns, how it is printed and put between its markers."""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "comparison.md"
COMMAND = "python examples/benchmarks/comparison.py --only {name}"
LOSS = "levattn loses: "
# Tables of times, which the page has a second time, for processors without AVX-512: the names of these end so
TIMES = ("speed", "speed-float64", "heavy", "pruned", "latte", "tssa")
AVX2 = "-avx2"
# why levattn loses, by what the losses with that reason have in common
REASONS = {
    r"not leverage": "Scores that are not leverage. Row norms take a tenth of the arithmetic and find other keys; "
    "the table shows how few of the heavy keys they find",
    r"LeverageScorePress": "A sketch. LeverageScorePress multiplies 48 random columns, or d columns. Exact scores "
    "take the moments in float64 and one more pass. The table gives the error of the press",
    r"both ways, 256": "A short call. Both take 0.3 ms, and levattn spends a fifth of it in Python. Which one is "
    "ahead changes from run to run",
    r"^accuracy-": "Rounding. If the errors of a Gram in float64 stay below 2·10⁻¹², levattn takes no slower route",
    r"^memory": "Partial sums. Others hold only the result; levattn's threads hold about 1 MiB beside it",
}
LOSSES = "losses"


@dataclass
class Table:
    """A table, what it says of who loses, and where its figures come from.

    Losses are None where not every rival of the same task was compared: such a table says nothing of them.
    """

    name: str
    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    losses: list[str] | None = None
    notes: list[str] = field(default_factory=list)
    texts: int = 1  # columns of words, at the left

    def markdown(self, source: str) -> str:
        """Return the table in Markdown, the sentences below it, and the line on where it was measured."""
        rows = [self.header, ["---"] * self.texts + ["---:"] * (len(self.header) - self.texts), *self.rows]
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        told = [f"- {LOSS}{loss}" for loss in self.losses or ()]
        if self.losses is not None and not told:
            told = ["- levattn loses nowhere in this table"]
        told += [f"- {note}" for note in self.notes]
        parts = ["\n".join(lines), "\n".join(told), f"*{source}*"]
        return "\n\n".join(part for part in parts if part)


def processor() -> str:
    """Return the model of the processor and how many of its cores this process may use."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else None
    model = found[1] if found else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{model}, {cores} core{'s' * (cores > 1)}"


def source(packages: str, *, quick: bool) -> str:
    """Return where and when something was measured, with what."""
    label = "quick run, figures mean little; " if quick else ""
    return f"{label}{date.today().isoformat()}, {processor()}; {packages}"


def block(name: str, body: str, command: str | None = None) -> str:
    """Return a body between its markers."""
    return f"<!-- {name}: {command or COMMAND.format(name=name)} -->\n\n{body}\n\n<!-- /{name} -->"


def replaced(text: str, name: str, body: str) -> str:
    """Return a page whose block of that name is exchanged."""
    pattern = re.compile(rf"<!-- {re.escape(name)}: ([^\n]*?) -->.*?<!-- /{re.escape(name)} -->", re.S)
    if len(pattern.findall(text)) != 1:
        raise ValueError(
            f"the page has not exactly one block '{name}'; expected '<!-- {name}: COMMAND -->' and, behind it, "
            f"'<!-- /{name} -->'"
        )
    return pattern.sub(lambda found: block(name, body, found[1]), text)


def losses(text: str) -> str:
    """Return the losses that the blocks of a page tell, each with the block that does, by their reasons."""
    found: dict[str, list[str]] = {}
    for name, body in re.findall(r"<!-- ([\w-]+): [^\n]*? -->(.*?)<!-- /\1 -->", text, re.S):
        for line in re.findall(rf"^- {LOSS}(.+)$", body, re.M) if name != LOSSES else []:
            told = f"{name}: {line}"
            reasons = [reason for pattern, reason in REASONS.items() if re.search(pattern, told)]
            found.setdefault(reasons[0] if reasons else "", []).append(told)
    rows = [f"- {told}" for told in found.pop("", [])]
    for reason, told in found.items():
        rows += [f"- **{reason.replace('. ', '.** ', 1)}.", *(f"  - {each}" for each in told)]
    return "\n".join(rows) or "- nowhere in the tables above"


def write(bodies: dict[str, str], page: Path = PAGE) -> None:
    """Put bodies between their markers, gather the losses anew, and exchange the file at once."""
    text = page.read_text(encoding="utf-8")
    for name, body in bodies.items():
        text = replaced(text, name, body)
    text = replaced(text, LOSSES, losses(text))
    handle, temporary = tempfile.mkstemp(dir=page.parent, prefix=page.name, text=True)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(page.stat().st_mode)
        Path(temporary).replace(page)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def milliseconds(seconds: float) -> str:
    """Return a time to three digits."""
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def slower(times: Mapping[str, float], ours: str, where: str, asides: Mapping[str, str] | None = None) -> list[str]:
    """Return a sentence for each rival that is faster than levattn, the fastest first, with what is said beside it."""
    said = {name: f" ({aside})" for name, aside in (asides or {}).items()}
    return [
        f"{where}: {name}{said.get(name, '')} is {times[ours] / seconds:.2f} times as fast"
        for name, seconds in sorted(times.items(), key=lambda item: item[1])
        if seconds < times[ours]
    ]
