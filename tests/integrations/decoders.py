"""What tests of changed transformers models share: tiny ones, tokens, distances, an attention written out."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from levattn.attention import Selection  # noqa: E402

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,  # large, so that attention matters
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Gemma": {"num_key_value_heads": 2, "head_dim": 8},
    "Gemma2": {  # softcap, a scale of its own, and every other layer slides
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 4,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 20,
        "attn_implementation": "eager",
    },
    "Gemma3": {  # of three layers two slide
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 4,
        "query_pre_attn_scalar": 20,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "GptOss": {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Qwen2": {"num_key_value_heads": 1},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 4},
    "GPTNeoX": {"rotary_pct": 0.5},
    "Esm": {"position_embedding_type": "rotary"},
}
# What models call their cache: since transformers 5.24, and before
CACHE = next(
    name for name in ("cache", "past_key_values") if name in signature(transformers.LlamaModel.forward).parameters
)
ENCODERS = ["Esm"] + (["Bert", "Roberta", "DistilBert"] if transformers.__version__ >= "5" else [])
T, PADDED = 20, 6
LEFT = torch.tensor([[1] * T, [0] * PADDED + [1] * (T - PADDED)])  # which positions are no padding


def of_heads(budgets: dict[tuple[int, int], float], **options: Any) -> dict[tuple[int, int], Selection]:
    """The selection of each head, with these budgets."""
    return {head: Selection(budget, **options) for head, budget in budgets.items()}


def base(family: str = "Llama", **options: Any) -> Any:
    kind = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"  # the other one reads pictures
    config = getattr(transformers, kind)(**{**SIZES, **FAMILIES.get(family, {}), **options})
    return getattr(transformers, f"{family}{'Model' if family in ENCODERS else 'ForCausalLM'}")(config).eval()


def tokens(batch: int = 2, length: int = T) -> Any:
    return torch.randint(1, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


def difference(a: Any, b: Any, real: Any = None) -> float:
    distance = (a - b).abs()
    return float((distance if real is None else distance[real.bool()]).max())


def output(model: Any, ids: Any = None, **options: Any) -> Any:
    """The logits of tokens, or the last states of an encoder."""
    with torch.no_grad():
        return model(tokens() if ids is None else ids, **options)[0]


def position_ids(real: Any) -> Any:
    return (real.cumsum(-1) - 1).clamp(min=0)


def written_out(model: Any, function: Any) -> Any:
    """The model, with this function as its attention, which looks at no mask."""
    transformers.AttentionInterface.register("written_out", function)
    transformers.AttentionMaskInterface.register(
        "written_out", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    )
    model.set_attn_implementation("written_out")
    return model
