"""How sets and states show themselves: on a line, in a notebook, as a table, as files, and the set of one head."""

from __future__ import annotations

import pickle
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

import levattn
from strategies import STORAGE, as_float64

mpl.use("agg")


def keys(*batch: int, n: int = 60, d: int = 4) -> Any:
    return np.random.default_rng(0).standard_normal((*batch, n, d)) * np.array([1, 1, 1, 9])


def test_the_line_of_a_batch_tells_threshold_rank_bound_and_how_many_are_vacuous() -> None:
    K = keys(2, 3)
    K[0, 0] = 0
    K[0, 0, :2, 0] = 1  # two keys of one direction
    found = repr(levattn.universal_set(K, 0.1))
    sizes = levattn.universal_set(K, 0.1).sizes
    assert found == (
        f"UniversalSet({sizes.min()} to {sizes.max()} of 60 keys in each of (2, 3), epsilon=0.1, guarantee='exact', "
        "rank=1 to 4, bound=10 to 40)"
    )
    assert repr(levattn.universal_set(K, 0.05)).endswith("bound=20 to 80, 5 vacuous)")
    assert repr(levattn.universal_set(K[1], 0.05)).endswith("bound=80, vacuous)")
    assert repr(levattn.universal_set(np.zeros((0, 5, 2)), 0.5)).startswith(
        "UniversalSet(none of 5 keys in each of (0,)"
    )


@pytest.mark.parametrize("options", [{}, {"f": 4}, {"f": "huber"}, {"method": "countsketch"}], ids=repr)
def test_the_set_of_one_head_is_the_set_of_its_keys(options: dict[str, Any]) -> None:
    K = keys(2, 3, n=40)
    mask = np.random.default_rng(1).random((2, 3, 40)) < 0.9
    whole = levattn.universal_set(K, 0.2, mask=mask, **options)
    for place in np.ndindex(2, 3):
        one = whole[place]
        assert one.batch == ()
        np.testing.assert_array_equal(one.mask, whole.mask[place])
        np.testing.assert_array_equal(one.scores, whole.scores[place])
        assert (one.rank, one.size_bound) == (whole.rank[place], whole.size_bound[place])
        if not options:
            alone = levattn.universal_set(K[place], 0.2, mask=mask[place])
            np.testing.assert_array_equal(one.indices, alone.indices)
    np.testing.assert_array_equal(whole[-1, -1].mask, whole[1, 2].mask)
    np.testing.assert_array_equal(whole[np.array(1), np.uint8(2)].mask, whole[1, 2].mask)


def test_a_tensor_that_is_no_number_is_no_index() -> None:
    torch = pytest.importorskip("torch")
    whole = levattn.universal_set(keys(2, 3), 0.2)
    np.testing.assert_array_equal(whole[torch.tensor(1), 2].mask, whole[1, 2].mask)
    for index in (torch.tensor(True), torch.tensor([1]), np.array([1]), np.True_):
        with pytest.raises(IndexError, match="expected 2 whole numbers, one for each axis of the batch"):
            whole[index, 2]


def test_the_set_of_one_head_serves_heavy_attention() -> None:
    K = keys(3)
    whole = levattn.universal_set(K, 0.2)
    mine = levattn.heavy_attention(K[1], K[1], 0.2, universal=whole[1])
    alone = levattn.heavy_attention(K[1], K[1], 0.2)
    np.testing.assert_allclose(mine.entries.toarray(), alone.entries.toarray(), rtol=1e-12)


ABSENT = [(0,), (5, 0), (0, 3), (-3, 0), (0, 0, 0), (0, 0.0), (0, True), (0, "0"), (0, None), ([0], [0]), "01", ...]


