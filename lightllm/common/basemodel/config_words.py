"""How configs of different families spell the same thing, and what transformers assumes for words they leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightllm.common.basemodel.config_reader import RawConfig

ALIASES: dict[str, tuple[str, ...]] = {  # the spelling used here: what others write
    "attention_bias": ("bias",),
    "head_dim": ("kv_channels",),
    "hidden_act": ("hidden_activation", "activation_function"),
    "hidden_size": ("n_embd", "n_embed"),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "seq_length", "model_max_length"),
    "num_attention_heads": ("n_head",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon"),
    "vocab_size": ("padded_vocab_size",),
}

LEGACY_ACTIVATIONS = {("gemma", "gelu"): "gelu_pytorch_tanh"}  # what the first releases said, and what they meant
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "relu")  # see feed_forward.py
WITH_TEXT_CONFIG = ("gemma3", "gemma4", "llama4")  # families whose config.json holds one config for text and others
STRETCHED_CONTEXT = ("gemma3_text",)  # tell the length after linear scaling
LONGER_CONTEXT = ("cohere",)  # tell as model_max_length for how much they were trained: Command-R, 16 times as much


def _every(period: int) -> Any:
    """layer_types in which every `period`-th layer has no window."""
    kinds = ["sliding_attention"] * (period - 1) + ["full_attention"]
    return lambda raw: [kinds[i % period] for i in range(raw.size("num_hidden_layers"))]


def _four_times_hidden(raw: RawConfig) -> int:
    return 4 * raw.size("hidden_size")


def _groups_of_chatglm(raw: RawConfig) -> int | None:
    return raw.size("multi_query_group_num") if raw.flag("multi_query_attention") else None


_QWEN = {
    "max_position_embeddings": 32768, "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip


def _moe_layers_of_llama4(raw: RawConfig) -> list[int]:
    step = raw.size("interleave_moe_layer_step", 1)
    return list(range(step - 1, raw.size("num_hidden_layers"), step))


def _full_layers_of_gemma4(raw: RawConfig) -> dict[str, dict[str, int]]:
    """What layers without a window have of their own."""
    own = {"head_dim": raw.size("global_head_dim")}
    if raw.flag("attention_k_eq_v") and raw.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = raw.size("num_global_key_value_heads")
    return {str(i): own for i, kind in enumerate(raw.get("layer_types")) if kind == "full_attention"}


_LAYER_NORM = {"rms_norm_eps": 1e-5}
_MLA = {
    "head_dim": lambda raw: raw.size("qk_rope_head_dim"), "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_GEMMA = {
    "eos_token_id": 1, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh", "head_dim": 256,
}  # fmt: skip
_MISTRAL = {"eos_token_id": 2, "max_position_embeddings": 131072, "num_key_value_heads": 8}
_GLM = {
    "eos_token_id": [151329, 151336, 151338], "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07,
    "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5,
}  # fmt: skip
_COHERE = _LAYER_NORM | {
    "eos_token_id": 255001, "max_position_embeddings": 8192, "tie_word_embeddings": True, "logit_scale": 0.0625,
}  # fmt: skip

# A value may be a function of the rest of the config. Only families that name `sliding_window` have a window, and only
# those that name `partial_rotary_factor` turn a part of a head. A line is about one topic: sizes, positions, experts.
# fmt: off
DEFAULTS: dict[str, dict[str, Any]] = {
    "baichuan": {"eos_token_id": 2, "max_position_embeddings": 4096},
    "bloom": _LAYER_NORM | {
        "eos_token_id": 2, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "intermediate_size": _four_times_hidden,
    },
    "chatglm": {
        "rms_norm_eps": 1e-5, "num_key_value_heads": _groups_of_chatglm,
        "attention_bias": lambda raw: raw.flag("add_bias_linear") or raw.flag("add_qkv_bias"),
        "partial_rotary_factor": 0.5, "rope_theta": lambda raw: 10000 * raw.number("rope_ratio", 1),
    },
    "cohere": _COHERE | {"rope_theta": 500000.0},
    "cohere2": _COHERE | {"sliding_window": 4096, "layer_types": _every(4)},
    "deepseek_v2": _MLA | {
        "eos_token_id": 2, "num_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2,
    },
    "deepseek_v3": _MLA | {
        "eos_token_id": 1, "max_position_embeddings": 4096, "num_key_value_heads": 128,
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    },
    "gemma": _GEMMA | {"num_key_value_heads": 16},
    "gemma2": _GEMMA | {
        "num_key_value_heads": 4, "sliding_window": 4096, "layer_types": _every(2),
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _GEMMA | {
        "max_position_embeddings": 131072,
        "vocab_size": 262208,  # and other sizes, which the configs of models with images leave out
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 4096,
        "layer_types": lambda raw: _every(raw.size("sliding_window_pattern", 6))(raw),
    },
    "gemma4_text": _GEMMA | {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4, "global_head_dim": 512, "per_layer_config": _full_layers_of_gemma4,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
        "sliding_window": 512, "layer_types": lambda raw: [*_every(6)(raw)[:-1], "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
    "glm": _GLM,
    "glm4": _GLM,
    "glm4_moe": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True,
    },
    "gpt_bigcode": _LAYER_NORM | {
        "eos_token_id": 50256, "max_position_embeddings": 1024, "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True, "intermediate_size": _four_times_hidden,
        "num_key_value_heads": lambda raw: 1 if raw.flag("multi_query") else None, "multi_query": True,
    },
    "gpt_oss": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True,
        "rope_theta": 150000.0, "sliding_window": 128, "layer_types": _every(2),
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
        },
        "num_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    },
    "internlm2": {"eos_token_id": 2, "attention_bias": True},
    "llama": {"eos_token_id": 2},
    "llama4_text": {
        "eos_token_id": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "intermediate_size_mlp": 16384, "num_key_value_heads": 8, "head_dim": 128, "use_qk_norm": True,
        "rope_theta": 500000.0, "attention_chunk_size": 8192, "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
        "num_experts": 16, "num_experts_per_tok": 1, "moe_layers": _moe_layers_of_llama4,
    },
    "minicpm": {"eos_token_id": 2, "tie_word_embeddings": True, "scale_emb": 1, "scale_depth": 1, "dim_model_base": 1},
    "minicpm3": _MLA | {
        "eos_token_id": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        "v_head_dim": lambda raw: raw.size("hidden_size") // raw.size("num_attention_heads"),
        "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
    },
    "mistral": _MISTRAL | {"sliding_window": 4096},
    "mixtral": _MISTRAL | {
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "num_experts": 8, "num_experts_per_tok": 2,
    },
    "olmo2": {"eos_token_id": 50279, "rms_norm_eps": 1e-5},
    "phi": _LAYER_NORM | {"eos_token_id": 2, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    "phi3": {
        "eos_token_id": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
        "sliding_window": None,
    },
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN | {
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen3_moe": {k: v for k, v in _QWEN.items() if k != "max_window_layers"} | {
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    "stablelm": _LAYER_NORM | {
        "eos_token_id": 0, "max_position_embeddings": 4096, "num_key_value_heads": 32, "partial_rotary_factor": 0.25,
    },
    "starcoder2": _LAYER_NORM | {
        "eos_token_id": 50256, "max_position_embeddings": 4096, "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True, "num_key_value_heads": 2, "use_bias": True, "sliding_window": None,
    },
}
# fmt: on


def kind_of(raw: RawConfig) -> str:
    """The model_type, or where published models of several kinds share it, a name for the kind."""
    if raw.model_type != "gemma4_text":
        return raw.model_type
    if raw.flag("enable_moe_block"):
        return "gemma4_moe"
    return "gemma4_e" if raw.count("hidden_size_per_layer_input") else "gemma4_text"
