"""Every family against transformers: logits within 1e-4 in float32, and the same greedy tokens."""

import pytest
import torch
import transformers as T
from model.harness import (
    SIZES,
    Driver,
    load,
    make_reference,
    random_ids,
    reference_generate,
    reference_logits,
)
from model.remote_code import BUILDERS

from lightllm.common.basemodel import normed
from lightllm.common.basemodel.layer_weights import base_layer_weight
from lightllm.common.basemodel.triton_kernel.skinny_linear import SkinnyConfig

_LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=5e5)
_YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=24, rope_theta=1e4)
_FACTORS = dict(short_factor=[1.0 + 0.1 * i for i in range(8)], long_factor=[2.0 + i for i in range(8)])
_LONG = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=30, **_FACTORS)
_LONG_PART = _LONG | dict(partial_rotary_factor=0.75, short_factor=[1.0] * 6, long_factor=[2.0, 3, 4, 5, 6, 7])
_SMALL = {k: SIZES[k] for k in ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")} | dict(
    hidden_size=48
)
_FOUR = SIZES | dict(num_hidden_layers=4)
_CAPS = dict(query_pre_attn_scalar=40, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)
_QWEN_MOE = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24)
_DEEPSEEK_MOE = dict(
    moe_intermediate_size=24, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, n_shared_experts=2,
    routed_scaling_factor=1.5, first_k_dense_replace=1,
)  # fmt: skip
_MLA = dict(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
_MLA |= dict(num_key_value_heads=4)
_MSCALE = _YARN | dict(mscale=0.7, mscale_all_dim=1.3)
_LLAMA4 = dict(
    attention_chunk_size=8, num_local_experts=4, num_experts_per_tok=2, intermediate_size_mlp=80, floor_scale=4
)
_GEMMA4 = dict(
    layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8,
    head_dim=16, global_head_dim=32, num_global_key_value_heads=1, vocab_size_per_layer_input=SIZES["vocab_size"],
)  # fmt: skip

CONFIGS = {
    "llama": T.LlamaConfig(**SIZES),
    "llama-odd": T.LlamaConfig(**SIZES | dict(vocab_size=97, hidden_size=60, intermediate_size=55, head_dim=22)),
    "llama-mha": T.LlamaConfig(**SIZES | dict(num_key_value_heads=4)),
    "llama-mqa": T.LlamaConfig(**SIZES | dict(num_key_value_heads=1)),
    "llama-bias": T.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=24),
    "llama-tied": T.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-gelu": T.LlamaConfig(**SIZES, hidden_act="gelu"),
    "llama-linear": T.LlamaConfig(**SIZES, rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=1e4)),
    "llama-dynamic": T.LlamaConfig(
        **SIZES | dict(max_position_embeddings=32),
        rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1e4),
    ),
    "llama-yarn": T.LlamaConfig(**SIZES, rope_parameters=_YARN),
    "llama-llama3": T.LlamaConfig(**SIZES, rope_parameters=_LLAMA3 | dict(original_max_position_embeddings=24)),
    "llama-longrope": T.LlamaConfig(**SIZES, rope_parameters=_LONG),
    "qwen2": T.Qwen2Config(**SIZES),
    "qwen2-tied": T.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-window": T.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": T.Qwen3Config(**SIZES, head_dim=32),
    "qwen3-bias-window": T.Qwen3Config(
        **SIZES, head_dim=32, attention_bias=True, use_sliding_window=True, sliding_window=9, max_window_layers=2
    ),
    "mistral": T.MistralConfig(**SIZES, sliding_window=7),
    "mistral-full": T.MistralConfig(**SIZES, sliding_window=None, head_dim=32),
    "bloom": T.BloomConfig(**_SMALL, n_layer=3, n_head=6),
    "cohere": T.CohereConfig(**SIZES, logit_scale=0.3, use_qk_norm=True, attention_bias=True),
    "deepseek_v2": T.DeepseekV2Config(**_FOUR | _MLA, **_DEEPSEEK_MOE, topk_method="group_limited_greedy"),
    "deepseek_v2-lite": T.DeepseekV2Config(
        **_FOUR | _MLA | dict(q_lora_rank=None, attention_bias=True), **_DEEPSEEK_MOE, rope_parameters=_MSCALE
    ),
    "deepseek_v3": T.DeepseekV3Config(**_FOUR | _MLA, **_DEEPSEEK_MOE),
    "deepseek_v3-yarn": T.DeepseekV3Config(**_FOUR | _MLA, **_DEEPSEEK_MOE, rope_parameters=_MSCALE),
    "gemma": T.GemmaConfig(**SIZES, head_dim=32),
    "cohere2": T.Cohere2Config(**_FOUR, logit_scale=0.3, sliding_window=8, head_dim=24),
    "gemma2": T.Gemma2Config(**_FOUR, head_dim=32, sliding_window=8, **_CAPS),
    "gemma3": T.Gemma3TextConfig(
        **_FOUR, head_dim=32, sliding_window=9, query_pre_attn_scalar=40, sliding_window_pattern=2
    ),
    "gemma4": T.Gemma4TextConfig(**_FOUR, **_GEMMA4, hidden_size_per_layer_input=0, attention_k_eq_v=True),
    "gemma4-e": T.Gemma4TextConfig(
        **_FOUR, **_GEMMA4, hidden_size_per_layer_input=12, num_kv_shared_layers=2, use_double_wide_mlp=True
    ),
    "gemma4-moe": T.Gemma4TextConfig(
        **_FOUR,
        **_GEMMA4,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=24,
        attention_k_eq_v=True,
        final_logit_softcapping=3.0,
    ),
    "glm": T.GlmConfig(**SIZES, head_dim=16),
    "glm4": T.Glm4Config(**SIZES, head_dim=16),
    "glm4_moe": T.Glm4MoeConfig(**_FOUR, **_DEEPSEEK_MOE, use_qk_norm=True, attention_bias=True, head_dim=16),
    "gpt_bigcode": T.GPTBigCodeConfig(**_SMALL, n_layer=3, n_head=4, n_positions=256, n_inner=96),
    "gpt_bigcode-mha": T.GPTBigCodeConfig(**_SMALL, n_layer=3, n_head=4, n_positions=256, multi_query=False),
    "gpt_oss": T.GptOssConfig(**_FOUR, num_local_experts=5, num_experts_per_tok=2, head_dim=16, sliding_window=7),
    "llama4": T.Llama4TextConfig(**_FOUR, **_LLAMA4, no_rope_layer_interval=2, head_dim=16),
    "llama4-dense": T.Llama4TextConfig(
        **_FOUR, **_LLAMA4, interleave_moe_layer_step=2, use_qk_norm=False, attn_temperature_tuning=False, head_dim=24
    ),
    "minicpm3": T.MiniCPM3Config(**SIZES | _MLA, scale_emb=3, scale_depth=1.2, dim_model_base=16),
    "mixtral": T.MixtralConfig(**SIZES, num_local_experts=5, sliding_window=9),
    "olmo2": T.Olmo2Config(**SIZES),
    "phi": T.PhiConfig(**SIZES),
    "phi-norms": T.PhiConfig(**SIZES, qk_layernorm=True, rope_parameters=dict(partial_rotary_factor=0.25)),
    "phi3": T.Phi3Config(**SIZES, sliding_window=9),
    "phi3-part": T.Phi3Config(**SIZES, rope_parameters=_LONG_PART),
    "qwen2_moe": T.Qwen2MoeConfig(**SIZES, **_QWEN_MOE, shared_expert_intermediate_size=40),
    "qwen2_moe-dense": T.Qwen2MoeConfig(**SIZES, **_QWEN_MOE, decoder_sparse_step=2, norm_topk_prob=True),
    "qwen3_moe": T.Qwen3MoeConfig(**SIZES, **_QWEN_MOE, norm_topk_prob=True, head_dim=32),
    "qwen3_moe-dense": T.Qwen3MoeConfig(**SIZES, **_QWEN_MOE, mlp_only_layers=[1], head_dim=16),
    "stablelm": T.StableLmConfig(**SIZES, use_qkv_bias=True),
    "stablelm-parallel": T.StableLmConfig(**SIZES, use_parallel_residual=True, qk_layernorm=True),
    "starcoder2": T.Starcoder2Config(**SIZES, sliding_window=8),
}
LENGTHS = (1, 17, 45)
NEW_TOKENS = 8
NEAR_TIE = "choose another seed: the greedy path of the reference is a near tie"


