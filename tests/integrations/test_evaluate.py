"""Documents and questions in a chat template, and the comparison of answers with those of a dense cache."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import CACHE, SIZES  # noqa: E402
from scipy.stats import binom  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: E402
from tokenizers import decoders as decoders_of_tokens  # noqa: E402

from levattn.attention import Selection  # noqa: E402
from levattn.integrations.transformers import Prompt, compress, evaluate, head_profile, prune  # noqa: E402

WORDS = [
    "the",
    "keys",
    "of",
    "a",
    "head",
    "are",
    "few",
    "and",
    "many",
    "more",
    "<user>",
    "<model>",
    "<end>",
    "be",
    ".",
]
CHAT = (
    "{% for m in messages %}{{ '<user> be . ' if m['role'] == 'user' else '<model> ' }}{{ m['content'] }} <end> "
    "{% endfor %}{% if add_generation_prompt %}<model> {% endif %}"
)
pytestmark = pytest.mark.filterwarnings("ignore::levattn.RecallWarning")


def tokenizer_of(template: str | None = None) -> Any:
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *WORDS])}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=own, unk_token="[UNK]", eos_token="<end>")
    found.chat_template = template
    return found


def model_of(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "max_position_embeddings": 400, "vocab_size": len(WORDS) + 1, "num_key_value_heads": 2, **more}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


def document(words: int, seed: int = 0) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS[:10], words))


QUESTIONS = ["few keys", "and many more are", "a head of"]


def test_a_conversation_has_the_tokens_of_its_template() -> None:
    pytest.importorskip("jinja2")
    model, tokenizer = model_of(), tokenizer_of(CHAT)
    prompt, text = Prompt(tokenizer), document(40)
    assert prompt.has_template
    cache, turns, words = compress(model, prompt.document(text), 1.0), [], f"{text}\n\n"
    for question in QUESTIONS:
        asked = prompt.question(question, cache)
        found = cache.ask(model, asked, max_new_tokens=5, do_sample=False)
        turns += [("user", words + question), ("assistant", prompt.answers(found, asked)[0])]
        words = ""
    messages = [{"role": role, "content": content} for role, content in turns]
    whole = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert cache.tokens[0, :-5].tolist() == expected


def test_an_answer_that_has_ended_its_message_is_not_ended_again() -> None:
    pytest.importorskip("jinja2")
    model, tokenizer = model_of(), tokenizer_of(CHAT)
    prompt = Prompt(tokenizer)
    end = tokenizer("<end>")["input_ids"][0]
    cache = compress(model, prompt.document(document(20)), 1.0)
    cache.ask(model, prompt.question("few", cache), max_new_tokens=3, forced_eos_token_id=end, eos_token_id=end)
    assert cache.tokens[0, -1] == end
    cache.ask(model, prompt.question("many", cache), max_new_tokens=1)
    assert not any(a == b == end for a, b in pairwise(cache.tokens[0].tolist()))


def test_without_a_template_a_question_follows_on_a_new_line() -> None:
    tokenizer = tokenizer_of()
    prompt, text = Prompt(tokenizer), document(12)
    assert not prompt.has_template
    assert prompt.document(text)["input_ids"].tolist() == [tokenizer(text)["input_ids"]]
    assert prompt.question("few keys")["input_ids"].tolist() == [tokenizer("\nfew keys")["input_ids"]]
    assert prompt.document(text, 5)["input_ids"].shape == (1, 5)


@pytest.mark.parametrize("template", [None, CHAT])
def test_a_batch_of_documents_is_asked_as_each_alone(template: str | None) -> None:
    if template:
        pytest.importorskip("jinja2")
    model, prompt = model_of(), Prompt(tokenizer_of(template))
    texts = [document(30), document(18, 1), document(25, 2)]
    cache = compress(model, prompt.document(texts), 0.5)
    asked = prompt.question(QUESTIONS, cache)
    told = prompt.answers(cache.ask(model, asked, max_new_tokens=6, do_sample=False, eos_token_id=None), asked)
    for text, question, answer in zip(texts, QUESTIONS, told, strict=True):
        alone = compress(model, prompt.document(text), 0.5)
        own = prompt.question(question, alone)
        found = alone.ask(model, own, max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert prompt.answers(found, own) == [answer]


def tokenizer_of_bytes(template: str, special: list[str]) -> Any:
    """A tokenizer that merges a space with the word after it."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    known = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": ["<s>", "</s>", *special]}
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, **known)
    own.train_from_iterator([document(400), "who wrote the letter to whom, and when?"], trainer)
    own.decoder = decoders_of_tokens.ByteLevel()
    more = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": special}
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=own, **more)
    found.chat_template = template
    return found


