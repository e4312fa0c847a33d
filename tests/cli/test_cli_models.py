"""The commands that look at models in folders."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_cli import assert_as_documented, assert_columns_explained, refused, run, shown_help  # noqa: E402
from test_streams import check_once  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

WORDS = ["the", "keys", "of", "a", "head", "are", "few", "and", "many", "more"]


def saved(model, folder):
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    model.eval().save_pretrained(folder)
    return folder


# Before 5 of transformers BERT and RoBERTa go past the attention interface; Splinter is BERT under another name
INTERFACE = int(transformers.__version__.split(".")[0]) >= 5
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 11}


def kind_of_encoder():
    return transformers.BertModel if INTERFACE else transformers.SplinterModel


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    torch.manual_seed(0)
    kind = kind_of_encoder()
    config = kind.config_class(num_attention_heads=4, initializer_range=0.3, **SIZES)
    return saved(kind(config), tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, **SIZES)
    return saved(transformers.LlamaForCausalLM(config), tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def roberta(tmp_path_factory):
    config = transformers.RobertaConfig(num_attention_heads=4, max_position_embeddings=66, pad_token_id=1, **SIZES)
    return saved(transformers.RobertaModel(config), tmp_path_factory.mktemp("roberta"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(" ".join(rng.choice(WORDS, 90)), encoding="utf-8")
    return path


def test_inspect_shows_each_layer_and_head(encoder, text, tmp_path):
    result = run("inspect", encoder, "--text", text, "--epsilon", "0.2", "--json", "--plot", tmp_path / "a.png")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert_as_documented(found)
    assert found["tokens"] == 90
    assert [(row["layer"], row["head"]) for row in found["heads"]] == [(i, j) for i in range(2) for j in range(4)]
    for row in found["heads"]:
        assert row["n"] == 90
        assert row["d"] == row["rank"] == 8
        assert row["bound"] == pytest.approx(8 / 0.2)
        assert not row["vacuous"]
        assert 0 <= row["size"] <= row["bound"]
        assert 0 <= row["captured"] <= 1 + 1e-9
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_inspect_prints_a_table(decoder, encoder, text):
    result = run("inspect", decoder, "--text", text, "--tokens", "40", "--epsilon", "0.05")
    assert result.exit_code == 0, result.output
    assert "vacuous" in result.stdout  # 8 / 0.05 keys are more than 40
    assert result.stdout.count("\n") > 4
    assert re.search(r"^mean over heads: \d+% of the keys hold \d+% of the softmax mass$", result.stdout, re.MULTILINE)
    without_heavy = run("inspect", encoder, "--text", text, "--tokens", "40", "--epsilon", "1").stdout
    rows = [line.split() for line in without_heavy.splitlines() if line.startswith("    0")]
    assert [row[-2:] for row in rows] == [["0", "-"]] * 4


@pytest.mark.parametrize("command", ["inspect", "prune-report"])
def test_the_commands_print_on_every_standard_output(program, encoder, text, command):
    files = ("a.svg",) if command == "inspect" else ("a.svg", "a.html")
    places = [word for name in files for word in ("--plot" if name == "a.svg" else "--html", name)]
    check_once(program, [command, str(encoder), "--text", str(text), "--tokens", "40", *places], files)


@pytest.mark.skipif(not INTERFACE, reason="RoBERTa of this transformers goes past the attention interface")
def test_positions_that_begin_after_padding_are_fewer(roberta, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("of a head " * 30, encoding="utf-8")  # no token is that of padding, which has no position
    result = run("inspect", roberta, "--text", path, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"] == 64


@pytest.mark.parametrize("budget", ["0.3", "1", "24"])
def test_prune_report_of_an_encoder(encoder, text, budget):
    result = run("prune-report", encoder, "--text", text, "--budget", budget, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["perplexity"] is found["dense_perplexity"] is None
    assert found["embedding_cosine"] <= 1 + 1e-9
    if budget == "1":
        assert found["embedding_cosine"] == pytest.approx(1, abs=1e-6)
    else:
        assert_as_documented(found)
        assert len(found["heads"]) == 8
        assert all(0 < row["slots"] <= 27 for row in found["heads"])


def test_the_profile_of_an_encoder_is_read(encoder, text, tmp_path):
    heads = tmp_path / "heads.json"
    heads.write_text("[]", encoding="utf-8")
    for budget in ("0.3", "1"):
        said = refused("prune-report", encoder, "--text", text, "--budget", budget, "--heads", heads)
        assert "is no head profile" in said


def test_a_budget_of_all_keys_prunes_no_head(encoder, text, tmp_path):
    files = ("--plot", tmp_path / "a.svg", "--html", tmp_path / "a.html")
    result = run("prune-report", encoder, "--text", text, "--budget", "1", *files)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("all heads are dense\nembedding cosine: ")


def test_prune_report_of_a_decoder(decoder, text, tmp_path):
    result = run("prune-report", decoder, "--text", text, "--budget", "24", "--plot", tmp_path / "a.svg")
    assert result.exit_code == 0, result.output
    assert "dense perplexity" in result.stdout
    assert "cosine" not in result.stdout
    assert (tmp_path / "a.svg").read_bytes().lstrip().startswith(b"<?xml")


@pytest.mark.parametrize("command", ["inspect", "prune-report"])
def test_what_is_no_model_is_refused_in_one_line(command, text, tmp_path):
    assert "no config.json" in refused(command, tmp_path, "--text", text)
    assert "no such folder; models are read from disk" in refused(command, tmp_path / "none", "--text", text)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_model_is_refused_in_one_line(encoder, text, tmp_path, name):
    folder = shutil.copytree(encoder, tmp_path / "model")
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    line = refused("inspect", folder, "--text", text)
    assert line.startswith(f"levattn: {folder}: transformers cannot load this model (")


@pytest.mark.parametrize("command", ["inspect", "prune-report"])
def test_help_has_examples_that_run_and_explains_every_column(encoder, text, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = shown_help(command)
    for line in re.findall(rf"^    levattn ({command} .*)$", shown, flags=re.MULTILINE):
        result = run(*line.replace("MODEL", str(encoder)).replace("book.txt", str(text)).split())
        assert result.exit_code == 0, line
        if "--json" not in line:
            assert_columns_explained(command, result.stdout)


def test_wrong_options(encoder, text, tmp_path):
    refused("prune-report", encoder, "--text", text, "--budget", "1.5", status=2)
    latin, empty = tmp_path / "latin.txt", tmp_path / "empty.txt"
    latin.write_bytes("déjà".encode("latin-1"))
    empty.write_text("")
    for path, message in (
        (tmp_path / "none.txt", "none.txt: no such file; name a text"),
        (tmp_path, "is a folder"),
        (latin, "is not UTF-8 text"),
        (empty, "tokens; give a longer text"),
    ):
        assert message in refused("inspect", encoder, "--text", path)
    picture = tmp_path / "no" / "a.png"
    assert "there is no folder" in refused("inspect", encoder, "--text", text, "--plot", picture)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_converted_model_is_the_same(decoder, tmp_path, dtype):
    folder = tmp_path / "new"
    result = run("convert", decoder, folder, *(() if dtype is None else ("--dtype", dtype)))
    assert result.exit_code == 0, result.output
    assert f"dtype: {dtype or 'float32'}\n" in result.stdout
    first, second = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (decoder, folder)
    )
    assert second.dtype == getattr(torch, dtype or "float32")
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one.to(second.dtype), other), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]
    ids = [
        transformers.AutoTokenizer.from_pretrained(path)(" ".join(WORDS))["input_ids"] for path in (decoder, folder)
    ]
    assert ids[0] == ids[1]
    assert "name a new folder" in refused("convert", decoder, folder)
    assert "there is no folder" in refused("convert", decoder, tmp_path / "none" / "new")


def test_a_model_whose_head_would_be_lost_is_not_converted(tmp_path):
    config = transformers.BertConfig(num_attention_heads=4, **SIZES)
    folder = saved(transformers.BertForSequenceClassification(config), tmp_path / "model")
    assert "whose head would be lost" in refused("convert", folder, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
