"""Changed models and compressed caches where users have them: options of generate, wrappers, offloaded weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import CACHE, SIZES, base, of_heads, tokens  # noqa: E402

from levattn.attention import Selection  # noqa: E402
from levattn.integrations.transformers import CompressedCache, compress, evaluate, inspect_model, prune  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 20
GREEDY = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
QUESTION = torch.tensor([[3, 14, 15]])
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def whole() -> Any:
    return torch.cat([tokens(1), QUESTION], 1)


def cache_of(model: Any, budget: Any = 1.0) -> CompressedCache:
    return compress(model, tokens(1), budget)


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    letters = tokenizers.models.BPE({letter: number for number, letter in enumerate(LETTERS)}, [])
    made = tokenizers.Tokenizer(letters)
    made.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="a")


# Options of generate


def test_strings_that_stop_an_answer_stop_it() -> None:
    model = base()
    stop = LETTERS[int(model.generate(whole(), **GREEDY)[0, CONTEXT + 5])]
    options = {**GREEDY, "stop_strings": [stop], "tokenizer": tokenizer()}
    dense = model.generate(whole(), **options)
    assert dense.shape[1] < CONTEXT + 3 + 9
    with prune(model, 64, layers=[1]):
        assert torch.equal(model.generate(whole(), **options), dense)
    assert torch.equal(cache_of(model).ask(model, QUESTION, **options), dense[:, CONTEXT:])
    assert torch.equal(model.generate(whole(), **{CACHE: cache_of(model)}, **options), dense)


@pytest.mark.parametrize("drafts", ["lookup", "assistant"])
def test_drafts_give_the_same_answers_and_the_cache_goes_on(drafts: str) -> None:
    model = base(eos_token_id=39)  # which some releases need for drafts
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 2}
    if drafts == "assistant":
        options = {"assistant_model": base(num_hidden_layers=1, eos_token_id=39)}
    dense = model.generate(whole(), **GREEDY)
    cache = cache_of(model)
    assert torch.equal(cache.ask(model, QUESTION, **options, **GREEDY), dense[:, CONTEXT:])
    assert torch.equal(cache.tokens, dense)
    assert cache.get_seq_length() < dense.shape[1]
    further = torch.cat([dense, QUESTION], 1)
    mask = torch.ones_like(further)  # token 0 among them is no padding
    expected = model.generate(further, attention_mask=mask, **GREEDY)[:, dense.shape[1] :]
    assert torch.equal(cache.copy().ask(model, QUESTION, **options, **GREEDY), expected)
    assert torch.equal(cache.ask(model, QUESTION, **GREEDY), expected)
    length = dense.shape[1]
    found = cache_of(model).ask(model, QUESTION, max_length=length, do_sample=False, pad_token_id=0, **options)
    assert torch.equal(found, dense[:, CONTEXT:])
    config = transformers.GenerationConfig(max_length=length, do_sample=False, pad_token_id=0, eos_token_id=39)
    found = cache_of(model).ask(model, QUESTION, generation_config=config, **options)
    assert torch.equal(found, dense[:, CONTEXT:])


class Streamer:
    def __init__(self) -> None:
        self.got: list[int] = []

    def put(self, value: Any) -> None:
        self.got += value.reshape(-1).tolist()

    def end(self) -> None:
        self.got.append(-1)


def test_a_streamer_gets_what_the_question_and_the_answer_have() -> None:
    model, streamer = base(), Streamer()
    found = cache_of(model).ask(model, QUESTION, streamer=streamer, **GREEDY)
    assert streamer.got == [*found[0].tolist(), -1]


REFUSED: dict[str, tuple[Callable[[Any, CompressedCache], Any], type[Exception], str]] = {
    "no tokens": (lambda m, c: c.ask(m, QUESTION[:, :0], **GREEDY), ValueError, "question has no tokens"),
    "a list": (lambda m, c: c.ask(m, [[3, 14]], **GREEDY), TypeError, "question is <class 'list'>; expected whole"),
    "lists of a tokenizer": (
        lambda m, c: c.ask(m, {"input_ids": [[3, 14]]}, **GREEDY),
        TypeError,
        r"question\['input_ids'\] is of type list",
    ),
    "a mask of the whole": (
        lambda m, c: c.ask(m, QUESTION, attention_mask=torch.ones(1, 23), **GREEDY),
        ValueError,
        r"attention_mask has shape \(1, 23\); expected \(1, 3\)",
    ),
    "a mask of four axes": (
        lambda m, c: c.ask(m, QUESTION, attention_mask=torch.ones(1, 1, 3, 23), **GREEDY),
        ValueError,
        r"attention_mask has shape \(1, 1, 3, 23\)",
    ),
    "a mask that is not causal": (
        lambda m, c: m(QUESTION, attention_mask=torch.zeros(1, 1, 3, 23), **{CACHE: c}),
        ValueError,
        "not causal",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_questions_that_no_cache_takes_are_refused(case: str) -> None:
    ask, kind, message = REFUSED[case]
    model = base()
    with pytest.raises(kind, match=message):
        ask(model, cache_of(model))


def test_a_pipeline_answers_with_a_cache() -> None:
    model, of = base(), tokenizer()
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=of)
    text = of.decode(whole()[0])
    dense = pipe(text, **GREEDY)
    assert pipe(text, **{CACHE: cache_of(model)}, **GREEDY) == dense


# Models


def seeing() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **sizes},
        text_config={"model_type": "llama", **SIZES, "num_key_value_heads": 2},
        image_token_index=39,
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def test_a_decoder_beside_a_part_that_reads_images() -> None:
    model = seeing()
    dense = model.generate(whole(), **GREEDY)
    assert torch.equal(cache_of(model).ask(model, QUESTION, **GREEDY), dense[:, CONTEXT:])
    assert torch.equal(model.generate(whole(), **{CACHE: cache_of(model)}, **GREEDY), dense)


def test_a_picture_in_a_question_with_beams_is_refused() -> None:
    model, context, question = seeing(), tokens(1).clamp(max=30), torch.tensor([[5, 39, 39, 39, 39, 6]])
    pixels, cache = {"pixel_values": torch.randn(1, 3, 8, 8)}, compress(model, context, 1.0)
    with pytest.raises(ValueError, match=r"pixel_values was given with beams; .* Leave out the beams"):
        cache.ask(model, question, num_beams=2, **pixels, **GREEDY)
    if transformers.__version__ < "5":
        with pytest.raises(ValueError, match=r"pixel_values was given to ask; .* Use transformers 5.0 or newer"):
            cache.ask(model, question, **pixels, **GREEDY)
        return
    text = torch.cat([context, cache.ask(model, question, **pixels, **GREEDY), QUESTION], 1)
    wanted = model.generate(text, **pixels, **GREEDY)[:, text.shape[1] - 3 :]
    assert torch.equal(cache.ask(model, QUESTION, **GREEDY), wanted)


def answered_beside(one: Any, other: Any, model: Any) -> list[Any]:
    """Answers of two caches; the second is asked while the first one answers, and begins after it."""
    found: list[Any] = []
    begun = Event()

    def asked(cache: Any, rows: int, meanwhile: Callable[[], Any]) -> Any:
        def stops(ids: Any, scores: Any, **_: Any) -> Any:
            meanwhile()
            return torch.zeros(len(ids), dtype=torch.bool)

        criteria = transformers.StoppingCriteriaList([stops])
        return cache.ask(model, QUESTION.expand(rows, -1), stopping_criteria=criteria, **GREEDY)

    aside = Thread(target=lambda: found.append(asked(other, 1, begun.set)))
    first = asked(one, 2, lambda: begun.wait(0.03) if aside.ident else aside.start())
    assert not begun.is_set()  # the model has one count for all threads
    aside.join()
    return [first, *found]


@pytest.mark.skipif(transformers.__version__ < "5", reason="models count positions otherwise there")
def test_positions_after_a_picture_are_those_of_the_cache_that_read_it(tmp_path: Path) -> None:
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = transformers.Qwen2VLConfig(
        text_config={**SIZES, "num_key_value_heads": 2, "rope_parameters": rotary},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
        **{"image_token_id": 39, "video_token_id": 38, "vision_start_token_id": 37, "vision_end_token_id": 36},
    )
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    context, picture = tokens(1).clamp(max=30), torch.tensor([[37, 39, 39, 39, 39, 36]])
    kinds = {"mm_token_type_ids": (torch.cat([context, picture], 1) == 39).int()}
    kinds = kinds if "mm_token_type_ids" in signature(model.forward).parameters else {}
    seen = {**kinds, "pixel_values": torch.randn(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    dense = model.generate(torch.cat([context, QUESTION], 1), **GREEDY)[:, CONTEXT:]
    cache, pictures = compress(model, context, 1.0), compress(model, context, 1.0)
    pictures.ask(model, picture, **seen, **GREEDY)
    again = pictures.copy().ask(model, QUESTION, **GREEDY)
    trial = partial(evaluate, model, tokenizer(), LETTERS[:30], ["ab"], budgets=[{(0, 0): 0.5}], answer_tokens=1)
    losses = [row["loss"] for row in trial().table()]
    other = model.model.rope_deltas = torch.tensor([[-9], [-8]])  # of another text with pictures
    assert torch.equal(cache.ask(model, QUESTION, **GREEDY), dense)
    pictures.batch_repeat_interleave(2)
    assert torch.equal(pictures.ask(model, QUESTION.expand(2, -1), **GREEDY), again.expand(2, -1))
    assert [row["loss"] for row in trial().table()] == losses
    assert model.model.rope_deltas is other
    found = answered_beside(pictures.copy(), cache.copy(), model)
    assert torch.equal(found[0], pictures.ask(model, QUESTION.expand(2, -1), **GREEDY))
    assert torch.equal(found[1], cache.ask(model, QUESTION, **GREEDY))
    cache.save(tmp_path / "text")
    if kinds:  # else this transformers counts a picture as its tokens
        with pytest.raises(ValueError, match=r"holds pictures, .*expected text alone. Save a copy"):
            pictures.save(tmp_path / "pictures")


def test_gradients_flow_through_groups_of_heads_that_are_not_side_by_side() -> None:
    model = base("Phi", num_key_value_heads=4).double()  # whose norms stay in float64
    cache = cache_of(model, {(0, 0): 0.5, (0, 2): 0.5, (1, 1): 0.3})

    def total(states: Any) -> Any:
        return model(inputs_embeds=states, **{CACHE: cache.copy()})[0].sum()

    states = model.get_input_embeddings()(QUESTION).detach()
    with torch.no_grad():
        without = total(states)
    found = total(states.requires_grad_(True))
    torch.testing.assert_close(found, without)
    (of,) = torch.autograd.grad(found, states)
    direction = torch.randn(states.shape, dtype=torch.float64)
    with torch.no_grad():
        ends = [total(states + step * direction) for step in (-1e-6, 1e-6)]
    assert float((of * direction).sum()) == pytest.approx(float(ends[1] - ends[0]) / 2e-6, rel=1e-5)


def with_adapters(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


WRAPPERS: dict[str, tuple[Callable[[Any], Any], str]] = {  # and the way to the model
    "PeftModel": (with_adapters, "model.get_base_model()"),
    "OptimizedModule": (torch.compile, "model._orig_mod"),
    "DataParallel": (torch.nn.DataParallel, "model.module"),
    "OptimizedModule of adapters": (lambda x: torch.compile(with_adapters(x)), "model._orig_mod.get_base_model()"),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapper_is_refused_with_the_way_to_the_model_in_it(kind: str) -> None:
    wrap, way = WRAPPERS[kind]
    inner = base()
    cache = cache_of(inner)
    model = wrap(inner)
    message = re.escape(f"{kind.split()[0]}, a wrapper; ") + ".*" + re.escape(f"Give {way}, and")
    for use in (lambda: prune(model, 8), lambda: cache_of(model), lambda: cache.ask(model, QUESTION, **GREEDY)):
        with pytest.raises(TypeError, match=message):
            use()
    assert eval(way, {"model": model}) is inner


def test_a_model_with_adapters_reads_its_caches() -> None:
    model = with_adapters(base())
    inner = model.get_base_model()
    dense = model.generate(input_ids=whole(), **GREEDY)
    assert torch.equal(cache_of(inner).ask(inner, QUESTION, **GREEDY), dense[:, CONTEXT:])


def elsewhere(how: str, folder: Path) -> Any:
    """A model of which accelerate keeps all weights elsewhere, or some."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = base()
    if how == "memory":
        accelerate.cpu_offload(model, torch.device("cpu"))
    elif how == "disk":
        accelerate.disk_offload(model, str(folder), torch.device("cpu"))
    else:
        parts = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.rotary_emb", "lm_head"), "cpu")
        parts |= dict.fromkeys(("model.layers.1", "model.norm"), "disk")
        accelerate.dispatch_model(model, parts, main_device="cpu", offload_dir=str(folder), force_hooks=True)
    return model