class Held:
    """What a prompt reads of a cache."""

    def __init__(self, inputs: Any, answer: list[int] | None = None) -> None:
        self.context_length = inputs["input_ids"].shape[1]
        self.tokens = torch.cat([inputs["input_ids"], torch.tensor([answer or []]).long()], 1)
        self.present = torch.ones_like(self.tokens, dtype=torch.bool)

    def get_seq_length(self) -> int:
        return int(self.tokens.shape[1])


INSTRUCTIONS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)


def test_text_that_merges_with_its_template_is_still_known_to_begin_a_message() -> None:
    pytest.importorskip("jinja2")
    tokenizer = tokenizer_of_bytes(INSTRUCTIONS, ["[INST]", "[/INST]"])
    prompt, text = Prompt(tokenizer), document(10)
    inputs = prompt.document(text)
    asked = prompt.question("who wrote it?", Held(inputs))["input_ids"][0].tolist()
    whole = [{"role": "user", "content": f"{text}\n\nwho wrote it?"}]
    expected = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(inputs["input_ids"][0].tolist() + asked) == expected
    plain = Held({"input_ids": torch.tensor([tokenizer(text)["input_ids"]])})
    alone = [{"role": "user", "content": "who wrote it?"}]
    assert tokenizer.decode(prompt.question("who wrote it?", plain)["input_ids"][0]) == (
        tokenizer.apply_chat_template(alone, tokenize=False, add_generation_prompt=True)
    )


def test_an_end_after_a_space_is_not_given_twice() -> None:
    pytest.importorskip("jinja2")
    tokenizer = tokenizer_of_bytes(INSTRUCTIONS, ["[INST]", "[/INST]"])
    prompt = Prompt(tokenizer)
    inputs = prompt.document(document(10))
    ended = Held(inputs, tokenizer(" few</s>")["input_ids"])
    assert tokenizer.decode(prompt.question("when?", ended)["input_ids"][0]) == "[INST] when? [/INST]"
    cut = Held(inputs, tokenizer(" few")["input_ids"])
    assert tokenizer.decode(prompt.question("when?", cut)["input_ids"][0]) == " </s>[INST] when? [/INST]"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]{% endif %}{% endfor %}",
        "[INST]{{ messages[-1]['content'] }}[/INST]",
        "{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('no') }}{% endif %}[INST]"
        "{{ m['content'] }}[/INST]{% endfor %}",
    ],
)
def test_a_template_without_answers_takes_first_questions_only(template: str) -> None:
    pytest.importorskip("jinja2")
    tokenizer = tokenizer_of_bytes(template, ["[INST]", "[/INST]"])
    prompt = Prompt(tokenizer)
    inputs = prompt.document("the keys")
    asked = prompt.question("who?", Held(inputs))["input_ids"][0].tolist()
    assert tokenizer.decode(inputs["input_ids"][0].tolist() + asked) == "[INST]the keys\n\nwho?[/INST]"
    with pytest.raises(ValueError, match="no place for a question after one"):
        prompt.question("when?", Held(inputs, [5]))


