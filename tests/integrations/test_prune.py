"""Pruned transformers models: tiny ones, against dense attention and against the operator, sequence by sequence."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import CACHE, ENCODERS, LEFT, PADDED, SIZES, T, base, difference, output, tokens, written_out  # noqa: E402

import levattn  # noqa: E402
from levattn.attention import Selection, causal_pruned_attention  # noqa: E402
from levattn.integrations.transformers import (  # noqa: E402
    Calibration,
    HeadProfile,
    calibrate,
    inspect_model,
    macchiato_from,
    prune,
    remove,
)
from tests.pruned_calls import attend  # noqa: E402

DECODERS = ["Llama", "Qwen2", "Mistral", "Gemma", "GPTNeoX"]
SPLIT = Selection(size=1, summaries=1, window=1, sinks=1, renew_every=2)  # selects first after 12 keys
FULL = Selection(size=4, summaries=3, window=3, sinks=1)  # fewer slots than keys

# Heads are pruned alike here, as nothing is recalled
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::levattn.RecallWarning")]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def split(family: str) -> Selection:
    return FULL if family in ENCODERS else SPLIT


# Dense where nothing is left out


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_slots_for_all_keys_are_dense_attention(family: str) -> None:
    model = base(family, **({"sliding_window": 96} if family == "Mistral" else {}))
    masks = (None, LEFT, LEFT.flip(-1))
    wanted = [output(model, attention_mask=real) for real in masks]
    for few in (60, 1.0, Selection(size=60), Selection(epsilon=-1e30), split(family)):
        with prune(model, few, measure=False):
            found = [output(model, attention_mask=real) for real in masks]
        far = [difference(*pair, real) for *pair, real in zip(found, wanted, masks, strict=True)]
        assert min(far) > 1e-2 if few == split(family) else max(far) < 2e-5  # of about 10


@pytest.mark.parametrize("kind", ["Splinter", "ClapText"])
def test_an_encoder_whose_layers_do_not_say_that_they_see_all_keys(kind: str) -> None:
    model = other(kind, attn_implementation="eager").eval()  # without padding it makes no mask
    wanted = output(model)
    for selection in (60, {1: 60}):
        with prune(model, selection):
            assert difference(output(model), wanted) < 2e-5


def test_a_decoder_that_is_told_to_see_all_keys() -> None:
    model = base()
    wanted = output(model, is_causal=False, use_cache=False)
    assert difference(output(model, is_causal=False), output(model)) > 1
    with prune(model, Selection(60, start=0)):
        assert difference(output(model, is_causal=False, use_cache=False), wanted) < 2e-5
        with pytest.raises(ValueError, match=r"has a cache and is not causal; .* Set use_cache=False"):
            output(model, is_causal=False)


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX"])
def test_a_call_that_ends_before_its_first_selection_is_the_dense_call(family: str) -> None:
    """To the last bit; one position more is pruned."""
    model = base(family)
    wanted = output(model, use_cache=False)
    for slots, far in ((T // 2, False), (T // 2 - 1, True)):
        with prune(model, slots, measure=False):
            found, kept = (output(model, use_cache=cached) for cached in (False, True))
        assert torch.equal(found, wanted) != far
        assert torch.equal(kept, wanted) != far
        assert difference(found, kept) < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scores": "leverage"},
        {"scores": "leverage", "center": False},
        {"scores": lambda K, V: K[..., 0] - V[..., 0]},
    ],
    ids=["residual", "leverage", "uncentered", "own"],
)
def test_pieces_of_a_text_are_one_call_across_the_first_selection(options: Any) -> None:
    """Pieces that end before it are the dense model's to the last bit, and leave what later pieces need."""
    model, few = base(), Selection(size=4, summaries=2, window=1, sinks=1, renew_every=2, **options)
    first, ids = 2 * (4 + 2 + 1 + 1 + 2), tokens(length=2 * T)
    with prune(model, few, measure=False):
        wanted = output(model, ids, use_cache=False)
    for pieces in ((first - 1,), (5, 6, first - 1), range(1, 2 * T), (3, first, first + 1), (2, first + 3)):
        ends = list(zip((0, *pieces), (*pieces, 2 * T), strict=True))
        dense, cache = (transformers.DynamicCache(config=model.config) for _ in range(2))
        exact = [output(model, ids[:, low:high], **{CACHE: dense}) for low, high in ends]
        with prune(model, few, measure=True) as report:
            found = [output(model, ids[:, low:high], **{CACHE: cache}) for low, high in ends]
        early = [torch.equal(*pair) for (_, high), *pair in zip(ends, found, exact, strict=True) if high <= first]
        assert early == [True] * len(early) != []
        assert difference(torch.cat(found, 1), wanted) < 2e-5
        assert 0 < report.table()[0]["error"] < 1
    assert difference(torch.cat(exact, 1), wanted) > 1e-3


