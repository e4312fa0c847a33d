"""Pruned attention: its definition, what is certain of it, its states, and what it does at the edges."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import array_api_strict
import numpy as np
import pytest
from array_api_compat import array_namespace
from hypothesis import given
from hypothesis import strategies as st
from operator_table import PRUNED_FORMS as FORMS
from operator_table import products

import levattn
import naive
import naive_attention
import strategies
from differences import assert_gradients
from levattn.attention import PrunedCertificate, Selection, Slots, causal_pruned_attention, pruned_attention
from levattn.exceptions import NonFiniteError
from libraries import HAS_TORCH, needs_torch, over_storages, stored
from pruned_calls import attend, walk
from strategies import Float, as_float64

if HAS_TORCH:
    import torch

SETTINGS = strategies.examples(15)
ROOM = {"float64": 1e-11, "float32": 2e-5}
CHUNK = 5
KEYS = {False: 24, True: 40}  # causal: each form selects several times, first after 32 at most

OF_ORACLE = {"summaries": "R", "scores": "kind", "f": "power"}


def heads(
    seed: int, n: int = 24, d: int = 5, D: int = 3, *, H: int = 4, G: int = 2, m: int | None = None, batch: Any = ()
) -> tuple[Float, Float, Float]:
    rng = np.random.default_rng(seed)
    shapes = (*batch, H, n if m is None else m, d), (*batch, G, n, d), (*batch, G, n, D)
    Q, K, V = (rng.standard_normal(shape) for shape in shapes)
    return 1.5 * Q + 0.5 * rng.standard_normal(d), K + rng.standard_normal(d), V


def own_scores(K: Float) -> Float:
    return np.random.default_rng(99).standard_normal(K.shape[:-1])


def options_of(form: str, K: Float, causal: bool = False) -> dict[str, Any]:
    options = dict(FORMS[form])
    if form == "own":
        options["scores"] = own_scores(K)
    return options | ({"causal": True, "renew_every": CHUNK} if causal else {})


def by_loops(form: str, Q: Float, K: Float, V: Float, causal: bool) -> list[Any]:
    """What the oracle says of each head of the keys."""
    group = len(Q) // len(K)
    oracle = {OF_ORACLE.get(name, name): value for name, value in FORMS[form].items()}
    oracle |= {"power": power_of(FORMS[form]), "chunk": CHUNK if causal else None}
    if oracle["power"]:  # which see the mean of keys
        oracle["center"] = False
    found = []
    for j, (k, v) in enumerate(zip(K, V, strict=True)):
        if form == "own" or callable(FORMS[form].get("scores")):
            scores = own_scores(K) if form == "own" else FORMS[form]["scores"](K, V)
            oracle |= {"kind": "given", "scores": scores[j]}
        found.append(naive_attention.pruned(Q[j * group : (j + 1) * group], k, v, **oracle))
    return found


def power_of(options: dict[str, Any]) -> float | None:
    f = options.get("f", "softmax")
    return None if f == "softmax" else float(getattr(f, "p", f))


# -- the definition ----------------------------------------------------------------------------


@over_storages
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_loop_over_queries(form: str, causal: bool, storage: str) -> None:
    Q, K, V = heads(0, KEYS[causal])
    options = options_of(form, K, causal)
    found = by_loops(form, Q, K, V, causal)
    expected = np.concatenate([Y for Y, *_ in found])
    given = [stored(X, storage) for X in (Q, K, V)]
    own = {"scores": stored(options["scores"], storage)} if isinstance(options.get("scores"), np.ndarray) else {}
    Y = attend(*given, **options | own)
    assert type(Y) is type(given[2])
    np.testing.assert_allclose(as_float64(Y), expected, rtol=0, atol=ROOM["float64"])
    if causal and not options.get("summaries"):
        return
    Y, certificate = attend(*given, **options | own, return_certificate=True)
    np.testing.assert_allclose(as_float64(Y), expected, rtol=0, atol=ROOM["float64"])
    assert isinstance(certificate, PrunedCertificate)
    upper = as_float64(certificate.captured_upper)
    everything, P = naive_attention.dense(Q, K, V, power_of(options), causal, options.get("scale"))
    mass = captured(P, found)
    if options.get("summaries"):
        share = np.concatenate([share for _, share, *_ in found])
        np.testing.assert_allclose(upper, share, atol=1e-10)
    assert np.all(upper >= mass - 1e-14)
    assert np.all(as_float64(certificate.captured_lower) <= mass + 1e-14)
    off = np.linalg.norm(expected - everything, axis=-1)
    assert np.all(as_float64(certificate.error_bound) >= off - 1e-13)
    if not causal:
        w = options.get("window", 0)
        for flags, (_, _, seen, _) in zip(as_float64(certificate.kept), found, strict=True):
            for i, places in enumerate(seen):
                near = range(max(0, i - w), i + w + 1) if w else ()
                assert {*np.flatnonzero(flags), *near} & {*range(24)} == {*places}


def captured(P: Float, found: list[Any]) -> Float:
    """The weights (H, m, n) of the keys that the oracle attends exactly, summed up."""
    group = len(P) // len(found)
    return np.array(
        [[p[places].sum() for p, places in zip(P[h], found[h // group][2], strict=True)] for h in range(len(P))]
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["default", "no-window", "expected", "squares", "cubes"])
def test_arrays_of_another_device_stay_there(form: str, causal: bool) -> None:
    options, device = options_of(form, np.empty(0), causal), array_api_strict.Device("device1")
    arrays = heads(0, KEYS[causal])
    given = [array_api_strict.asarray(X, device=device) for X in arrays]
    Y, certificate = attend(*given, **options, return_certificate=True)
    assert Y.device == certificate.error_bound.device == device
    found = Y.to_device(array_api_strict.Device("CPU_DEVICE"))
    np.testing.assert_allclose(np.asarray(found), attend(*arrays, **options), atol=1e-12)


def test_queries_at_other_places_than_keys() -> None:
    Q, K, V = heads(1, 20, m=9)
    found = by_loops("no-window", Q, K, V, False)
    Y = pruned_attention(Q, K, V, Selection(size=4, summaries=5))
    np.testing.assert_allclose(Y, np.concatenate([Y for Y, *_ in found]), atol=ROOM["float64"])
    Y, certificate = pruned_attention(Q, K, V, 12, return_certificate=True)
    assert certificate.slots.tolist() == [12] * 9
    assert certificate.kept.sum(axis=-1).tolist() == [5, 5]
    assert certificate.kept.shape == (2, 20)


# -- what is certain ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("f", ["softmax", 2, 3.0, 1])
def test_a_budget_that_covers_all_keys_is_dense_attention(f: Any, causal: bool, dtype: Any) -> None:
    Q, K, V = (X.astype(dtype) for X in heads(2, 30))
    expected, _ = naive_attention.dense(Q, K, V, None if f == "softmax" else f, causal)
    room = 1e-12 if dtype == np.float64 else 1e-5
    options = [{"budget": 1.0}, {"budget": 30}, {"budget": 99}, {"size": 30}, {"size": 40}, {"epsilon": -1e30}]
    options += [{"size": 28, "sinks": 2}, {"size": 3, "window": 30}, {"size": 0, "summaries": 30}]
    options += [{"size": 12, "summaries": 18, "scores": "expected"}]
    for more in options:
        if causal:
            more |= {"renew_every": 3} if "budget" not in more else {}
            if f != "softmax" and "summaries" in more:
                continue  # keys that were merged before all are known to be on one side are not taken apart again
        Y = attend(Q, K, V, f=f, causal=causal, **more)
        np.testing.assert_allclose(Y, expected, atol=room, err_msg=str(more))
        if not causal and not more.keys() & {"summaries", "window"}:
            _, certificate = attend(Q, K, V, f=f, **more, return_certificate=True)
            np.testing.assert_array_equal(certificate.captured_upper, 1)
            np.testing.assert_array_equal(certificate.error_bound, 0)


@st.composite
def hostile(draw: st.DrawFn) -> tuple[Float, Float, Float]:
    """Huge, tiny, repeated, missing: one head of keys, two of queries, at the same places."""
    rng = np.random.default_rng(draw(strategies.seeds()))
    d, n = draw(st.sampled_from([1, 2, 5])), draw(st.integers(1, 28))
    K = draw(st.sampled_from([0.0, 1.0, 30.0])) * rng.standard_normal(d) + rng.standard_normal((1, n, d))
    Q = draw(st.sampled_from([0.0, 1.0, 30.0])) * rng.standard_normal(d) + rng.standard_normal((2, n, d))
    V = draw(st.sampled_from([0.0, 100.0])) + rng.standard_normal((1, n, 3))
    for X in (Q, K):
        X *= draw(st.sampled_from([1e-30, 1e-3, 1.0, 1.0, 30.0, 1e4]))
    if draw(st.booleans()):
        K = K[:, rng.integers(0, n, n)]
    if draw(st.booleans()):
        K[:, rng.random(n) < 0.4] = 0
    if draw(st.booleans()):
        Q[:, rng.random(n) < 0.4] = 0
    if draw(st.booleans()):
        K *= 10.0 ** rng.uniform(-4, 1, (1, n, 1))
    return Q, K, V


@strategies.examples(40)
@given(
    case=hostile(),
    causal=st.booleans(),
    f=st.sampled_from(["softmax", "softmax", 2, 1, 4]),
    size=st.integers(0, 4),
    R=st.integers(0, 4),
    window=st.integers(0, 2),
    sinks=st.integers(0, 1),
    scores=st.sampled_from(["residual", "expected", "leverage"]),
    dtype=st.sampled_from([np.float64, np.float32]),
)
def test_bounds_hold_for_hostile_keys(
    case: Any, causal: bool, f: Any, size: int, R: int, window: int, sinks: int, scores: str, dtype: Any
) -> None:
    Q, K, V = (X.astype(dtype) for X in case)
    options = {"size": size, "summaries": R, "window": window, "sinks": sinks, "scores": scores, "f": f}
    if causal:
        options |= {"causal": True, "renew_every": 3, "summaries": R + 1}
    Y, certificate = attend(Q, K, V, **options, return_certificate=True)
    power = None if f == "softmax" else f
    expected, P = naive_attention.dense(Q, K, V, power, causal)
    assert np.all(np.isfinite(Y))
    lower, upper = certificate.captured_lower, certificate.captured_upper
    assert np.all((lower >= 0) & (lower <= 1 + 1e-12) & (upper <= 1))
    room = rounding(Q, K, power, dtype)
    assert np.all(lower <= upper + room)
    off = np.linalg.norm(Y - expected, axis=-1)
    size_of = np.linalg.norm(V, axis=-1).max()
    assert np.all(off <= certificate.error_bound + (room + 16 * np.finfo(dtype).eps) * size_of)
    if not causal:
        n = K.shape[1]
        seen = np.repeat(certificate.kept, n, axis=0)
        if window:
            seen = seen | (np.abs(np.subtract.outer(np.arange(n), np.arange(n))) <= window)
        mass = np.where(seen, P, 0).sum(axis=-1)
        there = P.sum(axis=-1) > 0  # all weights are 0 where all powers are
        assert np.all((lower <= mass + room)[there])
        assert np.all((mass <= upper + room)[there])


def rounding(Q: Float, K: Float, power: float | None, dtype: Any) -> Float:
    """What rounded products may do to a share of weights, (H, m)."""
    eps = float(np.finfo(dtype).eps)
    logits = np.linalg.norm(Q, axis=-1) * np.linalg.norm(K, axis=-1).max() * Q.shape[-1] ** -0.5
    if power is None:
        return np.minimum(1.0, 64 * eps * logits + 64 * eps)
    top = np.abs(Q @ K.swapaxes(-1, -2)).max(axis=-1) * Q.shape[-1] ** -0.5
    return np.minimum(1.0, 64 * eps * power * logits / np.where(top > 0, top, 1) * K.shape[-2] + 64 * eps)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("f", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "of_queries", "of_keys"),
    [
        (np.float32, 1e-31, 1e-31),
        (np.float32, 1e-11, 1e-34),
        (np.float32, 1e19, 1e19),
        (np.float32, 1e11, 1e28),
        (np.float32, 1.0, 1e36),
        (np.float64, 1e-200, 1e-200),
    ],
)
def test_products_that_leave_the_range_have_their_weights(
    dtype: Any, of_queries: float, of_keys: float, f: int, causal: bool
) -> None:
    Q, K, V = (X.astype(dtype) for X in heads(2, 12))
    far = attend(Q * dtype(of_queries), K * dtype(of_keys), V, budget=1.0, f=f, causal=causal)
    near = attend(Q, K, V, budget=1.0, f=f, causal=causal)
    np.testing.assert_allclose(far, near, rtol=0, atol=64 * f * np.finfo(dtype).eps)


@pytest.mark.parametrize("causal", [False, True])
def test_columns_of_queries_and_keys_may_differ_in_size_inversely(causal: bool) -> None:
    Q, K, V = (X.astype(np.float32) for X in heads(2, 12))
    size = 2.0 ** np.linspace(-100, 100, Q.shape[-1]).round().astype(np.float32)
    far = attend(Q * size, K / size, V, budget=1.0, f=2, causal=causal)
    np.testing.assert_array_equal(far, attend(Q, K, V, budget=1.0, f=2, causal=causal))


def test_an_output_of_nothing_is_within_its_bound() -> None:
    Q, K, V = heads(3, 12)
    V = V * 0 + 7.0
    for options in ({"size": 0}, {"epsilon": 1e9}, {"epsilon": 1.0, "scores": "leverage", "f": 2}):
        Y, certificate = attend(Q, K, V, **options, return_certificate=True)
        np.testing.assert_array_equal(Y, 0)
        assert np.all(certificate.error_bound >= np.linalg.norm(V[0, 0]))
    K[:, 3], Q[:, :] = 0, 0
    K[:, 3, 0], Q[..., 1] = 100.0, 1.0  # queries are orthogonal to the key that is kept
    Y, certificate = pruned_attention(Q, K, V, Selection(size=1, scores="leverage"), f=2, return_certificate=True)
    assert np.all(np.linalg.norm(Y - 7.0, axis=-1) <= certificate.error_bound)


# -- what changes nothing ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", [name for name in FORMS if not {"window", "sinks"} & FORMS[name].keys()])
def test_the_order_of_keys_does_not_matter(form: str) -> None:
    Q, K, V = heads(4)
    order = np.random.default_rng(5).permutation(24)
    options = options_of(form, K)
    more = options | ({"scores": options["scores"][:, order]} if form == "own" else {})
    Y, certificate = attend(Q, K, V, **options, return_certificate=True)
    found, other = attend(Q, K[:, order], V[:, order], **more, return_certificate=True)
    np.testing.assert_allclose(found, Y, atol=1e-12)
    np.testing.assert_array_equal(other.kept, certificate.kept[:, order])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_keys_and_queries_may_be_scaled_against_each_other(form: str, causal: bool) -> None:
    Q, K, V = heads(6, KEYS[causal])
    options = options_of(form, K, causal)
    Y = attend(Q, K, V, **options)
    np.testing.assert_allclose(attend(Q / 3, K * 3, V, **options), Y, atol=1e-12)
    np.testing.assert_allclose(attend(Q * 2.0**40, K * 2.0**-40, V, **options), Y, atol=1e-12)
    if options.get("f", "softmax") == "softmax":  # which sees no constant
        np.testing.assert_allclose(attend(Q, K, V + 5, **options), Y + 5, atol=1e-12)
        if options.get("center", True):
            shifted = attend(Q, K + np.arange(5.0), V, **options)
            np.testing.assert_allclose(shifted, Y, atol=1e-12)


@over_storages
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_masked_positions_are_as_if_they_were_not_there(form: str, causal: bool, storage: str) -> None:
    n = 60 if causal else 24
    Q, K, V = heads(10, n, batch=(4,))
    mask = np.random.default_rng(11).random((4, n)) > 0.3
    mask[0, : n // 3], mask[0, n // 3 :] = False, True  # padded on the left
    mask[1, -n // 3 :], mask[1, : -n // 3] = False, True
    mask[2] = False
    options = options_of(form, K, causal)
    tied = causal or options.get("window")
    dirty = [np.where(mask[:, None, :, None], X, np.nan) for X in (Q, K, V)]
    own = {"scores": stored(options["scores"], storage)} if form == "own" else {}
    arrays = [stored(X, storage) for X in (dirty if tied else [Q, *dirty[1:]])]
    certified = not causal or "summaries" in options
    Y = attend(*arrays, **options | own, mask=stored(mask[:, None, :], storage), return_certificate=certified)
    certificate: Any = None
    if certified:
        Y, certificate = Y
    Y = as_float64(Y)
    for i in range(4):
        there = mask[i]
        rows = there if tied else np.ones(n, bool)
        alone = options | ({"scores": stored(options["scores"][i][:, there], storage)} if own else {})
        arrays = [stored(X, storage) for X in (Q[i][:, rows], K[i][:, there], V[i][:, there])]
        expected = attend(*arrays, **alone, return_certificate=certified)
        if certified:
            expected, theirs = expected
            for name in ("captured_lower", "captured_upper", "error_bound"):
                figures = as_float64(getattr(certificate, name))[i]
                np.testing.assert_allclose(figures[:, rows], as_float64(getattr(theirs, name)), atol=1e-11)
                assert not figures[:, ~rows].any()
            if not causal:
                kept = as_float64(certificate.kept)[i]
                np.testing.assert_array_equal(kept[:, there], as_float64(theirs.kept))
                assert not kept[:, ~there].any()
        np.testing.assert_allclose(Y[i][:, rows], as_float64(expected), atol=1e-12)
        assert not Y[i][:, ~rows].any()


@pytest.mark.parametrize("window", [0, 2])
def test_masks_of_heads_and_of_queries(window: int) -> None:
    Q, K, V = heads(12, batch=(2,))
    rng = np.random.default_rng(13)
    mask, asking = rng.random((2, 2, 24)) > 0.3, rng.random((2, 1, 24)) > 0.4
    form = {"size": 4, "summaries": 3}
    Y = attend(Q, K, V, **form, mask=mask, query_mask=asking, window=window)
    assert not (Y * ~asking[..., None]).any()
    for i, j in np.ndindex(2, 2) if not window else ():
        there, rows, of_key = mask[i, j], asking[i, 0], slice(2 * j, 2 * j + 2)
        alone = attend(Q[i, of_key][:, rows], K[i, j : j + 1][:, there], V[i, j : j + 1][:, there], **form)
        np.testing.assert_allclose(Y[i, of_key][:, rows], alone, atol=1e-12)
    # Leverage asks no queries: rows are what they are without a mask of queries.
    options = {"size": 4, "window": window, "scores": "leverage"}
    Y = attend(Q, K, V, **options, query_mask=asking)
    np.testing.assert_allclose(Y, attend(Q, K, V, **options) * asking[..., None], atol=1e-12)


def test_the_window_of_an_absent_key_is_that_of_the_keys_around_it() -> None:
    Q, K, V = heads(12, batch=(2,))
    mask, asking = np.ones(24, bool), np.arange(24) == 11
    mask[10:13] = False
    options = {"size": 0, "window": 2, "mask": mask, "query_mask": asking, "return_certificate": True}
    Y, certificate = attend(Q, K, V, **options)
    near = [8, 9, 13, 14]
    expected, _ = naive_attention.dense(Q[..., 11:12, :], K[..., near, :], V[..., near, :])
    np.testing.assert_allclose(Y[..., 11:12, :], expected, atol=1e-12)
    assert not certificate.kept.any()


# -- causal attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["F", "strided", "heads side by side", "backward"])
def test_arrays_of_any_layout_have_the_bits_of_contiguous_ones(layout: str) -> None:
    rng = np.random.default_rng(3)
    given = [rng.standard_normal((2, 300, width)) for width in (8, 8, 5)]
    change = {
        "F": np.asfortranarray,
        "strided": lambda X: np.repeat(X, 2, axis=-1)[..., ::2],
        "heads side by side": lambda X: np.ascontiguousarray(X.transpose(1, 0, 2)).transpose(1, 0, 2),
        "backward": lambda X: np.ascontiguousarray(X[::-1, :, ::-1])[::-1, :, ::-1],
    }[layout]
    for call in (pruned_attention, causal_pruned_attention):
        found = call(*map(change, given), 40)
        assert np.array_equal(found, call(*given, 40))
    one, state = causal_pruned_attention(*(change(X[:, :200]) for X in given), 40, return_state=True)
    other, _ = causal_pruned_attention(*(change(X[:, 200:]) for X in given), state, return_state=True)
    np.testing.assert_allclose(np.concatenate([one, other], axis=1), found, atol=1e-12)


@over_storages
def test_states_do_not_grow(storage: str) -> None:
    """They hold the keys of at most twice the slots before the first selection, and of at most the slots after it."""
    arrays = [stored(X, storage) for X in heads(18, 115, H=2)]
    early, *states = (
        causal_pruned_attention(*(X[:, :n, :] for X in arrays), 40, return_state=True)[1] for n in (79, 85, 115)
    )
    assert states[0].nbytes == states[1].nbytes
    slots = states[1].slots
    kept = slots.selected + slots.sinks
    rows = kept + slots.window + (115 - 2 * slots.total) % slots.chunk
    assert rows + slots.summaries <= slots.total
    d, D, R = 5, 3, slots.summaries
    sums = 2 * d + d * d + 1
    floats = rows * (d + D) + R * (d + D + 4) + sums
    assert states[1].nbytes == 2 * 8 * (floats + kept + 1)  # and the places of keys, and of the item
    assert (slots.total, states[1].batch) == (40, (2,))
    assert early.nbytes == 2 * 8 * (79 * (d + D) + sums + 1)
    _, state = causal_pruned_attention(*arrays, Selection(size=4, window=3, renew_every=5), return_state=True)
    assert state.nbytes == 2 * 8 * ((7 + (115 - 24) % 5) * (d + D) + sums + 4 + 1)


def test_budgets_hold_for_what_comes_later() -> None:
    Q, K, V = heads(18, 60)
    expected, whole = causal_pruned_attention(Q, K, V, 20, return_state=True)
    for first in (1, 12, 30):  # which the budget, or twice the budget, would cover
        head, state = causal_pruned_attention(*(X[:, :first] for X in (Q, K, V)), 20, return_state=True)
        rest = [X[:, first:] for X in (Q, K, V)]
        tail, state = causal_pruned_attention(*rest, state, return_state=True)
        assert state.slots == whole.slots == Selection(20).slots(60, causal=True)
        np.testing.assert_allclose(np.concatenate([head, tail], axis=1), expected, atol=1e-10)


@over_storages
@pytest.mark.parametrize("summaries", [None, 0])
@pytest.mark.parametrize("first", [30, 57])
def test_a_state_goes_on_alike_whether_or_not_it_is_asked_for_again(
    first: int, summaries: int | None, storage: str
) -> None:
    arrays = [stored(X, storage) for X in heads(19, 90)]
    selection = Selection(20, summaries=summaries)
    _, state = causal_pruned_attention(*(X[:, :first, :] for X in arrays), selection, return_state=True)
    rest = [X[:, first:, :] for X in arrays]
    Y, _ = causal_pruned_attention(*rest, state, return_state=True)
    np.testing.assert_array_equal(causal_pruned_attention(*rest, state), Y)


def test_causal_thresholds_keep_the_universal_set_of_the_keys_so_far() -> None:
    Q, K, V = heads(20, 60, d=4)
    for T in (14, 35, 56):
        arrays = [X[:, :T] for X in (Q, K, V)]
        selection = Selection(epsilon=0.2, scores="leverage", center=False, renew_every=7, sinks=1)
        _, state = causal_pruned_attention(*arrays, selection, return_state=True)
        (part,) = state.parts
        for i in range(2):
            count = part.kept_places.shape[1] if part.kept_count is None else part.kept_count[i]
            expected = {0, *np.flatnonzero(naive.leverage_svd(K[i, :T]) >= 0.2)}
            assert {*part.kept_places[i, :count].tolist()} == expected


# -- which keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.05, 0.2, 0.5])
def test_thresholds_of_leverage_are_universal_sets(epsilon: float) -> None:
    for name in ("gaussian", "planted", "coherent", "duplicated", "deficient-exact", "wide", "zero-rows"):
        K = strategies.case(name)[:200]
        Q, V = np.ones((3, K.shape[1])), K[:, :1]
        for f in ("softmax", 2):
            options = {"epsilon": epsilon, "scores": "leverage", "center": False, "f": f}
            _, certificate = attend(Q, K, V, **options, return_certificate=True)
            np.testing.assert_array_equal(certificate.kept, levattn.universal_set(K, epsilon).mask)


def test_the_largest_scores_are_kept_and_of_equal_ones_the_first() -> None:
    Q, K, V = heads(21, 12, G=1, H=1)
    scores = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -np.inf, np.inf, 0.0, 2.0, -1.0, -np.inf])
    order = [7, 1, 3, 2, 4, 5, 9, 0, 8, 10]
    for size in range(11):
        for sinks in (0, 3):
            options = {"size": size, "sinks": sinks, "scores": scores}
            _, certificate = attend(Q, K, V, **options, return_certificate=True)
            others = [j for j in order if j >= sinks]
            assert {*np.flatnonzero(certificate.kept[0])} == {*range(sinks), *others[:size]}, size
    _, certificate = pruned_attention(Q, K, V, Selection(epsilon=2.0, scores=scores), return_certificate=True)
    assert {*np.flatnonzero(certificate.kept[0])} == {*order[:7]}


@over_storages
@pytest.mark.parametrize("f", ["softmax", 2])
@pytest.mark.parametrize("causal", [False, True])
def test_a_function_selects_as_the_array_of_its_values(causal: bool, f: Any, storage: str) -> None:
    """For heads that share keys, and keys that are masked; no key of score −∞ is selected."""
    n = 48 if causal else 24
    Q, K, V = heads(40, n, batch=(2,))
    mask = np.random.default_rng(41).random((2, 2, n)) > 0.3
    Q, K, V, mask = (stored(X, storage) for X in (Q, K, V, mask))

    def half(K: Any, V: Any) -> Any:
        xp, scores = array_namespace(K), products(K, V)
        return xp.where(K[:, :, 1] > 1, scores, xp.full_like(scores, -math.inf))

    for size in (0, 3, 20):
        for function in (products, half):
            found = {}
            own = function(as_float64(K).reshape(4, n, 5), as_float64(V).reshape(4, n, 3)).reshape(2, 2, n)
            for name, scores in (("function", function), ("array", stored(own, storage))):
                options: dict[str, Any] = {"size": size, "summaries": 3, "window": 1, "sinks": 1, "scores": scores}
                options |= {"f": f, "mask": mask, "return_certificate": True}
                found[name] = walk(Q, K, V, renew_every=5, **options) if causal else attend(Q, K, V, **options)
            (Y, *_, mine), (expected, *_, theirs) = found["function"], found["array"]
            np.testing.assert_array_equal(as_float64(Y), as_float64(expected))
            np.testing.assert_array_equal(as_float64(mine.error_bound), as_float64(theirs.error_bound))
            if not causal:
                np.testing.assert_array_equal(as_float64(mine.kept), as_float64(theirs.kept))


def test_a_function_gets_the_keys_and_values_that_are_there() -> None:
    """Causal: at each selection those that are kept and those that came, but for the window."""
    Q, K, V = heads(42, 37, H=1, G=1)
    seen: list[tuple[Float, Float]] = []

    def scores(K: Float, V: Float) -> Float:
        seen.append((K, V))
        return products(K, V)

    there = np.arange(37) % 3 > 0
    attend(Q, K, V, size=4, summaries=2, scores=scores, mask=there)
    for found, expected in zip(seen.pop(), (K, V), strict=True):
        np.testing.assert_array_equal(found, expected[:, there])
    for f in ("softmax", 2):
        walk(Q, K, V, size=4, summaries=2, window=2, scores=scores, renew_every=5, f=f)
        kept, low, ranks = list[int](), 0, products(K, V)[0]
        for end in (26, 31, 36):  # the first where twice as many have come as there are slots
            candidates = [*kept, *range(low, end - 2)]
            for found, expected in zip(seen.pop(0), (K, V), strict=True):
                np.testing.assert_array_equal(found[0], expected[0, candidates])
            kept, low = sorted(sorted(candidates, key=lambda j: -ranks[j])[:4]), end - 2
        assert not seen


@over_storages
def test_a_function_without_a_score_for_each_key_is_named(storage: str) -> None:
    Q, K, V = (stored(X, storage) for X in heads(43, 20))
    shape = r"scores\(K, V\) has shape \(.*\); expected \(2, \d+\), one for each key"
    # the values of a function, by its products for each key
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda found: found[:, :, None], ValueError, shape),
        (lambda found: found[0, :], ValueError, shape),
        (lambda _: None, TypeError, r"scores\(K, V\) is of type NoneType; expected a dense array"),
        (lambda found: found > 0, TypeError, r"scores\(K, V\) has dtype .*bool"),
        (lambda found: found + math.nan, NonFiniteError, "the scores of keys are NaN"),
    ]
    if storage in ("strict", "torch"):
        wrong.append((as_float64, TypeError, r"scores\(K, V\) is of numpy.*, and K of .*; expected one library"))
    for change, error, message in wrong:
        for more in ({}, {"causal": True, "renew_every": 5}):
            with pytest.raises(error, match=message):
                attend(Q, K, V, size=4, scores=lambda K, V, change=change: change(products(K, V)), **more)
    if storage == "jax":  # whose arrays a function gets in numpy
        import jax

        own = pruned_attention(Q, K, V, Selection(size=4, scores=lambda K, V: jax.numpy.asarray(products(K, V))))
        expected = pruned_attention(Q, K, V, Selection(size=4, scores=products))
        np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_budgets_are_split(n: int, causal: bool) -> None:
    for budget in (2, 7, 8, 20, max(2, n), 0.1, 0.3, 1.0):
        slots = Selection(budget).slots(n, causal=causal)
        total = budget if isinstance(budget, int) else max(1, math.floor(budget * n + 1e-9))
        assert slots.total == (total if total < n else n + slots.chunk)
        assert min(vars(slots).values()) >= 0


@pytest.mark.parametrize("causal", [False, True])
def test_a_share_is_a_count(causal: bool) -> None:
    """Of the keys, and for parts of a budget of its slots, rounded down."""
    for share, count in ((0.2, 20), (0.29, 29), (0.299, 29), (1.0, 100)):
        for name in ("budget", "size"):
            slots = [Selection(**{name: number}).slots(100, causal=causal) for number in (share, count)]
            assert slots[0] == slots[1]
    assert Selection(0.015).slots(100, causal=causal).total == 1
    for share, count in ((0.25, 10), (0.26, 10), (0.0, 0)):
        for name in ("summaries", "window") if count else ("summaries", "window", "sinks"):
            if name == "window" and not causal:  # a count on each side of a query, which has a place itself
                count = max(0, (count - 1) // 2)
            options: dict[str, Any] = {} if name == "sinks" else {"sinks": 0}  # a share is of the others
            slots = [Selection(40, **{name: part}, **options).slots(1000, causal=causal) for part in (share, count)]
            assert slots[0] == slots[1]
            assert slots[0].total == 40
    assert Selection(40, sinks=0.05).slots(1000, causal=causal) == Selection(40, sinks=2).slots(1000, causal=causal)
    with pytest.raises(ValueError, match="budget=None, size=None and epsilon=None were given; expected one of"):
        Selection(window=0.25).slots(100, causal=causal)
    for n, error in ((-5, ValueError), (3.5, TypeError)):
        with pytest.raises(error, match=f"n is {n}; expected"):
            Selection(0.5).slots(n, causal=causal)


def test_selections_are_records() -> None:
    for selection, shown in (
        (Selection(), "Selection()"),
        (Selection(0.25, window=8), "Selection(0.25, window=8)"),
        (Selection(np.int64(20)), "Selection(20)"),
        (Selection(np.float64(0.5), window=np.int32(0)), "Selection(0.5, window=0)"),
        (Selection(1.0, scores="expected"), "Selection(1.0, scores='expected')"),
        (Selection(1.0, scores="residual"), "Selection(1.0, scores='residual')"),
        (Selection(1.0, scores=None), "Selection(1.0)"),
        (
            Selection(size=3, sinks=1, scores="leverage", center=False, renew_every=5),
            "Selection(size=3, sinks=1, scores='leverage', center=False, renew_every=5)",
        ),
    ):
        assert repr(selection) == shown
        again = eval(shown)
        assert (again, hash(again)) == (selection, hash(selection))
    assert Selection(size=3, scores=products) in {Selection(size=3, scores=products)}
    assert len({Selection(8), Selection(8, window=0), Selection(size=8), Selection(8, scores="residual")}) == 4
    assert Selection(8, scores="leverage", center=np.False_) == Selection(8, scores="leverage", center=False)
    with pytest.raises(AttributeError):
        Selection(8).budget = 9  # type: ignore[misc]


@pytest.mark.parametrize("causal", [False, True])
def test_a_share_of_the_keys_selects_one_at_least(causal: bool) -> None:
    for n, count in ((0, 0), (1, 1), (99, 1), (200, 2), (299, 2)):
        assert Selection(size=0.01).slots(n, causal=causal).selected == count
    Q, K, V = np.random.default_rng(0).standard_normal((3, 40, 4))
    Y = pruned_attention(Q, K, V, Selection(size=0.001))
    assert any((row == Y).all() for row in V)


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_a_scale_brings_queries_into_range(size: float) -> None:
    """Squares of queries of float64 leave its range before the scale."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 60, 8))
    expected = pruned_attention(Q, K, V, 0.3, scale=0.35)
    np.testing.assert_allclose(pruned_attention(Q * size, K, V, 0.3, scale=0.35 / size), expected, rtol=1e-10)