def test_a_template_of_parts_gets_parts() -> None:
    pytest.importorskip("jinja2")
    tokenizer = tokenizer_of_bytes("", ["[INST]", "[/INST]"])
    tokenizer.chat_template = (
        "{% for m in messages %}[INST]{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}"
        "{% endif %}{% endfor %}[/INST]{% endfor %}"
    )
    prompt = Prompt(tokenizer)
    assert prompt.has_template
    assert tokenizer.decode(prompt.document("the keys")["input_ids"][0]) == "[INST]the keys"
    tokenizer.chat_template = "nothing of it"
    with pytest.raises(ValueError, match="it drops the message"):
        Prompt(tokenizer)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda prompt, _: prompt.document("the", -1), ValueError, "tokens is -1"),
        (lambda prompt, _: prompt.document(["the", " "]), ValueError, "document 1 is ' '"),
        (lambda prompt, _: prompt.document(3), TypeError, "document is of type int; expected a text"),
        (lambda prompt, _: prompt.question([]), TypeError, "question is of type list; expected a text"),
        (lambda prompt, cache: prompt.question(["a", "b"], cache), ValueError, "has 2 texts and the cache 3 rows"),
    ],
)
def test_a_prompt_says_what_it_cannot_take(call: Any, error: type[Exception], said: str) -> None:
    prompt = Prompt(tokenizer_of())
    cache = compress(model_of(), prompt.document([document(9)] * 3), 1.0)
    with pytest.raises(error, match=said):
        call(prompt, cache)


def test_a_template_that_fails_is_named() -> None:
    pytest.importorskip("jinja2")
    with pytest.raises(ValueError, match=r"chat template of the tokenizer cannot be read.*no roles"):
        Prompt(tokenizer_of("{{ raise_exception('no roles') }}"))


def dense_answer(model: Any, ids: Any, count: int, **cache: Any) -> Any:
    return model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0, **cache)[0, ids.shape[1] :]


@pytest.mark.parametrize("template", [None, CHAT])
def test_answers_and_losses_are_those_of_a_compressed_cache(template: str | None) -> None:
    if template:
        pytest.importorskip("jinja2")
    model, tokenizer, text = model_of(), tokenizer_of(template), document(90)
    prompt = Prompt(tokenizer)
    found = evaluate(model, tokenizer, text, QUESTIONS, budgets=(0.5, 0.1), answer_tokens=7)
    tokens = prompt.document(text)["input_ids"]
    rows = iter(found.answers)
    for budget in (None, 0.5, 0.1):
        cache = compress(model, tokens, 1.0 if budget is None else budget)
        for question in QUESTIONS:
            row, asked = next(rows), prompt.question(question)["input_ids"]
            whole = dense_answer(model, torch.cat([tokens, asked], 1), 7)
            told = cache.copy().ask(model, asked, max_new_tokens=7, do_sample=False)[0, asked.shape[1] :]
            assert (row["budget"], row["question"], row["right"]) == (budget, question, None)
            assert row["answer"] == tokenizer.decode(told, skip_special_tokens=True)
            assert row["changed"] == (told.tolist() != whole.tolist())
            ids = torch.cat([asked, whole[None]], 1)
            losses = []
            for each in (cache.copy(), compress(model, tokens, 1.0)):
                with torch.no_grad():
                    log_p = model(ids, **{CACHE: each}).logits[0, -8:-1].double().log_softmax(-1)
                losses.append(-float(log_p.gather(1, whole[:, None]).mean()))
            assert row["loss"] == pytest.approx(losses[0] - losses[1], abs=1e-6)
    table = found.table()
    assert table[0]["changed"] == table[0]["loss"] == 0
    assert [row["nbytes"] for row in table[1:]] == [compress(model, tokens, x).nbytes for x in (0.5, 0.1)]
    assert any(row["changed"] for row in found.answers)  # so that the comparison sees both cases
    for row in table[1:]:
        own = [each for each in found.answers if each["budget"] == row["budget"]]
        assert row["changed"] == np.mean([each["changed"] for each in own])
        assert row["worst_loss"] == max(each["loss"] for each in own)
    changing = [row["budget"] for row in table if row["changed"]]
    assert found.changes_at == changing[0]
    assert str(found).count("\n") == 4


def test_a_whole_budget_changes_nothing() -> None:
    found = evaluate(model_of(), tokenizer_of(), document(80), budgets=[1.0])
    dense, whole = found.table()
    assert (whole["changed"], whole["share"], found.changes_at) == (0, 1, None)
    assert abs(whole["worst_loss"]) < 1e-6
    assert dense["nbytes"] == whole["nbytes"]
    assert "no answer changed" in repr(found)


