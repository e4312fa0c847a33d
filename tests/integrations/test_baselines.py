"""Published rules by name, and functions of queries: which positions of a context they keep, by their definitions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import CACHE, base, output  # noqa: E402
from test_compress import kept_of  # noqa: E402

import levattn  # noqa: E402
from levattn.attention import Selection, fit_slots, pruned_attention  # noqa: E402
from levattn.integrations.transformers import (  # noqa: E402
    Calibration,
    CompressedCache,
    HeadProfile,
    compress,
    prune,
)

N, WINDOW = 90, 32
pytestmark = pytest.mark.filterwarnings("ignore::levattn.RecallWarning")


def model(family: str = "Llama") -> Any:
    torch.manual_seed(0)
    return base(family, max_position_embeddings=256, attn_implementation="eager", vocab_size=256)


def tokens(batch: int, length: int) -> Any:
    """Different tokens, whose keys have different norms."""
    draws = (torch.randperm(255, generator=torch.Generator().manual_seed(row))[:length] for row in range(batch))
    return 1 + torch.stack(list(draws))


def read(own: Any, ids: Any) -> tuple[list[Any], list[Any]]:
    """The keys (G, n, d) and the attention (G, g, n, n) of each layer, as the model has them."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        found = own(ids, output_attentions=True, **{CACHE: cache})
    keys = [layer.keys[0].double() for layer in cache.layers]
    pairs = zip(found.attentions, keys, strict=True)
    return keys, [P[0].double().unflatten(0, (len(K), -1)) for P, K in pairs]


# The definitions: scores (G, n) of the keys from the attention P (G, g, n, n), and places that stay in any case


def h2o(_K: Any, P: Any, count: int) -> tuple[Any, range]:
    n = P.shape[-1]
    return P.sum((1, 2)), range(n - count // 2, n)


def snapkv(_K: Any, P: Any, _count: int) -> tuple[Any, range]:
    G, g, n, _ = P.shape
    seen = P[:, :, -WINDOW:, : n - WINDOW].sum(2)
    scores = torch.zeros((G, n), dtype=torch.float64)
    for j in range(n - WINDOW):
        scores[:, j] = seen[:, :, max(0, j - 3) : j + 4].amax(2).sum(1) / g
    return scores, range(n - WINDOW, n)


def tova(_K: Any, P: Any, _count: int) -> tuple[Any, range]:
    return P[:, :, -1].mean((0, 1)).expand(len(P), -1), range(0)


def norm(K: Any, _P: Any, _count: int) -> tuple[Any, range]:
    return -(K**2).sum(2), range(0)


DEFINITIONS = {"h2o": (h2o, 20), "snapkv": (snapkv, 44), "tova": (tova, 20), "norm": (norm, 20)}


def by_definition(rule: Callable[..., Any], K: Any, P: Any, count: int) -> list[list[int]]:
    scores, sure = rule(K, P, count)
    found = []
    for row in scores.tolist():
        others = sorted(set(range(len(row))) - set(sure), key=lambda j: -row[j])
        found.append(sorted([*others[: count - len(sure)], *sure]))
    return found


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])  # the second bounds its logits, and a layer slides
def test_rules_keep_what_their_definitions_keep(name: str, family: str) -> None:
    own, ids, (rule, count) = model(family), tokens(1, N), DEFINITIONS[name]
    keys, attention = read(own, ids)
    cache = compress(own, ids, Selection(count, scores=name))
    for layer, (K, P) in enumerate(zip(keys, attention, strict=True)):
        if family == "Llama" or layer == 1:
            assert kept_of(cache, layer) == by_definition(rule, K, P, count)


