"""What every rank of test_tensor_parallel runs, in a module that a spawned process can import."""

import dataclasses

import torch
import transformers as T
from model.harness import SIZES, Driver, load, random_ids

from lightllm.distributed.parallel_state import ParallelState

TWELVE = SIZES | dict(num_attention_heads=12, head_dim=8, hidden_size=48, intermediate_size=48, num_hidden_layers=2)
MOE = dict(num_local_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
MLA = dict(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
MLA |= dict(num_key_value_heads=12)
OSS = dict(num_local_experts=8, num_experts_per_tok=2, sliding_window=7)
LLAMA4 = dict(attention_chunk_size=8, num_local_experts=4, intermediate_size_mlp=48, no_rope_layer_interval=2)
EXPERTS = dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=24, attention_k_eq_v=True)
FOUR = dict(num_hidden_layers=4)
GEMMA4 = dict(
    layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8, global_head_dim=16,
    num_global_key_value_heads=1, vocab_size_per_layer_input=131,
)  # fmt: skip
CONFIGS = {
    "llama": T.LlamaConfig(**TWELVE | dict(num_key_value_heads=4)),
    "kv 1": T.LlamaConfig(**TWELVE | dict(num_key_value_heads=1)),
    "kv 2": T.LlamaConfig(**TWELVE | dict(num_key_value_heads=2)),
    "kv 3": T.LlamaConfig(**TWELVE | dict(num_key_value_heads=3)),
    "biases": T.LlamaConfig(**TWELVE, attention_bias=True, mlp_bias=True),
    "vocab 321": T.LlamaConfig(**TWELVE | dict(vocab_size=321)),
    "vocab 323, tied": T.LlamaConfig(**TWELVE | dict(vocab_size=323), tie_word_embeddings=True),
    "qwen2": T.Qwen2Config(**TWELVE | dict(hidden_size=96)),
    "qwen3": T.Qwen3Config(**TWELVE),
    "mistral": T.MistralConfig(**TWELVE, sliding_window=7),
    "bloom": T.BloomConfig(hidden_size=48, n_layer=2, n_head=12, vocab_size=131, initializer_range=0.2),
    "cohere": T.CohereConfig(**TWELVE, use_qk_norm=True),
    "deepseek_v3": T.DeepseekV3Config(**TWELVE | MLA, **MOE, n_group=4, topk_group=2, first_k_dense_replace=1),
    "glm": T.GlmConfig(**TWELVE),
    "gpt_bigcode": T.GPTBigCodeConfig(n_embd=48, n_layer=2, n_head=12, vocab_size=131, initializer_range=0.2),
    "olmo2": T.Olmo2Config(**TWELVE | dict(hidden_size=96)),
    "phi": T.PhiConfig(**TWELVE | dict(hidden_size=96)),
    "phi3": T.Phi3Config(**TWELVE),
    "glm4_moe": T.Glm4MoeConfig(**TWELVE, **MOE, n_shared_experts=1, first_k_dense_replace=1),
    "glm4_moe, ep": T.Glm4MoeConfig(**TWELVE, **MOE, n_shared_experts=1, first_k_dense_replace=0),
    "qwen2_moe": T.Qwen2MoeConfig(**TWELVE, **MOE, shared_expert_intermediate_size=16),
    "qwen2_moe, ep": T.Qwen2MoeConfig(**TWELVE, **MOE, shared_expert_intermediate_size=16),
    "gpt_oss": T.GptOssConfig(**TWELVE, **OSS),
    "gpt_oss, ep": T.GptOssConfig(**TWELVE, **OSS),
    "llama4": T.Llama4TextConfig(**TWELVE, **LLAMA4),
    "llama4, ep": T.Llama4TextConfig(**TWELVE, **LLAMA4),
    "gemma4": T.Gemma4TextConfig(**TWELVE | FOUR, **GEMMA4, num_kv_shared_layers=2, hidden_size_per_layer_input=12),
    "gemma4, ep": T.Gemma4TextConfig(**TWELVE | FOUR, **GEMMA4, **EXPERTS, hidden_size_per_layer_input=0),
    "deepseek_v3, ep": T.DeepseekV3Config(**TWELVE | MLA, **MOE, n_group=4, topk_group=2, first_k_dense_replace=0),
    "mixtral, ep": T.MixtralConfig(**TWELVE, num_local_experts=8, sliding_window=9),
    "minicpm3": T.MiniCPM3Config(**TWELVE | MLA, scale_emb=3, scale_depth=1.2, dim_model_base=16),
    "stablelm": T.StableLmConfig(**TWELVE | dict(hidden_size=96, num_key_value_heads=4), qk_layernorm=True),
}
NEW_TOKENS = 6


def prompts(vocab: int) -> list[list[int]]:
    return [[vocab - 1, *random_ids(20, vocab=vocab), vocab - 1], random_ids(3, vocab=vocab)]


def answer(model) -> tuple[torch.Tensor, list[list[int]]]:
    asked = prompts(model.vocab_size)
    return Driver(model).prefill(asked[0], 7)[1], Driver(model).generate(asked, NEW_TOKENS, 7)


def rank_main(rank: int, size: int, directory: str) -> None:
    torch.set_num_threads(1)
    cuda = torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    parallel = ParallelState.init(rank, size, "nccl" if cuda else "gloo", f"{directory}/meet{size}")
    expert_parallel = dataclasses.replace(parallel, ep_moe=True)
    answers = {
        name: answer(load(f"{directory}/{name}", expert_parallel if "ep" in name.split() else parallel, device=device))
        for name in CONFIGS
    }
    torch.save(answers, f"{directory}/answers-{size}-{rank}.pt")
