"""Hours of the adversary: random cases over many processes, and a script for each break."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import time
import zlib
from collections import Counter
from collections.abc import Sequence

_SCRIPTS = 20  # breaks that are shrunk and printed
_LONGEST = 120  # seconds that a route may take for one case, what it has to compile included
Broken = Counter[tuple[str, str, str]]  # (family, route, kind)
Found = dict[tuple[str, str, str], int]  # the same: seed of the first


def _too_long(*_: object) -> None:
    raise TimeoutError(f"no result within {_LONGEST} s")


def _is_drawn(name: str, family: str, seed: int, share: int) -> bool:
    """Tell whether a case is among the part of all that a route is tried on, 1/share."""
    return zlib.crc32(f"{name} {family} {seed}".encode()) % share == 0


def _worker(job: tuple[str, list[int], list[str], int, float]) -> tuple[Counter[str], Broken, Found]:
    """Try the cases of some seeds of a family; counts of tries and refusals, and what broke."""
    from . import families
    from .oracle import Truth
    from .routes import ROUTES

    family, seeds, names, share, stop = job
    signal.signal(signal.SIGALRM, _too_long)
    tried: Counter[str] = Counter()
    broken: Broken = Counter()
    found: Found = {}
    for seed in seeds:
        if time.time() > stop:
            break
        case = families.case(family, seed)
        truth = Truth(case.present, case.queries)
        tried["matrices"] += 1
        for name in names:
            route = ROUTES[name]
            if not (_is_drawn(name, family, seed, share) and route.admits(case)):
                continue
            tried["results"] += 1
            signal.alarm(_LONGEST)
            kinds = {breach.kind for breach in route.breaches(case, truth)}
            signal.alarm(0)
            for kind in kinds:
                broken[family, name, kind] += 1
                found.setdefault((family, name, kind), seed)
    return tried, broken, found


def _shrink(job: tuple[str, str, str, int]) -> str:
    from . import families
    from .routes import ROUTES
    from .shrink import script, shrunk

    family, name, kind, seed = job
    try:
        case, breach = shrunk(ROUTES[name], families.case(family, seed), kind)
    except ValueError as error:  # a break that does not come again: of threads, or of an order of calls
        return f"{name}, {family} {seed}, {kind}: {error}"
    return script(ROUTES[name], case, breach)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the search that the arguments describe; return 1 if a promise was broken."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    from . import families
    from .routes import ROUTES

    parser = argparse.ArgumentParser(prog="python -m tests.adversary", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long to search")
    parser.add_argument("--matrices", type=int, default=None, help="how many matrices at most")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; runs of other seeds should be far off")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--routes", nargs="*", default=None, help="parts of names of routes; all if left out")
    parser.add_argument("--share", type=int, default=1, help="try each case on one of so many routes: more cases")
    parser.add_argument("--families", nargs="*", default=None, choices=list(families.FAMILIES))
    options = parser.parse_args(arguments)
    names = [n for n in ROUTES if options.routes is None or any(part in n for part in options.routes)]
    if not names:
        parser.error(f"no route is named so; there are {', '.join(ROUTES)}")
    chosen = options.families or list(families.FAMILIES)
    stop = time.time() + options.seconds

    def jobs():
        seed, given = options.seed, 0
        while time.time() < stop and (options.matrices is None or given < options.matrices):
            for family in chosen:
                count = 2 if family in families.LARGE else 25
                yield family, list(range(seed, seed + count)), names, options.share, stop
                given += count
            seed += 25

    tried: Counter[str] = Counter()
    broken: Broken = Counter()
    found: Found = {}
    began = time.time()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        waiting = []
        source = jobs()
        while True:
            while len(waiting) < 2 * options.processes and (job := next(source, None)) is not None:
                waiting.append(pool.apply_async(_worker, (job,)))
            if not waiting:
                break
            some, many, first = waiting.pop(0).get()
            tried += some
            broken += many
            for key, seed in first.items():
                found.setdefault(key, seed)
        firsts: dict[tuple[str, str], tuple[str, str, str, int]] = {}
        for (family, name, kind), seed in found.items():  # one script each
            firsts.setdefault((name, kind), (family, name, kind, seed))
        scripts = pool.map(_shrink, list(firsts.values())[:_SCRIPTS], chunksize=1)
    print(
        f"{tried['matrices']} matrices, {tried['results']} results of {len(names)} routes, {time.time() - began:.0f} s"
    )
    for text in scripts:
        print("\n" + "-" * 100 + "\n" + text)
    for (name, kind), (_, _, _, seed) in sorted(firsts.items()):
        where = {family: broken[family, name, kind] for family in chosen}
        families_of = ", ".join(f"{family} {count}" for family, count in where.items() if count)
        print(f"BROKEN {sum(where.values()):6d}  {name}: {kind} ({families_of}; seed {seed})")
    print("no promise was broken" if not broken else f"{sum(broken.values())} breaches of {len(broken)} kinds")
    return 1 if broken else 0
