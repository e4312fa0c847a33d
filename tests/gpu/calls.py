"""Public calls on a card against the same calls in float64 in main memory: ``python -m tests.gpu.calls --json FILE``.

A result may be off by a few roundings of its largest number, and of what a rounding of each given number changes. A
second call has the same bits, and heads one by one have those of a batch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import levattn
from levattn.attention import latte, tssa

from .cases import FAMILIES, Case, normal

ROUNDINGS = 8.0
TENSOR, CUPY = "a tensor", "CuPy"
FIRST_DTYPES = ("float32", "bfloat16")
LOST = ("illegal", "misaligned", "unspecified launch", "device-side assert")  # after these nothing runs any more


def tensors(arrays: Sequence[Any], dtype: str, device: str) -> list[Any]:
    import torch

    return [torch.from_numpy(np.ascontiguousarray(X)).to(getattr(torch, dtype)).to(device) for X in arrays]


def given(arrays: Sequence[Any], dtype: str, kind: str, device: str) -> list[Any]:
    """The arrays of a case as a library has them."""
    if kind == TENSOR:
        return tensors(arrays, dtype, device)
    import cupy

    # numbers as torch rounds them, who rounds float64 to float32 before
    return [cupy.asarray(X.numpy()) for X in tensors(arrays, dtype, "cpu")]


def results(case: Case, arrays: list[Any]) -> list[Any]:
    """What a call returns, for tensors with the gradients of all that is given."""
    if not (case.gradients and hasattr(arrays[0], "requires_grad_")):
        found = case.call(*arrays)
        return list(found) if isinstance(found, list | tuple) else [found]
    import torch

    leaves = [X.detach().requires_grad_() for X in arrays]
    # in which torch's attention adds gradients in a fixed order
    torch.use_deterministic_algorithms(case.narrow)
    try:
        Y = case.call(*leaves)
        weights = torch.from_numpy(normal(*Y.shape, seed=9)).to(Y.dtype).to(Y.device)
        return [Y.detach(), *torch.autograd.grad(Y, leaves, weights)]
    finally:
        torch.use_deterministic_algorithms(False)


def plain(array: Any) -> tuple[Any, float]:
    """An array in main memory, and the rounding of its format (0 for whole numbers)."""
    if hasattr(array, "detach"):
        import torch

        wide = array.detach().cpu()
        if not wide.dtype.is_floating_point:
            return wide.numpy(), 0.0
        return wide.double().numpy(), torch.finfo(wide.dtype).eps
    array = array.get() if hasattr(array, "get") else np.asarray(array)
    return (array, 0.0) if array.dtype.kind != "f" else (array.astype(np.float64), float(np.finfo(array.dtype).eps))


def rounded_once(X: Any, size: float) -> Any:
    """Numbers that are larger or smaller by a relative size, at random."""
    return X * (1 + size * np.random.default_rng(X.size).choice([-1.0, 1.0], X.shape))


def expected(case: Case, dtype: str) -> list[tuple[Any, float]]:
    """What a call returns in main memory, and how much a rounding of what is given changes of it."""
    stored = tensors(case.arrays(), dtype, "cpu")
    if case.exact:
        return [(plain(Y)[0], 0.0) for Y in results(case, stored)]
    import torch

    wide = [X.double().numpy() for X in stored]
    size = torch.finfo(getattr(torch, dtype if case.narrow or dtype == "float64" else "float32")).eps / 2
    exact, near = (
        [plain(Y)[0] for Y in results(case, tensors(arrays, "float64", "cpu"))]
        for arrays in (wide, [rounded_once(X, size) for X in wide])
    )
    pairs = zip(exact, near, strict=True)
    return [(Y, float(np.max(np.abs(Y - other), initial=0))) for Y, other in pairs]


def faults(found: list[Any], known: list[tuple[Any, float]], *, exact: bool, least: float = 0.0) -> Iterator[str]:
    """What is wrong with the results of a call; `least`: the rounding of what it computes in."""
    if len(found) != len(known):
        yield f"{len(found)} arrays in place of {len(known)}"
    for (Y, rounding), (X, change) in zip(map(plain, found), known, strict=False):
        if Y.shape != X.shape:
            yield f"the shape {Y.shape} in place of {X.shape}"
        elif exact:
            if not np.array_equal(Y, X):
                yield f"{np.count_nonzero(X != Y)} of {X.size} differ"
        elif not np.isfinite(Y).all():
            yield "numbers that are not finite"
        else:
            error = float(np.max(np.abs(Y - X), initial=0))
            bar = ROUNDINGS * (change + max(rounding, least) * float(np.max(np.abs(X), initial=0)))
            if error > bar:
                yield f"off by {error:.2e}, {error / bar if bar else np.inf:.2f} times what it may"


def same(found: list[Any], again: list[Any]) -> bool:
    return all(np.array_equal(plain(X)[0], plain(Y)[0], equal_nan=True) for X, Y in zip(found, again, strict=True))


class Reference:
    """What a call has to return, made at the first kind of array that needs it."""

    def __init__(self, case: Case, dtype: str) -> None:
        self._case, self._dtype = case, dtype
        self._held: list[tuple[Any, float]] = []

    def of(self, kind: str) -> list[tuple[Any, float]]:
        self._held = self._held or expected(self._case, self._dtype)
        return self._held[:1] if self._case.gradients and kind != TENSOR else self._held


def tried(case: Case, dtype: str, kind: str, device: str, reference: Reference | None) -> dict[str, Any]:
    """One call, twice, and what came of it; without a reference only that it runs."""
    known = None if reference is None else reference.of(kind)
    least = max(case.raised / ROUNDINGS, 0.0 if dtype == "float64" else float(np.finfo(np.float32).eps))
    begun = time.monotonic()
    found = results(case, given(case.arrays(), dtype, kind, device))
    wrong = [] if known is None else list(faults(found, known, exact=case.exact, least=least))
    between = time.monotonic()
    if known is not None and not same(found, results(case, given(case.arrays(), dtype, kind, device))):
        wrong.append("the second call has other bits")
    seconds = [round(end - start, 3) for start, end in ((begun, between), (between, time.monotonic()))]
    return {"wrong": "; ".join(wrong), "seconds": seconds}


BATCHES: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], str]] = {
    "scores, 40 columns": (levattn.leverage_scores, (8, 3000, 40), "float32"),
    "scores, 128 columns": (levattn.leverage_scores, (8, 3000, 128), "bfloat16"),
    "scores, 300 columns": (levattn.leverage_scores, (8, 1500, 300), "float32"),
    "scores, 300 columns, float64": (levattn.leverage_scores, (8, 1500, 300), "float64"),
    "scores, 640 columns": (levattn.leverage_scores, (5, 2500, 640), "float64"),
    "latent, a batch": (lambda X: latte(X, X, X), (6, 300, 32), "bfloat16"),
    "tokens, a batch": (lambda X: tssa(X.unflatten(-1, (4, 32)).transpose(-3, -2)), (6, 300, 128), "float32"),
}


def batches(family: str, device: str) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Heads one by one, and side by side with others, against a batch: the same bits."""

    def compared(call: Callable[[Any], Any], X: Any) -> dict[str, Any]:
        import torch

        whole, beside = call(X), torch.cat([X, X], -1)[..., : X.shape[-1]]
        others = {"one by one": torch.stack([call(one) for one in X]), "another layout": call(beside)}
        differ = {name: int((whole != other).sum()) for name, other in others.items()}
        return {"wrong": "; ".join(f"{name}: {n} numbers differ" for name, n in differ.items() if n)}

    for name, (call, shape, dtype) in BATCHES.items():
        if name.partition(",")[0] == family:
            sizes = np.geomspace(1, 1e-5, shape[-1])
            for how, factors in (("", 1.0), (", graded", sizes)):
                (X,) = tensors([normal(*shape) * factors], dtype, device)
                yield f"{name}{how}", dtype, partial(compared, call, X)


