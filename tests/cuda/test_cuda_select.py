"""Selection on a CUDA device, run on the CPU, against its definitions in numpy.

Inside: the kernel is compared with its definition, and copies to main memory are watched.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cuda_keys import laid_out
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import levattn
import strategies
from emulator import device as emulated
from emulator import in_orders
from levattn._kernels.select import cuda as select_cuda
from levattn._kernels.select import definition
from strategies import as_bool, as_float64, examples

SIZES = (0, 1, 31, 33, 255, 256, 2047, 2048, 2049, 4100, 8193)  # around warps, their runs, tiles and spans


pytestmark = pytest.mark.usefixtures("host")


def listed(flags: NDArray[np.bool_]) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in flags]


def as_lists(starts: Any, indices: Any) -> list[list[int]]:
    assert starts[0] == 0
    assert starts[-1] == len(indices)
    assert starts.dtype == indices.dtype == np.int64
    return [indices[low:high].tolist() for low, high in pairwise(starts)]


def doubtful(table: Any, flags: NDArray[np.bool_]) -> tuple[Any, Any]:
    """The list of the flags that are set: their scores are between the bounds, and those of others below both."""
    low, high = np.full(len(flags), 0.5), np.full(len(flags), 2.0)
    chosen, starts, indices = table.threshold(flags.astype(np.float32), None, low, high)
    assert not chosen.any()
    return starts, indices


@st.composite
def scored(draw: st.DrawFn) -> tuple[Any, Any]:
    """Scores with ties and figures that are none, and which keys are present."""
    b, n = draw(st.sampled_from([(1, 1), (1, 70), (2, 2049), (3, 5), (1, 0), (0, 4), (2, 8200)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from([np.float32, np.float64]))
    values = draw(st.sampled_from(["ties", "spread", "one value"]))
    if values == "ties":
        scores = rng.choice(np.array([0, 2.0**-140, 0.125, 0.125 + 2.0**-20, 0.25, 1]), (b, n)).astype(kind)
    elif values == "spread":
        scores = (10.0 ** rng.uniform(-40, 0, (b, n))).astype(kind)
    else:
        scores = np.full((b, n), 0.3, kind)
    if draw(st.booleans()):
        scores[rng.random((b, n)) < 0.1] = np.nan
        scores[rng.random((b, n)) < 0.1] = np.inf
    some = draw(st.sampled_from([None, 0.0, 0.5, 0.99]))
    return scores, None if some is None else rng.random((b, n)) < some


# -- lists -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_what_is_chosen_is_listed_in_order(n: int, share: float) -> None:
    chosen = np.random.default_rng(n).random((2, n)) < share
    found = in_orders(doubtful, select_cuda, chosen)
    assert as_lists(*found) == as_lists(*doubtful(definition, chosen)) == listed(chosen)


def test_lists_of_scores_in_another_layout_and_of_no_matrix() -> None:
    chosen = np.random.default_rng(1).random((300, 2)) < 0.5
    for flags in (chosen.T, np.zeros((0, 5), np.bool_)):
        assert as_lists(*doubtful(select_cuda, flags)) == listed(flags)


# -- thresholds ------------------------------------------------------------------------


@examples(40)
@given(case=scored(), seed=st.integers(0, 2**32 - 1))
def test_thresholds_are_those_of_the_definition(case: Any, seed: int) -> None:
    scores, present = case
    rng = np.random.default_rng(seed)
    low = rng.choice([-np.inf, 0, 0.1, 0.125, 0.3, 1, np.nan], len(scores))
    high = rng.choice([0, 0.125, 0.125 + 2.0**-21, 0.3, 1, np.inf, np.nan], len(scores))
    chosen, *near = in_orders(select_cuda.threshold, scores, present, low, high)
    expected, *doubtful = definition.threshold(scores, present, low, high)
    np.testing.assert_array_equal(chosen, expected)
    assert as_lists(*near) == as_lists(*doubtful)
    there = np.ones(scores.shape, np.bool_) if present is None else present
    above = scores.astype(np.float64) >= high[:, None]
    assert np.array_equal(chosen, there & above)
    assert as_lists(*near) == listed(there & ~above & ~(scores.astype(np.float64) < low[:, None]))


@examples(60)
@given(case=scored(), data=st.data())
def test_the_largest_are_among_those_that_the_definition_names(case: Any, data: st.DataObject) -> None:
    scores, present = case
    b, n = scores.shape
    size = data.draw(st.sampled_from([0, 1, 2, n // 2, max(n - 1, 0), n, n + 1]))
    margin = np.full(b, data.draw(st.sampled_from([0.0, 1e-9, 1e-5, 0.5, np.inf])))
    with np.errstate(invalid="ignore"):
        chosen, *close = definition.largest(scores, present, size, margin)
    if not np.isfinite(scores).all():
        return
    there = np.ones(scores.shape, np.bool_) if present is None else present
    for item, lists in enumerate(as_lists(*close)):
        among = np.flatnonzero(there[item])
        best = among[np.argsort(-scores[item, among], kind="stable")][:size]
        sure = np.flatnonzero(chosen[item])
        assert len(sure) <= size
        assert not set(sure) & set(lists)
        assert set(best) <= set(sure) | set(lists)


@examples(60)
@given(case=scored(), data=st.data())
def test_the_largest_and_what_leads_the_others_are_those_of_the_definition(case: Any, data: st.DataObject) -> None:
    scores, present = case
    b, n = scores.shape
    size = data.draw(st.sampled_from([0, 1, 2, n // 2, max(n - 1, 0), n, n + 1]))
    margin = np.full(b, data.draw(st.sampled_from([0.0, 1e-9, 1e-5, 0.5])))

    def found(table: Any) -> tuple[Any, ...]:
        chosen, close, left = table.largest_and_left(scores, present, size, margin)
        assert (close is None) == (left is not None)
        return chosen, np.array(close is None), *(close or left)

    with np.errstate(invalid="ignore"):
        chosen, called, *lists = in_orders(found, select_cuda)
        expected, sure, *others = found(definition)
    assert called == sure
    assert as_lists(*lists) == as_lists(*others)
    if sure:  # else scores that are alone with the last may count or not
        np.testing.assert_array_equal(chosen, expected)


def test_the_score_of_a_rank_for_every_rank() -> None:
    numbers = [0.5, 0.25, 0.25, np.nextafter(0.25, 1), 0, -0.0, 2.0**-1074, 1e-300, -1, np.nan, np.inf, -np.inf]
    for kind in (np.float64, np.float32):
        scores = np.array([numbers], kind)
        ranked = np.sort(scores[0])[::-1]  # NaN comes first
        for size in range(1, len(ranked)):
            found = select_cuda._bounds_of_rank(scores, None, size, np.zeros(1))[0]
            np.testing.assert_array_equal(found, ranked[size - 1 : size])
        assert select_cuda._bounds_of_rank(scores, None, len(ranked), np.zeros(1))[0] == -np.inf


def test_flags_are_set_and_maxima_found() -> None:
    rng = np.random.default_rng(2)
    scores = rng.random((3, 500)).astype(np.float32)
    among = rng.random((3, 500)) < 0.3
    among[1] = False
    for table in (definition, select_cuda):
        chosen = np.zeros((3, 500), np.bool_)
        starts, indices = doubtful(table, among)
        which = rng.random(len(indices)) < 0.5
        table.include(chosen, starts, indices, which)
        again = np.zeros((3, 500), np.bool_)
        again[among] = which
        np.testing.assert_array_equal(chosen, again)
        np.testing.assert_array_equal(table.maxima(scores, among), np.where(among, scores, 0).max(axis=1))
        np.testing.assert_array_equal(table.maxima(scores[:, :0], among[:, :0]), np.zeros(3))
        for margin in (0.0, 1e-9, 0.25, 1.0):
            least = np.where(among, scores, 0).max(axis=1).astype(np.float64) * (1 - margin)
            found = as_lists(*table.leaders(scores, among, np.full(3, margin)))
            assert found == listed(among & (scores >= least[:, None]))
        assert as_lists(*table.leaders(scores[:, :0], among[:, :0], np.zeros(3))) == [[], [], []]


# -- rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "heads last", "columns", "backwards", "expanded", "off by one"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("d", [1, 24, 64])
def test_rows_are_gathered_from_any_layout(kind: str, dtype: Any, d: int) -> None:
    keys = laid_out(np.random.default_rng(d).integers(0, 250, (3, 100, d)).astype(dtype), kind)
    if kind == "expanded":
        keys = np.broadcast_to(keys[:1], keys.shape)
    chosen = np.random.default_rng(d).random((3, 100)) < 0.3
    chosen[1] = False
    starts, indices = doubtful(select_cuda, chosen)
    expected = np.concatenate([keys[item, row] for item, row in enumerate(chosen)])
    rows, there = in_orders(select_cuda.stacked, keys, starts, indices)
    assert rows.shape == (3, chosen.sum(axis=1).max(), d)
    np.testing.assert_array_equal(rows[there], expected)
    again, where = definition.stacked(keys, starts, indices)
    np.testing.assert_array_equal(where, there)
    np.testing.assert_array_equal(again[where], expected)


@examples(15)
@given(case=scored(), least=st.sampled_from([0.0, 0.3, 1.0, -np.inf]))
def test_scores_that_are_not_below(case: tuple[Any, Any], least: float) -> None:
    scores, present = case
    bounds = np.linspace(least, least + 0.2, len(scores)) if np.isfinite(least) else np.full(len(scores), least)
    there = np.ones(scores.shape, np.bool_) if present is None else present
    expected = listed(~(scores.astype(np.float64) < bounds[:, None]) & there)
    for table in (select_cuda, definition):
        assert as_lists(*table.reaching(scores, present, bounds)) == expected


@pytest.mark.parametrize("dtype", ["uint16", "float32", "float64", "complex128", "bool"])
@pytest.mark.parametrize("shape", [(3, 300), (1, 300), (3, 300, 5), (3, 300, 2, 4)], ids=str)
def test_what_is_listed_one_after_the_other(dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    array, flags = rng.integers(0, 1000, shape).astype(dtype), rng.random((3, 200)) < 0.2
    flags[1] = False
    starts, indices = doubtful(select_cuda, flags)
    part = array[:, 50:250]
    expected = np.concatenate([part[item % len(part), row] for item, row in enumerate(flags)])
    for table in (select_cuda, definition):
        np.testing.assert_array_equal(table.gathered(part, starts, indices), expected)
    alone = rng.integers(0, 9, (1, 200, 4))
    rows, there = select_cuda.stacked(alone, starts, indices)
    np.testing.assert_array_equal(rows[there], np.concatenate([alone[0, row] for row in flags]))


def test_no_rows_are_gathered() -> None:
    none = doubtful(select_cuda, np.zeros((2, 5), np.bool_))
    assert select_cuda.stacked(np.ones((2, 5, 3)), *none)[0].shape == (2, 0, 3)


# -- sets on the device ----------------------------------------------------------------


def same_set(K: Any, cupy: Any, epsilon: float | None = None, **options: Any) -> Any:
    """The set of keys on the device, which is that of the same keys in main memory."""
    there = {name: cupy.asarray(value) if name == "mask" else value for name, value in options.items()}
    found = levattn.universal_set(cupy.asarray(K), epsilon, **there)
    expected = levattn.universal_set(K, epsilon, **options)
    np.testing.assert_array_equal(as_bool(found.mask), expected.mask)
    for name in ("sizes", "present", "is_vacuous"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    np.testing.assert_allclose(found.epsilon, expected.epsilon, rtol=1e-9)
    np.testing.assert_allclose(as_float64(found.scores), expected.scores, rtol=2e-6, atol=1e-9)
    assert found.guarantee == expected.guarantee
    assert all(isinstance(array, type(cupy.zeros(1))) for array in (found.mask, found.scores))
    return found


NAMES = (
    *("gaussian", "coherent", "duplicated", "deficient-exact"),
    *("identity-blocks", "all-zero", "no-row", "scale-1e150"),
)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", NAMES)
def test_sets_by_threshold_and_by_size(name: str, kind: Any, cupy: Any) -> None:
    with np.errstate(over="ignore"):
        K = strategies.case(name).astype(kind)
    if not np.isfinite(K).all():
        pytest.skip("out of range")
    for epsilon in (0.2, 0.01):  # 0.2 is the score of all keys of identity-blocks
        same_set(K, cupy, epsilon=epsilon)
    for size in {0, min(7, len(K)), len(K)}:
        same_set(K, cupy, size=size)


def test_heads_of_which_few_have_ties(cupy: Any) -> None:
    rng = np.random.default_rng(5)
    K = rng.standard_normal((2, 3, 120, 6)).astype(np.float32)
    K[0, 1] = np.tile(np.eye(6), (20, 1))
    K[1, 2] = 0
    mask = rng.random((2, 3, 120)) < 0.8
    mask[1, 0] = False
    mask[0, 1] = True
    for options in ({"epsilon": 0.05}, {"epsilon": 2.0**-101}, {"size": 10}, {"size": 119}):
        same_set(K, cupy, mask=mask, **options)
        same_set(K, cupy, **options)


def test_groups_are_added(cupy: Any) -> None:
    K = np.vstack([np.repeat(np.eye(4)[:1], 50, axis=0), np.random.default_rng(6).standard_normal((200, 4))])
    groups = np.where(np.arange(250) < 50, 0, -1)
    found = levattn.universal_set(cupy.asarray(K), 0.1).with_groups(cupy.asarray(K), groups)
    np.testing.assert_array_equal(as_bool(found.mask), levattn.universal_set(K, 0.1).with_groups(K, groups).mask)
    assert isinstance(found.mask, type(cupy.zeros(1)))
    assert as_bool(found.mask)[:50].all()
    assert found.hidden_groups.tolist() == [True]


def test_a_set_of_other_keys_is_refused(cupy: Any) -> None:
    K = np.random.default_rng(7).standard_normal((300, 5))
    universal = levattn.universal_set(cupy.asarray(K), 0.05, mask=cupy.asarray(np.arange(300) < 290))
    levattn.heavy_attention(cupy.asarray(K[:3]), cupy.asarray(K), 0.1, universal=universal)
    with pytest.raises(ValueError, match="other keys"):
        levattn.heavy_attention(cupy.asarray(K[:3]), cupy.asarray(K[::-1].copy()), 0.1, universal=universal)


def test_the_scores_stay_on_the_device(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    K = rng.standard_normal((2, 3000, 4)).astype(np.float32)
    K[:, ::500] *= 30
    keys, mask, get = cupy.asarray(K), cupy.asarray(rng.random((2, 3000)) < 0.9), emulated.DeviceArray.get

    def few(array: Any) -> Any:
        assert array.held.size < 1000
        return get(array)

    monkeypatch.setattr(emulated.DeviceArray, "get", few)
    for options in ({"epsilon": 0.05}, {"size": 40}):
        epsilon = options.pop("epsilon", None)
        found = levattn.universal_set(keys, epsilon, mask=mask, **options)
        assert found.sizes.min() > 0
        assert not found.is_vacuous.any()
    one = levattn.universal_set(keys[0], 0.05)
    heavy = levattn.heavy_attention(keys[0, :50], keys[0], 0.05, universal=one)
    heavy.apply(keys[1], compensate="mean")
