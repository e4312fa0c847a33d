"""What a run on a card leaves behind: a file for each card with the outcome of every step, and an archive of logs.

Both are replaced as a whole after each step, so a run that is cut off loses the step that it was at. A step is done
that has passed with the very sources, on the card and with the versions that there are now.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .environment import CPU

FORMAT = 2
PASSED, FAILED, CUT_OFF, UNTESTED = STATES = ("passed", "failed", "cut off by its limit", "untested")
SOURCES = ("levattn", "tests", "examples/benchmarks")
SUFFIXES = {".py", ".cu", ".cuh", ".hpp", ".npz"}
TYPES = {"part": str, "digest": str, "told": str, "commit": str, "finished": str, "counts": dict, "seconds": float}


class RecordError(ValueError):
    """A file that is no whole record of this card."""


def slug(card: str) -> str:
    """The name of a card as that of a file."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def digest(root: Path, environment: dict[str, Any]) -> str:
    """A name for the sources together with the card and the versions of what runs on it."""
    total = hashlib.sha256(json.dumps(environment, sort_keys=True).encode())
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                total.update(f"\n{path.relative_to(root).as_posix()}\n{path.stat().st_size}\n".encode())
                total.update(path.read_bytes())
    return total.hexdigest()


def faults(held: Any, card: str) -> Iterable[str]:
    """What keeps something that was read from being a record of a card."""
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        yield f"it is no record of format {FORMAT}"
    elif held.get("card") != card:
        yield f"it is of the card {held.get('card')!r}, and this one is {card!r}"
    elif not (isinstance(held.get("steps"), dict) and isinstance(held.get("environment"), dict)):
        yield "its steps or its environment are missing"
    else:
        for name, step in held["steps"].items():
            wrong = [key for key, kind in TYPES.items() if not isinstance(dict(step).get(key), kind)]
            if step.get("state") not in STATES or wrong:
                yield f"its step {name!r} lacks {', '.join(wrong) or 'a known state'}"


def load(path: Path, card: str) -> dict[str, Any]:
    """The record of a card, a new one where there is no file; a damaged one is refused, and stays as it is."""
    if not path.exists():
        return {"format": FORMAT, "card": card, "environment": {}, "steps": {}}
    try:
        held = json.loads(path.read_text("utf-8"))
        fault = next(iter(faults(held, card)), None)
    except (ValueError, TypeError, AttributeError) as error:
        fault = f"it is damaged ({error})"
    if fault is not None:
        raise RecordError(f"{path} is not gone on with: {fault}; move it away, and all steps are run")
    return dict(held)


def save(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    beside.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    beside.replace(path)


def pack(path: Path) -> Path:
    """Put a record and the folder of its logs into one archive, which is easy to carry."""
    archive = path.with_suffix(".tar.gz")
    beside = archive.with_name(f"{archive.name}.{os.getpid()}.part")
    with tarfile.open(beside, "w:gz") as packed:
        for each in (path, path.with_suffix("")):
            if each.exists():
                packed.add(each, each.name)
    beside.replace(archive)
    return archive


def was_tried(record: dict[str, Any], name: str, now: str) -> bool:
    """Whether a step has failed or met its limit with these sources; it then waits for those that have not."""
    held = record["steps"].get(name)
    return held is not None and held["state"] in (FAILED, CUT_OFF) and held["digest"] == now


def is_done(record: dict[str, Any], name: str, now: str) -> bool:
    held = record["steps"].get(name)
    return held is not None and held["state"] == PASSED and held["digest"] == now


def of_part(steps: list[dict[str, Any]]) -> str:
    """The outcome of a part in a few words."""
    counts: Counter[str] = Counter()
    for step in steps:
        counts.update(step["counts"])
    states = Counter(step["state"] for step in steps)
    if set(states) == {UNTESTED}:
        return f"untested ({steps[0]['told']})"
    words = [f"{counts[key]} {key}" for key in counts if counts[key]]
    words += [f"{states[state]} of {len(steps)} steps {state}" for state in STATES[1:] if states[state]]
    return ", ".join(words) or f"{states[PASSED]} of {len(steps)} steps passed"


def row(record: dict[str, Any], now: str) -> str:
    """The outcome as a row of a table in Markdown: what, where, when, command; of steps with these sources alone."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for step in record["steps"].values():
        if step["digest"] == now:
            parts.setdefault(step["part"], []).append(step)
    steps = [step for part in parts.values() for step in part]
    known = record["environment"]
    where = [record["card"]]
    where += [f"{key} {known[key]}" for key in ("capability", "driver", "CUDA", "cupy", "torch") if known.get(key)]
    when = max((step["finished"][:10] for step in steps), default="never")
    commits = sorted({step["commit"] for step in steps if step["commit"]})
    cells = (
        "; ".join(f"{part}: {of_part(some)}" for part, some in parts.items()) or "nothing",
        ", ".join(where),
        ", ".join([when, *commits]),
        "`make gpu`" if record["card"] != CPU else "`python -m tests.gpu --device cpu`",
    )
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
