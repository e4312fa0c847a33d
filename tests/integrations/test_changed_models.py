"""What holds of every changed decoder, pruned or extended: caches, padding, coming and going, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import CACHE, LEFT, PADDED, SIZES, T, base, difference, output, position_ids, tokens  # noqa: E402

from levattn.attention import Selection  # noqa: E402
from levattn.integrations.transformers import (  # noqa: E402
    inspect_model,
    latent_parameters,
    latent_state_dict,
    macchiato_from,
    prune,
    register,
    remove,
)

SPLIT = Selection(size=1, summaries=1, window=1, sinks=1, renew_every=2)  # selects first after 12 keys
LATENTS = {"window": 6, "latents": 3}
FORMS: dict[str, dict[str, Any]] = {
    "extended": LATENTS,
    "extended, exclusive": LATENTS | {"overlap": "exclusive"},
    "extended, conv": LATENTS | {"feature": "conv"},
    "extended, rg_lru": LATENTS | {"feature": "rg_lru", "overlap": "exclusive"},
    "extended, one layer": LATENTS | {"layers": [1]},
    "pruned": {"selection": SPLIT},
    "pruned, all keys": {"selection": 200},
    "pruned, one head": {"selection": SPLIT, "heads": [0]},
    "pruned, share": {"selection": Selection(0.34, renew_every=2)},
}
CASES = [
    *((form, "Llama") for form in FORMS),
    *(("extended", family) for family in ("Gemma2", "Qwen2", "Mistral", "GPTNeoX")),
    *(("pruned", family) for family in ("Gemma", "Qwen2", "Mistral", "GPTNeoX")),
    *(
        pytest.param("extended, exclusive", family, marks=pytest.mark.thorough)
        for family in ("Gemma2", "Qwen2", "Mistral", "GPTNeoX")
    ),
]
over_cases = pytest.mark.parametrize(("form", "family"), CASES)
over_forms = pytest.mark.parametrize("form", FORMS)
both = pytest.mark.parametrize("form", ["extended", "pruned"])

# Heads are pruned alike here, as nothing is recalled
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::levattn.RecallWarning")]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def model_for(form: str, family: str = "Llama", **options: Any) -> Any:
    """A model that can be changed in this way: pruned layers do not slide."""
    wide = (
        {"sliding_window": SIZES["max_position_embeddings"]}
        if family == "Mistral" and not form.startswith("extended")
        else {}
    )
    return base(family, **wide | options)


def change(model: Any, form: str) -> Any:
    if not form.startswith("extended"):
        prune(model, **FORMS[form])
        return model
    macchiato_from(model, **FORMS[form])
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # as if it had been trained, so that latents have much of the weight
        for parameter in latent_parameters(model):
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
        for name, tensor in latent_state_dict(model).items():
            if name.endswith("gate.bias"):
                tensor.sub_(3)
    return model


def changed(form: str, family: str = "Llama", **options: Any) -> Any:
    return change(model_for(form, family, **options), form)


def in_parts(model: Any, ids: Any, cuts: list[int], real: Any = None) -> tuple[Any, Any]:
    """The logits of tokens that come in parts, and the cache in the end."""
    past, found, low = None, [], 0
    for part in ids.split(cuts, 1):
        high = low + part.shape[1]
        padding = {}
        if real is not None:
            padding = {"attention_mask": real[:, :high], "position_ids": position_ids(real)[:, low:high]}
        with torch.no_grad():
            result = model(part, use_cache=True, **{CACHE: past}, **padding)
        past, low = result[CACHE], high
        found.append(result.logits)
    return torch.cat(found, 1), past


def looks(model: Any) -> dict[str, Any]:
    """What a change could leave behind on a model."""
    return {
        name: (
            id(getattr(module, "config", None)),
            sorted(vars(module).keys() - {"masked_key_indices"}),  # which kvpress leaves on what it calls
            len(module._forward_pre_hooks),
            len(module._forward_hooks),
            module.training,
        )
        for name, module in model.named_modules()
    } | {
        "implementation": model.config._attn_implementation,
        "state": list(model.state_dict()),
        "trained": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
    }


# Decoding


@over_cases
def test_decoding_is_the_forward_pass(form: str, family: str) -> None:
    model, ids = changed(form, family), tokens(length=26)
    wanted = output(model, ids, use_cache=False)
    assert difference(output(model, ids), wanted) < 1e-4
    if "share" in form:  # which is of the positions of the first call
        return
    for cuts in ([1] * 26, [9, 1, 1, 3, 12]):
        found, past = in_parts(model, ids, cuts)
        assert past.get_seq_length() == 26
        assert difference(found, wanted) < 1e-4


@over_cases
def test_padding_on_the_left_changes_nothing(form: str, family: str) -> None:
    model, ids = changed(form, family), tokens()
    together, _ = in_parts(model, ids, [12, 1, 7], LEFT)
    first, _ = in_parts(model, ids[:1], [12, 1, 7])
    second, _ = in_parts(model, ids[1:, PADDED:], [12 - PADDED, 1, 7])
    assert difference(together[:1], first) < 1e-4
    assert difference(together[1:, PADDED:], second) < 1e-4
    if family not in ("Llama", "Gemma2"):
        return
    more = {"max_new_tokens": 7, "do_sample": False}
    for beams in (1, 3):
        together = model.generate(ids, attention_mask=LEFT, num_beams=beams, **more)
        assert torch.equal(together[:1], model.generate(ids[:1], num_beams=beams, **more))
        assert torch.equal(together[1:, PADDED:], model.generate(ids[1:, PADDED:], num_beams=beams, **more))
    if "share" not in form:
        without = model.generate(ids, attention_mask=LEFT, num_beams=3, use_cache=False, **more)
        assert torch.equal(together, without)


@over_forms
def test_a_cache_can_be_copied_selected_and_repeated(form: str) -> None:
    model, ids = changed(form), tokens()
    with torch.no_grad():
        past = model(ids[:, :12], attention_mask=LEFT[:, :12], use_cache=True)[CACHE]
        fork, branch = copy.deepcopy(past), copy.copy(past)
        branch.layers = [copy.copy(layer) for layer in past.layers]  # of transformers' own class they are shared
        one = model(ids[:, 12:], attention_mask=LEFT, **{CACHE: past}).logits
        for other in (fork, branch):
            assert torch.equal(one, model(ids[:, 12:], attention_mask=LEFT, **{CACHE: other}).logits)
        past.batch_select_indices(torch.tensor([1, 0, 1]))
        past.batch_repeat_interleave(2)
        order = torch.tensor([1, 1, 0, 0, 1, 1])
        real = torch.cat([LEFT, torch.ones(2, 3, dtype=LEFT.dtype)], 1)
        more = model(ids[order, :3], attention_mask=real[order], **{CACHE: past}).logits
        wanted = model(ids[:, :3], attention_mask=real, **{CACHE: fork}).logits
        assert difference(more, wanted[order]) < 1e-5
        if form == "extended, one layer":  # some versions of transformers keep zeros of the positions in the other one
            return
        past.reset()
        assert past.get_seq_length() == 0
        assert difference(model(ids, **{CACHE: past}).logits, output(model, ids)) < 1e-4


@pytest.mark.parametrize("form", ["extended", "pruned", "pruned, share"])
@pytest.mark.parametrize("chosen", [[False, True], [-1], [-1, 0, -2]])
def test_sequences_of_a_cache_can_be_selected_by_flags_and_from_the_end(form: str, chosen: list[Any]) -> None:
    model, ids, rows = changed(form), tokens(), torch.arange(2)[torch.tensor(chosen)]
    with torch.no_grad():
        past = model(ids[:, :12], attention_mask=LEFT[:, :12], use_cache=True)[CACHE]
    other = copy.deepcopy(past)
    past.batch_select_indices(torch.tensor(chosen))
    other.batch_select_indices(rows)
    more = {"attention_mask": LEFT[rows]}
    found, wanted = (output(model, ids[rows, 12:], **more, **{CACHE: held}) for held in (past, other))
    assert torch.equal(found, wanted)


@both
def test_drafts_that_must_be_forgotten_are_refused(form: str) -> None:
    past = changed(form)(tokens(), use_cache=True)[CACHE]
    assert not past.layers[0].is_croppable
    with pytest.raises(ValueError, match="cannot forget positions"):
        past.crop(-2)


def test_a_cache_of_states_is_of_no_use_to_another_model() -> None:
    model, ids = changed("extended"), tokens()
    past = model(ids, use_cache=True)[CACHE]
    remove(model)
    with pytest.raises(ValueError, match=r"extended by macchiato_from.* was removed; expected a cache of this model"):
        model(ids[:, :1], **{CACHE: past})


# Coming and going


@over_cases
def test_a_model_becomes_what_it_was(form: str, family: str) -> None:
    model = model_for(form, family, attn_implementation="eager").train()
    model.get_input_embeddings().weight.requires_grad_(False)
    before, wanted = looks(model), output(model)
    change(model, form)
    assert looks(model) != before
    far = difference(output(model), wanted)
    assert far < 1e-4 if form == "pruned, all keys" else far > 1e-2
    assert remove(model) is model
    assert looks(model) == before
    assert torch.equal(output(model), wanted)
    with pytest.raises(ValueError, match=rf"model is {family}ForCausalLM, not extended"):
        remove(model)


@both
def test_a_model_that_is_refused_is_as_it_was(form: str) -> None:
    model = base("GptOss").train()
    before = looks(model)
    with pytest.raises(ValueError, match=r"GptOssAttention 0 passes s_aux to its attention .attention sinks"):
        change(model, form)
    assert looks(model) == before


@both
@pytest.mark.parametrize("other", ["extended", "pruned"])
def test_several_models_at_once(form: str, other: str) -> None:
    ids = tokens()
    one, two, plain = changed(form), changed(other, "Qwen2"), base("Llama")
    wanted = [output(model, ids) for model in (one, two, plain)]
    with pytest.raises(ValueError, match=r"its LlamaAttention 0 is (pruned|extended by macchiato_from) already"):
        change(one, other)
    three = copy.deepcopy(one)
    assert torch.equal(output(three, ids), wanted[0])
    remove(three)
    assert difference(output(three, ids), wanted[0]) > 1e-2
    for model, before in zip((one, two, plain), wanted, strict=True):
        assert torch.equal(output(model, ids), before)


@both
@pytest.mark.parametrize("first", [0, 1])
def test_models_of_one_config_are_changed_and_restored_each_by_itself(form: str, first: int) -> None:
    config = base().config
    models = [transformers.LlamaForCausalLM(config).eval() for _ in range(2)]
    before, dense = [looks(model) for model in models], [output(model) for model in models]
    far = []
    for model, wanted in zip(models, dense, strict=True):
        assert torch.equal(output(model), wanted)  # beside the one that is changed
        far.append(output(change(model, form)))
        assert difference(far[-1], wanted) > 1e-2
    remove(models[first])
    assert torch.equal(output(models[first]), dense[first])
    assert torch.equal(output(models[1 - first]), far[1 - first])
    remove(models[1 - first])
    for model, old, wanted in zip(models, before, dense, strict=True):
        assert looks(model) == old
        assert torch.equal(output(model), wanted)


@both
def test_settings_that_are_made_on_a_changed_model_stay(form: str) -> None:
    model = changed(form)
    model.config.use_cache, model.config.note = False, "of a user"
    model.config.id2label[7] = "another"
    remove(model)
    found = model.config
    assert (found.use_cache, found.note, found._attn_implementation) == (False, "of a user", "sdpa")
    assert found.id2label[7] == "another"
    assert model.model.config is found


@both
def test_any_settings_of_a_config_come_through_a_change(form: str) -> None:
    model = base()
    part = transformers.CLIPVisionConfig()
    config, implementation = model.config, part._attn_implementation
    config.numbers, config.more, config.part, config.note = np.arange(3), torch.arange(4), part, "of a user"
    change(model, form)
    model.config.numbers[0], model.config.part.note = 7, "of a user"
    del model.config.note
    remove(model)
    assert model.config is config
    assert (config.numbers.tolist(), config.more.tolist()) == ([7, 1, 2], [0, 1, 2, 3])
    assert not hasattr(config, "note")
    assert config.part is part
    assert (part.note, part._attn_implementation) == ("of a user", implementation)


@both
def test_a_config_is_the_same_under_each_name(form: str) -> None:
    model = base()
    config = model.model.text_config = model.config  # as diffusion_gemma, which makes its masks by it
    change(model, form)
    assert model.model.text_config is model.model.config
    remove(model)
    assert model.model.text_config is model.config is config


@both
def test_a_decoder_beside_another_part_is_restored_with_its_configs(form: str) -> None:
    few = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    pictures = transformers.CLIPVisionConfig(**few, image_size=16, patch_size=8)
    config = transformers.LlavaConfig(vision_config=pictures, text_config=base().config, image_token_index=39)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = tokens().clamp(max=38)
    before, wanted = looks(model), output(model, ids)
    change(model, form)
    assert difference(output(model, ids), wanted) > 1e-2
    remove(model)
    assert looks(model) == before
    assert model.config is config
    assert config.text_config._attn_implementation == "sdpa"
    assert torch.equal(output(model, ids), wanted)


@pytest.mark.parametrize(("form", "name"), [("extended", "levattn_macchiato"), ("pruned", "levattn")])
def test_an_attention_implementation_of_ours_needs_a_change(form: str, name: str) -> None:
    register()
    changed("extended")  # which registers the other
    model = base(attn_implementation=name)
    with pytest.raises(ValueError, match="chosen by hand for LlamaAttention 0"):
        output(model)
    assert torch.isfinite(output(change(model, form))).all()


@both
def test_a_layer_that_goes_past_the_change_is_noticed(form: str) -> None:
    model = changed(form)
    wanted = output(model)
    model.set_attn_implementation("eager")  # of the rest of the model: changed layers have a config of their own
    assert difference(output(model), wanted) < 1e-4
    model.model.layers[1].self_attn.config._attn_implementation = "sdpa"
    with pytest.raises(RuntimeError, match="LlamaAttention 0 did not call"):
        output(model)


# What is refused


def attending(allowed: Any) -> Any:
    """A mask for each pair of positions that lets rows see the first ones too, or these alone."""
    mask = torch.ones(T, T).tril().bool()
    mask[allowed] = allowed[0].start == 0
    return mask[None, None]


def offloaded(model: Any) -> Any:
    cache = transformers.DynamicCache(config=model.config)
    cache.offloading = True
    return cache


ENDS = torch.tensor([0, T], dtype=torch.int32)
LENGTHS = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": T, "max_length_k": T}
PACKED, PREFIX = (slice(8, None), slice(8)), (slice(8), slice(8))
# name -> options of a call that no attention of ours honors, and what is said of them
CALLS: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "packed by positions": (
        lambda _: {"position_ids": torch.arange(T)[None] % 8, "use_cache": False},
        "causal with padding; .*packed",
    ),
    "packed by a mask": (lambda _: {"attention_mask": attending(PACKED)}, "causal with padding"),
    "packed by lengths": (lambda _: LENGTHS, "passes cu_seq_lens_q .*packed sequences"),
    "prefix": (
        lambda _: {"attention_mask": attending(PREFIX), "use_cache": False},
        "(neither full nor|is not) causal with padding",
    ),
    "biases": (lambda _: {"attention_mask": -torch.rand(1, 1, T, T), "use_cache": False}, "adds numbers to logits"),
    "mask of heads": (
        lambda _: {"attention_mask": torch.ones(1, 4, T, T).tril().bool()},
        "one for each head; expected",
    ),
    "unknown keyword": (lambda _: {"tree": 3}, "passes tree to its attention .*not known"),
    "static cache": (
        lambda model: {CACHE: transformers.StaticCache(config=model.config, max_cache_len=2 * T)},
        "the cache is of type StaticCache",
    ),
    "offloaded cache": (lambda model: {CACHE: offloaded(model)}, "DynamicCache, offloaded"),
    "cache of the base": (
        lambda _: {CACHE: base()(tokens(), use_cache=True)[CACHE]},
        f"holds {T} positions of the base model without the .*; expected",
    ),
}


@pytest.mark.crossed
@both
@pytest.mark.parametrize("case", CALLS)
def test_calls_that_would_be_computed_otherwise_are_refused_by_name(case: str, form: str) -> None:
    options, message = CALLS[case]
    model = changed(form)
    with pytest.raises((TypeError, ValueError), match=message):
        output(model, **options(model))


@pytest.mark.filterwarnings("ignore:_compile flag:DeprecationWarning")
def test_flex_attention_is_refused_with_the_way_out() -> None:
    model = base()
    model.set_attn_implementation("flex_attention")
    for call in (lambda: prune(model, SPLIT), lambda: inspect_model(model, {"input_ids": tokens()})):
        with (
            torch.compiler.set_stance("force_eager"),  # else its masks are compiled
            pytest.raises(ValueError, match=r"mask of type BlockMask.*set_attn_implementation\('sdpa'\) first"),
        ):
            call()
    model.set_attn_implementation("sdpa")
    assert torch.isfinite(output(change(model, "pruned"))).all()


@both
def test_a_model_without_numbers_is_refused(form: str) -> None:
    model = base().to("meta")
    before = looks(model)
    with pytest.raises(ValueError, match=r"weights on the device meta, which holds no numbers; .* from_pretrained"):
        change(model, form)
    assert looks(model) == before


@both
def test_masks_of_pairs_that_are_causal_with_padding_are_taken(form: str) -> None:
    model, options = changed(form), {"position_ids": position_ids(LEFT)}
    pairs = torch.ones(T, T).tril().bool() & LEFT.bool()[:, None, None, :]
    added = torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
    wanted = output(model, attention_mask=LEFT, **options)
    for mask in (pairs, added, *([pairs | ~pairs.any(-1, keepdim=True)] if form == "pruned" else [])):
        assert difference(output(model, attention_mask=mask, **options), wanted, LEFT) == 0


@both
def test_dropout_of_attention_weights_is_refused(form: str) -> None:
    model = changed(form, attention_dropout=0.1)
    assert torch.isfinite(output(model)).all()
    with pytest.raises(ValueError, match="drops attention weights with probability"):
        output(model.train())