@pytest.mark.parametrize("start", [515, 1024])
def test_pieces_of_a_long_text_hold_few_queries_before_the_first_selection(start: int) -> None:
    """Selections go by those of every second or fourth position."""
    few = Selection(size=4, summaries=2, window=1, sinks=1, renew_every=7, start=start)
    model, ids = copy.deepcopy(base()).double(), tokens(length=start + 20)
    with prune(model, few, measure=False):
        wanted = output(model, ids, use_cache=False)
        for pieces in ((start - 2, start - 1, start + 3), (201, 202, 203, 204, 205, start + 9), (start + 1,)):
            cache, found = transformers.DynamicCache(config=model.config), []
            for low, high in zip((0, *pieces), (*pieces, len(ids[0])), strict=True):
                found.append(output(model, ids[:, low:high], **{CACHE: cache}))
                if high < start:
                    (held,) = cache.layers[0].states[0]
                    assert held.nbytes <= cache.layers[0].keys.nbytes * 4 * (high + 4) // (start // 256 * high)
            assert difference(torch.cat(found, 1), wanted) < 1e-10
    assert difference(output(model, ids), wanted) > 1e-3


def test_sequences_change_places_before_the_first_selection() -> None:
    """Beam search takes sequences while layers hold queries in place of states."""
    model, few = base(), Selection(size=4, summaries=2, window=1, sinks=1, renew_every=2)
    ids, rows = tokens(length=2 * T), torch.tensor([1, 1, 0])
    with prune(model, few, measure=False):
        wanted = output(model, ids[rows], use_cache=False)
        cache = transformers.DynamicCache(config=model.config)
        found = [output(model, ids[:, :3], **{CACHE: cache})[rows]]
        cache.batch_select_indices(rows)
        copied = copy.deepcopy(cache)
        for low, high in ((3, 4), (4, 5), (5, 9), (9, 2 * T)):
            found.append(output(model, ids[rows, low:high], **{CACHE: cache}))
        again = output(model, ids[rows, 3:], **{CACHE: copied})
    assert difference(torch.cat(found, 1), wanted) < 2e-5
    assert difference(again, wanted[:, 3:]) < 2e-5


def test_images_are_pruned_too() -> None:
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    config = transformers.ViTConfig(num_attention_heads=4, image_size=16, patch_size=4, initializer_range=0.3, **sizes)
    model = transformers.ViTModel(config).eval()
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    wanted = output(model, images)
    with prune(model, 17) as report:
        assert difference(output(model, images), wanted) < 1e-5
    assert [row["layer"] for row in report.table()] == [0] * 4 + [1] * 4
    with prune(model, 6):
        assert difference(output(model, images), wanted) > 1e-2


def with_a_table_of_its_own(first: int) -> Any:
    """A model whose layers from the first one on look attention up in a table of their own."""
    model = base()
    for layer in model.model.layers[first:]:

        def forward(*args: Any, module: Any = layer.self_attn, **options: Any) -> Any:
            assert {"sdpa": True}[module.config._attn_implementation]
            return type(module).forward(module, *args, **options)

        layer.self_attn.forward = forward
    return model


OF_OLDER = pytest.mark.skipif("Bert" in ENCODERS, reason="goes through the interface in newer releases, or not at all")
UNREACHED: dict[str, tuple[Callable[[], Any], str]] = {
    "Bert": (lambda: other("Bert"), r"no attention function was reached \(BertSdpaSelfAttention does"),
    "ModernBert": (lambda: other("ModernBert"), r"no attention function was reached \(ModernBertAttention does"),
    "Falcon": (lambda: other("Falcon"), r"no attention function was reached \(FalconAttention does"),
    "all layers": (lambda: with_a_table_of_its_own(0), r"no attention function was reached \(LlamaAttention does"),
    "a layer": (lambda: with_a_table_of_its_own(1), r"not every attention function was reached \(LlamaAttention does"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=OF_OLDER) if case[0].isupper() else case for case in UNREACHED]
)
def test_attention_that_cannot_be_reached_is_refused(case: str) -> None:
    make, message = UNREACHED[case]
    model = make().train()
    model(torch.ones((1, 3), dtype=torch.int64))  # in which other libraries may leave attributes, as kvpress does
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(
        ValueError, match=message + f".* of transformers {transformers.__version__}.*; expected"
    ) as got:
        prune(model, 8)
    assert (got.value.__cause__ is None) == (case == "Bert")
    assert ("from 5.0 on" in str(got.value)) == ("Bert" not in ENCODERS)
    assert [dict(vars(module)) for module in model.modules()] == before


# What the operator says, sequence by sequence


class Explicit:
    """Attention of each sequence by itself: heads with options by the operator, the others dense."""

    def __init__(self, real: Any, heads: dict[tuple[int, int], Selection]) -> None:
        self.real, self.heads, self.calls = real, heads, 0

    def __call__(self, module: Any, query: Any, key: Any, value: Any, _: Any, **others: Any) -> tuple[Any, None]:
        layer, self.calls = self.calls, self.calls + 1
        group, scale = query.shape[1] // key.shape[1], others["scaling"]
        causal = others.get("is_causal") is not False and getattr(module, "is_causal", True)
        Y = torch.zeros(*query.shape[:3], value.shape[-1])
        for b, there in enumerate(self.real.bool()):
            for head in range(key.shape[1]):
                which = slice(head * group, (head + 1) * group)
                q, k, v = query[b, which][:, there], key[b, head : head + 1, there], value[b, head : head + 1, there]
                selection = self.heads.get((layer, head))
                if selection is not None:
                    Y[b, which, there] = attend(q, k, v, causal=causal, scale=scale, **vars(selection))
                    continue
                scores = scale * q @ k.transpose(-1, -2)
                if causal:
                    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
                Y[b, which, there] = torch.softmax(scores, -1) @ v
        return Y.transpose(1, 2), None


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["Llama", "GPTNeoX", "Esm"])
def test_named_layers_and_heads_are_pruned_and_the_others_dense(family: str, implementation: str) -> None:
    model = base(family, attn_implementation=implementation)
    for real in (LEFT, LEFT.flip(-1)):
        for layers, heads in (([1], None), (None, [1]), ([0], [0])):
            count = model.config.num_attention_heads if family != "Llama" else 2
            chosen = [(layer, head) for layer in layers or [0, 1] for head in heads or range(count)]
            other = written_out(copy.deepcopy(model), Explicit(real, dict.fromkeys(chosen, split(family))))
            wanted = output(other, attention_mask=real)
            with prune(model, split(family), layers=layers, heads=heads, measure=False) as report:
                assert difference(output(model, attention_mask=real), wanted, real) < 2e-5
            assert [(row["layer"], row["head"]) for row in report.table()] == chosen


