"""The contracts that files of kernels fulfill, for mypy to check; no code runs this.

`dispatch` takes all other kernels of a file from the definition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from levattn._kernels.factor import FactorKernels
    from levattn._kernels.factor import cpu as factor_cpu
    from levattn._kernels.factor import cuda as factor_cuda
    from levattn._kernels.gram import GramKernels
    from levattn._kernels.gram import cpu as gram_cpu
    from levattn._kernels.gram import csr as gram_csr
    from levattn._kernels.gram import cuda as gram_cuda
    from levattn._kernels.gram import definition as gram_definition
    from levattn._kernels.heavy import HeavyKernels
    from levattn._kernels.heavy import cpu as heavy_cpu
    from levattn._kernels.heavy import cuda as heavy_cuda
    from levattn._kernels.latent import LatentGradients, LatentKernels, LatentOperators, LatentSteps
    from levattn._kernels.latent import cpu as latent_cpu
    from levattn._kernels.latent import cuda as latent_cuda
    from levattn._kernels.latent import definition as latent_definition
    from levattn._kernels.latent import torch as latent_torch
    from levattn._kernels.precise import PreciseKernels
    from levattn._kernels.precise import cpu as precise_cpu
    from levattn._kernels.pruned import ClusterKernels, PrunedGradients, PrunedKernels, PrunedOperators
    from levattn._kernels.pruned import cpu as pruned_cpu
    from levattn._kernels.pruned import cuda as pruned_cuda
    from levattn._kernels.pruned import definition as pruned_definition
    from levattn._kernels.pruned import torch as pruned_torch
    from levattn._kernels.rows import RowKernels
    from levattn._kernels.rows import cpu as rows_cpu
    from levattn._kernels.rows import csr as rows_csr
    from levattn._kernels.rows import cuda as rows_cuda
    from levattn._kernels.rows import definition as rows_definition
    from levattn._kernels.select import SelectKernels
    from levattn._kernels.select import cuda as select_cuda
    from levattn._kernels.select import definition as select_definition
    from levattn._kernels.sketch import SketchKernels
    from levattn._kernels.sketch import cpu as sketch_cpu
    from levattn._kernels.sketch import csr as sketch_csr
    from levattn._kernels.sketch import cuda as sketch_cuda
    from levattn._kernels.sketch import definition as sketch_definition
    from levattn._kernels.tokens import TokenGradients, TokenKernels, TokenOperators
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
    _LATENT: tuple[LatentKernels, ...] = (latent_cpu, latent_cuda, latent_definition)
    _LATENT_OPERATORS: LatentOperators = latent_torch
    _LATENT_GRADIENTS: tuple[LatentGradients, ...] = (latent_cpu, latent_cuda)
    _LATENT_STEPS: tuple[LatentSteps, ...] = (latent_cpu, latent_cuda, latent_torch)
    _TOKENS: tuple[TokenKernels, ...] = (tokens_cpu, tokens_definition)
    _TOKEN_OPERATORS: tuple[TokenOperators, ...] = (tokens_cuda, tokens_torch)
    _TOKEN_GRADIENTS: tuple[TokenGradients, ...] = (tokens_cpu, tokens_cuda)
    _PRUNED: tuple[PrunedKernels, ...] = (pruned_cpu, pruned_definition)
    _PRUNED_OPERATORS: PrunedOperators = pruned_torch
    _PRUNED_GRADIENTS: PrunedGradients = pruned_cpu
    _CLUSTERS: ClusterKernels = pruned_cuda
