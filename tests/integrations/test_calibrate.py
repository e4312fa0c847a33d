"""Budgets chosen for a wanted loss: reached as promised, the same in every run, and read back from files."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from levattn.attention import Selection  # noqa: E402
from levattn.integrations.transformers import Calibration, calibrate, prune  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}


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


def batch(*shape, padded=0):
    ids = torch.randint(4, 61, shape, generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, shape[1] - padded :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def embeddings(model, inputs):
    with torch.no_grad():
        states = model(**inputs).last_hidden_state.double()
    mask = inputs["attention_mask"][..., None]
    return (states * mask).sum(1) / mask.sum(1)


@pytest.mark.parametrize("target", [1e-4, 1e-2])
def test_embeddings_are_as_near_as_was_wanted(encoder, target):
    inputs = batch(3, 48, padded=9)
    chosen = calibrate(encoder, inputs, target=target, budgets=(0.15, 0.3, 0.6))
    dense = embeddings(encoder, inputs)
    with prune(encoder, chosen):
        mine = embeddings(encoder, inputs)
    loss = float((1 - torch.nn.functional.cosine_similarity(mine, dense, dim=-1)).mean())
    assert loss == pytest.approx(chosen.reached, abs=1e-9)
    assert loss <= target
    assert set(chosen) == {(layer, head) for layer in range(2) for head in range(4)}


def test_a_looser_target_takes_no_larger_budgets(encoder):
    inputs = batch(2, 48)
    means = [calibrate(encoder, inputs, target=target, budgets=(0.2, 0.5)).mean for target in (1e-5, 1e-3, 1.9)]
    assert means[0] >= means[1] >= means[2]
    assert means[2] == pytest.approx(0.2)


@pytest.mark.parametrize("metric", ["logits", "perplexity"])
def test_decoders(decoder, metric):
    inputs = [batch(1, 40), batch(1, 33)]
    chosen = calibrate(
        decoder, inputs, target=0.02, metric=metric, budgets=[Selection(share, sinks=1) for share in (0.3, 0.45)]
    )
    assert chosen.reached <= 0.02
    assert chosen.selection == Selection(sinks=1, start=0)
    with torch.no_grad():
        dense = [decoder(**one).logits.double().log_softmax(-1) for one in inputs]
        with prune(decoder, chosen):
            mine = [decoder(**one).logits.double().log_softmax(-1) for one in inputs]
    if metric == "logits":
        sums = [(a.exp() * (a - b)).sum(-1) for a, b in zip(dense, mine, strict=True)]
        loss = sum(float(x.sum()) for x in sums) / sum(x.numel() for x in sums)
    else:
        bits = []
        for found in (mine, dense):
            rows = [x[:, :-1].gather(-1, one["input_ids"][:, 1:, None]) for x, one in zip(found, inputs, strict=True)]
            bits.append(-sum(float(x.sum()) for x in rows) / sum(x.numel() for x in rows))
        loss = math.exp(bits[0] - bits[1]) - 1
    assert loss == pytest.approx(chosen.reached, abs=1e-9)


def test_the_same_in_every_run(encoder):
    inputs = batch(2, 40)
    first, second = (calibrate(encoder, inputs, target=0.003, budgets=(0.2, 0.4)) for _ in range(2))
    assert dict(first) == dict(second)
    assert first.reached == second.reached


def test_layers_that_are_not_named_stay_dense(encoder):
    chosen = calibrate(encoder, batch(1, 40), target=1.9, budgets=(0.2,), layers=[1], heads=[0, 2])
    assert dict(chosen) == {(1, 0): 0.2, (1, 2): 0.2}


def test_progress_counts_the_calls(encoder):
    seen = []
    calibrate(
        encoder, batch(1, 30), target=1.9, budgets=(0.3,), progress=lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][0] <= seen[-1][1]


def test_a_file_gives_it_back(tmp_path):
    chosen = Calibration({(1, 0): 0.25, (0, 3): 1.0}, "BertModel", "embedding", 0.01, 0.004, Selection(window=4))
    chosen.save(tmp_path / "a.json")
    again = Calibration.load(tmp_path / "a.json")
    assert dict(again) == {(0, 3): 1.0, (1, 0): 0.25}
    kept = (chosen.model, chosen.metric, chosen.target, chosen.reached, chosen.selection)
    assert (again.model, again.metric, again.target, again.reached, again.selection) == kept


def test_selections_without_a_file_or_with_another_size_are_refused(tmp_path):
    facts = {(0, 0): 0.25}, "BertModel", "embedding", 0.01, 0.004
    with pytest.raises(ValueError, match="a function of scores, which no file holds"):
        Calibration(*facts, Selection(scores=torch.add)).save(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())
    for selection in (Selection(size=4), Selection(epsilon=0.1), Selection(scores=torch.ones(3))):
        with pytest.raises(ValueError, match="expected one with a budget alone"):
            Calibration(*facts, selection)
    with pytest.raises(TypeError, match="selection is of type dict; expected a Selection"):
        Calibration(*facts, {"sinks": 4})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"budgets": None}, TypeError, "budgets is of type NoneType; expected a mapping"),
        ({"budgets": {0: 0.5}}, ValueError, "budgets has the key 0; expected the numbers of a layer and a head"),
        ({"budgets": {(0, -1): 0.5}}, ValueError, r"budgets has the key \(0, -1\)"),
        ({"budgets": {(True, 0): 0.5}}, ValueError, r"budgets has the key \(True, 0\)"),  # as prune says
        ({"budgets": {(0, 0): "half"}}, TypeError, r"budgets\[\(0, 0\)\] is 'half'"),
        ({"budgets": {(0, 0): 7.0}}, ValueError, r"budgets\[\(0, 0\)\] is 7.0; expected a share of the keys in"),
        ({"budgets": {(0, 0): math.nan}}, ValueError, r"budgets\[\(0, 0\)\] is nan"),
        ({"model": None}, TypeError, "model is of type NoneType"),
        ({"metric": "loss"}, ValueError, "metric is 'loss'; expected one of embedding, logits, perplexity"),
        ({"target": "0.1"}, TypeError, "target is '0.1'"),
        ({"target": -1.0}, ValueError, "target is -1.0; expected a finite loss above 0"),
        ({"reached": math.inf}, ValueError, "reached is inf; expected a finite loss"),
        ({"target": None, "risk": 5, "confidence": 0.9, "texts": 9}, ValueError, "risk is 5"),
        ({"target": None, "risk": 0.1, "confidence": 0.9, "texts": -1}, ValueError, "texts is -1"),
        ({"target": None, "risk": 0.1, "confidence": 0.9, "texts": 9, "reached": 0.2}, ValueError, "from 0 to the ri"),
    ],
)
def test_a_calibration_that_no_file_would_give_back_is_refused(change, error, message):
    given = {"budgets": {(0, 0): 0.5}, "model": "BertModel", "metric": "logits", "target": 0.1, "reached": 0.05}
    with pytest.raises(error, match=message):
        Calibration(**given | change)


def test_budgets_may_be_an_array(encoder):
    inputs = batch(1, 20)
    found, expected = (calibrate(encoder, inputs, target=0.1, budgets=of) for of in (np.array([0.3, 0.5]), (0.3, 0.5)))
    assert dict(found) == dict(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "else"}, "its format is not 'levattn calibration'"),
        ({"version": 4}, "version 4"),
        ({"version": 0}, "version 0"),
        ({"version": 2}, "it is of version 2, and this release reads 3"),
        ({"metric": "none"}, "model or metric"),
        ({"budgets": [[0, 0, 1.5]]}, "budget 1.5 is not in"),
        ({"budgets": [[0, -1, 0.5]]}, "no numbers of a layer"),
        ({"budgets": [[0, 0, 0.5], [0, 0, 0.5]]}, "occurs twice"),
        ({"budgets": [[0, 0.5]]}, "no calibration"),
        ({"reached": "0"}, "target or reached"),
        ({"selection": 3}, "selection is no mapping"),
        ({"selection": {"scores": [1]}}, "selection has scores without a name"),
        ({"selection": {"chunk": 1}}, "selection has an option of no Selection"),
        ({"selection": {"window": -1}}, "window is -1"),
        ({"target": 10**400}, "no calibration"),
        ({"target": None}, "risk or confidence is no number"),
        ({"risk": 0.1}, "a target, and risk"),
    ],
)
def test_foreign_files_are_refused_with_the_reason(tmp_path, change, message):
    path = tmp_path / "a.json"
    Calibration({(0, 0): 0.25}, "BertModel", "embedding", 0.01, 0.004).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        Calibration.load(path)
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="is not JSON"):
        Calibration.load(path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": 0}, ValueError, "target is 0"),
        ({"metric": "loss"}, ValueError, "metric is 'loss'"),
        ({"budgets": (1.0,)}, ValueError, "budgets is 1.0"),
        ({"metric": "logits"}, ValueError, "returns no logits"),
        ({"inputs": []}, ValueError, "inputs is empty"),
        ({"budgets": 0.25}, TypeError, "budgets is 0.25; expected a list of shares"),
        ({"budgets": None}, TypeError, "budgets is None; expected a list of shares"),
        ({"budgets": "0.25"}, TypeError, "budgets is '0.25'; expected a list of shares"),
        ({"budgets": {0.25: 1}}, TypeError, "budgets is .0.25: 1.; expected a list of shares"),
        ({"budgets": []}, ValueError, "budgets is empty; expected at least one share"),
        ({"budgets": (0.5, Selection(0.3, sinks=1))}, ValueError, "differ in more than their budgets"),
        (
            {"budgets": (Selection(size=4),)},
            ValueError,
            r"budgets has Selection\(size=4\); expected selections with a share",
        ),
        (
            {"budgets": tuple(Selection(share, scores=torch.nn.Bilinear(8, 8, 1)) for share in (0.3, 0.5))},
            ValueError,
            "differ in more than their budgets",
        ),
        ({"heads": 5}, TypeError, "heads is 5; expected numbers of heads"),
    ],
)
def test_errors(encoder, options, error, message):
    with pytest.raises(error, match=message):
        calibrate(encoder, **{"inputs": batch(1, 20), "target": 0.1} | options)


@pytest.mark.parametrize("metric", ["embedding", "logits", "perplexity"])
def test_a_loss_that_is_no_number_reaches_no_target(encoder, decoder, metric):
    model, inputs = encoder, batch(2, 20)
    if metric == "embedding":
        inputs["attention_mask"][0] = 0
    else:
        model = copy.deepcopy(decoder)
        model.lm_head.weight.data[7] = math.nan
    with pytest.raises(ValueError, match="a text whose loss is not a number; expected texts with an unmasked token"):
        calibrate(model, inputs, target=0.1, metric=metric, budgets=(0.3,))


def test_models_that_train_are_refused(encoder):
    encoder.train()
    try:
        with pytest.raises(ValueError, match="training mode"):
            calibrate(encoder, batch(1, 20), target=0.1)
    finally:
        encoder.eval()
