"""Contexts in few bits: bytes, slots and errors of codes, in batches, chunks, files and conversations."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import CACHE, base, difference, of_heads, tokens  # noqa: E402

from levattn.attention import Selection  # noqa: E402
from levattn.exceptions import RecallWarning  # noqa: E402
from levattn.integrations.transformers import CompressedCache, HeadProfile, compress  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

N = 60
CUT = {(0, 0): 0.2, (1, 1): 0.4}
WIDE = {"hidden_size": 256, "initializer_range": 0.1}  # heads of 64 columns, so that scales are small beside codes
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
LOGITS = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
BITS = [4, 8]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def logits(model: Any, cache: Any) -> Any:
    return torch.stack(cache.ask(model, torch.tensor([[3, 14, 15]]).expand(len(cache.tokens), -1), **LOGITS).logits, 1)


def group_of(cache: Any, layer: int, head: int) -> Any:
    return next(group for group in cache.layers[layer].groups if head in group.heads).of_heads((head,))


def slots_of(cache: Any) -> dict[tuple[int, int], float]:
    return {(row["layer"], row["head"]): row["slots"] for row in cache.table()}


def residuals(cache: Any) -> dict[tuple[int, int], float]:
    return {(row["layer"], row["head"]): row["residual"] for row in cache.table() if "residual" in row}


@pytest.mark.parametrize("references", ["own", "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_share_is_of_the_bytes_of_16_bits_and_codes_take_more_slots(dtype: str, references: str) -> None:
    model, ids = base(**WIDE).to(getattr(torch, dtype)), tokens(1, N)
    position = 2 * 64 * 2  # bytes of a key and a value of 64 numbers
    before: dict[tuple[int, int], float] = {}
    for bits, more in ((16, 1.0), (8, 1.6), (4, 1.5)):
        cache = compress(model, ids, CUT, references=references, bits=bits)
        slots = slots_of(cache)
        assert slots[0, 1] == slots[1, 0] == N
        for head, share in CUT.items():
            group = group_of(cache, *head)
            assert group.bits == bits
            if bits < 16:
                assert group.nbytes <= share * N * position
                assert group.nbytes > 0.8 * share * N * position or slots[head] == N
            assert slots[head] >= min(N, more * before.get(head, 0.0) - 1)
        before = slots


@pytest.mark.parametrize("bits", BITS)
def test_entries_err_by_half_a_step_and_all_positions_fit_below_the_whole_budget(bits: int) -> None:
    model, ids = base(**WIDE), tokens(1, N)
    with torch.no_grad():
        for layer in model.model.layers:  # keys that share a large offset, as biases give them to some models
            layer.self_attn.k_proj.bias = torch.nn.Parameter(torch.zeros(128))
            layer.self_attn.k_proj.bias[31] = 90.0
    dense = compress(model, ids, 1.0)
    held = compress(model, ids, {(0, 0): 0.6, (1, 0): 0.6}, bits=bits)
    assert slots_of(held)[0, 0] == N
    for layer in (0, 1):
        group, whole = group_of(held, layer, 0), group_of(dense, layer, 0)
        assert group.log_weight is None
        for name in ("keys", "values"):
            rows, exact = getattr(group, name), getattr(whole, name)
            found, columns, means = rows.opened(), torch.ones(64), torch.zeros(64)
            if name == "keys":
                columns = torch.exp2(rows.sizes.float() / 8)
                means = rows.means.float() * columns**2
            moved = (exact - means) / columns
            blocks = moved.unflatten(-1, (2 if bits == 4 else 1, -1))
            step = blocks.amax(-1) - blocks.amin(-1)
            room = 0.5 * (step + 2**-7 * (step + blocks.abs().amax(-1))) / (2**bits - 1)
            errors = ((found - exact) / columns).unflatten(-1, (2 if bits == 4 else 1, -1)).abs().amax(-1)
            assert (errors <= room + 1e-4 * blocks.abs().amax(-1) / 2**bits).all()
            assert difference(found, exact) <= 1.02 / (2**bits - 1) * float((exact - means).abs().max())
    assert residuals(held)[0, 0] < (0.2 if bits == 4 else 0.02)


@pytest.mark.parametrize("bits", BITS)
def test_padded_batches_equal_their_sequences_alone(bits: int) -> None:
    model, ids = base(), tokens(2, N)
    present = torch.ones_like(ids)
    present[1, :17] = 0
    both = compress(model, {"input_ids": ids, "attention_mask": present}, CUT, bits=bits)
    for row, first in ((0, 0), (1, 17)):
        alone = compress(model, ids[row : row + 1, first:], CUT, bits=bits)
        assert difference(logits(model, both.copy())[row : row + 1], logits(model, alone)) < 1e-3


@pytest.mark.parametrize("bits", BITS)
def test_files_forks_rows_and_gradients(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model, ids = base(), tokens(2, N)
    cache = compress(model, ids, CUT, bits=bits)
    cache.save(tmp_path / "context")
    again = CompressedCache.load(tmp_path / "context", model)
    answers = logits(model, cache.copy())
    assert again.nbytes == cache.nbytes
    assert torch.equal(logits(model, again), answers)
    picked = cache.copy()
    picked.batch_select_indices(torch.tensor([1]))
    assert difference(logits(model, picked), answers[1:]) < 1e-5
    soft = model.get_input_embeddings()(torch.tensor([[3, 4]] * 2)).detach().requires_grad_()
    model(inputs_embeds=soft, **{CACHE: cache.copy()}).logits.sum().backward()
    assert float(soft.grad.abs().min()) > 0


def test_more_bits_and_more_slots_err_less() -> None:
    model, ids = base(**WIDE), tokens(1, N)
    dense = logits(model, compress(model, ids, 1.0))[:, 0]  # of the first token: later ones may follow others

    def error(bits: int, share: float) -> float:
        cache = compress(model, ids, {(layer, head): share for layer in (0, 1) for head in (0, 1)}, bits=bits)
        return float((logits(model, cache)[:, 0] - dense).norm() / dense.norm())

    errors = {(bits, share): error(bits, share) for bits in (4, 8, 16) for share in (0.25, 0.99)}
    assert errors[8, 0.99] < errors[4, 0.99]
    assert errors[8, 0.99] < 0.1 * errors[16, 0.25]
    assert errors[8, 0.25] < errors[16, 0.25]


def test_slots_are_fitted_to_the_keys_as_they_are_held() -> None:
    model, ids = base(**WIDE), tokens(1, N)
    errors = {bits: residuals(compress(model, ids, dict.fromkeys(CUT, 20), bits=bits)) for bits in (4, 8, 16)}
    for head in CUT:
        assert errors[8][head] == pytest.approx(errors[16][head], rel=0.05)
        assert errors[16][head] != errors[8][head]
        assert errors[4][head] < 1.5 * errors[16][head]


@pytest.mark.parametrize("bits", BITS)
def test_chunks_are_coded_when_the_context_ends(bits: int) -> None:
    model, ids = base(), tokens(1, N)
    parts = compress(model, ids, CUT, chunk=20, bits=bits)
    exact = compress(model, ids, dict.fromkeys(CUT, 20), chunk=20, bits=16)
    coded = compress(model, ids, dict.fromkeys(CUT, 20), chunk=20, bits=bits)
    assert torch.isfinite(logits(model, parts)).all()
    for head in CUT:  # the model read the same slots
        here, there = group_of(coded, *head), group_of(exact, *head)
        assert torch.equal(here.places, there.places)
        assert difference(here.opened().keys, there.keys) < 0.1 * float(there.keys.abs().max())


@pytest.mark.parametrize("bits", BITS)
def test_a_conversation_that_renews_its_slots_keeps_their_bits(bits: int) -> None:
    model, ids = base(), tokens(1, N)
    cache = compress(model, ids, of_heads(CUT, renew_every=8), bits=bits)
    for _ in range(4):
        cache.ask(model, torch.tensor([[3, 14, 15]]), **GREEDY)
    assert cache.layers[0].length > N
    for head in CUT:
        assert group_of(cache, *head).bits == bits
    assert group_of(cache, 0, 1).bits == 16
    assert torch.isfinite(logits(model, cache)).all()


def test_a_profile_splits_positions_and_the_budget_holds() -> None:
    model, ids = base(**WIDE), tokens(1, 90)
    figures = {"recall_error": 0.1, "text": 0.1, "text_error": 0.1}
    costs = {(0, 0): 0.01, (0, 1): 2.0, (1, 0): 0.2, (1, 1): 0.0}
    rows = [{"layer": layer, "head": head, "recall": cost, **figures} for (layer, head), cost in costs.items()]
    profile = HeadProfile(rows, "LlamaForCausalLM", 1 / 16)
    dense = 90 * 4 * 2 * 64 * 2
    for bits in (4, 8):
        for budget in (0.1, 0.3, 0.6, 0.99):
            cache = compress(model, ids, budget, heads=profile, bits=bits)
            slots = slots_of(cache)
            columns = sum(slots[head] == 90 for head in slots) * 3 * 64  # two numbers for each
            assert cache.nbytes - columns <= budget * dense
            assert slots[0, 1] == 90 or budget == 0.1
            assert slots[0, 1] >= slots[1, 0] >= slots[1, 1]
    exact = compress(model, ids, 1.0, heads=profile)
    assert {group.bits for layer in exact.layers for group in layer.groups} == {16}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("offset", "noise"), [(0.1, 0.0), (94.5, 0.0), (1000.0, 1e-4), (-3e4, 1.0), (1e-3, 1e-9)])
def test_columns_that_hardly_change_spoil_no_other(bits: int, offset: float, noise: float) -> None:
    model, ids = base("GPTNeoX", **WIDE), tokens(1, N)
    with torch.no_grad():  # behind the columns that positions turn; a head has queries, keys and values of 64 columns
        for layer in model.gpt_neox.layers:
            dense = layer.attention.query_key_value
            dense.weight[64 + 50] *= noise
            dense.bias[64 + 50] = offset
    held, exact = compress(model, ids, {(0, 0): 0.6}, bits=bits), compress(model, ids, 1.0)
    here, there = group_of(held, 0, 0).opened().keys, group_of(exact, 0, 0).keys
    others = [c for c in range(64) if c != 50]
    error = (here - there)[..., others].norm() / there[..., others].norm()
    assert error < (0.15 if bits == 4 else 0.01)
    assert difference(here[..., 50], there[..., 50]) < 0.1 * abs(offset) + 3 * noise


@pytest.mark.parametrize("bits", BITS)
def test_keys_do_not_drift_where_slots_are_renewed(bits: int) -> None:
    model, ids = base(**WIDE, max_position_embeddings=4096), tokens(1, N)
    exact = group_of(compress(model, ids, 1.0), 0, 0).keys[0, 0]
    cache = compress(model, ids, {(0, 0): Selection(0.4, renew_every=8)}, bits=bits)
    errors = []
    for _ in range(30):
        group = group_of(cache, 0, 0).opened()
        places = group.places[0, 0].long()
        old = (places >= 0) & (places < N)
        errors.append(float((group.keys[0, 0][old] - exact[places[old]]).norm() / exact[places[old]].norm()))
        cache.ask(model, torch.randint(1, 40, (1, 8)), **GREEDY)
    assert max(errors) < 2 * errors[0]


@pytest.mark.parametrize("bits", BITS)
def test_heads_that_recall_stay_whole_where_slots_are_renewed(bits: int) -> None:
    model, ids = base(**WIDE, max_position_embeddings=4096), tokens(1, N)
    figures = {"recall_error": 0.1, "text": 0.1, "text_error": 0.1}
    costs = {(0, 0): 0.01, (0, 1): 2.0, (1, 0): 0.2, (1, 1): 0.0}
    rows = [{"layer": layer, "head": head, "recall": cost, **figures} for (layer, head), cost in costs.items()]
    profile = HeadProfile(rows, "LlamaForCausalLM", 1 / 16)
    cache = compress(model, ids, Selection(0.2, renew_every=8), heads=profile, bits=bits)
    assert slots_of(cache)[0, 1] == N
    for _ in range(6):
        cache.ask(model, torch.tensor([[3, 14, 15, 9]]), **GREEDY)
    assert slots_of(cache)[0, 1] == cache.layers[0].length > N
    assert max(slots_of(cache)[1, 1], slots_of(cache)[0, 0]) < N


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_the_default_dtype_does_not_matter(dtype: str) -> None:
    model, ids = base(**WIDE), tokens(1, N)
    expected = logits(model, compress(model, ids, CUT))
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        cache = compress(model, ids, CUT)
        assert torch.equal(logits(model, cache), expected)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("share", "bits"), [(0.6, 8), (0.4, 4)])
def test_nothing_is_told_where_all_positions_are_held(share: float, bits: int) -> None:
    cache = compress(base(**WIDE), tokens(1, N), share, bits=bits)  # warnings are errors
    assert set(slots_of(cache).values()) == {N}


def test_few_bytes_are_held_in_few_bits_by_default() -> None:
    model, ids = base(**WIDE), tokens(1, N)
    for selection, bits in ((0.05, 4), (Selection(0.09), 4), (0.12, 8), (Selection(0.5), 8), (12, 8), (CUT, 8)):
        with pytest.warns(RecallWarning) if selection is not CUT else nullcontext():
            cache = compress(model, ids, selection)
        assert {group.bits for layer in cache.layers for group in layer.groups} - {16} == {bits}


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model, ids = base(**WIDE), tokens(1, N)
    compress(model, ids, CUT, bits=np.int64(8)).save(tmp_path / "context")
    with pytest.warns(RecallWarning):
        cache = compress(model, ids, np.float32(0.05))
    assert group_of(cache, 0, 0).bits == 4


@pytest.mark.parametrize("bits", [True, 2, 7, 16.5, "8", 8.0, np.float64(8), torch.tensor(8), np.array([8, 4])])
def test_other_bits_are_refused(bits: Any) -> None:
    with pytest.raises(ValueError, match=r"bits is .*; expected 4, 8, or 16"):
        compress(base(), tokens(1, N), CUT, bits=bits)


def test_rows_that_are_equal_or_zero_are_held_exactly() -> None:
    model, ids = base(), tokens(1, N)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.zero_()
    cache = compress(model, ids, CUT | {(1, 0): Selection(0.7)})
    for head in ((1, 0), (1, 1)):
        assert not group_of(cache, *head).opened().values.any()
    assert torch.isfinite(logits(model, cache)).all()