def test_made_up_questions_are_passages_from_all_parts() -> None:
    text = document(200)
    found = evaluate(model_of(), tokenizer_of(), text, budgets=[0.5], answer_tokens=20)
    rows = [row for row in found.answers if row["budget"] is None]
    asked = [row["question"] for row in rows]
    places = [text.index(question) for question in asked]
    for row, question, place in zip(rows, asked, places, strict=True):
        following = text[place + len(question) :].split()[:8]
        assert row["right"] == (" ".join(following) in row["answer"])
        assert len(row["answer"].split()) <= 16
    assert len(set(asked)) == 16
    assert places == sorted(places)
    assert places[0] == 0
    assert places[-1] > 0.7 * len(text)


@pytest.mark.parametrize("budget", [0.4, 20])
def test_a_pruned_model_answers_as_it_does_in_its_block(budget: float) -> None:
    model, tokenizer, text = model_of(), tokenizer_of(), document(90)
    found = evaluate(model, tokenizer, text, QUESTIONS, budgets=[budget], method="prune", answer_tokens=5)
    prompt = Prompt(tokenizer)
    tokens = prompt.document(text)["input_ids"]
    plain = [dense_answer(model, torch.cat([tokens, prompt.question(q)["input_ids"]], 1), 5) for q in QUESTIONS]
    with prune(model, budget):
        for row, question, whole in zip(found.answers[3:], QUESTIONS, plain, strict=True):
            asked = prompt.question(question)["input_ids"]
            cache = transformers.DynamicCache(config=model.config)
            model.model(tokens, use_cache=True, **{CACHE: cache})
            told = dense_answer(model, torch.cat([tokens, asked], 1), 5, **{CACHE: cache})
            assert row["answer"] == tokenizer.decode(told, skip_special_tokens=True)
            assert row["changed"] == (told.tolist() != whole.tolist())


def test_expected_answers_are_looked_for_without_regard_to_case_and_spaces() -> None:
    model, tokenizer, text = model_of(), tokenizer_of(), document(60)
    plain = evaluate(model, tokenizer, text, QUESTIONS[:2], budgets=[1.0])
    known = {QUESTIONS[0]: f"  {plain.answers[0]['answer'].upper()}", QUESTIONS[1]: "no such words"}
    found = evaluate(model, tokenizer, text, known, budgets=[1.0])
    assert [row["right"] for row in found.answers] == [True, False] * 2
    assert [row["right"] for row in found.table()] == [0.5, 0.5]


