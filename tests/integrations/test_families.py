"""All families of causal models in transformers, tiny and random: full slots answer as dense caches, or are refused.

A family that is refused raises an error of levattn that is typed, in every test. None may differ silently.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

from decoders import CACHE  # noqa: E402
from families import NAMES, PAGE, RELEASE, UNCOMPRESSED, UNPRUNED, UNTRIED, VOCABULARY, model_of, page  # noqa: E402

import levattn  # noqa: E402
from levattn.integrations.transformers import compress, prune  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore"), pytest.mark.crossed]

QUICK = ["llama", "gpt2", "gemma3_text", "roberta", "jetmoe", "diffllama", "deepseek_v3"]
CONTEXT, PADDED, QUESTION, NEW = 19, 5, 4, 3
TOLERANCE = 2e-3  # of the largest logit: rounding in float32 over a few layers with large weights
IDS = torch.randint(3, VOCABULARY, (2, CONTEXT + QUESTION), generator=torch.Generator().manual_seed(3))
LOGITS = {
    "max_new_tokens": NEW,
    "min_new_tokens": NEW,
    "do_sample": False,
    "pad_token_id": 0,
    "output_logits": True,
    "return_dict_in_generate": True,
}


def logits(found: Any) -> Any:
    return torch.stack(found.logits, 1).float()


def dense(model: Any, ids: Any, **options: Any) -> Any:
    return logits(model.generate(ids, **LOGITS, **options))


def positions(model: Any, first: int, last: int) -> dict[str, Any]:
    """Positions as `generate` gives them, for models that take any."""
    takes = "position_ids" in levattn.integrations.transformers.calls.parameters_of(model)[0]
    return {"position_ids": torch.arange(first, last)[None]} if takes else {}


def in_plain(model: Any) -> tuple[Any, Any]:
    cache = compress(model, IDS[:1, :CONTEXT], 1.0)
    return dense(model, IDS[:1], **{CACHE: cache}), dense(model, IDS[:1])


def asked(model: Any) -> tuple[Any, Any]:
    cache = compress(model, IDS[:1, :CONTEXT], 1.0)
    return logits(cache.ask(model, IDS[:1, CONTEXT:], **LOGITS)), dense(model, IDS[:1])


def in_chunks(model: Any) -> tuple[Any, Any]:
    cache = compress(model, IDS[:1, :CONTEXT], 1.0, chunk=7)
    return logits(cache.ask(model, IDS[:1, CONTEXT:], **LOGITS)), dense(model, IDS[:1])


def in_steps(model: Any) -> tuple[Any, Any]:
    cache = compress(model, IDS[:1, :CONTEXT], 1.0)
    with torch.no_grad():
        whole = model(IDS[:1], **positions(model, 0, CONTEXT + QUESTION)).logits[:, CONTEXT:]
        steps = [
            model(IDS[:1, i : i + 1], **{CACHE: cache}, **positions(model, i, i + 1)).logits
            for i in range(CONTEXT, CONTEXT + QUESTION)
        ]
    return torch.cat(steps, 1).float(), whole.float()


def padded(side: str) -> Callable[[Any], tuple[Any, Any]]:
    def of(model: Any) -> tuple[Any, Any]:
        short, nothing = IDS[1:, : CONTEXT - PADDED], torch.zeros((1, PADDED), dtype=torch.int64)
        row = torch.cat([nothing, short] if side == "left" else [short, nothing], 1)
        ids = torch.cat([IDS[:1, :CONTEXT], row])
        cache = compress(model, {"input_ids": ids, "attention_mask": (ids > 0).long()}, 1.0)
        found = logits(cache.ask(model, IDS[:, CONTEXT:], **LOGITS))
        alone = dense(model, torch.cat([short, IDS[1:, CONTEXT:]], 1))
        return torch.cat([found[:1, 0], found[1:, 0]]), torch.cat([dense(model, IDS[:1])[:, 0], alone[:, 0]])

    return of


COMPRESSED = {
    "plain": in_plain,
    "asked": asked,
    "chunks": in_chunks,
    "steps": in_steps,
    "left": padded("left"),
    "right": padded("right"),
}


def pruned(model: Any) -> tuple[Any, Any]:
    whole = dense(model, IDS[:1])
    with prune(model, 64, measure=False):
        found = dense(model, IDS[:1])
    return torch.cat([found, dense(model, IDS[:1])]), torch.cat([whole, whole])


def pruned_in_a_batch(model: Any) -> tuple[Any, Any]:
    ids = IDS.clone()
    ids[1, :PADDED] = 0
    mask = (ids > 0).long()
    try:
        whole = dense(model, ids, attention_mask=mask)
    except RuntimeError:  # the model takes no padding
        return torch.ones(1), torch.ones(1)
    with prune(model, 64, measure=False):
        return dense(model, ids, attention_mask=mask), whole


PRUNED = {"pruned": pruned, "batch": pruned_in_a_batch}


def refused(error: Exception) -> bool:
    """Whether an error is one of levattn's, about an argument or a model."""
    own = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, ValueError | TypeError) and "levattn/integrations" in own.replace("\\", "/")


