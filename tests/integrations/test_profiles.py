"""Profiles of heads that are known: found by the weights of a model or by name, and told apart from others."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import base, tokens  # noqa: E402
from test_compress import Letters  # noqa: E402

import levattn  # noqa: E402
from levattn.attention import Selection, causal_pruned_attention  # noqa: E402
from levattn.integrations.transformers import CompressedCache, HeadProfile, calibrate, compress, head_profile, prune  # noqa: E402

NAME = "of-tests"


def model(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    found = base(max_position_embeddings=400, **options)
    for array in found.parameters():  # norms like those of a trained model
        if array.ndim == 1:
            array.data += 0.1 * torch.randn_like(array)
    return found


@pytest.fixture(scope="module")
def measured() -> HeadProfile:
    return head_profile(model(), Letters(), tasks=1, positions=256, rounds=1)


@pytest.fixture(scope="module")
def read() -> HeadProfile:
    return head_profile(model(), Letters(), tasks=1, positions=256, rounds=2, way="reading")


@pytest.fixture
def folder(measured: HeadProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    measured.save(tmp_path / f"{NAME}.json")
    monkeypatch.setenv("LEVATTN_PROFILES", str(tmp_path))
    return tmp_path


def in_four_bits(found: Any) -> Any:
    """The model with matrices in blocks of 32 entries, each of 16 equally spaced numbers (Q4_1 of GGUF)."""
    for array in found.parameters():
        if array.ndim > 1:
            blocks = array.data.reshape(-1, 32)
            low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
            step = ((high - low) / 15).clamp(min=1e-9)
            array.data = (low + step * ((blocks - low) / step).round()).reshape(array.shape)
    return found


def packed(found: Any) -> Any:
    """The model with a weight that holds no numbers, as a format of 4 bits has them in memory."""
    weight = torch.zeros((16, 32), dtype=torch.uint8)
    found.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    return found


@pytest.mark.parametrize(
    "rounded",
    [
        lambda found: found,
        lambda found: found.to(torch.bfloat16),
        lambda found: found.to(torch.float16),
        lambda found: found.double(),
        in_four_bits,
        lambda found: in_four_bits(found).to(torch.bfloat16),
        packed,
    ],
    ids=["float32", "bfloat16", "float16", "float64", "4 bits", "4 bits in bfloat16", "packed"],
)
def test_a_model_has_its_profile_whatever_rounding_its_weights_have(
    rounded: Callable[[Any], Any], measured: HeadProfile, folder: Path
) -> None:
    found = rounded(model())
    assert measured.fits(found)
    assert dict(HeadProfile.find(found)) == dict(measured)
    assert HeadProfile.names() == sorted([NAME, "smollm2-135m-instruct"])


def test_auto_and_a_name_stand_for_the_profile(measured: HeadProfile, read: HeadProfile, folder: Path) -> None:
    own, ids = model(), tokens(1, 200)
    read.save(folder / f"{NAME}.reading.json")
    given = compress(own, ids, 0.5, heads=measured).table()
    for heads in ("auto", NAME, f"somebody/{NAME.upper()}"):
        assert compress(own, ids, 0.5, heads=heads).table() == given
        with prune(own, 0.5, heads=heads) as report:
            assert report.options["selection"]
    found = calibrate(own, {"input_ids": ids[:, :20]}, target=1e9, metric="logits", budgets=[0.5], heads="auto")
    assert dict(found) == read.shares(0.5)
    assert dict(HeadProfile.find(NAME, way="reading")) == dict(HeadProfile.find(own, way="reading")) == dict(read)
    assert dict(HeadProfile.find(NAME)) == dict(HeadProfile.find(own)) == dict(measured)


def test_a_profile_of_the_other_way_stands_in_with_a_warning(
    measured: HeadProfile, read: HeadProfile, folder: Path
) -> None:
    own, ids = model(), tokens(1, 200)
    inputs = {"input_ids": ids[:, :20]}
    for heads in ("auto", NAME, measured):
        with pytest.warns(levattn.ProfileWarning, match=r"way='reading'"), prune(own, 0.5, heads=heads):
            pass
        with pytest.warns(levattn.ProfileWarning, match=r"cut in another way \(cache\) than by prune and calibrate"):
            found = calibrate(own, inputs, target=1e9, metric="logits", budgets=[0.5], heads=heads)
        assert dict(found) == measured.shares(0.5, way="reading")
    (folder / f"{NAME}.json").unlink()
    read.save(folder / f"{NAME}.reading.json")
    for other in ("auto", f"{NAME}.reading", read):
        with pytest.warns(levattn.ProfileWarning, match=r"another way \(reading\) than by compress.*way='cache'"):
            compress(own, ids, 0.5, heads=other)


def test_costs_of_reading_are_those_of_a_model_that_prunes_the_head(read: HeadProfile) -> None:
    """The loss of the answers with one head pruned, less that of the dense model, of a task that repeats a passage."""
    assert read.way == "reading"
    assert len(read) == 4
    alone = head_profile(model(), Letters(), tasks=1, positions=256, rounds=1, way="reading")
    again = head_profile(model(), Letters(), tasks=1, positions=256, rounds=1, way="reading", progress=lambda *_: None)
    assert dict(alone) == dict(again)
    assert dict(alone) != dict(head_profile(model(), Letters(), tasks=1, positions=256, rounds=1))
    assert all(row["text"] >= 0 for row in alone.table())  # a divergence from the dense model, where all else is dense
    with pytest.raises(ValueError, match="way is 'both'; expected 'cache' or 'reading'"):
        head_profile(model(), Letters(), way="both")
    with pytest.raises(ValueError, match="and way='cache'"):
        head_profile(model(), Letters(), tasks=1, positions=256, earlier=read)


@pytest.mark.parametrize("family", ["Gemma2", "Mistral"])
def test_models_that_cannot_be_cut_are_refused_before_they_write(family: str) -> None:
    """One has logits that `prune` refuses. All layers of the other slide."""
    steps: list[int] = []
    with pytest.raises(ValueError, match=r"softcap|all layers of MistralForCausalLM slide"):
        head_profile(
            model(family=family),
            Letters(),
            tasks=1,
            positions=256,
            way="reading",
            progress=lambda made, _: steps.append(made),
        )
    assert not steps


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        (None, TypeError, "rows is of type NoneType; expected a list of mappings"),
        ([{"layer": 0}], ValueError, "which lacks head, recall, recall_error, text, text_error; expected the keys"),
        ([3], ValueError, "rows has 3, which lacks head"),
        ([], ValueError, "rows is empty; expected one for each head"),
    ],
)
def test_rows_that_are_no_table_are_refused(rows: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        HeadProfile(rows, "LlamaForCausalLM", 1 / 16)


def test_rows_may_come_from_any_iterable() -> None:
    figures = dict.fromkeys(("recall", "recall_error", "text", "text_error"), 1.0)
    rows = {head: figures | {"layer": 0, "head": head} for head in (0, 1)}
    profile = HeadProfile(list(rows.values()), "LlamaForCausalLM", 1 / 16)
    for given in (rows.values(), iter(rows.values()), tuple(rows.values())):
        assert HeadProfile(given, "LlamaForCausalLM", 1 / 16).table() == profile.table()


@pytest.mark.parametrize("by", ["positions", "time"])
def test_heads_are_whole_or_have_one_share_while_a_model_reads(by: str) -> None:
    """No choice that leaves the others two thirds and 340 slots costs less, by the costs that `shares` tells."""
    rng, head = np.random.default_rng(0), [(0, h) for h in range(7)]
    recall, text = rng.exponential(size=(2, 7)) * np.array([[1.0], [0.02]])
    errors = {"recall_error": 0.1, "text_error": 0.1}
    rows = [{"layer": 0, "head": h, "recall": float(recall[h]), "text": float(text[h]), **errors} for h in range(7)]
    found = HeadProfile(rows, "LlamaForCausalLM", 1 / 16, way="reading")
    floor = 1e-4 * (recall + text).max()

    def cost(share: float) -> Any:
        curves = (1 - share**0.125) / (1 - 2**-0.5), ((1 / share - 1) / 15) ** 1.5
        return 2 * recall * curves[0] + (text + floor) * curves[1]

    for budget in (0.05, 0.12, 0.25, 0.5, 0.9):
        shares = found.shares(budget, by=by)
        values = np.array([shares[each] for each in head])
        others = set(values[values < 1])
        assert len(others) == 1
        spent = values if by == "positions" else np.minimum(2 * values, 1)
        assert abs(spent.mean() - budget) < 1e-12
        for length in (None, 100_000, 3000, 1000, 1):
            mine = found.shares(budget, by=by, length=length)
            least = 0 if length is None else 340 / length
            assert min(mine.values()) >= least or 1.0 not in mine.values()
            own = sum(cost(share)[h] for h, share in enumerate(mine[each] for each in head) if share < 1)
            for count in range(7):
                rest = (7 * budget - count) / (7 - count)
                share = rest if by == "positions" else rest / 2
                if rest >= 2 / 3 * budget and (not count or share >= least):
                    for whole in itertools.combinations(range(7), count):
                        assert own <= sum(cost(share)[h] for h in range(7) if h not in whole) * (1 + 1e-12)
    assert set(found.shares(1.0, by=by).values()) == {1.0}
    with pytest.raises(ValueError, match="by is 'time'; expected \"positions\" for the way 'cache'"):
        found.shares(0.5, way="cache", by="time")
    for way in ("other", ["reading"]):
        with pytest.raises(ValueError, match=r"way is .*; expected 'cache' or 'reading'"):
            found.shares(0.5, way=way)
    with pytest.raises(ValueError, match="length is 100; expected None for the way 'cache'"):
        found.shares(0.5, way="cache", length=100)
    for length in (0, 1.5):
        with pytest.raises((TypeError, ValueError), match=f"length is {length}; expected"):
            found.shares(0.5, length=length)
    assert set(found.shares(0.9, by=by, length=1).values()) == {0.9 if by == "positions" else 0.45}
    assert found.shares(0.9, by=by, length=10_000) == found.shares(0.9, by=by)
    for budget in (1e-18, 1e-300):  # the costs of such shares are beyond all numbers
        least = np.array(list(found.shares(budget, by=by).values()))
        np.testing.assert_allclose(least, budget if by == "positions" else budget / 2, rtol=1e-14)


@pytest.mark.parametrize("share", [0.05, 0.25, 0.45])
def test_the_time_of_a_share_counts_the_keys_that_causal_queries_read(share: float) -> None:
    X, n = np.random.default_rng(0).standard_normal((1, 1000, 2)), 1000
    _, certificate = causal_pruned_attention(X, X, X, share, return_certificate=True)
    assert certificate.slots.sum() == pytest.approx(2 * share * n * (n + 1) / 2)  # dense attention has n (n + 1) / 2


def test_auto_needs_no_profile_where_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEVATTN_PROFILES", raising=False)
    own, ids = model(seed=3), tokens(1, 40)
    for whole in (1.0, Selection(1.0)):
        assert {row["slots"] for row in compress(own, ids, whole, heads="auto").table()} == {40}
        with prune(own, whole, heads="auto") as report:
            assert report.table() == []
    with pytest.raises(ValueError, match="no profile fits"):
        compress(own, ids, 0.5, heads="auto")


def test_a_quick_profile_is_refined_on_other_texts(measured: HeadProfile) -> None:
    seen: list[tuple[int, int | None]] = []
    options: dict[str, Any] = {"positions": 256, "rounds": 2, "tasks": 2}
    found = head_profile(model(), Letters(), earlier=measured, **options, progress=lambda *at: seen.append(at))
    assert (measured.trials, found.trials) == (1, 5)
    assert found.fits(model())
    again = head_profile(model(), Letters(), tasks=1, positions=256, rounds=1)
    assert dict(again) == dict(measured)
    earlier, now = ({(row["layer"], row["head"]): row for row in each.table()} for each in (measured, found))
    new = {head: (5 * now[head]["recall"] - earlier[head]["recall"]) / 4 for head in now}
    assert any(abs(new[head] - earlier[head]["recall"]) > 1e-6 for head in new)
    assert seen[-1][0] == seen[-1][1]
    other = HeadProfile([row for row in measured.table() if row["head"]], "LlamaForCausalLM", 1 / 16)
    further = model()
    with torch.no_grad():
        trained_norms(further)
    for own, earlier in ((model(), other), (further, measured)):
        with pytest.raises(ValueError, match="expected a profile of this LlamaForCausalLM"):
            head_profile(own, Letters(), earlier=earlier, **options)
    with pytest.raises(ValueError, match=r"cut to 0\.0625, and way='reading'"):
        head_profile(model(), Letters(), earlier=measured, way="reading", **options)
    with pytest.raises(TypeError, match="a HeadProfile to refine"):
        head_profile(model(), Letters(), earlier={}, **options)


def test_joined_profiles_have_the_means_of_all_trials(measured: HeadProfile) -> None:
    row = {"layer": 0, "head": 0, "recall": 2.0, "recall_error": 0.3, "text": 0.2, "text_error": 0.0}
    one = HeadProfile([row], "LlamaForCausalLM", 1 / 16, trials=3)
    two = HeadProfile([row | {"recall": 1.0, "recall_error": 0.4, "text": 0.6}], "LlamaForCausalLM", 1 / 16)
    both = one.joined(two)
    assert both.trials == two.joined(one).trials == 4
    (found,) = both.table()
    assert (found["recall"], found["text"]) == pytest.approx((1.75, 0.3))
    assert found["recall_error"] == pytest.approx(math.hypot(0.75 * 0.3, 0.25 * 0.4))  # of independent means
    assert both.to_dict()["trials"] == 4
    for other, words in (
        (measured, "expected the 1 heads"),
        (HeadProfile([row], "LlamaForCausalLM", 0.5), "the share"),
    ):
        with pytest.raises(ValueError, match=words):
            one.joined(other)
    with pytest.raises(TypeError, match="a HeadProfile"):
        one.joined(row)
    with pytest.raises(ValueError, match="trials"):
        HeadProfile([row], "LlamaForCausalLM", 1 / 16, trials=0)


def test_one_task_tells_no_error_and_two_profiles_of_one_tell_it_as_two_tasks(measured: HeadProfile) -> None:
    assert {(row["recall_error"], row["text_error"]) for row in measured.table()} == {(None, None)}
    row: dict[str, Any] = {"layer": 0, "head": 0, "recall_error": None, "text": 0.2, "text_error": None}
    costs = [1.0, 4.0]
    one, two = (HeadProfile([row | {"recall": cost}], "LlamaForCausalLM", 1 / 16) for cost in costs)
    (found,) = one.joined(two).table()
    assert found["recall_error"] == pytest.approx(1.96 * statistics.stdev(costs) / 2**0.5)
    assert found["text_error"] == 0.0
    many = HeadProfile([row | {"recall": 2.0, "recall_error": 0.6}], "LlamaForCausalLM", 1 / 16, trials=3)
    for both in (one.joined(many), many.joined(one)):  # four trials that vary alike
        assert both.table()[0]["recall_error"] == pytest.approx(0.6 * (3 / 4) ** 0.5)
    with pytest.raises(ValueError, match="expected finite numbers, or None as an error"):
        HeadProfile([row | {"recall": None}], "LlamaForCausalLM", 1 / 16)


def trained_norms(found: Any) -> None:
    found.model.norm.weight.data *= 1.01


def trained_matrices(found: Any) -> None:
    for array in found.parameters():
        if array.ndim > 1:
            array.data += 0.03 * array.std() * torch.randn_like(array)


@pytest.mark.parametrize("train", [trained_norms, trained_matrices])
def test_a_model_that_was_trained_further_is_another_one(
    train: Callable[[Any], None], measured: HeadProfile, folder: Path
) -> None:
    own = model()
    assert measured.fits(own)
    with torch.no_grad():
        train(own)
    assert not measured.fits(own)
    with pytest.raises(ValueError, match=rf"no profile fits this LlamaForCausalLM: {NAME} \(has other weights\)"):
        compress(own, tokens(), 0.5, heads="auto")
    for heads in (NAME, measured):
        with pytest.warns(levattn.ProfileWarning, match="a profile of other weights than this LlamaForCausalLM"):
            compress(own, tokens(), 0.5, heads=heads)
        with pytest.warns(levattn.ProfileWarning, match="Measure one with head_profile"), prune(own, 0.5, heads=heads):
            pass


def test_a_change_of_weights_is_seen_after_they_were_known(measured: HeadProfile) -> None:
    own = model()
    assert measured.fits(own)
    with torch.no_grad():
        own.model.layers[1].input_layernorm.weight.mul_(1.1)
    assert not measured.fits(own)


def int8(found: Any) -> Any:
    """The model with all matrices but the embeddings packed."""
    for module in found.model.modules():
        if isinstance(module, torch.nn.Linear):
            weight = torch.zeros(module.weight.shape, dtype=torch.int8)
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return found


def same_norms(found: Any, other: Any) -> Any:
    for mine, theirs in zip(found.parameters(), other.parameters(), strict=True):
        if mine.ndim == 1:
            mine.data = theirs.data.clone()
    return found


def test_arrays_that_can_be_read_tell_packed_models_apart(measured: HeadProfile) -> None:
    assert measured.fits(int8(model()))
    assert not measured.fits(int8(same_norms(model(seed=1), model())))


def with_outliers(found: Any) -> Any:
    found.model.embed_tokens.weight.data[:, 0] = 30.0
    found.model.embed_tokens.weight.data[-1, -1] = 30.0
    return found


def test_outliers_of_one_array_hide_no_others() -> None:
    own = head_profile(with_outliers(model()), Letters(), tasks=1, positions=256, rounds=1)
    assert own.fits(with_outliers(in_four_bits(model())))
    assert not own.fits(with_outliers(same_norms(model(seed=1), model())))


@pytest.mark.parametrize("place", ["norm.weight", "layers.1.mlp.up_proj.weight"])
def test_nan_in_weights_fits_nothing(place: str, measured: HeadProfile) -> None:
    broken = model()
    broken.model.get_parameter(place).data[:] = torch.nan
    assert not measured.fits(broken)


def test_an_adapter_makes_another_model(measured: HeadProfile) -> None:
    own = model()
    own.model.layers[0].self_attn.q_proj.lora_A = torch.nn.Linear(32, 2)
    assert not measured.fits(own)


def test_models_of_other_sizes_are_refused(measured: HeadProfile, folder: Path) -> None:
    others = model(num_hidden_layers=3), model(num_key_value_heads=1)
    for other in others:
        assert not measured.fits(other)
        with pytest.raises(ValueError, match=rf"{NAME} \(is of another model\)"):
            HeadProfile.find(other)
        with (
            pytest.warns(levattn.ProfileWarning),
            pytest.raises(ValueError, match=r"heads (names|has no cost of) head"),
        ):
            compress(other, tokens(1, 100), 0.5, heads=measured)


def test_a_folder_may_be_named_and_goes_before_what_comes_with_the_library(
    measured: HeadProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LEVATTN_PROFILES", raising=False)
    with pytest.raises(ValueError, match=r"among those of levattn, and LEVATTN_PROFILES is not set.*head_profile\("):
        HeadProfile.find(model())
    with pytest.raises(
        ValueError, match=r"there is no profile 'nothing' among .*expected one of smollm2-135m-instruct"
    ):
        HeadProfile.find("nothing")
    with pytest.raises(ValueError, match="there is no such folder"):
        HeadProfile.find("nothing", tmp_path / "none")
    assert len(HeadProfile.find("HuggingFaceTB/SmolLM2-135M-Instruct")) == 90
    measured.save(tmp_path / "SmolLM2-135M-Instruct.json")
    assert len(HeadProfile.find("smollm2-135m-instruct", tmp_path)) == 4
    measured.save(tmp_path / "alone.cache.json")
    for way in ("cache", "reading"):  # a profile of the other way stands in by name as well
        assert dict(HeadProfile.find("of/alone", tmp_path, way=way)) == dict(measured)
    with pytest.raises(ValueError, match=r"Open a file with HeadProfile\.load"):
        HeadProfile.find(str(tmp_path / "heads.json"))
    with pytest.raises(TypeError, match="heads is of type int"):
        compress(model(), tokens(), 0.5, heads=3)


def test_files_that_are_no_profiles_are_left_out(measured: HeadProfile, folder: Path) -> None:
    (folder / "aa.json").write_text("{}")
    (folder / "ab.json").mkdir()
    (folder / "ac.json").symlink_to(folder / "nowhere")
    (folder / "zz.json").write_text("[]")
    with pytest.warns(levattn.ProfileWarning, match=r"aa\.json is no head profile.*ab\.json.*ac\.json"):
        assert dict(HeadProfile.find(model())) == dict(measured)
    with pytest.raises(ValueError, match=r"aa \(cannot be read: .*zz \(cannot be read: "):
        HeadProfile.find(model(seed=1))
    with pytest.raises(ValueError, match=r"aa\.json is no head profile"):
        HeadProfile.find("aa")


def test_a_profile_of_any_model_is_named(measured: HeadProfile, folder: Path) -> None:
    (folder / f"{NAME}.json").unlink()
    HeadProfile(measured.table(), "LlamaForCausalLM", 1 / 16).save(folder / "of-any.json")
    with pytest.raises(ValueError, match=r"of-any \(does not know its model, so give it by name\)"):
        HeadProfile.find(model())
    assert dict(HeadProfile.find("of-any")) == dict(measured)
    for wrong in (folder, None):
        with pytest.raises(TypeError, match="model is of type"):
            HeadProfile.find(wrong)
    with pytest.raises(TypeError, match="model is of type str"):
        measured.fits("x")
    for call in (HeadProfile.load, measured.save, lambda path: CompressedCache.load(path, model())):
        with pytest.raises(TypeError, match="path is of type NoneType; expected the path of a file"):
            call(None)
        with pytest.raises(ValueError, match="path is empty"):
            call("")
    with pytest.raises(TypeError, match="folder is of type int; expected the path of a folder of profiles"):
        HeadProfile.names(3)  # type: ignore[arg-type]


def test_files_of_profiles_know_their_model(measured: HeadProfile, tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    measured.save(file)
    again = HeadProfile.load(file)
    assert again.to_dict() == measured.to_dict()
    assert again.fits(model())
    assert not again.fits(model(seed=1))
    assert file.stat().st_size < 30_000
    document = json.loads(file.read_text())
    known = document["fingerprint"]
    for change in (
        {"vectors": "?"},
        {"vectors": "AADAfw=="},  # NaN
        {"matrices": "AAA="},
        {"count": 1.5},
        {"coarse": "no"},
    ):
        file.write_text(json.dumps({**document, "fingerprint": {**known, **change}}))
        with pytest.raises(ValueError, match=r"heads\.json is no head profile"):
            HeadProfile.load(file)
    file.write_text(json.dumps({**document, "version": 1}))
    with pytest.raises(ValueError, match=r"version 1.*Measure the profile again with head_profile"):
        HeadProfile.load(file)
    file.write_text(json.dumps({**document, "version": 4}))
    with pytest.raises(ValueError, match=r"version 4.*A newer levattn made it, so update levattn"):
        HeadProfile.load(file)
    old = {name: value for name, value in document.items() if name != "way"}
    file.write_text(json.dumps({**old, "version": 2}))
    assert HeadProfile.load(file).way == "cache"
    for way in ("no", 3):
        file.write_text(json.dumps({**document, "way": way}))
        with pytest.raises(ValueError, match=r"heads\.json"):
            HeadProfile.load(file)
    with pytest.raises(TypeError, match="fingerprint is of type str"):
        HeadProfile(measured.table(), "LlamaForCausalLM", 0.5, "mine")  # type: ignore[arg-type]
