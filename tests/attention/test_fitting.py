"""Fitted slots: their definition, the conditions of both least squares, the ball of every query, and the edges."""

from __future__ import annotations

import math
from typing import Any

import array_api_strict
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies
from levattn import definitions
from levattn.attention import FittedSlots, Selection, fit_slots
from levattn.exceptions import NonFiniteError
from libraries import HAS_TORCH, needs_torch, over_storages, stored
from strategies import Float, as_float64

if HAS_TORCH:
    import torch

LOW, HIGH = math.exp(-3), math.exp(3)


def heads(
    seed: int, m: int = 40, n: int = 30, d: int = 5, D: int = 3, *, H: int = 4, G: int = 2, batch: Any = ()
) -> tuple[Float, Float, Float]:
    rng = np.random.default_rng(seed)
    shapes = (*batch, H, m, d), (*batch, G, n, d), (*batch, G, n, D)
    Q, K, V = (rng.standard_normal(shape) for shape in shapes)
    return 2 * Q + rng.standard_normal(d), K + rng.standard_normal(d), V + 3


def softmax(Z: Float) -> Float:
    E = np.exp(Z - Z.max(axis=-1, keepdims=True))
    return E / E.sum(axis=-1, keepdims=True)


def of(slots: FittedSlots, index: Any) -> FittedSlots:
    """The slots of some heads; None adds an axis of heads."""
    return FittedSlots(**{name: value if name == "scale" else value[index] for name, value in vars(slots).items()})


def distances(slots: FittedSlots, V: Float, mask: Any = None) -> tuple[Float, Float]:
    """The distances (G, s) of the slots' values from the middles of the values V, and the radii (G, 1)."""
    found, radii = [], []
    for g, values in enumerate(V):
        there = values if mask is None else values[mask[g]]
        middle = there.min(axis=0) / 2 + there.max(axis=0) / 2
        radii.append(np.linalg.norm(there - middle, axis=1).max())
        apart = np.linalg.norm(as_float64(slots.values)[g] - middle, axis=1)
        found.append(np.where(slots.indices[g] >= 0, apart, 0))
    return np.array(found), np.array(radii)[:, None]


# -- the definition ----------------------------------------------------------------------------

FORMS: dict[str, dict[str, int]] = {
    "selected": {"size": 7},
    "all kinds": {"size": 4, "sinks": 2, "window": 3},
    "one": {"size": 1},
    "no choice": {"size": 0, "sinks": 1, "window": 5},
    "more than queries": {"size": 25, "sinks": 1},
    "all but one": {"size": 29},
}


@over_storages
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_definition(form: str, weighted: bool, storage: str) -> None:
    Q, K, V = heads(0, m=20 if form == "more than queries" else 40)
    w = np.random.default_rng(1).random(Q.shape[:2]) ** 2 if weighted else np.ones(Q.shape[:2])
    given = [stored(X, storage) for X in (Q, K, V)]
    weights = stored(w, storage) if weighted else None
    scale = 0.7
    slots = fit_slots(*given, Selection(**FORMS[form]), weights=weights, unseen=given[0][:, :3, :], scale=scale)
    assert type(slots.values) is type(slots.log_weights) is type(given[2])
    new = 3 * np.random.default_rng(2).standard_normal((4, 9, 5))
    Y = as_float64(slots.attend(stored(new, storage)))
    room = 1e-9 if storage != "jax" else 1e-4
    form_of = {"sinks": 0, "window": 0} | FORMS[form]
    for g in range(2):
        q, both = Q[2 * g : 2 * g + 2].reshape(-1, 5), slice(2 * g, 2 * g + 2)
        factor = scale * math.sqrt(5)
        places, log_weights, C = definitions.fit_slots(factor * q, K[g], V[g], **form_of, weights=w[both].ravel())
        assert slots.indices[g].tolist() == places.tolist()
        np.testing.assert_allclose(as_float64(slots.keys)[g], K[g][places], atol=room)
        np.testing.assert_allclose(as_float64(slots.log_weights)[g], log_weights, atol=max(room, 1e-9))
        np.testing.assert_allclose(as_float64(slots.values)[g], C, atol=room)
        np.testing.assert_allclose(Y[both], softmax(scale * new[both] @ K[g][places].T + log_weights) @ C, atol=room)
        at_bound = np.abs(log_weights) > 3 - 1e-12
        assert slots.bounded[g] == at_bound.sum()


def test_residuals_are_of_the_unseen_queries() -> None:
    Q, K, V = heads(3)
    w = np.random.default_rng(4).random((4, 40))
    every_eighth = np.arange(40) % 8 == 7
    slots = fit_slots(Q, K, V, Selection(size=6), weights=w)
    same = fit_slots(Q[:, ~every_eighth], K, V, Selection(size=6), weights=w[:, ~every_eighth], unseen=Q)
    np.testing.assert_allclose(slots.values, same.values, atol=1e-12)
    np.testing.assert_allclose(slots.log_weights, same.log_weights, atol=1e-12)
    for found, out, weights in ((slots, Q[:, every_eighth], w[:, every_eighth]), (same, Q, np.ones((4, 40)))):
        for g in range(2):
            q, u = out[2 * g : 2 * g + 2].reshape(-1, 5), weights[2 * g : 2 * g + 2].ravel()
            P = softmax(q @ K[g].T / math.sqrt(5))
            y = P @ V[g]
            off = P[:, found.indices[g]] @ np.exp(found.log_weights[g]) - 1
            logits = q @ found.keys[g].T / math.sqrt(5) + found.log_weights[g]
            apart = np.linalg.norm(softmax(logits) @ found.values[g] - y, axis=1) ** 2
            assert found.mass_residual[g] == pytest.approx(math.sqrt((u * off**2).sum() / u.sum()), rel=1e-9)
            relative = math.sqrt((u * apart).sum() / (u * np.linalg.norm(y, axis=1) ** 2).sum())
            assert found.output_residual[g] == pytest.approx(relative, rel=1e-9)


