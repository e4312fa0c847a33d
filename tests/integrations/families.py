"""All families of causal models in transformers, each as a tiny one with random weights, and the page about them.

``python tests/integrations/families.py`` writes the page; `test_families.py` checks what it says.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES  # noqa: E402

# Families with nothing but latents, states, biases of positions or keys of their own kind, which no cache of keys and
# values of each head can hold. All others must be compressed.
UNCOMPRESSED = """
    axk1 axk2 bart bigbird_pegasus blenderbot blenderbot-small bloom cpmant deepseek_v2 deepseek_v3 deepseek_v32
    deepseek_v4 diffllama dots3_note_text falcon_h1 falcon_mamba flint glm4_moe_lite glm_moe_dsa gpt_neo
    gpt_neox_japanese gpt_oss granite_swa granitemoe_swa hy_v4 inkling_text llama4_text longcat_flash mamba
    marian mbart mimo_v2_flash minicpm3 minimax mpt mvp nemotron_h olmo_hybrid openai-gpt pegasus plbart
    prophetnet qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv sarvam_mla trocr whisper xglm xlnet
    youtu zaya
"""
# Families that go past the attention interface, or add to it what pruning refuses
UNPRUNED = """
    axk2 big_bird bloom deepseek_v32 deepseek_v4 diffllama doge dory dots3_note_text falcon falcon_h1 flint gemma2
    glm_moe_dsa gpt_neo gpt_neox_japanese gpt_oss granite_swa granitemoe_swa hrm_text hy_v4 inkling_text
    llama4_text longcat_flash megatron-bert mimo_v2_flash minimax mvp olmo_hybrid openai-gpt prophetnet rembert
    roformer rwkv trocr vaultgemma xglm xlnet zaya
"""
# Families of which there is no tiny model, or whose dense cache does not answer as the whole text
UNTRIED = """
    bailing_hybrid bamba blt cohere_compass_text cpmant dbrx dory dots3_note emu3 falcon_mamba fuyu gemma3
    gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant git got_ocr2
    granitemoehybrid inkling2_loop_text inkling2_text jamba kimi_linear lfm2_moe llama4 mamba mamba2 mllama moshi
    moss_transcribe_diarize mpt musicgen musicgen_melody phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp
    qwen4_exp_text recurrent_gemma reformer roc_bert xlm xlstm xmod zamba zamba2
"""
RELEASE = "5.24."  # whose families the page lists
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
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


_OURS = "levattn.integrations.transformers"
_INTRODUCTION = f"""# Families of decoders

This page says which causal models of transformers {RELEASE}x may be compressed
({{py:func}}`~{_OURS}.compress`) and pruned
({{py:func}}`~{_OURS}.prune`). A test makes a tiny model of each family with random weights,
and compares it with itself. A compressed cache that keeps everything answers as a dense one. A model whose slots hold
all keys gives its own outputs. A family that is refused raises an error with the reason. Names are the
`model_type` of a config.

`python tests/integrations/families.py` writes this page.
"""


def page() -> str:
    """The page of the documentation about families."""
    untried, unpruned, whole = (set(names.split()) for names in (UNTRIED, UNPRUNED, UNCOMPRESSED))
    lines = [_INTRODUCTION, "| `model_type` | compressed | pruned |", "| --- | --- | --- |"]
    for name in sorted(set(NAMES) - untried):
        cells = ["refused" if name in names else "yes" for names in (whole, unpruned)]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += ["\n## Not tried\n", "No tiny model of these can be made, or its dense cache gives other answers.\n"]
    lines += [f"- `{name}`" for name in sorted(set(NAMES) & untried)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
