"""Look-up of the kernels for an array; no other module does it."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np

from levattn._core.arrays import is_torch, on_cuda
from levattn._core.sparse import Csr
from levattn._core.threads import available_threads
from levattn._kernels.factor import FactorKernels
from levattn._kernels.gram import GramKernels
from levattn._kernels.heavy import HeavyKernels
from levattn._kernels.precise import PreciseKernels
from levattn._kernels.pruned import PrunedKernels
from levattn._kernels.rows import RowKernels
from levattn._kernels.select import SelectKernels
from levattn._kernels.sketch import SketchKernels

if TYPE_CHECKING:
    from levattn._kernels.latent import LatentKernels
    from levattn._kernels.tokens import TokenKernels

_HERE = sys.modules[__name__]
_FILES = ("cpu", "csr", "cuda", "definition", "torch")


@overload
def kernels_for(task: Literal["rows"], array: Any, /) -> RowKernels: ...
@overload
def kernels_for(task: Literal["gram"], array: Any, /) -> GramKernels: ...
@overload
def kernels_for(task: Literal["factor"], array: Any, /) -> FactorKernels: ...
@overload
def kernels_for(task: Literal["precise"], array: Any, /) -> PreciseKernels: ...
@overload
def kernels_for(task: Literal["sketch"], array: Any, /) -> SketchKernels: ...
@overload
def kernels_for(task: Literal["select"], array: Any, /) -> SelectKernels: ...
@overload
def kernels_for(task: Literal["heavy"], array: Any, /) -> HeavyKernels: ...
@overload
def kernels_for(task: Literal["latent"], array: Any, /) -> LatentKernels: ...
@overload
def kernels_for(task: Literal["tokens"], array: Any, /) -> TokenKernels: ...
@overload
def kernels_for(task: Literal["pruned"], array: Any, /) -> PrunedKernels: ...


def kernels_for(task: str, array: Any, /) -> Any:
    """Return the kernels of a task for an array, which implement the contract in the task's folder.

    They come from a file for the array: ``csr`` for sparse keys, ``cuda`` for CuPy, ``cpu`` for NumPy, and ``torch``
    for a tensor. Kernels that this file lacks come from ``definition``, as do all for other arrays.
    """
    if isinstance(array, np.ndarray):
        file = "cpu"
    elif isinstance(array, Csr):
        file = "csr"
    elif is_torch(array):
        file = "torch"
    else:
        file = "cuda" if on_cuda(array) else "definition"
    return getattr(_HERE, f"{task}_{file}")


def _by_argument(task: Any, contract: type) -> Any:
    """Return the kernels of a contract, each looked up by its first argument: an array, or a record with keys."""

    def named(name: str) -> Any:
        def kernel(first: Any, /, *others: Any, **options: Any) -> Any:
            return getattr(kernels_for(task, getattr(first, "keys", first)), name)(first, *others, **options)

        return kernel

    return SimpleNamespace(**{name: named(name) for name in dir(contract) if not name.startswith("_")})


class _Precise:
    """The precise kernels, which are for arrays of NumPy alone; not all of them take an array first."""

    def __getattr__(self, name: str) -> Any:
        if name not in vars(PreciseKernels):
            raise AttributeError(name)
        return getattr(_HERE.precise_cpu, name)


FACTOR: FactorKernels = _by_argument("factor", FactorKernels)
GRAM: GramKernels = _by_argument("gram", GramKernels)
HEAVY: HeavyKernels = _by_argument("heavy", HeavyKernels)
PRECISE: PreciseKernels = cast(PreciseKernels, _Precise())
PRUNING: PrunedKernels = _by_argument("pruned", PrunedKernels)
KEYS: RowKernels = _by_argument("rows", RowKernels)
SELECT: SelectKernels = _by_argument("select", SelectKernels)
SKETCH: SketchKernels = _by_argument("sketch", SketchKernels)


def __getattr__(name: str) -> Any:
    """Return the kernels of a task on first use, and keep them as an attribute of this module.

    Torch's compiler can trace attributes, but neither imports by name nor caches.
    """
    task, _, file = name.rpartition("_")
    # pickle looks for names, such as "torch", in every module
    if file not in _FILES or not task or find_spec(f"levattn._kernels.{task}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    available_threads()  # a wrong number in the environment is an error at the first use, not at the first large call
    paths = [f"levattn._kernels.{task}.{part}" for part in dict.fromkeys((file, "definition"))]
    found = [import_module(path) for path in paths if find_spec(path) is not None]
    if not found:
        raise NotImplementedError(f"{task} has no kernels for arrays of {file}; give arrays of NumPy or CuPy")
    table = ModuleType(f"{__name__}.{name}", "The kernels of one file, and those of the definition that it lacks.")
    for module in reversed(found):
        vars(table).update((key, part) for key, part in vars(module).items() if not key.startswith("_"))
    globals()[name] = found[0] if len(found) == 1 else table
    return globals()[name]
