"""Decoders whose caches hold states alone: the same outputs, in memory that does not grow."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import levattn  # noqa: E402
from levattn.attention import pruned_attention  # noqa: E402
from levattn.integrations.transformers import prune  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61, "eos_token_id": None}
KINDS = {
    "Llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, **SIZES)
    ),
    "Qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, **SIZES)
    ),
}


@pytest.fixture(scope="module", params=list(KINDS))
def model(request):
    torch.manual_seed(0)
    return KINDS[request.param]().eval()


def tokens(*shape):
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(1))


def in_chunks(model, ids, chunk, cache, **others):
    """The logits of a prompt in chunks; `others` are cut up to the end of each."""
    found = []
    for low in range(0, ids.shape[1], chunk):
        high = min(ids.shape[1], low + chunk)
        cut = {"attention_mask": slice(high), "position_ids": slice(low, high)}
        more = {name: value[:, cut[name]] for name, value in others.items()}
        found.append(model(ids[:, low:high], past_key_values=cache, **more).logits)
    return torch.cat(found, 1)


def cache_of(model):
    return transformers.DynamicCache(config=model.config)


@pytest.mark.parametrize("chunk", [1, 64])
def test_chunks_and_steps_are_one_call(model, chunk):
    ids = tokens(2, 150)
    with torch.no_grad(), prune(model, budget=40, measure=False):
        whole = model(ids, use_cache=False).logits
    with torch.no_grad(), prune(model, budget=40, stream=True):
        cache = cache_of(model)
        streamed = in_chunks(model, ids, chunk, cache)
    torch.testing.assert_close(streamed, whole, atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == 150


def test_memory_does_not_grow(model):
    ids = tokens(1, 600)
    with torch.no_grad(), prune(model, budget=40, stream=True):
        cache = cache_of(model)
        sizes = []
        for low in range(0, 600, 100):
            model(ids[:, low : low + 100], past_key_values=cache)
            sizes.append(sum(layer.nbytes() for layer in cache.layers))
    assert max(sizes[1:]) <= 1.25 * min(sizes[1:])  # what the last chunk has left comes and goes
    dense = 2 * 2 * 600 * 2 * 8 * 4
    assert max(sizes) < dense


def test_padded_sequences_are_those_alone(model):
    ids, mask = tokens(2, 120), torch.ones(2, 120, dtype=torch.int64)
    mask[1, :31] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), prune(model, budget=32, stream=True):
        both = in_chunks(model, ids, 50, cache_of(model), attention_mask=mask, position_ids=places)
        alone = in_chunks(model, ids[1:, 31:], 50, cache_of(model))
    torch.testing.assert_close(both[1:, 31:], alone, atol=1e-5, rtol=1e-5)


def test_generation(model):
    ids = tokens(2, 70)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with prune(model, budget=32, measure=False):
        expected = model.generate(ids, **options)
    with prune(model, budget=32, stream=True):
        assert torch.equal(model.generate(ids, **options), expected)
        beams = model.generate(ids, num_beams=3, **options)
    with prune(model, budget=32, measure=False):
        assert torch.equal(model.generate(ids, num_beams=3, **options), beams)


def test_a_budget_for_all_keys_is_dense(model):
    ids = tokens(1, 90)
    with torch.no_grad():
        dense = model(ids).logits
        with prune(model, size=200, stream=True):
            streamed = in_chunks(model, ids, 40, cache_of(model))
    torch.testing.assert_close(streamed, dense, atol=1e-5, rtol=1e-5)


def test_what_needs_all_keys_is_refused(model):
    with pytest.raises(ValueError, match="measure and stream are True"):
        prune(model, budget=32, stream=True, measure=True)
    with pytest.raises(ValueError, match="heads of layer 0 are dense"):
        prune(model, {(0, 1): 32}, stream=True)
    with torch.no_grad(), prune(model, budget=32, stream=True):
        cache = cache_of(model)
        model(tokens(1, 40), past_key_values=cache)
        with pytest.raises(ValueError, match="cannot forget positions"):
            cache.crop(10)


def test_a_cache_of_states_does_not_outlive_the_pruning(model):
    cache = cache_of(model)
    with torch.no_grad():
        with prune(model, budget=32, stream=True):
            model(tokens(1, 40), past_key_values=cache)
        with pytest.raises(ValueError, match="or the pruning was removed"):
            model(tokens(1, 1), past_key_values=cache)


@pytest.mark.parametrize("stream", [True, False])
def test_positions_in_the_cache_cannot_be_left_out_later(model, stream):
    mask = torch.ones(1, 41, dtype=torch.int64)
    mask[0, 5:20] = 0
    with torch.no_grad(), prune(model, budget=32, stream=stream):
        cache = cache_of(model)
        model(tokens(1, 40), past_key_values=cache)
        with pytest.raises(ValueError, match="leaves out other positions than before"):
            model(tokens(1, 1), past_key_values=cache, attention_mask=mask)


def test_encoders_have_no_streams():
    config = transformers.EsmConfig(num_attention_heads=4, pad_token_id=1, **SIZES)
    encoder = transformers.EsmModel(config, add_pooling_layer=False).eval()
    with pytest.raises(ValueError, match="is not causal"):
        prune(encoder, budget=8, stream=True)


def test_the_keys_kept_by_threshold_are_those_of_the_stream():
    """The set that a state holds is the universal set of one pass, but for keys that are recent."""
    rng = np.random.default_rng(0)
    K = rng.standard_normal((3, 500, 8)) * np.exp(rng.standard_normal((3, 500, 1)))
    options = {"epsilon": 0.1, "scores": "leverage", "center": False, "window": 20, "chunk": 50}
    _, state = pruned_attention(K, K, K, causal=True, return_state=True, **options)
    stream = levattn.StreamingUniversalSet(0.1).update(K).result()
    (part,) = state.parts
    for head in range(3):
        count = part.kept.shape[1] if part.kept_count is None else int(part.kept_count[head])
        found = part.kept_places[head, :count]
        assert found.tolist() == [i for i in stream.items[head].indices if i < 480]
