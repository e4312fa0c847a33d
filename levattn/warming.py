"""Calls that together use all kernels of the library, so that no later call compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from levattn import attention, states
from levattn._core.threads import reported
from levattn.functions import Huber, Softmax
from levattn.heavy.attention import causal_heavy_attention, heavy_attention
from levattn.heavy.decoding import CausalUniversalSet
from levattn.sensitivity.leverage import leverage_scores, online_leverage_scores
from levattn.sets.streaming import StreamingUniversalSet
from levattn.sets.universal import universal_set


def warmup(*uses: str, progress: bool | Callable[[int, int | None], object] | None = None) -> None:
    """Compile the kernels for this processor, so that no later call has to.

    Numba compiles a kernel at its first call with each dtype, and keeps the code on disk. So first calls of a new
    installation take seconds, and later processes load the code. This function makes all these calls, on small arrays
    in float32 and float64. It loads code that was compiled before. If torch is installed, kernels of gradients are
    among these.

    Parameters
    ----------
    *uses : {"scores", "sets", "heavy", "streams", "sketches", "latte", "tssa", "pruned"}
        The parts of the library that you are going to use. Without any, all kernels are compiled.
    progress : bool or callable, optional
        True shows a bar on standard error. A function is called with the number of calls done, and the total.

    Raises
    ------
    TypeError
        If a use is no string, or `progress` is neither a bool nor a callable.
    ValueError
        If there is no such use.
    ImportError
        If `progress` is True and rich is not installed (the extra ``cli``).

    Warns
    -----
    CacheWarning
        If no folder is writable, so that only this process profits.

    Notes
    -----
    The command ``levattn warmup`` does the same. It does not compile CUDA kernels: each is compiled at its first call.
    Compiling all takes some minutes on one core, compiling for one use 10 to 40 seconds, loading a few seconds. When a
    process begins to compile, the logger ``levattn`` reports it once, at level INFO.

    Examples
    --------
    >>> import levattn
    >>> levattn.warmup("sets", "heavy")  # doctest: +SKIP
    """
    check_uses(uses)
    work = calls(uses or tuple(USES))
    with reported(progress, len(work), "compiling") as advance:
        for call in work:
            call()
            advance(1)


def check_uses(uses: Sequence[Any]) -> None:
    """Raise for what is no use of the library."""
    for use in uses:
        if not isinstance(use, str):
            raise TypeError(f"uses holds {use!r}; expected names, such as warmup('sets', 'heavy')")
        if use not in USES:
            raise ValueError(f"there is no use {use!r}; expected {', '.join(map(repr, USES))}, or nothing for all")


def calls(uses: Sequence[str]) -> list[Callable[[], Any]]:
    """Return the calls for some uses, on arrays of float32 and of float64."""
    kinds = (np.float32, np.float64)
    return [call for kind in kinds for use in dict.fromkeys(uses) for call in USES[use](kind)]


def _keys(kind: Any) -> Any:
    return np.random.default_rng(0).standard_normal((9000, 64)).astype(kind)


def _of_scores(kind: Any) -> list[Callable[[], Any]]:
    from scipy.sparse import csr_array

    K, score = _keys(kind), leverage_scores
    hard = K @ np.diag(10.0 ** -np.arange(64.0)).astype(kind)
    wide = np.repeat(K[:300], 20, axis=1)[:, :600]
    return [
        lambda: score(K),
        lambda: score(K, method="qr"),
        lambda: score(K[:40]),
        lambda: score(K, mask=K[:, 0] > 0, center=True),
        lambda: score(hard),
        lambda: score(wide),
        lambda: score(np.tile(K[:, :4], 16)),
        lambda: score(csr_array(K[:, :8])),
    ]


def _of_sets(kind: Any) -> list[Callable[[], Any]]:
    K, find = _keys(kind), universal_set
    return [
        lambda: find(K, 0.1),
        lambda: find(K, size=9),
        lambda: find(K[None, :600], 0.1),
        lambda: find(K, 0.1, f=Huber()),
        lambda: find(K, 0.1, f=1),
        lambda: find(K[:600], 0.1, f=Softmax(1.0)),
    ]


def _of_heavy(kind: Any) -> list[Callable[[], Any]]:
    K, heavy = _keys(kind), heavy_attention
    return [
        lambda: heavy(K[:300], K, 0.1).apply(K),
        lambda: heavy(K[:300], K, 1e-4),
        lambda: heavy(K[:300], K, 0.1, f=4),
        lambda: causal_heavy_attention(K[:500], K[:500], 0.1).apply(K[:500]),
        lambda: CausalUniversalSet(0.1).update(K).heavy(K[:10]),
    ]


def _of_streams(kind: Any) -> list[Callable[[], Any]]:
    K = _keys(kind)
    return [
        lambda: StreamingUniversalSet(0.1).update(K[:700]).update(K[700:]).result(),
        lambda: universal_set(lambda: iter([K[:700], K[700:]]), 0.1),
        lambda: online_leverage_scores(K[:900]),
        lambda: states.Moments(64).update(K).factor(),
    ]


def _of_sketches(kind: Any) -> list[Callable[[], Any]]:
    K = _keys(kind)
    return [
        *(lambda m=m: leverage_scores(K, method=m) for m in ("countsketch", "osnap", "srht", "jl")),
        *(lambda m=m: universal_set(K, 0.1, method=m) for m in ("countsketch", "srht")),
    ]


def _of_latte(kind: Any) -> list[Callable[[], Any]]:
    X = _keys(kind)[None, :600]
    x = X[:, :1]
    return [
        lambda: attention.latte(X, X, X),
        lambda: attention.latte(X, X, X, causal=True),
        lambda: attention.latte(x, x, x, causal=True, state=states.SoftmaxState(64, 64, (1,)), return_state=True),
        lambda: attention.macchiato(X, X, X, (X, X, X[..., 0]), 64),
        *_by_torch(
            lambda: _followed(attention.latte, X, X, X),
            lambda: _followed(attention.latte, X, X, X, causal=True),
            lambda: _followed(attention.rg_lru, X, X, X, X[0, 0]),
        ),
    ]


def _of_tssa(kind: Any) -> list[Callable[[], Any]]:
    X = _keys(kind)[None, None, :600]
    x = X[:, :, :1]
    return [
        lambda: attention.tssa(X),
        lambda: attention.tssa(X, causal=True),
        lambda: attention.tssa(x, causal=True, state=_tokens_of(x), return_state=True),
        *_by_torch(lambda: _followed(attention.tssa, X), lambda: _followed(attention.tssa, X, causal=False)),
    ]


def _of_pruned(kind: Any) -> list[Callable[[], Any]]:
    X, few = _keys(kind)[None, :600], attention.Selection(size=64, summaries=8)
    return [
        lambda: attention.pruned_attention(X, X, X, few),
        lambda: attention.causal_pruned_attention(X, X, X, few, return_state=True),
        *_by_torch(lambda: _followed(partial(attention.pruned_attention, selection=few), X, X, X), lambda: _token(X)),
    ]


USES: dict[str, Callable[[Any], list[Callable[[], Any]]]] = {
    "scores": _of_scores,
    "sets": _of_sets,
    "heavy": _of_heavy,
    "streams": _of_streams,
    "sketches": _of_sketches,
    "latte": _of_latte,
    "tssa": _of_tssa,
    "pruned": _of_pruned,
}


def _by_torch(*work: Callable[[], Any]) -> tuple[Callable[[], Any], ...]:
    """Return calls that need torch, or nothing without it."""
    return work if find_spec("torch") is not None else ()


def _followed(operator: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """Compute the gradients of an operator in tensors of torch; return the first."""
    import torch

    leaves = [torch.from_numpy(array).clone().requires_grad_() for array in arrays]
    return torch.autograd.grad(operator(*leaves, **options).sum(), leaves)[0]


def _token(X: Any) -> Any:
    """Attend one token to slots, as a compressed cache does."""
    import torch

    from levattn._kernels.pruned.torch import attended_token, held_slots

    K = torch.from_numpy(X.astype(np.float32))[:, None]
    slots = held_slots([(K, K, None, (0,))], torch.float32)
    return None if slots is None else attended_token(K[:, :, -1:], slots, (K, K, None), 1.0, None)


def _tokens_of(x: Any) -> Any:
    return attention.tssa(x, causal=True, return_state=True)[1]
