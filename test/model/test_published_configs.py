"""config.json of well-known checkpoints, abridged to the words that say something: what is read out of them."""

import json

import pytest
import torch

from lightllm.common.basemodel.model_config import ModelConfig
from lightllm.distributed.parallel_state import ParallelState
from lightllm.models.registry import model_class

CHATGLM3 = dict(
    model_type="chatglm", architectures=["ChatGLMModel"], add_bias_linear=False, add_qkv_bias=True, seq_length=8192,
    apply_residual_connection_post_layernorm=False, ffn_hidden_size=13696, hidden_size=4096, kv_channels=128,
    layernorm_epsilon=1e-5, multi_query_attention=True, multi_query_group_num=2, num_attention_heads=32, num_layers=28,
    padded_vocab_size=65024, post_layer_norm=True, rmsnorm=True, torch_dtype="float16", tie_word_embeddings=False,
    eos_token_id=2,
)  # fmt: skip
BAICHUAN2 = dict(
    model_type="baichuan", architectures=["BaichuanForCausalLM"], hidden_act="silu", rms_norm_eps=1e-6,
    num_hidden_layers=32, tie_word_embeddings=False, torch_dtype="bfloat16", vocab_size=125696, eos_token_id=2,
)  # fmt: skip
DEEPSEEK_V2_LITE = dict(
    model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], attention_bias=False, eos_token_id=100001,
    first_k_dense_replace=1, hidden_act="silu", hidden_size=2048, intermediate_size=10944, kv_lora_rank=512,
    max_position_embeddings=163840, moe_intermediate_size=1408, moe_layer_freq=1, n_group=1, n_routed_experts=64,
    n_shared_experts=2, norm_topk_prob=False, num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27,
    num_key_value_heads=16, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-6,
    rope_scaling=dict(
        beta_fast=32, beta_slow=1, factor=40, mscale=0.707, mscale_all_dim=0.707, type="yarn",
        original_max_position_embeddings=4096,
    ),
    rope_theta=10000, routed_scaling_factor=1.0, scoring_func="softmax", tie_word_embeddings=False, topk_group=1,
    topk_method="greedy", torch_dtype="bfloat16", v_head_dim=128, vocab_size=102400,
)  # fmt: skip
DEEPSEEK_V3 = DEEPSEEK_V2_LITE | dict(
    model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], first_k_dense_replace=3, hidden_size=7168,
    intermediate_size=18432, moe_intermediate_size=2048, n_group=8, n_routed_experts=256, n_shared_experts=1,
    norm_topk_prob=True, num_attention_heads=128, num_key_value_heads=128, num_experts_per_tok=8, num_hidden_layers=61,
    num_nextn_predict_layers=1, q_lora_rank=1536, routed_scaling_factor=2.5, topk_group=4, topk_method="noaux_tc",
    vocab_size=129280, eos_token_id=1, quantization_config=dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]
    ),
)  # fmt: skip
CONFIGS = {
    "chatglm3-6b": (CHATGLM3, dict(rotary_dim=64, max_position_embeddings=8192, num_key_value_heads=2)),
    "glm-4-9b-chat": (
        CHATGLM3 | dict(rope_ratio=500, seq_length=131072, padded_vocab_size=151552, num_layers=40,
                        eos_token_id=[151329, 151336, 151338], layernorm_epsilon=1.5625e-7),
        dict(vocab_size=151552, num_hidden_layers=40, eos_token_ids=(151329, 151336, 151338), rms_norm_eps=1.5625e-7),
    ),
    "baichuan2-7b": (
        BAICHUAN2 | dict(hidden_size=4096, intermediate_size=11008, num_attention_heads=32,
                         max_position_embeddings=4096, model_max_length=4096),
        dict(num_key_value_heads=32, max_position_embeddings=4096),
    ),
    "baichuan2-13b": (
        BAICHUAN2 | dict(hidden_size=5120, intermediate_size=13696, num_attention_heads=40, num_hidden_layers=40,
                         model_max_length=4096),
        dict(head_dim=128, max_position_embeddings=4096),
    ),
    "internlm2_5-7b": (
        dict(model_type="internlm2", architectures=["InternLM2ForCausalLM"], bias=False, hidden_act="silu",
             hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768, num_attention_heads=32,
             num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1000000, vocab_size=92544,
             rope_scaling=dict(type="dynamic", factor=2.0), tie_word_embeddings=False, torch_dtype="bfloat16"),
        dict(max_position_embeddings=65536, eos_token_ids=(2,)),
    ),
    "minicpm-2b": (
        dict(model_type="minicpm", architectures=["MiniCPMForCausalLM"], hidden_act="silu", hidden_size=2304,
             intermediate_size=5760, max_position_embeddings=4096, num_attention_heads=36, num_hidden_layers=40,
             num_key_value_heads=36, rms_norm_eps=1e-5, rope_scaling=None, scale_emb=12, dim_model_base=256,
             scale_depth=1.4, vocab_size=122753, torch_dtype="bfloat16"),
        dict(tie_word_embeddings=True, head_dim=64),
    ),
    "bloom-560m": (
        dict(model_type="bloom", architectures=["BloomForCausalLM"], n_embed=1024, n_layer=24, vocab_size=250880,
             num_attention_heads=16, seq_length=2048, layer_norm_epsilon=1e-5, pretraining_tp=1, eos_token_id=2,
             apply_residual_connection_post_layernorm=False, slow_but_exact=False, n_inner=None),
        dict(hidden_size=1024, intermediate_size=4096, max_position_embeddings=2048, tie_word_embeddings=True),
    ),
    "starcoder": (
        dict(model_type="gpt_bigcode", architectures=["GPTBigCodeForCausalLM"], activation_function="gelu",
             eos_token_id=0, layer_norm_epsilon=1e-5, multi_query=True, n_embd=6144, n_head=48, n_inner=24576,
             n_layer=40, n_positions=8192, scale_attn_weights=True, vocab_size=49152),
        dict(num_key_value_heads=1, head_dim=128, max_position_embeddings=8192, hidden_act="gelu"),
    ),
    "deepseek-v2-lite": (DEEPSEEK_V2_LITE, dict(max_position_embeddings=163840, eos_token_ids=(100001,))),
    "deepseek-v3": (DEEPSEEK_V3, dict(max_position_embeddings=163840, num_hidden_layers=61)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_read(tmp_path, name):
    values, expected = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = ModelConfig.from_pretrained(tmp_path)
    assert {field: getattr(config, field) for field in expected} == expected
    model = model_class(config.model_type)(config, ParallelState(), torch.device("cpu"))
    last_layer = model.layer_slots(config.num_hidden_layers - 1)
    assert last_layer and model.outer_slots()
    if name in ("internlm2_5-7b", "chatglm3-6b"):
        assert last_layer["qkv"].bias == (name == "chatglm3-6b") and not last_layer["o"].bias
    if name == "glm-4-9b-chat":
        assert config.rope.theta == 5e6
    if name == "baichuan2-13b":
        assert model.layers[0].attention.spec.slopes is not None
    if name == "deepseek-v2-lite":
        scale = 192**-0.5 * (0.1 * 0.707 * 3.6888794541139363 + 1) ** 2
        assert model.layers[0].attention.spec.scale == pytest.approx(scale)
        assert model.slot_shapes == [(576,)] * 27
