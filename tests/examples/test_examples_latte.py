"""The examples of training with latents: the sequences they make are what they say, and each runs to its end."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

FOLDER = Path(__file__).parents[2] / "examples" / "latte"
MIXERS = ("latte", "window", "macchiato-mixture", "macchiato-exclusive", "softmax")


def of_all_mixers(quick, name):
    written, printed = quick(name, "--threads", "1")
    assert all(mixer in printed for mixer in MIXERS)
    return written


@pytest.mark.thorough
def test_recall_writes_accuracies_of_all_mixers(quick):
    results = of_all_mixers(quick, "mqar")
    assert tuple(results["beyond the window"]) == MIXERS
    parts = (results["beyond the window"], results["latents"], results["any distance"]["results"])
    assert all(0 <= result["accuracy"] <= 1 for part in parts for result in part.values())


@pytest.mark.thorough
def test_extrapolation_writes_bits_that_no_mixer_has_fewer_of_than_is_possible(quick):
    results = of_all_mixers(quick, "extrapolation")
    bits = results["bits per token"]
    assert tuple(bits) == ("best possible", *MIXERS)
    for span, best in bits["best possible"].items():
        assert all(best < bits[mixer][span] < 5 for mixer in MIXERS)


@pytest.mark.thorough
def test_byte_model_writes_bits_and_what_latents_do(quick):
    results = of_all_mixers(quick, "byte_lm")["results"]
    assert tuple(results) == MIXERS
    sizes = [result["parameters"] for result in results.values()]
    assert max(sizes) - min(sizes) < 0.01 * max(sizes)
    for name, result in results.items():
        assert 0 < result["bits per byte"] < 12
        assert bool(result["latents"]) == (name not in ("window", "softmax"))
        for block in result["latents"]:
            assert 1 <= block["read"] <= block["used"] * (1 + 1e-12) <= 4 * (1 + 1e-12)
            assert all(0 <= block[key] <= 1 for key in ("window", "repeated") if key in block)


@pytest.mark.parametrize("gap", [1, 16])
def test_answers_are_the_values_of_their_keys_at_the_distances_stated(example, gap):
    mqar = example("mqar")
    task = mqar.Task(keys=12, values=20, pairs=6, length=60, gap=gap)
    tokens, targets, distances = (x.numpy() for x in mqar.sequences(task, 50, np.random.default_rng(3)))
    assert tokens.shape == targets.shape == distances.shape == (50, 60)
    assert set(np.unique(tokens[:, 0:12:2])) == set(range(12))
    assert set(np.unique(tokens[:, 1:12:2])) == set(range(12, 32))
    assert set(np.unique(tokens[:, 12:])) == {*range(12), task.filler}
    for row in range(50):
        pairs = {int(tokens[row, 2 * i]): (int(tokens[row, 2 * i + 1]), 2 * i + 1) for i in range(task.pairs)}
        assert len(pairs) == task.pairs
        asked = []
        for t in range(60):
            key, answer, distance = int(tokens[row, t]), int(targets[row, t]), int(distances[row, t])
            if answer < 0:
                assert distance == 0
                assert t < 2 * task.pairs or key == task.filler
                continue
            asked.append(key)
            assert answer == pairs[key][0]
            assert distance == t - pairs[key][1] >= gap
        assert sorted(asked) == sorted(pairs)


def test_sequences_are_those_of_their_seed_and_need_room(example):
    mqar = example("mqar")
    one, same, other = (mqar.sequences(mqar.Task(), 8, np.random.default_rng(s)).tokens for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    with pytest.raises(ValueError, match="no room"):
        mqar.sequences(mqar.Task(pairs=8, length=30, gap=16), 1, np.random.default_rng(0))


def test_accuracy_by_distance_counts_each_query_once(example):
    mqar = example("mqar")
    right = torch.tensor([True, False, True, True, False])
    assert mqar.by_distance(right, torch.tensor([1, 3, 4, 9, 10]), (1, 4, 10, 11)) == [0.5, 1.0, 0.0]


def test_the_best_reader_of_chains_follows_laplaces_rule_and_beats_the_symbols_themselves(example):
    extrapolation = example("extrapolation")
    (bits,) = extrapolation.Chains(symbols=3, concentration=0.5, length=6).best(np.array([[0, 1, 0, 1, 1, 2]]))
    odds = [0.5 / 1.5, 0.5 / 1.5, 1.5 / 2.5, 0.5 / 2.5, 0.5 / 3.5]
    np.testing.assert_allclose(bits, [-math.log2(p) for p in odds], rtol=1e-12)
    chains = extrapolation.Chains()
    drawn = chains.sample(20, 400, np.random.default_rng(0))
    assert (drawn.min(), drawn.max()) == (0, 15)
    assert chains.best(drawn)[:, 200:].mean() < 3 < 4


def test_files_for_validation_are_not_read_in_training(example):
    byte_lm = example("byte_lm")
    training, validation = (part.tobytes() for part in byte_lm.corpus())
    assert len(training) > 4 * len(validation) > 0
    assert validation[:4096] not in training
    batch = byte_lm.crops(np.arange(50, dtype=np.uint8), np.array([3, 40]), 6)
    assert batch.tokens.tolist() == [list(range(3, 9)), list(range(40, 46))]
    assert batch.targets.tolist() == [list(range(4, 10)), list(range(41, 47))]


def test_decoders_of_one_shape_have_equally_many_parameters_and_do_not_look_ahead(example):
    models = example("_models")
    shape = models.Shape(11, dim=16, depth=2, heads=2, latents=4, window=4, hidden=24, convolution=3)
    tokens = torch.randint(11, (2, 20), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 11
    sizes = []
    for name in models.MIXERS:
        torch.manual_seed(0)
        model = models.Decoder(name, shape)
        sizes.append(models.parameters(model))
        with torch.no_grad():
            before, after = model(tokens), model(changed)
        torch.testing.assert_close(before[:, :12], after[:, :12], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(before[:, 12:], after[:, 12:])
    assert max(sizes) - min(sizes) < shape.depth * (2 * shape.dim + 1)


def test_a_window_reads_no_further_than_it_is_wide(example):
    models = example("_models")
    torch.manual_seed(0)
    mixer = models.Softmax(8, heads=2, window=3)
    x = torch.randn(1, 9, 8)
    changed = x.clone()
    changed[:, 2] += 1
    moved = (mixer(x) - mixer(changed)).abs().amax(-1)[0] > 1e-7
    assert moved.tolist() == [False, False, True, True, True, False, False, False, False]
