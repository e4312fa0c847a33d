"""Compressed caches that compress what comes after the context as well."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import CACHE, base, difference, of_heads, tokens  # noqa: E402

from levattn.attention import Selection  # noqa: E402
from levattn.integrations.transformers import CompressedCache, compress  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT, TURN = 40, 9
CUT = {(0, 0): 0.4, (1, 1): 0.5}
GREEDY = {"max_new_tokens": TURN, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def question(turn: int, batch: int = 1) -> Any:
    return ((torch.tensor([[3, 14, 15]]) * (turn + 1)) % 40).expand(batch, -1)


def logits(cache: Any, model: Any, turn: int, batch: int = 1) -> Any:
    asked = cache.ask(model, question(turn, batch), output_logits=True, return_dict_in_generate=True, **GREEDY)
    return torch.stack(asked.logits, 1)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@pytest.mark.parametrize("every", [1, 5, 30])
def test_whole_heads_answer_as_a_dense_cache_whatever_is_renewed(family: str, every: int) -> None:
    model = base(family)
    cache, told = compress(model, tokens(1, CONTEXT), Selection(1.0, renew_every=every)), tokens(1, CONTEXT)
    for turn in range(3):
        told = torch.cat([told, question(turn)], 1)
        dense = model.generate(told, **GREEDY)
        assert torch.equal(cache.ask(model, question(turn), **GREEDY), dense[:, told.shape[1] - 3 :])
        told = dense
    full = [layer for layer in cache.layers if not layer.is_sliding]
    assert all(layer.tail.length <= max(every, 3) for layer in full)


@pytest.mark.parametrize("every", [4, 11])
def test_keys_that_are_alike_lose_nothing(every: int) -> None:
    model = base().double()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.zero_()  # so attention is the mean of all values
    dense = compress(model, tokens(1, CONTEXT), 1.0)
    cut = compress(
        model,
        tokens(1, CONTEXT),
        of_heads({(i, j): 0.3 for i in (0, 1) for j in (0, 1)}, renew_every=every),
        bits=16,
    )
    for turn in range(3):
        assert (
            difference(logits(cut, model, turn), logits(dense, model, turn)) < 1e-5
        )  # weights are logarithms in float32
    for layer in cut.layers:
        for group in layer.groups:
            assert torch.allclose(group.log_weight.exp().sum(-1), torch.tensor(float(layer.length)))


def test_a_head_that_is_cut_keeps_its_number_of_slots() -> None:
    model = base()
    cache = compress(model, tokens(1, CONTEXT), of_heads(CUT, renew_every=8))

    def slots() -> dict[tuple[int, int], int]:
        return {(row["layer"], row["head"]): row["slots"] for row in cache.table()}

    before = slots()
    for turn in range(4):
        cache.ask(model, question(turn), **GREEDY)
    held = cache.get_seq_length() - cache.layers[0].tail.length
    assert held > CONTEXT
    for head, after in slots().items():
        least, most = (0.8 * before[head], before[head]) if head in CUT else (held, held)  # a cluster may be empty
        assert least <= after <= most
    places = next(group.places for group in cache.layers[0].groups if 0 in group.heads)[0, 0]
    kept = places[places >= 0].tolist()
    assert len(set(kept)) == len(kept)
    assert {0, 1, 2, 3, held - 1} <= set(kept)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_padded_batch_equal_rows_alone(side: str) -> None:
    model, ids, missing = base().double(), tokens(2, CONTEXT), 7
    mask = torch.ones_like(ids)
    mask[1, slice(0, missing) if side == "left" else slice(CONTEXT - missing, CONTEXT)] = 0
    both = compress(model, {"input_ids": ids, "attention_mask": mask}, Selection(1.0, renew_every=6))
    rows = [row[None][:, there.bool()] for row, there in zip(ids, mask, strict=True)]
    alone = [compress(model, row, Selection(1.0, renew_every=6)) for row in rows]
    for turn in range(3):
        found = logits(both, model, turn, 2)
        for row, cache in enumerate(alone):
            assert difference(found[row : row + 1], logits(cache, model, turn)) < 1e-12


def test_rows_and_copies_go_their_own_way() -> None:
    model = base().double()
    first, second = tokens(2, CONTEXT)[:1], tokens(2, CONTEXT)[1:]
    both = compress(model, torch.cat([first, second]), of_heads(CUT, renew_every=6))
    alone = compress(
        model, torch.cat([second, second]), of_heads(CUT, renew_every=6)
    )  # batches renew between questions
    assert difference(logits(both, model, 0, 2)[1:], logits(alone, model, 0, 2)[1:]) < 1e-12
    fork = both.copy()
    fork.batch_select_indices(torch.tensor([1]))
    fork.batch_repeat_interleave(2)
    expected = logits(alone.copy(), model, 1, 2)[1:]
    for row in logits(fork, model, 1, 2):
        assert difference(row[None], expected) < 1e-12
    assert difference(logits(both, model, 1, 2)[1:], expected) < 1e-12


def test_what_was_renewed_is_not_forgotten() -> None:
    model = base()
    cache = compress(model, tokens(1, CONTEXT), of_heads(CUT, renew_every=5))
    cache.ask(model, question(0), **GREEDY)
    kept = max(layer.length for layer in cache.layers)
    with pytest.raises(ValueError, match=f"expected to keep at least the {kept} positions"):
        cache.crop(CONTEXT)
    with pytest.raises(ValueError, match="has renewed its slots"):
        cache.reset()
    with pytest.raises(ValueError, match="renew_every is 0"):
        compress(model, tokens(1, CONTEXT), of_heads(CUT, renew_every=0))


def test_gradients_keep_what_they_read() -> None:
    model = base()
    cache = compress(model, tokens(1, CONTEXT), of_heads(CUT, renew_every=2))
    total = sum(model(question(turn), **{CACHE: cache}).logits.sum() for turn in range(3))
    total.backward()
    assert cache.layers[0].length == CONTEXT
    assert all(weight.grad is not None for weight in model.parameters())


def test_slots_of_short_sequences_and_of_uneven_heads_hold_every_position_once() -> None:
    model, ids = base(max_position_embeddings=400).double(), tokens(2, 200)
    mask = torch.ones_like(ids)
    mask[1, :180] = 0
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.zero_()  # so the weights of summaries are numbers of positions
    cut = {(0, 0): 0.5, (1, 1): 0.5}
    uneven = compress(
        model, tokens(1, 170), of_heads({(i, j): 0.3 for i in (0, 1) for j in (0, 1)}, renew_every=6), chunk=40
    )
    for cache, batch in (
        (compress(model, {"input_ids": ids, "attention_mask": mask}, of_heads(cut, renew_every=6)), 2),
        (uneven, 1),
    ):
        for turn in range(3):
            cache.ask(model, question(turn, batch), **GREEDY)
        for layer in cache.layers:
            for group in layer.groups:
                held = torch.ones_like(group.places, dtype=torch.float64)
                held = held if group.log_weight is None else group.log_weight.double().exp()
                assert torch.allclose(held.sum(2), layer.present.sum(1).double()[:, None])


@pytest.mark.parametrize("every", [2, 5, 8])
def test_rows_that_end_early_go_on_as_alone(every: int) -> None:
    model, ids = base().double(), tokens(2, CONTEXT)
    first = model.generate(torch.cat([ids, question(0, 2)], 1), **GREEDY)[:, CONTEXT + 3 :]
    end = int(first[1, 1])  # the second row ends with it, before the first row does
    options = {**GREEDY, "eos_token_id": end}
    both = compress(model, ids, Selection(1.0, renew_every=every))
    alone = [compress(model, row[None], 1.0) for row in ids]
    for turn in range(3):
        found = both.ask(model, question(turn, 2), output_logits=True, return_dict_in_generate=True, **options)
        for row, cache in enumerate(alone):
            own = cache.ask(model, question(turn), output_logits=True, return_dict_in_generate=True, **options)
            steps = len(own.logits)
            assert difference(torch.stack(found.logits[:steps], 1)[row : row + 1], torch.stack(own.logits, 1)) < 1e-11


@pytest.mark.parametrize("cut", [1, 4])
def test_positions_may_be_forgotten_before_slots_are_renewed(cut: int) -> None:
    model = base().double()
    asked = torch.cat([torch.zeros(1, 6, dtype=torch.int64), question(0)], 1)
    mask = (torch.arange(9) > 5)[None].long()
    cache, dense = (compress(model, tokens(1, CONTEXT), Selection(1.0, renew_every=every)) for every in (8, None))
    for held in (cache, dense):
        held.ask(model, {"input_ids": asked, "attention_mask": mask}, max_new_tokens=1, do_sample=False)
        held.crop(-cut)
    assert difference(logits(cache, model, 1), logits(dense, model, 1)) < 1e-11


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("turns", [0, 1, 3])
@pytest.mark.parametrize("cut", [0, 2])
def test_a_file_of_a_cache_that_renews_goes_on_as_the_cache(
    family: str, batch: int, turns: int, cut: int, tmp_path: Any
) -> None:
    pytest.importorskip("safetensors")
    if cut and (not turns or family == "Gemma3"):
        pytest.skip("the context cannot be shortened, and layers that slide have dropped what was before")
    model, ids = base(family), tokens(batch, CONTEXT)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    budget = {(1, 1): 0.5} if family == "Gemma3" else CUT
    cache = compress(model, {"input_ids": ids, "attention_mask": mask}, of_heads(budget, renew_every=5))
    asked = {"input_ids": question(0, batch), "attention_mask": torch.ones(batch, 3)}
    if family != "Gemma3":  # whose windows take no padding after tokens
        asked["attention_mask"][0, 0] = 0
    for _ in range(turns):
        cache.ask(model, asked, **GREEDY)
    assert (cache.layers[1].length > CONTEXT) == (turns > batch - 1)  # a batch renews before the next question
    if cut > cache.get_seq_length() - cache.layers[1].length:
        pytest.skip("slots already hold what would be cut")
    cache.crop(-cut)
    cache.save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", model)
    assert loaded.table() == cache.table()
    assert loaded.context_length == CONTEXT
    assert torch.equal(loaded.present, cache.present)
    for turn in range(3):
        assert torch.equal(logits(loaded, model, turn, batch), logits(cache, model, turn, batch))
    assert loaded.layers[1].length == cache.layers[1].length > CONTEXT
    assert torch.equal(loaded.tokens, cache.tokens)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_asks_for_nothing_when_heads_are_cut(side: str) -> None:
    model, ids, missing = base().double(), tokens(2, CONTEXT), 7
    mask = torch.ones_like(ids)
    mask[1, slice(0, missing) if side == "left" else slice(CONTEXT - missing, CONTEXT)] = 0
    asked, there = torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64)
    asked[:, 2:], there[1, :2] = question(0, 2), 0
    asked[0, :2] = 8
    both = compress(model, {"input_ids": ids, "attention_mask": mask}, of_heads(CUT, renew_every=4))
    alone = compress(
        model, ids[1:, mask[1].bool()].expand(2, -1), of_heads(CUT, renew_every=4)
    )  # a batch renews alike
    both.ask(model, {"input_ids": asked, "attention_mask": there}, **GREEDY)
    alone.ask(model, question(0, 2), **GREEDY)
    for turn in (1, 2):
        assert difference(logits(both, model, turn, 2)[1:], logits(alone, model, turn, 2)[1:]) < 1e-12
    assert all(layer.length > CONTEXT for layer in both.layers)


@pytest.mark.parametrize("forget", ["crop", "crop a part", "reset", "select", "copy"])
@pytest.mark.parametrize("renewed", [False, True])
def test_queries_that_are_forgotten_choose_no_slots(forget: str, renewed: bool) -> None:
    if forget == "reset" and renewed:
        pytest.skip("the context is no longer there alone")
    model, more = base().double(), torch.tensor([[30, 31, 32, 33]])
    how = of_heads(CUT, renew_every=12)
    one, other = (compress(model, tokens(2, CONTEXT), how, bits=16) for _ in range(2))  # rounding may change a code
    for cache in (one, other):
        cache.batch_select_indices(torch.tensor([1]))
        if renewed:
            cache.ask(model, torch.cat([question(0)] * 4, 1), **GREEDY)
            cache.ask(model, question(1), max_new_tokens=1, do_sample=False)
            assert cache.layers[0].length > CONTEXT
    forgotten = {"crop": -4, "crop a part": -2}
    with torch.no_grad():
        model(more[:, : 4 + forgotten.get(forget, -4)], **{CACHE: other}) if forget == "crop a part" else None
        if forget == "copy":
            model(more, **{CACHE: one.copy()})
        elif forget == "select":
            one.batch_repeat_interleave(2)
            model(torch.cat([more, more + 1]), **{CACHE: one})
            one.batch_select_indices(torch.tensor([0]))
            one.crop(-4)
        else:
            model(more, **{CACHE: one})
            one.reset() if forget == "reset" else one.crop(forgotten[forget])
        for turn in range(7):
            found, expected = (model(question(turn), **{CACHE: cache}).logits for cache in (one, other))
            assert difference(found, expected) < 1e-11
    assert one.layers[0].length == other.layers[0].length > CONTEXT


def test_bytes_are_those_of_moments_and_queries_too() -> None:
    model = base()
    plain, cache = (compress(model, tokens(1, CONTEXT), of_heads(CUT, renew_every=every)) for every in (None, 20))
    d = model.config.hidden_size // model.config.num_attention_heads
    moments = len(cache.layers) * 2 * (d * d + 2 * d) * 8  # of two heads, and of their keys the means, in float64
    assert cache.nbytes == plain.nbytes + moments
    for held in (plain, cache):
        held.ask(model, question(0), max_new_tokens=1, do_sample=False)
    queries = len(cache.layers) * 3 * model.config.hidden_size * 4
    assert plain.nbytes + moments + queries <= cache.nbytes <= plain.nbytes + moments + 2 * queries  # room for more


def test_a_call_that_fails_before_it_asks_does_not_keep_slots_from_being_renewed() -> None:
    model = base(num_hidden_layers=1)
    cache = compress(model, tokens(1, CONTEXT), of_heads({(0, 0): 0.4}, renew_every=6))
    with torch.no_grad():
        model(question(0), **{CACHE: cache})
    for turn in range(3):
        with pytest.raises(ValueError, match="not causal"), torch.no_grad():
            model(question(0), attention_mask=torch.zeros(1, 1, 3, CONTEXT + 6 + 6 * turn), **{CACHE: cache})
        with torch.no_grad():
            assert model(question(1), **{CACHE: cache}).logits.isfinite().all()
    assert cache.layers[0].length > CONTEXT


def test_a_cache_whose_last_call_failed_before_it_asked_can_be_saved(tmp_path: Any) -> None:
    pytest.importorskip("safetensors")
    model = base(num_hidden_layers=1)
    cache = compress(model, tokens(2, CONTEXT), of_heads({(0, 0): 0.4}, renew_every=6))
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    cache.ask(model, {"input_ids": question(0, 2), "attention_mask": mask}, **GREEDY)
    with pytest.raises(ValueError, match="not causal"), torch.no_grad():
        model(question(1, 2), attention_mask=torch.zeros(2, 1, 3, cache.get_seq_length() + 3), **{CACHE: cache})
    cache.save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", model)
    for turn in range(2):
        assert torch.equal(logits(loaded, model, turn, 2), logits(cache, model, turn, 2))
