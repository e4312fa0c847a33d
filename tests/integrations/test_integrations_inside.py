"""Adapters of models, their parts.

Inside: failures have to be planted, and of parts that split, replay and attend only some show in results.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")
safetensors = pytest.importorskip("safetensors.torch")
from decoders import CACHE, LEFT, T, base, difference, output, tokens  # noqa: E402
from test_changed_models import both, change, looks  # noqa: E402
from test_compress import changed, context, levattn_profile, question  # noqa: E402
from test_context_files import CONTEXT, GREEDY, QUESTION  # noqa: E402
from test_prune import pruned  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from levattn.attention import Selection  # noqa: E402
from levattn.integrations.transformers import CompressedCache, HeadProfile, compress, prune, remove  # noqa: E402
from levattn.integrations.transformers.calls import once_a_step, padding_and_kind  # noqa: E402
from levattn.integrations.transformers.comparison import FIGURES  # noqa: E402
from levattn.integrations.transformers.compression import compress as compression  # noqa: E402
from levattn.integrations.transformers.compression import observed as rules  # noqa: E402
from levattn.integrations.transformers.compression import slots as attended_module  # noqa: E402
from levattn.integrations.transformers.compression.compress import _empty_layers  # noqa: E402
from levattn.integrations.transformers.compression.files import Origin  # noqa: E402
from levattn.integrations.transformers.compression.fingerprint import Fingerprint  # noqa: E402
from levattn.integrations.transformers.compression.layer import CompressedLayer  # noqa: E402
from levattn.integrations.transformers.compression.profile import split_bytes  # noqa: E402
from levattn.integrations.transformers.compression.rotation import rotations  # noqa: E402
from levattn.integrations.transformers.compression.slots import HeadSlots, attended  # noqa: E402
from levattn.integrations.transformers.compression.trials import ReadingTrial, Replay  # noqa: E402
from levattn.integrations.transformers.interface import EXTENSION, PART, RECORD  # noqa: E402
from levattn.integrations.transformers.latents import LatentLogits  # noqa: E402
from levattn.integrations.transformers.measuring import FigureSums, Sampler  # noqa: E402
from levattn.integrations.transformers.pruned import _attention  # noqa: E402
from levattn.integrations.transformers.pruning import observed  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::levattn.RecallWarning")]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def written_out(q: Any, groups: Any, tail: Any, present: Any, scale: float, softcap: float | None) -> Any:
    """Attention to slots and to what came after them, query by query in float64."""
    (B, H, T, _), t = q.shape, tail[0].shape[2]
    each = H // tail[0].shape[1]
    Y = np.zeros((B, H, T, tail[1].shape[-1]))
    for group in groups:
        for place, head in enumerate(group.heads):
            for b in range(B):
                keys = torch.cat([group.keys[b, place], tail[0][b, head]]).double().numpy()
                values = torch.cat([group.values[b, place], tail[1][b, head]]).double().numpy()
                weights = np.zeros(len(keys))
                if group.log_weight is not None:
                    weights[: group.keys.shape[2]] = group.log_weight[b, place]
                for h in range(head * each, (head + 1) * each):
                    for i in range(T):
                        z = keys @ q[b, h, i].double().numpy() * scale
                        z = z if softcap is None else softcap * np.tanh(z / softcap)
                        z = z + weights
                        for j in range(t):
                            if j > t - T + i or (present is not None and not present[b, j]):
                                z[group.keys.shape[2] + j] = -math.inf
                        p = np.exp(z - z.max())
                        Y[b, h, i] = p @ values / p.sum()
    return Y


ROUTES = {  # by which slots are attended: width of the values, softcap, whether gradients are asked for
    "parts": (8, None, False),
    "device": (8, None, False),
    "device, gradients": (8, None, True),
    "device, narrow": (5, None, False),
    "bounded": (8, 1.5, False),
    "gradients": (8, None, True),
    "narrow": (5, None, False),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 1 << 24])
def test_attention_to_slots_is_the_softmax_of_all(
    T: int, padded: bool, route: str, dtype: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    D, softcap, graded = ROUTES[route]
    monkeypatch.setattr(attended_module, "_LOGITS", block)
    called: list[str] = []
    if "device" in route:  # tensors of which have routes of their own
        monkeypatch.setattr(attended_module, "_on_device", lambda _: True)
        monkeypatch.setattr(attended_module, "held_by_kernels", lambda *_: None)
    for name in ("_by_one_call", "_by_parts", "_by_products", "_causal"):
        real = getattr(attended_module, name)
        monkeypatch.setattr(
            attended_module, name, lambda *args, name=name, real=real: (called.append(name), real(*args))[1]
        )
    B, heads, each, d, t = 2, 4, 2, 8, 20

    def group(which: tuple[int, ...], s: int, weighted: bool) -> HeadSlots:
        shape = (B, len(which), s)
        weight = torch.randn(shape) if weighted else None
        if weight is not None:
            weight[0, 0, -1] = -math.inf
        keys, values = torch.randn(*shape, d, dtype=dtype), torch.randn(*shape, D, dtype=dtype)
        return HeadSlots(which, keys, values, weight, torch.zeros(shape))

    groups = (group((0, 3), 41, True), group((1, 2), 70, False))
    q = torch.randn(B, heads * each, T, d, dtype=dtype, requires_grad=graded)
    tail = torch.randn(B, heads, t, d, dtype=dtype), torch.randn(B, heads, t, D, dtype=dtype)
    present = None
    if padded:
        present = torch.ones(B, t, dtype=torch.bool)
        present[1, :2] = False
    expected = written_out(q.detach(), groups, tail, present, 0.4, softcap)
    found = attended(q, groups, tail, present, 0.4, softcap)
    assert found.requires_grad == graded
    if "device" in route and T > 1 and not padded:
        assert set(called) == {"_causal"}
    elif T == 1 and not graded and "device" not in route and dtype != torch.float64:
        assert not called  # a kernel did it
    elif route in ("device", "device, gradients"):
        assert set(called) == {"_by_one_call"}
    else:
        assert set(called) == {"_by_parts" if route == "parts" else "_by_products"}
    bar = {torch.float32: 2e-5, torch.float64: 1e-13, torch.bfloat16: 0.05}[dtype]
    assert np.abs(found.detach().double().numpy() - expected).max() < bar


def test_padding_in_a_question_stays_finite() -> None:
    group = HeadSlots((0,), torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8), None, torch.zeros(1, 1, 5))
    tail, present = (torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)), torch.tensor([[False, True, True, False]])
    assert attended(torch.randn(1, 1, 4, 8), (group,), tail, present, 1.0, None).isfinite().all()


@pytest.mark.parametrize("budget", [0.005, 0.05, 0.3, 0.77, 1.0])
def test_bytes_are_split_within_the_budget_and_where_they_count(budget: float) -> None:
    rng = np.random.default_rng(0)
    drawn = rng.exponential(size=(5, 4)) ** 3
    costs = {(layer, head): float(cost) for (layer, head), cost in np.ndenumerate(drawn)}
    for a, b in ((1.0, 0.1), (0.0, 1.0)):
        check_split({head: (a * cost, b * cost) for head, cost in costs.items()}, budget)


def check_split(costs: dict[tuple[int, int], tuple[float, float]], budget: float) -> None:
    def loss(head: tuple[int, int], share: float) -> float:
        a, b = costs[head]
        return a * (1 - share**0.125) + b * (1 / share - 1)

    shares = split_bytes(costs, budget)
    assert sum(shares.values()) <= budget * len(costs) * (1 + 1e-9)
    order = sorted(costs, key=costs.__getitem__)
    assert all(shares[low] <= shares[high] for low, high in pairwise(order))
    assert sum(loss(*pair) for pair in shares.items()) <= sum(loss(head, budget) for head in costs) + 1e-12
    # no pair of heads gains by what one level of the first would give the second
    steps = [1 / 192, 1 / 96, 1 / 64, 1 / 48, 1 / 32, 1 / 24, 1 / 16, 1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 1.0]
    for giver, taker in permutations((head for head in costs if shares[head] in steps), 2):
        lower, higher = steps.index(shares[giver]) - 1, steps.index(shares[taker]) + 1
        if lower < 0 or higher == len(steps) or steps[higher] - shares[taker] > shares[giver] - steps[lower]:
            continue
        before = loss(giver, shares[giver]) + loss(taker, shares[taker])
        assert loss(giver, steps[lower]) + loss(taker, steps[higher]) >= before - 1e-12


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GPTNeoX", "Phi"])
@torch.no_grad()
def test_passes_that_begin_at_a_layer_are_those_of_the_whole(family: str) -> None:
    model = base(family, num_hidden_layers=3)
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    cache, replay = compress(model, context(), 1.0), Replay(model)
    layers[0].forward = own = layers[0].forward  # as accelerate has it, which moves what comes in
    with replay.recorded():
        whole = model(question(), **{CACHE: cache.copy()}).logits
    for layer in range(3):
        with replay.begun_at(layer):
            assert torch.equal(model(question(), **{CACHE: cache.copy()}).logits, whole)
        hidden = layers[layer].register_forward_hook(lambda _m, _a, out: changed(out))
        expected = model(question(), **{CACHE: cache.copy()}).logits
        with replay.begun_at(layer):
            found = model(question(), **{CACHE: cache.copy()}).logits
        hidden.remove()
        assert torch.equal(found, expected)
        assert not torch.equal(found, whole)
        assert layers[0].forward is own
    assert torch.equal(model(question(), **{CACHE: cache.copy()}).logits, whole)


def test_layers_can_be_looked_at_while_they_are_dense() -> None:
    model = base()
    wanted = output(model, attention_mask=LEFT)
    outputs: list[Any] = []
    hook = model.register_forward_hook(lambda *called: outputs.append(called[-1].logits))
    ((layer, (arrays,)),) = observed(model, {"input_ids": tokens(), "attention_mask": LEFT}, layers=[1]).items()
    hook.remove()
    assert torch.equal(outputs[-1], wanted)
    prune(model, 8).remove()
    assert (layer, arrays.q.shape, arrays.k.shape, arrays.causal) == (1, (2, 4, T, 8), (2, 2, T, 8), True)
    assert torch.equal(arrays.present, LEFT.bool())
    P = arrays.dense_weights([T - 1]) @ arrays.v.repeat_interleave(2, 1)
    assert P.shape == (2, 4, 1, 8)


@pytest.mark.parametrize("cached", [False, True])
def test_decoders_read_the_first_positions_densely_unless_a_selection_says_otherwise(
    cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a few positions in the place of 1536."""
    model, ids, far = base(), tokens(length=2 * T), T - 3
    dense = output(model, ids[:, :far], use_cache=cached)
    wanted = {}
    for start in (far, 0):  # twice the slots are 16
        with prune(model, Selection(8, start=start), measure=False):
            wanted[start] = output(model, ids, use_cache=cached)
    monkeypatch.setattr("levattn.integrations.transformers.pruned.START", far)
    for few, start in ((8, far), (Selection(8), far), (Selection(8, start=0), 0), ({0: 8, 1: Selection(8)}, far)):
        with prune(model, few) as report:
            assert torch.equal(output(model, ids, use_cache=cached), wanted[start])
            assert "read all keys" not in str(report)
            short = output(model, ids[:, :far], use_cache=cached)
        assert torch.equal(short, dense) == bool(start)
        assert ("2 of 4 calls of layers read all keys" in str(report)) == bool(start)
    encoder = base("Esm")
    dense = output(encoder)
    with prune(encoder, 0.5):  # where nothing waits
        assert difference(output(encoder), dense) > 1e-3