def test_large_budgets_have_256_summaries_unless_more_are_asked_for() -> None:
    found = Selection(0.1).slots(50_000)
    assert (found.summaries, found.total) == (256, 5000)
    assert Selection(337).slots(50_000).summaries == 256
    assert Selection(336).slots(50_000).summaries == 255
    assert Selection(0.1, summaries=3000).slots(50_000).summaries == 3000


def test_open_kinds_of_slots_give_way() -> None:
    assert Selection(16, summaries=14).slots(100) == Slots(2, 14, 0)
    assert Selection(40, sinks=10).slots(400, causal=True) == Slots(0, 0, 20, 10, 10)
    assert Selection(40, sinks=30).slots(400, causal=True) == Slots(0, 0, 0, 30, 10)
    assert Selection(40, window=37).slots(400, causal=True) == Slots(0, 0, 37, 2, 1)
    assert Selection(40, window=39).slots(400, causal=True) == Slots(0, 0, 39, 0, 1)
    assert Selection(40, window=30, renew_every=9).slots(400, causal=True) == Slots(0, 0, 30, 1, 9)
    for selection in (Selection(16, summaries=14), Selection(40, sinks=28), Selection(40, sinks=0.9, summaries=3)):
        assert selection.slots(400).total == selection.budget
    with pytest.raises(ValueError, match="expected a larger budget"):
        Selection(16, summaries=14, window=2).slots(100)


