"""Two ranks on GPUs, with and without CUDA graphs and shared memory, give the tokens of one.

Where there are no two GPUs they run on CPUs over gloo.
"""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from gpu.tensor_parallel_ranks import answers, rank_main, replay_in_any_order, sum_while_computing
from support.step_driver import save_random_model

from lightllm.distributed.parallel_state import ParallelState

ON_GPUS = torch.cuda.device_count() >= 2
MODELS = {
    "vocab 321": ("llama", dict(vocab_size=321)),
    "3 kv heads": ("llama", dict(hidden_size=384, num_attention_heads=6, num_key_value_heads=3, head_dim=64)),
    "norms behind": ("gemma2", dict(head_dim=64)),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tp")
    for name, (family, sizes) in MODELS.items():
        save_random_model(path / name, family, **sizes)
    return path


def test_two_ranks_give_the_tokens_of_one(directory) -> None:
    vocabularies = {name: sizes.get("vocab_size", 320) for name, (_, sizes) in MODELS.items()}
    device = torch.device("cuda" if ON_GPUS else "cpu")
    alone = {
        name: answers(directory / name, vocab, ParallelState(), device, ()) for name, vocab in vocabularies.items()
    }
    mp.spawn(rank_main, (2, str(directory), vocabularies), nprocs=2)
    for rank in range(2):
        found = torch.load(directory / f"tokens-{rank}.pt")
        assert len(found) == len(MODELS) * (3 if ON_GPUS else 1)
        for (name, *way), tokens in found.items():
            assert tokens == alone[name], (name, rank, way)


@pytest.mark.skipif(not ON_GPUS, reason="needs two GPUs")
def test_sums_may_be_taken_while_others_are_computed(tmp_path) -> None:
    mp.spawn(sum_while_computing, (2, str(tmp_path)), nprocs=2)


@pytest.mark.skipif(not ON_GPUS, reason="needs two GPUs")
def test_graphs_of_sums_may_follow_each_other_in_any_order(tmp_path) -> None:
    mp.spawn(replay_in_any_order, (2, str(tmp_path), 3000), nprocs=2)
