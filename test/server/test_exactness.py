"""Greedy output equals transformers token for token: every family, every way to arrive, to be cut and to be spread."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.checkpoints import FAMILIES, random_prompt, reference
from support.server import RunningServer, assert_greedy, start_server

LENGTHS = (1, 2, 7, 15, 16, 17, 40, 64, 113, 199, 200)
TOKENS = 24
POOL = ("--max_total_token_num", "20000")
WHOLE = 1_000_000


def check(server: RunningServer, model: Path, alone: bool = True) -> None:
    """All prompts alone, at once, and one after the other into a running batch."""
    expected = [reference(model, random_prompt(length), TOKENS) for length in LENGTHS]
    for one in expected if alone else ():
        assert_greedy(server, one, stream=True)
    for pause in (0.0, 0.03):
        with ThreadPoolExecutor(len(expected)) as pool:
            done = []
            for one in reversed(expected):
                done.append(pool.submit(assert_greedy, server, one, stream=True))
                time.sleep(pause)
            for one in done:
                one.result()


def cases() -> list:
    """Every family with every chunk size and every number of ranks; the quick ones cover each value once."""
    quick = {
        ("llama", 1, 1),
        ("llama", WHOLE, 4),
        ("qwen2", 16, 2),
        ("qwen3", WHOLE, 1),
        ("mistral", 7, 1),
    }
    return [
        pytest.param(family, chunk, tp, marks=() if (family, chunk, tp) in quick else pytest.mark.slow)
        for family in FAMILIES
        if family != "slow"
        for chunk in (1, 7, 16, WHOLE)
        for tp in (1, 2, 4)
    ]


@pytest.mark.parametrize(("family", "chunk", "tp"), cases())
def test_tiny_checkpoints(checkpoints, family: str, chunk: int, tp: int) -> None:
    model = checkpoints(family)
    with start_server(model, *POOL, "--tp", str(tp), "--chunked_prefill_size", str(chunk)) as server:
        check(server, model, alone=tp == 1)
        server.wait_idle()


@pytest.mark.parametrize(
    "config",
    [
        dict(head_dim=16),
        dict(attention_bias=True, mlp_bias=True),
        dict(num_key_value_heads=4),
        dict(num_key_value_heads=1),
        dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=10000.0)),
        dict(
            max_position_embeddings=64,
            rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=10000.0),
        ),
        dict(
            rope_parameters=dict(
                rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=64, rope_theta=10000.0,
            )
        ),
    ],
    ids=["head_dim", "bias", "mha", "mqa", "linear", "dynamic", "llama3"],
)  # fmt: skip
@pytest.mark.slow
def test_kinds_of_llama(checkpoints, config: dict) -> None:
    model = checkpoints("llama", **config)
    with start_server(model, *POOL, "--chunked_prefill_size", "16") as server:
        room = server.get("/v1/models").json()["data"][0]["max_model_len"]
        for length in LENGTHS:
            if length + TOKENS <= room:
                assert_greedy(server, reference(model, random_prompt(length), TOKENS), stream=True)