def test_budgets_of_layers_and_heads() -> None:
    model = base()
    dense = output(model)
    with prune(model, Selection(6, renew_every=2), layers=[1], heads=[0], measure=False):
        one = output(model)
    few = Selection(6, renew_every=2)
    for selections in ({(1, 0): few}, {(1, 0): few, (0, 1): 1.0}, {1: few, (0, 0): 1.0}):
        with prune(model, selections) as report:
            found = output(model)
        same = 1 not in selections
        assert (difference(found, one) < 1e-6) == same
        assert {row["head"] for row in report.table()} == ({0} if same else {0, 1})
    assert difference(one, dense) > 1e-2
    budgets = {(0, 0): 5, (0, 1): 0.3, (1, 0): 7, (1, 1): 7}
    selections = {head: Selection(budget, renew_every=2) for head, budget in budgets.items()}
    with prune(model, selections, measure=False):
        mixed = output(model)
    selections[0, 1] = Selection(int(0.3 * T), renew_every=2)
    other = written_out(copy.deepcopy(model), Explicit(torch.ones(2, T), selections))
    assert difference(mixed, output(other)) < 2e-5


@pytest.mark.parametrize("family", ["Llama", "Esm"])
def test_scores_of_a_users_own_select_keys(family: str) -> None:
    model = base(family)
    few = replace(split(family), scores=lambda K, V: (K * K).sum(2) + V[:, :, 0])
    with prune(model, few, measure=False) as report:
        found = output(model)
    assert "lambda" in report.to_dict()["options"]["selection"]["scores"]
    heads = {(layer, head): few for layer in (0, 1) for head in range(4 if family == "Esm" else 2)}
    other = written_out(copy.deepcopy(model), Explicit(torch.ones(2, T), heads))
    assert difference(found, output(other)) < 2e-5
    with prune(model, split(family), measure=False):
        assert difference(found, output(model)) > 1e-3


class Column(torch.nn.Module):
    """Scores by one column of the keys; all of these modules look the same when printed."""

    def __init__(self, column: int) -> None:
        super().__init__()
        self.column = column

    def forward(self, K: Any, V: Any) -> Any:  # noqa: ARG002 (one column of the keys is enough)
        return K[:, :, self.column]


def test_heads_with_functions_that_look_the_same_keep_their_own() -> None:
    model, few = base(), [Selection(size=3, scores=Column(i), renew_every=4) for i in (0, 1)]
    assert repr(few[0]) == repr(few[1])
    heads = {(0, 0): few[0], (0, 1): few[1]}
    with prune(model, heads, measure=False):
        found = output(model)
    other = written_out(copy.deepcopy(model), Explicit(torch.ones(2, T), heads))
    assert difference(found, output(other)) < 2e-5


@pytest.mark.parametrize("family", ["Llama", "Esm"])
@pytest.mark.parametrize("budget", [4, 0.3, T - PADDED - 1, T - PADDED, T - PADDED + 2])
def test_a_padded_batch_is_what_its_sequences_are(family: str, budget: float) -> None:
    model, ids = base(family), tokens()
    of_decoders = {} if family in ENCODERS else {"renew_every": 2}
    right = torch.cat([ids[:, PADDED:], ids[:, :PADDED]], 1)
    for few in (Selection(budget, **of_decoders), Selection(size=budget, **of_decoders)):
        with prune(model, few):
            alone = output(model, ids[1:, PADDED:], attention_mask=LEFT[1:, PADDED:])
            for these, real in ((ids, LEFT), (right, LEFT.flip(-1))):
                found = output(model, these, attention_mask=real)
                assert difference(found[1, real[1].bool()], alone[0]) < 2e-5


# Caches


def test_a_cache_of_a_pruned_model_goes_on_without_pruning() -> None:
    model, ids = base(), tokens()
    wanted = output(model, ids)
    with torch.no_grad():
        report = prune(model, 200)
        past = model(ids[:, :9], use_cache=True)[CACHE]
        report.remove()
        assert difference(model(ids[:, 9:], **{CACHE: past}).logits, wanted[:, 9:]) < 5e-5
        with prune(model, 200), pytest.raises(ValueError, match="the states of another call of prune"):
            model(ids[:, :1], **{CACHE: past})


# Caches


def test_a_cache_that_a_call_left_in_the_middle_is_refused_with_the_way_out() -> None:
    model = base()
    prune(model, {0: Selection(8, start=0), 1: Selection(8, start=0)})
    cache = transformers.DynamicCache(config=model.config)
    model(tokens(2, T), **{CACHE: cache})

    def fail(*_: Any) -> None:
        raise RuntimeError("stopped")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stopped"):
        model(tokens(2, T), **{CACHE: cache})
    hook.remove()
    for count in (5, 1):
        with pytest.raises(ValueError, match=r"an empty .*if an earlier call failed between two layers"):
            model(tokens(2, count), **{CACHE: cache})


