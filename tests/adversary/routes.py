"""One table of public routes: how each is called, and which promises are held against its result.

A call is a function of the names that it takes of a case (K, Q, V, epsilon, mask, seed) and of options of its route,
which can be printed as a part of a script, with the functions of this module that it calls.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import numpy as np

import levattn
from levattn.exceptions import NonFiniteError

from . import oracle, promises
from .families import Case
from .oracle import Centered, Function, Truth
from .promises import Breach
from .ranks import universal_set_of_ranks

Judge = Callable[[Case, Truth, Any], Iterator[Breach]]


@dataclass(frozen=True)
class Route:
    """A way through the library."""

    name: str
    call: Callable[..., Any]
    judge: Judge
    when: tuple[Callable[[Case], bool], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def admits(self, case: Case) -> bool:
        return all(holds(case) for holds in self.when)

    def arguments(self, case: Case) -> dict[str, Any]:
        given = dict(self.options)
        return given | {name: getattr(case, name) for name in self.of_the_case()}

    def of_the_case(self) -> list[str]:
        """The names that the call takes of a case: those that are neither options nor left to their default."""
        taken = inspect.signature(self.call).parameters.values()
        return [one.name for one in taken if one.default is one.empty and one.name not in dict(self.options)]

    def breaches(self, case: Case, truth: Truth | None = None) -> list[Breach]:
        """Run the route, and say which promises do not hold; a typed refusal is none."""
        truth = Truth(case.present, case.queries) if truth is None else truth
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.simplefilter("ignore", levattn.RankWarning)  # a large set misses no key
                result = self.call(**self.arguments(case))
            with np.errstate(all="ignore"):  # of what the judges compute themselves
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


def _relative(case: Case, method: str, exact: float) -> float:
    """The relative error of a score that leverage_scores allows; exact: for float64 keys."""
    if case.storage == "float64":
        return exact
    return promises.IN_SINGLE if method == "auto" and len(case.keys) >= promises.SINGLE_FROM else promises.SINGLE


def _method(result: Any) -> str:
    """The method whose error a set may have: products in float32 are those of "auto"."""
    return "auto" if "single" in result.factor.arithmetic else "gram"


def _raised(result: Any) -> float:
    """What scores of an exact rank above the numerical one are raised by, relative to them (docs of `scores`)."""
    return max(
        (8 * float(one.score_error[0]) for one in result.factor.hidden.values() if one is not None), default=0.0
    )


# -- sets of keys -----------------------------------------------------------------------------------------------------


def function(f):
    if not isinstance(f, str):
        return f
    name, parameters = f.rstrip(")").split("(")
    return getattr(levattn, name)(*map(float, parameters.split()))


def by_epsilon(K, epsilon, mask, method="auto", f=2):
    return levattn.universal_set(K, epsilon, mask=mask, method=method, f=function(f))


def by_size(K, mask, seed, method="auto", f=2):
    return levattn.universal_set(K, size=seed % (len(K) + 1), mask=mask, method=method, f=function(f))


def in_parts(K, step):
    return lambda: iter([K[i : i + step] for i in range(0, len(K), step)])


def in_two_passes(K, epsilon, seed):
    return levattn.universal_set(in_parts(K, 1 + seed % len(K)), epsilon)


def from_a_file(K, epsilon, mask, seed):
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        np.save(f"{folder}/keys.npy", K)
        return levattn.universal_set(levattn.open_keys(f"{folder}/keys.npy", chunk_rows=1 + seed), epsilon, mask=mask)


def sparse(K, epsilon):
    from scipy.sparse import csr_array

    return levattn.universal_set(csr_array(K), epsilon)


def over_roots(K, seed):
    """Keys over powers of two, and the squares of these, as weights."""
    rng = np.random.default_rng(seed)
    roots = 2.0 ** (rng.integers(-9, 10, len(K)) + rng.integers(-40, 41))
    with np.errstate(all="ignore"):
        X = K / roots[:, None]
        if not np.array_equal(X * roots[:, None], K):  # out of the range
            roots, X = np.ones(len(K)), K
    return X, roots**2


def weighted(K, epsilon, mask, seed):
    X, w = over_roots(K, seed)
    return levattn.universal_set(X, epsilon, mask=mask, weights=w)


def weighted_scores(K, mask, seed):
    X, w = over_roots(K, seed)
    return levattn.leverage_scores(X, mask=mask, weights=w)


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


def seeded(method, seed, n, d):
    from levattn.sensitivity.approximate import sketches_of

    left, right = sketches_of(method, n, d)
    return dataclasses.replace(right if left is None else left, seed=seed)


def sketched(K, epsilon, mask, seed, method, recheck):
    found = levattn.universal_set(K, epsilon, mask=mask, method=seeded(method, seed, *K.shape))
    return found.rechecked(K) if recheck else found


def score_bounds(K, mask, seed, method):
    return levattn.sketched_scores(K, seeded(method, seed, *K.shape), mask=mask)


def judge_bounds(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    """Scores lie between their bounds, and rows that are left out have none above 0."""
    lower, upper = (np.asarray(part, np.float64) for part in (result.lower, result.upper))
    low = upper < truth.scores * (1 - promises.TIE) - 1e-300
    high = lower > truth.scores * (1 + promises.TIE) + 1e-300
    for name, wrong, bound in (("upper bound too low", low, upper), ("lower bound too high", high, lower)):
        if wrong.any():
            yield Breach(name, str(truth.scores[wrong][:3].tolist()), str(bound[wrong][:3].tolist()))
    if case.mask is not None and upper[~case.mask].any():
        yield Breach("bound of a masked row", "0", str(upper[~case.mask].max()))


def in_threads(K, epsilon, mask):
    found = []
    for threads in (1, 2, 3):
        with levattn.thread_limit(threads):
            one = levattn.universal_set(K, epsilon, mask=mask)
            found.append((one.mask, one.scores, one.factor.whitening))
    return found


def in_layouts(K, epsilon, method):
    others = np.ascontiguousarray(K), np.asfortranarray(K), np.ascontiguousarray(K[::-1, ::-1])[::-1, ::-1]
    found = [levattn.universal_set(other, epsilon, method=method) for other in others]
    return [(one.mask, one.scores, one.factor.whitening) for one in found]


def judge_set(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    chosen = np.asarray(result.mask)
    yield from promises.membership(truth, chosen, case.epsilon, result.guarantee, _margin(result), case.mask)
    relative = _relative(case, _method(result), max(promises.TIE, _margin(result)))
    above = result.certificate != ("leverage",)
    if not above:
        yield from promises.scores_hold(truth, result.scores, relative, raised=_raised(result))
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


def judge_bits(kind: str) -> Judge:
    """The figures of the first result are those of the others, to the bit."""

    def judge(case: Case, truth: Truth, results: Any) -> Iterator[Breach]:
        for other in results[1:]:
            for mine, its in zip(results[0], other, strict=True):
                breach = next(promises.same_bits(kind, mine, its), None)
                if breach is not None:
                    yield breach
                    return

    return judge


def scores(K, mask, method):
    return levattn.leverage_scores(K, mask=mask, method=method)


def scores_in_two_passes(K, seed, method):
    return levattn.leverage_scores(in_parts(K, 1 + seed % len(K)), method=method)


def judge_scores(case: Case, truth: Truth, result: Any, *, method: str) -> Iterator[Breach]:
    yield from promises.scores_hold(truth, result, _relative(case, method, 1e-9))


def online(K, mask):
    return levattn.online_leverage_scores(K, mask=mask)


def judge_online(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    """Within 2⁻⁵³ times the condition number of the keys so far, times what six columns may take."""
    found = np.asarray(result, np.float64)
    stored = promises.SINGLE if case.storage != "float64" else 0.0
    for i, score in enumerate(found):
        prefix = truth.prefix(i + 1)
        relative = stored + 2.0**-46 * prefix.condition
        if relative < 1e-3 and not abs(score - prefix.scores[i]) <= relative * prefix.scores[i] + 1e-30 and score < 1:
            yield Breach("online score", f"{prefix.scores[i]!r} of row {i} within {relative:.2g}", f"{score!r}")
            return
    if not ((found >= 0) & (found <= 1)).all():
        yield Breach("score outside [0, 1]", "0 to 1", str(found))


def online_future(K, seed):
    cut = 1 + seed % len(K)
    futures = [K, *(K.copy() for _ in range(3))]
    for other, value in zip(futures[1:], (0.0, 6e4, 6e-5), strict=True):
        other[cut:] = value
    return [(levattn.online_leverage_scores(other)[:cut],) for other in [*futures, K[:cut]]]


def grouped(K, mask, seed):
    labels = np.random.default_rng(seed).integers(-1, 3, len(K))
    return labels, levattn.group_leverage(K, labels, mask=mask)


# -- centered keys ----------------------------------------------------------------------------------------------------


def centered(K, epsilon, mask, method="auto"):
    return levattn.universal_set(K, epsilon, mask=mask, method=method, center=True)


def centered_size(K, mask, seed, method):
    return levattn.universal_set(K, size=seed % (len(K) + 1), mask=mask, method=method, center=True)


def centered_scores(K, mask, method):
    return levattn.leverage_scores(K, mask=mask, method=method, center=True)


def centered_file(K, epsilon, mask, seed):
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        np.save(f"{folder}/keys.npy", K)
        keys = levattn.open_keys(f"{folder}/keys.npy", chunk_rows=1 + seed)
        return levattn.universal_set(keys, epsilon, mask=mask, center=True)


def centered_sparse(K, epsilon, mask):
    from scipy.sparse import csr_array

    return levattn.universal_set(csr_array(K), epsilon, mask=mask, center=True)


def centered_torch(K, epsilon, mask):
    import torch

    return centered(torch.tensor(K), epsilon, None if mask is None else torch.tensor(mask))


def centered_strict(K, epsilon, mask):
    import array_api_strict

    strict = array_api_strict.asarray
    return centered(strict(np.ascontiguousarray(K)), epsilon, None if mask is None else strict(mask))


def centered_batch(K, epsilon, mask):
    batch = np.stack([K[::-1], K, np.zeros_like(K), np.ones_like(K)])
    masks = None if mask is None else np.stack([mask[::-1], mask, mask, ~mask])
    return centered(batch, epsilon, masks), centered(K, epsilon, mask)


def centered_sketch(K, epsilon, mask, seed, method):
    sketch = seeded(method, seed, *K.shape)
    return levattn.universal_set(K, epsilon, mask=mask, method=sketch, center=True).rechecked(K)


@lru_cache(maxsize=1)  # of all routes of a case
def truth_of_centered(case: Case) -> Centered:
    mask = np.ones(len(case.keys), bool) if case.mask is None else case.mask
    return Centered(case.present, case.queries, mask)


def judge_centered(case: Case, _: Truth, result: Any) -> Iterator[Breach]:
    """As `judge_set` for the keys less their mean, of which the guarantee is that of none."""
    truth, chosen = truth_of_centered(case), np.asarray(result.mask)
    clear = truth.condition <= promises.CLEAR
    for guarantee in ("superset", "exact") if clear else ("superset",):
        yield from promises.membership(truth, chosen, case.epsilon, guarantee, _margin(result), case.mask)
    relative = _relative(case, _method(result), max(promises.TIE, _margin(result)))
    figures = {"raised": _raised(result), "least": promises.AT_THE_MEAN}
    yield from promises.scores_hold(truth, result.scores, relative, **figures)
    if result.guarantee != "none":
        yield Breach("guarantee", "'none'", repr(result.guarantee))
    if clear and result.rank != truth.rank:
        yield Breach("rank", str(truth.rank), str(result.rank))


def judge_centered_size(case: Case, _: Truth, result: Any) -> Iterator[Breach]:
    yield from judge_size(case, truth_of_centered(case), result)


def judge_centered_scores(case: Case, _: Truth, result: Any, *, method: str) -> Iterator[Breach]:
    relative = _relative(case, method, 1e-9)
    yield from promises.scores_hold(truth_of_centered(case), result, relative, least=promises.AT_THE_MEAN)


def judge_centered_sketch(case: Case, _: Truth, result: Any) -> Iterator[Breach]:
    chosen = np.asarray(result.mask)
    yield from promises.membership(truth_of_centered(case), chosen, case.epsilon, "superset", 0.0, case.mask)


def judge_groups(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    labels, found = result
    yield from promises.groups_hold(truth, labels, found)


# -- streams ----------------------------------------------------------------------------------------------------------


def streamed(K, epsilon, mask):
    return levattn.StreamingUniversalSet(epsilon).update(K, mask=mask).result()


def fed(state, K, mask, cuts):
    from itertools import pairwise

    for start, stop in pairwise(cuts):
        yield stop, state.update(K[start:stop], mask=None if mask is None else mask[start:stop])


def every(step, n):
    return [*range(0, n, step), n]


def in_chunks(K, epsilon, mask, seed, f=2):
    state = levattn.StreamingUniversalSet(epsilon, f=function(f))
    for _ in fed(state, K, mask, every(1 + seed % len(K), len(K))):
        pass
    return state.result()


def merged(K, epsilon, mask, seed, f=2):
    cut = seed % (len(K) + 1)
    parts = []
    for part in (slice(cut, len(K)), slice(0, cut)):
        state = levattn.StreamingUniversalSet(epsilon, f=function(f), row_start=part.start)
        state.update(K[part], mask=None if mask is None else mask[part])
        parts.append(levattn.StreamingUniversalSet.from_bytes(state.to_bytes()))
    return parts[0].merge(parts[1]).result()


def in_dask(K, epsilon, seed, f=2):
    import dask
    import dask.array

    from levattn.distributed.dask import universal_set

    least = 1 if f == 2 else 1 + len(K) // 24  # each merge takes its time, however few the rows
    chunks = (max(1 + seed % len(K), least), K.shape[1])
    with dask.config.set(scheduler="synchronous"):
        return universal_set(dask.array.from_array(K, chunks=chunks), epsilon, f=function(f)).compute()


def judge_stream(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    chosen = np.zeros(len(case.keys), bool)
    chosen[result.indices] = True
    yield from promises.membership(truth, chosen, case.epsilon, result.guarantee, _margin(result), case.mask)
    if not ((result.member_scores >= 0) & (result.member_scores <= 1)).all():
        yield Breach("score outside [0, 1]", "0 to 1", str(result.member_scores))


# -- queries ----------------------------------------------------------------------------------------------------------


def heavy(Q, K, V, epsilon, mask, universal=None):
    found = levattn.heavy_attention(Q, K, epsilon, mask=mask, universal=universal)
    return found, found.apply(V), found.apply(V, compensate="mean")


def heavy_of_a_set(Q, K, V, epsilon, mask):
    return heavy(Q, K, V, epsilon, None, by_epsilon(K, epsilon, mask, "gram"))


def heavy_of_two_passes(Q, K, V, epsilon, seed):
    return heavy(Q, K, V, epsilon, None, in_two_passes(K, epsilon, seed))


def a_query_each(Q, K):
    return Q if len(Q) == len(K) else Q[np.arange(len(K)) % len(Q)]


def heavy_causal(Q, K, V, epsilon, mask):
    found = levattn.causal_heavy_attention(a_query_each(Q, K), K, epsilon, mask=mask)
    return found, found.apply(V), found.apply(V, compensate="mean")


def judge_heavy(case: Case, truth: Truth, result: Any, *, causal: bool = False) -> Iterator[Breach]:
    found, plain, compensated = result
    truth = truth.by_row() if causal else truth
    error = getattr(found, "error", promises.TIE / 4)
    yield from promises.entries_hold(truth, found.entries.toarray(), case.epsilon, error, causal=causal)
    yield from promises.normalizers_hold(truth, found.normalizers, error, causal=causal)
    for name in ("captured_mass", "residual_mass"):
        mass = getattr(found, name)
        if not ((mass >= 0) & (mass <= 1)).all():
            yield Breach(name, "0 to 1", str(mass))
    for output, bound in (plain, compensated):
        yield from promises.output_holds(truth, case.values, output, bound, causal=causal)


def future(Q, K, V, epsilon, seed):
    rng, n = np.random.default_rng(seed), len(K)
    Q = a_query_each(Q, K)
    cut = int(rng.integers(1, n + 1))
    futures = [K, *(K.copy() for _ in range(4))]
    futures[1][cut:] = 0
    futures[2][cut:] = np.finfo(K.dtype).max / 16 if K.dtype.kind == "f" else 3e38
    futures[3][cut:] = (rng.standard_normal((n - cut, K.shape[1])) * 2.0**-14).astype(K.dtype)
    futures[4][cut:] = np.finfo(K.dtype).tiny if K.dtype.kind == "f" else 1e-38
    rows = []
    for keys, queries in [*((keys, Q) for keys in futures), (K[:cut], Q[:cut])]:
        found = levattn.causal_heavy_attention(queries, keys, epsilon)
        part = found.entries[:cut]
        outputs = (found.apply(V[: len(keys)], compensate=how) for how in (None, "mean"))
        figures = found.normalizers, found.captured_mass, found.error, *(array for pair in outputs for array in pair)
        rows.append((part.indptr, part.indices, part.data, *(array[:cut] for array in figures)))
    return rows


def decoded(Q, K, epsilon, mask, cuts):
    return [(stop, state.heavy(Q)) for stop, state in fed(levattn.CausalUniversalSet(epsilon), K, mask, cuts)]


def token_by_token(Q, K, epsilon, mask, seed):
    return decoded(Q, K, epsilon, mask, every(1 + seed % 3, len(K)))


def in_large_steps(Q, K, epsilon, mask, seed):
    cuts = [0, *np.random.default_rng(seed).integers(0, len(K), 2).tolist(), len(K)]
    return decoded(Q, K, epsilon, mask, sorted(cuts))


def in_steps(Q, K, epsilon, mask, step):
    return decoded(Q, K, epsilon, mask, every(step, len(K)))


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
        yield from promises.captured_holds(prefix, found.captured_mass, case.epsilon, found.error)


def by_countsketch(Q, K, epsilon, seed):
    from levattn.heavy.squares import recovery_size
    from levattn.sketch import OSNAP

    universal = levattn.universal_set(K, epsilon)
    buckets, repetitions = recovery_size(len(Q), epsilon, len(universal))
    sketch = OSNAP(buckets * repetitions, repetitions, seed=seed)
    return levattn.heavy_attention(Q, K, epsilon, universal=universal, method=sketch)


def judge_entries(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    error = getattr(result, "error", promises.TIE / 4)
    yield from promises.entries_hold(truth, result.entries.toarray(), case.epsilon, error)


def pruned(Q, K, V, mask, seed):
    from levattn.attention import Selection, pruned_attention

    kind = ("residual", "expected", "leverage")[seed % 5 % 3]
    selection = Selection(size=seed % 3, summaries=1 + seed % 2, scores=kind)
    return pruned_attention(Q, K, V, selection, scale=0.5, mask=mask, return_certificate=True)


def judge_pruned(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    output, certificate = result
    there = np.ones(len(case.keys), bool) if case.mask is None else case.mask
    if not there.any():
        return
    weights = Truth(case.keys[there], case.queries).softmax(0.5)
    kept = dataclasses.replace(certificate, kept=np.asarray(certificate.kept)[there])
    unit = 2.0**-52 if case.storage == "float64" else 2.0**-23
    coarse = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(case.storage, unit)
    logits = (np.abs(case.queries) @ np.abs(case.keys[there]).T).max(axis=1)
    noise = 64 * case.keys.shape[1] * (1 + logits) * unit + 8 * coarse
    step = 2.0 ** {"float64": -1074, "float32": -149, "float16": -24, "bfloat16": -133}[case.storage]
    yield from promises.certificate_holds(weights, case.values[there], noise, output, kept, step)


def pruned_causal(Q, K, V, mask, seed):
    from levattn.attention import Selection, causal_pruned_attention

    selection = Selection(size=1 + seed % 3, summaries=1 + seed % 2, window=seed % 2, renew_every=1 + seed % 4)
    arrays = a_query_each(Q, K), K, V
    Y, _, certificate = causal_pruned_attention(
        *arrays, selection, scale=0.5, mask=mask, return_certificate=True, return_state=True
    )
    return Y, certificate


def judge_pruned_causal(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    """Each row as the last of its prefix; which keys it attends is not told."""
    output, certificate = result
    there = np.ones(len(case.keys), bool) if case.mask is None else case.mask
    Q = a_query_each(case.queries, case.keys)
    for i in np.flatnonzero(there):
        before = np.flatnonzero(there[: i + 1])
        own = dataclasses.replace(
            case, keys=case.keys[before], queries=Q[i : i + 1], values=case.values[before], mask=None
        )
        bounds = {"error_bound": np.asarray(certificate.error_bound)[i : i + 1]}
        bounds |= {"captured_lower": np.zeros(1), "captured_upper": np.ones(1), "kept": np.ones(len(before), bool)}
        row = dataclasses.replace(certificate, **bounds)
        yield from judge_pruned(own, truth, (np.asarray(output)[i : i + 1], row))


def covered(Q, K, V, seed):
    """The error found for a query that is repeated, and the outputs for one more of it."""
    from levattn.attention import Selection, pruned_attention, pruned_coverage
    from levattn.exceptions import NonFiniteError

    q = Q[:1]
    selection = Selection(0.5, summaries=seed % 3)
    try:
        found = pruned_coverage(q.repeat(20, axis=0), K, V, selection, coverage=0.8, scale=0.5)
    except NonFiniteError:  # of outputs
        return None
    selection = Selection(float(found.budget), summaries=seed % 3, window=0)
    return found, pruned_attention(q, K, V, selection, scale=0.5, queries=found.queries)


def fitted(Q, K, V, mask, seed):
    from levattn.attention import Selection, fit_slots

    selection = Selection(size=1 + seed % 7, sinks=seed % 2, window=seed % 3)
    weights = np.random.default_rng(seed).random(len(Q)) ** (1, 40)[seed % 2]
    slots = fit_slots(Q, K, V, selection, weights=weights.astype(np.float32), unseen=Q, scale=0.5, mask=mask)
    return slots, slots.attend(Q)


def judge_fitted(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    """Values and outputs in the ball of the values, and the conditions of the weights' bounds."""
    slots, output = result
    there = np.ones(len(case.keys), bool) if case.mask is None else case.mask
    if not there.any():
        return
    values, places = case.values[there], np.searchsorted(np.flatnonzero(there), slots.indices)
    unit = {"float64": 2.0**-52, "bfloat16": 2.0**-7, "float16": 2.0**-10}.get(case.storage, 2.0**-23)
    step = 2.0 ** {"float64": -1074, "float32": -149, "float16": -24, "bfloat16": -133}[case.storage]
    yield from promises.in_ball(values, slots.values, unit, step)
    yield from promises.in_ball(values, output, 64 * unit, step)
    weights = np.random.default_rng(case.seed).random(len(case.queries)) ** (1, 40)[case.seed % 2]
    powers = Truth(case.keys[there], case.queries).softmax(0.5)
    share = powers / powers.sum(axis=1, keepdims=True)
    logits = (np.abs(case.queries) @ np.abs(case.keys[there]).T).max(initial=0.0)
    noise = 64 * case.keys.shape[1] * (1 + logits) * max(2.0**-52, unit if case.storage == "float64" else 2.0**-23)
    if noise < 1e-3 and len(places) < len(values) and weights.any():
        root = np.sqrt(weights.astype(np.float32) / weights.max())[:, None]
        yield from promises.weights_are_best(root * share[:, places], root[:, 0], slots.log_weights, noise)


