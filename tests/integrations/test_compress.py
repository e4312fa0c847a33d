"""Compressed contexts of tiny decoders: against dense caches, against attention written out, forks, batches, files."""

from __future__ import annotations

import copy
import gc
import json
import math
import threading
from collections.abc import Callable
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import CACHE, base, difference, of_heads, tokens  # noqa: E402

import levattn  # noqa: E402
from levattn.attention import Selection  # noqa: E402
from levattn.integrations.transformers import (  # noqa: E402
    Calibration,
    CompressedCache,
    HeadProfile,
    calibrate,
    compress,
    head_profile,
    prune,
)

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ["Llama", "Qwen2", "Gemma2", "Gemma3", "Mistral", "GPTNeoX", "Phi"]
CONTEXT = 30
NEW = 12
CUT = {(0, 0): 0.3, (1, 1): 0.5}  # one head of each layer, cut
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
LOGITS = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def context(batch: int = 1, length: int = CONTEXT) -> Any:
    return tokens(batch, length)


def question(batch: int = 1) -> Any:
    return torch.tensor([[3, 14, 15]]).expand(batch, -1)


def logits(model: Any, cache: Any, asked: Any, **options: Any) -> Any:
    return torch.stack(cache.ask(model, asked, **LOGITS, **options).logits, 1)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [(family, way) for family in FAMILIES for way in ("sdpa", "eager") if (family, way) != ("Gemma2", "sdpa")],
)
@pytest.mark.parametrize("chunk", [None, 7])
def test_whole_heads_answer_as_a_dense_cache(family: str, implementation: str, chunk: int | None) -> None:
    model = base(family, attn_implementation=implementation)
    ids = torch.cat([context(), question()], 1)
    dense = model.generate(ids, **GREEDY)
    cache = compress(model, context(), 1.0, chunk=chunk)
    found = cache.copy().ask(model, question(), **GREEDY)
    assert torch.equal(found, dense[:, CONTEXT:])
    assert torch.equal(model.generate(ids, **{CACHE: cache.copy()}, **GREEDY), dense)  # as transformers has it
    assert torch.equal(model.generate(ids, **GREEDY), dense)
    again = torch.tensor([[7, 8]])
    cache.ask(model, question(), **GREEDY)
    further = cache.ask(model, again, **GREEDY)
    assert torch.equal(further, model.generate(torch.cat([dense, again], 1), **GREEDY)[:, dense.shape[1] :])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("budget", [CUT, 1.0])
def test_padded_batch_equals_its_sequences_alone(side: str, budget: Any) -> None:
    model, ids, missing = base().double(), context(2), 9
    mask = torch.ones_like(ids)
    pad = slice(0, missing) if side == "left" else slice(CONTEXT - missing, CONTEXT)
    mask[1, pad] = 0
    alone = [ids[:1], ids[1:, mask[1].bool()]]
    both = compress(model, {"input_ids": ids, "attention_mask": mask}, budget, references="none")
    found = logits(model, both, question(2))
    for row, sequence in enumerate(alone):
        expected = logits(model, compress(model, sequence, budget, references="none"), question())
        assert difference(found[row : row + 1], expected) < 1e-12


def test_padded_questions_and_beams() -> None:
    model = base().double()
    cache = compress(model, context(), CUT)
    alone = logits(model, cache.copy(), question())
    fork = cache.copy()
    fork.batch_repeat_interleave(2)
    asked = torch.cat([torch.zeros(2, 2, dtype=torch.int64), question(2)], 1)
    asked[1] = torch.tensor([5, 6, 7, 8, 9])
    mask = torch.ones_like(asked)
    mask[0, :2] = 0
    found = logits(model, fork, asked, attention_mask=mask)
    assert difference(found[:1], alone) < 1e-12
    beams = cache.copy().ask(model, question(), num_beams=3, num_return_sequences=2, **GREEDY)
    assert beams.shape == (2, 3 + NEW)
    whole = compress(model, context(), 1.0)
    dense = model.generate(torch.cat([context(), question()], 1), num_beams=3, **GREEDY)[:, CONTEXT:]
    assert torch.equal(whole.ask(model, question(), num_beams=3, **GREEDY), dense)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("beams", [1, 3])
def test_padded_questions_are_answered_as_each_alone(side: str, beams: int) -> None:
    """Also the question after them."""
    model = base().double()
    cache = compress(model, context(), CUT)
    fork = cache.copy()
    fork.batch_repeat_interleave(2)
    short, long = torch.tensor([[5, 6]]), torch.tensor([[7, 8, 9, 3, 4]])
    places = {"left": [3, 4], "right": [0, 1], "both": [1, 2]}[side]
    asked, mask = torch.cat([torch.zeros_like(long), long]), torch.ones(2, 5, dtype=torch.int64)
    asked[0, places], mask[0] = short[0], 0
    mask[0, places] = 1
    options = {**GREEDY, "num_beams": beams}
    found = fork.ask(model, {"input_ids": asked, "attention_mask": mask}, **options)
    assert torch.equal(found[:, :5], asked)
    again = fork.ask(model, question(2), return_dict_in_generate=True, **options).sequences
    for row, one in enumerate((short, long)):
        alone = cache.copy()
        assert torch.equal(found[row : row + 1, 5:], alone.ask(model, one, **options)[:, one.shape[1] :])
        assert torch.equal(again[row : row + 1], alone.ask(model, question(), **options))