@pytest.mark.parametrize("index", ABSENT, ids=repr)
def test_an_index_that_is_not_there_is_refused(index: Any) -> None:
    message = "expected 2 whole numbers, one for each axis of the batch"
    with pytest.raises(IndexError, match=message):
        levattn.universal_set(keys(2, 3), 0.2)[index]
    for one in (levattn.universal_set(keys(), 0.2), streamed()):
        with pytest.raises(TypeError, match=r"of one matrix.* use `in`, or K\[universal\.indices\] for keys"):
            one[0]


@pytest.mark.parametrize(
    "make", [levattn.universal_set, lambda K, e: levattn.StreamingUniversalSet(e).update(K).result()]
)
def test_members_are_found_and_given_in_order(make: Any) -> None:
    universal = make(np.diag([1.0, 0, 2]), 0.5)
    assert list(universal) == [0, 2]
    integers = (2, 0, np.int64(0), np.uint8(2), False, np.False_)
    for key in (*integers, 2.0, np.float32(2), -0.0, Fraction(2), 2 + 0j, np.array(2)):
        assert key in universal
    integers = (1, True, np.True_, -1, -3, np.int8(-1), 3, 2**63, 2**70, -(2**70))
    for key in (*integers, 1e300, 2.5, np.nan, np.inf, "2", None, (2,)):
        assert key not in universal
    assert all(key not in make(np.zeros((0, 3)), 0.5) for key in (0, -1, 0.0))


def test_a_notebook_shows_a_table() -> None:
    html = levattn.universal_set(np.diag([1.0, 0, 2]), 0.5)._repr_html_()
    assert "<th>indices (scores)</th><td>0 (1), 2 (1)</td>" in html
    assert "<td>2 of 3 keys</td>" in html
    assert "<td>exact</td>" in html or "<td>&#x27;exact&#x27;</td>" in html
    many = levattn.universal_set(np.eye(20), 0.5)._repr_html_()
    assert "9 (1), and 10 more" in many
    assert "indices" not in levattn.universal_set(keys(2), 0.5)._repr_html_()


def test_a_notebook_shows_heavy_attention() -> None:
    Q, K = np.array([[1.0, 0], [1, 1]]), np.eye(2)
    html = levattn.heavy_attention(Q, K, 0.4)._repr_html_()
    assert "<caption>HeavyAttention</caption>" in html
    assert "<th>entries</th><td>3</td>" in html
    assert "<td>(0, 0): 1, (1, 0): 0.5, (1, 1): 0.5</td>" in html
    assert "<th>form</th><td>causal</td>" in levattn.causal_heavy_attention(Q, K, 0.4)._repr_html_()
    batch = levattn.heavy_attention(np.stack([Q, Q]), np.stack([K, K]), 0.4)._repr_html_()
    assert "<th>entries in each</th><td>3</td>" in batch
    assert "<th>largest, (query, key)</th><td>none</td>" in levattn.heavy_attention(Q[:0], K, 0.4)._repr_html_()


def test_a_table_has_a_row_for_each_key_of_the_set() -> None:
    K = keys(2, 3)
    whole = levattn.universal_set(K, 0.2)
    table = whole.to_frame()
    assert list(table.columns) == ["axis_0", "axis_1", "key", "score"]
    places = tuple(table[name].to_numpy() for name in ("axis_0", "axis_1", "key"))
    np.testing.assert_array_equal(np.stack(places), np.stack(np.nonzero(whole.mask)))
    np.testing.assert_array_equal(table["score"], whole.scores[places])


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_a_file_holds_the_set_and_needs_no_pickle(tmp_path: Path, batch: tuple[int, ...]) -> None:
    universal = levattn.universal_set(keys(*batch), 0.2)
    path = tmp_path / "set.npz"
    universal.save(path)
    with np.load(path, allow_pickle=False) as stored:
        assert ("indices" in stored) == (batch == ())
        for name in ("mask", "scores", "sizes", "rank", "size_bound", "is_vacuous"):
            np.testing.assert_array_equal(stored[name], getattr(universal, name))
        assert float(stored["f"]) == 2
    with pytest.raises(ValueError, match=r"ends in \.npz"):
        universal.save(tmp_path / "set.txt")
    assert list(tmp_path.iterdir()) == [path]