def test_positions_in_the_cache_cannot_be_left_out_later() -> None:
    model, mask = base(), torch.ones(1, T + 1, dtype=torch.int64)
    mask[0, 5:9] = 0
    with prune(model, 32):
        cache = transformers.DynamicCache(config=model.config)
        output(model, tokens(1), **{CACHE: cache})
        with pytest.raises(ValueError, match="leaves out other positions than before"):
            output(model, tokens(1, 1), attention_mask=mask, **{CACHE: cache})


def test_the_keys_kept_by_threshold_are_those_of_the_stream() -> None:
    """The set that a state holds is the universal set of one pass, but for keys that are recent."""
    rng = np.random.default_rng(0)
    K = rng.standard_normal((3, 500, 8)) * np.exp(rng.standard_normal((3, 500, 1)))
    selection = Selection(epsilon=0.1, scores="leverage", center=False, window=20, renew_every=50)
    _, state = causal_pruned_attention(K, K, K, selection, return_state=True)
    stream = levattn.StreamingUniversalSet(0.1).update(K).result()
    (part,) = state.parts
    for head in range(3):
        count = part.kept.shape[1] if part.kept_count is None else int(part.kept_count[head])
        found = part.kept_places[head, :count]
        assert found.tolist() == [i for i in stream.items[head].indices if i < 480]


# Gradients, weights


def first_attention(model: Any, ids: Any = None, **options: Any) -> Any:
    """The queries, keys and values of the first layer."""
    seen: list[Any] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[1:4])
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(*args, **kwargs)

    output(written_out(copy.deepcopy(model), spy), ids, **options)
    return seen[0]


def gradients(model: Any, ids: Any, **options: Any) -> list[Any]:
    model.zero_grad()
    result = model(ids, **options)
    (result[0] if "Esm" in type(model).__name__ else result.logits).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["Llama", "Esm"])
def test_gradients_flow(family: str) -> None:
    model, ids = base(family), tokens()
    wanted = gradients(model, ids, attention_mask=LEFT) if family in DECODERS else gradients(model, ids)
    mask = {"attention_mask": LEFT} if family in DECODERS else {}
    model.train() if family in DECODERS else model.eval()
    with prune(model, 60, measure=False):
        found = gradients(model, ids, **mask)
    if not mask:
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(found, wanted, strict=True))
    with prune(model, split(family)):
        few = gradients(model, ids, **mask)
    assert len(few) == len(wanted)
    assert all(torch.isfinite(gradient).all() for gradient in few)
    assert max(float((a - b).abs().max()) for a, b in zip(few, wanted, strict=True)) > 0