def test_the_last_keys_stay_whatever_the_scores() -> None:
    own, ids = model(), tokens(1, N)
    assert kept_of(compress(own, ids, Selection(20, scores="snapkv"))) == [[*range(N - 20, N)]] * 2
    parts = kept_of(compress(own, ids, Selection(40, scores="snapkv"), chunk=45))
    assert all({*range(29, 45), *range(74, 90)} <= set(places) for places in parts)  # 16 of 32 in each chunk
    assert all(len(places) == 40 for places in parts)
    for window in (0, 8):
        found = kept_of(compress(own, ids, Selection(20, scores="snapkv", window=window)))
        assert all({*range(N - window, N)} <= set(places) for places in found)
        assert all(min(places) < N - WINDOW for places in found)

    def without_bound(K: Any, V: Any) -> Any:
        return torch.full(K.shape[:2], torch.inf)

    mine = Selection(20, scores=without_bound, window=6, sinks=1, summaries=0)
    assert kept_of(compress(own, ids, mine)) == [[*range(14), *range(N - 6, N)]] * 2


def test_streaming_keeps_the_first_four_and_the_last() -> None:
    for budget, count in ((20, 20), (0.3, int(0.3 * N))):
        cache = compress(model(), tokens(1, N), Selection(budget, scores="streaming"))
        assert kept_of(cache) == [[*range(4), *range(N - count + 4, N)]] * 2


def test_what_a_rule_brings_gives_way_to_options_and_small_budgets() -> None:
    own, ids = model(), tokens(1, N)
    (group,) = compress(own, ids, Selection(20, scores="streaming", summaries=8)).layers[0].groups
    places = sorted(group.places[0, 0].tolist())
    assert places == [*[-1] * 8, *range(4), *range(N - 8, N)]
    (group,) = compress(own, ids, Selection(20, scores="streaming", summaries=0.5)).layers[0].groups
    assert sorted(group.places[0, 0].tolist()) == [*[-1] * 8, *range(4), *range(N - 8, N)]
    few = Selection(0.2, scores="streaming")
    for n in (9, 24, 40):
        for causal in (True, False):
            slots = few.slots(n, causal=causal)
            assert min(vars(slots).values()) >= 0
            assert slots.total == max(1, int(0.2 * n + 1e-9))
    assert Selection(20, scores="streaming", summaries=8).slots(90, causal=True).summaries == 8
    Q = np.random.default_rng(0).standard_normal((30, 8))
    for count in (2, 3, 4, 5):
        assert fit_slots(Q, Q, Q, Selection(count, scores="streaming")).keys.shape[-2] == count
    with prune(own, few, measure=True) as report:
        output(own, tokens(1, 32))
    assert all(0 < row["slots"] <= 6.5 for row in report.table())  # the first 12 queries read 6.5 keys in the mean
    with pytest.raises(ValueError, match=r"window=30,.* take 35"):
        Selection(20, scores="streaming", window=30).slots(90, causal=True)


def test_a_rule_keeps_keys_as_they_are_and_a_share_is_of_the_positions() -> None:
    own, ids = model(), tokens(1, N)
    cache = compress(own, ids, Selection(0.25, scores="h2o"))
    assert {(row["slots"], row["bits"]) for row in cache.table()} == {(int(0.25 * N), 16)}
    assert not any("residual" in row for row in cache.table())
    dense = compress(own, ids, 1.0).layers[0].groups[0]
    (group,) = cache.layers[0].groups
    assert group.log_weight is None
    places = group.places.long()[..., None]
    for held, whole in ((group.keys, dense.keys), (group.values, dense.values)):
        assert torch.equal(held, whole.gather(2, places.expand(-1, -1, -1, held.shape[-1])))


def test_slots_of_a_rule_are_fitted_and_rounded_on_request() -> None:
    own, ids = model(), tokens(1, N)
    keys, attention = read(own, ids)
    cache = compress(own, ids, Selection(24, scores="h2o"), references="own", bits=8)
    assert {(row["slots"], row["bits"]) for row in cache.table()} == {(24, 8)}
    assert all(row["residual"] > 0 for row in cache.table())
    assert kept_of(cache) == by_definition(h2o, keys[0], attention[0], 24)
    mixed = compress(own, ids, {(0, 0): Selection(24, scores="tova"), (0, 1): Selection(24)}).table()
    assert [row["residual"] > 0 for row in mixed[:2]] == [False, True]  # of the first head nothing was measured
    given = Selection(24, scores="h2o", window=3, sinks=2)
    assert all({0, 1, N - 3, N - 2, N - 1} < set(places) for places in kept_of(compress(own, ids, given)))


