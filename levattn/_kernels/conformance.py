"""Checks for mypy alone: each module of kernels provides the functions of its protocol. No code runs this.

`dispatch` takes all other kernels of a file from the definition.
"""

from __future__ import annotations


def _factor() -> None:
    from levattn._kernels.factor import FactorKernels, cpu, cuda

    _kernels: tuple[FactorKernels, ...] = (cpu, cuda)


def _gram() -> None:
    from levattn._kernels.gram import GramKernels, cpu, csr, cuda, definition

    _kernels: tuple[GramKernels, ...] = (cpu, csr, cuda, definition)


def _heavy() -> None:
    from levattn._kernels.heavy import HeavyKernels, cpu, cuda

    _kernels: tuple[HeavyKernels, ...] = (cpu, cuda)


def _latent() -> None:
    from levattn._kernels.latent import (
        LatentGradients,
        LatentKernels,
        LatentOperators,
        LatentSteps,
        cpu,
        cuda,
        definition,
        torch,
    )

    _kernels: tuple[LatentKernels, ...] = (cpu, cuda, definition)
    _operators: LatentOperators = torch
    _gradients: tuple[LatentGradients, ...] = (cpu, cuda)
    _steps: tuple[LatentSteps, ...] = (cpu, cuda, torch)


def _precise() -> None:
    from levattn._kernels.precise import PreciseKernels, cpu

    _kernels: PreciseKernels = cpu


def _pruned() -> None:
    from levattn._kernels.pruned import (
        ClusterKernels,
        LabelKernels,
        PrunedGradients,
        PrunedKernels,
        PrunedOperators,
        cpu,
        cuda,
        definition,
        torch,
    )

    _kernels: tuple[PrunedKernels, ...] = (cpu, definition)
    _operators: PrunedOperators = torch
    _gradients: PrunedGradients = cpu
    _clusters: ClusterKernels = cuda
    _labels: tuple[LabelKernels, ...] = (cuda, definition, torch)


def _rows() -> None:
    from levattn._kernels.rows import RowKernels, cpu, csr, cuda, definition

    _kernels: tuple[RowKernels, ...] = (cpu, csr, cuda, definition)


def _select() -> None:
    from levattn._kernels.select import SelectKernels, cuda, definition

    _kernels: tuple[SelectKernels, ...] = (cuda, definition)


def _sketch() -> None:
    from levattn._kernels.sketch import SketchKernels, cpu, csr, cuda, definition

    _kernels: tuple[SketchKernels, ...] = (cpu, csr, cuda, definition)


def _tokens() -> None:
    from levattn._kernels.tokens import TokenGradients, TokenKernels, TokenOperators, cpu, cuda, definition, torch

    _kernels: tuple[TokenKernels, ...] = (cpu, definition)
    _operators: tuple[TokenOperators, ...] = (cuda, torch)
    _gradients: tuple[TokenGradients, ...] = (cpu, cuda)
