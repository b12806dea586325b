"""What every rank of test_tensor_parallel runs, in a module that a spawned process can import."""

from __future__ import annotations

import torch
import transformers as T
from model.harness import SIZES, Driver, load, random_ids

from lightllm.distributed.parallel_state import ParallelState

TWELVE = SIZES | dict(num_attention_heads=12, head_dim=8, hidden_size=48, intermediate_size=48, num_hidden_layers=2)
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
    "glm": T.GlmConfig(**TWELVE),
    "gpt_bigcode": T.GPTBigCodeConfig(n_embd=48, n_layer=2, n_head=12, vocab_size=131, initializer_range=0.2),
    "olmo2": T.Olmo2Config(**TWELVE | dict(hidden_size=96)),
    "phi": T.PhiConfig(**TWELVE | dict(hidden_size=96)),
    "phi3": T.Phi3Config(**TWELVE),
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
    answers = {name: answer(load(f"{directory}/{name}", parallel, device=device)) for name in CONFIGS}
    torch.save(answers, f"{directory}/answers-{size}-{rank}.pt")
