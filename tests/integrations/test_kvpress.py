"""Presses of kvpress: which keys stay in the cache, and which are masked."""

from __future__ import annotations

import numpy as np
import pytest

from naive import leverage_svd as naive_scores

pytest.importorskip("kvpress")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from levattn.attention import Selection  # noqa: E402
from levattn.integrations.kvpress import ExpectedPress, LeveragePress, universal_press  # noqa: E402
from levattn.integrations.transformers import compress  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
    )
    return transformers.LlamaForCausalLM(config).eval()


def tokens(*shape):
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(1))


def keys_after(model, press, ids, **others):
    cache = transformers.DynamicCache()
    with torch.no_grad(), press(model):
        model(ids, past_key_values=cache, **others)
    return [layer.keys for layer in cache.layers]


def dense_keys(model, ids, **others):
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache, **others)
    return [layer.keys for layer in cache.layers]


def exact(K):
    return np.stack([[naive_scores(head.double().numpy()) for head in item] for item in K])


def test_a_press_keeps_the_keys_of_largest_leverage_and_the_first(model):
    ids = tokens(2, 48)
    kept = keys_after(model, LeveragePress(0.5, sinks=3), ids)[0]
    K = dense_keys(model, ids)[0]
    scores = exact(K)
    scores[..., :3] = 2
    assert kept.shape == (2, 2, 24, 16)
    for b in range(2):
        for h in range(2):
            best = np.sort(np.argsort(-scores[b, h], kind="stable")[:24])
            found = [int((K[b, h] == row).all(-1).nonzero()[0, 0]) for row in kept[b, h]]
            assert sorted(found) == best.tolist()


def test_scores_are_leverage_scores_whatever_the_scale_and_the_other_items():
    K = torch.randn(2, 3, 40, 8, generator=torch.Generator().manual_seed(0))
    K[1] *= 1e-3
    scores = LeveragePress(sinks=0).score(None, None, K, None, None, {})
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(scores.numpy(), exact(K), rtol=1e-5, atol=1e-7)
    alone = LeveragePress(sinks=0).score(None, None, K[1:], None, None, {})
    assert torch.equal(alone, scores[1:])


def test_a_key_alone_in_its_direction_is_kept():
    """The sketched press of kvpress ranks such keys last; see docs on what it under-estimates."""
    K = torch.randn(1, 1, 2000, 64, generator=torch.Generator().manual_seed(0))
    K[..., -1] = 0
    K[0, 0, 77] = 0
    K[0, 0, 77, -1] = 0.1
    scores = LeveragePress(sinks=0).score(None, None, K, None, None, {})
    assert scores[0, 0, 77] == pytest.approx(1, abs=1e-6)
    assert scores.argmax() == 77


@pytest.mark.parametrize("epsilon", [0.3, 0.5])
def test_the_threshold_form_masks_exactly_what_is_below_outside_the_window(model, epsilon):
    ids = tokens(1, 64)
    press = universal_press(epsilon, sliding_window_size=8, sinks=4)
    below = exact(dense_keys(model, ids)[0]) < epsilon
    keys_after(model, press, ids)
    below[..., :4] = below[..., -8:] = False
    masked = model.model.layers[0].self_attn.masked_key_indices
    found = np.zeros_like(below)
    found[tuple(index.numpy() for index in masked)] = True
    np.testing.assert_array_equal(found, below)