def test_a_model_that_changes_is_refused() -> None:
    changes: tuple[Callable[[Any], object], ...] = (
        lambda model: model.model.layers[0].self_attn.q_proj.weight.mul_(2),
        lambda model: model.load_state_dict({name: 1.5 * array for name, array in model.state_dict().items()}),
        lambda model: setattr(model.model.norm, "weight", torch.nn.Parameter(model.model.norm.weight + 1)),
        lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    )
    for change in changes:
        model = base()
        cache = compress(model, context(), CUT)
        assert cache.copy().ask(model, question(), **GREEDY).shape == (1, 3 + NEW)
        with torch.no_grad():
            for array in model.parameters():  # moved, but as it was
                array.add_(0)
            assert cache.copy().ask(model, question(), **GREEDY).shape == (1, 3 + NEW)
            change(model)
        with pytest.raises(ValueError, match="with other weights or adapters, another dtype or config"):
            cache.copy().ask(model, question(), **GREEDY)


GIVEN_ALL = (
    "next_sequence_length" not in signature(transformers.GenerationMixin.prepare_inputs_for_generation).parameters
)


@pytest.mark.skipif(GIVEN_ALL, reason="this generate gets all tokens with drafts")
@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_length": 9}], ids=str
)
def test_drafts_with_options_that_read_all_tokens_are_refused(options: dict[str, Any]) -> None:
    model = base()
    cache = compress(model, context(), CUT)
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .* makes drafts; expected none"):
        cache.copy().ask(model, question(), prompt_lookup_num_tokens=2, **options, **GREEDY)
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0}
    found = cache.copy().ask(model, question(), prompt_lookup_num_tokens=2, **neutral, **GREEDY)
    assert torch.equal(found, cache.copy().ask(model, question(), **GREEDY))


def test_autocast_to_the_other_half_precision() -> None:
    for kind, other in ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)):
        model = base().to(kind)
        cache, dense = compress(model, context(), 1.0), transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(context(), **{CACHE: dense})
            for ids in (question(), question()[:, :1], question()[:, 1:2]):
                expected = model(ids, **{CACHE: dense}).logits
                with torch.autocast("cpu", dtype=other):
                    found = model(ids, **{CACHE: cache}).logits
                assert (found.float() - expected.float()).abs().max() < 0.05 * expected.abs().max()


WRONG_OPERATIONS: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "no axis": (
        lambda held: held.batch_select_indices(torch.tensor(0)),
        ValueError,
        "indices are 0; expected the numb",
    ),
    "beyond": (lambda held: held.batch_select_indices([5]), ValueError, r"indices are \[5\]; .* of the 1 sequences"),
    "below": (lambda held: held.reorder_cache(torch.tensor([-1])), ValueError, r"indices are \[-1\]"),
    "none": (lambda held: held.batch_select_indices(torch.zeros(0).long()), ValueError, r"indices are \[\]"),
    "floats": (lambda held: held.batch_select_indices([0.0]), ValueError, r"indices are \[0.0\]"),
    "flags": (lambda held: held.batch_select_indices([True, False]), ValueError, r"indices are \[True, False\]"),
    "no copies": (lambda held: held.batch_repeat_interleave(0), ValueError, "repeats is 0; expected at least 1"),
    "half a copy": (lambda held: held.batch_repeat_interleave(1.5), TypeError, "repeats is 1.5; expected a whole"),
    "text": (lambda held: held.crop("a"), TypeError, "max_length is 'a'; expected a whole number"),
    "half a position": (lambda held: held.crop(CONTEXT + 1.5), TypeError, "max_length is .*5; expected a whole"),
}


@pytest.mark.parametrize("name", WRONG_OPERATIONS)
def test_wrong_operations_leave_a_cache_as_it_was(name: str) -> None:
    call, error, message = WRONG_OPERATIONS[name]
    model = base()
    cache = compress(model, context(), CUT)
    cache.ask(model, question(), **GREEDY)
    before = cache.copy()
    with pytest.raises(error, match=message):
        call(cache)
    assert torch.equal(cache.ask(model, question(), **GREEDY), before.ask(model, question(), **GREEDY))


