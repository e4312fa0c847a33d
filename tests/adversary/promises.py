"""What the library promises of its results, told against exact answers. Each promise yields the breaches it sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .oracle import DIGITS, Float, Function, Truth, fraction, queries_for, scaled, shares

Bool = NDArray[np.bool_]

TIE = 1e-9  # within this of ε, relative, a score counts as at least ε (docstring of universal_set)
SINGLE = 1e-6  # error of scores of float32 and narrower keys, 1e-9 of float64 ones (docstring of leverage_scores)
IN_SINGLE, SINGLE_FROM = 1e-5, 2048  # the same by "auto" for so many keys, where products are in float32
RESOLVED = 1e6  # condition number up to which float64 resolves every direction
CLEAR = 1e12  # condition number of equilibrated keys up to which the rank is clear, some hundred times below the cut
SURE = 1e-12  # error of figures that claim a smaller one
AT_THE_MEAN = 1e-40  # score of a key that lies at the mean but for the rounding of the mean, which is held in parts


@dataclass(frozen=True)
class Breach:
    """A promise that does not hold: what kind, which is kept as the case shrinks, and the figures."""

    kind: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.kind}: expected {self.expected}, got {self.got}"


def _few(indices: Any) -> str:
    found = np.flatnonzero(indices)
    return str(found[:6].tolist()) + ("..." if len(found) > 6 else "")


def membership(
    truth: Truth,
    chosen: Bool,
    epsilon: float,
    guarantee: str,
    margin: float = 0.0,
    mask: Bool | None = None,
) -> Iterator[Breach]:
    """No key of at least ε is missing; an exact set has no key that lies below ε by more than the margin."""
    if guarantee not in ("exact", "superset", "none"):
        yield Breach("guarantee", "'exact', 'superset' or 'none'", repr(guarantee))
    missing = truth.at_least(epsilon) & ~chosen
    if guarantee != "none" and missing.any():
        scores = truth.scores[missing][:3].tolist()
        yield Breach("missing key", f"keys {_few(missing)} of scores {scores} at epsilon={epsilon}", f"'{guarantee}'")
    if guarantee == "exact":
        extra = chosen & ~truth.at_least(epsilon, max(TIE, margin))
        if extra.any():
            scores = truth.scores[extra][:3].tolist()
            yield Breach("not exact", f"no keys {_few(extra)} of scores {scores} at epsilon={epsilon}", "'exact'")
    if mask is not None and (chosen & ~mask).any():
        yield Breach("masked key", "no masked key in the set", _few(chosen & ~mask))


def scores_hold(
    truth: Truth, scores: Any, relative: float, *, raised: float = 0.0, least: float = 0.0
) -> Iterator[Breach]:
    """Scores lie in [0, 1] and are within their error of the truth; where a row counts as 1, not below.

    They may be higher by `raised`, relative to them, but no lower for that. Scores up to `least` are alike.
    """
    found = np.asarray(scores, np.float64)
    if not ((found >= 0) & (found <= 1)).all():
        yield Breach("score outside [0, 1]", "0 to 1", str(found[~((found >= 0) & (found <= 1))][:3].tolist()))
        return
    if truth.condition > CLEAR:
        return
    small = max(least, 1e-30 if relative > 1e-8 else 1e-300)  # what the format of the scores holds
    low = found < truth.scores * (1 - relative) - small
    if low.any():
        yield Breach(
            "score too low", f"{truth.scores[low][:3].tolist()} of rows {_few(low)}", f"{found[low][:3].tolist()}"
        )
    high = (found > truth.scores * (1 + max(relative, raised)) + small) & (found < 1 - 1e-7)
    if high.any():
        yield Breach(
            "score too high", f"{truth.scores[high][:3].tolist()} of rows {_few(high)}", f"{found[high][:3].tolist()}"
        )


def groups_hold(truth: Truth, labels: NDArray[np.int64], scores: Any) -> Iterator[Breach]:
    """No query gives a group more than its score; where float64 resolves all directions, one gives it that much."""
    tiny = Fraction(1, 10**300)
    for group, score in enumerate(np.asarray(scores, np.float64)):
        members = labels == group
        if not 0 <= score <= 1:
            yield Breach("group score", f"0 to 1 of group {group}", f"{score!r}")
            return
        bound = Fraction(float(score))
        if score < 1 and not truth.group_below(members, bound * (1 + Fraction(SINGLE)) + tiny):
            yield Breach("group score too low", f"what some query gives group {group}", f"{score!r}")
            return
        most = min(truth.scores[members].sum(), 1.0)
        if truth.condition <= RESOLVED:
            high = truth.group_below(members, bound * (1 - Fraction(SINGLE)) - tiny)
        else:  # bounds of what float64 hardly resolves are raised, by any amount beside keys that are shortened
            sizes = np.abs(truth.K).max(axis=1, initial=0.0)
            shortened = sizes.max() / 2.0**20 > sizes.min(where=sizes > 0, initial=np.inf)
            high = not shortened and score > most * (1 + 2.0**-4) + 1e-300
        if high and 1e-300 < score < 1 - 1e-9:
            yield Breach("group score too high", f"what some query gives group {group}", f"{score!r}")
            return


def left_out(truth: Truth, chosen: Bool, epsilon: float, margin: float = 0.0) -> Iterator[Breach]:
    """No score of a key left out exceeds the certified ε."""
    if epsilon != epsilon or epsilon < 0:
        yield Breach("certified epsilon", "a number of at least 0", str(epsilon))
        return
    bad = ~chosen & truth.at_least(epsilon * (1 + max(TIE, margin)) + 1e-300)
    if bad.any():
        largest = float(truth.scores[bad].max())
        yield Breach("certified epsilon", f"at least {largest!r}, the score of a key left out", f"{epsilon!r}")


def normalizers_hold(truth: Truth, found: Any, error: Any, *, causal: bool = False) -> Iterator[Breach]:
    """Within 1e-12, or four times what is claimed, of Σ⟨q, k⟩²; 0 or infinite only out of range."""
    sums, exponents = truth.normalizers(causal=causal)
    claimed = np.broadcast_to(np.asarray(error, np.float64), sums.shape)
    for i, (whole, exponent) in enumerate(zip(sums, exponents, strict=True)):
        value, true = float(found[i]), scaled(whole, int(exponent))
        slack = max(SURE, 4 * claimed[i])
        if np.isinf(slack) or (true < 1e-290 and 0 <= value < 1e-280) or (true > 1e300 and value > 1e290):
            continue
        if not abs(value - true) <= slack * max(value, true):
            yield Breach("normalizer", f"{true!r} of query {i} within {slack:.2g}", f"{value!r}")
            return


def entries_hold(truth: Truth, found: Float, epsilon: float, error: Any, *, causal: bool = False) -> Iterator[Breach]:
    """Every entry of at least ε is found, no other, with its value."""
    over, under = truth.attention(causal=causal)
    claimed = np.broadcast_to(np.asarray(error, np.float64), under.shape)
    least = Fraction(epsilon)
    for i, total in enumerate(under):
        heavy = over[i] * least.denominator >= least.numerator * total
        yield from _entries_of_a_query(i, over[i], total, heavy, found[i], epsilon, claimed[i])


def _entries_of_a_query(
    i: int, over: Any, total: Any, heavy: Any, found: Float, epsilon: float, claimed: float
) -> Iterator[Breach]:
    """Query i: its scores are ``over / total``, and those in `heavy` have to be found; the first that fails."""
    if not total:
        if found.any() and 4 * claimed < 1:
            yield Breach("entry of an orthogonal query", f"zeros in row {i}", str(found[found > 0][:3]))
        return
    slack = max(TIE, 4 * claimed)
    for j in np.flatnonzero(heavy.astype(bool) | (found != 0)):
        value, true = float(found[j]), float(over[j] / total)
        if heavy[j] and not value > 0:
            yield Breach(
                "missing entry", f"{true!r} at ({i}, {j}), epsilon={epsilon!r}", f"nothing, error {claimed:.2g}"
            )
            return
        if np.isinf(slack):
            continue
        if not abs(value - true) <= slack * max(value, true):
            yield Breach("entry", f"{true!r} at ({i}, {j}) within {slack:.2g}", f"{value!r}")
            return
        if true < epsilon * (1 - 2 * slack):
            yield Breach("light entry", f"nothing at ({i}, {j}), {true!r} below epsilon={epsilon!r}", f"{value!r}")
            return


def output_holds(truth: Truth, V: Float, output: Any, bound: Any, *, causal: bool = False) -> Iterator[Breach]:
    """The output is within its bound of A V."""
    over, under, exponent = truth.output(V, causal=causal)
    output, bound = np.asarray(output, np.float64), np.asarray(bound, np.float64)
    for i in range(len(over)):
        if not bound[i] >= 0:
            yield Breach("bound", "a number of at least 0", str(bound[i]))
            return
        if np.isinf(bound[i]):
            continue
        if not np.isfinite(output[i]).all():
            yield Breach("output", "finite numbers", str(output[i]))
            return
        true = [fraction(x, exponent) / under[i] if under[i] else Fraction(0) for x in over[i]]
        square = sum(((Fraction(float(o)) - t) ** 2 for o, t in zip(output[i], true, strict=True)), Fraction(0))
        if square > Fraction(float(bound[i])) ** 2 * (1 + Fraction(1, 10**12)):
            row = [float(x) if abs(x) < 10**300 else "large" for x in true]
            yield Breach("output beyond its bound", f"{row} in row {i} within {bound[i]:.3g}", str(output[i].tolist()))
            return


def captured_holds(truth: Truth, mass: Any, epsilon: float, error: Any) -> Iterator[Breach]:
    """The mass on the keys held is at least that on all keys whose leverage score is at least ε, and at most 1."""
    over, under = truth.attention()
    sure = truth.at_least(epsilon)
    for i, total in enumerate(under):
        least = float(sum(over[i][sure]) / total) if total else 0.0
        slack = max(least, epsilon) * min(max(TIE, 4 * error[i]), 1.0)  # errors are those of an entry of ε
        if not max(least - slack, 0) <= mass[i] <= 1:
            yield Breach("captured mass", f"{least!r} to 1 of query {i}", f"{mass[i]!r}")
            return


def certificate_holds(
    weights: Float, V: Float, noise: Float, output: Any, certificate: Any, step: float = 2.0**-1074
) -> Iterator[Breach]:
    """Dense attention lies within the bounds of a `PrunedCertificate`, up to a noise (m,) of the weights.

    weights: of each query and the keys that are there; V: their values. `step`: the least number of their storage.
    """
    share = weights / weights.sum(axis=1, keepdims=True)
    kept = np.asarray(certificate.kept)
    captured = (share * kept).sum(axis=1)
    lower, upper = (np.asarray(x, np.float64) for x in (certificate.captured_lower, certificate.captured_upper))
    for i in np.flatnonzero((captured < lower - noise) | (captured > upper + noise)):
        yield Breach("captured mass", f"{captured[i]!r} of query {i}", f"{lower[i]!r} to {upper[i]!r}")
        return
    size = np.abs(V).max(initial=0.0)
    off = np.linalg.norm(np.asarray(output, np.float64) / (size or 1.0) - share @ (V / (size or 1.0)), axis=1)
    bound = np.asarray(certificate.error_bound, np.float64) / (size or 1.0)
    least = len(V) * V.shape[1] * step / (size or 1.0)
    for i in np.flatnonzero(~(off <= bound * (1 + 1e-5) + noise + least) & ~np.isinf(bound)):
        yield Breach("output beyond its bound", f"within {bound[i]:.3g} in row {i}", f"off by {off[i]:.3g}")
        return


def in_ball(values: Float, found: Any, unit: float, step: float) -> Iterator[Breach]:
    """No row lies farther from the middle of the values' ranges than a value does, up to rounding to a unit."""
    size = np.abs(values).max(initial=0.0) or 1.0
    values, found = values / size, np.asarray(found, np.float64) / size
    middle = values.min(axis=0) / 2 + values.max(axis=0) / 2
    radius, apart = (np.linalg.norm(x - middle, axis=1) for x in (values, found))
    room = 8 * unit + 2 * len(middle) * step / size
    if not (apart <= radius.max() * (1 + 1e-11) + room).all():
        yield Breach("row outside of the ball of the values", f"within {radius.max():.6g}", f"{apart.max():.6g}")