@pytest.mark.parametrize("count", [1, 5, 16])
def test_the_limit_of_changes_is_that_of_clopper_and_pearson(count: int) -> None:
    questions = [f"few {' '.join(WORDS[:k])}" for k in range(1, 17)][:count]
    found = evaluate(model_of(), tokenizer_of(), document(90), questions, budgets=[1.0, 0.1], answer_tokens=4)
    for row in found.table()[1:]:
        changed, most = round(row["changed"] * count), row["changed_most"]
        if changed == count:
            assert most == 1
        else:
            assert binom.cdf(changed, count, most) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"method": "drop"}, ValueError, "method is 'drop'; expected 'compress' or 'prune'"),
        ({"document": ""}, TypeError, "document is ''; expected a text"),
        ({"budgets": []}, ValueError, "budgets is empty"),
        ({"budgets": 0.25}, TypeError, "budgets is 0.25; expected a list"),
        ({"questions": {"few": " "}}, TypeError, "questions has 'few': ' '"),
        ({"budgets": [2.5]}, ValueError, "2.5"),
        ({"questions": "few"}, TypeError, "questions is 'few'; expected a sequence of texts"),
        ({"questions": ["few", ""]}, TypeError, "questions has ''"),
        ({"questions": {"few": 3}}, TypeError, "questions has 'few': 3"),
        ({"answer_tokens": 0}, ValueError, "answer_tokens is 0"),
        ({"document": "the keys"}, ValueError, "document has 2 tokens; expected more than 48 to make up questions"),
        ({"document": document(390)}, ValueError, "and the model has 400 positions"),
        ({"bits": 5}, ValueError, "bits is 5"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    given = {"document": document(60), **options}
    with pytest.raises(error, match=said):
        evaluate(model_of(), tokenizer_of(), **given)


@cache
def plain_answers() -> Any:
    return evaluate(model_of(), tokenizer_of(), document(60), QUESTIONS, budgets=[0.5]).answers


@pytest.mark.parametrize(
    "own",
    [
        {"use_cache": False},
        {"num_beams": 3},
        {"cache_implementation": "static"},
        {"do_sample": True, "temperature": 5.0, "num_return_sequences": 2},
        {"repetition_penalty": 3.0},
        {"min_new_tokens": 3},
    ],
)
def test_answers_are_greedy_whatever_the_model_generates_by_itself(own: dict[str, Any]) -> None:
    model, tokenizer, text = model_of(), tokenizer_of(), document(60)
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    assert evaluate(model, tokenizer, text, QUESTIONS, budgets=[0.5]).answers == plain_answers()


def test_what_is_no_generating_model_or_no_tokenizer_is_named() -> None:
    model, tokenizer, text = model_of(), tokenizer_of(), document(60)
    for call in (lambda: evaluate(model.model, tokenizer, text), lambda: head_profile(model.model, tokenizer)):
        with pytest.raises(TypeError, match=r"model is of type LlamaModel; expected a model that generates, e.g. of"):
            call()
    for other in (None, "name", model):
        kind = rf"tokenizer is of type {type(other).__name__}; expected a tokenizer of transformers"
        for read in (Prompt, lambda given: evaluate(model, given, text), lambda given: head_profile(model, given)):
            with pytest.raises(TypeError, match=kind):
                read(other)


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(ValueError, match="training mode"):
        evaluate(model_of().train(), tokenizer_of(), document(60))


def test_budgets_of_every_kind_are_shown() -> None:
    budgets = [2048, Selection(0.5), {(0, 0): 0.1}]
    found = evaluate(model_of(), tokenizer_of(), document(60), QUESTIONS, budgets=budgets)
    lines = str(found).splitlines()
    for line, shown in zip(lines[2:], ("2048", "Selection(0.5", "{(0, 0): 0.1}"), strict=False):
        assert line.lstrip().startswith(shown)
    assert lines[1].lstrip().startswith("dense")


def test_the_largest_budget_of_a_change_is_told_in_any_order() -> None:
    model, tokenizer, text = model_of(), tokenizer_of(), document(90)
    found = [evaluate(model, tokenizer, text, QUESTIONS, budgets=order) for order in ([0.1, 0.5], [0.5, 0.1])]
    assert found[0].changes_at == found[1].changes_at


def test_progress_counts_answers() -> None:
    seen: list[Any] = []
    how = {"budgets": [0.5], "answer_tokens": 2, "progress": lambda *count: seen.append(count)}
    evaluate(model_of(), tokenizer_of(), document(60), QUESTIONS, **how)
    assert seen == [(k, 6) for k in range(1, 7)]


def test_budgets_scores_and_seeds_are_a_table_of_single_evaluations() -> None:
    model, tokenizer, text = model_of(), tokenizer_of(), document(120)

    def large(K: Any, V: Any) -> Any:
        return (K**2).sum(2) + 0 * V[:, :, 0]

    kinds, budgets = ["default", "random", "h2o", large], [0.5, Selection(0.2, sinks=2)]
    found = evaluate(model, tokenizer, text, QUESTIONS, budgets=budgets, scores=kinds, seeds=3, answer_tokens=4)
    rows = found.table()
    names = [("default", None), *(("random", seed) for seed in range(3)), ("h2o", None), ("large", None)]
    assert [(row["scores"], row["seed"]) for row in rows] == [(None, None), *names, *names]
    assert [row["budget"] for row in rows] == [None, *[budgets[0]] * 6, *[budgets[1]] * 6]
    timed = "seconds", "token_seconds"
    for row in rows[1:]:
        scores = {"default": None, "large": large, "random": f"random:{row['seed']}"}.get(row["scores"], row["scores"])
        options = {} if isinstance(row["budget"], float) else {"sinks": 2}
        own = Selection(0.5 if not options else 0.2, scores=scores, **options)
        alone = evaluate(model, tokenizer, text, QUESTIONS, budgets=[own], answer_tokens=4).table()[1]
        for name in alone.keys() - {"budget", "scores", "seed", *timed}:
            assert row[name] == alone[name]
    assert [(row["scores"], row["seed"]) for row in found.answers[::3]] == [(None, None), *names, *names]
    means = found.means()
    assert [(row["budget"], row["scores"], row["seeds"]) for row in means] == [
        (None, None, 1),
        *(
            (budget, getattr(kind, "__name__", kind), 3 if kind == "random" else 1)
            for budget in budgets
            for kind in kinds
        ),
    ]
    drawn = [row["loss"] for row in rows if row["budget"] == 0.5 and row["scores"] == "random"]
    assert len(set(drawn)) == 3
    assert means[2]["loss"] == pytest.approx(np.mean(drawn))
    assert means[2]["loss_spread"] == pytest.approx(np.std(drawn, ddof=1))
    assert means[2]["worst_loss"] == max(row["worst_loss"] for row in rows[2:5])
    assert means[1]["loss_spread"] is None
    own = [row["budget"] for row in rows if row["scores"] == "default" and row["changed"]]
    assert found.changes_at == next(iter(own), None)
    shown = str(found).splitlines()
    assert len(shown) == 1 + 9 + 1
    assert shown[0].split()[:2] == ["budget", "scores"]
    assert {"±changed", "±loss"} < set(shown[0].split())
    assert "standard deviation over 3 seeds" in shown[-1]
    assert "at 2 budgets and 4 kinds of scores" in repr(found)


def test_scores_of_one_seed_have_no_spread_and_none_have_no_column() -> None:
    how = {"budgets": [0.5], "answer_tokens": 2}
    plain = evaluate(model_of(), tokenizer_of(), document(60), QUESTIONS, **how)
    assert "scores" not in str(plain)
    assert "±" not in str(plain)
    one = evaluate(model_of(), tokenizer_of(), document(60), QUESTIONS, **how, scores=["random", "streaming"])
    assert [row["seed"] for row in one.table()] == [None, 0, None]
    assert "scores" in str(one)
    assert "±" not in str(one)
    pruned = evaluate(
        model_of(), tokenizer_of(), document(60), QUESTIONS, **how, method="prune", scores=["random", None], seeds=2
    )
    assert [(row["scores"], row["seed"]) for row in pruned.table()[1:]] == [
        ("random", 0),
        ("random", 1),
        ("default", None),
    ]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"scores": "h2o"}, TypeError, "scores is 'h2o'; expected a list of scores"),
        ({"scores": []}, ValueError, "expected at least one"),
        ({"scores": ["h2o", "h2o"]}, ValueError, "each name once"),
        ({"scores": ["h20"]}, ValueError, "scores is 'h20'; expected one of"),
        ({"seeds": 2}, ValueError, 'seeds is 2, and scores is None; expected "random"'),
        ({"scores": ["h2o"], "seeds": 2}, ValueError, "no others have seeds"),
        ({"seeds": 0}, ValueError, "seeds is 0"),
        ({"scores": ["h2o"], "budgets": [{(0, 0): 0.5}]}, ValueError, r"budgets\[0\] is .*expected a number"),
        ({"scores": ["h2o"], "budgets": [Selection(0.5, scores="tova")]}, ValueError, "a Selection without scores"),
        ({"budgets": [0.5, Selection(0.2, scores="h2o", renew_every=8)]}, ValueError, r"budgets\[1\] is .*gone when"),
        ({"scores": ["default", 3]}, TypeError, "scores has a int; expected names and functions"),
        ({"scores": [np.ones(3)]}, TypeError, "scores has a ndarray; expected names"),
        ({"scores": ["default", "attention"]}, ValueError, r"budgets\[0\] has scores=\"attention\""),
        (
            {"scores": ["h2o"], "budgets": [Selection(0.2, renew_every=8)]},
            ValueError,
            r"budgets\[0\] is .*gone when slots are renewed",
        ),
        ({"scores": ["snapkv"], "method": "prune"}, ValueError, "compress alone does so"),
    ],
)
def test_scores_that_cannot_be_compared_are_refused(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        evaluate(model_of(), tokenizer_of(), document(60), **options)