class _Looks(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """Counts how often flags are looked at, for which a device would have to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), options: Any = None) -> Any:
        self.count += function in (torch.ops.aten.all.default, torch.ops.aten.any.default)
        return function(*args, **options or {})


def test_the_mask_of_a_step_is_looked_at_once_for_all_layers() -> None:
    counts = []
    for layers in (2, 5):
        model, ids, cut = base(num_hidden_layers=layers), context(2), {(layer, 0): 0.5 for layer in range(layers)}
        mask = torch.ones_like(ids)
        mask[1, :9] = 0
        cache = compress(model, {"input_ids": ids, "attention_mask": mask}, cut, references="none")
        whole = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        with torch.no_grad(), _Looks() as looks:
            model(question(2)[:, :1], attention_mask=whole, **{CACHE: cache})
        counts.append(looks.count)
    assert 0 < counts[0] == counts[1]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, CompressedCache.copy])
@pytest.mark.parametrize("asked_before", [False, True])
def test_a_copy_of_a_cache_goes_its_own_way(how: Callable[[Any], Any], asked_before: bool) -> None:
    model = base("Gemma3")
    cache = compress(model, context(), 1.0)
    if asked_before:
        logits(model, cache, question())
    before = cache.get_seq_length()
    first = how(cache)
    other = how(cache)
    wanted = logits(model, first, torch.tensor([[7, 8]]))
    logits(model, cache, torch.tensor([[9, 4, 2]]))
    assert other.get_seq_length() == before
    assert torch.equal(logits(model, other, torch.tensor([[7, 8]])), wanted)


def test_forks_share_the_context_and_go_on_by_themselves() -> None:
    model = base()
    cache = compress(model, context(), CUT)
    fork, other = cache.copy(), cache.copy()
    first = logits(model, fork, question())
    assert fork.layers[0].groups is cache.layers[0].groups
    assert cache.get_seq_length() == other.get_seq_length() == CONTEXT
    assert fork.get_seq_length() == CONTEXT + 3 + NEW - 1
    assert torch.equal(logits(model, other, question()), first)
    fork.crop(CONTEXT)
    assert fork.get_seq_length() == CONTEXT
    assert torch.equal(logits(model, fork, question()), first)
    fork.crop(CONTEXT)
    with torch.no_grad():
        model(question(), **{CACHE: fork})
    whole = torch.cat([context(), question(), torch.tensor([[9]])], 1)  # as transformers has it, after a plain call
    assert model.generate(whole, **{CACHE: fork}, **GREEDY).shape == (1, CONTEXT + 4 + NEW)
    with pytest.raises(ValueError, match="crop was called with 5; expected to keep at least the 30 positions"):
        fork.crop(5)
    other.reset()
    assert torch.equal(logits(model, other, question()), first)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, cache.copy(), question()), first)


def test_chunks_keep_what_whole_heads_of_the_first_layer_have() -> None:
    model = base()
    whole, parts = compress(model, context(), CUT), compress(model, context(), CUT, chunk=15)

    def of_head(cache: CompressedCache) -> Any:
        return next(group.keys for group in cache.layers[0].groups if 1 in group.heads)

    assert difference(of_head(whole), of_head(parts)) < 1e-6
    assert parts.get_seq_length() == CONTEXT
    places = next(group.places for group in parts.layers[0].groups if 0 in group.heads)
    kept = places[places >= 0]
    assert len(set(kept.tolist())) == len(kept)
    assert int(kept.max()) == CONTEXT - 1


@pytest.mark.parametrize("references", ["own", "none"])
def test_bytes_and_rows_are_those_of_the_arrays(references: str) -> None:
    model = base()
    cache = compress(model, context(), CUT, references=references, bits=16)
    whole = compress(model, context(), 1.0)
    arrays = [
        array
        for layer in cache.layers
        for group in layer.groups
        for array in (group.keys, group.values, group.log_weight)
        if array is not None
    ]
    assert cache.nbytes == sum(array.numel() * array.element_size() for array in arrays)
    assert cache.dense_nbytes == whole.nbytes == whole.dense_nbytes
    rows = {(row["layer"], row["head"]): row for row in cache.table()}
    assert sorted(rows) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for head, row in rows.items():
        share = CUT.get(head, 1.0)
        assert share - 0.05 < row["share"] <= share
        assert (row["summaries"] > 0) == (share < 1 and references == "none")
        assert ("residual" in row) == (references == "own")


def test_a_file_answers_to_the_bit_and_for_its_model_alone(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model, file = base(), tmp_path / "context.safetensors"
    cache = compress(model, context(2), CUT)
    cache.save(file)
    loaded = CompressedCache.load(file, model)
    assert torch.equal(logits(model, loaded, question(2)), logits(model, cache.copy(), question(2)))
    with pytest.raises(ValueError, match="was made with another model, or another revision"):
        CompressedCache.load(file, base("Qwen2"))
    revised, turned = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        revised.model.layers[1].self_attn.k_proj.weight[3, 5] += 1e-3
        turned.model.rotary_emb.inv_freq[3] *= 1.1  # which is in no file of weights
    for other in (revised, turned):
        with pytest.raises(ValueError, match="another revision"):
            CompressedCache.load(file, other)
    content = file.read_bytes()
    for damaged in (content[:-10], content[:5], b"[1, 2]", content[:40] + b"~~~~" + content[44:], b""):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"context\.safetensors"):
            CompressedCache.load(file, model)
    with pytest.raises(OSError, match="missing"):
        CompressedCache.load(tmp_path / "missing", model)


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3", "Mistral"])
@pytest.mark.parametrize("chunk", [None, 7])
def test_sliding_layers_keep_their_window_and_say_so(family: str, chunk: int | None, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model, file = base(family), tmp_path / "context.safetensors"
    layers = range(model.config.num_hidden_layers)
    sliding = [layer for layer in layers if family == "Mistral" or model.config.layer_types[layer][:7] == "sliding"]
    full = [layer for layer in layers if layer not in sliding]
    cache = compress(model, context(2), {(layer, 1): 0.4 for layer in full}, chunk=chunk)
    assert f"{len(sliding)} of {len(layers)} layers slide and keep their window" in repr(cache)
    rows = cache.table()
    assert sorted({row["layer"] for row in rows if row["slides"]}) == sliding
    assert {row["slots"] for row in rows if row["slides"]} == {model.config.sliding_window - 1}
    for layer in sliding:
        keys = cache.layers[layer].keys
        assert keys.untyped_storage().nbytes() == keys.numel() * keys.element_size()  # the context is let go
        with pytest.raises(ValueError, match=f"selection names head 0 of layer {layer}, which slides"):
            compress(model, context(), {(layer, 0): 0.5})
    if not full:
        with pytest.raises(ValueError, match="all layers of the model slide"):
            compress(model, context(), 0.5)
    cache.save(file)
    loaded = CompressedCache.load(file, model)
    assert loaded.table() == rows
    assert torch.equal(logits(model, loaded, question(2)), logits(model, cache.copy(), question(2)))


def test_a_file_names_the_model_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model, file = base(), tmp_path / "context.safetensors"
    cache, other = compress(model, context(), CUT), compress(base(), context(), CUT)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    with pytest.raises(ValueError, match="weights of the LlamaModel changed after it read the context"):
        cache.save(file)
    gc.collect()
    with pytest.raises(ValueError, match="the model that made the cache is gone"):
        other.save(file)


def test_the_model_computes_without_such_a_cache_what_it_did() -> None:
    model = base()
    before = model(context(2)).logits
    cache = compress(model, context(), CUT)
    configs = {id(module.config) for module in model.modules() if hasattr(module, "config")}
    assert torch.equal(model(context(2)).logits, before)
    model(context(2)).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    with pytest.raises(ValueError, match="question has 2 rows and the cache 1"):
        cache.copy().ask(model, question(2), **GREEDY)
    with pytest.raises(ValueError, match="made with another model than this LlamaForCausalLM"):
        cache.copy().ask(base(), question(), **GREEDY)
    other = base(num_attention_heads=8, num_key_value_heads=4)
    with pytest.raises(ValueError, match=r"layer 0 has keys of 4 heads, width 4 .* and the cache 2, 8"):
        other(question(), **{CACHE: cache.copy()})
    model.model.layers[0].self_attn.attention_dropout = 0.5
    with pytest.raises(ValueError, match="without attention weights, dropout"):
        model.train()(question(), **{CACHE: cache.copy()})
    assert {id(module.config) for module in model.modules() if hasattr(module, "config")} == configs


def test_a_prepared_model_that_is_pruned_since_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    model = base()
    cache = compress(model, context(), CUT)
    cache.save(tmp_path / "cache")
    dense = model(context()).logits
    with prune(model, {0: 8, 1: 8}):
        pruned = model(context()).logits
        for call in (
            lambda: compress(model, context()),  # not the warning that heads are cut alike
            lambda: CompressedCache.load(tmp_path / "cache", model),
            lambda: head_profile(model, None),
        ):
            with pytest.raises(ValueError, match="its LlamaAttention 0 is pruned already"):
                call()
            assert torch.equal(model(context()).logits, pruned)
        with pytest.raises(TypeError, match="the cache is of type CompressedCache; expected a DynamicCache"):
            model(question(), **{CACHE: cache.copy()})
        assert torch.equal(model(context()).logits, pruned)
    assert torch.equal(model(context()).logits, dense)
    assert torch.isfinite(model(question(), **{CACHE: cache.copy()}).logits).all()


def test_the_context_is_not_read_twice() -> None:
    model = base()
    cache = compress(model, context(2), CUT)
    whole = torch.cat([context(2), question(2)], 1)
    changed = whole.clone()
    changed[:, CONTEXT - 1] = 1  # as if the tokenizer joined the last word and the question
    message = "begin with the 30 of the context, which the cache holds; expected the question alone"
    for ids in (context(2), whole, changed, changed[:, : CONTEXT - 2]):
        with pytest.raises(ValueError, match=f"question has {ids.shape[1]} tokens that {message}"):
            cache.copy().ask(model, ids, **GREEDY)
    assert model.generate(whole, **{CACHE: cache.copy()}, **GREEDY).shape == (2, CONTEXT + 3 + NEW)
    passage = context(2)[:, 3:]
    assert cache.copy().ask(model, passage, **GREEDY).shape == (2, CONTEXT - 3 + NEW)


def test_more_positions_than_were_learned_are_refused() -> None:
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 40}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=CONTEXT, **sizes)).eval()
    assert compress(model, context(), CUT).context_length == CONTEXT
    with pytest.raises(
        ValueError, match=r"context has 31 tokens; expected at most max_position_embeddings=30, as .*wpe"
    ):
        compress(model, context(1, CONTEXT + 1), CUT)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "tokens": (lambda: compress(base(), [[1, 2]], 1.0), "context is <class 'list'>; expected whole numbers"),
    "text": (lambda: compress(base(), "a text", 1.0), r"of torch, e.g. tokenizer\(text, return_tensors='pt'\)"),
    "lists": (
        lambda: compress(base(), {"input_ids": [[1, 2]]}, 1.0),
        r"context\['input_ids'\] is of type list; expected a tensor",
    ),
    "a cache for no model": (
        lambda: CompressedCache.load("none", "llama"),
        "model is of type str; expected a transfo",
    ),
    "floats": (lambda: compress(base(), torch.ones(1, 4), 1.0), r"context is torch.float32 \(1, 4\)"),
    "names": (lambda: compress(base(), {"ids": context()}, 1.0), "expected input_ids and perhaps"),
    "mask": (
        lambda: compress(base(), {"input_ids": context(), "attention_mask": torch.ones(1, 3)}, 1.0),
        r"attention_mask has shape \(1, 3\); expected \(1, 30\)",
    ),
    "nothing": (
        lambda: compress(base(), {"input_ids": context(), "attention_mask": 0 * context()}, 1.0),
        "a sequence without positions",
    ),
    "budget": (lambda: compress(base(), context(), 0), r"budget is 0; expected at least 2 slots, or a share"),
    "share": (lambda: compress(base(), context(), {(0, 0): 1.5}), r"selection\[\(0, 0\)\]: budget is 1.5; expected a"),
    "key": (lambda: compress(base(), context(), {0: 0.5}), r"selection has the key 0; expected \(layer, head\)"),
    "no layer": (lambda: compress(base(), context(), {(2, 0): 0.5}), "names layer 2; expected one of the 2"),
    "no head": (lambda: compress(base(), context(), {(1, 2): 0.5}), "names head 2 of layer 1; expected one of"),
    "kinds": (
        lambda: compress(base(), {"input_ids": context(), "token_type_ids": torch.ones(1, CONTEXT)}, 1.0),
        "token_type_ids that are not zero",
    ),
    "states": (
        lambda: compress(hybrid(), context(), 1.0),
        r"layer 0 of \w+ keeps no keys and values of its own",
    ),
    "twice": (lambda: compress(base(), context(), CUT, heads=profile()), "expected one of the two"),
    "split": (
        lambda: compress(base(), context(), of_heads(CUT, window=0.6), references="none"),
        "more than 1 together",
    ),
    "window": (
        lambda: compress(base(), context(), of_heads(CUT, window=1.5)),
        "window is 1.5; expected a count, or a share",
    ),
    "chunk": (lambda: compress(base(), context(), CUT, chunk=0), "chunk is 0"),
    "flag as layer": (lambda: compress(base(), context(), {(True, 0): 0.5}), r"selection has the key \(True, 0\)"),
    "head below 0": (lambda: compress(base(), context(), {(0, -1): 0.5}), "names head -1 of layer 0; expected one of"),
    "numbers of heads": (
        lambda: compress(base(), context(), 0.5, heads=[0]),
        "heads is of type list; expected a Head",
    ),
    "a profile alone": (lambda: compress(base(), context(), profile()), "selection is a HeadProfile; .* as heads"),
    "slots to split": (lambda: compress(base(), context(), 12, heads=profile()), "expected a share of the bytes"),
    "heads": (
        lambda: compress(base(num_hidden_layers=3), context(), 0.5, heads=profile()),
        "no cost of head 0 of layer 2",
    ),
    "pruned": (lambda: compress(pruned(), context(), CUT), "is pruned already"),
    "encoder": (lambda: compress(bert(), context(), CUT), "BertModel is no decoder"),
    "both": (lambda: compress(t5(), context(), CUT), "T5ForConditionalGeneration is no decoder"),
    "no model": (lambda: compress(torch.nn.Linear(2, 2), context(), CUT), "model is .*Linear"),
}


def bert() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.BertModel(transformers.BertConfig(vocab_size=40, **sizes)).eval()


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ).eval()


def hybrid() -> Any:
    if not hasattr(transformers, "Qwen3NextConfig"):
        pytest.skip("this transformers has no decoder of mixed layers")
    kinds = {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    layers = {"layer_types": ["linear_attention", "full_attention"], "num_experts": 0, "mlp_only_layers": [0, 1]}
    return base("Qwen3Next", num_key_value_heads=2, head_dim=8, **kinds, **layers)


def pruned() -> Any:
    model = base()
    prune(model, 8, layers=[0, 1])
    return model


def profile(costs: dict[tuple[int, int], float] | None = None, way: str = "cache") -> HeadProfile:
    costs = {(0, 0): 0.01, (0, 1): 2.0, (1, 0): 0.2, (1, 1): 0.0} if costs is None else costs
    figures = {"recall_error": 0.1, "text": 0.0, "text_error": 0.1}
    rows = [{"layer": layer, "head": head, "recall": cost, **figures} for (layer, head), cost in costs.items()]
    return HeadProfile(rows, "LlamaForCausalLM", 1 / 16, way=way)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_what_came(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def kept_of(cache: Any, layer: int = 0) -> list[list[int]]:
    """The positions that each head of a layer of the first sequence keeps, by head."""
    found = {}
    for group in cache.layers[layer].groups:
        for head, places in zip(group.heads, group.places[0], strict=True):
            found[head] = sorted(place for place in places.tolist() if place >= 0)
    return [found[head] for head in sorted(found)]


@pytest.mark.filterwarnings("ignore::levattn.RecallWarning")
def test_counts_are_slots_and_a_size_is_of_selected_keys() -> None:
    model = base()
    for selection, slots in ((12, 12), (Selection(size=5), 5), (Selection(size=5, window=3, summaries=2), 10)):
        assert {row["slots"] for row in compress(model, context(), selection).table()} == {slots}
    rows = compress(model, context(), Selection(12, window=3, sinks=2, summaries=0))
    assert all({0, 1, CONTEXT - 3, CONTEXT - 2, CONTEXT - 1} < set(places) for places in kept_of(rows))
    parts = compress(model, context(), Selection(12, sinks=0, window=0, summaries=0), chunk=CONTEXT // 2)
    assert [len(places) for places in kept_of(parts)] == [12, 12]
    for few, slots in (
        (Selection(12, window=4, sinks=2, summaries=3), 12),
        (Selection(size=4, window=4, summaries=3), 11),
    ):
        for chunk in (7, 10, CONTEXT):
            assert {row["slots"] for row in compress(model, context(), few, chunk=chunk).table()} == {slots}
    padding = torch.tensor([[0] * 20 + [1] * 10, [1] * CONTEXT])  # the first chunk of one sequence is padding
    padded = {"input_ids": context(2), "attention_mask": padding}
    assert all({0, 1} < set(places) for places in kept_of(compress(model, padded, Selection(9, sinks=2), chunk=15)))
    many = kept_of(compress(model, tokens(1, 300), Selection(size=3, summaries=290)))
    assert [len(places) for places in many] == [3, 3]  # of summaries there are 256 at most
    mixed = compress(model, context(), {(0, 0): 12, (1, 1): Selection(size=3), (1, 0): 1.0})
    assert [row["slots"] for row in mixed.table()] == [12, CONTEXT, CONTEXT, 3]


@pytest.mark.filterwarnings("ignore::levattn.RecallWarning")
def test_scores_select_the_keys_of_a_cache() -> None:
    model = base()
    dense = compress(model, context(), 1.0).layers[0].groups[0]
    K, V = dense.keys[0], dense.values[0]

    def own(K: Any, V: Any) -> Any:
        return (K * K).sum(2) * V[:, :, 0]

    centered = (K - K.mean(1, keepdim=True)).double()
    leverage = torch.diagonal(centered @ torch.linalg.pinv(centered), dim1=1, dim2=2)
    for scores, true in ((own, own(K, V)), ("leverage", leverage)):
        cache = compress(model, context(), Selection(size=6, scores=scores))
        assert kept_of(cache) == [sorted(row.topk(6).indices.tolist()) for row in true]
    with pytest.raises(ValueError, match=r"scores\(K, V\) has shape"):
        compress(model, context(), Selection(size=6, scores=lambda K, _: K))
    with pytest.raises(TypeError, match="selection has an array of scores"):
        compress(model, context(), Selection(size=6, scores=torch.ones(CONTEXT)))
    with pytest.raises(ValueError, match="expected a budget or a size of a cache"):
        compress(model, context(), Selection(epsilon=0.1))
    with pytest.raises(ValueError, match="a context is read densely; expected start=None"):
        compress(model, context(), Selection(0.5, start=9))
    renewing = compress(model, context(), Selection(size=6, scores=own, renew_every=4))
    with pytest.raises(ValueError, match="a function of scores, which no file holds"):
        renewing.save("nowhere")


@pytest.mark.filterwarnings("ignore::levattn.RecallWarning")
def test_functions_of_heads_are_told_apart_and_run_in_one_thread() -> None:
    class Column(torch.nn.Module):  # all of these look the same when printed
        def __init__(self, column: int) -> None:
            super().__init__()
            self.column = column

        def forward(self, K: Any, V: Any) -> Any:  # noqa: ARG002 (one column of the keys is enough)
            seen.add(threading.current_thread())
            return K[:, :, self.column]

    seen: set[Any] = set()
    model, few = base(), {(0, i): Selection(size=4, scores=Column(i), renew_every=4) for i in (0, 1)}
    with levattn.thread_limit(2):
        cache = compress(model, context(4), few)
    assert seen == {threading.current_thread()}
    assert [group.heads for group in cache.layers[0].groups] == [(0,), (1,)]
    model(torch.full((4, 5), 3), **{CACHE: cache})
    model(torch.full((4, 1), 3), **{CACHE: cache})  # the slots are renewed by the function of their head
    splits = cache.layers[0].renewal.splits
    assert [split.scores.column for split in splits] == [0, 1]


def test_a_calibration_brings_its_options() -> None:
    few = Selection(scores="expected", window=0, summaries=0, sinks=0)
    calibration = Calibration({(0, 0): 0.3, (1, 1): 0.5}, "LlamaForCausalLM", "logits", 0.1, 0.1, few)
    model, same = base(), (calibration, calibration.selections())
    found, expected = (kept_of(compress(model, context(), given)) for given in same)
    assert found == expected != kept_of(compress(model, context(), dict(calibration)))


def test_a_budget_without_a_profile_warns_and_with_one_is_split() -> None:
    model = base(max_position_embeddings=256)
    with pytest.warns(levattn.RecallWarning, match=r"all heads are cut alike \(Selection\(0.4\)\)"):
        alike = compress(model, context(length=200), 0.4)
    split = compress(model, context(length=200), 0.4, heads=profile(), bits=16)
    assert alike.nbytes <= 0.4 * alike.dense_nbytes
    assert split.nbytes <= 0.4 * split.dense_nbytes
    shares = {(row["layer"], row["head"]): row["share"] for row in split.table()}
    assert shares[0, 1] == 1.0
    assert shares[1, 0] > shares[1, 1]


def test_pruning_takes_the_profile_and_warns_without_one() -> None:
    model = base(max_position_embeddings=1100)
    with pytest.warns(levattn.RecallWarning, match="all heads of a decoder are pruned alike, in answers too"):
        prune(model, Selection(0.5, start=0)).remove()
    prune(model, 0.5).remove()
    prune(base("Gemma"), 1.0).remove()
    of_reading = profile(way="reading")
    shares = of_reading.shares(0.5)
    cut = [head for head, share in sorted(shares.items()) if share < 1]
    for length, expected in ((32, sorted(shares)), (1020, cut)):  # no head of a short text is whole
        with torch.no_grad(), prune(model, 0.5, heads=of_reading, measure=True) as report:
            model(context(length=length))
        slots = {(row["layer"], row["head"]): row["slots"] for row in report.table() if row["measured"]}
        assert sorted(slots) == expected
        assert all(count <= 0.5 * (length + 1) for count in slots.values())
    assert all(count <= shares[head] * 1020 for head, count in slots.items())
    with pytest.raises(TypeError, match=r"prune\(model, 0.25, heads=profile\)"):
        prune(model, profile())
    for selection, layers in ((0.5, [0]), (Selection(size=4), None), ({0: 0.5}, None), (40, None)):
        with pytest.raises(ValueError, match="expected a share of the keys as budget, and no layers"):
            prune(model, selection, layers=layers, heads=of_reading)


def test_heads_are_whole_in_texts_where_the_others_have_340_slots() -> None:
    """The first call of a cache decides, as shares are of its positions. Then outputs are equal to the last bit."""
    model, ids, heads = base(max_position_embeddings=1200), context(length=1200), profile(way="reading")
    split, alike = heads.shares(0.5), dict.fromkeys(heads, 0.5)
    assert sorted(split.values()) == [1 / 3, 1 / 3, 1 / 3, 1.0]

    def read(cache: Any, *stops: int) -> Any:
        with torch.no_grad():
            *_, last = (model(ids[:, low:high], **{CACHE: cache}).logits for low, high in pairwise(stops))
        return last

    for length, expected in ((1019, alike), (1020, split), (1100, split)):
        assert heads.shares(0.5, length=length) == expected
        found = []
        for selection, more in ((0.5, {"heads": heads}), (expected, {})):
            with prune(model, selection, measure=False, **more):
                cache = transformers.DynamicCache(config=model.config)
                whole = read(cache, 0, length)
                other = copy.deepcopy(cache)
                later = read(cache, length, length + 40, 1200), read(other, length, 1200)
                cache.reset()
                found.append((whole, *later, read(cache, 0, 500, 1200)))
        same = [torch.equal(a, b) for a, b in zip(*found, strict=True)]
        assert same == [True, True, True, expected == alike]  # in a first call of 500 positions, no head is whole
    found, mask = [], torch.ones(2, 1040, dtype=torch.int64)
    mask[0, :40] = mask[1, :100] = 0
    for selection, more in ((0.5, {"heads": heads}), (alike, {})):  # the longest sequence has 1000 positions
        with prune(model, selection, measure=False, **more), torch.no_grad():
            found.append(model(ids[:, :1040].expand(2, -1), attention_mask=mask).logits)
    assert torch.equal(*found)
    recalls = []
    for selection, more in (
        (Selection(0.5, start=0), {"heads": heads}),
        ({head: Selection(share, start=0) if share < 1 else share for head, share in split.items()}, {}),
    ):
        with prune(model, selection, measure=False, **more):  # answers are pruned too
            recalls.append(read(transformers.DynamicCache(config=model.config), 0, 500, 1200))
    assert torch.equal(*recalls)


def test_calibration_takes_how_heads_share_a_budget_from_the_profile() -> None:
    model, inputs = base(), {"input_ids": context(2)}
    heads = profile(way="reading")
    shares = (0.3, 0.5, 0.7)
    found = calibrate(model, inputs, target=1e9, metric="logits", budgets=shares, heads=heads)
    assert dict(found) == heads.shares(0.3)
    tight = calibrate(model, inputs, target=1e-30, metric="logits", budgets=shares, heads=heads)
    assert dict(tight) == heads.shares(0.7)  # whole heads and shares above a half: dense attention, to the last bit
    middle = calibrate(model, inputs, target=found.reached * 0.9, metric="logits", budgets=shares, heads=heads)
    assert dict(middle) in [heads.shares(share) for share in (0.5, 0.7, 1.0)]
    texts = {"input_ids": tokens(60, 12)}
    risky = calibrate(model, texts, risk=0.999, confidence=0.5, metric="logits", budgets=shares, heads=heads)
    assert dict(risky) in [heads.shares(share) for share in shares]
    with pytest.raises(ValueError, match="expected no layers"):
        calibrate(model, inputs, target=1.0, layers=[0], heads=heads)


@pytest.mark.parametrize("heads", [256, 1000, 4096])
def test_the_whole_budget_leaves_all_of_many_heads_whole(heads: int) -> None:
    costs = np.random.default_rng(0).exponential(size=heads) ** 3
    found = profile({(0, head): float(cost) for head, cost in enumerate(costs)})
    assert set(found.shares(1.0).values()) == {1.0}


def test_profile_is_written_down_and_read(tmp_path: Path) -> None:
    file, found = tmp_path / "heads.json", profile()
    found.save(file)
    again = HeadProfile.load(file)
    assert dict(again) == dict(found) == {(0, 0): 0.01, (0, 1): 2.0, (1, 0): 0.2, (1, 1): 0.0}
    assert again.to_dict() == found.to_dict()
    document = json.loads(file.read_text())
    for change in (
        {"format": "other"},
        {"version": 7},
        {"heads": []},
        {"heads": document["heads"] * 2},
        {"heads": [{**document["heads"][0], "recall": 10**400}]},
        {"heads": [{"layer": 0}]},
        {"share": 2},
    ):
        file.write_text(json.dumps({**document, **change}))
        with pytest.raises(ValueError, match=r"heads\.json"):
            HeadProfile.load(file)
    file.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        HeadProfile.load(file)


class Letters:
    """A tokenizer of single characters, some of whose tokens are words with a space before them."""

    bos_token_id = 1
    all_special_ids = (0, 1)

    def __len__(self) -> int:
        return 40

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [2 + ord(letter) % 38 for letter in text]}

    def decode(self, ids: list[int]) -> str:
        return f" word{chr(97 + ids[0] % 26)}" if ids[0] > 4 else "?"


@pytest.mark.parametrize("texts", [None, ["the quick brown fox jumps over the dog " * 10] * 2])
def test_profile_measures_every_head(texts: list[str] | None) -> None:
    model, done = base(max_position_embeddings=512), []
    found = levattn_profile(model, texts=texts, progress=lambda heads, total: done.append((heads, total)))
    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(math.isfinite(row[name]) for row in found.table() for name in ("recall", "text", "recall_error"))
    steps = 2 + 3 * 2 * 4 + (0 if texts else 256)  # readings, heads, tokens that the model writes
    assert done == [(k, steps) for k in range(1, steps + 1)]
    assert dict(levattn_profile(model, texts=texts)) == dict(found)


def test_one_round_of_a_profile_cuts_each_head_alone() -> None:
    model, texts = base(max_position_embeddings=512), ["the quick brown fox jumps over the dog " * 10] * 2
    done: list[Any] = []
    one = levattn_profile(model, texts=texts, rounds=1, progress=lambda *steps: done.append(steps))
    assert done[-1] == (2 + 2 * 4, 2 + 2 * 4)
    assert dict(one) != dict(levattn_profile(model, texts=texts))
    with pytest.raises(ValueError, match="rounds is 0"):
        levattn_profile(model, texts=texts, rounds=0)


def changed(output: Any) -> Any:
    """What a layer gives, without signs: a tensor, or in older versions a tuple that begins with one."""
    return output.abs() if isinstance(output, torch.Tensor) else (output[0].abs(), *output[1:])


def levattn_profile(model: Any, **options: Any) -> HeadProfile:
    return head_profile(model, Letters(), tasks=2, positions=256, **options)


def test_profile_refuses_what_it_cannot_measure() -> None:
    model = base(max_position_embeddings=512)
    with pytest.raises(ValueError, match=r"texts\[0\] has 5 tokens; expected at least 352"):
        levattn_profile(model, texts=["short", "texts"])
    with pytest.raises(ValueError, match="expected at least tasks=2 strings"):
        levattn_profile(model, texts=["one"])
    with pytest.raises(ValueError, match="training mode"):
        levattn_profile(model.train())
