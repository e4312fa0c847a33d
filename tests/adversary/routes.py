"""One table of public routes: how each is called, and which promises are held against its result.

A call is a function of its own, of the names that it takes of a case (K, Q, V, epsilon, mask, seed), so that it can be
printed as a part of a script.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import levattn
from levattn.exceptions import NonFiniteError

from . import promises
from .families import Case
from .oracle import Truth
from .promises import Breach

Judge = Callable[[Case, Truth, Any], Iterator[Breach]]


@dataclass(frozen=True)
class Route:
    """A way through the library."""

    name: str
    call: Callable[..., Any]
    judge: Judge
    admits: Callable[[Case], bool] = lambda _: True
    options: tuple[tuple[str, Any], ...] = ()

    def arguments(self, case: Case) -> dict[str, Any]:
        names = inspect.signature(self.call).parameters
        given = dict(self.options)
        return {name: given[name] if name in given else getattr(case, name) for name in names}

    def breaches(self, case: Case, truth: Truth | None = None) -> list[Breach]:
        """Run the route, and say which promises do not hold; a typed refusal is none."""
        truth = Truth(case.present, case.queries) if truth is None else truth
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                result = self.call(**self.arguments(case))
                return list(self.judge(case, truth, result))
        except Exception as error:
            return [] if refusal(error) else [Breach(f"{type(error).__name__}", "a result", str(error)[:200])]

    def refused(self, case: Case) -> bool:
        try:
            self.call(**self.arguments(case))
        except Exception as error:
            return refusal(error)
        return False


def refusal(error: Exception) -> bool:
    """Whether an error is one that says what is wrong with the arguments: finite keys are not called infinite."""
    return type(error) in (ValueError, TypeError) and not isinstance(error, NonFiniteError)


def _margin(result: Any) -> float:
    """Four times the estimated error of a score, for computed and for true scores: doubt counts as in."""
    return float(8 * np.max(result.factor.error, initial=0.0))


# -- sets of keys -----------------------------------------------------------------------------------------------------


def by_epsilon(K, epsilon, mask, method):
    return levattn.universal_set(K, epsilon, mask=mask, method=method)


def by_size(K, mask, seed, method):
    return levattn.universal_set(K, size=seed % (len(K) + 1), mask=mask, method=method)


def in_two_passes(K, epsilon, seed):
    step = 1 + seed % len(K)
    return levattn.universal_set(lambda: iter([K[i : i + step] for i in range(0, len(K), step)]), epsilon)


def sparse(K, epsilon):
    from scipy.sparse import csr_array

    return levattn.universal_set(csr_array(K), epsilon)


def in_torch(K, epsilon, mask):
    import torch

    return levattn.universal_set(torch.tensor(K), epsilon, mask=None if mask is None else torch.tensor(mask))


def strict(K, epsilon):
    import array_api_strict

    return levattn.universal_set(array_api_strict.asarray(np.ascontiguousarray(K)), epsilon)


def in_a_batch(K, epsilon, mask):
    batch = np.stack([K[::-1], K, np.zeros_like(K), np.ones_like(K)])
    masks = None if mask is None else np.stack([mask[::-1], mask, mask, mask])
    return levattn.universal_set(batch, epsilon, mask=masks), levattn.universal_set(K, epsilon, mask=mask)


def sketched(K, epsilon, mask, seed, method, recheck):
    return levattn.universal_set(K, epsilon, mask=mask, method=method, recheck=recheck, rng=seed)


def in_layouts(K, epsilon, method):
    others = np.ascontiguousarray(K), np.asfortranarray(K), np.ascontiguousarray(K[::-1, ::-1])[::-1, ::-1]
    found = [levattn.universal_set(other, epsilon, method=method) for other in others]
    return [(one.mask, one.scores, one.factor.whitening) for one in found]


def judge_set(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    chosen = np.asarray(result.mask)
    yield from promises.membership(truth, chosen, case.epsilon, result.guarantee, _margin(result), case.mask)
    relative = promises.SINGLE if case.storage != "float64" else max(promises.TIE, _margin(result))
    above = result.certificate != ("leverage",)
    if not above:
        yield from promises.scores_hold(truth, result.scores, relative)
        if result.rank > min(case.present.shape) or result.rank < 0:
            yield Breach("rank", f"at most {min(case.present.shape)}", str(result.rank))


def judge_size(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    chosen = np.asarray(result.mask)
    wanted = min(case.seed % (len(case.keys) + 1), len(case.keys) if case.mask is None else int(case.mask.sum()))
    if chosen.sum() != wanted:
        yield Breach("size", str(wanted), str(chosen.sum()))
    yield from promises.left_out(truth, chosen, float(result.epsilon))


def judge_batch(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    batch, one = result
    for name in ("mask", "scores"):
        yield from promises.same_bits("bits in a batch", getattr(one, name), getattr(batch, name)[1])


def judge_layouts(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    yield from _same(result, "bits of a layout")


def _same(results: list[Any], kind: str) -> Iterator[Breach]:
    """The figures of the first result are those of the others, to the bit."""
    for other in results[1:]:
        for mine, its in zip(results[0], other, strict=True):
            breach = next(promises.same_bits(kind, mine, its), None)
            if breach is not None:
                yield breach
                return


def scores(K, mask, method):
    return levattn.leverage_scores(K, mask=mask, method=method)


def judge_scores(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    relative = promises.SINGLE if case.storage != "float64" else 1e-9
    yield from promises.scores_hold(truth, result, relative)


def online(K, mask):
    return levattn.online_leverage_scores(K, mask=mask)


def judge_online(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    true = np.array([truth.prefix(i + 1).scores[i] for i in range(len(case.keys))])
    found = np.asarray(result, np.float64)
    relative = promises.SINGLE if case.storage != "float64" else 1e-6
    bad = ~(np.abs(found - true) <= relative * true + 1e-30) & (found < 1)
    if bad.any():
        yield Breach(
            "online score", f"{true[bad][:3].tolist()} of rows {np.flatnonzero(bad)[:5]}", str(found[bad][:3])
        )


# -- streams ----------------------------------------------------------------------------------------------------------


def streamed(K, epsilon, mask):
    return levattn.StreamingUniversalSet(epsilon).update(K, mask=mask).result()


def in_chunks(K, epsilon, mask, seed):
    state, step = levattn.StreamingUniversalSet(epsilon), 1 + seed % len(K)
    for start in range(0, len(K), step):
        part = slice(start, start + step)
        state.update(K[part], mask=None if mask is None else mask[part])
    return state.result()


def merged(K, epsilon, mask, seed):
    cut = seed % (len(K) + 1)
    parts = []
    for part in (slice(cut, len(K)), slice(0, cut)):
        state = levattn.StreamingUniversalSet(epsilon, row_start=part.start)
        state.update(K[part], mask=None if mask is None else mask[part])
        parts.append(levattn.StreamingUniversalSet.from_bytes(state.to_bytes()))
    return parts[0].merge(parts[1]).result()


def judge_stream(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    chosen = np.zeros(len(case.keys), bool)
    chosen[result.indices] = True
    yield from promises.membership(truth, chosen, case.epsilon, result.guarantee, _margin(result), case.mask)
    if not ((result.scores >= 0) & (result.scores <= 1)).all():
        yield Breach("score outside [0, 1]", "0 to 1", str(result.scores))


# -- queries ----------------------------------------------------------------------------------------------------------


def heavy(Q, K, V, epsilon, mask):
    found = levattn.heavy_attention(Q, K, epsilon, mask=mask)
    return found, found.apply(V), found.apply(V, compensate="mean")


def heavy_of_a_set(Q, K, V, epsilon, mask):
    universal = levattn.universal_set(K, epsilon, mask=mask, method="gram")
    found = levattn.heavy_attention(Q, K, epsilon, universal=universal)
    return found, found.apply(V), found.apply(V, compensate="mean")


def heavy_causal(Q, K, V, epsilon, mask):
    found = levattn.heavy_attention(Q, K, epsilon, causal=True, mask=mask)
    return found, found.apply(V), found.apply(V)


def judge_heavy(case: Case, truth: Truth, result: Any, *, causal: bool = False) -> Iterator[Breach]:
    found, plain, compensated = result
    error = getattr(found, "error", promises.TIE / 4)
    yield from promises.entries_hold(truth, found.entries.toarray(), case.epsilon, error, causal=causal)
    yield from promises.normalizers_hold(truth, found.normalizers, error, causal=causal)
    for name in ("captured_mass", "residual_mass"):
        mass = getattr(found, name)
        if not ((mass >= 0) & (mass <= 1)).all():
            yield Breach(name, "0 to 1", str(mass))
    for output, bound in (plain, compensated):
        yield from promises.output_holds(truth, case.values, output, bound, causal=causal)


def future(Q, K, epsilon, seed):
    rng, n = np.random.default_rng(seed), len(K)
    cut = int(rng.integers(1, n + 1))
    futures = [K, *(K.copy() for _ in range(4))]
    futures[1][cut:] = 0
    futures[2][cut:] = np.finfo(K.dtype).max / 16 if K.dtype.kind == "f" else 3e38
    futures[3][cut:] = (rng.standard_normal((n - cut, K.shape[1])) * 2.0**-14).astype(K.dtype)
    futures[4][cut:] = np.finfo(K.dtype).tiny if K.dtype.kind == "f" else 1e-38
    rows = []
    for keys, queries in [*((keys, Q) for keys in futures), (K[:cut], Q[:cut])]:
        found = levattn.heavy_attention(queries, keys, epsilon, causal=True)
        part = found.entries[:cut]
        rows.append((part.indptr, part.indices, part.data, found.normalizers[:cut], found.captured_mass[:cut]))
    return rows


def judge_future(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    yield from _same(result, "bits of the future")


def token_by_token(Q, K, epsilon, mask, seed):
    state, step, found = levattn.CausalUniversalSet(epsilon), 1 + seed % 3, []
    for start in range(0, len(K), step):
        part = slice(start, min(start + step, len(K)))
        state.update(K[part], mask=None if mask is None else mask[part])
        found.append((part.stop, state.heavy(Q)))
    return found


def in_large_steps(Q, K, epsilon, mask, seed):
    state, found = levattn.CausalUniversalSet(epsilon), []
    cuts = [0, *np.random.default_rng(seed).integers(0, len(K), 2).tolist(), len(K)]
    for start, stop in zip(sorted(cuts)[:-1], sorted(cuts)[1:], strict=True):
        state.update(K[start:stop], mask=None if mask is None else mask[start:stop])
        found.append((stop, state.heavy(Q)))
    return found


def judge_decoding(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    for n, found in result[-4:]:
        prefix = truth.prefix(n)
        m = len(case.queries)
        entries = np.zeros((m, n))
        rows = np.repeat(np.arange(m), np.diff(found.starts))
        entries[rows, found.indices] = found.scores
        yield from promises.entries_hold(prefix, entries, case.epsilon, found.error)
        yield from promises.normalizers_hold(prefix, found.normalizers, found.error)
        if not ((found.scores >= 0) & (found.scores <= 1 + promises.TIE)).all():
            yield Breach("score outside [0, 1]", "0 to 1", str(found.scores[:5]))
        if not ((found.captured_mass >= 0) & (found.captured_mass <= 1)).all():
            yield Breach("captured mass", "0 to 1", str(found.captured_mass))


# -- the table --------------------------------------------------------------------------------------------------------


def _few(case: Case) -> bool:
    return len(case.keys) <= 40


def _plain_numbers(case: Case) -> bool:
    """Storage that scipy and the array standard have."""
    return case.storage in ("float64", "float32")


def _torch_numbers(case: Case) -> bool:
    return case.storage != "bfloat16"


def _no_mask(case: Case) -> bool:
    return case.mask is None


ROUTES: dict[str, Route] = {
    route.name: route
    for route in (
        *(Route(f"set {m}", by_epsilon, judge_set, options=(("method", m),)) for m in ("auto", "gram", "qr", "svd")),
        *(Route(f"size {m}", by_size, judge_size, options=(("method", m),)) for m in ("auto", "gram", "qr", "svd")),
        Route("two passes", in_two_passes, judge_set, _no_mask),
        Route("sparse", sparse, judge_set, lambda case: _no_mask(case) and _plain_numbers(case)),
        Route("torch", in_torch, judge_set, lambda case: _torch_numbers(case)),
        Route("strict", strict, judge_set, lambda case: _no_mask(case) and _plain_numbers(case) and _few(case)),
        Route("batch", in_a_batch, judge_batch),
        *(Route(f"layout {m}", in_layouts, judge_layouts, options=(("method", m),)) for m in ("auto", "qr")),
        *(Route(f"scores {m}", scores, judge_scores, options=(("method", m),)) for m in ("auto", "gram", "qr", "svd")),
        Route("online", online, judge_online, _few),
        *(
            Route(f"sketch {m}{' recheck' * r}", sketched, judge_set, options=(("method", m), ("recheck", r)))
            for m in ("countsketch", "osnap", "srht", "jl", "halving")
            for r in (False, True)
        ),
        Route("stream", streamed, judge_stream),
        Route("stream in chunks", in_chunks, judge_stream),
        Route("stream merged", merged, judge_stream),
        Route("heavy", heavy, judge_heavy),
        Route("heavy of a set", heavy_of_a_set, judge_heavy),
        Route("heavy causal", heavy_causal, partial(judge_heavy, causal=True), _few),
        Route("future", future, judge_future, lambda case: _few(case) and _no_mask(case)),
        Route("decoding by tokens", token_by_token, judge_decoding, _few),
        Route("decoding", in_large_steps, judge_decoding),
    )
}