@pytest.mark.filterwarnings("ignore:`output_attentions=True` is not supported:UserWarning:transformers")
@pytest.mark.parametrize("family", ["Llama", "Esm"])
def test_weights_are_those_of_the_mixture(family: str) -> None:
    model = base(family)
    q, k, v = first_attention(model, attention_mask=LEFT)
    V = v.repeat_interleave(4 // v.shape[1], 1)
    with torch.no_grad(), prune(model, split(family), layers=[0], heads=[0]):
        weights = model(tokens(), attention_mask=LEFT, output_attentions=True).attentions[0]
    assert weights.shape == (2, 4, T, T)
    rows = weights[LEFT.bool()[:, None].expand(-1, 4, -1)]
    assert torch.allclose(rows.sum(-1), torch.ones(len(rows)), atol=1e-5)
    assert (weights >= -1e-6).all()
    assert float(weights.masked_fill(LEFT.bool()[:, None, None], 0).abs().max()) == 0
    group = 4 // k.shape[1]
    scale = 1.0 if family == "Esm" else 8**-0.5
    Y = attend(
        q[1:, :group, PADDED:],
        k[1:, :1, PADDED:],
        v[1:, :1, PADDED:],
        causal=family == "Llama",
        scale=scale,
        **vars(split(family)),
    )
    assert difference((weights @ V)[1:, :group, PADDED:], Y) < 1e-5


@pytest.mark.filterwarnings("ignore:`output_attentions=True` is not supported:UserWarning:transformers")
def test_weights_on_what_a_cache_has_summarized_are_refused() -> None:
    model, ids = base(), tokens()
    with torch.no_grad(), prune(model, SPLIT):
        past = model(ids, use_cache=True)[CACHE]
        with pytest.raises(ValueError, match="output_attentions is True and LlamaAttention 0 continues from a cache"):
            model(ids[:, :1], output_attentions=True, **{CACHE: past})


# The report


@pytest.mark.parametrize("family", ["Llama", "Esm"])
@pytest.mark.parametrize("function", [None, lambda K, V: V[..., -1] + K[..., 0]])
def test_the_report_is_what_dense_attention_says(family: str, function: Any) -> None:
    model, length = base(family), 24  # 9 slots select after 18 and 21, where runs of measured queries begin
    ids = tokens(length=length)
    q, k, v = first_attention(model, ids)
    causal, scale = (True, 8**-0.5) if family == "Llama" else (False, 1.0)
    options = {"size": 3, "window": 2, "sinks": 1} | ({"renew_every": 3} if causal else {})
    with prune(model, Selection(**options, scores=function), layers=[0]) as report:
        output(model, ids)
    options["scores"] = None if function is None else function(k, v)
    group = q.shape[1] // k.shape[1]
    eye = torch.eye(length).expand(*k.shape[:2], -1, -1)
    exact = attend(q, k, eye, causal=causal, scale=scale, **options) > 0  # no summaries: what is attended
    scores = scale * q @ k.repeat_interleave(group, 1).transpose(-1, -2)
    if causal:
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    P = torch.softmax(scores, -1)
    dense = P @ v.repeat_interleave(group, 1)
    off = attend(q, k, v, causal=causal, scale=scale, **options) - dense
    for row in report.table():
        of = slice(row["head"] * group, (row["head"] + 1) * group)
        assert row["captured"] == pytest.approx(float((P * exact)[:, of].sum(-1).mean()), rel=1e-4)
        assert row["selected"] == row["slots"] == pytest.approx(float(exact[:, of].sum(-1).double().mean()))
        assert row["error"] == pytest.approx(float(off[:, of].norm() / dense[:, of].norm()), rel=1e-4)
        assert row["calls"] == 1
        assert row["seconds"] > 0


def test_the_report_of_decoding_and_padding() -> None:
    model, ids = base(), tokens()
    with torch.no_grad(), prune(model, SPLIT, measure=True) as report:
        past = model(ids[:, :16], attention_mask=LEFT[:, :16], use_cache=True)[CACHE]
        before = report.table()
        for t in range(16, T):
            model(ids[:, t : t + 1], attention_mask=LEFT[:, : t + 1], **{CACHE: past})
    for row, old in zip(report.table(), before, strict=True):
        assert row["calls"] == 5
        assert 0.2 < row["captured"] < 1
        assert 0 < row["error"] < 1
        assert row["selected"] <= 4 + 1 + 3 + 5
        assert row["slots"] > old["slots"]


def test_the_report_is_shown_saved_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = base(num_hidden_layers=3)
    with prune(model, Selection(8, renew_every=2), layers=[0, 2], heads=[1], measure=True) as report:
        assert repr(report) == "<PruneReport of LlamaForCausalLM, 2 layers, pruned>"
        assert report.table()[0] == dict.fromkeys(report.table()[0]) | {
            "layer": 0,
            "head": 1,
            "calls": 0,
            "measured": 0,
            "queries": 0,
        }
        assert str(report).splitlines()[1].split() == ["0", "1", "0", "0", "-", "-", "-", "-", "-"]
        output(model)
    assert repr(report).endswith("removed>")
    lines = str(report).splitlines()
    assert [line.split()[:4] for line in lines[:3]] == [
        ["layer", "heads", "calls", "measured"],
        ["0", "1", "1", "1"],
        ["2", "1", "1", "1"],
    ]
    assert len({len(line) for line in lines[:3]}) == 1
    assert "selected: keys attended exactly; captured: softmax mass on them" in lines[-1]
    report.save_json(tmp_path / "report.json")
    loaded = json.loads((tmp_path / "report.json").read_text())
    assert loaded == json.loads(json.dumps(report.to_dict()))
    assert loaded["options"]["selection"]["budget"] == 8
    assert loaded["heads"] == report.table()
    display = report.plot()
    assert display.values.shape == (2, 2)
    assert np.isnan(display.values[:, 0]).all()
    assert display.values[:, 1].tolist() == [row["captured"] for row in report.table()]
    assert [label.get_text() for label in display.ax_.get_yticklabels()] == ["0", "2"]
    with pytest.raises(ValueError, match="value is 'seconds'; expected one of slots"):
        report.plot("seconds")


def test_options_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    model = base()
    with prune(
        model, Selection(np.float32(0.375), renew_every=np.int64(4)), layers=np.arange(1), heads=np.array([1])
    ) as report:
        output(model)
    report.save_json(tmp_path / "report.json")
    options = json.loads((tmp_path / "report.json").read_text())["options"]
    assert (options["layers"], options["heads"]) == ([0], [1])
    assert Selection(**options["selection"]) == Selection(0.375, renew_every=4)
    with prune(model, {np.int64(0): np.float64(1.0), (1, np.int64(1)): np.int64(8)}) as report:
        output(model)
    assert [(row["layer"], row["head"]) for row in report.table()] == [(1, 1)]
    assert report.options["selection"] == [[0, vars(Selection(1.0))], [1, 1, vars(Selection(8))]]


def test_measuring_can_be_left_out() -> None:
    model = base()
    with prune(model, Selection(6, renew_every=2), measure=False) as report:
        output(model)
    row = report.table()[0]
    assert row == dict.fromkeys(row) | {"layer": 0, "head": 0, "calls": 1, "measured": 0, "queries": 0}


def test_a_report_without_figures_says_why() -> None:
    model = base()
    with prune(model, Selection(6, renew_every=2), measure=False) as report:
        assert str(report).endswith("-: the model was not called yet")
        output(model)
    assert str(report).endswith("-: not measured; give measure=True")
    with prune(model, Selection(6, renew_every=2), measure=True) as report:
        output(model)
    assert "-:" not in str(report)
    with prune(model, 1.0) as report:
        output(model)
    assert (str(report), report.table()) == ("all heads are dense", [])


def test_an_inspection_is_a_table_with_the_means_of_its_columns() -> None:
    found = inspect_model(base(), {"input_ids": tokens(), "attention_mask": LEFT}, epsilon=0.4)
    heading, *lines, last = str(found).splitlines()
    assert heading.split() == [
        "layer",
        "head",
        "n",
        "d",
        "κ",
        "|U|",
        "share",
        "rank/ε",
        "max",
        "mass",
        "heavy",
        "caught",
    ]
    assert [line.split()[:2] for line in lines] == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert len({len(line) for line in [heading, *lines]}) == 1
    rows = found.table()
    share, mass = (np.mean([row[name] for row in rows]) for name in ("share", "captured"))
    assert last == f"mean over heads: {share:.0%} of the keys hold {mass:.0%} of the softmax mass"
    rows[0]["n"] = 0
    assert found.table() == found.rows != rows


# Coming and going


def test_a_report_ends_its_pruning_once() -> None:
    model = base()
    report = prune(model, SPLIT)
    assert report.active
    report.remove()
    assert not report.active
    before = output(model)
    report.remove()  # once more changes nothing
    assert torch.equal(output(model), before)
    with pytest.raises(ValueError, match="was removed; expected one in use"), report:
        pass
    with pytest.raises(ZeroDivisionError), prune(model, SPLIT):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="size is -1"):
        prune(model, Selection(size=-1))
    with prune(model, SPLIT) as report:
        report.remove()
    with pytest.raises(ValueError, match="model is LlamaForCausalLM, not extended"):
        remove(model)


