"""Cases c of the bug bank: what a request may be. Too much is a 400 that names the limit; nothing is clamped."""

from __future__ import annotations

import json
import random
import re
import string
import threading
import time
from typing import Any

import pytest
from support.checkpoints import NO_TOKEN, SCRIPTED, VOCABULARY, random_prompt
from support.client import Client
from support.server import RunningServer, assert_refused, failed_start, start_server, text_of

from lightllm.server.api_models import Parameters

CONTEXT = 512
PAUSE = 10.0  # seconds without an answer or a token that would mean that something froze


def room_of(server: RunningServer, inputs: Any, **parameters: Any) -> int:
    asked = dict(do_sample=False, ignore_eos=True) | parameters
    answer = server.generate(inputs, **asked)
    events = server.stream(inputs, **asked)
    assert answer["count_output_tokens"] == len(events)
    assert answer["finish_reason"] == events[-1]["finish_reason"] == "length"
    assert answer["generated_text"] == [text_of(events)]
    return len(events)


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("length", [CONTEXT - 100, CONTEXT - 2, CONTEXT - 1])
def test_case_31_prompts_that_fit(rand: RunningServer, length: int, as_text: bool) -> None:
    inputs = "a" * length if as_text else list(random_prompt(length))
    room = CONTEXT - length
    assert room_of(rand, inputs) == room
    assert room_of(rand, inputs, max_new_tokens=1) == 1
    assert room_of(rand, inputs, max_new_tokens=room) == room
    for asked in (room + 1, 100 + room, 10**12):
        error = rand.refusal(inputs, max_new_tokens=asked)
        assert error["param"] == "max_new_tokens" and str(CONTEXT) in error["message"]


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 2 * CONTEXT, 50 * CONTEXT])
def test_case_31_prompts_that_do_not(rand: RunningServer, length: int, as_text: bool) -> None:
    inputs = "a" * length if as_text else list(random_prompt(length))
    for parameters in ({}, dict(max_new_tokens=1), dict(max_new_tokens=100), dict(min_new_tokens=3)):
        error = rand.refusal(inputs, **parameters)
        assert error["param"] == "inputs" and str(CONTEXT) in error["message"]


def test_case_31_the_pool_is_a_limit_too(serve) -> None:
    server = serve("script", "--max_total_token_num", "64")
    assert server.generate("G", do_sample=False)["count_output_tokens"] == 63
    assert server.generate("G", do_sample=False, max_new_tokens=63)["count_output_tokens"] == 63
    assert server.generate("a" * 62 + "G", do_sample=False, max_new_tokens=1)["count_output_tokens"] == 1
    assert "64" in server.refusal("G", max_new_tokens=64)["message"]
    assert "64" in server.refusal("G" * 64)["message"]


def test_case_31_the_flag_is_a_limit_too(serve) -> None:
    server = serve("script", "--max_req_total_len", "32")
    assert server.generate("G", do_sample=False)["count_output_tokens"] == 31
    assert "32" in server.refusal("G", max_new_tokens=32)["message"]
    assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 32


@pytest.mark.parametrize(
    ("flag", "value", "limit"),
    [
        ("--running_max_req_size", "9" * 20, r"at most \d+ fit"),
        ("--max_req_total_len", "513", "512 tokens"),
        ("--eos_id", "320", r"0\.\.319"),
    ],
)
def test_a_flag_that_cannot_be_kept_is_told_at_start(checkpoints, flag: str, value: str, limit: str) -> None:
    said = failed_start(checkpoints("llama"), flag, value)
    assert f"{flag} {value}" in said and re.search(limit, said), said


@pytest.mark.parametrize(
    "ids",
    [
        [32, VOCABULARY],
        [-1],
        [2**31],
        [2**31 - 1],
        [-(2**31)],
        [2**32 + 32],
        [5279552648203111001],
        [2**70],
        [1.5],
        [32.0],
        [True],
        [None],
        ["A"],
        [[32], [999999]],
        [32] * 400 + [VOCABULARY],
    ],
)
def test_case_33_ids_that_are_no_tokens(script: RunningServer, ids: list[Any]) -> None:
    assert script.refusal(ids, max_new_tokens=4)["param"] == "inputs"


