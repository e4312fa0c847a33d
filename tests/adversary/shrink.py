"""From a case that breaks a promise to the smallest that still does, and that as a script."""

from __future__ import annotations

import dis
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import CodeType
from typing import Any

import numpy as np

from . import ranks, routes
from .families import Case, Float, stored
from .promises import Breach
from .routes import Route


def shrunk(route: Route, case: Case, kind: str, *, seconds: float = 30.0) -> tuple[Case, Breach]:
    """The smallest case that was found for which the route breaks a promise of this kind."""
    stop = time.monotonic() + seconds
    found = _breach(route, case, kind)
    if found is None:
        raise ValueError(f"no breach of kind {kind!r} in {case.family} {case.seed}")
    again = True
    while again and time.monotonic() < stop:
        again = False
        for smaller in _simpler(case):
            if time.monotonic() > stop:
                break
            breach = _breach(route, smaller, kind)
            if breach is not None:
                case, found, again = smaller, breach, True
                break
    return case, found


def _breach(route: Route, case: Case, kind: str) -> Breach | None:
    if not len(case.keys) or not route.admits(case):
        return None
    return next((b for b in route.breaches(case) if b.kind == kind), None)


def _simpler(case: Case) -> Iterator[Case]:
    """Cases that are simpler in one respect, the largest steps first."""
    n, d = case.keys.shape
    size = n
    while size := size // 2:  # runs of rows, of single ones in the end
        for start in range(0, n, size):
            yield from _without(case, range(start, min(start + size, n)))
    for c in range(d if d > 1 else 0):
        yield replace(case, keys=np.delete(case.keys, c, 1), queries=np.delete(case.queries, c, 1))
    for i in range(len(case.queries) if len(case.queries) > 1 else 0):
        yield replace(case, queries=np.delete(case.queries, i, 0))
    if case.mask is not None:
        yield replace(case, mask=None)
    if case.layout != "C":
        yield replace(case, layout="C")
    if case.storage != "float64":
        yield replace(case, storage="float64")
    if case.seed > 3:  # which decides how keys are cut into chunks
        for seed in range(4):
            yield replace(case, seed=seed)
    for epsilon in (0.5, 0.25, 0.1):
        if _digits(epsilon) < _digits(case.epsilon):
            yield replace(case, epsilon=epsilon)
    if n > 200:
        return
    for name in ("keys", "queries", "values"):
        for other in _simpler_numbers(getattr(case, name)):
            if np.array_equal(other, stored(other, case.storage, "C").astype(np.float64)):
                yield replace(case, **{name: other})


def _without(case: Case, rows: range) -> Iterator[Case]:
    gone = np.asarray(rows)
    rest = replace(
        case,
        keys=np.delete(case.keys, gone, 0),
        values=np.delete(case.values, gone, 0),
        mask=None if case.mask is None else np.delete(case.mask, gone),
    )
    yield rest
    if len(case.queries) == len(case.keys):
        yield replace(rest, queries=np.delete(case.queries, gone, 0))


def _simpler_numbers(A: Float) -> Iterator[Float]:
    for rows in (slice(None), *range(len(A))):  # all of it, a row, an entry
        for whole in (np.zeros_like(A), np.sign(A), np.rint(A)):
            yield from _replaced(A, rows, slice(None), whole)
    for i, j in np.ndindex(A.shape):
        value = float(A[i, j])
        power = float(np.ldexp(np.sign(value), np.frexp(value)[1] - 1)) if value else 0.0
        for other in (0.0, 1.0, -1.0, power, float(np.rint(value)), float(f"{value:.1g}"), float(f"{value:.3g}")):
            yield from _replaced(A, i, j, np.full_like(A, other))


def _replaced(A: Float, i: int | slice, j: int | slice, other: Float) -> Iterator[Float]:
    B = A.copy()
    B[i, j] = other[i, j]
    if _cost(B) < _cost(A):
        yield B


def _digits(x: float) -> int:
    return 0 if x == 0 else 1 if abs(x) == 1 else len(repr(abs(x))) + 2


def _cost(A: Float) -> int:
    return sum(_digits(float(x)) + (x < 0) for x in A.reshape(-1))


def called_by(call: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The functions of routes that a call needs, itself the last."""
    found = []
    for name in _global_names(call.__code__):
        other = getattr(routes, name, None)
        if inspect.isfunction(other) and inspect.getmodule(other) is routes:
            found += called_by(other)
    return list(dict.fromkeys([*found, call]))


def _global_names(code: CodeType) -> Iterator[str]:
    """The global names that code reads, also in comprehensions, which are code of their own before Python 3.12."""
    yield from (str(step.argval) for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _global_names(part)


# -- as a script ------------------------------------------------------------------------------------------------------


def script(route: Route, case: Case, breach: Breach) -> str:
    """A program of its own that shows a breach: whoever reads it needs nothing else."""
    names = [*route.of_the_case(), *dict(route.options)]
    plain = case.storage == "float64" and case.layout == "C"
    source = "\n\n".join(map(inspect.getsource, called_by(route.call)))
    if inspect.getmodule(route.call) is ranks:  # which starts processes: to be run from the project's root
        source = f"from tests.adversary.ranks import {route.call.__name__}\n"
    lines = [
        f'"""{route.name}, {case.family} {case.seed}: {breach.kind}.',
        "",
        f"Expected {breach.expected}",
        f"Got      {breach.got}",
        '"""',
        "import numpy as np",
        "import levattn",
        "",
        *(() if plain else ("from typing import Any", "", inspect.getsource(stored))),
        source,
    ]
    for name, array in (("K", case.keys), ("Q", case.queries), ("V", case.values)):
        if name in names:
            how = "np.array({})" if plain else f"stored({{}}, {case.storage!r}, {case.layout!r})"
            lines.append(f"{name} = {how.format(_matrix(array))}")
    others = {"epsilon": _number(case.epsilon), "seed": str(case.seed)}
    others["mask"] = "None" if case.mask is None else f"np.array({case.mask.tolist()})"
    others |= {name: repr(value) for name, value in route.options}
    call = ", ".join(f"{name}={others.get(name, name)}" for name in names)
    return "\n".join([*lines, f"print({route.call.__name__}({call}))", ""])


def _matrix(A: Float) -> str:
    return "[" + ", ".join("[" + ", ".join(map(_number, row)) + "]" for row in A) + "]"


def _number(x: float) -> str:
    short = repr(float(x))
    return short if len(short) <= 8 else f"float.fromhex({float(x).hex()!r})"
