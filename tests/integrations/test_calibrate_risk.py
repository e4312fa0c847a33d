"""Budgets at a risk: the tests of it against sums written out here, and what is tested, text by text.

Inside: p-values and their order are judged, of which a result shows the last.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from levattn.attention import Selection  # noqa: E402
from levattn.integrations.transformers import Calibration, calibrate, prune  # noqa: E402
from levattn.integrations.transformers.budget_search import dealt, needed_for  # noqa: E402
from levattn.integrations.transformers.losses import Losses, count_shown, least_texts, p_value  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
RISK = {"risk": 0.1, "confidence": 0.9}  # 22 tested texts show it if they have no loss


def at_most(k, n, p):
    """The probability of at most k heads in n throws."""
    return math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


def named_p_value(total, n, risk):
    """The p-value of the sources, term by term."""
    mean = total / n
    hoeffding = 1.0
    if mean < risk:
        hoeffding = ((1 - risk) / (1 - mean)) ** (n * (1 - mean))
        if mean > 0:
            hoeffding *= (risk / mean) ** (n * mean)
    return min(1.0, hoeffding, math.e * at_most(math.ceil(total), n, risk))


@pytest.mark.parametrize("n", [1, 7, 40, 230])
@pytest.mark.parametrize("risk", [0.01, 0.1, 0.6])
def test_p_values_are_those_of_the_sources(n, risk):
    for total in (0.0, 0.004 * n, 0.3, 0.09 * n, 0.5 * n, 0.999 * n, n):
        # Ratios of probabilities near 1 to the power n: about n roundings.
        assert p_value(total, n, risk) == pytest.approx(named_p_value(total, n, risk), rel=1e-11)


@pytest.mark.parametrize(("n", "risk"), [(5, 0.3), (40, 0.1), (150, 0.02)])
@pytest.mark.parametrize("excess", [1.0, 1.3])
def test_a_p_value_is_seldom_small_where_the_risk_is_exceeded(n, risk, excess):
    """Losses of 0 and 1, whose sums have known probabilities: the value is at most u with probability at most u."""
    values = [p_value(float(total), n, risk) for total in range(n + 1)]
    assert values == sorted(values)
    for total, value in enumerate(values):
        assert at_most(total, n, risk * excess) <= value * (1 + 1e-9)


@pytest.mark.parametrize(("risk", "confidence"), [(0.02, 0.95), (0.1, 0.9), (0.5, 0.75), (0.7, 0.2), (0.003, 0.999)])
def test_the_least_number_of_texts_without_a_loss(risk, confidence):
    least = least_texts(0.0, risk, confidence)
    assert p_value(0.0, least, risk) <= 1 - confidence
    assert least == 1 or p_value(0.0, least - 1, risk) > 1 - confidence
    assert least == next(n for n in range(1, 10**4) if (1 - risk) ** n <= (1 - confidence) * (1 + 1e-12))
    needed = needed_for(least)
    assert needed - math.ceil(needed / 4) >= least > (needed - 1) - math.ceil((needed - 1) / 4)


@pytest.mark.parametrize("mean", [0.004, 0.01, 0.019])
def test_the_number_of_texts_with_a_loss_suffices(mean):
    enough = least_texts(mean, 0.02, 0.95)
    assert p_value(mean * enough, enough, 0.02) <= 0.05
    assert p_value(mean * enough / 2, enough // 2, 0.02) > 0.05
    assert least_texts(0.02, 0.02, 0.95) is None
    assert least_texts(0.3, 0.02, 0.95) is None


def test_the_tests_end_at_the_first_that_fails():
    losses = np.zeros((30, 4))
    losses[:, 2] = 0.5
    assert count_shown(losses, **RISK) == 2
    assert count_shown(losses[:, 2:], **RISK) == 0
    assert count_shown(losses[:, :2], **RISK) == 2


def most_likely(repetitions, probability, failure):
    """The least count that is exceeded with at most the probability `failure`."""
    return next(k for k in range(repetitions) if 1 - at_most(k, repetitions, probability) <= failure)


@pytest.mark.parametrize(("n", "risk", "spread"), [(80, 0.1, 0.0), (25, 0.3, 0.2), (400, 0.05, 0.5)])
def test_seldom_is_one_shown_that_has_a_larger_loss(n, risk, spread):
    """The texts with a loss grow in number from candidate to candidate; the fifth is above the risk by a thousandth.

    The number of wrong runs has a binomial distribution with at most the level. Were the seed not fixed, the test
    would fail by chance with probability below 1e-6.
    """
    level, repetitions = 0.1, 1000
    rng = np.random.default_rng(0)
    shares = np.array([0.2, 0.5, 0.7, 0.9, 1.001, 1.02, 1.5])
    wrong = shown = 0
    for _ in range(repetitions):
        size = 1 - spread * rng.random((n, 1))  # of the mean 1 - spread / 2
        losses = np.where(rng.random((n, 1)) < shares * risk / (1 - spread / 2), size, 0.0)
        count = count_shown(losses, risk, 1 - level)
        wrong += count > 4
        shown += count > 0
    assert wrong <= most_likely(repetitions, level, 1e-6)
    assert wrong > 0  # the bound is near enough to be of use
    assert shown > repetitions / 2


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    config = transformers.EsmConfig(num_attention_heads=4, initializer_range=0.5, pad_token_id=1, **SIZES)
    return transformers.EsmModel(config, add_pooling_layer=False).eval()


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, eos_token_id=None, **SIZES
    )
    return transformers.LlamaForCausalLM(config).eval()


def batch(count, length, seed=3, lengths=5):
    """Texts of so many lengths, padded."""
    ids = torch.randint(4, 61, (count, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(count):
        mask[row, length - row % lengths :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def texts_of(batches):
    """The texts one by one, without padding."""
    return [
        {"input_ids": ids[None, mask.bool()]}
        for one in batches
        for ids, mask in zip(one["input_ids"], one["attention_mask"], strict=True)
    ]


def clipped_loss(model, metric, budgets, text):
    with torch.no_grad():
        dense = model(**text)
        with prune(model, budgets):
            mine = model(**text)
    if metric == "embedding":
        a, b = (x.last_hidden_state[0].double().mean(0) for x in (mine, dense))
        loss = 1 - float(a @ b / a.norm() / b.norm())
    else:
        a, b = (x.logits[0].double().log_softmax(-1) for x in (mine, dense))
        if metric == "logits":
            loss = float((b.exp() * (b - a)).sum(-1).mean())
        else:
            ids = text["input_ids"][0, 1:, None]
            loss = math.exp(float((b - a)[:-1].gather(-1, ids).mean())) - 1
    return min(max(loss, 0.0), 1.0)


@pytest.mark.parametrize(("metric", "risk"), [("embedding", 0.2), ("logits", 0.3), ("perplexity", 0.3)])
def test_every_text_but_the_fourths_was_tested(encoder, decoder, monkeypatch, metric, risk):
    monkeypatch.setattr("levattn.integrations.transformers.budget_search._CANDIDATES", 4)  # for time
    model = encoder if metric == "embedding" else decoder
    shares = (0.6, 0.9) if metric == "embedding" else (0.3, 0.48)  # causal attention with half of the keys is dense
    inputs = [batch(21, 24, lengths=2), batch(1, 20, seed=4), batch(18, 23, seed=5, lengths=1)]
    chosen = calibrate(
        model,
        inputs,
        metric=metric,
        risk=risk,
        confidence=0.9,
        budgets=[Selection(share, sinks=1) for share in shares],
    )
    losses = [
        clipped_loss(model, metric, chosen, text) for place, text in enumerate(texts_of(inputs)) if place % 4 != 0
    ]
    assert (chosen.risk, chosen.confidence, chosen.texts, chosen.target) == (risk, 0.9, 30, None)
    assert chosen.texts == len(losses)
    assert chosen.reached == pytest.approx(np.mean(losses), abs=1e-6)  # of float32, alone and in a batch
    assert named_p_value(sum(losses), len(losses), risk) <= 0.1 * (1 + 1e-4)
    assert chosen.mean < 1
    assert chosen.selection == Selection(sinks=1, start=0)


def test_what_is_tested_is_chosen_without_the_tested_texts(encoder, monkeypatch):
    tried = []

    def seen(losses, batches, candidates):
        tried.append([dict(one) for one in candidates])
        return measured(losses, batches, candidates)

    measured = Losses.of_texts
    monkeypatch.setattr(Losses, "of_texts", seen)
    first, second = batch(40, 24), batch(40, 24, seed=9)
    fourths = torch.arange(40) % 4 == 0
    second["input_ids"][fourths] = first["input_ids"][fourths]
    for inputs in (first, second):
        calibrate(encoder, inputs, budgets=(0.5, 0.8), **RISK)
    assert tried[0] == tried[2]
    assert tried[1] == tried[3]
    means = [sum(one.values()) for one in tried[1]]
    assert means == sorted(means, reverse=True)
    assert 1 < len(set(means)) == len(means) <= 12
    for large, small in zip(tried[1], tried[1][1:], strict=False):
        assert all(large[head] >= small[head] for head in large)


def test_a_looser_risk_takes_no_larger_budgets(encoder):
    inputs = batch(40, 32)
    means = [calibrate(encoder, inputs, risk=risk, confidence=0.9, budgets=(0.2, 0.5)).mean for risk in (0.15, 0.9)]
    assert means[0] >= means[1] == pytest.approx(0.2)


@pytest.mark.parametrize("sizes", [(17,), (1,) * 9, (3, 1, 8, 2), (4, 4)])
def test_texts_are_dealt_out_by_their_number(encoder, sizes):
    numbers = torch.arange(sum(sizes))
    batches = [
        {
            "input_ids": part[:, None],
            "position_ids": torch.arange(1)[None],
            "use_cache": False,
            "scale": torch.ones(()),
        }
        for part in numbers.split(sizes)
    ]
    choosing, testing = dealt(encoder, batches, risk=0.9, confidence=0.1)
    found = [torch.cat([one["input_ids"][:, 0] for one in part]).tolist() for part in (choosing, testing)]
    assert found == [numbers[numbers % 4 == 0].tolist(), numbers[numbers % 4 != 0].tolist()]
    assert all(one["position_ids"].shape == (1, 1) and one["use_cache"] is False for one in choosing + testing)


def test_progress_counts_the_calls(encoder):
    seen = []
    calibrate(encoder, [batch(20, 20)] * 2, progress=lambda *so_far: seen.append(so_far), budgets=(0.8,), **RISK)
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][0] <= seen[-1][1] == 2 * (1 + 1 + 12) + 2 * (1 + 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "target is None and risk is None; expected one of them"),
        ({"target": 0.1, "risk": 0.1}, r"target is 0\.1 and risk is 0\.1; expected one of them"),
        ({"target": 0.1, "confidence": 0.9}, r"confidence is 0\.9 and target is given; expected confidence with risk"),
        ({"risk": 0}, "risk is 0; expected a number above 0 and below 1"),
        ({"risk": 1.0}, r"risk is 1\.0; expected"),
        ({"risk": "0.1"}, r"risk is '0\.1'; expected"),
        ({"risk": math.nan}, "risk is nan; expected"),
        ({"risk": 0.1, "confidence": 1}, "confidence is 1; expected a number above 0 and below 1"),
        ({"risk": 0.1, "confidence": True}, "confidence is True; expected"),
    ],
)
def test_errors_of_arguments(encoder, options, message):
    wrong_type = any(isinstance(value, str | bool) for value in options.values())
    with pytest.raises(TypeError if wrong_type else ValueError, match=message):
        calibrate(encoder, batch(4, 20), **options)


def test_too_few_texts_name_how_many_would_do(encoder):
    message = r"inputs has 29 texts, of which 21 are for the test of .*; expected at least 30 texts, 22 of them"
    with pytest.raises(ValueError, match=message):
        calibrate(encoder, batch(29, 20), **RISK)
    with pytest.raises(ValueError, match=r"expected at least 199 texts, 149 of them for the test"):
        calibrate(encoder, batch(40, 20), risk=0.02)
    assert calibrate(encoder, batch(30, 30), budgets=(0.9,), heads=[0], **{**RISK, "risk": 0.101}).texts == 22


def test_a_loss_that_shows_no_risk_names_how_many_texts_would_do(encoder, monkeypatch):
    measured = Losses.of_texts
    for loss, message in (
        (0.05, r"have a mean loss of 0\.05\. .*at least 184 texts of that loss\. Give more"),
        (0.2, "below the risk. Give a larger"),
    ):
        monkeypatch.setattr(Losses, "of_texts", lambda *given, loss=loss: 0 * measured(*given) + loss)
        with pytest.raises(ValueError, match=message):
            calibrate(encoder, batch(40, 20), budgets=(0.5,), **RISK)


def test_texts_that_cannot_be_told_apart_or_are_empty(encoder):
    inputs = batch(40, 20)
    with pytest.raises(ValueError, match=r"inputs has tree of shape \(3, 40\) in a batch of 40 texts; expected a row"):
        calibrate(encoder, {**inputs, "tree": torch.zeros(3, 40)}, **RISK)
    with pytest.raises(ValueError, match="inputs has a batch of attention_mask; expected one with a tensor input_ids"):
        calibrate(encoder, {"attention_mask": inputs["attention_mask"]}, **RISK)
    inputs["attention_mask"][5] = 0
    with pytest.raises(ValueError, match="a text whose loss is not a number"):
        calibrate(encoder, inputs, budgets=(0.5,), **RISK)
    inputs["attention_mask"][::4] = 0
    with pytest.raises(ValueError, match="no output of a head to measure in every fourth text"):
        calibrate(encoder, inputs, budgets=(0.5,), **RISK)


def at_risk():
    return Calibration({(0, 0): 0.25}, "BertModel", "embedding", None, 0.004, risk=0.02, confidence=0.95, texts=300)


def test_a_file_gives_it_back(tmp_path):
    chosen = at_risk()
    assert "embedding 0.004 on 300 texts (risk at most 0.02 with confidence 0.95)" in repr(chosen)
    chosen.save(tmp_path / "a.json")
    again = Calibration.load(tmp_path / "a.json")
    assert vars(again) == vars(chosen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": 0.01}, "a target, and risk"),
        ({"risk": 1.5}, "risk or confidence"),
        ({"risk": None}, "risk or confidence"),
        ({"confidence": "0.9"}, "risk or confidence"),
        ({"confidence": 0}, "risk or confidence"),
        ({"reached": 0.03}, "reached is no number from 0 to the risk"),
        ({"reached": None}, "reached is no number"),
        ({"texts": 0}, "texts is no number of texts"),
        ({"texts": True}, "texts is no number of texts"),
        ({"texts": 30.0}, "texts is no number of texts"),
    ],
)
def test_damaged_files_are_refused_with_the_reason(tmp_path, change, message):
    path = tmp_path / "a.json"
    at_risk().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        Calibration.load(path)


@pytest.mark.parametrize(
    "losses",
    [
        {"target": None},
        {"target": 0.1, "risk": 0.1, "confidence": 0.9, "texts": 30},
        {"target": None, "risk": 0.1},
        {"target": 0.1, "texts": 30},
    ],
)
def test_a_calibration_has_a_target_or_a_risk(losses):
    with pytest.raises(ValueError, match=r"expected (one|all) of them"):
        Calibration({(0, 0): 0.25}, "BertModel", "embedding", reached=0.0, **losses)
