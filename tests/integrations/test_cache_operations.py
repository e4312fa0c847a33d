"""Operations on caches of compressed contexts: beside transformers' own caches, and beside contexts alone."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import CACHE, base, difference, of_heads, tokens  # noqa: E402

from levattn.attention import Selection  # noqa: E402
from levattn.integrations.transformers import CompressedCache, compress, macchiato_from, prune  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ["Llama", "Gemma3"]  # all positions in all layers; some that slide
CONTEXT, NEW = 30, 6
CUT = {(0, 0): 0.3, (1, 1): 0.5}
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
EXACT = 1e-12  # rounding of float64 in attention whose sums are in another order
QUESTION, AGAIN = torch.tensor([[3, 14, 15]]), torch.tensor([[7, 8]])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def decoder(family: str = "Llama", **options: Any) -> Any:
    return base(family, **options).double()


def rows(ids: Any, count: int) -> Any:
    """The same tokens in each row, apart from the last."""
    found = ids.repeat(count, 1)
    found[:, -1] += torch.arange(count)
    return found


@torch.no_grad()
def read(model: Any, cache: Any, ids: Any) -> Any:
    return model(ids, **{CACHE: cache}).logits


def dense(model: Any, ids: Any) -> Any:
    cache = transformers.DynamicCache(config=model.config)
    read(model, cache, ids)
    return cache


# What is done to a cache, which of two rows the new rows are, and how many of the last positions are forgotten
OPERATIONS: dict[str, tuple[Callable[[Any], Any], list[int], int]] = {
    "nothing": (lambda _: None, [0, 1], 0),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1], 0),
    "repeat once": (lambda cache: cache.batch_repeat_interleave(1), [0, 1], 0),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1], 0),
    "select several": (lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 1])), [1, 0, 1], 0),
    "select by a mask": (lambda cache: cache.batch_select_indices(torch.tensor([False, True])), [1], 0),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0], 0),
    "reorder to one": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1], 0),
    "repeat and select": (
        lambda cache: (cache.batch_repeat_interleave(3), cache.batch_select_indices(torch.tensor([5, 0]))),
        [1, 0],
        0,
    ),
    "crop": (lambda cache: cache.crop(-2), [0, 1], 2),
    "crop none": (lambda cache: cache.crop(-0), [0, 1], 0),
    "crop all that came": (lambda cache: cache.crop(-len(QUESTION[0])), [0, 1], 3),
    "copy": (lambda cache: copy.deepcopy(cache), [0, 1], 0),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", [False, True])
def test_an_operation_does_what_it_does_to_a_dense_cache(name: str, asked: bool, family: str, cut: bool) -> None:
    operation, sources, forgotten = OPERATIONS[name]
    if forgotten and (not asked or family == "Gemma3"):
        pytest.skip("the context cannot be shortened, and layers that slide have dropped what was before")
    if name == "crop none" and "max_length" in signature(transformers.DynamicLayer.crop).parameters:
        pytest.skip("0 was the length to keep")
    if "crop" in name and family == "Gemma3":
        pytest.skip("layers that slide have dropped what was before")
    model = decoder(family)
    context, question = tokens(2, CONTEXT), rows(QUESTION, 2)
    budget: Any = {(1, 1): 0.5} if cut else 1.0
    cache = compress(model, context, budget)
    alone = [compress(model, context[i : i + 1], budget) for i in range(2)]
    plain = dense(model, context)
    if asked:
        kept = question[:, : question.shape[1] - forgotten]
        for held, ids in ((cache, question), (plain, question), (alone[0], kept[:1]), (alone[1], kept[1:])):
            if ids.shape[1]:
                read(model, held, ids)
    for held in (cache, plain):
        found = operation(held)
        if name == "copy":
            assert type(found) is type(held)
            read(model, held, AGAIN.repeat(2, 1))  # which the copy does not notice
            cache, plain = (found, plain) if held is cache else (cache, found)
    assert cache.get_seq_length() == plain.get_seq_length() == alone[0].get_seq_length()
    assert [len(part) for part in cache.so_far()] == [len(sources)] * 2
    assert torch.equal(cache.tokens[:, :CONTEXT], context[sources])
    for ids in (rows(AGAIN, len(sources)), rows(torch.tensor([[5]]), len(sources)), rows(QUESTION, len(sources))):
        found, expected = read(model, cache, ids), read(model, plain, ids)
        if not cut:
            assert difference(found, expected) < EXACT
        for row, source in enumerate(sources):
            single = alone[source] if sources.count(source) == 1 else alone[source].copy()
            if sources.count(source) == 1:
                assert difference(found[row : row + 1], read(model, single, ids[row : row + 1])) < EXACT


@pytest.mark.parametrize("cut", [False, True])
def test_crop_takes_a_length_or_a_number_and_never_the_context(cut: bool) -> None:
    model = decoder()
    cache = compress(model, tokens(1, CONTEXT), CUT if cut else 1.0)
    cache.ask(model, QUESTION, **GREEDY)
    length, whole = cache.get_seq_length(), cache.tokens
    assert length == CONTEXT + 3 + NEW - 1
    for argument, kept in (
        (length, length),
        (length + 5, length),
        (0, length),
        (CONTEXT + 3, CONTEXT + 3),
        (-4, length - 4),
    ):
        one, other = cache.copy(), cache.copy()
        one.crop(argument)
        assert one.get_seq_length() == kept
        assert one.tokens.shape[1] == one.present.shape[1] == (kept if kept < length else length + 1)
        other.crop(kept)
        assert torch.equal(one.ask(model, AGAIN, **GREEDY), other.ask(model, AGAIN, **GREEDY))
    for argument in (CONTEXT - 1, 1, -(length - CONTEXT) - 1):
        with pytest.raises(ValueError, match=f"crop was called with {argument}; expected to keep at least the 30"):
            cache.crop(argument)
    assert cache.get_seq_length() == length
    assert torch.equal(cache.tokens, whole)


def test_a_copy_keeps_its_positions_while_the_cache_forgets_and_goes_on() -> None:
    model = decoder()
    cache = compress(model, tokens(1, CONTEXT), CUT)
    cache.ask(model, QUESTION, **GREEDY)
    fork, expected = cache.copy(), cache.copy().ask(model, AGAIN, **GREEDY)
    cache.crop(CONTEXT + 2)
    cache.ask(model, torch.tensor([[9, 9, 9, 9]]), **GREEDY)
    assert torch.equal(fork.ask(model, AGAIN, **GREEDY), expected)


@pytest.mark.parametrize("cut", [False, True])
def test_reset_goes_back_to_the_context(cut: bool) -> None:
    model = decoder()
    cache = compress(model, tokens(2, CONTEXT), CUT if cut else 1.0)
    expected = cache.copy().ask(model, rows(QUESTION, 2), **GREEDY)
    cache.ask(model, rows(AGAIN, 2), **GREEDY)
    cache.reset()
    assert cache.get_seq_length() == CONTEXT
    assert torch.equal(cache.ask(model, rows(QUESTION, 2), **GREEDY), expected)
    sliding = compress(decoder("Gemma3"), tokens(1, CONTEXT), 1.0)
    with pytest.raises(ValueError, match="the cache has layers that slide"):
        sliding.reset()


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams, several": {"num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True},
    "samples, several": {"do_sample": True, "num_return_sequences": 3},
    "sampled beams": {"do_sample": True, "num_beams": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_equals_one_without_a_cache(way: str, count: int, family: str) -> None:
    model, options = decoder(family), {**GREEDY, **WAYS[way]}
    context = tokens(count, CONTEXT)
    cache = compress(model, context, 1.0)
    so_far = context
    for turn, ids in enumerate((rows(QUESTION, count), rows(AGAIN, count), rows(QUESTION, count))):
        asked = options if turn % 2 == 0 else GREEDY  # another way between, which leaves a token unread
        whole = torch.cat([so_far, ids], 1)
        torch.manual_seed(turn)
        expected = model.generate(whole, **asked)
        torch.manual_seed(turn)
        found = cache.ask(model, ids, **asked)
        assert torch.equal(found, expected[:, so_far.shape[1] :])
        if asked.get("num_return_sequences", 1) == 1:
            so_far = expected
        assert torch.equal(cache.tokens, so_far)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_and_what_follows_equal_a_dense_cache(way: str, count: int, family: str) -> None:
    model, options = decoder(family), {**GREEDY, **WAYS[way]}
    context = tokens(count, CONTEXT)
    many = max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
    whole, after = torch.cat([context, rows(QUESTION, count)], 1), []
    cut = compress(model, context, {(1, 1): 0.5})
    for held in (compress(model, context, 1.0), dense(model, context), cut):
        held.batch_repeat_interleave(many)
        torch.manual_seed(0)
        written = model.generate(whole, **{CACHE: held}, **options)
        after.append((written, held.get_seq_length(), read(model, held, rows(AGAIN, count * many))))
    (found, length, logits), (expected, dense_length, dense_logits), (_, cut_length, _) = after
    assert torch.equal(found, expected)
    assert length == dense_length == cut_length
    assert difference(logits, dense_logits) < EXACT


def test_other_numbers_of_rows_are_refused_before_anything_is_read() -> None:
    for family in FAMILIES:
        model = decoder(family)
        cache = compress(model, tokens(2, CONTEXT), 1.0)
        for count in (1, 3, 4):
            with pytest.raises(ValueError, match=f"the input has {count} rows and the cache 2; expected as many"):
                read(model, cache, rows(QUESTION, count))
        assert {layer.get_seq_length() for layer in cache.layers} == {CONTEXT}


# -- answers that end early -------------------------------------------------------------------------------------------

ENDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "another token": lambda end: {"eos_token_id": end, "pad_token_id": 0},
    "the same token": lambda end: {"eos_token_id": end, "pad_token_id": end},
    "a list": lambda end: {"eos_token_id": [39, end], "pad_token_id": 0},
    "a list with the padding": lambda end: {"eos_token_id": [end, 0], "pad_token_id": 0},
    "no padding named": lambda end: {"eos_token_id": end},
}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("where", ["keywords", "config", "model"])
@pytest.mark.parametrize("way", ["greedy", "beams"])
@pytest.mark.parametrize("budget", [1.0, CUT])
def test_padding_after_an_early_end_is_padding_in_the_next_turn(ends: str, where: str, way: str, budget: Any) -> None:
    model, context, question = decoder(), tokens(2, CONTEXT), rows(QUESTION, 2)
    if way == "beams" and (where != "keywords" or budget != 1.0):
        pytest.skip("seen with keywords")
    free = compress(model, context, budget).ask(model, question, **GREEDY)[:, 3:]
    end = next(int(token) for token in free[0] if token not in free[1])  # of the first row alone
    options = {"max_new_tokens": NEW, "do_sample": False, **ENDS[ends](end), **WAYS[way]}
    asked: dict[str, Any] = options
    if where == "config":
        asked = {"generation_config": transformers.GenerationConfig(**options)}
    elif where == "model":
        model.generation_config = transformers.GenerationConfig(**options)
        asked = {}
    both = compress(model, context, budget)
    found = both.ask(model, question, **asked)
    third = {**GREEDY, "output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
    turn = torch.stack(both.copy().ask(model, rows(AGAIN, 2), **third).logits, 1)
    lengths = set()
    for row in range(2):
        one = slice(row, row + 1)
        alone = compress(model, context[one], budget)
        answer = alone.ask(model, question[one], **asked)
        lengths.add(answer.shape[1])
        assert torch.equal(found[one, : answer.shape[1]], answer)
        expected = torch.stack(alone.ask(model, rows(AGAIN, 2)[one], **third).logits, 1)
        assert difference(turn[one], expected) < EXACT
    assert way == "beams" or len(lengths) == 2


def test_a_token_of_padding_that_was_said_counts() -> None:
    model, context, question = decoder(), tokens(2, CONTEXT), rows(QUESTION, 2)
    free = compress(model, context, 1.0).ask(model, question, **GREEDY)
    said = int(free[0, -1])  # as if a tokenizer had this token for padding
    both = compress(model, context, 1.0)
    both.ask(model, question, **{**GREEDY, "pad_token_id": said})
    assert bool(both.present.all())
    once = compress(model, context, 1.0)
    once.ask(model, question, **{**GREEDY, "pad_token_id": said, "eos_token_id": 39 if 39 not in free else 38})
    assert bool(once.present.all())


def test_a_model_with_other_layers_is_noticed() -> None:
    model = decoder()
    cache = compress(model, tokens(1, CONTEXT), CUT)
    more, fewer = decoder(num_hidden_layers=3), decoder(num_hidden_layers=1)
    with pytest.raises(ValueError, match="model has a layer 2 and the cache 2 layers; expected the cache's model"):
        read(more, cache.copy(), QUESTION)
    fork = cache.copy()
    read(fewer, fork, QUESTION)  # which a cache cannot know before the next call
    with pytest.raises(ValueError, match=r"hold 30 and 33 positions, .* A model with fewer layers cannot read"):
        read(model, fork, QUESTION)
    for other in (more, fewer):
        with pytest.raises(ValueError, match="was made with another model"):
            cache.ask(other, QUESTION, **GREEDY)


# -- calls that fail --------------------------------------------------------------------------------------------------


class _Failure:
    """A hook that raises at a call of a layer."""

    def __init__(self, error: BaseException, calls: int) -> None:
        self.error, self.calls = error, calls

    def __call__(self, *_: Any) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_a_question_that_fails_leaves_the_cache_and_the_model_as_they_were(
    error: BaseException, layer: int, calls: int, family: str, way: str
) -> None:
    model, context = decoder(family), tokens(1, CONTEXT)
    before = model(context).logits
    cache = compress(model, context, {(1, 1): 0.5})
    cache.ask(model, QUESTION, **GREEDY)
    tokens_before, length = cache.tokens, cache.get_seq_length()
    expected = cache.copy().ask(model, AGAIN, **GREEDY)
    hook = model.model.layers[layer].mlp.register_forward_hook(_Failure(error, calls))
    with pytest.raises(type(error)):
        cache.ask(model, AGAIN, **GREEDY, **WAYS[way])
    hook.remove()
    assert torch.equal(model(context).logits, before)
    assert torch.equal(cache.tokens, tokens_before)
    assert {held.get_seq_length() for held in cache.layers} == {length}
    assert torch.equal(cache.ask(model, AGAIN, **GREEDY), expected)


@pytest.mark.parametrize("calls", [0, 3, 5])
def test_a_question_that_fails_leaves_slots_that_were_renewed_since(calls: int) -> None:
    model = decoder()
    cache = compress(model, tokens(1, CONTEXT), of_heads(CUT, renew_every=4))
    cache.ask(model, QUESTION, **GREEDY)
    length, held = cache.get_seq_length(), cache.layers[0].length
    twin = cache.copy()
    expected = [twin.ask(model, AGAIN, **GREEDY) for _ in range(2)]
    assert twin.layers[0].length > held
    hook = model.model.layers[1].mlp.register_forward_hook(_Failure(KeyboardInterrupt(), calls))
    with pytest.raises(KeyboardInterrupt):
        cache.ask(model, AGAIN, **GREEDY)
    hook.remove()
    assert {layer.get_seq_length() for layer in cache.layers} == {length}
    assert {layer.length for layer in cache.layers} == {held}
    for answer in expected:
        assert torch.equal(cache.ask(model, AGAIN, **GREEDY), answer)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_call_that_fails_between_layers_is_noticed_by_the_next(error: BaseException) -> None:
    for family in FAMILIES:
        model = decoder(family)
        cache = compress(model, tokens(1, CONTEXT), {(1, 1): 0.5})
        kept, expected = cache.copy(), cache.copy().ask(model, AGAIN, **GREEDY)
        hook = model.model.layers[0].mlp.register_forward_hook(_Failure(error, 0))
        with pytest.raises(type(error)):
            read(model, cache, QUESTION)
        hook.remove()
        message = r"layers of the cache hold 30 and 33 positions, because a call failed between them; .* crop\(30\)"
        with pytest.raises(ValueError, match=message):
            read(model, cache, QUESTION)
        with pytest.raises(ValueError, match=message):
            cache.ask(model, AGAIN, **GREEDY)
        with pytest.raises(ValueError, match=message):
            cache.save("context")
        if family == "Llama":
            cache.crop(30)
            assert torch.equal(cache.ask(model, AGAIN, **GREEDY), expected)
        assert torch.equal(kept.ask(model, AGAIN, **GREEDY), expected)


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_context_that_fails_leaves_the_model_as_it_was(chunk: int | None) -> None:
    model, context = decoder(), tokens(1, CONTEXT)
    before, own = model(context).logits, dict(vars(model))
    hook = model.model.layers[1].mlp.register_forward_hook(_Failure(KeyboardInterrupt(), int(chunk is not None)))
    with pytest.raises(KeyboardInterrupt):
        compress(model, context, 1.0, chunk=chunk)
    hook.remove()
    assert torch.equal(model(context).logits, before)
    assert vars(model) == own
    assert compress(model, context, 1.0).get_seq_length() == CONTEXT


# -- gradients, modes, copies in files --------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("second", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("reading", [torch.inference_mode, torch.enable_grad])
def test_turns_in_other_modes_of_gradients(first: Any, second: Any, reading: Any) -> None:
    model, context = decoder(), tokens(1, CONTEXT)
    for weight in model.parameters():
        weight.requires_grad_(requires_grad=False)
    with reading():
        cache = compress(model, context, 1.0)
    with first():
        model(QUESTION, **{CACHE: cache})
    with second():
        found = model(AGAIN, **{CACHE: cache}).logits
    expected = model(torch.cat([context, QUESTION, AGAIN], 1)).logits[:, -2:]
    assert difference(found, expected) < EXACT


def _saved_and_loaded(cache: Any, model: Any, file: Any) -> Any:
    cache.save(file)
    return CompressedCache.load(file, model)


def _renewed(cache: Any, model: Any) -> Any:
    cache.ask(model, QUESTION, **GREEDY)
    return cache


# What is done in inference mode with a model, a way to make a cache, and a file
INFERRED: dict[str, Callable[[Any, Callable[[], Any], Any], Any]] = {
    "compress": lambda _, made, __: made(),
    "load": lambda model, made, file: _saved_and_loaded(made(), model, file),
    "copy": lambda _, made, __: made().copy(),
    "select": lambda _, made, __: made().batch_select_indices(torch.tensor([0])),
    "repeat": lambda _, made, __: made().batch_repeat_interleave(1),
    "reorder": lambda _, made, __: made().reorder_cache(torch.tensor([0])),
    "renew": lambda model, made, _: _renewed(made(), model),
}


@pytest.mark.parametrize("name", INFERRED)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("before", [False, True])
def test_what_was_done_in_inference_mode_is_read_with_gradients(
    name: str, family: str, before: bool, tmp_path: Any
) -> None:
    model, context, gradients = decoder(family), tokens(1, CONTEXT), []
    held: list[Any] = []

    def made() -> Any:
        held.append(compress(model, context, of_heads({(1, 1): 0.5}, renew_every=4 if name == "renew" else None)))
        return held[-1]

    for mode in (torch.no_grad, torch.inference_mode):
        cache = made() if before and name != "compress" else None
        with mode():
            found = INFERRED[name](model, made if cache is None else lambda cache=cache: cache, tmp_path / "context")
        model.zero_grad()
        model(AGAIN, **{CACHE: held[-1] if found is None else found}).logits.sum().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("between", [False, True])
def test_gradients_pass_through_several_calls(between: bool) -> None:
    model, context, gradients = decoder(), tokens(1, CONTEXT), []
    for held in (compress(model, context, 1.0), dense(model, context)):
        model.zero_grad()
        found = model(QUESTION, **{CACHE: held}).logits.sum()
        if between:  # forgotten, and written over without gradients
            held.crop(-2)
            read(model, held, AGAIN[:, :1])
            held.crop(-1)
            found = found + model(QUESTION[:, 1:], **{CACHE: held}).logits.sum()
        found = found + model(AGAIN, **{CACHE: held}).logits.sum()
        found.backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    scale = max(float(gradient.abs().max()) for gradient in gradients[1])
    assert all(difference(a, b) < EXACT * scale for a, b in zip(*gradients, strict=True))


def again(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    return torch.load(io.BytesIO(stream.getvalue()), weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": again,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_model_and_its_cache_are_copied_before_inside_and_after(how: str, tmp_path: Any) -> None:
    model, context, found = base(), tokens(1, CONTEXT), []
    before = model(context).logits
    twins = [COPIES[how](model)]
    cache = compress(model, context, CUT, chunk=10, progress=lambda *_: found.append(COPIES[how](model)))
    twins += [found[0], COPIES[how](model)]
    expected = cache.copy().ask(model, QUESTION, **GREEDY)
    other = COPIES[how](cache)
    assert torch.equal(other.ask(model, QUESTION, **GREEDY), expected)
    asked = COPIES[how](other)
    assert torch.equal(asked.ask(model, AGAIN, **GREEDY), other.ask(model, AGAIN, **GREEDY))
    for twin in twins:
        assert torch.equal(twin(context).logits, before)
        assert torch.equal(cache.copy().ask(twin, QUESTION, **GREEDY), expected)
        assert torch.equal(COPIES[how](cache).ask(twin, QUESTION, **GREEDY), expected)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(cache.copy().ask(loaded, QUESTION, **GREEDY), expected)


@pytest.mark.parametrize("how", COPIES)
def test_a_pruned_model_is_copied_inside_and_after(how: str, tmp_path: Any) -> None:
    model, context = base(), tokens(1, CONTEXT)
    before = model(context).logits
    with prune(model, {0: 8, 1: 8}):
        inside, wanted = COPIES[how](model), model(context).logits
        model.save_pretrained(tmp_path)
        held = transformers.DynamicCache(config=model.config)
        read(model, held, context)
        kept = COPIES[how](held)
        assert torch.equal(read(model, kept, QUESTION), read(model, held, QUESTION))
    assert torch.equal(inside(context).logits, wanted)
    assert torch.equal(type(model).from_pretrained(tmp_path)(context).logits, before)
    assert torch.equal(COPIES[how](model)(context).logits, before)


@pytest.mark.parametrize("how", COPIES)
def test_an_extended_model_is_copied(how: str) -> None:
    model, context = base(), tokens(1, CONTEXT)
    macchiato_from(model, window=8, latents=4)
    wanted = model(context).logits
    assert torch.equal(COPIES[how](model)(context).logits, wanted)
    held = transformers.DynamicCache(config=model.config)
    read(model, held, context)
    assert torch.equal(read(model, COPIES[how](held), QUESTION), read(model, held, QUESTION))


def test_changed_models_run_in_the_process_that_loads_them(tmp_path: Any) -> None:
    pruned, extended, context = base(), base(), tokens(1, CONTEXT)
    prune(pruned, {0: Selection(8, start=0), 1: Selection(8, start=0)})  # from the start, in each process
    macchiato_from(extended, window=8, latents=4)
    torch.save((context, [(model, model(context).logits) for model in (pruned, extended)]), tmp_path / "models")
    program = f"""if True:
        import torch
        context, models = torch.load({str(tmp_path / "models")!r}, weights_only=False)
        for model, logits in models:
            assert (model(context).logits - logits).abs().max() < 1e-5  # of 1 to 10
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes that fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_no_states_pass_for_those_of_a_pruning_of_another_process(tmp_path: Any) -> None:
    model, context = base(), tokens(1, CONTEXT)
    child = os.fork()
    if not child:
        with suppress(BaseException):
            prune(model, {0: 12, 1: 12})
            torch.save(model, tmp_path / "model")
        os._exit(0)
    os.waitpid(child, 0)
    prune(model, {0: Selection(8, start=0), 1: Selection(8, start=0)})
    cache = transformers.DynamicCache(config=model.config)
    read(model, cache, context)
    other = torch.load(tmp_path / "model", weights_only=False)
    with pytest.raises(ValueError, match="the cache holds the states of another call of prune"):
        read(other, cache, QUESTION)


