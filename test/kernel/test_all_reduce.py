"""Sums over ranks in one shot: real processes, under Triton's interpreter on mapped files or on GPUs."""

import pytest
import torch
import torch.multiprocessing as mp
from kernel.all_reduce_ranks import rank_main

ON_GPUS = torch.cuda.device_count() >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_right_and_the_same_on_every_rank(dtype, tmp_path, monkeypatch) -> None:
    if not ON_GPUS:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    mp.spawn(rank_main, (2, str(tmp_path), dtype, 400 if ON_GPUS else 6), nprocs=2)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() in (2, 3), reason="needs no GPU or four")
def test_three_ranks_add_in_the_same_order(tmp_path, monkeypatch) -> None:
    if not ON_GPUS:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    mp.spawn(rank_main, (3, str(tmp_path), torch.float32, 3), nprocs=3)
