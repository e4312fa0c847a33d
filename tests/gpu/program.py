"""Run on a card the tests and benchmarks that need one, the most telling first, and keep what came of them.

Parts: environment (the card and the versions), first (every kernel loaded, and a few public calls: a minute), calls
(public calls against float64 in main memory), kernels, torch and contract (tests), benchmarks (gpu_*.py), sanitizer
(compute-sanitizer). Limits hold all of them within nine minutes. A step that has passed with the same sources, card
and versions is not run again, so a second run goes on where the first came to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from . import record
from .environment import first_line
from .steps import FOUND_FAULTS, PARTS, QUICK, Step, all_steps

ROOT = Path(__file__).parents[2]
SECONDS = 540.0
LEAST = 10.0  # seconds with which a step is begun
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


def outcome(step: Step, log: Path, limit: float) -> dict[str, Any]:
    """What came of a step: its state, what it told, counts, figures."""
    if step.untested or limit <= 0:
        return {"state": record.UNTESTED, "told": step.untested or "no time was left for it", "counts": {}}
    if step.result is not None:
        step.result.unlink(missing_ok=True)
    status = finished(step.command, log, limit, surroundings(**step.environment))
    kept: dict[str, Any] = {"state": record.PASSED, "told": "", "counts": {}}
    if status is None:
        kept |= {
            "state": record.CUT_OFF,
            "told": f"it took more than {limit:.0f} s, and came to: {last_lines(log, 1)}",
        }
    elif status != 0:
        fault = "compute-sanitizer found faults\n" if status == FOUND_FAULTS else ""
        kept |= {"state": record.FAILED, "told": f"{fault}exit status {status}\n{last_lines(log)}"}
    if step.result is None or not step.result.exists():
        # a benchmark says what it misses, and ends
        return kept if status != 0 else kept | {"state": record.UNTESTED, "told": last_lines(log, 1)}
    figures = json.loads(step.result.read_text("utf-8"))
    kept["counts"] = figures.pop("counts")
    if status == 0 and kept["counts"].get("tests passed") == 0:
        kept |= {"state": record.UNTESTED, "told": f"all tests were skipped\n{last_lines(log)}"}
    return kept | ({"figures": figures} if any(figures.values()) else {})


def environment(folder: Path, *, cpu: bool) -> dict[str, Any]:
    """What the process says that looks for the card."""
    log = folder / "environment.log"
    command = [sys.executable, "-m", "tests.gpu.environment", *(["--cpu"] if cpu else [])]
    status = finished(command, log, 60, surroundings())
    if status != 0:
        return {"why": f"looking for a card ended with status {status}: {last_lines(log, 1)}"}
    return dict(json.loads(last_lines(log, 1)))


def commit() -> str:
    """The commit of the sources, marked if they differ from it; empty where there is no repository."""
    return first_line("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*")


def kept_of(step: Step, log: Path, limit: float) -> dict[str, Any]:
    """Run a step, and return what is kept of it."""
    begun = time.monotonic()
    came = outcome(step, log, limit)
    seconds = round(time.monotonic() - begun, 3)
    return {"part": step.part, **came, "seconds": seconds, "finished": datetime.now(UTC).isoformat(timespec="seconds")}


def side_by_side(steps: list[Step], logs: Path, limits: list[float]) -> Iterator[tuple[Step, dict[str, Any]]]:
    """Run the steps of a group at once; yield them as they come to their ends."""
    with ThreadPoolExecutor(len(steps)) as pool:
        running = {
            pool.submit(kept_of, step, logs / f"{step.name.replace('/', '-')}.log", limit): step
            for step, limit in zip(steps, limits, strict=True)
        }
        for future in as_completed(running):
            yield running[future], future.result()


def told_of(step: Step, came: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {what}" for what, count in came["counts"].items() if count)
    line = f"{step.name}: {came['state']}, {came['seconds']:.0f} s" + (f" ({counts})" if counts else "")
    return f"{line}: {came['told']}" if came["told"] else line


def run(steps: list[Step], path: Path, kept: dict[str, Any], now: str, options: argparse.Namespace) -> bool:
    """Run the steps that are not done; return whether none of them failed. Those that were tried before come last."""
    well, where, end = True, commit(), time.monotonic() + options.seconds
    left = [step for step in steps if options.again or not record.is_done(kept, step.name, now)]
    for step in steps:
        if step not in left:
            print(f"{step.name}: done before", flush=True)
    left.sort(key=lambda step: not options.again and record.was_tried(kept, step.name, now))
    for _, some in groupby(left, lambda step: step.group or step.name):
        group = list(some)
        time_left = end - time.monotonic()
        limits = [min(options.limit or step.limit, time_left) if time_left > LEAST else 0.0 for step in group]
        for step, came in side_by_side(group, path.with_suffix(""), limits):
            kept["steps"][step.name] = {**came, "digest": now, "commit": where}
            record.save(path, kept)
            well &= came["state"] in (record.PASSED, record.UNTESTED)
            print(told_of(step, came), flush=True)
        record.pack(path)
    return well


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="the first minute alone")
    parser.add_argument("--again", action="store_true", help="also what has passed with these sources on this card")
    parser.add_argument("--required", action="store_true", help="exit with status 2 where there is no card")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries this program without a card"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all, {SECONDS:g} if left out")
    parser.add_argument("--limit", type=float, help="seconds that a step may take, in place of its own limit")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/gpu", help="where records and outputs go")
    options = parser.parse_args(arguments)
    if options.quick:
        options.only = list(QUICK)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that the arguments name; return 1 if a step failed, 2 if nothing could be run that had to be."""
    options = options_of(arguments)
    folder = options.folder.resolve()
    known = environment(folder, cpu=options.device == "cpu")
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
        print("environment:", ", ".join(f"{key} {value}" for key, value in known.items() if value), flush=True)
    now = record.digest(ROOT, known)
    well = run(all_steps(ROOT, path.with_suffix(""), known, options.only), path, kept, now, options)
    print(record.row(kept, now))
    print(f"all logs are in {record.pack(path)}")
    return 0 if well else 1
