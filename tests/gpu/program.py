"""Run on a card what the tests and benchmarks have for one, step by step, and keep what came of it.

Parts: environment (the card and the versions), kernels (each file of tests/cuda), contract (arrays of CuPy through all
public functions), torch (tests/gpu/test_torch.py), sanitizer (compute-sanitizer), benchmarks (gpu_*.py).
A step that has passed with the same sources, card and versions is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from . import record
from .environment import first_line
from .steps import FOUND_FAULTS, PARTS, Step, all_steps

ROOT = Path(__file__).parents[2]
LIMIT = 600.0
LAST_LINES = 15


def surroundings(*more_folders: Path, **more: str) -> dict[str, str]:
    """The environment of a process: the sources come first, then other folders, the caller's own as well."""
    folders = [*map(str, (ROOT, *more_folders)), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **more}


def finished(command: Sequence[str], log: Path, limit: float, environment: dict[str, str]) -> int | None:
    """Run a command to its end, its output in a file; return its exit status, None if it took too long."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # also what it started, and also where this program is interrupted
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    lines = log.read_text("utf-8", errors="replace").rstrip().splitlines()
    return "\n".join(lines[-count:])


def counts_of_tests(path: Path) -> dict[str, int]:
    """How many tests passed, were skipped and failed, of pytest's report."""
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    total = {
        key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    }
    failed = total["failures"] + total["errors"]
    return {
        "tests passed": total["tests"] - failed - total["skipped"],
        "tests skipped": total["skipped"],
        "tests failed": failed,
    }


def outcome(step: Step, log: Path, limit: float) -> dict[str, Any]:
    """What came of a step: its state, what it told, counts, figures."""
    if step.skipped:
        return {"state": record.SKIPPED, "told": step.skipped, "counts": {}}
    if step.result is not None:
        step.result.unlink(missing_ok=True)
    status = finished(step.command, log, limit, surroundings(**step.environment))
    kept: dict[str, Any] = {"state": record.PASSED, "told": "", "counts": {}}
    if status is None:
        kept |= {"state": record.TIMED_OUT, "told": f"it took more than {limit:g} s"}
    elif status != 0:
        fault = "compute-sanitizer found faults\n" if status == FOUND_FAULTS else ""
        kept |= {"state": record.FAILED, "told": f"{fault}exit status {status}\n{last_lines(log)}"}
    if step.result is None or not step.result.exists():
        # a benchmark says what it misses, and ends
        return kept if status != 0 else kept | {"state": record.SKIPPED, "told": last_lines(log, 1)}
    if step.result.suffix == ".xml":
        counts = counts_of_tests(step.result)
        if status == 0 and not counts["tests passed"]:
            kept |= {"state": record.SKIPPED, "told": last_lines(log)}
        return kept | {"counts": counts}
    figures = json.loads(step.result.read_text("utf-8"))
    met = [bar["met"] for bar in figures["bars"]]
    return kept | {"counts": {"bars met": sum(met), "bars missed": len(met) - sum(met)}, "figures": figures}


def environment(folder: Path, *, emulated: bool) -> dict[str, Any]:
    """What the process says that looks for the card."""
    log = folder / "environment.log"
    command = [sys.executable, "-m", "tests.gpu.environment", *(["--emulated"] if emulated else [])]
    status = finished(command, log, LIMIT, surroundings())
    if status != 0:
        return {"why": f"looking for a card ended with status {status}: {last_lines(log, 1)}"}
    return dict(json.loads(last_lines(log, 1)))


def commit() -> str:
    """The commit of the sources, marked if they differ from it; empty where there is no repository."""
    return first_line("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*")


def run(steps: list[Step], path: Path, kept: dict[str, Any], now: str, options: argparse.Namespace) -> bool:
    """Run the steps that are not done; return whether none of them failed."""
    well, where = True, commit()
    for step in steps:
        if record.is_done(kept, step.name, now) and not options.again:
            print(f"{step.name}: done before", flush=True)
            continue
        begun = time.monotonic()
        log = path.with_suffix("") / f"{step.name.replace('/', '-')}.log"
        came = outcome(step, log, options.limit)
        kept["steps"][step.name] = {
            **{
                "part": step.part,
                **came,
                "digest": now,
                "commit": where,
                "seconds": round(time.monotonic() - begun, 3),
            },
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        record.save(path, kept)
        well &= came["state"] in (record.PASSED, record.SKIPPED)
        counts = ", ".join(f"{count} {what}" for what, count in came["counts"].items() if count)
        told = f"{step.name}: {came['state']}" + (f" ({counts})" if counts else "")
        print(f"{told}: {came['told']}" if came["told"] else told, flush=True)
    return well


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that the arguments name; return 1 if a step failed, 2 if nothing could be run that had to be."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--again", action="store_true", help="also what has passed with these sources on this card")
    parser.add_argument("--required", action="store_true", help="exit with status 2 where there is no card")
    parser.add_argument("--emulated", action="store_true", help="a few steps on the emulator, to try this program")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that a step may take")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/gpu", help="where records and outputs go")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    known = environment(folder, emulated=options.emulated)
    if "card" not in known:
        print(f"nothing is run: {known['why']}")
        return 2 if options.required else 0
    path = folder / f"{record.slug(known['card'])}.json"
    try:
        kept = record.load(path, known["card"])
    except record.RecordError as error:
        print(error)
        return 2
    kept["environment"] = known
    record.save(path, kept)
    if "environment" in options.only:
        print("environment:", ", ".join(f"{key} {value}" for key, value in known.items() if value))
    now = record.digest(ROOT, known)
    well = run(all_steps(ROOT, path.with_suffix(""), known, options.only), path, kept, now, options)
    print(record.row(kept, now))
    return 0 if well else 1
