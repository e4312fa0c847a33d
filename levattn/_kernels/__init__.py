"""The kernels: the only place that knows a device.

Each table is a module with the same functions and contracts: `_cpu` (Numba), `_csr` (Numba, sparse keys), `_cuda`
(CUDA through CuPy) and `_generic` (any namespace of the array-API standard, which is also the readable definition).
Small matrices (d by d) are numpy arrays, but for those that `_cuda` makes and takes on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

from levattn._core.arrays import Csr, on_cuda, to_float64
from levattn._kernels.latent.contract import Mixture
from levattn._kernels.pairwise import PairwiseSum
from levattn._kernels.rows.contract import BLOCK, Arithmetic, Float64, Pieces, Rows
from levattn._kernels.tokens.contract import Statistics, TokenSums

__all__ = [
    "BLOCK",
    "Arithmetic",
    "Float64",
    "Mixture",
    "PairwiseSum",
    "Pieces",
    "Rows",
    "Statistics",
    "TokenSums",
    "heavy_entries",
    "inverse_cholesky",
    "kernels_for",
    "latent_kernels_for",
    "precise_products",
    "precise_solutions",
    "query_norms",
    "selection_for",
    "slot_kernels_for",
    "span_kernels",
    "token_kernels_for",
    "twofold_product",
    "wide_rows",
]


def kernels_for(rows: Rows) -> ModuleType:
    """Return the table of kernels for the array that holds the keys."""
    if isinstance(rows.keys, Csr):
        from levattn._kernels.gram import csr as _csr

        return _csr
    if on_cuda(rows.keys):
        from levattn._kernels.gram import cuda as _cuda

        return _cuda
    if isinstance(rows.keys, np.ndarray):
        from levattn._kernels.gram import cpu as _cpu  # imports Numba, so only when a kernel is about to run

        return _cpu
    from levattn._kernels.gram import definition as _generic

    return _generic


def selection_for(keys: Any) -> ModuleType:
    """Return the table of what selects keys by their scores: on the device of the keys, or in main memory."""
    if on_cuda(keys):
        from levattn._kernels.select import cuda as _cuda_select

        return _cuda_select
    from levattn._kernels.select import cpu as _select

    return _select


def latent_kernels_for(array: Any) -> ModuleType:
    """Return the table of latent attention for the arrays of a `Mixture`.

    ``forward(x)`` is the output (b, T, D); ``backward(x, dY)`` the gradients of ``Σ dY · forward(x)`` in Q, K, V, gate
    and beside (None for those that there are not), with nothing for `state`; ``summary(K, V, mask, offsets)`` the
    state of all positions; ``joined(state, other)`` two states as one; ``decayed_scan(a, x, first=None, *,
    reverse=False)`` a linear recurrence of each channel.
    The definitions have no backward: in torch, gradients follow them.
    """
    if on_cuda(array):
        from levattn._kernels.latent import cuda as _cuda_latent

        return _cuda_latent
    if isinstance(array, np.ndarray):
        from levattn._kernels.latent import cpu as _latent

        return _latent
    from levattn._kernels.latent import definition as _generic_latent

    return _generic_latent


def token_kernels_for(array: Any) -> ModuleType:
    """Return the table of token statistics attention for the arrays of a `Statistics`.

    ``forward(x, *, state=False)`` is the output (b, h, T, d) and, if `state`, the sums after all tokens of each
    sequence, else None (those that it was given, where none is added); ``memberships(x)`` are the memberships
    (b, h, T); ``backward(x, dY)`` the gradients of ``Σ dY · forward(x)`` in W (b, h, T, d), temperature (b, h) and
    offset (b, h, T), the last None where there is none, with nothing for `state`; ``add_squares(X, mask, weights,
    decay, held, *, full=False)`` the sums of a second moment, or of its diagonal. The definitions have no backward: in
    torch, gradients follow them.
    """
    if on_cuda(array):
        from levattn._kernels.tokens import cuda as _cuda_tokens

        return _cuda_tokens
    if isinstance(array, np.ndarray):
        from levattn._kernels.tokens import cpu as _tokens

        return _tokens
    from levattn._kernels.tokens import definition as _generic_tokens

    return _generic_tokens


def slot_kernels_for(array: Any) -> ModuleType:
    """Return the table of pruned attention for the arrays of a `SlotMixture`.

    ``mixture(x)`` is the output (b, g, m, D) and the share of each query's weights that summaries have, (b, g, m);
    ``cluster(X, weight, R, iterations)`` the cluster of each row (b, n) and its squared distance to the centre;
    ``levels(labels, values, weight, R)`` weighted means by label; ``merged(labels, log_weight, items, R)`` R summaries
    of items, and ``radii(labels, items, reach, summaries)`` how far their members may be; ``moments(X)`` the sums
    (b, d) of rows and (b, d, d) of x xᵀ in float64; ``places(K, origin, root, query)`` keys in another basis,
    (b, n, d), and their products with a query, (b, n). In torch, gradients follow the definitions.
    """
    if isinstance(array, np.ndarray):
        from levattn._kernels.pruned import cpu as _pruned

        return _pruned
    from levattn._kernels.pruned import definition as _generic_slots

    return _generic_slots


def query_norms(Q: Any, N: Float64) -> tuple[Any, Any]:
    """Return ``‖N q‖²`` for every row q of Q, and ``‖|N| |q|‖²``, which bounds what cancels in it.

    Queries on a CUDA device have them there.
    """
    if on_cuda(Q):
        from levattn._kernels.heavy import cuda as _cuda_heavy

        return _cuda_heavy.query_norms(Q, N)
    from levattn._kernels.gram import cpu as _cpu

    return _cpu.query_norms(Q, N)


def wide_rows(rows: Any, format: str, beside: Any) -> Any:
    """Return the rows of a batch of one in float64: on a CUDA device if they and `beside` are there."""
    if on_cuda(rows) and on_cuda(beside):
        from levattn._kernels.heavy import cuda as _cuda_heavy

        return _cuda_heavy.wide_rows(rows, format)
    return to_float64(rows, format)[0]


def heavy_entries(Q: Any, keys: Any, indices: Any, normalizers: Any, epsilon: float) -> tuple[Any, Any, Any, Any]:
    """Return (starts, key indices, scores) of the entries of at least ε, in CSR order, and each query's mass.

    `keys` are the selected rows and `indices` their ascending numbers; nothing of size queries × keys is formed. All
    are float64 and int64 arrays, in main memory or on one CUDA device.
    """
    if on_cuda(Q):
        from levattn._kernels.heavy import cuda as _cuda_heavy

        return _cuda_heavy.heavy_entries(Q, keys, indices, normalizers, epsilon)
    from levattn._kernels.gram import cpu as _cpu

    return _cpu.heavy_entries(Q, keys, indices, normalizers, epsilon)


def inverse_cholesky(G: Any, shift: float = 0.0) -> tuple[Any, Float64, Float64]:
    """Return W with ``Wᵀ(G + shift diag(G))W = I``, the smallest pivot, and the reach, for each matrix.

    W is upper triangular; a pivot that is not positive says that the item failed. The reach bounds the squared
    spectral norm of the inverse factor of G scaled to unit diagonal: it carries the relative error of G to that of
    a score. Columns of zeros are left out (their row and column of W are zero). W is on the device of G.
    """
    if on_cuda(G):
        from levattn._kernels.gram import cuda as _cuda

        return _cuda.inverse_cholesky(G, shift)
    from levattn._kernels.gram import cpu as _cpu

    return _cpu.inverse_cholesky(G, shift)


def precise_products(Q: Float64, keys: Float64) -> Float64:
    """Return ``⟨q, k⟩`` of all rows q and k, each as if computed in twice the precision and rounded once."""
    from levattn._kernels.gram import cpu as _cpu

    return _cpu.precise_products(Q, keys)


def precise_solutions(B: Float64, Q: Float64) -> Float64:
    """Return ``B⁻¹ q`` for every row q, for an upper-triangular B, as if in twice the precision."""
    from levattn._kernels.gram import cpu as _cpu

    return _cpu.precise_solutions(B, Q)


def span_kernels() -> ModuleType:
    """Return the table of exact row spaces, for rows of float64 in main memory.

    They compute modulo the prime of a field, of which ``field()`` is that of this process.
    ``insert_rows(field, rows, basis, pivots, rank, units, chosen)`` extends a basis of residues (reduced row echelon,
    with room for more rows), notes which rows it took, and returns its rank;
    ``mark_outside(field, rows, basis, pivots, rank, units, out)`` sets `out` for the rows that the basis and the unit
    vectors do not span; ``mark_zeros(field, Q, K, rows, columns, out)`` sets `out` at pairs of orthogonal rows.
    """
    from levattn._kernels.factor import span as _cpu_span

    return _cpu_span


def twofold_product(pairs: Iterable[tuple[Float64, Float64]], d: int, *, symmetric: bool) -> tuple[Float64, Float64]:
    """Return ``Σ AᵀX`` over pairs of (n, d) matrices as two (d, d) matrices: the sum, and its rounding error.

    Together they hold the sum to about 2⁻⁹⁶ of ``Σ |A|ᵀ|X|``. If `symmetric`, the sum is taken to be, and half of
    the work is saved.
    """
    from levattn._kernels.gram import cpu as _cpu

    return _cpu.twofold_product(pairs, d, symmetric=symmetric)