@pytest.mark.parametrize("call", [pruned_attention, causal_pruned_attention])
def test_a_number_is_a_budget_and_nothing_else_is_a_selection(call: Any) -> None:
    arrays = heads(44, 20)
    for budget in (0.4, np.float32(0.5), 8, np.int64(8)):
        found, expected = (call(*arrays, given) for given in (budget, Selection(budget)))
        np.testing.assert_array_equal(found, expected)
    wrong: list[Any] = ["8", None, True, {"budget": 8}, [8]]
    for selection in wrong if call is causal_pruned_attention else [*wrong, small_state()]:
        name = type(selection).__name__
        with pytest.raises(TypeError, match=f"selection is of type {name}; expected a Selection, or a number"):
            call(*arrays, selection)


def test_budgets_are_kept() -> None:
    arrays = heads(22, 30, H=1, G=1)
    for budget in (2, 7, 0.03, 0.3, 1.0):
        _, state = causal_pruned_attention(*arrays, budget, return_state=True)
        assert state.slots == Selection(budget).slots(30, causal=True)
        _, certificate = pruned_attention(*arrays, budget, return_certificate=True)
        assert certificate.slots[0] == min(30, Selection(budget).slots(30).total)
    arrays = heads(23, 40, H=2)
    options: dict[str, Any] = {"budget": 20, "summaries": 6, "window": 2, "sinks": 3}
    _, certificate = attend(*arrays, **options, return_certificate=True)
    assert certificate.kept.sum(axis=-1).tolist() == [9, 9]  # 20 − 6 − 5, of which three are first
    np.testing.assert_array_equal(certificate.slots, 20)
    _, state = walk(*arrays, **options, renew_every=4)
    assert state.slots == Slots(5, 6, 2, 3, 4)


