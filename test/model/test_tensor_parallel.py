"""TP 2 and 4 over gloo in real processes give what one rank gives: cases 66, 67 and 90 (greedy)."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
import transformers as T
from model.harness import SIZES, Driver, load, make_reference, random_ids

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
}
NEW_TOKENS = 6


def prompts(vocab: int) -> list[list[int]]:
    return [[vocab - 1, *random_ids(20, vocab=vocab), vocab - 1], random_ids(3, vocab=vocab)]


def answer(model) -> tuple[torch.Tensor, list[list[int]]]:
    asked = prompts(model.vocab_size)
    return Driver(model).prefill(asked[0], 7)[1], Driver(model).generate(asked, NEW_TOKENS, 7)


def rank_main(rank: int, size: int, directory: str) -> None:
    torch.set_num_threads(1)
    parallel = ParallelState.init(rank, size, "gloo", f"{directory}/meet{size}")
    answers = {name: answer(load(f"{directory}/{name}", parallel)) for name in CONFIGS}
    torch.save(answers, f"{directory}/answers-{size}-{rank}.pt")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tp")
    for name, config in CONFIGS.items():
        model = make_reference(config)
        with torch.no_grad():  # the very last token is what a greedy answer begins with
            model.lm_head.weight[-1] *= 4
        model.save_pretrained(path / name)
    return path


@pytest.fixture(scope="module")
def alone(directory):
    return {name: answer(load(directory / name)) for name in CONFIGS}


@pytest.mark.parametrize("size", [2, 4])
def test_cases_66_67_90_ranks_agree_with_one(directory, alone, size):
    mp.spawn(rank_main, (size, str(directory)), nprocs=size)
    for rank in range(size):
        answers = torch.load(directory / f"answers-{size}-{rank}.pt")
        for name, (logits, ids) in alone.items():
            got, got_ids = answers[name]
            assert got.shape[-1] == CONFIGS[name].vocab_size
            torch.testing.assert_close(got, logits, rtol=0, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
            assert got_ids == ids, name


def test_case_67_the_last_id_is_answered(alone):
    for name in ("vocab 321", "vocab 323, tied"):
        last = CONFIGS[name].vocab_size - 1
        assert any(last in ids for ids in alone[name][1])


def test_a_quarter_of_the_kv_heads_is_held(directory):
    parallel = ParallelState(rank=0, size=4)
    held = [load(directory / name, parallel, load_format="random").kv_heads for name in ("llama", "kv 1", "kv 3")]
    assert held == [1, 1, 3]
