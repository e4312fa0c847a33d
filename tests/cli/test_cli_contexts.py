"""The commands that read a text once with a decoder, and answer from what they keep; the pages that commands write."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_cli import assert_as_documented, assert_columns_explained, refused, run, shown_help  # noqa: E402
from test_cli_models import SIZES, WORDS, saved  # noqa: E402
from test_streams import check_once  # noqa: E402

from levattn.integrations import transformers as ours  # noqa: E402

CHAT = "{% for m in messages %}head {{ m['role'] }} of {{ m['content'] }} keys{% endfor %} are"


def llama(seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, eos_token_id=None, **SIZES
    )
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return saved(llama(), tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    folder = saved(llama(), tmp_path_factory.mktemp("chatting"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(" ".join(rng.choice(WORDS, 90)) + " <b>&", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def context(decoder, text, tmp_path_factory):
    path = tmp_path_factory.mktemp("context") / "a.safetensors"
    result = run("compress", decoder, "--text", text, "-o", path, "--budget", "1")
    assert (result.exit_code, result.stderr) == (0, "")
    return path


class Tags(HTMLParser):
    """Refuses a page whose tags are not balanced, or that reaches for anything outside."""

    def __init__(self, path):
        super().__init__()
        self.open, self.titles, self.words = [], [], []
        content = path.read_text(encoding="utf-8")
        assert not re.search(r"https?:|url\(|@import|<script|\bsrc=|\bhref=", content)
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta",):
            self.open.append(tag)
        self.titles += [value for name, value in attributes if name == "title"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "span":
            self.words.append(data)


def test_compress_says_what_it_keeps(decoder, text, tmp_path):
    path, html = tmp_path / "a.safetensors", tmp_path / "a.html"
    arguments = ("compress", decoder, "--text", text, "-o", path, "--budget", "0.5")
    result = run(*arguments, "--html", html)
    assert result.exit_code == 0, result.output
    assert_facts_explained(result.stdout)
    assert result.stderr.startswith("levattn: all heads are cut to 50%")
    assert result.stderr.count("\n") == 1
    shown = Tags(html)
    assert "".join(shown.words) == text.read_text(encoding="utf-8")
    kept = [int(x) for title in shown.titles for x in re.findall(r"kept by (\d+) of 4", title)]
    assert min(kept) < max(kept) == 4
    assert sum(title.startswith("layer ") for title in shown.titles) == 4
    found = json.loads(run(*arguments, "--tokens", "40", "--chunk", "30", "--json").stdout)
    assert_as_documented(found | {"heads": found["heads"]})
    assert found["positions"] == 40
    assert found["bytes"] <= 0.5 * found["dense_bytes"]


@pytest.mark.parametrize(("options", "bits"), [((), 8), (("--bits", "4"), 4), (("--bits", "16"), 16)])
def test_the_bits_of_entries_are_those_asked_for(decoder, text, tmp_path, options, bits):
    path = tmp_path / "a.safetensors"
    found = run("compress", decoder, "--text", text, "-o", path, "--budget", "0.3", "--json", *options)
    assert {row["bits"] for row in json.loads(found.stdout)["heads"]} == {bits}
    assert "--bits is 5, expected 4, 8 or 16" in refused(
        "compress", decoder, "--text", text, "-o", path, "--bits", "5", status=2
    )


def test_the_commands_print_on_every_standard_output(program, decoder, context, text):
    commands = {
        f"compress {decoder} --text {text} -o b.safetensors --budget 0.5 --html b.html": ("b.safetensors", "b.html"),
        f"ask {decoder} {context} few --max-tokens 3": (),
        f"profile {decoder} -o h.json --tasks 1 --positions 256 --html h.html": ("h.json", "h.html"),
    }
    for command, files in commands.items():
        check_once(program, command.split(), files)


def test_layers_that_slide_are_told_of(text, tmp_path):
    torch.manual_seed(0)
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 8}
    config = transformers.Gemma2Config(
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, **sliding, **SIZES
    )
    folder, file = saved(transformers.Gemma2ForCausalLM(config), tmp_path), tmp_path / "a.safetensors"
    result = run(
        "compress", folder, "--text", text, "-o", file, "--budget", "1", "--html", tmp_path / "a.html", "--json"
    )
    assert "1 of 2 layers slide and keep their window" in result.stderr
    assert [row["slides"] for row in json.loads(result.stdout)["heads"]] == [True, True, False, False]
    assert run("ask", folder, file, "the head", "--max-tokens", "3").exit_code == 0


def assert_facts_explained(printed):
    names = [line.partition(":")[0] for line in printed.splitlines()]
    block = shown_help("compress").partition("Output:\n")[2]
    assert re.findall(r"^    (\S.*?)  +", block, flags=re.MULTILINE) == names


def test_ask_answers_as_the_model_does_that_reads_the_whole_text(decoder, context, text):
    result = run("ask", decoder, context, "the head", "--max-tokens", "5", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert_as_documented(found)
    model = transformers.AutoModelForCausalLM.from_pretrained(decoder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(decoder)
    ids = tokenizer(text.read_text(encoding="utf-8") + "\nthe head", return_tensors="pt")["input_ids"]
    whole = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
    assert found["answer"] == tokenizer.decode(whole, skip_special_tokens=True)
    assert found["tokens"] == 5
    assert found["bytes"] == found["dense_bytes"]
    shown = run("ask", decoder, context, "the head", "--max-tokens", "5")
    assert shown.stdout.strip() == found["answer"]
    assert re.fullmatch(r"levattn: context of \d+ positions in .*; 5 tokens, the first after .*\n", shown.stderr)
    one = run("ask", decoder, context, "the head", "--max-tokens", "1", "--json")
    assert json.loads(one.stdout)["token_seconds"] is None


@pytest.mark.parametrize("begun", [True, False])
def test_a_chat_template_surrounds_text_and_question(chatting, text, tmp_path, begun):
    pytest.importorskip("jinja2")
    path = tmp_path / "a.safetensors"
    tokenizer = transformers.AutoTokenizer.from_pretrained(chatting)
    words = text.read_text(encoding="utf-8")
    if begun:
        assert run("compress", chatting, "--text", text, "-o", path, "--budget", "1").exit_code == 0
        whole = f"head user of {words}\n\nmany more keys are"
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(chatting)
        ours.compress(model, tokenizer("the " + words, return_tensors="pt")["input_ids"], 1.0).save(path)
        whole = f"the {words} head user of many more keys are"
    found = json.loads(run("ask", chatting, path, "many more", "--max-tokens", "4", "--json").stdout)
    model = transformers.AutoModelForCausalLM.from_pretrained(chatting)
    ids = tokenizer(whole, add_special_tokens=False, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    assert found["answer"] == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("words", ["", " \n\t "])
@pytest.mark.parametrize("command", ["compress", "evaluate", "inspect", "prune-report"])
def test_a_text_without_words_is_refused_whatever_stands_around_it(chatting, tmp_path, command, words):
    pytest.importorskip("jinja2")
    empty, output = tmp_path / "empty.txt", tmp_path / "a.safetensors"
    empty.write_text(words)
    more = ("-o", output) if command == "compress" else ()
    assert "empty.txt has 0 tokens; give a longer text" in refused(command, chatting, "--text", empty, *more)
    assert not output.exists()


def test_a_template_alone_is_no_text_and_no_question(chatting, text, tmp_path):
    pytest.importorskip("jinja2")
    arguments = ("compress", chatting, "--text", text, "-o", tmp_path / "a.safetensors", "--budget", "1")
    line = refused(*arguments, "--tokens", "3")  # of "head user of"
    assert "3 tokens of" in line
    assert "give more --tokens" in line
    assert run(*arguments, "--tokens", "4").exit_code == 0
    for question in ("", " "):
        assert "the question has no tokens" in refused("ask", chatting, tmp_path / "a.safetensors", question)


def test_what_cannot_be_asked_is_refused_in_one_line(decoder, context, text, tmp_path):
    other = saved(llama(1), tmp_path / "other")
    assert "was made with another model" in refused("ask", other, context, "the")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(context.read_bytes()[:1000])
    assert "is no compressed context, or is damaged" in refused("ask", decoder, damaged, "the")
    assert "make it with `levattn compress`" in refused("ask", decoder, tmp_path / "none.safetensors", "the")
    assert "the question has no tokens" in refused("ask", decoder, context, "")
    missing = ("compress", decoder, "--text", text, "-o", tmp_path / "a.safetensors", "--heads", tmp_path / "none")
    assert "make it with `levattn profile`" in refused(*missing)
    encoder = transformers.BertModel(transformers.BertConfig(num_attention_heads=4, **SIZES))
    folder = saved(encoder, tmp_path / "encoder")
    assert "generates no text; give a causal decoder" in refused("ask", folder, context, "the")
    refused("compress", decoder, "--text", text, "-o", "a.safetensors", "--budget", "0", status=2)
    refused("compress", decoder, "--text", text, "-o", "a.txt", status=2)
    refused("profile", decoder, "-o", "a.json", "--way", "both", status=2)


def test_a_profile_splits_the_budget(decoder, text, tmp_path, monkeypatch):
    heads, html, picture = (tmp_path / name for name in ("heads.json", "heads.html", "heads.png"))
    small = ("profile", decoder, "-o", heads, "--tasks", "2", "--positions", "256")
    result = run(*small, "--html", html, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert_columns_explained("profile", result.stdout)
    assert len(Tags(html).titles) == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = json.loads(run(*small, "--json").stdout)
    assert_as_documented(told)
    assert (told["refined"], told["trials"]) == (None, 6)
    more = (*small[:2], "-o", tmp_path / "more.txt.json", "--tasks", "1", "--positions", "256", "--rounds", "1")
    refined = json.loads(run(*more, "--refine", heads, "--json").stdout)
    assert_as_documented(refined)
    assert (refined["refined"], refined["trials"]) == (str(heads), 7)
    assert all(row["recall_error"] is not None for row in refined["heads"])
    assert "no such file; give --refine" in refused(*more, "--refine", tmp_path / "none.json")
    assert "way='reading'" in refused(*more, "--refine", heads, "--way", "reading")
    read = json.loads(run(*more, "--way", "reading", "--json").stdout)
    assert_as_documented(read)
    assert (read["way"], told["way"]) == ("reading", "cache")
    reading = (tmp_path / "more.txt.json").rename(tmp_path / "heads.reading.json")
    arguments = ("compress", decoder, "--text", text, "--heads", heads, "-o", tmp_path / "a.safetensors")
    compressed = run(*arguments, "--budget", "0.6")
    assert (compressed.exit_code, compressed.stderr) == (0, "")
    told_way = "levattn: the heads of the profile were cut for {}; make one with `levattn profile --way {}`"
    found = run(*arguments[:-4], "--heads", reading, "-o", tmp_path / "b.safetensors", "--budget", "0.6")
    assert (found.exit_code, found.stderr.strip()) == (0, told_way.format("reading", "cache"))
    pruned = ("prune-report", decoder, "--text", text, "--heads")
    found = run(*pruned, heads, "--budget", "0.6")
    assert (found.exit_code, found.stderr.strip()) == (0, told_way.format("cache", "reading"))
    pruned = (*pruned, reading)
    result = run(*pruned, "--budget", "0.6")
    assert (result.exit_code, result.stderr) == (0, "")
    refused(*pruned, "--budget", "24", status=2)
    assert "no such file" in refused(*pruned[:-1], tmp_path / "none.json")
    given, arguments = compressed.stdout.splitlines()[:3], ("compress", decoder, "--text", text, "--budget", "0.6")
    monkeypatch.setenv("LEVATTN_PROFILES", str(tmp_path))
    for heads, said in (
        ("auto", "the known profile heads splits"),
        ("HEADS", ""),
        ("none", "all heads are cut to 60%"),
    ):
        found = run(*arguments, "--heads", heads, "-o", tmp_path / "b.safetensors")
        assert found.stderr.startswith(f"levattn: {said}" if said else ""), found.stderr
        assert (found.stdout.splitlines()[:3] == given) is (heads != "none")
    monkeypatch.setenv("LEVATTN_PROFILES", str(tmp_path / "empty"))
    (tmp_path / "empty").mkdir()
    found = run(*arguments, "-o", tmp_path / "b.safetensors")
    assert "no known profile fits this model: smollm2-135m-instruct (is of another model)" in found.stderr


def test_slots_are_told_of_shares_and_names_may_have_blanks(decoder, text, tmp_path):
    found = run("compress", decoder, "--text", text, "--budget", "30", "-o", tmp_path / "a.safetensors")
    assert found.exit_code == 0
    assert "give --budget a share up to 1, which a profile splits" in found.stderr
    more = ("--text", text, "--budget", "0.5", "--max-tokens", "2", "--json")
    found = run("evaluate", decoder, *more, "--scores", "default, snapkv")
    assert found.exit_code == 0, found.output
    assert [row["scores"] for row in json.loads(found.stdout)["budgets"]][1:] == ["default", "snapkv"]


def test_the_page_of_prune_report(decoder, text, tmp_path):
    path = tmp_path / "a.html"
    result = run("prune-report", decoder, "--text", text, "--budget", "24", "--html", path)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("levattn: all heads are cut to 24 slots")
    assert [title.partition(":")[0] for title in Tags(path).titles] == [
        f"layer {layer}, head {head}" for layer in range(2) for head in range(2)
    ]
    refused("prune-report", decoder, "--text", text, "--html", "a.txt", status=2)


def answers(*arguments, lines=None):
    if lines is None:
        result = run("ask", *arguments, "--max-tokens", "4", "--json")
    else:
        more = ("--questions", "-", "--max-tokens", "4", "--json")
        result = run("ask", *arguments, *more, given="\n".join(lines))
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_many_questions_have_the_answers_of_each_alone(decoder, context, tmp_path):
    lines = ["the head", "", "few and many", "the head"]
    file = tmp_path / "questions.txt"
    file.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    alone = [answers(decoder, context, line)[0]["answer"] for line in lines if line]
    for found in (answers(decoder, context, lines=lines), answers(decoder, context, "--questions", file)):
        assert [row["question"] for row in found] == [line for line in lines if line]
        assert [row["answer"] for row in found] == alone
    shown = run("ask", decoder, context, "--questions", file, "--max-tokens", "4")
    pairs = zip(filter(None, lines), alone, strict=True)
    assert shown.stdout.splitlines() == [text for line, answer in pairs for text in (f"> {line}", answer)]
    assert shown.stderr.count("levattn: context of") == 3


def test_questions_that_follow_read_the_answers_before(decoder, context):
    first, second = answers(decoder, context, "--follow", lines=["the head", "few and many"])
    model = transformers.AutoModelForCausalLM.from_pretrained(decoder)
    cache = ours.CompressedCache.load(context, model)
    prompt = ours.Prompt(transformers.AutoTokenizer.from_pretrained(decoder))
    for row in (first, second):
        asked = prompt.question(row["question"], cache)
        found = cache.ask(model, asked, max_new_tokens=4, do_sample=False)
        assert row["answer"] == prompt.answers(found, asked)[0]


def test_wrong_lists_of_questions_are_refused(decoder, context, text, tmp_path):
    empty, some = tmp_path / "empty.txt", tmp_path / "some.txt"
    empty.write_text(" \n", encoding="utf-8")
    some.write_text("the head\tfew\nmany\n", encoding="utf-8")
    assert "expected one of QUESTION and --questions" in refused("ask", decoder, context, status=2)
    assert "expected one of" in refused("ask", decoder, context, "the", "--questions", empty, status=2)
    assert "has no questions; write one on each line" in refused("ask", decoder, context, "--questions", empty)
    nothing = run("ask", decoder, context, "--questions", "-", given="\n")
    assert (nothing.exit_code, "standard input has no questions" in nothing.stderr) == (1, True)
    assert "name a text file with --questions" in refused("ask", decoder, context, "--questions", tmp_path / "none")
    tried = ("evaluate", decoder, "--text", text)
    assert "has answers for some questions" in refused(*tried, "--questions", some)
    for lines, said in (("a\tX\na\tY\n", "has 'a' twice"), ("\tX\n", "question 1 of --questions is empty")):
        some.write_text(lines, encoding="utf-8")
        assert said in refused(*tried, "--questions", some)
    assert "expected one kind" in refused(*tried, "--budget", "0.5", "--budget", "20", status=2)
    assert "has a value twice" in refused(*tried, "--budget", "0.5", "--budget", "0.5", status=2)
    refused(*tried, "--method", "drop", status=2)


def test_evaluate_compares_budgets(decoder, text, tmp_path):
    questions, html = tmp_path / "questions.txt", tmp_path / "a.html"
    questions.write_text("the head\tfew\nmany more\tkeys\n", encoding="utf-8")
    arguments = ("evaluate", decoder, "--text", text, "--questions", questions, "--max-tokens", "4")
    result = run(*arguments, "--budget", "0.2", "--budget", "1", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert_as_documented(found)
    assert [row["budget"] for row in found["budgets"]] == [None, 1, 0.2]
    assert found["budgets"][1]["changed"] == 0
    assert [row["question"] for row in found["answers"]] == ["the head", "many more"] * 3
    shown = run(*arguments, "--html", html)
    assert shown.exit_code == 0, shown.output
    assert_columns_explained("evaluate", shown.stdout, without=("scores", "±changed", "±loss"))
    assert [line.split()[0] for line in shown.stdout.splitlines() if re.match(r" *(dense|0\.)", line)] == [
        *("dense", "0.5", "0.25", "0.12", "0.06", "0.03")
    ]
    Tags(html)


def test_evaluate_compares_scores_over_seeds(decoder, text, tmp_path):
    questions, html = tmp_path / "questions.txt", tmp_path / "a.html"
    questions.write_text("the head\nmany more\n", encoding="utf-8")
    arguments = ("evaluate", decoder, "--text", text, "--questions", questions, "--max-tokens", "4", "--budget", "0.3")
    asked = ("--scores", "default,snapkv,random", "--seeds", "2")
    result = run(*arguments, *asked, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert_as_documented(found)
    names = [(None, None), ("default", None), ("snapkv", None), ("random", 0), ("random", 1)]
    assert [(row["scores"], row["seed"]) for row in found["budgets"]] == names
    assert [(row["scores"], row["seed"]) for row in found["answers"][::2]] == names
    shown = run(*arguments, *asked, "--html", html)
    assert shown.exit_code == 0, shown.output
    assert_columns_explained("evaluate", shown.stdout)
    lines = [line.split()[:2] for line in shown.stdout.splitlines() if line.split()[:1] == ["0.3"]]
    assert lines == [["0.3", "default"], ["0.3", "snapkv"], ["0.3", "random"]]
    Tags(html)
    assert "<th>±loss</th>" in html.read_text(encoding="utf-8")
    assert "expected random among --scores" in refused(*arguments, "--seeds", "2", status=2)
    assert "has a name twice" in refused(*arguments, "--scores", "h2o,h2o", status=2)
    assert "expected one of residual" in refused(*arguments, "--scores", "h20", status=2)
    assert "compress alone does so" in refused(*arguments, "--scores", "h2o", "--method", "prune", status=2)


def test_many_slots_are_shown_whole(tmp_path):
    torch.manual_seed(0)
    sizes = {**SIZES, "max_position_embeddings": 2048, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(initializer_range=0.8, eos_token_id=None, **sizes)
    folder = saved(transformers.LlamaForCausalLM(config), tmp_path / "model")
    long, questions, html = (tmp_path / name for name in ("long.txt", "questions.txt", "a.html"))
    long.write_text(" ".join(np.random.default_rng(0).choice(WORDS, 1500)), encoding="utf-8")
    questions.write_text("the head\nmany more\n", encoding="utf-8")
    arguments = ("evaluate", folder, "--text", long, "--questions", questions, "--max-tokens", "24")
    budgets = ("--budget", "1234567", "--budget", "1234", "--budget", "1024")
    result = run(*arguments, *budgets, "--scores", "streaming", "--json", "--html", html)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [bool(row["changed"]) for row in found["budgets"]] == [False, False, True, True]
    assert found["changes_at"] == 1234
    page = html.read_text(encoding="utf-8")
    assert "<dt>answers change at</dt><dd>1234</dd>" in page
    assert "<dt>positions</dt><dd>1500</dd>" in page
    assert all(f"<td>{budget}</td>" in page for budget in (1234567, 1234, 1024))