class Golden:
    """One family's checkpoint, our model of it, and what the reference says."""

    def __init__(self, name, path):
        if name in CONFIGS:
            vocab = CONFIGS[name].vocab_size
            self.prompts = [random_ids(n, seed=n, vocab=vocab) for n in LENGTHS]
            self._ask_transformers(CONFIGS[name], path)
        else:
            self.prompts = [random_ids(n, seed=n) for n in LENGTHS]
            self._ask(BUILDERS[name](path))
        self.model = load(path)

    def _ask_transformers(self, config, path):
        """Computed afresh for every prompt: transformers' dynamic rope remembers the longest sequence it has seen."""
        make_reference(config).save_pretrained(path)
        self.logits = [reference_logits(make_reference(config), ids) for ids in self.prompts]
        answers = [reference_generate(make_reference(config), ids, NEW_TOKENS) for ids in self.prompts]
        self.tokens, gaps = zip(*answers)
        assert min(gaps) > 1e-3, NEAR_TIE

    def _ask(self, reference):
        self.logits = [reference(ids) for ids in self.prompts]
        self.tokens = []
        for prompt in self.prompts:
            ids = list(prompt)
            for _ in range(NEW_TOKENS):
                (best, second), (token, _) = reference(ids)[-1].topk(2)
                assert best - second > 1e-3, NEAR_TIE
                ids.append(token.item())
            self.tokens.append(ids[len(prompt) :])


