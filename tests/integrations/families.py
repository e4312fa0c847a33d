"""All families of causal models in transformers, each as a tiny one with random weights."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES  # noqa: E402

VOCABULARY = 60
LARGEST = 4_000_000  # parameters of a tiny model
# What configs call their sizes: those that a config has are set
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_inner", "ffn_hidden_size", "dff"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "d_ff", "moe_intermediate_size", "inner_size"), 48),
    **dict.fromkeys(
        ("shared_expert_intermediate_size", "expert_ffn_hidden_size", "prefix_dense_intermediate_size"), 48
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    "head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 6,
    "rotary_dim": 4,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "is_decoder": True,
    "add_cross_attention": False,
}


def options_of(kind: Any) -> set[str]:
    """What a class of configs takes."""
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    return set(inspect.signature(kind.__init__).parameters)


# What configs need besides, tried one after the other
WAYS: tuple[dict[str, Any], ...] = (
    {"layer_types": ["sliding_attention", "full_attention"]},
    {},
    {"num_key_value_heads": 4, "qk_head_dim": 16},
    {"bos_token_id": 1, "eos_token_id": 2},
    {"num_hidden_layers": 4, "num_layers": 4},
    {"attention_types": [[["global", "local"], 1]], "num_experts_per_tok": 1, "window_size": 6},
    {"num_hidden_layers": 3},
)


def model_of(model_type: str, implementation: str | None = None, **sizes: Any) -> Any:
    """A tiny model of a family, or raise ValueError with the reason why there is none."""
    kind = getattr(transformers, NAMES[model_type], None)
    if kind is None:
        raise ValueError("not in this transformers")
    found: list[Any] = []
    for way in WAYS:
        try:
            config = _config(CONFIG_MAPPING[model_type], way, sizes)
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(config).parameters())
            if size > LARGEST:
                raise ValueError(f"no smaller than {size} parameters")
            torch.manual_seed(0)
            model = kind(config)
            if implementation is not None:
                model = kind._from_config(config, attn_implementation=implementation)
            model.eval()
            with torch.no_grad():
                model(torch.arange(1, 6)[None])
        except Exception as error:
            found.append(error)
            continue
        return model
    raise ValueError(f"cannot be made tiny: {type(found[1]).__name__}: {found[1]}")


def _config(kind: Any, way: dict[str, Any], sizes: dict[str, Any]) -> Any:
    names = options_of(kind)
    if "layer_types" in way and not {"layer_types", "sliding_window"} <= names:
        raise ValueError("has no layers that slide")
    return kind(**{name: value for name, value in {**SIZES, **way, **sizes}.items() if name in names})