def calls(options: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """All calls that are asked for, by name and format; those of the first minute come first."""
    kinds = (TENSOR, CUPY) if options.device == "cuda" and not options.plain else (TENSOR,)
    for family in options.only:
        chosen = [(name, case) for name, case in FAMILIES[family].items() if case.first or not options.first]
        for name, case in sorted(chosen, key=lambda pair: not pair[1].first):
            for dtype in (each for each in case.dtypes if not options.first or each in FIRST_DTYPES):
                reference = None if options.plain else Reference(case, dtype)
                for kind in kinds:
                    if kind == TENSOR or dtype != "bfloat16":
                        run = partial(tried, case, dtype, kind, options.device, reference)
                        yield f"{family}, {name}, {kind}", dtype, run
        if not options.plain and not options.first:
            yield from batches(family, options.device)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.calls", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--first", action="store_true", help="a few calls of each kind, in two formats")
    parser.add_argument("--plain", action="store_true", help="run each call once and look at no result")
    parser.add_argument("--json", type=Path, required=True, help="where what came of each call goes")
    options = parser.parse_args(arguments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which cuBLAS is not deterministic
    told: list[dict[str, Any]] = []
    counts = {"calls right": 0, "calls wrong": 0}
    for name, dtype, call in calls(options):
        try:
            came = call()
        except Exception as error:
            came = {"wrong": f"{type(error).__name__}: {str(error)[:500]}"}
        told.append({"call": name, "dtype": dtype, **came})
        counts["calls wrong" if came["wrong"] else "calls right"] += 1
        options.json.write_text(json.dumps({"counts": counts, "calls": told}, indent=0), "utf-8")
        print(f"{'WRONG' if came['wrong'] else 'right'}  {name}, {dtype}  {came['wrong']}", flush=True)
        if any(word in came["wrong"] for word in LOST):
            print("the device is lost to this process: the calls that are left are not tried")
            return 1
    return int(counts["calls wrong"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
