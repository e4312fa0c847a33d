"""Look-up of the kernels for an array; no other module does it."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from levattn._core.arrays import is_torch, on_cuda
from levattn._core.sparse import Csr
from levattn._core.threads import available_threads

if TYPE_CHECKING:
    from levattn._kernels.factor import FactorKernels
    from levattn._kernels.gram import GramKernels
    from levattn._kernels.heavy import HeavyKernels
    from levattn._kernels.latent import LatentGradients, LatentKernels, LatentSteps
    from levattn._kernels.precise import PreciseKernels
    from levattn._kernels.pruned import PrunedKernels
    from levattn._kernels.rows import RowKernels
    from levattn._kernels.select import SelectKernels
    from levattn._kernels.sketch import SketchKernels
    from levattn._kernels.tokens import TokenGradients, TokenKernels

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
    """Return the kernels of a task for an array: a module that implements the contract in the task's folder.

    The file depends on the array: ``csr`` for sparse keys, ``cuda`` for CuPy, ``cpu`` for NumPy, and ``torch`` for a
    tensor. For other arrays, or if the folder lacks the file, it is ``definition``.
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


def __getattr__(name: str) -> Any:
    """Return the kernels of a task on first use, and keep them as an attribute of this module.

    Torch's compiler can trace attributes, but neither imports by name nor caches.
    """
    task, _, file = name.rpartition("_")
    # pickle looks for names, such as "torch", in every module
    if file not in _FILES or not task or find_spec(f"levattn._kernels.{task}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    available_threads()  # a wrong number in the environment is an error at the first use, not at the first large call
    for found in (file, "definition"):
        path = f"levattn._kernels.{task}.{found}"
        if find_spec(path) is not None:
            globals()[name] = import_module(path)
            return globals()[name]
    raise NotImplementedError(f"{task} has no kernels for arrays of {file}; give arrays of NumPy or CuPy")


if TYPE_CHECKING:  # mypy checks that the modules implement their contracts
    from levattn._kernels.factor import cpu as factor_cpu
    from levattn._kernels.factor import cuda as factor_cuda
    from levattn._kernels.gram import cpu as gram_cpu
    from levattn._kernels.gram import csr as gram_csr
    from levattn._kernels.gram import cuda as gram_cuda
    from levattn._kernels.gram import definition as gram_definition
    from levattn._kernels.heavy import cpu as heavy_cpu
    from levattn._kernels.heavy import cuda as heavy_cuda
    from levattn._kernels.latent import cpu as latent_cpu
    from levattn._kernels.latent import cuda as latent_cuda
    from levattn._kernels.latent import definition as latent_definition
    from levattn._kernels.latent import torch as latent_torch
    from levattn._kernels.precise import cpu as precise_cpu
    from levattn._kernels.pruned import cpu as pruned_cpu
    from levattn._kernels.pruned import cuda as pruned_cuda
    from levattn._kernels.pruned import definition as pruned_definition
    from levattn._kernels.pruned import torch as pruned_torch
    from levattn._kernels.rows import cpu as rows_cpu
    from levattn._kernels.rows import csr as rows_csr
    from levattn._kernels.rows import cuda as rows_cuda
    from levattn._kernels.rows import definition as rows_definition
    from levattn._kernels.select import cuda as select_cuda
    from levattn._kernels.select import definition as select_definition
    from levattn._kernels.sketch import cpu as sketch_cpu
    from levattn._kernels.sketch import csr as sketch_csr
    from levattn._kernels.sketch import cuda as sketch_cuda
    from levattn._kernels.sketch import definition as sketch_definition
    from levattn._kernels.tokens import cpu as tokens_cpu
    from levattn._kernels.tokens import cuda as tokens_cuda
    from levattn._kernels.tokens import definition as tokens_definition
    from levattn._kernels.tokens import torch as tokens_torch

    _ROWS: tuple[RowKernels, ...] = (rows_cpu, rows_csr, rows_cuda, rows_definition)
    _GRAM: tuple[GramKernels, ...] = (gram_cpu, gram_csr, gram_cuda, gram_definition)
    _FACTOR: tuple[FactorKernels, ...] = (factor_cpu, factor_cuda)
    _PRECISE: PreciseKernels = precise_cpu
    _SKETCH: tuple[SketchKernels, ...] = (sketch_cpu, sketch_csr, sketch_cuda, sketch_definition)
    _SELECT: tuple[SelectKernels, ...] = (select_cuda, select_definition)
    _HEAVY: tuple[HeavyKernels, ...] = (heavy_cpu, heavy_cuda)
    _LATENT: tuple[LatentKernels, ...] = (latent_definition, latent_torch)
    _LATENT_GRADIENTS: tuple[LatentGradients, ...] = (latent_cpu, latent_cuda)
    _LATENT_STEPS: tuple[LatentSteps, ...] = (latent_cpu, latent_cuda, latent_torch)
    _TOKENS: tuple[TokenKernels, ...] = (tokens_definition, tokens_torch)
    _TOKENS_GRADIENTS: tuple[TokenGradients, ...] = (tokens_cpu, tokens_cuda)
    _PRUNED: tuple[PrunedKernels, ...] = (pruned_cpu, pruned_cuda, pruned_definition, pruned_torch)