@pytest.mark.parametrize("use", ["none", "compress", "ask", "prune"])
def test_a_model_is_freed_at_once(use: str) -> None:
    gc.collect()
    gc.disable()
    try:
        model = base()
        cache = compress(model, tokens(1, CONTEXT), CUT) if use in ("compress", "ask") else None
        if cache is not None and use == "ask":
            cache.ask(model, QUESTION, **GREEDY)
        if use == "prune":
            with prune(model, {0: 8, 1: 8}):
                model(tokens(1, CONTEXT))
        alive = weakref.ref(model)
        del model
        assert alive() is None
        assert cache is None or cache.get_seq_length() >= CONTEXT
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_in_another_dtype_than_its_cache_is_refused(dtype: Any) -> None:
    model = base()
    cache = compress(model, tokens(1, CONTEXT), CUT)
    model.to(dtype)
    with pytest.raises(ValueError, match=r"made with another model .* another dtype or config"):
        cache.ask(model, QUESTION, **GREEDY)
    message = f"layer 0 has keys of .* {dtype}, and the cache .* torch.float32; expected the cache's model and dtype"
    with pytest.raises(ValueError, match=message):
        read(model, cache, QUESTION)
    assert isinstance(cache, CompressedCache)
    assert cache.get_seq_length() == CONTEXT