@pytest.mark.parametrize("name", ["h2o", "snapkv", "tova", "norm", "random:2"])
def test_a_padded_row_keeps_what_it_keeps_alone(name: str) -> None:
    own, ids = model(), tokens(2, N)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    few = Selection(40, scores=name)
    batch = compress(own, {"input_ids": ids, "attention_mask": mask}, few).layers[0].groups[0].places
    for row, own_ids in enumerate((ids[:1], ids[1:, 30:])):
        alone = kept_of(compress(own, own_ids, few))
        assert [sorted(x for x in places if x >= 0) for places in batch[row].tolist()] == alone


def test_queries_of_a_chunk_score_its_keys() -> None:
    own, ids = model(), tokens(1, 60)
    keys, attention = read(own, ids)
    cache = compress(own, ids, Selection(20, scores="h2o"), chunk=30)
    expected: list[list[int]] = [[], []]
    for first in (0, 30):
        part = slice(first, first + 30)
        P = attention[0][:, :, part, part]
        here = by_definition(h2o, keys[0][:, part], P / P.sum(-1, keepdim=True), 10)
        expected = [places + [first + x for x in more] for places, more in zip(expected, here, strict=True)]
    assert kept_of(cache) == expected


def of_all(K: Any, V: Any, Q: Any) -> Any:
    logits = (Q @ K[:, None].mT).masked_fill(torch.ones(Q.shape[2], Q.shape[2]).triu(1).bool(), -torch.inf)
    return logits.softmax(-1).sum((1, 2))


def of_the_last(K: Any, V: Any, *, Q: Any) -> Any:
    return (Q[:, :, -1:] @ K[:, None].mT).softmax(-1).mean((0, 1, 2)).expand(len(K), -1)


class OfTheLast(torch.nn.Module):
    """The same as a module."""

    def forward(self, K: Any, V: Any, Q: Any) -> Any:
        return of_the_last(K, V, Q=Q)


@pytest.mark.parametrize(("name", "function"), [("h2o", of_all), ("tova", of_the_last), ("tova", OfTheLast())])
@pytest.mark.parametrize("references", ["none", "own"])
def test_a_function_that_names_queries_gets_them(name: str, function: Any, references: str) -> None:
    own, ids = model(), tokens(1, N)
    how = {"references": references, "bits": 16}
    window = 10 if name == "h2o" else 0
    mine = Selection(20, scores=function, window=window, sinks=0, summaries=0)
    found, expected = (compress(own, ids, few, **how) for few in (mine, Selection(20, scores=name)))
    for layer in (0, 1):
        assert kept_of(found, layer) == kept_of(expected, layer)
    with pytest.raises(ValueError, match=r"scores\(K, V, Q\) has shape"):
        compress(own, ids, Selection(20, scores=lambda K, V, Q: K + V + Q[0]))


@dataclasses.dataclass  # which compares, and so has no hash
class Scaled:
    """Scores with a setting that does not count in comparisons."""

    factor: float = dataclasses.field(compare=False)

    def __call__(self, K: Any, V: Any) -> Any:  # noqa: ARG002
        return self.factor * (K**2).sum(2)


class Unrelated:
    """An object whose `forward` is something else."""

    forward = None

    def __call__(self, K: Any, V: Any, Q: Any) -> Any:
        return of_the_last(K, V, Q=Q)


def test_functions_are_told_apart_by_identity() -> None:
    own, ids = model(), tokens(1, N)
    options: dict[str, Any] = {"window": 0, "sinks": 0, "summaries": 0}
    both = {(0, 0): Selection(9, scores=Scaled(1.0), **options), (0, 1): Selection(9, scores=Scaled(-1.0), **options)}
    norms = compress(own, ids, 1.0).layers[0].groups[0].keys[0].norm(dim=2)
    large, small = sorted(norms[0].argsort()[-9:].tolist()), sorted(norms[1].argsort()[:9].tolist())
    cache = compress(own, ids, both)
    assert [sorted(group.places[0, 0].tolist()) for group in cache.layers[0].groups] == [large, small]


