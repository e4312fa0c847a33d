"""What the report of a pruned model costs: calls with measure=None, the default, and True, beside measure=False.

Bar: the calls of the default take at most 1.03 times as long as without measuring. By default each layer is measured
in one of 64 calls. So a round is 16 calls of a model of 4 layers, in which one of them is measured. A first call does
not count. The calls of all ways are interleaved in one process, and ratios are medians over rounds. The models, an
encoder like BERT and a decoder like Llama, have random weights. They read 1024 and 4096 tokens with 25 % of the keys.

    python examples/benchmarks/measuring.py [--rounds 7] [--lengths 1024 4096] [--threads 2]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import warnings
from typing import Any

import torch
import transformers
from _rivals import THREADS, once, table, verdict

import levattn
from levattn.attention import Selection
from levattn.integrations.transformers import prune

BUDGET, BAR = 0.25, 1.03
CALLS = {False: 16, None: 16, True: 2}  # of a round, by measure
SIZES = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 6}


def encoder(n: int) -> Any:
    config = transformers.BertConfig(**SIZES, vocab_size=999, max_position_embeddings=n)
    return transformers.BertModel(config).eval()


def decoder(n: int) -> Any:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=999, max_position_embeddings=n)
    config.use_cache = False
    return transformers.LlamaModel(config).eval()


@torch.no_grad()
def seconds(model: Any, n: int, rounds: int) -> list[dict[bool | None, float]]:
    """Return the mean seconds of a call in each round, by measure."""
    tokens = torch.randint(999, (1, n), generator=torch.Generator().manual_seed(0))
    models = {measure: copy.deepcopy(model) for measure in CALLS}
    for measure, pruned in models.items():
        prune(pruned, Selection(BUDGET, start=0), measure=measure)
        pruned(tokens)
    found = []
    for _ in range(rounds):
        taken: dict[bool | None, list[float]] = {measure: [] for measure in CALLS}
        for number in range(max(CALLS.values())):
            for measure in (False, None, True) if number % 2 else (None, False, True):
                if number < CALLS[measure]:
                    taken[measure].append(once(lambda pruned=models[measure]: pruned(tokens)))  # type: ignore[misc]
        found.append({measure: statistics.mean(times) for measure, times in taken.items()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--threads", type=int, default=THREADS)
    options = parser.parse_args()
    warnings.simplefilter("ignore", levattn.RecallWarning)
    torch.set_num_threads(options.threads)
    rows, told = [], []
    with levattn.thread_limit(options.threads):
        for make in (encoder, decoder):
            for n in options.lengths:
                torch.manual_seed(0)
                found = seconds(make(n), n, options.rounds)
                times = {measure: statistics.median(each[measure] for each in found) for measure in CALLS}
                ratios = [statistics.median(each[way] / each[False] for each in found) for way in (None, True)]
                name = f"{make.__name__}, {n} tokens"
                rows.append([name, *(f"{time:.3f}" for time in times.values()), *(f"{ratio:.3f}" for ratio in ratios)])
                told.append(f"{name}: default / unmeasured: {verdict(ratios[0], BAR, at_least=False)}")
                print(*rows[-1], flush=True)
    print(f"\n{options.threads} threads; seconds of a call")
    table(["model", "False", "None", "True", "None / False", "True / False"], rows)
    print("\n".join(told))


if __name__ == "__main__":
    main()