# -- torch -------------------------------------------------------------------------------------------------


@needs_torch
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_mixture_with_constant_weights(form: str, causal: bool) -> None:
    """The oracle tells the keys and the weights; torch goes back through the definition."""
    n = 40 if causal else 15
    arrays = heads(24, n, H=2, G=1)
    options, power = options_of(form, arrays[1], causal), power_of(FORMS[form])
    leaves = [torch.from_numpy(X).requires_grad_() for X in arrays]
    own = {"scores": torch.from_numpy(options["scores"])} if form == "own" else {}
    Y = attend(*leaves, **options | own)
    rows = range(n - 1, n) if causal else range(n)  # a renewal ends the oracle's clusters for rows before it
    direction = torch.from_numpy(np.random.default_rng(25).standard_normal((2, len(rows), 3)))
    grads = torch.autograd.grad((Y[:, rows] * direction).sum(), leaves)
    _, _, seen, clusters = by_loops(form, *arrays, causal)[0]
    other = [torch.from_numpy(X).requires_grad_() for X in arrays]
    expected = torch.stack([mixture(other, t, seen[t], clusters, power, options.get("scale")) for t in rows], 1)
    np.testing.assert_allclose(Y[:, rows].detach(), expected.detach(), atol=1e-11)
    wanted = torch.autograd.grad((expected * direction).sum(), other)
    for found, right in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(found, right, atol=1e-11)