def test_a_config_without_caches_is_no_config_for_a_question() -> None:
    model = decoder()
    cache, ids = compress(model, tokens(1, CONTEXT), 1.0), torch.cat([tokens(1, CONTEXT), QUESTION], 1)
    expected = model.generate(ids, **GREEDY)[:, CONTEXT:]
    model.generation_config.use_cache = False
    for options in ({}, {"use_cache": None}):
        held = cache.copy()
        assert torch.equal(held.ask(model, QUESTION, **GREEDY, **options), expected)
        assert held.get_seq_length() == CONTEXT + 3 + NEW - 1
    config = transformers.GenerationConfig(use_cache=False, **GREEDY)
    with pytest.raises(ValueError, match="use_cache is False"):
        cache.copy().ask(model, QUESTION, generation_config=config)


def test_a_question_during_another_is_refused_before_it_reads_anything() -> None:
    model = decoder()
    cache = compress(model, tokens(1, CONTEXT), 1.0)
    expected = cache.copy().ask(model, QUESTION, **GREEDY)
    refused: list[str] = []

    def ask_again(*_: Any) -> None:
        with pytest.raises(ValueError, match="answering another question"):
            cache.ask(model, AGAIN, **GREEDY)
        refused.append("once")

    hook = model.model.layers[0].register_forward_pre_hook(ask_again)
    assert torch.equal(cache.ask(model, QUESTION, **GREEDY), expected)
    hook.remove()
    assert len(refused) == NEW
    assert cache.tokens.shape[1] == CONTEXT + 3 + NEW