def weights_are_best(F: Float, target: Float, log_weights: Any, noise: float) -> Iterator[Breach]:
    """The weights B in [e⁻³, e³] minimize ‖F B − target‖² + μ ‖B − 1‖² for F of a relative error."""
    B = np.exp(np.asarray(log_weights, np.float64))
    ridge = 1e-2 * float((F**2).sum()) / len(B)
    if ridge < 1e-250:
        return
    H, g = F.T @ F + ridge * np.eye(len(B)), F.T @ target + ridge
    gradient, room = H @ B - g, (8 * noise + 1e-9) * (H @ B + g)
    low, high = np.abs(np.log(B) + 3) < 1e-6, np.abs(np.log(B) - 3) < 1e-6
    fine = (np.abs(gradient) <= room) | (low & (gradient > 0)) | (high & (gradient < 0))
    if not (fine & (np.abs(np.log(B)) <= 3 + 1e-6)).all():
        yield Breach("weights that are not the best", f"a gradient within {room[~fine]}", f"{gradient[~fine]}")


def same_bits(kind: str, one: Any, other: Any) -> Iterator[Breach]:
    a, b = np.asarray(one), np.asarray(other)
    if a.shape != b.shape or a.dtype != b.dtype or a.tobytes() != b.tobytes():
        yield Breach(kind, f"the same bits as {a.reshape(-1)[:6].tolist()}", f"{b.reshape(-1)[:6].tolist()}")