@pytest.mark.parametrize("left_out", [[], [0, 1], [2 * T + 1, 2 * T + 9, 2 * T + 21]], ids=["none", "first", "later"])
@pytest.mark.parametrize("few", [{1: 8}, {(1, 1): 0.4}, {(1, 0): Selection(8, renew_every=3), (1, 1): 7}], ids=repr)
def test_short_calls_read_all_keys_and_later_ones_go_on_as_if_they_had_not(
    few: Any, left_out: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 3 positions for 256 and 1024. The last layer alone: its queries and keys do not depend on pruning."""
    model, ids, mask = base(), tokens(length=4 * T), torch.ones((2, 4 * T), dtype=torch.int64)
    mask[1, left_out] = 0
    sizes = [2 * T, 1, 3, 2, 4, 1, 1, 8, *[1] * (2 * T - 26), 6]
    pieces = [*pairwise([0, *np.cumsum(sizes).tolist()])]

    def read() -> list[Any]:
        """Sequences change places after each piece."""
        cache, found, order = transformers.DynamicCache(config=model.config), [], torch.tensor([0, 1])
        for low, high in pieces:
            given = {} if mask[:, :high].all() else {"attention_mask": mask[order, :high]}
            found.append(output(model, ids[order, low:high], **given, **{CACHE: cache})[order])
            cache.batch_select_indices(torch.tensor([1, 0]))
            order = order.flip(0)
        return found

    dense = read()
    for name in ("FEW", "REST"):
        monkeypatch.setattr(f"levattn.integrations.transformers.pruned.{name}", 3)
    with prune(model, few, measure=True) as report:
        found = read()
    assert 0 < report.table()[0]["error"] < 1
    assert f"{sum(size <= 3 for size in sizes)} of {len(sizes)} calls of layers read all keys" in str(report)
    for name in ("FEW", "REST"):
        monkeypatch.setattr(f"levattn.integrations.transformers.pruned.{name}", 0)
    with prune(model, few, measure=False):
        pruned = read()
    assert difference(pruned[-1], dense[-1]) > 1e-3
    for (low, high), Y, exact, other in zip(pieces, found, dense, pruned, strict=True):
        assert difference(Y, exact if high - low <= 3 else other, mask[:, low:high]) < 2e-5


@pytest.mark.parametrize("padded", [False, True])
def test_texts_that_end_soon_after_the_first_selection_are_read_densely(
    padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 5 positions in the place of 1024; later positions are as if all had been pruned. The last layer alone."""
    model, ids, few = base(), tokens(length=2 * T), {1: 8}  # which selects after 16 positions
    mask = torch.ones_like(ids)
    mask[1, : 3 * padded] = 0

    def read(*stops: int) -> list[Any]:
        cache = transformers.DynamicCache(config=model.config)
        found = []
        for low, high in pairwise([0, *stops]):
            given = {"attention_mask": mask[:, :high]} if padded else {}
            found.append(output(model, ids[:, low:high], **given, **{CACHE: cache}) * mask[:, low:high, None])
        return found

    dense = read(21)[0]
    with prune(model, few, measure=False):
        pruned = read(2 * T)[0]
    assert difference(pruned[:, :21], dense) > 1e-3
    monkeypatch.setattr("levattn.integrations.transformers.pruned.REST", 5)
    with prune(model, few, measure=False):
        for stops in ((21,), (9, 21)):
            assert difference(torch.cat(read(*stops), 1), dense) < 2e-5
        for stops in ((2 * T,), (22, 2 * T), (9, 2 * T), (21, 2 * T), (9, 21, 24, 2 * T)):
            *_, last = read(*stops)
            assert difference(last, pruned[:, 2 * T - last.shape[1] :]) < 2e-5
    with prune(model, {1: Selection(8, start=16)}, measure=False):
        assert difference(read(21)[0], pruned[:, :21]) < 2e-5


def test_steps_of_decoding_are_measured_only_where_that_is_asked_for() -> None:
    model, prompt = base(), torch.arange(T)[None]

    def measured(measure: bool | None) -> float:
        with prune(model, Selection(6, renew_every=2), measure=measure) as report:
            model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
        first, *_ = report.table()
        assert (first["calls"], first["measured"]) == (3, 3 if measure else 1)
        return int(first["queries"])

    assert 0 < measured(None) < measured(True)


@pytest.mark.parametrize("layers", [range(1), range(3, 5), [0, 2, 5, 7, 11], range(64), range(200)])
def test_turns_of_layers_are_spread_over_a_lap(layers: Any) -> None:
    sampler = Sampler(layers, None)
    for _ in range(2):
        calls = [[layer for layer in layers if sampler.sample(layer, 2, 8, 8) is not None] for _ in range(64)]
        assert sorted(layer for call in calls for layer in call) == list(layers)
        assert layers[0] in calls[0]
        assert {len(call) for call in calls} <= {len(layers) // 64, -(-len(layers) // 64)}


def test_laps_reach_each_sequence_of_a_large_batch() -> None:
    for sequences in (1, 8, 9, 24, 50):
        sampler, seen = Sampler([0, 3], None), set[int]()
        for call in range(64 * 8):
            for layer in (0, 3):
                sample = sampler.sample(layer, sequences, 32, 32)
                assert (sample is None) == (call % 64 != (32 if layer else 0))
                if sample is not None and not layer:
                    assert len(set(sample.rows)) == len(sample.rows) == min(8, sequences)
                    assert len(sample.rows) * sample.queries <= 64
                    seen.update(sample.rows.tolist())
        assert seen == set(range(sequences))


def test_a_query_is_compared_with_few_keys_for_each_new_position() -> None:
    assert [Sampler([0], None).sample(0, 1, *of) is None for of in ((1, 1), (2, 128), (2, 129))] == [True, False, True]
    for queries, keys, most in ((2, 128, 1), (5, 64, 5), (64, 64, 64), (64, 128, 32)):
        sample = Sampler([0], None).sample(0, 1, queries, keys)
        assert sample is not None
        assert sample.queries == most
    whole = Sampler([0], True).sample(0, 3, 1, 4096)
    assert whole is not None
    assert (whole.rows.tolist(), whole.queries) == ([0, 1, 2], 21)
    assert Sampler([0], False).sample(0, 3, 64, 64) is None


def test_margins_cover_the_figures_of_all_units_as_often_as_they_say() -> None:
    rng, draws, n = np.random.default_rng(0), 2000, 40
    covered = np.zeros(2)
    for _ in range(draws):
        weight = rng.integers(1, 65, n)
        norm = rng.gamma(4.0, size=n) * weight
        captured = np.clip(0.7 + 0.1 * rng.standard_normal(n), 0, 1) * weight
        error = 0.01 * rng.gamma(3.0, size=n) / 3 * norm
        rows = dict.fromkeys(FIGURES, weight) | {"captured": captured, "error": error, "norm": norm}
        sums = FigureSums()
        for part in np.split(np.stack([rows[name] for name in FIGURES], 1), 4):
            sums.add(part)
        found = FigureSums.of([sums, FigureSums()]).figures()
        covered += [
            abs(found["captured"] - 0.7) <= found["captured_margin"],
            abs(found["error"] - 0.1) <= found["error_margin"],
        ]
    assert (np.abs(covered / draws - 0.95) < 0.02).all()


def test_a_budget_that_no_model_can_have_is_refused_before_the_trial_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = base()
    monkeypatch.setattr(type(model), "forward", None)  # would be called
    for budget in (0, -0.5, 1.5):
        with pytest.raises(ValueError, match=r"budget|size"):
            prune(model, budget)


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """The names of the operations that torch computes meanwhile."""

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names = [*getattr(self, "names", []), operation.name()]
        return operation(*args, **(kwargs or {}))


def test_a_mask_that_is_what_the_layer_expects_is_compared_with_nothing_else() -> None:
    full = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    for mask, expected, causal in ((full, False, False), (full.tril(), True, True), (full, True, False)):
        with Operations() as computed:
            assert padding_and_kind("a layer", mask, 6, 6, expected) == (None, causal)
        assert ("aten::arange" in computed.names) == expected  # of a causal mask
        assert computed.names.count("aten::eq.Tensor") == (1 if expected == causal else 2)
    with pytest.raises(ValueError, match="neither full nor causal with padding"):
        padding_and_kind("a layer", full.triu(), 6, 6, True)


def test_keys_of_another_sequence_are_refused() -> None:
    model = pruned(base())
    attention = model.model.layers[0].self_attn
    q = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match="LlamaAttention 0 has 3 queries and 5 keys; expected 3 keys"):
        _attention(attention, q, torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), None)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_slots_go_where_each_layer_computes(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = base(family), tmp_path / "context"
    cache = compress(model, tokens(1, CONTEXT), {(1, 1): 0.5})
    cache.ask(model, QUESTION, **GREEDY)
    cache.save(file)
    block = model.model.layers[1].to("meta")  # as if accelerate brought its weights to a device
    block.self_attn.k_proj._hf_hook = SimpleNamespace(execution_device="meta")
    monkeypatch.setattr(Origin, "check_file", lambda *_: None)  # the weights are gone
    loaded = CompressedCache.load(file, model)
    assert loaded.tokens.device.type == "cpu"
    for number, layer in enumerate(loaded.layers):
        arrays = [layer.keys, layer.values] if layer.is_sliding else list(layer.tail.arrays)
        for group in () if layer.is_sliding else layer.groups:
            arrays += [group.keys, group.values, group.places]
        assert {array.device.type for array in arrays} == {"meta" if number == 1 else "cpu"}


def _on_one_thread(body: Any, n: int, *, threads: int | None = None) -> None:
    assert threads == 1
    for i in range(n):
        body(i)


def _numbers(array: Any) -> Any:
    return np.zeros(0) if array is None else (array.opened() if hasattr(array, "opened") else array).double().numpy()


@pytest.mark.parametrize(
    ("selection", "options"),
    [
        (0.3, {}),
        ({(0, 0): 9, (0, 1): 9, (1, 1): 0.4}, {"bits": 4}),
        (Selection(0.4, summaries=0.2), {"references": "none", "bits": 8}),
        (Selection(12, scores=lambda K, _: K.abs().sum(-1)), {"chunk": 30}),
    ],
    ids=["share", "heads of two layers", "summaries", "scores and chunks"],
)
def test_heads_in_one_batch_keep_what_they_keep_apart(
    selection: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device keeps heads that are alike in one batch, on one thread; main memory keeps them side by side."""
    model, ids = base().double(), tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    apart = compress(model, given, selection, **options)
    monkeypatch.setattr(compression, "_in_batches", lambda _: True)
    monkeypatch.setattr(compression, "side_by_side", _on_one_thread)
    together = compress(model, given, selection, **options)
    for one, other in zip(apart.layers, together.layers, strict=True):
        for first, second in zip(one.groups, other.groups, strict=True):
            assert torch.equal(first.places, second.places)
            assert first.heads == second.heads
            for name in ("keys", "values", "log_weight"):
                np.testing.assert_allclose(_numbers(getattr(first, name)), _numbers(getattr(second, name)), atol=1e-9)
    for one, other in zip(apart.table(), together.table(), strict=True):
        assert one == pytest.approx(other, abs=1e-9)


@both
def test_a_change_that_is_interrupted_is_undone(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = base().train()
    before = looks(model)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(model.model.layers[1].self_attn, "register_forward_hook", interrupt)
        with pytest.raises(KeyboardInterrupt):
            change(model, form)
    assert looks(model) == before
    assert torch.isfinite(output(change(model, form))).all()


@both
@pytest.mark.parametrize("method", ["__setattr__", "__delattr__"])
def test_a_change_and_its_removal_can_be_interrupted_at_each_attribute(
    method: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own, interrupted = base().train(), getattr(torch.nn.Module, method), 0
    before = looks(model)
    for number in range(100):
        left = number

        def counted(module: Any, name: str, *value: Any) -> None:
            nonlocal left
            left -= name == RECORD or (hasattr(model, RECORD) and name in (PART, EXTENSION, "config"))
            if left == -1:
                left = -2
                raise KeyboardInterrupt
            own(module, name, *value)

        with monkeypatch.context() as patched:
            patched.setattr(torch.nn.Module, method, counted)
            try:
                change(model, form)
                remove(model)
            except KeyboardInterrupt:
                interrupted += 1
        if hasattr(model, RECORD):
            remove(model)
        assert looks(model) == before
        if left >= 0:
            break
    assert interrupted == number > 2


# -- queries at other positions -----------------------------------------------------------------------------

TURNING: dict[str, dict[str, Any]] = {  # halves, parts of them, neighbors, layers without any, norms of queries
    "Llama": {},
    "GPTNeoX": {},
    "Phi": {"partial_rotary_factor": 0.5},
    "Cohere": {"num_key_value_heads": 2},
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 96},
    "SmolLM3": {"num_key_value_heads": 2, "no_rope_layer_interval": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 8},
}


@pytest.mark.parametrize("family", TURNING)
def test_queries_of_families_are_moved_as_their_models_turn_them(family: str) -> None:
    """A token that is read alone has the same queries at all positions, but for its turn."""
    model = base(family, **TURNING[family])
    layers = _empty_layers(model)
    seen: dict[int, list[Any]] = {}
    with torch.no_grad():
        turns = rotations(model, layers, Origin(model), 90)
        for layer in layers:
            layer.look = lambda number, q, *_: seen.setdefault(number, []).append(q)
        for place in (0, 3, 37, 90):
            cache = CompressedCache(
                _looking(layers), torch.tensor([[7]]), torch.ones(1, 1, dtype=torch.bool), Origin(model)
            )
            model.base_model(
                torch.tensor([[7]]), position_ids=torch.tensor([[place]]), use_cache=True, **{CACHE: cache}
            )
    for number, (first, *others) in seen.items():
        for place, other in zip((3, 37, 90), others, strict=True):
            moved = turns[number].moved(first, torch.tensor([place]))
            assert difference(moved, other) < 1e-4 * float(other.abs().max())
    turning = [float(turn.angles.abs().max()) for turn in turns.values()]
    assert max(turning) == pytest.approx(1, rel=1e-3)
    if family == "SmolLM3":
        assert min(turning) < 1e-6


def test_turns_of_all_layers_are_measured_at_once() -> None:
    """On a device each function of torch takes as long for few numbers as for many."""

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), options: Any = None) -> Any:
            called[function.overloadpacket.__name__] += 1
            return function(*args, **(options or {}))

    figures = []
    for count in (2, 5):
        called: Counter[str] = Counter()
        model = base("Llama", num_hidden_layers=count)
        with torch.no_grad(), Counted():
            turns = rotations(model, _empty_layers(model), Origin(model), 90)
        assert sorted(turns) == list(range(count))
        figures.append((called["angle"], called["remainder"], called["complex"]))
    assert figures[0] == figures[1]
    assert figures[0][0] == 1


def _looking(layers: Any) -> Any:
    found = []
    for layer in layers:
        found.append(CompressedLayer(layer.number))
        found[-1].look = layer.look
    return found


def test_a_profile_cuts_to_a_share_of_the_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches of the trials hold numbers in the dtype of the model, and so the share of the positions."""
    made: list[Any] = []

    def noted(*args: Any, **how: Any) -> Any:
        made.append(compress(*args, **how))
        return made[-1]

    monkeypatch.setattr("levattn.integrations.transformers.compression.trials.compress", noted)
    levattn_profile(base(max_position_embeddings=512), texts=["the quick brown fox " * 20] * 2, rounds=1)
    rows = [row for cache in made for row in cache.table()]
    assert {row["bits"] for row in rows} == {16}
    assert 14 <= min(row["slots"] for row in rows if row["slots"] > 1) <= 256 // 16  # weights take some of the bytes


def test_costs_of_reading_are_rises_of_the_loss_of_a_model_with_a_pruned_head() -> None:
    """Inside: trials begin at the layer of the head; here the model reads anew, and the losses are as defined.

    The other heads have shares of their own. A head that was cut is made whole, and the curves turn the gain into the
    cost of a cut to a sixteenth.
    """
    model, rng, n = base(max_position_embeddings=400), np.random.default_rng(0), 300
    whole = rng.integers(0, model.config.vocab_size, n + 40)
    counted = np.arange(40) % 5 > 2
    shares = {(0, 0): 0.2, (0, 1): 1.0, (1, 0): 1.0, (1, 1): 0.5}
    with torch.no_grad():
        trial = ReadingTrial(model, list(shares), 1 / 16, whole[:n], (whole[n:], counted), (whole[:5], counted[:5]))
        found = trial.costs(shares, lambda _: None)

    def losses(given: dict[tuple[int, int], float]) -> Any:
        cut: Any = {head: share for head, share in given.items() if share < 1}
        with prune(model, cut, measure=False) if cut else contextlib.nullcontext():
            log_p = model(torch.tensor(whole[None])).logits[0].log_softmax(-1).numpy()
        answers = np.flatnonzero(counted) + n
        text = np.arange(n // 2, n - 1, 4)
        return -log_p[answers - 1, whole[answers]].mean(), log_p[text]

    with torch.no_grad():
        dense = np.exp(losses({})[1])
        recall, text = losses(shares)
        for (head, kept), cost in zip(shares.items(), found, strict=True):
            other = losses(shares | {head: 1 / 16 if kept == 1 else 1.0})
            rise = np.array([other[0] - recall, -(dense * (other[1] - text)).sum(1).mean()])
            if kept < 1:
                rise *= -np.array([(1 - 2**-0.5) / (1 - kept**0.125), (15 / (1 / kept - 1)) ** 1.5])
            np.testing.assert_allclose(cost, rise, rtol=1e-3, atol=1e-5)


def test_the_time_of_a_long_profile_is_told_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A clock that runs fast stands for a slow model."""
    clock = iter(range(0, 10**6, 300))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    texts = ["the quick brown fox jumps over the dog " * 10] * 2
    with caplog.at_level("INFO", "levattn"):
        levattn_profile(base(max_position_embeddings=512), texts=texts, rounds=1)
    assert "measuring the heads takes about 20 minutes: 8 steps of 1.5e+02 seconds" in caplog.text


def test_the_attention_of_all_queries_is_summed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    Q, K = (torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)) for shape in ((3, 50, 8), (50, 8)))
    whole = rules.scores_of("h2o", Q, K, K, None)
    sizes, attention = [], rules._attention

    def noted(*given: Any) -> Any:
        found = attention(*given)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(rules, "_LOGITS", 1000)
    monkeypatch.setattr(rules, "_attention", noted)
    torch.testing.assert_close(rules.scores_of("h2o", Q, K, K, None), whole)
    assert max(sizes) <= 1000
    assert len(sizes) == 17


def test_files_hold_the_fingerprint_of_a_packed_model() -> None:
    def model(seed: int) -> Any:
        torch.manual_seed(seed)
        return base()

    packed = model(1)
    for module in packed.model.modules():
        if isinstance(module, torch.nn.Linear):
            weight = torch.zeros(module.weight.shape, dtype=torch.int8)
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
    again = Fingerprint.from_dict(Fingerprint.of(packed).to_dict())
    assert again.fits(Fingerprint.of(packed))
    assert again.fits(Fingerprint.of(model(1)))
    assert not again.fits(Fingerprint.of(model(2)))


def test_profiles_of_the_folder_go_before_those_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, library = base(), tmp_path / "library"
    (library / "data" / "profiles").mkdir(parents=True)
    monkeypatch.setattr("levattn.integrations.transformers.compression.profile.files", lambda _: library)
    for cost, file in ((7.0, library / "data" / "profiles" / "aaa.json"), (3.0, tmp_path / "mine.json")):
        row = {"layer": 0, "head": 0, "recall": cost, "recall_error": None, "text": 0.0, "text_error": None}
        HeadProfile([row], "LlamaForCausalLM", 1 / 16, Fingerprint.of(model)).save(file)
    assert HeadProfile.find(model, tmp_path)[0, 0] == 3.0
    (tmp_path / "mine.json").unlink()
    assert HeadProfile.find(model, tmp_path)[0, 0] == 7.0


def test_what_was_found_of_a_mask_is_found_again_where_it_changed() -> None:
    asked: list[str] = []

    def found(mask: Any, key: str, rows: int = 1) -> Any:
        return once_a_step(mask, rows, key, lambda: asked.append(key) or bool(mask.all()))

    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    assert [found(mask, "a"), found(mask, "a"), found(mask, "b"), found(mask, "a")] == [True] * 4
    assert asked == ["a", "b"]
    mask[0, 0, 0, 3] = False
    assert not found(mask, "a")
    assert found(torch.ones_like(mask), "a")
    assert not found(mask, "a")
    assert asked == ["a", "b", "a", "a", "a"]
    with torch.inference_mode():
        other = torch.ones(2, 1, 1, 9, dtype=torch.bool)
        assert found(other, "c")
        other[0, 0, 0, 0] = False
        assert not found(other, "c")  # its changes are not counted
    assert not found(mask, "d", rows=2)
    mask[:] = True
    assert found(mask, "d", rows=2)


@pytest.mark.parametrize("feature", [None, "conv", "rg_lru"])
def test_padding_reaches_no_gradient_of_the_logits_of_latents(feature: str | None) -> None:
    hidden = torch.randn(2, 7, 12)
    layer = SimpleNamespace(query=torch.zeros(2, 4, 7, 3), heads=2, call=SimpleNamespace(hidden=hidden))
    logits = LatentLogits(layer, latents=3, window=4, overlap="mixture", delta=0.1, feature=feature)
    present = torch.ones(2, 7, dtype=torch.bool)
    present[0, :3] = False

    def gradients(filling: float) -> Any:
        found = logits(torch.where(present[..., None], hidden, filling), present, None)[:3]
        q_logits, k_logits, gate = (x[..., present[0], :] if x.ndim == 4 else x[..., present[0]] for x in found)
        total = q_logits.square().sum() + k_logits.square().sum() + gate.square().sum()
        return torch.autograd.grad(total, list(logits.parameters()), allow_unused=True)

    for found, expected in zip(gradients(torch.nan), gradients(0.0), strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)