def test_saved_weights_are_those_of_the_model(tmp_path: Path) -> None:
    model = base()
    dense = output(model)
    with prune(model, SPLIT):
        model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert difference(output(loaded), dense) < 1e-6


def test_the_encoder_of_two_stacks() -> None:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "vocab_size": 40, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    model = transformers.BartModel(transformers.BartConfig(**sizes, **heads, init_std=0.3)).eval()
    with pytest.raises(ValueError, match=r"several stacks of layers \(cross-attention among them"):
        prune(model, 8)
    wanted = output(model, attention_mask=LEFT)
    with prune(model.get_encoder(), 60) as report:
        assert difference(output(model, attention_mask=LEFT), wanted) < 1e-5
    assert len(report.table()) == 8
    with prune(model.get_encoder(), FULL):
        assert difference(output(model, attention_mask=LEFT), wanted) > 1e-3
    whole = output(model, use_cache=False)
    with prune(model.get_decoder(), 60):  # alone it has no cross-attention, which stays dense
        with pytest.raises(TypeError, match=r"of type EncoderDecoderCache; .* use_cache=False if the model has an"):
            output(model)
        assert difference(output(model, use_cache=False), whole) < 1e-5


def test_an_example_may_be_given() -> None:
    model = base()
    with prune(model, 60, example={"inputs_embeds": torch.zeros(1, 2, 32), "use_cache": False}):
        output(model)
    with pytest.raises(IndexError):  # the model's own error about its inputs
        prune(model, 60, example={"input_ids": torch.full((1, 2), 40)})
    model.main_input_name = "input_features"
    with pytest.raises(ValueError, match="is called with input_features, which has no default example"):
        prune(model, 8)


def of_pictures_in_a_row() -> tuple[Any, dict[str, Any]]:
    few = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.VideoMAEModel(transformers.VideoMAEConfig(**few, image_size=16, patch_size=8, num_frames=4))
    return model.eval(), {"pixel_values": torch.randn(3, 4, 3, 16, 16)}


def of_sounds() -> tuple[Any, dict[str, Any]]:
    few = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    few |= {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 48}
    config = transformers.WhisperConfig(**few, num_mel_bins=8, max_source_positions=10)
    model = transformers.WhisperModel(config).eval().get_encoder()
    return model, {"input_features": torch.randn(3, 8, 20)}


@pytest.mark.parametrize("made", [of_pictures_in_a_row, of_sounds])
def test_inputs_are_the_example_of_a_model_that_does_not_take_the_default_one(made: Callable[..., Any]) -> None:
    model, inputs = made()
    (name,) = inputs
    with pytest.raises(ValueError, match=rf"default example.* Give a small example .*example={{'{name}': ...}}"):
        prune(model, 0.5)
    found = calibrate(model, inputs, target=0.1)
    assert sorted(found) == [(0, 0), (0, 1)]
    with prune(model, 0.5, example={name: inputs[name][:1]}, measure=True) as report:
        model(**inputs)
    assert report.summary()["measured"] == 6
    assert [(row["layer"], row["head"]) for row in inspect_model(model, inputs).rows] == [(0, 0), (0, 1)]
    many = calibrate(model, {name: inputs[name].repeat_interleave(16, 0)}, risk=0.1, confidence=0.9)
    assert many.texts == 36


# What is refused


def other(family: str, **options: Any) -> Any:
    return getattr(transformers, family + "Model")(getattr(transformers, family + "Config")(**{**SIZES, **options}))