@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids` being on a device type")
@pytest.mark.parametrize("how", ["memory", "disk", "some on disk"])
def test_weights_may_be_elsewhere(how: str, tmp_path: Path) -> None:
    moved = elsewhere(how, tmp_path)
    torch.manual_seed(0)
    model, file = base(), tmp_path / "context"
    dense = model.generate(whole(), **GREEDY)
    cache = cache_of(moved)
    cache.save(file)
    assert torch.equal(cache.ask(moved, QUESTION, **GREEDY), dense[:, CONTEXT:])
    for reader in (moved, model):  # the weights are the same
        assert torch.equal(CompressedCache.load(file, reader).ask(reader, QUESTION, **GREEDY), dense[:, CONTEXT:])
    with prune(moved, 64, layers=[0, 1]):
        assert torch.equal(moved.generate(whole(), **GREEDY), dense)
    assert inspect_model(moved, {"input_ids": whole()}).rows == inspect_model(model, {"input_ids": whole()}).rows


@pytest.mark.skipif(transformers.__version__ < "5", reason="JetMoE goes past the attention interface there")
def test_heads_repeated_one_after_another_are_pruned_and_inspected() -> None:
    model = base("JetMoe", num_key_value_heads=2, kv_channels=8, num_local_experts=2, num_experts_per_tok=2)
    assert len(inspect_model(model, {"input_ids": whole()}).rows) == 8
    dense = model.generate(whole(), **GREEDY)
    with prune(model, 64, layers=[0, 1]):
        assert torch.equal(model.generate(whole(), **GREEDY), dense)
    assert torch.equal(cache_of(model).ask(model, QUESTION, **GREEDY), dense[:, CONTEXT:])


def test_positions_are_those_that_generate_gives() -> None:
    config = transformers.RobertaConfig(**{**SIZES, "is_decoder": True, "pad_token_id": 1})
    model = transformers.RobertaForCausalLM(config).eval()
    options = {**GREEDY, "pad_token_id": 1}
    dense = model.generate(whole(), attention_mask=torch.ones_like(whole()), **options)
    assert torch.equal(cache_of(model).ask(model, QUESTION, **options), dense[:, CONTEXT:])


def test_padding_after_tokens_is_refused_where_layers_slide() -> None:
    model = base("Gemma3")
    ids, mask = tokens(2), torch.ones(2, CONTEXT, dtype=torch.int64)
    mask[1, -4:] = 0
    with pytest.raises(ValueError, match="padding after tokens, which would fill the windows of layers that slide"):
        compress(model, {"input_ids": ids, "attention_mask": mask}, 1.0)
    cache = compress(model, ids, 1.0)
    with pytest.raises(ValueError, match="padding after tokens, which would fill the windows of layers that slide"):
        cache.ask(model, {"input_ids": QUESTION.expand(2, -1), "attention_mask": torch.tensor([[1] * 3, [0, 1, 1]])})


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("DiffLlama", {"num_key_value_heads": 2}, "DiffLlamaForCausalLM: layer 0 of the model calls chunk"),
        ("OpenAIGPT", {"n_embd": 32}, "OpenAIGPTModel takes no cache"),
    ],
)
def test_models_that_cannot_be_compressed_are_refused_by_name(
    family: str, options: dict[str, Any], message: str
) -> None:
    if family == "OpenAIGPT":
        config = transformers.OpenAIGPTConfig(vocab_size=40, n_positions=96, n_embd=32, n_layer=2, n_head=4)
        model = transformers.OpenAIGPTLMHeadModel(config).eval()
    else:
        model = base(family, **options)
    with pytest.raises(ValueError, match=message):
        cache_of(model)


def test_a_decoder_that_sees_later_tokens_is_refused() -> None:
    model = base()
    model.config.is_causal = False
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has is_causal=False, .*expected a causal decoder. Set"):
        cache_of(model)


CUT = {(0, 0): 0.5, (1, 1): 0.4}


def answers(model: Any, cache: Any, steps: Any, dtype: Any, **options: Any) -> list[Any]:
    """Logits of a question and of tokens after it, in a context of autocast if there is a dtype."""
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
        return [model(ids, **{CACHE: cache}, **options).logits for ids in steps]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Llama", "GPTNeoX", "Gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reads", ["inside", "outside", "inside, in chunks"])
def test_autocast_answers_as_a_dense_cache(implementation: str, family: str, dtype: Any, reads: str) -> None:
    model = base(family, attn_implementation=implementation)
    steps = [QUESTION, QUESTION[:, :1], QUESTION[:, 1:2]]
    dense = transformers.DynamicCache(config=model.config)
    answers(model, dense, [tokens(1)], None if reads == "outside" else dtype)
    expected = answers(model, dense, steps, dtype)
    cut = {(1, 1): 0.5}
    # Rounding may send a token to another summary at a renewal, so only cuts without summaries are renewed.
    less = (of_heads(cut), of_heads(cut, renew_every=4, summaries=0.0))
    chunk = 7 if "chunks" in reads else None
    with torch.autocast("cpu", dtype, enabled=reads != "outside"):
        found, *cuts = (compress(model, tokens(1), few, chunk=chunk) for few in (Selection(1.0, renew_every=4), *less))
    for a, b in zip(answers(model, found, steps, dtype), expected, strict=True):
        assert a.dtype == b.dtype
        assert float((a - b).abs().max()) < 0.05 * float(b.abs().max())
    for few, cache in zip(less, cuts, strict=True):
        plain = answers(model, compress(model, tokens(1), few, chunk=chunk), steps, None)
        for a, b in zip(answers(model, cache, steps, dtype), plain, strict=True):
            assert float((a - b).abs().max()) < 0.05 * float(b.abs().max())


def test_autocast_leaves_float64_as_it_is() -> None:
    model = base().double()
    steps = [QUESTION, QUESTION[:, :1]]
    for a, b in zip(
        *(answers(model, cache_of(model, CUT), steps, kind) for kind in (torch.bfloat16, None)), strict=True
    ):
        assert torch.equal(a, b)


def test_weights_of_attention_over_slots_are_refused() -> None:
    model = base(attn_implementation="eager", num_hidden_layers=3)
    for budget in (1.0, CUT):
        cache, errors = cache_of(model, budget), []
        for ask in (
            lambda held: model(QUESTION, output_attentions=True, **{CACHE: held}),
            lambda held: held.ask(model, QUESTION, output_attentions=True, return_dict_in_generate=True, **GREEDY),
        ):
            with pytest.raises(ValueError, match=r"weights of attention .*not formed over slots") as caught:
                ask(cache.copy())
            errors.append(caught)  # holds the weights, which later calls must not take for their own
        if transformers.__version__ < "5":  # there a call that raises goes on to collect weights
            continue
        expected = cache.copy().ask(model, QUESTION, **GREEDY)
        assert torch.equal(cache.ask(model, QUESTION, output_hidden_states=True, **GREEDY), expected)
    few = base(attn_implementation="eager")
    found = few(QUESTION, output_attentions=True, **{CACHE: cache_of(few)})
    with pytest.raises(ValueError, match=r"calls mean on the keys of a cache of levattn.* without attention weights"):
        found.attentions[0].mean()
    assert found.logits.isfinite().all()


ASKED: dict[str, Callable[[Any, Any], Any]] = {
    "compress": lambda model, _: cache_of(model),
    "ask": lambda model, cache: cache.ask(model, QUESTION, **GREEDY),
    "call": lambda model, cache: answers(model, cache, [QUESTION], None),
}


@pytest.mark.filterwarnings("ignore:_compile flag:DeprecationWarning")
@pytest.mark.parametrize("how", ASKED)
def test_flex_attention_is_refused_by_name(how: str) -> None:
    model = base()
    cache = cache_of(model)
    model.set_attn_implementation("flex_attention")
    # A call makes masks before it reads the cache, and would compile them
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(ValueError, match=r"attention 'flex_attention'; .*set_attn_implementation\('sdpa'\)"),
    ):
        ASKED[how](model, cache)
    model.set_attn_implementation("sdpa")
    assert torch.isfinite(answers(model, cache, [QUESTION], None)[0]).all()


def flash(_module: Any, q: Any, k: Any, v: Any, _mask: Any, **_: Any) -> Any:
    """The first steps of attention of the kind "flash_attention_2"."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v), None


def in_place(_module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> Any:
    each = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, dim=1)
    logits = q @ k.mT
    logits.mul_(2 * scaling)
    logits /= 2
    if mask is not None:
        logits += torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return (logits.softmax(-1) @ v).transpose(1, 2), None


def with_attention(function: Any) -> Any:
    transformers.AttentionInterface.register("of_a_test", function)
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    transformers.AttentionMaskInterface.register("of_a_test", masks)
    model = base()
    model.set_attn_implementation("of_a_test")
    return model


def test_attention_that_exchanges_positions_and_heads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"transpose\(1, 2\), as attention of the kind 'flash_attention_2' does"):
        cache_of(with_attention(flash))


def test_steps_in_place_count() -> None:
    model = with_attention(in_place)
    model.set_attn_implementation("sdpa")
    cache = cache_of(model)
    expected = answers(model, cache.copy(), [QUESTION], None)[0]
    model.set_attn_implementation("of_a_test")
    found = answers(model, cache, [QUESTION], None)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mask_hides_the_padding_of_the_context_and_nothing_else_of_it(implementation: str, side: str) -> None:
    model = base(attn_implementation=implementation).double()
    ids, mask = tokens(2), torch.ones(2, CONTEXT + 3, dtype=torch.int64)
    mask[1, slice(0, 5) if side == "left" else slice(CONTEXT - 5, CONTEXT)] = 0
    padded = compress(model, {"input_ids": ids, "attention_mask": mask[:, :CONTEXT]}, CUT, bits=16)
    positions = (mask.cumsum(1) - 1)[:, CONTEXT:]
    asked, options = [QUESTION.expand(2, -1)], {"attention_mask": mask, "position_ids": positions}
    found = answers(model, padded.copy(), asked, None, **options)[0]
    alone = compress(model, ids[1:, mask[1, :CONTEXT].bool()], CUT, bits=16)
    room = {"rtol": 1e-5, "atol": 1e-5}  # norms of Llama are in float32, and products of a batch have other rounding
    torch.testing.assert_close(found[1:], answers(model, alone, [QUESTION], None)[0], **room)
    for row, column in ((0, 0), (0, 7), (1, CONTEXT // 2)):
        more = mask.clone()
        more[row, column] = 0
        with pytest.raises(ValueError, match="hides positions of the context other than its padding"):
            answers(model, padded.copy(), asked, None, **{**options, "attention_mask": more})
        other = padded.copy()
        other.batch_select_indices(torch.tensor([1 - row, 1 - row]))
        theirs = {"position_ids": positions[[1 - row] * 2], "attention_mask": mask[[1 - row] * 2]}
        torch.testing.assert_close(answers(model, other, asked, None, **theirs)[0], found[[1 - row] * 2], **room)
    with pytest.raises(ValueError, match="hides positions of the context other than its padding"):
        answers(model, cache_of(model), [QUESTION], None, attention_mask=mask[1:])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("measure", [None, pytest.param(True, marks=pytest.mark.thorough)])
def test_compiled_models_are_pruned_and_measured_as_others(measure: bool | None) -> None:
    torch.compiler.reset()
    model, graphs, long = base(), [], tokens(2).repeat(1, 3)
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph)
    for _ in range(2):
        with torch.no_grad(), prune(model, Selection(12, start=0), layers=[0, 1], measure=measure) as report:
            expected = model(long)[0]
        with torch.no_grad(), prune(model, Selection(12, start=0), layers=[0, 1], measure=measure) as found:
            torch.testing.assert_close(compiled(long)[0], expected, rtol=1e-4, atol=1e-4)
        for mine, row in zip(found.table(), report.table(), strict=True):
            figures = [[each[name] or 0 for name in ("calls", "measured", "slots", "error")] for each in (mine, row)]
            assert figures[0] == pytest.approx(figures[1], rel=1e-3)
        assert found.summary()["measured_calls"] == (1 if measure is None else 2)
    assert len(graphs) <= 12  # before, between and after the attentions; of the statistics there are none


class Logits(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)

    def forward(self, ids: Any) -> Any:
        return self.model(ids, use_cache=False)[0]


WRITTEN: dict[str, Callable[[Any], Any]] = {
    "torch.export": lambda model: torch.export.export(Logits(model), (tokens(),), strict=False),
    "torch.jit.trace": lambda model: torch.jit.trace(Logits(model), (tokens(),), check_trace=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.parametrize("selection", [8, Selection(8, start=0)])  # one reads these positions densely
def test_graphs_of_pruned_models_are_refused_by_name(how: str, selection: Any) -> None:
    if how == "torch.jit.trace" and transformers.__version__ < "5":
        pytest.skip("masks of this release cannot be traced")
    model = base()
    with (
        torch.no_grad(),
        prune(model, selection),
        pytest.raises(NotImplementedError, match=rf"LlamaAttention 0 was called under {how}, which hides the numbers"),
    ):
        WRITTEN[how](model)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_compiled_models_read_compressed_caches() -> None:
    torch.compiler.reset()
    model, graphs = base(), []
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph)
    with torch.no_grad():
        cache = cache_of(model, {(0, 0): 0.5})
        fork = cache.copy()
        for asked in (QUESTION, QUESTION[:, :1], QUESTION[:, :1]):
            expected = model(asked, **{CACHE: fork})[0]
            torch.testing.assert_close(compiled(asked, **{CACHE: cache})[0], expected, rtol=1e-4, atol=1e-4)
    assert graphs
    assert not any("meta" in graph.code for graph in graphs)  # inductor has no code for the shadows of stand-ins
