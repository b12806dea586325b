"""Cached prefixes and pauses on a real server: whatever is shared, evicted or interrupted, the output is the same."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import assert_same_tokens, random_prompt, reference, reference_model
from support.server import RunningServer, start_server

TOKENS = 24
P = random_prompt(100, seed=1)
X, Y = random_prompt(30, seed=2), random_prompt(40, seed=3)
UNKNOWN = range(4)  # cached tokens of a prompt that nobody sent: its first bytes may be known by chance
GREEDY: dict[str, Any] = dict(do_sample=False, ignore_eos=True, max_new_tokens=TOKENS, return_details=True)


@pytest.fixture(scope="module", params=["16", "2048"], ids=lambda chunk: f"chunk{chunk}")
def server(checkpoints, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    flags = ("--max_total_token_num", "3000", "--chunked_prefill_size", request.param)
    with start_server(checkpoints("llama"), *flags) as running:
        yield running


@pytest.fixture(autouse=True)
def idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_idle()


def check(server: RunningServer, prompt: tuple[int, ...], **parameters: Any) -> int:
    """The tokens are those of transformers; gives how many of the prompt were found."""
    answer = server.generate(prompt, **GREEDY | parameters)
    outputs = answer["tokens"] if parameters.get("n", 1) > 1 else [answer["tokens"]]
    for output in outputs:
        assert_same_tokens(reference(Path(str(server.model_dir)), prompt, TOKENS), [token["id"] for token in output])
        assert {token["cached_tokens"] for token in output} == {answer["cached_tokens"]}
    assert answer["prompt_tokens"] == len(prompt)
    return answer["cached_tokens"]


def fill(server: RunningServer) -> None:
    """A hundred other prompts, after which the cache knows nothing from before."""
    prompts = [random_prompt(60, seed) for seed in range(100, 200)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda prompt: server.generate(prompt, ignore_eos=True, max_new_tokens=2), prompts))
    assert server.load()["cached_tokens"] > 2000


# ---- case 84 of the bug bank


def test_what_is_known_changes_nothing(server: RunningServer) -> None:
    fill(server)
    assert check(server, P) in UNKNOWN
    assert check(server, P) == len(P) - 1
    assert check(server, P + X) == len(P)
    assert check(server, P[:-1]) == len(P) - 2
    assert check(server, P[:17] + Y) == 17
    fill(server)
    assert check(server, P) in UNKNOWN
    assert check(server, P) == len(P) - 1


def test_two_turns(server: RunningServer) -> None:
    """The second finds prompt and answer of the first, but perhaps for the answer's last token."""
    first = random_prompt(50, seed=4)
    check(server, first)
    answer = reference(Path(str(server.model_dir)), first, TOKENS).tokens
    found = check(server, first + answer + X)
    assert len(first) + TOKENS - 1 <= found <= len(first) + TOKENS


@pytest.mark.parametrize("known", [False, True])
def test_one_prompt_four_times_at_once(server: RunningServer, known: bool) -> None:
    prompt = random_prompt(97, seed=5 + known)
    if known:
        check(server, prompt)
    with ThreadPoolExecutor(4) as pool:
        found = sorted(pool.map(lambda _: check(server, prompt), range(4)))
    assert found == [96] * 4 if known else found[0] in UNKNOWN


def test_samples_share_their_prompt(server: RunningServer) -> None:
    """The usage tells what the first of them found, and the totals what the others did."""
    prompt = random_prompt(90, seed=7)
    before = server.load()["cached_prompt_tokens_total"]
    found = check(server, prompt, n=3)
    assert found in UNKNOWN
    assert server.load()["cached_prompt_tokens_total"] - before == found + 2 * 89


@pytest.mark.parametrize("known", [0, 1, 40, 80])
def test_prompt_logprobs_are_complete_whatever_is_known(server: RunningServer, known: int) -> None:
    prompt = random_prompt(80, seed=10 + known)
    if known:
        check(server, prompt[:known])
    answer = server.generate(prompt, prompt_logprobs=0, **GREEDY)
    with torch.inference_mode():
        logprobs = reference_model(Path(str(server.model_dir)))(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(logprobs[place - 1, prompt[place]]) for place in range(1, len(prompt))]
    first, *others = answer["prompt_logprobs"]
    assert first is None and [list(place) for place in others] == [[str(id)] for id in prompt[1:]]
    assert [next(iter(place.values())) for place in others] == pytest.approx(expected, abs=1e-3)
    assert answer["cached_tokens"] == 0
    assert check(server, prompt) == len(prompt) - 1


def test_a_request_may_opt_out(server: RunningServer) -> None:
    prompt = random_prompt(70, seed=8)
    assert check(server, prompt, disable_prompt_cache=True) == 0
    assert check(server, prompt) in UNKNOWN
    assert check(server, prompt, disable_prompt_cache=True) == 0
    assert check(server, prompt) == len(prompt) - 1


def test_a_prompt_whose_client_has_left_stays_good(server: RunningServer) -> None:
    prompt = random_prompt(120, seed=9)
    with server.start_stream(prompt, **GREEDY | dict(max_new_tokens=300)) as stream:
        next(iter(stream))
    server.wait_idle()
    assert check(server, prompt) == len(prompt) - 1