@pytest.mark.parametrize("token", [256, 258, 259, NO_TOKEN, VOCABULARY - 1])
def test_case_33_ids_of_the_model_alone(script: RunningServer, token: int) -> None:
    answer = script.generate([token, 32], do_sample=False, return_details=True, prompt_logprobs=2, logprobs=20)
    assert answer["generated_text"] == [SCRIPTED]


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "stop_sequences"])
@pytest.mark.parametrize("token", [VOCABULARY, -1, 2**31, 2**40])
def test_case_33_ids_in_parameters(script: RunningServer, field: str, token: int) -> None:
    value = [[token]] if field == "stop_sequences" else [token]
    assert field in script.refusal("A", **{field: value})["message"]


@pytest.mark.parametrize("inputs", ["", [], [[]], ["", "A"], None, {}, 5, True, [None]])
def test_case_34_no_prompt(script: RunningServer, inputs: Any) -> None:
    assert script.refusal(inputs)["param"] == "inputs"


def test_case_34_missing_keys(script: RunningServer) -> None:
    for body, key in (({"parameters": {}}, "inputs"), ({"inputs": "A"}, "parameters"), ({}, "inputs")):
        for path in ("/generate", "/generate_stream", "/"):
            assert assert_refused(script.post(path, body))["param"] == key


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs":"A","parameters":{}}'.replace(b"A", b"\xff\xfe"),
        b'{"inputs":"A","parameters":{',
        b"[1]",
        b"",
        b"null",
        b"7",
        b'"A"',
        b"\x80\x04\x95",
        b'{"inputs":"\\ud800","parameters":{}}',
        b'{"inputs":"A","parameters":{"stop_sequences":["\\uDC00"]}}',
        b'{"inputs":' + b"[" * 100_000,
        b'{"inputs":' + b"[" * 100 + b"]" * 100 + b',"parameters":{}}',
        b'{"inputs":[' + b"9" * 5000 + b'],"parameters":{}}',
        b'{"inputs":"A","parameters":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"inputs":"A","parameters":[]}',
        b'{"inputs":"A","parameters":"greedy"}',
        b'{"inputs":"A","parameters":{},"extra":1}',
        b'{"inputs":"A","parameters":{"temprature":1}}',
    ],
)
def test_case_37_bad_bodies(script: RunningServer, body: bytes) -> None:
    for path in ("/generate", "/generate_stream", "/", "/tokens"):
        assert_refused(script.post(path, body))


def test_case_37_odd_bodies_that_are_right(script: RunningServer) -> None:
    zero = script.generate("\0A", do_sample=False)
    assert (zero["generated_text"], zero["prompt_tokens"]) == ([SCRIPTED], 2)
    twice = b'{"inputs":"B","inputs":"A","parameters":{"do_sample":false}}'
    assert script.post("/generate", twice).json()["generated_text"] == [SCRIPTED]
    spaced = b' \n{"inputs" : "\\u0041", "parameters": {"do_sample":false}}\n'
    assert script.post("/generate", spaced).json()["generated_text"] == [SCRIPTED]
    pair = b'{"inputs":"\\ud83e\\udee0","parameters":{"max_new_tokens":1}}'
    assert script.post("/generate", pair).json()["prompt_tokens"] == 4


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_case_37_wrong_content_type(script: RunningServer, kind: str) -> None:
    body = json.dumps({"inputs": "A", "parameters": {"do_sample": False}}).encode()
    answer = script.post("/generate", body, {"Content-Type": kind})
    assert answer.json()["generated_text"] == [SCRIPTED]  # curl -d says it is a form
    status, said = (415, "application/json") if kind else (400, "not valid JSON")
    assert said in assert_refused(script.post("/generate", b"inputs=A", {"Content-Type": kind}), status)["message"]


def test_case_37_wrong_path_and_method(script: RunningServer) -> None:
    assert_refused(script.get("/nothing"), 404)
    assert_refused(script.post("/generate/", {}), 404)
    assert_refused(script.post("/health", {}), 405)
    assert_refused(script.get("/generate"), 405)
    assert_refused(script.request("PUT", "/generate", {}), 405)
    assert_refused(script.request("DELETE", "/token_load"), 405)