def test_a_set_draws_its_spectrum() -> None:
    universal = levattn.universal_set(keys(2), 0.2)
    display = universal.plot()
    np.testing.assert_array_equal(display.sizes, universal.sizes)
    (ax,) = display.figure_.axes
    assert ax.get_yscale() == "log"


def streamed(*batch: int, payload: bool = False) -> levattn.StreamedSet:
    numbers = np.broadcast_to(np.arange(60), (*batch, 60)) if payload else None
    return levattn.StreamingUniversalSet(0.2).update(keys(*batch), payload=numbers).result()


def test_the_set_of_one_head_of_a_stream_is_the_set_of_its_keys() -> None:
    whole, K = streamed(2, 3, payload=True), keys(2, 3)
    for place in np.ndindex(2, 3):
        one, alone = whole[place], levattn.StreamingUniversalSet(0.2).update(K[place]).result()
        assert list(one) == alone.indices.tolist() == one.payload.tolist()
        assert len(one) == whole.sizes[place]
        assert repr(one) == repr(alone)
        assert all(key in one for key in one)
        assert -1 not in one
        np.testing.assert_array_equal(one.factor.condition, alone.factor.condition)
    with pytest.raises(IndexError, match="one for each axis of the batch"):
        whole[0]
    with pytest.raises(TypeError, match="of one matrix"):
        streamed()[0]


@pytest.mark.parametrize("storage", ["float64", "float32", "torch-float64", "strict-float32"])
def test_scores_are_indexed_alike_in_memory_and_in_a_stream(storage: str) -> None:
    """`scores` are of all keys and `member_scores` of the set; a stream, which has no scores of all keys, says so."""
    if storage not in STORAGE:
        pytest.skip(f"no package for {storage}")
    K = STORAGE[storage](keys())
    whole, one_pass = levattn.universal_set(K, 0.2), levattn.StreamingUniversalSet(0.2).update(K).result()
    assert len(whole) > 0
    assert type(whole.member_scores) is type(whole.scores)
    np.testing.assert_array_equal(as_float64(whole.member_scores), as_float64(whole.scores)[whole.indices])
    np.testing.assert_array_equal(one_pass.indices, whole.indices)
    np.testing.assert_allclose(one_pass.member_scores, as_float64(whole.member_scores), rtol=1e-6)
    assert not hasattr(one_pass, "scores")
    with pytest.raises(AttributeError, match=r"no scores of all keys.* member_scores are of .*leverage_scores\(K\)"):
        one_pass.scores  # noqa: B018
    for batch in (levattn.universal_set(keys(2, 3), 0.2), streamed(2, 3)):
        with pytest.raises(ValueError, match=r"universal\[layer, head\]"):
            batch.member_scores  # noqa: B018


def test_a_batch_of_a_stream_shows_itself_like_a_set() -> None:
    found, whole = repr(streamed(2, 3)), repr(levattn.universal_set(keys(2, 3), 0.2))
    assert found == whole.replace("UniversalSet", "StreamedSet")
    flat = levattn.StreamingUniversalSet(0.5).update(np.ones((2, 3, 40, 2))).result()
    assert repr(flat).startswith("StreamedSet(0 of 40 keys in each of (2, 3), epsilon=0.5, guarantee='exact', rank=1,")
    assert repr(streamed(payload=True).items[0]).endswith("keys of 4 columns, payload int64)")
    assert repr(streamed().items[0]) == f"SelectedKeys({len(streamed())} keys of 4 columns)"


