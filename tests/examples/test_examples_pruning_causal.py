"""The example of a pruned language model: its needles can be found, it runs to its end, and all slots are dense."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("rich")

FOLDER = Path(__file__).parents[2] / "examples" / "pruning"
METHODS = ("levattn", "row norm", "window only")


@pytest.fixture
def quick(example, tmp_path, monkeypatch, capsys):
    """Give a function that runs the example and returns what it printed, and the folder of the weights."""
    monkeypatch.setenv("LEVATTN_NUM_THREADS", "1")
    threads = torch.get_num_threads()

    def run(*more: str) -> str:
        given = ["--quick", "--out", str(tmp_path), "--methods", *METHODS, "--budgets", "25", "100", *more]
        assert example("causal").main(given) == 0
        return capsys.readouterr().out

    yield run, tmp_path
    torch.set_num_threads(threads)


def test_all_slots_are_dense_attention_and_fewer_are_not(quick):
    run, folder = quick
    results = json.loads(run("--json"))
    dense = results["dense"]
    assert results["context"] == 96
    assert results["dense keys"] == 48.5
    assert results["slots"]["25"]["most"] == 24
    assert results["slots"]["100"]["mean"] == 48.5
    assert 1 < dense["perplexity"] < 300
    assert [(run["method"], run["percent"]) for run in results["runs"]] == [(m, p) for m in METHODS for p in (25, 100)]
    for figures in results["runs"]:
        off = abs(figures["perplexity"] / dense["perplexity"] - 1)
        assert off < 1e-4 if figures["percent"] == 100 else 1e-6 < off < 1

    (weights,) = folder.iterdir()
    written = weights.stat().st_mtime_ns
    shown = run()
    assert weights.stat().st_mtime_ns == written
    assert f"{dense['perplexity']:.3f}" in shown
    assert all(re.search(rf"{method} +│ +\d\.\d{{4}} │ 1\.0000 │", shown) for method in METHODS)


@pytest.mark.parametrize("lines", [1, 4])
def test_a_needle_stands_well_before_its_question(example, lines):
    found = example("_text_model").needles(example("_text_model").corpus()[1], 20, 256, seed=3, lines=lines)
    assert found.shape == (20, 257)
    for row in found:
        text = bytes(row.tolist()).decode("latin-1")
        needles = re.findall(r"\nkey (\d{4}) = (\d{4})\n", text)
        question = re.search(r"\nkey (\d{4}) = (\d{4})$", text)
        assert len(set(needles)) == lines
        assert question is not None
        assert question.groups() in needles
        assert text.index(question[0].strip()) < 257 - 64


def test_answers_in_training_are_known_from_before(example):
    model = example("_text_model")
    rng = np.random.default_rng(0)
    batch = model.batch_of(model.corpus()[0], 40, 128, 0.5, rng)
    count = 0
    for row in range(40):
        text = bytes(batch.tokens[row].tolist()).decode("latin-1")
        flags = [tuple(part[row].tolist()) for part in (batch.answers, batch.hidden)]
        seen: dict[str, str] = {}
        for found in re.finditer(r"\nkey (\d{4}) = (\d{4})\n", text):
            digits = slice(found.start(2) - 1, found.end(2) - 1)  # of targets, which begin with the second byte
            known = found[1] in seen
            assert seen.setdefault(found[1], found[2]) == found[2]
            assert flags[0][digits] == (known,) * 4
            assert flags[1][digits] == (not known,) * 4
            assert flags[1][found.start(1) - 1 : found.end(1) - 1] == (True,) * 4
            count += known
        assert sum(flags[0]) % 4 == 0
        assert any(flags[0]) == (row < 20)
    assert count * 4 == int(batch.answers.sum())


def test_slots_are_counted_as_keys_are_read(example):
    from levattn.attention import Selection, Slots, causal_pruned_attention

    causal = example("causal")
    slots, n = Slots(selected=5, summaries=0, window=3, sinks=2, chunk=4), 50
    Q, K = np.random.default_rng(0).standard_normal((2, n, 4))
    read, _ = causal_pruned_attention(Q, K, np.eye(n), causal.parts(slots), return_state=True)
    assert causal.slots_read(slots, n) == pytest.approx((read > 0).sum(axis=1).mean())
    count = (read > 0).sum(axis=1)
    assert count[: 2 * slots.total].tolist() == [*range(1, 2 * slots.total + 1)]
    assert count[2 * slots.total :].max() == slots.total
    given = Selection(0.25).slots(512, causal=True)
    for use in causal.METHODS.values():
        assert use(given).slots(512, causal=True).total == given.total