def profile_of(costs: dict[tuple[int, int], float]) -> HeadProfile:
    figures = {"recall_error": 0.1, "text": 0.0, "text_error": 0.1}
    rows = [{"layer": layer, "head": head, "recall": cost, **figures} for (layer, head), cost in costs.items()]
    return HeadProfile(rows, "LlamaModel", 1 / 16, way="reading")


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (lambda: prune(torch.nn.Linear(2, 2), 8), "model is of type Linear"),
    "bounded logits": (
        lambda: prune(base("Gemma2", num_key_value_heads=2, head_dim=8, attn_implementation="eager"), 8),
        "Gemma2Attention 0 passes softcap to its attention .bounded logits",
    ),
    "two calls of a layer": (
        lambda: prune(base("DiffLlama", num_key_value_heads=2), 8),
        "DiffLlamaAttention 0. calls its attention 2 times for each token|DiffLlamaSdpaAttention does not",
    ),
    "not reached": (
        lambda: prune(other("MPNet"), 8),
        "MPNetModel: no attention function was reached .MPNetSelfAttention does not",
    ),
    "extended": (
        lambda: prune(macchiato_from(base(), window=4, latents=2), 8),
        "is extended by macchiato_from already",
    ),
    "extending": (lambda: macchiato_from(pruned(base()), window=4, latents=2), "is pruned already"),
    "no budget": (lambda: prune(base(), Selection()), "expected one of the three"),
    "two budgets": (lambda: prune(base(), Selection(8, size=3)), "expected one of the three"),
    "budget": (lambda: prune(base(), 1.5), "budget is 1.5; expected a count, or a share"),
    "one slot": (
        lambda: prune(base(), 1),
        "budget is 1; expected at least 2 slots, or a share",
    ),
    "one slot of a head": (lambda: prune(base(), {(0, 0): np.int64(1)}), "budget is 1; expected at least 2 slots"),
    "a flag as budget": (lambda: prune(base(), True), "selection is of type bool; expected a Selection, or a number"),
    "budget of another type": (
        lambda: prune(base(), "8"),
        "selection is of type str; expected a Selection, or a number",
    ),
    "scores": (lambda: prune(base(), Selection(8, scores="norms")), "scores is 'norms'; expected one of"),
    "array of scores": (
        lambda: prune(base(), Selection(8, scores=torch.ones(3))),
        "selection has an array of scores; expected a name",
    ),
    "center": (lambda: prune(base(), Selection(8, center=True)), "center is True"),
    "epsilon": (lambda: prune(base(), Selection(epsilon="0.1")), "epsilon is '0.1'"),
    "chunk of an encoder": (
        lambda: prune(base("Esm"), Selection(8, renew_every=4)),
        "renew_every is 4, and the attention is not causal",
    ),
    "start of an encoder": (
        lambda: prune(base("Esm"), Selection(8, start=4)),
        "start is 4, and the attention is not causal",
    ),
    "layers": (lambda: prune(base(), 8, layers=[2]), r"layers is \[2\]; expected different numbers among \[0, 1\]"),
    "heads": (lambda: prune(base(), 8, heads=0), "heads is 0; expected numbers of heads"),
    "empty mapping": (lambda: prune(base(), {}), "selection is empty"),
    "mapping and layers": (lambda: prune(base(), {0: 8}, layers=[0]), "selection names layers, and layers or heads"),
    "mapping twice": (lambda: prune(base(), {0: 8, (0, 1): 9}), "selection names head 1 of layer 0 twice"),
    "mapping to no head": (
        lambda: prune(base(), {(0, 2): 8}),
        "selection names head 2 of layer 0, and the model has 2 heads in this layer",
    ),
    "mapping to no layer": (
        lambda: prune(base(), {2: 8}),
        r"selection names layer 2, and the model has the layers \[0, 1\]; expected heads of this model",
    ),
    "calibration of another model": (
        lambda: prune(base(), Calibration({(3, 0): 0.5}, "LlamaModel", "logits", 0.1, 0.1)),
        r"selection is a calibration that names head 0 of layer 3, and the model has the layers \[0, 1\]",
    ),
    "profile of another model": (
        lambda: prune(base(), 0.5, heads=profile_of({(0, 0): 1.0, (0, 5): 2.0})),
        "heads is a profile that names head 5 of layer 0, and the model has 2 heads in this layer",
    ),
    "mapping from a name": (lambda: prune(base(), {"a": 8}), "selection has the key 'a'"),
    "mapping to a name": (lambda: prune(base(), {0: "8"}), r"selection\[0\] is of type str"),
    "layers of another type": (lambda: prune(base(), 8, layers=[[0]]), r"layers is \[\[0\]\]; expected whole"),
}


INPUTS: dict[str, tuple[Any, str]] = {  # what a user may give, and what is said about it
    "tokens": (
        tokens(),
        r" is of type Tensor; expected the output of a tokenizer, e.g. tokenizer\(text, return_tensors='pt'",
    ),
    "text": ("a text", r" is of type str; expected the output of a tokenizer"),
    "number": (3, r" is of type int; expected the output of a tokenizer"),
    "lists": (
        {"input_ids": [[1, 2]]},
        r"\['input_ids'\] is of type list; expected a tensor of torch, e.g. by tokenizer",
    ),
    "array": (
        {"input_ids": tokens(), "attention_mask": np.ones((2, T))},
        r"\['attention_mask'\] is of type ndarray; expected a tensor",
    ),
}


@pytest.mark.parametrize("case", INPUTS)
def test_inputs_that_no_model_takes_are_refused_by_name(case: str) -> None:
    model, (inputs, message) = base(), INPUTS[case]
    with pytest.raises(TypeError, match="inputs" + message):
        inspect_model(model, inputs)
    with pytest.raises(TypeError, match="inputs" + message):
        calibrate(model, inputs, target=0.1)
    with pytest.raises(TypeError, match="example" + message):
        prune(model, 8, example=inputs)
    with pytest.raises(TypeError, match=r"inputs\[0\]" + message):
        calibrate(model, [inputs], target=0.1)
    inspect_model(model, transformers.BatchEncoding({"input_ids": tokens()}))