@pytest.fixture(scope="module", params=[*CONFIGS, *BUILDERS])
def golden(request, tmp_path_factory):
    return Golden(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("chunk", [10**6, 16, 1])
def test_prefill_logits(golden, chunk):
    driver = Driver(golden.model)
    for ids, want in zip(golden.prompts, golden.logits):
        _, got = driver.prefill(ids, chunk)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", [10**6, 7])
def test_batch_of_all_prompts_decodes_as_transformers_does(golden, chunk):
    """Cases 83 and 86: mixed steps of chunks and decode rows."""
    assert Driver(golden.model).generate(golden.prompts, NEW_TOKENS, chunk) == list(golden.tokens)


def test_alone(golden):
    ids, want = golden.prompts[-1], golden.tokens[-1]
    assert Driver(golden.model, seed=1).generate([ids], NEW_TOKENS, chunk=1) == [want]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel has configurations of its own")
def test_a_lone_token_whose_norms_and_additions_belong_to_products(golden, monkeypatch):
    lone = SkinnyConfig(1, 1, 1, dot=False, num_warps=1, num_stages=1)
    for module in normed, base_layer_weight:
        monkeypatch.setattr(module, "skinny_config", lambda lines, weight, gated=False: lone if lines == 1 else None)
    ids, want = golden.prompts[1], golden.logits[1]
    torch.testing.assert_close(Driver(golden.model).prefill(ids, chunk=1)[1], want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cached", [1, 16, 44])
def test_prefix_hit(golden, cached):
    """Case 84: a row that starts with another row's slots in place of its first positions."""
    driver, ids = Driver(golden.model), golden.prompts[-1]
    first = driver.add(ids)
    driver.step([(first, cached)])
    second = driver.add(ids, prefix=first)
    got = driver.step([(second, len(ids) - cached)], all_logits=True)
    torch.testing.assert_close(got, golden.logits[-1][cached:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("paired", [True, False])
def test_deepseek_says_what_its_rope_turns(paired, tmp_path):
    """Neighbours, as published ones have it, or a dimension of each half."""
    reference = make_reference(T.DeepseekV3Config(**_FOUR | _MLA, **_DEEPSEEK_MOE, rope_interleave=paired))
    reference.save_pretrained(tmp_path)
    ids = random_ids(45)
    got = Driver(load(tmp_path)).prefill(ids)[1]
    torch.testing.assert_close(got, reference_logits(reference, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["llama", "llama-yarn", "llama-llama3", "llama-linear", "llama-dynamic", "llama-longrope"]
)
def test_whose_prefix_another_sequence_can_use(name, tmp_path):
    """Where keys depend on the sequence's length, those of a short prompt are wrong for a long one."""
    make_reference(CONFIGS[name]).save_pretrained(tmp_path)
    model, ids = load(tmp_path), random_ids(45)
    driver = Driver(model)
    short, _ = driver.prefill(ids[:16])
    hit = driver.step([(driver.add(ids, prefix=short), 29)], all_logits=True)
    same = torch.allclose(hit, driver.prefill(ids)[1][16:], rtol=0, atol=1e-4)
    assert same is not model.config.rope.depends_on_length
