"""TP 2 and 4 in real processes (gloo; nccl where GPUs suffice) give what one rank gives: cases 66, 67, 90 (greedy)."""

import pytest
import torch
import torch.multiprocessing as mp
from model.harness import load, make_reference
from model.tp_ranks import CONFIGS, answer, rank_main

from lightllm.distributed.parallel_state import ParallelState


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tp")
    for name, config in CONFIGS.items():
        model = make_reference(config)
        with torch.no_grad():  # the very last token is likely
            model.lm_head.weight[-1] *= 10
        model.save_pretrained(path / name)
    return path


@pytest.fixture(scope="module")
def alone(directory):
    return {name: answer(load(directory / name)) for name in CONFIGS}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
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