def test_a_parameter_of_queries_is_seen_through_modules_and_partials() -> None:
    own, ids = model(), tokens(1, N)
    expected = kept_of(compress(own, ids, Selection(20, scores="tova")))
    for function in (partial(OfTheLast()), partial(of_the_last), Unrelated()):
        mine = Selection(20, scores=function, window=0, sinks=0, summaries=0)
        assert kept_of(compress(own, ids, mine)) == expected

    def by_position(K: Any, V: Any, Q: Any, /) -> Any:
        return of_the_last(K, V, Q=Q)

    with pytest.raises(TypeError, match="Q by position alone"):
        compress(own, ids, Selection(20, scores=by_position))
    bound = partial(lambda K, V, Q: Q * (K**2).sum(2), Q=-1)  # noqa: ARG005
    mine = Selection(20, scores=bound, window=0, sinks=0, summaries=0)
    assert kept_of(compress(own, ids, mine)) == kept_of(compress(own, ids, Selection(20, scores="norm")))


def test_a_profile_splits_the_budget_of_a_rule() -> None:
    own, ids = model(), tokens(1, N)
    figures = {"recall_error": 0.0, "text": 0.0, "text_error": 0.0}
    costs = {(0, 0): 2.0, (0, 1): 0.01, (1, 0): 0.1, (1, 1): 0.0}
    rows = [{"layer": layer, "head": head, "recall": cost, **figures} for (layer, head), cost in costs.items()]
    profile = HeadProfile(rows, "LlamaForCausalLM", 1 / 16)
    shares = profile.shares(0.5)
    cache = compress(own, ids, Selection(0.5, scores="h2o"), heads=profile)
    assert {(row["layer"], row["head"]): row["slots"] for row in cache.table()} == {
        head: max(1, int(share * N + 1e-9)) for head, share in shares.items()
    }
    keys, attention = read(own, ids)
    for layer in (0, 1):
        for head in (0, 1):
            count = max(1, int(shares[layer, head] * N + 1e-9))
            expected = by_definition(h2o, keys[layer], attention[layer], count)[head] if count < N else [*range(N)]
            assert kept_of(cache, layer)[head] == expected
    calibration = Calibration(shares, "LlamaForCausalLM", "logits", 0.1, 0.1, Selection(scores="h2o"))
    assert kept_of(compress(own, ids, calibration)) == kept_of(cache)


def test_random_keys_are_as_likely_as_each_other() -> None:
    n, count, draws = 50, 10, 400
    Q, K, V = np.random.default_rng(0).standard_normal((3, n, 16))
    K[7] = 0
    flags = []
    for seed in range(draws):
        few = Selection(size=count, scores=f"random:{seed}")
        _, certificate = pruned_attention(Q, K, V, few, return_certificate=True)
        flags.append(np.delete(certificate.kept, 7))
    share = count / n
    five = 5 * (draws * share * (1 - share)) ** 0.5  # standard deviations of a binomial count
    assert abs(np.sum(flags, 0) - draws * share).max() < five
    pairs = np.cov(np.transpose(flags))[np.triu_indices(n - 1, 1)]  # about -p (1 - p) / (n - 1) for each pair
    assert abs(pairs).max() < 5.5 * share / draws**0.5
    first, again, zero, other = (
        pruned_attention(Q, K, V, Selection(size=count, scores=name))
        for name in ("random", "random", "random:0", "random:1")
    )
    assert np.array_equal(first, again)
    assert np.array_equal(first, zero)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["random:3", "norm", "streaming"])