def mixture(arrays: Any, t: int, exact: list[int], clusters: Any, power: float | None, scale: Any) -> Any:
    """The row of queries t, from the keys and clusters of the oracle."""
    Q, K, V = arrays
    q = Q[:, t] * (Q.shape[-1] ** -0.5 if scale is None else scale)
    logits, values = [q @ K[0, exact].T], [V[0, exact]]
    copies = [torch.ones(len(exact))]
    for cluster in clusters:
        left = cluster.without(exact)
        if not left.w:
            continue
        w = torch.tensor(left.w, dtype=torch.float64)
        signs = torch.tensor(
            [
                1.0 if (k * K.detach()[0, j].numpy()).sum() >= 0 else -1.0
                for k, j in zip(left.k, left.places, strict=True)
            ]
        )
        z = (q @ (signs[:, None] * K[0, left.places]).T) @ w / w.sum()
        if power is None:
            z = z + w.sum().log() - (w * w.log()).sum() / w.sum()
        logits.append(z[:, None])
        values.append((w @ V[0, left.places])[None] / w.sum())
        copies.append(w.sum()[None])
    x = torch.cat(logits, 1)
    weights = torch.softmax(x, 1) if power is None else torch.cat(copies) * x.abs() ** power
    return weights @ torch.cat(values) / weights.sum(1, keepdim=True)


