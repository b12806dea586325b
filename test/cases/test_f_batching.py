"""Cases f of the bug bank: the same tokens whoever else is served, and however a prompt is cut."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from support.checkpoints import Greedy, random_prompt, reference
from support.server import RunningServer, assert_greedy

POOL = ("--max_total_token_num", "20000")
CHUNKED = (*POOL, "--chunked_prefill_size", "16")


def greedy(server: RunningServer, prompts: Iterator[tuple[int, int]], seed: int = 0) -> list[Greedy]:
    """References of (prompt length, output length)s."""
    path = Path(str(server.model_dir))
    return [reference(path, random_prompt(length, seed), n) for length, n in prompts]


@pytest.mark.parametrize("way", ["at_once", "staggered"])
def test_case_83_batch_against_single(serve, way: str) -> None:
    server = serve("llama", *POOL)
    expected = greedy(server, ((1 + 199 * i // 63, 1 + i * 37 % 100) for i in range(64)))
    with ThreadPoolExecutor(64) as pool:
        done = []
        for i, one in enumerate(expected):
            done.append(pool.submit(assert_greedy, server, one, stream=i % 2 == 1))
            if way == "staggered":
                time.sleep(0.02)
        for one in done:
            one.result()


@pytest.mark.parametrize("running", ["1", pytest.param("5", marks=pytest.mark.slow)])
def test_case_83_with_few_rows(serve, running: str) -> None:
    """Rows are used again and again."""
    server = serve("llama", *POOL, "--running_max_req_size", running)
    expected = greedy(server, ((1 + i * 29 % 120, 1 + i * 7 % 30) for i in range(24)))
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(partial(assert_greedy, server), expected))


def test_case_83_with_a_small_pool(serve) -> None:
    """Slots are scattered, requests wait for each other, nobody is paused or wrong."""
    server = serve("llama", "--max_total_token_num", "300")
    expected = greedy(server, ((1 + i * 29 % 150, 1 + i * 7 % 60) for i in range(24)))
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(partial(assert_greedy, server), expected))


@pytest.mark.parametrize("family", ["llama", "mistral", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_case_86_chunked_prefill(serve, family: str) -> None:
    """Prompts around the chunk's size, while others decode; mistral has a window of 24."""
    server = serve(family, *CHUNKED)
    lengths = (1, 15, 16, 17, 31, 32, 33, 48, 200)
    expected = greedy(server, ((length, 20) for length in lengths))
    background = greedy(server, ((5, 150), (40, 150)), seed=1)
    with ThreadPoolExecutor(len(lengths) + 2) as pool:
        decoding = [pool.submit(assert_greedy, server, one, stream=True) for one in background]
        for one in expected:
            assert_greedy(server, one, stream=True)
        list(pool.map(partial(assert_greedy, server), expected))
        for one in decoding:
            one.result()


def test_case_86_usage_and_first_event(serve) -> None:
    """Nothing comes before the first real token, and a chunk is no token."""
    server = serve("llama", *CHUNKED)
    (expected,) = greedy(server, ((200, 1),))
    (event,) = server.stream(expected.prompt, do_sample=False, ignore_eos=True, max_new_tokens=1)
    assert event["token"]["id"] == expected.tokens[0]
    answer = server.generate(expected.prompt, do_sample=False, ignore_eos=True, max_new_tokens=1)
    assert (answer["prompt_tokens"], answer["count_output_tokens"]) == (200, 1)


def test_case_86_parameters_wait_for_the_last_chunk(serve) -> None:
    """A prompt in chunks is one prompt: for penalties, for prompt_logprobs, for n and for a seed."""
    whole, chunked = serve("llama", *POOL), serve("llama", *CHUNKED)
    prompt = random_prompt(100)
    for asked in (
        dict(do_sample=False, repetition_penalty=1.5),
        dict(do_sample=False, presence_penalty=1.0, input_penalty=True),
        dict(temperature=0.8, seed=4, n=3),
        dict(do_sample=False, logit_bias={"65": 5.0}, min_new_tokens=5),
    ):
        asked |= dict(max_new_tokens=20, ignore_eos=True)
        assert chunked.generate(prompt, **asked)["generated_text"] == whole.generate(prompt, **asked)["generated_text"]
    logprobs = [
        server.generate(prompt, prompt_logprobs=2, max_new_tokens=1)["prompt_logprobs"] for server in (whole, chunked)
    ]
    assert logprobs[0][0] is logprobs[1][0] is None
    for one, other in zip(logprobs[0][1:], logprobs[1][1:], strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_case_86_a_small_step(serve) -> None:
    """batch_max_tokens below what the prompts need: they take several steps."""
    server = serve("llama", *POOL, "--batch_max_tokens", "64", "--chunked_prefill_size", "48")
    expected = greedy(server, ((1 + i * 61 % 200, 10) for i in range(20)))
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(partial(assert_greedy, server), expected))