def check(model: Any, table: dict[str, Callable[[Any], tuple[Any, Any]]]) -> dict[str, str]:
    """Return what is refused, and fail for whatever differs or raises anything else."""
    found: dict[str, str] = {}
    for name, of in table.items():
        try:
            here, there = of(model)
        except Exception as error:
            if not refused(error):
                raise
            found[name] = str(error)
            continue
        assert here.shape == there.shape, name
        assert float((here - there).abs().max()) <= TOLERANCE * float(there.abs().max()), name
    return found


def tiny(family: str, implementation: str, **sizes: Any) -> Any:
    try:
        model = model_of(family, implementation, **sizes)
        whole = dense(model, IDS[:1])
    except Exception as error:  # of transformers: many kinds of models need what is not here
        pytest.skip(f"{family}: {error}")
    try:
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(IDS[:1, :CONTEXT], **{CACHE: cache}, **positions(model, 0, CONTEXT))
        found = dense(model, IDS[:1], **{CACHE: cache})
    except Exception:  # no such caches
        return model
    if float((found - whole).abs().max()) > TOLERANCE * float(whole.abs().max()):
        pytest.skip(f"{family}: a dense cache of a context does not answer as the whole text")
    return model


EACH = [
    pytest.param(family, way, marks=() if family in QUICK else pytest.mark.thorough)
    for family in NAMES
    for way in ("sdpa", "eager")
]


@pytest.mark.skipif(not transformers.__version__.startswith(RELEASE), reason="another release has other families")
def test_the_page_lists_all_families() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.thorough
@pytest.mark.skipif(not transformers.__version__.startswith(RELEASE), reason="another release has other families")
@pytest.mark.parametrize("family", NAMES)
def test_a_family_is_listed_as_untried_if_it_is(family: str) -> None:
    tried = []
    for implementation in ("sdpa", "eager"):
        try:
            tiny(family, implementation)
        except pytest.skip.Exception:
            continue
        tried.append(implementation)
    assert (family in UNTRIED.split()) == (not tried)


@pytest.mark.parametrize(("family", "implementation"), EACH)
def test_a_compressed_cache_of_all_slots_answers_as_a_dense_one(family: str, implementation: str) -> None:
    model = tiny(family, implementation)
    found = check(model, COMPRESSED)
    if family in UNCOMPRESSED.split():
        assert set(found) == set(COMPRESSED), f"{family} is compressed: {found}"
    else:  # windows count positions, and so do models that take no position_ids
        assert set(found) <= {"right"}, found
        assert "padding after tokens, which would" in found.get("right", "padding after tokens, which would")


@pytest.mark.parametrize(("family", "implementation"), EACH)
def test_slots_for_all_keys_prune_nothing(family: str, implementation: str) -> None:
    model = tiny(family, implementation, sliding_window=128)  # windows of all positions, which do not slide
    found = check(model, PRUNED)
    if family in UNPRUNED.split():
        assert "pruned" in found, f"{family} is pruned: {found}"
    else:
        assert not found, found