def judge_error_found(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    if result is None:
        return
    found, output = result
    bound = float(found.error)
    if not bound >= 0:
        yield Breach("error with a coverage", "a number of at least 0", str(bound))
        return
    if np.isinf(bound):
        return
    output = np.asarray(output, np.float64)[0]
    weights = Truth(case.present, case.queries[:1]).softmax(0.5)[0]
    share = [Fraction(float(x)) for x in weights / weights.sum()]
    dense = [
        sum((s * Fraction(float(v)) for s, v in zip(share, column, strict=True)), Fraction(0))
        for column in case.values.T
    ]
    size = sum((y * y for y in dense), Fraction(0))
    apart = sum(((Fraction(float(x)) - y) ** 2 for x, y in zip(output, dense, strict=True)), Fraction(0))
    if apart > Fraction(bound) ** 2 * size * (1 + Fraction(1, 10**9)) + Fraction(8 * len(dense), 2**2148):
        yield Breach(
            "error with a coverage", f"at least {float(apart / size) ** 0.5 if size else np.inf:.17g}", f"{bound:.17g}"
        )


# -- other functions --------------------------------------------------------------------------------------------------

_POWERS = (0.5, 1, 1.5, 3, 4, 6)
FUNCTIONS: dict[str, Function] = {
    **{f"Power({p})": oracle.power(p) for p in _POWERS},
    "Huber(1.0)": oracle.huber(1.0),
    "Tukey(4.685)": oracle.tukey(4.685),
    "Fair(1.4)": oracle.fair(1.4),
    "L1L2()": oracle.l1l2,
}


def heavy_of_function(Q, K, epsilon, mask, f):
    return levattn.heavy_attention(Q, K, epsilon, f=function(f), mask=mask)


def judge_function(case: Case, truth: Truth, result: Any, *, f: str) -> Iterator[Breach]:
    witness = promises.witnessed(truth, FUNCTIONS[f], truth.values(), case.seed)
    yield from promises.bounded(witness, np.asarray(result.mask), result.scores, case.epsilon, case.mask)


def judge_function_size(case: Case, truth: Truth, result: Any, *, f: str) -> Iterator[Breach]:
    witness = promises.witnessed(truth, FUNCTIONS[f], truth.values(), case.seed)
    bad = ~np.asarray(result.mask) & (witness > result.epsilon * (1 + 2 * promises.TIE) + 1e-300)
    if bad.any():
        yield Breach("certified epsilon", f"at least {witness[bad].max()!r}, what a query gives", repr(result.epsilon))


def judge_function_stream(case: Case, truth: Truth, result: Any, *, f: str) -> Iterator[Breach]:
    chosen = np.zeros(len(case.keys), bool)
    chosen[result.indices] = True
    if result.guarantee == "none":
        return
    witness = promises.witnessed(truth, FUNCTIONS[f], truth.values(), case.seed)
    yield from promises.bounded(witness, chosen, None, case.epsilon, case.mask)


def judge_function_heavy(case: Case, truth: Truth, result: Any, *, f: str) -> Iterator[Breach]:
    yield from promises.shares_hold(truth, FUNCTIONS[f], result.entries.toarray(), case.epsilon, result.error)


def of_softmax(K, epsilon, mask):
    largest = float(np.abs(np.asarray(K, np.float64)).max())
    radius = 2.0 ** round(np.log2(4 / largest)) if 1e-30 < largest < 1e30 else 1.0
    return radius, levattn.universal_set(K, epsilon, f=levattn.Softmax(radius), mask=mask)


def judge_softmax(case: Case, truth: Truth, result: Any) -> Iterator[Breach]:
    radius, found = result
    present = np.ones(len(case.keys), bool) if case.mask is None else case.mask
    K = case.keys[present]
    if not len(K) or not 1e-30 < np.abs(K).max() * 4 < 1e30:
        return
    apart = K - K.mean(axis=0)
    apart = apart[np.argsort(np.linalg.norm(apart, axis=1))[-40:]]
    U = np.vstack([apart, np.eye(K.shape[1]), -np.eye(K.shape[1])])
    U = U[np.linalg.norm(U, axis=1) > 1e-100]
    U = U / np.linalg.norm(U, axis=1, keepdims=True) * (1 - 1e-12)
    witness = np.zeros(len(case.keys))
    for t in (1.0, 0.5):
        z = t * radius * (U @ K.T)
        powers = np.exp(z - z.max(axis=1, keepdims=True))
        best = (powers / powers.sum(axis=1, keepdims=True)).max(axis=0) * (1 - 1e-10)
        witness[present] = np.maximum(witness[present], best)
    yield from promises.bounded(witness, np.asarray(found.mask), found.scores, case.epsilon, case.mask)


# -- sample queries ---------------------------------------------------------------------------------------------------

_WISHES = ("epsilon", "mass", "size")


def covering(Q, K, epsilon, mask, seed, wish, f=2):
    wishes = {"epsilon": epsilon, "size": seed % (len(K) + 1), "mass": (0.5, 0.9, 0.99)[seed % 3]}
    order = np.random.default_rng(seed).random(len(K)).astype("float32")
    options = {"coverage": 0.8, "scores": order, "mask": mask, wish: wishes[wish]}
    return levattn.covering_set(K, Q, f=function(f), **options)


def judge_covered(case: Case, truth: Truth, result: Any, *, f: str | None = None) -> Iterator[Breach]:
    place = math.ceil((len(case.queries) + 1) * result.coverage * (1 - promises.TIE))
    yield from promises.covered_holds(truth, FUNCTIONS[f] if f else None, result, place)


def expected(Q, K, mask, f=2):
    return levattn.expected_scores(K, Q, mask=mask, f=function(f), method="mean")


def judge_expected(case: Case, truth: Truth, result: Any, *, f: str | None = None) -> Iterator[Breach]:
    error = 0.0 if case.storage == "float64" else promises.SINGLE
    yield from promises.mean_holds(truth, FUNCTIONS[f] if f else None, np.asarray(result), error)


# -- the table --------------------------------------------------------------------------------------------------------


def _few(case: Case) -> bool:
    return len(case.keys) <= 40


def _square(case: Case) -> bool:
    """So few rows that there may be as many queries."""
    return len(case.keys) <= 710 and case.keys.shape[1] <= 8


def _tame(case: Case) -> bool:
    """Products whose squares float32 holds: what is beyond them is refused."""
    sizes = [max(1.0, float(np.abs(x).max(initial=0.0))) for x in (case.queries, case.keys)]
    return sizes[0] * sizes[1] < 1e15


def _plain_numbers(case: Case) -> bool:
    """Storage that scipy and the array standard have, and no mask."""
    return _no_mask(case) and _sparse_numbers(case)


def _of_float64(case: Case) -> bool:
    return case.storage == "float64"


def _sparse_numbers(case: Case) -> bool:
    return case.storage in ("float64", "float32")


def _torch_numbers(case: Case) -> bool:
    return case.storage != "bfloat16"


def _countable(case: Case) -> bool:
    """Few rows, all there, and an ε for which tables of 1/ε entries fit into memory."""
    return _few(case) and _no_mask(case) and case.epsilon >= 1e-4


def _no_mask(case: Case) -> bool:
    return case.mask is None


def _usual(case: Case) -> bool:
    """Keys whose certificates do not take their time: below this ε there are 2/ε blocks."""
    return case.keys.shape[1] <= 8 and case.epsilon >= 0.01


def above(rows: int) -> Callable[[Case], bool]:
    return lambda case: len(case.keys) > rows


def turn(place: int, of: int) -> Callable[[Case], bool]:
    """Routes that have much in common take turns, by the seed."""
    return lambda case: (case.seed + place) % of == 0


def _each(
    name: str,
    call: Callable[..., Any],
    judge: Callable[..., Iterator[Breach]],
    option: str,
    values: Iterable[Any],
    of: int = 1,
) -> Iterator[Route]:
    """A route for each value of an option, which take turns."""
    told = option in inspect.signature(judge).parameters
    for i, value in enumerate(values):
        judged = partial(judge, **{option: value}) if told else judge
        yield Route(f"{name} {value}", call, judged, (turn(i, of),), ((option, value),))


def _of_functions(
    name: str,
    call: Callable[..., Any],
    judge: Callable[..., Iterator[Breach]],
    *when: Callable[[Case], bool],
    least: bool = False,
) -> Iterator[Route]:
    """A route for each other function: a seventh of the small cases each, as there are many.

    `least` leaves out what has no bound that never rises.
    """
    for i, f in enumerate(FUNCTIONS):
        if not least or f != "Power(3)":
            yield Route(f"{name} {f}", call, partial(judge, f=f), (_usual, turn(i, 7), *when), (("f", f),))


_METHODS = ("auto", "gram", "qr", "svd")
_SKETCHED = ("countsketch", "osnap", "srht", "jl")
_SKETCHES = [(m, r) for m in _SKETCHED for r in (False, True)]

ROUTES: dict[str, Route] = {
    route.name: route
    for route in (
        *_each("set", by_epsilon, judge_set, "method", _METHODS),
        *_each("size", by_size, judge_size, "method", _METHODS, 2),
        Route("two passes", in_two_passes, judge_set, (_no_mask,)),
        Route("file", from_a_file, judge_set, (_torch_numbers, turn(0, 4))),
        Route("sparse", sparse, judge_set, (_plain_numbers, turn(0, 2))),
        Route("weighted", weighted, judge_set, (_of_float64, turn(1, 2))),
        Route("torch", in_torch, judge_set, (_torch_numbers, turn(1, 2))),
        Route("strict", strict, judge_set, (_plain_numbers, _few, turn(0, 2))),
        Route("batch", in_a_batch, judge_batch, (turn(1, 2),)),
        *_each("layout", in_layouts, judge_bits("bits of a layout"), "method", ("auto", "qr"), 2),
        *_each("scores", scores, judge_scores, "method", _METHODS, 2),
        Route("scores weighted", weighted_scores, partial(judge_scores, method="gram"), (_of_float64, turn(0, 2))),
        *(
            Route(
                f"scores in two passes {m}",
                scores_in_two_passes,
                partial(judge_scores, method=m),
                (_no_mask,),
                (("method", m),),
            )
            for m in ("auto", "gram")
        ),
        Route("threads", in_threads, judge_bits("bits of a number of threads"), (above(2000),)),
        *_each("set centered", centered, judge_centered, "method", _METHODS, 2),
        *_each("size centered", centered_size, judge_centered_size, "method", _METHODS, 4),
        *_each("scores centered", centered_scores, judge_centered_scores, "method", _METHODS, 4),
        *_each("sketch centered", centered_sketch, judge_centered_sketch, "method", _SKETCHED, 8),
        Route("file centered", centered_file, judge_centered, (_torch_numbers, turn(0, 8))),
        Route("sparse centered", centered_sparse, judge_centered, (_sparse_numbers, turn(0, 3))),
        Route("torch centered", centered_torch, judge_centered, (_torch_numbers, turn(1, 3))),
        Route("strict centered", centered_strict, judge_centered, (_sparse_numbers, _few, turn(2, 3))),
        Route("batch centered", centered_batch, judge_batch, (turn(1, 3),)),
        Route("online", online, judge_online, (_few, turn(0, 2))),
        Route("online future", online_future, judge_bits("bits of the future"), (_square, turn(1, 2))),
        *(
            Route(f"sketch {m}{' recheck' * r}", sketched, judge_set, (turn(i, 5),), (("method", m), ("recheck", r)))
            for i, (m, r) in enumerate(_SKETCHES)
        ),
        *(
            Route(f"bounds {m}", score_bounds, judge_bounds, (turn(i, 2 * len(_SKETCHED)),), (("method", m),))
            for i, m in enumerate(_SKETCHED)
        ),
        Route("stream", streamed, judge_stream),
        Route("stream in chunks", in_chunks, judge_stream, (turn(0, 2),)),
        Route("stream merged", merged, judge_stream, (turn(1, 2),)),
        Route("heavy", heavy, judge_heavy),
        Route("heavy of a set", heavy_of_a_set, judge_heavy, (turn(0, 3),)),
        Route("heavy of two passes", heavy_of_two_passes, judge_heavy, (_no_mask, turn(1, 3))),
        Route("heavy causal", heavy_causal, partial(judge_heavy, causal=True), (_square, turn(0, 3))),
        Route("future", future, judge_bits("bits of the future"), (_square, _no_mask, turn(1, 3))),
        Route("decoding by tokens", token_by_token, judge_decoding, (_few, turn(0, 2))),
        Route("decoding", in_large_steps, judge_decoding, (turn(1, 2),)),
        *(Route(f"decoding by {s}", in_steps, judge_decoding, (above(256),), (("step", s),)) for s in (300, 2048)),
        Route("heavy countsketch", by_countsketch, judge_entries, (_countable, turn(0, 7))),
        Route("groups", grouped, judge_groups, (turn(0, 2),)),
        Route("pruned", pruned, judge_pruned, (_few, _tame, turn(0, 3))),
        Route("pruned causal", pruned_causal, judge_pruned_causal, (_few, _tame, turn(1, 3))),
        Route("pruned coverage", covered, judge_error_found, (_few, _tame, _no_mask, turn(2, 3))),
        Route("fitted", fitted, judge_fitted, (_few, _tame)),
        *_of_functions("set", by_epsilon, judge_function),
        *_of_functions("size", by_size, judge_function_size),
        *_of_functions("stream", in_chunks, judge_function_stream, turn(1, 2), least=True),
        *_of_functions("stream merged", merged, judge_function_stream, turn(0, 4), least=True),
        *_of_functions("dask", in_dask, judge_function_stream, _no_mask, turn(0, 8), least=True),
        *_of_functions("heavy", heavy_of_function, judge_function_heavy),
        *_each("coverage", covering, judge_covered, "wish", _WISHES, 3),
        Route("expected", expected, judge_expected, (_few, turn(0, 2))),
        *(
            Route(
                f"coverage by {wish} {f}",
                covering,
                partial(judge_covered, f=f),
                (_usual, _few, turn(i, 15)),
                (("wish", wish), ("f", f)),
            )
            for i, (f, wish) in enumerate(itertools.product(FUNCTIONS, _WISHES))
        ),
        *_of_functions("expected", expected, judge_expected, _few),
        Route("set Softmax", of_softmax, judge_softmax, (turn(0, 2),)),
        Route("torch group", universal_set_of_ranks, judge_stream, (turn(1, 8),)),
        Route("dask", in_dask, judge_stream, (_no_mask, turn(0, 8))),
    )
}