@pytest.mark.parametrize(("m", "unseen"), [(2, [1]), (7, [6]), (8, [7]), (17, [7, 15])])
def test_few_rows_have_an_unseen_one(m: int, unseen: list[int]) -> None:
    Q, K, V = heads(5, m=m)
    slots = fit_slots(Q, K, V, Selection(size=6))
    fitted = np.delete(Q, unseen, axis=1)
    same = fit_slots(fitted, K, V, Selection(size=6), unseen=Q[:, unseen])
    for name in ("values", "log_weights", "mass_residual", "output_residual"):
        np.testing.assert_allclose(getattr(slots, name), getattr(same, name), rtol=1e-9, atol=1e-12)


# -- keys and values that will be rounded ----------------------------------------------------------


def rounded_to(step: float) -> Any:
    """Functions that round keys and values to multiples."""

    def nearest(rows: Float) -> Float:
        return np.round(rows / step) * step

    return nearest, nearest


def test_weights_and_values_are_fitted_to_the_keys_as_they_are_held() -> None:
    Q, K, V = heads(11, n=60)
    coarse = rounded_to(0.25)
    exact = fit_slots(Q, K, V, Selection(size=6), unseen=Q)
    slots = fit_slots(Q, K, V, Selection(size=6), unseen=Q, rounded=coarse)
    assert slots.indices.tolist() == exact.indices.tolist()
    for g in range(2):
        q, at = Q[2 * g : 2 * g + 2].reshape(-1, 5) / math.sqrt(5), slots.indices[g]
        assert np.array_equal(slots.keys[g], K[g, at])
        c, z = coarse[0](K[g, at]), q @ K[g].T
        sums = np.log(np.exp(z).sum(axis=1))[:, None]
        F = np.minimum(np.exp(q @ c.T - sums), 1)
        y = softmax(z) @ V[g]
        B, mu = np.exp(slots.log_weights[g]), 1e-2 * np.mean((F**2).sum(axis=0))
        slope = F.T @ (F @ B - 1) + mu * (B - 1)  # of half the objective, zero but at a bound
        assert np.all((np.abs(slope) < 1e-9) | ((B < LOW + 1e-9) & (slope > 0)) | ((B > HIGH - 1e-9) & (slope < 0)))
        X = softmax(q @ c.T + slots.log_weights[g])
        ridge = 3e-3 * np.mean((X**2).sum(axis=0)) * np.eye(6)
        C = V[g, at] + np.linalg.solve(X.T @ X + ridge, X.T @ (y - X @ V[g, at]))
        assert slots.clipped[g] == 0
        np.testing.assert_allclose(slots.values[g], C, atol=1e-9)
        apart = X @ coarse[1](slots.values[g]) - y
        relative = np.linalg.norm(apart) / np.linalg.norm(y)
        assert slots.output_residual[g] == pytest.approx(relative, rel=1e-9)
        assert relative > exact.output_residual[g]


@over_storages
def test_rounding_to_nothing_changes_nothing_and_sees_arrays_of_the_caller(storage: str) -> None:
    given = [stored(X, storage) for X in heads(12)]
    kinds = set()

    def same(rows: Any) -> Any:
        kinds.add(type(rows))
        return rows

    plain, held = (fit_slots(*given, Selection(size=6), rounded=pair) for pair in (None, (same, same)))
    assert kinds == {np.ndarray if storage == "jax" else type(given[0])}  # JAX computes by NumPy
    for name in ("keys", "values", "log_weights"):
        assert np.array_equal(as_float64(getattr(plain, name)), as_float64(getattr(held, name)))
    np.testing.assert_allclose(held.output_residual, plain.output_residual, rtol=1e-4)


@pytest.mark.parametrize("rounded", [np.round, (np.round,), (np.round, 3), [np.round, np.round], "int8"])
def test_rounding_needs_two_functions(rounded: Any) -> None:
    with pytest.raises(TypeError, match=r"rounded is .*; expected two functions, of keys and of values, or None"):
        fit_slots(*heads(13), 0.2, rounded=rounded)


@pytest.mark.parametrize("place", [0, 1])
def test_rounding_to_numbers_that_are_not_finite_is_refused(place: int) -> None:
    pair = [np.round, np.round]
    pair[place] = lambda rows: rows * np.inf
    with pytest.raises(NonFiniteError, match="rounded returned NaN or infinity"):
        fit_slots(*heads(13), Selection(size=6), rounded=tuple(pair))


def test_rounding_in_place_changes_no_result() -> None:
    plain = fit_slots(*heads(13), Selection(size=6), rounded=(np.round, np.round))
    same = fit_slots(*heads(13), Selection(size=6), rounded=(lambda rows: np.round(rows, out=rows),) * 2)
    for name in ("keys", "values", "log_weights", "output_residual"):
        assert np.array_equal(getattr(plain, name), getattr(same, name))