def test_without_a_cache(checkpoints) -> None:
    flags = ("--max_total_token_num", "3000", "--disable_dynamic_prompt_cache")
    with start_server(checkpoints("llama"), *flags) as server:
        assert [check(server, P), check(server, P), check(server, P, n=2)] == [0, 0, 0]
        server.wait_idle()
        assert server.load()["cached_tokens"] == 0


# ---- pauses

POOL = 300
LIMIT = 100
NEVER = "\u9f9c\u9f9c"  # a text that does not come


def features(model: Path) -> list[dict[str, Any]]:
    """What the requests ask for, one each; any of them may be paused and resumed."""
    everything = list(range(256))
    stop_at = reference(model, random_prompt(60, seed=54), LIMIT).tokens[70:74]
    return [
        dict(),
        dict(temperature=1.0, seed=7),
        dict(repetition_penalty=1.3, input_penalty=True),
        dict(presence_penalty=1.0, frequency_penalty=0.5, temperature=0.8, seed=8),
        dict(stop_sequences=[list(stop_at)]),
        dict(stop_sequences=["e"], min_new_tokens=60, temperature=1.0, seed=9),
        dict(stop_token_ids=everything[:40], min_new_tokens=50),
        dict(logprobs=3, temperature=0.7, top_k=20, top_p=0.9, seed=10),
        dict(prompt_logprobs=0),
        dict(n=2, temperature=1.0, seed=11, logprobs=1),
        dict(stream=True, logit_bias={"65": 3.0}, temperature=1.0, min_p=0.02, seed=12),
        dict(
            allowed_token_ids=everything[32:120], exponential_decay_length_penalty=[30, 1.05], temperature=1.0, seed=1
        ),
    ]


def ask(server: RunningServer, number: int, asked: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, a stream's events put together."""
    asked = dict(ignore_eos=True, max_new_tokens=LIMIT, do_sample="temperature" in asked) | asked
    asked["stop_sequences"] = [NEVER, *asked.get("stop_sequences", [])]
    prompt = random_prompt(60, seed=50 + number)
    if not asked.pop("stream", False):
        return server.generate(prompt, return_details=True, **asked)
    events = server.stream(prompt, **asked)
    tokens = [event["token"] for event in events]
    return dict(
        tokens=tokens,
        generated_text=["".join(token["text"] for token in tokens)],
        finish_reason=events[-1]["finish_reason"],
        logprobs=[token["logprob"] for token in tokens],
    )


def assert_same_answer(answer: dict[str, Any], alone: dict[str, Any]) -> None:
    assert answer.keys() == alone.keys()
    for name in ("generated_text", "finish_reason", "count_output_tokens", "prompt_token_ids"):
        assert answer.get(name) == alone.get(name), name
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        assert_close(answer.get(name), alone.get(name), name)


def assert_close(one: Any, other: Any, name: str) -> None:
    """Equal, numbers up to what a batch's size changes in float32."""
    if isinstance(one, float):
        assert one == pytest.approx(other, abs=1e-3), name
    elif isinstance(one, list):
        assert len(one) == len(other), name
        for mine, theirs in zip(one, other):
            assert_close(mine, theirs, name)
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), name
        for key in one:
            assert_close(one[key], other[key], name)
    else:
        assert one == other, name


@pytest.fixture(scope="module")
def alone(checkpoints) -> list[dict[str, Any]]:
    """What each gives alone, in a pool that holds everything and without a cache."""
    model = checkpoints("llama")
    with start_server(model, "--max_total_token_num", "4096", "--disable_dynamic_prompt_cache") as server:
        answers = [ask(server, number, asked) for number, asked in enumerate(features(model))]
        assert server.load()["pauses_total"] == 0
        return answers


def expect_short_outputs(server: RunningServer) -> None:
    """A past of outputs of one token, so that too much is admitted."""
    ids = list(range(40))
    asked = dict(max_new_tokens=LIMIT, allowed_token_ids=ids, stop_token_ids=ids)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: server.generate([number], **asked), range(200)))


@pytest.mark.parametrize(
    ("policy", "chunk"),
    [
        ("aggressive", "16"),
        ("past_future", "2048"),
        pytest.param("aggressive", "2048", marks=pytest.mark.slow),
        pytest.param("past_future", "16", marks=pytest.mark.slow),
        pytest.param("conservative", "16", marks=pytest.mark.slow),
    ],
)
def test_a_small_pool_changes_nothing(checkpoints, alone: list[dict[str, Any]], policy: str, chunk: str) -> None:
    """Twelve requests of 60 + 100 tokens in 300 slots, with whatever can be asked for, twice."""
    model = checkpoints("llama")
    flags = ("--max_total_token_num", str(POOL), "--schedule_policy", policy, "--chunked_prefill_size", chunk)
    with start_server(model, *flags) as server:
        if policy == "past_future":
            expect_short_outputs(server)
        together = threading.Barrier(len(alone))

        def one(number: int, asked: dict[str, Any]) -> dict[str, Any]:
            together.wait()
            return ask(server, number, asked)

        for _ in range(2):
            with ThreadPoolExecutor(len(alone)) as pool:
                for answer, expected in zip(pool.map(one, range(len(alone)), features(model)), alone, strict=True):
                    assert_same_answer(answer, expected)
        server.wait_idle()
        load = server.load()
        assert (load["paused"], load["waiting"]) == (0, 0)
        assert load["pauses_total"] == 0 if policy == "conservative" else load["pauses_total"] > 0
        assert load["used_peak"] <= POOL