# -- other functions --------------------------------------------------------------------------------------------------

RANGE = Decimal("1e-280"), Decimal("1e300")
LEAST = 2.0**-960  # below which products may lack digits; more of them takes from the attention of others
SCALES = 2.0 ** np.array([-40.0, -10, -1, 0, 1, 2, 10, 40, 300])


def witnessed(truth: Truth, f: Function, queries: Float, seed: int) -> Float:
    """Attention that some queries give each key, to about 1e-13: no bound of its sensitivity may be below."""
    rng = np.random.default_rng(seed)
    n = truth.K.shape[0]
    best = np.zeros(n)
    some = range(n) if n <= 12 else {*rng.choice(n, 4).tolist(), *np.argsort(truth.scores)[-4:].tolist()}
    found = [z for j in some for z in queries_for(truth, j, rng)]
    found += [z for z in queries[:6] if np.isfinite(z).all() and z.any()]
    for z in found:
        sure = np.abs(z) > LEAST
        with np.errstate(over="ignore", under="ignore"):
            some = shares(f, SCALES[:, None] * np.where((z == 0) | sure, z, LEAST))
        best = np.maximum(best, np.where(sure, some.max(axis=0), 0.0))
    return best


def bounded(witness: Float, chosen: Bool, upper: Any, epsilon: float, mask: Bool | None = None) -> Iterator[Breach]:
    """Keys that some query gives at least ε are in the set, and no bound is below what a query gives."""
    missing = (witness >= epsilon * (1 + 1e-12)) & ~chosen
    if missing.any():
        yield Breach(
            "missing key", f"keys {_few(missing)}, given {witness[missing][:3].tolist()} by queries", "a superset"
        )
    if upper is not None:
        low = np.asarray(upper, np.float64) < witness * (1 - 2 * TIE)
        if low.any():
            got = np.asarray(upper, np.float64)[low][:3].tolist()
            yield Breach("bound too low", f"at least {witness[low][:3].tolist()} of keys {_few(low)}", str(got))
    if mask is not None and (chosen & ~mask).any():
        yield Breach("masked key", "no masked key in the set", _few(chosen & ~mask))