def pruned(model: Any) -> Any:
    prune(model, SPLIT)
    return model


@pytest.mark.parametrize("case", MODELS)
def test_what_cannot_be_pruned_is_refused_by_name(case: str) -> None:
    call, message = MODELS[case]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.skipif(CACHE != "cache", reason="Zamba shares its layers there, or makes a cache of its own")
def test_a_layer_without_a_place_in_the_cache_is_refused_with_the_way_out() -> None:
    sizes = {"num_hidden_layers": 5, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4}
    model = base("Zamba", **sizes, num_key_value_heads=4, n_mamba_heads=2, use_mamba_kernels=False)
    wanted = output(model, use_cache=False)
    with prune(model, Selection(60, start=0)):
        assert difference(output(model, use_cache=False), wanted) < 2e-5
        with pytest.raises(ValueError, match=r"which layer of the cache is its own; .*use_cache=False"):
            output(model)


@pytest.mark.parametrize("start", [None, 0, 1])
def test_a_window_that_only_causal_attention_has_room_for_is_one_for_decoders(start: int | None) -> None:
    selection = Selection(12, window=6, start=start)  # near keys are on one side there, and on both sides elsewhere
    found = []
    for given in (selection, dict.fromkeys([0, 1], selection)):
        with prune(base(), given, measure=False) as report:
            found.append(report.table())
    assert found[0] == found[1] != []
    with pytest.raises(ValueError, match=r"budget=12 is 12 slots, and .*window=6, .* take 13|start is 1, and the"):
        prune(base("Esm"), selection)
    with pytest.raises(
        ValueError, match=r"take 7; expected a larger budget for causal attention, .* take 13|take 7; e"
    ):
        prune(base(), Selection(4, window=6, start=start))


def test_scales_of_layers_are_honored_or_refused() -> None:
    model = other("GPT2", scale_attn_by_inverse_layer_idx=True, attn_implementation="eager").eval()
    wanted = output(model)
    try:
        prune(model, 60)
    except ValueError as error:
        assert "scales its logits by its number" in str(error)  # noqa: PT017
    else:
        assert difference(output(model), wanted) < 2e-5


def test_windows_that_slide_are_refused_when_they_do() -> None:
    model = base("Mistral", sliding_window=T)
    prune(model, SPLIT, layers=[0, 1])
    cache = transformers.DynamicCache(config=model.config)
    assert torch.isfinite(output(model, **{CACHE: cache})).all()
    with pytest.raises(ValueError, match="MistralAttention 0 slides over 20 positions, and there are 21"):
        output(model, tokens(length=1), **{CACHE: cache})
    with pytest.raises(ValueError, match="slides over 20 positions, and there are 22"):
        output(model, tokens(length=22))


SLIDING: dict[str, tuple[dict[str, Any], list[int]]] = {  # and the layers that do not slide
    "Gemma3": ({}, [1]),
    "Qwen2": ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, [0]),
    "Mistral": ({"sliding_window": 96}, [0, 1]),  # as many as the model takes
}


@pytest.mark.parametrize("family", SLIDING)
def test_layers_that_slide_stay_dense_unless_they_are_named(family: str) -> None:
    options, whole = SLIDING[family]
    model, few = base(family, **options), Selection(6, start=0)
    with prune(model, few, layers=whole):
        expected = output(model), model.generate(tokens(), max_new_tokens=4, do_sample=False)
    with prune(model, few) as report:
        assert torch.equal(output(model), expected[0])
        assert torch.equal(model.generate(tokens(), max_new_tokens=4, do_sample=False), expected[1])
    assert sorted({row["layer"] for row in report.table()}) == whole
    assert ("slide and are dense" in str(report)) == (family != "Mistral")
    with prune(model, few, heads=[0]) as report:
        output(model)
    assert sorted({row["layer"] for row in report.table()}) == whole


def test_the_budgets_of_a_loss_leave_layers_that_slide_dense() -> None:
    found = calibrate(base("Gemma3"), {"input_ids": tokens()}, target=0.5, metric="logits")
    assert {layer for layer, _ in found} == {1}


def test_an_inspection_leaves_out_windows_that_are_shorter_than_the_text() -> None:
    model = base("Gemma3")
    for length, layers in ((T, {1}), (4, {0, 1, 2})):
        found = inspect_model(model, {"input_ids": tokens(length=length)})
        assert {row["layer"] for row in found.table()} == layers
    with pytest.raises(ValueError, match="Gemma3Attention 0 slides over 4 positions, and there are 20"):
        inspect_model(model, {"input_ids": tokens()}, layers=[0])


def test_a_model_whose_layers_all_slide_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"all layers of .* slide, over 4 positions, .* layers=range\(2\)"):
        prune(base("Mistral"), 6)
    prune(base("Mistral"), 6, layers=range(2)).remove()


def test_a_mask_that_is_not_causal_is_refused_where_there_is_a_cache() -> None:
    with pytest.raises(ValueError, match="has a cache and is not causal"):
        output(pruned(base()), attention_mask=torch.ones(1, 1, T, T).bool(), use_cache=True)