def test_padded_keys_take_no_part():
    K = torch.randn(1, 1, 20, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    mask[..., :6] = False
    scores = LeveragePress(sinks=2).score(None, None, K, None, None, {"attention_mask": mask})
    assert (scores[..., :6] == 0).all()
    assert (scores[..., 6:8] == 2).all()
    np.testing.assert_allclose(scores[0, 0, 8:].numpy(), naive_scores(K[0, 0, 6:].double().numpy())[2:], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression_ratio": 1.0}, "compression_ratio is 1.0"),
        ({"sinks": -1}, "sinks is -1"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        LeveragePress(**options)


def test_thresholds_out_of_range():
    with pytest.raises(ValueError, match="epsilon is 0"):
        universal_press(0)
    with pytest.raises(ValueError, match="sliding_window_size is -1"):
        universal_press(0.1, sliding_window_size=-1)


def naive_expected(model, ids, press, layer=0):
    """Scores by every drawn query, its rotation and its softmax; draws are those of the press."""
    attention = model.model.layers[layer].self_attn
    kept = []
    handle = attention.register_forward_pre_hook(
        lambda _, __, given: kept.append(given["hidden_states"]), with_kwargs=True
    )
    K = dense_keys(model, ids)[layer].double().numpy()
    handle.remove()
    d, S = K.shape[-1], K.shape[2]
    with torch.no_grad():
        Q = attention.q_proj(kept[0]).view(*ids.shape, -1, d).transpose(1, 2).double().numpy() * d**-0.5
        cos, sin = (
            x[0].double().numpy() for x in model.model.rotary_emb(kept[0], torch.arange(S, S + press.horizon)[None])
        )
    out = np.zeros(K.shape[:3])
    heads = Q.shape[1] // K.shape[1]
    rng = np.random.default_rng(0)
    for b, h in np.ndindex(*Q.shape[:2]):
        seen = Q[b, h, press.sinks :]
        drawn = rng.multivariate_normal(seen.mean(0), np.cov(seen.T, bias=True), 4000, method="eigh")
        at = rng.integers(press.horizon, size=len(drawn))
        half = np.concatenate([-drawn[:, d // 2 :], drawn[:, : d // 2]], axis=1)
        Z = (drawn * cos[at] + half * sin[at]) @ K[b, h // heads].T
        E = np.exp(Z - Z.max(1, keepdims=True))
        out[b, h // heads] += (E / E.sum(1, keepdims=True)).mean(0) / heads
    return out


def test_an_expected_press_scores_by_the_attention_of_queries_to_come(model):
    ids, press = tokens(2, 40), ExpectedPress(0.5, horizon=16, samples=4000, sinks=0)
    found = []
    score = press.score
    press.score = lambda *given: found.append(score(*given)) or found[-1]
    kept = keys_after(model, press, ids)[0]
    expected = naive_expected(model, ids, press)
    assert kept.shape == (2, 2, 20, 16)
    np.testing.assert_allclose(found[0].sum(-1), 1, rtol=1e-5)
    # two means of 8000 draws of shares of at most 0.1 or so, at five standard errors
    np.testing.assert_allclose(found[0], expected, atol=5 * float(np.sqrt(2 / 8000)) * expected.max())


def test_an_expected_press_leaves_padding_out_and_keeps_the_first(model):
    ids = tokens(1, 30)
    padded = torch.cat([torch.zeros(1, 6, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 6), torch.ones(1, 30)], dim=1).long()
    place = (mask.cumsum(-1) - 1).clamp(min=0)
    scores = []
    for given in ({"input_ids": ids}, {"input_ids": padded, "attention_mask": mask, "position_ids": place}):
        press = ExpectedPress(0.5, horizon=1, samples=64, sinks=2)
        score = press.score
        press.score = lambda *x, score=score: scores.append(score(*x)) or scores[-1]
        with torch.no_grad(), press(model):
            model(**given, past_key_values=transformers.DynamicCache())
    alone, beside = scores[0], scores[2]
    for found, first in ((alone, 0), (beside, 6)):
        assert (found[..., :first] == 0).all()
        assert (found[..., first : first + 2] == 2).all()
        # other draws, six positions on
        np.testing.assert_allclose(found[..., first + 2 :], alone[..., 2:], atol=0.05)


@pytest.mark.parametrize("padding", [0, 4])
def test_layers_that_slide_score_the_keys_that_they_hold(padding):
    T, window = 30, 8
    config = transformers.Gemma3TextConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"],
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).eval()
    ids = torch.cat([torch.zeros(2, padding, dtype=torch.long), tokens(2, T)], 1)
    given = {"attention_mask": torch.cat([torch.zeros(2, padding), torch.ones(2, T)], 1).long()}
    cache = transformers.DynamicCache(config=config)
    inputs = []
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, __, options: inputs.append(options), with_kwargs=True
    )
    with torch.no_grad():
        model(ids, past_key_values=cache, **given)
    hook.remove()
    attention = model.model.layers[0].self_attn
    attention.rotary_emb = lambda x, at: model.model.rotary_emb(x, at, "sliding_attention")
    hidden = inputs[0].pop("hidden_states")
    K = cache.layers[0].keys
    assert K.shape[2] == window - 1
    scores = LeveragePress(sinks=0).score(attention, hidden, K, None, None, inputs[0])
    np.testing.assert_allclose(scores.numpy(), exact(K), rtol=1e-4)
    press = ExpectedPress(samples=64, sinks=0)
    found = press.score(attention, hidden, K, None, None, inputs[0])
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    if padding:  # takes no part in the statistics of queries
        hidden[:, :padding] = 1e3
        np.testing.assert_allclose(press.score(attention, hidden, K, None, None, inputs[0]), found, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"compression_ratio": 1.0}, "compression_ratio is 1.0"),
        ({"horizon": 0}, "horizon is 0"),
        ({"samples": 0}, "samples is 0"),
    ],
)
def test_options_of_an_expected_press_out_of_range(options, error):
    with pytest.raises(ValueError, match=error):
        ExpectedPress(**options)


def attention(K, Q):
    n = K.shape[1]
    logits = (Q @ K[:, None].mT).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    return logits.softmax(-1)


def snapkv_of_kvpress(K, V, Q):
    seen = attention(K, Q)[:, :, -64:, :-64].mean(2)
    return torch.nn.functional.pad(torch.nn.functional.avg_pool1d(seen, 5, 1, 2).mean(1), (0, 64))


def observed_attention(K, V, Q):
    return (attention(K, Q).sum(2) / torch.arange(K.shape[1], 0, -1)).mean(1)


@pytest.mark.filterwarnings("ignore::levattn.RecallWarning")
@pytest.mark.parametrize(
    ("press", "options"),
    [
        ("StreamingLLMPress", {"scores": "streaming"}),
        ("KnormPress", {"scores": "norm"}),
        ("TOVAPress", {"scores": "tova", "window": 1}),  # kvpress always keeps the last position
        ("SnapKVPress", {"scores": snapkv_of_kvpress, "window": 64, "sinks": 0, "summaries": 0}),
        ("ObservedAttentionPress", {"scores": observed_attention, "window": 0, "sinks": 0, "summaries": 0}),
    ],
)
def test_rules_keep_the_keys_of_the_presses_of_kvpress(model, press, options):
    import kvpress

    ids = torch.randperm(97, generator=torch.Generator().manual_seed(0))[None, :90]
    model.set_attn_implementation("eager")
    kept = keys_after(model, getattr(kvpress, press)(compression_ratio=0.2), ids)
    cache = compress(model, ids, Selection(72, **options), references="none", bits=16)
    for layer, keys in zip(cache.layers, kept, strict=True):
        (group,) = layer.groups
        for own, theirs in zip(group.keys[0], keys[0], strict=True):
            assert len(own) == len(theirs) == 72
            apart = torch.cdist(own, theirs, compute_mode="donot_use_mm_for_euclid_dist")
            assert apart.amin(0).max() < 1e-5  # theirs come in the order of their scores