@needs_torch
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_differentiated_again_and_come_in_batches(causal: bool) -> None:
    n = 32 if causal else 24
    leaves = [torch.from_numpy(X).requires_grad_() for X in heads(31, n, batch=(2,))]
    options: dict[str, Any] = {"size": 5, "summaries": 4, "window": 2, "causal": causal}
    options |= {"renew_every": 3} if causal else {}
    direction = torch.from_numpy(np.random.default_rng(31).standard_normal((2, 4, n, 3)))

    @torch.enable_grad()  # type: ignore[untyped-decorator]
    def gradients(q: Any, k: Any, V: Any, again: bool = True) -> Any:
        V = V if V.requires_grad else V.requires_grad_()
        return torch.autograd.grad(attend(q, k, V, **options), (q, k, V), direction, create_graph=again)

    for one, other in zip(gradients(*leaves), gradients(*leaves, again=False), strict=True):
        np.testing.assert_allclose(one.detach(), other, atol=1e-12)
    # values have no part in the selection, and in no weight of a summary
    q, k, V = leaves
    assert_gradients(lambda V: torch.cat([x.flatten() for x in gradients(q, k, V)]), [V])
    Y = attend(*leaves, **options)
    rows = torch.stack([torch.ones_like(Y), Y.detach()])
    together = torch.autograd.grad(Y, leaves, rows, is_grads_batched=True, retain_graph=True)
    for i, row in enumerate(rows):
        for one, other in zip(together, torch.autograd.grad(Y, leaves, row, retain_graph=True), strict=True):
            np.testing.assert_allclose(one[i], other, atol=1e-12)