@pytest.mark.parametrize("batch", [(), (2, 3), (0,)])
def test_the_table_and_the_file_of_a_stream(tmp_path: Path, batch: tuple[int, ...]) -> None:
    found, whole = streamed(*batch, payload=True), levattn.universal_set(keys(*batch), 0.2)
    assert found.to_frame().drop(columns="score").equals(whole.to_frame().drop(columns="score"))
    found.save(tmp_path / "set.npz")
    with np.load(tmp_path / "set.npz", allow_pickle=False) as stored:
        np.testing.assert_array_equal(stored["indices"], np.nonzero(whole.mask)[-1])
        np.testing.assert_array_equal(stored["payload"], stored["indices"])
        np.testing.assert_array_equal(stored["sizes"], whole.sizes)
        np.testing.assert_array_equal(stored["rank"], found.rank)
        assert batch == (0,) or stored["keys"].shape == (stored["sizes"].sum(), 4)
        assert (stored["epsilon"], stored["guarantee"], stored["f"], stored["n"]) == (0.2, "exact", 2, 60)
    with pytest.raises(ValueError, match=r"ends in \.npz"):
        found.save(tmp_path / "set.txt")


@pytest.mark.parametrize("make", [lambda *batch: levattn.universal_set(keys(*batch), 0.2), streamed])
def test_uses_of_one_matrix_name_the_index(make: Any) -> None:
    found = make(2, 3)
    rest = r"of one matrix, but this set has batch \(2, 3\); take one by universal\[layer, head\]"
    uses = {
        "indices": lambda: found.indices,
        "member_scores": lambda: found.member_scores,
        "len": lambda: len(found),
        "in`": lambda: 3 in found,
        "iter": lambda: iter(found),
    }
    for name, use in uses.items():
        with pytest.raises(ValueError, match=f"{name}.* {rest}"):
            use()


def test_states_and_heavy_attention_tell_what_they_hold() -> None:
    K = keys()
    state = levattn.StreamingUniversalSet(0.2, f="huber")
    assert repr(state) == "StreamingUniversalSet(epsilon=0.2, f=Huber(delta=1.0), no chunk yet)"
    assert "n=60, batch=(), d=4" in repr(state.update(K))
    causal = levattn.CausalUniversalSet(0.2)
    assert repr(causal) == "CausalUniversalSet(epsilon=0.2, no key yet)"
    assert f"n=60, held={causal.update(K).held}, batch=(), d=4" in repr(causal)
    heavy = levattn.heavy_attention(K, K, 0.2)
    assert f"{heavy.entries.nnz} entries of 60 queries x 60 keys, in a set of {len(heavy.universal)}" in repr(heavy)
    assert "causal" in repr(levattn.causal_heavy_attention(K, K, 0.2))


def test_scores_and_samples_tell_their_figures_on_a_line() -> None:
    K = keys()
    assert repr(levattn.exact_sensitivities(K)) == "ExactSensitivities(60 keys, total=4, method='svd')"
    sketched = levattn.sketched_scores(K)
    total = f"total={sketched.scores.sum():.6g}"
    assert (
        repr(sketched)
        == f"SketchedScores(60 keys, {total}, distortion={sketched.distortion:.6g}, failure={sketched.failure:.6g})"
    )
    heads = levattn.sketched_scores(keys(2, 3))
    low, high = heads.distortion.min(), heads.distortion.max()
    assert f"SketchedScores(60 keys in each of (2, 3), distortion={low:.6g} to {high:.6g}, failure=" in repr(heads)
    sample = levattn.sample_rows(K, 10, rng=0)
    assert repr(sample).startswith(
        f"RowSample({len(sample)} of 60 rows, size=10, distortion={sample.distortion:.6g}, "
    )
    factor = levattn.universal_set(keys(2), 0.1).factor
    assert repr(factor) == f"Factor(rank=4 of 4 columns in 2 matrices, error={factor.error.max():.3g})"
    for K in (keys(n=0), keys(0)):  # without keys, and without matrices
        assert "\n" not in repr(levattn.sketched_scores(K))


