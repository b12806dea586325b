"""Constrained rows: beside free ones on one rank, on two, each of which masks for itself (gloo), and paused."""

from concurrent.futures import ThreadPoolExecutor

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


@pytest.mark.parametrize("backend", ["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)])
def test_a_paused_row_goes_on_where_it_was(checkpoints, backend: str) -> None:
    numbers = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "array", "items": numbers, "minItems": 20, "maxItems": 25}
    flags = ("--max_total_token_num", "300", "--schedule_policy", "aggressive", "--grammar_backend", backend)
    with start_server(checkpoints("llama"), *flags) as server, ThreadPoolExecutor(10) as pool:

        def ask(seed: int) -> str:
            return server.text("A" * seed, guided_json=schema, temperature=1.0, seed=seed, max_new_tokens=150)

        alone = [ask(seed) for seed in range(1, 11)]
        before = server.load()["pauses_total"]
        assert list(pool.map(ask, range(1, 11))) == alone
        assert server.load()["pauses_total"] > before