@needs_torch
def test_gradients_go_through_masks_and_groups() -> None:
    leaves = [torch.from_numpy(X).requires_grad_() for X in heads(27, 16, batch=(2,))]
    mask = np.random.default_rng(28).random((2, 1, 16)) > 0.3
    options = {"size": 4, "window": 1, "mask": mask, "scores": "leverage"}
    assert not attend(*leaves, **options, return_certificate=True)[1].error_bound.requires_grad
    assert_gradients(lambda *X: attend(*X, **options), leaves)


# -- edges -------------------------------------------------------------------------------------------------


@over_storages
@pytest.mark.parametrize("f", ["softmax", 2])
def test_empty_and_single_rows(f: Any, storage: str) -> None:
    Q, K, V = heads(31, 6)

    def run(*arrays: Any, **options: Any) -> Any:
        return attend(*(stored(X, storage) for X in arrays), f=f, **options)

    for options in ({"budget": 0.3}, {"size": 2, "summaries": 2}, {"size": 0}, {"epsilon": 0.1, "scores": "leverage"}):
        nothing = run(Q, K[:, :0], V[:, :0], **options)
        assert nothing.shape == (4, 6, 3)
        assert not as_float64(nothing).any()
        for causal in (False, True):
            assert run(Q[:, :0], K[:, :0], V[:, :0], causal=causal, **options).shape == (4, 0, 3)
            if "scores" not in options:
                assert run(Q[:0, None], K[:0, None], V[:0, None], causal=causal, **options).shape == (0, 1, 6, 3)
            none = run(Q, K, V, causal=causal, mask=stored(np.zeros(6, bool), storage), **options)
            assert not as_float64(none).any()
        one = run(Q[:, :1], K[:, :1], V[:, :1], causal=True, **options)
        np.testing.assert_allclose(as_float64(one), np.repeat(V[:, :1], 2, axis=0), atol=1e-12)
    nothing = [stored(X[:, :0], storage) for X in (Q, K, V)]
    Y, state, certificate = causal_pruned_attention(*nothing, 9, f=f, return_certificate=True, return_state=True)
    assert (Y.shape, certificate.error_bound.shape, state.positions) == ((4, 0, 3), (4, 0), 0)


@pytest.mark.parametrize("causal", [False, True])
def test_queries_that_are_all_alike(causal: bool) -> None:
    """Their moment about the mean is rounding alone."""
    Q, K, V = heads(32, KEYS[causal])
    Q[:] = [1e5 / 3, 7e4 / 9, 1.1, 3e6 / 7, 1e-3]
    options = {"size": 4, "summaries": 4, "scale": 1e-6} | ({"causal": True, "renew_every": CHUNK} if causal else {})
    Y, certificate = attend(Q, K, V, **options, return_certificate=True)
    expected = naive_attention.dense(Q, K, V, None, causal, 1e-6)[0]
    assert np.all(np.linalg.norm(Y - expected, axis=-1) <= certificate.error_bound + 1e-12)
    # The summaries are tangent where all queries are.
    np.testing.assert_allclose(Y, expected, atol=0.2 if causal else 1e-8)


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_not_finite_is_refused_and_not_computed_with(causal: bool) -> None:
    Q, K, V = heads(33, 30)
    for i, value in ((0, np.nan), (0, np.inf), (0, 1e200), (1, np.nan), (1, np.inf)):
        arrays = [Q.copy(), K.copy(), V]
        arrays[i][:, 3] = value
        with np.errstate(all="ignore"), pytest.raises(NonFiniteError, match="give finite"):
            attend(*arrays, size=4, summaries=3, renew_every=5 if causal else None, causal=causal)


SMALL = heads(34, 10)
NOTHING_KNOWN = "return_certificate is True and summaries is 0"