def test_exchanged_axes_warn_and_short_contexts_do_not() -> None:
    with pytest.warns(
        levattn.AxesWarning, match=r"K has shape \(60, 3, 4\): 3 keys of 4 columns in each of 60"
    ) as seen:
        levattn.universal_set(keys(3).swapaxes(0, 1), 0.2)
    assert seen[0].filename == __file__
    levattn.universal_set(keys(2, 3, n=4), 0.2)
    levattn.universal_set(keys(n=3), 0.2)


def test_heads_whose_columns_come_before_their_keys_warn() -> None:
    K = np.random.default_rng(0).standard_normal((12, 512, 32))
    with pytest.warns(levattn.AxesWarning, match=r"32 keys of 512 columns .*K\.swapaxes\(-2, -1\)$") as seen:
        levattn.universal_set(K.swapaxes(-2, -1), 0.2)
    assert seen[0].filename == __file__
    for n, d in ((32, 256), (64, 128), (20, 768), (512, 512)):  # few keys of wide heads, or of documents
        levattn.universal_set(np.ones((2, n, d)), 0.2)
    levattn.universal_set(np.ones((32, 512)), 0.2)


def test_exchanged_axes_of_a_first_chunk_warn() -> None:
    chunk = np.random.default_rng(0).standard_normal((300, 3, 4))
    with pytest.warns(
        levattn.AxesWarning, match=r"3 keys of 4 columns in each of 300.*K\.swapaxes\(-3, -2\)$"
    ) as seen:
        state = levattn.StreamingUniversalSet(0.2).update(chunk)
    assert seen[0].filename == __file__
    state.update(chunk)  # warned of once
    for few in (chunk[:, :1], chunk[:64], chunk.swapaxes(0, 1)):  # a token of each head, layers and heads, all well
        levattn.StreamingUniversalSet(0.2).update(few)


@pytest.mark.parametrize("find", [levattn.universal_set, levattn.scan_set])
@pytest.mark.parametrize("kind", ["chunks", "file"])
def test_exchanged_axes_of_chunks_warn(find: Any, kind: str, tmp_path: Path) -> None:
    K = keys(3).swapaxes(0, 1).copy()
    np.save(tmp_path / "keys.npy", K)
    source = levattn.open_keys(tmp_path / "keys.npy") if kind == "file" else lambda: iter([K[:, :2], K[:, 2:]])
    with pytest.warns(levattn.AxesWarning, match=r"K has shape \(60, 3, 4\): 3 keys of 4 columns") as seen:
        find(source, 0.2)
    assert [warning.filename for warning in seen] == [__file__]
    find(lambda: iter([K.swapaxes(0, 1)]), 0.2)


def test_epsilon_goes_by_place_and_by_name() -> None:
    K = keys()
    by_name = levattn.universal_set(K, epsilon=0.2)
    np.testing.assert_array_equal(by_name.mask, levattn.universal_set(K, 0.2).mask)
    entries = levattn.heavy_attention(K, K, epsilon=0.2).entries
    np.testing.assert_array_equal(entries.toarray(), levattn.heavy_attention(K, K, 0.2).entries.toarray())


def test_a_rank_that_rounding_hides_warns_where_keys_count_as_1() -> None:
    C = np.random.default_rng(0).standard_normal((2, 5000, 8))
    C[1] -= C[1].mean(axis=1, keepdims=True)
    assert levattn.StreamingUniversalSet(0.02).update(C).result().sizes.tolist() == [0, 0]  # resolved, so no warning
    C[1, ::2] = C[1, ::2, :1]
    C[1, 1::2] = np.eye(8)[0] * 1e-30  # a direction that most keys lack
    text = r"\(numerical rank 1 of 8 columns\), so that 5000 keys count as 1, more than rank/epsilon = 50\."
    with pytest.warns(levattn.RankWarning, match=r"K at \(1,\) of the batch is rank-deficient .* " + text) as seen:
        found = levattn.StreamingUniversalSet(0.02).update(C).result()
    assert found.sizes.tolist() == [0, 5000]
    with pytest.warns(levattn.RankWarning, match=text) as more:
        levattn.universal_set(lambda: iter([C[1, :3000], C[1, 3000:]]), 0.02)
    assert seen[0].filename == more[0].filename == __file__
    assert levattn.StreamingUniversalSet(0.02).update(C[1, :, 1:]).result().sizes == 0  # what the warning advises
    levattn.StreamingUniversalSet(0.02, f=levattn.Huber()).update(C).result()


