"""Contexts whose slots are fitted: by hand, in families, batches, chunks and files, and where they cannot be."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import CACHE, base, difference, tokens  # noqa: E402
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: E402

from levattn.attention import Selection, fit_slots  # noqa: E402
from levattn.exceptions import ResidualWarning  # noqa: E402
from levattn.integrations.transformers import CompressedCache, compress  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

N = 60
CUT = {(0, 0): 18, (1, 1): 30}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
LOGITS = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def logits(model: Any, cache: Any) -> Any:
    return torch.stack(cache.ask(model, torch.tensor([[3, 14, 15]]).expand(len(cache.tokens), -1), **LOGITS).logits, 1)


def residuals(cache: Any) -> dict[tuple[int, int], float]:
    return {(row["layer"], row["head"]): row["residual"] for row in cache.table() if "residual" in row}


def group_of(cache: Any, layer: int, head: int) -> Any:
    return next(group for group in cache.layers[layer].groups if head in group.heads).of_heads((head,))


def queries_behind(model: Any, ids: Any, where: Any) -> tuple[list[Any], Any]:
    """The queries of each layer of a Llama, as if their tokens were at other positions, and its dense cache."""
    seen: list[Any] = []
    cache = transformers.DynamicCache()
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda _, __, output: seen.append(output))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model.model(ids, **{CACHE: cache})
        cos, sin = model.model.rotary_emb(seen[0], where)
    for hook in hooks:
        hook.remove()
    heads = [q.unflatten(-1, (-1, model.model.layers[0].self_attn.head_dim)).transpose(1, 2) for q in seen]
    return [apply_rotary_pos_emb(q, q, cos, sin)[0] for q in heads], cache


def test_slots_are_fitted_to_the_own_queries_at_the_position_after_the_context() -> None:
    model, ids = base().double(), tokens(1, N)
    found = compress(model, ids, CUT, bits=16)
    queries, dense = queries_behind(model, ids, torch.full((1, N), N))
    for (layer, head), count in CUT.items():
        K, V = (array[0, head] for array in (dense.layers[layer].keys, dense.layers[layer].values))
        Q = queries[layer][0, 2 * head : 2 * head + 2, N // 2 :]
        slots = fit_slots(Q, K[None], V[None], Selection(count))
        group = group_of(found, layer, head)
        assert group.places[0, 0].tolist() == slots.indices[0].tolist()
        np.testing.assert_allclose(
            group.values[0, 0].numpy(), slots.values[0].numpy(), atol=1e-5
        )  # rotary angles are float32
        np.testing.assert_allclose(group.log_weight[0, 0].numpy(), slots.log_weights[0].numpy(), atol=1e-5)
        assert residuals(found)[layer, head] == pytest.approx(float(slots.output_residual[0]), abs=1e-6)


@pytest.mark.parametrize("references", ["own", "repeat", "given"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_equals_its_sequences_alone(side: str, references: str) -> None:
    model, ids, missing = base(max_position_embeddings=256).double(), tokens(2, N), 9
    mask = torch.ones_like(ids)
    mask[1, slice(0, missing) if side == "left" else slice(N - missing, N)] = 0
    asked: Any = tokens(1, 20).flip(1) if references == "given" else references
    both = compress(model, {"input_ids": ids, "attention_mask": mask}, CUT, references=asked)
    found = logits(model, both)
    for row, sequence in enumerate((ids[:1], ids[1:, mask[1].bool()])):
        alone = compress(model, sequence, CUT, references=asked)
        assert difference(found[row : row + 1], logits(model, alone)) < 1e-9
        worst = max(residuals(both)[head] for head in CUT)
        assert worst >= max(residuals(alone)[head] for head in CUT) - 1e-9


def test_tokens_that_follow_are_fitted_by_the_attention_that_the_context_gets() -> None:
    model, ids, after = base(max_position_embeddings=256).double(), tokens(1, N), tokens(1, 20).flip(1)
    found = compress(model, ids, {(0, 0): 18}, references=after, bits=16)
    assert found.tokens.tolist() == ids.tolist()
    assert found.get_seq_length() == N
    queries, dense = queries_behind(model, torch.cat([ids, after], 1), torch.arange(N + 20)[None])
    moved = queries_behind(model, ids, torch.full((1, N), N))[0]
    K, V = (array[0, 0] for array in (dense.layers[0].keys, dense.layers[0].values))
    Q = queries[0][0, :2, N:]
    z = (Q @ K.T / math.sqrt(K.shape[1])).masked_fill(
        torch.arange(N + 20) > torch.arange(N, N + 20)[:, None], -math.inf
    )
    share = z.softmax(-1)[..., :N].sum(-1)
    rows = torch.cat([moved[0][0, :2, N // 2 :], Q], 1)
    weights = torch.cat([torch.full((2, N - N // 2), 0.25), share**2], 1)
    slots = fit_slots(rows, K[None, :N], V[None, :N], Selection(18), weights=weights)
    group = group_of(found, 0, 0)
    assert group.places[0, 0].tolist() == slots.indices[0].tolist()
    np.testing.assert_allclose(group.values[0, 0].numpy(), slots.values[0].numpy(), atol=1e-6)
    repeated = compress(model, ids, {(0, 0): 18}, references="repeat")
    given = compress(model, ids, {(0, 0): 18}, references={"input_ids": ids})
    assert torch.equal(logits(model, repeated), logits(model, given))


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_chunks_and_layers_that_slide_are_fitted_to_own_queries(family: str) -> None:
    model, ids = base(family), tokens(1, N)
    cut = {(1, 0): 0.5}
    whole, parts = (compress(model, ids, cut, bits=16, chunk=chunk) for chunk in (None, 20))
    assert whole.nbytes < compress(model, ids, 1.0).nbytes
    for cache in (whole, parts):
        assert 0 < residuals(cache)[1, 0] < 1
        assert torch.isfinite(logits(model, cache)).all()
    places = group_of(parts, 1, 0).places[0, 0]
    assert [int(((places >= first) & (places < first + 20)).sum()) for first in (0, 20, 40)] == [9, 9, 9]
    sizes = {19: places.max() <= 59, 0: int(places.min()) == 0}
    assert all(sizes.values())


def test_files_and_forks_keep_weights_and_residuals(tmp_path: Path) -> None:
    model, ids = base(), tokens(2, N)
    cache = compress(model, ids, CUT)
    path = tmp_path / "context.safetensors"
    cache.save(path)
    again = CompressedCache.load(path, model)
    assert again.table() == cache.table() == cache.copy().table()
    assert residuals(again).keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert residuals(again)[0, 1] == 0
    assert torch.equal(logits(model, again), logits(model, cache.copy()))
    picked = cache.copy()
    picked.batch_select_indices(torch.tensor([1, 1]))
    assert residuals(picked)[0, 0] == pytest.approx(float(group_of(cache, 0, 0).residuals[1, 0]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_models_are_fitted_as_in_float64(dtype: str) -> None:
    model, ids = base(), tokens(1, N)
    wide = {head: group_of(compress(model.double(), ids, CUT, bits=16), *head) for head in CUT}
    narrow = compress(model.to(getattr(torch, dtype)), ids, CUT, bits=16)
    for head, one in wide.items():
        other = group_of(narrow, *head)
        assert other.keys.dtype == getattr(torch, dtype)
        if dtype == "float32":
            assert torch.equal(one.places, other.places)
            q = torch.randn(50, one.keys.shape[-1], dtype=torch.float64)
            outputs = [
                ((q @ slots.keys[0, 0].double().T) + slots.log_weight[0, 0].double()).softmax(-1)
                @ slots.values[0, 0].double()
                for slots in (one, other)
            ]
            assert difference(*outputs) < 1e-4 * float(outputs[0].abs().max())
        assert torch.isfinite(other.values).all()


def test_one_slot_and_contexts_of_a_few_tokens() -> None:
    model = base()
    for n in (1, 2, 3, 9):
        cache = compress(model, tokens(1, n), dict.fromkeys(CUT, 0.01))
        assert [row["slots"] for row in cache.table()] == [1.0, n, n, 1.0]
        assert torch.isfinite(logits(model, cache)).all()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"references": "first"}, "references is 'first'; expected 'own', 'repeat', 'none', tokens, or None"),
        ({"references": "own", "selection": Selection(0.3, summaries=0.5)}, "keeps summaries=0.5 of a head"),
        ({"references": "own", "selection": Selection(0.3, renew_every=8)}, "renews its slots every 8 positions"),
        ({"references": "repeat", "chunk": 20}, "'repeat', and LlamaForCausalLM reads chunks of 20 positions"),
        ({"references": "repeat", "family": "Gemma3"}, "'repeat', and Gemma3ForCausalLM has layers that slide"),
        ({"references": "repeat", "family": "Gemma3", "chunk": 99}, "Gemma3ForCausalLM has layers that slide"),
        ({"references": "own", "family": "Gemma2"}, "Gemma2ForCausalLM bounds the logits of layer 1 by 2"),
        ({"references": tokens(1, 90), "family": "GPT2"}, "context and references have 150 tokens"),
        ({"references": "own", "family": "GPT2"}, "GPT2LMHeadModel does not turn the queries of layer 0"),
        ({"references": torch.ones(3, 4, dtype=torch.int64)}, "references have 3 rows and the context 1"),
        (
            {"references": "own", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "has rotary positions ('dynamic') that change",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused_if_it_was_asked_for(how: dict[str, Any], told: str) -> None:
    family = how.pop("family", "Llama")
    options = {"rope_scaling": how.pop("rope_scaling")} if "rope_scaling" in how else {}
    if family == "GPT2":
        config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=40, n_positions=96)
        model = transformers.GPT2LMHeadModel(config).eval()
    else:
        model = base(family, **options)
    selection = {(1, 0): how.pop("selection", Selection(0.3))}
    with pytest.raises(ValueError, match=re.escape(told)):
        compress(model, tokens(1, N), selection, **how)
    if "chunk" not in how and isinstance(how["references"], str) and how["references"] != "first":
        cache = compress(model, tokens(1, N), selection)  # by default it is not fitted, or to other queries
        assert torch.isfinite(logits(model, cache)).all()


@pytest.mark.parametrize("family", ["GPT2", "OPT", "GPTJ"])
def test_a_context_may_fill_all_positions(family: str) -> None:
    kind, sizes = getattr(transformers, f"{family}Config"), {"vocab_size": 40, "bos_token_id": None}
    named = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
    if family == "OPT":
        named = {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        named |= {"max_position_embeddings": 64, "word_embed_proj_dim": 32}
    config = kind(**sizes, **named, **({"rotary_dim": 4} if family == "GPTJ" else {}))
    model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config).eval()
    cache = compress(model, tokens(1, 64), {(0, 0): 0.5})
    assert bool(residuals(cache)) == (family == "GPTJ")


def test_heads_are_fitted_one_by_one() -> None:
    """Summaries of one head, a wide window of another, functions that exclude keys: each head as it was told."""
    model, ids = base(), tokens(2, N)
    some = {(0, 0): 0.5, (0, 1): Selection(0.5, summaries=0.25), (1, 0): Selection(0.5, window=0.8)}
    cache = compress(model, ids, some)
    rows = {(row["layer"], row["head"]): row for row in cache.table()}
    assert rows[0, 1]["summaries"] > 0
    assert math.isnan(rows[0, 1]["residual"])
    assert 0 < rows[0, 0]["residual"] < 1
    assert int((group_of(cache, 1, 0).places[0, 0] >= N - 21).sum()) == 21

    def few(K: Any, V: Any) -> Any:
        return torch.where(torch.arange(K.shape[-2]) < 8 + 4 * (K[..., :1, 0] > 0), 1.0, -torch.inf)

    for how in (None, "none"):
        cache = compress(model, ids, dict.fromkeys(((0, 0), (0, 1)), Selection(size=10, scores=few)), references=how)
        assert {row["slots"] for row in cache.table() if row["layer"] == 0} <= {8.0, 9.0, 10.0}
        assert torch.isfinite(logits(model, cache)).all()


@pytest.mark.parametrize("references", [None, "none"])
def test_scores_that_exclude_all_keys_are_refused(references: Any) -> None:
    never = Selection(size=3, scores=lambda K, V: torch.full(K.shape[:-1], -torch.inf))  # noqa: ARG005
    with pytest.raises(ValueError, match="scores of head 1 of layer 0 are -inf for all keys of row 0"):
        compress(base(), tokens(1, N), {(0, 1): never}, references=references)


def test_a_short_row_hides_no_residual() -> None:
    model, ids = base(), tokens(2, N)
    mask = torch.ones_like(ids)
    mask[1, :-2] = 0
    cache = compress(model, {"input_ids": ids, "attention_mask": mask}, {(0, 0): 0.5})
    assert 0 < residuals(cache)[0, 0] < 1
    assert math.isnan(residuals(compress(model, ids[:, :2], {(0, 0): 0.5}))[0, 0])


def test_references_are_checked_where_nothing_is_cut() -> None:
    with pytest.raises(TypeError, match=r"references is torch\.float32"):
        compress(base(), tokens(1, N), 1.0, references=torch.ones(1, 4))


def test_heads_that_lose_far_more_than_the_others_are_told() -> None:
    model, ids = base(num_hidden_layers=3).double(), tokens(1, N)
    with torch.no_grad():  # each query attends to one key, of which two slots hold two
        model.model.layers[2].self_attn.q_proj.weight.mul_(30)
    heads = {(layer, head): 2 if layer == 2 else 0.95 for layer in (0, 1, 2) for head in (0, 1)}
    with pytest.warns(
        ResidualWarning, match=r"2 of 6 heads that are cut lose far more .* layer 2 err by \d\d% .* \d% in the median"
    ):
        cache = compress(model, ids, heads, bits=16)
    assert residuals(cache)[2, 0] > 0.8
    alike = compress(model, ids, dict.fromkeys(heads, 2), bits=16)
    assert max(residuals(alike).values()) > 0.5