def test_pruning_takes_rules_of_keys_alone(name: str, causal: bool) -> None:
    own, ids = (model() if causal else base("Esm", vocab_size=256)), tokens(2, 32)
    few = Selection(10, scores=name)
    dense = output(own, ids)
    with prune(own, few, layers=[0, 1], measure=True) as report:
        found = output(own, ids)
        if causal:
            cache = transformers.DynamicCache(config=own.config)
            with torch.no_grad():
                steps = [own(ids[:, t : t + 1], **{CACHE: cache}).logits for t in range(32)]
            assert torch.allclose(torch.cat(steps, 1), found, atol=1e-4)
    most = 10.5 if causal else 10  # the first 20 of the causal queries read 10.5 keys in the mean
    assert all(row["slots"] <= most for row in report.table())
    assert not torch.allclose(found, dense, atol=1e-3)
    if name == "norm":
        mine = Selection(10, scores=lambda K, V: -(K**2).sum(2), sinks=0, window=0, summaries=0)  # noqa: ARG005
        with prune(own, mine, layers=[0, 1]):
            assert torch.allclose(output(own, ids), found, atol=1e-5)


def test_renewed_slots_go_by_rules_of_keys_and_files_hold_their_names(tmp_path: Path) -> None:
    own = model()
    cache = compress(own, tokens(1, N), Selection(12, scores="norm", renew_every=8))
    cache.save(tmp_path / "a.safetensors")
    again = CompressedCache.load(tmp_path / "a.safetensors", own)
    question = tokens(1, N + 20)[:, N:]
    answers = [each.ask(own, question, max_new_tokens=3, do_sample=False) for each in (cache, again)]
    assert torch.equal(*answers)
    norms = compress(own, torch.cat([tokens(1, N), question], 1), 1.0).layers[0].groups[0].keys[0].norm(dim=2)
    cache = compress(own, tokens(1, N), Selection(12, scores="norm", renew_every=8))
    with torch.no_grad():
        own(question, **{CACHE: cache})
        own(question[:, :1], **{CACHE: cache})  # which renews the slots before it
    expected = [sorted(row.argsort()[:12].tolist()) for row in norms]
    assert kept_of(cache) == expected


def test_random_slots_that_are_renewed_are_refused_in_codes() -> None:
    few = Selection(12, scores="random:1", renew_every=8)
    for bits in (4, 8):
        with pytest.raises(ValueError, match=rf"bits is {bits} and renew_every is 8.*expected bits=16"):
            compress(model(), tokens(1, N), few, bits=bits)
    assert compress(model(), tokens(1, N), few).context_length == N


@pytest.mark.parametrize("scores", ["h2o", "snapkv", "tova", of_all])
def test_rules_of_queries_are_refused_where_there_are_none(scores: Any) -> None:
    few, Q = Selection(8, scores=scores), np.random.default_rng(0).standard_normal((30, 8))
    said = "by its queries once it is read; levattn.integrations.transformers.compress alone does so.*norm"
    for call in (
        lambda: prune(model(), few, layers=[0]),
        lambda: prune(model(), {0: few}),
        lambda: pruned_attention(Q, Q, Q, few),
        lambda: fit_slots(Q, Q, Q, few),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(ValueError, match="gone when slots are renewed; expected renew_every=None"):
        compress(model(), tokens(1, N), Selection(8, scores=scores, renew_every=8))


def test_names_that_are_none_are_refused_with_those_that_are() -> None:
    for name in ("", "h20", "random:", "random:x", "norm:1", "random:-1"):
        with pytest.raises(ValueError, match=r"expected one of residual, .*streaming, h2o, .*random:SEED.*operators"):
            Selection(8, scores=name)
    for name in ("streaming", "h2o"):
        with pytest.raises(ValueError, match="expected budget, or a number as window"):
            Selection(size=8, scores=name)
    assert Selection(size=8, scores="h2o", window=8).slots(100).selected == 8
    with pytest.raises(levattn.NonFiniteError):
        pruned_attention(
            np.full((9, 2), np.nan), np.full((9, 2), np.nan), np.ones((9, 2)), Selection(4, scores="norm")
        )


@pytest.mark.parametrize("name", ["norm", "random"])
def test_scores_of_large_keys_do_not_overflow(name: str) -> None:
    Q, K, V = np.random.default_rng(0).standard_normal((3, 40, 8))
    found = []
    for size in (1.0, 2.0**500):
        few = Selection(size=9, scores=name)
        _, certificate = pruned_attention(Q / size, K * size, V, few, return_certificate=True)
        found.append(certificate.kept)
    assert np.array_equal(*found)
