"""What the report of a pruned model measures, and how sure it is of its figures."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from scipy.stats import t

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import CACHE, ENCODERS, LEFT, base, output, tokens  # noqa: E402

from levattn.attention import Selection, causal_pruned_attention  # noqa: E402
from levattn.integrations.transformers import calibrate, prune  # noqa: E402

LAP = 64  # calls
# Heads are pruned alike here, as nothing is recalled
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::levattn.RecallWarning")]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def few(family: str = "Llama", **options: Any) -> Selection:
    if family in ENCODERS:
        return Selection(size=3, summaries=2, window=1, sinks=1)
    return Selection(size=1, summaries=1, window=1, sinks=1, renew_every=2)  # selects first after 12 keys


def measured(report: Any) -> list[tuple[int, int]]:
    return [(row["layer"], row["measured"]) for row in report.table()]


def figures(report: Any, layer: int = 0) -> list[dict[str, Any]]:
    """The rows of a layer without the time and the number of calls."""
    rows = [row for row in report.table() if row["layer"] == layer]
    return [{name: value for name, value in row.items() if name not in ("seconds", "calls")} for row in rows]


# Which units are measured by default


@pytest.mark.parametrize("family", ["Llama", "Esm"])
@pytest.mark.parametrize("layers", [1, 3])
def test_each_unit_has_its_turn_in_a_lap_of_calls_and_some_in_the_first(family: str, layers: int) -> None:
    model, ids = base(family, num_hidden_layers=layers), tokens(2, 6)
    heads, seen = (4 if family == "Esm" else 2), Counter[int]()
    with prune(model, few(family)) as report:
        for call in range(2 * LAP):
            before = sum(count for _, count in measured(report))
            output(model, ids)
            new = sum(count for _, count in measured(report)) - before
            seen[new] += 1
            assert call or new == 2 * heads
    assert measured(report) == [(layer, 4) for layer in range(layers) for _ in range(heads)]
    assert seen == {2 * heads: 2 * layers, 0: 2 * LAP - 2 * layers}  # no two layers in one call
    found = report.summary()
    assert (found["share"], found["measured_calls"], found["heads"]) == (1 / LAP, 2 * layers, layers * heads)
    assert (found["measured"], found["units"]) == (4 * layers * heads, 4 * LAP * layers * heads)


@pytest.mark.parametrize("family", ["Llama", "Esm"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_sampled_call_has_the_figures_of_a_whole_measurement(family: str, padded: bool) -> None:
    model, options = base(family), {"attention_mask": LEFT if padded else None}
    selections = {(0, 0): few(family), (0, 1): 0.3, (1, 0): few(family)}  # two groups in a layer
    reports = []
    for measure in (None, True):
        with prune(model, selections, measure=measure) as report:
            output(model, **options)
        reports.append(report)
    sampled, whole = reports
    assert figures(sampled) == figures(whole)
    assert all(row["queries"] > 0 and row["captured"] and row["seconds"] > 0 for row in sampled.table()[:2])
    row = sampled.table()[2]
    assert row == dict.fromkeys(row) | {"layer": 1, "head": 0, "calls": 1, "measured": 0, "queries": 0}


def test_the_part_of_a_text_that_continues_a_cache_is_measured_with_all_its_keys() -> None:
    model, ids = base(), tokens(2, 24)
    selection = Selection(size=6, summaries=3, window=1, sinks=1, renew_every=24)

    def continued() -> Any:
        return model(ids[:, :12], use_cache=True)[CACHE]

    with torch.no_grad():
        with prune(model, selection) as sampled:
            for _ in range(LAP // 2 - 1):
                model(ids[:1, :2])
            model(ids[:, 12:], **{CACHE: continued()})
        with prune(model, selection, measure=True) as whole:
            past = continued()
            before = figures(whole, 1)
            model(ids[:, 12:], **{CACHE: past})
    assert measured(sampled) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    for row, after, old in zip(figures(sampled, 1), figures(whole, 1), before, strict=True):
        assert row["queries"] == after["queries"] - old["queries"] > 0
        for name in ("slots", "selected", "captured"):
            sums = after[name] * after["queries"] - old[name] * old["queries"]
            assert row[name] == pytest.approx(sums / row["queries"], rel=1e-5)


@pytest.mark.parametrize("padded", [0, 6])
def test_queries_before_the_first_selection_stand_for_none_after_it(padded: int) -> None:
    """Those read up to twice the slots. No head reads more keys than the certificate of its positions counts."""
    model, X = base(), np.random.default_rng(0).standard_normal((1, 50, 2))
    _, certificate = causal_pruned_attention(X, X, X, 16, return_certificate=True)
    mask = (torch.arange(50 + padded) >= padded)[None].long()
    with prune(model, 16, measure=True) as report:
        output(model, tokens(1, 50 + padded), attention_mask=mask)
    assert all(row["slots"] <= certificate.slots.mean() for row in report.table())


def test_calls_that_add_little_to_a_cache_are_left_out_by_default() -> None:
    model, ids = base(max_position_embeddings=256), tokens(1, 140)
    with torch.no_grad(), prune(model, few(), layers=[0]) as report:
        past = model(ids, use_cache=True)[CACHE]
        for _ in range(LAP):
            step = copy.deepcopy(past)
            model(ids[:, :1], **{CACHE: step})
            model(ids[:, :2], **{CACHE: step})
    assert [(row["calls"], row["measured"]) for row in report.table()] == [(1 + 2 * LAP, 1)] * 2


def test_a_layer_counts_calls_of_all_sizes() -> None:
    model = base()
    with prune(model, few(), layers=[1]) as report:
        for call in range(LAP):
            output(model, tokens(1 + call % 3, 3 + call % 5))
        assert measured(report) == [(1, 1)] * 2
        output(model, tokens(3, 5))
    assert measured(report) == [(1, 4)] * 2


# Copies and threads


def test_copies_of_a_pruned_model_measure_for_themselves() -> None:
    model = base()
    with prune(model, few()) as report:
        output(model)
        before = report.to_dict()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(output(other), output(model))
            for _ in range(LAP):
                output(other)
        assert [row["calls"] for row in report.table()] == [3] * 4
        assert figures(report) == [
            {name: row[name] for name in figures(report)[0]} for row in before["heads"] if row["layer"] == 0
        ]


def test_threads_leave_out_no_turn() -> None:
    model, count = base(), 2 * LAP
    with prune(model, few(), measure=True) as report:
        output(model)
    wanted = report.table()
    with prune(model, few()) as report, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: output(model), range(count)))
    for row, one in zip(report.table(), wanted, strict=True):
        assert (row["calls"], row["measured"], row["queries"]) == (count, 4, 2 * one["queries"])
        assert row["captured"] == pytest.approx(one["captured"])
        assert row["error"] == pytest.approx(one["error"])


# Intervals


def margin(x: Any, w: Any) -> float:
    """Half of the 95 % interval of Σx / Σw by the spread over units."""
    n, r = len(x), x.sum() / w.sum()
    variance = ((x - r * w) ** 2).sum() / (n - 1) / n / w.mean() ** 2
    return float(t.ppf(0.975, n - 1) * np.sqrt(variance))


def test_the_margin_of_a_head_is_the_spread_over_its_sequences() -> None:
    model = base("Esm")
    texts = [tokens(1, length) for length in (9, 14, 20, 31)]
    alone = []
    for ids in texts:
        with prune(model, few("Esm"), measure=True) as report:
            output(model, ids)
        assert all(row["captured_margin"] is None and row["error_margin"] is None for row in report.table())
        alone.append(report)
    with prune(model, few("Esm"), measure=True) as report:
        for ids in texts:
            output(model, ids)
    for place, row in enumerate(report.table()):
        rows = [one.table()[place] for one in alone]
        w = np.array([one["queries"] for one in rows])
        x = w * [one["captured"] for one in rows]
        assert (row["measured"], row["queries"]) == (4, w.sum())
        assert row["captured"] == pytest.approx(x.sum() / w.sum())
        assert row["captured_margin"] == pytest.approx(margin(x, w), rel=1e-3)
        assert row["error_margin"] > 0


def test_the_margin_of_a_model_is_the_spread_over_calls_of_layers() -> None:
    model = base("Esm", num_hidden_layers=4)
    with prune(model, few("Esm"), measure=True) as report:
        output(model)
    rows = report.table()
    w = np.array([sum(row["queries"] for row in rows if row["layer"] == layer) for layer in range(4)])
    x = np.array([sum(row["queries"] * row["captured"] for row in rows if row["layer"] == at) for at in range(4)])
    found = report.summary()
    assert (found["share"], found["measured_calls"], found["queries"]) == (1, 4, w.sum())
    assert found["captured"] == pytest.approx(x.sum() / w.sum())
    assert found["captured_margin"] == pytest.approx(margin(x, w), rel=1e-3)
    with prune(model, few("Esm")) as report:
        output(model)
    assert report.summary()["captured_margin"] is None  # of one layer, which does not tell about the others


def test_dense_heads_have_no_error_and_no_margin_of_it() -> None:
    model = base("Esm")
    with prune(model, Selection(size=60), measure=True) as report:
        output(model)
    for row in report.table():
        assert row["captured"] == pytest.approx(1)
        assert row["captured_margin"] < 1e-3
        assert 0 <= row["error"] < 1e-5


def test_a_head_whose_values_are_zero_has_no_error_and_is_cut_to_the_least_share() -> None:
    model = base()
    heads = model.base_model.layers[0].self_attn
    with torch.no_grad():
        heads.v_proj.weight[: heads.head_dim] = 0  # as in a head that was pruned away
    with prune(model, few(), measure=True) as report:
        output(model)
    first, second = report.table()[:2]
    assert (first["error"], first["error_margin"]) == (0, 0)
    assert second["error"] > 0
    given = {"input_ids": tokens(2, 200)}
    found = calibrate(model, given, target=1e-9, metric="logits", budgets=[0.3, 0.6])
    assert {head for head, share in found.items() if share == 0.3} == {(0, 0)}


def test_a_report_names_a_function_of_scores() -> None:
    def lengths(K: Any, V: Any) -> Any:
        return (K * K).sum(-1)

    with prune(base(), Selection(size=3, scores=lengths)) as report:
        assert report.options["selection"]["scores"] == "lengths"


def test_a_report_tells_what_is_known_of_the_model() -> None:
    model = base()
    with prune(model, few(), measure=True) as report:
        assert report.summary() == dict.fromkeys(report.summary()) | {
            **dict.fromkeys(("units", "measured", "measured_calls", "queries"), 0),
            "heads": 4,
        }
        output(model)
    summary = str(report).splitlines()[3]
    assert summary.startswith("all layers: captured 0.")
    assert " ± " in summary
    assert "measured 100.0% of 8 units (heads in sequences of calls), with " in summary
    with prune(model, few()) as report:
        output(model)
    *_, summary, _, note = str(report).splitlines()
    assert "measured 50.0% of 8 units" in summary
    assert note.startswith("-: not measured; by default layers take turns in calls of more than one token.")
    assert report.to_dict()["summary"] == report.summary()


def test_a_measure_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="measure is of type str; expected True, False or None"):
        prune(base(), few(), measure="all")  # type: ignore[arg-type]
