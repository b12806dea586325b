"""Ranks that ask each other whether they failed alike, a rank that the others lose, ranks that each sum a half."""

import pytest
import torch.multiprocessing as mp
from distributed.halves_ranks import over_gloo
from distributed.ranks import agree, lose_a_rank

from lightllm.distributed.parallel_state import ParallelState


@pytest.mark.parametrize("run", [agree, lose_a_rank, over_gloo])
def test_two_ranks(run, tmp_path) -> None:
    mp.spawn(run, (2, str(tmp_path / "meet")), nprocs=2)


def test_one_rank_agrees_with_itself() -> None:
    assert ParallelState().alike("anything", 0.0)