def shares_hold(truth: Truth, f: Function, found: Float, epsilon: float, error: Float) -> Iterator[Breach]:
    """As `entries_hold`, of another function: its values to 58 digits, where their sum is within float64's range."""
    with localcontext(DIGITS):
        for i, (over, total) in enumerate(truth.shares(f)):
            if total and not RANGE[0] < total < RANGE[1]:
                continue
            heavy = over >= Decimal(epsilon) * total
            yield from _entries_of_a_query(i, over, total, heavy, found[i], epsilon, float(error[i]))


# -- sample queries ---------------------------------------------------------------------------------------------------

DECIDED = Fraction(1, 2**80)  # of the largest product that its factors allow: twice the precision holds the others
MEAN = 1e-9  # error of a mean of attention (docstring of expected_scores)


def _attention(truth: Truth, f: Function | None) -> Iterator[list[Fraction]]:
    """What each query gives each key; f is None for x²."""
    with localcontext(DIGITS):
        rows = zip(*truth.attention(), strict=True) if f is None else truth.shares(f)
        for over, total in rows:
            under = Fraction(total if f else int(total)) or Fraction(1)
            yield [Fraction(x if f else int(x)) / under for x in over]


def covered_holds(truth: Truth, f: Function | None, found: Any, place: int) -> Iterator[Breach]:
    """As many queries of the sample as the coverage asks for find their keys in the set."""
    chosen, covered, low, high = np.asarray(found.mask), 0, Fraction(1 - TIE), Fraction(1 + TIE)
    for A in _attention(truth, f):
        left = max((a for a, held in zip(A, chosen, strict=True) if not held), default=Fraction(0))
        if found.mass is not None:
            held = sum(a for a, held in zip(A, chosen, strict=True) if held)
            covered += not any(A) or held >= Fraction(found.mass) * low
        elif found.by_size:
            covered += left <= Fraction(float(found.epsilon)) * high + Fraction(1, 10**300)
        else:
            covered += left < Fraction(float(found.epsilon))
    if covered < place:
        yield Breach("coverage", f"{place} of {len(truth.Q)} queries that find their keys", str(covered))


def mean_holds(truth: Truth, f: Function | None, found: Any, error: float) -> Iterator[Breach]:
    """The scores are the mean attention of the queries, if twice the precision decides their products."""
    Z, exponents = truth.products
    for q, z, exponent in zip(truth.Q.tolist(), Z, exponents, strict=True):
        sizes = (sum(abs(Fraction(a) * Fraction(b)) for a, b in zip(q, k, strict=True)) for k in truth.K.tolist())
        size, top = max(sizes, default=Fraction(0)), max(map(abs, z), default=0)
        if 0 < fraction(int(top), int(exponent)) < DECIDED * size:
            return
    mean = np.mean([[float(a) for a in A] for A in _attention(truth, f)], axis=0)
    off = np.abs(np.asarray(found, np.float64) - mean)
    if not (off <= max(error, MEAN)).all():
        worst = int(np.argmax(np.where(off <= MEAN, 0, 1) + np.nan_to_num(off)))
        yield Breach("mean attention", f"{mean[worst]!r} of key {worst}", repr(float(found[worst])))