QUESTIONS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "cache": (lambda: {"past_key_values": 1}, "past_key_values was given to ask"),
    "positions": (lambda: {"position_ids": torch.arange(3)[None]}, "position_ids was given to ask"),
    "list": (lambda: {"attention_mask": [[1, 1, 1]]}, "attention_mask is of type list"),
    "padding": (lambda: {"attention_mask": torch.zeros(1, 3)}, "a row of padding alone"),
    "two masks": (
        lambda: {
            "attention_mask": torch.ones(1, 3),
            "question": {"input_ids": QUESTION, "attention_mask": torch.ones(1, 3)},
        },
        "attention_mask was given, and the question has one",
    ),
    "picture": (lambda: {"question": {"input_ids": QUESTION, "pixel_values": torch.ones(1)}}, "question has .*pixel"),
    "kinds": (
        lambda: {"question": {"input_ids": QUESTION, "token_type_ids": QUESTION}},
        "token_type_ids that are not",
    ),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_with_what_is_not_read_are_refused(name: str) -> None:
    given, message = QUESTIONS[name]
    options = given()
    model = decoder()
    cache = compress(model, tokens(1, CONTEXT), 1.0)
    with pytest.raises((TypeError, ValueError), match=message):
        cache.ask(model, options.pop("question", QUESTION), **options, **GREEDY)


def test_a_cache_of_layers_that_slide_is_copied_after_a_call_with_gradients() -> None:
    model = decoder("Gemma3")
    cache = compress(model, tokens(1, CONTEXT), 1.0)
    model(QUESTION, **{CACHE: cache})
    fork = cache.copy()
    assert torch.equal(read(model, fork, AGAIN), read(model, cache, AGAIN))
