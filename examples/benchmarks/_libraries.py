"""Leverage scores by other libraries, each as its documentation would have it, and which of them are installed.

A route is a function of one matrix of keys. Those of a library that is not installed are left out; `missing` says
which these are, and where to get them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
from _rivals import Array, by_gram

RIVALS = {
    "numpy": "",
    "scipy": "",
    "torch": "pip install torch",
    "pylspack": "not on PyPI; from github.com/IBM/pylspack, with a C++ compiler",
    "kvpress": "pip install kvpress; needs transformers below 5.3",
    "jax": "pip install jax",
}


def versions(names: tuple[str, ...]) -> str:
    """Name each package with its version, or say that it is not installed."""
    return ", ".join(f"{name} {version(name) or 'not installed'}" for name in names)


def version(name: str) -> str | None:
    """Return the version of an installed package that can be imported, else None."""
    try:
        importlib.import_module(name)
        return metadata.version(name)
    except (ImportError, KeyError, metadata.PackageNotFoundError):  # KeyError: kvpress beside a newer transformers
        return None


def missing(name: str) -> str:
    """Say that a package is not installed, and where it is to be had."""
    return f"not installed ({RIVALS[name]})"


class Route(NamedTuple):
    """Scores by one library: of which dtypes, and whether a call takes so long that rounds are too many."""

    package: str
    scores: Callable[[Array], Array]
    dtypes: tuple[str, ...] = ("float32", "float64")
    slow: bool = False


LONG = 2.0  # seconds of a call after which there is no second one
SECOND = (  # goes before the names of the routes
    f"the time of some routes is the second of two calls, or the first where it takes more than {LONG:.0f} s, "
    "without a warm-up. These routes are"
)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a slow call, which SECOND describes, and its result."""
    for _ in range(2):
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        if seconds > LONG:
            break
    return seconds, result


def _squares(Q: Array) -> Array:
    return np.einsum("ij,ij->i", Q, Q)


def _cut(values: Array, shape: tuple[int, ...], dtype: Any) -> int:
    """Return the numerical rank by the rule of numpy's matrix_rank, in the precision of the factorization."""
    return int(np.count_nonzero(values > max(shape) * np.finfo(dtype).eps * values[0]))


def numpy_svd(K: Array) -> Array:
    """Row norms of U, without directions below the numerical rank; numpy factors float32 in float64."""
    U, s, _ = np.linalg.svd(K, full_matrices=False)
    return _squares(U[:, : _cut(s, K.shape, np.float64)])


def numpy_qr(K: Array) -> Array:
    """Row norms of Q."""
    return _squares(np.linalg.qr(K)[0])


def scipy_qr(K: Array) -> Array:
    """Row norms of Q; scipy works in the precision of the keys."""
    return _squares(scipy.linalg.qr(K, mode="economic", check_finite=False)[0])


def scipy_pivoted(K: Array) -> Array:
    """Row norms of Q, with pivots, and without columns below the numerical rank."""
    Q, R, _ = scipy.linalg.qr(K, mode="economic", pivoting=True, check_finite=False)
    return _squares(Q[:, : _cut(np.abs(np.diag(R)), K.shape, K.dtype)])


def scipy_countsketch(K: Array) -> Array:
    """Scores against a CountSketch of 4 d² rows, at most n: a factor of it stands for that of the keys."""
    rows = min(4 * K.shape[1] ** 2, len(K))
    R = np.linalg.qr(scipy.linalg.clarkson_woodruff_transform(K, rows, rng=0), mode="r")
    return np.square(scipy.linalg.solve_triangular(R, K.T, trans="T", check_finite=False)).sum(axis=0)


def torch_qr(K: Array) -> Array:
    """Row norms of Q."""
    import torch

    return torch.linalg.qr(torch.from_numpy(K))[0].square().sum(1).numpy()


def torch_svd(K: Array) -> Array:
    """Row norms of U, without directions below the numerical rank."""
    import torch

    U, s, _ = torch.linalg.svd(torch.from_numpy(K), full_matrices=False)
    return U[:, : _cut(s.numpy(), K.shape, K.dtype)].square().sum(1).numpy()


def torch_cholesky(K: Array) -> Array:
    """Gram, Cholesky and a triangular solve."""
    import torch

    X = torch.from_numpy(K)
    L = torch.linalg.cholesky(X.T @ X)
    return torch.linalg.solve_triangular(L, X.T, upper=False).square().sum(0).numpy()


def pylspack_gram(K: Array) -> Array:
    """Gram in float64, its SVD, and row norms of a product; the default rcond."""
    from pylspack.leverage_scores import ls_via_inv_gram

    return ls_via_inv_gram(K)


def pylspack_sketched(K: Array) -> Array:
    """CountSketch and Gaussian sketch; without the right sketch, which takes more columns than a head has."""
    from pylspack.leverage_scores import ls_via_sketched_svd

    return ls_via_sketched_svd(K, r2=0)


ROUTES = {
    "numpy, SVD": Route("numpy", numpy_svd, slow=True),
    "numpy, QR": Route("numpy", numpy_qr, slow=True),
    "scipy, QR": Route("scipy", scipy_qr, slow=True),
    "scipy, pivoted QR": Route("scipy", scipy_pivoted, slow=True),
    "scipy, Gram and Cholesky": Route("scipy", by_gram),
    "torch, SVD": Route("torch", torch_svd, slow=True),
    "torch, QR": Route("torch", torch_qr),
    "torch, Gram and Cholesky": Route("torch", torch_cholesky),
    "pylspack, Gram": Route("pylspack", pylspack_gram, ("float64",)),
    "pylspack, sketched": Route("pylspack", pylspack_sketched, ("float64",), slow=True),
    "scipy, CountSketch of 4 d² rows": Route("scipy", scipy_countsketch),
}


# -- presses of kvpress: their own scores, of keys without positions -------------------------------


class Layer:
    """What a press reads of a model's layer: hidden states are the queries beside the keys of all heads."""

    def __init__(self, heads: int, d: int) -> None:
        self.head_dim, self.width = d, heads * d
        self.config = SimpleNamespace(num_attention_heads=heads)

    def q_proj(self, hidden: Any) -> Any:
        return hidden[..., : self.width]

    def k_proj(self, hidden: Any) -> Any:
        return hidden[..., self.width :]

    def rotary_emb(self, like: Any, positions: Any) -> tuple[Any, Any]:
        shape = (1, positions.shape[1], self.head_dim)
        return like.new_ones(shape), like.new_zeros(shape)  # no rotation


def press_scores(press: Any, Q: Array, K: Array, V: Array) -> Array:
    """Return what a press gives keys (heads, n, d) of one sequence: the larger, the sooner it keeps them."""
    import torch

    heads, n, d = K.shape
    queries, keys, values = (torch.from_numpy(np.ascontiguousarray(X)) for X in (Q, K, V))
    hidden = torch.cat([X.transpose(0, 1).reshape(1, n, heads * d) for X in (queries, keys)], dim=-1)
    still = torch.ones(1, n, d, dtype=keys.dtype), torch.zeros(1, n, d, dtype=keys.dtype)  # no rotation
    given = {"position_embeddings": still}
    with torch.no_grad():
        return press.score(Layer(heads, d), hidden, keys[None], values[None], None, given)[0].numpy()


def press_leverage(K: Array, columns: int) -> Array:
    """Return LeverageScorePress's scores of keys (heads, n, d) before they are standardized: of centered keys."""
    import torch
    from kvpress import LeverageScorePress

    return LeverageScorePress.compute_leverage_scores(torch.from_numpy(K)[None], columns)[0].numpy()