@needs_torch
def test_rounding_may_return_other_dtypes_of_torch() -> None:
    Q, K, V = (torch.from_numpy(X) for X in heads(13))
    found = [
        fit_slots(Q, K, V, Selection(size=6), rounded=(lambda rows, kind=kind: rows.to(kind),) * 2)
        for kind in (torch.bfloat16, torch.float16, torch.float64)
    ]
    assert all(slots.values.dtype == torch.float64 for slots in found)
    assert float(found[0].output_residual[0]) != float(found[2].output_residual[0])


def test_rounding_keeps_shapes() -> None:
    with pytest.raises(ValueError, match=r"rounded returned ndarray \(2, 6, 4\) for ndarray \(2, 6, 5\)"):
        fit_slots(*heads(13), Selection(size=6), rounded=(lambda rows: rows[..., 1:], np.round))


# -- least squares -------------------------------------------------------------------------------


@st.composite
def hostile(draw: st.DrawFn) -> tuple[Float, Float, Float, Float, Any]:
    """Repeated, graded, huge, rank-deficient, absent: one head of queries with weights, and keys with a mask."""
    rng = np.random.default_rng(draw(strategies.seeds()))
    m, n, d = draw(st.integers(0, 20)), draw(st.integers(1, 24)), draw(st.sampled_from([1, 2, 5]))
    Q, K, V = (rng.standard_normal((k, c)) for k, c in ((m, d), (n, d), (n, 3)))
    for X in (Q, K, V):
        X *= draw(st.sampled_from([1e-30, 1e-3, 1.0, 1.0, 1.0, 5.0, 100.0]))
    if draw(st.booleans()):
        K = K[rng.integers(0, n, n)]
    if m and draw(st.booleans()):
        Q = Q[rng.integers(0, 1 + m // 4, m)]
    if draw(st.booleans()):
        K *= 10.0 ** rng.uniform(-6, 1, (n, 1))
    if draw(st.booleans()):
        V *= 10.0 ** rng.uniform(-6, 1, (n, 1))
    V += draw(st.sampled_from([0.0, 0.0, 1e4]))
    w = rng.random(m) ** draw(st.sampled_from([0, 1, 20, 300]))
    if draw(st.booleans()):
        w[rng.random(m) < 0.6] = 0
    mask = draw(st.sampled_from([None, 0.2, 0.7]))
    return Q, K, V, w, None if mask is None else rng.random(n) < mask


@strategies.examples(80)
@given(
    case=hostile(),
    size=st.integers(1, 12),
    sinks=st.integers(0, 2),
    window=st.integers(0, 2),
    scores=st.sampled_from([None, None, "attention", "residual", "expected", "leverage"]),
)
@pytest.mark.filterwarnings("ignore::levattn.RankWarning")
def test_conditions_hold_for_hostile_heads(case: Any, size: int, sinks: int, window: int, scores: Any) -> None:
    Q, K, V, w, mask = case
    selection = Selection(size=size, sinks=sinks, window=window, scores=scores)
    slots = fit_slots(Q, K, V, selection, weights=w, unseen=Q, mask=mask)
    there = slice(None) if mask is None else mask
    keys, values, places = K[there], V[there], slots.indices
    assert places.shape == (min(size + sinks + window, len(keys)),)
    assert np.all(np.diff(places) > 0)
    assert mask is None or mask[places].all()
    np.testing.assert_array_equal(slots.keys, K[places])
    B, logits = np.exp(slots.log_weights), Q @ keys.T / math.sqrt(K.shape[1])
    assert np.all(np.abs(slots.log_weights) <= 3)
    assert np.isfinite(slots.values).all()
    if not len(places):
        return
    apart, radius = distances(of(slots, None), values[None])
    assert np.all(apart <= radius * (1 + 1e-11) + 4e-16 * np.abs(values).max())
    if not (w > 0).any() or len(places) == len(keys):
        np.testing.assert_array_equal(slots.log_weights, 0)
        np.testing.assert_array_equal(slots.values, V[places])
        return
    if np.abs(logits).max() > 1e3:  # here the judge has lost the digits
        return
    w = w / w.max()
    rank = np.searchsorted(np.arange(len(K))[there], places)
    F = np.sqrt(w)[:, None] * softmax(logits)[:, rank]
    ridge = 1e-2 * (F**2).sum() / len(places)
    if ridge < 1e-200:
        return
    H, g = F.T @ F + ridge * np.eye(len(places)), F.T @ np.sqrt(w) + ridge
    gradient, noise = H @ B - g, 1e-9 * (np.abs(H) @ B + g)
    low, high = slots.log_weights < -3 + 1e-12, slots.log_weights > 3 - 1e-12
    assert np.all((np.abs(gradient) <= noise) | (low & (gradient > 0)) | (high & (gradient < 0)))
    assert slots.bounded == np.count_nonzero(low | high)

    def objective(x: Float) -> float:
        return float(((F @ x - np.sqrt(w)) ** 2).sum() + ridge * ((x - 1) ** 2).sum())

    assert objective(B) <= objective(np.ones_like(B)) * (1 + 1e-9) + 1e-24 * w.sum()
    X = np.sqrt(w)[:, None] * softmax(logits[:, rank] + slots.log_weights)
    A, old = X.T @ X, V[places]
    target = X.T @ (np.sqrt(w)[:, None] * (softmax(logits) @ values) - X @ old)
    C = old + np.linalg.solve(A + 3e-3 * np.trace(A) / len(A) * np.eye(len(A)), target)
    middle = values.min(axis=0) / 2 + values.max(axis=0) / 2
    far = np.linalg.norm(C - middle, axis=1) > radius[0] * (1 - 1e-9)
    if not far.any():
        np.testing.assert_allclose(slots.values, C, rtol=0, atol=1e-9 * np.abs(values).max())
        assert slots.clipped == 0


@pytest.mark.parametrize(("seed", "head", "s"), [(27, 496, 6), (47, 864, 6), (1184, 415, 6)])
def test_weights_of_equal_keys_are_at_the_minimum(seed: int, head: int, s: int) -> None:
    """Slots of equal keys come near a bound together, and rounding alone parts them."""
    rng = np.random.default_rng(seed)
    m, same = int(rng.integers(2, 5)), int(rng.integers(4, 8))
    Q, K = rng.standard_normal((1000, m, 2)), 3 * rng.standard_normal((1000, same, 2))
    K = np.concatenate([K[:, rng.integers(0, same // 2, same)], rng.standard_normal((1000, 1, 2))], axis=1)
    Q, K = Q[head], K[head]
    slots = fit_slots(Q, K, np.ones((s + 1, 1)), Selection(size=0, sinks=s), unseen=Q)
    F, B = softmax(Q @ K.T / math.sqrt(2))[:, :s], np.exp(slots.log_weights)
    ridge = 1e-2 * (F**2).sum() / s
    H, g = F.T @ F + ridge * np.eye(s), F.sum(axis=0) + ridge
    gradient, noise = H @ B - g, 1e-10 * (H @ B + g)
    assert np.all((np.abs(gradient) <= noise) | ((slots.log_weights == -3) & (gradient > 0)))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("far", [10.0, 100.0, 1000.0, 1e6])
def test_slots_on_which_nothing_falls_have_the_largest_weights(far: float, dtype: str) -> None:
    """Their shares are far below the least number, and their sum, even times e³, is far below 1."""
    Q = np.ones((20, 1), dtype)
    K = np.concatenate([-np.ones((4, 1)), np.zeros((2, 1)), np.ones((9, 1))]).astype(dtype)
    V = np.random.default_rng(0).standard_normal((15, 3)).astype(dtype)
    slots = fit_slots(Q, K, V, Selection(size=0, sinks=6), scale=far)
    assert slots.indices.tolist() == [*range(6)]
    np.testing.assert_allclose(slots.log_weights[4:], 3, rtol=1e-6)
    assert slots.bounded == np.count_nonzero(slots.log_weights > 2.999)
    assert slots.mass_residual == pytest.approx(1, rel=1e-2)
    assert np.isfinite(slots.values).all()
    y = softmax(far * K[:, 0].astype(np.float64)) @ V
    off = np.linalg.norm(slots.attend(Q)[0] - y) / np.linalg.norm(y)
    assert slots.output_residual == pytest.approx(off, rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_values_outside_of_the_ball_are_drawn_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    K, Q = rng.standard_normal((40, 3)), rng.standard_normal((60, 3))
    V = np.sign(K @ rng.standard_normal((3, 2)))  # all values are on the sphere
    slots = fit_slots(Q, K, V, Selection(size=6), unseen=Q)
    _, _, C = definitions.fit_slots(Q, K, V, 6, 0, 0, np.ones(60))
    np.testing.assert_allclose(slots.values, C, atol=1e-9)
    apart, radius = distances(of(slots, None), V[None])
    assert slots.clipped == np.count_nonzero(apart > radius * (1 - 1e-9))
    assert slots.clipped > 0


# -- the ball --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("seed", range(6))
def test_every_query_stays_in_the_ball(seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    Q, K, V = (X.astype(dtype) for X in heads(seed, m=12, n=60))
    V = V**3 + (100 if seed % 2 else 0)
    slots = fit_slots(Q, K, V, Selection(size=9))
    apart, radius = distances(slots, V.astype(np.float64))
    unit = np.finfo(dtype).eps * np.abs(V).max()
    assert np.all(apart <= radius * (1 + 1e-11) + 4 * unit)
    directions = [
        rng.standard_normal((4, 30, 5)),
        np.repeat(slots.keys - slots.keys.mean(axis=1, keepdims=True), 2, 0),
    ]
    for g in range(2):  # toward the differences of slots, where single slots are alone
        _, _, vt = np.linalg.svd(slots.keys[g] - slots.keys[g].mean(axis=0))
        directions.append(np.repeat(vt[None], 4, axis=0))
    for size in (0.0, 1.0, 30.0, 1e4, 1e12):
        for toward in directions:
            for sign in (1, -1):
                Y = slots.attend((sign * size * toward).astype(dtype)).astype(np.float64)
                for g in range(2):
                    values = V[g].astype(np.float64)
                    middle = (values.min(axis=0) + values.max(axis=0)) / 2
                    off = np.linalg.norm(Y[2 * g : 2 * g + 2] - middle, axis=-1)
                    assert np.all(off <= radius[g] * (1 + 1e-11) + 40 * unit)


# -- invariances -----------------------------------------------------------------------------------


def agree(one: FittedSlots, other: FittedSlots, room: float = 1e-12) -> None:
    for name in ("keys", "values", "log_weights", "mass_residual", "output_residual"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=room, atol=room, err_msg=name)
    for name in ("indices", "bounded", "clipped"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def test_batch_mates_and_the_order_of_heads_do_not_matter() -> None:
    Q, K, V = heads(7, batch=(3,))
    w = np.random.default_rng(8).random((3, 4, 40))
    slots = fit_slots(Q, K, V, 12, weights=w)
    assert slots.values.shape == (3, 2, 12, 3)
    for i in range(3):
        agree(of(slots, i), fit_slots(Q[i], K[i], V[i], 12, weights=w[i]))
        for g in range(2):
            both = slice(2 * g, 2 * g + 2)
            agree(of(slots, (i, slice(g, g + 1))), fit_slots(Q[i, both], K[i, g], V[i, g], 12, weights=w[i, both]))
    turned = [X[::-1, ::-1] for X in (Q, K, V, w)]
    agree(of(slots, (slice(None, None, -1), slice(None, None, -1))), fit_slots(*turned[:3], 12, weights=turned[3]))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_layouts_change_no_bit(dtype: str) -> None:
    arrays = [X.astype(dtype) for X in heads(30)]
    slots = fit_slots(*arrays, 9)
    for layout in strategies.LAYOUTS.values():
        found = fit_slots(*map(layout, arrays), 9)
        for name in ("keys", "values", "log_weights", "indices", "mass_residual", "output_residual"):
            np.testing.assert_array_equal(getattr(found, name), getattr(slots, name), err_msg=name)


def test_leading_axes_broadcast() -> None:
    Q, K, V = heads(31, batch=(3,))
    w, mask = np.random.default_rng(32).random((4, 40)), np.random.default_rng(33).random((3, 1, 30)) < 0.7
    slots = fit_slots(Q, K[0], V[:1], Selection(size=6), weights=w, mask=mask)
    assert slots.values.shape == (3, 2, 6, 3)
    for i in range(3):
        alone = fit_slots(Q[i], K[0], V[0], Selection(size=6), weights=w, mask=mask[i])
        agree(of(slots, i), alone)
    same = fit_slots(Q[0], K[0], V[0], 9, weights=np.repeat(w[:2], 2, axis=0), unseen=Q[0, :1])
    agree(same, fit_slots(Q[0], K[0], V[0], 9, weights=w[:2], unseen=np.repeat(Q[0, :1], 4, axis=0)))
    one_head = fit_slots(Q[0], K[0, 0], V[0, 0], 9)  # one head of keys for all heads of queries
    assert one_head.values.shape == (1, 9, 3)
    assert one_head.attend(Q[0]).shape == (4, 40, 3)


@pytest.mark.parametrize("factor", [1e-200, 0.3, 7.0, 1e200])
def test_a_factor_of_the_weights_does_not_matter(factor: float) -> None:
    Q, K, V = heads(9)
    w = np.random.default_rng(10).random((4, 40)) + 0.1
    agree(fit_slots(Q, K, V, 9, weights=w), fit_slots(Q, K, V, 9, weights=factor * w), 1e-9)


def test_weights_are_copies_of_rows() -> None:
    Q, K, V = heads(11)
    w = np.random.default_rng(12).integers(0, 4, 40)
    copies = np.repeat(np.arange(40), w)
    given = Selection(9, scores="leverage")  # by the largest attention, a row counts once
    one = fit_slots(Q, K, V, given, weights=w.astype(float), unseen=Q)
    agree(one, fit_slots(Q[:, copies], K, V, given, unseen=Q), 1e-9)
    one = fit_slots(Q, K, V, 9, weights=w.astype(float), unseen=Q)
    dropped = np.where(w[None, :, None] > 0, Q, 1e3)  # rows without weight do not count
    agree(one, fit_slots(dropped, K, V, 9, weights=w.astype(float), unseen=Q), 1e-9)


def test_an_offset_of_keys_or_values_changes_nothing_else() -> None:
    Q, K, V = heads(13)
    one = fit_slots(Q, K, V, 9)
    moved = fit_slots(Q, K + 5, V - 1e6, 9)
    np.testing.assert_array_equal(moved.indices, one.indices)
    np.testing.assert_allclose(moved.log_weights, one.log_weights, atol=1e-9)
    np.testing.assert_allclose(moved.values + 1e6, one.values, atol=1e-8)


def test_the_first_of_equal_keys_are_slots() -> None:
    Q, K, V = heads(14, n=12)
    K, V = (np.concatenate([X, X, X], axis=1) for X in (K, V))
    for dtype in (np.float64, np.float32):
        slots = fit_slots(*(X.astype(dtype) for X in (Q, K, V)), Selection(size=5))
        chosen = np.sort(slots.indices % 12, axis=1)
        assert np.all(slots.indices == np.sort(slots.indices, axis=1))
        for g in range(2):
            for key in np.unique(chosen[g]):
                copies = slots.indices[g][slots.indices[g] % 12 == key]
                assert copies.tolist() == [key, key + 12, key + 24][: len(copies)]
    slots = fit_slots(0 * Q, K, V, Selection(size=5, sinks=1))
    assert slots.indices.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    np.testing.assert_allclose(np.exp(slots.log_weights), 6, rtol=1e-2)  # 36 equal keys


# -- precision, libraries and devices ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "repeated", "graded", "sharp", "few queries", "equal queries", "offset"])
def test_single_precision_follows_double(kind: str) -> None:
    for seed in range(8):
        Q, K, V = heads(seed, m=60, n=100, d=8)
        rng = np.random.default_rng(seed)
        if kind == "repeated":
            K = K[:, rng.integers(0, 100, 100)]
        elif kind == "graded":
            K *= 10.0 ** rng.uniform(-4, 0.5, (2, 100, 1))
        elif kind == "sharp":
            Q *= 3
        elif kind == "few queries":
            Q = Q[:, rng.integers(0, 2, 60)]
        elif kind == "equal queries":
            Q = 0 * Q
        elif kind == "offset":
            V += 100
        single = [X.astype(np.float32) for X in (Q, K, V)]
        one, two = (fit_slots(*arrays, 25) for arrays in (single, [X.astype(np.float64) for X in single]))
        assert one.values.dtype == one.log_weights.dtype == np.float32
        np.testing.assert_array_equal(one.indices, two.indices)
        for q in (single[0], 3 * rng.standard_normal((4, 30, 8)).astype(np.float32)):
            Y = two.attend(q.astype(np.float64))
            assert np.linalg.norm(one.attend(q) - Y, axis=-1).max() <= 1e-4 * np.linalg.norm(Y, axis=-1).max()


@pytest.mark.parametrize("storage", ["float16", pytest.param("torch-bfloat16", marks=needs_torch)])
def test_halves_are_computed_in_single_precision(storage: str) -> None:
    Q, K, V = (strategies.STORAGE[storage](X) for X in heads(15))
    slots = fit_slots(Q, K, V, 9)
    assert slots.keys.dtype == K.dtype
    assert slots.values.dtype == V.dtype
    assert as_float64(slots.log_weights).dtype == np.float64
    assert "32" in str(slots.log_weights.dtype)
    single = fit_slots(*(as_float64(X).astype(np.float32) for X in (Q, K, V)), 9)
    np.testing.assert_array_equal(as_float64(slots.log_weights), single.log_weights)
    rounded = as_float64(strategies.STORAGE[storage](single.values.astype(np.float64)))
    np.testing.assert_array_equal(as_float64(slots.values), rounded)
    assert slots.attend(Q).dtype == V.dtype


@needs_torch
def test_gradients_reach_queries_of_slots_and_not_the_fit() -> None:
    Q, K, V = (torch.from_numpy(X).requires_grad_() for X in heads(17))
    slots = fit_slots(Q, K, V, 9, weights=torch.ones(4, 40))
    assert not any(X.requires_grad for X in (slots.keys, slots.values, slots.log_weights))
    np.testing.assert_allclose(slots.values.numpy(), fit_slots(*heads(17), 9).values, atol=1e-10)
    q = Q[:, :2].detach().requires_grad_()
    assert torch.autograd.gradcheck(slots.attend, (q,))
    with pytest.raises(NotImplementedError, match="expected a call without it"):
        torch.vmap(lambda q: fit_slots(q, K[0], V[0], 9).values)(Q[:2])
    with pytest.raises(NotImplementedError, match=r"attend was called under torch\.func\.vmap"):
        torch.vmap(slots.attend)(Q[None])
    with torch.autocast("cpu"):
        np.testing.assert_allclose(fit_slots(Q, K, V, 9).values.numpy(), slots.values.numpy(), atol=1e-10)
        single = fit_slots(Q.float(), K.float(), V.float(), 9)
        inside = single.attend(Q.float())
    np.testing.assert_array_equal(inside.detach(), single.attend(Q.float()).detach())


# -- masks and edges -----------------------------------------------------------------------------------


def test_masked_keys_are_as_if_they_were_not_there() -> None:
    Q, K, V = heads(18, batch=(2,))
    mask = np.random.default_rng(19).random((2, 2, 30)) < 0.6
    mask[0, 1], mask[1, 0] = np.arange(30) == 4, False
    dirty = [np.where(mask[..., None], X, np.nan) for X in (K, V)]
    slots = fit_slots(Q, *dirty, Selection(size=5, sinks=1, window=2), mask=mask)
    assert slots.values.shape == (2, 2, 8, 3)
    for i in range(2):
        for g in range(2):
            found, there = of(slots, (i, g)), np.flatnonzero(mask[i, g])
            s, both = min(8, len(there)), slice(2 * g, 2 * g + 2)
            assert found.indices[s:].tolist() == [-1] * (8 - s)
            assert np.all(found.log_weights[s:] == -np.inf)
            assert not found.keys[s:].any()
            assert not found.values[s:].any()
            if not s:
                assert math.isnan(found.mass_residual)
                continue
            alone = fit_slots(Q[i, both], K[i, g, there], V[i, g, there], Selection(size=5, sinks=1, window=2))
            np.testing.assert_array_equal(found.indices[:s], there[alone.indices[0]])
            np.testing.assert_allclose(found.values[:s], alone.values[0], atol=1e-12)
            np.testing.assert_allclose(found.log_weights[:s], alone.log_weights[0], atol=1e-12)
            np.testing.assert_allclose(found.output_residual, alone.output_residual[0], rtol=1e-9, atol=1e-15)
            np.testing.assert_allclose(slots.attend(Q)[i, both], alone.attend(Q[i, both]), atol=1e-12)
    assert not slots.attend(Q)[1, :2].any()


def test_a_share_is_of_the_keys_that_are_there() -> None:
    Q, K, V = heads(20)
    slots = fit_slots(Q, K, V, Selection(0.5, sinks=1, window=0), mask=np.arange(30) < [[30], [12]])
    assert (slots.indices >= 0).sum(axis=1).tolist() == [15, 6]


@pytest.mark.parametrize("selection", [30, 99, 1.0, Selection(size=40), Selection(size=20, sinks=5, window=5)])
def test_slots_for_all_keys_are_the_keys(selection: Any) -> None:
    Q, K, V = heads(21)
    slots = fit_slots(Q, K, V, selection)
    np.testing.assert_array_equal(slots.indices, [range(30)] * 2)
    np.testing.assert_array_equal(slots.keys, K)
    np.testing.assert_array_equal(slots.values, V)
    np.testing.assert_array_equal(slots.log_weights, 0)
    assert np.all(slots.mass_residual < 1e-12)
    assert np.all(slots.output_residual < 1e-12)


@pytest.mark.parametrize("nothing", ["no queries", "no weight"])
def test_without_anything_to_fit_to_keys_are_as_they_were(nothing: str) -> None:
    Q, K, V = heads(22)
    Q, weights = (Q[:, :0], None) if nothing == "no queries" else (Q, np.zeros((4, 40)))
    for selection in (Selection(size=4), Selection(size=2, sinks=1, window=3), Selection(size=3, scores="residual")):
        slots = fit_slots(Q, K, V, selection, weights=weights)
        np.testing.assert_array_equal(slots.log_weights, 0)
        np.testing.assert_array_equal(slots.values, np.take_along_axis(V, slots.indices[..., None], axis=1))
        assert np.isnan(slots.mass_residual).all()
        assert np.isnan(slots.output_residual).all()
    assert slots.attend(Q).shape == (*Q.shape[:2], 3)


@pytest.mark.parametrize("batch", [(), (0,), (2,)])
@pytest.mark.parametrize("selection", [0.5, Selection(size=4), Selection(size=0.5)])
def test_no_keys_and_no_items(selection: Any, batch: Any) -> None:
    Q, K, V = heads(23, n=0, batch=batch)
    slots = fit_slots(Q, K, V, selection)
    assert slots.values.shape == (*batch, 2, 0, 3)
    assert slots.indices.shape == (*batch, 2, 0)
    assert slots.attend(Q).shape == (*Q.shape[:-1], 3)
    assert not slots.attend(Q).any()
    assert fit_slots(*heads(23, batch=(*batch, 0)), 4).values.shape == (*batch, 0, 2, 4, 3)


def test_one_head_needs_no_axis() -> None:
    Q, K, V = (X[0] for X in heads(24))
    agree(fit_slots(Q, K, V, 9), of(fit_slots(Q[None], K[None], V[None], 9), 0), 1e-14)
    assert fit_slots(Q, K, V, 9).attend(Q).shape == (40, 3)


# -- choices -----------------------------------------------------------------------------------------


def test_budgets_are_split() -> None:
    Q, K, V = heads(25, n=100)
    for selection, sinks, window in (
        (Selection(20), 1, 4),
        (Selection(0.2), 1, 4),
        (Selection(20, sinks=0), 0, 5),
        (Selection(20, window=0.5), 1, 9),
        (Selection(20, window=18), 1, 18),
        (Selection(3), 1, 0),
        (Selection(20, summaries=0, sinks=2), 2, 4),
    ):
        found = fit_slots(Q, K, V, selection).indices
        total = 3 if selection.budget == 3 else 20
        assert found.shape == (2, total)
        assert np.all(found[:, :sinks] == np.arange(sinks))
        assert np.all(found[:, total - window :] == np.arange(100 - window, 100))


@over_storages
def test_other_scores_select(storage: str) -> None:
    Q, K, V = heads(26)
    given = [stored(X, storage) for X in (Q, K, V)]
    own = np.random.default_rng(27).standard_normal((2, 30))
    own[1, 5:] = -np.inf
    slots = fit_slots(*given, Selection(size=6, sinks=1, scores=stored(own, storage)))
    assert slots.indices[0].tolist() == sorted({0, *(1 + np.argsort(-own[0, 1:])[:6]).tolist()})
    assert slots.indices[1].tolist() == [0, 1, 2, 3, 4, -1, -1]
    assert np.all(as_float64(slots.log_weights)[1, 5:] == -np.inf)

    one_head = fit_slots(Q[2:], K[1], V[1], Selection(size=6, sinks=1, scores=own[1]))
    np.testing.assert_allclose(
        as_float64(slots.values)[1, :5], one_head.values[0], atol=1e-4 if storage == "jax" else 1e-12
    )

    def first_column(keys: Any, values: Any) -> Any:
        return keys[:, :, 0] + 0 * values[:, :, 0]

    slots = fit_slots(*given, Selection(size=6, scores=first_column))
    np.testing.assert_array_equal(slots.indices, np.sort(np.argsort(-K[:, :, 0], axis=1)[:, :6], axis=1))
    for scores in ("residual", "expected", "leverage"):
        slots = fit_slots(*given, Selection(size=6, sinks=1, scores=scores))
        assert np.isfinite(as_float64(slots.values)).all()
        plain = fit_slots(Q, K, V, Selection(size=6, sinks=1, scores=scores))
        np.testing.assert_array_equal(slots.indices, plain.indices)


@pytest.mark.parametrize("heads_without", [1, 2])
def test_heads_whose_keys_all_have_scores_of_minus_infinity_have_no_slots(heads_without: int) -> None:
    Q, K, V = heads(30)
    own = np.zeros((2, 30))
    own[:heads_without] = -np.inf
    slots = fit_slots(Q, K, V, Selection(size=5, scores=own))
    assert (slots.indices >= 0).sum(axis=1).tolist() == [0, 0 if heads_without == 2 else 5]
    assert np.all(slots.log_weights[:heads_without] == -np.inf)
    assert not slots.attend(Q)[: 2 * heads_without].any()
    for residual in (slots.mass_residual, slots.output_residual):  # of outputs of zero
        np.testing.assert_allclose(residual[:heads_without], 1, rtol=1e-12)
    with_sink = fit_slots(Q, K, V, Selection(size=5, sinks=1, scores=own))
    assert with_sink.indices[0].tolist()[:2] in ([0], [0, -1])


# -- arguments ---------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "summaries": ({"selection": Selection(9, summaries=2)}, ValueError, "summaries=2; expected 0 or None"),
    "epsilon": ({"selection": Selection(epsilon=0.1)}, ValueError, "epsilon=0.1; expected a number of slots"),
    "start": ({"selection": Selection(9, start=4)}, ValueError, "start=4; expected 0 or None"),
    "renew": ({"selection": Selection(9, renew_every=4)}, ValueError, "renew_every=4; expected None"),
    "nothing": ({"selection": Selection()}, ValueError, "expected one of the three"),
    "no slot": ({"selection": Selection(size=0)}, ValueError, "leaves no slot; expected at least one"),
    "too many": ({"selection": Selection(9, sinks=5, window=5)}, ValueError, "expected a larger budget"),
    "no selection": ({"selection": "9"}, TypeError, "selection is of type str"),
    "scores": ({"selection": Selection(9, scores=np.ones((2, 7)))}, ValueError, r"scores has shape \(2, 7\)"),
    "nan scores": ({"selection": Selection(9, scores=np.full((2, 30), np.nan))}, NonFiniteError, "scores of keys are"),
    "negative": ({"weights": -np.ones((4, 40))}, ValueError, "weights has a number below 0"),
    "weights": ({"weights": np.ones((4, 39))}, ValueError, r"weights has shape \(4, 39\); expected m = 40"),
    "weights' heads": ({"weights": np.ones((3, 40))}, ValueError, "weights has shape .*; expected 4 heads"),
    "infinite weights": ({"weights": np.full((4, 40), np.inf)}, NonFiniteError, "weights holds NaN or infinity"),
    "whole weights": ({"weights": np.ones((4, 40), int)}, TypeError, "weights has dtype int64"),
    "unseen": ({"unseen": np.ones((4, 3, 6))}, ValueError, "unseen has shape .*; expected d = 5"),
    "unseen heads": ({"unseen": np.ones((3, 3, 5))}, ValueError, "unseen has shape .*; expected 4 heads"),
    "whole unseen": ({"unseen": np.ones((4, 3, 5), int)}, TypeError, "unseen has dtype int64"),
    "unseen library": ({"unseen": array_api_strict.ones((4, 3, 5))}, TypeError, "and unseen of|unseen is of"),
    "unseen nan": ({"unseen": np.full((4, 3, 5), np.nan)}, NonFiniteError, "unseen holds NaN"),
    "Q": ({"Q": np.full((4, 40, 5), np.inf)}, NonFiniteError, "Q holds NaN or infinity"),
    "too large": ({"Q": np.full((4, 40, 5), 1e308), "scale": 1e10}, NonFiniteError, "beyond float64"),
    "too small": (
        {"Q": np.full((4, 40, 5), -1e200), "K": 1e200 * np.eye(30, 5) * [[[1]], [[0]]]},
        NonFiniteError,
        "beyond",
    ),
    "K": ({"K": np.full((2, 30, 5), np.nan)}, NonFiniteError, "K holds NaN"),
    "V": ({"V": np.full((2, 30, 3), -np.inf)}, NonFiniteError, "V holds NaN or infinity"),
    "d": ({"K": np.ones((2, 30, 4))}, ValueError, r"K has shape .*; expected d = 5"),
    "n": ({"V": np.ones((2, 29, 3))}, ValueError, r"V has shape .*; expected n = 30"),
    "scale": ({"scale": np.inf}, ValueError, "scale is inf"),
    "mask": ({"mask": np.ones((2, 29), bool)}, ValueError, "mask has shape"),
    "library": ({"K": array_api_strict.ones((2, 30, 5))}, TypeError, "expected one library"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_are_named(name: str) -> None:
    options, error, message = BAD[name]
    Q, K, V = heads(28)
    given = {"Q": Q, "K": K, "V": V, "selection": 9} | options
    arrays = [given.pop(name) for name in ("Q", "K", "V", "selection")]
    with pytest.raises(error, match=message):
        fit_slots(*arrays, **given)


def test_wrong_queries_of_slots_are_named() -> None:
    slots = fit_slots(*heads(29), 9)
    for Q, error, message in (
        (np.ones((4, 3, 6)), ValueError, "Q has shape .*; expected d = 5 along axis -1, as keys has"),
        (np.ones((3, 3, 5)), ValueError, "Q has 3 heads and keys has 2"),
        (np.full((4, 3, 5), np.nan), NonFiniteError, "products of Q and keys are not finite"),
        (np.ones((4, 3, 5), int), TypeError, "Q has dtype int64"),
    ):
        with pytest.raises(error, match=message):
            slots.attend(Q)