@cache  # made by the first test that needs it: every process imports this file, and would compile kernels to do so
def small_state() -> Any:
    return causal_pruned_attention(*SMALL, Selection(size=2), return_state=True)[1]


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing": ({}, ValueError, "budget=None, size=None and epsilon=None were given; expected one of the three"),
    "two": ({"budget": 5, "size": 3}, ValueError, "budget=5, size=3 and epsilon=None"),
    "budget": ({"budget": "all"}, TypeError, "budget is 'all'; expected a count, or a share"),
    "budget-share": ({"budget": 1.5}, ValueError, r"budget is 1.5; expected .* in \(0, 1\]"),
    "budget-none": ({"budget": 0}, ValueError, "budget is 0; expected at least 2 slots"),
    "budget-one": ({"budget": 1}, ValueError, r"budget is 1; .* at least 2 slots, or a share .* in \(0, 1\].* size=1"),
    "budget-one-numpy": ({"budget": np.int64(1)}, ValueError, "budget is 1; expected at least 2 slots"),
    "budget-flag": ({"budget": True}, TypeError, "budget is True; expected a count"),
    "budget-parts": (
        {"budget": 5, "window": 3},
        ValueError,
        r"budget=5 is 5 slots, and .*window=3.* take 7; expected a larger",
    ),
    "size": ({"size": -1}, ValueError, "size is -1; expected a count, or a share"),
    "size-share": ({"size": 2.0}, ValueError, r"size is 2\.0; expected a count, or a share in \(0, 1\]"),
    "size-kind": ({"size": "2"}, TypeError, "size is '2'; expected a count"),
    "epsilon": ({"epsilon": math.nan}, ValueError, "epsilon is nan; expected a finite number"),
    "summaries": ({"size": 2, "summaries": -1}, ValueError, "summaries is -1"),
    "summaries-share": ({"size": 2, "summaries": 0.5}, ValueError, "summaries is 0.5, a share .*; expected a count"),
    "window-share": ({"epsilon": 0.2, "window": 0.25}, ValueError, "window is 0.25, a share .*; expected a count"),
    "sinks-share": (
        {"budget": 8, "sinks": 1.5},
        ValueError,
        r"sinks is 1.5; .* share of the budget's slots in \[0, 1\]",
    ),
    "window": ({"size": 2, "window": True}, TypeError, "window is True; expected a count"),
    "sinks": ({"size": 2, "sinks": "2"}, TypeError, "sinks is '2'; expected a count"),
    "scores": ({"size": 2, "scores": "given"}, ValueError, "scores is 'given'; expected one of residual, expected"),
    "scores-attention": (
        {"size": 2, "scores": "attention"},
        ValueError,
        "which levattn.attention.fit_slots alone takes",
    ),
    "scores-shape": ({"size": 2, "scores": np.ones(9)}, ValueError, r"scores has shape \(9,\); expected \(..., 10\)"),
    "scores-kind": ({"size": 2, "scores": np.ones(10, int)}, TypeError, "scores has dtype int64"),
    "scores-nan": ({"size": 2, "scores": np.full(10, np.nan)}, NonFiniteError, "the scores of keys are NaN"),
    "scores-nan-function": (
        {"size": 2, "scores": lambda K, _: np.full(K.shape[:2], np.nan)},
        NonFiniteError,
        "the scores of keys are NaN: Q, K or your own scores hold NaN",
    ),
    "center": ({"size": 2, "center": True}, ValueError, "center is True and scores is 'residual'"),
    "center-kind": (
        {"size": 2, "center": "no", "scores": "leverage"},
        TypeError,
        "center is 'no'; expected True, False or None",
    ),
    "center-power": ({"size": 2, "center": True, "scores": "leverage", "f": 2}, ValueError, "center is True and f"),
    "f": ({"size": 2, "f": "exp"}, ValueError, "f is 'exp'; expected \"softmax\""),
    "f-root": ({"size": 2, "f": 0.5}, ValueError, "f is 0.5; expected .* p >= 1"),
    "renewals": ({"size": 2, "renew_every": 5}, ValueError, "renew_every is 5, and the attention is not causal"),
    "start": ({"size": 2, "start": 5}, ValueError, "start is 5, and the attention is not causal"),
    "start-negative": ({"size": 2, "start": -1, "causal": True}, ValueError, "start is -1; .* at least 0"),
    "start-kind": ({"size": 2, "start": 0.5, "causal": True}, TypeError, "start is 0.5"),
    "renewals-none": ({"size": 2, "renew_every": 0, "causal": True}, ValueError, "renew_every is 0; .* at least 1"),
    "scale": ({"size": 2, "scale": math.inf}, ValueError, "scale is inf"),
    "query-mask": ({"size": 2, "query_mask": np.ones(9, bool)}, ValueError, r"query_mask has shape \(9,\)"),
    "query-mask-kind": ({"size": 2, "query_mask": np.ones(10)}, TypeError, "query_mask has dtype float64"),
    "state-f": ({"state": small_state, "f": 2, "causal": True}, ValueError, "f is not the function of the state"),
    "certificate": ({"size": 2, "causal": True, "return_certificate": True}, ValueError, NOTHING_KNOWN),
    "certificate-threshold": ({"epsilon": 0.0, "causal": True, "return_certificate": True}, ValueError, NOTHING_KNOWN),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_named(name: str) -> None:
    options, error, message = BAD[name]
    if "state" in options:
        options = options | {"state": options["state"]()}
    with pytest.raises(error, match=message):
        attend(*SMALL, **options)


QS, KS, VS = SMALL
BAD_ARRAYS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ((QS, KS[..., :4], VS), {}, ValueError, r"K has shape \(2, 10, 4\); expected d = 5 along axis -1, as Q has"),
    ((QS, KS, VS[:, :9]), {}, ValueError, r"V has shape \(2, 9, 3\); expected n = 10"),
    ((QS, KS[[0, 1, 1]], VS[[0, 1, 1]]), {}, ValueError, "Q has 4 heads and K has 3; expected a multiple"),
    ((QS[:0], KS, VS), {}, ValueError, r"Q, K, V have \[0, 2, 2\] heads; expected at least one"),
    ((QS[:, :5], KS, VS), {"causal": True}, ValueError, "Q has 5 rows and K has 10; expected as many"),
    ((QS[:, :5], KS, VS), {"window": 2}, ValueError, "window is 2, but there are not as many queries as keys"),
    ((np.ones((4, 10, 5), int), KS, VS), {}, TypeError, "Q has dtype int64"),
    ((QS, None, VS), {}, TypeError, "K is of type NoneType"),
]


@pytest.mark.parametrize(("arrays", "options", "error", "message"), BAD_ARRAYS)
def test_bad_arrays_are_named(arrays: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attend(*arrays, size=2, **options)


def test_states_of_other_arrays_are_named() -> None:
    Q, K, V = SMALL
    for arrays in ((Q[..., :4], K[..., :4], V), (Q, K, V[..., :2]), [X.astype(np.float32) for X in SMALL]):
        with pytest.raises(ValueError, match="state holds float64 of numpy with d = 5 and D = 3, and K and V are"):
            causal_pruned_attention(*arrays, small_state(), return_state=True)
    with pytest.raises(ValueError, match=r"state has batch \(2,\); expected \(1,\)"):
        causal_pruned_attention(Q, K[:1], V[:1], small_state(), return_state=True)
    with pytest.raises(ValueError, match=NOTHING_KNOWN):  # keys dropped before
        causal_pruned_attention(*(X[:, :1] for X in SMALL), small_state(), return_certificate=True, return_state=True)
    own = causal_pruned_attention(*SMALL, Selection(size=2, scores=np.ones(10)), return_state=True)[1]
    with pytest.raises(ValueError, match=r"selection is the state .* give state.with_scores\(scores\)"):
        causal_pruned_attention(*SMALL, own, return_state=True)
    with pytest.raises(ValueError, match="scores were given, and the state selects by 'residual'; expected none"):
        small_state().with_scores(np.ones(10))


def test_causal_bounds_hold_for_values_that_grow() -> None:
    Q, K, V = heads(36, 200, 8, 8)
    V *= np.where(np.arange(200) < 128, 1e-3, 1.0)[:, None]
    V[:, 128:] += 100
    options = {"size": 8, "summaries": 4, "causal": True, "renew_every": 32}
    Y, certificate = attend(Q, K, V, return_certificate=True, **options)
    off = np.linalg.norm(Y - naive_attention.dense(Q, K, V, causal=True)[0], axis=-1)
    assert (off <= certificate.error_bound + 1e-9).all()


@pytest.mark.parametrize("budget", [0.5, 20, 60])
def test_a_budget_is_of_the_keys_that_are_there(budget: float) -> None:
    arrays = heads(37, 100)
    found = pruned_attention(*arrays, budget, mask=np.arange(100) < 50)
    alone = pruned_attention(*(X[:, :50] for X in arrays), budget)
    np.testing.assert_allclose(found[:, :50], alone, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_thresholds_hold_ties_within_rounding(causal: bool) -> None:
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))[0]
    K = np.tile(np.eye(4), (20, 1)) @ rotation  # each direction twenty times: scores of 1/20 to rounding
    options = {"epsilon": 0.05, "scores": "leverage", "center": False}
    if causal:
        _, state = walk(K, K, K, renew_every=80, **options)
        assert state.parts[0].kept_places.shape[1] == 80
    else:
        _, certificate = attend(K, K, K, return_certificate=True, **options)
        np.testing.assert_array_equal(certificate.kept, levattn.universal_set(K, 0.05).mask)