def far(*shape: int) -> Any:
    """Keys of which two are far longer than the others."""
    K = np.random.default_rng(2).standard_normal(shape)
    K[..., [3, 700], :] *= 1e25
    return K


@pytest.mark.parametrize("kind", ["stream", "chunks", "batch"])
def test_keys_far_longer_than_the_others_are_named_where_rounding_hides_these(kind: str) -> None:
    K = far(2, 5000, 12) if kind == "batch" else far(5000, 12)
    state = levattn.StreamingUniversalSet(0.1).update(K[..., :300, :]).update(K[..., 300:, :])
    with pytest.warns(levattn.RankWarning, match=r"numerical rank \d of 12 columns.* count as 1") as seen:
        found = levattn.universal_set(lambda: iter([K]), 0.1) if kind == "chunks" else state.result()
    told = str(seen[0].message)
    assert ("K at (0,) of the batch (and in 1 more matrices)" in told) == (kind == "batch")
    if kind == "chunks":  # which are gone
        assert told.endswith("If a few keys are 1e+15 times as long as most, leave these out and add them to the set")
    else:
        assert re.search(r"Keys 3, 700 have entries \de\+(24|25) times as large as most keys", told)
        assert "drop the columns" not in told
    apart = levattn.universal_set(np.delete(K, [3, 700], axis=-2), 0.1)  # the remedy, which gives warnings no more
    assert np.all(apart.sizes < 10)
    assert np.all(found.sizes > 10)


def test_a_key_is_longer_than_others_by_more_than_a_number_can_tell() -> None:
    K = np.random.default_rng(0).standard_normal((5000, 3)) * 1e-160
    K[7] *= 1e155
    K[7] *= 1e160
    with pytest.warns(levattn.RankWarning, match=r"Key 7 has entries more than 1e\+308 times as large as most keys"):
        levattn.StreamingUniversalSet(0.9).update(K).result()
    assert levattn.universal_set(K, 0.9).indices.tolist() == [7]


def test_a_set_survives_pickling() -> None:
    universal = levattn.universal_set(keys(2), 0.2)
    again = pickle.loads(pickle.dumps(universal))
    np.testing.assert_array_equal(again[1].indices, universal[1].indices)


def test_rows_that_count_as_one_leave_no_bound_that_the_set_exceeds() -> None:
    rng = np.random.default_rng(0)
    K = np.stack([rng.standard_normal((600, 3)) @ rng.standard_normal((3, 8)), rng.standard_normal((600, 8))])
    for found in (
        levattn.universal_set(K, 0.05),
        levattn.StreamingUniversalSet(0.05).update(K).result(),
        levattn.universal_set(lambda: iter([K[:, :350], K[:, 350:]]), 0.05),
    ):
        assert found.rank.tolist() == [3, 8]  # to rounding, and not exactly
        assert (found.sizes <= found.size_bound).all()
        assert found.size_bound[1] == 160


def test_a_notebook_shows_a_streamed_set_too() -> None:
    html = levattn.StreamingUniversalSet(0.5).update(np.diag([1.0, 0, 2])).result()._repr_html_()
    assert "<caption>StreamedSet</caption>" in html
    assert "<th>indices (scores)</th><td>0 (1), 2 (1)</td>" in html
