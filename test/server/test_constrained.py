"""Constrained rows beside free ones: on one rank, and on two, each of which masks for itself (gloo)."""

from __future__ import annotations

import pytest
from support.constrained import assert_constraints_hold
from support.server import start_server


def test_on_one_rank(rand) -> None:
    assert_constraints_hold(rand)


@pytest.mark.parametrize("vocabulary", [321])
def test_on_two_ranks_of_an_odd_vocabulary(checkpoints, vocabulary: int) -> None:
    model_dir = checkpoints("llama", vocab_size=vocabulary)
    with start_server(model_dir, "--tp", "2", "--max_total_token_num", "4096") as server:
        assert_constraints_hold(server)