def test_case_37_an_unknown_parameter_is_named(script: RunningServer) -> None:
    assert "temprature" in script.refusal("A", temprature=1)["message"]


@pytest.mark.parametrize("value", [0, -1, 10**12, "5", 1.5, True, [], 2**63])
def test_case_38_max_new_tokens_refused(script: RunningServer, value: Any) -> None:
    assert "max_new_tokens" in script.refusal("G", max_new_tokens=value)["message"]


def test_case_38_max_new_tokens_absent(script: RunningServer) -> None:
    """The rest of the context."""
    for parameters in ({}, dict(max_new_tokens=None)):
        assert script.generate("G", do_sample=False, **parameters)["count_output_tokens"] == CONTEXT - 1
    assert script.generate("G", do_sample=False, max_new_tokens=3)["count_output_tokens"] == 3


@pytest.mark.parametrize("value", [-1, 6, "2", 1.5])
def test_case_38_min_new_tokens_refused(script: RunningServer, value: Any) -> None:
    assert "min_new_tokens" in script.refusal("G", max_new_tokens=5, min_new_tokens=value)["message"]


def test_case_38_min_new_tokens(script: RunningServer) -> None:
    for asked in (1, 12, 13, 14, 30):
        answer = script.generate("A", do_sample=False, min_new_tokens=asked, max_new_tokens=40)
        assert answer["count_output_tokens"] >= asked
        assert answer["generated_text"][0].startswith(SCRIPTED)
    assert script.generate("G", do_sample=False, min_new_tokens=5, max_new_tokens=5)["count_output_tokens"] == 5


def test_case_39_explicit_nulls(script: RunningServer) -> None:
    nulls = dict.fromkeys(Parameters.__struct_fields__)
    assert script.generate("A", **nulls) == script.generate("A")
    assert script.text("A", **nulls) == SCRIPTED
    assert script.stream("A", **nulls) == script.stream("A")
    body = {"inputs": "A", "parameters": nulls, "multimodal_params": None, "stream": None}
    assert script.post("/", body).json()["generated_text"] == [SCRIPTED]
    for name in Parameters.__struct_fields__:
        assert script.text("A", **{name: None}) == SCRIPTED


def test_case_39_null_as_parameters_is_none(script: RunningServer) -> None:
    body = {"inputs": "A", "parameters": None}
    assert assert_refused(script.post("/generate", body))["param"] == "parameters"


class Watch:
    """Polls /health in a thread; `worst` is the longest answer in seconds."""

    def __init__(self, server: Client):
        self.worst = 0.0
        self.bad: list[int] = []
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def _poll(self) -> None:
        while not self._over.wait(0.1):
            start = time.monotonic()
            status = self._server.get("/health").status
            self.worst = max(self.worst, time.monotonic() - start)
            if status != 200:
                self.bad.append(status)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_case_41_a_long_text_freezes_nothing(checkpoints) -> None:
    generator = random.Random(0)
    words = "".join(generator.choices(string.ascii_letters + "   ", k=20_000_000))
    with start_server(checkpoints("slow"), "--max_total_token_num", "16384") as server:
        huge = ["a" * 20_000_000, words, "a" * 12_000_000, words[:12_000_000], words[: 8 * 8192]]
        statuses: list[int] = []

        def post_all() -> None:
            for text in huge:
                statuses.append(server.post("/generate", {"inputs": text, "parameters": {}}).status)

        with Watch(server) as health, server.start_stream([1, 2, 3], ignore_eos=True, do_sample=False) as stream:
            poster = threading.Thread(target=post_all)
            last, longest = time.monotonic(), 0.0
            for i, _ in enumerate(stream):
                now = time.monotonic()
                longest, last = max(longest, now - last), now
                if i == 5:
                    poster.start()
                if i > 5 and not poster.is_alive():
                    break
            poster.join()
        assert statuses[:2] == [413, 413] and statuses[2:] == [400] * 3
        assert not health.bad and health.worst < PAUSE and longest < PAUSE
        server.wait_idle()
